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
    python data.py --config small_c4 --prepare --runner DirectRunner     with Apache Beam

Example:
    The words of "Thank you for inviting me to your party last week" are tokens 10 to 19.
    Span corruption turns this text into the inputs "Thank you <X> me to your party <Y>"
    and the targets "<X> for inviting <Y> last week". The sentinel <X> is token 99, the
    sentinel <Y> is token 98, and EOS is token 1. The key 0 selects the random spans.

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

`pytest -k lesson_data` runs the lessons about this file, which are in test_all.py.
"""

import array
import ast
import bisect
import bz2
import csv
import glob
import gzip
import hashlib
import importlib
import io
import itertools
import json
import lzma
import math
import os
import re
import shlex
import sys
import threading
import time
import timeit
import zlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Callable, NamedTuple

# Import configs before the large libraries, because importing configs prepares the
# process. For example, Ctrl-C then ends a command without a traceback.
import configs

import numpy as np
import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tqdm import tqdm

from configs import UserError, note

# T5 reserves three token ids. PAD fills the end of a row, EOS marks the end of a
# sequence, and UNK stands for an unknown token.
PAD = 0
EOS = 1
UNK = 2
SENTINELS = 100  # T5 has 100 sentinels, <extra_id_0> to <extra_id_99>
SIDES = ("inputs", "targets")  # an example is a pair of inputs and targets


class Batch(NamedTuple):
    """The batch of one training step, as five int32 arrays.

    One row may hold several short examples, followed by padding. The segment of a token
    is the number of its example in the row, counted from 1, and padding has segment 0.
    For example, the inputs [5, 9, 1, 4, 1, 0] with the segments [1, 1, 1, 2, 2, 0] are
    two examples. The targets have their own segments. `decoder_inputs` holds the targets
    of each example, shifted right by one position, with token 0 (PAD) in front.

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
    32099 and <extra_id_99> has the id 32000. Only added tokens have higher ids. These
    are tokens such as "<hl>" that someone has added to a trained model.

    serialized: the bytes of the model file. A run directory stores these bytes.
    size: the number of all ids, including the sentinels and the added tokens.
    sentinels: the number of sentinels.
    processor: the SentencePieceProcessor of the model. The model includes the sentinels.
        A subclass that does not use SentencePiece has the processor None.
    added: the number of added tokens.

    The attributes serialized, size, sentinels and processor hold these arguments. There
    are two more attributes. `sha256` is the SHA-256 checksum of `serialized`, in
    hexadecimal digits. `sentinel_ids` is the range of the ids of all sentinels.
    """

    def __init__(self, serialized, size, sentinels, processor=None, added=0):
        self.serialized = serialized
        self.sha256 = hashlib.sha256(serialized).hexdigest()
        self.size = size
        self.sentinels = sentinels
        # The last id of this range is <extra_id_0>, and the id before it is <extra_id_1>.
        self.sentinel_ids = range(size - added - sentinels, size - added)
        self.processor = processor

    def encode(self, text):
        """Return the token ids of a text as a list, without EOS.

        A sentinel, such as "<extra_id_0>", becomes one id if the sentinel begins the text
        or follows a space. This space adds no id. In "a<extra_id_0>", the sentinel is not
        recognized. The SentencePieceProcessor self.processor computes the ids.
        """
        return self.processor.encode(text)

    def encode_batch(self, texts):
        """Encode several texts, and return one int32 array of ids per text."""
        return [np.array(self.encode(text), np.int32) for text in texts]

    def raw_text(self, ids):
        """Return the text of token ids, with all special tokens written out.

        For example, EOS becomes "</s>" and the last id becomes "<extra_id_0>". Every id
        must be in the vocabulary.
        """
        words = "".join(self.processor.id_to_piece(i) for i in ids)
        return words.replace("\u2581", " ")  # SentencePiece stores a space as U+2581

    def content(self, ids):
        """Return the token ids before the first EOS, without padding, as a list.

        An id that is not in the vocabulary becomes the unknown token. A model can predict
        such an id. For example, T5's embedding table has 32,128 rows, but T5's vocabulary
        has only 32,100 tokens.
        """
        ids = itertools.takewhile(lambda i: i != EOS, map(int, ids))
        return [i if i < self.size else UNK for i in ids if i != PAD]

    def decode(self, ids):
        """Return the text of the token ids before the first EOS, without padding."""
        return self.processor.decode(self.content(ids))


def is_content(ids, tokenizer):
    """Return a boolean array that is True where an id is a content token.

    Content tokens are all tokens except padding, EOS and sentinels. A sentinel, such as
    <extra_id_0>, stands for a removed span. EOS and sentinels are excluded, because they
    carry no text. Sentinels are also easy to predict, because they come in a fixed order.

    ids: an array of NumPy or JAX.
    """
    sentinels = tokenizer.sentinel_ids
    is_sentinel = (ids >= sentinels.start) & (ids < sentinels.stop)
    return (ids > EOS) & ~is_sentinel  # padding has the id 0, which is below EOS


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
# assets/span_corruption.svg shows this example token by token.
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
    # Compute in float32 and round half to even, as the t5 library does. Otherwise some
    # numbers would differ from those of the t5 library.
    noise = int(np.round(np.float32(length) * np.float32(data.noise_density)))
    noise = min(max(noise, 1), length - 1)
    spans = int(np.round(np.float32(noise) / np.float32(data.mean_span_length)))
    # Each removed span follows at least one kept token. So there are at most as many
    # spans as kept tokens.
    return noise, min(max(spans, 1), length - noise)


def raw_length(data):
    """Return how long a text may be to fit into the inputs after span corruption.

    The text may be longer than the inputs, because one sentinel replaces a span of
    several tokens. With T5's settings, 568 tokens of text become 512 input tokens.
    """
    for length in itertools.count(3):
        noise, spans = noise_counts(length, data)
        # The inputs are the kept tokens, one sentinel for each span, and EOS.
        inputs = length - noise + spans + 1
        if inputs > data.inputs_length:
            return length - 1


def random_compositions(total, parts, keys):
    """Split the integer `total` at random into `parts` positive integers.

    For example, 10 can be split into the three integers [4, 1, 5]. All ways to split (the
    compositions of `total`) are equally likely. Each of the N random integers in `keys`
    gives one row of the result, an array [N, parts].
    """
    # To split the integer 5, write it as five ones, 1 1 1 1 1, with 4 gaps between them.
    # Cutting at the first and the third gap gives 1 + 2 + 2. Each gap gets a random
    # number of 32 bits, and the parts - 1 gaps with the lowest numbers are cut.
    # A random number of 64 bits is used as two numbers of 32 bits, for two gaps.
    bits = random_bits(keys[:, None], np.arange(total // 2))
    gaps = bits.view(np.uint32)[:, : total - 1]
    # argpartition puts the parts - 1 gaps with the lowest numbers first. Its second
    # argument must be the index of a gap. The last gap has the index total - 2.
    order = np.argpartition(gaps, min(parts - 1, total - 2), axis=1)
    cuts = np.sort(order[:, : parts - 1] + 1, axis=1)
    return np.diff(cuts, axis=1, prepend=0, append=total)


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
    # In the inputs, a sentinel overwrites the first token of each removed span. In the
    # targets, a sentinel overwrites the kept token before each removed span, so that the
    # complete span stays.
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
    length = np.count_nonzero(selected[0]) + 1
    out = np.full((len(tokens), length), EOS, np.int32)
    out[:, :-1] = marked[selected].reshape(len(tokens), -1)
    return out


# ---- objectives ------------------------------------------------------------------------


class Objective:
    """Turn tokens of text into examples, which are pairs of inputs and targets.

    The objectives in this file are SpanCorruption, PrefixLM and Pairs. A recipe file may
    define more objectives as subclasses of Objective. Every objective turns each chunk,
    which is a run of consecutive tokens, into one example.

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
    min_length = 1  # chunks of text with fewer tokens than this are left out
    packs = True  # whether examples may be so short that several fit into one row

    def sizes(self, lengths, keys, tokenizer, data):
        """Return the lengths of the inputs and targets of N examples, without EOS.

        The result is an array [2, N]. The first row is for the inputs, and the second row
        is for the targets. `lengths` [features, N] has the numbers of tokens in each
        chunk, separately for each field, such as inputs and targets. The base class
        creates examples from chunks of zeros and measures their lengths. A subclass that
        computes the lengths directly makes packing faster.
        """
        chunks = [[np.zeros(n, np.int32) for n in chunk] for chunk in lengths.T]
        pairs = self.make(chunks, keys, tokenizer, data)
        return np.array([[len(ids) for ids in pair] for pair in pairs]).T

    def make(self, chunks, keys, tokenizer, data):
        """Return a pair of arrays (inputs, targets) for each chunk, without EOS.

        The base class returns the chunks unchanged. This default is right if each chunk
        already is a pair of inputs and targets.
        """
        return chunks


class Pairs(Objective):
    """Train on given pairs of inputs and targets, such as sentences and translations."""

    features = ("inputs", "targets")

    def sizes(self, lengths, keys, tokenizer, data):
        """Return the given lengths, because Pairs does not change inputs and targets."""
        return lengths


class SpanCorruption(Objective):
    """Remove random spans of tokens from a text, and let the model predict the spans.

    Many consecutive documents (a shard) are joined into one long text. This text is cut
    into chunks that are just long enough to fill the inputs. So a chunk may hold the end
    of one document and the start of the next document.
    """

    across_documents = True
    min_length = 2  # every text needs a token to remove and a token to keep
    packs = False  # nearly every example fills a row, so packing would save nothing

    def length(self, data):
        """Return how many tokens of text fill the inputs after span corruption."""
        return raw_length(data)

    def sizes(self, lengths, keys, tokenizer, data):
        counts = [noise_counts(length, data) for length in lengths[0].tolist()]
        noise, spans = np.array(counts).T
        # Each span adds one sentinel to the inputs and one to the targets. EOS is not
        # counted.
        return np.stack([lengths[0] - noise + spans, noise + spans])

    def make(self, chunks, keys, tokenizer, data):
        pairs = [None] * len(chunks)
        # Each chunk of text is a list with a single array of token ids.
        lengths = np.array([len(ids) for (ids,) in chunks])
        # Process chunks of equal length together, because span_corruption takes an array
        # with one chunk in each row.
        for length in np.unique(lengths):
            _, spans = noise_counts(length, data)
            if spans > tokenizer.sentinels:
                raise UserError(
                    f"Span corruption needs {spans} sentinels for {length} tokens of "
                    f"text, one for each removed span. But the vocabulary has only "
                    f"{tokenizer.sentinels} sentinels: raise --data.mean_span_length, so "
                    f"that fewer and longer spans are removed."
                )
            here = np.flatnonzero(lengths == length)
            tokens = np.stack([chunks[i][0] for i in here])
            sentinel = tokenizer.sentinel_ids[-1]  # the id of <extra_id_0>
            sides = span_corruption(tokens, keys[here], sentinel, data)
            for i, inputs, targets in zip(here, *sides):
                pairs[i] = inputs[:-1], targets[:-1]  # `truncate` appends EOS later
        return pairs


# ---- examples --------------------------------------------------------------------------


def truncated_length(side, task, data):
    """Return how long the inputs or the targets may be, as three integers.

    The integers are the maximum length with EOS, the number of EOS tokens (0 or 1), and
    the maximum number of tokens before EOS. For example, (512, 1, 511) means that up to
    511 tokens and one EOS fit into 512 positions.

    EOS is appended to all targets, and to the inputs unless task.inputs_eos is False.
    Usually, long examples are truncated so that EOS still fits, as in the t5 library. In
    T0's tasks, task.eos_after_trim is False. Then long targets fill the maximum length
    without EOS.

    side: the string "inputs" or "targets".
    """
    limit = data.inputs_length if side == "inputs" else data.targets_length
    eos = int(side == "targets" or task.inputs_eos)
    return limit, eos, limit - eos * task.eos_after_trim


def truncate(arrays, side, task, data):
    """Truncate the token ids of the inputs or targets of N examples, and append EOS.

    For example, with a maximum length of 4, the ids [5, 9, 7, 8, 6] become [5, 9, 7, 1].

    arrays: a list with the ids of each example. The result is a list, too.
    side: the string "inputs" or "targets".
    """
    limit, eos, kept = truncated_length(side, task, data)
    end = np.full(eos, EOS, np.int32)
    # If the tokens before EOS already fill the maximum length, [:limit] removes EOS.
    types = dict(dtype=np.int32, casting="unsafe")
    return [np.concatenate([ids[:kept], end], **types)[:limit] for ids in arrays]


# Random bits have three uses: they shuffle chunks of text, choose the removed spans, and
# shuffle packed rows. For each use, the keys of the random bits begin with a different
# one of these numbers, so that no bits are used twice.
ORDER = 1
NOISE = 2
PACKING = 3


class Examples:
    """Make the examples of one task, for training or for evaluation.

    Each chunk of text becomes one example in each epoch. Every epoch uses new random
    bits, so span corruption removes different spans of the chunk each time.

    corpus: a Corpus (in the lower part of this file), which stores the chunks. The method
        shard_starts returns the index of the first chunk in each shard. The method
        lengths returns the lengths of chunks, and the method chunks returns token ids.
        is_tokenized(n) returns whether the first n chunks are tokenized already.
    shuffled: whether the chunks are shuffled. Held-out splits are not shuffled.

    The attributes task, corpus, tokenizer, cfg and shuffled hold the arguments.
    """

    def __init__(self, task, corpus, tokenizer, cfg, shuffled=True):
        self.task = task
        self.corpus = corpus
        self.tokenizer = tokenizer
        self.cfg = cfg
        self.shuffled = shuffled

    def locate(self, samples):
        """Return the epoch and the chunk of each sample number.

        A sample is one use of a chunk, and samples are numbered from 0. For example, if a
        task has 100 chunks, then sample 250 uses a chunk in epoch 2, because epochs 0 and
        1 take 100 samples each. `samples` and both results are arrays [N].

        An epoch visits the shards (files of tokens) in order. Within a shard, training
        visits the chunks in random order. Training can begin as soon as the first shard
        exists.
        """
        # shard_starts tokenizes text until there is a chunk for each sample, or until the
        # source ends. In the first case, starts[-1] is above all sample numbers, so the
        # division gives epoch 0. In the second case, starts[-1] is the number of chunks
        # in an epoch.
        starts = np.array(self.corpus.shard_starts(int(samples.max()) + 1))
        epochs, chunks = np.divmod(samples, starts[-1])
        if not self.shuffled:
            return epochs, chunks
        shards = np.searchsorted(starts, chunks, "right") - 1
        first = starts[shards]  # the index of the first chunk in each of these shards
        size = starts[shards + 1] - first
        key = ORDER, self.cfg.train.seed, epochs, shards
        return epochs, first + permute(chunks - first, size, *key)

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
        examples, and the second array [N] is for the targets. The method sizes returns
        the lengths before truncation, and truncated_length returns the limits of a side
        for self.task and self.cfg.data.
        """
        sizes = []
        for size, side in zip(self.sizes(epochs, chunks), SIDES):
            limit, eos, kept = truncated_length(side, self.task, self.cfg.data)
            with_eos = np.minimum(size, kept) + eos
            sizes.append(np.minimum(with_eos, limit))
        return sizes

    def make(self, epochs, chunks):
        """Return N examples as pairs (inputs, targets), truncated and with EOS.

        `epochs` and `chunks` are arrays [N], as the method locate returns them.
        """
        keys = random_bits(NOISE, self.cfg.train.seed, epochs, chunks)
        pairs = self.task.objective.make(
            self.corpus.chunks(chunks), keys, self.tokenizer, self.cfg.data
        )
        sides = [
            truncate(list(arrays), side, self.task, self.cfg.data)
            for arrays, side in zip(zip(*pairs), SIDES)
        ]
        return list(zip(*sides))


# ---- packing ---------------------------------------------------------------------------


def pack(sizes, limits):
    """Pack N examples into few rows, and yield a list of the examples in each row.

    For example, examples of 3, 5, 6 and 2 tokens fill two rows of 8 tokens. The first row
    takes 6 + 2 tokens, and the second row takes 3 + 5 tokens, so the results are [2, 3]
    and [0, 1]. Each row repeatedly takes the example that leaves the least room, until no
    example fits. This algorithm is called best-fit bin packing. An example fits only if
    its inputs and its targets fit.

    sizes: an array [2, N] with the numbers of input tokens and target tokens.
    limits: the maximum numbers of input tokens and target tokens in a row.
    """
    # Group the examples by their lengths. The variable `kind` stands for the pair of
    # lengths (number of input tokens, number of target tokens).
    waiting = {}  # for each pair of lengths, the examples that are not packed yet
    for example, kind in enumerate(zip(*sizes.tolist())):
        waiting.setdefault(kind, []).append(example)
    # largest[n, t] is the largest number of input tokens, up to n, of a waiting example
    # with t target tokens. For example, if examples with the lengths (3, 2) and (6, 2)
    # wait, largest[5, 2] is 3. If no example is small enough, the entry is -1. Of all
    # examples with t target tokens that fit, the example with the most input tokens
    # leaves the least room, so the loop below needs no others.
    largest = np.full(np.add(limits, 1), -1)
    largest[*sizes] = sizes[0]
    np.maximum.accumulate(largest, out=largest)

    # `load` holds two numbers: how many rows all inputs fill, and how many rows all
    # targets fill. At least max(load) rows are needed. If all tokens are spread evenly
    # over this many rows, a row holds average[0] input tokens and average[1] target
    # tokens.
    load = sizes.sum(1) / limits
    average = limits * load / load.max()
    # The room of a row is 1 - tokens / average. The division gives inputs and targets the
    # same weight, although inputs are often longer. An empty row has the room 1. A row
    # with more tokens than the average has a negative room, but may still have empty
    # positions, because the average is at most the limit. n tokens take the room
    # n / average, which is taken[side][n]. A row with n empty positions has the room
    # free[side][n].
    parts = [np.arange(limit + 1) / size for limit, size in zip(limits, average)]
    taken = [np.float32(part) for part in parts]
    free = [np.float32(1 - part[::-1]) for part in parts]
    # An entry of -1 in `largest` means that no example fits. As an index, -1 selects the
    # last element of an array. Append -inf to taken[0], so that an entry of -1 seems to
    # leave infinite room. The loop below chooses the entry that leaves the least room. So
    # the loop chooses an entry of -1 only if nothing fits.
    taken[0] = np.append(taken[0], np.float32(-np.inf))

    empty_inputs, empty_targets = limits  # how many tokens still fit into the row
    row = []  # the indices of the examples in the row
    while waiting:
        # For each number of target tokens that fits, consider the example with the most
        # input tokens that fit. `a` is the room that this example leaves for inputs, and
        # `b` is the room that this example leaves for targets.
        inputs = largest[empty_inputs, : empty_targets + 1]
        a = free[0][empty_inputs] - taken[0].take(inputs)
        b = free[1][empty_targets] - taken[1][: len(inputs)]
        # Choose the example that leaves the least room. The term |a - b| / 2 is a penalty
        # for rows in which only the inputs or only the targets fill up. Of equally good
        # examples, choose the last, which has the most target tokens.
        remaining = a + b + np.abs(a - b) / 2
        targets = empty_targets - int(remaining[::-1].argmin())
        best = int(inputs[targets])
        kind = best, targets
        if kind not in waiting:  # nothing fits, so begin the next row
            yield sorted(row)
            row = []
            empty_inputs, empty_targets = limits
            continue
        row.append(waiting[kind].pop())
        empty_inputs -= best
        empty_targets -= targets
        if not waiting[kind]:
            # No more examples of these lengths are waiting, so remove the lengths from
            # `largest`. In the column for this number of target tokens, replace `best` by
            # the next smaller number of input tokens that is still waiting, or by -1.
            del waiting[kind]
            column = largest[:, targets]
            smaller = column[best - 1] if best else -1
            column[column == best] = smaller
    yield sorted(row)


def fill_rows(examples, rows, count, limits):
    """Write examples one after the other into the rows of a Batch, and return the Batch.

    For example, two examples with the inputs [5, 9, 1] and [4, 1] may share a row of 8
    tokens. The inputs of this row are [5, 9, 1, 4, 1, 0, 0, 0], and its input segments
    are [1, 1, 1, 2, 2, 0, 0, 0].
    assets/packed.svg shows a row with three examples.

    examples: a list of N pairs of arrays (inputs, targets).
    rows: an array [N] with the row of each example, in ascending order.
    count: the number of rows in the Batch.
    limits: the maximum numbers of input tokens and target tokens in a row.
    """
    # Number the examples of each row from 1. searchsorted finds the first example that
    # is in the same row.
    segment = np.arange(len(rows)) - np.searchsorted(rows, rows) + 1
    sides = []
    for side, limit in enumerate(limits):
        arrays = [pair[side] for pair in examples]
        sizes = [len(ids) for ids in arrays]
        used = np.bincount(rows, sizes, count)  # the number of tokens in each row
        filled = np.arange(limit) < used[:, None]  # True where a row holds a token
        tokens = np.zeros((count, limit), np.int32)
        segments = np.zeros((count, limit), np.int32)
        # There are no examples if all rows come after the last example of a held-out
        # split. Then the rows keep their zeros, which are padding.
        if examples:
            tokens[filled] = np.concatenate(arrays)
            segments[filled] = np.repeat(segment, sizes)
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


def random_bits(*key, start=0):
    """Return 64 random bits (uint64) for a key. Equal keys always give equal bits.

    A key is one or more integers, as in random_bits(seed, 7). Arrays of integers work,
    too. For example, random_bits(seed, np.arange(5)) returns an array with 64 random bits
    for each of 5 keys.

    The function XORs the first integer of the key into the bits, then mixes the bits, and
    goes on with the next integer. After mixing, every new bit depends on every old bit.
    The bits are mixed as in SplitMix64, a random number generator by Steele, Lea and
    Flood (2014).

    start: the random bits of the first integers of the key, if they are known. So
        random_bits(7, start=random_bits(seed)) equals random_bits(seed, 7).
    """
    bits = np.asarray(start, np.uint64)
    with np.errstate(over="ignore"):  # no warning: SplitMix64 computes modulo 2^64
        for part in key:
            part = np.asarray(part).astype(np.uint64)
            bits = (bits + 0x9E3779B97F4A7C15) ^ part
            bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9
            bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB
            bits = bits ^ (bits >> 31)
    return bits


def permute(index, size, *key, start=0):
    """Apply a random permutation of range(size) to each integer of an array.

    For example, permute(np.arange(5), 5, 1) returns [3, 2, 1, 0, 4]. The last argument is
    the key that selects the permutation. Only the given integers are permuted, and the
    permutation is never stored, so `size` may be large. `index` and the result are arrays
    [N]. The size is an integer or an array [N], and so are the parts of the key.

    The algorithm is a Feistel network, which permutes all numbers below a power of four.
    The network splits the bits of a number into two halves. In each of four rounds, one
    half is XORed with random bits that depend on the other half. Every round can be
    undone, so no two numbers get the same result.

    start: the random bits of the first integers of the key, as in random_bits.
    """
    size = np.broadcast_to(size, index.shape)
    bits = np.broadcast_to(random_bits(*key, start=start), index.shape)
    _, bit_length = np.frexp(size - 1)  # the number of bits of size - 1
    half = np.maximum(1, (bit_length + 1) // 2).astype(np.uint64)
    mask = (1 << half) - 1  # selects the lower half of a number's bits
    out = index.astype(np.uint64)
    left = out >> half
    right = out & mask
    for round_bits in random_bits(bits, np.arange(4)[:, None]):
        left, right = right, left ^ (random_bits(right, start=round_bits) & mask)
    out = (left << half | right).astype(np.int64)
    # Cycle walking: a result outside range(size) is permuted again until it is inside.
    outside = np.flatnonzero(out >= size)
    if len(outside):
        out[outside] = permute(out[outside], size[outside], start=bits[outside])
    return out


# ---- the batch of a step ---------------------------------------------------------------

BLOCK_SAMPLES = 1 << 14  # the number of samples, of all tasks, that are packed at once


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
        """Set the attributes that the other methods use.

        `tasks`, `cfg` and `path` hold the arguments. `rates` is an array of the rates,
        divided by their sum. `packs` says whether a row may hold several examples. It is
        True if cfg.data.pack is True and at least one objective has packs = True.
        `row_starts` lists the number of the first row in each block. A block is packed
        bit by bit. `packing(block)` returns the state of this work, a pair: the list of
        the rows that are packed so far, and the generator pack_block(block), which packs
        the others. A method that takes rows from the generator appends them to the list.
        `packing` and the method plan_block cache their results for the last three blocks.

        The JSON file at `path` holds a dict such as {"starts": [0, 2100, 4187]}, which is
        row_starts. The function configs.write_checked adds a checksum to this dict.
        """
        self.tasks = tasks
        self.cfg = cfg
        self.rates = np.array(rates) / sum(rates)
        self.packs = cfg.data.pack and any(
            examples.task.objective.packs for examples in tasks
        )
        self.path = path
        # row_starts[b] is the number of the first row of block b, the group of samples
        # that are packed together. Block 0 begins with row 0. If an earlier run has saved
        # a longer list, read the saved list.
        self.row_starts = [0]
        with suppress(UserError):  # ignore a missing or damaged file
            self.row_starts = configs.read_checked(path, {"starts": [int]})["starts"]
        # For each block (a group of samples), `packing` returns the list of the rows that
        # are packed so far, and the generator that packs the other rows of the block.
        self.packing = lru_cache(3)(lambda block: ([], self.pack_block(block)))
        self.plan_block = lru_cache(3)(self.plan_block)

    def samples(self, row_number):
        """Return which samples are in a row, as two arrays of integers.

        The first array has the indices of tasks, and the second array has the numbers of
        samples of these tasks. For example, the arrays [0, 2] and [57, 8] mean sample 57
        of task 0 and sample 8 of task 2.
        """
        self.extend_row_starts(row_number)
        block = bisect.bisect_right(self.row_starts, row_number) - 1
        row = row_number - self.row_starts[block]
        rows = self.plan_block(block)
        # Pack some rows of the next block (a group of samples) now, so that no batch has
        # to wait until a complete block is packed. Packing the next block begins when a
        # fifth of the current block is used, and ends with the last row of this block.
        packed, packing = self.packing(block + 1)
        count = (5 * row - len(rows)) // 4 - len(packed)
        if count > 0 and self.is_tokenized(block + 1):
            packed.extend(itertools.islice(packing, count))
        return rows[row]

    def extend_row_starts(self, row_number):
        """Extend the list row_starts until its last entry is above a given row number.

        The list holds the number of the first row in each block. A block is a group of
        samples that are packed together. To count its rows, a block is packed, unless
        every row holds one sample.
        """
        while self.row_starts[-1] <= row_number:
            block = len(self.row_starts) - 1
            if self.packs:
                rows = self.plan_block(block)
                self.row_starts.append(self.row_starts[-1] + len(rows))
                configs.write_checked(self.path, {"starts": self.row_starts})
            else:  # without packing, every row holds one sample
                self.row_starts.append(int(sum(self.samples_before(block + 1))))

    def plan_block(self, block):
        """Return the rows of a block in shuffled order, as a list.

        A block is a group of about 16,384 samples that are packed together. Each row is a
        pair of arrays (tasks, sample numbers), which names the samples in the row.
        """
        packed, packing = self.packing(block)
        packed.extend(packing)  # pack the remaining rows
        rows = [row for row in packed if row]
        if not rows:
            # An earlier call raised an exception, for example because a file could not be
            # read. pack_block reads all files before it yields the first row, so there is
            # no row. After an exception, a generator yields nothing more. Discard the
            # generator, and pack the block again.
            self.packing.cache_clear()
            return self.plan_block(block)
        if self.packs:
            # Shuffle the rows, because packing puts examples of similar lengths into
            # neighboring rows.
            key = PACKING, self.cfg.train.seed, block
            place = permute(np.arange(len(rows)), len(rows), *key)
            rows = [rows[i] for i in np.argsort(place)]
        return rows

    def is_tokenized(self, block):
        """Return whether all texts that a block needs are tokenized already.

        A block is a group of about 16,384 samples that are packed together.
        """
        counts = self.samples_before(block + 1)
        return all(
            examples.corpus.is_tokenized(count)
            for examples, count in zip(self.tasks, counts)
        )

    def pack_block(self, block):
        """Pack the samples of a block into rows, and yield the samples of each row.

        A block is a group of about 16,384 samples that are packed together. Before the
        first row, the generator looks up the lengths of the examples of each task. After
        each task, it yields None, so that the caller can pause between tasks.
        """
        first = self.samples_before(block)
        # `count` holds the number of samples of each task in this block.
        count = self.samples_before(block + 1) - first
        task = np.repeat(np.arange(len(count)), count)
        # Number the samples of each task in this block from 0.
        number = np.concatenate([np.arange(n) for n in count])
        # Spread the samples of each task evenly over the block. For example, 4 samples of
        # task 0 and 2 samples of task 1 have the order 0, 1, 0, 0, 1, 0.
        order = np.argsort((number + 0.5) / count[task], kind="stable")
        task = task[order]
        sample = first[task] + number[order]
        if not self.packs:  # every row holds one sample
            yield from zip(task[:, None], sample[:, None])
            return
        sizes = np.zeros((2, len(task)), int)
        for k in np.unique(task):
            here = task == k
            epochs, chunks = self.tasks[k].locate(sample[here])
            sizes[:, here] = self.tasks[k].truncated_sizes(epochs, chunks)
            yield None
        limits = self.cfg.data.inputs_length, self.cfg.data.targets_length
        for row in pack(sizes, limits):
            yield task[row], sample[row]

    def samples_before(self, block):
        """Return the number of samples of each task in all blocks before a block.

        A block is a group of about 16,384 samples that are packed together.
        """
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
    counts = [len(task) for task, _ in members]  # the number of examples in each row
    row = np.repeat(np.arange(len(rows)), counts)
    task, sample = [np.concatenate(arrays) for arrays in zip(*members)]
    examples = [None] * len(row)
    for k in np.unique(task):
        here = np.flatnonzero(task == k)
        epochs, chunks = tasks[k].locate(sample[here])
        pairs = tasks[k].make(epochs, chunks)
        for i, pair in zip(here.tolist(), pairs):
            examples[i] = pair
    limits = cfg.data.inputs_length, cfg.data.targets_length
    return fill_rows(examples, row, len(rows), limits)


# ====== below: vocabularies, sources, tasks, mixtures, token files, evaluation, command =


# ---- vocabularies ----------------------------------------------------------------------

VOCABULARIES = configs.VOCABULARIES  # the vocabularies that a recipe file defines


class ByteTokenizer(Tokenizer):
    """Tokenize text into its UTF-8 bytes, as in ByT5 (Xue et al. 2022).

    Byte b becomes the token id b + 3. For example, the letter "A" is byte 65, so its id
    is 68. The ids 0, 1 and 2 are padding, EOS and UNK.

    extra_ids: the number of sentinel ids that are added after the ids of the bytes. If
    extra_ids is 0, the ids of the 11 highest bytes serve as sentinels, as in the
    published ByT5 models.
    """

    def __init__(self, extra_ids=0):
        # UTF-8 never uses the 11 byte values from 245 to 255, so their ids are free for
        # sentinels.
        sentinels = extra_ids or 11
        super().__init__(f"bytes:{extra_ids}\n".encode(), 3 + 256 + extra_ids, sentinels)
        self.ids = dict(zip(sentinel_names(sentinels), self.sentinel_ids))

    def encode(self, text):
        return self.encode_batch([text])[0].tolist()

    def encode_batch(self, texts):
        encoded = []
        for text in texts:
            # re.split separates the sentinels from the text between them. For example,
            # "a<extra_id_7>b" becomes ["a", "<extra_id_7>", "b"].
            ids = []
            for part in re.split(r"(<extra_id_\d+>)", text):
                if part in self.ids:
                    ids.append([self.ids[part]])
                else:
                    ids.append(np.frombuffer(part.encode(), np.uint8) + 3)
            encoded.append(np.concatenate(ids, dtype=np.int32))
        return encoded

    def raw_text(self, ids):
        """Turn token ids into text that shows the special tokens.

        Padding appears as "<pad>", EOS as "</s>", UNK as "<unk>", and the first sentinel
        as "<extra_id_0>". Bytes that are not valid UTF-8 are left out.
        """
        symbols = {PAD: b"<pad>", EOS: b"</s>", UNK: b"<unk>"}
        text = b""
        for i in ids:
            if i in self.sentinel_ids:
                text += b"<extra_id_%d>" % (self.size - 1 - i)
            else:
                text += symbols.get(i) or bytes([i - 3])
        return text.decode(errors="ignore")

    def decode(self, ids):
        """Turn token ids into text, up to the first EOS.

        Padding, sentinels and UNK are left out, and so are bytes that are not valid
        UTF-8.
        """
        ids = self.content(ids)
        return self.raw_text(i for i in ids if 3 <= i < self.sentinel_ids.start)


class IdTokenizer(Tokenizer):
    """Turn text such as "17 4 29" into the token ids [17, 4, 29].

    The data sources `reverse:` and `random:` use this tokenizer, because their examples
    are random ids instead of words.

    size: the number of token ids. sentinels: how many of the highest ids are sentinels.
    """

    def __init__(self, size, sentinels=0):
        if size < sentinels + 3:
            raise UserError(
                f"A vocabulary of {size} ids is too small for {sentinels} sentinels and "
                f"the 3 special tokens of T5: choose more ids, as in --data.vocab "
                f"ids:512:100."
            )
        super().__init__(f"ids:{size}:{sentinels}\n".encode(), size, sentinels)

    def encode(self, text):
        ids = [int(word) if word.isdecimal() else UNK for word in text.split()]
        return [i if i < self.size else UNK for i in ids]

    def raw_text(self, ids):
        return "".join(f" {i}" for i in ids)

    def decode(self, ids):
        """Turn token ids into text, up to the first EOS and without padding.

        For example, [17, 4, 29, 1, 0] becomes "17 4 29", because 1 is EOS.
        """
        return " ".join(map(str, self.content(ids)))


class PatternTokenizer(Tokenizer):
    """Tokenize text into the matches of a regular expression, such as characters.

    A recipe file defines such a vocabulary for text that is not ordinary language, such
    as molecules, proteins or phonemes. For example, PatternTokenizer("Cl|.", ["C", "Cl"])
    tokenizes "CCl" into the ids [3, 4]. The ids 0, 1 and 2 are padding, EOS and UNK, and
    the sentinels follow the pieces.

    pattern: the regular expression. Each match becomes one id, and so does the text
        between two matches.
    pieces: the texts that have an id. All other texts become UNK.
    sentinels: the number of sentinels.

    Raises UserError if the pattern does not match each piece as a whole.
    """

    def __init__(self, pattern, pieces, sentinels=SENTINELS):
        pieces = list(pieces)
        content = {"pattern": pattern, "pieces": pieces, "sentinels": sentinels}
        serialized = json.dumps(content, ensure_ascii=False).encode()
        super().__init__(serialized, 3 + len(pieces) + sentinels, sentinels)
        names = sentinel_names(sentinels)
        self.pieces = ["<pad>", "</s>", "<unk>", *pieces, *names]
        self.ids = {piece: i for i, piece in enumerate(self.pieces)}
        # Put the sentinels before the pattern, because a regular expression prefers the
        # first alternative that matches.
        self.pattern = re.compile("|".join([*names, pattern]))
        for i, piece in enumerate(pieces, 3):
            if self.encode(piece) != [i]:
                raise UserError(
                    f"The vocabulary of the recipe file can never produce its piece "
                    f"{piece!r}: list each piece only once, and write a pattern that "
                    f"matches the complete piece. The pattern is {pattern!r}."
                )

    def encode(self, text):
        # Insert U+D800 before and after each match, then split the text at U+D800. No
        # valid text contains this code point.
        parts = self.pattern.sub("\ud800\\g<0>\ud800", text).split("\ud800")
        return [self.ids.get(part, UNK) for part in parts if part]

    def raw_text(self, ids):
        return "".join(self.pieces[i] for i in ids)

    def decode(self, ids):
        """Turn token ids into text, up to the first EOS and without padding.

        An id that is not in the vocabulary becomes "<unk>".
        """
        return self.raw_text(self.content(ids))


def sentinel_names(number):
    """Return the names of sentinels in the order of their ids, which is descending.

    >>> sentinel_names(2)
    ['<extra_id_1>', '<extra_id_0>']
    """
    return [f"<extra_id_{k}>" for k in reversed(range(number))]


def add_sentinels(model, number):
    """Append sentinel pieces to the vocabulary of a SentencePiece ModelProto.

    If `number` is 100, the pieces <extra_id_99> to <extra_id_0> are appended in this
    order. So <extra_id_0> gets the highest id, as in T5.
    """
    for name in sentinel_names(number):
        model.pieces.add(piece=f"▁{name}", score=0.0, type="USER_DEFINED")


class LongTextTokenizer(Tokenizer):
    """Encode texts on all CPU cores, and encode long texts in parts to save memory.

    SentencePiece needs about 60 bytes of memory for each character of a text. So a text
    is cut after spaces into parts of at most PART_CHARACTERS characters. In T5's
    vocabularies, no token continues after a space. So encoding the parts gives the same
    token ids as encoding the complete text. There are two exceptions. A part without
    spaces is cut inside a word. In a text of millions of tokens, SentencePiece rounds the
    sums of its float32 scores, and may choose another of two nearly equal ways to cut a
    word.
    """

    def encode(self, text):
        return self.encode_batch([text])[0].tolist()

    def encode_batch(self, texts):
        part = f".{{1,{PART_CHARACTERS}}}"
        # A part has at most PART_CHARACTERS characters. It ends at the end of the text,
        # or after its last space or newline. A part without spaces and newlines may end
        # inside a word.
        find_parts = re.compile(rf"{part}(?:\Z|(?<=[ \n]))|{part}", re.DOTALL).findall
        parts = [find_parts(text) or [""] for text in texts]
        # Encode the parts of all texts in one call, because SentencePiece then uses a
        # thread for each CPU core. If several processes tokenize at the same time, the
        # operating system divides the cores among their threads.
        joined = [*itertools.chain(*parts)]
        encoded = iter(self.processor.encode(joined, return_type="numpy"))
        return [np.concatenate([next(encoded) for _ in found]) for found in parts]


# This text marks the vocabulary of a network that has no embeddings for sentinels, such
# as MADLAD-400. convert.py writes the text into the field model_prefix of the
# SentencePiece model.
NO_SENTINELS = "plain T5: no sentinels"
PATTERN_FILE = b'{"pattern": '  # the file of a PatternTokenizer begins with these bytes


# Cache the result, because hundreds of tasks in a mixture may use the same vocabulary.
@lru_cache(maxsize=4)
def parse_vocabulary(serialized, name="the vocabulary"):
    """Build a Tokenizer from the bytes of a SentencePiece model file.

    If the file has no sentinels, 100 sentinels such as <extra_id_0> are added, unless the
    file says that the network has no embeddings for sentinels. Pieces after the sentinels
    are tokens that someone has added to a trained model. The ids 0, 1 and 2 must be
    <pad>, </s> and <unk>, and the sentinels must be in descending order. Otherwise, or if
    the bytes are not a SentencePiece model, the function raises UserError.

    serialized: the bytes of the file. name: the name of the file in error messages.
    """
    try:
        model = sentencepiece_model_pb2.ModelProto.FromString(serialized)
        has_sentinels = any("<extra_id_" in piece.piece for piece in model.pieces)
        if not has_sentinels and model.trainer_spec.model_prefix != NO_SENTINELS:
            add_sentinels(model, SENTINELS)
        pieces = [piece.piece.removeprefix("▁") for piece in model.pieces]
        # SentencePiece rejects empty pieces and duplicates, but it may accept a score
        # that is not a number (NaN).
        if not all(math.isfinite(piece.score) for piece in model.pieces):
            raise ValueError("the score of a piece is infinite or not a number")
        processor = sentencepiece.SentencePieceProcessor(
            model_proto=model.SerializeToString()
        )
        if pieces[:3] != ["<pad>", "</s>", "<unk>"] or processor.unk_id() != UNK:
            raise ValueError(
                f"the vocabulary begins with the pieces {pieces[:3]}, but T5 needs the "
                f"pieces <pad>, </s> and <unk> as ids 0, 1 and 2. To get these ids, "
                f"train the model with pad_id=0, eos_id=1, unk_id=2 and bos_id=-1"
            )
        sentinels = sum("<extra_id_" in piece for piece in pieces)
        # The last sentinel is <extra_id_0>. Any pieces after this sentinel are added
        # tokens.
        end = 1 + pieces.index("<extra_id_0>") if sentinels else len(pieces)
        if pieces[max(end - sentinels, 0) : end] != sentinel_names(sentinels):
            raise ValueError(
                "the sentinels in the vocabulary must have descending numbers without a "
                "gap, such as <extra_id_2>, <extra_id_1>, <extra_id_0>"
            )
    # Catch all exceptions, because the libraries raise different types of exceptions.
    # SentencePiece raises RuntimeError. protobuf raises DecodeError, whose module depends
    # on the version of protobuf.
    except Exception as error:
        raise UserError(
            f"{name} is not a valid SentencePiece model for T5 ({error}): set "
            f"--data.vocab to another file."
        ) from error
    added = len(pieces) - end
    return LongTextTokenizer(serialized, len(pieces), sentinels, processor, added)


def load_tokenizer(path):
    """Load the vocabulary that --data.vocab names, and return its Tokenizer.

    The argument is the local or remote path of a SentencePiece model, or a name that a
    recipe file defines. It may also be the name of a tokenizer that needs no model file.
    For example, "bytes:100" is a ByteTokenizer with 100 extra ids for sentinels. The name
    "ids:512:100" is an IdTokenizer with 512 ids, of which 100 are sentinels. The last
    number can be left out, as in "bytes" and "ids:512".

    If the file cannot be read, the function raises UserError.
    """
    path = str(path)
    if path in VOCABULARIES:
        return VOCABULARIES[path]
    # The argument may be a name, such as "bytes:100". It may also be the path of a file
    # that contains such a name, because every run stores its vocabulary in a file.
    is_name = re.compile(rb"(bytes|ids:\d{1,9})(:\d{1,9})?\s*").fullmatch
    serialized = path.encode()
    if not is_name(serialized):
        check_regular(path)
        try:
            with open_file(path) as file:
                serialized = file.read()
        except (OSError, ValueError) as error:
            raise UserError(
                f"There is no vocabulary at {path} ({error}): set --data.vocab to the "
                f"path of a SentencePiece model. To train a vocabulary on the text of "
                f"the data source, use --data.vocab train:32000."
            ) from error
    if is_name(serialized):
        kind = ByteTokenizer if serialized.startswith(b"bytes") else IdTokenizer
        return kind(*map(int, re.findall(rb"\d+", serialized)))
    if serialized.startswith(PATTERN_FILE):
        form = {"pattern": str, "pieces": [str], "sentinels": int}
        return PatternTokenizer(**configs.parse_json(serialized, form, path))
    return parse_vocabulary(serialized, path)


def load_run_tokenizer(run_dir):
    """Load the vocabulary of a run, the file spiece.model, and return its Tokenizer.

    The file must have the SHA-256 digest that config.json stores. Otherwise, the run was
    trained with another vocabulary, and the function raises UserError. A run that was
    converted from a model without a vocabulary has no digest. Then the function only
    checks that the vocabulary is not too large for the model.
    """
    path = f"{run_dir}/spiece.model"
    tokenizer = load_tokenizer(path)
    cfg, stored = configs.read_run(run_dir)
    if stored["vocabulary_sha256"] not in ("", tokenizer.sha256):
        raise UserError(
            f"{path} is not the vocabulary with which {run_dir} was trained: restore "
            f"the original file (config.json has the SHA-256 digest of the original)."
        )
    check_vocab_size(tokenizer.size, cfg)
    return tokenizer


# A vocabulary is trained on at most this many characters of text. Training on so much
# text takes one or two minutes.
VOCABULARY_CHARACTERS = 1 << 27


def train_tokenizer(texts, pieces):
    """Train a SentencePiece unigram model on texts and return its Tokenizer.

    At most VOCABULARY_CHARACTERS characters are read. If the texts are too short for a
    vocabulary of this size, the function raises UserError.

    texts: an iterable of strings. pieces: the size of the vocabulary without its
    sentinels.
    """
    lines = []
    with progress_bar("reading for a vocabulary", "character") as bar:
        for text in texts:
            # SentencePiece skips lines of more than 16,000 bytes. So cut lines after
            # 4,000 characters, because a UTF-8 character has at most 4 bytes.
            lines += re.findall(".{1,4000}", "\n".join(text.splitlines()))
            bar.update(len(text))
            if bar.n >= VOCABULARY_CHARACTERS:
                break
        note(f"training a vocabulary of {pieces:,} pieces on {bar.n:,} characters")
    if not lines:
        raise UserError(
            "The training split of the data source has no text on which a vocabulary "
            "can be trained: provide at least two documents, because at least one "
            "document is usually held out for validation. With text:FILE:lines, each "
            "line is a document."
        )
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
            num_threads=4,  # fixed, because the number of threads changes the result
            minloglevel=2,
            max_sentence_length=16_000,
            character_coverage=0.9999,
        )
    except RuntimeError as error:
        # If there is too little text, the error of SentencePiece names the largest
        # possible size, as in "Please set it to a value <= 1234".
        bounds = re.findall(r"<= (\d+)", str(error)) or ["N"]
        raise UserError(
            f"The data source has too little text for a vocabulary of {pieces} pieces: "
            f"add text, or set --data.vocab train:{bounds[0]} or a smaller number."
        ) from error
    return parse_vocabulary(model.getvalue())


def progress_bar(what, unit):
    """Return a tqdm progress bar that prints to standard error.

    On a terminal, the bar appears after half a second. In a log file, the bar prints a
    line every 30 seconds. Background threads print no bar. With several processes, only
    the main process prints a bar.

    what: the title of the bar.
    unit: the noun, in the singular, for the counted objects.
    """
    in_background = threading.current_thread() is not threading.main_thread()
    on_terminal = sys.stderr.isatty()
    seconds = 0.5 if on_terminal else 30
    return tqdm(
        desc=what,
        unit=f" {unit}s",
        unit_scale=True,
        leave=False,
        delay=seconds,
        mininterval=seconds,
        bar_format=None if on_terminal else "{l_bar}{r_bar}\n",
        disable=in_background or not configs.prints_progress,
    )


# ---- sources ---------------------------------------------------------------------------
# A data source is written KIND:NAME, such as text:books/*.txt. The dict SOURCES maps each
# kind to a function with the arguments (name, split, cfg, whole). The function opens the
# source and returns a list of SourceFiles, which are read one after the other.
#
# - name is the part after the colon, such as books/*.txt.
# - split is the name of a split, such as "train" or "validation".
# - whole: a source without splits usually holds out its first 1 %, but at most 32 MiB,
#   for validation. If `whole` is true, nothing is held out.
# - SourceFile.read(bad) yields pairs (where, example). The example is a dict of fields.
#   `where` is the place of the example for messages, such as "books/a.txt:3".
# - If an example cannot be read, the reader calls bad(where, what), such as
#   bad("a.jsonl:3", "is not JSON"). With --data.on_error stop, this call raises a
#   UserError. With --data.on_error skip, this call counts the example, and the reader
#   continues with the next example.
# - A path may be remote, such as gs://bucket/*.gz. The library fsspec opens remote paths.


class SourceFile(NamedTuple):
    """A part of a data source that is read from start to end, usually a file.

    For example, many small text files form one SourceFile, and a large file is a
    SourceFile of its own.
    """

    name: str
    # This list changes when the content changes. It holds, for example, the sizes and
    # times of files.
    stamp: list
    # read(bad) yields pairs such as ("a.txt:3", {"text": "Hello"}). If an example is
    # invalid, read calls bad, as in bad("a.txt:4", "is not UTF-8").
    read: Callable


class MissingSplit(UserError):
    """Raised if a data source exists but lacks the requested split, such as "test"."""


class MissingSource(UserError):
    """Raised if a data source does not exist.

    The two arguments are texts. The first text says what is missing. The second text says
    what to do about it, such as "give --data.source the path of a file".
    """

    def __str__(self):
        return ": ".join(self.args)


def digest(value):
    """Return a short hash of a JSON value, such as a list of file names and sizes."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@cache
def python_documents():
    """Return texts from the local Python installation as a list of strings.

    Each file of the standard library gives one document, which joins all docstrings of
    the file. Each topic of the language manual (pydoc_data/topics.py) gives another
    document. The library files are parsed with `ast`, so their code never runs.
    """
    from pydoc_data.topics import topics  # this module only defines a dict of texts

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
    """Open a data source whose examples are generated by a function, not read from files.

    The result is a list with one SourceFile for each split, such as "train".

    name: the name of the data source in messages. stamp: a list that changes when the
    examples change. examples: a function that takes the name of a split and yields the
    examples of the split as dicts. splits: the names of the splits.
    """

    def read(split, bad):
        for number, example in enumerate(examples(split)):
            yield f"{name} {split} {number}", example

    return [
        SourceFile(f"{name} {split}", stamp, partial(read, split)) for split in splits
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
        return f"{TENS[n // 10]}-{ONES[n % 10]}".removesuffix("-zero")
    unit, name = (100, "hundred") if n < 1000 else (1000, "thousand")
    words = f"{spell_number(n // unit)} {name} {spell_number(n % unit)}"
    return words.removesuffix(" zero")


def number_example(n):
    """Return the example for the number n, as a dict of fields.

    For 12, the fields are number 12, words "twelve", label 1, date "1970-01-13" and day
    "13 January 1970". The date is n days after January 1, 1970. The tasks `by_rule_*` use
    these fields.

    n: a number below one million.
    """
    day = time.gmtime(86_400 * n)
    return {
        "number": n,
        "words": spell_number(n),
        "label": int(n % 2 == 0),  # 1 if n is even, 0 if n is odd
        "date": time.strftime("%Y-%m-%d", day),
        "day": f"{day.tm_mday} {time.strftime('%B %Y', day)}",
    }


def python_source(name, split, cfg, whole):
    """Open the data source `python:` or `python:COUNT`, which needs no data files.

    The examples of `python:` are the docstrings and the manual of the local Python
    installation. The examples of `python:COUNT` are the numbers from 0 to COUNT - 1, each
    with its name in words and a date. The examples are shuffled. The first 1 % is the
    validation split, and the rest is the training split.
    """
    if name and not re.fullmatch(r"[1-9]\d{1,5}", name):
        raise UserError(
            f"python:{name} is not a data source: use python: to read the manual and "
            f"the docstrings that come with Python. To generate one example for each "
            f"number below COUNT, use python:COUNT with a COUNT from 10 to 999999."
        )

    def examples(split):
        documents = range(int(name)) if name else python_documents()
        order = permute(np.arange(len(documents)), len(documents), 6).tolist()
        held_out = max(1, len(documents) // 100)
        for n in order[:held_out] if split == "validation" else order[held_out:]:
            yield number_example(n) if name else {"text": documents[n]}

    splits = ("train", "validation") if whole else (split,)
    # The list `stamp` must change when the texts change. Python's version alone is not
    # enough, because some systems install parts of the standard library separately.
    stamp = [sys.version, digest(sorted(os.listdir(Path(os.__file__).parent)))]
    return generated_source(f"python:{name}", stamp, examples, splits)


def reverse_source(name, split, cfg, whole):
    """Open the data source `reverse:`, a toy task in which the model reverses a list.

    For example, the inputs [7, 30, 12, 9] have the targets [9, 12, 30, 7]. Each list has
    4 to 12 random ids from 3 to 34, followed by EOS.
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

    Each document has 4096 random token ids. The training split is endless, and the
    validation split has 64 documents.
    """
    size = cfg.model.vocab_size - SENTINELS - 3

    def examples(split):
        seed = 0 if split == "train" else 1
        for i in itertools.count() if split == "train" else range(64):
            ids = random_bits(seed, i, np.arange(4096)) % np.uint64(size)
            yield {"text": ids.astype(int) + 3}

    return generated_source("random:", [size], examples, [split])


def open_file(path):
    """Open a local or remote file for reading bytes."""
    if "://" not in path:
        return open(path, "rb")
    import fsspec  # imported only when needed, because the import takes 0.1 s

    return fsspec.open(path, "rb").open()


def check_regular(path):
    """Raise UserError if a local path is a FIFO (a named pipe), a socket or a device."""
    file = Path(path)
    if file.exists() and not file.is_file() and not file.is_dir():
        # Opening a FIFO would wait forever if no program writes to it. Also, a FIFO can
        # be read only once, but every start of a run reads the data again.
        raise UserError(
            f"{path} is a FIFO, a socket or a device, and not a regular file: write the "
            f"data to a regular file, and give the path of this file instead."
        )


@cache
def check_loop(folder):
    """Raise UserError if the path of a folder goes through the same folder twice.

    For example, the path books/again goes through the folder books twice if books/again
    is a link to books. The pattern "**" would follow this link 40 times, and find the
    same files 41 times.
    """
    paths = Path(folder, "file").parents  # the folder and all folders above it
    if len({path.resolve() for path in paths}) < len(paths):
        raise UserError(
            f"The path {folder} contains a symbolic link that leads back to a folder "
            f"above this link, so ** would find the same files many times: remove the "
            f"link, or name the files without **."
        )


def find_files(pattern, pipes=False):
    """Return the files that match a glob pattern, as pairs (path, [size, time]).

    The pattern is local, such as "books/*.txt", or remote, such as "gs://bucket/*.gz".
    The pairs are sorted by path. The time is the time of the last change of a local file.
    In place of the time, a remote file has a hash of the metadata that the file system
    stores. If a remote file system cannot be read, the function raises UserError.

    pipes: whether a path may be a FIFO or a device. If not, a FIFO or a device causes a
        UserError.
    """
    found = {}
    if "://" not in pattern:
        # glob.iglob never ends if a folder contains a link to itself, so check each path
        # as soon as it is found.
        for path in glob.iglob(os.path.expanduser(pattern), recursive=True):
            if "**" in pattern:
                check_loop(os.path.dirname(os.path.abspath(path)))
            if not pipes:
                check_regular(path)
            if not os.path.isdir(path):
                stat = os.stat(path)
                found[path] = [stat.st_size, stat.st_mtime_ns]
        return sorted(found.items())
    import fsspec

    try:
        system, path = fsspec.core.url_to_fs(pattern)
        infos = system.glob(path, detail=True)
    except (ImportError, ValueError, OSError) as error:
        raise UserError(
            f"{pattern} cannot be read ({error}): check whether the path is right, and "
            f"whether you have permission to read it."
        ) from error
    for path, info in infos.items():
        if info["type"] == "file":
            # Each remote file system has its own entry for the version of a file, such as
            # "etag", "ETag", "updated" or "LastModified". So hash all entries except
            # "time". In some file systems, "time" is when the file was last read.
            version = digest(info | {"time": None})
            found[system.unstrip_protocol(path)] = [info["size"], version]
    return sorted(found.items())


GROUP_BYTES = 1 << 26  # a group of small files is complete when it has 64 MiB or more
HELD_OUT_BYTES = 1 << 25  # at most 32 MiB of text are held out for validation


def check_unchanged(path, stamp):
    """Raise UserError if a local file has changed since its size and time were read.

    The folder of the token files is named after a hash of the size and time. If the file
    has changed, the name of the folder does not match the tokens.

    stamp: the size and the time of the file, as find_files returns them.
    """
    if os.path.isfile(path) and find_files(glob.escape(path)) != [(path, stamp)]:
        raise UserError(
            f"{path} has changed while it was read: run the command again when no other "
            f"program writes to this file."
        )


def group_files(files, read):
    """Combine small files into groups, and return a SourceFile for each group.

    A group is complete when it has 64 MiB (GROUP_BYTES) or more. Without groups,
    thousands of small files would become thousands of tiny token files. A damaged file
    counts as one invalid example, and the rest of this file is skipped.

    files: a list of pairs (path, [size, time]).
    read: a function that yields the examples of one file, such as read_jsonl. read(path,
        bad) yields pairs (where, example) and reports invalid examples to `bad`.
    """
    groups = []
    # `size` is the number of bytes in the last group. Start with infinity, so that the
    # first file begins a new group.
    size = math.inf
    for path, stamp in files:
        if size >= GROUP_BYTES:
            groups.append([])
            size = 0
        groups[-1].append((path, stamp))
        size += stamp[0]

    def read_group(group, bad):
        for path, stamp in group:
            try:
                yield from read(path, bad)
                check_unchanged(path, stamp)
            # Catch all exceptions, because each library raises different types of
            # exceptions for a damaged file.
            except Exception as error:
                # An exception with an errno usually means that the disk has failed, so
                # the file itself may be intact. But pyarrow, which reads parquet files,
                # sets errno for some damaged files, too.
                disk_failed = read is not read_parquet and getattr(error, "errno", None)
                if isinstance(error, UserError) or disk_failed:
                    raise
                bad(path, f"is damaged ({error})")

    return [
        SourceFile(group[0][0], group, partial(read_group, group)) for group in groups
    ]


def file_source(read, pattern, split, cfg, whole, partners=()):
    """Open the files that match a glob pattern as a data source.

    The files are read in alphabetical order. If the pattern contains "{split}", the name
    of the split is filled in. Otherwise, the first 1 % of the text, but at most 32 MiB,
    is held out for validation, and the rest is for training. At least one example is held
    out. The held-out examples are consecutive, so only the last of them are close to
    training text.

    read: a function that yields the examples of one file. pattern: the glob pattern.
    split: the name of the split. whole: whether to read all text and hold out nothing.
    partners: more files, as find_files returns them, whose text `read` yields together
    with the text of the matching files.
    """
    filled_in = pattern.replace("{split}", split)
    found = find_files(filled_in)
    if not found:
        if find_files(pattern.replace("{split}", "*")):
            raise MissingSplit(f"No file matches {filled_in}.")
        raise MissingSource(
            f"No file matches {filled_in}",
            "give --data.source the path of a file, or a quoted glob, such as "
            "'FOLDER/*'.",
        )
    files = group_files(found, read)
    if whole or "{split}" in pattern:
        return files
    # Count decompressed bytes, so that compression does not change what is held out.
    held_out = min(HELD_OUT_BYTES, text_size([*found, *partners]) // 100)

    def read_first(bad):
        seen = 0  # the number of characters or token ids in all examples so far
        examples = files[0].read(bad)
        for where, example in examples:
            if seen > held_out:  # all held-out examples have been read
                if split == "train":
                    yield where, example
                    yield from examples
                return
            if split == "validation":
                yield where, example
            for value in example.values():
                if isinstance(value, str | list):
                    seen += len(value)

    # The stamp is a list that changes when the text changes. Runs with equal stamps share
    # their token files. So add the size of the held-out text to the stamp, because a run
    # that reads the complete file needs other token files.
    first = files[0]._replace(read=read_first, stamp=[files[0].stamp, held_out])
    return [first] if split == "validation" else [first, *files[1:]]


# These limits bound the memory that reading and tokenizing need. A line of a text file
# has fewer than LINE_BYTES bytes. A document of several lines has at most
# DOCUMENT_CHARACTERS characters. A text is tokenized in parts of at most PART_CHARACTERS
# characters.
LINE_BYTES = 1 << 27
DOCUMENT_CHARACTERS = 1 << 24
PART_CHARACTERS = 1 << 20
# This table helps to explain why a file cannot be read as text. Each key holds the first
# bytes of another file format. The value names the format and says what to do.
OTHER_FILES = {
    b"\x04\x22\x4d\x18": "compressed with lz4: decompress it with `lz4 -d`",
    b"PK\3\4": "a zip archive: unpack it with `unzip`",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive: unpack it with `7z x`",
    b"PAR1": "a parquet file: write the source as parquet:FILE",
    b"ARROW1": "an Arrow file: convert it to parquet or JSON lines",
}


def open_zstd(file):
    """Return a file object that decompresses an open file in the format zstd."""
    import pyarrow  # imported only when needed, because the import takes 0.1 s

    return io.BufferedReader(pyarrow.CompressedInputStream(file, "zstd"))


# This table lists the formats of compressed text. Each suffix of a file name is mapped to
# the first bytes of the format, and to the function that opens a file of the format.
COMPRESSED = {
    ".gz": (b"\x1f\x8b", gzip.open),
    ".zst": (b"\x28\xb5\x2f\xfd", open_zstd),
    ".bz2": (b"BZh", bz2.open),
    ".xz": (b"\xfd7zXZ\0", lzma.open),
}


def open_text(path):
    """Open a text file for reading bytes, and decompress it if it is compressed.

    The function raises UserError if the file has a format that is not text, such as zip.
    """
    # Another thread tokenizes, and holds Python's global lock (the GIL) most of the time.
    # With a large buffer, reading rarely has to wait for this lock.
    file = io.BufferedReader(open_file(path), 1 << 20)
    start = file.peek(8)[:8]
    for first_bytes, kind in OTHER_FILES.items():
        if start.startswith(first_bytes):
            raise UserError(
                f"{path} is {kind}. This data source can read only text files, which may "
                f"be compressed with gzip, zstd, bzip2 or xz."
            )
    for suffix, (first_bytes, opener) in COMPRESSED.items():
        if start.startswith(first_bytes) or (start and path.endswith(suffix)):
            return opener(file)
    return file


def text_size(files):
    """Return the number of bytes of all files, after decompression.

    The caller holds out 1 % of the bytes, but at most HELD_OUT_BYTES. So more than 100
    times HELD_OUT_BYTES make no difference, and the function stops counting there,
    because decompressing many files takes long.

    files: pairs (path, [size, time]), as find_files returns them.
    """
    enough = 100 * HELD_OUT_BYTES
    total = 0
    for path, (size, _) in files:
        if not path.endswith(tuple(COMPRESSED)):
            total += size
        elif total < enough:
            # If the file is damaged, count only the bytes before the damage. The damage
            # is reported later, when the texts are read.
            with suppress(EOFError, OSError, lzma.LZMAError, zlib.error):
                with open_text(path) as file:
                    while total < enough and (part := file.read(1 << 20)):
                        total += len(part)
    return total


def read_lines(path, bad):
    """Yield the lines of a text file as pairs (line number, line).

    Line numbers start at 1. A compressed file is decompressed. A line that is not valid
    UTF-8 is reported to the function `bad`, and an empty text takes its place. All other
    lines end with a line break, except the last line of some files. The function raises
    UserError if a line is too long, or if the file is not text.
    """
    with open_text(path) as file:
        lines = iter(lambda: file.readline(LINE_BYTES), b"")
        for number, line in enumerate(lines, 1):
            if len(line) == LINE_BYTES:
                raise UserError(
                    f"{path}:{number} has {LINE_BYTES:,} bytes or more in one line, "
                    f"which would need too much memory: divide this line into shorter "
                    f"lines, or remove the line."
                )
            try:
                # Some programs write U+FEFF (the byte order mark) at the start of a file.
                # It is not part of the text.
                yield number, line.decode().removeprefix("\ufeff")
            except UnicodeDecodeError:
                bad(f"{path}:{number}", "is not UTF-8")
                yield number, ""


def text_source(name, split, cfg, whole):
    """Open the data source `text:GLOB` or `text:GLOB:lines`, which reads text files.

    For example, `text:books/*.txt` makes one document of each file.
    `text:books/*.txt:lines` makes one document of each line. Blank documents are left
    out. Compressed files are decompressed. The examples have only the field `text`. A
    file of more than DOCUMENT_CHARACTERS is divided into several documents at line ends,
    because a document must fit into memory.
    """
    pattern = name.removesuffix(":lines")
    limit = DOCUMENT_CHARACTERS if pattern == name else 0

    def read(path, bad):
        for number, text in join_lines(read_lines(path, bad), limit):
            if text.strip():
                yield f"{path}:{number}", {"text": text}

    return file_source(read, pattern, split, cfg, whole)


def join_lines(lines, limit):
    """Join consecutive lines into documents, and yield the documents.

    A document has at most `limit` characters, but a single line may be longer. So with
    limit 0, each line is a document. Each result is a pair (number of the first line,
    document).

    lines: an iterator of pairs (line number, line).
    """
    first = 1
    document = ""
    for number, line in lines:
        if len(document) + len(line) > limit:
            yield first, document
            first = number
            document = ""
        document += line
    yield first, document


def read_jsonl(path, bad):
    """Yield the examples of a file that has one JSON object on each line.

    A compressed file is decompressed. For example, C4 is published as .json.gz, and the
    corpora of HPLT are published as .jsonl.zst. Blank lines are ignored. A line that is
    not a JSON object is reported to the function `bad` and skipped. If the file does not
    begin with "{", it is of another kind, such as a table or a JSON list, and the
    function raises UserError.
    """
    for number, line in read_lines(path, bad):
        line = line.strip()
        if not line:
            continue
        where = f"{path}:{number}"
        if number == 1 and not line.startswith("{"):
            raise UserError(
                f"{path} is not a JSONL file, because the file begins with "
                f"{line!r:.60}: name a file in which each line is a JSON object, such as "
                f'{{"inputs": "a", "targets": "b"}}. If the file is a JSON list, write '
                f"each element of the list on its own line. To read a table, use "
                f"--data.source csv:FILE or tsv:FILE. To read plain text, use "
                f"--data.source text:FILE:lines, or infer.py --input FILE.txt."
            )
        try:
            example = json.loads(line)
        except (ValueError, RecursionError) as error:
            bad(where, f"is not JSON ({error})")
            continue
        if isinstance(example, dict):
            yield where, example
        else:
            bad(where, "is not a JSON object")


def read_table(delimiter, has_header, path, bad):
    """Yield the rows of a text file with a table, such as a CSV file, as examples.

    The first line names the columns, unless has_header is False. Then the names of the
    columns are their numbers, "0", "1" and so on. As usual in such tables, a value in
    double quotes may contain the delimiter and line ends. A row that has more or fewer
    values than the first row is reported to the function `bad` and skipped. If two
    columns have the same name, each row is reported.

    delimiter: the character between two values, "," or a tab.
    """
    csv.field_size_limit(LINE_BYTES)
    lines = (line for _, line in read_lines(path, bad))
    rows = csv.reader(lines, delimiter=delimiter, strict=True)
    names = None
    while True:
        where = f"{path}:{rows.line_num + 1}"  # the first line of the next row
        try:
            row = next(rows, None)
        except csv.Error as error:
            bad(where, f"is not a row of a table ({error})")
            continue
        if row is None:
            return
        if not row:  # a blank line
            continue
        if names is None and has_header:
            names = row
            continue
        names = names or list(map(str, range(len(row))))
        example = dict(zip(names, row))
        if len(example) == len(row) == len(names):
            yield where, example
        else:
            count = len(set(names))
            bad(where, f"has {len(row)} columns, but the first line names {count}")


DELIMITERS = {"csv": ",", "tsv": "\t"}


def table_source(kind, pattern, split, cfg, whole):
    """Open the data source `csv:GLOB` or `tsv:GLOB`, which reads tables in text files.

    The first line of a file names the columns. If --data.fields names the columns by
    their numbers, such as inputs=0,targets=1, the first line is an example.

    kind: "csv" or "tsv".
    """
    has_header = not any(column.isdecimal() for column in source_fields(cfg).values())
    read = partial(read_table, DELIMITERS[kind], has_header)
    return file_source(read, pattern, split, cfg, whole)


def lines_source(name, split, cfg, whole):
    """Open the data source `lines:GLOB,GLOB`, which reads two files of parallel lines.

    Line 7 of the first file and line 7 of the second file are the inputs and the targets
    of one example. Translations are usually published in this form. If each pattern
    matches several files, the files are paired in alphabetical order.
    The function raises UserError if two files do not have equally many lines.

    name: the two patterns with a comma between them, such as "{split}.de,{split}.en".
    """
    pattern, comma, other = name.partition(",")
    inputs, targets = (find_files(x.replace("{split}", split)) for x in (pattern, other))
    if not comma or inputs and len(inputs) != len(targets):
        raise UserError(
            f"lines:{name} is not a pair of files: name two files with a comma between "
            f"them, such as lines:de.txt,en.txt. Two patterns must match the same number "
            f"of files, but these patterns match {len(inputs)} and {len(targets)} files."
        )
    # The path of a file with inputs is mapped to the file with the targets.
    partners = dict(zip(dict(inputs), targets))

    def read(path, bad):
        other, stamp = partners[path]
        sides = [read_lines(file, bad) for file in (path, other)]
        pairs = itertools.zip_longest(*sides, fillvalue=(0, None))
        for (number, source), (_, target) in pairs:
            if None in (source, target):
                raise UserError(
                    f"{path} and {other} do not have equally many lines, so the lines of "
                    f"the two files cannot be paired: name two files with equally many "
                    f"lines."
                )
            if source and target:  # an empty text stands for a line that was skipped
                texts = source.rstrip("\r\n"), target.rstrip("\r\n")
                yield f"{path}:{number}", dict(zip(SIDES, texts))
        check_unchanged(other, stamp)

    files = file_source(read, pattern, split, cfg, whole, targets)
    return [file._replace(stamp=[file.stamp, targets]) for file in files]


def read_parquet(path, bad):
    """Yield the rows of a parquet file as examples.

    Each example is a dict that maps the names of the columns to the values in the row.
    """
    import pyarrow.parquet  # imported only when needed, because this takes 0.2 s

    with open_file(path) as file:
        opened = pyarrow.parquet.ParquetFile(file, page_checksum_verification=True)
        batches = opened.iter_batches(1024)
        rows = (row for batch in batches for row in batch.to_pylist())
        for number, row in enumerate(rows):
            yield f"{path} row {number}", row


def decode_bytes(value):
    """Decode all bytes in an example of TensorFlow Datasets (TFDS) as UTF-8.

    For example, [b"yes", 3] becomes ["yes", 3]. Lists and dicts may be nested.
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


def find_tfds(name, cfg):
    """Find the folder of a TensorFlow Datasets (TFDS) dataset and return its path.

    For example, "c4/en:2.2.0" is stored in the folder c4/en/2.2.0 of --data.tfds_dir.
    Without a version, as in "c4/en", the newest version is used. The name may also be the
    path of a folder. If there is no such folder, the function raises MissingSource.
    """
    from etils import epath  # epath.Path opens local and remote folders

    home = cfg.data.tfds_dir or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
    # The name "c4/en:2.2.0" becomes the path "c4/en/2.2.0". The colon of "gs://" stays.
    folder = epath.Path(home).expanduser() / re.sub(":(?!//)", "/", name)
    # The folder contains one version of the dataset, or a subfolder for each version.
    infos = [*folder.glob("dataset_info.json")] or [*folder.glob("*/dataset_info.json")]
    if infos:
        # Compare versions as lists of numbers, because 1.10.0 is newer than 1.9.0.
        folders = [info.parent for info in infos]
        return max(folders, key=lambda path: [*map(int, re.findall(r"\d+", path.name))])
    problem = f"{name} is not in {folder}"
    others = [info.parent.name for info in folder.parent.glob("*/dataset_info.json")]
    if others:
        problem += (
            f" (there is {', '.join(others)}; write --data.source tfds:NAME:VERSION)"
        )
    raise MissingSource(problem, TFDS_REMEDY)


@cache
def import_tfds():
    """Import TensorFlow Datasets (TFDS), and prevent TFDS from running foreign code.

    The file features.json of a dataset names a Python class for each field. Without this
    function, TFDS would import the module of every class that is named there, and so run
    the code of the module. After this function has run, a class that is not part of TFDS
    causes a UserError instead.
    """
    import tensorflow_datasets as tfds  # imported only when needed, as it takes 0.5 s

    connector = tfds.features.FeatureConnector
    find_class = connector.cls_from_name

    def find_own_class(name):
        if not re.fullmatch(r"tensorflow_datasets\.core\.features\.\w+\.\w+", name):
            raise UserError(
                f"The file features.json of a dataset names the Python class {name}, "
                f"which is not part of TensorFlow Datasets (TFDS). Plain T5 never runs "
                f"code that a dataset brings: prepare the dataset again with classes of "
                f"TFDS only, such as tfds.features.Text."
            )
        return find_class(name)

    connector.cls_from_name = staticmethod(find_own_class)
    return tfds


def tfds_source(name, split, cfg, whole):
    """Open a TensorFlow Datasets (TFDS) dataset that is stored on disk.

    The function never downloads a dataset. The dataset must be stored as array_record
    files or as tfrecord files, which can be read without TensorFlow. Examples that are
    missing, damaged or not UTF-8 are reported as invalid.

    name: the name of the dataset, as NAME[/CONFIG][:VERSION], or the path of its folder.
    """
    folder = find_tfds(name, cfg)
    found = find_files(f"{glob.escape(str(folder))}/*")
    try:
        info = import_tfds().builder_from_directory(folder).info
        stored_as = info.file_format.value
        if stored_as not in RECORDS:
            raise UserError(
                f"{folder} is stored in the format {stored_as}, which plain T5 cannot "
                f"read: prepare the dataset again on a machine with TensorFlow. Run "
                f"tfds.builder('NAME', file_format='array_record')"
                f".download_and_prepare()."
            )
        if split not in info.splits:
            raise MissingSplit(
                f"{folder} has no split {split} (it has {', '.join(info.splits)}): name "
                f"another source with --data.validation_source."
            )
        files = {os.path.basename(file[0]): file for file in found}
        shards = [files[name] for name in info.splits[split].filenames]
        lengths = info.splits[split].shard_lengths
    except UserError:
        raise
    except Exception as error:  # TFDS and protobuf raise many types of exceptions
        raise UserError(
            f"{folder / 'dataset_info.json'} is damaged, or a file that it names is "
            f"missing ({error!r}): copy the dataset again."
        ) from error
    # The keys of dict(shards) are the paths of the shards.
    counts = dict(zip(dict(shards), lengths))

    def decode(record):
        return decode_bytes(info.features.deserialize_example_np(record))

    files = group_files(shards, partial(RECORDS[stored_as], decode, counts))
    # dataset_info.json and features.json also determine how the records are read.
    settings = [file for file in found if file[0].endswith(".json")]
    return [file._replace(stamp=[file.stamp, settings]) for file in files]


def hf_source(name, split, cfg, whole):
    """Open a dataset of the Hugging Face Hub, such as hf:allenai/c4:en.

    The examples are streamed, so training can begin before the dataset is downloaded.
    Each shard of the dataset becomes a SourceFile. If the library `datasets` is not
    installed or cannot open the dataset, the function raises UserError.

    name: the name of the dataset, as NAME or NAME:CONFIG, or the path of a local folder.
    """
    try:
        import datasets

        if int(datasets.__version__.partition(".")[0]) < 4:
            raise ImportError
    except ImportError:
        raise UserError(
            "A data source that begins with hf: needs version 4 or newer of the Python "
            "library datasets, because older versions may run code from a dataset. To "
            "install this library, run pip install '.[hf]'."
        ) from None
    dataset, _, config = name.partition(":")
    try:
        builder = datasets.load_dataset_builder(dataset, config or None)
        stream = builder.as_streaming_dataset(split=split)
    except Exception as error:  # the library raises many types of exceptions
        kind = MissingSplit if "split" in str(error) else UserError
        raise kind(
            f"The split {split} of hf:{name} cannot be opened ({error}): check the name, "
            f"the split and the network connection."
        ) from error

    def read(shard, bad):
        for row, example in enumerate(stream.shard(stream.num_shards, shard)):
            yield f"hf:{name} {split} shard {shard} row {row}", example

    # The stamp must change when the dataset changes. A path on the hub contains the
    # version of the dataset. For other files, origin_metadata holds the time of a local
    # file, or the version that a web server reports.
    files = (builder.config.data_files or {}).values()
    stamp = [digest([[list(paths), paths.origin_metadata] for paths in files])]
    return [
        SourceFile(f"shard {shard}", stamp, partial(read, shard))
        for shard in range(stream.num_shards)
    ]


# A CRC is the remainder of a polynomial division. Entry b of this lookup table is the
# remainder of the byte b. Each step of the division handles one bit. 0x82F63B78 is the
# polynomial of CRC-32C, with its bits in reverse order.
CRC32C_TABLE = np.arange(256)
for _ in range(8):
    CRC32C_TABLE = CRC32C_TABLE >> 1 ^ (CRC32C_TABLE & 1) * 0x82F63B78


def crc32c(content):
    """Return the CRC-32C checksum of bytes, an integer of 32 bits.

    tfrecord files store a CRC-32C checksum for each record. Python's zlib.crc32 computes
    a different checksum.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    table = CRC32C_TABLE.tolist()
    crc = 0xFFFFFFFF
    for byte in content:
        crc = crc >> 8 ^ table[crc & 255 ^ byte]
    return crc ^ 0xFFFFFFFF


def read_tfrecords(decode, counts, path, bad):
    """Yield the examples of a tfrecord file.

    In the file, 12 bytes precede each record: its length (8 bytes) and a checksum of the
    length (4 bytes), which is ignored. After the record, 4 bytes hold the checksum of the
    record. A damaged record is reported to the function `bad` and skipped. If the file
    ends too early, the function raises EOFError.

    decode: a function that converts the bytes of a record to an example, a dict.
    counts: a dict {path: number of records} of the files whose numbers are known.
    """
    with open_file(path) as file:
        for number in itertools.count():
            header = file.read(12)
            if not header and number >= counts.get(path, 0):
                return
            size = int.from_bytes(header[:8], "little")
            record = file.read(min(size, 1 << 31) + 4)
            if len(header) < 12 or len(record) != size + 4:
                raise EOFError(f"the file ends before the end of record {number}")
            where = f"{path} record {number}"
            try:
                crc = crc32c(record[:-4])
                # tfrecord files do not store the CRC itself. They rotate its 32 bits by
                # 15 places, and add a constant.
                crc = ((crc >> 15 | crc << 17) + 0xA282EAD8) % (1 << 32)
                if crc != int.from_bytes(record[-4:], "little"):
                    raise ValueError("the checksum is wrong")
                example = decode(record[:-4])
            # Catch all exceptions, because protobuf and `decode` raise different types of
            # exceptions.
            except Exception as error:
                bad(where, f"is damaged ({error})")
            else:
                yield where, example


def read_array_records(decode, counts, path, bad):
    """Yield the examples of an array_record file, as read_tfrecords does."""
    from array_record.python.array_record_module import ArrayRecordReader

    reader = ArrayRecordReader(path)
    for number in range(counts[path]):
        where = f"{path} record {number}"
        try:
            reader.seek(number)
            example = decode(reader.read())
        except Exception as error:  # the libraries raise different types of exceptions
            bad(where, f"is missing or damaged ({error})")
        else:
            yield where, example


# The formats of TFDS datasets that plain T5 can read.
RECORDS = {"array_record": read_array_records, "tfrecord": read_tfrecords}


def decode_seqio(features, record):
    """Convert a record of a cache of the library SeqIO to an example.

    features: the shape of each field, as in the info file of the cache. A field with the
        shape [] holds a single value. Every other field holds an array of ids or a list
        of texts.
    record: the bytes of the record.
    """
    from tensorflow_datasets.proto import tf_example_generated_pb2

    example = {}
    stored = tf_example_generated_pb2.Example.FromString(record)
    for key, feature in stored.features.feature.items():
        values = [value.decode() for value in feature.bytes_list.value]
        if not values:
            values = np.array([*feature.int64_list.value, *feature.float_list.value])
        if features.get(key, {}).get("shape") == []:
            (values,) = values
        example[key] = values
    return example


def seqio_source(name, split, cfg, whole):
    """Open a folder in which the library SeqIO has cached the examples of a task.

    For example, the datasets of T0 (Sanh et al. 2022) are published as such folders. The
    folder must contain info.SPLIT.json, all tfrecord files of the split, and the file
    COMPLETED, which SeqIO writes last. Otherwise, the function raises MissingSource,
    MissingSplit or UserError.

    name: the path of the folder, or a glob pattern for several folders.
    """
    infos = find_files(f"{name}/info.{split}.json")
    if not infos:
        problem = f"{name} has no info.{split}.json"
        if find_files(f"{name}/info.*.json"):
            raise MissingSplit(f"{problem}, but other splits.")
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
                f"promises {info['num_shards']} shards: copy the missing files to this "
                f"folder."
            )
        for shard, (size, _) in shards:
            if not size:
                note(
                    f"warning: the file {shard} is empty, so it gives no examples. If "
                    f"the original of this file is not empty, copy the original again."
                )
        decode = partial(decode_seqio, info["features"])
        files += group_files(shards, partial(read_tfrecords, decode, {}))
    return files


SOURCES = configs.SOURCES
SOURCES |= {
    "python": python_source,
    "text": text_source,
    "tfds": tfds_source,
    "hf": hf_source,
    "jsonl": partial(file_source, read_jsonl),
    "parquet": partial(file_source, read_parquet),
    "csv": partial(table_source, "csv"),
    "tsv": partial(table_source, "tsv"),
    "lines": lines_source,
    "seqio": seqio_source,
    "reverse": reverse_source,
    "random": random_source,
}
# This table maps the suffix of a file name to the kind of data source that usually reads
# such a file. For example, the source for a.csv is csv:a.csv.
SUFFIX_KINDS = {
    ".jsonl": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".txt": "text",
}


def file_kind(path):
    """Return the kind of data source that reads a file, such as "csv" for "a.csv.gz".

    The kind follows from the suffix of the file name. Without a known suffix, the kind is
    "jsonl".
    """
    suffixes = [suffix for suffix in Path(path).suffixes if suffix in SUFFIX_KINDS]
    return SUFFIX_KINDS[suffixes[-1]] if suffixes else "jsonl"


# The data sources of these kinds define their own splits, which may have any names.
OWN_SPLITS = ("tfds", "hf", "seqio")


def open_source(source, split, cfg, whole=False):
    """Open a data source such as "jsonl:a.jsonl", and return the SourceFiles of a split.

    If `whole` is true, a source without splits is read completely, and nothing is held
    out for validation. The function raises UserError if the source is invalid. It raises
    MissingSource or MissingSplit if the source or the split does not exist.

    source: the data source in the form KIND:NAME. split: the name of the split.
    """
    kind, _, name = source.partition(":")
    if kind not in SOURCES:
        likely = "lines" if "," in source else file_kind(source)
        raise UserError(
            f"{source!r} is not a data source, because it does not begin with the kind "
            f"of the source: set --data.source to KIND:NAME, such as "
            f"{likely}:{name or source or 'FILE'}. The kinds are {':, '.join(SOURCES)}:."
        )
    has_splits = kind in OWN_SPLITS or "{split}" in name
    if not has_splits and split not in ("train", "validation"):
        raise MissingSplit(f"{source} has no {split} split.")
    files = SOURCES[kind](name, split, cfg, whole)
    # If a recipe file defines this kind of source, the code of the recipe file decides
    # which texts are read. So add a hash of this code to each stamp, the list that
    # changes when the texts change.
    code = configs.TASK_CODE.get(f"{kind}:", [])
    files = [file._replace(stamp=[*file.stamp, *code]) for file in files]
    return rename_fields(files, cfg)


def rename_fields(files, cfg):
    """Return SourceFiles whose examples have the fields that --data.fields names.

    For example, --data.fields text=content gives each example the field `text`, with the
    value of its field `content`.
    """
    fields = source_fields(cfg).items()

    def read(file, bad):
        for where, example in file.read(bad):
            example |= {new: example[old] for new, old in fields if old in example}
            yield where, example

    return [file._replace(read=partial(read, file)) for file in files]


class InvalidExamples:
    """Stop the program at an invalid example, or count the example and continue.

    An InvalidExamples object `bad` is called like a function, for example as in
    bad("a.jsonl:3", "is not JSON"). With --data.on_error stop, the first call raises
    UserError. With --data.on_error skip, each call adds 1 to `count`.

    where: the place of the example, such as "a.jsonl:3". what: the problem as the end of
    a sentence, such as "is not JSON".
    """

    def __init__(self, on_error):
        self.stop = on_error == "stop"
        self.count = 0

    def __call__(self, where, what):
        if self.stop:
            raise UserError(
                f"{where} {what}: correct this part of the data, or skip all invalid "
                f"examples with --data.on_error skip."
            )
        self.count += 1


# ---- tasks -----------------------------------------------------------------------------


class PrefixLM(Objective):
    """Cut each text at a random place, and learn to predict the end from the start.

    For example, the inputs may be [5, 6] and the targets [7, 8, 9]. This objective is
    called prefix language modeling (prefix_lm in the t5 library).
    """

    def length(self, data):
        return data.inputs_length - 1

    def make(self, chunks, keys, tokenizer, data):
        # The last possible cut is before the last token, so the targets are never empty.
        longest = np.array([len(ids) - 1 for (ids,) in chunks], int)
        random = (keys >> np.uint64(32)).astype(int)  # random integers below 2**32
        cuts = np.minimum(1 + (random * longest >> 32), longest).tolist()
        return [(ids[:cut], ids[cut:]) for (ids,), cut in zip(chunks, cuts)]


# T5 treats every task as text-to-text (Raffel et al. 2020, section 2.4). The inputs begin
# with the name of the task, and each text is preceded by the name of its field. A class
# is written as a word. In the task RTE, for example, the model decides whether sentence1
# implies sentence2:
#
#     source   {"sentence1": "A cat sleeps.", "sentence2": "A cat runs.", "label": 1}
#     inputs   rte sentence1: A cat sleeps. sentence2: A cat runs.
#     targets  not_entailment
#
# A *format* is a function that turns an example of the source into a list of dicts. Each
# dict has the fields inputs and targets, and the fields that metrics need. Usually the
# list has one dict. It has several if the example gives several training examples, and it
# is empty if the example is left out. The formats below give the same strings as
# t5/data/preprocessors.py. Appendix D of the paper shows an example of each task.


def as_it_is(example):
    """Return the example unchanged, in a list.

    Objectives such as span corruption need only the field `text` of the example.
    """
    return [example]


def text_to_text(example):
    """Format an example that already has the fields inputs and targets.

    The two fields may be texts or lists of token ids. A SeqIO cache may also hold the
    texts of these ids, in inputs_pretokenized and targets_pretokenized. Then the texts
    replace the ids, because texts can be tokenized with any vocabulary.
    """
    texts = {
        key: example[f"{key}_pretokenized"]
        for key in Pairs.features
        if f"{key}_pretokenized" in example
    }
    return [example | texts]


def template(inputs, targets, labels=()):
    """Return a function that formats examples as inputs and targets.

    The returned function fills the {field} placeholders of two templates. For example,
    template("question: {q}", "{a}") uses the fields q and a of an example.

    inputs: the template of the inputs. targets: the template of the targets. labels: the
    words for the classes 0, 1, ... of a classification task. The field `label` of an
    example is the number of a class, and the placeholder {label} becomes the word. The
    label -1 means that the dataset does not publish the label. As in the t5 library, the
    word for this label is "<unk>".

    If the example has the field `idx`, the formatted example keeps this field.
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
    """Format an example of STS-B, which asks how similar two sentences are.

    The target is the similarity as text, rounded to a multiple of 0.2. For example, 3.84
    becomes "3.8". The similarity is between 0 and 5.
    """
    score = np.round(np.float32(example["label"]) * 5) / 5
    fill = template("stsb sentence1: {sentence1} sentence2: {sentence2}", "{label:.1f}")
    return fill(example | {"label": score})


def format_multirc(example):
    """Format an example of MultiRC, which asks whether an answer is right.

    The inputs contain a question, an answer and a paragraph, without HTML tags. The
    targets are "True" or "False". The metric groups all answers to the same question, so
    the indices of paragraph, question and answer are kept.
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
    """Format an example of ReCoRD, which asks for a missing name in a sentence.

    The inputs contain the sentence, the possible names (entities) and a passage. Each
    correct answer gives one formatted example, and all of them have the same inputs. In
    the passage, the marker @highlight precedes each bullet point. The bullet points
    become sentences.
    """
    # Remove the markers @highlight. Write a period in place of a marker if no punctuation
    # ends the text before the marker.
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

    The question is which noun a pronoun refers to. The inputs mark the pronoun with
    asterisks, as in "wsc: The cup fell off the table and *it* broke". The targets are the
    noun that the example suggests, such as "The cup".

    only_true: whether to leave out examples that suggest a wrong noun. Training leaves
    out these examples, so that the model does not learn wrong nouns.
    """
    if only_true and not example["label"]:
        return []
    words = example["text"].split(" ")
    position = example["span2_index"]
    pronoun = example["span2_text"]
    # In one published example, span2_index is the index of the word before the pronoun.
    # So search for the pronoun from this word on.
    position += [word.startswith(pronoun) for word in words[position:]].index(True)
    before = " ".join(words[:position])
    after = " ".join(words[position:]).removeprefix(pronoun)
    # Remove the space after the pronoun. In one published example, punctuation follows
    # the pronoun instead of a space.
    after = after[1:] if after.startswith(" ") else after.rstrip()
    # Mark the place of the pronoun with X, then replace X by the pronoun in asterisks. As
    # in the t5 library, any other " X " in the text is replaced, too.
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

    The question is which noun a pronoun refers to. The inputs begin with "wsc:" and mark
    the first occurrence of the pronoun with asterisks, as in the Winograd schema
    challenge. The targets are the noun.
    """
    pattern = rf" ({example['pronoun']})( |\.|,)"
    text = re.sub(pattern, r" *\1*\2", example["sentence"], count=1)
    answer = example["candidates"][example["label"]]
    return [{"inputs": f"wsc: {text}", "targets": answer}]


def merge_spaces(text):
    """Replace each run of white space in a text by one space."""
    return re.sub(r"[ \t\n\f\r]+", " ", text)


def separate_punctuation(text):
    """Put spaces around each ASCII punctuation character of a text.

    For example, "yes,no" becomes "yes , no". Several spaces in a row become one space.
    """
    return merge_spaces(re.sub(r"([!-/:-@\[-`{-~])", r" \1 ", text))


def format_squad(example):
    """Format an example of SQuAD, which asks a question about a paragraph (the context).

    The target is the first answer. The field `answers` keeps all answers, because the
    metric accepts any of them.
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
    """A task is a data source, a format for its examples, and metrics.

    The dict TASKS maps names such as "glue_rte_v002" to Tasks. A recipe file may add its
    own tasks to TASKS.
    """

    source: str = ""  # such as "tfds:glue/rte:1.0.0"
    # This function turns an example of the source into a list of dicts, each with the
    # fields inputs and targets.
    format: Callable = text_to_text
    # These metrics evaluate the task, for example ("bleu",). Each metric is a name in
    # evaluate.METRICS, or a function (targets, predictions) that returns a dict of
    # numbers.
    metrics: tuple = ()
    choices: tuple = ()  # the words for classes 0, 1, ..., such as ("no", "yes")
    # This function is applied to targets and predictions before the metrics compare them.
    # It is a name in evaluate.POSTPROCESSORS, such as "label", or the function itself.
    postprocess: str | Callable = ""
    splits: tuple = ("train", "validation", "test")  # splits of the source
    objective: Objective = Pairs()
    inputs_eos: bool = True  # whether inputs end with EOS, as in T5 but not in T0
    # This says whether a text still ends with EOS after truncation, as in T5 but not T0.
    eos_after_trim: bool = True


# This text defines the tasks whose format is a template. Each task has three lines:
#
#     name   source   metrics (separated by commas, or -)   splits (if not all three)
#         template of the inputs
#         template of the targets, or the words for classes 0, 1, ... separated by |
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
    """Parse a text that defines tasks, such as CATALOGUE.

    Each task has three lines, and a blank line separates two tasks. The result is a dict
    that maps the name of each task to its Task.
    """
    tasks = {}
    for entry in text.strip().split("\n\n"):
        first_line, inputs, targets = map(str.strip, entry.split("\n"))
        name, source, metrics, *splits = first_line.split()
        metrics = re.findall(r"\w+", metrics)
        splits = tuple(splits) or Task().splits
        task = Task(source, template(inputs, targets), tuple(metrics), splits=splits)
        labels = tuple(targets.split(" | "))
        if len(labels) > 1:
            fill = template(inputs, "{label}", labels)
            task = task._replace(format=fill, choices=labels, postprocess="label")
        tasks[name] = task
    return tasks


# configs.py defines these two dicts, because configs.py also loads recipe files, which
# may add tasks and mixtures.
TASKS, MIXTURES = configs.TASKS, configs.MIXTURES
TASKS |= read_catalogue(CATALOGUE)
TASKS |= {
    # The first three tasks are meant for your own texts, which --data.source names.
    "span_corruption": Task("python:", as_it_is, objective=SpanCorruption()),
    "prefix_lm": Task("python:", as_it_is, objective=PrefixLM()),
    "text_to_text": Task(),
    "c4_v220_span_corruption": Task(
        "tfds:c4/en:2.2.0", as_it_is, objective=SpanCorruption()
    ),
    "c4_v220_prefix_lm": Task("tfds:c4/en:2.2.0", as_it_is, objective=PrefixLM()),
    # The formats of the tasks below are functions, because a template is not enough.
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
        partial(format_wsc, True),
        splits=("train",),
    ),
    "super_glue_wsc_v102_simple_eval": Task(
        "tfds:super_glue/wsc.fixed:1.0.2",
        partial(format_wsc, False),
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
# is sampled with the probability rate / (sum of the rates). In {"a": 3, "b": 1}, task a
# gives three of four examples. A task with the rate 0 is evaluated together with the
# mixture, but the model is not trained on this task. A rate is a number or a BySize. A
# mixture may also be a function that takes the Config and returns such a dict, or a
# BySizes, which computes all rates from the sizes of all tasks.


class BySize(NamedTuple):
    """A sampling rate that grows with the number of training examples of a task.

    The rate is min(examples * scale, maximum) ** (1 / temperature). The maximum keeps
    large tasks from dominating the mixture. A temperature above 1 samples small tasks
    more often. Section 3.5.2 of Raffel et al. 2020 describes these rates.
    """

    maximum: float = math.inf
    temperature: float = 1.0
    scale: float = 1.0

    def of(self, examples):
        return min(examples * self.scale, self.maximum) ** (1 / self.temperature)


class BySizes(NamedTuple):
    """A mixture whose rates are a function of the sizes of all its tasks at once.

    The size of a task is the number of its training tokens. For example,
    BySizes(("german", "welsh"), partial(unimax, budget=1e9)) samples two tasks
    by UniMax.

    tasks: the names of the tasks, which are not mixtures.
    rates: a function that takes a dict from task to size, and returns a dict from task to
        rate.
    """

    tasks: tuple
    rates: Callable


def unimax(sizes, budget, epochs=1):
    """Return the sampling rates of UniMax, as a dict from task to rate.

    UniMax (Chung et al. 2023) samples all languages equally often, but repeats no
    language more than `epochs` times. If a small language cannot use its equal share of
    the budget, the rest of this share is divided among the larger languages. The rate of
    a language is the number of its tokens that training uses.

    >>> unimax({"german": 900, "welsh": 100, "swiss": 400}, budget=1000, epochs=2)
    {'welsh': 200, 'swiss': 400.0, 'german': 400.0}

    sizes: a dict from task to the number of its tokens. The paper counts characters.
    budget: the number of tokens of all tasks together that training uses.
    """
    rates = {}
    for number, task in enumerate(sorted(sizes, key=sizes.get)):
        equal_share = (budget - sum(rates.values())) / (len(sizes) - number)
        rates[task] = min(sizes[task] * epochs, equal_share)
    return rates


# This table lists the datasets of T0 (Sanh et al. 2022). Each line has the name of a
# dataset, the number of its training examples, and its groups. For example, glue_mrpc has
# 3668 examples and is in the group train. The list agrees with t0/datasets.csv in the
# repository bigscience-workshop/t-zero.
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
# The datasets of T0 belong to groups, such as "train" and "eval". Each mixture of T0
# consists of all datasets in the groups that this dict names.
T0_MIXTURES = {
    "t0_train": "train",
    "t0+_train": "train gpt",
    "t0++_train": "train gpt super_glue",
    "t0_train_score_eval": "train",
    "t0_eval_score_eval": "eval",
    "bias_fairness_eval_score_eval": "bias",
}
T0_CAP = 500_000  # larger datasets count as if they had 500,000 examples


def t0_mixture(name, cfg):
    """Return the sampling rates of a T0 mixture, as a dict from task to rate.

    The tasks are the folders of the dataset collection P3. Each folder is named
    DATASET_TEMPLATE, and holds the examples of one dataset, formatted with one prompt
    template. The rate of a task is the number of examples in its dataset. If this number
    is above T0_CAP, T0_CAP is divided among the templates of the dataset.

    A folder whose name ends in _score_eval is meant for rank classification. Mixtures
    whose names end in _score_eval consist of these folders. These mixtures are only
    evaluated, so every rate is 1.

    name: a key of T0_MIXTURES. cfg: the Config.
    """
    is_scored = name.endswith("_score_eval")
    folders = [
        folder
        for folder in sorted(p3_sources(cfg))
        if folder.endswith("_score_eval") == is_scored
    ]
    if not folders:
        raise UserError(
            "The mixtures of T0 need the dataset collection P3 (bigscience/P3): set "
            "--data.source to seqio:DIR or parquet:DIR. DIR is the folder that contains "
            "one folder for each prompt of P3."
        )
    rates = {}
    for row in T0_DATASETS.strip().splitlines():
        dataset, size, *roles = row.split()
        templates = [folder for folder in folders if folder.startswith(f"{dataset}_")]
        rate = int(size)
        if is_scored:
            rate = 1
        elif rate > T0_CAP and templates:
            rate = T0_CAP // len(templates)
        if set(roles) & set(T0_MIXTURES[name].split()):
            rates |= dict.fromkeys(templates, rate)
    # T0 leaves out the task gigaword_summarize_, because the published cache of this task
    # is broken. Remove the task only now, because T0 counts it as a template when T0_CAP
    # is divided among the templates.
    rates.pop("gigaword_summarize_", None)
    return dict(sorted(rates.items()))


# The dataset collection P3 may be stored as SeqIO caches or as parquet files. For each
# format, a dict maps a glob pattern to a suffix. If a folder of P3 has files that match
# the pattern, the path of the folder and the suffix form a data source. For example, the
# data source may be "parquet:data/p3/trec_a/{split}/*.parquet".
P3_FILES = {
    "seqio": {"info.*.json": ""},
    "parquet": {"*.parquet": "/*{split}*.parquet", "*/*.parquet": "/{split}/*.parquet"},
}


def names_p3(cfg):
    """Return whether --data.source may name the folder of the dataset collection P3.

    This is possible if the source is of the kind seqio or parquet, as in seqio:data/p3.
    """
    return cfg.data.source.partition(":")[0] in P3_FILES


def p3_sources(cfg, folder="*"):
    """Return a dict from the names of P3 folders to their data sources.

    P3 is a collection of datasets with a folder for each task. For example, the folder
    trec_a may have the data source "seqio:data/p3/trec_a". If the kind of --data.source
    is neither seqio nor parquet, the dict is empty.

    folder: the name of a P3 folder, or "*" for all folders.
    """
    kind, _, name = cfg.data.source.partition(":")
    root = name.removesuffix("*").rstrip("/")
    sources = {}
    for files, splits in P3_FILES.get(kind, {}).items():
        for path, _ in find_files(f"{root}/{folder}/{files}"):
            name = path.split("/")[-2 - files.count("/")]  # the folder of P3
            sources[name] = f"{kind}:{root}/{name}{splits}"
    return sources


# The mixtures of T5 and T0 have the same names, tasks and rates as in the original code
# (t5/data/mixtures.py and t0/tasks.py).
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
MIXTURES |= {name: partial(t0_mixture, name) for name in T0_MIXTURES}


def mixture_rates(name, cfg, count=lambda task, what: 1, within=()):
    """Return the sampling rate of each task in a mixture, as a dict from task to rate.

    If a mixture contains another mixture, the tasks of the inner mixture share its rate.
    For example, if the inner mixture has the rate 6 and two equal tasks, each of these
    tasks gets the rate 3. A single task has the rate 1. If the mixture is not a valid
    dict, the function raises UserError.

    name: the name of a mixture or of a single task. count: a function that returns how
    many training "documents" or "tokens" a task has. It is called only for a BySize or
    a BySizes. within: the names of the mixtures that contain this mixture.
    """
    if name not in MIXTURES:
        return {name: 1.0}
    if name in within:
        raise UserError(
            f"The mixture {name} contains itself, directly or in an inner mixture: "
            f"correct its entry in MIXTURES."
        )
    entries = MIXTURES[name]
    try:
        if isinstance(entries, BySizes):
            entries = entries.rates(
                {task: count(task, "tokens") for task in entries.tasks}
            )
        entries = dict(entries(cfg) if callable(entries) else entries)
    except UserError:
        raise
    except Exception as error:  # a function of a recipe file may raise any exception
        raise UserError(
            f"The entry of the mixture {name} in MIXTURES is not a dict of rates "
            f"({error!r}): correct this entry, as in {{'task_a': 2, 'task_b': 1}}."
        ) from error
    rates = {}
    for member, rate in entries.items():
        if isinstance(rate, BySize) and member not in MIXTURES:
            rate = rate.of(count(member, "documents"))
        if not isinstance(rate, int | float) or not 0 <= rate < math.inf:
            raise UserError(
                f"The mixture {name} has the invalid rate {rate} for {member}: use a "
                f"finite number that is 0 or higher. The rate of a single task may also "
                f"be a data.BySize with a maximum."
            )
        inner = mixture_rates(member, cfg, count, (*within, name))
        total = sum(inner.values())
        for task, inner_rate in inner.items():
            rates[task] = rates.get(task, 0.0) + rate * inner_rate / total
    if not any(rates.values()):
        raise UserError(
            f"The mixture {name} has no task with a rate above 0: raise the rate of at "
            f"least one task."
        )
    return rates


def find_task(name, cfg):
    """Return the Task with a given name.

    The name is a key of TASKS, a folder of the dataset collection P3, or a data source
    such as "jsonl:a.jsonl". A folder of P3 is found only if --data.source names P3. A
    data source must have the fields inputs and targets.

    If the name equals --data.task, the flag --data.source replaces the source of the
    task. If the task does not exist, the function raises UserError.
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
            f"TASKS[{name!r}] is not a valid task ({task!r:.200}): in the recipe file, "
            f"give a data.Task whose objective is a data.Objective."
        )
    if cfg.data.source and cfg.data.task == name:
        task = task._replace(source=cfg.data.source, splits=Task().splits)
    return task


def check_tasks(cfg):
    """Raise UserError if a task is unknown, or --data.source is set for a mixture.

    The tasks of a mixture have their own data sources, except in the mixtures of T0.
    """
    data = cfg.data
    # The tasks of a mixture have their own sources, so --data.source must not be set.
    # Only the mixtures of T0 need --data.source, which names the folder of P3 (T0's
    # datasets).
    other_source = data.validation_source or data.source and not names_p3(cfg)
    if data.task in MIXTURES and other_source:
        raise UserError(
            f"--data.source and --data.validation_source cannot be used with the mixture "
            f"{data.task}, because a mixture's tasks have their own sources: leave out "
            f"these flags."
        )
    for task in dict.fromkeys([*mixture_rates(data.task, cfg), *evaluated_tasks(cfg)]):
        find_task(task, cfg)


def open_task(name, split, cfg):
    """Return the Task with a given name and the SourceFiles of one split.

    If --data.validation_source is set, the validation split comes from this source. Then
    the complete source of the task can be used for training. If the split does not exist,
    the function raises MissingSplit. If the data source does not exist, the function
    raises MissingSource.
    """
    task = find_task(name, cfg)
    validation_source = cfg.data.validation_source
    if split == "validation" and validation_source:
        return task, open_source(validation_source, split, cfg, whole=True)
    if split not in task.splits:
        raise MissingSplit(f"{name} has no {split} split.")
    return task, open_source(task.source, split, cfg, whole=bool(validation_source))


def open_all(wanted):
    """Open the splits of several tasks, and collect the errors.

    The first result is a dict from the name of each task to a pair (Task, SourceFiles).
    The second result is a list with a MissingSplit error for each task that lacks its
    split. If data sources are missing, one MissingSource error names all of them.

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
        # Several sources may have the same remedy. dict.fromkeys removes duplicates and
        # keeps the order.
        remedies = dict.fromkeys(missing_sources.values())
        raise MissingSource(";\n".join(missing_sources), " ".join(remedies))
    return opened, missing_splits


def evaluated_tasks(cfg):
    """Return the names of the tasks that a run evaluates.

    The flag --data.eval_tasks names the tasks. If this flag is empty, --data.task is
    used. A mixture stands for all of its tasks.
    """
    names = (cfg.data.eval_tasks or cfg.data.task).split(",")
    return [task for name in names for task in mixture_rates(name.strip(), cfg)]


def open_tasks(cfg, split="train"):
    """Open the tasks that a run trains on.

    The result is a dict from the name of each task to a pair (Task, SourceFiles). Tasks
    with the rate 0 are left out, because the model is not trained on them. If the run
    also evaluates, the evaluated tasks are opened, too. So one error message names all
    missing sources before training begins.
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

    For example, --data.fields text=content gives {"text": "content"}. The field `content`
    of the source is then used as `text`.
    """
    fields = cfg.data.fields
    try:
        # dict() raises ValueError unless each pair consists of two names.
        return dict(
            re.split(" *= *", pair.strip()) for pair in fields.split(",") if fields
        )
    except ValueError:
        raise UserError(
            f"--data.fields {fields} is not valid: use text=NAME or inputs=A,targets=B, "
            f"where NAME, A and B are fields of the source."
        ) from None


def formatted_examples(source_file, bad, task, size=math.inf):
    """Read the examples of a SourceFile, and yield them in the format of a task.

    Each result is a tuple (where, number, row, texts). `where` is the place of the
    example for messages, such as "a.jsonl:3". `number` counts the examples of the
    SourceFile from 0. `row` is the formatted example as a dict. `texts` holds the text or
    the array of token ids for each feature of the training objective. Examples without
    text are left out.

    bad: a function to which invalid examples are reported. size: the size of the
    vocabulary. Token ids must be below this size.
    """
    features = task.objective.features
    for number, (where, example) in enumerate(source_file.read(bad)):
        try:
            for row in task.format(example):
                texts = tuple(row.get(feature) for feature in features)
                reasons = [invalid_reason(text, size) for text in texts]
                invalid = [pair for pair in zip(features, reasons) if pair[1]]
                if invalid:
                    feature, reason = invalid[0]
                    bad(
                        where,
                        f"has {reason} in {feature} (its fields are {', '.join(row)}; "
                        f"choose one with --data.fields {feature}=NAME)",
                    )
                elif any(
                    text.strip() if isinstance(text, str) else len(text) for text in texts
                ):
                    yield where, number, row, texts
        except UserError:
            raise
        except Exception as error:  # a format in a recipe file may raise any exception
            missing = isinstance(error, KeyError)
            problem = f"the field {error} is missing" if missing else repr(error)
            fields = ", ".join(map(str, example))
            bad(where, f"does not fit the task: {problem} (its fields are {fields})")


def invalid_reason(value, size):
    """Return why a value cannot be tokenized, or None if it can be tokenized.

    Texts and lists of token ids are valid values. The reason completes a sentence that
    begins with "The example has". For example, "no text" is a reason.

    value: a field of an example. size: the size of the vocabulary. Token ids must be
    below this size.
    """
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return "half of a character (a lone surrogate)"
        return None
    try:
        ids = np.asarray(value)
    # NumPy raises ValueError if the value is a list of lists of different lengths, and
    # OverflowError if a number is too large.
    except (ValueError, OverflowError):
        return "no text"
    if ids.ndim != 1 or len(ids) and ids.dtype.kind not in "iu":
        return "no text"
    if len(ids) and not 0 <= ids.min() <= ids.max() < size:
        return f"ids from {ids.min()} to {ids.max()} (the vocabulary has {size} ids)"
    return None


# ---- token files -----------------------------------------------------------------------
# Text is tokenized once, and the token ids are stored in files. A shard is a set of three
# files with the tokens of some consecutive documents. The shards of a source are in the
# folder prepared/SOURCE-HASH. For example, shard 3 of its first SourceFile consists of:
#
#     00000-003.ids   the token ids of all documents, one document after the other
#     00000-003.ends  int64 [documents, features], the end of each text in the .ids file
#     00000-003.json  metadata: counts, checksums, and where the next shard begins
#
# The .json file is written last, so it marks the shard as complete.
#
# If data.prepared_dir is remote, such as gs://bucket/prepared, the shards are written to
# this folder. The .ids and .ends files are memory-mapped, which needs a local disk. So
# each host copies those that it needs to a local folder.
#
# The first shard is small, so training can begin soon. While training uses one shard, the
# next shard is tokenized in the background. Where one shard ends and the next begins
# depends only on the source and the vocabulary.

# The first shard (a set of token files) has about 262,000 tokens. Later shards grow to
# about 34 million tokens.
FIRST_SHARD_TOKENS = 1 << 18
SHARD_TOKENS = 1 << 25
ENCODE_CHARACTERS = 1 << 21  # tokenize texts in batches of about two million characters
# Every text also needs memory for Python objects. So a text of n characters counts as
# n + 100 characters.
TEXT_OVERHEAD = 100
SHARD_METADATA = {
    "documents": int,
    "tokens": int,
    "unknown": int,  # how many tokens are the unknown token (UNK)
    "skipped": int,  # how many invalid examples were skipped
    "ids": int,  # CRC-32 checksum of the .ids file, which holds the token ids
    "ends": int,  # CRC-32 checksum of the .ends file, which holds the ends of the texts
    # The next shard begins at this position, the list [file, shard, example]. The list
    # is empty if this shard is the last one.
    "next": [int],
}
# Only one background thread at a time may tokenize the next shard.
PREFETCH_LOCK = threading.Semaphore()


def prepared_path(source, identity, cfg):
    """Return the path at which the tokens or the vocabulary of a source are stored.

    For example, the tokens of jsonl:a.jsonl are in the folder
    prepared/jsonl-a.jsonl-52b6c81f0e. The name ends with a hash of `source` and
    `identity`. So a run with other settings never reads these files.

    source: the name of the source.
    identity: a JSON value with all settings that the stored files depend on.
    """
    slug = re.sub(r"[^\w.]+", "-", source).strip("-")[-40:]
    name = f"{slug}-{digest([source, identity])[:10]}"
    return configs.to_path(cfg.data.prepared_dir) / name


def local_folder(folder):
    """Return the local folder for the copies of the files in a folder, as a Path.

    The files of gs://bucket/prepared, for example, are copied to the folder
    ~/.cache/plain_t5/prepared/gs/bucket/prepared. A local folder needs no copies, so the
    result is the folder itself.
    """
    if not configs.is_remote(folder):
        return Path(folder)
    copies = Path.home() / ".cache/plain_t5/prepared"
    return copies / str(folder).replace("://", "/")


def source_identity(name, task, files, cfg):
    """Return a JSON value that changes when the texts of a task change.

    The folder of the token files is named after a hash of this value. The value contains
    the name and the stamp of each source file. For local files, the stamp is the size and
    the modification time. The code of the function task.format may change, too. Therefore
    the value also contains hashes of data.py and of the recipe file that defines the
    task, and the first 100 examples that task.format returns.

    Some changes are not noticed. One is a change of a file that keeps its size and time.
    Another is a change in a file that task.format reads by itself, if the first 100
    examples stay the same. The readers of sources in data.py have a version number,
    configs.DATA_FORMAT.
    """
    stamps = [[file.name, file.stamp] for file in files]
    identity = [stamps, task.objective.features, cfg.data.fields]
    if task.format in (as_it_is, text_to_text) or not files:
        return identity
    examples = formatted_examples(files[0], InvalidExamples("skip"), task)
    texts = [texts for *_, texts in itertools.islice(examples, 100)]
    code = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    return [*identity, str(texts), code, configs.TASK_CODE.get(name)]


def with_vocab_size(changes):
    """Set a model.vocab_size that fits data.vocab, if the command line sets none.

    For example, the vocabulary "bytes" has 259 ids, so model.vocab_size becomes 384, the
    next multiple of 128. `changes` is a dict of the settings on the command line, such as
    {"data.vocab": "bytes"}. The function returns a dict of the same form.
    """
    vocab = changes.get("data.vocab", "")
    if not vocab or "model.vocab_size" in changes:
        return changes
    trained = re.fullmatch(r"train:(\d{1,9})", vocab)
    size = int(trained[1]) + SENTINELS if trained else load_tokenizer(vocab).size
    return changes | {"model.vocab_size": math.ceil(size / 128) * 128}


def check_vocab_size(size, cfg):
    """Raise a UserError if a vocabulary with `size` ids is too large for the model.

    A model may have more ids than its vocabulary. For example, T5's models have 32,128
    ids for a vocabulary of 32,100 ids.
    """
    if size > cfg.model.vocab_size:
        raise UserError(
            f"The vocabulary has {size} ids, including its sentinels, but the model has "
            f"{cfg.model.vocab_size} ids: set "
            f"--model.vocab_size {math.ceil(size / 128) * 128}. A model that has already "
            f"been trained needs its own vocabulary instead."
        )


def prepare_vocabulary(cfg, split="train"):
    """Load or train the vocabulary of a run, and return its Tokenizer.

    If data.vocab is "train:32000", a vocabulary of 32,000 pieces is trained on the texts
    of the run and stored in data.prepared_dir. Otherwise, data.vocab names a vocabulary
    to load.
    """
    trained = re.fullmatch(r"train:([1-9]\d{0,8})", cfg.data.vocab)
    if not trained:
        return load_tokenizer(cfg.data.vocab)
    pieces = int(trained[1])
    check_vocab_size(pieces + SENTINELS, cfg)
    opened = open_tasks(cfg, split)
    if {task.source for task, _ in opened.values()} == {"random:"}:
        return IdTokenizer(cfg.model.vocab_size, SENTINELS)
    identity = [source_identity(name, *opened[name], cfg) for name in opened]
    folder = prepared_path(cfg.data.task, [pieces, *identity], cfg)
    path = configs.to_path(f"{folder}.vocabulary.json")
    with suppress(UserError):  # train again if the file is missing or damaged
        model = configs.read_checked(path, {"model": str})["model"]
        return parse_vocabulary(bytes.fromhex(model))
    tokenizer = train_tokenizer(vocabulary_texts(opened.values(), cfg), pieces)
    configs.write_checked(path, {"model": tokenizer.serialized.hex()})
    return tokenizer


def vocabulary_texts(opened, cfg):
    """Yield the texts on which a vocabulary is trained.

    The function yields one text of each task in turn, so that the vocabulary fits all
    tasks. `opened` holds a pair (Task, list of SourceFiles) for each task.
    """
    invalid = InvalidExamples(cfg.data.on_error)

    def texts_of(task, files):
        for file in files:
            for *_, texts in formatted_examples(file, invalid, task):
                yield from (text for text in texts if isinstance(text, str))

    texts = [texts_of(task, files) for task, files in opened]
    for one_of_each in itertools.zip_longest(*texts, fillvalue=""):
        yield from one_of_each


def encode_in_background(examples, tokenizer, characters):
    """Tokenize examples in a background thread while the next examples are read.

    For each example, the function yields its number and a list with one array of token
    ids for each text.

    examples: an iterator of pairs (number, texts of the example). If the source is
        already tokenized, a text is a list of ids.
    characters: a Counter. If a text has unknown tokens, the characters of the text are
        added to this Counter.
    """

    def encode(batch):
        texts = [text for _, texts in batch for text in texts]
        encoded = encode_texts(texts, tokenizer)
        for text, ids in zip(texts, encoded):
            if isinstance(text, str) and UNK in ids:
                characters.update(text)
        encoded = iter(encoded)
        return [(number, [next(encoded) for _ in texts]) for number, texts in batch]

    # Do not write `with ThreadPoolExecutor(1)`, because `with` waits for the thread at
    # its end. If the caller stops early, the garbage collector closes this generator. If
    # another thread is just starting at this moment, waiting would cause a deadlock.
    thread = ThreadPoolExecutor(1)
    future = thread.submit(encode, [])
    batch = []
    size = 0
    for example in examples:
        batch.append(example)
        # Add TEXT_OVERHEAD, because even a short text needs memory for Python objects.
        size += sum(map(len, example[1])) + TEXT_OVERHEAD
        if size > ENCODE_CHARACTERS:
            previous, future = future, thread.submit(encode, batch)
            yield from previous.result()
            batch = []
            size = 0
    yield from future.result()
    yield from encode(batch)


def encode_texts(texts, tokenizer):
    """Return the token ids of each text of a task, as arrays without EOS.

    Training, evaluation and infer.py all call this function and then the function
    `truncate`. So the same example always has the same ids.

    texts: a list. An element is a text, or a list of token ids if the source is already
        tokenized. The tokenizer may be None if all elements are lists of ids.
    """
    strings = [text for text in texts if isinstance(text, str)]
    encoded = iter(tokenizer.encode_batch(strings) if strings else [])
    return [next(encoded) if isinstance(text, str) else strip_eos(text) for text in texts]


def strip_eos(ids):
    """Remove a final EOS from the token ids of a text.

    For example, [5, 9, 1] becomes [5, 9]. Some sources provide token ids that end with
    EOS. Without strip_eos, such texts would end with two EOS tokens, because the function
    `truncate` appends EOS later.
    """
    ids = np.asarray(ids, np.int32)
    return ids[:-1] if len(ids) and ids[-1] == EOS else ids


def split_into_chunks(ends, objective, data):
    """Split the documents of a token file into chunks, and return their boundaries.

    A chunk is a run of tokens that becomes one example. With at most 4 tokens in a chunk,
    a document of 10 tokens has the chunk boundaries [0, 4], [4, 8] and [8, 10]. If the
    objective has two features (inputs and targets), each document is one chunk.

    The result has the shape [chunks, features + 1]. Feature f of chunk i begins at token
    [i, f] and ends before token [i, f + 1].

    ends: an array [documents, features] with the position at which each text ends.
    """
    # The first document starts at token 0. Every other document starts where the previous
    # document ends.
    first_starts = np.append(0, ends[:-1, -1])[: len(ends)]
    if len(objective.features) > 1:
        return np.column_stack([first_starts, ends])
    ends = ends[:, 0]
    length = objective.length(data)
    # `count` is how many chunks each document has, and `number` numbers the chunks within
    # each document. For example, if `count` is [3, 2], `number` is [0, 1, 2, 0, 1].
    count = -(-(ends - first_starts) // length)
    number = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    starts = np.repeat(first_starts, count) + number * length
    stops = np.minimum(starts + length, np.repeat(ends, count))
    return np.stack([starts, stops], 1)[stops - starts >= objective.min_length]


class Corpus:
    """Tokenize the source of a task, and provide the tokens in chunks.

    A chunk is a run of tokens that becomes one example. The tokens are stored in shards,
    which are sets of files. Each shard is tokenized when one of its chunks is needed for
    the first time. Chunks are numbered through all shards.

    The position of a shard is the list [file, shard, example]. `file` is the index of the
    SourceFile, and `shard` is the number of the shard within this SourceFile. `example`
    is the number of the first example of the shard within this SourceFile. All three are
    counted from 0.

    opened: the pair (Task, list of SourceFiles) that open_task returns. By default,
        Corpus calls open_task.
    """

    def __init__(self, name, split, tokenizer, cfg, opened=None):
        self.task, self.files = opened or open_task(name, split, cfg)
        self.name = name
        self.title = f"{self.task.source} ({name}, {split})"
        self.tokenizer = tokenizer
        self.cfg = cfg
        ids_type = np.uint16 if tokenizer.size <= 1 << 16 else np.uint32
        self.dtypes = {"ids": ids_type, "ends": np.int64}
        identity = [
            configs.DATA_FORMAT,
            split,
            source_identity(name, self.task, self.files, cfg),
            tokenizer.sha256,
        ]
        self.folder = prepared_path(self.task.source, identity, cfg)
        # The folder with the local copies. If self.folder is local, it needs no copies.
        self.local = local_folder(self.folder)
        self.local.mkdir(parents=True, exist_ok=True)
        self.shards = []  # the metadata and the position of each shard so far
        # This list holds the index of the first chunk in each shard, then the number of
        # all chunks so far. For example, two shards with 7 and 5 chunks give [0, 7, 12].
        self.starts = [0]
        self.next_position = [0, 0, 0] if self.files else []  # [] is the end
        self.chunk_bounds = lru_cache(3)(self.chunk_bounds)
        self.shard_ids = lru_cache(8)(self.shard_ids)
        # This dict maps the position of the next shard to the generator that will yield
        # the tokens of this shard. The generator continues where the previous shard has
        # ended, so no text is read twice.
        self.readers = {}
        self.invalid = InvalidExamples(cfg.data.on_error)
        self.characters = Counter()  # the characters in texts that have unknown tokens
        self.lock = threading.RLock()

    def shard(self, number):
        """Return the metadata of a shard, such as its number of tokens.

        A shard is a set of files with the tokens of consecutive documents. If the shard
        does not exist yet, the method first prepares this shard and all earlier shards.
        If the source has fewer shards, the result is None.
        """
        with self.lock:
            while len(self.shards) <= number and self.next_position:
                metadata = self.prepare_shard(self.next_position)
                self.shards.append(metadata | {"position": self.next_position})
                self.next_position = metadata["next"]
        return self.shards[number] if number < len(self.shards) else None

    def shard_starts(self, count=math.inf):
        """Return the index of the first chunk in each shard, and the number of chunks.

        For example, two shards with 7 and 5 chunks give [0, 7, 12]. A chunk is a run of
        tokens that becomes one example. The method prepares shards until they have at
        least `count` chunks, or until the source ends.
        """
        if self.starts[-1] < count:
            # The loop checks the count again, because another thread may prepare shards
            # while this thread waits for the lock.
            with self.lock:
                while self.starts[-1] < count and self.shard(len(self.starts) - 1):
                    bounds = self.chunk_bounds(len(self.starts) - 1)
                    self.starts.append(self.starts[-1] + len(bounds))
        return self.starts

    def is_tokenized(self, count):
        """Return whether `count` chunks, or all chunks of the source, are tokenized.

        A chunk is a run of tokens that becomes one example.
        """
        return self.starts[-1] >= count or not self.next_position

    def count(self, what):
        """Tokenize the complete source, and return its number of documents or tokens.

        what: "documents" or "tokens".
        """
        self.shard_starts()
        return sum(shard[what] for shard in self.shards)

    def chunk_bounds(self, number):
        """Return the boundaries of all chunks in the token file of a shard.

        A chunk is a run of tokens that becomes one example. Each row of the result has
        the boundaries of one chunk as positions in the file: [start, stop], or
        [start, middle, stop] if the chunk has inputs and targets. The result has the
        shape [chunks, features + 1].
        """
        objective = self.task.objective
        if objective.across_documents:  # the whole shard is one long document
            ends = np.array([self.shards[number]["tokens"]])
        else:
            ends = self.load(number, "ends")
        ends = ends.reshape(-1, len(objective.features))
        # Use 32 bits for each integer to save memory, because the arrays stay in a cache.
        return split_into_chunks(ends, objective, self.cfg.data).astype(np.uint32)

    def shard_ids(self, number):
        """Return the token ids of a shard, and prepare the next shard in the background.

        A shard is a set of files with the tokens of consecutive documents. If
        data.keep_tokens is false, the token files of earlier shards are deleted. In a
        remote folder, the files stay, and only their local copies are deleted. An array
        that still uses a deleted file stays readable, because the file is memory-mapped.
        """
        ids = self.load(number, "ids")
        if not self.cfg.data.keep_tokens:
            for shard in self.shards[:number]:
                self.path(shard["position"], "ids", self.local).unlink(missing_ok=True)
        threading.Thread(target=self.prefetch, args=[number + 1], daemon=True).start()
        return ids

    def prefetch(self, number):
        """Tokenize or copy a shard before it is needed, and ignore all errors.

        A shard in a remote folder is copied to the local disk. An error is raised again
        later, when the shard is needed.
        """
        with PREFETCH_LOCK, suppress(Exception):
            if self.shard(number) and self.local != self.folder:
                self.load(number, "ends")
                self.load(number, "ids")

    def find_chunks(self, numbers):
        """Return in which shard each given chunk is, and where it begins and ends.

        A shard is a set of files with tokens. `numbers` [N] holds the indices of the
        chunks. The first result [N] holds the number of the shard that contains each
        chunk. The second result [N, features + 1] holds the boundaries of each chunk in
        the token file of this shard.
        """
        shards = np.searchsorted(self.starts, numbers, "right") - 1
        bounds = np.zeros((len(numbers), len(self.task.objective.features) + 1), int)
        for shard in np.unique(shards).tolist():
            here = shards == shard
            bounds[here] = self.chunk_bounds(shard)[numbers[here] - self.starts[shard]]
        return shards, bounds

    def lengths(self, numbers):
        """Return how many tokens each given chunk has.

        The result has the shape [features, N]. A chunk with inputs and targets has two
        features, and a chunk of plain text has one feature.
        """
        _, bounds = self.find_chunks(numbers)
        return np.diff(bounds).T

    def chunks(self, numbers):
        """Return the token ids of the given chunks.

        Each chunk is a list with one array of ids for each feature. For example, a chunk
        is [inputs, targets], or [text] for span corruption.
        """
        shards, bounds = self.find_chunks(numbers)
        stored = {shard: self.shard_ids(shard) for shard in np.unique(shards).tolist()}
        return [
            [stored[shard][start:stop] for start, stop in zip(row, row[1:])]
            for shard, row in zip(shards.tolist(), bounds.tolist())
        ]

    def path(self, position, kind, folder=None):
        """Return the path of a file of a shard, such as "00000-003.ids".

        For example, the file 00000-003.ids holds the token ids of shard 3 of SourceFile
        0. SourceFiles and their shards are counted from 0.

        position: the list [file, shard, example] that says where the shard begins.
        kind: the ending of the file name, such as "ids", "ends" or "json".
        folder: self.local for the local copy of the file. By default, the folder is
            self.folder, which may be remote.
        """
        file, shard, _ = position
        return (folder or self.folder) / f"{file:05}-{shard:03}.{kind}"

    def load(self, number, kind):
        """Load one file of a shard: its token ids, or the positions where its texts end.

        If the folder is remote, the file is first copied to the local disk, unless a
        valid copy exists. If the remote file itself is missing or damaged, the shard is
        tokenized again.

        number: the number of the shard.
        kind: "ids" for the token ids, or "ends" for the position where each text ends.
        """
        shard = self.shards[number]
        path = self.path(shard["position"], kind)
        local = self.path(shard["position"], kind, self.local)

        def read():
            try:
                # Convert the memmap to a plain array, which is faster to index.
                return np.memmap(local, self.dtypes[kind], "r").view(np.ndarray)
            except (OSError, ValueError):  # if the file is missing, empty or cut off
                return np.zeros(0, self.dtypes[kind])

        for _ in range(2):
            array = read()
            if local != path and zlib.crc32(array) != shard[kind]:
                # The lock keeps two threads from writing the same copy.
                with self.lock, suppress(FileNotFoundError):
                    configs.write_file(local, path.read_bytes())
                array = read()
            if zlib.crc32(array) == shard[kind]:
                return array
            note(
                f"the token file {path} is missing or damaged: tokenizing the text again"
            )
            self.path(shard["position"], "json").unlink(missing_ok=True)
            self.prepare_shard(shard["position"])
        raise UserError(
            f"The token file {path} was just written, but the content of the file has "
            f"changed since then: check the disk and the memory, and whether another "
            f"program writes to this file."
        )

    def stored_shard(self, position):
        """Return the metadata of a shard, or None if its files are missing or damaged.

        A shard is a set of files with the tokens of consecutive documents. The position
        is the list [file, shard, example] that says where the shard begins.
        """
        with suppress(UserError):
            return configs.read_checked(self.path(position, "json"), SHARD_METADATA)

    def prepare_shard(self, position):
        """Tokenize one shard, write its files, and return its metadata.

        A shard is a set of files with the tokens of consecutive documents. If the shard
        already exists, only its metadata are read. A lock file keeps two processes on one
        disk from writing the same shard. Two hosts with a remote folder may tokenize the
        same shard at the same time, and then write equal files.

        position: the list [file, shard, example] that says where the shard begins.
        """
        lock = self.path(position, "lock", self.local)
        with self.lock, configs.lock(lock, wait=True):
            if metadata := self.stored_shard(position):
                return metadata
            reader = self.readers.pop(tuple(position), None) or self.tokenize(*position)
            ids, lengths, next_position = next(reader)
            # If the number of the next shard is above 0, the next shard is in the same
            # SourceFile. Then keep the generator, which will yield the next shard.
            if next_position and next_position[1]:
                self.readers = {tuple(next_position): reader}
            ends = np.cumsum(lengths, dtype=np.int64)
            metadata = {
                "documents": len(lengths) // len(self.task.objective.features),
                "tokens": len(ids),
                "unknown": int(np.count_nonzero(ids == UNK)),
                "skipped": self.invalid.count,
                "ids": zlib.crc32(ids),
                "ends": zlib.crc32(ends),
                "next": next_position,
            }
            self.invalid.count = 0
            # Another host may have written the same files while this host tokenized.
            if not self.stored_shard(position):
                configs.write_file(self.path(position, "ids"), memoryview(ids))
                configs.write_file(self.path(position, "ends"), memoryview(ends))
                configs.write_checked(self.path(position, "json"), metadata)
            lock.unlink(missing_ok=True)
        if position == [0, 0, 0] or not next_position:
            earlier = [shard for shard in self.shards if shard["position"] < position]
            self.report([*earlier, metadata])
        return metadata

    def tokenize(self, file, shard, first):
        """Tokenize a SourceFile, and yield the tokens of its shards one after the other.

        Each result is a triple (ids, lengths, next position). `ids` has the token ids of
        all texts of the shard, and `lengths` has the number of tokens of each text. The
        next position is the list [file, shard, example] that says where the next shard
        begins. At the end of the source, the next position is an empty list.

        file: the index of the SourceFile.
        shard: the number of the first yielded shard within this SourceFile.
        first: the number of the example at which the first yielded shard begins.
        """
        examples = formatted_examples(
            self.files[file], self.invalid, self.task, self.tokenizer.size
        )
        texts = ((number, texts) for _, number, _, texts in examples if number >= first)
        dtype = self.dtypes["ids"]
        # Collect bytes and integers, which need much less memory than one NumPy array for
        # each text.
        ids = bytearray()
        lengths = array.array("i")
        # The number of the example from which the previous document was made.
        last = None
        with progress_bar(f"tokenizing {self.title}", "token") as bar:
            for number, document in encode_in_background(
                texts, self.tokenizer, self.characters
            ):
                limit = SHARD_TOKENS
                if file == 0:
                    limit = min(limit, FIRST_SHARD_TOKENS << shard)
                # One example of the source may give several documents, which must be in
                # the same shard. So begin a new shard only if the next document comes
                # from another example.
                if len(ids) >= limit * dtype().itemsize and number != last:
                    shard += 1
                    yield np.frombuffer(ids, dtype), lengths, [file, shard, number]
                    ids = bytearray()
                    lengths = array.array("i")
                for text in document:
                    ids += text.astype(dtype).data
                    lengths.append(len(text))
                last = number
                bar.update(sum(map(len, document)))
        after = [file + 1, 0, 0] if file + 1 < len(self.files) else []
        yield np.frombuffer(ids, dtype), lengths, after

    def report(self, shards):
        """Print how many documents and tokens were prepared.

        If more than 0.1 % of the tokens are unknown, a warning names the characters that
        the vocabulary lacks.
        """
        keys = ("documents", "tokens", "unknown", "skipped")
        documents, tokens, unknown, skipped = [
            sum(shard[key] for shard in shards) for key in keys
        ]
        text = (
            f"prepared {self.title}: {documents:,} documents, {tokens:,} tokens, "
            f"{unknown / max(tokens, 1):.3%} unknown, {skipped:,} skipped"
        )
        if shards[-1]["next"]:
            text += ". The rest of the source is prepared when it is needed"
        note(text)
        if unknown > 0.001 * tokens:
            characters = [
                repr(character)
                for character, _ in self.characters.most_common()
                if UNK in self.tokenizer.encode(character)
            ]
            note(
                f"warning: more than 0.1 % of the tokens are unknown, because the "
                f"vocabulary lacks the characters {' '.join(characters[:12])}. Train a "
                f"vocabulary on this text with --data.vocab train:32000, or use "
                f"--data.vocab bytes."
            )


class HeldOutPlan(NamedTuple):
    """Place held-out examples in the rows of batches, one example in each row.

    Examples are neither shuffled nor packed, so row 7 holds example 7.
    """

    corpus: Corpus

    def samples(self, row_number):
        """Return the index of the task and the number of the example in a row.

        For example, row 7 gives the arrays [0] and [7], because there is one task and no
        packing. After the last example of the split, both arrays are empty.
        """
        count = self.corpus.shard_starts(row_number + 1)[-1]
        sample = np.arange(row_number, min(row_number + 1, count))
        return np.zeros_like(sample), sample


class Dataset(NamedTuple):
    """Make the batches of one split of a task or mixture.

    For example, dataset.batch(7) returns the Batch of step 7.
    """

    tasks: list  # the Examples object of each task
    plan: TrainingPlan | HeldOutPlan  # assigns examples to rows
    cfg: configs.Config

    def batch(self, step, rows=None):
        """Return the Batch of a step.

        `rows` lists the indices of the rows to make. By default, all rows are made.
        """
        return make_batch(step, self.tasks, self.plan, self.cfg, rows)

    def batches(self, most=0):
        """Return the number of batches of a held-out split.

        The last batch may end with rows of padding. If `most` is above 0, the result is
        at most `most`.
        """
        size = self.cfg.train.batch_size
        count = self.tasks[0].corpus.shard_starts(most * size or math.inf)[-1]
        return min(math.ceil(count / size), most or math.inf)

    def sample(self, most):
        """Return at most `most` training tokens, to measure how often each token occurs.

        The tokens come from the beginning of each task, with an equal share for each
        task. If an example has inputs and targets, only the targets are used.
        """
        share = most // len(self.tasks)
        tokens = []
        for task in self.tasks:
            corpus = task.corpus
            left = share
            number = 0
            while left > 0 and corpus.shard(number):
                ids = corpus.shard_ids(number)
                # The last two boundaries of a chunk are the start and the end of the
                # targets. In a task with plain text, they are the start and the end of
                # the text.
                bounds = corpus.chunk_bounds(number)[:left, -2:].tolist()
                targets = [ids[start:stop] for start, stop in bounds]
                tokens.append(np.concatenate([ids[:0], *targets])[:left])
                left -= len(ids)
                number += 1
        return np.concatenate(tokens)

    @property
    def digest(self):
        """Return a string that changes when the source of a task changes.

        A resumed run compares this string with the string that the earlier run has
        stored, and so notices whether the data have changed. The string is a hash of the
        names and stamps of all source files, and of the checksum of the first token file
        of each task.
        """
        contents = []
        for task in self.tasks:
            files = [[file.name, file.stamp] for file in task.corpus.files]
            contents.append([files, task.corpus.shard(0)["ids"]])
        return digest(contents)


def prepare(cfg, split, tokenizer):
    """Return the Dataset of a split, after tokenizing the beginning of each task.

    The data are checked first. The function raises UserError if a task is invalid or has
    no text in this split. It also raises UserError if the vocabulary is too large for the
    model, or if chunks of text do not fit into a row.
    """
    check_tasks(cfg)
    check_vocab_size(tokenizer.size, cfg)
    opened = open_tasks(cfg, split)

    @cache
    def open_corpus(name):
        corpus = Corpus(name, split, tokenizer, cfg, opened.get(name))
        if not corpus.shard_starts(1)[-1]:
            raise UserError(
                f"The data source {corpus.task.source} holds no text for the {split} "
                f"split: provide at least two documents, because at least one document "
                f"is usually held out for validation. With text:FILE:lines, each line is "
                f"a document."
            )
        return corpus

    rates = mixture_rates(
        cfg.data.task, cfg, lambda name, what: open_corpus(name).count(what)
    )
    rates = {name: rate for name, rate in rates.items() if rate}
    tasks = [
        Examples(corpus.task, corpus, tokenizer, cfg, shuffled=split == "train")
        for corpus in map(open_corpus, rates)
    ]
    check_lengths(tasks, cfg.data, f"{cfg.data.task}, {split}")
    if split != "train":
        return Dataset(tasks, HeldOutPlan(tasks[0].corpus), cfg)
    rates = list(rates.values())
    plan = TrainingPlan(tasks, rates, cfg, plan_path(tasks, rates, cfg))
    return Dataset(tasks, plan, cfg)


def plan_path(tasks, rates, cfg):
    """Return the path of the file in which a TrainingPlan stores its progress.

    A TrainingPlan packs examples into rows, block after block. The file stores the number
    of the first row in each block, so a resumed run does not pack earlier blocks again.
    The file is local even if data.prepared_dir is remote, because every host writes it.
    The name of the file is a hash of all settings that the packing depends on. They
    include the code of recipe files, because a recipe file may define objectives.
    """
    identity = []
    for task in tasks:
        objective = task.task.objective
        code = configs.TASK_CODE.get(task.corpus.name)
        settings = type(objective).__name__, vars(objective)
        identity.append([task.corpus.folder.name, code, settings])
    sizes = BLOCK_SAMPLES, FIRST_SHARD_TOKENS, SHARD_TOKENS
    key = digest([identity, rates, cfg.data, cfg.train.seed, sizes])
    return local_folder(cfg.data.prepared_dir) / "plans" / f"{key}.json"


def check_lengths(tasks, data, title):
    """Check before training whether the examples are short enough.

    If inputs or targets are longer than --data.inputs_length or --data.targets_length,
    they are cut, and a note says how many. Span corruption makes chunks that should fit
    exactly, so a chunk that does not fit raises UserError. The same is true for every
    objective with `across_documents`.

    tasks: a list with the Examples object of each task. Only the examples that are
        already tokenized are checked.
    """
    truncated = Counter()
    total = sum(task.corpus.starts[-1] for task in tasks)
    for task in tasks:
        objective = task.task.objective
        chunks = np.arange(task.corpus.starts[-1])
        epochs = np.zeros_like(chunks)
        # Make one example now, so that a UserError of the objective is raised before the
        # training begins.
        task.make(epochs[:1], chunks[:1])
        for side, sizes in zip(SIDES, task.sizes(epochs, chunks)):
            limit, eos, kept = truncated_length(side, task.task, data)
            needed = sizes.max() + eos
            if objective.across_documents and needed > limit:
                raise UserError(
                    f"A chunk of {objective.length(data)} tokens becomes {needed} tokens "
                    f"of {side}, but --data.{side}_length is {limit}: set "
                    f"--data.{side}_length to {needed} or more."
                )
            truncated[side] += np.count_nonzero(sizes > kept)
    for side, count in truncated.items():
        if count:
            note(
                f"{title}: {count:,} of the first {total:,} {side} are longer than "
                f"--data.{side}_length {getattr(data, f'{side}_length')} and "
                f"are cut. To keep all of their tokens, raise --data.{side}_length."
            )


# ---- evaluated tasks -------------------------------------------------------------------


def read_task(name, split, cfg, bad, size=math.inf):
    """Yield the examples of a task as text, together with their places in the source.

    Each result is a pair (where, example). The place `where` is a text such as
    "a.jsonl:3". The example is a dict of fields, such as inputs and targets.

    bad: a function that is called with (where, reason) for each invalid example.
    size: the size of the vocabulary. An example with ids at or above this size is
        invalid.
    """
    task, files = open_task(name, split, cfg)
    for file in files:
        for where, _, example, _ in formatted_examples(file, bad, task, size):
            yield where, example


def evaluation_config(task, cfg):
    """Return the Config for evaluating a single task of a run.

    If the source of the task has no splits, usually only the first 1 % of its text is
    evaluated, because the rest is training text. If the run does not train on this
    source, and the source consists of files, all of its examples are evaluated.

    task: the name of the task.
    cfg: the Config of the run.
    """
    if task in MIXTURES:
        raise UserError(
            f"{task} is a mixture of tasks, but this command needs a single task: name "
            f"one of the tasks in the mixture."
        )
    if task == cfg.data.task:
        return cfg
    source = find_task(task, cfg).source
    trained = [other.source for other in trained_tasks(cfg)]
    is_file = source.partition(":")[0] in {"lines", *SUFFIX_KINDS.values()}
    changes = {
        "data.task": task,
        "data.eval_tasks": "",
        "data.source": "",
        "data.validation_source": "",
    }
    if is_file and "{split}" not in source and source not in trained:
        changes["data.validation_source"] = source
    if task not in TASKS and names_p3(cfg):
        # The task belongs to P3, and --data.source says where P3 is stored.
        changes["data.source"] = cfg.data.source
    return configs.override(cfg, changes)


def evaluation_configs(cfg, split="validation"):
    """Return a dict from the name of each evaluated task to the Config of this task.

    Tasks that lack the split are left out, and a note names them. If no task has the
    split, the function raises MissingSplit.
    """
    alone = {task: evaluation_config(task, cfg) for task in evaluated_tasks(cfg)}
    opened, missing = open_all((name, split, one) for name, one in alone.items())
    reasons = " ".join(map(str, missing))
    if not opened:
        raise MissingSplit(reasons)
    if reasons:
        note(
            f"some tasks are not evaluated, because they have no {split} split: {reasons}"
        )
    return {task: alone[task] for task in opened}


def trained_tasks(cfg):
    """Return a list of the Tasks that a run trains on, without tasks of rate 0."""
    rates = mixture_rates(cfg.data.task, cfg)
    return [find_task(name, cfg) for name, rate in rates.items() if rate]


def trained_ends(cfg):
    """Return whether the inputs of a run's training tasks end with EOS.

    The result is a set of booleans. The set is {True, False} if only some of the tasks
    end their inputs with EOS. The set is empty if a task is unknown, for example because
    it is defined in a recipe file that has not been executed.
    """
    try:
        return {task.inputs_eos for task in trained_tasks(cfg)}
    except UserError:
        return set()


def unigram_loss(counts, batches, tokenizer):
    """Return the loss of a unigram model on held-out batches, in nats per token.

    A unigram model ignores the context. The probability of a token is simply its
    frequency in the training data. A trained model should reach a lower loss. Sentinels
    and EOS are left out.

    counts: an array [vocabulary] that says how often each token occurs in the training
        data.
    batches: a list with the held-out batches.
    """
    targets = np.concatenate([batch.targets.ravel() for batch in batches])
    content = targets[is_content(targets, tokenizer)]
    if not len(content):
        return 0.0
    counts = counts + 1.0  # add-one smoothing, so no token has probability 0
    return float(np.mean(np.log(counts.sum()) - np.log(counts[content])))


# ---- the command -----------------------------------------------------------------------


def is_span_corruption(cfg):
    """Return whether all tasks of a run train with span corruption."""
    return all(type(task.objective) is SpanCorruption for task in trained_tasks(cfg))


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
        with suppress(MissingSplit):
            open_tasks(cfg, split)
            return split
    # If the source has none of these splits, return "train". The caller then raises
    # MissingSplit when it opens the training split.
    return "train"


def show(cfg, count):
    """Print `count` rows of the first batch, and how fast batches are planned and made.

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
    sides = [
        ("inputs", batch.inputs, batch.input_segments),
        ("targets", batch.targets, batch.target_segments),
    ]
    # Print only rows that hold an example. The last rows are empty if a held-out split
    # has fewer examples than a batch has rows.
    filled = batch.target_segments.any(axis=1).sum()
    for i in range(min(count, filled)):
        for side, ids, segments in sides:
            lengths = " + ".join(map(str, np.bincount(segments[i])[1:]))
            print(f"\nrow {i}, {side}: {lengths} tokens in {ids.shape[1]} positions")
            print(f"  {color_row(ids[i], segments[i], tokenizer)}")
    tokens = sum(np.count_nonzero(segments) for *_, segments in sides)
    calls, seconds = timeit.Timer(lambda: dataset.batch(0)).autorange()
    speed = calls * tokens / seconds / 1e6
    print(
        f"\nbatches  {speed:.1f} million tokens per second on one core, if the rows of "
        f"the batch are already packed"
    )
    if split == "train":
        rows = dataset.plan.row_starts[1]
        seconds = timeit.timeit(lambda: [*dataset.plan.pack_block(0)], number=1)
        speed = rows * tokens / filled / seconds / 1e6
        print(
            f"packing  {speed:.1f} million tokens per second on one core, for a block of "
            f"{rows:,} rows"
        )


def list_mixture(cfg):
    """Print a table of the tasks in a mixture, with the rate and source of each task.

    The name of the mixture is cfg.data.task.
    """

    def count(task, what):
        return Corpus(task, "train", prepare_vocabulary(cfg), cfg).count(what)

    rates = mixture_rates(cfg.data.task, cfg, count)
    total = sum(rates.values())
    print(f"{'task':40} {'rate':>12} {'share':>9}  source")
    for task, rate in Counter(rates).most_common():
        source = find_task(task, cfg).source
        print(f"{task:40} {rate:>12,.6g} {rate / total:>9.4%}  {source}")


def held_out_configs(cfg):
    """Return the Config of each task that a run evaluates while it trains, as a dict."""
    evaluates = cfg.train.eval_every or cfg.train.infer_every
    return evaluation_configs(cfg) if evaluates else {}


def prepare_all(cfg):
    """Tokenize the data of a run before training, and write the token files.

    With packing, the complete training split is tokenized. Without packing, only the text
    that the training steps will use is tokenized.
    """
    tokenizer = prepare_vocabulary(cfg)
    held_out = held_out_configs(cfg)
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


def source_files(cfg):
    """Return all source files of a run, as a list of pairs (Corpus, file).

    `file` is the index of a SourceFile in its Corpus. The list contains the training
    split of all tasks, and the validation split of the tasks that the run evaluates.
    Several machines divide this list among themselves.
    """
    tokenizer = prepare_vocabulary(cfg)
    held_out = held_out_configs(cfg)
    corpora = [Corpus(name, "train", tokenizer, cfg) for name in open_tasks(cfg)]
    corpora += [Corpus(x, "validation", tokenizer, held_out[x]) for x in held_out]
    return [(corpus, file) for corpus in corpora for file in range(len(corpus.files))]


def prepare_share(cfg, shard):
    """Tokenize the source files of one machine, and write their token files.

    shard: a text such as "0/4". The first of four machines tokenizes the source files 0,
        4, 8 and so on in the list that the function source_files returns.
    """
    first, machines = configs.parse_shard(shard)
    for corpus, file in source_files(cfg)[first::machines]:
        position = [file, 0, 0]
        while position and position[0] == file:
            position = corpus.prepare_shard(position)["next"]


def prepare_on_engine(args, changes):
    """Tokenize the data of a run with Apache Beam, and write the token files.

    The engine of Beam, such as Dataflow, starts processes on many machines. For each
    source file, one of these processes calls prepare_share. If this process fails, the
    engine calls prepare_share again.

    args, changes: the result of configs.parse_args. args.runner holds the name of the
        engine and the options of Beam.
    """
    try:
        import apache_beam as beam
        from apache_beam.options.pipeline_options import PipelineOptions
    except ImportError as error:
        raise UserError(
            "--runner needs Apache Beam: pip install '.[beam]', and then "
            "pip install 'protobuf>=7.36.1'."
        ) from error

    def prepare_one(shard):
        # Beam sends the code of this function to the processes. The other functions are
        # not sent, so each process imports them.
        data = importlib.import_module("data")
        data.prepare_share(data.read_config(args, changes), shard)

    try:
        options = PipelineOptions(["--runner", *shlex.split(args.runner)])
        pipeline = beam.Pipeline(options=options)
    except ValueError as error:
        raise UserError(
            f"--runner {args.runner} is not valid ({error}): name an engine of Apache "
            f"Beam, such as DirectRunner."
        ) from error
    # The vocabulary is trained here, before the processes need it.
    count = len(source_files(read_config(args, changes)))
    with pipeline:
        shards = pipeline | beam.Create([f"{i}/{count}" for i in range(count)])
        # Without Reshuffle, a single process would get all elements.
        shards | beam.Reshuffle() | beam.Map(prepare_one)


def read_config(args, changes):
    """Return the Config for the command line of data.py.

    args, changes: the result of configs.parse_args.
    """
    if not args.run_dir:
        changes = with_vocab_size(changes)
    cfg = configs.resolve(args, changes, recipe=True)
    if args.run_dir:
        # Raise UserError if spiece.model is not the vocabulary of the run.
        load_run_tokenizer(args.run_dir)
        cfg = configs.override(cfg, {"data.vocab": f"{args.run_dir}/spiece.model"})
    if args.list:
        cfg = configs.override(cfg, {"data.task": args.list})
    check_tasks(cfg)
    return cfg


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
        runner=dict(
            metavar="ENGINE",
            help="with --prepare, tokenize with an engine of Apache Beam, such as\n"
            "DirectRunner or 'DataflowRunner --project P --region R'",
        ),
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
    if args.runner and args.shard:
        raise UserError(
            "--runner and --shard exclude each other, because the engine divides the "
            "work: leave out --shard."
        )
    cfg = read_config(args, changes)
    if args.list:
        list_mixture(cfg)
    elif args.list is not None:
        print("tasks", *TASKS, sep="\n  ")
        print("mixtures", *MIXTURES, sep="\n  ")
    elif args.runner:
        prepare_on_engine(args, changes)
        print(f"Wrote all token files for {cfg.data.task}.")
    elif args.shard:
        prepare_share(cfg, args.shard)
        print(
            f"Wrote the token files of --shard {args.shard} for {cfg.data.task}. When "
            f"the token files of all shards are written, start the training."
        )
    elif args.prepare:
        prepare_all(cfg)
    else:
        show(cfg, args.show)


if __name__ == "__main__":
    configs.run_command(main)
