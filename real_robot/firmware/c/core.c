/* Runs an exported policy on an emulated Cortex-M: inputs.bin to outputs.bin, and measurements to report.bin, files of the
   machine that emulates. Start-up, semihosting and measuring; no C library. */
#include <stddef.h>
#include <stdint.h>

#include "policy.h"

#define LOOP_PASSES 1000000u /* of two instructions */
#define PAINT 0xa5c35a3cu

extern uint32_t ram_data_start[], ram_data_end[], flash_data_start[], bss_start[], bss_end[], stack_limit[], stack_top[];
void start(void);

__attribute__((section(".vectors"), used)) static const void *const vectors[] = {stack_top, (const void *)start};

static volatile uint32_t *const systick = (volatile uint32_t *)0xe000e010u; /* control, reload, value */
static volatile uint32_t *const cpacr = (volatile uint32_t *)0xe000ed88u;

enum { OPEN = 0x01, WRITE = 0x05, READ = 0x06, EXIT = 0x18 };

static uint32_t host(uint32_t operation, const void *argument)
{
  register uint32_t r0 __asm__("r0") = operation;
  register const void *r1 __asm__("r1") = argument;
  __asm__ volatile("bkpt 0xab" : "+r"(r0) : "r"(r1) : "memory");
  return r0;
}

static void stop(uint32_t reason)
{
  host(EXIT, (const void *)(uintptr_t)reason);
  for (;;) {
  }
}

static void require(int condition)
{
  if (!condition) {
    stop(0x20023u); /* run-time error: QEMU exits with status 1 */
  }
}

static uint32_t open_file(const char *name, uint32_t length, uint32_t mode)
{
  const uint32_t block[] = {(uint32_t)(uintptr_t)name, mode, length};
  const uint32_t handle = host(OPEN, block);
  require(handle != 0xffffffffu);
  return handle;
}

/* Whether all of it was read or written. */
static int transfer(uint32_t operation, uint32_t file, const void *data, uint32_t bytes)
{
  const uint32_t block[] = {file, (uint32_t)(uintptr_t)data, bytes};
  return host(operation, block) == 0u;
}

static uint32_t now(void)
{
  return systick[2];
}

static uint32_t since(uint32_t start_value)
{
  return (start_value - now()) & 0xffffffu; /* it counts down, in 24 bits */
}

__attribute__((noinline)) static int empty(const float *observation, float *action)
{
  __asm__ volatile("" : : "r"(observation), "r"(action) : "memory");
  return 0;
}

/* Bytes of stack that `function` uses: the deepest word that is no longer painted. */
__attribute__((noinline)) static uint32_t stack_of(int (*function)(const float *, float *), const float *observation,
                                                   float *action)
{
  uint32_t *here, *word;
  __asm__ volatile("mov %0, sp" : "=r"(here));
  for (word = stack_limit; word < here; word++) {
    *(volatile uint32_t *)word = PAINT;
  }
  function(observation, action);
  for (word = stack_limit; word < here && *(volatile uint32_t *)word == PAINT; word++) {
  }
  return (uint32_t)((uintptr_t)here - (uintptr_t)word);
}

static int check(const float *observation, float *action)
{
  (void)observation;
  (void)action;
  return policy_check();
}

static uint32_t loop_ticks(void)
{
  uint32_t passes = LOOP_PASSES;
  const uint32_t before = now();
  __asm__ volatile("1: subs %0, %0, #1\n bne 1b" : "+r"(passes) : : "cc");
  return since(before);
}

static void run(void)
{
  static float observation[POLICY_INPUTS], action[POLICY_OUTPUTS];
  uint32_t report[5] = {0}; /* check, stack, ticks, empty ticks, loop ticks */
  report[0] = (uint32_t)policy_check();
  report[4] = loop_ticks();
  const uint32_t inputs = open_file("inputs.bin", 10, 1), outputs = open_file("outputs.bin", 11, 5);
  for (uint32_t step = 0; transfer(READ, inputs, observation, sizeof observation); step++) {
    if (step % STEPS == 0u) {
      policy_reset();
    }
    uint32_t before = now();
    const int status = policy_act(observation, action);
    report[2] += since(before);
    before = now();
    empty(observation, action);
    report[3] += since(before);
    require(status == POLICY_OK && transfer(WRITE, outputs, action, sizeof action));
  }
  const uint32_t acting = stack_of(policy_act, observation, action), checking = stack_of(check, observation, action);
  report[1] = acting > checking ? acting : checking;
  require(transfer(WRITE, open_file("report.bin", 10, 5), report, sizeof report));
}

void start(void)
{
  *cpacr |= 0xfu << 20; /* the FPU, before any float */
  __asm__ volatile("dsb\n isb" : : : "memory");
  const uint32_t *from = flash_data_start;
  for (uint32_t *to = ram_data_start; to < ram_data_end; to++) {
    *(volatile uint32_t *)to = *from++;
  }
  for (uint32_t *to = bss_start; to < bss_end; to++) {
    *(volatile uint32_t *)to = 0u;
  }
  systick[1] = 0xffffffu;
  systick[2] = 0u;
  systick[0] = 5u; /* on, at the clock of the processor, without interrupt */
  run();
  stop(0x20026u); /* application exit: QEMU exits with status 0 */
}
