"""What a training example is: text -> tokens -> spans or pairs -> rows -> the batch of a step.

    python data.py --show 3                     three real rows as the model sees them
    python data.py --config small_c4 --prepare  write the token files and stop

NumPy only, never jax. Everything random here is a pure function of (seed, epoch, row): the batch
of a step needs no state, so a run resumes by its step alone and any process can make any row.
"""

import ast
import functools
import glob
import gzip
import hashlib
import io
import itertools
import json
import os
import re
import sys
import sysconfig
import time
import zlib
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
        self.size = len(model.pieces)
        self.processor = sentencepiece.SentencePieceProcessor(
            model_proto=model.SerializeToString(), num_threads=os.cpu_count()
        )

    def encode(self, text):
        """Text -> list of ids, without EOS. "<extra_id_0>" after a space is the sentinel."""
        return self.processor.encode(text)

    def encode_batch(self, texts):
        """Texts -> list of int32 arrays, on all cores."""
        return self.processor.encode(list(texts), return_type="numpy")

    def decode(self, ids):
        """Ids -> text, up to the first EOS; padding is left out, unused rows are unknown."""
        ids = [int(i) if i < self.size else UNK for i in ids]
        end = ids.index(EOS) if EOS in ids else None
        return self.processor.decode([i for i in ids[:end] if i != PAD])


def load_tokenizer(path):
    """Path of a SentencePiece model -> Tokenizer."""
    try:
        return Tokenizer(Path(path).read_bytes(), str(path))
    except OSError as error:
        raise UserError(
            f"No vocabulary at {path} ({error.strerror}): give --data.vocab the path of a "
            f"SentencePiece model, or train one on the source with --data.vocab train:32000."
        ) from error


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
            max_sentence_length=16_000,
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
# data.on_error says.


class Part(NamedTuple):
    name: str
    stamp: list  # size and time of a file: when these change, the source has changed
    read: Callable  # bad -> iterator of (where, dict)


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
    """python:, the text that comes with Python itself."""

    def read(bad):
        return ((f"document {i}", {"text": text}) for i, text in enumerate(python_documents()))

    return [Part("the manual and docstrings of Python", [sys.version], read)]


def read_lines(path, bad):
    """(line number, line) of a text file, plain or .gz; a line that is not UTF-8 is bad."""
    with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
        try:
            for number, line in enumerate(file, 1):
                try:
                    yield number, line.decode()
                except UnicodeDecodeError:
                    bad(f"{path}:{number}", "is not UTF-8")
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            bad(str(path), f"is damaged ({error})")


def file_source(pattern, read):
    """One part for each file that matches the glob."""
    found = sorted(glob.glob(os.path.expanduser(pattern), recursive=True))
    paths = [path for path in found if not os.path.isdir(path)]
    if not paths:
        hint = f"{pattern} is a folder: write '{pattern}/*'" if found else (
            f"No file matches {pattern}: give --data.source a path or a quoted glob")
        raise UserError(f"{hint}.")
    stats = [(Path(path), os.stat(path)) for path in paths]
    return [Part(str(path), [stat.st_size, stat.st_mtime_ns], functools.partial(read, path))
            for path, stat in stats]


def text_source(name, split, cfg):
    """text:GLOB, a document a file, or text:GLOB:lines, a document a line."""
    pattern = name.removesuffix(":lines")

    def read(path, bad):
        lines = read_lines(path, bad)
        if pattern == name:
            lines = [(1, " ".join(line for _, line in lines))]
        return ((f"{path}:{number}", {"text": text}) for number, text in lines if text.strip())

    return file_source(pattern, read)


def jsonl_source(name, split, cfg):
    """jsonl:GLOB, a JSON object a line, plain or .gz, as C4 is published."""

    def read(path, bad):
        for number, line in read_lines(path, bad):
            where = f"{path}:{number}"
            try:
                example = json.loads(line) if line.strip() else None
            except ValueError as error:
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
            batches = pyarrow.parquet.ParquetFile(path).iter_batches(1024)
            examples = (example for batch in batches for example in batch.to_pylist())
            for number, example in enumerate(examples):
                yield f"{path} row {number}", example
        except (pyarrow.ArrowException, UnicodeDecodeError) as error:
            bad(str(path), f"is damaged ({error})")

    return file_source(name, read)


def tfds_source(name, split, cfg):
    """tfds:NAME[/CONFIG][:VERSION], a TFDS dataset on disk, in array_record form."""
    home = cfg.tfds_dir or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
    dataset, _, version = name.partition(":")
    folder = Path(os.path.expanduser(home), dataset)
    found = sorted(folder.glob(f"{version or '*'}/dataset_info.json"))
    if not found:
        raise UserError(
            f"{name} is not in {folder / version}: name the folder of your TFDS datasets "
            f"(array_record) with --data.tfds_dir or TFDS_DATA_DIR, or read C4's own files with "
            f"--data.source 'jsonl:DIR/c4-train.*.json.gz', or any text with --data.source "
            f"'text:DIR/*.txt'.")
    import tensorflow_datasets as tfds  # half a second, and no other source needs it

    builder = tfds.builder_from_directory(found[-1].parent)
    if split not in builder.info.splits:
        raise UserError(f"{found[-1].parent} has no split {split} (it has "
                        f"{', '.join(builder.info.splits)}): name a --data.validation_source.")

    examples = builder.as_data_source(split)

    def read(numbers, bad):
        for number in numbers:
            where = f"{found[-1].parent} {split} {number}"
            try:
                yield where, {key: value.decode() if isinstance(value, bytes) else value
                              for key, value in examples[number].items()}
            except UnicodeDecodeError:
                bad(where, "is not UTF-8")

    count, size = len(examples), 1 << 17  # examples of a part
    parts = (range(start, min(start + size, count)) for start in range(0, count, size))
    return [Part(f"{found[-1].parent} {split} {numbers.start}", [len(examples)],
                 functools.partial(read, numbers)) for numbers in parts]


SOURCES = {"python": python_source, "text": text_source, "jsonl": jsonl_source,
           "parquet": parquet_source, "tfds": tfds_source}
WITH_SPLITS = ("tfds:",)  # have a validation split of their own


def open_source(source, split, cfg):
    """"KIND:NAME", a split, DataConfig -> the source's parts."""
    kind, _, name = source.partition(":")
    if kind not in SOURCES:
        raise UserError(f"Unknown kind of source in {source!r}: it begins with one of "
                        f"{', '.join(f'{known}:' for known in [*SOURCES, 'random'])}.")
    return SOURCES[kind](name, split, cfg)


class Complaints:
    """Called with what cannot be read: stops at the first, or skips and counts (data.on_error)."""

    def __init__(self, on_error):
        self.stop, self.count = on_error == "stop", 0

    def __call__(self, where, what):
        if self.stop:
            raise UserError(f"{where} {what}: mend it, or leave such lines out with "
                            f"--data.on_error skip.")
        self.count += 1


# ---- prepared corpora ----------------------------------------------------------------------------
# prepared/SOURCE-HASH/00000-000.ids.npy    tokens of part 0, shard 0, document after document
#                      00000-000.ends.npy   where in the shard each document ends
#                      00000.json           counts of part 0, written when its shards are whole
#                      index.json           all counts, written last: the corpus is complete

SHARD_TOKENS = 1 << 26


def prepared_path(source, parts, identity, cfg):
    """A readable path in data.prepared_dir; changes with the source, its parts and `identity`."""
    slug = re.sub(r"[^\w.]+", "-", source).strip("-")[-40:]
    identity = [source, [[part.name, part.stamp] for part in parts], identity]
    digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:10]
    return Path(cfg.prepared_dir, f"{slug}-{digest}")


def load_vocabulary(cfg):
    """DataConfig -> Tokenizer: the model file that data.vocab names, or one trained on the source.

    A vocabulary trained here is kept in data.prepared_dir, for this source as it is now.
    """
    if not cfg.vocab.startswith("train:"):
        return load_tokenizer(cfg.vocab)
    pieces = cfg.vocab.removeprefix("train:")
    if not pieces.isdecimal():
        raise UserError(f"--data.vocab {cfg.vocab}: write train:PIECES, for instance train:32000.")
    parts = open_source(cfg.source, "train", cfg)
    path = prepared_path(cfg.source, parts, pieces, cfg)
    path = path.with_name(f"{path.name}.{pieces}.model")
    if not path.exists():
        configs.note(f"training a vocabulary of {pieces} pieces on {cfg.source}")
        bad = Complaints(cfg.on_error)
        features = FEATURES[cfg.task]
        examples = (example for part in parts for example in read_texts(part, bad, features))
        texts = itertools.chain.from_iterable(examples)
        configs.write_file(path, train_tokenizer(texts, int(pieces)).serialized)
    return load_tokenizer(path)


FEATURES = {"span_corruption": ("text",), "text_to_text": ("inputs", "targets")}


def read_texts(part, bad, features):
    """The texts of a part: for each example the tuple of its `features`."""
    for where, example in part.read(bad):
        texts = tuple(example.get(feature) for feature in features)
        if not all(isinstance(text, str) for text in texts):
            bad(where, f"has no text in {' and '.join(features)} (fields: {', '.join(example)})")
        elif any(not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text)
                 for text in texts):
            bad(where, "has half of a character (a lone surrogate)")
        else:
            yield texts


def prepare(source, split, tokenizer, cfg):
    """Tokenize a source, if that has not been done yet -> the folder of its token files.

    source: as data.source; cfg: DataConfig. A part that is whole is never read again, so after a
    kill the work goes on where it was.
    """
    parts = open_source(source, split, cfg)
    features = FEATURES[cfg.task]
    folder = prepared_path(source, parts, [split, features, tokenizer.sha256], cfg)
    if (folder / "index.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    dtype = np.uint16 if tokenizer.size <= 1 << 16 else np.uint32
    counts = []
    for number, part in enumerate(tqdm(parts, f"preparing {source}", unit="part", leave=False)):
        mark = folder / f"{number:05}.json"
        if not mark.exists():
            stem = folder / f"{number:05}"
            configs.write_file(mark, json.dumps(
                prepare_part(part, stem, features, tokenizer, dtype, cfg.on_error)))
        counts.append(json.loads(mark.read_text()))
    total = {key: sum(count[key] for count in counts)
             for key in ("documents", "tokens", "unknown", "skipped")}
    if not total["tokens"]:
        raise UserError(f"{source} holds no text: nothing to train on.")
    index = {"format": 1, "source": source, "split": split, "vocabulary": tokenizer.sha256, **total,
             "parts": [{"name": part.name} | count for part, count in zip(parts, counts)]}
    configs.write_file(folder / "index.json", json.dumps(index, indent=1))
    configs.note(f"prepared {source}: {total['documents']:,} documents, {total['tokens']:,} "
                 f"tokens, {total['unknown'] / total['tokens']:.3%} unknown, {total['skipped']:,} "
                 f"lines skipped")
    return folder


def prepare_part(part, stem, features, tokenizer, dtype, on_error):
    """Tokenize one part of a source into shards of about SHARD_TOKENS tokens -> its counts."""
    bad = Complaints(on_error)
    counts = {"documents": 0, "tokens": 0, "unknown": 0, "shards": []}
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
            counts["tokens"] += len(ids)
            counts["unknown"] += int((ids == UNK).sum())
        counts["shards"].append(shard)
        counts["documents"] += len(held)
        held.clear()

    examples = read_texts(part, bad, features)
    while batch := list(itertools.islice(examples, 1024)):
        sides = [tokenizer.encode_batch(texts) for texts in zip(*batch)]
        batch = [example for example in zip(*sides) if sum(map(len, example))]
        held += batch
        held_tokens += sum(len(ids) for example in batch for ids in example)
        if held_tokens >= SHARD_TOKENS:
            flush()
            held_tokens = 0
    if held:
        flush()
    return counts | {"skipped": bad.count}


def runs(starts, lengths):
    """[5, 9], [3, 2] -> [5, 6, 7, 9, 10]: the numbers of several runs, one after the other."""
    ends = np.cumsum(lengths)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(ends[-1] if len(ends) else 0)


class Corpus:
    """The tokens of one feature of a prepared folder, read as one long stream."""

    def __init__(self, folder, feature="text"):
        self.folder, self.feature = folder, feature
        self.index = json.loads((folder / "index.json").read_text())
        self.shards = [shard for part in self.index["parts"] for shard in part["shards"]]
        self.starts = np.cumsum([0] + [shard["tokens"][feature] for shard in self.shards])
        self.tokens, self.documents = int(self.starts[-1]), self.index["documents"]
        checksums = str([shard["crc32"] for shard in self.shards]).encode()
        self.digest = f"{self.index['tokens']}-{zlib.crc32(checksums)}"
        self.ids = [self.load(k, "ids") for k in range(len(self.shards))]

    def load(self, shard, kind):
        name = f"{self.shards[shard]['name']}.{self.feature}.{kind}.npy"
        return np.load(self.folder / name, mmap_mode="r")

    def read(self, start, stop):
        """Tokens start to stop of the stream, across shards."""
        pieces = []
        while start < stop:
            shard = np.searchsorted(self.starts, start, "right") - 1
            end = min(stop, self.starts[shard + 1])
            pieces.append(self.ids[shard][start - self.starts[shard] : end - self.starts[shard]])
            start = end
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def document_starts(self):
        """Where in the stream each document begins, and where the last one ends."""
        ends = [start + self.load(k, "ends") for k, start in enumerate(self.starts[:-1])]
        return np.concatenate([[0], *ends])

    def gather(self, starts, lengths):
        """The tokens of several runs of the stream, one after the other; no run crosses a shard."""
        shards = np.searchsorted(self.starts, starts, "right") - 1
        if len(self.shards) == 1:
            return self.ids[0][runs(starts, lengths)]
        tokens, firsts = np.empty(lengths.sum(), self.ids[0].dtype), np.cumsum(lengths) - lengths
        for shard in np.unique(shards[lengths > 0]):
            here = (shards == shard) & (lengths > 0)
            tokens[runs(firsts[here], lengths[here])] = self.ids[shard][
                runs(starts[here] - self.starts[shard], lengths[here])]
        return tokens

    def document_start(self, document):
        """Where in the stream a document begins."""
        for shard, start in zip(range(len(self.shards)), self.starts):
            if document == 0:
                return int(start)
            if document < self.shards[shard]["documents"]:
                return int(start) + int(self.load(shard, "ends")[document - 1])
            document -= self.shards[shard]["documents"]
        return self.tokens


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


# ---- batches -------------------------------------------------------------------------------------

ORDER, NOISE, PACKING = 1, 2, 3  # what random bits are for: the first part of their key


class SpanRows:
    """A corpus cut into rows of raw tokens, which span corruption makes into inputs and targets.

    The last row may be shorter; a single token at the end, which cannot be corrupted, is left out.
    """

    def __init__(self, corpus, start, stop, sentinel, cfg):
        self.corpus, self.start, self.stop = corpus, start, stop
        self.sentinel, self.cfg = sentinel, cfg
        self.length = raw_length(cfg.data)
        self.count = -(-(stop - start) // self.length)
        if (stop - start) % self.length == 1:
            self.count -= 1

    def __str__(self):
        return f"{self.stop - self.start:,} tokens, {self.count:,} rows of {self.length}"

    def sample(self, most):
        """At most `most` tokens, of which frequencies are taken."""
        return self.corpus.read(self.start, min(self.stop, self.start + most))

    def read(self, row):
        start = self.start + int(row) * self.length
        return self.corpus.read(start, min(start + self.length, self.stop))

    def make(self, numbers, training):
        """Numbers of rows, counted through all epochs -> inputs, targets and their segments.

        In training each epoch has an order and noise of its own. Otherwise the order is that of the
        corpus, the noise always the same, and past the end the rows are padding.
        """
        data, seed = self.cfg.data, self.cfg.train.seed
        epoch, row = np.divmod(numbers, self.count)
        if training:
            row = permute(row, self.count, ORDER, seed, epoch)
        keys = random_bits(NOISE, seed, epoch, row)
        inputs = np.zeros((len(row), data.inputs_length), np.int32)
        targets = np.zeros((len(row), data.targets_length), np.int32)
        raw = [self.read(r) if training or e == 0 else () for r, e in zip(row, epoch)]
        lengths = np.array([len(tokens) for tokens in raw])
        for length in np.unique(lengths[lengths > 0]):  # one, or two with the short last row
            where = np.flatnonzero(lengths == length)
            some = span_corruption(
                np.stack([raw[i] for i in where]), keys[where], self.sentinel, data)
            inputs[where, : some[0].shape[1]], targets[where, : some[1].shape[1]] = some
        return inputs, targets, inputs != PAD, targets != PAD


class PairRows:
    """Examples of inputs and targets; in training, if data.pack says so, several in a row.

    Each is cut to its length and gets EOS. Packing is planned for blocks of BLOCK examples in the
    order of training, which is a new one each epoch; a block's plan is kept beside the tokens.
    """

    BLOCK = 1 << 16

    def __init__(self, folder, start, stop, cfg):
        self.cfg, self.start, self.count = cfg, start, stop - start
        self.corpora = [Corpus(folder, feature) for feature in FEATURES["text_to_text"]]
        self.corpus = self.corpora[1]  # the targets: what is learned
        self.limits = cfg.data.inputs_length, cfg.data.targets_length
        self.starts = [corpus.document_starts() for corpus in self.corpora]
        whole = [np.diff(starts)[start:stop] for starts in self.starts]
        self.lengths = [np.minimum(n, limit - 1) for n, limit in zip(whole, self.limits)]
        self.cut = [int((n >= limit).sum()) for n, limit in zip(whole, self.limits)]
        plan = "-".join(map(str, ("plan", start, stop, *self.limits, cfg.train.seed)))
        self.plans, self.row_starts = folder / plan, [0]
        self.plan = functools.lru_cache(maxsize=4)(self.read_plan)

    def __str__(self):
        return f"{self.count:,} examples" + ", packed into rows" * self.cfg.data.pack

    def sample(self, most):
        """At most about `most` tokens of the targets, of which frequencies are taken."""
        return self.corpus.read(int(self.starts[1][self.start]), min(
            int(self.starts[1][self.start + self.count]), int(self.starts[1][self.start]) + most))

    def example(self, position):
        """Positions in the order of training -> numbers of examples."""
        epoch, number = np.divmod(position, self.count)
        return permute(number, self.count, ORDER, self.cfg.train.seed, epoch)

    def read_plan(self, block):
        """A block of the order of training -> (examples, row after row; where each row ends)."""
        path = self.plans / f"{block:06}.npz"
        if not path.exists():
            examples = self.example(np.arange(block * self.BLOCK, (block + 1) * self.BLOCK))
            row = plan_packing(*(n[examples] + 1 for n in self.lengths), *self.limits)
            row = permute(row, int(row.max()) + 1, PACKING, self.cfg.train.seed, block)
            out = io.BytesIO()
            np.savez(out, examples=examples[np.argsort(row, kind="stable")],
                     ends=np.cumsum(np.bincount(row)))
            configs.write_file(path, out.getbuffer())
        with np.load(path) as plan:
            return plan["examples"], plan["ends"]

    def members(self, numbers, training):
        """Numbers of rows -> (examples, the row in the batch and the segment of each)."""
        if not training:
            within = np.flatnonzero(numbers < self.count)
            return numbers[within], within, np.ones(len(within), int)
        if not self.cfg.data.pack:
            return self.example(numbers), np.arange(len(numbers)), np.ones(len(numbers), int)
        while self.row_starts[-1] <= numbers.max():
            ends = self.plan(len(self.row_starts) - 1)[1]
            self.row_starts.append(self.row_starts[-1] + len(ends))
        blocks = np.searchsorted(self.row_starts, numbers, "right") - 1
        sizes, begins = np.empty((2, len(numbers)), int)  # of a row's members in its block's plan
        for block in np.unique(blocks):
            here, ends = blocks == block, self.plan(int(block))[1]
            row = numbers[here] - self.row_starts[block]
            sizes[here] = np.diff(ends, prepend=0)[row]
            begins[here] = ends[row] - sizes[here]
        flat, firsts = np.empty(sizes.sum(), int), np.cumsum(sizes) - sizes
        for block in np.unique(blocks):
            here, examples = blocks == block, self.plan(int(block))[0]
            flat[runs(firsts[here], sizes[here])] = examples[runs(begins[here], sizes[here])]
        rows = np.repeat(np.arange(len(numbers)), sizes)
        return flat, rows, runs(np.ones(len(sizes), int), sizes)

    def make(self, numbers, training):
        """Numbers of rows, counted through all epochs -> inputs, targets and their segments."""
        examples, row, segment = self.members(np.asarray(numbers), training)
        opens = segment == 1  # the first of its row
        tokens, segments = [], []
        for corpus, starts, lengths, limit in zip(
                self.corpora, self.starts, self.lengths, self.limits):
            kept = lengths[examples]
            size = kept + 1  # with EOS
            place = np.cumsum(size) - size
            place += row * limit - place[opens][np.cumsum(opens) - 1]
            out, marks = np.zeros((2, len(numbers) * limit), np.int32)
            out[runs(place, kept)] = corpus.gather(starts[self.start + examples], kept)
            out[place + kept] = EOS
            marks[runs(place, size)] = np.repeat(segment, size)
            tokens.append(out.reshape(-1, limit))
            segments.append(marks.reshape(-1, limit))
        return *tokens, *segments


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


@functools.lru_cache(maxsize=8)
def open_rows(cfg, split):
    """Config, "train" or "validation" -> (rows, id of <extra_id_0>). Prepares what is missing."""
    if cfg.data.source == "random:":
        size = cfg.model.vocab_size
        tokens = RandomTokens(size - SENTINELS, cfg.train.seed)
        return check_spans(SpanRows(tokens, 0, tokens.tokens, size - 1, cfg), cfg.data), size - 1
    tokenizer = load_vocabulary(cfg.data)
    size = tokenizer.size
    if not size <= cfg.model.vocab_size < size + 128:
        raise UserError(
            f"The vocabulary has {size} ids (its pieces and {SENTINELS} sentinels), the model "
            f"{cfg.model.vocab_size}: set --model.vocab_size {-(-size // 128) * 128}.")
    source, shared = cfg.data.source, False
    if split == "validation" and cfg.data.validation_source:
        source = cfg.data.validation_source
    elif not (cfg.data.validation_source or source.startswith(WITH_SPLITS)):
        shared = True  # the last 1 % of the documents are held out
    folder = prepare(source, "train" if shared else split, tokenizer, cfg.data)
    documents = json.loads((folder / "index.json").read_text())["documents"]
    start, stop = 0, documents
    if shared:
        held_out = documents - max(1, documents // 100)
        start, stop = (0, held_out) if split == "train" else (held_out, documents)
    if start == stop:
        raise UserError(f"The {split} split of {cfg.data.source} is empty: give it two documents "
                        f"or more (text:FILE:lines makes one of each line).")
    if cfg.data.task == "text_to_text":
        rows = PairRows(folder, start, stop, cfg)
        if any(rows.cut):
            configs.note(f"{split}: {rows.cut[0]:,} inputs and {rows.cut[1]:,} targets of "
                         f"{rows.count:,} are longer than {rows.limits[0]} and {rows.limits[1]} "
                         f"tokens and are cut")
        return rows, size - 1
    corpus = Corpus(folder)
    start, stop = (corpus.document_start(document) for document in (start, stop))
    return check_spans(SpanRows(corpus, start, stop, size - 1, cfg), cfg.data), size - 1


def check_spans(rows, cfg):
    """Refuse rows whose spans do not fit the targets, or outnumber the sentinels."""
    noise, spans = noise_counts(rows.length, cfg)
    if noise + spans + 1 > cfg.targets_length:
        raise UserError(
            f"Span corruption of {cfg.inputs_length} inputs makes {noise + spans + 1} targets; set "
            f"--data.targets_length to {noise + spans + 1} or more (it is {cfg.targets_length}).")
    if spans > SENTINELS:
        raise UserError(
            f"Span corruption of {cfg.inputs_length} inputs needs {spans} sentinels and the "
            f"vocabulary has {SENTINELS}: set --data.inputs_length lower or "
            f"--data.mean_span_length higher.")
    return rows


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


def unigram_loss(cfg, batches):
    """Nats per content token of the first held-out batches under the training tokens' frequencies.

    Content is all but sentinels and EOS. It is what a model reaches that ignores the context, so
    the number to beat. At most 10 million training tokens are counted.
    """
    rows, sentinel = open_rows(cfg, "train")
    counts = np.bincount(rows.sample(10_000_000), minlength=cfg.model.vocab_size) + 1.0
    targets = np.concatenate(
        [make_batch(cfg, "validation", i).targets.ravel() for i in range(batches)])
    content = targets[(targets > EOS) & (targets <= sentinel - SENTINELS)]
    return float(np.mean(np.log(counts.sum()) - np.log(counts[content])))


# ---- what the screen shows -----------------------------------------------------------------------


def describe_rows(cfg):
    """DataConfig -> what a row is; of span corruption, how raw tokens become inputs and targets."""
    if cfg.task == "text_to_text":
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
    words = []
    for i, segment in zip(map(int, ids), segments):
        if segment == 0:
            continue
        if tokenizer is None:  # random ids
            piece, style = f" {i}", ""
        else:
            piece = tokenizer.processor.id_to_piece(i) if i < tokenizer.size else f"<row {i}>"
            style = "7" if i >= tokenizer.size - SENTINELS else "2" if i <= UNK else ""
        colour = str(31 + int(segment) % 6) if max(segments) > 1 else ""
        codes = ";".join(filter(None, (style, colour)))
        piece = piece.replace("\u2581", " ")
        words.append(f"\x1b[{codes}m{piece}\x1b[0m" if codes and sys.stdout.isatty() else piece)
    return "".join(words).strip()


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
    print(f"source   {cfg.data.source} {rows}\n{describe_rows(cfg.data)}")
    batch = make_batch(cfg, "train", 0)
    for i in range(min(count, cfg.train.batch_size)):
        inputs = show_row(batch.inputs[i], batch.input_segments[i], tokenizer)
        targets = show_row(batch.targets[i], batch.target_segments[i], tokenizer)
        print(f"\nrow {i}, inputs\n  {inputs}\nrow {i}, targets\n  {targets}")
    real = [(segments > 0).sum() for segments in (batch.input_segments, batch.target_segments)]
    rate = tokens_per_second(lambda step: make_batch(cfg, "train", step), sum(real))
    print(f"\nfilled   {real[0] / batch.inputs.size:.1%} of the inputs, "
          f"{real[1] / batch.targets.size:.1%} of the targets")
    print(f"speed    {rate / 1e6:.1f} M tokens/s in batches of {cfg.train.batch_size}", end="")
    if cfg.data.task == "span_corruption":
        raw = random_bits(np.arange(1024 * rows.length)).reshape(1024, -1).astype(np.uint16)
        keys = random_bits(1, np.arange(1024))
        spans = tokens_per_second(
            lambda _: span_corruption(raw, keys, sentinel, cfg.data), raw.size)
        print(f"; span corruption alone, on 1,024 rows, {spans / 1e6:.1f} M raw tokens/s", end="")
    print(" (one core)")


def main(argv):
    args, changes = configs.parse_args(
        __doc__, argv, show=dict(type=int, metavar="N", help="print N rows of the first batch"),
        prepare=dict(action="store_true", help="write the token files and stop"))
    if args.show is None and not args.prepare:
        raise UserError("Say what to do: --show N or --prepare.")
    cfg = configs.resolve(args, changes)
    for split in ("train", "validation") if args.prepare else ():
        print(f"{split:10} {open_rows(cfg, split)[0]}")
    if args.show is not None:
        show(cfg, args.show)


if __name__ == "__main__":
    configs.run_command(main)
