"""How a trained model answers: greedy, by sampling, by beam search; and how it scores answers.

- The encoder runs once; the decoder a position at a time, over cached keys and values.
- generate() is one compiled loop; which id comes next is decided by sample_step or beam_step.
- answer() takes any number of examples, sorts them by length in windows, and keeps their order.
- An answer never depends on what else is in the batch, nor on its size.

    python infer.py --run_dir runs/tiny "Return the <extra_id_0> of the list."
    python infer.py --run_dir runs/tiny < texts                a line out for each line in
    python infer.py --run_dir RUN --input IN.jsonl --output OUT.jsonl [--mode score] [--shard 0/4]
    python infer.py --run_dir RUN --input IN.jsonl --output OUT.npz --mode encode --pool mean
    python infer.py --run_dir RUN --input task:glue_rte_v002:validation --output OUT.jsonl

A line of IN.jsonl has "inputs" and, to score, "targets": texts, or lists of ids, which are used
exactly as they are. OUT.jsonl has the same lines with "prediction" or "score" added, or "ids" and
what the encoder makes of them: their "mean", "first" or all "vectors" (--pool none); OUT.npz has
all ids and vectors one after the other, and lengths. Several machines take a --shard each.
"""

import functools
import io
import itertools
import json
import math
import os
import sys
import time
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

# ---- a position at a time ------------------------------------------------------------------------
# Decoding reads all decoder weights and all keys and values for each token: memory traffic is what
# it costs. So the layers are taken apart once instead of being cut out of the stack at each step,
# keys and values lie as their products read them, and nothing is copied.


def init_cache(params, cfg, encoded, length, beams=1):
    """What decoding reads: encoded [B, S, D] -> (cache, fixed). cache: for each layer the keys and
    values [B, H, length * beams, C] of what has been decoded, empty. fixed: for each layer its
    weights, the keys and values [B, H, S, C] of the encoder, which all beams share, and the
    relative bias [N, H, length, length] (model.relative_bias)."""
    stack, table = (
        params["decoder"]["layers"],
        model.param_table(cfg)["decoder"]["layers"],
    )
    cache, fixed = [], []
    shared = model.relative_bias(params["decoder"], length, length, False, cfg)
    for i in range(cfg.num_decoder_layers):
        w = model.reshard_for_compute(
            jax.tree.map(lambda a: a[i].astype(encoded.dtype), stack), table
        )
        cross = model.keys_values(w["cross_attention"], encoded, cfg)
        fixed.append(
            (
                w,
                cross,
                model.relative_bias(
                    w["self_attention"], length, length, False, cfg, shared
                ),
            )
        )
        B, H, _, C = cross[0].shape
        empty = jnp.zeros(
            (B, H, length * beams, C),
            encoded.dtype,
            out_sharding=model.sharding_of(cross[0]),
        )
        cache.append((empty, empty))
    return cache, fixed


def padded_einsum(form, rows, others):
    """einsum of the few rows [B, H, N, ...] of a position, in float32. Fewer than 8 a TPU would
    multiply and add, which lasts four times as long as reading `others`: they are filled up."""
    N = rows.shape[2]
    if partition.platform() == "tpu":
        rows = jnp.pad(rows, ((0, 0), (0, 0), (0, -N % 8), (0, 0)))
    return jnp.einsum(form, rows, others, preferred_element_type=jnp.float32)[:, :, :N]


def cached_attention(q, k, v, bias, mask):
    """model.attend of a position, of which no gradient is taken: q [B, H, N, C] -> [B, H, N, C]."""
    scores = padded_einsum("bhqc,bhkc->bhqk", q, k)
    scores = jnp.where(mask, scores if bias is None else scores + bias, -1e10)
    p = jnp.exp(scores - scores.max(-1, keepdims=True))
    out = padded_einsum("bhqk,bhkc->bhqc", p.astype(v.dtype), v)
    return (out / p.sum(-1, keepdims=True)).astype(v.dtype)


def decode_step(params, cfg, ids, at, cache, fixed, input_segments, ancestors=None):
    """One position of all beams: ids [B, N] at position `at` -> (logits [B, N, V], cache). The
    beams of an example are the queries of one attention: the keys of all of them stay where they
    were written, and ancestors [B, N, K] says whose key, 0 to N - 1, each beam reads at each
    position. So reordering beams moves no cache. None: each reads its own."""
    N, K = ids.shape[1], fixed[0][-1].shape[-1]
    if ancestors is None:
        ancestors = jnp.arange(N)[None, :, None]
    past = (jnp.arange(K) <= at)[:, None]
    seen = past & (ancestors[..., None] == jnp.arange(N))  # [B or 1, N, K, N]
    seen = seen.reshape(
        seen.shape[0], 1, N, K * N, out_sharding=P(model.sharding_of(seen)[0])
    )
    cross_mask = jax.reshard(input_segments > 0, P("data"))[:, None, None]
    x, written = model.embed(params, ids, cfg, None), []
    for (w, cross, biases), own in zip(fixed, cache):
        bias = jnp.repeat(lax.dynamic_slice_in_dim(biases, at, 1, axis=2), N, axis=3)
        bias = jnp.repeat(bias, N, axis=2)
        h = model.rms_norm(x, w["self_attention"]["norm"])
        own = tuple(
            lax.dynamic_update_slice_in_dim(old, new, at * N, axis=2)
            for old, new in zip(own, model.keys_values(w["self_attention"], h, cfg))
        )
        written.append(own)
        x = model.decoder_layer(
            w,
            x,
            h,
            own,
            bias,
            seen,
            cross,
            cross_mask,
            cfg,
            core=jax.shard_map(cached_attention, out_specs=model.sharding_of(own[1])),
        )
    return model.unembed(params, cfg, model.final_norm(x, params["decoder"])), written


# ---- decoding ------------------------------------------------------------------------------------

MASKED_SCORE = -1e7  # T5X's score of what is not to be chosen; added, not assigned


@functools.partial(jax.jit, static_argnames=("cfg", "length", "decode"))
def generate(
    params,
    inputs,
    input_segments,
    cfg,
    length,
    decode=DecodeConfig(),
    rows=None,
    seed=0,
    prefix=None,
):
    """inputs, input_segments [B, S] -> (ids [B, N, length], scores [B, N]), the best answer first.
    After EOS ids are 0. decode.beams 0 is greedy or, with a temperature, top_k or top_p, sampling
    of num_return answers; 1 or more is T5X's beam search, N = beams. rows [B]: numbers that tell
    examples apart, which the samples depend on, not on the batch. prefix [B, P]: ids with which
    answers must begin, then 0."""
    beams = decode.beams or (decode.num_return if is_sampling(decode) else 1)
    encoded = model.encode(params, cfg, inputs, input_segments)
    cache, fixed = init_cache(params, cfg, encoded, length, beams)
    B, batch = inputs.shape[0], P("data")

    def rows_of(value, *shape, dtype=jnp.float32):
        return jnp.full((B, *shape), value, dtype, out_sharding=batch)

    forced = rows_of(0, length, dtype=jnp.int32)
    if prefix is not None:
        prefix = jax.reshard(prefix.astype(jnp.int32), batch)
        forced = lax.dynamic_update_slice(forced, prefix, (0, 0))
    rows = (
        rows_of(0, dtype=jnp.uint32)
        if rows is None
        else jax.reshard(rows.astype(jnp.uint32), batch)
    )
    padding = ~jnp.any(input_segments > 0, axis=1)  # rows without inputs have no answer
    if decode.beams:
        first = rows_of(MASKED_SCORE, beams) + jnp.where(
            jnp.arange(beams) > 0, 0.0, -MASKED_SCORE
        )
        state = BeamState(
            first,
            rows_of(0, beams, length, dtype=jnp.int32),
            rows_of(MASKED_SCORE, beams),
            rows_of(0, beams, length, dtype=jnp.int32),
            rows_of(False, beams, dtype=bool),
            rows_of(0, beams, length, dtype=jnp.int32) + jnp.arange(beams)[:, None],
            rows_of(False, dtype=bool),
        )
        choose = functools.partial(beam_step, decode=decode, length=length)
    else:
        state = SampleState(
            rows_of(0, beams, length, dtype=jnp.int32),
            rows_of(0.0, beams),
            rows_of(False, beams, dtype=bool),
        )
        choose = functools.partial(sample_step, decode=decode, seed=seed)
    # which id comes next is decided row by row, on the device that has the row
    choose = jax.shard_map(
        choose, in_specs=(P(), batch, batch, batch, batch), out_specs=(batch, batch)
    )

    def unfinished(carry):
        at, _, state, _ = carry
        done = state.done.reshape(B, -1, out_sharding=batch) | padding[:, None]
        return (at < length) & ~jnp.all(done)

    def step(carry):
        at, ids, state, cache = carry
        ancestors = state.ancestors if decode.beams else None
        logits, cache = decode_step(
            params, cfg, ids, at, cache, fixed, input_segments, ancestors
        )
        logits = jax.reshard(logits, P("data", None, None))
        ids, state = choose(at, logits, state, forced, rows)
        return at + 1, ids, state, cache

    start = rows_of(0, beams, dtype=jnp.int32)
    state = lax.while_loop(unfinished, step, (0, start, state, cache))[2]
    if not decode.beams:

        def ordered(state):
            best = jnp.argsort(-state.scores, axis=1)
            return (
                jnp.take_along_axis(state.ids, best[..., None], axis=1),
                jnp.take_along_axis(state.scores, best, axis=1),
            )

        return jax.shard_map(ordered, in_specs=(batch,), out_specs=(batch, batch))(state)
    any_finished = state.finished.any(1, keepdims=True)
    return (
        jnp.where(any_finished[..., None], state.found, state.live),
        jnp.where(any_finished, state.scores, state.live_scores),
    )


def is_sampling(decode):
    """Whether a DecodeConfig asks for sampling."""
    return bool(decode.temperature > 1e-4 or decode.top_k or decode.top_p)  # as T5X


class SampleState(NamedTuple):
    """Greedy answers or samples so far, N of each row."""

    ids: jax.Array  # [B, N, L]
    scores: jax.Array  # [B, N] sums of log-probabilities
    done: jax.Array  # [B, N]


def sample_step(at, logits, state, forced, rows, *, decode, seed):
    """logits [B, N, V] of position `at` -> (ids [B, N], Samples)."""
    if is_sampling(decode):
        chances = filter_logits(
            logits / max(decode.temperature or 1.0, 1e-4), decode.top_k, decode.top_p
        )

        def draw(row, answer, chances):
            key = jax.random.key(seed)
            for number in (row, answer, at):
                key = jax.random.fold_in(key, number)
            return jax.random.categorical(key, chances)

        answers = jnp.arange(logits.shape[1], dtype=jnp.uint32)
        ids = jax.vmap(jax.vmap(draw, (None, 0, 0)), (0, None, 0))(rows, answers, chances)
    else:
        ids = jnp.argmax(logits, axis=-1)
    must = forced[:, at][:, None]
    ids = jnp.where(state.done, data.PAD, jnp.where(must > 0, must, ids)).astype(
        jnp.int32
    )
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), ids[..., None], axis=-1)[
        ..., 0
    ]
    scores = state.scores + jnp.where(state.done | (must > 0), 0.0, chosen)
    return ids, SampleState(
        state.ids.at[:, :, at].set(ids),
        scores,
        state.done | ((ids == data.EOS) & (must == 0)),
    )


def filter_logits(logits, top_k, top_p):
    """Leave the top_k likeliest ids, and of them those that together have probability top_p."""
    if top_k:
        least = lax.top_k(logits, min(top_k, logits.shape[-1]))[0][..., -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)  # ties stay, as in T5X
    if 0 < top_p < 1:
        ordered = -jnp.sort(-logits, axis=-1)
        likelihood = jax.nn.softmax(ordered)
        kept = jnp.cumsum(likelihood, axis=-1) - likelihood < top_p
        least = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return logits


class BeamState(NamedTuple):
    """Beam search so far, N beams of each row, best first."""

    live_scores: jax.Array  # [B, N] sums of log-probabilities
    live: jax.Array  # [B, N, L]
    scores: jax.Array  # [B, N] of finished answers, with the length penalty
    found: jax.Array  # [B, N, L]
    finished: jax.Array  # [B, N] whether there is one in this place
    ancestors: jax.Array  # [B, N, L] which beam wrote the keys that this one reads
    done: jax.Array  # [B] nothing better can be found


def length_penalty(tokens, decode):
    """What the log-probability of an answer of so many tokens, EOS counted, is divided by."""
    return (
        ((5 + tokens) / 6) ** decode.alpha
        if decode.penalty == "gnmt"
        else tokens**decode.alpha
    )


def beam_step(at, logits, state, forced, rows, *, decode, length):
    """logits [B, N, V] of position `at` -> (ids [B, N], Beams), by T5X's rules (decoding.py). The
    2N best continuations are looked at; those that end compete with the finished ones by their
    penalized scores, the N best of the others live on."""
    B, N, V = logits.shape
    take = functools.partial(jnp.take_along_axis, axis=1)
    values = jax.nn.log_softmax(logits) + state.live_scores[..., None]
    values, ids = lax.top_k(values, min(2 * N, V))  # of each beam, then of all
    width = values.shape[-1]
    values, best = lax.top_k(values.reshape(B, -1), min(2 * N, N * width))
    parents, ids = best // width, take(ids.reshape(B, -1), best)
    answers = take(state.live, parents[..., None]).at[:, :, at].set(ids)
    ends = ids == data.EOS
    live_scores, kept = lax.top_k(values + jnp.where(ends, MASKED_SCORE, 0.0), N)
    parents, live = take(parents, kept), take(answers, kept[..., None])
    scores = values / length_penalty(at + 1.0, decode) + jnp.where(
        ends, 0.0, MASKED_SCORE
    )
    scores, finished = (
        jnp.concatenate(pair, 1)
        for pair in ((state.scores, scores), (state.finished, ends))
    )
    scores, best = lax.top_k(scores, N)
    found = take(jnp.concatenate([state.found, answers], 1), best[..., None])
    finished = take(finished, best)
    # no live beam can overtake the worst finished one any more, whatever comes
    bound = live_scores[:, 0] / length_penalty(length + 1.0, decode)
    done = finished.all(1) & (scores[:, -1] > bound)
    own = jnp.arange(N)[:, None]
    place = jnp.arange(length)
    ancestors = jnp.where(
        place < at,
        take(state.ancestors, parents[..., None]),
        jnp.where(place == at, parents[..., None], own),
    )
    new = BeamState(live_scores, live, scores, found, finished, ancestors, done)
    must = forced[:, at]
    told = state._replace(live=state.live.at[:, :, at].set(must[:, None]))
    new = jax.tree.map(
        lambda a, b: jnp.where((must > 0).reshape(-1, *[1] * (a.ndim - 1)), a, b),
        told,
        new,
    )
    return new.live[:, :, at], new


@functools.partial(jax.jit, static_argnames="cfg")
def score(params, batch, cfg):
    """Batch, ModelConfig -> [B] sums of the target tokens' log-probabilities."""
    logits = model.forward(params, batch, cfg)
    loss, *_ = model.cross_entropy(logits, batch.targets)
    return -jnp.sum(loss * (batch.target_segments > 0), axis=1)


@functools.partial(jax.jit, static_argnames=("cfg", "pool"))
def encoder_vectors(params, inputs, segments, cfg, pool):
    """inputs, segments [B, S] -> float32: of pool mean or first [B, D], of none [B, S, D]."""
    x = model.encode(params, cfg, inputs, segments).astype(jnp.float32)
    if pool == "mean":
        real = (segments > 0).astype(jnp.float32)[..., None]
        return jnp.sum(x * real, axis=1) / jnp.maximum(jnp.sum(real, axis=1), 1)
    return x[:, 0] if pool == "first" else x


# ====== below: many examples, blanks, files, the command ==========================================

RESULT_FIELD = {
    "predict": "prediction",
    "score": "score",  # what a mode adds to a line
    "mean": "mean",
    "first": "first",
    "none": "vectors",
}


class Example(NamedTuple):
    """Ids of inputs, of targets to score and of a prefix of the answer; EOS is theirs to have.
    number: tells examples apart, for samples."""

    inputs: list
    targets: list = ()
    prefix: list = ()
    number: int = 0


def padded_length(length):
    """The next power of two, or of 512: few lengths, so that few programs are compiled."""
    return (
        max(16, 1 << (length - 1).bit_length())
        if length <= 512
        else -(-length // 512) * 512
    )


def pad_batch(sequences, rows):
    """Lists of ids -> [rows, the bucket of the longest], 0 after their ends."""
    out = np.zeros((rows, padded_length(max(1, *map(len, sequences)))), np.int32)
    for row, ids in zip(out, sequences):
        row[: len(ids)] = ids
    return out


def run_examples(params, cfg, mesh, examples, mode="predict", total=None):
    """Config, iterable of Examples -> for each, in their order, (ids, scores) of its answers, which
    are lists of ids without EOS, best first; or its score; or with mode mean, first or none its
    vectors. What an example gets does not depend on the others: they are sorted by length in
    windows only to be padded less. Inputs longer than data.inputs_length come fewer at a time."""
    most, devices = cfg.decode.batch_size, mesh.shape["data"]
    total = len(examples) if isinstance(examples, list) else total
    examples = enumerate(examples)
    bar = data.progress_bar(
        {"predict": "answered", "score": "scored"}.get(mode, "encoded"), "example", total
    )
    while window := list(itertools.islice(examples, 16 * most)):
        window.sort(key=lambda item: (len(item[1].inputs), len(item[1].targets)))
        results = {}
        while window:
            longest = max(
                padded_length(len(window[-1][1].inputs)), cfg.data.inputs_length
            )
            rows = max(1, most * cfg.data.inputs_length // longest)
            numbers, group = zip(*window[-rows:])
            del window[-rows:]
            # a single text is a single row
            rows = min(rows, 1 << (len(group) - 1).bit_length())
            results |= zip(
                numbers,
                run_batch(params, cfg, mesh, group, mode, -(-rows // devices) * devices),
            )
            bar.update(len(group))
        yield from (results[number] for number in sorted(results))
    bar.close()


def run_batch(params, cfg, mesh, group, mode, B):
    """At most B examples -> their results; the batch is filled up with padding."""
    length = cfg.decode.max_len or cfg.data.targets_length
    beams = max(1, cfg.decode.beams, cfg.decode.num_return)
    inputs, targets, prefix, number = zip(*group)
    real = [
        pad_batch([[1] * len(ids) for ids in side], B) > 0 for side in (inputs, targets)
    ]
    inputs, targets, prefix = (pad_batch(side, B) for side in (inputs, targets, prefix))
    rows = pad_batch([[n] for n in number], B).astype(np.uint32)
    partition.check_memory(
        model.minimum_memory(
            cfg.model,
            B,
            inputs.shape[1],
            *([length, 1, beams] if mode == "predict" else [targets.shape[1]]),
        ),
        "--decode.batch_size, --decode.beams, --decode.max_len or the length of the inputs",
    )
    local, batch = (
        partition.local_rows(B, mesh),
        data.complete_batch(inputs, targets, *real),
    )
    batch, rows, prefix = partition.put_batch(
        jax.tree.map(lambda a: a[local], (batch, rows[:, :1], prefix[:, :length])),
        B,
        mesh,
    )
    if mode == "score":
        return to_numpy(score(params, batch, cfg.model)).tolist()[: len(group)]
    if mode != "predict":
        vectors = to_numpy(
            encoder_vectors(params, batch.inputs, batch.input_segments, cfg.model, mode)
        )
        return [
            one[: len(x.inputs)] if mode == "none" else one
            for one, x in zip(vectors, group)
        ]
    ids, scores = map(
        to_numpy,
        generate(
            params,
            batch.inputs,
            batch.input_segments,
            cfg.model,
            length,
            cfg.decode,
            rows[:, 0],
            cfg.train.seed,
            prefix,
        ),
    )
    n = cfg.decode.num_return
    return [
        ([cut_at_eos(one) for one in some[:n].tolist()], some_scores[:n].tolist())
        for some, some_scores in zip(ids[: len(group)], scores)
    ]


def to_numpy(array):
    """A global array -> NumPy, on every process."""
    return np.asarray(jax.reshard(array, P()).addressable_data(0))


def cut_at_eos(ids):
    """Ids up to EOS or padding."""
    return list(itertools.takewhile(lambda i: i > data.EOS, ids))


# ---- blanks --------------------------------------------------------------------------------------


def split_spans(ids, tokenizer):
    """Ids of span-corruption targets -> {sentinel number: ids of its span}."""
    spans, number = {}, None
    for i in map(int, ids):
        if i == data.EOS:
            break
        if tokenizer.size - tokenizer.sentinels <= i < tokenizer.size:
            number = tokenizer.size - 1 - i
            spans[number] = []
        elif number is not None:
            # a row without a piece
            spans[number].append(i if i < tokenizer.size else data.UNK)
    return spans


def fill_blanks(inputs, spans, tokenizer):
    """Ids of inputs with sentinels -> text, [what its span says] or ____ in a sentinel's place."""
    text, words = "", []
    for i in [*map(int, inputs), data.EOS]:
        number = tokenizer.size - 1 - i
        if i > data.EOS and number >= tokenizer.sentinels:
            words.append(i)
            continue
        text += tokenizer.raw_text(words)
        words = []
        if i > data.EOS:
            filled = tokenizer.raw_text(spans.get(number, []))
            space = " " * filled.startswith(" ")  # stays outside the brackets
            text += (
                f"{space}[{filled.removeprefix(space)}]" if number in spans else " ____ "
            )
    return " ".join(text.split())


# ---- the command ---------------------------------------------------------------------------------


def load_params(cfg, run_dir, step=None):
    """The parameters of a run's newest checkpoint, or of a step's, float32 -> (step, params)."""
    wanted = {
        "params": jax.tree.map(
            lambda p: jax.ShapeDtypeStruct(
                p.shape,
                jnp.float32,
                sharding=jax.NamedSharding(
                    jax.sharding.get_mesh(), partition.spec(p.axes)
                ),
            ),
            model.param_table(cfg.model),
            is_leaf=model.is_param,
        )
    }
    found = partition.Checkpoints(run_dir).load(wanted, step)
    if not found:
        raise UserError(f"{run_dir} has no whole checkpoint yet: train.py writes them.")
    return found[0], found[1]["params"]


def check_decoder(cfg, mode=None):
    """Refuse an encoder alone, but in mode encode."""
    if not cfg.model.num_decoder_layers and mode != "encode":
        raise UserError(
            "This model is an encoder alone: infer.py --mode encode gives its vectors."
        )


def open_model(args, changes, recipe=False):
    """--run_dir -> (Config, mesh, the run's Tokenizer or None). recipe: run its recipe.py too."""
    if not args.run_dir:
        raise UserError(
            "--run_dir names the run whose model is wanted, for instance runs/tiny."
        )
    cfg = configs.resolve(args, changes, recipe)
    check_decoder(cfg, args.mode)
    args.step = partition.resolve_step(args.run_dir, args.step)
    partition.start_jax(cfg)
    mesh = partition.set_mesh(cfg)
    vocabulary = configs.to_path(args.run_dir) / "spiece.model"
    # runs on ids, and converted ones, may do without a vocabulary
    return cfg, mesh, data.load_tokenizer(vocabulary) if vocabulary.exists() else None


class ExampleEncoder:
    """Lines with inputs and targets -> Examples; counts the texts that were cut."""

    def __init__(self, cfg, tokenizer, scoring, task=data.Task()):
        self.cfg, self.tokenizer, self.scoring, self.task = cfg, tokenizer, scoring, task
        self.cut = 0

    def ids(self, line, key):
        """The ids of a field: given ones as they are; those of a text cut, with EOS but in T0."""
        value = line.get(key)
        if isinstance(value, str) and (wrong := data.invalid_reason(value, math.inf)):
            raise ValueError(f"has {wrong} in {key}")
        if isinstance(value, str):
            if self.tokenizer is None:
                raise ValueError("this run has no vocabulary: give lists of ids")
            ids = self.tokenizer.encode(value)
            side = "inputs" if key == "inputs" else "targets"
            *_, kept = data.truncated_length(side, self.task, self.cfg.data)
            self.cut += kept < len(ids)
            return data.truncate(ids, side, self.task, self.cfg.data).tolist()
        value = value.tolist() if isinstance(value, np.ndarray) else value
        if not isinstance(value, list) or not all(type(i) is int for i in value):
            raise ValueError(
                f"has no text and no list of ids in {key} (fields: {', '.join(line)})"
            )
        if not all(0 <= i < self.cfg.model.vocab_size for i in value):
            raise ValueError(
                f"has an id outside the model's {self.cfg.model.vocab_size} in {key}"
            )
        return value

    def __call__(self, line, number=0):
        targets = self.ids(line, "targets") if self.scoring else ()
        prefix = self.ids(line, "prefix") if "prefix" in line else ()
        if isinstance(line.get("prefix"), str):
            prefix = prefix[:-1]
        return Example(self.ids(line, "inputs"), targets, prefix, number)


def task_and_split(name):
    """ "task:NAME[:SPLIT]" -> (NAME, SPLIT)."""
    name = name.removeprefix("task:")
    task, _, split = (
        (name, "", "")
        if name.partition(":")[0] in data.SOURCES
        else (name.partition(":"))
    )
    return task, split or "validation"


def read_input(name, cfg, bad):
    """--input: (where, dict) of a JSONL file, of a .txt file's lines, or of task:NAME[:SPLIT]."""
    if name.endswith(".txt"):
        yield from (
            (f"{name}:{number}", {"inputs": line.rstrip("\r\n")})
            for number, line in data.read_lines(name, bad)
        )
    elif name.startswith("task:"):
        task, split = task_and_split(name)
        yield from data.read_task(task, split, data.evaluation_config(task, cfg), bad)
    else:
        for part in data.open_source(f"jsonl:{name}", "train", cfg, whole=True):
            yield from part.read(bad)


def check_files(args):
    """Refuse an output that is there, an input that is not, lines that processes do not share."""
    if args.output and partition.is_main_process() and os.path.exists(args.output):
        raise UserError(f"{args.output} is there already: name another, or move it away.")
    if (
        args.input
        and not args.input.startswith("task:")
        and not data.find_files(args.input)
    ):
        raise UserError(f"No file matches --input {args.input}.")
    if not args.input and args.text is None and jax.process_count() > 1:
        raise UserError(
            "Several processes do not share one standard input: give --input."
        )


def run_file(args, cfg, mesh, tokenizer, params):
    """--input to --output, line by line in order; goes on where a killed one stopped. Lines go
    to OUTPUT.partial, renamed at the end. All processes compute, the first one writes."""
    partial, skip = f"{args.output}.partial", cfg.data.on_error == "skip"
    task, wrong = data.Task(), []
    if args.input.startswith("task:"):
        name, _ = task_and_split(args.input)
        task = data.find_task(name, data.evaluation_config(name, cfg))
    encode = ExampleEncoder(cfg, tokenizer, args.mode == "score", task)

    def complain(where, what):
        if not skip:
            raise UserError(
                f"{where} {what}: mend it, or let such lines through with an error "
                f"field by --data.on_error skip."
            )
        wrong.append(({"error": f"{where} {what}"}, None))

    def examples():  # (line, Example or None)
        for number, (where, line) in enumerate(read_input(args.input, cfg, complain)):
            yield from wrong
            wrong.clear()
            try:
                yield line, encode(line, number)
            except ValueError as error:
                complain(where, str(error))
                yield {**line, **wrong.pop()[0]}, None
        yield from wrong

    turn, parts = configs.parse_shard(args.shard)
    lines = itertools.islice(examples(), turn, None, parts)
    file, done = partition.run_on_main_first(
        lambda: open_partial(partial, lines, args.mode)
    )
    done, count, tokens, began = (
        partition.from_main_process(done),
        0,
        0,
        time.perf_counter(),
    )
    if not partition.is_main_process():
        lines = itertools.islice(lines, done, None)
    lines, seen = itertools.tee(lines)
    total = None  # only a plain file is cheap to read twice; a pipe cannot be
    if os.path.isfile(args.input):
        total = (
            sum(1 for _ in read_input(args.input, cfg, lambda *_: None)) // parts - done
        )
    results = run_examples(
        params, cfg, mesh, (x for _, x in lines if x), args.mode, total
    )
    with configs.naming_file(partial), file:
        for line, example in seen:
            if example:
                result = next(results)
                line |= result_fields(result, example, line, args.mode, cfg, tokenizer)
                made = (
                    result[0]
                    if args.mode == "predict"
                    else [example.targets or example.inputs]
                )
                tokens += sum(map(len, made))
            file.write(json_line(line).encode())
            file.flush()
            count += 1
        if partition.is_main_process():
            os.fsync(file.fileno())
            if not count + done:
                os.remove(partial)
            elif args.output.endswith(".npz"):
                write_vectors(
                    partial, args.output, RESULT_FIELD[args.mode], cfg.model.d_model
                )
            else:
                os.replace(partial, args.output)
    if not count + done:
        raise UserError(f"{args.input} holds no line: there is nothing to answer.")
    seconds = time.perf_counter() - began
    note(
        f"{args.output}: {count:,} examples, {count / seconds:.4g} a second; {tokens:,} tokens, "
        f"{tokens / seconds:.4g} a second"
    )
    if encode.cut:
        note(
            f"{encode.cut:,} texts were cut at --data.inputs_length or --data.targets_length"
        )


def open_partial(path, lines, mode):
    """OUTPUT.partial, locked and opened to append -> (file, how many lines it has). The iterator
    `lines` is moved on by as many; a file that does not answer them is refused. On other processes
    than the first, a file that keeps nothing."""
    if not partition.is_main_process():
        return open(os.devnull, "ab"), 0
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    try:
        file = configs.lock(path)
    except BlockingIOError:
        raise UserError(
            f"Another process is writing {path}: let it, or name another --output."
        ) from None
    file.seek(0)
    whole = [
        line for line in file.read().splitlines(keepends=True) if line.endswith(b"\n")
    ]
    if not all(is_answered(text, next(lines, None), mode) for text in whole):
        file.close()
        raise UserError(
            f"{path} holds other lines than this command writes: move it away, or "
            f"repeat the command that began it."
        )
    file.truncate(sum(map(len, whole)))
    if whole:
        note(f"{path} has {len(whole):,} lines: going on behind them")
    return file, len(whole)


def is_answered(text, asked, mode):
    """Whether a line of OUTPUT.partial answers what is asked, (line, Example), in this mode."""
    try:
        answered = json.loads(text)
        return bool({"error", RESULT_FIELD[mode]} & set(answered)) and (
            {**answered, **json.loads(json_line(asked[0]))} == answered
        )
    except (ValueError, TypeError):  # no JSON object, or nothing was asked
        return False


def json_line(line):
    """A dict -> its line of a JSONL file, with escapes only where UTF-8 has no bytes for it."""
    text = json.dumps(line, ensure_ascii=False, default=json_default)
    return (
        text
        if data.invalid_reason(text, math.inf) is None
        else json.dumps(line, default=json_default)
    ) + "\n"


def json_default(value):
    """What JSON can hold of NumPy's values."""
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else str(value)


def write_vectors(lines, path, field, width):
    """Lines of JSON with ids and vectors -> an .npz file; a line in error has no ids, or nan."""
    ids, vectors, nothing = [], [], np.full((int(field != "vectors"), width), np.nan)
    with open(lines) as file:
        for line in map(json.loads, file):
            ids.append(np.int32(line.get("ids", [])))
            vectors.append(np.float32(line.get(field, nothing)).reshape(-1, width))
    with open(lines, "wb") as file:
        np.savez(
            file,
            ids=np.concatenate(ids),
            lengths=[*map(len, ids)],
            vectors=np.concatenate(vectors),
        )
    os.replace(lines, path)


def result_fields(result, example, line, mode, cfg, tokenizer):
    """What is added to a line: texts where a text came in, ids where ids did."""
    if mode == "score":
        return {"score": result}
    if mode != "predict":  # nine digits tell any two numbers of float32 apart
        numbers = np.array([float(f"{x:.9g}") for x in result.flat]).reshape(result.shape)
        return {"ids": example.inputs, RESULT_FIELD[mode]: numbers.tolist()}
    ids, scores = result
    texts = (
        ids
        if isinstance(line["inputs"], list)
        else [tokenizer.decode(one) for one in ids]
    )
    added = {"prediction": texts[0]}
    if cfg.decode.return_all or len(texts) > 1:
        added |= {"predictions": texts, "scores": scores}
    return added


def run_lines(lines, cfg, mesh, tokenizer, params, raw):
    """Print a line for each line: its answer; where it has blanks, itself with them filled; nothing
    for nothing. With several answers or their scores asked for, a line for each of these."""
    encode = ExampleEncoder(cfg, tokenizer, False)
    for number, line in enumerate(lines):
        cut, text = encode.cut, line.strip()
        if not text:
            print(flush=True)
            continue
        try:
            example = encode({"inputs": text}, number)
        except ValueError as error:
            raise UserError(f"Line {number + 1} {error}.") from error
        if encode.cut > cut:
            note(
                f"line {number + 1} is cut to the {len(example.inputs) - 1} tokens that "
                f"--data.inputs_length leaves"
            )
        ((answers, scores),) = run_examples(params, cfg, mesh, [example])
        blanks = split_spans(example.inputs, tokenizer) and not raw
        for ids, score in zip(answers, scores):
            text = (
                tokenizer.decode(ids)
                if not blanks
                else fill_blanks(example.inputs, split_spans(ids, tokenizer), tokenizer)
            )
            text = configs.escape_controls(text.replace("\n", " "))
            print(f"{score:.4f}\t{text}" if cfg.decode.return_all else text, flush=True)


def main(argv):
    args, changes = configs.parse_args(
        __doc__,
        argv,
        text_=dict(nargs="?", help="a text to answer"),
        input=dict(help="a JSONL or .txt file, or task:NAME[:SPLIT]"),
        output=dict(help="the JSONL file to write"),
        mode=dict(default="predict", choices=("predict", "score", "encode")),
        pool=dict(
            default="mean",
            choices=("mean", "first", "none"),
            help="of the encoder's "
            "vectors: one for each text, or (none) one for each token",
        ),
        raw=dict(
            action="store_true", help="print what the model wrote, no blanks filled"
        ),
        step=dict(default="latest", help="a checkpoint's step, latest or best"),
        shard=dict(
            default="0/1", metavar="I/N", help="only every N-th line, from line I on"
        ),
    )
    if bool(args.input) != bool(args.output) or args.input and args.text is not None:
        raise UserError(
            "Give a text, or --input and --output, or neither, for standard input."
        )
    configs.parse_shard(args.shard)
    if args.mode != "encode" and (args.output or "").endswith(".npz"):
        raise UserError("--output OUT.npz is of --mode encode: name a JSONL file.")
    task = bool(args.input) and args.input.startswith("task:")
    cfg, mesh, tokenizer = open_model(args, changes, task)
    partition.run_on_main_first(lambda: check_files(args))
    if args.mode == "encode":
        args.mode = args.pool
    _, params = load_params(cfg, args.run_dir, args.step)
    if args.input:
        return run_file(args, cfg, mesh, tokenizer, params)
    if tokenizer is None:
        raise UserError(
            "This run has no vocabulary: put its spiece.model into the run directory, "
            "or give --input with lists of ids."
        )
    if args.mode != "predict":
        raise UserError(f"--mode {args.mode} needs --input and --output.")
    lines = (
        [args.text]
        if args.text is not None
        else io.TextIOWrapper(sys.stdin.buffer, "utf-8", "replace")
    )
    run_lines(lines, cfg, mesh, tokenizer, params, args.raw)


if __name__ == "__main__":
    configs.run_command(main)
