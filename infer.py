"""Generate text with a trained T5, or score given targets.

This command loads a trained model from a run directory, and reads texts. For each text,
it writes the generated text, the log-probability of a given target, or the vectors of the
encoder. The encoder runs once for each text. The decoder then generates one token after
another. A cache keeps the keys and values of earlier positions.

    python infer.py --run_dir runs/tiny "Return the <extra_id_0> of the list."
    python infer.py --run_dir runs/tiny < texts         one output line per input line
    python infer.py --run_dir RUN --input IN.jsonl --output OUT.jsonl
    python infer.py --run_dir RUN --input IN.jsonl --output OUT.jsonl --mode score
    python infer.py --run_dir RUN --input IN.jsonl --output OUT.npz --mode encode
    python infer.py --run_dir RUN --input task:glue_rte_v002:validation --output OUT.jsonl

Each line of IN.jsonl has a field "inputs". For --mode score, each line also has a field
"targets". Both fields are texts or lists of token ids. Lists of ids are neither truncated
nor extended by EOS. OUT.jsonl has the lines of IN.jsonl in the same order, with a new
field "prediction" or "score".

With --mode encode, each line gets a field "ids" and a field with vectors of the encoder.
The name of the second field depends on --pool. The name is "mean" for --pool mean,
"first" for --pool first, and "vectors" for --pool none. OUT.npz has three arrays: the
ids of all lines, the vectors of all lines, and the number of ids in each line.

The result for a line does not depend on the other lines in the same batch. Several
machines can share an input file if each machine is given a different --shard.

Example: three steps of greedy decoding, with a vocabulary of ten ids. EOS has id 1.

    >>> import jax, infer
    >>> state = infer.start_greedy(rows=[0], N=1, length=3)
    >>> for at, likeliest in enumerate([7, 1, 9]):
    ...     logits = jax.nn.one_hot([[likeliest]], 10)
    ...     state = infer.greedy_step(state, logits, at)
    >>> state.ids.tolist()
    [[[7, 1, 0]]]

Shapes use the letters of model.py. This file also uses three other letters:

    N outputs of an example (samples or beams)   S input length   T maximum output length
"""

import functools
import io
import itertools
import json
import math
import os
import sys
import time
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import configs
import data
import model
import partition
from configs import DecodeConfig, UserError, note

# ---- the cache and one decoding step ---------------------------------------------------
# The decoder is causal, so the keys and values of a position do not depend on later
# positions. Decoding computes the keys and values of each position once, and stores the
# keys and values in a cache. Each decoding step runs the decoder layers for the newest
# position only.


# `einsum` computes jnp.einsum in float32. The section "What the compiler is told" below
# defines another `einsum`, which has the same results but is faster on a TPU.
einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def cached_attention(q, k, v, bias, mask):
    """Compute attention, softmax(q k^T + bias) v, for the newest position of N beams.

    The queries `q` have the shape [B, H, N, C]. The keys `k` and the values `v` have the
    shape [B, H, K, C]. The position bias `bias` is None, or can be broadcast to
    [B, H, N, K]. The boolean array `mask` is True where a query may attend to a key. The
    result has the shape [B, H, N, C] and the dtype of `v`.
    """
    scores = einsum("bhqc,bhkc->bhqk", q, k)
    if bias is not None:
        scores = scores + bias
    scores = jnp.where(mask, scores, -1e10)
    # Subtract the maximum, so that exp does not overflow. The softmax does not change.
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    out = einsum("bhqk,bhkc->bhqc", weights.astype(v.dtype), v)
    # Normalize the softmax after the matmul. The result is the same, but fewer numbers
    # are divided.
    return (out / weights.sum(-1, keepdims=True)).astype(v.dtype)


def init_cache(params, cfg, encoded, length, beams=1):
    """Create an empty cache, and compute the arrays that all decoding steps share.

    encoded: the output of the encoder, of shape [B, S, D].
    length: the maximum number of ids that the decoder generates.
    beams: the number of beams or samples of each example.

    Returns two lists. Both lists have one element for each decoder layer. The first list
    is the cache. Its elements are pairs (keys, values) for self-attention. The keys and
    the values have the shape [B, H, length * beams, C], and are filled with zeros.

    The elements of the second list are tuples of three values:
    - The weights of the layer, in the dtype of `encoded`.
    - The pair (keys, values) for cross-attention. Keys and values have the shape
      [B, H, S, C], and all beams share them.
    - The position bias of self-attention, from model.relative_bias. The bias has the
      shape [1, H, length, length]. On a mesh, the first axis may have one copy of the
      bias for each device of the "data" axis.
    """
    stack = params["decoder"]
    table = model.param_table(cfg)["decoder"]["layers"]
    shared = model.relative_bias(stack, length, length, False, cfg)
    cache = []
    fixed = []
    # The parameters of all layers are stacked in one array. The layers are sliced from
    # this array here, before the decoding loop. If lax.scan ran the layers in the
    # decoding loop, XLA would copy each slice in every decoding step.
    for i in range(cfg.num_decoder_layers):
        weights = jax.tree.map(lambda w: w[i].astype(encoded.dtype), stack["layers"])
        weights = model.reshard_for_compute(weights, table)
        cross = model.keys_values(weights["cross_attention"], encoded, cfg)
        bias = model.relative_bias(
            weights["self_attention"], length, length, False, cfg, shared
        )
        B, H, _, C = cross[0].shape
        sharding = model.sharding_of(cross[0])
        empty = jnp.zeros((B, H, length * beams, C), encoded.dtype, out_sharding=sharding)
        cache.append((empty, empty))
        fixed.append((weights, cross, bias))
    return cache, fixed


def decode_step(params, cfg, ids, at, cache, fixed, input_segments, ancestors=None):
    """Run the decoder for position `at` of all beams, and return the next logits.

    ids: the decoder's input ids at position `at`, of shape [B, N].
    cache, fixed: the two lists that init_cache returns.
    input_segments: an array of shape [B, S], which is 0 at padding.
    ancestors: None, or an array of shape [B, N, T] with numbers of beams. For example,
        ancestors[b, 2, 5] = 0 says that beam 2 continues an output for which beam 0
        computed the key and the value of position 5. If `ancestors` is None, every beam
        uses only the keys and values that this beam has computed.

    Returns a pair (logits, cache). The logits are float32 and have the shape [B, N, V].
    The returned cache includes the keys and values of position `at`.

    All N beams of an example attend to the keys of all N beams together. A mask hides the
    keys that do not belong to the output of a beam. When beam search reorders the beams,
    only `ancestors` changes. Keys and values are not copied.
    """
    N = ids.shape[1]
    length = cache[0][0].shape[2] // N
    if ancestors is None:
        ancestors = jnp.arange(N)[None, :, None]
    # Keys are sorted by position, and the keys of one position are sorted by beam. A beam
    # may attend to a key under two conditions. The position of the key is at most `at`.
    # The beam that computed the key is the ancestor of the attending beam at the key's
    # position.
    not_future = (jnp.arange(length) <= at)[:, None]
    visible = not_future & (ancestors[..., None] == jnp.arange(N))  # [B or 1, N, T, N]
    rows = model.sharding_of(visible)[0]
    self_mask = visible.reshape(len(visible), 1, N, length * N, out_sharding=P(rows))
    # Every query attends to all input ids except padding. attention_mask compares the
    # segment numbers of queries and keys. The segments of all queries are 1, and
    # `input_segments > 0` is True, which equals 1, except at padding.
    query_segments = jnp.ones_like(input_segments[:, :1])
    cross_mask = model.attention_mask(query_segments, input_segments > 0)

    x = model.embed(params, ids, cfg, None)
    new_cache = []
    for stored, (weights, cross, biases) in zip(cache, fixed):
        # The bias of position `at` is the same for all N beams. The keys of one position
        # are N neighbors, so each number of the bias is repeated N times.
        bias = lax.dynamic_slice_in_dim(biases, at, 1, axis=2)
        bias = jnp.repeat(bias, N, axis=3)
        h = model.rms_norm(x, weights["self_attention"]["norm"])
        # Write the keys and values of this position into the cache.
        added = model.keys_values(weights["self_attention"], h, cfg)
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
        )
    x = model.final_norm(x, params["decoder"])
    return model.unembed(params, cfg, x), new_cache


# ---- greedy decoding -------------------------------------------------------------------
# A decoding method consists of three functions, which the function `generate` below
# calls. `start` creates a state. `step` chooses the next ids from the logits. `result`
# returns the generated ids and the scores of the outputs. Under shard_map, each device
# runs these functions for the rows of the batch that the device holds.


class GreedyState(NamedTuple):
    """The state of greedy decoding or sampling, after some ids were generated.

    Greedy decoding has N = 1 output for each example. Sampling has N samples.
    """

    # The generated ids, of shape [B, N, T]. The ids after EOS are 0.
    ids: jax.Array
    # The sum of the log-probabilities of the ids of each output, of shape [B, N].
    scores: jax.Array
    # Whether each output has ended with EOS, of shape [B, N].
    done: jax.Array
    # The number of each example, of shape [B]. Sampling derives random keys from it.
    rows: jax.Array


def start_greedy(rows, N, length):
    """Create the state of greedy decoding or sampling, with N empty outputs per example.

    rows: the number of each example, of shape [B].
    length: the maximum number of ids that the decoder generates.
    """
    shape = (len(rows), N)
    return GreedyState(
        ids=jnp.zeros((*shape, length), jnp.int32),
        scores=jnp.zeros(shape, jnp.float32),
        done=jnp.zeros(shape, bool),
        rows=rows,
    )


def greedy_step(state, logits, at):
    """Append the id with the largest logit to each output, and return the new state.

    logits: the logits of the id at position `at`, of shape [B, N, V].
    """
    return append_ids(state, jnp.argmax(logits, axis=-1), logits, at)


def append_ids(state, ids, logits, at):
    """Append the chosen ids to the outputs, and return the new GreedyState.

    ids: the chosen ids for position `at`, of shape [B, N].
    logits: the logits of the id at position `at`, of shape [B, N, V].

    The log-probability of a chosen id is added to the score of the output. If an output
    has already ended with EOS, padding is appended, and the score does not change.
    """
    ids = jnp.where(state.done, data.PAD, ids).astype(jnp.int32)
    log_probs = jax.nn.log_softmax(logits)
    chosen = jnp.take_along_axis(log_probs, ids[..., None], axis=-1)[..., 0]
    return state._replace(
        ids=state.ids.at[:, :, at].set(ids),
        scores=state.scores + jnp.where(state.done, 0.0, chosen),
        done=state.done | (ids == data.EOS),
    )


def greedy_result(state):
    """Return the generated ids and the scores of all outputs of a GreedyState.

    The ids have the shape [B, N, T], and the scores have the shape [B, N]. The outputs of
    an example are sorted by score, and the output with the highest score comes first.
    """
    order = jnp.argsort(-state.scores, axis=1)
    return take_beams(state.ids, order), take_beams(state.scores, order)


def take_beams(array, beams):
    """Select M of the N beams or samples of each example.

    array: an array of shape [B, N, ...].
    beams: the numbers of the selected beams, of shape [B, M]. Beams are numbered from 0.

    The result has the shape [B, M, ...].
    """
    return jax.vmap(lambda outputs, numbers: outputs[numbers])(array, beams)


# ---- sampling --------------------------------------------------------------------------
# Sampling uses the state of greedy decoding, a GreedyState. The next id is drawn at
# random from the model's probability distribution. The options `temperature`, `top_k` and
# `top_p` may change this distribution.


def sampling_step(state, logits, at, *, decode, seed):
    """Append a randomly drawn id to each sample, and return the new GreedyState.

    logits: the logits of the id at position `at`, of shape [B, N, V].
    decode: a DecodeConfig with the options `temperature`, `top_k` and `top_p`.
    seed: the seed of the random numbers.

    The score of a sample is computed from the unchanged logits. The three options do not
    affect the score of an id.
    """
    temperature = max(decode.temperature or 1.0, 1e-4)
    filtered = filter_logits(logits / temperature, decode.top_k, decode.top_p)

    # The random key depends on the seed and on three numbers: the number of the example,
    # the number of the sample, and the position. Therefore the random samples of an
    # example do not depend on the other examples in the batch.
    def draw(row, sample, logits):
        key = jax.random.key(seed)
        for number in (row, sample, at):
            key = jax.random.fold_in(key, number)
        return jax.random.categorical(key, logits)

    samples = jnp.arange(logits.shape[1], dtype=jnp.uint32)
    draw_samples = jax.vmap(draw, (None, 0, 0))
    ids = jax.vmap(draw_samples, (0, None, 0))(state.rows, samples, filtered)
    return append_ids(state, ids, logits, at)


def filter_logits(logits, top_k, top_p):
    """Set the logits of improbable ids to -inf, so that these ids are never drawn.

    top_k: the number of most probable ids to keep. 0 keeps all ids.
    top_p: the probability that the kept ids must have together. The fewest ids with at
        least this probability are kept, beginning with the most probable id. This is
        nucleus sampling (Holtzman et al. 2020). 0 keeps all ids.
    """
    if top_k:
        top = lax.top_k(logits, min(top_k, logits.shape[-1]))[0]
        # `top[..., -1:]` is the k-th largest logit. As in T5X, all ids with this logit
        # are kept, even if more than k ids are kept.
        logits = jnp.where(logits < top[..., -1:], -jnp.inf, logits)
    if 0 < top_p < 1:
        ordered = -jnp.sort(-logits, axis=-1)
        probs = jax.nn.softmax(ordered)
        # An id is kept if the more probable ids together have a probability below top_p.
        kept = jnp.cumsum(probs, axis=-1) - probs < top_p
        smallest = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits < smallest, -jnp.inf, logits)
    return logits


# ---- beam search -----------------------------------------------------------------------
# This section implements the beam search of T5X (t5x/decoding.py). Beam search keeps the
# N best unfinished outputs of each example. These outputs are called live beams. Every
# step extends each live beam by each id of the vocabulary, and selects the 2N best
# extended outputs. An extended output that ends with EOS is a finished output. The N best
# finished outputs are kept. Of the other extended outputs, the N best become the new live
# beams. At most one extended output of each live beam ends with EOS. Therefore at least N
# of the 2N extended outputs do not end with EOS.

# To exclude an output from a selection, this number is added to the score of the output.
# T5X uses the same number.
MASKED_SCORE = -1e7


class BeamState(NamedTuple):
    """The state of beam search, with N live beams and at most N finished outputs.

    Live beams are outputs that do not end with EOS yet. Live beams and finished outputs
    are sorted by score, and the highest score comes first. The score of a live beam is
    the sum of the log-probabilities of all ids in the beam. The score of a finished
    output is this sum, divided by length_penalty.
    """

    # The ids of the live beams, of shape [B, N, T].
    ids: jax.Array
    # The scores of the live beams, of shape [B, N].
    live_scores: jax.Array
    # The ids of the finished outputs, of shape [B, N, T].
    finished_ids: jax.Array
    # The scores of the finished outputs, of shape [B, N].
    finished_scores: jax.Array
    # A boolean array of shape [B, N]. finished[b, n] is True if finished_ids[b, n] holds
    # a finished output, and False if finished_ids[b, n] is still unused.
    finished: jax.Array
    # The numbers of beams, of shape [B, N, T]. ancestors[b, 2, 5] = 0 says that live beam
    # 2 continues an output for which beam 0 computed the key and the value of position 5.
    ancestors: jax.Array
    # Whether the search for the outputs of each example has ended, of shape [B, 1].
    done: jax.Array


def start_beams(rows, N, length):
    """Create the state of beam search with N empty live beams for each example.

    Live beams are outputs that do not end with EOS yet. All live beams are empty at
    first, so the first step would extend all beams in the same way. Therefore only the
    first beam gets the score 0. The other beams get the score MASKED_SCORE, which
    excludes them.

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
    """Return the number by which the score of an output is divided.

    A score is a sum of log-probabilities, so long outputs have lower scores than short
    outputs. Dividing by this number reduces the difference.

    tokens: the number of ids in the output, including EOS.
    decode: a DecodeConfig. T5X uses the penalty "gnmt" (Wu et al. 2016). Hugging Face
        uses the penalty "length".
    """
    if decode.penalty == "gnmt":
        return ((5 + tokens) / 6) ** decode.alpha
    return tokens**decode.alpha


def beam_step(state, logits, at, *, decode):
    """Extend the live beams by one id, and return the new BeamState.

    Live beams are outputs that do not end with EOS yet.

    logits: the logits of the id at position `at`, of shape [B, N, V].
    decode: a DecodeConfig, which selects the length penalty.
    """
    B, N, V = logits.shape
    length = state.ids.shape[-1]

    # Find the 2N best ids for each live beam. Then find the 2N best extended outputs of
    # each example.
    scores = jax.nn.log_softmax(logits) + state.live_scores[..., None]
    scores, ids = lax.top_k(scores, min(2 * N, V))
    width = scores.shape[-1]
    scores, best = lax.top_k(scores.reshape(B, -1), 2 * N)
    # `parents` holds the number of the live beam that each extended output continues.
    parents = best // width
    ids = take_beams(ids.reshape(B, -1), best)
    extended = take_beams(state.ids, parents).at[:, :, at].set(ids)
    ends = ids == data.EOS

    # The N best extended outputs that do not end with EOS become the new live beams.
    live_scores, best = lax.top_k(scores + jnp.where(ends, MASKED_SCORE, 0.0), N)
    live_ids = take_beams(extended, best)
    parents = take_beams(parents, best)

    # Extended outputs that end with EOS are finished. Together with the outputs that
    # finished in earlier steps, the N finished outputs with the best scores are kept.
    scores = scores / length_penalty(at + 1.0, decode)
    scores = scores + jnp.where(ends, 0.0, MASKED_SCORE)
    finished_scores = jnp.concatenate([state.finished_scores, scores], axis=1)
    finished_scores, best = lax.top_k(finished_scores, N)
    finished_ids = jnp.concatenate([state.finished_ids, extended], axis=1)
    finished = take_beams(jnp.concatenate([state.finished, ends], axis=1), best)

    # The search ends when N outputs have finished and no live beam can get a better
    # score. The sum of log-probabilities of a live beam is negative, and can only
    # decrease. A negative sum gives the highest score if the divisor is the largest one.
    # No output has more than length + 1 ids, so the divisor for length + 1 ids gives an
    # upper bound.
    bound = live_scores[:, :1] / length_penalty(length + 1.0, decode)
    done = finished.all(1, keepdims=True) & (finished_scores[:, -1:] > bound)

    # The parent of a new live beam is the old live beam that the new beam continues. The
    # new beam copies the ancestors of the parent. The parent computed the keys of
    # position `at`. The new beam will compute the keys of position `at + 1`.
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
    """Return the ids and the scores of the finished outputs of a BeamState.

    The ids have the shape [B, N, T], and the scores have the shape [B, N]. The output
    with the highest score comes first. If no output of an example has finished, the
    unfinished outputs of this example are returned.
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
):
    """Generate N outputs for each example by greedy decoding, sampling or beam search.

    inputs: the input ids, of shape [B, S].
    input_segments: an array of shape [B, S], which is 0 at padding.
    cfg: a ModelConfig.
    length: the maximum number of generated ids, including EOS.
    decode: a DecodeConfig, which selects the decoding method. N is decode.beams in beam
        search, decode.num_return in sampling, and 1 in greedy decoding.
    rows: the number of each example, of shape [B]. The random samples of an example
        depend on this number and on the seed, but not on the other examples in the batch.
    seed: the seed of the random samples.

    Returns a pair (ids, scores). The ids have the shape [B, N, length], and are 0 after
    EOS. The scores have the shape [B, N]. The output with the highest score comes first.
    """
    if decode.beams:
        N = decode.beams
        start, result = start_beams, beam_result
        step = functools.partial(beam_step, decode=decode)
    elif decode.temperature > 1e-4 or decode.top_k or decode.top_p:
        # Without top_k and top_p, a temperature of at most 1e-4 means greedy decoding, as
        # in T5X.
        N = decode.num_return
        start, result = start_greedy, greedy_result
        step = functools.partial(sampling_step, decode=decode, seed=seed)
    else:
        N = 1
        start, step, result = start_greedy, greedy_step, greedy_result

    B = len(inputs)
    rows = jnp.zeros(B) if rows is None else rows
    rows = jax.reshard(rows.astype(jnp.uint32), P("data"))
    encoded = model.encode(params, cfg, inputs, input_segments)
    cache, fixed = init_cache(params, cfg, encoded, length, N)
    # `for_own_rows` is a decorator. Each device calls the decorated function with the
    # rows of the batch that the device holds.
    for_own_rows = functools.partial(jax.shard_map, out_specs=P("data"))
    has_inputs = jnp.any(input_segments > 0, axis=1, keepdims=True)

    @for_own_rows
    def next_ids(state, logits, at):
        state = step(state, logits, at)
        return state.ids[:, :, at], state

    def unfinished(carry):
        at, _, state, _ = carry
        # A row without inputs is padding of the batch. The loop may end before the
        # outputs of such rows are finished.
        return (at < length) & jnp.any(has_inputs & ~state.done)

    def decode_position(carry):
        at, ids, state, cache = carry
        ancestors = state.ancestors if decode.beams else None
        logits, cache = decode_step(
            params, cfg, ids, at, cache, fixed, input_segments, ancestors
        )
        # The logits may be split over the devices along the vocabulary. Gather the
        # logits, because the choice of the next id needs the logits of the whole
        # vocabulary.
        logits = jax.reshard(logits, P("data", None, None))
        ids, state = next_ids(state, logits, at)
        return at + 1, ids, state, cache

    # The first input id of the decoder is the start token. In T5 the start token is 0.
    ids = jnp.zeros((B, N), jnp.int32, out_sharding=P("data"))
    state = for_own_rows(lambda rows: start(rows, N, length))(rows)
    carry = (0, ids, state, cache)
    _, _, state, _ = lax.while_loop(unfinished, decode_position, carry)
    return for_own_rows(result)(state)


# ---- scores and vectors ----------------------------------------------------------------


@jax.jit(static_argnames="cfg")
def score(params, batch, cfg):
    """Return the log-probability of the targets of each example.

    This is the sum of the log-probabilities of all target ids. The result has the shape
    [B].

    batch: a data.Batch with one example in each row.
    cfg: a ModelConfig.
    """
    logits = model.forward(params, batch, cfg)
    cross_entropy, *_ = model.cross_entropy(logits, batch.targets)
    return -jnp.sum(cross_entropy * (batch.target_segments > 0), axis=1)


@jax.jit(static_argnames=("cfg", "pool"))
def encoder_vectors(params, inputs, segments, cfg, pool):
    """Return the vectors of the encoder in float32, or one vector for each example.

    inputs: the input ids, of shape [B, S].
    segments: an array of shape [B, S], which is 0 at padding.
    pool: "none", "mean" or "first". "none" returns one vector for each input id, of shape
        [B, S, D]. "mean" returns the mean of these vectors without padding, of shape
        [B, D]. The mean of an empty example is zero. "first" returns the vector of the
        first input id, of shape [B, D].
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
    """Compute an einsum of two arrays in float32. On a TPU, pad `left` for more speed.

    The first array, `left`, has the shape [B, H, N, ...]. On a TPU, axis 2 is padded to a
    multiple of 8.

    The TPU compiler computes a matmul with fewer than 8 rows on the vector unit. This
    takes four times as long as reading the array `right` from memory. A matmul with 8
    rows is computed on the matrix unit, which is faster. The padding was measured on a
    TPU v5e, by greedy decoding of the recipe base. A batch had 64 examples with 512 input
    ids and 114 output ids. Decoding took 770 million cycles with padding, and 2,878
    million without.
    """
    N = left.shape[2]
    if partition.platform() == "tpu":
        left = jnp.pad(left, ((0, 0), (0, 0), (0, -N % 8), (0, 0)))
    out = jnp.einsum(equation, left, right, preferred_element_type=jnp.float32)
    return out[:, :, :N]


# ---- batches of examples ---------------------------------------------------------------


class Example(NamedTuple):
    """The token ids of one example.

    EOS is not added later, so the lists of ids already include EOS where EOS is wanted.
    """

    inputs: list
    # The target ids, which only --mode score needs.
    targets: list = ()
    # The number of the example. Examples with different numbers get different random
    # samples, even if the inputs are equal.
    number: int = 0


# For each value of --pool, the name of the field of an output line that holds the
# vectors.
VECTOR_FIELD = {"mean": "mean", "first": "first", "none": "vectors"}


def padded_length(length):
    """Return the length to which a sequence is padded.

    A length of at most 512 is rounded up to a power of two, and to at least 16. A greater
    length is rounded up to a multiple of 512. JAX compiles a program for each padded
    length, so there should be few padded lengths.
    """
    if length > 512:
        return -(-length // 512) * 512
    return max(16, 1 << (length - 1).bit_length())


def pad_batch(sequences):
    """Convert lists of ids to one array, in which short lists are padded with 0.

    Returns a pair (ids, mask) of arrays. Both arrays have one row for each list, and
    padded_length of the longest list as the number of columns. The mask is False at
    padding.
    """
    lengths = [len(sequence) for sequence in sequences]
    ids = np.zeros((len(sequences), padded_length(max(lengths))), np.int32)
    for row, sequence in zip(ids, sequences):
        row[: len(sequence)] = sequence
    return ids, np.arange(ids.shape[1]) < np.array(lengths)[:, None]


def run_examples(params, cfg, mesh, examples, mode="predict"):
    """Run the model on many examples in batches, and yield the result of each example.

    The results are in the order of the examples, and do not depend on the batches.

    examples: an iterable of Examples.
    mode: "predict", "score", "mean", "first" or "none". The docstring of run_batch says
        what the result is in each mode.

    A batch needs little padding if the examples in the batch have similar lengths.
    Therefore the examples of 16 batches are sorted by length before the batches are
    formed. A batch has at most decode.batch_size examples. A batch has fewer examples if
    the inputs are longer than data.inputs_length.
    """
    most = cfg.decode.batch_size
    devices = mesh.shape["data"]
    bar = data.progress_bar(mode, "example")
    numbered = enumerate(examples)
    while window := list(itertools.islice(numbered, 16 * most)):
        window.sort(key=lambda item: (len(item[1].inputs), len(item[1].targets)))
        results = {}
        while window:
            # The longest examples are at the end of the window. These examples form the
            # next batch.
            length = max(padded_length(len(window[-1][1].inputs)), cfg.data.inputs_length)
            rows = max(1, most * cfg.data.inputs_length // length)
            numbers, group = zip(*window[-rows:])
            del window[-rows:]
            # A small group of examples gets a small batch. The number of rows is rounded
            # up to a power of two, and then to a multiple of the number of devices.
            rows = min(rows, 1 << (len(group) - 1).bit_length())
            rows = -(-rows // devices) * devices
            results |= zip(numbers, run_batch(params, cfg, mesh, group, mode, rows))
            bar.update(len(group))
        yield from (results[number] for number in sorted(results))
    bar.close()


def run_batch(params, cfg, mesh, group, mode, B):
    """Run the model on one batch, and return a list with the result of each example.

    group: a list of at most B Examples.
    mode: the name of the wanted result.
        - "predict" returns a pair (ids, scores) for each example. `ids` is a list of
          decode.num_return outputs, and `scores` is the list of their scores. The output
          with the highest score comes first. An output is a list of ids without EOS.
        - "score" returns the sum of the log-probabilities of the targets.
        - "mean", "first" and "none" return vectors of the encoder. encoder_vectors
          explains these vectors.
    B: the number of rows of the batch.

    The group is padded to B examples with empty examples. The results of the empty
    examples are at the end of the returned list.
    """
    group = [*group, *[Example([])] * (B - len(group))]
    inputs, input_segments = pad_batch([x.inputs for x in group])
    targets, target_segments = pad_batch([x.targets for x in group])
    numbers = np.array([x.number for x in group], np.uint32)
    length = cfg.decode.max_len or cfg.data.targets_length
    T, beams = targets.shape[1], 0
    if mode == "predict":
        T, beams = length, max(cfg.decode.beams, cfg.decode.num_return)
    partition.check_memory(
        model.minimum_memory(cfg.model, B, inputs.shape[1], T, beams=beams),
        "--decode.batch_size, --decode.beams, --decode.max_len or the input length",
    )
    batch = data.complete_batch(inputs, targets, input_segments, target_segments)
    # Each process provides the rows of the batch that the devices of this process hold.
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
        params, *inputs, cfg.model, length, cfg.decode, numbers, cfg.train.seed
    )
    kept = cfg.decode.num_return
    ids, scores = (to_numpy(array)[:, :kept].tolist() for array in outputs)
    return [([cut_at_eos(x) for x in row], score) for row, score in zip(ids, scores)]


def to_numpy(array):
    """Return a sharded JAX array as a NumPy array. Every process gets the full array."""
    return np.asarray(jax.reshard(array, P()).addressable_data(0))


def cut_at_eos(ids):
    """Return the ids before the first EOS or padding id, as a list."""
    return list(itertools.takewhile(lambda i: i > data.EOS, map(int, ids)))


# ---- masked spans ----------------------------------------------------------------------


def split_spans(ids, tokenizer):
    """Split a list of ids at the sentinels, and return the ids after each sentinel.

    A sentinel is a special token, such as <extra_id_0>, that marks a masked span. The
    result is a list of pairs (number, ids). `number` is the number of a sentinel, and
    `ids` is the list of ids between this sentinel and the next sentinel. In the first
    pair, `number` is None, and `ids` are the ids before the first sentinel. EOS and all
    later ids are ignored.
    """
    spans = [(None, [])]
    for i in cut_at_eos(ids):
        # Sentinel 0 has the last id of the vocabulary, sentinel 1 the id before, and so
        # on.
        number = tokenizer.size - 1 - i
        if 0 <= number < tokenizer.sentinels:
            spans.append((number, []))
        else:
            # The model may have more ids than the vocabulary. Replace such an id by UNK,
            # the id of unknown tokens.
            spans[-1][1].append(i if number >= 0 else data.UNK)
    return spans


def fill_blanks(inputs, targets, tokenizer):
    """Fill in the masked spans of the inputs, and return the inputs as text.

    inputs: a list of ids, in which a sentinel such as <extra_id_0> marks a masked span.
    targets: a list of ids, in which each sentinel is followed by the ids of the span.

    Each sentinel of the inputs is replaced by the text of the span, in brackets. If a
    sentinel is missing in the targets, the sentinel is replaced by ____.
    """
    (_, words), *blanks = split_spans(inputs, tokenizer)
    # Ignore the ids before the first sentinel of the targets, which belong to no span.
    spans = dict(split_spans(targets, tokenizer)[1:])
    text = tokenizer.raw_text(words)
    for number, words in blanks:
        if number in spans:
            span = tokenizer.raw_text(spans[number])
            if span.startswith(" "):
                text += " "  # The space is written before the bracket.
            text += f"[{span.removeprefix(' ')}]"
        else:
            text += " ____ "
        text += tokenizer.raw_text(words)
    return " ".join(text.split())


# ---- reading examples ------------------------------------------------------------------


@dataclass
class ExampleEncoder:
    """A function that converts a line of --input to an Example.

    A line is a dict with the field "inputs", and for --mode score the field "targets".
    """

    cfg: configs.Config
    # The Tokenizer, or None if the run has no vocabulary.
    tokenizer: data.Tokenizer | None
    # Whether each line must have targets.
    scoring: bool
    # A Task, which decides whether the token ids of a text end with EOS.
    task: data.Task = data.Task()
    # The number of texts that this object has truncated.
    cut: int = 0

    def ids(self, line, key):
        """Return the token ids of one field of a line.

        line: a dict.
        key: the name of the field, "inputs" or "targets".

        A text is tokenized and truncated, and EOS is appended. A list of ids is returned
        unchanged. A field that is neither a text nor a list of ids raises ValueError.
        """
        value = line.get(key)
        problem = data.invalid_reason(value, self.cfg.model.vocab_size)
        if problem:
            raise ValueError(f"has {problem} in {key} (fields: {', '.join(line)})")
        if not isinstance(value, str):
            return list(map(int, value))
        if self.tokenizer is None:
            raise UserError(
                "This run has no vocabulary, so it cannot read texts: copy its "
                "spiece.model into the run directory, or give --input with lists of ids."
            )
        ids = self.tokenizer.encode(value)
        rule = (key, self.task, self.cfg.data)
        _, _, kept = data.truncated_length(*rule)
        self.cut += kept < len(ids)
        return data.truncate(ids, *rule).tolist()

    def __call__(self, line, number=0):
        """Convert a line to an Example.

        line: a dict with the field "inputs", and for --mode score the field "targets". An
            invalid line raises ValueError.
        number: the number of the example, which selects the random samples.
        """
        inputs = self.ids(line, "inputs")
        targets = self.ids(line, "targets") if self.scoring else ()
        return Example(inputs, targets, number)


def open_input(name, cfg):
    """Return a pair (task, read) for the file or the task that --input names.

    name: the path of a JSONL or .txt file, or task:NAME[:SPLIT].

    `task` is a data.Task, which decides whether the ids of a text end with EOS. `read` is
    a function. read(bad) yields a pair (place, dict) for each line of the input. `place`
    names the file and the line. If a line cannot be read, read(bad) calls bad(place,
    problem).
    """
    if name.startswith("task:"):
        task, _, split = name.removeprefix("task:").partition(":")
        cfg = data.evaluation_config(task, cfg)
        read = functools.partial(data.read_task, task, split or "validation", cfg)
        return data.find_task(task, cfg), read

    def read(bad):
        if name.endswith(".txt"):
            for number, line in data.read_lines(name, bad):
                yield f"{name}:{number}", {"inputs": line.rstrip("\r\n")}
        else:
            for file in data.open_source(f"jsonl:{name}", "train", cfg, whole=True):
                yield from file.read(bad)

    return data.Task(), read


def read_examples(read, encode):
    """Read all lines of --input, and yield a pair (line, example) for each line.

    read: the function that open_input returns.
    encode: an ExampleEncoder.

    `line` is a dict, and `example` is an Example. An invalid line raises UserError. With
    --data.on_error skip, the dict of an invalid line gets a field "error", and `example`
    is None.
    """
    report_invalid = data.InvalidExamples(encode.cfg.data.on_error)
    unread = []

    def bad(where, problem):
        report_invalid(where, problem)
        unread.append(({"error": f"{where} {problem}"}, None))

    for number, (where, line) in enumerate(read(bad)):
        # If lines before this line could not be read, yield those lines first.
        yield from unread
        unread.clear()
        example = None
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
    # UTF-8 cannot encode one half of a surrogate pair. Such a character is written as the
    # escape sequence \udXXX, which JSON allows.
    return text.encode(errors="backslashreplace").decode() + "\n"


def json_default(value):
    """Convert a value that JSON cannot write to a value that JSON can write.

    A NumPy array becomes a list, and a NumPy number becomes a Python number. Any other
    value becomes a text.
    """
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    return str(value)


def result_fields(result, example, line, mode, cfg, tokenizer):
    """Return a dict of the fields that are added to a line of --output.

    result: the result of the example, as run_batch returns the result.
    example: the Example that was made from the line.
    line: the line of --input, as a dict.
    mode: the mode, as in run_batch.

    If the inputs of the line are a text, a prediction is a text. If the inputs are a list
    of ids, a prediction is a list of ids.
    """
    if mode == "score":
        return {"score": result}
    if mode != "predict":
        # astype(str) gives the shortest decimal number that identifies a float32 number.
        # The line of JSON is shorter with these numbers.
        vectors = result.astype(str).astype(float).tolist()
        return {"ids": example.inputs, VECTOR_FIELD[mode]: vectors}
    outputs, scores = result
    if isinstance(line["inputs"], str):
        outputs = [tokenizer.decode(ids) for ids in outputs]
    if cfg.decode.return_all or len(outputs) > 1:
        return {"prediction": outputs[0], "predictions": outputs, "scores": scores}
    return {"prediction": outputs[0]}


def describe_job(args, cfg, step):
    """Return a dict of the flags that determine the content of --output.

    The dict maps the name of each flag to the value of the flag. The dict leaves out
    flags that may change when a command is resumed. These are the flags for devices,
    --decode.batch_size and --data.on_error. Such flags do not change lines that are
    already written.
    """
    job = vars(args) | {"step": step, "train.seed": cfg.train.seed}
    job["input (sizes and times of the files)"] = dict(data.find_files(args.input))
    left_out = ("train.", "mesh.", "distributed.", "decode.batch_size", "data.on_error")
    for name, _, value in configs.fields(cfg):
        if not name.startswith(left_out):
            job[name] = value
    return job


def open_partial(path, job):
    """Open the unfinished output file OUTPUT.partial, to append lines.

    path: the path of OUTPUT.partial.
    job: the dict of flags that describe_job returns.

    Returns the file and the number of lines in the file. The file is locked until the
    file is closed. If the last line is incomplete, the last line is removed.
    OUTPUT.partial.json contains the flags of the command that began the file. If `job`
    has different flags, a UserError names the first different flag. Only the main process
    opens OUTPUT.partial. The other processes open os.devnull, which discards all lines.
    """
    if not partition.is_main_process():
        return open(os.devnull, "ab"), 0
    description = configs.to_path(f"{path}.json")
    description.parent.mkdir(parents=True, exist_ok=True)
    try:
        file = configs.lock(path)
    except BlockingIOError:
        raise UserError(
            f"Another process is writing {path}: wait for it, or name another --output."
        ) from None
    file.seek(0)
    content = file.read()
    lines = content.count(b"\n")
    if content:
        begun = configs.read_json(description, {}, f"remove {path}")
        for name, value in job.items():
            if begun.get(name) != value:
                file.close()  # Closing the file releases the lock.
                raise UserError(
                    f"{path} was begun with --{name} {begun.get(name)!s:.100} "
                    f"(now {value!s:.100}): repeat the command that began the file, or "
                    f"remove the file."
                )
        file.truncate(content.rfind(b"\n") + 1)
        note(f"{path} has {lines:,} lines: resuming after these lines")
    else:
        configs.write_file(description, json.dumps(job, indent=1))
    return file, lines


def write_vectors(lines, path, field, width):
    """Convert a JSONL file with ids and vectors to an .npz file, and remove the JSONL
    file.

    lines: the path of the JSONL file.
    path: the path of the .npz file.
    field: the name of the field of a line that holds the vectors.
    width: the number of elements of a vector.

    A line with an error has no ids and no vectors. With --pool mean or --pool first, the
    .npz file contains a vector of nan for such a line.
    """
    ids, vectors = [], []
    missing = [] if field == "vectors" else [math.nan] * width
    with open(lines) as file:
        for line in map(json.loads, file):
            ids.append(np.int32(line.get("ids", [])))
            vectors.append(np.float32(line.get(field, missing)).reshape(-1, width))
    content = io.BytesIO()
    np.savez(
        content,
        ids=np.concatenate(ids),
        lengths=[len(row) for row in ids],
        vectors=np.concatenate(vectors),
    )
    configs.write_file(path, content.getvalue())
    os.remove(lines)


def run_file(args, cfg, mesh, tokenizer, params, step):
    """Run the model on each line of --input, and write the results to --output.

    The lines are written to the file OUTPUT.partial, which is renamed to OUTPUT at the
    end. If the command is killed, the same command resumes after the last complete line
    of OUTPUT.partial. All processes compute results, and the main process writes the
    lines.
    """
    mode = args.pool if args.mode == "encode" else args.mode
    task, read = open_input(args.input, cfg)
    encode = ExampleEncoder(cfg, tokenizer, mode == "score", task)
    partial = f"{args.output}.partial"
    file, done = partition.run_on_main_first(
        lambda: open_partial(partial, describe_job(args, cfg, step))
    )
    done = partition.from_main_process(done)
    shard, shards = configs.parse_shard(args.shard)
    lines = read_examples(read, encode)
    lines = itertools.islice(lines, shard + done * shards, None, shards)
    # run_examples reads many examples before run_examples yields the first result.
    # itertools.tee stores the lines of these examples until the lines are written.
    lines, ahead = itertools.tee(lines)
    examples = (example for _, example in ahead if example)
    results = run_examples(params, cfg, mesh, examples, mode)
    count = 0
    start = time.perf_counter()
    with configs.naming_file(partial), file:
        for count, (line, example) in enumerate(lines, 1):
            if example:
                line |= result_fields(next(results), example, line, mode, cfg, tokenizer)
            file.write(json_line(line).encode())
            file.flush()
        if partition.is_main_process():
            os.fsync(file.fileno())
            if not done + count:
                os.remove(partial)
            elif args.output.endswith(".npz"):
                write_vectors(partial, args.output, VECTOR_FIELD[mode], cfg.model.d_model)
            else:
                os.replace(partial, args.output)
            os.remove(f"{partial}.json")
    if not done + count:
        raise UserError(
            f"{args.input} has no lines for --shard {args.shard}: check --input and "
            f"--shard."
        )
    rate = count / (time.perf_counter() - start)
    note(f"{args.output}: {count:,} examples, {rate:.4g} examples/s")
    note_truncated(encode)


def note_truncated(encode):
    """Print how many texts an ExampleEncoder has truncated, if any were truncated."""
    if encode.cut:
        note(
            f"{encode.cut:,} texts were truncated: raise --data.inputs_length or "
            f"--data.targets_length to keep more"
        )


def run_lines(lines, cfg, mesh, tokenizer, params, raw):
    """Generate outputs for each text, and print one line for each output.

    For an empty text, an empty line is printed.

    lines: an iterable of texts, encoded as UTF-8.
    raw: whether to print the model's output as it is. If `raw` is False, and a text has
        sentinels such as <extra_id_0>, the text is printed with the masked spans filled
        in.
    """
    encode = ExampleEncoder(cfg, tokenizer, False)
    for number, line in enumerate(lines):
        text = line.decode(errors="replace").strip()
        if not text:
            print(flush=True)
            continue
        example = encode({"inputs": text}, number)
        ((outputs, scores),) = run_examples(params, cfg, mesh, [example])
        fill = not raw and len(split_spans(example.inputs, tokenizer)) > 1
        for ids, score in zip(outputs, scores):
            if fill:
                text = fill_blanks(example.inputs, ids, tokenizer)
            else:
                text = tokenizer.decode(ids)
            text = configs.escape_controls(text.replace("\n", " "))
            print(f"{score:.4f}\t{text}" if cfg.decode.return_all else text, flush=True)
    note_truncated(encode)


# ---- the command -----------------------------------------------------------------------


def load_params(cfg, run_dir, step=None):
    """Load the parameters of a run from a checkpoint, and return a pair (step, params).

    The parameters are float32.

    cfg: the Config of the run.
    run_dir: the directory of the run.
    step: the step of the checkpoint. If `step` is None, the newest complete checkpoint is
        loaded.
    """
    mesh = jax.sharding.get_mesh()

    def template(p):
        sharding = jax.NamedSharding(mesh, partition.spec(p.axes))
        return jax.ShapeDtypeStruct(p.shape, jnp.float32, sharding=sharding)

    table = model.param_table(cfg.model)
    params = jax.tree.map(template, table, is_leaf=model.is_param)
    found = partition.Checkpoints(run_dir).load({"params": params}, step)
    if not found:
        raise UserError(
            f"{run_dir} has no complete checkpoint yet: train the model with train.py."
        )
    step, tree = found
    return step, tree["params"]


def check_decoder(cfg, mode=None):
    """Raise UserError if the model has no decoder and `mode` needs a decoder.

    Only --mode encode needs no decoder.
    """
    if not cfg.model.num_decoder_layers and mode != "encode":
        raise UserError(
            "This model has no decoder: use infer.py --mode encode, which writes the "
            "encoder's vectors."
        )


def open_model(args, changes, recipe=False):
    """Start JAX, and return the Config, the mesh and the Tokenizer of a run.

    If the run has no vocabulary, the Tokenizer is None.

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
    args.step = partition.resolve_step(args.run_dir, args.step)
    partition.start_jax(cfg)
    mesh = partition.set_mesh(cfg)
    vocabulary = configs.to_path(args.run_dir) / "spiece.model"
    return cfg, mesh, data.load_tokenizer(vocabulary) if vocabulary.exists() else None


def check_files(args):
    """Raise UserError if --output exists, or if the input cannot be read.

    The input cannot be read if no file matches --input. Standard input cannot be read by
    several processes.
    """
    if os.path.exists(args.output):
        raise UserError(
            f"{args.output} already exists: name another --output, or move the file away."
        )
    is_file = args.input and not args.input.startswith("task:")
    if is_file and not data.find_files(args.input):
        raise UserError(f"No file matches --input {args.input}: check the path.")
    if not args.input and args.text is None and jax.process_count() > 1:
        raise UserError(
            "Several processes cannot share standard input: give --input and --output."
        )


def main(argv):
    args, changes = configs.parse_args(
        __doc__,
        argv,
        text_=dict(nargs="?", help="a text from which to generate"),
        input=dict(default="", help="a JSONL or .txt file, or task:NAME[:SPLIT]"),
        output=dict(
            default="", help="the JSONL file to write, or .npz with --mode encode"
        ),
        mode=dict(
            default="predict",
            choices=("predict", "score", "encode"),
            help="generate outputs, score targets, or write the encoder's vectors",
        ),
        pool=dict(
            default="mean",
            choices=("mean", "first", "none"),
            help="--mode encode: the mean or first vector of each text, or all vectors",
        ),
        raw=dict(
            action="store_true", help="print the model's output, not the filled text"
        ),
        step=dict(
            default="latest", help="the checkpoint to load: a step, latest or best"
        ),
        shard=dict(
            default="0/1", metavar="I/N", help="read every N-th line, beginning at line I"
        ),
    )
    reads_file = args.input and args.output and args.text is None
    reads_text = not args.input and not args.output and args.mode == "predict"
    if not reads_file and not reads_text:
        raise UserError(
            "The source of the texts is unclear: give --input and --output, or give a "
            "text or standard input with --mode predict."
        )
    configs.parse_shard(args.shard)
    if args.mode != "encode" and args.output.endswith(".npz"):
        raise UserError(
            "An .npz --output works only with --mode encode: for other modes name a "
            ".jsonl file."
        )
    # The file recipe.py of a run may define the task that --input names.
    cfg, mesh, tokenizer = open_model(
        args, changes, recipe=args.input.startswith("task:")
    )
    partition.run_on_main_first(lambda: check_files(args))
    step, params = load_params(cfg, args.run_dir, args.step)
    if args.input:
        return run_file(args, cfg, mesh, tokenizer, params, step)
    lines = sys.stdin.buffer
    if args.text is not None:
        lines = [args.text.encode(errors="surrogateescape")]
    run_lines(lines, cfg, mesh, tokenizer, params, args.raw)


if __name__ == "__main__":
    configs.run_command(main)
