"""Published folders as starting points on LIBERO: evaluate.py gives the actions of their authors' evaluation.

The folders are of tiny random models in the layouts of LeRobot, openpi and OpenVLA-OFT. What stock LIBERO shows is made
from our own observations here: pictures upside down, MuJoCo's quaternion of the hand as it is.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import mujoco
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import evaluate
import train
from embodied.errors import UserError
from policies.vla.checkpoints import starting_points
from policies.vla.groot.policy import stretched
from policies.vla.model import untrained
from policies.vla.sizes import Size
from sims.libero.environment import LiberoEnvironment
from sims.libero.suite import load_tasks
from sims.libero.task import LiberoTask
from tests.policies.vla.checkpoints import openpi_jax_files
from tests.policies.vla.checkpoints.test_weights import changed, old, save
from tests.policies.vla.groot import files as groot_files
from tests.policies.vla.openvla import prismatic
from tests.policies.vla.smolvla import files as smolvla_files

TASK = load_tasks("libero_object", [6])
WORDS = {"pick": 3, "the": 4, "milk": 5, "open": 6}
STATE = torch.tensor([-0.1, 0.05, 0.9, 3.0, 0.1, -0.1, 0.03, -0.03]), torch.linspace(0.1, 0.8, 8)
ACTION = torch.linspace(-0.1, 0.1, 7), torch.linspace(0.05, 0.2, 7)
HORIZON, PIXELS = 4, 32
NOISE = torch.randn(1, HORIZON, 32, generator=torch.Generator().manual_seed(5))
"""Noise from which chunks are denoised, in place of noise that depends on the state's last bit."""
ON_LIBERO = {"observation.state": {"type": "STATE", "shape": [8]}}
ON_LIBERO |= {f"observation.images.{name}": {"type": "VISUAL", "shape": [3, 256, 256]} for name in ("image", "image2")}
LEROBOT = {"input_features": ON_LIBERO, "output_features": {"action": {"type": "ACTION", "shape": [7]}}}
ARGUMENTS = ["task=libero_pick", "task.tasks=['6']", "task.assets=stand-in", "task.step_limit=6", "threads=1"]
ARGUMENTS += ["episodes=1", "num_envs=1"]


@pytest.fixture(scope="module")
def stock() -> dict[str, np.ndarray]:
    """What stock LIBERO shows at the official start 0, after ten actions that only open the gripper."""
    env = LiberoEnvironment(
        TASK, 1, distribution="official", horizon=1, executed=1, assets="stand-in", threads=1, image_size=256
    )
    env.reset(starts=torch.zeros(1).long())
    for _ in range(5):  # after the five at the reset
        observation = env.step(torch.tensor([[[0.0] * 6 + [-1.0]]])).observation
    data = mujoco.MjData(env.scenes[0].model)
    data.qpos[:] = env.simulation.data[0].qpos
    mujoco.mj_kinematics(env.scenes[0].model, data)
    env.close()
    return {
        "agentview_image": observation["agentview_image"][0].numpy()[::-1],
        "robot0_eye_in_hand_image": observation["wrist_image"][0].numpy()[::-1],
        "robot0_eef_pos": data.site("gripper0_grip_site").xpos.copy(),
        "robot0_eef_quat": data.body("robot0_right_hand").xquat[[1, 2, 3, 0]].copy(),
        "robot0_gripper_qpos": np.array([data.joint(f"gripper0_finger_joint{side}").qpos[0] for side in (1, 2)]),
    }


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[torch.Tensor]:
    """Chunks that the environment executes; results go into a folder of the test."""
    chunks: list[torch.Tensor] = []
    step = LiberoEnvironment.step

    def watched(env: LiberoEnvironment, actions: torch.Tensor):
        chunks.append(actions.clone())
        return step(env, actions)

    monkeypatch.setattr(LiberoEnvironment, "step", watched)
    monkeypatch.setattr("policies.vla.pi0.fixed_noise", lambda rows, shape: NOISE.expand(len(rows), *shape))
    monkeypatch.chdir(tmp_path)
    return chunks


def state_of(stock: dict[str, np.ndarray]) -> torch.Tensor:
    """The published state [1, 8], by robosuite's formula."""
    x, y, z, w = stock["robot0_eef_quat"]
    turn = np.array([x, y, z]) * 2.0 * np.arccos(w) / np.sqrt(1.0 - w * w)
    return torch.tensor(np.concatenate((stock["robot0_eef_pos"], turn, stock["robot0_gripper_qpos"]))[None]).float()


def native() -> torch.nn.Module:
    torch.manual_seed(0)
    module = untrained(Size.TINY, HORIZON, 8, 7).native
    for weight in module.parameters():
        weight.data += 0.05 * torch.randn_like(weight)
    return module


def pi0(folder: Path, naming: str) -> Path:
    """A folder of pi0 on LIBERO as LeRobot or openpi publish it."""
    folder.mkdir()
    save(folder, naming)
    prefix = "model." if naming == "lerobot" else ""
    tensors = {prefix + old(name): value.contiguous() for name, value in native().state_dict().items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    pairs = (("observation.state", STATE), ("action", ACTION))
    if naming == "lerobot":
        changed(folder, "config.json", **LEROBOT, n_action_steps=3, num_inference_steps=2)
        statistics = {
            f"{key}.{name}": value for key, pair in pairs for name, value in zip(("mean", "std"), pair, strict=True)
        }
        save_file(statistics, folder / "policy_preprocessor_step_5_normalizer_processor.safetensors")
    else:
        changed(folder, "config.json", num_inference_steps=2)
        (folder / "assets" / "robot").rename(folder / "assets" / "libero")
        (folder / "assets" / "physical-intelligence").mkdir()
        (folder / "assets" / "libero").rename(folder / "assets" / "physical-intelligence" / "libero")
        lists = {
            name: {"mean": mean.tolist(), "std": std.tolist()}
            for name, (mean, std) in (("state", STATE), ("actions", ACTION))
        }
        path = folder / "assets" / "physical-intelligence" / "libero" / "norm_stats.json"
        path.write_text(json.dumps({"norm_stats": lists}))
    return folder


def pi0_of_jax(folder: Path) -> Path:
    """A folder of pi0 on LIBERO as openpi publishes it for JAX, with a configuration of short chunks."""
    pi0(folder, "openpi")
    (folder / "model.safetensors").unlink()
    openpi_jax_files.write(folder, openpi_jax_files.arrays_of(native(), "pi0"))
    (folder / "config.json").write_text(json.dumps({"action_horizon": HORIZON, "num_inference_steps": 2}))
    return folder


def chunk_of_pi0(stock: dict[str, np.ndarray], naming: str) -> torch.Tensor:
    """Actions [HORIZON, 7] of the published evaluation, by transformers' pi0 from everything at once."""
    pictures = []
    for camera in ("agentview_image", "robot0_eye_in_hand_image"):
        turned = stock[camera][::-1, ::-1].copy()
        if naming == "openpi":  # its client resizes by PIL
            resized = torch.from_numpy(np.array(Image.fromarray(turned).resize((PIXELS, PIXELS), Image.BILINEAR)))
            picture = resized.movedim(-1, 0).float() / 255.0
        else:
            whole = torch.from_numpy(turned).movedim(-1, 0)[None].float() / 255.0
            picture = torch.nn.functional.interpolate(whole, (PIXELS, PIXELS), mode="bilinear", align_corners=False)[0]
        pictures.append(2.0 * picture - 1.0)
    state = state_of(stock)
    tokens = [1, *(WORDS.get(word, 2) for word in TASK[0].language.split())]
    tokens += [0] * (48 - len(tokens))
    real = [int(token != 0) for token in tokens]
    model = native()
    count = (PIXELS // model.config.vlm_config.vision_config.patch_size) ** 2 * 2
    x = NOISE
    with torch.no_grad():
        for time in (1.0, 0.5):
            velocity = model(
                state=torch.nn.functional.pad((state - STATE[0]) / STATE[1], (0, 24)),
                noise=x,
                timestep=torch.full((1,), time),
                input_ids=torch.tensor([[model.config.vlm_config.image_token_id] * count + tokens]),
                attention_mask=torch.tensor([[1] * count + real]),
                pixel_values=torch.stack(pictures)[None],
                pixel_attention_mask=torch.ones(1, 2, dtype=torch.bool),
            ).logits
            x = x - 0.5 * velocity
    actions = x[0, :, :7] * ACTION[1] + ACTION[0]
    if naming == "openpi":  # pi0_libero has learned with extra_delta_transform
        actions[:, :6] += state[:, :6]
    return actions.clamp(-1.0, 1.0)


@pytest.mark.parametrize(("naming", "count"), [("lerobot", 3), ("openpi", 4), ("openpi_jax", 4)])
def test_pi0_is_evaluated_as_its_authors_do(
    tmp_path: Path, stock, executed: list[torch.Tensor], caplog: pytest.LogCaptureFixture, naming: str, count: int
) -> None:
    folder = pi0_of_jax(tmp_path / "weights") if naming == "openpi_jax" else pi0(tmp_path / "weights", naming)
    naming = naming.removesuffix("_jax")
    with caplog.at_level("INFO", "embodied"):
        evaluate.run([f"checkpoint={folder}", *ARGUMENTS])
    expected = chunk_of_pi0(stock, naming)
    assert (expected.abs() < 1.0).sum() > 7 * HORIZON // 2  # few at the limits
    tolerance = 1e-4 if naming == "lerobot" else 2e-3  # PIL rounds pixels to integers
    torch.testing.assert_close(executed[0][0], expected[:count], atol=tolerance, rtol=0.0)
    line = next(message for message in caplog.messages if "as its authors do" in message)
    evidence = "a state of 8 elements and image and image2" if naming == "lerobot" else "norm_stats.json is of the data"
    assert evidence in line
    assert "task.observations=published" in line
    record = json.loads(next(tmp_path.glob("outputs/libero_pick/*_published/evaluation.json")).read_text())
    assert record["checkpoint"] == str(folder)
    assert [each["distribution"] for each in record["evaluations"]] == ["official"]


def smolvla(folder: Path) -> Path:
    """A folder of SmolVLA on LIBERO as LeRobot publishes it."""
    smolvla_files.save(folder, **LEROBOT, n_action_steps=3, num_steps=2)
    pairs = (("observation.state", STATE), ("action", ACTION))
    values = {f"{key}.{name}": value for key, pair in pairs for name, value in zip(("mean", "std"), pair, strict=True)}
    save_file(values, folder / "policy_preprocessor_step_5_normalizer_processor.safetensors")
    return folder


def test_smolvla_is_evaluated_as_lerobot_does(
    tmp_path: Path, stock, executed: list[torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    folder = smolvla(tmp_path / "weights")
    with caplog.at_level("INFO", "embodied"):
        evaluate.run([f"checkpoint={folder}", *ARGUMENTS])
    pictures = []
    for camera in ("agentview_image", "robot0_eye_in_hand_image"):
        turned = torch.from_numpy(stock[camera][::-1, ::-1].copy()).movedim(-1, 0)[None].float() / 255.0
        scaled = torch.nn.functional.interpolate(turned, (PIXELS, PIXELS), mode="bilinear", align_corners=False)[0]
        pictures.append(2.0 * scaled - 1.0)
    state = torch.nn.functional.pad((state_of(stock) - STATE[0]) / STATE[1], (0, 24))[0]
    words = [*TASK[0].language.split()[:-1], TASK[0].language.split()[-1] + "\n"]
    tokens, x = [smolvla_files.WORDS.get(word, 1) for word in words], NOISE[0]
    for time in (1.0, 0.5):
        x = x - 0.5 * smolvla_files.velocity(smolvla_files.tensors(), torch.stack(pictures), tokens, state, x, time)
    expected = (x[:, :7] * ACTION[1] + ACTION[0]).clamp(-1.0, 1.0)
    assert (expected.abs() < 1.0).sum() > 7 * HORIZON // 2  # few at the limits
    torch.testing.assert_close(executed[0][0], expected[:3], atol=1e-4, rtol=0.0)
    line = next(message for message in caplog.messages if "as its authors do" in message)
    assert "smolvla as written by LeRobot" in line
    assert "a state of 8 elements and image and image2" in line


def groot(folder: Path) -> Path:
    """A folder of GR00T on LIBERO as LeRobot publishes it."""
    groot_files.save(folder, **LEROBOT, n_action_steps=3)
    pairs = (("observation.state", STATE), ("action", ACTION))
    values = {
        f"{key}.{name}": mean + sign * std for key, (mean, std) in pairs for name, sign in (("min", -1.0), ("max", 1.0))
    }
    save_file(values, folder / groot_files.PACKED)
    return folder


def test_groot_is_evaluated_as_lerobot_does(
    tmp_path: Path, stock, executed: list[torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    folder = groot(tmp_path / "weights")
    with caplog.at_level("INFO", "embodied"):
        evaluate.run([f"checkpoint={folder}", *ARGUMENTS])
    cameras = ("agentview_image", "robot0_eye_in_hand_image")
    turned = [torch.from_numpy(stock[camera][::-1, ::-1].copy())[None] for camera in cameras]
    model = groot_files.Plain(groot_files.tensors())
    pictures = torch.cat([stretched(picture, groot_files.SIDE) for picture in turned])
    features = model.features(pictures, groot_files.tokens(2, TASK[0].language))
    state = torch.nn.functional.pad((state_of(stock) - STATE[0]) / STATE[1], (0, groot_files.STATE_SIZE - 8))[0]
    x = NOISE[0]
    for time in (1.0, 2 / 3, 1 / 3):
        x = x - model.velocity(features, state, x, time) / 3
    expected = (x[:, :7] * ACTION[1] + ACTION[0]).clamp(-1.0, 1.0)
    assert (expected.abs() < 1.0).sum() > 7 * HORIZON // 2  # few at the limits
    torch.testing.assert_close(executed[0][0], expected[:3], atol=1e-3, rtol=0.0)
    assert "groot as written by LeRobot" in next(each for each in caplog.messages if "as its authors do" in each)


def test_options_that_are_set_win(tmp_path: Path) -> None:
    folder = pi0(tmp_path / "weights", "lerobot")
    options = [*ARGUMENTS[:2], "policy=pi0", "algorithm=ppo", f"policy.weights={folder}"]
    config, record = train.composed(options)
    assert config.task.observations.value == "published"
    assert (config.task.horizon, config.task.executed, config.task.image_size) == (HORIZON, 3, 256)
    assert record["values"]["task"]["observations"] == "PUBLISHED"
    ours, _ = train.composed([*options, "task.observations=native", "task.executed=2"])
    assert (ours.task.observations.value, ours.task.executed) == ("native", 2)
    changed(folder, "config.json", input_features=None)
    other, _ = train.composed(options)
    assert other.task.observations.value == "native"


def openvla(folder: Path, monkeypatch: pytest.MonkeyPatch, *, head: bool = False, proprio: bool = True) -> Path:
    """A folder of OpenVLA-OFT on two suites of LIBERO, which reads pictures of two cameras and the state.

    Without `proprio`: OpenVLA's, which reads one picture.
    """
    folder.mkdir()
    ranges = [(mean - 2.0 * std).tolist() for mean, std in (STATE, ACTION)]
    widths = [(mean + 2.0 * std).tolist() for mean, std in (STATE, ACTION)]
    monkeypatch.setattr(prismatic, "PROPRIO", {"q01": ranges[0], "q99": widths[0]})
    action = {"q01": [*ranges[1][:6], 0.0], "q99": [*widths[1][:6], 1.0], "mask": [True] * 6 + [False]}
    monkeypatch.setattr(prismatic, "ACTION", action)
    monkeypatch.setattr(prismatic, "ACTIONS", 7)
    monkeypatch.setattr(prismatic, "CHUNK", 8)
    prismatic.save(folder, head=head, proprio=proprio)
    if not proprio:
        (folder / "modeling_prismatic.py").write_text("class OpenVLAForActionPrediction: ...")
    other = {"action": action | {"q99": [9.0] * 7}, "proprio": {"q01": [0.0] * 8, "q99": [1.0] * 8}}
    own = {"action": action, "proprio": prismatic.PROPRIO}
    statistics = {"libero_10_no_noops": other, "libero_object_no_noops": own}
    (folder / "dataset_statistics.json").write_text(json.dumps(statistics))
    return folder


@pytest.mark.parametrize("head", [False, True])
def test_openvla_oft_is_evaluated_as_its_authors_do(
    tmp_path: Path, stock, executed: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch, head: bool
) -> None:
    folder = openvla(tmp_path / "weights", monkeypatch, head=head)
    count = 8 if head else 5
    evaluate.run([f"checkpoint={folder}", *ARGUMENTS, *([] if head else ["executed=5"])])
    pictures = [
        torch.from_numpy(prismatic.prepared(stock[camera][::-1, ::-1].copy())).float() / 255.0
        for camera in ("agentview_image", "robot0_eye_in_hand_image")
    ]
    hidden = prismatic.hidden(prismatic.weights(), pictures, prompt(), state_of(stock)[0].double().numpy())
    if head:
        normalised = prismatic.from_head(hidden)
    else:
        logits = prismatic.scores(prismatic.weights(), hidden)[:, prismatic.TOKENS - 256 : prismatic.TOKENS]
        normalised = prismatic.from_tokens(logits.argmax(-1).numpy() + prismatic.TOKENS - 256)
    expected = prismatic.to_robot(normalised).clip(-1.0, 1.0)
    assert executed[0].shape[1:] == (count, 7)
    assert set(expected[:, 6]) <= {-1.0, 1.0}
    np.testing.assert_allclose(executed[0][0].numpy(), expected[:count], atol=1e-3)


def test_openvla_is_evaluated_as_its_authors_do(
    tmp_path: Path, stock, executed: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Single actions from one picture, without a state, whose elements are written one after the other."""
    folder = openvla(tmp_path / "weights", monkeypatch, proprio=False)
    evaluate.run([f"checkpoint={folder}", *ARGUMENTS])
    picture = torch.from_numpy(prismatic.prepared(stock["agentview_image"][::-1, ::-1].copy())).float() / 255.0
    bins, _ = prismatic.written_bins(prismatic.weights(), [picture], prompt(), 7)
    normalised = prismatic.from_tokens(np.array(bins) + prismatic.TOKENS - 256)
    expected = prismatic.to_robot(normalised).clip(-1.0, 1.0)
    assert executed[0].shape[1:] == (1, 7)
    np.testing.assert_allclose(executed[0][0].numpy(), expected, atol=1e-3)


def prompt() -> list[int]:
    """Tokens of OpenVLA's prompt, without the beginning."""
    words = {word: number for number, word in enumerate(prismatic.WORDS)}
    text = f"In : What action should the robot take to {TASK[0].language} ? \n Out : ▁"
    return [words.get(word, 0) for word in text.split(" ")]


def refused(arguments: list[str]) -> str:
    with pytest.raises(UserError) as caught:
        evaluate.run(arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_weights_that_cannot_be_evaluated_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    folder = pi0(tmp_path / "weights", "lerobot")
    assert "checkpoint=weights names published weights: add a task, such as task=libero_goal" in refused(
        ["checkpoint=weights"]
    )
    assert "no checkpoint in lerobot/nothing" in refused(["checkpoint=lerobot/nothing"])
    assert "expected a folder or a name on the hub" in refused(["checkpoint=lerobot/nothing", *ARGUMENTS])
    assert "sim_to_real needs a run's checkpoint" in refused(
        ["checkpoint=weights", *ARGUMENTS, "sim_to_real=[simulator,bag]", "bag=a.mcap"]
    )
    assert "has no simulator for published weights" in refused(["checkpoint=weights", "task=dataset"])
    native = [f"checkpoint={folder}", *ARGUMENTS, "task.observations=native"]
    assert "has statistics of 8 and 7 elements of state and action, not of 19 and 7" in refused(native)
    changed(folder, "config.json", type="act")
    assert "config.json is of type act; expected pi0, pi05, smolvla, groot or openvla" in refused(
        [f"checkpoint={folder}", *ARGUMENTS]
    )
    (folder / "config.json").write_text("[")
    assert "cannot read config.json as that of published weights" in refused([f"checkpoint={folder}", *ARGUMENTS])
    assert not list(tmp_path.glob("outputs/libero_pick/*_published/*"))


def test_arrays_of_jax_are_published_weights_without_a_configuration(tmp_path: Path) -> None:
    folder = pi0_of_jax(tmp_path / "weights")
    (folder / "config.json").unlink()
    assert evaluate.published([f"checkpoint={folder}", *ARGUMENTS])
    start = starting_points.read(str(folder))
    assert start is not None
    assert (start.policy, start.program, start.benchmark) == ("pi0", "openpi", "libero")
    assert (start.horizon, start.executed, start.cameras) == (50, 5, 2)


def test_files_show_the_policy_the_data_and_the_chunks(tmp_path: Path) -> None:
    lerobot, openpi = pi0(tmp_path / "lerobot", "lerobot"), pi0(tmp_path / "openpi", "openpi")
    start = starting_points.read(str(openpi))
    assert start is not None
    assert (start.policy, start.program, start.benchmark) == ("pi0", "openpi", "libero")
    assert (start.horizon, start.executed, start.cameras) == (4, 4, 2)
    changed(openpi, "config.json", action_horizon=50, pi05=True)
    start = starting_points.read(str(openpi))
    assert start is not None
    assert (start.policy, start.horizon, start.executed) == ("pi05", 50, 5)  # openpi executes five
    (openpi / "assets" / "physical-intelligence" / "libero").rename(
        openpi / "assets" / "physical-intelligence" / "droid"
    )
    start = starting_points.read(str(openpi))
    assert start is not None
    assert start.benchmark is None
    empty = {"observation.images.empty_camera_0": {"type": "VISUAL", "shape": [3, 224, 224]}}
    for features, benchmark in (
        (ON_LIBERO | empty, "libero"),
        (ON_LIBERO | {"observation.state": {"type": "STATE", "shape": [7]}}, None),
        (ON_LIBERO | {"observation.images.left": {"type": "VISUAL", "shape": [3, 224, 224]}}, None),
    ):
        changed(lerobot, "config.json", input_features=features)
        start = starting_points.read(str(lerobot))
        assert start is not None
        assert start.benchmark == benchmark
    one = {key: feature for key, feature in ON_LIBERO.items() if not key.endswith("image2")}
    changed(lerobot, "config.json", input_features=one)
    start = starting_points.read(str(lerobot))
    assert start is not None
    assert (start.benchmark, start.cameras) == ("libero", 1)


def test_spatial_has_lerobot_s_step_limit(tmp_path: Path) -> None:
    folder = pi0(tmp_path / "weights", "lerobot")
    start = starting_points.read(str(folder))
    assert start is not None
    assert "task.step_limit=280" in LiberoTask(suite="libero_spatial").published_options(start)
    assert "task.step_limit=280" not in LiberoTask(suite="libero_goal").published_options(start)
    other = replace(start, program="openpi", data_sets=("libero_10", "libero_goal_no_noops"))
    assert "policy.unnorm_key=libero_goal_no_noops" in LiberoTask(suite="libero_goal").published_options(other)
    assert LiberoTask().published_options(replace(start, benchmark=None)) == []


def test_the_starting_point_of_nvidias_weights_has_the_chunk_of_the_base(tmp_path: Path) -> None:
    start = starting_points.read(str(groot_files.save_base(tmp_path, weights=False)))
    assert (start.policy, start.program, start.horizon, start.executed) == ("groot", "NVIDIA", 4, 4)


@pytest.mark.parametrize("kind", ["smolvla", "openvla"])
def test_the_starting_point_of_a_name_on_the_hub_is_read_without_its_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    fetched: list[str] = []

    def snapshot(name: str, allow_patterns: list[str]) -> str:
        fetched.extend(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    (tmp_path / "config.json").write_text(json.dumps({"type": kind, "model_type": kind, **LEROBOT}))
    assert starting_points.read("somebody/weights").policy == {"openvla": "tokens"}.get(kind, kind)
    assert "*.json" in fetched
    assert not [each for each in fetched if "safetensors" in each or each == "*.pt"]
