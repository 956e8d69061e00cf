"""Attention for TPUs that never writes its scores to memory, in Pallas. `fits` and
`attend` choose between this kernel and that of gpu_attention.py.

XLA writes the scores [B, H, Q, K] of model.dot_product_attention to memory several times.
A kernel keeps the scores of a few rows and heads in on-chip memory, and its backward pass
computes them again, as in FlashAttention (Dao et al. 2022).

Queries, keys and values have the shape [B, Q, H * C], as dense layers produce and read
them. The kernel processes a block of rows, heads and queries in a step.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu

import configs
import partition
from extras import gpu_attention

# The most scores (rows * heads * queries * keys) that fit into on-chip memory.
MAX_SCORES = 1 << 19


def block_sizes(shape: tuple, K: int) -> tuple[int, int, int] | None:
    """Choose how many rows, heads and queries a block has. None: the shapes do not fit.

    shape: that of the queries, [B, Q, H, C].
    """
    B, Q, H, C = shape

    def divisors(n):
        return [i for i in range(n, 0, -1) if n % i == 0]

    # A TPU stores a matrix in tiles of 128 columns, which two heads of 64 channels fill.
    heads = min(n for n in divisors(H) if n * C % 128 == 0 or n == H)
    fit = MAX_SCORES // (heads * K)
    queries = [n for n in divisors(Q) if n <= fit and (n == Q or n % 128 == 0)]
    if not queries:
        return None
    rows = max(n for n in divisors(B) if n == 1 or n * queries[0] <= fit)
    return rows, heads, queries[0]


def matmul(form: str, a: Array, b: Array) -> Array:
    return jnp.einsum(form, a, b, preferred_element_type=jnp.float32)


def head_columns(x: Array, C: int) -> list[Array]:
    """Return for each head of a block x [Q, heads * C] a mask of its channels."""
    head = lax.broadcasted_iota(jnp.int32, (1, x.shape[-1]), 1) // C
    return [head == h for h in range(x.shape[-1] // C)]


def scores_of_head(q: Array, k: Array, mask: Array, bias_ref, head: int) -> Array:
    scores = matmul("qc,kc->qk", q, k)
    if bias_ref is not None:
        scores += bias_ref[head]
    # TPU v4 cannot compare numbers of 8 bits.
    return jnp.where(mask.astype(jnp.int32) == 1, scores, -1e10)


def forward_kernel(C, mask_ref, bias_ref, q_ref, k_ref, v_ref, out_ref, log_z_ref):
    """Compute attention for a block, and the logarithm of each softmax denominator."""

    def attend_in_row(row, _):
        q, k, v, mask = q_ref[row], k_ref[row], v_ref[row], mask_ref[row]
        out = jnp.zeros(q.shape, jnp.float32)
        for head, columns in enumerate(head_columns(q, C)):
            # With zeros in the channels of all other heads, a matmul over all channels
            # computes this head. A TPU multiplies 128 channels at once anyway.
            q_head = jnp.where(columns, q, 0)
            scores = scores_of_head(q_head, k, mask, bias_ref, head)
            largest = scores.max(-1, keepdims=True)
            weights = jnp.exp(scores - largest)
            z = weights.sum(-1, keepdims=True)
            sums = matmul("qk,kc->qc", weights.astype(v.dtype), v)
            out = jnp.where(columns, sums / z, out)
            # Store the column as a row: a column would need the memory of 128 columns.
            log_z = jnp.broadcast_to(largest + jnp.log(z), (len(q), 128))
            log_z_ref[row, head] = log_z.T[0]
        out_ref[row] = out.astype(out_ref.dtype)

    lax.fori_loop(0, len(q_ref), attend_in_row, None)


def backward_kernel(C, *refs):
    """Compute the gradients of a block.

    Let p = exp(scores - log_z) be the probabilities of the softmax. Their gradient is
    d_p = d_out v^T, and that of the scores is p * (d_p - row_sum), where row_sum is the
    sum of d_out * out. A query that may attend to no key is padding: its p are wrong, but
    its d_out is 0.
    """
    mask_ref, bias_ref, q_ref, k_ref, v_ref, out_ref, log_z_ref, d_out_ref = refs[:8]
    d_q_ref, d_k_ref, d_v_ref, *d_bias_ref = refs[8:]
    for ref in d_bias_ref:  # The blocks of all rows add to one gradient of the bias.
        ref[...] = jnp.where(pl.program_id(2) == 0, 0, ref[...])

    def gradients_in_row(row, _):
        q, k, v, mask = q_ref[row], k_ref[row], v_ref[row], mask_ref[row]
        d_out = d_out_ref[row]
        products = d_out.astype(jnp.float32) * out_ref[row].astype(jnp.float32)
        d_q = jnp.zeros(q.shape, jnp.float32)
        d_k = d_v = jnp.zeros(k.shape, jnp.float32)
        for head, columns in enumerate(head_columns(q, C)):
            q_head, d_out_head = jnp.where(columns, q, 0), jnp.where(columns, d_out, 0)
            scores = scores_of_head(q_head, k, mask, bias_ref, head)
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


def run(kernel, matmuls: int, C: int, arguments: list, results: list) -> list[Array]:
    """Run a kernel for all blocks.

    arguments: mask, bias, q, k and v; for the backward pass also out, log_z and d_out.
    results: a triple (name of a block in `blocks`, shape, dtype) for each result.
    """
    mask, bias, q, k = arguments[:4]
    B, Q, A = q.shape
    K = k.shape[1]
    rows, heads, queries = block_sizes((B, Q, A // C, C), K)
    width = heads * C
    # For each kind of array, the shape of a block, and the index of the block of step
    # (h, i, b): block h of the heads, i of the queries and b of the rows.
    blocks = {
        "mask": pl.BlockSpec((rows, queries, K), lambda h, i, b: (b, i, 0)),
        "bias": pl.BlockSpec(
            (heads, queries, K),
            lambda h, i, b: (h, i, 0),
            pipeline_mode=pl.Buffered(1),  # To save memory, do not prefetch the next one.
        ),
        "queries": pl.BlockSpec((rows, queries, width), lambda h, i, b: (b, i, h)),
        "keys": pl.BlockSpec((rows, K, width), lambda h, i, b: (b, 0, h)),
        "log_z": pl.BlockSpec((rows, None, heads, queries), lambda h, i, b: (b, h, 0, i)),
        "d_keys": pl.BlockSpec((None, rows, K, width), lambda h, i, b: (i, b, 0, h)),
        "d_bias": pl.BlockSpec((heads, queries, K), lambda h, i, b: (h, i, 0)),
    }
    names = "mask", "bias", "queries", "keys", "keys", "queries", "log_z", "queries"
    in_specs = [blocks[name] for name in names[: len(arguments)]]
    if bias is None:
        in_specs[1] = None
    # The two cores of a v4 or v5p share the steps of a "parallel" axis. One core computes
    # all rows if they add to the same gradient of the bias.
    sums_rows = any(name == "d_bias" for name, *_ in results)
    row_axis = "arbitrary" if sums_rows else "parallel"
    call = pl.pallas_call(
        functools.partial(kernel, C),
        grid=(A // width, Q // queries, B // rows),
        in_specs=in_specs,
        out_specs=[blocks[name] for name, *_ in results],
        out_shape=[jax.ShapeDtypeStruct(shape, dtype) for _, shape, dtype in results],
        compiler_params=tpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", row_axis)
        ),
        cost_estimate=pl.CostEstimate(  # XLA cannot compute it.
            flops=2 * matmuls * mask.size * A,
            transcendentals=mask.size * A // C,
            bytes_accessed=sum(x.nbytes for x in arguments if x is not None),
        ),
        interpret=jax.sharding.get_abstract_mesh().abstract_device.platform != "tpu",
        name=kernel.__name__,
    )
    return call(*arguments)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend_in_blocks(C: int, q, k, v, bias, mask):
    """Compute attention for q [B, Q, H * C], k and v [B, K, H * C], bias [H, Q, K]."""
    return forward(C, q, k, v, bias, mask)[0]


def forward(C, q, k, v, bias, mask):
    B, Q, A = q.shape
    heads = block_sizes((B, Q, A // C, C), k.shape[1])[1]
    arguments = mask, bias, q, k, v
    log_z_shape = B, A // C // heads, heads, Q
    results = [("queries", q.shape, v.dtype), ("log_z", log_z_shape, jnp.float32)]
    out, log_z = run(forward_kernel, 2, C, arguments, results)
    # model.REMAT_POLICIES saves the arrays with this name, and does not run the kernel again.
    out, log_z = checkpoint_name((out, log_z), "attended")
    return out, (*arguments, out, log_z)


def backward(C, saved, d_out):
    mask, bias, q, k, v, out, log_z = saved
    B, Q, A = q.shape
    parts = Q // block_sizes((B, Q, A // C, C), k.shape[1])[2]
    results = [
        ("queries", q.shape, q.dtype),
        ("d_keys", (parts, *k.shape), k.dtype),
        ("d_keys", (parts, *v.shape), v.dtype),
    ]
    if bias is not None:
        results.append(("d_bias", bias.shape, jnp.float32))
    d_q, d_k, d_v, *d_bias = run(backward_kernel, 5, C, (*saved, d_out), results)
    # Add up what each block of queries contributes to the gradients of keys and values.
    # XLA needs more time for jnp.sum than for separate additions.
    d_k, d_v = (sum(part.astype(jnp.float32) for part in x) for x in (d_k, d_v))
    d_bias = d_bias[0] if d_bias else None
    return d_q, d_k.astype(k.dtype), d_v.astype(v.dtype), d_bias, None


attend_in_blocks.defvjp(forward, backward)


def gpu_attention_fits(q: Array) -> bool:
    """Return whether gpu_attention.py supports queries [B, H, Q, C] and this GPU."""
    C = q.shape[-1]
    version = jax.local_devices()[0].compute_capability  # such as 7.5, or gfx942 of AMD
    is_ampere = version[0].isdigit() and float(version) >= 8
    return is_ampere and q.dtype == jnp.bfloat16 and C in (16, 32, 64, 128)


def fits(q: Array, k: Array, mask: Array, bias: Array | None) -> bool:
    """Return whether a kernel supports this device and these arguments of attend."""
    B, H, Q, C = q.shape
    if mask.shape[1] > 1 or (bias is not None and bias.ndim > 3):
        found = False  # a mask for each head, or a bias for each row
    elif partition.platform() == "gpu":
        found = gpu_attention_fits(q)
    else:
        found = block_sizes((B, Q, H, C), k.shape[2]) is not None
    if not found:
        configs.print_once("compute  no kernel fits this device, dtype or shape")
    return found


def attend(q, k, v, mask, bias=None) -> Array:
    """Compute what model.dot_product_attention computes, with its arguments."""
    if partition.platform() == "gpu":
        return gpu_attention.attend(q, k, v, mask, bias)
    (B, H, Q, C), K = q.shape, k.shape[2]
    q, k, v = (x.swapaxes(1, 2).reshape(B, -1, H * C) for x in (q, k, v))
    mask = jnp.broadcast_to(mask[:, 0], (B, Q, K)).astype(jnp.int8)
    out = attend_in_blocks(C, q, k, v, bias, mask)
    return out.reshape(B, Q, H, C).swapaxes(1, 2)
