/* An exported policy on a bare STM32F405: checked at boot, then run at its rate.

   The three board functions are yours: they are weak here and do nothing useful. The clock is the 16 MHz oscillator that
   runs after reset; a board_start() that starts the PLL (168 MHz) also sets CORE_HZ. */
#include <stdint.h>

#include "policy.h"

#ifndef CORE_HZ
#define CORE_HZ 16000000.0f
#endif

#ifndef LOOP_HZ
#define LOOP_HZ (1.0f / POLICY_CONTROL_DT_S) /* how often board_act is called: a multiple of the policy's rate */
#endif
#define LOOPS_PER_ACTION ((int)(LOOP_HZ * POLICY_CONTROL_DT_S + 0.5f))

#define WEAK __attribute__((weak))

static volatile uint32_t *const systick = (volatile uint32_t *)0xe000e010u; /* control, reload, value */
static volatile uint32_t ticks;

/* Clocks, sensors and motors; `status` is what policy_check() said. Motors stay off unless it is POLICY_OK. */
WEAK void board_start(int status)
{
  (void)status;
}

/* Fill the observation, in the order and units that policy.h lists. */
WEAK void board_observe(float observation[POLICY_INPUTS])
{
  for (int i = 0; i < POLICY_INPUTS; i++) {
    observation[i] = 0.0f;
  }
}

/* Command one action; it is held for LOOPS_PER_ACTION calls. */
WEAK void board_act(const float *action, int status)
{
  (void)action;
  (void)status;
}

void systick_handler(void)
{
  ticks++;
}

static void wait_for_tick(void)
{
  const uint32_t last = ticks;
  while (ticks == last) {
    __asm__ volatile("wfi");
  }
}

int main(void)
{
  float observation[POLICY_INPUTS], action[POLICY_OUTPUTS];
  const int health = policy_check();
  board_start(health);
  if (health != POLICY_OK) {
    for (;;) {
      __asm__ volatile("wfi");
    }
  }
  systick[1] = (uint32_t)(CORE_HZ * POLICY_CONTROL_DT_S / (float)LOOPS_PER_ACTION) - 1u;
  systick[2] = 0u;
  systick[0] = 7u; /* on, with interrupt, at the clock of the processor */
  for (;;) {
    board_observe(observation);
    const int status = policy_act(observation, action);
    for (int loop = 0; loop < POLICY_ACTIONS * LOOPS_PER_ACTION; loop++) {
      board_act(&action[loop / LOOPS_PER_ACTION * (POLICY_OUTPUTS / POLICY_ACTIONS)], status);
      wait_for_tick();
    }
  }
}
