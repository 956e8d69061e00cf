"""How a model learns: schedule, optimizer, step, loop.

    python train.py                        the tiny recipe: about two minutes on a CPU
    python train.py --config small_c4      T5 1.1 small on C4

Running the same command again goes on where the run stopped.
"""

import ctypes
import dataclasses
import functools
import io
import json
import math
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import flax
import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from tqdm import tqdm

import configs
import data
import evaluate
import infer
import model
import partition
from configs import UserError

try:
    import tensorboardX
except ImportError:  # an extra
    tensorboardX = None

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
        "linear_decay": lambda: base * jnp.minimum(
            step / warmup, 1 + cfg.decay_factor * (warmup - step)),
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
            s = {"row": smooth(s["row"], squared.mean(-1)),
                 "column": smooth(s["column"], squared.mean(-2))}
            row = s["row"] / s["row"].mean(-1, keepdims=True)
            u = g * lax.rsqrt(row)[..., None] * lax.rsqrt(s["column"])[..., None, :]
        size = jnp.maximum(rms(w), 1e-3)
        return w * (1 - weight_decay) - rate * size / jnp.maximum(1.0, rms(u)) * u, s

    both = jax.tree.map(update, table, params, grads, slots, is_leaf=model.is_param)
    return tuple(jax.tree.map(lambda _, pair: pair[i], table, both, is_leaf=model.is_param)
                 for i in (0, 1))


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
    rules = partition.RULES_AT_REST if cfg.mesh.fsdp else partition.RULES
    params = model.init_params(cfg.model, jax.random.key(cfg.train.seed), rules)
    if cfg.train.optimizer == "adafactor":
        slots = adafactor_init(model.param_table(cfg.model), rules)
    else:
        slots = flax.serialization.to_state_dict(optax.scale_by_adam().init(params))
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


def apply_gradients(cfg, state, grads, rate):
    """One update of the optimizer -> (params, slots)."""
    decay = cfg.train.weight_decay
    if cfg.train.optimizer == "adafactor":
        return adafactor_update(model.param_table(cfg.model), state.params, grads, state.slots,
                                state.count, rate, decay)
    adam = optax.scale_by_adam()
    slots = flax.serialization.from_state_dict(adam.init(state.params), state.slots)
    updates, slots = adam.update(grads, slots)
    params = jax.tree.map(lambda w, u: w - rate * (u + decay * w), state.params, updates)
    return params, flax.serialization.to_state_dict(slots)


def train_step(cfg, state, batch):
    """One update: TrainState, Batch -> (TrainState, metrics). A function of its arguments alone."""
    key = None
    if cfg.model.dropout:
        key = jax.random.fold_in(jax.random.key(cfg.train.seed + 1), state.step)
    sums, grads = gradients(cfg, state.params, batch, key)
    rate = learning_rate(state.step, cfg.train)
    params, slots = apply_gradients(cfg, state, grads, rate)
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


def describe(cfg, recipe, mesh):
    """The lines a run begins with."""
    t, devices = cfg.train, jax.devices()
    shape = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    batch = f"batch {t.batch_size} = {t.batch_size // mesh.shape['data']} rows on each device"
    if t.microbatches > 1:
        batch += f", in {t.microbatches} microbatches"
    return [
        *configs.show_changes(cfg, recipe),
        f"model    {model.describe(cfg)}",
        f"devices  {len(devices)} x {devices[0].device_kind}, mesh {shape}, "
        f"{jnp.dtype(model.compute_dtype(cfg.model)).name}, {batch}",
        data.describe_rows(cfg.data),
    ]


def peak_flops():
    """Operations per second of all devices at their best -> (number, where it comes from)."""
    kind = jax.devices()[0].device_kind
    for name, chip in partition.CHIPS.items():
        if name in kind:
            peak = chip.teraflops * 1e12 * jax.device_count()
            return peak, f"{peak / 1e12:,} TFLOP/s in bfloat16, by the data sheet of {name}"
    a = jnp.ones((1024, 1024))
    product = jax.jit(jnp.matmul)
    seconds = []
    for _ in range(40):  # the first compiles; a quarter of a second finds the machine awake
        start = time.perf_counter()
        product(a, a).block_until_ready()
        seconds.append(time.perf_counter() - start)
    rate = 2 * 1024**3 / min(seconds) * jax.process_count()
    return rate, f"{rate / 1e9:.0f} GFLOP/s, measured in a 1024 x 1024 matrix product"


def held_out_passage(params, cfg, mesh):
    """One held-out row -> lines: with blanks, or its inputs; the truth; what the model wrote."""
    tokenizer = data.load_vocabulary(cfg.data)
    rows = mesh.shape["data"]  # a row for each device; the first is shown
    batch = data.make_batch(cfg, "validation", 0, partition.local_rows(rows, mesh))
    batch = partition.put_batch(batch, rows, mesh)
    written, _ = infer.generate(params, batch.inputs, batch.input_segments, cfg.model,
                                cfg.data.targets_length)
    inputs, truth, written = (
        np.asarray(a.addressable_data(0))[0]
        for a in (batch.inputs, batch.targets, written[:, 0]))
    if data.objectives(cfg.data) != {"span_corruption"}:
        return [f"  {label:8} {tokenizer.decode(ids)}"
                for label, ids in (("inputs", inputs), ("truth", truth), ("model", written))]
    truth, written = (infer.split_spans(ids, tokenizer) for ids in (truth, written))
    return [f"  {label:8} {infer.fill_blanks(inputs, spans, tokenizer)}"
            for label, spans in (("blanks", {}), ("truth", truth), ("model", written))]


class MetricsFile:
    """RUN_DIR/metrics.jsonl, one flat JSON object a line, `step` first.

    What was written after `step` is cut off: a run that was killed and went on leaves the file of
    one that never stopped. Where tensorboardX is installed, the same goes to RUN_DIR/tensorboard.
    """

    def __init__(self, path, step):
        self.writers = {}  # of event files, one for each group
        self.file = None
        if not partition.is_first():
            return
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        whole = [line for line in lines if line.endswith("}\n")]
        before = "".join(x for x in whole if json.loads(x)["step"] <= step)
        configs.write_file(path, before)
        self.path, self.folder, self.start = path, path.parent / "tensorboard", step
        self.file = io.StringIO() if configs.is_remote(path) else open(path, "a")
        if configs.is_remote(path):  # nothing can be appended there: written whole at each save
            self.file.write(before)

    def write(self, step, **groups):
        """groups: prefix={name: number}."""
        if not self.file:
            return
        line = {f"{prefix}/{name}": float(value) for prefix, metrics in groups.items()
                for name, value in metrics.items()}
        self.file.write(json.dumps({"step": step, **line}) + "\n")
        self.file.flush()
        for prefix, metrics in groups.items() if tensorboardX and not configs.is_remote(
                self.path) else ():
            if prefix not in self.writers:
                self.writers[prefix] = tensorboardX.SummaryWriter(
                    str(self.folder / prefix), purge_step=self.start + 1)
            for name, value in metrics.items():
                tag = f"eval/{name}" if prefix.startswith("inference_eval/") else name  # as SeqIO
                self.writers[prefix].add_scalar(tag, float(value), step)
            self.writers[prefix].flush()

    def best(self, metric, steps):
        """Of these steps the one with the best value of a metric, the lowest of a loss, or None."""
        if not self.file or not metric:
            return None
        remote = configs.is_remote(self.path)
        text = self.file.getvalue() if remote else self.path.read_text()
        lines = map(json.loads, text.splitlines())
        found = {line["step"]: line[metric] for line in lines if metric in line}
        if not found:
            configs.note(f"--train.keep_best {metric}: metrics.jsonl has no such value so far.")
        sign = -1 if metric.endswith(("loss", "perplexity")) else 1
        found = {step: sign * found[step] for step in steps
                 if not math.isnan(found.get(step, math.nan))}
        return max(found, key=found.get, default=None)

    def sync(self):
        """Make sure that what was written survives a power cut."""
        if self.file and configs.is_remote(self.path):
            configs.write_file(self.path, self.file.getvalue())
        elif self.file:
            os.fsync(self.file.fileno())


class Progress:
    """The bar, the speed since the last look, and the lines of metrics.jsonl about training.

    Where standard output is no terminal, a plain line every ten seconds takes the bar's place.
    """

    def __init__(self, cfg, run_dir, start):
        self.cfg, self.file = cfg, MetricsFile(run_dir / "metrics.jsonl", start)
        lengths = cfg.data.inputs_length, cfg.data.targets_length
        self.flops = cfg.train.batch_size * model.train_flops(cfg.model, *lengths)
        self.peak, source = peak_flops()
        print(f"peak     {source}", flush=True)
        self.bar = tqdm(
            total=cfg.train.steps, initial=start, file=sys.stdout, disable=not sys.stdout.isatty(),
            dynamic_ncols=True, bar_format="{percentage:3.0f}% {bar:8} {n_fmt}/{total_fmt} "
                                           "[{elapsed}<{remaining}]{postfix}")
        self.printed, self.warned = 0.0, False
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

    def log(self, step, metrics):
        """Write and show the metrics of a step and the speed of the steps since the last one."""
        seconds, rows = time.perf_counter() - self.clock, self.cfg.train.batch_size
        steps = (step - self.step) / seconds
        timing = {
            "seconds": seconds, "steps_per_second": steps, "seqs_per_second": steps * rows,
            "target_tokens_per_second": steps * rows * self.cfg.data.targets_length,
            "model_flops_per_second": steps * self.flops,
            "model_flops_fraction": steps * self.flops / self.peak,
            "data_wait_fraction": self.waited / seconds}
        self.file.write(step, train=metrics, timing=timing)
        if timing["data_wait_fraction"] > 0.05 and seconds > 1 and not self.warned:
            self.warned = True
            self.bar.write(f"warning: {timing['data_wait_fraction']:.0%} of the time up to step "
                           f"{step:,} was waiting for data (timing/data_wait_fraction in "
                           f"metrics.jsonl)", file=sys.stderr)
        text = (f"loss {metrics['loss']:.3f}  accuracy {metrics['accuracy']:.3f}  "
                f"rate {metrics['learning_rate']:.1e}  {steps * rows:.4g} examples/s  "
                f"{steps * self.flops / 1e9:.4g} GFLOP/s ({steps * self.flops / self.peak:.0%})")
        self.bar.set_postfix_str(f" {text}")
        now = time.perf_counter()
        if self.bar.disable and (now - self.printed > 10 or step == self.cfg.train.steps):
            self.printed = now
            print(f"step {step:,}/{self.cfg.train.steps:,}  {text}", flush=True)


class HeldOut:
    """Evaluation during training; does nothing where there is nothing to evaluate."""

    def __init__(self, cfg, mesh, progress):
        self.cfg, self.mesh, self.progress = cfg, mesh, progress
        every = cfg.train.eval_every, cfg.train.infer_every
        self.every, self.infer_every = (0, 0) if cfg.data.source == "random:" else every
        self.tasks = []  # (name, Config, batches, unigram loss)
        if self.infer_every:
            evaluate.check_metrics(data.evaluations(cfg), "validation")
        for name, one in data.evaluations(cfg).items() if self.every or self.infer_every else ():
            batches = data.number_of_batches(one, "validation")
            batches = min(batches, cfg.train.eval_batches or batches)
            baseline = data.unigram_loss(cfg, batches, one)
            self.tasks.append((name, one, batches, baseline))
            of = f" of {name}" if name != cfg.data.task else ""
            print(f"unigram  {baseline:.3f} nats per content token of the held-out text{of} "
                  f"(neither sentinel nor EOS): the number to beat", flush=True)

    def evaluate(self, step, params):
        """Write the metrics of each task's held-out batches, show them and one passage."""
        for name, cfg, batches, baseline in self.tasks:
            metrics = evaluate.teacher_forced(params, cfg, self.mesh, "validation", batches)
            self.progress.file.write(step, **{f"training_eval/{name}": metrics})
            content = metrics["content_loss"]
            below = baseline - content
            title = f"{name}: " if len(self.tasks) > 1 else ""
            self.progress.bar.write(
                f"step {step:,}: {title}held-out loss {metrics['loss']:.3f}, accuracy "
                f"{metrics['accuracy']:.3f}; content {content:.3f} nats per token, "
                f"{abs(below):.2f} {'under' if below > 0 else 'above'} the unigram baseline")
        lines = held_out_passage(params, self.tasks[0][1], self.mesh)
        self.progress.bar.write("\n".join(lines))

    def predict(self, step, params, run_dir):
        """The same on decoded text, by each task's metrics; what was predicted goes to eval/."""
        most = self.cfg.train.eval_batches * self.cfg.train.batch_size or None
        for name, cfg, *_ in self.tasks:
            if data.objectives(cfg.data) != {"text_to_text"}:
                continue
            tokenizer = data.load_vocabulary(cfg.data)
            metrics, lines = evaluate.predict(
                params, cfg, self.mesh, "validation", tokenizer, most)
            self.progress.file.write(step, **{f"inference_eval/{name}": metrics})
            evaluate.write_lines(run_dir / "eval", name, step, lines)
            self.progress.bar.write(f"step {step:,}: {name}: " + ", ".join(
                f"{metric} {value:.2f}" for metric, value in metrics.items()))


# ---- a plan for machines one does not have -------------------------------------------------------


def activation_bytes(cfg, params, batch):
    """Bytes that one device keeps of a forward pass for the backward pass, in their own dtypes.

    params, batch: ShapeDtypeStructs. What jax.vjp keeps, without what was there before.
    """
    key = jax.random.key(0) if cfg.model.dropout else None

    def kept(params, batch):
        return jax.vjp(lambda params: model.loss_fn(params, batch, cfg, key)[0], params)[1]

    program = jax.make_jaxpr(kept)(params, batch).jaxpr
    found = {v for v in program.outvars if isinstance(v, jax.extend.core.Var)} - {*program.invars}
    mesh = jax.sharding.get_mesh()
    return partition.bytes_on_device([
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype,
                             sharding=NamedSharding(mesh, v.aval.sharding.spec)) for v in found])


def memory_table(cfg, mesh):
    """Config -> {what: bytes on one device} of a training step."""
    template = state_template(cfg, mesh)
    batch = batch_template(cfg, mesh, cfg.train.batch_size // cfg.train.microbatches)
    parameters = partition.bytes_on_device(template.params)
    return {"parameters": parameters, "optimizer": partition.bytes_on_device(template.slots),
            "gradients": parameters, "activations": activation_bytes(cfg, template.params, batch)}


def out_of_memory(cfg):
    """What to do about it, in the order of what it costs, with what each would leave."""
    mesh, t = jax.sharding.get_mesh(), cfg.train
    memory, lines = memory_table(cfg, mesh), []
    held = ", ".join(f"{name} {size / 1e9:.3g}" for name, size in memory.items())
    levers = {f"--train.microbatches {2 * t.microbatches}": (
                  t.batch_size % (2 * t.microbatches * mesh.shape["data"]) == 0),
              "--model.remat full": cfg.model.remat != "full",
              "--mesh.fsdp true": not cfg.mesh.fsdp and mesh.shape["data"] > 1
              and cfg.model.d_model % mesh.shape["data"] == 0}
    changes = {}
    for flag in [flag for flag, useful in levers.items() if useful]:
        name, value = flag.removeprefix("--").split()
        changes[name] = {"true": True}.get(value, int(value) if value.isdigit() else value)
        total = sum(memory_table(configs.override(cfg, changes), mesh).values())
        lines.append(f"{flag} ({total / 1e9:.3g} GB)")
    return (f"Out of memory: a step keeps at least {sum(memory.values()) / 1e9:.3g} GB on each "
            f"device ({held}). Add, one after the other, {', '.join(lines) or 'more devices'}; "
            f"then a smaller --train.batch_size.")


def model_info(cfg, mesh):
    """The text of model-info.txt: every parameter and optimizer slot, as T5X writes it."""
    template = state_template(cfg, mesh)
    table = {f"params/{name}": p.axes
             for name, p in partition.flatten(model.param_table(cfg.model)).items()}
    shorter = {"row": lambda axes: axes[:-1], "column": lambda axes: (*axes[:-2], axes[-1])}

    def axes_of(name):
        if name in table:
            return table[name]
        for path, axes in table.items():  # slots/PATH/row in Adafactor, slots/mu/PATH in Adam
            path = path.removeprefix("params")
            if name.endswith(path) or name.rpartition("/")[0].endswith(path):
                return shorter.get(name.rpartition("/")[2], lambda axes: axes)(axes)
        return ()

    lines, total = [], 0
    state = flax.serialization.to_state_dict(template)
    arrays = partition.flatten({"params": state["params"], "slots": state["slots"]})
    for name, a in arrays.items():
        shape = ", ".join(f"{axis}={size}" for axis, size in zip(axes_of(name), a.shape))
        lines.append(f"{name:60} size {math.prod(a.shape):>12,}   shape ({shape})   "
                     f"partition {tuple(a.sharding.spec)}")
        total += math.prod(a.shape) * name.startswith("params/")
    return "\n".join([*lines, f"Total number of parameters: {total:,}", ""])


def plan(cfg, count):
    """Print what a training step would be on `count` devices, which need not be there."""
    if not 1 <= count <= 2048:
        raise UserError("--plan takes 1 to 2048 devices; a plan for a part of them, with a part "
                        "of the --train.batch_size, says the same of each device.")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)
    if cfg.model.dtype == "auto":
        cfg = configs.override(cfg, {"model.dtype": "bfloat16"})
    mesh, t = partition.set_mesh(cfg), cfg.train
    print(f"plan     {count} devices, mesh data {mesh.shape['data']} x model "
          f"{mesh.shape['model']}{', fully sharded' * cfg.mesh.fsdp}, {cfg.model.dtype}, remat "
          f"{cfg.model.remat}, batch {t.batch_size} in {t.microbatches} microbatches")
    memory = memory_table(cfg, mesh)
    total = sum(memory.values())
    for name, size in {**memory, "together": total}.items():
        print(f"  {name:14} {size / 1e9:10.4g} GB on each device")
    step = jax.jit(functools.partial(train_step, cfg), donate_argnums=0).lower(
        state_template(cfg, mesh), batch_template(cfg, mesh, t.batch_size))
    moved = 0
    for kind, axis, number, size in partition.collectives(step):
        print(f"  {kind:18} over {axis:5} {number:>7,} times a step, {size / 1e9:10.3f} GB sent")
        moved += size
    flops = t.batch_size * model.train_flops(
        cfg.model, cfg.data.inputs_length, cfg.data.targets_length) / count
    again = flops * (4 / 3 if cfg.model.remat == "full" else 1)
    print(f"  {flops / 1e12:.4g} TFLOP a step on each device, {again / 1e12:.4g} with what is "
          f"computed again")
    print("chip            memory          fits   step at least   arithmetic     network")
    for name, chip in partition.CHIPS.items():
        work, talk = again / chip.teraflops / 1e12, moved / chip.links / 1e9
        fits = "yes" if total < 0.9e9 * chip.memory else "no"  # the rest is for what comes and goes
        print(f"{name:12} {chip.memory:>6} GB {fits:>12} {max(work, talk):>13.4g} s "
              f"{work:>10.4g} s {talk:>9.4g} s")


# ---- the run -------------------------------------------------------------------------------------


def with_vocabulary_of(source, cfg):
    """Config, with the vocabulary of the run whose weights it starts from; refuses another."""
    source = configs.to_path(source)
    path = next((folder / "spiece.model" for folder in (source, *source.parents[:2])
                 if (folder / "spiece.model").exists()), None)
    if not path:
        configs.note(f"{source} has no vocabulary beside it: see to it that --data.vocab is the "
                     f"one it was trained with.")
        return cfg
    if not cfg.data.vocab.startswith("train:") and (
            data.load_vocabulary(cfg.data).sha256 != data.load_tokenizer(path).sha256):
        raise UserError(f"--data.vocab {cfg.data.vocab} is not the vocabulary of {source}: leave "
                        f"it out.")
    return dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, vocab=str(path)))


def open_run(cfg, run_dir, checkpoints, recipe_file=None, source=None):
    """Lock a run directory, prepare its data, write what other scripts read -> (Config, lock).

    The Config that comes back takes its vocabulary from the run directory. recipe_file: path of the
    user's recipe, which is copied there. source: the run or checkpoint that a new run starts from.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        remote = configs.is_remote(run_dir)
        lock = configs.lock(run_dir / ".lock") if partition.is_first() and not remote else None
    except BlockingIOError:
        raise UserError(f"Another process trains in {run_dir}: stop it, or name another --run_dir."
                        ) from None
    except OSError as error:
        raise UserError(f"--run_dir {run_dir} cannot be written ({error.strerror}): name another."
                        ) from error
    if partition.is_first():
        checkpoints.discard_unfinished()
    elif not (run_dir / "config.json").exists():
        raise UserError(f"--run_dir {run_dir} must be one folder that all processes see.")
    if remote:
        configs.note(f"{run_dir} cannot be locked: see to it that one run at a time goes on there.")
    vocabulary = run_dir / "spiece.model"
    named = cfg  # what config.json keeps
    if source and not checkpoints.steps():
        partition.find_checkpoint(source)  # refuses what is none
        cfg = with_vocabulary_of(source, cfg)
    run_cfg = data.with_vocabulary(cfg, run_dir)
    if cfg.data.source != "random:" and not checkpoints.steps() and partition.is_first():
        data.open_rows(cfg, "train")  # refuses what does not fit before anything is written
        configs.write_file(vocabulary, data.load_vocabulary(cfg.data).serialized)
    digest = data.open_rows(run_cfg, "train")[0].digest
    if cfg.train.eval_every and cfg.data.source != "random:":
        data.evaluations(run_cfg)
    if not partition.is_first():
        return run_cfg, lock
    if checkpoints.steps():
        before = json.loads((run_dir / "config.json").read_text()).get("corpus")
        if before and before != digest:
            configs.note(f"{cfg.data.source} has changed since {run_dir} began: the run goes on "
                         f"with other data.")
    configs.save_run(named, run_dir, digest)
    if recipe_file and str(recipe_file) != str(run_dir / "recipe.py"):
        configs.write_file(run_dir / "recipe.py", Path(recipe_file).read_text())
    return run_cfg, lock


def state_template(cfg, mesh):
    """Config -> TrainState of ShapeDtypeStructs with their layouts; nothing is computed."""
    def placed(a):  # optax's counters have no layout yet
        layout = a.sharding.spec if a.sharding else jax.P()
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, layout))

    return jax.tree.map(placed, jax.eval_shape(functools.partial(init_state, cfg)))


def batch_template(cfg, mesh, rows):
    """The same for a batch of so many rows."""
    layout = NamedSharding(mesh, jax.P("data"))
    return jax.tree.map(
        lambda a: jax.ShapeDtypeStruct((rows, a.shape[1]), a.dtype, sharding=layout),
        data.empty_batch(cfg.data, 1))


def compile_and_load(cfg, mesh, checkpoints, source=None):
    """The compiled training step, and the state it starts from -> (program, TrainState, step).

    The state is the newest checkpoint's or a fresh one, or takes its weights, or all, from
    `source`, another run or checkpoint. The step compiles in a thread meanwhile.
    """
    template = state_template(cfg, mesh)
    step = jax.jit(functools.partial(train_step, cfg), donate_argnums=0).lower(
        template, batch_template(cfg, mesh, cfg.train.batch_size))
    with ThreadPoolExecutor(1) as thread:
        program = thread.submit(step.compile)
        wanted = flax.serialization.to_state_dict(template)
        restored = checkpoints.load(wanted)
        if restored is None and source and cfg.train.restore == "all":
            start, arrays = partition.load_from(source, wanted)
            if not cfg.train.start_step <= start < cfg.train.steps:
                raise UserError(f"{source} is at step {start:,}: --train.restore all goes on from "
                                f"there, so --train.start_step must not be higher, and "
                                f"--train.steps must be.")
            print(f"started  {source}, step {start:,}, with its optimizer", flush=True)
            return program.result(), flax.serialization.from_state_dict(template, arrays), start
        if restored is None:
            # hardly optimized: it runs once, and compiles in half the time
            options = {"xla_backend_optimization_level": "1"}
            shardings = jax.tree.map(lambda a: a.sharding, template)
            init = jax.jit(functools.partial(init_state, cfg), out_shardings=shardings)
            state = init.lower().compile(options)()
            if source:
                found, arrays = partition.load_from(source, {"params": wanted["params"]})
                state = dataclasses.replace(state, params=arrays["params"])
                print(f"started  {source}, the weights of step {found:,}", flush=True)
            elif cfg.train.start_step:
                configs.note(f"warning: fresh weights at step {cfg.train.start_step:,}: name the "
                             f"run that they should continue by --init_from.")
            return program.result(), state, cfg.train.start_step
        start, arrays = restored
        if reader := partition.read_manifest(checkpoints.path(start))["reader"]:
            data.seek_stream(cfg, reader)
        print(f"resumed  {checkpoints.path(start)}", flush=True)
        return program.result(), flax.serialization.from_state_dict(template, arrays), start


def train(cfg, run_dir, recipe, recipe_file=None, source=None):
    """Train a run from where it stands to train.steps -> exit status."""
    mesh = partition.set_mesh(cfg)
    learning_rate(0, cfg.train)  # refuses an unknown factor before anything is written
    print("\n".join(describe(cfg, recipe, mesh)), flush=True)
    t, stop = cfg.train, threading.Event()
    checkpoints = partition.Checkpoints(run_dir, t.keep, t.async_save)
    cfg, lock = partition.first_then_others(
        functools.partial(open_run, cfg, run_dir, checkpoints, recipe_file, source))
    written = (run_dir / "config.json").read_text()
    if not partition.all_agree(partition.from_first(written) == written):
        raise UserError(f"--run_dir {run_dir} must be one folder that all processes see.")
    if jax.process_count() == 1:
        signal.signal(signal.SIGTERM, lambda *_: stop.set())
    rows = partition.local_rows(t.batch_size, mesh)

    def load(step):
        batch = data.make_batch(cfg, "train", step - t.start_step, rows)
        return partition.put_batch(batch, t.batch_size, mesh)

    program, state, start = compile_and_load(cfg, mesh, checkpoints, source)
    if partition.is_first():
        configs.write_file(run_dir / "model-info.txt", model_info(cfg, mesh))
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)  # glibc keeps what the compiler freed: half a gigabyte at the peak
    if start >= t.steps:
        print(f"finished {run_dir} has its {start:,} steps; --train.steps {2 * start} would go on.")
        return 0
    progress = Progress(cfg, run_dir, start)
    held_out = HeldOut(cfg, mesh, progress)
    loader = ThreadPoolExecutor(1)
    batch = loader.submit(load, start)
    progress.restart(start)
    for step in range(start + 1, t.steps + 1):
        ready = progress.wait(batch)
        batch = loader.submit(load, step)
        state, metrics = program(state, ready)
        progress.bar.update()
        # by SIGTERM: a save is added, the metrics stay as they were
        stopping = stop.is_set() if jax.process_count() == 1 else (
            multihost_utils.reached_preemption_sync_point(step))  # where all processes stop
        logs, evaluates, infers, saves = (
            every > 0 and (step % every == 0 or step == t.steps)
            for every in (t.log_every, held_out.every, held_out.infer_every, t.save_every))
        if logs:
            progress.log(step, {name: float(x) for name, x in jax.device_get(metrics).items()})
        if (logs or saves) and (skipped := int(state.skipped)) >= 3:
            checkpoints.wait()
            progress.file.sync()
            first, done = step - skipped + 1, step - t.start_step
            configs.note(f"Loss or gradients of steps {first:,} to {step:,} (rows "
                         f"{(done - skipped) * t.batch_size:,} to "
                         f"{done * t.batch_size - 1:,} of the "
                         f"run) were not finite; their updates were skipped. Begin another run "
                         f"with a lower --train.learning_rate.")
            return 1
        if evaluates:
            held_out.evaluate(step, state.params)
        if infers:
            held_out.predict(step, state.params, run_dir)
        if saves or (stopping and t.save_every):
            progress.file.sync()
            batch.result()  # the reader stands still
            reader = data.stream_state(cfg, step - t.start_step)
            checkpoints.wait()  # the one before may be the best
            best = progress.file.best(t.keep_best, [*checkpoints.steps(), step])
            checkpoints.save(flax.serialization.to_state_dict(state), step, reader, best)
        if logs or evaluates or infers or saves:
            progress.restart(step)
        if stopping:
            break
    progress.bar.close()
    progress.file.sync()
    checkpoints.wait()
    if step < t.steps:
        print(f"stopped  at step {step:,}, as asked; " + (
            "the same command goes on from here." if t.save_every else "nothing was saved."))
        return 0
    print(f"done     {run_dir}: {step:,} steps.")
    if t.save_every and held_out.every:
        spans = data.objectives(cfg.data) == {"span_corruption"}
        text = "Return the <extra_id_0> of the list." if spans else "some inputs"
        print(f"""Next:
  python infer.py --run_dir {run_dir} "{text}"
  python evaluate.py --run_dir {run_dir}
  python train.py --run_dir {run_dir} --train.steps {2 * t.steps}""")
    return 0


def main(argv):
    args, changes = configs.parse_args(
        __doc__, argv, init_from=dict(metavar="RUN", help="a run or a checkpoint whose weights a "
                                      "new run\nstarts from (all of it with --train.restore all)"),
        plan=dict(metavar="N", type=int, help="print what a step would be on N devices, and exit"))
    cfg, run_dir, recipe = configs.resolve_run(args, changes)
    if args.plan is not None:
        return plan(cfg, args.plan)
    recipe_file = args.config if args.config and args.config.endswith(".py") else None
    partition.start_jax(cfg)
    try:
        return train(cfg, configs.to_path(run_dir), recipe, recipe_file, args.init_from)
    except partition.CheckpointError as error:
        configs.note(f"{error}: training stopped. The checkpoint before it is whole; make room and "
                     f"run the same command again.", always=True)
        return 1
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            configs.note(out_of_memory(cfg), always=True)
        elif jax.process_count() > 1:
            configs.note(f"Another process of this run has ended or cannot be reached "
                         f"({str(error).splitlines()[0]}). Run the same command again everywhere: "
                         f"it goes on from the last checkpoint.", always=True)
        else:
            raise
        return 1


if __name__ == "__main__":
    configs.run_command(main)
