"""Train the tiny T5 with rotary positions (Su et al. 2021) instead of T5's biases.

The file also defines another position encoding, half_rotary. It rotates only the first
half of the channels of each head, as GPT-NeoX rotates a part of the channels. The other
half compares tokens without their positions.

With one seed, rotary positions reach 4.748 nats per content token, and T5's biases 4.722.

    python train.py --config assets/recipes/rotary.py --run_dir runs/rotary
    python train.py --config assets/recipes/rotary.py --run_dir runs/half_rotary \
        --model.positions half_rotary
"""

import jax.numpy as jnp

from configs import RECIPES, override
from model import PositionEncoding, rotary


def half_rotary(x, positions):
    """Rotate only the first half of the channels of each query or key.

    x: queries or keys of shape [batch, heads, positions, channels].
    """
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([rotary(first, positions), second], axis=-1)


POSITIONS = {"half_rotary": PositionEncoding(rotate=half_rotary)}
CONFIG = override(RECIPES["tiny"], {"model.positions": "rotary"})
