/* What generated kernels call. Written without branches, so that loops over lanes vectorise; INLINE is given before,
   and so are the random numbers of counter_rng.py. */

/* Natural logarithm of a normal positive number: x = 2^e m with m in [sqrt(1/2), sqrt(2)), and for s = (m - 1) / (m + 1)
   log m = 2 atanh s. */
INLINE float log_(float x)
{
    int32_t bits;
    memcpy(&bits, &x, sizeof bits);
    const int32_t e = (bits - 0x3f3504f3) >> 23;
    bits -= e * 0x800000;
    float m;
    memcpy(&m, &bits, sizeof m);
    const float s = (m - 1.0f) / (m + 1.0f), q = s * s;
    const float series = 1.0f + q * (0.333333333f + q * (0.2f + q * (0.142857143f + q * 0.111111111f)));
    return (float)e * 0.693147181f + 2.0f * s * series;
}

/* Sine of an angle in rad: Taylor's series on [-pi/2, pi/2] around the next multiple of pi. For a few turns at most. */
INLINE float sin_(float x)
{
    const int32_t half_turns = (int32_t)(x * 0.318309886f + (x < 0.0f ? -0.5f : 0.5f));
    const float n = (float)half_turns;
    const float r = (x - n * 3.140625f) - n * 9.67653589793e-4f, q = r * r;
    const float tail = q * (-2.50521084e-8f + q * 1.60590438e-10f);
    const float series =
        1.0f + q * (-0.166666667f + q * (8.33333333e-3f + q * (-1.98412698e-4f + q * (2.75573192e-6f + tail))));
    return (half_turns & 1) ? -r * series : r * series;
}

INLINE float cos_(float x) { return sin_(x + 1.57079633f); }

/* e^x for 0 <= x <= 80: e^x = 2^n e^r with |r| <= log(2) / 2, and Taylor's series for e^r. */
INLINE float exp_(float x)
{
    const int32_t n = (int32_t)(x * 1.44269504f + 0.5f);
    const float r = (x - (float)n * 0.693359375f) + (float)n * 2.12194440e-4f;
    const float tail = 0.0416666667f + r * (8.33333333e-3f + r * (1.38888889e-3f + r * 1.98412698e-4f));
    const float series = 1.0f + r * (1.0f + r * (0.5f + r * (0.166666667f + r * tail)));
    const int32_t bits = (n + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return power * series;
}

/* Hyperbolic tangent, to 1e-7; beyond 10 it rounds to one. The sign and the limit are taken on the bits: with `?` a
   compiler would branch. */
INLINE float tanh_(float x)
{
    int32_t bits;
    memcpy(&bits, &x, sizeof bits);
    const int32_t sign = bits & (int32_t)0x80000000, size = bits & 0x7fffffff, least = size < 0x41200000 ? size : 0x41200000;
    float y;
    memcpy(&y, &least, sizeof y);
    y = 1.0f - 2.0f / (exp_(2.0f * y) + 1.0f);
    memcpy(&bits, &y, sizeof bits);
    bits |= sign;
    memcpy(&y, &bits, sizeof y);
    return y;
}
