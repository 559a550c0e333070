// Motion, contact and lidar of N vehicles, one after the other; the references are dynamics.py and geometry.py.
//
// compiled.py places an enum of a vehicle's parameters before this text: indices such as LENGTH_M, and PARAMETERS,
// their number. Arrays are [N, ...] in row-major order. Distant shapes are skipped: in a step those that cannot be
// reached, in a scan those out of range; every other shape is tested only against the beams that may hit it.

#include <math.h>
#include <stdint.h>
#include <string.h>

enum { X, Y, YAW, FORWARD, LEFTWARD, RATE, STEERING, STATE };
enum { DIFFERENTIAL_DRIVE, KINEMATIC_BICYCLE, DYNAMIC_BICYCLE };
#define GRAVITY 9.81f
#define ROLLING 0.5f
#define SLIPPING 1.0f
#define PI 3.14159265f

static inline float clamp(float x, float low, float high) { return x < low ? low : (x > high ? high : x); }

static void bicycle(long model, float *s, float acceleration, const float *p, float dt) {
    float forward = s[FORWARD], leftward = s[LEFTWARD], rate = s[RATE], steering = s[STEERING];
    float a = p[FRONT_AXLE_M], b = p[REAR_AXLE_M];
    float rolled = forward + dt * acceleration, rolling_rate = rolled * tanf(steering) / (a + b);
    float weight = clamp((forward - ROLLING) / (SLIPPING - ROLLING), 0.0f, 1.0f);
    s[FORWARD] = rolled, s[LEFTWARD] = rolling_rate * b, s[RATE] = rolling_rate;
    if (model == KINEMATIC_BICYCLE || weight == 0.0f) return;
    float grip = p[FRICTION] * GRAVITY, mass = p[MASS_KG];
    acceleration = clamp(acceleration, -0.95f * grip, 0.95f * grip);
    float used = acceleration / grip, share = p[FRICTION] * mass / (a + b) * sqrtf(1.0f - used * used);
    float front = share * (GRAVITY * b - acceleration * p[HEIGHT_M]);
    float rear = share * (GRAVITY * a + acceleration * p[HEIGHT_M]);
    float pace = forward < ROLLING ? ROLLING : forward;
    front *= tanhf(p[FRONT_STIFFNESS] * (steering - atan2f(leftward + a * rate, pace)));
    rear *= tanhf(p[REAR_STIFFNESS] * -atan2f(leftward - b * rate, pace));
    float cosine = cosf(steering), sine = sinf(steering);
    float driven = forward + dt * (acceleration - front * sine / mass + leftward * rate);
    float slid = leftward + dt * ((rear + front * cosine) / mass - forward * rate);
    float turned = rate + dt * (a * front * cosine - b * rear) / p[INERTIA_KG_M2];
    s[FORWARD] += weight * (driven - s[FORWARD]);
    s[LEFTWARD] += weight * (slid - s[LEFTWARD]);
    s[RATE] += weight * (turned - s[RATE]);
}

static void move(long model, float *s, const float *command, const float *p, float dt) {
    float lag = p[LAG_S] > dt ? p[LAG_S] : dt;
    float target = command[model == DIFFERENTIAL_DRIVE ? 0 : 1];
    float acceleration = clamp((target - s[FORWARD]) / lag, -p[DECELERATION_M_S2], p[ACCELERATION_M_S2]);
    if (model == DIFFERENTIAL_DRIVE) {
        float limit = p[YAW_ACCELERATION_RAD_S2];
        s[RATE] += dt * clamp((command[1] - s[RATE]) / lag, -limit, limit);
        s[FORWARD] += dt * acceleration;
        s[LEFTWARD] = 0.0f;
    } else {
        float limit = dt * p[STEERING_RATE_RAD_S];
        s[STEERING] += clamp(command[0] - s[STEERING], -limit, limit);
        bicycle(model, s, acceleration, p, dt);
    }
    float middle = s[YAW] + 0.5f * dt * s[RATE], cosine = cosf(middle), sine = sinf(middle);
    s[X] += dt * (s[FORWARD] * cosine - s[LEFTWARD] * sine);
    s[Y] += dt * (s[FORWARD] * sine + s[LEFTWARD] * cosine);
    s[YAW] += dt * s[RATE];
}

// Whether the outline meets one of the shapes with indices in `round` and `straight`.
static int touching(const float *s, const float *p, const float *circles, const int *round, int rounds,
                    const float *segments, const int *straight, int straights) {
    float cosine = cosf(s[YAW]), sine = sinf(s[YAW]), half[2] = {0.5f * p[LENGTH_M], 0.5f * p[WIDTH_M]};
    for (int i = 0; i < rounds; i++) {
        const float *c = circles + 3 * round[i];
        float dx = c[0] - s[X], dy = c[1] - s[Y];
        float x = fabsf(cosine * dx + sine * dy) - half[0], y = fabsf(cosine * dy - sine * dx) - half[1];
        x = x > 0.0f ? x : 0.0f, y = y > 0.0f ? y : 0.0f;
        if (x * x + y * y < c[2] * c[2]) return 1;
    }
    for (int i = 0; i < straights; i++) {
        const float *g = segments + 4 * straight[i];
        float ax = g[0] - s[X], ay = g[1] - s[Y], bx = g[2] - s[X], by = g[3] - s[Y];
        float first[2] = {cosine * ax + sine * ay, cosine * ay - sine * ax};
        float last[2] = {cosine * bx + sine * by, cosine * by - sine * bx};
        float enter = 0.0f, leave = 1.0f;
        for (int axis = 0; axis < 2; axis++) {
            float edge = last[axis] - first[axis];
            edge = fabsf(edge) < 1e-9f ? 1e-9f : edge;
            float one = (-half[axis] - first[axis]) / edge, two = (half[axis] - first[axis]) / edge;
            float low = one < two ? one : two, high = one < two ? two : one;
            enter = low > enter ? low : enter, leave = high < leave ? high : leave;
        }
        if (enter <= leave) return 1;
    }
    return 0;
}

// Squared distance of the origin from the segment between a and b.
static inline float apart(float ax, float ay, float bx, float by) {
    float ex = bx - ax, ey = by - ay;
    float t = clamp(-(ax * ex + ay * ey) / (ex * ex + ey * ey + 1e-12f), 0.0f, 1.0f);
    float x = ax + t * ex, y = ay + t * ey;
    return x * x + y * y;
}

// `substeps` steps of `dt` for vehicles that are not frozen; at a contact the vehicle stops and `hit` is 1.
void advance(long n, long substeps, float dt, long model, const uint8_t *frozen, const float *command,
             const float *parameters, long nc, const float *circles, long ns, const float *segments, float *state,
             uint8_t *hit) {
    int round[nc + 1], straight[ns + 1];
    uint8_t close[ns + 1];
    for (long i = 0; i < n; i++, circles += 3 * nc, segments += 4 * ns, state += STATE, command += 2) {
        const float *p = parameters + PARAMETERS * i;
        hit[i] = 0;
        if (frozen[i]) continue;
        float pace = fabsf(state[FORWARD]) + fabsf(state[LEFTWARD]) + p[ACCELERATION_M_S2] * substeps * dt;
        float reach = 0.5f * (p[LENGTH_M] + p[WIDTH_M]) + 1.1f * pace * substeps * dt + 0.1f;
        int rounds = 0, straights = 0;
        for (int j = 0; j < nc; j++) {
            float x = circles[3 * j] - state[X], y = circles[3 * j + 1] - state[Y], r = reach + circles[3 * j + 2];
            if (x * x + y * y < r * r) round[rounds++] = j;
        }
        for (int j = 0; j < ns; j++) {
            const float *g = segments + 4 * j;
            close[j] = apart(g[0] - state[X], g[1] - state[Y], g[2] - state[X], g[3] - state[Y]) < reach * reach;
        }
        for (int j = 0; j < ns; j++)
            if (close[j]) straight[straights++] = j;
        for (long k = 0; k < substeps && !hit[i]; k++) {
            move(model, state, command, p, dt);
            hit[i] = touching(state, p, circles, round, rounds, segments, straight, straights);
        }
    }
}

// atan2 within 1e-4, without branches: it only chooses beams. The polynomial was fitted to the arc tangent on [0, 1].
static inline float direction(float y, float x) {
    float ax = fabsf(x), ay = fabsf(y), low = ax < ay ? ax : ay, high = ax < ay ? ay : ax;
    float t = low / (high + 1e-20f), q = t * t;
    float angle = t * (0.99921381f + q * (-0.32117483f + q * (0.14626407f - 0.03898623f * q)));
    angle = ay > ax ? 0.5f * PI - angle : angle;
    angle = x < 0.0f ? PI - angle : angle;
    return y < 0.0f ? -angle : angle;
}

typedef struct {
    long beams;
    float first, spacing, range;
    const float *cosine, *sine;
    float *out;
} Scan;

// Tests the segment from (ax, ay), direction (ex, ey), or the circle of `radius` there, on beams [from, to].
static void beams(const Scan *s, long from, long to, float ax, float ay, float ex, float ey, float radius) {
    for (long i = from; i <= to; i++) {
        float c = s->cosine[i], d = s->sine[i], aside = c * ay - d * ax;
        if (radius > 0.0f) {
            float room = radius * radius - aside * aside, along = c * ax + d * ay;
            float near = along - sqrtf(room > 0.0f ? room : 0.0f);
            if (room >= 0.0f && near > 0.0f && near < s->out[i]) s->out[i] = near;
        } else {
            float crossing = c * ey - d * ex, distance = ax * ey - ay * ex, share = -aside;
            if (crossing < 0.0f) crossing = -crossing, distance = -distance, share = -share;
            if (share >= 0.0f && share <= crossing && distance > 0.0f && distance < s->out[i] * crossing)
                s->out[i] = distance / crossing;
        }
    }
}

// The same on all beams between the directions `low` and `low + width`, modulo a full turn.
static void sweep(const Scan *s, float low, float width, float ax, float ay, float ex, float ey, float radius) {
    float slack = 1.0f + 1e-3f / s->spacing, turn = 2.0f * PI / s->spacing;
    float from = (low - s->first) / s->spacing - slack, to = from + width / s->spacing + 2.0f * slack;
    for (int k = -1; k <= 1; k++) {
        float begin = ceilf(from + k * turn), end = floorf(to + k * turn);
        begin = begin < 0.0f ? 0.0f : begin, end = end > s->beams - 1 ? s->beams - 1 : end;
        if (begin <= end) beams(s, (long)begin, (long)end, ax, ay, ex, ey, radius);
    }
}

static void disturb(const Scan *s, float noise, uint32_t draw) {
    for (long i = 0; i < s->beams; i++) {
        uint32_t word = mix_(draw ^ (uint32_t)(i + 1) * GOLDEN_);
        int total = (word & 255) + (word >> 8 & 255) + (word >> 16 & 255) + (word >> 24);
        float found = clamp(s->out[i] + (total - 510.0f) * (noise / 147.8f), 0.0f, s->range);
        s->out[i] = s->out[i] < s->range ? found : s->out[i];
    }
}

// Ranges `out` [N, beams] of the lidars; `cosine` and `sine` are those of the beams' angles from the front.
void scan(long n, long beams, float first, float spacing, float range, float noise, const float *cosine,
          const float *sine, const float *state, const float *parameters, const int32_t *key, const int32_t *steps,
          long nc, const float *circles, long ns, const float *segments, float *out) {
    float at[4][ns + 1], angle[2][ns + 1];
    uint8_t seen[ns + 1];
    Scan s = {beams, first, spacing, range, cosine, sine, out};
    for (long i = 0; i < n; i++, state += STATE, circles += 3 * nc, segments += 4 * ns, s.out += beams) {
        float c = cosf(state[YAW]), d = sinf(state[YAW]), mounted = parameters[PARAMETERS * i + LIDAR_X_M];
        float x = state[X] + mounted * c, y = state[Y] + mounted * d;
        for (long j = 0; j < beams; j++) s.out[j] = range;
        for (long j = 0; j < nc; j++) {
            float dx = circles[3 * j] - x, dy = circles[3 * j + 1] - y, radius = circles[3 * j + 2];
            float squared = dx * dx + dy * dy, reach = range + radius;
            if (squared > reach * reach || squared <= radius * radius) continue;
            float ax = c * dx + d * dy, ay = c * dy - d * dx;
            float half = 0.5f * PI * radius / sqrtf(squared);  // asin(x) <= pi x / 2
            sweep(&s, direction(ay, ax) - half, 2.0f * half, ax, ay, 0.0f, 0.0f, radius);
        }
        for (long j = 0; j < ns; j++) {
            float ax = segments[4 * j] - x, ay = segments[4 * j + 1] - y;
            float bx = segments[4 * j + 2] - x, by = segments[4 * j + 3] - y;
            at[0][j] = c * ax + d * ay, at[1][j] = c * ay - d * ax;
            at[2][j] = c * bx + d * by, at[3][j] = c * by - d * bx;
            seen[j] = apart(ax, ay, bx, by) < range * range;
            angle[0][j] = direction(at[1][j], at[0][j]);
            angle[1][j] = direction(at[3][j], at[2][j]);
        }
        for (long j = 0; j < ns; j++) {
            if (!seen[j]) continue;
            float low = angle[0][j], width = angle[1][j] - low;
            width += width < -PI ? 2.0f * PI : (width > PI ? -2.0f * PI : 0.0f);
            low += width < 0.0f ? width : 0.0f;
            sweep(&s, low, fabsf(width), at[0][j], at[1][j], at[2][j] - at[0][j], at[3][j] - at[1][j], 0.0f);
        }
        if (noise > 0.0f) disturb(&s, noise, mix_((uint32_t)key[i] + (uint32_t)steps[i] * COUNTER_));
    }
}

// 1 for cells [m, size, size] of square rooms around the origin whose centres are farther than `clear` from shapes.
void open_cells(long m, long size, float cell, float half, float clear, long nc, const float *circles, long ns,
                const float *segments, uint8_t *open) {
    for (long k = 0; k < m; k++, circles += 3 * nc, segments += 4 * ns, open += size * size) {
        memset(open, 1, size * size);
        for (long j = 0; j < nc + ns; j++) {
            int round = j < nc;
            const float *c = circles + 3 * j, *g = segments + 4 * (j - nc);
            float ax = round ? c[0] : g[0], ay = round ? c[1] : g[1], bx = round ? ax : g[2], by = round ? ay : g[3];
            float radius = round ? c[2] : 0.0f, ex = bx - ax, ey = by - ay;
            float squared = ex * ex + ey * ey, reach = radius + clear + cell;  // one cell more, tested exactly below
            squared = squared < 1e-9f ? 1e-9f : squared;
            long low_x = clamp((fminf(ax, bx) - reach + half) / cell, 0.0f, size);
            long low_y = clamp((fminf(ay, by) - reach + half) / cell, 0.0f, size);
            long high_x = clamp((fmaxf(ax, bx) + reach + half) / cell, 0.0f, size);
            long high_y = clamp((fmaxf(ay, by) + reach + half) / cell, 0.0f, size);
            for (long i = low_x; i < high_x; i++) {
                for (long l = low_y; l < high_y; l++) {
                    float x = (i + 0.5f) * cell - half - ax, y = (l + 0.5f) * cell - half - ay;
                    float share = clamp((x * ex + y * ey) / squared, 0.0f, 1.0f);
                    x -= share * ex, y -= share * ey;
                    if (sqrtf(x * x + y * y) - radius <= clear) open[i * size + l] = 0;
                }
            }
        }
    }
}
