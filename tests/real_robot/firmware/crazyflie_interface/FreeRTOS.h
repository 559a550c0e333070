#pragma once
#include <stdint.h>
#define M2T(ms) ((uint32_t)(ms))
