"""Pretrain on protein sequences with the objective of ProtT5 (Elnaggar et al. 2021).

ProtT5 replaces single amino acids by <extra_id_0>, and predicts the complete sequence.
Here a rule makes the proteins. Each belongs to one of 20 families, and differs from the
ancestor of its family in 20 % of the amino acids. A model that copies what it sees, and
guesses the rest by frequency, reaches 0.45 nats per amino acid. A model that knows the
ancestors reaches 0.16 nats. After 1,500 steps, this model reaches 0.26 nats.

    python train.py --config assets/recipes/prott5.py --run_dir runs/prott5
"""

import numpy as np

from configs import RECIPES, override
from data import Objective, PatternTokenizer, SourceFile, Task, as_it_is, random_bits

AMINO_ACIDS = np.array(list("ACDEFGHIKLMNPQRSTVWY"))


def open_proteins(name, split, cfg, whole):
    def read(bad):
        for number in range(int(name)):
            # Hold out one protein of 21. The family of a protein is its number modulo 20,
            # so the held-out proteins come from all 20 families.
            if whole or (number % 21 == 0) == (split == "validation"):
                # The proteins of a family share one seed, and therefore one ancestor.
                family = np.random.default_rng([7, number % 20])
                protein = family.choice(AMINO_ACIDS, size=family.integers(40, 60))
                random = np.random.default_rng(number)
                changed = random.random(len(protein)) < 0.2
                protein[changed] = random.choice(AMINO_ACIDS, size=changed.sum())
                yield f"protein {number}", {"text": "".join(protein)}

    return [SourceFile(f"proteins {split}", [name], read)]


class MaskedAminoAcids(Objective):
    """Mask 15 % of the amino acids of the inputs. The targets are the whole protein."""

    def length(self, data):
        return min(data.inputs_length, data.targets_length) - 1  # without EOS

    def make(self, chunks, keys, tokenizer, data):
        pairs = []
        for (ids,), key in zip(chunks, keys):
            # Sample a random integer from 0 to 2**64 - 1 for each amino acid. An amino
            # acid is masked if its integer is small.
            bits = random_bits(key, np.arange(len(ids)))
            masked = bits < np.uint64(data.noise_density * 2**64)
            extra_id_0 = tokenizer.sentinel_ids[-1]
            pairs.append((np.where(masked, extra_id_0, ids), ids))
        return pairs


SOURCES = {"proteins": open_proteins}
VOCABULARIES = {"amino_acids": PatternTokenizer("[A-Z]", AMINO_ACIDS.tolist())}
TASKS = {"proteins": Task("proteins:20000", as_it_is, objective=MaskedAminoAcids())}
DATA = {"data.task": "proteins", "data.vocab": "amino_acids", "model.vocab_size": 128}
LENGTHS = {"data.inputs_length": 64, "data.targets_length": 64, "train.batch_size": 16}
CONFIG = override(RECIPES["tiny"], DATA | LENGTHS)
