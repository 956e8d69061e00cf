"""Data that a few lines compute: tasks about numbers, and random ids.

The tasks by_rule_* are learned by a tiny model, and show how a recipe file defines tasks:

    python train.py --config tiny_finetune --init_from runs/tiny
"""

import time
from functools import partial

import numpy as np

from configs import MIXTURES, TASKS, Config
from data import Task, random_bits, template


def random_documents(cfg: Config) -> list[dict]:
    size = cfg.model.vocab_size - cfg.data.extra_ids - 3
    ids = 3 + random_bits(1 << 20, 0).reshape(256, -1) % np.uint64(size)
    return [{"text": row} for row in ids.astype(np.int32)]


# ---- tasks about numbers ---------------------------------------------------------------

ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen"
).split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()


def spell_number(n: int) -> str:
    """Return a number below one million in English words, such as "twenty-one"."""
    if n < 20:
        return ONES[n]
    if n < 100:
        return f"{TENS[n // 10 - 2]}-{ONES[n % 10]}".removesuffix("-zero")
    unit, name = (100, "hundred") if n < 1000 else (1000, "thousand")
    words = f"{spell_number(n // unit)} {name} {spell_number(n % unit)}"
    return words.removesuffix(" zero")


def number_fields(n: int) -> dict:
    """Return a number, its name, and the date that is n days after January 1, 1970."""
    day = time.gmtime(86_400 * n)
    return {
        "number": n,
        "words": spell_number(n),
        "label": int(n % 2 == 0),
        "date": time.strftime("%Y-%m-%d", day),
        "day": f"{day.tm_mday} {time.strftime('%B %Y', day)}",
    }


# The source numbers:10000 holds the fields of all numbers below 10,000.
task = partial(Task, "numbers:10000", metrics=("accuracy",))
TASKS |= {
    "by_rule_words": task(template("number: {number}", "{words}")),
    "by_rule_digits": task(template("words: {words}", "{number}")),
    "by_rule_date": task(template("date: {date}", "{day}")),
    "by_rule_day": task(template("day: {day}", "{date}")),
    "by_rule_even": task(
        template("is {number} even?", "{label}", ("no", "yes")),
        choices=("no", "yes"),
        postprocess="label",
    ),
}
MIXTURES["by_rule"] = {
    "by_rule_words": 2,
    "by_rule_digits": 2,
    "by_rule_date": 1,
    "by_rule_day": 1,
    "by_rule_even": 1,
}
