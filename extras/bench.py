"""Measure training steps and greedy decoding of untied models on the present devices.

    python -m extras.bench small_c4 base_c4 large_c4 --batch 64       on a GPU, for example
    python -m extras.bench small_c4 --peer                            Hugging Face, the same work

MFU is the share of the peak of the chip's data sheet, of which only matmuls of the model
count (model.train_flops). --peer measures transformers with torch.compile on one device, in
bfloat16 on a GPU. A time is the mean of --steps repetitions, after two others. As in training,
the next one is sent to the device while it computes.
"""

import argparse
import time
from dataclasses import replace
from typing import Callable

import jax
import numpy as np

import configs
import data
import infer
import model
import partition
import train
from extras.plan import CHIPS


def mean_seconds(run: Callable, wait: Callable, steps: int) -> float:
    """wait: a function that waits for the result of run()."""
    for _ in range(2):
        run()
    wait()
    began = time.perf_counter()
    for _ in range(steps):
        run()
    wait()
    return (time.perf_counter() - began) / steps


def report(name: str, cfg: configs.Config, step: float, decode: float, tokens: int):
    flops = cfg.train.batch_size * model.train_flops(cfg)
    kind = jax.devices()[0].device_kind
    peaks = [chip.teraflops for known, chip in CHIPS.items() if known in kind]
    peak = peaks[0] * 1e12 * jax.device_count() if peaks else float("nan")
    print(
        f"{name:16} step {1e3 * step:9.1f} ms  {flops / step / 1e12:8.3f} TFLOP/s  MFU "
        f"{flops / step / peak:6.1%}  decoding {tokens / decode:9.1f} tokens/s on {kind}",
        flush=True,
    )


def random_ids(cfg: configs.Config) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and targets [B, S] and [B, T], without padding or EOS."""
    rng, rows = np.random.default_rng(0), cfg.train.batch_size
    lengths = cfg.data.inputs_length, cfg.data.targets_length
    return tuple(np.int32(rng.integers(2, 2000, (rows, n))) for n in lengths)


def measure(name: str, cfg: configs.Config, steps: int) -> None:
    mesh = partition.set_mesh(cfg)
    inputs, targets = random_ids(cfg)
    real = np.ones_like(targets)
    shifted = data.shift_right(targets, real)
    batch = data.Batch(inputs, np.ones_like(inputs), shifted, targets, real)
    batch = partition.put_batch(batch)
    abstract, lowered = train.lower_step(cfg, mesh)
    program, state = lowered.compile(), train.load_state(cfg, abstract, None)

    def step():
        nonlocal state
        state, _ = program(state, batch)

    step_seconds = mean_seconds(step, lambda: jax.block_until_ready(state), steps)
    params, outputs = state.params, None
    # The logit of EOS is 0, which is never the largest one: no output ends early.
    params["unembed"] = params["unembed"].at[:, data.EOS].set(0.0)
    length = cfg.data.targets_length

    def decode():
        nonlocal outputs
        pair = batch.inputs, batch.input_segments
        outputs = infer.generate(params, *pair, cfg.model, length)

    seconds = mean_seconds(decode, lambda: jax.block_until_ready(outputs), steps)
    report(name, cfg, step_seconds, seconds, length * len(inputs))


def measure_peer(name: str, cfg: configs.Config, steps: int) -> None:
    import torch
    import transformers

    from convert import hf_config

    gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if gpu else ("cpu", torch.float32)
    settings = transformers.T5Config(
        **hf_config(cfg.model),
        decoder_start_token_id=0,
        tie_word_embeddings=cfg.model.tied,
    )
    network = transformers.T5ForConditionalGeneration(settings).to(device)
    inputs, targets = (torch.tensor(ids, device=device).long() for ids in random_ids(cfg))
    options = {"scale_parameter": True, "relative_step": False, "lr": 1e-3}
    optimizer = transformers.Adafactor(network.parameters(), **options)
    compiled = torch.compile(network) if gpu else network

    def wait():
        if gpu:
            torch.cuda.synchronize()

    def step():
        with torch.autocast(device, dtype, enabled=gpu):
            loss = compiled(input_ids=inputs, labels=targets).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    length = cfg.data.targets_length
    step_seconds = mean_seconds(step, wait, steps)
    network.to(dtype).eval()

    def decode():
        with torch.no_grad():
            lengths = {"max_new_tokens": length, "min_new_tokens": length}
            network.generate(input_ids=inputs, do_sample=False, **lengths)

    seconds = mean_seconds(decode, wait, steps)
    report(f"{name} (HF)", cfg, step_seconds, seconds, length * len(inputs))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipes", nargs="+")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--peer", action="store_true", help="measure transformers")
    args = parser.parse_args()
    for name in args.recipes:
        cfg = configs.load_recipe(name)
        cfg = replace(cfg, train=replace(cfg.train, batch_size=args.batch))
        (measure_peer if args.peer else measure)(name, cfg, args.steps)


if __name__ == "__main__":
    main()
