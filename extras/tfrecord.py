"""Read tfrecord files without TensorFlow: datasets of TFDS and caches of SeqIO (P3).

Needs `pip install google-crc32c`. data.py uses this file for the sources seqio:DIR, and
tfds:NAME if the dataset is not stored as array_record.
"""

import json
from functools import partial

import fsspec
import numpy as np

from configs import UserError


def masked_crc(content: bytes) -> bytes:
    """The checksum of tfrecord files: CRC-32C, rotated by 15 bits, plus a constant."""
    import google_crc32c

    crc = google_crc32c.value(content)
    return (((crc >> 15 | crc << 17) + 0xA282EAD8) % (1 << 32)).to_bytes(4, "little")


def read_tfrecord(path: str, decode, count: int | None = None):
    """Yield decode(record) for each record of a file, which must have `count` records.

    A record is the size of its content (8 bytes), a checksum, the content, a checksum.
    """
    number = -1
    with fsspec.open(path) as file:
        for number, header in enumerate(iter(partial(file.read, 12), b"")):
            is_valid = masked_crc(header[:8]) == header[8:]
            content = file.read(int.from_bytes(header[:8], "little")) if is_valid else b""
            if not is_valid or masked_crc(content) != file.read(4):
                raise UserError(
                    f"{path}: record {number} is damaged. Copy the file again."
                )
            yield decode(content)
    if count not in (None, number + 1):
        raise UserError(f"{path} has {number + 1} of {count} records. Copy it again.")


# ---- TFDS ------------------------------------------------------------------------------


def decode_texts(value):
    """Decode all bytes in an example of TFDS as UTF-8."""
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, dict):
        return {key: decode_texts(inner) for key, inner in value.items()}
    if isinstance(value, list) or getattr(value, "dtype", None) == object:
        return [decode_texts(inner) for inner in value]
    return value


def tfds_files(folder: str, split: str) -> dict:
    """Return {path: function that yields examples} of a dataset with tfrecord files."""
    import tensorflow_datasets as tfds

    info = tfds.builder_from_directory(folder).info

    def decode(record):
        return decode_texts(info.features.deserialize_example_np(record))

    found = info.splits[split]
    return {
        str(path): partial(read_tfrecord, str(path), decode, count)
        for path, count in zip(found.filepaths, found.shard_lengths)
    }


# ---- SeqIO -----------------------------------------------------------------------------


def decode_seqio(features: dict, record: bytes) -> dict:
    """Convert a tf.Example to a dict of arrays, texts and single values (shape []).

    Where it has the text of the inputs or targets, this takes the place of their ids.
    """
    from tensorflow_datasets.proto import tf_example_generated_pb2

    example = {}
    stored = tf_example_generated_pb2.Example.FromString(record)
    for key, feature in stored.features.feature.items():
        values = [value.decode() for value in feature.bytes_list.value] or np.array(
            [*feature.int64_list.value, *feature.float_list.value]
        )
        if features.get(key, {}).get("shape") == []:
            (values,) = values
        example[key] = values
    for side in ("inputs", "targets"):  # The ids may be of another vocabulary.
        if f"{side}_pretokenized" in example:
            example[side] = example[f"{side}_pretokenized"]
    return example


def seqio_files(folders: str, split: str) -> dict:
    """Return {path: function that yields examples} of folders that match a pattern."""
    files, pattern = fsspec.core.url_to_fs(folders)
    readers = {}
    for path in sorted(files.glob(f"{pattern}/info.{split}.json")):
        folder, info = path.rpartition("/")[0], json.loads(files.cat_file(path))
        shards = sorted(files.glob(f"{folder}/{split}.tfrecord-*"))
        if len(shards) != info["num_shards"] or not files.exists(f"{folder}/COMPLETED"):
            raise UserError(
                f"{folder} is incomplete: it has {len(shards)} of {info['num_shards']} "
                f"files of {split}, or lacks the file COMPLETED. Copy it again."
            )
        decode = partial(decode_seqio, info["features"])
        for shard in map(files.unstrip_protocol, shards):
            readers[shard] = partial(read_tfrecord, shard, decode)
    return readers
