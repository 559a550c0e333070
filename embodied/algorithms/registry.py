"""Learner configs by the value of the options `algorithm` and `offline`."""

from embodied.algorithms.bptt import BPTTConfig
from embodied.algorithms.calql import CalQLConfig, CQLConfig
from embodied.algorithms.distillation import DistillationConfig
from embodied.algorithms.dsrl import DSRLConfig
from embodied.algorithms.grpo import GRPOConfig
from embodied.algorithms.iql import IQLConfig
from embodied.algorithms.ppo import PPOConfig
from embodied.algorithms.qc import QCConfig, QCFQLConfig
from embodied.algorithms.ranking import RankingConfig
from embodied.algorithms.rebrac import ReBRACConfig, TD3BCConfig
from embodied.algorithms.residual import ResidualConfig
from embodied.algorithms.sac import RLPDConfig, SACConfig, WSRLConfig
from embodied.algorithms.self_imitation import SelfImitationConfig
from embodied.algorithms.td3 import TD3Config

ALGORITHMS: dict[str, type] = {
    "bptt": BPTTConfig,
    "distillation": DistillationConfig,
    "dsrl": DSRLConfig,
    "grpo": GRPOConfig,
    "ppo": PPOConfig,
    "qc": QCConfig,
    "qc_fql": QCFQLConfig,
    "ranking": RankingConfig,
    "residual": ResidualConfig,
    "rlpd": RLPDConfig,
    "sac": SACConfig,
    "self_imitation": SelfImitationConfig,
    "td3": TD3Config,
    "wsrl": WSRLConfig,
}
OFFLINE: dict[str, type] = {
    "calql": CalQLConfig,
    "cql": CQLConfig,
    "iql": IQLConfig,
    "rebrac": ReBRACConfig,
    "td3_bc": TD3BCConfig,
}
