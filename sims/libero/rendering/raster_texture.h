// Where a surface's point lies in its texture, and the texture's colour there: MuJoCo's conventions for each kind of geom,
// as mujoco_warp's ray tracer has them.
#pragma once
#include "raster_types.h"

#define PI_F 3.14159265358979f

// Bilinear between the centres of texels; beyond the outermost, their colour.
static void sample(const Texture* t, float u, float v, float colour[3]) {
  float x = clampf(u * (float)t->width - 0.5f, 0.0f, (float)(t->width - 1));
  float y = clampf(v * (float)t->height - 0.5f, 0.0f, (float)(t->height - 1));
  int x0 = (int)x, y0 = (int)y;
  int x1 = x0 + 1 < t->width ? x0 + 1 : x0, y1 = y0 + 1 < t->height ? y0 + 1 : y0;
  float right = x - (float)x0, down = y - (float)y0;
  const float* above = t->pixels + 3 * (size_t)y0 * t->width;
  const float* below = t->pixels + 3 * (size_t)y1 * t->width;
  for (int k = 0; k < 3; k++) {
    float a = above[3 * x0 + k] * (1.0f - right) + above[3 * x1 + k] * right;
    float b = below[3 * x0 + k] * (1.0f - right) + below[3 * x1 + k] * right;
    colour[k] = a * (1.0f - down) + b * down;
  }
}

// Share of a turn about z, from 0 to 1.
static float turn(const float at[3]) {
  float angle = atan2f(at[1], at[0]);
  return (angle < 0 ? angle + 2 * PI_F : angle) / (2 * PI_F);
}

static void box_texcoord(const float s[3], const float at[3], const float n[3], float uv[2]) {
  float x = fabsf(n[0]), y = fabsf(n[1]), z = fabsf(n[2]);
  float across, down;  // from -1 to 1
  if (z >= x && z >= y) {
    across = at[0] / s[0];
    down = n[2] > 0 ? -at[1] / s[1] : at[1] / s[1];
  } else {
    int side = x >= y && x >= z;
    across = side ? (n[0] > 0 ? at[1] : -at[1]) / s[1] : (n[1] < 0 ? at[0] : -at[0]) / s[0];
    down = -at[2] / s[2];
  }
  uv[0] = 0.5f + 0.5f * across, uv[1] = 0.5f + 0.5f * down;
}

static void round_texcoord(const Geom* g, const float at[3], const float n[3], float uv[2]) {
  const float* s = g->size;
  if (g->type == SPHERE || g->type == ELLIPSOID) {
    int ball = g->type == SPHERE;
    float p[3] = {at[0] / s[0], at[1] / s[ball ? 0 : 1], at[2] / s[ball ? 0 : 2]};
    uv[0] = turn(p), uv[1] = 0.5f - asinf(clampf(p[2] / sqrtf(dot3(p, p)), -1.0f, 1.0f)) / PI_F;
  } else if (g->type == CYLINDER && fabsf(n[2]) > 0.7071f) {
    uv[0] = 0.5f + 0.5f * at[0] / s[0], uv[1] = 0.5f + 0.5f * at[1] / s[0];
  } else {
    float over = (fabsf(at[2]) - s[1]) / s[0];  // of a capsule's end
    uv[0] = turn(at), uv[1] = (s[1] - at[2]) / (2.0f * s[1]);
    if (g->type == CAPSULE && over > 0) {
      float share = asinf(minf(over, 1.0f)) * 2.0f / PI_F;
      uv[1] = at[2] > 0 ? 1.0f - share : share;
    }
  }
}

// Colour of geom `g`'s texture at its point `at` with normal `n`, in its frame; on a mesh, of `face` with the shares `u`
// and `v` of its first corners.
static void texture_colour(const Geom* g, const float at[3], const float n[3], int face, float u, float v,
                           float colour[3]) {
  const float* s = g->size;
  float uv[2], repeat[2] = {g->repeat[0], g->repeat[1]}, offset = 0.0f;
  if (g->type == PLANE) {
    for (int k = 0; k < 2; k++) {
      float sign = k ? -1.0f : 1.0f;
      uv[k] = s[k] > 0 ? (sign * at[k] + s[k]) / (2.0f * s[k]) : 0.5f * sign * at[k];
      if (s[k] > 0 && g->uniform) repeat[k] *= s[k];
    }
    if (s[0] <= 0 || s[1] <= 0) offset = -0.5f;
  } else if (g->type == MESH) {
    const float* t = g->texcoords ? g->texcoords + 6 * (size_t)face : NULL;
    if (t && !isnan(t[0])) {
      for (int k = 0; k < 2; k++) uv[k] = t[k] * u + t[2 + k] * v + t[4 + k] * (1.0f - u - v);
    } else {
      uv[0] = 0.5f * at[0], uv[1] = -0.5f * at[1], offset = -0.5f;
      for (int k = 0; k < 2; k++)
        if (s[k] > 0 && !g->uniform) repeat[k] /= s[k];
    }
  } else {
    if (g->type == BOX)
      box_texcoord(s, at, n, uv);
    else
      round_texcoord(g, at, n, uv);
    if (g->uniform) repeat[0] *= s[0], repeat[1] *= s[g->type == BOX || g->type == ELLIPSOID ? 1 : 0];
  }
  for (int k = 0; k < 2; k++) {
    uv[k] = uv[k] * repeat[k] + offset;
    uv[k] -= floorf(uv[k]);
  }
  sample(&g->texture, uv[0], uv[1], colour);
}

// Colour of the sky in direction `d`, in the world's frame: OpenGL's cube map, whose y is the world's z.
static void sky_colour(const Texture* sky, const float d[3], float colour[3]) {
  float r[3] = {d[0], d[2], -d[1]};
  float x = fabsf(r[0]), y = fabsf(r[1]), z = fabsf(r[2]);
  int axis = x >= y && x >= z ? 0 : y >= z ? 1 : 2;
  int behind = r[axis] <= 0;
  float along = fabsf(r[axis]) < 1e-20f ? 1e-20f : fabsf(r[axis]);
  float across = axis == 0 ? (behind ? r[2] : -r[2]) : axis == 2 && behind ? -r[0] : r[0];
  float down = axis == 1 ? (behind ? -r[2] : r[2]) : -r[1];
  float half_texel = 0.5f / (float)sky->width;  // no filtering across the border between faces
  float v = clampf(0.5f + 0.5f * down / along, half_texel, 1.0f - half_texel);
  sample(sky, 0.5f + 0.5f * across / along, ((float)(2 * axis + behind) + v) / 6.0f, colour);
}
