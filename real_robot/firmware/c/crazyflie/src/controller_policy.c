/* Crazyflie app: an exported policy as the firmware's out-of-tree controller (CONFIG_CONTROLLER_OOT).

   The policy flies to set-points of a position, with a heading. All others (velocities, attitudes and thrust of a gamepad,
   rates, full states, none) go to the firmware's PID controller, which also switches the motors off.

   Written for crazyflie-firmware of August 2026 (2a18fc2) and not flown: try it with the vehicle held first. policy_act()
   runs in the stabilizer task and takes @SCRATCH@ bytes of its stack and some for calls; raise STABILIZER_TASK_STACKSIZE
   where that is too much. */
#include <math.h>
#include <stdbool.h>
#include <stdint.h>

#include "FreeRTOS.h"
#include "app.h"
#include "controller.h"
#include "controller_pid.h"
#include "stabilizer_types.h"
#include "task.h"

#include "../../policy.c" /* an app is built from one folder */
#include "../../flight/flight.c"

#define RADIANS_PER_DEGREE 0.0174532925f
#define EVERY_RATE 0 /* a step of the stabilizer loop in which the firmware's controller computes all that it does */
#define STEPS_PER_ACTION @STEPS@ /* of the stabilizer loop, which runs at 1000 Hz; in between the forces are held */

static bool healthy;
static bool flying;
static bool lost; /* until a set-point switches the motors off */
static float forces[FLIGHT_ROTORS];

void appMain(void)
{
  for (;;) {
    vTaskDelay(M2T(2000));
  }
}

void controllerOutOfTreeInit(void)
{
  controllerPidInit();
  healthy = policy_check() == POLICY_OK;
  flying = false;
  lost = false;
}

bool controllerOutOfTreeTest(void)
{
  return healthy && controllerPidTest();
}

/* Whether a set-point is a position, in all three axes, and asks for nothing of the attitude but a heading. */
static bool is_position(const setpoint_t *setpoint)
{
  return setpoint->mode.x == modeAbs && setpoint->mode.y == modeAbs && setpoint->mode.z == modeAbs
         && setpoint->mode.roll == modeDisable && setpoint->mode.pitch == modeDisable
         && setpoint->mode.quat == modeDisable && setpoint->mode.yaw != modeVelocity;
}

/* Whether a set-point switches the motors off: nothing is controlled, and there is no thrust. */
static bool is_off(const setpoint_t *setpoint)
{
  return setpoint->mode.x == modeDisable && setpoint->mode.y == modeDisable && setpoint->mode.z == modeDisable
         && !(setpoint->thrust > 0.0f);
}

/* The state in flight.h's frame: its origin is the set-point, and its x points where the set-point's heading does. */
static struct flight_state relative(const setpoint_t *setpoint, const sensorData_t *sensors, const state_t *state)
{
  const float heading = setpoint->mode.yaw == modeAbs ? setpoint->attitude.yaw * RADIANS_PER_DEGREE : 0.0f;
  const float c = cosf(heading), s = sinf(heading), half_c = cosf(0.5f * heading), half_s = sinf(0.5f * heading);
  const float x = state->position.x - setpoint->position.x, y = state->position.y - setpoint->position.y;
  const quaternion_t q = state->attitudeQuaternion;
  const struct flight_state seen = {
    .position = {c * x + s * y, c * y - s * x, state->position.z - setpoint->position.z},
    .attitude = {half_c * q.w + half_s * q.z, half_c * q.x + half_s * q.y, half_c * q.y - half_s * q.x,
                 half_c * q.z - half_s * q.w},
    .velocity = {c * state->velocity.x + s * state->velocity.y, c * state->velocity.y - s * state->velocity.x,
                 state->velocity.z},
    .angular_velocity = {sensors->gyro.x * RADIANS_PER_DEGREE, sensors->gyro.y * RADIANS_PER_DEGREE,
                         sensors->gyro.z * RADIANS_PER_DEGREE},
  };
  return seen;
}

/* The firmware's controller. Where it takes over in flight it first forgets its integrals and its heading of before, as it
   does when motors are off, and then computes everything at once, whatever its rates. */
static void follow_with_pid(control_t *control, const setpoint_t *setpoint, const sensorData_t *sensors,
                            const state_t *state, const stabilizerStep_t step)
{
  static const setpoint_t off = {0};
  if (flying) {
    controllerPid(control, &off, sensors, state, EVERY_RATE);
  }
  controllerPid(control, setpoint, sensors, state, step);
}

void controllerOutOfTree(control_t *control, const setpoint_t *setpoint, const sensorData_t *sensors,
                         const state_t *state, const stabilizerStep_t stabilizerStep)
{
  lost = lost && !is_off(setpoint);
  if (healthy && !lost && !is_position(setpoint)) {
    follow_with_pid(control, setpoint, sensors, state, flying ? EVERY_RATE : stabilizerStep);
    flying = false;
    return;
  }
  if (!healthy || lost) {
    flying = false;
    for (int i = 0; i < FLIGHT_ROTORS; i++) {
      forces[i] = 0.0f;
    }
  } else if (!flying || stabilizerStep % STEPS_PER_ACTION == 0) {
    const struct flight_state seen = relative(setpoint, sensors, state);
    float action[FLIGHT_ROTORS];
    if (!flying) {
      flight_begin();
    }
    flying = true;
    lost = !flight_act(&seen, action);
    for (int i = 0; i < FLIGHT_ROTORS; i++) { /* rotor speed, linear in the action; thrust goes with its square */
      const float speed = 0.5f * (action[i] + 1.0f);
      forces[i] = speed * speed;
    }
  }
  control->controlMode = controlModeForce;
  for (int i = 0; i < FLIGHT_ROTORS; i++) {
    control->normalizedForces[i] = forces[i];
  }
}
