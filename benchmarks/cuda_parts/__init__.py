"""Parts of the CUDA check (`benchmarks/cuda.py`), in the order of their importance."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """One part of the check: a module with `run(record, options)`.

    Args:
        module: its import path.
        seconds: its share of a check of `MINUTES`, s.
        about: what it checks and measures.
    """

    module: str
    seconds: float
    about: str


MINUTES = 8.0
PARTS = {
    name: Part(f"benchmarks.cuda_parts.{name}", seconds, about)
    for name, seconds, about in (
        ("policies", 80.0, "policies and learners: act, evaluate, loss, one update of each algorithm"),
        ("control", 60.0, "quadrotor_hover and vehicle_navigate: training, steps/s by number of environments"),
        ("libero", 100.0, "LIBERO on mujoco_warp: agreement with MuJoCo, control steps/s, pictures"),
        ("libero_pick", 60.0, "train.py task=libero_pick sim=mjwarp, end to end"),
        ("quadruped", 55.0, "MJCF quadruped on mujoco_warp: steps/s, PPO beside rsl_rl's"),
        ("pi0", 90.0, "pi0 of published size: latency of a chunk, PPO updates"),
        ("sharding", 30.0, "FSDP2 on one device in bfloat16, resume"),
        ("overlap", 25.0, "collection beside the update"),
        ("simulators", 20.0, "ManiSkill and Isaac Lab, where they are installed"),
    )
}
