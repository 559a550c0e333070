#pragma once
#include <stdint.h>
void vTaskDelay(const uint32_t ticks);
