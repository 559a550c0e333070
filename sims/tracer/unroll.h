/* A policy and a program together, forward and in reverse, for blocks of LANES lanes.

   The policy is a multilayer perceptron with tanh after every layer. Inside it memory is lane by lane ([LANES][width],
   widths padded to PAD), so that its matrix products run over features; everything of the program is row by row. What is
   before this file defines STEP_BLOCK and STEP_VJP_BLOCK, the program's functions, how many rows its tensors have, and
   CONSTANTS, their arguments for the inputs that stay as they are. */

#if defined(__AVX512F__)
#define WIDTH 16
#define MOST 4 /* vectors of a tile: its accumulators must fit into the registers */
#else
#define WIDTH 8
#define MOST 2
#endif
#define TILE 4

typedef float vector __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));

/* Sizes of an unroll. `width[0]` are the policy's inputs, `padded` the same in multiples of PAD. */
typedef struct {
    int64_t decisions, history, layers, lanes; /* lanes: row stride of the tensors */
    int64_t width[MAX_LAYERS + 1], padded[MAX_LAYERS + 1];
    int64_t activations; /* floats of all layers of one lane */
    int64_t packed;      /* floats of all weights and biases, padded */
    float max_action_gradient; /* norm, of one lane's action */
} Sizes;

/* Tensors, all float but for key; [rows, lanes] unless said otherwise. */
typedef struct {
    float *state;      /* [decisions + 1, STATE_ROWS, lanes] */
    float *record;     /* [decisions + 1, RECORD_ROWS, lanes] */
    float *seen;       /* [decisions + 1, SEEN_ROWS, lanes] */
    float *actions;    /* [history + decisions, ACTION_ROWS, lanes]: those before the unroll come first */
    float *reward;     /* [decisions, lanes] */
    float *executed;   /* [decisions, lanes] */
    float *activations; /* [decisions, lanes, sizes.activations] */
    const float *forward;  /* packed: for each layer transposed weights [padded in][padded out], bias [padded out] */
    const float *backward; /* packed: for each layer weights [padded out][padded in], bias */
    const float *grad_seen, *grad_reward; /* of `seen` and `reward`; NULL: zero */
    float *grad_actions; /* [history + decisions, ACTION_ROWS, lanes]: of `actions`; what the history adds is added here */
    float *grad_packed;  /* [lanes / LANES, sizes.packed], zero before: gradients of `backward` */
    float *scratch;      /* [lanes, 2 * widest padded] */
    const void *constants[MAX_CONSTANTS]; /* inputs of the program that stay as they are */
    int64_t step;                         /* lanes, once more: their row stride */
} Tensors;

/* c[m][n] (+)= sum over k of a[m, k] b[k][n] for TILE rows and `vectors` columns of vectors. */
INLINE __attribute__((always_inline)) void tile_(int vectors, int add, int64_t depth, const float *a, int64_t a_row,
                                                 int64_t a_column, const float *b, int64_t b_row, float *c,
                                                 int64_t c_row)
{
    vector sum[TILE][MOST];
#pragma GCC unroll 8
    for (int m = 0; m < TILE; m++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++)
            sum[m][v] = add ? *(const vector *)(c + m * c_row + v * WIDTH) : (vector){0};
    for (int64_t k = 0; k < depth; k++) {
        vector row[MOST];
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++)
            row[v] = *(const vector *)(b + k * b_row + v * WIDTH);
#pragma GCC unroll 8
        for (int m = 0; m < TILE; m++) {
            const float factor = a[m * a_row + k * a_column];
#pragma GCC unroll 8
            for (int v = 0; v < vectors; v++)
                sum[m][v] += factor * row[v];
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < TILE; m++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++)
            *(vector *)(c + m * c_row + v * WIDTH) = sum[m][v];
}

/* c (+)= a b, where c has `rows` (rounded up to TILE) and `columns` (a multiple of PAD), and lies at `columns` a row. */
static void product_(int add, int64_t rows, int64_t columns, int64_t depth, const float *a, int64_t a_row,
                     int64_t a_column, const float *b, float *c)
{
    for (int64_t n = 0; n < columns;) {
        const int64_t vectors = (columns - n) / WIDTH >= MOST ? MOST : (columns - n) / WIDTH >= 2 ? 2 : 1;
        for (int64_t m = 0; m < rows; m += TILE) {
            const float *const left = a + m * a_row;
            float *const place = c + m * columns + n;
            if (vectors == MOST)
                tile_(MOST, add, depth, left, a_row, a_column, b + n, columns, place, columns);
            else if (vectors == 2)
                tile_(2, add, depth, left, a_row, a_column, b + n, columns, place, columns);
            else
                tile_(1, add, depth, left, a_row, a_column, b + n, columns, place, columns);
        }
        n += vectors * WIDTH;
    }
}

/* The policy's inputs at decision t, lane by lane: what is observed, then the last actions. */
static void gather_(const Sizes *s, const Tensors *x, int64_t t, int64_t lane, float *inputs)
{
    const float *const seen = x->seen + t * SEEN_ROWS * s->lanes + lane;
    const float *const actions = x->actions + t * ACTION_ROWS * s->lanes + lane;
    const int64_t width = s->padded[0];
    memset(inputs, 0, sizeof(float) * LANES * width);
    for (int64_t row = 0; row < s->width[0]; row++) {
        const float *const from = row < OBSERVED_ROWS ? seen + row * s->lanes : actions + (row - OBSERVED_ROWS) * s->lanes;
        for (int i = 0; i < LANES; i++)
            inputs[i * width + row] = from[i];
    }
}

/* One layer for a block: y = tanh(W x + b). */
static void layer_(int64_t inputs, int64_t outputs, const float *x, const float *packed, float *y)
{
    const float *const bias = packed + inputs * outputs;
    product_(0, LANES, outputs, inputs, x, inputs, 1, packed, y);
    for (int i = 0; i < LANES; i++)
#pragma GCC ivdep
        for (int64_t n = 0; n < outputs; n++)
            y[i * outputs + n] = tanh_(y[i * outputs + n] + bias[n]);
}

static float *activations_(const Sizes *s, const Tensors *x, int64_t t, int64_t lane)
{
    return x->activations + (t * s->lanes + lane) * s->activations;
}

/* Step lanes [first, last) for all decisions. */
void unroll(int64_t first, int64_t last, const Sizes *s, const Tensors *x)
{
    const int64_t L = s->lanes;
    for (int64_t lane = first; lane < last; lane += LANES) {
        for (int64_t t = 0; t < s->decisions; t++) {
            float *y = activations_(s, x, t, lane);
            const float *packed = x->forward;
            gather_(s, x, t, lane, y);
            for (int64_t n = 0; n < s->layers; n++) {
                const int64_t in = s->padded[n], out = s->padded[n + 1];
                layer_(in, out, y, packed, y + LANES * in);
                y += LANES * in;
                packed += (in + 1) * out;
            }
            float *const action = x->actions + (s->history + t) * ACTION_ROWS * L + lane;
            for (int row = 0; row < ACTION_ROWS; row++)
                for (int i = 0; i < LANES; i++)
                    action[row * L + i] = y[i * s->padded[s->layers] + row];
            float *const state = x->state + t * STATE_ROWS * L + lane, *const record = x->record + t * RECORD_ROWS * L + lane;
            STEP_BLOCK(1, state, L, record, L, action, L, CONSTANTS(x, lane), state + STATE_ROWS * L, L,
                       record + RECORD_ROWS * L, L, x->seen + (t + 1) * SEEN_ROWS * L + lane, L, x->reward + t * L + lane,
                       L, x->executed + t * L + lane, L);
        }
    }
}

/* From the gradient of a block's actions to that of the policy's inputs (in the returned scratch); adds to weights. */
static const float *policy_vjp_(const Sizes *s, const Tensors *x, int64_t t, int64_t lane, const float *grad_action)
{
    int64_t widest = 0, before = 0, packed = 0;
    for (int64_t n = 0; n <= s->layers; n++)
        widest = s->padded[n] > widest ? s->padded[n] : widest;
    for (int64_t n = 0; n < s->layers; n++) {
        before += LANES * s->padded[n];
        packed += (s->padded[n] + 1) * s->padded[n + 1];
    }
    float *grad = x->scratch + lane * 2 * widest, *other = grad + LANES * widest;
    const float *y = activations_(s, x, t, lane) + before;
    float *const sums = x->grad_packed + lane / LANES * s->packed;
    const int64_t outputs = s->padded[s->layers];
    memset(grad, 0, sizeof(float) * LANES * outputs);
    for (int row = 0; row < ACTION_ROWS; row++)
        for (int i = 0; i < LANES; i++)
            grad[i * outputs + row] = grad_action[row * LANES + i];
    for (int64_t n = s->layers - 1; n >= 0; n--) {
        const int64_t in = s->padded[n], out = s->padded[n + 1], used = s->width[n + 1];
        packed -= (in + 1) * out;
        for (int64_t i = 0; i < LANES * out; i++)
            grad[i] *= 1.0f - y[i] * y[i];
        y -= LANES * in;
        product_(1, used, in, LANES, grad, 1, out, y, sums + packed);
        for (int i = 0; i < LANES; i++)
            for (int64_t k = 0; k < out; k++)
                sums[packed + in * out + k] += grad[i * out + k];
        if (n > 0 || t > 0)
            product_(0, LANES, in, used, grad, out, 1, x->backward + packed, other);
        float *const swap = grad;
        grad = other;
        other = swap;
    }
    return grad;
}

/* The gradient of what is seen before decision t: as the caller gives it, and from the policy's `inputs` at t. */
static void seen_vjp_(const Sizes *s, const Tensors *x, int64_t t, int64_t lane, const float *inputs, float *seen)
{
    const int64_t L = s->lanes, width = s->padded[0];
    for (int row = 0; row < SEEN_ROWS; row++)
        for (int i = 0; i < LANES; i++)
            seen[row * LANES + i] = x->grad_seen ? x->grad_seen[(t * SEEN_ROWS + row) * L + lane + i] : 0.0f;
    for (int64_t row = 0; inputs && row < s->width[0]; row++) {
        float *const to = row < OBSERVED_ROWS ? seen + row * LANES
                                              : x->grad_actions + (ACTION_ROWS * t + row - OBSERVED_ROWS) * L + lane;
        for (int i = 0; i < LANES; i++)
            to[i] += inputs[i * width + row];
    }
}

/* Scale a block's gradients of actions down to norm `most`, lane by lane. */
static void clip_(float *action, float most)
{
    for (int i = 0; i < LANES; i++) {
        float square = 0.0f;
        for (int row = 0; row < ACTION_ROWS; row++)
            square += action[row * LANES + i] * action[row * LANES + i];
        const float factor = square > most * most ? most / sqrtf(square) : 1.0f;
        for (int row = 0; row < ACTION_ROWS; row++)
            action[row * LANES + i] *= factor;
    }
}

/* Gradients of the weights for lanes [first, last), after `unroll`; nothing flows to before the first decision. */
void unroll_vjp(int64_t first, int64_t last, const Sizes *s, const Tensors *x)
{
    const int64_t L = s->lanes;
    float state[2][STATE_ROWS * LANES], seen[SEEN_ROWS * LANES], action[ACTION_ROWS * LANES], reward[LANES];
    for (int64_t lane = first; lane < last; lane += LANES) {
        memset(state, 0, sizeof state);
        seen_vjp_(s, x, s->decisions, lane, NULL, seen);
        for (int64_t t = s->decisions - 1; t >= 0; t--) {
            const float *const later = x->grad_actions + (s->history + t) * ACTION_ROWS * L + lane;
            for (int i = 0; i < LANES; i++)
                reward[i] = x->grad_reward ? x->grad_reward[t * L + lane + i] : 0.0f;
            STEP_VJP_BLOCK(1, x->state + t * STATE_ROWS * L + lane, L, x->record + t * RECORD_ROWS * L + lane, L,
                           x->actions + (s->history + t) * ACTION_ROWS * L + lane, L, CONSTANTS(x, lane), state[0], LANES,
                           seen, LANES, reward, LANES, state[1], LANES, action, LANES);
            memcpy(state[0], state[1], sizeof state[0]);
            for (int row = 0; row < ACTION_ROWS; row++)
                for (int i = 0; i < LANES; i++)
                    action[row * LANES + i] += later[row * L + i];
            clip_(action, s->max_action_gradient);
            const float *const inputs = policy_vjp_(s, x, t, lane, action);
            if (t > 0)
                seen_vjp_(s, x, t, lane, inputs, seen);
        }
    }
}
