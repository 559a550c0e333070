/* PX4's interface as far as the module uses it, without PX4: topics keep their last message, parameters are given by
   name, and time is what the test says. Fields are those of PX4 1.16's messages. */
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>

using hrt_abstime = uint64_t;
extern hrt_abstime current_us;
inline hrt_abstime hrt_absolute_time() { return current_us; }

#define __EXPORT
#define MODULE_NAME "policy_control"
#define PX4_OK 0
#define PX4_ERROR (-1)
#define PX4_ISFINITE(x) __builtin_isfinite(x)
#define PX4_ERR(...) (fprintf(stderr, "ERROR " __VA_ARGS__), fputc('\n', stderr))
#define PX4_WARN(...) (fprintf(stderr, "WARN " __VA_ARGS__), fputc('\n', stderr))
#define PX4_INFO(...) (fprintf(stderr, "INFO " __VA_ARGS__), fputc('\n', stderr))
#define PRINT_MODULE_DESCRIPTION(text) PX4_INFO("%s", text)
#define PRINT_MODULE_USAGE_NAME(name, category) PX4_INFO("%s (%s)", name, category)
#define PRINT_MODULE_USAGE_COMMAND(name) PX4_INFO("%s", name)
#define PRINT_MODULE_USAGE_DEFAULT_COMMANDS() PX4_INFO("stop, status")

using param_t = uintptr_t;
struct Parameter {
  bool integer;
  double value;
};
extern std::map<std::string, Parameter> parameters;
static constexpr param_t PARAM_INVALID = 0;
inline param_t param_find(const char *name)
{
  const auto found = parameters.find(name);
  return found == parameters.end() ? PARAM_INVALID : reinterpret_cast<param_t>(&found->second);
}
inline int param_get(param_t which, void *value)
{
  const Parameter *found = reinterpret_cast<const Parameter *>(which);
  if (found->integer) {
    const int32_t whole = (int32_t)found->value;
    memcpy(value, &whole, sizeof whole);
  } else {
    const float real = (float)found->value;
    memcpy(value, &real, sizeof real);
  }
  return 0;
}

template <class T> struct Topic {
  T last{};
  unsigned count{0};
};
#define ORB_ID(name) (&topic_##name)
#define TOPIC(name) inline Topic<name##_s> topic_##name

namespace uORB
{
template <class T> class Publication
{
public:
  explicit Publication(Topic<T> *topic) : _topic(topic) {}
  bool publish(const T &message)
  {
    _topic->last = message;
    _topic->count++;
    return true;
  }

private:
  Topic<T> *_topic;
};

class Subscription
{
public:
  template <class T> explicit Subscription(Topic<T> *topic) : _topic(topic), _count(&topic->count) {}
  template <class T> bool update(T *message)
  {
    if (_seen == *_count) {
      return false;
    }
    _seen = *_count;
    return copy(message);
  }
  template <class T> bool copy(T *message)
  {
    *message = static_cast<Topic<T> *>(_topic)->last;
    return *_count > 0;
  }

private:
  void *_topic;
  const unsigned *_count;
  unsigned _seen{0};
};

class SubscriptionCallbackWorkItem : public Subscription
{
public:
  template <class Item, class T> SubscriptionCallbackWorkItem(Item *, Topic<T> *topic) : Subscription(topic) {}
  bool registerCallback() { return true; }
  void unregisterCallback() {}
};
} // namespace uORB

namespace px4
{
struct wq_config_t {
};
namespace wq_configurations
{
static constexpr wq_config_t rate_ctrl{};
}
class WorkItem
{
public:
  WorkItem(const char *, const wq_config_t &) {}
  virtual ~WorkItem() = default;
  virtual void Run() = 0;
};
} // namespace px4

template <class T> class ModuleBase
{
public:
  struct Held {
    T *module{nullptr};
    void store(T *other) { module = other; }
    T *load() const { return module; }
  };
  static int main(int argc, char *argv[])
  {
    if (argc > 1 && !strcmp(argv[1], "start")) {
      _stop = false;
      return T::task_spawn(argc, argv);
    }
    if (argc > 1 && !strcmp(argv[1], "status") && _object.load() != nullptr) {
      return _object.load()->print_status();
    }
    return T::custom_command(argc, argv);
  }
  virtual ~ModuleBase() = default;
  virtual int print_status() { return 0; }
  bool should_exit() const { return _stop; }
  static void exit_and_cleanup()
  {
    delete _object.load();
    _object.store(nullptr);
  }
  static inline Held _object{};
  static inline int _task_id{-1};
  static inline bool _stop{false};
  static constexpr int task_id_is_work_queue = -2;
};

struct actuator_motors_s {
  static constexpr uint8_t NUM_CONTROLS = 12;
  uint64_t timestamp, timestamp_sample;
  uint16_t reversible_flags;
  float control[12];
};
struct arming_check_request_s {
  uint64_t timestamp;
  uint8_t request_id;
};
struct arming_check_reply_s {
  static constexpr uint8_t HEALTH_COMPONENT_INDEX_NONE = 0;
  uint64_t timestamp;
  uint8_t request_id, registration_id, health_component_index;
  bool health_component_is_present, health_component_warning, health_component_error, can_arm_and_run;
  uint8_t num_events;
  bool mode_req_angular_velocity, mode_req_attitude, mode_req_local_alt, mode_req_local_position,
      mode_req_local_position_relaxed, mode_req_global_position, mode_req_mission, mode_req_home_position,
      mode_req_prevent_arming, mode_req_manual_control;
};
struct register_ext_component_request_s {
  static constexpr uint16_t LATEST_PX4_ROS2_API_VERSION = 1;
  uint64_t timestamp, request_id;
  char name[25];
  uint16_t px4_ros2_api_version;
  bool register_arming_check, register_mode, register_mode_executor, enable_replace_internal_mode,
      activate_mode_immediately;
  uint8_t replace_internal_mode;
};
struct register_ext_component_reply_s {
  uint64_t timestamp, request_id;
  char name[25];
  uint16_t px4_ros2_api_version;
  bool success;
  int8_t arming_check_id, mode_id, mode_executor_id;
};
struct unregister_ext_component_s {
  uint64_t timestamp;
  char name[25];
  int8_t arming_check_id, mode_id, mode_executor_id;
};
struct trajectory_setpoint_s {
  uint64_t timestamp;
  float position[3], velocity[3], acceleration[3], jerk[3], yaw, yawspeed;
};
struct vehicle_angular_velocity_s {
  uint64_t timestamp, timestamp_sample;
  float xyz[3], xyz_derivative[3];
};
struct vehicle_attitude_s {
  uint64_t timestamp, timestamp_sample;
  float q[4], delta_q_reset[4];
  uint8_t quat_reset_counter;
};
struct vehicle_control_mode_s {
  uint64_t timestamp;
  bool flag_armed, flag_multicopter_position_control_enabled, flag_control_manual_enabled, flag_control_auto_enabled,
      flag_control_offboard_enabled, flag_control_position_enabled, flag_control_velocity_enabled,
      flag_control_altitude_enabled, flag_control_climb_rate_enabled, flag_control_acceleration_enabled,
      flag_control_attitude_enabled, flag_control_rates_enabled, flag_control_allocation_enabled,
      flag_control_termination_enabled;
  uint8_t source_id;
};
struct vehicle_local_position_s {
  uint64_t timestamp, timestamp_sample;
  bool xy_valid, z_valid, v_xy_valid, v_z_valid;
  float x, y, z, delta_xy[2];
  uint8_t xy_reset_counter;
  float delta_z;
  uint8_t z_reset_counter;
  float vx, vy, vz, heading, delta_heading;
  uint8_t heading_reset_counter;
};
struct vehicle_status_s {
  static constexpr uint8_t ARMING_STATE_DISARMED = 1, ARMING_STATE_ARMED = 2;
  uint64_t timestamp;
  uint8_t arming_state, nav_state;
};
struct vehicle_thrust_setpoint_s {
  uint64_t timestamp, timestamp_sample;
  float xyz[3];
};
TOPIC(actuator_motors);
TOPIC(arming_check_request);
TOPIC(arming_check_reply);
TOPIC(register_ext_component_request);
TOPIC(register_ext_component_reply);
TOPIC(unregister_ext_component);
TOPIC(trajectory_setpoint);
TOPIC(vehicle_angular_velocity);
TOPIC(vehicle_attitude);
TOPIC(vehicle_local_position);
TOPIC(vehicle_status);
TOPIC(vehicle_thrust_setpoint);
inline Topic<vehicle_control_mode_s> topic_config_control_setpoints;
