"""Run an entry of the speedrun, and print whether the entry is a record.

The speedrun asks how few training steps a T5 of the size of `tiny` needs to reach a fixed
held-out loss. An entry is a recipe file. README.md lists the rules.

    python assets/speedrun.py assets/speedrun/wsd.py               run five seeds
    python assets/speedrun.py assets/speedrun/wsd.py --seeds 3     screen with three seeds
    python assets/speedrun.py assets/speedrun/ideas.json --seeds 3     screen many ideas
    python assets/speedrun.py assets/speedrun/wsd.py --track time      measure minutes

Each seed trains in runs/speedrun/NAME. A command that was stopped continues when it is
repeated, because finished seeds are not trained again.
"""

import argparse
import ast
import csv
import datetime
import functools
import hashlib
import io
import math
import os
import statistics
import subprocess
import sys
import tokenize
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    # JAX reads the number of its threads from the variable NPROC. The losses depend on
    # this number in the last digits, so track S always uses one thread.
    os.environ.update(JAX_PLATFORMS="cpu", NPROC="1")

import configs  # before JAX, so that Ctrl-C ends the process without a traceback

import jax
import numpy as np

import data
import evaluate
import infer
import model
import partition
import train
from configs import RECIPES, UserError, override

# ---- what is fixed ---------------------------------------------------------------------

# The corpus is the text of `python:` from Python 3.11.7: the manual and the docstrings of
# the standard library. Of its 724 documents, 48 are held out. The vocabulary has 2,000
# pieces, and was trained on the other 676 documents.
FOLDER = "assets/speedrun"
CORPUS = f"jsonl:{FOLDER}/{{split}}.jsonl.xz"
VOCABULARY = f"{FOLDER}/spiece.model"
# The first half of the SHA-256 digest of each file.
DIGESTS = {
    "train.jsonl.xz": "81110117d8759b129103a8d75c3ea3cb",
    "validation.jsonl.xz": "1a9b8e58c8cb3b880b60a6f9a30242ab",
    "spiece.model": "2fd34ffc26b607170da950fd9cf67209",
}
# The SHA-256 digest of the token ids of all held-out batches.
HELD_OUT = "7d1159f9739038be5f062cf3729a2c096ee328a80e96da72797ccaae715ea646"
# The mean held-out loss of five seeds of `tiny` after 1,500 steps, in nats per content
# token. It was measured once, as the first row of assets/speedrun.csv.
TARGET = 4.6850
# A run of `tiny` on the corpus of the speedrun. Each entry is evaluated with the settings
# of this Config in the sections data and train.
BASELINE = override(RECIPES["tiny"], {"data.source": CORPUS, "data.vocab": VOCABULARY})
STANDARD = data.TASKS["span_corruption"]
READERS = dict(data.SOURCES)
MAX_LINES = 40
SCALARS = (str, int, float, bool)  # the types of a setting in a table of ideas
TABLE = ROOT / "assets/speedrun.csv"
COLUMNS = (
    "date name steps seeds mean_loss losses p parameters gflops_per_step minutes "
    "time_ratio verdict notes"
).split()


# ---- statistics ------------------------------------------------------------------------


def p_value(losses, target):
    """Return the p-value of a one-sided t-test that the mean loss is below the target.

    The p-value is the probability of a mean at least this far below the target, if the
    true mean were the target. It is computed from Student's t distribution, whose
    distribution function has a closed form for an even number of degrees of freedom.

    losses: the losses of an odd number of seeds, at least three.
    """
    freedom = len(losses) - 1
    error = statistics.stdev(losses) / math.sqrt(len(losses))
    difference = statistics.mean(losses) - target
    # With t = difference / error, the angle is arctan(t / sqrt(freedom)).
    angle = math.atan2(difference, error * math.sqrt(freedom))
    # The distribution function contains the series 1 + 1/2 cos^2 + (1 * 3)/(2 * 4) cos^4
    # + ... of the angle, with freedom / 2 terms.
    term = total = 1.0
    for k in range(1, freedom // 2):
        term *= (2 * k - 1) / (2 * k) * math.cos(angle) ** 2
        total += term
    return (1 + math.sin(angle) * total) / 2


def judge(losses, steps, record, track="steps"):
    """Return the verdict on an entry as a text.

    With fewer than five seeds, the verdict is "screened". With five seeds, it is "record"
    if the mean loss is below the target with p < 0.01 and the entry needs fewer steps
    than the last record. Otherwise it is "no record". On track "time", the verdict is
    "reached" or "not reached", which says whether the mean loss is below the target.

    losses: the held-out loss of each seed. record: the steps of the last record.
    """
    is_below = statistics.mean(losses) < TARGET and p_value(losses, TARGET) < 0.01
    if len(losses) < 5:
        return "screened"
    if track == "time":
        return "reached" if is_below else "not reached"
    return "record" if is_below and steps < record else "no record"


# ---- the rules -------------------------------------------------------------------------


def count_code_lines(source):
    """Return how many lines of a Python file have code.

    Blank lines, comments and docstrings do not count.

    source: the text of the file.
    """
    no_code = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT)
    no_code += (tokenize.DEDENT, tokenize.ENDMARKER)
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in no_code:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            if ast.get_docstring(node) is not None:
                docstring = node.body[0]
                lines -= set(range(docstring.lineno, docstring.end_lineno + 1))
    return len(lines)


def matmul_flops(jaxpr):
    """Count the floating-point operations of all matmuls and convolutions of a program.

    jaxpr: the program, as a jax.extend.core.Jaxpr. A loop counts as often as it runs.
    """
    total = 0
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        params = [
            value
            for values in equation.params.values()
            for value in (values if isinstance(values, tuple | list) else [values])
        ]
        # The programs inside of a loop, a condition or a call are Jaxprs or ClosedJaxprs.
        inner = [getattr(value, "jaxpr", value) for value in params]
        counts = [matmul_flops(program) for program in inner if hasattr(program, "eqns")]
        if name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left, (out,) = equation.invars[0].aval, equation.outvars
            length = math.prod(left.shape[axis] for axis in contracted)
            total += 2 * length * math.prod(out.aval.shape)
        elif name == "conv_general_dilated":
            kernel, (out,) = equation.invars[1].aval, equation.outvars
            channels = equation.params["dimension_numbers"].rhs_spec[0]
            per_output = math.prod(kernel.shape) // kernel.shape[channels]
            total += 2 * per_output * math.prod(out.aval.shape)
        elif name == "scan":
            total += equation.params["length"] * sum(counts)
        elif name == "cond":
            total += max(counts)
        elif name == "while" and sum(counts):
            raise UserError(
                "The model has a while loop with matmuls, whose FLOPs cannot be counted: "
                "use jax.lax.scan."
            )
        else:
            total += sum(counts)
    return total


def step_flops(cfg):
    """Count the floating-point operations of the model in a training step.

    The backward pass counts as two forward passes. The optimizer does not count.
    """
    mesh = partition.set_mesh(cfg, jax.devices()[:1])
    params = train.state_template(cfg, mesh).params
    batch = train.batch_template(cfg, mesh, cfg.train.batch_size)
    key = jax.random.key(0) if cfg.model.dropout else None

    def loss(params, batch):
        return model.loss_fn(params, batch, cfg, key)[0]

    return 3 * matmul_flops(jax.make_jaxpr(loss)(params, batch).jaxpr)


def measure(cfg, source=""):
    """Return the sizes that the rules limit, as a dict.

    cfg: the Config of the entry. source: the text of its recipe file.
    """
    d = cfg.data
    return {
        "lines": count_code_lines(source),
        "tokens": cfg.train.batch_size * (d.inputs_length + d.targets_length),
        "parameters": model.count_params(model.param_table(cfg.model)),
        "flops": step_flops(cfg),
    }


@functools.cache
def limits():
    """Return the largest allowed value of each size that `measure` returns.

    Call this function before an entry is executed, because an entry may change the model.
    """
    tiny = measure(BASELINE)
    return {
        "lines": MAX_LINES,
        "tokens": tiny["tokens"],
        "parameters": math.floor(1.05 * tiny["parameters"]),
        "flops": math.floor(1.05 * tiny["flops"]),
    }


def check_files():
    """Raise UserError if the corpus or the vocabulary of the speedrun has changed."""
    for name, digest in DIGESTS.items():
        path = ROOT / FOLDER / name
        content = path.read_bytes() if path.exists() else b""
        if not hashlib.sha256(content).hexdigest().startswith(digest):
            raise UserError(
                f"{path} is not the file of the speedrun, because its SHA-256 digest "
                f"differs: restore this file, for example with git checkout {path}."
            )


def check_data(cfg):
    """Raise UserError if an entry trains on another corpus or with another vocabulary."""
    if cfg.data.source not in ("", CORPUS) or cfg.data.validation_source:
        raise UserError(
            f"The entry sets data.source or data.validation_source, but the corpus of "
            f"the speedrun is fixed: leave them out, or set data.source to {CORPUS}."
        )
    if cfg.data.vocab not in (RECIPES["tiny"].data.vocab, VOCABULARY):
        raise UserError(
            f"The entry sets data.vocab to {cfg.data.vocab}, but the vocabulary of the "
            f"speedrun is fixed: leave out data.vocab."
        )
    if cfg.train.start_step or cfg.train.restore != "params":
        raise UserError(
            "The entry sets train.start_step or train.restore, but each run of the "
            "speedrun starts from random weights: leave out these settings."
        )
    kind = CORPUS.partition(":")[0]
    if data.SOURCES[kind] is not READERS[kind]:
        raise UserError(
            f"The entry replaces the reader of the source {kind}: use another name in "
            f"SOURCES."
        )
    for task in data.trained_tasks(with_corpus(cfg)):
        if task.source != CORPUS:
            raise UserError(
                f"The entry trains on the source {task.source or '(none)'}, but the "
                f"corpus of the speedrun is fixed: give each task the source {CORPUS}."
            )


def check_rules(cfg, source, limit, track):
    """Raise UserError if an entry breaks a rule, and return the sizes of the entry.

    On track "time", the parameters, the FLOPs and the tokens have no limits.

    cfg: the Config of the entry. source: the text of its recipe file.
    limit: the result of `limits`. track: "steps" or "time".
    """
    check_data(cfg)
    sizes = measure(cfg, source)
    messages = {
        "lines": "lines of code, without comments and docstrings: shorten the file",
        "tokens": "tokens in a batch, which is train.batch_size * (data.inputs_length + "
        "data.targets_length): lower one of these settings",
        "parameters": "parameters, 5 % more than tiny has: make the model smaller",
        "flops": "floating-point operations in a training step, 5 % more than tiny "
        "needs: make the model or the batch smaller",
    }
    for name, message in messages.items():
        if sizes[name] > limit[name] and (track == "steps" or name == "lines"):
            raise UserError(
                f"The entry has {sizes[name]:,}, but may have at most {limit[name]:,} "
                f"{message}."
            )
    if max(map(len, source.splitlines()), default=0) > 90:
        raise UserError("The entry has a line of more than 90 columns: break this line.")
    return sizes


# ---- training and evaluation -----------------------------------------------------------


def with_corpus(cfg):
    """Return a Config with the corpus and the vocabulary of the speedrun."""
    # The tasks of a mixture name their sources themselves.
    source = "" if cfg.data.task in data.MIXTURES else CORPUS
    return override(cfg, {"data.source": source, "data.vocab": VOCABULARY})


def run_config(cfg, seed):
    """Return the Config with which a seed of an entry trains.

    The speedrun sets the corpus, the vocabulary and the seed, and turns off evaluations.
    It saves one checkpoint, at the end of the run.
    """
    changes = {
        "train.seed": seed,
        "train.log_every": 10,
        "train.eval_every": 0,
        "train.infer_every": 0,
        "train.save_every": cfg.train.steps,
        "train.keep": 1,
        "train.keep_best": "",
        "train.profile": "",
        "data.eval_tasks": "",
        "data.prepared_dir": BASELINE.data.prepared_dir,
    }
    cfg = replace(cfg, mesh=BASELINE.mesh, distributed=BASELINE.distributed)
    return override(with_corpus(cfg), changes)


def train_run(path, recipe, cfg, run_dir, threads):
    """Train a run of an entry with train.py, unless the run has already finished.

    path: the recipe file of the entry. recipe: the Config of this file.
    cfg: the Config of the run. run_dir: the folder of the run.
    threads: the number of threads of JAX.
    """
    stored = run_dir / "recipe.py"
    if stored.exists() and stored.read_text() != path.read_text():
        raise UserError(
            f"{path} has changed since {run_dir} was made: remove {run_dir.parent}, or "
            f"give the changed entry another name."
        )
    if stored.exists() and cfg.train.steps in partition.Checkpoints(run_dir).steps():
        if configs.load_run(run_dir) == cfg:
            return
    command = [sys.executable, "train.py", "--config", path, "--run_dir", run_dir]
    # Always give model.vocab_size. Otherwise train.py would compute this setting from the
    # vocabulary, and ignore the one of the entry.
    flags = {"model.vocab_size": cfg.model.vocab_size}
    for name, (value, _) in configs.differences(cfg, recipe).items():
        flags[name] = value
    for name, value in flags.items():
        command += [f"--{name}", value]
    log = Path(f"{run_dir}.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "w") as file:
        result = subprocess.run(
            list(map(str, command)),
            cwd=ROOT,
            env={**os.environ, "JAX_PLATFORMS": "cpu", "NPROC": str(threads)},
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    if result.returncode:
        lines = log.read_text().strip().splitlines() or ["no message"]
        raise UserError(f"{run_dir} failed ({lines[-1]}). The file {log} has the output.")


def training_minutes(run_dir):
    """Return the minutes that a run has spent in training steps.

    Loading, compiling and saving do not count.
    """
    lines = partition.read_metrics_file(run_dir / "metrics.jsonl")
    return sum(line.get("timing/seconds", 0.0) for line in lines) / 60


@functools.cache
def held_out():
    """Return the Config and the Dataset with which each entry is evaluated.

    The Dataset has the standard span corruption of `tiny`. Raises UserError if its token
    ids are not those of the speedrun.
    """
    # An entry may replace the task span_corruption, so evaluate with a task of our own.
    data.TASKS["speedrun"] = STANDARD
    cfg = override(BASELINE, {"data.task": "speedrun"})
    dataset = data.prepare(cfg, "validation", data.load_tokenizer(VOCABULARY))
    digest = hashlib.sha256()
    for number in range(dataset.batches()):
        for array in dataset.batch(number):
            digest.update(np.ascontiguousarray(array, "<i4").tobytes())
    if digest.hexdigest() != HELD_OUT:
        raise UserError(
            "The held-out examples are not those of the speedrun, because their SHA-256 "
            "digest differs: leave the functions of data.py that make examples unchanged."
        )
    return cfg, dataset


def evaluation_config(cfg):
    """Return the Config with which an entry is evaluated.

    The section model is that of the entry. All other sections are those of the speedrun.
    """
    model_settings = {f"model.{name}": value for name, value in vars(cfg.model).items()}
    return override(held_out()[0], model_settings)


def held_out_loss(cfg, run_dir):
    """Return the loss of a finished run on all held-out examples.

    The loss is in nats per content token, rounded to four decimals.
    """
    mesh = partition.set_mesh(cfg, jax.devices()[:1])
    _, params = infer.load_params(cfg, run_dir, cfg.train.steps)
    fixed, (_, dataset) = evaluation_config(cfg), held_out()
    metrics = evaluate.evaluate_loss(params, fixed, mesh, dataset, dataset.batches())
    return round(metrics["content_loss"], 4)


def check_probabilities(cfg, run_dir):
    """Raise UserError if the loss of an entry is not the loss of a language model.

    The function replaces one target token of a held-out example by each token of the
    vocabulary. The probabilities of these tokens must add up to 1. The losses of earlier
    target tokens must not change, because the decoder must not see later tokens. This
    check finds mistakes such as a missing causal mask.
    """
    mesh = partition.set_mesh(cfg, jax.devices()[:1])
    _, params = infer.load_params(cfg, run_dir, cfg.train.steps)
    fixed, (_, dataset) = evaluation_config(cfg), held_out()
    V, at = cfg.model.vocab_size, 2
    batch = data.Batch(*(np.repeat(a, V, 0) for a in dataset.batch(0, np.arange(1))))
    batch.targets[:, at] = batch.decoder_inputs[:, at + 1] = np.arange(V)
    token_losses = jax.jit(lambda *args: model.token_losses(*args, fixed)[0])
    losses = token_losses(params, partition.put_batch(batch, V, mesh))
    losses = np.asarray(losses, np.float64)
    total, change = np.exp(-losses[:, at]).sum(), np.ptp(losses[:, :at], axis=0).max()
    if not (abs(total - 1) < 0.01 and change < 0.01):
        raise UserError(
            f"The loss of the entry is not the loss of a language model: the "
            f"probabilities of all tokens add up to {total:.3f} instead of 1, or a later "
            f"token changes an earlier loss (by {change:.3f}). Correct the model."
        )


# ---- the table of results --------------------------------------------------------------


def read_table():
    """Return the rows of assets/speedrun.csv as a list of dicts."""
    with open(TABLE, newline="") as file:
        return list(csv.DictReader(file))


def last_record(rows):
    """Return the number of steps of the last record, or of the baseline."""
    steps = [int(row["steps"]) for row in rows if row["verdict"] == "record"]
    return min(steps, default=RECIPES["tiny"].train.steps)


def make_row(name, cfg, losses, sizes, minutes, **more):
    """Return a row of assets/speedrun.csv as a dict of texts.

    more: the columns verdict, notes and time_ratio.
    """
    row = {
        "date": f"{datetime.date.today()}",
        "name": name,
        "steps": f"{cfg.train.steps}",
        "seeds": f"{len(losses)}",
        "mean_loss": f"{statistics.mean(losses):.4f}",
        "losses": " ".join(f"{loss:.4f}" for loss in losses),
        "p": f"{p_value(losses, TARGET):.2g}",
        "parameters": f"{sizes['parameters']}",
        "gflops_per_step": f"{sizes['flops'] / 1e9:.3f}",
        "minutes": f"{minutes:.2f}",
    }
    return {column: {**row, **more}.get(column, "") for column in COLUMNS}


def append_row(row):
    """Append a row to assets/speedrun.csv, unless the table already has this result."""
    same = "name steps seeds losses time_ratio".split()
    if any(all(old[key] == row[key] for key in same) for old in read_table()):
        return
    text = io.StringIO()
    csv.DictWriter(text, COLUMNS, lineterminator="\n").writerow(row)
    configs.append_file(TABLE, text.getvalue())


def describe(row):
    """Return the result of an entry as a text of several lines."""
    p = float(row["p"])
    relation = "below" if float(row["mean_loss"]) < TARGET else "not below"
    lines = [
        f"{row['name']}: {int(row['steps']):,} steps, {int(row['parameters']):,} "
        f"parameters, {row['gflops_per_step']} GFLOP in a step, {row['minutes']} minutes "
        f"for a seed",
        f"  losses   {row['losses']}",
        f"  mean     {row['mean_loss']}, {relation} the target {TARGET} (p = {p:.2g})",
        f"  verdict  {row['verdict']}",
    ]
    if row["time_ratio"]:
        lines.append(f"  time     {row['time_ratio']} of the time of tiny")
    return "\n".join(lines)


# ---- the command -----------------------------------------------------------------------


def note_of(cfg):
    """Return the settings in which an entry differs from tiny, as one line of text."""
    changed = configs.differences(cfg, RECIPES["tiny"])
    return ", ".join(f"{name} {value}" for name, (value, _) in changed.items())


def run_entry(path, args):
    """Train and evaluate the seeds of an entry, and return its row of the table.

    path: the recipe file. args: the options of the command.
    """
    check_files()
    limit = limits()
    # Load the entry only now, because its code may change the model.
    source = path.read_text()
    recipe = configs.load_recipe(str(path))
    if len(configs.RECIPE_CODE[str(path)]) > 1:
        raise UserError(
            f"{path} imports another Python file of yours: write the entry in one file."
        )
    configs.check(recipe)
    sizes = check_rules(recipe, source, limit, args.track)
    folder = Path("runs/speedrun", path.stem)
    seeds = range(args.seeds)
    runs = [(run_config(recipe, seed), folder / f"seed_{seed}") for seed in seeds]
    ratio = ""
    if args.track == "time":
        runs = [(cfg, folder / "time" / run_dir.name) for cfg, run_dir in runs]
        tiny = ROOT / "assets/speedrun/tiny.py"
        others = []
        # Train tiny and the entry in turns, so that both meet the same load.
        for seed, (cfg, run_dir) in zip(seeds, runs):
            others.append(folder / "time" / f"tiny_{seed}")
            baseline = run_config(RECIPES["tiny"], seed)
            train_run(tiny, RECIPES["tiny"], baseline, others[-1], threads=2)
            train_run(path, recipe, cfg, run_dir, threads=2)
        spent, compared = (
            sum(map(training_minutes, folders))
            for folders in ([run_dir for _, run_dir in runs], others)
        )
        ratio = f"{spent / compared:.3f}"
    else:
        with ThreadPoolExecutor(args.jobs) as pool:
            jobs = [pool.submit(train_run, path, recipe, *run, 1) for run in runs]
            for job in jobs:
                job.result()
    losses = [held_out_loss(*run) for run in runs]
    check_probabilities(*runs[0])
    minutes = statistics.mean(training_minutes(run_dir) for _, run_dir in runs)
    verdict = "baseline"
    if recipe != RECIPES["tiny"]:
        record = last_record(read_table())
        verdict = judge(losses, recipe.train.steps, record, args.track)
    return make_row(
        path.stem,
        recipe,
        losses,
        sizes,
        minutes,
        time_ratio=ratio,
        verdict=verdict,
        notes=note_of(recipe),
    )


def write_ideas(path):
    """Write a recipe file for each idea of a table, and return the paths of these files.

    path: a JSON file with the settings of each idea, such as
        {"adamw": {"train.optimizer": "adamw", "train.learning_rate": 0.002}}. The
        settings of "every idea" hold for each idea that does not set them itself.
    """
    table = configs.read_json(path, {str: {str: SCALARS}}, "correct this file")
    common = table.pop("every idea", {})
    paths = []
    for name, settings in table.items():
        lines = [
            f"    {setting!r}: {value!r},\n"
            for setting, value in {**common, **settings}.items()
        ]
        text = (
            "from configs import RECIPES, override\n\n"
            f"CHANGES = {{\n{''.join(lines)}}}\n"
            'CONFIG = override(RECIPES["tiny"], CHANGES)\n'
        )
        paths.append(Path("runs/speedrun", name, f"{name}.py"))
        if not paths[-1].exists() or paths[-1].read_text() != text:
            configs.write_file(paths[-1], text)
    return paths


def run_many(paths, args):
    """Run several entries, each with a command of its own, and return the exit status.

    args: the options of the command. Each command trains one seed at a time, and several
    commands run at the same time.
    """

    def run(path):
        command = [sys.executable, __file__, path, "--jobs", 1, "--seeds", args.seeds]
        command += ["--save"] if args.save else []
        result = subprocess.run(list(map(str, command)), capture_output=True, text=True)
        print(result.stdout.strip() or f"{path.stem}: {result.stderr.strip()}")
        return result.returncode

    with ThreadPoolExecutor(args.jobs) as pool:
        return max(pool.map(run, paths))


def main(argv):
    parser = argparse.ArgumentParser(
        usage="python assets/speedrun.py FILE [FILE ...] [options]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.error = configs.refuse_flags
    parser.add_argument(
        "files", nargs="+", type=Path, help="recipe files, or JSON files with ideas"
    )
    parser.add_argument(
        "--track",
        choices=("steps", "time"),
        default="steps",
        help="what to measure: steps (default), or minutes on two cores",
    )
    parser.add_argument(
        "--seeds",
        type=int,
        choices=(3, 5),
        default=5,
        help="number of seeds: 5 for a record (default), or 3 to screen an idea",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=os.cpu_count(),
        help="number of runs that train at the same time on track steps (default: the "
        "number of CPU cores)",
    )
    parser.add_argument(
        "--save", action="store_true", help="append the result to assets/speedrun.csv"
    )
    args = parser.parse_args(argv)
    files = [path.resolve() for path in args.files]
    os.chdir(ROOT)
    paths = []
    for path in files:
        paths += write_ideas(path) if path.suffix == ".json" else [path]
    if len(paths) > 1:
        return run_many(paths, args)
    partition.start_jax(BASELINE)
    row = run_entry(paths[0], args)
    print(describe(row))
    if args.save:
        append_row(row)


if __name__ == "__main__":
    configs.run_command(main)
