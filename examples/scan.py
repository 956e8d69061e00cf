r"""SCAN (Lake and Baroni 2018): commands become sequences of actions, from scratch.

"jump twice and turn left" becomes "JUMP JUMP LEFT". On two CPU cores, this takes 6 minutes:

    git clone https://github.com/brendenlake/SCAN
    python train.py --config examples/scan.py

The other splits test how a network generalizes: to longer actions, and to a verb that it
has only seen alone, for which the vocabulary must be that of the first run. Add

    --run_dir runs/length --data.task scan_length --data.eval_tasks scan_length_test
    --run_dir runs/jump --data.task scan_jump --data.eval_tasks scan_jump_test \
        --data.vocab runs/scan/spiece.model

Test examples of which all actions are right, in percent, after one run of 2,000 steps:

             plain T5   best network of the paper
    simple       99.8                        99.8
    length        0.2                        20.8
    jump          0.1                         1.2
"""

import re
from dataclasses import replace

from configs import TINY, TINY_TRAIN, Config, DataConfig
from data import Task

FILES = {
    "simple": "simple_split/tasks_{}_simple.txt",
    "length": "length_split/tasks_{}_length.txt",
    "jump": "add_prim_split/tasks_{}_addprim_jump.txt",
}


def pair(record):
    """Split "IN: turn left OUT: I_TURN_LEFT", and shorten the action to LEFT."""
    command, actions = record["text"].removeprefix("IN: ").split(" OUT: ")
    return [{"inputs": command, "targets": re.sub("I_(TURN_)?", "", actions)}]


TASKS = {}
for name, file in FILES.items():
    source = f"text:SCAN/{file}"
    TASKS[f"scan_{name}"] = Task(source.format("{split}"), pair)
    TASKS[f"scan_{name}_test"] = Task(source.format("test"), pair, ("accuracy",))

CONFIG = Config(
    replace(TINY, num_layers=2, num_decoder_layers=2, vocab_size=256),
    DataConfig(
        task="scan_simple",
        eval_tasks="scan_simple_test",
        vocab="train:54",
        inputs_length=64,
        targets_length=64,
    ),
    replace(
        TINY_TRAIN,
        steps=2000,
        learning_rate=0.03,
        weight_decay=0.0,
        eval_every=500,
        predict_every=2000,
        eval_batches=0,
    ),
)
