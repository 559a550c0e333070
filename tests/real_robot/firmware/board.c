/* Board functions for the STM32F405 example under QEMU: after ten actions the emulator ends, with status 0 where the
   policy was healthy and its actions those of policy.h's range. */
#include <stdint.h>

#include "policy.h"

#ifndef HELD
#define HELD POLICY_ACTIONS /* calls of board_act for each observation */
#endif

static int health, actions, observations;

static void stop(int good)
{
  register uint32_t operation __asm__("r0") = 0x18u;
  register uint32_t reason __asm__("r1") = good ? 0x20026u : 0x20023u;
  __asm__ volatile("bkpt 0xab" : : "r"(operation), "r"(reason) : "memory");
}

void board_start(int status)
{
  health = status;
  if (status != POLICY_OK) {
    stop(0);
  }
}

void board_observe(float observation[POLICY_INPUTS])
{
  observations++;
  for (int i = 0; i < POLICY_INPUTS; i++) {
    observation[i] = 0.01f * (float)(actions - i);
  }
}

void board_act(const float *action, int status)
{
  if (status != POLICY_OK || actions / HELD != observations - 1 || !(action[0] >= -1.0f && action[0] <= 1.0f)) {
    stop(0);
  }
  if (++actions == 10) {
    stop(health == POLICY_OK);
  }
}
