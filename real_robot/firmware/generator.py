"""Generates the C source of a network: calls of policy_kernels.h for its layers, and its constants."""

from __future__ import annotations

import math

from torch import nn

from embodied.errors import UserError
from embodied.export.network import GRU, SOFTENING, Network, Normalise, Reciprocal, TokenAttention, ToRange
from embodied.networks.products import Dense
from real_robot.firmware.constants import Constants, literal, whole_blocks
from real_robot.firmware.quantization import QuantizedLinear

EXPRESSIBLE = "Linear, Tanh, ReLU, LayerNorm, GRU, TokenAttention"


class Generator:
    """Writes the body of `infer`, layer by layer.

    Each layer reads the array `x` and writes the array `y`, then the names are swapped. `arrays` are all local arrays
    with their sizes, `middle` is the centre of the action's range.

    Raises:
        UserError: for a layer without a C kernel.
    """

    def __init__(self, network: Network) -> None:
        self.constants = Constants()
        self.lines: list[str] = []
        self.arrays: dict[str, int] = {}
        self.packed = 0
        self.middle = ""
        self.observed = "observation"
        self.x = "first"
        self.y = "second"
        self.width = network.inputs
        writers = {
            Normalise: self._normalise,
            nn.Linear: self._linear,
            Dense: self._linear,
            QuantizedLinear: self._linear,
            nn.Tanh: self._tanh,
            nn.ReLU: self._relu,
            nn.LayerNorm: self._layer_norm,
            GRU: self._gru,
            TokenAttention: self._attention,
            Reciprocal: self._reciprocal,
            ToRange: self._to_range,
        }
        for index, layer in enumerate(network.layers):
            if type(layer) not in writers:
                raise UserError(
                    f"target=c has no kernel for layer {index}, {type(layer).__name__}; expected {EXPRESSIBLE}; "
                    "other layers need target=onnx or target=torchscript"
                )
            writers[type(layer)](f"layer{index}", layer)

    @property
    def scratch_bytes(self) -> int:
        """Size of the local arrays of one inference."""
        return 4 * (sum(self.arrays.values()) + self.packed)

    def declarations(self) -> list[str]:
        """Declarations of the local arrays of `infer`."""
        lines = [f"float {name}[{size}];" for name, size in self.arrays.items()]
        return [*lines, f"uint32_t packed[{self.packed}];"] if self.packed else lines

    def _reciprocal(self, name: str, layer: Reciprocal) -> None:
        self._need(self.x, self.width)
        self._each(self.width, f"{self.x}[i] = observation[i];")
        for first, last in layer.spans:
            self.lines.append(f"policy_reciprocal_each(&{self.x}[{first}], {literal(SOFTENING)}, {last - first});")
        self.observed = self.x

    def _normalise(self, name: str, layer: Normalise) -> None:
        mean = self.constants.floats(f"{name}_mean", layer.mean)
        std = self.constants.floats(f"{name}_std", layer.std)
        self._need(self.x, self.width)
        self.lines.append(f"policy_normalise({self.observed}, {mean}, {std}, {self.x}, {self.width});")

    def _linear(self, name: str, layer: nn.Linear | QuantizedLinear) -> None:
        self._call_linear(name, layer, self.x, self.y)
        self.x, self.y, self.width = self.y, self.x, layer.out_features

    def _tanh(self, name: str, layer: nn.Tanh) -> None:
        self.lines.append(f"policy_tanh_each({self.x}, {self.width});")

    def _relu(self, name: str, layer: nn.ReLU) -> None:
        self.lines.append(f"policy_relu_each({self.x}, {self.width});")

    def _layer_norm(self, name: str, layer: nn.LayerNorm) -> None:
        if layer.normalized_shape != (self.width,) or layer.weight is None or layer.bias is None:
            raise UserError(f"target=c: expected LayerNorm({self.width}) with weight and bias, got {layer}")
        gain = self.constants.floats(f"{name}_gain", layer.weight)
        bias = self.constants.floats(f"{name}_bias", layer.bias)
        self.lines.append(f"policy_layer_norm({self.x}, {gain}, {bias}, {literal(layer.eps)}, {self.width});")

    def _gru(self, name: str, layer: GRU) -> None:
        self._call_linear(f"{name}_input", layer.input, self.x, "from_input")
        self._call_linear(f"{name}_memory", layer.hidden, "memory", "from_memory")
        self._need(self.y, layer.size)
        self.lines.append(f"policy_gru(from_input, from_memory, memory, next, {self.y}, {layer.size});")
        self.x, self.y, self.width = self.y, self.x, layer.size

    def _attention(self, name: str, layer: TokenAttention) -> None:
        # own = tanh(W_own columns); pooled = sum_j softmax_j(query . token_j / sqrt(width)) token_j over own and the
        # present tokens; y = LayerNorm(W_out pooled + own). The kernel accumulates the softmax token by token.
        width = layer.width
        x = self.x
        offset = 0
        for start, stop in layer.columns:
            self._each(stop - start, f"{self.y}[{offset} + i] = {x}[{start} + i];")
            offset += stop - start
        self._need(self.y, offset)
        self._call_linear(f"{name}_own", layer.own, self.y, "own")
        self.lines.append(f"policy_tanh_each(own, {width});")
        self._call_linear(f"{name}_query", layer.query, "own", "query")
        for array in ("token", "pooled"):
            self._need(array, width)
        attend = f"policy_attend(&attention, query, {{}}, pooled, {literal(1 / math.sqrt(width))}, {width});"
        self._each(width, "pooled[i] = 0.0f;")
        self.lines += ["policy_attention attention = {0.0f, 0.0f};", attend.format("own")]
        for index, (group, encoder) in enumerate(zip(layer.groups, layer.encoders, strict=True)):
            self.lines += [
                f"for (int row = 0; row < {group.count}; row++) {{",
                f"const float *const element = &{x}[{group.start} + {group.size} * row];",
            ]
            if group.present is not None:
                self.lines.append(f"if (element[{group.present}] < 0.5f) {{ continue; }}")
            self._call_linear(f"{name}_token{index}", encoder, "element", "token")
            self.lines += [f"policy_tanh_each(token, {width});", attend.format("token"), "}"]
        self.lines.append(f"policy_attended(&attention, pooled, {width});")
        self._call_linear(f"{name}_output", layer.output, "pooled", self.y)
        self._each(width, f"{self.y}[i] += own[i];")
        self.x, self.y, self.width = self.y, self.x, width
        self._layer_norm(f"{name}_norm", layer.norm)

    def _to_range(self, name: str, layer: ToRange) -> None:
        fields = [
            self.constants.floats(f"{name}_{field}", getattr(layer, field))
            for field in ("centre", "half_range", "low", "high")
        ]
        self.middle = fields[0]
        self.lines.append(f"policy_to_range({self.x}, {', '.join(fields)}, action, {self.width});")

    def _call_linear(self, name: str, layer: nn.Module, source: str, target: str) -> None:
        """Add a call that writes weight @ source + bias into `target`, whose rows are padded to whole blocks."""
        assert isinstance(layer, nn.Linear | QuantizedLinear)
        rows = whole_blocks(layer.out_features)
        self._need(target, rows)
        bias = self.constants.rows(f"{name}_bias", layer.bias)
        if isinstance(layer, nn.Linear):
            weight = self.constants.matrix(f"{name}_weight", layer.weight)
            call = f"policy_linear({source}, {weight}, {bias}, {target}, {layer.in_features}, {rows});"
        else:
            self.packed = max(self.packed, 2 * -(-layer.in_features // 4))
            weight = self.constants.integer_matrix(f"{name}_weight", layer.weight)
            scale = self.constants.rows(f"{name}_scale", layer.scale)
            peak = f"policy_peak({source}, {layer.in_features})" if layer.peak is None else literal(layer.peak)
            call = (
                f"policy_linear_int{8 * layer.weight.itemsize}({source}, packed, {weight}, {scale}, {bias}, {target}, "
                f"{layer.in_features}, {rows}, {literal(layer.limit)}, {peak});"
            )
        self.lines.append(call)

    def _each(self, count: int, statement: str) -> None:
        self.lines.append(f"for (int i = 0; i < {count}; i++) {{ {statement} }}")

    def _need(self, array: str, size: int) -> None:
        self.arrays[array] = max(self.arrays.get(array, 0), size)
