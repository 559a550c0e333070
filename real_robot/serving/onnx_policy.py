"""A policy exported with target=onnx, run by ONNX Runtime without its code or checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.errors import UserError
from embodied.export.chunk_network import ChunkInputs, check
from embodied.extras import needs_extra
from embodied.policy import MEMORY, Decision
from real_robot.firmware.record import exported_contract, read_record


class OnnxPolicy:
    """Reads policy.onnx, contract.json and export.json of `directory`; acts deterministically, on the CPU.

    It has `initial_memory` if the exported policy is recurrent.

    Raises:
        UserError: if the folder holds no such export, or one of its files is damaged.
    """

    def __init__(self, directory: str | Path) -> None:
        with needs_extra("robot"):
            import onnxruntime
        directory = Path(directory)
        record = read_record(directory, "onnx")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = (
            1  # small networks; a control loop shares the cores
        )
        self.contract = exported_contract(directory)
        try:
            self._session = onnxruntime.InferenceSession(
                str(directory / "policy.onnx"), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # ONNX Runtime's errors have no common base class
            reason = " ".join(str(error).split())
            raise UserError(
                f"ONNX Runtime cannot run {directory / 'policy.onnx'} ({reason}); use another version of it"
            ) from error
        chunks = record.get("chunks")
        self._inputs = ChunkInputs(self.contract, **chunks) if chunks else None
        if record["initial_memory"] is not None:
            self._initial = torch.tensor(record["initial_memory"])
            self.initial_memory = self._initial_memory

    def act(
        self, observation: TensorDict, *, deterministic: bool = True, generator: torch.Generator | None = None
    ) -> Decision:
        """Chunks [N, K, A] of the executed actions; pass `sample["memory"]` [N, M] with the next observation.

        Raises:
            ValueError: unless `deterministic`, because exports do not sample.
            UserError: for observations that do not fit the contract.
        """
        if not deterministic:
            raise ValueError("an exported policy acts deterministically; expected deterministic=True")
        feed = self._inputs.of(observation) if self._inputs else self._flat(observation)
        if remembers := hasattr(self, "initial_memory"):
            feed["memory"] = observation[MEMORY]
        arrays = {name: np.ascontiguousarray(value.numpy()) for name, value in feed.items()}
        actions, *memory = self._session.run(None, arrays)
        sample = {MEMORY: torch.from_numpy(memory[0])} if remembers else {}
        count = len(observation)
        chunks = torch.from_numpy(actions).view(count, self.contract.executed, -1)
        # exports have no scores: log-probabilities are NaN
        return Decision(chunks, TensorDict(sample, batch_size=[count]), torch.full((count, 1, 1), torch.nan))

    def _flat(self, observation: TensorDict) -> dict[str, Tensor]:
        check(self.contract.observation, observation)
        return {"observation": torch.cat([observation[key].flatten(1) for key in self.contract.observation], -1)}

    def _initial_memory(self, count: int) -> Tensor:
        """Memory [count, M] with which episodes begin."""
        return self._initial.expand(count, -1)
