"""Evaluate a model: held-out loss, metrics on generated text, rank classification.

    python evaluate.py --run_dir RUN --plot curves.png              the last checkpoint
    python evaluate.py --run_dir RUN --tasks glue_rte_v002 --step all --csv table.csv
    python evaluate.py --run_dir RUN --tasks super_glue_copa_v102 --mode rank

--mode loss computes the teacher-forced loss in nats per target token. --mode predict
generates a text for each example, and compares it with the target by the metrics of the
task, as the t5 library does. --mode rank takes the most probable of given answer choices
as the model's answer, as for T0. The metrics are appended to RUN/eval/metrics.jsonl, and
the outputs are written beside it, to files such as TASK-STEP.jsonl.
"""

import collections
import csv
import io
import itertools
import json
import math
import re
import string
import zlib
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import jax
import numpy as np

import configs
import data
import infer
import model
import partition
from configs import METRICS, Config, UserError

# ---- teacher-forced loss ---------------------------------------------------------------


@jax.jit(static_argnames="cfg")
def batch_sums(params: dict, batch: data.Batch, is_content, cfg: Config) -> tuple:
    """Sum the losses of a batch over all target tokens, and over content tokens alone."""
    x = model.encode_and_decode(params, batch, cfg.model)
    weights = model.target_weights(batch), is_content
    return tuple(model.loss_sums(params, x, batch.targets, w, cfg) for w in weights)


def evaluate_loss(params, cfg: Config, batches: list, tokenizer) -> dict:
    """Return the mean losses and token accuracy (0 to 1) over all target tokens.

    content_loss leaves out EOS and sentinels, so it can be compared with unigram_loss (if
    there is no label smoothing).
    """
    sums = []
    for batch in batches:
        is_content = tokenizer.is_content(batch.targets)
        arrays = partition.put_batch((batch, is_content))
        sums.append(batch_sums(params, *arrays, cfg))
    # Divide once, so that each token has the same weight.
    all_tokens, content = jax.tree.map(lambda *numbers: sum(numbers), *sums)
    metrics = model.mean_metrics(all_tokens)
    metrics["content_loss"] = model.mean_metrics(content)["cross_ent_loss"]
    return {name: float(value) for name, value in metrics.items()}


def unigram_loss(batches: list, tokenizer: data.Tokenizer) -> float:
    """Return the loss per content token of a model that only knows token frequencies.

    The tokens are counted in these batches themselves.
    """
    rows = jax.tree.map(lambda *arrays: np.concatenate(arrays), *batches)
    targets, inputs = (x[tokenizer.is_content(x)] for x in (rows.targets, rows.inputs))
    counts = np.bincount(np.concatenate([targets, inputs]))
    # Each target is predicted from all other tokens, with 1 added to each count: its own
    # count is (counts - 1) + 1.
    total = counts.sum() - 1 + tokenizer.size
    return float(np.mean(np.log(total / counts[targets])))


def loss_of_split(params, cfg: Config, name: str, split: str, tokenizer):
    """Compute the loss of all examples. Returns metrics, and no lines."""
    # Each device gets equally many rows.
    shards = jax.sharding.get_mesh().shape["data"]
    rows = math.ceil(cfg.train.batch_size / shards) * shards
    cfg = replace(cfg, train=replace(cfg.train, batch_size=rows))
    batches = data.batches_of_split(name, split, cfg, tokenizer)
    partition.check_same([zlib.crc32(a) for batch in batches for a in batch])
    if not batches:
        source = data.find_task(name, cfg).source
        raise UserError(f"The task {name} has no split {split} in {source}.")
    return evaluate_loss(params, cfg, batches, tokenizer), []


def held_out_example(params, cfg: Config, batch: data.Batch, tokenizer) -> str:
    """Show the first example of a batch: inputs, truth, and the output of the model."""
    inputs = batch.inputs[0][batch.input_segments[0] == 1].tolist()
    targets = batch.targets[0][batch.target_segments[0] == 1].tolist()
    ((outputs, _),) = infer.process_requests(params, cfg, [infer.Request(inputs)])
    if tokenizer.first_sentinel in inputs:
        sides = [], targets, outputs[0]  # [] leaves the gaps open
        texts = [infer.fill_blanks(inputs, ids, tokenizer) for ids in sides]
    else:
        texts = [tokenizer.decode(ids) for ids in (inputs, targets, outputs[0])]
    labels = "inputs", "truth", "model"
    return "\n".join(f"  {label:8} {text}" for label, text in zip(labels, texts))


# ---- metrics on generated text ---------------------------------------------------------


def read_pairs(name: str, split: str, cfg: Config, limit=None) -> list[dict]:
    """Return the pairs of a split: dicts with the texts inputs and targets."""
    pairs = list(itertools.islice(data.read_task(name, split, cfg), limit))
    if not pairs or "targets" not in pairs[0]:
        raise UserError(
            f"The task {name} has no split {split} with pairs of inputs and targets in "
            f"{data.find_task(name, cfg).source}: choose another --split, or --mode loss."
        )
    return pairs


def postprocess(task: data.Task, text: str, pair: dict, is_target: bool):
    """Turn a target or an output into the value that the metrics of a task compare."""
    if task.postprocess == "label":
        if is_target and text not in task.choices:
            configs.print_once(f"The target {text!r} is not a choice: metrics are wrong.")
        return task.choices.index(text) if text in task.choices else -1
    if task.postprocess == "answers":
        return all_answers(pair) if is_target else text
    if task.postprocess:
        return task.postprocess(text, example=pair, is_target=is_target)
    return text


def all_answers(pair: dict) -> list[str]:
    """Return all right answers of a question, as in SQuAD."""
    answers = pair["answers"]
    if isinstance(answers, dict):  # as on the Hugging Face Hub
        answers = answers["text"]
    if not len(answers):
        raise UserError(f"An example has no answers: {str(pair)[:200]}")
    return [answers] if isinstance(answers, str) else list(answers)


def compute_metrics(task: data.Task, pairs, targets, outputs) -> tuple[dict, list]:
    """Return the metrics, such as {"accuracy": 50.0}, and a line for each pair.

    A line is the pair with the fields output, target and prediction. The metrics of a
    task are functions, or names in METRICS; if it has none, accuracy counts.
    """
    targets = [postprocess(task, *x, is_target=True) for x in zip(targets, pairs)]
    predictions = [postprocess(task, *x, is_target=False) for x in zip(outputs, pairs)]
    metrics = {}
    for name in task.metrics or ("accuracy",):
        function = name if callable(name) else METRICS[name]
        values = function(targets, predictions)
        if not isinstance(values, dict):
            raise UserError(f"{function} returns {values!r}, and not a dict of numbers.")
        if duplicates := metrics.keys() & values.keys():
            raise UserError(f"Two metrics of a task have the name {duplicates}.")
        metrics |= values
    lines = [
        pair | {"output": output, "target": target, "prediction": prediction}
        for pair, output, target, prediction in zip(pairs, outputs, targets, predictions)
    ]
    return metrics, lines


def read_examples(name: str, split: str, cfg: Config, tokenizer, limit: int | None):
    """Return (pairs, their token ids, their target texts) of a split."""
    pairs = read_pairs(name, split, cfg, limit)
    examples = data.encode_pairs(pairs, data.find_task(name, cfg), tokenizer, cfg)
    targets = [pair["targets"] for pair in pairs]
    targets = [x if isinstance(x, str) else tokenizer.decode(x) for x in targets]
    return pairs, examples, targets


def check_metrics(name: str, split: str, cfg: Config, tokenizer) -> None:
    """Warn if the targets, encoded and decoded, do not get the metrics of the targets."""
    task = data.find_task(name, cfg)
    pairs, examples, targets = read_examples(name, split, cfg, tokenizer, 1000)
    written = [tokenizer.decode(ids) for _, ids in examples]
    best, _ = compute_metrics(task, pairs, targets, targets)
    possible, _ = compute_metrics(task, pairs, targets, written)
    if 0 in best.values():  # such as BLEU, if no answer has four words
        configs.print_once(
            f"{name}: answers that equal their targets get {best}: 0 is right only where "
            f"lower is better."
        )
    if str(possible) != str(best):  # As texts, NaN equals NaN.
        configs.print_once(
            f"{name}: a perfect model has {possible}, not {best}. The vocabulary cannot "
            f"write some targets, or --data.targets_length cuts them."
        )


def predict(params, cfg: Config, name: str, split: str, tokenizer, limit=None):
    """Generate a text for each example. Returns metrics, and a line for each example."""
    pairs, examples, targets = read_examples(name, split, cfg, tokenizer, limit)
    requests = [infer.Request(*ids, number) for number, ids in enumerate(examples)]
    results = infer.process_requests(params, cfg, requests)
    outputs = [tokenizer.decode(best_first[0]) for best_first, _ in results]
    return compute_metrics(data.find_task(name, cfg), pairs, targets, outputs)


# ---- rank classification ---------------------------------------------------------------
# The score of an answer choice is the sum of log p(token | inputs, previous tokens) over
# its tokens, EOS included. The choice with the highest score is the model's answer, so no
# text is generated. T0 is evaluated in this way (Sanh et al. 2022).


def answer_choices(name: str, task: data.Task, number: int, pair: dict) -> list[dict]:
    """Return a dict for each choice of a pair, with the choice as its targets.

    The field answer_choices has the choices, or else the task. In the cached files of P3,
    each pair already is one choice, with the fields idx, is_correct and weight.
    """
    if "is_correct" in pair and "idx" in pair:
        choice = {
            "idx": tuple(map(int, pair["idx"])),
            "is_correct": bool(np.squeeze(pair["is_correct"])),
            "weight": float(np.squeeze(pair.get("weight", 1.0))),
        }
        return [pair | choice]
    texts = [str(text) for text in pair.get("answer_choices", task.choices)]
    target, *folded = [str(x).strip().casefold() for x in (pair["targets"], *texts)]
    is_text = isinstance(pair.get("answer_choices"), str)
    if is_text or target not in folded or len(set(folded)) < len(folded):
        raise UserError(
            f"Example {number + 1} of {name}: the target {pair['targets']!r} must be "
            f"one of a list of choices, and these must differ. The choices, of the field "
            f"answer_choices or of the task, are {texts}."
        )
    choices = []
    for i, text in enumerate(texts):
        is_correct = folded[i] == target
        choice = {"targets": text, "idx": (number, i), "is_correct": is_correct}
        choices.append(pair | choice | {"weight": 1.0})
    return choices


def group_choices(indices: list[tuple[int, int]]) -> list[list[int]]:
    """Return the positions of the choices of each example, ordered by their idx."""
    if len(set(indices)) < len(indices):
        raise ValueError("two answer choices have the same idx")
    order = sorted(range(len(indices)), key=lambda i: indices[i])
    groups = itertools.groupby(order, key=lambda i: indices[i][0])
    return [list(positions) for _, positions in groups]


def rank_classification(targets, scores, num_classes=None, normalize=False) -> dict:
    """Return the percentage of examples whose most probable choice is right, and F1.

    targets: (idx, is_correct, weight, length in tokens) of each choice in any order, with
    idx = (number of the example, number of the choice), as in t5/evaluation/metrics.py.
    num_classes: the number of choices if all examples share them, else None. Shared
    choices are classes: they also get F1, and two classes the areas under the ROC and the
    precision-recall curve. `normalize` divides each score by the length.
    """
    indices, *columns = zip(*targets)
    correct, weights, lengths = map(np.array, columns)
    scores = np.float32(np.divide(scores, lengths) if normalize else scores)
    groups = group_choices(indices)
    # Ties go to the first choice. As in t5, an example has the weight of the chosen
    # answer, or with shared choices that of its first choice.
    answers = [group[np.argmax(scores[group])] for group in groups]
    firsts = [group[0] for group in groups]
    weights = weights[firsts if num_classes else answers]
    metrics = {"accuracy": percent(np.average(correct[answers], weights=weights))}
    if not num_classes or num_classes < 2:
        return metrics
    scores = scores[groups]  # [examples, num_classes]
    correct = correct[groups]
    if (correct.sum(axis=1) > 1).any():  # F1 needs one right class in each example.
        return metrics
    from scipy import special
    from sklearn.metrics import average_precision_score, f1_score, roc_auc_score

    chosen = scores.argmax(axis=1)[:, None] == np.arange(num_classes)
    f1s = f1_score(correct, chosen, average=None, sample_weight=weights, zero_division=0)
    if num_classes > 2:
        return metrics | {f"mean_{num_classes}class_f1": percent(f1s)}
    probability = special.softmax(scores, axis=1)[:, 1]
    binary = correct[:, 1], probability
    return metrics | {
        "f1": percent(f1s[1]),
        "auc-roc": percent(roc_auc_score(*binary, sample_weight=weights)),
        "auc-pr": percent(average_precision_score(*binary, sample_weight=weights)),
    }


def refuse_equal_ids(name: str, choices: list, id_pairs: list, groups: list) -> None:
    """Stop if a right and a wrong choice of an example have the same token ids."""
    for group in groups:
        right = {tuple(id_pairs[i][1]) for i in group if choices[i]["is_correct"]}
        wrong = {tuple(id_pairs[i][1]) for i in group if not choices[i]["is_correct"]}
        if right & wrong:
            texts = [choices[i]["targets"] for i in group]
            raise UserError(
                f"{name} has a right and a wrong choice with equal token ids, perhaps as "
                f"--data.targets_length cuts them: {texts}."
            )


def ranked_lines(choices: list, groups: list, scores: np.ndarray) -> list[dict]:
    """Return a line for each example, with its choices, their scores and the best one."""
    lines = []
    for group in groups:
        own = [choices[i] for i in group]
        best = own[np.argmax(np.float32(scores[group]))]
        line = {
            "choices": [choice["targets"] for choice in own],
            "scores": scores[group].tolist(),
            "targets": [choice["targets"] for choice in own if choice["is_correct"]],
            "prediction": best["targets"],
            "is_correct": best["is_correct"],
        }
        lines.append(own[0] | line)
    return lines


def rank(params, cfg: Config, name: str, split: str, tokenizer, normalize=False):
    """Score the choices of every example. Returns metrics, and a line for each."""
    task = data.find_task(name, cfg)
    pairs = read_pairs(name, split, cfg)
    choices = []
    for number, pair in enumerate(pairs):
        choices += answer_choices(name, task, number, pair)
    id_pairs = data.encode_pairs(choices, task, tokenizer, cfg)
    groups = group_choices([choice["idx"] for choice in choices])
    refuse_equal_ids(name, choices, id_pairs, groups)
    lengths = [len(targets) for _, targets in id_pairs]
    labels = [
        (choice["idx"], choice["is_correct"], choice["weight"], length)
        for choice, length in zip(choices, lengths)
    ]
    # If all examples have the same choices, these are classes.
    choice_sets = {tuple(tuple(id_pairs[i][1]) for i in group) for group in groups}
    num_classes = len(choice_sets.pop()) if len(choice_sets) == 1 else None
    # Try the metrics before the work: a package may be missing.
    rank_classification(labels, np.zeros(len(labels)), num_classes)
    requests = [infer.Request(inputs, targets) for inputs, targets in id_pairs]
    scores = np.array(infer.process_requests(params, cfg, requests, "score"))
    metrics = rank_classification(labels, scores, num_classes, normalize)
    ranked = scores / lengths if normalize else scores
    return metrics, ranked_lines(choices, groups, ranked)


# ---- metrics ---------------------------------------------------------------------------
# A metric is a function of all postprocessed targets and predictions that returns a dict
# of numbers from 0 to 100, as in t5/evaluation/metrics.py. Two differ: `rouge` is a mean,
# and `bleu` compares each text with its own references. Those of GLUE are in extras/.


def percent(values) -> float:
    return 100 * float(np.mean(values))


def accuracy(targets, predictions):
    pairs = list(zip(targets, predictions, strict=True))
    if any(isinstance(t, list) != isinstance(p, list) for t, p in pairs):
        raise TypeError("accuracy cannot compare a list with a text")
    return {"accuracy": percent([t == p for t, p in pairs])}


def bleu(targets, predictions):
    """BLEU of all predictions together. A target is a text, or a list of references."""
    import sacrebleu

    references = [[target] if isinstance(target, str) else target for target in targets]
    streams = list(itertools.zip_longest(*references))  # all first references, and so on
    return {"bleu": sacrebleu.corpus_bleu(predictions, streams, tokenize="intl").score}


def rouge(targets, predictions):
    """Mean F1 of ROUGE-1, -2 and -Lsum. t5 takes the median of bootstrap samples."""
    from rouge_score import rouge_scorer

    names = "rouge1", "rouge2", "rougeLsum"
    # ROUGE-Lsum expects each sentence on a line of its own.
    sides = [[x.replace(" . ", " .\n") for x in side] for side in (targets, predictions)]
    scores = list(map(rouge_scorer.RougeScorer(names).score, *sides))
    return {name: percent([score[name].fmeasure for score in scores]) for name in names}


def f1(targets, predictions):
    """F1 of class 1. A prediction that is neither 0 nor 1 counts as the wrong class."""
    from sklearn.metrics import f1_score

    predictions = [p if p in (0, 1) else 1 - t for t, p in zip(targets, predictions)]
    # The targets may have other classes: test splits without labels have -1.
    score = f1_score(targets, predictions, labels=[1], average="micro", zero_division=0)
    return {"f1": percent(score)}


def normalize_answer(text: str) -> list[str]:
    """Lower case words without punctuation and articles: "The  Cat!" becomes ["cat"]."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def word_f1(answer: list[str], words: list[str]) -> float:
    common = collections.Counter(answer) & collections.Counter(words)
    return 2 * common.total() / max(len(answer) + len(words), 1)


def squad(targets, predictions):
    """Exact match and F1 of the words. A target is the list of all right answers."""
    exact, f1s = [], []
    for answers, prediction in zip(targets, predictions, strict=True):
        if isinstance(answers, str):
            raise TypeError(f"squad needs a list of answers, not the text {answers!r}")
        words = normalize_answer(prediction)
        answers = list(map(normalize_answer, answers))
        exact.append(words in answers)
        f1s.append(max(word_f1(answer, words) for answer in answers))
    return {"em": percent(exact), "f1": percent(f1s)}


METRICS |= {metric.__name__: metric for metric in (accuracy, bleu, rouge, f1, squad)}


# ---- files and tables ------------------------------------------------------------------


def write_lines(folder, name: str, step: int, lines: list[dict]) -> None:
    """Write the outputs for a task to FOLDER/TASK-STEP.jsonl."""
    name = re.sub(r"[^\w.+-]+", "-", name)[-200:]  # a task can be jsonl:path/to/file
    if lines:
        content = b"".join(map(infer.to_json, lines))
        configs.write_file(folder / f"{name}-{step:08}.jsonl", content)


def read_log(path) -> list[dict]:
    """Return the lines of a metrics.jsonl, without one that a killed run cut off."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def read_metrics(folders: list) -> dict[int, dict[str, float]]:
    """Return {step: {name: value}} of the files metrics.jsonl of some folders."""
    table = collections.defaultdict(dict)
    for folder in folders:
        for line in read_log(configs.to_path(folder) / "metrics.jsonl"):
            table[line.pop("step")].update(line)
    return dict(sorted(table.items()))


def write_csv(path: str, table: dict) -> None:
    """Write a row for each step and a column for each metric of held-out examples."""
    names = sorted({name for row in table.values() for name in row if "_eval/" in name})
    rows = [{"step": step, **row} for step, row in table.items() if row.keys() & names]
    text = io.StringIO()
    writer = csv.DictWriter(text, ["step", *names], extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    configs.write_file(configs.to_path(path), text.getvalue())


# ---- the command -----------------------------------------------------------------------


@dataclass(frozen=True)
class Options(configs.Options):
    tasks: str = ""  # tasks or mixtures, with commas; empty means those of the run
    split: str = "validation"
    # empty means predict for tasks with metrics, and loss for all others
    mode: Literal["", "loss", "predict", "rank"] = ""
    step: str = "latest"  # a step, latest or all
    output: str = ""  # folder of metrics and outputs of this run; empty means RUN/eval
    normalize: bool = False  # whether to rank by the mean score of a choice's tokens
    csv: str = ""  # file for a table of all metrics of held-out examples
    plot: str = ""  # file for a plot of losses, accuracies, metrics, learning rate


def recorded_name(name: str, mode: str, options: Options, run_cfg: Config) -> str:
    """Append mode, split and changed flags, so that each variant gets its own columns."""
    if mode == "rank":
        name += "-rank-normalized" if options.normalize else "-rank"
    old = configs.flat_settings(run_cfg)
    for key, value in configs.flat_settings(options.cfg).items():
        section, field = key.split(".")
        matters = section != "mesh" and (section != "decode" or mode == "predict")
        if matters and value != old[key] and field not in configs.NOT_IN_METRIC_NAMES:
            name += f"-{field}={value}"
    return name if options.split == "validation" else f"{name}-{options.split}"


def save_metrics(
    folder, step: int, name: str, mode: str, metrics: dict, lines: list
) -> None:
    """Append the metrics to FOLDER/metrics.jsonl, and write the outputs beside it."""
    kind = "loss_eval" if mode == "loss" else "predict_eval"
    line = {f"{kind}/{name}/{metric}": value for metric, value in metrics.items()}
    path, content = folder / "metrics.jsonl", infer.to_json({"step": step, **line})
    old = path.read_bytes() if path.exists() else b""
    if old and not old.endswith(b"\n"):  # A killed command cut off its line.
        content = b"\n" + content
    if configs.is_remote(path):  # An object in a bucket can only be written as a whole.
        configs.write_file(path, old + content)
    else:
        folder.mkdir(parents=True, exist_ok=True)
        with open(path, "ab") as file:  # Another process may append at the same time.
            file.write(content)
    write_lines(folder, name, step, lines)


def chosen_tasks(options: Options, run_cfg: Config) -> list[str]:
    """Return the names of the tasks to evaluate."""
    cfg, split = options.cfg, options.split
    names = data.eval_tasks(cfg, options.tasks)
    configs.refuse_unused_source(names, cfg, run_cfg)
    if len(names) == 1 or names == [x.strip() for x in options.tasks.split(",")]:
        return names
    # As in training, leave out tasks of mixtures that have no examples.
    empty = [x for x in names if next(data.read_task(x, split, cfg), None) is None]
    if empty:
        print(f"not evaluated, without examples of the split {split}: {empty}")
    # If all are empty, their evaluation says so.
    return [name for name in names if name not in empty] or names


def main() -> None:
    options = configs.parse(Options)
    cfg, tokenizer = infer.start_inference(options)
    run_cfg, _ = configs.load_run(options.run_dir)
    names, split = chosen_tasks(options, run_cfg), options.split
    folder = configs.to_path(options.output or f"{options.run_dir}/eval")
    steps = partition.Checkpoints(options.run_dir).steps()
    if options.step != "all" or not steps:
        steps = [partition.resolve_step(options.run_dir, options.step)]
    partition.check_same(steps)
    modes = {
        "loss": loss_of_split,
        "predict": predict,
        "rank": partial(rank, normalize=options.normalize),
    }
    mode_of = {}
    for name in names:
        has_metrics = data.find_task(name, cfg).metrics
        mode_of[name] = options.mode or ("predict" if has_metrics else "loss")
        if mode_of[name] == "predict":
            check_metrics(name, split, cfg, tokenizer)
    for step in steps:
        params = infer.load_params(cfg, options.run_dir, step)
        for name, mode in mode_of.items():
            metrics, lines = modes[mode](params, cfg, name, split, tokenizer)
            count = f" of {len(lines):,} examples" if lines else ""
            print(f"{name}, {split}, step {step:,}, {mode}{count}")
            for metric, value in metrics.items():
                print(f"  {metric:22} {value:.4f}")
            if partition.is_main_process():
                recorded = recorded_name(name, mode, options, run_cfg)
                save_metrics(folder, step, recorded, mode, metrics, lines)
    if partition.is_main_process():
        table = read_metrics([options.run_dir, folder])
        if options.csv:
            write_csv(options.csv, table)
        if options.plot:
            from extras import curves

            curves.write_plot(options.plot, table)


if __name__ == "__main__":
    main()
