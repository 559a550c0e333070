"""Exported C beside emlearn and CMSIS-NN on an emulated Cortex-M4: one network, the same flags, the same QEMU.

    pip install emlearn
    git clone https://github.com/ARM-software/CMSIS-NN
    python benchmarks/firmware_peers.py --cmsis-nn CMSIS-NN [--json benchmarks/results/firmware.json]

The network is that of the hover policy, 22-64-64-4 with tanh behind each layer, with random weights. Ours normalises
observations, refuses what is not finite and limits actions. emlearn has the normaliser within its first layer; it
computes floats only, because its networks of fixed point are unfinished. CMSIS-NN has 8 bits for weights and
activations, one scale a layer, and a table for tanh: these are the kernels that ExecuTorch's Cortex-M backend calls,
without its interpreter, since ExecuTorch's wheel has no runtime for a Cortex-M. Its scales cover the 1,000 inputs on
which all are compared, 2% of which are outliers of ten standard deviations, which costs accuracy; ours change with each
input. Cycles are estimated, see cortex_m4_cycles.py.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # also runs from a clone that is not installed

import torch  # noqa: E402
from tensordict import TensorDict  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from benchmarks.cortex_m4_cycles import cycles  # noqa: E402
from embodied.contract import Contract, TensorSpec  # noqa: E402
from embodied.errors import UserError  # noqa: E402
from embodied.export.network import Network, Normalise  # noqa: E402
from embodied.saving.files import complete_or_absent  # noqa: E402
from embodied.saving.versions import git_commit, versions  # noqa: E402
from policies.mlp import MLPConfig, MLPPolicy  # noqa: E402
from real_robot.firmware.exporting import Export, Target, Weights, export  # noqa: E402
from real_robot.firmware.samples import Samples  # noqa: E402
from real_robot.firmware.toolchain import CORES, C, build_for_core, call, find, run_image  # noqa: E402

INPUTS, OUTPUTS, SEED = 22, 4, 0
CORE = CORES["m4"]
FLAGS = ("-std=c99", "-O2", "-ffp-contract=off", *CORE.flags, "-ffunction-sections", "-fdata-sections", "-DSTEPS=50")
HEADER = f"""#define POLICY_INPUTS {INPUTS}
#define POLICY_OUTPUTS {OUTPUTS}
#define POLICY_OK 0
int policy_check(void);
void policy_reset(void);
int policy_act(const float observation[POLICY_INPUTS], float action[POLICY_OUTPUTS]);
"""
UNCHECKED = "int policy_check(void) { return 0; }\nvoid policy_reset(void) {}\n"


def make_policy() -> MLPPolicy:
    """An untrained hover policy whose units are busy."""
    torch.manual_seed(SEED)
    action = TensorSpec((OUTPUTS,), unit="1", low=(-1.0,) * OUTPUTS, high=(1.0,) * OUTPUTS)
    policy = MLPConfig(hidden=[64, 64]).build(Contract({"state": TensorSpec((INPUTS,), unit="1")}, action, 0.01))
    for parameter in policy.actor_parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    [layer for layer in policy.actor if isinstance(layer, nn.Linear)][-1].weight.data += 0.2 * torch.randn(OUTPUTS, 64)
    policy.fit(TensorDict({"state": torch.randn(1000, INPUTS)}, [1000]), torch.zeros(1, OUTPUTS))
    return policy


def emlearn_source(network: Network, directory: Path) -> Sequence[Path]:
    """Write emlearn's C of `network` into `directory`; returns the folders of its headers."""
    try:
        import emlearn
        from emlearn.net import c_generate_net_loadable
    except ImportError as error:
        raise UserError(f"emlearn is missing ({error}): pip install emlearn") from error
    layers = [(weight.T.numpy(), bias.numpy()) for weight, bias in _folded(network)]
    code = c_generate_net_loadable(["tanh"] * len(layers), *zip(*layers, strict=True), prefix="net")
    act = f"return net_regress(observation, {INPUTS}, action, {OUTPUTS});"
    (directory / "policy.c").write_text(_with_act(code, act))
    return [Path(emlearn.includedir)]


def cmsis_source(network: Network, samples: Samples, clone: Path | None, directory: Path) -> Sequence[Path]:
    """Write calls of CMSIS-NN's kernels into `directory`; returns the folders of its headers and sources."""
    kernels = ("FullyConnectedFunctions/arm_fully_connected_s8.c", "NNSupportFunctions/arm_nn_vec_mat_mult_t_s8.c")
    if clone is None or not all((clone / "Source" / kernel).is_file() for kernel in kernels):
        raise UserError(
            "CMSIS-NN is missing: git clone https://github.com/ARM-software/CMSIS-NN, then --cmsis-nn CMSIS-NN"
        )
    x = samples.inputs.flatten(0, 1)
    lines = ['#include "arm_nnfunctions.h"', "#include <stddef.h>"]
    body = ["int8_t x[64], y[64];"]
    scale = float(x.abs().max()) / 127
    body.append(
        f"for (int i = 0; i < {INPUTS}; i++) {{ const float v = observation[i] * {1 / scale:.9g}f; "
        "x[i] = (int8_t)(v > 127 ? 127 : v < -127 ? -127 : (int)(v + (v > 0 ? 0.5f : -0.5f))); }"
    )
    for index, (weight, bias) in enumerate(_folded(network)):
        rows, columns = weight.shape
        x = x @ weight.T + bias
        weight_scale, sum_scale = float(weight.abs().max()) / 127, float(x.abs().max()) / 127
        # y = sum * multiplier * 2^(shift - 31)
        fraction, shift = math.frexp(scale * weight_scale / sum_scale)
        whole_bias, whole = torch.round(bias / (scale * weight_scale)), torch.round(weight / weight_scale)
        table = torch.round(128 * torch.tanh(sum_scale * torch.arange(-128, 128))).clamp(-128, 127)
        lines += [
            _array(f"int8_t weight{index}", whole),
            _array(f"int32_t bias{index}", whole_bias),
            _array(f"int8_t tanh{index}", table),
            f"static const cmsis_nn_dims in{index} = {{1, 1, 1, {columns}}}, out{index} = {{1, 1, 1, {rows}}};",
            f"static const cmsis_nn_dims filter{index} = {{{columns}, 1, 1, {rows}}};",
        ]
        body += [
            f"const cmsis_nn_per_tensor_quant_params quant{index} = {{{round(fraction * 2**31)}, {shift}}};",
            f"arm_fully_connected_s8(&ctx, &params, &quant{index}, &in{index}, x, &filter{index}, weight{index}, "
            f"&out{index}, bias{index}, &out{index}, y);",
            f"for (int i = 0; i < {rows}; i++) {{ x[i] = tanh{index}[y[i] + 128]; }}",
        ]
        x, scale = torch.tanh(x), 1 / 128
    body.append(f"for (int i = 0; i < {OUTPUTS}; i++) {{ action[i] = (float)x[i] * (1.0f / 128.0f); }}\nreturn 0;")
    context = "const cmsis_nn_context ctx = {NULL, 0};\nconst cmsis_nn_fc_params params = {0, 0, 0, {-128, 127}};"
    (directory / "policy.c").write_text(_with_act("\n".join(lines), "\n".join([context, *body])))
    return [clone / "Include", *(clone / "Source" / kernel for kernel in kernels)]


def _folded(network: Network) -> Iterator[tuple[Tensor, Tensor]]:
    """Weight [O, I] and bias [O] of each linear layer, the normaliser within the first one."""
    normaliser = next(layer for layer in network.layers if isinstance(layer, Normalise))
    for index, layer in enumerate(layer for layer in network.layers if isinstance(layer, nn.Linear)):
        weight, bias = layer.weight.detach(), layer.bias.detach()
        if index == 0:
            # W (x - mean) / std + b
            weight = weight / normaliser.std
            bias = bias - weight @ normaliser.mean
        yield weight, bias


def _array(declaration: str, values: Tensor) -> str:
    return f"static const {declaration}[] = {{{', '.join(str(int(value)) for value in values.flatten())}}};"


def _with_act(code: str, act: str) -> str:
    function = f"int policy_act(const float observation[POLICY_INPUTS], float action[POLICY_OUTPUTS]) {{\n{act}\n}}\n"
    return f'#include "policy.h"\n{code}\n{UNCHECKED}{function}'


def build_ours(policy: MLPPolicy, weights: Weights, directory: Path, work: Path) -> Path:
    """Export `policy` into `directory` and build its image in `work`."""
    export(policy, Export(Target.c, weights), directory / "export")
    return build_for_core(directory / "export", CORE, work)


def build_peer(write: Callable[[Path], Sequence[Path]], directory: Path, work: Path) -> Path:
    """Build an image in `work` of the policy.c in `directory` that `write` creates.

    `write` returns folders of headers, and further sources.
    """
    compiler, parts = find("arm-none-eabi-gcc"), write(directory)
    (directory / "policy.h").write_text(HEADER)
    folders = [f"-I{part}" for part in (directory, *parts) if part.is_dir()]
    sources = [directory / "policy.c", *(part for part in parts if part.is_file())]
    for source in (*sources, C / "core.c"):
        call([compiler, *FLAGS, *folders, "-c", source, "-o", work / f"{source.stem}.part.o"], work)
    # one object with all that the network needs of the libraries, so that it counts as flash of the policy
    objects = [f"{source.stem}.part.o" for source in sources]
    keep = [f"-Wl,-u,{name}" for name in ("policy_act", "policy_check", "policy_reset")]
    roots = ["-Wl,--gc-sections", "-Wl,-e,policy_act", *keep]
    call([compiler, *CORE.flags, "-nostdlib", "-r", *roots, *objects, "-lm", "-lc", "-lgcc", "-o", "policy.o"], work)
    link = ["-nostdlib", "-Wl,--gc-sections", f"-Wl,-T,{C / 'core.ld'}"]
    call([compiler, *CORE.flags, *link, "core.part.o", "policy.o", "-lc", "-lgcc", "-o", "core.elf"], work)
    return work / "core.elf"


def measure(build: Callable[[Path, Path], Path], samples: Samples) -> dict[str, float]:
    """Figures of the image that `build(source, work)` returns: bytes, instructions, estimated cycles, largest error."""
    with tempfile.TemporaryDirectory() as source, tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        image = build(Path(source), work)
        result = run_image(image, CORE, samples.inputs, work)
        if result.check != 0:
            raise UserError(f"policy_check() returned {result.check}, expected 0")
        return {
            "flash_bytes": result.flash_bytes,
            "ram_bytes": result.ram_bytes,
            "stack_bytes": result.stack_bytes,
            "instructions": result.instructions,
            "cycles_estimate": cycles(image, samples.inputs, work),
            "max_error": samples.error(result.outputs, torch.ones(OUTPUTS)),
        }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all, print a table, and write the figures."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n\n")[0])
    parser.add_argument("--cmsis-nn", type=Path, help="folder of a clone of CMSIS-NN")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args(arguments)
    clone = options.cmsis_nn.resolve() if options.cmsis_nn else None
    policy = make_policy()
    with tempfile.TemporaryDirectory() as folder:
        export(policy, Export(Target.torchscript), Path(folder) / "export")
        samples = Samples.load(Path(folder) / "export")
    builds = {f"ours, {weights.value}": partial(build_ours, policy, weights) for weights in Weights}
    builds["emlearn, float32"] = partial(build_peer, partial(emlearn_source, policy.deployable()))
    builds["CMSIS-NN, int8"] = partial(build_peer, partial(cmsis_source, policy.deployable(), samples, clone))
    rows: dict[str, dict[str, float]] = {}
    print("| | flash B | RAM B | stack B | instructions | cycles, estimated | largest error |\n" + "|---" * 7 + "|")
    for name, build in builds.items():
        try:
            rows[name] = row = measure(build, samples)
        except UserError as error:
            sys.exit(f"error: {error}")
        cells = (f"{value:,}" if isinstance(value, int) else f"{value:.1e}" for value in row.values())
        print(f"| {name} | {' | '.join(cells)} |")
    if options.json:
        sources = {
            "emlearn": metadata.version("emlearn"),
            "CMSIS-NN": call(["git", "rev-parse", "HEAD"], clone).strip(),
        }
        compiler = call([find("arm-none-eabi-gcc"), "-dumpfullversion"], ROOT).strip()
        report = {"git_commit": git_commit(), "versions": versions() | sources | {"gcc": compiler}, "rows": rows}
        with complete_or_absent(options.json) as temporary:
            temporary.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
