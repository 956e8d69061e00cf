"""T5 1.1 as pure functions: parameters, encoder, decoder, logits and loss.

A model consists of a ModelConfig and parameters. The ModelConfig holds the dimensions,
such as d_model=512. The parameters are a nested dict of float32 arrays. `forward`
computes the logits for a Batch of token ids. `loss_fn` computes the training loss.

    python model.py --config small_c4     print the shape and size of every parameter

The equations are those of Raffel et al. 2020 (arXiv:1910.10683), section 2.1, with the
changes of version 1.1: an MLP with gated GELU, an output layer of its own, and no dropout
in pretraining. The logits and the loss equal those of T5X
(t5x/examples/t5/network.py). assets/attention.svg shows the encoder and the decoder.

The shapes in comments and einsums use these letters:

    B batch       Q query position    K key position     S input length    T target length
    D d_model     H heads             C d_kv, the channels of one head     F d_ff
    V vocabulary  L layers            R buckets of relative positions

How to read `out_sharding` and `P(...)`: several devices form a mesh with the axes "data"
and "model". P("data", None, "model") splits axis 0 of an array over "data" and axis 2
over "model". A single device holds complete arrays, so you may skip these arguments at
the first reading. partition.py explains how each array is split.

The upper part of this file ends at a line of equals signs, and contains the equations of
T5. The lower part replaces some functions by versions that need less time and memory. The
results stay the same.

Example:
    >>> from configs import RECIPES
    >>> from model import count_params, param_table
    >>> table = param_table(RECIPES["small_c4"].model)
    >>> table["encoder"]["layers"]["attention"]["query"].shape    # layers, D, H * C
    (8, 512, 384)
    >>> count_params(table)
    76961152

`pytest -k lesson_model` runs the lessons about this file, which are in test_all.py.
"""

import contextlib
import contextvars
import functools
import math
import os
from typing import Callable, NamedTuple

# Importing configs also prepares the process for Ctrl-C and for UTF-8 texts. Do this
# before the slow import of JAX.
import configs

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import partition
from configs import parse_args, resolve, run_command
from partition import RULES, spec

# ---- parameters ------------------------------------------------------------------------


class Param(NamedTuple):
    """Describe one parameter: its shape, and how to shard and initialize it.

    Example: Param((512, 1024), ("embed", "mlp"), "normal", 0.04) is a weight matrix whose
    initial values have the standard deviation 0.04.
    """

    shape: tuple
    # The name of each dimension, such as ("embed", "mlp"). partition.RULES maps each name
    # to the mesh axis that splits the dimension. None means that nothing is split.
    axes: tuple
    # The distribution of the initial values: "normal", "truncated_normal", "uniform", or
    # "ones", which sets all values to 1.
    init: str = "ones"
    # The standard deviation of the initial values. For "uniform", the initial values lie
    # between -scale and scale.
    scale: float = 1.0


def param_table(cfg):
    """List all parameters of a ModelConfig as a nested dict of Params.

    For example, table["embed"] is the Param of the embedding matrix [V, D]. The code for
    initialization, sharding, checkpoints and conversion reads this table.
    """
    D, F, V = cfg.d_model, cfg.d_ff, cfg.vocab_size
    H, C = cfg.num_heads, cfg.d_kv

    norm = Param((D,), ("embed",))
    bias = POSITIONS[cfg.positions].params(cfg)

    # In T5, all layers of the encoder share one table of relative position biases, and
    # so do all layers of the decoder. In UMT5, each layer has a table of its own.
    stack_bias, layer_bias = ({}, bias) if cfg.layer_biases else (bias, {})

    lora = {}
    if cfg.lora:
        a = Param((D, cfg.lora), ("embed", "rank"), "normal", D**-0.5)
        # All elements of b begin with 0, so that LoRA changes nothing at first.
        b = Param((cfg.lora, H * C), ("rank", "heads"), "normal", 0.0)
        lora = {"query_lora_a": a, "query_lora_b": b}
        lora |= {"value_lora_a": a, "value_lora_b": b}

    def attention(bias):
        # The weights of all heads are stored as one matrix, and not as an array with
        # three axes. This matters for the optimizer Adafactor. For each matrix, Adafactor
        # stores only the row means and the column means of the squared gradient.
        return {
            "norm": norm,
            # The scale of the initial values contains the factor 1 / sqrt(C). T5
            # therefore does not divide the attention scores by sqrt(C).
            "query": Param((D, H * C), ("embed", "heads"), "normal", (D * C) ** -0.5),
            "key": Param((D, H * C), ("embed", "heads"), "normal", D**-0.5),
            "value": Param((D, H * C), ("embed", "heads"), "normal", D**-0.5),
            "out": Param((H * C, D), ("heads", "embed"), "normal", (H * C) ** -0.5),
            **bias,
            **lora,
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
        """List the parameters of the encoder or the decoder as a nested dict of Params.

        The weights of all layers are stacked in one array with a new first axis. With 8
        layers, the shape (512, 384) becomes (8, 512, 384).
        """

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
        # In T5 1.0 the output layer uses the embedding matrix. T5 1.1 has an output
        # matrix of its own.
        if not cfg.tied:
            scale = D**-0.5
            table["unembed"] = Param(
                (D, V), ("embed", "vocab"), "truncated_normal", scale
            )
    return table


def is_param(x):
    """Return whether x is a Param. Calls of jax.tree.map pass this function as `is_leaf`.

    A Param is a tuple. Without is_leaf, jax.tree.map would visit each field of the tuple.
    """
    return isinstance(x, Param)


def init_params(cfg, key, rules=RULES):
    """Sample the initial parameters, as a nested dict of float32 arrays.

    The same PRNG key gives the same values on any number of devices. The distribution
    "truncated_normal" is cut at two standard deviations. The samples are then scaled, so
    that their standard deviation is the `scale` of the Param.

    rules: how to shard the parameters over the mesh. partition.STORAGE_RULES splits them
    over the mesh axis "data" too (fully sharded data parallelism). partition.RULES does
    not.
    """

    def sample(p, key):
        # The function spec returns the mesh axis that splits each dimension. For example,
        # ("embed", "mlp") becomes P(None, "model").
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
        # A standard normal distribution, truncated at -2 and 2, has the standard
        # deviation 0.88. Divide by 0.88 to get samples of standard deviation p.scale.
        truncated_std = 0.87962566103423978
        x = jax.random.truncated_normal(key, -2, 2, shape, out_sharding=sharding)
        return p.scale / truncated_std * x

    table, structure = jax.tree.flatten(param_table(cfg), is_leaf=is_param)
    keys = jax.random.split(key, len(table))
    return jax.tree.unflatten(structure, map(sample, table, keys))


# ---- building blocks -------------------------------------------------------------------

# The option --model.activation chooses one of these activation functions by name. A
# recipe file (a Python file of the user) can add functions. Like T5X, jax.nn.gelu
# computes the tanh approximation of GELU.
ACTIVATIONS = configs.ACTIVATIONS
ACTIVATIONS |= {"relu": jax.nn.relu, "gelu": jax.nn.gelu, "silu": jax.nn.silu}


def compute_dtype(cfg):
    """Return the dtype of activations and matmuls, such as bfloat16.

    Parameters, softmax, logits, loss and the statistics of the norms are always float32.
    """
    dtype = cfg.dtype
    if dtype == "auto":
        dtype = partition.default_compute_dtype()
    return jnp.dtype(dtype)


def sharding_of(x):
    """Return the PartitionSpec of an array, such as P("data", None, "model").

    A PartitionSpec names the mesh axis that splits each dimension of the array. None
    means that the dimension is not split.
    """
    return jax.typeof(x).sharding.spec


def dense(x, w):
    """Multiply activations [B, Q, D] by a weight matrix [D, F]. Returns [B, Q, F].

    If D is split over several devices, each device computes a partial sum.
    `out_sharding` tells JAX to add the partial sums with an all-reduce.
    """
    rows, columns = sharding_of(x)[0], sharding_of(w)[1]
    return jnp.einsum("bqd,df->bqf", x, w, out_sharding=P(rows, None, columns))


# In a profile and in --plan, the operations of this function get the label "norm".
@jax.named_scope("norm")
def rms_norm(x, scale):
    """Divide each vector by its root mean square, and multiply by a learned scale [D].

    RMSNorm is a layer norm without mean and bias (Zhang and Sennrich 2019). The number
    1e-6 is added to the mean square, so that a vector of zeros does not divide by 0.
    """
    x32 = x.astype(jnp.float32)
    mean_square = jnp.mean(x32 * x32, axis=-1, keepdims=True)
    y = x32 * lax.rsqrt(mean_square + 1e-6)
    return y.astype(x.dtype) * scale


def dropout_mask(key, rate, shape, sharding, dtype):
    """Sample a random dropout mask. The caller multiplies its activations by this mask.

    At rate 0.1, about a tenth of the entries are 0, and all others are 1 / 0.9. The
    activations therefore keep their expected value.
    """
    keep = jax.random.bernoulli(key, 1 - rate, shape, out_sharding=sharding)
    return keep.astype(dtype) / (1 - rate)


def dropout(x, rate, key, shared_length=True):
    """Apply dropout to activations [B, Q, D]. Without a PRNG key, return x unchanged.

    T5 drops the same channels at all positions of a row, with a mask of shape [B, 1, D].
    With shared_length=False, each position has its own mask. T5 does this only at the
    end of the encoder.
    """
    if key is None or rate == 0:
        return x
    B, Q, D = x.shape
    mask_length = 1 if shared_length else Q
    return x * dropout_mask(key, rate, (B, mask_length, D), sharding_of(x), x.dtype)


def split_key(key, n):
    """Split a PRNG key into n keys. If the key is None, return a tuple of n Nones.

    A key of None means that no dropout is applied.
    """
    if key is None:
        return (None,) * n
    return jax.random.split(key, n)


# ---- attention -------------------------------------------------------------------------


def relative_bucket(distance, bidirectional, cfg):
    """Map each relative position, key minus query, to one of the 32 buckets of T5.

    T5 learns one position bias for each bucket. Each small distance has a bucket of its
    own, and the larger distances share buckets. For example, in the encoder
    (bidirectional), the relative positions -1, 0, 1 and 200 belong to the buckets 1, 0,
    17 and 31.

    In the encoder, keys up to the query use buckets 0 to 15, and later keys use buckets
    17 to 31. Bucket 16 is never used, because it would be for a later key at the distance
    0. The distances 0 to 7 have a bucket of their own in each direction. The buckets of
    larger distances have equal widths on a logarithmic scale. This scale ends at
    relative_max_distance, which is 128 in T5. The number of the bucket is rounded down,
    so the last bucket begins at the distance 91. The last bucket also takes all distances
    above 128.

    In the decoder, all 32 buckets are for keys up to the query. The distances below 16
    have a bucket of their own, and the last bucket begins at 113. Later keys are masked,
    and get bucket 0. assets/buckets.svg shows the buckets of both directions.

    distance: NumPy array of any shape. Returns an integer array of the same shape.
    """
    buckets = cfg.relative_buckets
    first_bucket = 0
    if bidirectional:
        buckets //= 2
        first_bucket = (distance > 0) * buckets
        distance = np.abs(distance)
    else:
        distance = np.maximum(-distance, 0)
    # Each bucket in the first half is for a single distance: 0, 1, 2 and so on.
    exact = buckets // 2
    # The buckets of the second half share the larger distances. The number of a bucket
    # grows with the logarithm of the distance. Like T5X, compute in float32 and add a
    # small epsilon. With other rounding, some distances would be in the next bucket.
    position = np.log(np.float32(distance) / exact + np.finfo(np.float32).eps)
    position = position / np.log(cfg.relative_max_distance / exact) * (buckets - exact)
    logarithmic = np.minimum(exact + position.astype(np.int32), buckets - 1)
    return first_bucket + np.where(distance < exact, distance, logarithmic)


def bias_of_buckets(table, bucket):
    """Look up the learned position bias of each head for each pair of query and key.

    `table` [H, R] has one number for each head and bucket. `bucket` [Q, K] has the bucket
    of each pair. Returns [1, H, Q, K].
    """
    return table[None, :, bucket]


def relative_bias_params(cfg):
    """Describe T5's table of position biases [H, R], as a dict with one Param.

    The table has one bias for each of the H heads and each of the R distance buckets.
    """
    H, R = cfg.num_heads, cfg.relative_buckets
    scale = (6 / (H + R)) ** 0.5
    return {"relative_bias": Param((H, R), ("heads", "buckets"), "uniform", scale)}


def relative_bias(w, Q, K, bidirectional, cfg, shared=None):
    """Return the relative position bias [1, H, Q, K] of all pairs of query and key.

    T5 has no position embeddings. Instead, each head learns a bias for each distance
    between query and key. The bias is added to the attention score of the pair.

    w: the weights of the encoder, of the decoder or of one layer.
    shared: the bias to return if w contains no bias table.

    This function is called once with the weights of the encoder or decoder, and then in
    each layer with the weights of the layer and with the first result as `shared`. In T5,
    the encoder and the decoder have one table each, so each layer returns `shared`. In
    UMT5, each layer has its own table.
    """
    if "relative_bias" not in w:
        return shared
    distance = np.arange(K) - np.arange(Q)[:, None]
    bucket = relative_bucket(distance, bidirectional, cfg)
    return bias_of_buckets(w["relative_bias"], bucket)


def alibi_bias(w, Q, K, bidirectional, cfg, shared=None):
    """Return the position bias of ALiBi, [1, H, Q, K] (Press et al. 2022).

    The bias is -slope * distance, and is not learned. Head h = 1, 2, ..., H has the slope
    2^(-8 h / H). With two heads, the slopes are 1/16 and 1/256. In the encoder, a key
    before the query and a key after the query have the same bias at the same distance.

    The arguments are those of relative_bias. ALiBi has no weights, so all layers use the
    same bias `shared`.
    """
    if shared is not None:
        return shared
    distance = np.abs(np.arange(K) - np.arange(Q)[:, None])
    H = cfg.num_heads
    slopes = 2.0 ** (-8 * np.arange(1, H + 1) / H)
    bias = -jnp.float32(slopes)[None, :, None, None] * jnp.float32(distance)
    return jax.reshard(bias, P(None, "model"))


def rotary(x, positions):
    """Rotate pairs of channels by angles that grow with the position (RoPE).

    Channel i and channel i + C/2 are the coordinates of a point in a plane. At position
    p, this point is rotated by the angle p * 10000^(-2 i / C). The dot product of a
    rotated query and a rotated key depends only on the difference of their positions
    (Su et al. 2021).

    x: queries or keys [B, H, Q, C]. positions [Q]. Returns an array like x.
    """
    C = x.shape[-1]
    frequencies = 10_000 ** (-np.arange(0, C, 2) / C)
    angles = jnp.float32(positions)[:, None] * jnp.float32(frequencies)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
    return rotated.astype(x.dtype)


class PositionEncoding(NamedTuple):
    """Define how self-attention uses the positions of queries and keys.

    The encoding of T5, for example, adds a learned bias to each attention score. The
    effect on a score may depend only on the distance between query and key. Examples that
    are packed into one row then need no special treatment, although positions are counted
    from the start of the row. The distances within an example are the same at any place
    in the row. Cross-attention uses no positions.
    """

    # A function that takes a ModelConfig, and returns a dict with the Param of each
    # weight of the position encoding.
    params: Callable = lambda cfg: {}
    # A function that returns a bias for the attention scores, or None. Its arguments are
    # those of relative_bias. The bias has the shape [1, H, Q, K], and the mesh axis
    # "model" splits the heads H.
    bias: Callable = lambda w, Q, K, bidirectional, cfg, shared: None
    # A function that rotates queries or keys, as in RoPE. The arguments are queries or
    # keys x [B, H, Q, C] and their positions [Q]. The default function returns x
    # unchanged.
    rotate: Callable = lambda x, positions: x


# The option --model.positions chooses one of these position encodings by name. A recipe
# file (a Python file of the user) can add encodings.
POSITIONS = configs.POSITIONS
POSITIONS |= {
    "t5_bias": PositionEncoding(params=relative_bias_params, bias=relative_bias),
    "none": PositionEncoding(),
    "alibi": PositionEncoding(bias=alibi_bias),
    "rotary": PositionEncoding(rotate=rotary),
}


@jax.named_scope("attention")
def position_bias(w, Q, K, bidirectional, cfg, shared=None):
    """Return the bias of the position encoding that --model.positions selects.

    The result is None if the encoding, such as "rotary", adds no bias to the attention
    scores. The arguments are those of relative_bias.
    """
    return POSITIONS[cfg.positions].bias(w, Q, K, bidirectional, cfg, shared)


def rotate(x, positions, cfg):
    """Rotate queries or keys [B, H, Q, C] if --model.positions selects a rotary encoding.

    With any other encoding, such as t5_bias, x is returned unchanged.

    positions [Q]: the positions of x, or None to return x unchanged, as in
    cross-attention.
    """
    if positions is None:
        return x
    return POSITIONS[cfg.positions].rotate(x, positions)


def attention_mask(query_segments, key_segments, causal=False):
    """Return a boolean mask [B, 1, Q, K] that is True where a query may attend to a key.

    A query attends only to keys of its own example. The segments number the examples of a
    row: [1, 1, 2, 0] means two tokens of example 1, one token of example 2, and padding.
    With `causal`, a query attends only to its own position and earlier positions.
    assets/packed.svg shows the masks of a packed row.

    query_segments [B, Q], key_segments [B, K].
    """
    seen = query_segments[:, None, :, None] == key_segments[:, None, None, :]
    if causal:
        Q, K = query_segments.shape[1], key_segments.shape[1]
        seen &= np.tri(Q, K, dtype=bool)
    return jax.reshard(seen, P("data"))


def split_heads(x, cfg):
    """Split activations into heads: [B, K, H*C] becomes [B, H, K, C]."""
    rows, _, heads = sharding_of(x)
    B, K, _ = x.shape
    sharding = P(rows, None, heads, None)
    x = x.reshape(B, K, cfg.num_heads, cfg.d_kv, out_sharding=sharding)
    return x.transpose(0, 2, 1, 3)


def join_heads(x):
    """Concatenate the heads at each position: [B, H, Q, C] becomes [B, Q, H*C]."""
    rows, heads, *_ = sharding_of(x)
    B, H, Q, C = x.shape
    x = x.transpose(0, 2, 1, 3)
    return x.reshape(B, Q, H * C, out_sharding=P(rows, None, heads))


@jax.named_scope("attention")
def keys_values(w, x, cfg, positions=None):
    """Project activations [B, K, D] to the keys and values of all heads.

    Returns a pair (keys, values). Both arrays have the shape [B, H, K, C].
    positions [K]: the positions of x in self-attention, and None in cross-attention.
    """
    k = split_heads(dense(x, w["key"]), cfg)
    v = split_heads(dense(x, w["value"]), cfg)
    return rotate(k, positions, cfg), v


def attend(q, k, v, bias, mask, form="auto"):
    """Compute attention for all heads, softmax(q k^T + bias) v. Returns [B, H, Q, C].

    The softmax is computed in float32. T5 does not divide the scores by sqrt(C), because
    the initial query weights contain the factor 1 / sqrt(C).

    q [B, H, Q, C], k and v [B, H, K, C]. bias [1, H, Q, K] or None.
    mask [B, 1, Q, K]: True where a query attends to a key. A query that attends to no key
    gets zeros.
    form: the value of --model.attention, which only the faster `attend` below uses.
    """
    scores = jnp.einsum("bhqc,bhkc->bhqk", q, k, preferred_element_type=jnp.float32)
    if bias is not None:
        scores = scores + bias
    scores = jnp.where(mask, scores, -1e10)
    # Without this line, a query that attends to no key would attend equally to all keys.
    probabilities = jnp.where(mask, jax.nn.softmax(scores), 0).astype(v.dtype)
    return jnp.einsum("bhqk,bhkc->bhqc", probabilities, v)


@jax.named_scope("attention")
def attention(w, x, kv, bias, mask, cfg, key=None, core=None, positions=None):
    """Compute multi-head attention and dropout, as in Vaswani et al. 2017.

    Each head computes softmax(q k^T + bias) v. The outputs of all heads are concatenated
    and multiplied by the output matrix. The result has the shape [B, Q, D].

    x: normalized activations [B, Q, D], which are projected to queries.
    kv: keys and values, from the same sequence or from the encoder.
    core: a function that replaces `attend`. infer.py uses this for decoding.
    positions [Q]: the positions of x in self-attention, and None in cross-attention.
    """
    key_probabilities, key_out = split_key(key, 2)
    q = rotate(split_heads(dense(x, w["query"]), cfg), positions, cfg)
    k, v = kv
    if key is not None and cfg.dropout:
        # Apply dropout to the attention probabilities. T5 drops a key for all queries of
        # a head at once. Setting the value vector of this key to zero has the same
        # effect, and needs a smaller random mask.
        mask_shape = (*v.shape[:-1], 1)
        v = v * dropout_mask(
            key_probabilities, cfg.dropout, mask_shape, sharding_of(v), v.dtype
        )
    core = core or functools.partial(attend, form=cfg.attention)
    heads = core(q, k, v, bias, mask)
    out = dense(join_heads(heads), w["out"])
    return dropout(out, cfg.dropout, key_out)


# ---- feed-forward layer ----------------------------------------------------------------


def gated_unit(gate, up, activation):
    """Return activation(gate) * up, a gated linear unit (GLU, Shazeer 2020)."""
    return activation(gate) * up


@jax.named_scope("mlp")
def mlp(w, x, cfg, key=None):
    """Apply the feed-forward layer to normalized activations [B, Q, D].

    T5 1.1 computes (gelu(x @ gate) * (x @ up)) @ down. T5 1.0 computes
    relu(x @ up) @ down. Dropout acts before and after the multiplication by `down`.
    """
    key_hidden, key_out = split_key(key, 2)
    activation = ACTIVATIONS[cfg.activation.removeprefix("gated_")]
    if "gate" in w:
        hidden = gated_unit(dense(x, w["gate"]), dense(x, w["up"]), activation)
    else:
        hidden = activation(dense(x, w["up"]))
    hidden = dropout(hidden, cfg.dropout, key_hidden)
    return dropout(dense(hidden, w["down"]), cfg.dropout, key_out)


# ---- auxiliary losses ------------------------------------------------------------------
# T5 has no auxiliary losses. In an experiment, a function of a layer may call add_loss to
# add an auxiliary loss. A mixture of experts, for example, needs a loss that balances the
# experts.

# The weight of each auxiliary loss in the training loss. With {"balance": 0.01}, training
# minimizes loss + 0.01 * balance, where the balance loss is summed over all layers.
LOSS_WEIGHTS = {}
# Inside of collect_losses, this variable holds a dict in which add_loss collects the
# auxiliary losses. Outside of collect_losses, the variable is None.
COLLECTED = contextvars.ContextVar("losses", default=None)


def add_loss(name, value):
    """Add an auxiliary loss, which is a float32 scalar, to the training loss.

    Each function that a layer calls may call add_loss, with two exceptions: functions
    inside of jax.shard_map, and functions with a hand-written gradient. Losses with the
    same name are added up. Evaluation and decoding ignore all auxiliary losses.

    The activations of a layer include those at padding, so a mean over all positions
    includes padding, too.
    """
    if name not in LOSS_WEIGHTS:
        raise configs.UserError(
            f"The auxiliary loss {name} has no weight: set model.LOSS_WEIGHTS[{name!r}] "
            f"in the recipe file, for example to 0.01."
        )
    losses = COLLECTED.get()
    if losses is not None:
        losses[name] = losses.get(name, 0.0) + value


@contextlib.contextmanager
def collect_losses():
    """Yield a dict of the auxiliary losses that are added inside of the `with` block.

    Each key is the name of a loss, such as "balance".
    """
    losses = {}
    outside = COLLECTED.set(losses)
    try:
        yield losses
    finally:
        COLLECTED.reset(outside)


# ---- encoder and decoder ---------------------------------------------------------------


@jax.named_scope("embedding")
def embed(params, ids, cfg, key):
    """Look up the embedding vector of each token id, and apply dropout.

    ids [B, Q]. Returns [B, Q, D]. T5 does not scale the embeddings.
    """
    # Look up the vectors in float32, and cast them afterwards. The gradient of an
    # embedding is a sum over all occurrences of the token. In bfloat16, this sum would
    # lose digits.
    table = jax.reshard(params["embed"], spec(("vocab", "embed")))
    x = table.at[ids].get(out_sharding=P("data", None, None))
    return dropout(x.astype(compute_dtype(cfg)), cfg.dropout, key)


def merge_lora(weights):
    """Add the LoRA matrices of one layer to its weight matrices.

    LoRA (Hu et al. 2021) fine-tunes a model with few new parameters. A weight matrix W
    [D, F] stays frozen, and training changes only two small matrices, A [D, R] and
    B [R, F]. The model computes with W + A B. The rank R is --model.lora.

    weights: a nested dict of arrays. The matrices of "query" are called "query_lora_a"
    and "query_lora_b". The result has no LoRA matrices.
    """
    arrays = partition.flatten(weights)
    for name, w in list(arrays.items()):
        if f"{name}_lora_a" in arrays:
            a, b = arrays.pop(f"{name}_lora_a"), arrays.pop(f"{name}_lora_b")
            product = jnp.einsum("dr,rf->df", a, b, out_sharding=sharding_of(w))
            arrays[name] = w + product
    return unflatten_dict(arrays, sep="/")


def reshard_for_compute(weights, table):
    """Give the weights of one layer the sharding and form that the computation needs.

    LoRA matrices are added to the weight matrices.

    Under FSDP (fully sharded data parallelism), the mesh axis "data" also splits the
    stored weights. This function is then an all-gather over that axis. Without FSDP, the
    weights already have the right sharding, and are returned unchanged.

    table: the Params of the layer.
    """

    def reshard(p, w):
        axes = [axis for axis in p.axes if axis != "layers"]
        return jax.reshard(w, spec(axes))

    return merge_lora(jax.tree.map(reshard, table, weights, is_leaf=is_param))


def scan_layers(layer, x, weights, keys, cfg):
    """Apply the layers to x one after another, with a loop over their stacked weights.

    JAX compiles the body of the loop only once, whether there are 8 layers or 24.

    layer: a function (weights, x, key) -> (x, losses). x [B, Q, D]. losses: a dict of the
    auxiliary losses of the layer. weights: a nested dict of arrays with a leading axis L.
    keys: L PRNG keys, or None for no dropout. Returns x, and a dict of losses [L].
    """

    def step(x, weights_and_key):
        weights, key = weights_and_key
        return layer(weights, x, key)

    return lax.scan(step, x, (weights, keys))


def run_layers(layer, x, stack, params, cfg, key):
    """Apply all layers of the encoder or the decoder to activations x [B, Q, D].

    `stack` is "encoder" or "decoder". `layer` is a function (weights, x, key) -> x that
    applies one layer. The auxiliary losses of all layers are added up.
    """
    table = param_table(cfg)[stack]["layers"]
    depth = cfg.num_layers if stack == "encoder" else cfg.num_decoder_layers
    keys = None if key is None else jax.random.split(key, depth)
    # Cast the weights of all layers before the loop. The all-gathers of FSDP then move
    # bfloat16 instead of float32, which is half of the bytes. A cast in each layer made a
    # training step of T5 large on TPU v5p 3 % slower.
    weights = jax.tree.map(lambda w: w.astype(x.dtype), params[stack]["layers"])

    def layer_and_losses(weights, x, key):
        with collect_losses() as losses:
            x = layer(reshard_for_compute(weights, table), x, key)
        return x, losses

    x, losses = scan_layers(layer_and_losses, x, weights, keys, cfg)
    for name, values in losses.items():
        add_loss(name, jnp.sum(values))
    return x


def encode(params, cfg, inputs, segments, key=None):
    """Run the encoder on token ids [B, S]. Returns [B, S, D].

    segments [B, S]: the number of each token's example within its row, or 0 for padding.
    key: the PRNG key of dropout, or None for no dropout.
    """
    key_embed, key_layers, key_end = split_key(key, 3)
    S = inputs.shape[1]
    positions = np.arange(S)
    mask = attention_mask(segments, segments)
    shared_bias = position_bias(params["encoder"], S, S, True, cfg)

    def layer(w, x, key):
        key_attention, key_mlp = split_key(key, 2)
        # Attention and MLP are residual blocks, which compute x + f(norm(x)).
        w_attention = w["attention"]
        normalized = rms_norm(x, w_attention["norm"])
        kv = keys_values(w_attention, normalized, cfg, positions)
        bias = position_bias(w_attention, S, S, True, cfg, shared_bias)
        x += attention(
            w_attention,
            normalized,
            kv,
            bias,
            mask,
            cfg,
            key_attention,
            positions=positions,
        )
        return x + mlp(w["mlp"], rms_norm(x, w["mlp"]["norm"]), cfg, key_mlp)

    x = embed(params, inputs, cfg, key_embed)
    x = run_layers(layer, x, "encoder", params, cfg, key_layers)
    x = final_norm(x, params["encoder"])
    return dropout(x, cfg.dropout, key_end, shared_length=False)


def final_norm(x, stack):
    """Apply the RMSNorm at the end of the encoder or of the decoder to activations x.

    stack: the parameters of the encoder or of the decoder.
    """
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
    positions=None,
):
    """Apply self-attention, cross-attention and MLP, the three blocks of a decoder layer.

    The caller provides all keys and values. In this way, infer.py can read the keys and
    values of earlier tokens from a cache. Returns the new activations [B, T, D].

    x [B, T, D]: the activations. normalized: x after the norm of self-attention.
    self_kv: the keys and values of the targets.
    cross_kv: the keys and values of the encoder's output.
    core: a function that replaces `attend`, as in `attention`.
    positions [T]: the positions of the targets in their rows.
    """
    key_self, key_cross, key_mlp = split_key(key, 3)
    w_self, w_cross, w_mlp = w["self_attention"], w["cross_attention"], w["mlp"]
    x += attention(
        w_self, normalized, self_kv, bias, self_mask, cfg, key_self, core, positions
    )
    # Cross-attention uses no position bias, so its bias is None.
    normalized = rms_norm(x, w_cross["norm"])
    x += attention(w_cross, normalized, cross_kv, None, cross_mask, cfg, key_cross, core)
    return x + mlp(w_mlp, rms_norm(x, w_mlp["norm"]), cfg, key_mlp)


def decode(params, cfg, decoder_inputs, segments, encoded, input_segments, key=None):
    """Run the decoder on all target positions at once. Returns [B, T, D].

    With teacher forcing, each position sees the true tokens before it. decoder_inputs
    [B, T] are therefore the targets, shifted right by one position.

    encoded [B, S, D]: the encoder's output. segments [B, T] and input_segments [B, S]:
    the numbers of the examples within a row, for targets and inputs.
    """
    key_embed, key_layers, key_end = split_key(key, 3)
    T = decoder_inputs.shape[1]
    positions = np.arange(T)
    self_mask = attention_mask(segments, segments, causal=True)
    cross_mask = attention_mask(segments, input_segments)
    shared_bias = position_bias(params["decoder"], T, T, False, cfg)

    def layer(w, x, key):
        normalized = rms_norm(x, w["self_attention"]["norm"])
        self_kv = keys_values(w["self_attention"], normalized, cfg, positions)
        cross_kv = keys_values(w["cross_attention"], encoded, cfg)
        bias = position_bias(w["self_attention"], T, T, False, cfg, shared_bias)
        return decoder_layer(
            w,
            x,
            normalized,
            self_kv,
            bias,
            self_mask,
            cross_kv,
            cross_mask,
            cfg,
            key,
            positions=positions,
        )

    x = embed(params, decoder_inputs, cfg, key_embed)
    x = run_layers(layer, x, "decoder", params, cfg, key_layers)
    x = final_norm(x, params["decoder"])
    return dropout(x, cfg.dropout, key_end)


def output_layer(params, cfg, x):
    """Return the two factors of the logits: the decoder's output, and a matrix [D, V].

    T5 1.0 uses the embedding matrix as the output matrix, and divides the decoder's
    output by sqrt(D).

    x: the decoder's output [B, T, D].
    """
    if cfg.tied:
        table = jax.reshard(params["embed"], spec(("vocab", "embed")))
        return x.astype(jnp.float32) * cfg.d_model**-0.5, table.T
    return x, jax.reshard(params["unembed"], spec(("embed", "vocab")))


def logits_of(x, w):
    """Compute float32 logits [B, T, V] from the two factors that output_layer returns."""
    return dense(x.astype(jnp.float32), w)


@jax.named_scope("logits and loss")
def unembed(params, cfg, x):
    """Compute float32 logits [B, T, V] from the decoder's output [B, T, D]."""
    return logits_of(*output_layer(params, cfg, x))


def decoder_output(params, batch, cfg, key=None):
    """Run the encoder and the decoder on a batch. Returns [B, T, D].

    batch: a data.Batch. cfg: a ModelConfig. key: the PRNG key of dropout, or None for no
    dropout.
    """
    key_encoder, key_decoder = split_key(key, 2)
    encoded = encode(params, cfg, batch.inputs, batch.input_segments, key_encoder)
    return decode(
        params,
        cfg,
        batch.decoder_inputs,
        batch.target_segments,
        encoded,
        batch.input_segments,
        key_decoder,
    )


def forward(params, batch, cfg, key=None):
    """Compute the logits for a batch of inputs and targets. Returns float32 [B, T, V].

    The arguments are those of decoder_output.
    """
    return unembed(params, cfg, decoder_output(params, batch, cfg, key))


# ---- loss ------------------------------------------------------------------------------


def smoothed_target(label_smoothing, V):
    """Return the probabilities `on` and `off` of label smoothing, and their entropy.

    The target token gets the probability `on`, which is 0.9 if label_smoothing is 0.1.
    The other V - 1 tokens share the remaining 0.1 equally, and each of them gets `off`.
    The entropy is in nats.

    Returns the tuple (on, off, entropy). Without label smoothing, `on` is 1, and `off`
    and the entropy are 0.
    """
    on = 1 - label_smoothing
    off = label_smoothing / (V - 1)
    entropy = -(on * math.log(on) + (V - 1) * off * math.log(off + 1e-20))
    return on, off, entropy


@jax.named_scope("logits and loss")
def cross_entropy(logits, targets, z_loss=0.0, label_smoothing=0.0):
    """Return the losses of each target token, and whether the prediction is correct.

    The losses are the cross entropy and the z-loss, in nats. Without label smoothing, the
    cross entropy is log Z - logit[target]. Here Z is sum(exp(logits)). The z-loss is
    z_loss * (log Z)^2, which keeps the logits near zero. A prediction is correct if the
    target has the largest logit.

    logits [B, T, V] float32, targets [B, T]. Returns three arrays [B, T].
    """
    V = logits.shape[-1]
    on, off, entropy = smoothed_target(label_smoothing, V)
    target = jax.nn.one_hot(targets, V)
    probabilities = on * target + off * (1 - target)
    log_z = jax.nn.logsumexp(logits, axis=-1)
    # Like T5X, subtract the entropy of the smoothed target. A perfect prediction then has
    # the loss 0.
    loss = log_z - jnp.sum(probabilities * logits, axis=-1) - entropy
    correct = jnp.argmax(logits, axis=-1) == targets
    return loss, z_loss * log_z**2, correct


@jax.named_scope("logits and loss")
def output_losses(x, w, targets, z_loss=0.0, label_smoothing=0.0):
    """Compute the logits, and return the losses of each target token.

    x [B, T, D] and w [D, V]: the result of output_layer. targets [B, T].
    The result is that of cross_entropy.
    """
    return cross_entropy(logits_of(x, w), targets, z_loss, label_smoothing)


def token_losses(params, batch, cfg, key=None):
    """Run the model on a batch, and return the losses of each target token.

    The result is a tuple of three arrays [B, T]. The arrays contain the cross entropy,
    the z-loss, and whether the prediction is right. cfg: a Config.
    """
    x = decoder_output(params, batch, cfg.model, key)
    x, w = output_layer(params, cfg.model, x)
    z_loss, label_smoothing = cfg.train.z_loss, cfg.train.label_smoothing
    return output_losses(x, w, batch.targets, z_loss, label_smoothing)


def sum_over_tokens(losses, batch):
    """Sum the losses over the target tokens of a batch, and count the right predictions.

    `losses` are the three arrays [B, T] from token_losses. Returns a dict of the float32
    scalars cross_ent_loss, z_loss, correct and tokens.
    """
    # Padding has the segment number 0. Give padding the weight 0, so that the sums leave
    # out padding.
    weight = (batch.target_segments > 0).astype(jnp.float32)
    cross_ent_loss, z_loss, correct = (jnp.sum(x * weight) for x in losses)
    return {
        "cross_ent_loss": cross_ent_loss,
        "z_loss": z_loss,
        "correct": correct,
        "tokens": jnp.sum(weight),
    }


def total_loss(sums):
    """Add up the cross entropy, the z-loss and the weighted auxiliary losses.

    The result is the training loss, summed over the target tokens of a batch.
    sums: the dict that loss_fn returns.
    """
    total = sums["cross_ent_loss"] + sums["z_loss"]
    for name, weight in LOSS_WEIGHTS.items():
        if name in sums:
            total += weight * sums[name]
    return total


def mean_metrics(sums):
    """Divide the sums over tokens by the number of tokens. Returns a dict of means.

    The losses are in nats per token. If 30 of 40 tokens are correct, the accuracy is
    0.75.

    sums: the dict that loss_fn returns.
    """
    tokens = jnp.maximum(sums["tokens"], 1)
    auxiliary = {name: sums[name] / tokens for name in LOSS_WEIGHTS if name in sums}
    return {
        "loss": total_loss(sums) / tokens,
        "cross_ent_loss": sums["cross_ent_loss"] / tokens,
        "z_loss": sums["z_loss"] / tokens,
        "accuracy": sums["correct"] / tokens,
        **auxiliary,
    }


def loss_fn(params, batch, cfg, key=None):
    """Return the training loss of a batch, and a dict of sums over its target tokens.

    The loss is the cross entropy plus the z-loss, in nats, plus the weighted auxiliary
    losses. The loss is summed over all target tokens. To get a mean, the caller divides
    the loss by the number of tokens. The dict contains the sums of sum_over_tokens and
    the auxiliary losses.

    cfg: a Config. key: the PRNG key of dropout, or None for no dropout.
    """
    with collect_losses() as auxiliary:
        losses = token_losses(params, batch, cfg, key)
    sums = sum_over_tokens(losses, batch)
    # An auxiliary loss is a number for the complete batch. Multiply the loss by the
    # number of tokens, because the caller later divides by this number.
    for name, value in auxiliary.items():
        sums[name] = value * sums["tokens"]
    return total_loss(sums), sums


# ====== below: compiler optimizations, sizes, the command ===============================


# ---- What the compiler is told: changes speed and memory, not results ------------------
# The equations above are enough to train T5. This section makes them faster.
#
# A function with the decorator @tuned replaces the function of the same name above. The
# replacement computes the same result in less time or memory. A comment explains what XLA
# would do with the plain function, and gives the measured gain.
#
# Unless a comment says otherwise, the gains are for one training step of T5 1.1 small.
# The TPU compiler estimated the number of cycles on v5e:2x4 with batch 256. All
# replacements together reduce this step from 170.9 to 61.9 million cycles, and from 9.1
# to 2.7 GB. On a CPU they save a quarter of the time.

# The environment variable PLAIN_T5_TUNED=0 turns off the compiler optimizations below.
# To change an equation of the model, first train with PLAIN_T5_TUNED=0. Then change the
# optimized function of the same name, and compare the two with `pytest -k tuned`.
TUNED = os.environ.get("PLAIN_T5_TUNED", "1") != "0"


def tuned(plain):
    """Return a decorator for a faster version of the function `plain`.

    If TUNED is true, the decorated function runs the faster version, and otherwise
    `plain`. For example, `@tuned(dense)` stands above the second definition of `dense`.
    """

    def decorate(fast):
        # Check TUNED at each call, so that a test can run both versions.
        @functools.wraps(fast)
        def plain_or_tuned(*args, **kwargs):
            return (fast if TUNED else plain)(*args, **kwargs)

        return plain_or_tuned

    return decorate


# The fastest way to multiply by a weight matrix differs between platforms. The function
# dense chooses a way for each platform.
@tuned(dense)
def dense(x, w):
    """Multiply activations [B, Q, D] by a weight matrix [D, F], fast on each platform."""
    # On a CPU, merge batch and length into one axis. The weight gradient is then a plain
    # product of two matrices. With separate axes, it would take 1.4 times as long.
    if partition.platform() == "cpu":
        return merged_dense(x, w)
    # On a GPU or TPU, keep batch and length as separate axes. With a merged axis, a TPU
    # would copy the activations, and a training step would take 214 instead of 139
    # million cycles.
    return batched_dense(x, w)


def merged_dense(x, w):
    """Reshape activations [B, Q, D] to a matrix [B*Q, D], and multiply it by w [D, F]."""
    rows, columns = sharding_of(x)[0], sharding_of(w)[1]
    x_matrix = x.reshape(-1, x.shape[-1])
    y = jnp.einsum("nd,df->nf", x_matrix, w, out_sharding=P(rows, columns))
    return y.reshape(*x.shape[:-1], w.shape[1], out_sharding=P(rows, None, columns))


@jax.custom_gradient
def batched_dense(x, w):
    """Multiply activations x [B, Q, D] by w [D, F], with hand-written gradients."""

    def gradient(d_y):
        d_x = jnp.einsum("bqf,df->bqd", d_y, w, out_sharding=sharding_of(x))
        # Compute the gradient of w with the axis order [D, F], as the weights are stored.
        d_w = jnp.einsum("bqd,bqf->df", x, d_y, out_sharding=sharding_of(w))
        return d_x, d_w

    rows, columns = sharding_of(x)[0], sharding_of(w)[1]
    y = jnp.einsum("bqd,df->bqf", x, w, out_sharding=P(rows, None, columns))
    return y, gradient


@tuned(gated_unit)
def gated_unit(gate, up, activation):
    """Return activation(gate) * up. An optimization barrier speeds up the gradients."""
    # In the backward pass, two matmuls read the gradients of `gate` and `up`. XLA would
    # compute the gradients again for each matmul. With the barrier, XLA computes them
    # once, and writes them to memory.
    gate, up = lax.optimization_barrier((gate, up))
    return activation(gate) * up


@tuned(bias_of_buckets)
def bias_of_buckets(table, bucket):
    """Look up the position bias by a matmul with one-hot vectors. Returns [N, H, Q, K].

    N is the size of the mesh axis "data". The result has one copy of the bias for each
    part of the batch. `table` [H, R] has one number for each head and bucket. `bucket`
    [Q, K] has the bucket of each pair of query and key.
    """
    # A lookup in the table would have a slow scatter-add as its gradient. The gradient of
    # a matmul is another matmul. The gain of this matmul alone was not measured.
    one_hot = jax.nn.one_hot(bucket, table.shape[1], axis=0, dtype=jnp.float32)
    return jnp.einsum("nhr,rqk->nhqk", copy_for_each_part(table), one_hot)


def copy_for_each_part(x):
    """Return N copies [N, ...] of an array, one for each part of the batch.

    N is the size of the mesh axis "data". In the backward pass, each part of the batch
    adds up the gradients of all layers in its own copy. A single all-reduce then adds up
    the copies. Without copies, every layer would need an all-reduce.
    """
    data_shards = jax.sharding.get_abstract_mesh().shape["data"]
    ones = jnp.ones((data_shards, *[1] * x.ndim), out_sharding=P("data"))
    return ones * x


@tuned(position_bias)
@jax.named_scope("attention")
def position_bias(w, Q, K, bidirectional, cfg, shared=None):
    """Return the position bias with one copy for each part of the batch, [N, H, Q, K].

    N is the size of the mesh axis "data". The result is None if --model.positions selects
    an encoding without a bias. The arguments are those of relative_bias.
    """
    bias = POSITIONS[cfg.positions].bias(w, Q, K, bidirectional, cfg, shared)
    if bias is None or "data" in sharding_of(bias):
        return bias
    return copy_for_each_part(bias[0])


# Both faster forms of attention have a hand-written gradient, and use two ideas of
# FlashAttention (Rabe and Staats 2021, Dao et al. 2022). First, the division by the
# softmax denominator comes last, after the matmul with the values. Second, the
# probabilities are not stored. The backward pass recomputes them from the scores and the
# logarithm of the denominator.
@tuned(attend)
def attend(q, k, v, bias, mask, form="auto"):
    """Compute attention, softmax(q k^T + bias) v, in the form that `form` selects.

    form: the value of --model.attention. "xla" selects fused_attention, and "kernel"
    selects kernel_attention. "auto" selects kernel_attention on a TPU if the shapes fit.
    """

    def attend_locally(q, k, v, bias, mask):
        blocks = kernel_blocks(q.shape, k.shape[2]) if form != "xla" else None
        if form == "kernel" and not blocks:
            raise configs.UserError(
                f"The attention kernel does not support {q.shape[2]} queries and "
                f"{k.shape[2]} keys with {q.shape[1]} heads: use --model.attention auto."
            )
        if blocks and (form == "kernel" or partition.platform() == "tpu"):
            return kernel_attention(q, k, v, bias, mask)
        return fused_attention(q, k, v, bias, mask)

    # With shard_map, each device computes attention for its own rows and heads. XLA then
    # adds no communication between the devices.
    local = jax.shard_map(attend_locally, out_specs=sharding_of(v), check_vma=False)
    return local(q, k, v, bias, mask)


@jax.custom_vjp
def fused_attention(q, k, v, bias, mask):
    """Compute attention, softmax(q k^T + bias) v, by operations that XLA compiles.

    q [B, H, Q, C], k and v [B, H, K, C]. Returns [B, H, Q, C].
    """
    return fused_attention_forward(q, k, v, bias, mask)[0]


def masked_scores(q, k, bias, mask):
    """Compute the attention scores q k^T + bias, [B, H, Q, K], in the dtype of q.

    A masked key gets the score -1e10, so that softmax ignores this key.
    """
    # A GPU writes the result of this matmul to memory. In the dtype of q, which is
    # usually bfloat16 on a GPU, the result has half as many bytes as in float32.
    dtype = q.dtype if partition.platform() == "gpu" else jnp.float32
    scores = jnp.einsum("bhqc,bhkc->bhqk", q, k, preferred_element_type=dtype)
    if bias is not None:
        scores = scores + bias
    return jnp.where(mask, scores, -1e10).astype(q.dtype)


def matmul(form, a, b):
    """Multiply arrays as jnp.einsum does, and add up the products in float32."""
    return jnp.einsum(form, a, b, preferred_element_type=jnp.float32)


def normalize(sums, maximum, z):
    """Divide the weighted sums of the values by z, the softmax denominator.

    The weight of a key is exp(score - maximum). Also returns log_z, the logarithm of the
    denominator of exp(score).
    """
    # A query without keys has only masked scores, which are -1e10. Its result is 0. Its
    # log_z is infinite, so the backward pass computes the probability 0 for all keys.
    sees_a_key = maximum > -1e9
    log_z = jnp.where(sees_a_key, maximum + jnp.log(z), jnp.inf)
    return jnp.where(sees_a_key, sums / z, 0), log_z


def fused_attention_forward(q, k, v, bias, mask):
    """Compute attention, and return its result and the arrays for the backward pass.

    The function checkpoint_name gives names to these arrays. By these names, remat_policy
    decides which arrays are saved and which are recomputed.
    """
    scores = masked_scores(q, k, bias, mask)
    maximum = scores.max(-1, keepdims=True).astype(jnp.float32)
    weights = jnp.exp(scores - maximum)
    z = weights.sum(-1, keepdims=True)
    sums = matmul("bhqk,bhkc->bhqc", weights.astype(v.dtype), v)
    out, log_z = normalize(sums, maximum, z)
    out = out.astype(v.dtype)
    # Give a name only after the last use of the array in this function, because XLA would
    # copy a named array at every later use.
    out, log_z = checkpoint_name((out, log_z), "attended")
    inputs = checkpoint_name((q, k, v, bias), "attention inputs")
    return out, (inputs, mask, out, log_z)


def fused_attention_backward(saved, d_out):
    """Compute the gradients of q, k, v and bias, as FlashAttention does.

    Let p be the softmax probabilities. Their gradient is d_p = d_out v^T. The gradient of
    the scores is p * (d_p - row_sum), where row_sum is the sum of d_out * out over the
    channels. Without a bias, the gradient of the bias is None, like that of the mask.

    saved: the arrays that fused_attention_forward has returned for the backward pass.
    d_out: the gradient of the result of attention, [B, H, Q, C].
    """
    (q, k, v, bias), mask, out, log_z = saved
    p = jnp.exp(masked_scores(q, k, bias, mask) - log_z)
    d_p = matmul("bhqc,bhkc->bhqk", d_out, v)
    row_sum = matmul("bhqc,bhqc->bhq", d_out, out)
    d_scores = (p * (d_p - row_sum[..., None])).astype(v.dtype)
    d_q = jnp.einsum("bhqk,bhkc->bhqc", d_scores, k)
    d_k = jnp.einsum("bhqk,bhqc->bhkc", d_scores, q)
    d_v = jnp.einsum("bhqk,bhqc->bhkc", p.astype(v.dtype), d_out)
    if bias is None:
        return d_q, d_k, d_v, None, None
    if partition.platform() == "cpu":
        # Sum over the batch with a matmul by a row of ones. On a CPU, this is forty times
        # as fast as jnp.sum.
        ones = jnp.ones((1, len(q)), v.dtype)
        d_bias = matmul("ab,bhqk->ahqk", ones, d_scores)
    else:
        d_bias = d_scores.astype(jnp.float32).sum(0, keepdims=True)
    return d_q, d_k, d_v, d_bias, None


fused_attention.defvjp(fused_attention_forward, fused_attention_backward)


# The attention kernel is a program for a TPU, written in Pallas, a language within JAX.
# XLA would write the scores [B, H, Q, K] to memory several times. The kernel computes
# attention for a few rows, heads and queries at a time, and keeps their scores in fast
# on-chip memory. The kernel reduced a training step from 78.4 to 61.4 million cycles. XLA
# does not estimate the cycles of the kernel itself, so they were counted in the machine
# code. The arrays q, k, v and out have the shape [B, Q, H * C] here, as the
# matmuls with weights produce and read them. Otherwise XLA would copy them.
def kernel_blocks(shape, K):
    """Choose how many rows, heads and queries one step of the kernel processes.

    shape: the shape of the queries, [B, H, Q, C]. K: the number of keys.
    Returns a tuple (rows, heads, queries), or None if the shapes do not fit the kernel.
    """
    B, H, Q, C = shape

    def divisors(n):
        return [i for i in range(n, 0, -1) if n % i == 0]

    # A TPU stores a matrix in tiles with 128 columns. Two heads of 64 channels fill a
    # tile.
    heads = min(n for n in divisors(H) if n * C % 128 == 0 or n == H)
    # The scores of a step must fit into on-chip memory. A smaller number of queries than
    # Q must be a multiple of 128.
    fit = MAX_KERNEL_SCORES // (heads * K)
    queries = [n for n in divisors(Q) if n <= fit and (n == Q or n % 128 == 0)]
    if not queries:
        return None
    rows = max(n for n in divisors(B) if n == 1 or n * queries[0] <= fit)
    return rows, heads, queries[0]


# The largest number of scores (rows * heads * queries * keys) in a step of the kernel.
MAX_KERNEL_SCORES = 1 << 19


def head_columns(x, C):
    """Return a mask [1, heads * C] for each head, which is True at its channels.

    x: an array [Q, heads * C]. C: the number of channels of a head.
    """
    heads = lax.broadcasted_iota(jnp.int32, (1, x.shape[-1]), 1) // C
    return [heads == h for h in range(x.shape[-1] // C)]


def kernel_scores(q, k, mask, bias_ref, head):
    """Compute the masked attention scores of one head, float32 [Q, K], in the kernel."""
    scores = matmul("qc,kc->qk", q, k)
    if bias_ref is not None:
        scores += bias_ref[head]
    # TPU v4 cannot compare numbers of 8 bits.
    return jnp.where(mask.astype(jnp.int32) == 1, scores, -1e10)


def forward_kernel(C, mask_ref, bias_ref, q_ref, k_ref, v_ref, out_ref, log_z_ref):
    """Compute attention for a block of rows, heads and queries.

    C: the number of channels of a head. The other arguments refer to the block of each
    array, in on-chip memory. bias_ref is None if there is no bias.
    """

    def attend_in_row(row, _):
        q, k, v, mask = q_ref[row], k_ref[row], v_ref[row], mask_ref[row]
        out = jnp.zeros(q.shape, jnp.float32)
        for head, columns in enumerate(head_columns(q, C)):
            # Set the channels of all other heads to 0. The matmul with k then adds only
            # the products of this head. A TPU multiplies 128 channels at once anyway.
            q_head = jnp.where(columns, q, 0)
            scores = kernel_scores(q_head, k, mask, bias_ref, head)
            maximum = scores.max(-1, keepdims=True)
            weights = jnp.exp(scores - maximum)
            z = weights.sum(-1, keepdims=True)
            sums = matmul("qk,kc->qc", weights.astype(v.dtype), v)
            out_head, log_z = normalize(sums, maximum, z)
            out = jnp.where(columns, out_head, out)
            # Store the column log_z as a row. In memory, a column would need as much
            # space as 128 columns.
            log_z_ref[row, head] = jnp.broadcast_to(log_z, (len(q), 128)).T[0]
        out_ref[row] = out.astype(out_ref.dtype)

    lax.fori_loop(0, len(q_ref), attend_in_row, None)


def backward_kernel(C, *refs):
    """Compute the gradients of a block, with the equations of fused_attention_backward.

    refs: the arguments of run_kernel, and then d_q, d_k, d_v and d_bias. Without a bias,
    d_bias is missing.
    """
    from jax.experimental import pallas as pl

    mask_ref, bias_ref, q_ref, k_ref, v_ref, out_ref, log_z_ref, d_out_ref = refs[:8]
    d_q_ref, d_k_ref, d_v_ref, *d_bias_ref = refs[8:]
    # All steps for the same heads and queries add up one gradient of the bias. The first
    # of these steps sets the gradient to 0.
    for ref in d_bias_ref:
        ref[...] = jnp.where(pl.program_id(2) == 0, 0, ref[...])

    def gradients_in_row(row, _):
        q, k, v, mask = q_ref[row], k_ref[row], v_ref[row], mask_ref[row]
        d_out = d_out_ref[row]
        products = d_out.astype(jnp.float32) * out_ref[row].astype(jnp.float32)
        d_q = jnp.zeros(q.shape, jnp.float32)
        d_k = d_v = jnp.zeros(k.shape, jnp.float32)
        for head, columns in enumerate(head_columns(q, C)):
            q_head, d_out_head = jnp.where(columns, q, 0), jnp.where(columns, d_out, 0)
            scores = kernel_scores(q_head, k, mask, bias_ref, head)
            log_z = jnp.broadcast_to(log_z_ref[row, head][None], (128, len(q))).T[:, :1]
            p = jnp.exp(scores - log_z)
            d_p = matmul("qc,kc->qk", d_out_head, v)
            row_sum = jnp.where(columns, products, 0).sum(-1, keepdims=True)
            d_scores = p * (d_p - row_sum)
            for ref in d_bias_ref:
                ref[head] += d_scores
            d_scores = d_scores.astype(v.dtype)
            d_q = jnp.where(columns, matmul("qk,kc->qc", d_scores, k), d_q)
            d_k += matmul("qk,qc->kc", d_scores, q_head)
            d_v += matmul("qk,qc->kc", p.astype(v.dtype), d_out_head)
        d_q_ref[row] = d_q.astype(d_q_ref.dtype)
        d_k_ref[row] = d_k.astype(d_k_ref.dtype)
        d_v_ref[row] = d_v.astype(d_v_ref.dtype)

    lax.fori_loop(0, len(q_ref), gradients_in_row, None)


def run_kernel(kernel, blocks, C, arguments, results):
    """Run a kernel once for each block of rows, heads and queries. Returns its results.

    arguments: mask, bias, q, k and v. For the backward pass also out, log_z and d_out.
    results: a list of pairs (kind, shape, dtype), where the kind is a key of `specs`.
    """
    # Import Pallas only here, because the import takes 0.4 s.
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu

    rows, heads, queries = blocks
    width = heads * C
    mask, bias, q = arguments[:3]
    B, Q, K = mask.shape
    # A BlockSpec has the shape of a block, and a function that returns the index of the
    # block for step (h, i, b) of the kernel. This step processes block h of the heads,
    # block i of the queries and block b of the rows. The rows come last, so that the
    # steps of all rows can add up the gradient of one block of the bias.
    specs = {
        "mask": pl.BlockSpec((rows, queries, K), lambda h, i, b: (b, i, 0)),
        # To save memory, do not prefetch the next block of the bias.
        "bias": pl.BlockSpec(
            (heads, queries, K), lambda h, i, b: (h, i, 0), pipeline_mode=pl.Buffered(1)
        ),
        "queries": pl.BlockSpec((rows, queries, width), lambda h, i, b: (b, i, h)),
        "keys": pl.BlockSpec((rows, K, width), lambda h, i, b: (b, 0, h)),
        "log_z": pl.BlockSpec((rows, None, heads, queries), lambda h, i, b: (b, h, 0, i)),
        "d_keys": pl.BlockSpec((None, rows, K, width), lambda h, i, b: (i, b, 0, h)),
        "d_bias": pl.BlockSpec((heads, queries, K), lambda h, i, b: (h, i, 0)),
    }
    if bias is None:
        specs["bias"] = None
    kinds = ["mask", "bias", "queries", "keys", "keys", "queries", "log_z", "queries"]
    # XLA and --plan need the cost of the kernel, which XLA cannot compute. The forward
    # pass has 2 matmuls, and the backward pass has 5.
    matmuls = 2 if kernel == forward_kernel else 5
    cost = pl.CostEstimate(
        flops=2 * matmuls * mask.size * q.shape[-1],
        transcendentals=mask.size * q.shape[-1] // C,
        bytes_accessed=sum(x.nbytes for x in arguments if x is not None),
    )
    device = jax.sharding.get_abstract_mesh().abstract_device
    call = pl.pallas_call(
        functools.partial(kernel, C),
        grid=(q.shape[-1] // width, Q // queries, B // rows),
        in_specs=[specs[kind] for kind in kinds[: len(arguments)]],
        out_specs=[specs[kind] for kind, *_ in results],
        out_shape=[jax.ShapeDtypeStruct(*shape) for _, *shape in results],
        compiler_params=tpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        cost_estimate=cost,
        # On a CPU or GPU, JAX interprets the kernel.
        interpret=device.platform != "tpu",
        name=kernel.__name__,
    )
    return call(*arguments)


@jax.custom_vjp
def kernel_attention(q, k, v, bias, mask):
    """Compute attention, softmax(q k^T + bias) v, with the attention kernel.

    q [B, H, Q, C], k and v [B, H, K, C]. Returns [B, H, Q, C].
    """
    return kernel_attention_forward(q, k, v, bias, mask)[0]


def kernel_attention_forward(q, k, v, bias, mask):
    """Compute attention, and return its result and the arrays for the backward pass."""
    B, H, Q, C = q.shape
    blocks = kernel_blocks(q.shape, k.shape[2])
    q, k, v = map(merge_heads, (q, k, v))
    bias = None if bias is None else bias[0]
    mask = jnp.broadcast_to(mask[:, 0], (B, Q, k.shape[1])).astype(jnp.int8)
    inputs = (mask, bias, q, k, v)
    log_z_shape = (B, H // blocks[1], blocks[1], Q)
    results = [("queries", q.shape, v.dtype), ("log_z", log_z_shape, jnp.float32)]
    out, log_z = run_kernel(forward_kernel, blocks, C, inputs, results)
    out, log_z = checkpoint_name((out, log_z), "attended")
    return separate_heads(out, H), (inputs, out, log_z)


def kernel_attention_backward(saved, d_out):
    """Compute the gradients of q, k, v and bias.

    The arguments and results are those of fused_attention_backward.
    """
    inputs, out, log_z = saved
    mask, bias, q, k, v = inputs
    B, H, Q, C = d_out.shape
    blocks = kernel_blocks(d_out.shape, k.shape[1])
    d_keys = (Q // blocks[2], *k.shape)
    results = [
        ("queries", q.shape, q.dtype),
        ("d_keys", d_keys, k.dtype),
        ("d_keys", d_keys, v.dtype),
    ]
    if bias is not None:
        results.append(("d_bias", bias.shape, jnp.float32))
    arguments = (*inputs, out, log_z, merge_heads(d_out))
    d_q, d_k, d_v, *d_bias = run_kernel(backward_kernel, blocks, C, arguments, results)
    # Each block of queries gives its own gradient of the keys and values. Add them up by
    # separate additions, because XLA needs more time for a reduction, such as jnp.sum.
    d_k, d_v = (sum(part.astype(jnp.float32) for part in x) for x in (d_k, d_v))
    d_k, d_v = d_k.astype(k.dtype), d_v.astype(v.dtype)
    d_bias = d_bias[0][None] if d_bias else None
    return (*(separate_heads(x, H) for x in (d_q, d_k, d_v)), d_bias, None)


kernel_attention.defvjp(kernel_attention_forward, kernel_attention_backward)


def merge_heads(x):
    """Transpose the heads of one device: [B, H, Q, C] becomes [B, Q, H * C]."""
    B, H, Q, C = x.shape
    return x.transpose(0, 2, 1, 3).reshape(B, Q, H * C)


def separate_heads(x, H):
    """Undo merge_heads: [B, Q, H * C] becomes [B, H, Q, C]."""
    B, Q, _ = x.shape
    return x.reshape(B, Q, H, -1).transpose(0, 2, 1, 3)


# Rematerialization saves memory. The forward pass keeps only some activations, and the
# backward pass recomputes the others. The function jax.checkpoint implements
# rematerialization.
def remat_policy(remat):
    """Return the jax.checkpoint policy for a value of --model.remat.

    The policy chooses the arrays that the forward pass saves for the backward pass. The
    backward pass recomputes all other arrays.
    "full" saves only the outputs of attention. "dots" also saves the inputs of attention
    and the outputs of all matmuls with weights, which would take the most time to
    recompute. "none" saves everything except all-gathered weights.
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
    """Apply the layers to x [B, Q, D] one after another, with rematerialization.

    On GPUs and TPUs, the loop over the layers is unrolled, for models up to T5 xl.
    """
    depth = len(weights["mlp"]["norm"])
    # The weights and activations of all layers are stacked in large arrays. A loop that
    # is not unrolled copies the slices of each layer out of these arrays and into them.
    # On a TPU, unrolling reduced a training step from 125 to 95 million cycles. It also
    # reduced a step of T5 xl on 64 TPUs v5p from 363 to 276 million cycles. The compiler
    # then needs about seven minutes for T5 xl on two CPU cores. T5 xxl is not unrolled,
    # because it would take four times as long to compile, to make a step 3 % faster.
    unroll = partition.platform() != "cpu" and depth <= 24 and cfg.d_model <= 2048
    needs_all_gather = "data" in sharding_of(weights["mlp"]["up"])
    # In an unrolled loop, XLA would notice that the backward pass repeats computations of
    # the forward pass. XLA would keep their results instead, and rematerialization would
    # save no memory. prevent_cse turns this common-subexpression elimination (CSE) off.
    prevent_cse = unroll
    if cfg.remat != "full" and not needs_all_gather:
        # Set one flag for each argument of a layer (weights, x, key). Weights that need
        # no all-gather stay in memory anyway. Therefore CSE must be prevented only for x.
        prevent_cse = (False, unroll, False)
    policy = remat_policy(cfg.remat)
    rematerialized = jax.checkpoint(layer, policy=policy, prevent_cse=prevent_cse)

    def step(x, weights_and_key):
        weights, key = weights_and_key
        # With the barrier, forward and backward pass use the same slice of the weights.
        # XLA would otherwise keep a second copy of all weights. On a TPU, the barrier
        # reduced a training step of T5 base from 240 to 236 million cycles.
        if unroll:
            weights = lax.optimization_barrier(weights)
        return rematerialized(weights, x, key)

    return lax.scan(step, x, (weights, keys), unroll=unroll)


# The logits [B, T, V] are the largest array of a training step. With 32 rows on a device,
# the 250,112 token ids of mT5 need 3.6 GB. The following functions compute the loss
# without this array. They take a part of the vocabulary at a time, called a chunk. For
# each chunk they compute the logits, and update the sums that the loss needs. The
# backward pass computes the logits again. On a TPU, the loss of mT5 takes 61 instead of
# 72 million cycles in this form, and 1.3 instead of 6.8 GB. The loss of T5, whose
# vocabulary is one chunk, takes 6.0 instead of 9.0 million cycles.
def chunk_size(V):
    """Return the size of the chunks into which V token ids are divided."""
    # A single chunk is fastest. A large vocabulary needs several chunks to save memory.
    # Of the sizes that were tried on a TPU v5e, 3328 was the fastest.
    return V if V <= 1 << 15 else 3328


@tuned(output_losses)
@jax.named_scope("logits and loss")
def output_losses(x, w, targets, z_loss=0.0, label_smoothing=0.0):
    """Return the losses of each target token, without an array of all logits.

    The arguments and the result are those of the plain function output_losses.
    """
    on, off, entropy = smoothed_target(label_smoothing, w.shape[1])
    targets = jax.reshard(targets, P("data"))
    log_z, target_logit, best_id = logit_sums(x, w, targets)
    expected = target_logit
    if label_smoothing:
        # The sum of all logits is the product of x and the sum of all columns of w.
        logit_sum = logits_of(x, w.sum(1, keepdims=True))[..., 0]
        expected = (on - off) * target_logit + off * logit_sum
    return log_z - expected - entropy, z_loss * log_z**2, best_id == targets


@jax.custom_vjp
def logit_sums(x, w, targets):
    """Return three numbers for each target token, from which the loss is computed.

    The numbers are log Z, the logit of the target, and the token id with the largest
    logit. Here Z is sum(exp(logits)). If several token ids have the largest logit, the
    lowest of these ids is returned.

    x [B, T, D] and w [D, V]: the result of output_layer. targets [B, T]. Returns three
    float32 arrays [B, T].
    """
    return logit_sums_forward(x, w, targets)[0]


def for_each_chunk(update, result, x, w):
    """Loop over the chunks of the vocabulary, and compute the logits of each chunk.

    update: a function that is called once for each chunk. It gets the result so far, the
        logits [N, chunk], the token ids [1, chunk] in float32, the columns [D, chunk] of
        w, and the number of the first column. It returns the new result.
    result: the initial result. x [N, D]. w [D, V].
    Returns the last result of `update`.
    """
    V = w.shape[1]
    # On a GPU or TPU, multiply numbers of the dtype of x, which is usually bfloat16, and
    # add up the products in float32. A TPU would round the factors to bfloat16 anyway.
    dtype = jnp.float32 if partition.platform() == "cpu" else x.dtype
    # The mesh axis "model" splits the vocabulary. Find the first token id of this device.
    first_id = V * lax.axis_index("model")

    def step(start, size, result):
        w_chunk = lax.dynamic_slice_in_dim(w, start, size, 1).astype(dtype)
        logits = matmul("nd,dv->nv", x.astype(dtype), w_chunk)
        ids = first_id + start + lax.broadcasted_iota(jnp.int32, (1, size), 1)
        # Use float32 for the ids, too. XLA computes all sums and minima over the chunk in
        # one pass, but only if they have the same dtype. A float32 can represent all
        # integers up to 16,777,216.
        return update(result, logits, ids.astype(jnp.float32), w_chunk, start)

    size = min(V, chunk_size(V))
    chunks, rest = divmod(V, size)
    result = lax.fori_loop(
        0, chunks, lambda i, result: step(i * size, size, result), result
    )
    return step(V - rest, rest, result) if rest else result


def logit_sums_forward(x, w, targets):
    """Compute logit_sums, and return its result and the arrays for the backward pass."""

    def sums(x, w, targets):
        target = targets.reshape(-1, 1)

        def update(result, logits, ids, w_chunk, start):
            old_maximum, z, target_logit, best_id = result
            maximum = jnp.maximum(old_maximum, logits.max(-1))
            weights = jnp.exp(logits - maximum[:, None])
            # The sum z has the terms exp(logit - maximum). If the maximum has grown, make
            # the terms of the earlier chunks smaller.
            z = z * jnp.exp(old_maximum - maximum) + weights.sum(-1)
            # To get the logit of each target, set all other logits to 0, and sum.
            target_logit += jnp.where(ids == target, logits, 0).sum(-1)
            best_here = jnp.where(logits == maximum[:, None], ids, jnp.inf).min(-1)
            best_id = jnp.where(maximum > old_maximum, best_here, best_id)
            return maximum, z, target_logit, best_id

        zero = jnp.zeros(targets.size, jnp.float32)
        x = x.reshape(-1, x.shape[-1])
        result = for_each_chunk(update, (zero - jnp.inf, zero, zero, zero), x, w)
        local_maximum, z, target_logit, best_id = result
        # Combine the results of all devices that split the vocabulary.
        maximum = lax.pmax(local_maximum, "model")
        z = lax.psum(z * jnp.exp(local_maximum - maximum), "model")
        target_logit = lax.psum(target_logit, "model")
        best_id = jnp.where(local_maximum == maximum, best_id, jnp.inf)
        best_id = lax.pmin(best_id, "model")
        results = maximum + jnp.log(z), target_logit, best_id
        return tuple(result.reshape(targets.shape) for result in results)

    results = jax.shard_map(sums, out_specs=P("data"), check_vma=False)(x, w, targets)
    return results, (x, w, targets, results[0])


def logit_sums_backward(saved, d_results):
    """Compute the gradients of x and w.

    The gradient of log Z with respect to the logits is the softmax of the logits. The
    token id with the largest logit has no gradient.

    saved: the arrays that logit_sums_forward has returned for the backward pass.
    d_results: the gradients of the results of logit_sums.
    """

    def gradients(x, w, *columns):
        target, log_z, d_log_z, d_target = (a.reshape(-1, 1) for a in columns)
        rows = x.reshape(-1, x.shape[-1])

        def update(result, logits, ids, w_chunk, start):
            d_x, d_w = result
            d_logits = d_log_z * jnp.exp(logits - log_z)
            d_logits += jnp.where(ids == target, d_target, 0)
            d_logits = d_logits.astype(w_chunk.dtype)
            d_x += matmul("nv,dv->nd", d_logits, w_chunk)
            d_w_chunk = matmul("nd,nv->dv", rows.astype(w_chunk.dtype), d_logits)
            return d_x, lax.dynamic_update_slice_in_dim(d_w, d_w_chunk, start, 1)

        zeros = jnp.zeros_like(rows, jnp.float32), jnp.zeros_like(w)
        d_x, d_w = for_each_chunk(update, zeros, rows, w)
        # XLA would compute d_w last, and keep the gradient of the logits in memory until
        # the end of the backward pass. The barrier makes XLA compute d_w before it uses
        # d_x, which saves 0.25 GB.
        d_x, d_w = lax.optimization_barrier((d_x, d_w))
        # Each device has computed the part of d_x for its token ids, and the part of d_w
        # for its rows of the batch.
        d_x = lax.psum(d_x, "model").reshape(x.shape)
        return d_x.astype(x.dtype), lax.psum(d_w, "data")

    x, w, *_ = saved
    d_log_z, d_target, _ = d_results
    shardings = sharding_of(x), sharding_of(w)
    local = jax.shard_map(gradients, out_specs=shardings, check_vma=False)
    return (*local(*saved, d_log_z, d_target), None)


logit_sums.defvjp(logit_sums_forward, logit_sums_backward)


# ---- sizes -----------------------------------------------------------------------------


def count_params(table):
    """Return the number of weights in a nested dict of Params.

    For example, a Param of shape (512, 1024) counts as 524,288 weights.
    """
    return sum(math.prod(p.shape) for p in jax.tree.leaves(table, is_leaf=is_param))


def train_flops(cfg, S, T):
    """Count the floating-point operations (FLOPs) to train on one example.

    T5 1.1 small needs 106 billion FLOPs for S = 512 input tokens and T = 114 target
    tokens. Only matmuls count, and recomputed matmuls do not.
    """
    D, F, A = cfg.d_model, cfg.d_ff, cfg.num_heads * cfg.d_kv
    mlp_matrices = 3 if cfg.activation.startswith("gated_") else 2
    # Count the multiply-adds of one encoder layer: first the matmuls with weights, then
    # the two matmuls of attention (q k^T, and probabilities times values).
    encoder = S * (4 * D * A + mlp_matrices * D * F) + 2 * S * S * A
    # A decoder layer also projects the S encoder outputs to keys and values.
    decoder = T * (6 * D * A + mlp_matrices * D * F) + S * 2 * D * A
    decoder += 2 * T * T * A + 2 * T * S * A
    logits = T * D * cfg.vocab_size
    multiply_adds = cfg.num_layers * encoder + cfg.num_decoder_layers * decoder + logits
    # A multiply-add counts as 2 FLOPs. Each matmul runs once in the forward pass. In the
    # backward pass, its two gradients need two more matmuls of the same size.
    return 3 * 2 * multiply_adds


def minimum_memory(cfg, rows, S, T, copies=1, beams=0):
    """Estimate how much memory a batch needs at least. Returns {name: bytes}.

    For example, "logits" needs 4 * rows * T * 32128 bytes in the training of T5. Callers
    can refuse a batch that is too large before they compile anything.

    rows: the number of rows, each with S input and T target tokens. copies: the number of
    float32 arrays for each parameter. beams: the beams of decoding with a cache, or 0 to
    run all positions at once.
    """
    size = compute_dtype(cfg).itemsize
    A, V = cfg.num_heads * cfg.d_kv, cfg.vocab_size
    largest_scores = S * S if beams else max(S * S, S * T, T * T)
    if partition.platform() == "tpu" and cfg.attention != "xla":
        # The attention kernel keeps the scores in on-chip memory.
        largest_scores = 0
    cache = 0
    if beams:
        cache = 2 * size * rows * cfg.num_decoder_layers * A * (S + beams * T)
    # Count the arrays of shape [Q, K]: one bias for each head, one row of the one-hot
    # matrix for each bucket, and four to compute the buckets.
    t5_arrays = cfg.num_heads + cfg.relative_buckets + 4
    bias_arrays = {"t5_bias": t5_arrays, "alibi": cfg.num_heads}.get(cfg.positions, 0)
    return {
        "parameters": 4 * copies * count_params(param_table(cfg)),
        "attention scores of a layer": size * rows * cfg.num_heads * largest_scores,
        "position biases": 4 * bias_arrays * max(S, T) ** 2,
        "a layer's activations": size * rows * S * max(cfg.d_ff, cfg.d_model),
        "cached keys and values": cache,
        "logits": 4 * rows * (beams * V or T * chunk_size(V)),
    }


def describe_model(cfg):
    """Return a line of text with the number of parameters and the FLOPs of an example."""
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
    """Print a table of all parameters: name, shape, initialization and number."""
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
