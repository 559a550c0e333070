// Omits collision tests of geoms that cannot touch: most of the time of tests between meshes is spent on these.
//
// After a test without contacts, the plane half-way between the geoms' closest points is kept, and the gap between the
// geoms along its normal. As long as they have moved by less than this gap relative to each other, or are still apart
// along the same normal, MuJoCo's test would return no contacts. The results are the same bits.
#pragma once

#include <math.h>

#include "native_types.h"

#define TOLERANCE 1e-5  // m, more than that of MuJoCo's tests (ccd_tolerance, 1e-6)
#define FARTHEST 10.0   // m, of MuJoCo's distances

static mjfCollision tests[mjNGEOMTYPES][mjNGEOMTYPES];  // MuJoCo's own
static _Thread_local const Simulation* stepped;         // by this thread; NULL: all tests are MuJoCo's

// Sets the pose of geom `inner` in the frame of geom `outer`.
static void set_pose(Separation* s, const mjData* d) {
  const double *a = d->geom_xmat + 9 * s->outer, *b = d->geom_xmat + 9 * s->inner;
  const double *from = d->geom_xpos + 3 * s->outer, *to = d->geom_xpos + 3 * s->inner;
  const double offset[3] = {to[0] - from[0], to[1] - from[1], to[2] - from[2]};
  for (int i = 0; i < 3; i++) {
    s->position[i] = a[i] * offset[0] + a[3 + i] * offset[1] + a[6 + i] * offset[2];
    for (int j = 0; j < 3; j++) s->rotation[3 * i + j] = a[i] * b[j] + a[3 + i] * b[3 + j] + a[6 + i] * b[6 + j];
  }
}

// Upper bound of the displacement of the points of `inner` of this radius: |p - p0| + r |R - R0|, spectral norm.
static double displacement(const Separation* old, const Separation* now, double radius) {
  double turns = 0, shifts = 0;
  for (int i = 0; i < 9; i++) turns += (now->rotation[i] - old->rotation[i]) * (now->rotation[i] - old->rotation[i]);
  for (int i = 0; i < 3; i++) shifts += (now->position[i] - old->position[i]) * (now->position[i] - old->position[i]);
  // Singular values of a difference of rotations are (s, s, 0): the Frobenius norm is sqrt(2) s.
  return sqrt(shifts) + radius * sqrt(turns / 2);
}

// Largest coordinate along the unit vector `direction`, world frame, of a geom's points; a bound for boxes and meshes.
static double extent(const mjModel* m, const mjData* d, int geom, const double direction[3]) {
  double local[3], largest = -mjMAXVAL;
  mju_mulMatTVec3(local, d->geom_xmat + 9 * geom, direction);
  int mesh = m->geom_type[geom] == mjGEOM_MESH ? m->geom_dataid[geom] : -1;
  if (m->geom_type[geom] == mjGEOM_BOX) {
    const double* size = m->geom_size + 3 * geom;
    largest = size[0] * fabs(local[0]) + size[1] * fabs(local[1]) + size[2] * fabs(local[2]);
  } else if (mesh >= 0 && m->mesh_graphadr[mesh] >= 0) {
    const float* vertices = m->mesh_vert + 3 * (size_t)m->mesh_vertadr[mesh];
    const int* graph = m->mesh_graph + m->mesh_graphadr[mesh];  // number of vertices and faces, edges, vertices
    const int* hull = graph + 2 + graph[0];
    for (int i = 0; i < graph[0]; i++) {
      const float* vertex = vertices + 3 * hull[i];
      double along = local[0] * vertex[0] + local[1] * vertex[1] + local[2] * vertex[2];
      if (along > largest) largest = along;
    }
  } else {
    return mjMAXVAL;
  }
  return largest + mju_dot3(direction, d->geom_xpos + 3 * geom) + m->geom_margin[geom];
}

// Unit vector, world frame, from the point of `outer` that is closest to `inner`; 0 if they overlap.
static void closest_direction(const mjModel* m, mjData* d, int outer, int inner, double direction[3]) {
  double ends[6];
  const Simulation* simulation = stepped;
  stepped = NULL;
  double distance = mj_geomDistance(m, d, outer, inner, FARTHEST, ends);
  stepped = simulation;
  mju_sub3(direction, ends + 3, ends);
  if (distance > TOLERANCE) mju_normalize3(direction);
  else mju_zero3(direction);
}

// Keeps the present pose and gap of two geoms along `normal`, world frame from `outer` to `inner`.
static void keep(Separation* kept, const mjModel* m, const mjData* d, const Separation* now, const double normal[3]) {
  double opposite[3];
  mju_scl3(opposite, normal, -1);
  *kept = *now;
  mju_mulMatTVec3(kept->normal, d->geom_xmat + 9 * now->outer, normal);
  kept->gap = -extent(m, d, now->inner, opposite) - extent(m, d, now->outer, normal) - TOLERANCE;
}

static int test_unless_apart(const mjModel* m, mjData* d, mjPreContact* contacts, int g1, int g2, mjtNum margin) {
  mjfCollision test = tests[m->geom_type[g1]][m->geom_type[g2]];
  if (!stepped) return test(m, d, contacts, g1, g2, margin);
  Separation* kept = stepped->separations + (unsigned)(31 * g1 + g2) % SEPARATIONS;
  int larger = m->geom_rbound[g1] < m->geom_rbound[g2];
  Separation now = {.outer = larger ? g2 : g1, .inner = larger ? g1 : g2};
  set_pose(&now, d);
  double normal[3];
  if (kept->outer == now.outer && kept->inner == now.inner) {
    if (displacement(kept, &now, m->geom_rbound[now.inner]) < kept->gap) return 0;
    mju_mulMatVec3(normal, d->geom_xmat + 9 * now.outer, kept->normal);
    keep(kept, m, d, &now, normal);
    if (kept->gap > 0) return 0;
  }
  int count = test(m, d, contacts, g1, g2, margin);
  if (count) return count;
  closest_direction(m, d, now.outer, now.inner, normal);
  keep(kept, m, d, &now, normal);
  return 0;
}

// Puts these tests in front of MuJoCo's, once in a process: the library may be loaded several times, and a second time
// would put them in front of themselves.
static void install_separation(void) {
  if (tests[mjGEOM_MESH][mjGEOM_MESH]) return;
  const int types[2] = {mjGEOM_BOX, mjGEOM_MESH};
  for (int i = 0; i < 2; i++) {
    mjfCollision* test = &mjCOLLISIONFUNC[types[i]][mjGEOM_MESH];
    tests[types[i]][mjGEOM_MESH] = *test;
    *test = test_unless_apart;
  }
}
