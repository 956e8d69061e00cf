"""T5 1.1 as functions: parameters, encoder, decoder, logits and loss.

A model is a ModelConfig and a nested dict of float32 arrays. `forward` computes the
logits of a Batch of token ids, and `loss_fn` computes the training loss.

    python model.py --config small_c4     print the shape of every parameter

The equations follow Raffel et al. 2020 (arXiv:1910.10683), section 2.1, with the changes
of version 1.1: a gated GELU, an output matrix besides the embedding matrix, and no
dropout in pretraining. In float32, logits and losses equal those of T5X
(t5x/examples/t5/network.py). In bfloat16, T5X also rounds the position biases and the
attention scores, which are float32 here. (The biases of UMT5, and those that the kernel
for GPUs gets, are rounded, too.)

Comments and einsums use these letters for the shapes:

    B batch      Q query position    K key position    S input length    T target length
    D d_model    H heads             C d_kv, channels of a head          F d_ff
    A H * C      V vocabulary        L layers            R buckets of relative positions

`batch` is a data.Batch, `w` the weights of a layer or of its attention or MLP, `attend` a
function (q, k, v), and `rng` a random key for dropout, or None outside of training.

To follow the equations, read constrain(x, ...) as x, dense(x, w) as x @ w,
on_each_device(f, ...) as f(...), and apply_layers(layer, x, ...) as
`for w, rng in layers: x = layer(w, x, rng)`.

    >>> from configs import RECIPES
    >>> count_params(param_table(RECIPES["small_c4"].model))
    76961152
"""

import math
from dataclasses import dataclass, replace
from typing import Callable, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax import checkpoint_policies as policies
from jax.sharding import get_abstract_mesh

import configs
import partition
from configs import Config, ModelConfig, UserError
from partition import constrain, spec

# ---- parameters ------------------------------------------------------------------------


@dataclass(frozen=True)
class Param:
    """The shape of a parameter, the names of its axes, and how it is initialized.

    jax.tree treats it as a leaf.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]  # partition.spec maps a name to a mesh axis, or to none
    init: Literal["ones", "normal", "truncated_normal", "uniform"] = "ones"
    scale: float = 1.0  # the standard deviation, or the bound of "uniform"


def param_table(model_cfg: ModelConfig) -> dict:
    """List all parameters as a nested dict of Params.

    Initialization, sharding, checkpoints and conversion read this table. The weights of
    all layers are stacked in one array: with 8 layers, (512, 384) becomes (8, 512, 384).
    """
    D, F, V = model_cfg.d_model, model_cfg.d_ff, model_cfg.vocab_size
    H, C, R = model_cfg.num_heads, model_cfg.d_kv, model_cfg.relative_buckets
    A = H * C
    norm = Param((D,), ("embed",))

    # As in T5X, the variance is 1 / inputs. T5 does not divide attention scores by
    # sqrt(C). Instead, its initial query weights are smaller by this factor.
    attn = {
        "norm": norm,
        "query": Param((D, A), ("embed", "heads"), "normal", (D * C) ** -0.5),
        "key": Param((D, A), ("embed", "heads"), "normal", D**-0.5),
        "value": Param((D, A), ("embed", "heads"), "normal", D**-0.5),
        "out": Param((A, D), ("heads", "embed"), "normal", A**-0.5),
    }
    up = Param((D, F), ("embed", "mlp"), "truncated_normal", D**-0.5)
    down = Param((F, D), ("mlp", "embed"), "truncated_normal", F**-0.5)
    mlp = {"norm": norm, "up": up, "down": down}
    if model_cfg.gated:
        mlp["gate"] = up  # gate, up and down are wi_0, wi_1 and wo in other code

    # the initialization of Glorot and Bengio 2010
    bias = Param((H, R), ("heads", "buckets"), "uniform", (6 / (H + R)) ** 0.5)
    # All layers of a stack share one table of position biases. In UMT5, each has its own.
    per_layer = {"relative_bias": bias} if model_cfg.per_layer_bias else {}
    per_stack = {} if model_cfg.per_layer_bias else {"relative_bias": bias}

    def stacked(depth, layer):
        def add_axis(p):
            return replace(p, shape=(depth, *p.shape), axes=("layers", *p.axes))

        return {"layers": jax.tree.map(add_axis, layer), "norm": norm, **per_stack}

    in_encoder = {"attention": attn | per_layer, "mlp": mlp}
    in_decoder = {"self_attention": attn | per_layer, "cross_attention": attn, "mlp": mlp}
    table = {
        "embed": Param((V, D), ("vocab", "embed"), "normal"),
        "encoder": stacked(model_cfg.num_layers, in_encoder),
    }
    if model_cfg.num_decoder_layers:  # 0 for a model that only encodes
        table["decoder"] = stacked(model_cfg.num_decoder_layers, in_decoder)
        if not model_cfg.tied:  # T5 1.0 uses the embedding matrix as output matrix
            unembed = Param((D, V), ("embed", "vocab"), "truncated_normal", D**-0.5)
            table["unembed"] = unembed
    return table


def init_params(model_cfg: ModelConfig, rng: Array) -> dict:
    """Sample the initial parameters. The samples do not depend on the number of devices.

    "truncated_normal" is cut at two standard deviations, and then scaled so that its
    standard deviation is the `scale` of the Param, as in T5X.
    """

    def sample(p, rng):
        if p.init == "ones":
            return jnp.ones(p.shape)
        if p.init == "uniform":
            return jax.random.uniform(rng, p.shape, minval=-p.scale, maxval=p.scale)
        if p.init == "normal":
            return p.scale * jax.random.normal(rng, p.shape)
        samples = jax.random.truncated_normal(rng, -2, 2, p.shape)
        std_of_samples = 0.87962566103423978
        return p.scale / std_of_samples * samples

    leaves, structure = jax.tree.flatten(param_table(model_cfg))
    rngs = jax.random.split(rng, len(leaves))
    return jax.tree.unflatten(structure, map(sample, leaves, rngs))


# ---- building blocks -------------------------------------------------------------------


def rms_norm(x: Array, scale: Array) -> Array:
    """Divide vectors by their root mean square, and multiply by a learned scale [D].

    Zhang and Sennrich 2019. T5 subtracts no mean and adds no bias.
    """
    x32 = x.astype(jnp.float32)
    y = x32 * lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + 1e-6)
    return y.astype(x.dtype) * scale.astype(x.dtype)


def dropout(x: Array, rate: float, rng, broadcast_axis: int | None = 1) -> Array:
    """Set random entries of x to zero, and scale up the others. If rng is None, return x.

    T5 has dropout at both ends of encoder and decoder, on the probabilities of attention,
    in the MLP, and before residual additions. All entries along the broadcast_axis share
    a draw: as in T5X, a channel is dropped at all positions of a row. With None, each
    entry has its own draw, as in T5X after the last norm of the encoder.
    """
    if rng is None or rate == 0:
        return x
    shape = [1 if i == broadcast_axis else size for i, size in enumerate(x.shape)]
    keep = jax.random.bernoulli(rng, 1 - rate, shape)
    return x * (keep.astype(x.dtype) / (1 - rate))


def split_rng(rng, n: int):
    """Split a random key into n. None gives n Nones."""
    return (None,) * n if rng is None else jax.random.split(rng, n)


# ---- attention -------------------------------------------------------------------------
# encode, decode                make masks, and a function attend(q, k, v) for each layer
#   make_attend                 returns it
#   attention                   projects to heads, attends, projects back
#     attend                    does the next two on each device
#       position_bias           looks up a learned bias for the bucket of each distance
#       dot_product_attention   softmax(q k^T + bias) v


def relative_bucket(
    relative_position: np.ndarray, bidirectional: bool, model_cfg: ModelConfig
) -> np.ndarray:
    """Map relative positions (key minus query) to the buckets of T5.

    Small distances have a bucket each. Larger distances share buckets that become wider
    exponentially up to relative_max_distance. In the encoder (bidirectional), half of
    the buckets are for later keys. In the decoder, later keys are masked.
    """
    num_buckets, offset = model_cfg.relative_buckets, 0
    distance = np.maximum(-relative_position, 0)
    if bidirectional:
        num_buckets //= 2
        offset = (relative_position > 0) * num_buckets
        distance = np.abs(relative_position)
    max_exact = num_buckets // 2
    if not 0 < max_exact < model_cfg.relative_max_distance:
        raise UserError(
            "--model.relative_buckets must be at least 4, and relative_max_distance more "
            "than half of them."
        )
    log_ratio = np.log(np.maximum(distance, 1) / max_exact)
    fraction = log_ratio / np.log(model_cfg.relative_max_distance / max_exact)
    # 1e-6: the rounding of log must not move an integer to the bucket below.
    large = max_exact + (fraction * (num_buckets - max_exact) + 1e-6).astype(np.int32)
    large = np.minimum(large, num_buckets - 1)
    return offset + np.where(distance < max_exact, distance, large)


def relative_bias_of(stack: dict, w: dict, model_cfg: ModelConfig) -> Array:
    """Return the position biases [H, R] of a layer: its own in UMT5, else its stack's."""
    return (w if model_cfg.per_layer_bias else stack)["relative_bias"]


def position_bias(
    relative_bias: Array, Q: int, K: int, bidirectional: bool, model_cfg: ModelConfig
) -> Array:
    """Return the bias [H, Q, K] that is added to the attention scores.

    relative_bias [H, R]: the learned bias of each head and bucket. Each layer computes
    the bias again. So devices that share a batch sum gradients [H, R], and not [H, Q, K].
    """
    relative_position = np.arange(K) - np.arange(Q)[:, None]
    bucket = relative_bucket(relative_position, bidirectional, model_cfg)
    # The bias is relative_bias[:, bucket], as a product, whose gradient is faster.
    one_hot = jax.nn.one_hot(bucket, model_cfg.relative_buckets, axis=0)
    return jnp.einsum("hr,rqk->hqk", relative_bias.astype(jnp.float32), one_hot)


def attention_mask(query_segments: Array, key_segments: Array, causal=False) -> Array:
    """Return a mask [B, 1, Q, K] that is 1 where a query may attend to a key.

    A query attends only to keys of its own example. The segments number the examples of a
    row: [1, 1, 2, 0] means two tokens of example 1, one of example 2, and padding, which
    attends to padding. With `causal`, a query attends to no later position.
    """
    mask = query_segments[:, None, :, None] == key_segments[:, None, None, :]
    if causal:
        mask &= np.tri(*mask.shape[2:], dtype=bool)
    # bool would do, but the TPU's kernel needs int8. Cast here, and not in each layer.
    return mask.astype(jnp.int8)


def dot_product_attention(
    q: Array, k: Array, v: Array, mask: Array, bias: Array | None = None, impl="xla"
) -> Array:
    """Compute softmax(q k^T + bias) v for all heads, with a softmax in float32.

    The scores are not divided by sqrt(C): param_table scales the query weights instead.
    q [B, H, Q, C], k and v [B, H, K, C], mask [B, 1, Q, K], bias [H, Q, K] or
    [B, H, Q, K] or None. impl: as model_cfg.attention_impl.
    """
    if impl == "kernel":
        # A kernel knows only the equation below: to change it, delete this `if` as well.
        from extras import attention_kernel

        if attention_kernel.fits(q, k, mask, bias):
            return attention_kernel.attend(q, k, v, mask, bias)
    scores = jnp.einsum("bhqc,bhkc->bhqk", q, k, preferred_element_type=jnp.float32)
    if bias is not None:
        scores += bias
    # Not -inf: where all keys are masked, which is padding, a softmax would be NaN.
    probs = jax.nn.softmax(jnp.where(mask, scores, -1e10), axis=-1)
    return jnp.einsum("bhqk,bhkc->bhqc", probs.astype(v.dtype), v)


def make_attend(
    mask: Array, relative_bias, model_cfg: ModelConfig, bidirectional=False
) -> Callable:
    """Return the function attend(q, k, v) of a layer.

    relative_bias [H, R]: the learned position biases, or None in cross-attention.
    """
    impl = resolve_auto(model_cfg).attention_impl

    def attend_here(q, k, v, mask, relative_bias):
        bias = None
        if relative_bias is not None:
            bias = position_bias(relative_bias, *mask.shape[2:], bidirectional, model_cfg)
        return dot_product_attention(q, k, v, mask, bias, impl)

    def attend(q, k, v):
        # on_each_device splits arguments, so mask and bias are not taken from outside.
        return on_each_device(attend_here, q, k, v, mask, relative_bias)

    return attend


def split_heads(x: Array, model_cfg: ModelConfig) -> Array:
    """Split activations into heads: [B, K, A] becomes [B, H, K, C]."""
    x = constrain(x, "batch", None, "heads")
    return x.reshape(*x.shape[:2], model_cfg.num_heads, model_cfg.d_kv).swapaxes(1, 2)


def keys_values(w: dict, x: Array, model_cfg: ModelConfig) -> tuple[Array, Array]:
    """Project activations [B, K, D] to keys and values, both [B, H, K, C]."""
    k, v = dense(x, w["key"]), dense(x, w["value"])
    return split_heads(k, model_cfg), split_heads(v, model_cfg)


def attention(
    w: dict, x: Array, attend: Callable, model_cfg: ModelConfig, rng=None, kv=None
) -> Array:
    """Compute multi-head attention for normalized activations x [B, Q, D].

    attend: what make_attend returns, or in decoding a function with a cache.
    kv: in cross-attention, the keys and values of the encoder's output.
    """
    rng_probs, rng_out = split_rng(rng, 2)
    k, v = kv or keys_values(w, x, model_cfg)
    q = split_heads(dense(x, w["query"]), model_cfg)
    # T5X drops a key for all queries of a head at once. Setting the value of this key to
    # zero has the same effect as dropping the probability, and needs a smaller mask.
    v = dropout(v, model_cfg.dropout, rng_probs, broadcast_axis=3)
    attended = attend(q, k, v).swapaxes(1, 2).reshape(*x.shape[:2], -1)  # [B, Q, A]
    out = constrain(dense(attended, w["out"]), "batch")
    return dropout(out, model_cfg.dropout, rng_out)


def mlp(w: dict, x: Array, model_cfg: ModelConfig, rng=None) -> Array:
    """Compute (gelu(x @ gate) * (x @ up)) @ down, or relu(x @ up) @ down."""
    rng_hidden, rng_out = split_rng(rng, 2)
    # Like T5X, jax.nn.gelu computes the tanh approximation of GELU.
    activation = getattr(jax.nn, model_cfg.activation.removeprefix("gated_"))
    up = dense(x, w["up"])
    if "gate" in w:  # in T5 1.1 (Shazeer 2020), not in T5 1.0
        hidden = activation(dense(x, w["gate"])) * up
    else:
        hidden = activation(up)
    hidden = constrain(hidden, "batch", None, "mlp")
    hidden = dropout(hidden, model_cfg.dropout, rng_hidden)
    out = constrain(dense(hidden, w["down"]), "batch")
    return dropout(out, model_cfg.dropout, rng_out)


# ---- encoder and decoder ---------------------------------------------------------------


def embed_tokens(params: dict, ids: Array, model_cfg: ModelConfig, rng=None) -> Array:
    """Look up the embedding vector of each token id [B, Q]. T5 does not scale them."""
    # Cast after the lookup: the gradient sums over the occurrences of a token in float32.
    x = params["embed"][ids].astype(resolve_auto(model_cfg).dtype)
    return dropout(constrain(x, "batch"), model_cfg.dropout, rng)


def encoder_layer(w: dict, x: Array, attend, model_cfg: ModelConfig, rng=None) -> Array:
    """Apply self-attention and MLP to activations [B, S, D]."""
    rng_self, rng_mlp = split_rng(rng, 2)
    h = rms_norm(x, w["attention"]["norm"])
    x += attention(w["attention"], h, attend, model_cfg, rng_self)
    h = rms_norm(x, w["mlp"]["norm"])
    return x + mlp(w["mlp"], h, model_cfg, rng_mlp)


def encode(
    params: dict, inputs: Array, segments: Array, model_cfg: ModelConfig, rng=None
) -> Array:
    """Run the encoder on token ids [B, S]. Returns [B, S, D].

    segments [B, S]: the number of each token's example in its row, or 0 for padding.
    """
    rng_embed, rng_layers, rng_out = split_rng(rng, 3)
    mask = attention_mask(segments, segments)

    def layer(w, x, rng):
        bias = relative_bias_of(params["encoder"], w["attention"], model_cfg)
        attend = make_attend(mask, bias, model_cfg, bidirectional=True)
        return encoder_layer(w, x, attend, model_cfg, rng)

    x = embed_tokens(params, inputs, model_cfg, rng_embed)
    x = apply_layers(layer, x, "encoder", params, model_cfg, rng_layers)
    x = rms_norm(x, params["encoder"]["norm"])
    return dropout(x, model_cfg.dropout, rng_out, broadcast_axis=None)


def decoder_layer(
    w: dict, x: Array, cross_kv, attend, cross_attend, model_cfg: ModelConfig, rng=None
) -> Array:
    """Apply self-attention, cross-attention and MLP to activations [B, T, D].

    cross_kv: the keys and values of the encoder's output. In infer.py, `attend` also sees
    the keys and values of earlier tokens.
    """
    rng_self, rng_cross, rng_mlp = split_rng(rng, 3)
    h = rms_norm(x, w["self_attention"]["norm"])
    x += attention(w["self_attention"], h, attend, model_cfg, rng_self)
    h = rms_norm(x, w["cross_attention"]["norm"])
    x += attention(w["cross_attention"], h, cross_attend, model_cfg, rng_cross, cross_kv)
    h = rms_norm(x, w["mlp"]["norm"])
    return x + mlp(w["mlp"], h, model_cfg, rng_mlp)


def decode(
    params: dict, batch, encoded: Array, model_cfg: ModelConfig, rng=None
) -> Array:
    """Run the decoder on all target positions of a data.Batch. Returns [B, T, D].

    With teacher forcing, its inputs are the targets shifted right by one.
    encoded [B, S, D]: the output of the encoder.
    """
    rng_embed, rng_layers, rng_out = split_rng(rng, 3)
    segments = batch.target_segments
    mask = attention_mask(segments, segments, causal=True)
    cross_mask = attention_mask(segments, batch.input_segments)
    cross_attend = make_attend(cross_mask, None, model_cfg)

    def layer(w, x, rng):
        bias = relative_bias_of(params["decoder"], w["self_attention"], model_cfg)
        attend = make_attend(mask, bias, model_cfg)
        cross_kv = keys_values(w["cross_attention"], encoded, model_cfg)
        return decoder_layer(w, x, cross_kv, attend, cross_attend, model_cfg, rng)

    x = embed_tokens(params, batch.decoder_inputs, model_cfg, rng_embed)
    x = apply_layers(layer, x, "decoder", params, model_cfg, rng_layers)
    return final_norm(params, x, model_cfg, rng_out)


def final_norm(params: dict, x: Array, model_cfg: ModelConfig, rng=None) -> Array:
    """Normalize the activations [B, T, D] after the last layer of the decoder."""
    return dropout(rms_norm(x, params["decoder"]["norm"]), model_cfg.dropout, rng)


def compute_logits(params: dict, x: Array, model_cfg: ModelConfig) -> Array:
    """Compute float32 logits [B, T, V] from the output of the decoder [B, T, D]."""
    x = x.astype(jnp.float32)
    if model_cfg.tied:  # The entries of the embedding have variance 1: scale by D^-0.5.
        return dense(x * model_cfg.d_model**-0.5, params["embed"].T)
    return dense(x, params["unembed"])


def encode_and_decode(params: dict, batch, model_cfg: ModelConfig, rng=None) -> Array:
    """Run encoder and decoder on a data.Batch. rng: for dropout. Returns [B, T, D]."""
    rng_encoder, rng_decoder = split_rng(rng, 2)
    encoded = encode(params, batch.inputs, batch.input_segments, model_cfg, rng_encoder)
    return decode(params, batch, encoded, model_cfg, rng_decoder)


def forward(params: dict, batch, model_cfg: ModelConfig, rng=None) -> Array:
    """Compute the logits of a data.Batch, float32 [B, T, V]."""
    x = encode_and_decode(params, batch, model_cfg, rng)
    return compute_logits(params, x, model_cfg)


# ---- loss ------------------------------------------------------------------------------
# loss_fn                    runs the network
#   loss_sums                computes logits, and sums the losses of all tokens
#     token_metrics          the losses of each token, and the accuracy


def token_metrics(
    logits: Array, targets: Array, z_loss: float = 0.0, label_smoothing: float = 0.0
) -> dict[str, Array]:
    """Return the losses of each target token, and whether the prediction is correct.

    The loss is the cross entropy, log Z minus the logit of the target, plus, as in Mesh
    TensorFlow, the z-loss, z_loss * (log Z)^2, which keeps the logits near zero. Label
    smoothing shares some probability of the target token equally among all others. As in
    T5X, the entropy of the smoothed target is subtracted, so the lowest loss is 0.

    logits [B, T, V] float32, targets [B, T]. Returns {metric: array [B, T]}.
    """
    V = logits.shape[-1]
    log_z = jax.nn.logsumexp(logits, axis=-1)
    # A sum of products instead of a lookup, whose gradient would be a slow scatter.
    target_logit = jnp.sum(jax.nn.one_hot(targets, V) * logits, axis=-1)
    cross_entropy = log_z - target_logit
    if label_smoothing:
        # The smoothed target has the probability `on` at the target, and `off` elsewhere.
        on, off = 1 - label_smoothing, label_smoothing / (V - 1)
        entropy = -(on * math.log(on) + (V - 1) * off * math.log(off))
        all_logits = jnp.sum(logits, axis=-1)
        cross_entropy = log_z - (on - off) * target_logit - off * all_logits - entropy
    z_losses = z_loss * log_z**2
    # Ties count as correct. An argmax would be another pass over the logits.
    is_largest = target_logit == jnp.max(logits, axis=-1)
    return {
        "loss": cross_entropy + z_losses,
        "cross_ent_loss": cross_entropy,
        "z_loss": z_losses,
        "token_accuracy": is_largest,
    }


def target_weights(batch) -> Array:
    """Return the weight of each target token of a data.Batch in the loss [B, T]."""
    return (batch.target_segments > 0).astype(jnp.float32)  # leaves out padding


def loss_sums(
    params: dict, x: Array, targets: Array, loss_weights: Array, cfg: Config
) -> dict[str, Array]:
    """Return the sums of all token_metrics, such as "loss", over the target tokens.

    params: those of the output are enough. x [B, T, D]: the output of the decoder.
    loss_weights [B, T]: how much each token counts, such as target_weights.
    """
    if resolve_auto(cfg.model).loss_impl == "chunked":
        # This gives the same with less memory. Only the sum "loss" has a gradient.
        from extras.chunked_loss import chunked_sums

        unused = "encoder", "decoder", "unembed" if cfg.model.tied else "embed"
        used = {name: w for name, w in params.items() if name not in unused}
        return chunked_sums(used, x, targets, loss_weights, cfg)
    logits = compute_logits(params, x, cfg.model)
    metrics = token_metrics(logits, targets, cfg.train.z_loss, cfg.train.label_smoothing)
    sums = {name: jnp.sum(values * loss_weights) for name, values in metrics.items()}
    return {**sums, "tokens": jnp.sum(loss_weights)}


def loss_fn(params: dict, batch, cfg: Config, rng=None) -> tuple[Array, dict]:
    """Return the sum of the training loss over the target tokens, and a dict of sums.

    The loss is in nats. To get a mean, train.accumulate_gradients divides it by the
    number of tokens. The dict has the sums of all token_metrics, which are divided and
    logged, too. If you add one, metrics.jsonl has it under its name.
    """
    x = encode_and_decode(params, batch, cfg.model, rng)
    sums = loss_sums(params, x, batch.targets, target_weights(batch), cfg)
    return sums["loss"], sums


def mean_metrics(sums: dict) -> dict:
    """Divide sums by the number of tokens. Losses are then in nats per token."""
    tokens = jnp.maximum(sums["tokens"], 1)
    means = {name: x / tokens for name, x in sums.items() if name != "tokens"}
    return {"loss": means["loss"], **means}  # It is printed first.


# ---- devices and memory ----------------------------------------------------------------
# This section changes where and how the model is computed, but, up to rounding, not what.


def resolve_auto(model_cfg: ModelConfig) -> ModelConfig:
    """Replace "auto" by what suits the platform.

    Activations and their matmuls have model_cfg.dtype. Parameters, softmax, logits and
    loss always have the type float32 (whose products a TPU or GPU rounds by default).
    Attention "xla" and loss "full" are the code of this file.
    """
    platform = partition.platform()
    has_kernel = configs.HAS_EXTRAS and platform != "cpu"
    # Chunks save memory, most with a large vocabulary.
    chunks = platform == "tpu" or model_cfg.vocab_size > 1 << 16
    best = {
        "dtype": "float32" if platform == "cpu" else "bfloat16",
        "attention_impl": "kernel" if has_kernel else "xla",
        "loss_impl": "chunked" if configs.HAS_EXTRAS and chunks else "full",
    }
    return replace(
        model_cfg, **{k: v for k, v in best.items() if getattr(model_cfg, k) == "auto"}
    )


def dense(x: Array, w: Array) -> Array:
    """Multiply activations [B, Q, inputs] by a weight matrix [inputs, outputs]."""
    if partition.platform() == "cpu":
        # XLA's CPU code is slow for the gradient of w if x has three axes: with two, a
        # step of `tiny` is 1.3 times as fast. A TPU would copy x.
        return (x.reshape(-1, x.shape[-1]) @ w).reshape(*x.shape[:-1], w.shape[1])
    return x @ w


def on_each_device(attend, q, k, v, mask, relative_bias) -> Array:
    """Call attend(q, k, v, mask, relative_bias) for the rows and heads of each device.

    This needs no communication: each device has complete rows and heads.
    """
    if get_abstract_mesh().empty:
        return attend(q, k, v, mask, relative_bias)
    heads = spec(("batch", "heads"))
    specs = heads, heads, heads, spec(("batch",)), spec(("heads",))
    # The kernels do not say over which axes their outputs vary, so this is not checked.
    sharded = jax.shard_map(attend, in_specs=specs, out_specs=heads, check_vma=False)
    return sharded(q, k, v, mask, relative_bias)


# What the forward pass saves for the backward pass, which recomputes everything else.
# "attended" is the name of the outputs of the kernels in extras/.
KERNEL_OUTPUTS = policies.save_only_these_names("attended")
PRODUCTS_WITH_WEIGHTS = policies.dots_with_no_batch_dims_saveable
REMAT_POLICIES = {
    "none": policies.everything_saveable,
    "dots": policies.save_from_both_policies(PRODUCTS_WITH_WEIGHTS, KERNEL_OUTPUTS),
    "full": KERNEL_OUTPUTS,
}


def gather_weights(stack_name: str, w: dict, model_cfg: ModelConfig) -> dict:
    """Undo the split of FSDP for the weights of one layer.

    `constrain` asks for arrays without that split, so the compiler gathers them.
    """
    table = param_table(model_cfg)[stack_name]["layers"]  # Axis 0 counts layers.
    return jax.tree.map(lambda p, array: constrain(array, *p.axes[1:]), table, w)


def apply_layers(
    layer, x: Array, stack_name: str, params: dict, model_cfg: ModelConfig, rng=None
) -> Array:
    """Apply all layers of the encoder or decoder to activations x [B, Q, D].

    layer: a function (weights, x, rng) -> x. stack_name: "encoder" or "decoder".
    """
    # Cast before the loop, so that the all-gathers of FSDP move half as many bytes.
    weights = jax.tree.map(lambda w: w.astype(x.dtype), params[stack_name]["layers"])
    depth = len(jax.tree.leaves(weights)[0])
    rngs = None if rng is None else jax.random.split(rng, depth)

    def body(x, weights_and_rng):
        w, rng = weights_and_rng
        return layer(gather_weights(stack_name, w, model_cfg), x, rng), None

    # lax.scan calls `body` for each layer, and passes x on. This loop copies the weights
    # of a layer out of the stacked arrays. Unrolling makes a step faster on a TPU or GPU,
    # but takes longer to compile.
    unroll = partition.platform() != "cpu" and depth <= 24 and model_cfg.d_model <= 2048
    # If the loop is unrolled, a barrier keeps XLA from saving what is recomputed.
    body = jax.checkpoint(
        body, policy=REMAT_POLICIES[model_cfg.remat], prevent_cse=unroll
    )
    return lax.scan(body, x, (weights, rngs), unroll=unroll)[0]


# ---- sizes and the command -------------------------------------------------------------


def count_params(table: dict) -> int:
    """Return the number of weights in a nested dict of Params."""
    return sum(math.prod(p.shape) for p in jax.tree.leaves(table))


def train_flops(cfg: Config) -> int:
    """Count the floating-point operations to train on one row. Only matmuls count.

    T5 1.1 small needs 106 billion for 512 input tokens and 114 target tokens.
    """
    model_cfg, S, T = cfg.model, cfg.data.inputs_length, cfg.data.targets_length
    D, F, A = model_cfg.d_model, model_cfg.d_ff, model_cfg.num_heads * model_cfg.d_kv
    mlp_weights = (3 if model_cfg.gated else 2) * D * F
    # multiply-adds of a layer: products with weights, then q k^T and probs v
    encoder_layer = S * (4 * D * A + mlp_weights) + 2 * S * S * A
    decoder_layer = T * (6 * D * A + mlp_weights) + 2 * T * (T + S) * A
    decoder_layer += 2 * S * D * A  # keys and values of the encoder's output
    layers = (
        model_cfg.num_layers * encoder_layer
        + model_cfg.num_decoder_layers * decoder_layer
    )
    # A multiply-add is two operations. The backward pass costs twice the forward pass.
    return 3 * 2 * (layers + T * D * model_cfg.vocab_size)


def describe_model(cfg: Config) -> str:
    """Return a line with the number of parameters and the FLOPs of a row."""
    table = param_table(cfg.model)
    parts = ", ".join(f"{name} {count_params(part):,}" for name, part in table.items())
    return (
        f"{count_params(table):,} parameters ({parts}); {train_flops(cfg) / 1e9:.5g} "
        f"GFLOP to train on one row of {cfg.data.inputs_length} + "
        f"{cfg.data.targets_length} tokens"
    )


def list_params(cfg: Config) -> str:
    """Return a line for each parameter, as in the file model-info.txt of T5X."""
    lines = []
    for name, p in partition.flatten(param_table(cfg.model)).items():
        shape = " x ".join(map(str, p.shape))
        axes = " ".join(p.axes)
        lines.append(f"{name:44} {shape:20} {axes:22} {p.init:>16} {p.scale:.4g}\n")
    return "".join(lines) + describe_model(cfg) + "\n"


def main():
    print(list_params(configs.parse(configs.Options).cfg), end="")


if __name__ == "__main__":
    main()
