"""Train `tiny` with forks, and print how each one changes the held-out loss.

    python forks/run.py                           unchanged code, and then all forks
    python forks/run.py rotary alibi --seeds 0    two forks with one seed

The loss is in nats per target token. Seeds change weights, order and removed spans.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).resolve().parent.parent
FORKS = sorted(patch.stem for patch in (ROOT / "forks").glob("*.patch"))
LOSS = "loss_eval/span_corruption/loss"
# bart predicts complete texts, and lora adapts random weights.
NOT_COMPARABLE = "bart", "lora"


def clone(name: str, folder: Path) -> Path:
    """Copy the scripts, and apply the patch of a fork."""
    tree = folder / name
    shutil.copytree(ROOT / "extras", tree / "extras")
    for script in ROOT.glob("*.py"):
        shutil.copy(script, tree)
    if name != "unchanged":
        patch = ROOT / "forks" / f"{name}.patch"
        subprocess.run(["git", "apply", patch], cwd=tree, check=True)
    return tree


def held_out_loss(tree: Path, run: Path, steps: int, seed: int, *other_flags) -> float:
    """Train the clone, and return the last held-out loss."""
    flags = {"steps": steps, "eval_every": steps, "save_every": 0, "seed": seed}
    flags["microbatches"] = 1
    command = [sys.executable, "train.py", "--config", "tiny", "--run_dir", str(run)]
    for name, value in flags.items():
        command += [f"--train.{name}", str(value)]
    command += other_flags
    subprocess.run(command, cwd=tree, stdout=subprocess.DEVNULL, check=True)
    metrics = run / "metrics.jsonl"
    lines = map(json.loads, metrics.read_text().splitlines())
    return next(line[LOSS] for line in lines if LOSS in line)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="all forks by default")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    print("| fork | held-out loss | lowest to highest | minus unchanged |")
    print("|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", f"{folder}/compiled")
        # git then takes no clone for a part of a repository around it.
        os.environ["GIT_CEILING_DIRECTORIES"] = folder
        for name in ["unchanged", *(args.names or FORKS)]:
            tree, losses = clone(name, Path(folder)), []
            for seed in args.seeds:
                run = Path(folder, "runs", f"{name}_{seed}")
                losses.append(held_out_loss(tree, run, args.steps, seed))
            if name == "unchanged":
                unchanged = mean(losses)
            spread = f"{min(losses):.3f} to {max(losses):.3f}"
            change = f"{mean(losses) - unchanged:+.3f}"
            if name in NOT_COMPARABLE:
                change = ""
            print(f"| {name} | {mean(losses):.3f} | {spread} | {change} |", flush=True)


if __name__ == "__main__":
    main()
