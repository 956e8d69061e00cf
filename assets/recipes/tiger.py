"""Recommend items by generating their ids, as TIGER does (Rajput et al. 2023).

Residual k-means turns the vector of an item into a semantic id of three codes. The model
reads the ids of the items that a user has seen, and a beam search in the trie of all ids
finds ten items. A rule makes the users: they walk through the items in small steps.

    python train.py --config assets/recipes/tiger.py --run_dir runs/tiger
"""

import numpy as np

from configs import RECIPES, override
from data import SourceFile, Task

ITEMS, CODES, SEEN = 1000, 16, 8


def semantic_ids(vectors):
    """Return codes [items, 4]. The last code numbers items with equal other codes."""
    columns = []
    for level in range(3):
        centers = vectors[np.random.default_rng(level).choice(len(vectors), CODES, False)]
        for _ in range(20):
            nearest = ((vectors[:, None] - centers) ** 2).sum(-1).argmin(axis=1)
            for code in set(nearest):
                centers[code] = vectors[nearest == code].mean(axis=0)
        columns.append(nearest)
        vectors = vectors - centers[nearest]
    ids = list(zip(*columns))
    return np.array([[*codes, ids[:i].count(codes)] for i, codes in enumerate(ids)])


VECTORS = np.random.default_rng(0).normal(size=(ITEMS, 4))
IDS = semantic_ids(VECTORS) + 3 + CODES * np.arange(4)  # each position has its own ids
TEXTS = tuple(" ".join(map(str, ids)) for ids in IDS)


def open_users(name, split, cfg, whole):
    def read(bad):
        for number in range(int(name)):
            random = np.random.default_rng(number)
            if whole or (number % 20 == 0) == (split == "validation"):
                items, drift = [random.integers(ITEMS)], random.normal(size=4)
                while len(items) <= SEEN:
                    wish = VECTORS[items[-1]] + 0.5 * drift + 0.2 * random.normal(size=4)
                    distance = np.linalg.norm(VECTORS - wish, axis=1)
                    distance[items] = np.inf  # nobody sees an item twice
                    items.append(distance.argmin())
                *seen, new = (TEXTS[item] for item in items)
                yield f"user {number}", {"inputs": " ".join(seen), "targets": new}

    return [SourceFile(f"users {split}", [name], read)]


SOURCES = {"users": open_users}
TASKS = {"items": Task("users:20000", metrics=("recall",), choices=TEXTS)}
DATA = {"data.task": "items", "data.vocab": "ids:128", "model.vocab_size": 128}
LENGTHS = {"data.inputs_length": 4 * SEEN + 1, "data.targets_length": 5}
DECODE = {"decode.choices": "task", "decode.beams": 10, "decode.num_return": 10}
CONFIG = override(RECIPES["tiny"], DATA | LENGTHS | DECODE | {"train.infer_every": 1500})
