"""Steps stock LIBERO (robosuite 1.4.0) as a separate process in its own virtual environment.

Used by libero_throughput.py and stock_recordings.py: a JSON request on standard input, a JSON answer on standard
output. Nothing of this repository is imported. Stock was written for older MuJoCo versions: `adapt` makes only the
necessary changes.
"""

import json
import os
import sys
import time
import xml.etree.ElementTree as ET

STILL = [0.0] * 6 + [-1.0]


def adapt() -> None:
    """Make robosuite 1.4.0 run on MuJoCo 4, and leave out missing visual files."""
    import mujoco

    mujoco.MjData.qM = property(lambda data: data)  # the inertia matrix is called M now, and mj_fullM takes the data
    full = mujoco.mj_fullM
    mujoco.mj_fullM = lambda model, target, data: full(model, data, target)

    from robosuite.utils import binding_utils

    def address(table: str, free: int, ball: int):  # noqa: ANN202
        def find(model, name):  # noqa: ANN001, ANN202
            joint = model.joint_name2id(name)
            start = getattr(model, table)[joint]
            size = {0: free, 1: ball}.get(int(model.jnt_type[joint]), 1)
            return start if size == 1 else (start, start + size)

        return find

    binding_utils.MjModel.get_joint_qpos_addr = address(
        "jnt_qposadr", 7, 4
    )  # numpy integers are not accepted as mjtJoint any more
    binding_utils.MjModel.get_joint_qvel_addr = address("jnt_dofadr", 6, 3)
    load = binding_utils.MjSim.from_xml_string.__func__
    binding_utils.MjSim.from_xml_string = classmethod(lambda cls, xml: load(cls, without_missing_files(xml)))


def without_missing_files(xml: str) -> str:
    """The model with missing meshes replaced by points, and missing textures left out."""
    root = ET.fromstring(xml)
    asset, gone = root.find("asset"), set()
    for element in [*asset.findall("mesh"), *asset.findall("texture")]:
        files = [path for key, path in element.attrib.items() if key.startswith("file")]
        if not all(map(os.path.exists, files)):
            gone.add((element.tag, element.get("name")))
            asset.remove(element)
    for material in asset.findall("material"):
        if ("texture", material.get("texture")) in gone:
            del material.attrib["texture"]
    for geom in root.iter("geom"):
        if ("mesh", geom.get("mesh")) in gone:
            del geom.attrib["mesh"]
            geom.set("type", "sphere")
            geom.set("size", "0.001")
    return ET.tostring(root, encoding="unicode")


def make(bddl: str, cameras: bool):  # noqa: ANN201
    """Stock's environment for a task."""
    from libero.libero.envs.env_wrapper import ControlEnv

    return ControlEnv(bddl_file_name=bddl, use_camera_obs=cameras, has_offscreen_renderer=cameras)


def place(model, fixtures: dict[str, list[list[float]]]) -> None:  # noqa: ANN001
    """Put fixtures, which stock places at random at every reset, where ours are: position and quaternion by body."""
    for name, (position, quaternion) in fixtures.items():
        body = model.body_name2id(name)
        model.body_pos[body], model.body_quat[body] = position, quaternion


def run(request: dict) -> dict:
    """Replay `episodes` (initial state and actions) in a loop for `seconds`; only stepping is timed."""
    environment = make(request["bddl"], request["cameras"])
    steps, successes, cpu_s, wall_s, episodes = 0, 0, 0.0, 0.0, 0
    while wall_s < request["seconds"]:
        episode = request["episodes"][episodes % len(request["episodes"])]
        environment.reset()
        place(environment.sim.model, request["fixtures"])
        environment.set_init_state(episode["state"])
        for _ in range(5):
            environment.step(STILL)
        success, cpu, wall = False, time.process_time(), time.perf_counter()
        for action in episode["actions"]:
            success |= bool(environment.step(action)[2])
        cpu_s, wall_s = cpu_s + time.process_time() - cpu, wall_s + time.perf_counter() - wall
        steps, successes, episodes = steps + len(episode["actions"]), successes + success, episodes + 1
    return {"steps": steps, "cpu_s": cpu_s, "wall_s": wall_s, "episodes": episodes, "successes": successes}


def record(request: dict) -> dict:
    """Run `episodes` (initial state and actions) once and return everything that parity.py reads of a recording.

    Fixtures are where stock's own reset puts them; the same `seed` gives the same places.
    """
    import numpy as np

    environment = make(request["bddl"], cameras=False)
    episodes = []
    for number, episode in enumerate(request["episodes"]):
        environment.seed(request["seed"] + number)
        environment.reset()
        environment.set_init_state(np.array(episode["state"]))
        for _ in range(5):
            environment.step(STILL)
        moments, success = [moment(environment)], []
        for action in episode["actions"]:
            success.append(bool(environment.step(action)[2]))
            moments.append(moment(environment))
        model = environment.sim.model
        places = {"body_pos": model.body_pos.tolist(), "body_quat": model.body_quat.tolist()}
        episodes.append({"moments": moments, "success": success, **places})
    names = [model.body_id2name(body) for body in range(model.nbody)]
    posture = environment.robots[0].controller.initial_joint.tolist()
    return {"episodes": episodes, "body_names": names, "initial_joint": posture}


def moment(environment) -> dict:  # noqa: ANN001
    """The state, and the controllers' internal values."""
    robot, data = environment.robots[0], environment.sim.data
    return {
        "qpos": data.qpos.tolist(),
        "qvel": data.qvel.tolist(),
        "gripper_action": robot.gripper.current_action.tolist(),
        "goal_orientation": robot.controller.goal_ori.tolist(),
    }


if __name__ == "__main__":
    answer_to = sys.stdout
    sys.stdout = sys.stderr  # because robosuite prints
    adapt()
    request = json.load(sys.stdin)
    json.dump(run(request) if "seconds" in request else record(request), answer_to)
