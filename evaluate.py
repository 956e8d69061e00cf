"""How good a model is: teacher-forced loss on held-out data.

    python evaluate.py --run_dir runs/tiny
"""

import functools
import time
from dataclasses import replace

import jax
import jax.numpy as jnp

import configs
import data
import infer
import model
import partition
from configs import UserError


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


def teacher_forced(params, cfg, mesh, split, batches):
    """Loss over the first batches of a split, each row once -> {metric: nats per token, or 0-1}."""
    B = cfg.train.batch_size
    rows = partition.local_rows(B, mesh)
    _, sentinel = data.open_rows(cfg, split)
    total = None
    for i in range(batches):
        batch = partition.put_batch(data.make_batch(cfg, split, i, rows), B, mesh)
        sums = batch_sums(params, batch, cfg, sentinel + 1 - data.SENTINELS)
        total = sums if total is None else jax.tree.map(jnp.add, total, sums)
    total = {name: float(value) for name, value in jax.device_get(total).items()}
    tokens = total["tokens"]
    return {
        "loss": (total["cross_ent_loss"] + total["z_loss"]) / tokens,
        "cross_ent_loss": total["cross_ent_loss"] / tokens,
        "z_loss": total["z_loss"] / tokens,
        "accuracy": total["correct"] / tokens,
        "content_loss": total["content_loss"] / max(total["content_tokens"], 1),
    }


def main(argv):
    args, changes = configs.parse_args(__doc__, argv)
    if not args.run_dir:
        raise UserError("--run_dir names the run to evaluate, for instance runs/tiny.")
    cfg = configs.resolve(args, changes)
    if cfg.data.source == "random:":
        raise UserError(f"{args.run_dir} was trained on random ids: there is nothing held out.")
    cfg = replace(cfg, data=replace(cfg.data, vocab=f"{args.run_dir}/spiece.model"))
    partition.start_jax()
    mesh = partition.set_mesh(cfg)
    step, params = infer.load_params(cfg, args.run_dir)
    for task, one in data.evaluations(cfg).items():
        batches = data.number_of_batches(one, "validation")
        start = time.perf_counter()
        metrics = teacher_forced(params, one, mesh, "validation", batches)
        seconds = time.perf_counter() - start
        rows = data.open_rows(one, "validation")[0].count
        part = "held-out rows streamed" if cfg.data.streaming else "the whole held-out split"
        print(f"{args.run_dir}, step {step:,}, {task}: {part}, {rows:,} rows, "
              f"{rows / seconds:.4g} examples/s")
        for name, value in metrics.items():
            print(f"  {name:22} {value:.4f}")


if __name__ == "__main__":
    configs.run_command(main)
