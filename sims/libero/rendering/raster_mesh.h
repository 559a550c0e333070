// Meshes: a tree is descended as far as its boxes may cover the centre of a pixel that nothing nearer covers. Most of the
// robot's triangles are far below a pixel, and never looked at; none is left out that would be seen.
//
// Triangles are tested with the edge functions of Olano and Greer 1997, "Triangle scan conversion using 2D homogeneous
// coordinates": right for triangles that reach behind the camera, too.
#pragma once
#include "raster_types.h"

#define FEW 16         // pixels whose depth is asked for before a box is entered
#define ROUNDING 1e-3f  // pixels by which boxes are widened
#define NEAREST 1e-6f   // m, depth below which boxes count as behind the camera
#define STACK 512      // 7 siblings wait at each level; trees are some ten levels deep

typedef struct {
  Ints left, right, top, bottom;
  Floats near;
} Areas;

// Pixels along one axis of `pixels` whose centres may be covered by what extends from `low` to `high`, metres from the
// axis, at depths whose inverses are given.
static inline void project_axis(float focal, int pixels, Floats low, Floats high, Floats by_near, Floats by_far,
                                Ints* first, Ints* end) {
  const Floats none = all(0.0f), size = all((float)pixels);
  low *= choose(low < 0, by_near, by_far), high *= choose(high > 0, by_near, by_far);
  // Column x is covered if its centre x + 0.5 is: from the first such column to the one after the last.
  low = 0.5f * size + focal * low + (0.5f - ROUNDING), high = 0.5f * size + focal * high + (0.5f + ROUNDING);
  *first = __builtin_convertvector(least(most(low, none), size), Ints);
  *end = __builtin_convertvector(least(most(high, none), size), Ints);
}

// Pixels whose centres eight boxes may cover; empty (right <= left) for a box behind the camera.
static void project(const Picture* p, const Frame* f, const Floats centre[3], const Floats half[3], Areas* out) {
  Floats c[3], e[3];
  for (int k = 0; k < 3; k++) {
    const float* m = f->m[k];
    c[k] = m[0] * centre[0] + m[1] * centre[1] + m[2] * centre[2] + f->t[k];
    e[k] = fabsf(m[0]) * half[0] + fabsf(m[1]) * half[1] + fabsf(m[2]) * half[2];
  }
  Floats near = c[2] - e[2], far = c[2] + e[2], nearest = all(NEAREST);
  Floats by_near = 1.0f / most(near, nearest), by_far = 1.0f / most(far, nearest);
  project_axis(p->focal, p->width, c[0] - e[0], c[0] + e[0], by_near, by_far, &out->left, &out->right);
  project_axis(p->focal, p->height, c[1] - e[1], c[1] + e[1], by_near, by_far, &out->top, &out->bottom);
  out->right &= far >= nearest;
  // In front of what it bounds by more than float's rounding, so that coincident surfaces are compared.
  out->near = most(near, all(0.0f)) * 0.99999f - 1e-5f;
}

static int hidden(const Picture* p, const Area* a) {
  if ((a->right - a->left) * (a->bottom - a->top) > FEW) return 0;
  for (int y = a->top; y < a->bottom; y++)
    for (int x = a->left; x < a->right; x++)
      if (a->near <= p->depth[y * p->stride + x]) return 0;
  return 1;
}

static void draw_leaf(Picture* p, const Leaf* leaf, const Frame* f, const Area* area, int geom) {
  Floats at[3][3], edge[3][3];
  for (int corner = 0; corner < 3; corner++)
    for (int k = 0; k < 3; k++) {
      const Floats* local = leaf->corner[corner];
      at[corner][k] = f->m[k][0] * local[0] + f->m[k][1] * local[1] + f->m[k][2] * local[2] + f->t[k];
    }
  // edge[c] is normal to the plane through the camera and the edge opposite to corner c. Two triangles on both sides of
  // an edge have the same numbers with opposite signs (no a*b+c is contracted), so that no ray passes between them.
  for (int c = 0; c < 3; c++) {
    const Floats *a = at[(c + 1) % 3], *b = at[(c + 2) % 3];
    for (int k = 0; k < 3; k++) edge[c][k] = a[(k + 1) % 3] * b[(k + 2) % 3] - a[(k + 2) % 3] * b[(k + 1) % 3];
  }
  Floats volume = at[0][0] * edge[0][0] + at[0][1] * edge[0][1] + at[0][2] * edge[0][2];
  Ints front = volume < 0;  // seen from the side from which its corners turn counter-clockwise
  if (!anywhere(front)) return;
  for (int y = area->top; y < area->bottom; y++)
    for (int x = area->left; x < area->right; x++) {
      int pixel = y * p->stride + x;
      if (area->near > p->depth[pixel]) continue;
      float dx = p->across[x], dy = p->down[y];
      Floats e0 = edge[0][0] * dx + edge[0][1] * dy + edge[0][2];
      Floats e1 = edge[1][0] * dx + edge[1][1] * dy + edge[1][2];
      Floats e2 = edge[2][0] * dx + edge[2][1] * dy + edge[2][2];
      Floats sum = e0 + e1 + e2;
      Ints inside = front & (e0 <= 0) & (e1 <= 0) & (e2 <= 0) & (sum < 0);
      if (!anywhere(inside)) continue;
      for (int i = 0; i < LANES; i++) {
        float z = volume[i] / sum[i];
        if (!inside[i] || !closer(z, geom, p->depth[pixel], p->geom[pixel])) continue;
        p->depth[pixel] = z;
        p->geom[pixel] = geom;
        p->face[pixel] = leaf->face[i];
        p->u[pixel] = e0[i] / sum[i];
        p->v[pixel] = e1[i] / sum[i];
      }
    }
}

typedef struct {
  int child;
  Area area;
} Waiting;

static void draw_mesh(Picture* p, const Tree* tree, const Frame* f, const Area* area, int geom) {
  Waiting stack[STACK] = {{0, *area}};
  for (int size = 1; size > 0;) {
    Waiting next = stack[--size];
    if (hidden(p, &next.area)) continue;
    if (next.child < 0) {
      draw_leaf(p, tree->leaves + ~next.child, f, &next.area, geom);
      continue;
    }
    const Node* node = tree->nodes + next.child;
    Areas areas;
    project(p, f, node->centre, node->half, &areas);
    int first = size;
    for (int i = 0; i < node->count && size < STACK; i++) {
      Area a = {areas.left[i], areas.right[i], areas.top[i], areas.bottom[i], areas.near[i]};
      if (a.right <= a.left || a.bottom <= a.top || hidden(p, &a)) continue;
      int k = size++;  // the nearest comes last, and is drawn first
      for (; k > first && stack[k - 1].area.near < a.near; k--) stack[k] = stack[k - 1];
      stack[k] = (Waiting){node->child[i], a};
    }
  }
}
