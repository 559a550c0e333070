/* Bounds and repairs what a policy observes, and keeps its past actions; see flight.h. policy_act() takes @SCRATCH@ bytes
   of stack and some for calls. */
#include "flight.h"

#include "../policy_kernels.h"

#ifndef POSITION_ERROR_MAX_M
#define POSITION_ERROR_MAX_M 0.5f /* of each axis: training's drones never were further away than 0.6 m */
#endif
#ifndef HOLD_S
#define HOLD_S 0.5f /* for which it flies level where measurements are infinite or no numbers; then motors stop */
#endif
#define HOLD_ACTIONS ((int)(HOLD_S / POLICY_CONTROL_DT_S))

static int unknown; /* actions in a row without whole measurements */
static float level[POLICY_INPUTS]; /* what stands in for measurements: no error, no motion, the last attitude */
static float history[@HISTORY@][FLIGHT_ROTORS]; /* actions, oldest first */
static float chunk[POLICY_OUTPUTS]; /* what the policy decided last */
static int used; /* actions of the chunk */

static void remember(const float *action)
{
  for (int age = 0; age + 1 < @HISTORY@; age++) {
    for (int i = 0; i < FLIGHT_ROTORS; i++) {
      history[age][i] = history[age + 1][i];
    }
  }
  for (int i = 0; i < FLIGHT_ROTORS; i++) {
    history[@HISTORY@ - 1][i] = action[i];
  }
}

void flight_begin(void)
{
  float first[FLIGHT_ROTORS];
  for (int i = 0; i < FLIGHT_ROTORS; i++) {
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
  used = POLICY_ACTIONS;
}

bool flight_whole(void)
{
  return unknown == 0;
}

bool flight_known(const struct flight_state *state)
{
  return policy_finite(state->position, 3) && policy_finite(state->attitude, 4) && policy_finite(state->velocity, 3)
         && policy_finite(state->angular_velocity, 3);
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

/* The observation of policy.h. */
static void observe(float *observation, const struct flight_state *state)
{
  int next = 0;
@OBSERVE@
}

/* Whether there is a next action: one of the chunk, or of a new one. */
static bool decided(const float *observation)
{
  if (used == POLICY_ACTIONS) {
    if (policy_act(observation, chunk) != POLICY_OK) {
      return false;
    }
    used = 0;
  }
  return true;
}

bool flight_act(const struct flight_state *state, float action[FLIGHT_ROTORS])
{
  float observation[POLICY_INPUTS];
  observe(observation, state);
  const bool valid = usable(observation) && decided(observation);
  for (int i = 0; i < FLIGHT_ROTORS; i++) {
    action[i] = valid ? chunk[used * FLIGHT_ROTORS + i] : -1.0f;
  }
  used = valid ? used + 1 : POLICY_ACTIONS;
  remember(action);
  return valid;
}
