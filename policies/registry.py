"""Policies by the name that `policy=` takes."""

from policies.flow import FlowConfig
from policies.mlp import MLPConfig

POLICIES: dict[str, type] = {"flow": FlowConfig, "mlp": MLPConfig}
