"""Draw the curves of a run: `python evaluate.py --run_dir RUN --plot FILE`."""

import re
from pathlib import Path

from matplotlib.figure import Figure


def write_plot(path: str, table: dict) -> None:
    """Draw the losses, accuracies, metrics of outputs and learning rate of a run."""
    panels = {
        "loss (nats per token)": r"(train|loss_eval/.*)/loss",
        "accuracy": r"(train|loss_eval/.*)/token_accuracy",
        "metrics of outputs (%)": "predict_eval/.*",
        "learning rate": "train/learning_rate",
    }
    names = sorted({name for row in table.values() for name in row})
    lines = {k: [*filter(re.compile(panels[k]).fullmatch, names)] for k in panels}
    drawn = {title: own for title, own in lines.items() if own}
    figure = Figure(figsize=(8, 2.2 * len(drawn)), layout="tight")
    axes = figure.subplots(len(drawn), sharex=True, squeeze=False)[:, 0]
    for axis, (title, own) in zip(axes, drawn.items()):
        axis.set_ylabel(title)
        for name in own:
            points = [(step, row[name]) for step, row in table.items() if name in row]
            axis.plot(*zip(*points), ".-", label=name)
        axis.legend(fontsize="small")
    axis.set_xlabel("training step")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
