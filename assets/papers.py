"""Train the tiny T5 in the variants that three papers compare, and make tables of them.

The papers compare pretraining objectives (Raffel et al. 2020), gated MLPs (Shazeer 2020)
and optimizers (Nawrot 2023), with large models. This command compares the same variants
with `tiny`, the text of the speedrun and three seeds.

    python assets/papers.py objectives      make one table
    python assets/papers.py                 make all tables and the picture

Each run trains in runs/papers. A command that was stopped continues when it is repeated,
because finished runs are not trained again. The results are exact: each run uses one
thread, so a run on another machine of the same kind gives the same numbers.
"""

import argparse
import csv
import functools
import json
import os
import statistics
import subprocess
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    # Each run uses one thread, because the number of threads changes the last digits.
    os.environ.update(JAX_PLATFORMS="cpu", NPROC="1")

import configs  # before JAX, so that Ctrl-C ends the process without a traceback

import partition
import speedrun
from configs import UserError, override

RECIPE = "assets/papers/recipe.py"
RESULTS = ROOT / "assets/papers/results.csv"
SEEDS = range(3)
TASKS = ("restore", "spelling", "by_rule_words")

# ---- what is compared ------------------------------------------------------------------

# Each entry has the settings in which a pretraining run differs from the CONFIG of RECIPE.
# All runs have 16 rows with 128 input tokens in a batch. The targets are as long as the
# objective needs.
ENTRIES = {
    "span corruption": {},
    "BERT-style": {"data.task": "bert_style", "data.targets_length": 128},
    "prefix LM": {"data.task": "prefix_lm", "data.targets_length": 128},
    "deshuffling": {"data.task": "deshuffling", "data.targets_length": 128},
    "rate 10 %": {"data.noise_density": 0.1, "data.targets_length": 20},
    "rate 25 %": {"data.noise_density": 0.25, "data.targets_length": 52},
    "rate 50 %": {"data.noise_density": 0.5, "data.targets_length": 129},
    "span length 2": {"data.mean_span_length": 2.0, "data.targets_length": 32},
    "span length 5": {"data.mean_span_length": 5.0, "data.targets_length": 27},
    "span length 10": {"data.mean_span_length": 10.0, "data.targets_length": 25},
    "no pretraining": None,
    # An MLP without a gate has 384 hidden channels in place of 256, so that all MLPs have
    # the same number of parameters.
    "ReLU": {"model.activation": "relu", "model.d_ff": 384},
    "GELU": {"model.activation": "gelu", "model.d_ff": 384},
    "Swish": {"model.activation": "silu", "model.d_ff": 384},
    "GLU": {"model.activation": "gated_sigmoid"},
    "Bilinear": {"model.activation": "gated_identity"},
    "SwiGLU": {"model.activation": "gated_silu"},
    "ReGLU": {"model.activation": "gated_relu"},
    "AdamW": {"train.optimizer": "adamw", "train.learning_rate": 0.002},
    "RMS-scaled AdamW": {"train.optimizer": "rms_scaled_adamw"},
    "Lion": {"train.optimizer": "lion", "train.learning_rate": 0.0005},
    "Muon": {"train.optimizer": "muon", "train.learning_rate": 0.005},
}

# The settings with which each pretrained model is fine-tuned on the mixture of the tasks.
FINETUNE = {
    "data.source": "",
    "data.task": "three_tasks",
    "data.inputs_length": 48,
    "data.targets_length": 48,
    "train.steps": 200,
    "train.steps_per_cycle": 200,
    "train.learning_rate": 0.02,
    "train.eval_every": 200,
    "train.eval_batches": 0,
    "train.save_every": 200,
}


class Table(NamedTuple):
    """A table of results, with the figures of the paper beside ours."""

    title: str
    source: str  # the table of the paper
    paper_columns: tuple  # the titles of the paper's figures
    # For each entry, its name in this table and the figures of the paper.
    rows: dict
    # The measures of ours: "loss", "average" or names of TASKS.
    measures: tuple


TASK_SCORES = ("GLUE", "SQuAD", "SuperGLUE")
OURS = ("average", *TASKS)
BASELINE = "span corruption"
TABLES = {
    "objectives": Table(
        "Pretraining objectives",
        "Raffel et al. 2020, tables 4 and 7",
        TASK_SCORES,
        {
            BASELINE: ("span corruption (T5)", "83.49", "81.84", "72.53"),
            "BERT-style": ("BERT-style", "82.96", "80.65", "69.85"),
            "prefix LM": ("prefix language modeling", "80.69", "77.99", "65.27"),
            "deshuffling": ("deshuffling", "73.17", "67.61", "58.47"),
        },
        OURS,
    ),
    "rates": Table(
        "Corruption rates",
        "Raffel et al. 2020, table 6, for single corrupted tokens instead of spans",
        TASK_SCORES,
        {
            "rate 10 %": ("10 %", "82.82", "80.38", "69.55"),
            BASELINE: ("15 % (T5)", "83.28", "80.88", "71.36"),
            "rate 25 %": ("25 %", "83.00", "80.96", "70.48"),
            "rate 50 %": ("50 %", "81.27", "79.80", "70.33"),
        },
        (*OURS, "loss"),
    ),
    "spans": Table(
        "Mean lengths of the removed spans",
        "Raffel et al. 2020, table 7",
        TASK_SCORES,
        {
            "span length 2": ("2", "83.54", "82.09", "72.20"),
            BASELINE: ("3 (T5)", "83.49", "81.84", "72.53"),
            "span length 5": ("5", "83.40", "82.05", "72.23"),
            "span length 10": ("10", "82.85", "81.84", "70.44"),
        },
        (*OURS, "loss"),
    ),
    "mlps": Table(
        "MLPs with and without a gate",
        "Shazeer 2020, table 1: held-out log-perplexity after 65,536 steps",
        ("log-perplexity",),
        {
            "ReLU": ("ReLU", "1.997"),
            "GELU": ("GELU", "1.983"),
            "Swish": ("Swish", "1.994"),
            "GLU": ("GLU (sigmoid)", "1.982"),
            "Bilinear": ("Bilinear", "1.960"),
            BASELINE: ("GEGLU (T5 1.1)", "1.942"),
            "SwiGLU": ("SwiGLU", "1.944"),
            "ReGLU": ("ReGLU", "1.953"),
        },
        ("loss",),
    ),
    "optimizers": Table(
        "Optimizers, with a cosine schedule",
        "Nawrot 2023 (nanoT5): held-out loss of T5 base after 65,536 steps",
        ("loss of the paper",),
        {
            BASELINE: ("Adafactor (T5)", "1.993"),
            "RMS-scaled AdamW": ("RMS-scaled AdamW", "1.953"),
            "AdamW": ("AdamW", "diverges"),
            "Lion": ("Lion", "not better"),
            "Muon": ("Muon", ""),
        },
        ("loss",),
    ),
    "pretraining": Table(
        "Pretraining against no pretraining",
        "Raffel et al. 2020, table 1",
        TASK_SCORES,
        {
            BASELINE: ("pretrained", "83.28", "80.88", "71.36"),
            "no pretraining": ("no pretraining", "66.22", "50.31", "53.04"),
        },
        OURS,
    ),
}


# ---- runs ------------------------------------------------------------------------------


def train_run(run_dir, settings, seed, *more):
    """Train a run with train.py, unless the run has already finished.

    run_dir: the folder of the run. settings: a dict with the settings of the run that
    differ from those of RECIPE. more: further options of train.py.
    """
    command = [sys.executable, "train.py", "--config", RECIPE, "--run_dir", str(run_dir)]
    command += [*more, "--train.seed", str(seed)]
    for name, value in settings.items():
        command += [f"--{name}", str(value)]
    log, started = run_dir.with_suffix(".log"), run_dir.with_suffix(".json")
    # A changed recipe file also makes another run.
    text = json.dumps([command[1:], zlib.crc32(Path(RECIPE).read_bytes())])
    if started.exists() and started.read_text() != text:
        raise UserError(
            f"The settings of {run_dir} have changed since this run began: remove "
            f"{run_dir.parent}, so that its runs are trained again."
        )
    configs.write_file(started, text)
    steps = settings.get("train.steps", recipe().train.steps)
    if steps in partition.Checkpoints(run_dir).steps():
        return
    with open(log, "w") as file:
        result = subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
    if result.returncode:
        last = (log.read_text().strip().splitlines() or ["no message"])[-1]
        raise UserError(f"{run_dir} failed ({last}). The file {log} has the output.")


@functools.cache
def recipe():
    """Return the Config of RECIPE."""
    return configs.load_recipe(RECIPE)


def folder_of(entry, seed, kind):
    """Return the folder of a run. `kind` is "pretrained" or "finetuned"."""
    return Path(
        "runs/papers", entry.replace(" %", "").replace(" ", "_"), f"{kind}_{seed}"
    )


def run_entry(entry, seed, finetune):
    """Pretrain one seed of an entry, and fine-tune it on the three tasks if asked to."""
    pretrained = folder_of(entry, seed, "pretrained")
    settings, more = ENTRIES[entry], []
    if settings is not None:
        train_run(pretrained, settings, seed)
        more = ["--init_from", str(pretrained)]
    if finetune:
        train_run(folder_of(entry, seed, "finetuned"), FINETUNE, seed, *more)


def measure(entry, seed, measures):
    """Return the results of one seed of an entry, as a dict from measures to numbers.

    The measure "loss" is the loss of T5's span corruption on held-out text, in nats per
    content token. The measure of a task is its held-out cross entropy after fine-tuning,
    in nats per target token. The measure "average" is the mean of the three tasks.
    """
    results = {}
    if "loss" in measures:
        cfg = override(recipe(), ENTRIES[entry])
        run_dir = folder_of(entry, seed, "pretrained")
        results["loss"] = speedrun.held_out_loss(cfg, run_dir)
    if "average" in measures:
        path = folder_of(entry, seed, "finetuned") / "metrics.jsonl"
        last = {}
        for line in partition.read_metrics_file(path):
            last |= line
        for task in TASKS:
            results[task] = round(last[f"training_eval/{task}/cross_ent_loss"], 4)
        results["average"] = round(statistics.mean(results[task] for task in TASKS), 4)
    return results


# ---- tables ----------------------------------------------------------------------------


def separated(values, others):
    """Return whether all values of one list are larger than all values of the other."""
    return min(values) > max(others) or max(values) < min(others)


def show_mean(values):
    """Return the mean and the range of the seeds, such as "5.100 (4.950 to 5.250)"."""
    return f"{statistics.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def markdown(table, results):
    """Return a table of results in Markdown.

    A result is marked with * if the three seeds separate it from the baseline, T5: each
    seed is better than each seed of T5, or each seed is worse.

    results: a dict from (entry, seed) to the results of `measure`.
    """
    lines = [
        f"| {table.title} | {' | '.join((*table.paper_columns, *table.measures))} |",
        "|---" * (1 + len(table.paper_columns) + len(table.measures)) + "|",
    ]
    for entry, (title, *figures) in table.rows.items():
        cells = [title, *figures]
        for name in table.measures:
            ours = [results[entry, seed][name] for seed in SEEDS]
            baseline = [results[BASELINE, seed][name] for seed in SEEDS]
            mark = " *" if entry != BASELINE and separated(ours, baseline) else ""
            cells.append(show_mean(ours) + mark)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def write_results(results):
    """Write all results to RESULTS, one line for each entry, seed and measure."""
    with open(RESULTS, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["entry", "seed", "measure", "value"])
        for (entry, seed), values in sorted(results.items()):
            for name, value in sorted(values.items()):
                writer.writerow([entry, seed, name, value])


def read_results():
    """Return the results in RESULTS, as a dict from (entry, seed) to a dict of numbers."""
    results = {}
    if RESULTS.exists():
        with open(RESULTS, newline="") as file:
            for row in csv.DictReader(file):
                place = results.setdefault((row["entry"], int(row["seed"])), {})
                place[row["measure"]] = float(row["value"])
    return results


def draw(results, path):
    """Draw one panel for each table, with a point for each seed and a line for the mean.

    results: a dict from (entry, seed) to the results of `measure`. path: the SVG file.
    """
    import matplotlib

    matplotlib.use("agg")
    # The same results give the same file, and text stays text.
    matplotlib.rcParams.update({"svg.hashsalt": "plain T5", "svg.fonttype": "none"})
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(3, 2, figsize=(10, 9), layout="constrained")
    for panel, table in zip(panels.flat, TABLES.values()):
        measure = table.measures[0]
        t5 = statistics.mean(results[BASELINE, seed][measure] for seed in SEEDS)
        panel.axvline(t5, color="lightsteelblue", linestyle="--")
        for place, entry in enumerate(table.rows):
            values = [results[entry, seed][measure] for seed in SEEDS]
            color = "tab:blue" if entry == BASELINE else "black"
            panel.plot(values, [place] * len(values), "o", color=color, markersize=4)
            panel.plot(statistics.mean(values), place, "|", color=color, markersize=18)
        panel.set_yticks(range(len(table.rows)), [row[0] for row in table.rows.values()])
        panel.set_ylim(len(table.rows) - 0.5, -0.5)
        panel.set_title(table.title, fontsize=11)
        if measure == "loss":
            panel.set_xlabel("loss of span corruption (nats per content token)")
        else:
            panel.set_xlabel("loss of three tasks (nats per target token)")
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main(argv):
    parser = argparse.ArgumentParser(
        usage="python assets/papers.py [TABLE ...] [options]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.error = configs.refuse_flags
    parser.add_argument(
        "tables", nargs="*", help=f"tables to make: {', '.join(TABLES)} (default: all)"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=os.cpu_count(),
        help="number of runs that train at the same time (default: the number of cores)",
    )
    args = parser.parse_args(argv)
    unknown = set(args.tables) - set(TABLES)
    if unknown:
        raise UserError(f"Unknown table {min(unknown)}: use {', '.join(TABLES)}.")
    os.chdir(ROOT)
    speedrun.check_files()
    tables = {name: TABLES[name] for name in args.tables or TABLES}
    # Several tables share entries, so collect what each entry needs to be measured for.
    wanted = {}
    for table in tables.values():
        for entry in table.rows:
            wanted.setdefault(entry, set()).update(table.measures)
    with ThreadPoolExecutor(args.jobs) as pool:
        jobs = [
            pool.submit(run_entry, entry, seed, "average" in measures)
            for entry, measures in wanted.items()
            for seed in SEEDS
        ]
        for job in jobs:
            job.result()
    partition.start_jax(speedrun.BASELINE)
    results = read_results()
    for entry, measures in wanted.items():
        for seed in SEEDS:
            results.setdefault((entry, seed), {}).update(measure(entry, seed, measures))
    write_results(results)
    for table in tables.values():
        print(f"\n{table.title} ({table.source})\n\n{markdown(table, results)}")
    if len(tables) == len(TABLES):
        draw(results, ROOT / "assets/papers/results.svg")


if __name__ == "__main__":
    configs.run_command(main)
