"""Generate text with a trained T5, or compute the log-probability of given targets.

The command loads a trained model from a run directory and reads input texts. For each
text it writes one result: a generated text, the log-probability of a given target, or
the vectors that the encoder computes.

The encoder runs once for each text. The decoder then generates one token at a time. A
cache stores the keys and values of earlier tokens, so they are computed only once.

    python infer.py --run_dir runs/tiny "Return the <extra_id_0> of the list."
    python infer.py --run_dir runs/tiny < texts         one output line per input line
    python infer.py --run_dir RUN --input IN.jsonl --output OUT.jsonl
    python infer.py --run_dir RUN --input IN.jsonl --output OUT.jsonl --mode score
    python infer.py --run_dir RUN --input IN.jsonl --output OUT.npz --mode encode
    python infer.py --run_dir RUN --input task:glue_rte_v002:validation --output OUT.jsonl
    python infer.py --run_dir RUN --input lines:de.txt,en.txt --output OUT.txt

Each line of IN.jsonl is a JSON object with the field "inputs", such as
{"inputs": "number: 4711"}. With --mode score, each line also needs the field "targets".
Both fields hold a text or a list of token ids. A list of ids is used unchanged: it is
not truncated, and EOS is not appended. An input file may also be a .txt file with one
text on each line, and an empty line gets an empty prediction. Other inputs are tables,
and data sources such as lines:de.txt,en.txt, whose first file holds the inputs. OUT.jsonl
has the lines of IN.jsonl in the same order, with a new field "prediction" or "score".
OUT.txt has only the predictions or the scores, one on each line.

With --mode encode, each line gets the field "ids" and a field with vectors. --pool mean
writes the mean vector of each text to the field "mean". --pool first writes the first
vector to the field "first". --pool none writes all vectors to the field "vectors".
OUT.npz has three arrays: the ids of all lines, the vectors of all lines, and the number
of ids in each line.

The result for a line does not depend on the other lines in the same batch. To share an
input file among four machines, give them --shard 0/4, 1/4, 2/4 and 3/4, and give each
machine its own --output.

Example:
    In three steps of greedy decoding, the most probable ids are 7, 1 and 9. The id 1 is
    EOS, which ends the output, so the 9 is replaced by 0.

    >>> import jax, infer
    >>> state = infer.start_greedy(rows=[0], N=1, length=3)
    >>> for at, most_probable in enumerate([7, 1, 9]):
    ...     log_probs = jax.nn.log_softmax(jax.nn.one_hot([[most_probable]], 10))
    ...     state = infer.greedy_step(state, log_probs, at)
    >>> state.ids.tolist()
    [[[7, 1, 0]]]

The shapes in this file use the following letters:

    B examples in a batch       N outputs of each example (samples or beams)
    S input length              T maximum number of generated ids
    D d_model    H heads        C channels of one head
    K keys       V vocabulary

`pytest -k lesson_infer` runs the lessons about this file, which are in test_all.py.
"""

import csv
import io
import itertools
import json
import os
import re
import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

# The module configs makes Ctrl-C end the command without a traceback. Import it first, so
# that Ctrl-C has this effect even during the slow import of JAX. The module also makes
# Python read text as UTF-8.
import configs

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import data
import model
import partition
from configs import DecodeConfig, UserError, note
from partition import read_vector_head

# ---- the cache and one decoding step ---------------------------------------------------
# The decoder is causal: the keys and values of a token do not depend on later tokens.
# Decoding therefore computes them once for each token, and stores them in a cache. Each
# decoding step runs the decoder for the newest token only. assets/kv_cache.svg shows
# three steps.
#
# An example has N outputs, which are samples or beams. This section calls them beams.


# The function einsum is jnp.einsum with a float32 result, even for bfloat16 arrays. The
# lower part of this file replaces this function by a version that is faster on a TPU.
einsum = partial(jnp.einsum, preferred_element_type=jnp.float32)


def cached_attention(q, k, v, bias, mask):
    """Compute attention, softmax(q k^T + bias) v, for the newest token of each output.

    Only the newest token needs a query, because decoding generates one token at a time.
    The keys and values of earlier tokens come from the cache.

    q: the queries, of shape [B, H, N, C].
    k, v: the keys and the values, of shape [B, H, K, C].
    bias: None, or the position bias, which can be broadcast to [B, H, N, K].
    mask: a boolean array that is True where a query may attend to a key. The mask can be
        broadcast to [B, H, N, K].

    The scores and the softmax are computed in float32. Before the matmul with `v`, the
    softmax weights are rounded to the dtype of `v`. The result has the shape [B, H, N, C]
    and the dtype of `v`.
    """
    scores = einsum("bhqc,bhkc->bhqk", q, k)
    if bias is not None:
        scores = scores + bias
    scores = jnp.where(mask, scores, -1e10)
    # Subtract the largest score, so that exp does not overflow. The result of softmax
    # stays the same.
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    out = einsum("bhqk,bhkc->bhqc", weights.astype(v.dtype), v)
    # Softmax divides the weights by their sum. Divide the output of the matmul by this
    # sum instead: the result is the same, and `out` usually has fewer numbers than
    # `weights`.
    return (out / weights.sum(-1, keepdims=True)).astype(v.dtype)


def init_cache(params, cfg, encoded, length, beams=1):
    """Create an empty cache, and compute the arrays that all decoding steps share.

    The shared arrays are computed only once, before the first step. They are the weights
    of each layer, the keys and values of cross-attention, and the position biases.

    encoded: the output of the encoder, of shape [B, S, D].
    length: the maximum number of ids that the decoder generates.
    beams: the number of beams or samples of each example.

    Returns a pair of lists (cache, fixed) with one element for each decoder layer. An
    element of `cache` is a pair (keys, values) for self-attention. Both arrays have the
    shape [B, H, length * beams, C] and are filled with zeros. The key of position t of
    beam m belongs at the index t * beams + m of axis 2.

    An element of `fixed` is a tuple of three items:
    - The weights of the layer, in the dtype of `encoded`.
    - The pair (keys, values) for cross-attention. Keys and values have the shape
      [B, H, S, C], and all beams share them.
    - The position bias of self-attention, from model.position_bias. The bias has the
      shape [1, H, length, length]. If --model.positions selects an encoding without a
      bias, such as rotary, the item is None.
    """
    stack = params["decoder"]
    table = model.param_table(cfg)["decoder"]["layers"]
    shared = model.position_bias(stack, length, length, False, cfg)
    cache = []
    fixed = []
    # The arrays in stack["layers"] hold the weights of all layers. Select the weights of
    # each layer once, before the decoding loop. With lax.scan over the layers, XLA would
    # copy the weights of each layer in every decoding step.
    for i in range(cfg.num_decoder_layers):
        weights = jax.tree.map(lambda w: w[i].astype(encoded.dtype), stack["layers"])
        weights = model.reshard_for_compute(weights, table)
        cross = model.keys_values(weights["cross_attention"], encoded, cfg)
        bias = model.position_bias(
            weights["self_attention"], length, length, False, cfg, shared
        )
        B, H, _, C = cross[0].shape
        sharding = model.sharding_of(cross[0])
        empty = jnp.zeros((B, H, length * beams, C), encoded.dtype, out_sharding=sharding)
        cache.append((empty, empty))
        fixed.append((weights, cross, bias))
    return cache, fixed


def decode_step(params, cfg, ids, at, cache, fixed, input_segments, ancestors=None):
    """Run the decoder for position `at` of each beam, and return the next logits.

    Earlier positions are not computed again, because `cache` holds their keys and values.

    ids: the decoder's input ids at position `at`, of shape [B, N].
    cache, fixed: the two lists that init_cache returns.
    input_segments: an array of shape [B, S], which is 0 at padding.
    ancestors: None, or an array of beam indices, of shape [B, N, T]. For example,
        ancestors[b, 2, 5] = 0 means that beam 2 reads the key and the value of position 5
        that beam 0 computed. None means that each beam reads only its own keys and
        values.

    Returns a pair (logits, cache). The logits are float32 and have the shape [B, N, V].
    The returned cache includes the keys and values of position `at`. The key of position
    t of beam m is at the index t * N + m of axis 2.

    When beam search reorders the beams, only `ancestors` changes, and the cache is not
    copied. This works because each query is compared with the keys of all N beams. A mask
    then hides the keys that the beam must not read.
    """
    N = ids.shape[1]
    positions = jnp.full(N, at)  # the newest tokens of all beams have the same position
    length = cache[0][0].shape[2] // N
    if ancestors is None:
        ancestors = jnp.arange(N)[None, :, None]
    # visible[b, n, t, m] is True if beam n of example b may read the key that beam m
    # computed at position t. Position t must not be in the future, and ancestors[b, n, t]
    # must be m.
    not_future = (jnp.arange(length) <= at)[:, None]
    visible = not_future & (ancestors[..., None] == jnp.arange(N))
    rows = model.sharding_of(visible)[0]
    # Merge the two axes of positions and beams into one axis of keys. The cache stores
    # the N keys of position 0 first, then the N keys of position 1, and so on.
    self_mask = visible.reshape(len(visible), 1, N, length * N, out_sharding=P(rows))
    # Cross-attention reads all input ids except padding. In attention_mask, a query reads
    # the keys that have the same segment number. All queries and input ids get the number
    # 1 here, and padding gets 0.
    query_segments = jnp.ones_like(input_segments[:, :1])
    cross_mask = model.attention_mask(query_segments, input_segments > 0)

    x = model.embed(params, ids, cfg, None)
    new_cache = []
    for stored, (weights, cross, bias) in zip(cache, fixed):
        if bias is not None:
            # Select the position biases of the query at position `at`, one for each
            # position of a key. Repeat each bias N times, because each position has N
            # keys, one for each beam.
            bias = lax.dynamic_slice_in_dim(bias, at, 1, axis=2)
            bias = jnp.repeat(bias, N, axis=3)
        h = model.rms_norm(x, weights["self_attention"]["norm"])
        # Write the keys and values of position `at` into the cache.
        added = model.keys_values(weights["self_attention"], h, cfg, positions)
        keys, values = (
            lax.dynamic_update_slice_in_dim(old, new, at * N, axis=2)
            for old, new in zip(stored, added)
        )
        new_cache.append((keys, values))
        # With shard_map, each device computes the attention of its own examples and
        # heads.
        attend = jax.shard_map(cached_attention, out_specs=model.sharding_of(values))
        x = model.decoder_layer(
            weights,
            x,
            h,
            (keys, values),
            bias,
            self_mask,
            cross,
            cross_mask,
            cfg,
            core=attend,
            positions=positions,
        )
    x = model.final_norm(x, params["decoder"])
    return model.unembed(params, cfg, x), new_cache


# ---- greedy decoding -------------------------------------------------------------------
# A decoding method consists of three functions. `start` creates a state with empty
# outputs. `step` chooses the next ids from their log-probabilities, which are the
# log_softmax of the logits, and appends the ids. `result` returns the ids and the scores
# of all outputs. The function `generate` below calls the three functions. On several
# devices, each device calls them for its own rows of the batch.


class GreedyState(NamedTuple):
    """The outputs that greedy decoding or sampling has generated so far.

    Greedy decoding generates N = 1 output for each example. Sampling generates N outputs.
    """

    # The generated ids, of shape [B, N, T]. The ids after EOS are 0.
    ids: jax.Array
    # The log-probability of each output: the sum of the log-probabilities of its ids.
    # Shape [B, N].
    scores: jax.Array
    # True for each output that has ended with EOS. Shape [B, N].
    done: jax.Array
    # The number of each example, such as its index in the input file, of shape [B]. The
    # random key of sampling depends on the seed, this number, the sample and the
    # position.
    rows: jax.Array


def start_greedy(rows, N, length):
    """Return a GreedyState with N empty outputs for each example.

    Nothing has been generated yet, so all ids and all scores are 0.

    rows: a number that identifies each example, of shape [B].
    length: the maximum number of ids that the decoder generates.
    """
    shape = (len(rows), N)
    return GreedyState(
        ids=jnp.zeros((*shape, length), jnp.int32),
        scores=jnp.zeros(shape, jnp.float32),
        done=jnp.zeros(shape, bool),
        rows=rows,
    )


def greedy_step(state, log_probs, at):
    """Append the most probable id to each output, and return the new GreedyState.

    log_probs: the log-probabilities of all ids for position `at`, of shape [B, N, V].
    """
    return append_ids(state, jnp.argmax(log_probs, axis=-1), log_probs, at)


def append_ids(state, ids, log_probs, at):
    """Append one id to each output, and return the new GreedyState.

    The log-probability of the id is added to the score of the output. An output that has
    already ended with EOS gets the padding id 0 instead, and its score does not change.

    ids: the ids to append, at position `at`, of shape [B, N].
    log_probs: the log-probabilities of all ids for position `at`, of shape [B, N, V].
    """
    ids = jnp.where(state.done, data.PAD, ids).astype(jnp.int32)
    chosen = jnp.take_along_axis(log_probs, ids[..., None], axis=-1)[..., 0]
    return state._replace(
        ids=state.ids.at[:, :, at].set(ids),
        scores=state.scores + jnp.where(state.done, 0.0, chosen),
        done=state.done | (ids == data.EOS),
    )


def greedy_result(state):
    """Return all outputs and their scores, with the best output of each example first.

    The best output is the output with the highest score. The result is a pair
    (ids, scores) of arrays with the shapes [B, N, T] and [B, N].
    """
    order = jnp.argsort(-state.scores, axis=1)
    return take_beams(state.ids, order), take_beams(state.scores, order)


def take_beams(array, beams):
    """Select beams of each example by their numbers, and return them.

    For example, if beams[b] is [2, 0], row b of the result has beam 2 and then beam 0.

    array: one item for each beam, of shape [B, N, ...].
    beams: the numbers of the selected beams, of shape [B, M]. Beams are numbered from 0.

    The result has the shape [B, M, ...].
    """
    return jax.vmap(lambda outputs, numbers: outputs[numbers])(array, beams)


# ---- sampling --------------------------------------------------------------------------
# Sampling draws the next id at random from the model's probability distribution. The
# options `temperature`, `top_k` and `top_p` change this distribution. For example, a
# temperature below 1 makes probable ids even more probable. As in greedy decoding, a
# GreedyState holds the outputs.


def sampling_step(state, log_probs, at, *, decode, seed):
    """Append a randomly drawn id to each sample, and return the new GreedyState.

    The options `temperature`, `top_k` and `top_p` change how often each id is drawn. They
    do not change the score of a sample, which is its log-probability under the model.

    log_probs: the log-probabilities of all ids for position `at`, of shape [B, N, V].
    decode: a DecodeConfig with the three options.
    seed: the seed of the random numbers.
    """
    # The log-probabilities of an output differ from its logits only by a constant. The
    # constant does not change how often each id is drawn.
    temperature = max(decode.temperature or 1.0, 1e-4)
    filtered = filter_logits(log_probs / temperature, decode.top_k, decode.top_p)

    # The random key depends on the seed, the example, the sample and the position. It
    # does not depend on the batch, so an example gets the same samples in every batch.
    def draw(row, sample, logits):
        key = jax.random.key(seed)
        for number in (row, sample, at):
            key = jax.random.fold_in(key, number)
        return jax.random.categorical(key, logits)

    samples = jnp.arange(log_probs.shape[1], dtype=jnp.uint32)
    draw_samples = jax.vmap(draw, (None, 0, 0))
    ids = jax.vmap(draw_samples, (0, None, 0))(state.rows, samples, filtered)
    return append_ids(state, ids, log_probs, at)


def filter_logits(logits, top_k, top_p):
    """Set the logits of improbable ids to -inf, so that these ids are never drawn.

    With top_k = 2, only the two most probable ids are kept: the logits [1, 4, 3] become
    [-inf, 4, 3]. With top_p = 0.9, the fewest ids are kept whose probabilities add up to
    at least 0.9. This is nucleus sampling (Holtzman et al. 2020). With 0, both options
    keep all ids. If both options are set, top_k is applied first. The probabilities of
    the ids that remain are normalized to the sum 1 before top_p is applied.
    """
    if top_k:
        top = lax.top_k(logits, min(top_k, logits.shape[-1]))[0]
        # `top[..., -1:]` is the k-th largest logit. If several ids have the k-th largest
        # logit, all of them are kept, as in T5X.
        logits = jnp.where(logits < top[..., -1:], -jnp.inf, logits)
    if 0 < top_p < 1:
        ordered = -jnp.sort(-logits, axis=-1)
        probs = jax.nn.softmax(ordered)
        # The ids are ordered from most to least probable. Keep an id if the probabilities
        # of all ids before it add up to less than top_p.
        kept = jnp.cumsum(probs, axis=-1) - probs < top_p
        smallest = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits < smallest, -jnp.inf, logits)
    return logits


# ---- beam search -----------------------------------------------------------------------
# This section implements the beam search of T5X (t5x/decoding.py). Beam search keeps the
# N best unfinished outputs of each example, which are called live beams. Each step works
# as follows:
#
# 1. Extend each live beam by each id of the vocabulary. Select the 2N best results.
# 2. The results that end with EOS are finished. Keep the N best finished outputs.
# 3. Of the other results, the N best become the new live beams.
#
# Why 2N? Each live beam has only one extension by EOS, so at most N of the 2N results end
# with EOS. At least N results remain for the live beams.
#
# assets/beam_search.svg shows a search with two beams and all of its scores.

# Beam search adds MASKED_SCORE to the score of an output that must not be selected. The
# output is then worse than all others. T5X uses the same number.
MASKED_SCORE = -1e7


class BeamState(NamedTuple):
    """The outputs that beam search has found so far, sorted from best to worst.

    A live beam is an output that does not end with EOS yet. Its score is the sum of the
    log-probabilities of its ids. A finished output ends with EOS. Its score is this sum,
    divided by length_penalty.
    """

    # The ids of the live beams, of shape [B, N, T].
    ids: jax.Array
    # The scores of the live beams, of shape [B, N].
    live_scores: jax.Array
    # The ids of the finished outputs, of shape [B, N, T].
    finished_ids: jax.Array
    # The scores of the finished outputs, of shape [B, N].
    finished_scores: jax.Array
    # True where finished_ids holds a finished output, and False where there is none yet.
    # Shape [B, N].
    finished: jax.Array
    # The number of the beam that computed the key and the value which a live beam reads
    # at a position. For example, if ancestors[b, 2, 5] is 0, live beam 2 of example b
    # reads the key and the value that beam 0 computed at position 5. Shape [B, N, T].
    ancestors: jax.Array
    # True for each example whose search has ended. Shape [B, 1].
    done: jax.Array


def start_beams(rows, N, length):
    """Return a BeamState with N empty beams (unfinished outputs) for each example.

    The first beam gets the score 0. The other beams get the very low score MASKED_SCORE,
    so the first step ignores them. If all beams had the score 0, the first step would
    find each output N times.

    rows: an array with one number for each example.
    length: the maximum number of ids that the decoder generates.
    """
    shape = (len(rows), N)
    no_ids = jnp.zeros((*shape, length), jnp.int32)
    beams = jnp.arange(N)
    return BeamState(
        ids=no_ids,
        live_scores=jnp.broadcast_to(jnp.where(beams == 0, 0.0, MASKED_SCORE), shape),
        finished_ids=no_ids,
        finished_scores=jnp.full(shape, MASKED_SCORE),
        finished=jnp.zeros(shape, bool),
        ancestors=no_ids + beams[:, None],
        done=jnp.zeros((len(rows), 1), bool),
    )


def length_penalty(tokens, decode):
    """Return the number by which beam search divides the score of an output.

    Each id adds a negative log-probability to the score, so long outputs have low scores.
    Dividing by a number that grows with the length reduces this disadvantage.

    tokens: the number of ids in the output, including EOS.
    decode: a DecodeConfig. T5X uses the penalty "gnmt" (Wu et al. 2016). Hugging Face
        uses the penalty "length".
    """
    if decode.penalty == "gnmt":
        return ((5 + tokens) / 6) ** decode.alpha
    return tokens**decode.alpha


def beam_step(state, log_probs, at, *, decode):
    """Extend the live (unfinished) beams by one id, and return the new BeamState.

    Of all extended beams, the 2N best are selected. Those that end with EOS become
    finished outputs, and the N best of the others stay live. Each live beam has only one
    extension by EOS, so at most N of the 2N beams end with EOS. At least N others remain.

    The search of an example ends when N outputs are finished, and no live beam can get a
    better score than the worst of the N best finished outputs.

    The parent of a new live beam n is the old beam that beam n extends. The parent has
    computed the key of position `at`, so ancestors[b, n, at] is the parent. Beam n itself
    will compute the key of position at + 1, so ancestors[b, n, at + 1] is n. Later
    positions have no meaning yet.

    log_probs: the log-probabilities of all ids for position `at`, of shape [B, N, V].
    decode: a DecodeConfig, which selects the length penalty.
    """
    B, N, V = log_probs.shape
    length = state.ids.shape[-1]

    # Extend each live beam by its 2N best next ids. Of all extended beams of an example,
    # select the 2N best.
    scores = log_probs + state.live_scores[..., None]
    scores, ids = lax.top_k(scores, min(2 * N, V))
    width = scores.shape[-1]
    scores, best = lax.top_k(scores.reshape(B, -1), 2 * N)
    # parents[b, i] is the number of the live beam to which the i-th best extension of
    # example b appends an id.
    parents = best // width
    ids = take_beams(ids.reshape(B, -1), best)
    extended = take_beams(state.ids, parents).at[:, :, at].set(ids)
    ends = ids == data.EOS

    # The N best extended beams that do not end with EOS become the new live beams.
    live_scores, best = lax.top_k(scores + jnp.where(ends, MASKED_SCORE, 0.0), N)
    live_ids = take_beams(extended, best)
    parents = take_beams(parents, best)

    # Extended beams that end with EOS are finished outputs. Of all finished outputs, old
    # and new, keep the N best. Extended beams without EOS get a score near MASKED_SCORE,
    # which is very low. If they are selected because fewer than N outputs are finished,
    # the array `finished` is False for them.
    scores = scores / length_penalty(at + 1.0, decode)
    scores = scores + jnp.where(ends, 0.0, MASKED_SCORE)
    finished_scores = jnp.concatenate([state.finished_scores, scores], axis=1)
    finished_scores, best = lax.top_k(finished_scores, N)
    finished_ids = jnp.concatenate([state.finished_ids, extended], axis=1)
    finished = take_beams(jnp.concatenate([state.finished, ends], axis=1), best)

    # The search ends when N outputs are finished and no live beam can beat any of them.
    # Each further id lowers the log-probability of a live beam. Log-probabilities are
    # negative, so dividing by a larger penalty gives a higher score. Therefore the final
    # score of the beam is at most its present log-probability divided by the largest
    # penalty. The longest output has `length` ids, so the penalty of `length` ids would
    # be enough. T5X uses the penalty of length + 1 ids, which is at least as large.
    bound = live_scores[:, :1] / length_penalty(length + 1.0, decode)
    done = finished.all(1, keepdims=True) & (finished_scores[:, -1:] > bound)

    # The parent of a new live beam is the old beam that the new beam extends. Before
    # position `at`, the new beam reads the same keys as its parent. At position `at`, the
    # new beam reads the key that its parent has computed. At position `at + 1`, the new
    # beam will read its own key.
    ancestors = take_beams(state.ancestors, parents).at[:, :, at].set(parents)
    ancestors = ancestors.at[:, :, at + 1].set(jnp.arange(N))
    return BeamState(
        ids=live_ids,
        live_scores=live_scores,
        finished_ids=take_beams(finished_ids, best),
        finished_scores=finished_scores,
        finished=finished,
        ancestors=ancestors,
        done=done,
    )


def beam_result(state):
    """Return the finished outputs and their scores, with the best output first.

    If no output of an example has ended with EOS, its unfinished outputs are returned.
    The result is a pair (ids, scores) of arrays with the shapes [B, N, T] and [B, N].
    """
    any_finished = state.finished.any(1, keepdims=True)
    ids = jnp.where(any_finished[..., None], state.finished_ids, state.ids)
    return ids, jnp.where(any_finished, state.finished_scores, state.live_scores)


# ---- the decoding loop -----------------------------------------------------------------


@jax.jit(static_argnames=("cfg", "length", "decode"))
def generate(
    params,
    inputs,
    input_segments,
    cfg,
    length,
    decode=DecodeConfig(),
    rows=None,
    seed=0,
    trie=None,
):
    """Generate N outputs for each example by greedy decoding, sampling or beam search.

    N is 1 in greedy decoding, decode.num_return in sampling, and decode.beams in beam
    search.

    The first input id of the decoder is PAD (0). Each later input id is the id that was
    generated last. The loop ends after `length` ids, or as soon as `done` is true for all
    outputs (in beam search, for all examples).

    The functions that start, extend and finish the outputs run inside jax.shard_map over
    the mesh axis "data". Each device therefore processes only its own examples, and gets
    their logits for the whole vocabulary.

    inputs: the input ids, of shape [B, S].
    input_segments: an array of shape [B, S], which is 0 at padding.
    cfg: a ModelConfig.
    length: the maximum number of generated ids, including EOS.
    decode: a DecodeConfig, which selects the decoding method.
    rows: a number that identifies each example, of shape [B]. The random samples of an
        example depend on this number and on the seed, but not on the other examples in
        the batch. None gives the number 0 to all examples, so equal inputs get equal
        samples.
    seed: the seed of the random samples.
    trie: None, or a Trie (in the lower part of this file). A Trie is a tree of the only
        outputs that are allowed. Its method `restrict` returns versions of the functions
        step and result that generate only these outputs.

    Returns a pair (ids, scores). The ids have the shape [B, N, length], and are 0 after
    EOS. The scores have the shape [B, N]. The output with the highest score comes first.
    """
    if decode.beams:
        N = decode.beams
        start, result = start_beams, beam_result
        step = partial(beam_step, decode=decode)
    elif decode.temperature > 1e-4 or decode.top_k or decode.top_p:
        # A temperature of at most 1e-4 means greedy decoding, as in T5X, unless top_k or
        # top_p is set.
        N = decode.num_return
        start, result = start_greedy, greedy_result
        step = partial(sampling_step, decode=decode, seed=seed)
    else:
        N = 1
        start, step, result = start_greedy, greedy_step, greedy_result
    if trie is not None:
        step, result = trie.restrict(step, result)

    B = len(inputs)
    rows = jnp.zeros(B) if rows is None else rows
    rows = jax.reshard(rows.astype(jnp.uint32), P("data"))
    encoded = model.encode(params, cfg, inputs, input_segments)
    cache, fixed = init_cache(params, cfg, encoded, length, N)
    # A function wrapped in for_own_rows runs on each device, for that device's rows of
    # the batch only.
    for_own_rows = partial(jax.shard_map, out_specs=P("data"))

    @for_own_rows
    def next_ids(state, logits, at):
        state = step(state, jax.nn.log_softmax(logits), at)
        return state.ids[:, :, at], state

    def unfinished(carry):
        at, _, state, _ = carry
        return (at < length) & ~jnp.all(state.done)

    def decode_position(carry):
        at, ids, state, cache = carry
        ancestors = state.ancestors if decode.beams else None
        logits, cache = decode_step(
            params, cfg, ids, at, cache, fixed, input_segments, ancestors
        )
        # The vocabulary may be split over several devices. Gather the logits of the whole
        # vocabulary, because the next id is chosen from all ids.
        logits = jax.reshard(logits, P("data", None, None))
        ids, state = next_ids(state, logits, at)
        return at + 1, ids, state, cache

    # The decoder's first input is the start token, which has id 0 in T5.
    ids = jnp.zeros((B, N), jnp.int32, out_sharding=P("data"))
    state = for_own_rows(lambda rows: start(rows, N, length))(rows)
    carry = (0, ids, state, cache)
    _, _, state, _ = lax.while_loop(unfinished, decode_position, carry)
    return for_own_rows(result)(state)


# ---- scores and vectors ----------------------------------------------------------------


@jax.jit(static_argnames="cfg")
def score(params, batch, cfg):
    """Return the log-probability of the targets of each example, given the inputs.

    The log-probabilities of all target ids are added up. For example, two target ids with
    probability 0.5 each give 2 * log(0.5) = -1.39. The result has the shape [B].

    batch: a data.Batch with one example in each row.
    cfg: a ModelConfig.
    """
    x, w = model.output_layer(params, cfg, model.decoder_output(params, batch, cfg))
    cross_entropy, *_ = model.output_losses(x, w, batch.targets)
    return -jnp.sum(cross_entropy * (batch.target_segments > 0), axis=1)


@jax.jit(static_argnames=("cfg", "pool"))
def encoder_vectors(params, inputs, segments, cfg, pool):
    """Return the vectors that the encoder computes, in float32.

    `pool` is "none", "mean" or "first". "none" returns one vector for each input id, of
    shape [B, S, D]. "mean" returns the mean vector of each example, of shape [B, D].
    "first" returns the vector of the first input id, of shape [B, D].

    inputs: the input ids, of shape [B, S].
    segments: an array of shape [B, S], which is 0 at padding. The mean leaves out
        padding. If an example has no ids, its mean is zero.
    """
    vectors = model.encode(params, cfg, inputs, segments).astype(jnp.float32)
    if pool == "mean":
        is_input = (segments > 0)[..., None]
        total = jnp.sum(vectors, axis=1, where=is_input)
        return total / jnp.maximum(jnp.sum(is_input, axis=1), 1)
    return vectors[:, 0] if pool == "first" else vectors


# ====== below: tuning for TPUs, batches of examples, masked spans, files, the command ===

# ---- What the compiler is told ---------------------------------------------------------
# The function in this section makes decoding faster, but does not change results.


@model.tuned(einsum)
def einsum(equation, left, right):
    """Compute jnp.einsum with a float32 result. On a TPU, pad `left` to save time.

    A TPU computes a matmul with fewer than 8 rows on the vector unit, which takes four
    times as long as reading `right` from memory. With 8 rows, the TPU uses the faster
    matrix unit. Axis 2 of `left`, of shape [B, H, N, ...], is therefore padded to a
    multiple of 8.

    The padding was measured on a TPU v5e, by greedy decoding of the recipe base. A batch
    had 64 examples with 512 input ids and 114 output ids. Decoding took 770 million
    cycles with padding, and 2,878 million without.
    """
    N = left.shape[2]
    if partition.platform() == "tpu":
        left = jnp.pad(left, ((0, 0), (0, 0), (0, -N % 8), (0, 0)))
    out = jnp.einsum(equation, left, right, preferred_element_type=jnp.float32)
    return out[:, :, :N]


# ---- outputs from a list ---------------------------------------------------------------
# With --decode.choices FILE, the model generates only outputs that the file lists. This
# is called constrained decoding. The allowed outputs form a tree (a trie). Its root is
# the empty output, each edge appends one id, and each output is a path from the root to a
# leaf. At each step, only the ids on the edges of the current node are allowed.


class Trie(NamedTuple):
    """A tree of all allowed outputs, stored as a list of its edges.

    The nodes are numbered level by level, and node 0 is the root. Edge e leads to node
    e + 1, and appends the id ids[e]. The edges of node i are first[i], first[i] + 1, ...,
    first[i + 1] - 1.

    For example, the outputs [5, 6] and [7] have the edges 5, 7, 6, 1 and 1. The edges 5
    and 7 leave the root, edge 6 leaves node 1, and the id 1 is EOS.
    """

    first: jax.Array  # [nodes + 1]
    ids: jax.Array  # [edges]
    # The numbers 0, 1, ..., E - 1. E is the largest number of edges that leave one node.
    slots: jax.Array

    def edges(self, nodes):
        """Return the edges that leave each node, and the id of each edge.

        nodes: the nodes, as an array [B, N] of integers.
        Returns two arrays [B, N, E], the edges and the ids. If a node has fewer than E
        edges, the remaining places contain an id that is in no vocabulary.
        """
        edges = self.first[nodes][..., None] + self.slots
        exist = edges < self.first[nodes + 1][..., None]
        return edges, jnp.where(exist, self.ids[edges], 2**31 - 1)

    def restrict(self, step, result):
        """Restrict a decoding method, such as beam search, to the outputs of this Trie.

        The restriction does not change the score of an output, which is its
        log-probability under the model. If there are more beams than allowed outputs, the
        unused beams have a very low score and no ids.

        step: the function that extends the outputs by one id, such as greedy_step.
        result: the function that returns the ids and scores, such as greedy_result.
        Returns the two functions that replace `step` and `result`.
        """

        def restricted_step(state, log_probs, at):
            def follow(i, nodes):
                edges, ids = self.edges(nodes)
                chosen = ids == state.ids[:, :, i, None]
                return jnp.where(chosen, edges + 1, 0).max(axis=-1)

            # Find the node of each output. Begin at the root, and follow one edge for
            # each id of the output. An output that has ended continues with PAD. No edge
            # has the id PAD, and without a matching edge, the next node is the root.
            root = 0 * state.ids[:, :, 0]
            _, ids = self.edges(lax.fori_loop(0, at, follow, root))
            allowed = jnp.put_along_axis(
                jnp.zeros(log_probs.shape, bool), ids, True, -1, False, mode="drop"
            )
            return step(state, jnp.where(allowed, log_probs, -1e9), at)

        def allowed_result(state):
            ids, scores = result(state)
            return jnp.where(is_output(scores)[..., None], ids, data.PAD), scores

        return restricted_step, allowed_result


def is_output(scores):
    """Return for each score whether it is the score of an output, as a boolean array.

    An unused beam has a very low score, for which the result is False. If a model
    computes NaN, the score of an output is NaN, for which the result is True.
    """
    return ~(scores <= MASKED_SCORE / 1000)


def build_trie(outputs):
    """Build the Trie of a list of allowed outputs, such as [[5, 6], [7]].

    An output is a list of ids without EOS. The Trie adds EOS to each output.
    """
    # For each node, store how the outputs can continue after this node. At the root,
    # these are the complete outputs. At the node after the id 5, the output [5, 6] can
    # continue with [6].
    nodes = [[[*output, data.EOS] for output in outputs]]
    first = [0]
    ids = []
    for rests in nodes:  # the loop also visits the nodes that it appends
        children = {}
        for rest in rests:
            if rest:
                children.setdefault(rest[0], []).append(rest[1:])
        ids += children
        nodes += children.values()
        first.append(len(ids))
    return Trie(np.int32(first), np.int32(ids), np.arange(np.diff(first).max()))


def read_choices(cfg, tokenizer, task=None):
    """Return the Trie of the outputs that --decode.choices allows.

    The Trie is a tree of the allowed outputs. Returns None if --decode.choices is empty,
    because all outputs are then allowed.

    task: the data.Task that is decoded, or None. With --decode.choices task, the choices
        of this task are the allowed outputs.

    Raises UserError if an output is too long, or if the vocabulary cannot express it.
    """
    source = cfg.decode.choices
    if not source:
        return None
    check_vocabulary(tokenizer)
    texts = task.choices if task else ()
    if source != "task":
        texts = [
            line.rstrip("\r\n")
            for path, _ in data.find_files(source)
            for _, line in data.read_lines(path, data.InvalidExamples("stop"))
        ]
    length = cfg.decode.max_len or cfg.data.targets_length
    outputs = []
    for text in filter(None, texts):
        outputs.append(tokenizer.encode(text)[: length - 1])  # leave room for EOS
        found = tokenizer.decode(outputs[-1])
        if found != text:
            raise UserError(
                f"--decode.choices {source} allows the output {text!r}. But with the "
                f"vocabulary of the run and --decode.max_len {length}, the model could "
                f"only generate {found!r}: correct the output, or increase "
                f"--decode.max_len."
            )
    if not outputs:
        raise UserError(
            f"--decode.choices {source} allows no output at all: name a file with one "
            f"output on each line, or use a task that has choices."
        )
    return build_trie(outputs)


# ---- batches of examples ---------------------------------------------------------------


class Example(NamedTuple):
    """The token ids of one example.

    The ids go to the model unchanged. If an example needs EOS (id 1), its list already
    ends with EOS, as in [5, 9, 1].
    """

    inputs: list
    # The target ids. Only --mode score needs targets.
    targets: list = ()
    # The number of the example. The random samples depend on this number, so two examples
    # with equal inputs get different samples if their numbers differ.
    number: int = 0


# Each key is a value of --pool. The value is the name of the field that holds the vectors
# in an output line. For example, --pool none writes the field "vectors".
VECTOR_FIELD = {"mean": "mean", "first": "first", "none": "vectors", "model": "vector"}


def padded_length(length):
    """Round up the length of a sequence, for example 40 to 64, and 600 to 1,024.

    JAX compiles a separate program for each length, so few lengths mean few compilations.
    Lengths up to 512 are rounded up to a power of two, and to at least 16. Greater
    lengths are rounded up to a multiple of 512.
    """
    if length > 512:
        return -(-length // 512) * 512
    return max(16, 1 << (length - 1).bit_length())


def pad_batch(sequences):
    """Put lists of ids into the rows of one array, and pad short lists with 0.

    For example, [[5, 9, 1], [7, 1]] becomes the rows [5, 9, 1, 0, ...] and
    [7, 1, 0, 0, ...]. The number of columns is the padded_length of the longest list.
    Returns a pair (ids, mask). The mask has the shape of the ids and is False at padding.
    """
    lengths = list(map(len, sequences))
    mask = np.arange(padded_length(max(lengths))) < np.array(lengths)[:, None]
    ids = np.zeros(mask.shape, np.int32)
    ids[mask] = list(itertools.chain(*sequences))
    return ids, mask


def run_examples(params, cfg, mesh, examples, mode="predict", trie=None):
    """Run the model on many examples in batches, and yield the result of each example.

    The results come in the order of the examples. They do not depend on which examples
    share a batch. A batch needs little padding if its examples have similar lengths.
    Therefore the examples of 16 batches are sorted by length before the batches are
    formed.

    examples: an iterable of Examples.
    mode: "predict", "score", "mean", "first" or "none". The docstring of run_batch says
        what the result is in each mode.
    trie: a Trie with the only outputs that are allowed, or None.

    A batch has at most decode.batch_size examples. A batch has fewer examples if the
    inputs are longer than data.inputs_length.
    """
    most = cfg.decode.batch_size
    devices = mesh.shape["data"]
    bar = data.progress_bar(mode, "example")
    numbered = enumerate(examples)
    while window := list(itertools.islice(numbered, 16 * most)):
        # Sort the examples by the number of input ids, and then by the number of target
        # ids.
        window.sort(key=lambda item: list(map(len, item[1][:2])))
        results = {}
        while window:
            # `window` is sorted by length. The longest examples, which are at its end,
            # form the next batch.
            length = max(padded_length(len(window[-1][1].inputs)), cfg.data.inputs_length)
            rows = max(1, most * cfg.data.inputs_length // length)
            numbers, group = zip(*window[-rows:])
            del window[-rows:]
            # A group of few examples gets a batch with few rows. The number of examples
            # is rounded up to a power of two, and then to a multiple of the number of
            # devices. For example, 5 examples on one device get 8 rows.
            rows = min(rows, 1 << (len(group) - 1).bit_length())
            rows = -(-rows // devices) * devices
            batch_results = run_batch(params, cfg, mesh, group, mode, rows, trie)
            results |= zip(numbers, batch_results)
            bar.update(len(group))
        yield from map(results.get, sorted(results))
    bar.close()


def run_batch(params, cfg, mesh, group, mode, B, trie=None):
    """Run the model on one batch, and return a list with the result of each example.

    If the group has fewer than B examples, copies of the last example fill the batch.
    Decoding ends for a copy when it ends for the last example, so the copies take no
    additional steps. The returned list has the results of the copies at its end.

    group: a list of at most B Examples.
    mode: the name of the wanted result.
        - "predict" returns a pair (ids, scores) for each example. `ids` is a list of
          decode.num_return outputs, or fewer if beam search has found fewer. `scores` is
          the list of their scores. The output with the highest score comes first. An
          output is a list of ids without EOS.
        - "score" returns the sum of the log-probabilities of the targets.
        - "mean", "first" and "none" return vectors of the encoder. encoder_vectors
          explains these vectors.
    B: the number of rows of the batch.
    trie: a Trie with the only outputs that are allowed, or None.
    """
    group = [*group, *[group[-1]] * (B - len(group))]
    inputs, targets, numbers = zip(*group)
    inputs, input_segments = pad_batch(inputs)
    targets, target_segments = pad_batch(targets)
    numbers = np.uint32(numbers)
    length = cfg.decode.max_len or cfg.data.targets_length
    beams = max(cfg.decode.beams, cfg.decode.num_return) if mode == "predict" else 0
    T = length if beams else targets.shape[1]
    partition.check_memory(
        model.minimum_memory(cfg.model, B, inputs.shape[1], T, beams=beams),
        "--decode.batch_size, --decode.beams, --decode.max_len or the input length",
    )
    batch = data.complete_batch(inputs, targets, input_segments, target_segments)
    # Each device holds some rows of the batch. Each process passes only the rows that its
    # own devices hold.
    local = partition.local_rows(B, mesh)
    batch, numbers = partition.put_batch(
        jax.tree.map(lambda a: a[local], (batch, numbers)), B, mesh
    )
    if mode == "score":
        return to_numpy(score(params, batch, cfg.model)).tolist()
    inputs = (batch.inputs, batch.input_segments)
    if mode != "predict":
        vectors = to_numpy(encoder_vectors(params, *inputs, cfg.model, mode))
        if mode == "none":
            return [row[: len(x.inputs)] for row, x in zip(vectors, group)]
        return vectors
    outputs = generate(
        params, *inputs, cfg.model, length, cfg.decode, numbers, cfg.train.seed, trie
    )
    kept = cfg.decode.num_return
    ids, scores = (to_numpy(array)[:, :kept] for array in outputs)
    counts = is_output(scores).sum(axis=1)
    return [
        (list(map(cut_at_eos, outputs[:n])), row[:n].tolist())
        for outputs, row, n in zip(ids, scores, counts)
    ]


def to_numpy(array):
    """Return a sharded JAX array as a NumPy array. Every process gets the full array."""
    return np.asarray(jax.reshard(array, P()).addressable_data(0))


def cut_at_eos(ids):
    """Return the ids before the first EOS or padding: [5, 9, 1, 0] becomes [5, 9]."""
    return list(itertools.takewhile(lambda i: i > data.EOS, map(int, ids)))


# ---- masked spans ----------------------------------------------------------------------


def split_spans(ids, tokenizer):
    """Split a list of ids at the sentinels, which are tokens such as <extra_id_0>.

    For example, [8, <extra_id_0>, 5, 6] becomes [(None, [8]), (0, [5, 6])]. Each pair has
    the number of a sentinel and the ids after this sentinel. The first pair has None and
    the ids before the first sentinel. EOS and all later ids are left out. An id that is
    not in the vocabulary becomes UNK, the unknown token.
    """
    spans = [(None, [])]
    for i in tokenizer.content(ids):
        if i in tokenizer.sentinel_ids:
            # The ids of the sentinels count down. For example, if <extra_id_0> has the id
            # 999, then <extra_id_1> has the id 998.
            spans.append((tokenizer.sentinel_ids[-1] - i, []))
        else:
            spans[-1][1].append(i)
    return spans


def fill_blanks(inputs, targets, tokenizer):
    """Fill the masked spans of the inputs from the targets, and return the text.

    For example, the inputs "Return the <extra_id_0> value" and the targets
    "<extra_id_0> current" give "Return the [current] value". If a sentinel such as
    <extra_id_0> is missing in the targets, ____ takes its place. Inputs and targets are
    lists of token ids.
    """
    (_, words), *blanks = split_spans(inputs, tokenizer)
    # In the targets, leave out the ids before the first sentinel, because these ids
    # belong to no masked span.
    spans = dict(split_spans(targets, tokenizer)[1:])
    text = tokenizer.raw_text(words)
    for number, words in blanks:
        if number in spans:
            # If the text of a span begins with a space, put the space before the bracket:
            # write "a [b]", and not "a[ b]".
            text += re.sub("^( ?)", r"\1[", tokenizer.raw_text(spans[number])) + "]"
        else:
            text += " ____ "
        text += tokenizer.raw_text(words)
    return " ".join(text.split())


# ---- reading examples ------------------------------------------------------------------


def check_vocabulary(tokenizer):
    """Raise UserError if a run has no vocabulary, which is needed to tokenize texts."""
    if tokenizer is None:
        raise UserError(
            "This run has no vocabulary, so it cannot read texts: copy the file "
            "spiece.model into the run directory, or use lists of ids as inputs."
        )


@dataclass
class ExampleEncoder:
    """A callable object that converts a line of --input to an Example with token ids.

    A line is a dict such as {"inputs": "number: 4711"}. With --mode score, the line also
    has the field "targets".
    """

    cfg: configs.Config
    # The Tokenizer, or None if the run has no vocabulary.
    tokenizer: data.Tokenizer | None
    # True if each line must have the field "targets" in addition to the field "inputs".
    scoring: bool
    # The task from which the lines come, or None if they come from a file or from
    # standard input. The task says whether the inputs end with EOS.
    task: data.Task | None = None
    # The number of texts that have been truncated so far.
    cut: int = 0
    # The number of inputs so far that do not end with EOS.
    without_eos: int = 0

    def ids(self, line, key):
        """Return the token ids of the field "inputs" or "targets" of a line.

        If the line comes from a task, the result has the same ids as in training. For any
        other line, a text is tokenized and truncated, and EOS is appended. A list of ids
        is returned unchanged. If the field is missing or invalid, ValueError is raised.

        line: a dict.
        key: the name of the field.
        """
        value = line.get(key)
        problem = data.invalid_reason(value, self.cfg.model.vocab_size)
        if problem:
            raise ValueError(
                f"has {problem} in the field {key} (the fields of this line are "
                f"{', '.join(line)})"
            )
        if isinstance(value, str):
            check_vocabulary(self.tokenizer)
        elif self.task is None:
            return list(map(int, value))
        (ids,) = data.encode_texts([value], self.tokenizer)
        rule = key, self.task or data.Task(), self.cfg.data
        self.cut += len(ids) > data.truncated_length(*rule)[2]
        (ids,) = data.truncate([ids], *rule)
        return ids.tolist()

    def __call__(self, line, number=0):
        """Convert a line to an Example, or raise ValueError if the line is invalid.

        A line is a dict such as {"inputs": "number: 4711"}. With --mode score, it also
        has the field "targets".

        number: the number of the example, which selects the random samples.
        """
        inputs = self.ids(line, "inputs")
        targets = self.ids(line, "targets") if self.scoring else ()
        self.without_eos += inputs[-1:] != [data.EOS]
        return Example(inputs, targets, number)


def read_texts(path, bad):
    """Yield each line of a text file as an example, without the line break.

    For example, line 3 of a.txt gives the pair ("a.txt:3", {"inputs": "some text"}). For
    a line that is not UTF-8, the function `bad` is called instead.
    """
    for number, line in data.read_lines(path, bad):
        if line:  # an empty text stands for a line that is not UTF-8
            yield f"{path}:{number}", {"inputs": line.rstrip("\r\n")}


# Each key is a kind of input file, such as "jsonl". The value is the function that reads
# the file. data.file_kind returns the kind of a file.
READERS = {
    "jsonl": data.read_jsonl,
    "parquet": data.read_parquet,
    "csv": partial(data.read_table, ",", True),
    "tsv": partial(data.read_table, "\t", True),
    "text": read_texts,
}


def open_input(name, cfg):
    """Open the files, the data source or the task that --input names.

    Returns a tuple (task, read, identity). `task` is the data.Task, or None if --input
    names no task. The function `read` reads the lines of the input. read(bad) yields
    pairs such as ("a.jsonl:3", {"inputs": "some text"}). For an unreadable line,
    read(bad) calls bad("a.jsonl:3", "is not JSON") instead. `identity` is a JSON value
    that changes when the input changes, such as the sizes and times of the files.

    name: task:NAME[:SPLIT], a data source such as lines:de.txt,en.txt, or the path of a
    JSONL, CSV, TSV, parquet or text file.
    """
    kind, _, rest = name.partition(":")
    if kind == "task":
        name, split = f"{rest}:validation".split(":")[:2]
        cfg = data.evaluation_config(name, cfg)
        task, files = data.open_task(name, split, cfg)
        read = partial(data.read_task, name, split, cfg)
        return task, read, data.source_identity(name, task, files, cfg)
    if kind in data.SOURCES:
        files = data.open_source(name, "validation", cfg, whole=True)
    else:
        read = READERS[data.file_kind(name)]
        files = data.group_files(data.find_files(name, pipes=True), read)
        files = data.rename_fields(files, cfg)
    if not files:
        raise UserError(
            f"No file matches --input {name}: correct the path, or name a data source "
            f"such as lines:de.txt,en.txt or csv:FILE."
        )

    def read_files(bad):
        for file in files:
            yield from file.read(bad)

    return None, read_files, [file.stamp for file in files]


def read_examples(read, encode, skip_empty):
    """Yield a pair (line, example) for each line of --input.

    `line` is a dict, and `example` is the Example made from this dict. An invalid line
    raises UserError. With --data.on_error skip, an invalid line instead gets a field
    "error", and its example is None.

    read: the function that open_input returns.
    encode: an ExampleEncoder.
    skip_empty: whether a line with an empty text gets an empty prediction. The example of
        this line is then None. The model would invent a text for it.
    """
    report_invalid = data.InvalidExamples(encode.cfg.data.on_error)
    unread = []

    def bad(where, problem):
        report_invalid(where, problem)
        unread.append(({"error": f"{where} {problem}"}, None))

    for number, (where, line) in enumerate(read(bad)):
        # The list `unread` has the unreadable lines that stand before this line. Yield
        # them first, to keep the order of the input.
        yield from unread
        unread.clear()
        example = None
        if skip_empty and not line["inputs"].strip():
            line["prediction"] = ""
        else:
            try:
                example = encode(line, number)
            except ValueError as error:
                report_invalid(where, str(error))
                line["error"] = f"{where} {error}"
        yield line, example
    yield from unread


# ---- writing results -------------------------------------------------------------------


def json_line(line):
    """Return a dict as one line of JSON. Characters outside ASCII are not escaped."""
    text = json.dumps(line, ensure_ascii=False, default=json_default)
    # UTF-8 cannot encode a lone surrogate, which is half of a character. Write a lone
    # surrogate as an escape sequence such as \ud83d, which JSON allows.
    return text.encode(errors="backslashreplace").decode() + "\n"


def json_default(value):
    """Convert a NumPy array to a Python list, and a NumPy number to a Python number.

    Any other value is converted to text. json.dumps calls this function for each value
    that it cannot write itself.
    """
    return value.tolist() if hasattr(value, "tolist") else str(value)


def result_fields(result, example, line, field, cfg, tokenizer):
    """Return a dict of the fields that a result adds to an output line.

    For example, with --mode predict, the dict is {"prediction": "four"}.
    A prediction is a text if the inputs of the line are a text, and a list of ids if the
    inputs are a list of ids.

    result: the result that run_batch returns for the example.
    example: the Example that was made from the line.
    line: the line of --input, as a dict.
    field: the name of the field for vectors, or "" unless the mode is encode.
    """
    if isinstance(result, float):
        return {"score": result}
    if field:
        # Write each float32 with as few digits as possible. For example, write 0.1 and
        # not 0.10000000149011612.
        vectors = result.astype(str).astype(float).tolist()
        return {"ids": example.inputs, field: vectors}
    outputs, scores = result
    if isinstance(line["inputs"], str):
        outputs = list(map(tokenizer.decode, outputs))
    fields = {"prediction": outputs[0]}
    if cfg.decode.return_all or len(outputs) > 1:
        fields |= {"predictions": outputs, "scores": scores}
    return fields


def describe_job(args, cfg, step, tokenizer, identity):
    """Return a dict with everything that the lines of --output depend on.

    The keys are flags, such as "--mode", and other facts, such as "the step". A command
    resumes an unfinished output file only if the command has the same dict. Other flags
    may change.

    step: the step of the checkpoint that was loaded.
    identity: a JSON value that changes when the input changes, from open_input.
    """
    flags = {f"--{name}": value for name, value in vars(args).items()}
    del flags["--output"]
    # The options in `neutral` do not affect the results. Of the section train, only the
    # seed affects the results, and it is added below.
    neutral = {"train", "mesh", "distributed", "decode.batch_size", "data.on_error"}
    manifest = partition.Checkpoints(args.run_dir).path(step) / "manifest.json"
    facts = {
        "--train.seed": cfg.train.seed,
        "the step": step,
        # If the run was deleted and trained again, it can have a different checkpoint of
        # the same step. The checksums of the arrays show the difference.
        "the checkpoint": configs.checksum(configs.read_json(manifest, {})["arrays"]),
        "the vocabulary": tokenizer and tokenizer.sha256,
        "the file of --decode.choices": data.find_files(cfg.decode.choices),
        "the checksum of the input": configs.checksum(identity),
        "the recipe file": list(configs.RECIPE_CODE.values()),
        # The results depend on the number format. By default, a GPU computes in bfloat16,
        # and a CPU in float32.
        "the number format": partition.default_compute_dtype(),
    }
    return flags | configs.settings(cfg, neutral) | facts


def begun_job(output):
    """Return the dict that describe_job made for the command that began an output file.

    The dict is read from OUTPUT.partial.json. If no line has been written yet, the dict
    is empty. Raises UserError if the output file is already complete, or if
    OUTPUT.partial.json is missing or damaged.
    """
    if os.path.exists(output):
        raise UserError(
            f"{output} already exists: name another --output, or move the file away."
        )
    path = configs.to_path(f"{output}.partial")
    if not path.exists() or not path.stat().st_size:
        return {}
    return configs.read_json(configs.to_path(f"{path}.json"), {}, f"remove {path}")


def open_partial(output, job, begun):
    """Open the unfinished output file OUTPUT.partial, so that a command can append lines.

    Returns the file and the number of complete lines in it. The file stays locked until
    it is closed. An incomplete last line is removed.

    output: the path of OUTPUT.
    job: the dict that describe_job returns. OUTPUT.partial.json stores this dict.
    begun: the dict of the command that began the file, from begun_job. If an item
        differs, a UserError names this item.
    """
    path = f"{output}.partial"
    # Only the main process writes the output file. All other processes write to
    # os.devnull, which discards their lines.
    if not partition.is_main_process():
        return open(os.devnull, "ab"), 0
    configs.refuse_differences(
        job,
        begun,
        f"{path} was begun by another command or with other data",
        "repeat the command that began it, or remove the file",
    )
    description = configs.to_path(f"{path}.json")
    description.parent.mkdir(parents=True, exist_ok=True)
    try:
        file = configs.lock(path)
    except BlockingIOError:
        raise UserError(
            f"Another process is writing {path}: wait until it ends, or name another "
            f"--output."
        ) from None
    file.seek(0)
    content = file.read()
    lines = content.count(b"\n")
    if content:
        file.truncate(content.rfind(b"\n") + 1)
        note(f"{path} already has {lines:,} lines. The command is resuming after them.")
    else:
        configs.write_file(description, json.dumps(job, indent=1))
    return file, lines


def finish_output(unfinished, path, field):
    """Convert OUTPUT.partial, a JSONL file, to the kind of file that --output names.

    An .npz file gets the ids and the vectors of all lines. A line with an error has no
    vector. With --pool mean or --pool first, the .npz file has a vector of nan for such a
    line.

    The first line of a table names the columns. A value that is not a text, such as a
    list of outputs, is written as JSON.

    A .txt file gets the prediction or the score of each line. Line ends inside a result
    become spaces, so that line n of the file belongs to example n. If an example has an
    error, its line is empty.

    unfinished: the path of the JSONL file. path: the path of OUTPUT.
    field: the name of the field of a line that holds the vectors.
    """

    def read_lines():
        with open(unfinished) as file:
            yield from map(json.loads, file)

    kind = data.file_kind(path)
    content = io.StringIO(newline="")
    if path.endswith(".npz"):
        ids = [np.int32(line.get("ids", [])) for line in read_lines()]
        vectors = [np.float32(line.get(field, [])) for line in read_lines()]
        width = max(array.shape[-1] for array in vectors)
        missing = np.full((int(field != "vectors"), width), np.float32(np.nan))
        rows = [x.reshape(-1, width) if x.size else missing for x in vectors]
        content = io.BytesIO()
        np.savez(
            content,
            ids=np.concatenate(ids),
            lengths=list(map(len, ids)),
            vectors=np.concatenate(rows),
        )
    elif kind in data.DELIMITERS:
        names = dict.fromkeys(name for line in read_lines() for name in line)
        table = csv.writer(content, delimiter=data.DELIMITERS[kind], lineterminator="\n")
        table.writerow(names)
        for line in read_lines():
            values = [line.get(name, "") for name in names]
            table.writerow(x if isinstance(x, str) else json.dumps(x) for x in values)
    elif kind == "text":
        for line in read_lines():
            result = line.get("prediction", line.get("score", ""))
            content.write(" ".join(str(result).splitlines()) + "\n")
    else:
        os.replace(unfinished, path)
        return
    configs.write_file(path, content.getvalue())
    os.remove(unfinished)


def run_file(args, cfg, mesh, tokenizer):
    """Run the model on each line of --input, and write the results to --output.

    The results are first written to OUTPUT.partial, which becomes OUTPUT at the end. If
    the command is killed, the same command resumes after the last complete line. All
    processes run the model, but only the main process writes.
    """
    shard, shards = configs.parse_shard(args.shard)
    mode = args.mode
    field = ""
    layers = []
    if mode == "encode":
        has_layers = (configs.to_path(args.run_dir) / "modules.json").exists()
        mode = args.pool or ("model" if has_layers else "mean")
        field = VECTOR_FIELD[mode]
        if mode == "model":
            mode, layers = read_vector_head(args.run_dir)
    task, read, identity = partition.run_on_all(lambda: open_input(args.input, cfg))
    trie = read_choices(cfg, tokenizer, task) if mode == "predict" else None
    # While train.py is running, --step latest or --step best may mean a newer checkpoint
    # when a command is repeated. But all lines of a file must come from one checkpoint.
    # A resumed command therefore loads the checkpoint with which its file was begun.
    begun = partition.run_on_all(lambda: begun_job(args.output))
    begun = partition.from_main_process(begun)
    step = partition.resolve_step(args.run_dir, args.step)
    if begun.get("--step") == args.step:
        step = begun["the step"]
    step, params = load_params(cfg, args.run_dir, step)
    job = describe_job(args, cfg, step, tokenizer, identity)
    file, done = partition.run_on_main_first(
        lambda: open_partial(args.output, job, begun)
    )
    done = partition.from_main_process(done)

    encode = ExampleEncoder(cfg, tokenizer, mode == "score", task)
    is_text = args.input.startswith("lines:") or data.file_kind(args.input) == "text"
    lines = read_examples(read, encode, skip_empty=is_text and mode == "predict")
    lines = itertools.islice(lines, shard + done * shards, None, shards)
    # run_examples reads many examples before it yields the first result. Meanwhile,
    # itertools.tee stores the lines that belong to these examples. Each line is later
    # written together with its result.
    lines, ahead = itertools.tee(lines)
    examples = (example for _, example in ahead if example)
    results = run_examples(params, cfg, mesh, examples, mode, trie)
    count = 0
    start = time.perf_counter()
    with configs.naming_file(file.name), file:
        for count, (line, example) in enumerate(lines, 1):
            if example:
                result = next(results)
                for layer in layers:
                    result = layer(result)
                line |= result_fields(result, example, line, field, cfg, tokenizer)
            file.write(json_line(line).encode())
            file.flush()
        if partition.is_main_process():
            os.fsync(file.fileno())
            if done + count:
                finish_output(file.name, args.output, field)
            else:
                os.remove(file.name)
            os.remove(f"{file.name}.json")
    if not done + count:
        raise UserError(
            f"{args.input} has no lines for --shard {args.shard}: check --input and "
            f"--shard."
        )
    rate = count / (time.perf_counter() - start)
    note(f"{args.output} is complete: {count:,} examples at {rate:.4g} examples/s.")
    note_differences(encode)


def note_differences(encode):
    """Print how many texts were truncated, and how many inputs do not end with EOS.

    A number that is 0 is not printed. The inputs without EOS matter, because models such
    as T5 were trained on inputs that end with EOS. For inputs without EOS, these models
    often generate wrong text. T0 was trained on inputs without EOS, so nothing is printed
    about EOS for T0.

    encode: the ExampleEncoder that has converted all lines.
    """
    is_file = encode.task is None
    if is_file and encode.without_eos and False not in data.trained_ends(encode.cfg):
        note(
            f"warning: {encode.without_eos:,} inputs do not end with EOS (id 1), unlike "
            f"the inputs of T5's tasks, so the outputs may be wrong. infer.py uses lists "
            f"of token ids unchanged: append the id 1 to each list."
        )
    if encode.cut:
        note(
            f"{encode.cut:,} texts were truncated: increase --data.inputs_length or "
            f"--data.targets_length to keep more of each text."
        )


def run_lines(lines, cfg, mesh, tokenizer, params, raw):
    """Generate outputs for each text, and print each output on its own line.

    An empty text gives an empty line.

    lines: an iterable of texts, as bytes in UTF-8.
    raw: whether to print only the generated text. If `raw` is False, and a text has
        sentinels such as <extra_id_0>, the text is printed with its masked spans filled
        in. Outputs from a list (--decode.choices) are always printed as they are.
    """
    encode = ExampleEncoder(cfg, tokenizer, False)
    trie = read_choices(cfg, tokenizer)
    for number, line in enumerate(lines):
        text = line.decode(errors="replace").strip()
        if not text:
            print(flush=True)
            continue
        example = encode({"inputs": text}, number)
        ((outputs, scores),) = run_examples(params, cfg, mesh, [example], trie=trie)
        has_blanks = len(split_spans(example.inputs, tokenizer)) > 1
        for ids, score in zip(outputs, scores):
            if has_blanks and not raw and trie is None:
                text = fill_blanks(example.inputs, ids, tokenizer)
            else:
                text = tokenizer.decode(ids)
            text = configs.escape_controls(text.replace("\n", " "))
            print(f"{score:.4f}\t{text}" if cfg.decode.return_all else text, flush=True)
    note_differences(encode)


# ---- the command -----------------------------------------------------------------------


def load_params(cfg, run_dir, step=None):
    """Load the parameters of a run from a checkpoint, and return a pair (step, params).

    The parameters are float32, and each array is split over the devices of the mesh.

    cfg: the Config of the run.
    run_dir: the directory of the run.
    step: the step of the checkpoint. None means the newest complete checkpoint.
    """

    def template(p):
        sharding = jax.NamedSharding(jax.sharding.get_mesh(), partition.spec(p.axes))
        return jax.ShapeDtypeStruct(p.shape, jnp.float32, sharding=sharding)

    params = jax.tree.map(template, model.param_table(cfg.model), is_leaf=model.is_param)
    vocabulary = configs.read_run(run_dir)[1]["vocabulary_sha256"]
    identity = configs.weights_identity(cfg, vocabulary)
    checkpoints = partition.Checkpoints(run_dir, identity=identity)
    # A run with --train.ema also stores a moving average of the weights. Load this
    # average instead of the weights.
    name = "ema" if cfg.train.ema else "params"
    found = checkpoints.load({name: params}, step)
    if not found:
        raise UserError(
            f"{run_dir} has no complete checkpoint yet: train the model with train.py "
            f"--run_dir {run_dir}."
        )
    step, tree = found
    return step, tree[name]


def check_decoder(cfg, mode=None):
    """Raise UserError if the model has no decoder, but the mode needs one.

    The mode "encode" needs no decoder, because it writes the encoder's vectors. The mode
    "loss" needs no decoder if --train.loss names a loss of a recipe file.
    """
    free = ["encode"] if cfg.train.loss == "cross_entropy" else ["encode", "loss"]
    if not cfg.model.num_decoder_layers and mode not in free:
        raise UserError(
            "This model has no decoder: use infer.py --mode encode, which writes the "
            "encoder's vectors. Training needs a --train.loss of a recipe file."
        )


def open_model(args, changes, recipe=False):
    """Start JAX, and return the Config, the mesh and the Tokenizer of a run.

    The Tokenizer is None if the run has no vocabulary.

    args: the flags of the command, from configs.parse_args.
    changes: the fields of the Config that were given as flags, from configs.parse_args.
    recipe: whether to execute the file recipe.py of the run, which may define tasks.
    """
    if not args.run_dir:
        raise UserError(
            "--run_dir is missing: name the run that has the model, for instance "
            "--run_dir runs/tiny."
        )
    cfg = configs.resolve(args, changes, recipe)
    check_decoder(cfg, args.mode)
    partition.start_jax(cfg)
    partition.check_same_command(cfg, args)
    mesh = partition.set_mesh(cfg)
    tokenizer = None
    if (configs.to_path(args.run_dir) / "spiece.model").exists():
        tokenizer = data.load_run_tokenizer(args.run_dir)
    return cfg, mesh, tokenizer


def main(argv):
    args, changes = configs.parse_args(
        __doc__,
        argv,
        text_=dict(nargs="?", help="the input text (default: read standard input)"),
        input=dict(default="", help="a file, a data source, or task:NAME[:SPLIT]"),
        output=dict(
            default="",
            help="the file to write: .jsonl, .csv, .tsv, .txt with one result on each\n"
            "line, or .npz with --mode encode",
        ),
        mode=dict(
            default="predict",
            choices=("predict", "score", "encode"),
            help="generate outputs, score targets, or write the encoder's vectors",
        ),
        pool=dict(
            default="",
            choices=("", *VECTOR_FIELD),
            help="with --mode encode, write the mean vector of each text, the first "
            "vector, all vectors (none), or what a model of sentence-transformers "
            "computes (model); the default is model for such a model, and else mean",
        ),
        raw=dict(
            action="store_true", help="print the generated text, not the filled input"
        ),
        step=dict(
            default="latest", help="the checkpoint to load: a step, latest or best"
        ),
        shard=dict(
            default="0/1",
            metavar="I/N",
            help="read every N-th line, beginning at line I (counted from 0)",
        ),
    )
    reads_file = args.input and args.output and args.text is None
    reads_text = not args.input and not args.output and args.mode == "predict"
    if not reads_file and not reads_text:
        raise UserError(
            "infer.py reads either a file or a text: give both --input and --output, or "
            "give only a text (or standard input) with --mode predict."
        )
    other = (".npz",) if args.mode == "encode" else (".csv", ".tsv", ".txt")
    endings = (".jsonl", *other)
    if args.output and not args.output.endswith(endings):
        raise UserError(
            f"With --mode {args.mode}, the name of the output file must end with "
            f"{' or '.join(endings)}, but --output is {args.output}: choose another name."
        )
    # If --input names a task, execute recipe.py of the run, which may define this task.
    cfg, mesh, tokenizer = open_model(
        args, changes, recipe=args.input.startswith("task:")
    )
    if args.input:
        return run_file(args, cfg, mesh, tokenizer)
    lines = sys.stdin.buffer
    if args.text is not None:
        lines = [args.text.encode(errors="surrogateescape")]
    elif jax.process_count() > 1:
        raise UserError(
            "Several processes cannot share standard input: give a file of inputs with "
            "--input, and the file to write with --output."
        )
    step = partition.resolve_step(args.run_dir, args.step)
    _, params = load_params(cfg, args.run_dir, step)
    run_lines(lines, cfg, mesh, tokenizer, params, args.raw)


if __name__ == "__main__":
    configs.run_command(main)
