"""Attention for GPUs that does not write its scores to memory, in Pallas with Triton.

A program of a GPU computes one block of queries or keys, of one row and one head. In the
forward pass it goes over the blocks of keys, and keeps for each query the largest score so
far, as in FlashAttention (Dao et al. 2022). The backward pass computes the scores again. It
writes their gradients [B, H, K, Q] to memory, whose sum over the rows is the gradient of
the bias.

Queries, keys and values have the shape [B, Q, H * C], as in attention_kernel.py.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

import partition

BLOCK = 64  # queries or keys of a block
LOG2_E = math.log2(math.e)  # A GPU computes powers of 2, and e^x = 2^(x log2(e)).


def matmul(a: Array, b: Array) -> Array:
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def masked_scores(a: Array, b: Array, mask: Array, bias: Array | None) -> Array:
    """Return scores [M, N] for base 2. a [M, C] and b [N, C]: queries and keys, or reverse."""
    scores = matmul(a, b.T)
    if bias is not None:
        scores += bias.astype(jnp.float32)
    return jnp.where(mask != 0, LOG2_E * scores, -1e10)


def forward_kernel(mask_ref, bias_ref, q_ref, k_ref, v_ref, out_ref, log_z_ref):
    """Compute attention for a block of queries, and the log2 of the softmax denominators."""
    q = q_ref[...]

    def add_keys(i, carry):
        out, largest, z = carry
        keys = pl.ds(i * BLOCK, BLOCK)
        bias = None if bias_ref is None else bias_ref[:, keys]
        scores = masked_scores(q, k_ref[keys], mask_ref[:, keys], bias)
        new_largest = jnp.maximum(largest, scores.max(1))
        weights = jnp.exp2(scores - new_largest[:, None])
        # Until now, out and z are relative to a score that was the largest one.
        shrink = jnp.exp2(largest - new_largest)
        out = out * shrink[:, None] + matmul(weights.astype(q.dtype), v_ref[keys])
        return out, new_largest, z * shrink + weights.sum(1)

    start = jnp.zeros(q.shape, jnp.float32), jnp.full(BLOCK, -1e30), jnp.zeros(BLOCK)
    out, largest, z = lax.fori_loop(0, len(k_ref) // BLOCK, add_keys, start)
    out_ref[...] = (out / z[:, None]).astype(out_ref.dtype)
    log_z_ref[...] = largest + jnp.log2(z)


def backward_kernel(mask_ref, bias_ref, q_ref, k_ref, v_ref, *refs):
    """Compute the gradients of a block of keys and values, and of its scores.

    The equations are those of attention_kernel.backward_kernel. Matrices of scores are
    transposed, [keys, queries], since they are then the left operands of all products.
    """
    log_z_ref, row_sum_ref, d_out_ref, d_scores_ref, d_k_ref, d_v_ref = refs
    k, v = k_ref[...], v_ref[...]

    def add_queries(i, carry):
        d_k, d_v = carry
        queries = pl.ds(i * BLOCK, BLOCK)
        q, d_out = q_ref[queries], d_out_ref[queries]
        bias = None if bias_ref is None else bias_ref[:, queries]
        scores = masked_scores(k, q, mask_ref[:, queries], bias)
        p = jnp.exp2(scores - log_z_ref[queries])
        d_p = matmul(v, d_out.T)
        d_scores = (p * (d_p - row_sum_ref[queries])).astype(q.dtype)
        d_scores_ref[:, queries] = d_scores
        d_k += matmul(d_scores, q)
        d_v += matmul(p.astype(q.dtype), d_out)
        return d_k, d_v

    zeros = jnp.zeros(k.shape, jnp.float32)
    d_k, d_v = lax.fori_loop(0, len(q_ref) // BLOCK, add_queries, (zeros, zeros))
    d_k_ref[...] = d_k.astype(d_k_ref.dtype)
    d_v_ref[...] = d_v.astype(d_v_ref.dtype)


def run(kernel, C: int, names: str, arguments: tuple, results: list) -> list[Array]:
    """Run a kernel for all blocks of the first axis of its scores.

    names: for each argument, the name of a block in `blocks`. The first argument is the mask.
    results: a triple (name, shape, dtype) for each result.
    """
    B, length, n = arguments[0].shape
    # For each kind of array, the shape of a block, and the index of block (i, h, b): block i
    # of the first axis of the scores, head h and row b. The kernel goes over the other axis.
    blocks = {
        "mask": pl.BlockSpec((None, BLOCK, n), lambda i, h, b: (b, i, 0)),
        "bias": pl.BlockSpec((None, BLOCK, n), lambda i, h, b: (h, i, 0)),
        "scores": pl.BlockSpec((None, None, BLOCK, n), lambda i, h, b: (b, h, i, 0)),
        "block": pl.BlockSpec((None, BLOCK, C), lambda i, h, b: (b, i, h)),
        "all": pl.BlockSpec((None, n, C), lambda i, h, b: (b, 0, h)),
        "block_numbers": pl.BlockSpec((None, None, BLOCK), lambda i, h, b: (b, h, i)),
        "all_numbers": pl.BlockSpec((None, None, n), lambda i, h, b: (b, h, 0)),
    }
    pairs = zip(names.split(), arguments)
    call = pl.pallas_call(
        kernel,
        grid=(length // BLOCK, arguments[2].shape[-1] // C, B),
        in_specs=[None if x is None else blocks[name] for name, x in pairs],
        out_specs=[blocks[name] for name, *_ in results],
        out_shape=[jax.ShapeDtypeStruct(shape, dtype) for _, shape, dtype in results],
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=partition.platform() != "gpu",
        name=kernel.__name__,
    )
    return call(*arguments)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend_in_blocks(C: int, q, k, v, bias, mask):
    """Compute attention for q [B, Q, H * C], k and v [B, K, H * C], bias [H, Q, K]."""
    return forward(C, q, k, v, bias, mask)[0]


def forward(C, q, k, v, bias, mask):
    arguments = mask, bias, q, k, v
    B, Q, A = q.shape
    numbers = "block_numbers", (B, A // C, Q), jnp.float32
    results = [("block", q.shape, q.dtype), numbers]
    out, log_z = run(forward_kernel, C, "mask bias block all all", arguments, results)
    # model.REMAT_POLICIES saves the arrays with this name, and does not run the kernel again.
    out, log_z = checkpoint_name((out, log_z), "attended")
    return out, (*arguments, out, log_z)


def backward(C, saved, d_out):
    mask, bias, q, k, v, out, log_z = saved
    (B, Q, A), K = q.shape, k.shape[1]
    products = d_out.astype(jnp.float32) * out.astype(jnp.float32)
    row_sum = products.reshape(B, Q, -1, C).sum(3).swapaxes(1, 2)
    transposed = [None if x is None else x.swapaxes(1, 2) for x in (mask, bias)]
    arguments = *transposed, q, k, v, log_z, row_sum, d_out
    names = "mask bias all block block all_numbers all_numbers all"
    results = [
        ("scores", (B, A // C, K, Q), q.dtype),
        ("block", k.shape, k.dtype),
        ("block", v.shape, v.dtype),
    ]
    d_scores, d_k, d_v = run(backward_kernel, C, names, arguments, results)
    d_q = jnp.einsum("bhkq,bkhc->bqhc", d_scores, k.reshape(B, K, -1, C))
    d_bias = None
    if bias is not None:
        d_bias = d_scores.sum(0, jnp.float32).swapaxes(1, 2).astype(bias.dtype)
    return d_q.reshape(q.shape), d_k, d_v, d_bias, None


attend_in_blocks.defvjp(forward, backward)


def attend(q, k, v, mask, bias=None) -> Array:
    """Compute what model.dot_product_attention computes, with its arguments.

    The bias is rounded to the type of q, like that of T5X.
    """
    (B, H, Q, C), K = q.shape, k.shape[2]

    def pad(x, *axes):
        return jnp.pad(x, [(0, -n % BLOCK * (i in axes)) for i, n in enumerate(x.shape)])

    q, k, v = (pad(x.swapaxes(1, 2).reshape(B, -1, H * C), 1) for x in (q, k, v))
    mask = pad(jnp.broadcast_to(mask[:, 0], (B, Q, K)).astype(jnp.int8), 1, 2)
    bias = None if bias is None else pad(bias.astype(q.dtype), 1, 2)
    out = attend_in_blocks(C, q, k, v, bias, mask)[:, :Q]
    return out.reshape(B, Q, H, C).swapaxes(1, 2)
