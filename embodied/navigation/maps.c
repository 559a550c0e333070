// Shortest paths on grids, and the maps of `local_map.LocalMap`: the reference, whose numbers these are, bit for bit;
// and distances of `dynamic_window.py`.
//
// compiled.py keeps products and sums apart here, as torch does. Arrays are [n, ...] in row-major order.

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 16
typedef float lanes[LANES];

static inline float least(float a, float b) { return a < b ? a : b; }

static inline long within(float cell, long low, long high) {
    return cell >= (float)high ? high : (cell > (float)low ? (long)cell : low);
}

// One row of a grid: every cell takes the minimum over its neighbour in the row along `direction`, and the three in the
// row `before`. Returns whether that changed anything.
static int sweep_row(
    long size, float cell, float aslant, long direction, const lanes *cost, const lanes *before, lanes *value
) {
    uint32_t changed[LANES] = {0};
    for (long i = 0, j = direction > 0 ? 0 : size - 1; i < size; i++, j += direction) {
        for (long l = 0; l < LANES; l++) {
            float straight = cell * cost[j][l], diagonal = aslant * cost[j][l];
            float best = least(before[j - 1][l], before[j + 1][l]) + diagonal;
            best = least(best, before[j][l] + straight);
            best = least(best, value[j - direction][l] + straight);
            changed[l] |= best < value[j][l];
            value[j][l] = least(best, value[j][l]);
        }
    }
    uint32_t any = 0;
    for (long l = 0; l < LANES; l++) any |= changed[l];
    return any != 0;
}

// Distances `value` of `LANES` grids at once, [side + 2, side + 2] with a border that is infinite: every cell takes the
// minimum over its eight neighbours of their distance plus the step length (`cell`, or `aslant`) times its own `cost`,
// until none changes. Rows are swept down and up alternately; those that can't change are left out.
static void relax(long size, float cell, float aslant, const lanes *cost, lanes *value) {
    long wide = size + 2;
    uint8_t last[wide], now[wide];
    memset(last, 1, wide);
    for (long sweep = 0, any = 1; any || sweep < 2; sweep++) {
        long direction = sweep % 2 ? -1 : 1;
        memset(now, 0, wide);
        any = 0;
        for (long n = 0, i = direction > 0 ? 1 : size; n < size; n++, i += direction) {
            if (sweep > 1 && !last[i] && !last[i - direction] && !now[i - direction]) continue;
            lanes *row = value + i * wide + 1;
            now[i] = sweep_row(size, cell, aslant, direction, cost + i * wide + 1, row - direction * wide, row);
            any |= now[i];
        }
        memcpy(last, now, wide);
    }
}

// Costs and distances of `LANES` grids with their borders.
typedef struct { lanes *cost, *value; } Grids;

static Grids allocate(long size) {
    long count = (size + 2) * (size + 2);
    Grids grids = {malloc(count * sizeof(lanes)), malloc(count * sizeof(lanes))};
    for (long j = 0; j < count; j++)
        for (long l = 0; l < LANES; l++) grids.cost[j][l] = 1.0f, grids.value[j][l] = INFINITY;
    return grids;
}

static void discard(Grids grids) { free(grids.cost), free(grids.value); }

static void put(lanes *grids, long count, long size, const float *const *rows) {
    for (long i = 0; i < size; i++)
        for (long j = 0; j < size; j++)
            for (long l = 0; l < count; l++) grids[(i + 1) * (size + 2) + j + 1][l] = rows[l][i * size + j];
}

static void get(const lanes *grids, long count, long size, float *const *rows) {
    for (long i = 0; i < size; i++)
        for (long j = 0; j < size; j++)
            for (long l = 0; l < count; l++) rows[l][i * size + j] = grids[(i + 1) * (size + 2) + j + 1][l];
}

// Distances `value` [m, size, size] over `cost` from what they are.
void shortest_distances(long m, long size, float cell, float aslant, const float *cost, float *value) {
    Grids grids = allocate(size);
    const float *costs[LANES];
    float *values[LANES];
    for (long first = 0; first < m; first += LANES) {
        long count = m - first < LANES ? m - first : LANES;
        for (long l = 0; l < count; l++) {
            costs[l] = cost + (first + l) * size * size;
            values[l] = value + (first + l) * size * size;
        }
        put(grids.cost, count, size, costs);
        put(grids.value, count, size, (const float *const *)values);
        relax(size, cell, aslant, grids.cost, grids.value);
        get(grids.value, count, size, values);
    }
    discard(grids);
}

// Distances `out` [n], m, from `position` [n, 2] to goals, by the nine cells around it of `lengths` [n, size, size];
// infinite where all are `blocked`.
void path_length_at(
    long n, long size, float cell, float half, float blocked, const float *lengths, const float *position, float *out
) {
    for (long k = 0; k < n; k++, lengths += size * size, position += 2) {
        long at[2];
        for (int axis = 0; axis < 2; axis++) at[axis] = within(floorf((position[axis] + half) / cell), -2, size + 1);
        out[k] = INFINITY;
        for (long i = at[0] - 1; i <= at[0] + 1; i++) {
            for (long j = at[1] - 1; j <= at[1] + 1; j++) {
                long row = i < 0 ? 0 : (i >= size ? size - 1 : i), column = j < 0 ? 0 : (j >= size ? size - 1 : j);
                float from_there = lengths[row * size + column];
                float x = ((float)row + 0.5f) * cell - half - position[0];
                float y = ((float)column + 0.5f) * cell - half - position[1];
                if (from_there < blocked) out[k] = least(out[k], from_there + sqrtf(x * x + y * y));
            }
        }
    }
}

// What `LocalMap` is made of, in the order of `mapping.CompiledMap`; `length` is that of a memory.
typedef struct {
    int64_t length, age, hits, scans_from, side, beams, apart, far, ahead, scans, scans_every, sectors;
    float cell, range, lidar_x, fades, near_m, blocked_m, between_m, near, blocked, aslant, nowhere, remembered_squared;
} Map;

// Cell along one axis of a position, m from the map's centre; the nearest if outside, the first if that is no number.
static inline long cell_of(const Map *map, float place) {
    return within(floorf(place / map->cell + 0.5f * (float)map->side), 0, map->side - 1);
}

// Where, `there`, a beam `direction` (cosine, sine) of a vehicle `at`, `heading`, reaches `far`.
static inline void place(
    const Map *map, const float *at, const float *heading, const float *direction, float far, float *there
) {
    float x = far * direction[0] + map->lidar_x, y = far * direction[1];
    there[0] = at[0] + (heading[0] * x - heading[1] * y), there[1] = at[1] + (heading[1] * x + heading[0] * y);
}

// Index of the cell in which that is; -1 if outside.
static inline long reached(
    const Map *map, const float *at, const float *heading, const float *direction, float far
) {
    float there[2], half = 0.5f * (float)map->side * map->cell;
    place(map, at, heading, direction, far, there);
    if (!(fabsf(there[0]) < half && fabsf(there[1]) < half)) return -1;
    return cell_of(map, there[0]) * map->side + cell_of(map, there[1]);
}

// Store the hits of `lidar` [n, beams]; forget those that beams go through. Exact ones replace those of the oldest scan.
void map_mark(
    const Map *map, long n, const float *at, const float *heading, const float *directions, const float *lidar,
    float *memory
) {
    long cells = map->side * map->side;
    uint8_t *through = malloc(cells);
    for (long k = 0; k < n; k++, at += 2, heading += 2, lidar += map->beams, memory += map->length) {
        float *seen = memory + map->hits;
        memset(through, 0, cells);
        for (long beam = 0; beam < map->beams; beam += map->apart) {
            float free_to = lidar[beam] - 1.5f * map->cell;
            for (long step = 1; step <= map->far && map->cell * (float)step < free_to; step++) {
                long index = reached(map, at, heading, directions + 2 * beam, map->cell * (float)step);
                if (index >= 0) through[index] = 1;
            }
        }
        for (long index = 0; index < cells; index++) {
            float left = seen[index] - map->fades * (float)through[index];
            seen[index] = left < 0.0f ? 0.0f : left;
        }
        for (long beam = 0; beam < map->beams; beam++) {
            long index = reached(map, at, heading, directions + 2 * beam, lidar[beam]);
            if (index >= 0 && lidar[beam] < map->range && seen[index] < 1.0f) seen[index] = 1.0f;
        }
        long age = (long)memory[map->age];
        if (age % map->scans_every) continue;
        float *exact = memory + map->scans_from + age / map->scans_every % map->scans * 2 * map->beams;
        for (long beam = 0; beam < map->beams; beam++, exact += 2) {
            if (lidar[beam] < map->range) place(map, at, heading, directions + 2 * beam, lidar[beam], exact);
            else exact[0] = exact[1] = map->nowhere;
        }
    }
    free(through);
}

// Cost factors `cost` of one map's cells by how near the hits are; `work` has room for two grids with borders. Only
// distances below `near_m` matter, which so many steps lead to.
static void costs(const Map *map, const float *seen, float *work, float *cost) {
    long side = map->side, wide = side + 2, count = wide * wide;
    float *apart = work, *next = work + count;
    for (long j = 0; j < 2 * count; j++) work[j] = INFINITY;
    for (long i = 0; i < side; i++)
        for (long j = 0; j < side; j++) apart[(i + 1) * wide + j + 1] = seen[i * side + j] > 0.0f ? 0.0f : INFINITY;
    for (float reach = map->cell; reach < map->near_m; reach += map->cell) {
        for (long i = wide; i < count - wide; i += wide) {
            for (long j = i + 1; j <= i + side; j++) {
                float straight = least(least(apart[j - 1], apart[j + 1]), least(apart[j - wide], apart[j + wide]));
                float above = least(apart[j - wide - 1], apart[j - wide + 1]);
                float below = least(apart[j + wide - 1], apart[j + wide + 1]);
                float found = least(straight + map->cell, least(above, below) + map->aslant);
                next[j] = least(apart[j], found);
            }
        }
        float *swapped = apart;
        apart = next, next = swapped;
    }
    for (long i = 0; i < side; i++) {
        for (long j = 0; j < side; j++) {
            long index = (i + 1) * wide + j + 1;
            float share = (map->near_m - apart[index]) / map->between_m;
            share = share < 0.0f ? 0.0f : (share > 1.0f ? 1.0f : share);
            float factor = 1.0f + (map->near - 1.0f) * (share * share);
            cost[i * side + j] = apart[index] < map->blocked_m ? map->blocked : factor;
        }
    }
}

// Find costs of the shortest paths to the goals from all cells, for the maps that are `due` [n].
void map_plan(const Map *map, long n, const uint8_t *due, const float *end, float *memory) {
    long side = map->side, wide = side + 2, cells = side * side;
    Grids grids = allocate(side);
    float *work = malloc((2 * wide * wide + LANES * cells) * sizeof(float)), *factors = work + 2 * wide * wide;
    float *rows[LANES];
    const float *cost[LANES];
    long start[LANES];
    for (long k = 0, count = 0; k < n; k++) {
        float *row = memory + k * map->length;
        if (due[k]) {
            costs(map, row + map->hits, work, factors + count * cells);
            cost[count] = factors + count * cells;
            start[count] = (cell_of(map, end[2 * k]) + 1) * wide + cell_of(map, end[2 * k + 1]) + 1;
            rows[count++] = row + map->hits + cells;
        }
        if (count == LANES || (count && k == n - 1)) {
            for (long j = 0; j < wide * wide; j++)
                for (long l = 0; l < LANES; l++) grids.value[j][l] = INFINITY;
            for (long l = 0; l < count; l++) grids.value[start[l]][l] = 0.0f;
            put(grids.cost, count, side, cost);
            relax(side, map->cell, map->aslant, grids.cost, grids.value);
            get(grids.value, count, side, rows);
            count = 0;
        }
    }
    free(work);
    discard(grids);
}

// Waypoints `out` [n, 2 ahead] on the path at distances `ahead_m`, and its cost [n], before it is limited.
void map_observe(
    const Map *map, long n, const float *ahead_m, const float *at, const float *heading, const float *end,
    const float *goal, const float *memory, float *out, float *cost
) {
    long side = map->side, steps = 0;
    for (long w = 0; w < map->ahead; w++) {
        long needed = (long)ceilf(ahead_m[w] / map->cell) + 1;
        steps = needed > steps ? needed : steps;
    }
    for (long k = 0; k < n; k++, at += 2, heading += 2, end += 2, goal += 2, out += 2 * map->ahead) {
        const float *left = memory + k * map->length + map->hits + side * side;
        long cell[] = {cell_of(map, at[0]), cell_of(map, at[1])};
        cost[k] = left[cell[0] * side + cell[1]];
        float target[map->ahead][2];
        uint8_t going[map->ahead];
        for (long w = 0; w < map->ahead; w++) target[w][0] = end[0], target[w][1] = end[1], going[w] = 1;
        for (long step = 0; step < steps; step++) {
            long x = cell[0], y = cell[1];
            float best = NAN;
            for (long i = x - 1; i <= x + 1; i++) {
                for (long j = y - 1; j <= y + 1; j++) {
                    long row = i < 0 ? 0 : (i >= side ? side - 1 : i), column = j < 0 ? 0 : (j >= side ? side - 1 : j);
                    float there = left[row * side + column];
                    if (!(there >= best)) best = there, cell[0] = row, cell[1] = column;
                }
            }
            float place[2];
            for (int axis = 0; axis < 2; axis++)
                place[axis] = (((float)cell[axis] + 0.5f) - 0.5f * (float)side) * map->cell;
            float dx = place[0] - at[0], dy = place[1] - at[1], far = sqrtf(dx * dx + dy * dy);
            for (long w = 0; w < map->ahead; w++) {
                if (going[w]) target[w][0] = place[0], target[w][1] = place[1];
                going[w] &= far < ahead_m[w];
            }
        }
        for (long w = 0; w < map->ahead; w++) {
            float ex = target[w][0] - end[0], ey = target[w][1] - end[1];
            float x = target[w][0] - at[0], y = target[w][1] - at[1];
            int arrived = sqrtf(ex * ex + ey * ey) < 1.5f * map->cell;
            out[2 * w] = arrived ? goal[0] : heading[0] * x + heading[1] * y;
            out[2 * w + 1] = arrived ? goal[1] : heading[0] * y - heading[1] * x;
        }
    }
}

// Squared distances `out` [n, beams] of the nearest remembered hits in the directions of beams, of vehicles `at`,
// `heading`; infinite without one.
void map_remembered(
    const Map *map, long n, const float *at, const float *heading, const int32_t *beam_of_sector, const float *memory,
    float *out
) {
    float x[map->beams], y[map->beams], squared[map->beams], share[map->beams];
    for (long k = 0; k < n; k++, at += 2, heading += 2, memory += map->length, out += map->beams) {
        const float *exact = memory + map->scans_from;
        for (long beam = 0; beam < map->beams; beam++) out[beam] = INFINITY;
        for (long scan = 0; scan < map->scans; scan++, exact += 2 * map->beams) {
            for (long i = 0; i < map->beams; i++) {
                float ahead = exact[2 * i] - at[0], aside = exact[2 * i + 1] - at[1];
                x[i] = heading[0] * ahead + heading[1] * aside - map->lidar_x;
                y[i] = heading[0] * aside - heading[1] * ahead;
                squared[i] = x[i] * x[i] + y[i] * y[i], share[i] = y[i] / (fabsf(x[i]) + fabsf(y[i]));
            }
            for (long i = 0; i < map->beams; i++) {
                if (!(squared[i] < map->remembered_squared) || share[i] != share[i]) continue;
                float turn = x[i] < 0.0f ? (y[i] < 0.0f ? -2.0f - share[i] : 2.0f - share[i]) : share[i];
                long sector = (long)((turn + 2.0f) * (0.25f * (float)map->sectors));
                long beam = beam_of_sector[sector < map->sectors ? sector : map->sectors - 1];
                if (beam < map->beams) out[beam] = least(squared[i], out[beam]);
            }
        }
    }
}

// Smallest distance `out` [n, poses] of a rectangle at `pose` [n, poses, 3] from `points` [n, beams, 2]. Distant points
// are skipped: distances above `FARTHEST` are not exact.
#define FARTHEST 3.0f
void clearance(long n, float half_length, float half_width, long poses, const float *pose, long beams,
               const float *points, float *out) {
    long most = (beams + LANES - 1) / LANES * LANES;
    float px[most], py[most];
    for (long i = 0; i < n; i++, points += 2 * beams) {
        long near = 0;
        for (long j = 0; j < beams; j++)
            if (fabsf(points[2 * j]) < FARTHEST && fabsf(points[2 * j + 1]) < FARTHEST)
                px[near] = points[2 * j], py[near++] = points[2 * j + 1];
        for (; near % LANES; near++) px[near] = py[near] = 1e3f;
        for (long k = 0; k < poses; k++, pose += 3) {
            float c = cosf(pose[2]), s = sinf(pose[2]), found = FARTHEST * FARTHEST;
            lanes nearest;
            for (int l = 0; l < LANES; l++) nearest[l] = found;
            for (long j = 0; j < near; j += LANES) {
                for (int l = 0; l < LANES; l++) {
                    float dx = px[j + l] - pose[0], dy = py[j + l] - pose[1];
                    float x = fabsf(c * dx + s * dy) - half_length, y = fabsf(c * dy - s * dx) - half_width;
                    x = x > 0.0f ? x : 0.0f, y = y > 0.0f ? y : 0.0f;
                    nearest[l] = least(x * x + y * y, nearest[l]);
                }
            }
            for (int l = 0; l < LANES; l++) found = least(nearest[l], found);
            *out++ = sqrtf(found);
        }
    }
}
