"""Test extras, the notebook, the exercises and the forks: `pytest extras`."""
# ruff: noqa: F811 (fixtures are arguments of tests)

import ast
import json
import math
import os
import re
import runpy
import shutil
import subprocess
import sys
import zlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import configs
import convert
import data
import evaluate
import infer
import model
import partition
import train
from configs import ModelConfig, UserError
from extras import (
    attention_kernel, bench, chunked_loss, gpu_attention, mesh_tensorflow, plan, pretokenize,
    rates, t5_tasks, t5x_checkpoints, tfrecord, toys,
)  # fmt: skip
from test_all import (  # noqa: F401 (fixtures)
    BYTES, FINETUNE, HERE, PERIODS, SMALL, TOKENIZER, assert_close, assert_equal,
    assert_learns, change, command, compiled, here, hf_state, loss_and_gradients,
    make_attention, make_batch, make_params, one_device, ones, params_of, pieces, place,
    pretrained, run, sentences, set_pieces, start, tables, values_of, write_jsonl, write_model,
)  # fmt: skip

# ---- attention_kernel, chunked_loss ----------------------------------------------------


@pytest.mark.parametrize("kernel", [attention_kernel, gpu_attention])
@pytest.mark.parametrize("queries, keys", [(16, 24), (512, 16)])
@pytest.mark.parametrize(
    "bidirectional", [True, False, None], ids=["both", "causal", "cross"]
)
def test_the_attention_kernels_equal_the_equation(
    queries, keys, bidirectional, kernel, monkeypatch
):
    """They run in the interpreter of Pallas, with several blocks on each axis."""
    monkeypatch.setattr(gpu_attention, "BLOCK", 10)  # so queries and keys are padded
    q, k, v, table, mask = make_attention(0, queries, keys)
    monkeypatch.setattr(attention_kernel, "MAX_SCORES", 4 * 128 * keys)
    blocks = attention_kernel.block_sizes((3, queries, 4, 6), keys)
    assert blocks == (3 if queries == 16 else 1, 4, min(queries, 128))
    weight = np.random.default_rng(1).standard_normal(q.shape)
    weight[:, :, -1] = 0  # The last query sees no key: it is padding, without a loss.
    # The mean that it gets would also be over the keys that the kernel for GPUs adds.
    seen = queries - 1 if kernel is gpu_attention else queries

    def values_and_gradients(attention):
        def total(q, k, v, table):
            args = queries, keys, bidirectional, SMALL.model
            bias = None if bidirectional is None else model.position_bias(table, *args)
            out = attention(q, k, v, mask, bias)
            return jnp.sum(out * weight), out[:, :, :seen]

        return jax.jit(jax.value_and_grad(total, (0, 1, 2, 3), has_aux=True))(
            q, k, v, table
        )

    expected = values_and_gradients(model.dot_product_attention)
    assert_close(values_and_gradients(kernel.attend), expected)


@pytest.mark.parametrize(
    "capability, dtype, channels, fits",
    [
        ("9.0", "bfloat16", 64, True),
        ("7.5", "bfloat16", 64, False),
        ("gfx942", "bfloat16", 64, False),
        ("9.0", "float32", 64, False),
        ("9.0", "bfloat16", 48, False),
    ],
)
def test_a_gpu_uses_its_kernel_where_it_can(
    capability, dtype, channels, fits, monkeypatch
):
    gpu = SimpleNamespace(compute_capability=capability)
    monkeypatch.setattr(partition, "platform", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [gpu])
    monkeypatch.setattr(gpu_attention, "attend", lambda *_: "the kernel's output")
    q, mask = jnp.zeros((1, 2, 114, channels), dtype), jnp.ones((1, 1, 114, 114))
    out = model.dot_product_attention(q, q, q, mask, impl="kernel")
    assert isinstance(out, str) == fits


def test_no_kernel_takes_a_mask_for_each_head_or_a_bias_for_each_row():
    q, k, v, table, mask = make_attention(0, 16, 16)
    bias = model.position_bias(table, 16, 16, True, SMALL.model)
    heads = mask & (jnp.arange(4) % 2 == 0)[:, None, None]
    for args in ((q, k, v, heads, bias), (q, k, v, mask, bias[None])):
        expected = model.dot_product_attention(*args)
        assert_equal(model.dot_product_attention(*args, impl="kernel"), expected)


@pytest.mark.parametrize("devices", [4, 2])
def test_the_kernel_and_the_chunked_loss_change_no_gradient(devices, monkeypatch):
    changes = dict(activation="relu", tied=True)
    plain = change(model=changes, train=dict(label_smoothing=0.1, z_loss=0.01))
    params, batch = make_params(plain), make_batch()
    expected = loss_and_gradients(params, batch, plain)
    fast = change(
        plain,
        model=dict(attention_impl="kernel", loss_impl="chunked"),
        mesh=dict(model=2),
    )
    monkeypatch.setattr(chunked_loss, "PART", 12)  # each device computes parts
    partition.set_mesh(fast, jax.devices()[:devices])
    batch = partition.put_batch(jax.device_get(batch))
    traced = jax.make_jaxpr(model.forward, static_argnums=2)(params, batch, fast.model)
    # The self-attention of the encoder, and both attentions of the decoder.
    assert str(traced).count("name=forward_kernel") == 3
    assert_close(loss_and_gradients(place(params, fast), batch, fast), expected)
    content = batch.targets > 5
    sums = evaluate.batch_sums(place(params, fast), batch, content, fast)
    assert_close(sums, evaluate.batch_sums(place(params, fast), batch, content, plain))


@pytest.mark.parametrize("loss_impl", ["full", "chunked"])
def test_edited_weights_count_everywhere_and_scores_need_no_loss(loss_impl, monkeypatch):
    """As after an edit of model.target_weights, and then one of model.token_metrics."""
    cfg = change(model=dict(loss_impl=loss_impl), train=dict(microbatches=2))
    params, batch = make_params(cfg), make_batch()

    def edited(batch):  # a target counts as much as its position
        return jnp.arange(1.0, 10.0) * (batch.target_segments > 0)

    def weighted_mean(params):
        logits = model.forward(params, batch, cfg.model)
        losses = model.token_metrics(logits, batch.targets, cfg.train.z_loss)
        return jnp.sum(losses["loss"] * edited(batch)) / jnp.sum(edited(batch))

    loss, gradients = jax.jit(jax.value_and_grad(weighted_mean))(params)
    scores = infer.score(params, batch, cfg.model)
    monkeypatch.setattr(model, "target_weights", edited)
    accumulate = lambda *args: train.accumulate_gradients(*args, cfg, None)
    found, _ = jax.jit(accumulate)(params, batch)
    assert_close(found, gradients)
    # A program that was compiled before an edit would not see it, but __wrapped__ does.
    content = batch.targets > 5
    edited_sums = lambda *args: evaluate.batch_sums.__wrapped__(*args, content, cfg)
    sums, _ = jax.jit(edited_sums)(params, batch)
    assert_close(model.mean_metrics(sums)["loss"], loss)
    monkeypatch.setattr(model, "token_metrics", lambda *_: {})
    assert_close(infer.score.__wrapped__(params, batch, cfg.model), scores)


def test_the_chunked_loss_trains_a_parameter_that_a_fork_adds_to_the_logits(monkeypatch):
    logits = model.compute_logits
    edited = lambda params, *args: params["factor"] * logits(params, *args)
    monkeypatch.setattr(model, "compute_logits", edited)
    params, batch = make_params(SMALL) | {"factor": jnp.float32(0.5)}, make_batch()
    chunked = change(model=dict(loss_impl="chunked"))
    found = loss_and_gradients(params, batch, chunked)
    assert_close(found, loss_and_gradients(params, batch, SMALL))


def test_auto_chooses_the_faster_forms(monkeypatch):
    large = replace(SMALL.model, vocab_size=250_112)  # that of mT5

    def forms(model_cfg):
        found = model.resolve_auto(replace(model_cfg, dtype="auto"))
        return found.dtype, found.attention_impl, found.loss_impl

    assert forms(SMALL.model) == ("float32", "xla", "full")
    assert forms(large) == ("float32", "xla", "chunked")
    monkeypatch.setattr(partition, "platform", lambda: "tpu")
    assert forms(SMALL.model) == ("bfloat16", "kernel", "chunked")
    monkeypatch.setattr(partition, "platform", lambda: "gpu")
    assert forms(SMALL.model) == ("bfloat16", "kernel", "full")
    monkeypatch.setattr(configs, "HAS_EXTRAS", False)
    assert forms(large) == ("bfloat16", "xla", "full")


# ---- t5_tasks --------------------------------------------------------------------------


def test_recipes_have_the_settings_of_t5x():
    """Those of its Gin files configs/runs/*.gin and examples/t5/t5_1_1."""
    model = dict(d_model=512, d_ff=1024, num_heads=6, num_layers=8, num_decoder_layers=8)
    model |= dict(vocab_size=32128, d_kv=64, activation="gated_gelu", tied=False)
    model |= dict(dropout=0.0, relative_buckets=32, relative_max_distance=128)
    data_cfg = dict(inputs_length=512, targets_length=114, extra_ids=100)
    data_cfg |= dict(noise_density=0.15, mean_span_length=3.0)
    train = dict(steps=10_000, learning_rate=1.0, schedule="constant * rsqrt_decay")
    train |= dict(warmup_steps=10_000, z_loss=1e-4, label_smoothing=0.0, weight_decay=0.0)
    train |= dict(batch_size=256, microbatches=1, predict_every=0, start_step=0)
    train |= dict(steps_per_decay=20_000, decay_factor=0.5)
    train |= dict(eval_every=1000, eval_batches=20, save_every=1000)
    pretrain = configs.RECIPES["small_c4"]
    assert pretrain == change(pretrain, model=model, data=data_cfg, train=train)
    pretrain, train = configs.RECIPES["base_c4"], train | dict(steps=100_000)
    train |= dict(eval_every=2000)
    assert pretrain == change(pretrain, data=data_cfg, train=train)
    for name in ("small_pairs", "base_wmt_finetune"):
        finetune = configs.RECIPES[name]
        train = dict(learning_rate=1e-3, schedule="constant", z_loss=1e-4)
        train |= dict(eval_batches=0, keep=0)  # all held-out examples, all checkpoints
        assert finetune == change(finetune, model=dict(dropout=0.1), train=train)
    assert (configs.FINETUNE.predict_every, configs.FINETUNE.save_every) == (1000, 5000)


def test_first_recipes_evaluate_at_their_end_and_keep_their_weights():
    for name in ("tiny", "tiny_finetune"):
        train = configs.RECIPES[name].train
        assert train.steps % train.eval_every == 0
        assert train.predict_every in (0, train.steps)
        assert (1 - train.weight_decay) ** train.steps > 0.1
    bench = configs.RECIPES["small_bench"].train  # It only measures the speed of steps.
    assert bench.eval_every == bench.predict_every == bench.save_every == 0


def test_a_command_finds_the_tasks_of_extras_by_their_names():
    """In this process they are loaded already."""
    flags = "--data.task by_rule --data.vocab bytes --model.vocab_size 384 --show 1"
    assert "inputs" in command("data.py", *flags.split())


def test_a_task_of_a_recipe_file_replaces_one_of_extras(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from dataclasses import replace\n"
        "from configs import RECIPES, DataConfig\n"
        "from data import Task\n"
        "TASKS = {'by_rule_words': Task('jsonl:mine.jsonl')}\n"
        "MIXTURES = {'both': {'by_rule_words': 1, 'glue_rte_v002': 1}}\n"
        "CONFIG = replace(RECIPES['tiny'], data=DataConfig(task='both'))\n"
    )
    listed = command("data.py", "--config", tmp_path / "mine.py", "--list")
    assert re.search("^by_rule_words .*jsonl:mine.jsonl$", listed, re.MULTILINE)


# metric, targets, predictions, the result of t5 0.9.4
METRIC_CASES = [
    ("matthews_corrcoef", [0, 1, 0, 1, 1], [0, 1, 1, -1, 1],
     {"matthews_corrcoef": 30.860669992418384}),
    ("matthews_corrcoef", [0, 1], [1, 1], {"matthews_corrcoef": 0.0}),
    ("pearson_corrcoef", [1.0, 2.0, 4.0], [1.0, 3.0, 3.5],
     {"pearson_corrcoef": 86.60254037844388}),
    ("spearman_corrcoef", [1.0, 2.0, 2.0, 4.0], [2.0, 1.0, 3.0, 4.0],
     {"spearman_corrcoef": 63.24555320336759}),
    ("pearson_corrcoef", [1.0, 2.0], [1.0, 1.0], {"pearson_corrcoef": math.nan}),
    ("mean_3class_f1", [0, 1, 2, 2], [0, 2, 2, -1], {"mean_3class_f1": 50.0}),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore::scipy.stats.ConstantInputWarning")
@pytest.mark.parametrize("name, targets, predictions, expected", METRIC_CASES)
def test_metrics_of_glue_equal_those_of_t5(name, targets, predictions, expected):
    found = evaluate.METRICS[name](targets, predictions)
    assert found == pytest.approx(expected, rel=1e-9, nan_ok=True)


@pytest.mark.parametrize("name", ["spearman_corrcoef", "mean_3class_f1"])
def test_metrics_of_numbers_refuse_texts(name):
    with pytest.raises((TypeError, ValueError)):
        evaluate.METRICS[name](["no", "yes"], ["no", "yes"])


# (task, example of the source, [(inputs, targets), ...] that the package t5 0.9.4 makes)
WSC = "super_glue_wsc_v102_simple_eval"
FORMATS = [
    ("glue_cola_v002", dict(sentence="Zoë  ran\n", label=-1),
     [("cola sentence: Zoë  ran\n", "<unk>")]),
    ("glue_sst2_v002", dict(sentence="ok", label=1), [("sst2 sentence: ok", "positive")]),
    ("glue_mrpc_v002", dict(sentence1="a", sentence2="b", label=0),
     [("mrpc sentence1: a sentence2: b", "not_equivalent")]),
    ("glue_qqp_v002", dict(question1="a", question2="b", label=1),
     [("qqp question1: a question2: b", "duplicate")]),
    ("glue_mnli_v002", dict(premise="p\u201d <br>", hypothesis="", label=2),
     [("mnli hypothesis:  premise: p\u201d <br>", "contradiction")]),
    ("glue_qnli_v002", dict(question="q", sentence="s", label=0),
     [("qnli question: q sentence: s", "entailment")]),
    ("glue_rte_v002", dict(sentence1="a", sentence2="b", label=1),
     [("rte sentence1: a sentence2: b", "not_entailment")]),
    ("glue_wnli_v002", dict(sentence1="a", sentence2="b", label=1),
     [("wnli sentence1: a sentence2: b", "entailment")]),
    ("glue_stsb_v002", dict(sentence1="a", sentence2="b", label=2.5),
     [("stsb sentence1: a sentence2: b", "2.4")]),
    ("super_glue_boolq_v102", dict(passage="p", question="q", label=0),
     [("boolq passage: p question: q", "False")]),
    ("super_glue_cb_v102", dict(premise="p", hypothesis="h", label=1),
     [("cb hypothesis: h premise: p", "contradiction")]),
    ("super_glue_copa_v102", dict(choice1="a", choice2="b", premise="p", question="q",
     label=1), [("copa choice1: a choice2: b premise: p question: q", "choice2")]),
    ("super_glue_rte_v102", dict(premise="p", hypothesis="h", label=0),
     [("rte hypothesis: h premise: p", "entailment")]),
    ("super_glue_axb_v102", dict(sentence1="p", sentence2="h", label=0),
     [("rte hypothesis: h premise: p", "entailment")]),
    ("super_glue_wic_v102", dict(sentence1="a", sentence2="b", word="bank", start1=0,
     label=1), [("wic sentence1: a sentence2: b word: bank", "True")]),
    ("super_glue_multirc_v102", dict(paragraph="a<br><br>b<b>c</b><br/>",
     question="q<br>?", answer="<b>x</b>", label=1, idx=dict(paragraph=1, question=2,
     answer=3)), [("multirc question: q ? answer: x paragraph: a  bc<br/>", "True")]),
    ("super_glue_record_v102",
     dict(passage="First.\n@highlight\nSecond\n@highlight\nend?\n@highlight\n",
     query="A @p", entities=["penguin", "ü"], answers=["penguin", "ü"],
     idx=dict(passage=3, query=7)),
     [("record query: A @p entities: penguin, ü passage: First. Second. end? ",
     answer) for answer in ("penguin", "ü")]),
    ("super_glue_record_v102", dict(passage="p", query="q", entities=[], answers=[],
     idx=dict(passage=4, query=8)), [("record query: q entities:  passage: p", "<unk>")]),
    (WSC, dict(text="Ann saw X it X there", span1_text="Ann", span2_text="it",
     span2_index=3, label=0), [("wsc: Ann saw *it* X *it* there", "Ann")]),
    # Two published examples are marked wrongly: punctuation follows; the index is too low.
    (WSC, dict(text='Good for him,", he said. ', span1_text="Ann", span2_text="him",
     span2_index=2, label=0), [('wsc: Good for *him* ,", he said.', "Ann")]),
    (WSC, dict(text="want to use it , but", span1_text="a pen", span2_text="it",
     span2_index=2, label=1), [("wsc: want to use *it* , but", "a pen")]),
    ("super_glue_wsc_v102_simple_train", dict(text="Ann saw it", span1_text="Ann",
     span2_text="it", span2_index=2, label=0), []),
    ("dpr_v001_simple", dict(sentence="Zoë fed the dog, it, was hungry it.", pronoun="it",
     candidates=["Zoë", "the dog"], label=1),
     [("wsc: Zoë fed the dog, *it*, was hungry it.", "the dog")]),
    ("squad_v010_allanswers", dict(id="1", context=" it's\t(a)\u00a0b\n~`",
     question="What's  up?", answers={"text": ["U.S.", "ü-ber"]}),
     [("question: What ' s up ? context: it ' s ( a ) \u00a0b ~ ` ", "U . S . ")]),
    ("cnn_dailymail_v002", dict(article="a\nb", highlights="c .\nd .", id="x"),
     [("summarize: a\nb", "c .\nd .")]),
    ("wmt16_enro_v003", dict(en="Good.", ro="Bun."),
     [("translate English to Romanian: Good.", "Bun.")]),
    ("wmt_t2t_deen_v003", dict(en="Good.", de="Gut."),
     [("translate German to English: Gut.", "Good.")]),
]  # fmt: skip


@pytest.mark.parametrize("name, example, expected", FORMATS)
def test_formats_make_the_texts_of_t5(name, example, expected):
    found = configs.TASKS[name].preprocess(example)
    assert [(row["inputs"], row["targets"]) for row in found] == expected


def test_labels_become_the_choices_of_the_tasks_of_glue():
    everything = {key: "x" for _, example, _ in FORMATS for key in example} | {"idx": 7}
    names = [name for name in configs.TASKS if "glue" in name]
    tasks = [configs.TASKS[name] for name in names]
    tasks = [task for task in tasks if task.postprocess == "label"]
    assert len(tasks) > 15
    for task in tasks:
        for label, word in [*enumerate(task.choices), (-1, "<unk>")]:
            fields = everything | {"label": label, "number": 2}
            (row,) = task.preprocess(fields)
            assert row["targets"] == word and row["idx"] == 7


def test_metrics_find_what_they_need_in_formatted_examples():
    examples = {name: example for name, example, _ in FORMATS}
    rows = {name: configs.TASKS[name].preprocess(examples[name]) for name in examples}
    (row,) = rows["super_glue_multirc_v102"]
    assert [row[f"idx/{key}"] for key in ("paragraph", "question", "answer")] == [1, 2, 3]
    (row,) = rows["squad_v010_allanswers"]
    assert row["answers"] == ["U . S . ", "ü - ber"]
    assert row["context"] == " it ' s ( a ) \u00a0b ~ ` "
    (row,) = rows["super_glue_record_v102"]
    assert (row["answers"], row["idx/passage"], row["idx/query"]) == ([], 4, 8)
    (row,) = configs.TASKS[WSC].preprocess(examples[WSC] | {"idx": 5})
    assert (row["label"], row["idx"]) == (1, 5)


IDS = {"idx/question": 7, "idx/passage": 1, "idx/query": 2, "answers": ["a", "b"]}
BOB = {"targets": "Bob's hat", "label": 1}
# (task, text, example, is_target, the value that t5 compares)
POSTPROCESSED = [
    ("super_glue_multirc_v102", "True", IDS, True, {"value": 1, "group": 7}),
    ("super_glue_multirc_v102", "yes", IDS, False, {"value": -1}),
    ("super_glue_record_v102", "a", IDS, True, {"value": ["a", "b"], "group": (1, 2)}),
    ("super_glue_record_v102", "a", IDS, False, {"value": "a"}),
    (WSC, "x", BOB, True, 1),
    (WSC, "the hat", BOB, False, 0),
    (WSC, "his Bob's HAT", BOB, False, 1),
    (WSC, "Bob's", BOB, False, 1),
    (WSC, "Bob's old hat", BOB, False, 1),
    (WSC, "Bob", BOB, False, 0),
    (WSC, "cat's", BOB, False, 0),
    (WSC, "a", BOB, False, -1),
    (WSC, "", BOB, False, -1),
    (WSC, "dog", {"targets": "the", "label": 0}, False, 0),
    (WSC, "the   the", {"targets": "dog", "label": 0}, False, 0),
    (WSC, "hat", {"targets": [5], "targets_pretokenized": "hat", "label": 0}, False, 1),
]


@pytest.mark.parametrize("name, text, example, is_target, expected", POSTPROCESSED)
def test_answers_of_super_glue_are_postprocessed_as_in_t5(
    name, text, example, is_target, expected
):
    found = configs.TASKS[name].postprocess(text, example=example, is_target=is_target)
    assert found == expected


# (metric, targets, predictions, the result of t5 0.9.4)
SUPER_GLUE_METRICS = [
    (
        t5_tasks.record,
        [{"value": ["a b"], "group": (1, 2)}, {"value": ["c"], "group": (1, 2)}],
        [{"value": "b"}, {"value": "x"}],
        {"em": 100.0, "f1": 100.0},
    ),
    (
        t5_tasks.multirc_f1,
        [{"value": 1, "group": 0}, {"value": 0, "group": 0}],
        [{"value": 1}, {"value": -1}],
        {"f1": 66.66666666666666},
    ),
    (
        t5_tasks.exact_match,
        [{"value": 1, "group": 0}, {"value": 0, "group": 0}, {"value": 1, "group": 1}],
        [{"value": 1}, {"value": 1}, {"value": 1}],
        {"exact_match": 50.0},
    ),
]


@pytest.mark.parametrize("metric, targets, predictions, expected", SUPER_GLUE_METRICS)
def test_metrics_of_super_glue_equal_those_of_t5(metric, targets, predictions, expected):
    assert metric(targets, predictions) == pytest.approx(expected, rel=1e-9)


def test_every_metric_and_every_member_of_a_mixture_exists():
    for task in configs.TASKS.values():
        assert all(callable(m) or m in evaluate.METRICS for m in task.metrics)
    for name, size in (
        ("glue_v002_proportional", 949_101),
        ("super_glue_v102_proportional", 185_673),
    ):
        rates = data.mixture_rates(name, SMALL)
        assert sum(rates.values()) == size
        trained = [task for task in rates if "train" in configs.TASKS[task].splits]
        assert trained == [task for task, rate in rates.items() if rate]


def test_names_that_the_core_does_not_know_are_found_in_the_extra():
    code = """
import configs, data
cfg = configs.load_recipe("small_glue_finetune")
print(data.find_task("glue_rte_v002", cfg).source)
print(len(data.mixture_rates(cfg.data.task, cfg)))
"""
    assert command("-c", code).split() == ["tfds:glue/rte:1.0.0", "11"]


# ---- T0 --------------------------------------------------------------------------------


@pytest.fixture
def p3(tmp_path):
    """Folders as in P3, without examples."""
    names = (
        "imdb_a imdb_a_score_eval gigaword_x gigaword_summarize_ trec_b race_high_c "
        "anli_d_r1_score_eval super_glue_copa_e"
    )
    for name in names.split():
        (tmp_path / name).mkdir()
    return tmp_path


# (mixture, rates: large datasets divide 500,000 among their prompts)
T0 = {"gigaword_x": 250_000, "imdb_a": 25_000, "trec_b": 5452}
T0_RATES = [
    ("t0_train", T0),
    ("t0+_train", T0 | {"race_high_c": 62_445}),
    ("t0++_train", T0 | {"race_high_c": 62_445, "super_glue_copa_e": 400}),
    ("t0_train_score_eval", {"imdb_a_score_eval": 1}),
    ("t0_eval_score_eval", {"anli_d_r1_score_eval": 1}),
]


@pytest.mark.parametrize("kind", ["seqio", "parquet"])
@pytest.mark.parametrize("name, rates", T0_RATES)
def test_rates_of_t0(p3, kind, name, rates):
    cfg = change(data=dict(task=name, source=f"{kind}:{p3}"))
    assert list(data.mixture_rates(name, cfg).items()) == sorted(rates.items())


def test_tasks_of_t0_have_no_eos_in_inputs_and_lose_it_in_long_targets(p3):
    cfg = change(data=dict(task="t0_train", source=f"seqio:{p3}", targets_length=4))
    task = data.find_task("imdb_a", cfg)
    assert task.source == f"seqio:{p3}/imdb_a"
    assert data.trim_and_add_eos([5, 6], "inputs", task, cfg.data).tolist() == [5, 6]
    assert data.trim_and_add_eos([5, 6], "targets", task, cfg.data).tolist() == [5, 6, 1]
    assert data.trim_and_add_eos([5, 6, 7, 8], "targets", task, cfg.data).tolist() == [
        5,
        6,
        7,
        8,
    ]
    with pytest.raises(UserError, match="imdb_x"):
        data.find_task("imdb_x", cfg)


def test_rates_by_size_are_those_of_t5_and_of_unimax():
    """UniMax gives all tasks the same tokens, but repeats none of them too often."""
    sizes = {"few": 5, "some": 40, "many": 90}
    assert rates.proportional(sizes, 30) == {"few": 5, "some": 30, "many": 30}
    assert rates.proportional(sizes, 30, 2)["many"] == pytest.approx(30**0.5)
    for budget, used in ((9, [3, 3, 3]), (65, [20, 22.5, 22.5]), (900, [20, 160, 360])):
        found = rates.unimax(sizes, budget, epochs=4)
        assert list(found.values()) == pytest.approx(used)


# ---- tfrecord --------------------------------------------------------------------------


def masked_crc(content):
    """The checksum of tfrecord files, bit by bit."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (crc & 1) * 0x82F63B78
    crc ^= 0xFFFFFFFF
    rotated = (crc >> 15 | crc << 17) & 0xFFFFFFFF
    return (rotated + 0xA282EAD8 & 0xFFFFFFFF).to_bytes(4, "little")


def to_tfrecord(record):
    size = len(record).to_bytes(8, "little")
    return size + masked_crc(size) + record + masked_crc(record)


def write_seqio_cache(folder, split, examples, shards=2):
    """Write a cache as seqio.scripts.cache_tasks_main does."""
    from tensorflow_datasets.proto import tf_example_generated_pb2

    folder.mkdir(parents=True, exist_ok=True)
    features = {
        key: {"shape": [] if isinstance(value, str) else [None]}
        for key, value in examples[0].items()
    }
    info = {"features": features, "num_shards": shards}
    (folder / f"info.{split}.json").write_text(json.dumps(info))
    for shard in range(shards):
        records = b""
        for example in examples[shard::shards]:
            stored = tf_example_generated_pb2.Example()
            for key, value in example.items():
                feature = stored.features.feature[key]
                if isinstance(value, str):
                    feature.bytes_list.value.append(value.encode())
                elif isinstance(value[0], float):
                    feature.float_list.value.extend(value)
                else:
                    feature.int64_list.value.extend(value)
            records += to_tfrecord(stored.SerializeToString())
        (folder / f"{split}.tfrecord-{shard:05}-of-{shards:05}").write_bytes(records)
    (folder / "COMPLETED").touch()


def test_every_flipped_bit_of_a_tfrecord_file_is_noticed(tmp_path):
    """Without the checksums, a flipped bit would give other token ids."""
    path, records = tmp_path / "a", [b"", b"beta"]
    content = b"".join(map(to_tfrecord, records))
    path.write_bytes(content)
    assert list(tfrecord.read_tfrecord(str(path), bytes, 2)) == records
    for bit in range(8 * len(content)):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=f"record {int(bit >= 8 * 16)} is damaged"):
            list(tfrecord.read_tfrecord(str(path), bytes))


def test_a_cut_tfrecord_file_is_noticed(tmp_path):
    path, content = tmp_path / "a", to_tfrecord(b"alpha") + to_tfrecord(b"beta")
    for size in range(len(content)):
        path.write_bytes(content[:size])
        with pytest.raises(UserError):
            list(tfrecord.read_tfrecord(str(path), bytes, 2))


def test_caches_of_seqio_are_read_and_incomplete_ones_refused(tmp_path):
    rows = [
        {"inputs": [5, 300, i], "targets_pretokenized": f"ü {i}", "weight": [0.5]}
        for i in range(5)
    ]
    write_seqio_cache(tmp_path / "imdb_a", "train", rows)
    cfg = change(data=dict(task="t0_train", source=f"seqio:{tmp_path}"))
    files = data.source_files(f"seqio:{tmp_path}/imdb_a", "train", cfg)
    found = [example for file in files for example in file.read()]
    lists = [{key: np.array(x).tolist() for key, x in row.items()} for row in found]
    rows = [row | {"targets": row["targets_pretokenized"]} for row in rows]  # texts win
    assert lists == rows[::2] + rows[1::2]
    assert data.source_files(f"seqio:{tmp_path}/imdb_a", "test", cfg) == []
    (tmp_path / "imdb_a" / "train.tfrecord-00001-of-00002").rename(tmp_path / "away")
    with pytest.raises(UserError, match="has 1 of 2 files of train"):
        data.source_files(f"seqio:{tmp_path}/imdb_a", "train", cfg)
    (tmp_path / "away").rename(tmp_path / "imdb_a" / "train.tfrecord-00001-of-00002")
    (tmp_path / "imdb_a" / "COMPLETED").unlink()
    with pytest.raises(UserError, match="COMPLETED"):
        data.source_files(f"seqio:{tmp_path}/imdb_a", "train", cfg)


TFDS_ROWS = [
    {
        "text": f"café {n}",
        "words": ["a", "b" * n][: n % 3],
        "label": n % 2,
        "score": n / 8,
        "idx": {"question": n, "answer": 2 * n},
        "translations": [{"de": "ja", "en": "yes"}] * (n % 4),
    }
    for n in range(13)
]


def write_tfds(folder, splits, kind="array_record", nested={}):
    """Write {split: rows} like TFDS, which needs TensorFlow to write tfrecord files."""
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core import (
        dataset_info,
        example_serializer,
        file_adapters,
        naming,
        sequential_writer,
    )

    kinds = {str: tfds.features.Text(), int: np.int64, float: np.float32}
    fields = {name: kinds.get(type(x)) for name, x in splits["train"][0].items()}
    features = tfds.features.FeaturesDict(fields | nested)
    folder.mkdir(parents=True)
    identity = dataset_info.DatasetIdentity("x", "1.0.0", str(folder), "m")
    info = dataset_info.DatasetInfo(builder=identity, features=features)
    info.set_file_format(file_adapters.FileFormat(kind))
    if kind == "array_record":
        writer = sequential_writer.SequentialWriter(info, 5, file_format=kind)
        writer.initialize_splits([*splits])
        writer.add_examples(splits)
        return writer.close_all()
    serializer = example_serializer.ExampleSerializer(features.get_serialized_info())
    found = []
    for split, rows in splits.items():
        names = naming.ShardedFileTemplate(
            data_dir=folder, dataset_name="x", split=split, filetype_suffix="tfrecord"
        )
        shards = [rows[i : i + 5] for i in range(0, len(rows), 5)]
        for path, shard in zip(names.sharded_filepaths(len(shards)), shards):
            encoded = map(features.encode_example, shard)
            records = map(serializer.serialize_example, encoded)
            Path(path).write_bytes(b"".join(map(to_tfrecord, records)))
        lengths = [len(shard) for shard in shards]
        found += [tfds.core.SplitInfo(split, lengths, 0, filename_template=names)]
    info.set_splits(tfds.core.SplitDict(found))
    info.write_to_directory(folder)


def test_tfds_datasets_of_both_formats_are_equal_and_need_no_tensorflow(tmp_path):
    from tensorflow_datasets import features

    text, found, before = features.Text(), {}, "tensorflow" in sys.modules
    nested = {
        "words": features.Sequence(text),
        "label": features.ClassLabel(num_classes=2),
        "idx": {"question": np.int32, "answer": np.int64},
        "translations": features.Sequence({"de": text, "en": text}),
    }
    for kind in ("array_record", "tfrecord"):
        folder = tmp_path / kind / "1.0.0"
        write_tfds(folder, {"train": TFDS_ROWS}, kind, nested)
        files = data.source_files(f"tfds:{folder}", "train", SMALL)
        found[kind] = [example for file in files for example in file.read()]
        assert data.source_files(f"tfds:{folder}", "test", SMALL) == []
    assert_equal(found["tfrecord"], found["array_record"])
    for row, expected in zip(found["tfrecord"], TFDS_ROWS, strict=True):
        assert row["score"] == expected["score"]
        assert list(row["words"]) == expected["words"]
    assert before or "tensorflow" not in sys.modules


# ---- libraries -------------------------------------------------------------------------


def test_datasets_of_the_hub_keep_dates_and_lack_splits(tmp_path):
    """A folder stands for a dataset of the hub. Dates and "007" stay texts."""
    pytest.importorskip("datasets")
    rows = [{"inputs": "2024-01-02", "targets": "007"}] * 3
    write_jsonl(tmp_path / "train.jsonl", rows)
    cfg = change(BYTES, data=dict(source=f"hf:{tmp_path}"))
    (opened,) = data.source_files(f"hf:{tmp_path}", "train", cfg)
    assert [row["targets"] for row in opened.read()] == ["007"] * 3
    assert len(list(opened.read())) == 3  # a second epoch
    assert data.source_files(f"hf:{tmp_path}", "validation", cfg) == []


@pytest.mark.parametrize(
    "content",
    ['{"pythonClassName": "evil.Text"}', '{"python_class_name": "evil.Text"}',
     '{"\\u0070ythonClassName": "evil.Text"}', '{"type": "evil.Text", "content": {}}',
     '{"type": "tensorflow_datasets.X", "content": "evil"}'],
)  # fmt: skip
def test_a_dataset_of_tfds_runs_no_code(content, tmp_path):
    (tmp_path / "evil.py").write_text("raise SystemError")
    (tmp_path / "dataset_info.json").write_text("{}")
    (tmp_path / "features.json").write_text(content)
    with pytest.raises(UserError, match="evil"):
        data.source_files(f"tfds:{tmp_path}", "train", BYTES)


def test_a_target_that_is_no_number_is_an_error():
    """An output that is none has the value -1, which must not equal it."""
    assert t5_tasks.number("yes", {}, False) == -1.0
    with pytest.raises(ValueError, match="yes"):
        t5_tasks.number("yes", {}, True)


# ---- pretokenize -----------------------------------------------------------------------


@pytest.mark.parametrize("task", ["span_corruption", "text_to_text"])
def test_pretokenized_files_give_the_same_batches_as_their_texts(tmp_path, task):
    """Also the same examples are held out."""
    rows = [
        {"text": f"café {n} " * (n % 7), "inputs": f"in {n}", "targets": f"out {n * n}"}
        for n in range(90)
    ]
    for i in range(3):
        write_jsonl(tmp_path / f"{i}.jsonl", rows[i::3])
    cfg = change(
        model=dict(vocab_size=384),
        data=dict(task=task, vocab="bytes", source=f"jsonl:{tmp_path}/*.jsonl"),
    )
    for shard in ("0/2", "1/2"):
        options = pretokenize.Options(cfg, output=str(tmp_path / "ids"), shard=shard)
        pretokenize.tokenize_shard(options)
    ids = change(cfg, data=dict(source=f"parquet:{tmp_path}/ids/*.parquet"))
    tokenizer = data.load_tokenizer(cfg)
    batches = [data.Batches(c, tokenizer) for c in (cfg, ids)]
    for _ in range(5):
        assert_equal(*map(next, batches))
    with pytest.raises(UserError, match="no split"):  # It would be the training data.
        pretokenize.tokenize_shard(replace(options, split="validation"))


def test_pretokenized_files_are_complete_and_have_their_vocabulary(tmp_path, tables):
    def tokenize(name, end="", **changes):
        text = '{"text": "alpha beta"}\n' * 1001 + end
        (tmp_path / name).write_text(text)
        cfg = change(BYTES, data=dict(source=f"jsonl:{tmp_path}/{name}", **changes))
        options = pretokenize.Options(cfg, output=str(tmp_path / f"ids of {name}"))
        pretokenize.tokenize_shard(options)

    tokenize("a", task="span_corruption", vocab="train:30")
    assert (tmp_path / "ids of a/spiece.model").exists()
    configs.TASKS["none"] = data.Task(preprocess=lambda record: [])
    tokenize("b", task="none")
    with pytest.raises(UserError, match="c:1002"):
        tokenize("c", "no JSON", task="span_corruption")
    files = sorted(path.parent.name for path in tmp_path.glob("*/*.parquet"))
    assert files == ["ids of a", "ids of b"]


# ---- plan: the cost of a step on other devices -----------------------------------------


def test_cycles_and_communication_are_read_from_a_program():
    """The body of a loop counts once for each turn. The lines are from the TPU compiler."""

    def priced(name):
        cost = '{"estimated_cycles":"500"}'
        return f'metadata={{op_name="jit(train_step)/{name}"}}, backend_config={cost}'

    matmul = priced("transpose(jvp())/dot_general")
    again = priced("transpose(jvp())/rematted_computation/mul")
    scatter = "kind=kCustom, calls=%all-reduce-scatter.3.clone"
    pallas = (
        'custom_call_target="tpu_custom_call", '
        'metadata={op_name="jit(train_step)/jvp()/pallas_call"}, '
        'backend_config={"cost_estimate":{"flops":"480000","transcendentals":"3"}}'
    )
    text = f"""%body (p: f32[2]) -> f32[2] {{
  %fusion.1 = bf16[4,8]{{1,0:T(8,128)}} fusion(%p), kind=kLoop, calls=%f, {matmul}
  %fusion.2 = bf16[4,8]{{1,0}} fusion(%fusion.1), {scatter}
  %async-collective-start.1 = (bf16[1,8]{{1,0}}, bf16[4,8], s32[2], bf16[4]) fusion(%fusion.2)
  %async-collective-done.1 = bf16[4,8]{{1,0}} fusion(%async-collective-start.1)
}}
ENTRY %main (p: f32[2]) -> f32[2] {{
  %while.1 = f32[2] while(%p), condition=%c, body=%body, known_trip_count":{{"n":"3"}}
  %all-reduce.1 = (f32[4], f32[2,2]) all-reduce(%p), attributes={{n="all-gather-start.1"}}
  %all-reduce.2 = f32[4] all-reduce(%p), replica_groups={{{{0}},{{1}},{{2}},{{3}}}}
  %fusion.4 = f32[2] fusion(%p), {priced("sub")}
  %fusion.5 = f32[2] fusion(%p), {priced("jvp()/closed_call/mul")}
  %fusion.6 = f32[2] fusion(%p), {again}
  %copy.7 = f32[2] copy(%p), backend_config={{"estimated_cycles":"7"}}
  %kernel.1 = f32[2] custom-call(%p), {pallas}
}}"""
    # The compiler does not price the kernel, which both cores of a v5p share.
    kernel = 480_000 // (2 * plan.KERNEL_FLOPS_PER_CYCLE)
    assert plan.estimated_cycles(text, cores=2) == {
        "backward": 3 * 500,
        "optimizer": 500,
        "forward": 500 + kernel,
        "recomputation": 500,
        "copies": 7,
    }
    assert plan.communication(text, 4) == {
        "reduce-scatter": [3, 3 * 3 * 64],
        "collectives, overlapped": [3, 3 * 3 / 4 * (16 + 64)],
        "all-reduce": [1, 2 * 3 / 4 * (16 + 16)],
    }


GROUPS = [
    ("{{0,2,4,6},{1,3,5,7}}", 4),
    ("[2,4]<=[4,2]T(1,0)", 4),
    ("[4,2]<=[8]", 2),
    ("{}", 8),
    ("mesh['axis_0'=4,'axis_1'=2] {'axis_0'}", 4),
    ("mesh['axis_0'=2,'axis_1'=4], device_ids=([4,2]T(1,0)) {'axis_0'}", 2),
    ("mesh['axis_0'=2,'axis_1'=4] {'axis_0','axis_1'}", 8),
]


@pytest.mark.parametrize("groups, size", GROUPS)
def test_every_form_of_a_group_of_devices_is_read(groups, size):
    line = f"%a = f32[8]{{0}} all-gather(%b), replica_groups={groups}, dimensions={{0}}"
    assert plan.group_size(line, 8) == size


def test_data_parallelism_sends_the_gradients_once():
    """A plan for four devices, checked with formulas."""
    flags = "--config tiny --devices 4 --train.microbatches 1"
    out = command("-m", "extras.plan", *flags.split())
    numbers = dict(re.findall(r"^(\S[^\n]*?) +([\d.]+) ", out, re.M))
    table = model.param_table(configs.RECIPES["tiny"].model)
    weights = 4 * model.count_params(table) / 1e9
    assert weights < float(numbers["weights and optimizer"]) < 1.1 * weights
    once = 2 * 3 / 4 * weights  # what each of four devices sends in a ring
    assert once < float(numbers["all-reduce"]) < 1.3 * once
    assert "all-gather" not in numbers and "step on TPU v4" in numbers


# ---- toys ------------------------------------------------------------------------------


def test_numbers_are_spelled():
    words = {
        0: "zero",
        21: "twenty-one",
        100: "one hundred",
        999_040: "nine hundred ninety-nine thousand forty",
    }
    assert {n: toys.spell_number(n) for n in words} == words


def test_the_tasks_by_rule_have_right_answers():
    task, cfg = data.find_task("by_rule_even", BYTES), change(data=dict(task="by_rule"))
    rows = list(data.read_task("by_rule_even", "validation", cfg))
    assert {row["targets"] for row in rows} == {"no", "yes"} == set(task.choices)
    for row in rows:
        number = int(re.search(r"\d+", row["inputs"])[0])
        assert row["targets"] == ("no" if number % 2 else "yes")
    (day,) = [x for x in data.TASKS["by_rule_date"].preprocess(toys.number_fields(12))]
    assert day == {"inputs": "date: 1970-01-13", "targets": "13 January 1970"}


# ---- vocabularies ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "extra_ids, text, ids",
    [
        (100, "Aü", [68, 198, 191]),
        (0, "A<extra_id_0>b", [68, 258, 101]),
        (
            0,
            "<extra_id_10><extra_id_11>",
            [248, *(byte + 3 for byte in b"<extra_id_11>")],
        ),
        (125, "<extra_id_0> é", [383, 35, 198, 172]),
    ],
)
def test_bytes_have_the_ids_of_byt5(extra_ids, text, ids):
    tokenizer = data.load_tokenizer(change(BYTES, data=dict(extra_ids=extra_ids)))
    assert tokenizer.encode([text])[0].tolist() == ids
    assert tokenizer.decode([*ids, 1, 68]) == text
    assert tokenizer.decode([68, 198]) == "A"  # half of a character


def test_a_tokenizer_json_is_read_by_its_own_library(tmp_path, capsys):
    tokenizers = pytest.importorskip("tokenizers")
    words = ["<pad>", "</s>", "<unk>", "▁a", "▁b", "<extra_id_1>", "<extra_id_0>"]
    library = tokenizers.Tokenizer(
        tokenizers.models.Unigram([(word, -1.0) for word in words], unk_id=2)
    )
    library.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    library.decoder = tokenizers.decoders.Metaspace()
    library.add_special_tokens(["<extra_id_0>", "<extra_id_1>"])
    library.save(str(tmp_path / "tokenizer.json"))
    cfg = change(BYTES, data=dict(vocab=f"{tmp_path}/tokenizer.json"))
    tokenizer = data.load_tokenizer(cfg)
    assert (tokenizer.size, tokenizer.first_sentinel, tokenizer.extra_ids) == (7, 6, 2)
    (ids,) = tokenizer.encode(["a b<extra_id_0> a"])
    assert ids.tolist() == [3, 4, 6, 3]
    assert tokenizer.decode([3, 4, 6, 1, 3]) == "a b<extra_id_0>"
    tokenizer.save(tmp_path / "run")
    configs.save_run(cfg, tmp_path / "run")
    assert data.load_tokenizer(cfg, tmp_path / "run").sha256 == tokenizer.sha256
    # A run of bytes does not read a file that a failed start left.
    assert data.load_tokenizer(BYTES, tmp_path / "run").file_name == ""
    convert.write_hf_vocabulary(tokenizer, tmp_path, 7)
    assert "append" in capsys.readouterr().out  # The file has no post_processor.


class Letters:
    size = 6

    def encode(self, text):
        return ["abc".index(letter) + 3 for letter in text]

    def decode(self, ids):
        return "".join("abc"[i - 3] for i in ids)


def test_a_recipe_may_bring_its_own_vocabulary(monkeypatch):
    monkeypatch.setattr(configs, "VOCABULARY", Letters())
    tokenizer = data.load_tokenizer(BYTES)
    assert tokenizer.encode(["ab<extra_id_1>c"])[0].tolist() == [3, 4, 104, 5]
    assert tokenizer.decode([3, 4, 105, 999, 5, 1, 3]) == "ab<extra_id_0>c"
    for wrong in (1, 6):  # EOS, and the last sentinel
        monkeypatch.setattr(Letters, "encode", lambda self, text: [wrong])
        with pytest.raises(UserError, match="VOCABULARY.encode"):
            tokenizer.encode(["a"])


# ---- t5x_checkpoints -------------------------------------------------------------------

T5X_MODEL = ModelConfig(  # with matrices that are wide, tall, square and not factored
    vocab_size=300, d_model=128, d_ff=130, d_kv=32, num_heads=4, num_layers=1,
    num_decoder_layers=2, relative_buckets=20,
)  # fmt: skip


def t5x_state(m, seed=0):
    """Return a state of T5X, and gradients of which a step of Adafactor has its slots."""
    rng, tree = np.random.default_rng(seed), {"state/step": np.int32(1000)}
    gradients = jax.tree.map(
        lambda p: np.empty(p.shape, np.float32), model.param_table(m)
    )
    for path, layer, name, _ in convert.all_foreign_names(m):
        part = partition.flatten(gradients)[path][layer]
        shape = part.shape
        tree[f"target/{name}"] = rng.standard_normal(shape, dtype=np.float32)
        g = rng.standard_normal(shape, dtype=np.float32)
        part[...] = g
        slots = dict.fromkeys(("m", "v", "v_row", "v_col"), np.zeros(1, np.float32))
        if min(shape) >= 128 and len(shape) == 2:
            short, long = np.argsort(shape, kind="stable")
            slots |= {"v_row": (g * g).mean(long), "v_col": (g * g).mean(short)}
        else:
            slots["v"] = g * g
        tree |= {f"state/param_states/{name}/{k}": a for k, a in slots.items()}
    return flax.traverse_util.unflatten_dict(tree, sep="/"), gradients


def write_t5x(folder, tree, version=3):
    folder.mkdir(parents=True)
    content = {"version": version, "optimizer": tree}
    content = flax.serialization.msgpack_serialize(content)
    (folder / "checkpoint").write_bytes(content)
    return folder


def restored_state(run):
    """Return the train.TrainState that --train.restore all loads."""
    cfg = configs.load_run(run)[0]
    template = train.abstract_state(cfg)
    return train.load_state(cfg, template, partition.newest_checkpoint(run))


def test_t5x_is_read_with_the_optimizer(tmp_path):
    tree, gradients = t5x_state(T5X_MODEL)
    convert.convert(write_t5x(tmp_path / "t5x", tree), tmp_path / "run")
    assert configs.load_run(tmp_path / "run")[0].model == T5X_MODEL
    state = restored_state(tmp_path / "run")
    adafactor = optax.scale_by_factored_rms()
    _, expected = adafactor.update(gradients, adafactor.init(state.params), state.params)
    found = state.opt_state[0]
    assert found.count == state.step == 1000
    assert_close(found._replace(count=0), expected._replace(count=0), 1e-6)


@pytest.mark.parametrize("slot", [{"m": ones(128, 300)}, {"v_row": ones(1)}])
def test_the_state_of_another_optimizer_is_left_out(slot, tmp_path):
    """Adafactor with momentum, or one that has no averages for a matrix."""
    tree, _ = t5x_state(T5X_MODEL)
    tree["state"]["param_states"]["decoder"]["logits_dense"]["kernel"] |= slot
    source = write_t5x(tmp_path / "t5x", tree)
    assert not any("opt_state" in name for name in convert.read_model(source).arrays)


def test_orbax_is_read(tmp_path):
    import orbax.checkpoint as ocp

    tree, _ = t5x_state(T5X_MODEL)
    with ocp.PyTreeCheckpointer() as writer:
        writer.save(tmp_path / "checkpoint_1000/state", tree)
    found = convert.read_model(tmp_path / "checkpoint_1000").arrays
    expected = convert.read_model(write_t5x(tmp_path / "t5x", tree)).arrays
    assert found.keys() == expected.keys()
    assert_equal(found, expected)


def test_other_versions_of_t5x_are_refused(tmp_path):
    source = write_t5x(tmp_path / "old", {}, version=2)
    with pytest.raises(UserError, match="version 2"):
        convert.convert(source, tmp_path / "run")


@pytest.mark.parametrize(
    "text, expected",
    [
        ("x.mlp_activations = ('swish', 'linear')", {"activation": "gated_silu"}),
        ("mlp_activations = ['gelu', 'linear']", {"activation": "gated_gelu"}),
        ("a.DenseReluDense.activation = 'relu'  # gelu", {"activation": "relu"}),
        ("# mlp_activations = ('silu', 'linear')\nother = 3", {}),
        ("DROPOUT_RATE = 0.2\nT5Config.dropout_rate = %DROPOUT_RATE", {"dropout": 0.2}),
        ("T5Config.dropout_rate = 0.1\nT5Config.dropout_rate = 1e-5", {"dropout": 1e-5}),
        ("RelativePositionBiases.max_distance = 7", {"relative_max_distance": 7}),
    ],
)
def test_gin_files_state_what_weights_do_not_show(text, expected, tmp_path, capsys):
    """The last statement counts, and the folder of the checkpoint before its parent."""
    m, inner = ModelConfig(), tmp_path / "checkpoint_5"
    inner.mkdir()
    (tmp_path / "operative_config.gin").write_text(text)
    assert t5x_checkpoints.with_gin(m, [inner, tmp_path]) == replace(m, **expected)
    printed = capsys.readouterr().out  # what is assumed
    assumed = {name for name in t5x_checkpoints.GIN_PATTERNS if name in printed}
    assert assumed == t5x_checkpoints.GIN_PATTERNS.keys() - expected
    (inner / "config.gin").write_text(
        "RelativePositionBiases.max_distance = 9\nT5Config.dropout_rate = 0.5\n"
        "mlp_activations = ('silu',)"
    )
    stated = dict(activation="silu", dropout=0.5, relative_max_distance=9)
    assert t5x_checkpoints.with_gin(m, [inner, tmp_path]) == replace(m, **stated)
    (inner / "config.gin").write_text("mlp_activations = ('tanh', 'linear')")
    with pytest.raises(UserError, match="tanh"):
        t5x_checkpoints.with_gin(m, [inner, tmp_path])


def test_t5x_and_back_with_the_optimizer(tmp_path):
    tree, _ = t5x_state(T5X_MODEL)
    convert.convert(write_t5x(tmp_path / "t5x", tree), tmp_path / "run")
    tree = partition.flatten(tree)
    for dtype in ("float32", "bfloat16"):
        folder = tmp_path / "run" / ".." / dtype  # TensorStore refuses such a path
        convert.convert(tmp_path / "run", folder, to="t5x", dtype=dtype)
        back = partition.flatten(t5x_checkpoints.read_own_format(folder))
        assert back.keys() == tree.keys()
        for name, array in tree.items():
            kind = dtype if name.startswith("target") else array.dtype
            assert back[name].dtype == kind
            np.testing.assert_array_equal(back[name], array.astype(kind), err_msg=name)


@pytest.mark.skipif("PLAIN_T5_CASES" not in os.environ, reason="needs PLAIN_T5_CASES")
@pytest.mark.parametrize("kind", ["checkpoint_1000", "orbax/checkpoint_1000"])
def test_checkpoints_that_t5x_wrote_and_back(kind, tmp_path):
    cases = Path(os.environ["PLAIN_T5_CASES"]) / "t5x/checkpoint/v11"
    wanted = np.load(cases / "params.npz")
    convert.convert(cases / kind, tmp_path / "run")
    assert restored_state(tmp_path / "run").step == 1000
    convert.convert(tmp_path / "run", tmp_path / "back", to="t5x")
    back = partition.flatten(t5x_checkpoints.read_own_format(tmp_path / "back"))
    first = partition.flatten(t5x_checkpoints.read_own_format(cases / "checkpoint_1000"))
    assert back.keys() == first.keys() >= set(wanted.files)
    for name in back:
        assert np.asarray(back[name]).dtype == np.asarray(first[name]).dtype
        np.testing.assert_array_equal(back[name], first[name], err_msg=name)
        if name in wanted:
            np.testing.assert_array_equal(back[name], wanted[name], err_msg=name)


def test_t5x_keeps_what_its_weights_do_not_show(tmp_path, pieces):
    m = replace(
        SMALL.model, dtype="auto", activation="gated_silu", relative_max_distance=40,
        dropout=0.05, tied=True,
    )  # fmt: skip
    source = write_model(tmp_path / "hf", m, hf_state(m))
    set_pieces(source, pieces, extra_ids=20)
    convert.convert(source, tmp_path / "t5x", to="t5x")
    assert "network.T5Config.emb_dim = 40\n" in (tmp_path / "t5x/config.gin").read_text()
    read = convert.read_model(tmp_path / "t5x")
    assert read.cfg.model == m and read.tokenizer.extra_ids == 20
    (tmp_path / "t5x/spiece.model").unlink()
    assert convert.find_vocabulary([tmp_path / "t5x"], 256) == ("", 20)
    assert convert.find_vocabulary([tmp_path / "t5x"], 384) == ("bytes", 20)


@pytest.mark.parametrize(
    "path", ["router", "decoder/layers/mlp/norm/bias", "encoder/layers/mlp/kernel"]
)
def test_a_parameter_of_a_fork_has_no_name_in_other_formats(path):
    with pytest.raises(UserError, match=path):
        convert.foreign_names(path, 0)


def test_umt5_is_not_written_for_t5x(tmp_path):
    m = replace(SMALL.model, per_layer_bias=True)
    source = write_model(tmp_path / "umt5", m, hf_state(m))
    with pytest.raises(UserError, match="T5X"):
        convert.convert(source, tmp_path / "t5x", to="t5x")


@pytest.mark.parametrize(
    "damage",
    [
        {"shape": [10**9, 10**6]}, {"shape": [299, 128]}, {"chunks": [300, 64]},
        {"dtype": "<i4"}, {"dtype": ">f4"}, {"order": "F"}, None,
    ],
)  # fmt: skip
def test_a_damaged_zarr_array_is_named(damage, tmp_path):
    """A missing chunk must not be read as zeros, and a wrong shape must not use memory."""
    tree, _ = t5x_state(T5X_MODEL)
    source = write_t5x(tmp_path / "t5x", {"target": tree["target"], "state": {"step": 5}})
    convert.convert(source, tmp_path / "zarr", to="t5x")
    array = tmp_path / "zarr/target.token_embedder.embedding"
    about = json.loads((array / ".zarray").read_text())
    if damage:
        (array / ".zarray").write_text(json.dumps(about | damage))
    else:
        next(path for path in array.iterdir() if path.name != ".zarray").unlink()
    with pytest.raises((UserError, Exception), match="token_embedder.embedding"):
        convert.convert(tmp_path / "zarr", tmp_path / "run")


# ---- mesh_tensorflow -------------------------------------------------------------------


MESH_TENSORFLOW = HERE / "assets/mesh_tensorflow/model.ckpt-1234"


def recorded_value(name, shape):
    """Return the numbers that an array of the recorded checkpoint has, by its name."""
    numbers = zlib.crc32(name.encode()) % 9973 + np.arange(math.prod(shape))
    return numbers.reshape(shape).astype(np.float32)


def test_a_checkpoint_that_tensorflow_wrote(tmp_path):
    """The names are those of Mesh TensorFlow. The optimizer's state is restored."""
    convert.convert(MESH_TENSORFLOW, tmp_path / "run")
    params = partition.flatten(params_of(tmp_path / "run"))
    for path, layer, name in (
        ("embed", ..., "shared/embedding"),
        ("unembed", ..., "decoder/logits/kernel"),
        ("encoder/norm", ..., "encoder/rms_norm/scale"),
        ("decoder/relative_bias", ..., "layer_000/SelfAttention/relative_attention_bias"),
        ("decoder/layers/self_attention/out", 0, "layer_000/SelfAttention/o"),
        ("decoder/layers/cross_attention/key", 0, "layer_001/EncDecAttention/k"),
        ("decoder/layers/mlp/norm", 0, "layer_002/rms_norm/scale"),
        ("decoder/layers/mlp/gate", 0, "layer_002/DenseReluDense/wi_0/kernel"),
    ):
        name = f"decoder/block_000/{name}" if name.startswith("layer") else name
        array = params[path][layer]
        np.testing.assert_array_equal(array, recorded_value(name, array.shape), name)
    state = restored_state(tmp_path / "run")
    assert state.step == 1234
    v = state.opt_state[0].v["decoder"]["layers"]["mlp"]["down"][1]
    name = "decoder/block_001/layer_002/DenseReluDense/wo/kernel_slot_v"
    np.testing.assert_array_equal(v, recorded_value(name, v.shape))


def test_a_flipped_bit_of_tensorflow_is_noticed(tmp_path):
    whole = mesh_tensorflow.read_tensors(MESH_TENSORFLOW)
    files = {f.name: f.read_bytes() for f in MESH_TENSORFLOW.parent.iterdir()}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    rng, noticed = np.random.default_rng(0), 0
    for name in sorted(files) * 30:
        damaged = bytearray(files[name])
        damaged[rng.integers(len(damaged))] ^= 1 << rng.integers(8)
        (tmp_path / name).write_bytes(damaged)
        try:
            found = mesh_tensorflow.read_tensors(tmp_path / MESH_TENSORFLOW.name)
        except (UserError, Exception):
            noticed += 1
        else:
            assert found.keys() == whole.keys()
            assert_equal(found, whole)
        (tmp_path / name).write_bytes(files[name])
    assert noticed > 50


@pytest.mark.parametrize("rows, expected", [(3, "v_row"), (4, "v_col"), (5, "v_row")])
def test_mesh_tensorflow_names_the_means_of_a_square_matrix_differently(
    rows, expected, monkeypatch
):
    name = "encoder/block_000/layer_000/SelfAttention/q"
    arrays = {
        "global_step": 7,
        name: ones(rows, 4),
        f"{name}_slot_vr": ones(min(rows, 4)),
    }
    monkeypatch.setattr(mesh_tensorflow, "read_tensors", lambda _: arrays)
    _, slots, _ = mesh_tensorflow.read("prefix")
    assert [list(by_slot) for by_slot in slots.values()] == [[expected]]


# ---- jobs ------------------------------------------------------------------------------


def write_c4(folder):
    """Write the texts of the run `pretrained` as TFDS prepares C4."""
    rows = [{"text": line} for line in sentences(400)]
    write_tfds(folder / "c4/en/2.2.0", {"train": rows, "validation": rows[:20]})


def test_c4_of_tfds_gives_the_same_batches_as_the_files_of_allenai(pretrained, tmp_path):
    write_c4(tmp_path)
    files, _ = configs.load_run(pretrained)
    assert files.data.task == "c4_v220_span_corruption"
    tfds = change(files, data=dict(source="", tfds_dir=str(tmp_path)))
    tokenizer = data.load_tokenizer(files, pretrained)
    for split in ("train", "validation"):
        both = [list(data.read_task(tfds.data.task, split, cfg)) for cfg in (files, tfds)]
        assert [row["text"] for row in both[0]] == [row["text"] for row in both[1]]
    assert_equal(*(next(data.Batches(cfg, tokenizer)) for cfg in (files, tfds)))


def test_job_glue(pretrained, here):
    """A mixture of eight tasks is trained and STS-B evaluated, and afterwards two tasks."""
    fields = {
        **dict.fromkeys(("cola", "sst2"), ["sentence"]),
        **dict.fromkeys(("mrpc", "rte", "stsb"), ["sentence1", "sentence2"]),
        "qqp": ["question1", "question2"],
        "qnli": ["question", "sentence"],
        "mnli": ["premise", "hypothesis"],
    }
    for name, keys in fields.items():
        rows = [
            dict.fromkeys(keys, x) | {"label": i % 2 * (1.0 if name == "stsb" else 1)}
            for i, x in enumerate(sentences(20))
        ]
        folder = here / f"glue/{name}/1.0.0"
        write_tfds(folder, {"train": rows, "validation": rows[:8]})
    run(
        f"train --config small_glue_finetune --run_dir glue/run --init_from {pretrained} "
        f"{FINETUNE} --data.tfds_dir {here} --train.steps 1000050"
    )
    assert_learns("glue/run")
    rows = [{"passage": "alpha", "question": "beta", "label": i} for i in (0, 1)]
    folder = here / "super_glue/boolq/1.0.2"
    write_tfds(folder, {"train": rows, "validation": rows})
    for flags in ("glue_rte_v002", "super_glue_boolq_v102 --mode rank"):
        run(f"evaluate --run_dir glue/run --output glue/run --tasks {flags}")
    names = [name.split("/") for name in evaluate.read_metrics(["glue/run"])[1_000_050]]
    metrics = [tuple(name[1:]) for name in names if name[0] == "predict_eval"]
    stsb, rte, boolq = "glue_stsb_v002", "glue_rte_v002", "super_glue_boolq_v102-rank"
    assert metrics == [
        *((stsb, "pearson_corrcoef"), (stsb, "spearman_corrcoef"), (rte, "accuracy")),
        *((boolq, name) for name in ("accuracy", "f1", "auc-roc", "auc-pr")),
    ]


def test_job_t0(pretrained, here):
    """Adapt a model to language modeling, train it on P3, and evaluate by ranks.

    The adaptation begins at the learning rate with which a million steps end.
    """
    write_c4(here)
    run(
        f"train --config small_lm_adapt --run_dir lm --init_from {pretrained} {PERIODS} "
        f"--data.tfds_dir {here} --data.inputs_length 32 "
        "--data.targets_length 16 --train.steps 1000020 --train.eval_every 20"
    )
    assert [*values_of("lm", "loss_eval/c4_v220_prefix_lm/loss")] == [1_000_020]
    rates = [*values_of("lm", "train/learning_rate").values()]
    assert rates == pytest.approx([1e-3] * 20, rel=1e-4)

    def example(inputs, targets, **more):
        ids = {"inputs": [7], "targets": [7]}
        texts = {"inputs_pretokenized": inputs, "targets_pretokenized": targets}
        return ids | texts | more

    for name in ("imdb_good", "trec_which", "ag_news_what"):
        rows = [example(line, line[:6]) for line in sentences(30)]
        write_seqio_cache(here / name, "train", rows)
    rows = [
        example(x, x[6 * j :][:6], idx=[i, j], is_correct=[int(j == 0)])
        for i, x in enumerate(sentences(6))
        for j in (0, 1)
    ]
    write_seqio_cache(here / "super_glue_copa_a_score_eval", "validation", rows)
    (read,) = t5_tasks.p3_texts(rows[0])  # as from the copy on the Hub
    assert read["targets"] == rows[0]["targets_pretokenized"]
    cfg = change(data=dict(source=f"seqio:{here}"))
    task = t5_tasks.p3_task("super_glue_copa_a_score_eval", cfg)
    metrics, _ = evaluate.compute_metrics(task, [read], ["\nNo"], ["No"])
    assert metrics == {"accuracy": 100}
    run(
        f"train --config small_t0 --init_from lm --run_dir run {FINETUNE} "
        f"--data.source seqio:{here} --train.microbatches 1 --train.steps 1100100"
    )
    assert_learns("run")
    run("evaluate --run_dir run --output eval --mode rank --tasks t0_eval_score_eval")
    name = "predict_eval/super_glue_copa_a_score_eval-rank/accuracy"
    assert values_of("eval", name) == {1_100_100: 100.0}
    # Tasks of P3 need no --data.task, and those of a mixture without the split are left out.
    flags = f"--data.source seqio:{here} --tasks t0_eval_score_eval,imdb_good"
    run(f"evaluate --run_dir lm --mode rank {flags} --output eval2")
    assert len(evaluate.read_log(Path("eval2/metrics.jsonl"))) == 1


def test_scan_is_read_as_its_authors_publish_it(here):
    Path("SCAN/simple_split").mkdir(parents=True)
    for split, actions in ("train", "I_RUN I_TURN_LEFT"), ("test", "I_WALK"):
        path = Path(f"SCAN/simple_split/tasks_{split}_simple.txt")
        path.write_text(f"IN: some command OUT: {actions}\n" * 20)
    scan = (
        f"data --config {HERE}/examples/scan.py --data.vocab bytes --model.vocab_size 384"
    )
    assert "\n    some command\n" in run(scan) and "\n    RUN LEFT\n" in run(scan)
    assert "\n    WALK\n" in run(f"{scan} --data.task scan_simple_test")


def test_film_reviews_become_text_and_examples(here):
    folders = "train/neg", "train/pos", "train/unsup", "test/neg", "test/pos"
    for folder in folders:
        Path("aclImdb", folder).mkdir(parents=True)
        for i in range(600):
            text = f"Film {i}<br />of {folder}."
            Path(f"aclImdb/{folder}/{i}_1.txt").write_text(text)
    runpy.run_path(f"{HERE}/examples/imdb.py", run_name="__main__")
    reviews = Path("aclImdb/reviews.txt").read_text().splitlines()
    assert len(reviews) == 1800 and "Film 7 of train/unsup." in reviews
    assert not any("test" in review for review in reviews)
    counts, texts = {"train": 200, "validation": 1000, "test": 1200}, []
    for split, count in counts.items():
        lines = [json.loads(line) for line in open(f"aclImdb/{split}.jsonl")]
        texts += [line["text"] for line in lines]
        labels = [(line["text"].split("/")[-1], line["label"]) for line in lines]
        assert len(labels) == count and set(labels) == {("neg.", 0), ("pos.", 1)}
    assert len(set(texts)) == len(texts)
    show = f"data --config {HERE}/examples/imdb.py --show 20 --data.vocab bytes"
    rows = run(f"{show} --model.vocab_size 384")
    pairs = re.findall(r"review: Film .*/(...)\.\ntargets\n    (.*)", rows)
    assert set(pairs) == {("neg", "negative"), ("pos", "positive")}


def test_the_recipe_of_ul2_has_an_objective_of_its_own(monkeypatch):
    text = (HERE / "README.md").read_text()
    monkeypatch.setattr(data, "read_python", lambda: [{"text": text}])
    command = f"data --config {HERE}/examples/ul2.py --data.vocab bytes --show 40"
    rows = run(command).split("inputs\n    ")
    for mode in ("[NLU]", "[NLG]", "[S2S]"):
        own = [row for row in rows if row.startswith(mode)]
        assert own and all(("<extra_id_0>" in row) == (mode != "[S2S]") for row in own)


# ---- bench -----------------------------------------------------------------------------


@pytest.mark.slow
def test_the_benchmark_decodes_to_the_full_length(monkeypatch, capsys):
    results, tiny = [], configs.RECIPES["tiny"]
    monkeypatch.setattr(bench, "mean_seconds", lambda run, *_: run() or 1.0)
    generate = bench.infer.generate

    def record(*args):
        results.append(generate(*args))
        return results[-1]

    monkeypatch.setattr(bench.infer, "generate", record)
    bench.measure("tiny", change(tiny, train=dict(batch_size=16)), 1)
    assert "128.0 tokens/s" in capsys.readouterr().out
    assert np.asarray(results[0][0]).all()


# ---- examples: the notebook and the exercises ------------------------------------------

EXERCISES = runpy.run_path(str(HERE / "examples/exercises.py"))["EXERCISES"]
SCRIPTS = "configs data evaluate infer model partition train".split()


def test_the_notebook_has_run_and_names_what_exists():
    cells = json.loads((HERE / "examples/plain_t5.ipynb").read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    outputs = [output["output_type"] for cell in code for output in cell["outputs"]]
    assert len(cells) <= 30 and "error" not in outputs
    assert [cell["execution_count"] for cell in code] == [*range(1, len(code) + 1)]
    for node in ast.walk(ast.parse("\n".join("".join(cell["source"]) for cell in code))):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in SCRIPTS:
            assert hasattr(sys.modules[ast.unparse(node.value)], node.attr), node.attr


@pytest.fixture(scope="module")
def classroom(tmp_path_factory):
    """A copy of the tree, with a commit from which solutions are restored."""
    unneeded = shutil.ignore_patterns(".*", "runs", "__pycache__", "forks")
    tree = shutil.copytree(
        HERE, tmp_path_factory.mktemp("exercises") / "tree", ignore=unneeded
    )
    for git in ("init -q", "add .", "-c user.name=a -c user.email=a commit -q -m a"):
        subprocess.run(["git", *git.split()], cwd=tree, check=True)
    return tree


@pytest.mark.slow
@pytest.mark.parametrize("exercise", EXERCISES)
def test_the_tests_of_an_exercise_need_its_body(exercise, classroom):
    def exercises(verb):
        process = start("examples/exercises.py", verb, exercise, cwd=classroom)
        return process.communicate(timeout=600)[0]

    path = classroom / f"{exercise.split('.')[0]}.py"
    original = path.read_text()
    exercises("start")
    assert re.search(r"= \d+ failed, \d+ deselected", exercises("check"))
    exercises("solution")
    assert path.read_text() == original  # with which all tests pass


# ---- forks -----------------------------------------------------------------------------

FORKS = sorted((HERE / "forks").glob("*.patch"))


def test_forks_are_short_and_apply(tmp_path):
    """A fork is a patch of at most 60 changed lines."""
    assert len(FORKS) >= 12
    for file in HERE.glob("*.py"):
        shutil.copy(file, tmp_path)
    for patch in FORKS:
        _, diff = patch.read_text().split("diff --git ", 1)
        changed = re.findall(r"^[+-](?!\+\+ |-- )", diff, re.MULTILINE)
        assert len(changed) <= 60, patch.name
        env = os.environ | {"GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}
        check = "git", "apply", "--check", patch
        subprocess.run(check, cwd=tmp_path, env=env, check=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", [patch.stem for patch in FORKS])
def test_fork_trains(name, tmp_path):
    """Each fork trains three steps of `tiny`, and then decodes a held-out example."""
    run = SimpleNamespace(**runpy.run_path(HERE / "forks/run.py"))
    tree = run.clone(name, tmp_path)
    flags = "--data.source", f"text:{HERE}/README.md", "--data.vocab", "bytes"
    flags += "--train.save_every", "3" if name == "trie" else "0"
    assert 0 < run.held_out_loss(tree, tmp_path / "run", 3, 0, *flags) < 10
    if name == "trie":
        flags = f"--run_dir {tmp_path}/run --decode.choices yes|no --decode.beams 3"
        flags += " --decode.num_return 3 --decode.write_scores True text"
        lines = command("infer.py", *flags.split(), cwd=tree).splitlines()
        assert sorted(line.split("\t")[1] for line in lines) == ["no", "yes"]
