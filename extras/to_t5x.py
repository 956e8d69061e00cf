"""Write a checkpoint of T5X in its own format, for `python convert.py RUN DST --to t5x`.

A checkpoint is a msgpack file, which has the small arrays, and a zarr directory for each
large array. The file config.gin describes the model.
"""

from collections.abc import Iterable
from pathlib import Path

import flax
import numpy as np
import tensorstore

from configs import UserError

CONFIG_GIN = """\
from __gin__ import dynamic_registration
from t5x.examples.t5 import layers
from t5x.examples.t5 import network

network.T5Config.vocab_size = {vocab_size}
network.T5Config.emb_dim = {d_model}
network.T5Config.mlp_dim = {d_ff}
network.T5Config.head_dim = {d_kv}
network.T5Config.num_heads = {num_heads}
network.T5Config.num_encoder_layers = {num_layers}
network.T5Config.num_decoder_layers = {num_decoder_layers}
network.T5Config.mlp_activations = {activations}
network.T5Config.dropout_rate = {dropout}
network.T5Config.logits_via_embedding = {tied}
layers.RelativePositionBiases.num_buckets = {relative_buckets}
layers.RelativePositionBiases.max_distance = {relative_max_distance}
"""


def write_zarr(folder: Path, name: str, array: np.ndarray) -> dict:
    """Write a zarr directory. Returns the specification by which T5X finds it."""
    rows = max(1, (1 << 26) // array[0].nbytes)  # of a chunk of 64 MiB
    spec = {
        "driver": "zarr",
        "dtype": array.dtype.name,
        "metadata": {
            "shape": list(array.shape),
            "chunks": [min(len(array), rows), *array.shape[1:]],
            "compressor": None,
        },
    }
    directory = name.replace("/", ".")
    kvstore = {"driver": "file", "path": f"{folder.resolve()}/{directory}/"}
    store = tensorstore.open({**spec, "kvstore": kvstore}, create=True).result()
    store.write(array).result()
    return spec | {"kvstore": {"driver": "file", "path": f"{directory}/"}}


def write(run, names: Iterable[tuple], folder: Path, dtype: np.dtype) -> None:
    """Write a convert.Run. names: the result of convert.all_foreign_names.

    Raises UserError for UMT5, which T5X does not have.
    """
    cfg, arrays = run.cfg.model, run.arrays
    if cfg.per_layer_bias:
        raise UserError(
            "T5X has no model with position biases in each layer: use --to hf."
        )
    has_slots = "opt_state/0/v/embed" in arrays
    tree = {"state/step": np.int32(arrays["step"])}
    for path, layer, name, _ in names:
        array = arrays[f"params/{path}"][layer].astype(dtype)
        tree[f"target/{name}"] = write_zarr(folder, f"target/{name}", array)
        for slot in ("m", "v", "v_row", "v_col") if has_slots else ():
            full_name = f"state/param_states/{name}/{slot}"
            array = arrays.get(f"opt_state/0/{slot}/{path}", np.zeros(1, np.float32))
            if array.shape != (1,):  # A single zero stands for an array that is not used.
                array = array[layer]
            is_large = slot == "v" and array.shape != (1,)
            tree[full_name] = write_zarr(folder, full_name, array) if is_large else array
    if not has_slots:
        print(
            "The run has no state of Adafactor: to train on in T5X, set "
            "fallback_to_scratch = True in its Gin file."
        )
    if (cfg.relative_buckets, cfg.relative_max_distance) != (32, 128):
        print(
            f"Set 32 and 128 in T5X's network.py to {cfg.relative_buckets} and "
            f"{cfg.relative_max_distance}: it does not read them from config.gin."
        )
    tree = flax.traverse_util.unflatten_dict(tree, sep="/")
    content = flax.serialization.msgpack_serialize({"version": 3, "optimizer": tree})
    (folder / "checkpoint").write_bytes(content)
    gate = ("linear",) if cfg.activation.startswith("gated_") else ()
    activations = (cfg.activation.removeprefix("gated_"), *gate)
    gin = CONFIG_GIN.format(activations=activations, **vars(cfg))
    (folder / "config.gin").write_text(gin)
    if run.tokenizer:
        run.tokenizer.save(folder)
