// robosuite 1.4's OSC_POSE controller; controller.py is the numpy reference.
#pragma once

#include <math.h>
#include <string.h>

#include "native_types.h"

#define GRIPPER_SPEED 0.01    // of the normalised command, per substep
#define RANK_TOLERANCE 1e-15  // of pinv in robosuite, relative to the largest singular value

// Lower Cholesky factor of the n x n matrix a, in place; 0 if a is close to singular.
static int factor(double* a, int n) {
  double largest = 0;
  for (int i = 0; i < n; i++) largest = fmax(largest, a[i * n + i]);
  for (int i = 0; i < n; i++) {
    for (int j = 0; j <= i; j++) {
      double sum = a[i * n + j];
      for (int k = 0; k < j; k++) sum -= a[i * n + k] * a[j * n + k];
      if (i != j) a[i * n + j] = sum / a[j * n + j];
      else if (!(sum > 1e-10 * largest)) return 0;
      else a[i * n + i] = sqrt(sum);
    }
  }
  return 1;
}

// x := (l l')^-1 x
static void substitute(const double* l, int n, double* x) {
  for (int i = 0; i < n; i++) {
    for (int k = 0; k < i; k++) x[i] -= l[i * n + k] * x[k];
    x[i] /= l[i * n + i];
  }
  for (int i = n - 1; i >= 0; i--) {
    for (int k = i + 1; k < n; k++) x[i] -= l[k * n + i] * x[k];
    x[i] /= l[i * n + i];
  }
}

// Eigenvalues w and eigenvectors (columns of v) of the symmetric n x n matrix a, n <= 6, by Jacobi rotations.
static void eigen(double* a, int n, double* w, double* v) {
  for (int i = 0; i < n * n; i++) v[i] = i % (n + 1) == 0;
  for (int sweep = 0; sweep < 30; sweep++) {
    for (int p = 0; p < n; p++) {
      for (int q = p + 1; q < n; q++) {
        if (a[p * n + q] == 0) continue;
        double theta = (a[q * n + q] - a[p * n + p]) / (2 * a[p * n + q]);
        double t = (theta < 0 ? -1 : 1) / (fabs(theta) + sqrt(theta * theta + 1));
        double c = 1 / sqrt(t * t + 1), s = t * c;
        for (int k = 0; k < n; k++) {
          double x = a[k * n + p], y = a[k * n + q];
          a[k * n + p] = c * x - s * y;
          a[k * n + q] = s * x + c * y;
        }
        for (int k = 0; k < n; k++) {
          double x = a[p * n + k], y = a[q * n + k];
          a[p * n + k] = c * x - s * y;
          a[q * n + k] = s * x + c * y;
          x = v[k * n + p], y = v[k * n + q];
          v[k * n + p] = c * x - s * y;
          v[k * n + q] = s * x + c * y;
        }
        a[p * n + q] = a[q * n + p] = 0;
      }
    }
  }
  for (int i = 0; i < n; i++) w[i] = a[i * n + i];
}

// x := pinv(a) x for the symmetric positive semidefinite n x n matrix a, n <= 6, which is overwritten.
static void pseudo_solve(double* a, int n, double* x) {
  double saved[36], w[6], v[36], y[6] = {0}, largest = 0;
  memcpy(saved, a, sizeof(double) * n * n);
  if (factor(a, n)) {
    substitute(a, n, x);
    return;
  }
  eigen(saved, n, w, v);
  for (int i = 0; i < n; i++) largest = fmax(largest, fabs(w[i]));
  for (int i = 0; i < n; i++) {
    if (fabs(w[i]) <= RANK_TOLERANCE * largest) continue;
    double projection = 0;
    for (int k = 0; k < n; k++) projection += v[k * n + i] * x[k];
    for (int k = 0; k < n; k++) y[k] += v[k * n + i] * projection / w[i];
  }
  memcpy(x, y, sizeof(double) * n);
}

static double clip(double x, double low, double high) { return x < low ? low : x > high ? high : x; }

// Rotation by the axis-angle vector, rounded to single precision as robosuite rounds it.
static void rotation_matrix(const double axis_angle[3], double matrix[9]) {
  double angle = sqrt(axis_angle[0] * axis_angle[0] + axis_angle[1] * axis_angle[1] + axis_angle[2] * axis_angle[2]);
  float q[4] = {(float)cos(angle / 2)};
  for (int i = 0; i < 3; i++) q[i + 1] = (float)(axis_angle[i] / angle * sin(angle / 2));
  double norm = 0;
  for (int i = 0; i < 4; i++) norm += (float)(q[i] * q[i]);  // as BLAS sums single precision
  double scale = sqrt(2.0 / (float)norm);
  for (int i = 0; i < 4; i++) q[i] = (float)(q[i] * scale);
  float p[4][4];
  for (int i = 0; i < 4; i++)
    for (int j = 0; j < 4; j++) p[i][j] = q[i] * q[j];
  const double result[9] = {1.0 - p[2][2] - p[3][3], p[1][2] - p[3][0],       p[1][3] + p[2][0],
                            p[1][2] + p[3][0],       1.0 - p[1][1] - p[3][3], p[2][3] - p[1][0],
                            p[1][3] - p[2][0],       p[2][3] + p[1][0],       1.0 - p[1][1] - p[2][2]};
  memcpy(matrix, result, sizeof(result));
}

// Goal of the control step: the present pose plus the scaled action; without rotation the old orientation is kept.
static void set_goal(const Simulation* s, const double action[7], double goal_position[3]) {
  const double* position = s->data->site_xpos + 3 * s->scene->grip_site;
  const double* orientation = s->data->site_xmat + 9 * s->scene->grip_site;
  double turn[3], rotation[9];
  for (int i = 0; i < 3; i++) {
    goal_position[i] = position[i] + 0.05 * clip(action[i], -1, 1);
    turn[i] = 0.5 * clip(action[i + 3], -1, 1);
  }
  if (turn[0] == 0 && turn[1] == 0 && turn[2] == 0) return;
  rotation_matrix(turn, rotation);
  mju_mulMatMat(s->controller->goal_orientation, rotation, orientation, 3, 3, 3);
}

// Joint-space inertia of the arm [7, 7], from MuJoCo's rows over each joint's ancestors.
static void arm_inertia(const Simulation* s, double inertia[ARM * ARM]) {
  const mjModel* m = s->model;
  memset(inertia, 0, sizeof(double) * ARM * ARM);
  for (int i = 0; i < ARM; i++) {
    int dof = s->scene->arm_dof[i], start = m->M_rowadr[dof];
    for (int k = start, j = 0; k < start + m->M_rownnz[dof]; k++) {
      while (j < i && s->scene->arm_dof[j] < m->M_colind[k]) j++;
      if (s->scene->arm_dof[j] == m->M_colind[k]) inertia[i * ARM + j] = inertia[j * ARM + i] = s->data->M[k];
    }
  }
}

// Jacobian [6, 7] of the grip site: linear rows, then angular rows.
static void arm_jacobian(const Simulation* s, double jacobian[6 * ARM]) {
  const double* centre = s->data->subtree_com + 3 * s->model->body_rootid[s->model->site_bodyid[s->scene->grip_site]];
  double lever[3];
  mju_sub3(lever, s->data->site_xpos + 3 * s->scene->grip_site, centre);
  for (int i = 0; i < ARM; i++) {
    const double* motion = s->data->cdof + 6 * s->scene->arm_dof[i];
    double moved[3];
    mju_cross(moved, motion, lever);
    for (int k = 0; k < 3; k++) {
      jacobian[k * ARM + i] = motion[3 + k] + moved[k];
      jacobian[(3 + k) * ARM + i] = motion[k];
    }
  }
}

// Inverse operational-space inertia J M^-1 J' [6, 6]; 0 where M is not positive definite.
static int inverse_task_inertia(const double inertia[ARM * ARM], const double jacobian[6 * ARM], double result[36]) {
  double l[ARM * ARM], half[6][ARM];
  memcpy(l, inertia, sizeof(l));
  if (!factor(l, ARM)) return 0;
  for (int r = 0; r < 6; r++) {
    for (int i = 0; i < ARM; i++) {
      half[r][i] = jacobian[r * ARM + i];
      for (int k = 0; k < i; k++) half[r][i] -= l[i * ARM + k] * half[r][k];
      half[r][i] /= l[i * ARM + i];
    }
    for (int c = 0; c <= r; c++) result[r * 6 + c] = result[c * 6 + r] = mju_dot(half[r], half[c], ARM);
  }
  return 1;
}

// Force or torque (part 0 or 1) that moves the hand as desired, decoupled from the other part.
static void task_wrench(const double inverse[36], int part, double desired[3]) {
  double block[9];
  for (int i = 0; i < 3; i++)
    for (int j = 0; j < 3; j++) block[3 * i + j] = inverse[6 * (3 * part + i) + 3 * part + j];
  pseudo_solve(block, 3, desired);
}

// Desired linear and angular accelerations of the hand: kp 150, critically damped.
static void desired_accelerations(const Simulation* s, const double goal_position[3], const double velocity[6],
                                  double desired[6]) {
  const double* now = s->data->site_xmat + 9 * s->scene->grip_site;
  const double* goal = s->controller->goal_orientation;
  const double kp = 150, kd = 2 * sqrt(kp);
  double error[6] = {0};
  mju_sub3(error, goal_position, s->data->site_xpos + 3 * s->scene->grip_site);
  for (int axis = 0; axis < 3; axis++) {
    const double from[3] = {now[axis], now[3 + axis], now[6 + axis]};
    const double to[3] = {goal[axis], goal[3 + axis], goal[6 + axis]};
    double cross[3];
    mju_cross(cross, from, to);
    mju_addTo3(error + 3, cross);
  }
  mju_scl3(error + 3, error + 3, 0.5);
  for (int i = 0; i < 6; i++) desired[i] = kp * error[i] - kd * velocity[i];
}

// OSC_POSE torques: hand towards its goal, posture in the null space; what compensates gravity and Coriolis is added by
// drive_arm.
static int arm_torques(const Simulation* s, const double goal_position[3], double torques[ARM]) {
  const Scene* scene = s->scene;
  const mjData* d = s->data;
  double inertia[ARM * ARM], jacobian[6 * ARM], inverse[36], velocity[6], wrench[6], posture[ARM], leak[6];
  double joint_velocity[ARM];
  for (int i = 0; i < ARM; i++) joint_velocity[i] = d->qvel[scene->arm_dof[i]];
  arm_inertia(s, inertia);
  arm_jacobian(s, jacobian);
  if (!inverse_task_inertia(inertia, jacobian, inverse)) return 0;

  mju_mulMatVec(velocity, jacobian, joint_velocity, 6, ARM);
  desired_accelerations(s, goal_position, velocity, wrench);
  task_wrench(inverse, 0, wrench);
  task_wrench(inverse, 1, wrench + 3);

  const double kp = 10, kd = 2 * sqrt(kp);
  for (int i = 0; i < ARM; i++)
    posture[i] = kp * (s->controller->posture[i] - d->qpos[scene->arm_qpos[i]]) - kd * joint_velocity[i];
  mju_mulMatVec(leak, jacobian, posture, 6, ARM);  // the posture task's effect on the hand, subtracted
  pseudo_solve(inverse, 6, leak);
  mju_subFrom(wrench, leak, 6);

  for (int i = 0; i < ARM; i++) {
    torques[i] = mju_dot(inertia + ARM * i, posture, ARM);
    for (int k = 0; k < 6; k++) torques[i] += jacobian[k * ARM + i] * wrench[k];
  }
  return 1;
}

// The same for the state that stock's controller last read: the arm at rest in its posture; the goal too.
static int recalled_torques(const Simulation* s, const double action[7], double goal_position[3], double torques[ARM]) {
  mjData* d = s->data;
  double qpos[ARM], qvel[ARM];
  for (int i = 0; i < ARM; i++) {
    double* position = d->qpos + s->scene->arm_qpos[i];
    double* velocity = d->qvel + s->scene->arm_dof[i];
    qpos[i] = *position, qvel[i] = *velocity;
    *position = s->controller->posture[i], *velocity = 0;
  }
  mj_kinematics(s->model, d);
  mj_comPos(s->model, d);
  mj_makeM(s->model, d);
  set_goal(s, action, goal_position);
  int ok = arm_torques(s, goal_position, torques);
  for (int i = 0; i < ARM; i++) d->qpos[s->scene->arm_qpos[i]] = qpos[i], d->qvel[s->scene->arm_dof[i]] = qvel[i];
  return ok;
}

static void drive_arm(const Simulation* s, const double torques[ARM]) {
  for (int i = 0; i < ARM; i++) {
    const double* range = s->model->actuator_ctrlrange + 2 * s->scene->arm_actuator[i];
    double torque = torques[i] + s->data->qfrc_bias[s->scene->arm_dof[i]];
    s->data->ctrl[s->scene->arm_actuator[i]] = clip(torque, range[0], range[1]);
  }
}

// The two fingers' commands move in opposite directions towards closed (action > 0) or open, in [-1, 1] of their range.
static void control_gripper(const Simulation* s, double action) {
  double sign = (action > 0) - (action < 0);
  for (int i = 0; i < 2; i++) {
    double* command = s->controller->gripper + i;
    const double* range = s->model->actuator_ctrlrange + 2 * s->scene->gripper_actuator[i];
    *command = clip(*command + (i == 0 ? -1 : 1) * GRIPPER_SPEED * sign, -1, 1);
    s->data->ctrl[s->scene->gripper_actuator[i]] = 0.5 * (range[1] + range[0]) + 0.5 * (range[1] - range[0]) * *command;
  }
}
