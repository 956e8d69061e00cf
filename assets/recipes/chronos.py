"""Forecast time series with T5, as Chronos does (Ansari et al. 2024, arXiv:2403.07815).

Each series is divided by the mean size of its known values, and rounded to one of 200 bins.
The bins are the token ids, so the model needs no text. It reads 48 values and predicts 12.

    python train.py --config assets/recipes/chronos.py --run_dir runs/chronos
"""

import numpy as np

from configs import Config, DataConfig, ModelConfig, TrainConfig
from data import SourceFile, Task

KNOWN, NEW = 48, 12  # the number of values that the model reads, and that it predicts
BINS = np.linspace(-4, 4, 200)
FIRST_ID = 3  # ids 0, 1 and 2 are padding, EOS and the unknown token


def open_series(name, split, cfg, whole):
    """Generate series with a season of 4, 6, 8 or 12 steps, a trend and noise."""

    def read(bad):
        for number in range(int(name)):
            if whole or (number % 20 == 0) == (split == "validation"):
                random = np.random.default_rng(number)
                period = int(random.choice([4, 6, 8, 12]))
                season = np.resize(random.normal(size=period), KNOWN + NEW)
                trend = random.normal() * np.linspace(-1, 1, KNOWN + NEW)
                noise = 0.2 * random.normal(size=KNOWN + NEW)
                values = season + trend + noise
                yield f"series {number}", {"values": values, "period": period}

    return [SourceFile(f"series {split}", [name], read)]


def to_ids(example):
    """Turn the values of one series into token ids."""
    scaled = example["values"] / np.abs(example["values"][:KNOWN]).mean()
    ids = FIRST_ID + np.abs(scaled[:, None] - BINS).argmin(axis=1)
    return [dict(example, inputs=ids[:KNOWN], targets=ids[KNOWN:])]


def to_values(text, example, is_target):
    """Turn the ids of a forecast, as text, into values. A target is the example itself."""
    if is_target:
        return example
    ids = np.array([int(word) for word in text.split()] + [FIRST_ID] * NEW)[:NEW]
    bins = BINS[np.clip(ids - FIRST_ID, 0, len(BINS) - 1)]
    return bins * np.abs(example["values"][:KNOWN]).mean()


def errors(examples, forecasts):
    """Compare the mean absolute error with a forecast that repeats the last season."""
    model, repeated = [], []
    for example, forecast in zip(examples, forecasts):
        known, new = np.split(example["values"], [KNOWN])
        last_season = known[-example["period"] :]
        model.append(np.abs(forecast - new).mean())
        repeated.append(np.abs(np.resize(last_season, NEW) - new).mean())
    return {"error": np.mean(model), "error_of_last_season": np.mean(repeated)}


SOURCES = {"series": open_series}
TASKS = {
    "series": Task(
        "series:20000",
        to_ids,
        (errors,),
        postprocess=to_values,
        splits=("train", "validation"),
    )
}
CONFIG = Config(
    "chronos",
    ModelConfig(
        vocab_size=256,
        d_model=96,
        d_ff=192,
        d_kv=24,
        num_heads=4,
        num_layers=2,
        num_decoder_layers=2,
    ),
    DataConfig(task="series", vocab="ids:256", inputs_length=49, targets_length=13),
    TrainConfig(
        steps=1200,
        batch_size=64,
        learning_rate=0.03,
        warmup_steps=50,
        schedule="constant * linear_warmup * cosine_decay",
        steps_per_cycle=1200,
        eval_every=300,
        infer_every=1200,
        eval_batches=0,
    ),
)
