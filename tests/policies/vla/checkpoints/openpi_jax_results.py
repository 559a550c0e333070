"""Program of an interpreter with openpi, JAX and Orbax: its small pi0 and pi0.5, for a test.

python openpi_jax_results.py FOLDER: for each kind FOLDER/KIND gets checkpoints in all layouts that Orbax writes,
`released` as openpi publishes them and `training` by its own code. FOLDER/KIND.npz gets inputs, the first velocity and
a chunk of actions. openpi has no small sizes of all parts: those here replace its own.
"""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from openpi.models import gemma, model, pi0_config, siglip
from openpi.shared import normalize
from openpi.training import checkpoints, utils

LAYERS, HEADS, HEAD = 3, 4, 16
SCALES = {"bias": 0.2, "scale": 0.3, "pos_embedding": 0.3, "input_embedding": 0.5}
"""Deviations of random weights by the last part of their name; of others, one by the root of the inputs."""
HORIZON, COUNT = 6, 2
LENGTHS = 11, 7
"""Numbers of real tokens of the prompts."""


def use_small_sizes() -> None:
    """Let openpi build its own classes of small sizes, which all differ."""
    shared = {"depth": LAYERS, "num_heads": HEADS, "num_kv_heads": 1, "head_dim": HEAD}
    sizes = {"gemma_2b": (48, 80), "gemma_300m": (40, 56)}
    gemma.get_config = lambda name: gemma.Config(width=sizes[name][0], mlp_dim=sizes[name][1], **shared)
    gemma.PALIGEMMA_VOCAB_SIZE = 300
    vision = {"width": 36, "depth": 2, "mlp_dim": 52, "num_heads": 3, "patch_size": (14, 14)}
    siglip.decode_variant = lambda name: vision


def randomised(state: nnx.State, random: np.random.Generator) -> nnx.State:
    """Weights that all differ from their special initial values."""
    weights = state.flat_state()
    for path in sorted(weights, key=str):
        shape, name = weights[path].value.shape, path[-1]
        inputs = shape[-2] if len(shape) > 1 else 1
        offset = 1.0 if name == "scale" and "img" in path else 0.0
        values = offset + SCALES.get(name, inputs**-0.5) * random.standard_normal(shape)
        weights[path] = weights[path].replace(jax.numpy.asarray(values, "float32"))
    return nnx.State.from_flat_path(weights)


def write(folder: Path, state: nnx.State, graph: Any, random: np.random.Generator) -> None:
    """Write checkpoints of the weights in all layouts."""
    released = {"params": state.to_pure_dict()}
    for name, options in (
        ("released", {}),
        ("zarr", {"use_ocdbt": False}),
        ("zarr3", {"use_zarr3": True}),
        ("bfloat16", {}),
    ):
        item = jax.tree.map(lambda x: x.astype("bfloat16"), released) if name == "bfloat16" else released
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
            checkpointer.save(folder / name / "params", ocp.args.PyTreeSave(item))
    sizes = {"state": 5, "actions": 4}
    statistics = {
        name: normalize.NormStats(*(random.random(size) + offset for offset in (0, 1, -1, 1)))
        for name, size in sizes.items()
    }
    zero = jax.tree.map(lambda x: 0 * x, state)
    optimiser = optax.sgd(0.1)
    training = utils.TrainState(0, zero, graph, optimiser.init(0.0), optimiser, 0.9, state)  # published are averages
    data = SimpleNamespace(data_config=lambda: SimpleNamespace(norm_stats=statistics, asset_id="owner/robot"))
    manager, _ = checkpoints.initialize_checkpoint_dir(
        folder / "training", keep_period=None, overwrite=True, resume=False
    )
    checkpoints.save_state(manager, training, data, 1)
    manager.wait_until_finished()


def results(config: pi0_config.Pi0Config, folder: Path, random: np.random.Generator) -> dict[str, np.ndarray]:
    """Random inputs, and openpi's first velocity and chunk of them, by the weights in `folder`."""
    network = config.load(model.restore_params(folder / "released" / "params"))
    pictures = {name: random.uniform(-1, 1, (COUNT, 224, 224, 3)).astype("float32") for name in model.IMAGE_KEYS}
    inputs = {
        "state": random.standard_normal((COUNT, 32)).astype("float32"),
        "tokens": random.integers(3, 290, (COUNT, config.max_token_len)).astype("int32"),
        "real": np.arange(config.max_token_len) < np.array(LENGTHS)[:, None],
        "noise": random.standard_normal((COUNT, HORIZON, 32)).astype("float32"),
    }
    masks = {name: np.full(COUNT, name != "right_wrist_0_rgb") for name in pictures}
    observation = model.Observation(pictures, masks, inputs["state"], inputs["tokens"], inputs["real"])
    observation, noise = jax.tree.map(jax.numpy.asarray, (observation, inputs["noise"]))
    step, actions = (
        np.asarray(network.sample_actions(jax.random.key(0), observation, noise=noise, num_steps=steps))
        for steps in (1, 10)
    )
    return {**pictures, **inputs, "velocity": inputs["noise"] - step, "actions": actions}


def main(folder: Path) -> None:
    use_small_sizes()
    for kind in ("pi0", "pi05"):
        random = np.random.default_rng(0)
        config = pi0_config.Pi0Config(dtype="float32", pi05=kind == "pi05", action_horizon=HORIZON)
        graph, state = nnx.split(config.create(jax.random.key(0)))
        state = randomised(state, random)
        write(folder / kind, state, graph, random)
        np.savez(folder / f"{kind}.npz", **results(config, folder / kind, random))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
