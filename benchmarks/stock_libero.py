"""Steps stock LIBERO (robosuite 1.4.0) as a separate process in its own virtual environment.

Used by libero_throughput.py and stock_recordings.py: a JSON request on standard input, a JSON answer on standard
output. Of this repository only sims/libero/stock/adapted.py is imported, which makes stock run on today's MuJoCo.
"""

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sims.libero.stock.adapted import adapt, make, place

STILL = [0.0] * 6 + [-1.0]


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
    """Run `episodes` (initial state and actions) once; return the data of a recording for parity.py.

    Fixtures are placed by stock's own reset; the same `seed` results in the same places.
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
    request = json.load(sys.stdin)
    adapt(request["assets"])
    json.dump(run(request) if "seconds" in request else record(request), answer_to)
