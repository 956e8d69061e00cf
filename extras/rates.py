"""Sampling rates of mixtures by the sizes of their tasks.

MIXTURES = {"languages": unimax({"german": 9e11, "welsh": 7e9}, budget=1e11, epochs=4)}
"""

import math


def proportional(sizes: dict, maximum: float = math.inf, temperature: float = 1) -> dict:
    """Return min(examples, maximum) ** (1 / temperature), as in section 3.5.2 of T5."""
    return {name: min(n, maximum) ** (1 / temperature) for name, n in sizes.items()}


def unimax(sizes: dict, budget: float, epochs: float = 1) -> dict:
    """Return equal rates, but use no token more than `epochs` times (Chung et al. 2023).

    sizes: the number of tokens of each task. budget: the number of tokens of the run.
    """
    rates = {}
    for number, task in enumerate(sorted(sizes, key=sizes.get)):
        equal_share = (budget - sum(rates.values())) / (len(sizes) - number)
        rates[task] = min(sizes[task] * epochs, equal_share)
    return rates
