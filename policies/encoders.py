"""Object-token encoder: attention over objects, each described by its pose and the words of its name.

Letters: N observations, M objects, L words, D features.
"""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from embodied.text import WORD_BUCKETS

PROPRIOCEPTION = ("joint_position", "end_effector_position", "end_effector_rotation", "gripper_position")
"""Observation keys read as plain vectors; widths 7, 3, 6, 2."""
OBSERVATION_KEYS = (
    *PROPRIOCEPTION, "object_position", "object_rotation", "object_names", "object_mask", "instruction",
)  # fmt: skip
PROPRIOCEPTION_WIDTH = 18
POSE_WIDTH = 19


def mention(names: Tensor, instruction: Tensor) -> Tensor:
    """How the instruction [N, L] mentions each object [N, M, L], [N, M, 2]; word id 0 is padding.

    First the share of the name's words that it contains, then where the name's first word stands in it, both in
    [0, 1]: "pick the milk and place it in the basket" mentions both objects, the milk earlier.
    """
    words = names != 0
    equal = (names.unsqueeze(-1) == instruction[:, None, None, :]) & words.unsqueeze(-1)  # [N, M, L, L]
    share = equal.any(-1).sum(-1) / words.sum(-1).clamp_min(1)
    place = equal.any(-2).float().argmax(-1) / (instruction != 0).sum(-1).clamp_min(1).unsqueeze(-1)
    return torch.stack((share, place * (share > 0)), dim=-1)


def rotation_matrix(two_columns: Tensor) -> Tensor:
    """Rotation matrices [..., 3, 3] from their first two columns [..., 6]."""
    first, second = two_columns[..., :3], two_columns[..., 3:]
    return torch.stack((first, second, torch.linalg.cross(first, second)), dim=-1)


def object_poses(observation: TensorDict) -> Tensor:
    """Pose of every object in the world and seen from the end effector, [N, M, 19]."""
    position, rotation = observation["object_position"], observation["object_rotation"]
    hand = rotation_matrix(observation["end_effector_rotation"]).unsqueeze(1)
    offset = position - observation["end_effector_position"].unsqueeze(1)
    in_hand = hand.transpose(-1, -2) @ rotation_matrix(rotation)
    relative = torch.cat((in_hand[..., 0], in_hand[..., 1]), dim=-1)
    near = torch.exp(-offset.norm(dim=-1, keepdim=True) / 0.1)  # resolves the last centimetres
    return torch.cat((position, offset, rotation, relative, near), dim=-1)


class ObjectEncoder(nn.Module):
    """A state token attends over M object tokens; returns features [N, 2 * width].

    Statistics for normalisation are buffers, set once by `fit`; encoding without them raises RuntimeError.
    """

    def __init__(self, width: int = 128, heads: int = 8, word_width: int = 16) -> None:
        super().__init__()
        self.width, self.heads = width, heads
        self.register_buffer("words", _word_features(word_width))
        self.state = _mlp(PROPRIOCEPTION_WIDTH + word_width, width, width)
        self.objects = _mlp(POSE_WIDTH + 2 + word_width, width, width // 2)
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width // 2, 2 * width)
        self.register_buffer("fitted", torch.zeros((), dtype=torch.bool))
        for name, size in (("state", PROPRIOCEPTION_WIDTH), ("pose", POSE_WIDTH)):
            self.register_buffer(f"{name}_mean", torch.zeros(size))
            self.register_buffer(f"{name}_std", torch.ones(size))

    @property
    def out_features(self) -> int:
        """Width of the encoding."""
        return 2 * self.width

    @torch.no_grad()
    def fit(self, observation: TensorDict) -> None:
        """Take mean and standard deviation of every input from `observation` [N]."""
        state = torch.cat([observation[key] for key in PROPRIOCEPTION], dim=-1)
        poses = object_poses(observation)[observation["object_mask"]]
        for name, data, floor in (("state", state, 0.02), ("pose", poses, 0.05)):
            getattr(self, f"{name}_mean").copy_(data.mean(0))
            getattr(self, f"{name}_std").copy_(data.std(0).clamp_min(floor))
        self.fitted.fill_(True)

    def forward(self, observation: TensorDict) -> Tensor:
        """Encode observations [N] as [N, 2 * width]: the state beside what it attends to among the objects."""
        if not self.fitted:
            raise RuntimeError("the policy has no normalisation statistics; call fit(observations) or load a checkpoint")
        state = torch.cat([observation[key] for key in PROPRIOCEPTION], dim=-1)
        state = (state - self.state_mean) / self.state_std
        state = self.state(torch.cat((state, self._embed(observation["instruction"])), dim=-1))
        tokens = self.objects(self._object_inputs(observation))
        n, m, _ = tokens.shape
        query = self.query(state).view(n, self.heads, 1, -1)
        key, value = self.key_value(tokens).view(n, m, 2, self.heads, -1).permute(2, 0, 3, 1, 4)
        score = (query * key).sum(-1) / key.shape[-1] ** 0.5  # [N, heads, M]
        score = score.masked_fill(~observation["object_mask"].unsqueeze(1), float("-inf"))
        attended = (score.softmax(-1).unsqueeze(-1) * value).sum(2).reshape(n, -1)
        return torch.cat((state, attended), dim=-1)

    def _object_inputs(self, observation: TensorDict) -> Tensor:
        names = observation["object_names"]
        poses = (object_poses(observation) - self.pose_mean) / self.pose_std
        mentions = 4.0 * mention(names, observation["instruction"])
        return torch.cat((poses, mentions, self._embed(names.flatten(0, 1)).unflatten(0, names.shape[:2])), dim=-1)

    def _embed(self, words: Tensor) -> Tensor:
        return nn.functional.embedding_bag(words, self.words, mode="sum", padding_idx=0)


def _word_features(width: int) -> Tensor:
    """Fixed random word embeddings [WORD_BUCKETS, width]: nothing to learn, and the same in every process."""
    features = torch.randn(WORD_BUCKETS, width, generator=torch.Generator().manual_seed(0)) / 2.0
    features[0] = 0.0
    return features


def _mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.GELU(), nn.Linear(hidden, outputs), nn.LayerNorm(outputs))
