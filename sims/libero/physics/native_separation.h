// Omits collision tests of geoms that cannot touch, which are most of the tests between meshes and of their time.
//
// After a test without contacts, the plane half-way between the geoms' closest points is kept, and the gap between the
// geoms along its normal. As long as they have moved by less than this gap relative to each other, or are still apart
// along the same normal, they do not touch and MuJoCo's test would return no contacts: the results are the same bits.
#pragma once

#include <math.h>

#include "native_types.h"

#define TOLERANCE 1e-5      // m, more than that of MuJoCo's test (ccd_tolerance, 1e-6)
#define FARTHEST 10.0       // m, of MuJoCo's distances

static mjfCollision tests[mjNGEOMTYPES][mjNGEOMTYPES];  // MuJoCo's own
static _Thread_local const Simulation* stepped;         // by this thread; NULL: all tests are MuJoCo's

// Sets the pose of geom `inner` in the frame of geom `outer`.
static void relative_pose(const mjData* d, Separation* s) {
  double offset[3];
  mju_sub3(offset, d->geom_xpos + 3 * s->inner, d->geom_xpos + 3 * s->outer);
  mju_mulMatTVec3(s->position, d->geom_xmat + 9 * s->outer, offset);
  mju_mulMatTMat(s->rotation, d->geom_xmat + 9 * s->outer, d->geom_xmat + 9 * s->inner, 3, 3, 3);
}

// Upper bound of the displacement of the points of a geom of this radius: |p - p0| + r |R - R0|, spectral norm.
static double displacement(const Separation* old, const Separation* now, double radius) {
  double squares = 0;
  // Singular values of a difference of rotations are (s, s, 0): the Frobenius norm is sqrt(2) s.
  for (int i = 0; i < 9; i++) squares += (now->rotation[i] - old->rotation[i]) * (now->rotation[i] - old->rotation[i]);
  return mju_dist3(now->position, old->position) + radius * sqrt(squares / 2);
}

// Largest coordinate along the unit vector `direction`, world frame, of the points of a box or a mesh.
static double extent(const mjModel* m, const mjData* d, int geom, const double direction[3]) {
  double local[3], largest = -mjMAXVAL;
  mju_mulMatTVec3(local, d->geom_xmat + 9 * geom, direction);
  if (m->geom_type[geom] == mjGEOM_BOX) {
    const double* size = m->geom_size + 3 * geom;
    largest = size[0] * fabs(local[0]) + size[1] * fabs(local[1]) + size[2] * fabs(local[2]);
  } else {
    int mesh = m->geom_dataid[geom];
    const float* vertices = m->mesh_vert + 3 * (size_t)m->mesh_vertadr[mesh];
    const int* graph = m->mesh_graph + m->mesh_graphadr[mesh];  // number of vertices and faces, edges, vertices
    const int* hull = graph + 2 + graph[0];
    for (int i = 0; i < graph[0]; i++) {
      const float* vertex = vertices + 3 * hull[i];
      double along = local[0] * vertex[0] + local[1] * vertex[1] + local[2] * vertex[2];
      if (along > largest) largest = along;
    }
  }
  return largest + mju_dot3(direction, d->geom_xpos + 3 * geom);
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

// Keeps the present poses and gap along `normal`, world frame.
static void remember(Separation* separation, const mjModel* m, const mjData* d, const Separation* now,
                     const double normal[3]) {
  double opposite[3];
  mju_scl3(opposite, normal, -1);
  *separation = *now;
  mju_mulMatTVec3(separation->normal, d->geom_xmat + 9 * now->outer, normal);
  separation->gap = -extent(m, d, now->inner, opposite) - extent(m, d, now->outer, normal) - TOLERANCE;
}

static int test_unless_apart(const mjModel* m, mjData* d, mjPreContact* contacts, int g1, int g2, mjtNum margin) {
  mjfCollision test = tests[m->geom_type[g1]][m->geom_type[g2]];
  if (!stepped) return test(m, d, contacts, g1, g2, margin);
  Separation* kept = stepped->separations + (unsigned)(31 * g1 + g2) % SEPARATIONS;
  int larger = m->geom_rbound[g1] < m->geom_rbound[g2];
  Separation now = {.outer = larger ? g2 : g1, .inner = larger ? g1 : g2};
  relative_pose(d, &now);
  double normal[3];
  if (kept->outer == now.outer && kept->inner == now.inner) {
    if (displacement(kept, &now, m->geom_rbound[now.inner]) < kept->gap - margin) return 0;
    mju_mulMatVec3(normal, d->geom_xmat + 9 * now.outer, kept->normal);
    remember(kept, m, d, &now, normal);
    if (kept->gap > margin) return 0;
  }
  int count = test(m, d, contacts, g1, g2, margin);
  if (count) return count;
  closest_direction(m, d, now.outer, now.inner, normal);
  remember(kept, m, d, &now, normal);
  return 0;
}

// Puts these tests in front of MuJoCo's, once.
static void install_separation(void) {
  const int types[2] = {mjGEOM_BOX, mjGEOM_MESH};
  for (int i = 0; i < 2; i++) {
    mjfCollision* test = &mjCOLLISIONFUNC[types[i]][mjGEOM_MESH];
    tests[types[i]][mjGEOM_MESH] = *test;
    *test = test_unless_apart;
  }
}
