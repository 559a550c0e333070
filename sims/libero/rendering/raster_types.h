// What the rasteriser reads and writes; rasteriser.py has the same layouts.
//
// The camera's frame: x to the right, y down, z forwards. A pixel's ray is (dx, dy, 1), so that the parameter along it is
// the depth z. Nothing is divided by z before it is known to be positive: there is no near plane and nothing to clip.
#pragma once
#include <math.h>
#include <stdlib.h>
#include <string.h>

// Eight numbers at a time, in whatever registers the processor has (an extension of GCC and clang): boxes of a node,
// triangles of a leaf, columns of a row, pixels of a strip. A comparison gives -1 where it holds.
#define LANES 8
typedef float Floats __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int Ints __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

enum { PLANE = 0, SPHERE = 2, CAPSULE = 3, ELLIPSOID = 4, CYLINDER = 5, BOX = 6, MESH = 7 };  // mjtGeom
enum { SPOT = 0, DIRECTIONAL = 1 };                                                            // mjtLightType

typedef struct {
  Floats centre[3], half[3];  // boxes in the mesh's frame
  int child[LANES];           // a node, or ~ a leaf
  int count;
} Node;

typedef struct {
  Floats corner[3][3];  // [corner][axis][triangle]; triangles that fill up are points
  int face[LANES];
} Leaf;

typedef struct {
  Node* nodes;  // the first is the root
  Leaf* leaves;
  int num_nodes, num_leaves;
} Tree;

typedef struct {
  const float* pixels;  // [height, width, 3]; NULL: none
  int width, height;
} Texture;

typedef struct {
  const Tree* tree;        // of a mesh
  const float* normals;    // [faces, 3, 3] of a mesh's corners
  const float* texcoords;  // [faces, 3, 2] of a mesh's corners, NaN where a face has none; NULL: none has
  Texture texture;
  int type, id;  // id: its row in the poses
  float size[3];
  float centre[3], half[3];  // a box around it, in its frame
  float colour[3];
  float repeat[2];
  int uniform;
  float specular, shininess, emission;  // shininess: the exponent
} Geom;

typedef struct {
  int type;
  float attenuation[3], cutoff, exponent;  // cutoff: cosine
} Light;

typedef struct {
  const Geom* geoms;
  const Light* lights;
  const int* cameras;   // [num_cameras] rows in the poses
  const float* focals;  // [num_cameras] focal lengths, pixels
  Texture sky;          // six faces, one below the other
  int num_geoms, num_lights, num_cameras, width, height;
  int pose_geoms, pose_cameras;  // rows of a state's poses
  float far;                     // m
  float ambient[3], head_diffuse[3], head_specular[3];
} Scene;

typedef struct {
  const double *geom_xpos, *geom_xmat, *cam_xpos, *cam_xmat, *light_xpos, *light_xdir;
  const float *light_diffuse, *light_specular;
} Poses;

// From a geom's frame into the camera's: rotation m, origin t.
typedef struct {
  float m[3][3], t[3];
} Frame;

// A picture being drawn: what each pixel's ray meets first.
typedef struct {
  int width, height, stride;  // stride: a row's width in memory, a multiple of LANES
  float focal;
  float* across;  // [stride] dx of a column's rays
  float* down;    // [height] dy of a row's rays
  float* depth;   // [height, stride]
  int* geom;      // [height, stride] index; -1: the sky
  int* face;      // [height, stride] of a mesh
  float* u;       // [height, stride] share of the face's first corner
  float* v;       // of its second
} Picture;

// Pixels [left, right) x [top, bottom), and the depth at which what is in them may begin.
typedef struct {
  int left, right, top, bottom;
  float near;
} Area;

static inline float dot3(const float* a, const float* b) { return a[0] * b[0] + a[1] * b[1] + a[2] * b[2]; }
static inline float clampf(float x, float low, float high) { return x < low ? low : x > high ? high : x; }
static inline float minf(float a, float b) { return a < b ? a : b; }
static inline Floats all(float x) { return (Floats){x, x, x, x, x, x, x, x}; }
static inline Floats choose(Ints where, Floats a, Floats b) { return (Floats)((where & (Ints)a) | (~where & (Ints)b)); }
static inline Floats least(Floats a, Floats b) { return choose(a < b, a, b); }
static inline Floats most(Floats a, Floats b) { return choose(a > b, a, b); }
static inline Floats size_of(Floats a) { return (Floats)((Ints)a & 0x7fffffff); }
static inline Floats square_root(Floats a) {
  Floats r;
  for (int i = 0; i < LANES; i++) r[i] = sqrtf(a[i]);
  return r;
}
static inline int anywhere(Ints a) {
  int any = 0;
  for (int i = 0; i < LANES; i++) any |= a[i];
  return any;
}
static inline float maxf(float a, float b) { return a > b ? a : b; }

// Coincident surfaces: the geom with the larger index is seen, as with the ray tracer and in OpenGL; of one mesh's faces
// the nearer.
#define COINCIDENT 3e-6f
static inline int closer(float z, int geom, float depth, int shown) {
  float slack = COINCIDENT * maxf(depth, 1.0f);
  return z < depth - slack || (z <= depth + slack && (geom > shown || (geom == shown && z < depth)));
}
