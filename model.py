"""T5 1.1 as pure functions: parameters, encoder, decoder, logits and loss.

A model is two values. The first is a ModelConfig, which states the dimensions. The second
is a nested dict of float32 arrays, the parameters. `forward` computes the logits of a
Batch of token ids, and `loss_fn` computes the training loss of a Batch.

    python model.py --config small_c4     print the parameters, their number and the FLOPs

The equations are those of Raffel et al. 2020 (arXiv:1910.10683), section 2.1, with the
changes of version 1.1: a gated GELU, a separate output layer, and no dropout in
pretraining. The numbers equal those of T5X (t5x/examples/t5/network.py).

The shapes in comments and einsums use these letters:

    B batch       Q query position    K key position     S input length    T target length
    D d_model     H heads             C d_kv, the channels of one head     F d_ff
    V vocabulary  L layers            R buckets of relative positions

How to read `out_sharding` and `P(...)`: on several devices, each array is split over a
mesh with the axes "data" and "model". P("data", None, "model") says that axis 0 of an
array is split over "data" and axis 2 over "model". On one device nothing is split, and a
reader may skip these arguments. partition.py explains the choice.

The first half of this file contains equations that JAX can differentiate as they stand.
The second half begins at a line of equals signs. It replaces some of these functions by
faster ones, which change speed and memory, but not results.

Example:
    >>> from configs import RECIPES
    >>> from model import count_params, param_table
    >>> table = param_table(RECIPES["small_c4"].model)
    >>> table["encoder"]["layers"]["attention"]["query"].shape    # layers, D, H * C
    (8, 512, 384)
    >>> count_params(table)
    76961152
"""

import functools
import math
import os
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec as P

import configs
import partition
from configs import parse_args, resolve, run_command
from partition import RULES, spec

# ---- parameters ------------------------------------------------------------------------


class Param(NamedTuple):
    """Declare the shape, the axes and the initial values of one parameter."""

    shape: tuple
    # What each axis means, e.g. ("embed", "mlp"). partition.RULES maps a meaning to a
    # mesh axis.
    axes: tuple
    # The initial distribution: ones, normal, truncated_normal or uniform.
    init: str = "ones"
    # The standard deviation of the normal distributions, or the bound of the uniform one.
    scale: float = 1.0


def param_table(cfg):
    """Return the nested dict of Params that declares every parameter of a ModelConfig.

    Initial values, shardings, checkpoints, counts and conversion all follow from this
    table. T5 differs from other Transformers in two ways. The weights of all heads form
    one matrix, [D, H*C] or [H*C, D], so that Adafactor can store row and column means of
    this matrix. The attention scores are not divided by sqrt(C), because the initial
    scale of `query` already contains this factor.
    """
    D, F, V, R = cfg.d_model, cfg.d_ff, cfg.vocab_size, cfg.relative_buckets
    H, C = cfg.num_heads, cfg.d_kv

    norm = Param((D,), ("embed",))
    bias_scale = (6 / (H + R)) ** 0.5
    bias_table = Param((H, R), ("heads", "buckets"), "uniform", bias_scale)
    bias = {"relative_bias": bias_table}

    # T5 has one table of position biases for each stack, UMT5 one for each layer.
    stack_bias, layer_bias = ({}, bias) if cfg.layer_biases else (bias, {})

    def attention(bias):
        return {
            "norm": norm,
            "query": Param((D, H * C), ("embed", "heads"), "normal", (D * C) ** -0.5),
            "key": Param((D, H * C), ("embed", "heads"), "normal", D**-0.5),
            "value": Param((D, H * C), ("embed", "heads"), "normal", D**-0.5),
            "out": Param((H * C, D), ("heads", "embed"), "normal", (H * C) ** -0.5),
            **bias,
        }

    up = Param((D, F), ("embed", "mlp"), "truncated_normal", D**-0.5)
    mlp = {
        "norm": norm,
        "up": up,
        "down": Param((F, D), ("mlp", "embed"), "truncated_normal", F**-0.5),
    }
    if cfg.activation.startswith("gated_"):
        mlp["gate"] = up

    def stack(num_layers, layer):
        """Declare the layers of a stack. Each weight is one array for all layers."""

        def add_layer_axis(p):
            return p._replace(shape=(num_layers, *p.shape), axes=("layers", *p.axes))

        layers = jax.tree.map(add_layer_axis, layer, is_leaf=is_param)
        return {"layers": layers, "norm": norm, **stack_bias}

    encoder_layer = {"attention": attention(layer_bias), "mlp": mlp}
    decoder_layer = {
        "self_attention": attention(layer_bias),
        "cross_attention": attention({}),
        "mlp": mlp,
    }
    table = {
        "embed": Param((V, D), ("vocab", "embed"), "normal", 1.0),
        "encoder": stack(cfg.num_layers, encoder_layer),
    }
    if cfg.num_decoder_layers:
        table["decoder"] = stack(cfg.num_decoder_layers, decoder_layer)
        # T5 1.0 ties the output layer to the embedding; T5 1.1 has a separate one.
        if not cfg.tied:
            scale = D**-0.5
            table["unembed"] = Param(
                (D, V), ("embed", "vocab"), "truncated_normal", scale
            )
    return table


def is_param(x):
    """Return whether x is a Param, so that jax.tree functions treat x as a leaf."""
    return isinstance(x, Param)


def init_params(cfg, key, rules=RULES):
    """Sample the initial float32 parameters of a ModelConfig.

    The values do not depend on the mesh. rules: the sharding rules of the stored
    parameters. partition.py has different rules for fully sharded training.
    """

    def sample(p, key):
        # spec turns the meanings of the axes into a PartitionSpec.
        shape, sharding = p.shape, spec(p.axes, rules)
        if p.init == "ones":
            return jnp.ones(shape, out_sharding=sharding)
        if p.init == "uniform":
            bound = p.scale
            return jax.random.uniform(
                key, shape, minval=-bound, maxval=bound, out_sharding=sharding
            )
        if p.init == "normal":
            return p.scale * jax.random.normal(key, shape, out_sharding=sharding)
        # A normal distribution truncated at two standard deviations has this standard
        # deviation.
        truncated_std = 0.87962566103423978
        x = jax.random.truncated_normal(key, -2, 2, shape, out_sharding=sharding)
        return p.scale / truncated_std * x

    table, structure = jax.tree.flatten(param_table(cfg), is_leaf=is_param)
    keys = jax.random.split(key, len(table))
    return jax.tree.unflatten(structure, map(sample, table, keys))


# ---- building blocks -------------------------------------------------------------------

# The activation functions by name. A recipe file may add entries. gelu is the tanh
# approximation.
ACTIVATIONS = configs.ACTIVATIONS
ACTIVATIONS |= {"relu": jax.nn.relu, "gelu": jax.nn.gelu, "silu": jax.nn.silu}


def compute_dtype(cfg):
    """Return the dtype of activations and matmuls.

    Parameters, norm statistics, softmax, logits and loss are float32 whatever this dtype
    is.
    """
    dtype = cfg.dtype
    if dtype == "auto":
        dtype = partition.default_compute_dtype()
    return jnp.dtype(dtype)


def sharding_of(x):
    """Return the PartitionSpec of an array, which JAX stores in the type of the array."""
    return jax.typeof(x).sharding.spec


def dense(x, w):
    """Multiply activations [B, Q, D] by a weight matrix [D, F]. Returns [B, Q, F].

    In this function, D and F stand for any two widths.

    When D is split over the mesh axis "model", each device holds a partial sum.
    `out_sharding` then makes JAX add the partial sums (an all-reduce).
    """
    rows, columns = sharding_of(x)[0], sharding_of(w)[1]
    return jnp.einsum("bqd,df->bqf", x, w, out_sharding=P(rows, None, columns))


def rms_norm(x, scale):
    """Divide each vector by its root mean square, and multiply it by a learned scale [D].

    This is T5's layer norm (Zhang and Sennrich 2019): it subtracts no mean and adds no
    bias.
    """
    x32 = x.astype(jnp.float32)
    mean_square = jnp.mean(x32 * x32, axis=-1, keepdims=True)
    y = x32 * lax.rsqrt(mean_square + 1e-6)
    return y.astype(x.dtype) * scale


def dropout_mask(key, rate, shape, sharding, dtype):
    """Sample a dropout mask.

    The mask is 0 for a dropped activation and 1 / (1 - rate) for every other activation.
    """
    keep = jax.random.bernoulli(key, 1 - rate, shape, out_sharding=sharding)
    return keep.astype(dtype) / (1 - rate)


def dropout(x, rate, key, shared_length=True):
    """Apply dropout to activations [B, Q, D]. Without a key, return x unchanged.

    T5 drops the same channels at all positions of a row, so the mask has shape [B, 1, D].
    Only at the end of the encoder does each position have a mask of its own
    (shared_length=False).
    """
    if key is None or rate == 0:
        return x
    B, Q, D = x.shape
    mask_length = 1 if shared_length else Q
    return x * dropout_mask(key, rate, (B, mask_length, D), sharding_of(x), x.dtype)


def split_key(key, n):
    """Split a PRNG key into n keys. If the key is None, return n times None."""
    if key is None:
        return (None,) * n
    return jax.random.split(key, n)


# ---- attention -------------------------------------------------------------------------


def relative_bucket(distance, bidirectional, cfg):
    """Assign each relative position to a bucket. Returns an integer array.

    distance: NumPy array of key position minus query position. Short distances have a
    bucket each. Longer ones share buckets whose width grows logarithmically. All
    distances from relative_max_distance on share the last bucket. In the encoder
    (bidirectional) half of the buckets is for keys before the query and half for keys
    after it. In the decoder a query sees no later key, so later keys all fall into bucket
    0.
    """
    buckets = cfg.relative_buckets
    first_bucket = 0
    if bidirectional:
        buckets //= 2
        first_bucket = (distance > 0) * buckets
        distance = np.abs(distance)
    else:
        distance = np.maximum(-distance, 0)
    # The first half of the buckets stands for exact distances 0, 1, 2, ...
    exact = buckets // 2
    # The other half of the buckets covers the distances up to relative_max_distance.
    # These buckets have equal widths on a logarithmic scale. The epsilon and float32 are
    # those of T5X, because rounding decides the bucket of a distance at the edge of two
    # buckets.
    position = np.log(np.float32(distance) / exact + np.finfo(np.float32).eps)
    position = position / np.log(cfg.relative_max_distance / exact) * (buckets - exact)
    logarithmic = np.minimum(exact + position.astype(np.int32), buckets - 1)
    return first_bucket + np.where(distance < exact, distance, logarithmic)


def bias_of_buckets(table, bucket):
    """Look up the bias of each bucket in a table [H, R].

    bucket: the bucket of each pair of a query and a key, [Q, K]. Returns [1, H, Q, K].
    """
    return table[None, :, bucket]


def relative_bias(w, Q, K, bidirectional, cfg, shared=None):
    """Return the position bias, which is added to the attention scores.

    The bias has the shape [1, H, Q, K] and is float32. It depends on the head and on the
    relative position of query and key.

    w: the weights of a stack or of a layer. When w has no table "relative_bias" [H, R],
    return `shared`: T5 computes the bias once for a stack, and all of its layers add the
    same bias.
    """
    if "relative_bias" not in w:
        return shared
    distance = np.arange(K) - np.arange(Q)[:, None]
    bucket = relative_bucket(distance, bidirectional, cfg)
    return bias_of_buckets(w["relative_bias"], bucket)


def attention_mask(query_segments, key_segments, causal=False):
    """Return a boolean mask [B, 1, Q, K] of the keys that each query sees.

    query_segments [B, Q] and key_segments [B, K] number the packed examples of a row from
    1, and padding is 0. A query sees the keys of its own example. With `causal` it sees
    no later key.
    """
    seen = query_segments[:, None, :, None] == key_segments[:, None, None, :]
    if causal:
        Q, K = query_segments.shape[1], key_segments.shape[1]
        seen &= np.tri(Q, K, dtype=bool)
    return jax.reshard(seen, P("data"))


def split_heads(x, cfg):
    """Split the channels of all heads, [B, K, H*C], into separate heads [B, H, K, C]."""
    rows, _, heads = sharding_of(x)
    B, K, _ = x.shape
    sharding = P(rows, None, heads, None)
    x = x.reshape(B, K, cfg.num_heads, cfg.d_kv, out_sharding=sharding)
    return x.transpose(0, 2, 1, 3)


def join_heads(x):
    """Join separate heads [B, H, Q, C] into one vector for each position, [B, Q, H*C]."""
    rows, heads, *_ = sharding_of(x)
    B, H, Q, C = x.shape
    x = x.transpose(0, 2, 1, 3)
    return x.reshape(B, Q, H * C, out_sharding=P(rows, None, heads))


def keys_values(w, x, cfg):
    """Project activations [B, K, D] to keys and values, each [B, H, K, C]."""
    k = split_heads(dense(x, w["key"]), cfg)
    v = split_heads(dense(x, w["value"]), cfg)
    return k, v


def attend(q, k, v, bias, mask):
    """Compute softmax(q k^T + bias) v for all heads. The softmax is float32.

    q [B, H, Q, C], k and v [B, H, K, C], bias [1, H, Q, K] or None, mask [B, 1, Q, K].
    Returns [B, H, Q, C]. T5 does not divide the scores by sqrt(C), see param_table.
    """
    scores = jnp.einsum("bhqc,bhkc->bhqk", q, k, preferred_element_type=jnp.float32)
    if bias is not None:
        scores = scores + bias
    scores = jnp.where(mask, scores, -1e10)
    probabilities = jax.nn.softmax(scores).astype(v.dtype)
    return jnp.einsum("bhqk,bhkc->bhqc", probabilities, v)


# named_scope labels the operations of a function. A profile then shows to which part of
# the model an operation belongs.
@jax.named_scope("attention")
def attention(w, x, kv, bias, mask, cfg, key=None, core=None):
    """Compute multi-head attention, followed by dropout.

    x: normalized activations [B, Q, D], from which the queries are projected. kv: the
    keys and values that the queries attend to. core: a function that computes the
    attention instead of `attend`; infer.py passes one for decoding. Returns [B, Q, D].
    """
    key_probabilities, key_out = split_key(key, 2)
    q = split_heads(dense(x, w["query"]), cfg)
    k, v = kv
    if key is not None and cfg.dropout:
        # When T5 drops an attention probability, T5 drops this key for all queries.
        # Setting the value of the key to zero has the same effect, and needs a smaller
        # mask.
        mask_shape = (*v.shape[:-1], 1)
        v = v * dropout_mask(
            key_probabilities, cfg.dropout, mask_shape, sharding_of(v), v.dtype
        )
    heads = (core or attend)(q, k, v, bias, mask)
    out = dense(join_heads(heads), w["out"])
    return dropout(out, cfg.dropout, key_out)


# ---- feed-forward layer ----------------------------------------------------------------


def gated_unit(gate, up, activation):
    """Multiply `up` by the activated `gate`, element by element (Shazeer 2020)."""
    return activation(gate) * up


@jax.named_scope("mlp")
def mlp(w, x, cfg, key=None):
    """Compute the feed-forward layer with its dropout.

    x: normalized activations [B, Q, D]. The result has the same shape. T5 1.1 computes
    (gelu(x gate) * (x up)) down, T5 1.0 computes relu(x up) down.
    """
    key_hidden, key_out = split_key(key, 2)
    activation = ACTIVATIONS[cfg.activation.removeprefix("gated_")]
    if "gate" in w:
        hidden = gated_unit(dense(x, w["gate"]), dense(x, w["up"]), activation)
    else:
        hidden = activation(dense(x, w["up"]))
    hidden = dropout(hidden, cfg.dropout, key_hidden)
    return dropout(dense(hidden, w["down"]), cfg.dropout, key_out)


# ---- encoder and decoder ---------------------------------------------------------------


def embed(params, ids, cfg, key):
    """Look up the embeddings of token ids [B, Q]. Returns [B, Q, D].

    T5 does not scale the embeddings. The lookup is in float32: its gradient is a sum over
    all occurrences of a token, and float32 keeps this sum exact enough.
    """
    table = jax.reshard(params["embed"], spec(("vocab", "embed")))
    x = table.at[ids].get(out_sharding=P("data", None, None))
    return dropout(x.astype(compute_dtype(cfg)), cfg.dropout, key)


def reshard_for_compute(weights, table):
    """Reshard the weights of one layer for the computation.

    Under FSDP (fully sharded data parallelism) the stored weights are split over the data
    axis too, and this is the all-gather. Without FSDP the two shardings are equal, and
    nothing happens. table: the layer's Params.
    """

    def reshard(p, w):
        axes = [axis for axis in p.axes if axis != "layers"]
        return jax.reshard(w, spec(axes))

    return jax.tree.map(reshard, table, weights, is_leaf=is_param)


def scan_layers(layer, x, weights, keys, cfg):
    """Apply the layers of a stack in sequence to activations [B, Q, D].

    layer: a function (weights, x, key) -> x. weights: a nested dict of arrays with a
    leading axis L. keys: L PRNG keys, or None for no dropout. lax.scan calls the function
    with one slice of these arrays after another. JAX therefore compiles the layer once,
    however deep the stack is.
    """

    def step(x, weights_and_key):
        weights, key = weights_and_key
        return layer(weights, x, key), None

    x, _ = lax.scan(step, x, (weights, keys))
    return x


def run_layers(layer, x, stack, params, cfg, key):
    """Apply all layers of a stack to activations [B, Q, D].

    layer: a function (weights, x, key) -> x. stack: "encoder" or "decoder". The weights
    of the layers are stacked, which means that each is one array with a leading axis L.
    """
    table = param_table(cfg)[stack]["layers"]
    depth = cfg.num_layers if stack == "encoder" else cfg.num_decoder_layers
    keys = None if key is None else jax.random.split(key, depth)
    # Cast before resharding, so that the all-gather of FSDP moves the smaller dtype.
    weights = jax.tree.map(lambda w: w.astype(x.dtype), params[stack]["layers"])

    def resharded_layer(weights, x, key):
        return layer(reshard_for_compute(weights, table), x, key)

    return scan_layers(resharded_layer, x, weights, keys, cfg)


def encode(params, cfg, inputs, segments, key=None):
    """Run the encoder on token ids [B, S]. Returns [B, S, D].

    segments [B, S]: the number of the packed example that a token belongs to, 0 for
    padding. key: the PRNG key of dropout, None for no dropout.
    """
    key_embed, key_layers, key_end = split_key(key, 3)
    S = inputs.shape[1]
    mask = attention_mask(segments, segments)
    shared_bias = relative_bias(params["encoder"], S, S, True, cfg)

    def layer(w, x, key):
        key_attention, key_mlp = split_key(key, 2)
        # Each sublayer is a residual block: x + sublayer(norm(x)).
        normalized = rms_norm(x, w["attention"]["norm"])
        kv = keys_values(w["attention"], normalized, cfg)
        bias = relative_bias(w["attention"], S, S, True, cfg, shared_bias)
        x += attention(w["attention"], normalized, kv, bias, mask, cfg, key_attention)
        return x + mlp(w["mlp"], rms_norm(x, w["mlp"]["norm"]), cfg, key_mlp)

    x = embed(params, inputs, cfg, key_embed)
    x = run_layers(layer, x, "encoder", params, cfg, key_layers)
    x = final_norm(x, params["encoder"])
    return dropout(x, cfg.dropout, key_end, shared_length=False)


def final_norm(x, stack):
    """Apply the norm at the end of a stack, which follows the last residual block."""
    scale = jax.reshard(stack["norm"], P())
    return rms_norm(x, scale.astype(x.dtype))


def decoder_layer(
    w,
    x,
    normalized,
    self_kv,
    bias,
    self_mask,
    cross_kv,
    cross_mask,
    cfg,
    key=None,
    core=None,
):
    """Apply one decoder layer to activations x [B, T, D].

    The layer has three residual blocks: self-attention, cross-attention to the encoder's
    output, and the feed-forward layer. normalized: x after rms_norm. self_kv and
    cross_kv: the keys and values of the two attentions. In decoding they come from a
    cache (infer.py), which is why the caller computes them. core: see `attention`.
    """
    key_self, key_cross, key_mlp = split_key(key, 3)
    w_self, w_cross, w_mlp = w["self_attention"], w["cross_attention"], w["mlp"]
    x += attention(w_self, normalized, self_kv, bias, self_mask, cfg, key_self, core)
    # Cross-attention has no position bias.
    normalized = rms_norm(x, w_cross["norm"])
    x += attention(w_cross, normalized, cross_kv, None, cross_mask, cfg, key_cross, core)
    return x + mlp(w_mlp, rms_norm(x, w_mlp["norm"]), cfg, key_mlp)


def decode(params, cfg, decoder_inputs, segments, encoded, input_segments, key=None):
    """Run the decoder on all target positions at once (teacher forcing).

    Returns [B, T, D]. decoder_inputs, segments [B, T]: the targets shifted right by one
    position, and the numbers of their packed examples. encoded [B, S, D]: the encoder's
    output. input_segments [B, S].
    """
    key_embed, key_layers, key_end = split_key(key, 3)
    T = decoder_inputs.shape[1]
    self_mask = attention_mask(segments, segments, causal=True)
    cross_mask = attention_mask(segments, input_segments)
    shared_bias = relative_bias(params["decoder"], T, T, False, cfg)

    def layer(w, x, key):
        normalized = rms_norm(x, w["self_attention"]["norm"])
        self_kv = keys_values(w["self_attention"], normalized, cfg)
        cross_kv = keys_values(w["cross_attention"], encoded, cfg)
        bias = relative_bias(w["self_attention"], T, T, False, cfg, shared_bias)
        return decoder_layer(
            w, x, normalized, self_kv, bias, self_mask, cross_kv, cross_mask, cfg, key
        )

    x = embed(params, decoder_inputs, cfg, key_embed)
    x = run_layers(layer, x, "decoder", params, cfg, key_layers)
    x = final_norm(x, params["decoder"])
    return dropout(x, cfg.dropout, key_end)


def output_logits(x, w):
    """Multiply the decoder's float32 output [B, T, D] by the output layer [D, V]."""
    return dense(x, w)


@jax.named_scope("logits and loss")
def unembed(params, cfg, x):
    """Compute the logits of all tokens of the vocabulary. Returns float32 [B, T, V].

    T5 1.0 ties the output layer to the embedding and scales the logits by 1 / sqrt(D).
    """
    x = x.astype(jnp.float32)
    if cfg.tied:
        table = jax.reshard(params["embed"], spec(("vocab", "embed")))
        return output_logits(x, table.T) * cfg.d_model**-0.5
    return output_logits(x, jax.reshard(params["unembed"], spec(("embed", "vocab"))))


def forward(params, batch, cfg, key=None):
    """Run encoder and decoder on a data.Batch. Returns float32 logits [B, T, V].

    cfg: a ModelConfig. key: the PRNG key of dropout, None for no dropout.
    """
    key_encoder, key_decoder = split_key(key, 2)
    encoded = encode(params, cfg, batch.inputs, batch.input_segments, key_encoder)
    x = decode(
        params,
        cfg,
        batch.decoder_inputs,
        batch.target_segments,
        encoded,
        batch.input_segments,
        key_decoder,
    )
    return unembed(params, cfg, x)


# ---- loss ------------------------------------------------------------------------------


def smoothed_target(label_smoothing, V):
    """Return the probabilities of label smoothing and their entropy in nats.

    Label smoothing gives the target the probability `on` = 1 - label_smoothing. The other
    V - 1 tokens share the rest, so that each of them has the probability `off`.
    """
    on = 1 - label_smoothing
    off = label_smoothing / (V - 1)
    entropy = -(on * math.log(on) + (V - 1) * off * math.log(off + 1e-20))
    return on, off, entropy


@jax.named_scope("logits and loss")
def cross_entropy(logits, targets, z_loss=0.0, label_smoothing=0.0):
    """Return the cross entropy, the z-loss and the correctness of each target.

    logits [B, T, V] float32, targets [B, T]. The three results have shape [B, T], and the
    losses are in nats. The cross entropy is log Z - logit[target],
    where Z = sum(exp(logits)). The z-loss, z_loss * (log Z)^2, keeps the logits from
    drifting. A target is correct when it has the largest logit. With label smoothing, the
    entropy of the smoothed target is subtracted, so that a perfect prediction has loss 0
    (t5x/losses.py).
    """
    V = logits.shape[-1]
    on, off, entropy = smoothed_target(label_smoothing, V)
    target = jax.nn.one_hot(targets, V)
    probabilities = on * target + off * (1 - target)
    log_z = jax.nn.logsumexp(logits, axis=-1)
    loss = log_z - jnp.sum(probabilities * logits, axis=-1) - entropy
    correct = jnp.argmax(logits, axis=-1) == targets
    return loss, z_loss * log_z**2, correct


def token_losses(params, batch, cfg, key=None):
    """Run the model of a Config on a batch, and return the results of cross_entropy."""
    logits = forward(params, batch, cfg.model, key)
    z_loss, label_smoothing = cfg.train.z_loss, cfg.train.label_smoothing
    return cross_entropy(logits, batch.targets, z_loss, label_smoothing)


def sum_over_tokens(losses, batch):
    """Sum the losses and the correct predictions over the target tokens of a batch.

    losses: the three results of token_losses. Segment 0 marks padding, which does not
    count. Returns a dict of float32 scalars: cross_ent_loss, z_loss, correct and tokens.
    """
    weight = (batch.target_segments > 0).astype(jnp.float32)
    cross_ent_loss, z_loss, correct = (jnp.sum(x * weight) for x in losses)
    return {
        "cross_ent_loss": cross_ent_loss,
        "z_loss": z_loss,
        "correct": correct,
        "tokens": jnp.sum(weight),
    }


def mean_metrics(sums):
    """Divide the results of sum_over_tokens by the number of tokens.

    The losses are then in nats per token, and the accuracy is between 0 and 1.
    """
    tokens = jnp.maximum(sums["tokens"], 1)
    return {
        "loss": (sums["cross_ent_loss"] + sums["z_loss"]) / tokens,
        "cross_ent_loss": sums["cross_ent_loss"] / tokens,
        "z_loss": sums["z_loss"] / tokens,
        "accuracy": sums["correct"] / tokens,
    }


def loss_fn(params, batch, cfg, key=None):
    """Return the sum of the loss over the target tokens of a batch, and its parts.

    The loss is cross entropy plus z-loss in nats. The parts are the results of
    sum_over_tokens. The caller divides the loss by the number of tokens to get a mean.
    cfg: a Config. key: the PRNG key of dropout, or None for no dropout.
    """
    sums = sum_over_tokens(token_losses(params, batch, cfg, key), batch)
    return sums["cross_ent_loss"] + sums["z_loss"], sums


# ====== below: what the compiler is told, sizes, the command ============================


# ---- what the compiler is told: changes speed and memory, not results ------------------
# Each function in this section replaces the function of the same name above. A comment
# says what the replacement does, for which compiler, and what it gained when it was
# measured. Numbers of cycles are estimates by the TPU compiler for one training step of
# T5 1.1 small on v5e:2x4 with batch 256, unless the comment names another size or chip.
# Without any of the replacements this step takes 170.9 M cycles and 9.1 GB. With all of
# them the step takes 78.4 M cycles and 2.8 GB. On a CPU, the replacements save a quarter
# of the time of a step.

# The environment variable PLAIN_T5_TUNED=0 turns every replacement off. Whoever changes
# an equation changes it with this setting first, and changes its replacement afterwards.
# The command `pytest -k tuned` compares the equations with the replacements.
TUNED = os.environ.get("PLAIN_T5_TUNED", "1") != "0"


def tuned(plain):
    """Replace the function `plain` by the decorated function, if TUNED is true."""

    def decorate(fast):
        # Each call decides between the two functions when JAX traces the call.
        @functools.wraps(fast)
        def plain_or_tuned(*args, **kwargs):
            return (fast if TUNED else plain)(*args, **kwargs)

        return plain_or_tuned

    return decorate


# Dense layers. The shapes of a matmul decide how fast XLA computes its gradient.
# - On a CPU, merge batch and length into one axis before the matmul. The weight gradient
#   is then a product of two matrices. A sum over two axes takes 1.4 times as long.
# - On a GPU or TPU, keep the three axes, and compute the weight gradient as [D, F], the
#   axis order of the stored weights. Merging the axes makes a TPU copy the activations.
#   The step of small took 139 M cycles without these copies and 214 M cycles with them.


@tuned(dense)
def dense(x, w):
    """Multiply activations by a weight matrix in the fastest way for the platform."""
    if partition.platform() == "cpu":
        return merged_dense(x, w)
    return batched_dense(x, w)


def merged_dense(x, w):
    """Merge batch and length, and multiply two matrices [B * Q, D] and [D, F]."""
    rows, columns = sharding_of(x)[0], sharding_of(w)[1]
    x_matrix = x.reshape(-1, x.shape[-1])
    y = jnp.einsum("nd,df->nf", x_matrix, w, out_sharding=P(rows, columns))
    return y.reshape(*x.shape[:-1], w.shape[1], out_sharding=P(rows, None, columns))


@jax.custom_gradient
def batched_dense(x, w):
    """Multiply activations by a weight matrix, and define both gradients explicitly."""

    def gradient(d_y):
        d_x = jnp.einsum("bqf,df->bqd", d_y, w, out_sharding=sharding_of(x))
        d_w = jnp.einsum("bqd,bqf->df", x, d_y, out_sharding=sharding_of(w))
        return d_x, d_w

    rows, columns = sharding_of(x)[0], sharding_of(w)[1]
    y = jnp.einsum("bqd,df->bqf", x, w, out_sharding=P(rows, None, columns))
    return y, gradient


# Gated unit. Two matmuls of the backward pass read the gradients of `gate` and `up`, and
# XLA would recompute these gradients in both. An optimization barrier makes XLA write the
# gradients to memory once. On a TPU, the barriers here and at the logits reduced the step
# from 86 M to 78 M cycles.


@tuned(gated_unit)
def gated_unit(gate, up, activation):
    """Compute a gated unit whose gradients XLA computes once."""
    gate, up = lax.optimization_barrier((gate, up))
    return activation(gate) * up


# Logits. XLA would compute the gradient of the output layer at the end of the backward
# pass, and keep the logits in memory until then. A barrier makes XLA compute this
# gradient together with the gradient of the decoder's output, so that the logits can be
# freed. The barrier saves 0.24 GB for small.


@tuned(output_logits)
def output_logits(x, w):
    """Compute the logits so that XLA can free them early in the backward pass."""
    return dense(*lax.optimization_barrier((x, w)))


# Position bias, on every platform.
# - A matmul with one-hot vectors replaces the lookup in the table. The gradient of a
#   lookup is a scatter-add, which is slow. The gain of this matmul was not measured by
#   itself.
# - Each data shard uses a copy of the table. A device first adds up the gradients of all
#   layers for this copy, and one all-reduce over the devices follows. Without the copies,
#   every layer would need an all-reduce.


@tuned(bias_of_buckets)
def bias_of_buckets(table, bucket):
    """Return the bias of each bucket for each of N data shards, [N, H, Q, K]."""
    one_hot = jax.nn.one_hot(bucket, table.shape[1], axis=0, dtype=jnp.float32)
    data_shards = jax.sharding.get_abstract_mesh().shape["data"]
    ones = jnp.ones((data_shards, 1, 1), out_sharding=P("data"))
    return jnp.einsum("nhr,rqk->nhqk", ones * table, one_hot)


# Attention. The function fused_attention has an explicit gradient, and uses these ideas:
# - The softmax is normalized after the matmul with the values, as in FlashAttention. A
#   column of ones beside the values yields the softmax denominator in the same matmul.
#   This reduced the step from 139 M to 125 M cycles.
# - The probabilities are not stored. The backward pass recomputes the probabilities from
#   the scores and the logarithm of the softmax denominator, as FlashAttention does (Rabe
#   and Staats 2021, Dao et al. 2022).
# - On v5e and v6e, attention processes groups of heads in sequence, so that the scores of
#   one group fit into fast on-chip memory. This reduced the step of base on v5e from 312
#   M to 281 M cycles.
# - On a TPU that processes all heads at once, the scores of self-attention are saved for
#   the backward pass. The scores of cross-attention are recomputed. On v5p, recomputing
#   these scores saved 5 % of the memory for 1 % more time.
# - shard_map makes each device compute the rows and heads that it holds. XLA then inserts
#   no communication into the attention.


@tuned(attend)
def attend(q, k, v, bias, mask):
    """Compute attention on each device for the rows and heads of this device."""
    return jax.shard_map(fused_attention, out_specs=sharding_of(v))(q, k, v, bias, mask)


@jax.custom_vjp
def fused_attention(q, k, v, bias, mask):
    """Compute attention, dividing by the softmax denominator as the last operation."""
    sums, _ = weighted_sums(masked_scores(q, k, bias, mask), v)
    return normalize(sums, v.dtype)


def masked_scores(q, k, bias, mask):
    """Compute the attention scores [B, H, Q, K]. The score of a masked key is -1e10.

    The scores are rounded to the dtype of q. The matmul sums in float32. On a GPU its
    result is rounded before the bias is added: a GPU writes the scores to memory, and
    this way it writes them once, in 16 bits.
    """
    dtype = q.dtype if partition.platform() == "gpu" else jnp.float32
    scores = jnp.einsum("bhqc,bhkc->bhqk", q, k, preferred_element_type=dtype)
    if bias is not None:
        scores = scores + bias
    return jnp.where(mask, scores, -1e10).astype(q.dtype)


def weighted_sums(scores, v):
    """Compute the numerator and the denominator of softmax attention.

    The numerator is the sum of the values with the weights exp(score - maximum). The
    denominator is the sum of the weights.

    Returns float32 [B, H, Q, C + 1], whose last channel is the sum of the weights (the
    denominator of the softmax), and the maximum of each row of scores, [B, H, Q, 1].
    """
    maximum = scores.max(-1, keepdims=True).astype(jnp.float32)
    weights = jnp.exp(scores - maximum).astype(v.dtype)
    ones = jnp.ones((*v.shape[:-1], 1), v.dtype)
    values_and_ones = jnp.concatenate([v, ones], -1)
    sums = jnp.einsum(
        "bhqk,bhkc->bhqc", weights, values_and_ones, preferred_element_type=jnp.float32
    )
    return sums, maximum


def normalize(sums, dtype):
    """Divide the numerator of softmax attention by the denominator (the last channel)."""
    return (sums[..., :-1] / sums[..., -1:]).astype(dtype)


def fused_attention_forward(q, k, v, bias, mask):
    """Return the result of attention and the arrays that the backward pass needs.

    checkpoint_name marks the arrays that rematerialization may save. Each array is marked
    after its last use here, because XLA would copy a marked array at every later use.
    """
    n = count_head_groups(q, k)
    q_groups, k_groups, v_groups = (split_heads_into(n, x) for x in (q, k, v))
    bias_groups = split_heads_into(n, bias)
    if n > 1 and bias is not None:
        # Store the bias in the memory layout of the scores. Otherwise every layer would
        # transpose the bias.
        layout = Layout((0, 1, 3, 2))
        bias_groups = [with_layout_constraint(x, layout) for x in bias_groups]

    def group_sums(q, k, v, bias):
        return weighted_sums(masked_scores(q, k, bias, mask), v)

    groups = [*zip(q_groups, k_groups, v_groups, bias_groups)]
    sums, maximum = run_in_sequence(group_sums, groups)
    out = checkpoint_name(normalize(sums, v.dtype), "attended")
    # log_z is the logarithm of the softmax denominator. The probability of a key is
    # exp(score - log_z).
    log_z = checkpoint_name(maximum + jnp.log(sums[..., -1:]), "attended")
    saves_scores = n == 1 and bias is not None and partition.platform() == "tpu"
    # XLA merges this second computation of the scores with the first.
    scores = masked_scores(q, k, bias, mask) if saves_scores else None
    inputs = (q_groups, k, v, bias_groups, scores)
    inputs = jax.tree.map(lambda x: checkpoint_name(x, "attention inputs"), inputs)
    return out, (inputs, mask, out, log_z)


def fused_attention_backward(saved, d_out):
    """Return the gradients of q, k, v, bias and mask. The gradient of the mask is
    None."""
    (q_groups, k, v, bias_groups, scores), mask, out, log_z = saved
    n = len(q_groups)
    others = [split_heads_into(n, x) for x in (k, v, out, log_z, d_out)]

    def group_gradients(*group):
        return head_group_gradients(*group, mask, scores)

    groups = [*zip(q_groups, *others, bias_groups)]
    return (*run_in_sequence(group_gradients, groups), None)


def head_group_gradients(q, k, v, out, log_z, d_out, bias, mask, scores):
    """Compute the gradients of attention for one group of heads, as FlashAttention does.

    With P the probabilities and dP = d_out v^T, the gradient of the scores is P * (dP -
    rowsum(d_out * out)). Returns d_q, d_k, d_v and d_bias (None without a bias).
    """
    if scores is None:
        scores = masked_scores(q, k, bias, mask)
    p = jnp.exp(scores - log_z)
    d_p = jnp.einsum("bhqc,bhkc->bhqk", d_out, v, preferred_element_type=jnp.float32)
    row_sum = jnp.einsum("bhqc,bhqc->bhq", d_out, out, preferred_element_type=jnp.float32)
    d_scores = (p * (d_p - row_sum[..., None])).astype(v.dtype)
    d_q = jnp.einsum("bhqk,bhkc->bhqc", d_scores, k)
    d_k = jnp.einsum("bhqk,bhqc->bhkc", d_scores, q)
    d_v = jnp.einsum("bhqk,bhqc->bhkc", p.astype(v.dtype), d_out)
    if bias is None:
        return d_q, d_k, d_v, None
    if partition.platform() == "cpu":
        # Sum over the batch by a matmul with ones, which is forty times as fast on a CPU.
        ones = jnp.ones((1, len(q)), v.dtype)
        form = "ab,bhqk->ahqk"
        d_bias = jnp.einsum(form, ones, d_scores, preferred_element_type=jnp.float32)
    else:
        d_bias = d_scores.astype(jnp.float32).sum(0, keepdims=True)
    return d_q, d_k, d_v, d_bias


fused_attention.defvjp(fused_attention_forward, fused_attention_backward)


def count_head_groups(q, k):
    """Return the number of groups into which the heads are divided.

    On v5e and v6e the scores of one group take at most 48 MB, which fits into fast
    memory. Other chips compute all heads at once.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if "lite" not in device.device_kind:  # "TPU v5 lite" is v5e, "TPU v6 lite" is v6e
        return 1
    B, H, Q, _ = q.shape
    score_bytes = B * H * Q * k.shape[2] * q.dtype.itemsize
    divisors = [n for n in range(1, H) if H % n == 0]
    return next((n for n in divisors if score_bytes <= n * 48e6), H)


def split_heads_into(n, x):
    """Split the heads of an array [B, H, ...] into n groups. Returns n arrays."""
    if x is None:
        return [None] * n
    return jnp.split(x, n, axis=1)


def run_in_sequence(function, groups):
    """Process the groups of heads in sequence, and join their results along the heads.

    Without a barrier, XLA would interleave the groups, and the scores of all groups would
    be in memory at the same time. All results are written into one large array, which
    avoids the copies of a concatenation.
    """
    n = len(groups)
    if n == 1:
        return function(*groups[0])
    joined = None
    for i, (first, *others) in enumerate(groups):
        if joined is not None:
            first, joined = lax.optimization_barrier((first, joined))
        results = function(first, *others)
        if joined is None:
            joined = jax.tree.map(
                lambda x: lax.empty((x.shape[0], n * x.shape[1], *x.shape[2:]), x.dtype),
                results,
            )
        joined = jax.tree.map(
            lambda whole, x: lax.dynamic_update_slice_in_dim(whole, x, i * x.shape[1], 1),
            joined,
            results,
        )
    return joined


# Layers.
# - Rematerialization (jax.checkpoint): the backward pass recomputes activations that were
#   not saved. The function remat_policy says which activations are saved, on every
#   platform.
# - Unrolling: on GPUs and TPUs, up to size large, the scan becomes a sequence of layers.
#   The program then copies no slices in and out of stacked arrays. This reduced the step
#   from 125 M to 95 M cycles.
# - Forward and backward pass share one slice of the stacked weights, which is taken
#   before a barrier. XLA would otherwise keep a second copy of the weights of all layers.
#   This reduced the step of base from 240 M to 236 M cycles.
# - All layers are cast to the compute dtype at once, before the scan. Slices and
#   all-gathers then move half of the bytes. Casting each layer by itself made the step of
#   large on v5p 3 % slower.


def remat_policy(remat):
    """Return the jax.checkpoint policy for a value of --model.remat.

    The policy decides which intermediate results are saved for the backward pass. "dots"
    saves the outputs of all matmuls with weights, because these matmuls take most of the
    time. "dots" also saves the arrays that attention marks. The attention scores take
    most of the memory and are recomputed. "full" saves nothing but the outputs of
    attention. "none" saves everything except resharded weights.
    """
    policies = jax.checkpoint_policies
    named = policies.save_only_these_names
    if remat == "full":
        return named("attended")
    if remat == "dots":
        matmuls = policies.dots_with_no_batch_dims_saveable
        return policies.save_from_both_policies(
            matmuls, named("attended", "attention inputs")
        )
    return lambda primitive, *_, **__: primitive.name != "reshard"


@tuned(scan_layers)
def scan_layers(layer, x, weights, keys, cfg):
    """Apply rematerialized layers in sequence, and unroll the loop where that is
    faster."""
    depth = len(weights["mlp"]["norm"])
    unroll = partition.platform() != "cpu" and depth <= 24 and cfg.d_model <= 1024
    # Common-subexpression elimination (CSE) in XLA would undo the rematerialization of
    # unrolled layers, and prevent_cse avoids this. In a loop there is nothing to undo.
    # Weights are exempt, because they are stored anyway. Only weights from an all-gather
    # are not stored.
    needs_all_gather = "data" in sharding_of(weights["mlp"]["up"])
    prevent_cse = unroll
    if cfg.remat != "full" and not needs_all_gather:
        prevent_cse = (False, unroll, False)
    policy = remat_policy(cfg.remat)
    rematerialized = jax.checkpoint(layer, policy=policy, prevent_cse=prevent_cse)

    def step(x, weights_and_key):
        weights, key = weights_and_key
        if unroll:
            weights = lax.optimization_barrier(weights)
        return rematerialized(weights, x, key), None

    x, _ = lax.scan(step, x, (weights, keys), unroll=unroll)
    return x


# Loss. On every platform, comparing column numbers selects the logit of each target. A
# lookup of this logit would have a slow gradient (a scatter-add). On a CPU, the loss
# would take 1.2 times as long. With comparisons, XLA reads the logits only once for all
# sums. Devices that split the vocabulary exchange sums of shape [B, T], but no logits.


@tuned(cross_entropy)
@jax.named_scope("logits and loss")
def cross_entropy(logits, targets, z_loss=0.0, label_smoothing=0.0):
    """Compute the losses in one pass over the logits."""
    shardings = (P("data", None, "model"), P("data", None))
    logits, targets = jax.reshard((logits, targets), shardings)
    on, off, entropy = smoothed_target(label_smoothing, logits.shape[-1])
    largest = lax.stop_gradient(logits.max(-1))
    log_z = largest + jnp.log(jnp.exp(logits - largest[..., None]).sum(-1))
    column = lax.broadcasted_iota(
        jnp.int32, logits.shape, 2, out_sharding=sharding_of(logits)
    )
    target = targets[..., None]
    target_logit = jnp.where(column == target, logits, 0).sum(-1)
    # Of several equal logits, argmax takes the first.
    is_earlier_maximum = (column < target) & (logits == largest[..., None])
    earlier_maxima = jnp.where(is_earlier_maximum, 1.0, 0.0).sum(-1)
    correct = (target_logit == largest) & (earlier_maxima == 0)
    expected = target_logit
    if label_smoothing:
        expected = (on - off) * target_logit + off * logits.sum(-1)
    return log_z - expected - entropy, z_loss * log_z**2, correct


# ---- sizes -----------------------------------------------------------------------------


def count_params(table):
    """Count the parameters that a nested dict of Params declares."""
    return sum(math.prod(p.shape) for p in jax.tree.leaves(table, is_leaf=is_param))


def train_flops(cfg, S, T):
    """Return the floating-point operations to train on one example.

    The example has S input and T target tokens. A multiply-add counts as two operations.
    Every matmul counts once in the forward pass and twice in the backward pass.
    Recomputed activations do not count.
    """
    D, F, A = cfg.d_model, cfg.d_ff, cfg.num_heads * cfg.d_kv
    mlp_matrices = 3 if cfg.activation.startswith("gated_") else 2
    # Multiply-adds of one encoder layer: projections and MLP, then scores and weighted
    # values.
    encoder = S * (4 * D * A + mlp_matrices * D * F) + 2 * S * S * A
    # A decoder layer also projects the encoder's output to keys and values, S * 2 * D *
    # A.
    decoder = T * (6 * D * A + mlp_matrices * D * F) + S * 2 * D * A
    decoder += 2 * T * T * A + 2 * T * S * A
    logits = T * D * cfg.vocab_size
    multiply_adds = cfg.num_layers * encoder + cfg.num_decoder_layers * decoder + logits
    return 3 * 2 * multiply_adds


def minimum_memory(cfg, rows, S, T, copies=1, beams=0):
    """Estimate the smallest memory that a batch can need, in bytes.

    Returns a dict from the name of a part to its bytes.

    rows: the rows of the batch, of S input and T target tokens. copies: the number of
    float32 copies of the parameters. beams: the beams of cached decoding, 0 for a forward
    pass over all positions.
    """
    size = compute_dtype(cfg).itemsize
    A = cfg.num_heads * cfg.d_kv
    largest_scores = S * S if beams else max(S * S, S * T, T * T)
    cache = 0
    if beams:
        cache = 2 * size * rows * cfg.num_decoder_layers * A * (S + beams * T)
    # The bias of every head, its one-hot matrix, and the four arrays that compute the
    # buckets.
    bias_arrays = cfg.num_heads + cfg.relative_buckets + 4
    return {
        "parameters": 4 * copies * count_params(param_table(cfg)),
        "attention scores of a layer": size * rows * cfg.num_heads * largest_scores,
        "position biases": 4 * bias_arrays * max(S, T) ** 2,
        "a layer's activations": size * rows * S * max(cfg.d_ff, cfg.d_model),
        "cached keys and values": cache,
        "logits": 4 * rows * (beams or T) * cfg.vocab_size,
    }


def describe_model(cfg):
    """Describe a model in one line: its parameters and the FLOPs of one example."""
    table = param_table(cfg.model)
    S, T = cfg.data.inputs_length, cfg.data.targets_length
    parts = ", ".join(f"{name} {count_params(part):,}" for name, part in table.items())
    flops = train_flops(cfg.model, S, T) / 1e9
    return (
        f"{count_params(table):,} parameters ({parts}); {flops:.5g} GFLOP to train on "
        f"one example of {S} + {T} tokens"
    )


# ---- the command -----------------------------------------------------------------------


def main(argv):
    """Print the table of parameters of a recipe or of a run."""
    args, changes = parse_args(__doc__, argv)
    cfg = resolve(args, changes)
    table = param_table(cfg.model)
    print(f"{'parameter':44} {'shape':20} {'axes':22} {'initial':>24} {'number':>14}")
    for name, p in sorted(partition.flatten(table).items()):
        shape, axes = " x ".join(map(str, p.shape)), " ".join(p.axes)
        initial = f"{p.init} {p.scale:.4g}"
        print(f"{name:44} {shape:20} {axes:22} {initial:>24} {math.prod(p.shape):>14,}")
    print("\n" + describe_model(cfg))


if __name__ == "__main__":
    run_command(main)
