"""The supervised tasks of T5 (Raffel et al. 2020), the mixtures of T0 (Sanh et al. 2022).

data.py imports this file. Texts, label orders, metrics and rates are those of
t5/data/{tasks,preprocessors,glue_utils}.py and t0/tasks.py. Appendix D of the T5 paper
shows an example of each task.

The sources are the versions of TFDS that T5 names. --data.source hf:nyu-mll/glue:rte
reads a single task from the Hub. For a mixture, define tasks in a recipe file: with
`import data`, rte = data.TASKS["glue_rte_v002"]._replace(source="hf:nyu-mll/glue:rte")
and TASKS = {"glue_rte_v002": rte}.
"""

import collections
import itertools
import re
from dataclasses import replace
from functools import cache, partial

import fsspec
import numpy as np

from configs import FINETUNE, METRICS, MIXTURES, RECIPES, SIZES, TASKS
from configs import Config, DataConfig, DecodeConfig, ModelConfig, TrainConfig, UserError
from configs import print_once
from data import Task, template

# ---- translation and summarization -----------------------------------------------------

LANGUAGES = {"en": "English", "de": "German", "fr": "French", "ro": "Romanian"}
for name, other in (
    ("wmt14", "de"),
    ("wmt14", "fr"),
    ("wmt15", "fr"),
    ("wmt16", "ro"),
    ("wmt19", "de"),
    ("wmt_t2t", "de"),
):
    for a, b in (("en", other), (other, "en")):
        TASKS[f"{name}_{a}{b}_v003"] = Task(
            f"tfds:{name}_translate/{other}-en:1.0.0",
            template(f"translate {LANGUAGES[a]} to {LANGUAGES[b]}: {{{a}}}", f"{{{b}}}"),
            ("bleu",),
        )

TASKS["cnn_dailymail_v002"] = Task(
    "tfds:cnn_dailymail:3.4.0",
    template("summarize: {article}", "{highlights}"),
    ("rouge",),
)

# ---- classification --------------------------------------------------------------------

ENTAILMENT = "entailment", "not_entailment"
MNLI = "mnli hypothesis: {hypothesis} premise: {premise}"
MNLI_LABELS = "entailment", "neutral", "contradiction"
HELD_OUT = "validation", "test"


def glue_template(inputs: str, targets: str, choices: tuple = ()):
    """Return a template that keeps the field idx, and for which a label of -1 is <unk>.

    GLUE has this label where the label is not public.
    """
    fill, fill_unknown = template(inputs, targets, choices), template(inputs, "<unk>")

    def fill_and_keep_idx(record):
        is_unknown = choices and float(record["label"]) == -1
        if is_unknown:
            print_once("Some labels are -1: as in t5, they become <unk>.")
        (pair,) = fill_unknown(record) if is_unknown else fill(record)
        return [pair | {"idx": record["idx"]} if "idx" in record else pair]

    return fill_and_keep_idx


# dataset, inputs, the words for labels 0, 1, ..., metrics, splits (if not all three)
# fmt: off
CLASSIFICATION = [
    ("glue/cola", "cola sentence: {sentence}",
     ("unacceptable", "acceptable"), ("matthews_corrcoef",)),
    ("glue/sst2", "sst2 sentence: {sentence}",
     ("negative", "positive"), ("accuracy",)),
    ("glue/mrpc", "mrpc sentence1: {sentence1} sentence2: {sentence2}",
     ("not_equivalent", "equivalent"), ("f1", "accuracy")),
    ("glue/qqp", "qqp question1: {question1} question2: {question2}",
     ("not_duplicate", "duplicate"), ("f1", "accuracy")),
    ("glue/mnli", MNLI, MNLI_LABELS, ("accuracy",), ("train",)),
    ("glue/mnli_matched", MNLI, MNLI_LABELS, ("accuracy",), HELD_OUT),
    ("glue/mnli_mismatched", MNLI, MNLI_LABELS, ("accuracy",), HELD_OUT),
    ("glue/qnli", "qnli question: {question} sentence: {sentence}",
     ENTAILMENT, ("accuracy",)),
    ("glue/rte", "rte sentence1: {sentence1} sentence2: {sentence2}",
     ENTAILMENT, ("accuracy",)),
    ("glue/wnli", "wnli sentence1: {sentence1} sentence2: {sentence2}",
     ("not_entailment", "entailment"), ("accuracy",)),
    ("glue/ax", MNLI, MNLI_LABELS, (), ("test",)),
    ("super_glue/boolq", "boolq passage: {passage} question: {question}",
     ("False", "True"), ("accuracy",)),
    ("super_glue/cb", "cb hypothesis: {hypothesis} premise: {premise}",
     ("entailment", "contradiction", "neutral"), ("mean_3class_f1", "accuracy")),
    ("super_glue/copa", "copa choice1: {choice1} choice2: {choice2} premise: {premise} "
     "question: {question}", ("choice1", "choice2"), ("accuracy",)),
    ("super_glue/rte", "rte hypothesis: {hypothesis} premise: {premise}",
     ENTAILMENT, ("accuracy",)),
    ("super_glue/wic", "wic sentence1: {sentence1} sentence2: {sentence2} word: {word}",
     ("False", "True"), ("accuracy",)),
    ("super_glue/axb", "rte hypothesis: {sentence2} premise: {sentence1}",
     ENTAILMENT, (), ("test",)),
    ("super_glue/axg", "rte hypothesis: {hypothesis} premise: {premise}",
     ENTAILMENT, (), ("test",)),
]
# fmt: on
for name, inputs, labels, metrics, *splits in CLASSIFICATION:
    suffix, version = ("v102", "1.0.2") if name.startswith("super") else ("v002", "1.0.0")
    TASKS[f"{name.replace('/', '_')}_{suffix}"] = Task(
        f"tfds:{name}:{version}",
        glue_template(inputs, "{label}", labels),
        metrics,
        labels,
        "label",
        *splits,
    )


# ---- metrics of GLUE and SuperGLUE -----------------------------------------------------


def mean_3class_f1(targets, predictions):
    from sklearn.metrics import f1_score

    sides = np.int64(targets), np.int64(predictions)
    options = {"labels": range(3), "average": "macro", "zero_division": 0}
    return {"mean_3class_f1": 100 * float(f1_score(*sides, **options))}


def matthews_corrcoef(targets, predictions):
    from sklearn import metrics

    return {
        "matthews_corrcoef": 100 * float(metrics.matthews_corrcoef(targets, predictions))
    }


def pearson_corrcoef(targets, predictions):
    from scipy import stats

    result = stats.pearsonr(np.float64(targets), np.float64(predictions))
    return {"pearson_corrcoef": 100 * float(result[0])}


def spearman_corrcoef(targets, predictions):
    from scipy import stats

    result = stats.spearmanr(np.float64(targets), np.float64(predictions))
    return {"spearman_corrcoef": 100 * float(result[0])}


def number(text: str, example: dict, is_target: bool) -> float:
    try:
        return float(text)
    except ValueError:
        if is_target:
            raise
        return -1.0


METRICS |= {
    "mean_3class_f1": mean_3class_f1,
    "matthews_corrcoef": matthews_corrcoef,
    "pearson_corrcoef": pearson_corrcoef,
    "spearman_corrcoef": spearman_corrcoef,
}

# ---- tasks whose format is a function --------------------------------------------------


def format_stsb(example):
    """The target is the similarity as text, rounded to a multiple of 0.2."""
    score = np.round(np.float32(example["label"]) * 5) / 5
    fill = glue_template(
        "stsb sentence1: {sentence1} sentence2: {sentence2}", "{label:.1f}"
    )
    return fill(example | {"label": score})


TASKS["glue_stsb_v002"] = Task(
    "tfds:glue/stsb:1.0.0",
    format_stsb,
    ("pearson_corrcoef", "spearman_corrcoef"),
    postprocess=number,
)


def merge_spaces(text):
    return re.sub(r"[ \t\n\f\r]+", " ", text)  # \s would also match other white space


def separate_punctuation(text):
    return merge_spaces(re.sub(r"([!-/:-@\[-`{-~])", r" \1 ", text))


def format_squad(example):
    """The target is the first answer; the metric accepts any of them."""
    question = separate_punctuation(example["question"])
    context = separate_punctuation(example["context"])
    answers = [separate_punctuation(answer) for answer in example["answers"]["text"]]
    return [
        {
            "inputs": merge_spaces(f"question: {question} context: {context}"),
            "targets": answers[0],
            "answers": answers,
            "id": example.get("id"),
            "question": question,
            "context": context,
        }
    ]


TASKS["squad_v010_allanswers"] = Task(
    "tfds:squad/v1.1:3.0.0", format_squad, ("squad",), postprocess="answers"
)


def format_multirc(example):
    """Is this candidate answer right? A question has several candidates."""
    texts = {
        key: re.sub("</?b>", "", example[key].replace("<br>", " "))
        for key in ("paragraph", "question", "answer")
    }
    fill = glue_template(
        "multirc question: {question} answer: {answer} paragraph: {paragraph}",
        "{label}",
        ("False", "True"),
    )
    (filled,) = fill(texts | {"label": example["label"]})
    return [filled | {f"idx/{key}": example["idx"][key] for key in texts}]


def multirc(text, example, is_target):
    value = {"value": {"False": 0, "True": 1}.get(text, -1)}
    return value | {"group": example["idx/question"]} if is_target else value


def multirc_f1(targets, predictions):
    """F1 score of all candidate answers."""
    values = [[x["value"] for x in side] for side in (targets, predictions)]
    return METRICS["f1"](*values)


def exact_match(targets, predictions):
    """Percentage of the questions whose candidate answers are all judged correctly."""
    questions = collections.defaultdict(list)
    for target, prediction in zip(targets, predictions, strict=True):
        questions[target["group"]].append(target["value"] == prediction["value"])
    return {"exact_match": 100 * float(np.mean([all(x) for x in questions.values()]))}


TASKS["super_glue_multirc_v102"] = Task(
    "tfds:super_glue/multirc:1.0.2",
    format_multirc,
    (multirc_f1, exact_match),
    ("False", "True"),
    multirc,
)


def format_record(example):
    """Which entity fills the gap in a sentence? Each right answer gives one example."""
    # The marker @highlight precedes bullet points, which become sentences.
    passage = re.sub(r"([.?!\"'])\n@highlight\n", r"\1 ", example["passage"])
    passage = passage.replace("\n@highlight\n", ". ")
    entities, answers = ", ".join(example["entities"]), list(example["answers"])
    text = f"record query: {example['query']} entities: {entities} passage: {passage}"
    return [
        {
            "inputs": text,
            "targets": answer,
            "answers": answers,
            "idx/passage": example["idx"]["passage"],
            "idx/query": example["idx"]["query"],
        }
        for answer in answers or ["<unk>"]
    ]


def record_answers(text, example, is_target):
    if not is_target:
        return {"value": text}
    group = example["idx/passage"], example["idx/query"]
    return {"value": list(example["answers"]), "group": group}


def record(targets, predictions):
    """The metrics of SQuAD, with the first example of each query."""
    queries = {}
    for target, prediction in zip(targets, predictions, strict=True):
        queries.setdefault(target["group"], (target["value"], prediction["value"]))
    return METRICS["squad"](*zip(*queries.values()))


TASKS["super_glue_record_v102"] = Task(
    "tfds:super_glue/record:1.0.2", format_record, (record,), (), record_answers
)

# WSC and DPR mark a pronoun, as in "wsc: The cup fell off the table and *it* broke". The
# target is the noun that it refers to: "The cup".


def format_wsc(only_true, example):
    """The noun of an example may be a wrong one, which training must leave out."""
    if only_true and not example["label"]:
        return []
    words, pronoun = example["text"].split(" "), example["span2_text"]
    # In one published example, span2_index is too low by one.
    position = example["span2_index"]
    position += [word.startswith(pronoun) for word in words[position:]].index(True)
    before = " ".join(words[:position])
    after = " ".join(words[position:]).removeprefix(pronoun)
    # In one published example, a comma follows the pronoun without a space.
    after = after[1:] if after.startswith(" ") else after.rstrip()
    # T5 first writes X for the pronoun, so another X of the text becomes the pronoun too.
    text = f"{before} X {after}".replace(" X ", f" *{pronoun}* ")
    return [
        {
            "inputs": f"wsc: {text}",
            "targets": example["span1_text"],
            "label": example.get("label", 0),
            "idx": example.get("idx"),
        }
    ]


DETERMINERS = set(
    "a an few her his each every many much my our some that the their these this those "
    "which whose your".split()
)


def content_words(text):
    words = text.strip().lower().split(" ")
    return [word for word in words if word not in DETERMINERS] or [""]


def wsc(text, example, is_target):
    """1 if a text names the noun of the example, else 0, and -1 if it names nothing.

    Both "dog" and "the black dog" name "the dog", but "Bob's dog" does not.
    """
    if is_target:
        return example["label"]
    noun = example.get("targets_pretokenized", example["targets"])
    words, noun_words = content_words(text), content_words(noun)
    if words == [""]:
        return -1
    if ("'" in text) != ("'" in noun):
        return 0
    words, noun_words = set(words), set(noun_words)
    return int(words <= noun_words or noun_words <= words)


WSC = "tfds:super_glue/wsc.fixed:1.0.2"
TASKS["super_glue_wsc_v102_simple_train"] = Task(
    WSC, partial(format_wsc, True), splits=("train",)
)
TASKS["super_glue_wsc_v102_simple_eval"] = Task(
    WSC, partial(format_wsc, False), ("accuracy",), (), wsc, HELD_OUT
)


def format_dpr(example):
    pattern = rf" ({example['pronoun']})( |\.|,)"
    text = re.sub(pattern, r" *\1*\2", example["sentence"], count=1)
    return [
        {"inputs": f"wsc: {text}", "targets": example["candidates"][example["label"]]}
    ]


TASKS["dpr_v001_simple"] = Task(
    "tfds:definite_pronoun_resolution:1.1.0",
    format_dpr,
    ("accuracy",),
    splits=("train", "test"),
)

# ---- mixtures of T5: rates are numbers of examples; rate 0 is only evaluated -----------

GLUE = {
    "glue_cola_v002": 8_551,
    "glue_sst2_v002": 67_349,
    "glue_mrpc_v002": 3_668,
    "glue_qqp_v002": 363_849,
    "glue_stsb_v002": 5_749,
    "glue_mnli_v002": 392_702,
    "glue_qnli_v002": 104_743,
    "glue_rte_v002": 2_490,
    "glue_mnli_mismatched_v002": 0,
    "glue_mnli_matched_v002": 0,
    "glue_ax_v002": 0,
}
SUPER_GLUE = {
    "dpr_v001_simple": 1_322,
    "super_glue_wsc_v102_simple_train": 259,
    "super_glue_wsc_v102_simple_eval": 0,
    "super_glue_boolq_v102": 9_427,
    "super_glue_cb_v102": 250,
    "super_glue_copa_v102": 400,
    "super_glue_multirc_v102": 27_243,
    "super_glue_record_v102": 138_854,
    "super_glue_rte_v102": 2_490,
    "super_glue_wic_v102": 5_428,
    "super_glue_axb_v102": 0,
    "super_glue_axg_v102": 0,
}

# ---- T0 --------------------------------------------------------------------------------
# Each folder of P3, the Public Pool of Prompts, is a task DATASET_PROMPT, or for rank
# classification DATASET_PROMPT_score_eval, where an example is one answer choice.

# The number of training examples of each dataset, from t0/datasets.csv.
# fmt: off
T0 = {
    "glue_mrpc": 3_668, "glue_qqp": 363_846, "paws_labeled_final": 49_401,
    "kilt_tasks_hotpotqa": 88_869, "wiki_qa": 20_360, "adversarial_qa_dbidaf": 10_000,
    "adversarial_qa_dbert": 10_000, "adversarial_qa_droberta": 10_000,
    "duorc_SelfRC": 60_721, "duorc_ParaphraseRC": 69_524, "ropes": 10_924,
    "quoref": 19_399, "cos_e_v1.11": 9_741, "cosmos_qa": 25_262, "dream": 6_116,
    "qasc": 8_134, "quail": 10_246, "quarel": 1_941, "quartz": 2_696, "sciq": 11_679,
    "social_i_qa": 33_410, "wiki_hop_original": 43_738, "wiqa": 29_808,
    "amazon_polarity": 3_600_000, "app_reviews": 288_065, "imdb": 25_000,
    "rotten_tomatoes": 8_530, "yelp_review_full": 650_000, "common_gen": 67_389,
    "wiki_bio": 582_659, "cnn_dailymail_3.0.0": 287_113, "gigaword": 3_803_957,
    "multi_news": 44_972, "samsum": 14_732, "xsum": 204_045, "ag_news": 120_000,
    "dbpedia_14": 560_000, "trec": 5_452,
}
T0_GPT_3 = {  # the datasets on which GPT-3 was evaluated
    "ai2_arc_ARC_Challenge": 1_119, "ai2_arc_ARC_Easy": 2_251,
    "trivia_qa_unfiltered": 87_622, "web_questions": 3_778, "squad_v2": 130_319,
    "openbookqa_main": 4_957, "race_high": 62_445, "race_middle": 25_421, "piqa": 16_113,
    "hellaswag": 39_905,
}
T0_SUPER_GLUE = {
    "super_glue_wsc.fixed": 554, "super_glue_record": 100_730, "super_glue_boolq": 9_427,
    "super_glue_copa": 400, "super_glue_multirc": 27_243, "super_glue_wic": 5_428,
}
T0_EVALUATION = """
hellaswag super_glue_wsc.fixed super_glue_copa super_glue_wic winogrande_winogrande_xl
super_glue_cb super_glue_rte anli story_cloze_2016
""".split()
T0_BIAS = """
crows_pairs jigsaw_toxicity_pred super_glue_axg wino_bias_type1_anti wino_bias_type2_anti
wino_bias_type1_pro wino_bias_type2_pro
""".split()
# fmt: on
T0_LIMIT = 500_000


@cache
def p3_sources(source: str) -> dict[str, str]:
    """Return {task: its source} of seqio:DIR, parquet:DIR or hf:bigscience/P3.

    DIR has a folder for each task: a cache of SeqIO, or Parquet files as on the Hub.
    """
    kind, _, root = source.rstrip("/").partition(":")
    if kind == "hf" and root.endswith("/P3"):
        import datasets

        names = datasets.get_dataset_config_names(root)
        return {name: f"hf:{root}:{name}" for name in names}
    if kind not in ("seqio", "parquet"):
        return {}
    files, path = fsspec.core.url_to_fs(root)
    names = [folder.rpartition("/")[2] for folder in files.glob(f"{path}/*")]
    suffix = "/{split}*.parquet" if kind == "parquet" else ""
    return {name: f"{kind}:{root}/{name}{suffix}" for name in names}


@cache
def prompts(dataset: str, source: str, scored: bool) -> list[str]:
    if not p3_sources(source):
        raise UserError("Name the folder of P3: --data.source seqio:DIR or parquet:DIR.")
    return [
        name
        for name in p3_sources(source)
        if name.startswith(f"{dataset}_") and name.endswith("_score_eval") == scored
    ]


def p3_task(name: str, cfg: Config) -> Task:
    sources = p3_sources(cfg.data.source)
    if name not in sources:
        raise UserError(f"There is no task {name}. See `python data.py --list`.")
    # The targets in P3 begin with white space.
    return Task(
        sources[name],
        p3_texts,
        postprocess=lambda text, **_: text.strip(),
        eos_in_inputs=False,
    )


def p3_texts(record: dict) -> list[dict]:
    """Take the texts, if there are any: the ids may be of another vocabulary."""
    texts = {x: record.get(f"{x}_pretokenized", record[x]) for x in ("inputs", "targets")}
    return [record | texts]


def t0_mixture(sizes: dict[str, int], cfg: Config) -> dict[str, int]:
    """The rate of a prompt is the size of its dataset; large ones divide T0_LIMIT."""
    rates = {}
    for dataset, size in sizes.items():
        names = prompts(dataset, cfg.data.source, scored=False)
        if size > T0_LIMIT:
            size = T0_LIMIT // max(len(names), 1)
        rates |= dict.fromkeys(names, size)
    rates.pop("gigaword_summarize_", None)  # its published cache is broken
    return dict(sorted(rates.items()))


def score_mixture(datasets: list[str], cfg: Config) -> dict[str, int]:
    """The tasks of rank classification, which are only evaluated.

    T0 also left out prompts for other purposes, and 14 of its training datasets.
    """
    found = (prompts(dataset, cfg.data.source, scored=True) for dataset in datasets)
    return dict.fromkeys(sorted(itertools.chain.from_iterable(found)), 1)


MIXTURES |= {
    "glue_v002_proportional": GLUE,
    "super_glue_v102_proportional": SUPER_GLUE,
    "t0_train": partial(t0_mixture, T0),
    "t0+_train": partial(t0_mixture, T0 | T0_GPT_3),
    "t0++_train": partial(t0_mixture, T0 | T0_GPT_3 | T0_SUPER_GLUE),
    "t0_train_score_eval": partial(score_mixture, T0),
    "t0_eval_score_eval": partial(score_mixture, T0_EVALUATION),
    "bias_fairness_eval_score_eval": partial(score_mixture, T0_BIAS),
}

# ---- recipes: add --init_from RUN, a run with published weights ------------------------

# Published T5 has learned for 1,000,000 steps, from which T5X and these recipes count.
PUBLISHED = replace(FINETUNE, start_step=1_000_000, steps=1_020_000)
BASE = replace(SIZES["base"], dropout=0.1)
# 2^18 steps; the best of all checkpoints counts (section 3.1.2 of the T5 paper).
PAPER = replace(PUBLISHED, steps=1_262_144, eval_every=5000, predict_every=5000)
# 12,200 steps on top of the LM-adapted T5, with 2^20 input tokens in a batch, as in
# training/README.md of bigscience-workshop/t-zero. Name P3 with --data.source.
T0_DATA = DataConfig(task="t0_train", inputs_length=1024, targets_length=256)
T0_TRAIN = TrainConfig(
    start_step=1_100_000,
    steps=1_112_200,
    batch_size=1024,
    microbatches=8,
    learning_rate=1e-3,
    schedule="constant",
    eval_every=0,
)
# fmt: off
WMT = DataConfig(task="wmt_t2t_ende_v003", inputs_length=256, targets_length=256)
BEAMS = DecodeConfig(beams=4, batch_size=64)
RO = DataConfig("hf:dumitrescustefan/rlm", vocab="train:63900", targets_length=256)
RO_TRAIN = TrainConfig(steps=2_000_000, save_every=10_000, keep=5)

RECIPES |= {
    # Translate English to German, as in the *wmt*.gin files in t5x/examples/t5/t5_1_1/examples.
    "base_wmt_scratch": Config(
        SIZES["base"], WMT, TrainConfig(
            steps=50_000, eval_every=500, predict_every=500, eval_batches=0,
            save_every=5000, keep=0), BEAMS),
    "small_wmt_finetune": Config(SIZES["small"], WMT, PUBLISHED),
    "base_wmt_finetune": Config(
        replace(SIZES["base"], dropout=0.1), WMT,
        replace(PUBLISHED, eval_every=100, predict_every=100), BEAMS),
    # T5 1.0 small on all of GLUE, evaluated on STS-B, as in t5x/docs/usage/finetune.md.
    "small_glue_finetune": Config(
        ModelConfig(d_ff=2048, num_heads=8, num_layers=6, num_decoder_layers=6,
                    activation="relu", tied=True, dropout=0.1),
        DataConfig(task="glue_v002_proportional", eval_tasks="glue_stsb_v002",
                   targets_length=84),
        replace(PUBLISHED, steps=1_500_000)),
    # Lengths as in t5/models/gin/sequence_lengths/*.gin.
    "base_super_glue": Config(
        BASE, DataConfig(task="super_glue_v102_proportional", targets_length=62), PAPER),
    "base_squad": Config(
        BASE, DataConfig(task="squad_v010_allanswers", targets_length=97), PAPER),
    "base_cnn_dailymail": Config(
        BASE, DataConfig(task="cnn_dailymail_v002", targets_length=512), PAPER,
        BEAMS),
    # Romanian T5 (github.com/dumitrescustefan/t5x_models), and mT5 continued on Romanian.
    "base_ro": Config(replace(SIZES["base"], vocab_size=64_000), RO, RO_TRAIN),
    "large_ro": Config(replace(SIZES["large"], vocab_size=64_000),
                       replace(RO, targets_length=512), RO_TRAIN),
    "mt5_base_ro": Config(
        replace(SIZES["base"], vocab_size=250_112), RO,
        replace(RO_TRAIN, start_step=1_000_000, learning_rate=0.4, save_every=25_000, keep=3)),
    # T0 on P3, the Public Pool of Prompts.
    "small_t0": Config(replace(SIZES["small"], dropout=0.1), T0_DATA, T0_TRAIN),
    "xxl_t0": Config(replace(SIZES["xxl"], dropout=0.1), T0_DATA, T0_TRAIN),
}
# fmt: on
