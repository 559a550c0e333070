// Structs shared by the parts of native.c; native.py mirrors them.
#pragma once

#include <mujoco/mujoco.h>

#define ARM 7
#define SEPARATIONS 256  // pairs of geoms that a simulation remembers

enum { IN = 0, ON_OBJECT = 1, ON_SITE = 2, JOINT = 3 };

typedef struct {  // predicates.py: Predicate
  int kind, a, b, owner_a, owner_b, any_joint, num_addresses, addresses[8];
  double size[3], sign, threshold;
} Predicate;

typedef struct {  // addresses in the model
  int arm_qpos[ARM], arm_dof[ARM], arm_actuator[ARM], gripper_actuator[2], grip_site, num_goal;
  const int* geom_owner;
  const Predicate* goal;
} Scene;

typedef struct {  // state between control steps; fresh: none was run yet
  double goal_orientation[9], posture[ARM], gripper[2], fresh;
} Controller;

typedef struct {  // of two geoms known to be apart: native_separation.h; in the frame of geom `outer`
  int outer, inner;
  double rotation[9], position[3], normal[3], gap;
} Separation;

typedef struct {
  mjModel* model;
  mjData* data;
  const Scene* scene;
  Controller* controller;
  Separation* separations;  // [SEPARATIONS]
} Simulation;
