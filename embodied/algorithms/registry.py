"""Learner configs by the value of the options `algorithm` and `offline`."""

from embodied.algorithms.imitation.distillation import DistillationConfig
from embodied.algorithms.imitation.interventions import HGDAggerConfig, IWRConfig
from embodied.algorithms.imitation.one_step import OfflineOneStepConfig, OnlineOneStepConfig
from embodied.algorithms.imitation.self_imitation import SelfImitationConfig
from embodied.algorithms.off_policy.arsq import ARSQConfig
from embodied.algorithms.off_policy.dsrl import DSRLConfig
from embodied.algorithms.off_policy.flash_sac import FlashSACConfig
from embodied.algorithms.off_policy.h2o import H2OConfig
from embodied.algorithms.off_policy.qc import QCConfig, QCFQLConfig
from embodied.algorithms.off_policy.residual import ResidualConfig
from embodied.algorithms.off_policy.sac import RLPDConfig, SACConfig, WSRLConfig
from embodied.algorithms.off_policy.td3 import TD3Config
from embodied.algorithms.offline.bppo import BPPOConfig
from embodied.algorithms.offline.calql import CalQLConfig, CQLConfig
from embodied.algorithms.offline.co_rft import CoRFTConfig
from embodied.algorithms.offline.fql import FQLConfig, OfflineQCConfig
from embodied.algorithms.offline.iql import FamO2OConfig, FDVLConfig, IQLConfig
from embodied.algorithms.offline.mbrcsl import MBRCSLConfig
from embodied.algorithms.offline.oer import OERConfig
from embodied.algorithms.offline.rebrac import ReBRACConfig, TD3BCConfig
from embodied.algorithms.offline.recap import RECAPConfig
from embodied.algorithms.on_policy.bptt import BPTTConfig
from embodied.algorithms.on_policy.grpo import GRPOConfig
from embodied.algorithms.on_policy.ppo import PPOConfig
from embodied.algorithms.on_policy.ranking import RankingConfig

ALGORITHMS: dict[str, type] = {
    "arsq": ARSQConfig,
    "bptt": BPTTConfig,
    "distillation": DistillationConfig,
    "dsrl": DSRLConfig,
    "flash_sac": FlashSACConfig,
    "grpo": GRPOConfig,
    "h2o": H2OConfig,
    "hg_dagger": HGDAggerConfig,
    "iwr": IWRConfig,
    "one_step": OnlineOneStepConfig,
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
    "bppo": BPPOConfig,
    "calql": CalQLConfig,
    "co_rft": CoRFTConfig,
    "cql": CQLConfig,
    "f_dvl": FDVLConfig,
    "famo2o": FamO2OConfig,
    "fql": FQLConfig,
    "iql": IQLConfig,
    "mbrcsl": MBRCSLConfig,
    "oer": OERConfig,
    "one_step": OfflineOneStepConfig,
    "qc": OfflineQCConfig,
    "rebrac": ReBRACConfig,
    "recap": RECAPConfig,
    "td3_bc": TD3BCConfig,
}
