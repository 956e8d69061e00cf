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


class ByteTokenizer(Tokenizer):
    """Text <-> its UTF-8 bytes, byte b as id b + 3 (ByT5, Xue et al. 2022). Without extra ids the
    sentinels are the ids of the highest bytes, as in the published ByT5."""

    def __init__(self, extra_ids=0):
        # which are surely none of the text: no UTF-8 has them
        sentinels = extra_ids or 11
        super().__init__(f"bytes:{extra_ids}\n".encode(), 3 + 256 + extra_ids, sentinels)

    def encode(self, text):
        ids = []
        # text, number, text ...
        for k, piece in enumerate(re.split(r"<extra_id_(\d\d?)>", text)):
            ids += (
                [self.size - 1 - int(piece)]
                if k % 2
                else [byte + 3 for byte in piece.encode()]
            )
        return ids

    def encode_batch(self, texts):
        return [
            np.array(self.encode(text), np.int32)
            if "<extra_id_" in text
            else np.frombuffer(text.encode(), np.uint8) + np.int32(3)
            for text in texts
        ]

    def raw_text(self, ids):
        known = [b"<pad>", b"</s>", b"<unk>", *(bytes([byte]) for byte in range(256))]
        text = (
            known[i] if i < 3 + 256 else b"<extra_id_%d>" % (self.size - 1 - i)
            for i in ids
        )
        return b"".join(text).decode(errors="replace")

    def decode(self, ids):
        """Ids -> text, up to the first EOS; what is no byte, or no UTF-8, is left out."""
        ids = itertools.takewhile(lambda i: i != EOS, map(int, ids))
        return bytes(i - 3 for i in ids if 3 <= i < 3 + 256).decode(errors="ignore")


class IdTokenizer(Tokenizer):
    """No text at all but ids below `size`, shown as numbers; the highest ones may be sentinels."""

    def __init__(self, size, sentinels=0):
        super().__init__(f"ids:{size}:{sentinels}\n".encode(), size, sentinels)

    def encode(self, text):
        return [
            int(word) if word.isdecimal() and int(word) < self.size else UNK
            for word in text.split()
        ]

    def encode_batch(self, texts):
        return [np.array(self.encode(text), np.int32) for text in texts]

    def raw_text(self, ids):
        return "".join(f" {i}" for i in ids)

    def decode(self, ids):
        """Ids -> text, up to the first EOS; padding is left out."""
        return " ".join(
            str(i) for i in itertools.takewhile(lambda i: i != EOS, ids) if i != PAD
        )


def add_sentinels(model, number):
    """Give a ModelProto its last pieces, the sentinels."""
    for k in reversed(range(number)):
        piece = sentencepiece_model_pb2.ModelProto.SentencePiece
        model.pieces.add(piece=f"▁<extra_id_{k}>", score=0.0, type=piece.USER_DEFINED)


@functools.lru_cache(maxsize=4)  # a mixture's hundreds of tasks share one
def parse_vocabulary(serialized, name="the vocabulary"):
    """The bytes of a SentencePiece model -> Tokenizer, with sentinels where it has none."""
    model = sentencepiece_model_pb2.ModelProto()
    try:
        model.ParseFromString(serialized)
    # protobuf's DecodeError, whose place differs between versions
    except Exception as error:
        raise UserError(f"{name} is not a SentencePiece model ({error}).") from error
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
    """Path of a SentencePiece model, local or remote; bytes[:EXTRA]; ids:SIZE[:SENTINELS]."""
    path = str(path)
    if found := re.fullmatch(r"bytes(?::(\d{1,9}))?", path):
        return ByteTokenizer(int(found[1] or 0))
    if found := re.fullmatch(r"ids:(\d{1,9})(?::(\d{1,9}))?", path):
        return IdTokenizer(int(found[1]), int(found[2] or 0))
    try:
        with open_file(path) as file:
            serialized = file.read()
    except (OSError, ValueError) as error:
        raise UserError(
            f"No vocabulary at {path} ({getattr(error, 'strerror', 0) or error}): give "
            f"--data.vocab the path of a SentencePiece model, or train one on the "
            f"source with --data.vocab train:32000."
        ) from error
    # what a run keeps of one
    if re.fullmatch(rb"(bytes|ids:\d{1,9})(:\d{1,9})?\s*", serialized):
        return load_tokenizer(serialized.decode().strip())
    return parse_vocabulary(serialized, path)


def train_tokenizer(texts, pieces, most=1 << 27):
    """Train a unigram vocabulary of `pieces` pieces, sentinels not counted, on texts. Of a large
    source the first `most` characters are enough, which take one or two minutes. The thread count
    is fixed because the pieces found depend on it."""
    lines, out = [], io.BytesIO()
    with progress_bar("reading for a vocabulary", "character") as bar:
        for text in texts:
            for line in text.splitlines():
                lines += [
                    line[start : start + 4000] for start in range(0, len(line), 4000)
                ]
            bar.update(len(text))
            if bar.n >= most:
                break
        note(f"training a vocabulary of {pieces:,} pieces on {bar.n:,} characters")
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=out,
            vocab_size=pieces,
            model_type="unigram",
            pad_id=PAD,
            eos_id=EOS,
            unk_id=UNK,
            bos_id=-1,
            num_threads=4,
            minloglevel=2,
            max_sentence_length=16_000,
            character_coverage=0.9999,
        )
    except RuntimeError as error:
        bound = re.search(r"<= (\d+)", str(error))
        raise UserError(
            f"The source has too little text for {pieces} pieces: give it more, or set "
            f"--data.vocab train:{bound[1] if bound else 'N'} or fewer."
        ) from error
    return parse_vocabulary(out.getvalue())


class ProgressBar(tqdm):
    """A bar on standard error; where that is no terminal a line every half minute."""

    @staticmethod
    def status_printer(file):
        return (
            tqdm.status_printer(file)
            if file.isatty()
            else (lambda text: text and print(text, file=file, flush=True))
        )


def progress_bar(what, unit, total=None, quiet=False):
    """Shows how far a long job is; silent while it is short, and where others speak."""
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


# ---- sources -------------------------------------------------------------------------------------
# A source is a list of parts, each of them read from its beginning as (where it stands, dict of
# fields). What cannot be read is reported by calling `bad(where, what)`, which raises or counts as
# data.on_error says. Paths may be remote ("gs://bucket/*.gz"): fsspec reads them. The split is
# settled here: "train", "validation", ..., or None for all of it.


class SourceFile(NamedTuple):
    name: str
    stamp: list  # size and time of a file: when these change, the source has changed
    read: Callable  # bad -> iterator of (where, dict)


class MissingSplit(UserError):
    """The source has splits, but not this one."""


class MissingSource(UserError):
    """{what is not on the disk: what to do about it}: those of a mixture are named together."""

    def __str__(self):
        cures = dict.fromkeys(self.args[0].values())  # each once
        return ";\n".join(self.args[0]) + f": {' '.join(cures)}"


@functools.cache
def python_documents():
    """The language manual and the docstrings of Python itself, one document for each file, read
    from the standard library's source files by `ast`: nothing is imported, nothing downloaded."""
    library, documents = Path(os.__file__).parent, []
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in sorted(library.rglob("*.py")):
        if left_out & set(path.relative_to(library).parts):
            continue
        tree = ast.parse(path.read_bytes())
        # topics = {"assert": "The ...", ...}
        if path.parts[-2:] == ("pydoc_data", "topics.py"):
            topics = next(
                node.value for node in tree.body if isinstance(node, ast.Assign)
            )
            documents.extend(ast.literal_eval(topics).values())
        docs = [
            ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds)
        ]
        documents.append("\n\n".join(filter(None, docs)))
    return [document for document in documents if document.strip()]


def in_memory_source(name, stamp, examples, split):
    """examples: function of a split -> its examples. The parts of a split, or of both for None."""
    if split not in ("train", "validation", None):
        raise MissingSplit(f"{name} has no split {split}.")
    return [
        SourceFile(
            f"{name} {one}",
            stamp,
            lambda bad, one=one: (
                (f"{name} {one} {i}", example) for i, example in enumerate(examples(one))
            ),
        )
        for one in ("train", "validation")
        if split in (one, None)
    ]


def python_source(name, split, cfg):
    """python:, the text that comes with Python itself; python:COUNT, the numbers below COUNT. In no
    order, of which the first 1 % are held out."""
    if name and not re.fullmatch(r"[1-9]\d{1,8}", name):
        raise UserError(f"python:{name} is no source: write python: or python:COUNT.")

    def examples(split):
        count = int(name) if name else len(python_documents())
        order, held_out = (
            permute(np.arange(count), count, 6).tolist(),
            max(1, count // 100),
        )
        for n in order[:held_out] if split == "validation" else order[held_out:]:
            yield {"number": n} if name else {"text": python_documents()[n]}

    return in_memory_source(f"python:{name}", [sys.version], examples, split)


def reverse_source(name, split, cfg):
    """reverse:, sequences of 4 to 12 random ids and the same backwards, for toy_reverse."""

    def examples(split):
        seed, count = {"train": (0, 20_000), "validation": (1, 512)}[split]
        for i in range(count):
            random = np.random.default_rng([seed, i])
            ids = random.integers(3, 35, random.integers(4, 13)).tolist()
            yield {"inputs": [*ids, EOS], "targets": [*ids[::-1], EOS]}

    return in_memory_source("reverse:", [1], examples, split)


def random_source(name, split, cfg):
    """random:, documents of 4096 random ids without end, for benchmarks."""
    size = cfg.model.vocab_size - SENTINELS - 3

    def examples(split):
        seed, numbers = {"train": (0, itertools.count()), "validation": (1, range(64))}[
            split
        ]
        for i in numbers:
            ids = random_bits(seed, i, np.arange(4096)) % np.uint64(size)
            yield {"text": ids.astype(int) + 3}

    return in_memory_source("random:", [size], examples, split)


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
            infos = {
                system.unstrip_protocol(path): info
                for path, info in system.glob(inner, detail=True).items()
                if info["type"] == "file"
            }
        except (ImportError, ValueError, OSError) as error:
            raise UserError(f"{pattern} cannot be read ({error}).") from error
        times = "etag", "mtime", "updated", "created"
        return sorted(
            (path, [info["size"], str([info.get(key) for key in times])])
            for path, info in infos.items()
        )
    paths = sorted(glob.glob(os.path.expanduser(pattern), recursive=True))
    stats = {path: os.stat(path) for path in paths if not os.path.isdir(path)}
    return [(path, [stat.st_size, stat.st_mtime_ns]) for path, stat in stats.items()]


GROUP_BYTES = 1 << 26
HELD_OUT_BYTES = 1 << 25  # of text that are held out, at most


def group_files(found, read):
    """[(path, [size, time])], (path, bad) -> examples: parts, small files together in one."""
    groups, size = [], math.inf
    for path, stamp in found:
        if size >= GROUP_BYTES:
            groups.append([])
            size = 0
        groups[-1].append((path, stamp))
        size += stamp[0]
    return [
        SourceFile(
            group[0][0],
            group,
            lambda bad, group=group: itertools.chain.from_iterable(
                read(path, bad) for path, _ in group
            ),
        )
        for group in groups
    ]


def file_source(read, pattern, split, cfg):
    """The files that match a glob; read: (path, bad) -> examples of a file. Files without splits
    are divided: the first 1 % of the text, at least an example, is for validation, in one stretch,
    so that it has no neighbours in training but at its end."""
    if not (found := find_files(pattern)):
        folder = pattern.rstrip("/") if os.path.isdir(pattern) else "FOLDER"
        raise MissingSource(
            {
                f"No file matches {pattern or 'an empty name'}": f"give --data.source the "
                f"path of a file, or a quoted glob, such as '{folder}/*'."
            }
        )
    parts = group_files(found, read)
    if split is None:
        return parts
    if split not in ("train", "validation"):
        raise MissingSplit(f"{pattern} has no splits, so no {split} split.")
    held_out = min(HELD_OUT_BYTES, sum(stamp[0] for _, stamp in found) // 100)

    def read_first(bad):
        seen = 0
        for where, example in parts[0].read(bad):
            if (seen <= held_out) == (split == "validation"):
                yield where, example
            elif split == "validation":
                return
            seen += sum(
                len(value) for value in example.values() if isinstance(value, str | list)
            )

    divided = parts[0]._replace(read=read_first)
    return [divided, *parts[1:]] if split == "train" else [divided]


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
        return (
            (f"{path}:{number}", {"text": text}) for number, text in lines if text.strip()
        )

    return file_source(read, pattern, split, cfg)


def read_jsonl(path, bad):
    """jsonl:GLOB, a JSON object a line, plain or .gz, as C4 is published."""
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


def read_parquet(path, bad):
    """parquet:GLOB, the rows of parquet files."""
    import pyarrow.parquet  # a fifth of a second, and no other source needs it

    try:
        with open_file(path) as file:
            batches = pyarrow.parquet.ParquetFile(file).iter_batches(1024)
            examples = (example for batch in batches for example in batch.to_pylist())
            for number, example in enumerate(examples):
                yield f"{path} row {number}", example
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
        bad(path, f"is damaged ({error})")


def decode_bytes(value):
    """Bytes anywhere in a value of TFDS -> text."""
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, dict):
        return {key: decode_bytes(inner) for key, inner in value.items()}
    if isinstance(value, list) or isinstance(value, np.ndarray) and value.dtype == object:
        return [decode_bytes(inner) for inner in value]
    return value


def tfds_source(name, split, cfg):
    """tfds:NAME[/CONFIG][:VERSION] or tfds:FOLDER, a TFDS dataset on disk in array_record form."""
    from etils import epath  # its folders may be remote

    home = cfg.data.tfds_dir or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
    dataset, _, version = name.partition(":") if "://" not in name else (name, "", "")
    folder = epath.Path(home).expanduser() / dataset
    infos = [*folder.glob("dataset_info.json")] or [*folder.glob("*/dataset_info.json")]
    found = [path.parent for path in infos if version in ("", path.parent.name)]
    if not found:
        others = ", ".join(path.parent.name for path in infos)
        there = f" (there is {others}: --data.source tfds:{dataset}:VERSION)" * bool(
            others
        )
        raise MissingSource(
            {
                f"{name} is not in {folder / version}{there}": (
                    "name the folder of your TFDS datasets with --data.tfds_dir or TFDS_DATA_DIR, or fill "
                    "it where TensorFlow is (tfds build NAME --data_dir DIR --file_format array_record), "
                    "or read C4's own files with --data.source 'jsonl:DIR/c4-train.*.json.gz', or any text "
                    "with 'text:DIR/*.txt'."
                )
            }
        )
    folder = max(found, key=lambda path: [int(n) for n in re.findall(r"\d+", path.name)])
    import tensorflow_datasets as tfds  # half a second, and no other source needs it

    try:
        info = tfds.builder_from_directory(folder).info
    except Exception as error:  # of protobuf or TFDS itself
        raise UserError(
            f"{folder / 'dataset_info.json'} is damaged ({error})."
        ) from error
    if (form := info.file_format.value) != "array_record":
        raise UserError(
            f"{folder} is stored as {form}, which only TensorFlow reads: prepare it "
            f"again on a machine that has it, by tfds.builder({dataset!r}, "
            f"file_format='array_record').download_and_prepare()."
        )
    if split not in info.splits:
        raise MissingSplit(
            f"{folder} has no split {split} (it has {', '.join(info.splits)}): name a "
            f"--data.validation_source."
        )
    count, size = info.splits[split].num_examples, 1 << 17  # examples of a part

    def read(start, bad):
        examples = tfds.builder_from_directory(folder).as_data_source(split)
        for number in range(start, min(start + size, count)):
            where = f"{folder} {split} {number}"
            try:
                yield where, decode_bytes(examples[number])
            except UnicodeDecodeError:
                bad(where, "is not UTF-8")
            except (IndexError, ValueError, RuntimeError) as error:
                bad(
                    where,
                    f"is missing or damaged: its info promises {count:,} examples ({error})",
                )

    stamp = [info.splits[split].shard_lengths, info.splits[split].num_bytes]
    return [
        SourceFile(f"{folder} {split} {start}", stamp, functools.partial(read, start))
        for start in range(0, count, size)
    ]


def hf_source(name, split, cfg):
    """hf:NAME[:CONFIG], a dataset of the Hugging Face hub or a folder of one, streamed."""
    try:
        import datasets
    except ImportError:
        raise UserError("hf: needs the library datasets: pip install '.[hf]'.") from None
    dataset, _, config = name.partition(":")
    try:
        stream = datasets.load_dataset(
            dataset, config or None, split=split, streaming=True
        )
    except Exception as error:  # of the library, the network, the dataset's own files
        kind = MissingSplit if "split" in str(error) else UserError
        raise kind(f"hf:{name} cannot be opened, split {split} ({error}).") from error

    def read(shard, bad):
        examples = enumerate(stream.shard(stream.num_shards, shard))
        return (
            (f"hf:{name} {split} shard {shard} row {i}", example)
            for i, example in examples
        )

    return [
        SourceFile(f"shard {shard}", [stream.num_shards], functools.partial(read, shard))
        for shard in range(stream.num_shards)
    ]


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
            raise MissingSplit(
                f"{name} has no info.{split}.json (it has {', '.join(others)})."
            )
        raise MissingSource(
            {f"{name} has no info.{split}.json": "name a folder that SeqIO has cached."}
        )

    def read(features, path, bad):
        from google.protobuf.message import DecodeError
        from tensorflow_datasets.proto import tf_example_generated_pb2

        for number, record in enumerate(read_tfrecords(path, bad)):
            where = f"{path} record {number}"
            try:
                stored = tf_example_generated_pb2.Example.FromString(
                    record
                ).features.feature
                example = {}
                for key, feature in stored.items():
                    values = [v.decode() for v in feature.bytes_list.value] or np.array(
                        [*feature.int64_list.value, *feature.float_list.value]
                    )
                    scalar = features.get(key, {}).get("shape") == []
                    key = key.replace("_plaintext", "_pretokenized")
                    example[key] = values[0] if scalar else values
                yield where, example
            except (DecodeError, UnicodeDecodeError, IndexError) as error:
                bad(where, f"is damaged ({error})")

    parts = []
    for path, _ in infos:
        folder = os.path.dirname(path)
        if not find_files(f"{folder}/COMPLETED"):
            raise UserError(
                f"{folder} has no file COMPLETED: its caching did not finish."
            )
        form = {"features": {str: {"shape?": list}}, "num_shards": int}
        info = configs.read_json(configs.to_path(path), form)
        shards = find_files(f"{glob.escape(folder)}/{split}.tfrecord-*-of-*")
        if len(shards) != info["num_shards"]:
            raise UserError(
                f"{folder} has {len(shards)} shards of {split}, its info promises "
                f"{info['num_shards']}: copy the missing ones."
            )
        parts += group_files(shards, functools.partial(read, info["features"]))
    return parts


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
    """ "KIND:NAME", a split -> the source's parts. whole: files without splits are not divided."""
    kind, _, name = source.partition(":")
    if kind not in SOURCES:
        raise UserError(
            f"Unknown kind of source in {source!r}: it begins with one of "
            f"{', '.join(f'{known}:' for known in SOURCES)}."
        )
    named = name.replace("{split}", split)
    if named != name and not find_files(named.removesuffix(":lines")):
        if find_files(name.replace("{split}", "*").removesuffix(":lines")):
            raise MissingSplit(f"No file matches {named}: there is no split {split}.")
    whole = kind in ("python", "text", "jsonl", "parquet") and (whole or named != name)
    return SOURCES[kind](named, None if whole else split, cfg)


class InvalidExamples:
    """Called with what cannot be read: stops at the first, or skips and counts (data.on_error)."""

    def __init__(self, on_error):
        self.stop, self.count = on_error == "stop", 0

    def __call__(self, where, what):
        if self.stop:
            raise UserError(
                f"{where} {what}: mend it, or leave it out with --data.on_error skip."
            )
        self.count += 1


# ---- tasks ---------------------------------------------------------------------------------------


class PrefixLM(Objective):
    """A piece of a document, cut in two at random (t5's prefix_lm)."""

    def length(self, data):
        return data.inputs_length - 1

    def make(self, pieces, keys, tokenizer, data):
        lengths = np.array([len(ids) for (ids,) in pieces])
        below = (keys >> np.uint64(32)) * np.maximum(lengths - 1, 0).astype(np.uint64)
        cuts = np.minimum(1 + (below >> np.uint64(32)).astype(int), lengths - 1)
        return [(ids[:cut], ids[cut:]) for (ids,), cut in zip(pieces, cuts.tolist())]


# The text-to-text formats of T5 (Raffel et al. 2020, appendix D; t5/data/preprocessors.py), string
# for string. A format makes a list of examples of one: fields inputs and targets, and what the
# metrics need. Where no more than words is needed it is written as a template.


def as_it_is(example):
    return [example]


def text_to_text(example):
    """Fields inputs and targets as they are: texts, or ids. Of a SeqIO cache the texts, if kept."""
    texts = {
        key: example.get(f"{key}_pretokenized", example.get(key))
        for key in Pairs.features
    }
    return [example | {key: text for key, text in texts.items() if text is not None}]


def template(inputs, targets, labels=()):
    """A format that fills two templates; {label} stands for the text of the label."""

    def fill(example):
        kept = {"idx": example["idx"]} if "idx" in example else {}
        if labels:
            label = example.get("label", -1)
            example = {**example, "label": "<unk>" if label == -1 else labels[label]}
        filled = {
            "inputs": inputs.format_map(example),
            "targets": targets.format_map(example),
        }
        return [filled | kept]

    return fill


def labeled_fields(words):
    """ "rte hypothesis=sentence2 premise" -> "rte hypothesis: {sentence2} premise: {premise}"."""
    first, *pairs = words.split()
    pairs = [pair.partition("=") for pair in pairs]
    return " ".join(
        [first, *(f"{name}: {{{field or name}}}" for name, _, field in pairs)]
    )


def format_stsb(example):
    """A similarity between 0 and 5 is rounded to the nearest fifth: "3.8"."""
    score = np.round(np.float32(example["label"]) * np.float32(5)) / np.float32(5)
    return template(labeled_fields("stsb sentence1 sentence2"), "{score:.1f}")(
        example | {"score": score}
    )


def format_multirc(example):
    """Without markup; three numbers are kept to group answers by."""
    plain = {
        key: re.sub("</?b>", "", example[key].replace("<br>", " "))
        for key in ("paragraph", "question", "answer")
    }
    fill = template(labeled_fields("multirc question answer paragraph"), "{label}", TRUTH)
    kept = {f"idx/{key}": example["idx"][key] for key in plain}
    return [filled | kept for filled in fill(plain | {"label": example["label"]})]


def format_record(example):
    """ReCoRD: an example for each answer; bullet points become sentences."""
    passage = re.sub(r"([.?!\"'])\n@highlight\n", r"\1 ", example["passage"])
    passage = passage.replace("\n@highlight\n", ". ")
    entities, answers = ", ".join(example["entities"]), list(example["answers"])
    text = f"record query: {example['query']} entities: {entities} passage: {passage}"
    kept = {f"idx/{key}": example["idx"][key] for key in ("passage", "query")}
    return [
        {"inputs": text, "targets": answer, "answers": answers, **kept}
        for answer in answers or ["<unk>"]
    ]


def format_wsc(only_true, example):
    """Winograd schemas: "wsc: ... *it* ...", and what the pronoun may stand for. Two of the
    published examples are marked wrongly, a word too early or with the punctuation."""
    if only_true and not example["label"]:
        return []
    words, at, pronoun = (
        example["text"].split(" "),
        example["span2_index"],
        example["span2_text"],
    )
    if words[at] != pronoun:
        if words[at].startswith(pronoun):
            words[at : at + 1] = [pronoun, words[at].removeprefix(pronoun)]
            words = " ".join(words).rstrip().split(" ")
        elif words[at + 1] == pronoun:
            at += 1
        else:
            raise ValueError(f"word {at} is {words[at]!r}, not {pronoun!r}")
    text = f"{' '.join(words[:at])} X {' '.join(words[at + 1 :])}".replace(
        " X ", f" *{pronoun}* "
    )
    return [
        {
            "inputs": f"wsc: {text}",
            "targets": example["span1_text"],
            "label": example.get("label", 0),
            "idx": example.get("idx"),
        }
    ]


def format_definite_pronoun(example):
    """Definite pronoun resolution, written as WSC is; the first such pronoun is meant."""
    text = re.sub(
        rf" ({example['pronoun']})( |\.|,)", r" *\1*\2", example["sentence"], count=1
    )
    return [
        {"inputs": f"wsc: {text}", "targets": example["candidates"][example["label"]]}
    ]


def spaced(text):
    """ASCII punctuation between spaces, and no two spaces in a row."""
    return re.sub(r"[ \t\n\f\r]+", " ", re.sub(r"([!-/:-@\[-`{-~])", r" \1 ", text))


def format_squad(example):
    """SQuAD: punctuation stands alone in question, context and answers; the first is learned."""
    question, context = spaced(example["question"]), spaced(example["context"])
    answers = [spaced(answer) for answer in example["answers"]["text"]]
    text = re.sub(r"[ \t\n\f\r]+", " ", f"question: {question} context: {context}")
    return [
        {
            "inputs": text,
            "targets": answers[0],
            "answers": answers,
            "id": example.get("id"),
            "question": question,
            "context": context,
        }
    ]


ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen"
).split()
TENS = "- - twenty thirty forty fifty sixty seventy eighty ninety".split()


def spell_number(n):
    """A number below a million in English words."""
    if n < 20:
        return ONES[n]
    if n < 100:
        return TENS[n // 10] + (f"-{ONES[n % 10]}" if n % 10 else "")
    size, name = (1000, "thousand") if n >= 1000 else (100, "hundred")
    return f"{spell_number(n // size)} {name}" + (
        f" {spell_number(n % size)}" if n % size else ""
    )


def by_rule(inputs, targets, example):
    """The tasks of the recipe tiny_finetune, made of a number."""
    n = example["number"]
    day = time.gmtime(86_400 * n)
    return template(inputs, targets)(
        {
            "number": n,
            "words": spell_number(n),
            "even": ("yes", "no")[n % 2],
            "date": time.strftime("%Y-%m-%d", day),
            "day": f"{day.tm_mday} {time.strftime('%B %Y', day)}",
        }
    )


class Task(NamedTuple):
    """What is learned from a source, and how answers are judged (names as in t5's registry)."""

    source: str = ""  # KIND:NAME, as data.source
    # example of the source -> list of {"inputs", "targets", ...}
    format: Callable = text_to_text
    # names of evaluate.METRICS, or functions (targets, predictions) -> dict
    metrics: tuple = ()
    choices: tuple = ()  # all possible answers, where they are few
    # of answers before they are compared, see evaluate.py
    postprocess: str | Callable = ""
    splits: tuple = ("train", "validation", "test")  # that the source has
    objective: Objective = Pairs()
    inputs_eos: bool = True  # the inputs end with EOS; T0's do not
    eos_after_trim: bool = True  # a text that is cut has EOS too; T0's have not


ENTAILMENT = ("entailment", "not_entailment")
NLI = ("entailment", "neutral", "contradiction")
TRUTH = ("False", "True")
TASKS, MIXTURES = configs.TASKS, configs.MIXTURES  # to which a recipe file adds its own


def glue(
    name, words, labels, metrics=("accuracy",), suite=("glue", "1.0.0", "v002"), **more
):
    """A task of GLUE, or of another suite like it: its targets are labels."""
    folder, version, ours = suite
    return {
        f"{folder}_{name}_{ours}": Task(
            f"tfds:{folder}/{name}:{version}",
            template(labeled_fields(words), "{label}", labels),
            metrics,
            labels,
            "label",
            **more,
        )
    }


super_glue = functools.partial(glue, suite=("super_glue", "1.0.2", "v102"))


WMT = [
    ("wmt14", "de"),
    ("wmt14", "fr"),
    ("wmt15", "fr"),
    ("wmt16", "ro"),
    ("wmt19", "de"),
    ("wmt_t2t", "de"),
]  # in both directions
LANGUAGES = {"en": "English", "de": "German", "fr": "French", "ro": "Romanian"}
F1 = ("f1", "accuracy")
HELD_OUT = ("validation", "test")
MNLI = "mnli hypothesis premise"
WSC = "tfds:super_glue/wsc.fixed:1.0.2"
RULE = "python:10000"
TASKS |= {
    "span_corruption": Task("python:", as_it_is, objective=SpanCorruption()),
    "prefix_lm": Task("python:", as_it_is, objective=PrefixLM()),
    "text_to_text": Task(),
    "c4_v220_span_corruption": Task(
        "tfds:c4/en:2.2.0", as_it_is, objective=SpanCorruption()
    ),
    "c4_v220_prefix_lm": Task("tfds:c4/en:2.2.0", as_it_is, objective=PrefixLM()),
    **{
        f"{name}_{a}{b}_v003": Task(
            f"tfds:{name}_translate/{code}-en:1.0.0",
            template(f"translate {LANGUAGES[a]} to {LANGUAGES[b]}: {{{a}}}", f"{{{b}}}"),
            ("bleu",),
        )
        for name, code in WMT
        for a, b in (("en", code), (code, "en"))
    },
    "cnn_dailymail_v002": Task(
        "tfds:cnn_dailymail:3.4.0",
        template("summarize: {article}", "{highlights}"),
        ("rouge",),
    ),
    "squad_v010_allanswers": Task(
        "tfds:squad/v1.1:3.0.0", format_squad, ("squad",), postprocess="answers"
    ),
    **glue(
        "cola", "cola sentence", ("unacceptable", "acceptable"), ("matthews_corrcoef",)
    ),
    **glue("sst2", "sst2 sentence", ("negative", "positive")),
    **glue("mrpc", "mrpc sentence1 sentence2", ("not_equivalent", "equivalent"), F1),
    **glue("qqp", "qqp question1 question2", ("not_duplicate", "duplicate"), F1),
    "glue_stsb_v002": Task(
        "tfds:glue/stsb:1.0.0",
        format_stsb,
        ("pearson_corrcoef", "spearman_corrcoef"),
        postprocess="number",
    ),
    **glue("mnli", MNLI, NLI, splits=("train",)),
    **glue("mnli_matched", MNLI, NLI, splits=HELD_OUT),
    **glue("mnli_mismatched", MNLI, NLI, splits=HELD_OUT),
    **glue("qnli", "qnli question sentence", ENTAILMENT),
    **glue("rte", "rte sentence1 sentence2", ENTAILMENT),
    **glue("wnli", "wnli sentence1 sentence2", ("not_entailment", "entailment")),
    **glue("ax", MNLI, NLI, (), splits=("test",)),
    **super_glue("boolq", "boolq passage question", TRUTH),
    **super_glue(
        "cb",
        "cb hypothesis premise",
        ("entailment", "contradiction", "neutral"),
        ("mean_3class_f1", "accuracy"),
    ),
    **super_glue("copa", "copa choice1 choice2 premise question", ("choice1", "choice2")),
    "super_glue_multirc_v102": Task(
        "tfds:super_glue/multirc:1.0.2",
        format_multirc,
        ("multirc_f1", "exact_match"),
        TRUTH,
        "multirc",
    ),
    "super_glue_record_v102": Task(
        "tfds:super_glue/record:1.0.2", format_record, ("record",), postprocess="record"
    ),
    **super_glue("rte", "rte hypothesis premise", ENTAILMENT),
    **super_glue("wic", "wic sentence1 sentence2 word", TRUTH),
    **super_glue(
        "axb",
        "rte hypothesis=sentence2 premise=sentence1",
        ENTAILMENT,
        (),
        splits=("test",),
    ),  # SuperGLUE's broad diagnostics, as RTE
    **super_glue("axg", "rte hypothesis premise", ENTAILMENT, (), splits=("test",)),
    "super_glue_wsc_v102_simple_train": Task(
        WSC, functools.partial(format_wsc, True), splits=("train",)
    ),
    "super_glue_wsc_v102_simple_eval": Task(
        WSC,
        functools.partial(format_wsc, False),
        ("accuracy",),
        postprocess="wsc",
        splits=HELD_OUT,
    ),
    "dpr_v001_simple": Task(
        "tfds:definite_pronoun_resolution:1.1.0",
        format_definite_pronoun,
        ("accuracy",),
        splits=("train", "test"),
    ),
    **{
        f"by_rule_{name}": Task(RULE, functools.partial(by_rule, *texts), ("accuracy",))
        for name, *texts in (
            ("words", "number: {number}", "{words}"),
            ("digits", "words: {words}", "{number}"),
            ("date", "date: {date}", "{day}"),
            ("day", "day: {day}", "{date}"),
        )
    },
    "by_rule_even": Task(
        RULE,
        functools.partial(by_rule, "is {number} even?", "{even}"),
        ("accuracy",),
        ("no", "yes"),
        "label",
    ),
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
T0 = {
    role: {name: int(size) for name, size in re.findall(r"(\S+)\s+(\d+)", text)}
    for role, text in T0.items()
}
T0_CAP = 500_000


def t0_mixture(roles, score_eval, cfg):
    """The folders of P3 that belong to the datasets of these roles -> rates. A dataset of more than
    T0_CAP examples counts as T0_CAP, divided among its templates; a smaller one counts once for
    each. For evaluation a folder counts by what it holds."""
    sizes = {name: size for role in roles for name, size in T0[role].items()}
    known = {name for role in T0.values() for name in role}
    members, root, folders = {}, p3_root(cfg), sorted(p3_sources(cfg))
    if not folders:
        raise UserError(
            "T0's mixtures are made of P3 (bigscience/P3, a folder for each prompt): "
            "name where its folders are with --data.source seqio:DIR or parquet:DIR."
        )
    for folder in folders:
        name = max(
            (name for name in known if folder.startswith(f"{name}_")), key=len, default=""
        )
        if name in sizes and folder.endswith("_score_eval") == score_eval:
            members.setdefault(name, []).append(folder)
    return {
        folder: min(T0_CAP, p3_size(root, folder))
        if score_eval
        else (sizes[name] if sizes[name] <= T0_CAP else T0_CAP // len(folders))
        for name, folders in members.items()
        for folder in folders
        # left out by T0's authors: its cache is broken
        if folder != "gigaword_summarize_"
    }


def p3_root(cfg):
    """Config -> the folder with P3's folders: data.source is seqio:FOLDER or parquet:FOLDER."""
    kind, _, name = cfg.data.source.partition(":")
    return name.removesuffix("*").rstrip("/") if kind in P3_FILES else ""


# What a folder of P3 holds, as SeqIO cached it or as parquet files: where its splits are.
P3_FILES = {
    "seqio": {"info.*.json": ""},
    "parquet": {"*.parquet": "/*{split}*.parquet", "*/*.parquet": "/{split}/*.parquet"},
}


def p3_sources(cfg, folder="*"):
    """The folders of P3, or one of them -> {name: source}."""
    kind, found = cfg.data.source.partition(":")[0], {}
    for files, splits in P3_FILES.get(kind, {}).items():
        for path, _ in find_files(f"{p3_root(cfg)}/{folder}/{files}"):
            name = path.split("/")[-2 - files.count("/")]
            found[name] = f"{kind}:{p3_root(cfg)}/{name}{splits}"
    return found


def p3_size(root, folder):
    """Examples of a folder, by what SeqIO counted; 1 where it did not."""
    for split in ("train", "validation", "test"):
        for path, _ in find_files(f"{root}/{folder}/stats.{split}.json"):
            return configs.read_json(configs.to_path(path), {"examples?": int}).get(
                "examples", 1
            )
    return 1


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
    **{
        name: functools.partial(t0_mixture, roles, name.endswith("score_eval"))
        for name, *roles in (
            ("t0_train", "train"),
            ("t0+_train", "train", "gpt"),
            ("t0++_train", "train", "gpt", "super_glue"),
            ("t0_train_score_eval", "train"),
            ("t0_eval_score_eval", "eval"),
            ("bias_fairness_eval_score_eval", "bias"),
        )
    },
}


def mixture_rates(name, cfg, examples=lambda task: 1, within=()):
    """A task's or mixture's name -> {task: rate}, mixtures in it taken apart. examples: a task's
    name -> how many it has to train on, which BySize asks. within: the mixtures around this one."""
    if name not in MIXTURES:
        return {name: 1.0}
    if name in within:
        raise UserError(f"The mixture {name} contains itself.")
    entries, rates = MIXTURES[name], {}
    try:
        entries = dict(entries(cfg) if callable(entries) else entries)
    except UserError:
        raise
    except Exception as error:  # a recipe's
        raise UserError(f"The mixture {name} is no dict of rates ({error!r}).") from error
    for member, rate in entries.items():
        if isinstance(rate, BySize) and member not in MIXTURES:
            rate = rate.of(examples(member))
        if not isinstance(rate, int | float) or not 0 <= rate < math.inf:
            raise UserError(
                f"The rate of {member} in {name} is {rate}: give it a number, or, if "
                f"it is one task, BySize with a maximum."
            )
        inside = mixture_rates(member, cfg, examples, (*within, name))
        total = sum(inside.values())
        for task, part in inside.items():
            rates[task] = rates.get(task, 0.0) + rate * part / total
    if not any(rates.values()):
        raise UserError(f"The mixture {name} has no task with a rate above 0.")
    return rates


def find_task(name, cfg):
    """A task's name, or KIND:NAME of a source with inputs and targets -> Task. data.source takes
    the place of the task's own source, if it is data.task."""
    task = TASKS.get(name)
    if not task and name.partition(":")[0] in SOURCES:
        return TASKS["text_to_text"]._replace(source=name)
    if not task and (found := p3_sources(cfg, name).get(name)):
        return Task(found, inputs_eos=False, eos_after_trim=False)
    if not task:
        hint = configs.nearest(name, [*TASKS, *MIXTURES])
        raise UserError(
            f"Unknown task {name}{hint or ';'} python data.py --list lists them."
        )
    if not isinstance(task, Task) or not isinstance(task.objective, Objective):
        raise UserError(
            f"{name} is {task!r:.200}, not a value of data.Task with an Objective."
        )
    if cfg.data.source and cfg.data.task == name:
        task = task._replace(source=cfg.data.source, splits=Task().splits)
    if not task.source:
        raise UserError(f"--data.task {name} needs a --data.source, such as jsonl:FILE.")
    return task


def check_tasks(cfg):
    """Refuse what data.task, eval_tasks and the sources cannot mean, before anything is made."""
    data = cfg.data
    if data.task in MIXTURES and (
        data.validation_source or data.source and not p3_root(cfg)
    ):
        raise UserError(
            f"--data.source and --data.validation_source are for one task, and "
            f"{data.task} is a mixture: a mixture's tasks have their own."
        )
    for task in dict.fromkeys([*mixture_rates(data.task, cfg), *evaluated_tasks(cfg)]):
        find_task(task, cfg)


def open_task(name, split, cfg):
    """A task's name, a split -> (Task, the parts of its source that are this split)."""
    task = find_task(name, cfg)
    if split == "validation" and cfg.data.validation_source:
        return task, open_source(cfg.data.validation_source, split, cfg, whole=True)
    if split not in task.splits:
        raise MissingSplit(f"{name} has no {split} split.")
    return task, open_source(
        task.source, split, cfg, whole=bool(cfg.data.validation_source)
    )


def open_all(wanted):
    """[(task, split, Config)] -> {task: (Task, parts)}, why others have none; names all missing."""
    opened, without, missing = {}, [], {}
    for name, split, cfg in wanted:
        try:
            opened[name] = open_task(name, split, cfg)
        except MissingSplit as error:
            without.append(error)
        except MissingSource as error:
            missing.update(error.args[0])
    if missing:
        raise MissingSource(missing)
    return opened, without


def evaluated_tasks(cfg):
    """Names of the tasks that are evaluated: those of data.eval_tasks, or else all of data.task."""
    names = (cfg.data.eval_tasks or cfg.data.task).split(",")
    return [task for name in names for task in mixture_rates(name.strip(), cfg)]


def open_tasks(cfg, split="train"):
    """The tasks of data.task that have a rate -> {task: (Task, parts)}. Of a run that trains, what
    is missing of the tasks that it evaluates is named with the rest."""
    names = [name for name, rate in mixture_rates(cfg.data.task, cfg).items() if rate]
    wanted = [(name, split, cfg) for name in names]
    if split == "train" and (cfg.train.eval_every or cfg.train.infer_every):
        wanted += [
            (name, "validation", evaluation_config(name, cfg))
            for name in evaluated_tasks(cfg)
            if name not in names
        ]
    opened, without = open_all(wanted)
    if not opened.keys() >= set(names):
        raise without[0]
    return {name: opened[name] for name in names}


def formatted_examples(part, bad, task, cfg, size=math.inf):
    """The examples of a part that can be tokenized: (where, number in the part, dict, its texts or
    ids), as the task formats them. size: of the vocabulary, below which ids must lie. data.fields
    says what a field of the task is called in the source: "text=content"."""
    pairs = [
        pair.partition("=") for pair in cfg.data.fields.split(",") if cfg.data.fields
    ]
    if not all(ours and theirs for ours, _, theirs in pairs):
        raise UserError(
            f"--data.fields {cfg.data.fields}: write text=NAME or inputs=A,targets=B."
        )
    names = {ours.strip(): theirs.strip() for ours, _, theirs in pairs}
    features = task.objective.features
    for number, (where, example) in enumerate(part.read(bad)):
        example = example | {
            ours: example[theirs] for ours, theirs in names.items() if theirs in example
        }
        try:
            made = task.format(example)
            for made_of_it in [made] if isinstance(made, dict) else made:
                texts = tuple([made_of_it.get(feature) for feature in features])
                if wrong := next(
                    filter(None, (invalid_reason(text, size) for text in texts)), None
                ):
                    bad(
                        where,
                        f"has {wrong} in {' and '.join(features)} but the fields "
                        f"{', '.join(made_of_it)} (--data.fields {features[0]}=NAME)",
                    )
                elif any(
                    len(text) and not (isinstance(text, str) and text.isspace())
                    for text in texts
                ):  # examples without any text are left out
                    yield where, number, made_of_it, texts
        except UserError:
            raise
        except Exception as error:  # a format is anyone's code
            what = f"no {error}" if isinstance(error, KeyError) else repr(error)
            bad(
                where,
                f"does not suit the task: {what} (fields: {', '.join(map(str, example))})",
            )


def invalid_reason(value, size):
    """What keeps a value from being tokenized, or None: it is text, or a list of ids."""
    if isinstance(value, str):
        lone = not value.isascii() and re.search(r"[\ud800-\udfff]", value)
        return "half of a character (a lone surrogate)" if lone else None
    ids = np.zeros(1)  # no ids: nor are lists of several lengths
    with contextlib.suppress(ValueError, OverflowError):
        ids = np.asarray(value) if isinstance(value, list | np.ndarray) else ids
    if ids.ndim != 1 or len(ids) and ids.dtype.kind not in "iu":
        return "no text"
    if len(ids) and not 0 <= ids.min() <= ids.max() < size:
        return f"ids from {ids.min()} to {ids.max()}, where the vocabulary ends at {size - 1},"
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
