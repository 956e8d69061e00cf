"""Forecast time series with T5, as Chronos does (Ansari et al. 2024, arXiv:2403.07815).

Each series is divided by the mean size of its known values, and rounded to one of 100
bins. The bins are the token ids, so the model needs no text. It reads 48 values and
predicts 12.

    python train.py --config assets/recipes/chronos.py --run_dir runs/chronos
"""

import numpy as np

from configs import RECIPES, override
from data import SourceFile, Task

KNOWN, NEW = 48, 12  # the number of values that the model reads, and that it predicts
BINS = np.linspace(-4, 4, 100)
FIRST_ID = 3  # ids 0, 1 and 2 are padding, EOS and the unknown token


def open_series(name, split, cfg, whole):
    """Generate series with a season of 4, 6, 8 or 12 steps, a trend and noise."""

    def read(bad):
        for number in range(int(name)):
            if whole or (number % 20 == 0) == (split == "validation"):
                random, steps = np.random.default_rng(number), np.arange(KNOWN + NEW)
                period = int(random.choice([4, 6, 8, 12]))
                values = np.sin(2 * np.pi * (steps / period + random.random()))
                values += random.normal() * np.linspace(-1, 1, KNOWN + NEW)
                values += 0.2 * random.normal(size=KNOWN + NEW)
                yield f"series {number}", {"values": values, "period": period}

    return [SourceFile(f"series {split}", [name], read)]


def to_ids(example):
    scaled = example["values"] / np.abs(example["values"][:KNOWN]).mean()
    ids = FIRST_ID + np.abs(scaled[:, None] - BINS).argmin(axis=1)
    return [dict(example, inputs=ids[:KNOWN], targets=ids[KNOWN:])]


def to_error(text, example, is_target):
    """Return the error of a forecast such as "57 60". For a target, repeat a season."""
    known, new = np.split(example["values"], [KNOWN])
    ids = np.array([int(word) for word in text.split()] + [FIRST_ID] * NEW)[:NEW]
    forecast = np.abs(known).mean() * BINS[np.clip(ids - FIRST_ID, 0, len(BINS) - 1)]
    last_season = np.resize(known[-example["period"] :], NEW)
    return np.abs((last_season if is_target else forecast) - new).mean()


def errors(last_season, model):
    return {"error": np.mean(model), "error_of_last_season": np.mean(last_season)}


SOURCES = {"series": open_series}
TASKS = {"series": Task("series:20000", to_ids, (errors,), postprocess=to_error)}
CHANGES = {"data.task": "series", "data.vocab": "ids:128", "model.vocab_size": 128}
LENGTHS = {"data.inputs_length": KNOWN + 1, "data.targets_length": NEW + 1}
TRAIN = {"train.learning_rate": 0.02, "train.infer_every": 1500, "train.eval_batches": 0}
CONFIG = override(RECIPES["tiny"], CHANGES | LENGTHS | TRAIN)
