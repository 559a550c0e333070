"""ACT: weights in LeRobot's layout against a plain computation, its loss by hand, learning, and what it refuses."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tensordict import TensorDict
from torch import Tensor
from transformers import ResNetConfig, ResNetModel

from embodied.algorithms.imitation.sft import SFTConfig
from embodied.algorithms.offline.iql import IQLConfig
from embodied.algorithms.on_policy.ppo import PPOConfig
from embodied.contract import Contract, TensorSpec
from embodied.data.episodes import Episodes
from embodied.errors import UserError
from embodied.evaluation.evaluation import evaluate
from policies.lerobot.act import ACTConfig, ACTPolicy
from policies.vision.resnet import FrozenBatchNorm, ResNet
from tests.embodied.reach import Reach
from tests.policies.lerobot import files
from tests.policies.lerobot.files import ACTIONS, CHUNK, ENVIRONMENT, HEADS, LATENT, PICTURE, STATE, WIDTH

SMALL = {"dim_model": 16, "n_heads": 2, "dim_feedforward": 32, "n_encoder_layers": 1, "n_vae_encoder_layers": 1}
SMALL |= {"latent_dim": 2, "hidden": 16}
CONTRACT = Contract(
    {
        "top": TensorSpec((*PICTURE, 3), "uint8", camera="top"),
        "wrist": TensorSpec((*PICTURE, 3), "uint8", camera="wrist"),
        "joints": TensorSpec((STATE - 1,)),
        "gripper": TensorSpec((1,)),
        "goal": TensorSpec((ENVIRONMENT,)),
        "mass": TensorSpec((1,), privileged=True),
    },
    TensorSpec((ACTIONS,), low=(-3.0,) * ACTIONS, high=(3.0,) * ACTIONS),
    control_dt_s=0.1,
    horizon=CHUNK - 1,
    executed=3,
)


def seen(count: int = 3) -> TensorDict:
    noise = files.generator(1)
    joints = torch.randn(count, STATE - 1, generator=noise)
    joints[:, 2] = files.statistics()["observation.state.min"][2]  # a constant element
    values = {
        name: torch.randint(256, (count, *PICTURE, 3), dtype=torch.uint8, generator=noise) for name in ("top", "wrist")
    }
    values |= {"joints": joints, "gripper": torch.randn(count, 1, generator=noise)}
    values |= {"goal": torch.randn(count, ENVIRONMENT, generator=noise), "mass": torch.rand(count, 1)}
    return TensorDict(values, [count])


def build(folder: Path, contract: Contract = CONTRACT, **settings: Any) -> ACTPolicy:
    return ACTConfig(**{"weights": str(folder), "hidden": 16} | settings).build(contract)


class Plain:
    """Actions of LeRobot's network, from the paper and in plain functions; pictures by transformers' ResNet."""

    def __init__(self, tensors: dict[str, Tensor], pre_norm: bool) -> None:
        self.given = {name.removeprefix("model."): value for name, value in tensors.items()}
        self.pre_norm = pre_norm

    def dense(self, name: str, x: Tensor) -> Tensor:
        return x @ self.given[f"{name}.weight"].flatten(1).T + self.given[f"{name}.bias"]

    def norm(self, name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, (WIDTH,), self.given[f"{name}.weight"], self.given[f"{name}.bias"])

    def attention(self, name: str, query: Tensor, key: Tensor, value: Tensor, masked: Tensor | None = None) -> Tensor:
        parts = zip(
            self.given[f"{name}.in_proj_weight"].chunk(3), self.given[f"{name}.in_proj_bias"].chunk(3), strict=True
        )
        q, k, v = (x @ weight.T + bias for x, (weight, bias) in zip((query, key, value), parts, strict=True))
        q, k, v = (x.unflatten(-1, (HEADS, -1)) for x in (q, k, v))
        score = torch.einsum("nqhd,nkhd->nhqk", q, k) / math.sqrt(WIDTH / HEADS)
        if masked is not None:
            score = score.masked_fill(masked[:, None, None], -torch.inf)
        return self.dense(f"{name}.out_proj", torch.einsum("nhqk,nkhd->nqhd", score.softmax(-1), v).flatten(-2))

    def encoder(self, name: str, depth: int, x: Tensor, place: Tensor, masked: Tensor | None = None) -> Tensor:
        for index in range(depth):
            layer = f"{name}.layers.{index}"
            y = self.norm(f"{layer}.norm1", x) if self.pre_norm else x
            x = x + self.attention(f"{layer}.self_attn", y + place, y + place, y, masked)
            x = x if self.pre_norm else self.norm(f"{layer}.norm1", x)
            y = self.norm(f"{layer}.norm2", x) if self.pre_norm else x
            x = x + self.dense(f"{layer}.linear2", self.dense(f"{layer}.linear1", y).relu())
            x = x if self.pre_norm else self.norm(f"{layer}.norm2", x)
        return self.norm(f"{name}.norm", x) if self.pre_norm else x

    def decoder(self, encoded: Tensor, place: Tensor) -> Tensor:
        layer, queries = "decoder.layers.0", self.given["decoder_pos_embed.weight"]
        pre = self.pre_norm
        x = torch.zeros(len(encoded), CHUNK, WIDTH)
        y = self.norm(f"{layer}.norm1", x) if pre else x
        x = x + self.attention(f"{layer}.self_attn", y + queries, y + queries, y)
        x = x if pre else self.norm(f"{layer}.norm1", x)
        y = self.norm(f"{layer}.norm2", x) if pre else x
        x = x + self.attention(f"{layer}.multihead_attn", y + queries, encoded + place, encoded)
        x = x if pre else self.norm(f"{layer}.norm2", x)
        y = self.norm(f"{layer}.norm3", x) if pre else x
        x = x + self.dense(f"{layer}.linear2", self.dense(f"{layer}.linear1", y).relu())
        return self.dense("action_head", self.norm("decoder.norm", x if pre else self.norm(f"{layer}.norm3", x)))

    def chunk(self, observation: TensorDict, latent: Tensor) -> Tensor:
        """Normalised chunk [N, CHUNK, A]."""
        tokens = [
            self.dense("encoder_latent_input_proj", latent),
            self.dense("encoder_robot_state_input_proj", robot_state(observation)),
            self.dense("encoder_env_state_input_proj", files.normalised(ENV, observation["goal"])),
        ]
        places = [*self.given["encoder_1d_feature_pos_embed.weight"]]
        for camera in files.CAMERAS:
            picture = observation[camera.split(".")[-1]].permute(0, 3, 1, 2) / 255.0
            patches = resnet(self.given, files.normalised(camera, picture))
            height, width = patches.shape[-2:]
            for row in range(height):
                for column in range(width):
                    tokens.append(self.dense("encoder_img_feat_input_proj", patches[:, :, row, column]))
                    angles = [2 * math.pi * (i + 1) / (n + 1e-6) for i, n in ((row, height), (column, width))]
                    places.append(files.sinusoids(torch.tensor(angles, dtype=torch.float64), WIDTH // 2).flatten())
        place = torch.stack(places)
        return self.decoder(self.encoder("encoder", 2, torch.stack(tokens, 1), place), place)

    def posterior(self, observation: TensorDict, target: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log-variance of the latent variable."""
        summary = self.given["vae_encoder_cls_embed.weight"].expand(len(target), -1).unsqueeze(1)
        state = self.dense("vae_encoder_robot_state_input_proj", robot_state(observation)).unsqueeze(1)
        x = torch.cat((summary, state, self.dense("vae_encoder_action_input_proj", target)), 1)
        masked = torch.cat((torch.zeros(len(target), 2, dtype=torch.bool), ~valid), 1)
        x = self.encoder("vae_encoder", 1, x, self.given["vae_encoder_pos_enc"], masked)[:, 0]
        mean, log_variance = self.dense("vae_encoder_latent_output_proj", x).split(LATENT, -1)
        return mean, log_variance


ENV = "observation.environment_state"


def robot_state(observation: TensorDict) -> Tensor:
    return files.normalised("observation.state", torch.cat((observation["joints"], observation["gripper"]), -1))


def resnet(tensors: dict[str, Tensor], pictures: Tensor) -> Tensor:
    """Feature map of transformers' ResNet-18 with the tensors backbone.*."""
    settings = ResNetConfig(embedding_size=64, hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2])
    settings.layer_type = "basic"
    model = ResNetModel(settings).eval()

    def renamed(name: str) -> str:
        for ours, theirs in (("conv1", "layer.0.convolution"), ("bn1", "layer.0.normalization")):
            name = name.replace(ours, theirs)
        for ours, theirs in (("conv2", "layer.1.convolution"), ("bn2", "layer.1.normalization")):
            name = name.replace(ours, theirs)
        name = name.replace("downsample.0", "shortcut.convolution").replace("downsample.1", "shortcut.normalization")
        if name.startswith("layer.0"):
            return "embedder.embedder." + name.removeprefix("layer.0.")
        stage, block, rest = name.removeprefix("layer").split(".", 2)
        return f"encoder.stages.{int(stage) - 1}.layers.{block}.{rest}"

    own = {renamed(name.removeprefix("backbone.")): t for name, t in tensors.items() if name.startswith("backbone.")}
    missing, unexpected = model.load_state_dict(own, strict=False)
    assert not unexpected
    assert all(name.endswith("num_batches_tracked") for name in missing)
    with torch.no_grad():
        return model(pictures).last_hidden_state


@pytest.mark.parametrize("pre_norm", [False, True])
def test_chunks_and_loss_are_those_of_a_plain_computation(tmp_path: Path, pre_norm: bool) -> None:
    tensors = files.act_tensors(pre_norm=pre_norm)
    folder = files.save(tmp_path / "act", files.act_config(pre_norm=pre_norm), tensors)
    plain, observation = Plain(tensors, pre_norm), seen()
    policy = build(folder, dropout=0.0)
    expected = files.unnormalised(plain.chunk(observation, torch.zeros(3, LATENT)))[:, : CHUNK - 1]
    chunks = policy.act(observation).actions
    torch.testing.assert_close(chunks, expected.clamp(-3.0, 3.0), atol=2e-5, rtol=1e-4)
    assert chunks.std(0).max() > 1e-3
    assert torch.equal(chunks[..., 1], files.statistics()["action.mean"][1].expand(3, CHUNK - 1))  # a constant
    # L = mean over valid actions of |a - a'| + 10 KL(q || N(0, 1)); one of the second row is valid, none of the third
    actions = torch.randn(3, CHUNK - 1, ACTIONS, generator=files.generator(3))
    valid = torch.ones(3, CHUNK - 1, dtype=torch.bool)
    valid[1, 1:] = False
    valid[2] = False
    std = files.statistics()["action.std"]
    target = (actions - files.statistics()["action.mean"]) / torch.where(std == 0.0, 1.0, std)
    padded, known = F.pad(target, (0, 0, 0, 1)), F.pad(valid, (0, 1))
    mean, log_variance = plain.posterior(observation, padded, known)
    torch.manual_seed(4)
    latent = mean + (log_variance / 2).exp() * torch.randn(3, LATENT)
    error = (plain.chunk(observation, latent)[:, : CHUNK - 1] - target).abs().mean(-1)
    normal = torch.distributions.Normal(0.0, 1.0)
    divergence = torch.distributions.kl_divergence(
        torch.distributions.Normal(mean, (log_variance / 2).exp()), normal
    ).sum(-1)
    assert divergence.min() > 0.01
    by_hand = (error[0].sum() + error[1, 0] + 10.0 * (5 * divergence[0] + divergence[1])) / 6.0
    torch.manual_seed(4)
    torch.testing.assert_close(policy.loss(observation, actions, valid), by_hand, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "modes",
    [
        {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MIN_MAX"},  # ENV: as it is
        {"VISUAL": "MIN_MAX", "STATE": "IDENTITY", "ENV": "QUANTILES", "ACTION": "QUANTILES"},
    ],
)
def test_each_feature_is_normalised_as_the_processor_says(tmp_path: Path, modes: dict[str, str]) -> None:
    policy = build(files.save(tmp_path / "act", files.act_config(), files.act_tensors(), modes))
    observation, modes = seen(), {"ENV": "IDENTITY"} | modes
    robot, environment = policy._states(observation)
    state = torch.cat((observation["joints"], observation["gripper"]), -1)
    torch.testing.assert_close(robot, files.normalised("observation.state", state, modes), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(environment, files.normalised(ENV, observation["goal"], modes), atol=1e-5, rtol=1e-5)
    for camera, read in zip(files.CAMERAS, policy._pictures(observation), strict=True):
        picture = observation[camera.split(".")[-1]].permute(0, 3, 1, 2) / 255.0
        torch.testing.assert_close(read, files.normalised(camera, picture, modes), atol=1e-5, rtol=1e-4)
    x = torch.randn(3, 2, ACTIONS, generator=files.generator(2)) / 2
    expected = files.unnormalised(x, modes).clamp(-3.0, 3.0)
    torch.testing.assert_close(policy.to_robot(x), expected, atol=1e-5, rtol=1e-5)


def test_statistics_of_earlier_releases_lie_beside_the_weights(tmp_path: Path) -> None:
    tensors = files.act_tensors()
    current = build(files.save(tmp_path / "new", files.act_config(), tensors))
    given = {}
    for name, value in files.statistics().items():
        feature, _, statistic = name.rpartition(".")
        part = "unnormalize_outputs" if feature == "action" else "normalize_inputs"
        given[f"{part}.buffer_{feature.replace('.', '_')}.{statistic}"] = value
    folder = files.save(tmp_path / "old", files.act_config(normalization_mapping=files.MODES), {**tensors, **given})
    for file in folder.glob("policy_*"):
        file.unlink()
    earlier = build(folder)
    for name, value in current.state_dict().items():
        if not name.startswith("critic."):
            assert torch.equal(earlier.state_dict()[name], value), name


def test_a_loaded_policy_is_trained_and_restored(tmp_path: Path) -> None:
    folder = files.save(tmp_path / "act", files.act_config(), files.act_tensors())
    policy, observation = build(folder), seen(6)
    statistics = {name: value.clone() for name, value in policy.named_buffers()}
    policy.fit(observation, torch.randn(6, ACTIONS))  # those of the file stay
    assert all(torch.equal(statistics[name], value) for name, value in policy.named_buffers())
    fresh = policy.with_new_weights()
    assert not torch.equal(fresh.network.action_head.weight, policy.network.action_head.weight)
    assert all(torch.equal(statistics[name], value) for name, value in fresh.named_buffers())
    same = build(folder)
    fresh.load_state_dict(policy.state_dict())
    same.load_state_dict(fresh.state_dict())
    first, second = (each.act(observation).actions for each in (policy, same))
    assert torch.equal(first, second)
    shown = Episodes.of(observation.exclude("mass"), torch.rand(6, ACTIONS))
    learner = SFTConfig(steps=8, batch=6, learning_rate=1e-3).build(policy, files.generator())

    def loss() -> float:
        torch.manual_seed(0)
        chunk = shown.actions[:5].expand(6, 5, -1)
        return float(learner.trained.loss(observation, chunk, torch.ones(6, 5)).detach())

    before = loss()
    learner.fit(shown, 8)
    assert loss() < before


def test_what_is_no_such_policy_is_refused_in_one_line(tmp_path: Path) -> None:
    tensors, folder = files.act_tensors(), tmp_path / "act"

    def refused(expected: str, contract: Contract = CONTRACT, *, at: Path = folder) -> None:
        with pytest.raises(UserError, match=expected) as raised:
            build(at, contract)
        assert "\n" not in str(raised.value)
        assert str(at) in str(raised.value)

    def saved(config: dict[str, Any] | None = None, weights: dict[str, Tensor] = tensors, **more: Any) -> None:
        files.save(folder, config or files.act_config(), weights, **more)

    saved()
    (folder / "config.json").unlink()
    refused("has no config.json")
    saved()
    (folder / "model.safetensors").unlink()
    refused("cannot read model.safetensors")
    saved()
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:1000])
    refused("cannot read model.safetensors")
    refused("is a file; expected the folder", at=folder / "config.json")
    saved(files.act_config(type="diffusion"))
    refused("it is of type diffusion, and not act")
    head = "model.action_head.weight"
    saved(weights={name: value for name, value in tensors.items() if name != head})
    refused("lacks the tensor action_head.weight")
    saved(weights={**tensors, head: torch.zeros(ACTIONS, WIDTH + 1)})
    refused(r"action_head.weight of another shape: expected \[4, 16\], got \[4, 17\]")
    saved(weights={**tensors, head: torch.full((ACTIONS, WIDTH), torch.nan)})
    refused("infinity or not a number in action_head.weight")
    saved(weights={**tensors, "model.second_head.weight": torch.zeros(1)})
    refused("has the tensor second_head.weight, which this network does not have")
    for option in ({"feedforward_activation": "gelu"}, {"vision_backbone": "resnet50"}, {"n_obs_steps": 2}):
        saved(files.act_config(**option))
        refused(f"has {next(iter(option))}={next(iter(option.values()))}")
    saved(values={name: value for name, value in files.statistics().items() if name != "observation.state.max"})
    refused(r"has no statistics observation.state.max for its normalisation MIN_MAX")
    saved(values=files.statistics() | {"action.std": torch.full((ACTIONS,), torch.inf)})
    refused("infinity or not a number in action.std")
    saved(modes=files.MODES | {"STATE": "MEDIAN"})
    refused("has the normalisation MEDIAN of observation.state")
    saved()
    processor = folder / "policy_preprocessor.json"
    content = json.loads(processor.read_text())
    content["steps"].insert(0, {"registry_name": "relative_actions_processor", "config": {}})
    processor.write_text(json.dumps(content))
    refused("has the step relative_actions_processor, which is not supported")
    saved()

    def task(**changes: Any) -> Contract:
        own = {key: spec for key, spec in (CONTRACT.observation | changes).items() if spec is not None}
        return Contract(own, CONTRACT.action, 0.1, horizon=3)

    refused("reads 5 elements of the robot's state and 3 of the environment's; the task has 5", task(goal=None))
    refused("has learned with wrist, top; the task has top: set task.images", task(wrist=None))
    large = TensorSpec((64, 64, 3), "uint8", camera="wrist")
    refused("pictures of 40 x 72 pixels, the task's wrist has 64 x 64: set task.image_size", task(wrist=large))
    one = TensorSpec((1,), low=(-1.0,), high=(1.0,))
    refused("has actions of 4 elements, the task of 1", Contract(CONTRACT.observation, one, 0.1, horizon=3))
    refused("predicts 6 actions, the task asks for 9", Contract(CONTRACT.observation, CONTRACT.action, 0.1, horizon=9))


def test_temporal_ensembles_are_left_out_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    build(files.save(tmp_path / "act", files.act_config(temporal_ensemble_coeff=0.01), files.act_tensors()))
    assert "averages of overlapping chunks (temporal_ensemble_coeff)" in caplog.text


def test_cameras_are_matched_by_name_and_else_by_order_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = files.save(tmp_path / "act", files.act_config(), files.act_tensors())
    assert build(folder).cameras == ["wrist", "top"]  # the checkpoint's order
    assert not caplog.records
    renamed = {"left": CONTRACT.observation["wrist"], "right": CONTRACT.observation["top"]}
    rest = {key: spec for key, spec in CONTRACT.observation.items() if not spec.is_picture}
    policy = build(folder, Contract(renamed | rest, CONTRACT.action, 0.1, horizon=3))
    assert policy.cameras == ["left", "right"]
    assert "has learned with wrist, top, and sees left, right" in caplog.text
    observation = seen()
    other = observation.rename_key_("wrist", "left").rename_key_("top", "right")
    torch.testing.assert_close(policy.act(other).actions, build(folder).act(seen()).actions[:, :3])


def test_a_backbone_of_torchvision_is_read(tmp_path: Path) -> None:
    tensors = files.Tensors("")
    tensors.resnet18("x")
    given = {name.removeprefix("x."): value for name, value in tensors.items()}
    extra = {"fc.weight": torch.zeros(2, 512), "bn1.num_batches_tracked": torch.tensor(3)}
    save_file({**given, **extra}, tmp_path / "resnet18.safetensors")
    torch.save({**given, **extra}, tmp_path / "resnet18.pth")
    for name in ("resnet18.safetensors", "resnet18.pth"):
        policy = ACTConfig(**SMALL, backbone_weights=str(tmp_path / name)).build(CONTRACT)
        assert all(torch.equal(policy.network.backbone.state_dict()[key], value) for key, value in given.items())
        assert torch.equal(policy.with_new_weights().network.backbone.conv1.weight, given["conv1.weight"])
    torch.save({"model": Path("somewhere")}, tmp_path / "code.pth")
    for name in ("code.pth", "nowhere.pth"):
        with pytest.raises(UserError, match=rf"^policy.backbone_weights=.*{name}"):
            ACTConfig(**SMALL, backbone_weights=str(tmp_path / name)).build(CONTRACT)
    with pytest.raises(UserError, match=r"lacks the tensor layer1\.2"):
        ResNet("resnet34", FrozenBatchNorm).adopt(str(tmp_path / "resnet18.pth"))


def reach_policy(seed: int = 0, **options: Any) -> ACTPolicy:
    torch.manual_seed(seed)
    return ACTConfig(**SMALL | options).build(Reach(1).contract)


def reach_episodes() -> Episodes:
    """Demonstrations of `Reach`: the point moves by at most 0.25 towards the origin."""
    episodes = []
    for start in torch.linspace(-0.8, 0.8, 41):
        positions, actions = [start], []
        for _ in range(4):
            actions.append((-positions[-1]).clamp(-0.25, 0.25))
            positions.append(positions[-1] + actions[-1])
        position = torch.stack(positions[:-1]).unsqueeze(1)
        observation = TensorDict({"position": position, "task": torch.zeros(4, 1)}, [4])
        episodes.append(Episodes.of(observation, torch.stack(actions).unsqueeze(1), reward=torch.ones(4)))
    return Episodes.join(episodes)


def success(policy: ACTPolicy) -> float:
    return float(evaluate(Reach(16), policy, starts_per_task=16).success.float().mean())


def test_it_learns_to_reach() -> None:
    policy, shown = reach_policy(), reach_episodes()
    policy.fit(*shown.by_weight())
    assert success(policy) < 0.5
    SFTConfig(steps=400, batch=64, learning_rate=1e-3).build(policy, files.generator()).fit(shown, 400)
    assert success(policy) == 1.0


def test_a_resumed_run_takes_the_same_steps() -> None:
    shown = reach_episodes()

    def learner(seed: int) -> Any:
        policy = reach_policy(seed)
        policy.fit(*shown.by_weight())
        return SFTConfig(steps=8, batch=16).build(policy, files.generator(seed))

    whole, other = learner(0), learner(1)
    whole.fit(shown, 4)
    state, noise = copy.deepcopy(whole.state_dict()), torch.get_rng_state()
    other.load_state_dict(state)
    whole.fit(shown, 4)
    torch.set_rng_state(noise)  # of dropout and of the latent variable; a run restores it
    other.fit(shown, 4)
    for name, value in whole.trained.state_dict().items():
        assert torch.equal(other.trained.state_dict()[name], value), name
        assert torch.equal(other.policy.state_dict()[name], whole.policy.state_dict()[name]), name


def test_it_imitates_with_weights_and_is_refused_where_a_likelihood_is_needed() -> None:
    policy, shown = reach_policy(), reach_episodes()
    policy.fit(*shown.by_weight())
    losses = IQLConfig(steps=10, batch=16).build(policy, files.generator()).fit(shown, 10)
    assert all(math.isfinite(value) for value in losses.values())
    with pytest.raises(UserError, match="expected a policy whose samples have a log-probability for algorithm=ppo"):
        PPOConfig().build(policy, None, Reach(2), files.generator())
    decision = policy.act(shown.observation[:2])
    assert decision.value is not None
    assert decision.log_prob_terms.isnan().all()  # unknown, not 0
    with pytest.raises(UserError, match="no likelihood"):
        policy.evaluate(shown.observation[:2], decision.sample)
    with pytest.raises(RuntimeError, match="no normalisation statistics"):
        reach_policy().act(shown.observation[:2])
    for wrong in ({"dim_model": 18, "n_heads": 4}, {"weights": "a", "backbone_weights": "b"}):
        with pytest.raises(UserError, match=r"policy\.(dim_model|weights)"):
            ACTConfig(**wrong)


def test_it_learns_from_pictures_where_a_light_is() -> None:
    """The action is the side of a bright square: nothing but the picture has it."""
    contract = Contract(
        {"camera": TensorSpec((32, 64, 3), "uint8", camera="camera")},
        TensorSpec((1,), low=(-1.0,), high=(1.0,)),
        control_dt_s=0.1,
    )
    torch.manual_seed(0)
    policy = ACTConfig(**SMALL | {"dim_model": 32}).build(contract)
    columns = torch.randint(0, 24, (64,), generator=files.generator()) + 32 * (torch.arange(64) % 2)
    pictures = torch.zeros(64, 32, 64, 3, dtype=torch.uint8)
    for picture, column in zip(pictures, columns.tolist(), strict=True):
        picture[12:20, column : column + 8] = 255
    actions = (torch.arange(64) % 2 * 1.6 - 0.8).unsqueeze(1)
    parts = [
        Episodes.of(TensorDict({"camera": picture[None]}, [1]), action[None])
        for picture, action in zip(pictures[:48], actions[:48], strict=True)
    ]
    shown = Episodes.join(parts)
    policy.fit(*shown.by_weight())
    SFTConfig(steps=30, batch=24, learning_rate=3e-4, average=0.9).build(policy, files.generator()).fit(shown, 30)
    found = policy.act(TensorDict({"camera": pictures[48:]}, [16])).actions[:, 0]
    assert (found - actions[48:]).abs().mean() < 0.2
