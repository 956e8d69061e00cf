"""Generate text with a trained T5, score given targets, or embed texts.

    python infer.py --run_dir RUN "Return the <extra_id_0> of the list."
    python infer.py --run_dir RUN < texts           a line for each output of each line
    python infer.py --run_dir RUN --input IN.jsonl --output OUT.jsonl
    python infer.py --run_dir RUN --input task:glue_rte_v002:validation --output OUT.jsonl

Each line of IN.jsonl is an object with "inputs" and, for --mode score, "targets". Each of
these is a text or a list of token ids, which gets EOS and is cut to --data.inputs_length
or targets_length, as in training. OUT.jsonl has the same lines in the same order, with a
new field: "prediction" (several outputs or write_scores also add "predictions" and
"scores"), "score" (the log-probability of the targets) or "embedding" (the mean output of
the encoder). Up to rounding, other lines do not change a result. Random samples also
depend on the number of the line.

Letters of shapes: B examples, N outputs of an example (beams or samples), S input length,
T maximum number of generated ids, H heads, C channels of a head, K keys, V vocabulary.
"""

import functools
import itertools
import json
import math
import re
import sys
import zlib
from dataclasses import dataclass
from typing import Iterable, Iterator, Literal, NamedTuple, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax import Array, P, lax
from tqdm import tqdm

import configs
import data
import model
import partition
from configs import Config, DecodeConfig, ModelConfig, UserError
from partition import constrain

# ---- the cache and one decoding step ---------------------------------------------------
# generate                        encodes the inputs, and then for each position:
#   decode_step                   computes the logits of the next ids, and the new cache
#   append_ids or extend_beams    chooses an id for each output, or the best beams
#   sorted_outputs, beam_outputs  return the outputs in the end, with the best one first
#
# Without a cache, greedy decoding of a text would be
#
#     ids = []
#     while data.EOS not in ids:
#         batch = data.fill_rows([[(inputs, ids + [data.PAD])]], (S, T))
#         logits = model.forward(params, batch, model_cfg)[0, len(ids)]
#         ids.append(int(logits.argmax()))
#
# which computes all earlier positions again and again. With a cache of keys and values,
# each is computed only once. In greedy decoding, the key of position t is at index t of
# the cache.
#
# The N beams or samples of an example share a cache: the key of position t of beam m is
# at index t * N + m. A mask hides the keys of other beams. When beam search reorders the
# beams, only this mask changes, and the cache is not copied. With two beams, the cache
# holds the keys of
#
#     position 0, beam 0    position 0, beam 1    position 1, beam 0    position 1, beam 1
#
# and a beam whose `ancestors` are [1, 0] sees the second and the third. Greedy outputs
# and samples have no ancestors: output m sees only its own keys.


def attend_few_queries(q: Array, k: Array, v: Array, mask: Array, bias=None) -> Array:
    """Call dot_product_attention for the few queries of the newest tokens."""
    Q = q.shape[2]
    if partition.platform() == "tpu":
        # For fewer than 8 queries, the compiler would not use the matrix unit.
        mask = jnp.broadcast_to(mask, (*mask.shape[:2], Q, mask.shape[3]))
        padding = (0, 0), (0, 0), (0, -Q % 8), (0, 0)
        q, mask = jnp.pad(q, padding), jnp.pad(mask, padding)
    return model.dot_product_attention(q, k, v, mask, bias)[:, :, :Q]


def init_cache(params: dict, encoded: Array, length: int, model_cfg: ModelConfig, N: int):
    """Return two lists with an item for each decoder layer: (cache, layers).

    An item of the cache is [keys, values], both [B, H, length * N, C]. An item of
    layers is what the steps share: (weights, keys and values of the encoder's output,
    position biases [H, length, length]).
    """
    stack = params["decoder"]
    cache, layers = [], []
    for i in range(model_cfg.num_decoder_layers):
        # Slice the stacked weights here. In the loop, XLA would copy them in each step.
        w = jax.tree.map(lambda x: x[i].astype(encoded.dtype), stack["layers"])
        w = model.gather_weights("decoder", w, model_cfg)
        relative_bias = model.relative_bias_of(stack, w["self_attention"], model_cfg)
        bias = model.position_bias(relative_bias, length, length, False, model_cfg)
        cross_kv = model.keys_values(w["cross_attention"], encoded, model_cfg)
        B, H, _, C = cross_kv[0].shape
        empty = jnp.zeros((B, H, length * N, C), encoded.dtype)
        empty = constrain(empty, "batch", "heads")
        cache.append([empty, empty])
        layers.append((w, cross_kv, bias))
    return cache, layers


def decode_step(
    params, model_cfg, ids, t, cache, layers, input_segments, ancestors=None
) -> tuple[Array, list]:
    """Run the decoder on the ids [B, N] of position t. Return (logits, cache).

    The logits of the next ids are float32 [B, N, V]. ancestors [B, N, T]: the beam whose
    keys a beam reads at each position. Without it, a beam reads only its own keys.
    """
    N = ids.shape[1]
    T = cache[0][0].shape[2] // N
    if ancestors is None:
        ancestors = jnp.arange(N)[None, :, None]
    written = (jnp.arange(T) <= t)[:, None]
    visible = written & (ancestors[..., None] == jnp.arange(N))  # [B, N, T, N]
    mask = visible.reshape(len(visible), 1, N, T * N)
    cross_mask = (input_segments > 0)[:, None, None]
    cross_attend = functools.partial(attend_few_queries, mask=cross_mask)

    write = lax.dynamic_update_slice_in_dim
    x = model.embed_tokens(params, ids, model_cfg)
    cache = list(cache)
    for i, (w, cross_kv, bias) in enumerate(layers):
        bias = lax.dynamic_slice_in_dim(bias, t, 1, axis=1)
        bias = jnp.repeat(bias, N, axis=2)  # all beams have the same position

        def attend(q, k, v):  # called by decoder_layer below; writes k and v to the cache
            keys, values = cache[i]
            keys = write(keys, k, t * N, axis=2)
            values = write(values, v, t * N, axis=2)
            cache[i] = [keys, values]
            return attend_few_queries(q, keys, values, mask, bias)

        x = model.decoder_layer(w, x, cross_kv, attend, cross_attend, model_cfg)
    x = model.final_norm(params, x, model_cfg)
    return model.compute_logits(params, x, model_cfg), cache


# ---- greedy decoding and sampling ------------------------------------------------------


class OutputState(NamedTuple):
    """The outputs so far. A score is the sum of the log-probabilities of the ids."""

    ids: Array  # [B, N, T], 0 after EOS
    scores: Array  # [B, N]
    done: Array  # [B, N], whether the output has ended with EOS
    ancestors: None = None  # unlike a beam, an output reads only its own keys


def start_outputs(B: int, N: int, T: int) -> OutputState:
    ids, scores = jnp.zeros((B, N, T), jnp.int32), jnp.zeros((B, N))
    return OutputState(ids, scores, done=jnp.zeros((B, N), bool))


def append_ids(state, log_probs: Array, t, *, decode_cfg, rngs) -> OutputState:
    """Append the most probable id, or a random one, by the log_probs [B, N, V]."""
    if decode_cfg.do_sample:
        ids = sample(log_probs, t, decode_cfg, rngs)
    else:
        ids = jnp.argmax(log_probs, axis=-1)
    ids = jnp.where(state.done, data.PAD, ids)
    added = jnp.take_along_axis(log_probs, ids[..., None], axis=-1)[..., 0]
    return OutputState(
        state.ids.at[:, :, t].set(ids),
        state.scores + jnp.where(state.done, 0.0, added),
        state.done | (ids == data.EOS),
    )


def sorted_outputs(state: OutputState) -> tuple[Array, Array]:
    """Return (ids, scores), with the best output first."""
    order = jnp.argsort(-state.scores, axis=1)
    return gather_beams(state.ids, order), gather_beams(state.scores, order)


def gather_beams(array: Array, index: Array) -> Array:
    """Select outputs of each example: array [B, N, ...], index [B, M]."""
    return jax.vmap(lambda outputs, chosen: outputs[chosen])(array, index)


fold_in = jnp.vectorize(jax.random.fold_in)  # for arrays of random keys or numbers


def output_rngs(seed: int, indices: Array, N: int) -> Array:
    """Return a random key for each output [B, N], which does not depend on its batch."""
    rngs = fold_in(jax.random.key(seed), indices)
    return fold_in(rngs[..., None], jnp.arange(N))


def sample(log_probs: Array, t, decode_cfg: DecodeConfig, rngs: Array) -> Array:
    """Draw the id of position t for each output, with its random key [B, N]."""
    logits = log_probs / max(decode_cfg.temperature or 1.0, 1e-4)
    logits = filter_logits(logits, decode_cfg.top_k, decode_cfg.top_p)
    rngs = fold_in(rngs, t)
    return jnp.vectorize(jax.random.categorical, signature="(),(v)->()")(rngs, logits)


def filter_logits(logits: Array, top_k: int, top_p: float) -> Array:
    """Set the logits of ids that must not be drawn to -inf.

    top_k keeps the k most probable ids and, as in T5X, all that equal the last of them.
    top_p keeps the fewest most probable ids whose sum reaches it (Holtzman et al. 2020),
    and ids that equal the last of them.
    """
    if top_k:
        top = lax.top_k(logits, min(top_k, logits.shape[-1]))[0]
        logits = jnp.where(logits < top[..., -1:], -jnp.inf, logits)
    if 0 < top_p < 1:
        ordered = jnp.sort(logits, descending=True)
        probs = jax.nn.softmax(ordered)
        kept = jnp.cumsum(probs, axis=-1) - probs < top_p
        smallest = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits < smallest, -jnp.inf, logits)
    return logits


# ---- beam search -----------------------------------------------------------------------
# The beam search of T5X (t5x/decoding.py). Live beams are the N best unfinished outputs.
# Each step extends every live beam by every id and selects the 2N best results. Those
# that end with EOS are finished, and the N best others are the new live beams. Each live
# beam has only one extension by EOS, so at least N of the 2N results are unfinished.

NEG_INF = -1e7  # added to a score that must not be selected, as in T5X


class BeamState(NamedTuple):
    """The N live beams, and the N best finished outputs."""

    ids: Array  # [B, N, T], the live beams, from best to worst
    scores: Array  # [B, N], the sums of their log-probabilities
    finished_ids: Array  # [B, N, T]
    # [B, N], divided by the length penalty; NEG_INF or less marks an empty place
    finished_scores: Array
    ancestors: Array  # [B, N, T], the beams whose keys the live beams read
    done: Array  # [B, 1], whether the search of an example has ended


def start_beams(B: int, N: int, T: int) -> BeamState:
    """Begin with equal, empty beams. Only the first one counts in the first step."""
    zeros = jnp.zeros((B, N, T), jnp.int32)
    lowest = jnp.full((B, N), NEG_INF)
    scores = lowest.at[:, 0].set(0.0)
    done = jnp.zeros((B, 1), bool)
    return BeamState(zeros, scores, zeros, lowest, ancestors=zeros, done=done)


def length_penalty(tokens, decode_cfg: DecodeConfig):
    """Return the divisor of a score, as in T5X (Wu et al. 2016) or Hugging Face."""
    base = {"gnmt": (5 + tokens) / 6, "length": tokens}[decode_cfg.length_penalty]
    return base**decode_cfg.alpha


def extend_beams(state: BeamState, log_probs: Array, t, *, decode_cfg) -> BeamState:
    """Extend the live beams by the ids of position t. log_probs: [B, N, V]."""
    B, N, V = log_probs.shape
    T = state.ids.shape[-1]
    # The 2N best extensions of all beams are among the 2N best of each beam.
    scores, ids = lax.top_k(log_probs + state.scores[..., None], min(2 * N, V))
    width = scores.shape[-1]
    scores, top = lax.top_k(scores.reshape(B, -1), 2 * N)
    parents = top // width  # the beam that each of them extends
    ids = gather_beams(ids.reshape(B, -1), top)
    extended = gather_beams(state.ids, parents).at[:, :, t].set(ids)
    ends = ids == data.EOS

    live_scores, live = lax.top_k(scores + jnp.where(ends, NEG_INF, 0.0), N)
    live_parents = gather_beams(parents, live)
    # A new beam reads what its parent read, then its own keys.
    ancestors = gather_beams(state.ancestors, live_parents)
    # In the last step, t + 1 is T, and JAX leaves out the write.
    ancestors = ancestors.at[:, :, t + 1].set(jnp.arange(N))

    new_scores = scores / length_penalty(t + 1.0, decode_cfg)
    # An empty beam, whose score is NEG_INF or less, does not end.
    new_scores += jnp.where(ends & (scores > NEG_INF), 0.0, NEG_INF)
    both_scores = jnp.append(state.finished_scores, new_scores, axis=1)
    finished_scores, best = lax.top_k(both_scores, N)
    finished_ids = gather_beams(jnp.append(state.finished_ids, extended, axis=1), best)

    # Scores are negative, and live beams can only get worse. So the largest divisor gives
    # a bound of what the best live beam can reach. Like T5X, take the divisor of T + 1
    # ids. The search ends when N finished outputs are better.
    bound = live_scores[:, :1] / length_penalty(T + 1.0, decode_cfg)
    done = finished_scores[:, -1:] > bound
    live_ids = gather_beams(extended, live)
    return BeamState(
        live_ids, live_scores, finished_ids, finished_scores, ancestors, done
    )


def beam_outputs(state: BeamState) -> tuple[Array, Array]:
    """Return the finished outputs, or the live beams of an example that has none.

    The score of a place without an output is -inf. Live beams have no length penalty.
    """
    finished = state.finished_scores > NEG_INF
    any_finished = finished[:, :1]  # The best one is the first.
    ids = jnp.where(any_finished[..., None], state.finished_ids, state.ids)
    scores = jnp.where(finished, state.finished_scores, -jnp.inf)
    return ids, jnp.where(any_finished, scores, state.scores)


# ---- the decoding loop -----------------------------------------------------------------


@jax.jit(static_argnames=("model_cfg", "length", "decode_cfg"), out_shardings=P())
def generate(
    params: dict,
    inputs: Array,
    input_segments: Array,
    model_cfg: ModelConfig,
    length: int,
    decode_cfg: DecodeConfig = DecodeConfig(),
    indices: Array | None = None,
    seed: int = 0,
) -> tuple[Array, Array]:
    """Return (ids [B, N, length], scores [B, N]) for inputs [B, S], best output first.

    N is decode.beams, or decode.num_return, which is 1 in greedy decoding. The ids are 0
    after EOS. Random samples depend on the indices [B] of the examples, by default 0, 1,
    2 and so on. out_shardings=P() gives the complete results to every process.
    """
    B, N = len(inputs), decode_cfg.beams or decode_cfg.num_return
    indices = jnp.arange(B) if indices is None else indices
    if decode_cfg.beams:
        state, finish = start_beams(B, N, length), beam_outputs
        extend = functools.partial(extend_beams, decode_cfg=decode_cfg)
    else:
        rngs = output_rngs(seed, indices, N)
        state, finish = start_outputs(B, N, length), sorted_outputs
        extend = functools.partial(append_ids, decode_cfg=decode_cfg, rngs=rngs)
    encoded = model.encode(params, inputs, input_segments, model_cfg)
    cache, layers = init_cache(params, encoded, length, model_cfg, N)

    def unfinished(carry):
        t, state, _ = carry
        return (t < length) & ~jnp.all(state.done)

    def decode_position(carry):
        t, state, cache = carry
        # At t = 0, index -1 is the last position, which still has PAD, T5's start token.
        ids = state.ids[:, :, t - 1]
        logits, cache = decode_step(
            params, model_cfg, ids, t, cache, layers, input_segments, state.ancestors
        )
        # Each device chooses ids for its own rows, from the whole vocabulary.
        logits = constrain(logits, "batch")
        return t + 1, extend(state, jax.nn.log_softmax(logits), t), cache

    _, state, _ = lax.while_loop(unfinished, decode_position, (0, state, cache))
    return finish(state)


@jax.jit(static_argnames="model_cfg", out_shardings=P())
def score(params: dict, batch: data.Batch, model_cfg: ModelConfig) -> Array:
    """Return the log-probability of the targets of each row [B], including EOS."""
    log_probs = jax.nn.log_softmax(model.forward(params, batch, model_cfg))
    of_targets = jnp.take_along_axis(log_probs, batch.targets[..., None], axis=-1)[..., 0]
    return jnp.sum(of_targets, axis=1, where=batch.target_segments > 0)


@jax.jit(static_argnames="model_cfg", out_shardings=P())
def mean_embeddings(params: dict, batch: data.Batch, model_cfg: ModelConfig) -> Array:
    """Return the mean of the encoder's outputs of each row, float32 [B, D]."""
    x = model.encode(params, batch.inputs, batch.input_segments, model_cfg)
    is_input = (batch.input_segments > 0)[..., None]
    return jnp.mean(x, axis=1, dtype=jnp.float32, where=is_input)


# ---- batches of examples ---------------------------------------------------------------


class Request(NamedTuple):
    """An example that the model gets."""

    inputs: Sequence  # token ids, with EOS if the task has it
    targets: Sequence = ()
    index: int = 0  # selects the random samples
    line: dict = {}  # the line of the file that it was made from


def process_requests(params, cfg: Config, requests: list, mode="predict") -> list:
    """Return the result of each request.

    The result of "predict" is (outputs, scores), with the best output first, of "score" a
    number, and of "encode" a vector.
    """
    # Requests of similar length share a batch. With the longest first, a lack of memory
    # shows at once.
    order = sorted(range(len(requests)), key=lambda i: -len(requests[i].inputs))
    results, size = [None] * len(requests), cfg.decode.batch_size
    for start in tqdm(range(0, len(order), size), mode, leave=False, disable=None):
        indices = order[start : start + size]
        batch_results = process_batch(params, cfg, [requests[i] for i in indices], mode)
        for i, result in zip(indices, batch_results):  # without the copies
            results[i] = result
    return results


def process_batch(params, cfg: Config, group: list[Request], mode: str) -> list:
    """Run the model on at most decode.batch_size examples."""
    # Round a small group up to a power of two by repeating its last example, which adds
    # no decoding steps.
    rows = min(cfg.decode.batch_size, 1 << (len(group) - 1).bit_length())
    shards = jax.sharding.get_mesh().shape["data"]
    rows = math.ceil(rows / shards) * shards
    padded = group + [group[-1]] * (rows - len(group))
    pairs = [(request.inputs, request.targets) for request in padded]
    limits = [padded_length(side) for side in zip(*pairs)]
    batch = data.fill_rows([[pair] for pair in pairs], limits)
    # As in T5X, the id 0 is padding wherever it stands.
    batch = batch._replace(
        input_segments=np.int32(batch.inputs > 0),
        target_segments=np.int32(batch.targets > 0),
    )
    partition.check_same([zlib.crc32(a) for a in batch])
    if not batch.input_segments.any(axis=1).all():
        raise UserError("An example has no inputs besides padding.")
    indices = np.uint32([request.index for request in padded])
    batch, indices = partition.put_batch((batch, indices))
    if mode != "predict":
        compute = {"score": score, "encode": mean_embeddings}[mode]
        return np.asarray(compute(params, batch, cfg.model)).tolist()
    ids, scores = generate(
        params,
        batch.inputs,
        batch.input_segments,
        cfg.model,
        cfg.decode.max_length or cfg.data.targets_length,
        cfg.decode,
        indices,
        cfg.train.seed,
    )
    results = []
    for outputs, own_scores in zip(np.asarray(ids), np.asarray(scores)):
        # Beam search may find fewer outputs than there are beams.
        n = min(cfg.decode.num_return, np.sum(own_scores != -np.inf))
        results.append((list(map(cut_at_eos, outputs[:n])), own_scores[:n].tolist()))
    return results


def padded_length(sequences: list) -> int:
    """Round up the longest length to a power of two, or above 512 to a multiple of 512.

    Few different lengths mean few compilations.
    """
    longest = max(16, *map(len, sequences))
    multiple = min(512, 1 << (longest - 1).bit_length())
    return math.ceil(longest / multiple) * multiple


def cut_at_eos(ids: Iterable) -> list[int]:
    """Return the ids before the first EOS, without padding."""
    before = itertools.takewhile(lambda i: i != data.EOS, map(int, ids))
    return [i for i in before if i != data.PAD]


def fill_blanks(inputs: Iterable, targets: Iterable, tokenizer) -> str:
    """Decode ids, and fill gaps: "a <extra_id_0> c" becomes "a [b] c", or "a ____ c"."""
    sentinel = r"<extra_id_(\d+)>"
    # A split also returns the numbers: what is before, "0", text, "1", text, ...
    _, *parts = re.split(sentinel, tokenizer.decode(targets))
    answers = {i: f" [{text.strip()}] " for i, text in zip(parts[::2], parts[1::2])}
    text = tokenizer.decode(inputs)
    filled = re.sub(sentinel, lambda found: answers.get(found[1], " ____ "), text)
    return " ".join(filled.split())


# ---- the model of a run ----------------------------------------------------------------


def start_inference(options: configs.Options):
    """Start JAX and its mesh, and return the Config and the tokenizer of --run_dir."""
    if not options.run_dir:
        raise UserError("Name the run that has the model: --run_dir DIR.")
    cfg = options.cfg
    partition.start_jax(options)
    tokenizer = data.load_tokenizer(cfg, options.run_dir)
    partition.set_mesh(cfg)
    return cfg, tokenizer


def load_params(cfg: Config, run_dir: str, step: int) -> dict:
    """Return the params of a checkpoint, split over the devices of the mesh."""

    def abstract(p):
        sharding = partition.spec(p.axes, cfg.mesh.fsdp)
        return jax.ShapeDtypeStruct(p.shape, jnp.float32, sharding=sharding)

    wanted = {"params": jax.tree.map(abstract, model.param_table(cfg.model))}
    folder = partition.Checkpoints(run_dir).path(step)
    return partition.load_arrays(folder, wanted)["params"]


# ---- answer files ----------------------------------------------------------------------


def read_input(options: "Options", tokenizer) -> Iterator[Request]:
    """Yield a Request for each line of --input that belongs to --shard.

    Without --input, a line is a text of the command line or of standard input.
    """
    cfg = options.cfg
    kind, _, name = options.input.partition(":")
    first, count = map(int, options.shard.split("/"))
    if not 0 <= first < count:
        raise UserError(f"--shard {options.shard} must be I/N with I from 0 to N - 1.")
    task = data.Task(options.input)
    if kind == "task":
        # NAME or NAME:SPLIT, and a name can have a colon, too, as in jsonl:a.jsonl
        name, split = re.fullmatch(r"(.+?)(?::(\w+))?", name).groups("validation")
        configs.refuse_unused_source([name], cfg, configs.load_run(options.run_dir)[0])
        task, files = data.open_task(name, split, cfg)
        if not files or task.objective:
            raise UserError(f"{task.source} has no split {split} of pairs ({name}).")
        lines = data.read_task(name, split, cfg)
    elif options.input:
        lines = data.read_jsonl(options.input)
    else:
        texts = sys.stdin if options.text is None else [options.text]
        lines = ({"inputs": text.strip()} for text in texts)
    for index, line in itertools.islice(enumerate(lines), first, None, count):
        pair = line if options.mode == "score" else {**line, "targets": ""}
        try:
            (ids,) = data.encode_pairs([pair], task, tokenizer, cfg)
        except Exception as error:
            error.add_note(f"in example {index + 1} with the fields {[*line]}")
            raise
        yield Request(*ids, index, line)


def result_fields(line: dict, result, cfg: Config, tokenizer, mode: str) -> dict:
    """Return the fields that a line gets. Texts get texts, and lists of ids get ids."""
    if mode != "predict":
        return {"score" if mode == "score" else "embedding": result}
    outputs, scores = result
    if isinstance(line["inputs"], str):
        outputs = list(map(tokenizer.decode, outputs))
    fields = {"prediction": outputs[0]}
    if cfg.decode.write_scores or cfg.decode.num_return > 1:
        fields |= {"predictions": outputs, "scores": scores}
    return fields


def to_json(line: dict) -> bytes:
    """Return a line of a JSONL file. It may hold lone surrogates."""

    def convert(value):  # a NumPy array, or a date of Parquet, say
        return value.tolist() if hasattr(value, "tolist") else str(value)

    text = json.dumps(line, ensure_ascii=False, default=convert)
    return text.encode(errors="backslashreplace") + b"\n"


def refuse_existing(output) -> None:
    if output.exists():
        raise UserError(f"{output} exists already: name another --output.")


def answer_lines(params: dict, options: "Options", tokenizer) -> Iterator[bytes]:
    """Yield each line of --input with its result, as a line of a JSONL file."""
    cfg, mode = options.cfg, options.mode
    requests = iter(tqdm(read_input(options, tokenizer), "examples", disable=None))
    # Memory holds one block of lines, whose batches have similar lengths.
    while block := list(itertools.islice(requests, max(512, cfg.decode.batch_size))):
        for request, result in zip(block, process_requests(params, cfg, block, mode)):
            fields = result_fields(request.line, result, cfg, tokenizer, mode)
            yield to_json(request.line | fields)


def answer_file(params: dict, options: "Options", tokenizer) -> None:
    """Write the file --output, which appears when it is complete."""
    output = configs.to_path(options.output)
    refuse_existing(output)
    lines = answer_lines(params, options, tokenizer)

    def lines_and_check():
        yield from lines
        refuse_existing(output)  # Another shard may have written it by now.

    if partition.is_main_process():
        configs.write_file(output, lines_and_check())
        print(f"The answers are in {output}.")
    else:
        for _ in lines:  # takes part in all batches
            pass


# ---- the command -----------------------------------------------------------------------


def answer_texts(params: dict, options: "Options", tokenizer) -> None:
    """Print the output for each text, with its gaps filled if it has sentinels."""
    for request in read_input(options, tokenizer):
        ((outputs, scores),) = process_requests(params, options.cfg, [request])
        for ids, value in zip(outputs, scores):
            answer = tokenizer.decode(ids).replace("\n", " ")
            if "<extra_id_" in request.line["inputs"] and not options.raw:
                answer = fill_blanks(request.inputs, ids, tokenizer)
            score_column = f"{value:.4f}\t" if options.cfg.decode.write_scores else ""
            print(f"{score_column}{answer}", flush=True)


@dataclass(frozen=True)
class Options(configs.Options):
    # the input text; without it, every line of standard input is a text
    text: tyro.conf.Positional[str | None] = None
    input: str = ""  # a JSONL file, or task:NAME[:SPLIT]
    output: str = ""  # the JSONL file to write
    # generate texts, score the targets, or write the mean vectors of the encoder
    mode: Literal["predict", "score", "encode"] = "predict"
    raw: bool = False  # print the generated text alone, not the input with filled gaps
    step: str = "latest"  # a step, or latest
    shard: str = "0/1"  # I/N reads every N-th line, beginning with line I


def main() -> None:
    options = configs.parse(Options)
    has_files = options.input and options.output and options.text is None
    other_flags = options.mode != "predict" or options.shard != "0/1"
    needs_files = options.input or options.output or other_flags
    if needs_files and not has_files:
        raise UserError(
            "Give one text, lines on standard input, or --input with --output, which "
            "--mode and --shard need."
        )
    cfg, tokenizer = start_inference(options)
    step = partition.resolve_step(options.run_dir, options.step)
    params = load_params(cfg, options.run_dir, step)
    if options.input:
        answer_file(params, options, tokenizer)
    else:
        answer_texts(params, options, tokenizer)


if __name__ == "__main__":
    main()
