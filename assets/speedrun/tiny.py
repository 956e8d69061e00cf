"""The baseline of the speedrun: the recipe tiny, without a change.

    python assets/speedrun.py assets/speedrun/tiny.py

The mean loss of its five seeds is the target of all other entries.
"""

from configs import RECIPES

CONFIG = RECIPES["tiny"]
