"""How a model learns: schedule, optimizer, step, loop.

    python train.py                                    the tiny recipe: two to three minutes on a CPU
    python train.py --config small_c4 --train.steps 5000

Running the same command again goes on where the run stopped.
"""

import fcntl
import functools
import json
import math
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding
from tqdm import tqdm

import configs
import data
import evaluate
import infer
import model
import partition
from configs import UserError

# ---- learning rate -------------------------------------------------------------------------------


def learning_rate(step, cfg):
    """The rate of update number `step`, counted from 0: the product of the schedule's factors.

    cfg: TrainConfig. The factors, and the floor of 1e-8, are those of t5x/utils.py,
    create_learning_rate_scheduler. "constant * rsqrt_decay" with learning_rate 1 and warmup_steps
    10,000 is T5's: 0.01 for 10,000 steps, then 1 / sqrt(step).
    """
    step = jnp.maximum(0.0, step - cfg.schedule_offset)
    base, warmup = cfg.learning_rate, cfg.warmup_steps
    cycle = jnp.maximum(0.0, (step - warmup) / cfg.steps_per_cycle)
    factors = {
        "constant": lambda: base,
        "linear_warmup": lambda: jnp.minimum(1.0, step / warmup),
        "linear_decay": lambda: base * jnp.minimum(step / warmup, 1 + cfg.decay_factor * (warmup - step)),
        "rsqrt_decay": lambda: 1 / jnp.sqrt(jnp.maximum(step, warmup)),
        "rsqrt_normalized_decay": lambda: math.sqrt(warmup) / jnp.sqrt(jnp.maximum(step, warmup)),
        "decay_every": lambda: cfg.decay_factor ** (step // cfg.steps_per_decay),
        "cosine_decay": lambda: jnp.maximum(0.0, 0.5 * (1 + jnp.cos(jnp.pi * (cycle % 1.0)))),
    }
    rate = 1.0
    for name in cfg.schedule.split("*"):
        if name.strip() not in factors:
            raise UserError(f"--train.schedule has the factor {name.strip()!r}; there are "
                            f"{', '.join(factors)}.")
        rate = rate * factors[name.strip()]()
    return jnp.maximum(rate, 1e-8)


# ---- Adafactor -----------------------------------------------------------------------------------
# Shazeer and Stern 2018 (arXiv:1804.04235) with T5X's settings: no momentum, updates scaled by the
# parameter's own size and clipped at an RMS of 1. Written out because optax's takes 1.6 times as
# long on a CPU; test_all.py holds the two against each other. Layers are stacked in one array, but
# every statistic is one layer's own.


def is_factored(p):
    """Matrices of at least 128 x 128 keep the means of their rows and columns alone."""
    shape = p.shape[p.axes[0] == "layers" :]
    return len(shape) == 2 and min(shape) >= 128


def adafactor_init(table, rules):
    """Table of Params -> zero slots: {row [..., a], column [..., b]} of a matrix, or {full}."""

    def zeros(shape, axes):
        return jnp.zeros(shape, out_sharding=partition.spec(axes, rules))

    def slots(p):
        if not is_factored(p):
            return {"full": zeros(p.shape, p.axes)}
        return {"row": zeros(p.shape[:-1], p.axes[:-1]),
                "column": zeros(p.shape[:-2] + p.shape[-1:], p.axes[:-2] + p.axes[-1:])}

    return jax.tree.map(slots, table, is_leaf=model.is_param)


def adafactor_update(table, params, grads, slots, count, rate, weight_decay=0.0):
    """count: updates done so far -> (params, slots)."""
    beta = 1 - (count + 1.0) ** -0.8

    def update(p, w, g, s):
        one_layer = tuple(range(p.axes[0] == "layers", w.ndim))

        def rms(x):
            return jnp.sqrt(jnp.mean(x * x, one_layer, keepdims=True))

        def smooth(old, new):
            return beta * old + (1 - beta) * new

        squared = g * g + 1e-30
        if "full" in s:
            s = {"full": smooth(s["full"], squared)}
            u = g * lax.rsqrt(s["full"])
        else:
            s = {"row": smooth(s["row"], squared.mean(-1)), "column": smooth(s["column"], squared.mean(-2))}
            row = s["row"] / s["row"].mean(-1, keepdims=True)
            u = g * lax.rsqrt(row)[..., None] * lax.rsqrt(s["column"])[..., None, :]
        size = jnp.maximum(rms(w), 1e-3)
        return w * (1 - weight_decay) - rate * size / jnp.maximum(1.0, rms(u)) * u, s

    both = jax.tree.map(update, table, params, grads, slots, is_leaf=model.is_param)
    return tuple(jax.tree.map(lambda _, pair: pair[i], table, both, is_leaf=model.is_param) for i in (0, 1))


# ---- state and step ------------------------------------------------------------------------------


@flax.struct.dataclass
class TrainState:
    step: jax.Array  # updates done, skipped ones and start_step included
    count: jax.Array  # updates the optimizer's slots have seen
    skipped: jax.Array  # updates skipped in a row, because something was not finite
    params: dict
    slots: dict


def adamw(cfg):
    return optax.chain(optax.scale_by_adam(), optax.add_decayed_weights(cfg.weight_decay))


def init_state(cfg):
    """Config -> fresh TrainState, in its layout at rest."""
    rules = partition.RULES_AT_REST if cfg.mesh.fsdp else partition.RULES
    params = model.init_params(cfg.model, jax.random.key(cfg.train.seed), rules)
    if cfg.train.optimizer == "adafactor":
        slots = adafactor_init(model.param_table(cfg.model), rules)
    else:
        slots = flax.serialization.to_state_dict(adamw(cfg.train).init(params))
    zero = jnp.zeros((), jnp.int32, out_sharding=jax.P())
    return TrainState(zero + cfg.train.start_step, zero, zero, params, slots)


def gradients(cfg, params, batch, key):
    """Mean gradient over the batch's real target tokens -> (sums of model.loss_fn, gradients).

    Microbatches are summed and divided by the tokens of the whole batch once, so that their number
    changes nothing. A microbatch takes every n-th row, which each device finds among its own.
    """
    tokens = jnp.sum(batch.target_segments > 0)
    divisor = cfg.train.loss_divisor or jnp.maximum(tokens, 1).astype(jnp.float32)

    def loss(params, part, key):
        loss, sums = model.loss_fn(params, part, cfg, key)
        return loss / divisor, sums

    grad = jax.grad(loss, has_aux=True)
    n = cfg.train.microbatches
    if n == 1:
        grads, sums = grad(params, batch, key)
        return sums, grads

    def add(total, part):
        grads, sums = grad(params, *part)
        return jax.tree.map(jnp.add, total, (sums, grads)), None

    parts = jax.tree.map(lambda a: a.reshape(-1, n, a.shape[1]).swapaxes(0, 1), batch)
    keys = model.layer_keys(key, n)
    first = jax.tree.map(lambda a: a[0], (parts, keys))
    shapes = jax.eval_shape(lambda *part: grad(params, *part), *first)
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype, out_sharding=s.sharding), shapes)
    return lax.scan(add, zeros[::-1], (parts, keys))[0]


def train_step(cfg, state, batch):
    """One update: TrainState, Batch -> (TrainState, metrics). A function of its arguments alone."""
    key = None
    if cfg.model.dropout:
        key = jax.random.fold_in(jax.random.key(cfg.train.seed + 1), state.step)
    sums, grads = gradients(cfg, state.params, batch, key)
    rate = learning_rate(state.step, cfg.train)
    if cfg.train.optimizer == "adafactor":
        params, slots = adafactor_update(model.param_table(cfg.model), state.params, grads, state.slots,
                                         state.count, rate, cfg.train.weight_decay)
    else:
        optimizer = adamw(cfg.train)
        slots = flax.serialization.from_state_dict(optimizer.init(state.params), state.slots)
        updates, slots = optimizer.update(grads, slots, state.params)
        params = jax.tree.map(lambda w, u: w - rate * u, state.params, updates)
        slots = flax.serialization.to_state_dict(slots)
    grad_norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
    finite = jnp.isfinite(grad_norm) & jnp.isfinite(sums["cross_ent_loss"])
    params, slots = jax.tree.map(lambda new, old: jnp.where(finite, new, old), (params, slots),
                                 (state.params, state.slots))
    tokens = jnp.maximum(sums["tokens"], 1)
    metrics = {
        "loss": (sums["cross_ent_loss"] + sums["z_loss"]) / tokens,
        "cross_ent_loss": sums["cross_ent_loss"] / tokens,
        "z_loss": sums["z_loss"] / tokens,
        "accuracy": sums["correct"] / tokens,
        "learning_rate": rate,
        "gradient_norm": grad_norm,
        "non_padding_fraction/inputs": jnp.mean(batch.input_segments > 0),
        "non_padding_fraction/targets": jnp.mean(batch.target_segments > 0),
    }
    skipped = jnp.where(finite, 0, state.skipped + 1)
    return TrainState(state.step + 1, state.count + finite, skipped, params, slots), metrics


# ---- what the screen shows -----------------------------------------------------------------------


def matmul_flops():
    """Matrix-product operations per second of this CPU, measured: what a step is held against."""
    a = jnp.ones((1024, 1024))
    product = jax.jit(jnp.matmul)
    product(a, a).block_until_ready()
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        product(a, a).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return 2 * 1024**3 / min(seconds)


def peak_flops():
    """Operations per second of all devices at their best -> (number, where it comes from)."""
    kind = jax.devices()[0].device_kind
    for name, teraflops in partition.CHIPS.items():
        if name in kind:
            return teraflops * 1e12 * jax.device_count(), f"{name}, {teraflops} TFLOP/s by its data sheet"
    rate = matmul_flops() * jax.process_count()
    return rate, f"{rate / 1e9:.0f} GFLOP/s in a 1024 x 1024 matrix product"


def describe(cfg, mesh):
    """The lines a run begins with."""
    m, d = cfg.model, cfg.data
    table = model.param_table(m)
    sizes = {name: sum(math.prod(p.shape) for p in jax.tree.leaves(part, is_leaf=model.is_param))
             for name, part in table.items()}
    raw = data.raw_length(d)
    noise, spans = data.noise_counts(raw, d)
    devices = jax.devices()
    shape = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    per_device = cfg.train.batch_size // mesh.shape["data"]
    return [
        *configs.show_changes(cfg),
        f"model    {sum(sizes.values()):,} parameters ("
        + ", ".join(f"{name} {size:,}" for name, size in sizes.items())
        + f"); {model.train_flops(m, d.inputs_length, d.targets_length) / 1e9:.4g} GFLOP to train on one example",
        f"devices  {len(devices)} x {devices[0].device_kind}, mesh {shape}, "
        f"{model.compute_dtype(m).__name__}, batch {cfg.train.batch_size} = {per_device} rows on each device"
        + (f" in {cfg.train.microbatches} microbatches" if cfg.train.microbatches > 1 else ""),
        f"spans    {raw} raw tokens, {noise} of them removed in {spans} spans: {raw - noise} kept + {spans} "
        f"sentinels + EOS = {raw - noise + spans + 1} inputs, {noise} + {spans} + EOS = "
        f"{noise + spans + 1} targets",
    ]


class MetricsFile:
    """RUN_DIR/metrics.jsonl, one flat JSON object a line, `step` first.

    What was written after `step` is cut off: a run that was killed and went on leaves the file of
    one that never stopped.
    """

    def __init__(self, path, step):
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        whole = [line for line in lines if line.endswith("}\n")]
        configs.write_file(path, "".join(line for line in whole if json.loads(line)["step"] <= step))
        self.file = open(path, "a")

    def write(self, step, **groups):
        """groups: prefix={name: number}."""
        line = {"step": step, **{f"{prefix}/{name}": float(value) for prefix, metrics in groups.items()
                                 for name, value in metrics.items()}}
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()


def held_out_passage(params, cfg, mesh):
    """One held-out row -> lines: with blanks, the truth, and what the model wrote into the blanks."""
    tokenizer = data.load_vocabulary(cfg.data)
    rows = mesh.shape["data"]  # a row for each device; the first is shown
    mine = partition.local_rows(rows, mesh)
    batch = partition.put_batch(data.make_batch(cfg, "validation", 0, mine), rows, mesh)
    written = infer.generate(params, batch.inputs, batch.input_segments, cfg.model, cfg.data.targets_length)
    inputs, truth, written = (np.asarray(a.addressable_data(0))[0] for a in (batch.inputs, batch.targets, written))
    truth, written = (infer.split_spans(ids, tokenizer) for ids in (truth, written))
    return [f"  {label:8} {infer.fill_blanks(inputs, spans, tokenizer)}"
            for label, spans in (("blanks", {}), ("truth", truth), ("model", written))]


# ---- the run -------------------------------------------------------------------------------------


def open_run(cfg, run_dir):
    """Lock a run directory, prepare its data, write what other scripts read -> (Config, lock).

    The Config that comes back takes its vocabulary from the run directory.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    lock = open(run_dir / ".lock", "w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"Another process trains in {run_dir}: stop it, or name another --run_dir.") from None
    vocabulary = run_dir / "spiece.model"
    run_cfg = replace(cfg, data=replace(cfg.data, vocab=str(vocabulary)))
    if cfg.data.source != "random:" and not vocabulary.exists():
        data.open_rows(cfg, "train")  # refuses what does not fit before anything is written
        configs.write_file(vocabulary, data.load_vocabulary(cfg.data).serialized)
    data.open_rows(run_cfg, "train")
    configs.save_run(cfg, run_dir)
    return run_cfg, lock


def train(cfg, run_dir):
    """Train a run from where it stands to train.steps -> exit status."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    mesh = partition.set_mesh(cfg)
    print("\n".join(describe(cfg, mesh)), flush=True)
    cfg, lock = open_run(cfg, run_dir)
    t, background = cfg.train, ThreadPoolExecutor(1)
    rows = partition.local_rows(t.batch_size, mesh)

    def load(step):
        return partition.put_batch(data.make_batch(cfg, "train", step, rows), t.batch_size, mesh)

    # The step is compiled in the background while the weights are made or read.
    template = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, a.sharding.spec)),
        jax.eval_shape(functools.partial(init_state, cfg)))
    step_program = jax.jit(functools.partial(train_step, cfg), donate_argnums=0).lower(template, load(0))
    compiling = background.submit(step_program.compile)
    checkpoints = partition.Checkpoints(run_dir, t.keep, t.async_save)
    restored = checkpoints.load(flax.serialization.to_state_dict(template))
    if restored:
        start, arrays = restored
        state = flax.serialization.from_state_dict(template, arrays)
        print(f"resumed  {checkpoints.path(start)}")
        if start >= t.steps:
            print(f"{run_dir} is finished: {start:,} steps. --train.steps {2 * start} would go on.")
            return 0
    else:
        start, state = t.start_step, jax.jit(functools.partial(init_state, cfg))()
    metrics_file = MetricsFile(run_dir / "metrics.jsonl", start)
    step_program = compiling.result()

    evaluates = t.eval_every > 0 and cfg.data.source != "random:"
    baseline = None
    if evaluates:
        held_out = range(min(data.number_of_batches(cfg, "validation"), t.eval_batches or sys.maxsize))
        baseline = data.unigram_loss(cfg, [data.make_batch(cfg, "validation", i) for i in held_out])
        print(f"unigram  {baseline:.3f} nats per content token of the held-out text: the number to beat")
    peak, peak_source = peak_flops()
    print(f"peak     {peak_source}", flush=True)
    flops = t.batch_size * model.train_flops(cfg.model, cfg.data.inputs_length, cfg.data.targets_length)

    bar = tqdm(total=t.steps, initial=start, unit="step", dynamic_ncols=True, disable=None,
               bar_format="{percentage:3.0f}% {bar:10} {n_fmt}/{total_fmt} [{elapsed}<{remaining}]{postfix}")
    next_batch = background.submit(load, start)
    clock, clock_step, waited = time.perf_counter(), start, 0.0
    for step in range(start + 1, t.steps + 1):
        asked = time.perf_counter()
        batch = next_batch.result()
        waited += time.perf_counter() - asked
        next_batch = background.submit(load, step)
        state, metrics = step_program(state, batch)
        bar.update()
        last = step == t.steps or stop.is_set()
        if step % t.log_every == 0 or last:
            metrics = {name: float(value) for name, value in jax.device_get(metrics).items()}  # waits
            now = time.perf_counter()
            per_second = (step - clock_step) / (now - clock)
            timing = {
                "seconds": now - clock, "steps_per_second": per_second,
                "seqs_per_second": per_second * t.batch_size,
                "target_tokens_per_second": per_second * t.batch_size * cfg.data.targets_length,
                "model_flops_per_second": per_second * flops, "model_flops_fraction": per_second * flops / peak,
                "data_wait_fraction": waited / (now - clock)}
            metrics_file.write(step, train=metrics, timing=timing)
            bar.set_postfix_str(
                f" loss {metrics['loss']:.3f} accuracy {metrics['accuracy']:.3f} rate {metrics['learning_rate']:.2e} "
                f"{timing['seqs_per_second']:.4g} examples/s {timing['model_flops_per_second'] / 1e9:.4g} GFLOP/s "
                f"({timing['model_flops_fraction']:.0%} of peak)")
            skipped = int(state.skipped)
            if skipped >= 3:
                configs.note(f"The loss or a gradient was not finite in steps {step - skipped + 1} to {step}; their "
                             f"updates were skipped. The last checkpoint is whole: lower --train.learning_rate.")
                checkpoints.wait()
                return 1
            clock, clock_step, waited = now, step, 0.0
        if evaluates and (step % t.eval_every == 0 or last):
            held_out = evaluate.teacher_forced(state.params, cfg, mesh)
            metrics_file.write(step, **{f"training_eval/{cfg.data.task}": held_out})
            below = baseline - held_out["content_loss"]
            bar.write(f"step {step:,}: held-out loss {held_out['loss']:.3f}, accuracy {held_out['accuracy']:.3f}; content "
                      f"{held_out['content_loss']:.3f} nats per token, {below:.2f} below unigram")
            bar.write("\n".join(held_out_passage(state.params, cfg, mesh)))
        if t.save_every and (step % t.save_every == 0 or last):
            checkpoints.save(flax.serialization.to_state_dict(state), step)
        if step % t.log_every == 0 or last:
            clock = time.perf_counter()
        if last:
            break
    bar.close()
    checkpoints.wait()
    if stop.is_set():
        print(f"stopped  at step {step:,}, as asked; the same command goes on from here.")
        return 0
    print(f"""done     {run_dir}: {step:,} steps. Next:
  python infer.py --run_dir {run_dir} "Return the <extra_id_0> of the list."
  python evaluate.py --run_dir {run_dir}
  python train.py --run_dir {run_dir} --train.steps {2 * step}""")
    return 0


def main(argv):
    args, changes = configs.parse_args(__doc__, argv)
    cfg, run_dir = configs.resolve(args, changes)
    partition.start_jax()
    return train(cfg, Path(run_dir))


if __name__ == "__main__":
    configs.run_command(main)
