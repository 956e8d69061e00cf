"""Read molecules in SMILES notation with a regular expression as vocabulary.

The pattern finds atoms, bonds and rings, as in Schwaller et al. (2019). The model learns
to write the molecular formula: "CCO" (ethanol) becomes "C2H6O". It must count the atoms
and infer the hydrogens, which SMILES leaves out. A Python package has the molecules.

    pip install chemicals
    python train.py --config assets/recipes/smiles.py --run_dir runs/smiles
"""

import csv
import importlib.metadata
import importlib.util
import re
import zlib
from pathlib import Path

from configs import RECIPES, override
from data import PatternTokenizer, SourceFile, Task

FOLDER = Path(importlib.util.find_spec("chemicals").origin).parent
TABLE = FOLDER / "Identifiers/chemical identifiers pubchem large.tsv"
VERSION = importlib.metadata.version("chemicals")
ATOMS = r"\[[^\]]+\]|Br|Cl|[BCHNOPSFIbcnops]|[=#+\\/():.@?>*$-]|%[0-9]{2}|[0-9]"


def read_molecules():
    """Yield SMILES and formula of molecules of common elements, up to 40 characters."""
    with open(TABLE, encoding="utf-8") as file:
        for row in csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE):
            formula, smiles = row[2], row[4]
            if len(smiles) <= 40 and re.fullmatch("(Br|Cl|[CHNOPSFI]|[0-9])+", formula):
                yield smiles, formula


def open_molecules(name, split, cfg, whole):
    def read(bad):
        for smiles, formula in read_molecules():
            if whole or (zlib.crc32(smiles.encode()) % 20 == 0) == (
                split == "validation"
            ):
                yield smiles, {"inputs": smiles, "targets": formula}

    return [SourceFile(f"molecules {split}", [VERSION], read)]


PIECES = {
    piece for pair in read_molecules() for piece in re.findall(ATOMS, "".join(pair))
}

SOURCES = {"molecules": open_molecules}
VOCABULARIES = {"atoms": PatternTokenizer(ATOMS, sorted(PIECES), sentinels=0)}
TASKS = {"formula": Task("molecules:", metrics=("accuracy",))}
DATA = {"data.task": "formula", "data.vocab": "atoms", "model.vocab_size": 512}
LENGTHS = {"data.inputs_length": 64, "data.targets_length": 32}
TRAIN = {"train.infer_every": 1500, "train.eval_batches": 0}
CONFIG = override(RECIPES["tiny"], DATA | LENGTHS | TRAIN)
