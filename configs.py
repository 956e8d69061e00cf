"""Define every setting of plain T5 and the named recipes, with the standard library only.

A recipe is an immutable Config with six sections of plain fields: model, data, train,
decode, mesh and distributed. Every command takes a recipe with `--config NAME` and
changes single fields with flags such as `--train.steps 500`. train.py writes the
resulting Config to RUN_DIR/config.json, and the other commands read that file.

    python configs.py               list the recipes
    python configs.py small_c4      print all fields of one recipe
    python train.py --help          print all fields with their meaning

Example: change one field of a recipe. The recipe itself does not change.

    >>> from configs import RECIPES, override
    >>> cfg = override(RECIPES["tiny"], {"train.steps": 500})
    >>> cfg.train.steps, RECIPES["tiny"].train.steps
    (500, 1500)
"""

import argparse
import contextlib
import dataclasses
import difflib
import fcntl
import functools
import inspect
import json
import os
import re
import sys
import textwrap
import traceback
import zlib
from dataclasses import dataclass, field, replace
from pathlib import Path


class UserError(Exception):
    """Report a mistake of the user.

    The message says what happened and what to do. run_command prints only this message,
    without a traceback, and exits with status 2.
    """


# ---- the fields ------------------------------------------------------------------------
# The comment above a field is its help text. --help and `python configs.py NAME` print
# this text. To limit the values of a field, write its default with one_of, between or
# at_least. An integer field without stated bounds must be at least 1.


def one_of(default, *others):
    """Declare a field that accepts only the default and the other given values."""
    return field(default=default, metadata={"choices": (default, *others)})


def between(low, high, default):
    """Declare a number field with a smallest and a largest allowed value."""
    return field(default=default, metadata={"low": low, "high": high})


def at_least(low, default):
    """Declare a number field with a smallest allowed value."""
    return field(default=default, metadata={"low": low})


@dataclass(frozen=True)
class ModelConfig:
    """Size and architecture of the model."""

    # Number of rows of the embedding table.
    # This is the number of token ids, rounded up to a multiple of 128.
    vocab_size: int = 32128
    # Width of the residual stream: the length of the vector that represents a token.
    d_model: int = 512
    # Width of the hidden layer of each MLP.
    d_ff: int = 1024
    # Width of one attention head. num_heads * d_kv need not equal d_model.
    d_kv: int = 64
    # Number of attention heads in each layer.
    num_heads: int = 6
    # Number of encoder layers.
    num_layers: int = 8
    # Number of decoder layers. With 0 the model is only an encoder.
    num_decoder_layers: int = at_least(0, 8)
    # Activation function of the MLP, a name in model.ACTIVATIONS.
    # The prefix "gated_" makes the MLP gated. T5 1.1 uses gated_gelu, T5 1.0 uses relu.
    activation: str = "gated_gelu"
    # Whether the output layer shares the weights of the embedding (T5 1.0).
    # Shared weights are scaled by d_model^-0.5 in the output layer.
    tied: bool = False
    # Number of buckets into which relative positions are grouped.
    # Each head learns one attention bias for each bucket.
    relative_buckets: int = at_least(4, 32)
    # Distance in tokens from which all relative positions fall into the last bucket.
    relative_max_distance: int = 128
    # Whether each layer has its own table of relative-position biases (UMT5).
    # With "false", all layers of the encoder share one table, and all layers of the
    # decoder share another.
    layer_biases: bool = False
    # Dropout rate. T5 1.1 uses 0 for pretraining and 0.1 for fine-tuning.
    dropout: float = between(0, 0.99, 0.0)
    # Number format of the activations. The stored weights are always float32.
    # "auto" means float32 on a CPU, and bfloat16 on a GPU or TPU.
    dtype: str = one_of("auto", "float32", "bfloat16")
    # Which activations of a layer the forward pass saves for the backward pass.
    # Rematerialization means that the backward pass recomputes all other activations.
    # This takes time, but saves memory.
    # "dots" saves the results of attention and of the matmuls with weights.
    # "none" saves all activations, which takes the most memory.
    # "full" saves only the input of each layer and the results of attention.
    # It takes the least memory, and adds about one third to the computation of a step.
    remat: str = one_of("dots", "none", "full")


@dataclass(frozen=True)
class DataConfig:
    """Source of the examples, and how examples are made."""

    # Where the examples are read, as KIND:NAME, such as text:books/*.txt.
    # README lists the kinds. Empty means the source that the task names.
    # For span_corruption this is python:, the manual and docstrings of Python itself.
    source: str = ""
    # Where the held-out examples are read.
    # Empty means the validation split of the source.
    # If the source has no splits, its first 1 % is held out.
    validation_source: str = ""
    # Task or mixture to train on. `python data.py --list` prints all names.
    task: str = "span_corruption"
    # Tasks or mixtures to evaluate during training, separated by commas.
    # Empty means the training task.
    eval_tasks: str = ""
    # Names of the fields in the source, if they differ from the names in the task.
    # Examples: text=content or inputs=question,targets=answer.
    fields: str = ""
    # The vocabulary. "train:N" trains N SentencePiece tokens on the source.
    # A path names a SentencePiece model. "bytes" means the byte vocabulary of ByT5.
    # "ids:N" means that texts are token ids below N, separated by spaces.
    vocab: str = "train:32000"
    # Number of tokens in a row of inputs, EOS included. Longer examples are cut.
    inputs_length: int = 512
    # Number of tokens in a row of targets, EOS included. Longer examples are cut.
    targets_length: int = 114
    # Whether a row of a training batch may hold several short examples.
    pack: bool = True
    # Whether token files stay on disk after training has used them.
    # "false" saves disk space when the text is very large.
    keep_tokens: bool = True
    # Fraction of the tokens that span corruption removes.
    noise_density: float = between(0.001, 0.999, 0.15)
    # Mean number of tokens in a span that span corruption removes.
    mean_span_length: float = between(1, 1000, 3.0)
    # Folder for token files. It gets one subfolder for each source and vocabulary.
    prepared_dir: str = "prepared"
    # Folder of the TFDS datasets.
    # Empty means the environment variable TFDS_DATA_DIR, or ~/tensorflow_datasets.
    tfds_dir: str = ""
    # What happens when an example or a file cannot be read.
    # "stop" ends the command with a message. "skip" skips the example and counts it.
    on_error: str = one_of("stop", "skip")


@dataclass(frozen=True)
class TrainConfig:
    """Optimizer, learning rate, evaluation and checkpoints of a training run."""

    # Step at which training ends. Step numbers are absolute, so start_step is included.
    steps: int = 10_000
    # Step at which a new run begins.
    # Recipes that continue a published checkpoint use its step, 1,000,000.
    start_step: int = at_least(0, 0)
    # What --init_from loads. "params" means the weights.
    # "all" means the weights, the optimizer state and the step.
    restore: str = one_of("params", "all")
    # Number of rows in a batch, over all devices and microbatches together.
    batch_size: int = 128
    # Number of equal parts into which each batch is split to save memory.
    # The gradients of the parts are added before the weights are updated.
    microbatches: int = 1
    # Name of the optimizer, an entry of train.OPTIMIZERS.
    optimizer: str = "adafactor"
    # Value of the factor "constant" of the learning rate schedule.
    learning_rate: float = at_least(0, 1.0)
    # Learning rate schedule: a product of the factors of T5X, which train.py explains.
    schedule: str = "constant * rsqrt_decay"
    # Number of warmup steps.
    # linear_warmup rises until this step, and rsqrt_decay is flat until this step.
    warmup_steps: int = 10_000
    # Number that is subtracted from the step before the schedule is computed.
    schedule_offset: int = at_least(0, 0)
    # Factor by which decay_every multiplies the learning rate.
    # linear_decay lowers the rate by this fraction of learning_rate in every step.
    decay_factor: float = 0.5
    # Number of steps after which decay_every lowers the learning rate again.
    steps_per_decay: int = 20_000
    # Number of steps in one cycle of cosine_decay.
    steps_per_cycle: int = 100_000
    # Fraction that each update subtracts from every weight.
    # adamw multiplies this fraction by the learning rate. adafactor does not, as in T5X.
    weight_decay: float = at_least(0, 0.0)
    # Weight of the z-loss log(Z)^2, where Z is the softmax denominator.
    # The z-loss keeps the logits near zero.
    z_loss: float = at_least(0, 1e-4)
    # Probability that label smoothing takes from the target token.
    # All other tokens share this probability.
    label_smoothing: float = between(0, 0.99, 0.0)
    # Number by which the summed loss is divided before gradients are computed.
    # "none" means the number of target tokens in the batch. T5X pretrains with 233472.
    loss_divisor: float | None = at_least(1e-6, None)
    # Number of steps between two log lines of training metrics. 0 turns them off.
    log_every: int = at_least(0, 10)
    # Number of steps between two evaluations of the held-out loss. 0 turns them off.
    eval_every: int = at_least(0, 1000)
    # Number of steps between two evaluations of the task metrics on decoded text.
    # 0 turns these evaluations off.
    infer_every: int = at_least(0, 0)
    # Number of batches in one evaluation. 0 means the complete split.
    eval_batches: int = at_least(0, 20)
    # Number of steps between two checkpoints. 0 turns checkpoints off.
    save_every: int = at_least(0, 1000)
    # Whether checkpoints are written in the background, from a copy in main memory.
    async_save: bool = True
    # Number of checkpoints to keep. Older checkpoints are deleted.
    keep: int = 3
    # A metric, as named in metrics.jsonl. The checkpoint with the best value of this
    # metric is kept too.
    # Empty means none.
    keep_best: str = ""
    # Steps that jax.profiler traces, as FIRST:LAST. The trace goes to RUN_DIR/profile.
    # Empty means no trace.
    profile: str = ""
    # Random seed of the initial weights, the order of the data, the noise and dropout.
    seed: int = between(0, 2**31 - 1, 0)


@dataclass(frozen=True)
class DecodeConfig:
    """How text is generated from a trained model."""

    # Number of beams of T5X's beam search. 0 means greedy decoding or sampling.
    beams: int = between(0, 1024, 0)
    # Exponent of the length penalty of beam search.
    alpha: float = 0.6
    # Length penalty by which the score of a beam with n tokens is divided.
    # "gnmt" means ((5 + n) / 6) ** alpha as in T5X. "length" means n ** alpha.
    penalty: str = one_of("gnmt", "length")
    # Largest number of generated tokens, EOS included. "none" means data.targets_length.
    max_len: int | None = None
    # Temperature of sampling. 0 means greedy decoding.
    # With top_k or top_p, 0 means temperature 1.
    temperature: float = at_least(0, 0.0)
    # Sample only from the k most probable tokens. 0 means all tokens.
    top_k: int = at_least(0, 0)
    # Nucleus sampling: sample only from the smallest set of most probable tokens whose
    # probabilities reach top_p together. 0 means all tokens.
    top_p: float = between(0, 1, 0.0)
    # Number of predictions for each example: samples, or the best beams.
    num_return: int = 1
    # Whether to write a list of all predictions with their scores.
    # With num_return above 1 the list is always written.
    return_all: bool = False
    # Number of examples that are decoded together. The results do not depend on this
    # number.
    batch_size: int = 32


@dataclass(frozen=True)
class MeshConfig:
    """How the devices share one model."""

    # Number of devices over which each copy of the model is split (tensor parallelism).
    model: int = 1
    # Whether the weights and the optimizer state are also split over the data axis of the
    # mesh (ZeRO-3). The copies of the model then share one set of weights.
    fsdp: bool = False


@dataclass(frozen=True)
class DistributedConfig:
    """How several processes of one run find each other."""

    # Address HOST:PORT of process 0.
    # Empty means that the cluster provides it, or that there is a single process.
    coordinator: str = ""
    # Number of processes. "none" means that the cluster provides it.
    processes: int | None = None
    # Index of this process, counted from 0. "none" means that the cluster provides it.
    process: int | None = at_least(0, None)
    # Number of seconds after which a process that does not respond counts as dead.
    timeout: int = 100


@dataclass(frozen=True)
class Config:
    """The complete configuration of a run: a recipe, or a recipe with changed fields."""

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
# A recipe file is a Python file that defines CONFIG and may define tables with these
# names. load_recipe adds the entries of the recipe file to the tables below. The built-in
# entries come from data.py, model.py, evaluate.py and train.py.

TASKS = {}  # name -> data.Task
MIXTURES = {}  # name -> {name of a task or mixture: rate}
ACTIVATIONS = {}  # name -> function of an array
METRICS = {}  # name -> function of targets and predictions
OPTIMIZERS = {}  # name -> train.Optimizer

# ---- messages --------------------------------------------------------------------------

# Whether this process prints messages. Among several processes, only the main process
# does. partition.start_jax sets this variable.
prints_progress = True
# Whether the run consists of one process. partition.start_jax sets this variable.
single_process = True


def escape_controls(text):
    """Replace control characters by visible escape sequences such as \\x1b."""
    return re.sub(
        r"[^\n\t\x20-\x7e\xa0-\U0010ffff]",
        lambda match: match[0].encode("unicode_escape").decode(),
        str(text),
    )


def note(text, always=False):
    """Print a message on standard error.

    With several processes, only the main process prints it, unless `always` is set.
    """
    if prints_progress or always:
        print(escape_controls(text), file=sys.stderr, flush=True)


# ====== below: recipes, the command line, run directories, checks, files ================

# ---- recipes ---------------------------------------------------------------------------

# The sizes of T5 1.1, from t5x/examples/t5/t5_1_1/{size}.gin
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

# T5 1.0 small, from t5x/examples/t5/t5_1_0/small.gin
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
# 63,900 trained tokens and 100 sentinels make 64,000 token ids.
RO = DataConfig(
    source="hf:dumitrescustefan/rlm",
    vocab="train:63900",
    targets_length=256,
    keep_tokens=False,
)

BLEU = "inference_eval/wmt_t2t_ende_v003/bleu"
BEAMS = DecodeConfig(beams=4, batch_size=64)
# Fine-tuning as in t5x/configs/runs/finetune.gin: the learning rate is constant, and the
# steps continue those of a published checkpoint at step 1,000,000. Evaluations use
# complete splits. (In T5X, train_eval uses 20 batches and infer_eval uses complete
# splits.)
FINETUNE = TrainConfig(
    start_step=1_000_000,
    steps=1_020_000,
    learning_rate=1e-3,
    schedule="constant",
    infer_every=1000,
    eval_batches=0,
    save_every=5000,
)
# Fine-tuning as in Raffel et al. 2020, section 3.1.3: 2^18 steps. The paper reports the
# best of the checkpoints.
PAPER = replace(FINETUNE, steps=1_000_000 + 2**18, eval_every=5000, infer_every=5000)
# T0, from Sanh et al. 2022 and bigscience-workshop/t-zero, training/README.md. Training
# starts from the LM-adapted T5 at step 1,100,000 and takes 12,200 steps of 2^20 input
# tokens. The original run also used 8 microbatches, of 2 rows on each of 64 copies of the
# model. Nothing is evaluated during training.
T0 = TrainConfig(
    start_step=1_100_000,
    steps=1_112_200,
    batch_size=1024,
    microbatches=8,
    learning_rate=1e-3,
    schedule="constant",
    eval_every=0,
)
# The Romanian models, from github.com/dumitrescustefan/t5x_models,
# ro_t5x_base_pretrain.gin
RO_TRAIN = TrainConfig(steps=2_000_000, batch_size=128, save_every=10_000, keep=5)

RECIPES = {
    cfg.name: cfg
    for cfg in (
        # The recipe for a first try. It downloads nothing and takes about two minutes on
        # two CPU cores. Most masked spans can be guessed from a few neighboring words, so
        # the rows are short, and a batch has many of them.
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
        # Fine-tune the tiny model on tasks that follow simple rules, such as spelling
        # numbers. The model learns to solve these tasks without a mistake:
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
        # Compare the learning curve with that of T5X, on sequences that have to be
        # reversed. T5X's own training program, run on the same examples with 5 seeds,
        # reaches a held-out accuracy of .32 to .48 at step 200, .75 to .88 at 400, .95 to
        # .99 at 600 and .989 to .997 at 1000. The loss is a plain sum, as in T5X. The
        # scale of the loss matters to Adafactor only for gradients near its epsilon, such
        # as those of unused token ids.
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
        # Measure the speed of train.py: T5 1.1 small on random token ids. Nothing is
        # evaluated or saved.
        Config(
            "small_bench",
            replace(SIZES["small"], dtype="float32"),
            DataConfig(source="random:"),
            TrainConfig(steps=10, batch_size=8, log_every=1, eval_every=0, save_every=0),
        ),
        # Pretrain on C4: t5x/examples/t5/t5_1_1/examples/{small,base}_c4_pretrain.gin.
        # The larger sizes use the settings of base. The learning rate of
        # t5x/configs/runs/pretrain.gin is 0.01 for 10,000 steps and then 1 / sqrt(step).
        # To read the files that allenai publishes, add --data.source
        # 'jsonl:en/c4-{split}.*.json.gz'.
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
        # LM adaptation, from Lester et al. 2021, section 3.1: 100,000 more steps in which
        # the model continues prefixes, with the learning rate of pretraining. --init_from
        # names a run of T5 1.1 at step 1,000,000.
        Config(
            "small_lm_adapt",
            SIZES["small"],
            replace(C4, task="prefix_lm", targets_length=512),
            TrainConfig(start_step=1_000_000, steps=1_100_000, batch_size=256),
        ),
        # Translate English to German:
        # t5x/examples/t5/t5_1_1/examples/{base_wmt_from_scratch, small_wmt_finetune,
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
        # Train on all tasks of GLUE and evaluate STS-B: t5x/docs/usage/finetune.md. The
        # lengths of the targets in this recipe and the next three:
        # t5/models/gin/sequence_lengths/*.gin
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
        # Train T0 on P3: add --data.source seqio:P3 or parquet:P3. For T0+ and T0++ add
        # --data.task t0+_train or --data.task t0++_train.
        *(
            Config(f"{size}_t0", replace(SIZES[size], dropout=0.1), P3, T0)
            for size in ("small", "xxl")
        ),
        # Pretrain a Romanian T5 on streamed text. For another language or text, add
        # --data.source 'text:DIR/*.txt'.
        Config("base_ro", replace(SIZES["base"], vocab_size=64_000), RO, RO_TRAIN),
        Config(
            "large_ro",
            replace(SIZES["large"], vocab_size=64_000),
            replace(RO, targets_length=512),
            RO_TRAIN,
        ),
        # Continue mT5 on Romanian text, with the final learning rate of mT5. --init_from
        # names the run with the weights and the vocabulary of mT5.
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
        # Fine-tune on your own pairs: add --data.source jsonl:pairs.jsonl. --init_from
        # names a run with the weights of T5 1.1, FLAN, T0, the LM-adapted T5 or, for the
        # recipe umt5_small, UMT5 (Chung et al. 2023).
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

# Sections and fields that may change when a run is resumed. Any other change is refused,
# because the resumed run would be another experiment.
CHANGEABLE = set(
    "mesh distributed decode data.keep_tokens train.steps train.log_every "
    "train.eval_every train.infer_every train.eval_batches train.save_every "
    "train.async_save train.keep train.keep_best train.microbatches "
    "train.profile".split()
)
# Version of the training data. This number increases if a new version of plain T5 makes
# different batches from the same text. A run is never resumed with different batches.
DATA_FORMAT = 2


def fields(cfg):
    """Yield ("section.field", dataclass field, value) for each field of a Config."""
    for section, kind in SECTIONS.items():
        part = getattr(cfg, section)
        for item in dataclasses.fields(kind):
            yield f"{section}.{item.name}", item, getattr(part, item.name)


def differences(cfg, other):
    """Return the fields in which two Configs differ.

    The result is a dict {"section.field": (value, other value)}.
    """
    pairs = zip(fields(cfg), fields(other))
    return {name: (value, old) for (name, _, value), (_, _, old) in pairs if value != old}


def override(cfg, changes):
    """Return a copy of a Config with changed fields.

    changes: {"section.field": value}.
    """
    for name, value in changes.items():
        section, item = name.split(".")
        cfg = replace(cfg, **{section: replace(getattr(cfg, section), **{item: value})})
    return cfg


def parse_value(kind, text):
    """Convert the text of a flag to the type of a field, such as bool or int | None.

    A text that cannot be converted is returned unchanged. check_fields refuses this text.
    """
    # The type int | None consists of the two types int and NoneType.
    kinds = getattr(kind, "__args__", (kind,))
    value = {"none": None, "true": True, "false": False}.get(text.lower(), text)
    if type(value) in kinds or bool in kinds:
        return value
    try:
        return kinds[0](text)
    except ValueError:
        return text


def nearest(word, known):
    """Return the suggestion "; did you mean X?" for a misspelled word.

    The suggestion is empty if no known word is similar to the word.
    """
    close = difflib.get_close_matches(word, known, 1, 0.4)
    return f"; did you mean {close[0]}?" if close else ""


def field_help(section):
    """Return {field: help text} for the class of a section.

    The help text of a field is the comment above the field in the source code.
    """
    source = inspect.getsource(section)
    comments = re.findall(r"^((?:    # .*\n)+)    (\w+):", source, re.MULTILINE)
    return {name: " ".join(re.findall(r"# (.*)", text)) for text, name in comments}


def refuse_flags(message):
    """Raise UserError for a mistake in the command line that argparse found."""
    raise UserError(f"{message}; --help lists all flags.")


def parse_args(description, argv, **flags):
    """Parse the command line of a script.

    description: the docstring of the script.
    flags: the options of the script, as name=dict(arguments of argparse's
        add_argument). An option whose name ends in "_" is positional.

    Returns a Namespace with config, run_dir and the options of the script, and the fields
    that were given as flags, {"section.field": value}.
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
        help="folder of the run; train.py uses runs/RECIPE by default"
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
                help=text.replace("%", "%%"),  # argparse reads a single % as a format
            )
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        known = re.findall(r"^  (--[\w.]+)", parser.format_help(), re.MULTILINE)
        hint = nearest(unknown[0].split("=")[0], known)
        raise UserError(
            f"Unknown argument {unknown[0]}{hint or '; --help lists all flags.'}"
        )
    changes = {}
    for name, item, _ in fields(Config("")):
        if name in args:
            changes[name] = parse_value(item.type, vars(args).pop(name))
    return args, changes


# ---- recipes and runs ------------------------------------------------------------------


def load_recipe(name):
    """Return the Config of a recipe.

    name: a name in RECIPES, or the path of a Python file that defines CONFIG. The file is
        executed. The file may also define tables such as TASKS, and load_recipe adds the
        entries of these tables to the tables of this module.
    """
    if name in RECIPES:
        return RECIPES[name]
    if not name.endswith(".py"):
        raise UserError(
            f"Unknown recipe {name}{nearest(name, RECIPES) or ';'} "
            f"python configs.py lists all recipes."
        )
    defined = {"__name__": "recipe", "__file__": name}
    try:
        exec(compile(to_path(name).read_bytes(), name, "exec"), defined)
        cfg = defined.get("CONFIG")
        if not isinstance(cfg, Config):
            raise UserError("CONFIG must be a value of configs.Config")
        check_fields(cfg)
        for title in ("TASKS", "MIXTURES", "ACTIVATIONS", "METRICS", "OPTIMIZERS"):
            globals()[title].update(defined.get(title, {}))
    except (Exception, SystemExit) as error:
        raise UserError(
            f"{name} cannot be loaded ({type(error).__name__}: {error}): fix this file, "
            f"or name another --config."
        ) from error
    return cfg


def read_run(run_dir):
    """Return the Config of a run, and the complete content of its config.json."""
    path = to_path(run_dir) / "config.json"
    if not path.exists():
        raise UserError(
            f"There is no run in {run_dir} (no config.json): train.py makes one."
        )
    form = {
        "name": str,
        "data_format": int,
        "corpus": str,
        "model": dict,
        "data": dict,
        "train": dict,
        "decode": dict,
    }
    stored = read_json(path, form, "restore it from a copy")
    try:
        sections = {
            section: kind(**stored.get(section, {})) for section, kind in SECTIONS.items()
        }
        cfg = Config(stored["name"], **sections)
        check_fields(cfg)
    except (TypeError, UserError) as error:
        raise UserError(
            f"{path} cannot be used ({error}): restore this file from a copy, or use the "
            f"version of plain T5 that wrote it."
        ) from error
    return cfg, stored


def load_run(run_dir):
    """Return the Config of a run, without executing the recipe file of the run."""
    return read_run(run_dir)[0]


def load_run_recipe(run_dir):
    """Execute the recipe file of a run and return its CONFIG, or None without a file.

    A recipe file is a program. Only commands that need its tasks, objectives or
    optimizers execute the file, and a note says so.
    """
    path = to_path(run_dir) / "recipe.py"
    if not path.exists():
        return None
    note(f"executing {path}, the recipe file of this run")
    return load_recipe(str(path))


def save_run(cfg, run_dir, corpus=""):
    """Write the Config of a run to RUN_DIR/config.json.

    corpus: a digest of the training tokens.
    """
    content = {
        "name": cfg.name,
        "data_format": DATA_FORMAT,
        "corpus": corpus,
        **dataclasses.asdict(cfg),
    }
    # The sections mesh and distributed describe the machine, so they are not stored. A
    # run may be resumed on a different machine.
    del content["mesh"], content["distributed"]
    write_file(os.path.join(run_dir, "config.json"), json.dumps(content, indent=1))


def resolve(args, changes, recipe=False):
    """Return the Config for a command other than training.

    If --run_dir names a run, start from the Config of this run. Otherwise start from the
    recipe that --config names. Then change the fields that were given as flags.

    args, changes: what parse_args returned.
    recipe: whether to execute the recipe file of the run, which defines its tasks.
    """
    if not args.run_dir:
        cfg = load_recipe(args.config or "tiny")
    elif args.config and not args.config.endswith(".py"):
        raise UserError(
            "--config cannot name a recipe together with --run_dir, because the run has "
            "its own configuration: leave out --config. A recipe file (--config FILE.py) "
            "is allowed."
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
    """Return the Config for training, the run directory and the unchanged recipe.

    A new run starts from the recipe that --config names. A resumed run without --config
    starts from its own config.json. Then the fields that were given as flags are changed.
    If the run directory has checkpoints, only the fields in CHANGEABLE may differ from
    config.json. Other differences are listed and refused.

    args, changes: what parse_args returned.
    """
    base = recipe = load_recipe(args.config or "tiny")
    run_dir = args.run_dir or os.path.join("runs", recipe.name)
    folder = to_path(run_dir)
    exists = (folder / "config.json").exists()
    if exists:
        old, stored = read_run(run_dir)
        if not args.config:
            base = old
            recipe = load_run_recipe(run_dir) or RECIPES.get(old.name, old)
    cfg = override(base, changes)
    check(cfg)
    if exists and any(folder.glob("checkpoints/step_*/manifest.json")):
        changed = ", ".join(
            f"--{name} {new} (was {was})"
            for name, (new, was) in differences(cfg, old).items()
            if not {name, name.split(".")[0]} & CHANGEABLE
        )
        if changed:
            raise UserError(
                f"{run_dir} contains a run with another configuration ({changed}): "
                f"leave these fields unchanged, or name another --run_dir."
            )
        if stored["data_format"] != DATA_FORMAT:
            raise UserError(
                f"{run_dir} cannot be resumed, because another version of plain T5 began "
                f"this run with different batches (data format {stored['data_format']} "
                f"instead of {DATA_FORMAT}): start a new run with --init_from {run_dir}."
            )
    return cfg, run_dir, recipe


# ---- checks ----------------------------------------------------------------------------


def check_json(value, form, at="it"):
    """Raise a ValueError if a JSON value does not have the expected form.

    A form is a type, a tuple of types, [form] for a list, {str: form} for a dict with any
    keys, or {key: form} for a dict with these keys. A key that ends in "?" may be
    missing. Keys that are not in the form are ignored.

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
    """Read a JSON file, and return the value in the file.

    form: the expected form of the value, as check_json describes it.
    remedy: what the user should do about a damaged file, for the message.
    Raises UserError if the file cannot be read or the value does not have the form.
    """
    try:
        value = json.loads(path.read_text())
        check_json(value, form)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be used ({error}): {remedy}.") from error
    return value


def checksum(value):
    """Return the CRC-32 checksum of a JSON value."""
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())


def write_checked(path, value):
    """Write a dict and the checksum of the dict to a JSON file.

    read_checked reads this file and verifies the checksum.
    """
    write_file(path, json.dumps(value | {"check": checksum(value)}, indent=1))


def read_checked(path, form, remedy="remove this file, and it will be written again"):
    """Read a dict that write_checked wrote, and verify the checksum of the dict.

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
    """Refuse a Config with a field that has a wrong type or a value out of bounds."""
    for name, item, value in fields(cfg):
        # The type int | None consists of the two types int and NoneType.
        kinds = getattr(item.type, "__args__", (item.type,))
        is_number = type(value) in (int, float)
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
    """Refuse a Config that no run can have, before any work is done."""
    check_fields(cfg)
    m, d, t = cfg.model, cfg.data, cfg.train
    for name, value, table in (
        ("model.activation", m.activation.removeprefix("gated_"), ACTIVATIONS),
        ("train.optimizer", t.optimizer, OPTIMIZERS),
    ):
        # A table is empty if the command did not import the module that fills it.
        if table and value not in table:
            raise UserError(
                f"--{name} {value} is unknown{nearest(value, table)}; known names are "
                f"{', '.join(table)}. A recipe file that you trust may define others: "
                f"--config RUN/recipe.py executes it."
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
            f"rows of --train.batch_size: change one of the two."
        )
    steps = re.fullmatch(r"(\d{1,9}):(\d{1,9})", t.profile)
    if t.profile and not (steps and 1 <= int(steps[1]) <= int(steps[2])):
        raise UserError(f"--train.profile {t.profile}: write FIRST:LAST, such as 10:13.")
    check_processes(cfg.distributed)
    check_decoding(cfg.decode)


def check_processes(cfg):
    """Refuse a DistributedConfig in which some fields are missing or wrong."""
    given = (cfg.coordinator or None, cfg.processes, cfg.process)
    if given.count(None) == 3:
        return
    if (
        None in given
        or cfg.process >= cfg.processes
        or not re.fullmatch(r"\S+:\d{1,5}", cfg.coordinator)
    ):
        raise UserError(
            "Some flags of this process are missing or wrong: give all of "
            "--distributed.coordinator HOST:PORT, --distributed.processes N and "
            "--distributed.process I, with I from 0 to N - 1."
        )


def check_decoding(cfg):
    """Refuse a DecodeConfig that mixes beam search and sampling, or has too few beams."""
    samples = cfg.temperature or cfg.top_k or cfg.top_p
    if cfg.beams and samples:
        raise UserError(
            "--decode.beams selects beam search, but --decode.temperature, "
            "--decode.top_k and --decode.top_p select sampling: leave out the one or the "
            "others."
        )
    if not samples and cfg.num_return > max(1, cfg.beams):
        raise UserError(
            f"--decode.num_return {cfg.num_return} needs sampling "
            f"(--decode.temperature 1) or --decode.beams {cfg.num_return}."
        )


@functools.cache  # This function is called for each batch that is decoded.
def machine_memory():
    """Return the number of bytes of memory that this machine or container has."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(memory, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):
        # The file exists only on Linux. It contains "max" if the container has no limit.
        return memory


def require_memory(parts, available, flags):
    """Refuse to start work that needs more memory than is available.

    parts: {name: bytes} of the arrays that are in memory at one time.
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
    """Convert the text "I/N" of --shard to the pair (I, N), where I counts from 0."""
    match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
    index, number = map(int, match.groups()) if match else (0, 0)
    if index >= number:
        raise UserError(f"--shard {text}: write I/N, from 0/N to N-1/N.")
    return index, number


# ---- files -----------------------------------------------------------------------------


def is_remote(path):
    """Return whether a path names a remote location, such as gs://bucket/run."""
    return "://" in str(path)


def to_path(name):
    """Return a pathlib.Path, or an object with the same methods if the path is remote."""
    if not is_remote(name):
        return Path(name)
    from etils import epath  # not in the standard library, needed only for remote paths

    return epath.Path(name)


@contextlib.contextmanager
def naming_file(path):
    """Add the name of the file to an OSError that is raised while the file is written."""
    try:
        yield
    except OSError as error:
        error.filename = os.fspath(path)
        raise


def write_file(path, content):
    """Write bytes or text to a file, completely or not at all.

    The content is written to a temporary file, which is synced to disk and then renamed.
    A kill or a full disk never leaves an incomplete file.
    """
    path = to_path(path)
    if isinstance(content, str):
        content = content.encode()
    if is_remote(path):
        path.write_bytes(content)  # A remote file appears when it is complete.
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

    A remote file cannot grow, so the complete remote file is written again.
    """
    if is_remote(path):
        return write_file(path, (path.read_text() if path.exists() else "") + text)
    path.parent.mkdir(parents=True, exist_ok=True)
    with naming_file(path), open(path, "a") as file:
        file.write(text)


def lock(path, wait=False):
    """Lock a file and return the open file. Closing the file releases the lock.

    The kernel also releases the lock when the process ends or is killed. If another
    process holds the lock, wait for it (wait=True) or raise BlockingIOError.
    """
    file = open(path, "a+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:  # The filesystem does not support locks, so only warn.
        note(f"{path} cannot be locked ({error}): let only one process work there.")
    return file


# ---- the command -----------------------------------------------------------------------


def run_command(main):
    """Run main(argv) as a command, and exit with the status that main returns.

    A UserError is printed as one message, and the exit status is 2. Other errors give
    status 1.
    """
    # Print every line at once, even if the output goes to a file or a pipe.
    sys.stdout.reconfigure(line_buffering=True)
    script = os.path.basename(sys.argv[0])
    if main.__module__ == "__main__":
        # A recipe file may import this script. The import then returns the running
        # module, and Python does not execute the script a second time.
        sys.modules[script.removesuffix(".py")] = sys.modules["__main__"]
    try:
        status = main(sys.argv[1:])
        sys.stdout.flush()
    except UserError as error:
        note(f"{script}: {error}", always=True)
        status = 2
    except BrokenPipeError:
        # The program that reads the output, such as head, has stopped reading.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    except OSError as error:
        note(
            f"{script}: {error.filename or 'a file'} cannot be read or written "
            f"({error.strerror or error}): fix this, or name another path.",
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
    if status and not single_process:
        # sys.exit would wait for the other processes, which wait for this process.
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

python configs.py NAME prints all fields of a recipe.
python train.py --config NAME trains with this recipe."""


def main(argv):
    """List the recipes, or print all fields of the recipe that the arguments name."""
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
