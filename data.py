"""What a training example is: text -> tokens -> spans or pairs -> rows -> the batch of a step.

- A vocabulary makes ids of texts; token files keep them, chapter by chapter of the source.
- An objective cuts chapters into pieces, and makes of a piece an example's inputs and targets.
- Draw n of a task is the same example everywhere: its place in a permutation that a key gives.
- A block of draws, of each task by its rate, is packed into rows: several examples in a row.
- `Dataset.batch(step)` is a pure function: a run resumes by its step alone. NumPy only, no jax.

    python data.py --show 3                                  three real rows as the model sees them
    python data.py --config small_c4 --prepare               write a run's token files, and stop
    python data.py --config small_c4 --prepare --shard 0/4   the first of four machines' share
"""

import ast
import contextlib
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
import threading
import time
import timeit
import zlib
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Callable, NamedTuple

import numpy as np
import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tqdm import tqdm

import configs
from configs import UserError, note

PAD, EOS, UNK = 0, 1, 2
SENTINELS = 100  # <extra_id_0> ... <extra_id_99>


class Batch(NamedTuple):
    """The rows of a step, int32. Segment 0 is padding; the examples of a row count from 1. inputs,
    input_segments: [B, S]; decoder_inputs, targets, target_segments: [B, T]. The decoder's inputs
    are the targets moved right by one, with the start token 0 at each segment's beginning."""

    inputs: np.ndarray
    input_segments: np.ndarray
    decoder_inputs: np.ndarray
    targets: np.ndarray
    target_segments: np.ndarray


# ---- random numbers without state ----------------------------------------------------------------


def random_bits(*key):
    """64 random bits for each element of the broadcast integers `key`, a pure function of them:
    SplitMix64's finalizer (Steele, Lea and Flood 2014), applied once for each part of the key."""
    bits = np.zeros((), np.uint64)
    with np.errstate(over="ignore"):  # multiplication modulo 2^64 is meant
        for part in key:
            bits = (bits + np.uint64(0x9E3779B97F4A7C15)) ^ np.asarray(part).astype(
                np.uint64
            )
            bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            bits = bits ^ (bits >> np.uint64(31))
    return bits


def permute(index, size, *key):
    """Where `index` lands in a random permutation of range(size), without storing the permutation.
    index: integers in [0, size), any shape; key: integers, or arrays of that shape. A Feistel
    network permutes the next power of four; whoever lands outside range(size) walks on from there.
    """
    # bits of one half of a number
    half = np.uint64(max(1, (size - 1).bit_length() + 1 >> 1))
    low = np.uint64((1 << int(half)) - 1)
    out = np.asarray(index).astype(np.uint64).flatten()
    key = np.broadcast_to(random_bits(*key), np.shape(index)).ravel()
    outside = np.arange(out.size)
    while outside.size:
        left, right = out[outside] >> half, out[outside] & low
        for turn in range(4):
            left, right = right, left ^ (random_bits(key[outside], turn, right) & low)
        out[outside] = left << half | right
        outside = outside[out[outside] >= size]
    return out.astype(np.int64).reshape(np.shape(index))


# ---- vocabulary ----------------------------------------------------------------------------------


class Tokenizer:
    """Text <-> ids by a SentencePiece model: 0 pad, 1 EOS, 2 unknown, sentinels on top.
    <extra_id_0> has the highest id, `size - 1`, as in T5. processor: SentencePiece's, which has
    sentinels; serialized: the file, perhaps without them, which is what a run directory keeps."""

    def __init__(self, serialized, size, sentinels, processor=None):
        self.serialized, self.sha256 = serialized, hashlib.sha256(serialized).hexdigest()
        self.size, self.sentinels, self.processor = size, sentinels, processor

    def encode(self, text):
        """Text -> list of ids, without EOS. "<extra_id_0>" after a space is the sentinel."""
        return self.processor.encode(text)

    def encode_batch(self, texts):
        """Texts -> list of int32 arrays, on all cores."""
        return self.processor.encode(list(texts), return_type="numpy")

    def raw_text(self, ids):
        """Ids below `size` -> text as it is, unknown pieces and sentinels included."""
        return "".join(map(self.processor.id_to_piece, ids)).replace("\u2581", " ")

    def decode(self, ids):
        """Ids -> text, up to the first EOS; padding is left out, unused rows are unknown."""
        ids = itertools.takewhile(lambda i: i != EOS, map(int, ids))
        return self.processor.decode(
            [i if i < self.size else UNK for i in ids if i != PAD]
        )


# ---- span corruption -----------------------------------------------------------------------------
# Raffel et al. 2020, section 3.1.4. About 15 % of the tokens are removed in spans of 3 on average.
# Each span leaves one sentinel in the inputs; the targets are the sentinels with what they hide:
#
#     raw      Thank you for inviting me to your party last week
#     inputs   Thank you <extra_id_0> me to your party <extra_id_1> </s>
#     targets  <extra_id_0> for inviting <extra_id_1> last week </s>


def noise_counts(length, data):
    """Raw tokens -> (tokens removed, spans of them), rounded as in t5: float32, half to even."""
    noise = int(np.round(np.float32(length) * np.float32(data.noise_density)))
    noise = min(max(noise, 1), length - 1)
    spans = int(np.round(np.float32(noise) / np.float32(data.mean_span_length)))
    return noise, min(max(spans, 1), length - noise)


def raw_length(data):
    """How many raw tokens give at most `inputs_length` inputs: the largest, 568 for 512."""

    def inputs_of(length):
        noise, spans = noise_counts(length, data)
        return length - noise + spans + 1

    return next(n for n in itertools.count(2) if inputs_of(n + 1) > data.inputs_length)


def compositions(total, parts, keys):
    """For each key a way to write `total` as a sum of `parts` positive numbers: [N, parts]. All
    ways are equally likely: the gaps between ones with the lowest random numbers are cut."""
    lots = random_bits(keys[:, None], np.arange(total // 2)).view(np.uint32)[
        :, : total - 1
    ]
    cuts = np.argpartition(lots, min(parts - 1, total - 2), axis=1)[:, : parts - 1] + 1
    edges = np.zeros((len(keys), parts + 1), np.int64)
    edges[:, 1:-1], edges[:, -1] = np.sort(cuts, axis=1), total
    return np.diff(edges)


def span_corruption(tokens, keys, sentinel, data):
    """Remove spans: tokens [N, n], keys [N] -> inputs [N, ...], targets [N, ...], int32, with EOS.
    sentinel: id of <extra_id_0>; the next spans get the ids below it. data: DataConfig. Row i is a
    function of tokens[i] and keys[i] alone. A row begins with clean text and ends with a removed
    span, without another sentinel (t5/data/preprocessors.py, random_spans_noise_mask)."""
    rows, length = tokens.shape
    noise, spans = noise_counts(length, data)
    lengths = np.stack(
        [
            compositions(length - noise, spans, random_bits(keys, 1)),
            compositions(noise, spans, random_bits(keys, 0)),
        ],
        axis=2,
    )
    noisy = (
        np.tile([False, True], rows * spans).repeat(lengths.ravel()).reshape(rows, length)
    )
    # where a span begins: its room in the inputs,
    first = noisy & ~np.roll(noisy, 1, axis=1)
    before = np.roll(first, -1, axis=1)  # the token before it: that in the targets
    sentinels, sides = np.tile(sentinel - np.arange(spans), rows), []
    for room, kept in ((first, ~noisy | first), (before, noisy | before)):
        marked = tokens.astype(np.int32)
        marked[room] = sentinels
        side = np.full((rows, np.count_nonzero(kept[0]) + 1), EOS, np.int32)
        side[:, :-1] = marked[kept].reshape(rows, -1)
        sides.append(side)
    return sides


# ---- objectives ----------------------------------------------------------------------------------


class Objective:
    """What is learned from tokens: a value, the field `objective` of a Task. A recipe may have its
    own. Documents are cut into pieces, and a piece becomes an example, without EOS. keys: 64 random
    bits for each piece, others in each epoch. data: DataConfig. Where documents are cut,
    length(data) says how many tokens a piece has at most."""

    # fields of the source that are tokenized; of two, no document is cut
    features = ("text",)
    across = False  # whether pieces go on across the ends of documents
    shortest = 1  # shorter pieces are left out
    packs = True  # whether several may share a row

    def sizes(self, lengths, keys, tokenizer, data):
        """Tokens of N pieces [features, N] -> tokens of their inputs and targets [2, N]."""
        # tried on zeros
        pieces = [[np.zeros(n, np.int32) for n in piece] for piece in lengths.T]
        made = self.make(pieces, keys, tokenizer, data)
        return np.array([[len(side) for side in pair] for pair in made]).T

    def make(self, pieces, keys, tokenizer, data):
        """N pieces, an array of ids for each feature -> N pairs of arrays (inputs, targets)."""
        return pieces


class Pairs(Objective):
    """Inputs and targets as they are in the source."""

    features = ("inputs", "targets")

    def sizes(self, lengths, keys, tokenizer, data):
        return lengths


class SpanCorruption(Objective):
    """Pieces of the stream of all documents, as many tokens as fill the inputs."""

    across, shortest, packs = True, 2, False

    def length(self, data):
        return raw_length(data)

    def sizes(self, lengths, keys, tokenizer, data):
        noise, spans = np.array([noise_counts(n, data) for n in lengths[0].tolist()]).T
        return np.stack([lengths[0] - noise + spans, noise + spans])

    def make(self, pieces, keys, tokenizer, data):
        made, lengths = [None] * len(pieces), np.array([len(ids) for (ids,) in pieces])
        for length in np.unique(lengths):
            here = np.flatnonzero(lengths == length)
            if (spans := noise_counts(length, data)[1]) > tokenizer.sentinels:
                raise UserError(
                    f"{length} tokens lose {spans} spans, but there are "
                    f"{tokenizer.sentinels} sentinels: raise --data.mean_span_length."
                )
            sides = span_corruption(
                np.stack([pieces[i][0] for i in here]),
                keys[here],
                tokenizer.size - 1,
                data,
            )
            for i, inputs, targets in zip(here, *sides):
                made[i] = inputs[:-1], targets[:-1]
        return made


SIDES = ("inputs", "targets")


def truncated_length(side, task, data):
    """Return (maximum row length, number of EOS tokens, number of tokens kept before EOS).

    side: "inputs" or "targets". Targets always end in EOS; inputs do unless the task says
    otherwise. t5 cuts an example so that EOS still fits. T0's tasks cut it after EOS.
    """
    limit = data.inputs_length if side == "inputs" else data.targets_length
    eos = int(side == "targets" or task.inputs_eos)
    return limit, eos, limit - eos * task.eos_after_trim


def truncate(ids, side, task, data):
    """Cut the ids of one side of an example to its maximum length, and append EOS."""
    limit, eos, kept = truncated_length(side, task, data)
    return np.concatenate([ids[:kept], [EOS] * eos]).astype(np.int32)[:limit]


ORDER, NOISE, PACKING = range(1, 4)  # the first part of a key of random bits


class Examples:
    """The examples of a task, each named by its epoch and its number: the piece it is made of.
    corpus: the pieces of the task's token files. An epoch has each of them once, chapter after
    chapter of the source, in a random order within each, unless it is not to be shuffled."""

    def __init__(self, task, corpus, tokenizer, cfg, shuffled=True):
        self.task, self.corpus, self.tokenizer, self.cfg = task, corpus, tokenizer, cfg
        self.shuffled = shuffled

    def locate(self, draws):
        """Numbers of draws [N] -> examples: epochs and numbers [2, N]."""
        # the piece each chapter begins with
        first = self.corpus.chapters(int(draws.max()) + 1)
        epochs, numbers = np.divmod(draws, max(1, first[-1]))
        chapters = np.searchsorted(first, numbers, "right") - 1
        for chapter in np.unique(chapters) if self.shuffled else ():
            here, start, stop = chapters == chapter, *first[chapter : chapter + 2]
            numbers[here] = start + permute(
                numbers[here] - start,
                stop - start,
                ORDER,
                self.cfg.train.seed,
                epochs[here],
                chapter,
            )
        return np.stack([epochs, numbers])

    def sizes(self, examples):
        """Examples -> the tokens of their inputs and targets, EOS not counted: [2, N]."""
        keys = random_bits(NOISE, self.cfg.train.seed, *examples)
        return self.task.objective.sizes(
            self.corpus.lengths(examples[1]), keys, self.tokenizer, self.cfg.data
        )

    def make(self, examples):
        """Examples -> [(inputs, targets)], cut to their limits, with EOS."""
        keys = random_bits(NOISE, self.cfg.train.seed, *examples)
        pairs = self.task.objective.make(
            self.corpus.pieces(examples[1]), keys, self.tokenizer, self.cfg.data
        )
        return [
            [
                truncate(ids, side, self.task, self.cfg.data)
                for ids, side in zip(pair, SIDES)
            ]
            for pair in pairs
        ]


# ---- packing -------------------------------------------------------------------------------------


def pack(sizes, limits):
    """Tokens of inputs and targets of examples [2, N] -> the row of each [N]; none is split. A row
    takes the example that leaves least room in it, on both sides alike: room is measured by what an
    average row has to hold. Examples of the same sizes wait together."""
    pairs, which = np.unique(sizes, axis=1, return_inverse=True)  # rising by inputs
    waiting = [[] for _ in pairs[0]]
    for example, pair in enumerate(which.ravel().tolist()):
        waiting[pair].append(example)
    limits, load = np.array(limits), sizes.sum(1) / limits
    average = limits * load / load.max()
    x, y = (pairs / average[:, None]).astype(np.float32)
    targets, short = (
        pairs[1].copy(),
        np.searchsorted(pairs[0], np.arange(limits[0] + 1), "right"),
    )
    rows, row, left = np.zeros(sizes.shape[1], int), -1, sizes.shape[1]
    while left:
        row, room = row + 1, limits.copy()
        while fit := short[room[0]]:
            a, b = (1 - (limits - room) / average).astype(np.float32)
            a, b = a - x[:fit], b - y[:fit]
            rest = np.where(targets[:fit] > room[1], np.inf, a + b + np.abs(a - b) / 2)
            if rest[best := int(rest.argmin())] == np.inf:
                break
            rows[waiting[best].pop()] = row
            room, left = room - pairs[:, best], left - 1
            targets[best] = targets[best] if waiting[best] else limits[1] + 1
    return rows


def fill_rows(examples, rows, count, limits):
    """[(inputs, targets)], the row of each (rising), number of rows -> Batch."""
    tokens, segments = (
        [np.zeros((count, limit), np.int32) for limit in limits] for _ in range(2)
    )
    for row, members in itertools.groupby(
        zip(rows.tolist(), examples), lambda member: member[0]
    ):
        for side, parts in enumerate(zip(*(pair for _, pair in members))):
            sizes = [len(ids) for ids in parts]
            tokens[side][row, : sum(sizes)] = np.concatenate(parts)
            segments[side][row, : sum(sizes)] = np.repeat(
                np.arange(len(parts)) + 1, sizes
            )
    return complete_batch(*tokens, *segments)


def complete_batch(inputs, targets, input_segments, target_segments):
    """Rows of tokens and their segments -> Batch, with the decoder's inputs."""
    decoder_inputs = np.zeros_like(targets)
    decoder_inputs[:, 1:] = targets[:, :-1]
    target_segments = target_segments.astype(np.int32)
    decoder_inputs[:, 1:][target_segments[:, 1:] != target_segments[:, :-1]] = PAD
    return Batch(
        inputs, input_segments.astype(np.int32), decoder_inputs, targets, target_segments
    )


# ---- the batch of a step -------------------------------------------------------------------------


class Dataset:
    """The rows of a split. Training goes through blocks of about BLOCK draws, of each task as many
    as its rate says; the draws of a block are packed into rows, which come in a random order.
    starts: how many rows lie before each block, as far as that is known from earlier."""

    BLOCK = 1 << 14

    def __init__(self, tasks, rates, cfg, starts=(0,)):
        self.tasks, self.cfg, self.starts = tasks, cfg, list(starts)
        self.rates = np.array(rates) / sum(rates)
        self.packs = cfg.data.pack and any(
            examples.task.objective.packs for examples in tasks
        )
        self.thread, self.plans = ThreadPoolExecutor(1), {}

    def batch(self, step, rows=None):
        """The Batch of a step, a pure function. rows: which of its rows to make, all by default."""
        size, data = self.cfg.train.batch_size, self.cfg.data
        numbers = step * size + (np.arange(size) if rows is None else np.asarray(rows))
        row, task, draw = self.members(numbers)
        made = [None] * len(row)
        for k in np.unique(task):
            here = np.flatnonzero(task == k)
            for i, pair in zip(
                here.tolist(), self.tasks[k].make(self.tasks[k].locate(draw[here]))
            ):
                made[i] = pair
        return fill_rows(
            made, row, len(numbers), (data.inputs_length, data.targets_length)
        )

    def members(self, numbers):
        """Numbers of rows -> (row, task, draw) of the examples in them."""
        self.extend(int(numbers.max()))
        found, blocks = [], np.searchsorted(self.starts, numbers, "right") - 1
        plans = {block: self.planned(block) for block in np.unique(blocks).tolist()}
        for row, (number, block) in enumerate(zip(numbers.tolist(), blocks.tolist())):
            task, draw, edges = plans[block]
            start, stop = edges[number - self.starts[block] :][:2]
            found.append((np.full(stop - start, row), task[start:stop], draw[start:stop]))
        return map(np.concatenate, zip(*found))

    def drawn(self, block):
        """How many examples of each task are drawn before a block."""
        # not all round up at once
        phase = (np.arange(len(self.rates)) + 0.5) / len(self.rates)
        return np.floor(self.rates * block * self.BLOCK + phase).astype(int)

    def plan(self, block):
        """A block -> (task, draw) of its examples, row after row, and the edges between rows."""
        first, count = self.drawn(block), self.drawn(block + 1) - self.drawn(block)
        task = np.repeat(np.arange(len(count)), count)
        inside = np.arange(len(task)) - np.repeat(np.cumsum(count) - count, count)
        # evenly interleaved
        order = np.argsort((inside + 0.5) / count[task], kind="stable")
        task, draw = task[order], (first[task] + inside)[order]
        if not self.packs:
            return task, draw, np.arange(len(task) + 1)
        sizes = np.zeros((2, len(task)), int)
        for k in np.unique(task):
            here, examples = task == k, self.tasks[k].locate(draw[task == k])
            for size, found, side in zip(sizes, self.tasks[k].sizes(examples), SIDES):
                limit, eos, kept = truncated_length(
                    side, self.tasks[k].task, self.cfg.data
                )
                size[here] = np.minimum(np.minimum(found, kept) + eos, limit)
        row = pack(sizes, (self.cfg.data.inputs_length, self.cfg.data.targets_length))
        row = permute(row, int(row.max()) + 1, PACKING, self.cfg.train.seed, block)
        order = np.argsort(row, kind="stable")
        return task[order], draw[order], np.append(0, np.cumsum(np.bincount(row)))

    def planned(self, block):
        """plan(block); the next block is planned in the background meanwhile."""
        for number in (block, block + 1):
            if number not in self.plans:
                self.plans[number] = self.thread.submit(self.plan, number)
        self.plans = {number: self.plans[number] for number in (block, block + 1)}
        return self.plans[block].result()

    def extend(self, row):
        """Find where the blocks begin, up to the one that has this row."""
        while self.starts[-1] <= row:
            block = len(self.starts) - 1
            rows = (
                len(self.planned(block)[-1]) - 1
                if self.packs
                else (sum(self.drawn(block + 1)) - sum(self.drawn(block)))
            )
            self.starts.append(self.starts[-1] + int(rows))


# ====== below: vocabularies, sources, tasks, mixtures, token files, the screen ====================


# ---- vocabularies ----------------------------------------------------------------------


class ByteTokenizer(Tokenizer):
    """Encode text as its UTF-8 bytes. Byte b has the id b + 3 (ByT5, Xue et al. 2022).

    extra_ids: the number of sentinels, whose ids follow the ids of the bytes. If
    extra_ids is 0, the ids of the 11 highest bytes are the sentinels, as in the published
    models.
    """

    def __init__(self, extra_ids=0):
        # UTF-8 never uses the 11 bytes from 245 to 255, so their ids can be sentinels.
        sentinels = extra_ids or 11
        super().__init__(f"bytes:{extra_ids}\n".encode(), 3 + 256 + extra_ids, sentinels)

    def encode(self, text):
        return self.encode_batch([text])[0].tolist()

    def encode_batch(self, texts):
        encoded = []
        for text in texts:
            # re.split returns texts at even positions, sentinel numbers at odd positions.
            parts = re.split(r"<extra_id_(\d\d?)>", text)
            arrays = [np.frombuffer(part.encode(), np.uint8) + 3 for part in parts]
            for position in range(1, len(parts), 2):
                arrays[position] = [self.size - 1 - int(parts[position])]
            encoded.append(np.concatenate(arrays, dtype=np.int32))
        return encoded

    def raw_text(self, ids):
        symbols = [b"<pad>", b"</s>", b"<unk>", *(bytes([byte]) for byte in range(256))]
        for number in reversed(range(self.size - len(symbols))):
            symbols.append(b"<extra_id_%d>" % number)
        return b"".join(symbols[i] for i in ids).decode(errors="replace")

    def decode(self, ids):
        """Return the text of the ids before the first EOS.

        Ids that are not bytes and bytes that are not valid UTF-8 are left out.
        """
        ids = itertools.takewhile(lambda i: i != EOS, map(int, ids))
        return bytes(i - 3 for i in ids if 3 <= i < 3 + 256).decode(errors="ignore")


class IdTokenizer(Tokenizer):
    """Encode text that consists of token ids in decimal digits, such as "17 4 29".

    Sources such as reverse: and random: hold token ids, so they need no other vocabulary.
    size: the number of ids. sentinels: how many of the highest ids are sentinels.
    """

    def __init__(self, size, sentinels=0):
        super().__init__(f"ids:{size}:{sentinels}\n".encode(), size, sentinels)

    def encode(self, text):
        ids = [int(word) if word.isdecimal() else UNK for word in text.split()]
        return [i if i < self.size else UNK for i in ids]

    def encode_batch(self, texts):
        return [np.array(self.encode(text), np.int32) for text in texts]

    def raw_text(self, ids):
        return "".join(f" {i}" for i in ids)

    def decode(self, ids):
        """Return the ids before the first EOS as text. Padding is left out."""
        ids = itertools.takewhile(lambda i: i != EOS, ids)
        return " ".join(str(i) for i in ids if i != PAD)


def add_sentinels(model, number):
    """Append `number` sentinels to a SentencePiece ModelProto, with <extra_id_0> last."""
    user_defined = sentencepiece_model_pb2.ModelProto.SentencePiece.USER_DEFINED
    for k in reversed(range(number)):
        model.pieces.add(piece=f"▁<extra_id_{k}>", score=0.0, type=user_defined)


@functools.lru_cache(maxsize=4)  # the hundreds of tasks of a mixture share one vocabulary
def parse_vocabulary(serialized, name="the vocabulary"):
    """Return the Tokenizer of a serialized SentencePiece model.

    If the model has no sentinels, 100 sentinels are added. `name` names the file in
    messages. Raises UserError if the bytes are not a SentencePiece model with T5's
    special ids.
    """
    model = sentencepiece_model_pb2.ModelProto()
    try:
        model.ParseFromString(serialized)
    # The exception is protobuf's DecodeError, whose module differs between versions.
    except Exception as error:
        raise UserError(
            f"{name} is not a SentencePiece model ({error}): give --data.vocab another "
            f"file."
        ) from error
    special = [piece.piece for piece in model.pieces[:3]]
    if special != ["<pad>", "</s>", "<unk>"]:
        raise UserError(
            f"{name} begins with the pieces {special}, but T5 needs <pad>, </s>, <unk> "
            f"as ids 0, 1, 2: train it with pad_id=0, eos_id=1, unk_id=2, bos_id=-1."
        )
    if model.pieces[-1].piece not in ("▁<extra_id_0>", "<extra_id_0>"):
        add_sentinels(model, SENTINELS)
    try:
        processor = sentencepiece.SentencePieceProcessor(
            model_proto=model.SerializeToString(), num_threads=os.cpu_count()
        )
    except RuntimeError as error:
        raise UserError(f"{name} is damaged ({error}): fetch it again.") from error
    sentinels = sum("<extra_id_" in piece.piece for piece in model.pieces)
    return Tokenizer(serialized, len(model.pieces), sentinels, processor)


def load_tokenizer(path):
    """Return the Tokenizer that --data.vocab names.

    path: the path of a SentencePiece model (local or remote), "bytes", "bytes:EXTRA_IDS",
    "ids:SIZE" or "ids:SIZE:SENTINELS". Raises UserError if the file cannot be read.
    """
    path = str(path)
    without_pieces = r"(bytes|ids:\d{1,9})(:\d{1,9})?\s*"
    if re.fullmatch(without_pieces, path):
        kind = ByteTokenizer if path.startswith("bytes") else IdTokenizer
        return kind(*map(int, re.findall(r"\d+", path)))
    try:
        with open_file(path) as file:
            serialized = file.read()
    except (OSError, ValueError) as error:
        raise UserError(
            f"There is no vocabulary at {path} "
            f"({getattr(error, 'strerror', 0) or error}): give --data.vocab the path of "
            f"a SentencePiece model, or train a vocabulary on the source with "
            f"--data.vocab train:32000."
        ) from error
    # The vocabulary file of a run may hold just a name, such as "bytes:100".
    if re.fullmatch(without_pieces.encode(), serialized):
        return load_tokenizer(serialized.decode())
    return parse_vocabulary(serialized, path)


def train_tokenizer(texts, pieces, max_characters=1 << 27):
    """Train a SentencePiece unigram model on texts and return its Tokenizer.

    texts: an iterable of strings. Reading stops after `max_characters` characters, which
    take one or two minutes. pieces: the size of the vocabulary, without its sentinels.
    Raises UserError if the texts are too short for so many pieces.
    """
    lines = []
    with progress_bar("reading for a vocabulary", "character") as bar:
        for text in texts:
            # SentencePiece skips lines above 16,000 bytes, so long lines are cut.
            lines += re.findall(".{1,4000}", "\n".join(text.splitlines()))
            bar.update(len(text))
            if bar.n >= max_characters:
                break
        note(f"training a vocabulary of {pieces:,} pieces on {bar.n:,} characters")
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            vocab_size=pieces,
            model_type="unigram",
            pad_id=PAD,
            eos_id=EOS,
            unk_id=UNK,
            bos_id=-1,
            num_threads=4,  # a fixed number, because the resulting pieces depend on it
            minloglevel=2,
            max_sentence_length=16_000,
            character_coverage=0.9999,
        )
    except RuntimeError as error:
        # SentencePiece's message ends with the largest possible size: "value <= 1234".
        bound = re.search(r"<= (\d+)", str(error))
        raise UserError(
            f"The source has too little text for {pieces} pieces: add text, or set "
            f"--data.vocab train:{bound[1] if bound else 'N'} or fewer."
        ) from error
    return parse_vocabulary(model.getvalue())


class ProgressBar(tqdm):
    """A tqdm progress bar that prints plain lines if its output is not a terminal."""

    @staticmethod
    def status_printer(file):
        """Return the function with which tqdm prints the state of the bar."""
        if file.isatty():
            return tqdm.status_printer(file)

        def print_line(text):
            if text:
                print(text, file=file, flush=True)

        return print_line


def progress_bar(what, unit, total=None, quiet=False):
    """Return a progress bar on standard error.

    what: the title of the bar. unit: what is counted, in the singular. total: the final
    count, if known. On a terminal, the bar appears after half a second. Otherwise, the
    bar prints a line every 30 seconds. If `quiet`, and in all processes except the main
    process, nothing is printed.
    """
    seconds = 0.5 if sys.stderr.isatty() else 30
    return ProgressBar(
        desc=what,
        unit=f" {unit}s",
        unit_scale=True,
        total=total,
        leave=False,
        delay=seconds,
        mininterval=seconds,
        disable=quiet or not configs.prints_progress,
    )


# ---- sources ---------------------------------------------------------------------------
# A source is written KIND:NAME, for example text:books/*.txt. SOURCES maps each kind to a
# function (name, split, cfg) that opens the source and returns a list of SourceFiles.
#
# - split is the name of a split, such as "train" or "validation". If split is None, all
#   examples are wanted.
# - SourceFile.read(bad) yields pairs (where, example). `example` is a dict of fields.
#   `where` is the place of the example for messages, such as "books/a.txt:3".
# - If something cannot be read, the reader calls bad(where, what), such as
#   bad("a.jsonl:3", "is not JSON"). This call raises a UserError or counts the example,
#   as --data.on_error says. If the call returns, the reader continues.
# - A path may be remote, such as gs://bucket/*.gz. The library fsspec opens it.


class SourceFile(NamedTuple):
    """A file of a source, a group of small files, or a range of records."""

    name: str
    stamp: list  # sizes and times of the files; if they change, the source has changed
    read: Callable  # read(bad) yields (where, example) and reports problems to `bad`


class MissingSplit(UserError):
    """The source has splits, but not the requested split."""


class MissingSource(UserError):
    """Sources do not exist. The argument is a dict {problem: remedy}.

    One such error reports all missing sources of a mixture, and each remedy only once.
    """

    def __str__(self):
        problems = self.args[0]
        remedies = dict.fromkeys(problems.values())  # each remedy once, in order
        return ";\n".join(problems) + f": {' '.join(remedies)}"


@functools.cache
def python_documents():
    """Return the texts that come with Python: its language manual and its docstrings.

    Each file of the standard library gives one document, which consists of its
    docstrings. Each topic of the manual (pydoc_data/topics.py) gives a document, too. The
    files are parsed by `ast`, so nothing is imported or downloaded.
    """
    library = Path(os.__file__).parent
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    documents = []
    for path in sorted(library.rglob("*.py")):
        if left_out & set(path.relative_to(library).parts):
            continue
        tree = ast.parse(path.read_bytes())
        if path.parts[-2:] == ("pydoc_data", "topics.py"):
            # The file consists of one assignment, topics = {"assert": "The ...", ...}.
            assignment = next(node for node in tree.body if isinstance(node, ast.Assign))
            documents += ast.literal_eval(assignment.value).values()
        nodes = [node for node in ast.walk(tree) if isinstance(node, documented)]
        docstrings = [ast.get_docstring(node) for node in nodes]
        documents.append("\n\n".join(filter(None, docstrings)))
    return [document for document in documents if document.strip()]


def generated_source(name, stamp, examples, split):
    """Return the SourceFiles of a source whose examples are generated by a function.

    examples(split) is the function that yields the examples (dicts of fields) of a split,
    "train" or "validation".
    """

    def read(split, bad):
        for number, example in enumerate(examples(split)):
            yield f"{name} {split} {number}", example

    files = {
        split: SourceFile(f"{name} {split}", stamp, functools.partial(read, split))
        for split in ("train", "validation")
    }
    if split is None:
        return list(files.values())
    if split not in files:
        raise MissingSplit(f"{name} has no {split} split.")
    return [files[split]]


ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen "
    "fourteen fifteen sixteen seventeen eighteen nineteen"
).split()
TENS = "- - twenty thirty forty fifty sixty seventy eighty ninety".split()


def spell_number(n):
    """Return a number below one million in English words, such as "twenty-one"."""
    if n < 20:
        return ONES[n]
    if n < 100:
        ones = f"-{ONES[n % 10]}" if n % 10 else ""
        return TENS[n // 10] + ones
    unit, name = (100, "hundred") if n < 1000 else (1000, "thousand")
    rest = f" {spell_number(n % unit)}" if n % unit else ""
    return f"{spell_number(n // unit)} {name}{rest}"


def number_example(n):
    """Return the example for a number: its words, whether it is even, and a date.

    The date is n days after January 1, 1970. The tasks by_rule_* are made of these
    fields.
    """
    day = time.gmtime(86_400 * n)
    return {
        "number": n,
        "words": spell_number(n),
        "label": int(n % 2 == 0),  # 1 if the number is even
        "date": time.strftime("%Y-%m-%d", day),
        "day": f"{day.tm_mday} {time.strftime('%B %Y', day)}",
    }


def python_source(name, split, cfg):
    """Open python: or python:COUNT, which need no files.

    python: reads the texts that come with Python. python:COUNT reads the numbers below
    COUNT, each with its name in words and a date. Both are shuffled, and the first 1 % is
    for validation.
    """
    if name and not re.fullmatch(r"[1-9]\d{1,5}", name):
        raise UserError(
            f"python:{name} is not a source: write python: for the texts that come with "
            f"Python, or python:COUNT for the numbers below COUNT (10 to 999999)."
        )

    def examples(split):
        count = int(name) if name else len(python_documents())
        order = permute(np.arange(count), count, 6).tolist()
        held_out = max(1, count // 100)
        for n in order[:held_out] if split == "validation" else order[held_out:]:
            yield number_example(n) if name else {"text": python_documents()[n]}

    return generated_source(f"python:{name}", [sys.version], examples, split)


def reverse_source(name, split, cfg):
    """Open reverse:, examples of 4 to 12 random ids with the reversed ids as targets."""

    def examples(split):
        seed, count = {"train": (0, 20_000), "validation": (1, 512)}[split]
        for i in range(count):
            random = np.random.default_rng([seed, i])
            ids = random.integers(3, 35, random.integers(4, 13)).tolist()
            yield {"inputs": [*ids, EOS], "targets": [*ids[::-1], EOS]}

    return generated_source("reverse:", [1], examples, split)


def random_source(name, split, cfg):
    """Open random:, an endless source of documents of 4096 random ids for benchmarks."""
    size = cfg.model.vocab_size - SENTINELS - 3

    def examples(split):
        seed = 0 if split == "train" else 1
        numbers = itertools.count() if split == "train" else range(64)
        for i in numbers:
            ids = random_bits(seed, i, np.arange(4096)) % np.uint64(size)
            yield {"text": ids.astype(int) + 3}

    return generated_source("random:", [size], examples, split)


def open_file(path):
    """Open a local or remote file to read bytes."""
    if "://" not in path:
        return open(path, "rb")
    import fsspec  # imported here because the import takes 0.1 s

    return fsspec.open(path, "rb").open()


def find_files(pattern):
    """Return the files that match a glob as a sorted list of (path, [size, time]).

    The pattern may be local or remote. Raises UserError if a remote file system cannot be
    read.
    """
    found = []
    if "://" not in pattern:
        for path in sorted(glob.glob(os.path.expanduser(pattern), recursive=True)):
            if not os.path.isdir(path):
                stat = os.stat(path)
                found.append((path, [stat.st_size, stat.st_mtime_ns]))
        return found
    import fsspec

    try:
        system, path = fsspec.core.url_to_fs(pattern)
        infos = system.glob(path, detail=True)
    except (ImportError, ValueError, OSError) as error:
        raise UserError(
            f"{pattern} cannot be read ({error}): check the path and your access to it."
        ) from error
    for path, info in infos.items():
        if info["type"] == "file":
            # File systems have different names for the time or the version of a file.
            times = [info.get(key) for key in ("etag", "mtime", "updated", "created")]
            found.append((system.unstrip_protocol(path), [info["size"], str(times)]))
    return sorted(found)


GROUP_BYTES = 1 << 26  # files are grouped until a group has at least this size
HELD_OUT_BYTES = 1 << 25  # the held-out beginning of a source has at most this size


def group_files(files, read):
    """Group files and return the SourceFiles. Small files share a SourceFile.

    files: a list of (path, [size, time]). read(path, bad) yields the examples (where,
    example) of one file. If `read` raises an exception, the file is reported to `bad` as
    damaged, and reading continues with the next file.
    """
    groups = []
    size = math.inf  # bytes in the last group
    for path, stamp in files:
        if size >= GROUP_BYTES:
            groups.append([])
            size = 0
        groups[-1].append((path, stamp))
        size += stamp[0]

    def read_group(group, bad):
        for path, _ in group:
            try:
                yield from read(path, bad)
            # For a damaged file, gzip, pyarrow and protobuf raise different exceptions.
            except Exception as error:
                # An exception with an error number means that the disk has failed.
                if isinstance(error, UserError) or getattr(error, "errno", None):
                    raise
                bad(path, f"is damaged ({error})")

    return [
        SourceFile(group[0][0], group, functools.partial(read_group, group))
        for group in groups
    ]


def file_source(read, pattern, split, cfg):
    """Open the files that match a glob, in alphabetical order.

    Files have no splits. The first 1 % of the text, at least one example, is held out for
    validation, and the rest is for training. The held-out text is one stretch, so that
    only its end is close to training text. If split is None, nothing is held out.
    read(path, bad) yields the examples of one file.
    """
    found = find_files(pattern)
    if not found:
        folder = pattern.rstrip("/") if os.path.isdir(pattern) else "FOLDER"
        problem = f"No file matches {pattern or 'an empty name'}"
        remedy = (
            f"give --data.source the path of a file, or a quoted glob, such as "
            f"'{folder}/*'."
        )
        raise MissingSource({problem: remedy})
    files = group_files(found, read)
    if split is None:
        return files
    if split not in ("train", "validation"):
        raise MissingSplit(f"{pattern} has no splits, so it has no {split} split.")
    total = sum(size for _, (size, _) in found)
    held_out = min(HELD_OUT_BYTES, total // 100)

    def read_first(bad):
        seen = 0  # size of the examples so far
        for where, example in files[0].read(bad):
            if (seen <= held_out) == (split == "validation"):
                yield where, example
            elif split == "validation":
                return  # the held-out stretch is complete
            for value in example.values():
                if isinstance(value, str | list):
                    seen += len(value)

    first = files[0]._replace(read=read_first)
    return [first] if split == "validation" else [first, *files[1:]]


def read_lines(path, bad):
    """Yield (line number, line) of a text file, which may be compressed (.gz).

    A line that is not UTF-8 is reported to `bad`.
    """
    with open_file(path) as raw:
        file = gzip.open(raw) if path.endswith(".gz") else raw
        for number, line in enumerate(file, 1):
            try:
                yield number, line.decode()
            except UnicodeDecodeError:
                bad(f"{path}:{number}", "is not UTF-8")


def text_source(name, split, cfg):
    """Open text:GLOB or text:GLOB:lines, which reads text files.

    With text:GLOB, each file is a document. With text:GLOB:lines, each line is a
    document. Files may be compressed (.gz). Blank documents are left out. The field is
    `text`.
    """
    pattern = name.removesuffix(":lines")

    def read(path, bad):
        lines = read_lines(path, bad)
        if pattern == name:
            lines = [(1, "".join(line for _, line in lines))]
        for number, text in lines:
            if text.strip():
                yield f"{path}:{number}", {"text": text}

    return file_source(read, pattern, split, cfg)


def read_jsonl(path, bad):
    """Yield the examples of a jsonl:GLOB file, which has one JSON object on each line.

    The file may be compressed (.gz), as C4 is published. Blank lines are left out. A line
    that is not a JSON object is reported to `bad`.
    """
    for number, line in read_lines(path, bad):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            example = json.loads(line)
        except (ValueError, RecursionError) as error:
            bad(where, f"is not JSON ({error})")
            continue
        if isinstance(example, dict):
            yield where, example
        else:
            bad(where, "is not a JSON object")


def read_parquet(path, bad):
    """Yield the rows of a parquet:GLOB file. The columns are the fields."""
    import pyarrow.parquet  # imported here because the import takes 0.2 s

    with open_file(path) as file:
        batches = pyarrow.parquet.ParquetFile(file).iter_batches(1024)
        rows = (row for batch in batches for row in batch.to_pylist())
        for number, row in enumerate(rows):
            yield f"{path} row {number}", row


def decode_bytes(value):
    """Return a value of a TFDS example with all bytes in it decoded as UTF-8."""
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, dict):
        return {key: decode_bytes(inner) for key, inner in value.items()}
    if isinstance(value, list) or isinstance(value, np.ndarray) and value.dtype == object:
        return [decode_bytes(inner) for inner in value]
    return value


TFDS_REMEDY = (
    "name the folder of your TFDS datasets with --data.tfds_dir or the variable "
    "TFDS_DATA_DIR. To write a dataset there, use a machine with TensorFlow and run "
    "`tfds build NAME --data_dir DIR --file_format array_record`. "
    "To read C4's own files, use --data.source 'jsonl:DIR/c4-train.*.json.gz'. "
    "To read any text, use --data.source 'text:DIR/*.txt'."
)
TFDS_RANGE = 1 << 17  # a SourceFile of a TFDS dataset has at most this number of examples


def find_tfds(name, cfg):
    """Return the folder of the TFDS dataset NAME[:VERSION].

    Without a version, the newest version is used. Raises MissingSource if the folder does
    not exist.
    """
    from etils import epath  # because the folder may be remote

    home = cfg.data.tfds_dir or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
    dataset, version = name, ""
    if "://" not in name:
        dataset, _, version = name.partition(":")
    folder = epath.Path(home).expanduser() / dataset
    # The name may lead to the folder of one version, or to the folder with all versions.
    infos = [*folder.glob("dataset_info.json")] or [*folder.glob("*/dataset_info.json")]
    versions = {path.parent.name: path.parent for path in infos}
    if version in versions:
        return versions[version]
    if versions and not version:
        newest = max(
            versions, key=lambda name: [int(n) for n in re.findall(r"\d+", name)]
        )
        return versions[newest]
    problem = f"{name} is not in {folder / version}"
    if versions:
        problem += (
            f" (there is {', '.join(versions)}; write "
            f"--data.source tfds:{dataset}:VERSION)"
        )
    raise MissingSource({problem: TFDS_REMEDY})


def tfds_source(name, split, cfg):
    """Open tfds:NAME[/CONFIG][:VERSION] or tfds:FOLDER, a TFDS dataset on disk.

    The dataset is never downloaded. It must be stored as array_record files, which can be
    read without TensorFlow. Each SourceFile is a range of examples. Examples that are
    missing, damaged or not UTF-8 are reported to `bad`.
    """
    folder = find_tfds(name, cfg)
    import tensorflow_datasets as tfds  # imported here because the import takes 0.5 s

    try:
        info = tfds.builder_from_directory(folder).info
    except Exception as error:  # TFDS and protobuf raise many kinds of exceptions
        raise UserError(
            f"{folder / 'dataset_info.json'} is damaged ({error}): "
            f"copy the dataset again."
        ) from error
    if info.file_format.value != "array_record":
        raise UserError(
            f"{folder} is stored as {info.file_format.value}, which only TensorFlow can "
            f"read: prepare it again on a machine with TensorFlow, by "
            f"tfds.builder('NAME', file_format='array_record').download_and_prepare()."
        )
    if split not in info.splits:
        raise MissingSplit(
            f"{folder} has no split {split} (it has {', '.join(info.splits)}): name "
            f"another source with --data.validation_source."
        )
    count = info.splits[split].num_examples

    def read(start, bad):
        examples = tfds.builder_from_directory(folder).as_data_source(split)
        for number in range(start, min(start + TFDS_RANGE, count)):
            where = f"{folder} {split} {number}"
            try:
                yield where, decode_bytes(examples[number])
            except (IndexError, ValueError, RuntimeError) as error:
                bad(
                    where,
                    f"is missing or damaged (dataset_info.json promises {count:,} "
                    f"examples; {error})",
                )

    stamp = [info.splits[split].shard_lengths, info.splits[split].num_bytes]
    return [
        SourceFile(f"{folder} {split} {start}", stamp, functools.partial(read, start))
        for start in range(0, count, TFDS_RANGE)
    ]


def hf_source(name, split, cfg):
    """Open hf:NAME[:CONFIG], a dataset of the Hugging Face hub.

    NAME may also be a local folder in the form of such a dataset. The examples are
    streamed, and each shard of the dataset is a SourceFile. Raises UserError if the
    library `datasets` is not installed or cannot open the dataset.
    """
    try:
        import datasets
    except ImportError:
        raise UserError(
            "hf: needs the library datasets: install it with pip install '.[hf]'."
        ) from None
    dataset, _, config = name.partition(":")
    try:
        stream = datasets.load_dataset(
            dataset, config or None, split=split, streaming=True
        )
    except Exception as error:  # the library raises many kinds of exceptions
        kind = MissingSplit if "split" in str(error) else UserError
        raise kind(
            f"The split {split} of hf:{name} cannot be opened ({error}): check the name, "
            f"the split and the network connection."
        ) from error

    def read(shard, bad):
        for row, example in enumerate(stream.shard(stream.num_shards, shard)):
            yield f"hf:{name} {split} shard {shard} row {row}", example

    return [
        SourceFile(f"shard {shard}", [stream.num_shards], functools.partial(read, shard))
        for shard in range(stream.num_shards)
    ]


def read_tfrecords(path):
    """Yield the records of a tfrecord file. The checksums are not verified.

    Each record is stored as its length (8 bytes), a checksum of the length (4 bytes), the
    record and a checksum of the record (4 bytes).
    """
    with open_file(path) as file:
        while header := file.read(12):
            size = int.from_bytes(header[:8], "little")
            record = file.read(min(size, 1 << 31) + 4)
            if len(header) < 12 or len(record) != size + 4:
                raise EOFError("it is cut off")
            yield record[:-4]


def read_seqio(features, path, bad):
    """Yield the examples of a tfrecord file of a SeqIO cache.

    features: {field: {"shape": [...]}} from the info file of the cache. A field with the
    shape [] gives a single value. Other fields give an array of ids or a list of texts.
    """
    from tensorflow_datasets.proto import tf_example_generated_pb2

    for number, record in enumerate(read_tfrecords(path)):
        stored = tf_example_generated_pb2.Example.FromString(record)
        example = {}
        for key, feature in stored.features.feature.items():
            values = [value.decode() for value in feature.bytes_list.value]
            if not values:
                numbers = [*feature.int64_list.value, *feature.float_list.value]
                values = np.array(numbers)
            scalar = features.get(key, {}).get("shape") == []
            example[key] = values[0] if scalar else values
        yield f"{path} record {number}", example


def seqio_source(name, split, cfg):
    """Open seqio:FOLDER, a task that SeqIO cached. FOLDER may be a glob of such folders.

    P3 is published in this form. A folder must contain info.SPLIT.json, the file
    COMPLETED and all tfrecord shards of the split. Otherwise MissingSource, MissingSplit
    or UserError is raised.
    """
    infos = find_files(f"{name}/info.{split}.json")
    if not infos:
        others = [os.path.basename(path) for path, _ in find_files(f"{name}/info.*.json")]
        problem = f"{name} has no info.{split}.json"
        if others:
            raise MissingSplit(f"{problem} (it has {', '.join(others)}).")
        raise MissingSource({problem: "name a folder that SeqIO has cached."})
    files = []
    for path, _ in infos:
        folder = os.path.dirname(path)
        if not find_files(f"{folder}/COMPLETED"):
            raise UserError(
                f"{folder} has no file COMPLETED, so SeqIO did not finish this cache: "
                f"cache the task again, or copy the complete folder."
            )
        form = {"features": {str: {"shape?": list}}, "num_shards": int}
        info = configs.read_json(configs.to_path(path), form)
        shards = find_files(f"{glob.escape(folder)}/{split}.tfrecord-*-of-*")
        if len(shards) != info["num_shards"]:
            raise UserError(
                f"{folder} has {len(shards)} shards of {split}, but info.{split}.json "
                f"promises {info['num_shards']}: copy the missing shards."
            )
        files += group_files(shards, functools.partial(read_seqio, info["features"]))
    return files


SOURCES = {
    "python": python_source,
    "text": text_source,
    "tfds": tfds_source,
    "hf": hf_source,
    "jsonl": functools.partial(file_source, read_jsonl),
    "parquet": functools.partial(file_source, read_parquet),
    "seqio": seqio_source,
    "reverse": reverse_source,
    "random": random_source,
}


def open_source(source, split, cfg, whole=False):
    """Open a source, written KIND:NAME, and return the SourceFiles of a split.

    In the name, "{split}" stands for the name of the split. Without "{split}", files have
    no splits, and their first 1 % is held out for validation. whole: hold out nothing.
    Raises UserError for an unknown kind, and MissingSplit or MissingSource.
    """
    kind, _, name = source.partition(":")
    if kind not in SOURCES:
        kinds = ", ".join(f"{known}:" for known in SOURCES)
        raise UserError(f"{source!r} is not a source: begin it with one of {kinds}.")
    if "{split}" in name:
        pattern = name.removesuffix(":lines")
        # If files of other splits exist, the source has splits but lacks this split.
        if not find_files(pattern.replace("{split}", split)):
            if find_files(pattern.replace("{split}", "*")):
                raise MissingSplit(f"No file matches {name} with the split {split}.")
        name = name.replace("{split}", split)
        whole = True
    if whole and kind in ("python", "text", "jsonl", "parquet"):
        split = None
    return SOURCES[kind](name, split, cfg)


class InvalidExamples:
    """The function bad(where, what), called for each example that cannot be used.

    where: the place of the example, such as "a.jsonl:3". what: the rest of a sentence,
    such as "is not JSON". With --data.on_error stop, the first call raises a UserError.
    With --data.on_error skip, the calls are counted.
    """

    def __init__(self, on_error):
        self.stop, self.count = on_error == "stop", 0

    def __call__(self, where, what):
        if self.stop:
            raise UserError(
                f"{where} {what}: fix the file, or set --data.on_error skip to skip such "
                f"examples."
            )
        self.count += 1


# ---- tasks -----------------------------------------------------------------------------


class PrefixLM(Objective):
    """Cut each chunk of a document in two at a random place (t5's prefix_lm).

    The first part is the inputs and the second part is the targets.
    """

    def length(self, data):
        return data.inputs_length - 1

    def make(self, pieces, keys, tokenizer, data):
        lengths = np.array([len(ids) for (ids,) in pieces])
        below = (keys >> np.uint64(32)) * np.maximum(lengths - 1, 0).astype(np.uint64)
        cuts = np.minimum(1 + (below >> np.uint64(32)).astype(int), lengths - 1)
        return [(ids[:cut], ids[cut:]) for (ids,), cut in zip(pieces, cuts.tolist())]


# T5 solves every task as text to text (Raffel et al. 2020, section 2.4). The inputs begin
# with the name of the task, the name of each field stands before its text, and a class is
# written as a word. Appendix D of the paper shows an example of each task. This is an
# example of RTE, in which the model decides whether sentence1 implies sentence2:
#
#     source   {"sentence1": "A cat sleeps.", "sentence2": "A cat runs.", "label": 1}
#     inputs   rte sentence1: A cat sleeps. sentence2: A cat runs.
#     targets  not_entailment
#
# A *format* is a function that does this conversion. It takes an example of the source
# and returns a list of dicts with the fields inputs and targets, and with the fields that
# metrics need. The list is empty if the example is left out. The formats below give
# exactly the strings of t5/data/preprocessors.py.


def as_it_is(example):
    """Return the example unchanged, for objectives that need only the field `text`."""
    return [example]


def text_to_text(example):
    """Return the fields inputs and targets unchanged. They may be texts or lists of ids.

    A SeqIO cache may hold both the ids and the texts (inputs_pretokenized). Then the
    texts are used.
    """
    texts = {}
    for key in Pairs.features:
        value = example.get(f"{key}_pretokenized", example.get(key))
        if value is not None:
            texts[key] = value
    return [example | texts]


def template(inputs, targets, labels=()):
    """Return a format that fills the {field} placeholders of two templates.

    For example, template("translate English to German: {en}", "{de}"). labels: the words
    for the classes 0, 1, ... if the field `label` is the number of a class. Then {label}
    is replaced by the word of the class. The label -1 means that TFDS does not publish
    the label, and t5 writes "<unk>" for it. The field `idx` is kept in the results.
    """

    def fill(example):
        if labels:
            label = example.get("label", -1)
            word = "<unk>" if label == -1 else labels[label]
            example = example | {"label": word}
        filled = {
            "inputs": inputs.format_map(example),
            "targets": targets.format_map(example),
        }
        if "idx" in example:
            filled["idx"] = example["idx"]
        return [filled]

    return fill


def format_stsb(example):
    """Format STS-B, whose target is a similarity from 0 to 5, such as "3.8".

    The similarity is rounded to a multiple of 0.2.
    """
    score = np.round(np.float32(example["label"]) * np.float32(5)) / np.float32(5)
    fill = template("stsb sentence1: {sentence1} sentence2: {sentence2}", f"{score:.1f}")
    return fill(example)


def format_multirc(example):
    """Format MultiRC, in which the model judges an answer to a question.

    HTML tags are removed. The three indices are kept, because the metric counts all
    answers to one question together.
    """
    texts = {}
    for key in ("paragraph", "question", "answer"):
        text = example[key].replace("<br>", " ")
        texts[key] = re.sub("</?b>", "", text)
    fill = template(
        "multirc question: {question} answer: {answer} paragraph: {paragraph}",
        "{label}",
        ("False", "True"),
    )
    (filled,) = fill(texts | {"label": example["label"]})
    indices = {f"idx/{key}": example["idx"][key] for key in texts}
    return [filled | indices]


def format_record(example):
    """Format ReCoRD, in which the model fills a gap in the query with an entity.

    There is one example for each correct answer. The bullet points (@highlight) of the
    passage become sentences.
    """
    # A bullet point after a complete sentence needs no further period.
    passage = re.sub(r"([.?!\"'])\n@highlight\n", r"\1 ", example["passage"])
    passage = passage.replace("\n@highlight\n", ". ")
    entities = ", ".join(example["entities"])
    answers = list(example["answers"])
    text = f"record query: {example['query']} entities: {entities} passage: {passage}"
    return [
        {
            "inputs": text,
            "targets": answer,
            "answers": answers,
            "idx/passage": example["idx"]["passage"],
            "idx/query": example["idx"]["query"],
        }
        for answer in answers or ["<unk>"]
    ]


def format_wsc(only_true, example):
    """Format the Winograd schema challenge: which noun does the marked pronoun stand for?

    The pronoun is marked by asterisks, as in "wsc: Ann lost *it* again". The targets are
    the noun that the example suggests. only_true: leave out examples that suggest a wrong
    noun, because the model must not learn wrong nouns.
    """
    if only_true and not example["label"]:
        return []
    words = example["text"].split(" ")
    position = example["span2_index"]
    pronoun = example["span2_text"]
    # In one of the published examples, the index of the pronoun is too low by one.
    if not words[position].startswith(pronoun):
        position += 1
    if not words[position].startswith(pronoun):
        raise ValueError(f"word {position} is {words[position]!r}, not {pronoun!r}")
    before = " ".join(words[:position])
    after = " ".join(words[position + 1 :])
    # In another published example, punctuation follows the pronoun without a space.
    punctuation = words[position].removeprefix(pronoun)
    if punctuation:
        after = f"{punctuation} {after}".rstrip()
    # As in t5, every X between spaces is replaced, even if the text itself contains an X.
    text = f"{before} X {after}".replace(" X ", f" *{pronoun}* ")
    return [
        {
            "inputs": f"wsc: {text}",
            "targets": example["span1_text"],
            "label": example.get("label", 0),
            "idx": example.get("idx"),
        }
    ]


def format_definite_pronoun(example):
    """Format definite pronoun resolution (DPR) in the form of WSC.

    The first occurrence of the pronoun is marked.
    """
    pattern = rf" ({example['pronoun']})( |\.|,)"
    text = re.sub(pattern, r" *\1*\2", example["sentence"], count=1)
    answer = example["candidates"][example["label"]]
    return [{"inputs": f"wsc: {text}", "targets": answer}]


def merge_spaces(text):
    """Replace each run of white space characters by one space."""
    return re.sub(r"[ \t\n\f\r]+", " ", text)


def separate_punctuation(text):
    """Put spaces around each ASCII punctuation character, and merge runs of spaces."""
    return merge_spaces(re.sub(r"([!-/:-@\[-`{-~])", r" \1 ", text))


def format_squad(example):
    """Format SQuAD, in which the answer to a question stands in the context.

    The first answer is the target. All answers are kept, because the metric accepts each.
    """
    question = separate_punctuation(example["question"])
    context = separate_punctuation(example["context"])
    answers = [separate_punctuation(answer) for answer in example["answers"]["text"]]
    return [
        {
            "inputs": merge_spaces(f"question: {question} context: {context}"),
            "targets": answers[0],
            "answers": answers,
            "id": example.get("id"),
            "question": question,
            "context": context,
        }
    ]


class Task(NamedTuple):
    """What a model learns from a source, and how its answers are evaluated.

    TASKS maps the name of each task to its Task. A recipe file may add its own tasks.
    """

    source: str = ""  # KIND:NAME, as in --data.source
    # The function that turns an example of the source into a list of formatted examples.
    format: Callable = text_to_text
    # Each metric is a name in evaluate.METRICS, or a function that takes lists of targets
    # and predictions and returns a dict of numbers.
    metrics: tuple = ()
    choices: tuple = ()  # the words for the labels 0, 1, ... of a classification task
    # What is applied to targets and predictions before metrics compare them: a name in
    # evaluate.POSTPROCESSORS, or a function.
    postprocess: str | Callable = ""
    splits: tuple = ("train", "validation", "test")  # the splits that the source has
    objective: Objective = Pairs()
    inputs_eos: bool = True  # whether inputs end with EOS; inputs of T0 do not
    eos_after_trim: bool = True  # whether targets that are cut end with EOS; not so in T0


# The tasks whose format is a template. Each task takes three lines:
#
#     name   source   metrics (separated by commas, or -)   splits (if not all three)
#         template of the inputs
#         template of the targets, or words for the labels 0, 1, ... separated by |
#
# The names, strings and metrics of T5's tasks agree with t5/data/tasks.py. The tasks
# by_rule_* are made for the recipe tiny_finetune.
CATALOGUE = """
wmt14_ende_v003   tfds:wmt14_translate/de-en:1.0.0   bleu
    translate English to German: {en}
    {de}

wmt14_deen_v003   tfds:wmt14_translate/de-en:1.0.0   bleu
    translate German to English: {de}
    {en}

wmt14_enfr_v003   tfds:wmt14_translate/fr-en:1.0.0   bleu
    translate English to French: {en}
    {fr}

wmt14_fren_v003   tfds:wmt14_translate/fr-en:1.0.0   bleu
    translate French to English: {fr}
    {en}

wmt15_enfr_v003   tfds:wmt15_translate/fr-en:1.0.0   bleu
    translate English to French: {en}
    {fr}

wmt15_fren_v003   tfds:wmt15_translate/fr-en:1.0.0   bleu
    translate French to English: {fr}
    {en}

wmt16_enro_v003   tfds:wmt16_translate/ro-en:1.0.0   bleu
    translate English to Romanian: {en}
    {ro}

wmt16_roen_v003   tfds:wmt16_translate/ro-en:1.0.0   bleu
    translate Romanian to English: {ro}
    {en}

wmt19_ende_v003   tfds:wmt19_translate/de-en:1.0.0   bleu
    translate English to German: {en}
    {de}

wmt19_deen_v003   tfds:wmt19_translate/de-en:1.0.0   bleu
    translate German to English: {de}
    {en}

wmt_t2t_ende_v003   tfds:wmt_t2t_translate/de-en:1.0.0   bleu
    translate English to German: {en}
    {de}

wmt_t2t_deen_v003   tfds:wmt_t2t_translate/de-en:1.0.0   bleu
    translate German to English: {de}
    {en}

cnn_dailymail_v002   tfds:cnn_dailymail:3.4.0   rouge
    summarize: {article}
    {highlights}

glue_cola_v002   tfds:glue/cola:1.0.0   matthews_corrcoef
    cola sentence: {sentence}
    unacceptable | acceptable

glue_sst2_v002   tfds:glue/sst2:1.0.0   accuracy
    sst2 sentence: {sentence}
    negative | positive

glue_mrpc_v002   tfds:glue/mrpc:1.0.0   f1,accuracy
    mrpc sentence1: {sentence1} sentence2: {sentence2}
    not_equivalent | equivalent

glue_qqp_v002   tfds:glue/qqp:1.0.0   f1,accuracy
    qqp question1: {question1} question2: {question2}
    not_duplicate | duplicate

glue_mnli_v002   tfds:glue/mnli:1.0.0   accuracy   train
    mnli hypothesis: {hypothesis} premise: {premise}
    entailment | neutral | contradiction

glue_mnli_matched_v002   tfds:glue/mnli_matched:1.0.0   accuracy   validation test
    mnli hypothesis: {hypothesis} premise: {premise}
    entailment | neutral | contradiction

glue_mnli_mismatched_v002   tfds:glue/mnli_mismatched:1.0.0   accuracy   validation test
    mnli hypothesis: {hypothesis} premise: {premise}
    entailment | neutral | contradiction

glue_qnli_v002   tfds:glue/qnli:1.0.0   accuracy
    qnli question: {question} sentence: {sentence}
    entailment | not_entailment

glue_rte_v002   tfds:glue/rte:1.0.0   accuracy
    rte sentence1: {sentence1} sentence2: {sentence2}
    entailment | not_entailment

glue_wnli_v002   tfds:glue/wnli:1.0.0   accuracy
    wnli sentence1: {sentence1} sentence2: {sentence2}
    not_entailment | entailment

glue_ax_v002   tfds:glue/ax:1.0.0   -   test
    mnli hypothesis: {hypothesis} premise: {premise}
    entailment | neutral | contradiction

super_glue_boolq_v102   tfds:super_glue/boolq:1.0.2   accuracy
    boolq passage: {passage} question: {question}
    False | True

super_glue_cb_v102   tfds:super_glue/cb:1.0.2   mean_3class_f1,accuracy
    cb hypothesis: {hypothesis} premise: {premise}
    entailment | contradiction | neutral

super_glue_copa_v102   tfds:super_glue/copa:1.0.2   accuracy
    copa choice1: {choice1} choice2: {choice2} premise: {premise} question: {question}
    choice1 | choice2

super_glue_rte_v102   tfds:super_glue/rte:1.0.2   accuracy
    rte hypothesis: {hypothesis} premise: {premise}
    entailment | not_entailment

super_glue_wic_v102   tfds:super_glue/wic:1.0.2   accuracy
    wic sentence1: {sentence1} sentence2: {sentence2} word: {word}
    False | True

super_glue_axb_v102   tfds:super_glue/axb:1.0.2   -   test
    rte hypothesis: {sentence2} premise: {sentence1}
    entailment | not_entailment

super_glue_axg_v102   tfds:super_glue/axg:1.0.2   -   test
    rte hypothesis: {hypothesis} premise: {premise}
    entailment | not_entailment

by_rule_words   python:10000   accuracy
    number: {number}
    {words}

by_rule_digits   python:10000   accuracy
    words: {words}
    {number}

by_rule_date   python:10000   accuracy
    date: {date}
    {day}

by_rule_day   python:10000   accuracy
    day: {day}
    {date}

by_rule_even   python:10000   accuracy
    is {number} even?
    no | yes
"""


def read_catalogue(text):
    """Return {name: Task} for a text in the form of CATALOGUE."""
    tasks = {}
    for entry in text.strip().split("\n\n"):
        first_line, inputs, targets = map(str.strip, entry.split("\n"))
        name, source, metrics, *splits = first_line.split()
        task = Task(
            source,
            template(inputs, targets),
            metrics=tuple(re.findall(r"\w+", metrics)),
            splits=tuple(splits) or Task().splits,
        )
        if " | " in targets:
            labels = tuple(targets.split(" | "))
            fill = template(inputs, "{label}", labels)
            task = task._replace(format=fill, choices=labels, postprocess="label")
        tasks[name] = task
    return tasks


# The dicts belong to configs.py, because a recipe file may add tasks and mixtures.
TASKS, MIXTURES = configs.TASKS, configs.MIXTURES
TASKS |= read_catalogue(CATALOGUE)
TASKS |= {
    # The first three tasks are meant for any --data.source.
    "span_corruption": Task("python:", as_it_is, objective=SpanCorruption()),
    "prefix_lm": Task("python:", as_it_is, objective=PrefixLM()),
    "text_to_text": Task(),
    "c4_v220_span_corruption": Task(
        "tfds:c4/en:2.2.0", as_it_is, objective=SpanCorruption()
    ),
    "c4_v220_prefix_lm": Task("tfds:c4/en:2.2.0", as_it_is, objective=PrefixLM()),
    # A template cannot express the formats of the tasks from here on.
    "squad_v010_allanswers": Task(
        "tfds:squad/v1.1:3.0.0", format_squad, ("squad",), postprocess="answers"
    ),
    "glue_stsb_v002": Task(
        "tfds:glue/stsb:1.0.0",
        format_stsb,
        ("pearson_corrcoef", "spearman_corrcoef"),
        postprocess="number",
    ),
    "super_glue_multirc_v102": Task(
        "tfds:super_glue/multirc:1.0.2",
        format_multirc,
        ("multirc_f1", "exact_match"),
        ("False", "True"),
        "multirc",
    ),
    "super_glue_record_v102": Task(
        "tfds:super_glue/record:1.0.2", format_record, ("record",), postprocess="record"
    ),
    "super_glue_wsc_v102_simple_train": Task(
        "tfds:super_glue/wsc.fixed:1.0.2",
        functools.partial(format_wsc, True),
        splits=("train",),
    ),
    "super_glue_wsc_v102_simple_eval": Task(
        "tfds:super_glue/wsc.fixed:1.0.2",
        functools.partial(format_wsc, False),
        ("accuracy",),
        postprocess="wsc",
        splits=("validation", "test"),
    ),
    "dpr_v001_simple": Task(
        "tfds:definite_pronoun_resolution:1.1.0",
        format_definite_pronoun,
        ("accuracy",),
        splits=("train", "test"),
    ),
}


# ---- mixtures --------------------------------------------------------------------------
# A mixture is a dict that maps the names of tasks or of other mixtures to rates. A task
# is sampled with the probability rate / (sum of the rates). A task with the rate 0 is not
# trained on, but it is evaluated together with the mixture. A rate is a number, or
# BySize. A function of the Config that returns such a dict is a mixture, too.


class BySize(NamedTuple):
    """A rate that depends on the number of training examples of the task.

    The rate is min(examples * scale, maximum) ** (1 / temperature). The maximum keeps
    large tasks from dominating. A temperature above 1 samples small tasks more often. See
    section 3.5.2 of Raffel et al. 2020.
    """

    maximum: float = math.inf
    temperature: float = 1.0
    scale: float = 1.0

    def of(self, examples):
        return min(examples * self.scale, self.maximum) ** (1 / self.temperature)


# The datasets of T0 (Sanh et al. 2022): name, number of training examples, and the roles
# in which T0's mixtures use the dataset (t0/datasets.csv in bigscience-workshop/t-zero).
T0_DATASETS = """
glue_mrpc                     3668  train
glue_qqp                    363846  train
paws_labeled_final           49401  train
kilt_tasks_hotpotqa          88869  train
wiki_qa                      20360  train
adversarial_qa_dbidaf        10000  train
adversarial_qa_dbert         10000  train
adversarial_qa_droberta      10000  train
duorc_SelfRC                 60721  train
duorc_ParaphraseRC           69524  train
ropes                        10924  train
quoref                       19399  train
cos_e_v1.11                   9741  train
cosmos_qa                    25262  train
dream                         6116  train
qasc                          8134  train
quail                        10246  train
quarel                        1941  train
quartz                        2696  train
sciq                         11679  train
social_i_qa                  33410  train
wiki_hop_original            43738  train
wiqa                         29808  train
amazon_polarity            3600000  train
app_reviews                 288065  train
imdb                         25000  train
rotten_tomatoes               8530  train
yelp_review_full            650000  train
common_gen                   67389  train
wiki_bio                    582659  train
cnn_dailymail_3.0.0         287113  train
gigaword                   3803957  train
multi_news                   44972  train
samsum                       14732  train
xsum                        204045  train
ag_news                     120000  train
dbpedia_14                  560000  train
trec                          5452  train
ai2_arc_ARC_Challenge         1119  gpt
ai2_arc_ARC_Easy              2251  gpt
trivia_qa_unfiltered         87622  gpt
web_questions                 3778  gpt
squad_v2                    130319  gpt
openbookqa_main               4957  gpt
race_high                    62445  gpt
race_middle                  25421  gpt
piqa                         16113  gpt
hellaswag                    39905  gpt eval
super_glue_wsc.fixed           554  super_glue eval
super_glue_record           100730  super_glue
super_glue_boolq              9427  super_glue
super_glue_copa                400  super_glue eval
super_glue_multirc           27243  super_glue
super_glue_wic                5428  super_glue eval
winogrande_winogrande_xl     40398  eval
super_glue_cb                  250  eval
super_glue_rte                2490  eval
anli                        162865  eval
story_cloze_2016                 0  eval
crows_pairs                      0  bias
jigsaw_toxicity_pred             0  bias
super_glue_axg                   0  bias
wino_bias_type1_anti             0  bias
wino_bias_type2_anti             0  bias
wino_bias_type1_pro              0  bias
wino_bias_type2_pro              0  bias
"""
T0_CAP = 500_000  # a dataset counts as at most this number of examples


def t0_mixture(roles, score_eval, cfg):
    """Return {task: rate} for the datasets of T0 that have one of the roles.

    P3 has a folder for each prompt template of each dataset, named DATASET_TEMPLATE. Each
    folder is a task. A dataset with more than T0_CAP examples counts as T0_CAP examples,
    divided among its templates. A smaller dataset counts with its full size for each
    template. roles: words of the table T0_DATASETS, separated by spaces. score_eval: use
    the folders for rank classification, whose names end in _score_eval. They are only
    evaluated, so each has the rate 1.
    """
    folders = sorted(p3_sources(cfg))
    if not folders:
        raise UserError(
            "T0's mixtures are made of P3 (bigscience/P3), which has a folder for each "
            "prompt: name the folder that contains these folders with --data.source "
            "seqio:DIR or --data.source parquet:DIR."
        )
    rows = [line.split() for line in T0_DATASETS.strip().splitlines()]
    templates = {}  # the folders of each dataset
    for folder in folders:
        # A name may begin with another name. The longest name that fits is the dataset.
        fitting = [row for row in rows if folder.startswith(f"{row[0]}_")]
        if fitting and folder.endswith("_score_eval") == score_eval:
            name, size, *its_roles = max(fitting, key=lambda row: len(row[0]))
            if set(its_roles) & set(roles.split()):
                templates.setdefault((name, int(size)), []).append(folder)
    rates = {}
    for (_, size), folders in templates.items():
        rate = size if size <= T0_CAP else T0_CAP // len(folders)
        rates |= dict.fromkeys(folders, 1 if score_eval else rate)
    # The authors of T0 left out this prompt, because its cache is broken. It still counts
    # as a template of its dataset.
    rates.pop("gigaword_summarize_", None)
    return rates


# How P3 may be stored: {kind of source: {glob of the files in a folder of P3: text that
# follows the folder in the name of its source}}. P3 as parquet files exists with the
# split in the names of the files, or with a folder for each split.
P3_FILES = {
    "seqio": {"info.*.json": ""},
    "parquet": {"*.parquet": "/*{split}*.parquet", "*/*.parquet": "/{split}/*.parquet"},
}


def p3_root(cfg):
    """Return the folder that contains P3, or "" if --data.source cannot be P3."""
    kind, _, name = cfg.data.source.partition(":")
    return name.removesuffix("*").rstrip("/") if kind in P3_FILES else ""


def p3_sources(cfg, folder="*"):
    """Return {folder: source} for all folders of P3, or for one folder."""
    kind = cfg.data.source.partition(":")[0]
    root = p3_root(cfg)
    sources = {}
    for files, splits in P3_FILES.get(kind, {}).items():
        for path, _ in find_files(f"{root}/{folder}/{files}"):
            name = path.split("/")[-2 - files.count("/")]  # the folder of P3
            sources[name] = f"{kind}:{root}/{name}{splits}"
    return sources


# The names, rates and members are those of t5/data/mixtures.py and of T0's tasks.py.
MIXTURES |= {
    "glue_v002_proportional": {
        "glue_cola_v002": 8_551,
        "glue_sst2_v002": 67_349,
        "glue_mrpc_v002": 3_668,
        "glue_qqp_v002": 363_849,
        "glue_stsb_v002": 5_749,
        "glue_mnli_v002": 392_702,
        "glue_qnli_v002": 104_743,
        "glue_rte_v002": 2_490,
        "glue_mnli_mismatched_v002": 0,
        "glue_mnli_matched_v002": 0,
        "glue_ax_v002": 0,
    },
    "super_glue_v102_proportional": {
        "dpr_v001_simple": 1_322,
        "super_glue_wsc_v102_simple_train": 259,
        "super_glue_wsc_v102_simple_eval": 0,
        "super_glue_boolq_v102": 9_427,
        "super_glue_cb_v102": 250,
        "super_glue_copa_v102": 400,
        "super_glue_multirc_v102": 27_243,
        "super_glue_record_v102": 138_854,
        "super_glue_rte_v102": 2_490,
        "super_glue_wic_v102": 5_428,
        "super_glue_axb_v102": 0,
        "super_glue_axg_v102": 0,
    },
    "by_rule": {
        "by_rule_words": 2,
        "by_rule_digits": 2,
        "by_rule_date": 1,
        "by_rule_day": 1,
        "by_rule_even": 1,
    },
    "t0_train": functools.partial(t0_mixture, "train", False),
    "t0+_train": functools.partial(t0_mixture, "train gpt", False),
    "t0++_train": functools.partial(t0_mixture, "train gpt super_glue", False),
    "t0_train_score_eval": functools.partial(t0_mixture, "train", True),
    "t0_eval_score_eval": functools.partial(t0_mixture, "eval", True),
    "bias_fairness_eval_score_eval": functools.partial(t0_mixture, "bias", True),
}


def mixture_rates(name, cfg, examples=lambda task: 1, within=()):
    """Return {task: rate} for the name of a task or of a mixture.

    A mixture inside a mixture is replaced by its tasks, which share its rate. examples: a
    function that returns the number of training examples of a task, for rates BySize.
    within: the names of the mixtures that contain this mixture. Raises UserError if a
    mixture is not a valid dict.
    """
    if name not in MIXTURES:
        return {name: 1.0}
    if name in within:
        raise UserError(
            f"The mixture {name} contains itself: remove it from its members."
        )
    entries = MIXTURES[name]
    try:
        entries = dict(entries(cfg) if callable(entries) else entries)
    except UserError:
        raise
    except Exception as error:  # the entries may come from a recipe file
        raise UserError(
            f"The mixture {name} is not a dict of rates ({error!r}): correct its entry "
            f"in MIXTURES."
        ) from error
    rates = {}
    for member, rate in entries.items():
        if isinstance(rate, BySize) and member not in MIXTURES:
            rate = rate.of(examples(member))
        if not isinstance(rate, int | float) or not 0 <= rate < math.inf:
            raise UserError(
                f"The rate of {member} in the mixture {name} is {rate}: give a number "
                f"of at least 0, or BySize with a maximum if {member} is one task."
            )
        inner = mixture_rates(member, cfg, examples, (*within, name))
        total = sum(inner.values())
        for task, inner_rate in inner.items():
            rates[task] = rates.get(task, 0.0) + rate * inner_rate / total
    if not any(rates.values()):
        raise UserError(
            f"The mixture {name} has no task with a rate above 0: give it such a task."
        )
    return rates


def find_task(name, cfg):
    """Return the Task of this name.

    name: a key of TASKS, a folder of P3 if --data.source names P3, or KIND:NAME of a
    source with the fields inputs and targets. --data.source replaces the source of the
    task --data.task. Raises UserError if there is no such task or if the task has no
    source.
    """
    task = TASKS.get(name)
    if task is None:
        if name.partition(":")[0] in SOURCES:
            return TASKS["text_to_text"]._replace(source=name)
        p3_source = p3_sources(cfg, name).get(name)
        if p3_source:
            return Task(p3_source, inputs_eos=False, eos_after_trim=False)
        hint = configs.nearest(name, [*TASKS, *MIXTURES]) or ":"
        raise UserError(
            f"There is no task {name}{hint} python data.py --list prints the names of "
            f"all tasks."
        )
    if not isinstance(task, Task) or not isinstance(task.objective, Objective):
        raise UserError(
            f"TASKS[{name!r}] is {task!r:.200}: give a data.Task whose objective is a "
            f"data.Objective."
        )
    if cfg.data.source and cfg.data.task == name:
        task = task._replace(source=cfg.data.source, splits=Task().splits)
    if not task.source:
        raise UserError(
            f"The task {name} has no source of its own: name a source with "
            f"--data.source, such as jsonl:FILE."
        )
    return task


def check_tasks(cfg):
    """Raise a UserError if a task is unknown or cannot use the given sources."""
    data = cfg.data
    # T0's mixtures are the exception, because they need --data.source to find P3.
    other_source = data.validation_source or data.source and not p3_root(cfg)
    if data.task in MIXTURES and other_source:
        raise UserError(
            f"--data.source and --data.validation_source cannot be used with the mixture "
            f"{data.task}, because a mixture's tasks have their own sources: leave out "
            f"these flags."
        )
    for task in dict.fromkeys([*mixture_rates(data.task, cfg), *evaluated_tasks(cfg)]):
        find_task(task, cfg)


def open_task(name, split, cfg):
    """Return the Task of this name and the SourceFiles of one split.

    Raises MissingSplit or MissingSource if the split or the source does not exist.
    """
    task = find_task(name, cfg)
    validation_source = cfg.data.validation_source
    if split == "validation" and validation_source:
        return task, open_source(validation_source, split, cfg, whole=True)
    if split not in task.splits:
        raise MissingSplit(f"{name} has no {split} split.")
    return task, open_source(task.source, split, cfg, whole=bool(validation_source))


def open_all(wanted):
    """Open the splits of several tasks.

    wanted: a list of (task, split, Config). Returns {task: (Task, SourceFiles)} and a
    list of the MissingSplit errors of the other tasks. Raises one MissingSource that
    names all missing sources.
    """
    opened = {}
    missing_splits = []
    missing_sources = {}
    for name, split, cfg in wanted:
        try:
            opened[name] = open_task(name, split, cfg)
        except MissingSplit as error:
            missing_splits.append(error)
        except MissingSource as error:
            missing_sources.update(error.args[0])
    if missing_sources:
        raise MissingSource(missing_sources)
    return opened, missing_splits


def evaluated_tasks(cfg):
    """Return the tasks that a run evaluates, from --data.eval_tasks or --data.task."""
    names = (cfg.data.eval_tasks or cfg.data.task).split(",")
    return [task for name in names for task in mixture_rates(name.strip(), cfg)]


def open_tasks(cfg, split="train"):
    """Return {task: (Task, SourceFiles)} for the tasks that --data.task trains on.

    These tasks have a rate above 0. If the run also evaluates, the sources of the
    evaluated tasks are opened, too, so that one error names all missing sources.
    """
    names = [name for name, rate in mixture_rates(cfg.data.task, cfg).items() if rate]
    wanted = [(name, split, cfg) for name in names]
    if split == "train" and (cfg.train.eval_every or cfg.train.infer_every):
        for name in evaluated_tasks(cfg):
            if name not in names:
                wanted.append((name, "validation", evaluation_config(name, cfg)))
    opened, missing_splits = open_all(wanted)
    if not opened.keys() >= set(names):
        raise missing_splits[0]
    return {name: opened[name] for name in names}


def source_fields(cfg):
    """Return {field of the task: field of the source}, as given by --data.fields.

    For example, --data.fields text=content gives {"text": "content"}.
    """
    fields = cfg.data.fields
    try:
        pairs = [pair.split("=") for pair in fields.split(",") if fields]
        return {field.strip(): name.strip() for field, name in pairs}
    except ValueError:
        raise UserError(
            f"--data.fields {fields} is not valid: write text=NAME or inputs=A,targets=B."
        ) from None


def formatted_examples(source_file, bad, task, cfg, size=math.inf):
    """Yield the examples of a SourceFile after the format of the task was applied.

    source_file: a SourceFile. size: the size of the vocabulary, which all token ids must
    be below. Each result is (where, number of the example in the SourceFile, formatted
    dict, texts). `texts` has a text or an array of ids for each feature of the objective.
    Examples without text are left out. Examples that cannot be used are reported to
    `bad`.
    """
    names = source_fields(cfg)
    features = task.objective.features
    for number, (where, example) in enumerate(source_file.read(bad)):
        renamed = {
            field: example[name] for field, name in names.items() if name in example
        }
        example = example | renamed
        try:
            formatted = task.format(example)
            if isinstance(formatted, dict):
                formatted = [formatted]
            for row in formatted:
                texts = tuple(row.get(feature) for feature in features)
                problems = [invalid_reason(text, size) for text in texts]
                if any(problems):
                    problem = next(filter(None, problems))  # the first of the problems
                    bad(
                        where,
                        f"has {problem} in {' and '.join(features)} (its fields are "
                        f"{', '.join(row)}; choose one with --data.fields "
                        f"{features[0]}=NAME)",
                    )
                elif not all(map(is_blank, texts)):
                    yield where, number, row, texts
        except UserError:
            raise
        except Exception as error:  # the format may be a function of a recipe file
            problem = f"no {error}" if isinstance(error, KeyError) else repr(error)
            fields = ", ".join(map(str, example))
            bad(where, f"does not fit the task: {problem} (its fields are {fields})")


def is_blank(text):
    """Return whether a text has only white space, or whether a list of ids is empty."""
    return not (text.strip() if isinstance(text, str) else len(text))


def invalid_reason(value, size):
    """Return why a value cannot be tokenized, or None if it can.

    A value must be text or a list of ids below `size`. The reason completes the sentence
    "The example has ...".
    """
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return "half of a character (a lone surrogate)"
        return None
    ids = np.array(None)  # without dimensions, so this is not a list of ids
    if isinstance(value, list | np.ndarray):
        # Lists of different lengths, and numbers that are too large, raise an exception.
        with contextlib.suppress(ValueError, OverflowError):
            ids = np.asarray(value)
    if ids.ndim != 1 or len(ids) and ids.dtype.kind not in "iu":
        return "no text"
    if len(ids) and not 0 <= ids.min() <= ids.max() < size:
        return f"ids from {ids.min()} to {ids.max()} (the vocabulary has {size} ids)"
    return None


# ---- token files ---------------------------------------------------------------------------------
# prepared/SOURCE-HASH/00000-003.ids   tokens of chapter 3 of part 0, document after document
#                      00000-003.ends  int64 [documents, features]: where in it they end
#                      00000-003.json  counts, checksums, where the next chapter begins in the
#                                      source; written last: the chapter is whole
#
# The first chapters are small, so that training can begin, the next ones larger; while a chapter is
# trained on, the next is tokenized. Where a chapter ends is a function of the source alone.

FIRST_SHARD_TOKENS, SHARD_TOKENS = 1 << 18, 1 << 25  # tokens
ENCODE_BATCH = 1024  # examples that are encoded together
SHARD_METADATA = {
    "documents": int,
    "tokens": int,
    "unknown": int,
    "only_unknown": int,
    "skipped": int,
    "characters": {str: int},
    "ids": int,
    "ends": int,
    "next?": [int],
}
PREFETCH_LOCK = (
    threading.Semaphore()
)  # one chapter at a time is tokenized in the background


def prepared_path(source, identity, cfg):
    """A readable path in data.prepared_dir; changes with the source and `identity`."""
    if "://" in cfg.data.prepared_dir:
        raise UserError(
            f"--data.prepared_dir {cfg.data.prepared_dir} is remote, and token files "
            f"are memory-mapped: name a local folder."
        )
    slug = re.sub(r"[^\w.]+", "-", source).strip("-")[-40:]
    digest = hashlib.sha256(json.dumps([source, identity]).encode()).hexdigest()[:10]
    return Path(cfg.data.prepared_dir, f"{slug}-{digest}")


def source_identity(task, parts, cfg):
    """What decides a task's texts: its source's parts, what its format makes of the first ones."""
    stamps = [[part.name, part.stamp] for part in parts]
    identity = [stamps, task.objective.features, cfg.data.fields]
    if task.format in (as_it_is, text_to_text) or not parts:
        return identity
    firsts = itertools.islice(
        formatted_examples(parts[0], InvalidExamples("skip"), task, cfg), 100
    )
    return [*identity, [[str(text) for text in texts] for *_, texts in firsts]]


def with_vocab_size(changes):
    """A new model's changes on the command line, with its size where they name the vocabulary."""
    vocab = changes.get("data.vocab", "")
    if not vocab or "model.vocab_size" in changes:
        return changes
    trained = re.fullmatch(r"train:(\d{1,9})", vocab)
    size = int(trained[1]) + SENTINELS if trained else load_tokenizer(vocab).size
    return changes | {"model.vocab_size": -(-size // 128) * 128}


def check_vocab_size(size, cfg):
    """Refuse a vocabulary of so many ids that the model's embedding does not fit."""
    if not size <= cfg.model.vocab_size < size + 128:
        raise UserError(
            f"The vocabulary has {size} ids (with its sentinels), the model "
            f"{cfg.model.vocab_size}: set --model.vocab_size {-(-size // 128) * 128}."
        )


def prepare_vocabulary(cfg, split="train"):
    """The Tokenizer that data.vocab names; train:PIECES trains one, kept in data.prepared_dir."""
    trained = re.fullmatch(r"train:([1-9]\d{0,8})", cfg.data.vocab)
    if not trained:
        return load_tokenizer(cfg.data.vocab)
    pieces = trained[1]
    check_vocab_size(int(pieces) + SENTINELS, cfg)
    opened = list(open_tasks(cfg, split).values())
    if all(task.source == "random:" for task, _ in opened):
        return IdTokenizer(cfg.model.vocab_size, SENTINELS)
    names = cfg.data.task if len(opened) > 1 else opened[0][0].source
    identity = [pieces, [source_identity(task, parts, cfg) for task, parts in opened]]
    path = Path(f"{prepared_path(names, identity, cfg)}.{pieces}.model")
    if not path.exists():
        note(f"training a vocabulary of {pieces} pieces on {names}")
        bad = InvalidExamples(cfg.data.on_error)

        def read(task, parts):
            return (
                text
                for part in parts
                for *_, texts in formatted_examples(part, bad, task, cfg)
                for text in texts
                if isinstance(text, str)
            )

        texts = itertools.zip_longest(*(read(*one) for one in opened), fillvalue="")
        texts = itertools.chain.from_iterable(texts)  # a text of each task in turn
        configs.write_file(path, train_tokenizer(texts, int(pieces)).serialized)
    return load_tokenizer(path)


def encode_in_background(examples, tokenizer, strange):
    """(number, texts) of examples -> (number, an array of ids for each text). While some are
    encoded the next are read. strange: a Counter of the characters that the vocabulary lacks."""

    def encode(batch):
        texts = [text for _, texts in batch for text in texts if isinstance(text, str)]
        encoded = tokenizer.encode_batch(texts)
        for text, ids in zip(texts, encoded):
            if strange.total() < 10_000 and UNK in ids:  # enough to name them
                strange.update(c for c in text if UNK in tokenizer.encode(c))
        ids = iter(encoded)
        return [
            (
                number,
                [
                    next(ids) if isinstance(text, str) else strip_eos(text)
                    for text in texts
                ],
            )
            for number, texts in batch
        ]

    with ThreadPoolExecutor(2) as threads:
        ahead = deque()
        while batch := list(itertools.islice(examples, ENCODE_BATCH)):
            ahead.append(threads.submit(encode, batch))
            if len(ahead) > 2:
                yield from ahead.popleft().result()
        while ahead:
            yield from ahead.popleft().result()


def strip_eos(ids):
    """The ids of an example that came tokenized; EOS is added where the batch is made."""
    ids = np.asarray(ids, np.int32)
    return ids[:-1] if len(ids) and ids[-1] == EOS else ids


def split_into_chunks(ends, objective, data):
    """Where features end [documents, features] -> pieces [N, features + 1], their start first."""
    if len(objective.features) > 1:
        return np.column_stack([np.append(0, ends[:-1, -1])[: len(ends)], ends])
    ends, length = ends[:, 0], objective.length(data)
    begins = np.append(0, ends)[: len(ends)]
    count = -(-(ends - begins) // length)  # of each document
    number = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    starts = np.repeat(begins, count) + number * length
    stops = np.minimum(starts + length, np.repeat(ends, count))
    return np.stack([starts, stops], 1)[stops - starts >= objective.shortest]


class Corpus:
    """The pieces of a task's split, numbered through all chapters; a chapter is tokenized when its
    pieces are asked for, and the next one while they are used."""

    def __init__(self, name, split, tokenizer, cfg, opened=None):
        self.task, self.parts = opened or open_task(name, split, cfg)
        self.title = f"{self.task.source} ({name}, {split})"
        self.tokenizer, self.cfg = tokenizer, cfg
        self.dtype = np.uint16 if tokenizer.size <= 1 << 16 else np.uint32
        identity = [
            configs.DATA_FORMAT,
            split,
            source_identity(self.task, self.parts, cfg),
        ]
        self.folder = prepared_path(self.task.source, [*identity, tokenizer.sha256], cfg)
        self.folder.mkdir(parents=True, exist_ok=True)
        # of each known chapter: its mark, its first piece
        self.marks, self.first = [], [0]
        # the place behind these chapters
        self.following = [0, 0, 0] if self.parts else None
        self.mapped = {}  # the ids of the last chapters used
        # of the last chapters, too
        self.pieces_of = functools.lru_cache(8)(self.pieces_of)
        self.readers = {}  # the place of the next chapter: the generator that is there
        self.bad, self.strange = InvalidExamples(cfg.data.on_error), Counter()
        self.lock, self.ahead, self.closed = threading.RLock(), None, False

    def mark(self, number):
        """What is known of a chapter, which is tokenized if it must be; None behind the last."""
        with self.lock:
            while len(self.marks) <= number and self.following:
                self.marks.append(self.write(self.following) | {"place": self.following})
                self.following = self.marks[-1].get("next")
        return self.marks[number] if number < len(self.marks) else None

    def chapters(self, count=math.inf):
        """The number of the piece that each chapter begins with, and last where they end: for at
        least `count` pieces, or as many as there are."""
        while self.first[-1] < count and self.mark(len(self.first) - 1):
            self.first.append(self.first[-1] + len(self.pieces_of(len(self.first) - 1)))
        return self.first

    def documents(self):
        """How many there are in all chapters."""
        self.chapters()
        return sum(mark["documents"] for mark in self.marks)

    def pieces_of(self, number):
        """Bounds of a chapter's pieces: [N, features + 1]."""
        objective = self.task.objective
        ends = (
            self.marks[number]["tokens"]
            if objective.across
            else self.load(number, "ends")
        )
        return split_into_chunks(
            np.reshape(ends, (-1, len(objective.features))), objective, self.cfg.data
        )

    def ids_of(self, number):
        """The ids of a chapter. Those before it may go, and the next one may be tokenized."""
        if number not in self.mapped:
            self.mapped[number] = self.load(number, "ids")
            while (
                len(self.mapped) > 2
                and sum(map(len, self.mapped.values())) > 2 * SHARD_TOKENS
            ):
                del self.mapped[next(iter(self.mapped))]
            last = max(self.mapped)
            if not self.cfg.data.keep_tokens:  # what is mapped can still be read
                for old in range(last):
                    self.path(self.marks[old]["place"], "ids").unlink(missing_ok=True)
            if last == len(self.marks) - 1 and not (self.ahead and self.ahead.is_alive()):
                self.ahead = threading.Thread(
                    target=self.look_ahead, args=[last + 1], daemon=True
                )
                self.ahead.start()
        return self.mapped[number]

    def look_ahead(self, number):
        # it comes again where the chapter is asked for
        with PREFETCH_LOCK, contextlib.suppress(Exception):
            self.mark(number)

    def find(self, numbers):
        """Numbers of pieces -> the chapters they are in [N], their bounds [N, features + 1]."""
        chapters = np.searchsorted(self.first, numbers, "right") - 1
        bounds = np.zeros((len(numbers), len(self.task.objective.features) + 1), int)
        for chapter in np.unique(chapters).tolist():
            here = chapters == chapter
            bounds[here] = self.pieces_of(chapter)[numbers[here] - self.first[chapter]]
        return chapters, bounds

    def lengths(self, numbers):
        """Numbers of pieces -> their tokens: [features, N]."""
        return np.diff(self.find(numbers)[1]).T

    def pieces(self, numbers):
        """Numbers of pieces -> an array of ids for each feature of each."""
        chapters, bounds = self.find(numbers)
        ids = {chapter: self.ids_of(chapter) for chapter in np.unique(chapters).tolist()}
        return [
            [ids[chapter][a:b] for a, b in itertools.pairwise(row)]
            for chapter, row in zip(chapters.tolist(), bounds.tolist())
        ]

    def path(self, place, end):
        return self.folder / "{:05}-{:03}.{}".format(*place[:2], end)

    def load(self, number, kind):
        """An array of a chapter, compared with its checksum; a damaged one is made again."""
        mark = self.marks[number]
        path = self.path(mark["place"], kind)
        for attempt in range(2):
            with contextlib.suppress(OSError, ValueError):
                if kind == "ends" or not mark["tokens"]:  # an empty file cannot be mapped
                    array = np.fromfile(path, self.dtype if kind == "ids" else np.int64)
                else:  # an array of its own is faster to index than a memmap
                    array = np.memmap(path, self.dtype, "r").view(np.ndarray)
                if zlib.crc32(array) == mark[kind]:
                    return array
            if path.exists():
                note(f"{path} is damaged: tokenizing this chapter again")
            self.write(mark["place"], again=True)
        raise UserError(
            f"{path} is not what was written a moment ago: the disk or the memory is "
            f"damaged, or another program writes there."
        )

    def write(self, place, again=False):
        """Tokenize the chapter that begins at a place (part of the source, number of the chapter in
        it, example in it), unless that has been done -> its mark."""
        path = self.path(place, "json")
        with self.lock, configs.lock(path.with_suffix(".lock"), wait=True):
            with contextlib.suppress(UserError):  # missing, or damaged
                if not again:
                    return configs.read_checked(path, SHARD_METADATA)
            reader = self.readers.pop(tuple(place), None) or self.tokenized(*place)
            documents, following = next(reader)  # one that fails is never asked again
            # the part goes on; the next has a reader of its own
            if following and following[1]:
                self.readers = {tuple(following): reader}
            arrays = [ids for document in documents for ids in document]
            ids = np.concatenate([np.zeros(0, np.int32), *arrays]).astype(self.dtype)
            ends = np.cumsum([len(part) for part in arrays], dtype=np.int64)
            # the arrays
            unknown = np.searchsorted(ends, np.flatnonzero(ids == UNK), "right")
            alone = {
                i
                for i in np.unique(unknown).tolist()
                if not self.tokenizer.raw_text(
                    # spaces may be among them
                    arrays[i][arrays[i] != UNK][:20].tolist()
                ).strip()
            }
            for kind, array in (("ids", ids), ("ends", ends)):
                configs.write_file(self.path(place, kind), array.tobytes())
            mark = {
                "documents": len(documents),
                "tokens": len(ids),
                "unknown": len(unknown),
                "only_unknown": len(alone),
                "skipped": self.bad.count,
                "characters": dict(self.strange.most_common(100)),
                "ids": zlib.crc32(ids),
                "ends": zlib.crc32(ends),
                **({"next": following} if following else {}),
            }
            configs.write_checked(path, mark)
            path.with_suffix(".lock").unlink(missing_ok=True)
            self.bad.count = 0
            self.strange.clear()
            if not again and (place == [0, 0, 0] or not following):
                self.report([*self.marks, mark])
        return mark

    def tokenized(self, part, number, start):
        """The chapters of a part from a place on, one after the other: (documents, an array of ids
        for each feature; the place of the next chapter, or None)."""
        examples = formatted_examples(
            self.parts[part], self.bad, self.task, self.cfg, self.tokenizer.size
        )
        texts = (
            (example, texts) for _, example, _, texts in examples if example >= start
        )
        held, tokens, last = [], 0, None
        foreground = threading.current_thread() is threading.main_thread()
        with progress_bar(
            f"tokenizing {self.title}", "token", quiet=not foreground
        ) as bar:
            for example, ids in encode_in_background(texts, self.tokenizer, self.strange):
                limit = (
                    SHARD_TOKENS
                    if part
                    else min(SHARD_TOKENS, FIRST_SHARD_TOKENS << number)
                )
                if tokens >= limit and example != last:
                    number += 1
                    yield held, [part, number, example]
                    held, tokens = [], 0
                if self.closed:
                    raise RuntimeError(f"{self.title} is closed")
                held.append(ids)
                size, last = sum(map(len, ids)), example
                tokens += size
                bar.update(size)
        yield held, [part + 1, 0, 0] if part + 1 < len(self.parts) else None

    def report(self, marks):
        """Say what has been tokenized so far, or all in all."""
        keys = "documents", "tokens", "unknown", "only_unknown", "skipped"
        documents, tokens, unknown, blank, skipped = (
            sum(m[key] for m in marks) for key in keys
        )
        more = [f"{blank:,} of only unknown tokens"] * bool(blank)
        more += ["the rest follows when it is needed"] * ("next" in marks[-1])
        note(
            ", ".join(
                [
                    f"prepared {self.title}: {documents:,} documents",
                    f"{tokens:,} tokens",
                    f"{unknown / max(tokens, 1):.3%} unknown",
                    f"{skipped:,} skipped",
                    *more,
                ]
            )
        )
        if unknown > 0.001 * tokens:
            strange = sum((Counter(mark["characters"]) for mark in marks), Counter())
            listed = " ".join(repr(c) for c, _ in strange.most_common(12))
            note(
                f"warning: more than 0.1 % of the tokens are unknown to the vocabulary; the "
                f"characters that cause it: {listed}"
            )


class Prepared(Dataset):
    """A Dataset that keeps on disk how many rows its packed blocks have, so that a run that goes on
    need not plan those that are behind it. A held-out split has one task, whose examples come as in
    the source, one in a row, and past the end rows are padding."""

    def __init__(self, tasks, rates, cfg):
        folders = [
            (
                task.corpus.folder.name,
                type(task.task.objective).__name__,
                vars(task.task.objective),
            )
            for task in tasks
        ]
        key = repr(
            [
                folders,
                rates,
                cfg.data,
                cfg.train.seed,
                self.BLOCK,
                FIRST_SHARD_TOKENS,
                SHARD_TOKENS,
            ]
        )
        name = f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
        self.path, starts = Path(cfg.data.prepared_dir, "plans", name), [0]
        with contextlib.suppress(UserError):  # missing, or damaged
            starts = configs.read_checked(self.path, {"starts": [int]})["starts"]
        super().__init__(tasks, rates, cfg, starts)

    def __str__(self):
        corpora = [task.corpus for task in self.tasks[:3]]
        titles = [
            f"{corpus.title}: {corpus.chapters(1)[-1]:,} examples"
            + " so far" * bool(corpus.following)
            for corpus in corpora
        ]
        titles += ["..."] * (len(self.tasks) > 3)
        return "; ".join(titles) + ", packed into rows" * self.packs

    @property
    def digest(self):
        """Changes when the tokens change that a run has begun with."""
        return "-".join(str(task.corpus.mark(0)["ids"]) for task in self.tasks)

    def members(self, numbers):
        if self.tasks[0].shuffled:
            return super().members(numbers)
        row = np.flatnonzero(
            numbers < self.tasks[0].corpus.chapters(numbers.max() + 1)[-1]
        )
        return row, 0 * row, numbers[row]

    def extend(self, row):
        known = len(self.starts)
        super().extend(row)
        if self.packs and len(self.starts) > known:
            configs.write_checked(self.path, {"starts": self.starts})

    def batches(self, most=0):
        """How many a held-out split has, up to `most` if not 0; the last may be partly padding."""
        size = self.cfg.train.batch_size
        count = self.tasks[0].corpus.chapters(most * size or math.inf)[-1]
        return min(-(-count // size), most or math.inf)

    def sample(self, most):
        """About `most` tokens of the first chapters, of the targets of pairs, for frequencies."""
        found = []
        for task in self.tasks:
            number, tokens = 0, 0
            while tokens < most / len(self.tasks) and task.corpus.mark(number):
                ids, bounds = task.corpus.ids_of(number), task.corpus.pieces_of(number)
                pairs = len(task.task.objective.features) > 1
                found += (
                    [ids[a:b] for a, b in bounds[:, -2:].tolist()] if pairs else [ids]
                )
                number, tokens = number + 1, tokens + len(ids)
        return np.concatenate(found)[: 2 * most]

    def close(self):
        """Let the tokenizing in the background end."""
        for task in self.tasks:
            task.corpus.closed = True


def prepare(cfg, split, tokenizer):
    """A run's Dataset of a split. Its first token files are written now, others when needed."""
    check_tasks(cfg)
    check_vocab_size(tokenizer.size, cfg)
    if split != "train" and cfg.data.task in MIXTURES:
        raise UserError(
            f"{cfg.data.task} is a mixture: its tasks are evaluated one by one."
        )
    opened = open_tasks(cfg, split)

    @functools.cache
    def open_corpus(name):
        corpus = Corpus(name, split, tokenizer, cfg, opened.get(name))
        if not corpus.chapters(1)[-1]:
            raise UserError(
                f"{corpus.task.source} holds no text for its {split} split: give it "
                f"two documents or more (text:FILE:lines makes one of each line)."
            )
        return corpus

    rates = mixture_rates(cfg.data.task, cfg, lambda name: open_corpus(name).documents())
    rates = {name: rate for name, rate in rates.items() if rate}
    tasks = [
        Examples(corpus.task, corpus, tokenizer, cfg, shuffled=split == "train")
        for corpus in map(open_corpus, rates)
    ]
    check_lengths(tasks, cfg.data, f"{cfg.data.task}, {split}")
    return Prepared(tasks, list(rates.values()), cfg)


def check_lengths(tasks, data, title):
    """Refuse an objective whose pieces do not fit into a row, before anything is written, and say
    how many of the first inputs and targets do not."""
    counts, total = [0, 0], 0
    for task in tasks:
        task.make(task.locate(np.zeros(1, int)))  # the objective may refuse too
        objective, numbers = task.task.objective, np.arange(task.corpus.first[-1])
        if objective.across:  # all but the last are of one length
            lengths, keys = (
                np.full((1, 64), objective.length(data)),
                random_bits(np.arange(64)),
            )
            sizes = objective.sizes(lengths, keys, task.tokenizer, data)
        else:
            sizes = task.sizes(np.stack([0 * numbers, numbers]))
            total += len(numbers)
        for i, (size, side) in enumerate(zip(sizes, SIDES)):
            limit, eos, kept = truncated_length(side, task.task, data)
            if not objective.across:
                counts[i] += (size > kept).sum()
            elif (need := size.max() + eos) > limit:
                raise UserError(
                    f"A row of {lengths[0, 0]} tokens becomes {need} {side}: set "
                    f"--data.{side}_length to {need} or more (it is {limit})."
                )
    if any(counts):
        note(
            f"{title}: {counts[0]:,} inputs and {counts[1]:,} targets of the first {total:,} are "
            f"longer than {data.inputs_length} and {data.targets_length} tokens and are cut"
        )


# ---- what is evaluated ---------------------------------------------------------------------------


def read_task(name, split, cfg, bad, size=math.inf):
    """The examples of a task's split as its format makes them, before tokenizing: (where, dict).
    size: of the vocabulary, so that the examples are those of the batches."""
    task, parts = open_task(name, split, cfg)
    return (
        (where, example)
        for part in parts
        for where, _, example, _ in formatted_examples(part, bad, task, cfg, size)
    )


def evaluation_config(task, cfg):
    """A task's name, Config of a run -> the Config that evaluates this task by itself. A source
    that has no splits and is not trained on is held out whole."""
    if task in MIXTURES:
        raise UserError(f"{task} is a mixture: name one of its tasks.")
    if task == cfg.data.task:
        return cfg
    source = find_task(task, cfg).source
    files = source.startswith(("text:", "jsonl:", "parquet:")) and "{split}" not in source
    whole = files and source not in {
        find_task(name, cfg).source
        for name, rate in mixture_rates(cfg.data.task, cfg).items()
        if rate
    }
    return configs.override(
        cfg,
        {
            "data.task": task,
            "data.eval_tasks": "",
            "data.validation_source": source * whole,
            "data.source": "" if task in TASKS else p3_root(cfg) and cfg.data.source,
        },
    )


def evaluation_configs(cfg, split="validation"):
    """Config -> {task: its Config}: what is evaluated while training, each task by itself. Tasks
    without such a split are left out, unless there is no other."""
    alone = {task: evaluation_config(task, cfg) for task in evaluated_tasks(cfg)}
    opened, without = open_all((task, split, its) for task, its in alone.items())
    without = " ".join(map(str, without))
    if not opened:
        raise MissingSplit(without)
    if without:
        note(f"not evaluated: {without}")
    return {task: alone[task] for task in opened}


def unigram_loss(counts, batches, tokenizer):
    """Nats per token of held-out batches, sentinels and EOS left out, under the frequencies of
    training tokens [V]: what a model reaches that ignores the context, so the number to beat."""
    targets = np.concatenate([batch.targets.ravel() for batch in batches])
    content = targets[(targets > EOS) & (targets < tokenizer.size - tokenizer.sentinels)]
    counts = counts + 1.0
    return (
        float(np.mean(np.log(counts.sum()) - np.log(counts[content])))
        if len(content)
        else 0.0
    )


# ---- what the screen shows -----------------------------------------------------------------------


def task_objectives(cfg):
    return [find_task(name, cfg).objective for name in mixture_rates(cfg.data.task, cfg)]


def is_span_corruption(cfg):
    """Whether span corruption is all that is learned."""
    return all(type(objective) is SpanCorruption for objective in task_objectives(cfg))


def describe_rows(cfg):
    """Config -> what a row is; of span corruption, how raw tokens become inputs and targets."""
    data = cfg.data
    if not is_span_corruption(cfg):
        packs = data.pack and any(objective.packs for objective in task_objectives(cfg))
        return (
            f"rows     {data.inputs_length} inputs and {data.targets_length} targets, "
            + ("several examples packed into a row" if packs else "an example each")
        )
    noise, spans = noise_counts(raw_length(data), data)
    kept = raw_length(data) - noise
    return (
        f"spans    {kept + noise} raw tokens, {noise} of them removed in {spans} spans: {kept} "
        f"kept + {spans} sentinels + EOS = {kept + spans + 1} inputs, {noise} + {spans} + EOS "
        f"= {noise + spans + 1} targets"
    )


def show_row(ids, segments, tokenizer):
    """One row -> text: sentinels in reverse, EOS and unknown pieces faint, segments in colours."""

    def style(pair):
        i, segment = pair
        kind = (
            "7" if i >= tokenizer.size - tokenizer.sentinels else "2" if i <= UNK else ""
        )
        colour = str(31 + segment % 6) if segments.max() > 1 else ""
        return segment, ";".join(filter(None, (kind, colour)))

    real = [pair for pair in zip(ids.tolist(), segments.tolist()) if pair[1]]
    text = ""
    for (_, codes), pairs in itertools.groupby(real, style):
        part = configs.escape_controls(tokenizer.raw_text([i for i, _ in pairs]))
        text += f"\x1b[{codes}m{part}\x1b[0m" if codes and sys.stdout.isatty() else part
    return text.strip()


def tokens_per_second(work, tokens):
    """Run `work` a few times -> how many of its `tokens` it does in a second."""
    work(0)
    numbers = itertools.count(1)
    times, seconds = timeit.Timer(lambda: work(next(numbers))).autorange()
    return times * tokens / seconds


def first_split(cfg):
    """Training's; of a task that is only evaluated, the first that it has."""
    for split in Task().splits:
        with contextlib.suppress(MissingSplit):
            open_tasks(cfg, split)
            return split
    return "train"  # which it is refused for


def show(cfg, count, split):
    """Print `count` rows of a split's first batch, and how fast batches are made."""
    cfg = configs.override(cfg, {"train.eval_every": 0, "train.infer_every": 0})
    if not split and (split := first_split(cfg)) != "train":
        note(
            f"{cfg.data.task} is not trained on: these are examples of its {split} split"
        )
    if split != "train":  # whose examples have a row each
        cfg = configs.override(cfg, {"data.pack": False})
    tokenizer = prepare_vocabulary(cfg, split)
    dataset = prepare(cfg, split, tokenizer)
    print(f"task     {cfg.data.task}: {dataset}\n{describe_rows(cfg)}")
    batch = dataset.batch(0)
    sides = (
        ("inputs", batch.inputs, batch.input_segments),
        ("targets", batch.targets, batch.target_segments),
    )
    # a held-out split may have fewer rows
    filled = batch.target_segments.any(axis=1).sum()
    for i in range(min(count, filled)):
        for side, ids, segments in sides:
            lengths = np.bincount(segments[i])[1:]
            print(
                f"\nrow {i}, {side}: {' + '.join(map(str, lengths))} of {ids.shape[1]} tokens\n"
                f"  {show_row(ids[i], segments[i], tokenizer)}"
            )
    real = [(segments > 0).sum() for _, _, segments in sides]
    full = 8 if split == "train" else 1  # batches that surely are
    rate = tokens_per_second(lambda step: dataset.batch(step % full), sum(real))
    print(
        f"\nfilled   {real[0] / batch.inputs.size:.1%} of the inputs, "
        f"{real[1] / batch.targets.size:.1%} of the targets"
    )
    speeds = [f"{rate / 1e6:.1f} M tokens/s in batches of {cfg.train.batch_size}"]
    if dataset.packs:
        plans = tokens_per_second(lambda step: dataset.plan(0), dataset.BLOCK)
        speeds.append(f"rows planned for {plans:,.0f} examples/s")
    if is_span_corruption(cfg):
        raw = np.zeros((1024, raw_length(cfg.data)), np.uint16)
        spans = tokens_per_second(
            lambda _: span_corruption(raw, np.arange(1024), tokenizer.size - 1, cfg.data),
            raw.size,
        )
        speeds.append(
            f"span corruption alone, on 1,024 rows, {spans / 1e6:.1f} M raw tokens/s"
        )
    print(f"speed    {'; '.join(speeds)} (one core)")
    dataset.close()


def list_mixture(name, cfg):
    """Print the tasks of a mixture with their rates, or all names where none is given."""
    if not name:
        print(
            "tasks",
            *(
                f"  {entry:36} {getattr(task, 'source', '')}".rstrip()
                for entry, task in TASKS.items()
            ),
            "mixtures",
            *(f"  {entry}" for entry in MIXTURES),
            sep="\n",
        )
        return
    cfg = configs.override(cfg, {"data.task": name})
    check_tasks(cfg)
    rates = mixture_rates(
        name,
        cfg,
        lambda task: Corpus(task, "train", prepare_vocabulary(cfg), cfg).documents(),
    )
    total, width = sum(rates.values()), max(map(len, rates))
    print(
        f"{name}: {len(rates)} tasks, {sum(rate > 0 for rate in rates.values())} of them trained "
        f"on\n{'task':{width}} {'rate':>12} {'of all':>9}  source"
    )
    for task, rate in sorted(rates.items(), key=lambda item: -item[1]):
        print(
            f"{task:{width}} {rate:>12,.6g} {rate / total:>9.4%}  {find_task(task, cfg).source}"
        )


def prepare_all(cfg):
    """Write the token files that a run needs: all, or those of its steps if rows are not packed."""
    tokenizer, t = prepare_vocabulary(cfg), cfg.train
    dataset = prepare(cfg, "train", tokenizer)
    blocks = (t.steps - t.start_step) * t.batch_size // dataset.BLOCK + 2
    for task, count in zip(dataset.tasks, dataset.drawn(blocks).tolist()):
        task.corpus.chapters(math.inf if dataset.packs else count)
    print(f"{'train':10} {dataset}")
    for task, alone in evaluation_configs(cfg).items():
        held_out = prepare(alone, "validation", tokenizer)
        held_out.batches(t.eval_batches)
        print(f"{'validation':10} {task}: {held_out}")


def prepare_shard(cfg, shard):
    """Tokenize every n-th part of all sources of a run, "i/n", i from 0."""
    tokenizer, (turn, machines) = prepare_vocabulary(cfg), configs.parse_shard(shard)
    wanted = [(name, "train", cfg) for name in open_tasks(cfg)]
    with contextlib.suppress(MissingSplit):
        wanted += [
            (name, "validation", alone) for name, alone in evaluation_configs(cfg).items()
        ]
    for name, split, its in wanted:
        corpus = Corpus(name, split, tokenizer, its)
        for part in range(turn, len(corpus.parts), machines):
            place = [part, 0, 0]
            while place and place[0] == part:
                place = corpus.write(place).get("next")
    print(f"shard {shard} of {cfg.data.task} is prepared")


def main(argv):
    args, changes = configs.parse_args(
        __doc__,
        argv,
        show=dict(type=int, metavar="N", help="print N rows of the first batch"),
        split=dict(help="of which --show prints rows (train, where a task has it)"),
        prepare=dict(
            action="store_true", help="write the token files a run needs, and stop"
        ),
        shard=dict(
            metavar="I/N",
            help="with --prepare: every N-th part of the sources, whole\n"
            "corpora; N machines that share a disk do it together",
        ),
        list=dict(
            nargs="?",
            const="",
            metavar="MIXTURE",
            help="print a mixture's tasks and rates,"
            "\nor the names of all tasks and mixtures",
        ),
    )
    if args.show is None and not args.prepare and args.list is None:
        raise UserError("Say what to do: --show N, --prepare or --list [MIXTURE].")
    cfg = configs.resolve(
        args, changes if args.run_dir else with_vocab_size(changes), recipe=True
    )
    check_tasks(cfg)
    if args.list is not None:
        list_mixture(args.list, cfg)
    if args.shard:
        prepare_shard(cfg, args.shard)
    elif args.prepare:
        prepare_all(cfg)
    if args.show is not None:
        show(cfg, args.show, args.split)


if __name__ == "__main__":
    configs.run_command(main)
