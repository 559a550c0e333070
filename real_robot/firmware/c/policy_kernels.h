/* Layers of an exported policy: C99, no heap, no library, no state.

   Results are the same bit for bit on every machine with IEEE 754 single precision, as long as the compiler does not fuse
   a * b + c into one operation (GCC: -ffp-contract=off) nor reorder sums (no -ffast-math). Written for Cortex-M4 and M7.

   Rows come in blocks of four, so that each input is loaded once for four products and no product waits for the one
   before it. `rows` is a multiple of four: what is written past the last real row is zero. */
#ifndef POLICY_KERNELS_H
#define POLICY_KERNELS_H

#include <stdint.h>

/* Such compilers drop the tests for infinity and not a number: a lost measurement would become full throttle. Sums in
   another order (-funsafe-math-optimizations, with which PX4 is compiled) only round differently. */
#if defined(__FAST_MATH__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__)
#error "compile the policy without -ffast-math, -Ofast and -ffinite-math-only: it has to recognise infinity"
#endif

typedef union {
  float value;
  uint32_t bits;
} policy_word;

static inline float policy_clamp(float x, float low, float high)
{
  return !(x > low) ? low : (x < high ? x : high); /* not a number becomes low */
}

static inline int policy_finite(const float *x, int count)
{
  for (int i = 0; i < count; i++) {
    const float difference = x[i] - x[i];
    if (!(difference <= 0.0f)) { /* infinity or not a number */
      return 0;
    }
  }
  return 1;
}

/* tanh(x) within 4e-7: x P(x^2) / Q(x^2), fitted for the smallest largest error on [-9, 9] (2e-8; the rest is rounding),
   beyond which tanh is 1 within 4e-8. */
static inline float policy_tanh(float x)
{
  const float square = x * x;
  if (!(square < 81.0f)) {
    return x > 0.0f ? 1.0f : -1.0f;
  }
  float p = 1.31841231e-8f, q = 7.70262204e-7f;
  p = 2.04717562e-5f + p * square;
  q = 3.27137794e-4f + q * square;
  p = 3.48657742e-3f + p * square;
  q = 2.58419625e-2f + q * square;
  p = 0.133731946f + p * square;
  q = 0.467064917f + q * square;
  p = 0.999999881f + p * square;
  q = 1.0f + q * square;
  return x * p / q;
}

static inline float policy_sigmoid(float x)
{
  return 0.5f + 0.5f * policy_tanh(0.5f * x);
}

/* e^x for x <= 0: 2^n e^r with |r| <= ln(2) / 2, and a polynomial for e^r; 0 below the smallest normal number. */
static inline float policy_exp(float x)
{
  if (!(x > -87.0f)) {
    return 0.0f;
  }
  const int32_t n = (int32_t)(x * 1.44269504f - 0.5f);
  const float r = (x - (float)n * 0.693359375f) + (float)n * 2.12194440e-4f;
  float p = 1.0f / 720.0f;
  p = 1.0f / 120.0f + p * r;
  p = 1.0f / 24.0f + p * r;
  p = 1.0f / 6.0f + p * r;
  p = 0.5f + p * r;
  p = 1.0f + p * r;
  p = 1.0f + p * r;
  policy_word power;
  power.bits = (uint32_t)(n + 127) << 23;
  return p * power.value;
}

/* 1 / sqrt(x) for x > 0: a guess from the exponent, then Newton's method to the last bit or two. */
static inline float policy_inverse_sqrt(float x)
{
  policy_word guess = {x};
  guess.bits = 0x5f375a86u - (guess.bits >> 1);
  float y = guess.value;
  for (int i = 0; i < 3; i++) {
    y = y * (1.5f - 0.5f * x * y * y);
  }
  return y;
}

/* Distances to 1 / (x + softening); what is below zero counts as zero. */
static inline void policy_reciprocal_each(float *x, float softening, int count)
{
  for (int i = 0; i < count; i++) {
    x[i] = 1.0f / ((x[i] > 0.0f ? x[i] : 0.0f) + softening);
  }
}

static inline void policy_normalise(const float *x, const float *mean, const float *std, float *out, int count)
{
  for (int i = 0; i < count; i++) {
    out[i] = (x[i] - mean[i]) / std[i];
  }
}

/* [-1, 1] to robot units, never outside the limits. */
static inline void policy_to_range(const float *x, const float *centre, const float *half_range, const float *low,
                                   const float *high, float *out, int count)
{
  for (int i = 0; i < count; i++) {
    out[i] = policy_clamp(policy_clamp(x[i], -1.0f, 1.0f) * half_range[i] + centre[i], low[i], high[i]);
  }
}

static inline void policy_tanh_each(float *x, int count)
{
  for (int i = 0; i < count; i++) {
    x[i] = policy_tanh(x[i]);
  }
}

static inline void policy_relu_each(float *x, int count)
{
  for (int i = 0; i < count; i++) {
    x[i] = x[i] > 0.0f ? x[i] : 0.0f;
  }
}

static inline void policy_layer_norm(float *x, const float *gain, const float *bias, float epsilon, int count)
{
  float mean = 0.0f, variance = 0.0f;
  for (int i = 0; i < count; i++) {
    mean += x[i];
  }
  mean /= (float)count;
  for (int i = 0; i < count; i++) {
    variance += (x[i] - mean) * (x[i] - mean);
  }
  const float scale = policy_inverse_sqrt(variance / (float)count + epsilon);
  for (int i = 0; i < count; i++) {
    x[i] = (x[i] - mean) * scale * gain[i] + bias[i];
  }
}

/* Adds four inputs' products to the sums of four rows, `passes` times; x and weight move on. On Cortex-M one instruction
   loads what takes twenty otherwise, and the other products fill the time until a product can be added. The numbers are
   those of the C below. */
#if defined(__GNUC__) && defined(__thumb2__) && defined(__ARM_FP) && !defined(__SOFTFP__)
#define POLICY_COLUMN(x, p, q, r, s)                                                                                     \
  "vmul.f32 s" #p ", s" #p ", s" #x "\n vmul.f32 s" #q ", s" #q ", s" #x "\n"                                            \
  "vmul.f32 s" #r ", s" #r ", s" #x "\n vmul.f32 s" #s ", s" #s ", s" #x "\n"                                            \
  "vadd.f32 %[a], %[a], s" #p "\n vadd.f32 %[b], %[b], s" #q "\n"                                                       \
  "vadd.f32 %[c], %[c], s" #r "\n vadd.f32 %[d], %[d], s" #s "\n"
#define POLICY_FOUR_COLUMNS(x, weight, a_, b_, c_, d_, passes)                                                           \
  __asm__("1: vldmia %[from]!, {s0-s3}\n"                                                                               \
          "vldmia %[by]!, {s4-s19}\n"                                                                                   \
          POLICY_COLUMN(0, 4, 5, 6, 7) POLICY_COLUMN(1, 8, 9, 10, 11)                                                    \
          POLICY_COLUMN(2, 12, 13, 14, 15) POLICY_COLUMN(3, 16, 17, 18, 19)                                              \
          "subs %[left], %[left], #1\n bne 1b"                                                                          \
          : [from] "+r"(x), [by] "+r"(weight), [a] "+t"(a_), [b] "+t"(b_), [c] "+t"(c_), [d] "+t"(d_),                   \
            [left] "+r"(passes)                                                                                          \
          :                                                                                                              \
          : "cc", "memory", "s0", "s1", "s2", "s3", "s4", "s5", "s6", "s7", "s8", "s9", "s10", "s11", "s12", "s13",      \
            "s14", "s15", "s16", "s17", "s18", "s19")
#else
#define POLICY_FOUR_COLUMNS(x, weight, a, b, c, d, passes)                                                               \
  for (; passes > 0; passes--) {                                                                                         \
    for (int column = 0; column < 4; column++, x++, weight += 4) {                                                       \
      a += weight[0] * *x;                                                                                               \
      b += weight[1] * *x;                                                                                               \
      c += weight[2] * *x;                                                                                               \
      d += weight[3] * *x;                                                                                               \
    }                                                                                                                    \
  }
#endif

/* out[rows] = weight x + bias; weight is [rows / 4][inputs][4]. */
static inline void policy_linear(const float *x, const float *weight, const float *bias, float *out, int inputs,
                                 int rows)
{
  for (int row = 0; row < rows; row += 4) {
    float a = bias[row], b = bias[row + 1], c = bias[row + 2], d = bias[row + 3];
    const float *from = x;
    int passes = inputs / 4;
    if (passes > 0) {
      POLICY_FOUR_COLUMNS(from, weight, a, b, c, d, passes);
    }
    for (int left = inputs % 4; left > 0; left--, from++, weight += 4) {
      a += weight[0] * *from;
      b += weight[1] * *from;
      c += weight[2] * *from;
      d += weight[3] * *from;
    }
    out[row] = a;
    out[row + 1] = b;
    out[row + 2] = c;
    out[row + 3] = d;
  }
}

/* Sums of products of four rows with whole numbers: weights of 16 or 8 bits, inputs of 16 bits. A pass takes four inputs,
   two pairs. A word of int16 holds two weights of a row; one of int8 holds weights 0, 2, 1, 3, because SXTB16 takes bytes
   0 and 2. Loads of several words and SMLAD, two products and their sums in one instruction, need assembly. The numbers
   are those of the C below. */
#if defined(__GNUC__) && defined(__thumb2__) && defined(__ARM_FEATURE_DSP)
#define POLICY_INTEGER_LOOP(body, pair, weight, a_, b_, c_, d_, passes)                                                  \
  for (; passes > 0; passes--) {                                                                                         \
    __asm__(body                                                                                                         \
            : [from] "+r"(pair), [by] "+r"(weight), [a] "+r"(a_), [b] "+r"(b_), [c] "+r"(c_), [d] "+r"(d_)              \
            :                                                                                                            \
            : "memory", "r8", "r9", "r10", "r11", "r12", "lr");                                                          \
  }
#define POLICY_PRODUCTS(x)                                                                                               \
  "smlad %[a], r8, " x ", %[a]\n smlad %[b], r9, " x ", %[b]\n"                                                          \
  "smlad %[c], r10, " x ", %[c]\n smlad %[d], r11, " x ", %[d]\n"
#define POLICY_FOUR_INPUTS_INT16(...)                                                                                    \
  POLICY_INTEGER_LOOP("ldmia %[from]!, {r12, lr}\n ldmia %[by]!, {r8-r11}\n" POLICY_PRODUCTS("r12")                      \
                      "ldmia %[by]!, {r8-r11}\n" POLICY_PRODUCTS("lr"), __VA_ARGS__)
#define POLICY_FOUR_INPUTS_INT8(...)                                                                                     \
  POLICY_INTEGER_LOOP("ldmia %[by]!, {r8-r11}\n ldr r12, [%[from]], #8\n"                                                \
                      "sxtb16 lr, r8\n smlad %[a], lr, r12, %[a]\n sxtb16 lr, r9\n smlad %[b], lr, r12, %[b]\n"          \
                      "sxtb16 lr, r10\n smlad %[c], lr, r12, %[c]\n sxtb16 lr, r11\n smlad %[d], lr, r12, %[d]\n"        \
                      "ldr r12, [%[from], #-4]\n sxtb16 r8, r8, ror #8\n sxtb16 r9, r9, ror #8\n"                        \
                      "sxtb16 r10, r10, ror #8\n sxtb16 r11, r11, ror #8\n" POLICY_PRODUCTS("r12"), __VA_ARGS__)
#else
static inline int32_t policy_add_products(uint32_t a, uint32_t b, int32_t sum)
{
  return sum + (int16_t)(a & 0xffffu) * (int16_t)(b & 0xffffu) + (int16_t)(a >> 16) * (int16_t)(b >> 16);
}

static inline int32_t policy_add_products_int8(uint32_t bytes, const uint32_t *pair, int32_t sum)
{
  for (int half = 0; half < 2; half++, bytes >>= 8) {
    const uint32_t low = (uint32_t)(int8_t)(bytes & 0xffu), high = (uint32_t)(int8_t)((bytes >> 16) & 0xffu);
    sum = policy_add_products((low & 0xffffu) | high << 16, pair[half], sum);
  }
  return sum;
}

#define POLICY_FOUR_INPUTS_INT16(pair, weight, a, b, c, d, passes)                                                       \
  for (int left = 2 * passes; left > 0; left--, pair++, weight += 4) {                                                   \
    a = policy_add_products(weight[0], *pair, a);                                                                        \
    b = policy_add_products(weight[1], *pair, b);                                                                        \
    c = policy_add_products(weight[2], *pair, c);                                                                        \
    d = policy_add_products(weight[3], *pair, d);                                                                        \
  }
#define POLICY_FOUR_INPUTS_INT8(pair, weight, a, b, c, d, passes)                                                        \
  for (; passes > 0; passes--, pair += 2, weight += 4) {                                                                 \
    a = policy_add_products_int8(weight[0], pair, a);                                                                    \
    b = policy_add_products_int8(weight[1], pair, b);                                                                    \
    c = policy_add_products_int8(weight[2], pair, c);                                                                    \
    d = policy_add_products_int8(weight[3], pair, d);                                                                    \
  }
#endif

/* x rounded to a whole number, in the low 16 bits: adding 1.5 * 2^23 leaves no room for a fraction. */
static inline uint32_t policy_rounded(float x)
{
  const policy_word word = {x + 12582912.0f};
  return word.bits;
}

/* Round x to whole steps of its largest magnitude / limit, in pairs of 16 bits, and zeros up to a multiple of four; returns
   the step. */
static inline float policy_pack(const float *x, uint32_t *packed, int inputs, float limit)
{
  uint32_t largest = 0u;
  for (int i = 0; i < inputs; i++) {
    const policy_word word = {x[i]};
    const uint32_t magnitude = word.bits << 1; /* without the sign, bits are in the order of their numbers */
    largest = magnitude > largest ? magnitude : largest;
  }
  policy_word peak;
  peak.bits = largest >> 1;
  const float steps = peak.value > 1e-30f ? limit / peak.value : 0.0f;
  int i = 0;
  for (; i + 1 < inputs; i += 2) {
    *packed++ = (policy_rounded(x[i] * steps) & 0xffffu) | policy_rounded(x[i + 1] * steps) << 16;
  }
  if (i < inputs) {
    *packed++ = policy_rounded(x[i] * steps) & 0xffffu;
    i += 2;
  }
  if (i % 4 != 0) {
    *packed = 0u;
  }
  return peak.value / limit;
}

/* policy_linear with whole numbers as weights, times a scale per row. Sums are exact: `limit` keeps them within 32 bits. */
#define POLICY_LINEAR_INTEGER(name, products)                                                                            \
  static inline void name(const float *x, uint32_t *packed, const uint32_t *weight, const float *scale,                  \
                          const float *bias, float *out, int inputs, int rows, float limit)                              \
  {                                                                                                                      \
    const float step = policy_pack(x, packed, inputs, limit);                                                            \
    for (int row = 0; row < rows; row += 4) {                                                                            \
      int32_t a = 0, b = 0, c = 0, d = 0;                                                                                \
      const uint32_t *pair = packed;                                                                                     \
      int passes = (inputs + 3) / 4;                                                                                     \
      products(pair, weight, a, b, c, d, passes);                                                                        \
      out[row] = bias[row] + (float)a * (scale[row] * step);                                                             \
      out[row + 1] = bias[row + 1] + (float)b * (scale[row + 1] * step);                                                 \
      out[row + 2] = bias[row + 2] + (float)c * (scale[row + 2] * step);                                                 \
      out[row + 3] = bias[row + 3] + (float)d * (scale[row + 3] * step);                                                 \
    }                                                                                                                    \
  }
POLICY_LINEAR_INTEGER(policy_linear_int16, POLICY_FOUR_INPUTS_INT16)
POLICY_LINEAR_INTEGER(policy_linear_int8, POLICY_FOUR_INPUTS_INT8)

/* Gated recurrent unit from its two sums [3 count]: reset, update, new. `next` and `out` are the same numbers. */
static inline void policy_gru(const float *from_input, const float *from_memory, const float *memory, float *next,
                              float *out, int count)
{
  for (int i = 0; i < count; i++) {
    const float reset = policy_sigmoid(from_input[i] + from_memory[i]);
    const float update = policy_sigmoid(from_input[count + i] + from_memory[count + i]);
    const float new_value = policy_tanh(from_input[2 * count + i] + reset * from_memory[2 * count + i]);
    next[i] = new_value + update * (memory[i] - new_value);
    out[i] = next[i];
  }
}

/* Attention to one token after the other: the weighted mean so far, the sum of weights and the largest score. Weights
   are relative to the largest score, and scaled down when a larger one comes. */
typedef struct {
  float sum, largest;
} policy_attention;

static inline void policy_attend(policy_attention *state, const float *query, const float *token, float *mean,
                                 float scale, int count)
{
  float score = 0.0f;
  for (int i = 0; i < count; i++) {
    score += query[i] * token[i];
  }
  score *= scale;
  float before = 1.0f, weight = 1.0f;
  if (!(state->sum > 0.0f)) {
    before = 0.0f;
    state->largest = score;
  } else if (score > state->largest) {
    before = policy_exp(state->largest - score);
    state->largest = score;
  } else {
    weight = policy_exp(score - state->largest);
  }
  state->sum = state->sum * before + weight;
  for (int i = 0; i < count; i++) {
    mean[i] = mean[i] * before + weight * token[i];
  }
}

static inline void policy_attended(const policy_attention *state, float *mean, int count)
{
  for (int i = 0; i < count; i++) {
    mean[i] /= state->sum;
  }
}

/* CRC-32 as zlib's. */
static inline uint32_t policy_crc32(const void *data, uint32_t bytes)
{
  const unsigned char *byte = (const unsigned char *)data;
  uint32_t crc = 0xffffffffu;
  for (uint32_t i = 0; i < bytes; i++) {
    crc ^= byte[i];
    for (int bit = 0; bit < 8; bit++) {
      crc = (crc >> 1) ^ (0xedb88320u & (0u - (crc & 1u)));
    }
  }
  return ~crc;
}

#endif
