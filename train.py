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

`pytest -k lesson_train` runs the lessons about this file, which are in test_all.py.
"""

import contextlib
import ctypes
import fnmatch
import importlib.util
import json
import math
import os
import re
import shlex
import signal
import sys
import time
import timeit
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Callable, NamedTuple

# Import configs before JAX. The module configs makes Python use UTF-8, and lets Ctrl-C
# end the process even while JAX is being imported.
import configs

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
from jax.sharding import auto_axes
from jax.tree_util import keystr, tree_leaves_with_path
from tqdm import tqdm

import data
import evaluate
import infer
import model
import partition
from configs import UserError, note

try:
    from tensorboardX import summary
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto.event_pb2 import Event, SessionLog
except ImportError:  # The optional library tensorboardX is not installed.
    EventsWriter = None

# ---- learning rate ---------------------------------------------------------------------


def learning_rate(step, cfg):
    """Return the learning rate of one training step.

    The learning rate follows a schedule, which is a product of factors. For example, the
    schedule of T5 is "constant * rsqrt_decay". With --train.learning_rate 1.0 and 10,000
    warmup steps, the learning rate is 0.01 at step 10,000 and 0.005 at step 40,000. The
    learning rate is never below 1e-8. All factors except linear_cooldown are those of T5X
    (create_learning_rate_scheduler in t5x/utils.py).
    assets/schedules.svg shows six schedules.

    step: the step number, counted from 0.
    cfg: a TrainConfig. The string cfg.schedule names the factors.
    Raises UserError if a name in cfg.schedule is unknown.
    """
    steps_left = cfg.steps - step
    step = jnp.maximum(0.0, step - cfg.schedule_offset)
    warmup = cfg.warmup_steps
    after_warmup = jnp.maximum(step, warmup)
    cycle = jnp.maximum(0.0, (step - warmup) / cfg.steps_per_cycle)
    # Compute every factor, including factors that the schedule does not use. The compiler
    # removes the computation of unused factors.
    factors = {
        # The factor is the value of --train.learning_rate in every step.
        "constant": cfg.learning_rate,
        # The factor rises linearly from 0 to 1 during the warmup, and then stays at 1.
        "linear_warmup": jnp.minimum(1.0, step / warmup),
        # The factor rises linearly from 0 to learning_rate during the warmup. Afterwards,
        # the factor falls linearly. With decay_factor 0.001, for example, the factor is 0
        # after 1,000 more steps. Do not combine this factor with "constant", because both
        # factors contain learning_rate.
        "linear_decay": cfg.learning_rate
        * jnp.minimum(step / warmup, 1 + cfg.decay_factor * (warmup - step)),
        # The factor is 1 / sqrt(warmup) during the warmup, and 1 / sqrt(step) afterwards.
        "rsqrt_decay": 1 / jnp.sqrt(after_warmup),
        # The factor is 1 during the warmup, and sqrt(warmup / step) afterwards.
        "rsqrt_normalized_decay": math.sqrt(warmup) / jnp.sqrt(after_warmup),
        # The factor starts at 1, and is multiplied by decay_factor after every
        # steps_per_decay steps. With decay_factor 0.5, the values are 1, 0.5, 0.25 and so
        # on.
        "decay_every": cfg.decay_factor ** (step // cfg.steps_per_decay),
        # The factor is 1 during the warmup. Afterwards, the factor falls from 1 to 0
        # along half a cosine wave. This fall starts again every steps_per_cycle steps.
        "cosine_decay": jnp.maximum(0.0, 0.5 * (1 + jnp.cos(jnp.pi * (cycle % 1.0)))),
        # The factor is 1 in most steps, and falls linearly to 0 in the last
        # cooldown_steps steps of the run. The schedule warmup-stable-decay (WSD) is
        # "constant * linear_warmup * linear_cooldown".
        "linear_cooldown": jnp.minimum(1.0, steps_left / cfg.cooldown_steps),
    }
    rate = 1.0
    for name in cfg.schedule.split("*"):
        name = name.strip()
        if name not in factors:
            raise UserError(
                f"--train.schedule contains the unknown factor {name!r}: choose from "
                f"{', '.join(factors)}."
            )
        rate = rate * factors[name]
    return jnp.maximum(rate, 1e-8)


# ---- optimizers ------------------------------------------------------------------------

# An optimizer stores some arrays for each parameter. We call each of these arrays a slot.
# Adam, for example, has two slots for each parameter: the moving average of the gradient,
# and the moving average of the squared gradient.
#
# An object of the class model.Param describes the shape and the axes of an array. Both
# parameters and slots are described by a model.Param. The code that shards and saves
# parameters therefore also works for slots.


class Optimizer(NamedTuple):
    """Define an optimizer by the three functions `slots`, `update` and `init`.

    The arrays of the optimizer state are called slots. Adam, for example, has two slots
    for each parameter: moving averages of the gradient and of the squared gradient. The
    function `slots` declares these arrays, `init` creates them before training, and
    `update` changes them in each training step.

    slots(table): Return a nested dict of model.Param with the shape and axes of every
        slot. The argument is the result of model.param_table.
    update(table, params, grads, slots, count, rate, train): Return (new params, new
        slots). `grads` are the gradients, `count` is the number of earlier updates,
        `rate` is the learning rate, and `train` is the TrainConfig. If `takes_loss` is
        True, `update` also has the argument `loss`, the mean loss of the batch.
    init(params, train): Return the initial slots. If `init` is None, all slots start as
        zeros.

    JAX chooses the shardings inside of `update` and `init` automatically. An optimizer is
    therefore written as if each array were on one device.
    """

    slots: Callable
    update: Callable
    init: Callable | None = None
    takes_loss: bool = False


# Adafactor (Shazeer and Stern 2018, arXiv:1804.04235) works like Adam, but needs much
# less memory. Both optimizers divide the gradient by the root mean square of past
# gradients. For a matrix of shape [512, 1024], Adam stores 524,288 averages of squared
# gradients, one for each element. Adafactor stores 512 averages for the rows and 1,024
# averages for the columns.
#
# After t earlier updates, Adafactor updates a parameter w with gradient g as follows.
# RMS(x) is the root mean square of all elements of x.
#
#     beta = 1 - (t + 1)^-0.8
#     V    = beta * V + (1 - beta) * (g^2 + 1e-30)     moving average of squared gradients
#     u    = g / sqrt(V)
#     u    = u / max(1, RMS(u))                        clip the update to an RMS of 1
#     w    = w - rate * max(1e-3, RMS(w)) * u          the step is relative to RMS(w)
#
# For a large matrix, V is not stored, but approximated by R C^T / mean(R). The vector R
# contains the moving averages of the row means of g^2. The vector C contains the moving
# averages of the column means of g^2. assets/adafactor.svg shows V, R and C.
#
# The updates equal those of T5X (t5x/adafactor.py), because all settings are the same.
# There is no momentum. V is approximated only for matrices with at least 128 rows and 128
# columns. Weight decay is not multiplied by the learning rate.
#
# T5X has a separate parameter array for each layer. We stack the parameters of all layers
# in one array. To get the same updates, we compute every mean and RMS within one layer.
#
# The library optax also has Adafactor, with the same updates. We wrote our own, because
# optax.adafactor takes 1.6 times as long on a CPU. A test checks that our updates equal
# those of optax and T5X.


def axes_of_one_layer(p):
    """Return the indices of all axes of a parameter except the axis "layers".

    For example, a parameter with the axes ("layers", "embed", "mlp") gives (1, 2).
    Adafactor computes means over the axes 1 and 2, so that each layer has a mean of its
    own. The argument p is the model.Param that describes the parameter.
    """
    first = 1 if p.axes[0] == "layers" else 0
    return tuple(range(first, len(p.shape)))


def is_factored(p):
    """Return True if Adafactor stores only row and column averages for a parameter.

    As in T5X, the result is True for a matrix with at least 128 rows and 128 columns. The
    result is also True for a stack of such matrices, one for each layer. For a smaller
    matrix or a vector, Adafactor stores one average for each element.
    p: the model.Param that describes the parameter.
    """
    shape = [p.shape[axis] for axis in axes_of_one_layer(p)]
    return len(shape) == 2 and min(shape) >= 128


def adafactor_slots(table):
    """Describe the slots, which are the arrays that Adafactor stores for each parameter.

    A matrix of shape [512, 1024], for example, has two slots. The slot "row" stores 512
    row averages, and the slot "column" stores 1,024 column averages. A vector or a small
    matrix has one slot "full", which stores an average for each element.
    table: a nested dict of model.Param, which describes the parameters.
    Returns a nested dict of model.Param, which describes the slots.
    """

    def slots(p):
        if not is_factored(p):
            return {"full": p}
        # For example, let p have the shape [layers, 512, 1024]. The slot "row" then has
        # the shape [layers, 512], and the slot "column" has the shape [layers, 1024].
        return {
            "row": model.Param(p.shape[:-1], p.axes[:-1]),
            "column": model.Param(p.shape[:-2] + p.shape[-1:], p.axes[:-2] + p.axes[-1:]),
        }

    return jax.tree.map(slots, table, is_leaf=model.is_param)


def adafactor_update(table, params, grads, slots, count, rate, train):
    """Update all parameters once with Adafactor, and return (new params, new slots).

    Adafactor divides each gradient by the root mean square of past gradients. For a large
    matrix, the root mean squares are approximated by averages of rows and columns. The
    equations are in the comment above axes_of_one_layer. The arguments are those of
    `update` in the class Optimizer.
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
            # Compute g / sqrt(V) for V = row * column / mean(row), without storing the
            # large matrix V. First divide the rows of g by sqrt(row / mean(row)). Then
            # divide the columns by sqrt(column).
            row = s["row"] / s["row"].mean(-1, keepdims=True)
            u = g * lax.rsqrt(row)[..., None] * lax.rsqrt(s["column"])[..., None, :]
        step_size = rate * jnp.maximum(rms(w), 1e-3)
        clipping = jnp.maximum(1.0, rms(u))
        return w * (1 - train.weight_decay) - step_size / clipping * u, s

    # For each parameter, `updated` contains a tuple (new parameter, new slots).
    updated = jax.tree.map(
        update_parameter, table, params, grads, slots, is_leaf=model.is_param
    )
    # Split the tree `updated` into two trees, one with parameters and one with slots.
    new_params, new_slots = (
        jax.tree.map(lambda _, new: new[i], table, updated, is_leaf=model.is_param)
        for i in (0, 1)
    )
    return new_params, new_slots


# The dict OPTIMIZERS contains all optimizers by name. The option --train.optimizer
# adafactor chooses OPTIMIZERS["adafactor"]. A recipe file (a Python file of the user) can
# add optimizers, for example Lion from the library optax.
OPTIMIZERS = configs.OPTIMIZERS
OPTIMIZERS["adafactor"] = Optimizer(adafactor_slots, adafactor_update)


# ---- state and step --------------------------------------------------------------------


@flax.struct.dataclass
class TrainState:
    """Hold the arrays that training changes: counters, parameters and optimizer state.

    A checkpoint contains all of these arrays.
    """

    # The number of the current training step. A run begins with --train.start_step, which
    # is usually 0, and each step adds 1. After 10 steps, for example, the number is 10.
    step: jax.Array
    # The number of updates that the optimizer has made. Skipped updates do not count.
    # Adafactor uses this number to compute moving averages.
    count: jax.Array
    # The number of updates that were skipped since the last applied update. An update is
    # skipped if the loss or a gradient is infinite or NaN.
    skipped: jax.Array
    # The parameters of the model, as a nested dict of arrays. The function
    # model.param_table describes all parameters.
    params: dict
    # The state of the optimizer, as a nested dict of arrays. For Adafactor, these arrays
    # are averages of squared gradients.
    slots: dict
    # The moving average of the parameters. A TrainState has no moving average, so the
    # value is None. The subclass AveragedState has a moving average.
    ema = None


@flax.struct.dataclass
class AveragedState(TrainState):
    """Hold a TrainState and the exponential moving average of the parameters.

    Training uses this class instead of TrainState if --train.ema is set.
    """

    ema: dict


def init_state(cfg):
    """Return the TrainState of a new run, with random parameters.

    The optimizer state has its initial values, which are zero for Adafactor. The step
    number is the value of --train.start_step, which is usually 0.
    """
    # With FSDP (ZeRO-3), each device along the mesh axis "data" stores only a shard of
    # the parameters and of the optimizer state. Without FSDP, all of these devices store
    # the same values.
    rules = partition.STORAGE_RULES if cfg.mesh.fsdp else partition.RULES
    optimizer = OPTIMIZERS[cfg.train.optimizer]
    params = model.init_params(cfg.model, jax.random.key(cfg.train.seed), rules)

    def zeros(p):
        return jnp.zeros(p.shape, out_sharding=partition.spec(p.axes, rules))

    table = optimizer.slots(trained_part(cfg, model.param_table(cfg.model)))
    slots = jax.tree.map(zeros, table, is_leaf=model.is_param)
    if optimizer.init:
        # The optimizer computes initial values for the slots. Shard these values like the
        # zeros that they replace.
        shardings = jax.tree.map(lambda a: jax.typeof(a).sharding.spec, slots)
        init = partial(optimizer.init, train=cfg.train)
        slots = auto_axes(init, out_sharding=shardings)(trained_part(cfg, params))
    zero = jnp.zeros((), jnp.int32, out_sharding=jax.P())
    arrays = zero + cfg.train.start_step, zero, zero, params, slots
    if cfg.train.ema:
        return AveragedState(*arrays, ema=jax.tree.map(jnp.copy, params))
    return TrainState(*arrays)


def trained_part(cfg, tree):
    """Keep only the parameters that are trained, and leave out the frozen parameters.

    A parameter is frozen if its name matches --train.freeze. For example, --train.freeze
    'encoder/.*' freezes the complete encoder.
    tree: a nested dict with the keys of model.param_table.
    Returns a nested dict of the entries that training changes.
    """
    trained = {
        name: entry
        for name, entry in partition.flatten(tree).items()
        if not re.fullmatch(cfg.train.freeze, name)
    }
    return unflatten_dict(trained, sep="/")


def with_trained_part(params, trained):
    """Return all parameters of a model, with new values for the trained parameters.

    params: a nested dict of all parameters, including the frozen parameters.
    trained: a nested dict of the new values. It does not contain frozen parameters.
    """
    return unflatten_dict(flatten_dict(params) | flatten_dict(trained))


def gradients(cfg, params, batch, key):
    """Compute the gradients of the mean loss per target token of a batch.

    The option --train.loss chooses the loss. Padding tokens are not counted. To save
    memory, a batch can be split into microbatches, which the model processes one after
    another. The gradients of all microbatches are added up. Without dropout, the result
    is the same as without microbatches, up to rounding. With dropout, the random masks
    differ.

    batch: a data.Batch with arrays of the shape [rows, length]. Segment 0 is padding.
    key: the PRNG key for dropout, or None for no dropout.
    Returns (the dict of sums that the loss returns, the gradients of the parameters).
    There are no gradients of frozen parameters.
    """
    # Divide the loss by the number of target tokens in the complete batch, not in one
    # microbatch. The gradients of the microbatches then add up to the gradient of the
    # mean loss. The option --train.loss_divisor replaces this divisor.
    tokens = jnp.sum(batch.target_segments > 0)
    divisor = cfg.train.loss_divisor or jnp.maximum(tokens, 1).astype(jnp.float32)

    trained = trained_part(cfg, params)

    def loss(trained, microbatch, key):
        complete = with_trained_part(params, trained)
        loss, sums = evaluate.LOSSES[cfg.train.loss](complete, microbatch, cfg, key)
        return loss / divisor, sums

    def sums_and_gradients(microbatch, key):
        grads, sums = jax.grad(loss, has_aux=True)(trained, microbatch, key)
        return sums, grads

    n = cfg.train.microbatches
    if n == 1:
        return sums_and_gradients(batch, key)

    # With n = 2, one microbatch has the even rows 0, 2, 4 and so on, and the other
    # microbatch has the odd rows. Each device holds neighboring rows, so every microbatch
    # has rows on every device. No row has to move to another device.
    microbatches = jax.tree.map(
        lambda a: a.reshape(-1, n, a.shape[1]).swapaxes(0, 1), batch
    )
    keys = None if key is None else jax.random.split(key, n)

    def add_microbatch(total, microbatch_and_key):
        new = sums_and_gradients(*microbatch_and_key)
        return jax.tree.map(jnp.add, total, new), None

    # Sum the gradients of all microbatches, beginning with zeros. The function
    # jax.eval_shape finds the shapes and shardings of the sums without running the model.
    first = jax.tree.map(lambda a: a[0], (microbatches, keys))
    zeros = jax.tree.map(
        lambda a: jnp.zeros(a.shape, a.dtype, out_sharding=a.sharding),
        jax.eval_shape(sums_and_gradients, *first),
    )
    total, _ = lax.scan(add_microbatch, zeros, (microbatches, keys))
    return total


def train_step(cfg, state, batch):
    """Train on one batch: compute the gradients, and update the parameters once.

    Returns (the new TrainState, metrics). The metrics are a dict of numbers, such as the
    loss, the accuracy and the learning rate. All losses are in nats per target token.
    This function is compiled before training starts.

    state: the TrainState before the update.
    batch: a data.Batch with arrays of the shape [rows, length].

    The result depends only on the arguments. A resumed run therefore gives the same
    result as an uninterrupted run.
    """
    key = None
    if cfg.model.dropout:
        # The dropout masks depend only on the seed and the step number. A resumed run
        # therefore has the same masks as an uninterrupted run. The seed itself was used
        # to sample the initial weights, so the dropout masks use seed + 1.
        key = jax.random.fold_in(jax.random.key(cfg.train.seed + 1), state.step)
    sums, grads = gradients(cfg, state.params, batch, key)
    rate = learning_rate(state.step, cfg.train)
    optimizer = OPTIMIZERS[cfg.train.optimizer]
    table = trained_part(cfg, model.param_table(cfg.model))
    trained = trained_part(cfg, state.params)

    def update(params, grads, slots, count, rate, loss):
        more = {"loss": loss} if optimizer.takes_loss else {}
        return optimizer.update(
            table, params, grads, slots, count, rate, cfg.train, **more
        )

    # Give the new parameters and slots the same shardings as the old ones. With
    # auto_axes, JAX chooses the shardings of all other arrays in the optimizer.
    shardings = jax.tree.map(
        lambda a: jax.typeof(a).sharding.spec, (trained, state.slots)
    )
    means = model.mean_metrics(sums)
    trained, slots = auto_axes(update, out_sharding=shardings)(
        trained, grads, state.slots, state.count, rate, means["loss"]
    )
    params = with_trained_part(state.params, trained)
    new = {"params": params, "slots": slots}
    if cfg.train.ema:
        # Use a smaller decay during the first updates. Otherwise the average would
        # contain a large share of the initial weights for a long time.
        decay = jnp.minimum(cfg.train.ema, (1 + state.count) / (10 + state.count))
        new["ema"] = jax.tree.map(
            lambda old, w: decay * old + (1 - decay) * w, state.ema, params
        )

    # If the loss or a gradient is infinite or NaN, keep the old parameters and slots. Use
    # jnp.where, because a compiled function cannot use a Python `if` on computed values.
    grad_norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
    finite = jnp.isfinite(grad_norm) & jnp.isfinite(sums["cross_ent_loss"])
    new = jax.tree.map(
        lambda new, old: jnp.where(finite, new, old),
        new,
        {name: getattr(state, name) for name in new},
    )
    metrics = {
        **means,
        "learning_rate": rate,
        "gradient_norm": grad_norm,
        "non_padding_fraction/inputs": jnp.mean(batch.input_segments > 0),
        "non_padding_fraction/targets": jnp.mean(batch.target_segments > 0),
    }
    skipped = jnp.where(finite, 0, state.skipped + 1)
    state = state.replace(
        step=state.step + 1, count=state.count + finite, skipped=skipped, **new
    )
    return state, metrics


# ---- the training loop -----------------------------------------------------------------


class NotFinite(Exception):
    """Raised to stop a run if the loss or a gradient is not finite three times in a row.

    A number is not finite if it is infinite or NaN.
    """


class Interrupted(Exception):
    """Raised to end an evaluation early when a signal, such as Ctrl-C, ends the run."""


def check_finite(cfg, step, skipped):
    """Raise NotFinite if at least three updates in a row were skipped.

    An update is skipped if the loss or a gradient is infinite or NaN.
    step: the number of the last finished step.
    skipped: how many updates in a row were skipped, up to this step.
    """
    if skipped < 3:
        return
    t = cfg.train
    # The variable `before` is the number of steps of this run before the first skipped
    # update. With batch size 64 and before = 10, the skipped batches begin with row 640
    # of the training data.
    before = step - skipped - t.start_step
    raise NotFinite(
        f"The loss or a gradient was infinite or NaN in steps {step - skipped + 1:,} to "
        f"{step:,} (rows {before * t.batch_size:,} to "
        f"{(before + skipped) * t.batch_size - 1:,} of the training data). These steps "
        f"did not change the model. Start another run with a lower "
        f"--train.learning_rate."
    )


def is_due(every, step, cfg):
    """Return whether a repeated action, such as saving a checkpoint, is due after a step.

    With every = 100, the action is due after the steps 100, 200, 300 and so on, and after
    the last step. With every = 0, the action is never due. The argument cfg is a
    TrainConfig.
    """
    return every > 0 and (step % every == 0 or step == cfg.steps)


def run(cfg, program, state, start, load_batch, progress, evaluations, save, after_step):
    """Run the training loop from step `start` to step train.steps.

    In each step, the loop takes one batch and updates the parameters. At regular
    intervals, the loop also prints metrics, evaluates the model and saves a checkpoint.
    Training stops early if after_step returns True.

    program: the compiled function train_step.
    state: the TrainState after step `start`.
    load_batch(n): A function that returns the batch of the step that follows step n. The
        arrays of this batch are on the devices.
    progress: a Progress (lower part of this file), which measures and reports the speed.
    evaluations: an Evaluations (lower part of this file), which evaluates the model.
    save(step, state): A function that starts to write a checkpoint.
    after_step(step, state): A function that returns whether training must stop after this
        step. The devices may still be computing the TrainState `state`.
    Returns (the number of the last step, the TrainState after the last step).
    Raises NotFinite if the loss or the gradients are infinite or NaN in several steps.
    """
    t = cfg.train
    step = start
    # Load the next batch in a background thread while the devices compute the current
    # step.
    loader = ThreadPoolExecutor(1)
    next_batch = loader.submit(load_batch, start)
    for step in range(start + 1, t.steps + 1):
        batch = progress.wait(next_batch)
        if step < t.steps:
            next_batch = loader.submit(load_batch, step)
        # This call starts the step and returns at once, because JAX runs programs
        # asynchronously. Code that reads a result, such as a metric, waits until the
        # devices have computed the step.
        state, metrics = program(state, batch)
        stop = after_step(step, state) and step < t.steps

        logs = is_due(t.log_every, step, t)
        saves = is_due(t.save_every, step, t) or (stop and t.save_every > 0)
        # If the run must stop now, skip the evaluations of this step. The resumed run
        # will make the skipped evaluations.
        due = [] if stop else evaluations.due(step)
        if logs:
            progress.log(step, metrics)
        # Raise NotFinite if several updates in a row were skipped. Check this before
        # calling `save`, because the state of such a run must not be saved.
        if logs or saves:
            check_finite(cfg, step, int(state.skipped))
        # Save the checkpoint before the evaluations, so that no training is lost if an
        # evaluation fails.
        if saves:
            save(step, state)
        try:
            for evaluation in due:
                evaluation(step, state.ema or state.params)
        except Interrupted:
            # A signal has interrupted the evaluation, so the run must stop. The resumed
            # run will repeat the evaluation.
            stop = step < t.steps
            if stop and t.save_every and not saves:
                save(step, state)
        # Restart the clock, so that the measured training speed does not include
        # evaluations and checkpoints.
        if logs or due or saves:
            progress.restart_clock(step)
        if stop:
            break
    return step, state


# ====== below: optax, output of a run, start of a run, plans, the command ===============

# ---- optimizers from optax -------------------------------------------------------------


def split_layers(params):
    """Split the stacked arrays of all layers into separate arrays, one for each layer.

    For example, the array encoder/layers/mlp/up of the shape [2, 512, 1024] becomes two
    matrices, encoder/layers/mlp/up/layer_000 and encoder/layers/mlp/up/layer_001.
    params: a nested dict of arrays. The arrays below a key "layers" are stacked.
    """

    def split(path, w):
        if "['layers']" not in keystr(path):
            return w
        return {f"layer_{i:03}": w[i] for i in range(len(w))}

    return jax.tree.map_with_path(split, params)


def named_leaves(tree):
    """Yield each leaf of a pytree as a tuple (name, is_layer, leaf).

    The name is the path of the leaf. In the state of an optax optimizer, for example, a
    leaf has the name "0/mu/encoder/norm". For the array of a single layer, is_layer is
    True. The name then leaves out the number of the layer.
    """
    for path, leaf in tree_leaves_with_path(tree):
        full_name = keystr(path, simple=True, separator="/")
        name = re.sub(r"/layer_\d+", "", full_name)
        yield name, name != full_name, leaf


def stack_layers(tree):
    """Stack the arrays of all layers, and return all arrays of a pytree as a nested dict.

    For example, the two matrices mlp/up/layer_000 and mlp/up/layer_001 become one array
    mlp/up with a first axis of size 2. A checkpoint stores the resulting dict. Each PRNG
    key is replaced by its integers, because a checkpoint can store only numbers.
    """
    groups = defaultdict(list)
    for name, is_layer, array in named_leaves(tree):
        if is_prng_key(array):
            array = jax.random.key_data(array)
        groups[name].append(array[None] if is_layer else array)
    stacked = {
        name: group[0] if len(group) == 1 else jnp.concatenate(group)
        for name, group in groups.items()
    }
    return unflatten_dict(stacked, sep="/")


def is_prng_key(array):
    """Return whether an array contains PRNG keys, such as those of optax.noisy_sgd."""
    return jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


def unstack_layers(stacked, shapes):
    """Convert the result of stack_layers back to a pytree with separate layers.

    For example, an array mlp/up with a first axis of size 2 becomes two matrices, one for
    each layer.
    stacked: the nested dict of arrays that stack_layers has returned.
    shapes: a pytree with the structure of the result.
    """
    arrays = partition.flatten(stacked)
    # For each stacked array, count the layers that the loop below has already returned.
    used = Counter()
    leaves = []
    for name, is_layer, like in named_leaves(shapes):
        array = arrays[name][used[name]] if is_layer else arrays[name]
        leaves.append(jax.random.wrap_key_data(array) if is_prng_key(like) else array)
        used[name] += 1
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves)


def from_optax(make, split=True):
    """Convert an optimizer of the library optax to an Optimizer of this file.

    For example, `from_optax(lambda rate, train: optax.lion(rate))` returns the optimizer
    Lion. The state of the optax optimizer, such as the momentum, becomes the optimizer
    state of the run.

    An optimizer that needs the loss, such as optax.polyak_sgd, gets the mean loss of the
    batch. Optimizers that call the loss function, such as optax.lbfgs, cannot be used.

    make(rate, train): A function that returns an optax.GradientTransformation for a
        learning rate and a TrainConfig.
    split: whether optax sees the parameters of each layer as separate arrays. With False,
        optax sees the stacked parameters of all layers, which is faster. This is right
        for optimizers such as AdamW, which treat each element of an array by itself.
    """
    separate = split_layers if split else lambda params: params

    def init(params, train):
        rate = learning_rate(train.start_step, train)
        return stack_layers(make(rate, train).init(separate(params)))

    def slots(table):
        params = jax.tree.map(
            lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32),
            table,
            is_leaf=model.is_param,
        )
        start = partial(init, train=configs.TrainConfig())
        declared = partition.flatten(jax.eval_shape(start, params))
        for path, slot in declared.items():
            axes = (None,) * len(slot.shape)
            # The name of a slot ends with the name of its parameter. For example, the
            # slot "0/mu/encoder/norm" belongs to the parameter "encoder/norm". If the
            # slot and the parameter have the same shape, give the slot the same axes, and
            # therefore the same sharding.
            for name, p in partition.flatten(table).items():
                if path.endswith(f"/{name}") and p.shape == slot.shape:
                    axes = p.axes
            declared[path] = model.Param(slot.shape, axes)
        return unflatten_dict(declared, sep="/")

    def update(table, params, grads, slots, count, rate, train, loss=None):
        # The learning rate of an optax optimizer is fixed when the optimizer is created.
        # Our learning rate changes in every step. Therefore create the optimizer again in
        # each step, with the current learning rate.
        optimizer = optax.with_extra_args_support(make(rate, train))
        params = separate(params)
        grads = separate(grads)
        state = unstack_layers(slots, jax.eval_shape(optimizer.init, params))
        updates, state = optimizer.update(grads, state, params, value=loss)
        return stack_layers(optax.apply_updates(params, updates)), stack_layers(state)

    return Optimizer(slots, update, init, takes_loss=True)


def rms_scaled_adamw(rate, train):
    """Return the AdamW of nanoT5, whose steps are relative to the size of the weights.

    RMS(w) is the root mean square of all elements of a matrix or vector w. As in
    Adafactor, the update of w is multiplied by max(1e-3, RMS(w)). The library nanoT5
    trains T5 with this optimizer.
    """
    return optax.chain(
        optax.scale_by_adam(eps=1e-6),
        optax.scale_by_param_block_rms(1e-3),
        optax.add_decayed_weights(train.weight_decay),
        optax.scale_by_learning_rate(rate),
    )


def muon(rate, train):
    """Return Muon for the weight matrices of the layers, and AdamW for all other weights.

    Muon (Jordan 2024) replaces the momentum of a matrix by the nearest orthogonal matrix.
    AdamW updates the embeddings, the position biases and the scales of the layer norms.
    With consistent_rms=0.2, the updates of Muon have about the same RMS as those of AdamW
    (Liu et al. 2025, arXiv:2502.16982). One learning rate therefore suits both.
    """

    def dimensions(path, w):
        # The matrices of all layers are stacked in an array [layers, rows, columns]. Muon
        # updates each of the stacked matrices separately.
        is_matrix = w.ndim == 3 and "relative_bias" not in keystr(path)
        return optax.contrib.MuonDimensionNumbers(1, 2) if is_matrix else None

    return optax.contrib.muon(
        rate,
        weight_decay=train.weight_decay,
        adam_weight_decay=train.weight_decay,
        muon_weight_dimension_numbers=lambda params: jax.tree.map_with_path(
            dimensions, params
        ),
        consistent_rms=0.2,
    )


OPTIMIZERS["adamw"] = from_optax(
    lambda rate, train: optax.adamw(rate, weight_decay=train.weight_decay), split=False
)
OPTIMIZERS["rms_scaled_adamw"] = from_optax(rms_scaled_adamw)
OPTIMIZERS["lion"] = from_optax(
    lambda rate, train: optax.lion(rate, weight_decay=train.weight_decay), split=False
)
OPTIMIZERS["muon"] = from_optax(muon, split=False)


# ---- the metrics file ------------------------------------------------------------------


class MetricsFile:
    """Write the metrics of a run to the file metrics.jsonl.

    Each line of the file is a JSON object with metrics of one step. Only the main process
    writes the file. If the library tensorboardX is installed, the metrics of a local run
    are also written to RUN_DIR/tensorboard. An example of a line is
    {"step": 100, "train/loss": 2.5}.

    path: the local or remote path of the file.
    step: the step at which the run starts or resumes. All lines of later steps are
        removed, because the run repeats these steps. The file contains lines of later
        steps if the run was killed after its last checkpoint.
    lock: the result of lock_run.
    log_every: the value of --train.log_every, or 0 if lines may be missing.
    """

    def __init__(self, path, step, lock=None, log_every=0):
        self.path = path
        self.lock = lock
        self.is_remote = configs.is_remote(path)
        lines = partition.read_metrics_file(path)
        lines = [line for line in lines if line["step"] <= step]
        if lines and log_every and step - lines[-1]["step"] >= log_every:
            note(
                f"warning: {path} contains no metrics between step "
                f"{lines[-1]['step']:,} and step {step:,}, where this run resumes. If "
                f"the run directory was copied during training, stop this run and copy "
                f"the directory again."
            )
        # Find the evaluations whose results are already in metrics.jsonl, as a set of
        # pairs (step, name). For example, (100, "training_eval/span_corruption") is an
        # evaluation after step 100.
        self.evaluated = {
            (line["step"], name.rpartition("/")[0]) for line in lines for name in line
        }
        self.lines = [json.dumps(line) + "\n" for line in lines]
        self.writers = {}
        # A resumed run repeats the steps after its last checkpoint. TensorBoard hides the
        # earlier metrics of the repeated steps, which begin at purge_step.
        self.purge_step = step + 1
        if partition.is_main_process():
            configs.write_file(path, "".join(self.lines))
            if self.is_remote:
                note(
                    "No metrics are written for TensorBoard, because --run_dir is "
                    "remote. The file metrics.jsonl contains all metrics."
                )
            elif not EventsWriter:
                note(
                    "No metrics are written for TensorBoard, because tensorboardX is not "
                    "installed. To install this library, run pip install "
                    "'.[tensorboard]'."
                )

    def write(self, step, **groups):
        """Add a line with metrics of one step to the file metrics.jsonl.

        For example, the call write(100, train={"loss": 2.5}) adds the line {"step": 100,
        "train/loss": 2.5}. Every process calls this method, but only the main process
        writes. If tensorboardX is installed and the file is local, the method also writes
        the metrics for TensorBoard.
        step: the number of the step.
        groups: Each keyword, such as `train`, is the name of a group of metrics. Its
            value is a dict from the name of a metric to a number.
        """
        if not partition.is_main_process():
            return
        values = {}
        for group, metrics in groups.items():
            for name, value in metrics.items():
                values[f"{group}/{name}"] = float(value)
        line = json.dumps({"step": step, **values}) + "\n"
        check_run_dir(self.path.parent, self.lock)
        if self.is_remote:
            # Remote storage cannot append a line to a file. Therefore collect all lines
            # in memory. The method sync later writes the complete file.
            self.lines.append(line)
        else:
            configs.append_file(self.path, line)
        if EventsWriter and not self.is_remote:
            for group, metrics in groups.items():
                folder = self.path.parent / "tensorboard" / group
                with configs.naming_file(folder):
                    self.write_events(folder, group, metrics, step)

    def write_events(self, folder, group, metrics, step):
        """Write the metrics of one step to a folder that TensorBoard can display.

        Each group of metrics has its own folder, as in the library SeqIO. For example,
        the group "train" has the folder RUN_DIR/tensorboard/train.
        """
        now = time.time()
        if group not in self.writers:
            folder.mkdir(parents=True, exist_ok=True)
            # An EventsWriter writes in the current thread and raises errors there. A
            # SummaryWriter, the usual choice, would write in a background thread. An
            # error in that thread, such as a full disk, would be ignored.
            self.writers[group] = EventsWriter(str(folder / "events"))
            start = SessionLog(status=SessionLog.START)
            self.writers[group].write_event(
                Event(wall_time=now, step=self.purge_step, session_log=start)
            )
        for name, value in metrics.items():
            # For metrics of generated text, SeqIO adds "eval/" to the names, for example
            # "eval/bleu". Use the same names as SeqIO.
            tag = f"eval/{name}" if group.startswith("inference_eval/") else name
            values = summary.scalar(tag, float(value))
            self.writers[group].write_event(
                Event(wall_time=now, step=step, summary=values)
            )
        self.writers[group].flush()

    def sync(self):
        """Make sure that all metrics written so far are stored in metrics.jsonl.

        For a local file, wait until the operating system has written the file to disk.
        For a remote file, write all lines.
        """
        if not partition.is_main_process():
            return
        if self.is_remote:
            configs.write_file(self.path, "".join(self.lines))
        # If the run directory was moved, the file is no longer at this path. In this
        # case, do nothing.
        elif self.path.exists():
            with open(self.path) as file:
                os.fsync(file.fileno())


# ---- the progress output ---------------------------------------------------------------


def describe_mesh(cfg, mesh):
    """Return a text that describes how a run uses its devices.

    The text contains the shape of the mesh, the dtype and the batch size. An example is
    "mesh data 1 x model 1, fsdp False, float32, remat dots, batch 64 = 64 rows on each
    device, microbatches 1".
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
    """Return the name of a device in the table partition.CHIPS, such as "H100".

    Return None if the table does not contain the device.
    device: a jax.Device.
    """
    return next((name for name in partition.CHIPS if name in device.device_kind), None)


def peak_flops():
    """Return the peak speed of all devices together, in operations per second.

    Only floating-point operations are counted. For the GPUs and TPUs in partition.CHIPS,
    the peak comes from the data sheet. For all other devices, the speed of a matmul is
    measured. This function also prints the peak.
    """
    name = find_chip(jax.devices()[0])
    if name:
        peak = partition.CHIPS[name].teraflops * 1e12 * jax.device_count()
    else:
        name = "a 1024 x 1024 matmul"
        a = jnp.ones((1024, 1024))
        # Time the matmul ten times, and use the shortest time. The first time includes
        # the compilation, and other programs may slow down some repetitions.
        times = timeit.repeat(
            lambda: jnp.matmul(a, a).block_until_ready(), number=1, repeat=10
        )
        peak = 2 * 1024**3 / min(times) * jax.process_count()
    print(f"peak     {peak / 1e9:,.0f} GFLOP/s, the speed of {name}")
    return peak


def step_flops(cfg):
    """Return how many floating-point operations a training step needs.

    The result is the sum over all devices.
    """
    return cfg.train.batch_size * model.train_flops(
        cfg.model, cfg.data.inputs_length, cfg.data.targets_length
    )


# Training prints a line like this at regular intervals. Each name in braces is replaced
# by the value of a metric.
PROGRESS_LINE = (
    "loss {loss:.3f}  accuracy {accuracy:.3f}  learning rate {learning_rate:.1e}  "
    "{seqs_per_second:.4g} examples/s  {gigaflops:.4g} GFLOP/s{share}  "
    "waiting for data {data_wait_fraction:.0%}"
)


def report(text):
    """Print a text. If there is a progress bar, the text appears above the bar.

    Printing fails if the terminal is closed, or if the program that reads the output has
    ended. In this case, send the signal SIGHUP to this process. The run then saves a
    checkpoint and stops.
    """
    try:
        tqdm.write(text)
    except OSError:
        configs.discard_output(sys.stdout)
        signal.raise_signal(signal.SIGHUP)


class Progress:
    """Measure the training speed, and report the loss and other metrics during training.

    The metrics are written to metrics.jsonl. In a terminal, a progress bar also shows the
    latest metrics. If the output is not a terminal, the metrics are printed as lines.
    """

    def __init__(self, cfg, metrics_file, start):
        self.cfg = cfg
        self.metrics_file = metrics_file
        self.flops = step_flops(cfg)
        self.peak = peak_flops()
        # With disable=None, the bar is shown only if the output is a terminal.
        self.bar = tqdm(
            total=cfg.train.steps, initial=start, disable=None, file=sys.stdout
        )
        # How many seconds training has waited for checkpoints since the last log line.
        self.saving = 0.0
        self.restart_clock(start)

    def restart_clock(self, step):
        """Start a new measurement of the training speed after a given step."""
        self.step = step
        self.clock = time.perf_counter()
        self.waited = 0.0

    def wait(self, batch):
        """Wait until a batch is loaded, and return the batch.

        The method also measures the waiting time. A long waiting time means that loading
        data is slower than training.
        batch: a concurrent.futures.Future whose result is the batch.
        """
        began = time.perf_counter()
        result = batch.result()
        self.waited += time.perf_counter() - began
        return result

    def log(self, step, metrics):
        """Report the metrics of a step and the training speed.

        The metrics are written to metrics.jsonl and also shown to the user. The speed is
        the average since the last call of restart_clock.
        """
        t = self.cfg.train
        # Copy the metrics from the devices. The call of device_get waits until the
        # devices have computed the step.
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
            "data_wait_fraction": self.waited / seconds,
            "checkpoint_wait_seconds": self.saving,
        }
        self.saving = 0.0
        share = ""
        # If other programs used the machine while the peak speed was measured, the
        # measured peak is too low. The training speed can then be above 100 % of the
        # peak. Do not report a share above 100 %.
        if flops <= self.peak:
            timing["model_flops_fraction"] = flops / self.peak
            share = f" ({flops / self.peak:.0%} of peak)"
        self.metrics_file.write(step, train=metrics, timing=timing)
        line = PROGRESS_LINE.format(
            **metrics, **timing, gigaflops=flops / 1e9, share=share
        )
        self.bar.n = step
        self.bar.set_postfix_str(line)
        if self.bar.disable:
            left = tqdm.format_interval((t.steps - step) / steps)
            report(f"step {step:,}/{t.steps:,} ({left} left)  {line}")


# ---- evaluations during training -------------------------------------------------------


# Evaluations print a line like this for the held-out data of a task. Each name in braces
# is replaced by a value, such as the name of the task.
HELD_OUT_LINE = "step {step:,}: {task}: held-out loss {loss:.3f}, accuracy {accuracy:.3f}"
CONTENT_PART = (
    ", {content_loss:.3f} nats per content token, {bits_per_byte:.3f} bits per byte"
)


class Evaluations:
    """Evaluate the model during training, on held-out data that are never trained on.

    The results are printed and written to metrics.jsonl.

    held_out: a dict from the name of a task to a tuple (Config, Dataset).
    stop: the StopSignal of the run.
    """

    def __init__(self, mesh, run_dir, metrics_file, held_out, stop):
        self.mesh = mesh
        self.run_dir = run_dir
        self.write = metrics_file.write
        self.evaluated = metrics_file.evaluated
        self.held_out = held_out
        self.stop = stop

    def print_baseline(self, counts):
        """Print the loss of a unigram model on the held-out data of each task.

        A unigram model knows only how often each token occurs. Its loss is a baseline:
        the trained model should have a lower loss. Only the cross entropy has this
        baseline.
        counts: how often each token occurs in a sample of the training data, as an array
            of integers of the shape [vocabulary size].
        """
        for name, (cfg, dataset) in self.held_out.items():
            if cfg.train.loss != "cross_entropy":
                continue
            number = dataset.batches(cfg.train.eval_batches)
            batches = [dataset.batch(i) for i in range(number)]
            loss = data.unigram_loss(counts, batches, dataset.tasks[0].tokenizer)
            print(
                f"unigram  {loss:.3f} nats per content token on held-out {name}. This is "
                f"the loss of a baseline that knows only how often each token occurs. "
                f"Content tokens are all target tokens except sentinels and EOS."
            )

    def due(self, step):
        """Return the evaluations that are due after a step, and not yet in metrics.jsonl.

        Each evaluation is a function of the step and the parameters. A run saves its
        checkpoint before the evaluations. If the run is killed during the evaluations,
        the resumed run makes the missing evaluations.
        """
        found = []
        for name, (cfg, dataset) in self.held_out.items():
            t = cfg.train
            kinds = [("training_eval", t.eval_every, self.evaluate)]
            # Generate outputs only if the model has a decoder, and the documents of the
            # task are pairs of inputs and targets. In a pretraining task, a document is
            # only a text.
            has_pairs = len(dataset.tasks[0].task.objective.features) > 1
            if has_pairs and cfg.model.num_decoder_layers:
                kinds.append(("inference_eval", t.infer_every, self.predict))
            for group, every, evaluation in kinds:
                is_written = (step, f"{group}/{name}") in self.evaluated
                if is_due(every, step, t) and not is_written:
                    found.append(partial(self.run, evaluation, name))
        return found

    def run(self, evaluation, name, step, params):
        """Run an evaluation, which a signal such as Ctrl-C may interrupt.

        evaluation: the method `evaluate` or the method `predict` of this class.
        """
        self.stop.evaluating = True
        try:
            evaluation(name, step, params)
        finally:
            self.stop.evaluating = False

    def evaluate(self, name, step, params):
        """Compute the loss and the accuracy of the model on held-out data of a task.

        The results are printed and written to metrics.jsonl. For the first evaluated task
        of the run, the method also prints the output of the model for one example.
        """
        cfg, dataset = self.held_out[name]
        number = dataset.batches(cfg.train.eval_batches)
        metrics = evaluate.evaluate_loss(params, cfg, self.mesh, dataset, number)
        self.write(step, **{f"training_eval/{name}": metrics})
        text = HELD_OUT_LINE + CONTENT_PART * ("content_loss" in metrics)
        report(text.format(step=step, task=name, **metrics))
        if name == next(iter(self.held_out)) and cfg.model.num_decoder_layers:
            report(held_out_example(params, cfg, self.mesh, dataset))

    def predict(self, name, step, params):
        """Generate an output for each held-out example, and compute metrics such as BLEU.

        The outputs are written to RUN_DIR/eval, and the metrics to metrics.jsonl.
        """
        cfg, dataset = self.held_out[name]
        # Use only as many examples as eval_batches batches contain. If
        # --train.eval_batches is 0, the limit is None, and all examples are used.
        limit = cfg.train.eval_batches * cfg.train.batch_size or None
        metrics, lines = evaluate.predict(
            params, cfg, self.mesh, "validation", dataset.tasks[0].tokenizer, limit
        )
        self.write(step, **{f"inference_eval/{name}": metrics})
        group, _, best = cfg.train.keep_best.rpartition("/")
        if group == f"inference_eval/{name}" and best not in metrics:
            note(
                f"warning: --train.keep_best does not keep the best checkpoint, because "
                f"{best} is not a metric of {name}. To keep the best checkpoint, stop "
                f"this run and choose one of these metrics: {', '.join(metrics)}."
            )
        evaluate.write_lines(self.run_dir / "eval", name, step, lines)
        values = ", ".join(f"{metric} {value:.2f}" for metric, value in metrics.items())
        report(f"step {step:,}: {name}: {values}")


def held_out_example(params, cfg, mesh, dataset):
    """Return a text that compares the output of the model with the true output.

    The text has three lines: the inputs, the true targets, and the output of the model.
    The example is the first row of `dataset`, which is a Dataset of held-out data.
    """
    tokenizer = dataset.tasks[0].tokenizer
    batch = dataset.batch(0)
    inputs = batch.inputs[0][batch.input_segments[0] > 0]
    targets = batch.targets[0]
    # The mesh axis "data" splits the rows of a batch over devices, so the batch needs at
    # least one row for each of these devices. The function run_batch fills all rows after
    # the first row with copies of the example.
    rows = mesh.shape["data"]
    trie = infer.read_choices(cfg, tokenizer, data.TASKS.get(cfg.data.task))
    example = infer.Example(inputs)
    results = infer.run_batch(params, cfg, mesh, [example], "predict", rows, trie)
    (outputs, _), *_ = results
    if data.is_span_corruption(cfg):
        # Show the text of the example three times: with gaps, with the true tokens in the
        # gaps, and with the tokens that the model writes.
        texts = [
            infer.fill_blanks(inputs, ids, tokenizer) for ids in ([], targets, outputs[0])
        ]
    else:
        texts = [tokenizer.decode(ids) for ids in (inputs, targets, outputs[0])]
    lines = map("  {:8} {}".format, ("inputs", "truth", "model"), texts)
    return configs.escape_controls("\n".join(lines))


# ---- the start of a run ----------------------------------------------------------------


def lock_run(run_dir, checkpoints):
    """Lock a run directory, so that only one run at a time can use it.

    Returns the open lock file. Closing this file releases the lock. A remote directory
    cannot be locked, so the result for a remote directory is None.

    Only the main process locks the directory. All other processes return None. The main
    process also deletes checkpoints that were not completely written.
    """
    if not partition.is_main_process():
        return None
    lock = None
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        if configs.is_remote(run_dir):
            note(
                f"Do not start two runs in {run_dir} at the same time, because a remote "
                f"directory cannot be locked."
            )
        else:
            lock = configs.lock(run_dir / ".lock")
        checkpoints.discard_unfinished()
    except BlockingIOError:
        raise UserError(
            f"Another process is already training in {run_dir}: stop that process, "
            f"or choose another --run_dir."
        ) from None
    except OSError as error:
        raise UserError(
            f"--run_dir {run_dir} cannot be written ({error.strerror or error}): choose "
            f"another --run_dir."
        ) from error
    return lock


def check_run_dir(run_dir, lock):
    """Raise UserError if a run directory was moved, deleted or replaced during training.

    Without this check, the next checkpoint would be written to a new folder with the old
    name. The function compares the lock file in the directory with the open lock file. If
    `lock` is None, the function only checks that the lock file exists.
    lock: the result of lock_run.
    """
    if configs.is_remote(run_dir):
        return
    path = run_dir / ".lock"
    is_same = path.exists()
    if is_same and lock:
        is_same = os.path.samestat(path.stat(), os.fstat(lock.fileno()))
    if not is_same:
        raise UserError(
            f"Training stops, because {run_dir} or its file .lock was moved, deleted or "
            f"replaced. To continue from the last checkpoint, run train.py with "
            f"--run_dir set to the directory that now contains the checkpoints."
        )


def run_tokenizer(cfg, run_dir, resumes, source):
    """Return the Tokenizer of a run.

    A resumed run uses the vocabulary in its run directory. A new run with --init_from
    uses the vocabulary of the run that it starts from. Any other new run uses the
    vocabulary of --data.vocab. The value "train:8000", for example, first trains a
    vocabulary of 8,000 tokens.
    resumes: whether the run resumes from its own checkpoint.
    source: the run or checkpoint whose weights the run starts with, or "".
    """
    if resumes or not partition.is_main_process():
        return data.load_run_tokenizer(run_dir)
    if not source:
        return data.prepare_vocabulary(cfg)
    partition.is_run(source)
    folder = configs.source_run(source)
    if cfg.data.vocab.startswith("train:"):
        return data.load_run_tokenizer(folder)
    tokenizer = data.load_tokenizer(cfg.data.vocab)
    exists = (folder / "spiece.model").exists()
    if exists and tokenizer.sha256 != data.load_run_tokenizer(folder).sha256:
        raise UserError(
            f"--data.vocab is not the vocabulary of {source}, whose weights this run "
            f"loads. Leave out --data.vocab to use the vocabulary of {source}."
        )
    return tokenizer


def check_keep_best(t, tasks):
    """Raise UserError if a run does not compute the metric that --train.keep_best names.

    For example, "training_eval/span_corruption/loss" is computed if --train.eval_every is
    not 0 and span_corruption is one of the evaluated tasks.
    t: a TrainConfig.
    tasks: the names of the tasks that are evaluated.
    """
    losses = [*model.mean_metrics(Counter()), "content_loss", "bits_per_byte"]
    known = []
    for task in tasks:
        if t.eval_every:
            known += [f"training_eval/{task}/{name}" for name in losses]
        if t.infer_every:
            # The metric functions of a task choose the names of their results. These
            # names are not known before the first evaluation, so accept every name.
            known.append(f"inference_eval/{task}/*")
    if t.keep_best and not any(fnmatch.fnmatch(t.keep_best, name) for name in known):
        raise UserError(
            f"--train.keep_best {t.keep_best} names a metric that this run does not "
            f"compute. To compute more metrics, set --train.eval_every or "
            f"--train.infer_every. This run computes {', '.join(known) or 'no metrics'}."
        )


def open_data(cfg, run_dir, resumes, source, config):
    """Open the training data and the held-out data of a run.

    If the text has not been tokenized yet, this function tokenizes the text. The function
    also writes the files spiece.model, config.json, model-info.txt and recipe.py. These
    files describe the run.
    resumes: whether the run resumes from its own checkpoint.
    source: the run or checkpoint whose weights the run starts with, or "".
    config: the value of --config, or None.
    Returns (training Dataset, held-out data). The held-out data are a dict from the name
    of an evaluated task to a tuple (Config, Dataset).
    """
    t = cfg.train
    # The main process runs this function first, and writes config.json. If another
    # process then does not find config.json, the processes do not share the run
    # directory.
    if not partition.is_main_process() and not (run_dir / "config.json").exists():
        raise UserError(
            f"The processes of this run do not share --run_dir {run_dir}: choose a "
            f"directory that all machines can read and write."
        )
    # Check the names of the metrics before tokenizing the text, which can take long.
    tasks = data.evaluation_configs(cfg) if t.eval_every or t.infer_every else {}
    if t.infer_every:
        evaluate.check_metrics(tasks)
    check_keep_best(t, tasks)
    tokenizer = run_tokenizer(cfg, run_dir, resumes, source)
    dataset = data.prepare(cfg, "train", tokenizer)
    held_out = {
        name: (task_cfg, data.prepare(task_cfg, "validation", tokenizer))
        for name, task_cfg in tasks.items()
    }
    if partition.is_main_process():
        digest = configs.read_run(run_dir)[1]["corpus"] if resumes else ""
        if digest and digest != dataset.digest:
            note(
                f"warning: the training data of {run_dir} have changed since the run "
                f"began. A source file has a new name, size, modification time or "
                f"content. Training continues with the new data. To train on the old "
                f"data, stop this run and restore the files."
            )
        if not resumes:
            configs.write_file(run_dir / "spiece.model", tokenizer.serialized)
        configs.save_run(cfg, run_dir, tokenizer.sha256, dataset.digest, source)
        info = model_info(cfg, jax.sharding.get_mesh())
        configs.write_file(run_dir / "model-info.txt", info)
        if config and config.endswith(".py"):
            recipe = configs.to_path(config).read_text()
            stored = run_dir / "recipe.py"
            if stored.exists() and stored.read_text() != recipe:
                note(
                    f"warning: the recipe file {config} has changed since the run began. "
                    f"Training continues with the tasks and functions of the new file. "
                    f"To use the old file, stop this run and restore the file."
                )
            configs.write_file(stored, recipe)
    return dataset, held_out


def state_template(cfg, mesh):
    """Return the shapes, dtypes and shardings of a TrainState without creating arrays.

    The result is a TrainState that contains a jax.ShapeDtypeStruct for each array. The
    training step can be compiled for these shapes before any array exists.
    """

    def with_sharding(a):
        # The step counter of an optax optimizer has no sharding. The empty PartitionSpec
        # jax.P() puts a copy of the counter on every device.
        spec = a.sharding.spec if a.sharding else jax.P()
        sharding = jax.NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)

    shapes = jax.eval_shape(partial(init_state, cfg))
    return jax.tree.map(with_sharding, shapes)


def batch_template(cfg, mesh, rows):
    """Return the shapes, dtypes and shardings of a batch without creating arrays.

    The result is a data.Batch that contains a jax.ShapeDtypeStruct for each array.
    rows: the number of rows on all devices together.
    """
    sharding = jax.NamedSharding(mesh, jax.P("data"))
    inputs, targets = (
        jax.ShapeDtypeStruct((rows, length), jnp.int32, sharding=sharding)
        for length in (cfg.data.inputs_length, cfg.data.targets_length)
    )
    # The five arguments stand for the arrays inputs, input_segments, decoder_inputs,
    # targets and target_segments. Arrays of the same shape have the same template.
    return data.Batch(inputs, inputs, targets, targets, targets)


def lower_step(cfg, mesh):
    """Translate the training step to StableHLO, the input language of the XLA compiler.

    JAX calls this translation lowering.
    mesh: the mesh of the devices that will run the training step.
    Returns (the result of state_template, a jax.stages.Lowered). The method `compile` of
    the jax.stages.Lowered compiles the training step.
    """
    template = state_template(cfg, mesh)
    options = None
    if partition.platform() == "tpu":
        # Choose compiler options that make training faster on this kind of TPU. Comments
        # in partition.py explain the options.
        kind = mesh.devices.flat[0].device_kind
        options = dict(partition.ASYNC_GATHER_OPTIONS)
        if kind not in ("TPU v3", "TPU v4"):
            options |= partition.ASYNC_REDUCE_OPTIONS
        if kind.startswith("TPU v5"):
            options |= partition.FUSION_MEMORY_OPTIONS
    # With donate_argnums=0, the new TrainState overwrites the memory of the old
    # TrainState. Otherwise the step would need memory for two TrainStates.
    step = jax.jit(partial(train_step, cfg), donate_argnums=0, compiler_options=options)
    return template, step.lower(template, batch_template(cfg, mesh, cfg.train.batch_size))


# If a training step needs too much memory, the error message contains this text, after
# the word "lower".
SMALLER_STEP = (
    "--train.batch_size, --data.inputs_length, --data.targets_length or the model's "
    "sizes, raise --train.microbatches, add --model.remat full"
)


def check_minimum_memory(cfg):
    """Raise UserError if the largest arrays of a training step do not fit in memory.

    The required memory is only estimated, so that the check is quick. The check runs
    before JAX traces the model. Tracing itself already needs memory for matrices of the
    shape [inputs_length, inputs_length].
    """
    rows = cfg.train.batch_size // cfg.train.microbatches
    lengths = cfg.data.inputs_length, cfg.data.targets_length
    # Use copies=2 to count the parameters twice, because the gradients have the same size
    # as the parameters.
    memory = model.minimum_memory(cfg.model, rows, *lengths, copies=2)
    partition.check_memory(memory, SMALLER_STEP)


def check_freeze(cfg):
    """Raise UserError if --train.freeze matches no parameter or all parameters.

    The function also raises UserError if --train.freeze is not a regular expression.
    """
    names = partition.flatten(model.param_table(cfg.model))
    try:
        frozen = [name for name in names if re.fullmatch(cfg.train.freeze, name)]
    except re.error:
        frozen = []
    if cfg.train.freeze and len(frozen) in (0, len(names)):
        raise UserError(
            f"--train.freeze {cfg.train.freeze} must match the names of some parameters, "
            f"but not of all parameters. Write a regular expression for complete names, "
            f"such as 'encoder/.*'. The names are {', '.join(names)}."
        )


def compile_step(step, mesh):
    """Compile the training step, and check that the compiled program fits in memory.

    Raises UserError if the program needs too much memory. The check is made before the
    program allocates memory. Without the check, a machine without accelerators would
    start to swap, or the kernel would kill the process.
    step: a jax.stages.Lowered from lower_step.
    """
    program = step.compile()
    sizes = program.memory_analysis()
    size = sizes.argument_size_in_bytes + sizes.temp_size_in_bytes
    partition.check_memory({"a training step": mesh.size * size}, SMALLER_STEP)
    return program


def load_state(cfg, template, checkpoints, source):
    """Return the TrainState with which a run starts, and the number of its step.

    If the run already has checkpoints, the newest checkpoint is loaded. Otherwise, if
    --init_from is given, the parameters of `source` are loaded. In all other cases, the
    parameters are random. With --train.restore all, the optimizer state and the step of
    `source` are loaded too.
    template: the result of state_template.
    checkpoints: the partition.Checkpoints of the run.
    source: the run or checkpoint whose weights the run starts with, or "".
    """
    t = cfg.train
    state = to_state_dict(template)
    restored = checkpoints.load(state)
    if restored:
        step, arrays = restored
        print(f"resumed  {checkpoints.path(step)}")
        if source:
            note(
                f"The run began with the weights of {source}, and now continues from its "
                f"own checkpoint. The weights of --init_from are not loaded again."
            )
    elif source and t.restore == "all":
        step, arrays = partition.load_newest(source, state, checkpoints.identity)
        if not t.start_step <= step < t.steps:
            raise UserError(
                f"With --train.restore all, training continues at step {step:,} of "
                f"{source}. This step is not between --train.start_step {t.start_step} "
                f"and --train.steps {t.steps}. Set --train.start_step to at most {step}, "
                f"and --train.steps to more than {step}."
            )
        print(f"started  with the weights and optimizer of step {step:,} of {source}")
    else:
        # Compile the initialization quickly. The compiled program may be slow, because it
        # runs only once. On a CPU, optimization level 1 halves the compile time.
        options = None
        if partition.platform() == "cpu":
            options = {"xla_backend_optimization_level": "1"}
        shardings = jax.tree.map(lambda a: a.sharding, template)
        init = jax.jit(partial(init_state, cfg), out_shardings=shardings)
        parameters = {"params": state["params"]}
        state = to_state_dict(init.lower().compile(options)())
        step = t.start_step
        arrays = {}
        if source:
            # If the source has no LoRA matrices, they keep their initial values.
            if not configs.load_run(configs.source_run(source)).model.lora:
                without_lora = configs.override(cfg, {"train.freeze": ".*_lora_."})
                parameters = trained_part(without_lora, parameters)
            source_step, arrays = partition.load_newest(
                source, parameters, checkpoints.identity
            )
            print(f"started  with the weights of step {source_step:,} of {source}")
            if t.ema:
                # The moving average begins with the loaded weights. Copy the weights,
                # because a training step overwrites both the weights and the average.
                arrays["ema"] = jax.tree.map(jnp.copy, arrays["params"])
    # Replace the arrays of `state` by the loaded arrays. An optimizer without slots, such
    # as optax.sgd, has an empty dict as its state. Keep the empty dict, which a
    # checkpoint does not contain.
    arrays = flatten_dict(state, keep_empty_nodes=True) | flatten_dict(arrays)
    return from_state_dict(template, unflatten_dict(arrays)), step


# ---- a run from start to end -----------------------------------------------------------


def train(cfg, run_dir, recipe, config, source):
    """Train a model until step train.steps, and write all results to the run directory.

    If the run directory already contains checkpoints, training resumes from the newest
    checkpoint. Returns the exit status of the command, which is 0 if training succeeded.
    The exit status is 1 if the loss or a gradient was infinite or NaN in several steps.
    cfg: the Config of the run.
    recipe: the Config before the flags of the command line changed any field.
    config: the value of --config, or None.
    source: the run or checkpoint whose weights the run starts with, or "".
    """
    t = cfg.train
    mesh = partition.set_mesh(cfg)
    # Check that the settings are valid and the memory suffices before writing any file.
    learning_rate(0, t)
    check_freeze(cfg)
    check_minimum_memory(cfg)
    print(f"recipe {cfg.name}")
    for name, (new, old) in configs.differences(cfg, recipe).items():
        print(f"  with --{name} {new} instead of {old!r}")
    print(f"model    {model.describe_model(cfg)}")
    device = jax.devices()[0].device_kind
    print(f"devices  {mesh.size} x {device}, {describe_mesh(cfg, mesh)}")
    print(data.describe_rows(cfg))

    checkpoints = partition.Checkpoints(run_dir, t.keep, t.async_save, report=report)
    lock = partition.run_on_all(lambda: lock_run(run_dir, checkpoints))
    partition.share_compiled_programs(run_dir)
    with lock or contextlib.nullcontext():
        return train_locked(cfg, run_dir, recipe, config, source, mesh, checkpoints, lock)


def train_locked(cfg, run_dir, recipe, config, source, mesh, checkpoints, lock):
    """Train a model in a run directory that is already locked.

    The function `train` locks the directory and then calls this function. The first five
    arguments and the result are those of `train`.
    checkpoints: the partition.Checkpoints of the run.
    lock: the result of lock_run.
    """
    t = cfg.train
    resumes = bool(partition.from_main_process(checkpoints.steps()))
    # Warn if a recipe for fine-tuning starts with random weights. A recipe is for
    # fine-tuning if its name contains "finetune", or if it begins at a step after 0.
    if not (resumes or source) and (t.start_step or "finetune" in cfg.name):
        note(
            f"warning: the recipe {cfg.name} continues the training of a model, but this "
            f"run starts at step {t.start_step:,} with random weights. To start with "
            f"trained weights, stop this run and add --init_from with the directory of a "
            f"trained model."
        )
    dataset, held_out = partition.run_on_main_first(
        lambda: open_data(cfg, run_dir, resumes, source, config)
    )
    vocabulary = dataset.tasks[0].tokenizer.sha256
    partition.check_same(
        {"the vocabulary": vocabulary, "the training text": dataset.digest}
    )
    checkpoints.identity = configs.weights_identity(cfg, vocabulary)
    stop = StopSignal(t)
    # A single process handles SIGTERM here. With several processes, JAX handles SIGTERM,
    # so that all processes stop after the same step.
    names = ["SIGINT", "SIGHUP", "SIGTERM"][: 2 + (jax.process_count() == 1)]
    with configs.watch_signals(names, stop.interrupt, stop.receive):
        template, step = lower_step(cfg, mesh)
        note("compiling the training step")
        # Compile the training step in a background thread while the TrainState is loaded.
        with ThreadPoolExecutor(1) as thread:
            compiling = thread.submit(compile_step, step, mesh)
            state, start = load_state(cfg, template, checkpoints, source)
            program = compiling.result()
        # The compiler has freed much memory, but the C library glibc still holds this
        # memory. Return the memory to the operating system now. For T5 1.1 small on a
        # CPU, this saves 280 MB.
        if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
            trim(0)
        metrics_file = MetricsFile(run_dir / "metrics.jsonl", start, lock, t.log_every)
        evaluations = Evaluations(mesh, run_dir, metrics_file, held_out, stop)
        missing = evaluations.due(start) if resumes else []
        if start >= t.steps and not missing:
            print(
                f"{run_dir} has already reached step {start:,}. To train longer, run: "
                f"{longer_training(cfg, recipe, run_dir, source, start)}"
            )
            return 0
        if resumes:
            warn_about_schedule(t, metrics_file.path, run_dir, start)
        progress = Progress(cfg, metrics_file, start)
        counts = np.bincount(dataset.sample(1 << 20), minlength=cfg.model.vocab_size)
        evaluations.print_baseline(counts)
        rows = partition.local_rows(t.batch_size, mesh)

        def load_batch(step):
            batch = dataset.batch(step - t.start_step, rows)
            return partition.put_batch(batch, t.batch_size, mesh)

        # With --train.profile 10:12, jax.profiler records the steps 10, 11 and 12. The
        # value 0:0 records no step.
        first, last = map(int, (t.profile or "0:0").split(":"))

        def profile(step, state):
            if step == first - 1 < t.steps:
                jax.profiler.start_trace(run_dir / "profile")
            if start < first <= step == min(last, t.steps):
                # Wait until the devices have computed this step, so that the trace
                # contains the complete step.
                jax.block_until_ready(state)
                jax.profiler.stop_trace()

        def after_step(step, state):
            profile(step, state)
            if jax.process_count() == 1:
                return stop.number is not None
            # All processes must stop after the same step. JAX chooses this step when a
            # process receives SIGTERM.
            return multihost_utils.reached_preemption_sync_point(step)

        def best():
            if t.keep_best:
                steps = checkpoints.steps()
                found = partition.best_step(metrics_file.path, t.keep_best, steps)
                return found[0] if found else None

        def save(step, state):
            check_run_dir(run_dir, lock)
            metrics_file.sync()
            progress.saving += checkpoints.save(to_state_dict(state), step, best)

        try:
            for evaluation in missing:
                evaluation(start, state.ema or state.params)
            profile(start, state)
            progress.restart_clock(start)
            stop.training = True
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
            note(error)
            return 1
        finally:
            progress.bar.close()
            metrics_file.sync()
            # After an error, a background thread may still be writing a checkpoint. Wait
            # for the thread before another command can lock the run directory. With
            # several processes, do not wait, because the other processes may never write
            # their parts of the checkpoint.
            checkpoints.executor.shutdown(wait=jax.process_count() == 1)
        checkpoints.wait()
        # The last evaluation may have changed which checkpoint is the best. Remove the
        # checkpoints that are no longer needed.
        if partition.is_main_process():
            checkpoints.remove_old(step, best())
    if step < t.steps:
        command = shlex.join(["python", *sys.argv])
        kept = f"The checkpoint {checkpoints.path(step)} is saved."
        if not t.save_every:
            kept = "No checkpoint is saved, because --train.save_every is 0."
        report(
            f"stopped at step {step:,} on {stop.name}. {kept} To continue, run the same "
            f"command again: {command}"
        )
        if jax.process_count() > 1:
            # Wait for the other processes before this process ends. The function
            # run_command, which ends the process, waits only if the status is 0.
            jax.distributed.shutdown()
        return stop.status
    print(f"done     {run_dir}: {step:,} steps.")
    if t.save_every and cfg.model.num_decoder_layers:
        example = '"Return the <extra_id_0> of the list."'
        if not data.is_span_corruption(cfg):
            example = (
                f"--input task:{next(iter(held_out), cfg.data.task)} --output o.jsonl"
            )
        options = f"--run_dir {run_dir}"
        if (run_dir / "recipe.py").exists():
            # The model may need a function of the recipe file of the run.
            options = f"--config {run_dir / 'recipe.py'} {options}"
        print(f"""Next:
  python infer.py {options} {example}
  python evaluate.py {options}
  {longer_training(cfg, recipe, run_dir, source, step)}""")
    return 0


class StopSignal:
    """React to the signals that end a run: SIGINT (Ctrl-C), SIGHUP and SIGTERM.

    Before the first training step, a signal ends the process at once. During training,
    the first signal makes the run stop after the current step and save a checkpoint. A
    second signal ends the process at once.

    t: the TrainConfig of the run.
    """

    def __init__(self, t):
        self.t = t
        self.training = False
        self.evaluating = False
        # The first signal that the run has received, and the time of this signal. Both
        # are None until the run receives a signal.
        self.number = None
        self.time = None

    def interrupt(self, *_):
        """Raise Interrupted if the run is evaluating the model.

        Python calls this signal handler in the main thread. If there are several
        processes, the evaluation is not interrupted, because all processes must stop
        after the same step.
        """
        if self.training and self.evaluating and jax.process_count() == 1:
            raise Interrupted

    def receive(self, number):
        """Make the run stop after a signal, or end the process at once.

        The process ends at once if training has not started, or if the signal is the
        second one. The function configs.watch_signals calls this method in a separate
        thread, so the main thread may be busy. The argument `number` is a signal.Signals.
        """
        now = time.monotonic()
        if not self.training:
            self.number = number
            note(
                f"This run stopped on {number.name} before the first training step, so "
                f"there is nothing to save. To continue, run the same command again."
            )
            os._exit(self.status)
        if self.number is None:
            self.number = number
            self.time = now
            then = ", saves a checkpoint and stops" if self.t.save_every else " and stops"
            note(
                f"This run has received {number.name}. Now the run finishes the current "
                f"step{then}. A second signal ends the run at once."
            )
            if jax.process_count() > 1:
                signal.raise_signal(signal.SIGTERM)
        # Programs such as `timeout` send a signal twice at the same time. Ignore a second
        # signal within one second of the first signal.
        elif now > self.time + 1:
            note(
                "A second signal ended this run at once. The last complete checkpoint of "
                "the run is kept. To continue from this checkpoint, run the same command "
                "again.",
                always=True,
            )
            os._exit(128 + number)

    @property
    def name(self):
        """Return the name of the signal that stops the run, such as "SIGINT".

        If there are several processes, JAX handles SIGTERM, and this class does not
        receive the signal. If this class has received no signal, the name is therefore
        "SIGTERM".
        """
        return self.number.name if self.number else "SIGTERM"

    @property
    def status(self):
        """Return the exit status of a run that was stopped by a signal.

        For SIGTERM, the exit status is 0. For any other signal, the exit status is 128
        plus the number of the signal, as in a shell. For example, Ctrl-C (SIGINT, number
        2) gives 130.
        """
        return 0 if self.name == "SIGTERM" else 128 + self.number


def warn_about_schedule(t, metrics_path, run_dir, start):
    """Print a warning if a resumed run continues after the end of its schedule.

    After the end of a schedule, the learning rate is 0, or at least twice as high as
    before.
    t: the TrainConfig of the run.
    metrics_path: the path of metrics.jsonl, which contains earlier learning rates.
    start: the step at which the run resumes.
    """
    rates = [
        line["train/learning_rate"]
        for line in partition.read_metrics_file(metrics_path)
        if line["step"] > t.schedule_offset + t.warmup_steps
        and "train/learning_rate" in line
    ]
    now = float(learning_rate(start, t))
    if rates and start < t.steps and not 1e-8 < now < 2 * rates[-1]:
        note(
            f"warning: the schedule of this run has ended, so the learning rate changes "
            f"from {rates[-1]:.2g} to {now:.2g}. To train longer with a longer "
            f"schedule, stop this run. Then run `python train.py --run_dir {run_dir} "
            f"--train.steps {start}`, which prints the right command."
        )


def longer_training(cfg, recipe, run_dir, source, step):
    """Return a shell command that doubles the number of steps of a finished run.

    Usually, the command continues the finished run. If the schedule of the learning rate
    ends too early for this, the command starts a new run with a schedule of twice the
    length. In the finished run, the learning rate would stay at 0 or become high again. A
    high learning rate would destroy much of what the model has learned. With the
    factor linear_cooldown, the new run can start from a checkpoint before the cooldown.

    step: the step that the run has reached. The function train explains the other
        arguments.
    """
    t = cfg.train
    steps = 2 * step - t.start_step
    changes = configs.differences(cfg, recipe).items()
    changes = {f"--{name}": value for name, (value, _) in changes}
    flags = {"--run_dir": run_dir, "--train.steps": steps}
    stored = run_dir / "recipe.py"
    if stored.exists():
        # The run may need a function of its recipe file, so execute this file again.
        flags = {"--config": stored} | changes | flags
    warmup_end = t.schedule_offset + t.warmup_steps
    # The dict `longer` contains settings that make the schedule twice as long. The dict
    # stays empty if the schedule does not end before the doubled number of steps.
    longer = {}
    if "cosine_decay" in t.schedule and warmup_end + t.steps_per_cycle < steps:
        longer["--train.steps_per_cycle"] = 2 * t.steps_per_cycle
    # The factor linear_decay reaches 0 at 1 / decay_factor steps after the warmup.
    if "linear_decay" in t.schedule and t.decay_factor * (steps - warmup_end) > 1:
        longer["--train.decay_factor"] = t.decay_factor / 2
    if longer or "linear_cooldown" in t.schedule:
        flags = {"--config": stored if stored.exists() else cfg.name}
        if source:
            flags["--init_from"] = source
        flags |= changes
        flags["--run_dir"] = f"{run_dir}_{steps}"
        flags["--train.steps"] = steps
        flags |= longer
        checkpoints = partition.Checkpoints(run_dir)
        before = [s for s in checkpoints.steps() if s <= t.steps - t.cooldown_steps]
        if before and not longer:
            flags["--init_from"] = checkpoints.path(before[-1])
            flags["--train.restore"] = "all"
    words = [str(word) for flag in flags.items() for word in flag]
    return shlex.join(["python", "train.py", *words])


def model_info(cfg, mesh):
    """Return a text that lists all arrays of the parameters and the optimizer state.

    Each line contains the name, the size, the shape and the sharding of an array. The
    format is the same as in the file model-info.txt of T5X.
    """
    table = model.param_table(cfg.model)
    slots = OPTIMIZERS[cfg.train.optimizer].slots(trained_part(cfg, table))
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

    The bytes are computed from the shapes of arrays, without running the model.
    params: the parameters, as a nested dict of jax.ShapeDtypeStructs with shardings.
    batch: a data.Batch of jax.ShapeDtypeStructs with shardings.
    """
    key = jax.random.key(0) if cfg.model.dropout else None

    def backward(params, batch):
        def loss(params):
            return evaluate.LOSSES[cfg.train.loss](params, batch, cfg, key)[0]

        # The function jax.vjp returns the backward pass as a pytree of arrays, which
        # include the saved activations.
        _, backward_pass = jax.vjp(loss, params)
        return backward_pass

    program = jax.make_jaxpr(backward)(params, batch).jaxpr
    saved = {v for v in program.outvars if isinstance(v, jax.extend.core.Var)}
    # Leave out the parameters and the batch. The backward pass uses these arrays too, but
    # they are not activations.
    saved -= set(program.invars)
    return partition.bytes_on_device([v.aval for v in saved])


def memory_table(cfg, mesh):
    """Estimate the memory in bytes that a training step needs on one device.

    The result is a dict with the keys "parameters", "optimizer", "gradients" and
    "activations". The real memory is larger, because temporary arrays are not counted.
    """
    template = state_template(cfg, mesh)
    batch = batch_template(cfg, mesh, cfg.train.batch_size // cfg.train.microbatches)
    parameters = partition.bytes_on_device(template.params)
    return {
        "parameters": parameters + partition.bytes_on_device(template.ema),
        "optimizer": partition.bytes_on_device(template.slots),
        "gradients": parameters,
        "activations": activation_bytes(cfg, template.params, batch),
    }


def memory_savings(cfg):
    """Return a list of the flags that reduce the memory of a training step.

    Each element of the list is a tuple (flag, bytes, cost). An example is ("--model.remat
    full", 2e9, "a third more arithmetic"). The number of bytes is the memory that one
    device needs with this flag and all earlier flags in the list.
    """
    mesh = jax.sharding.get_mesh()
    least = sum(memory_table(cfg, mesh).values())
    savings = []
    # Try the flags from the cheapest to the most expensive.
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
            # Leave out a flag that is not possible for this run. For example,
            # --mesh.model 2 needs an even number of devices.
            continue
        size = sum(memory_table(changed, changed_mesh).values())
        if size < least:
            savings.append((f"--{name} {str(value).lower()}", size, cost))
            cfg = changed
            least = size
    jax.set_mesh(mesh)
    return savings


def format_table(title, rows):
    """Return a text with a title and one line for each row of a table.

    rows: a list of tuples (name, number, remark), such as ("total", 2.5, "GB").
    """
    lines = [f"  {name:28} {number:>10.4g} {remark}" for name, number, remark in rows]
    return "\n".join([f"{title}:", *lines])


def memory_report(cfg):
    """Return a text that says how much memory a training step needs on each device.

    The text also lists flags that reduce the memory.
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
    """Return a mesh of simulated devices, for which --plan estimates time and memory.

    where: the number of devices, such as "512", or a TPU topology, such as "v5e:2x4".
    """
    jax.config.update("jax_platforms", "cpu")
    # Turn off the compilation cache. If a program came from the cache, the compiler would
    # not write the files that count_collectives reads.
    jax.config.update("jax_enable_compilation_cache", False)
    if where.isdecimal():
        if not 1 <= int(where) <= 2048:
            raise UserError(
                "--plan takes 1 to 2048 devices. To plan for more devices, divide both "
                "the number of devices and --train.batch_size by the same number."
            )
        jax.config.update("jax_num_cpu_devices", int(where))
        return partition.set_mesh(cfg)
    from jax.experimental import topologies

    # The library libtpu contains the TPU compiler. Keep libtpu from searching for a TPU
    # on this machine. By default, libtpu also locks a file, so that only one process uses
    # the TPU. A plan uses no TPU, so turn this lock off. Otherwise, the plan would fail
    # beside a training run or another plan, which holds the lock.
    os.environ.update(
        TPU_SKIP_MDS_QUERY="1",
        TPU_WORKER_HOSTNAMES="localhost",
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",
    )
    chips = {"chip_config_name": "megacore"} if where.startswith("v4") else {}
    try:
        devices = topologies.get_topology_desc(where, "tpu", **chips).devices
    # Catch exceptions of any type. If libtpu is missing or fails, get_topology_desc can
    # raise exceptions of many different types.
    except Exception as error:
        advice = "If this TPU topology does not exist, choose another one."
        if not importlib.util.find_spec("libtpu"):
            advice = "First run pip install '.[tpu]' on Linux."
        raise UserError(
            f"JAX cannot simulate the devices of --plan {where} "
            f"({str(error).splitlines()[0]:.120}). {advice} For N devices of any kind, "
            f"use --plan N."
        ) from error
    return partition.set_mesh(cfg, devices)


def plan(cfg, where):
    """Print how much memory and time a training step needs on other devices.

    The devices do not have to exist on this machine. The printed estimate also contains
    the communication between the devices. The option --plan calls this function.
    where: the number of devices, such as "512", or a TPU topology, such as "v5e:2x4". For
        a TPU topology, the step is compiled by the TPU compiler. The compiler estimates
        the time of the arithmetic. The compiler also decides which communication overlaps
        with arithmetic.
    """
    if cfg.model.dtype == "auto":
        cfg = configs.override(cfg, {"model.dtype": "bfloat16"})
    mesh = plan_mesh(cfg, where)
    print(
        f"plan     estimates for a training step on {mesh.size} devices, "
        f"{describe_mesh(cfg, mesh)}"
    )
    print(memory_report(cfg))
    _, step = lower_step(cfg, mesh)
    name = find_chip(mesh.devices.flat[0])
    if name:
        program = step.compile()
        # Compute the needed memory in GB. The TPU runtime takes about 5 % of the memory,
        # so the program can use only 95 %.
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
        # Compute the needed memory in GB. Temporary arrays, which memory_table does not
        # count, take about 10 % of the memory.
        needed = sum(memory_table(cfg, mesh).values()) / 0.9e9
        computed = step_flops(cfg) / mesh.size
        if cfg.model.remat == "full":
            # The backward pass costs twice as much as the forward pass. With full
            # rematerialization, a step runs the forward pass twice. A step then costs as
            # much as 4 forward passes, instead of 3.
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
        # Assume that all communication overlaps with arithmetic. Communication then adds
        # no time to the arithmetic.
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
            help="start a new run with the weights of this run or checkpoint\n"
            "(--train.restore all also loads the optimizer state and the step)",
        ),
        plan=dict(
            metavar="N",
            help="estimate memory and time of a training step on N devices, and exit\n"
            "(N may also be a TPU topology such as v5e:2x4)",
        ),
    )
    if not args.init_from:
        # In a new run, the vocabulary determines the vocabulary size of the model. With
        # --init_from, the loaded weights determine the vocabulary size.
        changes = data.with_vocab_size(changes)
    cfg, run_dir, recipe, source = configs.resolve_run(args, changes)
    infer.check_decoder(cfg, "loss")
    if args.plan is not None:
        return plan(cfg, args.plan)
    partition.start_jax(cfg)
    partition.check_same_command(cfg, args)
    try:
        return train(cfg, configs.to_path(run_dir), recipe, args.config, source)
    except partition.CheckpointError as error:
        problem = (
            f"Training stopped, because {error}. Solve this problem, for example free "
            f"some space. Then run the same command again to continue from the previous "
            f"checkpoint."
        )
    # JAX raises one of these two exceptions if the communication between processes fails.
    # A JaxRuntimeError is also raised if the memory does not suffice.
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        reason = str(error)
        if isinstance(error, ValueError) and "Gloo" not in reason:
            raise
        if "RESOURCE_EXHAUSTED" in reason:
            problem = (
                f"Out of memory: use more devices, a smaller --train.batch_size, or the "
                f"options at the end of this list.\n{memory_report(cfg)}"
            )
        elif jax.process_count() > 1:
            note(reason.splitlines()[0], always=True)
            partition.report_lost_process()
        else:
            raise
    note(problem, always=True)
    return 1


if __name__ == "__main__":
    configs.run_command(main)
