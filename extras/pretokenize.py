r"""Tokenize the files of a source once, if training eats text faster than a host can.

    python -m extras.pretokenize --config small_c4 --data.vocab spiece.model \
        --data.source 'jsonl:c4/c4-{split}.*.json.gz' --output ids --shard 0/16
    python train.py --config small_c4 --data.vocab spiece.model \
        --data.source 'parquet:ids/{split}-*.parquet'

Sixteen machines run the first command, with --shard 0/16 to 15/16. Each file of the
source becomes a Parquet file of token ids without EOS, which fit no other vocabulary
than that of which OUTPUT has a copy.
"""

from dataclasses import dataclass
from functools import cache
from itertools import islice

import fsspec
import pyarrow
import pyarrow.parquet
from tqdm import tqdm

import configs
import data


@dataclass(frozen=True)
class Options(configs.Options):
    # Folder for the Parquet files.
    output: str = "ids"
    split: str = "train"
    # I/N: tokenize files I, I + N, I + 2N, ...
    shard: str = "0/1"


load_tokenizer = cache(data.load_tokenizer)


def open_files(options: Options) -> tuple[data.Task, list[data.File]]:
    task = data.find_task(options.cfg.data.task, options.cfg)
    files = data.source_files(task.source, options.split, options.cfg)
    train_files = data.source_files(task.source, "train", options.cfg)
    names, train_names = ([file.name for file in x] for x in (files, train_files))
    if options.split != "train" and names == train_names:
        raise configs.UserError(f"{task.source} has no split: training holds out a part.")
    return task, files


def tokenize_file(number: int, options: Options) -> None:
    """Write the ids of one file of the source to OUTPUT/SPLIT-NUMBER-of-ALL.parquet."""
    task, files = open_files(options)
    tokenizer = load_tokenizer(options.cfg, options.run_dir)
    is_pair = not task.objective
    names = ["inputs", "targets"] if is_pair else ["text"]
    schema = pyarrow.schema({name: pyarrow.list_(pyarrow.int32()) for name in names})
    path = f"{options.output}/{options.split}-{number:05}-of-{len(files):05}.parquet"
    records = data.read_documents([files[number]], task)
    system, path = fsspec.core.url_to_fs(path, auto_mkdir=True)
    # In a transaction, the file appears when it is complete, and not after an error.
    with system.transaction, system.open(path, "wb") as file:
        with pyarrow.parquet.ParquetWriter(file, schema) as writer:
            while part := list(islice(records, 1000)):
                documents = [document for found, *_ in part for document in found]
                ids = data.tokenize(documents, task, tokenizer)
                columns = (
                    [[pair[i] for pair in ids] for i in (0, 1)] if is_pair else [ids]
                )
                writer.write_table(pyarrow.table(dict(zip(names, columns)), schema))


def tokenize_shard(options: Options) -> None:
    shard, shards = map(int, options.shard.split("/"))
    if not 0 <= shard < shards:
        raise configs.UserError(f"--shard must be 0/{shards} to {shards - 1}/{shards}.")
    load_tokenizer(options.cfg, options.run_dir).save(options.output)
    for number in tqdm(range(shard, len(open_files(options)[1]), shards)):
        tokenize_file(number, options)


if __name__ == "__main__":
    tokenize_shard(configs.parse(Options))
