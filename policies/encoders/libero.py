"""Object-token encoder: attention over objects, each described by its pose and the words of its name.

Object positions are relative to the hand, not to the world, so that skills transfer between places. Only objects that
share their name with another one, which instructions distinguish by their places ("the bowl next to the plate"), are
also described by their position among the others and in the world.

Letters: N observations, M objects, L words.
"""

from __future__ import annotations

from typing import Self

import torch
from tensordict import TensorDict
from torch import Generator, Tensor, nn

from embodied.contract import Contract
from embodied.errors import UserError
from embodied.networks.words import WORD_BUCKETS, WordTable
from policies.encoders.base import Encoder
from policies.encoders.words import summed, word_features

OBSERVATIONS = (
    "end_effector_position",
    "end_effector_rotation",
    "gripper_position",
    "gripper_command",
    "object_position",
    "object_rotation",
    "object_names",
    "object_mask",
    "instruction",
)
"""Observations that the encoder reads."""
INSTRUCTION_WORDS = 20
NAME_WORDS = 6
"""Largest number of words of an instruction and of a name; more raise an error."""
STATE_WIDTH = 10
POSE_WIDTH = 15
OFFSET_WIDTH = 5
NEAR_M = 0.1
RELATION_WIDTH = 32
MENTION_SCALE = 4.0
"""Factor of mentions relative to the standardised poses, so that attention learns the named objects early."""


def missing(contract: Contract) -> list[str]:
    """Names of the `OBSERVATIONS` that `contract` lacks, or has only for critics."""
    specs = contract.observation
    return [key for key in OBSERVATIONS if key not in specs or specs[key].privileged]


def mention(names: Tensor, instruction: Tensor) -> Tensor:
    """Mention of each object [N, M, L] in the instruction [N, L'], [N, M, 2]; word id 0 is padding.

    The first number is the share of the name's words that the instruction contains. The second is its order in [0, 1]:
    the share of the instruction's object words that come before. "pick the milk and place it in the basket" mentions
    both objects, the milk earlier, and so does "milk: basket". Words that name no object change neither.
    """
    equal = matches(names, instruction)
    share = equal.any(2).sum(1) / (names != 0).sum(-1).t().clamp_min(1)  # [M, N]
    named = equal.any(1)  # [M, L', N]
    names_object = named.any(0).float()
    before = (names_object.cumsum(0) - names_object) / names_object.sum(0).clamp_min(1.0)  # [L', N]
    last = named.shape[1] - 1
    position = torch.arange(last + 1, dtype=torch.int32, device=names.device).unsqueeze(-1)
    first = torch.where(named, position, last).amin(1).long()
    return torch.stack((share, before.gather(0, first) * (share > 0)), dim=-1).transpose(0, 1)


def matches(names: Tensor, instruction: Tensor) -> Tensor:
    """Whether words of objects' names [N, M, L] are words of the instruction [N, L'], [M, L, L', N].

    N is last, where reductions over the others take half as long.
    """
    words = names.to(torch.int32).permute(1, 2, 0).contiguous()
    instruction_words = instruction.to(torch.int32).t().contiguous()
    return (words.unsqueeze(2) == instruction_words) & (words != 0).unsqueeze(2)


def namesakes(names: Tensor, mask: Tensor) -> Tensor:
    """Objects of `mask` [N, M] that share their name, [N, M, L], with another one, [N, M] bool."""
    words = names.to(torch.int32).permute(1, 2, 0).contiguous()
    same = (words.unsqueeze(1) == words.unsqueeze(0)).all(2) & mask.t()  # [M, M, N]
    return mask & (same.sum(1) > 1).t()


def rotation_matrix(two_columns: Tensor) -> Tensor:
    """Rotation matrices [..., 3, 3] from their first two columns [..., 6]."""
    first = two_columns[..., :3]
    second = two_columns[..., 3:]
    return torch.stack((first, second, torch.linalg.cross(first, second)), dim=-1)


def hand_state(observation: TensorDict) -> Tensor:
    """Height and rotation of the hand, opening and command of its fingers, [N, 10]."""
    height = observation["end_effector_position"][:, 2:]
    fingers = observation["gripper_position"], observation["gripper_command"]
    return torch.cat((height, observation["end_effector_rotation"], *fingers), dim=-1)


def object_poses(observation: TensorDict) -> Tensor:
    """Pose of every object relative to the hand, and its orientation in the world, [N, M, 15].

    Its axes are treated as lines, without a front: double angles of their directions about the hand's own axis (x^2 -
    y^2, 2 x y) and their steepness. Most objects can be grasped equally from either side, and the required rotation
    jumps where both are equally far, which is hard to learn from single angles.
    """
    position = observation["object_position"]
    rotation = rotation_matrix(observation["object_rotation"])
    hand = rotation_matrix(observation["end_effector_rotation"]).unsqueeze(1)
    offset = position - observation["end_effector_position"].unsqueeze(1)
    in_hand = hand.transpose(-1, -2) @ rotation
    x = in_hand[..., 0, :]
    y = in_hand[..., 1, :]
    distance = offset.norm(dim=-1, keepdim=True)
    # exp(-d / 0.1 m) and exp(-d / 0.03 m)
    nearness = torch.exp(-distance / torch.tensor([0.1, 0.03], device=distance.device))  # resolves the last centimetres
    # double angles: (cos 2a, sin 2a) = (x^2 - y^2, 2 x y) are equal for both directions of an axis
    lines = (x.square() - y.square(), 2.0 * x * y, rotation[..., 2, :].abs())
    return torch.cat((offset, nearness, position[..., 2:], *lines), dim=-1)


def offsets(position: Tensor) -> Tensor:
    """Offsets from each object to all objects and to the world's origin, the last, [N, M, M + 1, 5].

    The five numbers are x, y, z and two of nearness.
    """
    targets = torch.cat((position, torch.zeros_like(position[:, :1])), 1)
    offset = targets.unsqueeze(1) - position.unsqueeze(2)
    flat = offset[..., :2].norm(dim=-1, keepdim=True)
    return torch.cat((offset / NEAR_M, torch.exp(-flat / NEAR_M), torch.exp(-4.0 * flat / NEAR_M)), -1)


class ObjectEncoder(Encoder):
    """Encoder whose hand state attends over object tokens; features [N, out_features].

    Normalisation statistics are buffers, set once by `fit`; encoding without them raises RuntimeError. The words in
    the observations of `fit` are stored too: other words are ignored, because their meaning was never learned.
    """

    def __init__(self, width: int = 64, heads: int = 4, word_width: int = 16) -> None:
        super().__init__()
        self.heads = heads
        self.out_features = (2 + heads) * width
        self.reads = OBSERVATIONS
        self.seeds = ("end_effector_position", "end_effector_rotation")
        self.tables = {"instruction": WordTable(INSTRUCTION_WORDS), "object_names": WordTable(NAME_WORDS)}
        self.register_buffer("words", word_features(word_width))
        self.register_buffer("known", torch.zeros(WORD_BUCKETS, dtype=torch.bool))
        self.state = nn.Sequential(
            nn.Linear(STATE_WIDTH + word_width, 2 * width), nn.ReLU(), nn.Linear(2 * width, 2 * width), nn.ReLU()
        )
        self.objects = nn.Sequential(
            nn.Linear(POSE_WIDTH + 2 + word_width + RELATION_WIDTH, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
        )
        self.relations = nn.Sequential(
            nn.Linear(OFFSET_WIDTH + 2 * word_width, width), nn.ReLU(), nn.Linear(width, RELATION_WIDTH), nn.ReLU()
        )
        self.query = nn.Linear(2 * width, heads * width // 4)
        self.key = nn.Linear(width, heads * width // 4)
        self.register_buffer("fitted", torch.zeros((), dtype=torch.bool))
        for name, size in (("state", STATE_WIDTH), ("pose", POSE_WIDTH)):
            self.register_buffer(f"{name}_mean", torch.zeros(size))
            self.register_buffer(f"{name}_std", torch.ones(size))

    @torch.no_grad()
    def fit(self, observation: TensorDict) -> None:
        """Compute mean and standard deviation of every input from `observation` [N], and collect the known words.

        Raises:
            UserError: where there is no object in any of them.
        """
        observation = self.read(observation)
        poses = object_poses(observation)[observation["object_mask"]]
        if not len(poses):
            raise UserError("expected objects in some of the observations that statistics are taken from, got none")
        for name, data in (("state", hand_state(observation)), ("pose", poses)):
            getattr(self, f"{name}_mean").copy_(data.mean(0))
            getattr(self, f"{name}_std").copy_(data.std(0).clamp_min(0.01))
        self.known.fill_(False)
        for key in ("instruction", "object_names"):
            self.known[observation[key].unique()] = True
        self.fitted.fill_(True)

    def forward(self, observation: TensorDict) -> Tensor:
        """Encode observations [N]: the state and each head's attention over the objects, 0 without any."""
        if not self.fitted:
            raise RuntimeError(
                "the policy has no normalisation statistics; call fit(observations) or load a checkpoint"
            )
        observation = self.read(observation)
        state = (hand_state(observation) - self.state_mean) / self.state_std
        state = self.state(torch.cat((state, summed(observation["instruction"], self.known, self.words)), dim=-1))
        tokens = self.objects(self._object_inputs(observation))  # [N, M, width]
        # [N, heads, d] and [N, M, heads, d]
        query = self.query(state).unflatten(-1, (self.heads, -1))
        key = self.key(tokens).unflatten(-1, (self.heads, -1))
        score = (query.unsqueeze(1) * key).sum(-1).transpose(1, 2) / key.shape[-1] ** 0.5  # [N, heads, M]
        present = observation["object_mask"].unsqueeze(1)  # [N, 1, M]
        # softmax(q k / sqrt(d)) over present objects. Without any, all weights are 0; with -inf they would be NaN.
        weights = score.masked_fill(~present, torch.finfo(score.dtype).min).softmax(-1) * present
        return torch.cat((state, (weights @ tokens).flatten(1)), dim=-1)

    def begin_like(self, other: Self) -> None:
        """Copy the weights, statistics and known words of `other`."""
        self.load_state_dict(other.state_dict())

    def example(self, contract: Contract, count: int, rows: int, generator: Generator) -> TensorDict:
        """Random observations of present and absent objects, among them namesakes."""
        fixed = contract.observation["object_mask"].shape[0]
        rows = rows if fixed < 0 else fixed

        def normal(*shape: int) -> Tensor:
            return torch.randn(count, *shape, generator=generator)

        def words(number: int, *shape: int) -> Tensor:
            word_ids = self.known.nonzero().squeeze(1)[:number]
            return word_ids[torch.randint(len(word_ids), (count, *shape), generator=generator)]

        state = self.state_mean + self.state_std * normal(STATE_WIDTH)
        height, rotation, fingers, command = state.split((1, 6, STATE_WIDTH - 8, 1), -1)
        position = torch.cat((normal(2), height), -1)
        offset = self.pose_mean[:3] + self.pose_std[:3] * normal(rows, 3)
        names = torch.cat((words(4, rows, 1), torch.zeros(count, rows, NAME_WORDS - 1, dtype=torch.int64)), -1)
        observation = {
            "end_effector_position": position,
            "end_effector_rotation": rotation,
            "gripper_position": fingers,
            "gripper_command": command,
            "object_position": position.unsqueeze(1) + offset,
            "object_rotation": torch.linalg.qr(normal(rows, 3, 3))[0][..., :2].transpose(-1, -2).flatten(-2),
            "object_names": names,
            "object_mask": torch.rand(count, rows, generator=generator) < 0.8,
            "instruction": words(WORD_BUCKETS, INSTRUCTION_WORDS),
        }
        return TensorDict(observation, batch_size=[count])

    def _object_inputs(self, observation: TensorDict) -> Tensor:
        names = observation["object_names"]
        poses = (object_poses(observation) - self.pose_mean) / self.pose_std
        mentions = MENTION_SCALE * mention(names, observation["instruction"])
        words = summed(names, self.known, self.words)
        return torch.cat((poses, mentions, words, self._related(observation, words)), dim=-1)

    def _related(self, observation: TensorDict, words: Tensor) -> Tensor:
        """Relations of objects with a namesake to the others and the world, [N, M, RELATION_WIDTH]; else 0.

        They are maxima over the related objects: one near object, say, suffices.
        """
        mask = observation["object_mask"]
        related = words.new_zeros(*words.shape[:2], RELATION_WIDTH)
        has_namesake = namesakes(observation["object_names"], mask)
        rows, objects = has_namesake.nonzero(as_tuple=True)
        if not torch.jit.is_tracing() and not len(rows):  # an exported graph has no branches
            return related
        offset = offsets(observation["object_position"])[rows, objects]  # [B, M + 1, 5]
        names = nn.functional.pad(words, (0, 0, 0, 1))[rows]
        instruction = summed(observation["instruction"], self.known, self.words)[rows].unsqueeze(1).expand_as(names)
        others = nn.functional.pad(mask, (0, 1), value=True)[rows]
        others = others & (torch.arange(others.shape[1], device=rows.device) != objects.unsqueeze(1))
        relations = self.relations(torch.cat((offset, names, instruction), -1)) * others.unsqueeze(-1)
        return related.index_put((rows, objects), relations.amax(1).to(related.dtype))  # bfloat16 within autocast
