/* Runs an exported policy on this machine: inputs.bin to outputs.bin, and what policy_check() says to the console. */
#include <stdio.h>

#include "policy.h"

int main(void)
{
  float observation[POLICY_INPUTS], action[POLICY_OUTPUTS];
  FILE *const inputs = fopen("inputs.bin", "rb");
  FILE *const outputs = fopen("outputs.bin", "wb");
  if (!inputs || !outputs) {
    return 2;
  }
  printf("%d\n", policy_check());
  for (int step = 0; fread(observation, sizeof observation, 1, inputs) == 1; step++) {
    if (step % STEPS == 0) {
      policy_reset();
    }
    if (policy_act(observation, action) != POLICY_OK || fwrite(action, sizeof action, 1, outputs) != 1) {
      return 3;
    }
  }
  return fclose(outputs) == 0 && fclose(inputs) == 0 ? 0 : 4;
}
