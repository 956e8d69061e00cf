"""An entry of the speedrun: the schedule warmup-stable-decay, with 1,200 steps.

The learning rate stays constant for 60 % of the steps, and then falls to 0.

    python assets/speedrun.py assets/speedrun/wsd.py
"""

from configs import RECIPES, override

CHANGES = {
    "train.steps": 1200,
    "train.schedule": "constant * linear_warmup * linear_cooldown",
    "train.cooldown_steps": 480,
}
CONFIG = override(RECIPES["tiny"], CHANGES)
