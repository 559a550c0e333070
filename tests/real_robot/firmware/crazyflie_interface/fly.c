/* Flies the Crazyflie example without a Crazyflie: states from the console to forces on it. */
#include <stdio.h>

#include "controller.h"

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
  int mode;
  unsigned step;
  controllerOutOfTreeInit();
  printf("%d\n", controllerOutOfTreeTest());
  while (scanf("%u %d %f %f %f %f %f %f %f %f %f %f %f %f %f %f %f %f", &step, &mode, &setpoint.position.x,
               &setpoint.position.y, &setpoint.position.z, &state.position.x, &state.position.y, &state.position.z,
               &state.attitudeQuaternion.w, &state.attitudeQuaternion.x, &state.attitudeQuaternion.y,
               &state.attitudeQuaternion.z, &state.velocity.x, &state.velocity.y, &state.velocity.z, &sensors.gyro.x,
               &sensors.gyro.y, &sensors.gyro.z) == 18) {
    setpoint.mode.z = (stab_mode_t)mode;
    controllerOutOfTree(&control, &setpoint, &sensors, &state, step);
    for (int i = 0; i < 4; i++) {
      printf("%.9g ", (double)control.normalizedForces[i]);
    }
    printf("%d\n", control.controlMode);
  }
  return 0;
}
