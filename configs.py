"""Every knob and every recipe, in one place, with nothing but the standard library.

- A recipe is a value of the frozen dataclass Config: six sections of plain fields.
- The comment beside a field is its help text; its choices or its range stand in its default.
- Every script takes `--config RECIPE` and changes single fields: `--train.steps 500`.
- The result is written to RUN_DIR/config.json, where every other script reads it: no flag twice.
- A Python file that defines CONFIG is a recipe too, and may add to the tables named below.

    python configs.py               list the recipes
    python configs.py small_c4      print one, field by field
"""

import argparse
import contextlib
import dataclasses
import difflib
import fcntl
import functools
import inspect
import json
import math
import os
import re
import runpy
import sys
import tempfile
import traceback
import types
import zlib
from dataclasses import dataclass, field, replace
from pathlib import Path


class UserError(Exception):
    """A mistake of the user's: one sentence and what to do next; no traceback, exit status 2."""


def one_of(default, *others):
    """A field that takes one of these values."""
    return field(default=default, metadata={"choices": (default, *others)})


def between(low, high, default):
    """A field whose number has bounds; a whole number without bounds is at least 1."""
    return field(default=default, metadata={"bounds": (low, high)})


def at_least(low, default):
    return between(low, math.inf, default)


@dataclass(frozen=True)
class ModelConfig:
    # rows of the embedding: the vocabulary's ids, rounded up to 128
    vocab_size: int = 32128
    # width of the residual stream
    d_model: int = 512
    # width inside the feed-forward layer
    d_ff: int = 1024
    # width of one attention head; num_heads * d_kv need not be d_model
    d_kv: int = 64
    # attention heads
    num_heads: int = 6
    # encoder layers
    num_layers: int = 8
    # decoder layers; 0 is an encoder alone
    num_decoder_layers: int = at_least(0, 8)
    # [gated_]NAME of model.ACTIVATIONS; T5 1.0: relu
    activation: str = "gated_gelu"
    # T5 1.0: the embedding is the output layer too, scaled by d_model^-0.5
    tied: bool = False
    # rows of the table of relative-position biases
    relative_buckets: int = at_least(4, 32)
    # all distances from here on share the last bucket
    relative_max_distance: int = 128
    # UMT5: a table of biases for each layer, not one for a stack
    layer_biases: bool = False
    # 0 to pretrain T5 1.1, 0.1 to fine-tune it
    dropout: float = between(0, 0.99, 0.0)
    # auto: bfloat16, on a CPU float32
    dtype: str = one_of("auto", "float32", "bfloat16")
    # what the backward pass finds kept
    remat: str = one_of("dots", "none", "full")


@dataclass(frozen=True)
class DataConfig:
    # KIND:NAME, see README; empty: the task's own, python: for span_corruption
    source: str = ""
    # empty: the source's validation split, or its first 1 %, held out
    validation_source: str = ""
    # a task or mixture; python data.py --list prints their names
    task: str = "span_corruption"
    # tasks or mixtures, with commas, to evaluate while training; empty: task
    eval_tasks: str = ""
    # what fields are called in the source: text=content or inputs=q,targets=a
    fields: str = ""
    # train:PIECES, of the source; a SentencePiece model; bytes; ids:N
    vocab: str = "train:32000"
    # tokens of a row of inputs, EOS included
    inputs_length: int = 512
    # tokens of a row of targets, EOS included
    targets_length: int = 114
    # several examples in a row of a training batch, where they fit
    pack: bool = True
    # false: token files that training has left behind are removed
    keep_tokens: bool = True
    # part of the tokens that spans remove
    noise_density: float = between(0.001, 0.999, 0.15)
    # tokens of a removed span, on average
    mean_span_length: float = between(1, 1000, 3.0)
    # where token files lie, a folder for each source and vocabulary
    prepared_dir: str = "prepared"
    # where TFDS datasets lie; empty: TFDS_DATA_DIR or ~/tensorflow_datasets
    tfds_dir: str = ""
    # at what cannot be read: stop, or skip it and count
    on_error: str = one_of("stop", "skip")


@dataclass(frozen=True)
class TrainConfig:
    # the last step, absolute: start_step included
    steps: int = 10_000
    # 1,000,000 where a recipe continues a published checkpoint
    start_step: int = at_least(0, 0)
    # what --init_from takes: all is with optimizer and step
    restore: str = one_of("params", "all")
    # rows of a step, over all devices and microbatches
    batch_size: int = 128
    # the step's rows go through the model in this many parts
    microbatches: int = 1
    # an entry of train.OPTIMIZERS
    optimizer: str = "adafactor"
    # the schedule's factor "constant"
    learning_rate: float = at_least(0, 1.0)
    # product of T5X's factors, see train.py
    schedule: str = "constant * rsqrt_decay"
    # rsqrt_decay is flat until here, linear_warmup climbs until here
    warmup_steps: int = 10_000
    # subtracted from the step before the schedule sees it
    schedule_offset: int = at_least(0, 0)
    # of decay_every, and the slope of linear_decay
    decay_factor: float = 0.5
    # of decay_every
    steps_per_decay: int = 20_000
    # of cosine_decay
    steps_per_cycle: int = 100_000
    # adamw: times the learning rate; adafactor: not, as T5X
    weight_decay: float = at_least(0, 0.0)
    # weight of log(Z)^2, which keeps the logits near zero
    z_loss: float = at_least(0, 1e-4)
    # of the target's probability, to all others
    label_smoothing: float = between(0, 0.99, 0.0)
    # none: real target tokens; T5X's: 233472
    loss_divisor: float | None = at_least(1e-6, None)
    # steps between two lines of metrics
    log_every: int = at_least(0, 10)
    # steps between two evaluations, 0 for none
    eval_every: int = at_least(0, 1000)
    # steps between two evaluations on decoded text, 0 for none
    infer_every: int = at_least(0, 0)
    # batches of one evaluation; 0 for the whole split
    eval_batches: int = at_least(0, 20)
    # steps between two checkpoints, 0 for none
    save_every: int = at_least(0, 1000)
    # write checkpoints in the background, from one copy in memory
    async_save: bool = True
    # checkpoints that stay, the newest
    keep: int = 3
    # a metric, as in metrics.jsonl, whose best checkpoint stays beside them
    keep_best: str = ""
    # FIRST:LAST, steps whose trace jax.profiler writes to RUN_DIR/profile
    profile: str = ""
    # of weights, order of the data, noise and dropout
    seed: int = between(0, 2**31 - 1, 0)


@dataclass(frozen=True)
class DecodeConfig:
    # 0: greedy, or sampling; from 1 on T5X's beam search
    beams: int = between(0, 1024, 0)
    # exponent of the beams' length penalty
    alpha: float = 0.6
    # ((5 + n) / 6) ** alpha as in T5X, or n ** alpha
    penalty: str = one_of("gnmt", "length")
    # tokens generated at most, EOS included; none: data.targets_length
    max_len: int | None = None
    # of sampling; 0 is greedy, or 1 with top_k or top_p
    temperature: float = at_least(0, 0.0)
    # sample from the k likeliest tokens; 0: from all
    top_k: int = at_least(0, 0)
    # sample from the likeliest of this probability; 0: all
    top_p: float = between(0, 1, 0.0)
    # answers to an example: samples, or the best beams
    num_return: int = 1
    # write all of them with their scores, even if it is a single answer
    return_all: bool = False
    # examples decoded together; changes no result
    batch_size: int = 32


@dataclass(frozen=True)
class MeshConfig:
    # devices that share one copy of the model: tensor parallelism
    model: int = 1
    # split weights and optimizer over the data axis too (ZeRO-3)
    fsdp: bool = False


@dataclass(frozen=True)
class DistributedConfig:
    # HOST:PORT of process 0; empty: as the cluster says, or a single process
    coordinator: str = ""
    # how many processes there are
    processes: int | None = None
    # which of them this process is, from 0
    process: int | None = at_least(0, None)
    # seconds without a sign of life after which a process counts as dead
    timeout: int = 100


@dataclass(frozen=True)
class Config:
    name: str
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)


SECTIONS = ("model", "data", "train", "decode", "mesh", "distributed")

# What a recipe file may add to, under the same names; the modules put plain T5's own entries here:
# data.py TASKS and MIXTURES, model.py ACTIVATIONS, evaluate.py METRICS, train.py OPTIMIZERS.
TASKS, MIXTURES, ACTIVATIONS, METRICS, OPTIMIZERS = {}, {}, {}, {}, {}

# Of several processes the first alone speaks, and none that fails waits for the others.
prints_progress = single_process = True


def escape_controls(text):
    """Text with its control characters written out: a terminal shows them and does not obey."""
    return re.sub(
        r"[^\n\t\x20-\x7e\xa0-\U0010ffff]",
        lambda found: found[0].encode("unicode_escape").decode(),
        str(text),
    )


def note(text, always=False):
    """Tell the user something that is not a result, on standard error."""
    if prints_progress or always:
        print(escape_controls(text), file=sys.stderr, flush=True)


# ====== below: recipes, the command line, run directories, checks, files ==========================

# ---- recipes -------------------------------------------------------------------------------------

SIZES = {  # T5 1.1, t5x/examples/t5/t5_1_1/{size}.gin
    size: ModelConfig(
        d_model=width,
        d_ff=inner,
        num_heads=heads,
        num_layers=layers,
        num_decoder_layers=layers,
    )
    for size, width, inner, heads, layers in (
        ("small", 512, 1024, 6, 8),
        ("base", 768, 2048, 12, 12),
        ("large", 1024, 2816, 16, 24),
        ("xl", 2048, 5120, 32, 24),
        ("xxl", 4096, 10240, 64, 24),
    )
}

# T5 1.0 small, t5x/examples/t5/t5_1_0/small.gin
T5_1_0_SMALL = ModelConfig(
    d_ff=2048,
    num_heads=8,
    num_layers=6,
    num_decoder_layers=6,
    activation="relu",
    tied=True,
    dropout=0.1,
)
TINY = ModelConfig(
    vocab_size=2176,
    d_model=128,
    d_ff=256,
    d_kv=32,
    num_heads=4,
    num_layers=2,
    num_decoder_layers=2,
)
BASE_DROPOUT = replace(SIZES["base"], dropout=0.1)

C4 = DataConfig(source="tfds:c4/en")
WMT = DataConfig(task="wmt_t2t_ende_v003", inputs_length=256, targets_length=256)
P3 = DataConfig(task="t0_train", inputs_length=1024, targets_length=256)
RO = DataConfig(
    source="hf:dumitrescustefan/rlm",
    vocab="train:63900",
    targets_length=256,
    keep_tokens=False,
)  # 63,900 pieces and 100 sentinels: 64,000 rows

BLEU = "inference_eval/wmt_t2t_ende_v003/bleu"
BEAMS = DecodeConfig(beams=4, batch_size=64)
# t5x/configs/runs/finetune.gin: a constant rate from a published checkpoint on, whose 1,000,000
# steps count. Evaluated on whole splits; T5X's train_eval takes 20 batches, its infer_eval all.
FINETUNE = TrainConfig(
    start_step=1_000_000,
    steps=1_020_000,
    learning_rate=1e-3,
    schedule="constant",
    infer_every=1000,
    eval_batches=0,
    save_every=5000,
)
# Raffel et al. 2020, section 3.1.3: 2^18 steps, and the best of the checkpoints is reported.
PAPER = replace(FINETUNE, steps=1_000_000 + 2**18, eval_every=5000, infer_every=5000)
# T0, Sanh et al. 2022 and bigscience-workshop/t-zero, training/README.md: from the LM-adapted T5
# at step 1,100,000, 12,200 steps of 2^20 input tokens. The 8 microbatches are theirs, of 2 rows on
# each of 64 copies of the model; nothing is evaluated on the way.
T0 = TrainConfig(
    start_step=1_100_000,
    steps=1_112_200,
    batch_size=1024,
    microbatches=8,
    learning_rate=1e-3,
    schedule="constant",
    eval_every=0,
)
# The Romanian models, github.com/dumitrescustefan/t5x_models, ro_t5x_base_pretrain.gin
RO_TRAIN = TrainConfig(steps=2_000_000, batch_size=128, save_every=10_000, keep=5)

RECIPES = {
    cfg.name: cfg
    for cfg in (
        # The first impression: learns for about two minutes on two CPU cores, downloads nothing. Its
        # rows are short because blanks are filled from near words, and short rows make many of them.
        Config(
            "tiny",
            TINY,
            DataConfig(vocab="train:2000", inputs_length=32, targets_length=8),
            TrainConfig(
                steps=1500,
                batch_size=64,
                learning_rate=0.05,
                warmup_steps=50,
                schedule="constant * linear_warmup * cosine_decay",
                steps_per_cycle=1500,
                eval_every=300,
                save_every=500,
            ),
        ),
        # Fine-tunes the tiny run on tasks made by rule, which it learns to answer without a mistake:
        # python train.py --config tiny_finetune --init_from runs/tiny
        Config(
            "tiny_finetune",
            TINY,
            DataConfig(
                task="by_rule", vocab="train:2000", inputs_length=64, targets_length=64
            ),
            TrainConfig(
                steps=700,
                batch_size=32,
                learning_rate=0.02,
                warmup_steps=50,
                schedule="constant * linear_warmup * cosine_decay",
                steps_per_cycle=700,
                eval_every=350,
                infer_every=700,
                eval_batches=0,
                save_every=350,
            ),
        ),
        # The proof that it learns as T5X does: on the same examples T5X's own train program reaches a
        # held-out accuracy of .32 to .48 at step 200, .75 to .88 at 400, .95 to .99 at 600 and .989 to
        # .997 at 1000, over 5 seeds. As there the loss is a plain sum: its scale matters to Adafactor
        # only where gradients come near its epsilon, as those of ids that never occur do.
        Config(
            "toy_reverse",
            ModelConfig(
                vocab_size=128,
                d_model=64,
                d_ff=128,
                d_kv=16,
                num_heads=4,
                num_layers=2,
                num_decoder_layers=2,
                dtype="float32",
            ),
            DataConfig(
                source="reverse:",
                task="text_to_text",
                vocab="ids:128",
                inputs_length=16,
                targets_length=16,
                pack=False,
            ),
            TrainConfig(
                steps=1000,
                batch_size=32,
                learning_rate=0.01,
                schedule="constant",
                loss_divisor=1.0,
                log_every=50,
                eval_every=200,
                infer_every=1000,
                eval_batches=0,
                save_every=500,
            ),
        ),
        # The benchmark of train.py itself: T5 1.1 small on random ids, nothing evaluated or saved.
        Config(
            "small_bench",
            replace(SIZES["small"], dtype="float32"),
            DataConfig(source="random:"),
            TrainConfig(steps=10, batch_size=8, log_every=1, eval_every=0, save_every=0),
        ),
        # Pretraining on C4: t5x/examples/t5/t5_1_1/examples/{small,base}_c4_pretrain.gin, the larger
        # sizes likewise. By t5x/configs/runs/pretrain.gin the rate is 0.01 for 10,000 steps, then
        # 1 / sqrt(step). allenai's files: --data.source 'jsonl:en/c4-{split}.*.json.gz'
        Config("small_c4", SIZES["small"], C4, TrainConfig(steps=10_000, batch_size=256)),
        *(
            Config(
                f"{size}_c4",
                SIZES[size],
                C4,
                TrainConfig(steps=100_000, batch_size=256, eval_every=2000),
            )
            for size in ("base", "large", "xl", "xxl")
        ),
        # LM adaptation, Lester et al. 2021, section 3.1: 100,000 steps more on prefixes and what
        # follows them, at pretraining's rate. --init_from a run of T5 1.1 at step 1,000,000
        Config(
            "small_lm_adapt",
            SIZES["small"],
            replace(C4, task="prefix_lm", targets_length=512),
            TrainConfig(start_step=1_000_000, steps=1_100_000, batch_size=256),
        ),
        # Translation: t5x/examples/t5/t5_1_1/examples/{base_wmt_from_scratch, small_wmt_finetune,
        # base_wmt_finetune}.gin
        Config(
            "base_wmt_scratch",
            SIZES["base"],
            WMT,
            TrainConfig(
                steps=50_000,
                eval_every=500,
                infer_every=500,
                eval_batches=0,
                save_every=5000,
                keep_best=BLEU,
            ),
            BEAMS,
        ),
        Config(
            "small_wmt_finetune", SIZES["small"], WMT, replace(FINETUNE, keep_best=BLEU)
        ),
        Config(
            "base_wmt_finetune",
            BASE_DROPOUT,
            WMT,
            replace(FINETUNE, eval_every=100, infer_every=100, keep_best=BLEU),
            BEAMS,
        ),
        # Trains on all of GLUE and evaluates one task: t5x/docs/usage/finetune.md. The targets' lengths
        # here and below: t5/models/gin/sequence_lengths/*.gin
        Config(
            "small_glue_finetune",
            T5_1_0_SMALL,
            DataConfig(
                task="glue_v002_proportional",
                eval_tasks="glue_stsb_v002",
                targets_length=84,
            ),
            replace(
                FINETUNE,
                steps=1_500_000,
                keep_best="inference_eval/glue_stsb_v002/spearman_corrcoef",
            ),
        ),
        Config(
            "base_super_glue",
            BASE_DROPOUT,
            DataConfig(task="super_glue_v102_proportional", targets_length=62),
            PAPER,
        ),
        Config(
            "base_squad",
            BASE_DROPOUT,
            DataConfig(task="squad_v010_allanswers", targets_length=97),
            replace(PAPER, keep_best="inference_eval/squad_v010_allanswers/f1"),
        ),
        Config(
            "base_cnn_dailymail",
            BASE_DROPOUT,
            DataConfig(task="cnn_dailymail_v002", targets_length=512),
            replace(PAPER, keep_best="inference_eval/cnn_dailymail_v002/rougeLsum"),
            BEAMS,
        ),
        # --data.source seqio:P3, or parquet:P3; --data.task t0+_train or t0++_train
        *(
            Config(f"{size}_t0", replace(SIZES[size], dropout=0.1), P3, T0)
            for size in ("small", "xxl")
        ),
        # The text is streamed; any other will do: --data.source 'text:DIR/*.txt'
        Config("base_ro", replace(SIZES["base"], vocab_size=64_000), RO, RO_TRAIN),
        Config(
            "large_ro",
            replace(SIZES["large"], vocab_size=64_000),
            replace(RO, targets_length=512),
            RO_TRAIN,
        ),
        # Goes on with mT5, whose vocabulary comes with --init_from, at the rate it ended with.
        Config(
            "mt5_base_ro",
            replace(SIZES["base"], vocab_size=250_112),
            RO,
            replace(
                RO_TRAIN,
                start_step=1_000_000,
                learning_rate=0.4,
                save_every=25_000,
                keep=3,
            ),
        ),
        # Fine-tuning on pairs of one's own, --data.source jsonl:pairs.jsonl; the weights come with
        # --init_from: T5 1.1, FLAN, T0, LM-adapted; UMT5 (Chung et al. 2023).
        *(
            Config(
                f"{size}_pairs",
                replace(SIZES[size], dropout=0.1),
                DataConfig(task="text_to_text"),
                FINETUNE,
            )
            for size in ("small", "base", "large")
        ),
        Config(
            "umt5_small",
            replace(SIZES["small"], vocab_size=256_384, layer_biases=True, dropout=0.1),
            DataConfig(task="text_to_text"),
            FINETUNE,
        ),
    )
}


# ---- command line --------------------------------------------------------------------------------

# What may change when a run goes on; any other difference is another run.
FREE = {
    "mesh",
    "distributed",
    "decode",
    "data.keep_tokens",
    *(
        f"train.{name}"
        for name in (
            "steps",
            "log_every",
            "eval_every",
            "infer_every",
            "eval_batches",
            "save_every",
            "async_save",
            "keep",
            "keep_best",
            "microbatches",
            "profile",
        )
    ),
}
# Names that fields once had -> the field of today, and its value for theirs.
RENAMED = {"data.streaming": ("data.keep_tokens", lambda streaming: not streaming)}
DATA_FORMAT = 2  # changes when the batches of a step, or what is held out, change


def fields(cfg):
    """Config -> ("section.field", dataclass field, value) of every knob."""
    for section in SECTIONS:
        part = getattr(cfg, section)
        for knob in dataclasses.fields(part):
            yield f"{section}.{knob.name}", knob, getattr(part, knob.name)


def differences(cfg, other):
    """Two Configs -> {"section.field": (value, other value)} where they differ."""
    pairs = zip(fields(cfg), fields(other))
    return {name: (value, old) for (name, _, value), (_, _, old) in pairs if value != old}


def override(cfg, changes):
    """Config and {"section.field": value}, old names among them -> Config."""
    for name, value in changes.items():
        if name in RENAMED:
            name, translated = RENAMED[name]
            value = translated(value)
        section, knob = name.split(".")
        cfg = replace(cfg, **{section: replace(getattr(cfg, section), **{knob: value})})
    return cfg


def parse_value(name, kind, text):
    """The text of a flag -> a value of the field's type."""
    if isinstance(kind, types.UnionType):  # int | None
        return (
            None if text.lower() == "none" else parse_value(name, kind.__args__[0], text)
        )
    try:
        return (
            {"true": True, "false": False}[text.lower()] if kind is bool else kind(text)
        )
    except (ValueError, KeyError):
        wanted = "true or false" if kind is bool else kind.__name__
        raise UserError(f"--{name} takes {wanted}, not {text!r}.") from None


def nearest(word, known):
    """A word -> "; did you mean X?", or nothing where no known word is near."""
    close = difflib.get_close_matches(word, known, 1, 0.4)
    return f"; did you mean {close[0]}?" if close else ""


@functools.cache
def field_help(section):
    """{field: the comment above it} of a section's dataclass."""
    source = inspect.getsource(type(section))
    comments = re.findall(r"^((?:    # .*\n)+)    (\w+):", source, re.MULTILINE)
    return {name: " ".join(re.findall(r"# (.*)", text)) for text, name in comments}


def parse_args(description, argv, **flags):
    """Command line -> (Namespace of config, run_dir and `flags`, {"section.field": value}). flags:
    name=dict of argparse's add_argument; a name that ends in "_" is positional."""

    def refuse(message):
        raise UserError(f"{message}; --help lists all flags.")

    parser = argparse.ArgumentParser(
        description=description,
        allow_abbrev=False,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.error = refuse
    parser.add_argument(
        "--config", help="a recipe's name, or a Python file that defines CONFIG"
    )
    parser.add_argument("--run_dir", help="folder of the run; by default runs/NAME")
    for name, options in flags.items():
        parser.add_argument(
            *([name[:-1]] if name[-1] == "_" else [f"--{name}"]), **options
        )
    blank, kinds = Config(""), dict.fromkeys(RENAMED, bool)
    for name, knob, _ in fields(blank):
        kinds[name] = knob.type
        text = field_help(getattr(blank, name.split(".")[0]))[knob.name].replace(
            "%", "%%"
        )
        parser.add_argument(f"--{name}", metavar="", default=argparse.SUPPRESS, help=text)
    for name in RENAMED:
        parser.add_argument(
            f"--{name}", default=argparse.SUPPRESS, help=argparse.SUPPRESS
        )
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        hint = nearest(unknown[0].lstrip("-").split("=")[0], [*kinds, *vars(args)])
        raise UserError(
            f"Unknown argument {unknown[0]}{hint or '; --help lists all flags.'}"
        )
    given = {name: vars(args).pop(name) for name in kinds if name in args}
    return args, {
        name: parse_value(name, kinds[name], text) for name, text in given.items()
    }


def load_recipe(name):
    """A recipe's name, or the path of a Python file that defines CONFIG -> Config."""
    if not name.endswith(".py"):
        if name not in RECIPES:
            raise UserError(
                f"Unknown recipe {name}{nearest(name, RECIPES) or ';'} "
                f"python configs.py lists them."
            )
        return RECIPES[name]
    if not os.path.exists(name):
        raise UserError(
            f"There is no file {name}: --config takes a recipe's name or a Python file."
        )
    try:
        defined = runpy.run_path(name, run_name="recipe")
    except (Exception, SystemExit) as error:
        raise UserError(
            f"{name} cannot be loaded ({type(error).__name__}: {error})."
        ) from error
    cfg = defined.get("CONFIG")
    if not isinstance(cfg, Config):
        raise UserError(f"{name} does not define CONFIG, a value of configs.Config.")
    tables = {
        "TASKS": TASKS,
        "MIXTURES": MIXTURES,
        "ACTIVATIONS": ACTIVATIONS,
        "METRICS": METRICS,
        "OPTIMIZERS": OPTIMIZERS,
    }
    for title, table in tables.items():
        added = defined.get(title, {})
        if not isinstance(added, dict) or not all(isinstance(key, str) for key in added):
            raise UserError(f"{name}: {title} must be a dict whose keys are names.")
        table.update(added)
    check_types(cfg, name)
    return cfg


def read_run(run_dir):
    """Run directory -> (the Config it was trained with, config.json as it is)."""
    path = to_path(run_dir) / "config.json"
    if not path.exists():
        raise UserError(
            f"There is no run in {run_dir} (no config.json): train.py makes one."
        )
    form = {
        "name": str,
        "data_format?": int,
        "corpus?": str,
        **{f"{section}?": dict for section in SECTIONS},
    }
    stored = read_json(path, form, "restore it from a copy")
    values = {
        f"{section}.{knob}": value
        for section in SECTIONS
        for knob, value in stored.get(section, {}).items()
    }
    if strange := sorted(
        {*values} - {name for name, *_ in fields(Config(""))} - {*RENAMED}
    ):
        raise UserError(
            f"{path} has fields that this version does not know: {', '.join(strange)}."
        )
    cfg = override(Config(stored["name"]), values)
    check_types(cfg, path)
    return cfg, stored


def load_run(run_dir):
    """Run directory -> the Config it was trained with; its recipe file is not run."""
    return read_run(run_dir)[0]


def load_run_recipe(run_dir):
    """Run the recipe file that a run directory keeps, for its tables -> its CONFIG, or None. It is
    a program: that is said, and done only where tasks, objectives or optimizers are asked for."""
    path = to_path(run_dir) / "recipe.py"
    if not path.exists():
        return None
    note(f"running {path}, the recipe of this run")
    if not is_remote(run_dir):
        return load_recipe(str(path))
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "recipe.py").write_text(path.read_text())
        return load_recipe(os.path.join(folder, "recipe.py"))


def save_run(cfg, run_dir, corpus=""):
    """Write RUN_DIR/config.json, which load_run reads. corpus: a digest of the training tokens."""
    content = {
        "name": cfg.name,
        "data_format": DATA_FORMAT,
        "corpus": corpus,
        **dataclasses.asdict(cfg),
    }
    # they belong to the machine, not to the run
    del content["mesh"], content["distributed"]
    write_file(os.path.join(run_dir, "config.json"), json.dumps(content, indent=1))


def resolve(args, changes, recipe=False):
    """What parse_args returned -> Config: of the run, if --run_dir names one, or of the recipe.
    recipe: whether the run's own recipe file is needed, for its tasks."""
    if not args.run_dir:
        cfg = load_recipe(args.config or "tiny")
    elif args.config and not args.config.endswith(".py"):
        raise UserError(
            "--run_dir names a run, and that has its own configuration: leave out "
            "--config, unless it names the recipe file to run for its tables."
        )
    else:
        cfg = load_run(args.run_dir)
        if args.config:
            load_recipe(args.config)
        elif recipe:
            load_run_recipe(args.run_dir)
    cfg = override(cfg, changes)
    check(cfg)
    return cfg


def resolve_run(args, changes):
    """What parse_args returned -> (Config, run directory, recipe it began from), for training. A
    run directory that has checkpoints is its own recipe: with another --config or other flags the
    fields that differ are listed and refused, except those in FREE."""
    base = recipe = load_recipe(args.config or "tiny")
    run_dir = args.run_dir or os.path.join("runs", recipe.name)
    folder = to_path(run_dir)
    begun = (folder / "config.json").exists()
    old, stored = read_run(run_dir) if begun else (None, {})
    if begun and not args.config:
        base, recipe = old, load_run_recipe(run_dir) or RECIPES.get(old.name, old)
    cfg = override(base, changes)
    if begun and any(folder.glob("checkpoints/step_*/manifest.json")):
        changed = {
            name: values
            for name, values in differences(cfg, old).items()
            if not {name, name.split(".")[0]} & FREE
        }
        if changed:
            listed = ", ".join(
                f"{name} {new} (was {was})" for name, (new, was) in changed.items()
            )
            raise UserError(
                f"{run_dir} holds a run with another configuration: {listed}. Go on "
                f"without these flags, or name another --run_dir."
            )
        if (made := stored.get("data_format", 1)) != DATA_FORMAT:
            raise UserError(
                f"{run_dir} was begun by a version of plain T5 that made other batches "
                f"and held out other examples (data format {made}, now {DATA_FORMAT}): "
                f"take its weights into a new run with --init_from {run_dir}."
            )
    check(cfg)
    return cfg, run_dir, recipe


# ---- checks --------------------------------------------------------------------------------------


def check_json(value, form, at="it"):
    """Raise a ValueError that says where a JSON value has not this form: a type, or a tuple of
    types; [form] for a list; {str: form} for a dict of any names; {name: form} for a dict of these,
    where "name?" may be missing and others do not matter."""
    if isinstance(form, dict) and isinstance(value, dict):
        for name, inner in form.items():
            for key in value if name is str else [name.removesuffix("?")]:
                if key in value:
                    check_json(value[key], inner, f"{at}/{key}")
                elif not name.endswith("?"):
                    raise ValueError(f"{at} has no {name!r}")
    elif isinstance(form, list) and isinstance(value, list):
        for number, inner in enumerate(value):
            check_json(inner, form[0], f"{at}/{number}")
    elif type(value) not in (form if isinstance(form, tuple) else (form,)):
        raise ValueError(f"{at} is {json.dumps(value, default=str):.60}")


def read_json(path, form, cure="fetch it again"):
    """A JSON file -> its value, of this form; else a UserError names the file and the cure."""
    try:
        value = json.loads(path.read_text())
        check_json(value, form)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be used ({error}): {cure}.") from error
    return value


def checksum(value):
    """CRC-32 of a JSON value."""
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())


def write_checked(path, value):
    """Write a dict as JSON with its checksum; read_checked reads it."""
    write_file(path, json.dumps(value | {"check": checksum(value)}, indent=1))


def read_checked(path, form, cure="remove it, and it is made again"):
    """A dict that write_checked wrote, every byte of it verified."""
    value = read_json(path, form | {"check": int}, cure)
    if value.pop("check") != checksum(value):
        raise UserError(f"{path} is damaged: {cure}.")
    return value


def check_types(cfg, origin):
    """Refuse a section that is none, or a value of another type than its field's."""
    for section in SECTIONS:
        found, kind = getattr(cfg, section), type(getattr(Config(""), section))
        if type(found) is not kind:
            raise UserError(
                f"{origin}: {section} is {found!r:.60}, not a {kind.__name__}."
            )
    for name, knob, value in fields(cfg):
        kinds = getattr(knob.type, "__args__", (knob.type,))
        right = type(value) in (*kinds, *[int] * (float in kinds))
        if not right or isinstance(value, float) and math.isnan(value):
            raise UserError(
                f"{origin}: {name} is {value!r:.60}, not "
                f"{' or '.join(kind.__name__ for kind in kinds)}."
            )


def check(cfg):
    """Refuse values that no run can have, before anything is begun."""
    for name, knob, value in fields(cfg):
        choices = knob.metadata.get("choices")
        whole = knob.type in (int, int | None)
        low, high = knob.metadata.get("bounds", (1 if whole else -math.inf, math.inf))
        high = min(high, 2**31 - 1) if whole else high
        if choices and value not in choices:
            raise UserError(f"--{name} is one of {', '.join(choices)}, not {value!r}.")
        if type(value) in (int, float) and not low <= value <= high:
            bounds = (
                f"at least {low}" if high == math.inf else f"between {low} and {high}"
            )
            raise UserError(f"--{name} must be {bounds}; it is {value}.")
    for name, value, table in (
        ("model.activation", cfg.model.activation.removeprefix("gated_"), ACTIVATIONS),
        ("train.optimizer", cfg.train.optimizer, OPTIMIZERS),
    ):
        if table and value not in table:  # empty in commands that need none
            raise UserError(
                f"--{name} {value} is unknown{nearest(value, table)}; there are "
                f"{', '.join(table)}, and a recipe file that you trust may define "
                f"others: --config RUN/recipe.py runs it."
            )
    m, t, length = cfg.model, cfg.train, cfg.data.inputs_length + cfg.data.targets_length
    if m.relative_max_distance <= m.relative_buckets // 2:
        raise UserError(
            f"--model.relative_max_distance must be above half of the "
            f"{m.relative_buckets} --model.relative_buckets."
        )
    require_memory(
        {"the rows of a step": 16 * t.batch_size * length},
        machine_memory(),
        "--train.batch_size, --data.inputs_length or --data.targets_length",
    )
    if t.batch_size % t.microbatches:
        raise UserError(
            f"--train.microbatches {t.microbatches} does not divide the {t.batch_size} "
            f"rows of --train.batch_size: change one of the two."
        )
    steps = re.fullmatch(r"(?:([1-9]\d{0,8}):(\d{1,9}))?", t.profile)
    if not steps or steps[1] and int(steps[1]) > int(steps[2]):
        raise UserError(f"--train.profile {t.profile}: write FIRST:LAST, such as 10:13.")
    d = cfg.distributed
    named = [d.coordinator, d.processes is not None, d.process is not None]
    if any(named) and not (
        all(named)
        and d.process < d.processes
        and re.fullmatch(r"\S+:\d{1,5}", d.coordinator)
    ):
        raise UserError(
            "--distributed.coordinator HOST:PORT, --distributed.processes N and "
            "--distributed.process I, from 0 to N - 1, go together."
        )
    d = cfg.decode
    samples = d.temperature or d.top_k or d.top_p
    if d.beams and samples:
        raise UserError(
            "--decode.beams searches and --decode.temperature, top_k and top_p sample: "
            "leave out the one or the others."
        )
    if not samples and d.num_return > max(1, d.beams):
        raise UserError(
            f"--decode.num_return {d.num_return} asks for as many --decode.beams, or "
            f"for sampling (--decode.temperature 1)."
        )


@functools.cache  # it is asked for every batch that is decoded
def machine_memory():
    """Bytes of memory that this machine, or this container, has."""
    bounds = [math.inf]
    with contextlib.suppress(OSError, ValueError):  # "max", or not Linux
        bounds.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    with contextlib.suppress(OSError, ValueError):
        bounds.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return min(bounds)


def require_memory(parts, there, levers):
    """Refuse what needs more bytes at once than are there. parts: {what: bytes}."""
    total = sum(parts.values())
    if total > there:
        held = ", ".join(
            f"{name} {size / 1e9:,.3g}" for name, size in parts.items() if size
        )
        raise UserError(
            f"This holds at least {total / 1e9:,.3g} GB at once ({held}), and there "
            f"are {there / 1e9:,.3g}: lower {levers}."
        )


def parse_shard(text):
    """ "I/N" -> (I, N), I from 0."""
    found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
    if not found or int(found[1]) >= int(found[2]):
        raise UserError(f"--shard {text}: write I/N, from 0/N to N-1/N.")
    return int(found[1]), int(found[2])


# ---- files ---------------------------------------------------------------------------------------


def is_remote(path):
    return "://" in str(path)


def to_path(name):
    """A local path, or a remote one such as gs://bucket/run, with pathlib's methods."""
    if not is_remote(name):
        return Path(name)
    from etils import epath  # for remote paths only

    return epath.Path(name)


@contextlib.contextmanager
def naming_file(path):
    """What goes wrong while a file is written names the file."""
    try:
        yield
    except OSError as error:
        raise OSError(
            error.errno, error.strerror or str(error), os.fspath(path)
        ) from error


def write_file(path, content):
    """Write bytes or text whole or not at all: to a temporary name, synced, then renamed."""
    path, content = (
        to_path(path),
        content.encode() if isinstance(content, str) else content,
    )
    if is_remote(path):  # there a file is whole when it is closed
        path.write_bytes(content)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp{os.getpid()}")
    try:
        with naming_file(path), open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def append_file(path, text):
    """Append text to a file; at a remote place, where that cannot be, write the file anew."""
    if is_remote(path):
        return write_file(path, (path.read_text() if path.exists() else "") + text)
    path.parent.mkdir(parents=True, exist_ok=True)
    with naming_file(path), open(path, "a") as file:
        file.write(text)


def lock(path, wait=False):
    """A file that is locked until it is closed, by the kernel after a kill. Where another process
    has the lock, waits or raises BlockingIOError."""
    file = open(path, "a+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        raise
    except OSError as error:  # a filesystem without locks
        note(
            f"{path} cannot be locked ({error}): see to it that only one process works there."
        )
    return file


# ---- a command -----------------------------------------------------------------------------------


def run_command(main):
    """Run main(argv) as a command: a UserError is one sentence on standard error and status 2."""
    script = os.path.basename(sys.argv[0])
    if vars(sys.modules["__main__"]).get("main") is main:
        # for a recipe's imports
        sys.modules[script.removesuffix(".py")] = sys.modules["__main__"]
    try:
        status = main(sys.argv[1:])
        sys.stdout.flush()
    except UserError as error:
        note(f"{script}: {error}", always=True)
        status = 2
    except BrokenPipeError:  # whoever read the output, head for instance, has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    except OSError as error:
        note(
            f"{script}: {error.filename or 'a file'} cannot be read or written "
            f"({error.strerror or error}): see to it, or name another.",
            always=True,
        )
        status = 1
    except KeyboardInterrupt:
        note("interrupted")
        status = 130
    except Exception:
        if single_process:
            raise
        traceback.print_exc()
        status = 1
    if (
        status and not single_process
    ):  # at a usual exit the processes would wait for one another
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def main(argv):
    if not argv:
        print(f"{'recipe':19} {'layers':22} {'task':28}  lengths batch     steps")
        for name, cfg in RECIPES.items():
            m, d, t = cfg.model, cfg.data, cfg.train
            size = f"{m.num_layers}+{m.num_decoder_layers} layers of {m.d_model}"
            print(
                f"{name:19} {size:22} {d.task:28} {d.inputs_length:>4}/{d.targets_length:<4} "
                f"{t.batch_size:>4} {t.steps:>9,}"
            )
        print(
            "\npython configs.py NAME prints one; python train.py --config NAME runs it."
        )
        return
    if argv[0].startswith("-"):
        print(__doc__.strip())
        return
    cfg = load_recipe(argv[0])
    for section in SECTIONS:
        print(section)
        part = getattr(cfg, section)
        for name, text in field_help(part).items():
            print(f"  {name:22} {getattr(part, name)!s:26} {text}")


if __name__ == "__main__":
    run_command(main)
