"""Train a T5 model: learning rate, optimizer, training step and training loop.

The input is a Config (configs.py) and batches of token ids (data.py).
The output is a run directory with checkpoints, config.json and metrics.jsonl.
To resume a run that was stopped or killed, run the same command again. The resumed run
gives exactly the same result as an uninterrupted run.

    python train.py                      train the tiny recipe in 2 minutes on a CPU
    python train.py --config small_c4    train T5 1.1 small on C4, on all local devices
    python train.py --plan v5e:2x4       estimate time and memory on other devices

Example: T5's learning rate is constant for 10,000 steps and then falls as 1 / sqrt(step).

    >>> import configs, train
    >>> cfg = configs.TrainConfig(learning_rate=1.0, warmup_steps=10_000)
    >>> [round(float(train.learning_rate(step, cfg)), 4) for step in (0, 10_000, 40_000)]
    [0.01, 0.01, 0.005]
"""

import ctypes
import functools
import json
import math
import os
import signal
import sys
import threading
import time
import timeit
from concurrent.futures import ThreadPoolExecutor
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
except ImportError:  # The library tensorboardX is optional.
    tensorboardX = None

# ---- learning rate ---------------------------------------------------------------------


def learning_rate(step, cfg):
    """Return the learning rate of one update.

    The string cfg.schedule contains names of factors, such as "constant * rsqrt_decay".
    The learning rate is the product of these factors, and at least 1e-8. The factors and
    the minimum are the same as in T5X (create_learning_rate_scheduler in t5x/utils.py).
    step: the number of the update, counted from 0.
    cfg: a TrainConfig.
    Raises UserError if a name in cfg.schedule is unknown.
    """
    step = jnp.maximum(0.0, step - cfg.schedule_offset)
    warmup = cfg.warmup_steps
    after_warmup = jnp.maximum(step, warmup)
    cycle = jnp.maximum(0.0, (step - warmup) / cfg.steps_per_cycle)
    # Compute all factors. The compiler removes the factors that the schedule does not
    # use.
    factors = {
        # The learning rate that the user has chosen.
        "constant": cfg.learning_rate,
        # Rise linearly from 0 to 1 during the warmup, then stay at 1.
        "linear_warmup": jnp.minimum(1.0, step / warmup),
        # Rise linearly to the learning rate, then fall linearly with slope decay_factor.
        # Do not multiply this factor by "constant", which is also the learning rate.
        "linear_decay": cfg.learning_rate
        * jnp.minimum(step / warmup, 1 + cfg.decay_factor * (warmup - step)),
        # Stay at 1 / sqrt(warmup) during the warmup, and then fall as 1 / sqrt(step).
        "rsqrt_decay": 1 / jnp.sqrt(after_warmup),
        # Stay at 1 during the warmup, and then fall as sqrt(warmup) / sqrt(step).
        "rsqrt_normalized_decay": math.sqrt(warmup) / jnp.sqrt(after_warmup),
        # Start at 1, and multiply by decay_factor every steps_per_decay steps.
        "decay_every": cfg.decay_factor ** (step // cfg.steps_per_decay),
        # After the warmup, follow a half cosine from 1 to 0 in each cycle.
        "cosine_decay": jnp.maximum(0.0, 0.5 * (1 + jnp.cos(jnp.pi * (cycle % 1.0)))),
    }
    rate = 1.0
    for name in cfg.schedule.split("*"):
        name = name.strip()
        if name not in factors:
            raise UserError(
                f"--train.schedule has an unknown factor {name!r}: "
                f"use {', '.join(factors)}."
            )
        rate = rate * factors[name]
    return jnp.maximum(rate, 1e-8)


# ---- optimizers ------------------------------------------------------------------------

# Most optimizers keep state for each parameter. We call one array of this state a slot.
# For example, Adam has two slots for each parameter. The first slot is the moving average
# of the gradient. The second slot is the moving average of the squared gradient.
# Slots are declared with model.Param, and so are parameters. The code for sharding and
# checkpoints can therefore treat slots and parameters alike.


class Optimizer(NamedTuple):
    """Define an optimizer by three functions: `slots`, `update` and `init`.

    A slot is an array of the optimizer state, such as a moving average of gradients.
    slots(table): Declare the slots. The argument is the result of model.param_table(cfg).
        The result is a nested dict of model.Param with the shape and axes of every slot.
    update(table, params, grads, slots, count, rate, train): Compute one update from the
        gradients `grads`. The result is (new params, new slots). The argument `count` is
        the number of earlier updates, `rate` is the learning rate, and `train` is the
        TrainConfig.
    init(params): Return the initial slots. If `init` is None, all slots start as zeros.
    """

    slots: Callable
    update: Callable
    init: Callable | None = None


# Adafactor (Shazeer and Stern 2018, arXiv:1804.04235) divides each gradient by the root
# mean square of the past gradients, as Adam does. Adam stores a moving average of the
# squared gradient for every element of a matrix. Adafactor stores a moving average only
# for each row and each column of the matrix.
#
# The update of a parameter w with gradient g, after t earlier updates:
#
#     beta = 1 - (t + 1)^-0.8
#     V    = beta * V + (1 - beta) * (g^2 + 1e-30)     moving average of squared gradients
#     u    = g / sqrt(V)
#     u    = u / max(1, RMS(u))                        clip the update to an RMS of 1
#     w    = w - rate * max(1e-3, RMS(w)) * u          the step is relative to RMS(w)
#
# For a matrix, V is approximated by R C^T / mean(R). The vector R contains the moving
# averages of the row means of g^2. The vector C contains the moving averages of the
# column means of g^2.
#
# The updates equal the updates of T5X (t5x/adafactor.py), because the settings are the
# same. There is no momentum. Only matrices with at least 128 rows and 128 columns are
# approximated. Weight decay is not multiplied by the learning rate.
#
# T5X has a separate parameter array for each layer. We stack the parameters of all layers
# in one array. To get the same updates, we compute every mean and RMS within one layer.
#
# The library optax also has Adafactor, and its updates are the same. On a CPU,
# optax.adafactor takes 1.6 times as long as our code. A test compares our updates with
# the updates of optax and of T5X.


def axes_of_one_layer(p):
    """Return the indices of a parameter's axes, without the axis "layers".

    The parameters of all layers are stacked along the axis "layers".
    p: a model.Param.
    """
    first = 1 if p.axes[0] == "layers" else 0
    return tuple(range(first, len(p.shape)))


def is_factored(p):
    """Return whether Adafactor stores only row means and column means for a parameter.

    Adafactor does so for matrices with at least 128 rows and 128 columns, as in T5X.
    p: a model.Param.
    """
    shape = [p.shape[axis] for axis in axes_of_one_layer(p)]
    return len(shape) == 2 and min(shape) >= 128


def adafactor_slots(table):
    """Declare the optimizer state of Adafactor.

    An array of the optimizer state is called a slot. A large matrix with the shape
    [..., a, b] has two slots. The slot "row" has the shape [..., a]. The slot "column"
    has the shape [..., b]. Every other parameter has one slot "full" with the shape of
    the parameter.
    table: a nested dict of model.Param, which declares the parameters.
    """

    def slots(p):
        if not is_factored(p):
            return {"full": p}
        # The mean of a row averages over the last axis, so "row" has no last axis. The
        # mean of a column averages over the second-to-last axis.
        return {
            "row": model.Param(p.shape[:-1], p.axes[:-1]),
            "column": model.Param(p.shape[:-2] + p.shape[-1:], p.axes[:-2] + p.axes[-1:]),
        }

    return jax.tree.map(slots, table, is_leaf=model.is_param)


def adafactor_update(table, params, grads, slots, count, rate, train):
    """Return the parameters and the optimizer state after one update of Adafactor.

    The comment above axes_of_one_layer contains the equations. The class Optimizer
    describes the arguments.
    """
    beta = 1 - (count + 1.0) ** -0.8

    def update_parameter(p, w, g, s):
        axes = axes_of_one_layer(p)

        def rms(x):
            return jnp.sqrt(jnp.mean(x * x, axes, keepdims=True))

        def moving_average(old, new):
            return beta * old + (1 - beta) * new

        squared = g * g + 1e-30
        if "full" in s:
            s = {"full": moving_average(s["full"], squared)}
            u = g * lax.rsqrt(s["full"])
        else:
            s = {
                "row": moving_average(s["row"], squared.mean(-1)),
                "column": moving_average(s["column"], squared.mean(-2)),
            }
            # Compute g / sqrt(V) for V = row * column / mean(row). The two factors of
            # 1 / sqrt(V) multiply g separately, so the matrix V is never stored.
            row = s["row"] / s["row"].mean(-1, keepdims=True)
            u = g * lax.rsqrt(row)[..., None] * lax.rsqrt(s["column"])[..., None, :]
        step_size = rate * jnp.maximum(rms(w), 1e-3)
        clipping = jnp.maximum(1.0, rms(u))
        return w * (1 - train.weight_decay) - step_size / clipping * u, s

    # The result is a tree with a tuple (new parameter, new slots) for each parameter.
    updated = jax.tree.map(
        update_parameter, table, params, grads, slots, is_leaf=model.is_param
    )
    # Split the tree of tuples into a tree of parameters and a tree of slots.
    new_params, new_slots = (
        jax.tree.map(lambda _, new: new[i], table, updated, is_leaf=model.is_param)
        for i in (0, 1)
    )
    return new_params, new_slots


# This dict maps the name of an optimizer to an Optimizer. A recipe file (a Python file of
# the user) may add its own optimizers, for example with from_optax.
OPTIMIZERS = configs.OPTIMIZERS
OPTIMIZERS["adafactor"] = Optimizer(adafactor_slots, adafactor_update)


# ---- state and step --------------------------------------------------------------------


@flax.struct.dataclass
class TrainState:
    """Hold all arrays that a training step changes.

    A checkpoint contains all fields of this class.
    """

    # The number of the last step. A run starts at train.start_step. A step also counts if
    # the update of this step was skipped.
    step: jax.Array
    # The number of updates that were not skipped. The beta of Adafactor depends on this
    # number.
    count: jax.Array
    # The number of consecutive updates that were skipped just before this state. An
    # update is skipped if the loss or a gradient is infinite or NaN.
    skipped: jax.Array
    # The parameters are a nested dict, which model.param_table declares.
    params: dict
    # The optimizer state is a nested dict, which Optimizer.slots declares.
    slots: dict


def init_state(cfg):
    """Return the TrainState at the start of a run, with random parameters.

    The arrays have the sharding in which they are stored between training steps.
    """
    # With FSDP (ZeRO-3), parameters and optimizer state are also split over the mesh axis
    # "data".
    rules = partition.STORAGE_RULES if cfg.mesh.fsdp else partition.RULES
    optimizer = OPTIMIZERS[cfg.train.optimizer]
    params = model.init_params(cfg.model, jax.random.key(cfg.train.seed), rules)

    def zeros(p):
        return jnp.zeros(p.shape, out_sharding=partition.spec(p.axes, rules))

    if optimizer.init:
        slots = optimizer.init(params)
    else:
        table = optimizer.slots(model.param_table(cfg.model))
        slots = jax.tree.map(zeros, table, is_leaf=model.is_param)
    zero = jnp.zeros((), jnp.int32, out_sharding=jax.P())
    return TrainState(zero + cfg.train.start_step, zero, zero, params, slots)


def gradients(cfg, params, batch, key):
    """Compute the gradients of the loss of a batch.

    The loss is the mean over all target tokens of the batch, without padding.
    batch: a data.Batch with arrays of the shape [rows, length]. Segment 0 is padding.
    key: the PRNG key for dropout, or None for no dropout.
    Returns (the sums that model.loss_fn returns, the gradients of the parameters).

    If train.microbatches is n > 1, the batch is split into n microbatches to save memory.
    The model processes the microbatches one after another, and their gradients are added
    up. Without dropout, the result is the same up to rounding. With dropout, the random
    masks differ.
    """
    # Divide the loss of every microbatch by the number of tokens in the complete batch.
    # The gradients of the microbatches then add up to the gradient of the complete batch.
    # If the TrainConfig has a loss_divisor, divide by the loss_divisor instead.
    tokens = jnp.sum(batch.target_segments > 0)
    divisor = cfg.train.loss_divisor or jnp.maximum(tokens, 1).astype(jnp.float32)

    def loss(params, microbatch, key):
        loss, sums = model.loss_fn(params, microbatch, cfg, key)
        return loss / divisor, sums

    def sums_and_gradients(microbatch, key):
        grads, sums = jax.grad(loss, has_aux=True)(params, microbatch, key)
        return sums, grads

    n = cfg.train.microbatches
    if n == 1:
        return sums_and_gradients(batch, key)

    # Microbatch i consists of the rows i, i + n, i + 2n and so on. Each device holds a
    # contiguous block of rows, so every microbatch has rows on every device. No row has
    # to move to another device.
    microbatches = jax.tree.map(
        lambda a: a.reshape(-1, n, a.shape[1]).swapaxes(0, 1), batch
    )
    keys = None if key is None else jax.random.split(key, n)

    def add_microbatch(total, microbatch_and_key):
        new = sums_and_gradients(*microbatch_and_key)
        return jax.tree.map(jnp.add, total, new), None

    # Start the addition from zeros. The zeros must have the same shapes and shardings as
    # the results for one microbatch. The function jax.eval_shape finds these shapes and
    # shardings without computing the results.
    first = jax.tree.map(lambda a: a[0], (microbatches, keys))
    zeros = jax.tree.map(
        lambda a: jnp.zeros(a.shape, a.dtype, out_sharding=a.sharding),
        jax.eval_shape(sums_and_gradients, *first),
    )
    total, _ = lax.scan(add_microbatch, zeros, (microbatches, keys))
    return total


def train_step(cfg, state, batch):
    """Compute the gradients of a batch, and update the parameters once.

    state: the TrainState before the update.
    batch: a data.Batch with arrays of the shape [rows, length].
    Returns (the TrainState after the update, metrics). The metrics are a dict of float32
    scalars. Losses are in nats per target token, without padding.

    This function is compiled before training starts. The result depends only on the
    arguments, so a resumed run gives the same result as an uninterrupted run.
    """
    key = None
    if cfg.model.dropout:
        # Derive the key from the step, so that a resumed run has the same dropout masks.
        key = jax.random.fold_in(jax.random.key(cfg.train.seed + 1), state.step)
    sums, grads = gradients(cfg, state.params, batch, key)
    rate = learning_rate(state.step, cfg.train)
    optimizer = OPTIMIZERS[cfg.train.optimizer]
    table = model.param_table(cfg.model)
    params, slots = optimizer.update(
        table, state.params, grads, state.slots, state.count, rate, cfg.train
    )

    # Skip the update if the loss or a gradient is infinite or NaN. A compiled function
    # cannot use a Python `if` for this purpose. Therefore jnp.where selects the new or
    # the old value of every array.
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
    state = TrainState(state.step + 1, state.count + finite, skipped, params, slots)
    return state, metrics


# ---- the training loop -----------------------------------------------------------------


class NotFinite(Exception):
    """Report an infinite or NaN loss or gradient in several consecutive steps."""


def check_finite(cfg, step, skipped):
    """Raise NotFinite if at least the last three updates were skipped.

    An update is skipped if the loss or a gradient is infinite or NaN.
    step: the number of the last step.
    skipped: the number of consecutive updates that were skipped up to this step.
    """
    if skipped < 3:
        return
    t = cfg.train
    # Count the steps of this run before the first skipped update.
    before = step - skipped - t.start_step
    raise NotFinite(
        f"The loss or the gradients of steps {step - skipped + 1:,} to {step:,} (rows "
        f"{before * t.batch_size:,} to {(before + skipped) * t.batch_size - 1:,} of the "
        f"run) were not finite, so their updates were skipped. Start another run with a "
        f"lower --train.learning_rate."
    )


def run(cfg, program, state, start, load_batch, progress, evaluations, save, after_step):
    """Train the model from step `start` to step train.steps.

    program: the compiled function train_step.
    state: the TrainState after step `start`.
    load_batch(n): A function that returns the batch for the update from step n to step
        n + 1. The arrays of this batch are on the devices.
    progress: a Progress (lower part of this file), which measures and reports the speed.
    evaluations: an Evaluations (lower part of this file), which evaluates the model.
    save(step, state): A function that starts to write a checkpoint.
    after_step(step): A function that returns whether training must stop after this step.
    Returns (the number of the last step, the TrainState after the last step).
    Raises NotFinite if the loss or the gradients are infinite or NaN in several steps.
    """
    t = cfg.train

    # An action with the interval `every` is due at every multiple of the interval, and at
    # the end of the run. The interval 0 turns the action off.
    def is_due(every, step):
        return every > 0 and (step % every == 0 or step == t.steps)

    # Load the next batch in a thread while the devices compute the current step.
    loader = ThreadPoolExecutor(1)
    next_batch = loader.submit(load_batch, start)
    for step in range(start + 1, t.steps + 1):
        batch = progress.wait(next_batch)
        if step < t.steps:
            next_batch = loader.submit(load_batch, step)
        # JAX runs programs asynchronously. This call therefore returns before the devices
        # have computed the step. Code that reads a result, such as a metric, waits for
        # the devices.
        state, metrics = program(state, batch)
        stop = after_step(step)

        logs = is_due(t.log_every, step)
        evaluates = is_due(t.eval_every, step)
        predicts = is_due(t.infer_every, step)
        saves = is_due(t.save_every, step) or (stop and t.save_every > 0)
        if logs:
            progress.log(step, metrics)
        # Raise an error before a checkpoint is saved if several updates were skipped.
        if logs or saves:
            check_finite(cfg, step, int(state.skipped))
        if evaluates:
            evaluations.evaluate(step, state.params)
        if predicts:
            evaluations.predict(step, state.params)
        if saves:
            save(step, state)
        # Start a new measurement of the training speed. The measured time must not
        # include evaluations, predictions and saves.
        if logs or evaluates or predicts or saves:
            progress.restart_clock(step)
        if stop:
            break
    return step, state


# ====== below: optax, output of a run, start of a run, plans, the command ===============

# ---- optimizers from optax -------------------------------------------------------------


def from_optax(make):
    """Convert an optimizer of the library optax to an Optimizer.

    make(rate, train): A function that takes a learning rate and a TrainConfig. The result
        is an optax.GradientTransformation. For the optimizer Lion, this function is
        `lambda rate, train: optax.lion(rate)`.
    The optimizer state is the state of the optax optimizer, such as the momentum.
    """

    def init(params):
        return make(0.0, configs.TrainConfig()).init(params)

    def slots(table):
        params = jax.tree.map(lambda p: jnp.zeros(p.shape), table, is_leaf=model.is_param)
        state = to_state_dict(jax.eval_shape(init, params))
        declared = flatten_dict(state)
        for path, slot in declared.items():
            axes = (None,) * len(slot.shape)
            # Find the parameter to which an array of the optimizer state belongs. The
            # array "0/mu/encoder/norm", for example, belongs to the parameter
            # "encoder/norm". If the shapes are equal, the axes are also equal.
            for name, p in partition.flatten(table).items():
                if "/".join(path).endswith(f"/{name}") and p.shape == slot.shape:
                    axes = p.axes
            declared[path] = model.Param(slot.shape, axes)
        return unflatten_dict(declared)

    def update(table, params, grads, slots, count, rate, train):
        # In optax, the learning rate is an argument that creates an optimizer. The
        # learning rate changes in every step, so create a new optimizer in every step.
        updates, slots = make(rate, train).update(grads, slots, params)
        return optax.apply_updates(params, updates), slots

    return Optimizer(slots, update, init)


OPTIMIZERS["adamw"] = from_optax(
    lambda rate, train: optax.adamw(rate, weight_decay=train.weight_decay)
)


# ---- the metrics file ------------------------------------------------------------------


class MetricsFile:
    """Write the metrics of a run to the file metrics.jsonl.

    Each line of the file is a JSON object with the metrics of one step. Only the main
    process writes the file.
    path: the local or remote path of the file.
    step: the step at which the run starts or resumes. All lines of later steps are
        removed, because the run repeats these steps. The file contains lines of later
        steps if the run was killed after its last checkpoint.

    The metrics of a local run are also written to RUN_DIR/tensorboard if the library
    tensorboardX is installed. Each group of metrics has a folder in RUN_DIR/tensorboard.
    """

    def __init__(self, path, step):
        self.path = path
        self.is_remote = configs.is_remote(path)
        lines = partition.read_metrics_file(path)
        self.lines = [json.dumps(line) + "\n" for line in lines if line["step"] <= step]
        self.writers = {}
        # TensorBoard hides all old events from this step on, because the run repeats
        # these steps.
        self.purge_step = step + 1
        if partition.is_main_process():
            configs.write_file(path, "".join(self.lines))

    def write(self, step, **groups):
        """Write the metrics of one step to the file, as one line.

        step: the number of the step.
        groups: The name of each argument is the name of a group of metrics. The value of
            each argument is a dict from the name of a metric to a number.
        """
        if not partition.is_main_process():
            return
        values = {}
        for group, metrics in groups.items():
            for name, value in metrics.items():
                values[f"{group}/{name}"] = float(value)
        line = json.dumps({"step": step, **values}) + "\n"
        if self.is_remote:
            # No line can be appended to a remote file. Keep all lines in memory until the
            # method sync writes the complete file.
            self.lines.append(line)
        else:
            configs.append_file(self.path, line)
        if tensorboardX and not self.is_remote:
            for group, metrics in groups.items():
                self.write_events(group, metrics, step)

    def write_events(self, group, metrics, step):
        """Write the metrics of one step for TensorBoard.

        Each group of metrics has its own folder, as in the library SeqIO.
        """
        if group not in self.writers:
            folder = str(self.path.parent / "tensorboard" / group)
            writer = tensorboardX.SummaryWriter(folder, purge_step=self.purge_step)
            self.writers[group] = writer
        for name, value in metrics.items():
            # The library SeqIO adds "eval/" to the names of metrics of generated text.
            # Use the same names.
            tag = f"eval/{name}" if group.startswith("inference_eval/") else name
            self.writers[group].add_scalar(tag, float(value), step)
        self.writers[group].flush()

    def sync(self):
        """Save all lines that were written so far.

        A local file is flushed to disk. A remote file is written as a whole.
        """
        if not partition.is_main_process():
            return
        if self.is_remote:
            configs.write_file(self.path, "".join(self.lines))
        else:
            with open(self.path) as file:
                os.fsync(file.fileno())


# ---- the progress output ---------------------------------------------------------------


def describe_mesh(cfg, mesh):
    """Return a line of text that describes how a run uses its devices.

    The line contains the sizes of the mesh, the number format, and the division of a
    batch among the devices.
    """
    t = cfg.train
    dtype = model.compute_dtype(cfg.model).name
    return (
        f"mesh data {mesh.shape['data']} x model {mesh.shape['model']}, fsdp "
        f"{cfg.mesh.fsdp}, {dtype}, remat {cfg.model.remat}, batch {t.batch_size} = "
        f"{t.batch_size // mesh.shape['data']} rows on each device, microbatches "
        f"{t.microbatches}"
    )


def find_chip(device):
    """Return the key of partition.CHIPS that describes a device.

    Return None if partition.CHIPS does not contain the device.
    device: a jax.Device.
    """
    return next((name for name in partition.CHIPS if name in device.device_kind), None)


def peak_flops():
    """Return the peak floating-point operations per second of all devices together.

    The peak of a chip in partition.CHIPS is the value in its data sheet. For all other
    devices, the speed of a matmul is measured. This function also prints the peak.
    """
    name = find_chip(jax.devices()[0])
    if name:
        peak = partition.CHIPS[name].teraflops * 1e12 * jax.device_count()
    else:
        name = "a 1024 x 1024 matmul"
        a = jnp.ones((1024, 1024))
        # Measure ten repetitions and use the fastest. The first repetition is slow,
        # because the matmul is compiled. Other programs may slow down other repetitions.
        times = timeit.repeat(
            lambda: jnp.matmul(a, a).block_until_ready(), number=1, repeat=10
        )
        peak = 2 * 1024**3 / min(times) * jax.process_count()
    print(f"peak     {peak / 1e9:,.0f} GFLOP/s, the speed of {name}")
    return peak


def step_flops(cfg):
    """Return the number of floating-point operations of one training step.

    The number is the sum over all devices.
    """
    return cfg.train.batch_size * model.train_flops(
        cfg.model, cfg.data.inputs_length, cfg.data.targets_length
    )


# The format of a line of the progress output. The names in braces are names of metrics.
PROGRESS_LINE = (
    "loss {loss:.3f}  accuracy {accuracy:.3f}  learning rate {learning_rate:.1e}  "
    "{seqs_per_second:.4g} examples/s  {gigaflops:.4g} GFLOP/s "
    "({model_flops_fraction:.0%} of peak)  waiting for data {data_wait_fraction:.0%}"
)


class Progress:
    """Measure the speed of a run, and report the metrics of the training steps.

    The metrics are written to the metrics file. On a terminal, a progress bar shows the
    latest metrics. If the output is not a terminal, the method log prints a line.
    """

    def __init__(self, cfg, metrics_file, start):
        self.cfg = cfg
        self.metrics_file = metrics_file
        self.flops = step_flops(cfg)
        self.peak = peak_flops()
        # The value disable=None shows the bar only if the output is a terminal.
        self.bar = tqdm(
            total=cfg.train.steps, initial=start, disable=None, file=sys.stdout
        )
        self.restart_clock(start)

    def restart_clock(self, step):
        """Start a new measurement of the speed at this step."""
        self.step = step
        self.clock = time.perf_counter()
        self.waited = 0.0

    def wait(self, batch):
        """Wait until a batch is loaded, and return the batch.

        The waiting time is added to self.waited.
        batch: a concurrent.futures.Future whose result is the batch.
        """
        began = time.perf_counter()
        result = batch.result()
        self.waited += time.perf_counter() - began
        return result

    def log(self, step, metrics):
        """Write and print the metrics of a step and the current speed.

        The speed is the average since the last call of the method restart_clock.
        """
        t = self.cfg.train
        # Wait until the devices have computed the step, and copy the metrics to the host.
        metrics = jax.device_get(metrics)
        seconds = time.perf_counter() - self.clock
        steps = (step - self.step) / seconds
        examples = steps * t.batch_size
        flops = steps * self.flops
        timing = {
            "seconds": seconds,
            "steps_per_second": steps,
            "seqs_per_second": examples,
            "target_tokens_per_second": examples * self.cfg.data.targets_length,
            "model_flops_per_second": flops,
            "model_flops_fraction": flops / self.peak,
            "data_wait_fraction": self.waited / seconds,
        }
        self.metrics_file.write(step, train=metrics, timing=timing)
        line = PROGRESS_LINE.format(**metrics, **timing, gigaflops=flops / 1e9)
        self.bar.n = step
        self.bar.set_postfix_str(line)
        if self.bar.disable:
            left = tqdm.format_interval((t.steps - step) / steps)
            print(f"step {step:,}/{t.steps:,} ({left} left)  {line}")


# ---- evaluations during training -------------------------------------------------------


# The format of the line that reports the loss of a task on held-out data.
HELD_OUT_LINE = (
    "step {step:,}: {task}: held-out loss {loss:.3f}, accuracy {accuracy:.3f}, "
    "{content_loss:.3f} nats per content token"
)


class Evaluations:
    """Evaluate a model on held-out data, and write and print the results.

    At the start, the unigram loss of each task is printed as a baseline. The unigram loss
    is the loss of a model that knows only how frequent each token is.

    held_out: a dict from the name of a task to a tuple (Config, Dataset).
    counts: The number of occurrences of each token in a sample of the training data. This
        array of integers has the shape [vocabulary size].
    """

    def __init__(self, mesh, run_dir, metrics_file, held_out, counts):
        self.mesh = mesh
        self.run_dir = run_dir
        self.write = metrics_file.write
        self.held_out = held_out
        for name, (cfg, dataset) in held_out.items():
            number = dataset.batches(cfg.train.eval_batches)
            batches = [dataset.batch(i) for i in range(number)]
            loss = data.unigram_loss(counts, batches, dataset.tasks[0].tokenizer)
            print(
                f"unigram  {loss:.3f} nats per content token of held-out {name}, if each "
                f"token is predicted by its frequency alone (sentinels and EOS are not "
                f"content tokens)"
            )

    def evaluate(self, step, params):
        """Evaluate the loss of the model on every task.

        The results are written to the metrics file and printed. One example is also
        printed, with the output that the model generates.
        """
        for name, (cfg, dataset) in self.held_out.items():
            number = dataset.batches(cfg.train.eval_batches)
            metrics = evaluate.evaluate_loss(params, cfg, self.mesh, dataset, number)
            self.write(step, **{f"training_eval/{name}": metrics})
            tqdm.write(HELD_OUT_LINE.format(step=step, task=name, **metrics))
        cfg, dataset = next(iter(self.held_out.values()))
        tqdm.write(held_out_example(params, cfg, self.mesh, dataset))

    def predict(self, step, params):
        """Generate outputs for held-out examples, and compute the metrics of each task.

        Tasks without inputs and targets are ignored. The generated outputs are written to
        RUN_DIR/eval, and the metrics are written to the metrics file.
        """
        for name, (cfg, dataset) in self.held_out.items():
            task = dataset.tasks[0]
            if len(task.task.objective.features) < 2:
                continue
            # The limit is the number of examples. If eval_batches is 0, the limit is
            # None, and all examples are evaluated.
            limit = cfg.train.eval_batches * cfg.train.batch_size or None
            metrics, lines = evaluate.predict(
                params, cfg, self.mesh, "validation", task.tokenizer, limit
            )
            self.write(step, **{f"inference_eval/{name}": metrics})
            evaluate.write_lines(self.run_dir / "eval", name, step, lines)
            values = ", ".join(
                f"{metric} {value:.2f}" for metric, value in metrics.items()
            )
            tqdm.write(f"step {step:,}: {name}: {values}")


def held_out_example(params, cfg, mesh, dataset):
    """Return a text that shows an example and the output of the model for this example.

    The text contains the inputs, the true targets and the output.
    dataset: a Dataset of held-out data. The example is the first row of this Dataset.
    """
    tokenizer = dataset.tasks[0].tokenizer
    batch = dataset.batch(0)
    inputs = batch.inputs[0][batch.input_segments[0] > 0]
    targets = batch.targets[0]
    # The rows of a batch are split over the mesh axis "data". The batch size must
    # therefore be at least the size of this axis.
    (outputs, _), *_ = infer.run_batch(
        params, cfg, mesh, [infer.Example(inputs)], "predict", mesh.shape["data"]
    )
    if data.is_span_corruption(cfg):
        # Show the text three times. The masked spans are blank in the first text. They
        # are filled with the true tokens in the second text, and by the model in the
        # third.
        texts = [
            infer.fill_blanks(inputs, ids, tokenizer) for ids in ([], targets, outputs[0])
        ]
    else:
        texts = [tokenizer.decode(ids) for ids in (inputs, targets, outputs[0])]
    lines = map("  {:8} {}".format, ("inputs", "truth", "model"), texts)
    return configs.escape_controls("\n".join(lines))


# ---- the start of a run ----------------------------------------------------------------


def lock_run(run_dir, checkpoints):
    """Lock a run directory, so that only one run at a time uses this directory.

    Returns an open file. Closing the file releases the lock. Returns None if the
    directory is remote, because a remote directory cannot be locked.

    Only the main process locks the directory. All other processes return None. The main
    process also deletes checkpoints that were not completely written.
    """
    if not partition.is_main_process():
        return None
    lock = None
    run_dir.mkdir(parents=True, exist_ok=True)
    if configs.is_remote(run_dir):
        note(f"{run_dir} cannot be locked: start only one run at a time there.")
    else:
        try:
            lock = configs.lock(run_dir / ".lock")
        except BlockingIOError:
            raise UserError(
                f"Another process trains in {run_dir}: stop that process, or name "
                f"another --run_dir."
            ) from None
    checkpoints.discard_unfinished()
    return lock


def run_tokenizer(cfg, run_dir, resumes, source):
    """Return the Tokenizer of a run.

    A resumed run loads the vocabulary from its run directory. A run that starts from the
    weights of another run uses the vocabulary of the other run. All other runs use the
    vocabulary of --data.vocab. If --data.vocab starts with "train:", this vocabulary is
    trained first.
    resumes: whether the run resumes from its own checkpoint.
    source: the value of --init_from, or None.
    """
    if resumes or not partition.is_main_process():
        return data.load_tokenizer(run_dir / "spiece.model")
    if not source:
        return data.prepare_vocabulary(cfg)
    # The vocabulary is in the run directory. If `source` is the path of a checkpoint, the
    # run directory is the parent of the parent folder.
    path = configs.to_path(source)
    folder = path if partition.find_checkpoint(source) else path.parent.parent
    found = folder / "spiece.model"
    named = cfg.data.vocab
    if named.startswith("train:"):
        named = found
    tokenizer = data.load_tokenizer(named)
    if found.exists() and tokenizer.sha256 != data.load_tokenizer(found).sha256:
        raise UserError(
            f"--data.vocab is not the vocabulary of {source}: leave out --data.vocab."
        )
    return tokenizer


def check_keep_best(t, tasks):
    """Raise UserError if the metric of --train.keep_best is never computed.

    Each evaluation of a run computes the metrics of one task.
    t: a TrainConfig.
    tasks: the names of the tasks that are evaluated.
    """
    groups = [f"training_eval/{task}" for task in tasks if t.eval_every]
    groups += [f"inference_eval/{task}" for task in tasks if t.infer_every]
    if t.keep_best and t.keep_best.rpartition("/")[0] not in groups:
        raise UserError(
            f"No evaluation of this run writes --train.keep_best {t.keep_best}: use a "
            f"metric of {', '.join(groups) or 'an evaluation (--train.eval_every)'}."
        )


def open_data(cfg, run_dir, resumes, source, config):
    """Open the data of a run, and write the files that describe the run.

    These files are spiece.model, config.json, model-info.txt and recipe.py.
    resumes: whether the run resumes from its own checkpoint.
    source: the value of --init_from, or None.
    config: the value of --config, or None.
    Returns (training Dataset, held-out data). The held-out data are a dict from the name
    of an evaluated task to a tuple (Config, Dataset).
    """
    t = cfg.train
    # The main process calls this function before all other processes, and writes
    # config.json. If another process does not find this file, the directory is not
    # shared.
    if not partition.is_main_process() and not (run_dir / "config.json").exists():
        raise UserError(
            f"--run_dir {run_dir} is not the same directory for all processes: name a "
            f"directory that all of them share."
        )
    tokenizer = run_tokenizer(cfg, run_dir, resumes, source)
    dataset = data.prepare(cfg, "train", tokenizer)
    tasks = data.evaluation_configs(cfg) if t.eval_every or t.infer_every else {}
    if t.infer_every:
        evaluate.check_metrics(tasks)
    check_keep_best(t, tasks)
    held_out = {
        name: (task_cfg, data.prepare(task_cfg, "validation", tokenizer))
        for name, task_cfg in tasks.items()
    }
    if partition.is_main_process():
        digest = configs.read_run(run_dir)[1]["corpus"] if resumes else ""
        if digest and digest != dataset.digest:
            note(
                f"warning: {cfg.data.source} has changed since {run_dir} was started. "
                f"The run continues with the changed data."
            )
        if not resumes:
            configs.write_file(run_dir / "spiece.model", tokenizer.serialized)
        configs.save_run(cfg, run_dir, dataset.digest)
        info = model_info(cfg, jax.sharding.get_mesh())
        configs.write_file(run_dir / "model-info.txt", info)
        if config and config.endswith(".py"):
            recipe = configs.to_path(config).read_text()
            configs.write_file(run_dir / "recipe.py", recipe)
    return dataset, held_out


def state_template(cfg, mesh):
    """Return a TrainState of jax.ShapeDtypeStructs instead of arrays.

    A jax.ShapeDtypeStruct describes the shape, dtype and sharding of an array.
    """

    def with_sharding(a):
        # A counter of an optax optimizer has no sharding. Put a copy on every device.
        spec = a.sharding.spec if a.sharding else jax.P()
        sharding = jax.NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)

    shapes = jax.eval_shape(functools.partial(init_state, cfg))
    return jax.tree.map(with_sharding, shapes)


def batch_template(cfg, mesh, rows):
    """Return a data.Batch of jax.ShapeDtypeStructs instead of arrays.

    A jax.ShapeDtypeStruct describes the shape, dtype and sharding of an array.
    rows: the number of rows on all devices together.
    """
    sharding = jax.NamedSharding(mesh, jax.P("data"))
    inputs, targets = (
        jax.ShapeDtypeStruct((rows, length), jnp.int32, sharding=sharding)
        for length in (cfg.data.inputs_length, cfg.data.targets_length)
    )
    # The first two arrays of a Batch have the length of the inputs. The last three arrays
    # have the length of the targets.
    return data.Batch(inputs, inputs, targets, targets, targets)


def lower_step(cfg, mesh):
    """Lower the training step to the input of the compiler.

    mesh: the mesh of the devices that will run the training step.
    Returns (the result of state_template, a jax.stages.Lowered). The method `compile` of
    the jax.stages.Lowered compiles the training step.
    """
    template = state_template(cfg, mesh)
    options = None
    if partition.platform() == "tpu":
        # These compiler options make training faster on some TPUs. The file partition.py
        # explains the options.
        kind = mesh.devices.flat[0].device_kind
        options = dict(partition.ASYNC_GATHER_OPTIONS)
        if kind not in ("TPU v3", "TPU v4"):
            options |= partition.ASYNC_REDUCE_OPTIONS
        if kind.startswith("TPU v5"):
            options |= partition.FUSION_MEMORY_OPTIONS
    # The argument donate_argnums lets the new TrainState reuse the memory of the old
    # TrainState.
    step = jax.jit(
        functools.partial(train_step, cfg), donate_argnums=0, compiler_options=options
    )
    return template, step.lower(template, batch_template(cfg, mesh, cfg.train.batch_size))


# This text is the end of an error message that says "lower ...". The text lists the flags
# that reduce the memory of a training step.
SMALLER_STEP = (
    "--train.batch_size, --data.inputs_length, --data.targets_length or the model's "
    "sizes, raise --train.microbatches, add --model.remat full"
)


def check_minimum_memory(cfg):
    """Raise UserError if the largest arrays of a training step do not fit in memory.

    This estimate needs no compilation. Compilation starts by tracing the model, and
    tracing already creates matrices of the shape [inputs_length, inputs_length]. This
    estimate therefore comes before tracing.
    """
    rows = cfg.train.batch_size // cfg.train.microbatches
    lengths = cfg.data.inputs_length, cfg.data.targets_length
    # Count two copies, because the gradients need as much memory as the parameters.
    memory = model.minimum_memory(cfg.model, rows, *lengths, copies=2)
    partition.check_memory(memory, SMALLER_STEP)


def compile_step(step, mesh):
    """Compile the training step, and return the compiled program.

    Raises UserError if the program does not fit in memory. The compiler knows the size
    before any memory is allocated. Without this check, a machine without accelerators
    would start to swap, or the kernel would kill the process.
    step: a jax.stages.Lowered from lower_step.
    """
    program = step.compile()
    sizes = program.memory_analysis()
    size = sizes.argument_size_in_bytes + sizes.temp_size_in_bytes
    partition.check_memory({"a step": mesh.size * size}, SMALLER_STEP)
    return program


def load_state(cfg, template, checkpoints, source):
    """Load or initialize the TrainState with which a run starts.

    A run with checkpoints resumes from the newest checkpoint. A run without checkpoints
    starts from `source` or from random parameters. The run takes the complete state of
    `source` if train.restore is "all", and only the parameters otherwise.
    template: the result of state_template.
    checkpoints: the partition.Checkpoints of the run.
    source: the path of another run or of a checkpoint, or None.
    Returns (the TrainState, the step of the TrainState).
    """
    t = cfg.train
    state = to_state_dict(template)
    restored = checkpoints.load(state)
    if restored:
        step, arrays = restored
        print(f"resumed  {checkpoints.path(step)}")
    elif source and t.restore == "all":
        step, arrays = partition.load_newest(source, state)
        if not t.start_step <= step < t.steps:
            raise UserError(
                f"--train.restore all resumes {source} at step {step:,}, so "
                f"--train.start_step must be at most {step} and --train.steps greater "
                f"than {step}."
            )
        print(f"started  from {source}, step {step:,}, with its optimizer")
    else:
        # The program that initializes the state runs only once, so fast compilation is
        # more important than fast code. On a CPU, this option halves the compile time.
        options = None
        if partition.platform() == "cpu":
            options = {"xla_backend_optimization_level": "1"}
        shardings = jax.tree.map(lambda a: a.sharding, template)
        init = jax.jit(functools.partial(init_state, cfg), out_shardings=shardings)
        parameters = {"params": state["params"]}
        state = to_state_dict(init.lower().compile(options)())
        step = t.start_step
        arrays = {}
        if source:
            source_step, arrays = partition.load_newest(source, parameters)
            print(f"started  from {source}, the weights of step {source_step:,}")
        elif t.start_step:
            note(
                f"warning: starting at step {t.start_step:,} with newly initialized "
                f"weights. To continue an earlier run, name it with --init_from."
            )
    # Replace arrays of the state by arrays of the checkpoint. Some optax optimizers have
    # empty states. A checkpoint does not contain empty states, so keep them from `state`.
    arrays = flatten_dict(state, keep_empty_nodes=True) | flatten_dict(arrays)
    return from_state_dict(template, unflatten_dict(arrays)), step


# ---- a run from start to end -----------------------------------------------------------


def train(cfg, run_dir, recipe, config, source):
    """Train a model until step train.steps, and write the run directory.

    If the run directory already contains checkpoints, training resumes from the newest
    checkpoint.
    cfg: the Config of the run.
    recipe: the Config before the flags of the command line changed any field.
    config: the value of --config, or None.
    source: the value of --init_from, or None.
    Returns the exit status of the command. The exit status is 1 if the loss or the
    gradients were infinite or NaN, and otherwise 0.
    """
    t = cfg.train
    mesh = partition.set_mesh(cfg)
    # Raise an error for an unknown schedule or too little memory before any file is
    # written.
    learning_rate(0, t)
    check_minimum_memory(cfg)
    print(f"recipe {cfg.name}")
    for name, (new, old) in configs.differences(cfg, recipe).items():
        print(f"  {name} {new} (recipe: {old})")
    print(f"model    {model.describe_model(cfg)}")
    device = jax.devices()[0].device_kind
    print(f"devices  {mesh.size} x {device}, {describe_mesh(cfg, mesh)}")
    print(data.describe_rows(cfg))

    checkpoints = partition.Checkpoints(run_dir, t.keep, t.async_save)
    lock = partition.run_on_all(lambda: lock_run(run_dir, checkpoints))
    resumes = bool(partition.from_main_process(checkpoints.steps()))
    dataset, held_out = partition.run_on_main_first(
        lambda: open_data(cfg, run_dir, resumes, source, config)
    )
    # After the signal SIGTERM, a run finishes the current step, saves a checkpoint and
    # exits. If there are several processes, JAX handles the signal (see after_step).
    terminated = threading.Event()
    if jax.process_count() == 1:
        signal.signal(signal.SIGTERM, lambda *_: terminated.set())
    try:
        template, step = lower_step(cfg, mesh)
        note("compiling the training step")
        # Compile the training step in a thread while the TrainState is loaded or
        # initialized.
        with ThreadPoolExecutor(1) as thread:
            compiling = thread.submit(compile_step, step, mesh)
            state, start = load_state(cfg, template, checkpoints, source)
            program = compiling.result()
        # Return memory that the compiler no longer uses to the operating system. The C
        # library glibc would otherwise keep this memory. For T5 1.1 small on a CPU, this
        # saves 280 MB.
        if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
            trim(0)
        if start >= t.steps:
            print(
                f"{run_dir} already has its {start:,} steps; continue with "
                f"--train.steps {2 * start}"
            )
            return 0
        metrics_file = MetricsFile(run_dir / "metrics.jsonl", start)
        progress = Progress(cfg, metrics_file, start)
        counts = np.bincount(dataset.sample(1 << 20), minlength=cfg.model.vocab_size)
        evaluations = Evaluations(mesh, run_dir, metrics_file, held_out, counts)
        rows = partition.local_rows(t.batch_size, mesh)

        def load_batch(step):
            batch = dataset.batch(step - t.start_step, rows)
            return partition.put_batch(batch, t.batch_size, mesh)

        # The flag --train.profile FIRST:LAST traces the steps from FIRST to LAST. The
        # value 0:0 traces no step.
        first, last = map(int, (t.profile or "0:0").split(":"))

        def profile(step):
            if step == first - 1:
                jax.profiler.start_trace(run_dir / "profile")
            # End the trace one step after LAST, because the devices compute step LAST
            # after its call has returned.
            if start < first <= step == min(last + 1, t.steps):
                jax.profiler.stop_trace()

        def after_step(step):
            profile(step)
            if jax.process_count() == 1:
                return terminated.is_set()
            # This function of JAX makes all processes stop after the same step.
            return multihost_utils.reached_preemption_sync_point(step)

        def save(step, state):
            metrics_file.sync()
            # Wait until the previous checkpoint is complete. The previous checkpoint may
            # be the best checkpoint, which must be kept.
            checkpoints.wait()
            best = None
            if t.keep_best:
                steps = [*checkpoints.steps(), step]
                best = partition.best_step(metrics_file.path, t.keep_best, steps)
            checkpoints.save(to_state_dict(state), step, best[0] if best else None)

        try:
            profile(start)
            step, state = run(
                cfg,
                program,
                state,
                start,
                load_batch,
                progress,
                evaluations,
                save,
                after_step,
            )
        except NotFinite as error:
            checkpoints.wait()
            note(error)
            return 1
        finally:
            progress.bar.close()
            metrics_file.sync()
        checkpoints.wait()
    finally:
        if lock:
            lock.close()
    if step < t.steps:
        print(
            f"stopped at step {step:,} on SIGTERM: run the same command again to "
            f"continue from the last checkpoint."
        )
        return 0
    print(f"done     {run_dir}: {step:,} steps.")
    if t.save_every:
        print(f"""Next:
  python infer.py --run_dir {run_dir} "Return the <extra_id_0> of the list."
  python evaluate.py --run_dir {run_dir}
  python train.py --run_dir {run_dir} --train.steps {2 * t.steps - t.start_step}""")
    return 0


def model_info(cfg, mesh):
    """Return a text that describes every array of the parameters and optimizer state.

    Each line contains the name, the size, the shape and the sharding of an array. The
    format is the same as in the file model-info.txt of T5X.
    """
    table = model.param_table(cfg.model)
    slots = OPTIMIZERS[cfg.train.optimizer].slots(table)
    declared = partition.flatten({"params": table, "slots": slots})
    arrays = partition.flatten(to_state_dict(state_template(cfg, mesh)))
    text = ""
    for name, p in declared.items():
        shape = ", ".join(f"{axis}={size}" for axis, size in zip(p.axes, p.shape))
        text += (
            f"{name:60} size {arrays[name].size:>12,}   shape ({shape})   "
            f"partition {tuple(arrays[name].sharding.spec)}\n"
        )
    return f"{text}Total number of parameters: {model.count_params(table):,}\n"


# ---- memory of a training step ---------------------------------------------------------


def activation_bytes(cfg, params, batch):
    """Return how many bytes of activations a device saves for the backward pass.

    The model is traced, but nothing is computed.
    params: the parameters, as a nested dict of jax.ShapeDtypeStructs with shardings.
    batch: a data.Batch of jax.ShapeDtypeStructs with shardings.
    """
    key = jax.random.key(0) if cfg.model.dropout else None

    def backward(params, batch):
        def loss(params):
            return model.loss_fn(params, batch, cfg, key)[0]

        # The function jax.vjp returns the backward pass as a pytree. The leaves of this
        # pytree are the saved activations.
        _, backward_pass = jax.vjp(loss, params)
        return backward_pass

    program = jax.make_jaxpr(backward)(params, batch).jaxpr
    saved = {v for v in program.outvars if isinstance(v, jax.extend.core.Var)}
    # Exclude the parameters and the batch, because they are not activations.
    saved -= set(program.invars)
    return partition.bytes_on_device([v.aval for v in saved])


def memory_table(cfg, mesh):
    """Estimate the minimum memory of a training step on one device.

    The result is a dict from the name of a group of arrays to the number of bytes. The
    bytes are computed from shapes and shardings. Temporary arrays are not included.
    """
    template = state_template(cfg, mesh)
    batch = batch_template(cfg, mesh, cfg.train.batch_size // cfg.train.microbatches)
    parameters = partition.bytes_on_device(template.params)
    return {
        "parameters": parameters,
        "optimizer": partition.bytes_on_device(template.slots),
        "gradients": parameters,
        "activations": activation_bytes(cfg, template.params, batch),
    }


def memory_savings(cfg):
    """Return a list of the flags that reduce the memory of a training step.

    Each element of the list is a tuple (flag, bytes on one device, cost). The bytes are
    the total memory with this flag and all earlier flags of the list. The cost is a text,
    such as "a third more arithmetic".
    """
    mesh = jax.sharding.get_mesh()
    least = sum(memory_table(cfg, mesh).values())
    savings = []
    # Try the flags in order of their cost. The cheapest flag comes first.
    for name, value, cost in (
        ("train.microbatches", 2 * cfg.train.microbatches, "more and smaller matmuls"),
        ("model.remat", "full", "a third more arithmetic"),
        ("mesh.fsdp", True, "an all-gather of each layer's weights"),
        ("mesh.model", 2 * cfg.mesh.model, "an all-reduce of each layer's activations"),
    ):
        changed = configs.override(cfg, {name: value})
        try:
            configs.check(changed)
            changed_mesh = partition.set_mesh(changed, mesh.devices.ravel())
        except UserError:
            # This flag cannot be used with this Config. For example, the rows of the
            # batch cannot be divided evenly among the devices.
            continue
        size = sum(memory_table(changed, changed_mesh).values())
        if size < least:
            savings.append((f"--{name} {str(value).lower()}", size, cost))
            cfg, least = changed, size
    jax.set_mesh(mesh)
    return savings


def format_table(title, rows):
    """Return a text that contains a title and a table.

    rows: a list of tuples (name, number, remark). Each tuple becomes a line of the table.
    """
    lines = [f"  {name:28} {number:>10.4g} {remark}" for name, number, remark in rows]
    return "\n".join([f"{title}:", *lines])


def memory_report(cfg):
    """Return a text with the memory that a training step needs on each device.

    The text also contains the flags that reduce this memory.
    """
    memory = memory_table(cfg, jax.sharding.get_mesh())
    memory["total"] = sum(memory.values())
    parts = [(name, size / 1e9, "GB") for name, size in memory.items()]
    savings = memory_savings(cfg)
    options = [(flag, size / 1e9, f"GB, {cost}") for flag, size, cost in savings]
    needed = format_table("memory on each device, at least", parts)
    saved = format_table("total with these options, added one after another", options)
    return f"{needed}\n{saved}"


# ---- the plan of a run on other machines -----------------------------------------------


def plan_mesh(cfg, where):
    """Return a mesh of simulated devices, for an estimate of a run on other machines.

    where: a string with the number of devices or a TPU topology such as v5e:2x4.
    """
    jax.config.update("jax_platforms", "cpu")
    # Turn off the compilation cache, so that the compiler always runs. The function
    # count_collectives reads files that the compiler writes.
    jax.config.update("jax_enable_compilation_cache", False)
    if where.isdecimal():
        if not 1 <= int(where) <= 2048:
            raise UserError(
                "--plan takes 1 to 2048 devices: for more devices, divide the number of "
                "devices and --train.batch_size by the same factor."
            )
        jax.config.update("jax_num_cpu_devices", int(where))
        return partition.set_mesh(cfg)
    from jax.experimental import topologies

    # These variables prevent the library libtpu from searching this machine for TPUs.
    os.environ.update(TPU_SKIP_MDS_QUERY="1", TPU_WORKER_HOSTNAMES="localhost")
    chips = {"chip_config_name": "megacore"} if where.startswith("v4") else {}
    try:
        devices = topologies.get_topology_desc(where, "tpu", **chips).devices
    except Exception as error:  # libtpu raises exceptions of many types.
        raise UserError(
            f"--plan {where} needs libtpu, the compiler of TPUs "
            f"({str(error).splitlines()[0]:.120}): install it on Linux with "
            f"pip install '.[tpu]', or use --plan N for N devices."
        ) from error
    return partition.set_mesh(cfg, devices)


def plan(cfg, where):
    """Print an estimate of a training step on devices that this machine does not have.

    The estimate contains the memory, the communication and the time.
    where: a string with the number of devices or a TPU topology such as v5e:2x4. For a
        TPU topology, the step is compiled by the TPU compiler. The compiler estimates the
        time of the arithmetic. The compiler also decides which communication overlaps
        with arithmetic.
    """
    if cfg.model.dtype == "auto":
        cfg = configs.override(cfg, {"model.dtype": "bfloat16"})
    mesh = plan_mesh(cfg, where)
    print(f"plan     {mesh.size} devices, {describe_mesh(cfg, mesh)}")
    print(memory_report(cfg))
    _, step = lower_step(cfg, mesh)
    name = find_chip(mesh.devices.flat[0])
    if name:
        program = step.compile()
        # The runtime of the TPU needs about 5 % of the memory. The program can use the
        # other 95 %.
        needed = program.memory_analysis().peak_memory_in_bytes / 0.95e9
        cycles, counts, sent = partition.estimated_cycles(program.as_text())
        rows = [(part, number / 1e6, "million") for part, number in cycles.most_common(6)]
        print(format_table("cycles of arithmetic in the most expensive parts", rows))
        arithmetic = {name: cycles.total() / partition.CHIPS[name].clock / 1e9}
        rows = [
            (kind, sent[kind] / 1e9, f"GB, {counts[kind]:,} times")
            for kind in sorted(sent)
        ]
        exposed = sum(size for kind, size, _ in rows if "overlapped" not in kind)
    else:
        # Assume that temporary arrays take 10 % of the memory.
        needed = sum(memory_table(cfg, mesh).values()) / 0.9e9
        computed = step_flops(cfg) / mesh.size
        if cfg.model.remat == "full":
            # With full rematerialization, the forward pass is computed twice. A step then
            # costs 4 instead of 3 times as much as a forward pass.
            computed *= 4 / 3
        arithmetic = {
            name: computed / chip.teraflops / 1e12
            for name, chip in partition.CHIPS.items()
        }
        collectives, _ = partition.count_collectives(step)
        rows = [
            (f"{kind} over {axis}", size / 1e9, f"GB, {count:,} times")
            for kind, axis, count, size in collectives
        ]
        # Assume that all communication overlaps with arithmetic. No time is then spent on
        # communication alone.
        exposed = 0
    print(format_table("communication, sent by each device in a step", rows))
    sent = sum(size for _, size, _ in rows)
    rows = []
    for name, seconds in arithmetic.items():
        chip = partition.CHIPS[name]
        communication = sent / chip.links
        remark = (
            f"s (arithmetic {seconds:.4g}, communication {communication:.4g}), with "
            f"{needed:.4g} of {chip.memory} GB of memory"
        )
        step_time = max(seconds + exposed / chip.links, communication)
        rows.append((name, step_time, remark))
    print(format_table("time of a step, at least", rows))


# ---- the command -----------------------------------------------------------------------


def main(argv):
    args, changes = configs.parse_args(
        __doc__,
        argv,
        init_from=dict(
            metavar="RUN",
            help="a run or a checkpoint from whose weights a new run starts\n"
            "(from its complete state with --train.restore all)",
        ),
        plan=dict(
            metavar="N",
            help="print an estimate of memory, communication and time for N devices,\n"
            "or for a TPU topology such as v5e:2x4 by the compiler of the TPU, and exit",
        ),
    )
    if not args.init_from:
        # If --data.vocab is changed, change the vocabulary size of the model accordingly.
        # With --init_from, the model must keep the vocabulary size of the loaded weights.
        changes = data.with_vocab_size(changes)
    cfg, run_dir, recipe = configs.resolve_run(args, changes)
    infer.check_decoder(cfg)
    if args.plan is not None:
        return plan(cfg, args.plan)
    partition.start_jax(cfg)
    try:
        folder = configs.to_path(run_dir)
        return train(cfg, folder, recipe, args.config, args.init_from)
    except partition.CheckpointError as error:
        problem = (
            f"Training stopped, because {error}. The previous checkpoint is complete: "
            f"free some space, and run the same command again."
        )
    except jax.errors.JaxRuntimeError as error:
        reason = str(error)
        if "RESOURCE_EXHAUSTED" in reason:
            problem = (
                f"Out of memory: use more devices, a smaller --train.batch_size or the "
                f"options below.\n{memory_report(cfg)}"
            )
        elif jax.process_count() > 1:
            problem = (
                f"Another process of this run has ended or cannot be reached "
                f"({reason.splitlines()[0]}): run the same command again on all machines "
                f"to resume from the last checkpoint."
            )
        else:
            raise
    note(problem, always=True)
    return 1


if __name__ == "__main__":
    configs.run_command(main)
