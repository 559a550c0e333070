"""Learners by the name that `algorithm=` takes."""

from embodied.algorithms.chunked_iql import ChunkedIQLConfig
from embodied.algorithms.ppo import PPOConfig
from embodied.algorithms.self_imitation import SelfImitationConfig

ALGORITHMS: dict[str, type] = {
    "chunked_iql": ChunkedIQLConfig,
    "ppo": PPOConfig,
    "self_imitation": SelfImitationConfig,
}
