"""Evaluate a trained model: held-out loss, metrics on decoded text, and rank classification.

The input is a run directory with checkpoints, and the held-out examples of the run's tasks. The
metrics are printed and appended to metrics.jsonl in RUN/eval (or --output DIR). The predictions
are written there too, as one JSONL file for each task and step. There are three modes:

- --mode loss: the teacher-forced loss. The model predicts each target token from the inputs and
  the true previous tokens. The loss is in nats per target token.
- --mode predict: the model generates a text for each example. The task's metrics, the same as in
  t5, compare this text with the target.
- --mode rank: the model scores the answer choices of each example, and the most likely choice is
  its answer. T0 is evaluated in this way.

Without --mode, tasks that have metrics use predict and all other tasks use loss.

    python evaluate.py --run_dir runs/tiny                          evaluate the last checkpoint
    python evaluate.py --run_dir runs/tiny --plot curves.png        also draw the training curves
    python evaluate.py --run_dir RUN --tasks glue_rte_v002 --step all --csv table.csv
    python evaluate.py --run_dir RUN --tasks super_glue_copa_v102 --mode rank

If a run spans several machines, run the same command on each machine.

Example: two examples have two answer choices each. The model prefers the correct choice of the
first example and the wrong choice of the second example.

    >>> from evaluate import rank_classification
    >>> choices = [  # (index, is_correct, weight, length in tokens)
    ...     ((0, 0), True, 1.0, 2), ((0, 1), False, 1.0, 2),
    ...     ((1, 0), True, 1.0, 2), ((1, 1), False, 1.0, 2)]
    >>> rank_classification(choices, scores=[-1.5, -4.0, -3.0, -2.0])
    {'accuracy': 50.0}
"""

import collections
import csv
import functools
import importlib.util
import itertools
import json
import math
import os
import re
import string
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import configs
import data
import infer
import model
import partition
from configs import UserError, note

# Both tables are filled below the banner. A recipe file may add its own metrics.
METRICS = configs.METRICS  # {name: function (targets, predictions) -> {metric: value}}
POSTPROCESSORS = {}  # {name: function (task, text, example, is_target) -> value}

# ---- teacher-forced loss -------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=2)
def loss_sums(params, batch, cfg, first_sentinel):
    """Sum the losses of a batch over its target tokens, and over its content tokens alone.

    Content tokens are the target tokens without EOS and without sentinels. A sentinel, such as
    <extra_id_0>, stands for a masked span. Sentinels come in a fixed order, so they are easy to
    predict and make the mean loss look lower. The loss over content tokens can be compared with
    the unigram baseline, which also leaves out EOS and sentinels.

    params: the model's parameters. batch: a data.Batch of arrays [B, T]. first_sentinel: the
    lowest id of a sentinel. All sentinels are at the end of the vocabulary.
    Returns {name: sum}. Each sum is a float32 scalar.
    """
    losses = model.token_losses(params, batch, cfg)
    cross_entropy = losses[0]
    is_real = batch.target_segments > 0  # segment 0 is padding
    is_content = is_real & (batch.targets > data.EOS) & (batch.targets < first_sentinel)
    return {
        **model.sum_over_tokens(losses, batch),
        "content_loss": jnp.sum(cross_entropy * is_content),
        "content_tokens": jnp.sum(is_content),
    }


def evaluate_loss(params, cfg, mesh, dataset, batches):
    """Return the mean loss and accuracy over the first batches of a held-out dataset.

    dataset: a data.Dataset that contains each held-out row once. batches: the number of batches.
    Returns {metric: value}. Losses are in nats per token. The accuracy is between 0 and 1.
    """
    batch_size = cfg.train.batch_size
    tokenizer = dataset.tasks[0].tokenizer
    first_sentinel = tokenizer.size - tokenizer.sentinels
    # Each process makes only the rows that its own devices hold.
    rows = partition.local_rows(batch_size, mesh)
    totals = collections.Counter()  # its update() adds the values of each key
    for i in range(batches):
        batch = partition.put_batch(dataset.batch(i, rows), batch_size, mesh)
        totals.update(loss_sums(params, batch, cfg, first_sentinel))
    # Divide only at the end, so that every token has the same weight in the mean.
    metrics = model.mean_metrics(totals)
    metrics["content_loss"] = totals["content_loss"] / max(totals["content_tokens"], 1)
    return {name: float(value) for name, value in jax.device_get(metrics).items()}


# ---- metrics on decoded text ---------------------------------------------------------------------


def read_examples(cfg, tokenizer, split, expand=None, most=None):
    """Read the examples of a task's split and encode them for the model.

    cfg: a Config whose data.task is the task. most: the maximum number of examples, or None.
    expand: None, or a function (number, example) that returns a list of Choices. The Choices
        are then encoded instead of the example. Only rank classification uses this (see below).
    Returns a list of pairs (example, infer.Example), or (Choice, infer.Example) with expand. An
    example is the dict that the task's format makes, for instance {"inputs", "targets"}.
    Invalid examples stop the evaluation, or are skipped with --data.on_error skip.
    """
    task_name = cfg.data.task
    task = data.find_task(task_name, cfg)
    if len(task.objective.features) < 2:
        raise UserError(
            f"The task {task_name} has no inputs and targets: use --mode loss for it."
        )
    report_invalid = data.InvalidExamples(cfg.data.on_error)
    encode = infer.ExampleEncoder(cfg, tokenizer, expand is not None, task)
    examples = data.read_task(task_name, split, cfg, report_invalid, tokenizer.size)
    pairs = []
    for number, (where, example) in enumerate(itertools.islice(examples, most)):
        try:
            if expand is None:
                pairs.append((example, encode(example, number)))
            else:
                choices = expand(number, example)
                pairs += [(choice, encode(choice.fields, number)) for choice in choices]
        except ValueError as error:
            report_invalid(where, str(error))
    if not pairs:
        raise UserError(
            f"The task {task_name} has no valid examples in its {split} split: choose "
            f"another --split or other --tasks."
        )
    if report_invalid.count or encode.cut:
        note(
            f"{task_name}, {split}: {report_invalid.count:,} examples were skipped and "
            f"{encode.cut:,} texts were truncated."
        )
    return pairs


def postprocess(task, text, example, is_target):
    """Turn the text of a target or a prediction into the value that the metrics compare.

    For instance, the postprocessor "label" turns the text "entailment" into the label 0.
    """
    postprocessor = task.postprocess
    if not postprocessor:
        return text
    if callable(postprocessor):
        return postprocessor(text, example=example, is_target=is_target)
    return POSTPROCESSORS[postprocessor](task, text, example, is_target)


def predict(params, cfg, mesh, split, tokenizer, most=None):
    """Generate a text for each example of a split, and compute the task's metrics on the texts.

    most: the maximum number of examples, or None for all of them.
    Returns ({metric: value}, lines). A line is the dict of an example with three more fields:
    "output" is the generated text, "target" and "prediction" are the values that are compared.
    """
    task = data.find_task(cfg.data.task, cfg)
    pairs = read_examples(cfg, tokenizer, split, most=most)
    results = infer.run_examples(params, cfg, mesh, [encoded for _, encoded in pairs])
    lines = []
    for (example, _), (answers, _) in zip(pairs, results):
        target = example["targets"]
        if not isinstance(target, str):  # the targets may be token ids
            target = tokenizer.decode(target)
        output = tokenizer.decode(answers[0])  # the best answer is first
        line = {
            **example,
            "target": postprocess(task, target, example, True),
            "output": output,
            "prediction": postprocess(task, output, example, False),
        }
        lines.append(line)
    targets = [line["target"] for line in lines]
    predictions = [line["prediction"] for line in lines]
    metrics = {}
    for metric in task.metrics or ("accuracy",):
        # A task names a metric of METRICS, or brings a function of its own.
        function = METRICS[metric] if isinstance(metric, str) else metric
        metrics |= function(targets, predictions)
    return metrics, lines


# ---- rank classification -------------------------------------------------------------------------
# The examples of many tasks have a few answer choices, for instance "yes" and "no". Rank
# classification generates no text. The model scores every choice by its log-probability, which is
# the sum of log p(token | inputs, previous tokens) over the tokens of the choice. The choice with
# the highest score is the model's answer. So the answer is always one of the choices.
# T0 is evaluated in this way (Sanh et al. 2022).


class Choice(NamedTuple):
    """One answer choice of an example."""

    fields: dict  # the fields of the example, where "targets" is this choice
    index: tuple  # (number of the example, number of the choice)
    is_correct: bool
    weight: float  # of the example in the mean
    texts: tuple  # all answer choices of the example, or () if they are unknown


def answer_choices(task, number, example):
    """Return the Choices of an example: one for each of the texts that may be its answer.

    The texts are the example's field answer_choices or, without it, the choices of the task.
    P3, the data of T0, also has tasks whose examples are already single choices. They have the
    fields idx and is_correct, and sometimes a weight. Raises ValueError if those are invalid.
    """
    if "is_correct" in example and "idx" in example:
        try:
            example_number, choice_number = map(int, example["idx"])
            weight = float(example.get("weight", 1))
        except (TypeError, ValueError):
            raise ValueError(
                "has an idx that is not a pair of integers, or a weight that is not a number"
            ) from None
        index = example_number, choice_number
        return [Choice(example, index, bool(example["is_correct"]), weight, ())]
    texts = example.get("answer_choices", task.choices)
    if not isinstance(texts, list | tuple | np.ndarray) or not len(texts):
        raise UserError(
            "--mode rank needs answer choices: define `choices` in the task, or add a field "
            "answer_choices to its examples."
        )
    target = str(example["targets"]).strip()
    return [
        Choice(
            {**example, "targets": text}, (number, i), text == target, 1.0, tuple(texts)
        )
        for i, text in enumerate(texts)
    ]


def percent(values):
    """Return a value between 0 and 1, or the mean of several such values, in percent."""
    return 100 * float(np.mean(values))


def fixed_choice_metrics(scores, correct, weights):
    """Compute metrics that exist only if all examples have the same answer choices.

    Each choice is then a class, as in ordinary classification.
    scores, correct: arrays [examples, choices]. weights: an array [examples].
    Returns {metric: 0 to 100}. For two choices, these are the F1 of the second choice and the
    areas under its ROC curve and its precision-recall curve. For more choices, it is the mean F1
    of all choices. There are no such metrics if an example has several correct choices.
    """
    from scipy import special  # comes with JAX
    from sklearn import metrics  # optional

    number_of_choices = scores.shape[1]
    several_correct = (correct.sum(axis=1) > 1).any()
    if number_of_choices < 2 or several_correct:
        return {}
    # chosen [examples, choices] is true for the choice with the highest score.
    chosen = scores.argmax(axis=1)[:, None] == np.arange(number_of_choices)
    options = {"sample_weight": weights, "zero_division": 0}
    if number_of_choices > 2:
        f1 = metrics.f1_score(correct, chosen, average="macro", **options)
        return {f"mean_{number_of_choices}class_f1": percent(f1)}
    probability = special.softmax(scores, axis=1)[:, 1]  # of the second choice
    correct, chosen = correct[:, 1], chosen[:, 1]
    f1 = metrics.f1_score(correct, chosen, **options)
    roc = metrics.roc_auc_score(correct, probability, sample_weight=weights)
    pr = metrics.average_precision_score(correct, probability, sample_weight=weights)
    return {"f1": percent(f1), "auc-roc": percent(roc), "auc-pr": percent(pr)}


def rank_classification(targets, scores, num_classes=None, normalize=False):
    """Take the choice with the highest score as the answer to each example, and judge the answers.

    targets: one tuple (index, is_correct, weight, length in tokens) for each answer choice. The
        index is (number of the example, number of the choice). The order does not matter.
    scores: the log-probability of each choice.
    num_classes: the number of choices, if all examples have the same choices. Otherwise None.
    normalize: divide each score by the length of its choice.
    Returns {metric: 0 to 100}: the accuracy and, with num_classes, also fixed_choice_metrics.
    Raises ValueError if an index occurs twice.
    The numbers are those of rank_classification in t5/evaluation/metrics.py.
    """
    if len({index for index, *_ in targets}) < len(targets):
        raise ValueError("a choice of an example occurs twice")
    examples = {}  # {number of the example: its choices as (score, is_correct, weight)}
    for (index, is_correct, weight, length), score in sorted(zip(targets, scores)):
        score = np.float32(score / length if normalize else score)
        choices = examples.setdefault(index[0], [])
        choices.append((score, bool(is_correct), weight))
    answer_is_correct, weights = [], []
    for choices in examples.values():
        # If two choices have the same score, argmax takes the first of them.
        answer = int(np.argmax([score for score, _, _ in choices]))
        answer_is_correct.append(choices[answer][1])
        # As in t5, an example has the weight of its first choice if the number of choices is
        # fixed, and otherwise the weight of its chosen one.
        weights.append(choices[0 if num_classes else answer][2])
    metrics = {"accuracy": percent(np.average(answer_is_correct, weights=weights))}
    if num_classes:
        table = np.array([[choice[:2] for choice in row] for row in examples.values()])
        scores, correct = table[..., 0], table[..., 1].astype(bool)
        metrics |= fixed_choice_metrics(scores, correct, np.array(weights))
    return metrics


def rank(params, cfg, mesh, split, tokenizer, normalize=False):
    """Score the answer choices of each example of a split, and take the most likely choices.

    normalize: divide each score by the number of tokens of its choice.
    Returns ({metric: 0 to 100}, lines). A line is the dict of one choice with the fields idx,
    is_correct and score.
    """
    task = data.find_task(cfg.data.task, cfg)
    expand = functools.partial(answer_choices, task)
    choices, encoded = zip(*read_examples(cfg, tokenizer, split, expand))
    if len({choice.index for choice in choices}) < len(choices):
        raise UserError(
            f"The task {cfg.data.task} has two choices with the same idx in its {split} "
            f"split: give each choice its own idx."
        )
    scores = list(infer.run_examples(params, cfg, mesh, encoded, "score"))
    targets = [
        (choice.index, choice.is_correct, choice.weight, len(example.targets))
        for choice, example in zip(choices, encoded)
    ]
    lines = [
        {
            **choice.fields,
            "idx": choice.index,
            "is_correct": choice.is_correct,
            "score": score,
        }
        for choice, score in zip(choices, scores)
    ]
    # F1 and areas under curves need the same choices in all examples.
    all_texts = {choice.texts for choice in choices}
    num_classes = len(choices[0].texts) if len(all_texts) == 1 else None
    if num_classes and not importlib.util.find_spec("sklearn"):
        note(
            "Only the accuracy is computed. To get F1 and the areas under the curves as well, "
            "run pip install '.[metrics]'."
        )
        num_classes = None
    return rank_classification(targets, scores, num_classes, normalize), lines


# ====== below: metrics, postprocessors, tables and plots, the command =============================
# The metrics are those of t5/evaluation/metrics.py. Each metric takes the postprocessed targets and
# predictions, two lists of equal length, and returns {metric: 0 to 100}.


def accuracy(targets, predictions):
    """Return the percentage of predictions that equal their targets."""
    return {"accuracy": percent([t == p for t, p in zip(targets, predictions)])}


def bleu(targets, predictions):
    """Return the corpus BLEU, computed by sacrebleu with the tokenizer "intl" as in t5.

    A target is a text, or a list of reference texts.
    """
    references = targets if isinstance(targets[0], list) else [targets]
    import sacrebleu  # an optional library

    score = sacrebleu.corpus_bleu(
        predictions, references, smooth_method="exp", smooth_value=0.0, tokenize="intl"
    )
    return {"bleu": score.score}


def rouge(targets, predictions):
    """Return the mean F1 of ROUGE-1, ROUGE-2 and ROUGE-Lsum, computed by rouge-score.

    Words are not stemmed. t5 returns the median of bootstrap samples, which is random. The mean
    is not random and differs from that median only slightly.
    """
    from rouge_score import rouge_scorer  # an optional library

    names = "rouge1", "rouge2", "rougeLsum"
    scorer = rouge_scorer.RougeScorer(names)
    # ROUGE-Lsum expects each sentence on its own line.
    targets = [text.replace(" . ", " .\n") for text in targets]
    predictions = [text.replace(" . ", " .\n") for text in predictions]
    scores = list(map(scorer.score, targets, predictions))
    return {name: percent([score[name].fmeasure for score in scores]) for name in names}


def f1(targets, predictions):
    """Return the F1 of class 1 of two. An invalid prediction counts as the wrong class."""
    from sklearn import metrics

    targets, predictions = np.array(targets), np.array(predictions)
    is_valid = np.isin(predictions, (0, 1))
    predictions = np.where(is_valid, predictions, 1 - targets)
    return {"f1": percent(metrics.f1_score(targets, predictions, zero_division=0))}


def mean_3class_f1(targets, predictions):
    """Return the mean of the F1 of the classes 0, 1 and 2. An invalid prediction is a miss."""
    from sklearn import metrics

    score = metrics.f1_score(
        targets, predictions, labels=range(3), average="macro", zero_division=0
    )
    return {"mean_3class_f1": percent(score)}


def matthews_corrcoef(targets, predictions):
    """Return Matthews' correlation coefficient. An invalid prediction is a class of its own."""
    from sklearn import metrics

    score = metrics.matthews_corrcoef(targets, predictions)
    return {"matthews_corrcoef": percent(score)}


def correlation(name, targets, predictions):
    """Return the correlation "pearson" or "spearman" of two lists of numbers, computed by SciPy.

    The correlation is nan if all targets or all predictions are equal.
    """
    from scipy import stats  # imported here because the import takes half a second

    key = f"{name}_corrcoef"
    if len(set(targets)) < 2 or len(set(predictions)) < 2:
        return {key: math.nan}
    function = getattr(stats, f"{name}r")  # stats.pearsonr or stats.spearmanr
    return {key: percent(function(targets, predictions)[0])}


def normalize_answer(text):
    """Normalize an answer as SQuAD does: lower case, no punctuation, no articles, single spaces."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def word_f1(target, prediction):
    """Return the F1 between 0 and 1 of the words of a prediction, regardless of their order."""
    target, prediction = target.split(), prediction.split()
    common = collections.Counter(target) & collections.Counter(prediction)
    if not common:
        return 0.0
    return 2 * common.total() / (len(target) + len(prediction))


def squad(targets, predictions):
    """Return the exact match "em" and the word F1 of answers to questions, as SQuAD does.

    A target is the list of correct answers to a question. The best match of them counts.
    """
    exact, f1s = [], []
    for answers, prediction in zip(targets, predictions):
        answers = [normalize_answer(answer) for answer in answers]
        prediction = normalize_answer(prediction)
        exact.append(prediction in answers)
        f1s.append(max(word_f1(answer, prediction) for answer in answers))
    return {"em": percent(exact), "f1": percent(f1s)}


def record(targets, predictions):
    """Return the metrics of SQuAD for ReCoRD, which repeats a query for each correct answer.

    Only the first example of each query counts.
    """
    queries = {}  # {query: (correct answers, prediction)}
    for target, prediction in zip(targets, predictions):
        queries.setdefault(target["group"], (target["value"], prediction["value"]))
    return squad(*zip(*queries.values()))


def multirc_f1(targets, predictions):
    """Return the F1 of MultiRC over the answers to all questions. An answer is right or wrong."""
    return f1([t["value"] for t in targets], [p["value"] for p in predictions])


def exact_match(targets, predictions):
    """Return the percentage of questions of MultiRC for which all answers are judged correctly."""
    questions = collections.defaultdict(list)
    for target, prediction in zip(targets, predictions):
        questions[target["group"]].append(target["value"] == prediction["value"])
    return {"exact_match": percent([all(found) for found in questions.values()])}


METRICS |= {
    "bleu": bleu,
    "rouge": rouge,
    "accuracy": accuracy,
    "f1": f1,
    "matthews_corrcoef": matthews_corrcoef,
    "squad": squad,
    "record": record,
    "multirc_f1": multirc_f1,
    "exact_match": exact_match,
    "pearson_corrcoef": functools.partial(correlation, "pearson"),
    "spearman_corrcoef": functools.partial(correlation, "spearman"),
    "mean_3class_f1": mean_3class_f1,
}

# The optional library that a metric needs.
LIBRARIES = {
    "bleu": "sacrebleu",
    "rouge": "rouge_score",
    "f1": "sklearn",
    "matthews_corrcoef": "sklearn",
    "multirc_f1": "sklearn",
    "mean_3class_f1": "sklearn",
}


def check_metrics(tasks):
    """Refuse unknown metrics and postprocessors and missing libraries before the evaluation.

    tasks: {name: Config of the task}. Raises UserError.
    """
    for name, cfg in tasks.items():
        task = data.find_task(name, cfg)
        used = [("postprocessor", task.postprocess, POSTPROCESSORS)]
        used += [("metric", metric, METRICS) for metric in task.metrics]
        for kind, value, known in used:
            # The value may also be a function. An empty value means no postprocessor.
            if isinstance(value, str) and value not in ("", *known):
                raise UserError(
                    f"The task {name} has the unknown {kind} {value}: use a function or "
                    f"one of {', '.join(known)}."
                )
            library = LIBRARIES.get(value)
            if library and not importlib.util.find_spec(library):
                raise UserError(
                    f"The metric {value} needs the Python library {library}: pip install "
                    f"'.[metrics]'."
                )


# ---- postprocessors ------------------------------------------------------------------------------
# The postprocessors are those of t5/data/postprocessors.py. Each is a function (task, text, example,
# is_target) that returns the value of a target's or a prediction's text for the metrics.


def label(task, text, example, is_target):
    """Return the number of the label that the text names, or -1 for any other text."""
    return task.choices.index(text) if text in task.choices else -1


def number(task, text, example, is_target):
    """Return the number that the text spells in digits, or -1 for any other text."""
    try:
        return float(text)
    except ValueError:
        return -1.0


def all_answers(task, text, example, is_target):
    """Return the list of all correct answers for a target, and the text for a prediction."""
    return list(example["answers"]) if is_target else text


def multirc(task, text, example, is_target):
    """Return the label of an answer. For a target, also return the question it belongs to."""
    value = {"value": label(task, text, example, is_target)}
    if is_target:
        value["group"] = example["idx/question"]
    return value


def record_answers(task, text, example, is_target):
    """Return the text or all correct answers. For a target, also return the query."""
    value = {"value": all_answers(task, text, example, is_target)}
    if is_target:
        value["group"] = example["idx/passage"], example["idx/query"]
    return value


DETERMINERS = set(
    "a an few her his each every many much my our some that the their these this those which "
    "whose your".split()
)


def content_words(text):
    """Return the set of words of a text in lower case, without "the", "his", "some" and so on."""
    words = set(text.strip().lower().split(" ")) - DETERMINERS
    return words or {""}


def wsc(task, text, example, is_target):
    """Return 1 if the text names the candidate of WSC's question, 0 if not, -1 if it is empty.

    The text names the candidate if the words of one of the two are among the words of the other.
    Case and determiners do not matter. The value of a target is its label, 0 or 1.
    """
    if is_target:
        return example["label"]
    candidate_text = example.get("targets_pretokenized", example["targets"])
    answer, candidate = content_words(text), content_words(candidate_text)
    if not any(answer):
        return -1
    if ("'" in text) != ("'" in candidate_text):
        return 0  # "Bob" is not "Bob's hat"
    return int(answer <= candidate or candidate <= answer)


POSTPROCESSORS |= {
    "label": label,
    "number": number,
    "answers": all_answers,
    "multirc": multirc,
    "record": record_answers,
    "wsc": wsc,
}


# ---- the loss of a split, files of predictions -------------------------------------------------


def split_loss(params, cfg, mesh, split, tokenizer):
    """Compute the teacher-forced metrics of all examples of a held-out split.

    Returns ({metric: value}, []). The empty list stands for the lines of predict and rank.
    """
    if split == "train":
        raise UserError(
            "--mode loss evaluates held-out splits only, because the rows of a training split "
            "hold several examples and repeat them: use --mode predict for --split train."
        )
    dataset = data.prepare(cfg, split, tokenizer)
    lengths = cfg.data.inputs_length, cfg.data.targets_length
    partition.check_memory(
        model.minimum_memory(cfg.model, cfg.train.batch_size, *lengths),
        "--train.batch_size, --data.inputs_length or --data.targets_length",
    )
    metrics = evaluate_loss(params, cfg, mesh, dataset, dataset.batches())
    # Above 709, exp overflows.
    metrics["perplexity"] = math.exp(min(metrics["cross_ent_loss"], 700))
    return metrics, []


def write_lines(folder, name, step, lines):
    """Write the predictions for a task at a step to FOLDER/NAME-STEP.jsonl.

    Characters of the name that are unsafe in file names become "-". Only the main process writes.
    """
    name = re.sub(r"[^\w.+-]+", "-", name)
    if lines and partition.is_main_process():
        text = "".join(infer.json_line(line) for line in lines)
        configs.write_file(folder / f"{name}-{step:08}.jsonl", text)


# ---- tables and plots ----------------------------------------------------------------------------

# The averages of GLUE and SuperGLUE. Each string is a benchmark and names its columns TASK/METRIC.
# The columns of a benchmark are averaged first, then the benchmarks.
AVERAGES = {
    "glue_average": (
        "glue_cola_v002/matthews_corrcoef",
        "glue_sst2_v002/accuracy",
        "glue_mrpc_v002/f1 glue_mrpc_v002/accuracy",
        "glue_qqp_v002/f1 glue_qqp_v002/accuracy",
        "glue_stsb_v002/pearson_corrcoef glue_stsb_v002/spearman_corrcoef",
        "glue_mnli_matched_v002/accuracy glue_mnli_mismatched_v002/accuracy",
        "glue_qnli_v002/accuracy",
        "glue_rte_v002/accuracy",
    ),
    "super_glue_average": (
        "super_glue_boolq_v102/accuracy",
        "super_glue_cb_v102/mean_3class_f1 super_glue_cb_v102/accuracy",
        "super_glue_copa_v102/accuracy",
        "super_glue_multirc_v102/f1 super_glue_multirc_v102/exact_match",
        "super_glue_record_v102/f1 super_glue_record_v102/em",
        "super_glue_rte_v102/accuracy",
        "super_glue_wic_v102/accuracy",
        "super_glue_wsc_v102_simple_eval/accuracy",
    ),
}


def read_metrics(folders, prefix):
    """Read the metrics whose names begin with the prefix from metrics.jsonl in each folder.

    Returns {step: {name without the prefix: value}} in the order of the steps.
    """
    table = collections.defaultdict(dict)
    for folder in folders:
        path = configs.to_path(folder) / "metrics.jsonl"
        for line in partition.read_metrics_file(path):
            step = line.pop("step")
            for name, value in line.items():
                if name.startswith(prefix):
                    table[step][name.removeprefix(prefix)] = value
    return dict(sorted(table.items()))


def mean_of(values, columns):
    """Return the mean of the columns in {column: value}, or nan if a column is missing."""
    return float(np.mean([values.get(column, math.nan) for column in columns]))


def best_step(table, columns):
    """Return the first step at which the mean of the columns is highest, or None.

    Steps at which a column is missing or nan do not count.
    """
    means = {step: mean_of(values, columns) for step, values in table.items()}
    means = {step: mean for step, mean in means.items() if not math.isnan(mean)}
    return max(means, key=means.get, default=None)


def write_csv(path, table):
    """Write a table of metrics with one row for each step, in the format of t5's parse_tb.

    table: {step: {column: value}}, from read_metrics. Two rows follow the steps: "max" has the best
    value of each column, and "step" has the step of this value. The columns of a benchmark with
    several metrics share their best step. The averages of GLUE and SuperGLUE are added at each
    step that has all their columns.
    """
    benchmark_of = {}  # {column: the columns of its benchmark}
    for average, benchmarks in AVERAGES.items():
        benchmarks = [benchmark.split() for benchmark in benchmarks]
        for columns in benchmarks:
            benchmark_of |= dict.fromkeys(columns, columns)
        for values in table.values():
            mean = float(np.mean([mean_of(values, columns) for columns in benchmarks]))
            if not math.isnan(mean):
                values[average] = mean
    names = sorted({name for values in table.values() for name in values})
    best_values, best_steps = [], []
    for name in names:
        columns = [c for c in benchmark_of.get(name, [name]) if c in names]
        step = best_step(table, columns)
        best_steps.append(step)
        best_values.append(math.nan if step is None else table[step][name])
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", *names])
        for step, values in table.items():
            cells = [f"{values[name]:.3f}" if name in values else "" for name in names]
            writer.writerow([step, *cells])
        writer.writerow(["max", *(f"{value:.3f}" for value in best_values)])
        writer.writerow(["step", *best_steps])


def check_outputs(args):
    """Refuse a --csv or --plot that cannot be written, before anything is evaluated."""
    for path in (args.csv, args.plot):
        if path and (os.path.isdir(path) or not Path(path).parent.is_dir()):
            raise UserError(
                f"{path} cannot be written: name a file in a folder that exists."
            )
    if args.plot and not importlib.util.find_spec("matplotlib"):
        raise UserError("--plot needs matplotlib: pip install '.[plot]'.")


# The labels of the y axes, and the kinds of metrics in metrics.jsonl as the legend names them.
Y_LABELS = {
    "loss": "loss (nats per token)",
    "accuracy": "accuracy (%)",
    "learning_rate": "learning rate",
}
LEGEND = {
    "train": "training",
    "training_eval": "held-out, teacher-forced",
    "inference_eval": "held-out, predictions",
}


def write_plot(path, folders):
    """Draw the losses, the accuracies and the learning rate of a run over its steps.

    Training curves are solid. Held-out curves are dashed and named after their task.
    folders: the folders whose metrics.jsonl are read. The first one is the run directory.
    """
    import matplotlib  # an optional library

    matplotlib.use("Agg")  # draw to a file, without a window
    from matplotlib import pyplot

    table = read_metrics(folders, "")
    names = sorted({name for values in table.values() for name in values})
    figure, axes = pyplot.subplots(len(Y_LABELS), 1, figsize=(8, 9), sharex=True)
    for axis, (metric, y_label) in zip(axes, Y_LABELS.items()):
        axis.set_ylabel(y_label)
        for name in names:
            # A name is KIND/TASK/METRIC, or KIND/METRIC for metrics of the training batches.
            kind, *task, name_of_metric = name.split("/")
            if name_of_metric != metric:
                continue
            points = {step: table[step][name] for step in table if name in table[step]}
            # Only the metrics on predictions are in percent already.
            if metric == "accuracy" and kind != "inference_eval":
                points = {step: 100 * value for step, value in points.items()}
            style = "-" if kind == "train" else ".--"  # dashed, with a dot for each step
            label = ": ".join([LEGEND.get(kind, kind), *task])
            axis.plot(list(points), list(points.values()), style, label=label)
            axis.legend(fontsize="small")
    axes[0].set_yscale("log")
    axes[0].yaxis.set_minor_formatter("{x:g}")
    axes[-1].set_xlabel("training step")
    axes[0].set_title(
        f"{folders[0]} (solid: training batches, dashed: held-out examples)"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=120)


# ---- the command ---------------------------------------------------------------------------------

# The fields of the section `decode` that change the generated texts.
DECODE_FIELDS = "beams alpha penalty max_len temperature top_k top_p".split()


def recorded_name(name, mode, args, changed):
    """Return the name under which the metrics of a task are recorded.

    The name says the mode, settings of --decode that differ from those of the run, and a --split
    other than validation. So metrics that were computed differently get different columns.
    changed: {"section.field": (value, value in the run)} from configs.differences.
    """
    if mode == "rank":
        name += "-rank"
        if args.normalize:
            name += "-normalized"
    if mode == "predict":
        for field in DECODE_FIELDS:
            if f"decode.{field}" in changed:
                name += f"-{field}={changed[f'decode.{field}'][0]}"
    if args.split != "validation":
        name += f"-{args.split}"
    return name


def main(argv):
    """Run the command line: evaluate checkpoints, record the metrics, write a table and a plot."""
    args, changes = configs.parse_args(
        __doc__,
        argv,
        tasks=dict(
            help="tasks or mixtures to evaluate, separated by commas (default: the run's)"
        ),
        split=dict(default="validation", help="split of the data (default: validation)"),
        mode=dict(
            choices=("predict", "rank", "loss"),
            help="what to compute (default: predict for tasks with metrics, otherwise loss)",
        ),
        step=dict(
            default="latest",
            help="checkpoint to evaluate: a step, latest, best or all (default: latest)",
        ),
        output=dict(
            metavar="DIR", help="folder for metrics and predictions (default: RUN/eval)"
        ),
        normalize=dict(
            action="store_true",
            help="with --mode rank, divide each score by the length of its answer choice",
        ),
        csv=dict(
            metavar="FILE",
            help="write a table of the metrics on predictions at all steps to this file",
        ),
        plot=dict(
            metavar="FILE",
            help="draw losses, accuracies and the learning rate over the steps to this file",
        ),
    )
    check_outputs(args)
    if args.tasks:
        changes["data.eval_tasks"] = args.tasks
    all_steps = args.step == "all"
    if all_steps:
        args.step = "latest"
    cfg, mesh, tokenizer = infer.open_model(args, changes, recipe=True)
    if tokenizer is None:
        raise UserError(f"{args.run_dir} has no vocabulary: put its spiece.model there.")
    folder = configs.to_path(args.output or os.path.join(args.run_dir, "eval"))
    tasks = data.evaluation_configs(cfg, args.split)
    if args.mode in (None, "predict"):
        check_metrics(tasks)
    changed = configs.differences(cfg, configs.load_run(args.run_dir))
    evaluations = {
        "loss": split_loss,
        "predict": predict,
        "rank": functools.partial(rank, normalize=args.normalize),
    }
    steps = [args.step]
    if all_steps:
        # All processes must evaluate the same steps, so they take those of the main process.
        steps = partition.from_main_process(partition.Checkpoints(args.run_dir).steps())
    evaluated = False
    for wanted in steps:
        try:
            step, params = infer.load_params(cfg, args.run_dir, wanted)
        except UserError as error:
            if not all_steps:
                raise
            # The checkpoint is damaged, or was deleted while others were evaluated.
            note(f"Step {wanted:,} is skipped. {error}")
            continue
        evaluated = True
        for name, task_cfg in tasks.items():
            mode = args.mode
            if mode is None:
                mode = "predict" if data.find_task(name, task_cfg).metrics else "loss"
            evaluation = evaluations[mode]
            metrics, lines = evaluation(params, task_cfg, mesh, args.split, tokenizer)
            title = f"{args.run_dir}, step {step:,}, {name}, {args.split}, {mode}"
            # Rank classification writes a line for each answer choice of an example.
            examples = {line["idx"][0] for line in lines} if mode == "rank" else lines
            print(f"{title}: {len(examples):,} examples" if lines else title)
            for metric, value in metrics.items():
                print(f"  {metric:22} {value:.4f}")
            name = recorded_name(name, mode, args, changed)
            write_lines(folder, name, step, lines)
            kind = "training_eval" if mode == "loss" else "inference_eval"
            values = {
                f"{kind}/{name}/{metric}": value for metric, value in metrics.items()
            }
            if partition.is_main_process():
                configs.append_file(
                    folder / "metrics.jsonl", json.dumps({"step": step, **values}) + "\n"
                )
    if not evaluated:
        raise UserError(
            f"{args.run_dir} has no complete checkpoint: train.py writes checkpoints."
        )
    if args.csv and partition.is_main_process():
        write_csv(args.csv, read_metrics([args.run_dir, folder], "inference_eval/"))
    if args.plot and partition.is_main_process():
        write_plot(args.plot, [args.run_dir, folder])


if __name__ == "__main__":
    configs.run_command(main)
