"""Learners by the name that `algorithm=` takes."""

from embodied.algorithms.ppo import PPOConfig
from embodied.algorithms.ranking import RankingConfig
from embodied.algorithms.self_imitation import SelfImitationConfig

ALGORITHMS: dict[str, type] = {
    "ppo": PPOConfig,
    "ranking": RankingConfig,
    "self_imitation": SelfImitationConfig,
}
