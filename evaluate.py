"""Evaluate a trained model: held-out loss, metrics on text, and rank classification.

The command loads checkpoints from a run directory, and evaluates them on held-out
examples. It prints the metrics and appends them to RUN/eval/metrics.jsonl. RUN/eval also
gets a JSONL file with the predictions for each task and step. There are three modes:

- --mode loss computes the teacher-forced loss, in nats per target token. The model
  predicts each target token from the inputs and the true previous tokens.
- --mode predict generates a text for each example. The metrics of the task compare this
  text with the target, as in the t5 library.
- --mode rank is for examples with answer choices, such as "yes" and "no". The choice
  that the model finds most likely is its answer. T0 is evaluated in this way.

Without --mode, a task that has metrics uses predict, and any other task uses loss.

    python evaluate.py --run_dir runs/tiny                    evaluate the last checkpoint
    python evaluate.py --run_dir runs/tiny --plot curves.png  draw training curves as well
    python evaluate.py --run_dir RUN --tasks glue_rte_v002 --step all --csv table.csv
    python evaluate.py --run_dir RUN --tasks super_glue_copa_v102 --mode rank

If a run spans several machines, run the same command on each machine.

Example:
    Two examples have two answer choices each. The model prefers the correct choice of
    the first example and the wrong choice of the second example. Each example counts with
    the weight 1.0, and each choice has 2 tokens.

    >>> from evaluate import rank_classification
    >>> choices = [  # ((example, choice), is_correct, weight, length in tokens)
    ...     ((0, 0), True, 1.0, 2), ((0, 1), False, 1.0, 2),
    ...     ((1, 0), True, 1.0, 2), ((1, 1), False, 1.0, 2)]
    >>> rank_classification(choices, scores=[-1.5, -4.0, -3.0, -2.0])
    {'accuracy': 50.0}

`pytest -k lesson_evaluate` runs the lessons about this file, which are in test_all.py.
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
import time

# Import configs before JAX and other large libraries. After this import, Ctrl-C ends the
# command without a traceback, and Python reads text as UTF-8.
import configs

import jax
import jax.numpy as jnp
import numpy as np

import data
import infer
import model
import partition
from configs import UserError, note

# METRICS maps the name of each metric to a function of targets and predictions. For
# example, METRICS["accuracy"]([1, 0], [1, 1]) returns {"accuracy": 50.0}. The lower part
# of this file adds the metrics of T5, and a user's recipe file may add more.
METRICS = configs.METRICS
# POSTPROCESSORS maps the name of each postprocessor to its function. A postprocessor
# converts a target or an output of the model from text to the value that the metrics
# compare. For example, the postprocessor "number" converts the text "4.5" to 4.5.
POSTPROCESSORS = {}

# A dict from the name of each loss to its function, for --train.loss. Each function has
# the arguments and the results of model.loss_fn. A recipe file may add more.
LOSSES = configs.LOSSES
LOSSES["cross_entropy"] = model.loss_fn

# ---- teacher-forced loss ---------------------------------------------------------------


def token_bytes(tokenizer):
    """Return an array with the number of UTF-8 bytes of text for each token id.

    In a byte vocabulary, each token stands for 1 byte. In a SentencePiece vocabulary, the
    token "▁the" stands for the 4 bytes of " the". Padding, EOS, sentinels and the unknown
    token count as 0 bytes. The result is an int32 array of shape [number of ids].
    """
    counts = np.zeros(tokenizer.size, np.int32)
    for i in range(data.UNK + 1, tokenizer.size):
        piece = tokenizer.raw_text([i])
        # A SentencePiece vocabulary may have the tokens <0x00> to <0xFF>, which stand for
        # 1 byte each. In a byte vocabulary, the text of a token may be empty, because a
        # single byte of "é" is not a valid text. `max` counts an empty text as 1 byte.
        is_byte = re.fullmatch("<0x[0-9A-F]{2}>", piece)
        counts[i] = 1 if is_byte else max(1, len(piece.encode()))
    sentinels = tokenizer.sentinel_ids
    counts[sentinels.start : sentinels.stop] = 0
    return counts


@functools.partial(jax.jit, static_argnums=(2, 3))
def loss_sums(params, batch, cfg, tokenizer):
    """Sum the losses of a batch over all target tokens, and over content tokens alone.

    Content tokens are all target tokens except EOS and sentinels, which carry no text.
    The loss over content tokens therefore measures how well the model predicts the text
    itself. train.py computes the loss of a unigram model over the same tokens, so the two
    losses can be compared.

    The UTF-8 bytes of the content tokens are counted too. The bytes of an unknown token
    are not known, so an unknown token counts as 0 bytes, and its loss counts in full.

    If --train.loss names another loss than the cross entropy, the result is only the dict
    of sums that the function of this loss returns.

    params: the parameters of the model.
    batch: a data.Batch.
    tokenizer: the Tokenizer of the run, which says which ids are sentinels.
    Returns a dict from the name of each sum to a float32 scalar.
    """
    loss = LOSSES[cfg.train.loss]
    if loss is not model.loss_fn:
        return loss(params, batch, cfg)[1]
    losses = model.token_losses(params, batch, cfg)
    cross_entropy = losses[0]
    is_content = data.is_content(batch.targets, tokenizer)
    sharding = model.sharding_of(batch.targets)
    counts = jnp.array(token_bytes(tokenizer))
    counts = counts.at[batch.targets].get(out_sharding=sharding)
    return {
        **model.sum_over_tokens(losses, batch),
        "content_loss": jnp.sum(cross_entropy * is_content),
        "content_tokens": jnp.sum(is_content),
        "content_bytes": jnp.sum(counts * is_content),
    }


def evaluate_loss(params, cfg, mesh, dataset, batches):
    """Return the mean loss and accuracy over the first batches of a held-out dataset.

    The losses are in nats per token, and the accuracy is between 0 and 1. The metric
    bits_per_byte is the cross entropy of the target text in bits, divided by the number
    of UTF-8 bytes of this text. Even models with different vocabularies can be compared
    by bits_per_byte. EOS and sentinels do not belong to the text.

    dataset: a held-out data.Dataset, in which each example occurs once.
    batches: the number of batches.

    Returns a dict from the name of each metric to its value.
    """
    batch_size = cfg.train.batch_size
    tokenizer = dataset.tasks[0].tokenizer
    # Each process prepares only those rows of a batch that its own devices hold.
    rows = partition.local_rows(batch_size, mesh)
    # Counter.update adds the new numbers to the old ones. So `totals` holds the sums over
    # all batches.
    totals = collections.Counter()
    for i in range(batches):
        batch = partition.put_batch(dataset.batch(i, rows), batch_size, mesh)
        totals.update(loss_sums(params, batch, cfg, tokenizer))
    # Divide the sums only once, after the last batch. Every token then has the same
    # weight in the mean, even if some batches have fewer tokens than others.
    metrics = model.mean_metrics(totals)
    if "content_loss" in totals:
        nats = totals["content_loss"]
        metrics["content_loss"] = nats / max(totals["content_tokens"], 1)
        # Convert nats to bits. One nat is 1 / log(2) = 1.44 bits.
        bits = nats / math.log(2)
        metrics["bits_per_byte"] = bits / max(totals["content_bytes"], 1)
    return {name: float(value) for name, value in jax.device_get(metrics).items()}


# ---- metrics on decoded text -----------------------------------------------------------


def read_examples(cfg, tokenizer, split, expand=None, most=None):
    """Read the examples of a split, and return a list of pairs (dict, infer.Example).

    The dict has the texts of an example in the fields "inputs" and "targets". The
    infer.Example has the token ids of these texts. An invalid example stops the
    evaluation, or is skipped if --data.on_error is skip.

    cfg: a Config whose data.task is the task.
    expand: None, or a function for rank classification. expand(number, example) returns
        the answer choices of an example as a list of dicts, which replace the example.
    most: the maximum number of examples, or None to read all examples.
    """
    task_name = cfg.data.task
    task = data.find_task(task_name, cfg)
    if len(task.objective.features) < 2:
        raise UserError(
            f"The examples of the task {task_name} are not pairs of inputs and targets: "
            f"evaluate the task with --mode loss."
        )
    report_invalid = data.InvalidExamples(cfg.data.on_error)
    encode = infer.ExampleEncoder(cfg, tokenizer, expand is not None, task)
    examples = data.read_task(task_name, split, cfg, report_invalid, tokenizer.size)
    pairs = []
    # `where` is the place of an example, which error messages name. For example,
    # "a.jsonl:3" is line 3 of the file a.jsonl.
    for number, (where, example) in enumerate(itertools.islice(examples, most)):
        try:
            dicts = expand(number, example) if expand else [example]
            pairs += [(fields, encode(fields, number)) for fields in dicts]
        except ValueError as error:
            report_invalid(where, str(error))
    if not pairs:
        raise UserError(
            f"The task {task_name} has no valid examples in the split {split}: choose "
            f"another split with --split, or other tasks with --tasks."
        )
    if report_invalid.count or encode.cut:
        note(
            f"{task_name}, split {split}: {report_invalid.count:,} invalid examples were "
            f"skipped, and {encode.cut:,} texts were truncated to the maximum length "
            f"(--data.inputs_length or --data.targets_length)."
        )
    return pairs


def postprocess(task, text, example, is_target):
    """Convert a text to the value that the metrics of a task compare.

    For example, the postprocessor "label" converts a text to its index in the list of the
    task's answer choices. If the choices are "no" and "yes", the text "yes" becomes 1. If
    a task has no postprocessor, its metrics compare the texts themselves.

    task: a Task. task.postprocess is a function, a name in POSTPROCESSORS, or empty.
    is_target: True if the text is a target, and False if the text is a prediction.
    """
    postprocessor = task.postprocess
    if not postprocessor:
        return text
    if callable(postprocessor):
        return postprocessor(text, example=example, is_target=is_target)
    return POSTPROCESSORS[postprocessor](task, text, example, is_target)


def predict(params, cfg, mesh, split, tokenizer, most=None):
    """Generate a text for each example of a split, and compute the metrics of the task.

    The function returns a pair (metrics, lines). `metrics` is a dict such as
    {"accuracy": 50.0}. Each element of the list `lines` is the dict of an example with
    more fields. "output" is the generated text. "prediction" and "target" are the values
    that the metrics compare. If there are several outputs, "predictions" is the list of
    the values of all outputs.

    most: the maximum number of examples, or None to use all examples.
    """
    task = data.find_task(cfg.data.task, cfg)
    pairs = read_examples(cfg, tokenizer, split, most=most)
    trie = infer.read_choices(cfg, tokenizer, task)
    encoded = [example for _, example in pairs]
    results = infer.run_examples(params, cfg, mesh, encoded, "predict", trie)
    lines = []
    for (example, _), (answers, _) in zip(pairs, results):
        target = example["targets"]
        if not isinstance(target, str):  # This target is a list of token ids.
            target = tokenizer.decode(target)
        outputs = list(map(tokenizer.decode, answers))
        lines.append(result_line(cfg.data.task, task, example, target, *outputs))
    return compute_metrics(cfg.data.task, task, lines), lines


def result_line(name, task, example, target, output, *more):
    """Add the fields target, output and prediction to the dict of an example.

    The field output holds the text that the model has generated. The fields target and
    prediction hold the values that the metrics compare. If the model has generated
    several texts, the field predictions holds the values of all these texts, beginning
    with the value of `output`. The function returns a new dict.

    If the postprocessor fails, the UserError names the task and the postprocessor.
    configs.naming_task creates this error.

    name: the name of the task, for error messages.
    target: the text of the target.
    output: the text that the model has generated, with the best score.
    more: further texts that the model has generated, from the best to the worst.
    """
    with configs.naming_task(name, "postprocessor", task.postprocess):
        line = {
            **example,
            "target": postprocess(task, target, example, True),
            "output": output,
            "prediction": postprocess(task, output, example, False),
        }
        if more:
            others = [postprocess(task, text, example, False) for text in more]
            line["predictions"] = [line["prediction"], *others]
        return line


def compute_metrics(name, task, lines):
    """Compute the metrics of a task, and return a dict such as {"accuracy": 50.0}.

    If the definition of the task names no metrics, the accuracy is computed.

    name: the name of the task, for error messages.
    lines: a list with the dict that result_line returns for each example.
    """
    targets = [line["target"] for line in lines]
    metrics = {}
    for metric in task.metrics or ("accuracy",):
        # A task defines a metric by a name in METRICS, or directly as a function. `get`
        # returns the function in both cases.
        function = METRICS.get(metric, metric)
        # Most metrics compare the target of an example with the best output of the model.
        # A metric with the decorator `ranking` compares the target with all outputs.
        predictions = [line["prediction"] for line in lines]
        if hasattr(function, "is_ranking"):
            predictions = [
                line.get("predictions", [line["prediction"]]) for line in lines
            ]
        with configs.naming_task(name, "metric", metric):
            results = function(targets, predictions)
            if not isinstance(results, dict):
                raise TypeError(
                    'a metric must return a dict of numbers, such as {"accuracy": 50.0}'
                )
            for key, value in results.items():
                if key in metrics:
                    raise ValueError(
                        f"two metrics return the name {key}: rename {key} in one of the "
                        f"two metrics"
                    )
                metrics[key] = float(value)
    return metrics


# ---- rank classification ---------------------------------------------------------------
# The examples of many tasks have a few answer choices, for instance "yes" and "no".
# Rank classification does not generate text. The model scores every choice by its
# log-probability: the sum of log p(token | inputs, previous tokens) over the tokens of
# the choice. The choice with the highest score is the model's answer. T0 is evaluated
# in this way (Sanh et al. 2022).


def answer_choices(task, number, example):
    """Return the answer choices of an example as a list with one dict for each choice.

    Each dict is a copy of the example, with one choice such as "yes" as its "targets".
    The choices come from the field answer_choices of the example. An example without this
    field has the choices of its task, which are in task.choices.

    Each dict has three more fields. "idx" is the pair (number of the example, number of
    the choice). "is_correct" tells whether the choice is correct. "weight" is the weight
    of the example in the metrics.

    In some tasks of P3, the training data of T0, each example is already one answer
    choice. Such an example has the fields idx and is_correct, and may have a weight. If
    the idx or the weight is invalid, ValueError is raised.
    """
    if "is_correct" in example and "idx" in example:
        try:
            example_number, choice_number = map(int, example["idx"])
            weight = float(example.get("weight", 1))
        except (TypeError, ValueError):
            raise ValueError(
                "has an invalid field idx or weight. The field idx must contain two "
                "integers, such as [3, 0], and the field weight must contain a number"
            ) from None
        choice = {"idx": (example_number, choice_number), "weight": weight}
        return [{**example, **choice, "is_correct": bool(example["is_correct"])}]
    texts = example.get("answer_choices", task.choices)
    if not isinstance(texts, list | tuple | np.ndarray) or not len(texts):
        raise UserError(
            "--mode rank needs answer choices: define `choices` in the task, or add the "
            "field answer_choices to each example."
        )
    target = str(example["targets"]).strip()
    choices = []
    for i, text in enumerate(texts):
        choice = {"targets": text, "idx": (number, i), "is_correct": text == target}
        choices.append({**example, **choice, "weight": 1.0})
    return choices


def percent(values):
    """Return the mean of a list of numbers in percent. For example, [0, 1] gives 50.0.

    `values` may also be a single number. For example, 0.5 gives 50.0.
    """
    return 100 * float(np.mean(values))


def rank_classification(targets, scores, num_classes=None, normalize=False):
    """Compute how often the model gives the highest score to the correct answer choice.

    In each example, the choice with the highest score is the model's answer. The accuracy
    is the percentage of examples in which this answer is correct.

    targets: a tuple (index, is_correct, weight, length in tokens) for each answer choice,
        in any order. The index is the pair (number of the example, number of the choice).
    scores: the log-probability of each choice.
    num_classes: the number of choices if all examples have the same choices, else None.
    normalize: whether to divide each score by the length of its choice.

    Returns a dict such as {"accuracy": 50.0}. With num_classes, the dict also has the
    metrics of fixed_choice_metrics. If an index occurs twice, ValueError is raised.

    Source: rank_classification in t5/evaluation/metrics.py.
    """
    indices, correct, weights, lengths = map(np.array, zip(*targets))
    if len(np.unique(indices, axis=0)) < len(indices):
        raise ValueError(
            "Two answer choices have the same index (number of the example, number of "
            "the choice): give each choice its own index."
        )
    scores = np.float32(np.divide(scores, lengths) if normalize else scores)
    # For each example, make a list of the positions of its choices in `targets`. The list
    # [4, 5] means that targets[4] and targets[5] are the choices of one example.
    groups = collections.defaultdict(list)
    for position in np.lexsort(indices.T[::-1]):
        groups[indices[position][0]].append(position)
    groups = list(groups.values())
    # The answer to each example is the choice with the highest score. If several choices
    # have this score, argmax takes the first of them.
    answers = [group[np.argmax(scores[group])] for group in groups]
    # The choices of an example can have different weights, but an example needs a single
    # weight. As in t5, this is the weight of the first choice if num_classes is given.
    # Otherwise, this is the weight of the choice that is the model's answer.
    weights = weights[[group[0] for group in groups] if num_classes else answers]
    metrics = {"accuracy": percent(np.average(correct[answers], weights=weights))}
    if num_classes:
        metrics |= fixed_choice_metrics(scores[groups], correct[groups], weights)
    return metrics


def fixed_choice_metrics(scores, correct, weights):
    """Compute metrics that are defined only if all examples have the same answer choices.

    Each choice is then a class, as in ordinary classification. For two choices, the
    metrics are the F1 score and the areas under the ROC curve and the precision-recall
    curve. The second of the two choices is the positive class. For more choices, the
    metric is the mean F1 score of all choices. If an example has several correct choices,
    no metric is computed.

    scores, correct: arrays of shape [examples, choices].
    weights: an array of shape [examples].

    Returns a dict from the name of each metric to a number between 0 and 100.
    """
    # Import scikit-learn only in this function, because scikit-learn is optional.
    from scipy import special
    from sklearn import metrics

    count = scores.shape[1]
    if count < 2 or (correct.sum(axis=1) > 1).any():
        return {}
    # chosen[i, j] is True if choice j has the highest score in example i.
    chosen = scores.argmax(axis=1)[:, None] == np.arange(count)
    options = {"sample_weight": weights, "zero_division": 0}
    if count > 2:
        f1 = metrics.f1_score(correct, chosen, average="macro", **options)
        return {f"mean_{count}class_f1": percent(f1)}
    probability = special.softmax(scores, axis=1)[:, 1]  # of the second choice
    correct = correct[:, 1]
    f1 = metrics.f1_score(correct, chosen[:, 1], **options)
    roc = metrics.roc_auc_score(correct, probability, sample_weight=weights)
    pr = metrics.average_precision_score(correct, probability, sample_weight=weights)
    return {"f1": percent(f1), "auc-roc": percent(roc), "auc-pr": percent(pr)}


def rank(params, cfg, mesh, split, tokenizer, normalize=False):
    """Score the answer choices of each example, and compute the accuracy of the answers.

    The score of a choice is the log-probability that the model gives to the choice. The
    choice with the highest score is the model's answer to the example. The accuracy is
    the percentage of correct answers.

    normalize: whether to divide each score by the number of tokens of its choice.

    Returns a pair (metrics, lines). `metrics` is the dict that rank_classification
    returns. A line is the dict of an answer choice, with its score in the field "score".
    """
    task = data.find_task(cfg.data.task, cfg)
    expand = functools.partial(answer_choices, task)
    choices, encoded = zip(*read_examples(cfg, tokenizer, split, expand))
    if len({choice["idx"] for choice in choices}) < len(choices):
        raise UserError(
            f"In the split {split} of the task {cfg.data.task}, two answer choices have "
            f"the same value in the field idx: give each choice its own idx."
        )
    scores = list(infer.run_examples(params, cfg, mesh, encoded, "score"))
    rows = [
        (choice["idx"], choice["is_correct"], choice["weight"], len(example.targets))
        for choice, example in zip(choices, encoded)
    ]
    lines = [{**choice, "score": score} for choice, score in zip(choices, scores)]
    # If all examples have the same answer choices, num_classes is the number of these
    # choices. Otherwise, num_classes is None. The dataset P3 stores each answer choice as
    # an example, without a list of choices, and task.choices is empty. Then num_classes
    # is 0, which rank_classification treats like None.
    texts = {tuple(choice.get("answer_choices", task.choices)) for choice in choices}
    num_classes = len(texts.pop()) if len(texts) == 1 else None
    if num_classes and not importlib.util.find_spec("sklearn"):
        note(
            "Only the accuracy is computed. The F1 score and the areas under the ROC and "
            "precision-recall curves need scikit-learn: pip install '.[metrics]'."
        )
        num_classes = None
    return rank_classification(rows, scores, num_classes, normalize), lines


# ====== below: metrics, postprocessors, tables and plots, the command ===================
# The metrics are those of t5/evaluation/metrics.py. Each metric takes two lists of equal
# length, the postprocessed targets and predictions. Each metric returns a dict such as
# {"accuracy": 50.0}, with numbers between 0 and 100.


def accuracy(targets, predictions):
    """Return the percentage of predictions that equal their targets.

    If a target is a list and its prediction is a text, for example, the two can never be
    equal. In such a case, TypeError is raised.
    """

    def kind(value):
        return sorted(value) if isinstance(value, dict) else isinstance(value, list)

    if list(map(kind, targets)) != list(map(kind, predictions)):
        raise TypeError(
            "accuracy needs targets of the same kind as the predictions, such as texts: "
            "use a postprocessor that returns the same kind of value for targets and "
            "predictions"
        )
    return {"accuracy": percent([t == p for t, p in zip(targets, predictions)])}


def bleu(targets, predictions):
    """Return the BLEU score of all predictions together, computed by sacrebleu.

    The options of sacrebleu are the same as in the t5 library. `targets` is a list with
    one correct text (reference) for each prediction. If each prediction has several
    references, `targets` is a list of several such lists, as in t5. ValueError is raised
    unless each list has one text for each prediction. For example, a list with all
    references of one example is not valid.
    """
    import sacrebleu  # an optional library

    references = targets if isinstance(targets[0], list) else [targets]
    if any(len(texts) != len(predictions) for texts in references):
        raise ValueError(
            f"the metric bleu needs a list of {len(predictions)} target texts, one text "
            f"for each prediction, or several lists of this length: correct the targets "
            f"of the task"
        )
    score = sacrebleu.corpus_bleu(
        predictions, references, smooth_method="exp", smooth_value=0.0, tokenize="intl"
    )
    return {"bleu": score.score}


def rouge(targets, predictions):
    """Return the mean F1 scores of ROUGE-1, ROUGE-2 and ROUGE-Lsum, in percent.

    The library rouge-score computes the scores, without stemming of words. The scores can
    differ slightly from those of the t5 library, which takes the median of random
    bootstrap samples.
    """
    from rouge_score import rouge_scorer  # an optional library

    names = "rouge1", "rouge2", "rougeLsum"
    scorer = rouge_scorer.RougeScorer(names)
    # ROUGE-Lsum compares texts sentence by sentence, and expects each sentence on its own
    # line. So begin a new line after each period that has a space on both sides.
    targets = [text.replace(" . ", " .\n") for text in targets]
    predictions = [text.replace(" . ", " .\n") for text in predictions]
    scores = list(map(scorer.score, targets, predictions))
    return {name: percent([score[name].fmeasure for score in scores]) for name in names}


def f1(targets, predictions):
    """Return the F1 score of class 1, in percent. Each target is 0 or 1.

    An invalid prediction, such as -1, counts as the class that is not the target.
    """
    from sklearn import metrics

    targets, predictions = np.array(targets), np.array(predictions)
    is_valid = np.isin(predictions, (0, 1))
    predictions = np.where(is_valid, predictions, 1 - targets)
    return {"f1": percent(metrics.f1_score(targets, predictions, zero_division=0))}


def mean_3class_f1(targets, predictions):
    """Return the mean of the F1 scores of the classes 0, 1 and 2.

    The prediction -1 means that an output is not a class. Such a prediction lowers only
    the F1 score of the correct class. If a target is not 0, 1, 2 or -1, TypeError is
    raised.
    """
    from sklearn import metrics

    if not set(targets) <= {-1, 0, 1, 2}:
        raise TypeError(
            "the metric mean_3class_f1 needs targets that are 0, 1 or 2: use the "
            'postprocessor "label" in a task with three choices'
        )
    score = metrics.f1_score(
        targets, predictions, labels=range(3), average="macro", zero_division=0
    )
    return {"mean_3class_f1": percent(score)}


def matthews_corrcoef(targets, predictions):
    """Return the Matthews correlation coefficient of targets and predictions, in percent.

    The prediction -1 means that an output is not a class. This prediction counts as one
    more class.
    """
    from sklearn import metrics

    return {"matthews_corrcoef": percent(metrics.matthews_corrcoef(targets, predictions))}


def correlation(name, targets, predictions):
    """Return the Pearson or Spearman correlation of two lists of numbers, in percent.

    If all targets are equal, or all predictions are equal, the correlation is not
    defined, and the result is nan.

    name: "pearson" or "spearman".
    """
    # Import scipy only where it is needed, because the import takes half a second.
    from scipy import stats

    key = f"{name}_corrcoef"
    targets, predictions = np.float64(targets), np.float64(predictions)
    if min(len(set(targets)), len(set(predictions))) < 2:
        return {key: math.nan}
    function = getattr(stats, f"{name}r")  # stats.pearsonr or stats.spearmanr
    return {key: percent(function(targets, predictions)[0])}


def normalize_answer(text):
    """Simplify the text of an answer before it is compared, as the metrics of SQuAD do.

    For example, "The  Cat!" becomes "cat". The result has no upper case, no punctuation,
    no articles and no repeated spaces.
    """
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def word_f1(target, prediction):
    """Return the F1 score of the words in a prediction, as a number between 0 and 1.

    F1 is the harmonic mean of precision and recall. For example, the target "a red car"
    and the prediction "red car" give 0.8. The order of words does not matter.
    """
    target, prediction = target.split(), prediction.split()
    common = collections.Counter(target) & collections.Counter(prediction)
    return 2 * common.total() / max(len(target) + len(prediction), 1)


def squad(targets, predictions):
    """Return the percentage of exact matches and the mean word F1, as SQuAD does.

    A target is the list of all correct answers to a question. A prediction is compared
    with each of these answers, and the best result counts. If a target is a text,
    TypeError is raised, because Python would read the text as a list of characters.
    """
    if any(isinstance(answers, str) for answers in targets):
        raise TypeError(
            "the metric squad needs a list of correct answers as target, but got a text: "
            'use the postprocessor "answers", or another function that returns a list'
        )
    exact, f1s = [], []
    for answers, prediction in zip(targets, predictions):
        answers = [normalize_answer(answer) for answer in answers]
        prediction = normalize_answer(prediction)
        exact.append(prediction in answers)
        f1s.append(max(word_f1(answer, prediction) for answer in answers))
    return {"em": percent(exact), "f1": percent(f1s)}


def record(targets, predictions):
    """Return the percentage of exact matches and the mean word F1 for the dataset ReCoRD.

    ReCoRD contains one copy of a query for each correct answer to the query. Each query
    must count once, so only its first copy is used. The function `squad` computes the
    metrics.
    """
    queries = {}  # {query: (correct answers, prediction)}
    for target, prediction in zip(targets, predictions):
        queries.setdefault(target["group"], (target["value"], prediction["value"]))
    return squad(*zip(*queries.values()))


def multirc_f1(targets, predictions):
    """Return the F1 score of the label 1 (true) for the dataset MultiRC.

    MultiRC has several candidate answers for each question, and each of them is labeled
    true or false. The F1 is computed over the candidate answers to all questions
    together.
    """
    return f1([t["value"] for t in targets], [p["value"] for p in predictions])


def exact_match(targets, predictions):
    """Return the percentage of MultiRC questions for which the model makes no mistake.

    MultiRC has several candidate answers for each question. The model must label every
    one of them correctly as true or false.
    """
    questions = collections.defaultdict(list)
    for target, prediction in zip(targets, predictions):
        questions[target["group"]].append(target["value"] == prediction["value"])
    return {"exact_match": percent([all(matches) for matches in questions.values()])}


def ranking(function):
    """Mark a metric that compares each target with the list of all generated outputs.

    The outputs in the list are ordered from best to worst. A metric without this
    decorator gets only the best output. The metric `recall` has this decorator.
    """
    function.is_ranking = True
    return function


@ranking
def recall(targets, predictions):
    """Return recall@k and the hit rate@k for k = 1, 5, 10, 50 and 100, in percent.

    Recall@k is the share of the relevant items that are among the first k predictions.
    The hit rate@k is the share of the examples with a relevant item among the first k
    predictions. A k that exceeds the number of predictions (--decode.num_return) is left
    out.

    targets: for each example, a list of relevant items, or a single item.
    predictions: for each example, a list of items, ordered from best to worst.
    """
    longest = max(map(len, predictions))
    relevant = [x if isinstance(x, list) else [x] for x in targets]
    metrics = {}
    for k in (1, 5, 10, 50, 100):
        if k <= longest:
            shares = [
                np.mean([item in ranked[:k] for item in items])
                for items, ranked in zip(relevant, predictions)
            ]
            metrics[f"recall@{k}"] = percent(shares)
            metrics[f"hit_rate@{k}"] = percent(np.array(shares) > 0)
    return metrics


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
    "recall": recall,
}

# LIBRARIES maps each metric that needs an optional Python library to the name of this
# library.
LIBRARIES = {
    "bleu": "sacrebleu",
    "rouge": "rouge_score",
    "f1": "sklearn",
    "matthews_corrcoef": "sklearn",
    "multirc_f1": "sklearn",
    "mean_3class_f1": "sklearn",
}


def note_unknown_targets(name, task, lines):
    """Print a warning if some targets of a task are not in the list task.choices.

    A text that is not in this list gets the label -1. If a target has the label -1, every
    invalid prediction would count as correct, so the metrics would be wrong.

    lines: a list with the dict that result_line returns for each example.
    """
    if task.postprocess != "label":
        return
    count = [line["target"] for line in lines].count(-1)
    if count:
        note(
            f"warning: {count:,} of the first {len(lines):,} targets of the task {name} "
            f"are not among the choices of the task ({', '.join(task.choices)}), so the "
            f"metrics are wrong. Correct the choices of the task, or choose a --split "
            f"that has targets."
        )


# Before an evaluation, the metrics of a task are tried on this number of examples. An
# error in a metric is then found early.
TRIED_EXAMPLES = 100


def try_metrics(name, task, split, cfg):
    """Raise UserError if the metrics do not fit the targets of a task.

    For example, the metric "squad" needs lists of answers, and fails if the targets are
    texts. To find such an error before the evaluation, the metrics are computed for the
    first examples of a split. The targets then serve as predictions. Examples that
    consist of token ids are left out, because they have no texts.

    cfg: a Config whose data.task is the task.
    """
    examples = data.read_task(name, split, cfg, data.InvalidExamples("skip"))
    first = [example for _, example in itertools.islice(examples, TRIED_EXAMPLES)]
    lines = [
        result_line(name, task, example, example["targets"], example["targets"])
        for example in first
        if isinstance(example["targets"], str)
    ]
    note_unknown_targets(name, task, lines)
    if lines:
        compute_metrics(name, task, lines)


def check_metrics(tasks, split="validation"):
    """Raise UserError if a metric is unknown, lacks its library or does not fit its task.

    An unknown postprocessor also raises UserError. The check happens before the
    evaluation, because an error at the end would lose the predictions.

    tasks: a dict from the name of each task to its Config.
    split: the split of the tasks that will be evaluated.
    """
    for name, cfg in tasks.items():
        task = data.find_task(name, cfg)
        used = [("postprocessor", task.postprocess, POSTPROCESSORS)]
        used += [("metric", metric, METRICS) for metric in task.metrics]
        for kind, value, known in used:
            # A task may use any function, or a name from the dict `known`. The empty name
            # means that the task has no postprocessor.
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
        # For a task with neither metrics nor a postprocessor, the accuracy of the output
        # texts is computed. This accuracy never fails, so it need not be tried.
        used_values = task.metrics or task.postprocess
        if used_values and len(task.objective.features) > 1:
            try_metrics(name, task, split, cfg)


# ---- postprocessors --------------------------------------------------------------------
# The postprocessors are those of t5/data/postprocessors.py. Each postprocessor converts
# the text of a target or of a prediction to the value that the metrics compare.
# `is_target` is True for a target, and `example` is the dict of the example.


def label(task, text, example, is_target):
    """Return the index of a text in the list task.choices.

    If the text is not in the list, the result is -1.
    """
    return task.choices.index(text) if text in task.choices else -1


def number(task, text, example, is_target):
    """Return the text as a float, or -1 if the text is not a number."""
    try:
        return float(text)
    except ValueError:
        return -1.0


def all_answers(task, text, example, is_target):
    """Return all correct answers for a target, and the unchanged text for a prediction.

    The correct answers are the list in the field "answers" of the example. The metric
    squad compares each prediction with all of these answers.
    """
    return list(example["answers"]) if is_target else text


def multirc(task, text, example, is_target):
    """Return the label of a candidate answer of MultiRC as a dict, such as {"value": 1}.

    For a target, the dict also has the number of the question in the field "group". The
    metric exact_match uses this number to find all candidate answers to a question.
    """
    value = {"value": label(task, text, example, is_target)}
    if is_target:
        value["group"] = example["idx/question"]
    return value


def record_answers(task, text, example, is_target):
    """Return a dict for the metric `record`, which evaluates the dataset ReCoRD.

    For a prediction, the dict is {"value": text}. For a target, the field "value" is the
    list of correct answers to a query. The field "group" identifies the query, so that
    the metric can count each query once.
    """
    value = {"value": all_answers(task, text, example, is_target)}
    if is_target:
        value["group"] = example["idx/passage"], example["idx/query"]
    return value


DETERMINERS = set(
    "a an few her his each every many much my our some that the their these this those "
    "which whose your".split()
)


def content_words(text):
    """Return the set of lower-case words of a text, without determiners such as "the".

    If no word remains, the set contains only the empty text.
    """
    words = set(text.strip().lower().split(" ")) - DETERMINERS
    return words or {""}


def wsc(task, text, example, is_target):
    """Return 1 if a text names the same noun phrase as an example of WSC, else 0.

    For example, the texts "dog" and "the black dog" both name the phrase "the dog". A
    text names a phrase if all words of the text occur in the phrase, or if all words of
    the phrase occur in the text. Upper case and determiners, such as "the", are ignored.
    The result for an empty text is -1. If is_target is true, the result is the label of
    the example, 0 or 1.
    """
    if is_target:
        return example["label"]
    candidate_text = example.get("targets_pretokenized", example["targets"])
    answer, candidate = content_words(text), content_words(candidate_text)
    if not any(answer):
        return -1
    # If only one of the two texts has an apostrophe, the two texts name different things.
    # For example, "Bob's dog" does not name "the dog".
    if ("'" in text) != ("'" in candidate_text):
        return 0
    return int(answer <= candidate or candidate <= answer)


POSTPROCESSORS |= {
    "label": label,
    "number": number,
    "answers": all_answers,
    "multirc": multirc,
    "record": record_answers,
    "wsc": wsc,
}


# ---- the loss of a split, and files of predictions -------------------------------------


def split_loss(params, cfg, mesh, split, tokenizer):
    """Compute the teacher-forced loss and accuracy over all examples of a held-out split.

    In teacher forcing, the model predicts each target token from the true previous
    tokens.

    Returns a pair (metrics, []). The list is empty, because there are no predictions.
    """
    # The batches of the split train repeat the examples forever. Therefore the loss of
    # this split cannot be averaged over all examples.
    if split == "train":
        raise UserError(
            "--mode loss cannot evaluate the split train: use --mode predict, or name a "
            "held-out --split such as validation."
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
    # The perplexity is exp(loss). math.exp overflows above 709, so limit the loss of a
    # diverged model to 700.
    metrics["perplexity"] = math.exp(min(metrics["cross_ent_loss"], 700))
    return metrics, []


def write_lines(folder, name, step, lines):
    """Write the predictions for a task and a step to a JSONL file in a folder.

    For example, step 1500 of the task glue_rte_v002 gets the file
    glue_rte_v002-00001500.jsonl. Only the main process writes the file.
    """
    # Replace characters that are unsafe in file names, and shorten long names.
    name = re.sub(r"[^\w.+-]+", "-", name)[-200:]
    if lines and partition.is_main_process():
        text = "".join(infer.json_line(line) for line in lines)
        configs.write_file(folder / f"{name}-{step:08}.jsonl", text)


# ---- tables and plots ------------------------------------------------------------------

# The scores of GLUE and SuperGLUE are averages over several benchmarks. Each string below
# lists the metrics of one benchmark. The metrics of each benchmark are averaged first.
# Then the means of all benchmarks are averaged.
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


def read_metrics(folders, prefix=""):
    """Read the file metrics.jsonl of each folder, and return the metrics of each step.

    The result is a dict of dicts, sorted by step. An example with step 100 is
    {100: {"glue_rte_v002/accuracy": 50.0}}. Only metrics whose names begin with `prefix`
    are read, and the prefix is removed. A metric that is nan, such as an undefined
    correlation, is left out.
    """
    table = collections.defaultdict(dict)
    for folder in folders:
        path = configs.to_path(folder) / "metrics.jsonl"
        for line in partition.read_metrics_file(path):
            step = line.pop("step")
            for name, value in line.items():
                if name.startswith(prefix) and not math.isnan(value):
                    table[step][name.removeprefix(prefix)] = value
    return dict(sorted(table.items()))


def mean_of(values, columns):
    """Return the mean of several metrics at one step, and skip metrics without a value.

    In the table that write_csv writes, each metric is a column and each step is a row.

    values: a dict from the name of each column to its value.
    columns: a list of the names of the columns to average.
    """
    return np.mean([values[column] for column in columns if column in values])


def write_csv(path, table):
    """Write a CSV table with one column for each metric and one row for each step.

    Two rows follow at the end. The row "max" has the best value of each column. The row
    "step" has the step at which this value was reached. The table is that of parse_tb in
    t5.

    If a benchmark has several metrics, its best step is the step with the highest mean of
    these metrics. The averages of GLUE and SuperGLUE are added as columns. An average
    needs all of its metrics at the same step.

    table: the dict that read_metrics returns.
    """
    # benchmark_of maps the column of each metric to the list of all columns of the same
    # benchmark. For example, the benchmark MRPC has the columns F1 and accuracy.
    benchmark_of = {}
    for average, benchmarks in AVERAGES.items():
        benchmarks = [benchmark.split() for benchmark in benchmarks]
        for columns in benchmarks:
            benchmark_of |= dict.fromkeys(columns, columns)
        for values in table.values():
            if values.keys() >= set().union(*benchmarks):
                means = [mean_of(values, columns) for columns in benchmarks]
                values[average] = np.mean(means)
    names = sorted(set().union(*table.values()))
    best_steps, best_values = {}, {}
    for name in names:
        columns = benchmark_of.get(name, [name])
        steps = [step for step in table if name in table[step]]
        best = max(steps, key=lambda step: mean_of(table[step], columns))
        best_steps[name], best_values[name] = best, table[best][name]
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, ["step", *names])
        writer.writeheader()
        for title, values in [*table.items(), ("max", best_values)]:
            cells = {name: f"{value:.3f}" for name, value in values.items()}
            writer.writerow({"step": title, **cells})
        writer.writerow({"step": "step", **best_steps})


# The plot has one panel for each of these metrics. The value of each key is the label of
# the panel's y axis.
Y_LABELS = {
    "loss": "loss (nats per token)",
    "accuracy": "accuracy (%)",
    "learning_rate": "learning rate",
}
# The name of each metric in metrics.jsonl begins with one of these keys. For example, the
# name "train/loss" begins with "train", and the legend of the plot shows "training".
LEGEND = {
    "train": "training",
    "training_eval": "held-out, teacher-forced",
    "inference_eval": "held-out, predictions",
}


def write_plot(path, folders):
    """Draw the losses, accuracies and learning rate of a run over the training steps.

    Solid curves show training batches, and dashed curves show held-out examples.

    folders: the folders with the files metrics.jsonl. The run directory comes first.
    """
    from matplotlib import figure  # an optional library

    plot = figure.Figure(figsize=(8, 9), layout="tight")
    axes = dict(zip(Y_LABELS, plot.subplots(len(Y_LABELS), sharex=True)))
    table = read_metrics(folders)
    for name in sorted(set().union(*table.values())):
        # The name of a metric has two or three parts. "train/loss" has no task, and
        # "training_eval/span_corruption/loss" has the task span_corruption.
        kind, *task, metric = name.split("/")
        if metric not in axes:
            continue
        steps = [step for step in table if name in table[step]]
        points = np.array([table[step][name] for step in steps])
        # Convert the accuracy from a fraction to percent. The accuracy of generated
        # predictions (inference_eval) is already in percent.
        if metric == "accuracy" and kind != "inference_eval":
            points *= 100
        # The style "-" draws a solid line for training batches. The style ".--" draws a
        # dashed line with dots for held-out examples.
        style = "-" if kind == "train" else ".--"
        label = ": ".join([LEGEND[kind], *task])
        axes[metric].plot(steps, points, style, label=label)
        axes[metric].legend(fontsize="small")
    for metric, axis in axes.items():
        axis.set_ylabel(Y_LABELS[metric])
    axes["learning_rate"].set_xlabel("training step")
    axes["loss"].set_yscale("log")
    axes["loss"].yaxis.set_minor_formatter("{x:g}")
    axes["loss"].set_title(f"{folders[0]} (solid: training, dashed: held-out)")
    plot.savefig(path, dpi=120)


# ---- the command -----------------------------------------------------------------------

# recorded_name leaves out these sections and options of a Config, because they do not
# change the metrics of a task. The option data.task is left out too, because each metric
# is recorded under the name of its task anyway.
NEUTRAL = set(
    "mesh distributed train model.remat decode.batch_size decode.return_all "
    "data.eval_tasks data.on_error data.keep_tokens data.prepared_dir data.tfds_dir "
    "data.pack data.task".split()
)


def recorded_name(name, mode, args, changed):
    """Return the name under which metrics.jsonl records the metrics of a task.

    For example, glue_rte_v002 with --decode.beams 4 is recorded as glue_rte_v002-beams=4.
    Results with different options thus get different columns in a table. The name has
    each option that may change the metrics and differs from the training run. The name
    also shows --mode rank and a --split other than validation.

    changed: a dict of the fields that differ from those of the run. For example,
        {"decode.beams": (4, 0)} means 4 beams now and 0 in the run.
    """
    if mode == "rank":
        name += "-rank"
        if args.normalize:
            name += "-normalized"
    for field, (value, _) in changed.items():
        section, _, option = field.partition(".")
        used = section != "decode" or mode == "predict"
        if used and not {field, section} & NEUTRAL:
            name += f"-{option}={value}"
    if args.split != "validation":
        name += f"-{args.split}"
    return name


def main(argv):
    """Evaluate the checkpoints of a training run, and print and record the metrics.

    argv: the command-line arguments as a list of strings.
    """
    args, changes = configs.parse_args(
        __doc__,
        argv,
        tasks=dict(help="tasks or mixtures, separated by commas (default: the run's)"),
        split=dict(default="validation", help="split of the tasks (default: validation)"),
        mode=dict(
            choices=("predict", "rank", "loss"),
            help="what to compute (default: predict if a task has metrics, else loss)",
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
            help="file for a table of the metrics of predictions at all steps",
        ),
        plot=dict(
            metavar="FILE",
            help="file for a plot of losses, accuracies and the learning rate",
        ),
    )
    if args.plot and not importlib.util.find_spec("matplotlib"):
        raise UserError("--plot needs matplotlib: pip install '.[plot]'.")
    if args.tasks:
        changes["data.eval_tasks"] = args.tasks
    cfg, mesh, tokenizer = infer.open_model(args, changes, recipe=True)
    if tokenizer is None:
        raise UserError(
            f"The run directory {args.run_dir} has no vocabulary: copy the file "
            f"spiece.model of the model to this directory."
        )
    folder = configs.to_path(args.output or os.path.join(args.run_dir, "eval"))
    tasks = data.evaluation_configs(cfg, args.split)
    modes = {
        name: args.mode
        or ("predict" if data.find_task(name, task_cfg).metrics else "loss")
        for name, task_cfg in tasks.items()
    }
    predicted = {name: tasks[name] for name in tasks if modes[name] == "predict"}
    check_metrics(predicted, args.split)
    changed = configs.differences(cfg, configs.load_run(args.run_dir))
    evaluations = {
        "loss": split_loss,
        "predict": predict,
        "rank": functools.partial(rank, normalize=args.normalize),
    }
    for path in (args.csv, args.plot):
        if path:
            # Open the output file before the long evaluation. If the file cannot be
            # written, the command then fails at once, and not at the end.
            open(path, "a").close()
    all_steps = args.step == "all"
    if all_steps:
        # The main process lists the checkpoints, so that all processes use the same list.
        steps = partition.from_main_process(partition.Checkpoints(args.run_dir).steps())
    else:
        steps = [partition.resolve_step(args.run_dir, args.step)]
    evaluated = False
    for wanted in steps:
        try:
            step, params = infer.load_params(cfg, args.run_dir, wanted)
        except UserError as error:
            if not all_steps:
                raise
            # This checkpoint may be damaged, or a running train.py may have deleted it.
            # Continue with the next checkpoint, because --step all evaluates all of them.
            note(f"Step {wanted:,} is skipped. {error}")
            continue
        evaluated = True
        for name, task_cfg in tasks.items():
            mode = modes[name]
            evaluation = evaluations[mode]
            start = time.perf_counter()
            metrics, lines = evaluation(params, task_cfg, mesh, args.split, tokenizer)
            seconds = time.perf_counter() - start
            title = f"{args.run_dir}, step {step:,}, {name}, {args.split}, {mode}"
            # With --mode rank, `lines` has one element for each answer choice of an
            # example. So count the examples, and not the elements of `lines`.
            examples = {line["idx"][0] for line in lines} if mode == "rank" else lines
            count = f"{len(examples):,} examples in " if lines else ""
            print(f"{title}: {count}{seconds:.3g} s")
            for metric, value in metrics.items():
                print(f"  {metric:22} {value:.4f}")
            name = recorded_name(name, mode, args, changed)
            write_lines(folder, name, step, lines)
            kind = "training_eval" if mode == "loss" else "inference_eval"
            line = {f"{kind}/{name}/{key}": value for key, value in metrics.items()}
            if partition.is_main_process():
                text = json.dumps({"step": step, **line}) + "\n"
                configs.append_file(folder / "metrics.jsonl", text)
    if not evaluated:
        raise UserError(
            f"The run directory {args.run_dir} has no complete checkpoint: train the "
            f"model with train.py first."
        )
    if partition.is_main_process():
        # The table and the plot show metrics from two folders. train.py has written its
        # metrics to the run directory, and evaluate.py has written metrics to `folder`.
        folders = [args.run_dir, folder]
        if args.csv:
            table = read_metrics(folders, "inference_eval/")
            if not table:
                note(
                    f"{args.csv} has no metrics, because this run has no predictions "
                    f"yet: add --mode predict or --mode rank, or choose other --tasks."
                )
            write_csv(args.csv, table)
        if args.plot:
            write_plot(args.plot, folders)


if __name__ == "__main__":
    configs.run_command(main)
