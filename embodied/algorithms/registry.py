"""Learners by the name that `algorithm=` takes."""

from embodied.algorithms.imitation_ppo import ImitationPPOConfig
from embodied.algorithms.ppo import PPOConfig
from embodied.algorithms.self_imitation import SelfImitationConfig

ALGORITHMS: dict[str, type] = {
    "imitation_ppo": ImitationPPOConfig,
    "ppo": PPOConfig,
    "self_imitation": SelfImitationConfig,
}
