/* What a drone's policy is told, from measurements that may fail: shared by the examples that fly. */
#ifndef FLIGHT_H
#define FLIGHT_H

#include <stdbool.h>

#include "../policy.h"

#ifdef __cplusplus
extern "C" {
#endif

#define FLIGHT_ROTORS (POLICY_OUTPUTS / POLICY_ACTIONS)

/* Frames: the world's z is up and the goal is its origin; the body's x is forward, y left, z up. What is not known is
   infinite or no number. */
struct flight_state {
  float position[3];         /* m */
  float attitude[4];         /* quaternion w, x, y, z, from the body to the world */
  float velocity[3];         /* m/s, world */
  float angular_velocity[3]; /* rad/s, body */
};

/* Forget past actions and measurements: call it when the policy takes over. */
void flight_begin(void);

/* The rotors' set-points in [-1, 1] from standstill to the highest speed, in the order front-right, back-right, back-left,
   front-left; call it once every POLICY_CONTROL_DT_S. The policy acts when the actions of its last chunk are used up, and
   measurements are checked every time. False where they have not been whole for longer than HOLD_S: all set-points are -1
   then. */
bool flight_act(const struct flight_state *state, float action[FLIGHT_ROTORS]);

/* Whether all that the last action was computed from had been measured. */
bool flight_whole(void);

/* Whether all of a state is known. */
bool flight_known(const struct flight_state *state);

#ifdef __cplusplus
}
#endif
#endif
