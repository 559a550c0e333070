"""Policies by the value of the option `policy`."""

from typing import cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from embodied.errors import UserError
from embodied.policy import PolicyConfig, TrainablePolicy
from embodied.saving.checkpoint import Checkpoint
from policies.attention import AttentionConfig
from policies.coarse_to_fine import CoarseToFineConfig
from policies.diffusion import DiffusionConfig
from policies.flow import FlowConfig
from policies.lerobot.act import ACTConfig
from policies.mlp import MLPConfig
from policies.recurrent import RecurrentConfig
from policies.squashed import SquashedConfig
from policies.vla.pi0 import Pi0Config
from policies.vla.pi0_fast.policy import Pi0FastConfig
from policies.vla.pi05 import Pi05Config
from policies.vla.smolvla.policy import SmolVLAConfig
from policies.vla.tokens import TokensConfig

POLICIES: dict[str, type] = {
    "act": ACTConfig,
    "attention": AttentionConfig,
    "coarse_to_fine": CoarseToFineConfig,
    "diffusion": DiffusionConfig,
    "flow": FlowConfig,
    "mlp": MLPConfig,
    "pi0": Pi0Config,
    "pi05": Pi05Config,
    "pi0_fast": Pi0FastConfig,
    "recurrent": RecurrentConfig,
    "smolvla": SmolVLAConfig,
    "squashed": SquashedConfig,
    "tokens": TokensConfig,
}


def trained_policy(saved: Checkpoint) -> TrainablePolicy:
    """Build the policy of a checkpoint of train.py, with its weights, without its task.

    Raises:
        UserError: if the configuration names none of our policies, or is of another version.
    """
    choice, values = (saved.config.get(kind, {}).get("policy") for kind in ("choices", "values"))
    if choice not in POLICIES or values is None:
        raise UserError(f"the configuration of {saved.path} names no policy; expected a checkpoint of train.py")
    try:
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(POLICIES[choice]), values))
    except OmegaConfBaseException as error:
        raise UserError(f"the policy of {saved.path} is of another version ({error}); train again") from error
    policy = cast(PolicyConfig, config).build(saved.contract)
    saved.restore(policy)
    return policy
