"""Test plain T5: the lessons, among a few helpers, and then all else, file by file.

A lesson is a short test that explains one idea, and checks it by a slow version, another
way, or by hand. The other tests compare plain T5 with recorded results of T5X and t5 and
with Hugging Face models, check properties, run whole jobs, and kill them.

    pytest -k lesson          the lessons: read them beside the code
    pytest                    all tests but the slow ones
    pytest -m slow            longer runs, and processes that are killed
"""

import ast
import contextlib
import fnmatch
import functools
import gzip
import io
import itertools
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import types
import zipfile
import zlib
from dataclasses import replace
from pathlib import Path

import flax
import fsspec
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy
import sentencepiece
from fsspec.implementations.memory import MemoryFileSystem
from numpy.testing import assert_allclose, assert_array_equal
from sentencepiece import sentencepiece_model_pb2

import configs
import convert
import data
import evaluate
import infer
import model
import partition
import train
from configs import Config, DataConfig, DecodeConfig, ModelConfig, TrainConfig, UserError
from extras import t5_tasks, toys  # noqa: F401 (they add to TASKS and MIXTURES)

HERE = Path(configs.__file__).parent
slow = pytest.mark.slow

jax.config.update("jax_num_cpu_devices", 8)
# The programs of the tests are small: compile them fast, here and in child processes.
jax.config.update("jax_disable_most_optimizations", True)
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "true"
if jax.__version_info__ < (0, 11):  # XLA stops at a flag that it does not know.
    os.environ["XLA_FLAGS"] = "--xla_cpu_use_fusion_emitters=false"

# All sizes differ, so that a test fails if two axes are swapped.
SMALL = Config(
    ModelConfig(
        vocab_size=256, d_model=40, d_ff=48, d_kv=6,
        num_heads=4, num_layers=2, num_decoder_layers=3, dtype="float32",
    ),
    DataConfig(task="random", vocab="numbers", inputs_length=36, targets_length=9),
    TrainConfig(batch_size=8),
)  # fmt: skip
# Input and target tokens in the eight rows of a batch.
UNEVEN = [(36, 9), (12, 5), (7, 1), (36, 9), (20, 3), (3, 2), (36, 7), (25, 9)]

forward = jax.jit(model.forward, static_argnums=2)
gradients = jax.jit(train.accumulate_gradients, static_argnums=2)
train_step = jax.jit(train.train_step, static_argnums=0)


@pytest.fixture(autouse=True)
def one_device():
    """Every test begins on a mesh of one device."""
    return partition.set_mesh(SMALL, jax.devices()[:1])


def change(cfg=SMALL, **changes):
    """Return a changed Config: change(model=dict(tied=True))."""
    sections = {k: replace(getattr(cfg, k), **values) for k, values in changes.items()}
    return replace(cfg, **sections)


def make_params(cfg, seed=0):
    """Return random parameters of which none is special: norms differ from 1."""
    params = model.init_params(cfg.model, jax.random.key(seed))
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda w: w + np.float32(0.1 * rng.normal(size=w.shape)), params)


def pad_batch(inputs, targets, *limits):
    """Return a Batch with one example in each row."""
    return data.fill_rows([[pair] for pair in zip(inputs, targets)], limits)


def make_batch(cfg=SMALL, lengths=UNEVEN, seed=0):
    """Return a Batch of random tokens with one example in each row."""
    rng, V = np.random.default_rng(seed), cfg.model.vocab_size
    sides = [[rng.integers(3, V, size) for size in sizes] for sizes in zip(*lengths)]
    batch = pad_batch(*sides, cfg.data.inputs_length, cfg.data.targets_length)
    return jax.tree.map(jnp.asarray, batch)


def assert_close(a, b, tolerance=1e-5):
    """Compare two trees, relative to the largest value of each leaf of the second one."""
    leaves = zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True)
    for (path, x), y in leaves:
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        limit = tolerance * max(np.abs(y).max(initial=0), 1e-30)
        assert_allclose(x, y, 0, limit, err_msg=jax.tree_util.keystr(path))


def assert_equal(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert_array_equal(np.asarray(x), np.asarray(y))


# ---- lessons: model, data, train, infer, partition, evaluate, convert ------------------


def make_packed(cfg=SMALL, seed=0):
    """Return a Batch of four rows, each with two examples and padding."""
    rng = np.random.default_rng(seed)
    sides = []
    for length in (cfg.data.inputs_length, cfg.data.targets_length):
        ends = np.sort(rng.integers(1, length, (4, 2)))
        at = np.arange(length)
        segments = (at < ends[:, 1:]) * (1 + (at >= ends[:, :1]))
        ids = rng.integers(3, cfg.model.vocab_size, segments.shape) * (segments > 0)
        sides += [np.int32(ids), np.int32(segments)]
    inputs, input_segments, targets, segments = sides
    shifted = data.shift_right(targets, segments)
    return data.Batch(inputs, input_segments, shifted, targets, segments)


def test_lesson_model_rms_norm_divides_by_the_root_mean_square():
    """The root mean square of [3, 4] is sqrt(12.5). A longer vector gives the same."""
    x, scale = jnp.array([[3.0, 4.0], [300.0, 400.0]]), jnp.array([1.0, 10.0])
    expected = [3 / 12.5**0.5, 10 * 4 / 12.5**0.5]
    assert_allclose(model.rms_norm(x, scale), [expected, expected], rtol=1e-6)
    # A millionth is added to the mean square, so that zeros stay zeros.
    x = jnp.array([[0.0, 0.0], [1e-3, -1e-3]])
    expected = [[0, 0], [0.5**0.5, -(0.5**0.5)]]
    assert_allclose(model.rms_norm(x, jnp.ones(2)), expected, rtol=1e-6)


def test_lesson_model_near_positions_have_buckets_of_their_own():
    """Half of the buckets hold one distance each, and wider ones share the others.

    A row is a query, and a column is a key. Of 8 buckets, the encoder uses 5 to 7 for later
    keys, which the decoder masks.
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
    assert_array_equal(model.relative_bucket(distance, True, cfg), encoder)
    assert_array_equal(model.relative_bucket(distance, False, cfg), decoder)


def make_attention(seed=0, queries=5, keys=7):
    """Return random q, k, v, table of biases and mask, where the last query sees no key."""
    rng = np.random.default_rng(seed)
    shapes = (3, 4, queries, 6), (3, 4, keys, 6), (3, 4, keys, 6), (4, 32)
    q, k, v, table = (np.float32(rng.standard_normal(shape)) for shape in shapes)
    mask = rng.random((3, 1, queries, keys)) < 0.7
    mask[:, :, -1] = False
    return q, k, v, table, mask


@pytest.mark.parametrize("bidirectional", [True, False])
def test_lesson_model_attention_is_a_weighted_mean_of_the_values(bidirectional):
    """It is softmax(q k^T + bias) v, without a division by sqrt(d_kv)."""
    q, k, v, table, mask = make_attention()
    distance = np.arange(7) - np.arange(5)[:, None]
    bias = table[:, model.relative_bucket(distance, bidirectional, SMALL.model)]
    by_matmul = model.position_bias(table, 5, 7, bidirectional, SMALL.model)
    assert_allclose(by_matmul, bias, rtol=1e-6)
    found = model.dot_product_attention(q, k, v, mask, bias)
    for b, h in np.ndindex(3, 4):
        weights = np.exp(q[b, h] @ k[b, h].T + bias[h]) * mask[b, 0]
        weights[-1] = 1  # A query that sees no key is padding. It gets the mean.
        expected = weights / weights.sum(axis=1, keepdims=True) @ v[b, h]
        assert_allclose(found[b, h], expected, rtol=1e-4, atol=1e-6)


def test_lesson_model_the_decoder_is_causal():
    """The logits of a position do not depend on the ids of later positions."""
    params, batch = make_params(SMALL), make_batch(SMALL, [(5, 9)])
    logits = forward(params, batch, SMALL.model)[0]
    for t in range(9):
        targets = np.asarray(batch.targets).copy()
        targets[0, t] = 2
        shifted = data.shift_right(targets, np.asarray(batch.target_segments))
        changed = batch._replace(targets=targets, decoder_inputs=shifted)
        difference = np.abs(forward(params, changed, SMALL.model)[0] - logits).max(axis=1)
        # Another target t changes the logits after position t only.
        assert_array_equal(difference > 1e-5, np.arange(9) > t)


def test_lesson_model_a_packed_row_equals_separate_rows():
    """The masks of attention keep the examples of a row apart."""
    params, packed = make_params(SMALL), make_packed()
    together = forward(params, packed, SMALL.model)
    inputs, targets = [], []
    for row, segment in itertools.product(range(4), (1, 2)):
        inputs.append(packed.inputs[row][packed.input_segments[row] == segment])
        targets.append(packed.targets[row][packed.target_segments[row] == segment])
    limits = packed.inputs.shape[1], packed.targets.shape[1]
    alone = forward(params, pad_batch(inputs, targets, *limits), SMALL.model)
    for i, (row, segment) in enumerate(itertools.product(range(4), (1, 2))):
        found = together[row][packed.target_segments[row] == segment]
        assert_allclose(found, alone[i, : len(found)], atol=1e-4)


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_lesson_model_stacked_layers_equal_a_loop(remat):
    """Layer i uses element i of each stacked weight. Recomputing changes no gradient."""
    cfg = change(model=dict(remat=remat)).model
    params = make_params(SMALL)
    start = jax.random.normal(jax.random.key(0), (2, 5, cfg.d_model))

    def layer(w, x, key):
        return x + model.mlp(w["mlp"], model.rms_norm(x, w["mlp"]["norm"]), cfg)

    def loop(params, x):
        for i in range(cfg.num_layers):
            w = jax.tree.map(lambda stacked: stacked[i], params["encoder"]["layers"])
            x = layer(w, x, None)
        return jnp.sum(x**2)

    def stacked(params, x):
        return jnp.sum(model.apply_layers(layer, x, "encoder", params, cfg, None) ** 2)

    gradients_of = [jax.jit(jax.value_and_grad(f)) for f in (stacked, loop)]
    found, expected = (f(params, start) for f in gradients_of)
    assert_close(found, expected)


def test_lesson_model_the_loss_of_two_tokens_by_hand():
    """The first logits are log 1, log 2 and log 5: Z is 8, and target 2 has 5/8 of it.

    The third token is padding.
    """
    logits = jnp.log(jnp.array([[[1.0, 2.0, 5.0], [2.0, 1.0, 1.0], [9.0, 1.0, 1.0]]]))
    losses = model.token_metrics(logits, np.array([[2, 1, 0]]), z_loss=0.1)
    weight, log = np.array([[1.0, 1.0, 0.0]]), math.log
    sums = {name: jnp.sum(x * weight) for name, x in losses.items()}
    found = model.mean_metrics({**sums, "tokens": weight.sum()})
    expected = {"cross_ent_loss": (log(8 / 5) + log(4 / 1)) / 2, "token_accuracy": 1 / 2}
    expected["z_loss"] = 0.1 * (log(8) ** 2 + log(4) ** 2) / 2
    expected["loss"] = expected["cross_ent_loss"] + expected["z_loss"]
    assert found == pytest.approx(expected, rel=1e-6)
    assert model.mean_metrics(dict(loss=3, tokens=1)) == {"loss": 3}


# The ids of this Config are bytes, so that tests need no vocabulary.
BYTES = change(
    model=dict(vocab_size=384),
    data=dict(task="text_to_text", vocab="bytes", inputs_length=48, targets_length=16),
)
TOKENIZER = data.load_tokenizer(BYTES)


def test_lesson_data_span_corruption_of_a_sentence():
    """This is the example of README. The ids are numbers of words, and of sentinels."""
    words = "Thank you for inviting me to your party last week".split()
    cfg = DataConfig(noise_density=0.4, mean_span_length=2.0)
    names = {101: "<extra_id_0>", 100: "<extra_id_1>", **dict(enumerate(words))}
    sides = data.corrupt_spans(np.arange(10)[None], 101, cfg, 0)
    inputs, targets = (" ".join(names[i] for i in side[0].tolist()) for side in sides)
    assert inputs == "Thank you <extra_id_0> me to your party <extra_id_1>"
    assert targets == "<extra_id_0> for inviting <extra_id_1> last week"


def corrupt_slowly(tokens, bits, sentinel, cfg):
    """Apply span corruption to one text, with lists. bits: those of kept and of removed."""
    noise, spans = data.noise_counts(len(tokens), cfg)

    def split(total, bits):
        """Cut a line of tokens into spans, where the random numbers are lowest."""
        gaps = sorted(range(1, total), key=lambda gap: bits[gap - 1])
        cuts = [0, *sorted(gaps[: spans - 1]), total]
        return [stop - start for start, stop in itertools.pairwise(cuts)]

    inputs, targets = [], []
    lengths = zip(split(len(tokens) - noise, bits[0]), split(noise, bits[1]))
    for number, (kept, removed) in enumerate(lengths):
        inputs += [*tokens[:kept], sentinel - number]
        targets += [sentinel - number, *tokens[kept : kept + removed]]
        tokens = tokens[kept + removed :]
    return inputs, targets


@pytest.mark.parametrize(
    "length, density, mean",
    [(568, 0.15, 3), (34, 0.15, 3), (2, 0.15, 3), (7, 0.15, 3), (300, 0.5, 1.5)],
)
def test_lesson_data_span_corruption_moves_random_spans(length, density, mean):
    """A sentinel replaces each span in the inputs, and begins it in the targets."""
    cfg = DataConfig(noise_density=density, mean_span_length=mean)
    tokens = np.random.default_rng(0).integers(3, 32000, (20, length))
    noise, _ = data.noise_counts(length, cfg)
    bits = [
        data.random_bits(20 * (total - 1), 5, length, side).reshape(20, -1).tolist()
        for side, total in enumerate((length - noise, noise))
    ]
    fast = data.corrupt_spans(tokens, 32099, cfg, 5)
    slow = [
        corrupt_slowly(row, sides, 32099, cfg)
        for row, sides in zip(tokens.tolist(), zip(*bits))
    ]
    assert_equal(fast, [np.array(side) for side in zip(*slow)])


def test_lesson_data_packed_examples_have_segments():
    """Segments keep the examples of a row apart, and decoder inputs begin with PAD."""
    pairs = [([5, 9, 1], [7, 1]), ([4, 1], [8, 6, 1])]
    pairs = [tuple(map(np.array, pair)) for pair in pairs]
    batch = data.fill_rows([pairs, []], (6, 6))
    assert batch.inputs.tolist() == [[5, 9, 1, 4, 1, 0], [0] * 6]
    assert batch.input_segments.tolist() == [[1, 1, 1, 2, 2, 0], [0] * 6]
    assert batch.targets[0].tolist() == [7, 1, 8, 6, 1, 0]
    assert batch.target_segments[0].tolist() == [1, 1, 2, 2, 2, 0]
    assert batch.decoder_inputs[0].tolist() == [0, 7, 0, 8, 6, 0]
    assert {array.dtype for array in batch} == {np.dtype(np.int32)}


def test_lesson_data_the_longest_examples_are_packed_first():
    """Each goes to the row whose inputs and targets are then most equally full."""
    sizes = np.array([[6, 2], [5, 2], [4, 1]])  # of inputs and targets
    assert data.pack(sizes, limits=(10, 4)).tolist() == [0, 1, 1]


def pack_slowly(sizes, limits):
    """Look at every open row for each example."""
    shares = [inputs / limits[0] + targets / limits[1] for inputs, targets in sizes]
    totals = [sum(side) for side in zip(*sizes)]
    free = [limits] * max(math.ceil(n / limit) for n, limit in zip(totals, limits))
    row_of = [None] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -shares[i]):
        best, smallest = None, math.inf
        for row, (inputs, targets) in enumerate(free):
            left = inputs - sizes[i][0], targets - sizes[i][1]
            difference = round(abs(left[0] / limits[0] - left[1] / limits[1]), 9)
            if min(left) >= 0 and difference < smallest:
                best, smallest = row, difference
        if best is None:
            best = len(free)
            free.append(limits)
        free[best] = free[best][0] - sizes[i][0], free[best][1] - sizes[i][1]
        row_of[i] = best
    return row_of


@pytest.mark.parametrize("limits", [(32, 16), (64, 64), (8, 128)])
@pytest.mark.parametrize("share", [1, 2, 4])
def test_lesson_data_packing_equals_a_slow_version(limits, share):
    """The slow version tries each example in each row."""
    rng = np.random.default_rng(limits[0])
    for n in (1, 2, 25, 120):
        sizes = [rng.integers(0, limit // share + 1, n) for limit in limits]
        sizes = np.stack(sizes, axis=1)
        assert data.pack(sizes, limits).tolist() == pack_slowly(sizes.tolist(), limits)


def texts_in(batch):
    """Return the decoded inputs of all examples of a batch, in order."""
    return [
        TOKENIZER.decode(ids[segments == k])
        for ids, segments in zip(batch.inputs, batch.input_segments)
        for k in range(1, segments.max() + 1)
    ]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"jsonl:{path}"


def write_pairs(path, count, first=0):
    """Write pairs of which no two have equal inputs."""
    rng = np.random.default_rng(first)
    texts = [f"{first + i}" + "x" * rng.integers(1, 20) for i in range(count)]
    rows = [{"inputs": x, "targets": "y" * (i % 9)} for i, x in enumerate(texts)]
    return write_jsonl(path, rows)


@contextlib.contextmanager
def own_tables():
    """Forget the tasks, mixtures and vocabulary that are added within."""
    tables = configs.TASKS, configs.MIXTURES
    before = [dict(table) for table in tables]
    try:
        yield
    finally:
        configs.VOCABULARY = None
        for table, entries in zip(tables, before):
            table.clear()
            table.update(entries)


@pytest.fixture
def tables():
    with own_tables():
        yield


@pytest.fixture
def mixture(tmp_path, tables):
    """Three tasks of 200, 57 and 9 pairs. The smallest is repeated most often."""
    for number, (name, count) in enumerate({"a": 200, "b": 57, "c": 9}.items()):
        write_pairs(tmp_path / f"{name}.train", count, 1000 * number)
        configs.TASKS[name] = data.Task(f"jsonl:{tmp_path}/{name}.{{split}}")
    configs.MIXTURES["abc"] = {"a": 4, "b": 2, "c": 1}
    return change(BYTES, data=dict(task="abc"))


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("window", [1 << 15, 1 << 9])
@pytest.mark.parametrize("task", ["a", "abc"])
def test_lesson_data_each_example_is_used_once_in_each_epoch(
    task, window, pack, mixture, monkeypatch
):
    """No example is used a second time before all others of its task, packed or not."""
    monkeypatch.setattr(data, "WINDOW_CHARACTERS", window)
    cfg = change(mixture, data=dict(task=task, pack=pack))
    used = ([], [], [])
    for batch in itertools.islice(data.Batches(cfg, TOKENIZER), 50 if pack else 150):
        for example in texts_in(batch):
            used[int(re.match(r"\d+", example)[0]) // 1000].append(example)
    for examples, count in zip(used, (200, 57, 9) if task == "abc" else (200,)):
        assert len(examples) > 3 * count
        epochs = [examples[n * count : (n + 1) * count] for n in range(3)]
        assert all(len(set(epoch)) == count for epoch in epochs)
        assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("task", ["a", "abc", "span_corruption", "prefix_lm", "by_rule"])
def test_lesson_data_a_restart_continues_with_the_same_batches(
    task, pack, mixture, tmp_path, monkeypatch
):
    """The position in the data is a few integers for each task, which a checkpoint holds."""
    for name, value in dict(WINDOW_CHARACTERS=1 << 11, ROWS_PER_PACK=20).items():
        monkeypatch.setattr(data, name, value)  # many small windows, and few rows packed
    for name in "xyz":
        text = "".join(f"{name} {n * n}\n" for n in range(99))
        (tmp_path / f"{name}.txt").write_text(text)
    own = task in ("span_corruption", "prefix_lm")
    source = f"text:{tmp_path}/*.txt" if own else ""
    cfg = change(mixture, data=dict(task=task, pack=pack, source=source))
    batches, positions, expected = data.Batches(cfg, TOKENIZER), [], []
    for _ in range(50):
        positions.append(json.loads(json.dumps(batches.position)))
        expected.append(next(batches))
    for step in (0, 1, 2, 5, 9, 14, 20, 29, 36, 44):
        again = data.Batches(cfg, TOKENIZER, positions[step])
        for k in range(step, step + 4):
            assert_equal(next(again), expected[k])
            assert json.loads(json.dumps(again.position)) == positions[k + 1]


def test_lesson_train_the_learning_rate_of_t5_by_hand():
    """The learning rate of T5 is 1 / sqrt(max(step, 10,000)).

    It is constant during the first 10,000 steps. After that, it halves when the number of
    steps becomes four times as large. Late in training, small steps average out the noise
    of batches.
    """
    for step, rate in {0: 0.01, 10_000: 0.01, 40_000: 0.005, 1_000_000: 0.001}.items():
        assert train.learning_rate(step, TrainConfig()) == pytest.approx(rate)


def test_lesson_train_two_updates_of_adafactor_by_hand():
    """Adafactor divides a gradient by the root of V, the average of squared gradients.

    Row means R and column means C approximate V by R C / mean(R). A matrix of 130 x 140
    then needs 270 numbers instead of 18,200. The update is clipped to a root mean square
    of 1. The size of a step is relative to the root mean square of the weights.
    """
    rng, shape = np.random.default_rng(0), (130, 140)
    w, R, C = rng.standard_normal(shape), np.zeros(130), np.zeros(140)
    optimizer = train.adafactor(0.01, TrainConfig())
    ours = {"w": jnp.float32(w)}
    slots = optimizer.init(ours)
    for t in range(2):
        g = rng.standard_normal(shape) * rng.random((130, 1))
        beta = 1 - (t + 1) ** -0.8  # beta is 0 in the first update
        R = beta * R + (1 - beta) * (g**2).mean(axis=1)
        C = beta * C + (1 - beta) * (g**2).mean(axis=0)
        u = g / np.sqrt(np.outer(R, C) / R.mean())
        u = u / max(1, np.sqrt((u**2).mean()))
        w = w - 0.01 * max(1e-3, np.sqrt((w**2).mean())) * u
        updates, slots = optimizer.update({"w": jnp.float32(g)}, slots, ours)
        ours = optax.apply_updates(ours, updates)
        assert_close(ours["w"], w, 1e-6)
    stored = {x.shape for x in jax.tree.leaves(slots) if x.size > 1}
    assert stored == {(130,), (140,)}


def test_lesson_train_microbatches_equal_one_batch():
    """A batch that needs too much memory can be processed in several microbatches.

    The gradient of a sum is the sum of the gradients. Each microbatch divides its loss by
    the number of targets in the complete batch. If it divided by its own number of targets,
    each target of a short microbatch would count too much.
    """
    params, batch = make_params(SMALL), make_batch()
    expected, _ = gradients(params, batch, SMALL, None)
    cfg = change(train=dict(microbatches=8))
    found, sums = gradients(params, batch, cfg, None)
    assert sums["tokens"] == 45
    assert_close(found, expected)


@pytest.fixture
def quiet(monkeypatch):
    """Train in this process on one device, without examples and signal handlers."""
    monkeypatch.setattr(jax, "devices", lambda: jax.local_devices()[:1])
    monkeypatch.setattr(evaluate, "held_out_example", lambda *_: "")
    monkeypatch.setattr(train, "catch_signals", lambda: lambda step: False)


def small_run(**changes):
    """Return the settings of six steps on random tokens, a task without metrics."""
    periods = dict(log_every=1, save_every=3, eval_every=3, predict_every=3)
    defaults = periods | dict(steps=6, eval_batches=1)
    return change(model=dict(dropout=0.1), train=defaults | changes)


def train_small(run_dir, source="", **changes):
    train.train(small_run(**changes), run_dir, "", str(source))
    return partition.Checkpoints(run_dir)


def metric_lines(run_dir):
    """Return metrics.jsonl without the lines about the speed."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [line for line in lines if '"timing/' not in line]


def shard_bytes(run_dir, step=6):
    files = partition.Checkpoints(run_dir).path(step).iterdir()
    return {path.name: path.read_bytes() for path in files}


def test_lesson_train_a_resumed_run_equals_an_uninterrupted_run(tmp_path, quiet):
    """A run that stops and resumes ends with the same weights, bit for bit.

    A step depends only on the TrainState and on the batch. A checkpoint contains the
    TrainState (weights, optimizer state and step) and the place in the data. If one of
    these were lost, the weights would differ.
    """
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    train_small(straight)
    train_small(resumed, steps=3)
    with open(resumed / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "train/loss": 1.0}\n{"step": 5, "tra')  # of a killed run
    train_small(resumed)
    assert shard_bytes(straight) == shard_bytes(resumed)
    assert metric_lines(straight) == metric_lines(resumed)
    steps = [json.loads(line)["step"] for line in metric_lines(straight)]
    # six lines of training, and a line of evaluation after the steps 3 and 6
    assert steps == [1, 2, 3, 3, 4, 5, 6, 6]


@pytest.mark.parametrize("per_layer_bias", [False, True])
def test_lesson_infer_cached_decoding_equals_uncached_decoding(per_layer_bias):
    """The decoder is causal, so later tokens do not change the keys of earlier ones.

    A cache holds these keys and values, and each step computes one position only.
    """
    cfg = change(model=dict(per_layer_bias=per_layer_bias))
    params, batch = make_params(cfg), make_batch(lengths=[(36, 9), (12, 9), (1, 9)])
    expected = forward(params, batch, cfg.model)

    @jax.jit
    def start(params, batch):
        encoded = model.encode(params, batch.inputs, batch.input_segments, cfg.model)
        return infer.init_cache(params, encoded, 9, cfg.model, 1)

    decode_step = jax.jit(infer.decode_step, static_argnums=1)
    cache, layers = start(params, batch)
    for t in range(9):
        ids, segments = batch.decoder_inputs[:, t, None], batch.input_segments
        logits, cache = decode_step(params, cfg.model, ids, t, cache, layers, segments)
        assert_close(logits[:, 0], expected[:, t])


def test_lesson_infer_greedy_decoding_takes_the_most_probable_id():
    """Each id is the argmax of the logits at its position, until this id is EOS.

    The score of an output is the sum of the log-probabilities of its ids. After EOS, the
    output is padding, and its score stays.
    """
    cfg = change(model=dict(vocab_size=12))  # with few ids, an output soon ends
    params, batch = make_params(cfg, seed=29), make_batch(cfg, [(36, 9), (12, 9)])
    pair = batch.inputs, batch.input_segments
    ids, scores = infer.generate(params, *pair, cfg.model, 9)
    inputs, outputs = (
        [x[x > 0] for x in np.asarray(side)] for side in (pair[0], ids[:, 0])
    )
    assert [data.EOS in x for x in outputs] == [False, True]
    again = pad_batch(inputs, outputs, 36, 9)
    best = forward(params, again, cfg.model).argmax(axis=-1)
    assert_equal(ids[:, 0], np.where(again.target_segments > 0, best, data.PAD))
    assert_close(scores[:, 0], infer.score(params, again, cfg.model))


def test_lesson_infer_a_wide_beam_search_is_exhaustive():
    """With 5 ids, 1 + 4 + 16 = 21 outputs of at most 3 ids end with EOS.

    40 beams keep all of their 16 x 5 = 80 extensions in the last step, so the search ranks
    all outputs. With fewer beams, the best output may be lost.
    """
    cfg = change(model=dict(vocab_size=5))
    params, decode = make_params(cfg, seed=8), DecodeConfig(beams=40, alpha=0.6)
    others = [0, 2, 3, 4]  # all ids but EOS
    outputs = [[*ids, 1] for n in range(3) for ids in itertools.product(others, repeat=n)]
    batch = pad_batch([[2, 4, 3, 3, 1]] * 21, outputs, 5, 3)
    lengths = np.array([len(ids) for ids in outputs])
    scores = infer.score(params, batch, cfg.model) / ((5 + lengths) / 6) ** 0.6
    order = np.argsort(-scores)
    first = batch.inputs[:1], batch.input_segments[:1]
    found, found_scores = infer.generate(params, *first, cfg.model, 3, decode)
    assert_equal(found[0, :21], batch.targets[order])
    assert_close(found_scores[0, :21], scores[order])


MESHES = [dict(), dict(fsdp=True), dict(model=2, fsdp=True), dict(model=4)]


def abstract_params(cfg, devices=8):
    """Return {name: shape and sharding} of the parameters on a new mesh."""
    partition.set_mesh(cfg, jax.devices()[:devices])
    arrays = partition.flatten(train.abstract_state(cfg))
    return {name: a for name, a in arrays.items() if name.startswith("params/")}


def test_lesson_partition_rules_split_weights_over_a_mesh():
    """A rule maps the name of a dimension to the mesh axis that splits it.

    The mesh has the shape data 4 x model 2. A matmul splits "mlp" over "model". With FSDP,
    the stored weights also split "embed" over "data", so that each device stores an eighth
    of a matrix. If "mlp" had no rule, a device would store a quarter.
    """
    arrays = abstract_params(change(mesh=dict(model=2, fsdp=True)))
    for name, axes in {
        "params/embed": ("model", "data"),
        "params/unembed": ("data", "model"),
        "params/encoder/layers/mlp/up": (None, "data", "model"),
        "params/decoder/layers/cross_attention/out": (None, "model", "data"),
    }.items():
        assert tuple(arrays[name].sharding.spec) == axes
    up = arrays["params/encoder/layers/mlp/up"]  # [layers, d_model, d_ff]
    assert up.sharding.shard_shape(up.shape) == (2, 40 // 4, 48 // 2)
    assert tuple(partition.spec(("layers", "mlp", "embed"))) == (None, "model", None)


@functools.cache
def two_steps(cfg, devices):
    """Return the initial state, and the state and metrics after two steps."""
    partition.set_mesh(cfg, jax.devices()[:devices])
    shardings = jax.tree.map(lambda a: a.sharding, train.abstract_state(cfg))
    init = jax.jit(functools.partial(train.init_state, cfg), out_shardings=shardings)
    batch = partition.put_batch(jax.device_get(make_batch()))
    first = init()
    state, _ = train_step(cfg, first, batch)
    return jax.device_get((first, train_step(cfg, state, batch)))


@pytest.mark.parametrize(
    "mesh, network",
    [
        (MESHES[2], {}),
        pytest.param(MESHES[1], dict(activation="relu", tied=True), marks=slow),
        pytest.param(MESHES[3], dict(per_layer_bias=True), marks=slow),
    ],
    ids=str,
)
def test_lesson_partition_eight_devices_equal_one(mesh, network):
    """Eight devices compute the same weights as one device, up to rounding.

    Sharding changes where an array is stored, and not what is computed. Devices add numbers
    in another order, so that the last digits differ. The initial weights are equal bit for
    bit. If an all-reduce were missing, the weights would be quite different.
    """
    first, trained = two_steps(change(model=network), 1)
    first_of_8, trained_of_8 = two_steps(change(model=network, mesh=mesh), 8)
    assert_equal(first_of_8, first)
    assert_close(trained_of_8, trained, 2e-5)


def test_lesson_evaluate_the_unigram_loss_is_that_of_counting_tokens():
    """Each content token of the targets is predicted by its share of all other tokens."""
    batch = pad_batch([[5, 5, 6, 1]], [[358, 5, 7, 1]], 6, 6)
    losses = [-math.log((3 - 1 + 1) / (4 + 359)), -math.log((1 - 1 + 1) / (4 + 359))]
    found = evaluate.unigram_loss([batch], TOKENIZER)
    assert found == pytest.approx(np.mean(losses))


def test_lesson_evaluate_the_most_probable_choice_is_the_answer():
    """A score is a log-probability, and each token lowers it.

    Long choices are at a disadvantage, unless the score is divided by their length.
    """
    choices = [  # (index, is_correct, weight, length in tokens)
        *(((0, 0), True, 1.0, 1), ((0, 1), False, 1.0, 1)),
        *(((1, 0), False, 1.0, 1), ((1, 1), True, 1.0, 4)),
    ]
    scores = [-1.0, -2.0, -1.0, -2.0]
    assert evaluate.rank_classification(choices, scores) == {"accuracy": 50.0}
    normalized = evaluate.rank_classification(choices, scores, normalize=True)
    assert normalized == {"accuracy": 100.0}


def hf_state(m, seed=0):
    """Return {name in PyTorch: random float32 array} of a model."""
    rng, state = np.random.default_rng(seed), {}

    def add(name, *shape):
        noise = rng.standard_normal(shape, dtype=np.float32)
        state[f"{name}.weight"] = 1 + noise / 10 if "norm" in name else noise / 5

    def attention(place, has_biases):
        for name in "qkv":
            add(f"{place}.{name}", m.num_heads * m.d_kv, m.d_model)
        add(f"{place}.o", m.d_model, m.num_heads * m.d_kv)
        if has_biases:
            add(f"{place}.relative_attention_bias", m.relative_buckets, m.num_heads)

    gated = m.activation.startswith("gated")
    add("shared", m.vocab_size, m.d_model)
    for stack, depth in (("encoder", m.num_layers), ("decoder", m.num_decoder_layers)):
        parts = ["SelfAttention", "EncDecAttention", "DenseReluDense"]
        parts = parts if stack == "decoder" else parts[::2]
        for i, (number, part) in itertools.product(range(depth), enumerate(parts)):
            place = f"{stack}.block.{i}.layer.{number}"
            add(f"{place}.layer_norm", m.d_model)
            if part == "DenseReluDense":
                for name in ("wi_0", "wi_1") if gated else ("wi",):
                    add(f"{place}.{part}.{name}", m.d_ff, m.d_model)
                add(f"{place}.{part}.wo", m.d_model, m.d_ff)
            else:
                has_biases = part == "SelfAttention" and (i == 0 or m.per_layer_bias)
                attention(f"{place}.{part}", has_biases)
        if depth:
            add(f"{stack}.final_layer_norm", m.d_model)
    if not m.tied and m.num_decoder_layers:
        add("lm_head", m.vocab_size, m.d_model)
    return state


def hf_config(m, **more):
    return {
        **{name: getattr(m, name) for name in "vocab_size d_model d_ff d_kv".split()},
        **{name: getattr(m, name) for name in "num_heads num_layers".split()},
        "num_decoder_layers": m.num_decoder_layers,
        "model_type": "umt5" if m.per_layer_bias else "t5",
        "relative_attention_num_buckets": m.relative_buckets,
        "relative_attention_max_distance": m.relative_max_distance,
        "feed_forward_proj": m.activation.replace("_", "-"),
        "dropout_rate": m.dropout,
        "tie_word_embeddings": m.tied,
        **{"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0},
    } | more


def write_model(folder, m, state, kind="safetensors", **more):
    """Write a model as the libraries safetensors and torch do."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(hf_config(m, **more)))
    if kind == "pytorch_model.bin":
        torch = pytest.importorskip("torch")
        torch.save({name: torch.tensor(a) for name, a in state.items()}, folder / kind)
    elif kind == "sharded":
        files = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(state)}
        for file in sorted(set(files.values())):
            part = {name: state[name] for name in state if files[name] == file}
            safetensors.numpy.save_file(part, folder / file)
        index = folder / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": files}))
    else:
        safetensors.numpy.save_file(state, folder / "model.safetensors")
    return folder


def params_of(weights):
    """Return the parameters of a convert.LoadedModel, or of a folder, as a nested dict."""
    weights = convert.read_model(weights) if isinstance(weights, Path) else weights
    return unflatten(weights.arrays)


def test_lesson_convert_hugging_face_stores_transposed_matrices(tmp_path):
    """T5X stores a matrix as [inputs, outputs], PyTorch as [outputs, inputs].

    Both have one array for each layer, and plain T5 stacks them. A square matrix would fit
    without the transpose, but the model would compute nonsense.
    """
    theirs = hf_state(SMALL.model)
    params = params_of(write_model(tmp_path / "hf", SMALL.model, theirs))
    name = "decoder.block.2.layer.2.DenseReluDense.wo.weight"
    assert theirs[name].shape == (40, 48)  # d_model, d_ff
    assert_array_equal(params["decoder"]["layers"]["mlp"]["down"][2], theirs[name].T)
    t5x, hugging_face = convert.foreign_names("decoder/layers/mlp/down", layer=2)
    assert t5x == "decoder/layers_2/mlp/wo/kernel" and hugging_face == name


def test_lesson_convert_a_tied_model_scales_its_logits():
    """T5 1.0 multiplies the output of the decoder by d_model^-0.5, T5 1.1 does not.

    If Hugging Face scales an untied model, its output matrix gets the factor.
    """
    embed, head = np.ones((7, 4), np.float32), np.full((7, 4), 8, np.float32)

    def convert_head(head, **config):
        arrays = {"shared.weight": embed, "lm_head.weight": head}
        convert.set_output_layer(arrays, config, "model")
        return arrays.get("lm_head.weight")

    assert convert_head(embed, tie_word_embeddings=True) is None
    assert convert_head(head, tie_word_embeddings=False)[0, 0] == 8
    assert convert_head(head, tie_word_embeddings=True)[0, 0] == 8 * 4**-0.5


# ---- helpers: models, files and commands -----------------------------------------------


@functools.partial(jax.jit, static_argnums=2)
def loss_and_gradients(params, batch, cfg):
    """Return ((loss, sums), gradients) of model.loss_fn."""
    return jax.value_and_grad(model.loss_fn, has_aux=True)(params, batch, cfg)


def place(params, cfg):
    """Put parameters on the devices of the current mesh."""
    table = model.param_table(cfg.model)
    specs = jax.tree.map(lambda p: partition.spec(p.axes, cfg.mesh.fsdp), table)
    return jax.device_put(params, specs)


def recorded(name):
    """Open a recorded result of T5X: a member of assets/t5x_cases.zip."""
    return zipfile.ZipFile(HERE / "assets/t5x_cases.zip").open(name)


def unflatten(arrays):
    """{"params/embed": array} becomes {"embed": array}."""
    return flax.traverse_util.unflatten_dict(arrays, sep="/")["params"]


def start(*args, cwd=HERE, devices=1, optimized=False):
    """Start a script, and return its process."""
    args = [sys.executable, *map(str, args)]
    env = os.environ | {"JAX_NUM_CPU_DEVICES": str(devices)}
    for name in ("JAX_DISABLE_MOST_OPTIMIZATIONS", "XLA_FLAGS") if optimized else ():
        env.pop(name, None)
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(args, cwd=cwd, env=env, text=True, **pipes)


def command(*args, stdin="", **options):
    """Run a script, such as command("infer.py", "--run_dir", run). Returns its output."""
    process = start(*args, **options)
    output, errors = process.communicate(stdin, timeout=600)
    assert process.returncode == 0, output + errors
    return output


def run(line):
    """Call main() of a script here, such as run("infer --raw"). Returns its output."""
    script, *words = line.split()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(io.StringIO()) as output,
        own_tables(),
    ):
        patch.setattr(sys, "argv", [f"{script}.py", *words])
        patch.setattr(jax, "devices", lambda *_: jax.local_devices()[:1])
        patch.setattr(partition, "start_jax", lambda cfg: None)
        patch.setattr(train, "catch_signals", lambda: lambda step: False)
        sys.modules[script].main()
    return output.getvalue()


@pytest.fixture(scope="session", autouse=True)
def compiled(request):
    """Compile equal programs once, in all processes and runs of pytest."""
    folder = str(request.config.cache.mkdir("compiled"))
    os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


# ---- configs ---------------------------------------------------------------------------

RECIPE = """\ufeff
from __future__ import annotations
from configs import *
import data

@dataclass
class Rate:
    value: float = 3.0

CONFIG = replace(RECIPES["tiny"], train=TrainConfig(steps=7))
TASKS = {"mine": data.Task("text:mine.txt")}
MIXTURES = {"both": {"mine": 1.0, "random": Rate().value}}
"""


def test_files_import_from_left_to_right():
    order = ["configs", "data", "partition", "model", "infer", "evaluate", "train"]
    allowed = {name: order[:i] for i, name in enumerate(order)}
    allowed["convert"] = order[: order.index("evaluate")]
    for name, earlier in allowed.items():
        tree = ast.parse((HERE / f"{name}.py").read_text())
        nodes = [n for n in tree.body if isinstance(n, (ast.Import, ast.ImportFrom))]
        names = {getattr(n, "module", None) or n.names[0].name for n in nodes}
        names |= {alias.name for n in nodes for alias in n.names}
        assert names & {*order, "convert", "extras"} <= set(earlier)


@pytest.mark.parametrize("name", ["tiny", "small_c4", "base_wmt_finetune", "large_ro"])
def test_config_json_holds_every_setting_that_is_not_of_the_machine(name, tmp_path):
    cfg = replace(configs.load_recipe(name), mesh=configs.MeshConfig(model=2))
    configs.save_run(cfg, tmp_path, vocabulary="abc")
    stored, metadata = configs.load_run(tmp_path)
    assert stored == replace(cfg, mesh=configs.MeshConfig())
    assert metadata == {"vocabulary": "abc", "init_from": ""}


def test_a_run_that_lacks_a_setting_gets_its_default_and_says_so(tmp_path, capsys):
    configs.save_run(change(train=dict(seed=7)), tmp_path)
    path = tmp_path / "config.json"
    text = path.read_text()
    path.write_text(re.sub(r',\s+"seed": 7', "", text))
    assert configs.load_run(tmp_path)[0] == SMALL
    assert "seed" in capsys.readouterr().err
    path.write_text(text.replace('"seed": 7', '"ema": 7'))
    with pytest.raises(UserError, match="ema"):
        configs.load_run(tmp_path)


def test_flags_change_single_settings_of_a_recipe():
    flags = "--config small_c4 --train.steps 7 --data.pack False --decode.max_length None"
    cfg = configs.parse(configs.Options, f"{flags} --train.warmup_steps 1".split()).cfg
    changes = dict(train=dict(steps=7, warmup_steps=1), data=dict(pack=False))
    assert cfg == change(configs.RECIPES["small_c4"], **changes)


WRONG_FLAGS = [
    "--decode.beams 4 --decode.top_k 5",
    "--decode.beams 2 --decode.num_return 3", "--train.loss_normalizing_factor 0",
    "--train.label_smoothing 1", "--train.learning_rate nan", "--decode.num_return 3",
    "--train.warmup_steps 0", "--data.noise_density 1.5", "--model.activation swish",
    "--data.noise_density 1", "--decode.batch_size 0", "--model.tied maybe",
    "--decode.max_length 0", "--train.microbatches 0", "--train.steps many",
    "--train.keep -1", "--mesh.model 0", "--decode.top_p 90", "--model.dropout 10",
    "--config smal_c4", "--train.step 7", "--train.seed 3000000000",
]  # fmt: skip


@pytest.mark.parametrize("flags", WRONG_FLAGS)
def test_wrong_flags_are_refused(flags, capsys):
    with pytest.raises(SystemExit) as error:
        configs.parse(configs.Options, flags.split())
    assert error.value.code


def test_the_bounds_of_settings_are_allowed():
    flags = "--decode.top_p 1 --data.noise_density 0.99 --train.microbatches 1"
    cfg = configs.parse(configs.Options, flags.split()).cfg
    assert cfg.decode.top_p == 1 and cfg.data.noise_density == 0.99


def test_lists_of_settings_have_no_other_names():
    lists = *configs.AT_LEAST_1, *configs.AT_MOST, *configs.CHANGEABLE
    assert {*lists} <= {*configs.flat_settings(SMALL), "decode", "mesh"}
    fields = {name.split(".")[1] for name in configs.flat_settings(SMALL)}
    assert {*configs.NOT_INHERITED, *configs.NOT_IN_METRIC_NAMES} <= fields


def test_a_recipe_file_adds_tasks_and_mixtures(tmp_path, tables):
    (tmp_path / "my.py").write_text(RECIPE)
    options = train.parse(["--config", str(tmp_path / "my.py")])
    assert options.cfg.train.steps == 7 and options.run_dir == "runs/my"
    assert data.find_task("mine", options.cfg).source == "text:mine.txt"
    assert data.mixture_rates("both", options.cfg) == {"mine": 1.0, "random": 3.0}
    assert configs.VOCABULARY is None


def test_configs_lists_the_recipes_and_the_settings_of_one():
    listed = run("configs")
    assert "tiny " in listed and "small_glue_finetune" in listed
    shown = command("configs.py", "small_c4")
    assert "--train.warmup_steps" in shown and "small_glue_finetune" not in shown


def test_other_commands_take_the_settings_from_the_run(tmp_path, tables):
    cfg = change(configs.RECIPES["tiny"], train=dict(steps=9))
    configs.save_run(cfg, tmp_path)
    (tmp_path / "recipe.py").write_text(RECIPE)
    flags = ["--run_dir", str(tmp_path), "--decode.beams", "2"]
    assert configs.parse(configs.Options, flags).cfg == change(cfg, decode=dict(beams=2))
    assert "mine" in configs.TASKS  # those of the run's recipe file
    (tmp_path / "other.py").write_text(RECIPE.replace("mine", "other"))
    flags += ["--config", str(tmp_path / "other.py")]
    assert configs.parse(configs.Options, flags).cfg.train.steps == 9
    assert {"mine", "other"} <= configs.TASKS.keys()


@pytest.mark.parametrize(
    "flags, refused",
    [("", None), ("--train.steps 90 --mesh.model 2 --train.microbatches 2", None),
     ("--config tiny", None), ("--config tiny_finetune", "data.task"),
     ("--train.seed 1", "train.seed"), ("--train.batch_size 32", "train.batch_size"),
     ("--model.d_ff 128", "model.d_ff"), ("--data.vocab bytes", "data.vocab"),
     ("--init_from runs/other", "init_from")],
)  # fmt: skip
def test_a_run_is_resumed_with_the_same_settings_only(flags, refused, tmp_path):
    configs.save_run(configs.RECIPES["tiny"], tmp_path)
    argv = ["--run_dir", str(tmp_path), *flags.split()]
    # A run without a checkpoint begins again, and may have other settings.
    train.parse([*argv[:2], "--config", "tiny", "--train.seed", "1"])
    with pytest.raises(UserError, match="no checkpoint"):
        train.parse(argv[:2])
    marker = tmp_path / "checkpoints/step_00000010/complete"
    configs.write_file(marker, "1")
    with pytest.raises(UserError, match=refused) if refused else contextlib.nullcontext():
        train.parse(argv)


def test_init_from_takes_the_network_and_the_vocabulary_of_the_other_run(tmp_path):
    origin = change(SMALL, model=dict(activation="relu"), data=dict(vocab="bytes"))
    configs.save_run(origin, tmp_path)
    argv = ["--config", "small_pairs", "--run_dir", str(tmp_path / "new")]
    argv += ["--init_from", str(tmp_path)]
    options = train.parse(argv)
    assert options.cfg.model == replace(origin.model, dropout=0.1, dtype="auto")
    assert (options.cfg.data.vocab, options.cfg.data.task) == ("bytes", "text_to_text")
    for flag in ("--model.d_ff 64", "--data.vocab train:500", "--data.extra_ids 3"):
        with pytest.raises(UserError, match=flag.split()[0][2:]):
            train.parse(argv + flag.split())
    configs.save_run(options.cfg, tmp_path / "new", init_from=f"{tmp_path}/")
    configs.write_file(tmp_path / "new/checkpoints/step_00000010/complete", "1")
    assert train.parse(argv[2:4]) == replace(options, config="", init_from=f"{tmp_path}/")
    train.parse(argv)  # Another spelling is not another run.


def test_a_file_is_written_completely_or_not_at_all(tmp_path, monkeypatch):
    configs.write_file(tmp_path / "a", "old")

    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError):
        configs.write_file(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "old" and os.listdir(tmp_path) == ["a"]


# ---- data: spans and rows --------------------------------------------------------------


@pytest.mark.parametrize(
    "inputs, mean, raw, noise, spans, targets",
    [
        (512, 3, 568, 85, 28, 114),  # T5
        (1024, 3, 1137, 171, 57, 229),  # mT5
        (1024, 20, 1193, 179, 9, 189),  # ByT5
    ],
)
def test_lengths_equal_those_of_t5(inputs, mean, raw, noise, spans, targets):
    cfg = DataConfig(inputs_length=inputs, mean_span_length=mean)
    assert data.tokens_per_example(cfg) == raw
    assert data.noise_counts(raw, cfg) == (noise, spans)
    assert noise + spans + 1 == targets


def test_counts_are_rounded_in_float32_and_half_to_even_as_in_t5():
    """At some lengths, counts in float64 would be others."""
    f32, differ = np.float32, 0
    means = np.arange(1.1, 6, 0.1).round(1).tolist()
    for length, density, mean in itertools.product(range(2, 300), (0.15, 0.3), means):
        cfg = DataConfig(noise_density=density, mean_span_length=mean)
        noise, spans = data.noise_counts(length, cfg)
        wanted = min(max(int(np.rint(f32(length) * f32(density))), 1), length - 1)
        parts = min(max(int(np.rint(f32(wanted) / f32(mean))), 1), length - wanted)
        assert (noise, spans) == (wanted, parts)
        differ += parts != min(max(1, round(wanted / mean)), length - wanted)
    assert differ and data.noise_counts(10, DataConfig(noise_density=0.25)) == (2, 1)


def test_all_segmentations_are_equally_likely():
    rows = data.random_segmentation(7, 4, 40_000, (3,))
    ways = [w for w in itertools.product(range(1, 5), repeat=4) if sum(w) == 7]
    found, counts = np.unique(rows, axis=0, return_counts=True)
    assert found.tolist() == sorted(map(list, ways)) and len(ways) == 20
    assert np.abs(counts - 2000).max() < 5 * math.sqrt(2000)


@pytest.mark.parametrize("density, mean", [(0.15, 3), (0.5, 1), (0.9, 1), (0.3, 20)])
def test_texts_of_all_lengths_fit_into_a_row(density, mean):
    cfg = DataConfig(noise_density=density, mean_span_length=mean)
    for limit in range(3, 80):
        longest = data.tokens_per_example(replace(cfg, inputs_length=limit))
        for length in range(2, longest + 2):
            noise, spans = data.noise_counts(length, cfg)
            assert 0 < spans <= min(noise, length - noise)
            assert (length - noise + spans + 1 <= limit) == (length <= longest)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(inputs_length=1900, targets_length=900), "sentinels"),
        (dict(inputs_length=512, targets_length=113), "114 targets"),
        (dict(inputs_length=2, targets_length=9), "inputs"),
    ],
)
def test_span_corruption_that_cannot_work_is_refused(changes, message):
    """T5 itself would silently use word pieces as the sentinel 101."""
    cfg, task = change(BYTES, data=changes), data.TASKS["span_corruption"]
    documents = data.cut_into_chunks([np.arange(5000) % 250 + 3], task, cfg.data)
    with pytest.raises(UserError, match=message):
        data.make_examples(documents, task, TOKENIZER, cfg, 0)


def test_without_sentinels_only_span_corruption_is_refused():
    tokenizer = types.SimpleNamespace(extra_ids=0, first_sentinel=None)
    with pytest.raises(UserError, match="prefix_lm"):
        data.span_corruption([np.arange(9)], tokenizer, DataConfig(), 0)
    assert data.prefix_lm([np.arange(9)], tokenizer, DataConfig(), 0)
    tokenizer = types.SimpleNamespace(extra_ids=1, first_sentinel=9)  # for one span
    assert data.span_corruption([np.arange(9)], tokenizer, DataConfig(), 0)


@pytest.mark.parametrize(
    "side, eos_in_inputs, expected",
    [
        ("inputs", True, [5, 6, 7, 1]),  # T5
        ("inputs", False, [5, 6, 7, 8]),  # T0
        ("targets", True, [5, 6, 1]),
        ("targets", False, [5, 6, 7]),
    ],
)
def test_long_texts_are_cut_as_in_t5_and_in_t0(side, eos_in_inputs, expected, capsys):
    configs.print_once.cache_clear()
    cfg = DataConfig(inputs_length=4, targets_length=3)
    task = data.Task(eos_in_inputs=eos_in_inputs)
    short = data.trim_and_add_eos(np.array([5]), side, task, cfg).tolist()
    assert short == ([5] if side == "inputs" and not eos_in_inputs else [5, 1])
    assert data.trim_and_add_eos([], side, task, cfg).tolist() == [1]
    assert not capsys.readouterr().err
    found = data.trim_and_add_eos(np.arange(5, 10), side, task, cfg)
    assert f"data.{side}_length" in capsys.readouterr().err
    assert found.dtype == np.int32 and found.tolist() == expected


def test_prefix_lm_cuts_each_text_once_and_at_random():
    texts = [np.arange(n) for n in range(2, 200)]
    pairs = data.prefix_lm(texts, TOKENIZER, DataConfig(), 0)
    for text, (inputs, targets) in zip(texts, pairs):
        assert len(inputs) and len(targets)
        assert [*inputs, *targets] == text.tolist()
    shares = [len(inputs) / len(text) for text, (inputs, _) in zip(texts, pairs)]
    assert 0.4 < np.mean(shares) < 0.6 and np.std(shares) > 0.2
    task = data.TASKS["prefix_lm"]
    cut = data.cut_into_chunks([np.arange(10), np.arange(48)], task, BYTES.data)
    assert [len(text) for text in cut] == [10, 47]  # documents are not joined


def test_an_objective_of_ones_own_is_joined_and_cut_to_its_length():
    own = data.Objective(lambda documents, *_: documents)
    longer = own._replace(length=lambda data_cfg: data_cfg.inputs_length + 2)
    for objective, expected in (own, [47, 11]), (longer, [50, 8]):
        task = data.Task(objective=objective)
        cut = data.cut_into_chunks([np.arange(10), np.arange(48)], task, BYTES.data)
        assert [len(text) for text in cut] == expected


def test_segments_come_from_lengths():
    """An empty side, or the id 0 in a text, does not shift segments of the other side."""
    pairs = [([], [0, 7, 1]), ([0, 4], [1]), ([], [3])]
    pairs = [tuple(np.array(side, int) for side in pair) for pair in pairs]
    batch = data.fill_rows([pairs], (4, 6))
    assert batch.input_segments.tolist() == [[2, 2, 0, 0]]
    assert batch.target_segments.tolist() == [[1, 1, 1, 2, 3, 0]]


# ---- data: batches ---------------------------------------------------------------------


def test_rows_are_packed_together_until_their_longer_sides_are_full(mixture, monkeypatch):
    monkeypatch.setattr(data, "ROWS_PER_PACK", 20)
    cfg = change(mixture, data=dict(task="a", targets_length=64))
    batches = data.Batches(cfg, TOKENIZER)
    ends = [batches.position["used_rows"] for _ in itertools.islice(batches, 20)]
    assert 20 <= max(ends) <= 22


def test_a_window_ends_after_so_many_characters(tmp_path):
    row, task = {"inputs": "x" * 900, "targets": ""}, data.Task()
    files = data.source_files(write_jsonl(tmp_path / "a", [row] * 9), "test", BYTES)
    for size, count in ((3000, 3), (3600, 3), (3601, 4)):  # a record counts as 1,200
        chunks, end = next(data.read_windows(task, files, TOKENIZER, BYTES, size))
        assert len(chunks) == count and end == data.Cursor(0, 0, record=count)


def test_batches_never_change():
    """So a run that an older version began gets the batches that it would have got."""
    cfg = change(configs.RECIPES["tiny_finetune"], data=dict(vocab="bytes"))
    batches, crc32 = data.Batches(cfg, data.load_tokenizer(cfg)), 0
    for batch in itertools.islice(batches, 40):
        state = json.dumps(batches.position).encode()
        crc32 = zlib.crc32(b"".join([*map(np.ndarray.tobytes, batch), state]), crc32)
    assert crc32 == 0x25E69B0C


def test_a_batch_is_a_part_of_an_order_of_rows(mixture):
    """So batches of another size, on any number of devices, hold the same rows."""
    both = [change(mixture, train=dict(batch_size=n)) for n in (3, 12)]
    small, large = (data.Batches(cfg, TOKENIZER) for cfg in both)
    rows = data.Batch(*map(np.concatenate, zip(*itertools.islice(small, 4))))
    assert_equal(rows, next(large))


def test_the_seed_and_the_epoch_choose_order_and_spans(tmp_path):
    (tmp_path / "train").write_text("a text of one row, in each epoch with other spans")
    source = f"text:{tmp_path}/{{split}}"
    cfg = change(BYTES, data=dict(task="span_corruption", source=source))

    def first(seed):
        return next(data.Batches(change(cfg, train=dict(seed=seed)), TOKENIZER)).inputs

    assert_equal(first(0), first(0))
    assert (first(0) != first(1)).any()
    assert len(np.unique(first(0), axis=0)) == 8  # other spans in each epoch


def test_tasks_take_turns_by_their_rates(mixture, monkeypatch):
    monkeypatch.setattr(data, "prefetch", lambda iterator, *_, **__: iterator)
    for rates, expected in (
        ({"a": 3, "b": 1}, "aaabaaab"),
        ({"a": 1, "b": 1}, "abababab"),
        ({"a": 7, "b": 2, "c": 1}, "aabaaaabca"),
    ):
        configs.MIXTURES["abc"] = rates
        batches = data.Batches(mixture, TOKENIZER)
        chosen, _ = batches.choose_examples(batches.position["cursors"])
        numbers = [int(re.match(r"\d+", TOKENIZER.decode(x))[0]) for x, _ in chosen]
        assert "".join("abc"[n // 1000] for n in numbers).startswith(expected)


def test_changed_files_are_refused_on_a_restart(mixture, tmp_path):
    batches = data.Batches(mixture, TOKENIZER)
    next(batches)
    data.Batches(mixture, TOKENIZER, batches.position)
    with (tmp_path / "b.train").open("a") as file:
        file.write("\n")
    with pytest.raises(UserError):
        data.Batches(mixture, TOKENIZER, batches.position)
    write_pairs(tmp_path / "b.train", 57, 1000)
    configs.MIXTURES["abc"] = {"a": 4, "b": 2, "c": 2}
    with pytest.raises(UserError):
        data.Batches(mixture, TOKENIZER, batches.position)


def test_an_error_in_the_background_reaches_the_training_loop(mixture, tmp_path):
    with (tmp_path / "a.train").open("a") as file:
        file.write('{"inputs": "no targets"}\n')
    with pytest.raises(KeyError, match="a.train, record 201"):
        for _ in range(99):
            next(data.Batches(mixture, TOKENIZER))


@pytest.mark.parametrize("text", ["", "text"])
def test_a_source_is_refused_only_if_all_of_it_is_empty(text, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "WINDOW_CHARACTERS", 1 << 9)  # two records
    write_jsonl(tmp_path / "train", [{"text": ""}] * 30 + [{"text": text}])
    settings = dict(source=f"jsonl:{tmp_path}/{{split}}", task="span_corruption")
    refused = pytest.raises(UserError, match="jsonl")
    with contextlib.nullcontext() if text else refused:
        next(data.Batches(change(BYTES, data=settings), TOKENIZER))


# ---- data: sources and tasks -----------------------------------------------------------

ROWS = [{"inputs": 'a "b" c', "targets": "007"}, {"inputs": "ü,\n1", "targets": ""}]
PAIR = [{"inputs": "a", "targets": "b"}]


def gz(text):
    return gzip.compress(text.encode())


@pytest.mark.parametrize(
    "kind, files, expected",
    [
        ("text", {"a.txt": "one\n\n \ntwo ü\r\n"}, [{"text": "one"}, {"text": "two ü"}]),
        ("text", {"a.txt": "\ufeffone"}, [{"text": "one"}]),
        ("text", {"b.gz": gz("b"), "a.txt": "a"}, [{"text": "a"}, {"text": "b"}]),
        ("jsonl", {"a": '{"t": "2024-01-02", "n": null}\n\n{"x": [1]}'},
         [{"t": "2024-01-02", "n": None}, {"x": [1]}]),
        ("csv", {"a": 'inputs,targets\r\n"a ""b"" c",007\r\n\r\n"ü,\n1",\r\n'}, ROWS),
        ("csv", {"a": "\ufeffx,y\nNA,None\n"}, [{"x": "NA", "y": "None"}]),
        ("tsv", {"a": 'inputs\ttargets\n"a\t"b\n""\tc"\r\n'},
         [{"inputs": '"a', "targets": '"b'}, {"inputs": '""', "targets": 'c"'}]),
    ],
)  # fmt: skip
def test_sources_keep_every_character(kind, files, expected, tmp_path):
    for name, content in files.items():
        content = content if isinstance(content, bytes) else content.encode()
        real = tmp_path.with_name(f"{tmp_path.name}.{name}")
        real.write_bytes(content)
        (tmp_path / name).symlink_to(real)
    opened = data.source_files(f"{kind}:{tmp_path}/*", "train", BYTES)
    assert [row for file in opened for row in file.read()] == expected
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert sum(file.size for file in opened) == sum(sizes)


@pytest.mark.parametrize("suffix", ["gz", "bz2", "xz", "zst"])
def test_compressed_and_remote_files_are_read(suffix):
    compression = {"zst": "zstd", "gz": "gzip"}.get(suffix, suffix)
    path = f"memory://a/b.jsonl.{suffix}"
    with fsspec.open(path, "wt", compression=compression) as file:
        file.write('{"inputs": "a", "targets": "b"}\n')
    for cache in ("", "simplecache::"):
        source = f"jsonl:{cache}memory://a/*.{suffix}"
        (opened,) = data.source_files(source, "validation", BYTES)
        assert list(opened.read()) == PAIR and opened.size > 0
        assert opened.name.startswith(f"{cache}memory://")
    for name in ("a.zip", "a.tar.gz"):
        with pytest.raises(UserError, match=name):
            next(data.read_lines(name))


def test_parquet_rows_keep_their_types(tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [{"inputs": f"{n}", "ids": [n, 1], "x": {"de": "a"}} for n in range(3000)]
    line = {"day": np.datetime64("2020-01-02"), "city": "Köln"}
    assert infer.to_json(line).decode() == '{"day": "2020-01-02", "city": "Köln"}\n'
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a")
    (opened,) = data.source_files(f"parquet:{tmp_path}/a", "test", BYTES)
    assert list(opened.read()) == rows
    table, path = pyarrow.table({"text": ["damaged"]}), tmp_path / "c"
    pyarrow.parquet.write_table(table, path, write_page_checksum=True)
    path.write_bytes(path.read_bytes().replace(b"damaged", b"changed"))
    with pytest.raises(OSError, match="CRC"):
        list(data.read_parquet(str(path)))
    twice = pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 2, ["text", "text"])
    pyarrow.parquet.write_table(twice, tmp_path / "b")
    with pytest.raises(KeyError, match="text"):
        list(data.read_parquet(str(tmp_path / "b")))


@pytest.mark.parametrize("ids", [b"ab", [5.0], [True], ["5"], [{"a": 5}]], ids=str)
def test_values_that_are_neither_texts_nor_ids_are_refused(ids):
    """A column of bytes in Parquet is not read as ids."""
    row = {"inputs": ids, "targets": "b"}
    with pytest.raises(ValueError, match="ids"):
        data.tokenize([row], data.Task(), TOKENIZER)


@pytest.mark.parametrize(
    "kind, content, message",
    [
        ("text", b"one\ntwo\xff\n", "train:2 is not UTF-8"),
        ("text", gzip.compress(b"one\n" * 9999, mtime=0)[:-9], "train.gz"),
        ("jsonl", b'{"inputs": "a", "targets": "b"}\n\n{"inputs"', "train:3 "),
        ("jsonl", b'["inputs"]', "train:1 "),
        ("jsonl", b'{"inputs": "a", "target": "b"}', "(?s)'targets'.*record 1.*'target'"),
        ("jsonl", b'{"inputs": "a", "targets": null}', "(?s)NoneType.*record 1"),
        ("jsonl", b'{"inputs": "a", "targets": 7}', "(?s)int.*record 1"),
        ("jsonl", b'{"inputs": "\\ud800", "targets": ""}', "(?s)surrogates.*record 1"),
        ("csv", b"inputs,targets\na,b\nc\n", "train:3 has 1 values"),
        ("csv", b"inputs,targets\na,b,c\n", "train:2 has 3 values"),
        ("csv", b'inputs,targets\na,"b\n', "(?s)end of data.*train"),
        ("csv", b'inputs,targets\na,b\n"a"b,c\n', "(?s)expected after.*record 2"),
        ("csv", b"a,a\nb,c\n", "train:2 has 2 values"),
        ("tsv", b"inputs\ttargets\na,b\n", "train:2 has 1 values"),
        ("parquet", b"PAR1 damaged", "train, record 1"),
        ("jsonl", b'{"inputs": [5, 359], "targets": [5]}', "outside the vocabulary"),
        ("jsonl", b'{"inputs": [5, -1], "targets": [5]}', "outside the vocabulary"),
    ],
)  # fmt: skip
def test_a_damaged_example_stops_the_run_and_is_named(kind, content, message, tmp_path):
    end = ".gz" if content[:2] == b"\x1f\x8b" else ""
    (tmp_path / f"train{end}").write_bytes(content)
    task = "span_corruption" if kind == "text" else "text_to_text"
    source = f"{kind}:{tmp_path}/{{split}}{end}"
    cfg = change(BYTES, data=dict(source=source, task=task))
    with pytest.raises((UserError, Exception), match=message):
        next(data.Batches(cfg, TOKENIZER))


@pytest.mark.parametrize(
    "source, message",
    [("a.jsonl", "KIND:NAME"), ("jason:a", "KIND:NAME"),
     ("jsonl:none/*", "No file matches none"),
     ("jsonl:none/{split}.jsonl", "No file matches none/train")],
)  # fmt: skip
def test_a_source_that_does_not_exist_is_refused(source, message):
    with pytest.raises(UserError, match=message):
        data.Batches(change(BYTES, data=dict(source=source)), TOKENIZER)


@pytest.mark.parametrize("count, files", [(20, 1), (300, 1), (20_001, 9), (1, 100)])
def test_a_part_of_a_source_without_splits_is_held_out(count, files, tmp_path):
    for number in range(files):
        rows = ({"text": f"{number} {n}"} for n in range(count))
        write_jsonl(tmp_path / f"{number:03}", rows)
    cfg = change(BYTES, data=dict(source=f"jsonl:{tmp_path}/*", task="span_corruption"))
    train, held = (
        [row["text"] for row in data.read_task("span_corruption", split, cfg)]
        for split in ("train", "validation")
    )
    assert not set(train) & set(held) and len(train) + len(held) == count * files
    assert len(held) > 4 or count < 300
    assert 0 < len(held) < 1200 * files and len(train) > 0.85 * count * files
    assert len({int(text.split()[1]) % 2 for text in held}) == min(count, 2)
    assert list(data.read_task("span_corruption", "test", cfg)) == []


def test_nothing_is_held_out_of_files_that_only_evaluate(tmp_path):
    source = write_pairs(tmp_path / "a.jsonl", 40)
    other = write_pairs(tmp_path / "b.jsonl", 30, 1000)
    cfg = change(BYTES, data=dict(source=source, eval_tasks=other))
    assert data.eval_tasks(cfg) == [other]
    assert sum(1 for _ in data.read_task(other, "validation", cfg)) == 30
    for same in ("text_to_text", source, source.replace("/a.jsonl", "/./a.jsonl")):
        assert sum(1 for _ in data.read_task(same, "validation", cfg)) < 10
    assert not data.open_task("text_to_text", "test", cfg)[1]


def test_a_split_in_a_name(tmp_path):
    for split in ("train", "validation"):
        rows = [{"inputs": f"{split} {n}", "targets": "x"} for n in range(30)]
        write_jsonl(tmp_path / split, rows)
    cfg = change(BYTES, data=dict(source=f"jsonl:{tmp_path}/{{split}}"))
    rows = {
        split: list(data.read_task("text_to_text", split, cfg))
        for split in ("train", "validation", "test")
    }
    assert [len(found) for found in rows.values()] == [30, 30, 0]
    assert rows["validation"][7] == dict(inputs="validation 7", targets="x")


def test_held_out_batches_are_in_order_and_padded(tmp_path, tables):
    source = write_pairs(tmp_path / "a.jsonl", 20)
    cfg = change(BYTES, train=dict(batch_size=8))
    batches = data.batches_of_split(source, "validation", cfg, TOKENIZER)
    assert [batch.inputs.shape for batch in batches] == [(8, 48)] * 3
    texts = [text for batch in batches for text in texts_in(batch)]
    assert [int(re.match(r"\d+", text)[0]) for text in texts] == [*range(20)]
    assert not batches[2].target_segments[4:].any()
    found = data.batches_of_split(source, "validation", cfg, TOKENIZER, 16)
    assert_equal(found, batches[:2])
    configs.TASKS["only"] = data.Task("jsonl:other", splits=("train",))
    assert data.batches_of_split("only", "validation", cfg, TOKENIZER) == []


def test_a_template_fills_fields_and_labels():
    fill = data.template("q {a}", "{label}", ("no", "yes"))
    example = dict(a="{a}", label=1.0, idx=7)
    assert fill(example) == [dict(inputs="q {a}", targets="yes")]
    for name, value in [("a", None), *(("label", x) for x in (None, -1, 2, 0.5))]:
        with pytest.raises((KeyError, TypeError)):  # None is null in JSON
            fill(example | {name: value})
    fill = t5_tasks.glue_template("q {a}", "{label}", ("no", "yes"))
    assert fill(example) == [dict(inputs="q {a}", targets="yes", idx=7)]
    assert fill(dict(a="x", label=-1)) == [dict(inputs="q x", targets="<unk>")]
    with pytest.raises(KeyError):
        fill(dict(a="x", label=2))


def test_stored_ids_lose_padding_and_eos():
    row = dict(inputs="a", targets=[7, 8, 1])
    ((inputs, targets),) = data.encode_pairs([row], data.Task(), TOKENIZER, BYTES)
    assert (inputs.tolist(), targets.tolist()) == ([100, 1], [7, 8, 1])
    padded = dict(inputs=[100, 1, 0, 0], targets=np.array([7, 0, 8, 0]))
    ((inputs, targets),) = data.encode_pairs([padded], data.Task(), TOKENIZER, BYTES)
    assert (inputs.tolist(), targets.tolist()) == ([100, 1], [7, 0, 8, 1])
    empty = dict(inputs=[], targets="")
    ((inputs, targets),) = data.encode_pairs([empty], data.Task(), TOKENIZER, BYTES)
    assert inputs.tolist() == targets.tolist() == [1]


MIXED = {
    "flat": {"x": 3, "y": 1, "zero": 0}, "outer": {"flat": 2, "x": 0.5, "z": 1},
    "function": lambda cfg: {"x": cfg.train.batch_size},
    "negative": {"x": 2, "y": -1}, "nothing": {"x": 0}, "infinite": {"x": math.inf},
}  # fmt: skip


@pytest.mark.parametrize(
    "name, expected",
    [("flat", {"x": 3, "y": 1, "zero": 0}), ("function", {"x": 8}),
     ("outer", {"x": 2, "y": 0.5, "zero": 0, "z": 1}), ("jsonl:a", {"jsonl:a": 1}),
     ("negative", None), ("nothing", None), ("infinite", None)],
)  # fmt: skip
def test_rates_of_mixtures(name, expected, monkeypatch):
    for mixture in MIXED:
        monkeypatch.setitem(configs.MIXTURES, mixture, MIXED[mixture])
    for task in ("x", "y", "z", "zero"):
        monkeypatch.setitem(configs.TASKS, task, data.Task())
    cfg = change(BYTES, data=dict(task=name, eval_tasks="flat, z"))
    if expected is None:
        with pytest.raises(UserError, match=name):
            data.mixture_rates(name, cfg)
    else:
        assert data.mixture_rates(name, cfg) == pytest.approx(expected)
        assert data.train_tasks(cfg).keys() == {k for k, v in expected.items() if v}
        assert data.eval_tasks(cfg) == ["x", "y", "zero", "z"]
    if name == "flat":
        with pytest.raises(UserError, match="flat"):
            data.Batches(change(cfg, data=dict(source="jsonl:a")), TOKENIZER)


def test_an_unknown_task_is_named_also_without_extras(monkeypatch):
    monkeypatch.setattr(configs, "HAS_EXTRAS", False)
    with pytest.raises(UserError, match="nothing"):
        data.find_task("nothing", SMALL)


# ---- data: vocabularies ----------------------------------------------------------------


@pytest.fixture(scope="session")
def pieces():
    """A SentencePiece model of 60 pieces without sentinels."""
    rng, output = np.random.default_rng(0), io.BytesIO()
    words = ["".join(rng.choice(list("abcdefgh"), 5)) for _ in range(100)]
    words += "alpha beta \u00e9t\u00e9 \u4e2d\u6587 x.".split()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(words * 3), model_writer=output, vocab_size=60,
        pad_id=0, eos_id=1, unk_id=2, bos_id=-1, minloglevel=2, character_coverage=1.0,
    )  # fmt: skip
    return output.getvalue()


def add_pieces(pieces, *names, kind="USER_DEFINED"):
    model = sentencepiece_model_pb2.ModelProto.FromString(pieces)
    for name in names:
        model.pieces.add(piece=name, score=0.0, type=kind)
    return model.SerializeToString()


def test_sentinels_are_appended_in_descending_order(pieces):
    """In T5's vocabulary of 32,100 ids, <extra_id_0> is 32099 and the last is 32000."""
    tokenizer, bare = data.Tokenizer(pieces, 100), data.Tokenizer(pieces, 0)
    assert tokenizer.size == bare.size + 100 and bare.first_sentinel is None
    assert tokenizer.first_sentinel == tokenizer.size - 1 and tokenizer.extra_ids == 100
    text = "alpha <extra_id_0> beta <extra_id_99> x"
    (ids,) = tokenizer.encode([text])
    assert [i for i in ids if i >= bare.size] == [tokenizer.size - 1, bare.size]
    assert tokenizer.decode(ids) == text
    (glued,) = tokenizer.encode([text.replace(" <", "<")])
    assert glued.tolist() == ids.tolist()
    proto = sentencepiece_model_pb2.ModelProto.FromString(pieces)
    proto.normalizer_spec.remove_extra_whitespaces = False
    assert data.Tokenizer(proto.SerializeToString(), 100).encode([text])[0].tolist() == [
        *ids
    ]
    (a,) = tokenizer.encode(["alpha"])
    decoded = tokenizer.decode([0, *a, tokenizer.size, *a, 1, *a])
    assert decoded == "alpha ⁇  alpha"
    ids = np.array([0, 1, 2, 3, bare.size - 1, bare.size, tokenizer.first_sentinel])
    assert np.flatnonzero(tokenizer.is_content(ids)).tolist() == [2, 3, 4]
    assert np.flatnonzero(bare.is_content(ids[:5])).tolist() == [2, 3, 4]


def test_a_vocabulary_is_stored_and_compared_byte_by_byte(pieces, tmp_path):
    (tmp_path / "other.model").write_bytes(pieces)
    cfg = change(BYTES, data=dict(vocab=f"{tmp_path}/other.model"))
    tokenizer = data.load_tokenizer(cfg)
    tokenizer.save(tmp_path / "run")
    configs.save_run(cfg, tmp_path / "run", vocabulary=tokenizer.sha256)
    assert (tmp_path / "run/spiece.model").read_bytes() == pieces
    (tmp_path / "other.model").unlink()
    again = data.load_tokenizer(cfg, tmp_path / "run")
    other = data.Tokenizer(add_pieces(pieces, "<hl>"), 100)
    assert again.sha256 == tokenizer.sha256 != other.sha256
    with pytest.raises(UserError, match="vocab_size"):
        data.load_tokenizer(change(cfg, model=dict(vocab_size=100)), tmp_path / "run")


def test_sentinels_of_a_vocabulary_are_used_and_may_be_followed_by_tokens(pieces):
    more = add_pieces(pieces, "▁<extra_id_1>", "▁<extra_id_0>", "<hl>")
    tokenizer = data.Tokenizer(more, 100)
    assert tokenizer.extra_ids == 2 and tokenizer.first_sentinel == tokenizer.size - 2
    content = tokenizer.is_content(np.arange(tokenizer.size - 4, tokenizer.size))
    assert content.tolist() == [True, False, False, True]


@pytest.mark.parametrize("names", [["<extra_id_1>"], ["<extra_id_0>", "<extra_id_1>"]])
def test_a_vocabulary_with_other_special_ids_is_refused(names, pieces):
    with pytest.raises(UserError, match="<extra_id_"):
        data.Tokenizer(add_pieces(pieces, *names), 100)
    with pytest.raises(UserError, match="<pad>"):
        data.Tokenizer(pieces.replace(b"<pad>", b"<bos>"), 100)


def test_a_vocabulary_is_trained_on_the_training_texts(tmp_path):
    words = [f"{'ab' * n}{'cd' * k}" for n in range(9) for k in range(9)]
    rows = [{"text": " ".join(words[n:])} for n in range(80)]
    source = dict(source=write_jsonl(tmp_path / "a", rows), task="span_corruption")
    cfg = change(BYTES, data=dict(vocab="train:40", **source))
    first, second = data.load_tokenizer(cfg), data.load_tokenizer(cfg)
    assert first.sha256 == second.sha256 and first.size == 140
    text = " ".join(words[5:20])
    assert first.decode(first.encode([text])[0]) == text
    small = data.load_tokenizer(change(cfg, data=dict(vocab="train:4000")))
    assert 140 < small.size < 4000  # pieces that so small a text does not have


def test_the_command_shows_rows_and_lists_tasks(mixture, byte_run, pretrained):
    shown = run(f"data --data.task a --init_from {byte_run}")
    assert re.search(r"^inputs\n(    \d+x.*\n)+targets\n", shown, re.MULTILINE)
    assert "0.00% of the inputs and 0.00% of the targets are unknown" in shown
    assert "training a vocabulary" not in run(f"data --run_dir {pretrained}")
    shown = run("data --data.task abc --list")
    assert "glue_rte_v002" in shown and re.search(r"^b +2 +jsonl:", shown, re.MULTILINE)


def test_the_shares_that_are_printed_by_hand(capsys):
    """Of two examples in a row of 8 + 4, one has 4 targets. 2 of 6 inputs are unknown."""
    pairs = [([2, 5, 1], [5, 2, 7, 1]), ([5, 2, 1], [])]
    data.print_statistics([pairs], (8, 4))
    percents = re.findall(r"([\d.]+)%", capsys.readouterr().out)
    assert percents == ["50.0", "75", "100", "33.33", "25.00"]


# ---- partition -------------------------------------------------------------------------


def random_arrays(template, seed=0):
    rng = np.random.default_rng(seed)
    return {
        name: jax.device_put(rng.normal(size=a.shape).astype(a.dtype), a.sharding)
        for name, a in template.items()
    }


def load_checkpoint(checkpoints, template, step=None):
    """Load a checkpoint, or the newest one, and return (step, arrays)."""
    folder = partition.newest_checkpoint(checkpoints.folder.parent)
    folder = checkpoints.path(step) if step else folder
    return folder and (int(folder.name[5:]), partition.load_arrays(folder, template))


def a_vector(first=0):
    """Return {name: array}, and the template to load it."""
    arrays = {"a": jnp.arange(8.0) + first}
    like = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=arrays["a"].sharding)
    return arrays, {"a": like}


def test_the_network_needs_no_mesh():
    args = make_params(SMALL), make_batch(SMALL), SMALL.model
    expected = forward(*args)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        assert_close(forward(*args), expected)


def test_a_batch_is_split_by_rows():
    partition.set_mesh(change(mesh=dict(model=2), model=dict(d_model=33)))
    rows = np.arange(16).reshape(8, 2)
    placed = partition.put_batch({"ids": rows})["ids"]
    assert_equal(placed, rows)
    assert {shard.data.shape for shard in placed.addressable_shards} == {(2, 2)}


@pytest.mark.parametrize(
    "changes, number",
    [
        (dict(mesh=dict(model=3)), "8"),
        (dict(mesh=dict(model=8)), "4"),  # heads
        (dict(mesh=dict(model=4), model=dict(d_ff=50)), "50"),
        (dict(mesh=dict(model=4), model=dict(vocab_size=258)), "258"),
        (dict(mesh=dict(fsdp=True), model=dict(d_model=36)), "36"),
    ],
)
def test_sizes_that_a_mesh_cannot_split_are_refused(changes, number):
    """By set_mesh, or by JAX."""
    cfg = change(**changes)
    error = UserError if number == "8" else ValueError
    with pytest.raises(error, match=rf"\b{number}\b"):
        train.lower_step(cfg, partition.set_mesh(cfg))


# ---- partition: checkpoints ------------------------------------------------------------


def test_a_checkpoint_is_loaded_on_any_mesh(tmp_path):
    """Every device writes its part, and reads what it needs from the parts of all."""
    cfg = change(mesh=MESHES[2])
    saved = random_arrays(abstract_params(cfg))
    checkpoints = partition.Checkpoints(tmp_path)
    checkpoints.save(saved, 7, {"row": 3})
    # Files of an interrupted save by nine processes do not matter.
    (checkpoints.path(7) / "shards-00000-of-00009.msgpack").write_bytes(b"old")
    saved = jax.device_get(saved)
    for mesh, devices in ((MESHES[3], 8), (MESHES[2], 4), (MESHES[1], 8), ({}, 1)):
        template = abstract_params(change(mesh=mesh), devices)
        step, loaded = load_checkpoint(checkpoints, template)
        assert step == 7
        assert_equal(loaded, saved)
        assert all(loaded[k].sharding == a.sharding for k, a in template.items())
    assert partition.read_headers(checkpoints.path(7))[1] == {"row": 3}


def test_each_number_is_written_once(tmp_path):
    """Without FSDP, eight devices hold copies of all weights."""
    arrays = random_arrays(abstract_params(SMALL))
    arrays["step"] = jnp.int32(5)
    checkpoints = partition.Checkpoints(tmp_path)
    checkpoints.save(arrays, 1)
    headers, _ = partition.read_headers(checkpoints.path(1))
    assert headers.keys() == arrays.keys()
    assert all(len(shards) == 1 for shards in headers.values())


def test_the_newest_checkpoints_are_kept(tmp_path):
    """Incomplete folders are removed, and other folders are not touched."""
    arrays, template = a_vector()
    checkpoints = partition.Checkpoints(tmp_path, keep=2)
    assert load_checkpoint(checkpoints, template) is None
    (tmp_path / "checkpoints/step_00000002_copy").mkdir(parents=True)
    (tmp_path / "checkpoints/step_00000003").mkdir()
    for step in (0, 1, 2, 4, 5):
        checkpoints.save(arrays, step)
        assert partition.newest_checkpoint(tmp_path) == checkpoints.path(step)
    assert checkpoints.steps() == [4, 5]
    names = {path.name for path in (tmp_path / "checkpoints").glob("step*")}
    assert names == {f"step_{n:08}" for n in (4, 5)} | {"step_00000002_copy"}
    found = [partition.resolve_step(tmp_path, name) for name in ("latest", "4")]
    assert found == [5, 4]
    assert partition.newest_checkpoint(checkpoints.path(4)) == checkpoints.path(4)
    for name in ("2", "newest"):
        with pytest.raises(UserError, match="4, 5"):
            partition.resolve_step(tmp_path, name)


CRASH = {"after": None}  # how many file operations succeed


def crash_at_a_file_operation(event, args):
    """Fail at a file operation, like a full disk. To the files, a kill is the same."""
    is_ours = event.startswith(("os.", "shutil.")) or "checkpoints" in str(args)
    if CRASH["after"] is not None and is_ours:
        CRASH["after"] -= 1
        if CRASH["after"] < 0:
            raise OSError("crash")


def test_a_crash_at_any_file_operation_leaves_a_whole_checkpoint(tmp_path):
    """The newest checkpoint is the old or the new one, and the next save succeeds."""
    sys.addaudithook(crash_at_a_file_operation)
    (old, template), (new, _), (last, _) = map(a_vector, (10, 20, 30))
    outcomes = []
    for operations in range(100):
        run = tmp_path / str(operations)
        checkpoints = partition.Checkpoints(run, keep=1)
        checkpoints.save(old, 1, "old")
        CRASH["after"] = operations
        try:
            checkpoints.save(new, 2, "new")
        except OSError:
            pass
        finished, CRASH["after"] = CRASH["after"] > 0, None
        checkpoints = partition.Checkpoints(run, keep=1)
        assert checkpoints.steps()
        for step in checkpoints.steps():
            loaded = load_checkpoint(checkpoints, template, step)[1]
            assert_equal(loaded, {1: old, 2: new}[step])
            state = partition.read_headers(checkpoints.path(step))[1]
            assert state == {1: "old", 2: "new"}[step]
        outcomes.append(step)
        checkpoints.save(last, 3)
        assert_equal(load_checkpoint(checkpoints, template)[1], last)
        assert checkpoints.steps() == [3]
        if finished:
            break
    assert outcomes == sorted(outcomes) and {1, 2} == set(outcomes) and len(outcomes) > 8


def test_a_flipped_bit_is_never_used(tmp_path):
    """Every byte of a checkpoint is covered: the names, the places and the numbers."""
    arrays = {"a": jnp.arange(6.0).reshape(2, 3), "b": jnp.int32(5)}
    template = {
        name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding)
        for name, a in arrays.items()
    }
    checkpoints = partition.Checkpoints(tmp_path)
    checkpoints.save(arrays, 1, {"row": 12})
    (path,) = checkpoints.path(1).glob("*.msgpack")
    whole = path.read_bytes()
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        with pytest.raises(UserError, match="step_00000001") as error:
            load_checkpoint(checkpoints, template)
        assert str(path) in str(error.value)
    path.write_bytes(whole[:-1])
    with pytest.raises(UserError, match="damaged"):
        load_checkpoint(checkpoints, template)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=path.name):
        load_checkpoint(checkpoints, template)
    path.with_name("complete").write_text("")
    with pytest.raises(UserError, match="complete is damaged"):
        load_checkpoint(checkpoints, template)


def test_arrays_of_another_model_are_refused(tmp_path):
    arrays, template = a_vector()
    checkpoints = partition.Checkpoints(tmp_path)
    checkpoints.save(arrays, 1)
    sharding = template["a"].sharding
    for name, size, dtype in ("a", 4, "float32"), ("a", 8, "int32"), ("b", 8, "float32"):
        like = jax.ShapeDtypeStruct((size,), dtype, sharding=sharding)
        with pytest.raises(UserError, match=f"the array {name}"):
            load_checkpoint(checkpoints, {name: like})


def test_weights_that_the_settings_do_not_use_are_refused(tmp_path):
    """Otherwise --model.tied True would answer with another model."""
    checkpoints = partition.Checkpoints(tmp_path)
    checkpoints.save(partition.flatten({"params": make_params(SMALL)}), 1)
    infer.load_params(SMALL, tmp_path, 1)
    with pytest.raises(UserError, match="params/unembed"):
        infer.load_params(change(model=dict(tied=True)), tmp_path, 1)


def test_one_of_several_processes_needs_the_address_of_process_0(monkeypatch):
    def initialize(*address, **options):
        raise ValueError(f"The coordinator_address of {address} should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    partition.start_jax(configs.Options(SMALL))  # This process runs alone.
    for flag in dict(coordinator="a:1"), dict(processes=2), dict(process=0):
        distributed = configs.DistributedConfig(**flag)
        with pytest.raises(ValueError, match=str(*flag.values())):
            partition.start_jax(configs.Options(SMALL, distributed=distributed))


# ---- model -----------------------------------------------------------------------------


# The first distance of each bucket, from t5x/examples/t5/layers.py.
BOTH_WAYS = [0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 23, 32, 46, 64, 91]
CAUSAL = [*range(17), 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]


def test_relative_buckets_equal_those_of_t5x():
    cfg, far = ModelConfig(), np.arange(300)
    before = np.searchsorted(BOTH_WAYS, far, "right") - 1
    causal = np.searchsorted(CAUSAL, far, "right") - 1
    assert_array_equal(model.relative_bucket(-far, True, cfg), before)
    after = model.relative_bucket(far[1:], True, cfg)
    assert_array_equal(after, before[1:] + 16)
    assert_array_equal(model.relative_bucket(-far, False, cfg), causal)
    assert not model.relative_bucket(far, False, cfg).any()
    cfg = ModelConfig(relative_buckets=18)  # Here, ln(8 / 4) / ln(128 / 4) is 1 / 5.
    assert_array_equal(model.relative_bucket(np.array([-8, -16]), True, cfg), [5, 6])
    for wrong in (dict(relative_max_distance=16), dict(relative_buckets=1)):
        with pytest.raises(UserError, match="buckets"):
            model.relative_bucket(far, False, ModelConfig(**wrong))


def recorded_model():
    """Return the parameters and the ModelConfig of the recorded model of T5X."""
    case = np.load(recorded("t5x/network/v11.npz"))
    arrays = {k.removeprefix("params/"): case[k] for k in case if k.startswith("params/")}
    cfg = replace(convert.model_config(arrays, Path("v11")), dtype="float32")
    return unflatten(convert.to_plain(arrays, cfg, Path("v11"))), cfg


@pytest.mark.parametrize("name", ["v11", "v11_packed"])
def test_the_network_equals_that_of_t5x(name):
    case, (params, cfg) = np.load(recorded(f"t5x/network/{name}.npz")), recorded_model()
    inputs, targets = case["encoder_input_tokens"], case["decoder_target_tokens"]
    packed = name == "v11_packed"
    input_segments = case["encoder_segment_ids"] if packed else np.int32(inputs > 0)
    segments = case["decoder_segment_ids"] if packed else np.int32(targets > 0)
    shifted = data.shift_right(targets, segments)
    assert_array_equal(shifted, case["decoder_input_tokens"])
    batch = data.Batch(inputs, input_segments, shifted, targets, segments)

    encode = jax.jit(model.encode, static_argnums=3)
    encoded = np.asarray(encode(params, inputs, input_segments, cfg))
    assert_close(encoded[inputs > 0], case["encoded"][inputs > 0])
    logits = forward(params, batch, cfg)
    assert_close(logits[targets > 0], case["logits"][targets > 0])
    (loss, sums), grads = loss_and_gradients(params, batch, replace(SMALL, model=cfg))
    found = float(loss), float(sums["z_loss"]), float(sums["tokens"])
    expected = case["loss_sum"], case["z_loss"], case["weight_sum"]
    assert_allclose(found, expected, rtol=1e-5)
    grads = partition.flatten(grads)
    for path, layer, name, _ in convert.all_foreign_names(cfg):
        g = grads[path][layer]
        expected = case[f"grad_sq/{name}"]
        found = jnp.sum(g * g, tuple(range(expected.ndim, g.ndim)))
        assert_allclose(found, expected, rtol=1e-4, err_msg=name)


# The numbers of parameters that the authors have published.
T5_1_0 = dict(activation="relu", tied=True)
PUBLISHED = {
    "T5 1.1 small": (configs.SIZES["small"], 76_961_152),
    "T5 1.1 base": (configs.SIZES["base"], 247_577_856),
    "T5 1.1 large": (configs.SIZES["large"], 783_150_080),
    "T5 1.1 xl": (configs.SIZES["xl"], 2_849_757_184),
    "T5 1.1 xxl": (configs.SIZES["xxl"], 11_135_332_352),
    "mT5 small": (replace(configs.SIZES["small"], vocab_size=250_112), 300_176_768),
    "T5 small": (
        ModelConfig(d_ff=2048, num_heads=8, num_layers=6, num_decoder_layers=6, **T5_1_0),
        60_506_624,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_are_the_published_ones(name):
    cfg, count = PUBLISHED[name]
    assert model.count_params(model.param_table(cfg)) == count


def test_initial_values_have_the_standard_deviations_of_t5x():
    cfg = ModelConfig(512, 128, 256, 32, 6, num_layers=4, num_decoder_layers=4)
    params = jax.jit(model.init_params, static_argnums=0)(cfg, jax.random.key(0))
    params = jax.device_get(params)
    layers = partition.flatten(params["encoder"]["layers"])
    deviations = {
        "attention/query": (128 * 32) ** -0.5,
        "attention/key": 128**-0.5,
        "attention/value": 128**-0.5,
        "attention/out": 192**-0.5,
        "mlp/gate": 128**-0.5,
        "mlp/up": 128**-0.5,
        "mlp/down": 256**-0.5,
    }
    for name, deviation in deviations.items():
        w = layers[name] / deviation
        assert abs(w.std() - 1) < 0.02 and abs(w.mean()) < 0.02, name
        # Matrices of the MLP have no values beyond 2 deviations before the correction.
        assert (np.abs(w).max() < 2.274) == name.startswith("mlp"), name
    assert abs(params["embed"].std() - 1) < 0.02
    assert abs(params["unembed"].std() * 128**0.5 - 1) < 0.02
    bias = params["encoder"]["relative_bias"]
    limit = math.sqrt(6 / (6 + 32))
    assert 0.95 * limit < np.abs(bias).max() <= limit
    assert (params["decoder"]["norm"] == 1).all()


def equations(jaxpr):
    """Yield all equations of a jaxpr, and how often each one runs."""
    for e in jaxpr.eqns:
        yield e, 1
        for inner in jax.extend.core.jaxprs_in_params(e.params):
            for nested, times in equations(inner):
                yield nested, times * e.params.get("length", 1)


def test_dropout_masks_have_the_shapes_of_t5x():
    # A mask is shared by all positions of a row, except at the end of the encoder, and
    # that of attention by all queries.
    cfg = change(model=dict(dropout=0.1, num_layers=1, num_decoder_layers=1))
    B, S, T = 2, cfg.data.inputs_length, cfg.data.targets_length
    D, F, H = cfg.model.d_model, cfg.model.d_ff, cfg.model.num_heads
    batch, params = make_batch(cfg, [(30, 8), (12, 5)]), make_params(cfg)
    trace = jax.make_jaxpr(model.forward, static_argnums=2)
    jaxpr = trace(params, batch, cfg.model, jax.random.key(0))
    drawn = [
        e.outvars[0].aval.shape
        for e, _ in equations(jaxpr.jaxpr)
        if e.primitive.name == "random_bits"
    ]
    both = [(B, 1, D)] * 6 + [(B, 1, F)] * 2  # embedding, attention, MLP; hidden layer
    encoder, decoder = [(B, H, S, 1), (B, S, D)], [(B, H, T, 1), (B, H, S, 1)]
    assert sorted(drawn) == sorted(both + encoder + decoder + [(B, 1, D)] * 2)


def test_dropped_values_equal_dropped_probabilities():
    q, k, v, _, mask = make_attention()
    key = jax.random.key(1)
    dropped = model.dropout(jnp.asarray(v), 0.3, key, broadcast_axis=3)
    kept = np.asarray(dropped[..., 0] / v[..., 0])  # [B, H, K]: 0 or 1 / 0.7
    assert set(np.round(kept, 4).ravel()) == {0.0, np.float32(1.4286)}
    found = model.dot_product_attention(q, k, dropped, mask)[:, :, :-1]
    scores = np.where(mask, q @ k.swapaxes(2, 3), -np.inf)[:, :, :-1]
    expected = (np.asarray(jax.nn.softmax(scores)) * kept[:, :, None]) @ v
    assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    # Without a key, or at rate 0, nothing is dropped.
    assert model.dropout(v, 0.3, None) is v and model.dropout(v, 0.0, key) is v


def test_bfloat16_is_near_float32():
    params, batch = make_params(SMALL), make_batch(SMALL)
    half = change(model=dict(dtype="bfloat16"))
    (exact, _), exact_grads = loss_and_gradients(params, batch, SMALL)
    (loss, sums), grads = loss_and_gradients(params, batch, half)
    assert forward(params, batch, half.model).dtype == jnp.float32
    assert abs(loss / exact - 1) < 0.01
    for g, exact in zip(*map(jax.tree.leaves, (grads, exact_grads)), strict=True):
        assert g.dtype == jnp.float32
        assert jnp.linalg.norm(g - exact) < 0.12 * jnp.linalg.norm(exact)


def test_the_loss_equals_that_of_t5x():
    case = json.load(recorded("t5x/loss.json"))
    logits, targets = jnp.array(case["logits"]), jnp.array(case["targets"])
    for one in case["cases"]:
        weights = jnp.array(case["weights"]) if one["weighted"] else 1.0
        options = one["z_loss"], one["label_smoothing"]
        losses = model.token_metrics(logits, targets, *options)
        loss, _, z_loss, correct = (jnp.sum(x * weights) for x in losses.values())
        factor = one["loss_normalizing_factor"] or 1
        found = loss / factor, z_loss / factor
        assert_allclose(found, (one["loss"], one["z_loss_value"]), rtol=2e-6)
        right = jnp.argmax(logits, axis=-1) == targets
        assert correct == jnp.sum(right * weights)


def test_flops_are_those_of_all_matmuls():
    cfg = change(data=dict(inputs_length=10), model=dict(relative_buckets=20))
    trace = jax.make_jaxpr(model.forward, static_argnums=2)
    program = trace(make_params(cfg), make_batch(cfg, [(10, 9)]), cfg.model).jaxpr
    total = 0
    for e, times in equations(program):
        if e.primitive.name == "dot_general":
            (contracted, _), _ = e.params["dimension_numbers"]
            size = math.prod(e.invars[0].aval.shape[i] for i in contracted)
            if size not in (1, 20):  # The relative biases do not count.
                total += 2 * times * math.prod(e.outvars[0].aval.shape) * size
    assert 3 * total == model.train_flops(cfg)


def test_the_command_lists_all_parameters():
    lines = run("model --config small_c4").splitlines()
    assert len(lines) == len(partition.flatten(model.param_table(ModelConfig()))) + 1
    assert re.match("76,961,152 parameters .* 106.25 GFLOP", lines[-1])


# ---- infer -----------------------------------------------------------------------------


@pytest.mark.parametrize("N", [1, 4])
def test_the_padded_queries_of_a_tpu_change_nothing(N, monkeypatch):
    q, k, v, table, mask = make_attention(queries=N)
    cases = (mask, table[:, None, :7]), (mask[:, :, :1], None)
    expected = [model.dot_product_attention(q, k, v, *case) for case in cases]
    monkeypatch.setattr(partition, "platform", lambda: "tpu")
    assert_close([infer.attend_few_queries(q, k, v, *case) for case in cases], expected)


def test_decoding_equals_that_of_t5x():
    """Greedy outputs, beams with several length penalties, and scores."""
    case, (params, cfg) = np.load(recorded("t5x/network/v11.npz")), recorded_model()
    inputs, targets = case["encoder_input_tokens"], case["decoder_target_tokens"]
    args, length = (params, inputs, inputs > 0, cfg), case["greedy"].shape[-1]
    ids, _ = infer.generate(*args, length)
    assert_equal(ids[:, 0], case["greedy"].reshape(len(inputs), -1))
    searches = [re.fullmatch(r"beam(\d+)_alpha([\d.]+)", name) for name in case]
    for found in filter(None, searches):
        decode = DecodeConfig(beams=int(found[1]), alpha=float(found[2]))
        ids, scores = infer.generate(*args, length, decode)
        assert_equal(ids[:, ::-1], case[found[0]])  # T5X has the best last
        expected = case[f"{found[0]}_scores"]
        assert_allclose(scores[:, ::-1], expected, rtol=1e-4)
    sides = [x[x > 0] for x in inputs], [x[x > 0] for x in targets]
    batch = pad_batch(*sides, inputs.shape[1], targets.shape[1])
    found = infer.score(params, batch, cfg)
    assert_allclose(found, case["target_scores"], rtol=1e-5)
    assert sum(map(bool, searches)) >= 3


@slow
@pytest.mark.parametrize("per_layer_bias", [False, True])
def test_decoding_beside_hugging_face(per_layer_bias, tmp_path):
    """Greedy outputs are equal. With length_penalty="length", beams have the same scores.

    In transformers, an output ends only if it is among the N best continuations. So where
    its best beam has ended, ours is equal or has a better score.
    """
    torch = pytest.importorskip("torch")
    # With these sizes, some outputs of the random weights end with EOS.
    sizes = dict(vocab_size=12, d_model=52, num_decoder_layers=2)
    cfg = change(model=dict(per_layer_bias=per_layer_bias, **sizes))
    source = write_model(tmp_path / "hf", cfg.model, hf_state(cfg.model))
    family = "UMT5" if per_layer_bias else "T5"
    network = of_transformers(source, f"{family}ForConditionalGeneration")
    params = params_of(source)
    batch = make_batch(cfg, [(n, 8) for n in range(1, 17)])
    inputs, segments = batch.inputs, batch.input_segments
    for beams, alpha in ((0, 0.0), (2, 0.0), (4, 0.6)):
        theirs = network.generate(
            input_ids=torch.tensor(np.array(inputs)).long(),
            attention_mask=torch.tensor(np.array(segments)).long(),
            num_beams=max(1, beams), length_penalty=alpha, max_new_tokens=10,
            do_sample=False, early_stopping="never", eos_token_id=1, pad_token_id=0,
            output_scores=True, return_dict_in_generate=True,
        )  # fmt: skip
        decode = DecodeConfig(beams=beams, alpha=alpha, length_penalty="length")
        ids, scores = infer.generate(params, inputs, segments, cfg.model, 10, decode)
        ids, others = np.asarray(ids[:, 0]), theirs.sequences[:, 1:].numpy()
        after_eos = np.cumsum(others == data.EOS, axis=1) > (others == data.EOS)
        others = np.where(after_eos, data.PAD, others)
        same = (ids[:, : others.shape[1]] == others).all(axis=1)
        ended = (others == data.EOS).any(axis=1)
        if not beams:
            assert same.all() and ended.any()
            continue
        scores, other_scores = np.asarray(scores[:, 0]), theirs.sequences_scores.numpy()
        equal, better = same & ended, ~same & ended
        assert equal.sum() >= 2 and same.sum() >= 8
        assert_allclose(scores[equal], other_scores[equal], rtol=1e-4)
        assert (scores > other_scores)[better].all()


def search_slowly(params, cfg, inputs, length, decode):
    """T5X's beam search for one example in plain Python, without a cache."""
    N = decode.beams

    def log_probs(ids):
        batch = pad_batch([inputs], [[*ids, 2][:length]], 36, length)
        segments = np.ones((1, length), int)  # PAD is an id like any other
        shifted = np.int32([[0, *ids, *[0] * length][:length]])
        batch = batch._replace(decoder_inputs=shifted, target_segments=segments)
        return np.asarray(jax.nn.log_softmax(forward(params, batch, cfg)[0, len(ids)]))

    live, finished = [(0.0, [])], []
    for step in range(length):
        found = [
            (total + float(p), [*ids, token])
            for total, ids in live
            for token, p in enumerate(log_probs(ids))
        ]
        found = sorted(found, reverse=True)[: 2 * N]
        penalty = infer.length_penalty(step + 1, decode)
        finished += [(total / penalty, ids) for total, ids in found if ids[-1] == 1]
        finished = sorted(finished, reverse=True)[:N]
        live = [(total, ids) for total, ids in found if ids[-1] != 1][:N]
        bound = live[0][0] / infer.length_penalty(length + 1, decode)
        if len(finished) == N and finished[-1][0] > bound:
            break
    return finished or live


@pytest.mark.parametrize(
    "beams, alpha, penalty",
    [(1, 0.6, "gnmt"), (2, 0.0, "gnmt"), (4, 1.0, "gnmt"), (3, 1.0, "length")],
)
def test_beam_search_equals_a_search_in_plain_python(beams, alpha, penalty):
    cfg = change(model=dict(vocab_size=12, num_decoder_layers=2))
    params, batch = make_params(cfg, seed=8), make_batch(cfg, [(30, 5), (9, 5), (1, 5)])
    decode = DecodeConfig(beams=beams, alpha=alpha, length_penalty=penalty)
    pair = batch.inputs, batch.input_segments
    ids, scores = infer.generate(params, *pair, cfg.model, 5, decode)
    for row, got, total in zip(np.asarray(batch.inputs), ids, scores):
        expected = search_slowly(params, cfg.model, row[row > 0], 5, decode)
        for (score, answer), x, y in zip(expected, got.tolist(), total, strict=False):
            assert x == answer + [0] * (5 - len(answer))
            assert_allclose(y, score, rtol=1e-4)


def test_the_search_goes_on_while_a_live_beam_can_win():
    """Its score can be at most what it is now, divided by the largest penalty, 9."""
    decode = DecodeConfig(beams=1, alpha=1.0, length_penalty="length")
    log_probs = jax.nn.log_softmax(jnp.zeros((1, 1, 6)).at[..., 5].set(50.0))
    state = infer.start_beams(1, 1, 8)
    ended = jnp.array([[-1.0]])
    for live, done in ((-8.9, False), (-9.1, True)):
        begun = state._replace(scores=jnp.array([[live]]), finished_scores=ended)
        assert infer.extend_beams(begun, log_probs, 2, decode_cfg=decode).done == done


def test_an_ended_output_is_padded_and_outputs_are_sorted_by_score():
    state = infer.start_outputs(2, 1, 3)
    log_probs = jnp.log(jnp.array([[[0.1, 0.6, 0.3]], [[0.2, 0.3, 0.5]]]))
    options = dict(decode_cfg=DecodeConfig(), rngs=None)
    for at in range(2):
        state = infer.append_ids(state, log_probs, at, **options)
    assert state.ids[:, 0].tolist() == [[1, 0, 0], [2, 2, 0]]
    assert_close(state.scores[:, 0], np.log([0.6, 0.25]), 1e-6)
    three = jnp.array([[[0], [1], [2]]]), jnp.array([[-3.0, -1, -2]])
    ids, scores = infer.sorted_outputs(infer.OutputState(*three, None))
    assert ids[0, :, 0].tolist() == [1, 2, 0] and scores.tolist() == [[-1, -2, -3]]


@pytest.mark.parametrize(
    "top_k, top_p, kept",
    [
        (0, 0.0, [0, 1, 2, 3]),
        (1, 0.0, [1]),
        (2, 0.0, [1, 2]),
        (3, 0.0, [0, 1, 2, 3]),  # as in T5X, equal ids are kept
        (0, 0.5, [1]),
        (0, 0.7, [1, 2]),
        (2, 0.6, [1]),  # top_k comes first: 0.5 / 0.75 is enough
    ],
)
def test_top_k_and_top_p_keep_the_most_probable_ids(top_k, top_p, kept):
    logits = jnp.log(jnp.array([[0.125, 0.5, 0.25, 0.125]]))
    found = np.isfinite(infer.filter_logits(logits, top_k, top_p)[0])
    assert np.flatnonzero(found).tolist() == kept


def test_an_output_ends_before_eos_and_has_no_padding():
    assert infer.cut_at_eos(np.array([5, 0, 6, 1, 7])) == [5, 6]


SAMPLING = {}, {"top_k": 3}, {"top_p": 0.5}, {"top_k": 3, "temperature": 0.0}


@pytest.mark.parametrize("options", SAMPLING, ids=str)
def test_samples_have_the_distribution_of_the_model(options):
    """With top_k, a temperature of 0 means 1."""
    logits = np.random.default_rng(0).normal(0, 1.5, 12)
    log_probs = np.broadcast_to(jax.nn.log_softmax(logits), (8, 500, 12))
    weights = np.exp(logits / (options.get("temperature", 0.7) or 1.0))
    share = weights / weights.sum()
    order = np.argsort(-logits)
    nucleus = 1 + int((np.cumsum(share[order]) < 0.5).sum())
    kept = order[: options.get("top_k", nucleus if options else 12)]
    expected = np.zeros(12)
    expected[kept] = share[kept] / share[kept].sum()
    decode = DecodeConfig(num_return=500, **{"temperature": 0.7, **options})
    rngs = infer.output_rngs(5, jnp.arange(8), 500)
    ids = infer.sample(log_probs, 0, decode, rngs)
    counts = np.bincount(np.ravel(ids), minlength=12) / ids.size
    assert abs(counts - expected).max() < 0.03 and not counts[expected == 0].any()


def test_samples_depend_on_the_example_the_sample_the_position_and_the_seed():
    log_probs, decode = jnp.zeros((3, 2, 500)), DecodeConfig(temperature=1.0)

    def draw(rows, at=0, seed=0):
        rngs = infer.output_rngs(seed, jnp.array(rows), 2)
        return infer.sample(log_probs, at, decode, rngs)

    first = draw([7, 8, 9])
    assert_equal(draw([9, 7, 8]), first[jnp.array([2, 0, 1])])
    for other in (first[:, ::-1], draw([7, 8, 9], at=1), draw([7, 8, 9], seed=1)):
        assert (first != other).all()


@pytest.mark.parametrize(
    "mode, decode",
    [
        ("predict", {}),
        ("predict", dict(beams=3, num_return=2)),
        ("predict", dict(temperature=0.8, top_k=20, num_return=2)),
        ("score", {}),
    ],
    ids=str,
)
def test_results_do_not_depend_on_the_batch_or_the_mesh(mode, decode):
    """They come in the order of the examples, although batches are sorted by length."""
    rng, examples = np.random.default_rng(0), []
    for pair in [(5, 3), (30, 8), (1, 5), (16, 2), (7, 20), (2, 4)]:
        ids = (rng.integers(3, 256, length).tolist() for length in pair)
        examples.append(infer.Request(*ids, index=len(examples)))
    weights = jax.device_get(make_params(SMALL))

    def results(groups, devices, **mesh):
        batches = dict(batch_size=8, **decode)
        cfg = change(data=dict(targets_length=6), decode=batches, mesh=mesh)
        partition.set_mesh(cfg, jax.devices()[:devices])
        args = place(weights, cfg), cfg
        return [x for group in groups for x in infer.process_requests(*args, group, mode)]

    found = results([examples], 8, model=2), results([[x] for x in examples], 1)
    if mode == "predict":
        ids, found = zip(*(zip(*pairs) for pairs in found))
        assert ids[0] == ids[1]
    for scores, others in zip(*found, strict=True):
        assert_allclose(scores, others, rtol=1e-4)


def test_the_id_0_is_padding_wherever_it_stands():
    params, cfg = make_params(SMALL), change(data=dict(targets_length=6))
    pairs = ([5, 6, 7, 1], [8, 9, 1]), ([5, 6, 7, 1, 0, 0], [8, 9, 1, 0])
    examples = [infer.Request(*pair) for pair in pairs]
    for mode in ("predict", "score", "encode"):
        results = infer.process_requests(params, cfg, examples, mode)
        assert_equal(*results)
    inner = infer.Request([5, 0, 6, 1], [8, 0, 9, 1])
    batch = pad_batch([inner.inputs], [inner.targets], 4, 4)
    hidden = np.int32([[1, 0, 1, 1]])  # no query may see the key of the id 0
    batch = batch._replace(input_segments=hidden, target_segments=hidden)
    (found,) = infer.process_requests(params, cfg, [inner], "score")
    assert_allclose(found, infer.score(params, batch, cfg.model)[0], rtol=1e-5)
    with pytest.raises(UserError, match="padding"):  # softmax over no key at all
        infer.process_requests(params, cfg, [inner, infer.Request([0, 0], [1])])


def test_beams_without_an_output_are_left_out():
    """With 5 ids and length 1, five outputs are possible, and one of them ends."""
    decode = dict(beams=8, num_return=8, max_length=1)
    cfg = change(model=dict(vocab_size=5), decode=decode)
    request = infer.Request([2, 3, 1])
    (found,) = infer.process_requests(make_params(cfg), cfg, [request])
    fields = infer.result_fields({"inputs": [2]}, found, cfg, None, "predict")
    assert fields["predictions"] == [[]] and len(fields["scores"]) == 1


def test_vectors_are_means_over_the_inputs_without_padding(one_device):
    lengths = [*UNEVEN, (1, 1)]
    params, batch = make_params(SMALL), make_batch(lengths=lengths)
    sides = batch.inputs, batch.input_segments
    vectors = np.asarray(model.encode(params, *sides, SMALL.model))
    means = [row[:n].mean(axis=0) for row, (n, _) in zip(vectors, lengths)]
    assert_close(infer.mean_embeddings(params, batch, SMALL.model), np.array(means))


def test_few_lengths_of_batches_mean_few_compilations():
    lengths = {0: 16, 16: 16, 17: 32, 500: 512, 513: 1024, 1025: 1536}
    assert {n: infer.padded_length([[], [7] * n]) for n in lengths} == lengths


# ---- infer: files ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def byte_run(tmp_path_factory):
    """A run with random weights at the steps 1 and 2, whose vocabulary is bytes."""
    run = tmp_path_factory.mktemp("runs") / "bytes"
    partition.set_mesh(SMALL, jax.devices()[:1])
    cfg = change(
        model=dict(vocab_size=260, num_layers=1, num_decoder_layers=1),
        data=dict(task="text_to_text", vocab="bytes", extra_ids=0, targets_length=8),
        decode=dict(batch_size=4),
    )
    configs.save_run(cfg, run, vocabulary=data.load_tokenizer(cfg).sha256)
    checkpoints = partition.Checkpoints(run)
    for step in (1, 2):
        arrays = partition.flatten({"params": make_params(cfg, seed=step)})
        checkpoints.save(arrays, step)
    return run


LINES = [{"inputs": "a" * n, "targets": "b" * (n % 3), "id": n} for n in range(1, 18)]
LINES[4] = {"inputs": [5, 0, 6, 1], "targets": [7, 1]}


@pytest.fixture
def answer(byte_run, tmp_path, monkeypatch):
    """A function that calls infer.py --input in.jsonl --output NAME, and returns bytes."""
    monkeypatch.chdir(tmp_path)
    write_jsonl(Path("in.jsonl"), LINES)

    def answer_lines(output, *flags):
        flags = " ".join(map(str, flags))
        run(f"infer --run_dir {byte_run} --input in.jsonl --output {output} {flags}")
        return Path(output).read_bytes()

    return answer_lines


def test_each_line_gets_a_result_of_its_kind(answer):
    for line, given in zip(answer("a.jsonl").splitlines(), LINES, strict=True):
        line = json.loads(line)
        assert type(line.pop("prediction")) is type(line["inputs"]) and line == given
    scored = answer("b.jsonl", "--mode", "score").splitlines()
    assert all(json.loads(line)["score"] < 0 for line in scored)
    encoded = answer("c.jsonl", "--mode", "encode").splitlines()
    assert all(len(json.loads(line)["embedding"]) == 40 for line in encoded)
    flags = "--decode.beams", 3, "--decode.num_return", 2
    best = json.loads(answer("d.jsonl", *flags).splitlines()[0])
    assert best["prediction"] == best["predictions"][0]
    assert best["scores"] == sorted(best["scores"], reverse=True)


def test_an_answer_file_is_complete_or_missing(answer, monkeypatch):
    """A long file is answered in blocks, whose answers are in the order of the lines."""
    short = answer("short.jsonl")
    write_jsonl(Path("in.jsonl"), LINES * 31)  # 527 lines, and a block has 512
    results = infer.process_requests

    def stop_at_the_second_block(params, cfg, block, mode):
        if len(block) < 512:
            raise KeyboardInterrupt
        return results(params, cfg, block, mode)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(infer, "process_requests", stop_at_the_second_block)
        answer("long.jsonl")
    assert not Path("long.jsonl").exists()
    assert answer("long.jsonl") == short * 31


def test_a_finished_file_is_not_touched(answer):
    answer("a.jsonl")
    with pytest.raises(UserError, match="a.jsonl"):
        answer("a.jsonl")


def test_shards_share_the_lines_and_keep_their_random_samples(answer, monkeypatch):
    sampling = "--decode.temperature", 2.0
    whole = answer("whole.jsonl", *sampling).splitlines()
    for i in range(3):
        part = answer(f"{i}.jsonl", "--shard", f"{i}/3", *sampling).splitlines()
        assert part == whole[i::3]
    with pytest.raises(UserError):
        answer("3.jsonl", "--shard", "3/3")
    # While this one works, another shard writes the same file, which it must not replace.
    monkeypatch.setattr(infer, "to_json", lambda _: Path("out").write_bytes(b"a") * b"\n")
    with pytest.raises(UserError, match="exists"):
        answer("out")
    assert Path("out").read_bytes() == b"a"


@pytest.mark.parametrize(
    "line",
    ['{"x": 1}', '{"inputs": [5, 260]}', '{"inputs": [-1]}', '{"inputs": ["5"]}',
     '{"inputs": [5.0]}', '{"inputs": 5}', "[5]", "nope"],
)  # fmt: skip
def test_a_line_that_is_neither_text_nor_ids_is_named(answer, line):
    Path("in.jsonl").write_text(f'{{"inputs": "a"}}\n{line}\n')
    with pytest.raises((SystemExit, Exception)) as error:
        answer("a.jsonl")
    notes = getattr(error.value, "__notes__", "")
    assert re.search("example 2|in.jsonl:2", f"{error.value} {notes}")


def test_tasks_are_answered_as_they_are_trained(answer, monkeypatch):
    """The ids of a task have EOS where the task says so, also if its inputs are ids."""
    rows = [{"inputs": [5, 6], "targets": [7]}, {"inputs": "ab", "targets": "c"}]
    write_jsonl(Path("task.jsonl"), rows)
    seen = []

    def record(params, cfg, examples, mode):
        seen.extend(examples)
        return [-1.0] * len(examples)

    monkeypatch.setattr(infer, "process_requests", record)
    for name, eos in (("with", True), ("without", False)):
        task = data.Task("jsonl:task.jsonl", eos_in_inputs=eos)
        monkeypatch.setitem(data.TASKS, name, task)
        task_flags = "--input", f"task:{name}:validation"
        answer(f"{name}.jsonl", "--mode", "score", *task_flags)
    answer("file.jsonl", "--mode", "score", "--input", "task.jsonl")
    byte = [ord(c) + 3 for c in "abc"]
    inputs = [list(x.inputs) for x in seen]
    ended = [[5, 6, 1], [*byte[:2], 1]]
    assert inputs == [*ended, [5, 6], byte[:2], *ended]
    assert [list(x.targets) for x in seen] == [[7, 1], [byte[2], 1]] * 3


def test_blanks_are_filled_with_the_text_behind_their_sentinel():
    class Words:
        decode = staticmethod(" ".join)

    inputs = "a <extra_id_0> c <extra_id_1> e".split()
    targets = "x <extra_id_7> y <extra_id_1> d d".split()
    assert infer.fill_blanks(inputs, targets, Words) == "a ____ c [d d] e"


def test_a_text_is_answered_on_standard_output(byte_run, tmp_path):
    flags = "--run_dir", byte_run, "--decode.num_return", 2, "--decode.beams", 2
    more = "--decode.write_scores", "True"
    both = command("infer.py", *flags, *more, stdin="a\nb\n")
    one = run(f"infer --run_dir {byte_run} --decode.num_return 2 --decode.beams 2 a")
    scores, texts = zip(*(line.split("\t") for line in both.splitlines()))
    assert one.splitlines() == list(texts[:2]) and len(scores) == 4
    assert float(scores[0]) >= float(scores[1])


# ---- evaluate --------------------------------------------------------------------------


# metric, targets, predictions, the result of t5 0.9.4
METRIC_CASES = [
    ("accuracy", ["a", "b", "c"], ["a", "b", "x"], {"accuracy": 66.66666666666666}),
    ("f1", [1, 0, 1, 0], [1, -1, -1, 0], {"f1": 50.0}),
    ("f1", [0, 0], [0, 0], {"f1": 0.0}),
    ("f1", [1, -1], [1, 0], {"f1": 100.0}),
    ("squad", [["The cat", "a dog!"], ["x y"], [""]], ["cat", "y z", ""],
     {"em": 66.66666666666666, "f1": 50.0}),
    ("rouge", ["a b c d", "x"], ["a b c e", "y"],
     {"rouge1": 37.5, "rouge2": 100 / 3, "rougeLsum": 37.5}),
    ("bleu", ["a b c d e"], ["a b c d"], {"bleu": 100 * math.exp(1 - 5 / 4)}),
    ("bleu", ["naïve 東京 (x) ."], ["naïve 東京 ( x )."], {"bleu": 100.0}),
]  # fmt: skip


@pytest.mark.parametrize("name, targets, predictions, expected", METRIC_CASES)
def test_metrics_equal_those_of_t5(name, targets, predictions, expected):
    found = evaluate.METRICS[name](targets, predictions)
    assert found == pytest.approx(expected, rel=1e-9, nan_ok=True)


def test_bleu_compares_a_prediction_with_all_of_its_own_references():
    """Also if an example has as many references as there are examples."""
    bleu, predictions = evaluate.METRICS["bleu"], ["a b c d", "e f g h"]
    assert bleu([["a b c d", "x"], ["y", "e f g h"]], predictions)["bleu"] > 99.9
    assert bleu([["a b c d"], ["y", "z", "e f g h"]], predictions)["bleu"] > 99.9
    swapped = [["a b c d", "e f g h"], ["e f g h", "a b c d"]]
    assert bleu(swapped[::-1], predictions[::-1]) == bleu(swapped, predictions)
    assert bleu([["x", "e f g h"], ["a b c d", "y"]], predictions)["bleu"] < 1


@pytest.mark.parametrize(
    "name, targets, predictions",
    [("accuracy", [["a"], "b"], ["a", "b"]), ("accuracy", [1, 0], [1]),
     ("squad", ["the cat"], ["the cat"])],
)  # fmt: skip
def test_metrics_refuse_targets_that_they_would_misread(name, targets, predictions):
    with pytest.raises((TypeError, ValueError)):
        evaluate.METRICS[name](targets, predictions)


CITY = ["Paris", "the city"]


@pytest.mark.parametrize(
    "given, expected",
    [
        *((CITY, CITY), (tuple(CITY), CITY), (np.array(CITY), CITY)),
        ({"text": CITY, "answer_start": [0, 3]}, CITY),  # as on the Hugging Face Hub
        *(("Paris", ["Paris"]), ({"text": "Paris"}, ["Paris"])),
        *(([], None), ("", None), ({"text": []}, None)),
    ],
    ids=str,
)
def test_answers_of_squad_are_a_text_or_a_list_or_a_dict(given, expected):
    task, example = data.Task(postprocess="answers"), {"answers": given}
    assert evaluate.postprocess(task, "x", example, is_target=False) == "x"
    if expected is None:
        with pytest.raises(UserError):
            evaluate.postprocess(task, "x", example, is_target=True)
        return
    found = evaluate.postprocess(task, "x", example, is_target=True)
    assert found == expected
    assert evaluate.METRICS["squad"]([found], ["paris"]) == {"em": 100.0, "f1": 100.0}


def ranked(correct, counts, weights=None):
    """Choices (index, is_correct, weight, length), for sets of correct choices."""
    return [
        ((i, j), j in right, (weights or {}).get(i, 1.0), j + 1)
        for i, (right, n) in enumerate(zip(correct, counts))
        for j in range(n)
    ]


def test_rank_classification_equals_that_of_t5():
    """With two and three choices, ties, weights, and several correct choices."""
    rank = evaluate.rank_classification
    two = ranked([{0}, {1}, {1}, {0}], [2] * 4, {0: 0.5})
    scores = [-1.0, -2.0, -3.0, -1.0, -1.0, -1.0, -2.0, -1.5]
    expected = {"accuracy": 150 / 3.5, "f1": 50.0, "auc-roc": 200 / 3, "auc-pr": 250 / 3}
    assert rank(two, scores, 2) == pytest.approx(expected, abs=1e-3)
    shuffled = [3, 0, 7, 2, 1, 6, 5, 4]
    found = rank([two[i] for i in shuffled], [scores[i] for i in shuffled], 2)
    assert found == rank(two, scores, 2)
    uneven = ranked([{0}, {2}, {0}], [2, 3, 1])
    assert rank(uneven, [-2, -1, -3, -2, -1, 0])["accuracy"] == pytest.approx(200 / 3)
    normalized = rank(uneven, [-2, -3, -3, -2, -3, 0], normalize=True)
    assert normalized["accuracy"] == pytest.approx(100 / 3)
    several = ranked([{0, 1}, {2}], [3, 3])
    assert rank(several, [0, 1, -1, 0, 1, 0], 3) == {"accuracy": 50.0}
    three = rank(ranked([{0}, {2}], [3, 3]), [1, 0, 0, 1, 0, 0], 3)
    assert three == {"accuracy": 50.0, "mean_3class_f1": pytest.approx(200 / 9)}
    # An example has the weight of its first choice, or without classes, of its answer.
    weighted = ranked([{1}, {0}], [2, 2])
    weighted[1] = ((0, 1), True, 3.0, 1)
    assert rank(weighted, [0, 1, 0, 1], 2)["accuracy"] == 50.0
    assert rank(weighted, [0, 1, 0, 1]) == {"accuracy": 75.0}
    with pytest.raises(ValueError, match="idx"):
        rank(two + two[:1], [*scores, 0.0])


@pytest.mark.parametrize(
    "row, correct",
    [
        ({"targets": "yes"}, 1),
        ({"targets": " Yes\n"}, 1),
        ({"targets": "b", "answer_choices": [" a", " B "]}, 1),
        ({"targets": "1", "answer_choices": [1, 2]}, 0),
        ({"targets": "maybe"}, None),
        ({"targets": "a", "answer_choices": ["a", "b", "B "]}, None),
        ({"targets": "a", "answer_choices": []}, None),
        ({"targets": "a", "answer_choices": "abc"}, None),
    ],
)
def test_the_target_must_be_one_of_different_choices(row, correct):
    task = data.Task(choices=("no", "yes"))
    if correct is None:
        with pytest.raises(UserError, match="Example 4 of mine"):
            evaluate.answer_choices("mine", task, 3, row)
        return
    choices = evaluate.answer_choices("mine", task, 3, row | {"idx": 7})
    assert [x["is_correct"] for x in choices] == [i == correct for i in range(2)]
    assert [x["idx"] for x in choices] == [(3, 0), (3, 1)]
    texts = row.get("answer_choices", ["no", "yes"])
    assert [x["targets"] for x in choices] == list(map(str, texts))


def test_the_loss_is_a_mean_over_all_tokens_of_all_batches():
    """content_loss leaves out EOS and sentinels. A uniform model needs log V nats."""
    settings = dict(vocab="bytes", extra_ids=20, task="x")
    cfg = change(model=dict(vocab_size=300), data=settings)
    tokenizer, texts = data.load_tokenizer(cfg), ["aé", "b", "abc<extra_id_0>de"]
    params = make_params(cfg)
    targets = [[*ids, data.EOS] for ids in tokenizer.encode(texts)]
    batches = [pad_batch([[5, 1]] * n, targets[-n:], 2, 9) for n in (1, 3)]
    logits = [forward(params, batch, cfg.model) for batch in batches]
    ids = np.concatenate([batch.targets for batch in batches])
    losses = model.token_metrics(np.concatenate(logits), ids)
    assert not np.any(losses["z_loss"])  # the default of token_metrics
    losses = np.asarray(losses["cross_ent_loss"])
    content = losses[(ids > 1) & (ids < 259)]
    found = evaluate.evaluate_loss(params, cfg, batches, tokenizer)
    assert found["cross_ent_loss"] == pytest.approx(losses[ids > 0].mean(), rel=1e-5)
    assert found["content_loss"] == pytest.approx(content.mean(), rel=1e-5)
    assert found["loss"] == pytest.approx(found["cross_ent_loss"] + found["z_loss"])
    smoothed = change(cfg, train=dict(label_smoothing=0.1))
    smoothed = evaluate.evaluate_loss(params, smoothed, batches, tokenizer)
    assert smoothed["loss"] != found["loss"]
    params["unembed"] *= 0
    found = evaluate.evaluate_loss(params, cfg, batches, tokenizer)
    assert found["content_loss"] == pytest.approx(math.log(300), rel=1e-5)


def test_a_text_becomes_a_value_and_the_values_become_metrics():
    rows = [{"add": 2}, {"add": 0}]
    number = lambda text, example, is_target: int(text) + example["add"] * is_target
    half = lambda targets, predictions: {"half": 0.5 * len(targets)}
    task = data.Task(metrics=("accuracy", half), postprocess=number)
    texts = ["4", "7"], ["5", "7"]
    metrics, lines = evaluate.compute_metrics(task, rows, *texts)
    assert lines[0] == {"add": 2, "output": "5", "target": 6, "prediction": 5}
    assert metrics == {"accuracy": 50.0, "half": 1.0}
    label = data.Task(choices=("no", "yes"), postprocess="label")
    metrics, lines = evaluate.compute_metrics(label, rows, ["yes", "no"], ["yes", "No"])
    assert [(x["target"], x["prediction"]) for x in lines] == [(1, 1), (0, -1)]
    assert metrics == {"accuracy": 50.0}  # by default
    for wrong, error, named in (
        ((half, half), UserError, "half"),
        (("f2",), KeyError, "f2"),
        ((max,), UserError, "dict"),
    ):
        with pytest.raises(error, match=named):
            evaluate.compute_metrics(task._replace(metrics=wrong), rows, *texts)


@pytest.fixture
def evaluated(byte_run, tmp_path, monkeypatch):
    """A function that evaluates byte_run on a task with some rows."""
    cfg, _ = configs.load_run(byte_run)
    params = infer.load_params(cfg, byte_run, 1)
    configs.print_once.cache_clear()

    def evaluate_rows(function, rows, split="validation", **task):
        source = write_jsonl(tmp_path / "rows.jsonl", rows)
        monkeypatch.setitem(data.TASKS, "mine", data.Task(source, **task))
        return function(params, cfg, "mine", split, data.load_tokenizer(cfg))

    return evaluate_rows


def test_targets_that_cannot_be_written_are_reported(evaluated, capsys):
    """--data.targets_length 8 cuts the second target, so its accuracy is at most 50."""

    def check(params, cfg, name, split, tokenizer):
        evaluate.check_metrics(name, split, cfg, tokenizer)

    rows = [{"inputs": "a", "targets": "short"}, {"inputs": "b", "targets": "longer one"}]
    evaluated(check, rows)
    assert re.search(r"'accuracy': 50\.0.*'accuracy': 100\.0", capsys.readouterr().err)
    metrics, lines = evaluated(evaluate.predict, rows)
    assert metrics == {"accuracy": 0.0}
    assert [line["target"] for line in lines] == ["short", "longer one"]
    evaluated(check, rows[:1])
    assert not capsys.readouterr().err
    evaluated(check, 200 * rows[:1] + rows[1:])
    assert "99.5" in capsys.readouterr().err
    ids = [{"inputs": [5, 6], "targets": [118, 107, 1]}]
    _, (line,) = evaluated(evaluate.predict, ids, metrics=("bleu",))
    assert line["target"] == "sh" and type(line["prediction"]) is str
    evaluated(check, ids, metrics=("bleu",))
    assert "'bleu': 0.0" in capsys.readouterr().err


def test_labels_that_are_no_choices_are_reported(evaluated, capsys):
    rows = [{"inputs": "a", "targets": "<unk>"}, {"inputs": "b", "targets": "no"}]
    evaluated(evaluate.predict, rows, choices=("no", "yes"), postprocess="label")
    assert "<unk>" in capsys.readouterr().err


def test_rank_writes_the_chosen_answer_of_each_example(evaluated):
    """P3 stores each choice as a row, which gives the same answers."""
    rows = [{"inputs": "a?", "targets": "no"}, {"inputs": "bb?", "targets": " Yes"}]
    options = dict(choices=("no", "yes"), eos_in_inputs=False)
    metrics, lines = evaluated(evaluate.rank, rows, **options)
    assert metrics.keys() == {"accuracy", "f1", "auc-roc", "auc-pr"} and len(lines) == 2
    for line in lines:
        best = np.argmax(line["scores"])
        assert line["prediction"] == line["choices"][best]
        assert line["is_correct"] == (line["prediction"] == line["targets"][0])
    assert [tuple(line["idx"]) for line in lines] == [(0, 0), (1, 0)]  # the first choices
    right = [line["is_correct"] for line in lines]
    assert metrics["accuracy"] == 100 * np.mean(right)
    rank_normalized = functools.partial(evaluate.rank, normalize=True)
    for line, other in zip(lines, evaluated(rank_normalized, rows, **options)[1]):
        assert_allclose(np.divide(line["scores"], [3, 4]), other["scores"])
    expanded = [
        {"inputs": row["inputs"], "targets": text, "idx": [i, j]}
        | {"is_correct": [int(i == j)], "weight": [1.0]}
        for i, row in enumerate(rows)
        for j, text in enumerate(("no", "yes"))
    ]
    again, other_lines = evaluated(evaluate.rank, expanded[::-1], eos_in_inputs=False)
    assert again == pytest.approx(metrics)
    for line, other in zip(lines, other_lines):
        assert line["prediction"] == other["prediction"]
        assert_allclose(line["scores"], other["scores"], rtol=1e-5)


def test_choices_that_become_equal_ids_are_refused(evaluated):
    """--data.targets_length 8 leaves 7 bytes of a choice."""
    choices = ["a long A", "a long B"]
    row = {"inputs": "a", "targets": "a long B", "answer_choices": choices}
    with pytest.raises(UserError, match="a long A.*a long B"):
        evaluated(evaluate.rank, [row])
    evaluated(evaluate.rank, [row | {"targets": "B", "answer_choices": ["A", "B"]}])


def test_the_loss_of_a_split_is_that_of_all_its_examples(evaluated, monkeypatch):
    rows = [{"inputs": str(n), "targets": "a"} for n in range(100)]
    partition.set_mesh(BYTES, jax.devices()[:3])  # They do not divide the 8 rows.
    count = lambda *args: [(len(x.targets), np.count_nonzero(x.targets)) for x in args[2]]
    monkeypatch.setattr(evaluate, "evaluate_loss", count)
    counts = [(9, 18)] * 11 + [(9, 2)]  # Each target has an EOS.
    assert evaluated(evaluate.loss_of_split, rows) == (counts, [])


def test_the_first_example_of_a_batch_is_shown(monkeypatch):
    pairs = [(np.array(a), np.array(b)) for a, b in (([60, 61], [62]), ([70], [71, 72]))]
    monkeypatch.setattr(infer, "process_requests", lambda *_: iter([([[63]], [0.0])]))
    for rows in ([pairs[:1], pairs[1:]], [pairs, []]):  # one in each row, or packed
        batch = data.fill_rows(rows, (4, 4))
        shown = evaluate.held_out_example(None, BYTES, batch, TOKENIZER)
        words = [line.split() for line in shown.splitlines()]
        texts = [TOKENIZER.decode(ids) for ids in ([60, 61], [62], [63])]
        assert words == [*map(list, zip(("inputs", "truth", "model"), texts))]


def test_a_task_without_pairs_or_split_is_refused(evaluated):
    rows, objective = [{"text": "a"}], data.SPAN_CORRUPTION
    for function in (evaluate.predict, evaluate.rank):
        for split in ("validation", "nowhere"):
            with pytest.raises(UserError, match="mine"):
                evaluated(function, rows, split, objective=objective)


OWN_TASKS = """
from configs import RECIPES
import data
length = lambda targets, predictions: {"length": float(len(targets))}
TASKS = {"own": data.Task("jsonl:rows.jsonl", metrics=(length, "accuracy"))}
CONFIG = RECIPES["tiny"]
"""


def test_the_command_evaluates_the_tasks_of_another_recipe_file(byte_run, tmp_path):
    """It appends metrics, and writes outputs, a table and a picture."""
    (tmp_path / "own.py").write_text(OWN_TASKS)
    rows = [{"inputs": str(n), "targets": "ab"[n % 2]} for n in range(7)]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    run = shutil.copytree(byte_run, tmp_path / "run")
    shutil.rmtree(run / "checkpoints/step_00000001")
    whole = '{"step": 1, "train/loss": 2.0}'  # The next line was cut by a kill.
    (run / "metrics.jsonl").write_text(whole + '\n{"step": 5, "tra')
    flags = "--run_dir", run, "--config", tmp_path / "own.py", "--tasks", "own"
    script = HERE / "evaluate.py"
    outputs = "--csv", "table.csv", "--plot", "curves.png"
    command(script, *flags, "--step", "all", *outputs, cwd=tmp_path)
    more = "--mode", "loss", "--output", "other", "--decode.beams", 2
    (tmp_path / "other").mkdir()
    (tmp_path / "other/metrics.jsonl").write_text('{"step": 1, "tra')
    command(script, *flags, *more, cwd=tmp_path)
    (line,) = map(json.loads, (run / "eval/metrics.jsonl").read_text().splitlines())
    group = "predict_eval/own"
    assert line.keys() == {"step", f"{group}/length", f"{group}/accuracy"}
    assert line["step"] == 2 and line["predict_eval/own/length"] == 7
    lines = (run / "eval/own-00000002.jsonl").read_text().splitlines()
    assert [json.loads(x)["inputs"] for x in lines] == [row["inputs"] for row in rows]
    names, row = (x.split(",") for x in (tmp_path / "table.csv").read_text().splitlines())
    assert dict(zip(names, row))["predict_eval/own/length"] == "7.0" and row[0] == "2"
    assert (tmp_path / "curves.png").stat().st_size > 1000
    (loss,) = evaluate.read_metrics([tmp_path / "other"]).values()
    assert loss["loss_eval/own/loss"] > 0


def test_the_command_warns_of_targets_that_are_cut(byte_run, here, capsys):
    source = write_jsonl(Path("long.jsonl"), [{"inputs": "a", "targets": "x" * 99}])
    command = f"evaluate --run_dir {byte_run} --output out --tasks {source} --mode"
    run(f"{command} loss")
    assert "accuracy" not in capsys.readouterr().err
    run(f"{command} predict")
    assert "'accuracy': 0.0" in capsys.readouterr().err


def test_tasks_without_held_out_examples_are_left_out(byte_run, here):
    source, none = write_pairs(Path("a.jsonl"), 4), "jsonl:none-{split}"
    command = f"evaluate --run_dir {byte_run} --output out"
    output = run(f"{command} --data.eval_tasks {none},{source}")
    assert re.search(rf"not evaluated.*none-.*\n{source}, val", output)
    for flags in (f"--data.eval_tasks {none},{none}", f"--tasks {none},{source}"):
        with pytest.raises(UserError, match="none-"):
            run(f"{command} {flags}")


def test_other_flags_get_columns_of_their_own(byte_run):
    run, _ = configs.load_run(byte_run)
    options = evaluate.Options(change(run, decode=dict(beams=4, batch_size=9)))
    name = evaluate.recorded_name
    assert name("t", "predict", options, run) == "t-beams=4"
    assert name("t", "loss", options, run) == "t"
    options = replace(options, split="test", normalize=True)
    assert name("t", "rank", options, run) == "t-rank-normalized-test"
    changes = dict(source="tsv:b", eval_tasks="t", inputs_length=9)
    options = evaluate.Options(change(run, data=changes))
    assert name("t", "loss", options, run) == "t-source=tsv:b-inputs_length=9"


# ---- train: learning rate and optimizer ------------------------------------------------


def test_learning_rates_equal_recorded_rates_of_t5x():
    names = {"factors": "schedule", "step_offset": "schedule_offset"}
    names |= {"base_learning_rate": "learning_rate"}
    for case in json.load(recorded("t5x/schedule.json")):
        steps, values = case.pop("steps"), case.pop("values")
        cfg = TrainConfig(**{names.get(key, key): value for key, value in case.items()})
        ours = [train.learning_rate(jnp.int32(step), cfg) for step in steps]
        assert_allclose(ours, values, rtol=1e-6, err_msg=cfg.schedule)
    wave = TrainConfig(1100, schedule="cosine_decay", warmup_steps=0, schedule_offset=100)
    assert train.learning_rate(600, wave) == pytest.approx(0.5)  # It ends with training.


def test_adafactor_equals_recorded_updates_of_t5x():
    """20 updates of factored and other parameters. One of the gradients is zero."""
    info = json.load(recorded("t5x/adafactor/t5x_defaults.json"))
    case = np.load(recorded("t5x/adafactor/t5x_defaults.npz"))
    shapes = info["shapes"]
    order = info["paths"]
    params = {path: jnp.asarray(case[f"param/{path}/0"]) for path in shapes}

    @jax.jit
    def update(rate, grads, slots, params):
        optimizer = train.adafactor(rate, TrainConfig())
        updates, slots = optimizer.update(grads, slots, params)
        return optax.apply_updates(params, updates), slots

    slots = train.adafactor(0.0, TrainConfig()).init(params)
    for step in range(info["steps"]):
        grads = {}
        for path in shapes:
            i = order.index(path)
            g = np.random.default_rng([step, i]).standard_normal(shapes[path])
            grads[path] = jnp.float32(g * 10.0 ** -(step % 4) * (step != 5 or i != 0))
        params, slots = update(case["lr"][step], grads, slots, params)
        for path, w in params.items():
            key, corner = f"param/{path}/{step + 1}", w[(slice(24),) * w.ndim]
            rms = np.sqrt(np.mean(np.float64(w) ** 2))
            found = {key: w, f"{key}/corner": corner, f"{key}/rms": rms}
            for name in found.keys() & set(case):  # of large parameters, only a corner
                assert_allclose(found[name], case[name], 1e-6, 1e-6, err_msg=name)
    for path in shapes:
        ours = [slots[0].v_row[path], slots[0].v_col[path], slots[0].v[path]]
        theirs = [case.get(f"state/{path}/{kind}") for kind in ("v_row", "v_col", "v")]
        # T5X calls the mean over the larger dimension v_row.
        theirs = {x.shape: x for x in theirs if x is not None}
        theirs.pop((1,), None)  # what is not used has the shape [1]
        for x in ours:
            if x.shape in theirs:
                assert_allclose(x, theirs[x.shape], 1e-5, err_msg=path)


def test_adafactor_treats_each_layer_as_an_array_of_its_own():
    """T5X has one array for each layer, and plain T5 stacks them."""
    rng = np.random.default_rng(0)
    w = jnp.float32(rng.normal(size=(3, 130, 140)) * [[[1]], [[5]], [[0.1]]])
    g = jnp.float32(rng.normal(size=w.shape) * [[[1e-3]], [[1]], [[100]]])

    def update(params, grads):
        optimizer = train.adafactor(0.1, TrainConfig(weight_decay=0.01))
        slots = optimizer.init(params)
        for scale in (1, 0.1):
            grads = jax.tree.map(lambda g: scale * g, grads)
            updates, slots = optimizer.update(grads, slots, params)
            params = optax.apply_updates(params, updates)
        return params

    stacked = update({"layers": {"up": w}}, {"layers": {"up": g}})["layers"]["up"]
    separate = update({f"{i}": w[i] for i in range(3)}, {f"{i}": g[i] for i in range(3)})
    assert_close(list(stacked), list(separate.values()), 1e-6)


@pytest.mark.parametrize("rate", [0.01, 1.0])
def test_weight_decay_of_adafactor_does_not_depend_on_the_learning_rate(rate):
    """Each update subtracts the fraction --train.weight_decay of a weight, as in T5X."""
    w = {"w": jnp.array([1.0, -2, 4])}
    optimizer = train.adafactor(rate, TrainConfig(weight_decay=0.25))
    updates, _ = optimizer.update({"w": jnp.zeros(3)}, optimizer.init(w), w)
    assert_close(optax.apply_updates(w, updates), {"w": np.array([0.75, -1.5, 3])})


@pytest.mark.parametrize("optimizer", ["adafactor", "adamw"])
def test_large_slots_are_split_like_their_parameters(optimizer):
    cfg = change(
        train=dict(optimizer=optimizer),
        model=dict(d_model=128, d_ff=256),
        mesh=dict(model=2, fsdp=True),
    )
    mesh, table = partition.set_mesh(cfg, jax.devices()), model.param_table(cfg.model)
    template = train.abstract_state(cfg)
    for param, p in partition.flatten(table).items():
        sharding = jax.NamedSharding(mesh, partition.spec(p.axes, True))
        for name, a in partition.flatten(template).items():
            if name.endswith(f"/{param}") and a.shape == p.shape:
                assert a.sharding == sharding
    sizes = [sum(a.size for a in jax.tree.leaves(tree)) for tree in template[1:]]
    share = sizes[1] / sizes[0]
    assert 2 <= share < 2.01 if optimizer == "adamw" else share < 0.5


# ---- train: the step -------------------------------------------------------------------


def test_a_step_with_dropout_microbatches_and_loss_divisor():
    """Seed and step choose the dropout masks, and each microbatch has its own.

    The masks are part of the results of a run, so they must never change. The divisor of
    T5X scales the gradients. The metrics stay means over real tokens.
    """
    cfg = change(model=dict(dropout=0.2), train=dict(seed=3, schedule="constant"))
    params, batch = make_params(cfg), make_batch(cfg)
    slots = train.adafactor(0.0, cfg.train).init(params)
    key = jax.random.fold_in(jax.random.key(3 + 1), 7)  # of step 7 with seed 3
    total = None
    for i, microbatch_key in enumerate(jax.random.split(key, 2)):
        half = jax.tree.map(lambda a: a[i::2], batch)
        means, sums = gradients(params, half, cfg, microbatch_key)
        part = jax.tree.map(lambda g: g * sums["tokens"] / 233472, means), sums
        total = jax.tree.map(jnp.add, total, part) if total else part
    grads, total = total
    assert total["tokens"] == 45
    cfg = change(cfg, train=dict(microbatches=2, loss_normalizing_factor=233472.0))
    state = train.TrainState(jnp.int32(7), params, slots)
    new, metrics = train_step(cfg, state, batch)
    expected = {
        **model.mean_metrics(total),
        "learning_rate": 1.0,
        "gradient_norm": optax.tree.norm(grads),
        "non_padding_fraction/inputs": np.mean(np.asarray(batch.inputs) > 0),
        "non_padding_fraction/targets": 45 / 72,
    }
    assert_close(metrics, expected)
    assert new.step == 8


def test_the_divisor_of_a_single_target_token_is_one():
    params, batch = make_params(SMALL), make_batch(SMALL, [(5, 1)] + [(0, 0)] * 7)
    mean, _ = gradients(params, batch, SMALL, None)
    _, of_sum = loss_and_gradients(params, batch, SMALL)
    assert_close(mean, of_sum)


def test_rows_that_the_devices_cannot_share_are_refused():
    for microbatches, devices in ((2, 8), (3, 1)):
        cfg = change(train=dict(microbatches=microbatches))
        mesh = partition.set_mesh(cfg, jax.devices()[:devices])
        with pytest.raises(UserError, match="batch_size 8"):
            train.lower_step(cfg, mesh)


# ---- train: runs -----------------------------------------------------------------------


def test_the_speed_counts_the_rows_since_the_last_line(tmp_path, quiet, monkeypatch):
    """The clock of this test counts how often it is read: 5 times for 16 rows."""
    clock = types.SimpleNamespace(perf_counter=itertools.count().__next__)
    monkeypatch.setattr(train, "time", clock)
    monkeypatch.setattr(train.Log, "sync", lambda _: None)  # Each line is there at once.
    train_small(tmp_path, log_every=2, eval_every=0, save_every=0)
    assert values_of(tmp_path, "timing/rows_per_second") == {2: 3.2, 4: 3.2, 6: 3.2}
    assert values_of(tmp_path, "timing/data_wait_fraction") == {2: 0.4, 4: 0.4, 6: 0.4}
    speed = pytest.approx(3.2e-12 * model.train_flops(small_run()))
    assert values_of(tmp_path, "timing/teraflops") == {2: speed, 4: speed, 6: speed}


def test_a_run_can_be_in_a_bucket(tmp_path, quiet, monkeypatch):
    """Cloud storage cannot rename a file or append to it. Here it is in memory."""
    for protocol in ("gs", "gcs"):
        fsspec.register_implementation(protocol, MemoryFileSystem, clobber=True)
    bucket = configs.to_path(f"gs://bucket/{tmp_path.name}")
    train_small(tmp_path)
    monkeypatch.setattr(train, "catch_signals", lambda: (1, 2, 3).__contains__)
    for _ in range(4):
        checkpoints = train_small(bucket)
    assert checkpoints.steps() == [2, 3, 6]
    assert shard_bytes(bucket) == shard_bytes(tmp_path)
    assert metric_lines(bucket) == metric_lines(tmp_path)
    for step in (1, 2):
        evaluate.save_metrics(bucket / "eval", step, "t", "rank", {"accuracy": 50.0}, [])
    line = {"predict_eval/t/accuracy": 50.0}
    assert evaluate.read_metrics([bucket / "eval"]) == {1: line, 2: line}


def test_a_signal_saves_and_stops_after_the_current_step(tmp_path, quiet, monkeypatch):
    train_small(tmp_path / "straight")
    monkeypatch.setattr(train, "catch_signals", lambda: (2, 3, 6).__contains__)
    for step in (2, 3):
        train_small(tmp_path / "stopped")
        assert partition.Checkpoints(tmp_path / "stopped").steps()[-1] == step
        assert not any("_eval/" in x for x in metric_lines(tmp_path / "stopped"))
    train_small(tmp_path / "stopped")
    assert shard_bytes(tmp_path / "straight") == shard_bytes(tmp_path / "stopped")
    assert metric_lines(tmp_path / "straight") == metric_lines(tmp_path / "stopped")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_stops_after_a_step_and_the_second_kills(number):
    handlers = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
    must_stop = train.catch_signals()
    assert not must_stop(1)
    os.kill(os.getpid(), number)
    assert must_stop(2)
    assert signal.getsignal(number) == signal.SIG_DFL
    for n, handler in handlers.items():
        signal.signal(n, handler)


def test_a_failed_evaluation_costs_no_training(tmp_path, quiet, monkeypatch):
    """Its checkpoint is complete, and the next start makes the evaluation."""

    def fail(*_):
        raise RuntimeError("a metric failed")

    with monkeypatch.context() as patch:
        patch.setattr(evaluate, "evaluate_loss", fail)
        with pytest.raises(RuntimeError, match="a metric failed"):
            train_small(tmp_path)
    assert partition.Checkpoints(tmp_path).steps() == [3]
    train_small(tmp_path)
    evaluated = [json.loads(x)["step"] for x in metric_lines(tmp_path) if "_eval/" in x]
    assert evaluated == [3, 6]


def test_weights_that_are_not_finite_are_never_saved(tmp_path, quiet, monkeypatch):
    load_state = train.load_state

    def load_nan(*args):
        state = load_state(*args)
        return state._replace(params=jax.tree.map(lambda w: w * jnp.nan, state.params))

    monkeypatch.setattr(train, "load_state", load_nan)
    for log_every, step in ((0, 3), (1, 1)):  # the first step that is saved or logged
        with pytest.raises(UserError, match=f"step {step},"):
            train_small(tmp_path, log_every=log_every)
    assert partition.Checkpoints(tmp_path).steps() == []


def test_a_metric_that_fails_stops_a_run_before_its_first_step(tmp_path, quiet, tables):
    source = write_jsonl(tmp_path / "a", [{"inputs": [5], "targets": [6]}])
    configs.TASKS["a"] = data.Task(source, metrics=("squad",))  # needs lists of answers
    with pytest.raises(TypeError, match="squad"):
        train.train(change(small_run(), data=dict(eval_tasks="a")), tmp_path / "run")
    assert not (tmp_path / "run/checkpoints").exists()


def test_a_run_can_start_with_the_weights_of_another_run(tmp_path, quiet, monkeypatch):
    """Or also with its optimizer and step. Its data begin anew."""
    source = train_small(tmp_path / "source").path(6)
    stored = convert.read_model(source).arrays
    started = []
    monkeypatch.setattr(train, "train_loop", lambda *args: started.append(args[2:4]) or 0)
    step = types.SimpleNamespace(compile=lambda: None)
    monkeypatch.setattr(train, "lower_step", lambda c, _: (train.abstract_state(c), step))
    train_small(tmp_path / "first")
    first_batch = next(started[-1][1])
    train_small(tmp_path / "a", tmp_path / "source", steps=1001, start_step=1000)
    names = partition.flatten(started[-1][0])
    assert names["step"] == 1000 and names["opt_state/0/count"] == 0
    params = [name for name in names if name.startswith("params/")]
    assert_equal([names[k] for k in params], [stored[k] for k in params])
    train_small(tmp_path / "b", source, restore="all", steps=9)
    state, batches = started[-1]
    names = partition.flatten(state)
    assert names["step"] == 6 and names["opt_state/0/count"] == 6
    assert_equal(names, {k: stored[k] for k in names})
    assert_equal(next(batches), first_batch)


@pytest.mark.parametrize(
    "source, changes, named",
    [
        ("", dict(steps=200, start_step=1000), "1000 .* 200"),
        ("", dict(steps=0), "0 .* 0"),
        ("", dict(steps=2000, start_step=1000), "init_from"),
        ("nothing", {}, "nothing"),
        ("RUN", dict(steps=2, restore="all"), "2 .* 2"),
    ],
)
def test_a_run_without_steps_or_weights_is_refused(
    source, changes, named, byte_run, tmp_path
):
    with pytest.raises(UserError, match=named):
        train_small(tmp_path / "run", source.replace("RUN", str(byte_run)), **changes)
    assert not (tmp_path / "run").exists()


def test_another_vocabulary_is_refused(tmp_path, quiet):
    train_small(tmp_path)
    cfg, metadata = configs.load_run(tmp_path)
    configs.save_run(cfg, tmp_path, **metadata | {"vocabulary": "of another file"})
    with pytest.raises(UserError, match="vocabulary"):
        train_small(tmp_path)


def test_an_infinite_gradient_or_rate_is_refused():
    metrics = {"gradient_norm": 2.0, "learning_rate": 0.1}
    train.refuse_infinite(metrics, 5)
    for name, value in itertools.product(metrics, (math.nan, math.inf)):
        with pytest.raises(UserError, match="step 5,"):
            train.refuse_infinite(metrics | {name: value}, 5)


def test_tasks_without_held_out_examples_do_not_stop_others(mixture, tmp_path):
    write_pairs(tmp_path / "b.validation", 5)
    assert [*train.Evaluator(mixture, TOKENIZER, None).groups] == ["loss_eval/b"]


def test_a_resumed_run_repeats_its_later_lines_and_events(tmp_path, monkeypatch):
    """Also for TensorBoard, through SummaryWriter of the optional library tensorboardX."""
    events = []

    class Writer:
        def __init__(self, folder, purge_step):
            self.place = str(Path(folder).relative_to(tmp_path)), purge_step

        def add_scalar(self, name, value, step):
            events.append((*self.place, name, value, step))

        def flush(self):
            pass

    monkeypatch.setattr(train, "SummaryWriter", Writer)
    log = train.Log(tmp_path, 0)
    log.write(1, "train", {"loss": np.float32(3)})
    log.write(2, "train", {"loss": np.float32(2)})
    train.Log(tmp_path, 1).write(2, "loss_eval/qa", {"loss": 1.5})
    expected = [{"step": 1, "train/loss": 3.0}, {"step": 2, "loss_eval/qa/loss": 1.5}]
    assert evaluate.read_log(tmp_path / "metrics.jsonl") == expected
    assert events == [
        ("tensorboard/train", 1, "loss", 3.0, 1),
        ("tensorboard/train", 1, "loss", 2.0, 2),
        ("tensorboard/loss_eval/qa", 2, "loss", 1.5, 2),
    ]
    log = train.Log(tmp_path, 2)
    assert log.has(2, "loss_eval/qa") and not log.has(2, "loss_eval")
    train.Log(tmp_path, -1)
    assert evaluate.read_log(tmp_path / "metrics.jsonl") == []


def test_only_one_command_trains_in_a_folder(tmp_path):
    with partition.lock(tmp_path), pytest.raises(UserError, match=str(tmp_path)):
        partition.lock(tmp_path)
    partition.lock(tmp_path)
    partition.lock(configs.to_path("gs://bucket/run"))  # A bucket has no locks.


# ---- train: killed processes -----------------------------------------------------------


def wait_for_step(run_dir, step, processes):
    """Wait until a run has logged a step."""
    path = run_dir / "metrics.jsonl"
    while not path.exists() or f'{{"step": {step},' not in path.read_text():
        for process in processes:
            assert process.poll() is None, process.communicate()
        time.sleep(0.02)


SLOW_RUN = (  # Its ids are the bytes of a small file.
    *("train.py", "--config", "tiny", "--data.source", f"text:{HERE}/README.md"),
    *("--data.vocab", "bytes", "--train.steps", 30, "--train.microbatches", 1),
    *("--train.save_every", 10, "--train.eval_every", 15, "--train.eval_batches", 2),
    *("--train.log_every", 1, "--model.dropout", 0.1),
)


def train_processes(*args, folders=(HERE, HERE)):
    """Start two processes that train together."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    flags = "--distributed.coordinator", address, "--distributed.processes", 2
    args = HERE / SLOW_RUN[0], *SLOW_RUN[1:], *args, *flags, "--distributed.process"
    return [start(*args, i, cwd=f) for i, f in enumerate(folders)]


def assert_same_runs(a, b):
    assert shard_bytes(a, 30) == shard_bytes(b, 30)
    assert metric_lines(a) == metric_lines(b)


@slow
def test_killed_runs_end_like_an_uninterrupted_run(tmp_path):
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    command(*SLOW_RUN, "--run_dir", straight, optimized=True)
    KILL, TERM = signal.SIGKILL, signal.SIGTERM
    for number, step in (KILL, 1), (KILL, 10), (TERM, 17), (KILL, 23):
        process = start(*SLOW_RUN, "--run_dir", killed, optimized=True)
        wait_for_step(killed, step, [process])
        process.send_signal(number)
        process.communicate()
        assert process.returncode == (-number if number == KILL else 0)
        if number == TERM:
            assert partition.Checkpoints(killed).steps()[-1] >= step
    command(*SLOW_RUN, "--run_dir", killed, optimized=True)
    assert_same_runs(killed, straight)


@slow
def test_two_processes_are_resumed_as_one(tmp_path):
    """All processes save after the same step, although one of them gets the signal."""
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    command(*SLOW_RUN, "--run_dir", straight, devices=2)
    for number, step in ((signal.SIGKILL, 12), (signal.SIGTERM, 15)):
        processes = train_processes("--run_dir", killed)
        wait_for_step(killed, step, processes)
        for process in processes if number == signal.SIGKILL else processes[:1]:
            process.send_signal(number)
        codes = [process.wait(120) for process in processes]
        if number == signal.SIGTERM:
            assert codes == [0, 0]
            assert partition.Checkpoints(killed).steps()[-1] >= step
        last = partition.Checkpoints(killed).steps()[-1]
        assert len(shard_bytes(killed, last)) == 3  # with the file `complete`
    command(*SLOW_RUN, "--run_dir", killed, devices=2)
    assert_same_runs(killed, straight)


@slow
@pytest.mark.parametrize("what", ["flags", "train", "validation", "folder"])
def test_two_processes_with_different_settings_or_folders_do_not_train(what, tmp_path):
    folders = tmp_path / "0", tmp_path / "1"
    for i, folder in enumerate(folders):
        for split in ("train", "validation"):
            lines = range(1000 if what == split and i else 0, 2000)
            text = "".join(f"line {n} of a book with {n % 7} pages\n" for n in lines)
            configs.write_file(folder / f"{split}.txt", text)
    run_dir = "run" if what == "folder" else tmp_path / "run"
    flags = "--run_dir", run_dir, "--data.source", "text:{split}.txt"
    flags += "--data.vocab", "train:100", "--train.save_every", 1
    flags += "--distributed.timeout", 10 if what == "folder" else 20
    processes = train_processes(*flags, folders=folders)
    if what == "flags":
        processes[1].kill()
        processes[1] = start(*processes[1].args[1:], "--train.seed", 1)
    errors = [process.communicate(timeout=120)[1] for process in processes]
    assert all(process.returncode for process in processes)
    if what == "folder":
        assert "FileNotFoundError" in errors[0] and "shards-00001-of-00002" in errors[0]
    else:
        assert all("different settings or files" in error for error in errors)
    assert not any(tmp_path.glob("**/complete"))


# ---- convert: folders of Hugging Face, written by other programs -----------------------


# The architectures of the published models.
T5_1_1 = "T5 1.1, LM-adapted, FLAN, T0, mT5"
FAMILIES = {
    "T5 1.0": dict(activation="relu", tied=True, dropout=0.1),
    T5_1_1: dict(),
    "UL2": dict(activation="gated_silu", relative_max_distance=64),
    "UMT5": dict(per_layer_bias=True),
    "ByT5": dict(vocab_size=384),
    "encoder": dict(num_decoder_layers=0, tied=True),
    "encoder of UMT5": dict(num_decoder_layers=0, tied=True, per_layer_bias=True),
}


@pytest.mark.parametrize(
    "family, kind",
    [*((family, "safetensors") for family in FAMILIES),
     ("T5 1.0", "pytorch_model.bin"), ("UMT5", "pytorch_model.bin"),
     ("UL2", "sharded")],
)  # fmt: skip
def test_hugging_face_and_back(family, kind, tmp_path):
    m = replace(SMALL.model, dtype="auto", relative_buckets=20, **FAMILIES[family])
    state = hf_state(m)
    source = write_model(tmp_path / "hf", m, state, kind)
    convert.convert(source, tmp_path / "run")
    convert.convert(tmp_path / "run", tmp_path / "back", to="hf")
    assert configs.load_run(tmp_path / "run")[0].model == m
    back = safetensors.numpy.load_file(tmp_path / "back/model.safetensors")
    assert back.keys() == state.keys()
    assert all(np.array_equal(back[name], state[name]) for name in state)
    config = json.loads((tmp_path / "back/config.json").read_text())
    assert hf_config(m).items() <= config.items()
    again = convert.read_model(tmp_path / "back")
    assert again.cfg.model == m and (again.tokenizer is not None) == (family == "ByT5")
    assert again.cfg.data.extra_ids == (0 if family == "ByT5" else 100)
    assert again.cfg.train.steps == 1  # A setting cannot be 0.


def test_an_encoder_has_no_output_matrix_although_it_is_not_tied(tmp_path):
    """The encoder of a T5 1.1 keeps this field of the complete model."""
    m = replace(SMALL.model, dtype="auto", num_decoder_layers=0, tied=True)
    source = write_model(tmp_path / "hf", m, hf_state(m), tie_word_embeddings=False)
    assert convert.read_model(source).cfg.model == m


def of_transformers(folder, kind):
    """Return a model that transformers has loaded, for example as a T5EncoderModel."""
    torch = pytest.importorskip("torch")
    network, info = getattr(pytest.importorskip("transformers"), kind).from_pretrained(
        folder, output_loading_info=True, dtype=torch.float32
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    return network.eval()


def logits_of(folder, weights, kind):
    """Return logits of transformers and ours, or the outputs of encoders."""
    torch = pytest.importorskip("torch")
    network = of_transformers(folder, kind)
    params, cfg = params_of(weights), replace(weights.cfg.model, dtype="float32")
    longer = change(data=dict(inputs_length=150))
    batch = make_batch(longer, [(150, 9), (40, 9), (1, 9)])
    ids, mask, starts = (
        torch.tensor(np.asarray(x)).long()
        for x in (batch.inputs, batch.input_segments, batch.decoder_inputs)
    )
    if cfg.num_decoder_layers:
        theirs = network(ids, mask, decoder_input_ids=starts).logits
        return theirs.detach().numpy(), forward(params, batch, cfg)
    theirs = network(ids, mask).last_hidden_state.detach().numpy()
    ours = model.encode(params, batch.inputs, batch.input_segments, cfg)
    return theirs * mask[..., None].numpy(), ours * mask[..., None].numpy()


@pytest.mark.parametrize(
    "family, kind, config",
    [
        ("T5 1.0", "T5ForConditionalGeneration", {}),
        (T5_1_1, "T5ForConditionalGeneration", {}),
        (T5_1_1, "MT5ForConditionalGeneration", {"model_type": "mt5"}),
        ("UL2", "T5ForConditionalGeneration", {"tie_word_embeddings": True}),
        ("UMT5", "UMT5ForConditionalGeneration", {}),
        ("encoder", "T5EncoderModel", {}),
    ],
)
def test_logits_of_transformers(family, kind, config, tmp_path):
    """The imported model, and transformers with the exported model, give equal logits."""
    m = replace(SMALL.model, **FAMILIES[family])
    source = write_model(tmp_path / "hf", m, hf_state(m), **config)
    weights = convert.read_model(source)
    theirs, ours = logits_of(source, weights, kind)
    assert theirs.std() > 0.05
    assert_allclose(ours, theirs, atol=1e-4 * np.abs(theirs).max())
    convert.convert(source, tmp_path / "run")
    convert.convert(tmp_path / "run", tmp_path / "back", to="hf")
    (kind,) = json.loads((tmp_path / "back/config.json").read_text())["architectures"]
    again, _ = logits_of(tmp_path / "back", weights, kind)
    assert_allclose(again, theirs, atol=1e-5 * np.abs(theirs).max())


# Rows: tie_word_embeddings and scale_decoder_outputs. Columns: lm_head.weight differs from
# the embedding, equals it, or is missing. "folded": untied, with the factor d_model^-0.5.
# transformers 5.24 computed the same logits in all 81 combinations, T5, mT5 and UMT5.
OUTPUT_LAYERS = {
    (None, None): "refused tied tied",
    (None, True): "folded tied tied",
    (None, False): "untied untied untied",
    (True, None): "folded tied tied",
    (True, True): "folded tied tied",
    (True, False): "untied untied untied",
    (False, None): "untied untied refused",
    (False, True): "folded tied tied",
    (False, False): "untied untied untied",
}


@pytest.mark.parametrize("family", ["t5", "mt5", "umt5"])
@pytest.mark.parametrize("stated", OUTPUT_LAYERS)
def test_arrays_and_config_determine_whether_a_model_is_tied(family, stated):
    names = "tie_word_embeddings", "scale_decoder_outputs"
    config = {name: value for name, value in zip(names, stated) if value is not None}
    embed = np.ones((7, 4), np.float32)
    embed[0] = np.nan  # Its training diverged.
    heads = {"lm_head.weight": 8 * embed}, {"lm_head.weight": embed}, {}
    for head, expected in zip(heads, OUTPUT_LAYERS[stated].split(), strict=True):
        arrays = {"shared.weight": embed, **head}
        if family == "mt5" and (expected != "refused" or stated == (None, None)):
            expected = "untied"  # mT5 never scales
        arguments = arrays, config | {"model_type": family}, Path("model")
        if expected == "refused":
            with pytest.raises(UserError, match="lm_head.weight"):
                convert.set_output_layer(*arguments)
            continue
        convert.set_output_layer(*arguments)
        factor = {"untied": 1, "folded": 0.5}.get(expected)
        wanted = None if factor is None else factor * head.get("lm_head.weight", embed)
        assert_array_equal(arrays.get("lm_head.weight"), wanted)


NORM, HEAD = "encoder.final_layer_norm.weight", "lm_head.weight"
WO = "decoder.block.1.layer.2.DenseReluDense.wo.weight"


def ones(*shape):
    return np.ones(shape, np.float32)


# Wrong arrays (None: all that match the pattern are missing), and what is named.
WRONG_ARRAYS = [
    ({WO: None}, WO),
    ({"decoder.block.2.*": None}, "num_decoder_layers 3"),
    ({"encoder.*": None}, "encoder/"),
    ({"decoder.*": None}, "decoder/logits_dense"),
    ({HEAD: None}, HEAD),
    ({HEAD: ones(250, 40)}, HEAD),
    ({NORM: ones(39)}, NORM),
    ({"encoder.block.0.layer.1.DenseReluDense.wi_1.weight": ones(3)}, "wi_1"),
    ({NORM: np.ones(40, np.int8)}, NORM),
    ({"pooler.weight": ones(3)}, "pooler.weight"),
    ({"classification_head.dense.weight": ones(40, 40)}, "classification_head.dense"),
    ({"decoder.embed_tokens.weight": ones(256, 40)}, "decoder.embed_tokens.weight"),
]
WRONG_FIELDS = [
    ("d_ff", 99),
    ("model_type", "longt5"),
    ("feed_forward_proj", "gelu"),  # the exact GELU
    ("dense_act_fn", "gelu"),
    ("is_gated_act", False),
    ("layer_norm_epsilon", 1e-5),
    ("eos_token_id", 2),
    ("pad_token_id", 1),
    ("decoder_start_token_id", 250),
]
ADDED = {"added_tokens_decoder": {"9": {"content": "<hl>"}}}
WRONG_FILES = [
    ("modules.json", [], "modules.json"),  # of sentence-transformers
    ("sentence_bert_config.json", [], "sentence_bert"),
    ("adapter_config.json", {}, "adapter_config.json"),  # of LoRA
    ("generation_config.json", {"eos_token_id": [1, 7]}, "eos_token_id"),
    ("added_tokens.json", {"<hl>": 160}, "<hl>"),
    ("tokenizer_config.json", ADDED, "<hl>"),
]
REFUSED = [
    *((arrays, {}, {}, named) for arrays, named in WRONG_ARRAYS),
    *(({}, {name: value}, {}, f"{name} {value}") for name, value in WRONG_FIELDS),
    ({}, {"num_decoder_layers": None}, {}, "num_decoder_layers 2"),
    ({}, {"feed_forward_proj": None}, {}, ".wi."),
    *(({}, {}, {name: content}, named) for name, content, named in WRONG_FILES),
]


@pytest.mark.parametrize("arrays, config, files, named", REFUSED)
def test_models_that_are_not_read_are_refused_by_name(
    arrays, config, files, named, tmp_path
):
    state = hf_state(SMALL.model)
    for pattern, array in arrays.items():
        for name in fnmatch.filter(list(state), pattern):
            del state[name]
        state |= {} if array is None else {pattern: array}
    source = write_model(tmp_path / "hf", SMALL.model, state, **config)
    for name, content in files.items():
        (source / name).write_text(json.dumps(content))
    with pytest.raises(UserError, match=re.escape(named)):
        convert.convert(source, tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize("damage", ["cut", "missing", "an array is missing"])
def test_damaged_files_are_named(damage, tmp_path):
    source = write_model(tmp_path / "hf", SMALL.model, hf_state(SMALL.model), "sharded")
    file, named = source / "part-1.safetensors", str(source)
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-100])
    elif damage == "missing":
        file.unlink()
    else:  # A model that lost its output layer must not look tied.
        named = "model.safetensors.index.json"
        arrays = list(safetensors.numpy.load_file(file).items())
        safetensors.numpy.save_file(dict(arrays[1:]), file)
    with pytest.raises((UserError, Exception), match=re.escape(named)):
        convert.convert(source, tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_flipped_bit_of_a_pytorch_file_is_noticed(tmp_path):
    torch = pytest.importorskip("torch")
    path = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.ones(1000)}, path)
    content = bytearray(path.read_bytes())
    content[content.index(np.ones(9, "f").tobytes()) + 4] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match="pytorch_model.bin is damaged"):
        convert.read_hf_file(path)


def test_code_in_a_pickle_does_not_run(tmp_path):
    torch = pytest.importorskip("torch")

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    source = write_model(tmp_path / "hf", SMALL.model, {})
    (source / "model.safetensors").unlink()
    torch.save({"shared.weight": Evil()}, source / "pytorch_model.bin")
    with pytest.raises(Exception, match="(?i)weights.only"):
        convert.convert(source, tmp_path / "run")
    assert not (tmp_path / "ran").exists()


def test_a_new_folder_appears_only_when_it_is_complete(tmp_path, monkeypatch):
    m, state = SMALL.model, hf_state(SMALL.model)
    source = write_model(tmp_path / "hf", m, state)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine").write_text("precious")
    new = tmp_path / "new"
    for arguments in (
        (source, tmp_path / "full"),
        (source, "gs://bucket/run"),
        (source, new, "plain", "bfloat16"),
        (tmp_path / "nowhere", new),
    ):
        with pytest.raises(UserError):
            convert.convert(*arguments)

    def write_wrong(arrays, path, metadata):
        arrays = arrays | {NORM: arrays[NORM] + np.float32(1e-6)}
        path.write_bytes(safetensors.numpy.save(arrays, metadata))

    monkeypatch.setattr(safetensors.numpy, "save_file", write_wrong)
    with pytest.raises(OSError, match="encoder/norm"):
        convert.convert(source, new, to="hf")
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "full"}
    monkeypatch.undo()
    run = tmp_path / "runs/new"  # The folder runs/ is not there yet.
    convert.convert(source, run)
    with pytest.raises(UserError, match=re.escape(str(run))):
        convert.convert(run, new)
    (tmp_path / "half").mkdir()  # An empty folder may be there already.
    convert.convert(run, tmp_path / "half", to="hf", dtype="bfloat16")
    found = params_of(tmp_path / "half")["embed"]
    assert_array_equal(found, state["shared.weight"].astype(jnp.bfloat16))


# ---- convert: vocabularies -------------------------------------------------------------


def many_texts():
    """Return 300 texts with white space, accents, rare characters and sentinels."""
    rng = np.random.default_rng(1)
    parts = (
        "alpha beta gamma, (delta) the \u00e9t\u00e9 e\u0301t\u00e9 \u4e2d\u6587 \ufb01 "
        "12,345 A.B <extra_id_0> <extra_id_3> zeta\tx \u3000y z\xa0 \U0001f642 < pad</s <unk "
    ).split(" ")
    return [" ".join(rng.choice(parts, rng.integers(0, 9))) for _ in range(300)]


def set_pieces(folder, serialized, **tokenizer_config):
    (folder / "spiece.model").write_bytes(serialized)
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))


VOCABULARIES = {  # vocabulary size of the model, size and sentinels of the vocabulary
    "T5": (256, 160, 100), "UMT5": (256, 90, 30), "mT5": (256, 160, 100),
    "too small for sentinels": (128, 60, 0), "bytes": (390, 259, 11),
    "tokenizer.json": (256, 160, 100), "added tokens": (256, 162, 100),
}  # fmt: skip


@pytest.mark.parametrize("kind", VOCABULARIES)
def test_a_vocabulary_is_copied(kind, pieces, tmp_path):
    """transformers gives the same ids before the import and after the export."""
    transformers = pytest.importorskip("transformers")
    vocab_size, size, sentinels = VOCABULARIES[kind]
    m = replace(SMALL.model, vocab_size=vocab_size)
    source = write_model(tmp_path / "hf", m, hf_state(m))
    if kind == "bytes":
        config = {"tokenizer_class": "ByT5Tokenizer", "extra_ids": 131}
        (source / "tokenizer_config.json").write_text(json.dumps(config))
    elif kind == "mT5":
        names = (f"\u2581<extra_id_{i}>" for i in reversed(range(100)))
        set_pieces(source, add_pieces(pieces, *names), extra_ids=0)
    else:
        # Without a statement, there are 100 sentinels.
        set_pieces(source, pieces, **({"extra_ids": 30} if kind == "UMT5" else {}))
    if kind == "added tokens":
        (source / "added_tokens.json").write_text('{"<hl>": 160, "Q": 161}')
    removed = {"tokenizer.json": "spiece.model", "added tokens": "added_tokens.json"}
    if kind in removed:
        transformers.T5Tokenizer.from_pretrained(source).save_pretrained(source)
        (source / removed[kind]).unlink()
    convert.convert(source, tmp_path / "run")
    cfg, metadata = configs.load_run(tmp_path / "run")
    tokenizer = data.load_tokenizer(cfg, tmp_path / "run")
    assert tokenizer.sha256 == metadata["vocabulary"]
    assert (tokenizer.size, tokenizer.extra_ids) == (size, sentinels)
    convert.convert(tmp_path / "run", tmp_path / "back", to="hf")
    if tokenizer.file_name:
        content = (source / tokenizer.file_name).read_bytes()
        assert (tmp_path / "run" / tokenizer.file_name).read_bytes() == content
        assert (tmp_path / "back" / tokenizer.file_name).read_bytes() == content
    texts = many_texts()
    if kind == "added tokens":
        texts += ["a <hl> b<hl>c <hl>, x", "Q Q QalphaQ"]
    if kind in ("bytes", "too small for sentinels"):
        texts = [text for text in texts if "extra_id" not in text]
    ours = [[*ids.tolist(), data.EOS] for ids in tokenizer.encode(texts)]
    for folder in (source, tmp_path / "back"):
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
        assert kind != "bytes" or len(theirs) == vocab_size
        for text, ids, expected in zip(texts, ours, theirs(texts).input_ids, strict=True):
            assert ids == expected, (folder.name, text)


@pytest.mark.parametrize("is_umt5", [False, True])
def test_an_export_of_umt5_says_which_tokenizer_reads_it(
    is_umt5, pieces, tmp_path, capsys
):
    m = replace(SMALL.model, per_layer_bias=is_umt5)
    set_pieces(write_model(tmp_path / "hf", m, hf_state(m)), pieces)
    convert.convert(tmp_path / "hf", tmp_path / "run")
    convert.convert(tmp_path / "run", tmp_path / "back", to="hf")
    assert ("T5Tokenizer" in capsys.readouterr().out) == is_umt5


@pytest.mark.parametrize("kind", ["BPE", "byte_fallback", "suffix", "no space", "symbol"])
def test_vocabularies_to_which_transformers_gives_other_ids_are_not_exported(
    kind, pieces, tmp_path
):
    if kind == "byte_fallback":
        pieces = add_pieces(pieces, *(f"<0x{i:02X}>" for i in range(256)), kind="BYTE")
    pieces = add_pieces(pieces, "<hl>") if kind == "symbol" else pieces
    proto = sentencepiece_model_pb2.ModelProto.FromString(pieces)
    proto.normalizer_spec.add_dummy_prefix = kind != "no space"
    proto.trainer_spec.treat_whitespace_as_suffix = kind == "suffix"
    proto.trainer_spec.byte_fallback = kind == "byte_fallback"
    if kind == "BPE":
        proto.trainer_spec.model_type = "BPE"
    m = replace(SMALL.model, vocab_size=320)
    source = write_model(tmp_path / "hf", m, hf_state(m))
    set_pieces(source, proto.SerializeToString(), extra_ids=0)
    convert.convert(source, tmp_path / "run")
    with pytest.raises(UserError, match="unigram"):
        convert.convert(tmp_path / "run", tmp_path / "back", to="hf")


def test_the_command_converts_there_and_back(tmp_path):
    """Also without a vocabulary, whose file the command then names."""
    fields = "relative_attention_max_distance dropout_rate num_layers num_decoder_layers"
    older = dict.fromkeys(fields.split())  # without them
    state = hf_state(SMALL.model)
    for name in ("encoder.final_layer_norm.weight", "shared.weight"):
        state[name][0] = np.nan  # its training diverged
    source = write_model(tmp_path / "hf", SMALL.model, state, **older)
    output = command("convert.py", source, tmp_path / "run")
    assert "spiece.model" in output
    cfg, _ = configs.load_run(tmp_path / "run")
    assert (cfg.model.dropout, cfg.model.relative_max_distance) == (0.1, 128)
    with pytest.raises(UserError, match="Copy"):
        data.load_tokenizer(cfg, tmp_path / "run")
    with pytest.raises(UserError, match="--step"):  # It has no steps.
        convert.convert(source, tmp_path / "other", step="6")
    command("convert.py", tmp_path / "run", tmp_path / "back", "--to", "hf", "--step", 0)
    weights = [folder / "model.safetensors" for folder in (source, tmp_path / "back")]
    assert_equal(*map(safetensors.numpy.load_file, weights))
    assert not (tmp_path / "back/tokenizer_config.json").exists()
    shutil.rmtree(tmp_path / "run/checkpoints")
    with pytest.raises(UserError, match="no step latest"):
        convert.convert(tmp_path / "run", tmp_path / "none", to="hf")


# ---- jobs ------------------------------------------------------------------------------
# Whole jobs at toy size: the commands that a user types, on data as users have them.

SIZE = (
    "--model.vocab_size 384 --model.d_model 32 --model.d_ff 64 --model.d_kv 8 "
    "--model.num_heads 4 --model.num_layers 1 --model.num_decoder_layers 1"
)
PERIODS = "--train.batch_size 8 --train.log_every 1 --train.eval_batches 1"
TOY = (
    f"{SIZE} {PERIODS} --data.vocab train:30 --data.inputs_length 32 "
    "--data.targets_length 16 --train.steps 60 --train.eval_every 20"
)
C4 = "--data.source jsonl:{}/c4-{{split}}.*.json.gz --train.save_every 20"
FINETUNE = (  # All jobs of fine-tuning compile the same program.
    f"{PERIODS} --data.inputs_length 64 --data.targets_length 16 --model.dropout 0 "
    "--train.learning_rate 0.02 --train.eval_every 0 --train.predict_every 50 "
    "--train.save_every 50"
)
WORDS = "alpha beta gamma delta epsilon zeta eta theta iota kappa".split()


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def values_of(run_dir, name):
    """Return {step: value} of a metric."""
    rows = evaluate.read_metrics([run_dir]).items()
    return {step: row[name] for step, row in rows if name in row}


def assert_learns(run_dir):
    losses = [*values_of(run_dir, "train/loss").values()]
    assert len(losses) >= 50 and np.mean(losses[-4:]) < 0.9 * np.mean(losses[:4]), losses


def sentences(count):
    """Return lines of six words, each of which predicts the next one."""
    return [" ".join((WORDS * 2)[i % 10 :][:6]) for i in range(count)]


@pytest.fixture(scope="session")
def pretrained(tmp_path_factory):
    """A run of small_c4, with C4 in the JSON files of allenai."""
    folder = tmp_path_factory.getbasetemp() / "pretrained"
    if not folder.exists():  # extras/test_extras.py has this fixture, too.
        folder.mkdir()
        for split, count in (("train", 400), ("validation", 20)):
            rows = [{"text": line, "url": ""} for line in sentences(count)]
            with gzip.open(folder / f"c4-{split}.00000-of-00001.json.gz", "wb") as file:
                file.writelines(map(infer.to_json, rows))
        run(f"train --config small_c4 {TOY} --run_dir {folder}/run {C4.format(folder)}")
    return folder / "run"


def test_job_c4_and_an_exact_restart(pretrained, here):
    for steps in (40, 60):
        flags = (
            f"{TOY} --run_dir run {C4.format(pretrained.parent)} --train.steps {steps}"
        )
        shown = run(f"train --config small_c4 {flags}")
    assert re.search(r"^  truth .*\[\w+", shown, re.MULTILINE)
    for name in ("data_wait_fraction", "teraflops"):
        assert all(0 <= x < 1 for x in values_of("run", f"timing/{name}").values())
    assert_learns("run")
    assert "unembed" in Path("run/model-info.txt").read_text()
    for name in ("train/loss", "loss_eval/c4_v220_span_corruption/loss"):
        assert values_of("run", name) == values_of(pretrained, name)


def test_job_translation(pretrained, here):
    """evaluate.py gives each checkpoint the BLEU that it had during training."""
    pairs = [{"en": x, "de": " ".join(x.split()[::-1])} for x in sentences(80)]
    for split, rows in {"train": pairs, "validation": pairs[:10]}.items():
        write_jsonl(Path(f"{split}.jsonl"), rows)
        lines = ["en\tde", *("\t".join(row.values()) for row in rows)]
        Path(f"{split}.tsv").write_text("\n".join(lines))
    run(
        f"train --config small_wmt_finetune --run_dir wmt --init_from {pretrained} "
        f"{FINETUNE} --data.source jsonl:{{split}}.jsonl --train.steps 1000150 "
        "--train.eval_batches 0 --decode.beams 2"
    )
    assert_learns("wmt")
    name = "predict_eval/wmt_t2t_ende_v003/bleu"
    bleu = values_of("wmt", name)
    assert max(bleu.values()) > 90
    assert partition.Checkpoints("wmt").steps() == [*bleu] and len(bleu) == 3
    run(
        "evaluate --run_dir wmt --step all --csv a/bleu.csv --plot b/bleu.png "
        "--data.source tsv:{split}.tsv --output eval"
    )
    other = name.replace("/bleu", "-source=tsv:{split}.tsv/bleu")
    assert values_of("eval", other) == pytest.approx(bleu)
    (path,) = Path("eval").glob("wmt_t2t_ende_v003-source-tsv*-01000150.jsonl")
    line = path.read_text().splitlines()[0]
    assert json.loads(line)["inputs"] == f"translate English to German: {pairs[0]['en']}"
    assert Path("a/bleu.csv").exists() and Path("b/bleu.png").exists()


OWN = """
from dataclasses import replace
from configs import RECIPES
from data import Task, template

class Letters:
    letters = "abcdefghijklmnopqrstuvwxyz ?"
    size = 3 + 28
    def encode(self, text):
        return [3 + self.letters.index(x) for x in text]
    def decode(self, ids):
        return "".join(self.letters[i - 3] for i in ids)

def wrong(targets, predictions):
    return {"wrong": 100 * sum(map(str.__ne__, targets, predictions)) / len(targets)}

def yes(example):
    yield {"inputs": example["a"], "targets": "yes", "answer_choices": ["no", "yes"]}

VOCABULARY = Letters()
TASKS = {
    "next": Task("csv:{split}.csv", template("{a} ?", "{b}"), (wrong,)),
    "yes": Task("csv:{split}.csv", yes),
}
MIXTURES = {"both": {"next": 3.0, "yes": 1.0}}
recipe = RECIPES["small_pairs"]
CONFIG = replace(recipe, data=replace(recipe.data, task="both"))
"""


def test_job_own_tasks_mixture_metric_and_vocabulary(here):
    """They stand in a recipe file, of which the run keeps a copy for all commands."""
    for split in ("train", "validation"):
        rows = ["a,b", *map(",".join, itertools.pairwise(WORDS))]
        Path(f"{split}.csv").write_text("\n".join(rows))
    Path("mine.py").write_text(OWN)
    run(
        f"train --config mine.py {SIZE} {FINETUNE} --train.eval_batches 0 "
        "--train.steps 100"
    )
    Path("mine.py").unlink()
    assert_learns("runs/mine")
    wrong = values_of("runs/mine", "predict_eval/next/wrong")
    run("evaluate --run_dir runs/mine --tasks next --output eval")
    assert values_of("eval", "predict_eval/next/wrong") == {100: wrong[100]}
    assert "100.0000" in run("evaluate --run_dir runs/mine --tasks yes --mode rank")
    assert run("infer --run_dir runs/mine alpha") == "yes\n"


def test_job_own_language_for_transformers(here, monkeypatch):
    """transformers gives the same ids of an own vocabulary, and the same greedy output."""
    for name in ("a.txt.gz", "b.txt.gz"):
        with gzip.open(name, "wt") as file:
            file.write("\n".join(sentences(200)).replace("a", "ă"))
    run(f"train --config base_ro --run_dir ro {TOY} --data.source text:*.txt.gz")
    assert_learns("ro")
    convert.convert("ro", "hf", to="hf")
    transformers = pytest.importorskip("transformers", reason="pip install '.[parity]'")
    theirs = transformers.T5ForConditionalGeneration.from_pretrained("hf")
    text = "alphă <extra_id_0> gămmă deltă <extra_id_1>"
    ids = transformers.AutoTokenizer.from_pretrained("hf")(text, return_tensors="pt")
    tokenizer = data.load_tokenizer(configs.load_run("ro")[0], "ro")
    assert ids.input_ids.tolist() == [[*tokenizer.encode([text])[0], data.EOS]]
    (output,) = theirs.generate(**ids, max_new_tokens=16, do_sample=False)
    monkeypatch.setattr(sys, "stdin", [text])
    assert run("infer --run_dir ro --raw") == f"{tokenizer.decode(output[1:])}\n"
    filled = infer.fill_blanks(ids.input_ids[0], output[1:], tokenizer)
    assert run("infer --run_dir ro") == f"{filled}\n"


# ---- survival --------------------------------------------------------------------------


def kill_when(folder, pattern, size, *args):
    """Start a script, and kill it when a matching file has so many bytes."""
    process = start(*args)
    while process.poll() is None:
        with contextlib.suppress(FileNotFoundError):
            if any(path.stat().st_size >= size for path in folder.glob(pattern)):
                process.kill()
    process.communicate()


@slow
@pytest.mark.parametrize("to", ["hf", "t5x"])
def test_a_killed_conversion_leaves_no_folder(to, pretrained, tmp_path):
    def contents(folder):
        files = [path for path in folder.rglob("*") if path.is_file()]
        return {path.relative_to(folder): path.read_bytes() for path in files}

    command("convert.py", pretrained, tmp_path / "whole", "--to", to)
    for i, inside in enumerate(("", "/*", "/*/*")):
        target = tmp_path / f"{i}"
        flags = "convert.py", pretrained, target, "--to", to
        kill_when(tmp_path, f".{i}.tmp*{inside}", 0, *flags)
        if not target.exists():
            command(*flags)
        assert contents(target) == contents(tmp_path / "whole")


@slow
def test_the_eight_scripts_need_no_other_file(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    for name in "configs data partition model infer evaluate train convert".split():
        shutil.copy(HERE / f"{name}.py", tmp_path)
    do = functools.partial(command, cwd=tmp_path)
    for steps in (3, 6):
        do("train.py", "--train.steps", steps, "--train.eval_every", 3)
    assert partition.Checkpoints(tmp_path / "runs/tiny").steps() == [3, 6]
    do("evaluate.py", "--run_dir", "runs/tiny")
    do("convert.py", "runs/tiny", "hf", "--to", "hf")
    do("convert.py", "hf", "back")
    flags = "--decode.max_length", 8, "Return the <extra_id_0> of the list."
    answer = do("infer.py", "--run_dir", "runs/tiny", *flags)
    assert answer.startswith("Return the ")
    assert do("infer.py", "--run_dir", "back", *flags) == answer


# ---- wrong commands --------------------------------------------------------------------

# (command, what its message names). The files are those of the test.
WRONG = [
    ("train --data.source jsonl:pairs.jsonl", "text.*pairs.jsonl"),
    ("train --data.source text:cut.txt.gz", "cut.txt.gz"),
    (
        "train --data.task text_to_text --data.source tsv:qa.tsv",
        "inputs.*qa.tsv.*question",
    ),
    ("train --data.task text_to_text", "source"),
    ("train --data.task glue_rte_v2", "glue_rte_v2"),
    ("train --config small_c4 --data.tfds_dir .", "c4/en"),
    ("train --config small_t0 --train.start_step 0", "--data.source seqio"),
    ("train --data.vocab none.model", "none.model"),
    ("train --init_from hf", "convert.py"),  # a folder of Hugging Face
    ("train --run_dir nothing", "nothing has no checkpoint"),
    ("train --config tiny --run_dir hf", "convert.py"),
    ("train --config tiny --run_dir RUN/checkpoints/step_00000020", "is a checkpoint"),
    ("train --config empty.py", "empty.py.*CONFIG"),
    ("train --config tiny --run_dir old", "old/eval"),
    ("data --run_dir nothing", "nothing"),
    ("data --run_dir RUN --config tiny", "--config"),
    ("evaluate --run_dir RUN --tasks nothing", "nothing"),
    ("evaluate --run_dir RUN --split dev", "dev"),
    ("evaluate --run_dir RUN --mode rank", "c4_v220_span_corruption"),
    ("evaluate --run_dir RUN --step 7", "step 7"),
    ("evaluate --run_dir RUN --tasks jsonl:pairs.jsonl --data.source x:", "data.task"),
    ("evaluate --run_dir RUN --tasks jsonl:pairs.jsonl --mode rank", "Example 1"),
    ("infer --run_dir RUN --input pairs.jsonl", "--output"),
    ("infer --run_dir RUN --shard 1/2 text", "--output"),
    ("infer --run_dir RUN --input task:span_corruption --output out", "of pairs"),
    ("infer --run_dir RUN --input task:by_rule_even:dev --output out", "split dev"),
    (
        "infer --run_dir RUN --input task:prefix_lm --output o --data.source x:",
        "prefix_lm",
    ),
    ("infer --run_dir RUN --input cut.jsonl --output out", "cut.jsonl:2"),
    ("infer --run_dir RUN --input texts.jsonl --output out", "inputs"),
    ("infer --run_dir RUN --input pairs.jsonl --output cut.jsonl", "cut.jsonl"),
]


@pytest.mark.parametrize("wrong, named", WRONG)
def test_a_wrong_command_names_what_is_wrong(
    wrong, named, pretrained, here, monkeypatch, capsys
):
    monkeypatch.setattr(train, "lower_step", lambda *_: (None, None))  # takes a second
    pair = '{"inputs": "a", "targets": "b"}\n'
    Path("pairs.jsonl").write_text(pair)
    Path("texts.jsonl").write_text('{"text": "alpha"}\n')
    Path("cut.jsonl").write_text(pair + pair[:9])
    Path("cut.txt.gz").write_bytes(gzip.compress(bytes(range(255)))[:99])
    Path("qa.tsv").write_text("question\tanswer\na\tb\n")
    Path("empty.py").touch()
    configs.write_file(Path("old/eval/metrics.jsonl"), "")
    Path("hf").mkdir(exist_ok=True)
    Path("hf/config.json").write_text('{"model_type": "t5"}')
    with pytest.raises((SystemExit, Exception)) as error:
        run(wrong.replace("RUN", str(pretrained)))
    notes = getattr(error.value, "__notes__", "")
    said = f"{error.value} {capsys.readouterr().err} {notes}"
    assert re.search(named, said, re.DOTALL), said
