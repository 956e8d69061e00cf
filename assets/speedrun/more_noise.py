"""Remove 20 % of the tokens in place of 15 %, with the schedule warmup-stable-decay.

A batch then has more target tokens, and the learning rate stays high for longer.

    python assets/speedrun.py assets/speedrun/more_noise.py
"""

from configs import RECIPES, override

CHANGES = {
    "data.noise_density": 0.2,
    "data.targets_length": 10,
    "train.batch_size": 60,
    "train.steps": 1000,
    "train.schedule": "constant * linear_warmup * linear_cooldown",
    "train.cooldown_steps": 400,
}
CONFIG = override(RECIPES["tiny"], CHANGES)
