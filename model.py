"""T5 1.1, all of it: parameters, encoder, decoder, cache, loss. Pure functions over a nested dict.

- A table declares every parameter: shape, what each axis means, initial distribution. Initial
  values, layouts, counts, checkpoints and conversion follow from it.
- Layers of a stack are one array for each weight, and run as one loop body by a scan.
- The same attention serves training, scoring and cached decoding (infer.py).
- Weights, statistics, softmax, logits and loss are float32; products run in model.dtype.

    python model.py --config small_c4      the table of parameters, their number, FLOPs

On many devices the code is the same: out_sharding says which layout is meant, each attends alone.
Shapes are written in the letters of the einsums:

    B batch   Q query position   K key position   D d_model   H heads   C channels of a head (d_kv)
    F d_ff    V vocabulary       L layers         R relative-position buckets

Raffel et al. 2020 (arXiv:1910.10683), section 2.1, with the changes of version 1.1: gated GELU, no
tied output layer, no dropout in pre-training. Numbers are T5X's (t5x/examples/t5/network.py).
"""

import math
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

# ---- parameters ----------------------------------------------------------------------------------


class Param(NamedTuple):
    """Shape, what each axis means, initial distribution: all that is said about a parameter."""

    shape: tuple
    axes: tuple
    init: str = "ones"  # ones, zeros, normal, truncated_normal or uniform
    scale: float = 1.0  # standard deviation; of uniform, the bound


def param_table(cfg):
    """ModelConfig -> the nested dict of Params. Init, layouts, checkpoints and counts follow.
    Attention weights are matrices [D, H*C] and [H*C, D], as Adafactor must factor them. There is no
    1/sqrt(d_kv) in the attention: it is in the initial scale of `query`."""
    D, F, V, R, C = cfg.d_model, cfg.d_ff, cfg.vocab_size, cfg.relative_buckets, cfg.d_kv
    H, A = cfg.num_heads, cfg.num_heads * cfg.d_kv
    norm = Param((D,), ("embed",))
    up = Param((D, F), ("embed", "mlp"), "truncated_normal", D**-0.5)
    down = Param((F, D), ("mlp", "embed"), "truncated_normal", F**-0.5)
    gate = {"gate": up} if cfg.activation.startswith("gated_") else {}
    mlp = {"norm": norm, **gate, "up": up, "down": down}

    def attention(**bias):
        return {
            "norm": norm,
            **bias,
            "query": Param((D, A), ("embed", "heads"), "normal", (D * C) ** -0.5),
            "key": Param((D, A), ("embed", "heads"), "normal", D**-0.5),
            "value": Param((D, A), ("embed", "heads"), "normal", D**-0.5),
            "out": Param((A, D), ("heads", "embed"), "normal", A**-0.5),
        }

    def stack(layers, layer):
        stacked = jax.tree.map(
            lambda p: p._replace(shape=(layers, *p.shape), axes=("layers", *p.axes)),
            layer,
            is_leaf=is_param,
        )
        return {"layers": stacked, "norm": norm} | ({} if cfg.layer_biases else bias)

    bias = {
        "relative_bias": Param(
            (H, R), ("heads", "buckets"), "uniform", (6 / (H + R)) ** 0.5
        )
    }
    own = bias if cfg.layer_biases else {}
    table = {
        "embed": Param((V, D), ("vocab", "embed"), "normal", 1.0),
        "encoder": stack(cfg.num_layers, {"attention": attention(**own), "mlp": mlp}),
    }
    if cfg.num_decoder_layers:
        table["decoder"] = stack(
            cfg.num_decoder_layers,
            {
                "self_attention": attention(**own),
                "cross_attention": attention(),
                "mlp": mlp,
            },
        )
        if not cfg.tied:
            table["unembed"] = Param(
                (D, V), ("embed", "vocab"), "truncated_normal", D**-0.5
            )
    return table


def is_param(x):
    return isinstance(x, Param)


def init_params(cfg, key, rules=RULES):
    """Fresh parameters, float32; the same values on every mesh."""

    def draw(p, key):
        layout = spec(p.axes, rules)
        if p.init in ("ones", "zeros"):
            return jnp.full(p.shape, float(p.init == "ones"), out_sharding=layout)
        if p.init == "uniform":
            return jax.random.uniform(
                key, p.shape, minval=-p.scale, maxval=p.scale, out_sharding=layout
            )
        if p.init == "normal":
            return p.scale * jax.random.normal(key, p.shape, out_sharding=layout)
        cut = 0.87962566103423978  # standard deviation of a normal cut off at +-2
        return (
            p.scale
            / cut
            * jax.random.truncated_normal(key, -2, 2, p.shape, out_sharding=layout)
        )

    table, tree = jax.tree.flatten(param_table(cfg), is_leaf=is_param)
    return jax.tree.unflatten(tree, map(draw, table, jax.random.split(key, len(table))))


# ---- building blocks -----------------------------------------------------------------------------

ACTIVATIONS = configs.ACTIVATIONS  # to which a recipe file may add its own
# gelu by tanh
ACTIVATIONS |= {"relu": jax.nn.relu, "gelu": jax.nn.gelu, "silu": jax.nn.silu}


def compute_dtype(cfg):
    """ModelConfig -> the dtype of activations; parameters, statistics, logits, loss are float32."""
    if cfg.dtype == "auto":
        return jnp.float32 if partition.platform() == "cpu" else jnp.bfloat16
    return jnp.dtype(cfg.dtype)


def reshard_for_compute(weights, table):
    """A layer's weights, cast already -> laid out as they compute: FSDP gathers here."""
    return jax.tree.map(
        lambda p, w: jax.reshard(w, spec([a for a in p.axes if a != "layers"])),
        table,
        weights,
        is_leaf=is_param,
    )


def sharding_of(x):
    """The layout of an array, which is part of its type."""
    return jax.typeof(x).sharding.spec


def dense(x, w):
    """x [B, Q, D] @ w [D, F] -> [B, Q, F]. Contracting an axis that is split over "model" sums over
    devices; out_sharding asks for it. On a CPU the product is flat: the gradient of "bqd,df->bqf"
    takes 1.4 times as long; not on a TPU."""
    rows, columns = sharding_of(x)[0], sharding_of(w)[1]
    if partition.platform() != "cpu":
        return product(x, w)
    y = jnp.einsum(
        "nd,df->nf", x.reshape(-1, x.shape[-1]), w, out_sharding=P(rows, columns)
    )
    return y.reshape(*x.shape[:-1], w.shape[1], out_sharding=P(rows, None, columns))


@jax.custom_gradient
def product(x, w):
    """dense, not flat. Its gradient gives that of the weights row by row, as they lie at rest."""

    def gradient(d_y):
        return (
            jnp.einsum("bqf,df->bqd", d_y, w, out_sharding=sharding_of(x)),
            jnp.einsum("bqd,bqf->df", x, d_y, out_sharding=sharding_of(w)),
        )

    rows, columns = sharding_of(x)[0], sharding_of(w)[1]
    return jnp.einsum("bqd,df->bqf", x, w, out_sharding=P(rows, None, columns)), gradient


def rms_norm(x, scale):
    """T5's layer norm: no mean, no bias (Zhang and Sennrich 2019). Statistics in float32."""
    x32 = x.astype(jnp.float32)
    y = x32 * lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + 1e-6)
    return y.astype(x.dtype) * scale


def dropout_mask(key, rate, shape, layout, dtype):
    """1 / (1 - rate) where dropout keeps, 0 where it drops."""
    keep = jax.random.bernoulli(key, 1 - rate, shape, out_sharding=layout)
    return keep.astype(dtype) / (1 - rate)


def dropout(x, rate, key, shared_length=True):
    """x [B, Q, D]; no key, no dropout. T5 drops the same channels at all positions of a row."""
    if key is None or rate == 0:
        return x
    B, Q, D = x.shape
    return x * dropout_mask(
        key, rate, (B, 1 if shared_length else Q, D), sharding_of(x), x.dtype
    )


def split_key(key, n):
    """n keys, or n times None: dropout is off."""
    return (None,) * n if key is None else jax.random.split(key, n)


# ---- attention -----------------------------------------------------------------------------------


def relative_bucket(distance, bidirectional, cfg):
    """Bucket of the bias for a key `distance` positions after the query (NumPy, any shape). The
    nearest have a bucket each, the further ones share logarithmically wider ones up to
    relative_max_distance. The encoder uses half of the buckets for each direction."""
    buckets, bucket = cfg.relative_buckets, 0
    if bidirectional:
        buckets //= 2
        bucket = (distance > 0) * buckets
        distance = np.abs(distance)
    else:
        distance = np.maximum(-distance, 0)
    exact = buckets // 2
    scaled = np.log(np.float32(distance) / exact + np.finfo(np.float32).eps)
    scaled = scaled / np.log(cfg.relative_max_distance / exact) * (buckets - exact)
    far = np.minimum(exact + scaled.astype(np.int32), buckets - 1)
    return bucket + np.where(distance < exact, distance, far)


def relative_bias(w, Q, K, bidirectional, cfg, shared=None):
    """The bias of a stack or a layer that has a table, [H, R] -> float32 [N, H, Q, K]; else the
    shared one. T5's stacks have one table, UMT5's layers one each. N: the parts of the batch, each
    with its copy, whose gradients the layers add up before the devices do."""
    if "relative_bias" not in w:
        return shared
    bucket = relative_bucket(np.arange(K) - np.arange(Q)[:, None], bidirectional, cfg)
    # a product with one-hot rows, because the gradient of a gather is a slow scatter
    one_hot = jax.nn.one_hot(bucket, cfg.relative_buckets, axis=0, dtype=jnp.float32)
    ones = jnp.ones(
        (jax.sharding.get_abstract_mesh().shape["data"], 1, 1), out_sharding=P("data")
    )
    return jnp.einsum("nhr,rqk->nhqk", ones * w["relative_bias"], one_hot)


def attention_mask(query_segments, key_segments, causal=False):
    """[B, Q], [B, K] -> [B, 1, Q, K], whether a query sees a key: within a segment. 0 pads."""
    seen = query_segments[:, None, :, None] == key_segments[:, None, None, :]
    if causal:
        seen &= np.tri(query_segments.shape[1], key_segments.shape[1], dtype=bool)
    return jax.reshard(seen, P("data"))


def split_heads(x, cfg):
    """[B, K, H*C] -> [B, H, K, C]."""
    rows, _, columns = sharding_of(x)
    x = x.reshape(
        *x.shape[:2], cfg.num_heads, cfg.d_kv, out_sharding=P(rows, None, columns, None)
    )
    return x.transpose(0, 2, 1, 3)


def join_heads(x):
    """[B, H, Q, C] -> [B, Q, H*C]."""
    rows, heads, *_ = sharding_of(x)
    B, H, Q, C = x.shape
    return x.transpose(0, 2, 1, 3).reshape(B, Q, H * C, out_sharding=P(rows, None, heads))


def keys_values(w, x, cfg):
    """What attention reads: x [B, K, D] -> keys and values [B, H, K, C]."""
    return split_heads(dense(x, w["key"]), cfg), split_heads(dense(x, w["value"]), cfg)


@jax.custom_vjp
def attend(q, k, v, bias, mask):
    """softmax(q k + bias) v of the keys that are seen: q [B, H, Q, C]; k, v [B, H, K, C]; bias
    [1, H, Q, K] or None; mask [B or 1, 1, Q, K] -> [B, H, Q, C]. A column of ones beside the values
    gives the sum of the exponentials in the same product; from its logarithm the backward pass
    makes the probabilities again (Rabe and Staats 2021)."""
    sums, _ = weighted_sums(masked_scores(q, k, bias, mask), v)
    return (sums[..., :-1] / sums[..., -1:]).astype(v.dtype)


def masked_scores(q, k, bias, mask):
    """-> [B, H, Q, K], summed in float32, rounded to q's dtype; -1e10 where a key is not seen."""
    dtype = (
        q.dtype if partition.platform() == "gpu" else jnp.float32
    )  # a GPU writes them to memory
    scores = jnp.einsum("bhqc,bhkc->bhqk", q, k, preferred_element_type=dtype)
    return jnp.where(mask, scores if bias is None else scores + bias, -1e10).astype(
        q.dtype
    )


def weighted_sums(scores, v):
    """Values times exp(score - top), summed, beside the sum of the exponentials, and top, the
    largest score of each query -> float32 [B, H, Q, C + 1], [B, H, Q, 1]."""
    top = scores.max(-1, keepdims=True).astype(jnp.float32)
    ones = jnp.ones((*v.shape[:-1], 1), v.dtype)
    return jnp.einsum(
        "bhqk,bhkc->bhqc",
        jnp.exp(scores - top).astype(v.dtype),
        jnp.concatenate([v, ones], -1),
        preferred_element_type=jnp.float32,
    ), top


@jax.named_scope("attention")
def attention(w, x, keys_values, bias, mask, cfg, key=None, attend=attend):
    """Multi-head attention, with its dropout: x [B, Q, D] (normalized) -> [B, Q, D]."""
    key_probabilities, key_out = split_key(key, 2)
    k, v = keys_values
    if key is not None and cfg.dropout:
        # T5 drops a key for all queries at once; that is the same as dropping its value
        v = v * dropout_mask(
            key_probabilities, cfg.dropout, (*v.shape[:-1], 1), sharding_of(v), v.dtype
        )
    # a device has rows and heads of its own
    attend = jax.shard_map(attend, out_specs=sharding_of(v))
    out = join_heads(attend(split_heads(dense(x, w["query"]), cfg), k, v, bias, mask))
    return dropout(dense(out, w["out"]), cfg.dropout, key_out)


@jax.named_scope("mlp")
def mlp(w, x, cfg, key=None):
    """Feed-forward layer, with its dropout: x [B, Q, D] (normalized) -> [B, Q, D]."""
    key_hidden, key_out = split_key(key, 2)
    activate = ACTIVATIONS[cfg.activation.removeprefix("gated_")]
    # a TPU writes the gradients behind the barrier, instead of making them twice
    if "gate" in w:
        gate, up = lax.optimization_barrier((dense(x, w["gate"]), dense(x, w["up"])))
        hidden = activate(gate) * up
    else:
        hidden = activate(dense(x, w["up"]))
    return dropout(
        dense(dropout(hidden, cfg.dropout, key_hidden), w["down"]), cfg.dropout, key_out
    )


# ---- encoder and decoder -------------------------------------------------------------------------


def embed(params, ids, cfg, key):
    """ids [B, Q] -> [B, Q, D], not scaled; read in float32, so that the gradient sums in it."""
    table = jax.reshard(params["embed"], spec(("vocab", "embed")))
    x = table.at[ids].get(out_sharding=P("data", None, None)).astype(compute_dtype(cfg))
    return dropout(x, cfg.dropout, key)


def run_layers(layer, x, name, params, cfg, key):
    """x [B, Q, D] through all of a stack's layers, as one compiled loop body -> [B, Q, D]. name:
    encoder or decoder; layer(weights, x, key) -> x. Except on a CPU, layers of sizes up to large
    stand one after the other, without the copies of what a loop takes apart. What the backward pass
    finds kept is cfg.remat: "dots" keeps products with weights, which cost the time, but scores,
    which cost the memory, only as attend_in_groups says; "full" keeps attention's results alone."""
    # all layers are cast at once: loop, gathers and gradients then move half the bytes
    table, weights = (
        param_table(cfg)[name]["layers"],
        jax.tree.map(lambda w: w.astype(compute_dtype(cfg)), params[name]["layers"]),
    )
    depth = len(jax.tree.leaves(weights)[0])
    keys = None if key is None else jax.random.split(key, depth)
    unroll = partition.platform() != "cpu" and depth <= 24 and cfg.d_model <= 1024
    policies, named = (
        jax.checkpoint_policies,
        jax.checkpoint_policies.save_only_these_names,
    )
    policy = {
        "none": lambda primitive, *_, **__: primitive.name != "reshard",
        "dots": policies.save_from_both_policies(
            policies.dots_with_no_batch_dims_saveable, named("attended", "read")
        ),
        "full": named("attended"),
    }[cfg.remat]
    # what is made again stands behind a barrier, else XLA would keep it; whole weights pass it by
    whole = cfg.remat != "full" and "data" not in sharding_of(weights["mlp"]["up"])
    run = jax.checkpoint(
        lambda x, weights, key: layer(reshard_for_compute(weights, table), x, key),
        policy=policy,
        prevent_cse=(unroll, False, False) if whole else unroll,
    )

    # both passes use a layer's weights, cut out of the stack once
    def body(x, weights_and_key):
        weights, key = weights_and_key
        return run(x, lax.optimization_barrier(weights) if unroll else weights, key), None

    return lax.scan(body, x, (weights, keys), unroll=unroll)[0]


def encode(params, cfg, inputs, segments, key=None):
    """inputs, segments [B, S] -> [B, S, D]. key: of dropout, None for none."""
    key_embed, key_layers, key_end = split_key(key, 3)
    stack, S = params["encoder"], inputs.shape[1]
    shared = relative_bias(stack, S, S, True, cfg)
    mask = attention_mask(segments, segments)

    def layer(w, x, key):
        key_attention, key_mlp = split_key(key, 2)
        h = rms_norm(x, w["attention"]["norm"])
        kv = keys_values(w["attention"], h, cfg)
        bias = relative_bias(w["attention"], S, S, True, cfg, shared)
        x += attention(w["attention"], h, kv, bias, mask, cfg, key_attention)
        return x + mlp(w["mlp"], rms_norm(x, w["mlp"]["norm"]), cfg, key_mlp)

    x = embed(params, inputs, cfg, key_embed)
    x = run_layers(layer, x, "encoder", params, cfg, key_layers)
    return dropout(final_norm(x, stack), cfg.dropout, key_end, shared_length=False)


def final_norm(x, stack):
    return rms_norm(x, jax.reshard(stack["norm"], P()).astype(x.dtype))


def decoder_layer(
    w, x, h, own, bias, self_mask, cross, cross_mask, cfg, key=None, attend=attend
):
    """One decoder layer: x [B, T, D], h its norm, own and cross: keys and values -> [B, T, D]."""
    key_self, key_cross, key_mlp = split_key(key, 3)
    x += attention(w["self_attention"], h, own, bias, self_mask, cfg, key_self, attend)
    h = rms_norm(x, w["cross_attention"]["norm"])
    x += attention(
        w["cross_attention"], h, cross, None, cross_mask, cfg, key_cross, attend
    )
    return x + mlp(w["mlp"], rms_norm(x, w["mlp"]["norm"]), cfg, key_mlp)


def decode(params, cfg, decoder_inputs, segments, encoded, input_segments, key=None):
    """All positions at once: decoder_inputs, segments [B, T], encoded [B, S, D] -> [B, T, D]."""
    key_embed, key_layers, key_end = split_key(key, 3)
    stack, T = params["decoder"], decoder_inputs.shape[1]
    shared = relative_bias(stack, T, T, False, cfg)
    self_mask = attention_mask(segments, segments, causal=True)
    cross_mask = attention_mask(segments, input_segments)

    def layer(w, x, key):
        h = rms_norm(x, w["self_attention"]["norm"])
        own = keys_values(w["self_attention"], h, cfg)
        bias = relative_bias(w["self_attention"], T, T, False, cfg, shared)
        cross = keys_values(w["cross_attention"], encoded, cfg)
        return decoder_layer(w, x, h, own, bias, self_mask, cross, cross_mask, cfg, key)

    x = embed(params, decoder_inputs, cfg, key_embed)
    x = run_layers(layer, x, "decoder", params, cfg, key_layers)
    return dropout(final_norm(x, stack), cfg.dropout, key_end)


@jax.named_scope("logits and loss")
def unembed(params, cfg, x):
    """x [B, T, D] -> logits [B, T, V]; operands and product float32, whatever the model's dtype."""
    name, axes = (
        ("embed", ("vocab", "embed")) if cfg.tied else ("unembed", ("embed", "vocab"))
    )
    # a barrier for the gradients too: both are made at once, then the logits' memory is free
    x, w = lax.optimization_barrier(
        (x.astype(jnp.float32), jax.reshard(params[name], spec(axes)))
    )
    # T5 1.0 ties them
    return dense(x, w.T) * cfg.d_model**-0.5 if cfg.tied else dense(x, w)


def forward(params, batch, cfg, key=None):
    """The whole model, teacher-forced: ModelConfig, Batch -> logits [B, T, V], float32."""
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


# ---- loss ----------------------------------------------------------------------------------------


@jax.named_scope("logits and loss")
def cross_entropy(logits, targets, z_loss=0.0, label_smoothing=0.0):
    """logits [B, T, V] float32, targets [B, T] -> (cross entropy, z-loss, whether the likeliest id
    is the target), each [B, T], in nats. z_loss * log(Z)^2 keeps the logits from drifting. With
    label smoothing the target has probability 1 - label_smoothing, the others share the rest, and
    the entropy of that distribution is subtracted, so that a perfect prediction costs nothing
    (t5x/losses.py)."""
    logits, targets = jax.reshard(
        (logits, targets), (P("data", None, "model"), P("data", None))
    )
    V = logits.shape[-1]
    top = lax.stop_gradient(logits.max(-1))
    log_z = top + jnp.log(jnp.exp(logits - top[..., None]).sum(-1))
    # comparisons, not gathers, whose gradient would be a slow scatter; sums alone share a pass
    column = lax.broadcasted_iota(
        jnp.int32, logits.shape, 2, out_sharding=sharding_of(logits)
    )
    target = targets[..., None]
    expected = jnp.where(column == target, logits, 0).sum(-1)
    earlier = jnp.where((column < target) & (logits == top[..., None]), 1.0, 0.0).sum(-1)
    correct = (expected == top) & (earlier == 0)  # of equal logits argmax takes the first
    constant = 0.0
    if label_smoothing:
        on, off = 1 - label_smoothing, label_smoothing / (V - 1)
        expected = (on - off) * expected + off * logits.sum(-1)
        constant = -(on * math.log(on) + (V - 1) * off * math.log(off + 1e-20))
    return log_z - expected - constant, z_loss * log_z**2, correct


def token_losses(params, batch, cfg, key=None):
    """Config, Batch -> cross entropy, z-loss (nats), whether argmax is the target: each [B, T]."""
    logits = forward(params, batch, cfg.model, key)
    return cross_entropy(
        logits, batch.targets, cfg.train.z_loss, cfg.train.label_smoothing
    )


def sum_over_tokens(losses, batch):
    """Sum the three results of token_losses over the real target tokens of a batch.

    Segment 0 marks padding, which does not count. Returns {cross_ent_loss, z_loss, correct,
    tokens}, each a float32 scalar; mean_metrics divides them.
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
    """Divide sums over tokens by the number of tokens: losses in nats per token, accuracy 0-1."""
    tokens = jnp.maximum(sums["tokens"], 1)
    return {
        "loss": (sums["cross_ent_loss"] + sums["z_loss"]) / tokens,
        "cross_ent_loss": sums["cross_ent_loss"] / tokens,
        "z_loss": sums["z_loss"] / tokens,
        "accuracy": sums["correct"] / tokens,
    }


def loss_fn(params, batch, cfg, key=None):
    """Return the loss, summed over the batch's real target tokens, and the sums behind it.

    The loss is cross entropy plus z-loss in nats. It is a sum, not a mean: the caller
    normalizes it by the number of tokens.
    """
    sums = sum_over_tokens(token_losses(params, batch, cfg, key), batch)
    return sums["cross_ent_loss"] + sums["z_loss"], sums


# ====== below: attention's gradient, sizes, the command ===========================================


def count_groups(q, k):
    """On v5e and v6e so many that 48 MB of scores a group stay in fast memory; elsewhere one."""
    B, H, Q, _ = q.shape
    lite = "lite" in jax.sharding.get_abstract_mesh().abstract_device.device_kind
    size = lite * B * H * Q * k.shape[2] * q.dtype.itemsize
    return next((n for n in range(1, H) if H % n == 0 and size <= n * 48e6), H)


def attend_in_groups(q, k, v, bias, mask):
    """attend, a group of heads after the other, and what the backward pass needs: on a TPU also
    self-attention's scores, but not of groups, which never leave fast memory (cross-attention's are
    5 % of a step's memory for 1 % of its time). Names stand behind all use: what has one would be
    copied where it is used; equal scores are made once."""
    n = count_groups(q, k)
    queries, biases = heads_apart(q, n), heads_apart(bias, n)
    # as the scores lie, or each layer would turn them around
    if n > 1 and bias is not None:
        biases = [with_layout_constraint(x, Layout((0, 1, 3, 2))) for x in biases]
    sums, top = in_turn(
        lambda q, k, v, bias: weighted_sums(masked_scores(q, k, bias, mask), v),
        [*zip(queries, heads_apart(k, n), heads_apart(v, n), biases)],
    )
    out = checkpoint_name((sums[..., :-1] / sums[..., -1:]).astype(v.dtype), "attended")
    log_sum = checkpoint_name(top + jnp.log(sums[..., -1:]), "attended")
    kept = n == 1 and bias is not None and partition.platform() == "tpu"
    scores = masked_scores(q, k, bias, mask) if kept else None
    read = jax.tree.map(
        lambda x: checkpoint_name(x, "read"), (queries, k, v, biases, scores)
    )
    return out, (read, mask, out, log_sum)


def heads_apart(x, n):
    """[B, H, ...] -> n arrays [B, H/n, ...]; None -> n of them."""
    return [None] * n if x is None else jnp.split(x, n, 1)


def in_turn(step, groups):
    """step(*group) -> [B, H/n, ...] arrays of each group of heads, begun when the one before is
    done, which the barrier says, and written where it belongs -> [B, H, ...]: none is copied."""
    n, whole = len(groups), None
    for i, (first, *others) in enumerate(groups):
        if i:
            first, whole = lax.optimization_barrier((first, whole))
        parts = step(first, *others)
        if n == 1:
            return parts
        whole = whole or jax.tree.map(
            lambda x: lax.empty((x.shape[0], n * x.shape[1], *x.shape[2:]), x.dtype),
            parts,
        )
        whole = jax.tree.map(
            lambda x, part: lax.dynamic_update_slice_in_dim(
                x, part, i * part.shape[1], 1
            ),
            whole,
            parts,
        )
    return whole


def attend_backward(kept, d_out):
    """What attend_in_groups kept, gradient of its result -> those of its arguments."""
    (queries, k, v, biases, scores), mask, out, log_sum = kept
    apart = (heads_apart(x, len(queries)) for x in (k, v, out, log_sum, d_out))
    return *in_turn(
        lambda *group: group_backward(*group, mask, scores),
        [*zip(queries, *apart, biases)],
    ), None


def group_backward(q, k, v, out, log_sum, d_out, bias, mask, scores):
    p = jnp.exp((masked_scores(q, k, bias, mask) if scores is None else scores) - log_sum)
    d_p = jnp.einsum("bhqc,bhkc->bhqk", d_out, v, preferred_element_type=jnp.float32)
    inner = jnp.einsum("bhqc,bhqc->bhq", d_out, out, preferred_element_type=jnp.float32)
    d_scores = (p * (d_p - inner[..., None])).astype(v.dtype)
    # over the batch; by a product with ones a CPU is forty times as fast
    d_bias = (
        jnp.einsum(
            "ab,bhqk->ahqk",
            jnp.ones((1, len(q)), v.dtype),
            d_scores,
            preferred_element_type=jnp.float32,
        )
        if partition.platform() == "cpu"
        else d_scores.astype(jnp.float32).sum(0, keepdims=True)
    )
    return (
        jnp.einsum("bhqk,bhkc->bhqc", d_scores, k),
        jnp.einsum("bhqk,bhqc->bhkc", d_scores, q),
        jnp.einsum("bhqk,bhqc->bhkc", p.astype(v.dtype), d_out),
        None if bias is None else d_bias,
    )


attend.defvjp(attend_in_groups, attend_backward)


def count_params(table):
    """Number of parameters of a table, or of a part of one."""
    return sum(math.prod(p.shape) for p in jax.tree.leaves(table, is_leaf=is_param))


def train_flops(cfg, S, T):
    """Floating-point operations to train on one example of S inputs and T targets. Every matrix
    product, forward once and backward twice; what is computed again is not counted."""
    D, F, A = cfg.d_model, cfg.d_ff, cfg.num_heads * cfg.d_kv
    matrices = 3 if cfg.activation.startswith("gated_") else 2
    encoder = S * (4 * D * A + matrices * D * F) + 2 * S * S * A
    decoder = (
        T * (6 * D * A + matrices * D * F) + S * 2 * D * A + 2 * T * T * A + 2 * T * S * A
    )
    forward = (
        cfg.num_layers * encoder
        + cfg.num_decoder_layers * decoder
        + T * D * cfg.vocab_size
    )
    return 3 * 2 * forward


def minimum_memory(cfg, rows, S, T, copies=1, beams=0):
    """ModelConfig -> {what: bytes} that rows of S inputs and T targets hold at the very least.
    copies: of the parameters, in float32. beams: of cached decoding; 0: a whole forward pass."""
    size, A = jnp.dtype(compute_dtype(cfg)).itemsize, cfg.num_heads * cfg.d_kv
    lengths = S * S, *([] if beams else [S * T, T * T])
    return {
        "parameters": 4 * copies * count_params(param_table(cfg)),
        "attention scores of a layer": size * rows * cfg.num_heads * max(lengths),
        "position biases": 4
        * (cfg.num_heads + cfg.relative_buckets + 4)
        * max(S, T) ** 2,
        "a layer's activations": size * rows * S * max(cfg.d_ff, cfg.d_model),
        "cached keys and values": 2
        * size
        * rows
        * cfg.num_decoder_layers
        * A
        * (S + beams * T)
        if beams
        else 0,
        "logits": 4 * rows * (beams or T) * cfg.vocab_size,
    }


def describe_model(cfg):
    """Config -> one line: how many parameters, and where, and what an example costs."""
    table, lengths = (
        param_table(cfg.model),
        (cfg.data.inputs_length, cfg.data.targets_length),
    )
    parts = ", ".join(f"{name} {count_params(part):,}" for name, part in table.items())
    flops = train_flops(cfg.model, *lengths) / 1e9
    return (
        f"{count_params(table):,} parameters ({parts}); {flops:.5g} GFLOP to train on one "
        f"example of {lengths[0]} + {lengths[1]} tokens"
    )


def main(argv):
    args, changes = parse_args(__doc__, argv)
    cfg = resolve(args, changes)
    table = param_table(cfg.model)
    print(f"{'parameter':44} {'shape':20} {'axes':22} {'initial':>24} {'number':>14}")
    for path, p in jax.tree_util.tree_leaves_with_path(table, is_leaf=is_param):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        initial = p.init if p.init == "ones" else f"{p.init} {p.scale:.4g}"
        print(
            f"{name:44} {' x '.join(map(str, p.shape)):20} {' '.join(p.axes):22} {initial:>24} "
            f"{math.prod(p.shape):>14,}"
        )
    print("\n" + describe_model(cfg))


if __name__ == "__main__":
    run_command(main)
