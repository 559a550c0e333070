/* Flies the PX4 module without PX4. Lines of the console are a command and numbers:
   "start"; "stop"; "time US"; "requests"; "param NAME VALUE", "int NAME VALUE"; "registered SUCCESS MODE CHECK"; "status MODE ARMED"; "setpoint
   X Y Z YAW"; "attitude W X Y Z"; "position VALID X Y Z VX VY VZ HEADING"; "reset DX DY DZ DHEADING" with the next
   position; "ask ID"; "thrust"; and "gyro US P Q R", with which the module runs. A run prints whether it told the motors anything,
   and the last twelve controls; other lines print what they caused. */
#include <iostream>
#include <sstream>

#include "px4.hpp"

hrt_abstime current_us = 0;
std::map<std::string, Parameter> parameters;
extern "C" int policy_control_main(int argc, char *argv[]);

static px4::WorkItem *module();
static void stop();

static float number(std::istream &words)
{
  std::string word;
  words >> word;
  return std::stof(word); /* "nan" too */
}

int main()
{
  std::string line, command, name;
  vehicle_local_position_s position{};
  while (std::getline(std::cin, line)) {
    std::istringstream words(line);
    words >> command;
    if (command == "start") {
      char program[] = "policy_control", verb[] = "start";
      char *argv[] = {program, verb};
      std::cout << policy_control_main(2, argv) << "\n";
    } else if (command == "param" || command == "int") {
      words >> name;
      parameters[name] = {command == "int", number(words)};
    } else if (command == "registered") {
      register_ext_component_reply_s reply{};
      int success, mode, check;
      words >> success >> mode >> check;
      reply.request_id = topic_register_ext_component_request.last.request_id;
      reply.success = success;
      reply.mode_id = mode;
      reply.arming_check_id = check;
      uORB::Publication<register_ext_component_reply_s>(ORB_ID(register_ext_component_reply)).publish(reply);
    } else if (command == "status") {
      int mode, armed;
      words >> mode >> armed;
      vehicle_status_s status{};
      status.nav_state = mode;
      status.arming_state = armed ? vehicle_status_s::ARMING_STATE_ARMED : vehicle_status_s::ARMING_STATE_DISARMED;
      uORB::Publication<vehicle_status_s>(ORB_ID(vehicle_status)).publish(status);
    } else if (command == "setpoint") {
      trajectory_setpoint_s wanted{};
      for (float &part : wanted.position) {
        part = number(words);
      }
      wanted.yaw = number(words);
      wanted.timestamp = current_us;
      uORB::Publication<trajectory_setpoint_s>(ORB_ID(trajectory_setpoint)).publish(wanted);
    } else if (command == "attitude") {
      vehicle_attitude_s attitude{};
      for (float &part : attitude.q) {
        part = number(words);
      }
      attitude.timestamp = current_us;
      uORB::Publication<vehicle_attitude_s>(ORB_ID(vehicle_attitude)).publish(attitude);
    } else if (command == "position" || command == "reset") {
      if (command == "reset") {
        words >> position.delta_xy[0] >> position.delta_xy[1] >> position.delta_z >> position.delta_heading;
        position.xy_reset_counter++, position.z_reset_counter++, position.heading_reset_counter++;
        continue;
      }
      int valid;
      words >> valid;
      for (float *part : {&position.x, &position.y, &position.z, &position.vx, &position.vy, &position.vz, &position.heading}) {
        *part = number(words);
      }
      position.xy_valid = position.z_valid = valid != 0;
      position.v_xy_valid = position.v_z_valid = valid == 1; /* 2 is a position without a velocity */
      position.timestamp = current_us;
      uORB::Publication<vehicle_local_position_s>(ORB_ID(vehicle_local_position)).publish(position);
    } else if (command == "ask") {
      int id;
      words >> id;
      arming_check_request_s question{};
      question.request_id = id;
      const unsigned before = topic_arming_check_reply.count;
      uORB::Publication<arming_check_request_s>(ORB_ID(arming_check_request)).publish(question);
      module()->Run();
      const arming_check_reply_s &reply = topic_arming_check_reply.last;
      std::cout << (topic_arming_check_reply.count - before) << " " << (int)reply.request_id << " "
                << (int)reply.registration_id << " " << reply.can_arm_and_run << " "
                << (reply.mode_req_angular_velocity && reply.mode_req_attitude && reply.mode_req_local_alt
                    && reply.mode_req_local_position)
                << "\n";
    } else if (command == "gyro") {
      vehicle_angular_velocity_s gyro{};
      words >> current_us >> gyro.xyz[0] >> gyro.xyz[1] >> gyro.xyz[2];
      gyro.timestamp = gyro.timestamp_sample = current_us;
      const unsigned before = topic_actuator_motors.count;
      uORB::Publication<vehicle_angular_velocity_s>(ORB_ID(vehicle_angular_velocity)).publish(gyro);
      module()->Run();
      std::cout.precision(9);
      std::cout << (topic_actuator_motors.count - before);
      for (const float control : topic_actuator_motors.last.control) {
        std::cout << " " << control;
      }
      std::cout << "\n";
    } else if (command == "thrust") {
      const vehicle_thrust_setpoint_s &thrust = topic_vehicle_thrust_setpoint.last;
      std::cout << topic_vehicle_thrust_setpoint.count << " " << thrust.xyz[0] << " " << thrust.xyz[1] << " "
                << thrust.xyz[2] << "\n";
    } else if (command == "stop") {
      stop();
    } else if (command == "time") {
      words >> current_us;
    } else if (command == "requests") {
      const register_ext_component_request_s &request = topic_register_ext_component_request.last;
      std::cout << topic_register_ext_component_request.count << " " << request.name
                << request.register_arming_check << request.register_mode << " "
                << (int)topic_config_control_setpoints.count << " " << (int)topic_config_control_setpoints.last.source_id
                << " " << topic_config_control_setpoints.last.flag_control_allocation_enabled
                << topic_config_control_setpoints.last.flag_control_termination_enabled << " "
                << topic_unregister_ext_component.count << " " << (int)topic_unregister_ext_component.last.mode_id << "\n";
    }
  }
  return 0;
}

#include "policy_control.cpp"

static px4::WorkItem *module()
{
  return PolicyControl::_object.load();
}

static void stop()
{
  PolicyControl::_stop = true;
  module()->Run();
}
