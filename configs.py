"""All settings of plain T5, and recipes: named values for these settings.

A setting is a field of a dataclass, with a comment, which is its help text. A recipe
is a Config; --config takes its name, or a Python file that defines CONFIG.

    python configs.py             list the recipes
    python configs.py small_c4    print every setting of a recipe
"""

import argparse
import dataclasses
import functools
import json
import math
import os
import sys
import types
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Iterable, Literal

import tyro


class UserError(SystemExit):
    """Ends the program, and prints its message without a traceback.

    Like every SystemExit, it passes `except Exception`.
    """


@functools.cache
def print_once(text: str) -> None:
    """Print a text once, to stderr."""
    print(text, file=sys.stderr)


# ---- settings --------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelConfig:
    """The architecture, and how it is computed."""

    # rows of the embedding table: T5 has 32,000 pieces, 100 sentinels and 28 unused ones
    vocab_size: int = 32128
    d_model: int = 512  # width of the residual stream
    d_ff: int = 1024  # width of the hidden layer of each MLP
    d_kv: int = 64  # width of an attention head; d_kv * num_heads may differ from d_model
    num_heads: int = 6  # attention heads of a layer
    num_layers: int = 8  # layers of the encoder
    num_decoder_layers: int = 8  # 0: an encoder alone, for infer.py --mode encode
    # gated_gelu in T5 1.1, relu in T5 1.0
    activation: Literal[
        "gated_gelu", "gated_silu", "gated_relu", "gelu", "silu", "relu"
    ] = "gated_gelu"
    tied: bool = False  # whether the embedding is also the output matrix, as in T5 1.0
    relative_buckets: int = 32  # buckets of relative positions
    relative_max_distance: int = 128  # longer distances share the last bucket
    per_layer_bias: bool = False  # whether each layer has position biases, as in UMT5
    dropout: float = 0.0  # dropped fraction: 0 to pretrain T5 1.1, 0.1 to fine-tune
    # dtype of the activations; auto is float32 on a CPU, else bfloat16
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    # rematerialization: what is saved for the backward pass, which computes the rest
    # again. none: everything; dots: products with weights, and the outputs of attention
    # kernels; full: only these outputs, which needs the least memory
    remat: Literal["dots", "none", "full"] = "dots"
    # xla: the code of model.py; kernel: one of extras/, or xla if none fits the GPU, the
    # dtype or the shapes; auto: xla on a CPU, else kernel
    attention_impl: Literal["auto", "xla", "kernel"] = "auto"
    # auto is extras/chunked_loss.py on a TPU and for large vocabularies, else full
    loss_impl: Literal["auto", "full", "chunked"] = "auto"

    @property
    def gated(self) -> bool:
        return self.activation.startswith("gated_")


@dataclass(frozen=True)
class DataConfig:
    """The text, and the examples that are made from it."""

    source: str = ""  # text instead of the task's own, such as 'jsonl:data/{split}*.gz'
    task: str = "span_corruption"  # task or mixture; see `python data.py --list`
    eval_tasks: str = ""  # tasks to evaluate, with commas; empty means the training task
    # FILE.model, FILE.json, bytes, train:N for N pieces, or numbers (for random ids)
    vocab: str = "train:32000"
    extra_ids: int = 100  # sentinels <extra_id_0>, ... added to the vocabulary
    inputs_length: int = 512  # input tokens in a row, with EOS; longer inputs are cut
    targets_length: int = 114  # target tokens in a row
    pack: bool = True  # whether short examples share a row
    noise_density: float = 0.15  # fraction of tokens that are removed, at least one
    mean_span_length: float = 3.0  # mean number of tokens in a removed span
    tfds_dir: str = ""  # folder of prepared TFDS datasets; empty: the default of TFDS


@dataclass(frozen=True)
class TrainConfig:
    """Training, evaluation and checkpoints. For settings ..._every, 0 means never."""

    steps: int = 10_000  # the step at which training ends, --train.start_step included
    start_step: int = 0  # steps that count as done: 1000000 for published T5
    # what --init_from loads: the weights, or also the optimizer's state and the step
    restore: Literal["params", "all"] = "params"
    batch_size: int = 128  # rows in a batch, over all devices
    microbatches: int = 1  # parts of a batch, computed one by one to save memory
    optimizer: Literal["adafactor", "adamw"] = "adafactor"
    # base rate; Adafactor multiplies it by the root mean square of each weight matrix
    learning_rate: float = 1.0
    # a product of constant (--train.learning_rate), linear_warmup, linear_decay,
    # rsqrt_decay, rsqrt_normalized_decay, decay_every, cosine_decay (see train.py)
    schedule: str = "constant * rsqrt_decay"
    # steps of linear_warmup, or before another decay than decay_every begins
    warmup_steps: int = 10_000
    schedule_offset: int = 0  # subtracted from the step, for the schedule
    decay_factor: float = 0.5  # factor of decay_every, or slope of linear_decay
    steps_per_decay: int = 20_000  # period of decay_every
    # period of cosine_decay; None: steps - schedule_offset
    steps_per_cycle: int | None = None
    # fraction of the weights that a step removes; AdamW multiplies it by the rate
    weight_decay: float = 0.0
    z_loss: float = 1e-4  # weight of (log Z)^2 in the loss
    label_smoothing: float = 0.0  # probability given to tokens other than the target
    # divisor of the summed loss; None: the number of target tokens of the batch
    loss_normalizing_factor: float | None = None
    log_every: int = 10  # steps between lines of metrics
    eval_every: int = 1000  # steps between computations of the held-out loss
    eval_batches: int = 20  # held-out batches for losses and metrics; 0 means all
    predict_every: int = 0  # steps between evaluations of generated text
    save_every: int = 1000  # steps between checkpoints
    keep: int = 3  # newest checkpoints to keep; 0 means all
    seed: int = 0  # of weights, order of examples, removed spans, dropout and sampling


@dataclass(frozen=True)
class DecodeConfig:
    """Generation of text: greedy, or by beam search, or by sampling."""

    beams: int = 0  # beams of beam search; 0 means none
    alpha: float = 0.6  # exponent of the length penalty of beam search
    # length penalty: ((5 + length) / 6)^alpha as in T5X, or length^alpha
    length_penalty: Literal["gnmt", "length"] = "gnmt"
    max_length: int | None = None  # most tokens to generate; None: data.targets_length
    # 0 means greedy decoding. With top_k or top_p, it means 1 (in T5X, always greedy).
    temperature: float = 0.0
    top_k: int = 0  # sample from the k most probable tokens; 0 means all
    top_p: float = 0.0  # sample from the most probable tokens with this mass; 0 means all
    num_return: int = 1  # samples or best beams of each input
    write_scores: bool = False  # whether to write scores, also of a single output
    batch_size: int = 32  # inputs that are decoded or scored together

    def __post_init__(self):
        if self.beams and self.do_sample:
            raise UserError("--decode.beams and sampling exclude each other.")
        if self.num_return > max(1, self.beams) and not self.do_sample:
            raise UserError("--decode.num_return needs that many beams, or sampling.")

    @property
    def do_sample(self) -> bool:
        """Whether ids are drawn at random. As in T5X, 1e-4 alone is greedy."""
        return self.temperature > 1e-4 or self.top_k > 0 or self.top_p > 0


@dataclass(frozen=True)
class MeshConfig:
    """The distribution over the devices."""

    model: int = 1  # devices that share each matrix (tensor parallelism)
    fsdp: bool = False  # whether devices with different rows also split the weights


@dataclass(frozen=True)
class DistributedConfig:
    """Several processes. Cloud TPUs and SLURM need none of these settings."""

    coordinator: str = ""  # address of process 0, such as 10.0.0.1:1234
    processes: int | None = None  # number of processes
    process: int | None = None  # number of this process, from 0
    timeout: int = 100  # seconds after which a lost process ends all others


@dataclass(frozen=True)
class Config:
    """All settings of a run."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    decode: DecodeConfig = DecodeConfig()
    mesh: MeshConfig = MeshConfig()


# ---- lists of settings: a new one may belong to some of them ---------------------------

# All numbers must be at least 0, these at least 1, and those in AT_MOST not larger.
AT_LEAST_1 = (
    "data.mean_span_length data.inputs_length data.targets_length train.batch_size "
    "train.microbatches train.warmup_steps train.steps_per_decay train.steps_per_cycle "
    "train.loss_normalizing_factor decode.batch_size decode.num_return "
    "decode.max_length mesh.model"
).split()
AT_MOST = {
    "model.dropout": 0.999,
    "data.noise_density": 0.99,
    "train.label_smoothing": 0.999,
    "train.seed": 2**31 - 1,
    "decode.top_p": 1,
}
# A resumed run may change these settings, although train.steps stretches a cosine, and
# train.microbatches changes the dropout. Any other change would be another experiment.
CHANGEABLE = (
    "decode mesh model.attention_impl model.loss_impl model.remat train.steps "
    "train.microbatches train.log_every train.eval_every train.predict_every "
    "train.eval_batches train.save_every train.keep data.tfds_dir"
).split()
# A run that starts from another one has its network, except for these fields.
NOT_INHERITED = "dropout", "dtype", "remat", "attention_impl", "loss_impl"
# evaluate.py adds changed settings to the name of a metric, except for these, those of
# devices, and, unless it decodes, those of decoding.
NOT_IN_METRIC_NAMES = "batch_size", "eval_tasks", "tfds_dir"

# ---- recipes ---------------------------------------------------------------------------


# fmt: off
def network(d_model: int, d_ff: int, heads: int, layers: int, **other) -> ModelConfig:
    return ModelConfig(d_model=d_model, d_ff=d_ff, num_heads=heads, num_layers=layers,
                       num_decoder_layers=layers, **other)


# The sizes of T5 1.1, as in t5x/examples/t5/t5_1_1/{size}.gin.
SIZES = {
    "small": network(512, 1024, 6, 8),
    "base": network(768, 2048, 12, 12),
    "large": network(1024, 2816, 16, 24),
    "xl": network(2048, 5120, 32, 24),
    "xxl": network(4096, 10240, 64, 24),
}
# 2176 is 2,000 pieces and 100 sentinels, rounded up to a multiple of 128
TINY = network(128, 256, 4, 1, vocab_size=2176, d_kv=32)
TINY_DATA = DataConfig(vocab="train:2000", inputs_length=32, targets_length=8)
TINY_TRAIN = TrainConfig(
    steps=1500, batch_size=64, learning_rate=0.08, warmup_steps=100, weight_decay=1e-3,
    schedule="constant * linear_warmup * cosine_decay", eval_every=300,
    # faster on a CPU: the arrays of half a batch are small enough for malloc to keep
    microbatches=2)
C4 = DataConfig(task="c4_v220_span_corruption")
C4_TRAIN = TrainConfig(steps=100_000, batch_size=256, eval_every=2000)
# As in t5x/configs/runs/finetune.gin. There, the user sets the number of steps, which
# includes those of pretraining, and 20 batches are evaluated.
FINETUNE = TrainConfig(
    steps=20_000, learning_rate=1e-3, schedule="constant",
    predict_every=1000, eval_batches=0, save_every=5000, keep=0)

RECIPES = {
    # A first try on the documentation of Python: nothing is downloaded.
    "tiny": Config(TINY, TINY_DATA, TINY_TRAIN),
    # Learn to write numbers as words, and more: add --init_from runs/tiny.
    "tiny_finetune": Config(
        TINY, replace(TINY_DATA, task="by_rule", inputs_length=64, targets_length=64),
        replace(TINY_TRAIN, steps=700, batch_size=32, learning_rate=0.02, weight_decay=0,
                eval_every=350, predict_every=700, eval_batches=0)),
    # Measure the speed of T5 small on random tokens.
    "small_bench": Config(
        replace(SIZES["small"], dtype="float32"),
        DataConfig(task="random", vocab="numbers"),
        TrainConfig(steps=10, batch_size=8, log_every=1, eval_every=0, save_every=0)),
    # Pretrain T5 1.1 on C4, as in t5x/examples/t5/t5_1_1/examples/*_c4_pretrain.gin
    # (small and base). All steps of small_c4 are warmup: rsqrt_decay is constant.
    "small_c4": Config(SIZES["small"], C4, TrainConfig(steps=10_000, batch_size=256)),
    **{f"{k}_c4": Config(SIZES[k], C4, C4_TRAIN) for k in ("base", "large", "xl", "xxl")},
    # LM adaptation (Lester et al. 2021), from which T0 starts.
    "small_lm_adapt": Config(
        SIZES["small"], replace(C4, task="c4_v220_prefix_lm", targets_length=512),
        TrainConfig(start_step=1_000_000, steps=1_100_000, batch_size=256)),
    # Your own pairs: add --data.source jsonl:pairs.jsonl --init_from RUN.
    **{f"{name}_pairs": Config(replace(SIZES[name], dropout=0.1),
                               DataConfig(task="text_to_text"), FINETUNE)
       for name in ("small", "base", "large")},
}
# fmt: on

# Without the folder extras/, sources are files or python:, vocabularies are of
# SentencePiece, and weights of Hugging Face. There are no kernels, plots, tasks of t5,
# random tokens and data for tiny_finetune.
HAS_EXTRAS = (Path(__file__).parent / "extras").is_dir()
# data.py, evaluate.py and extras/ fill these tables. A recipe file adds its TASKS and
# MIXTURES, and can define a VOCABULARY.
TASKS = {}  # {name: data.Task}
MIXTURES = {}  # {name: {task or mixture: rate}, or a function of a Config}
METRICS = {}  # {name: function of all targets and predictions}
VOCABULARY = None  # a tokenizer that replaces --data.vocab


def load_extras() -> None:
    """Import the files that add to RECIPES and to these tables."""
    if HAS_EXTRAS:
        from extras import libraries, t5_tasks, toys  # noqa: F401


def load_recipe(name: str) -> Config:
    """Return the Config of a recipe, or of a Python file that defines CONFIG.

    The tasks, mixtures and vocabulary of a file go into the tables above.
    """
    global VOCABULARY
    load_extras()
    if not name.endswith(".py"):
        if name not in RECIPES:
            raise UserError(f"There is no recipe {name}. There are {', '.join(RECIPES)}.")
        return RECIPES[name]
    sys.path.insert(0, str(Path(name).resolve().parent))  # It may import its neighbors.
    recipe = sys.modules["recipe"] = types.ModuleType("recipe")
    recipe.__file__ = name
    exec(compile(to_path(name).read_bytes(), name, "exec"), vars(recipe))
    TASKS.update(getattr(recipe, "TASKS", {}))
    MIXTURES.update(getattr(recipe, "MIXTURES", {}))
    VOCABULARY = getattr(recipe, "VOCABULARY", VOCABULARY)
    if not hasattr(recipe, "CONFIG"):
        raise UserError(f"{name} defines no CONFIG.")
    return recipe.CONFIG


# ---- the command line ------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """The flags of all commands except for convert.py."""

    # The flags of cfg have no prefix: --train.steps, and not --cfg.train.steps. Booleans
    # need a value, as in --mesh.fsdp True.
    cfg: tyro.conf.FlagConversionOff[Annotated[Config, tyro.conf.arg(name="")]]
    config: str = ""  # name of a recipe, or a Python file that defines CONFIG
    run_dir: str = ""  # folder of the run
    distributed: DistributedConfig = DistributedConfig()


def location_flags(argv: list[str] | None) -> argparse.Namespace:
    """Return --config, --run_dir and --init_from, which name the defaults for tyro."""
    parser = argparse.ArgumentParser(add_help=False)
    for flag in ("config", "run_dir", "init_from"):
        parser.add_argument(f"--{flag}", f"--{flag.replace('_', '-')}", default="")
    return parser.parse_known_args(argv)[0]


def parse(options_class: type, argv: list[str] | None = None):
    """Parse the flags of a command, which change settings of --run_dir or --config."""
    flags = location_flags(argv)
    if flags.run_dir and flags.config and not flags.config.endswith(".py"):
        raise UserError("With --run_dir, --config can only add the tasks of a .py file.")
    if flags.run_dir:
        cfg, _ = load_run_and_tasks(flags.run_dir, flags.config)
    else:
        cfg = load_recipe(flags.config or "tiny")
    return parse_flags(options_class(cfg), argv)


def parse_flags(options: Options, argv: list[str] | None) -> Options:
    """Change the settings that have a flag, and refuse numbers that are out of range."""
    changed = tyro.cli(
        type(options),
        default=options,
        args=argv,
        use_underscores=True,
        description=sys.modules[type(options).__module__].__doc__,
    )
    for name, value in flat_settings(changed.cfg).items():
        low, high = int(name in AT_LEAST_1), AT_MOST.get(name, math.inf)
        if isinstance(value, int | float) and not low <= value <= high:
            raise UserError(f"--{name} {value} is out of range.")
    return changed


# ---- runs ------------------------------------------------------------------------------


def flat_settings(cfg: Config) -> dict:
    """Return all settings as one dict, such as {"model.d_model": 512, ...}."""
    return {
        f"{section}.{name}": value
        for section, values in dataclasses.asdict(cfg).items()
        for name, value in values.items()
    }


def refuse_differences(cfg: Config, other: Config, may_differ: list, owner: str) -> None:
    """Stop if two Configs differ in a setting or section that is not in may_differ."""
    old = flat_settings(other)
    different = []
    for name, value in flat_settings(cfg).items():
        section = name.split(".")[0]
        if value != old[name] and name not in may_differ and section not in may_differ:
            different.append(f"--{name} {old[name]!r} (not {value!r})")
    if different:
        raise UserError(
            f"{owner} has {', '.join(different)}: leave out such flags or --config, or "
            f"start another run."
        )


def with_network_of(cfg: Config, origin: Config) -> Config:
    """Return a Config with the network and the vocabulary of another run."""
    own = {name: getattr(cfg.model, name) for name in NOT_INHERITED}
    model_cfg = replace(origin.model, **own)
    data_cfg = replace(cfg.data, vocab=origin.data.vocab, extra_ids=origin.data.extra_ids)
    return replace(cfg, model=model_cfg, data=data_cfg)


def run_dir_of(source):
    """Return the folder of a run, from the folder itself or from a checkpoint in it."""
    path = to_path(source)
    return path.parent.parent if (path / "complete").exists() else path


def load_run(source: str) -> tuple[Config, dict]:
    """Return the Config of a run or checkpoint, and the metadata stored with it."""
    path = run_dir_of(source) / "config.json"
    stored = json.loads(path.read_text()) if path.exists() else {}
    if "settings" not in stored:
        raise UserError(
            f"{source} is not a run. train.py starts one with --config NAME, and "
            f"convert.py makes one of other formats."
        )
    sections = {}
    for name, values in stored["settings"].items():
        defaults = getattr(Config(), name)  # such as ModelConfig()
        if unknown := values.keys() - vars(defaults).keys():
            raise UserError(f"{path} has {unknown}: a fork or older code wrote it.")
        if missing := vars(defaults).keys() - values.keys():  # newer than the run
            print_once(f"{path} lacks {name}.{missing}, which get their defaults.")
        sections[name] = replace(defaults, **values)
    return Config(**sections), stored["metadata"]


def load_run_and_tasks(run_dir: str, recipe: str = "") -> tuple[Config, dict]:
    """Load a run, and the tasks of its recipe file and of another recipe file."""
    own_recipe = to_path(run_dir) / "recipe.py"
    files = [str(own_recipe)] if own_recipe.exists() else []
    if recipe.endswith(".py"):
        # The copy in the run may import neighbors of the original.
        sys.path.insert(0, str(Path(recipe).resolve().parent))
        files.append(recipe)
    for file in files:
        load_recipe(file)
    return load_run(run_dir)


def refuse_unused_source(names: list[str], cfg: Config, run_cfg: Config) -> None:
    """Stop if flags change the task or the source of a run, but other tasks are named."""
    new, old = cfg.data, run_cfg.data
    is_changed = (new.task, new.source) != (old.task, old.source)
    are_of_p3 = all(x not in TASKS and ":" not in x for x in names)
    if is_changed and names != [new.task] and not are_of_p3:
        raise UserError(
            f"Another --data.source needs one task, that of --data.task, and not {names}."
        )


def save_run(cfg: Config, run_dir: str, **metadata) -> None:
    """Write a Config, without the section of the devices, and metadata to config.json."""
    settings = dataclasses.asdict(cfg)
    del settings["mesh"]
    content = {"settings": settings, "metadata": {"init_from": "", **metadata}}
    write_file(to_path(run_dir) / "config.json", json.dumps(content, indent=1))


# ---- files -----------------------------------------------------------------------------


def is_remote(path) -> bool:
    return "://" in str(path)


def to_path(name):
    """Return a pathlib.Path, or for gs://bucket/run an etils.epath.Path."""
    if not is_remote(name):
        return Path(name)
    from etils import epath

    return epath.Path(name)


def write_file(path, content: bytes | str | Iterable[bytes]) -> None:
    """Write a file atomically: a kill leaves the old file or the complete new one."""
    content = content.encode() if isinstance(content, str) else content
    parts = [content] if isinstance(content, bytes) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    if is_remote(path):  # An object in a bucket appears when it is complete.
        path.write_bytes(b"".join(parts))
        return
    temporary = path.with_name(f"{path.name}.tmp{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:  # after an error, also of an iterator `content`
        temporary.unlink(missing_ok=True)


def main() -> None:
    if sys.argv[1:]:  # --help prints the settings of this recipe, and exits.
        parse_flags(Options(load_recipe(sys.argv[1])), ["--help"])
    load_extras()
    for name, cfg in RECIPES.items():
        print(f"{name:30}{cfg.data.task:30}{cfg.train.steps:>9,} steps")


if __name__ == "__main__":
    import configs  # not __main__, because extras/t5_tasks.py imports it, too

    configs.main()
