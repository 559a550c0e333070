// Drag of the air by MuJoCo's inertia model (its documentation, chapter Computation, section Fluid forces).
//
// MuJoCo computes a Jacobian over all joints for each body, a tenth of the time of a step; here it is that of the joints
// between the body and its root. Products and sums are in MuJoCo's order, and the results are the same bits.
#pragma once

#include <math.h>
#include <string.h>

#include "native_types.h"

// Drag [6], torque and force, on a box of sides `a` at the velocity `v` [6], rotation first, in the box's frame.
static void drag(const mjOption* air, const double a[3], const double v[6], double force[6]) {
  const double rho = air->density, beta = air->viscosity;
  double diameter = (a[0] + a[1] + a[2]) / 3;
  for (int i = 0; i < 3; i++) {
    double aj = a[i == 0], ak = a[i == 2 ? 1 : 2], turning = v[i], moving = v[3 + i];
    // g = -pi beta d^3 w - rho a_i (a_j^4 + a_k^4) |w| w / 64
    force[i] = turning * (-mjPI * diameter * diameter * diameter * beta);
    force[i] -= rho * a[i] * (aj * aj * aj * aj + ak * ak * ak * ak) * fabs(turning) * turning / 64;
    // f = -3 pi beta d v - rho a_j a_k |v| v / 2
    force[3 + i] = moving * (-3 * mjPI * diameter * beta);
    force[3 + i] -= 0.5 * rho * aj * ak * fabs(moving) * moving;
  }
}

// Torque and force [6], world frame, of the drag on a body as on a box of its inertia.
static void body_drag(const mjModel* m, const mjData* d, int body, double force[6]) {
  const double* inertia = m->body_inertia + 3 * body;
  double sides[3], velocity[6], local[6];
  for (int i = 0; i < 3; i++) {
    // a_i^2 = 6 / M (I_j + I_k - I_i)
    double difference = inertia[i == 0] + inertia[i == 2 ? 1 : 2] - inertia[i];
    sides[i] = sqrt(fmax(mjMINVAL, difference) / m->body_mass[body] * 6);
  }
  mj_objectVelocity(m, d, mjOBJ_BODY, body, velocity, 1);
  drag(&m->opt, sides, velocity, local);
  mju_mulMatVec3(force, d->ximat + 9 * body, local);
  mju_mulMatVec3(force + 3, d->ximat + 9 * body, local + 3);
}

// Adds to `forces` [nv] what a torque and force [6] at a body's centre of mass are to the joints that move it: J' f.
static void add_joint_forces(const mjModel* m, const mjData* d, int body, const double force[6], double* forces) {
  double lever[3];
  mju_sub3(lever, d->xipos + 3 * body, d->subtree_com + 3 * m->body_rootid[body]);
  while (body && !m->body_dofnum[body]) body = m->body_parentid[body];
  int dof = body ? m->body_dofadr[body] + m->body_dofnum[body] - 1 : -1;
  for (; dof >= 0; dof = m->dof_parentid[dof]) {
    const double* axis = d->cdof + 6 * dof;
    double moved[3];
    mju_cross(moved, axis, lever);
    mju_addTo3(moved, axis + 3);
    forces[dof] += moved[0] * force[3] + moved[1] * force[4] + moved[2] * force[5];
    forces[dof] += axis[0] * force[0] + axis[1] * force[1] + axis[2] * force[2];
  }
}

// Adds the drag of the air to passive forces that were computed without it.
static void add_drag(const Simulation* s) {
  const mjModel* m = s->model;
  mjData* d = s->data;
  double force[6];
  mj_markStack(d);
  double* forces = mj_stackAllocNum(d, m->nv);
  memset(forces, 0, sizeof(double) * m->nv);
  for (int i = 1; i < m->nbody; i++) {
    if (d->body_awake[i] != mjS_AWAKE || m->body_mass[i] < mjMINVAL) continue;
    body_drag(m, d, i, force);
    add_joint_forces(m, d, i, force, forces);
  }
  mju_addTo(d->qfrc_passive, forces, m->nv);
  mj_freeStack(d);
}
