"""Pretrain on ten languages that UniMax balances (Chung et al. 2023).

The texts are the translated messages of Django. Kabyle and Igbo have few of them. UniMax
gives all languages the same share, but repeats no language more than five times. After
1,500 steps, the mean held-out loss of the ten languages is 2.90 nats per content token. A
model that knows only how often each token occurs reaches 4.12 (the unigram baseline).

    pip install django
    python train.py --config assets/recipes/languages.py --run_dir runs/languages
"""

import functools
import gettext
import importlib.metadata
import importlib.util
from pathlib import Path

import numpy as np

from configs import RECIPES, override
from data import BySizes, SourceFile, SpanCorruption, Task, as_it_is, permute, unimax

LANGUAGES = ("de", "fr", "es", "pl", "fi", "tr", "ru", "el", "kab", "ig")
FOLDER = Path(importlib.util.find_spec("django").origin).parent
VERSION = importlib.metadata.version("django")


def open_messages(name, split, cfg, whole):
    """Open the translated messages of one language. One of ten messages is held out."""

    def read(bad):
        texts = set()
        for path in FOLDER.glob(f"**/locale/{name}/LC_MESSAGES/*.mo"):
            with open(path, "rb") as file:
                # The catalog of a file maps each English message to its translation.
                texts.update(gettext.GNUTranslations(file)._catalog.values())
        texts = sorted(texts)
        # Shuffle the messages, because neighbors in sorted order are often almost equal.
        for i in permute(np.arange(len(texts)), len(texts), 1):
            if whole or (i % 10 == 0) == (split == "validation"):
                yield f"{name} {i}", {"text": texts[i]}

    return [SourceFile(f"messages {name} {split}", [VERSION], read)]


SOURCES = {"messages": open_messages}
TASKS = {
    name: Task(f"messages:{name}", as_it_is, objective=SpanCorruption())
    for name in LANGUAGES
}
STEPS, ROWS = 1500, 16  # The run has 1,500 training steps, and a batch has 16 rows.
TOKENS = STEPS * ROWS * 34  # Before span corruption, a row has 34 tokens of text.
RATES = functools.partial(unimax, budget=TOKENS, epochs=5)
MIXTURES = {"languages": BySizes(LANGUAGES, RATES)}
DATA = {"data.task": "languages", "data.vocab": "bytes:100", "model.vocab_size": 384}
TRAIN = {"train.steps": STEPS, "train.batch_size": ROWS}
CONFIG = override(RECIPES["tiny"], DATA | TRAIN)
