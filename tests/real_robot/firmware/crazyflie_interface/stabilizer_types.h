/* Declarations of ours with the names and types that the example uses, so that it can be compiled without the Crazyflie
   firmware. They are no part of that firmware. */
#pragma once
#include <stdbool.h>
#include <stdint.h>

typedef uint32_t stabilizerStep_t;
typedef struct { float x, y, z; } Axis3f;
struct vec3_s { uint32_t timestamp; float x, y, z; };
typedef struct vec3_s point_t;
typedef struct vec3_s velocity_t;
typedef struct { float x, y, z, w; } quaternion_t;
typedef struct { Axis3f acc, gyro; } sensorData_t; /* gyro: deg/s */
typedef struct { quaternion_t attitudeQuaternion; point_t position; velocity_t velocity; } state_t;
typedef enum { controlModeLegacy = 0, controlModeForceTorque = 1, controlModeForce = 2 } control_mode_t;
typedef struct { float normalizedForces[4]; control_mode_t controlMode; } control_t;
typedef enum { modeDisable = 0, modeAbs, modeVelocity } stab_mode_t;
typedef struct { uint32_t timestamp; float roll, pitch, yaw; } attitude_t; /* deg */
typedef struct {
  attitude_t attitude, attitudeRate;
  quaternion_t attitudeQuaternion;
  float thrust;
  point_t position;
  velocity_t velocity;
  bool velocity_body;
  struct { stab_mode_t x, y, z, roll, pitch, yaw, quat; } mode;
} setpoint_t;
