"""Turn text into the batches of training and evaluation.

The input is text, for example from files. The output is one Batch of int32 arrays for
each step. First, the text is tokenized. Then an objective, such as span corruption, turns
the tokens into examples. Finally, short examples are packed together into the rows of a
batch. A batch depends only on the config and on the number of the step. So a resumed run
only needs its step number to continue with the right batches. This file uses NumPy and
never JAX.

    python data.py --show 3                          print three rows of the first batch
    python data.py --config small_c4 --prepare       write the token files of a run
    python data.py --config small_c4 --prepare --shard 0/4     write a quarter of them

Example:
    The words of "Thank you for inviting me to your party last week" are tokens 10 to 19.
    Span corruption turns this text into the inputs "Thank you <X> me to your party <Y>"
    and the targets "<X> for inviting <Y> last week". The sentinel <X> is token 99, the
    sentinel <Y> is token 98, and EOS is token 1.

    >>> import numpy as np
    >>> from configs import DataConfig
    >>> from data import span_corruption
    >>> settings = DataConfig(noise_density=0.4, mean_span_length=2)
    >>> tokens, keys = np.arange(10, 20).reshape(1, 10), np.array([0])
    >>> inputs, targets = span_corruption(tokens, keys, 99, settings)
    >>> inputs.tolist(), targets.tolist()
    ([[10, 11, 99, 14, 15, 16, 17, 98, 1]], [[99, 12, 13, 98, 18, 19, 1]])

Terms:
    task           a data source and an objective; a run may mix several tasks
    document       one text of a source, or one pair of texts (inputs and targets)
    shard          the tokens of some consecutive documents, stored in files on disk
    chunk          consecutive tokens that become one example
    objective      a rule that turns a chunk into inputs and targets
    example        one pair of inputs and targets
    epoch          one pass through all chunks of a task
    sample         one use of a chunk in training: a chunk in a certain epoch
    sample number  the index of a sample in the endless shuffled order of a task
    row            one line of a batch, which holds one example or several packed examples
    block          about 16,384 consecutive samples, which are packed together
"""

import ast
import bisect
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
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Callable, NamedTuple

import numpy as np
import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tqdm import tqdm

import configs
from configs import UserError, note

PAD, EOS, UNK = 0, 1, 2  # T5's ids of padding, end of sequence and unknown tokens
SENTINELS = 100  # T5 has 100 sentinels, <extra_id_0> to <extra_id_99>
SIDES = ("inputs", "targets")  # an example is a pair of inputs and targets


class Batch(NamedTuple):
    """The batch of one training step, as five int32 arrays.

    One row may hold several short examples, followed by padding. The segments number the
    examples of a row from 1, and padding has segment 0. For example, the inputs
    [5, 9, 1, 4, 1, 0] with the segments [1, 1, 1, 2, 2, 0] are two examples. The targets
    have their own segments. `decoder_inputs` holds the targets of each example, shifted
    right by one position, with token 0 (PAD) in front.

    `inputs` and `input_segments` have the shape [rows, inputs_length]. The other three
    arrays have the shape [rows, targets_length].
    """

    inputs: np.ndarray
    input_segments: np.ndarray
    decoder_inputs: np.ndarray
    targets: np.ndarray
    target_segments: np.ndarray


# ---- text and tokens -------------------------------------------------------------------


class Tokenizer:
    """Convert between text and token ids with a SentencePiece model.

    Id 0 is padding, id 1 is EOS and id 2 is the unknown token. The sentinels have the
    highest ids. For example, in T5's vocabulary of 32,100 ids, <extra_id_0> has the id
    32099 and <extra_id_99> has the id 32000.

    serialized: the bytes of the model file. A run directory stores these bytes.
    size: the number of all ids, including the sentinels.
    sentinels: the number of sentinels.
    processor: the SentencePieceProcessor of the model. The model includes the sentinels.
    """

    def __init__(self, serialized, size, sentinels, processor=None):
        self.serialized = serialized
        self.sha256 = hashlib.sha256(serialized).hexdigest()
        self.size = size
        self.sentinels = sentinels
        self.processor = processor

    def encode(self, text):
        """Return the token ids of a text as a list, without EOS.

        A sentinel, such as "<extra_id_0>", becomes one id if the sentinel begins the text
        or follows a space. This space adds no id. In "a<extra_id_0>", the sentinel is not
        recognized.
        """
        return self.processor.encode(text)

    def encode_batch(self, texts):
        """Encode texts on all CPU cores, and return one int32 array of ids per text."""
        return self.processor.encode(list(texts), return_type="numpy")

    def raw_text(self, ids):
        """Return the text of token ids, with all special tokens written out.

        For example, EOS becomes "</s>" and the last id becomes "<extra_id_0>". Every id
        must be in the vocabulary.
        """
        words = "".join(self.processor.id_to_piece(i) for i in ids)
        return words.replace("\u2581", " ")  # SentencePiece stores a space as U+2581

    def decode(self, ids):
        """Return the text of the token ids before the first EOS, without padding.

        An id that is not in the vocabulary becomes the unknown token. A model can predict
        such an id. For example, T5's embedding table has 32,128 rows, but T5's vocabulary
        has only 32,100 tokens.
        """
        content = []
        for i in map(int, ids):
            if i == EOS:
                break
            if i != PAD:
                content.append(i if i < self.size else UNK)
        return self.processor.decode(content)


# ---- span corruption -------------------------------------------------------------------
# Span corruption is the pretraining objective of T5 (Raffel et al. 2020, section 3.1.4).
# About 15 % of the tokens are removed, in spans of 3 tokens on average. In the inputs,
# one sentinel replaces each removed span. The targets list every sentinel, followed by
# the tokens that it replaced:
#
#     tokens   Thank you for inviting me to your party last week
#     inputs   Thank you <extra_id_0> me to your party <extra_id_1> </s>
#     targets  <extra_id_0> for inviting <extra_id_1> last week </s>
#
# The spans are random. The function `random_bits`, defined in a later section, turns a
# key, which is one or more integers, into 64 random bits. Equal keys give equal bits, so
# a resumed run needs no saved state of a random number generator.


def noise_counts(length, data):
    """Return how many tokens span corruption removes, and how many spans they form.

    For example, with T5's settings, a text of 100 tokens loses 15 tokens in 5 spans. At
    least one token is removed, and at least one token is kept.

    length: the number of tokens before the removal.
    data: a DataConfig with noise_density and mean_span_length.
    """
    # The t5 library computes in float32 and rounds half to even. We do so, too, to get
    # the same numbers.
    noise = int(np.round(np.float32(length) * np.float32(data.noise_density)))
    noise = min(max(noise, 1), length - 1)
    spans = int(np.round(np.float32(noise) / np.float32(data.mean_span_length)))
    # Each span follows a kept token, so the spans cannot outnumber the kept tokens.
    return noise, min(max(spans, 1), length - noise)


def raw_length(data):
    """Return the length of the longest text that fits into the inputs after corruption.

    The text may be longer than the inputs, because one sentinel replaces a span of
    several tokens. With T5's settings, 568 tokens of text become 512 input tokens.
    """
    for length in itertools.count(3):
        noise, spans = noise_counts(length, data)
        inputs = length - noise + spans + 1  # kept tokens, one sentinel per span, EOS
        if inputs > data.inputs_length:
            return length - 1


def random_compositions(total, parts, keys):
    """Split the integer `total` at random into `parts` positive integers.

    For example, 10 can be split into the three integers [4, 1, 5]. All ways to split (the
    compositions of `total`) are equally likely. Each of the N random integers in `keys`
    gives one row of the result, an array [N, parts].
    """
    # Write 5 as the line 1 1 1 1 1, which has 4 gaps. If the line is cut at the first and
    # the third gap, the result is 1 + 2 + 2. Each gap gets a random number of 32 bits,
    # and the line is cut at the parts - 1 gaps with the lowest numbers.
    bits = random_bits(keys[:, None], np.arange(total // 2))  # 64 bits for every two gaps
    gaps = bits.view(np.uint32)[:, : total - 1]
    # argpartition moves the parts - 1 lowest numbers to the front. Its second argument
    # must be a valid index into the total - 1 gaps, so `min` limits this argument.
    lowest = np.argpartition(gaps, min(parts - 1, total - 2), axis=1)[:, : parts - 1]
    return np.diff(np.sort(lowest + 1, axis=1), axis=1, prepend=0, append=total)


def span_corruption(tokens, keys, sentinel, data):
    """Replace random spans of tokens by sentinels, and return the inputs and targets.

    For example, the tokens [10, 11, 12, 13, 14, 15] may become the inputs
    [10, 99, 13, 14, 98, 1] and the targets [99, 11, 12, 98, 15, 1]. Here 99 and 98 are
    sentinels, and 1 is EOS.

    tokens: an array [N, n] with the ids of N chunks of equal length.
    keys: [N] random integers. Row i of the result depends only on tokens[i] and keys[i].
    sentinel: the id of <extra_id_0>. The next spans get the next lower ids.
    data: a DataConfig with noise_density and mean_span_length.

    Both results are int32 arrays with N rows, and every row ends with EOS. Each chunk
    starts with kept tokens and ends with a removed span. The targets have no closing
    sentinel. The functions random_spans_noise_mask and noise_span_to_unique_sentinel of
    t5/data/preprocessors.py follow the same rules.
    """
    rows, length = tokens.shape
    noise, spans = noise_counts(length, data)
    # Each chunk alternates between kept and removed spans, beginning with a kept span.
    kept_lengths = random_compositions(length - noise, spans, random_bits(keys, 1))
    span_lengths = random_compositions(noise, spans, random_bits(keys, 0))
    lengths = np.stack([kept_lengths, span_lengths], axis=2)  # [N, spans, 2]
    removed = np.tile([False, True], rows * spans).repeat(lengths.ravel())
    removed = removed.reshape(rows, length)  # True where a token is removed
    # In the inputs, the sentinel overwrites the first token of its span. In the targets,
    # the sentinel overwrites the kept token before its span, so that the span stays.
    span_start = removed & ~np.roll(removed, 1, axis=1)
    before_span = np.roll(span_start, -1, axis=1)
    sentinels = np.tile(sentinel - np.arange(spans), rows)
    inputs = insert_sentinels(tokens, sentinels, span_start, ~removed | span_start)
    targets = insert_sentinels(tokens, sentinels, before_span, removed | before_span)
    return inputs, targets


def insert_sentinels(tokens, sentinels, positions, selected):
    """Write sentinels over some tokens, remove other tokens, and append EOS.

    For example, the tokens [10, 11, 12, 13, 14] become [10, 11, 99, 14, 1]. Here the
    sentinel 99 overwrites token 12, token 13 is removed, and 1 is EOS.

    tokens: an array of ids [N, n].
    sentinels: the ids of all sentinels, row after row.
    positions: a boolean array [N, n] that is True where a sentinel is written.
    selected: a boolean array [N, n] that is True where a token or sentinel is kept. Every
        row must keep the same number of ids, because the result is an array.
    """
    marked = tokens.astype(np.int32)
    marked[positions] = sentinels
    out = np.full((len(tokens), np.count_nonzero(selected[0]) + 1), EOS, np.int32)
    out[:, :-1] = marked[selected].reshape(len(tokens), -1)
    return out


# ---- objectives ------------------------------------------------------------------------


class Objective:
    """Turn tokens of text into examples, which are pairs of inputs and targets.

    The objectives in this file are SpanCorruption, PrefixLM and Pairs. A recipe file may
    define more objectives as subclasses of Objective. Every objective receives the tokens
    in chunks, and turns each chunk into one example.

    `features` names the fields of a document that are tokenized. With one feature (plain
    text), documents are split into chunks. The objective then needs a method
    `length(data)`, which returns the maximum length of a chunk. With two features (inputs
    and targets), every document is one chunk. The arguments of the methods are:

    chunks: a list of N chunks. A chunk is a list with one array of ids for each feature.
    keys: an array [N] with 64 random bits for each chunk, different in each epoch.
    data: a DataConfig.
    """

    features = ("text",)  # the names of the fields of a document that are tokenized
    across_documents = False  # whether a chunk may hold tokens of several documents
    min_length = 1  # chunks with fewer tokens are dropped
    packs = True  # whether examples may be so short that several fit into one row

    def sizes(self, lengths, keys, tokenizer, data):
        """Return the lengths of the inputs and targets of N examples, without EOS.

        The result is an array [2, N]. The first row is for the inputs, and the second row
        is for the targets. `lengths` is an array [features, N] with the length of each
        chunk. The base class creates examples from chunks of zeros and measures their
        lengths. A subclass that computes the lengths directly makes packing faster.
        """
        chunks = [[np.zeros(n, np.int32) for n in chunk] for chunk in lengths.T]
        pairs = self.make(chunks, keys, tokenizer, data)
        return np.array([[len(ids) for ids in pair] for pair in pairs]).T

    def make(self, chunks, keys, tokenizer, data):
        """Return a pair of arrays (inputs, targets) for each chunk, without EOS.

        The base class returns the chunks unchanged. This is right if each chunk already
        is a pair of inputs and targets.
        """
        return chunks


class Pairs(Objective):
    """Use documents that already are pairs of inputs and targets, as in translation."""

    features = ("inputs", "targets")

    def sizes(self, lengths, keys, tokenizer, data):
        """Return `lengths`, because the inputs and targets are not changed."""
        return lengths


class SpanCorruption(Objective):
    """Remove random spans of tokens from a text, and let the model predict the spans.

    The documents of a shard are joined into one long text. This text is cut into chunks
    that are just long enough to fill the inputs. So a chunk may hold the end of one
    document and the start of the next document.
    """

    across_documents = True
    min_length = 2  # at least one token is removed, and at least one token is kept
    packs = False  # nearly every example fills a row

    def length(self, data):
        """Return how many tokens a chunk needs to fill the inputs after corruption."""
        return raw_length(data)

    def sizes(self, lengths, keys, tokenizer, data):
        counts = [noise_counts(length, data) for length in lengths[0].tolist()]
        noise, spans = np.array(counts).T
        # Each span adds one sentinel to the inputs and one to the targets. EOS is not
        # counted.
        return np.stack([lengths[0] - noise + spans, noise + spans])

    def make(self, chunks, keys, tokenizer, data):
        pairs = [None] * len(chunks)
        lengths = np.array([len(ids) for (ids,) in chunks])  # one array of ids per chunk
        # Process all chunks of one length together, because span_corruption needs chunks
        # of equal length.
        for length in np.unique(lengths):
            _, spans = noise_counts(length, data)
            if spans > tokenizer.sentinels:
                raise UserError(
                    f"Span corruption makes {spans} spans in {length} tokens of text, "
                    f"but the vocabulary has only {tokenizer.sentinels} sentinels: raise "
                    f"--data.mean_span_length to make fewer spans."
                )
            here = np.flatnonzero(lengths == length)
            tokens = np.stack([chunks[i][0] for i in here])
            sides = span_corruption(tokens, keys[here], tokenizer.size - 1, data)
            for i, inputs, targets in zip(here, *sides):
                pairs[i] = inputs[:-1], targets[:-1]  # `truncate` appends EOS later
        return pairs


# ---- examples --------------------------------------------------------------------------


def truncated_length(side, task, data):
    """Return the maximum lengths of inputs or targets with and without EOS.

    The result is three integers. For example, (512, 1, 511) means at most 512 tokens, of
    which 1 is EOS, and at most 511 tokens before EOS.

    EOS is appended to all targets, and to the inputs unless task.inputs_eos is False.
    Usually, long examples are truncated so that EOS still fits, as in the t5 library. In
    T0's tasks, task.eos_after_trim is False. Then long targets fill the maximum length
    without EOS.

    side: the string "inputs" or "targets".
    """
    limit = data.inputs_length if side == "inputs" else data.targets_length
    eos = int(side == "targets" or task.inputs_eos)
    return limit, eos, limit - eos * task.eos_after_trim


def truncate(ids, side, task, data):
    """Truncate the token ids of an example's inputs or targets, and append EOS.

    For example, with a maximum length of 4, the ids [5, 9, 7, 8, 6] become [5, 9, 7, 1].

    side: the string "inputs" or "targets".
    """
    limit, eos, kept = truncated_length(side, task, data)
    # [:limit] removes EOS if the tokens before EOS already fill the maximum length.
    return np.concatenate([ids[:kept], [EOS] * eos]).astype(np.int32)[:limit]


# Random bits shuffle chunks, choose the removed spans, and shuffle packed rows. The keys
# of these three uses begin with different numbers, so that no bits are used twice.
ORDER, NOISE, PACKING = 1, 2, 3


class Examples:
    """Make the examples of one task, for training or for evaluation.

    Each chunk of text becomes one example in each epoch. Every epoch uses new random
    bits, so span corruption removes different spans of the chunk each time.

    corpus: a Corpus (in the lower part of this file), which stores the chunks. The method
        shard_starts returns the index of the first chunk in each shard. The method
        lengths returns the lengths of chunks, and the method chunks returns token ids.
    shuffled: whether the chunks are shuffled. Held-out splits are not shuffled.
    """

    def __init__(self, task, corpus, tokenizer, cfg, shuffled=True):
        self.task = task
        self.corpus = corpus
        self.tokenizer = tokenizer
        self.cfg = cfg
        self.shuffled = shuffled

    def locate(self, samples):
        """Return the epoch and the chunk of each sample number.

        For example, if a task has 100 chunks, then sample 250 uses a chunk in epoch 2,
        because epochs 0 and 1 take 100 samples each. `samples` and both results are
        arrays [N].

        An epoch visits the shards (files of tokens) in order. Within a shard, training
        visits the chunks in random order. Training can begin as soon as the first shard
        exists.
        """
        # Tokenize text until all these samples are in epoch 0, or until the source ends.
        # starts[-1] is the number of all chunks that are known then. If the source has
        # not ended, divmod returns epoch 0, because every sample is below starts[-1].
        starts = self.corpus.shard_starts(int(samples.max()) + 1)
        epochs, chunks = np.divmod(samples, starts[-1])
        if not self.shuffled:
            return epochs, chunks
        shards = np.searchsorted(starts, chunks, "right") - 1
        for shard in np.unique(shards):
            here = shards == shard
            start, stop = starts[shard], starts[shard + 1]
            key = ORDER, self.cfg.train.seed, epochs[here], shard
            chunks[here] = start + permute(chunks[here] - start, stop - start, *key)
        return epochs, chunks

    def sizes(self, epochs, chunks):
        """Return the lengths of inputs and targets before truncation, without EOS.

        The result is an array [2, N]. The first row is for the inputs of the N examples,
        and the second row is for the targets.
        """
        keys = random_bits(NOISE, self.cfg.train.seed, epochs, chunks)
        lengths = self.corpus.lengths(chunks)
        return self.task.objective.sizes(lengths, keys, self.tokenizer, self.cfg.data)

    def truncated_sizes(self, epochs, chunks):
        """Return the lengths of inputs and targets after truncation, including EOS.

        The result is a list of two arrays. The first array [N] is for the inputs of the N
        examples, and the second array [N] is for the targets.
        """
        sizes = []
        for size, side in zip(self.sizes(epochs, chunks), SIDES):
            limit, eos, kept = truncated_length(side, self.task, self.cfg.data)
            sizes.append(np.minimum(np.minimum(size, kept) + eos, limit))
        return sizes

    def make(self, epochs, chunks):
        """Return N examples as pairs [inputs, targets], truncated and with EOS."""
        keys = random_bits(NOISE, self.cfg.train.seed, epochs, chunks)
        pairs = self.task.objective.make(
            self.corpus.chunks(chunks), keys, self.tokenizer, self.cfg.data
        )
        return [
            [
                truncate(ids, side, self.task, self.cfg.data)
                for ids, side in zip(pair, SIDES)
            ]
            for pair in pairs
        ]


# ---- packing ---------------------------------------------------------------------------


def pack(sizes, limits):
    """Pack N examples into few rows, and return the row of each example.

    For example, examples of 3, 5, 6 and 2 tokens fill two rows of 8 tokens. Row 0 takes
    6 + 2 tokens, and row 1 takes 5 + 3 tokens, so the result is [1, 1, 0, 0]. Each row
    repeatedly takes the example that leaves the least room, until no example fits. This
    algorithm is called best-fit bin packing. An example fits only if its inputs and its
    targets fit. The result is an array [N].

    sizes: an array [2, N] with the numbers of input tokens and target tokens.
    limits: the maximum numbers of input tokens and target tokens in a row.
    """
    limits = np.array(limits)
    # Group the examples by their numbers of input and target tokens. Each such group is
    # called a kind. Searching a few kinds is faster than searching all examples. The
    # kinds are sorted by their number of input tokens.
    kinds, kind_of = np.unique(sizes, axis=1, return_inverse=True)
    waiting = [[] for _ in kinds[0]]  # the examples of each kind that are not packed yet
    for example, kind in enumerate(kind_of.ravel().tolist()):
        waiting[kind].append(example)
    # The kinds are sorted, so the first fitting[n] kinds have at most n input tokens.
    fitting = np.searchsorted(kinds[0], np.arange(limits[0] + 1), "right")
    # The number of target tokens of each kind. When the last example of a kind is packed,
    # this number is set above the limit, so that the kind never fits again.
    targets = kinds[1].copy()

    # Measure room as a fraction of an average row. Otherwise the inputs, which are often
    # longer than the targets, would count more. In an average row, all tokens are spread
    # evenly over the smallest possible number of rows.
    load = sizes.sum(1) / limits  # how many rows all inputs fill, and all targets
    average = limits * load / load.max()  # mean numbers of tokens in a row
    input_room, target_room = (kinds / average[:, None]).astype(np.float32)

    rows = np.zeros(sizes.shape[1], int)
    row = -1
    left = len(rows)  # the number of examples that are not in a row yet
    while left:
        row += 1
        room = limits.copy()
        while fit := fitting[room[0]]:
            # The room in this row for inputs (a) and for targets (b), as a fraction of an
            # average row. In an empty row, a and b are 1.
            a, b = (1 - (limits - room) / average).astype(np.float32)
            # For each kind, compute the room that is left after adding such an example.
            a, b = a - input_room[:fit], b - target_room[:fit]
            # Choose the kind that leaves the least room. The term |a - b| / 2 is a
            # penalty for rows in which only the inputs or only the targets fill up.
            remaining = a + b + np.abs(a - b) / 2
            remaining = np.where(targets[:fit] > room[1], np.inf, remaining)
            best = remaining.argmin()
            if remaining[best] == np.inf:
                break
            rows[waiting[best].pop()] = row
            left -= 1
            room = room - kinds[:, best]
            if not waiting[best]:
                targets[best] = limits[1] + 1
    return rows


def fill_rows(examples, rows, count, limits):
    """Write examples one after the other into the rows of a Batch, and return the Batch.

    For example, the inputs [5, 9, 1] and [4, 1] become the row [5, 9, 1, 4, 1, 0, 0, 0],
    if both examples are in this row. The input segments are [1, 1, 1, 2, 2, 0, 0, 0].

    examples: a list of N pairs of arrays (inputs, targets).
    rows: an array [N] with the row of each example.
    count: the number of rows in the Batch.
    limits: the maximum numbers of input tokens and target tokens in a row.
    """
    sides = []
    for side, limit in enumerate(limits):
        tokens = np.zeros((count, limit), np.int32)
        segments = np.zeros((count, limit), np.int32)
        used = [0] * count  # the number of tokens in each row so far
        segment = [0] * count  # the number of examples in each row so far
        for row, pair in zip(rows.tolist(), examples):
            start = used[row]
            used[row] += len(pair[side])
            segment[row] += 1  # the first example of a row is segment 1
            tokens[row, start : used[row]] = pair[side]
            segments[row, start : used[row]] = segment[row]
        sides.append((tokens, segments))
    (inputs, input_segments), (targets, target_segments) = sides
    return complete_batch(inputs, targets, input_segments, target_segments)


def complete_batch(inputs, targets, input_segments, target_segments):
    """Compute the decoder inputs from the targets, and return the complete Batch.

    The decoder inputs are the targets of each example, shifted right by one position,
    with token 0 in front. For example, the targets [7, 1, 8, 6, 1] of two examples give
    the decoder inputs [0, 7, 0, 8, 6].
    """
    input_segments = input_segments.astype(np.int32)
    target_segments = target_segments.astype(np.int32)
    decoder_inputs = np.zeros_like(targets)
    decoder_inputs[:, 1:] = targets[:, :-1]  # shift right by one position
    # The shift has moved the EOS of each example to the start of the next example. There,
    # replace EOS by token 0 (PAD), which is the start token of the decoder.
    starts = target_segments[:, 1:] != target_segments[:, :-1]
    decoder_inputs[:, 1:][starts] = PAD
    return Batch(inputs, input_segments, decoder_inputs, targets, target_segments)


# ---- random numbers without state, and the order of samples ----------------------------


def random_bits(*key):
    """Return 64 random bits (uint64) for a key. Equal keys always give equal bits.

    A key is one or more integers, as in random_bits(seed, 7). Arrays of integers work,
    too. For example, random_bits(seed, np.arange(5)) returns an array with 64 random bits
    for each of 5 keys.

    The function XORs the first integer of the key into the bits, then mixes the bits, and
    goes on with the next integer. After mixing, every new bit depends on every old bit.
    The bits are mixed as in SplitMix64, a random number generator by Steele, Lea and
    Flood (2014).
    """
    bits = np.zeros((), np.uint64)
    with np.errstate(over="ignore"):  # no warning: SplitMix64 computes modulo 2^64
        for part in key:
            part = np.asarray(part).astype(np.uint64)
            bits = (bits + 0x9E3779B97F4A7C15) ^ part
            bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9
            bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB
            bits = bits ^ (bits >> 31)
    return bits


def permute(index, size, *key):
    """Apply a random permutation of range(size) to each integer of an array.

    For example, permute(np.arange(5), 5, 1) returns [3, 2, 1, 0, 4]. The last argument is
    the key that selects the permutation. Only the given integers are permuted, and the
    permutation is never stored, so `size` may be large. `index` and the result are arrays
    [N]. The key consists of integers or arrays [N].

    The algorithm is a Feistel network, which permutes all numbers below a power of four.
    The network splits the bits of a number into two halves. In each of four rounds, one
    half is XORed with random bits that depend on the other half. Every round can be
    undone, so no two numbers get the same result.
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1  # selects the lower half of a number's bits
    out = index.astype(np.uint64)
    key = np.broadcast_to(random_bits(*key), out.shape)
    # Cycle walking: a result outside range(size) is permuted again until it is inside.
    outside = np.arange(out.size)
    while outside.size:
        left, right = out[outside] >> half_bits, out[outside] & mask
        for number in range(4):
            mixed = left ^ (random_bits(key[outside], number, right) & mask)
            left, right = right, mixed
        out[outside] = left << half_bits | right
        outside = outside[out[outside] >= size]
    return out.astype(np.int64)


# ---- the batch of a step ---------------------------------------------------------------

BLOCK_SAMPLES = 1 << 14  # how many samples, of all tasks together, are packed at once


class TrainingPlan:
    """Decide which training examples are in which row of which batch.

    Rows are numbered through all steps. With 64 rows in a batch, for example, step 0 has
    the rows 0 to 63, and step 1 has the rows 64 to 127. Examples are packed into rows in
    blocks of about 16,384 examples. After packing, the rows of a block are shuffled.

    tasks: a list with the Examples object of each task.
    rates: a list with a positive number for each task. A task with rate 2 gets twice as
        many samples in a block as a task with rate 1.
    path: the file that stores the number of the first row in each block. A resumed run
        reads the file and does not pack the earlier blocks again.
    """

    def __init__(self, tasks, rates, cfg, path):
        self.tasks = tasks
        self.cfg = cfg
        self.rates = np.array(rates) / sum(rates)
        self.packs = cfg.data.pack and any(
            examples.task.objective.packs for examples in tasks
        )
        self.path = path
        # The first row of block b has the number row_starts[b]. Block 0 starts with row
        # 0. If an earlier run has saved a longer list, read this list.
        self.row_starts = [0]
        with contextlib.suppress(UserError):  # ignore a missing or damaged file
            self.row_starts = configs.read_checked(path, {"starts": [int]})["starts"]
        thread = ThreadPoolExecutor(1)
        # Calling future(block) starts plan_block(block) in a background thread. The cache
        # keeps the results for three blocks.
        self.future = functools.lru_cache(3)(
            lambda block: thread.submit(self.plan_block, block)
        )

    def samples(self, row_number):
        """Return which samples are in a row, as two arrays: tasks and sample numbers.

        For example, the arrays [0, 2] and [57, 8] mean sample 57 of task 0 and sample 8
        of task 2.
        """
        self.extend_row_starts(row_number)
        block = bisect.bisect_right(self.row_starts, row_number) - 1
        task, sample, edges = self.prefetch(block)
        row = row_number - self.row_starts[block]
        here = slice(edges[row], edges[row + 1])
        return task[here], sample[here]

    def extend_row_starts(self, row_number):
        """Find where more blocks begin, until the block with the given row is known."""
        while self.row_starts[-1] <= row_number:
            block = len(self.row_starts) - 1
            if self.packs:
                _, _, edges = self.prefetch(block)
                self.row_starts.append(self.row_starts[-1] + len(edges) - 1)
                configs.write_checked(self.path, {"starts": self.row_starts})
            else:  # without packing, every row holds one sample
                self.row_starts.append(int(sum(self.samples_before(block + 1))))

    def prefetch(self, block):
        """Return plan_block(block), and plan the next block in the background."""
        planned = self.future(block)
        self.future(block + 1)
        return planned.result()

    def plan_block(self, block):
        """Pack the samples of a block into rows, and return three arrays.

        The arrays are `task`, `sample` and `edges`. The i-th sample of the block is
        sample number sample[i] of the task with index task[i]. Row r holds the samples
        from i = edges[r] to i = edges[r + 1] - 1. For example, edges [0, 2, 5] mean that
        row 0 holds two samples and row 1 holds three samples.
        """
        first = self.samples_before(block)
        # The number of samples of each task in this block.
        count = self.samples_before(block + 1) - first
        task = np.repeat(np.arange(len(count)), count)
        number = np.concatenate([np.arange(n) for n in count])  # 0, 1, ... in each task
        # Spread the samples of each task evenly over the block. For example, 4 samples of
        # task 0 and 2 samples of task 1 have the order 0, 1, 0, 0, 1, 0.
        order = np.argsort((number + 0.5) / count[task], kind="stable")
        task, number = task[order], number[order]
        sample = first[task] + number
        if not self.packs:
            return task, sample, np.arange(len(task) + 1)
        sizes = np.zeros((2, len(task)), int)
        for k in np.unique(task):
            here = task == k
            examples = self.tasks[k]
            sizes[:, here] = examples.truncated_sizes(*examples.locate(sample[here]))
        row = pack(sizes, (self.cfg.data.inputs_length, self.cfg.data.targets_length))
        # Shuffle the rows, because packing puts examples of similar lengths into
        # neighboring rows.
        row = permute(row, int(row.max()) + 1, PACKING, self.cfg.train.seed, block)
        order = np.argsort(row, kind="stable")
        edges = np.append(0, np.cumsum(np.bincount(row)))
        return task[order], sample[order], edges

    def samples_before(self, block):
        """Return how many samples of each task are used before the given block."""
        # Add a different fraction for each task before rounding down. Otherwise, tasks
        # with the same low rate would all get their next sample in the same block.
        phase = (np.arange(len(self.rates)) + 0.5) / len(self.rates)
        return np.floor(self.rates * block * BLOCK_SAMPLES + phase).astype(int)


def make_batch(step, tasks, plan, cfg, rows=None):
    """Return the Batch of a step, or only the given rows of this Batch.

    Equal arguments always give an equal Batch, so a resumed run continues with the right
    batches. The first step is step 0.

    tasks: a list with the Examples object of each task.
    plan: an object that assigns examples to rows. Training uses a TrainingPlan, and a
        held-out split uses a HeldOutPlan (in the lower part of this file).
    rows: the indices of the rows to make, by default all rows. With several processes,
        each process makes only the rows of its own devices.
    """
    batch_size = cfg.train.batch_size
    rows = range(batch_size) if rows is None else rows
    members = [plan.samples(step * batch_size + int(row)) for row in rows]
    row = np.repeat(np.arange(len(rows)), [len(task) for task, _ in members])
    task, sample = [np.concatenate(arrays) for arrays in zip(*members)]
    examples = [None] * len(row)
    for k in np.unique(task):
        here = np.flatnonzero(task == k)
        pairs = tasks[k].make(*tasks[k].locate(sample[here]))
        for i, pair in zip(here.tolist(), pairs):
            examples[i] = pair
    limits = cfg.data.inputs_length, cfg.data.targets_length
    return fill_rows(examples, row, len(rows), limits)


# ====== below: vocabularies, sources, tasks, mixtures, token files, evaluation, command =


# ---- vocabularies ----------------------------------------------------------------------


class ByteTokenizer(Tokenizer):
    """Encode text as its UTF-8 bytes, as in ByT5 (Xue et al. 2022).

    The token id of a byte is its value plus 3. The ids 0, 1 and 2 are padding, EOS and
    UNK.

    extra_ids: the number of sentinel ids that are added after the ids of the bytes. If
    extra_ids is 0, the ids of the 11 highest bytes serve as sentinels, as in the
    published ByT5 models.
    """

    def __init__(self, extra_ids=0):
        # UTF-8 never uses the 11 byte values from 245 to 255. So the ids of these bytes
        # can serve as sentinels.
        sentinels = extra_ids or 11
        super().__init__(f"bytes:{extra_ids}\n".encode(), 3 + 256 + extra_ids, sentinels)

    def encode(self, text):
        return self.encode_batch([text])[0].tolist()

    def encode_batch(self, texts):
        encoded = []
        for text in texts:
            # The list from re.split alternates between text and the number of a sentinel.
            parts = re.split(r"<extra_id_(\d\d?)>", text)
            arrays = [np.frombuffer(part.encode(), np.uint8) + 3 for part in parts]
            arrays[1::2] = [[self.size - 1 - int(number)] for number in parts[1::2]]
            encoded.append(np.concatenate(arrays, dtype=np.int32))
        return encoded

    def raw_text(self, ids):
        """Return the text of token ids, with the special tokens written out.

        Sentinels appear as "<extra_id_0>", for example. The ids 0, 1 and 2 appear as
        "<pad>", "</s>" and "<unk>". Bytes that are not valid UTF-8 are left out.
        """
        symbols = {PAD: b"<pad>", EOS: b"</s>", UNK: b"<unk>"}
        for number in range(self.size - 3 - 256):
            symbols[self.size - 1 - number] = b"<extra_id_%d>" % number
        text = b"".join(symbols.get(i) or bytes([i - 3]) for i in ids)
        return text.decode(errors="ignore")

    def decode(self, ids):
        """Return the text of the token ids before the first EOS.

        Special tokens and invalid UTF-8 are left out.
        """
        ids = itertools.takewhile(lambda i: i != EOS, map(int, ids))
        return self.raw_text(i for i in ids if 3 <= i < 3 + 256)


class IdTokenizer(Tokenizer):
    """Encode text that consists of token ids in decimal digits, such as "17 4 29".

    This tokenizer serves the generated data sources `reverse:` and `random:`. The
    examples of these two sources are lists of token ids.

    size: the number of token ids. sentinels: how many of the highest ids are sentinels.
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
        """Return the token ids before the first EOS as text, without the padding."""
        ids = itertools.takewhile(lambda i: i != EOS, ids)
        return " ".join(str(i) for i in ids if i != PAD)


def add_sentinels(model, number):
    """Append sentinel pieces to the vocabulary of a SentencePiece ModelProto.

    The last piece is <extra_id_0>, as in T5. number: the number of sentinels.
    """
    for k in reversed(range(number)):
        model.pieces.add(piece=f"▁<extra_id_{k}>", score=0.0, type="USER_DEFINED")


# A mixture may have hundreds of tasks that share a vocabulary.
@functools.lru_cache(maxsize=4)
def parse_vocabulary(serialized, name="the vocabulary"):
    """Return the Tokenizer of a serialized SentencePiece model.

    If the model has no sentinels, 100 sentinels are added.

    serialized: the bytes of a SentencePiece model file. name: the name of the file in
    error messages. The function raises UserError if the bytes are not a SentencePiece
    model. The function also raises UserError if the ids 0, 1 and 2 are not <pad>, </s>
    and <unk>.
    """
    try:
        model = sentencepiece_model_pb2.ModelProto.FromString(serialized)
        if not model.pieces[-1].piece.endswith("<extra_id_0>"):
            add_sentinels(model, SENTINELS)
        processor = sentencepiece.SentencePieceProcessor(
            model_proto=model.SerializeToString(), num_threads=os.cpu_count()
        )
    # Protobuf raises a DecodeError, whose module differs between versions.
    # SentencePiece raises a RuntimeError.
    except Exception as error:
        raise UserError(
            f"{name} is not a SentencePiece model, or is damaged ({error}): give "
            f"--data.vocab another file."
        ) from error
    special = [piece.piece for piece in model.pieces[:3]]
    if special != ["<pad>", "</s>", "<unk>"]:
        raise UserError(
            f"{name} begins with the pieces {special}, but T5 needs <pad>, </s>, <unk> "
            f"as ids 0, 1, 2: train it with pad_id=0, eos_id=1, unk_id=2, bos_id=-1."
        )
    sentinels = sum("<extra_id_" in piece.piece for piece in model.pieces)
    return Tokenizer(serialized, len(model.pieces), sentinels, processor)


def load_tokenizer(path):
    """Return the Tokenizer for a value of the flag --data.vocab.

    path: the local or remote path of a SentencePiece model, or the name of a built-in
    tokenizer. The valid names are "bytes", "bytes:EXTRA_IDS", "ids:SIZE" and
    "ids:SIZE:SENTINELS". The function raises UserError if the file cannot be read.
    """
    path = str(path)
    # A run stores its vocabulary in a file. For a built-in tokenizer, the file contains
    # only the name of the tokenizer, such as "bytes:100".
    is_name = re.compile(rb"(bytes|ids:\d{1,9})(:\d{1,9})?\s*").fullmatch
    serialized = path.encode()
    if not is_name(serialized):
        try:
            with open_file(path) as file:
                serialized = file.read()
        except (OSError, ValueError) as error:
            raise UserError(
                f"There is no vocabulary at {path} "
                f"({getattr(error, 'strerror', 0) or error}): give --data.vocab the path "
                f"of a SentencePiece model, or train a vocabulary on the source with "
                f"--data.vocab train:32000."
            ) from error
    if is_name(serialized):
        kind = ByteTokenizer if serialized.startswith(b"bytes") else IdTokenizer
        return kind(*map(int, re.findall(rb"\d+", serialized)))
    return parse_vocabulary(serialized, path)


def train_tokenizer(texts, pieces, max_characters=1 << 27):
    """Train a SentencePiece unigram model on texts and return its Tokenizer.

    texts: an iterable of strings. pieces: the size of the vocabulary without its
    sentinels. max_characters: the number of characters after which reading stops.
    Training on the default number of characters takes one or two minutes. The function
    raises UserError if the texts are too short for a vocabulary of this size.
    """
    lines = []
    with progress_bar("reading for a vocabulary", "character") as bar:
        for text in texts:
            # SentencePiece skips lines of more than 16,000 bytes. So longer lines are cut
            # into lines of at most 4,000 characters, which have at most 16,000 bytes.
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
        bounds = re.findall(r"<= (\d+)", str(error)) or ["N"]
        raise UserError(
            f"The source has too little text for {pieces} pieces: add text, or set "
            f"--data.vocab train:{bounds[0]} or fewer."
        ) from error
    return parse_vocabulary(model.getvalue())


def progress_bar(what, unit, total=None):
    """Return a progress bar that prints to standard error.

    On a terminal, the bar appears after half a second. In a log file, the bar prints a
    line every 30 seconds. Background threads print no bar. With several processes, only
    the main process prints a bar.

    what: the title of the bar.
    unit: the noun, in the singular, for the counted objects.
    total: the final count, if known.
    """
    in_background = threading.current_thread() is not threading.main_thread()
    on_terminal = sys.stderr.isatty()
    seconds = 0.5 if on_terminal else 30
    return tqdm(
        desc=what,
        unit=f" {unit}s",
        unit_scale=True,
        total=total,
        leave=False,
        delay=seconds,
        mininterval=seconds,
        bar_format=None if on_terminal else "{l_bar}{r_bar}\n",
        disable=in_background or not configs.prints_progress,
    )


# ---- sources ---------------------------------------------------------------------------
# A source is written KIND:NAME, for example text:books/*.txt. SOURCES maps each kind to a
# function (name, split, cfg, whole) that opens the source. The function returns a list of
# SourceFiles. A SourceFile is a part of the source that is read from beginning to end.
#
# - split is the name of a split, such as "train" or "validation".
# - A source without splits is divided into a training and a validation part. If `whole`
#   is true, such a source is not divided.
# - SourceFile.read(bad) yields pairs (where, example). `example` is a dict of fields.
#   `where` is the place of the example for messages, such as "books/a.txt:3".
# - If an example cannot be read, the reader calls bad(where, what), such as
#   bad("a.jsonl:3", "is not JSON"). With --data.on_error stop, this call raises a
#   UserError. With --data.on_error skip, this call counts the example and returns. Then
#   the reader continues with the next example.
# - A path may be remote, such as gs://bucket/*.gz. The library fsspec opens remote paths.


class SourceFile(NamedTuple):
    """A part of a data source that is read from beginning to end.

    The part is a file, a group of small files, or a range of records.
    """

    name: str
    stamp: list  # sizes and times of the files; if they change, the source has changed
    read: Callable  # read(bad) yields (where, example) and reports problems to `bad`


class MissingSplit(UserError):
    """The error that a data source has splits, but not the requested split."""


class MissingSource(UserError):
    """The error that a data source does not exist.

    The exception has two arguments. The first describes the problem. The second says how
    to solve the problem.
    """

    def __str__(self):
        return ": ".join(self.args)


@functools.cache
def python_documents():
    """Return the texts that come with Python as a list of documents.

    There is one document for each file of the standard library, which consists of the
    docstrings of the file. There is also one document for each topic of the language
    manual (pydoc_data/topics.py). The files of the library are parsed by `ast` and not
    imported.
    """
    from pydoc_data.topics import topics  # a dict of texts, and nothing else

    library = Path(os.__file__).parent
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    documents = []
    for path in sorted(library.rglob("*.py")):
        if left_out & set(path.relative_to(library).parts):
            continue
        if path.match("pydoc_data/topics.py"):
            documents += topics.values()
        nodes = ast.walk(ast.parse(path.read_bytes()))
        docstrings = [ast.get_docstring(x) for x in nodes if isinstance(x, documented)]
        documents.append("\n\n".join(filter(None, docstrings)))
    return [document for document in documents if document.strip()]


def generated_source(name, stamp, examples, splits):
    """Return a SourceFile for each split of a data source that a function generates.

    name: the name of the data source in messages. stamp: a value that changes if the
    examples change. examples: a function that takes the name of a split and yields the
    examples of the split as dicts. splits: the names of the splits.
    """

    def read(split, bad):
        for number, example in enumerate(examples(split)):
            yield f"{name} {split} {number}", example

    return [
        SourceFile(f"{name} {split}", stamp, functools.partial(read, split))
        for split in splits
    ]


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
    """Return the example for a number, as a dict of fields.

    The fields are the number, its name in words, whether the number is even, and a date
    in two notations. The date is n days after January 1, 1970. The tasks `by_rule_*` use
    these fields.

    n: a number below one million.
    """
    day = time.gmtime(86_400 * n)
    return {
        "number": n,
        "words": spell_number(n),
        "label": int(n % 2 == 0),  # 1 if the number is even
        "date": time.strftime("%Y-%m-%d", day),
        "day": f"{day.tm_mday} {time.strftime('%B %Y', day)}",
    }


def python_source(name, split, cfg, whole):
    """Open the data source `python:` or `python:COUNT`. Neither reads data files.

    With `python:`, the examples are the texts that come with Python. With `python:COUNT`,
    the examples are the numbers below COUNT. Each example of a number contains the number
    in words and a date. The examples are shuffled. The first 1 % of the examples is the
    validation split, and the rest is the training split.
    """
    if name and not re.fullmatch(r"[1-9]\d{1,5}", name):
        raise UserError(
            f"python:{name} is not a source: write python: for the texts that come with "
            f"Python, or python:COUNT for the numbers below COUNT (10 to 999999)."
        )

    def examples(split):
        documents = range(int(name)) if name else python_documents()
        order = permute(np.arange(len(documents)), len(documents), 6).tolist()
        held_out = max(1, len(documents) // 100)
        for n in order[:held_out] if split == "validation" else order[held_out:]:
            yield number_example(n) if name else {"text": documents[n]}

    splits = ("train", "validation") if whole else (split,)
    return generated_source(f"python:{name}", [sys.version], examples, splits)


def reverse_source(name, split, cfg, whole):
    """Open the data source `reverse:`, whose task is to reverse a sequence.

    The inputs are 4 to 12 random token ids, and the targets are the same ids in reverse
    order.
    """

    def examples(split):
        seed, count = {"train": (0, 20_000), "validation": (1, 512)}[split]
        for i in range(count):
            random = np.random.default_rng([seed, i])
            ids = random.integers(3, 35, random.integers(4, 13)).tolist()
            yield {"inputs": [*ids, EOS], "targets": [*ids[::-1], EOS]}

    return generated_source("reverse:", [1], examples, [split])


def random_source(name, split, cfg, whole):
    """Open the data source `random:`, which generates random tokens for benchmarks.

    Each document has 4096 random token ids. The training split is endless.
    """
    size = cfg.model.vocab_size - SENTINELS - 3

    def examples(split):
        seed = 0 if split == "train" else 1
        for i in itertools.count() if split == "train" else range(64):
            ids = random_bits(seed, i, np.arange(4096)) % np.uint64(size)
            yield {"text": ids.astype(int) + 3}

    return generated_source("random:", [size], examples, [split])


def open_file(path):
    """Open a local or remote file to read bytes."""
    if "://" not in path:
        return open(path, "rb")
    import fsspec  # imported here because the import takes 0.1 s

    return fsspec.open(path, "rb").open()


def find_files(pattern):
    """Return the files that match a glob pattern, sorted by path.

    The result is a list of pairs (path, [size, time]). pattern: a local or remote glob
    pattern. The function raises UserError if a remote file system cannot be read.
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
            # Remote file systems use different names for the time or version of a file.
            times = [info.get(key) for key in ("etag", "mtime", "updated", "created")]
            found.append((system.unstrip_protocol(path), [info["size"], str(times)]))
    return sorted(found)


GROUP_BYTES = 1 << 26  # files are grouped until a group has at least this size
HELD_OUT_BYTES = 1 << 25  # the held-out beginning of a source has at most this size


def group_files(files, read):
    """Group small files and return a list with a SourceFile for each group.

    A file is added to the last group until the group has GROUP_BYTES bytes. If reading a
    file raises an exception, the file is reported as damaged, and reading continues with
    the next file.

    files: a list of pairs (path, [size, time]). read: a function of a path and a function
    `bad`. `read` yields a pair (where, example) for each example of the file, and reports
    invalid examples to `bad`.
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
            # The exception for a damaged file depends on the library that reads the file.
            except Exception as error:
                # An error number means that the disk has failed, except in errors that
                # come from pyarrow.
                disk_failed = read is not read_parquet and getattr(error, "errno", None)
                if isinstance(error, UserError) or disk_failed:
                    raise
                bad(path, f"is damaged ({error})")

    return [
        SourceFile(group[0][0], group, functools.partial(read_group, group))
        for group in groups
    ]


def file_source(read, pattern, split, cfg, whole):
    """Open the files that match a glob pattern as a data source.

    The files are read in alphabetical order. If the pattern contains "{split}", the name
    of the split is filled in. Otherwise, the first 1 % of the text is held out for
    validation, and the rest is for training. At least one example is held out. The
    held-out text is one stretch, so only the end of this stretch is close to training
    text.

    read: a function that yields the examples of one file. pattern: the glob pattern.
    split: the name of the split. cfg: the Config. whole: whether all text is read, so
    that nothing is held out.
    """
    found = find_files(pattern.replace("{split}", split))
    if not found:
        if find_files(pattern.replace("{split}", "*")):
            raise MissingSplit(f"No file matches {pattern} with the split {split}.")
        folder = pattern.rstrip("/") if os.path.isdir(pattern) else "FOLDER"
        raise MissingSource(
            f"No file matches {pattern.replace('{split}', split)}",
            f"give --data.source the path of a file, or a quoted glob, such as "
            f"'{folder}/*'.",
        )
    files = group_files(found, read)
    if whole or "{split}" in pattern:
        return files
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
    """Yield a pair (line number, line) for each line of a text file.

    A file whose name ends in .gz is decompressed. A line that is not valid UTF-8 is
    skipped and reported to the function `bad`.
    """
    with open_file(path) as raw:
        file = gzip.open(raw) if path.endswith(".gz") else raw
        for number, line in enumerate(file, 1):
            try:
                yield number, line.decode()
            except UnicodeDecodeError:
                bad(f"{path}:{number}", "is not UTF-8")


def text_source(name, split, cfg, whole):
    """Open the data source `text:GLOB` or `text:GLOB:lines`, which reads text files.

    With `text:GLOB`, each file is a document. With `text:GLOB:lines`, each line is a
    document. Blank documents are left out. Files whose names end in .gz are decompressed.
    The examples have only the field `text`.
    """
    pattern = name.removesuffix(":lines")

    def read(path, bad):
        lines = read_lines(path, bad)
        if pattern == name:
            lines = [(1, "".join(line for _, line in lines))]
        for number, text in lines:
            if text.strip():
                yield f"{path}:{number}", {"text": text}

    return file_source(read, pattern, split, cfg, whole)


def read_jsonl(path, bad):
    """Yield the examples of a file that has one JSON object on each line.

    A file whose name ends in .gz is decompressed, because C4 is published in this form.
    Blank lines are left out. A line that is not a JSON object is skipped and reported to
    the function `bad`.
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
    """Yield the rows of a parquet file as examples.

    Each example is a dict from the name of a column to its value.
    """
    import pyarrow.parquet  # imported here because the import takes 0.2 s

    with open_file(path) as file:
        batches = pyarrow.parquet.ParquetFile(file).iter_batches(1024)
        rows = (row for batch in batches for row in batch.to_pylist())
        for number, row in enumerate(rows):
            yield f"{path} row {number}", row


def decode_bytes(value):
    """Decode all bytes in an example of TensorFlow Datasets (TFDS) as UTF-8.

    value: an example, or a value inside an example. Dicts and lists are decoded
    recursively.
    """
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, dict):
        return {key: decode_bytes(inner) for key, inner in value.items()}
    if isinstance(value, list) or getattr(value, "dtype", None) == object:
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
    """Return the folder of a TensorFlow Datasets (TFDS) dataset.

    name: the name of the dataset in the form NAME or NAME:VERSION, or the path of its
    folder. Without a version, the newest version is used. The function raises
    MissingSource if the folder does not exist.
    """
    from etils import epath  # epath reads local and remote folders alike

    home = cfg.data.tfds_dir or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
    # The version is the name of a folder. The colon of gs:// does not begin a version.
    folder = epath.Path(home).expanduser() / re.sub(":(?!//)", "/", name)
    # Either the folder itself is a version, or each subfolder is a version.
    infos = [*folder.glob("dataset_info.json")] or [*folder.glob("*/dataset_info.json")]
    if infos:
        # Compare the numbers, because version 1.10.0 is newer than version 1.9.0.
        folders = [info.parent for info in infos]
        return max(folders, key=lambda path: [*map(int, re.findall(r"\d+", path.name))])
    problem = f"{name} is not in {folder}"
    others = [info.parent.name for info in folder.parent.glob("*/dataset_info.json")]
    if others:
        problem += (
            f" (there is {', '.join(others)}; write --data.source tfds:NAME:VERSION)"
        )
    raise MissingSource(problem, TFDS_REMEDY)


def tfds_source(name, split, cfg, whole):
    """Open a TensorFlow Datasets (TFDS) dataset that is stored on disk.

    The dataset is never downloaded. The dataset must be stored as array_record files,
    because these files can be read without TensorFlow. Examples that are missing, damaged
    or not UTF-8 are skipped and reported as invalid. Each SourceFile is a range of
    examples.

    name: the name of the dataset, as NAME[/CONFIG][:VERSION], or the path of its folder.
    """
    folder = find_tfds(name, cfg)
    import tensorflow_datasets as tfds  # imported here because the import takes 0.5 s

    try:
        builder = tfds.builder_from_directory(folder)
        info = builder.info
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
        examples = builder.as_data_source(split)
        for number in range(count)[start : start + TFDS_RANGE]:
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


def hf_source(name, split, cfg, whole):
    """Open a dataset of the Hugging Face hub as a data source.

    The examples are streamed. Each shard of the dataset becomes a SourceFile. The
    function raises UserError if the library `datasets` is not installed or cannot open
    the dataset.

    name: the name of the dataset, as NAME or NAME:CONFIG, or the path of a local folder.
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

    In the file, 8 bytes give the length of the next record, and 4 bytes are the checksum
    of this length. Then the record follows, and the last 4 bytes are the checksum of the
    record.
    """
    with open_file(path) as file:
        while header := file.read(12):
            size = int.from_bytes(header[:8], "little")
            record = file.read(min(size, 1 << 31) + 4)
            if len(header) < 12 or len(record) != size + 4:
                raise EOFError("it is cut off")
            yield record[:-4]


def read_seqio(features, path, bad):
    """Yield the examples of a tfrecord file that SeqIO has cached.

    A damaged record is skipped and reported to the function `bad`.

    features: a dict from the name of a field to a dict with the shape of the field, as in
    the info file of the cache. A field with the shape [] holds a single value. Every
    other field holds an array of ids or a list of texts. path: the path of the file.
    """
    from tensorflow_datasets.proto import tf_example_generated_pb2

    for number, record in enumerate(read_tfrecords(path)):
        where = f"{path} record {number}"
        example = {}
        try:
            stored = tf_example_generated_pb2.Example.FromString(record)
            for key, feature in stored.features.feature.items():
                values = [value.decode() for value in feature.bytes_list.value]
                if not values:
                    numbers = [*feature.int64_list.value, *feature.float_list.value]
                    values = np.array(numbers)
                scalar = features.get(key, {}).get("shape") == []
                example[key] = values[0] if scalar else values
        except Exception as error:  # of protobuf, of bytes.decode, or an IndexError
            bad(where, f"is damaged ({error})")
        else:
            yield where, example


def seqio_source(name, split, cfg, whole):
    """Open a task that SeqIO has cached in a folder as a data source.

    The dataset P3 is published as such folders. A folder must contain info.SPLIT.json,
    the file COMPLETED and all tfrecord files of the split. Otherwise, the function raises
    MissingSource, MissingSplit or UserError.

    name: the path of the folder, or a glob pattern for several folders.
    """
    infos = find_files(f"{name}/info.{split}.json")
    if not infos:
        problem = f"{name} has no info.{split}.json"
        others = [path for path, _ in find_files(f"{name}/info.*.json")]
        if others:
            raise MissingSplit(f"{problem} (there is {', '.join(others)}).")
        raise MissingSource(problem, "name a folder that SeqIO has cached.")
    files = []
    for path, _ in infos:
        folder = os.path.dirname(path)
        form = {"features": {str: {"shape?": list}}, "num_shards": int}
        info = configs.read_json(configs.to_path(path), form)
        shards = find_files(f"{glob.escape(folder)}/{split}.tfrecord-*-of-*")
        if not find_files(f"{folder}/COMPLETED"):
            raise UserError(
                f"{folder} has no file COMPLETED, so SeqIO did not finish this cache: "
                f"cache the task again, or copy the complete folder."
            )
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
OWN_SPLITS = ("tfds", "hf", "seqio")  # kinds of sources whose splits have any names


def open_source(source, split, cfg, whole=False):
    """Open a data source and return the SourceFiles of a split.

    source: the data source in the form KIND:NAME, such as "jsonl:data.jsonl". split: the
    name of the split. cfg: the Config. whole: whether all text is read for a source
    without splits, so that nothing is held out. The function raises UserError if the
    source is invalid. The function raises MissingSplit or MissingSource if there is no
    such split or source.
    """
    kind, _, name = source.partition(":")
    if kind not in SOURCES:
        kinds = ":, ".join(SOURCES)
        raise UserError(
            f"{source!r} is not a source: give --data.source a name such as jsonl:FILE. "
            f"It begins with one of {kinds}:."
        )
    has_splits = kind in OWN_SPLITS or "{split}" in name
    if not has_splits and split not in ("train", "validation"):
        raise MissingSplit(f"{source} has no {split} split.")
    return SOURCES[kind](name, split, cfg, whole)


class InvalidExamples:
    """Report an example that cannot be used: stop the program or count the example.

    With --data.on_error stop, the first call raises UserError. With --data.on_error skip,
    the calls are counted.

    where: the place of the example, such as "a.jsonl:3". what: the problem as the end of
    a sentence, such as "is not JSON".
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
    """The prefix language modeling objective, as prefix_lm in the t5 library.

    A text is cut in two at a random place. The model reads the first part as inputs and
    learns to predict the second part as targets.
    """

    def length(self, data):
        return data.inputs_length - 1

    def make(self, chunks, keys, tokenizer, data):
        # Cut before the last token at the latest, so that the targets are not empty.
        longest = np.array([len(ids) - 1 for (ids,) in chunks], int)
        random = (keys >> np.uint64(32)).astype(int)  # from 0 to 2**32 - 1
        cuts = np.minimum(1 + (random * longest >> 32), longest).tolist()
        return [(ids[:cut], ids[cut:]) for (ids,), cut in zip(chunks, cuts)]


# T5 solves every task as text to text (Raffel et al. 2020, section 2.4). The inputs begin
# with the name of the task. The name of each field stands before the text of the field. A
# class is written as a word. Appendix D of the paper shows an example of each task. The
# following example comes from RTE, in which the model decides whether sentence1 implies
# sentence2:
#
#     source   {"sentence1": "A cat sleeps.", "sentence2": "A cat runs.", "label": 1}
#     inputs   rte sentence1: A cat sleeps. sentence2: A cat runs.
#     targets  not_entailment
#
# A *format* is a function that converts an example of the source to inputs and targets.
# The function returns a list of dicts, because some examples give several training
# examples. Each dict has the fields inputs and targets, and the fields that metrics need.
# The list is empty if the example is left out. The formats below give the same strings as
# t5/data/preprocessors.py.


def as_it_is(example):
    """Return a list that contains only the given example, unchanged.

    This format serves training objectives that need only the field `text`.
    """
    return [example]


def text_to_text(example):
    """Format an example that already has the fields inputs and targets.

    The two fields may be texts or lists of token ids. A SeqIO cache may hold the ids and
    also the texts, in the fields inputs_pretokenized and targets_pretokenized. In this
    case, the texts are used.
    """
    texts = {
        key: example[f"{key}_pretokenized"]
        for key in Pairs.features
        if f"{key}_pretokenized" in example
    }
    return [example | texts]


def template(inputs, targets, labels=()):
    """Return a format that fills the {field} placeholders of two templates.

    For example, template("translate English to German: {en}", "{de}") formats a
    translation task.

    inputs: the template of the inputs. targets: the template of the targets. labels: the
    words for the classes 0, 1 and so on, if the field `label` is the number of a class.
    The placeholder {label} is then replaced by the word of the class. The label -1 means
    that the dataset does not publish the label. As in the t5 library, the word for this
    label is "<unk>". If the example has the field `idx`, the formatted example keeps this
    field.
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
    """Format an example of STS-B, a task that rates the similarity of two sentences.

    The target is a number from 0 to 5 as text, such as "3.8". The similarity is rounded
    to a multiple of 0.2.
    """
    score = np.round(np.float32(example["label"]) * 5) / 5
    fill = template("stsb sentence1: {sentence1} sentence2: {sentence2}", f"{score:.1f}")
    return fill(example)


def format_multirc(example):
    """Format an example of MultiRC, in which the model judges an answer to a question.

    HTML tags are removed. The metric counts all answers to one question together. So the
    indices of the paragraph, the question and the answer are kept.
    """
    texts = {
        key: re.sub("</?b>", "", example[key].replace("<br>", " "))
        for key in ("paragraph", "question", "answer")
    }
    fill = template(
        "multirc question: {question} answer: {answer} paragraph: {paragraph}",
        "{label}",
        ("False", "True"),
    )
    (filled,) = fill(texts | {"label": example["label"]})
    indices = {f"idx/{key}": example["idx"][key] for key in texts}
    return [filled | indices]


def format_record(example):
    """Format an example of ReCoRD, in which the model fills a gap with an entity.

    The result has one formatted example for each correct answer. The bullet points of the
    passage, which are marked by @highlight, become sentences.
    """
    # If the text before a bullet point already ends a sentence, no period is added.
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
    """Format an example of the Winograd schema challenge (WSC).

    The model predicts the noun that a pronoun stands for. The inputs mark the pronoun
    with asterisks, as in "wsc: Ann lost *it* again". The targets are the noun that the
    example suggests.

    only_true: whether examples that suggest a wrong noun are left out. Training leaves
    out these examples, so that the model does not learn wrong nouns.
    """
    if only_true and not example["label"]:
        return []
    words = example["text"].split(" ")
    position = example["span2_index"]
    pronoun = example["span2_text"]
    # In one of the published examples, the index of the pronoun is too low by one. So we
    # search for the pronoun in the words from this index on.
    position += [word.startswith(pronoun) for word in words[position:]].index(True)
    before = " ".join(words[:position])
    after = " ".join(words[position:]).removeprefix(pronoun)
    # In another published example, punctuation follows the pronoun without a space.
    after = after[1:] if after.startswith(" ") else after.rstrip()
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
    """Format an example of definite pronoun resolution (DPR).

    The inputs have the same form as in the Winograd schema challenge. The first
    occurrence of the pronoun is marked with asterisks.
    """
    pattern = rf" ({example['pronoun']})( |\.|,)"
    text = re.sub(pattern, r" *\1*\2", example["sentence"], count=1)
    answer = example["candidates"][example["label"]]
    return [{"inputs": f"wsc: {text}", "targets": answer}]


def merge_spaces(text):
    """Replace each run of white space characters in a text by one space."""
    return re.sub(r"[ \t\n\f\r]+", " ", text)


def separate_punctuation(text):
    """Put spaces around each ASCII punctuation character of a text.

    Several spaces in a row are merged into one space.
    """
    return merge_spaces(re.sub(r"([!-/:-@\[-`{-~])", r" \1 ", text))


def format_squad(example):
    """Format an example of SQuAD, in which a question is answered from a context.

    The target is the first answer. The metric accepts every answer, so all answers are
    kept in the field `answers`.
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
    """A task: a data source, the format of the examples, and the metrics.

    The dict TASKS maps the name of each task to its Task. A recipe file may add tasks to
    TASKS.
    """

    source: str = ""  # the data source as KIND:NAME, as in --data.source
    # The function that turns an example of the source into a list of formatted examples.
    format: Callable = text_to_text
    # Each metric is a name in evaluate.METRICS, or a function that takes lists of targets
    # and predictions and returns a dict of numbers.
    metrics: tuple = ()
    choices: tuple = ()  # the words for the labels 0, 1, ... of a classification task
    # The function that is applied to targets and predictions before metrics compare the
    # two. The value is a name in evaluate.POSTPROCESSORS, or the function itself.
    postprocess: str | Callable = ""
    splits: tuple = ("train", "validation", "test")  # the splits that the source has
    objective: Objective = Pairs()
    inputs_eos: bool = True  # whether EOS is appended to inputs; T0 appends no EOS
    # Whether EOS is appended to targets that were cut because they are too long. T0 does
    # not append EOS to such targets.
    eos_after_trim: bool = True


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
    """Parse a list of tasks and return a dict from the name of a task to its Task.

    text: the list of tasks in the same form as CATALOGUE.
    """
    tasks = {}
    for entry in text.strip().split("\n\n"):
        first_line, inputs, targets = map(str.strip, entry.split("\n"))
        name, source, metrics, *splits = first_line.split()
        metrics, splits = re.findall(r"\w+", metrics), tuple(splits) or Task().splits
        task = Task(source, template(inputs, targets), tuple(metrics), splits=splits)
        labels = tuple(targets.split(" | "))
        if len(labels) > 1:
            fill = template(inputs, "{label}", labels)
            task = task._replace(format=fill, choices=labels, postprocess="label")
        tasks[name] = task
    return tasks


# The dicts TASKS and MIXTURES are defined in configs.py, because configs.py also loads
# recipe files, which may add tasks and mixtures.
TASKS, MIXTURES = configs.TASKS, configs.MIXTURES
TASKS |= read_catalogue(CATALOGUE)
TASKS |= {
    # The first three tasks are meant to be used with any --data.source.
    "span_corruption": Task("python:", as_it_is, objective=SpanCorruption()),
    "prefix_lm": Task("python:", as_it_is, objective=PrefixLM()),
    "text_to_text": Task(),
    "c4_v220_span_corruption": Task(
        "tfds:c4/en:2.2.0", as_it_is, objective=SpanCorruption()
    ),
    "c4_v220_prefix_lm": Task("tfds:c4/en:2.2.0", as_it_is, objective=PrefixLM()),
    # The tasks below need a function as format, because a template is not enough.
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
# is sampled with the probability rate / (sum of the rates). A task with the rate 0 is
# evaluated together with the mixture, but the model is not trained on this task. A rate
# is a number or a BySize. A mixture may also be a function that takes the Config and
# returns such a dict.


class BySize(NamedTuple):
    """A sampling rate that depends on the number of training examples of the task.

    The rate is min(examples * scale, maximum) ** (1 / temperature). The maximum keeps
    large tasks from dominating the mixture. A temperature above 1 samples small tasks
    more often. Section 3.5.2 of Raffel et al. 2020 describes these rates.
    """

    maximum: float = math.inf
    temperature: float = 1.0
    scale: float = 1.0

    def of(self, examples):
        return min(examples * self.scale, self.maximum) ** (1 / self.temperature)


# The datasets of T0 (Sanh et al. 2022). Each line has the name of a dataset, the number
# of training examples, and the groups that the dataset belongs to. The list agrees with
# t0/datasets.csv in the repository bigscience-workshop/t-zero.
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
# For each mixture of T0, the groups of datasets in T0_DATASETS that the mixture contains.
T0_MIXTURES = {
    "t0_train": "train",
    "t0+_train": "train gpt",
    "t0++_train": "train gpt super_glue",
    "t0_train_score_eval": "train",
    "t0_eval_score_eval": "eval",
    "bias_fairness_eval_score_eval": "bias",
}
T0_CAP = 500_000  # a dataset counts as at most this number of examples


def t0_mixture(name, cfg):
    """Return the sampling rates of a T0 mixture, as a dict from task to rate.

    The dataset collection P3 has a folder for each prompt template of each dataset. The
    name of a folder is DATASET_TEMPLATE, and each folder is a task. A dataset with more
    than T0_CAP examples counts as T0_CAP examples, which are divided among its templates.
    For a smaller dataset, the rate of each template is the full size of the dataset.

    A folder whose name ends in _score_eval is meant for rank classification. Mixtures
    whose names end in _score_eval consist of these folders. These mixtures are only
    evaluated, so every rate is 1.

    name: a key of T0_MIXTURES. cfg: the Config.
    """
    ending = "_score_eval"
    folders = [
        folder
        for folder in sorted(p3_sources(cfg))
        if folder.endswith(ending) == name.endswith(ending)
    ]
    if not folders:
        raise UserError(
            "T0's mixtures are made of P3 (bigscience/P3), which has a folder for each "
            "prompt: name the folder that contains these folders with --data.source "
            "seqio:DIR or --data.source parquet:DIR."
        )
    rates = {}
    for row in T0_DATASETS.strip().splitlines():
        dataset, size, *roles = row.split()
        templates = [folder for folder in folders if folder.startswith(f"{dataset}_")]
        rate = int(size)
        if name.endswith(ending):
            rate = 1
        elif rate > T0_CAP and templates:
            rate = T0_CAP // len(templates)
        if set(roles) & set(T0_MIXTURES[name].split()):
            rates |= dict.fromkeys(templates, rate)
    # The authors of T0 left out this prompt, because the published cache of the prompt is
    # broken. The prompt still counts when the rate of a dataset is divided.
    rates.pop("gigaword_summarize_", None)
    return dict(sorted(rates.items()))


# The ways in which the dataset collection P3 may be stored. For each kind of source,
# there is a dict. Each key is a glob pattern that finds the files in a folder of P3. The
# value is the text that is appended to the path of the folder to read a split. With
# parquet files, the split is part of the file name or the name of a subfolder.
P3_FILES = {
    "seqio": {"info.*.json": ""},
    "parquet": {"*.parquet": "/*{split}*.parquet", "*/*.parquet": "/{split}/*.parquet"},
}


def p3_root(cfg):
    """Return the path of the folder that contains the dataset collection P3.

    If --data.source cannot be P3, the result is "".
    """
    kind, _, name = cfg.data.source.partition(":")
    return name.removesuffix("*").rstrip("/") if kind in P3_FILES else ""


def p3_sources(cfg, folder="*"):
    """Return a dict from the name of a P3 folder to the data source for this folder.

    folder: the name of a P3 folder, or "*" for all folders.
    """
    kind = cfg.data.source.partition(":")[0]
    root = p3_root(cfg)
    sources = {}
    for files, splits in P3_FILES.get(kind, {}).items():
        for path, _ in find_files(f"{root}/{folder}/{files}"):
            name = path.split("/")[-2 - files.count("/")]  # the folder of P3
            sources[name] = f"{kind}:{root}/{name}{splits}"
    return sources


# The mixtures of T5 and T0 have the same names, members and rates as in the original
# code (t5/data/mixtures.py and t0/tasks.py).
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
}
MIXTURES |= {name: functools.partial(t0_mixture, name) for name in T0_MIXTURES}


def mixture_rates(name, cfg, examples=lambda task: 1, within=()):
    """Return the sampling rate of each task in a mixture, as a dict from task to rate.

    If the mixture contains another mixture, the tasks of the inner mixture share the rate
    of the inner mixture.

    name: the name of a mixture or of a single task. cfg: the Config. examples: a function
    that returns the number of training examples of a task. This function is used only for
    rates that are a BySize. within: the names of the mixtures that contain this mixture.
    The function raises UserError if the mixture is not a valid dict.
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
    except Exception as error:  # a recipe file may have defined the mixture
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
                f"The mixture {name} has the invalid rate {rate} for {member}: use a "
                f"number of at least 0. For a single task, BySize with a maximum is "
                f"allowed too."
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
    """Return the Task with a given name.

    The flag --data.source replaces the data source of the task that --data.task names.
    The function raises UserError if the task does not exist.

    name: a key of TASKS, or a folder of the dataset collection P3, or a data source in
    the form KIND:NAME. A folder of P3 is found only if --data.source names P3. A data
    source must have the fields inputs and targets. cfg: the Config.
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
    return task


def check_tasks(cfg):
    """Raise UserError if a task of the run is unknown or has an invalid data source."""
    data = cfg.data
    # The tasks of a mixture have their own sources. T0's mixtures are an exception,
    # because --data.source tells them where P3 is stored.
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
    """Return a pair of the Task with a given name and the SourceFiles of one split.

    name: the name of the task. split: the name of the split. cfg: the Config. The
    function raises MissingSplit or MissingSource if the split or the data source does not
    exist.
    """
    task = find_task(name, cfg)
    validation_source = cfg.data.validation_source
    if split == "validation" and validation_source:
        return task, open_source(validation_source, split, cfg, whole=True)
    if split not in task.splits:
        raise MissingSplit(f"{name} has no {split} split.")
    return task, open_source(task.source, split, cfg, whole=bool(validation_source))


def open_all(wanted):
    """Open the splits of several tasks and collect the errors.

    The result is a pair. The first value is a dict from the name of a task to a pair
    (Task, SourceFiles). The second value is a list with a MissingSplit error for each
    task that lacks the split. If data sources are missing, one MissingSource error names
    all of the missing sources.

    wanted: a list of triples (name of a task, name of a split, Config).
    """
    opened = {}
    missing_splits = []
    missing_sources = {}  # {problem: remedy}
    for name, split, cfg in wanted:
        try:
            opened[name] = open_task(name, split, cfg)
        except MissingSplit as error:
            missing_splits.append(error)
        except MissingSource as error:
            missing_sources.update([error.args])
    if missing_sources:
        # dict.fromkeys removes duplicates and keeps the order.
        remedies = dict.fromkeys(missing_sources.values())
        raise MissingSource(";\n".join(missing_sources), " ".join(remedies))
    return opened, missing_splits


def evaluated_tasks(cfg):
    """Return the names of the tasks that a run evaluates.

    The names come from the flag --data.eval_tasks. If this flag is empty, the names come
    from --data.task.
    """
    names = (cfg.data.eval_tasks or cfg.data.task).split(",")
    return [task for name in names for task in mixture_rates(name.strip(), cfg)]


def open_tasks(cfg, split="train"):
    """Open the tasks that a run trains on.

    The result is a dict from the name of a task to a pair (Task, SourceFiles). Tasks with
    the rate 0 are not trained on, so they are left out. If the run also evaluates, the
    data sources of the evaluated tasks are opened, too. So one error message names all
    missing sources before training begins.

    cfg: the Config. split: the name of the split.
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
    """Parse the flag --data.fields, which renames the fields of a data source.

    The result is a dict from the field that the task expects to the field in the data
    source. For example, --data.fields text=content gives {"text": "content"}.
    """
    fields = cfg.data.fields
    try:
        # dict() raises a ValueError if a pair does not consist of two names.
        return dict(
            re.split(" *= *", pair.strip()) for pair in fields.split(",") if fields
        )
    except ValueError:
        raise UserError(
            f"--data.fields {fields} is not valid: write text=NAME or inputs=A,targets=B."
        ) from None


def formatted_examples(source_file, bad, task, cfg, size=math.inf):
    """Yield the examples of a SourceFile in the format of a task.

    Each result is a tuple (where, number, row, texts). `where` is the place of the
    example for messages. `number` is the position of the example in the SourceFile. `row`
    is the formatted example as a dict. `texts` holds the text or the array of token ids
    for each feature of the training objective. Examples without text are left out.

    source_file: a SourceFile. bad: a function to which invalid examples are reported.
    task: the Task. cfg: the Config. size: the size of the vocabulary. Token ids must be
    below this size.
    """
    names = source_fields(cfg)
    features = task.objective.features
    for number, (where, example) in enumerate(source_file.read(bad)):
        example |= {key: example[name] for key, name in names.items() if name in example}
        try:
            for row in task.format(example):
                texts = tuple(row.get(feature) for feature in features)
                reasons = filter(None, [invalid_reason(text, size) for text in texts])
                reason = next(reasons, None)  # the first reason
                if reason:
                    bad(
                        where,
                        f"has {reason} in {' and '.join(features)} (its fields are "
                        f"{', '.join(row)}; choose one with --data.fields "
                        f"{features[0]}=NAME)",
                    )
                elif any(
                    text.strip() if isinstance(text, str) else len(text) for text in texts
                ):
                    yield where, number, row, texts
        except UserError:
            raise
        except Exception as error:  # a recipe file may have defined the format
            problem = f"no {error}" if isinstance(error, KeyError) else repr(error)
            fields = ", ".join(map(str, example))
            bad(where, f"does not fit the task: {problem} (its fields are {fields})")


def invalid_reason(value, size):
    """Return the reason why a value cannot be tokenized, or None if it can be tokenized.

    A valid value is a text or a list of token ids. The reason is the end of a sentence
    that begins with "The example has".

    value: a field of an example. size: the size of the vocabulary. Token ids must be
    below this size.
    """
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return "half of a character (a lone surrogate)"
        return None
    # Numbers that are too large, and lists of different lengths, raise an exception.
    # In this case, `ids` stays an array without dimensions, which is reported below.
    ids = np.array(None)
    with contextlib.suppress(ValueError, OverflowError):
        ids = np.asarray(value)
    if ids.ndim != 1 or len(ids) and ids.dtype.kind not in "iu":
        return "no text"
    if len(ids) and not 0 <= ids.min() <= ids.max() < size:
        return f"ids from {ids.min()} to {ids.max()} (the vocabulary has {size} ids)"
    return None


# ---- token files -----------------------------------------------------------------------
# Text is tokenized once, and the token ids are stored in files. A shard is a set of three
# files with the tokens of some consecutive documents. Shards are in the folder
# prepared/SOURCE-HASH. For example, shard 3 of the first file of a source consists of:
#
#     00000-003.ids   the token ids of all documents, one document after the other
#     00000-003.ends  int64 [documents, features], the end of each text in the .ids file
#     00000-003.json  metadata: counts, checksums, and where the next shard begins
#
# The .json file is written last, so it marks the shard as complete.
#
# The first shard is small, so training can begin soon. Later shards are larger. While
# training uses one shard, the next shard is tokenized in the background. The boundaries
# between shards depend only on the source and the vocabulary.

# Sizes of the first shard and of the largest shards, in tokens.
FIRST_SHARD_TOKENS, SHARD_TOKENS = 1 << 18, 1 << 25
ENCODE_BATCH = 1024  # the number of examples that are encoded together
SHARD_METADATA = {
    "documents": int,
    "tokens": int,
    "unknown": int,  # the number of unknown tokens
    "skipped": int,  # the number of invalid examples, which are skipped
    "ids": int,  # the CRC-32 checksum of the .ids file
    "ends": int,  # the CRC-32 checksum of the .ends file
    "next?": [int],  # the position in the source where the next shard begins
}
PREFETCH_LOCK = threading.Semaphore()  # lets only one thread tokenize a shard in advance


def prepared_path(source, identity, cfg):
    """Return the path at which the tokens or the vocabulary of a source are stored.

    The path is inside the folder data.prepared_dir. The path contains a hash of `source`
    and `identity`, so a change of `source` or `identity` leads to a new path.

    source: the name of the source.
    identity: a JSON value with all settings that the stored files depend on.
    """
    if "://" in cfg.data.prepared_dir:
        raise UserError(
            f"--data.prepared_dir {cfg.data.prepared_dir} is remote, but token files are "
            f"memory-mapped: name a local folder."
        )
    slug = re.sub(r"[^\w.]+", "-", source).strip("-")[-40:]
    digest = hashlib.sha256(json.dumps([source, identity]).encode()).hexdigest()[:10]
    return Path(cfg.data.prepared_dir, f"{slug}-{digest}")


def source_identity(task, files, cfg):
    """Return a JSON value that changes when the texts of a task change.

    The value contains the name, size and modification time of each source file. The code
    of the function task.format may change, too. Therefore the value also contains the
    first 100 examples that task.format returns.
    """
    stamps = [[file.name, file.stamp] for file in files]
    identity = [stamps, task.objective.features, cfg.data.fields]
    if task.format in (as_it_is, text_to_text) or not files:
        return identity
    examples = formatted_examples(files[0], InvalidExamples("skip"), task, cfg)
    texts = [texts for *_, texts in itertools.islice(examples, 100)]
    return [*identity, [[str(text) for text in pair] for pair in texts]]


def with_vocab_size(changes):
    """Set model.vocab_size if the command line sets only data.vocab.

    model.vocab_size becomes the size of the vocabulary, rounded up to a multiple of 128.
    `changes` is a dict of the settings on the command line, such as {"data.vocab":
    "bytes"}. The function returns a dict of the same form.
    """
    vocab = changes.get("data.vocab", "")
    if not vocab or "model.vocab_size" in changes:
        return changes
    trained = re.fullmatch(r"train:(\d{1,9})", vocab)
    size = int(trained[1]) + SENTINELS if trained else load_tokenizer(vocab).size
    return changes | {"model.vocab_size": math.ceil(size / 128) * 128}


def check_vocab_size(size, cfg):
    """Raise a UserError if model.vocab_size does not fit a vocabulary with `size` ids."""
    # model.vocab_size may be rounded up to a multiple of 128. The embedding then has up
    # to 127 unused rows.
    if not size <= cfg.model.vocab_size < size + 128:
        raise UserError(
            f"The vocabulary has {size} ids, including its sentinels, but the model has "
            f"{cfg.model.vocab_size} ids: set "
            f"--model.vocab_size {math.ceil(size / 128) * 128}."
        )


def prepare_vocabulary(cfg, split="train"):
    """Load or train the vocabulary of a run, and return the Tokenizer.

    The setting data.vocab names the vocabulary. If data.vocab is "train:32000", a
    vocabulary of 32,000 pieces is trained on the source. A trained vocabulary is stored
    in data.prepared_dir.
    """
    trained = re.fullmatch(r"train:([1-9]\d{0,8})", cfg.data.vocab)
    if not trained:
        return load_tokenizer(cfg.data.vocab)
    pieces = trained[1]
    check_vocab_size(int(pieces) + SENTINELS, cfg)
    opened = list(open_tasks(cfg, split).values())
    if all(task.source == "random:" for task, _ in opened):
        return IdTokenizer(cfg.model.vocab_size, SENTINELS)
    name = cfg.data.task if len(opened) > 1 else opened[0][0].source
    identity = [pieces, [source_identity(task, files, cfg) for task, files in opened]]
    path = Path(f"{prepared_path(name, identity, cfg)}.{pieces}.model")
    if not path.exists():
        note(f"training a vocabulary of {pieces} pieces on {name}")
        tokenizer = train_tokenizer(vocabulary_texts(opened, cfg), int(pieces))
        configs.write_file(path, tokenizer.serialized)
    return load_tokenizer(path)


def vocabulary_texts(opened, cfg):
    """Yield the texts on which a vocabulary is trained.

    The function takes one text from each task in turn. `opened` is a list with a pair
    (Task, list of source files) for each task.
    """
    invalid = InvalidExamples(cfg.data.on_error)

    def texts_of(task, files):
        for file in files:
            for *_, texts in formatted_examples(file, invalid, task, cfg):
                yield from (text for text in texts if isinstance(text, str))

    texts = [texts_of(task, files) for task, files in opened]
    for one_of_each in itertools.zip_longest(*texts, fillvalue=""):
        yield from one_of_each


def encode_in_background(examples, tokenizer, characters):
    """Tokenize texts in a second thread, while the main thread reads the next texts.

    The function yields a pair (number, list of arrays of ids) for each example.

    examples: an iterator of pairs (number, texts of the example). If the source is
        already tokenized, a text is a list of ids.
    characters: a Counter. If a text has unknown tokens, the characters of the text are
        added to this Counter.
    """

    def encode(batch):
        texts = [text for _, texts in batch for text in texts if isinstance(text, str)]
        encoded = tokenizer.encode_batch(texts)
        for text, ids in zip(texts, encoded):
            if UNK in ids:
                characters.update(text)
        encoded = iter(encoded)
        return [
            (
                number,
                [
                    next(encoded) if isinstance(text, str) else strip_eos(text)
                    for text in texts
                ],
            )
            for number, texts in batch
        ]

    with ThreadPoolExecutor(1) as thread:
        previous = thread.submit(encode, [])
        while batch := list(itertools.islice(examples, ENCODE_BATCH)):
            future = thread.submit(encode, batch)
            yield from previous.result()
            previous = future
        yield from previous.result()


def strip_eos(ids):
    """Return the token ids of a text without a final EOS.

    Some sources provide token ids that end with EOS. The function `truncate` later
    appends EOS to every text.
    """
    ids = np.asarray(ids, np.int32)
    return ids[:-1] if len(ids) and ids[-1] == EOS else ids


def split_into_chunks(ends, objective, data):
    """Split the documents of a token file into chunks, and return the chunk boundaries.

    A chunk is a piece of text that becomes one example. If the objective has two features
    (inputs and targets), each document is one chunk. The result has the shape [chunks,
    features + 1]. Feature f of chunk i begins at token [i, f] and ends before token
    [i, f + 1].

    ends: an array [documents, features] with the position at which each text ends.
    """
    # The start of each document [documents] is the end of the document before.
    first_starts = np.append(0, ends[:-1, -1])[: len(ends)]
    if len(objective.features) > 1:
        return np.column_stack([first_starts, ends])
    ends, length = ends[:, 0], objective.length(data)
    # `count` is the number of chunks in each document, rounded up. `number` is the number
    # of each chunk within its document.
    count = -(-(ends - first_starts) // length)
    number = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    starts = np.repeat(first_starts, count) + number * length
    stops = np.minimum(starts + length, np.repeat(ends, count))
    return np.stack([starts, stops], 1)[stops - starts >= objective.min_length]


class Corpus:
    """Tokenize the source of a task, and provide the tokens in chunks.

    A chunk is a piece of text that becomes one example. A shard is a set of files with
    the tokens of consecutive documents. A shard is written when a chunk of the shard is
    needed for the first time. Chunks are numbered through all shards.

    The position of a shard is a list of three integers. The first integer is the index of
    the source file. The second is the number of the shard within this source file. The
    third is the number of the shard's first example within this source file.

    opened: the pair (Task, list of source files) that open_task returns. By default,
        Corpus calls open_task.
    """

    def __init__(self, name, split, tokenizer, cfg, opened=None):
        self.task, self.files = opened or open_task(name, split, cfg)
        self.title = f"{self.task.source} ({name}, {split})"
        self.tokenizer = tokenizer
        self.cfg = cfg
        ids_type = np.uint16 if tokenizer.size <= 1 << 16 else np.uint32
        self.dtypes = {"ids": ids_type, "ends": np.int64}
        identity = [
            configs.DATA_FORMAT,
            split,
            source_identity(self.task, self.files, cfg),
            tokenizer.sha256,
        ]
        self.folder = prepared_path(self.task.source, identity, cfg)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.shards = []  # the metadata of each known shard, including its position
        # The index of the first chunk in each known shard, and the number of all known
        # chunks at the end.
        self.starts = [0]
        self.next_position = [0, 0, 0] if self.files else None
        self.chunk_bounds = functools.lru_cache(8)(self.chunk_bounds)
        self.shard_ids = functools.lru_cache(8)(self.shard_ids)
        # Maps the position of a shard to a running generator of the method `tokenize`
        # whose next result is this shard.
        self.readers = {}
        self.invalid = InvalidExamples(cfg.data.on_error)
        self.characters = Counter()  # counts characters of texts with unknown tokens
        self.lock = threading.RLock()

    def shard(self, number):
        """Return the metadata of a shard, after preparing the shard if necessary.

        A shard is a set of files with the tokens of consecutive documents. All earlier
        shards are prepared, too. If the source has fewer shards, the result is None.
        """
        with self.lock:
            while len(self.shards) <= number and self.next_position:
                metadata = self.prepare_shard(self.next_position)
                self.shards.append(metadata | {"position": self.next_position})
                self.next_position = metadata.get("next")
        return self.shards[number] if number < len(self.shards) else None

    def shard_starts(self, count=math.inf):
        """Return a list with the index of the first chunk in each known shard.

        A shard is a set of files with the tokens of consecutive documents. The last
        number in the list is the total number of known chunks. The method prepares shards
        until at least `count` chunks are known, or until the source ends.
        """
        while self.starts[-1] < count and self.shard(len(self.starts) - 1):
            bounds = self.chunk_bounds(len(self.starts) - 1)
            self.starts.append(self.starts[-1] + len(bounds))
        return self.starts

    def count_documents(self):
        """Tokenize the complete source, and return the number of documents."""
        self.shard_starts()
        return sum(shard["documents"] for shard in self.shards)

    def chunk_bounds(self, number):
        """Return the boundaries of all chunks in the token file of a shard.

        The result has the shape [chunks, features + 1], as in `split_into_chunks`.
        """
        objective = self.task.objective
        if objective.across_documents:  # treat the shard as one long document
            ends = np.array([self.shards[number]["tokens"]])
        else:
            ends = self.load(number, "ends")
        ends = ends.reshape(-1, len(objective.features))
        return split_into_chunks(ends, objective, self.cfg.data)

    def shard_ids(self, number):
        """Return the token ids of a shard, and prepare the next shard in the background.

        If data.keep_tokens is false, the token files of earlier shards are deleted. An
        array that is memory-mapped from a deleted file stays readable.
        """
        ids = self.load(number, "ids")
        if not self.cfg.data.keep_tokens:
            for shard in self.shards[:number]:
                self.path(shard["position"], "ids").unlink(missing_ok=True)
        threading.Thread(target=self.prefetch, args=[number + 1], daemon=True).start()
        return ids

    def prefetch(self, number):
        """Write the token files of a shard in advance, and ignore all errors.

        The same error is raised again when the shard is used.
        """
        with PREFETCH_LOCK, contextlib.suppress(Exception):
            self.shard(number)

    def find_chunks(self, numbers):
        """Find out which shards contain the given chunks, and where.

        `numbers` [N] holds the indices of the chunks. The first result [N] holds the
        number of the shard that contains each chunk. The second result [N, features + 1]
        holds the boundaries of each chunk in the token file of this shard.
        """
        shards = np.searchsorted(self.starts, numbers, "right") - 1
        bounds = np.zeros((len(numbers), len(self.task.objective.features) + 1), int)
        for shard in np.unique(shards).tolist():
            here = shards == shard
            bounds[here] = self.chunk_bounds(shard)[numbers[here] - self.starts[shard]]
        return shards, bounds

    def lengths(self, numbers):
        """Return the lengths of the given chunks, in tokens.

        The result has the shape [features, N].
        """
        _, bounds = self.find_chunks(numbers)
        return np.diff(bounds).T

    def chunks(self, numbers):
        """Return the token ids of the given chunks.

        The result has a list for each chunk, with one array of ids for each feature.
        """
        shards, bounds = self.find_chunks(numbers)
        return [
            [self.shard_ids(shard)[start:stop] for start, stop in itertools.pairwise(row)]
            for shard, row in zip(shards.tolist(), bounds.tolist())
        ]

    def path(self, position, kind):
        """Return the path of a token file or metadata file.

        position: the position of the shard, as in the docstring of Corpus.
        kind: the ending of the file name, which is "ids", "ends" or "json".
        """
        file, shard, _ = position
        return self.folder / f"{file:05}-{shard:03}.{kind}"

    def load(self, number, kind):
        """Load the array of token ids or of text ends of a shard.

        If the file is missing, or if the checksum of the file is wrong, the shard is
        tokenized again.

        number: the number of the shard.
        kind: "ids" for the token ids, or "ends" for the position where each text ends.
        """
        shard = self.shards[number]
        path = self.path(shard["position"], kind)
        for _ in range(2):
            try:  # view the memmap as a plain array, because indexing is faster then
                array = np.memmap(path, self.dtypes[kind], "r").view(np.ndarray)
            except (OSError, ValueError):  # the file is missing, damaged or empty
                array = np.zeros(0, self.dtypes[kind])
            if zlib.crc32(array) == shard[kind]:
                return array
            note(f"{path} is missing or damaged, so these documents are tokenized again")
            self.path(shard["position"], "json").unlink(missing_ok=True)
            self.prepare_shard(shard["position"])
        raise UserError(
            f"{path} was just written, but its content has changed: check the disk and "
            f"the memory, and whether another program writes to this file."
        )

    def prepare_shard(self, position):
        """Tokenize one shard, write the files of the shard, and return the metadata.

        A shard is a set of files with the tokens of consecutive documents. If the shard
        already exists, the method only reads the metadata. A lock file prevents two
        processes from writing the same shard.

        position: the position of the shard, as in the docstring of Corpus.
        """
        path = self.path(position, "json")
        with self.lock, configs.lock(path.with_suffix(".lock"), wait=True):
            with contextlib.suppress(UserError):  # raised if metadata are missing or bad
                return configs.read_checked(path, SHARD_METADATA)
            reader = self.readers.pop(tuple(position), None) or self.tokenize(*position)
            arrays, next_position = next(reader)
            # The second integer of a position is 0 at the start of a source file. If the
            # next shard is in the same source file, keep the generator for this shard.
            if next_position and next_position[1]:
                self.readers = {tuple(next_position): reader}
            ids = np.concatenate(
                [[], *arrays], dtype=self.dtypes["ids"], casting="unsafe"
            )
            ends = np.cumsum([len(array) for array in arrays], dtype=np.int64)
            configs.write_file(self.path(position, "ids"), ids.tobytes())
            configs.write_file(self.path(position, "ends"), ends.tobytes())
            metadata = {
                "documents": len(arrays) // len(self.task.objective.features),
                "tokens": len(ids),
                "unknown": int(np.count_nonzero(ids == UNK)),
                "skipped": self.invalid.count,
                "ids": zlib.crc32(ids),
                "ends": zlib.crc32(ends),
            }
            self.invalid.count = 0
            if next_position:
                metadata["next"] = next_position
            configs.write_checked(path, metadata)
            path.with_suffix(".lock").unlink(missing_ok=True)
        if position == [0, 0, 0] or not next_position:
            earlier = [shard for shard in self.shards if shard["position"] < position]
            self.report([*earlier, metadata])
        return metadata

    def tokenize(self, file, shard, first):
        """Tokenize a source file, and yield the tokens of one shard after the other.

        The method yields pairs. The first part of a pair is a list with an array of token
        ids for each text. The second part is the position of the next shard, as in the
        docstring of Corpus. At the end of the source, the second part is None.

        file: the index of the source file.
        shard: the number of the first yielded shard within this source file.
        first: the number of the example at which the first yielded shard begins.
        """
        examples = formatted_examples(
            self.files[file], self.invalid, self.task, self.cfg, self.tokenizer.size
        )
        texts = ((number, texts) for _, number, _, texts in examples if number >= first)
        arrays = []
        tokens = 0
        last = None  # the number of the previous example of the source
        with progress_bar(f"tokenizing {self.title}", "token") as bar:
            for number, document in encode_in_background(
                texts, self.tokenizer, self.characters
            ):
                limit = SHARD_TOKENS
                if file == 0:
                    limit = min(limit, FIRST_SHARD_TOKENS << shard)
                # One example of the source may become several documents. All documents
                # of an example stay in the same shard.
                if tokens >= limit and number != last:
                    shard += 1
                    yield arrays, [file, shard, number]
                    arrays = []
                    tokens = 0
                size = sum(map(len, document))
                arrays += document
                tokens += size
                last = number
                bar.update(size)
        yield arrays, [file + 1, 0, 0] if file + 1 < len(self.files) else None

    def report(self, shards):
        """Print how many documents and tokens were prepared.

        If the vocabulary lacks many characters of the text, a warning names them.
        """
        keys = ("documents", "tokens", "unknown", "skipped")
        documents, tokens, unknown, skipped = [
            sum(shard[key] for shard in shards) for key in keys
        ]
        text = (
            f"prepared {self.title}: {documents:,} documents, {tokens:,} tokens, "
            f"{unknown / max(tokens, 1):.3%} unknown, {skipped:,} skipped"
        )
        if "next" in shards[-1]:
            text += ". The rest of the source is prepared when it is needed"
        note(text)
        if unknown > 0.001 * tokens:
            characters = [
                repr(character)
                for character, _ in self.characters.most_common()
                if UNK in self.tokenizer.encode(character)
            ]
            note(
                f"warning: more than 0.1 % of the tokens are unknown to the vocabulary, "
                f"because of {' '.join(characters[:12])}: train a vocabulary on this "
                f"text with --data.vocab train:32000, or use --data.vocab bytes."
            )


class HeldOutPlan:
    """Assign one held-out example to each row of the batches.

    The examples stay in the order of the source.
    """

    def __init__(self, examples):
        self.corpus = examples.corpus

    def samples(self, row_number):
        """Return the index of the task and the number of the example in a row.

        Both results are arrays with one element. After the last example of the split,
        both arrays are empty.
        """
        count = self.corpus.shard_starts(row_number + 1)[-1]
        sample = np.arange(row_number, min(row_number + 1, count))
        return np.zeros_like(sample), sample


class Dataset:
    """Make the batches of one split of a task or mixture.

    tasks: a list with the Examples object of each task.
    plan: a TrainingPlan or HeldOutPlan, which assigns examples to rows.
    """

    def __init__(self, tasks, plan, cfg):
        self.tasks, self.plan, self.cfg = tasks, plan, cfg

    def batch(self, step, rows=None):
        """Return the Batch of a step.

        If `rows` is given, only the rows with these indices are made.
        """
        return make_batch(step, self.tasks, self.plan, self.cfg, rows)

    def batches(self, most=0):
        """Return the number of batches of a held-out split.

        The last batch may end with rows of padding. The result is at most `most`, unless
        `most` is 0.
        """
        size = self.cfg.train.batch_size
        count = self.tasks[0].corpus.shard_starts(most * size or math.inf)[-1]
        return min(math.ceil(count / size), most or math.inf)

    def sample(self, most):
        """Return an array of about `most` token ids, from which frequencies are counted.

        The tokens come from the beginning of each task. If an example has inputs and
        targets, only the targets are used.
        """
        tokens = []
        for task in self.tasks:
            corpus = task.corpus
            left = most / len(self.tasks)
            number = 0
            while left > 0 and corpus.shard(number):
                ids = corpus.shard_ids(number)
                # The last two boundaries of a chunk enclose the targets, or the text if
                # the task has no inputs and targets.
                for start, stop in corpus.chunk_bounds(number)[:, -2:].tolist():
                    tokens.append(ids[start:stop])
                left -= len(ids)
                number += 1
        return np.concatenate(tokens)[: 2 * most]

    @property
    def digest(self):
        """Return a string that changes when the first tokens of a task change.

        The string consists of checksums. Only the first token file of each task counts.
        """
        return "-".join(str(task.corpus.shard(0)["ids"]) for task in self.tasks)


def prepare(cfg, split, tokenizer):
    """Tokenize the beginning of each task, check the data, and return the Dataset.

    A UserError is raised in four cases: a task is invalid, a split has no text, the
    vocabulary does not fit the model, or chunks of text do not fit into a row.
    """
    check_tasks(cfg)
    check_vocab_size(tokenizer.size, cfg)
    opened = open_tasks(cfg, split)

    @functools.cache
    def open_corpus(name):
        corpus = Corpus(name, split, tokenizer, cfg, opened.get(name))
        if not corpus.shard_starts(1)[-1]:
            raise UserError(
                f"{corpus.task.source} holds no text for its {split} split: give it two "
                f"documents or more (text:FILE:lines makes a document of each line)."
            )
        return corpus

    rates = mixture_rates(
        cfg.data.task, cfg, lambda name: open_corpus(name).count_documents()
    )
    rates = {name: rate for name, rate in rates.items() if rate}
    tasks = [
        Examples(corpus.task, corpus, tokenizer, cfg, shuffled=split == "train")
        for corpus in map(open_corpus, rates)
    ]
    check_lengths(tasks, cfg.data, f"{cfg.data.task}, {split}")
    if split != "train":
        return Dataset(tasks, HeldOutPlan(tasks[0]), cfg)
    rates = list(rates.values())
    plan = TrainingPlan(tasks, rates, cfg, plan_path(tasks, rates, cfg))
    return Dataset(tasks, plan, cfg)


def plan_path(tasks, rates, cfg):
    """Return the path of the file in which a TrainingPlan stores its row numbers.

    A TrainingPlan assigns examples to rows. The file is in the folder data.prepared_dir.
    The name of the file is a hash of all settings that this assignment depends on.
    """
    objectives = [task.task.objective for task in tasks]
    identity = [
        [task.corpus.folder.name for task in tasks],
        [(type(objective).__name__, vars(objective)) for objective in objectives],
    ]
    sizes = BLOCK_SAMPLES, FIRST_SHARD_TOKENS, SHARD_TOKENS
    key = repr([identity, rates, cfg.data, cfg.train.seed, *sizes])
    name = f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    return Path(cfg.data.prepared_dir, "plans", name)


def check_lengths(tasks, data, title):
    """Check before training whether the examples are short enough for a row.

    Span corruption cuts text into chunks that should fit exactly. If a chunk does not
    fit, the settings contradict each other, and a UserError is raised. The same holds for
    all objectives with `across_documents`. For all other objectives, examples may be
    truncated, and a note says how many examples are affected.

    tasks: a list with the Examples object of each task. Only the examples that are
        already tokenized are checked.
    """
    truncated = Counter()
    total = sum(task.corpus.starts[-1] for task in tasks)
    for task in tasks:
        objective = task.task.objective
        chunks = np.arange(task.corpus.starts[-1])
        epochs = np.zeros_like(chunks)
        task.make(epochs[:1], chunks[:1])  # lets the objective raise a UserError early
        for side, sizes in zip(SIDES, task.sizes(epochs, chunks)):
            limit, eos, kept = truncated_length(side, task.task, data)
            needed = sizes.max() + eos
            if objective.across_documents and needed > limit:
                raise UserError(
                    f"A chunk of {objective.length(data)} tokens becomes {needed} "
                    f"{side}, but --data.{side}_length is {limit}: set "
                    f"--data.{side}_length to {needed} or more."
                )
            truncated[side] += np.count_nonzero(sizes > kept)
    for side, count in truncated.items():
        if count:
            note(
                f"{title}: {count:,} of the first {total:,} {side} are longer than "
                f"--data.{side}_length {getattr(data, f'{side}_length')} and are cut"
            )


# ---- evaluated tasks -------------------------------------------------------------------


def read_task(name, split, cfg, bad, size=math.inf):
    """Yield the examples of a task as text, together with their places in the source.

    The function yields pairs (where, example). The text `where` is a place such as
    "a.jsonl:3". The example is a dict of fields, such as inputs and targets.

    bad: a function that is called with (where, reason) for each invalid example.
    size: the size of the vocabulary. An example with ids at or above this size is
        invalid.
    """
    task, files = open_task(name, split, cfg)
    for file in files:
        for where, _, example, _ in formatted_examples(file, bad, task, cfg, size):
            yield where, example


def evaluation_config(task, cfg):
    """Return a Config with which a single task of a run is evaluated.

    If files have no splits, their first 1 % is usually held out for evaluation. If
    training does not use these files at all, all examples of the files are evaluated.

    task: the name of the task.
    cfg: the Config of the run.
    """
    if task in MIXTURES:
        raise UserError(f"{task} is a mixture: name one of its tasks.")
    if task == cfg.data.task:
        return cfg
    source = find_task(task, cfg).source
    rates = mixture_rates(cfg.data.task, cfg)
    trained = [find_task(name, cfg).source for name, rate in rates.items() if rate]
    is_file = source.startswith(("text:", "jsonl:", "parquet:"))
    changes = {
        "data.task": task,
        "data.eval_tasks": "",
        "data.source": "",
        "data.validation_source": "",
    }
    if is_file and "{split}" not in source and source not in trained:
        changes["data.validation_source"] = source
    if task not in TASKS and p3_root(cfg):
        # The task is one of the P3 tasks, and data.source is the folder of P3.
        changes["data.source"] = cfg.data.source
    return configs.override(cfg, changes)


def evaluation_configs(cfg, split="validation"):
    """Return a dict from the name of each evaluated task to the Config of this task.

    If a task does not have the split, the task is left out, and a note says so. If no
    task has the split, MissingSplit is raised.
    """
    alone = {task: evaluation_config(task, cfg) for task in evaluated_tasks(cfg)}
    opened, missing = open_all((name, split, one) for name, one in alone.items())
    reasons = " ".join(map(str, missing))
    if not opened:
        raise MissingSplit(reasons)
    if reasons:
        note(f"some tasks are not evaluated: {reasons}")
    return {task: alone[task] for task in opened}


def unigram_loss(counts, batches, tokenizer):
    """Return the loss of a unigram model on held-out batches, in nats per token.

    A unigram model ignores the context. The probability of a token is the frequency of
    this token in the training data. A trained model should reach a lower loss. Sentinels
    and EOS are left out.

    counts: an array [vocabulary] that says how often each token occurs in the training
        data.
    batches: a list with the held-out batches.
    """
    targets = np.concatenate([batch.targets.ravel() for batch in batches])
    content = targets[(targets > EOS) & (targets < tokenizer.size - tokenizer.sentinels)]
    if not len(content):
        return 0.0
    counts = counts + 1.0  # add-one smoothing: no token has probability 0
    return float(np.mean(np.log(counts.sum()) - np.log(counts[content])))


# ---- the command -----------------------------------------------------------------------


def is_span_corruption(cfg):
    """Return whether all tasks of a run train with span corruption."""
    names = mixture_rates(cfg.data.task, cfg)
    objectives = [find_task(name, cfg).objective for name in names]
    return all(type(objective) is SpanCorruption for objective in objectives)


def describe_rows(cfg):
    """Return a line that says how many tokens a row of a batch holds.

    For example, the line is "rows     512 input tokens and 114 target tokens". For span
    corruption, the line also says how many tokens a text has before corruption (raw
    tokens), and how many of them are removed.
    """
    data = cfg.data
    if not is_span_corruption(cfg):
        return (
            f"rows     {data.inputs_length} input tokens and {data.targets_length} "
            f"target tokens"
        )
    length = raw_length(data)
    noise, spans = noise_counts(length, data)
    return (
        f"spans    {length} raw tokens, {noise} of them removed in {spans} spans, become "
        f"{length - noise + spans + 1} inputs and {noise + spans + 1} targets, both with "
        f"{spans} sentinels and EOS"
    )


def describe_dataset(dataset):
    """Return a text such as "1,234 examples are tokenized so far"."""
    count = sum(task.corpus.starts[-1] for task in dataset.tasks)
    return f"{count:,} examples are tokenized so far"


def color_row(ids, segments, tokenizer):
    """Return the text of one row of a batch, with colors if the output is a terminal.

    If the row holds several packed examples, neighboring examples have different colors.
    Sentinels, such as <extra_id_0>, have their text and background colors swapped.

    ids: an array with the token ids of the row.
    segments: an array with the number of the example at each position, counted from 1.
        Padding is 0.
    """
    text = ""
    for segment in range(1, segments.max() + 1):
        words = tokenizer.raw_text(ids[segments == segment].tolist())
        words = configs.escape_controls(words)
        if sys.stdout.isatty():
            words = re.sub(r"<extra_id_\d+>", "\x1b[7m\\g<0>\x1b[27m", words)
            words = f"\x1b[{31 + segment % 6}m{words}\x1b[0m"
        text += words
    return text.strip()


def first_split(cfg):
    """Return "train" if this split exists, otherwise "validation" or "test"."""
    for split in Task().splits:
        with contextlib.suppress(MissingSplit):
            open_tasks(cfg, split)
            return split
    # No split exists. When the caller opens "train", MissingSplit is raised.
    return "train"


def show(cfg, count):
    """Print `count` rows of the first batch, and how fast batches are made.

    The rows come from the training split. If a task has no training split, the rows come
    from the validation or test split.
    """
    cfg = configs.override(cfg, {"train.eval_every": 0, "train.infer_every": 0})
    split = first_split(cfg)
    if split != "train":
        # evaluation_config raises a UserError if data.task is a mixture.
        cfg = evaluation_config(cfg.data.task, cfg)
    tokenizer = prepare_vocabulary(cfg, split)
    dataset = prepare(cfg, split, tokenizer)
    print(f"task     {cfg.data.task}, {split} split: {describe_dataset(dataset)}")
    print(describe_rows(cfg))
    batch = dataset.batch(0)
    sides = {
        "inputs": (batch.inputs, batch.input_segments),
        "targets": (batch.targets, batch.target_segments),
    }
    # Print only rows that hold an example. The last rows are empty if a held-out split
    # has fewer examples than a batch has rows.
    filled = batch.target_segments.any(axis=1).sum()
    for i in range(min(count, filled)):
        for side, (ids, segments) in sides.items():
            lengths = " + ".join(map(str, np.bincount(segments[i])[1:]))
            print(f"\nrow {i}, {side}: {lengths} of {ids.shape[1]} positions are filled")
            print(f"  {color_row(ids[i], segments[i], tokenizer)}")
    tokens = sum(np.count_nonzero(segments) for _, segments in sides.values())
    calls, seconds = timeit.Timer(lambda: dataset.batch(0)).autorange()
    speed = calls * tokens / seconds / 1e6
    print(f"\nspeed    {speed:.1f} million tokens per second on one CPU core")


def list_mixture(cfg):
    """Print a table of the tasks in a mixture, with the rate and source of each task.

    The name of the mixture is cfg.data.task.
    """

    def count_documents(task):
        return Corpus(task, "train", prepare_vocabulary(cfg), cfg).count_documents()

    rates = mixture_rates(cfg.data.task, cfg, count_documents)
    total = sum(rates.values())
    print(f"{'task':40} {'rate':>12} {'share':>9}  source")
    for task, rate in Counter(rates).most_common():
        source = find_task(task, cfg).source
        print(f"{task:40} {rate:>12,.6g} {rate / total:>9.4%}  {source}")


def prepare_all(cfg, shard):
    """Tokenize the data of a run before training, and write the token files.

    With packing, the complete training split is tokenized. Without packing, only the text
    that the training steps will use is tokenized.

    shard: a text such as "0/4" if several machines share the work, otherwise None. With
        "0/4", this machine tokenizes the complete source files 0, 4, 8 and so on.
    """
    tokenizer = prepare_vocabulary(cfg)
    held_out = {}
    if cfg.train.eval_every or cfg.train.infer_every:
        held_out = evaluation_configs(cfg)
    if shard:
        first, machines = configs.parse_shard(shard)
        corpora = [Corpus(name, "train", tokenizer, cfg) for name in open_tasks(cfg)]
        for name, alone in held_out.items():
            corpora.append(Corpus(name, "validation", tokenizer, alone))
        for corpus in corpora:
            for file in range(first, len(corpus.files), machines):
                position = [file, 0, 0]
                while position and position[0] == file:
                    position = corpus.prepare_shard(position).get("next")
        print(f"The text for --shard {shard} of {cfg.data.task} is tokenized.")
        return
    dataset = prepare(cfg, "train", tokenizer)
    rows = (cfg.train.steps - cfg.train.start_step) * cfg.train.batch_size
    counts = dataset.plan.samples_before(rows // BLOCK_SAMPLES + 2)
    for task, count in zip(dataset.tasks, counts.tolist()):
        task.corpus.shard_starts(math.inf if dataset.plan.packs else count)
    print(f"train      {describe_dataset(dataset)}")
    for name, alone in held_out.items():
        dataset = prepare(alone, "validation", tokenizer)
        dataset.batches(cfg.train.eval_batches)
        print(f"validation {name}: {describe_dataset(dataset)}")


def main(argv):
    """Run `python data.py`, which prints rows, lists tasks or writes token files."""
    args, changes = configs.parse_args(
        __doc__,
        argv,
        show=dict(
            type=int,
            default=3,
            metavar="N",
            help="print N rows of the first batch (default: 3). This is done\n"
            "if --prepare and --list are not given",
        ),
        prepare=dict(action="store_true", help="write the token files that a run needs"),
        shard=dict(
            metavar="I/N",
            help="with --prepare, tokenize only every N-th source file, so that N\n"
            "machines with a common disk share the work. I is the number of this\n"
            "machine, from 0 to N - 1",
        ),
        list=dict(
            nargs="?",
            const="",
            metavar="MIXTURE",
            help="print the tasks of a mixture with their rates,\n"
            "or the names of all tasks and mixtures",
        ),
    )
    if not args.run_dir:
        changes = with_vocab_size(changes)
    cfg = configs.resolve(args, changes, recipe=True)
    if args.list:
        cfg = configs.override(cfg, {"data.task": args.list})
    check_tasks(cfg)
    if args.list:
        list_mixture(cfg)
    elif args.list is not None:
        print("tasks", *TASKS, sep="\n  ")
        print("mixtures", *MIXTURES, sep="\n  ")
    elif args.prepare or args.shard:
        prepare_all(cfg, args.shard)
    else:
        show(cfg, args.show)


if __name__ == "__main__":
    configs.run_command(main)
