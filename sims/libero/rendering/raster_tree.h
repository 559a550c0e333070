// A mesh's bounding volume hierarchy with eight boxes a node and up to eight triangles a leaf.
//
// Splits are those of least surface area (binned; Wald 2007, "On fast construction of SAH-based bounding volume
// hierarchies"): CAD meshes have long thin triangles among small ones.
#pragma once
#include "raster_types.h"

#define BINS 16

typedef struct {
  float low[3], high[3];
} Span;

typedef struct {
  const float* vertices;  // [., 3]
  const int* faces;       // [., 3]
  Span* spans;            // of each face
  int* order;             // faces, sorted so that each node's are together
  Tree* tree;
} Builder;

typedef struct {
  int first, count;
  Span span;
} Range;

static Span no_span(void) {
  return (Span){{INFINITY, INFINITY, INFINITY}, {-INFINITY, -INFINITY, -INFINITY}};
}

static void widen(Span* span, const Span* other) {
  for (int i = 0; i < 3; i++) {
    span->low[i] = minf(span->low[i], other->low[i]);
    span->high[i] = maxf(span->high[i], other->high[i]);
  }
}

static float half_area(const Span* s) {
  float x = s->high[0] - s->low[0], y = s->high[1] - s->low[1], z = s->high[2] - s->low[2];
  return x < 0 ? 0.0f : x * y + y * z + z * x;
}

static float middle(const Builder* b, int face, int axis) {
  return 0.5f * (b->spans[face].low[axis] + b->spans[face].high[axis]);
}

static Range range_of(const Builder* b, int first, int count) {
  Range range = {first, count, no_span()};
  for (int i = first; i < first + count; i++) widen(&range.span, &b->spans[b->order[i]]);
  return range;
}

static int bin_of(const Builder* b, int face, int axis, float low, float scale) {
  int bin = (int)((middle(b, face, axis) - low) * scale);
  return bin < 0 ? 0 : bin >= BINS ? BINS - 1 : bin;
}

// The split along `axis` of least area, weighted by triangles: its cost, and in `*best` the first bin on its right.
static float cost_along(const Builder* b, const Range* r, int axis, float low, float scale, int* best) {
  Span bins[BINS];
  int counts[BINS] = {0};
  for (int k = 0; k < BINS; k++) bins[k] = no_span();
  for (int i = r->first; i < r->first + r->count; i++) {
    int k = bin_of(b, b->order[i], axis, low, scale);
    widen(&bins[k], &b->spans[b->order[i]]);
    counts[k]++;
  }
  float right[BINS], least = INFINITY;
  Span span = no_span();
  for (int k = BINS - 1, n = 0; k > 0; k--) {
    widen(&span, &bins[k]);
    n += counts[k];
    right[k] = half_area(&span) * (float)n;
  }
  span = no_span();
  for (int k = 1, n = 0; k < BINS; k++) {
    widen(&span, &bins[k - 1]);
    n += counts[k - 1];
    float cost = half_area(&span) * (float)n + right[k];
    if (n > 0 && n < r->count && cost < least) least = cost, *best = k;
  }
  return least;
}

// Splits a range of more than one triangle in two.
static void split(Builder* b, const Range* r, Range* left, Range* right) {
  float lows[3], scales[3], least = INFINITY;
  int axis = -1, bin = 0;
  for (int i = 0; i < 3; i++) {
    float low = INFINITY, high = -INFINITY;
    for (int k = r->first; k < r->first + r->count; k++) {
      float at = middle(b, b->order[k], i);
      low = minf(low, at), high = maxf(high, at);
    }
    if (!(high > low)) continue;
    int candidate = 0;
    lows[i] = low, scales[i] = BINS / (high - low);
    float cost = cost_along(b, r, i, low, scales[i], &candidate);
    if (cost < least) least = cost, axis = i, bin = candidate;
  }
  int end = r->first + r->count, at = r->first;
  for (int k = r->first; axis >= 0 && k < end; k++) {
    int face = b->order[k];
    if (bin_of(b, face, axis, lows[axis], scales[axis]) < bin) b->order[k] = b->order[at], b->order[at++] = face;
  }
  if (at == r->first || at == end) at = r->first + r->count / 2;  // all in one place
  *left = range_of(b, r->first, at - r->first);
  *right = range_of(b, at, end - at);
}

static int add_leaf(Builder* b, const Range* r) {
  int index = b->tree->num_leaves++;
  Leaf* leaf = memset(b->tree->leaves + index, 0, sizeof(Leaf));
  for (int lane = 0; lane < r->count; lane++) {
    leaf->face[lane] = b->order[r->first + lane];
    for (int corner = 0; corner < 3; corner++)
      for (int axis = 0; axis < 3; axis++)
        leaf->corner[corner][axis][lane] = b->vertices[3 * b->faces[3 * leaf->face[lane] + corner] + axis];
  }
  return ~index;
}

static int add_node(Builder* b, const Range* whole) {
  int index = b->tree->num_nodes++, count = 1;
  Range ranges[LANES] = {*whole};
  while (count < LANES) {
    int largest = -1;
    for (int i = 0; i < count; i++)
      if (ranges[i].count > LANES && (largest < 0 || half_area(&ranges[i].span) > half_area(&ranges[largest].span)))
        largest = i;
    if (largest < 0) break;
    Range range = ranges[largest];
    split(b, &range, &ranges[largest], &ranges[count++]);
  }
  Node* node = memset(b->tree->nodes + index, 0, sizeof(Node));
  node->count = count;
  for (int i = 0; i < count; i++) {
    for (int axis = 0; axis < 3; axis++) {
      node->centre[axis][i] = 0.5f * (ranges[i].span.high[axis] + ranges[i].span.low[axis]);
      node->half[axis][i] = 0.5f * (ranges[i].span.high[axis] - ranges[i].span.low[axis]);
    }
    int child = ranges[i].count > LANES ? add_node(b, &ranges[i]) : add_leaf(b, &ranges[i]);
    node->child[i] = child;
  }
  return index;
}

void raster_free_tree(Tree* tree) {
  if (tree) free(tree->nodes), free(tree->leaves), free(tree);
}

// The tree of a mesh with `num` faces; NULL without memory.
Tree* raster_build_tree(const float* vertices, const int* faces, int num) {
  Builder b = {vertices, faces, malloc(num * sizeof(Span)), malloc(num * sizeof(int)), calloc(1, sizeof(Tree))};
  Tree* tree = b.tree;
  size_t room = (size_t)num + 1;  // at worst a leaf for every triangle
  if (tree) *tree = (Tree){malloc(room * sizeof(Node)), malloc(room * sizeof(Leaf)), 0, 0};
  int ready = tree && b.spans && b.order && tree->nodes && tree->leaves;
  for (int i = 0; ready && i < num; i++) {
    b.order[i] = i;
    b.spans[i] = no_span();
    for (int corner = 0; corner < 3; corner++) {
      Span point;
      memcpy(point.low, vertices + 3 * faces[3 * i + corner], sizeof(point.low));
      memcpy(point.high, point.low, sizeof(point.high));
      widen(&b.spans[i], &point);
    }
  }
  if (ready) {
    Range whole = range_of(&b, 0, num);
    add_node(&b, &whole);
    Node* nodes = realloc(tree->nodes, tree->num_nodes * sizeof(Node));
    Leaf* leaves = realloc(tree->leaves, tree->num_leaves * sizeof(Leaf));
    tree->nodes = nodes ? nodes : tree->nodes;
    tree->leaves = leaves ? leaves : tree->leaves;
  }
  free(b.spans), free(b.order);
  if (!ready) raster_free_tree(tree), tree = NULL;
  return tree;
}
