"""How a model learns: schedule, optimizers, step, run.

- The rate of a step is a product of named factors, T5X's.
- An optimizer is an entry of a table: slots declared like parameters, and one function.
- train_step is a pure function of a TrainState and a Batch, compiled once.
- run() is the loop: load, step, log, evaluate, save. What it needs to go on is the step alone.
- A killed run goes on from its last checkpoint as if it had never stopped, by the same command.

    python train.py                        the tiny recipe: about two minutes on a CPU
    python train.py --config small_c4      T5 1.1 small on C4, on all devices of this machine
"""

import ctypes
import dataclasses
import functools
import json
import math
import os
import signal
import sys
import tempfile
import threading
import time
import timeit
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Callable, NamedTuple

import flax
import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import optax
from flax.serialization import from_state_dict, to_state_dict
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import lax
from jax.experimental import multihost_utils
from tqdm import tqdm

import configs
import data
import evaluate
import infer
import model
import partition
from configs import UserError, note

try:
    import tensorboardX
except ImportError:  # an extra
    tensorboardX = None

# ---- learning rate -------------------------------------------------------------------------------


def learning_rate(step, cfg):
    """The rate of update number `step`, counted from 0: the product of the schedule's factors.
    cfg: TrainConfig. The factors, and the floor of 1e-8, are those of t5x/utils.py,
    create_learning_rate_scheduler. "constant * rsqrt_decay" with learning_rate 1 and warmup_steps
    10,000 is T5's: 0.01 for 10,000 steps, then 1 / sqrt(step)."""
    step = jnp.maximum(0.0, step - cfg.schedule_offset)
    base, warmup = cfg.learning_rate, cfg.warmup_steps
    cycle = jnp.maximum(0.0, (step - warmup) / cfg.steps_per_cycle)
    factors = {
        "constant": lambda: base,
        "linear_warmup": lambda: jnp.minimum(1.0, step / warmup),
        "linear_decay": lambda: (
            base * jnp.minimum(step / warmup, 1 + cfg.decay_factor * (warmup - step))
        ),
        "rsqrt_decay": lambda: 1 / jnp.sqrt(jnp.maximum(step, warmup)),
        "rsqrt_normalized_decay": lambda: (
            math.sqrt(warmup) / jnp.sqrt(jnp.maximum(step, warmup))
        ),
        "decay_every": lambda: cfg.decay_factor ** (step // cfg.steps_per_decay),
        "cosine_decay": lambda: jnp.maximum(
            0.0, 0.5 * (1 + jnp.cos(jnp.pi * (cycle % 1.0)))
        ),
    }
    rate = 1.0
    for name in map(str.strip, cfg.schedule.split("*")):
        if name not in factors:
            raise UserError(
                f"--train.schedule: no {name!r}; there are {', '.join(factors)}."
            )
        rate = rate * factors[name]()
    return jnp.maximum(rate, 1e-8)


# ---- optimizers ----------------------------------------------------------------------------------


class Optimizer(NamedTuple):
    """slots(table of Params) -> the nested dict of the slots' Params; they begin with what init
    makes of the parameters, without it with zeros.
    update(table, params, grads, slots, updates so far, rate, TrainConfig) -> (params, slots)"""

    slots: Callable
    update: Callable
    init: Callable | None = None


# Adafactor: Shazeer and Stern 2018 (arXiv:1804.04235) with T5X's settings: no momentum, updates
# scaled by the parameter's own size and clipped at an RMS of 1. Written out because optax's takes
# 1.6 times as long on a CPU; test_all.py holds the two against each other. Layers are stacked in
# one array, but every statistic is one layer's own.


def is_factored(p):
    """Matrices of at least 128 x 128 keep the means of their rows and columns alone."""
    shape = p.shape[p.axes[0] == "layers" :]
    return len(shape) == 2 and min(shape) >= 128


def adafactor_slots(table):
    """{row [..., a], column [..., b]} of a matrix, or {full}."""

    def slots(p):
        if not is_factored(p):
            return {"full": p}
        return {
            "row": model.Param(p.shape[:-1], p.axes[:-1]),
            "column": model.Param(p.shape[:-2] + p.shape[-1:], p.axes[:-2] + p.axes[-1:]),
        }

    return jax.tree.map(slots, table, is_leaf=model.is_param)


def adafactor_update(table, params, grads, slots, count, rate, train):
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
            s = {
                "row": smooth(s["row"], squared.mean(-1)),
                "column": smooth(s["column"], squared.mean(-2)),
            }
            row = s["row"] / s["row"].mean(-1, keepdims=True)
            u = g * lax.rsqrt(row)[..., None] * lax.rsqrt(s["column"])[..., None, :]
        size = jnp.maximum(rms(w), 1e-3)
        return w * (1 - train.weight_decay) - rate * size / jnp.maximum(
            1.0, rms(u)
        ) * u, s

    both = jax.tree.map(update, table, params, grads, slots, is_leaf=model.is_param)
    return tuple(
        jax.tree.map(lambda _, pair: pair[i], table, both, is_leaf=model.is_param)
        for i in (0, 1)
    )


OPTIMIZERS = configs.OPTIMIZERS  # to which a recipe file may add its own
OPTIMIZERS["adafactor"] = Optimizer(adafactor_slots, adafactor_update)


# ---- state and step ------------------------------------------------------------------------------


@flax.struct.dataclass
class TrainState:
    step: jax.Array  # updates done, skipped ones and start_step included
    count: jax.Array  # updates the optimizer's slots have seen
    skipped: jax.Array  # updates skipped in a row, because something was not finite
    params: dict
    slots: dict


def init_state(cfg):
    """Config -> fresh TrainState, in its layout at rest."""
    rules = partition.STORAGE_RULES if cfg.mesh.fsdp else partition.RULES
    optimizer = OPTIMIZERS[cfg.train.optimizer]
    params = model.init_params(cfg.model, jax.random.key(cfg.train.seed), rules)
    slots = (
        optimizer.init(params)
        if optimizer.init
        else jax.tree.map(
            lambda p: jnp.zeros(p.shape, out_sharding=partition.spec(p.axes, rules)),
            optimizer.slots(model.param_table(cfg.model)),
            is_leaf=model.is_param,
        )
    )
    zero = jnp.zeros((), jnp.int32, out_sharding=jax.P())
    return TrainState(zero + cfg.train.start_step, zero, zero, params, slots)


def gradients(cfg, params, batch, key):
    """Mean gradient over the batch's real target tokens -> (sums of model.loss_fn, gradients).
    Microbatches are summed and divided by the tokens of the whole batch once, so that their number
    changes nothing. A microbatch takes every n-th row, which each device finds among its own."""
    tokens = jnp.sum(batch.target_segments > 0)
    divisor = cfg.train.loss_divisor or jnp.maximum(tokens, 1).astype(jnp.float32)

    def loss(params, part, key):
        loss, sums = model.loss_fn(params, part, cfg, key)
        return loss / divisor, sums

    grad = jax.grad(loss, has_aux=True)
    n = cfg.train.microbatches
    if n == 1:
        return grad(params, batch, key)[::-1]

    def add(total, part):
        return jax.tree.map(jnp.add, total, grad(params, *part)[::-1]), None

    parts = jax.tree.map(lambda a: a.reshape(-1, n, a.shape[1]).swapaxes(0, 1), batch)
    keys = None if key is None else jax.random.split(key, n)
    first = jax.tree.map(lambda a: a[0], (parts, keys))
    shapes = jax.eval_shape(lambda *part: grad(params, *part), *first)
    zeros = jax.tree.map(
        lambda s: jnp.zeros(s.shape, s.dtype, out_sharding=s.sharding), shapes
    )
    return lax.scan(add, zeros[::-1], (parts, keys))[0]


def train_step(cfg, state, batch):
    """One update: TrainState, Batch -> (TrainState, metrics). A function of its arguments alone."""
    key = None
    if cfg.model.dropout:
        key = jax.random.fold_in(jax.random.key(cfg.train.seed + 1), state.step)
    sums, grads = gradients(cfg, state.params, batch, key)
    rate = learning_rate(state.step, cfg.train)
    table, update = model.param_table(cfg.model), OPTIMIZERS[cfg.train.optimizer].update
    params, slots = update(
        table, state.params, grads, state.slots, state.count, rate, cfg.train
    )
    grad_norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
    finite = jnp.isfinite(grad_norm) & jnp.isfinite(sums["cross_ent_loss"])
    params, slots = jax.tree.map(
        lambda new, old: jnp.where(finite, new, old),
        (params, slots),
        (state.params, state.slots),
    )
    metrics = {
        **model.mean_metrics(sums),
        "learning_rate": rate,
        "gradient_norm": grad_norm,
        "non_padding_fraction/inputs": jnp.mean(batch.input_segments > 0),
        "non_padding_fraction/targets": jnp.mean(batch.target_segments > 0),
    }
    skipped = jnp.where(finite, 0, state.skipped + 1)
    return TrainState(
        state.step + 1, state.count + finite, skipped, params, slots
    ), metrics


# ---- the run -------------------------------------------------------------------------------------


def run(cfg, program, state, start, load, screen, save, stops):
    """Train from step `start` to train.steps -> (the last step, TrainState). program: train_step,
    compiled; load(step): the Batch that follows this step, on the devices; screen: what shows,
    logs and evaluates (see Screen); save(step, state): begins a checkpoint; stops(step): whether
    somebody asks to stop here."""
    t, loader, step = cfg.train, ThreadPoolExecutor(1), start
    batch = loader.submit(load, start)
    for step in range(start + 1, t.steps + 1):
        ready = screen.wait(batch)
        if step < t.steps:
            batch = loader.submit(load, step)
        state, metrics = program(state, ready)
        asked = stops(step)
        logs, evaluates, infers, saves = (
            every > 0 and (step % every == 0 or step == t.steps)
            for every in (t.log_every, t.eval_every, t.infer_every, t.save_every)
        )
        if logs:
            screen.log(step, metrics)
        if logs or saves:
            screen.check(step, int(state.skipped))
        if evaluates:
            screen.evaluate(step, state.params)
        if infers:
            screen.predict(step, state.params)
        if saves or (asked and t.save_every):
            save(step, state)
        if logs or evaluates or infers or saves:
            screen.restart(step)
        if asked:
            break
    return step, state


# ====== below: other optimizers, the screen, the steps of a run, plans, the command ===============


def from_optax(make):
    """(rate, TrainConfig) -> optax.GradientTransformation, as an Optimizer."""

    def slots(table):
        blank = jax.tree.map(
            lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32),
            table,
            is_leaf=model.is_param,
        )
        optimizer = make(0.0, configs.TrainConfig())

        def declare(a, p=None):  # -> a function, as a Param is a tree itself
            axes = p.axes if p and p.shape == a.shape else (None,) * len(a.shape)
            return lambda: model.Param(a.shape, axes)

        declared = optax.tree_map_params(
            optimizer,
            declare,
            jax.eval_shape(optimizer.init, blank),
            table,
            transform_non_params=declare,
            is_leaf=model.is_param,
        )
        return jax.tree.map(lambda param: param(), pruned(declared))

    def pruned(state):  # without the empty states of transformations that have none
        return unflatten_dict(flatten_dict(to_state_dict(state)))

    def update(table, params, grads, slots, count, rate, train):
        optimizer = make(rate, train)
        state = optimizer.init(params)
        whole = flatten_dict(to_state_dict(state), keep_empty_nodes=True) | flatten_dict(
            slots
        )
        updates, state = optimizer.update(
            grads, from_state_dict(state, unflatten_dict(whole)), params
        )
        return optax.apply_updates(params, updates), pruned(state)

    return Optimizer(
        slots,
        update,
        lambda params: pruned(make(0.0, configs.TrainConfig()).init(params)),
    )


OPTIMIZERS["adamw"] = from_optax(
    lambda rate, train: optax.adamw(rate, weight_decay=train.weight_decay)
)


# ---- what the screen shows -----------------------------------------------------------------------


def describe_run(cfg, recipe, mesh):
    """The lines a run begins with: what differs from its recipe, the model, the devices, a row."""
    t, devices, changed = cfg.train, jax.devices(), configs.differences(cfg, recipe)
    shape = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    batch = (
        f"batch {t.batch_size} = {t.batch_size // mesh.shape['data']} rows on each device"
    )
    batch += f", in {t.microbatches} microbatches" * (t.microbatches > 1)
    return [
        f"recipe {cfg.name}" + ("" if changed else ", unchanged"),
        *(f"  {name} {new} (recipe: {old})" for name, (new, old) in changed.items()),
        f"model    {model.describe_model(cfg)}",
        f"devices  {len(devices)} x {devices[0].device_kind}, mesh {shape}, "
        f"{jnp.dtype(model.compute_dtype(cfg.model)).name}, {batch}",
        data.describe_rows(cfg),
    ]


def peak_flops():
    """Operations per second of all devices at their best -> (number, where it comes from)."""
    kind = jax.devices()[0].device_kind
    for name, chip in partition.CHIPS.items():
        if name in kind:
            peak = chip.teraflops * 1e12 * jax.device_count()
            return (
                peak,
                f"{peak / 1e12:,} TFLOP/s in bfloat16, by the data sheet of {name}",
            )
    a = jnp.ones((1024, 1024))
    product = jax.jit(jnp.matmul)  # the first compiles; ten find the machine awake
    seconds = min(
        timeit.repeat(lambda: product(a, a).block_until_ready(), number=1, repeat=10)
    )
    rate = 2 * 1024**3 / seconds * jax.process_count()
    return rate, f"{rate / 1e9:.0f} GFLOP/s, measured in a 1024 x 1024 matrix product"


def step_flops(cfg):
    """Floating-point operations of a step, on all devices together."""
    return cfg.train.batch_size * model.train_flops(
        cfg.model, cfg.data.inputs_length, cfg.data.targets_length
    )


def held_out_passage(params, cfg, mesh, dataset):
    """A held-out row -> lines: with blanks, or its inputs; the truth; what the model wrote."""
    tokenizer = dataset.tasks[0].tokenizer
    rows = mesh.shape["data"]  # a row for each device; the first is shown
    batch = dataset.batch(0, partition.local_rows(rows, mesh))
    batch = partition.put_batch(batch, rows, mesh)
    written, _ = infer.generate(
        params, batch.inputs, batch.input_segments, cfg.model, cfg.data.targets_length
    )
    inputs, truth, written = (
        np.asarray(a.addressable_data(0))[0]
        for a in (batch.inputs, batch.targets, written[:, 0])
    )
    if data.is_span_corruption(cfg):
        texts = {
            label: infer.fill_blanks(inputs, infer.split_spans(ids, tokenizer), tokenizer)
            for label, ids in (("blanks", []), ("truth", truth), ("model", written))
        }
    else:
        texts = {
            label: tokenizer.decode(ids)
            for label, ids in (("inputs", inputs), ("truth", truth), ("model", written))
        }
    return [
        configs.escape_controls(f"  {label:8} {text}") for label, text in texts.items()
    ]


class MetricsFile:
    """RUN_DIR/metrics.jsonl, a flat JSON object a line, `step` first; of the first process alone.
    What was written after `step` is cut off: a run that was killed and went on leaves the file of
    one that never stopped. Where tensorboardX is installed, the same goes to RUN_DIR/tensorboard.
    A remote file is kept here and copied there by sync()."""

    def __init__(self, path, step):
        self.remote = path if configs.is_remote(path) else None
        self.events = (
            tensorboardX
            and not self.remote
            and functools.cache(
                lambda prefix: tensorboardX.SummaryWriter(  # a file for each group
                    str(path.parent / "tensorboard" / prefix), purge_step=step + 1
                )
            )
        )
        lines = partition.read_metrics_file(path)
        self.path = Path(tempfile.mkdtemp(), "metrics.jsonl") if self.remote else path
        configs.write_file(
            self.path,
            "".join(json.dumps(line) + "\n" for line in lines if line["step"] <= step),
        )
        self.file = open(self.path, "a")

    def write(self, step, **groups):
        """groups: prefix={name: number}."""
        line = {
            f"{prefix}/{name}": float(value)
            for prefix, metrics in groups.items()
            for name, value in metrics.items()
        }
        with configs.naming_file(self.path):
            self.file.write(json.dumps({"step": step, **line}) + "\n")
            self.file.flush()
        for prefix, metrics in groups.items() if self.events else ():
            for name, value in metrics.items():
                # as SeqIO
                tag = f"eval/{name}" if prefix.startswith("inference_eval/") else name
                if math.isfinite(value):
                    self.events(prefix).add_scalar(tag, float(value), step)
            self.events(prefix).flush()

    def sync(self):
        """Make sure that what was written survives a power cut."""
        os.fsync(self.file.fileno())
        if self.remote:
            configs.write_file(self.remote, self.path.read_text())


class NotFinite(Exception):
    """Loss or gradients were not finite several times in a row."""


class RunLogger:
    """What a run shows and records while it goes on: a bar, its speed, metrics.jsonl, evaluations;
    where standard output is no terminal, a plain line every ten seconds in the bar's place.
    held_out: {task: (Config, Dataset)}; counts: how frequent training tokens are, a baseline."""

    def __init__(self, cfg, mesh, run_dir, start, held_out, counts):
        self.cfg, self.mesh, self.run_dir, t = cfg, mesh, run_dir, cfg.train
        self.file = (
            MetricsFile(run_dir / "metrics.jsonl", start)
            if partition.is_main_process()
            else None
        )
        self.flops = step_flops(cfg)
        self.peak, source = peak_flops()
        print(f"peak     {source}", flush=True)
        self.tasks = []  # (name, Config, Dataset, batches, unigram loss)
        for name, (alone, dataset) in held_out.items():
            batches = dataset.batches(t.eval_batches)
            baseline = data.unigram_loss(
                counts,
                [dataset.batch(i) for i in range(batches)],
                dataset.tasks[0].tokenizer,
            )
            self.tasks.append((name, alone, dataset, batches, baseline))
            of = f" of {name}" if name != cfg.data.task else ""
            print(
                f"unigram  {baseline:.3f} nats per content token of the held-out text{of} "
                f"(neither sentinel nor EOS): the number to beat",
                flush=True,
            )
        self.bar = tqdm(
            total=t.steps,
            initial=start,
            file=sys.stdout,
            disable=not sys.stdout.isatty(),
            dynamic_ncols=True,
            bar_format="{percentage:3.0f}% {bar:8} {n_fmt}/{total_fmt} "
            "[{elapsed}<{remaining}]{postfix}",
        )
        self.printed, self.warned, self.began, self.first = (
            0.0,
            False,
            time.perf_counter(),
            start,
        )
        self.restart(start)

    def restart(self, step):
        """Measure from here on: what came before, an evaluation or a save, was not training."""
        self.step, self.clock, self.waited = step, time.perf_counter(), 0.0

    def wait(self, future):
        """The result of a future; the time this takes counts as waiting for data."""
        asked = time.perf_counter()
        result = future.result()
        self.waited += time.perf_counter() - asked
        return result

    def write(self, step, **groups):
        if self.file:
            self.file.write(step, **groups)

    def log(self, step, metrics):
        """Write and show the metrics of a step and the speed of the steps since the last one."""
        metrics = {name: float(value) for name, value in jax.device_get(metrics).items()}
        seconds, rows = time.perf_counter() - self.clock, self.cfg.train.batch_size
        steps = (step - self.step) / seconds
        timing = {
            "seconds": seconds,
            "steps_per_second": steps,
            "seqs_per_second": steps * rows,
            "target_tokens_per_second": steps * rows * self.cfg.data.targets_length,
            "model_flops_per_second": steps * self.flops,
            "model_flops_fraction": steps * self.flops / self.peak,
            "data_wait_fraction": self.waited / seconds,
        }
        self.write(step, train=metrics, timing=timing)
        if timing["data_wait_fraction"] > 0.05 and seconds > 1 and not self.warned:
            self.warned = True
            self.bar.write(
                f"warning: {timing['data_wait_fraction']:.0%} of the time up to step "
                f"{step:,} was waiting for data (timing/data_wait_fraction in "
                f"metrics.jsonl)",
                file=sys.stderr,
            )
        text = (
            f"loss {metrics['loss']:.3f}  accuracy {metrics['accuracy']:.3f}  "
            f"rate {metrics['learning_rate']:.1e}  {steps * rows:.4g} examples/s  "
            f"{steps * self.flops / 1e9:.4g} GFLOP/s ({steps * self.flops / self.peak:.0%})"
        )
        self.bar.update(step - self.bar.n)
        self.bar.set_postfix_str(f" {text}")
        now = time.perf_counter()
        if self.bar.disable and (now - self.printed > 10 or step == self.cfg.train.steps):
            self.printed = now
            left = (
                (now - self.began) / (step - self.first) * (self.cfg.train.steps - step)
            )
            print(
                f"step {step:,}/{self.cfg.train.steps:,}  {text}  "
                f"{tqdm.format_interval(left)} left",
                flush=True,
            )

    def check(self, step, skipped):
        """Raise NotFinite where several updates in a row were skipped."""
        if skipped < 3:
            return
        first, done = step - skipped + 1, step - self.cfg.train.start_step
        rows = self.cfg.train.batch_size
        raise NotFinite(
            f"Loss or gradients of steps {first:,} to {step:,} (rows {(done - skipped) * rows:,} "
            f"to {done * rows - 1:,} of the run) were not finite; their updates were skipped. "
            f"Begin another run with a lower --train.learning_rate."
        )

    def evaluate(self, step, params):
        """Write the metrics of each task's held-out batches, show them and a passage."""
        for name, cfg, dataset, batches, baseline in self.tasks:
            metrics = evaluate.evaluate_loss(params, cfg, self.mesh, dataset, batches)
            self.write(step, **{f"training_eval/{name}": metrics})
            content = metrics["content_loss"]
            below = baseline - content
            title = f"{name}: " if len(self.tasks) > 1 else ""
            self.bar.write(
                f"step {step:,}: {title}held-out loss {metrics['loss']:.3f}, accuracy "
                f"{metrics['accuracy']:.3f}; content {content:.3f} nats per token, "
                f"{abs(below):.2f} {'under' if below > 0 else 'above'} the unigram baseline"
            )
        _, cfg, dataset, *_ = self.tasks[0]
        self.bar.write("\n".join(held_out_passage(params, cfg, self.mesh, dataset)))

    def predict(self, step, params):
        """The same on decoded text, by each task's metrics; what was predicted goes to eval/."""
        most = self.cfg.train.eval_batches * self.cfg.train.batch_size or None
        for name, cfg, dataset, *_ in self.tasks:
            if len(dataset.tasks[0].task.objective.features) < 2:
                continue
            metrics, lines = evaluate.predict(
                params, cfg, self.mesh, "validation", dataset.tasks[0].tokenizer, most
            )
            self.write(step, **{f"inference_eval/{name}": metrics})
            evaluate.write_lines(self.run_dir / "eval", name, step, lines)
            self.bar.write(
                f"step {step:,}: {name}: "
                + ", ".join(f"{metric} {value:.2f}" for metric, value in metrics.items())
            )

    def best(self, steps):
        """By train.keep_best the best of these steps and its value, or None."""
        metric = self.cfg.train.keep_best
        return (
            partition.best_step(self.file.path, metric, steps)
            if self.file and metric
            else None
        )


# ---- the steps of a run --------------------------------------------------------------------------

SMALLER_STEP = (
    "--train.batch_size, --data.inputs_length, --data.targets_length or the model's sizes, "
    "raise --train.microbatches, add --model.remat full"
)


def lock_run(run_dir, checkpoints):
    """Take a run directory for this process alone, the first of a run -> the lock."""
    if not partition.is_main_process():
        return None
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = None if configs.is_remote(run_dir) else configs.lock(run_dir / ".lock")
    except BlockingIOError:
        raise UserError(
            f"Another process trains in {run_dir}: stop it, or name another --run_dir."
        ) from None
    except OSError as error:
        raise UserError(
            f"--run_dir {run_dir} cannot be written ({error.strerror}): name another."
        ) from error
    if not lock:
        note(
            f"{run_dir} cannot be locked: see to it that one run at a time goes on there."
        )
    checkpoints.discard_unfinished()
    return lock


def run_tokenizer(cfg, run_dir, begun, source):
    """The Tokenizer of a run: its own, that of the run whose weights it starts from, or the one
    that data.vocab names, which may have to be trained."""
    if begun or not partition.is_main_process():
        return data.load_tokenizer(run_dir / "spiece.model")
    if not source:
        return data.prepare_vocabulary(cfg)
    partition.find_checkpoint(source)  # refuses what is none
    source, train = configs.to_path(source), cfg.data.vocab.startswith("train:")
    path = next(
        (
            folder / "spiece.model"
            for folder in (source, *source.parents[:2])
            if (folder / "spiece.model").exists()
        ),
        None,
    )
    if not path and train:
        raise UserError(
            f"{source} has no vocabulary, and its weights mean nothing with another: "
            f"put the spiece.model of its training there, or name it by --data.vocab."
        )
    tokenizer = data.load_tokenizer(path if path and train else cfg.data.vocab)
    if path and tokenizer.sha256 != data.load_tokenizer(path).sha256:
        raise UserError(f"Leave out --data.vocab: it is not the vocabulary of {source}.")
    return tokenizer


def open_data(cfg, run_dir, begun, source, recipe_file):
    """-> (training Dataset, {task: (Config, Dataset)} of what is evaluated); records the run."""
    tokenizer, t = run_tokenizer(cfg, run_dir, begun, source), cfg.train
    dataset = data.prepare(cfg, "train", tokenizer)
    tasks = data.evaluation_configs(cfg) if t.eval_every or t.infer_every else {}
    if t.infer_every:
        evaluate.check_metrics(tasks)
    wanted = [
        f"{kind}_eval/{name}/"
        for kind, every in (("training", t.eval_every), ("inference", t.infer_every))
        if every
        for name in tasks
    ]
    if t.keep_best and not t.keep_best.startswith(tuple(wanted)):
        raise UserError(
            f"--train.keep_best {t.keep_best}: no evaluation of this run writes it; "
            f"there are {', '.join(f'{name}...' for name in wanted) or 'none'}."
        )
    held_out = {
        name: (alone, data.prepare(alone, "validation", tokenizer))
        for name, alone in tasks.items()
    }
    if partition.is_main_process():
        write_run_files(cfg, run_dir, tokenizer, dataset, begun, recipe_file)
    return dataset, held_out


def write_run_files(cfg, run_dir, tokenizer, dataset, begun, recipe_file):
    """Write what the other scripts read of a run: config.json, spiece.model, recipe.py."""
    if begun:
        before = configs.read_run(run_dir)[1].get("corpus")
        if before and before != dataset.digest:
            note(
                f"{cfg.data.source} changed since {run_dir} began: it goes on with other data."
            )
    else:
        configs.write_file(run_dir / "spiece.model", tokenizer.serialized)
    configs.save_run(cfg, run_dir, dataset.digest)
    if recipe_file and str(recipe_file) != str(run_dir / "recipe.py"):
        configs.write_file(run_dir / "recipe.py", Path(recipe_file).read_text())


def state_template(cfg, mesh):
    """Config -> TrainState of ShapeDtypeStructs with their layouts; nothing is computed."""
    return jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(
            a.shape,
            a.dtype,
            sharding=jax.NamedSharding(
                # optax's counters have no layout yet
                mesh,
                a.sharding.spec if a.sharding else jax.P(),
            ),
        ),
        jax.eval_shape(functools.partial(init_state, cfg)),
    )


def batch_template(cfg, mesh, rows):
    """The same for a batch of so many rows."""
    layout = jax.NamedSharding(mesh, jax.P("data"))
    return jax.tree.map(
        lambda a: jax.ShapeDtypeStruct((rows, a.shape[1]), a.dtype, sharding=layout),
        data.fill_rows(
            [], np.zeros(0, int), 1, (cfg.data.inputs_length, cfg.data.targets_length)
        ),
    )


def lower_step(cfg, mesh):
    """-> (state_template, the training step for these devices, ready to be compiled)."""
    template, kind = state_template(cfg, mesh), mesh.devices.flat[0].device_kind
    options = partition.ASYNC_GATHER_OPTIONS | (
        {} if kind in ("TPU v3", "TPU v4") else partition.ASYNC_REDUCE_OPTIONS
    )
    options |= partition.FUSION_MEMORY_OPTIONS if kind.startswith("TPU v5") else {}
    step = jax.jit(
        functools.partial(train_step, cfg),
        donate_argnums=0,
        compiler_options=options if partition.platform() == "tpu" else None,
    )
    return template, step.lower(template, batch_template(cfg, mesh, cfg.train.batch_size))


def compile_and_load(cfg, mesh, checkpoints, source=None):
    """The compiled training step, and the state it starts from -> (program, TrainState, step). The
    state is the newest checkpoint's or a fresh one, or takes its weights, or all, from `source`,
    another run or checkpoint. The step compiles in a thread meanwhile."""
    template, step = lower_step(cfg, mesh)

    def compiled():
        program = step.compile()
        if sizes := program.memory_analysis():
            partition.check_memory(
                {
                    "weights and optimizer": mesh.size * sizes.argument_size_in_bytes,
                    "a step": mesh.size * sizes.temp_size_in_bytes,
                },
                SMALLER_STEP,
            )
        return program

    with ThreadPoolExecutor(1) as thread:
        note("compiling the training step")
        program = thread.submit(compiled)
        wanted, t = to_state_dict(template), cfg.train
        restored = checkpoints.load(wanted)
        if restored:
            print(f"resumed  {checkpoints.path(restored[0])}", flush=True)
        elif source and t.restore == "all":
            restored = partition.load_newest(source, wanted)
            if not t.start_step <= restored[0] < t.steps:
                raise UserError(
                    f"{source} is at step {restored[0]:,}: --train.restore all goes on "
                    f"from there: --train.start_step at most that, --train.steps more."
                )
            print(
                f"started  {source}, step {restored[0]:,}, with its optimizer", flush=True
            )
        if restored:
            return program.result(), from_state_dict(template, restored[1]), restored[0]
        # hardly optimized: it runs once, and compiles in half the time
        options = (
            {"xla_backend_optimization_level": "1"}
            if partition.platform() == "cpu"
            else {}
        )
        shardings = jax.tree.map(lambda a: a.sharding, template)
        init = jax.jit(functools.partial(init_state, cfg), out_shardings=shardings)
        state = init.lower().compile(options)()
        if source:
            found, arrays = partition.load_newest(source, {"params": wanted["params"]})
            state = dataclasses.replace(state, params=arrays["params"])
            print(f"started  {source}, the weights of step {found:,}", flush=True)
        elif t.start_step:
            note(
                f"warning: fresh weights at step {t.start_step:,}: name the run that they should "
                f"continue by --init_from."
            )
        return program.result(), state, t.start_step


def train(cfg, run_dir, recipe, recipe_file=None, source=None):
    """Train a run from where it stands to train.steps -> exit status."""
    mesh, t, stop = partition.set_mesh(cfg), cfg.train, threading.Event()
    learning_rate(0, t)  # refuses an unknown factor before anything is written
    partition.check_memory(
        model.minimum_memory(
            cfg.model,
            t.batch_size // t.microbatches,
            cfg.data.inputs_length,
            cfg.data.targets_length,
            copies=2,
        ),
        SMALLER_STEP,
    )
    print("\n".join(describe_run(cfg, recipe, mesh)), flush=True)
    checkpoints = partition.Checkpoints(run_dir, t.keep, t.async_save)
    lock = partition.run_on_all(lambda: lock_run(run_dir, checkpoints))
    begun = bool(partition.from_main_process(checkpoints.steps()))
    if not partition.is_main_process() and not run_dir.exists():
        raise UserError(f"--run_dir {run_dir} must be one folder that all processes see.")
    dataset, held_out = partition.run_on_main_first(
        lambda: open_data(cfg, run_dir, begun, source, recipe_file)
    )
    written = (run_dir / "config.json").read_text()
    if not partition.all_processes_agree(partition.from_main_process(written) == written):
        raise UserError(f"--run_dir {run_dir} must be one folder that all processes see.")
    if jax.process_count() == 1:
        signal.signal(signal.SIGTERM, lambda *_: stop.set())
    try:
        program, state, start = compile_and_load(cfg, mesh, checkpoints, source)
        if partition.is_main_process():
            configs.write_file(run_dir / "model-info.txt", model_info(cfg, mesh))
        if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
            trim(0)  # glibc keeps what the compiler freed: half a gigabyte at the peak
        if start >= t.steps:
            print(
                f"finished {run_dir} has its {start:,} steps; --train.steps {2 * start} goes on."
            )
            return 0
        counts = np.bincount(dataset.sample(1 << 20), minlength=cfg.model.vocab_size)
        screen = RunLogger(cfg, mesh, run_dir, start, held_out, counts)
        return run_and_report(
            cfg, mesh, run_dir, checkpoints, dataset, screen, program, state, start, stop
        )
    finally:
        for opened in (dataset, *(opened for _, opened in held_out.values())):
            opened.close()
        if lock:
            lock.close()


def run_and_report(
    cfg, mesh, run_dir, checkpoints, dataset, screen, program, state, start, stop
):
    """The run itself, and what the screen says at its end -> exit status."""
    t, rows = cfg.train, partition.local_rows(cfg.train.batch_size, mesh)
    alone = jax.process_count() == 1

    def load(step):
        return partition.put_batch(
            dataset.batch(step - t.start_step, rows), t.batch_size, mesh
        )

    first, last = map(int, (t.profile or "0:0").split(":"))

    def profile(step):  # one step more, so that the last one is over
        if step == first - 1:
            jax.profiler.start_trace(run_dir / "profile")
        if start < first <= t.steps and step == min(last + 1, t.steps):
            jax.profiler.stop_trace()

    def stops(step):  # by SIGTERM: a save is added, the metrics stay as they were
        profile(step)
        return (
            stop.is_set()
            if alone
            else multihost_utils.reached_preemption_sync_point(step)
        )

    def save(step, state):
        if screen.file:
            screen.file.sync()
        checkpoints.wait()  # the one before may be the best
        best = screen.best([*checkpoints.steps(), step])
        checkpoints.save(to_state_dict(state), step, best and best[0])

    try:
        profile(start)
        step, state = run(cfg, program, state, start, load, screen, save, stops)
    except NotFinite as error:
        checkpoints.wait()
        note(error)
        return 1
    finally:
        screen.bar.close()
        if screen.file:
            screen.file.sync()
    checkpoints.wait()
    if step < t.steps:
        print(
            f"stopped  at step {step:,}, as asked; "
            + (
                "the same command goes on from here."
                if t.save_every
                else "nothing was saved."
            )
        )
        return 0
    if best := screen.best(checkpoints.steps()):
        print(f"best     step {best[0]:,}: {t.keep_best} {best[1]:.4g}")
    print(f"done     {run_dir}: {step:,} steps.")
    if t.save_every and t.eval_every:
        spans = data.is_span_corruption(cfg)
        text = "Return the <extra_id_0> of the list." if spans else "some inputs"
        print(f"""Next:
  python infer.py --run_dir {run_dir} "{text}"
  python evaluate.py --run_dir {run_dir}
  python train.py --run_dir {run_dir} --train.steps {2 * t.steps - t.start_step}""")
    return 0


# ---- a plan for machines that are not at hand ----------------------------------------------------


def model_info(cfg, mesh):
    """The text of model-info.txt: every parameter and optimizer slot, as T5X writes it."""
    template, table = state_template(cfg, mesh), model.param_table(cfg.model)
    slots = OPTIMIZERS[cfg.train.optimizer].slots(table)
    axes = partition.flatten({"params": table, "slots": slots})
    arrays = partition.flatten({"params": template.params, "slots": template.slots})
    text = ""
    for name, a in arrays.items():
        shape = ", ".join(
            f"{axis}={size}" for axis, size in zip(axes[name].axes, a.shape)
        )
        text += (
            f"{name:60} size {math.prod(a.shape):>12,}   shape ({shape})   "
            f"partition {tuple(a.sharding.spec)}\n"
        )
    return f"{text}Total number of parameters: {model.count_params(table):,}\n"


def activation_bytes(cfg, params, batch):
    """Bytes that one device keeps of a forward pass for the backward pass, in their own dtypes:
    what jax.vjp keeps, without what was there before. params, batch: ShapeDtypeStructs."""
    key = jax.random.key(0) if cfg.model.dropout else None

    def kept(params, batch):
        return jax.vjp(lambda params: model.loss_fn(params, batch, cfg, key)[0], params)[
            1
        ]

    program = jax.make_jaxpr(kept)(params, batch).jaxpr
    found = {v for v in program.outvars if isinstance(v, jax.extend.core.Var)} - {
        *program.invars
    }
    return partition.bytes_on_device([v.aval for v in found])


def memory_table(cfg, mesh):
    """Config -> {what: bytes on one device} of a training step."""
    template = state_template(cfg, mesh)
    batch = batch_template(cfg, mesh, cfg.train.batch_size // cfg.train.microbatches)
    parameters = partition.bytes_on_device(template.params)
    return {
        "parameters": parameters,
        "optimizer": partition.bytes_on_device(template.slots),
        "gradients": parameters,
        "activations": activation_bytes(cfg, template.params, batch),
    }


# What makes a step smaller: the next value of a field, and its price; the cheapest stand first.
MEMORY_OPTIONS = {
    "train.microbatches": (
        lambda cfg: 2 * cfg.train.microbatches,
        "smaller products, more often",
    ),
    "model.remat": (lambda cfg: "full", "a third more arithmetic"),
    "mesh.fsdp": (lambda cfg: True, "the weights of each layer are gathered"),
    "mesh.model": (
        lambda cfg: 2 * cfg.mesh.model,
        "the activations of each layer are summed",
    ),
    "train.batch_size": (
        lambda cfg: cfg.train.batch_size // 2,
        "another run, of fewer examples",
    ),
}


def memory_savings(cfg, names=MEMORY_OPTIONS, pile=False):
    """[(flag, bytes on one device that it leaves, its price)] of the levers that help, each by
    itself, the one that leaves least first; pile: each on top of those before it."""
    mesh, found = jax.sharding.get_mesh(), []
    least = sum(memory_table(cfg, mesh).values())
    for name in names:
        following, price = MEMORY_OPTIONS[name]
        value = following(cfg)
        changed = configs.override(cfg, {name: value})
        try:
            configs.check(changed)
            there = partition.set_mesh(changed, mesh.devices.ravel())
        except UserError:  # something does not divide
            continue
        size = sum(memory_table(changed, there).values())
        if size < least:
            found.append((f"--{name} {str(value).lower()}", size, price))
            cfg, least = (changed, size) if pile else (cfg, least)
    jax.set_mesh(mesh)
    return found if pile else sorted(found, key=lambda lever: lever[1])


def out_of_memory_message(cfg):
    """What to do about it, in the order of what it costs, with what each would leave."""
    memory = memory_table(cfg, jax.sharding.get_mesh())
    held = ", ".join(f"{name} {size / 1e9:.3g}" for name, size in memory.items())
    helps = ", ".join(
        f"{flag} ({size / 1e9:.3g} GB)"
        for flag, size, _ in memory_savings(
            cfg, ("train.microbatches", "model.remat", "mesh.fsdp"), pile=True
        )
    )
    return (
        f"Out of memory: a step keeps at least {sum(memory.values()) / 1e9:.3g} GB on each "
        f"device ({held}). Add, one after the other, {helps or 'more devices'}; then a higher "
        f"--mesh.model or a smaller --train.batch_size."
    )


def plan_mesh(cfg, where):
    """The mesh of machines that need not be there: `where` devices, or a TPU topology."""
    jax.config.update("jax_platforms", "cpu")
    if where.isdecimal():
        if not 1 <= int(where) <= 2048:
            raise UserError(
                "--plan takes 1 to 2048 devices; a plan for a part of them, with a "
                "part of the --train.batch_size, says the same of each device."
            )
        jax.config.update("jax_num_cpu_devices", int(where))
        return partition.set_mesh(cfg)
    from jax.experimental import topologies

    os.environ.update(TPU_SKIP_MDS_QUERY="1", TPU_WORKER_HOSTNAMES="localhost")
    chips = {"chip_config_name": "megacore"} if where.startswith("v4") else {}
    try:
        devices = topologies.get_topology_desc(where, "tpu", **chips).devices
    except Exception as error:  # of many kinds
        raise UserError(
            f"--plan {where}: its compiler is libtpu, pip install '.[tpu]' on Linux "
            f"({str(error).splitlines()[0]:.120}). --plan N needs nothing."
        ) from error
    return partition.set_mesh(cfg, devices)


def plan(cfg, where):
    """Print what a training step would be on so many devices of any kind, or on a TPU topology
    such as v5e:2x4, of which its own compiler knows more."""
    if cfg.model.dtype == "auto":
        cfg = configs.override(cfg, {"model.dtype": "bfloat16"})
    mesh, t, waiting = plan_mesh(cfg, where), cfg.train, 0
    talk, program = partition.count_collectives(lower_step(cfg, mesh)[1])
    memory, moved = memory_table(cfg, mesh), sum(size for *_, size in talk)
    flops = step_flops(cfg) / mesh.size
    again = flops * (4 / 3 if cfg.model.remat == "full" else 1)
    seconds = {
        name: again / chip.teraflops / 1e12 for name, chip in partition.CHIPS.items()
    }
    together = sum(memory.values())
    needed = together / 0.9  # the rest is for what comes and goes
    tables = {  # title: [(what, number, unit and remarks)]
        "memory on each device, by the layouts": [
            (name, size / 1e9, "GB")
            for name, size in {**memory, "together": together}.items()
        ],
        "sent by each device in a step": [
            (f"{kind} over {axis}", size / 1e9, f"GB, {count:,} times")
            for kind, axis, count, size in talk
        ],
        "computed by each device in a step": [
            ("once", flops / 1e12, "TFLOP"),
            ("with what is repeated", again / 1e12, "TFLOP"),
        ],
    }
    kind = mesh.devices.flat[0].device_kind
    # it was compiled
    if name := next((name for name in partition.CHIPS if name in kind), None):
        held, (parts, times, sent) = (
            program.memory_analysis(),
            partition.estimated_cycles(program.as_text()),
        )
        peak = (
            held.peak_memory_in_bytes
            or held.argument_size_in_bytes + held.temp_size_in_bytes
        )
        needed, cycles = peak / 0.95, parts.total()
        seconds = {name: cycles / partition.CHIPS[name].clock / 1e9}
        waiting = sum(size for call, size in sent.items() if "overlapped" not in call)
        tables[f"by the compiler for {mesh.size} x {kind}, cycles of the cores alone"] = [
            ("weights and optimizer", held.argument_size_in_bytes / 1e9, "GB"),
            ("temporaries", held.temp_size_in_bytes / 1e9, "GB"),
            ("peak", peak / 1e9, "GB"),
            ("cycles", cycles / 1e6, "million, of which"),
            *((f"  {part}", 100 * n / cycles, "%") for part, n in parts.most_common(6)),
            *(
                (call, sent[call] / 1e9, f"GB, {times[call]:,} times")
                for call in sorted(sent)
            ),
        ]
    chips = tables["time of a step, at least"] = []
    for name, work in seconds.items():
        chip = partition.CHIPS[name]
        network, waits = (size / chip.links / 1e9 for size in (moved, waiting))
        least = max(work + waits, network)
        fits = f"fits {chip.memory} GB" if needed < 1e9 * chip.memory else "does not fit"
        chips.append(
            (
                name,
                least,
                f"s (arithmetic {work:.4g}, network {network:.4g}"
                f"{f', {waits:.4g} of it waited for' * bool(waits)}), at most "
                f"{flops / least / chip.teraflops / 1e12:.1%} of the peak, {fits}",
            )
        )
    tables["memory with one change, by the layouts, and its price"] = [
        (flag, size / 1e9, f"GB, {price}") for flag, size, price in memory_savings(cfg)
    ]
    print(
        f"plan     {where}{' devices' * where.isdecimal()}, mesh data {mesh.shape['data']} x "
        f"model {mesh.shape['model']}{', fully sharded' * cfg.mesh.fsdp}, {cfg.model.dtype}, "
        f"remat {cfg.model.remat}, batch {t.batch_size} in {t.microbatches} microbatches"
    )
    for title, rows in tables.items():
        print(f"{title}:")
        for what, number, remark in rows:
            print(f"  {what:28} {number:>10.4g} {remark}")


def main(argv):
    args, changes = configs.parse_args(
        __doc__,
        argv,
        init_from=dict(
            metavar="RUN",
            help="a run or a checkpoint whose weights a "
            "new run\nstarts from (all of it with --train.restore all)",
        ),
        plan=dict(
            metavar="N",
            help="print what a step would be on N devices, or on a TPU\n"
            "topology such as v5e:2x4 by its own compiler, and exit",
        ),
    )
    cfg, run_dir, recipe = configs.resolve_run(
        args, changes if args.init_from else data.with_vocab_size(changes)
    )
    infer.check_decoder(cfg)
    if args.plan is not None:
        return plan(cfg, args.plan)
    recipe_file = args.config if args.config and args.config.endswith(".py") else None
    partition.start_jax(cfg)
    try:
        return train(cfg, configs.to_path(run_dir), recipe, recipe_file, args.init_from)
    except partition.CheckpointError as error:
        note(
            f"{error}: training stopped. The checkpoint before it is whole; make room and run the "
            f"same command again.",
            always=True,
        )
        return 1
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            note(out_of_memory_message(cfg), always=True)
        elif jax.process_count() > 1:
            note(
                f"Another process of this run has ended or cannot be reached "
                f"({str(error).splitlines()[0]}). Run the same command again everywhere: it goes "
                f"on from the last checkpoint.",
                always=True,
            )
        else:
            raise
        return 1


if __name__ == "__main__":
    configs.run_command(main)
