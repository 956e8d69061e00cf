"""Turn text into batches: read, tokenize, shuffle, corrupt spans and pack.

    records -> documents -> token ids -> examples (inputs, targets) -> rows -> batches

A record is a dict from a file. A task turns it into documents: dicts with "text", or with
"inputs" and "targets" (pairs). Span corruption joins many texts, and cuts them into
chunks. Each chunk or pair becomes an example. A row holds one example or several packed
ones.

    python data.py --show 3                                     print rows of a batch
    python data.py --data.task glue_v002_proportional --list    list tasks and rates
"""

import ast
import csv
import io
import itertools
import json
import os
import re
import zlib
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from platform import python_version
from typing import Callable, Iterator, NamedTuple

import fsspec
import numpy as np
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

import configs
from configs import MIXTURES, TASKS, Config, DataConfig, UserError

PAD, EOS, UNK = 0, 1, 2
Ids = np.ndarray  # the token ids of a text [N]
Example = tuple[Ids, Ids]  # inputs and targets


class Batch(NamedTuple):
    """int32 arrays [rows, S] of inputs or [rows, T] of targets, padded to S and T.

    The segment of a token is the number of its example in the row, from 1; padding has 0.
    decoder_inputs are the targets of each example, shifted right, with PAD in front.
    """

    inputs: np.ndarray
    input_segments: np.ndarray
    decoder_inputs: np.ndarray
    targets: np.ndarray
    target_segments: np.ndarray


# ---- span corruption (Raffel et al. 2020, sections 3.1.4 and 3.3.4) --------------------


def noise_counts(length: int, data_cfg: DataConfig) -> tuple[int, int]:
    """Return how many of `length` tokens are noise, and in how many spans.

    Computed in float32 and rounded half to even, as in t5/data/preprocessors.py. Unlike
    in t5, each span has a kept token before it, even if the density is very high.
    """
    noise = int(np.round(np.float32(length) * np.float32(data_cfg.noise_density)))
    noise = min(max(noise, 1), length - 1)
    spans = int(np.round(np.float32(noise) / np.float32(data_cfg.mean_span_length)))
    return noise, min(max(spans, 1), length - noise)


def tokens_per_example(data_cfg: DataConfig) -> int:
    """Return how many tokens fill the inputs after span corruption: 568 become 512."""
    for length in itertools.count(3):
        noise, spans = noise_counts(length, data_cfg)
        if length - noise + spans + 1 > data_cfg.inputs_length:
            return length - 1


def random_bits(count: int, *seeds: int) -> np.ndarray:
    """Return random integers of 64 bits, which depend only on the integers `seeds`."""
    # All versions of NumPy have the same raw bits, but not the same Generator.shuffle.
    return np.random.PCG64(np.random.SeedSequence(seeds)).random_raw(count)


def random_order(count: int, *seeds: int) -> np.ndarray:
    return np.argsort(random_bits(count, *seeds), kind="stable")


def random_segmentation(total: int, parts: int, rows: int, seeds: tuple) -> np.ndarray:
    """Split `total` into `parts` positive integers at random. Returns [rows, parts].

    5 = 1 + 1 + 1 + 1 + 1 becomes 1 + 2 + 2 by a cut at the first and the third plus. The
    cuts are where random numbers are lowest, so all splits are equally likely.
    """
    gaps = random_bits(rows * (total - 1), *seeds).reshape(rows, total - 1)
    cuts = np.sort(np.argsort(gaps, axis=1)[:, : parts - 1] + 1, axis=1)
    return np.diff(cuts, axis=1, prepend=0, append=total)


def corrupt_spans(tokens: np.ndarray, first_sentinel: int, data_cfg: DataConfig, *seeds):
    """Replace random spans of each row of tokens [rows, length] by sentinels.

    Returns (inputs, targets) without EOS. A row begins with kept tokens and ends with a
    removed span, and the targets have no last sentinel, as in random_spans_noise_mask
    and noise_span_to_unique_sentinel of t5 (Figure 2 of the paper shows another form).
    With the sentinels X and Y:

        tokens       a b c d e f g
        noise_mask   . . 1 1 . . 1
        span_starts  . . 1 . . . 1
        before_span  . 1 . . . 1 .
        inputs       a b X   e f Y
        targets        X c d   Y g
    """
    rows, length = tokens.shape
    noise, spans = noise_counts(length, data_cfg)
    kept = random_segmentation(length - noise, spans, rows, (*seeds, length, 0))
    removed = random_segmentation(noise, spans, rows, (*seeds, length, 1))
    lengths = np.stack([kept, removed], axis=2)  # [rows, spans, 2], alternating
    is_noise = np.tile([False, True], rows * spans)
    noise_mask = np.repeat(is_noise, lengths.ravel()).reshape(rows, length)
    # In the inputs, a sentinel overwrites the first token of each removed span; in the
    # targets, the kept token before it. No span starts a row, so np.roll may wrap around.
    span_starts = noise_mask & ~np.roll(noise_mask, 1, axis=1)
    before_span = np.roll(span_starts, -1, axis=1)
    sentinels = np.tile(first_sentinel - np.arange(spans), rows)
    inputs, targets = tokens.astype(np.int32), tokens.astype(np.int32)
    inputs[span_starts] = sentinels
    targets[before_span] = sentinels
    inputs = inputs[~noise_mask | span_starts].reshape(rows, -1)  # all equally long
    targets = targets[noise_mask | before_span].reshape(rows, -1)
    return inputs, targets


# ---- objectives: chunks of text become examples (inputs, targets), without EOS ---------


def span_corruption(chunks: list[Ids], tokenizer, data_cfg, *seeds: int) -> list[Example]:
    """Corrupt spans of all chunks. Those of equal length are computed together."""
    examples = [None] * len(chunks)
    lengths = np.array([len(ids) for ids in chunks])
    for length in np.unique(lengths).tolist():
        same_length = np.flatnonzero(lengths == length)
        tokens = np.stack([chunks[i] for i in same_length])
        noise, spans = noise_counts(length, data_cfg)
        num_inputs = length - noise + spans + 1  # kept tokens, sentinels and EOS
        num_targets = noise + spans + 1  # removed tokens, sentinels and EOS
        limits = data_cfg.inputs_length, data_cfg.targets_length
        too_long = num_inputs > limits[0] or num_targets > limits[1]
        if spans > tokenizer.extra_ids or too_long:
            raise UserError(
                f"{length} tokens need {num_inputs} inputs, {num_targets} targets and "
                f"{spans} of {tokenizer.extra_ids} sentinels: raise "
                f"--data.targets_length, mean_span_length or extra_ids, or use prefix_lm."
            )
        corrupted = corrupt_spans(tokens, tokenizer.first_sentinel, data_cfg, *seeds)
        for i, inputs, targets in zip(same_length, *corrupted):
            examples[i] = inputs, targets
    return examples


def prefix_lm(chunks: list[Ids], tokenizer, data_cfg, *seeds: int) -> list[Example]:
    """Cut each text at a random place: its beginning becomes the inputs."""
    bits = random_bits(len(chunks), *seeds).tolist()
    cuts = [1 + random % (len(ids) - 1) for random, ids in zip(bits, chunks)]
    return [(ids[:cut], ids[cut:]) for ids, cut in zip(chunks, cuts)]


# ---- tokens ----------------------------------------------------------------------------


class Tokenizer:
    """A SentencePiece model, from the bytes of its file.

    If it has no sentinels, `extra_ids` of them are appended, as in T5. <extra_id_0> has
    the id first_sentinel, <extra_id_1> the id below, and so on. extras/vocabularies.py
    has other kinds of vocabularies.
    """

    file_name = "spiece.model"  # its name in a run

    def __init__(self, serialized: bytes, extra_ids: int):
        proto = sentencepiece_model_pb2.ModelProto.FromString(serialized)
        if not any("<extra_id_" in piece.piece for piece in proto.pieces):
            for i in reversed(range(extra_ids)):
                proto.pieces.add(piece=f"▁<extra_id_{i}>", type="USER_DEFINED")
        self.set_pieces(serialized, [piece.piece for piece in proto.pieces])
        content = proto.SerializeToString()
        self.processor = sentencepiece.SentencePieceProcessor(model_proto=content)

    def set_pieces(self, serialized: bytes, pieces: list[str]) -> None:
        """Find the sentinels among the pieces, and check their ids."""
        self.serialized = serialized
        self.size = len(pieces)
        matches = [re.fullmatch(r"▁?<extra_id_(\d+)>", piece) for piece in pieces]
        ids = {int(match[1]): i for i, match in enumerate(matches) if match}
        self.extra_ids, self.first_sentinel = len(ids), ids.get(0)
        in_order = {k: ids.get(0, 0) - k for k in range(len(ids))}
        if pieces[:3] != ["<pad>", "</s>", "<unk>"] or ids != in_order:
            raise UserError(
                f"T5's vocabulary begins with <pad>, </s>, <unk>, and has the sentinels "
                f"..., <extra_id_1>, <extra_id_0> in this order. This one begins with "
                f"{pieces[:3]}, and has the sentinels {dict(sorted(ids.items())[:3])}."
            )

    @property
    def sha256(self) -> str:
        return sha256(self.serialized).hexdigest()

    def save(self, run_dir) -> None:
        if self.file_name:
            configs.write_file(configs.to_path(run_dir) / self.file_name, self.serialized)

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Return the ids of each text, without EOS. All cores are used."""
        # SentencePiece finds a sentinel only after a space.
        texts = [re.sub("(?<=[^ ])<extra_id_", " <extra_id_", text) for text in texts]
        return self.processor.encode(texts, return_type="numpy", num_threads=-1)

    def decode(self, ids) -> str:
        """Return the text of the ids before the first EOS."""
        ids = itertools.takewhile(lambda i: i != EOS, map(int, ids))
        return self.decode_ids([i if i < self.size else UNK for i in ids if i != PAD])

    def decode_ids(self, ids: list[int]) -> str:
        return self.processor.decode(ids)

    def is_content(self, ids):
        """Return which ids of an array are neither padding nor EOS nor sentinels."""
        first = self.first_sentinel or 0  # 0 if there are none
        return (ids > EOS) & ((ids > first) | (ids <= first - self.extra_ids))


def load_tokenizer(cfg: Config, run: str = "") -> Tokenizer:
    """Load the recipe's VOCABULARY, the vocabulary of a run, or --data.vocab."""
    vocab, extra_ids, metadata = cfg.data.vocab, cfg.data.extra_ids, {}
    if run:
        _, metadata = configs.load_run(run)
        # A start that failed may have left the file of another kind.
        name = "tokenizer.json" if vocab.endswith(".json") else "spiece.model"
        path = configs.run_dir_of(run) / name
        if vocab not in ("bytes", "numbers") and path.exists():
            vocab = str(path)
    if configs.VOCABULARY:
        from extras import vocabularies

        tokenizer = vocabularies.OwnTokenizer(configs.VOCABULARY, extra_ids)
    elif not vocab:
        raise UserError(f"Copy the model's spiece.model into {configs.run_dir_of(run)}.")
    elif vocab.startswith("train:"):
        size = int(vocab.removeprefix("train:"))
        tokenizer = Tokenizer(train_vocabulary(cfg, size), extra_ids)
    elif vocab.endswith(".model"):
        with fsspec.open(vocab) as file:
            tokenizer = Tokenizer(file.read(), extra_ids)
    else:
        from extras import vocabularies

        tokenizer = vocabularies.load(vocab, cfg)
    if tokenizer.size > cfg.model.vocab_size:
        raise UserError(f"This vocabulary needs --model.vocab_size {tokenizer.size}.")
    if tokenizer.sha256 != metadata.get("vocabulary", tokenizer.sha256):
        raise UserError(f"{run} has another vocabulary than at its beginning.")
    return tokenizer


# ---- documents and examples ------------------------------------------------------------


def template(inputs: str, targets: str, choices: tuple = ()) -> Callable:
    """Return a function that fills {fields} into both texts.

    choices: what the numbers 0, 1, ... of the field `label` become.
    """

    def fill(record):
        record = {k: v for k, v in record.items() if v is not None}  # not the text "None"
        if choices:  # The label 1.0 finds 1, and 0.5 finds nothing.
            record["label"] = dict(enumerate(choices))[float(record["label"])]
        return [
            dict(inputs=inputs.format_map(record), targets=targets.format_map(record))
        ]

    return fill


class Objective(NamedTuple):
    """How texts become examples (inputs, targets)."""

    # such as span_corruption; seeds alone decide its random bits, as restarts need
    function: Callable
    # tokens per chunk, a function of data_cfg; by default, inputs_length without EOS
    length: Callable = lambda data_cfg: data_cfg.inputs_length - 1
    joins: bool = True  # whether documents are joined before, without EOS between them


SPAN_CORRUPTION = Objective(span_corruption, tokens_per_example)
PREFIX_LM = Objective(prefix_lm, joins=False)


class Task(NamedTuple):
    """A source, how its records become examples, and how these are scored."""

    source: str = ""
    preprocess: Callable = lambda record: [record]  # returns a list of documents
    metrics: list | tuple = ()  # names in evaluate.METRICS, or f(targets, predictions)
    choices: tuple = ()  # the words for the classes 0, 1, ...
    postprocess: str | Callable = ""  # "label", "answers" or f(text, example, is_target)
    splits: tuple = ("train", "validation", "test")
    objective: Objective | None = None  # None: the documents are pairs already
    eos_in_inputs: bool = True  # False in T0, as `trim_and_add_eos` says


def read_documents(files: "list[File]", task: Task, start=(0, 0)) -> Iterator:
    """Yield (documents, (file, number), characters) of each record after `start`."""
    for f, file in enumerate(files[start[0] :], start[0]):
        number, record = 1, {}
        try:
            for record in file.read():
                if (f, number) > start:
                    documents = list(task.preprocess(record))
                    texts = texts_of(documents, task)
                    # A lone surrogate, which JSON can hold, raises an error here.
                    "".join(x for x in texts if isinstance(x, str)).encode()
                    characters = 300 + sum(map(len, texts))  # 300 for Python's objects
                    yield documents, (f, number), characters
                number, record = number + 1, {}  # A read error must not name this one.
        except Exception as error:
            error.add_note(f"in {file.name}, record {number} with the fields {[*record]}")
            raise


def texts_of(documents: list[dict], task: Task) -> list:
    names = ("text",) if task.objective else ("inputs", "targets")
    return [document[name] for document in documents for name in names]


def tokenize(documents: list[dict], task: Task, tokenizer: Tokenizer) -> list:
    """Return the ids of each text or pair. Lists of ids lose their padding and EOS."""
    values = texts_of(documents, task)
    encoded = iter(tokenizer.encode([text for text in values if isinstance(text, str)]))
    result = []
    for value in values:
        if isinstance(value, str):
            result.append(next(encoded))
            continue
        ids = np.trim_zeros(value, "b")
        if len(ids):
            is_integer = np.asarray(ids).dtype.kind in "iu"  # not bytes or 5.0, say
            if not is_integer or not 0 <= min(ids) <= max(ids) < tokenizer.size:
                raise ValueError(f"{task.source} has ids outside the vocabulary: {ids}")
            ids = ids[:-1] if ids[-1] == EOS else ids
        result.append(np.asarray(ids, np.int32))
    return result if task.objective else [*zip(result[::2], result[1::2])]


def cut_into_chunks(tokenized: list, task: Task, data_cfg: DataConfig) -> list:
    """Cut the ids of texts into chunks. Pairs, without an objective, stay as they are."""
    if not task.objective:
        return tokenized
    if task.objective.joins and tokenized:
        tokenized = [np.concatenate(tokenized)]
    length = task.objective.length(data_cfg)
    cut = [ids[i : i + length] for ids in tokenized for i in range(0, len(ids), length)]
    return [ids for ids in cut if len(ids) > 1]  # a token to keep, and one to predict


def make_examples(items: list, task: Task, tokenizer, cfg, *seeds) -> list[Example]:
    """Return the example (inputs, targets) of each chunk or pair, with EOS."""
    pairs = items
    if task.objective:
        pairs = task.objective.function(items, tokenizer, cfg.data, *seeds)
    with_eos = partial(trim_and_add_eos, task=task, data_cfg=cfg.data)
    return [(with_eos(a, "inputs"), with_eos(b, "targets")) for a, b in pairs]


def trim_and_add_eos(ids, side: str, task: Task, data_cfg: DataConfig) -> np.ndarray:
    """Truncate, and append EOS. T0 has none after inputs with text or cut targets."""
    limit = data_cfg.inputs_length if side == "inputs" else data_cfg.targets_length
    end = [EOS] if side == "targets" or task.eos_in_inputs or not len(ids) else []
    if len(ids) + len(end) > limit:
        configs.print_once(f"Some {side} are cut to --data.{side}_length.")
    if task.eos_in_inputs:
        ids = ids[: limit - 1]  # leaves room for EOS
    return np.append(ids, end)[:limit].astype(np.int32)


# ---- rows ------------------------------------------------------------------------------


def pack(lengths: np.ndarray, limits: tuple[int, int]) -> np.ndarray:
    """Return the row of each example [N] by bin packing. lengths [N, 2]: inputs, targets.

    From the longest example to the shortest, each goes to the row whose free fractions of
    inputs and targets are then most similar, or, if it fits into none, to a new row.
    """
    share = lengths / limits
    num_rows = int(np.ceil(share.sum(axis=0)).max())  # fewer cannot hold all tokens
    free = np.tile(limits, (len(lengths), 1)).T  # [2, N]: at most a row for each example
    row_of = np.zeros(len(lengths), int)
    for i in np.argsort(-share.sum(axis=1), kind="stable").tolist():
        left_inputs, left_targets = free[:, :num_rows] - lengths[i, :, None]
        fits = (left_inputs >= 0) & (left_targets >= 0)
        difference = np.abs(left_inputs / limits[0] - left_targets / limits[1])
        r = np.where(fits, difference, np.inf).argmin()
        if not fits[r]:
            r, num_rows = num_rows, num_rows + 1
        row_of[i] = r
        free[:, r] -= lengths[i]
    return row_of


def fill_rows(rows: list[list[Example]], limits: tuple[int, int]) -> Batch:
    """Write the examples of each row one after the other. limits: lengths of a row."""
    sides = []
    for side, limit in enumerate(limits):
        tokens, segments = np.zeros((2, len(rows), limit), np.int32)
        for row, row_tokens, row_segments in zip(rows, tokens, segments):
            end = 0
            for segment, example in enumerate(row, 1):
                start, end = end, end + len(example[side])
                row_tokens[start:end] = example[side]
                row_segments[start:end] = segment
        sides += tokens, segments
    inputs, input_segments, targets, target_segments = sides
    decoder_inputs = shift_right(targets, target_segments)
    return Batch(inputs, input_segments, decoder_inputs, targets, target_segments)


def shift_right(targets: np.ndarray, segments: np.ndarray) -> np.ndarray:
    """Return the decoder inputs: two examples [7, 1, 8, 6, 1] become [0, 7, 0, 8, 6]."""
    shifted = np.zeros_like(targets)
    shifted[:, 1:] = np.where(segments[:, 1:] == segments[:, :-1], targets[:, :-1], PAD)
    return shifted


# ---- batches ---------------------------------------------------------------------------
# read_windows     the chunks or pairs of the next texts of a task: a window
# examples_of      the examples that are made from windows, shuffled: the task's stream
# choose_examples  the next examples of all streams by their rates, for ROWS_PER_PACK rows
# pack_rows        lists of examples that fit into a row, in random order: a pack
# make_batches     fill_rows for each batch, and the position where a restart continues
# prefetch         a thread reads the next window, and another makes the next batches

EXAMPLE_ORDER, NOISE, ROW_ORDER = range(3)  # the last seed: each use has its own bits
WINDOW_CHARACTERS = 1 << 23  # shuffled together; each of n tasks has 1 / min(n, 32)
ROWS_PER_PACK = 512  # rows that are packed together


class Cursor(NamedTuple):
    """Where a task is.

    To restart, open `file`, skip `record` records, read a window, shuffle it (the first
    three numbers are among the seeds), and skip `taken` examples.
    """

    epoch: int = 0
    file: int = 0  # the number of the file in which the window begins
    record: int = 0  # records of this file before the window
    taken: int = 0  # examples of the window so far
    total: int = 0  # examples of the task so far


def read_windows(task, files, tokenizer, cfg, size: int, cursor=Cursor()) -> Iterator:
    """Yield (chunks or pairs of about `size` characters, Cursor of the next window)."""

    def items_of(window):
        return cut_into_chunks(tokenize(window, task, tokenizer), task, cfg.data)

    start = cursor.file, cursor.record
    for epoch in itertools.count(cursor.epoch):
        window, remaining = [], size
        for documents, end, characters in read_documents(files, task, start):
            window += documents
            remaining -= characters
            if remaining <= 0:
                yield items_of(window), Cursor(epoch, *end)
                window, remaining = [], size
        yield items_of(window), Cursor(epoch + 1)  # what is left, perhaps nothing
        start = 0, 0


def prefetch(iterator: Iterator, thread: ThreadPoolExecutor, ahead: int) -> Iterator:
    """Yield the items of an endless iterator, `ahead` of which a thread computes."""
    futures = deque(thread.submit(next, iterator) for _ in range(ahead))

    def items():  # If prefetch had a yield itself, the thread would start only later.
        while True:
            futures.append(thread.submit(next, iterator))
            yield futures.popleft().result()

    return items()


def examples_of(name, task, tokenizer, cfg, windows, cursor: Cursor) -> Iterator:
    """Yield (example, Cursor after it), shuffled; (None, Cursor) ends an epoch."""
    for items, next_cursor in windows:
        # Epoch, file and record name a window, which gets random bits of its own.
        seeds = cfg.train.seed, zlib.crc32(name.encode()), *cursor[:3]
        order = random_order(len(items), *seeds, EXAMPLE_ORDER)
        shuffled = [items[i] for i in order]
        examples = make_examples(shuffled, task, tokenizer, cfg, *seeds, NOISE)
        for example in examples[cursor.taken :]:
            cursor = cursor._replace(taken=cursor.taken + 1, total=cursor.total + 1)
            yield example, cursor
        next_cursor = next_cursor._replace(total=cursor.total)
        if next_cursor.epoch > cursor.epoch:
            if not cursor.total:
                raise UserError(f"{task.source} has no text for the task {name}.")
            yield None, next_cursor
        cursor = next_cursor


def print_statistics(rows: list[list[Example]], limits: tuple[int, int]) -> None:
    """Print what the first packed rows tell of lengths and vocabulary."""
    examples = [example for row in rows for example in row]
    lengths = np.array([[len(ids) for ids in example] for example in examples])
    at_limit = (lengths >= limits).any(axis=1).mean()
    inputs, targets = lengths.sum(axis=0) / limits / len(rows)
    a, b = (np.mean(np.concatenate(side) == UNK) for side in zip(*examples))
    print(f"data     {at_limit:.1%} of examples reach inputs_length or targets_length")
    print(f"data     rows are {inputs:.0%} (inputs), {targets:.0%} (targets) full")
    print(f"data     {a:.2%} of the inputs and {b:.2%} of the targets are unknown tokens")


class Batches(Iterator):
    """Iterate over the batches of training, from a position that an earlier run saved.

    Many rows are packed at once, so that they are full even if batches are small. A pack
    ends where a task ends an epoch: so a task uses all examples before it repeats one.
    """

    def __init__(self, cfg: Config, tokenizer: Tokenizer, position: dict | None = None):
        self.cfg = cfg
        self.rates = rates = train_tasks(cfg)
        self.limits = cfg.data.inputs_length, cfg.data.targets_length
        self.pack = cfg.data.pack
        # A position is where the next pack begins, and how many of its rows are used.
        position = position or {"used_rows": 0, "cursors": dict.fromkeys(rates, Cursor())}
        cursors = {name: Cursor(*c) for name, c in position["cursors"].items()}
        self.streams, files_found = {}, []
        reader, maker = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        size = WINDOW_CHARACTERS // min(len(self.rates), 32)
        for name, cursor in cursors.items():
            task, task_files = open_task(name, "train", cfg)
            windows = read_windows(task, task_files, tokenizer, cfg, size, cursor)
            windows = prefetch(windows, reader, ahead=1)
            self.streams[name] = examples_of(name, task, tokenizer, cfg, windows, cursor)
            files_found += [[file.name.split("/")[-1], file.size] for file in task_files]
        crc32 = zlib.crc32(json.dumps([self.rates, files_found]).encode())
        if position.get("files_crc32", crc32) != crc32:
            raise UserError("Training files or rates have changed since this run began.")
        self.position = {**position, "files_crc32": crc32}
        self.batches = prefetch(self.make_batches(cursors), maker, ahead=16)

    def __next__(self) -> Batch:
        batch, position = next(self.batches)
        self.position = self.position | position
        return batch

    def choose_examples(self, cursors: dict) -> tuple[list[Example], dict]:
        """Return examples of all tasks, for ROWS_PER_PACK rows, and the next cursors."""
        cursors = cursors.copy()
        names, rates = list(self.rates), list(self.rates.values())
        totals = np.array([cursors[name].total for name in names])
        # SeqIO draws tasks at random. This takes the task farthest behind its rate: rates
        # of 3 and 1 give a a a b a a a b. `phase` lets tasks of equal rates take turns.
        phase = (np.arange(len(names)) + 0.5) / len(names)
        examples, filled = [], np.zeros(2)  # rows that all inputs and all targets need
        while max(filled) < ROWS_PER_PACK:
            k = np.argmin((totals + phase) / rates)
            example, cursors[names[k]] = next(self.streams[names[k]])
            if example:
                totals[k] += 1
                examples.append(example)
                lengths = [len(ids) for ids in example] if self.pack else self.limits
                filled += np.divide(lengths, self.limits)
            elif examples:  # The epoch of a task ends here, and so does the pack.
                break
        return examples, cursors

    def pack_rows(self, cursors: dict) -> tuple[list[list[Example]], dict]:
        """Pack the next examples, and shuffle the rows. Returns also the next cursors."""
        total = sum(cursor.total for cursor in cursors.values())
        examples, next_cursors = self.choose_examples(cursors)
        lengths = np.array([[len(ids) for ids in example] for example in examples])
        row_of = pack(lengths, self.limits) if self.pack else np.arange(len(examples))
        new_number = random_order(row_of.max() + 1, self.cfg.train.seed, total, ROW_ORDER)
        rows = [[] for _ in new_number]
        for r, example in zip(new_number[row_of], examples):
            rows[r].append(example)
        if not total:
            print_statistics(rows, self.limits)
        return rows, next_cursors

    def make_batches(self, cursors: dict) -> Iterator:
        """Yield (batch, position). A restart packs the same rows and skips used ones."""
        rows, used_rows = [], self.position["used_rows"]
        while True:
            packed, next_cursors = self.pack_rows(cursors)
            for number, row in enumerate(packed[used_rows:], used_rows + 1):
                rows.append(row)
                if len(rows) == self.cfg.train.batch_size:
                    position = {"used_rows": number, "cursors": cursors}
                    yield fill_rows(rows, self.limits), position
                    rows = []
            cursors, used_rows = next_cursors, 0


def batches_of_split(
    name: str, split: str, cfg: Config, tokenizer, limit: int | None = None
) -> list[Batch]:
    """Return the batches of a split, one example in each row; [] if there is no split."""
    task, files = open_task(name, split, cfg)
    items = []
    # Read windows of 2^18 characters, until they give enough examples.
    for new_items, next_window in read_windows(task, files, tokenizer, cfg, 1 << 18):
        items += new_items
        if next_window.epoch or (limit and len(items) >= limit):
            break
    seeds = cfg.train.seed, zlib.crc32(name.encode()), NOISE
    examples = make_examples(items[:limit], task, tokenizer, cfg, *seeds)
    lengths = cfg.data.inputs_length, cfg.data.targets_length
    size = cfg.train.batch_size
    rows = [[example] for example in examples] + [[]] * (-len(examples) % size)
    return [fill_rows(rows[i : i + size], lengths) for i in range(0, len(rows), size)]


def encode_pairs(pairs: list[dict], task: Task, tokenizer, cfg) -> list[Example]:
    return make_examples(tokenize(pairs, task, tokenizer), task, tokenizer, cfg)


# ---- sources: KIND:NAME ----------------------------------------------------------------


class File(NamedTuple):
    """A file or another part of a source. read() returns an iterable of records."""

    name: str
    read: Callable
    size: int = 0


def read_lines(path: str) -> Iterator[str]:
    """Yield the lines of a UTF-8 file, which may be compressed."""
    if re.search(r"\.(zip|tar(\.\w+)?|tgz)$", path):  # These hold several files.
        raise UserError(f"{path}: unpack it, or use .gz, .bz2, .xz or .zst.")
    with fsspec.open(path, compression="infer") as file:
        for number, line in enumerate(file, 1):
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise UserError(f"{path}:{number} is not UTF-8 text ({error}).") from None


def read_text(path):
    return ({"text": line.rstrip("\r\n")} for line in read_lines(path) if line.strip())


def read_jsonl(path):
    for number, line in enumerate(read_lines(path), 1):
        try:
            if line.strip():
                yield {**json.loads(line)}
        except (ValueError, TypeError) as error:
            raise UserError(f"{path}:{number} is not a JSON object ({error}).") from None


def read_table(delimiter, path):
    """Yield the records of CSV as in RFC 4180, or of TSV, in which quotes are text."""
    csv.field_size_limit(1 << 30)
    quoting = csv.QUOTE_MINIMAL if delimiter == "," else csv.QUOTE_NONE
    rows = csv.reader(read_lines(path), delimiter=delimiter, quoting=quoting, strict=True)
    names = next(rows, [])
    for row in filter(None, rows):
        if len(row) != len(set(names)):
            raise UserError(f"{path}:{rows.line_num} has {len(row)} values for {names}.")
        yield dict(zip(names, row))


def read_parquet(path):
    import pyarrow.parquet

    with fsspec.open(path) as file:
        table = pyarrow.parquet.ParquetFile(file, page_checksum_verification=True)
        for batch in table.iter_batches(128):
            # select() raises an error if two columns have the same name.
            yield from batch.select(batch.schema.names).to_pylist()


@cache
def read_python():
    """Return the pages of Python's manual, and docstrings, joined for each module."""
    from pydoc_data.topics import topics

    texts = list(topics.values())
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef
    for path in sorted(Path(ast.__file__).parent.glob("*.py")):
        nodes = ast.walk(ast.parse(path.read_bytes()))
        docs = [ast.get_docstring(node) for node in nodes if isinstance(node, kinds)]
        texts.append("\n\n".join(filter(None, docs)))
    return [{"text": text} for text in texts if text]


def open_python(name: str, split: str, cfg: Config) -> list[File]:
    # Read here, not in a thread: Python 3.11 cannot parse in two threads at once.
    return [File(f"Python {python_version()}", partial(iter, read_python()))]


READERS = {
    "text": read_text, "jsonl": read_jsonl, "csv": partial(read_table, ","),
    "tsv": partial(read_table, "\t"), "parquet": read_parquet,
}  # fmt: skip
SOURCES = {"python": open_python}  # extras/libraries.py adds others that are not files


def source_files(source: str, split: str, cfg: Config) -> list[File]:
    """Return the files of a source, such as python: and text:books/{split}.txt."""
    kind, _, name = source.partition(":")
    if kind in SOURCES:
        return SOURCES[kind](name, split, cfg)
    if kind not in READERS:
        kinds = ", ".join((*SOURCES, *READERS))
        raise UserError(f"{source!r} is not a source KIND:NAME. Kinds: {kinds}.")
    filled, files = name.replace("{split}", split), []
    system, pattern = fsspec.core.url_to_fs(filled)
    for path, info in sorted(system.glob(pattern, detail=True).items()):
        if info["type"] != "directory":
            if "://" in name:
                cache, colons, _ = name.rpartition("::")  # as in simplecache::gs://...
                path = cache + colons + system.unstrip_protocol(path)
            files.append(File(path, partial(READERS[kind], path), info["size"]))
    if not files and (filled == name or split == "train"):
        raise UserError(f"No file matches {filled}.")
    return files


def split_records(file: File, index: int, split: str) -> Iterator[dict]:
    """Yield a split of a file: 5 % of its first 20,000 records are for validation."""
    for number, record in enumerate(file.read()):
        if split == "validation" and number == 20_000:
            return
        held = number < 20_000 and zlib.crc32(f"{index}:{number}".encode()) % 20 == 0
        if held == (split == "validation"):
            yield record


# ---- tasks, mixtures, and the training of a vocabulary ---------------------------------

TASKS |= {
    "span_corruption": Task("python:", objective=SPAN_CORRUPTION),
    "prefix_lm": Task("python:", objective=PREFIX_LM),
    "text_to_text": Task(),
    "random": Task("random:", objective=SPAN_CORRUPTION),
    "c4_v220_span_corruption": Task("tfds:c4/en:2.2.0", objective=SPAN_CORRUPTION),
    "c4_v220_prefix_lm": Task("tfds:c4/en:2.2.0", objective=PREFIX_LM),
}


def mixture_rates(name: str, cfg: Config) -> dict[str, float]:
    """Return the rate of each task of a mixture. A task of rate 0 is only evaluated."""
    if name not in MIXTURES:
        return {name: 1.0}
    rates, members = Counter(), MIXTURES[name]
    if callable(members):  # In T0, the tasks depend on --data.source.
        members = members(cfg)
    elif cfg.data.source and name == cfg.data.task:
        raise UserError(f"The mixture {name} has no sources of its own: its tasks have.")
    for member, rate in members.items():
        inner = mixture_rates(member, cfg)
        for task, share in inner.items():
            rates[task] += rate * share / sum(inner.values())
    if min(rates.values(), default=-1) < 0 or not 0 < sum(rates.values()) < np.inf:
        raise UserError(f"The rates of the mixture {name} are not valid: {dict(rates)}.")
    return rates


def train_tasks(cfg: Config) -> dict[str, float]:
    return {name: r for name, r in mixture_rates(cfg.data.task, cfg).items() if r}


def eval_tasks(cfg: Config, names: str = "") -> list[str]:
    """Return the tasks to evaluate. A mixture counts as its tasks."""
    names = (names or cfg.data.eval_tasks or cfg.data.task).split(",")
    return [task for name in names for task in mixture_rates(name.strip(), cfg)]


def find_task(name: str, cfg: Config) -> Task:
    """Return a task by name, or a task for pairs in a source such as jsonl:a.jsonl."""
    if name not in TASKS and ":" not in name:
        if not configs.HAS_EXTRAS:
            raise UserError(f"There is no task {name}, and no folder extras/.")
        from extras import t5_tasks  # --data.source can name tasks of P3

        return t5_tasks.p3_task(name, cfg)
    task = TASKS.get(name, Task(name))
    if name == cfg.data.task and cfg.data.source:
        task = task._replace(source=cfg.data.source, splits=Task().splits)  # all splits
    return task


def open_task(name: str, split: str, cfg: Config) -> tuple[Task, list[File]]:
    """Return a task and the files of a split, [] if it lacks the split."""
    task = find_task(name, cfg)
    files = source_files(task.source, split, cfg) if split in task.splits else []
    if re.search(r"{split}|^(hf|tfds|seqio):", task.source):
        return task, files
    # If a run trains on files without {split} in their names, a part of them is held out.
    train_sources = [find_task(other, cfg).source for other in train_tasks(cfg)]
    if absolute_source(task.source) not in map(absolute_source, train_sources):
        return task, files
    if split not in ("train", "validation"):
        return task, []
    configs.print_once(f"data     held out: 5 % of the first 20,000 of {task.source}")
    readers = [partial(split_records, file, i, split) for i, file in enumerate(files)]
    return task, [file._replace(read=r) for file, r in zip(files, readers)]


def absolute_source(source: str) -> tuple[str, str]:
    """Return the kind and the files of a source, in which tsv:./a.tsv is tsv:a.tsv."""
    kind, _, name = source.partition(":")
    return kind, name if "://" in name else os.path.abspath(name)


def read_task(name: str, split: str, cfg: Config) -> Iterator[dict]:
    """Yield the documents of a split of a task: none, if it lacks the split."""
    task, files = open_task(name, split, cfg)
    for documents, *_ in read_documents(files, task):
        yield from documents


def train_vocabulary(cfg: Config, size: int) -> bytes:
    """Train a SentencePiece model on the beginning of the training texts."""
    lines, remaining = [], 1 << 27  # characters that are still to be read
    readers = [read_task(name, "train", cfg) for name in train_tasks(cfg)]
    in_turn = itertools.zip_longest(*readers, fillvalue={})
    for fields in itertools.chain.from_iterable(in_turn):
        for name in ("text", "inputs", "targets"):
            text = fields.get(name, "")
            lines += re.findall(".{1,4000}", text)  # SentencePiece skips longer lines
            remaining -= len(text)
        if remaining < 0:
            break
    print(f"data     training a vocabulary of {size:,} pieces on {len(lines):,} lines")
    output = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=output,
        vocab_size=size,
        hard_vocab_limit=False,  # A small text gives fewer pieces.
        pad_id=PAD,
        eos_id=EOS,
        unk_id=UNK,
        bos_id=-1,
        character_coverage=0.9999,
        max_sentence_length=16_000,
        minloglevel=2,
        num_threads=4,  # fixed, because another number gives another vocabulary
    )
    return output.getvalue()


configs.load_extras()  # adds tasks and mixtures; at the end, as it imports this file

# ---- the command -----------------------------------------------------------------------


@dataclass(frozen=True)
class Options(configs.Options):
    init_from: str = ""  # the run or checkpoint whose vocabulary is used, as in train.py
    show: int = 3  # rows to print
    list: bool = False  # print all tasks and mixtures, and the rates of --data.task


def main() -> None:
    options = configs.parse(Options)
    cfg = options.cfg
    if options.list:
        print("tasks", *TASKS, "mixtures", *MIXTURES, sep="\n  ")
        for name, rate in mixture_rates(cfg.data.task, cfg).items():
            print(f"{name:40}{rate:14,.6g}  {find_task(name, cfg).source}")
        return
    if options.init_from:
        cfg = configs.with_network_of(cfg, configs.load_run(options.init_from)[0])
    tokenizer = load_tokenizer(cfg, options.init_from or options.run_dir)
    batch = next(Batches(cfg, tokenizer))
    for row in itertools.islice(map(Batch, *batch), options.show):
        inputs = "inputs", row.inputs, row.input_segments
        targets = "targets", row.targets, row.target_segments
        for side, ids, segments in (inputs, targets):
            parts = [ids[segments == k] for k in range(1, segments.max() + 1)]
            print(side, *map(tokenizer.decode, parts), sep="\n    ")


if __name__ == "__main__":
    import data  # rather than __main__, because recipes and extras import data, too

    data.main()
