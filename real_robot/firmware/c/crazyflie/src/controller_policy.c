/* Crazyflie app: an exported policy as the firmware's out-of-tree controller (CONFIG_CONTROLLER_OOT).

   Written against the interface of crazyflie-firmware's stabilizer_types.h and controller.h as of 2024, and compiled
   against declarations of it, not flown: try it with the vehicle held first. policy_act() runs in the stabilizer task and
   takes @SCRATCH@ bytes of its stack and some for calls; raise STABILIZER_TASK_STACKSIZE where that is too much. */
#include <stdbool.h>
#include <stdint.h>

#include "FreeRTOS.h"
#include "app.h"
#include "controller.h"
#include "stabilizer_types.h"
#include "task.h"

#include "../../policy.c" /* an app is built from one folder */

#define RADIANS_PER_DEGREE 0.0174532925f
#define STEPS_PER_ACTION @STEPS@ /* of the stabilizer loop, which runs at 1000 Hz */

static bool healthy;
static bool flying;
static float history[@HISTORY@][POLICY_OUTPUTS]; /* actions, oldest first */
static float forces[POLICY_OUTPUTS];

void appMain(void)
{
  for (;;) {
    vTaskDelay(M2T(2000));
  }
}

static void remember(const float *action)
{
  for (int age = 0; age + 1 < @HISTORY@; age++) {
    for (int i = 0; i < POLICY_OUTPUTS; i++) {
      history[age][i] = history[age + 1][i];
    }
  }
  for (int i = 0; i < POLICY_OUTPUTS; i++) {
    history[@HISTORY@ - 1][i] = action[i];
  }
}

static void begin(void)
{
  const float standstill[POLICY_OUTPUTS] = {-1.0f, -1.0f, -1.0f, -1.0f};
  policy_reset();
  for (int age = 0; age < @HISTORY@; age++) {
    remember(standstill);
  }
}

/* The observation of policy.h; the goal is the origin of its position. */
static void observe(float *observation, const setpoint_t *setpoint, const sensorData_t *sensors, const state_t *state)
{
  int next = 0;
@OBSERVE@
}

void controllerOutOfTreeInit(void)
{
  healthy = policy_check() == POLICY_OK;
  flying = false;
}

bool controllerOutOfTreeTest(void)
{
  return healthy;
}

void controllerOutOfTree(control_t *control, const setpoint_t *setpoint, const sensorData_t *sensors,
                         const state_t *state, const stabilizerStep_t stabilizerStep)
{
  if (!healthy || setpoint->mode.z == modeDisable) {
    flying = false;
    for (int i = 0; i < POLICY_OUTPUTS; i++) {
      forces[i] = 0.0f;
    }
  } else if (!flying || stabilizerStep % STEPS_PER_ACTION == 0) {
    float observation[POLICY_INPUTS], action[POLICY_OUTPUTS];
    if (!flying) {
      begin();
    }
    flying = true;
    observe(observation, setpoint, sensors, state);
    const bool valid = policy_act(observation, action) == POLICY_OK;
    remember(action);
    for (int i = 0; i < POLICY_OUTPUTS; i++) { /* rotor speed, linear in the action; thrust goes with its square */
      const float speed = 0.5f * (action[i] + 1.0f);
      forces[i] = valid ? speed * speed : 0.0f;
    }
  }
  control->controlMode = controlModeForce;
  for (int i = 0; i < POLICY_OUTPUTS; i++) {
    control->normalizedForces[i] = forces[i];
  }
}
