// Stepping of many LIBERO simulations over a pool of threads: robosuite 1.4's OSC_POSE controller around MuJoCo, and
// LIBERO's goal predicates. native.py loads it.
//
// One simulation is stepped by one thread at a time and nothing is shared between simulations but read-only models, so
// results do not depend on the number of threads or on how simulations are grouped.
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "native_controller.h"
#include "native_fluid.h"
#include "native_goal.h"
#include "native_separation.h"

#define SUBSTEPS 25

int native_mujoco_version(void) { return mjVERSION_HEADER; }
int native_simulation_bytes(void) { return (int)sizeof(Simulation); }
int native_scene_bytes(void) { return (int)sizeof(Scene); }
int native_predicate_bytes(void) { return (int)sizeof(Predicate); }
int native_controller_bytes(void) { return (int)sizeof(Controller); }
int native_separations_bytes(void) { return (int)sizeof(Separation) * SEPARATIONS; }
void native_install(void) { install_separation(); }

static int finite(const double* x, int n) {
  for (int i = 0; i < n; i++)
    if (!(fabs(x[i]) < mjMAXVAL)) return 0;
  return 1;
}

// mj_step1, control and mj_step2, without MuJoCo's checks, which only write to a log; 0 if the simulation diverges.
static int substep(const Simulation* s, const double torques[ARM], double grip) {
  const mjModel* m = s->model;
  mjData* d = s->data;
  drive_arm(s, torques);
  control_gripper(s, grip);
  mj_fwdActuation(m, d);
  mj_fwdAcceleration(m, d);
  mj_fwdConstraint(m, d);
  if (!finite(d->qacc, m->nv)) return 0;
  mj_Euler(m, d);
  return 1;
}

// Stock's controller reads the arm's state when a reset creates it, and next at the second substep, whatever state is
// written in between: an episode's first goal and torques are those of the reset's pose.
static int control_step(const Simulation* s, const mjModel* airless, const double action[7]) {
  double goal_position[3], torques[ARM];
  for (int i = 0; i < SUBSTEPS; i++) {
    int fresh = s->controller->fresh != 0;
    if (fresh && !recalled_torques(s, action, goal_position, torques)) return 0;
    s->controller->fresh = 0;
    stepped = s;
    mj_fwdPosition(s->model, s->data);
    stepped = NULL;
    mj_fwdVelocity(airless, s->data);
    add_drag(s);
    if (!fresh && i == 0) set_goal(s, action, goal_position);
    if (!fresh && !arm_torques(s, goal_position, torques)) return 0;
    if (!substep(s, torques, action[6])) return 0;
  }
  return finite(s->data->qpos, s->model->nq) && finite(s->data->qvel, s->model->nv);
}

typedef struct {
  const Simulation* simulations;
  const int* ids;
  const double* actions;  // [n, steps, 7]
  unsigned char* executed;  // [n, steps]
  unsigned char* success;   // [n]
  unsigned char* diverged;  // [n] the last executed step diverged
  int n, steps, stop_on_success;
  atomic_int next;
} Job;

static void run_chunk(Job* job, int i) {
  const Simulation* s = job->simulations + job->ids[i];
  mjModel airless = *s->model;  // shares its arrays
  airless.opt.density = airless.opt.viscosity = 0;
  for (int k = 0; k < job->steps; k++) {
    job->executed[i * job->steps + k] = 1;
    job->diverged[i] = !control_step(s, &airless, job->actions + 7 * ((size_t)i * job->steps + k));
    job->success[i] = (unsigned char)(!job->diverged[i] && satisfied(s));
    if (job->diverged[i]) return;
    if (job->success[i] && job->stop_on_success) return;
  }
}

static void work(Job* job) {
  for (int i; (i = atomic_fetch_add(&job->next, 1)) < job->n;) run_chunk(job, i);
}

// -------------------------------------------------------------------------------------------------------------- pool

typedef struct {
  pthread_mutex_t mutex;
  pthread_cond_t started, finished;
  pthread_t* threads;
  int num_threads, busy, closing;
  unsigned generation;
  Job* job;
} Pool;

static void* serve(void* argument) {
  Pool* pool = argument;
  pthread_mutex_lock(&pool->mutex);
  for (unsigned seen = 0;;) {
    while (pool->generation == seen && !pool->closing) pthread_cond_wait(&pool->started, &pool->mutex);
    if (pool->closing) break;
    seen = pool->generation;
    pthread_mutex_unlock(&pool->mutex);
    work(pool->job);
    pthread_mutex_lock(&pool->mutex);
    if (--pool->busy == 0) pthread_cond_signal(&pool->finished);
  }
  pthread_mutex_unlock(&pool->mutex);
  return NULL;
}

// Stops and frees the pool's threads.
void native_close(Pool* pool) {
  pthread_mutex_lock(&pool->mutex);
  pool->closing = 1;
  pthread_cond_broadcast(&pool->started);
  pthread_mutex_unlock(&pool->mutex);
  for (int i = 0; i < pool->num_threads; i++) pthread_join(pool->threads[i], NULL);
  pthread_cond_destroy(&pool->started);
  pthread_cond_destroy(&pool->finished);
  pthread_mutex_destroy(&pool->mutex);
  free(pool->threads);
  free(pool);
}

// A pool of `threads` threads, including the caller of native_step; fewer if the system refuses more.
Pool* native_open(int threads) {
  Pool* pool = calloc(1, sizeof(Pool));
  if (!pool) return NULL;
  pool->threads = calloc(threads, sizeof(pthread_t));
  pthread_mutex_init(&pool->mutex, NULL);
  pthread_cond_init(&pool->started, NULL);
  pthread_cond_init(&pool->finished, NULL);
  while (pool->threads && pool->num_threads < threads - 1) {
    if (pthread_create(pool->threads + pool->num_threads, NULL, serve, pool)) break;
    pool->num_threads++;
  }
  return pool;
}

// Whether simulation i satisfies its goal.
int native_satisfied(const Simulation* simulations, int i) { return satisfied(simulations + i); }

static pthread_mutex_t timing = PTHREAD_MUTEX_INITIALIZER;
static mjfTime clock_of_timers;
static int stepping;

// Timers of mjData, which nothing reads, take 3% of a step: their clock is put aside while any pool steps.
static void pause_timers(int change) {
  pthread_mutex_lock(&timing);
  if (change > 0 && stepping == 0) clock_of_timers = mjcb_time, mjcb_time = NULL;
  stepping += change;
  if (stepping == 0) mjcb_time = clock_of_timers;
  pthread_mutex_unlock(&timing);
}

// One chunk of `steps` control steps in each of the simulations ids[0..n-1], which must differ.
void native_step(Pool* pool, const Simulation* simulations, const int* ids, int n, int steps, const double* actions,
                 int stop_on_success, unsigned char* executed, unsigned char* success, unsigned char* diverged) {
  pause_timers(1);
  Job job = {simulations, ids, actions, executed, success, diverged, n, steps, stop_on_success, 0};
  pthread_mutex_lock(&pool->mutex);
  pool->job = &job;
  pool->busy = pool->num_threads;
  pool->generation++;
  pthread_cond_broadcast(&pool->started);
  pthread_mutex_unlock(&pool->mutex);
  work(&job);
  pthread_mutex_lock(&pool->mutex);
  while (pool->busy) pthread_cond_wait(&pool->finished, &pool->mutex);
  pthread_mutex_unlock(&pool->mutex);
  pause_timers(-1);
}
