"""Define all settings of plain T5, and recipes with values for these settings.

A setting is a field of a frozen dataclass, such as the field `steps` of TrainConfig. The
class Config contains all settings, in six sections: model, data, train, decode, mesh and
distributed. A recipe is a predefined Config, such as "tiny" or "small_c4".

Every command takes a recipe with `--config NAME` and changes single settings with flags
such as `--train.steps 500`. train.py writes the resulting Config to RUN_DIR/config.json,
and the other commands read that file. This file needs no library, except for remote
paths.

    python configs.py               list the recipes
    python configs.py small_c4      print all settings of one recipe
    python train.py --help          print all settings with their meaning

Example: change one setting of a recipe. The recipe itself does not change.

    >>> from configs import RECIPES, override
    >>> cfg = override(RECIPES["tiny"], {"train.steps": 500})
    >>> cfg.train.steps, RECIPES["tiny"].train.steps
    (500, 1500)

`pytest -k lesson_configs` runs the lessons about this file, which are in test_all.py.
"""

import argparse
import dataclasses
import difflib
import fcntl
import inspect
import json
import os
import re
import signal
import sys
import textwrap
import threading
import time
import traceback
import zlib
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path


class UserError(Exception):
    """An error that the user can fix, such as a misspelled flag.

    The message says what happened and what to do. run_command prints only this message,
    without a traceback, and exits with status 2.
    """


# ---- the fields ------------------------------------------------------------------------
# Each setting is a field of one of the classes below. The comment above a field is its
# help text, which --help and `python configs.py NAME` print. The functions one_of,
# between and at_least limit the values of a field. An integer field without such a limit
# must be at least 1.


def one_of(default, *others):
    """Declare a dataclass field that allows only a fixed set of values.

    For example, one_of("stop", "skip") allows "stop" and "skip". The first value is the
    default.
    """
    return field(default=default, metadata={"choices": (default, *others)})


def between(low, high, default):
    """Declare a dataclass field for a number with a lower and an upper limit.

    For example, between(0, 1, 0.5) allows numbers from 0 to 1, and the default is 0.5.
    """
    return field(default=default, metadata={"low": low, "high": high})


def at_least(low, default):
    """Declare a dataclass field for a number with a lower limit.

    For example, at_least(0, 10) allows 0 and larger numbers, and the default is 10.
    """
    return field(default=default, metadata={"low": low})


@dataclass(frozen=True)
class ModelConfig:
    """These settings define the size and the architecture of the model."""

    # Number of rows of the embedding table: the number of token ids, rounded up to a
    # multiple of 128.
    vocab_size: int = 32128
    # Width of the residual stream: the length of the vector that represents a token.
    d_model: int = 512
    # Width of the hidden layer of each MLP (feed-forward network).
    d_ff: int = 1024
    # Width of each attention head: the length of its query, key and value vectors.
    # num_heads * d_kv may differ from d_model.
    d_kv: int = 64
    # Number of attention heads in each layer.
    num_heads: int = 6
    # Number of encoder layers.
    num_layers: int = 8
    # Number of decoder layers. 0 means an encoder-only model.
    num_decoder_layers: int = at_least(0, 8)
    # Activation function of the MLP: relu, gelu, silu, or one that your recipe file (a
    # Python file with settings) defines. The prefix "gated_" selects a gated MLP (GLU).
    # T5 1.0 uses relu, and T5 1.1 uses gated_gelu.
    activation: str = "gated_gelu"
    # Whether the output layer uses the weights of the embedding table, as in T5 1.0.
    # If true, the logits are multiplied by d_model^-0.5.
    tied: bool = False
    # How self-attention knows the positions of tokens: t5_bias, none, alibi, rotary, or a
    # method that your recipe file (a Python file with settings) defines. With t5_bias,
    # the model learns an attention bias for each range of distances. The settings
    # relative_buckets, relative_max_distance and layer_biases configure this bias.
    positions: str = "t5_bias"
    # Number of buckets (ranges) of relative positions, which are key position minus query
    # position. Each attention head learns one bias for each bucket.
    relative_buckets: int = at_least(4, 32)
    # From this distance on, all distances share the last bucket of relative positions.
    # Half of the buckets hold one small distance each, and the other buckets become wider
    # as the distance grows. Because of rounding, the last bucket begins a little earlier:
    # by default at distance 91 in the encoder, and at distance 113 in the decoder.
    relative_max_distance: int = 128
    # Whether each layer learns its own relative-position biases, as in UMT5.
    # If false, all encoder layers share one table of biases, and all decoder layers share
    # another table.
    layer_biases: bool = False
    # Rank of the LoRA matrices of each query and value projection. 0 means no LoRA. To
    # train only the LoRA matrices, add --train.freeze '(?!.*lora).*'.
    lora: int = at_least(0, 0)
    # Dropout rate: the fraction of the activations that training sets to zero at random.
    # T5 1.1 uses 0 for pretraining and 0.1 for fine-tuning.
    dropout: float = between(0, 0.99, 0.0)
    # Number format (dtype) of the activations. The stored weights are always float32.
    # "auto" means float32 on a CPU, and bfloat16 on a GPU or TPU.
    dtype: str = one_of("auto", "float32", "bfloat16")
    # Which activations the forward pass saves. The backward pass recomputes the others
    # (rematerialization), which takes time but saves memory.
    # "none" saves all activations.
    # "dots" saves the results of attention and of the matmuls with weights.
    # "full" saves only the results of attention and the input of each layer, and adds
    # about one third to the computation of a step.
    remat: str = one_of("dots", "none", "full")
    # Which code computes attention.
    # "kernel" is a fused kernel for TPUs, which needs less time and memory. On a CPU or
    # GPU, the kernel only runs in a slow interpreter, which is meant for tests.
    # "xla" leaves the compilation to XLA, on any platform.
    # "auto" means the kernel on a TPU, except for shapes that the kernel does not
    # support, and otherwise "xla".
    attention: str = one_of("auto", "xla", "kernel")


@dataclass(frozen=True)
class DataConfig:
    """These settings say where text is read, and how it becomes training examples."""

    # Where examples are read, such as text:books/*.txt or jsonl:pairs.jsonl.
    # README lists all kinds of sources. Empty means the source that the task names. The
    # task span_corruption names "python:", the manual and the docstrings of Python.
    source: str = ""
    # Where the held-out examples for evaluation are read.
    # Empty means the validation split of the training source.
    # If this source has no splits, its first 1 % (at most 32 MiB) is held out from
    # training.
    validation_source: str = ""
    # Name of the task, or of the mixture of tasks, to train on.
    # `python data.py --list` prints all names.
    task: str = "span_corruption"
    # Names of the tasks or mixtures to evaluate during training, separated by commas.
    # Empty means the training task.
    eval_tasks: str = ""
    # Pairs TASK_FIELD=SOURCE_FIELD, for a source that names its fields differently from
    # the task. For example, text=content reads the field "text" of the task from the
    # field "content" of the source. Commas separate the pairs, as in
    # inputs=question,targets=answer.
    fields: str = ""
    # Vocabulary that maps text to token ids. A path names a SentencePiece model.
    # "train:N" trains a SentencePiece model with N tokens on the source.
    # "bytes" means the byte vocabulary of ByT5.
    # "ids:N" is for texts that are already token ids below N, separated by spaces.
    # A recipe file can define other vocabularies.
    vocab: str = "train:32000"
    # Number of input tokens in each row of a batch, including EOS and padding. Longer
    # examples are cut.
    inputs_length: int = 512
    # Number of target tokens in each row of a batch, including EOS and padding. Longer
    # examples are cut.
    targets_length: int = 114
    # Whether several short examples may share one row of a training batch (packing). This
    # reduces padding.
    pack: bool = True
    # Whether the token files (the tokenized text) stay on disk after training has used
    # them. "false" saves disk space when the text is very large.
    keep_tokens: bool = True
    # Fraction of the tokens that span corruption removes from a text.
    noise_density: float = between(0.001, 0.999, 0.15)
    # Mean length, in tokens, of the spans that span corruption removes from a text.
    mean_span_length: float = between(1, 1000, 3.0)
    # Folder for tokenized texts and trained vocabularies. It may be remote, such as
    # gs://bucket/prepared. Each host then copies the token files that it needs to
    # ~/.cache/plain_t5/prepared.
    prepared_dir: str = "prepared"
    # Folder of the TensorFlow Datasets (TFDS). Empty means the folder in the environment
    # variable TFDS_DATA_DIR, or ~/tensorflow_datasets if this variable is not set.
    tfds_dir: str = ""
    # What to do with an example or a file that cannot be read.
    # "stop" ends the command with a message. "skip" leaves out the example, and
    # counts how many examples are left out.
    on_error: str = one_of("stop", "skip")


@dataclass(frozen=True)
class TrainConfig:
    """These settings say how a model is trained, evaluated and saved."""

    # Step at which training ends. A run from step 1,000 to step 1,500 takes 500 steps.
    steps: int = 10_000
    # Step at which a new run begins. A recipe that continues a published checkpoint
    # begins at the step of this checkpoint, such as 1,000,000.
    start_step: int = at_least(0, 0)
    # What a new run loads from the run that --init_from names.
    # "params" loads only the weights.
    # "all" loads the weights, the optimizer state and the step.
    restore: str = one_of("params", "all")
    # Number of rows in a batch, counted over all devices and microbatches together.
    batch_size: int = 128
    # Number of microbatches into which each batch is split to save memory.
    # The gradients of the microbatches are added up before the weights are updated.
    microbatches: int = 1
    # Name of the loss that training minimizes: cross_entropy, or a loss that your recipe
    # file defines. cross_entropy is the loss of T5. It uses z_loss and label_smoothing.
    loss: str = "cross_entropy"
    # Name of the optimizer: adafactor, adamw, rms_scaled_adamw (AdamW with steps relative
    # to the size of the weights), lion, muon, or a name that your recipe file (a Python
    # file with settings) defines.
    optimizer: str = "adafactor"
    # Base learning rate. The learning rate of a step is the product of the factors that
    # the setting `schedule` lists. The base learning rate is the factor "constant".
    learning_rate: float = at_least(0, 1.0)
    # Learning rate schedule: a product of factors, such as "constant * linear_warmup".
    # The function learning_rate in train.py defines all factors.
    schedule: str = "constant * rsqrt_decay"
    # Number of warmup steps of the learning rate schedule. In these steps, the factor
    # linear_warmup rises from 0 to 1, and the factor rsqrt_decay stays constant.
    warmup_steps: int = 10_000
    # Step that the learning rate schedule treats as step 0.
    # A run that continues a checkpoint can start its schedule anew with this setting.
    schedule_offset: int = at_least(0, 0)
    # How much the schedule factors decay_every and linear_decay lower the learning rate.
    # decay_every multiplies the learning rate by this number every steps_per_decay steps.
    # linear_decay subtracts this fraction of learning_rate in each step after the warmup,
    # so it needs a small value, such as 1e-5.
    decay_factor: float = 0.5
    # Number of steps after which the schedule factor decay_every lowers the learning rate
    # again.
    steps_per_decay: int = 20_000
    # Number of steps in which the schedule factor cosine_decay falls from 1 to 0.
    # After these steps, cosine_decay starts again at 1.
    steps_per_cycle: int = 100_000
    # Number of steps at the end of the run in which the schedule factor linear_cooldown
    # falls from 1 to 0.
    cooldown_steps: int = 1000
    # Fraction of each weight that every update subtracts from the weight.
    # adamw first multiplies this fraction by the learning rate.
    # adafactor subtracts the fraction itself, as in T5X.
    weight_decay: float = at_least(0, 0.0)
    # Decay rate of an exponential moving average of the weights, such as 0.999. The
    # averaged weights are used for evaluation and generation. 0 means no average.
    ema: float = between(0, 0.999999, 0.0)
    # Regular expression for the names of parameters that training does not change.
    # For example, encoder/.* freezes the encoder. Empty means that all parameters change.
    freeze: str = ""
    # Weight of the z-loss, which keeps the logits near zero.
    # The z-loss is log(Z)^2, where Z is the denominator of the softmax.
    z_loss: float = at_least(0, 1e-4)
    # Label smoothing takes this much probability from the target token, and shares it
    # equally among all other tokens.
    label_smoothing: float = between(0, 0.99, 0.0)
    # Number by which the summed loss of a batch is divided before its gradient is taken.
    # "none" means the number of target tokens, which gives the mean loss per token.
    # T5X uses 233472 for pretraining.
    loss_divisor: float | None = at_least(1e-6, None)
    # Log the training metrics every N steps. 0 means never.
    log_every: int = at_least(0, 10)
    # Compute the loss on held-out examples every N steps. 0 means never.
    eval_every: int = at_least(0, 1000)
    # Generate text for held-out examples every N steps, and compute the metrics of the
    # task, such as BLEU. 0 means never.
    infer_every: int = at_least(0, 0)
    # Number of batches in one evaluation. 0 means all held-out examples.
    eval_batches: int = at_least(0, 20)
    # Save a checkpoint every N steps. 0 means never.
    save_every: int = at_least(0, 1000)
    # Whether training continues while a checkpoint is written.
    # This needs main memory for a copy of the weights and the optimizer state.
    async_save: bool = True
    # Number of checkpoints to keep. Older checkpoints are deleted.
    keep: int = 3
    # Name of a metric in metrics.jsonl, such as training_eval/span_corruption/loss. The
    # checkpoint with the best value of this metric is kept, even if it is old. Empty
    # means that only the newest checkpoints are kept.
    keep_best: str = ""
    # Steps to trace with jax.profiler, as FIRST:LAST, such as 10:13.
    # The trace is written to RUN_DIR/profile. Empty means no trace.
    profile: str = ""
    # Random seed of the initial weights, the data order, the removed spans, dropout and
    # sampling.
    seed: int = between(0, 2**31 - 1, 0)


@dataclass(frozen=True)
class DecodeConfig:
    """These settings say how a trained model generates text."""

    # Number of beams of beam search. 0 means no beam search.
    # Without beam search, the model decodes greedily or samples.
    beams: int = between(0, 1024, 0)
    # Exponent of the length penalty of beam search.
    # A larger exponent favors longer outputs.
    # A negative exponent is refused, because the search would end too early.
    alpha: float = at_least(0, 0.6)
    # Length penalty: the score of an output of n tokens is divided by this number.
    # "gnmt" means ((5 + n) / 6) ** alpha, as in T5X.
    # "length" means n ** alpha, as in Hugging Face.
    penalty: str = one_of("gnmt", "length")
    # Maximum number of generated tokens, including EOS. "none" means the value of
    # --data.targets_length.
    max_len: int | None = None
    # Temperature of sampling. A higher temperature gives more varied outputs.
    # 0 means greedy decoding, or temperature 1 if top_k or top_p is set.
    temperature: float = at_least(0, 0.0)
    # Sample each token only from this number of most probable tokens (top-k sampling).
    # 0 means all tokens.
    top_k: int = at_least(0, 0)
    # Sample each token only from the most probable tokens whose probabilities add up to
    # this number (nucleus sampling). 0 means all tokens.
    top_p: float = between(0, 1, 0.0)
    # Number of outputs for each example. These are random samples or the best beams.
    num_return: int = 1
    # File with the allowed outputs, one on each line (constrained decoding). "task" means
    # the outputs that the task lists, such as "yes" and "no". Empty means that every
    # output is allowed.
    choices: str = ""
    # Whether to write, for each example, a list of all outputs with their scores. With
    # num_return above 1, this list is always written.
    return_all: bool = False
    # Number of examples that are decoded together in a batch. The outputs do not depend
    # on this number.
    batch_size: int = 32


@dataclass(frozen=True)
class MeshConfig:
    """These settings say how the model is split over the devices."""

    # Number of devices over which each copy of the model is split (tensor parallelism).
    model: int = 1
    # Whether each device stores only a part of the weights and of the optimizer state
    # (FSDP, or ZeRO-3). This saves memory, but the devices communicate more.
    fsdp: bool = False


@dataclass(frozen=True)
class DistributedConfig:
    """These settings say how the processes of a run on several machines connect."""

    # Address HOST:PORT of process 0, to which all processes connect.
    # Empty means a single process, or a cluster (such as SLURM) that JAX detects.
    coordinator: str = ""
    # Number of processes of the run. "none" means that the cluster, such as SLURM, tells
    # JAX this number.
    processes: int | None = None
    # Index of this process, counted from 0. "none" means that the cluster, such as SLURM,
    # tells JAX this index.
    process: int | None = at_least(0, None)
    # Number of seconds to wait for a process that does not respond, before the run ends.
    timeout: int = 100


@dataclass(frozen=True)
class Config:
    """A Config contains all settings of a run, in six sections, and a recipe's name."""

    name: str
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    decode: DecodeConfig = DecodeConfig()
    mesh: MeshConfig = MeshConfig()
    distributed: DistributedConfig = DistributedConfig()


SECTIONS = {
    "model": ModelConfig,
    "data": DataConfig,
    "train": TrainConfig,
    "decode": DecodeConfig,
    "mesh": MeshConfig,
    "distributed": DistributedConfig,
}

# ---- tables that a recipe file may extend ----------------------------------------------
# These dicts map names to built-in objects, which data.py, model.py, evaluate.py and
# train.py add. A recipe file is a Python file of the user that defines CONFIG. The file
# may also define dicts with these names, and load_recipe adds their entries.

TASKS = {}  # maps "squad_v010_allanswers" to a data.Task
# MIXTURES maps the name of a mixture of tasks to {name of a task: sampling rate}.
MIXTURES = {}
ACTIVATIONS = {}  # maps "relu" to jax.nn.relu
# METRICS maps "bleu" to a function(targets, predictions), which returns {"bleu": 27.5}.
METRICS = {}
LOSSES = {}  # maps "cross_entropy" to model.loss_fn
OPTIMIZERS = {}  # maps "adafactor" to a train.Optimizer
POSITIONS = {}  # maps "rotary" to a model.PositionEncoding
# SOURCES maps the kind of a data source, such as "jsonl", to a function that opens the
# source: function(name, split, cfg, whole). If `whole` is true, the function holds out no
# examples for validation.
SOURCES = {}
# VOCABULARIES maps a name, such as "smiles", to a data.Tokenizer, which splits texts into
# tokens.
VOCABULARIES = {}
# RECIPE_TABLES lists the names of these dicts.
RECIPE_TABLES = (
    "TASKS",
    "MIXTURES",
    "ACTIVATIONS",
    "METRICS",
    "OPTIMIZERS",
    "LOSSES",
    "POSITIONS",
    "SOURCES",
    "VOCABULARIES",
)

# RECIPE_CODE maps the path of each executed recipe file to a list of checksums, one for
# the recipe file and one for each file that it imports. If a checksum changes, the tasks
# of the recipe file are tokenized again.
RECIPE_CODE = {}
# TASK_CODE maps the name of each task that a recipe file defines to the checksums of this
# recipe file. TASK_CODE also contains each kind of data source that a recipe file
# defines. A name that ends with a colon, such as "numbers:", is a kind of data source.
TASK_CODE = {}

# ---- messages --------------------------------------------------------------------------

# This variable says whether this process prints messages. If a run has several processes,
# only process 0 prints. In the other processes, partition.start_jax sets this variable to
# False.
prints_progress = True
# This variable says whether the run has only one process. If the run has several
# processes, partition.start_jax sets this variable to False.
single_process = True


def escape_controls(text):
    """Replace each control character by a visible escape sequence such as \\x1b.

    A printed text, such as a line of a file, then cannot change the terminal's state.
    """
    return re.sub(
        r"[^\n\t\x20-\x7e\xa0-\U0010ffff]",
        lambda match: match[0].encode("unicode_escape").decode(),
        str(text),
    )


def discard_output(stream):
    """Send all further output of a stream to /dev/null.

    This is needed after a failed write. A write fails if the terminal is closed, or if
    the program that reads the output, such as `head`, has ended.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def note(text, always=False):
    """Print a message to standard error.

    If a run has several processes, only process 0 prints the message. With always=True,
    every process prints its message.
    """
    if prints_progress or always:
        try:
            print(escape_controls(text), file=sys.stderr, flush=True)
        except OSError:
            discard_output(sys.stderr)


# ====== below: recipes, the command line, run directories, checks, files ================

# ---- recipes ---------------------------------------------------------------------------

# SIZES contains the five sizes of T5 1.1. The values are those of the files
# t5x/examples/t5/t5_1_1/{size}.gin in T5X.
SIZES = {
    size: ModelConfig(
        d_model=d_model,
        d_ff=d_ff,
        num_heads=num_heads,
        num_layers=num_layers,
        num_decoder_layers=num_layers,
    )
    for size, d_model, d_ff, num_heads, num_layers in (
        ("small", 512, 1024, 6, 8),
        ("base", 768, 2048, 12, 12),
        ("large", 1024, 2816, 16, 24),
        ("xl", 2048, 5120, 32, 24),
        ("xxl", 4096, 10240, 64, 24),
    )
}

# T5_1_0_SMALL is the model T5 1.0 small. The values are those of the file
# t5x/examples/t5/t5_1_0/small.gin in T5X.
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
# The Romanian recipes, such as base_ro, read these data. The vocabulary of base_ro has
# 64,000 token ids: 63,900 trained tokens and 100 sentinels.
RO = DataConfig(
    source="hf:dumitrescustefan/rlm",
    vocab="train:63900",
    targets_length=256,
    keep_tokens=False,
)

BLEU = "inference_eval/wmt_t2t_ende_v003/bleu"
BEAMS = DecodeConfig(beams=4, batch_size=64)
# Fine-tune a published checkpoint of step 1,000,000 for 20,000 more steps, with a
# constant learning rate, as in the T5X file t5x/configs/runs/finetune.gin.
FINETUNE = TrainConfig(
    start_step=1_000_000,
    steps=1_020_000,
    learning_rate=1e-3,
    schedule="constant",
    infer_every=1000,
    # Evaluate all held-out examples. T5X computes the held-out loss on only 20 batches.
    eval_batches=0,
    save_every=5000,
)
# Fine-tune for 2^18 steps, as in Raffel et al. 2020, section 3.1.3. This paper saves a
# checkpoint every 5,000 steps, and reports the results of the best checkpoint.
PAPER = replace(FINETUNE, steps=1_000_000 + 2**18, eval_every=5000, infer_every=5000)
# Train T0 as in Sanh et al. 2022, for 12,200 steps that follow step 1,100,000 of the
# LM-adapted T5. A batch has 2^20 input tokens. The settings are from training/README.md
# in the GitHub repository bigscience-workshop/t-zero.
T0 = TrainConfig(
    start_step=1_100_000,
    steps=1_112_200,
    batch_size=1024,
    # In the original run, each of 64 copies of the model computed 2 rows at a time. A
    # batch of 1024 rows therefore had 1024 / (64 * 2) = 8 microbatches.
    microbatches=8,
    learning_rate=1e-3,
    schedule="constant",
    eval_every=0,
)
# Train the Romanian T5 models. The settings are those of ro_t5x_base_pretrain.gin in the
# GitHub repository dumitrescustefan/t5x_models.
RO_TRAIN = TrainConfig(steps=2_000_000, batch_size=128, save_every=10_000, keep=5)

RECIPES = {
    cfg.name: cfg
    for cfg in (
        # Train a tiny T5 for a first try. This recipe downloads nothing and takes about
        # two minutes on two CPU cores. Rows are short, because a few neighboring words
        # are enough to guess most of the removed spans.
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
        # Fine-tune the tiny T5 on simple tasks, such as writing numbers as words. The
        # model learns to solve these tasks without a mistake. Run this recipe with
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
        # Learn to reverse sequences of token ids, and compare the accuracy with T5X. The
        # training program of T5X, run with 5 seeds on the same examples, reaches these
        # held-out accuracies:
        #
        #     step         200           400           600             1000
        #     accuracy  .32 to .48    .75 to .88    .95 to .99    .989 to .997
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
                # With divisor 1, the loss is the sum over all tokens, as in T5X. The
                # updates of Adafactor hardly depend on the scale of the loss. Gradients
                # close to Adafactor's epsilon, such as the gradients of unused token ids,
                # are an exception.
                loss_divisor=1.0,
                log_every=50,
                eval_every=200,
                infer_every=1000,
                eval_batches=0,
                save_every=500,
            ),
        ),
        # Measure the speed of train.py. This recipe trains T5 1.1 small on random token
        # ids for 10 steps, without evaluations and checkpoints.
        Config(
            "small_bench",
            replace(SIZES["small"], dtype="float32"),
            DataConfig(source="random:"),
            TrainConfig(steps=10, batch_size=8, log_every=1, eval_every=0, save_every=0),
        ),
        # Pretrain T5 1.1 on C4. The learning rate is 0.01 for 10,000 steps, and then
        # 1 / sqrt(step). To read the files of C4 that allenai publishes, add
        # --data.source 'jsonl:en/c4-{split}.*.json.gz'. The settings are those of
        # {small,base}_c4_pretrain.gin in t5x/examples/t5/t5_1_1/examples. The sizes
        # larger than base use the settings of base.
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
        # Train T5 1.1 for 100,000 more steps. The input is the beginning of a text, and
        # the target is the rest of the text. This is the LM adaptation of Lester et al.
        # 2021, section 3.1. The learning rate is that of pretraining. With --init_from,
        # name a run of T5 1.1 at step 1,000,000.
        Config(
            "small_lm_adapt",
            SIZES["small"],
            replace(C4, task="prefix_lm", targets_length=512),
            TrainConfig(start_step=1_000_000, steps=1_100_000, batch_size=256),
        ),
        # Translate English to German. The recipes with "wmt" in their names have the
        # settings of {base_wmt_from_scratch,small_wmt_finetune,base_wmt_finetune}.gin in
        # the folder t5x/examples/t5/t5_1_1/examples of T5X.
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
        # Train on all tasks of GLUE, and evaluate the task STS-B, as in
        # t5x/docs/usage/finetune.md. In this recipe and the next three recipes, the
        # values of targets_length are those of t5/models/gin/sequence_lengths/*.gin.
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
        # Train T0 on the dataset collection P3 (Public Pool of Prompts). Name the folder
        # of P3 with --data.source seqio:FOLDER or --data.source parquet:FOLDER. To train
        # T0+ or T0++, also add --data.task t0+_train or --data.task t0++_train.
        *(
            Config(f"{size}_t0", replace(SIZES[size], dropout=0.1), P3, T0)
            for size in ("small", "xxl")
        ),
        # Pretrain a Romanian T5 on text that is streamed from Hugging Face. To train on
        # your own text in any language, add --data.source 'text:DIR/*.txt'.
        Config("base_ro", replace(SIZES["base"], vocab_size=64_000), RO, RO_TRAIN),
        Config(
            "large_ro",
            replace(SIZES["large"], vocab_size=64_000),
            replace(RO, targets_length=512),
            RO_TRAIN,
        ),
        # Continue the pretraining of mT5 on Romanian text, with the learning rate
        # 0.4 / sqrt(step). With --init_from, name a run that has the weights and the
        # vocabulary of mT5.
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
        # Fine-tune on your own pairs of inputs and targets. Add --data.source
        # jsonl:pairs.jsonl. With --init_from, name a run that has the weights of T5 1.1,
        # FLAN-T5, T0 or the LM-adapted T5. For the recipe umt5_small, name a run that has
        # the weights of UMT5 (Chung et al. 2023).
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


# ---- fields and flags ------------------------------------------------------------------

# A resumed run may change these sections and settings. Other changes, such as another
# model.d_model, are refused, because they would make the run a different experiment.
CHANGEABLE = set(
    "mesh distributed decode data.keep_tokens train.steps train.log_every "
    "train.eval_every train.infer_every train.eval_batches train.save_every "
    "train.async_save train.keep train.keep_best train.microbatches "
    "train.profile train.cooldown_steps model.attention".split()
)
# DATA_FORMAT is the version of the training batches. A new version of plain T5 increases
# this number if it makes different batches from the same text. A run that began
# with another number cannot be resumed.
DATA_FORMAT = 3
# These sections and settings do not change what a model computes from its weights. A run
# that starts from the weights of another run may therefore change these settings. All
# other settings must be equal in both runs. A run with LoRA may start from a run
# without LoRA, so model.lora is in the list too.
FREE_FOR_WEIGHTS = set(
    "data train decode mesh distributed model.attention "
    "model.lora model.dropout model.dtype model.remat".split()
)


def fields(cfg):
    """Yield each setting of a Config as a tuple (name, dataclass field, value).

    For example, the name is "train.steps" and the value is 1500.
    """
    for section, kind in SECTIONS.items():
        part = getattr(cfg, section)
        for item in dataclasses.fields(kind):
            yield f"{section}.{item.name}", item, getattr(part, item.name)


def differences(cfg, other):
    """Return the settings in which two Configs differ.

    For example, the result {"train.steps": (500, 1500)} means that `cfg` trains until
    step 500 and `other` until step 1500.
    """
    pairs = zip(fields(cfg), fields(other))
    return {name: (value, old) for (name, _, value), (_, _, old) in pairs if value != old}


def settings(cfg, free=()):
    """Return a dict with the flag and the value of each setting of a Config.

    For example, the dict maps "--train.steps" to 1500.

    free: sections and settings to leave out, such as {"data", "train.steps"}.
    """
    return {
        f"--{name}": value
        for name, _, value in fields(cfg)
        if not {name, name.split(".")[0]} & set(free)
    }


def refuse_differences(values, expected, problem, remedy):
    """Raise UserError if two dicts differ, and name the values that differ.

    A name that only one of the two dicts contains is ignored.

    values, expected: dicts of names and values, such as {"--model.d_ff": 1024}.
    problem, remedy: the beginning and the end of the message.
    """
    differing = ", ".join(
        f"{name} {value!s:.100}, not {expected[name]!s:.100}"
        for name, value in values.items()
        if value != expected.get(name, value)
    )
    if differing:
        raise UserError(f"{problem} ({differing}): {remedy}.")


def weights_identity(cfg, vocabulary):
    """Return a dict that says to which model and vocabulary the weights of a run belong.

    A checkpoint stores this dict, because weights are meaningless in another model or
    with another vocabulary, even if all shapes are equal.

    vocabulary: the SHA-256 digest of the vocabulary, or "" if it is unknown.
    """
    known = {"the vocabulary": vocabulary} if vocabulary else {}
    return settings(cfg, FREE_FOR_WEIGHTS) | known


def override(cfg, changes):
    """Return a copy of a Config with changed settings.

    changes: the new values, such as {"train.steps": 500}.
    """
    for name, value in changes.items():
        section, item = name.split(".")
        cfg = replace(cfg, **{section: replace(getattr(cfg, section), **{item: value})})
    return cfg


def parse_value(kind, text):
    """Convert the text after a flag to the type of the setting that the flag changes.

    For example, "500" becomes 500, "true" becomes True, and "none" becomes None. A text
    that cannot be converted is returned unchanged, and check_fields refuses this text.

    kind: the type of the field, such as bool, str or int | None.
    """
    # If kind is int | None, then kinds is (int, NoneType). If kind is int, then kinds is
    # (int,).
    kinds = getattr(kind, "__args__", (kind,))
    value = {"none": None, "true": True, "false": False}.get(text.lower(), text)
    if type(value) in kinds or bool in kinds:
        return value
    try:
        return kinds[0](text)
    except ValueError:
        return text


def nearest(word, known):
    """Return a suggestion such as "; did you mean tiny?" for the misspelled word "tinny".

    If no known word is similar, return "".
    """
    close = difflib.get_close_matches(word, known, 1, 0.4)
    return f"; did you mean {close[0]}?" if close else ""


@cache  # inspect.getsource takes 20 ms
def field_help(section):
    """Return the help text of each field of a class such as TrainConfig, as a dict.

    The help text of a field is the comment above the field in the source code.
    """
    source = inspect.getsource(section)
    comments = re.findall(r"^((?:    # .*\n)+)    (\w+):", source, re.MULTILINE)
    return {name: " ".join(re.findall(r"# (.*)", text)) for text, name in comments}


def refuse_flags(message):
    """Raise a UserError that contains argparse's message about a wrong command line."""
    raise UserError(f"{message}. Add --help to list all flags.")


def parse_args(description, argv, **flags):
    """Parse the command line of a script, and return the pair (args, changes).

    args: an argparse.Namespace with config, run_dir and the script's own options.
    changes: the settings that were given as flags. For example, --train.steps 500 gives
        {"train.steps": 500}.

    description: the docstring of the script, which --help prints.
    flags: the script's own options, such as mode=dict(default="predict"). The dict
        contains the arguments of argparse's add_argument. An option whose name ends in
        "_" is positional.
    """
    parser = argparse.ArgumentParser(
        usage="python %(prog)s [options]",
        description=description.partition("\nExample:")[0],
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.error = refuse_flags
    flags["config"] = dict(help="name of a recipe, or a Python file that defines CONFIG")
    flags["run_dir"] = dict(
        help="folder of the run (by default, train.py uses runs/RECIPE)"
    )
    for name, options in flags.items():
        flag = name[:-1] if name.endswith("_") else f"--{name}"
        parser.add_argument(flag, **options)
    for section, kind in SECTIONS.items():
        group = parser.add_argument_group(section, kind.__doc__)
        for name, text in field_help(kind).items():
            group.add_argument(
                f"--{section}.{name}",
                metavar="",
                default=argparse.SUPPRESS,
                help=text.replace("%", "%%"),  # argparse prints %% as a single %
            )
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        known = [*settings(Config("")), *(f"--{name}" for name in flags)]
        hint = nearest(unknown[0].split("=")[0], known)
        raise UserError(
            f"Unknown argument {unknown[0]}{hint or '. Add --help to list all flags.'}"
        )
    changes = {}
    for name, item, _ in fields(Config("")):
        if name in args:
            changes[name] = parse_value(item.type, vars(args).pop(name))
    return args, changes


# ---- recipes and runs ------------------------------------------------------------------


def load_recipe(name):
    """Return the Config of a recipe.

    name: a name in RECIPES, or the path of a recipe file.

    A recipe file is a Python file that defines CONFIG, and this function executes the
    file. The file may also define dicts such as TASKS. Their entries are added to the
    dicts with the same names in configs.py.
    """
    if name in RECIPES:
        return RECIPES[name]
    if not name.endswith(".py"):
        raise UserError(
            f"Unknown recipe {name}{nearest(name, RECIPES) or '.'} "
            f"The command python configs.py lists all recipes."
        )
    defined = {"__name__": "recipe", "__file__": name}
    known = dict(TASKS), dict(SOURCES)
    try:
        content = to_path(name).read_bytes()
        exec(compile(content, name, "exec"), defined)
        cfg = defined.get("CONFIG")
        if not isinstance(cfg, Config):
            raise UserError("this file must define CONFIG as a configs.Config")
        check_fields(cfg)
        for title in RECIPE_TABLES:
            globals()[title].update(defined.get(title, {}))
        RECIPE_CODE[name] = [zlib.crc32(content), *imported_code(defined)]
        new = [task for task in TASKS if TASKS[task] is not known[0].get(task)]
        new += [f"{x}:" for x in SOURCES if SOURCES[x] is not known[1].get(x)]
        TASK_CODE.update(dict.fromkeys(new, RECIPE_CODE[name]))
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == name]
        where = f", line {lines[-1]}" if lines else ""
        raise UserError(
            f"The recipe file {name} cannot be loaded ({type(error).__name__}: "
            f"{error}{where}). Fix this file, or name another recipe with --config."
        ) from error
    return cfg


def imported_code(defined):
    """Return a list with a checksum of each Python file that a recipe file imports.

    Installed libraries and the files of plain T5 are left out.

    defined: a dict of the global names that the recipe file defines, with their values.
    """
    code = []
    for value in defined.values():
        # The attribute __module__ of a function or a class is the name of its module. A
        # module itself has no __module__, but has its own name in __name__.
        name = str(getattr(value, "__module__", getattr(value, "__name__", "")))
        path = Path(getattr(sys.modules.get(name), "__file__", None) or "")
        is_installed = {"site-packages", "dist-packages"} & {*path.parts}
        is_standard = name.split(".")[0] in sys.stdlib_module_names
        if path.suffix == ".py" and path not in OWN_FILES:
            if not is_installed and not is_standard:
                code.append(zlib.crc32(path.read_bytes()))
    return sorted(set(code))


def read_run(run_dir):
    """Read the config.json of a run, and return (Config, content of the file as a dict).

    The content also has keys such as "corpus", which save_run describes.
    """
    path = to_path(run_dir) / "config.json"
    if not path.exists():
        raise UserError(
            f"{run_dir} is not a run, because it has no config.json: name the folder of "
            f"a run, or start a run with train.py. A model of Hugging Face or T5X "
            f"becomes a run with `python convert.py MODEL runs/NAME`."
        )
    form = {
        "name": str,
        "data_format": int,
        "corpus": str,
        "vocabulary_sha256": str,
        "init_from": str,
        "model": dict,
        "data": dict,
        "train": dict,
        "decode": dict,
    }
    remedy = (
        "restore this file from a copy, or use the version of plain T5 that wrote it. A "
        "model of Hugging Face becomes a run with `python convert.py MODEL runs/NAME`"
    )
    stored = read_json(path, form, remedy)
    try:
        sections = {
            section: kind(**stored.get(section, {})) for section, kind in SECTIONS.items()
        }
        cfg = Config(stored["name"], **sections)
        check_fields(cfg)
    except (TypeError, UserError) as error:
        raise UserError(f"{path} cannot be used ({error}): {remedy}.") from error
    return cfg, stored


def load_run(run_dir):
    """Return the Config of a run from its config.json.

    The recipe file of the run is not executed.
    """
    return read_run(run_dir)[0]


def load_run_recipe(run_dir):
    """Execute the recipe file of a run, and return its CONFIG.

    Return None if the run has no recipe file. A recipe file is a program, so only
    commands that need its tasks, objectives or optimizers call this function. A printed
    note tells the user that the file is executed.
    """
    path = to_path(run_dir) / "recipe.py"
    if not path.exists():
        return None
    note(f"This command executes the Python program {path}, the recipe file of the run.")
    return load_recipe(str(path))


def save_run(cfg, run_dir, vocabulary="", corpus="", source=""):
    """Write the Config of a run to RUN_DIR/config.json.

    The file also contains DATA_FORMAT, the version of the training batches.

    vocabulary: the SHA-256 digest of the run's vocabulary, or "" without a vocabulary.
        All commands compare this digest with the file spiece.model of the run.
    corpus: a checksum of the training tokens. If this checksum has changed when the run
        is resumed, train.py warns.
    source: the value of --init_from with which the run began, or "".
    """
    content = {
        "name": cfg.name,
        "data_format": DATA_FORMAT,
        "corpus": corpus,
        "vocabulary_sha256": vocabulary,
        "init_from": source,
        **dataclasses.asdict(cfg),
    }
    # Do not store the sections mesh and distributed, because they describe the machine.
    # The run may be resumed on a different machine.
    del content["mesh"], content["distributed"]
    write_file(os.path.join(run_dir, "config.json"), json.dumps(content, indent=1))


def resolve(args, changes, recipe=False):
    """Return the Config for a command that does not train, such as infer.py.

    The Config comes from the run in --run_dir, or else from the recipe in --config. Flags
    such as --decode.beams 4 then change single settings.

    args, changes: the result of parse_args.
    recipe: whether to execute the recipe file of the run, which defines its tasks.
    """
    if not args.run_dir:
        cfg = load_recipe(args.config or "tiny")
    elif args.config and not args.config.endswith(".py"):
        raise UserError(
            "--run_dir cannot be combined with the name of a recipe, because the run has "
            "its own settings: leave out --config, or name a recipe file, such as "
            "--config RUN/recipe.py."
        )
    else:
        cfg = load_run(args.run_dir)
        if args.config:
            load_recipe(args.config)  # Add the file's tasks, but ignore its CONFIG.
        elif recipe:
            load_run_recipe(args.run_dir)
        if changes.get("data.vocab", cfg.data.vocab) != cfg.data.vocab:
            raise UserError(
                f"--run_dir {args.run_dir} has its own vocabulary, the file "
                f"spiece.model: leave out --data.vocab."
            )
    cfg = override(cfg, changes)
    check(cfg)
    return cfg


def source_run(source):
    """Return the folder of the run that --init_from names.

    source: the path of a run, or of one of its checkpoints, such as
        RUN/checkpoints/step_00001000.
    """
    path = to_path(source)
    if not (path / "manifest.json").exists():
        return path
    # Resolve a relative path such as "step_00001000", because it does not contain the
    # names of its parent folders.
    return (path if is_remote(path) else path.resolve()).parent.parent


def resolve_run(args, changes):
    """Determine the settings of a training run from the command line of train.py.

    Returns (Config, run directory, recipe without flags, source of the weights).
    A new run starts from the recipe in --config. A resumed run without --config starts
    from its own config.json. Flags such as --train.steps 500 then change single settings.
    With --init_from, the model of the recipe is replaced by the model of the named run.
    If the run has checkpoints, only the settings in CHANGEABLE may differ from its
    config.json. Any other change raises UserError.

    args, changes: the result of parse_args.
    The source of the weights is the run or checkpoint with which the run begins or began,
    or "" if the run begins with random weights.
    """
    base = recipe = load_recipe(args.config or "tiny")
    run_dir = args.run_dir or os.path.join("runs", recipe.name)
    folder = to_path(run_dir)
    source = args.init_from or ""
    resumes = False
    if (folder / "config.json").exists():
        old, stored = read_run(run_dir)
        # A run with a checkpoint is resumed. A local checkpoint counts even if it is
        # damaged. A remote checkpoint without manifest.json does not count, because its
        # save was interrupted.
        saved = "step_*/manifest.json" if is_remote(folder) else "step_*"
        resumes = any(folder.glob(f"checkpoints/{saved}"))
        if not args.config:
            base = old
            recipe = load_run_recipe(run_dir) or RECIPES.get(old.name, old)
        if resumes and source not in ("", stored["init_from"]):
            began = stored["init_from"] or "random weights"
            raise UserError(
                f"The run in {run_dir} already has checkpoints, and it began with "
                f"{began}: leave out --init_from to resume the run, or start a new run "
                f"with another --run_dir."
            )
        if resumes or not args.config:
            source = source or stored["init_from"]
    if source:
        origin = old if resumes else load_run(source_run(source))
        same = weights_identity(origin, "")
        if origin.model.lora:
            same["--model.lora"] = origin.model.lora
        base = override(base, {flag[2:]: value for flag, value in same.items()})
    cfg = override(base, changes)
    check(cfg)
    if cfg.train.restore == "all" and not source:
        raise UserError(
            "--train.restore all needs a run whose optimizer state it can read, but "
            "--init_from names no run: add --init_from RUN, or leave out --train.restore."
        )
    if resumes:
        refuse_differences(
            settings(cfg, CHANGEABLE),
            settings(old),
            f"The run in {run_dir} has other settings",
            "leave these settings unchanged, or start a new run with another --run_dir",
        )
        if stored["data_format"] != DATA_FORMAT:
            raise UserError(
                f"{run_dir} cannot be resumed, because this version of plain T5 makes "
                f"different batches (data format {stored['data_format']} instead of "
                f"{DATA_FORMAT}): start a new run with --init_from {run_dir}."
            )
    elif source:
        if cfg.train.restore == "all":
            same["--train.optimizer"] = origin.train.optimizer
        refuse_differences(
            settings(cfg),
            same,
            f"The flags ask for another model or optimizer than {source} has",
            "change these flags, or start without the weights of the other run",
        )
    return cfg, run_dir, recipe, source


# ---- checks ----------------------------------------------------------------------------


def check_json(value, form, at="it"):
    """Raise a ValueError if a JSON value does not have the expected form.

    For example, the form {"step": int, "shape?": [int]} describes a dict with an integer
    "step" and an optional list of integers "shape". All forms are:

        int              a value of this type
        (int, str)       a value of one of these types
        [form]           a list of values, each with this form
        {"key": form}    a dict that has this key, and perhaps other keys
        {"key?": form}   a dict that may have this key
        {str: form}      a dict with any keys, whose values have this form

    at: the place of the value in the file, for the message.
    """
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


def read_json(path, form, remedy="fetch this file again"):
    """Read a JSON file, and return its content if the content has the expected form.

    form: the expected form of the content, as check_json describes forms.
    remedy: what the user should do if the file is damaged, for the message.
    Raises UserError if the file is damaged or its content has another form.
    """
    try:
        # Refuse pipes, because reading a pipe could take forever. Remote paths are never
        # pipes, and testing them would need another request.
        if not is_remote(path) and path.exists() and not path.is_file():
            raise OSError("the path is not a file")
        content = path.read_text()
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be used ({error}): {remedy}.") from error
    return parse_json(content, form, path, remedy)


def parse_json(content, form, path, remedy="fetch this file again"):
    """Parse a JSON text, and return its value if the value has the expected form.

    path: the path or URL of the text, for the error message. The other arguments and the
    errors are the same as in read_json.
    """
    try:
        value = json.loads(content)
        check_json(value, form)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be used ({error}): {remedy}.") from error
    return value


def checksum(value):
    """Return the CRC-32 checksum of a JSON value. The order of keys does not matter."""
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())


def write_checked(path, value):
    """Write a dict to a JSON file, together with a checksum.

    read_checked reads this file and verifies the checksum.
    """
    write_file(path, json.dumps(value | {"check": checksum(value)}, indent=1))


def read_checked(path, form, remedy="remove this file, and it will be written again"):
    """Read a dict that write_checked has written to a file, and verify its checksum.

    Raises UserError if the file is damaged.
    """
    value = read_json(path, form | {"check": int}, remedy)
    if value.pop("check") != checksum(value):
        raise UserError(f"{path} is damaged: {remedy}.")
    return value


KIND_NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    type(None): "none",
}


def check_fields(cfg):
    """Raise UserError if a setting has a wrong type or a value that is not allowed."""
    for name, item, value in fields(cfg):
        # For the type int | None, kinds is (int, NoneType). For int, kinds is (int,).
        kinds = getattr(item.type, "__args__", (item.type,))
        is_number = type(value) in (int, float)
        # These are the limits of a number field that is declared without the functions
        # between and at_least.
        least, most = (1, 2**31 - 1) if int in kinds else (-1e30, 1e30)
        low = item.metadata.get("low", least)
        high = item.metadata.get("high", most)
        choices = item.metadata.get("choices", [value])
        expected = None
        if type(value) not in kinds and not (is_number and float in kinds):
            expected = " or ".join(KIND_NAMES[kind] for kind in kinds)
        elif value not in choices:
            expected = " or ".join(choices)
        elif is_number and not low <= value <= high:
            expected = f"at least {low}" if value < low else f"at most {high}"
        if expected:
            raise UserError(f"--{name} must be {expected}, not {value!r:.60}.")


def check(cfg):
    """Raise UserError if a setting is invalid or contradicts another setting.

    The commands call this function before they begin to work.
    """
    check_fields(cfg)
    m = cfg.model
    d = cfg.data
    t = cfg.train
    for name, value, default, table in (
        ("model.activation", m.activation.removeprefix("gated_"), "gelu", ACTIVATIONS),
        ("model.positions", m.positions, ModelConfig.positions, POSITIONS),
        ("train.optimizer", t.optimizer, TrainConfig.optimizer, OPTIMIZERS),
        ("train.loss", t.loss, TrainConfig.loss, LOSSES),
    ):
        # The module model.py fills ACTIVATIONS and POSITIONS, train.py fills OPTIMIZERS,
        # and evaluate.py fills LOSSES. A command that does not import the module of a
        # table cannot check a name. Such a table does not have the default name.
        if default in table and value not in table:
            raise UserError(
                f"--{name} {value} is unknown{nearest(value, table) or '.'} The known "
                f"names are {', '.join(table)}. The recipe file of a run can define more "
                f"names: if you trust this file, add --config RUN/recipe.py, which "
                f"executes it."
            )
    if m.positions == "rotary" and m.d_kv % 2:
        raise UserError(
            f"--model.positions rotary rotates pairs of channels, but --model.d_kv "
            f"{m.d_kv} is odd: use an even number."
        )
    if m.relative_max_distance <= m.relative_buckets // 2:
        raise UserError(
            f"--model.relative_max_distance must be greater than "
            f"{m.relative_buckets // 2}, which is half of --model.relative_buckets."
        )
    require_memory(
        {"rows of a batch": 16 * t.batch_size * (d.inputs_length + d.targets_length)},
        machine_memory(),
        "--train.batch_size, --data.inputs_length or --data.targets_length",
    )
    if t.batch_size % t.microbatches:
        raise UserError(
            f"--train.microbatches {t.microbatches} does not divide the {t.batch_size} "
            f"rows of a batch: change --train.microbatches or --train.batch_size."
        )
    steps = re.fullmatch(r"(\d{1,9}):(\d{1,9})", t.profile)
    if t.profile and not (steps and 1 <= int(steps[1]) <= int(steps[2])):
        raise UserError(
            f"--train.profile {t.profile} is not valid: write FIRST:LAST, such as 10:13, "
            f"to trace the steps 10 to 13."
        )
    check_processes(cfg.distributed)
    check_decoding(cfg.decode)


def check_processes(cfg):
    """Raise UserError if the --distributed flags are incomplete or wrong.

    cfg: a DistributedConfig. Its coordinator, processes and process must all be set, or
        all be empty.
    """
    given = (cfg.coordinator or None, cfg.processes, cfg.process)
    if given.count(None) == 3:
        return
    if (
        None in given
        or cfg.process >= cfg.processes
        or not re.fullmatch(r"\S+:\d{1,5}", cfg.coordinator)
    ):
        raise UserError(
            "The --distributed flags are incomplete or wrong: give "
            "--distributed.coordinator HOST:PORT, --distributed.processes N and "
            "--distributed.process I, with I from 0 to N - 1."
        )


def check_decoding(cfg):
    """Raise UserError if the --decode flags contradict each other.

    Beam search cannot be combined with sampling. Several outputs for each example need
    sampling or enough beams.
    """
    samples = cfg.temperature or cfg.top_k or cfg.top_p
    if cfg.beams and samples:
        raise UserError(
            "Beam search (--decode.beams) cannot be combined with sampling "
            "(--decode.temperature, --decode.top_k, --decode.top_p): leave out "
            "--decode.beams or the sampling flags."
        )
    if not samples and cfg.num_return > max(1, cfg.beams):
        raise UserError(
            f"--decode.num_return {cfg.num_return} needs sampling "
            f"or at least as many beams: add --decode.temperature 1 or --decode.beams N."
        )


@cache  # read the file only once, although each decoded batch needs the result
def machine_memory():
    """Return the memory of this machine, or of its container if smaller, in bytes."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(memory, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):
        # The file memory.max exists only on Linux. If the memory of the container is not
        # limited, the file contains the word "max".
        return memory


def require_memory(parts, available, flags):
    """Raise UserError if a command needs more memory than is available.

    parts: the arrays that are in memory at the same time, as {name: number of bytes}.
    available: the number of available bytes.
    flags: the flags that reduce the memory, for the message.
    """
    total = sum(parts.values())
    if total > available:
        listed = ", ".join(
            f"{name} {size / 1e9:,.3g}" for name, size in parts.items() if size
        )
        raise UserError(
            f"This needs at least {total / 1e9:,.3g} GB of memory ({listed}), but only "
            f"{available / 1e9:,.3g} GB are available: lower {flags}."
        )


def parse_shard(text):
    """Convert the text of --shard to a pair of numbers: "0/4" becomes (0, 4).

    The first of four machines has the shard 0/4, and the last one has 3/4.
    """
    match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
    index, number = map(int, match.groups()) if match else (0, 0)
    if index >= number:
        raise UserError(
            f"--shard {text} is not valid: for 4 machines, write 0/4, 1/4, 2/4 or 3/4."
        )
    return index, number


# ---- files -----------------------------------------------------------------------------


def is_remote(path):
    """Return whether a path is remote, such as gs://bucket/run."""
    return "://" in str(path)


def to_path(name):
    """Convert the name of a file or folder to a path object.

    A local name becomes a pathlib.Path. A remote name, such as gs://bucket/run, becomes
    an epath.Path, which has the same methods. Raises UserError if the prefix is unknown.
    """
    if not is_remote(name):
        return Path(name)
    # Import etils only for remote paths, because it is not in the standard library.
    from etils import epath

    try:
        return epath.Path(name)
    except KeyError as error:
        raise UserError(
            f"{name} has an unknown prefix: for a remote path, use gs://, s3:// or az://."
        ) from error


@contextmanager
def naming_file(path):
    """Add the path of a file to each OSError inside a `with naming_file(path)` block.

    Otherwise, an error such as "No space left on device" would not say which file it
    concerns.
    """
    try:
        yield
    except OSError as error:
        error.filename = os.fspath(path)
        raise


@contextmanager
def naming_task(name, kind, function):
    """Convert an error inside a `with` block to a UserError that names the task.

    The block calls a metric or a postprocessor of the task. The user's recipe file may
    define this function, so the function may raise any exception.

    kind: "metric" or "postprocessor".
    function: the function, or its name.
    """
    try:
        yield
    except Exception as error:
        raise UserError(
            f"The {kind} {getattr(function, '__name__', function)} of the task {name} "
            f"failed ({error!r:.300}): correct the {kind} in the definition of the task, "
            f"or use another one."
        ) from error


def write_file(path, content):
    """Write bytes or text to a file, completely or not at all.

    The content is first written to a temporary file, which then gets the name `path`.
    Therefore a kill or a full disk never leaves an incomplete file under this name.
    """
    path = to_path(path)
    if isinstance(content, str):
        content = content.encode()
    if is_remote(path):
        path.write_bytes(content)  # A remote file appears only when it is complete.
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
    """Append text to a file.

    A remote file cannot be extended. The whole file is therefore read and written again.
    """
    if is_remote(path):
        return write_file(path, (path.read_text() if path.exists() else "") + text)
    path.parent.mkdir(parents=True, exist_ok=True)
    with naming_file(path), open(path, "a") as file:
        file.write(text)


def lock(path, wait=False):
    """Lock a file, so that other processes cannot lock it, and return the open file.

    The lock is released when the file is closed, or when the process ends or is killed.
    If another process has locked the file, this function raises BlockingIOError. With
    wait=True, the function waits for the lock instead.
    """
    file = open(path, "a+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:  # The filesystem does not support locks, so only warn.
        note(
            f"{path} cannot be locked ({error}): make sure that only one command at a "
            f"time uses this folder."
        )
    return file


# ---- the command -----------------------------------------------------------------------


def prepare_script():
    """Prepare the process of a command, before the command imports large libraries.

    The function replaces closed streams, turns on UTF-8 and lets Ctrl-C end the process.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        # A stream is None if the shell has closed it, for example with `>&-`.
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))
    # With LC_ALL=C and PYTHONUTF8=0, Python reads arguments and files as ASCII. Start
    # again in Python's UTF-8 mode, because texts and file names may contain any letter.
    if sys.getfilesystemencoding() == "ascii":
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    # Until run_command is called, Ctrl-C ends the process without a traceback.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


# OWN_FILES contains the paths of the eight Python files of plain T5.
OWN_FILES = [
    Path(__file__).with_name(f"{name}.py")
    for name in "configs data partition model infer evaluate train convert".split()
]

# Prepare the process if it runs a command of plain T5. If a notebook or pytest imports
# this file, do not change the process of the notebook or of pytest.
if Path(sys.argv[0]).absolute() in OWN_FILES:
    prepare_script()


@contextmanager
def watch_signals(names, handler, act):
    """Call act(number) in a thread when this process receives one of the named signals.

    Python calls a signal handler only in the main thread. The main thread can be blocked
    for minutes, for example in the compiler, but the new thread reacts at once. A signal
    that the process ignores, as under nohup, stays ignored.

    names: the names of the signals, such as "SIGINT".
    handler: the signal handler that Python calls in the main thread.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    numbers = [signal.Signals[name] for name in names]
    numbers = [n for n in numbers if signal.getsignal(n) is not signal.SIG_IGN]

    def watch():
        # Python writes the number of each signal to the pipe when the signal arrives.
        while received := os.read(reader, 1):
            if received[0] in numbers:
                act(signal.Signals(received[0]))
        os.close(reader)

    old_pipe = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    old_handlers = {number: signal.signal(number, handler) for number in numbers}
    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        for number, old in old_handlers.items():
            signal.signal(number, old)
        signal.set_wakeup_fd(old_pipe)
        os.close(writer)


def interrupt(number):
    """End the command after Ctrl-C.

    The main thread receives a KeyboardInterrupt, and removes temporary files. If the main
    thread is still busy after two seconds, for example in the compiler, the process ends
    anyway.
    """
    note("interrupted")
    time.sleep(2)
    os._exit(130)


def report_unraisable(unraisable):
    """Report an exception that Python cannot pass to any caller, except for Ctrl-C.

    Ctrl-C may arrive while a callback runs, for example the callback of JAX that frees
    memory. Python then discards the KeyboardInterrupt, and the function `interrupt` ends
    the process.
    """
    if unraisable.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(unraisable)


def run_command(main):
    """Run the function main of a script, and exit with the status that main returns.

    main gets the command-line arguments. If main raises a UserError, print only its
    message, without a traceback, and exit with status 2. After other errors, exit with
    status 1.
    """
    # Print each line immediately, even if the output goes to a file or a pipe. Print
    # bytes that are not UTF-8, for example in a path, as escape sequences.
    sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
    script = os.path.basename(sys.argv[0])
    if main.__module__ == "__main__":
        # A recipe file may import the running script, for example with `import train`.
        # This import must return the running module. Otherwise Python would load a second
        # copy of the module.
        sys.modules[script.removesuffix(".py")] = sys.modules["__main__"]
    sys.unraisablehook = report_unraisable
    try:
        with watch_signals(["SIGINT"], signal.default_int_handler, interrupt):
            status = main(sys.argv[1:])
        sys.stdout.flush()
    except UserError as error:
        note(f"{script}: {error}", always=True)
        status = 2
    except BrokenPipeError:
        discard_output(sys.stdout)
        status = 1
    except OSError as error:
        note(
            f"{script}: {error.filename or 'a file'} cannot be read or written "
            f"({error.strerror or error}). Solve this problem, or name another path.",
            always=True,
        )
        status = 1
    except KeyboardInterrupt:
        status = 130
    except Exception:
        if single_process:
            raise
        traceback.print_exc()
        status = 1
    if status and not single_process:
        # Do not call sys.exit here. sys.exit would wait for the other processes of the
        # run, and the other processes would wait for this process.
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


TABLE_HEAD = (
    "recipe               layers  width  task                          "
    "    row   batch      steps"
)
TABLE_ROW = (
    "{0.name:20} {0.model.num_layers:>2}+{0.model.num_decoder_layers:<4} "
    "{0.model.d_model:>5}  {0.data.task:28} {0.data.inputs_length:>4}+"
    "{0.data.targets_length:<4} {0.train.batch_size:>5} {0.train.steps:>10,}"
)
TABLE_LEGEND = """
layers     encoder layers + decoder layers
width      length of the vector that represents a token (d_model)
row        tokens of inputs + tokens of targets
batch      rows in one training step
steps      step at which training ends, including the steps of a continued checkpoint

python configs.py NAME prints all settings of a recipe.
python train.py --config NAME trains with this recipe."""


def main(argv):
    """Print the list of all recipes, or all settings of one recipe.

    argv: the command-line arguments. [] prints the list, and ["tiny"] prints the settings
        of the recipe tiny.
    """
    if not argv:
        rows = [TABLE_ROW.format(cfg) for cfg in RECIPES.values()]
        print(TABLE_HEAD, *rows, TABLE_LEGEND, sep="\n")
        return
    if argv[0].startswith("-"):
        print(__doc__.partition("\nExample:")[0])
        return
    cfg = load_recipe(argv[0])
    for section, kind in SECTIONS.items():
        print(f"{section}: {kind.__doc__}")
        for name, text in field_help(kind).items():
            value = getattr(getattr(cfg, section), name)
            line = f"  {name:22} {value!s:26} {text}"
            print(textwrap.fill(line, 110, subsequent_indent=" " * 52))


if __name__ == "__main__":
    run_command(main)
