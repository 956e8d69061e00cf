"""Define the objectives, the activations and the tasks that assets/papers.py compares.

CONFIG pretrains the tiny T5 for 400 steps on the text of the speedrun.
"""

import json
import lzma
import re

import jax
import numpy as np

from configs import RECIPES, override
from data import Objective, SourceFile, Task, as_it_is

CORPUS = "jsonl:assets/speedrun/{split}.jsonl.xz"

# ---- objectives ------------------------------------------------------------------------


class BERTStyle(Objective):
    """Replace 15 % of the tokens, and predict the whole text, as in Raffel et al. 2020.

    Of the chosen tokens, 90 % become <extra_id_0>, and 10 % become a random token.
    """

    packs = False

    def length(self, data):
        return data.inputs_length - 1  # without EOS

    def make(self, chunks, keys, tokenizer, data):
        pairs = []
        for (ids,), key in zip(chunks, keys):
            generator = np.random.default_rng(int(key))
            chosen = generator.random(len(ids)) < data.noise_density
            is_random = generator.random(len(ids)) < 0.1
            # The ids 3, 4, ... are those of text. The sentinels are the last ids.
            other = generator.integers(3, tokenizer.sentinel_ids[0], len(ids))
            new = np.where(is_random, other, tokenizer.sentinel_ids[-1])
            pairs.append((np.where(chosen, new, ids), ids))
        return pairs


class Deshuffling(Objective):
    """Shuffle the tokens of a text, and predict the text (Liu et al. 2019)."""

    packs = False

    def length(self, data):
        return data.inputs_length - 1  # without EOS

    def make(self, chunks, keys, tokenizer, data):
        return [
            (np.random.default_rng(int(key)).permutation(ids), ids)
            for (ids,), key in zip(chunks, keys)
        ]


# ---- three tasks -----------------------------------------------------------------------


def open_sentences(name, split, cfg, whole):
    """Read the sentences of the corpus that have 6 to 14 words."""
    path = CORPUS.partition(":")[2].format(split=split)

    def read(bad):
        seen = set()
        with lzma.open(path, "rt", encoding="utf-8") as file:
            texts = [re.sub(r"\s+", " ", json.loads(line)["text"]) for line in file]
        for text in texts:
            for sentence in re.findall(
                r"(?<=[.!?] )[A-Z][A-Za-z ,\"'()-]+\.(?= |$)", text
            ):
                if 6 <= len(sentence.split()) <= 14 and sentence not in seen:
                    seen.add(sentence)
                    yield f"sentence {len(seen)}", {"sentence": sentence}

    return [SourceFile(f"sentences {split}", [1], read)]


def restore(example):
    """Restore the capital letters and the punctuation of a sentence."""
    sentence = example["sentence"]
    words = " ".join(re.findall(r"[a-z]+", sentence.lower()))
    return [{"inputs": f"restore: {words}", "targets": sentence}]


def spelling(example):
    """Correct the spelling of a sentence, in which every second long word is wrong."""
    words = example["sentence"].split()
    long_words = [number for number, word in enumerate(words) if len(word) > 3]
    for number in long_words[::2]:
        # Swap the second and the third letter, as in "taht".
        word = words[number]
        words[number] = word[0] + word[2] + word[1] + word[3:]
    return [{"inputs": f"spelling: {' '.join(words)}", "targets": example["sentence"]}]


SOURCES = {"sentences": open_sentences}
ACTIVATIONS = {"sigmoid": jax.nn.sigmoid, "identity": lambda x: x}
SPLITS = ("train", "validation")
TASKS = {
    "bert_style": Task(CORPUS, as_it_is, splits=SPLITS, objective=BERTStyle()),
    "deshuffling": Task(CORPUS, as_it_is, splits=SPLITS, objective=Deshuffling()),
    "restore": Task("sentences:", restore, splits=SPLITS),
    "spelling": Task("sentences:", spelling, splits=SPLITS),
}
MIXTURES = {"three_tasks": {"restore": 1, "spelling": 1, "by_rule_words": 1}}
CONFIG = override(
    RECIPES["tiny"],
    {
        "data.source": CORPUS,
        "data.vocab": "assets/speedrun/spiece.model",
        "data.inputs_length": 128,
        "data.targets_length": 29,
        "train.batch_size": 16,
        "train.steps": 400,
        "train.steps_per_cycle": 400,
        "train.eval_every": 0,
        "train.save_every": 400,
    },
)
