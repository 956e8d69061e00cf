"""How good a model is: teacher-forced loss on held-out data.

    python evaluate.py --run_dir runs/tiny
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import data
import infer
import model
import partition


@functools.partial(jax.jit, static_argnums=2)
def batch_sums(params, batch, cfg, first_sentinel):
    """Sums over the real target tokens of a batch, and over the content tokens alone.

    Content is all but sentinels and EOS: what a unigram model can be compared with.
    """
    loss, z_loss, correct = model.token_losses(params, batch, cfg)
    real = batch.target_segments > 0
    content = real & (batch.targets > data.EOS) & (batch.targets < first_sentinel)
    return {
        "cross_ent_loss": jnp.sum(loss * real), "z_loss": jnp.sum(z_loss * real),
        "correct": jnp.sum(correct * real), "tokens": jnp.sum(real),
        "content_loss": jnp.sum(loss * content), "content_tokens": jnp.sum(content),
    }


def teacher_forced(params, cfg, mesh, split="validation"):
    """Loss over data.eval_batches of a split, each row once -> {metric: nats per token or 0-1}."""
    batches = data.number_of_batches(cfg, split)
    batches = min(batches, cfg.train.eval_batches) if cfg.train.eval_batches else batches
    rows = partition.local_rows(cfg.train.batch_size, mesh)
    _, sentinel = data.open_rows(cfg, split)
    total = None
    for i in range(batches):
        batch = data.make_batch(cfg, split, i, rows)
        batch = partition.put_batch(batch, cfg.train.batch_size, mesh)
        sums = batch_sums(params, batch, cfg, sentinel + 1 - data.SENTINELS)
        total = sums if total is None else jax.tree.map(jnp.add, total, sums)
    total = {name: float(value) for name, value in jax.device_get(total).items()}
    tokens = total["tokens"]
    return {
        "loss": (total["cross_ent_loss"] + total["z_loss"]) / tokens,
        "cross_ent_loss": total["cross_ent_loss"] / tokens, "z_loss": total["z_loss"] / tokens,
        "accuracy": total["correct"] / tokens,
        "content_loss": total["content_loss"] / max(total["content_tokens"], 1),
    }
