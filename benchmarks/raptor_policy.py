"""RAPTOR's published policy as a program of its own interpreter: observations come in, actions go out, as raw float32.

It first writes the size of its memory (int32) and the memory of a new episode. Then, for each message of n (int32), n
observations of 22 and n memories, it writes n actions of 4 and the n next memories. The memory is the state of the
package's `reset` and `evaluate_step`; it is passed with every message, so that episodes may begin and end at any time.
"""

import sys

import numpy as np
from foundation_policy import Raptor

OBSERVED = 22


def main() -> None:
    """Answer until the input ends."""
    policy = Raptor()  # checks the policy against its published actions
    (recurrent,) = (layer for layer in policy.layers if hasattr(layer, "initial_hidden_state"))
    initial = np.asarray(recurrent.initial_hidden_state, np.float32)
    _write(np.array(len(initial), np.int32), initial)
    while header := sys.stdin.buffer.read(4):
        (count,) = np.frombuffer(header, np.int32)
        observation, recurrent.state = _read(count, OBSERVED), _read(count, len(initial))
        actions = policy.evaluate_step(observation)
        _write(actions, recurrent.state)


def _read(rows: int, columns: int) -> np.ndarray:
    return np.frombuffer(sys.stdin.buffer.read(4 * rows * columns), np.float32).reshape(rows, columns)


def _write(*arrays: np.ndarray) -> None:
    for array in arrays:
        kind = array.dtype if array.dtype == np.int32 else np.float32
        sys.stdout.buffer.write(np.ascontiguousarray(array, kind).tobytes())
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
