// Planes, boxes and round geoms: each pixel's ray is intersected exactly, eight columns at once. Only where a ray
// enters is seen: from inside, a geom is invisible, as with the ray tracer.
#pragma once
#include "raster_types.h"

typedef struct {
  Floats enter, leave;  // depths; enter > leave: never inside
} Inside;

static inline Floats not_zero(Floats x) { return choose(size_of(x) < 1e-20f, all(1e-20f), x); }

// Rays from o along d within |coordinate| <= size.
static inline Inside between(float o, Floats d, float size) {
  Floats by = 1.0f / not_zero(d), a = (-size - o) * by, b = (size - o) * by;
  return (Inside){least(a, b), most(a, b)};
}

// Rays where a z^2 + 2 b z + c <= 0. Roots that coincide are none, as with the ray tracer.
static inline Inside within(Floats a, Floats b, float c) {
  Floats inner = b * b - a * c, by = 1.0f / not_zero(a);
  Floats root = square_root(most(inner, all(0.0f)));
  Ints ever = inner >= 1e-15f;
  return (Inside){choose(ever, (-b - root) * by, all(INFINITY)), choose(ever, (-b + root) * by, all(-INFINITY))};
}

static inline Inside both(Inside a, Inside b) { return (Inside){most(a.enter, b.enter), least(a.leave, b.leave)}; }

static inline Floats entered(Inside i) {
  return choose((i.enter <= i.leave) & (i.enter >= 0), i.enter, all(INFINITY));
}

static inline Floats meet_plane(const float* s, const float* o, const Floats* d) {
  Floats z = -o[2] / d[2];
  Ints inside = (d[2] < -1e-15f) & (z >= 0);
  for (int k = 0; k < 2; k++)
    if (s[k] > 0) inside &= size_of(o[k] + z * d[k]) <= s[k];
  return choose(inside, z, all(INFINITY));
}

static inline Floats meet_box(const float* s, const float* o, const Floats* d) {
  return entered(both(both(between(o[0], d[0], s[0]), between(o[1], d[1], s[1])), between(o[2], d[2], s[2])));
}

static inline Inside in_ball(const float* o, const Floats* d, float radius) {
  Floats a = d[0] * d[0] + d[1] * d[1] + d[2] * d[2], b = o[0] * d[0] + o[1] * d[1] + o[2] * d[2];
  return within(a, b, dot3(o, o) - radius * radius);
}

static inline Floats meet_ellipsoid(const float* s, const float* o, const Floats* d) {
  const float p[3] = {o[0] / s[0], o[1] / s[1], o[2] / s[2]};
  const Floats q[3] = {d[0] / s[0], d[1] / s[1], d[2] / s[2]};
  return entered(in_ball(p, q, 1.0f));
}

static inline Inside around_axis(const float* s, const float* o, const Floats* d) {
  return within(d[0] * d[0] + d[1] * d[1], o[0] * d[0] + o[1] * d[1], o[0] * o[0] + o[1] * o[1] - s[0] * s[0]);
}

static inline Floats meet_cylinder(const float* s, const float* o, const Floats* d) {
  return entered(both(around_axis(s, o, d), between(o[2], d[2], s[1])));
}

static inline Floats meet_capsule(const float* s, const float* o, const Floats* d) {
  Floats side = around_axis(s, o, d).enter;
  Floats best = choose((side >= 0) & (size_of(o[2] + side * d[2]) <= s[1]), side, all(INFINITY));
  for (int end = -1; end <= 1; end += 2) {
    const float centre = (float)end * s[1], p[3] = {o[0], o[1], o[2] - centre};
    Floats z = in_ball(p, d, s[0]).enter;
    best = choose((z >= 0) & (z < best) & ((float)end * (o[2] + z * d[2]) >= s[1]), z, best);
  }
  return best;
}

// Depths at which rays from o along d enter the geom, infinite where they miss it.
static inline Floats meet(const Geom* g, const float* o, const Floats* d) {
  const float sphere[3] = {g->size[0], g->size[0], g->size[0]};
  switch (g->type) {
    case PLANE: return meet_plane(g->size, o, d);
    case BOX: return meet_box(g->size, o, d);
    case CAPSULE: return meet_capsule(g->size, o, d);
    case CYLINDER: return meet_cylinder(g->size, o, d);
    case SPHERE: return meet_ellipsoid(sphere, o, d);
    default: return meet_ellipsoid(g->size, o, d);
  }
}

// The camera in the geom's frame.
static void camera_in(const Frame* f, float o[3]) {
  for (int k = 0; k < 3; k++) o[k] = -(f->m[0][k] * f->t[0] + f->m[1][k] * f->t[1] + f->m[2][k] * f->t[2]);
}

static void draw_solid(Picture* p, const Geom* g, const Frame* f, const Area* area, int geom) {
  float o[3];
  camera_in(f, o);
  for (int y = area->top; y < area->bottom; y++)
    for (int x = area->left / LANES * LANES; x < area->right; x += LANES) {
      Floats d[3], dx = *(const Floats*)(p->across + x);
      for (int k = 0; k < 3; k++) d[k] = f->m[0][k] * dx + (f->m[1][k] * p->down[y] + f->m[2][k]);
      Floats z = meet(g, o, d), *depth = (Floats*)(p->depth + y * p->stride + x);
      Ints* shown = (Ints*)(p->geom + y * p->stride + x);
      Floats slack = COINCIDENT * most(*depth, all(1.0f));  // as `closer`
      Ints wins = (z < *depth - slack) | ((z <= *depth + slack) & (geom > *shown));
      *depth = choose(wins, z, *depth);
      *shown = (wins & geom) | (~wins & *shown);
    }
}

// The outward normal, in the geom's frame, at the point `at` where the ray from `o` along `d` enters.
static void solid_normal(const Geom* g, const float o[3], const float d[3], const float at[3], float n[3]) {
  const float* s = g->size;
  n[0] = n[1] = n[2] = 0.0f;
  if (g->type == PLANE) {
    n[2] = 1.0f;
  } else if (g->type == BOX) {
    int axis = 0;
    float last = -INFINITY;  // the side that is passed last is that of the entry
    for (int k = 0; k < 3; k++) {
      float enter = between(o[k], all(d[k]), s[k]).enter[0];
      if (enter > last) last = enter, axis = k;
    }
    n[axis] = d[axis] > 0 ? -1.0f : 1.0f;
  } else if (g->type == CYLINDER) {
    const Floats along[3] = {all(d[0]), all(d[1]), all(d[2])};
    if (between(o[2], along[2], s[1]).enter[0] > around_axis(s, o, along).enter[0])
      n[2] = d[2] > 0 ? -1.0f : 1.0f;
    else
      n[0] = at[0], n[1] = at[1];
  } else if (g->type == CAPSULE) {
    n[0] = at[0], n[1] = at[1], n[2] = at[2] - clampf(at[2], -s[1], s[1]);
  } else {
    for (int k = 0; k < 3; k++) n[k] = g->type == SPHERE ? at[k] : at[k] / (s[k] * s[k]);
  }
}
