"""Policies by the name that `policy=` takes."""

from policies.attention import AttentionConfig
from policies.flow import FlowConfig
from policies.mlp import MLPConfig
from policies.recurrent import RecurrentConfig

POLICIES: dict[str, type] = {
    "attention": AttentionConfig,
    "flow": FlowConfig,
    "mlp": MLPConfig,
    "recurrent": RecurrentConfig,
}
