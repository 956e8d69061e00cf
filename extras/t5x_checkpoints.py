"""Read and write checkpoints of T5X, for convert.py.

A checkpoint in T5X's own format is a msgpack file, which has the small arrays, and a zarr
directory for each large array. Newer ones are of the library Orbax. Both have the arrays
of all layers, and for each of them the averages ("slots") of Adafactor. What the arrays do
not show, such as the activation, Gin files state.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import get_args

import flax
import jax
import numpy as np
import optax
import tensorstore

import model
import partition
from configs import ModelConfig, UserError

# ---- reading ---------------------------------------------------------------------------


def read(source: Path) -> tuple[dict, dict, int]:
    """Return (parameters, slots of Adafactor, step), by names such as "decoder/...".

    A slot is at the name of its parameter, with "/m", "/v", "/v_row" or "/v_col" behind.
    """
    if (source / "state" / "_METADATA").exists():
        tree = read_orbax((source / "state").resolve())
    elif (source / "checkpoint").is_file():
        tree = read_own_format(source)
    else:
        raise UserError(
            f"{source} is no run, no Hugging Face folder (config.json and weights), "
            f"no T5X folder checkpoint_N, and no prefix of a TensorFlow checkpoint."
        )
    slots = partition.flatten(tree["state"].get("param_states", {}))
    return partition.flatten(tree["target"]), slots, int(tree["state"]["step"])


def read_own_format(folder: Path) -> dict:
    def is_zarr(leaf):
        return isinstance(leaf, dict) and "driver" in leaf

    def load(leaf):
        if not is_zarr(leaf):
            return leaf
        # TensorStore before 0.1.14 wrote the path beside "kvstore".
        path = folder.resolve() / {**leaf, **leaf["kvstore"]}["path"]
        spec = {
            "driver": "zarr",
            "dtype": leaf["dtype"],
            "kvstore": {"driver": "file", "path": str(path)},
            "metadata": {"shape": leaf["metadata"]["shape"], "order": "C"},
            "fill_missing_data_reads": False,  # else a missing chunk is read as zeros
        }
        array = tensorstore.open(spec, open=True).result()
        if array.spec().to_json()["metadata"]["dtype"].startswith(">"):
            raise UserError(f"{path}/.zarray is damaged: it states big-endian numbers.")
        return array.read().result()

    tree = flax.serialization.msgpack_restore((folder / "checkpoint").read_bytes())
    if tree["version"] != 3:  # version 2 stores bfloat16 as integers
        raise UserError(f"{folder} has version {tree['version']} of T5X's format, not 3.")
    return jax.tree.map(load, tree["optimizer"], is_leaf=is_zarr)


def read_orbax(folder: Path) -> dict:
    import orbax.checkpoint as ocp

    reader = ocp.PyTreeCheckpointer()
    tree = reader.metadata(folder).item_metadata.tree
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
    return reader.restore(folder, restore_args=as_numpy)


def adafactor_state(
    slots: dict, names: Iterable[tuple], model_cfg: ModelConfig, step: int
) -> dict[str, np.ndarray]:
    """Return T5X's averages of squared gradients with the names of train.TrainState.

    optax uses the same three arrays for each parameter: the complete averages v, or for a
    matrix v_row and v_col, of which v_row belongs to the shorter axis. An array that is
    not needed is a single zero. The result is {} if T5X used another optimizer.
    names: the result of convert.all_foreign_names.
    """
    if not slots:
        return {}
    params = jax.eval_shape(lambda: model.init_params(model_cfg, jax.random.key(0)))
    state = jax.eval_shape(optax.scale_by_factored_rms().init, params)
    shapes = partition.flatten({"opt_state": [state]})
    plain = {name: np.zeros(a.shape, a.dtype) for name, a in shapes.items()}
    plain["opt_state/0/count"] = np.int32(step)
    for path, layer, name, _ in names:
        for slot in ("m", "v", "v_row", "v_col"):  # m: of a momentum
            # Like optax, use an array of size 1 for a slot that a parameter lacks.
            array = slots.get(f"{name}/{slot}", np.zeros(1))
            part = plain.get(f"opt_state/0/{slot}/{path}", np.zeros(1))
            if part.shape != (1,):
                part = part[layer]
            if array.shape != part.shape:
                print(f"The state of another optimizer ({name}/{slot}) is left out.")
                return {}
            part[...] = array
    return plain


# ---- Gin files -------------------------------------------------------------------------

# What the weights do not show, and where a Gin file of T5X or Mesh TensorFlow states it.
GIN_PATTERNS = {
    "activation": r"(?:mlp_activations|DenseReluDense\.activation) = (.*)",
    "relative_max_distance": r"RelativePositionBiases\.max_distance = ([^%\s]\S*)",
    "dropout": r"(?:T5Config\.dropout_rate|\bDROPOUT_RATE) = ([^%\s]\S*)",
}
ACTIVATIONS = get_args(ModelConfig.__annotations__["activation"])


def with_gin(model_cfg: ModelConfig, folders: list[Path]) -> ModelConfig:
    """Return a ModelConfig with the values that Gin files state.

    The last statement counts, and the first folder is read last. "%NAME" is a reference.
    """
    files = [f / n for f in folders for n in ("config.gin", "operative_config.gin")]
    text = "\n".join(file.read_text() for file in reversed(files) if file.is_file())
    text = re.sub(" *#.*", "", text)
    stated = {}
    for field, pattern in GIN_PATTERNS.items():
        if values := re.findall(pattern, text):
            stated[field] = type(getattr(model_cfg, field))(values[-1])
    if "activation" in stated:  # such as "('gelu', 'linear')"
        kind, *linear = re.findall(r"\w+", stated["activation"].replace("swish", "silu"))
        stated["activation"] = f"gated_{kind}" if linear == ["linear"] else kind
        if stated["activation"] not in ACTIVATIONS:
            raise UserError(f"{folders[0]}: plain T5 has no activation {kind}.")
    if assumed := [
        f"{name} {getattr(model_cfg, name)}"
        for name in GIN_PATTERNS
        if name not in stated
    ]:
        print(f"No Gin file states the model's {', '.join(assumed)}: they are assumed.")
    return replace(model_cfg, **stated)


# ---- writing, for `python convert.py RUN DST --to t5x` ---------------------------------

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
    """Write a convert.LoadedModel. names: the result of convert.all_foreign_names.

    Raises UserError for UMT5, which has another layout in T5X (scalable_t5).
    """
    cfg, arrays = run.cfg.model, run.arrays
    if cfg.per_layer_bias:
        raise UserError(
            "T5X has another layout for position biases in each layer: use --to hf."
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
    gate = ("linear",) if cfg.gated else ()
    activations = (cfg.activation.removeprefix("gated_"), *gate)
    gin = CONFIG_GIN.format(activations=activations, **vars(cfg))
    (folder / "config.gin").write_text(gin)
    if run.tokenizer:
        run.tokenizer.save(folder)
        # for convert.py: T5X has no place for it
        sentinels = json.dumps({"extra_ids": run.cfg.data.extra_ids})
        (folder / "tokenizer_config.json").write_text(sentinels)
