// Lengths of shortest ways; see ways.py, which has the same in torch.

#include <math.h>

static float lesser(float a, float b) { return a < b ? a : b; }

// Lengths `T` [m, size, size] that solve |grad T| = s where `step` [m, size, size] is s times the spacing: upwind
// differences, swept in all four directions until nothing changes (Zhao, "A fast sweeping method for eikonal
// equations", 2005). T holds the lengths near the goal, and `far` elsewhere.
void lengths(long m, long size, float far, const float *step, float *T) {
    for (long k = 0; k < m; k++, step += size * size, T += size * size) {
        for (int changed = 1, order = 0; changed || order % 4; order++) {
            if (order % 4 == 0) changed = 0;
            for (long row = 0; row < size; row++) {
                long i = order & 1 ? size - 1 - row : row;
                for (long column = 0; column < size; column++) {
                    long j = order & 2 ? size - 1 - column : column;
                    float *here = T + i * size + j, f = step[i * size + j];
                    float a = lesser(i ? here[-size] : far, i < size - 1 ? here[size] : far);
                    float b = lesser(j ? here[-1] : far, j < size - 1 ? here[1] : far);
                    float apart = a - b;
                    float found = fabsf(apart) < f ? 0.5f * (a + b + sqrtf(2.0f * f * f - apart * apart))
                                                   : lesser(a, b) + f;
                    if (found < *here) *here = found, changed = 1;
                }
            }
        }
    }
}
