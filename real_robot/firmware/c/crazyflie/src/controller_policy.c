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
#define STEPS_PER_ACTION @STEPS@ /* of the stabilizer loop, which runs at 1000 Hz; in between the forces are held */
#ifndef POSITION_ERROR_MAX_M
#define POSITION_ERROR_MAX_M 0.5f /* of each axis: training's drones never were further away than 0.6 m */
#endif
#ifndef HOLD_S
#define HOLD_S 0.5f /* for which it flies level where measurements are infinite or no numbers; then motors stop */
#endif
#define HOLD_ACTIONS ((int)(HOLD_S / POLICY_CONTROL_DT_S))

static bool healthy;
static bool flying;
static bool lost;   /* for longer than HOLD_S, until it is disarmed */
static int unknown; /* actions in a row without whole measurements */
static float level[POLICY_INPUTS]; /* what stands in for measurements: no error, no motion, the last attitude */
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
  float first[POLICY_OUTPUTS];
  for (int i = 0; i < POLICY_OUTPUTS; i++) {
    first[i] = POLICY_FIRST_ACTION;
  }
  policy_reset();
  for (int age = 0; age < @HISTORY@; age++) {
    remember(first);
  }
  for (int i = 0; i < POLICY_INPUTS; i++) {
    level[i] = 0.0f;
  }
#ifdef POLICY_OBSERVATION_ROTATION
  for (int axis = 0; axis < 3; axis++) {
    level[POLICY_OBSERVATION_ROTATION + 4 * axis] = 1.0f;
  }
#endif
  unknown = 0;
}

static float bounded(const float error)
{
  return error > POSITION_ERROR_MAX_M ? POSITION_ERROR_MAX_M : error < -POSITION_ERROR_MAX_M ? -POSITION_ERROR_MAX_M : error;
}

/* Replace what is infinite or no number, a part of the observation as a whole; returns whether nothing was. */
static bool repaired(float *observation, const int first, const int count)
{
  if (policy_finite(&observation[first], count)) {
    return true;
  }
  for (int i = first; i < first + count; i++) {
    observation[i] = level[i];
  }
  return false;
}

/* Whether measurements have been whole within the last HOLD_S; what they lack is replaced. */
static bool usable(float *observation)
{
  bool whole = true;
@REPAIR@
#ifdef POLICY_OBSERVATION_ROTATION
  for (int i = POLICY_OBSERVATION_ROTATION; i < POLICY_OBSERVATION_ROTATION + 9; i++) {
    level[i] = observation[i];
  }
#endif
  unknown = whole ? 0 : unknown + 1;
  return unknown <= HOLD_ACTIONS;
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
  lost = false;
}

bool controllerOutOfTreeTest(void)
{
  return healthy;
}

void controllerOutOfTree(control_t *control, const setpoint_t *setpoint, const sensorData_t *sensors,
                         const state_t *state, const stabilizerStep_t stabilizerStep)
{
  if (!healthy || lost || setpoint->mode.z == modeDisable) {
    flying = false;
    lost = lost && setpoint->mode.z != modeDisable;
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
    const bool valid = usable(observation) && policy_act(observation, action) == POLICY_OK;
    if (!valid) {
      lost = true;
      for (int i = 0; i < POLICY_OUTPUTS; i++) {
        action[i] = -1.0f;
      }
    }
    remember(action);
    for (int i = 0; i < POLICY_OUTPUTS; i++) { /* rotor speed, linear in the action; thrust goes with its square */
      const float speed = 0.5f * (action[i] + 1.0f);
      forces[i] = speed * speed;
    }
  }
  control->controlMode = controlModeForce;
  for (int i = 0; i < POLICY_OUTPUTS; i++) {
    control->normalizedForces[i] = forces[i];
  }
}
