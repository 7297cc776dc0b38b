"""What wandb keeps of a run on the disk."""

import json
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path


def wandb_records(path: Path) -> Iterator:
    """The records of a .wandb file: 7 bytes, then LevelDB's log format. (wandb has no reader in Python any more.) After
    a part with a wrong checksum, as a full disk leaves it, the reader goes on in the next block, as LevelDB's does."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, record, position, block = path.read_bytes(), None, 7, 32768
    while position + 7 <= len(data):
        left = block - position % block
        checksum, length, kind = struct.unpack_from("<IHB", data, position)
        end = position + 7 + length
        if left < 7 or checksum != zlib.crc32(data[position + 6 : end]):  # of the kind and the data
            record = record if left < 7 else None  # no header fits into the rest of a block
            position += left
            continue
        if kind in (1, 2):  # whole, or the first part
            record = b""
        if record is not None:
            record += data[position + 7 : end]
        if record is not None and kind in (1, 4):  # whole, or the last part
            yield Record.FromString(record)
            record = None
        position = end


def wandb_id(folder: Path) -> str:
    """The id of a run, which is random."""
    found = (folder / "logs" / "wandb_id").read_text()
    assert re.fullmatch("[0-9a-f]{8}", found)
    return found


def values(items) -> dict:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
