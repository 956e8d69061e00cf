"""What a training example is: text -> tokens -> spans or pairs -> rows -> the batch of a step.

    python data.py --show 3                     three real rows as the model sees them
    python data.py --config small_c4 --prepare  write the token files and stop

NumPy only, never jax. Everything random here is a pure function of (seed, epoch, row): the batch
of a step needs no state, so a run resumes by its step alone and any process can make any row.
"""

import ast
import collections
import datetime
import functools
import glob
import gzip
import hashlib
import io
import itertools
import json
import math
import os
import re
import sys
import sysconfig
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Callable, NamedTuple

import numpy as np
import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tqdm import tqdm

import configs
from configs import UserError

PAD, EOS, UNK = 0, 1, 2
SENTINELS = 100  # <extra_id_0> ... <extra_id_99>


class Batch(NamedTuple):
    """One batch, int32. Segment 0 is padding; packed examples of a row count from 1.

    inputs, input_segments: [B, S]; decoder_inputs, targets, target_segments: [B, T]. The decoder's
    inputs are the targets moved right by one, with the start token 0 at each segment's beginning.
    """

    inputs: np.ndarray
    input_segments: np.ndarray
    decoder_inputs: np.ndarray
    targets: np.ndarray
    target_segments: np.ndarray


# ---- random numbers without state ----------------------------------------------------------------


def random_bits(*key):
    """64 random bits for each element of the broadcast integers `key`, a pure function of them.

    SplitMix64's finalizer (Steele, Lea and Flood 2014), applied once for each part of the key.
    """
    bits = np.zeros((), np.uint64)
    with np.errstate(over="ignore"):  # multiplication modulo 2^64 is meant
        for part in key:
            bits = (bits + np.uint64(0x9E3779B97F4A7C15)) ^ np.asarray(part).astype(np.uint64)
            bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            bits = bits ^ (bits >> np.uint64(31))
    return bits


def permute(index, size, *key):
    """Where `index` lands in a random permutation of range(size), without storing the permutation.

    index: integers in [0, size), any shape; key: integers, or arrays of that shape. A Feistel
    network permutes the next power of four; whoever lands outside range(size) walks on from there.
    """
    half = np.uint64(max(1, (size - 1).bit_length() + 1 >> 1))  # bits of one half of a number
    low = np.uint64((1 << int(half)) - 1)
    *key, out = np.broadcast_arrays(*key, np.asarray(index).astype(np.uint64))
    key, out = [part.ravel() for part in key], out.flatten()
    outside = np.arange(out.size)
    while outside.size:
        left, right = out[outside] >> half, out[outside] & low
        for turn in range(4):
            left, right = right, left ^ (random_bits(*key, turn, right) & low)
        out[outside] = left << half | right
        walks = out[outside] >= size
        outside, key = outside[walks], [part[walks] for part in key]
    return out.astype(np.int64).reshape(np.shape(index))


# ---- vocabulary ----------------------------------------------------------------------------------


class Tokenizer:
    """Text <-> ids by a SentencePiece model: 0 pad, 1 EOS, 2 unknown, sentinels on top.

    <extra_id_0> has the highest id, `size - 1`, as in T5. A model file without these pieces gets
    them here, in memory; `serialized` is the file as it was, which is what a run directory keeps.
    """

    def __init__(self, serialized, name="the vocabulary"):
        model = sentencepiece_model_pb2.ModelProto()
        try:
            model.ParseFromString(serialized)
        except Exception as error:  # protobuf's DecodeError, whose place differs between versions
            raise UserError(f"{name} is not a SentencePiece model ({error}).") from error
        special = [piece.piece for piece in model.pieces[:3]]
        if special != ["<pad>", "</s>", "<unk>"]:
            raise UserError(
                f"{name} begins with the pieces {special}, but T5 needs <pad>, </s>, <unk> as ids "
                f"0, 1 and 2: train it with pad_id=0, eos_id=1, unk_id=2, bos_id=-1."
            )
        if model.pieces[-1].piece not in ("▁<extra_id_0>", "<extra_id_0>"):
            for k in reversed(range(SENTINELS)):
                piece = sentencepiece_model_pb2.ModelProto.SentencePiece
                model.pieces.add(piece=f"▁<extra_id_{k}>", score=0.0, type=piece.USER_DEFINED)
        self.serialized = serialized
        self.sha256 = hashlib.sha256(serialized).hexdigest()
        self.size, self.sentinels = len(model.pieces), SENTINELS
        self.processor = sentencepiece.SentencePieceProcessor(
            model_proto=model.SerializeToString(), num_threads=os.cpu_count()
        )

    def encode(self, text):
        """Text -> list of ids, without EOS. "<extra_id_0>" after a space is the sentinel."""
        return self.processor.encode(text)

    def encode_batch(self, texts):
        """Texts -> list of int32 arrays, on all cores."""
        return self.processor.encode(list(texts), return_type="numpy")

    def pieces(self, ids):
        """Ids below `size` -> text as it is, unknown pieces and sentinels included."""
        return "".join(map(self.processor.id_to_piece, ids)).replace("\u2581", " ")

    def decode(self, ids):
        """Ids -> text, up to the first EOS; padding is left out, unused rows are unknown."""
        ids = [int(i) if i < self.size else UNK for i in ids]
        end = ids.index(EOS) if EOS in ids else None
        return self.processor.decode([i for i in ids[:end] if i != PAD])


class ByteTokenizer(Tokenizer):
    """Text <-> its UTF-8 bytes, byte b as id b + 3 (ByT5, Xue et al. 2022).

    Without extra ids the sentinels are the ids of the highest bytes, as in the published ByT5.
    """

    def __init__(self, extra_ids=0):
        self.serialized = f"bytes:{extra_ids}\n".encode()
        self.sha256 = hashlib.sha256(self.serialized).hexdigest()
        self.size = 3 + 256 + extra_ids
        self.sentinels = extra_ids or 11  # which are surely none of the text: no UTF-8 has them

    def encode(self, text):
        pieces = re.split(r"<extra_id_(\d\d?)>", text)
        for k in range(1, len(pieces), 2):
            pieces[k] = [self.size - 1 - int(pieces[k])]
        pieces[::2] = [[byte + 3 for byte in piece.encode()] for piece in pieces[::2]]
        return list(itertools.chain.from_iterable(pieces))

    def encode_batch(self, texts):
        return [np.array(self.encode(text), np.int32) if "<extra_id_" in text else
                np.frombuffer(text.encode(), np.uint8) + np.int32(3) for text in texts]

    def pieces(self, ids):
        text = b"".join(
            bytes([i - 3]) if 3 <= i < 3 + 256 else
            (b"<pad>", b"</s>", b"<unk>")[i] if i < 3 else b"<extra_id_%d>" % (self.size - 1 - i)
            for i in map(int, ids))
        return text.decode(errors="replace")

    def decode(self, ids):
        """Ids -> text, up to the first EOS; what is no byte, or no UTF-8, is left out."""
        ids = list(map(int, ids))
        ids = ids[: ids.index(EOS)] if EOS in ids else ids
        return bytes(i - 3 for i in ids if 3 <= i < 3 + 256).decode(errors="ignore")


class IdTokenizer(Tokenizer):
    """No text at all but ids below `size`, shown as numbers between spaces; no sentinels."""

    def __init__(self, size):
        self.serialized = f"ids:{size}\n".encode()
        self.sha256 = hashlib.sha256(self.serialized).hexdigest()
        self.size, self.sentinels = size, 0

    def encode(self, text):
        return [int(word) if word.isdecimal() and int(word) < self.size else UNK
                for word in text.split()]

    def encode_batch(self, texts):
        return [np.array(self.encode(text), np.int32) for text in texts]

    def pieces(self, ids):
        return "".join(f" {i}" for i in ids)

    def decode(self, ids):
        """Ids -> text, up to the first EOS; padding is left out."""
        return " ".join(str(i) for i in itertools.takewhile(lambda i: i != EOS, ids) if i != PAD)


# a mixture's hundreds of tasks share one
parse_vocabulary = functools.lru_cache(maxsize=4)(Tokenizer)


def load_tokenizer(path):
    """Path of a SentencePiece model, local or remote, bytes[:EXTRA] or ids:SIZE -> Tokenizer."""
    path = str(path)
    try:
        if re.fullmatch(r"bytes(:\d+)?|ids:\d+", path):
            serialized = path.encode()
        else:
            with open_file(path) as file:
                serialized = file.read()
    except OSError as error:
        raise UserError(
            f"No vocabulary at {path} ({error.strerror or error}): give --data.vocab the path of a "
            f"SentencePiece model, or train one on the source with --data.vocab train:32000."
        ) from error
    if found := re.fullmatch(rb"(bytes|ids):?(\d*)\s*", serialized):
        return (ByteTokenizer if found[1] == b"bytes" else IdTokenizer)(int(found[2] or 0))
    return parse_vocabulary(serialized, path)


def train_tokenizer(texts, pieces, most_lines=1_000_000):
    """Train a unigram vocabulary of `pieces` pieces, sentinels not counted, on texts.

    Of a large source the first `most_lines` lines are enough; a million need about 10 GB of memory.
    The thread count is fixed because the pieces found depend on it.
    """
    lines = (line[start : start + 4000] for text in texts for line in text.splitlines()
             for start in range(0, len(line), 4000))
    out, refused = io.BytesIO(), []

    def guarded():  # SentencePiece makes a RuntimeError of what its iterator raises
        try:
            yield from itertools.islice(lines, most_lines)
        except UserError as error:
            refused.append(error)
            raise

    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=guarded(), model_writer=out, vocab_size=pieces, model_type="unigram",
            pad_id=PAD, eos_id=EOS, unk_id=UNK, bos_id=-1, num_threads=4, minloglevel=2,
            max_sentence_length=16_000, character_coverage=0.9999,
        )
    except RuntimeError as error:
        if refused:
            raise refused[0] from None
        most = re.search(r"<= (\d+)", str(error))
        raise UserError(
            f"The source has too little text for a vocabulary of {pieces} pieces"
            + (f": set --data.vocab train:{most[1]} or fewer." if most else f" ({error}).")
        ) from error
    return Tokenizer(out.getvalue())


# ---- sources -------------------------------------------------------------------------------------
# A source is a list of parts, each of them read from its beginning as (where it stands, dict of
# fields). What cannot be read is reported by calling `bad(where, what)`, which raises or counts as
# data.on_error says. Paths may be remote ("gs://bucket/*.gz"): fsspec reads them.


class Part(NamedTuple):
    name: str
    stamp: list  # size and time of a file: when these change, the source has changed
    read: Callable  # bad -> iterator of (where, dict)


class NoSplit(UserError):
    """The source has splits, but not this one."""


@functools.cache
def python_documents():
    """The language manual and the docstrings of Python itself, one document for each file.

    Read from the standard library's source files by `ast`: nothing is imported, nothing downloaded.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    documents = []
    for path in sorted(library.rglob("*.py")):
        if left_out & set(path.relative_to(library).parts):
            continue
        tree = ast.parse(path.read_bytes())
        if path.parts[-2:] == ("pydoc_data", "topics.py"):  # topics = {"assert": "The ...", ...}
            topics = next(node.value for node in tree.body if isinstance(node, ast.Assign))
            documents.extend(ast.literal_eval(topics).values())
            continue
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        docs = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds)]
        documents.append("\n\n".join(filter(None, docs)))
    return [document for document in documents if document.strip()]


def python_source(name, split, cfg):
    """python:, the text that comes with Python itself; python:COUNT, the numbers below COUNT."""

    def read(bad):
        if name:  # in no order, so that any may be held out
            for n in permute(np.arange(int(name)), int(name), 0).tolist():
                yield f"number {n}", {"number": n}
        else:
            for i, text in enumerate(python_documents()):
                yield f"document {i}", {"text": text}

    if name and not name.isdecimal():
        raise UserError(f"python:{name} is no source: write python: or python:COUNT.")
    return [Part(f"python:{name}", [sys.version], read)]


def reverse_source(name, split, cfg):
    """reverse:, sequences of 4 to 12 random ids and the same backwards, for toy_reverse."""
    splits = {"train": (0, 20_000), "validation": (1, 512)}
    if split not in splits:
        raise NoSplit(f"reverse: has no split {split}.")
    seed, count = splits[split]

    def read(bad):
        for i in range(count):
            random = np.random.default_rng([seed, i])
            ids = random.integers(3, 35, random.integers(4, 13)).tolist()
            yield f"example {i}", {"inputs": [*ids, EOS], "targets": [*ids[::-1], EOS]}

    return [Part("reverse:", [seed, count], read)]


def open_file(path):
    """A local or remote file, opened to read bytes."""
    if "://" not in path:
        return open(path, "rb")
    import fsspec  # a tenth of a second, for remote files only

    return fsspec.open(path, "rb").open()


def find_files(pattern):
    """A glob -> sorted [(path, [size and time])] of the files it matches."""
    if "://" in pattern:
        import fsspec

        try:
            system, inner = fsspec.core.url_to_fs(pattern)
            infos = {system.unstrip_protocol(path): info for path, info in
                     system.glob(inner, detail=True).items() if info["type"] == "file"}
        except (ImportError, ValueError, OSError) as error:
            raise UserError(f"{pattern} cannot be read ({error}).") from error
        times = "etag", "mtime", "updated", "created"
        return sorted((path, [info["size"], str([info.get(key) for key in times])])
                      for path, info in infos.items())
    paths = sorted(glob.glob(os.path.expanduser(pattern), recursive=True))
    stats = {path: os.stat(path) for path in paths if not os.path.isdir(path)}
    return [(path, [stat.st_size, stat.st_mtime_ns]) for path, stat in stats.items()]


PART_BYTES = 1 << 26


def file_parts(found, read):
    """[(path, [size, time])], (path, bad) -> examples: parts, small files together in one."""
    groups, size = [], math.inf
    for path, stamp in found:
        if size + stamp[0] > PART_BYTES:
            groups.append([])
            size = 0
        groups[-1].append((path, stamp))
        size += stamp[0]

    def read_all(paths, bad):
        return itertools.chain.from_iterable(read(path, bad) for path in paths)

    return [Part(group[0][0], group, functools.partial(read_all, [path for path, _ in group]))
            for group in groups]


def file_source(pattern, read):
    """The files that match a glob."""
    found = find_files(pattern)
    if not found:
        hint = f"{pattern} is a folder: write '{pattern}/*'" if os.path.isdir(pattern) else (
            f"No file matches {pattern or 'an empty name'}: give --data.source a path or a quoted "
            f"glob")
        raise UserError(f"{hint}.")
    return file_parts(found, read)


def read_lines(path, bad):
    """(line number, line) of a text file, plain or .gz; a line that is not UTF-8 is bad."""
    with open_file(path) as raw, gzip.open(raw) if path.endswith(".gz") else raw as file:
        try:
            for number, line in enumerate(file, 1):
                try:
                    yield number, line.decode()
                except UnicodeDecodeError:
                    bad(f"{path}:{number}", "is not UTF-8")
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            bad(path, f"is damaged ({error})")


def text_source(name, split, cfg):
    """text:GLOB, a document a file, or text:GLOB:lines, a document a line."""
    pattern = name.removesuffix(":lines")

    def read(path, bad):
        lines = read_lines(path, bad)
        if pattern == name:
            lines = [(1, "".join(line for _, line in lines))]
        return ((f"{path}:{number}", {"text": text}) for number, text in lines if text.strip())

    return file_source(pattern, read)


def jsonl_source(name, split, cfg):
    """jsonl:GLOB, a JSON object a line, plain or .gz, as C4 is published."""

    def read(path, bad):
        for number, line in read_lines(path, bad):
            where = f"{path}:{number}"
            try:
                example = json.loads(line) if line.strip() else None
            except (ValueError, RecursionError) as error:
                bad(where, f"is not JSON ({error})")
                continue
            if isinstance(example, dict):
                yield where, example
            elif line.strip():
                bad(where, "is not a JSON object")

    return file_source(name, read)


def parquet_source(name, split, cfg):
    """parquet:GLOB, the rows of parquet files."""

    def read(path, bad):
        import pyarrow.parquet  # a fifth of a second, and no other source needs it

        try:
            with open_file(path) as file:
                batches = pyarrow.parquet.ParquetFile(file).iter_batches(1024)
                examples = (example for batch in batches for example in batch.to_pylist())
                for number, example in enumerate(examples):
                    yield f"{path} row {number}", example
        except (pyarrow.ArrowException, UnicodeDecodeError) as error:
            bad(path, f"is damaged ({error})")

    return file_source(name, read)


def as_text(value):
    """Bytes anywhere in a value of TFDS -> text."""
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, dict):
        return {key: as_text(inner) for key, inner in value.items()}
    if isinstance(value, list) or isinstance(value, np.ndarray) and value.dtype == object:
        return [as_text(inner) for inner in value]
    return value


def tfds_source(name, split, cfg):
    """tfds:NAME[/CONFIG][:VERSION] or tfds:FOLDER, a TFDS dataset on disk in array_record form."""
    from etils import epath  # its folders may be remote

    home = cfg.tfds_dir or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
    dataset, _, version = name.partition(":") if "://" not in name else (name, "", "")
    folder = epath.Path(home).expanduser() / dataset
    found = [folder] if (folder / "dataset_info.json").exists() else [
        path.parent for path in folder.glob(f"{version or '*'}/dataset_info.json")]
    if not found:
        raise UserError(
            f"{name} is not in {folder / version}: name the folder of your TFDS datasets "
            f"(array_record) with --data.tfds_dir or TFDS_DATA_DIR, or read C4's own files with "
            f"--data.source 'jsonl:DIR/c4-train.*.json.gz', or any text with --data.source "
            f"'text:DIR/*.txt'.")
    folder = max(found, key=lambda path: [int(n) for n in re.findall(r"\d+", path.name)])
    import tensorflow_datasets as tfds  # half a second, and no other source needs it

    try:
        form = json.loads((folder / "dataset_info.json").read_text()).get("fileFormat", "tfrecord")
        info = tfds.builder_from_directory(folder).info if form == "array_record" else None
    except Exception as error:  # of JSON, protobuf or TFDS itself
        raise UserError(f"{folder / 'dataset_info.json'} is damaged ({error}).") from error
    if not info:
        raise UserError(
            f"{folder} is stored as {form}, which only TensorFlow reads: prepare it again on a "
            f"machine with TensorFlow, by tfds.builder({name.partition(':')[0]!r}, file_format="
            f"'array_record').download_and_prepare().")
    if split not in info.splits:
        raise NoSplit(f"{folder} has no split {split} (it has {', '.join(info.splits)}): name a "
                      f"--data.validation_source.")
    count, size = info.splits[split].num_examples, 1 << 17  # examples of a part

    def read(numbers, bad):
        examples = tfds.builder_from_directory(folder).as_data_source(split)
        for number in numbers:
            where = f"{folder} {split} {number}"
            try:
                yield where, as_text(examples[number])
            except UnicodeDecodeError:
                bad(where, "is not UTF-8")
            except (IndexError, ValueError, RuntimeError) as error:
                bad(where, f"is missing or damaged: dataset_info.json promises {count:,} examples "
                           f"({error})")

    parts = (range(start, min(start + size, count)) for start in range(0, count, size))
    stamp = [info.splits[split].shard_lengths, info.splits[split].num_bytes]
    return [Part(f"{folder} {split} {numbers.start}", stamp, functools.partial(read, numbers))
            for numbers in parts]


def hf_source(name, split, cfg):
    """hf:NAME[:CONFIG], a dataset of the Hugging Face hub or a folder of one, streamed."""
    try:
        import datasets
    except ImportError:
        raise UserError("hf: needs the library datasets: pip install '.[hf]'.") from None
    dataset, _, config = name.partition(":")
    try:
        stream = datasets.load_dataset(dataset, config or None, split=split, streaming=True)
    except Exception as error:  # of the library, the network, the dataset's own files
        kind = NoSplit if "split" in str(error) else UserError
        raise kind(f"hf:{name} cannot be opened, split {split} ({error}).") from error

    def read(shard, bad):
        examples = enumerate(stream.shard(stream.num_shards, shard))
        return ((f"hf:{name} {split} shard {shard} row {i}", example) for i, example in examples)

    return [Part(f"shard {shard}", [stream.num_shards], functools.partial(read, shard))
            for shard in range(stream.num_shards)]


def read_tfrecords(path, bad):
    """The records of a tfrecord file: length (8 bytes), its checksum, the record, its checksum."""
    with open_file(path) as file:
        while head := file.read(12):
            size = int.from_bytes(head[:8], "little")
            record = file.read(min(size, 1 << 31) + 4)
            if len(head) < 12 or len(record) != size + 4:
                return bad(path, "is cut off")
            yield record[:-4]


def seqio_source(name, split, cfg):
    """seqio:FOLDER (or a glob of them), a task cached by SeqIO, as P3 is published."""
    infos = find_files(f"{name}/info.{split}.json")
    if not infos:
        others = [os.path.basename(path) for path, _ in find_files(f"{name}/info.*.json")]
        if others:
            raise NoSplit(f"{name} has no info.{split}.json (it has {', '.join(others)}).")
        raise UserError(f"{name} has no info.{split}.json: seqio: names a folder that SeqIO's "
                        f"caching wrote.")

    def read(features, path, bad):
        from google.protobuf.message import DecodeError
        from tensorflow_datasets.proto import tf_example_generated_pb2

        for number, record in enumerate(read_tfrecords(path, bad)):
            where = f"{path} record {number}"
            try:
                stored = tf_example_generated_pb2.Example.FromString(record).features.feature
                example = {}
                for key, feature in stored.items():
                    kind = feature.WhichOneof("kind")
                    values = getattr(feature, kind).value if kind else ()
                    values = [v.decode() for v in values] if kind == "bytes_list" else (
                        np.array(values))
                    scalar = features.get(key, {}).get("shape") == []
                    example[key.replace("_plaintext", "_pretokenized")] = (
                        values[0] if scalar else values)
                yield where, example
            except (DecodeError, UnicodeDecodeError, IndexError) as error:
                bad(where, f"is damaged ({error})")

    parts = []
    for path, _ in infos:
        folder = os.path.dirname(path)
        if not find_files(f"{folder}/COMPLETED"):
            raise UserError(f"{folder} has no file COMPLETED: its caching did not finish.")
        try:
            with open_file(path) as file:
                info = json.load(file)
            features, promised = info["features"], info["num_shards"]
        except (ValueError, KeyError) as error:
            raise UserError(f"{path} is damaged ({error!r}).") from error
        shards = find_files(f"{glob.escape(folder)}/{split}.tfrecord-*-of-*")
        if len(shards) != promised:
            raise UserError(f"{folder} has {len(shards)} shards of {split}, its info promises "
                            f"{promised}: copy the missing ones.")
        parts += file_parts(shards, functools.partial(read, features))
    return parts


SOURCES = {"python": python_source, "text": text_source, "jsonl": jsonl_source,
           "parquet": parquet_source, "tfds": tfds_source, "hf": hf_source, "seqio": seqio_source,
           "reverse": reverse_source}


def open_source(source, split, cfg):
    """"KIND:NAME", a split, DataConfig -> the source's parts."""
    kind, _, name = source.partition(":")
    if kind not in SOURCES:
        raise UserError(f"Unknown kind of source in {source!r}: it begins with one of "
                        f"{', '.join(f'{known}:' for known in [*SOURCES, 'random'])}.")
    named = name.replace("{split}", split)
    if named != name and not find_files(named.removesuffix(":lines")):
        raise NoSplit(f"No file matches {named}: there is no split {split}.")
    return SOURCES[kind](named, split, cfg)


def has_splits(source):
    """Whether a source has a validation split of its own; files have by "{split}" in their names.
    """
    return source.startswith(("tfds:", "hf:", "seqio:", "reverse:")) or "{split}" in source


class Complaints:
    """Called with what cannot be read: stops at the first, or skips and counts (data.on_error)."""

    def __init__(self, on_error):
        self.stop, self.count = on_error == "stop", 0

    def __call__(self, where, what):
        if self.stop:
            raise UserError(f"{where} {what}: mend it, or leave such examples out with "
                            f"--data.on_error skip.")
        self.count += 1


# ---- tasks ---------------------------------------------------------------------------------------
# The text-to-text formats of T5 (Raffel et al. 2020, appendix D; t5/data/preprocessors.py), string
# for string. A format makes a list of examples of one: fields inputs and targets, and what the
# metrics need. A postprocessor makes of an answer, or of a target, what the metrics compare.


def answer_itself(text, example=None, is_target=False):
    return text


def as_it_is(example):
    return [example]


def text_to_text(example):
    """Fields inputs and targets as they are: texts, or ids. Of a SeqIO cache the texts, if kept."""
    texts = {key: example.get(f"{key}_pretokenized", example.get(key)) for key in PAIR}
    return [example | {key: text for key, text in texts.items() if text is not None}]


def label_text(labels, label):
    return "<unk>" if label == -1 else labels[label]  # -1: the label is not public


def glue(benchmark, labels, keys, example):
    """"mnli hypothesis: ... premise: ...": without `keys` the fields in the order of the alphabet.

    MultiRC's markup goes, and its three numbers are kept to group answers by.
    """
    keys = keys or sorted(example.keys() - {"label", "idx"})
    text = " ".join([benchmark, *(f"{key}: {example[key]}" for key in keys)])
    index = {"idx": example["idx"]} if "idx" in example else {}
    if benchmark == "multirc":
        text = re.sub("</?b>", "", text.replace("<br>", " "))
        index = {f"idx/{key}": example["idx"][key] for key in ("paragraph", "question", "answer")}
    return [{"inputs": text, "targets": label_text(labels, example["label"]), **index}]


def stsb(example):
    """A similarity between 0 and 5 is rounded to the nearest fifth: "3.8"."""
    score = np.round(np.float32(example["label"]) * np.float32(5)) / np.float32(5)
    text = f"stsb sentence1: {example['sentence1']} sentence2: {example['sentence2']}"
    return [{"inputs": text, "targets": f"{score:.1f}", "idx": example.get("idx")}]


def rte_of_axb(example):
    """SuperGLUE's broad diagnostics, as RTE."""
    renamed = {"premise": example["sentence1"], "hypothesis": example["sentence2"]}
    kept = {key: example[key] for key in ("label", "idx") if key in example}
    return glue("rte", ENTAILMENT, (), renamed | kept)


def record(example):
    """ReCoRD: an example for each answer; bullet points become sentences."""
    passage = re.sub(r"([.?!\"'])\n@highlight\n", r"\1 ", example["passage"])
    passage = passage.replace("\n@highlight\n", ". ")
    text = (f"record query: {example['query']} entities: {', '.join(example['entities'])} "
            f"passage: {passage}")
    answers = list(example["answers"])
    kept = {"answers": answers, "idx/passage": example["idx"]["passage"],
            "idx/query": example["idx"]["query"]}
    return [{"inputs": text, "targets": answer, **kept} for answer in answers or ["<unk>"]]


def wsc(only_true, example):
    """Winograd schemas: "wsc: ... *it* ...", and what the pronoun may stand for.

    Two of the published examples are marked wrongly, one word too early or with the punctuation.
    """
    if only_true and not example["label"]:
        return []
    words, at, pronoun = example["text"].split(" "), example["span2_index"], example["span2_text"]
    if words[at] != pronoun:
        if words[at].startswith(pronoun):
            words[at : at + 1] = [pronoun, words[at].removeprefix(pronoun)]
            words = " ".join(words).rstrip().split(" ")
        elif words[at + 1] == pronoun:
            at += 1
        else:
            raise ValueError(f"word {at} is {words[at]!r}, not {pronoun!r}")
    text = f"{' '.join(words[:at])} X {' '.join(words[at + 1 :])}".replace(" X ", f" *{pronoun}* ")
    return [{"inputs": f"wsc: {text}", "targets": example["span1_text"],
             "label": example.get("label", 0), "idx": example.get("idx")}]


def definite_pronoun(example):
    """Definite pronoun resolution, written as WSC is; the first such pronoun is the one."""
    text = re.sub(rf" ({example['pronoun']})( |\.|,)", r" *\1*\2", example["sentence"], count=1)
    return [{"inputs": f"wsc: {text}", "targets": example["candidates"][example["label"]]}]


def spaced(text):
    """ASCII punctuation between spaces, and no two spaces in a row."""
    return re.sub(r"[ \t\n\f\r]+", " ", re.sub(r"([!-/:-@\[-`{-~])", r" \1 ", text))


def squad(example):
    """SQuAD: punctuation stands alone in question, context and answers; the first is learned."""
    question, context = spaced(example["question"]), spaced(example["context"])
    answers = [spaced(answer) for answer in example["answers"]["text"]]
    text = re.sub(r"[ \t\n\f\r]+", " ", f"question: {question} context: {context}")
    return [{"inputs": text, "targets": answers[0], "answers": answers, "id": example.get("id"),
             "question": question, "context": context}]


def summarize(example):
    return [{"inputs": f"summarize: {example['article']}", "targets": example["highlights"]}]


LANGUAGES = {"de": "German", "en": "English", "fr": "French", "ro": "Romanian"}


def translate(source, target, example):
    names = f"translate {LANGUAGES[source]} to {LANGUAGES[target]}"
    return [{"inputs": f"{names}: {example[source]}", "targets": example[target]}]


ONES = ("zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
        "fifteen sixteen seventeen eighteen nineteen").split()
TENS = "- - twenty thirty forty fifty sixty seventy eighty ninety".split()


def words_of(n):
    """A number below a million in English words."""
    if n < 20:
        return ONES[n]
    if n < 100:
        return TENS[n // 10] + (f"-{ONES[n % 10]}" if n % 10 else "")
    size, name = (1000, "thousand") if n >= 1000 else (100, "hundred")
    return f"{words_of(n // size)} {name}" + (f" {words_of(n % size)}" if n % size else "")


def by_rule(kind, example):
    """The tasks of the recipe tiny_finetune, made of a number."""
    n = example["number"]
    day = datetime.date(1970, 1, 1) + datetime.timedelta(n)
    written = f"{day.day} {day:%B} {day.year}"
    inputs, targets = {
        "words": (f"number: {n}", words_of(n)), "digits": (f"words: {words_of(n)}", f"{n}"),
        "date": (f"date: {day}", written), "day": (f"day: {written}", f"{day}"),
        "even": (f"is {n} even?", ("yes", "no")[n % 2])}[kind]
    return [{"inputs": inputs, "targets": targets}]


def label_number(labels, text, example=None, is_target=False):
    """A label's text -> its number, -1 if there is no such label."""
    return labels.index(text) if text in labels else -1


def number(text, example=None, is_target=False):
    try:
        return float(text)
    except ValueError:
        return -1.0


def multirc_answer(text, example=None, is_target=False):
    """The answer's number, and for a target the question it belongs to."""
    value = {"value": label_number(("False", "True"), text)}
    return value | {"group": example["idx/question"]} if is_target else value


def record_answers(text, example=None, is_target=False):
    """All answers of a target, and the query they belong to."""
    if not is_target:
        return {"value": text}
    return {"value": list(example["answers"]),
            "group": (example["idx/passage"], example["idx/query"])}


def all_answers(text, example=None, is_target=False):
    return list(example["answers"]) if is_target else text


def wsc_answer(text, example=None, is_target=False):
    """1 if the answer names the candidate, but for case and determiners, else 0; -1 if empty."""
    if is_target:
        return example["label"]
    determiners = set("a an few her his each every many much my our some that the their these "
                      "this those which whose your".split())

    def bare(text):
        return " ".join(w for w in text.strip().lower().split(" ") if w not in determiners)

    answer = bare(text)
    candidate = bare(example.get("targets_pretokenized", example["targets"]))
    if not answer:
        return -1
    if ("'" in answer) != ("'" in candidate):
        return 0  # "Bob" is not "Bob's hat"
    answer, candidate = set(answer.split(" ")), set(candidate.split(" "))
    return int(answer <= candidate or candidate <= answer)


class Task(NamedTuple):
    """What is learned from a source, and how answers are judged (names as in t5's registry)."""

    source: str = ""  # KIND:NAME, as data.source
    format: Callable = text_to_text  # example of the source -> list of {"inputs", "targets", ...}
    metrics: tuple = ()  # names
    choices: tuple = ()  # all possible answers, where they are few
    postprocess: Callable = answer_itself  # (text, example=..., is_target=...) -> what is compared
    splits: tuple = ("train", "validation", "test")  # that the source has
    objective: str = "text_to_text"  # or span_corruption, prefix_lm: of the field text
    inputs_eos: bool = True  # the inputs end with EOS; T0's do not
    eos_after_trim: bool = True  # a text that is cut has EOS too; T0's have not


PAIR = ("inputs", "targets")
ENTAILMENT = ("entailment", "not_entailment")
NLI = ("entailment", "neutral", "contradiction")
TRUTH = ("False", "True")
TASKS, MIXTURES = configs.TASKS, configs.MIXTURES  # to which a recipe file adds its own


def classify(source, benchmark, labels, metrics=("accuracy",), keys=(), **more):
    """The task of a GLUE or SuperGLUE benchmark with these labels."""
    return Task(source, functools.partial(glue, benchmark, labels, keys), metrics, labels,
                functools.partial(label_number, labels), **more)


def glue_task(name, *args, **more):
    return {f"glue_{name}_v002": classify(f"tfds:glue/{name}:1.0.0", *args, **more)}


def super_glue_task(name, *args, **more):
    return {f"super_glue_{name}_v102": classify(f"tfds:super_glue/{name}:1.0.2", *args, **more)}


def wmt_tasks(name, other):
    """Both directions of a pair with English: wmt14_ende_v003, wmt14_deen_v003."""
    return {f"{name}_{a}{b}_v003": Task(f"tfds:{name}_translate/{other}-en:1.0.0",
                                        functools.partial(translate, a, b), ("bleu",))
            for a, b in (("en", other), (other, "en"))}


F1 = ("f1", "accuracy")
HELD_OUT = ("validation", "test")
WSC = "tfds:super_glue/wsc.fixed:1.0.2"
TASKS |= {
    "span_corruption": Task("python:", as_it_is, objective="span_corruption"),
    "prefix_lm": Task("python:", as_it_is, objective="prefix_lm"),
    "text_to_text": Task(),
    "c4_v220_span_corruption": Task("tfds:c4/en:2.2.0", as_it_is, objective="span_corruption"),
    "c4_v220_prefix_lm": Task("tfds:c4/en:2.2.0", as_it_is, objective="prefix_lm"),
    **wmt_tasks("wmt14", "de"), **wmt_tasks("wmt14", "fr"), **wmt_tasks("wmt15", "fr"),
    **wmt_tasks("wmt16", "ro"), **wmt_tasks("wmt19", "de"), **wmt_tasks("wmt_t2t", "de"),
    "cnn_dailymail_v002": Task("tfds:cnn_dailymail:3.4.0", summarize, ("rouge",)),
    "squad_v010_allanswers": Task("tfds:squad/v1.1:3.0.0", squad, ("squad",),
                                  postprocess=all_answers),
    **glue_task("cola", "cola", ("unacceptable", "acceptable"), ("matthews_corrcoef",)),
    **glue_task("sst2", "sst2", ("negative", "positive")),
    **glue_task("mrpc", "mrpc", ("not_equivalent", "equivalent"), F1),
    **glue_task("qqp", "qqp", ("not_duplicate", "duplicate"), F1),
    "glue_stsb_v002": Task("tfds:glue/stsb:1.0.0", stsb, ("pearson_corrcoef", "spearman_corrcoef"),
                           postprocess=number),
    **glue_task("mnli", "mnli", NLI, splits=("train",)),
    **glue_task("mnli_matched", "mnli", NLI, splits=HELD_OUT),
    **glue_task("mnli_mismatched", "mnli", NLI, splits=HELD_OUT),
    **glue_task("qnli", "qnli", ENTAILMENT), **glue_task("rte", "rte", ENTAILMENT),
    **glue_task("wnli", "wnli", ("not_entailment", "entailment")),
    **glue_task("ax", "mnli", NLI, (), splits=("test",)),
    **super_glue_task("boolq", "boolq", TRUTH),
    **super_glue_task("cb", "cb", ("entailment", "contradiction", "neutral"),
                      ("mean_3class_f1", "accuracy")),
    **super_glue_task("copa", "copa", ("choice1", "choice2")),
    "super_glue_multirc_v102": classify(
        "tfds:super_glue/multirc:1.0.2", "multirc", TRUTH, ("multirc_f1", "exact_match"),
        ("question", "answer", "paragraph"))._replace(postprocess=multirc_answer),
    "super_glue_record_v102": Task("tfds:super_glue/record:1.0.2", record, ("record",),
                                   postprocess=record_answers),
    **super_glue_task("rte", "rte", ENTAILMENT),
    **super_glue_task("wic", "wic", TRUTH, keys=("sentence1", "sentence2", "word")),
    "super_glue_axb_v102": classify("tfds:super_glue/axb:1.0.2", "rte", ENTAILMENT, (),
                                    splits=("test",))._replace(format=rte_of_axb),
    **super_glue_task("axg", "rte", ENTAILMENT, (), splits=("test",)),
    "super_glue_wsc_v102_simple_train": Task(WSC, functools.partial(wsc, True), splits=("train",)),
    "super_glue_wsc_v102_simple_eval": Task(WSC, functools.partial(wsc, False), ("accuracy",),
                                            postprocess=wsc_answer, splits=HELD_OUT),
    "dpr_v001_simple": Task("tfds:definite_pronoun_resolution:1.1.0", definite_pronoun,
                            ("accuracy",), splits=("train", "test")),
    **{f"by_rule_{kind}": Task("python:10000", functools.partial(by_rule, kind), ("accuracy",))
       for kind in ("words", "digits", "date", "day")},
    "by_rule_even": classify("python:10000", "", ("no", "yes"))._replace(
        format=functools.partial(by_rule, "even")),
}


# ---- mixtures ------------------------------------------------------------------------------------
# A mixture is a dict: a task's name, or another mixture's -> its rate, a number or BySize. Tasks of
# rate 0 are evaluated with it. Rates need not add up to anything.


class BySize(NamedTuple):
    """A rate by the number of training examples, as Raffel et al. 2020 mix, section 3.5.2."""

    maximum: float = math.inf  # examples that count at most
    temperature: float = 1.0  # above 1 small tasks come more often
    scale: float = 1.0

    def of(self, examples):
        return min(examples * self.scale, self.maximum) ** (1 / self.temperature)


# T0's datasets with their training examples (Sanh et al. 2022; bigscience-workshop/t-zero,
# datasets.csv), by the role in which they are used.
T0 = {
    "train": """glue_mrpc 3668, glue_qqp 363846, paws_labeled_final 49401, kilt_tasks_hotpotqa
        88869, wiki_qa 20360, adversarial_qa_dbidaf 10000, adversarial_qa_dbert 10000,
        adversarial_qa_droberta 10000, duorc_SelfRC 60721, duorc_ParaphraseRC 69524, ropes 10924,
        quoref 19399, cos_e_v1.11 9741, cosmos_qa 25262, dream 6116, qasc 8134, quail 10246,
        quarel 1941, quartz 2696, sciq 11679, social_i_qa 33410, wiki_hop_original 43738, wiqa
        29808, amazon_polarity 3600000, app_reviews 288065, imdb 25000, rotten_tomatoes 8530,
        yelp_review_full 650000, common_gen 67389, wiki_bio 582659, cnn_dailymail_3.0.0 287113,
        gigaword 3803957, multi_news 44972, samsum 14732, xsum 204045, ag_news 120000, dbpedia_14
        560000, trec 5452""",
    "gpt": """ai2_arc_ARC_Challenge 1119, ai2_arc_ARC_Easy 2251, trivia_qa_unfiltered 87622,
        web_questions 3778, squad_v2 130319, openbookqa_main 4957, race_high 62445, race_middle
        25421, piqa 16113, hellaswag 39905""",
    "super_glue": """super_glue_wsc.fixed 554, super_glue_record 100730, super_glue_boolq 9427,
        super_glue_copa 400, super_glue_multirc 27243, super_glue_wic 5428""",
    "eval": """super_glue_wsc.fixed 554, winogrande_winogrande_xl 40398, super_glue_cb 250,
        super_glue_rte 2490, anli 162865, super_glue_copa 400, story_cloze_2016 0, hellaswag 39905,
        super_glue_wic 5428""",
    "bias": """crows_pairs 0, jigsaw_toxicity_pred 0, super_glue_axg 0, wino_bias_type1_anti 0,
        wino_bias_type2_anti 0, wino_bias_type1_pro 0, wino_bias_type2_pro 0""",
}
T0 = {role: {name: int(size) for name, size in re.findall(r"(\S+)\s+(\d+)", text)}
      for role, text in T0.items()}
T0_CAP = 500_000
T0_LEFT_OUT = {"gigaword_summarize_"}  # by T0's authors: its cache is broken


def t0_mixture(roles, score_eval, cfg):
    """The folders of P3 that belong to the datasets of these roles -> rates.

    A dataset of more than T0_CAP examples counts as T0_CAP, divided among its templates; a smaller
    one counts once for each. For evaluation a folder counts by what it holds.
    """
    sizes = {name: size for role in roles for name, size in T0[role].items()}
    known = {name for role in T0.values() for name in role}
    members, root, folders = {}, p3_root(cfg), sorted(p3_sources(cfg))
    if not folders:
        raise UserError("T0's mixtures are made of the folders of P3 (bigscience/P3, a folder for "
                        "each prompt): name the one that holds them with --data.source seqio:DIR "
                        "or parquet:DIR.")
    for folder in folders:
        name = max((name for name in known if folder.startswith(f"{name}_")), key=len, default="")
        if name in sizes and folder.endswith("_score_eval") == score_eval:
            members.setdefault(name, []).append(folder)
    return {folder: min(T0_CAP, p3_size(root, folder)) if score_eval else (
                sizes[name] if sizes[name] <= T0_CAP else T0_CAP // len(folders))
            for name, folders in members.items() for folder in folders
            if folder not in T0_LEFT_OUT}


def p3_root(cfg):
    """DataConfig -> the folder with P3's folders: data.source is seqio:FOLDER or parquet:FOLDER."""
    kind, _, name = cfg.source.partition(":")
    return name.removesuffix("*").rstrip("/") if kind in ("seqio", "parquet") else ""


# What a folder of P3 holds, as SeqIO cached it or as parquet files, and where its splits are.
P3_FILES = (("seqio", "info.*.json", ""), ("parquet", "*.parquet", "/*{split}*.parquet"),
            ("parquet", "*/*.parquet", "/{split}/*.parquet"))


def p3_sources(cfg, folder="*"):
    """The folders of P3, or one of them -> {name: source}."""
    kind, found = cfg.source.partition(":")[0], {}
    for of_kind, files, splits in P3_FILES:
        for path, _ in find_files(f"{p3_root(cfg)}/{folder}/{files}") if kind == of_kind else ():
            name = path.split("/")[-2 - files.count("/")]
            found[name] = f"{kind}:{p3_root(cfg)}/{name}{splits}"
    return found


def p3_size(root, folder):
    """Examples of a folder, by what SeqIO counted; 1 where it did not."""
    for split in ("train", "validation", "test"):
        for path, _ in find_files(f"{root}/{folder}/stats.{split}.json"):
            with open_file(path) as file:
                return json.load(file).get("examples", 1)
    return 1


MIXTURES |= {
    "glue_v002_proportional": {
        "glue_cola_v002": 8_551, "glue_sst2_v002": 67_349, "glue_mrpc_v002": 3_668,
        "glue_qqp_v002": 363_849, "glue_stsb_v002": 5_749, "glue_mnli_v002": 392_702,
        "glue_qnli_v002": 104_743, "glue_rte_v002": 2_490, "glue_mnli_mismatched_v002": 0,
        "glue_mnli_matched_v002": 0, "glue_ax_v002": 0},
    "super_glue_v102_proportional": {
        "dpr_v001_simple": 1_322, "super_glue_wsc_v102_simple_train": 259,
        "super_glue_wsc_v102_simple_eval": 0, "super_glue_boolq_v102": 9_427,
        "super_glue_cb_v102": 250, "super_glue_copa_v102": 400, "super_glue_multirc_v102": 27_243,
        "super_glue_record_v102": 138_854, "super_glue_rte_v102": 2_490,
        "super_glue_wic_v102": 5_428, "super_glue_axb_v102": 0, "super_glue_axg_v102": 0},
    "by_rule": {"by_rule_words": 2, "by_rule_digits": 2, "by_rule_date": 1, "by_rule_day": 1,
                "by_rule_even": 1},
    "t0_train": functools.partial(t0_mixture, ("train",), False),
    "t0+_train": functools.partial(t0_mixture, ("train", "gpt"), False),
    "t0++_train": functools.partial(t0_mixture, ("train", "gpt", "super_glue"), False),
    "t0_train_score_eval": functools.partial(t0_mixture, ("train",), True),
    "t0_eval_score_eval": functools.partial(t0_mixture, ("eval",), True),
    "bias_fairness_eval_score_eval": functools.partial(t0_mixture, ("bias",), True),
}


def mixture_rates(name, cfg, examples=lambda task: 1, within=()):
    """A task's or mixture's name, DataConfig -> {task: rate}, mixtures in it taken apart.

    examples: a task's name -> how many it has to train on, which BySize asks. within: the mixtures
    that are being taken apart.
    """
    if name not in MIXTURES:
        return {name: 1.0}
    if name in within:
        raise UserError(f"The mixture {name} contains itself.")
    rates, entries = {}, MIXTURES[name]
    for member, rate in (entries(cfg) if callable(entries) else entries).items():
        if isinstance(rate, BySize) and member not in MIXTURES:
            rate = rate.of(examples(member))
        if not isinstance(rate, int | float) or not 0 <= rate < math.inf:
            raise UserError(f"The rate of {member} in {name} is {rate}: give it a number, or, if "
                            f"it is one task, BySize with a maximum.")
        inside = mixture_rates(member, cfg, examples, (*within, name))
        total = sum(inside.values())
        for task, part in inside.items():
            rates[task] = rates.get(task, 0.0) + rate * part / total
    if not any(rates.values()):
        raise UserError(f"The mixture {name} has no task with a rate above 0.")
    return rates


def find_task(name, cfg):
    """A task's name, or KIND:NAME of a source with inputs and targets, DataConfig -> Task.

    data.source takes the place of the task's own source, if it is data.task.
    """
    task = TASKS.get(name)
    if not task and name.partition(":")[0] in SOURCES:
        return TASKS["text_to_text"]._replace(source=name)
    if not task and (found := p3_sources(cfg, name).get(name)):
        return Task(found, inputs_eos=False, eos_after_trim=False)
    if not task:
        hint = configs.nearest(name, [*TASKS, *MIXTURES])
        raise UserError(f"Unknown task {name}{hint or ';'} python data.py --list lists them.")
    if not isinstance(task, Task):
        raise UserError(f"The task {name} is {task!r}, not a value of data.Task.")
    if cfg.source and cfg.task == name:
        task = task._replace(source=cfg.source, splits=Task().splits)
    if not task.source:
        raise UserError(f"--data.task {name} needs a --data.source, such as jsonl:FILE.")
    return task


def check_tasks(cfg):
    """Refuse what data.task, eval_tasks and the sources cannot mean, before anything is prepared.
    """
    if cfg.task in MIXTURES and (cfg.validation_source or cfg.source and not p3_root(cfg)):
        raise UserError(f"--data.source and --data.validation_source are for one task, and "
                        f"{cfg.task} is a mixture: a mixture's tasks have their own.")
    for name in filter(None, [cfg.task, *cfg.eval_tasks.split(",")]):
        for task in mixture_rates(name.strip(), cfg):
            find_task(task, cfg)


# ---- prepared corpora ----------------------------------------------------------------------------
# prepared/SOURCE-HASH/00000-000.text.ids.npy   tokens of part 0, shard 0, document after document
#                      00000-000.text.ends.npy  where in the shard each document ends
#                      00000.json               counts of part 0, written when its shards are whole
#                      index.json               all counts, written last: the corpus is complete

SHARD_TOKENS = 1 << 26
ENCODED = 1024  # examples that are encoded together
# A large corpus is prepared, and gone through, chapter by chapter: as many parts of the source as
# have these tokens. A run prepares only the chapters it comes to, and its batches do not depend on
# how many there are.
CHAPTER_TOKENS = 1 << 30
ENDLESS = math.inf


def prepared_path(source, parts, identity, cfg):
    """A readable path in data.prepared_dir; changes with the source, its parts and `identity`."""
    if "://" in cfg.prepared_dir:
        raise UserError(f"--data.prepared_dir {cfg.prepared_dir} is remote, and token files are "
                        f"memory-mapped: name a local folder.")
    slug = re.sub(r"[^\w.]+", "-", source).strip("-")[-40:]
    identity = [source, [[part.name, part.stamp] for part in parts], identity]
    digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:10]
    return Path(cfg.prepared_dir, f"{slug}-{digest}")


def load_vocabulary(cfg):
    """DataConfig -> Tokenizer: the one that data.vocab names, or one trained on the source.

    A vocabulary trained here is kept in data.prepared_dir, for this source as it is now.
    """
    if not cfg.vocab.startswith("train:"):
        return load_tokenizer(cfg.vocab)
    pieces = cfg.vocab.removeprefix("train:")
    if not pieces.isdecimal():
        raise UserError(f"--data.vocab {cfg.vocab}: write train:PIECES, for instance train:32000.")
    tasks = [find_task(name, cfg) for name, rate in mixture_rates(cfg.task, cfg).items() if rate]
    parts = [open_source(task.source, "train", cfg) for task in tasks]
    names = cfg.task if len(tasks) > 1 else tasks[0].source
    identity = [identity_of(task, some, cfg) for task, some in zip(tasks, parts)]
    path = prepared_path(names, sum(parts, []), [pieces, identity], cfg)
    path = path.with_name(f"{path.name}.{pieces}.model")
    if not path.exists():
        configs.note(f"training a vocabulary of {pieces} pieces on {names}")
        bad = Complaints(cfg.on_error)

        def read(task, parts):
            return (text for part in parts for _, texts in read_texts(part, bad, task, cfg)
                    for text in texts if isinstance(text, str))

        texts = itertools.zip_longest(*map(read, tasks, parts), fillvalue="")  # a text of each task
        texts = itertools.chain.from_iterable(texts)
        configs.write_file(path, train_tokenizer(texts, int(pieces)).serialized)
    return load_tokenizer(path)


def features_of(task):
    """What is tokenized of an example."""
    return PAIR if task.objective == "text_to_text" else ("text",)


def identity_of(task, parts, cfg):
    """What decides which texts a task makes of its source: what its format makes of the first."""
    identity = [*features_of(task), cfg.fields]
    if task.format in (as_it_is, text_to_text):
        return identity
    firsts = read_formatted(parts[0], lambda where, what: None, task, cfg) if parts else ()
    made = [[str(example.get(feature)) for feature in features_of(task)]
            for _, _, example in itertools.islice(firsts, 100)]
    return [*identity, made]


def read_formatted(part, bad, task, cfg):
    """The examples of a part, as the task formats them: (where, number in the part, dict).

    data.fields says what a field of the task is called in the source: "text=content".
    """
    pairs = [pair.partition("=") for pair in cfg.fields.split(",") if cfg.fields]
    if not all(ours and theirs for ours, _, theirs in pairs):
        raise UserError(f"--data.fields {cfg.fields}: write text=NAME, or "
                        f"inputs=NAME,targets=NAME.")
    names = {ours.strip(): theirs.strip() for ours, _, theirs in pairs}
    for number, (where, example) in enumerate(part.read(bad)):
        if names:
            found = {ours: example[theirs] for ours, theirs in names.items() if theirs in example}
            example = {**example, **found}
        try:
            made = task.format(example)
        except Exception as error:  # a format is anyone's code
            what = f"no {error}" if isinstance(error, KeyError) else repr(error)
            bad(where, f"does not suit the task: {what} (fields: {', '.join(example)})")
            continue
        for one in [made] if isinstance(made, dict) else made:
            yield where, number, one


def read_texts(part, bad, task, cfg, size=math.inf):
    """The texts, or ids, of a part's examples: (number in the part, a tuple of the features)."""
    for number, _, texts in read_fitting(part, bad, task, cfg, size):
        yield number, texts


def read_fitting(part, bad, task, cfg, size=math.inf):
    """The examples of a part that can be tokenized: (number in the part, dict, its texts or ids).

    size: of the vocabulary, below which ids must lie. Examples without any text are left out.
    """
    features = features_of(task)
    for where, number, example in read_formatted(part, bad, task, cfg):
        texts = tuple([example.get(feature) for feature in features])
        wrong = next(filter(None, (unfit(text, size) for text in texts)), None)
        if wrong is not None:
            bad(where, f"has {wrong} in {' and '.join(features)} but the fields "
                       f"{', '.join(example)} (--data.fields {features[0]}=NAME names another)")
        elif any(len(text) and (not isinstance(text, str) or not text.isspace())
                 for text in texts):
            yield number, example, texts


def unfit(value, size):
    """What keeps a value from being tokenized, or None: it is text, or a list of ids."""
    if isinstance(value, str):
        try:
            value.isascii() or value.encode()
        except UnicodeEncodeError:
            return "half of a character (a lone surrogate)"
        return None
    ids = np.asarray(value) if isinstance(value, list | np.ndarray) else np.zeros(1)
    if ids.ndim != 1 or len(ids) and ids.dtype.kind not in "iu":
        return "no text"
    if len(ids) and not 0 <= ids.min() <= ids.max() < size:
        return f"ids from {ids.min()} to {ids.max()}, where the vocabulary ends at {size - 1},"
    return None


def without_eos(ids):
    """The ids of an example that came tokenized; EOS is added where the batch is made."""
    ids = np.asarray(ids, np.int32)
    return ids[:-1] if len(ids) and ids[-1] == EOS else ids


def encode_ahead(examples, tokenizer, size):
    """(key, texts) of each example -> lists of (key, a tuple of int32 arrays).

    While a batch is encoded the next ones are read.
    """
    def encode(batch):
        sides = []
        for side in zip(*(texts for _, texts in batch)):
            ids = iter(tokenizer.encode_batch([text for text in side if isinstance(text, str)]))
            sides.append([next(ids) if isinstance(text, str) else without_eos(text)
                          for text in side])
        return [(key, texts) for (key, _), texts in zip(batch, zip(*sides))]

    with ThreadPoolExecutor(2) as threads:
        ahead = collections.deque()
        while batch := list(itertools.islice(examples, size)):
            ahead.append(threads.submit(encode, batch))
            if len(ahead) > 2:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


def prepare(task, split, tokenizer, cfg, needed=ENDLESS, shard=(0, 1)):
    """Tokenize a task's source, as far as that has not been done -> the folder of its token files.

    needed: tokens, in whole chapters; cfg: DataConfig; shard: (i, n), only every n-th part. A part
    that is whole is never read again, so after a kill the work goes on where it was.
    """
    parts = open_source(task.source, split, cfg)
    identity = [split, identity_of(task, parts, cfg), tokenizer.sha256]
    folder = prepared_path(task.source, parts, identity, cfg)
    if (folder / "index.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    tokens, chapter, fresh = 0, 0, False
    with tqdm(unit="token", unit_scale=True, leave=False, disable=None) as bar:
        for number in range(shard[0], len(parts), shard[1]):
            counts = read_mark(folder, number)
            if not counts:
                bar.set_description(f"preparing {task.source}, part {number + 1} of {len(parts)}")
                stem = folder / f"{number:05}"
                with configs.lock(f"{stem}.lock", wait=True):
                    counts = read_mark(folder, number)  # another process may have made it meanwhile
                    if not counts:
                        counts = prepare_part(
                            parts[number], stem, task, tokenizer, cfg, bar.update)
                        configs.write_file(f"{stem}.json", json.dumps(counts))
                        fresh = True
                    Path(f"{stem}.lock").unlink(missing_ok=True)
            tokens += counts["tokens"]
            chapter += counts["tokens"]
            if chapter >= CHAPTER_TOKENS:
                chapter = 0
                if tokens >= needed:
                    break
    if not fresh and shard == (0, 1) and tokens >= needed:
        return folder
    marks = [read_mark(folder, number) for number in range(len(parts))]
    done = list(itertools.takewhile(bool, marks))
    complete = len(done) == len(parts)
    total = {key: sum(count[key] for count in done)
             for key in ("documents", "tokens", "unknown", "only_unknown", "skipped")}
    if complete and not total["documents"]:
        raise UserError(f"{task.source} holds no text: nothing to train on.")
    strange = collections.Counter()
    for count in done:
        strange.update(count["characters"])
    unknown = total["unknown"] / max(total["tokens"], 1)
    if complete:
        configs.write_file(folder / "index.json", json.dumps(
            {"format": 2, "source": task.source, "split": split, "vocabulary": tokenizer.sha256,
             **total, "characters": dict(strange.most_common(100)),
             "parts": [{"name": part.name} | count for part, count in zip(parts, done)]}, indent=1))
    more = [f"{total['skipped']:,} skipped"]
    more += [f"{total['only_unknown']:,} of only unknown tokens"] * bool(total["only_unknown"])
    more += [f"{len(done)} of {len(parts)} parts so far"] * (not complete)
    configs.note(f"prepared {task.source}: {total['documents']:,} documents, {total['tokens']:,} "
                 f"tokens, {unknown:.3%} unknown, {', '.join(more)}")
    if unknown > 0.001:
        listed = " ".join(repr(c) for c, _ in strange.most_common(12))
        configs.note(f"warning: more than 0.1 % of the tokens are unknown to the vocabulary; the "
                     f"characters that cause it: {listed}")
    return folder


def read_mark(folder, number):
    """The counts of a part that is whole, or None."""
    try:
        return json.loads((folder / f"{number:05}.json").read_text())
    except FileNotFoundError:
        return None


def prepare_part(part, stem, task, tokenizer, cfg, progress):
    """Tokenize one part of a source into shards of about SHARD_TOKENS tokens -> its counts."""
    bad, features = Complaints(cfg.on_error), features_of(task)
    dtype = np.uint16 if tokenizer.size <= 1 << 16 else np.uint32
    counts = {"documents": 0, "tokens": 0, "unknown": 0, "only_unknown": 0, "shards": []}
    strange, looked = collections.Counter(), 0
    held, held_tokens = [], 0  # examples: one array of ids for each feature

    def flush():
        name = f"{stem}-{len(counts['shards']):03}"
        shard = {"name": Path(name).name, "documents": len(held), "tokens": {}, "crc32": {}}
        for feature, arrays in zip(features, zip(*held)):
            ids = np.concatenate(arrays).astype(dtype)
            for kind, array in (("ids", ids), ("ends", np.cumsum([len(a) for a in arrays]))):
                out = io.BytesIO()
                np.save(out, array)
                configs.write_file(f"{name}.{feature}.{kind}.npy", out.getbuffer())
            shard["tokens"][feature], shard["crc32"][feature] = len(ids), zlib.crc32(ids)
        counts["shards"].append(shard)
        counts["documents"] += len(held)
        held.clear()

    examples = ((texts, texts) for _, texts in read_texts(part, bad, task, cfg, tokenizer.size))
    for batch in encode_ahead(examples, tokenizer, ENCODED):
        held += [ids for _, ids in batch]
        sizes = [sum(map(len, ids)) for _, ids in batch]
        size = sum(sizes)
        flat = np.concatenate([side for _, ids in batch for side in ids] or [np.zeros(0)])
        unknown = np.bincount(np.repeat(np.arange(len(batch)), sizes)[flat == UNK],
                              minlength=len(batch))
        counts["unknown"] += int(unknown.sum())
        for example in np.flatnonzero(unknown):
            texts, ids = batch[example]
            known = np.concatenate(ids)
            known = known[known != UNK][:20]  # spaces may be among them
            counts["only_unknown"] += not tokenizer.pieces(known.tolist()).strip()
            looked += 1
            for text in texts if looked <= 1000 else ():  # enough to say which they are
                strange.update(unknown_characters(text, tokenizer))
        counts["tokens"] += size
        held_tokens += size
        progress(size)
        if held_tokens >= SHARD_TOKENS:
            flush()
            held_tokens = 0
    if held:
        flush()
    return counts | {"skipped": bad.count, "characters": dict(strange.most_common(100))}


def unknown_characters(text, tokenizer):
    """A text -> {character that the vocabulary lacks: how often it occurs}."""
    known = tokenizer.__dict__.setdefault("known_characters", {})
    found = set(text) if isinstance(text, str) else set()
    for c in found - known.keys():
        known[c] = UNK not in tokenizer.encode(c)
    return {c: text.count(c) for c in found if not known[c]}


def runs(starts, lengths):
    """[5, 9], [3, 2] -> [5, 6, 7, 9, 10]: the numbers of several runs, one after the other."""
    ends = np.cumsum(lengths)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(ends[-1] if len(ends) else 0)


def present(numbers):
    """The different ones of some small numbers, rising; np.unique sorts."""
    return np.flatnonzero(np.bincount(numbers))


def alternate(values, others, lengths, gaps):
    """values[0] lengths[0] times, others[0] gaps[0] times, values[1] lengths[1] times, ..."""
    return np.repeat(np.stack([values, others], 1).ravel(), np.stack([lengths, gaps], 1).ravel())


class Corpus:
    """The tokens of one feature, document after document, read as one long stream.

    Of a prepared folder, or of arrays: ids and ends, each a list with one array for each shard.
    chapters: the numbers of the documents [start, stop) of each.
    """

    def __init__(self, ids, ends, documents, chapters, digest="", complete=True):
        self.ids, self.ends, self.chapters, self.digest = ids, ends, chapters, digest
        self.complete = complete  # no chapters are missing
        self.first = np.cumsum([0, *documents])  # document of each shard
        self.starts = np.cumsum([0, *map(len, ids)])  # token of each shard
        self.tokens, self.documents = int(self.starts[-1]), int(self.first[-1])

    @classmethod
    def of(cls, documents):
        """A list of arrays of ids, held in memory."""
        ids = np.concatenate([np.zeros(0, np.int32), *documents])
        ends = np.cumsum([len(document) for document in documents])
        return cls([ids], [ends], [len(documents)], [(0, len(documents))])

    @classmethod
    def open(cls, folder, feature="text"):
        """The parts of a prepared folder that are whole, up to the last whole chapter."""
        try:
            parts = json.loads((folder / "index.json").read_text())["parts"]
            complete = True
        except FileNotFoundError:
            marks = (read_mark(folder, number) for number in itertools.count())
            parts, complete = list(itertools.takewhile(bool, marks)), False
        digest = ""
        chapters, tokens, start, stop, shards, waiting = [], 0, 0, 0, [], []
        for number, part in enumerate(parts):
            tokens, stop = tokens + part["tokens"], stop + part["documents"]
            waiting += part["shards"]
            if tokens >= CHAPTER_TOKENS or (complete and number == len(parts) - 1):
                chapters.append((start, stop))
                digest = digest or str(zlib.crc32(str([s["crc32"] for s in waiting]).encode()))
                shards, waiting, tokens, start = shards + waiting, [], 0, stop

        def load(shard, kind):
            path = folder / f"{shard['name']}.{feature}.{kind}.npy"
            if path.stat().st_size < 1 << 20:  # a mapping would keep a file open
                return np.load(path)
            return np.load(path, mmap_mode="r").view(np.ndarray)  # faster to index

        return cls([load(shard, "ids") for shard in shards],
                   [load(shard, "ends") for shard in shards],
                   [shard["documents"] for shard in shards], chapters, digest, complete)

    def read(self, start, stop):
        """Tokens start to stop of the stream, across shards."""
        pieces = []
        while start < stop:
            shard = np.searchsorted(self.starts, start, "right") - 1
            end = min(stop, self.starts[shard + 1])
            pieces.append(self.ids[shard][start - self.starts[shard] : end - self.starts[shard]])
            start = end
        return pieces[0] if len(pieces) == 1 else np.concatenate([np.zeros(0, np.int32), *pieces])

    def copy(self, starts, lengths, out, places):
        """Runs of the stream to their places in `out`, which rise; no run crosses a shard."""
        shards = np.searchsorted(self.starts, starts, "right") - 1
        starts = starts - self.starts[shards]
        for shard in present(shards):
            ids, here = self.ids[shard], shards == shard
            start, length, place = starts[here], lengths[here], places[here]
            if len(start) * 256 < len(out):  # few: a plain loop
                for a, n, b in zip(start.tolist(), length.tolist(), place.tolist()):
                    out[b : b + n] = ids[a : a + n]
                continue
            gaps = np.append(place[1:], len(out)) - place - length
            index = alternate(start - place, 0 * place, length, gaps)
            index += np.arange(place[0], len(out))
            np.copyto(out[place[0] :], ids.take(index, mode="clip"), where=alternate(
                np.ones(len(place), bool), np.zeros(len(place), bool), length, gaps))

    def bounds(self, documents):
        """Numbers of documents -> where in the stream each begins, and its length."""
        starts, lengths = np.zeros((2, len(documents)), int)
        shards = np.searchsorted(self.first, documents, "right") - 1
        for shard in present(shards):
            here = slice(None) if len(self.ids) == 1 else shards == shard
            number, ends = documents[here] - self.first[shard], self.ends[shard]
            begin = np.where(number > 0, ends[number - 1], 0)
            starts[here], lengths[here] = begin + self.starts[shard], ends[number] - begin
        return starts, lengths

    def document_start(self, document):
        """Where in the stream a document begins, or the last one ends."""
        return int(self.bounds(np.array([document]))[0][0]) if document < self.documents else (
            self.tokens)


class RandomTokens:
    """The source random: endless uniformly random ids, for benchmarks."""

    tokens, digest = 1 << 40, "random"

    def __init__(self, size, seed):
        self.size, self.seed = size, seed

    def read(self, start, stop):
        bits = random_bits(self.seed, np.arange(start, stop))
        return (3 + bits % (self.size - 3)).astype(np.int32)


# ---- span corruption -----------------------------------------------------------------------------
# Raffel et al. 2020, section 3.1.4. About 15 % of the tokens are removed in spans of 3 on average.
# Each span leaves one sentinel in the inputs; the targets are the sentinels with what they hide:
#
#     raw      Thank you for inviting me to your party last week
#     inputs   Thank you <extra_id_0> me to your party <extra_id_1> </s>
#     targets  <extra_id_0> for inviting <extra_id_1> last week </s>


def noise_counts(length, cfg):
    """Raw tokens -> (tokens removed, spans they are removed in), rounded as in t5, half to even."""
    noise = int(np.round(np.float32(length) * np.float32(cfg.noise_density)))
    noise = min(max(noise, 1), length - 1)
    return noise, min(max(1, round(noise / cfg.mean_span_length)), length - noise)


def raw_length(cfg):
    """How many raw tokens give at most `inputs_length` inputs: the largest, 568 for 512."""

    def inputs_of(length):
        noise, spans = noise_counts(length, cfg)
        return length - noise + spans + 1

    if inputs_of(2) > cfg.inputs_length:
        raise UserError(f"--data.inputs_length {cfg.inputs_length} is too short for spans, "
                        f"set {inputs_of(2)} or more.")
    length = 2
    while inputs_of(length + 1) <= cfg.inputs_length:
        length += 1
    return length


def compositions(total, parts, keys):
    """For each key one way to write `total` as a sum of `parts` positive numbers: [N, parts].

    All ways are equally likely. The parts - 1 cut points are a random subset of the total - 1 gaps:
    the first draws of a Fisher-Yates shuffle, done for all N rows at once.
    """
    rows, cuts = len(keys), parts - 1
    small = np.min_scalar_type(total)  # a quarter of the memory traffic of int32, or half
    gaps = np.repeat(np.arange(1, total, dtype=small), rows)  # [total - 1, N], flat
    draw = np.arange(cuts, dtype=np.uint64)[:, None]
    uniform = random_bits(keys, draw) >> np.uint64(32)
    among = draw + (uniform * (np.uint64(total - 1) - draw) >> np.uint64(32))
    among = (among * np.uint64(rows) + np.arange(rows, dtype=np.uint64)).astype(np.intp)
    points = np.empty((cuts + 2, rows), small)
    points[0], points[-1] = 0, total
    for k in range(cuts):
        points[k + 1] = gaps[among[k]]
        gaps[among[k]] = gaps[k * rows : (k + 1) * rows]
    return np.diff(np.sort(np.ascontiguousarray(points.T))).astype(np.int32)


def take_runs(tokens, starts, lengths, slab=64):
    """Join runs of each row: tokens [N, n], starts and lengths [N, K] -> [N, sum of lengths].

    The index is made for `slab` rows at a time: twice as fast as one that leaves the cache.
    """
    ends = np.cumsum(lengths, axis=1, dtype=np.int32)
    width = ends[0, -1]
    shift = starts - (ends - lengths)
    row = np.arange(slab, dtype=np.int32)[:, None] * tokens.shape[1]
    place = row + np.arange(width, dtype=np.int32)
    runs = np.empty((len(tokens), width), tokens.dtype)
    for i in range(0, len(tokens), slab):
        index = np.repeat(shift[i : i + slab].ravel(), lengths[i : i + slab].ravel())
        index = index.reshape(-1, width)
        index += place[: len(index)]
        tokens[i : i + slab].ravel().take(index, mode="clip", out=runs[i : i + slab])
    return runs  # mode "clip" is the fastest; no index is outside


def span_corruption(tokens, keys, sentinel, cfg):
    """Remove spans: tokens [N, n], keys [N] -> inputs [N, ...], targets [N, ...], int32, with EOS.

    sentinel: id of <extra_id_0>; the next spans get the ids below it. Row i is a function of
    tokens[i] and keys[i] alone. A row begins with clean text and ends with a removed span, and
    there is no sentinel after the last one (t5/data/preprocessors.py, random_spans_noise_mask).
    """
    rows, length = tokens.shape
    noise, spans = noise_counts(length, cfg)
    removed = compositions(noise, spans, random_bits(keys, 0))  # [N, spans] tokens of each span
    clean = compositions(length - noise, spans, random_bits(keys, 1))  # and of the text before it
    span_ends = np.cumsum(clean + removed, axis=1, dtype=np.int32)
    # Every run is taken with one token more, whose place the sentinel gets: in the inputs the token
    # after the clean text, in the targets the token before the removed span.
    inputs = np.empty((rows, length - noise + spans + 1), np.int32)
    targets = np.empty((rows, noise + spans + 1), np.int32)
    inputs[:, :-1] = take_runs(tokens, span_ends - removed - clean, clean + 1)
    targets[:, :-1] = take_runs(tokens, span_ends - removed - 1, removed + 1)
    ids = np.tile(sentinel - np.arange(spans, dtype=np.int32), rows)
    for side, places in ((inputs, np.cumsum(clean + 1, axis=1) - 1),
                         (targets, np.cumsum(removed + 1, axis=1) - removed - 1)):
        side.ravel()[(places + side.shape[1] * np.arange(rows)[:, None]).ravel()] = ids
    inputs[:, -1] = targets[:, -1] = EOS
    return inputs, targets


# ---- examples ------------------------------------------------------------------------------------
# What a task makes of a corpus. Examples have numbers; `sizes` and `write` work on many at once,
# given by their numbers and the epochs they are seen in.

ORDER, NOISE, PACKING, MIXING, PREFIX = range(1, 6)  # the first part of the key of random bits


class Examples:
    """The examples of a task: how many there are, in chapters, and their order in an epoch."""

    def __init__(self, task, cfg, counts):
        self.task, self.cfg, self.seed = task, cfg.data, cfg.train.seed
        self.limits = cfg.data.inputs_length, cfg.data.targets_length
        self.eos = (task.inputs_eos, True)
        self.first = np.cumsum([0, *counts])
        self.count = int(self.first[-1])

    def locate(self, draws):
        """Numbers of draws -> (epoch, example). An epoch has every example, in an order of its own.

        Large corpora are gone through chapter by chapter, in a random order within each.
        """
        epochs, examples = np.divmod(draws, max(self.count, 1))
        chapters = np.searchsorted(self.first, examples, "right") - 1
        for chapter in present(chapters):
            here, first = chapters == chapter, self.first[chapter]
            size = int(self.first[chapter + 1] - first)
            examples[here] = first + permute(
                examples[here] - first, size, ORDER, self.seed, epochs[here])
        return epochs, examples

    def keep(self, side, lengths):
        """Tokens of inputs (side 0) or targets (1) -> (tokens that stay, size with EOS)."""
        eos, limit = self.eos[side], self.limits[side]
        kept = np.minimum(lengths, limit - (eos and self.task.eos_after_trim))
        return kept, np.minimum(kept + eos, limit)


class SpanExamples(Examples):
    """A corpus cut into rows of raw tokens, which span corruption makes into inputs and targets.

    The last row may be shorter; a single token at the end, which cannot be corrupted, is left out.
    spans: [start, stop) of each chapter in the corpus's stream.
    """

    packs = False  # they fill their rows

    def __init__(self, task, cfg, corpus, spans, sentinel):
        self.corpus, self.spans, self.sentinel = corpus, spans, sentinel
        self.length = raw_length(cfg.data)
        sizes = [stop - start for start, stop in spans]
        super().__init__(task, cfg, [-(-n // self.length) - (n % self.length == 1) for n in sizes])
        noise, pieces = noise_counts(self.length, cfg.data)
        if noise + pieces + 1 > cfg.data.targets_length:
            raise UserError(
                f"Span corruption of {cfg.data.inputs_length} inputs makes {noise + pieces + 1} "
                f"targets; set --data.targets_length to {noise + pieces + 1} or more (it is "
                f"{cfg.data.targets_length}).")
        if pieces > SENTINELS:
            raise UserError(
                f"Span corruption of {cfg.data.inputs_length} inputs needs {pieces} sentinels and "
                f"the vocabulary has {SENTINELS}: set --data.inputs_length lower or "
                f"--data.mean_span_length higher.")

    def __str__(self):
        tokens = sum(stop - start for start, stop in self.spans)
        return f"{tokens:,} tokens, {self.count:,} rows of {self.length}"

    def sample(self, most):
        """At most `most` tokens, of which frequencies are taken."""
        start, stop = self.spans[0]
        return self.corpus.read(start, min(stop, start + most))

    def place(self, examples):
        """Where each row of raw tokens begins in the stream, and its length."""
        chapter = np.searchsorted(self.first, examples, "right") - 1
        begin, end = np.array(self.spans)[chapter].T
        starts = begin + (examples - self.first[chapter]) * self.length
        return starts, np.minimum(self.length, end - starts)

    def sizes(self, epochs, examples):
        _, lengths = self.place(examples)
        out = np.empty((2, len(examples)), int)
        for length in present(lengths):
            noise, spans = noise_counts(int(length), self.cfg)
            out[0, lengths == length] = length - noise + spans + self.task.inputs_eos
            out[1, lengths == length] = noise + spans + 1
        return out

    def write(self, sides, places, epochs, examples):
        """Write inputs and targets into flat arrays, each example at its place."""
        keys = random_bits(NOISE, self.seed, epochs, examples)
        starts, lengths = self.place(examples)
        for length in present(lengths):
            here = np.flatnonzero(lengths == length)
            raw = np.stack([self.corpus.read(int(start), int(start + length))
                            for start in starts[here]])
            made = span_corruption(raw, keys[here], self.sentinel, self.cfg)
            for out, place, tokens, eos in zip(sides, places, made, self.eos):
                tokens = tokens if eos else tokens[:, :-1]
                out[place[here, None] + np.arange(tokens.shape[1])] = tokens


class RunExamples(Examples):
    """Examples whose inputs and targets are runs of a corpus; `runs_of` says which."""

    packs = True

    def sample(self, most):
        """At most `most` tokens, of the targets of pairs, of which frequencies are taken."""
        start, stop = map(self.corpus.document_start, self.chapters[0])
        return self.corpus.read(start, min(stop, start + most))

    def cut(self):
        """How many inputs and how many targets are longer than their limits."""
        counts = np.zeros(2, int)
        for start in range(0, self.count, 1 << 20):
            examples = np.arange(start, min(start + (1 << 20), self.count))
            for side, (_, _, lengths) in enumerate(self.runs_of(0 * examples, examples)):
                counts[side] += (lengths > self.keep(side, lengths)[0]).sum()
        return counts

    def sizes(self, epochs, examples):
        return np.stack([self.keep(side, lengths)[1] for side, (_, _, lengths)
                         in enumerate(self.runs_of(epochs, examples))])

    def write(self, sides, places, epochs, examples):
        for side, (corpus, starts, lengths) in enumerate(self.runs_of(epochs, examples)):
            kept, size = self.keep(side, lengths)
            corpus.copy(starts, kept, sides[side], places[side])
            sides[side][(places[side] + kept)[size > kept]] = EOS


class PairExamples(RunExamples):
    """Inputs with targets. chapters: [start, stop) of each in the corpora's documents."""

    def __init__(self, task, cfg, corpora, chapters):
        super().__init__(task, cfg, [stop - start for start, stop in chapters])
        self.corpora, self.chapters, self.corpus = corpora, chapters, corpora[1]

    def __str__(self):
        return f"{self.count:,} examples"

    def documents(self, examples):
        chapter = np.searchsorted(self.first, examples, "right") - 1
        return np.array(self.chapters)[:, 0][chapter] + examples - self.first[chapter]

    def runs_of(self, epochs, examples):
        documents = self.documents(examples)
        return [(corpus, *corpus.bounds(documents)) for corpus in self.corpora]


class PrefixExamples(RunExamples):
    """Prefix language modelling: a document's pieces, cut in two at random (t5's prefix_lm).

    A piece has at most as many tokens as the inputs; each epoch cuts it elsewhere.
    """

    def __init__(self, task, cfg, corpus, chapters):
        self.length = cfg.data.inputs_length - 1
        pieces = [-(-corpus.bounds(np.arange(*chapter))[1] // self.length) for chapter in chapters]
        super().__init__(task, cfg, [int(some.sum()) for some in pieces])
        self.corpus, self.chapters = corpus, chapters
        self.pieces = np.cumsum(np.concatenate([[0], *pieces]))  # before each document
        self.documents = np.concatenate([np.arange(*chapter) for chapter in chapters])

    def __str__(self):
        return f"{self.count:,} pieces of at most {self.length} tokens"

    def runs_of(self, epochs, examples):
        index = np.searchsorted(self.pieces, examples, "right") - 1
        starts, lengths = self.corpus.bounds(self.documents[index])
        skipped = (examples - self.pieces[index]) * self.length
        starts, lengths = starts + skipped, np.minimum(lengths - skipped, self.length)
        uniform = random_bits(PREFIX, self.seed, epochs, examples) >> np.uint64(32)
        cuts = (uniform * np.maximum(lengths - 1, 0).astype(np.uint64) >> np.uint64(32)).astype(int)
        cuts = np.minimum(1 + cuts, lengths - 1)  # of a single token nothing is the inputs
        return [(self.corpus, starts, cuts), (self.corpus, starts + cuts, lengths - cuts)]


# ---- rows ----------------------------------------------------------------------------------------


def plan_packing(inputs, targets, inputs_limit, targets_limit):
    """Lengths of examples [N], EOS counted -> the row [N] each goes into. Nothing is split or lost.

    One row after the other is filled with the largest example that still fits, where "largest"
    weighs the side of which the row has more room left. Examples wait in a grid of cells by their
    two lengths, exact for short ones and 5 % wide for long ones.
    """
    sides = []
    for limit in (inputs_limit, targets_limit):
        edges = [1]
        while edges[-1] < limit:
            edges.append(min(limit, max(edges[-1] + 1, int(edges[-1] * 1.05))))
        sides.append(np.array(edges))
    cell = np.searchsorted(sides[0], inputs) * len(sides[1]) + np.searchsorted(sides[1], targets)
    order = np.lexsort((inputs + targets, cell))
    bounds = np.searchsorted(cell[order], np.arange(len(sides[0]) * len(sides[1]) + 1))
    waiting, first, end = order.tolist(), bounds[:-1].tolist(), bounds[1:].tolist()
    weights = np.linspace(0, 1, 9)  # of the inputs; -1 marks an empty cell
    grids = [np.add.outer(w * sides[0] / inputs_limit, (1 - w) * sides[1] / targets_limit)
             for w in weights]
    for grid in grids:
        grid[(np.diff(bounds) == 0).reshape(grid.shape)] = -1
    fitting = [np.searchsorted(edges, np.arange(limit + 1), "right").tolist()
               for edges, limit in zip(sides, (inputs_limit, targets_limit))]
    inputs, targets = inputs.tolist(), targets.tolist()
    rows, row, left = np.empty(len(inputs), np.int64), 0, len(inputs)
    while left:
        room, target_room = inputs_limit, targets_limit
        while room and target_room:
            x, y = room / inputs_limit, target_room / targets_limit
            grid = grids[int((0.5 + 0.3 * (x - y) / (x + y)) * 9)]
            view = grid[: fitting[0][room], : fitting[1][target_room]]
            i, j = divmod(int(view.argmax()), view.shape[1])
            if view[i, j] < 0:
                break
            c = i * grid.shape[1] + j
            end[c] -= 1
            example = waiting[end[c]]
            if end[c] == first[c]:
                for grid in grids:
                    grid[i, j] = -1
            rows[example] = row
            room -= inputs[example]
            target_room -= targets[example]
            left -= 1
        row += 1
    return rows


class Rows:
    """The rows of batches: examples of one task or a mixture; in training, several in a row.

    Training goes through positions. In each block of BLOCK positions every task has its part, to
    one example exactly; which position falls to which is random, a pure function of the seed. A
    task's own draws go through its examples epoch by epoch. Packing is planned for each block; the
    plan is kept beside the prepared tokens.
    """

    BLOCK = 1 << 16

    def __init__(self, tasks, rates, cfg, plans=None):
        self.tasks, self.cfg, self.plans = tasks, cfg, plans  # plans: a folder
        self.limits = cfg.data.inputs_length, cfg.data.targets_length
        self.edges = np.cumsum([0, *rates]) / sum(rates)  # each task's part of 0 to 1
        self.packs = cfg.data.pack and any(task.packs for task in tasks)
        self.count = tasks[0].count  # of a validation split
        self.first_block, self.row_starts = 0, [0]  # row with which the blocks begin
        self.drawn = 0, np.zeros(len(tasks), int)  # a block, draws of each task before it
        self.thread, self.ahead, self.kept = ThreadPoolExecutor(1), {}, 4
        self.reads_ahead = self.packs  # planning a block takes a third of a second

    def __str__(self):
        mixed = f"{len(self.tasks)} tasks, " if len(self.tasks) > 1 else ""
        return mixed + "; ".join(str(task) for task in self.tasks[:3]) + (
            "; ..." if len(self.tasks) > 3 else "") + ", packed into rows" * self.packs

    @property
    def digest(self):
        """Changes when the tokens change that a run has begun with."""
        return "-".join(task.corpus.digest for task in self.tasks)

    def sample(self, most):
        """At most about `most` tokens of all tasks, of which frequencies are taken."""
        return np.concatenate([task.sample(most // len(self.tasks)) for task in self.tasks])

    def shares(self, blocks):
        """Numbers of blocks -> where in each block's lot every task begins: [blocks, tasks + 1].

        The edges on a grid that a low-discrepancy sequence shifts from block to block: each task
        gets the next lower or the next higher whole number, and in the long run its rate.
        """
        shift = np.array([int(f"{b:064b}"[::-1], 2) / 2**64 for b in np.atleast_1d(blocks)])
        lots = np.ceil(self.edges * self.BLOCK - shift[:, None]).astype(int)
        lots[:, 0], lots[:, -1] = 0, self.BLOCK
        return lots

    def draw(self, block):
        """A block -> (examples, which of them, epochs, numbers) of its positions."""
        lots = self.shares(block)[0]
        start, drawn = self.drawn if self.drawn[0] <= block else (0, 0 * self.drawn[1])
        drawn = drawn + np.diff(self.shares(np.arange(start, block)), axis=1).sum(0)
        self.drawn = block, drawn
        lot = permute(np.arange(self.BLOCK), self.BLOCK, MIXING, self.cfg.train.seed, block)
        task = np.searchsorted(lots, lot, "right") - 1
        epochs, examples = np.empty((2, self.BLOCK), int)
        for number in present(task):
            here = np.flatnonzero(task == number)
            epochs[here], examples[here] = self.tasks[number].locate(
                drawn[number] + np.arange(len(here)))
        return self.tasks, task, epochs, examples

    def read_block(self, block):
        """A block, row after row: (examples, which of them, epochs, numbers, ends of the rows)."""
        pool, task, epochs, examples = self.draw(block)
        if not self.packs:
            return pool, task, epochs, examples, np.arange(1, self.BLOCK + 1)
        sizes = np.empty((2, self.BLOCK), int)
        for number in present(task):
            here = task == number
            sizes[:, here] = pool[number].sizes(epochs[here], examples[here])
        seed = self.cfg.train.seed
        key = "-".join(map(str, (block, *self.limits, seed, zlib.crc32(sizes))))
        path = self.plans and self.plans / f"{key}.npz"
        if path and path.exists():
            with np.load(path) as plan:
                order, ends = plan["order"], plan["ends"]
        else:
            row = plan_packing(*sizes, *self.limits)
            row = permute(row, int(row.max()) + 1, PACKING, seed, block)
            order, ends = np.argsort(row, kind="stable"), np.cumsum(np.bincount(row))
            if path:
                out = io.BytesIO()
                np.savez(out, order=order.astype(np.uint16), ends=ends)
                configs.write_file(path, out.getbuffer())
        return pool, task[order], epochs[order], examples[order], ends

    def block(self, block):
        """What read_block returns; if it takes long, the next one is read in the background."""
        for number in (block, block + 1) if self.reads_ahead else (block,):
            if number not in self.ahead:
                self.ahead[number] = self.thread.submit(self.read_block, number)
        found = self.ahead[block].result()
        if self.kept:
            for old in sorted(self.ahead, key=lambda number: abs(number - block))[self.kept :]:
                del self.ahead[old]
        return found

    def block_of(self, rows):
        """Numbers of rows -> the blocks they are in; packed blocks differ in their rows."""
        if not self.packs:
            return rows // self.BLOCK
        while self.row_starts[-1] <= np.max(rows):
            ends = self.block(self.first_block + len(self.row_starts) - 1)[-1]
            self.row_starts.append(self.row_starts[-1] + len(ends))
        return np.searchsorted(self.row_starts, rows, "right") - 1 + self.first_block

    def members(self, numbers, training):
        """Numbers of rows -> (examples, which of them, epochs, numbers, rows, segments)."""
        if not training:
            row = np.flatnonzero(numbers < self.count)
            zero = np.zeros(len(row), int)
            return self.tasks, zero, zero, numbers[row], row, zero + 1
        blocks = self.block_of(numbers)
        pools, found = [], []
        for block in np.unique(blocks):
            rows = np.flatnonzero(blocks == block)
            pool, *members, ends = self.block(int(block))
            inside = numbers[rows] - (self.row_starts[block - self.first_block] if self.packs
                                      else block * self.BLOCK)
            stop = ends[inside]
            size = stop - np.where(inside > 0, ends[inside - 1], 0)
            which, *rest = (part[runs(stop - size, size)] for part in members)
            same = pools == list(pool)  # the prepared tasks are the same in every block
            found.append((which + (0 if same else len(pools)), *rest, np.repeat(rows, size),
                          runs(np.ones(len(size), int), size)))
            pools = pools if same else pools + list(pool)
        which, epochs, examples, rows, segments = map(np.concatenate, zip(*found))
        if len(found) > 1:
            order = np.argsort(rows, kind="stable")
            which, epochs, examples, rows, segments = (
                part[order] for part in (which, epochs, examples, rows, segments))
        return pools, which, epochs, examples, rows, segments

    def make(self, numbers, training):
        """Numbers of rows, counted through all epochs -> inputs, targets and their segments.

        Otherwise than in training the order is that of the corpus, the noise always the same, one
        example has a row, and past the end the rows are padding.
        """
        pools, which, epochs, examples, rows, segments = self.members(
            np.asarray(numbers), training)
        groups = [(pools[k], slice(None) if len(pools) == 1 else which == k)
                  for k in present(which)]
        sizes = np.zeros((2, len(rows)), int)
        for pool, here in groups:
            sizes[:, here] = pool.sizes(epochs[here], examples[here])
        sides = [np.zeros(len(numbers) * limit, np.int32) for limit in self.limits]
        marks, places = [], []
        opens = segments == 1  # the first of its row
        for size, limit in zip(sizes, self.limits):
            place = np.cumsum(size) - size
            place += rows * limit - place[opens][np.cumsum(opens) - 1]
            gaps = np.append(place, len(numbers) * limit)[1:] - place - size
            mark = np.zeros(len(numbers) * limit, np.int32)
            mark[len(mark) - (size + gaps).sum() :] = alternate(
                segments, 0 * segments, size, gaps)
            marks.append(mark)
            places.append(place)
        for pool, here in groups:
            pool.write(sides, [place[here] for place in places], epochs[here], examples[here])
        return [part.reshape(-1, limit)
                for parts in (sides, marks) for part, limit in zip(parts, self.limits)]


# ---- streaming -----------------------------------------------------------------------------------


class Reader:
    """Tokenized examples of a task in the order of its source, again and again.

    position: the pass through the source, the part, the example's number there, which one of those
    the task makes of it, and how many of its tokens have been given away: from there on it reads.
    A source without splits holds out one example in a hundred.
    """

    def __init__(self, name, split, tokenizer, cfg):
        self.split, self.tokenizer, self.cfg = split, tokenizer, cfg
        self.task, self.hold_out = find_source(name, cfg, split)
        self.bad = Complaints(cfg.data.on_error)
        self.parts = open_source(
            self.task.source, "train" if self.hold_out else split, cfg.data)
        self.packs = self.task.objective != "span_corruption"
        self.count = 0
        self.seek([0, 0, 0, 0, 0])

    def __str__(self):
        return f"{self.task.source} streamed"

    def seek(self, position):
        self.position, self.pending, self.stream = list(position), None, self.read()

    def read(self):
        """(key, ids) from the position on; key: the position but for its last number."""
        turn, first, *start, _ = self.position
        while True:
            found = False
            for part in range(first, len(self.parts)):
                numbered = self.texts(turn, part, tuple(start))
                for batch in encode_ahead(numbered, self.tokenizer, 256):
                    for key, ids in batch:
                        if any(map(len, ids)):
                            found = True
                            yield key, ids
                start = 0, 0
            if turn == 0 and self.bad.count:
                configs.note(f"{self.task.source}: {self.bad.count:,} skipped in the first pass")
            if self.split != "train" or not (found or any(self.position)):
                return
            turn, first = turn + 1, 0

    def texts(self, turn, part, start):
        last = made = -1
        for number, texts in read_texts(self.parts[part], self.bad, self.task, self.cfg.data,
                                        self.tokenizer.size):
            last, made = number, made + 1 if number == last else 0
            held_out = self.hold_out and (part + number) % 100 == 0
            if (number, made) >= start and held_out == (self.hold_out and self.split != "train"):
                yield (turn, part, number, made), texts

    def take(self, count):
        """The next `count` examples (fewer at the end of a held-out split) -> Examples."""
        pairs, held, have = self.task.objective == "text_to_text", [], 0
        spans = self.task.objective == "span_corruption"
        unit = raw_length(self.cfg.data) if spans else self.cfg.data.inputs_length - 1
        while have < count * (unit if spans else 1):
            found = self.pending or next(self.stream, None)
            self.pending = None
            if not found and self.split == "train":
                raise UserError(f"{self.task.source} holds no text to train on"
                                + (", but for the first document, which is held out."
                                   if self.hold_out else "."))
            if not found:
                break
            key, ids = found
            used = 0
            if not pairs:
                done = self.position[4] if list(key) == self.position[:4] else 0
                ids = ids[0][done:]
                amount = len(ids) if spans else -(-len(ids) // unit)
                left = count * (unit if spans else 1) - have
                if amount > left:  # the rest of the document is for the next time
                    used = done + left * (1 if spans else unit)
                    self.pending, ids, amount = found, ids[: used - done], left
            held.append(ids)
            have += amount if not pairs else 1
            self.position = [*key, used] if used else [*key[:3], key[3] + 1, 0]
        if pairs:
            corpora = [Corpus.of([ids[side] for ids in held]) for side in range(2)]
        else:
            corpora = [Corpus.of(held)]
        return make_examples(self.task, self.cfg, corpora, corpora[0].chapters,
                             self.tokenizer.size - 1)


class StreamedRows(Rows):
    """Rows of sources that are tokenized while training goes on; nothing is written to disk.

    Examples come in the order of their sources, shuffled within blocks; the next block is read in
    the background. All processes read everything and make their own rows of it. What a run needs to
    go on is where the readers stood at the beginning of a block.
    """

    BLOCK = 1 << 13

    def __init__(self, readers, rates, cfg):
        super().__init__(readers, rates, cfg)
        self.reads_ahead = True
        self.kept = None  # no block can be read again; make() lets them go
        self.marks = {}  # where the readers stood at the beginning of each block

    @property
    def digest(self):
        stamps = [[part.name, part.stamp] for reader in self.tasks for part in reader.parts]
        return f"streamed-{zlib.crc32(json.dumps(stamps).encode())}"

    def make(self, numbers, training):
        made = super().make(numbers, training)
        first = self.block_of(np.min(numbers))
        for old in [block for block in self.ahead if block < first]:
            del self.ahead[old]
        return made

    def draw(self, block):
        self.marks[block] = [reader.position for reader in self.tasks]
        lots = self.shares(block)[0]
        pool = [reader.take(int(n)) for reader, n in zip(self.tasks, np.diff(lots))]
        if block == self.first_block:
            report_cut(pool, "the first block")
        lot = permute(np.arange(self.BLOCK), self.BLOCK, MIXING, self.cfg.train.seed, block)
        task = np.searchsorted(lots, lot, "right") - 1
        return pool, task, np.full(self.BLOCK, block), lot - lots[task]

    def sample(self, most):
        """The targets of the first block."""
        pool = self.block(self.first_block)[0]
        return np.concatenate([task.sample(most // len(pool)) for task in pool])

    def state(self, row):
        """What a run needs to go on with this row: a value for JSON."""
        block = int(self.block_of(row))
        if block not in self.marks:
            self.block(block)
        start = self.row_starts[block - self.first_block] if self.packs else block * self.BLOCK
        return {"block": block, "row": int(start), "readers": self.marks[block]}

    def seek(self, state):
        """Go on where `state` was taken."""
        self.ahead, self.marks = {}, {}
        self.first_block, self.row_starts = state["block"], [state["row"]]
        for reader, position in zip(self.tasks, state["readers"]):
            reader.seek(position)


# ---- batches -------------------------------------------------------------------------------------


def make_examples(task, cfg, corpora, chapters, sentinel):
    """A task's corpora, and chapters [start, stop) of their documents -> its Examples."""
    if task.objective == "text_to_text":
        examples = PairExamples(task, cfg, corpora, chapters)
    elif task.objective == "prefix_lm":
        examples = PrefixExamples(task, cfg, corpora[0], chapters)
    else:
        spans = [tuple(map(corpora[0].document_start, chapter)) for chapter in chapters]
        examples = SpanExamples(task, cfg, corpora[0], spans, sentinel)
    examples.chapters = chapters
    examples.size = sum(stop - start for start, stop in chapters)  # in the source's documents
    return examples


def find_source(name, cfg, split):
    """A task's name -> (Task, whether its validation split is held out of the training split)."""
    task = find_task(name, cfg.data)
    if split == "validation" and cfg.data.validation_source:
        return task._replace(source=cfg.data.validation_source), False
    if not has_splits(task.source):
        if split not in ("train", "validation"):
            raise NoSplit(f"{task.source} has no splits, so no {split} split.")
        return task, not cfg.data.validation_source
    if split not in task.splits:
        raise NoSplit(f"{name} has no {split} split.")
    return task, False


def open_examples(name, cfg, split, tokenizer):
    """A task's Examples in a split, prepared as far as is missing and the run needs."""
    task, shared = find_source(name, cfg, split)
    needed, t = ENDLESS, cfg.train
    if split == "validation" and shared:
        needed = 1  # the first chapter
    elif task.objective != "text_to_text":
        row = raw_length(cfg.data) if task.objective == "span_corruption" else (
            2 * cfg.data.inputs_length + cfg.data.targets_length)  # of prefix_lm at most
        # whole blocks are drawn, and 1 % may be held out
        needed = ((t.steps - t.start_step) * t.batch_size + 2 * Rows.BLOCK) * row * 1.02
    folder = prepare(task, "train" if shared else split, tokenizer, cfg.data, needed)
    corpora = [Corpus.open(folder, feature) for feature in features_of(task)]
    chapters = corpora[0].chapters
    if shared and chapters:  # the last 1 % of the documents of the first chapter
        (start, stop), *rest = chapters
        held_out = stop - max(1, (stop - start) // 100)
        chapters = [(start, held_out), *rest] if split == "train" else [(held_out, stop)]
    examples = make_examples(task, cfg, corpora, chapters, tokenizer.size - 1)
    if not examples.count:
        raise UserError(f"The {split} split of {task.source} is empty: give it two documents or "
                        f"more (text:FILE:lines makes one of each line).")
    return examples


def report_cut(tasks, split):
    """Say how many inputs and targets of RunExamples do not fit into a row."""
    tasks = [task for task in tasks if isinstance(task, RunExamples)]
    cut = sum([task.cut() for task in tasks], np.zeros(2, int))
    if any(cut):
        limits = tasks[0].limits
        configs.note(f"{split}: {cut[0]:,} inputs and {cut[1]:,} targets of "
                     f"{sum(task.count for task in tasks):,} are longer than {limits[0]} and "
                     f"{limits[1]} tokens and are cut")


@functools.lru_cache(maxsize=1024)
def open_rows(cfg, split):
    """Config, "train" or "validation" -> (rows, id of <extra_id_0>). Prepares what is missing."""
    if cfg.data.source == "random:":
        size = cfg.model.vocab_size
        tokens = RandomTokens(size - SENTINELS, cfg.train.seed)
        spans = SpanExamples(Task(), cfg, tokens, [(0, tokens.tokens)], size - 1)
        return Rows([spans], [1.0], cfg), size - 1
    check_tasks(cfg.data)
    tokenizer = load_vocabulary(cfg.data)
    size = tokenizer.size
    if not size <= cfg.model.vocab_size < size + 128:
        raise UserError(
            f"The vocabulary has {size} ids (with its sentinels), the model "
            f"{cfg.model.vocab_size}: set --model.vocab_size {-(-size // 128) * 128}.")
    if split != "train":
        if cfg.data.task in MIXTURES:
            raise UserError(f"{cfg.data.task} is a mixture: its tasks are evaluated one by one.")
        if cfg.data.streaming:
            reader = Reader(cfg.data.task, split, tokenizer, cfg)
            examples = reader.take((cfg.train.eval_batches or math.inf) * cfg.train.batch_size)
            if not examples.count:
                raise UserError(f"{reader.task.source} has no held-out examples: name a "
                                f"--data.validation_source, or set --train.eval_every 0.")
        else:
            examples = open_examples(cfg.data.task, cfg, split, tokenizer)
        report_cut([examples], f"{cfg.data.task}, {split}")
        return Rows([examples], [1.0], cfg), size - 1

    def size_of(name):
        examples = open_examples(name, cfg, "train", tokenizer)
        return examples.size if examples.corpus.complete else math.inf

    rates = {name: rate for name, rate in mixture_rates(cfg.data.task, cfg.data, size_of).items()
             if rate}
    if cfg.data.streaming:
        readers = [Reader(name, split, tokenizer, cfg) for name in rates]
        return StreamedRows(readers, list(rates.values()), cfg), size - 1
    tasks = [open_examples(name, cfg, split, tokenizer) for name in rates]
    report_cut(tasks, split)
    plans = Path(cfg.data.prepared_dir, "plans")
    return Rows(tasks, list(rates.values()), cfg, plans), size - 1


def with_vocabulary(cfg, run_dir):
    """Config of a run -> the same with the vocabulary that the run directory keeps."""
    return replace(cfg, data=replace(cfg.data, vocab=os.path.join(run_dir, "spiece.model")))


def read_task(name, split, cfg, bad):
    """The formatted examples of a task's split: (where, dict), as they were before tokenizing.

    What a source without splits holds out are the same examples as in batches.
    """
    task, shared = find_source(name, cfg, split)
    parts = open_source(task.source, "train" if shared else split, cfg.data)
    size = load_vocabulary(cfg.data).size  # without it other examples would be left out
    found = ((part, number, example) for part in range(len(parts))
             for number, example, _ in read_fitting(parts[part], bad, task, cfg.data, size))
    if shared and cfg.data.streaming:
        found = (one for one in found if (sum(one[:2]) % 100 == 0) == (split != "train"))
    elif shared:
        one = replace(cfg, data=replace(cfg.data, task=name))
        held_out = open_examples(name, one, "validation", load_vocabulary(cfg.data)).chapters[0]
        numbered = enumerate(itertools.islice(found, held_out[1]) if split != "train" else found)
        found = (one for i, one in numbered if (i in range(*held_out)) == (split != "train"))
    return ((f"{name} {split} {parts[part].name} {number}", example)
            for part, number, example in found)


def evaluation_of(task, cfg):
    """A task's name, Config of a run -> the Config that evaluates this task by itself.

    A source that has no splits and is not trained on is held out whole.
    """
    if task in MIXTURES:
        raise UserError(f"{task} is a mixture: name one of its tasks.")
    if task == cfg.data.task:
        return cfg
    trained = {find_task(name, cfg.data).source for name, rate
               in mixture_rates(cfg.data.task, cfg.data).items() if rate}
    source = find_task(task, cfg.data).source
    whole = source not in trained and not has_splits(source)
    return replace(cfg, data=replace(
        cfg.data, task=task, eval_tasks="", validation_source=source if whole else "",
        source="" if task in TASKS else p3_root(cfg.data) and cfg.data.source))


def evaluations(cfg, split="validation"):
    """Config -> {task: its Config}: what is evaluated while training, each task by itself.

    Those of data.eval_tasks, or else all of data.task; tasks without a validation split are left
    out, unless there is no other.
    """
    names = [name.strip() for name in (cfg.data.eval_tasks or cfg.data.task).split(",")]
    found, without = {}, []
    for task in [task for name in names for task in mixture_rates(name, cfg.data)]:
        one = evaluation_of(task, cfg)
        try:
            next(iter(read_task(task, split, one, Complaints("skip"))), None)
            found[task] = one
        except NoSplit as error:
            without.append(str(error))
    if not found:
        raise UserError(" ".join(without))
    if without:
        configs.note(f"not evaluated: {' '.join(without)}")
    return found


def number_of_batches(cfg, split):
    """Batches of one pass over a split; the last may be partly padding."""
    return -(-open_rows(cfg, split)[0].count // cfg.train.batch_size)


def make_batch(cfg, split, step, rows=None):
    """The batch of a step, a pure function: Batch of [B, S] and [B, T] int32 arrays.

    split: "train" goes through the examples in a new random order each epoch; "validation" in their
    own, each once, and past the end the rows are padding.
    rows: which of the batch's rows to make, by default all; a process asks for those it holds.
    """
    batch_rows = np.arange(cfg.train.batch_size) if rows is None else np.asarray(rows)
    numbers = step * cfg.train.batch_size + batch_rows
    return complete_batch(*open_rows(cfg, split)[0].make(numbers, split == "train"))


def complete_batch(inputs, targets, input_segments, target_segments):
    """Rows of tokens and their segments -> Batch, with the decoder's inputs."""
    decoder_inputs = np.zeros_like(targets)
    decoder_inputs[:, 1:] = targets[:, :-1]
    target_segments = target_segments.astype(np.int32)
    decoder_inputs[:, 1:][target_segments[:, 1:] != target_segments[:, :-1]] = PAD
    return Batch(inputs, input_segments.astype(np.int32), decoder_inputs, targets, target_segments)


def empty_batch(cfg, rows):
    """DataConfig, number of rows -> Batch of padding."""
    inputs, targets = (np.zeros((rows, length), np.int32)
                       for length in (cfg.inputs_length, cfg.targets_length))
    return complete_batch(inputs, targets, inputs, targets)


def stream_state(cfg, step):
    """Where the readers of a streamed run stand at a step, for its checkpoint; else None."""
    if cfg.data.streaming and cfg.data.source != "random:":
        return open_rows(cfg, "train")[0].state(step * cfg.train.batch_size)
    return None


def seek_stream(cfg, state):
    """Let the readers of a streamed run go on where `state` was taken."""
    open_rows(cfg, "train")[0].seek(state)


def unigram_loss(cfg, batches, evaluated=None):
    """Nats per content token of the first held-out batches under the training tokens' frequencies.

    Content is all but sentinels and EOS. It is what a model reaches that ignores the context, so
    the number to beat. At most 10 million training tokens are counted. evaluated: the Config of the
    held-out task, if it is not cfg.
    """
    rows, sentinel = open_rows(cfg, "train")
    counts = np.bincount(rows.sample(10_000_000), minlength=cfg.model.vocab_size) + 1.0
    targets = np.concatenate([make_batch(evaluated or cfg, "validation", i).targets.ravel()
                              for i in range(batches)])
    content = targets[(targets > EOS) & (targets <= sentinel - SENTINELS)]
    return float(np.mean(np.log(counts.sum()) - np.log(counts[content]))) if len(content) else 0.0


# ---- what the screen shows -----------------------------------------------------------------------


def objectives(cfg):
    """DataConfig -> the objectives of its task, or of the tasks of its mixture."""
    if cfg.source == "random:":
        return {"span_corruption"}
    return {find_task(name, cfg).objective for name in mixture_rates(cfg.task, cfg)}


def describe_rows(cfg):
    """DataConfig -> what a row is; of span corruption, how raw tokens become inputs and targets."""
    if objectives(cfg) != {"span_corruption"}:
        return (f"rows     {cfg.inputs_length} inputs and {cfg.targets_length} targets, "
                + ("several examples packed into a row" if cfg.pack else "an example each"))
    raw = raw_length(cfg)
    noise, spans = noise_counts(raw, cfg)
    inputs, targets = raw - noise + spans + 1, noise + spans + 1
    return (f"spans    {raw} raw tokens, {noise} of them removed in {spans} spans: {raw - noise} "
            f"kept + {spans} sentinels + EOS = {inputs} inputs, {noise} + {spans} + EOS = "
            f"{targets} targets")


def show_row(ids, segments, tokenizer):
    """One row -> text: sentinels in reverse, EOS and unknown pieces faint, segments in colours."""
    def style(pair):
        i, segment = pair
        kind = "" if tokenizer is None else (
            "7" if i >= tokenizer.size - tokenizer.sentinels else "2" if i <= UNK else "")
        colour = str(31 + segment % 6) if segments.max() > 1 else ""
        return segment, ";".join(filter(None, (kind, colour)))

    real = [pair for pair in zip(ids.tolist(), segments.tolist()) if pair[1]]
    text = ""
    for (_, codes), pairs in itertools.groupby(real, style):
        ids = [i for i, _ in pairs]
        part = " ".join(map(str, ["", *ids])) if tokenizer is None else tokenizer.pieces(ids)
        text += f"\x1b[{codes}m{part}\x1b[0m" if codes and sys.stdout.isatty() else part
    return text.strip()


def tokens_per_second(work, tokens, seconds=1.0):
    """Run `work` for about a second -> how many of its `tokens` it does in one."""
    work(0)
    start, done = time.perf_counter(), 0
    while (spent := time.perf_counter() - start) < seconds:
        done += 1
        work(done)
    return done * tokens / spent


def show(cfg, count):
    """Print `count` rows of the first training batch, and how fast batches are made."""
    rows, sentinel = open_rows(cfg, "train")
    tokenizer = None if cfg.data.source == "random:" else load_vocabulary(cfg.data)
    print(f"task     {cfg.data.task}: {rows}\n{describe_rows(cfg.data)}")
    batch = make_batch(cfg, "train", 0)
    sides = (("inputs", batch.inputs, batch.input_segments),
             ("targets", batch.targets, batch.target_segments))
    for i in range(min(count, cfg.train.batch_size)):
        for side, ids, segments in sides:
            lengths = np.bincount(segments[i])[1:]
            print(f"\nrow {i}, {side}: {' + '.join(map(str, lengths))} of {ids.shape[1]} tokens\n"
                  f"  {show_row(ids[i], segments[i], tokenizer)}")
    real = [(segments > 0).sum() for _, _, segments in sides]
    rate = tokens_per_second(lambda step: make_batch(cfg, "train", step), sum(real))
    print(f"\nfilled   {real[0] / batch.inputs.size:.1%} of the inputs, "
          f"{real[1] / batch.targets.size:.1%} of the targets")
    print(f"speed    {rate / 1e6:.1f} M tokens/s in batches of {cfg.train.batch_size}", end="")
    if objectives(cfg.data) == {"span_corruption"}:
        length = raw_length(cfg.data)
        raw = random_bits(np.arange(1024 * length)).reshape(1024, -1).astype(np.uint16)
        keys = random_bits(1, np.arange(1024))
        spans = tokens_per_second(
            lambda _: span_corruption(raw, keys, sentinel, cfg.data), raw.size)
        print(f"; span corruption alone, on 1,024 rows, {spans / 1e6:.1f} M raw tokens/s", end="")
    print(" (one core)")


def list_mixture(name, cfg):
    """Print the tasks of a mixture with their rates, or all names where none is given."""
    if not name:
        for title, known in (("tasks", TASKS), ("mixtures", MIXTURES)):
            print(f"{title}")
            for one in known:
                source = known[one].source if title == "tasks" else ""
                print(f"  {one:36} {source}".rstrip())
        return
    data = replace(cfg.data, task=name)
    check_tasks(data)

    def size_of(task):
        examples = open_examples(task, replace(cfg, data=data), "train", load_vocabulary(data))
        return examples.size if examples.corpus.complete else math.inf

    rates = mixture_rates(name, data, size_of)
    total = sum(rates.values())
    width = max(map(len, rates))
    print(f"{name}: {len(rates)} tasks, {sum(rate > 0 for rate in rates.values())} of them trained "
          f"on\n{'task':{width}} {'rate':>12} {'of all':>9}  source")
    for task, rate in sorted(rates.items(), key=lambda item: -item[1]):
        print(f"{task:{width}} {rate:>12,.6g} {rate / total:>9.4%}  {find_task(task, data).source}")


def main(argv):
    args, changes = configs.parse_args(
        __doc__, argv, show=dict(type=int, metavar="N", help="print N rows of the first batch"),
        prepare=dict(action="store_true", help="write the token files a run needs, and stop"),
        shard=dict(metavar="I/N", help="with --prepare: every N-th part of the sources, whole\n"
                   "corpora; N machines that share a disk do it together"),
        list=dict(nargs="?", const="", metavar="MIXTURE", help="print a mixture's tasks and rates,"
                  "\nor the names of all tasks and mixtures"))
    if args.show is None and not args.prepare and args.list is None:
        raise UserError("Say what to do: --show N, --prepare or --list [MIXTURE].")
    cfg = configs.resolve(args, changes)
    if (args.prepare or args.shard) and (cfg.data.streaming or cfg.data.source == "random:"):
        raise UserError("There is nothing to prepare: neither with --data.streaming true nor of "
                        "random: are tokens kept.")
    if args.list is not None:
        list_mixture(args.list, cfg)
    if args.shard:
        prepare_shard(cfg, args.shard)
    elif args.prepare:
        print(f"{'train':10} {open_rows(cfg, 'train')[0]}")
        for task, one in evaluations(cfg).items():
            print(f"{'validation':10} {task}: {open_rows(one, 'validation')[0]}")
    if args.show is not None:
        show(cfg, args.show)


def prepare_shard(cfg, shard):
    """Tokenize every n-th part of all sources of a run, "i/n", i from 0."""
    found = re.fullmatch(r"(\d+)/(\d+)", shard)
    if not found or int(found[1]) >= int(found[2]):
        raise UserError(f"--shard {shard}: write I/N, from 0/N to N-1/N.")
    check_tasks(cfg.data)
    tokenizer, rates = load_vocabulary(cfg.data), mixture_rates(cfg.data.task, cfg.data)
    for split, name in [(split, name) for split in ("train", "validation") for name in rates]:
        try:
            task, shared = find_source(name, cfg, split)
            if rates[name] if split == "train" else not shared:
                prepare(task, split, tokenizer, cfg.data, shard=(int(found[1]), int(found[2])))
        except NoSplit:
            continue
    print(f"shard {shard} of {cfg.data.task} is prepared")


if __name__ == "__main__":
    sys.modules["data"] = sys.modules["__main__"]  # a recipe file's Task is this file's
    configs.run_command(main)
