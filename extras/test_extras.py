"""Test the tasks, readers and the plan of extras: `pytest extras`."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import configs
import data
import evaluate
import model
from configs import UserError
from extras import plan, pretokenize, t5_tasks, tfrecord, toys  # noqa: F401 (they add to TASKS and MIXTURES)
from test_all import (  # noqa: F401
    SMALL,
    assert_equal,
    change,
    command,
    compiled,
    forward,
    one_device,
    start,
    to_tfrecord,
    train_step,
    write_seqio_cache,
)

# ---- extras: the tasks of T5 and T0, tfrecord files, pretokenized files ----------------


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
    found = configs.TASKS[name].format(example)
    assert [(row["inputs"], row["targets"]) for row in found] == expected


def test_labels_become_the_choices_of_their_task():
    everything = {key: "x" for _, example, _ in FORMATS for key in example} | {"idx": 7}
    tasks = [task for task in configs.TASKS.values() if task.postprocess == "label"]
    assert len(tasks) > 15
    for task in tasks:
        for label, word in [*enumerate(task.choices), (-1, "<unk>")]:
            fields = everything | {"label": label, "number": 2}
            (row,) = task.format(fields)
            assert row["targets"] == word and row["idx"] == 7


def test_metrics_find_what_they_need_in_formatted_examples():
    examples = {name: example for name, example, _ in FORMATS}
    rows = {name: configs.TASKS[name].format(examples[name]) for name in examples}
    (row,) = rows["super_glue_multirc_v102"]
    assert [row[f"idx/{key}"] for key in ("paragraph", "question", "answer")] == [1, 2, 3]
    (row,) = rows["squad_v010_allanswers"]
    assert row["answers"] == ["U . S . ", "ü - ber"]
    assert row["context"] == " it ' s ( a ) \u00a0b ~ ` "
    (row,) = rows["super_glue_record_v102"]
    assert (row["answers"], row["idx/passage"], row["idx/query"]) == ([], 4, 8)
    (row,) = configs.TASKS[WSC].format(examples[WSC] | {"idx": 5})
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
print(data.find_task("glue_rte_v002", cfg).source, len(data.mixture_rates(cfg.data.task, cfg)))
"""
    assert command("-c", code).stdout.split() == ["tfds:glue/rte:1.0.0", "11"]


# ---- T0 --------------------------------------------------------------------------------


@pytest.fixture
def p3(tmp_path):
    """Folders as in P3, without examples."""
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
        (tmp_path / name).mkdir()
    return tmp_path


# (mixture, rates: large datasets divide 500,000 among their prompts)
T0_RATES = [
    ("t0_train", {"gigaword_x": 250_000, "imdb_a": 25_000, "trec_b": 5452}),
    (
        "t0+_train",
        {"gigaword_x": 250_000, "imdb_a": 25_000, "race_high_c": 62_445, "trec_b": 5452},
    ),
    (
        "t0++_train",
        {
            "gigaword_x": 250_000,
            "imdb_a": 25_000,
            "race_high_c": 62_445,
            "super_glue_copa_e": 400,
            "trec_b": 5452,
        },
    ),
    ("t0_train_score_eval", {"imdb_a_score_eval": 1}),
    ("t0_eval_score_eval", {"anli_d_r1_score_eval": 1}),
]


@pytest.mark.parametrize("kind", ["seqio", "parquet"])
@pytest.mark.parametrize("name, rates", T0_RATES)
def test_rates_of_t0(p3, kind, name, rates):
    cfg = change(data=dict(task=name, source=f"{kind}:{p3}"))
    assert list(data.mixture_rates(name, cfg).items()) == list(rates.items())


def test_tasks_of_t0_have_no_eos_in_inputs_and_lose_it_in_long_targets(p3):
    cfg = change(data=dict(task="t0_train", source=f"seqio:{p3}", targets_length=4))
    task = data.find_task("imdb_a", cfg)
    assert task.source == f"seqio:{p3}/imdb_a"
    assert data.finish([5, 6], "inputs", task, cfg.data).tolist() == [5, 6]
    assert data.finish([5, 6], "targets", task, cfg.data).tolist() == [5, 6, 1]
    assert data.finish([5, 6, 7, 8], "targets", task, cfg.data).tolist() == [5, 6, 7, 8]
    with pytest.raises(UserError, match="imdb_x"):
        data.find_task("imdb_x", cfg)


# ---- tfrecord files --------------------------------------------------------------------


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
    files = data.open_source(f"seqio:{tmp_path}/imdb_a", "train", cfg)
    found = [example for file in files for example in file.read()]
    lists = [{key: np.array(x).tolist() for key, x in row.items()} for row in found]
    assert lists == rows[::2] + rows[1::2]
    assert data.open_source(f"seqio:{tmp_path}/imdb_a", "test", cfg) == []
    (tmp_path / "imdb_a" / "train.tfrecord-00001-of-00002").rename(tmp_path / "away")
    with pytest.raises(UserError, match="has 1 of 2 files of train"):
        data.open_source(f"seqio:{tmp_path}/imdb_a", "train", cfg)
    (tmp_path / "away").rename(tmp_path / "imdb_a" / "train.tfrecord-00001-of-00002")
    (tmp_path / "imdb_a" / "COMPLETED").unlink()
    with pytest.raises(UserError, match="COMPLETED"):
        data.open_source(f"seqio:{tmp_path}/imdb_a", "train", cfg)


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


def write_tfds(folder, rows, kind):
    """Write a TFDS dataset. TFDS itself needs TensorFlow to write tfrecord files."""
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core import (
        dataset_info,
        example_serializer,
        file_adapters,
        naming,
        sequential_writer,
    )

    text = tfds.features.Text()
    features = tfds.features.FeaturesDict(
        {
            "text": text,
            "words": tfds.features.Sequence(text),
            "label": tfds.features.ClassLabel(num_classes=2),
            "score": tfds.features.Scalar(np.float32),
            "idx": {"question": np.int32, "answer": np.int64},
            "translations": tfds.features.Sequence({"de": text, "en": text}),
        }
    )
    folder.mkdir(parents=True)
    identity = dataset_info.DatasetIdentity(
        name="x",
        version=tfds.core.Version("1.0.0"),
        data_dir=str(folder),
        module_name="m",
    )
    info = dataset_info.DatasetInfo(builder=identity, features=features)
    info.set_file_format(file_adapters.FileFormat(kind))
    if kind == "array_record":
        writer = sequential_writer.SequentialWriter(info, 5, file_format=kind)
        writer.initialize_splits(["train"])
        writer.add_examples({"train": rows})
        return writer.close_all()
    serializer = example_serializer.ExampleSerializer(features.get_serialized_info())
    names = naming.ShardedFileTemplate(
        data_dir=folder, dataset_name="x", split="train", filetype_suffix="tfrecord"
    )
    shards = [rows[i : i + 5] for i in range(0, len(rows), 5)]
    for path, shard in zip(names.sharded_filepaths(len(shards)), shards):
        encoded = map(features.encode_example, shard)
        records = map(serializer.serialize_example, encoded)
        Path(path).write_bytes(b"".join(map(to_tfrecord, records)))
    lengths = [len(shard) for shard in shards]
    split = tfds.core.SplitInfo("train", lengths, 0, filename_template=names)
    info.set_splits(tfds.core.SplitDict([split]))
    info.write_to_directory(folder)


def test_tfds_datasets_of_both_formats_are_equal_and_need_no_tensorflow(tmp_path):
    before = "tensorflow" in sys.modules
    found = {}
    for kind in ("array_record", "tfrecord"):
        folder = tmp_path / kind / "1.0.0"
        write_tfds(folder, TFDS_ROWS, kind)
        files = data.open_source(f"tfds:{folder}", "train", SMALL)
        found[kind] = [example for file in files for example in file.read()]
        assert data.open_source(f"tfds:{folder}", "test", SMALL) == []
    assert_equal(found["tfrecord"], found["array_record"])
    assert [row["score"] for row in found["tfrecord"]] == [
        row["score"] for row in TFDS_ROWS
    ]
    assert before or "tensorflow" not in sys.modules
    assert [list(row["words"]) for row in found["tfrecord"]] == [
        row["words"] for row in TFDS_ROWS
    ]


# ---- pretokenized files ----------------------------------------------------------------


@pytest.mark.parametrize("task", ["span_corruption", "text_to_text"])
def test_pretokenized_files_give_the_same_batches_as_their_texts(tmp_path, task):
    """Also the same examples are held out."""
    rows = [
        {"text": f"café {n} " * (n % 7), "inputs": f"in {n}", "targets": f"out {n * n}"}
        for n in range(90)
    ]
    for i in range(3):
        lines = [json.dumps(row) for row in rows[i::3]]
        (tmp_path / f"{i}.jsonl").write_text("\n".join(lines))
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


# ---- extras/plan.py: the cost of a step on other devices -------------------------------


def test_cycles_and_communication_are_read_from_a_program():
    """The body of a loop counts once for each turn. The lines are from the TPU compiler."""
    priced = 'metadata={{op_name="jit(train_step)/{}"}}, backend_config={{"estimated_cycles":"500"}}'
    text = f"""%body (p: f32[2]) -> f32[2] {{
  %fusion.1 = bf16[4,8]{{1,0:T(8,128)}} fusion(%p), kind=kLoop, calls=%f, {priced.format("transpose(jvp())/dot_general")}
  %fusion.2 = bf16[4,8]{{1,0}} fusion(%fusion.1), kind=kCustom, calls=%all-reduce-scatter.3.clone
  %async-collective-start.1 = (bf16[1,8]{{1,0}}, bf16[4,8], s32[2], bf16[4]) fusion(%fusion.2)
  %async-collective-done.1 = bf16[4,8]{{1,0}} fusion(%async-collective-start.1)
}}
ENTRY %main (p: f32[2]) -> f32[2] {{
  %while.1 = f32[2] while(%p), condition=%c, body=%body, known_trip_count":{{"n":"3"}}
  %all-reduce.1 = (f32[4], f32[2,2]) all-reduce(%p), attributes={{n="all-gather-start.1"}}
  %all-reduce.2 = f32[4] all-reduce(%p), replica_groups={{{{0}},{{1}},{{2}},{{3}}}}
  %fusion.4 = f32[2] fusion(%p), {priced.format("sub")}
  %fusion.5 = f32[2] fusion(%p), {priced.format("jvp()/closed_call/mul")}
  %fusion.6 = f32[2] fusion(%p), {priced.format("transpose(jvp())/rematted_computation/mul")}
  %copy.7 = f32[2] copy(%p), backend_config={{"estimated_cycles":"7"}}
  %kernel.1 = f32[2] custom-call(%p), custom_call_target="tpu_custom_call", metadata={{op_name="jit(train_step)/jvp()/pallas_call"}}, backend_config={{"cost_estimate":{{"flops":"480000","transcendentals":"3"}}}}
}}"""
    kernel = 480_000 // plan.KERNEL_FLOPS_PER_CYCLE  # the compiler does not price kernels
    assert plan.estimated_cycles(text) == {
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
    flags = "--config tiny --devices 4 --model.num_layers 1 --model.num_decoder_layers 1"
    out = command("-m", "extras.plan", *flags.split()).stdout
    numbers = dict(re.findall(r"^(\S[^\n]*?) +([\d.]+) ", out, re.M))
    cfg = configs.RECIPES["tiny"]
    cfg = change(cfg, model=dict(num_layers=1, num_decoder_layers=1))
    weights = 4 * model.count_params(model.param_table(cfg.model)) / 1e9
    assert weights < float(numbers["weights and optimizer"]) < 1.1 * weights
    once = 2 * 3 / 4 * weights  # what each of four devices sends in a ring
    assert once < float(numbers["all-reduce"]) < 1.3 * once
    assert "all-gather" not in numbers and "step on TPU v4" in numbers
