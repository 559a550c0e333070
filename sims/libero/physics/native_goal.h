// LIBERO's goal predicates; predicates.py is the numpy reference.
#pragma once

#include <math.h>

#include "native_types.h"

// Whether two geoms of bodies at rest touch: MuJoCo lists no contacts between those.
static int resting_contact(const mjModel* m, mjData* d, int g1, int g2) {
  if (d->body_awake[m->geom_bodyid[g1]] == mjS_AWAKE || d->body_awake[m->geom_bodyid[g2]] == mjS_AWAKE) return 0;
  if (!((m->geom_contype[g1] & m->geom_conaffinity[g2]) || (m->geom_contype[g2] & m->geom_conaffinity[g1]))) return 0;
  double reach = m->geom_rbound[g1] + m->geom_rbound[g2];
  int planes = m->geom_rbound[g1] == 0 || m->geom_rbound[g2] == 0;
  if (!planes && mju_dist3(d->geom_xpos + 3 * g1, d->geom_xpos + 3 * g2) > reach) return 0;
  return mj_geomDistance(m, d, g1, g2, 1e-3, NULL) < 0;
}

static int touch(const Simulation* s, const Predicate* p) {
  const mjModel* m = s->model;
  const int* owner = s->scene->geom_owner;
  mjData* d = s->data;
  for (int i = 0; i < d->ncon; i++) {
    int first = owner[d->contact[i].geom[0]], second = owner[d->contact[i].geom[1]];
    if ((first == p->owner_a && second == p->owner_b) || (first == p->owner_b && second == p->owner_a)) return 1;
  }
  if (d->ntree_awake == m->ntree) return 0;
  for (int i = 0; i < m->ngeom; i++)
    for (int j = 0; owner[i] == p->owner_a && j < m->ngeom; j++)
      if (owner[j] == p->owner_b && resting_contact(m, d, i, j)) return 1;
  return 0;
}

static int joints_hold(const Simulation* s, const Predicate* p) {
  int count = 0;
  for (int i = 0; i < p->num_addresses; i++) count += p->sign * (s->data->qpos[p->addresses[i]] - p->threshold) > 0;
  return p->any_joint ? count > 0 : count == p->num_addresses;
}

static int in_region(const Predicate* p, const double offset[3], const double* rotation) {
  double half[3];
  mju_mulMatVec3(half, rotation, p->size);
  for (int i = 0; i < 3; i++) half[i] = fabs(half[i]);
  return fabs(offset[0]) < half[0] && fabs(offset[1]) < half[1] && offset[2] > -half[2] - 0.01 && offset[2] < half[2];
}

static int over_region(const Predicate* p, const double offset[3], const double* rotation) {
  double local[3];
  mju_mulMatVec3(local, rotation, offset);
  return fabs(local[0]) < p->size[0] && fabs(local[1]) < p->size[1] && local[2] > p->size[2] - 0.005 &&
         local[2] < p->size[2] + 0.10;
}

static int holds(const Simulation* s, const Predicate* p) {
  const mjData* d = s->data;
  double offset[3];
  if (p->kind == JOINT) return joints_hold(s, p);
  mju_sub3(offset, d->xpos + 3 * p->a, p->kind == ON_OBJECT ? d->xpos + 3 * p->b : d->site_xpos + 3 * p->b);
  if (p->kind == ON_OBJECT) return offset[2] >= 0 && hypot(offset[0], offset[1]) < 0.03 && touch(s, p);
  const double* rotation = d->site_xmat + 9 * p->b;
  if (p->kind == IN) return in_region(p, offset, rotation);
  return over_region(p, offset, rotation) && (p->owner_b < 0 || touch(s, p));
}

static int satisfied(const Simulation* s) {
  for (int i = 0; i < s->scene->num_goal; i++)
    if (!holds(s, s->scene->goal + i)) return 0;
  return s->scene->num_goal > 0;
}
