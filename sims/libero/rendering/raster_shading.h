// Light on what is seen: Phong's model with MuJoCo's lights, each pixel once, after all geoms are drawn.
#pragma once
#include "raster_solids.h"
#include "raster_texture.h"

#define STRIP 64  // pixels that are lit together

// Pixels of a strip that show a geom, in the camera's frame.
typedef struct {
  int count;
  int pixel[STRIP];
  float at[3][STRIP], normal[3][STRIP], view[3][STRIP];  // view: towards the camera, unit length
  float colour[3][STRIP], emission[STRIP], specular[STRIP], shininess[STRIP];
  float diffuse_light[3][STRIP], specular_light[3][STRIP];
} Strip;

// A light of one state, in the camera's frame.
typedef struct {
  Light kind;
  float at[3], direction[3], diffuse[3], specular[3];
} Lamp;

// base^exponent to 1e-4, for base from 0 to 1 and clamped to it: log2 by the series of artanh, exp2 by that of exp. Unlike
// powf it is computed for eight pixels at once, and the same everywhere.
static inline Floats power(Floats base, Floats exponent) {
  Ints bits = (Ints)least(most(base, all(1e-30f)), all(1.0f));
  Ints shift = (bits - 0x3f3504f3) >> 23;  // the mantissa becomes sqrt(1/2) to sqrt(2)
  Floats mantissa = (Floats)(bits - (shift << 23));
  Floats s = (mantissa - 1.0f) / (mantissa + 1.0f), q = s * s;
  Floats series = s * (2.88539008f + q * (0.961796694f + q * (0.577078016f + q * 0.412198583f)));
  Floats x = most(exponent * (__builtin_convertvector(shift, Floats) + series), all(-126.0f));
  Ints whole = __builtin_convertvector(x - 0.5f, Ints);
  Floats r = (x - __builtin_convertvector(whole, Floats)) * 0.693147181f;
  Floats fraction = 1.0f + r * (1.0f + r * (0.5f + r * (1.0f / 6 + r * (1.0f / 24 + r * (1.0f / 120)))));
  return (Floats)((whole + 127) << 23) * fraction;
}

static inline Floats dot(const Floats* a, const Floats* b) { return a[0] * b[0] + a[1] * b[1] + a[2] * b[2]; }

static inline Floats unit_length_by(const Floats* a) { return 1.0f / square_root(most(dot(a, a), all(1e-20f))); }

// Adds one lamp's light on eight pixels of a strip from `i` on.
static inline void light(Strip* s, const Lamp* lamp, int i) {
  const Light* kind = &lamp->kind;
  Floats direction[3], normal[3], to[3], half[3], strength = all(1.0f);
  for (int k = 0; k < 3; k++) {
    direction[k] = all(lamp->direction[k]);
    normal[k] = *(Floats*)(s->normal[k] + i);
    to[k] = -direction[k];
  }
  if (kind->type != DIRECTIONAL) {
    for (int k = 0; k < 3; k++) to[k] = lamp->at[k] - *(Floats*)(s->at[k] + i);
    Floats by = unit_length_by(to), far = 1.0f / by;
    for (int k = 0; k < 3; k++) to[k] *= by;
    strength = 1.0f / (kind->attenuation[0] + far * (kind->attenuation[1] + far * kind->attenuation[2]));
  }
  if (kind->type == SPOT) {
    Floats along = -dot(to, direction);
    strength = choose(along >= kind->cutoff, strength * power(along, all(kind->exponent)), all(0.0f));
  }
  Floats falls = most(all(0.0f), dot(normal, to)), shininess = *(Floats*)(s->shininess + i);
  for (int k = 0; k < 3; k++) half[k] = to[k] + *(Floats*)(s->view[k] + i);
  Floats highlight = strength * *(Floats*)(s->specular + i) * power(dot(normal, half) * unit_length_by(half), shininess);
  highlight = choose((falls > 0) & (shininess > 0), highlight, all(0.0f));
  for (int k = 0; k < 3; k++) {
    *(Floats*)(s->diffuse_light[k] + i) += lamp->diffuse[k] * (falls * strength);
    *(Floats*)(s->specular_light[k] + i) += lamp->specular[k] * highlight;
  }
}

// What is seen at one pixel: its point, normal and colour.
static void add_to_strip(Strip* s, const Picture* p, const Geom* g, const Frame* f, int x, int y) {
  int pixel = y * p->stride + x, i = s->count++, face = p->face[pixel];
  const float ray[3] = {p->across[x], p->down[y], 1.0f};
  float z = p->depth[pixel], o[3], d[3], at[3], n[3], colour[3] = {1.0f, 1.0f, 1.0f};
  camera_in(f, o);
  for (int k = 0; k < 3; k++) {
    d[k] = f->m[0][k] * ray[0] + f->m[1][k] * ray[1] + f->m[2][k] * ray[2];
    at[k] = o[k] + d[k] * z;
  }
  if (g->type == MESH) {
    const float *a = g->normals + 9 * (size_t)face, u = p->u[pixel], v = p->v[pixel];
    for (int k = 0; k < 3; k++) n[k] = a[k] * u + a[3 + k] * v + a[6 + k] * (1.0f - u - v);
  } else {
    solid_normal(g, o, d, at, n);
  }
  float by = 1.0f / sqrtf(maxf(dot3(n, n), 1e-30f));
  for (int k = 0; k < 3; k++) n[k] *= by;
  if (g->texture.pixels) texture_colour(g, at, n, face, p->u[pixel], p->v[pixel], colour);
  float back = -1.0f / sqrtf(dot3(ray, ray));
  for (int k = 0; k < 3; k++) {
    s->at[k][i] = ray[k] * z;
    s->view[k][i] = ray[k] * back;
    s->normal[k][i] = dot3(f->m[k], n);
    s->colour[k][i] = colour[k] * g->colour[k];
    s->diffuse_light[k][i] = s->specular_light[k][i] = 0.0f;
  }
  s->pixel[i] = y * p->width + x;
  s->emission[i] = g->emission, s->specular[i] = g->specular, s->shininess[i] = g->shininess;
}

static unsigned char level(float x) { return (unsigned char)(clampf(x, 0.0f, 1.0f) * 255.0f); }

// Lights a strip, writes its pixels [., 3] and empties it.
static void finish_strip(Strip* s, const Lamp* lamps, int num_lamps, const float ambient[3], unsigned char* pixels) {
  for (int k = 0; k < num_lamps; k++)
    for (int i = 0; i < s->count; i += LANES) light(s, lamps + k, i);
  for (int i = 0; i < s->count; i++)
    for (int k = 0; k < 3; k++) {
      float light = s->emission[i] + ambient[k] + s->diffuse_light[k][i];
      pixels[3 * s->pixel[i] + k] = level(s->colour[k][i] * light + s->specular_light[k][i]);
    }
  s->count = 0;
}
