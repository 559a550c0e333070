/* PX4 module: an exported policy as a flight mode of its own, "Policy", that commands the motors.

   Written against the interface of PX4 1.16 and compiled against declarations of it, not flown: try it in simulation,
   then with the vehicle held. It runs with every measurement of the gyroscopes and acts at the policy's rate; in between
   commands are held. Motors are told apart by the control allocator's geometry (CA_ROTOR*), whatever their numbers: four
   rotors in an X, or six or eight, also in pairs, that stand evenly around. It leaves the mode's health to the commander,
   which takes another mode as soon as a measurement is missing; until then it flies level, and after HOLD_S motors stop.
   Without measurements of the gyroscopes it does not run, and PX4's outputs keep the last commands. */
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include <drivers/drv_hrt.h>
#include <parameters/param.h>
#include <px4_platform_common/defines.h>
#include <px4_platform_common/log.h>
#include <px4_platform_common/module.h>
#include <px4_platform_common/px4_work_queue/WorkItem.hpp>
#include <uORB/Publication.hpp>
#include <uORB/Subscription.hpp>
#include <uORB/SubscriptionCallback.hpp>
#include <uORB/topics/actuator_motors.h>
#include <uORB/topics/arming_check_reply.h>
#include <uORB/topics/arming_check_request.h>
#include <uORB/topics/register_ext_component_reply.h>
#include <uORB/topics/register_ext_component_request.h>
#include <uORB/topics/trajectory_setpoint.h>
#include <uORB/topics/unregister_ext_component.h>
#include <uORB/topics/vehicle_angular_velocity.h>
#include <uORB/topics/vehicle_attitude.h>
#include <uORB/topics/vehicle_control_mode.h>
#include <uORB/topics/vehicle_local_position.h>
#include <uORB/topics/vehicle_status.h>
#include <uORB/topics/vehicle_thrust_setpoint.h>

#include "../../../../flight/flight.h"

static constexpr char NAME[] = "Policy";
static constexpr uint64_t REQUEST_ID = 0x706f6c696379;
static constexpr hrt_abstime PERIOD_US = (hrt_abstime)(1e6f * POLICY_CONTROL_DT_S + 0.5f);
static constexpr hrt_abstime EARLY_US = 1000;  /* gyroscopes' times jitter: not worth waiting for the next measurement */
static constexpr hrt_abstime ATTITUDE_AGE_US = 50000, POSITION_AGE_US = 150000, REGISTER_AGAIN_US = 1000000;
static constexpr int ROTORS_MAX = 8;
static constexpr float UNEVEN_MAX = 0.1f;  /* by how much rotors' places may disturb each other's effect */
static constexpr float AHEAD[4] = {1.f, -1.f, -1.f, 1.f}, LEFT[4] = {-1.f, -1.f, 1.f, 1.f}, SPIN[4] = {-1.f, 1.f, -1.f, 1.f};

/* Sets what four rotors are told as set-points of all. */
class Mixer
{
public:
  /* Reads the allocator's geometry; false, with a message, where rotors stand unevenly or do not point up. */
  bool configure();
  /* Returns the mean of the set-points. */
  float thrusts(const float told[4], float *control) const;

private:
  int _count{0};
  float _places[ROTORS_MAX][3]{};  /* ahead, left, sign of the reaction about the axis that points up */
  float _curve{0.f};               /* THR_MDL_FAC: thrust = curve u^2 + (1 - curve) u of a rotor's speed u */
};

class PolicyControl : public ModuleBase<PolicyControl>, public px4::WorkItem
{
public:
  PolicyControl() : WorkItem(MODULE_NAME, px4::wq_configurations::rate_ctrl) {}

  static int task_spawn(int argc, char *argv[]);
  static int custom_command(int, char **) { return print_usage("unknown command"); }
  static int print_usage(const char *reason = nullptr);
  int print_status() override;
  bool init();

private:
  void Run() override;
  void register_mode();
  void leave();
  void answer();
  void measure(hrt_abstime now, const vehicle_angular_velocity_s &gyro, flight_state &state);
  void follow(hrt_abstime now);
  void fly(hrt_abstime now, const vehicle_angular_velocity_s &gyro);

  Mixer _mixer;
  vehicle_status_s _status{};
  vehicle_attitude_s _attitude{};
  vehicle_local_position_s _position{};
  float _goal[3]{}, _goal_yaw{0.f};  /* north, east, down, m; about down, rad */
  float _action[4]{};
  param_t _setpoint_age{PARAM_INVALID};
  hrt_abstime _asked{0}, _next{0}, _began{0};
  int _mode{-1}, _check{-1};
  bool _placed{false}, _flying{false}, _lost{false}, _whole{false};

  uORB::SubscriptionCallbackWorkItem _gyro_sub{this, ORB_ID(vehicle_angular_velocity)};
  uORB::Subscription _status_sub{ORB_ID(vehicle_status)};
  uORB::Subscription _attitude_sub{ORB_ID(vehicle_attitude)};
  uORB::Subscription _position_sub{ORB_ID(vehicle_local_position)};
  uORB::Subscription _setpoint_sub{ORB_ID(trajectory_setpoint)};
  uORB::Subscription _registered_sub{ORB_ID(register_ext_component_reply)};
  uORB::Subscription _question_sub{ORB_ID(arming_check_request)};
  uORB::Publication<actuator_motors_s> _motors_pub{ORB_ID(actuator_motors)};
  uORB::Publication<vehicle_thrust_setpoint_s> _thrust_pub{ORB_ID(vehicle_thrust_setpoint)};
  uORB::Publication<register_ext_component_request_s> _register_pub{ORB_ID(register_ext_component_request)};
  uORB::Publication<unregister_ext_component_s> _unregister_pub{ORB_ID(unregister_ext_component)};
  uORB::Publication<vehicle_control_mode_s> _configure_pub{ORB_ID(config_control_setpoints)};
  uORB::Publication<arming_check_reply_s> _answer_pub{ORB_ID(arming_check_reply)};
};

static float parameter(const char *name, const float otherwise)
{
  float value = otherwise;
  const param_t found = param_find(name);
  return found != PARAM_INVALID && param_get(found, &value) == 0 ? value : otherwise;
}

static float of_rotor(const int rotor, const char *what, const float otherwise)
{
  char name[20];
  snprintf(name, sizeof(name), "CA_ROTOR%d_%s", rotor, what);
  return parameter(name, otherwise);
}

bool Mixer::configure()
{
  int32_t count = 0;
  const param_t found = param_find("CA_ROTOR_COUNT");
  if (found == PARAM_INVALID || param_get(found, &count) != 0 || count < 4 || count > ROTORS_MAX) {
    PX4_ERR("expected CA_ROTOR_COUNT from 4 to %d, got %d", ROTORS_MAX, (int)count);
    return false;
  }
  _count = count;
  for (int i = 0; i < _count; i++) {
    const float up = -of_rotor(i, "AZ", -1.f);
    if (fabsf(of_rotor(i, "AX", 0.f)) > 0.1f * up || fabsf(of_rotor(i, "AY", 0.f)) > 0.1f * up) {
      PX4_ERR("rotor %d is tilted, see CA_ROTOR%d_AX", i, i);
      return false;
    }
    _places[i][0] = of_rotor(i, "PX", 0.f);
    _places[i][1] = -of_rotor(i, "PY", 0.f);
    _places[i][2] = of_rotor(i, "KM", 0.05f) > 0.f ? -1.f : 1.f;
  }
  for (int axis = 0; axis < 3; axis++) { /* as the places of four rotors: ones, in the mean square */
    float squares = 0.f;
    for (int i = 0; i < _count; i++) {
      squares += _places[i][axis] * _places[i][axis];
    }
    const float scale = sqrtf(squares / (float)_count);
    for (int i = 0; i < _count; i++) {
      _places[i][axis] /= fmaxf(scale, FLT_MIN);
    }
  }
  for (int axis = 0; axis < 3; axis++) {
    for (int other = 0; other <= axis; other++) { /* with the total, and with each other; nothing on an axis fails too */
      float total = 0.f, product = 0.f;
      for (int i = 0; i < _count; i++) {
        total += _places[i][axis] / (float)_count;
        product += _places[i][axis] * _places[i][other] / (float)_count;
      }
      if (fabsf(total) > UNEVEN_MAX || fabsf(product - (axis == other ? 1.f : 0.f)) > UNEVEN_MAX) {
        PX4_ERR("rotors stand unevenly around the centre, or turn so, see CA_ROTOR0_PX, _PY, _KM");
        return false;
      }
    }
  }
  _curve = parameter("THR_MDL_FAC", 0.f);
  return true;
}

float Mixer::thrusts(const float told[4], float *control) const
{
  float mean = 0.f, parts[3]{}, total = 0.f;
  for (int i = 0; i < 4; i++) {
    mean += 0.25f * told[i];
    parts[0] += 0.25f * AHEAD[i] * told[i];
    parts[1] += 0.25f * LEFT[i] * told[i];
    parts[2] += 0.25f * SPIN[i] * told[i];
  }
  for (int i = 0; i < actuator_motors_s::NUM_CONTROLS; i++) {
    if (i >= _count) {
      control[i] = NAN;
      continue;
    }
    const float wanted = mean + _places[i][0] * parts[0] + _places[i][1] * parts[1] + _places[i][2] * parts[2];
    const float speed = 0.5f * (fminf(fmaxf(wanted, -1.f), 1.f) + 1.f);
    control[i] = speed * (_curve * speed + 1.f - _curve);
    total += control[i];
  }
  return total / (float)_count;
}

bool PolicyControl::init()
{
  if (policy_check() != POLICY_OK) {
    PX4_ERR("the policy is damaged: export it again");
    return false;
  }
  _setpoint_age = param_find("POLICY_SP_AGE");
  return _mixer.configure() && _gyro_sub.registerCallback();
}

void PolicyControl::register_mode()
{
  register_ext_component_reply_s reply;
  while (_registered_sub.update(&reply)) {
    if (reply.request_id != (REQUEST_ID ^ _asked) || _mode >= 0) { /* topics keep what others were told */
      continue;
    }
    if (!reply.success) {
      PX4_ERR("the commander takes no more modes");
      continue;
    }
    _mode = reply.mode_id;
    _check = reply.arming_check_id;
    vehicle_control_mode_s alone{};  /* no controller of PX4's, and no allocation to motors */
    alone.timestamp = hrt_absolute_time();
    alone.source_id = reply.mode_id;
    _configure_pub.publish(alone);
    PX4_INFO("flight mode %d", _mode);
  }
  const hrt_abstime now = hrt_absolute_time();
  if (_mode < 0 && (_asked == 0 || now - _asked > REGISTER_AGAIN_US)) {
    register_ext_component_request_s request{};
    request.timestamp = _asked = now;
    request.request_id = REQUEST_ID ^ now;
    strncpy(request.name, NAME, sizeof(request.name) - 1);
    request.px4_ros2_api_version = register_ext_component_request_s::LATEST_PX4_ROS2_API_VERSION;
    request.register_arming_check = true;
    request.register_mode = true;
    _register_pub.publish(request);
  }
}

void PolicyControl::leave()
{
  if (_mode >= 0) {
    unregister_ext_component_s left{};
    left.timestamp = hrt_absolute_time();
    strncpy(left.name, NAME, sizeof(left.name) - 1);
    left.arming_check_id = _check;
    left.mode_id = _mode;
    left.mode_executor_id = -1;
    _unregister_pub.publish(left);
  }
}

void PolicyControl::answer()
{
  arming_check_request_s question;
  if (_mode < 0 || !_question_sub.update(&question)) {
    return;
  }
  arming_check_reply_s reply{};
  reply.timestamp = hrt_absolute_time();
  reply.request_id = question.request_id;
  reply.registration_id = _check;
  reply.health_component_index = arming_check_reply_s::HEALTH_COMPONENT_INDEX_NONE;
  reply.can_arm_and_run = _whole && !_lost && !should_exit();
  reply.mode_req_angular_velocity = true;
  reply.mode_req_attitude = true;
  reply.mode_req_local_alt = true;
  reply.mode_req_local_position = true;
  _answer_pub.publish(reply);
}

/* Measurements in flight.h's frames: x of the world is where the goal's heading points. */
void PolicyControl::measure(const hrt_abstime now, const vehicle_angular_velocity_s &gyro, flight_state &state)
{
  const vehicle_local_position_s &p = _position;
  const bool seen = p.timestamp != 0 && now < p.timestamp + POSITION_AGE_US, placed = seen && _placed;
  const float position[3] = {p.x - _goal[0], -(p.y - _goal[1]), -(p.z - _goal[2])}, velocity[3] = {p.vx, -p.vy, -p.vz};
  const bool known[3] = {placed && p.xy_valid, placed && p.xy_valid, placed && p.z_valid};
  const bool moving[3] = {seen && p.v_xy_valid, seen && p.v_xy_valid, seen && p.v_z_valid};
  const float c = cosf(_goal_yaw), s = -sinf(_goal_yaw);  /* clockwise in PX4, seen from above */
  state.position[0] = c * position[0] + s * position[1];
  state.position[1] = -s * position[0] + c * position[1];
  state.position[2] = position[2];
  state.velocity[0] = c * velocity[0] + s * velocity[1];
  state.velocity[1] = -s * velocity[0] + c * velocity[1];
  state.velocity[2] = velocity[2];
  for (int i = 0; i < 3; i++) {
    state.position[i] = known[i] ? state.position[i] : NAN;
    state.velocity[i] = moving[i] ? state.velocity[i] : NAN;
  }
  const bool upright = _attitude.timestamp != 0 && now < _attitude.timestamp + ATTITUDE_AGE_US;
  const float w = _attitude.q[0], x = _attitude.q[1], y = -_attitude.q[2], z = -_attitude.q[3];
  const float half_c = cosf(0.5f * _goal_yaw), half_s = sinf(0.5f * _goal_yaw);  /* turns back by the goal's heading */
  state.attitude[0] = upright ? half_c * w - half_s * z : NAN;
  state.attitude[1] = half_c * x - half_s * y;
  state.attitude[2] = half_c * y + half_s * x;
  state.attitude[3] = half_c * z + half_s * w;
  state.angular_velocity[0] = gyro.xyz[0];
  state.angular_velocity[1] = -gyro.xyz[1];
  state.angular_velocity[2] = -gyro.xyz[2];
}

/* The goal: where it took over, moved by fresh set-points and along with the estimator's resets. */
void PolicyControl::follow(const hrt_abstime now)
{
  const vehicle_local_position_s before = _position;
  _position_sub.update(&_position);
  _attitude_sub.update(&_attitude);
  if (_placed) {
    if (_position.xy_reset_counter != before.xy_reset_counter) {
      _goal[0] += _position.delta_xy[0];
      _goal[1] += _position.delta_xy[1];
    }
    if (_position.z_reset_counter != before.z_reset_counter) {
      _goal[2] += _position.delta_z;
    }
    if (_position.heading_reset_counter != before.heading_reset_counter) {
      _goal_yaw += _position.delta_heading;
    }
  }
  const bool here = _position.timestamp != 0 && now < _position.timestamp + POSITION_AGE_US && _position.xy_valid
                    && _position.z_valid && PX4_ISFINITE(_position.heading);
  if (!_flying || !_placed) {
    _placed = here;
    if (here) {
      _goal[0] = _position.x;
      _goal[1] = _position.y;
      _goal[2] = _position.z;
      _goal_yaw = _position.heading;
    }
  }
  trajectory_setpoint_s wanted;
  float age_s = 0.5f;
  if (_setpoint_age != PARAM_INVALID) {
    param_get(_setpoint_age, &age_s);
  }
  if (_setpoint_sub.copy(&wanted) && _flying && wanted.timestamp > _began
      && 1e-6f * (float)((int64_t)now - (int64_t)wanted.timestamp) < age_s) {
    for (int i = 0; i < 3; i++) {
      _goal[i] = PX4_ISFINITE(wanted.position[i]) ? wanted.position[i] : _goal[i];
    }
    _goal_yaw = PX4_ISFINITE(wanted.yaw) ? wanted.yaw : _goal_yaw;
  }
}

void PolicyControl::fly(const hrt_abstime now, const vehicle_angular_velocity_s &gyro)
{
  if (!_lost && (!_flying || now + EARLY_US >= _next)) {
    flight_state state;
    if (!_flying) {
      flight_begin();
      _began = now;
    }
    _next = _flying && now < _next + PERIOD_US ? _next + PERIOD_US : now + PERIOD_US;
    _flying = true;
    measure(now, gyro, state);
    if (!flight_act(&state, _action)) {
      _lost = true;
      PX4_ERR("measurements are missing: motors stop until it is disarmed or another mode taken");
    }
    _whole = flight_whole();
  }
  actuator_motors_s motors{};
  motors.timestamp = now;
  motors.timestamp_sample = gyro.timestamp_sample;
  vehicle_thrust_setpoint_s thrust{};  /* without which the land detector takes a hover for standing, and PX4 disarms */
  thrust.timestamp = now;
  thrust.timestamp_sample = gyro.timestamp_sample;
  if (_lost) {
    for (float &control : motors.control) {
      control = NAN;
    }
  } else {
    thrust.xyz[2] = -_mixer.thrusts(_action, motors.control);
  }
  _motors_pub.publish(motors);
  _thrust_pub.publish(thrust);
}

void PolicyControl::Run()
{
  if (should_exit() && !_flying) { /* in flight it first waits for the commander to take another mode */
    _gyro_sub.unregisterCallback();
    leave();
    exit_and_cleanup();
    return;
  }
  register_mode();
  answer();
  vehicle_angular_velocity_s gyro;
  if (!_gyro_sub.update(&gyro)) {
    return;
  }
  const hrt_abstime now = hrt_absolute_time();
  _status_sub.update(&_status);
  follow(now);
  const bool chosen = _mode >= 0 && _status.nav_state == _mode;
  if (chosen && _status.arming_state == vehicle_status_s::ARMING_STATE_ARMED) {
    fly(now, gyro);
    return;
  }
  flight_state state;
  measure(now, gyro, state);
  _flying = _lost = false;
  _whole = _placed && flight_known(&state);
}

int PolicyControl::task_spawn(int, char **)
{
  PolicyControl *instance = new PolicyControl();
  if (instance != nullptr) {
    _object.store(instance);
    _task_id = task_id_is_work_queue;
    if (instance->init()) {
      return PX4_OK;
    }
  }
  delete instance;
  _object.store(nullptr);
  _task_id = -1;
  return PX4_ERROR;
}

int PolicyControl::print_status()
{
  PX4_INFO("mode %d, %s, measurements %s", _mode, _lost ? "lost" : _flying ? "flying" : "waiting",
           _whole ? "whole" : "missing");
  return 0;
}

int PolicyControl::print_usage(const char *reason)
{
  if (reason != nullptr) {
    PX4_WARN("%s", reason);
  }
  PRINT_MODULE_DESCRIPTION("An exported policy as a flight mode that commands the motors.");
  PRINT_MODULE_USAGE_NAME("policy_control", "controller");
  PRINT_MODULE_USAGE_COMMAND("start");
  PRINT_MODULE_USAGE_DEFAULT_COMMANDS();
  return 0;
}

extern "C" __EXPORT int policy_control_main(int argc, char *argv[])
{
  return PolicyControl::main(argc, argv);
}
