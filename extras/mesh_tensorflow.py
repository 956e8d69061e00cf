"""Read a checkpoint of Mesh TensorFlow, the first program for T5, without TensorFlow.

A checkpoint is a file model.ckpt-N.index, which says where each array is, and files
model.ckpt-N.data-* with the numbers. The index is a sorted table of LevelDB whose values
are protocol buffers (tensorflow/core/util/tensor_bundle). convert.py uses this file.
"""

import re
from pathlib import Path
from typing import Iterator

import ml_dtypes
import numpy as np

from configs import UserError
from extras.tfrecord import masked_crc

TYPES = {1: np.float32, 2: np.float64, 3: np.int32, 9: np.int64, 14: ml_dtypes.bfloat16}
# Turn "encoder/block_000/layer_000/SelfAttention/q" into a name of Hugging Face.
RENAMES = {
    "/(embedding|kernel|scale)$": "",
    "rms_norm": "layer_norm",
    "^(encoder|decoder)/(final_)?layer_norm": r"\1/final_layer_norm",
    r"(block|layer)_0*(\d+)": r"\1/\2",
    "decoder/logits": "lm_head",
    "/": ".",
}


def varint(data: bytes, at: int) -> tuple[int, int]:
    """Read an integer of 7 bits per byte. Returns the integer and the place after it."""
    number = shift = 0
    while data[at] & 128:
        number |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
    return number | data[at] << shift, at + 1


def parse(message: bytes) -> dict[int, list]:
    """Return {number of a field: its values} of a protocol buffer."""
    fields, at = {}, 0
    while at < len(message):
        key, at = varint(message, at)
        if key & 7 == 0:
            value, at = varint(message, at)
        else:  # Type 5 has four bytes. Type 2 is a text or another message.
            size, at = (4, at) if key & 7 == 5 else varint(message, at)
            value, at = message[at : at + size], at + size
        fields.setdefault(key >> 3, []).append(value)
    return fields


def block(table: bytes, handle: bytes, path: Path) -> Iterator[tuple[bytes, bytes]]:
    """Yield (key, value) of a block of the table, whose offset and size the handle has.

    A key omits the beginning that it shares with the key before it. After the entries
    come a list of offsets, the type (0: not compressed) and the checksum.
    """
    offset, at = varint(handle, 0)
    end = offset + varint(handle, at)[0]
    if masked_crc(table[offset : end + 1]) != table[end + 1 : end + 5] or table[end]:
        raise UserError(f"{path} is damaged, or compressed: copy it again.")
    key, at = b"", offset
    end -= 4 + 4 * int.from_bytes(table[end - 4 : end], "little")
    while at < end:
        shared, at = varint(table, at)
        own, at = varint(table, at)
        size, at = varint(table, at)
        key = key[:shared] + table[at : at + own]
        yield key, table[at + own : at + own + size]
        at += own + size


def read_tensors(prefix: Path) -> dict[str, np.ndarray]:
    """Read all arrays of a TensorFlow checkpoint, such as {"shared/embedding": ...}."""
    path = Path(f"{prefix}.index")
    table = path.read_bytes()
    footer = table[-48:]  # the handles of two blocks, of which the second is the index
    at = varint(footer, varint(footer, 0)[1])[1]
    handles = [handle for _, handle in block(table, footer[at:], path)]
    entries = [entry for handle in handles for entry in block(table, handle, path)]
    shards = parse(entries[0][1])[1][0]  # The first value is a header.
    arrays = {}
    for name, value in entries[1:]:
        entry = {field: values[0] for field, values in parse(value).items()}
        file = Path(f"{prefix}.data-{entry.get(3, 0):05}-of-{shards:05}")
        with file.open("rb") as data:
            data.seek(entry.get(4, 0))
            content = data.read(entry[5])
        if masked_crc(content) != entry[6] or 7 in entry or entry[1] not in TYPES:
            raise UserError(f"{file}: {name.decode()} is damaged, or not an array of T5.")
        shape = [parse(axis)[1][0] for axis in parse(entry.get(2, b"")).get(2, [])]
        arrays[name.decode()] = np.frombuffer(content, TYPES[entry[1]]).reshape(shape)
    return arrays


def read(prefix: Path) -> tuple[dict, dict, int]:
    """Return (parameters, slots of Adafactor, step), with the axes of T5X.

    The names are those of Hugging Face. slots: {name: {"v", "v_row" or "v_col": array}}.
    """
    arrays, params, slots = read_tensors(prefix), {}, {}
    step = int(arrays.pop("global_step"))
    for variable, array in arrays.items():
        variable, _, slot = variable.partition("_slot_")
        name = variable
        for pattern, replacement in RENAMES.items():
            name = re.sub(pattern, replacement, name)
        name = f"{name}.weight"
        if not slot:
            params[name] = array
            continue
        # v_row belongs to the shorter axis of a matrix in both programs. If both axes are
        # equal, it belongs to the second axis here, and to the first axis in T5X.
        shape = arrays[variable].shape
        row, column = ("v_col", "v_row") if shape[0] == shape[-1] else ("v_row", "v_col")
        slot = {"vr": row, "vc": column}.get(slot, slot)
        slots.setdefault(name, {})[slot] = array
    return params, slots, step
