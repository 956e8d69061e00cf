"""Sources that are not files: the Hugging Face Hub, TFDS, caches of SeqIO, and toys."""

import json
import os
import re
from functools import partial

import configs
from data import SOURCES, File
from extras import toys


def open_hf(name: str, split: str, cfg: configs.Config) -> list[File]:
    """Open NAME or NAME:CONFIG of the hub, or a local folder. Only what is read is loaded."""
    import datasets

    path, _, config = name.partition(":")
    rows = datasets.load_dataset(path, config or None, streaming=True).get(split)
    count = rows.num_shards if rows else 0
    return [
        File(f"{name} {split} {i}", partial(rows.shard, count, i)) for i in range(count)
    ]


def open_tfds(name: str, split: str, cfg: configs.Config) -> list[File]:
    """Open a dataset of TFDS, such as glue/rte:1.0.0, without TensorFlow."""
    import tensorflow_datasets as tfds

    from extras import tfrecord

    home = cfg.data.tfds_dir or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
    folder = configs.to_path(os.path.expanduser(home)) / re.sub(":(?!//)", "/", name)
    found = [*folder.glob("dataset_info.json"), *folder.glob("*/dataset_info.json")]
    if not found:
        raise configs.UserError(
            f"{folder} has no TFDS dataset: set --data.tfds_dir, or another --data.source, "
            f"or run `tfds build {name} --file_format array_record`."
        )
    # Without a version in the name, the newest one: 1.10.0 is newer than 1.9.0.
    folders = [path.parent for path in found]
    folder = max(folders, key=lambda path: [*map(int, re.findall(r"\d+", path.name))])
    # TFDS imports the modules that this file names, which may be foreign code. Of equal
    # keys, each counts, and a feature can have the name "type".
    classes, keys = [], ("pythonClassName", "python_class_name", "type", "content")

    def collect(fields):
        classes.extend(x for key, x in fields if key in keys and isinstance(x, str))

    json.loads((folder / "features.json").read_text(), object_pairs_hook=collect)
    if not all(name.startswith("tensorflow_datasets.") for name in classes):
        raise configs.UserError(f"{folder}/features.json names other code: {classes}.")
    builder = tfds.builder_from_directory(folder)
    if split not in builder.info.splits:
        return []
    if builder.info.file_format.value != "array_record":
        return [File(*pair) for pair in tfrecord.tfds_files(str(folder), split).items()]
    rows = builder.as_data_source(split)

    def read():
        return map(tfrecord.decode_texts, rows)

    return [File(f"{folder} {split}", read, len(rows))]


def open_seqio(name: str, split: str, cfg: configs.Config) -> list[File]:
    """Open a folder, or a pattern of folders, with the cache of a task."""
    from extras import tfrecord

    return [File(*pair) for pair in tfrecord.seqio_files(name, split).items()]


def open_random(name: str, split: str, cfg: configs.Config) -> list[File]:
    """Open random documents of token ids, to measure the speed of training."""
    return [File("random:", partial(toys.random_documents, cfg))]


def open_numbers(name: str, split: str, cfg: configs.Config) -> list[File]:
    """Open the fields of all numbers below NAME, such as 10000."""
    numbers = range(int(name))
    return [File(f"numbers:{name}", lambda: map(toys.number_fields, numbers))]


SOURCES |= {
    "hf": open_hf,
    "tfds": open_tfds,
    "seqio": open_seqio,
    "random": open_random,
    "numbers": open_numbers,
}
