"""Recommend items by generating their ids, as TIGER does (Rajput et al. 2023).

Each item has a semantic id of four numbers. Similar items have the same first numbers.
The model reads the semantic ids of the eight items that a user has seen. A beam search in
the trie (prefix tree) of all semantic ids finds ten items. For 88.2 % of the held-out
users, the next item is one of them. It is one of the ten items nearest to the last seen
item for 83.8 %.

    python train.py --config assets/recipes/tiger.py --run_dir runs/tiger
"""

import numpy as np
from scipy.cluster.vq import kmeans2

from configs import RECIPES, override
from data import SourceFile, Task

ITEMS, CLUSTERS, SEEN = 1000, 16, 8
VECTORS = np.random.default_rng(0).normal(size=(ITEMS, 4))

# Residual k-means assigns each item to three clusters, one after another. After each
# assignment, the center of the cluster is subtracted from the vector of the item.
remainder, levels = VECTORS, []
for seed in range(3):
    centers, nearest = kmeans2(remainder, CLUSTERS, iter=20, minit="++", seed=seed)
    remainder = remainder - centers[nearest]
    levels.append(nearest)
triples = list(zip(*levels))  # Each item has three cluster numbers.
# Items in the same three clusters get different fourth numbers: 0, 1, 2 and so on.
CODES = np.array([[*x, triples[:i].count(x)] for i, x in enumerate(triples)])
# In a semantic id, the first number becomes a token id from 3 to 18, the second number
# from 19 to 34, and so on. Ids 0 to 2 mean padding, EOS and an unknown token.
IDS = 3 + CLUSTERS * np.arange(4) + CODES
TEXTS = tuple(" ".join(map(str, ids)) for ids in IDS)  # A text looks like "5 20 44 51".


# Simulate users. Each user moves in a constant direction through the item vectors.
def open_users(name, split, cfg, whole):
    def read(bad):
        for number in range(int(name)):
            if whole or (number % 20 == 0) == (split == "validation"):
                random = np.random.default_rng(number)
                items, drift = [random.integers(ITEMS)], random.normal(size=4)
                while len(items) <= SEEN:
                    wish = VECTORS[items[-1]] + 0.5 * drift + 0.2 * random.normal(size=4)
                    distance = np.linalg.norm(VECTORS - wish, axis=1)
                    distance[items] = np.inf  # No user sees an item twice.
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
