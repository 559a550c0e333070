// A rasteriser for LIBERO's cameras on a CPU: the pictures of mujoco_warp's ray tracer without shadows (same rays through
// the same pixels, same light), but for rounding. rasteriser.py loads it.
//
// First what each pixel shows (raster_solids.h, raster_mesh.h), then its colour (raster_shading.h). Calls share nothing
// but what they only read: several threads may draw at once. Compiled without contraction of a*b+c, so that pictures are
// the same on every machine.
#include "raster_mesh.h"
#include "raster_shading.h"
#include "raster_solids.h"
#include "raster_tree.h"

#define MAX_LAMPS 64

int raster_scene_bytes(void) { return (int)sizeof(Scene); }
int raster_geom_bytes(void) { return (int)sizeof(Geom); }
int raster_light_bytes(void) { return (int)sizeof(Light); }

// The rows of `axes` are the camera's axes (right, down, forwards) in the world.
static void camera_axes(const double* xmat, double axes[3][3]) {
  const double sign[3] = {1.0, -1.0, -1.0};
  for (int i = 0; i < 3; i++)
    for (int k = 0; k < 3; k++) axes[i][k] = sign[i] * xmat[3 * k + i];
}

static double dot_double(const double* a, const double* b) { return a[0] * b[0] + a[1] * b[1] + a[2] * b[2]; }

static Frame frame_of(const double* position, const double* rotation, const double* camera, double axes[3][3]) {
  Frame f;
  double from[3] = {position[0] - camera[0], position[1] - camera[1], position[2] - camera[2]};
  for (int i = 0; i < 3; i++) {
    f.t[i] = (float)dot_double(axes[i], from);
    for (int k = 0; k < 3; k++) {
      double column[3] = {rotation[k], rotation[3 + k], rotation[6 + k]};
      f.m[i][k] = (float)dot_double(axes[i], column);
    }
  }
  return f;
}

static int gather_lamps(const Scene* s, const Poses* poses, int state, const double* camera, double axes[3][3],
                        Lamp lamps[MAX_LAMPS]) {
  int count = 0;
  for (int i = 0; i < s->num_lights; i++) {
    size_t row = 3 * ((size_t)state * s->num_lights + i);
    Lamp* lamp = lamps + count;
    double from[3];
    for (int k = 0; k < 3; k++) from[k] = poses->light_xpos[row + k] - camera[k];
    lamp->kind = s->lights[i];
    for (int k = 0; k < 3; k++) {
      lamp->at[k] = (float)dot_double(axes[k], from);
      lamp->direction[k] = (float)dot_double(axes[k], poses->light_xdir + row);
      lamp->diffuse[k] = poses->light_diffuse[row + k];
      lamp->specular[k] = poses->light_specular[row + k];
    }
    count += s->lights[i].type >= 0;  // those that are off have none
  }
  lamps[count] = (Lamp){{DIRECTIONAL, {1, 0, 0}, 0, 0}, {0, 0, 0}, {0, 0, 1}, {0, 0, 0}, {0, 0, 0}};
  memcpy(lamps[count].diffuse, s->head_diffuse, sizeof(s->head_diffuse));
  memcpy(lamps[count].specular, s->head_specular, sizeof(s->head_specular));
  return count + 1;
}

typedef struct {
  Area area;
  int geom;
} Seen;

static int nearer(const void* a, const void* b) {
  float x = ((const Seen*)a)->area.near, y = ((const Seen*)b)->area.near;
  return (x > y) - (x < y);
}

// Solids first, as they cost the same wherever they are drawn; meshes from near to far, as most of one that is hidden
// costs nothing.
static void draw_geoms(const Scene* s, Picture* p, const Frame* frames, Seen* seen) {
  int count = 0;
  for (int first = 0; first < s->num_geoms; first++) {
    const Geom* g = s->geoms + first;
    Areas areas;
    const Floats centre[3] = {all(g->centre[0]), all(g->centre[1]), all(g->centre[2])};
    const Floats half[3] = {all(g->half[0]), all(g->half[1]), all(g->half[2])};
    project(p, frames + first, centre, half, &areas);
    Area area = {areas.left[0], areas.right[0], areas.top[0], areas.bottom[0], areas.near[0]};
    if (area.right <= area.left || area.bottom <= area.top) continue;
    if (g->type == MESH)
      seen[count++] = (Seen){area, first};
    else
      draw_solid(p, g, frames + first, &area, first);
  }
  qsort(seen, count, sizeof(Seen), nearer);
  for (int i = 0; i < count; i++) {
    int geom = seen[i].geom;
    draw_mesh(p, s->geoms[geom].tree, frames + geom, &seen[i].area, geom);
  }
}

static void shade(const Scene* s, const Picture* p, const Frame* frames, const Lamp* lamps, int num_lamps,
                  double axes[3][3], unsigned char* pixels) {
  Strip strip;
  strip.count = 0;
  for (int y = 0; y < p->height; y++)
    for (int x = 0; x < p->width; x++) {
      int pixel = y * p->width + x, geom = p->geom[y * p->stride + x];
      if (geom >= 0) {
        add_to_strip(&strip, p, s->geoms + geom, frames + geom, x, y);
        if (strip.count == STRIP) finish_strip(&strip, lamps, num_lamps, s->ambient, pixels);
        continue;
      }
      float d[3], colour[3] = {0.0f, 0.0f, 0.0f};
      for (int k = 0; k < 3; k++)
        d[k] = (float)axes[0][k] * p->across[x] + (float)axes[1][k] * p->down[y] + (float)axes[2][k];
      if (s->sky.pixels) sky_colour(&s->sky, d, colour);
      for (int k = 0; k < 3; k++) pixels[3 * pixel + k] = level(colour[k]);
    }
  finish_strip(&strip, lamps, num_lamps, s->ambient, pixels);
}

static void draw_picture(const Scene* s, const Poses* poses, int state, int camera, Picture* p, Frame* frames,
                         Seen* seen, unsigned char* pixels) {
  size_t row = (size_t)state * s->pose_cameras + s->cameras[camera];
  const double* position = poses->cam_xpos + 3 * row;
  double axes[3][3];
  camera_axes(poses->cam_xmat + 9 * row, axes);
  p->focal = s->focals[camera];
  for (int x = 0; x < p->stride; x++) p->across[x] = ((float)x + 0.5f - 0.5f * (float)p->width) / p->focal;
  for (int y = 0; y < p->height; y++) p->down[y] = ((float)y + 0.5f - 0.5f * (float)p->height) / p->focal;
  for (int i = 0; i < p->stride * p->height; i++) p->depth[i] = s->far, p->geom[i] = -1;
  for (int i = 0; i < s->num_geoms; i++) {
    size_t geom = (size_t)state * s->pose_geoms + s->geoms[i].id;
    frames[i] = frame_of(poses->geom_xpos + 3 * geom, poses->geom_xmat + 9 * geom, position, axes);
  }
  Lamp lamps[MAX_LAMPS];
  int num_lamps = gather_lamps(s, poses, state, position, axes, lamps);
  draw_geoms(s, p, frames, seen);
  shade(s, p, frames, lamps, num_lamps, axes, pixels);
}

// Pictures [num, num_cameras, height, width, 3] of `num` states; 0 if there is no memory.
int raster_draw(const Scene* s, int num, const Poses* poses, unsigned char* pictures) {
  Picture p = {.width = s->width, .height = s->height, .stride = (s->width + LANES - 1) / LANES * LANES};
  size_t pixels = (size_t)p.stride * p.height, bytes = 3 * (size_t)p.width * p.height;
  float* numbers = malloc((3 * pixels + p.stride + p.height) * sizeof(float));
  int* indices = malloc(2 * pixels * sizeof(int));
  Frame* frames = malloc((s->num_geoms + 1) * sizeof(Frame));
  Seen* seen = malloc((s->num_geoms + 1) * sizeof(Seen));
  int ready = numbers && indices && frames && seen && s->num_lights < MAX_LAMPS;
  if (ready) {
    p.depth = numbers, p.u = numbers + pixels, p.v = numbers + 2 * pixels;
    p.across = numbers + 3 * pixels, p.down = p.across + p.stride;
    p.geom = indices, p.face = indices + pixels;
    for (int i = 0; i < num * s->num_cameras; i++)
      draw_picture(s, poses, i / s->num_cameras, i % s->num_cameras, &p, frames, seen, pictures + bytes * i);
  }
  free(numbers), free(indices), free(frames), free(seen);
  return ready;
}
