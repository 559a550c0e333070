"""Small policies of every exportable kind, with weights that are neither tiny nor trained."""

import torch
from tensordict import TensorDict

from embodied.contract import Contract, TensorSpec
from embodied.export.network import PRESENT
from policies.attention import AttentionConfig
from policies.mlp import MLPConfig, MLPPolicy
from policies.recurrent import RecurrentConfig
from real_robot.firmware.exporting import Weights

XYZ = ("x", "y", "z")
STATE = {
    "position": TensorSpec((3,), unit="m", frame="world", names=XYZ),
    "rotation": TensorSpec((9,), unit="1", frame="world", names=tuple(a + b for a in XYZ for b in XYZ)),
    "velocity": TensorSpec((3,), unit="m/s", frame="world", names=XYZ),
    "angular_velocity": TensorSpec((3,), unit="rad/s", frame="body", names=XYZ),
}
PREVIOUS = {"previous_action": TensorSpec((4,), unit="1")}
AROUND = {
    "neighbours": TensorSpec((6, 7), unit="m", frame="world", names=(*"abcdef", PRESENT)),
    "obstacles": TensorSpec((3, 3), unit="m", frame="world", names=XYZ),
}
HIDDEN = {"force": TensorSpec((3,), unit="N", frame="world", privileged=True)}
ROTORS = TensorSpec((4,), unit="1", names=("m1", "m2", "m3", "m4"), low=(-1.0,) * 4, high=(1.0,) * 4)
SPECS = {
    "mlp": STATE,  # 18 -> 64 -> 64 -> 4
    "recurrent": STATE | PREVIOUS,  # 22 -> 16 -> GRU 16 -> 4
    "attention": STATE | AROUND,
    "distances": STATE | {"ranges": TensorSpec((5,), unit="m")},
    "chunks": STATE,  # 7 of 15 odd-sized actions, from odd-sized layers
}
CONFIGS = {
    "mlp": MLPConfig(hidden=[64, 64]),
    "recurrent": RecurrentConfig(),
    "attention": AttentionConfig(),
    "distances": MLPConfig(hidden=[16], reciprocal=["position", "ranges"]),
    "chunks": MLPConfig(hidden=[13, 30]),
}
KINDS = tuple(CONFIGS)
INTEGERS = [(Weights.int16, kind) for kind in ("recurrent", "attention", "chunks")]
INTEGERS += [(Weights.int8, kind) for kind in ("attention", "chunks")]
EXPORTS = [(Weights.float32, kind) for kind in KINDS] + INTEGERS
SPECS["history"] = STATE | {"action_history": TensorSpec((12,), unit="1")}
SPECS["pairs"] = SPECS["history"]  # of four rotors' actions, two of which are decided at once
CONFIGS["history"] = CONFIGS["pairs"] = MLPConfig(hidden=[16])


def contract(kind: str) -> Contract:
    observation = SPECS[kind] | HIDDEN
    if kind == "chunks":
        action = TensorSpec((5,), unit="rad", low=(-1.0, -0.1, 0.0, 2.0, -50.0), high=(1.0, 0.1, 1.0, 2.5, 10.0))
        return Contract(observation, action, 0.02, horizon=3, executed=2)
    count = 2 if kind == "pairs" else 1
    return Contract(observation, ROTORS, 0.01, horizon=count, executed=count)


def observations(contract: Contract, count: int, seed: int = 0) -> TensorDict:
    """Random observations, each element in a range of its own; tokens are there or not."""
    generator = torch.Generator().manual_seed(seed)
    parts = {}
    for key, spec in contract.observation.items():
        width = 0.1 + 3.0 * torch.rand(spec.shape, generator=generator)
        parts[key] = width * torch.randn(count, *spec.shape, generator=generator) + width
        if PRESENT in spec.names:
            there = torch.rand(parts[key].shape[:-1], generator=generator) < 0.7
            parts[key] = torch.cat((parts[key][..., :-1] * there[..., None], there[..., None].float()), -1)
    return TensorDict(parts, batch_size=[count])


def make(kind: str, seed: int = 0) -> MLPPolicy:
    """A fitted policy with weights that keep its units busy."""
    torch.manual_seed(seed)
    policy = CONFIGS[kind].build(contract(kind))
    for parameter in policy.actor_parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    last = [layer for layer in policy.actor if isinstance(layer, torch.nn.Linear)][-1]
    last.weight.data += 0.2 * torch.randn_like(last.weight)
    policy.fit(observations(policy.contract, 256, seed), torch.zeros(1, policy.contract.action.shape[-1]))
    return policy
