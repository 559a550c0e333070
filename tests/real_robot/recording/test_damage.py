"""Damaged recordings: they are read up to the damage, which is reported; nothing crashes or takes much memory."""

import contextlib
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zstandard

from embodied.errors import UserError
from real_robot.recording import cdr, driven, lerobot_dataset
from real_robot.recording import recorder as recorder_module
from real_robot.recording.recorder import Recorder
from real_robot.recording.recording import Recording, Tick
from real_robot.recording.replay import replay
from real_robot.recording.viewing import summary
from real_robot.robots.robot import Reading
from real_robot.safety.safety import State, Verdict
from tests.real_robot.recording.test_recording import CONTRACT, reading, record, same
from tests.real_robot.recording.test_replay import fly, recurrent

PREFIX = struct.Struct("<BQ")
CHUNK = 6


def chunks(data: bytes) -> list[tuple[int, int]]:
    """Offset and length, prefix included, of every chunk."""
    places, offset = [], 8
    while offset < len(data) - 8:
        opcode, length = PREFIX.unpack_from(data, offset)
        if opcode == CHUNK:
            places.append((offset, PREFIX.size + length))
        offset += PREFIX.size + length
    return places


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "a.mcap"
    record(path, 233)
    return path.read_bytes()


def ticks(path: Path) -> list[Tick]:
    return [item for item in Recording(path) if isinstance(item, Tick)]


def test_a_tail_of_zeros_hides_nothing_before_it(tmp_path: Path, whole: bytes, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "a.mcap"
    places = chunks(whole)
    path.write_bytes(whole[: places[-1][0]] + bytes(100_000))
    recording = Recording(path)
    good = [item for item in recording if isinstance(item, Tick)]
    assert len(good) >= 233 - 50  # all but those of the last chunk, of a second
    assert all(
        same(tick.reading.observation["camera"], reading(i).observation["camera"]) for i, tick in enumerate(good)
    )
    assert not recording.complete
    assert f"the first {places[-1][0]:,} of {places[-1][0] + 100_000:,} bytes can be read" in recording.damage
    assert recording.damage in caplog.text
    assert recording.damage in summary(Recording(path))


def test_every_bit_of_a_recording_that_is_flipped_leaves_what_is_before_it(tmp_path: Path, whole: bytes):
    """Ticks are those that were recorded, and all from before the damaged chunk; only unread parts change nothing."""
    path, places = tmp_path / "a.mcap", chunks(whole)
    rng = np.random.default_rng(0)
    expected = [reading(index) for index in range(233)]
    for bit in rng.integers(8 * places[0][0], 8 * len(whole), 60).tolist():
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        recording = Recording(path)
        good = [item for item in recording if isinstance(item, Tick) and item.reading is not None]
        for tick, truth in zip(good, expected, strict=False):
            assert tick.reading is not None
            assert all(same(tick.reading.observation[key], value) for key, value in truth.observation.items())
        before = sum(offset + length <= bit // 8 for offset, length in places)
        assert len(good) >= before * 233 // len(places) - 50
        assert len(good) == 233 or recording.damage


def test_a_bit_in_the_type_of_a_record_does_not_hide_a_chunk(tmp_path: Path, whole: bytes):
    path = tmp_path / "a.mcap"
    offset, _ = chunks(whole)[1]
    for bit in range(8):
        data = bytearray(whole)
        data[offset] ^= 1 << bit
        path.write_bytes(data)
        recording = Recording(path)
        assert len([item for item in recording if isinstance(item, Tick)]) < 233
        assert recording.damage


def test_a_bit_in_the_contract_is_an_error(tmp_path: Path, whole: bytes):
    path = tmp_path / "a.mcap"
    data = bytearray(whole)
    place = whole.index(b'"control_dt_s"')
    data[place + whole[place:].index(b"0.02") + 3] ^= 4  # 0.06
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"contract in its first record is damaged: .*checksum"):
        Recording(path)


def test_a_dataset_and_a_replay_end_before_the_damage(tmp_path: Path):
    policy, path = recurrent(), tmp_path / "a.mcap"
    fly(path, policy, 3, sampled=False)
    complete = replay(Recording(path), policy)
    data = path.read_bytes()
    (tmp_path / "b.mcap").write_bytes(data[: chunks(data)[-1][0]] + bytes(5000))
    rest = replay(Recording(tmp_path / "b.mcap"), policy)
    assert 0 < rest.compared < complete.compared
    assert rest.exact
    assert lerobot_dataset.write([Recording(tmp_path / "b.mcap")], tmp_path / "data") >= 1


class Power:
    """Copies of a recording as a power failure would leave it: what was flushed to the disk."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lengths: list[int] = []
        sync = recorder_module.os.fsync

        def fsync(descriptor: int) -> None:
            sync(descriptor)
            self.lengths.append(recorder_module.os.fstat(descriptor).st_size)

        monkeypatch.setattr(recorder_module.os, "fsync", fsync)


def test_every_chunk_is_on_the_disk_when_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    power, path = Power(monkeypatch), tmp_path / "a.mcap"
    record(path, 233)
    data = path.read_bytes()
    ends = [offset + length for offset, length in chunks(data)]
    assert len(ends) > 3
    for end in ends[:-1]:  # the last one is written with the index
        assert any(end <= length < end + 4096 for length in power.lengths)
    assert power.lengths[-1] == len(data)
    (tmp_path / "b.mcap").write_bytes(data[: power.lengths[-2]])
    assert len(ticks(tmp_path / "b.mcap")) >= 233 - 50


def with_chunk(data: bytes, change: Callable[[bytearray], object]) -> bytes:
    """The recording with the content of its second chunk changed, and a checksum that fits."""
    offset, length = chunks(data)[1]
    body = data[offset + PREFIX.size : offset + length]
    start, end, _, _, name = struct.unpack_from("<QQQII", body)
    assert body[32 : 32 + name] == b"zstd"
    content = bytearray(zstandard.decompress(body[32 + name + 8 :]))
    change(content)
    packed = zstandard.compress(bytes(content))
    head = struct.pack("<QQQI", start, end, len(content), zlib.crc32(content))
    new = head + struct.pack("<I", 4) + b"zstd" + struct.pack("<Q", len(packed)) + packed
    return data[:offset] + PREFIX.pack(CHUNK, len(new)) + new + data[offset + length :]


def use(path: Path) -> None:
    """All that reads a recording."""
    policy = recurrent()
    for each in (
        lambda: summary(Recording(path)),
        lambda: list(driven.episodes(Recording(path))),
        lambda: replay(Recording(path), policy),
    ):
        with contextlib.suppress(UserError):
            each()


def test_mutated_recordings_give_one_line_each(tmp_path: Path):
    path = tmp_path / "a.mcap"
    fly(path, recurrent(), 3, sampled=True)
    data = path.read_bytes()
    rng = np.random.default_rng(1)

    def scramble(content: bytearray) -> None:
        for place in rng.integers(0, len(content), rng.integers(1, 6)):
            content[place] = int(rng.integers(0, 256))

    for number in range(120):
        if number % 2:
            mutated = with_chunk(data, scramble)
        else:
            mutated = bytearray(data)
            scramble(mutated)
            mutated = bytes(mutated[: rng.integers(1, len(mutated) + 1)] if number % 4 else mutated)
        path.write_bytes(mutated)
        use(path)


def bomb(size: int) -> bytes:
    """A chunk that decompresses to `size` zeros."""
    packer = zstandard.ZstdCompressor(level=19).compressobj(size=size)
    packed = b"".join(packer.compress(bytes(1 << 20)) for _ in range(size >> 20)) + packer.flush()
    head = struct.pack("<QQQI", 0, 0, size, 0) + struct.pack("<I", 4) + b"zstd" + struct.pack("<Q", len(packed))
    return PREFIX.pack(CHUNK, len(head) + len(packed)) + head + packed


READ = """
import resource, sys
from real_robot.recording.recording import Recording
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
recording = Recording(sys.argv[1])
items = len(list(recording))
print(items, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, recording.damage)
"""


def test_a_small_file_takes_little_memory(tmp_path: Path, whole: bytes):
    path = tmp_path / "a.mcap"
    offset, _ = chunks(whole)[1]
    path.write_bytes(whole[:offset] + bomb(2400 << 20) + whole[offset:])
    assert path.stat().st_size < 500_000
    run = subprocess.run([sys.executable, "-c", READ, str(path)], capture_output=True, text=True, check=True)
    items, kilobytes, damage = run.stdout.split(maxsplit=2)
    assert int(items) > 0
    assert int(kilobytes) < 100_000
    assert "a chunk of 2,516,582,400 bytes" in damage


def test_an_array_of_another_type_than_its_message_is_refused():
    data = cdr.encode_array(np.zeros(3, np.float32))
    message_type = cdr.array_type("float32", (3,))
    for dtype in ("U1000000000", "S9", "O", "float64", "nonsense"):
        with pytest.raises(UserError, match="cannot hold an array of"):
            cdr.decode_array(data, message_type, dtype)


def test_a_measurement_without_a_part_of_the_contract_is_named(tmp_path: Path):
    with Recorder(tmp_path / "a.mcap", CONTRACT) as recorder:
        for index in range(2):
            part = Reading({"position": np.zeros(3, np.float32)}, index / 50, index)
            recorder.write(index / 50, part, np.zeros(2), Verdict(State.ACTIVE, np.zeros(2)))
    with pytest.raises(UserError, match=r"camera is missing in the measurement at 0\.0 s"):
        list(driven.episodes(Recording(tmp_path / "a.mcap")))


def test_a_message_that_cannot_be_decoded_ends_the_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    record(tmp_path / "a.mcap", 3)
    decode = cdr.decode_array

    def decode_until(data: bytes, message_type: str, dtype: str) -> np.ndarray:
        if decoded:
            raise ValueError("no such array")
        decoded.append(1)
        return decode(data, message_type, dtype)

    decoded: list[int] = []
    monkeypatch.setattr(cdr, "decode_array", decode_until)
    recording = Recording(tmp_path / "a.mcap")
    assert len(list(recording)) < 3
    assert not recording.complete
    assert recording.damage.startswith("a message on /embodied/")
    assert recording.damage.endswith("is damaged: ValueError: no such array")
