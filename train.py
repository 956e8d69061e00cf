"""Train a T5 model: learning rate, optimizer, training step and training loop.

A run writes checkpoints, config.json and metrics.jsonl to its folder. To continue a run
that was stopped or killed, run the same command again. On the same CPUs, the result is
that of a run that was never stopped, bit for bit.

    python train.py                      train `tiny` in a minute or two on a CPU
    python train.py --config small_c4 --data.source 'text:corpus/*.txt.gz'
                                         train T5 1.1 small on your text, on all devices

Example: the learning rate of T5 is constant for 10,000 steps, and then 1 / sqrt(step).

    >>> cfg = TrainConfig(learning_rate=1.0, warmup_steps=10_000)
    >>> [round(float(learning_rate(step, cfg)), 4) for step in (0, 10_000, 40_000)]
    [0.01, 0.01, 0.005]
"""

import json
import math
import signal
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Callable, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, P, lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jax.tree_util import DictKey, keystr
from tqdm import tqdm

import configs
import data
import evaluate
import model
import partition
from configs import Config, TrainConfig, UserError

try:
    from tensorboardX import SummaryWriter
except ImportError:  # Without this optional library, there is only metrics.jsonl.
    SummaryWriter = None

# ---- learning rate ---------------------------------------------------------------------


def learning_rate(step: Array | int, train_cfg: TrainConfig) -> Array:
    """Return the learning rate of a training step, counted from 0.

    The schedule is a product of factors, such as "constant * rsqrt_decay". T5X has the
    same factors (create_learning_rate_scheduler in t5x/utils.py).
    """
    step = jnp.maximum(0.0, step - train_cfg.schedule_offset)
    warmup = train_cfg.warmup_steps
    after_warmup = jnp.maximum(step, warmup)
    # By default, the cosine reaches 0 only `warmup` steps after the last.
    per_cycle = train_cfg.steps_per_cycle or train_cfg.steps - train_cfg.schedule_offset
    cycles = jnp.maximum(0.0, (step - warmup) / per_cycle)  # since the warmup
    factors = {
        "constant": train_cfg.learning_rate,
        # rises from 0 to 1 during the warmup
        "linear_warmup": jnp.minimum(1.0, step / warmup),
        # rises from 0 to learning_rate during the warmup, and then falls linearly: use it
        # without "constant"
        "linear_decay": train_cfg.learning_rate
        * jnp.minimum(step / warmup, 1 + train_cfg.decay_factor * (warmup - step)),
        # 1 / sqrt(warmup) during the warmup, and then 1 / sqrt(step)
        "rsqrt_decay": 1 / jnp.sqrt(after_warmup),
        # 1 during the warmup, and then sqrt(warmup / step)
        "rsqrt_normalized_decay": warmup**0.5 / jnp.sqrt(after_warmup),
        # multiplied by decay_factor every steps_per_decay steps
        "decay_every": train_cfg.decay_factor ** (step // train_cfg.steps_per_decay),
        # after the warmup, falls from 1 to 0 along half a cosine wave, and starts again
        "cosine_decay": jnp.maximum(0.0, 0.5 * (1 + jnp.cos(jnp.pi * (cycles % 1.0)))),
    }
    names = train_cfg.schedule.split("*")
    rate = math.prod(factors[name.strip()] for name in names)
    return jnp.maximum(rate, 1e-8)  # as in T5X; linear_decay would become negative


# ---- optimizers ------------------------------------------------------------------------
# Adafactor (Shazeer and Stern 2018) divides the gradient g by the root mean square of
# past gradients, like Adam. For a matrix with at least 128 rows and columns, it does not
# store the mean square v of each element, but only its means over rows and columns:
#
#     beta  = 1 - (t + 1)^-0.8                                  after t steps
#     v_row = beta * v_row + (1 - beta) * mean(g^2 + 1e-30)     over each row
#     v_col = beta * v_col + (1 - beta) * mean(g^2 + 1e-30)     over each column
#     v     = v_row v_col^T / mean(v_row)                       small arrays store v
#     u     = g / sqrt(v)
#     u     = u / max(1, RMS(u))                                clipped to the RMS 1
#     u     = rate * max(1e-3, RMS(w)) * u                      relative to the weights
#     w     = w - u - weight_decay * w
#
# optax.adafactor would take one RMS of all layers, since they are stacked in one array.


def clip_and_scale(path: tuple, u: Array, w: Array) -> Array:
    """Clip an update to the RMS 1, and multiply it by max(1e-3, RMS(w)).

    T5X has an array for each layer. Here, one array holds all layers, and each layer has
    an RMS of its own.
    """
    first_axis = 1 if DictKey("layers") in path else 0  # axis 0 counts the layers
    axes = tuple(range(first_axis, u.ndim))

    def rms(x):
        return jnp.sqrt(jnp.mean(x * x, axis=axes, keepdims=True))

    return jnp.maximum(1e-3, rms(w)) * u / jnp.maximum(1.0, rms(u))


def adafactor(rate: Array, train_cfg: TrainConfig) -> optax.GradientTransformation:
    """Return the Adafactor of T5X, whose weight decay does not depend on the rate."""
    return optax.chain(
        # g / sqrt(v), with v_row and v_col instead of v
        optax.scale_by_factored_rms(
            decay_rate=0.8, epsilon=1e-30, min_dim_size_to_factor=128
        ),
        # for each parameter: clip_and_scale(path, update, weights)
        optax.stateless(partial(jax.tree.map_with_path, clip_and_scale)),
        optax.scale(rate),
        optax.add_decayed_weights(train_cfg.weight_decay),
        optax.scale(-1),
    )


def adamw(rate: Array, train_cfg: TrainConfig) -> optax.GradientTransformation:
    # Unlike that of Adafactor, its weight decay is multiplied by the rate.
    return optax.adamw(rate, weight_decay=train_cfg.weight_decay)


# --train.optimizer chooses one of these. To add any other optimizer of optax, add it here
# and to the names in configs.TrainConfig. The weights of layers have a first axis that
# counts the layers. An optimizer for matrices treats it apart, as in forks/muon.patch.
OPTIMIZERS = {"adafactor": adafactor, "adamw": adamw}


# ---- state and step --------------------------------------------------------------------
# train_step                computes the new weights
#   accumulate_gradients    the gradients of model.loss_fn, over all microbatches
#   learning_rate           the rate of this step
#   OPTIMIZERS              how gradients and rate become an update


class TrainState(NamedTuple):
    """All arrays that training changes, and that a checkpoint contains."""

    step: Array  # the number of steps so far
    params: dict
    opt_state: Any  # such as the averages of Adafactor


def init_state(cfg: Config) -> TrainState:
    """Return the state of a new run, with random parameters."""
    params = model.init_params(cfg.model, jax.random.key(cfg.train.seed))
    # The first state does not depend on the rate. train_step passes the rate of its step.
    opt_state = OPTIMIZERS[cfg.train.optimizer](0.0, cfg.train).init(params)
    return TrainState(jnp.int32(cfg.train.start_step), params, opt_state)


def accumulate_gradients(
    params: dict, batch: data.Batch, cfg: Config, rng: Array | None
) -> tuple[dict, dict]:
    """Return the gradients of the loss, and the sums of model.loss_fn.

    The loss is the sum over the batch, divided by its number of target tokens, or by
    train.loss_normalizing_factor. To save memory, the gradients of microbatches can be
    added up: each of them has the divisor of the complete batch.
    """
    tokens = jnp.sum(model.target_weights(batch))
    divisor = cfg.train.loss_normalizing_factor or jnp.maximum(tokens, 1.0)

    def loss(params, microbatch, rng):
        summed_loss, sums = model.loss_fn(params, microbatch, cfg, rng)
        return summed_loss / divisor, sums

    gradients = jax.grad(loss, has_aux=True)  # returns the gradients and the sums
    n = cfg.train.microbatches
    if n == 1:
        return gradients(params, batch, rng)
    # A device holds neighboring rows. Microbatch i has the rows i, i + n, i + 2 n and so
    # on, so that no row has to move to another device.
    microbatches = jax.tree.map(
        lambda a: a.reshape(-1, n, *a.shape[1:]).swapaxes(0, 1), batch
    )
    rngs = None if rng is None else jax.random.split(rng, n)

    def add(so_far, microbatch_and_rng):
        new = gradients(params, *microbatch_and_rng)
        return jax.tree.map(jnp.add, so_far, new), None

    sums = jax.eval_shape(loss, params, batch, rng)[1]  # only their shapes count
    zeros = jax.tree.map(jnp.zeros_like, (params, sums))
    return lax.scan(add, zeros, (microbatches, rngs))[0]


def train_step(
    cfg: Config, state: TrainState, batch: data.Batch
) -> tuple[TrainState, dict[str, Array]]:
    """Train on one batch, and return the new state and metrics.

    The result depends only on the arguments, so a run that resumes gets the same.
    """
    # The initial weights use the seed itself, so the dropout masks use seed + 1.
    rng = jax.random.fold_in(jax.random.key(cfg.train.seed + 1), state.step)
    grads, sums = accumulate_gradients(state.params, batch, cfg, rng)
    rate = learning_rate(state.step, cfg.train)
    optimizer = OPTIMIZERS[cfg.train.optimizer](rate, cfg.train)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    metrics = {
        **model.mean_metrics(sums),
        "learning_rate": rate,
        "gradient_norm": optax.tree.norm(grads),
        "non_padding_fraction/inputs": jnp.mean(batch.input_segments > 0),
        "non_padding_fraction/targets": jnp.mean(batch.target_segments > 0),
    }
    return TrainState(state.step + 1, params, opt_state), metrics


# ---- the training loop -----------------------------------------------------------------


def train_loop(
    cfg: Config,
    compiled_step: Callable,
    state: TrainState,
    batches: data.Batches,
    log: "Log",
    checkpoints: partition.Checkpoints,
    evaluator: "Evaluator",
) -> int:
    """Train until step train.steps, or until a signal. Returns the last step.

    compiled_step: train_step as a program for the devices.
    """
    train_cfg = cfg.train
    step, steps = int(state.step), train_cfg.steps
    must_stop, timer = catch_signals(), Timer(cfg)
    # With disable=None, there is a progress bar only in a terminal.
    for step in tqdm(range(step + 1, steps + 1), initial=step, total=steps, disable=None):
        batch = timer.next_batch(batches)
        # JAX computes the step in the background. Reading a metric waits for its result.
        state, metrics = compiled_step(state, partition.put_batch(batch))
        stop_now = must_stop(step)
        # A stop also saves, unless save_every is 0.
        save_now = is_due(train_cfg.save_every, step, steps)
        save_now |= stop_now and train_cfg.save_every > 0
        log_now = is_due(train_cfg.log_every, step, steps)
        if log_now or save_now:  # Do not save what a gradient of NaN has changed.
            metrics = jax.device_get(metrics)
            refuse_infinite(metrics, step)
        if log_now:
            timing = timer.metrics()
            log.write(step, "train", metrics)
            log.write(step, "timing", timing)
            tqdm.write(
                f"step {step:,}/{steps:,}  loss {metrics['loss']:.3f}  "
                f"token accuracy {metrics['token_accuracy']:.3f}  "
                f"learning rate {metrics['learning_rate']:.1e}  "
                f"{timing['rows_per_second']:.4g} rows/s  "
                f"{timing['teraflops']:.3g} TFLOP/s"
            )
        if save_now:
            log.sync()
            checkpoints.save(state, step, batches.position)
        if stop_now and step < steps:  # A restart makes the evaluations of this step.
            break
        evaluated = evaluator.run_due(step, state.params)
        if log_now or save_now or evaluated:
            timer.restart()
    log.sync()
    return step


class Timer:
    """Measure the speed of training steps, without evaluations and checkpoints."""

    def __init__(self, cfg: Config):
        self.flops = model.train_flops(cfg)  # of a row
        self.restart()

    def restart(self) -> None:
        self.start, self.rows, self.data_wait = time.perf_counter(), 0, 0.0

    def next_batch(self, batches: data.Batches) -> data.Batch:
        began = time.perf_counter()
        batch = next(batches)
        self.data_wait += time.perf_counter() - began
        self.rows += len(batch.inputs)
        return batch

    def metrics(self) -> dict[str, float]:
        seconds = time.perf_counter() - self.start
        rows_per_second = self.rows / seconds
        return {
            "rows_per_second": rows_per_second,
            "teraflops": rows_per_second * self.flops / 1e12,
            "data_wait_fraction": self.data_wait / seconds,
        }


def refuse_infinite(metrics: dict, step: int) -> None:
    """Stop if the gradient or the rate of a logged or saved step is infinite or NaN."""
    if not math.isfinite(metrics["gradient_norm"] * metrics["learning_rate"]):
        raise UserError(
            f"At step {step:,}, the gradient or the learning rate is infinite or NaN. "
            f"Start another run with a lower --train.learning_rate."
        )


def is_due(every: int, step: int, last_step: int) -> bool:
    """Return whether a step is due: every N-th and the last, or none if N is 0."""
    return every > 0 and (step % every == 0 or step == last_step)


def catch_signals() -> Callable[[int], bool]:
    """Return a function must_stop(step), which is true after SIGTERM or Ctrl-C.

    A second signal of the same kind kills the process. With several processes, only
    SIGTERM counts, and all stop after the same step.
    """
    if jax.process_count() > 1:  # JAX itself handles SIGTERM.
        return multihost_utils.reached_preemption_sync_point
    received = []

    def receive(number, _):
        received.append(number)
        signal.signal(number, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, receive)
    signal.signal(signal.SIGINT, receive)
    return lambda step: bool(received)


# ---- metrics and evaluations -----------------------------------------------------------


class Log:
    """Write metrics to metrics.jsonl and for TensorBoard.

    A run that resumes at `step` repeats the later steps, so their lines are removed. At
    -1, nothing is kept.
    """

    def __init__(self, run_dir: Path, step: int):
        self.run_dir = run_dir
        self.path = run_dir / "metrics.jsonl"
        self.purge_step = step + 1
        self.lines = [x for x in evaluate.read_log(self.path) if x["step"] <= step]
        self.writers = {}
        self.sync()

    def sync(self) -> None:
        """Write all lines to disk. A remote file changes only here: it has no append."""
        if partition.is_main_process():
            text = "".join(f"{json.dumps(line)}\n" for line in self.lines)
            configs.write_file(self.path, text)

    def write(self, step: int, group: str, metrics: dict) -> None:
        """Add a line such as {"step": 100, "train/loss": 2.5} for the group "train"."""
        values = {f"{group}/{name}": float(value) for name, value in metrics.items()}
        self.lines.append({"step": step, **values})
        if configs.is_remote(self.path) or not partition.is_main_process():
            return
        with self.path.open("a") as file:
            file.write(json.dumps(self.lines[-1]) + "\n")
        if SummaryWriter:
            if group not in self.writers:
                folder = str(self.run_dir / "tensorboard" / group)
                self.writers[group] = SummaryWriter(folder, purge_step=self.purge_step)
            for name, value in metrics.items():
                self.writers[group].add_scalar(name, float(value), step)
            self.writers[group].flush()

    def has(self, step: int, group: str) -> bool:
        lines = [line for line in self.lines if line["step"] == step]
        return any(name.rpartition("/")[0] == group for line in lines for name in line)


class Evaluator:
    """Evaluate the model during training, on held-out examples of each task."""

    def __init__(self, cfg: Config, tokenizer: data.Tokenizer, log: Log):
        self.cfg, self.tokenizer, self.log = cfg, tokenizer, log
        train_cfg = cfg.train
        # how many examples of a task are evaluated; None means all
        self.limit = train_cfg.eval_batches * train_cfg.batch_size or None
        self.groups = {}  # {group of metrics: (steps between evaluations, function)}
        if not (train_cfg.eval_every or train_cfg.predict_every):
            return
        for name in data.eval_tasks(cfg):
            task = data.find_task(name, cfg)
            batches = data.batches_of_split(
                name, "validation", cfg, tokenizer, self.limit
            )
            partition.check_same([zlib.crc32(a) for batch in batches for a in batch])
            if not batches:
                print(f"{name} is not evaluated: it has no held-out examples")
                continue
            if train_cfg.eval_every:
                function = partial(self.measure_loss, batches)
                self.groups[f"loss_eval/{name}"] = train_cfg.eval_every, function
            if train_cfg.predict_every and task.metrics:
                # A metric that fails must not stop the run hours later.
                evaluate.check_metrics(name, "validation", cfg, tokenizer)
                function = partial(self.measure_predictions, name)
                self.groups[f"predict_eval/{name}"] = train_cfg.predict_every, function
            if task.objective:
                baseline = evaluate.unigram_loss(batches, tokenizer)
                print(
                    f"unigram  {baseline:.3f} nats per content token of held-out {name}, "
                    f"for a model that knows only how often each token occurs"
                )

    def run_due(self, step: int, params: dict) -> bool:
        """Make the evaluations that are due and not logged. Return whether any were."""
        train_cfg = self.cfg.train
        evaluated = False
        for group, (every, function) in self.groups.items():
            if is_due(every, step, train_cfg.steps) and not self.log.has(step, group):
                metrics = function(step, params)
                self.log.write(step, group, metrics)
                values = ", ".join(f"{k} {v:.3f}" for k, v in metrics.items())
                tqdm.write(f"step {step:,}: {group}: {values}")
                evaluated = True
        return evaluated

    def measure_loss(self, batches: list, step: int, params: dict) -> dict[str, float]:
        """Compute the losses of held-out batches, and show one example."""
        cfg, tokenizer = self.cfg, self.tokenizer
        tqdm.write(evaluate.held_out_example(params, cfg, batches[0], tokenizer))
        return evaluate.evaluate_loss(params, cfg, batches, tokenizer)

    def measure_predictions(self, name: str, step: int, params: dict) -> dict[str, float]:
        """Compute metrics of generated outputs, and write the outputs to RUN_DIR/eval."""
        metrics, lines = evaluate.predict(
            params, self.cfg, name, "validation", self.tokenizer, self.limit
        )
        if partition.is_main_process():
            evaluate.write_lines(self.log.run_dir / "eval", name, step, lines)
        return metrics


# ---- the start of a run ----------------------------------------------------------------


def abstract_state(cfg: Config) -> TrainState:
    """Return the shapes and shardings of a TrainState, without creating arrays.

    An array of the optimizer whose name ends with that of a parameter, and which has its
    shape, is split like it. All others, such as Adafactor's v_row and v_col, are small:
    every device has a copy.
    """
    params = partition.flatten(model.param_table(cfg.model))

    def with_sharding(path, a):
        name = keystr(path, simple=True, separator="/")
        axes = ()
        for param, p in params.items():
            if name.endswith(f"/{param}") and a.shape == p.shape:
                axes = p.axes
        sharding = partition.spec(axes, cfg.mesh.fsdp)  # on the current mesh
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)

    shapes = jax.jit(init_state, static_argnums=0).eval_shape(cfg)
    return jax.tree.map_with_path(with_sharding, shapes)


def lower_step(cfg: Config, mesh: Mesh) -> tuple[TrainState, jax.stages.Lowered]:
    """Return the abstract state, and the training step, lowered for the compiler."""
    rows = cfg.train.batch_size
    microbatches, devices = cfg.train.microbatches, mesh.shape["data"]
    if rows % (microbatches * devices):
        raise UserError(
            f"--train.batch_size {rows} cannot be split into {microbatches} microbatches "
            f"with equal parts for {devices} devices (or groups of --mesh.model devices)."
        )

    def ids(length):
        return jax.ShapeDtypeStruct((rows, length), jnp.int32, sharding=P("data"))

    inputs, targets = ids(cfg.data.inputs_length), ids(cfg.data.targets_length)
    batch = data.Batch(inputs, inputs, targets, targets, targets)  # only the shapes count
    state = abstract_state(cfg)
    compiler_options = {}
    if configs.HAS_EXTRAS and partition.platform() == "tpu":
        from extras import tpu_options

        compiler_options = tpu_options.compiler_options()
    jitted_step = jax.jit(
        train_step,
        static_argnums=0,
        donate_argnums=1,  # The new state overwrites the memory of the old state.
        out_shardings=(jax.tree.map(lambda a: a.sharding, state), None),
        compiler_options=compiler_options,
    )
    return state, jitted_step.lower(cfg, state, batch)


def load_state(
    cfg: Config, abstract: TrainState, checkpoint: Path | None, resumes: bool = True
) -> TrainState:
    """Load a complete state, or for a new run only its params, or initialize it."""
    if checkpoint and (resumes or cfg.train.restore == "all"):
        return partition.load_arrays(checkpoint, abstract)
    shardings = jax.tree.map(lambda a: a.sharding, abstract)
    state = jax.jit(init_state, static_argnums=0, out_shardings=shardings)(cfg)
    if checkpoint:
        loaded = partition.load_arrays(checkpoint, {"params": abstract.params})
        state = state._replace(**loaded)
    return state


def find_start(
    cfg: Config, run_dir: Path, init_from: str
) -> tuple[Path | None, bool, int]:
    """Return (checkpoint, resumes, step): where a run begins.

    A run resumes from its newest checkpoint. A new run has random weights, or takes the
    weights of `init_from`, and with --train.restore all also its step and optimizer.
    """
    checkpoint = partition.newest_checkpoint(run_dir)
    if checkpoint:
        return checkpoint, True, step_of(checkpoint)
    step, steps = cfg.train.start_step, cfg.train.steps
    if init_from:
        checkpoint = partition.newest_checkpoint(init_from)
        if not checkpoint:
            raise UserError(f"{init_from} is not a checkpoint, nor a run that has one.")
        if cfg.train.restore == "all":
            step = step_of(checkpoint)
    if step >= steps:
        raise UserError(
            f"A new run at step {step} needs --train.steps above {step}, not {steps}, "
            f"or an earlier start: see --train.start_step and restore."
        )
    if step and not checkpoint:
        raise UserError("--train.start_step needs the weights of --init_from RUN.")
    return checkpoint, False, step


def step_of(checkpoint: Path) -> int:
    """Return 1000 for a folder step_00001000."""
    return int(checkpoint.name.removeprefix("step_"))


def print_setup(cfg: Config, mesh: Mesh) -> None:
    model_cfg = model.resolve_auto(cfg.model)
    print(f"model    {model.describe_model(cfg)}")
    print(
        f"devices  {mesh.size} x {mesh.devices.flat[0].device_kind}, {dict(mesh.shape)}"
    )
    print(
        f"compute  {model_cfg.dtype}, attention_impl {model_cfg.attention_impl}, "
        f"loss_impl {model_cfg.loss_impl}"
    )


def train(cfg: Config, run_dir: Path, recipe: str = "", init_from: str = "") -> None:
    """Start a run, or resume it from its newest checkpoint, and train to its end.

    recipe: the value of --config, of which the run keeps a copy if it is a file.
    init_from: the run or the checkpoint with whose weights a new run starts, or "".
    """
    checkpoint, resumes, step = find_start(cfg, run_dir, init_from)
    mesh = partition.set_mesh(cfg)
    print_setup(cfg, mesh)
    abstract, lowered = lower_step(cfg, mesh)  # prints a note if no kernel fits
    print(f"start    step {step:,}, {checkpoint or 'random weights'}")
    tokenizer = data.load_tokenizer(cfg, run_dir if resumes else init_from)
    position = partition.read_headers(checkpoint)[1] if resumes else None
    batches = data.Batches(cfg, tokenizer, position)
    partition.check_same((tokenizer.sha256, batches.position["files_crc32"]))
    if partition.is_main_process():
        tokenizer.save(run_dir)
        configs.save_run(cfg, run_dir, vocabulary=tokenizer.sha256, init_from=init_from)
        configs.write_file(run_dir / "model-info.txt", model.list_params(cfg))
        if recipe.endswith(".py"):
            configs.write_file(
                run_dir / "recipe.py", configs.to_path(recipe).read_bytes()
            )
    log = Log(run_dir, step if resumes else -1)
    evaluator = Evaluator(cfg, tokenizer, log)
    with ThreadPoolExecutor(1) as thread:  # Compile while the state is loaded.
        compiling = thread.submit(lowered.compile)
        state = load_state(cfg, abstract, checkpoint, resumes)
        compiled_step = compiling.result()
    checkpoints = partition.Checkpoints(run_dir, cfg.train.keep)
    if resumes:  # A kill may have prevented the evaluations of this checkpoint.
        evaluator.run_due(step, state.params)
    step = train_loop(cfg, compiled_step, state, batches, log, checkpoints, evaluator)
    ending = "done" if step >= cfg.train.steps else "stopped"
    print(f"{ending} at step {step:,}: {run_dir}")


# ---- the command -----------------------------------------------------------------------


@dataclass(frozen=True)
class Options(configs.Options):
    init_from: str = ""  # the run or checkpoint with whose weights a new run starts


def parse(argv: list[str] | None = None) -> Options:
    """Parse the flags. A folder that has a checkpoint is a run, which is resumed."""
    flags = configs.location_flags(argv)
    run_dir = flags.run_dir or f"runs/{Path(flags.config or 'tiny').stem}"
    if partition.Checkpoints(run_dir).steps():
        return parse_resumed(run_dir, flags.config, argv)
    folder = configs.to_path(run_dir)
    if (folder / "complete").exists():
        raise UserError(f"{run_dir} is a checkpoint: name its run, or --init_from.")
    if flags.run_dir and not flags.config:
        raise UserError(f"{run_dir} has no checkpoint: a new run needs --config.")
    if (folder / "eval/metrics.jsonl").exists():
        raise UserError(f"{run_dir}/eval is of an earlier run: name another --run_dir.")
    if (folder / "config.json").exists():
        configs.load_run(run_dir)  # refuses a folder of Hugging Face
    return parse_new(run_dir, flags.config or "tiny", flags.init_from, argv)


def parse_new(run_dir: str, recipe: str, init_from: str, argv) -> Options:
    """Change the settings of a recipe by flags.

    With init_from, the network and the vocabulary are those of that run, and flags must
    not change them.
    """
    cfg = configs.load_recipe(recipe)
    if not init_from:
        return configs.parse_flags(Options(cfg, run_dir=run_dir), argv)
    origin, _ = configs.load_run(init_from)
    cfg = configs.with_network_of(cfg, origin)
    options = configs.parse_flags(Options(cfg, run_dir=run_dir), argv)
    wanted = configs.with_network_of(options.cfg, origin)
    configs.refuse_differences(options.cfg, wanted, [], init_from)
    return options


def parse_resumed(run_dir: str, recipe: str, argv) -> Options:
    """Change the settings of a recipe, or else those of the run, by flags.

    Only the settings in configs.CHANGEABLE may then differ from those of the run.
    """
    stored, metadata = configs.load_run_and_tasks(run_dir, recipe)
    init_from = metadata["init_from"]
    cfg = configs.load_recipe(recipe) if recipe else stored
    if init_from:  # This run began with the network of another run, not of its recipe.
        cfg = configs.with_network_of(cfg, stored)
    options = Options(cfg, run_dir=run_dir, init_from=init_from)
    options = configs.parse_flags(options, argv)
    if configs.to_path(options.init_from) != configs.to_path(init_from):
        raise UserError(
            f"{run_dir} began with {init_from or 'random weights'}: leave out "
            f"--init_from, or name another --run_dir."
        )
    configs.refuse_differences(options.cfg, stored, configs.CHANGEABLE, run_dir)
    return options


def main() -> None:
    options = parse()
    run_dir = configs.to_path(options.run_dir)
    partition.start_jax(options)
    with partition.lock(run_dir):
        train(options.cfg, run_dir, options.config, options.init_from)


if __name__ == "__main__":
    main()
