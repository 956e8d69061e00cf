"""The baseline of the speedrun: the recipe tiny, without a change.

    python assets/speedrun.py assets/speedrun/tiny.py
"""

from configs import RECIPES

CONFIG = RECIPES["tiny"]
