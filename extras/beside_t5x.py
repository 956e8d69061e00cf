"""Train beside T5X itself: the same weights, batches and rates, and then compare.

    git clone https://github.com/google-research/t5x && git -C t5x checkout cc342d4
    python -m extras.beside_t5x t5x/t5x

Trains a small T5 1.1 in float32 for 50 steps. Prints the losses of both, and the largest
differences of their logits and, in the end, weights. Fails if the losses differ by more
than 1e-4. It runs T5X's network.py, layers.py, losses.py and adafactor.py.
"""

import argparse
import functools
import importlib
import sys
import types
from dataclasses import replace
from unittest import mock

import flax
import jax
import jax.numpy as jnp
import numpy as np

import configs
import convert
import data
import model
import partition
import train


def import_t5x(folder: str) -> tuple:
    """Import files of T5X without its __init__.py, which needs many libraries."""
    package, utils = types.ModuleType("t5x"), types.ModuleType("t5x.utils")
    package.__path__, package.utils = [folder], utils
    utils.flatten_dict_string_keys = functools.partial(
        flax.traverse_util.flatten_dict, sep="/"
    )
    sys.modules |= {"t5x": package, "t5x.utils": utils}
    # optimizers.py imports an optimizer that is not used here.
    sys.modules |= dict.fromkeys(("jestimator", "jestimator.amos"), mock.MagicMock())
    names = "examples.t5.network", "losses", "adafactor"
    return tuple(importlib.import_module(f"t5x.{name}") for name in names)


def to_t5x(params: dict, model_cfg: configs.ModelConfig) -> dict:
    """Return the parameters of a TrainState with the names and layers of T5X."""
    arrays = partition.flatten(params)
    names = convert.all_foreign_names(model_cfg)
    renamed = {name: arrays[path][layer] for path, layer, name, _ in names}
    return flax.traverse_util.unflatten_dict(renamed, sep="/")


def t5x_functions(folder: str, cfg: configs.Config) -> tuple:
    """Return three functions: logits, training step, and first state of the optimizer."""
    network, losses, adafactor = import_t5x(folder)
    model_cfg = cfg.model
    settings = network.T5Config(
        vocab_size=model_cfg.vocab_size,
        emb_dim=model_cfg.d_model,
        num_heads=model_cfg.num_heads,
        num_encoder_layers=model_cfg.num_layers,
        num_decoder_layers=model_cfg.num_decoder_layers,
        head_dim=model_cfg.d_kv,
        mlp_dim=model_cfg.d_ff,
        mlp_activations=("gelu", "linear"),
        dropout_rate=0.0,
    )
    optimizer = adafactor.Adafactor(
        decay_rate=0.8, step_offset=0, weight_decay_rate=cfg.train.weight_decay
    )

    def logits(params, batch):
        return network.Transformer(settings).apply(
            {"params": params},
            encoder_input_tokens=batch.inputs,
            decoder_input_tokens=batch.decoder_inputs,
            decoder_target_tokens=batch.targets,
            encoder_segment_ids=batch.input_segments,
            decoder_segment_ids=batch.target_segments,
            enable_dropout=False,
        )

    def loss(params, batch):
        weights = jnp.float32(batch.target_segments > 0)
        total, z_loss, _ = losses.compute_weighted_cross_entropy(
            logits(params, batch), batch.targets, weights, z_loss=cfg.train.z_loss
        )
        return total / weights.sum()

    def step(params, state, batch, rate):
        value, gradients = jax.value_and_grad(loss)(params, batch)
        settings = optimizer.hyper_params.replace(learning_rate=rate)
        return value, *optimizer.apply_gradient(settings, params, state, gradients)

    return jax.jit(logits), jax.jit(step), optimizer.init_state


def largest_difference(a, b) -> float:
    return max(jax.tree.leaves(jax.tree.map(lambda x, y: np.abs(x - y).max(), a, b)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", help="folder with the files of T5X")
    folder = parser.parse_args().folder
    tiny = configs.load_recipe("tiny")
    model_cfg = replace(configs.TINY, num_layers=2, num_decoder_layers=2, dtype="float32")
    model_cfg = replace(model_cfg, attention_impl="xla", loss_impl="full")
    cfg = replace(tiny, model=model_cfg, train=replace(tiny.train, batch_size=16))
    logits, step, init_state = t5x_functions(folder, cfg)
    partition.set_mesh(cfg)
    batches = data.Batches(cfg, data.load_tokenizer(cfg))
    own = train.init_state(cfg)
    own_step = jax.jit(functools.partial(train.train_step, cfg))
    params = to_t5x(own.params, cfg.model)
    state = init_state(params)
    for number in range(50):
        batch = jax.tree.map(jnp.asarray, next(batches))
        pair = model.forward(own.params, batch, cfg.model), logits(params, batch)
        rate = train.learning_rate(number, cfg.train)
        loss, params, state = step(params, state, batch, rate)
        own, metrics = own_step(own, batch)
        difference = largest_difference(*pair)
        print(
            f"step {number + 1:3}  loss of T5X {loss:.6f}  of plain T5 "
            f"{metrics['loss']:.6f}  largest difference of logits {difference:.1e}"
        )
        if abs(loss - metrics["loss"]) > 1e-4:
            sys.exit("The losses differ.")
    difference = largest_difference(to_t5x(own.params, cfg.model), params)
    print(f"largest difference of weights {difference:.1e}")


if __name__ == "__main__":
    main()
