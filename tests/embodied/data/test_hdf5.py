"""HDF5 files are read in a child process: its memory is bounded, and it may crash."""

import h5py
import numpy as np
import pytest

from embodied.data import hdf5
from embodied.errors import UserError


def test_mutated_files_give_one_line_each(tmp_path):
    """Files of any bytes end in an error of one line or in arrays, never in a crash of this process."""
    path, rng = tmp_path / "a.hdf5", np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        file.create_group("data").attrs["env_args"] = '{"env_name": "Lift"}'
        for number in range(2):
            file.create_dataset(f"data/demo_{number}/states", data=rng.random((20, 9)), compression="gzip")
            file[f"data/demo_{number}/actions"] = rng.random((20, 7))
            file[f"data/demo_{number}"].attrs["model_file"] = "<mujoco/>"
    slices = [(f"data/demo_{number}/{name}", None, None) for number in range(2) for name in ("states", "actions")]
    whole = path.read_bytes()
    meta = np.nonzero(np.frombuffer(whole, np.uint8))[0]  # most zeros are unused
    failures = 0
    for _ in range(25):
        data = bytearray(whole)
        for place in rng.choice(meta, 8):
            data[place] = int(rng.integers(0, 256))
        path.write_bytes(data)
        try:
            hdf5.contents(path)
            list(hdf5.arrays(path, slices))
        except UserError as error:
            failures += 1
            assert "\n" not in str(error)  # noqa: PT017
    assert failures > 5


CRASHING = """
import os, signal, sys
from embodied.data import hdf5
if sys.argv[2] == "contents":
    os.kill(os.getpid(), signal.SIGSEGV)
hdf5._limit("arrays")
data = bytearray(3 << 30)
"""


@pytest.mark.parametrize(("part", "ending"), [("contents", "SIGSEGV"), ("arrays", "status 1")])
def test_a_child_that_crashes_or_takes_too_much_memory_is_an_error_of_one_line(tmp_path, monkeypatch, part, ending):
    crashing = tmp_path / "crashing.py"
    crashing.write_text(CRASHING)
    start = hdf5.subprocess.Popen

    def popen(command, **options):
        return start([command[0], str(crashing), *command[3:]], **options)

    monkeypatch.setattr(hdf5.subprocess, "Popen", popen)
    with pytest.raises(UserError, match=f"ended with {ending}: the file is damaged"):
        next(hdf5._frames(tmp_path / "a.hdf5", part))


def test_the_size_of_an_array_is_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(hdf5, "ARRAY_BYTES", 40)
    with h5py.File(tmp_path / "arrays.hdf5", "w") as file:
        file["ten"] = np.arange(10, dtype=np.float32)
        file["eleven"] = np.arange(11, dtype=np.float32)
        np.testing.assert_array_equal(hdf5._array(file, "ten", None, None), np.arange(10))
        np.testing.assert_array_equal(hdf5._array(file, "eleven", 2, 5), [2, 3, 4])
        with pytest.raises(ValueError, match="eleven: expected numbers that take at most 40 bytes"):
            hdf5._array(file, "eleven", 0, None)
