"""How good a model is: teacher-forced loss, metrics on decoded text, answers chosen by score.

- loss: the loss of held-out rows, each counted once, in nats per real target token.
- predict: answers are decoded, postprocessed as the task says, and given to its metrics (t5's).
- rank: of the answers to choose from the likeliest is taken, as T0 is judged.
- The default is predict where a task has metrics, else loss.

    python evaluate.py --run_dir runs/tiny
    python evaluate.py --run_dir RUN --tasks glue_rte_v002,glue_stsb_v002 --mode predict --step all
    python evaluate.py --run_dir RUN --tasks super_glue_copa_v102 --mode rank

What comes of it goes to RUN/eval, or to --output DIR. Several machines run the same command.
"""

import collections
import csv
import functools
import hashlib
import importlib.util
import itertools
import json
import math
import os
import re
import string
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import configs
import data
import infer
import model
import partition
from configs import UserError, note

METRICS = configs.METRICS  # names -> functions, see below; a recipe file may add its own
POSTPROCESSORS = {}

# ---- teacher-forced ------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=2)
def loss_sums(params, batch, cfg, first_sentinel):
    """Sums over the real target tokens of a batch, and over the content tokens alone. Content is
    all but sentinels and EOS: what a unigram model can be compared with."""
    losses = model.token_losses(params, batch, cfg)
    real = batch.target_segments > 0
    content = real & (batch.targets > data.EOS) & (batch.targets < first_sentinel)
    return {
        **model.sum_over_tokens(losses, batch),
        "content_loss": jnp.sum(losses[0] * content),
        "content_tokens": jnp.sum(content),
    }


def evaluate_loss(params, cfg, mesh, dataset, batches):
    """Loss over the first batches of a held-out Dataset -> {metric: nats per token, or 0-1}."""
    B, tokenizer, total = cfg.train.batch_size, dataset.tasks[0].tokenizer, None
    rows = partition.local_rows(B, mesh)
    for i in range(batches):
        batch = partition.put_batch(dataset.batch(i, rows), B, mesh)
        sums = loss_sums(params, batch, cfg, tokenizer.size - tokenizer.sentinels)
        total = sums if total is None else jax.tree.map(jnp.add, total, sums)
    metrics = model.mean_metrics(total)
    metrics["content_loss"] = total["content_loss"] / max(total["content_tokens"], 1)
    return {name: float(value) for name, value in jax.device_get(metrics).items()}


# ---- on decoded text -----------------------------------------------------------------------------


def read_examples(cfg, tokenizer, split, choices=None, most=None):
    """A task's formatted examples with what the model reads of them: [(row, infer.Example)]. A row
    begins with the formatted dict. choices(number, example): the rows to score instead."""
    task = data.find_task(cfg.data.task, cfg)
    if len(task.objective.features) < 2:
        raise UserError(
            f"{cfg.data.task} has no inputs and targets: --mode loss is for it."
        )
    bad = data.InvalidExamples(cfg.data.on_error)
    encode = infer.ExampleEncoder(cfg, tokenizer, choices is not None, task)
    found = itertools.islice(
        data.read_task(cfg.data.task, split, cfg, bad, tokenizer.size), most
    )
    pairs = []
    for number, (where, example) in enumerate(found):
        try:
            rows = choices(number, example) if choices else [(example,)]
            pairs += [(row, encode(row[0], number)) for row in rows]
        except ValueError as error:
            bad(where, str(error))
    if not pairs:
        raise UserError(f"{cfg.data.task} has no {split} examples.")
    if bad.count or encode.cut:
        note(f"{cfg.data.task}, {split}: {bad.count:,} skipped, {encode.cut:,} texts cut")
    return pairs


def postprocess(task, text, example, is_target):
    """A target or an answer -> what the task's metrics compare."""
    how = task.postprocess
    if callable(how):
        return how(text, example=example, is_target=is_target)
    return POSTPROCESSORS[how](task, text, example, is_target) if how else text


def predict(params, cfg, mesh, split, tokenizer, most=None):
    """Metrics on decoded text -> (metrics, a line for each example)."""
    task = data.find_task(cfg.data.task, cfg)
    pairs = read_examples(cfg, tokenizer, split, most=most)
    found = infer.run_examples(params, cfg, mesh, [example for _, example in pairs])
    lines, targets, predictions = [], [], []
    for ((example,), _), (ids, _) in zip(pairs, found):
        text = tokenizer.decode(ids[0])
        target = example["targets"]
        target = target if isinstance(target, str) else tokenizer.decode(target)
        targets.append(postprocess(task, target, example, True))
        predictions.append(postprocess(task, text, example, False))
        lines.append(
            {
                **example,
                "target": targets[-1],
                "output": text,
                "prediction": predictions[-1],
            }
        )
    metrics = {}
    for metric in task.metrics or ("accuracy",):
        metrics |= (METRICS[metric] if isinstance(metric, str) else metric)(
            targets, predictions
        )
    return metrics, lines


# ====== below: metrics, postprocessors, tables and curves, the command ============================
# t5/evaluation/metrics.py: lists of targets and predictions, as the task's postprocessor leaves
# them -> {name: 0 to 100}.


def import_library(module):
    """Import an optional library, or say in one sentence how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UserError(
            f"This metric needs {module.split('.')[0]}: pip install '.[metrics]'."
        ) from None


LIBRARIES = {"bleu": ("sacrebleu",), "rouge": ("rouge_score.rouge_scorer",)}


def bleu(targets, predictions):
    """Corpus BLEU by sacrebleu, tokenized "intl". A target may be a list of references."""
    references = targets if isinstance(targets[0], list) else [targets]
    score = import_library("sacrebleu").corpus_bleu(
        predictions,
        references,
        smooth_method="exp",
        smooth_value=0.0,
        force=False,
        lowercase=False,
        tokenize="intl",
        use_effective_order=False,
    )
    return {"bleu": score.score}


def rouge(targets, predictions):
    """Mean F-measures of ROUGE-1, -2 and -Lsum by rouge-score, without stemming. t5 takes the
    middle of bootstrap samples, which differs from the mean by chance."""
    names = "rouge1", "rouge2", "rougeLsum"
    scorer = import_library("rouge_score.rouge_scorer").RougeScorer(names)
    scores = [
        scorer.score(*(text.replace(" . ", " .\n") for text in pair))
        for pair in zip(targets, predictions)
    ]
    return {
        name: 100 * float(np.mean([score[name].fmeasure for score in scores]))
        for name in names
    }


def accuracy(targets, predictions):
    return {
        "accuracy": 100 * float(np.mean([t == p for t, p in zip(targets, predictions)]))
    }


def class_f1(targets, predictions, label, weights=1.0):
    """F1 of one class, 0 to 1; 0 where it is neither there nor predicted."""
    target, predicted = np.asarray(targets) == label, np.asarray(predictions) == label
    both, either = (
        (weights * (target & predicted)).sum(),
        (weights * target).sum() + (weights * predicted).sum(),
    )
    return 2 * both / either if either else 0.0


def f1(targets, predictions):
    """F1 of class 1; a prediction that is neither 0 nor 1 counts as the wrong one."""
    targets, predictions = np.array(targets), np.array(predictions)
    invalid = (predictions != 0) & (predictions != 1)
    predictions[invalid] = 1 - targets[invalid]
    return {"f1": 100 * class_f1(targets, predictions, 1)}


def mean_multiclass_f1(classes, targets, predictions):
    """Mean of the classes' F1; other predictions are misses."""
    scores = [class_f1(targets, predictions, label) for label in range(classes)]
    return {f"mean_{classes}class_f1": 100 * float(np.mean(scores))}


def correlation(name, targets, predictions):
    """SciPy's pearsonr or spearmanr; nan where one side is constant."""
    from scipy import stats  # takes half a second

    if min(len(set(targets)), len(set(predictions))) < 2:
        return {f"{name}_corrcoef": math.nan}
    return {
        f"{name}_corrcoef": 100
        * float(getattr(stats, f"{name}r")(targets, predictions)[0])
    }


def matthews_corrcoef(targets, predictions):
    """The coefficient for any number of classes: an invalid prediction is a class of its own."""
    labels = sorted({*targets, *predictions})
    t, p = (
        np.array([[value == label for label in labels] for value in values], float)
        for values in (targets, predictions)
    )
    n, t_sums, p_sums = len(t), t.sum(0), p.sum(0)
    spread = (n**2 - p_sums @ p_sums) * (n**2 - t_sums @ t_sums)
    together = (t * p).sum() * n - t_sums @ p_sums
    return {"matthews_corrcoef": 100 * float(together / spread**0.5) if spread else 0.0}


def normalize_answer(text):
    """SQuAD's: lower case, no punctuation, no articles, single spaces."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def token_f1(target, prediction):
    """Harmonic mean of precision and recall of words, 0 to 1."""
    target, prediction = target.split(), prediction.split()
    same = sum((collections.Counter(target) & collections.Counter(prediction)).values())
    return 2 * same / (len(target) + len(prediction)) if same else 0.0


def squad(targets, predictions):
    """Exact match and word F1, the best over the answers of a question. targets: lists of texts."""
    pairs = [
        ([normalize_answer(answer) for answer in answers], normalize_answer(prediction))
        for answers, prediction in zip(targets, predictions)
    ]
    return {
        "em": 100
        * float(np.mean([max(a == p for a in answers) for answers, p in pairs])),
        "f1": 100
        * float(np.mean([max(token_f1(a, p) for a in answers) for answers, p in pairs])),
    }


def record(targets, predictions):
    """squad, of the examples of one query only the first."""
    firsts = {}
    for target, prediction in zip(targets, predictions):
        firsts.setdefault(target["group"], (target["value"], prediction["value"]))
    return squad(*zip(*firsts.values()))


def multirc_f1(targets, predictions):
    """F1 over all answers of all questions."""
    return f1(*([one["value"] for one in side] for side in (targets, predictions)))


def exact_match(targets, predictions):
    """Part of the groups, MultiRC's questions, of which all answers are right."""
    groups = collections.defaultdict(list)
    for target, prediction in zip(targets, predictions):
        groups[target["group"]].append(target["value"] == prediction["value"])
    return {
        "exact_match": 100 * float(np.mean([all(group) for group in groups.values()]))
    }


METRICS |= {
    metric.__name__: metric
    for metric in (
        bleu,
        rouge,
        accuracy,
        f1,
        matthews_corrcoef,
        squad,
        record,
        multirc_f1,
        exact_match,
    )
}
METRICS |= {
    f"{name}_corrcoef": functools.partial(correlation, name)
    for name in ("pearson", "spearman")
}
METRICS["mean_3class_f1"] = functools.partial(mean_multiclass_f1, 3)


# ---- postprocessors ------------------------------------------------------------------------------
# t5/data/postprocessors.py: (Task, text, example, is_target) -> what the metrics compare.


def label(task, text, example, is_target):
    """A label's text -> its number, -1 if there is no such label."""
    return task.choices.index(text) if text in task.choices else -1


def number(task, text, example, is_target):
    try:
        return float(text)
    except ValueError:
        return -1.0


def multirc_answer(task, text, example, is_target):
    """The answer's number, and for a target the question it belongs to."""
    value = {"value": label(task, text, example, is_target)}
    return value | {"group": example["idx/question"]} if is_target else value


def record_answers(task, text, example, is_target):
    """All answers of a target, and the query they belong to."""
    return (
        {"value": text}
        if not is_target
        else {
            "value": list(example["answers"]),
            "group": (example["idx/passage"], example["idx/query"]),
        }
    )


def wsc_answer(task, text, example, is_target):
    """1 if the answer names the candidate, but for case and determiners, else 0; -1 if empty."""
    if is_target:
        return example["label"]
    determiners = set(
        "a an few her his each every many much my our some that the their these "
        "this those which whose your".split()
    )

    def bare(text):
        return " ".join(
            w for w in text.strip().lower().split(" ") if w not in determiners
        )

    answer = bare(text)
    candidate = bare(example.get("targets_pretokenized", example["targets"]))
    if not answer:
        return -1
    if ("'" in answer) != ("'" in candidate):
        return 0  # "Bob" is not "Bob's hat"
    answer, candidate = set(answer.split(" ")), set(candidate.split(" "))
    return int(answer <= candidate or candidate <= answer)


POSTPROCESSORS |= {
    "label": label,
    "number": number,
    "multirc": multirc_answer,
    "record": record_answers,
    "answers": lambda _, text, example, is_target: (
        list(example["answers"]) if is_target else text
    ),
    "wsc": wsc_answer,
}


def check_metrics(tasks, split):
    """Refuse a metric that is unknown or whose library is missing, before anything is decoded."""
    for name, cfg in tasks.items():
        task = data.find_task(name, cfg)
        if isinstance(task.postprocess, str) and task.postprocess not in {
            "",
            *POSTPROCESSORS,
        }:
            raise UserError(
                f"The task {name} asks for the postprocessor {task.postprocess}; there "
                f"are {', '.join(POSTPROCESSORS)}, and functions."
            )
        for metric in task.metrics:
            if isinstance(metric, str) and metric not in METRICS:
                raise UserError(
                    f"The task {name} asks for the metric {metric}"
                    f"{configs.nearest(metric, METRICS) or '; '}"
                    f"evaluate.METRICS has {', '.join(METRICS)}."
                )
            for library in LIBRARIES.get(metric, ()):
                import_library(library)


# ---- chosen by score -----------------------------------------------------------------------------


def rank_classification(targets, scores, num_classes=None, normalize=False):
    """Answers chosen by score (t5/evaluation/metrics.py). targets: (index, is_correct, weight,
    length in tokens) of each choice, index (example, choice); scores: log-likelihoods. num_classes:
    choices of every example, None if they vary. normalize: divide scores by lengths."""
    if len({index for index, *_ in targets}) < len(targets):
        raise ValueError("a choice of an example occurs twice")
    rows = sorted(zip(targets, scores))
    values = np.array(
        [score / (row[3] if normalize else 1) for row, score in rows], np.float32
    )
    correct = np.array([bool(row[1]) for row, _ in rows])
    weights = np.array([row[2] for row, _ in rows], float)
    if not num_classes:
        examples = [index[0] for (index, *_), _ in rows]
        starts = [i for i, one in enumerate(examples) if not i or one != examples[i - 1]]
        best = [
            start + int(np.argmax(values[start:stop]))
            for start, stop in zip(starts, [*starts[1:], len(rows)])
        ]
        return {
            "accuracy": 100 * float(correct[best] @ weights[best] / weights[best].sum())
        }
    correct, values = correct.reshape(-1, num_classes), values.reshape(-1, num_classes)
    weights, chosen = weights.reshape(-1, num_classes)[:, 0], values.argmax(-1)
    right = correct[np.arange(len(chosen)), chosen]
    several = (correct.sum(1) > 1).any()  # any of them will do
    right = right if several else right & (correct.sum(1) == 1)
    metrics = {"accuracy": 100 * float(np.average(right, weights=weights))}
    if several:
        return metrics
    labels = correct.argmax(-1)
    if num_classes > 2:
        scores = [
            class_f1(np.where(correct.any(1), labels, -1), chosen, label, weights)
            for label in range(num_classes)
        ]
        return metrics | {f"mean_{num_classes}class_f1": 100 * float(np.mean(scores))}
    likelihood = np.exp(values - values.max(-1, keepdims=True))
    probability = (likelihood / likelihood.sum(-1, keepdims=True))[:, 1]
    return metrics | {
        "f1": 100 * class_f1(labels, chosen, 1, weights),
        **curve_areas(correct[:, 1], probability, weights),
    }


def curve_areas(positive, scores, weights):
    """Areas under the ROC curve (trapezoids) and the precision-recall curve (steps), 0 to 100."""
    order = np.argsort(-scores, kind="stable")
    last = np.append(np.diff(scores[order]) != 0, True)  # equal scores are one threshold
    hits = np.cumsum((positive * weights)[order])[last]
    misses = np.cumsum((~positive * weights)[order])[last]
    if not hits[-1] or not misses[-1]:
        roc = math.nan  # there is only one class
    else:
        roc = np.trapezoid(
            np.append(0, hits) / hits[-1], np.append(0, misses) / misses[-1]
        )
    steps = np.diff(hits, prepend=0) / hits[-1] if hits[-1] else 0 * hits
    precision = np.divide(hits, hits + misses, out=0 * hits, where=hits + misses > 0)
    return {"auc-roc": 100 * float(roc), "auc-pr": 100 * float(steps @ precision)}


def choices_of(task, example):
    """The answers to choose from: of the example, or of the task."""
    choices = example.get("answer_choices", task.choices)
    if not isinstance(choices, list | tuple | np.ndarray) or not len(choices):
        raise UserError(
            "--mode rank needs answer choices: a task's `choices`, or a field "
            "answer_choices in its examples."
        )
    return list(choices)


def rank(params, cfg, mesh, split, tokenizer, normalize=False):
    """Answers chosen by their log-probability -> (metrics, a line for each choice). Examples of
    P3's score_eval tasks are choices already, with idx, is_correct and weight."""
    task = data.find_task(cfg.data.task, cfg)

    # (dict, (example, choice), whether it is right, weight)
    def choices(number, example):
        if "is_correct" in example and "idx" in example:
            try:
                index, weight = (
                    tuple(map(int, example["idx"])),
                    float(example.get("weight", 1)),
                )
            except (TypeError, ValueError):
                index = ()
            if len(index) != 2:
                raise ValueError(
                    "has an idx or a weight that is no (example, choice), no number"
                )
            return [(example, index, bool(example["is_correct"]), weight)]
        right = str(example["targets"]).strip()
        return [
            ({**example, "targets": choice}, (number, j), choice == right, 1.0)
            for j, choice in enumerate(choices_of(task, example))
        ]

    rows, examples = zip(*read_examples(cfg, tokenizer, split, choices))
    if len({index for _, index, *_ in rows}) < len(rows):
        raise UserError(f"{cfg.data.task}, {split}: two choices have the same idx.")
    scores = list(infer.run_examples(params, cfg, mesh, examples, "score"))
    targets = [
        (index, correct, weight, len(example.targets))
        for (_, index, correct, weight), example in zip(rows, examples)
    ]
    counts = collections.Counter(index[0] for index, *_ in targets)
    shared = {
        tuple(choices_of(task, row[0])) if "is_correct" not in row[0] else None
        for row in rows
    }
    alike = len({*counts.values()}) == len(shared) == 1 and None not in shared
    fixed = max(counts.values()) if alike else None
    lines = [
        {**example, "idx": index, "is_correct": correct, "score": score}
        for (example, index, correct, _), score in zip(rows, scores)
    ]
    return rank_classification(targets, scores, fixed, normalize), lines


# ---- a task --------------------------------------------------------------------------------------


def loss_of(params, cfg, mesh, split, tokenizer):
    """Teacher-forced metrics of all examples of a split, each counted once -> (metrics, rows)."""
    if split == "train":
        raise UserError(
            "--mode loss is for held-out splits: rows of a training split hold several "
            "examples and come again; --mode predict reads them one by one."
        )
    dataset = data.prepare(cfg, split, tokenizer)
    partition.check_memory(
        model.minimum_memory(
            cfg.model,
            cfg.train.batch_size,
            cfg.data.inputs_length,
            cfg.data.targets_length,
        ),
        "--train.batch_size, --data.inputs_length or --data.targets_length",
    )
    metrics = evaluate_loss(params, cfg, mesh, dataset, dataset.batches())
    rows = dataset.tasks[0].corpus.shard_starts()[-1]
    return {**metrics, "perplexity": math.exp(min(metrics["cross_ent_loss"], 700))}, rows


def write_lines(folder, name, step, lines):
    """What was predicted at a step -> FOLDER/NAME-STEP.jsonl, the name made safe and short."""
    plain = re.sub(r"[^\w.+-]+", "-", name)
    if len(plain) > 100:
        plain = f"{plain[:80]}-{hashlib.sha256(name.encode()).hexdigest()[:10]}"
    if lines and partition.is_main_process():
        configs.write_file(
            folder / f"{plain}-{step:08}.jsonl", "".join(map(infer.json_line, lines))
        )


# ---- tables and curves ---------------------------------------------------------------------------

# What GLUE and SuperGLUE average: the metrics of a benchmark first, then the benchmarks.
ACCURACY = ("accuracy",)
AVERAGES = {
    "glue_average": {
        "cola": ("matthews_corrcoef",),
        "sst2": ACCURACY,
        "mrpc": ("f1", "accuracy"),
        "qqp": ("f1", "accuracy"),
        "stsb": ("pearson_corrcoef", "spearman_corrcoef"),
        "mnli": ("matched/accuracy", "mismatched/accuracy"),
        "qnli": ACCURACY,
        "rte": ACCURACY,
    },
    "super_glue_average": {
        "boolq": ACCURACY,
        "cb": ("mean_3class_f1", "accuracy"),
        "copa": ACCURACY,
        "multirc": ("f1", "exact_match"),
        "record": ("f1", "em"),
        "rte": ACCURACY,
        "wic": ACCURACY,
        "wsc": ACCURACY,
    },
}


def csv_column(suite, benchmark, metric):
    """A benchmark's metric -> the column TASK/METRIC."""
    if suite == "glue_average":
        part, _, metric = metric.rpartition("/")
        return f"glue_{benchmark}{'_' * bool(part)}{part}_v002/{metric}"
    task = "wsc_v102_simple_eval" if benchmark == "wsc" else f"{benchmark}_v102"
    return f"super_glue_{task}/{metric}"


def read_metrics(folders, prefix):
    """metrics.jsonl of some folders -> {step: {name behind the prefix: value}}."""
    table = {}
    for folder in folders:
        for line in partition.read_metrics_file(
            configs.to_path(folder) / "metrics.jsonl"
        ):
            values = {
                key.removeprefix(prefix): value
                for key, value in line.items()
                if key.startswith(prefix) and key != "step"
            }
            table.setdefault(line["step"], {}).update(values)
    return {step: table[step] for step in sorted(table) if table[step]}


def write_csv(path, table):
    """A row for each step, and for each column the best value and its step, as t5's parse_tb.
    GLUE's and SuperGLUE's averages are added where all their columns are there."""
    suites = {
        suite: [
            [csv_column(suite, name, metric) for metric in metrics]
            for name, metrics in benchmarks.items()
        ]
        for suite, benchmarks in AVERAGES.items()
    }
    for suite, groups in suites.items():
        for values in table.values():
            if all(column in values for group in groups for column in group):
                values[suite] = float(
                    np.mean([np.mean([values[c] for c in g]) for g in groups])
                )
    columns = sorted({name for values in table.values() for name in values})
    best = {}
    for name in columns:  # where the mean of its benchmark's metrics is best
        group = next(
            (
                group
                for group in itertools.chain(*suites.values())
                if name in group and set(group) <= set(columns)
            ),
            [name],
        )
        found = [
            (float(np.mean([values[c] for c in group])), -step)
            for step, values in table.items()
            if all(not math.isnan(values.get(c, math.nan)) for c in group)
        ]
        step = -max(found)[1] if found else None
        best[name] = (table[step][name], step) if found else (math.nan, "")
    with open(path, "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["step", *columns])
        for step, values in table.items():
            rows.writerow(
                [step, *(f"{values[c]:.3f}" if c in values else "" for c in columns)]
            )
        rows.writerow(["max", *(f"{best[name][0]:.3f}" for name in columns)])
        rows.writerow(["step", *(best[name][1] for name in columns)])


def check_outputs(args):
    """Refuse what cannot be written at the end, before anything is evaluated."""
    for path in filter(None, (args.csv, args.plot)):
        if os.path.isdir(path) or not Path(path).parent.is_dir():
            raise UserError(
                f"{path} cannot be written there: name a file in a folder that exists."
            )
    if args.plot and not importlib.util.find_spec("matplotlib"):
        raise UserError("--plot needs matplotlib: pip install '.[plot]'.")


def write_plot(path, folders):
    """Losses, accuracies and the learning rate over the steps."""
    import matplotlib  # an extra

    matplotlib.use("Agg")
    from matplotlib import pyplot

    table = read_metrics(folders, "")
    panels = {"loss": "nats per token", "accuracy": "%", "learning_rate": ""}
    figure, axes = pyplot.subplots(len(panels), 1, figsize=(8, 9), sharex=True)
    for axis, (metric, unit) in zip(axes, panels.items()):
        for name in sorted(
            {
                name
                for values in table.values()
                for name in values
                if name.rpartition("/")[2] == metric
            }
        ):
            percent = metric == "accuracy" and not name.startswith("inference_eval/")
            points = [
                (step, values[name] * (100 if percent else 1))
                for step, values in table.items()
                if name in values
            ]
            axis.plot(*zip(*points), label=name, marker="." if len(points) < 40 else None)
            axis.legend(fontsize="small")
        axis.set_ylabel(f"{metric.replace('_', ' ')}{f', {unit}' if unit else ''}")
    axes[0].set_yscale("log")
    axes[-1].set_xlabel("step")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


# ---- the command ---------------------------------------------------------------------------------

# Settings that change what is decoded: where they are not the run's own, a task's metrics are
# recorded under a name of their own, and no table mixes them.
DECODER = ("beams", "alpha", "penalty", "max_len", "temperature", "top_k", "top_p")


def main(argv):
    args, changes = configs.parse_args(
        __doc__,
        argv,
        tasks=dict(help="tasks or mixtures, with commas; default: the run's"),
        split=dict(default="validation", help="of the tasks' sources"),
        mode=dict(choices=("predict", "rank", "loss"), help="what to evaluate"),
        step=dict(default="latest", help="a checkpoint's step, latest, best or all"),
        output=dict(metavar="DIR", help="folder to write to; default: RUN/eval"),
        normalize=dict(
            action="store_true", help="rank: divide scores by the answers' lengths"
        ),
        csv=dict(
            metavar="FILE", help="write a table of the metrics on text of all steps"
        ),
        plot=dict(metavar="FILE", help="draw losses, accuracies and the learning rate"),
    )
    check_outputs(args)
    changes = {**changes, **({"data.eval_tasks": args.tasks} if args.tasks else {})}
    several, args.step = args.step == "all", args.step.replace("all", "latest")
    cfg, mesh, tokenizer = infer.open_model(args, changes, recipe=True)
    if tokenizer is None:
        raise UserError(f"{args.run_dir} has no vocabulary: put its spiece.model there.")
    folder = configs.to_path(args.output or os.path.join(args.run_dir, "eval"))
    tasks = data.evaluation_configs(cfg, args.split)
    check_metrics(tasks, args.split)
    changed = configs.differences(cfg, configs.load_run(args.run_dir))
    decoder = "".join(
        f"-{knob}={changed[f'decode.{knob}'][0]}"
        for knob in DECODER
        if f"decode.{knob}" in changed
    )
    evaluated = False
    steps = partition.from_main_process(partition.Checkpoints(args.run_dir).steps())
    for wanted in steps if several else [args.step]:
        try:
            step, params = infer.load_params(cfg, args.run_dir, wanted)
        except UserError as error:  # damaged, or removed while others were evaluated
            if not several:
                raise
            note(f"step {wanted:,} is left out: {error}")
            continue
        evaluated = True
        for name, alone in tasks.items():
            task = data.find_task(name, alone)
            mode = args.mode or ("predict" if task.metrics else "loss")
            how = {
                "loss": loss_of,
                "predict": predict,
                "rank": functools.partial(rank, normalize=args.normalize),
            }[mode]
            start = time.perf_counter()
            metrics, found = how(params, alone, mesh, args.split, tokenizer)
            lines, count = ([], found) if mode == "loss" else (found, len(found))
            count = len({line["idx"][0] for line in lines}) if mode == "rank" else count
            rate = count / (time.perf_counter() - start)
            print(
                f"{args.run_dir}, step {step:,}, {name}, {args.split}, {mode}: "
                f"{count:,} {'rows' if mode == 'loss' else 'examples'}, {rate:.4g} a second"
            )
            for metric, value in metrics.items():
                print(f"  {metric:22} {value:.4f}")
            group = "training_eval" if mode == "loss" else "inference_eval"
            name += {
                "rank": "-rank" + "-normalized" * args.normalize,
                "predict": decoder,
            }.get(mode, "") + (f"-{args.split}" if args.split != "validation" else "")
            write_lines(folder, name, step, lines)
            values = {f"{group}/{name}/{key}": value for key, value in metrics.items()}
            if partition.is_main_process():
                configs.append_file(
                    folder / "metrics.jsonl", json.dumps({"step": step, **values}) + "\n"
                )
    if not evaluated:
        raise UserError(f"{args.run_dir} has no whole checkpoint: train.py writes them.")
    if args.csv and partition.is_main_process():
        write_csv(args.csv, read_metrics([args.run_dir, folder], "inference_eval/"))
    if args.plot and partition.is_main_process():
        write_plot(args.plot, [args.run_dir, folder])


if __name__ == "__main__":
    configs.run_command(main)
