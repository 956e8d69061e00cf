"""Pretrain on ten languages that UniMax balances (Chung et al. 2023).

The texts are the translated messages of Django. Kabyle and Igbo have few of them. UniMax
gives all languages the same share, but repeats no language more than five times. RESULT

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
    """Open the messages of a language. One message of ten is held out."""

    def read(bad):
        texts = set()
        for path in FOLDER.glob(f"**/locale/{name}/LC_MESSAGES/*.mo"):
            with open(path, "rb") as file:
                # The catalog maps each English message to its translation.
                texts.update(gettext.GNUTranslations(file)._catalog.values())
        texts = sorted(texts)
        # The order is random, so that neighbors are not almost equal.
        for i in permute(np.arange(len(texts)), len(texts), 1):
            if whole or (i % 10 == 0) == (split == "validation"):
                yield f"{name} {i}", {"text": texts[i]}

    return [SourceFile(f"messages {name} {split}", [VERSION], read)]


SOURCES = {"messages": open_messages}
TASKS = {
    name: Task(f"messages:{name}", as_it_is, objective=SpanCorruption())
    for name in LANGUAGES
}
# All tokens of the training: its steps, times the rows of a batch, times the tokens of
# text in a row (span corruption shortens 34 tokens to 32).
TOKENS = 1500 * 64 * 34
RATES = functools.partial(unimax, budget=TOKENS, epochs=5)
MIXTURES = {"languages": BySizes(LANGUAGES, RATES)}
CONFIG = override(RECIPES["tiny"], {"data.task": "languages", "data.vocab": "bytes:100"})
