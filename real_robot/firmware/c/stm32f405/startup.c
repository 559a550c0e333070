/* Start of a bare STM32F405: vectors, FPU, memory, main. */
#include <stdint.h>

extern uint32_t data_start[], data_end[], data_in_flash[], bss_start[], bss_end[], stack_top[];
int main(void);
void systick_handler(void);
void reset_handler(void);

static void fault_handler(void)
{
  for (;;) {
  }
}

typedef void (*vector)(void);

__attribute__((section(".vectors"), used)) static const union {
  const void *stack;
  vector handler;
} vectors[16] = {
    {.stack = stack_top},        {.handler = reset_handler}, {.handler = fault_handler}, {.handler = fault_handler},
    {.handler = fault_handler},  {.handler = fault_handler}, {.handler = fault_handler}, {.handler = 0},
    {.handler = 0},              {.handler = 0},             {.handler = 0},             {.handler = fault_handler},
    {.handler = fault_handler},  {.handler = 0},             {.handler = fault_handler}, {.handler = systick_handler},
};

void reset_handler(void)
{
  *(volatile uint32_t *)0xe000ed88u |= 0xfu << 20; /* CPACR: the FPU, before any float */
  __asm__ volatile("dsb\n isb" : : : "memory");
  const uint32_t *from = data_in_flash;
  for (volatile uint32_t *to = data_start; to < data_end; to++) {
    *to = *from++;
  }
  for (volatile uint32_t *to = bss_start; to < bss_end; to++) {
    *to = 0u;
  }
  main();
  fault_handler();
}
