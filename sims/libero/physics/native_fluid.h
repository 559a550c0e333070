// Drag of the air, MuJoCo's inertia model (its documentation, chapter Computation, Fluid forces), an eighth of the time
// of a step there. Forces of bodies are summed from the leaves of each tree to its root in place of a Jacobian each.
#pragma once

#include <math.h>
#include <string.h>

#include "native_types.h"

// Drag [6] on a body with the spatial velocity `velocity`, both torque (or rotation) first and in its inertial frame.
static void drag(const mjOption* air, const double inertia[3], double mass, const double velocity[6], double force[6]) {
  const double rho = air->density, beta = air->viscosity;
  double r[3];  // half-sizes of the box of this inertia: r_x = sqrt(3 / (2 M) (I_yy + I_zz - I_xx))
  double sum = inertia[0] + inertia[1] + inertia[2];
  for (int i = 0; i < 3; i++) r[i] = sqrt(1.5 / mass * fmax(sum - 2 * inertia[i], mjMINVAL));
  double radius = (r[0] + r[1] + r[2]) / 3;
  for (int i = 0; i < 3; i++) {
    double w = velocity[i], v = velocity[3 + i], rj = r[(i + 1) % 3], rk = r[(i + 2) % 3];
    // g = -8 beta pi r^3 w - rho r_i (r_j^4 + r_k^4) |w| w / 2
    double fourth = rj * rj * rj * rj + rk * rk * rk * rk;
    force[i] = -8 * beta * mjPI * radius * radius * radius * w - 0.5 * rho * r[i] * fourth * fabs(w) * w;
    // f = -6 beta pi r v - 2 rho r_j r_k |v| v
    force[3 + i] = -6 * beta * mjPI * radius * v - 2 * rho * rj * rk * fabs(v) * v;
  }
}

// Torque about the centre of mass of its tree, and force, of the drag on a body [6], world frame.
static void body_drag(const Simulation* s, const mjOption* air, int body, double force[6]) {
  const mjModel* m = s->model;
  const mjData* d = s->data;
  const double *twist = d->cvel + 6 * body, *frame = d->ximat + 9 * body;
  double lever[3], moved[3], velocity[6], local[6], torque[3];
  mju_sub3(lever, d->xipos + 3 * body, d->subtree_com + 3 * m->body_rootid[body]);
  mju_cross(moved, twist, lever);
  mju_addTo3(moved, twist + 3);
  mju_mulMatTVec3(velocity, frame, twist);
  mju_mulMatTVec3(velocity + 3, frame, moved);
  drag(air, m->body_inertia + 3 * body, m->body_mass[body], velocity, local);
  mju_mulMatVec3(force, frame, local);
  mju_mulMatVec3(force + 3, frame, local + 3);
  mju_cross(torque, lever, force + 3);
  mju_addTo3(force, torque);
}

// Adds the drag of the air to the passive forces, which do not have it.
static void add_drag(const Simulation* s, const mjOption* air) {
  const mjModel* m = s->model;
  mjData* d = s->data;
  mj_markStack(d);
  double* totals = mj_stackAllocNum(d, 6 * m->nbody);  // of each body and its descendants
  memset(totals, 0, sizeof(double) * 6 * m->nbody);
  for (int i = m->nbody - 1; i > 0; i--) {
    if (d->body_awake[i] != mjS_AWAKE) continue;
    double *total = totals + 6 * i, *parent = totals + 6 * m->body_parentid[i], force[6];
    if (m->body_mass[i] >= mjMINVAL) {
      body_drag(s, air, i, force);
      mju_addTo(total, force, 6);
    }
    for (int dof = m->body_dofadr[i]; dof < m->body_dofadr[i] + m->body_dofnum[i]; dof++)
      d->qfrc_passive[dof] += mju_dot(d->cdof + 6 * dof, total, 6);
    mju_addTo(parent, total, 6);
  }
  mj_freeStack(d);
}
