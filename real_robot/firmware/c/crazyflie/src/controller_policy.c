/* Crazyflie app: an exported policy as the firmware's out-of-tree controller (CONFIG_CONTROLLER_OOT).

   Built within crazyflie-firmware of August 2026 (2a18fc2) and not flown: try it with the vehicle held first. policy_act()
   runs in the stabilizer task and takes @SCRATCH@ bytes of its stack and some for calls; raise STABILIZER_TASK_STACKSIZE
   where that is too much. */
#include <stdbool.h>
#include <stdint.h>

#include "FreeRTOS.h"
#include "app.h"
#include "controller.h"
#include "stabilizer_types.h"
#include "task.h"

#include "../../policy.c" /* an app is built from one folder */
#include "../../flight/flight.c"

#define RADIANS_PER_DEGREE 0.0174532925f
#define STEPS_PER_ACTION @STEPS@ /* of the stabilizer loop, which runs at 1000 Hz; in between the forces are held */

static bool healthy;
static bool flying;
static bool lost; /* until it is disarmed */
static float forces[POLICY_OUTPUTS];

void appMain(void)
{
  for (;;) {
    vTaskDelay(M2T(2000));
  }
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
    const quaternion_t q = state->attitudeQuaternion;
    const struct flight_state seen = {
      .position = {state->position.x - setpoint->position.x, state->position.y - setpoint->position.y,
                   state->position.z - setpoint->position.z},
      .attitude = {q.w, q.x, q.y, q.z},
      .velocity = {state->velocity.x, state->velocity.y, state->velocity.z},
      .angular_velocity = {sensors->gyro.x * RADIANS_PER_DEGREE, sensors->gyro.y * RADIANS_PER_DEGREE,
                           sensors->gyro.z * RADIANS_PER_DEGREE},
    };
    float action[POLICY_OUTPUTS];
    if (!flying) {
      flight_begin();
    }
    flying = true;
    lost = !flight_act(&seen, action);
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
