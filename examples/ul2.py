"""UL2 as a recipe file: seven denoisers, each with a word in front that names its mode.

Tay et al. 2022 (arXiv:2205.05131): [NLU] is span corruption as in T5, [NLG] removes longer
spans or more of them, and [S2S] is a prefix language model. Here, all have the same rate.

    python data.py --config examples/ul2.py --show 7
    python train.py --config examples/ul2.py
"""

from dataclasses import replace

import numpy as np

from configs import RECIPES, DataConfig
from data import Objective, Task, prefix_lm, span_corruption


def denoiser(mode: str, function, span: float = 3, density: float = 0.15) -> Task:
    """Return a task whose inputs begin with a mode, such as "[NLU]"."""

    def corrupt(chunks, tokenizer, data_cfg, *seeds):
        data_cfg = replace(data_cfg, mean_span_length=span, noise_density=density)
        (prefix,) = tokenizer.encode([mode])
        pairs = function(chunks, tokenizer, data_cfg, *seeds)
        return [(np.append(prefix, inputs), targets) for inputs, targets in pairs]

    def length(data_cfg):  # of the text, before anything is removed
        return data_cfg.inputs_length - 10  # leaves room for the mode, a sentinel and EOS

    return Task("python:", objective=Objective(corrupt, length))


TASKS = {
    "r_3": denoiser("[NLU]", span_corruption, 3),
    "r_8": denoiser("[NLU]", span_corruption, 8),
    "x_3": denoiser("[NLG]", span_corruption, 3, 0.5),
    "x_8": denoiser("[NLG]", span_corruption, 8, 0.5),
    "x_64": denoiser("[NLG]", span_corruption, 64, 0.5),
    "x_64_few": denoiser("[NLG]", span_corruption, 64),
    "s": denoiser("[S2S]", prefix_lm),
}
MIXTURES = {"ul2": dict.fromkeys(TASKS, 1.0)}
CONFIG = replace(
    RECIPES["tiny"],
    data=DataConfig(task="ul2", vocab="train:2000", inputs_length=64, targets_length=64),
)
