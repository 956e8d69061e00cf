r"""Film reviews (Maas et al. 2011): pretrain T5 small on them, then tell good from bad.

    curl -O https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz
    tar xf aclImdb_v1.tar.gz
    python -m examples.imdb    # writes aclImdb/reviews.txt, train.jsonl, test.jsonl, ...
    python train.py --config small_c4 --run_dir runs/reviews \
        --data.source text:aclImdb/reviews.txt --train.steps 4000 --train.batch_size 128 \
        --train.schedule 'constant * linear_warmup * cosine_decay' \
        --train.learning_rate 0.02 --train.warmup_steps 400
    python train.py --config examples/imdb.py --init_from runs/reviews
    python evaluate.py --run_dir runs/imdb --split test

On one H200, this took eight minutes: five for pretraining (2,350 rows/s), which was killed
once after 1,000 steps, and resumed. Its held-out loss fell to 3.63 nats per token. Then,
88.9 % of the 25,000 test reviews were classified right. From random weights, 84.9 % were:

    python train.py --config examples/imdb.py --run_dir runs/imdb_random \
        --data.vocab runs/reviews/spiece.model --train.learning_rate 0.01 --train.steps 1200

These are single runs, each with its own rate and steps. Validation accuracy is higher (89.9
and 89.6 %): training has other reviews of the same films, and pretraining reads all texts.
"""

import json
import random
from dataclasses import replace
from pathlib import Path

from configs import RECIPES, DataConfig
from data import Task, template

LABELS = "negative", "positive"
TASKS = {
    "imdb": Task(
        "jsonl:aclImdb/{split}.jsonl",
        template("review: {text}", "{label}", LABELS),
        metrics=("accuracy",),
        choices=LABELS,
    )
}
BASE = RECIPES["small_pairs"]
CONFIG = replace(
    BASE,
    data=DataConfig(task="imdb", inputs_length=512, targets_length=16),
    train=replace(
        BASE.train, steps=600, eval_every=200, predict_every=200, save_every=200
    ),
)


def read_reviews(folder: str, label: int) -> list[dict]:
    paths = sorted(Path("aclImdb", folder).glob("*.txt"))
    texts = [path.read_text("utf-8").replace("<br />", " ") for path in paths]
    return [{"text": text, "label": label} for text in texts]


def write_files() -> None:
    """Write the labelled reviews, shuffled, and all those of training as plain text."""
    train = read_reviews("train/neg", 0) + read_reviews("train/pos", 1)
    test = read_reviews("test/neg", 0) + read_reviews("test/pos", 1)
    random.Random(0).shuffle(train)
    splits = {"train": train[1000:], "validation": train[:1000], "test": test}
    for split, reviews in splits.items():
        lines = [json.dumps(review) + "\n" for review in reviews]
        Path(f"aclImdb/{split}.jsonl").write_text("".join(lines))
    reviews = train + read_reviews("train/unsup", -1)
    lines = [review["text"] + "\n" for review in reviews]
    Path("aclImdb/reviews.txt").write_text("".join(lines), "utf-8")


if __name__ == "__main__":
    write_files()
