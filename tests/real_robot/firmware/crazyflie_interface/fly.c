/* Flies the Crazyflie example without a Crazyflie: states from the console to forces on it. The PID controller is the
   firmware's; here it answers in its control mode, which says that it was called, and whether it was restarted before. */
#include <stdio.h>

#include "controller.h"
#include "controller_pid.h"

static int begun, calls, restarted;

void controllerPidInit(void)
{
  begun = 1;
}

bool controllerPidTest(void)
{
  return begun;
}

void controllerPid(control_t *control, const setpoint_t *setpoint, const sensorData_t *sensors, const state_t *state,
                   const stabilizerStep_t stabilizerStep)
{
  (void)sensors, (void)state;
  calls++;
  if (calls == 1) {
    restarted = stabilizerStep == 0 && setpoint->mode.z == modeDisable && setpoint->thrust == 0.0f;
  } else {
    restarted = restarted && calls == 2 && stabilizerStep == 0;
  }
  control->controlMode = controlModeLegacy;
  for (int i = 0; i < 4; i++) {
    control->normalizedForces[i] = setpoint->thrust;
  }
}

void vTaskDelay(const uint32_t ticks)
{
  (void)ticks;
}

int main(void)
{
  control_t control = {0};
  setpoint_t setpoint = {0};
  sensorData_t sensors = {0};
  state_t state = {0};
  int x, y, z, roll, pitch, yaw, quat;
  unsigned step;
  controllerOutOfTreeInit();
  printf("%d\n", controllerOutOfTreeTest());
  while (scanf("%u %d %d %d %d %d %d %d %f %f", &step, &x, &y, &z, &roll, &pitch, &yaw, &quat, &setpoint.thrust,
               &setpoint.attitude.yaw) == 10
         && scanf("%f %f %f %f %f %f %f %f %f %f %f %f %f %f %f %f", &setpoint.position.x, &setpoint.position.y,
                  &setpoint.position.z, &state.position.x, &state.position.y, &state.position.z,
                  &state.attitudeQuaternion.w, &state.attitudeQuaternion.x, &state.attitudeQuaternion.y,
                  &state.attitudeQuaternion.z, &state.velocity.x, &state.velocity.y, &state.velocity.z,
                  &sensors.gyro.x, &sensors.gyro.y, &sensors.gyro.z) == 16) {
    const stab_mode_t modes[7] = {(stab_mode_t)x, (stab_mode_t)y, (stab_mode_t)z, (stab_mode_t)roll, (stab_mode_t)pitch,
                                  (stab_mode_t)yaw, (stab_mode_t)quat};
    setpoint.mode.x = modes[0];
    setpoint.mode.y = modes[1];
    setpoint.mode.z = modes[2];
    setpoint.mode.roll = modes[3];
    setpoint.mode.pitch = modes[4];
    setpoint.mode.yaw = modes[5];
    setpoint.mode.quat = modes[6];
    calls = 0;
    controllerOutOfTree(&control, &setpoint, &sensors, &state, step);
    for (int i = 0; i < 4; i++) {
      printf("%.9g ", (double)control.normalizedForces[i]);
    }
    printf("%d %d\n", calls == 2 && restarted, control.controlMode);
  }
  return 0;
}
