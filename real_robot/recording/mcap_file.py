"""Records of an MCAP file up to its end or to the first damage, with bounded memory.

Every length in the file is checked against the rest of the file and against `RECORD_BYTES` before memory is taken, and
every chunk against its checksum before its content is used. A record of a type that is not allowed at its place counts
as damage, so that a changed bit in the type of a record does not hide a chunk.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from embodied.extras import needs_extra

RECORD_BYTES = 256 << 20
"""Largest record and largest chunk, before and after decompression."""
MAGIC = b"\x89MCAP0\r\n"
PREFIX = struct.Struct("<BQ")
MESSAGE_INDEX = struct.Struct("<HI")


class DamagedError(Exception):
    """Raised if the file cannot be read beyond `offset`, in bytes."""

    def __init__(self, offset: int, reason: str) -> None:
        super().__init__(reason)
        self.offset = offset


def records(path: Path) -> Iterator[Any]:
    """Yield schemas, channels, messages and metadata, as `mcap.records`, in the order of the file.

    Raises:
        DamagedError: at the first record that is cut off or damaged, and if the record of the data's end is missing.
        OSError: if the file cannot be read.
    """
    with needs_extra("robot"):
        from mcap.opcode import Opcode
        from mcap.records import Channel, Chunk, Metadata, Schema

    kinds = {Opcode.SCHEMA: Schema, Opcode.CHANNEL: Channel, Opcode.METADATA: Metadata, Opcode.CHUNK: Chunk}
    size = path.stat().st_size
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise DamagedError(0, "it does not begin as an MCAP file")
        while True:
            offset = file.tell()
            try:
                opcode, length = PREFIX.unpack(file.read(PREFIX.size))
                if length > size - file.tell():
                    raise ValueError(f"it ends within a record of {length:,} bytes")
                if length > RECORD_BYTES:
                    raise ValueError(f"a record of {length:,} bytes, expected at most {RECORD_BYTES:,}")
                payload = file.read(length)
                if opcode == Opcode.DATA_END:
                    return
                if opcode in kinds:
                    record = _parsed(kinds[opcode], payload)
                    content = _chunk_records(record) if isinstance(record, Chunk) else [record]
                elif opcode == Opcode.MESSAGE:
                    content = [_message(payload)]
                else:
                    _check_skippable(opcode, payload, offset)
                    content = []
            except Exception as error:  # mcap and the decompressors raise many kinds for other bytes
                reason = "it ends early" if size - offset < PREFIX.size else f"{type(error).__name__}: {error}"
                raise DamagedError(offset, " ".join(reason.split())) from error
            yield from content


def _check_skippable(opcode: int, payload: bytes, offset: int) -> None:
    """Raise ValueError unless this record is allowed between chunks and its content is not needed."""
    from mcap.opcode import Opcode

    if opcode == Opcode.ATTACHMENT or (opcode == Opcode.HEADER and offset == len(MAGIC)):
        return
    if opcode != Opcode.MESSAGE_INDEX:
        raise ValueError(f"a record of type {opcode} among the data")
    _, entries = MESSAGE_INDEX.unpack_from(payload)
    if len(payload) != MESSAGE_INDEX.size + entries:
        raise ValueError("an index of messages of another length")


def _chunk_records(chunk: Any) -> list[Any]:  # noqa: ANN401 - mcap's
    """Records of a chunk, after checking all of them."""
    from mcap.opcode import Opcode
    from mcap.records import Channel, Schema

    data = _decompressed(chunk)
    if chunk.uncompressed_crc and zlib.crc32(data) != chunk.uncompressed_crc:
        raise ValueError("the checksum of a chunk does not match")
    content = []
    position = 0
    while position < len(data):
        opcode, length = PREFIX.unpack_from(data, position)
        position += PREFIX.size
        if length > len(data) - position:
            raise ValueError(f"a record of {length:,} bytes in a chunk of {len(data):,}")
        payload = data[position : position + length]
        position += length
        if opcode == Opcode.MESSAGE:
            content.append(_message(payload))
        elif opcode in (Opcode.SCHEMA, Opcode.CHANNEL):
            content.append(_parsed(Schema if opcode == Opcode.SCHEMA else Channel, payload))
        else:
            raise ValueError(f"a record of type {opcode} in a chunk")
    return content


def _decompressed(chunk: Any) -> bytes:  # noqa: ANN401 - mcap's
    """Content of a chunk; raise ValueError for other sizes than declared, and for unknown compressions."""
    import lz4.frame
    import zstandard

    size = chunk.uncompressed_size
    if size > RECORD_BYTES:
        raise ValueError(f"a chunk of {size:,} bytes, expected at most {RECORD_BYTES:,}")
    if chunk.compression == "zstd":
        if zstandard.frame_content_size(chunk.data) not in (-1, size):  # the decompressor allocates this size
            raise ValueError("a chunk of another size than its compressed data")
        data = zstandard.ZstdDecompressor().decompress(chunk.data, max_output_size=size)
    elif chunk.compression == "lz4":
        data = lz4.frame.LZ4FrameDecompressor().decompress(chunk.data, max_length=size)
    elif chunk.compression:
        raise ValueError(f"compression {chunk.compression!r}")
    else:
        data = chunk.data
    if len(data) != size:
        raise ValueError(f"a chunk of {len(data):,} bytes in place of {size:,}")
    return data


def _parsed(kind: Any, payload: bytes) -> Any:  # noqa: ANN401 - mcap's
    from mcap.data_stream import ReadDataStream

    stream = ReadDataStream(io.BytesIO(payload))
    record = kind.read(stream)
    if stream.count != len(payload):
        raise ValueError(f"a {kind.__name__} of another length")
    return record


def _message(payload: bytes) -> Any:  # noqa: ANN401 - mcap's
    from mcap.data_stream import ReadDataStream
    from mcap.records import Message

    return Message.read(ReadDataStream(io.BytesIO(payload)), len(payload))
