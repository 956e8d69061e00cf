"""Recommend items by generating their ids, as TIGER does (Rajput et al. 2023).

Each item has a vector. Residual k-means turns the vector into a semantic id of three codes,
so similar items share their first codes. The model reads the ids of the items that a user
has seen, and a beam search in the trie of all ids finds ten items. The users and the items
come from a rule: a user walks through the items by small steps.

    python train.py --config assets/recipes/tiger.py --run_dir runs/tiger
"""

import numpy as np

from configs import RECIPES, override
from data import SourceFile, Task

ITEMS, CODES, SEEN = 1000, 16, 8


def semantic_ids(vectors):
    """Return an array [items, 4] of codes. The last code numbers items with equal codes."""
    columns = []
    for level in range(3):
        centers = vectors[np.random.default_rng(level).choice(len(vectors), CODES, False)]
        for _ in range(20):
            nearest = ((vectors[:, None] - centers) ** 2).sum(-1).argmin(axis=1)
            for code in set(nearest):
                centers[code] = vectors[nearest == code].mean(axis=0)
        columns.append(nearest)
        vectors = vectors - centers[nearest]
    keys = list(zip(*columns))
    return np.array([[*key, keys[:i].count(key)] for i, key in enumerate(keys)])


VECTORS = np.random.default_rng(0).normal(size=(ITEMS, 4))
IDS = semantic_ids(VECTORS) + 3 + CODES * np.arange(4)  # each position has its own ids
TEXTS = tuple(" ".join(map(str, ids)) for ids in IDS)


def open_users(name, split, cfg, whole):
    def read(bad):
        for number in range(int(name)):
            if whole or (number % 20 == 0) == (split == "validation"):
                random = np.random.default_rng(number)
                items, drift = [random.integers(ITEMS)], random.normal(size=4)
                while len(items) <= SEEN:
                    wish = VECTORS[items[-1]] + 0.5 * drift + 0.2 * random.normal(size=4)
                    distance = ((VECTORS - wish) ** 2).sum(axis=1)
                    distance[items] = np.inf  # nobody sees an item twice
                    items.append(distance.argmin())
                *seen, last = (TEXTS[item] for item in items)
                yield f"user {number}", {"inputs": " ".join(seen), "targets": last}

    return [SourceFile(f"users {split}", [name], read)]


SOURCES = {"users": open_users}
TASKS = {"items": Task("users:20000", metrics=("recall",), choices=TEXTS)}
DATA = {"data.task": "items", "data.vocab": "ids:128", "model.vocab_size": 128}
LENGTHS = {"data.inputs_length": 4 * SEEN + 1, "data.targets_length": 5}
DECODE = {"decode.choices": "task", "decode.beams": 10, "decode.num_return": 10}
TRAIN = {"train.infer_every": 1500, "train.eval_batches": 0}
CONFIG = override(RECIPES["tiny"], DATA | LENGTHS | DECODE | TRAIN)
