"""Convert T5 weights between Hugging Face, T5X, Mesh TensorFlow and plain T5.

SRC is a model in any of these formats. convert.py finds out the format and the dimensions
by itself. DST is a new folder. It becomes a run directory of plain T5, a Hugging Face
model or a T5X checkpoint. The weights keep their values, unless --dtype bfloat16 rounds
them. At the end, convert.py reads the new model again and compares it with SRC. DST
appears only if the configurations and all arrays are equal, and if the vocabulary
gives equal ids.

    python convert.py t5-v1_1-small/ runs/t5_1_1_small     import any format as a run
    python convert.py runs/tiny tiny_hf --to hf            export to Hugging Face
    python convert.py runs/tiny checkpoint_1500 --to t5x   export to T5X

All formats store the same numbers. They differ in the names of the arrays, and in how
they store a matrix:

- plain T5: a run directory. It stores a matrix of all layers in one array, with the shape
  [layers, inputs, outputs]. The formats below store one array per layer.
- Hugging Face (the library transformers): a directory with config.json and the weights.
  model.safetensors and pytorch_model.bin store a matrix as [outputs, inputs], as PyTorch
  does. flax_model.msgpack stores it as [inputs, outputs].
- T5X (Google's JAX code for T5): a directory checkpoint_N. It contains a msgpack file and
  zarr arrays, or a checkpoint of the library Orbax. The file config.gin describes the
  model. A matrix is [inputs, outputs].
- Mesh TensorFlow (the original code for T5): a TensorFlow checkpoint model.ckpt-N. A
  matrix is [inputs, outputs].

Plain T5 calls the embedding "params/embed". Names of parameters begin with "params/", and
names of optimizer arrays begin with "slots/". The code calls the name of an array in
Hugging Face or T5X its external name. For example, the external name of the embedding is
"shared.weight" in Hugging Face.

Example:
>>> from convert import parameter_names
>>> hugging_face, t5x = parameter_names("encoder/layers/attention/query", 0, True)
>>> hugging_face
'encoder.block.0.layer.0.SelfAttention.q.weight'
>>> t5x
'target/encoder/layers_0/attention/query/kernel'

`pytest -k lesson_convert` runs the lessons about this file, which are in test_all.py.
"""

import base64
import errno
import json
import math
import os
import re
import shutil
import time
import zipfile
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Callable, NamedTuple

# The module configs makes Ctrl-C end the command without a traceback. Import it first, so
# that Ctrl-C has this effect even during the slow import of libraries such as JAX. The
# module also makes Python read text as UTF-8.
import configs

import flax
import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
import sentencepiece
import tensorstore
from sentencepiece import sentencepiece_model_pb2

import data
import model
import partition
from configs import Config, DataConfig, ModelConfig, TrainConfig, UserError, note

# ---- names -----------------------------------------------------------------------------
# Three dicts translate the names of parameters. Each key is a name in plain T5, or a part
# of such a name. Each value is a pair (name in Hugging Face, name in T5X).

# Each key is the name of an attention or MLP sublayer in plain T5. The value has the
# names of this sublayer in Hugging Face and in T5X. For example, Hugging Face calls the
# attention of the encoder "layer.0.SelfAttention".
SUBLAYERS = {
    "encoder/layers/attention": ("layer.0.SelfAttention", "attention"),
    "encoder/layers/mlp": ("layer.1.DenseReluDense", "mlp"),
    "decoder/layers/self_attention": ("layer.0.SelfAttention", "self_attention"),
    "decoder/layers/cross_attention": (
        "layer.1.EncDecAttention",
        "encoder_decoder_attention",
    ),
    "decoder/layers/mlp": ("layer.2.DenseReluDense", "mlp"),
}
# Each key is the name of a weight matrix in plain T5. The value has the names of this
# matrix in Hugging Face and in T5X. For example, Hugging Face calls the query matrix "q".
MATRICES = {
    "query": ("q", "query"),
    "key": ("k", "key"),
    "value": ("v", "value"),
    "out": ("o", "out"),
    "gate": ("wi_0", "wi_0"),
    # Hugging Face and T5X call this matrix "wi_1" in an MLP with a gate, and "wi" in an
    # MLP without a gate.
    "up": ("wi_1", "wi_1"),
    "down": ("wo", "wo"),
    # Only UMT5 has a table of relative position biases in every layer. T5X does not
    # support UMT5, so no T5X checkpoint contains the second name.
    "relative_bias": ("relative_attention_bias", "relative_attention_bias"),
}
# Each key is a parameter that exists only once in a model, such as the embedding, and not
# in every layer. The value has its names in Hugging Face and in T5X. In T5, all layers of
# the encoder share one table of relative position biases. Hugging Face stores this table
# in the first layer, "block.0".
UNSTACKED = {
    "embed": ("shared.weight", "target/token_embedder/embedding"),
    "unembed": ("lm_head.weight", "target/decoder/logits_dense/kernel"),
    "encoder/norm": (
        "encoder.final_layer_norm.weight",
        "target/encoder/encoder_norm/scale",
    ),
    "decoder/norm": (
        "decoder.final_layer_norm.weight",
        "target/decoder/decoder_norm/scale",
    ),
    "encoder/relative_bias": (
        "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
        "target/encoder/relpos_bias/rel_embedding",
    ),
    "decoder/relative_bias": (
        "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
        "target/decoder/relpos_bias/rel_embedding",
    ),
}


def parameter_names(path, layer, gated):
    """Return the names of a parameter in Hugging Face (PyTorch) and in T5X, as a pair.

    For example, the embedding is called "embed" in plain T5. Its other names are
    "shared.weight" in Hugging Face and "target/token_embedder/embedding" in T5X.

    path: the name of the parameter in `model.param_table`.
    layer: the layer number. It is ignored if the parameter does not belong to a layer.
    gated: True if the MLP of the model has a gate.
    """
    if path in UNSTACKED:
        return UNSTACKED[path]
    sublayer, name = path.rsplit("/", 1)
    stack, kind = sublayer.split("/layers/")
    hf_sublayer, t5x_sublayer = SUBLAYERS[sublayer]
    hf_layer = f"{stack}.block.{layer}"
    t5x_layer = f"target/{stack}/layers_{layer}"
    if name == "norm":
        hf_number = hf_sublayer.rsplit(".", 1)[0]  # for instance "layer.0"
        return (
            f"{hf_layer}.{hf_number}.layer_norm.weight",
            f"{t5x_layer}/pre_{kind}_layer_norm/scale",
        )
    hf_matrix, t5x_matrix = MATRICES[name]
    if name == "up" and not gated:
        hf_matrix = t5x_matrix = "wi"
    return (
        f"{hf_layer}.{hf_sublayer}.{hf_matrix}.weight",
        f"{t5x_layer}/{t5x_sublayer}/{t5x_matrix}/kernel",
    )


# The function parameter_names returns a pair of names. HF is the index of the name in
# Hugging Face, and T5X is the index of the name in T5X.
HF, T5X = 0, 1


# ---- arrays ----------------------------------------------------------------------------


def split_layers(name, shape):
    """Return the numbers of the layers in an array, and the shape of one layer.

    Plain T5 stacks a parameter of all layers into one array, whose axis 0 is the layer.
    For example, an array of shape (8, 512, 384) has the layers 0 to 7, and one layer has
    the shape (512, 384). For an array without a layer axis, such as the embedding, the
    result is the list [None] and the shape of the array.

    name: the name of the array, such as "params/encoder/layers/mlp/up".
    shape: the shape of the array.
    """
    if "layers" in name.split("/"):
        return range(shape[0]), shape[1:]
    return [None], shape


class Tensor(NamedTuple):
    """An array that is read from disk only when its values are needed.

    The shape is known before the values are read. Calling read() returns the values as a
    NumPy array. In this file, the variable `tensors` is always a dict from names in
    Hugging Face or T5X to Tensors.
    """

    shape: tuple
    read: Callable  # read() returns the values as a NumPy array

    def transpose(self, needed=True):
        """Return the transposed matrix as a Tensor, without reading its values yet.

        If `needed` is False, the Tensor is returned unchanged.
        """
        return Tensor(self.shape[::-1], lambda: self.read().T) if needed else self


class Entry(NamedTuple):
    """An Entry says where plain T5 stores one array of a Hugging Face or T5X model.

    Hugging Face and T5X store one array per layer. Plain T5 stacks the arrays of all
    layers into one array. In a model with 12 layers, 12 entries therefore have the same
    `name` and different values of `layer`.
    """

    external_name: str  # the name in Hugging Face or T5X
    name: str  # the name in plain T5, such as "params/embed"
    layer: int | None  # the layer number, or None if the array is not stacked
    shape: tuple  # the shape of one layer in plain T5
    transposed: bool  # True if Hugging Face stores the transpose of this matrix


def parameter_entries(cfg, form):
    """Return a list with one Entry for every parameter array in Hugging Face or T5X.

    PyTorch stores a matrix as [outputs, inputs], and plain T5 stores the matrix as
    [inputs, outputs]. The table of position biases is [buckets, heads] in PyTorch and
    [heads, buckets] in plain T5. Every Hugging Face matrix is therefore transposed,
    except the embedding, which has the same axes in both.

    cfg: the ModelConfig of the model.
    form: HF for the names in Hugging Face, or T5X for the names in T5X.
    """
    gated = cfg.activation.startswith("gated_")
    entries = []
    for path, param in partition.flatten(model.param_table(cfg)).items():
        layers, shape = split_layers(path, param.shape)
        transposed = form == HF and len(shape) == 2 and path != "embed"
        for layer in layers:
            external_name = parameter_names(path, layer, gated)[form]
            entry = Entry(external_name, f"params/{path}", layer, shape, transposed)
            entries.append(entry)
    return entries


# T5X stores the number of training steps in the array with this name.
STEP = "state/step"


def slot_name(parameter, slot):
    """Return the name of an array of the optimizer Adafactor in a T5X checkpoint.

    For example, the array v of the parameter "target/decoder/decoder_norm/scale" is
    "state/param_states/decoder/decoder_norm/scale/v". The name of the parameter loses its
    prefix "target/".

    parameter: the name of the parameter in T5X, such as
        "target/decoder/decoder_norm/scale".
    slot: "v", "v_row" or "v_col", the averages of Adafactor, or "m", the momentum, which
    T5X stores and plain T5 does not use.
    """
    return f"state/param_states/{parameter.removeprefix('target/')}/{slot}"


def slot_entries(parameters, factored):
    """Return a list with one Entry for every Adafactor array in a T5X checkpoint.

    Adafactor (Shazeer and Stern, 2018) keeps V, a moving average of the squared gradient
    of each parameter. To save memory, it stores only the row means and column means of V
    for a large matrix. For other parameters it stores the complete V.

    These arrays are called slots. For a matrix, T5X calls the shorter slot v_row and the
    longer slot v_col. The names of all slots are:

        slot                       shape             in plain T5    in T5X
        complete V                 as the parameter  "full"         v
        row means of a matrix      [rows]            "row"          v_row, or v_col
        column means of a matrix   [columns]         "column"       v_col, or v_row

    For a matrix [512, 1024] or [512, 512], "row" is v_row. For a matrix [1024, 512],
    "row" is v_col. Source: t5x/adafactor.py.

    parameters: the list of entries that parameter_entries returns.
    factored: the names of the parameters whose slots are "row" and "column", such as
        "params/encoder/layers/mlp/up".
    """
    entries = []
    for external_name, name, layer, shape, _ in parameters:
        slots = [("full", "v", shape)]
        if name in factored:
            rows, columns = shape
            first, second = ("v_col", "v_row") if rows > columns else ("v_row", "v_col")
            slots = [("row", first, (rows,)), ("column", second, (columns,))]
        for slot, t5x_slot, slot_shape in slots:
            own_name = f"{name.replace('params/', 'slots/', 1)}/{slot}"
            t5x_name = slot_name(external_name, t5x_slot)
            entries.append(Entry(t5x_name, own_name, layer, slot_shape, False))
    return entries


class Weights(NamedTuple):
    """A model that has been opened and can be written in any format.

    The functions that open a model return Weights, and the functions that write a model
    take Weights. An array is read from disk only when it is written. The model may
    therefore be larger than the memory.
    """

    cfg: Config
    step: int
    # A dict from the pair (name in plain T5, layer number or None) to a Tensor. The dict
    # contains all parameters. If convert.py supports the optimizer, the dict also
    # contains the optimizer state.
    arrays: dict
    vocabulary: data.Tokenizer | None  # None if the model has no vocabulary
    # {path: content} of the other files that are copied to the new model, such as
    # recipe.py
    files: dict = {}


def in_memory(array):
    """Return a Tensor for an array that is already in memory."""
    return Tensor(np.shape(array), lambda: np.asarray(array))


# ====== below: readers, writers, the command ============================================


@contextmanager
def explain_errors(path, kind="in the format that its name and folder suggest"):
    """Turn any exception into a UserError whose message names the file.

    For example, a truncated file gives the message "model.safetensors is missing, damaged
    or not a complete safetensors file". A UserError passes unchanged. The function works
    as a context manager and as a decorator.

    path: the path of the file that is read.
    kind: what the file should be, such as "a complete safetensors file".
    """
    try:
        yield
    except ImportError as error:
        raise UserError(
            f"{path} cannot be read ({error}): install the missing package with pip."
        ) from error
    except UserError:
        raise
    # Catch all other exceptions, because each library raises its own exception classes.
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split()):.200}"
        raise UserError(
            f"{path} is missing, damaged or not {kind} ({reason}): download the model "
            f"again, or choose another checkpoint with --step."
        ) from error


def listed(names):
    """Return names as one sorted text for a message, such as "bias, scale".

    The text is truncated to 200 characters.
    """
    return f"{', '.join(sorted(names)):.200}"


def check_arrays(source, required, found):
    """Raise a UserError unless a model has exactly the required arrays.

    The shapes of the arrays must also be the required shapes. This check finds a damaged
    model before anything is converted.

    source: the path of the model, for the error message.
    required: {name: shape} of the arrays that the model must have.
    found: {name: shape} of the arrays that the model has.
    """
    if unknown := found.keys() - required.keys():
        raise UserError(
            f"{source} has arrays that no T5 model has ({listed(unknown)}), or that "
            f"contradict the configuration of this model: convert a T5 1.0, T5 1.1, mT5, "
            f"UMT5 or ByT5 model, or a model derived from one of these."
        )
    for name, shape in required.items():
        if found.get(name) != shape:
            raise UserError(
                f"{source} is damaged: the shape of {name} must be {shape}, but it is "
                f"{found.get(name, 'missing')}. Use another copy of the model."
            )


def model_from_shapes(tensors, form, source):
    """Return the ModelConfig of a model, computed from the shapes of its weights.

    For example, the embedding has the shape [vocab_size, d_model]. The number of layers
    follows from the names of the arrays. The weights do not show the activation function,
    the dropout rate and the maximum distance of relative positions. These fields get
    default values.

    tensors: {name in Hugging Face or T5X: Tensor} for all arrays of the model.
    form: HF if the names in `tensors` are those of Hugging Face, or T5X.
    source: the path of the model, for error messages.

    Raises a UserError if the model has no layers.
    """
    gated = parameter_names("encoder/layers/mlp/gate", 0, True)[form] in tensors

    def name(path, layer=0):
        """Return the name that a parameter has in Hugging Face or T5X."""
        return parameter_names(path, layer, gated)[form]

    def shape(path):
        """Return the shape of a parameter in plain T5, without the layer axis."""
        shape = tensors[name(path)].shape
        return shape[::-1] if form == HF and path != "embed" else shape

    # Every layer has one array with the scales of the normalization before the MLP. Count
    # these arrays to get the number of layers.
    num_layers, num_decoder_layers = (
        sum(name(f"{stack}/layers/mlp/norm", i) in tensors for i in range(1000))
        for stack in ("encoder", "decoder")
    )
    tied = name("unembed") not in tensors
    if not num_layers or not num_decoder_layers and not tied:
        raise UserError(
            f"{source} has {num_layers} encoder layers, {num_decoder_layers} decoder "
            f"layers and {'no' if tied else 'an'} output layer: convert a complete "
            f"encoder-decoder, or an encoder without an output layer."
        )
    num_heads, relative_buckets = shape("encoder/relative_bias")
    vocab_size, d_model = shape("embed")
    return ModelConfig(
        vocab_size=vocab_size,
        d_model=d_model,
        d_ff=shape("encoder/layers/mlp/up")[1],
        d_kv=shape("encoder/layers/attention/query")[1] // num_heads,
        num_heads=num_heads,
        num_layers=num_layers,
        num_decoder_layers=num_decoder_layers,
        relative_buckets=relative_buckets,
        layer_biases=name("encoder/layers/attention/relative_bias", 1) in tensors,
        activation="gated_gelu" if gated else "relu",
        tied=tied,
    )


def read_floats(tensor, name, source):
    """Return the values of a Tensor, and check that they are floating-point numbers.

    name: the name of the array in Hugging Face or T5X, for the error message.
    source: the path of the model, for error messages.

    Raises a UserError if the values are damaged, or if they are integers. Integers are
    quantized weights, or come from a damaged description of the array.
    """
    with explain_errors(f"The array {name} of {source}", "complete"):
        values = tensor.read()
    if not jnp.issubdtype(values.dtype, jnp.floating):
        raise UserError(
            f"{source} is damaged or quantized: the array {name} has the type "
            f"{values.dtype}, but plain T5 needs floating-point numbers. Convert another "
            f"copy of the model."
        )
    return values


def to_weights(tensors, form, source, cfg, vocabulary, name="t5"):
    """Convert the arrays of a Hugging Face or T5X model to the Weights of plain T5.

    First check that all arrays exist and have the right shapes. Then give the arrays the
    names of plain T5, and transpose matrices if necessary. The optimizer state is
    converted too, if the optimizer is Adafactor without momentum.

    tensors: {name in Hugging Face or T5X: Tensor} for all arrays of the model.
    form: HF if the names in `tensors` are those of Hugging Face, or T5X.
    source: the path of the model, for error messages.
    cfg: the ModelConfig of the model.
    vocabulary: the data.Tokenizer, or None if the model has no vocabulary.
    name: the name of the model.

    Raises a UserError if an array is missing or unknown, or has a wrong shape.
    """
    entries = parameter_entries(cfg, form)
    required = {
        entry.external_name: entry.shape[::-1] if entry.transposed else entry.shape
        for entry in entries
    }
    # Separate the parameters from the optimizer arrays, whose names begin with "state/".
    found = {}
    optimizer = {}
    for external_name, tensor in tensors.items():
        if not external_name.startswith("state/"):
            found[external_name] = tensor.shape
        # T5X stores a single zero in place of each unused optimizer array. Skip these
        # arrays.
        elif math.prod(tensor.shape) > 1:
            optimizer[external_name] = tensor.shape
    check_arrays(source, required, found)
    step = int(tensors[STEP].read()) if STEP in tensors else 0
    slots = slot_entries(
        entries,
        {x.name for x in entries if slot_name(x.external_name, "v_row") in optimizer},
    )
    arrays = {}
    # Convert the optimizer state only if its arrays are exactly those of Adafactor
    # without momentum.
    if optimizer == {slot.external_name: slot.shape for slot in slots}:
        entries += slots
        # T5X stores only the number of training steps. Plain T5 also stores the number of
        # updates ("count") and the number of updates skipped in a row ("skipped").
        for counter, value in {"step": step, "count": step, "skipped": 0}.items():
            arrays[counter, None] = in_memory(value)
    elif optimizer:
        note(
            f"The optimizer state of {source} is not converted, because convert.py "
            f"supports only Adafactor without momentum. Only the parameters are "
            f"converted."
        )
    for entry in entries:
        tensor = tensors[entry.external_name].transpose(entry.transposed)
        read = partial(read_floats, tensor, entry.external_name, source)
        arrays[entry.name, entry.layer] = Tensor(entry.shape, read)
    data_config = DataConfig("python:", vocab="spiece.model")
    run = Config(name, cfg, data_config, TrainConfig(steps=max(step, 1)))
    try:
        configs.check(run)
    except UserError as error:
        raise UserError(
            f"{source} cannot be converted, because plain T5 does not support its "
            f"configuration. {error}"
        ) from error
    return Weights(run, step, arrays, vocabulary)


# ---- vocabularies ----------------------------------------------------------------------


def read_vocabulary(folders, cfg, order=None):
    """Return the vocabulary of a model as a data.Tokenizer, or None if it has none.

    The vocabulary is read from spiece.model, or from tokenizer.json if there is no
    spiece.model. Tokens that were added to the tokenizer become pieces of the vocabulary.
    If both files are missing, a model with 384 embeddings is assumed to be ByT5.

    folders: the folders to search. The first folder that contains the file is used.
    cfg: the ModelConfig of the model.
    order: the list that find_id_order returns, or None.

    Raises a UserError if plain T5 cannot use the vocabulary, or if the vocabulary has
    more pieces than the model has embeddings.
    """
    config_path = folders[0] / "tokenizer_config.json"
    config = read_optional(config_path, {"extra_ids?": (int, type(None))})
    # If a vocabulary has no sentinels (tokens such as <extra_id_0>), sentinels are added
    # to it. The variable `sentinels` is the number of added sentinels.
    sentinels = config.get("extra_ids") or data.SENTINELS
    if not 0 < sentinels <= max(cfg.vocab_size, data.SENTINELS):
        raise UserError(
            f"{config_path} sets extra_ids to {sentinels}, but the model has "
            f"{cfg.vocab_size} embeddings. The field extra_ids is the number of "
            f"sentinels, and each sentinel needs an embedding: download this file again."
        )
    names = ("spiece.model", "tokenizer.json")
    paths = [folder / name for name in names for folder in folders]
    path = next(filter(Path.exists, paths), None)
    if path is None:
        is_byt5 = cfg.vocab_size == 384 or "ByT5" in str(config.get("tokenizer_class"))
        return byte_vocabulary(folders[0]) if is_byt5 else None
    data.check_regular(str(path))
    try:
        # In a run of plain T5, the file spiece.model may contain a vocabulary that is not
        # a SentencePiece model. A vocabulary of bytes is a line such as "bytes:0". A
        # vocabulary of token ids is a line such as "ids:32128:100". A vocabulary that a
        # recipe file defines is a JSON object.
        if path.read_bytes().startswith((b"bytes", b"ids:", data.PATTERN_FILE)):
            tokenizer = data.load_tokenizer(path)
        else:
            tokenizer = read_pieces(path, sentinels, cfg.vocab_size, order)
        if tokenizer.size > cfg.vocab_size:
            raise UserError(
                f"{path} has {tokenizer.size:,} pieces, including the sentinels, but the "
                f"model has only {cfg.vocab_size:,} embeddings: replace this file by the "
                f"vocabulary of the model."
            )
    except UserError as error:
        raise UserError(
            f"{error} The command stops because of this problem with the vocabulary. To "
            f"convert only the weights, move spiece.model and tokenizer.json out of the "
            f"folder of the model."
        ) from error
    return tokenizer


BYT5_WARNING = (
    "warning: sentinels such as <extra_id_0> have other ids in Hugging Face's "
    "ByT5Tokenizer than in plain T5. Texts without sentinels get the same ids."
)


def byte_vocabulary(folder):
    """Return the data.Tokenizer of ByT5, which gives an id to each byte of a text.

    folder: the folder that may contain the tokenizer files of Hugging Face.

    Raises a UserError if the tokenizer has added tokens other than sentinels.
    """
    for _, text in read_added_tokens(folder):
        if text not in SPECIAL_PIECES and "<extra_id_" not in text:
            raise UserError(
                f"The ByT5 tokenizer in {folder} adds {text} to the bytes and sentinels. "
                f"Plain T5 supports no added tokens for ByT5: to convert only the "
                f"weights, move the tokenizer files out of the folder."
            )
    note(BYT5_WARNING)
    return data.ByteTokenizer()


def read_optional(path, form):
    """Return the content of a JSON file, or {} if the file is missing.

    form: the expected form of the content, as configs.check_json describes forms.
    """
    return configs.read_json(path, form) if path.exists() else {}


def read_added_tokens(folder):
    """Return the tokens that were added to a tokenizer, as a list of pairs (id, text).

    For example, a pair is (32100, "<hl>"). Hugging Face stores added tokens in up to
    three files. These files also list special tokens such as </s>.

    folder: the folder with the tokenizer files of Hugging Face.
    """
    names = ("added_tokens.json", "tokenizer.json", "tokenizer_config.json")
    ids, tokenizer, config = (read_optional(folder / name, dict) for name in names)
    decoder = config.get("added_tokens_decoder", {})
    tokens = [(number, text) for text, number in ids.items()]
    tokens += [(x["id"], x["content"]) for x in tokenizer.get("added_tokens", [])]
    tokens += [(int(number), x["content"]) for number, x in decoder.items()]
    return sorted(set(tokens))


def read_pieces(path, sentinels, vocab_size, order):
    """Read a SentencePiece vocabulary or a tokenizer.json, and return a data.Tokenizer.

    The tokens that were added to the tokenizer become pieces of the vocabulary.

    path: the path of a spiece.model or tokenizer.json.
    sentinels: the number of sentinels for a vocabulary that has none.
    vocab_size: the number of embeddings of the model. A vocabulary gets no sentinels if
        the model has no embeddings for them.
    order: the list that find_id_order returns, or None.

    Raises a UserError if plain T5 cannot use the vocabulary or an added token.
    """
    vocabulary = path.read_bytes()
    is_json = path.suffix == ".json"
    if is_json:
        proto, norm_map, space = tokenizer_json_to_sentencepiece(path)
    else:
        proto = parse_sentencepiece(vocabulary, path)
        norm_map = decompile(proto.normalizer_spec.precompiled_charsmap)
        # In Hugging Face's T5Tokenizer, a new word begins after each added token. So a
        # space must be inserted after an added token.
        space = " "
    # Hugging Face also lists special tokens, such as </s>, as added tokens. Leave out the
    # special tokens that are already pieces of the vocabulary.
    known = {
        (i, piece.piece) for i, piece in enumerate(proto.pieces) if is_special(piece)
    }
    added = [token for token in read_added_tokens(path.parent) if token not in known]
    if order is not None:
        reorder_pieces(proto, order)
        vocabulary = proto.SerializeToString()
        added = [(order.index(number), text) for number, text in added]
    if not any("<extra_id_" in piece.piece for piece in proto.pieces):
        if len(proto.pieces) + sentinels > vocab_size:
            proto.trainer_spec.model_prefix = data.NO_SENTINELS
            sentinels = 0
        data.add_sentinels(proto, sentinels)
        # If a file has no sentinels, data.parse_vocabulary adds 100 sentinels when it
        # reads the file. So store the sentinels in the file only if their number is not
        # 100.
        if sentinels != data.SENTINELS:
            vocabulary = proto.SerializeToString()
    for number, text in added:
        if text and number == len(proto.pieces):
            proto.pieces.add(piece=text)
    extra = [piece for piece in proto.pieces if "<extra_id_" in piece.piece]
    tokens = [
        piece
        for number, piece in enumerate(proto.pieces)
        if piece.type == piece.NORMAL
        and (number, piece.piece.removeprefix(SPACE)) in added
    ]
    if tokens or is_json:
        # A Hugging Face tokenizer finds sentinels and added tokens even inside a word.
        # SentencePiece finds such a token only after a space, because its piece begins
        # with a space. So add a normalization rule that inserts a space before the token.
        for piece in tokens + extra:
            text = piece.piece.removeprefix(SPACE)
            norm_map[text] = f" {text}{space}"
            piece.piece = SPACE + text
            piece.score = 0.0
            piece.type = piece.USER_DEFINED
        rules = sentencepiece.SentencePieceNormalizer(norm_map=list(norm_map.items()))
        proto.normalizer_spec.MergeFromString(rules.serialized_normalizer_spec())
        vocabulary = proto.SerializeToString()
    tokenizer = data.parse_vocabulary(vocabulary, str(path))
    for number, text in added:
        ids = tokenizer.encode(text)
        if ids != [number]:
            raise UserError(
                f"The added token {text!r} has the id {number}, but plain T5 would give "
                f"the ids {ids!s:.60} to this token: download {path} and the files "
                f"beside it again, or use the model with the library transformers."
            )
    if is_json:
        compare_with_library(path, tokenizer)
    return tokenizer


# T5 has three special tokens: <pad> for padding (id 0), </s> for the end of a sequence
# (id 1), and <unk> for unknown text (id 2).
SPECIAL_PIECES = ("<pad>", "</s>", "<unk>")


def is_special(piece):
    """Return whether a piece of a SentencePiece vocabulary is a special token.

    A special token, such as </s>, stands for no text.

    piece: a piece of a SentencePiece ModelProto.
    """
    return piece.type in (piece.CONTROL, piece.UNKNOWN)


def reorder_pieces(proto, order):
    """Give the special pieces of a SentencePiece vocabulary the ids and names of T5.

    All pieces get a new order. The first three pieces get the names <pad>, </s> and
    <unk>. The model does not use its other special pieces, such as <s>, so these pieces
    are marked as unused.

    proto: the ModelProto of the vocabulary, which is changed in place.
    order: a list. Element i is the old id of the piece that gets the id i.
    """
    old = type(proto).FromString(proto.SerializeToString()).pieces
    for number, piece in enumerate(proto.pieces):
        piece.CopyFrom(old[order[number]])
        if is_special(piece):
            piece.piece = f"<unused_{number}>"
            piece.type = piece.UNUSED
    for piece, text in zip(proto.pieces, SPECIAL_PIECES):
        piece.piece = text
        piece.type = piece.CONTROL
    proto.pieces[data.UNK].type = piece.UNKNOWN


def parse_sentencepiece(vocabulary, path="spiece.model"):
    """Parse the bytes of a SentencePiece model into a protocol buffer (ModelProto).

    The ModelProto contains the pieces of the vocabulary and the normalization rules.

    vocabulary: the bytes of the SentencePiece model.
    path: the path of the SentencePiece model, for error messages.
    """
    proto = sentencepiece_model_pb2.ModelProto()
    with explain_errors(path, "a SentencePiece model"):
        proto.ParseFromString(vocabulary)
        # ParseFromString accepts even an empty file. This line raises an error if the
        # vocabulary has no pieces.
        proto.pieces[0]
    return proto


def decompile(charsmap):
    """Return the normalization rules of a SentencePiece model as a dict of replacements.

    For example, {"\\t": " "} replaces every tab in a text by a space.

    charsmap: the compiled rules of a SentencePiece model, or b"" if it has no rules.
    """
    if not charsmap:
        return {}
    spec = sentencepiece_model_pb2.NormalizerSpec(precompiled_charsmap=charsmap)
    rules = sentencepiece.SentencePieceNormalizer(normalizer_spec=spec).decompile()
    return dict(rules)


SPACE = "\u2581"  # SentencePiece writes this character in place of a space
# The step "WhitespaceSplit" of a tokenizer.json treats these characters as white space.
# The converted SentencePiece model replaces each of these characters by a space.
WHITE_SPACE = (
    "\t\n\v\f\r\x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009"
    "\u200a\u2028\u2029\u202f\u205f\u3000"
)
# A tokenizer.json lists the steps of a tokenizer, such as the removal of spaces. Each
# step has a type and options. Only the following options influence the token ids. Older
# files have the option add_prefix_space instead of prepend_scheme.
STEP_OPTIONS = (
    "pattern",
    "content",
    "strip_right",
    "prepend_scheme",
    "add_prefix_space",
    "byte_fallback",
)
# Each key is a step of a tokenizer.json that convert.py supports. The value names what
# the step does with spaces. A step can put a space before the text ("prepend"), remove
# spaces at the end ("strip"), or replace several spaces by one ("merge"). The steps of a
# tokenizer.json together must do all three.
STEPS = {
    "Metaspace prepend_scheme=always": "prepend ",
    "Metaspace prepend_scheme=always add_prefix_space=True": "prepend ",
    "Metaspace prepend_scheme=first": "prepend ",
    "Metaspace prepend_scheme=first add_prefix_space=True": "prepend ",
    "Metaspace add_prefix_space=True": "prepend ",
    "Strip strip_right=True": "strip ",
    "Replace pattern={'Regex': '[ \u2581]+$'} content=": "strip ",
    "Replace pattern={'Regex': ' {2,}'} content= ": "merge ",
    "Replace pattern={'Regex': ' {2,}'} content=\u2581": "merge ",
    "Replace pattern={'Regex': '[ \u2581]{2,}'} content= ": "merge ",
    "WhitespaceSplit": "strip merge ",
    "Unigram": "",
    "Unigram byte_fallback=False": "",
    "NFC": "",
    "Precompiled": "",
}


def tokenizer_json_to_sentencepiece(path):
    """Convert the vocabulary in Hugging Face's tokenizer.json to a SentencePiece model.

    Returns a tuple of three items. The first item is a SentencePiece ModelProto. The
    second item is a dict of the replacements that normalize a text. The third item is the
    text that Hugging Face inserts after an added token. The list of added tokens is not
    converted here.

    Both tokenizers give the same ids for almost all texts. The ids may differ if a text
    contains "</s>", "<pad>" or "<unk>". They may also differ if a text ends with white
    space other than a space, such as a newline, or if a letter and its accents are
    several characters.

    path: the path of the tokenizer.json.

    Raises a UserError if the tokenizer.json contains a step that a SentencePiece unigram
    model does not support.
    """
    tokenizer = configs.read_json(path, {"model": dict})
    unigram = tokenizer["model"]
    steps = [{"type": "Unigram", **unigram}]
    for key, inside in ("normalizer", "normalizers"), ("pre_tokenizer", "pretokenizers"):
        step = tokenizer.get(key) or {inside: []}
        steps += step.get(inside, [step])
    used = set()
    norm_map = {}
    for step in steps:
        options = [f" {name}={step[name]}" for name in STEP_OPTIONS if name in step]
        used.add(step["type"] + "".join(options))
        if step["type"] == "WhitespaceSplit":
            norm_map |= dict.fromkeys(WHITE_SPACE, " ")
        if step["type"] == "Precompiled":
            norm_map |= decompile(base64.b64decode(step["precompiled_charsmap"]))
    effects = "".join(STEPS.get(step, "") for step in used)
    problems = sorted(used - STEPS.keys())
    problems += [
        f"no step to {x} spaces"
        for x in ("prepend", "strip", "merge")
        if x not in effects
    ]
    if problems:
        raise UserError(
            f"{path} cannot be converted to a SentencePiece unigram model, because plain "
            f"T5 does not support all steps of this tokenizer. It does not support: "
            f"{', '.join(problems):.200}. If the model has a file spiece.model, download "
            f"it into the same folder."
        )
    proto = sentencepiece_model_pb2.ModelProto()
    types = {0: "CONTROL", 1: "CONTROL", unigram["unk_id"]: "UNKNOWN"}
    for number, (piece, score) in enumerate(unigram["vocab"]):
        proto.pieces.add(piece=piece, score=score, type=types.get(number, "NORMAL"))
    return proto, norm_map, "" if any("first" in step for step in used) else " "


def hard_texts(tokenizer):
    """Return a list of short texts on which different tokenizers often disagree.

    The texts contain white space, accents, rare characters, sentinels, and pieces of the
    vocabulary. No text contains "</s>" or a sentinel without a space before it, because
    their ids always differ. Hugging Face reads them as special tokens, and plain T5 reads
    them as ordinary text.

    tokenizer: the data.Tokenizer that reads the texts.
    """
    texts = [
        "",
        " ",
        "a",
        "  a   b ",
        "a\tb\nc",
        "\u3000x\xa0y",
        "A.B, (c)! 12,345",
        "\xe9 e\u0301 \xdf \ufb01 \u2460 \uff5e",
        "\u4e2d\u6587 \ud55c\uad6d \u0639\u0631\u0628 \U0001f642\u200b",
        "x" * 300,
        "a <extra_id_0>, b",
        "<extra_id_1> a <extra_id_0>",
        "a <extra_id_2> ",
    ]
    count = tokenizer.sentinel_ids.start
    # Add about 200 texts of two pieces each. The pieces are spread over the complete
    # vocabulary.
    for number in range(data.UNK + 1, count - 1, 1 + count // 200):
        texts.append(tokenizer.decode([number, count + data.UNK - number]))
    for number in range(tokenizer.sentinel_ids.stop, tokenizer.size):
        text = tokenizer.decode([number])
        texts += [f"a{text}b", f"a {text} b", f"{text},{text}"]
    return texts


def compare_ids(tokenizer, encode, path):
    """Check that another tokenizer gives the same ids as the tokenizer of plain T5.

    The two tokenizers are compared on the texts that the function hard_texts returns.

    tokenizer: the data.Tokenizer of plain T5.
    encode: a function that returns the ids that the other tokenizer gives to a text.
    path: the file or folder of the other tokenizer, for the error message.

    Returns the number of compared texts. Raises a UserError that names the first text
    with different ids.
    """
    texts = hard_texts(tokenizer)
    for text in texts:
        ours = tokenizer.encode(text)
        theirs = encode(text)
        if theirs != ours:
            raise UserError(
                f"For the text {text!r}, {path} gives the ids {theirs!s:.60}, but the "
                f"vocabulary of plain T5 gives the ids {ours!s:.60}: report this text as "
                f"a mistake of convert.py."
            )
    return len(texts)


def compare_with_library(path, tokenizer):
    """Check that Hugging Face's library `tokenizers` gives the same ids as plain T5.

    If the library is not installed, a note is printed instead. Raises a UserError if the
    ids of a text differ.

    path: the path of the tokenizer.json that the library reads.
    tokenizer: the data.Tokenizer of plain T5.
    """
    try:
        import tokenizers
    except ImportError:
        note(
            f"warning: {path} was not compared with the vocabulary of plain T5, because "
            f"the library tokenizers is missing. To compare them, install it with pip "
            f"install tokenizers, and convert again."
        )
        return
    with explain_errors(path, "a file that the library tokenizers can read"):
        library = tokenizers.Tokenizer.from_file(str(path))
    library.no_truncation()
    compare_ids(
        tokenizer, lambda text: library.encode(text, add_special_tokens=False).ids, path
    )


# ---- reading Hugging Face --------------------------------------------------------------


def read_safetensors(file):
    """Return the arrays of a safetensors file as a dict {name: Tensor}."""
    with explain_errors(file, "a complete safetensors file"):
        opened = safetensors.safe_open(file, "numpy")
        tensors = {}
        for name in opened.keys():
            shape = tuple(opened.get_slice(name).get_shape())
            tensors[name] = Tensor(shape, partial(opened.get_tensor, name))
    return tensors


def read_pickle(file):
    """Return the arrays of a file pytorch_model.bin as a dict {name: Tensor}.

    This function needs the library torch.
    """
    with explain_errors(file):
        import torch

        # Memory-map the file if it is a zip archive. Versions of torch before 1.6 wrote
        # another format, which cannot be memory-mapped.
        mmap = zipfile.is_zipfile(file)
        arrays = torch.load(file, "cpu", weights_only=True, mmap=mmap)

    def read(array):
        """Return the values as a NumPy array, with floating-point values in float32."""
        return (array.float() if array.is_floating_point() else array).numpy()

    return {
        name: Tensor(tuple(array.shape), partial(read, array))
        for name, array in arrays.items()
    }


def restore_msgpack(file):
    """Return the nested dict of arrays in a msgpack file that Flax wrote."""
    with explain_errors(file, "a complete msgpack file"):
        return flax.serialization.msgpack_restore(file.read_bytes())


def pytorch_name(name):
    """Return the PyTorch name of an array in a Hugging Face model.

    For example, the Flax name "lm_head/kernel" becomes "lm_head.weight".

    name: the name of the array in Flax or in PyTorch. A PyTorch name is returned
        unchanged.
    """
    return name.replace("/", ".").rsplit(".", 1)[0] + ".weight"


def read_flax(file):
    """Return the arrays of a file flax_model.msgpack as a dict {PyTorch name: Tensor}.

    Arrays with the name "kernel" are transposed to [outputs, inputs], as in PyTorch. Flax
    reads the complete file at once, which needs twice the size of the file in memory.
    """
    return {
        pytorch_name(name): in_memory(array).transpose(name.endswith("kernel"))
        for name, array in partition.flatten(restore_msgpack(file)).items()
    }


# Each key is the name of a weight file of Hugging Face. The value is the function that
# reads the file. If a folder contains several weight files, the first file in this order
# is read.
HF_READERS = {
    "model.safetensors": read_safetensors,
    "flax_model.msgpack": read_flax,
    "pytorch_model.bin": read_pickle,
}


def find_hf_weights(folder):
    """Return the name of the weight file in a Hugging Face directory, or None.

    The name is "model.safetensors", "flax_model.msgpack" or "pytorch_model.bin". A large
    model is split into several files, which an index file such as
    model.safetensors.index.json lists. The result is then the name without ".index.json".
    """
    for name in HF_READERS:
        if (folder / name).exists() or (folder / f"{name}.index.json").exists():
            return name
    return None


def read_hf(folder):
    """Return the weights in a Hugging Face directory as a dict {PyTorch name: Tensor}.

    A large model is split into several files, and an index file lists all arrays. Raises
    a UserError if the index file lists an array that no file contains.
    """
    name = find_hf_weights(folder)
    if (folder / name).exists():
        return HF_READERS[name](folder / name)
    form = {"weight_map": {str: str}}
    files = configs.read_json(folder / f"{name}.index.json", form)["weight_map"]
    tensors = {}
    for file in sorted(set(files.values())):
        tensors |= HF_READERS[name](folder / Path(file).name)
    # Check that every array in the index file exists. Without this check, a model whose
    # output layer is missing would look like a tied model, which needs no output layer.
    if missing := set(map(pytorch_name, files)) - tensors.keys():
        raise UserError(
            f"{folder} is incomplete. No file in it contains {listed(missing)}, which "
            f"the index file lists: download the directory again."
        )
    return tensors


# Each key is a field of Hugging Face's config.json. The value is the field of ModelConfig
# with the same meaning. For example, relative_attention_num_buckets is called
# relative_buckets in plain T5.
HF_FIELDS = {
    "vocab_size": "vocab_size",
    "d_model": "d_model",
    "d_ff": "d_ff",
    "d_kv": "d_kv",
    "num_heads": "num_heads",
    "num_layers": "num_layers",
    "num_decoder_layers": "num_decoder_layers",
    "relative_attention_num_buckets": "relative_buckets",
    "relative_attention_max_distance": "relative_max_distance",
    "dropout_rate": "dropout",
}
# Each key is an activation that config.json of Hugging Face may name in
# feed_forward_proj. The value is the name of this activation in plain T5. "gelu_new" is
# the approximation of GELU that T5 uses. The name "gelu" is not listed, because it means
# the exact GELU, which T5 does not use.
HF_ACTIVATIONS = {
    "relu": "relu",
    "gelu_new": "gelu",
    "silu": "silu",
    "gated-relu": "gated_relu",
    "gated-gelu": "gated_gelu",
    "gated-gelu_new": "gated_gelu",
    "gated-silu": "gated_silu",
}
# convert.py reads these fields of Hugging Face's config.json. Each value is the type of
# the field. A "?" marks a field that may be missing. Dimensions such as d_model are not
# listed, because they follow from the shapes of the weights.
HF_TYPES = {
    "model_type?": str,
    "feed_forward_proj?": str,
    "tie_word_embeddings?": bool,
    "scale_decoder_outputs?": bool,
    "dropout_rate?": (int, float),
    "relative_attention_max_distance?": int,
}
# These fields of Hugging Face's config.json say which ids T5's special tokens have. The
# decoder of T5 starts with the padding token, so decoder_start_token_id is 0 too.
SPECIAL_TOKENS = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}


def external_activation(names, cfg):
    """Return the name that Hugging Face or T5X has for the activation of a model.

    For example, plain T5 has the activation "gated_gelu". Its name in Hugging Face is
    "gated-gelu".

    names: HF_ACTIVATIONS for the name in Hugging Face, or T5X_ACTIVATIONS.
    cfg: the ModelConfig of the model.

    Raises a UserError if the activation exists only in plain T5.
    """
    for name, own_name in names.items():
        if own_name == cfg.activation:
            return name
    raise UserError(
        f"The activation {cfg.activation} exists only in plain T5: leave out --to, or "
        f"convert a model with one of the activations {listed(names.values())}."
    )


def hf_config(cfg):
    """Return the fields of Hugging Face's config.json that describe a model, as a dict.

    For t5-small, for example, "d_model" is 512 and "feed_forward_proj" is "relu".

    cfg: the ModelConfig of the model.
    """
    fields = {name: getattr(cfg, own_name) for name, own_name in HF_FIELDS.items()}
    name = external_activation(HF_ACTIVATIONS, cfg)
    return {**fields, "feed_forward_proj": name, "layer_norm_epsilon": 1e-6}


def open_hf(folder, file=None):
    """Open the model in a Hugging Face directory, and return it as Weights.

    file: a single safetensors file in the directory, such as t5xxl_fp16.safetensors, or
        None. Such a file usually contains the encoder of an image model, and may lie in a
        directory without config.json.

    Raises a UserError if a file is damaged or plain T5 does not support the model.
    """
    tensors = remove_heads(read_safetensors(file) if file else read_hf(folder))
    path = folder / "config.json"
    read_config = read_optional if file else configs.read_json
    config = read_config(path, HF_TYPES)
    model_type = config.get("model_type", "t5")
    if model_type not in ("t5", "mt5", "umt5"):
        raise UserError(
            f"{folder} contains a model of type {model_type}, but plain T5 supports only "
            f"the types t5, mt5 and umt5: use a model of one of these types."
        )
    tensors = unify_embeddings(tensors, config, folder)
    cfg = model_from_shapes(tensors, HF, folder)
    if not path.exists():
        config["feed_forward_proj"] = external_activation(HF_ACTIVATIONS, cfg)
        note(
            f"There is no config.json beside {file}. convert.py assumes the activation "
            f"function {cfg.activation} and the dropout rate 0.1. If the model has other "
            f"values, copy its config.json beside the file, and convert again."
        )
    cfg = apply_hf_config(cfg, config, folder)
    settings = config | read_optional(folder / "generation_config.json", dict)
    note_unused(folder, settings)
    order = find_id_order(settings, cfg.vocab_size, folder)
    for name in {"shared.weight", "lm_head.weight"} & tensors.keys():
        if order is not None:
            shape, read = tensors[name]
            tensors[name] = Tensor(shape, lambda read=read: read()[order])
    # The library diffusers stores a T5 encoder in a folder such as text_encoder_2, and
    # its tokenizer beside this folder, in tokenizer_2.
    beside = folder.parent / folder.name.replace("text_encoder", "tokenizer")
    vocabulary = read_vocabulary([folder, beside], cfg, order)
    weights = to_weights(tensors, HF, folder, cfg, vocabulary, model_type)
    return weights._replace(files=read_files(folder))


# Classifiers and models for question answering have a special output layer. The names of
# its arrays begin with one of these texts. Plain T5 does not use these arrays.
TASK_HEADS = ("classification_head.", "classifier.", "qa_outputs.")


def remove_heads(tensors):
    """Remove the output layer of a classifier or question-answering model.

    Returns the other arrays of the Hugging Face model. In a T5ForSequenceClassification,
    the names of the other arrays begin with "transformer.". This prefix is removed too.
    """
    if dropped := [name for name in tensors if name.startswith(TASK_HEADS)]:
        note(
            f"The output layer of a task is not converted ({listed(dropped)}), because "
            f"plain T5 has no such layer. The encoder is converted, and the decoder if "
            f"the model has one."
        )
    return {
        name.removeprefix("transformer."): tensor
        for name, tensor in tensors.items()
        if name not in dropped
    }


def find_id_order(settings, vocab_size, folder):
    """Return a new order of the token ids, in which the special tokens have T5's ids.

    The decoder of T5 starts with id 0, and an output ends with id 1. Other models, such
    as MADLAD-400, use other ids. Element i of the returned list is the old id of the
    token that gets the id i. The result is None if the model already uses T5's ids. The
    id of padding does not matter, because padding never influences an output.

    settings: the content of config.json and generation_config.json as one dict.

    Raises a UserError if one token both starts and ends an output.
    """
    start = settings.get("decoder_start_token_id") or 0
    end = settings.get("eos_token_id", 1)
    if isinstance(end, list) and len(end) == 1:
        end = end[0]
    if start == 0 and end in (1, None):
        return None
    order = list(range(vocab_size))
    if start == end or start not in order or end not in order:
        raise UserError(
            f"The configuration in {folder} sets decoder_start_token_id to {start} and "
            f"eos_token_id to {end}, but plain T5 needs two different tokens of the "
            f"vocabulary: use the model with the library transformers."
        )
    note(
        f"The ids of some tokens change, because plain T5 starts the decoder with id 0 "
        f"and ends an output with id 1. In this model, these ids were {start} and {end}."
    )
    # Exchange the start token with the token of id 0, and the end token with the token of
    # id 1. All other tokens keep their ids.
    for new, old in enumerate((start, end)):
        other = order.index(old)
        order[new], order[other] = old, order[new]
    return order


def read_files(folder, *patterns):
    """Return the files that are copied to the new model, as a dict {path: content}.

    These are the files of the library sentence-transformers, and the files whose names
    match one of the patterns. The files of sentence-transformers describe how one vector
    is computed from the vectors of the encoder.

    folder: a Hugging Face directory or a run directory.
    patterns: the names of other files, such as "recipe.py".

    Raises a UserError if infer.py cannot load the layers of sentence-transformers.
    """
    if (folder / "modules.json").exists():
        partition.read_vector_head(folder)
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for pattern in (
            "modules.json",
            "[1-9]_*/*.json",
            "[1-9]_*/*.safetensors",
            *patterns,
        )
        for path in folder.glob(pattern)
    }


# These settings in Hugging Face's JSON files control the generation of text. convert.py
# does not convert these settings. Each value is the default, which has no effect.
GENERATION_DEFAULTS = {
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "bad_words_ids": None,
    "sequence_bias": None,
    "min_length": 0,
    "no_repeat_ngram_size": 0,
    "repetition_penalty": 1,
    "num_beams": 1,
    "length_penalty": 1,
    "do_sample": False,
}


def note_unused(folder, settings):
    """Print a note about the generation settings that convert.py does not convert.

    For example, config.json may set the number of beams for beam search.

    folder: the Hugging Face directory.
    settings: the content of config.json and generation_config.json as one dict.
    """
    unused = [
        f"{name} {settings[name]}"
        for name, default in GENERATION_DEFAULTS.items()
        if settings.get(name) not in (None, [], default)
    ]
    if unused:
        note(
            f"convert.py ignores these settings for text generation in {folder}: "
            f"{listed(unused)}. Without them the outputs may differ. Set beam search or "
            f"sampling yourself, with flags such as --decode.beams."
        )


def unify_embeddings(tensors, config, folder):
    """Return the arrays of a Hugging Face model with only one copy of the embedding.

    Plain T5 has two types of models. A tied model uses the embedding as its output layer,
    and scales the logits by d_model^-0.5. An untied model has a separate output layer,
    and does not scale the logits.

    Some Hugging Face models are a mixture of the two types. They are tied without
    scaling, or untied with scaling. The result is then an untied model that gives the
    same logits.

    tensors: {PyTorch name: Tensor} for all arrays of the model.
    config: the content of config.json as a dict.
    folder: the Hugging Face directory, for error messages.

    Raises a UserError if the model has no embedding, or several different embeddings.
    Raises a UserError if the output layer is missing, or if config.json does not say
    whether its logits are scaled.
    """
    embed = "shared.weight"
    head_name = "lm_head.weight"
    copies = [embed, "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"]
    # The published T5 1.0 files contain position biases for cross-attention, which T5
    # does not use. Leave out this array.
    unused = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    rest = {k: x for k, x in tensors.items() if k not in (head_name, unused, *copies)}
    tables = [tensors[name] for name in copies if name in tensors]

    def equals_embedding(tensor):
        """Return whether an array has the same values as the embedding."""
        return np.array_equal(tensor.read(), tables[0].read(), equal_nan=True)

    if not tables or not all(map(equals_embedding, tables)):
        raise UserError(
            f"Plain T5 needs one embedding for the encoder and the decoder, but {folder} "
            f"has {'different embeddings' if tables else 'no embedding'} (searched in "
            f"{', '.join(copies)}): use a complete model with one shared embedding."
        )
    head = tensors.get(head_name, tables[0])
    shared = equals_embedding(head)
    # Find out whether the logits are scaled. Versions 4 and 5 of the library transformers
    # interpret tie_word_embeddings in different ways. In version 4, true means that the
    # output layer is the embedding, and that the logits are scaled. In version 5, true
    # means only that the logits of T5 are scaled. The output layer is lm_head.weight if
    # the file contains this array. Version 5 never scales the logits of mT5. It always
    # scales the logits of UMT5, which is a mistake of version 5. The default of
    # tie_word_embeddings is true, except for mT5 in version 4.
    family = config.get("model_type", "t5")
    flags = {"tie_word_embeddings", "scale_decoder_outputs"} & config.keys()
    tied = config.get("tie_word_embeddings", True)
    tied_4 = config.get("tie_word_embeddings", family != "mt5")
    stated = config.get("scale_decoder_outputs", tied)
    scaled_5 = {"mt5": False, "umt5": True}.get(family, stated)
    scaled = tied if family == "umt5" else scaled_5
    if head_name not in tensors and not any("decoder" in name for name in rest):
        # A model without a decoder needs no output layer. If `scaled` is True, the code
        # below adds no output layer.
        scaled = True
    elif head_name not in tensors and not tied and "scale_decoder_outputs" not in flags:
        raise UserError(
            f"{folder} has no {head_name} (the output layer), although "
            f"tie_word_embeddings is false in config.json: download the model again."
        )
    elif not shared and family != "mt5" and not flags:
        raise UserError(
            f"{folder} has an output layer {head_name} that differs from the embedding, "
            f"but config.json does not say whether the logits are scaled. For a model "
            f"without scaling, such as T5 1.1, add this line to config.json: "
            f'"tie_word_embeddings": false'
        )
    elif scaled_5 != tied_4 or tied_4 and not shared:
        note(
            f"Versions 4 and 5 of transformers read the config.json of this model in "
            f"different ways, and compute different logits. convert.py follows version "
            f"{5 if scaled == scaled_5 else 4}: the output layer is "
            f"{'the embedding' if shared else head_name}, and the logits are "
            f"{'multiplied by d_model^-0.5' if scaled else 'not scaled'}."
        )
    rest[embed] = tables[0]
    if not (shared and scaled):
        scale = np.float32(head.shape[1] ** -0.5 if scaled else 1)
        rest[head_name] = Tensor(head.shape, lambda: scale * head.read())
    return rest


def apply_hf_config(cfg, config, folder):
    """Add the values that only Hugging Face's config.json contains to a ModelConfig.

    These values are the dropout rate, the maximum distance of relative positions, and the
    activation function. All other values are already known from the shapes of the
    weights. Returns a new ModelConfig.

    cfg: the ModelConfig that model_from_shapes returned.
    config: the content of config.json as a dict.
    folder: the Hugging Face directory, for error messages.

    Raises a UserError if config.json contradicts the weights, or contains a value that
    plain T5 does not support.
    """
    stated = {name: value for name, value in config.items() if value is not None}
    # If config.json has no num_decoder_layers, the decoder has as many layers as the
    # encoder. If the model is only an encoder, ignore num_decoder_layers.
    layers = {"num_decoder_layers": stated.get("num_layers", cfg.num_decoder_layers)}
    stated = (
        layers | stated if cfg.num_decoder_layers else stated | {"num_decoder_layers": 0}
    )
    # The weights do not show the activation function. config.json names the activation in
    # feed_forward_proj, and the default is ReLU.
    activation = HF_ACTIVATIONS.get(stated.setdefault("feed_forward_proj", "relu"))
    if activation:
        del stated["feed_forward_proj"]
    cfg = replace(
        cfg,
        activation=activation or cfg.activation,
        dropout=stated.get("dropout_rate", 0.1),
        relative_max_distance=stated.get("relative_attention_max_distance", 128),
    )
    configs.refuse_differences(
        stated,
        hf_config(cfg),
        f"{folder}/config.json contradicts the weights, or describes another network",
        "download the model again, or use it with the library transformers",
    )
    return cfg


# ---- reading T5X and Mesh TensorFlow ---------------------------------------------------


def read_t5x(folder):
    """Return the arrays of a T5X checkpoint as a dict {T5X name: Tensor}.

    A T5X checkpoint consists of a msgpack file and zarr arrays. The msgpack file contains
    the small arrays, and the path of a zarr array for every large array.

    Source: t5x/checkpoints.py.
    """
    path = folder / "checkpoint"
    tree = restore_msgpack(path)
    version = tree["version"]
    if version != 3:
        raise UserError(
            f"{path} is a T5X checkpoint of version {version}, but plain T5 reads only "
            f"version 3: load and save the checkpoint with a newer version of T5X."
        )
    leaves = flax.traverse_util.flatten_dict(
        tree["optimizer"], is_leaf=lambda _, value: "driver" in value, sep="/"
    )
    tensors = {}
    for name, leaf in leaves.items():
        if isinstance(leaf, dict):
            # TensorStore stores the path of an array in leaf["kvstore"]. Versions of
            # TensorStore before 0.1.14 stored the path directly in `leaf`.
            relative_path = {**leaf, **leaf["kvstore"]}["path"]
            kvstore = {"driver": "file", "path": str(folder / relative_path)}
            tensors[name] = open_zarr(kvstore, leaf["metadata"]["shape"], leaf["dtype"])
        else:
            tensors[name] = in_memory(leaf)
    return tensors


def read_orbax(folder):
    """Return the arrays of an Orbax checkpoint of T5X as a dict {T5X name: Tensor}.

    The library Orbax stores zarr arrays in OCDBT, the key-value database of TensorStore.
    The file _METADATA lists the names of the arrays. It also lists the shape of the part
    that each process has written, but files of older versions of Orbax do not.
    """
    metadata = configs.read_json(folder / "_METADATA", {"tree_metadata": {str: dict}})
    database = {"driver": "ocdbt", "base": f"file://{folder.resolve()}/"}
    tensors = {}
    for entry in metadata["tree_metadata"].values():
        keys = [part["key"] for part in entry["key_metadata"]]
        kvstore = {**database, "path": ".".join(keys) + "/"}
        written = entry.get("value_metadata", {}).get("write_shape")
        tensors["/".join(keys)] = open_zarr(kvstore, written)
    return tensors


def open_zarr(kvstore, part=None, dtype=None):
    """Return a Tensor for a zarr array, without reading its values yet.

    The library TensorStore reads the shape now, and the values when they are needed.

    kvstore: a TensorStore dict with the path of the array and the storage driver.
    part: the shape of the array, or of an equal part of it, as the checkpoint states it.
    dtype: the type of the array, as the checkpoint states it.

    zarr splits an array into chunks, which are separate files. If a chunk is missing or
    the file .zarray contradicts the checkpoint, this function or the reading of the
    values raises an error.
    """
    # Raise an error if a chunk is missing. By default, TensorStore returns zeros instead.
    options = {"driver": "zarr", "fill_missing_data_reads": False}
    # T5X and Orbax always write arrays in C order and in little-endian format. If the
    # file .zarray says otherwise, raise an error.
    spec = {**options, "kvstore": kvstore, "metadata": {"order": "C"}}
    with explain_errors(kvstore.get("base", "") + kvstore["path"], "a complete array"):
        array = tensorstore.open(spec, dtype=dtype, open=True).result()
        stored = array.spec().to_json()["metadata"]
        # If the file .zarray is damaged and states a huge shape, reading the array could
        # use up the memory. So check that there is a file for each chunk. The file
        # .zarray is counted too, so there must be more files than chunks.
        chunks = np.ceil(np.divide(array.shape, stored["chunks"])).prod()
        files = len(array.kvstore.list().result())
        is_multiple = not np.mod(array.shape, part or array.shape).any()
        if files <= chunks or not is_multiple or stored["dtype"].startswith(">"):
            raise ValueError(
                f"the file .zarray does not describe the array correctly: {stored}"
            )
    return Tensor(array.shape, lambda: array.read().result())


# Each key is the name that an array of Adafactor has in Mesh TensorFlow. The value is its
# name in T5X. For example, the array "vr" is called "v_row" in T5X.
MTF_SLOTS = {"v": "v", "vr": "v_row", "vc": "v_col", "m": "m"}
# Each key is a regular expression, and the value is its replacement. Applied one after
# another, the replacements turn the name of an array in Mesh TensorFlow into its name in
# Hugging Face. Some versions of Mesh TensorFlow write "rms_norm" instead of "layer_norm".
MTF_NAMES = {
    "/(embedding|kernel|scale)$": "",
    "rms_norm": "layer_norm",
    "^(encoder|decoder)/(final_)?layer_norm": r"\1/final_layer_norm",
    r"(block|layer)_0*(\d+)": r"\1/\2",
    "decoder/logits": "lm_head",
    "/": ".",
}


def read_mtf(prefix):
    """Return the arrays of a Mesh TensorFlow checkpoint as a dict {name: Tensor}.

    Parameters get the names and shapes of Hugging Face. For example,
    "encoder/block_000/layer_000/SelfAttention/q" becomes
    "encoder.block.0.layer.0.SelfAttention.q.weight". The step and the arrays of the
    optimizer get names as in T5X.

    This function needs the library TensorFlow. Source: t5x/checkpoint_importer.py.

    prefix: the path of the checkpoint without ".index".
    """
    from tensorflow.train import load_checkpoint

    reader = load_checkpoint(str(prefix))
    tensors = {}
    for variable, shape in reader.get_variable_to_shape_map().items():
        name, _, slot = variable.partition("_slot_")
        for pattern, replacement in MTF_NAMES.items():
            name = re.sub(pattern, replacement, name)
        name = f"{name}.weight"
        tensor = Tensor(tuple(shape), partial(reader.get_tensor, variable))
        if slot:
            name = slot_name(name, MTF_SLOTS.get(slot, slot))
        elif variable == "global_step":
            name = STEP
        elif len(shape) == 2 and name != "shared.weight":
            # Transpose the matrix from [inputs, outputs] to Hugging Face's
            # [outputs, inputs].
            tensor = tensor.transpose()
        tensors[name] = tensor
    return tensors


def open_google(source, tensors, form):
    """Open a T5X or Mesh TensorFlow checkpoint, and return it as Weights.

    The vocabulary and the configuration (Gin file) may be in the folder of the checkpoint
    or in its parent folder.

    source: the path of the checkpoint.
    tensors: {name in Hugging Face or T5X: Tensor} for all arrays of the checkpoint.
    form: HF if the names in `tensors` are those of Hugging Face, or T5X.
    """
    folders = [source]
    if source.name.startswith("checkpoint_") or not source.is_dir():
        folders.append(source.parent)
    stated = read_gin(folders)
    cfg = replace(model_from_shapes(tensors, form, source), **stated)
    missing = GIN_FIELDS.keys() - stated.keys()
    if missing:
        note(
            f"No config.gin or operative_config.gin of {source} states all values that "
            f"the weights do not show. convert.py assumes "
            f"{listed(f'{name} {getattr(cfg, name)}' for name in missing)}. If the "
            f"model has other values, copy its config.gin into {folders[-1]} and convert "
            f"the checkpoint again."
        )
    return to_weights(tensors, form, source, cfg, read_vocabulary(folders, cfg))


# Each key is an activation of T5X, and the value is its name in plain T5. For a gated
# MLP, T5X names the activations of both branches, such as "gelu" and "linear".
T5X_ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "silu": "silu",
    "relu linear": "gated_relu",
    "gelu linear": "gated_gelu",
    "silu linear": "gated_silu",
}


def gin_activation(value):
    """Return the activation that a Gin file names, such as "gated_gelu".

    value: the text of the value in the Gin file, such as "('gelu', 'linear')".

    Raises a KeyError if plain T5 does not support the activation.
    """
    words = re.findall(r"\w+", value.replace("swish", "silu"))
    return T5X_ACTIVATIONS[" ".join(words)]


# These fields of ModelConfig cannot be computed from the weights. For each field, a
# regular expression finds the value in a Gin file, and a function converts the value.
GIN_FIELDS = {
    "activation": (
        r"(?:mlp_activations|DenseReluDense\.activation) = (.*)",
        gin_activation,
    ),
    "relative_max_distance": (r"RelativePositionBiases\.max_distance = ([^%\s]\S*)", int),
    # The Gin files of T5X set the dropout rate in a line such as "DROPOUT_RATE = 0.1".
    # Other lines refer to this value as %DROPOUT_RATE, so values that begin with % are
    # skipped.
    "dropout": (r"(?:T5Config\.dropout_rate|\bDROPOUT_RATE) = ([^%\s]\S*)", float),
}


def read_gin(folders):
    """Return the fields of ModelConfig that Gin files set, such as {"dropout": 0.1}.

    Gin files are the configuration files of T5X and Mesh TensorFlow. convert.py needs Gin
    files, because the weights do not show all values. For example, weights for gated GELU
    and gated SiLU have the same shapes.

    folders: the folders that may contain a Gin file. If several Gin files set a field,
        the file in the first folder counts.

    Raises a UserError if a value is invalid.
    """
    names = "operative_config.gin", "config.gin"
    paths = [folder / name for folder in reversed(folders) for name in names]
    text = "\n".join(path.read_text() for path in paths if path.is_file())
    text = re.sub(" *#.*", "", text)
    stated = {}
    for field, (pattern, convert_value) in GIN_FIELDS.items():
        for value in re.findall(pattern, text)[-1:]:
            try:
                stated[field] = convert_value(value)
            except (KeyError, ValueError) as error:
                raise UserError(
                    f"The Gin file of {folders[0]} sets {field} to {value}. Plain T5 "
                    f"does not support this value. If the file is damaged, copy it "
                    f"again. Otherwise, convert another model."
                ) from error
    return stated


# ---- reading a run, and finding the format ---------------------------------------------


def open_plain(checkpoint, run_dir):
    """Open a checkpoint that plain T5 wrote, and return it as Weights.

    The arrays come from the checkpoint. The configuration, the vocabulary and the recipe
    file come from the run directory. Raises a UserError if an array is missing.

    checkpoint: the folder of the checkpoint.
    run_dir: the run directory.
    """
    manifest = partition.read_manifest(checkpoint)
    cfg, run = configs.read_run(run_dir)
    identity = configs.weights_identity(cfg, run["vocabulary_sha256"])
    partition.check_owner(checkpoint, manifest, identity)
    positions = cfg.model.positions
    if positions not in model.POSITIONS:
        raise UserError(
            f"{run_dir} uses --model.positions {positions}, which its recipe file "
            f"defines. convert.py cannot convert this run, because it does not execute "
            f"recipe files. It converts runs with {', '.join(model.POSITIONS)}."
        )
    params = partition.flatten({"params": model.param_table(cfg.model)})
    required = {name: param.shape for name, param in params.items()}

    @explain_errors(checkpoint)
    def read(stored, verified, layer, shape):
        """Return one layer of an array, or the complete array if `layer` is None."""
        index = [slice(None)] * len(shape)
        if layer is not None:
            index.insert(0, slice(layer, layer + 1))
        return partition.read_slice(checkpoint, stored, index, verified).reshape(shape)

    arrays = {}
    found = {}
    for name, stored in manifest["arrays"].items():
        layers, shape = split_layers(name, tuple(stored["shape"]))
        if name.startswith("params/"):
            found[name] = tuple(stored["shape"])
        # A checkpoint stores an array in one or more parts, which are called shards. Keep
        # the shards that have been read, so that each checksum is verified only once. The
        # shards are memory-mapped, so keeping them needs almost no memory.
        verified = {}
        for layer in layers:
            read_layer = partial(read, stored, verified, layer, shape)
            arrays[name, layer] = Tensor(shape, read_layer)
    check_arrays(checkpoint, required, found)
    has_vocabulary = (run_dir / "spiece.model").exists()
    vocabulary = data.load_run_tokenizer(run_dir) if has_vocabulary else None
    files = read_files(run_dir, "recipe.py")
    return Weights(cfg, manifest["step"], arrays, vocabulary, files)


def find_checkpoints(folder):
    """Return the checkpoints that plain T5 or T5X saved in a folder, as {step: path}.

    Step 1000 is in the folder step_00001000 of plain T5, or in checkpoint_1000 of T5X.

    folder: the directory of the training run.
    """
    run = partition.Checkpoints(folder)
    checkpoints = {step: run.path(step) for step in run.steps()}
    for path in folder.glob("checkpoint_*"):
        step = path.name.removeprefix("checkpoint_")
        if step.isdecimal():
            checkpoints[int(step)] = path
    return checkpoints


def open_any(source, step=None):
    """Open a model in any supported format, and return it as Weights.

    The format is recognized by file names. For example, a folder with model.safetensors
    is a Hugging Face model. If a folder contains several checkpoints, the newest
    checkpoint is read, unless `step` names another checkpoint.

    source: the path of the model.
    step: the step of the checkpoint to read, or None to read the newest checkpoint.

    Raises a UserError if the model cannot be read. The message contains the path of the
    model or of the damaged file.
    """
    path = Path(source)
    with explain_errors(source):
        checkpoints = find_checkpoints(path)
        if step is None and not find_hf_weights(path):
            step = max(checkpoints, default=None)
        if step is not None and step not in checkpoints:
            raise UserError(
                f"{source} has no checkpoint of step {step:,}: leave out --step, or "
                f"choose one of {sorted(checkpoints)}."
            )
        path = checkpoints.get(step, path)
        # Raise an error for a named pipe, because reading a pipe could take forever.
        for file in path.glob("*"):
            data.check_regular(str(file))
        if (path / "adapter_config.json").exists():
            raise UserError(
                f"{path} is a LoRA adapter of the library peft: merge it into its base "
                f"model with merge_and_unload of peft, and convert the result."
            )
        if path.is_file() and path.suffix == ".safetensors":
            return open_hf(path.parent, path)
        # A checkpoint of plain T5 without manifest.json is damaged. Open the checkpoint
        # anyway, so that open_plain reports the damage.
        if (path / "manifest.json").exists() or path.match("checkpoints/step_*"):
            return open_plain(path, path.resolve().parent.parent)
        if find_hf_weights(path):
            return open_hf(path)
        if Path(f"{path}.index").exists():
            return open_google(path, read_mtf(path), HF)
        for folder in (path / "state", path):
            if (folder / "_METADATA").exists():
                return open_google(path, read_orbax(folder), T5X)
        # A T5X checkpoint has a file named "checkpoint". TensorFlow also writes a file
        # with this name, beside the ".index" files of its checkpoints.
        if (path / "checkpoint").is_file() and not any(path.glob("*.index")):
            return open_google(path, read_t5x(path), T5X)
        raise UserError(
            f"{source} is not a run directory, a Hugging Face directory with weights, or "
            f"a checkpoint of T5X or Mesh TensorFlow: {advice(path)}."
        )


# If SRC is not a model, convert.py prints advice that depends on the files in SRC. Each
# key is the suffix of a file, and the value is the advice. {file} stands for the name of
# the file, and {path} stands for the path of the file without the suffix.
ADVICE = {
    ".index": "name one checkpoint of Mesh TensorFlow, such as {path}",
    ".gguf": (
        "convert.py cannot read GGUF files. Download the original model of {file}, which "
        "has a config.json and a model.safetensors"
    ),
    ".safetensors": (
        "use a folder with the weights and their config.json as SRC, or the path of "
        "{file} if it contains a complete encoder"
    ),
    ".bin": (
        "use a folder with the weights and their config.json as SRC. Rename {file} to "
        "pytorch_model.bin if it has another name"
    ),
}


def advice(path):
    """Return advice for an error message if the path SRC is not a model.

    For example, SRC may be a folder that contains models, such as a cache of the Hugging
    Face hub, a folder of diffusers or the output folder of Hugging Face's Trainer. The
    advice is then to use one of the subfolders. The advice is the end of a sentence.
    """
    if not path.exists():
        return (
            f"this path does not exist. If {path} is the name of a model on the Hugging "
            f"Face hub, download it with `hf download {path} --local-dir {path.name}`, "
            f"and use {path.name} as SRC"
        )

    def is_model(folder):
        """Return whether a folder contains a model, which may still be damaged."""
        is_checkpoint = (folder / "manifest.json").exists()
        return is_checkpoint or find_checkpoints(folder) or find_hf_weights(folder)

    for pattern in ("*/", "*/*/", "*/*/*/"):
        if models := [str(folder) for folder in path.glob(pattern) if is_model(folder)]:
            return f"use one of its subfolders, {', '.join(sorted(models))}"
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    for suffix, sentence in ADVICE.items():
        for file in files:
            if file.suffix == suffix:
                return sentence.format(file=file.name, path=file.with_suffix(""))
    return (
        "check the path of SRC. Weights of PyTorch or Flax must be in a file "
        "model.safetensors, pytorch_model.bin or flax_model.msgpack"
    )


# ---- writing a run ---------------------------------------------------------------------


def write_plain(folder, weights, dtype):
    """Write a model as a run directory of plain T5.

    Each layer of an array is read and written separately, to save memory.

    folder: the new run directory.
    weights: the Weights of the model.
    dtype: not used, because plain T5 always stores float32.
    """
    arrays = {}
    parts = []
    for (name, layer), tensor in weights.arrays.items():
        shape = tensor.shape
        bounds = [[0, size] for size in tensor.shape]
        if layer is not None:
            # Axis 0 of a stacked array is the layer. For example, layer 3 of an array of
            # shape [8, 512, 384] has the bounds [[3, 4], [0, 512], [0, 384]]. The shape
            # grows with every layer, and is complete after the last layer.
            shape = (layer + 1, *shape)
            bounds = [[layer, layer + 1], *bounds]
        # Arrays without axes are counters, such as the step. Store them as integers.
        kind = "float32" if shape else "int32"
        arrays[name] = {"shape": shape, "dtype": kind}
        parts.append((name, bounds, tensor, kind))
    # This generator reads a layer only when the layer is written. A layer must not exceed
    # 4 GiB, because msgpack cannot store larger values.
    shards = (
        (name, bounds, np.asarray(tensor.read(), kind, order="C"))
        for name, bounds, tensor, kind in parts
    )
    digest = weights.vocabulary.sha256 if weights.vocabulary else ""
    path = partition.Checkpoints(folder).path(weights.step)
    identity = configs.weights_identity(weights.cfg, digest)
    partition.write_checkpoint(path, arrays, shards, weights.step, identity)
    configs.save_run(weights.cfg, folder, digest)


# ---- writing Hugging Face --------------------------------------------------------------

# A model of more than 5 GB is split into several safetensors files, of about this size in
# bytes.
SHARD_BYTES = 5_000_000_000


def write_hf(folder, weights, dtype):
    """Write a model as a Hugging Face directory.

    The directory contains the weights, the configuration and the tokenizer.

    folder: the directory to write to.
    weights: the Weights of the model.
    dtype: the NumPy type in which the weights are written.
    """
    write_safetensors(folder, weights, dtype)
    cfg = weights.cfg.model
    is_mt5 = weights.cfg.name.startswith("mt5") or cfg.vocab_size == 250112
    # Version 5 of transformers never scales the logits of a model of type "mt5". A tied
    # model of plain T5 needs scaled logits, so write a tied mT5 model with the type "t5".
    family = "umt5" if cfg.layer_biases else "mt5" if is_mt5 and not cfg.tied else "t5"
    has_decoder = cfg.num_decoder_layers > 0
    architecture = "ForConditionalGeneration" if has_decoder else "EncoderModel"
    config = {
        "architectures": [family.upper() + architecture],
        "model_type": family,
        "is_encoder_decoder": has_decoder,
        "use_cache": has_decoder,
        "dtype": dtype.name,
        "tie_word_embeddings": cfg.tied,
        **hf_config(cfg),
        **SPECIAL_TOKENS,
    }
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", SPECIAL_TOKENS)
    write_tokenizer(folder, weights.vocabulary, cfg)


def write_safetensors(folder, weights, dtype):
    """Write the parameters of a model as safetensors files.

    A model of less than 5 GB becomes the file model.safetensors. A larger model is split
    into several files. An index file then says which file contains which parameter.

    folder: the directory to write to.
    weights: the Weights of the model.
    dtype: the NumPy type in which the parameters are written.
    """
    # Put the arrays that begin in the first 5 GB of the model into the first file. Put
    # the arrays that begin in the next 5 GB into the second file, and so on.
    files = {}
    total_size = 0
    for entry in parameter_entries(weights.cfg.model, HF):
        files.setdefault(total_size // SHARD_BYTES, []).append(entry)
        total_size += math.prod(entry.shape) * dtype.itemsize
    weight_map = {}
    count = len(files)
    for number, entries in enumerate(files.values(), 1):
        name = f"model-{number:05}-of-{count:05}.safetensors"
        arrays = {}
        for entry in entries:
            tensor = weights.arrays[entry.name, entry.layer].transpose(entry.transposed)
            arrays[entry.external_name] = np.ascontiguousarray(tensor.read(), dtype)
        path = folder / (name if count > 1 else "model.safetensors")
        safetensors.numpy.save_file(arrays, path, {"format": "pt"})
        weight_map |= dict.fromkeys(arrays, name)
    if count > 1:
        index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
        write_json(folder / "model.safetensors.index.json", index)


def write_json(path, value):
    """Write a dict to an indented JSON file."""
    path.write_text(json.dumps(value, indent=2) + "\n")


EXPORT_NOTE = (
    "The exported tokenizer gives the same ids as plain T5, with few exceptions. Plain "
    "T5 reads a sentinel without a space before it as ordinary text. Plain T5 also "
    "reads </s>, <pad>, <unk> and names of bytes, such as <0x41>, as ordinary text. "
    "Some rare characters that are made of several code points, such as half-width kana "
    "with a voicing mark, also get other ids."
)


def refuse_vocabulary(proto):
    """Raise a UserError if a tokenizer.json cannot express a SentencePiece model.

    For example, the vocabulary is refused if it puts no space before a text.

    proto: the ModelProto of the SentencePiece model.
    """
    trainer = proto.trainer_spec
    normalizer = proto.normalizer_spec
    reasons = {
        "is not a unigram model": trainer.model_type != trainer.UNIGRAM,
        "keeps repeated white space": not normalizer.remove_extra_whitespaces,
        "stores spaces as spaces": not normalizer.escape_whitespaces,
        "puts no space before a text": not normalizer.add_dummy_prefix,
        "puts spaces at the end of a piece": trainer.treat_whitespace_as_suffix,
        "has user-defined pieces inside of words": any(
            piece.type == piece.USER_DEFINED and not piece.piece.startswith(SPACE)
            for piece in proto.pieces
        ),
    }
    if found := [reason for reason, applies in reasons.items() if applies]:
        raise UserError(
            f"The vocabulary {' and '.join(found)}, which Hugging Face's T5 "
            f"tokenizer cannot express. To convert only the weights, move "
            f"spiece.model out of SRC."
        )


def write_tokenizer(folder, vocabulary, cfg):
    """Write the tokenizer files of a Hugging Face directory.

    A SentencePiece model is written twice, as spiece.model and as tokenizer.json. Both
    files give the same ids for almost all texts. The exceptions are printed as a note. If
    the library tokenizers is installed, it reads the file and compares the ids.

    folder: the directory to write to.
    vocabulary: the data.Tokenizer of the model, or None.
    cfg: the ModelConfig of the model.

    Raises a UserError if tokenizer.json cannot express the SentencePiece model.
    """
    # A model that reads only token ids needs no tokenizer.
    if vocabulary is None or isinstance(vocabulary, data.IdTokenizer):
        return
    config = dict(zip(("pad_token", "eos_token", "unk_token"), SPECIAL_PIECES))
    if isinstance(vocabulary, data.ByteTokenizer):
        config["tokenizer_class"] = "ByT5Tokenizer"
        config["extra_ids"] = max(0, cfg.vocab_size - 259)
        note(BYT5_WARNING)
    else:
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        is_pattern = isinstance(vocabulary, data.PatternTokenizer)
        describe = pattern_tokenizer_json if is_pattern else tokenizer_json
        if not is_pattern:
            refuse_vocabulary(parse_sentencepiece(vocabulary.serialized))
            note(EXPORT_NOTE)
        write_json(folder / "tokenizer.json", describe(vocabulary))
        compare_with_library(folder / "tokenizer.json", vocabulary)
    write_json(folder / "tokenizer_config.json", config)


# These parts of a tokenizer.json are the same for all vocabularies. The post_processor
# appends the id of </s>, the end of a sequence, to the ids of a text.
TOKENIZER_JSON = json.loads("""
{
  "version": "1.0",
  "truncation": null,
  "padding": null,
  "normalizer": null,
  "post_processor": {
    "type": "TemplateProcessing",
    "pair": [],
    "single": [
      {"Sequence": {"id": "A", "type_id": 0}},
      {"SpecialToken": {"id": "</s>", "type_id": 0}}
    ],
    "special_tokens": {"</s>": {"id": "</s>", "ids": [1], "tokens": ["</s>"]}}
  }
}
""")
# These two steps of a tokenizer.json imitate how SentencePiece treats spaces. The first
# step removes the spaces at the end of a text. The second step replaces several adjacent
# spaces by one space.
SPACE_STEPS = json.loads(r"""
[
  {"type": "Replace", "pattern": {"Regex": "[ \u2581]+$"}, "content": ""},
  {"type": "Replace", "pattern": {"Regex": "[ \u2581]{2,}"}, "content": " "}
]
""")


def tokenizer_json(vocabulary):
    """Return the content of Hugging Face's tokenizer.json for a SentencePiece model.

    The library `tokenizers` of Hugging Face reads this file.

    vocabulary: the data.Tokenizer of a SentencePiece unigram model.
    """
    # Take the pieces from the SentencePiece processor and not from the file. If the file
    # has no sentinels, parse_vocabulary has added 100 sentinels to the processor.
    processor = vocabulary.processor
    proto = parse_sentencepiece(processor.serialized_model_proto())
    vocab = []
    added = []
    for number, piece in enumerate(proto.pieces):
        text = piece.piece
        is_sentinel = "<extra_id_" in piece.piece
        is_added = is_sentinel or piece.type == piece.USER_DEFINED
        if is_added:
            text = text.removeprefix(SPACE)
        vocab.append([text, piece.score])
        if number < 3 or is_added:
            # A sentinel or an added token absorbs the space before it. The tokens <pad>,
            # </s> and <unk> have the ids 0 to 2, and do not absorb a space.
            added.append(added_token(number, text, is_sentinel or not is_added, is_added))
    # Some SentencePiece models insert a space after a sentinel. Test whether a space is
    # inserted between "<extra_id_0>" and ",". In tokenizer.json, prepend_scheme "always"
    # inserts such a space.
    inserts = processor.normalize("<extra_id_0>,").endswith(f"{SPACE},")
    metaspace = {
        "type": "Metaspace",
        "replacement": SPACE,
        "prepend_scheme": "always" if inserts else "first",
        # Do not split a text into words if a piece contains several words.
        "split": not any(SPACE in piece.piece[1:] for piece in proto.pieces),
    }
    steps = list(SPACE_STEPS)
    if charsmap := proto.normalizer_spec.precompiled_charsmap:
        charsmap = base64.b64encode(charsmap).decode()
        steps.insert(0, {"type": "Precompiled", "precompiled_charsmap": charsmap})
        # If a letter has two accents, the step "Precompiled" drops the second accent. The
        # step "NFC" avoids this, because it first joins letters and accents.
        if processor.normalize("e\u0301") == processor.normalize("\xe9"):
            steps.insert(0, {"type": "NFC"})
    return TOKENIZER_JSON | {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": metaspace,
        "decoder": {
            "type": "Sequence",
            "decoders": [{"type": "ByteFallback"}, metaspace],
        },
        "model": {
            "type": "Unigram",
            "unk_id": data.UNK,
            "vocab": vocab,
            "byte_fallback": proto.trainer_spec.byte_fallback,
        },
        "added_tokens": added,
    }


def pattern_tokenizer_json(vocabulary):
    """Return the content of Hugging Face's tokenizer.json for a data.PatternTokenizer.

    A data.PatternTokenizer cuts a text into the matches of a regular expression. In
    tokenizer.json, the step "Split" with "Isolated" cuts a text before and after each
    match. The model "WordLevel" then looks up the id of each part.
    """
    pattern = json.loads(vocabulary.serialized)["pattern"]
    special = [0, 1, 2, *vocabulary.sentinel_ids]
    return TOKENIZER_JSON | {
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": pattern},
            "behavior": "Isolated",
            "invert": False,
        },
        "decoder": {"type": "Fuse"},  # write the tokens without spaces between them
        "model": {"type": "WordLevel", "vocab": vocabulary.ids, "unk_token": "<unk>"},
        "added_tokens": [added_token(i, vocabulary.pieces[i]) for i in special],
    }


def added_token(number, text, special=True, absorbs_space=False):
    """Return a dict that describes an added token in Hugging Face's tokenizer.json.

    A tokenizer first finds the added tokens in a text. It then cuts the text between the
    added tokens into pieces.

    special: whether decoding with skip_special_tokens leaves out the token.
    absorbs_space: whether the token includes the space before it.
    """
    return {
        "id": number,
        "content": text,
        "lstrip": absorbs_space,
        "rstrip": False,
        "single_word": False,
        "normalized": False,
        "special": special,
    }


# ---- writing T5X -----------------------------------------------------------------------


# This is a template for config.gin, a file that describes a model to T5X and convert.py.
# A name in braces, such as {d_model}, is replaced by its value.
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


def write_t5x(folder, weights, dtype):
    """Write a model as a T5X checkpoint.

    The parameters are written as zarr arrays, and a msgpack file lists all arrays. A file
    config.gin describes the model. If the model has an Adafactor state, this state is
    written in float32. Raises a UserError for UMT5, which T5X does not support.

    folder: the directory of the checkpoint.
    weights: the Weights of the model.
    dtype: the NumPy type in which the parameters are written.
    """
    cfg = weights.cfg.model
    if cfg.layer_biases:
        raise UserError(
            "T5X does not support UMT5, which has position biases in every layer: use "
            "--to hf."
        )
    entries = parameter_entries(cfg, T5X)
    tree = {STEP: np.array(weights.step, np.int32)}
    factored = {
        name.replace("slots/", "params/", 1).removesuffix("/row")
        for name, _ in weights.arrays
        if name.endswith("/row")
    }
    slots = slot_entries(entries, factored)
    if all((slot.name, slot.layer) in weights.arrays for slot in slots):
        # T5X expects the optimizer arrays m, v, v_row and v_col for every parameter. An
        # unused array must be a single zero.
        for entry in entries:
            for slot in ("m", "v", "v_row", "v_col"):
                tree[slot_name(entry.external_name, slot)] = np.zeros(1, np.float32)
        entries += slots
    else:
        note(
            "The converted checkpoint has no Adafactor state. T5X can evaluate this "
            "checkpoint. To fine-tune it in T5X, set fallback_to_scratch = True in the "
            "Gin configuration."
        )
    for external_name, name, layer, _, _ in entries:
        kind = dtype if name.startswith("params/") else np.float32
        array = np.array(weights.arrays[name, layer].read(), kind)
        # v_row and v_col are small, so T5X stores them in the msgpack file.
        if not external_name.endswith(("v_row", "v_col")):
            array = write_zarr(folder, external_name.replace("/", "."), array)
        tree[external_name] = array
    tree = flax.traverse_util.unflatten_dict(tree, sep="/")
    content = flax.serialization.msgpack_serialize({"version": 3, "optimizer": tree})
    configs.write_file(folder / "checkpoint", content)
    if (cfg.relative_buckets, cfg.relative_max_distance) != (32, 128):
        note(
            f"warning: the file network.py of T5X always uses 32 buckets of relative "
            f"positions and a largest distance of 128. To use this model in T5X, change "
            f"these numbers to {cfg.relative_buckets} and {cfg.relative_max_distance}."
        )
    activations = tuple(external_activation(T5X_ACTIVATIONS, cfg).split())
    gin = CONFIG_GIN.format(activations=activations, **vars(cfg))
    configs.write_file(folder / "config.gin", gin)


def write_zarr(folder, name, array):
    """Write a zarr array, and return a dict that tells T5X where the array is.

    The dict is a TensorStore specification, which T5X reads from the msgpack file.

    folder: the directory of the checkpoint.
    name: the name of the directory of the zarr array.
    array: the values as a NumPy array.
    """
    # Zarr splits an array into chunks, with one file per chunk. A chunk has at most 64
    # MiB, as in T5X.
    chunk_rows = max(1, (1 << 26) // array[0].nbytes)
    metadata = {
        "shape": list(array.shape),
        "chunks": [min(len(array), chunk_rows), *array.shape[1:]],
        # Do not compress the values. T5X compresses them with gzip, which saves only 7 %
        # of the size and makes writing ten times slower.
        "compressor": None,
    }
    spec = {"driver": "zarr", "dtype": array.dtype.name, "metadata": metadata}
    kvstore = {"driver": "file", "path": str(folder / name)}
    store = tensorstore.open({**spec, "kvstore": kvstore}, create=True).result()
    store.write(array).result()
    return {**spec, "kvstore": {"driver": "file", "path": f"{name}/"}}


# ---- the command -----------------------------------------------------------------------

# Each key is a value of the option --to. The value is the function that writes this
# format.
WRITERS = {"plain": write_plain, "hf": write_hf, "t5x": write_t5x}


@contextmanager
def atomic_destination(destination):
    """Yield a temporary folder that is renamed to `destination` at the end.

    If an exception is raised, the temporary folder is deleted, and `destination` is not
    created. Raises a UserError if `destination` exists and is not an empty folder.
    """
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise UserError(
            f"{destination} already exists: choose a new folder as DST, or rename the "
            f"old one."
        )
    temporary = destination.with_name(f".{destination.name}.tmp{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        os.rename(temporary, destination)
        partition.sync_folder(destination.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def only_parameters(weights, group="params"):
    """Return Weights with the parameters alone, without the optimizer state.

    If the model is a run with LoRA, its LoRA matrices are merged.

    group: "params", or "ema" to use the exponential moving average of the parameters.

    Raises a UserError if the model has no moving average.
    """
    arrays = {
        (name.replace(group, "params", 1), layer): tensor
        for (name, layer), tensor in weights.arrays.items()
        if name.startswith(f"{group}/")
    }
    if not arrays:
        raise UserError(
            "--ema needs a moving average of the weights, which SRC does not have: leave "
            "out --ema, or train with --train.ema."
        )
    for (name, layer), w in list(arrays.items()):
        if a := arrays.pop((f"{name}_lora_a", layer), None):
            b = arrays.pop((f"{name}_lora_b", layer))
            arrays[name, layer] = Tensor(
                w.shape, lambda w=w, a=a, b=b: w.read() + a.read() @ b.read()
            )
    cfg = configs.override(weights.cfg, {"train.ema": 0.0, "model.lora": 0})
    return weights._replace(cfg=cfg, arrays=arrays)


def convert(source, destination, to, dtype, step=None, allow_pickle=False, ema=False):
    """Convert a model to another format, and check the result.

    The check reads the new model from disk and compares its arrays with the source.

    source: the path of the model.
    destination: the path of the new folder, which appears only after the check.
    to: the new format, which is "plain", "hf" or "t5x".
    dtype: the NumPy type in which the parameters are written.
    step: the step of the checkpoint to read, or None to read the newest checkpoint.
    allow_pickle: True to allow reading a pickle file, which can run any code.
    ema: True to convert the moving average of the weights, which --train.ema computes.

    Raises a UserError if the model cannot be read. Raises an OSError if the new model
    cannot be written or differs from the old model.
    """
    start = time.perf_counter()
    if find_hf_weights(Path(source)) == "pytorch_model.bin" and not allow_pickle:
        raise UserError(
            f"{source} contains pytorch_model.bin, a pickle file that can run any code "
            f"when it is read: add --allow_pickle if you trust the file."
        )
    with atomic_destination(destination) as folder:
        weights = open_any(source, step)
        if ema or weights.cfg.model.lora:
            weights = only_parameters(weights, "ema" if ema else "params")
        positions = weights.cfg.model.positions
        if to != "plain" and positions != "t5_bias":
            raise UserError(
                f"The model has --model.positions {positions}, which --to {to} cannot "
                f"store: use --to plain, or convert a model with --model.positions "
                f"t5_bias."
            )
        params = model.count_params(model.param_table(weights.cfg.model))
        print(
            f"reading  {source}, a model with {params:,} parameters, from training step "
            f"{weights.step:,}"
        )
        print(f"writing  {destination}", flush=True)
        files = weights.files
        if weights.vocabulary:
            files = {**files, "spiece.model": weights.vocabulary.serialized}
        else:
            note(
                f"warning: {source} has no vocabulary in a file spiece.model or "
                f"tokenizer.json. Plain T5 does not read other files, such as the "
                f"vocab.json of CodeT5. The converted model reads only token ids until "
                f"you copy the model's spiece.model into {destination}."
            )
        try:
            for name, content in files.items():
                if to == "plain" or name != "recipe.py":
                    configs.write_file(folder / name, content)
            WRITERS[to](folder, weights, dtype)
        # On a full disk, Python raises an OSError, TensorStore a ValueError and
        # safetensors a SafetensorError.
        except (OSError, ValueError, safetensors.SafetensorError) as error:
            raise OSError(errno.EIO, str(error)[:200], str(destination)) from error
        written = open_any(folder)
        count = compare(weights, written, dtype)
        print(f"compared {count:,} arrays with the source: all are equal in {dtype}")
        if weights.vocabulary and written.vocabulary:
            encode = written.vocabulary.encode
            count = compare_ids(weights.vocabulary, encode, destination)
            print(f"compared the ids of {count:,} texts with the source: all are equal")
    print(f"done     {destination}, in {time.perf_counter() - start:.2f} s", flush=True)


def compare(weights, written, dtype):
    """Check that a converted model has the same values as the original model.

    Returns the number of compared arrays. Raises a UserError if the configurations of the
    two models differ, or an OSError if two arrays differ. Prints a note if there are
    values that are not finite.

    weights: the Weights of the original model.
    written: the Weights of the converted model, read from the disk.
    dtype: the NumPy type in which the parameters were written. The parameters of the
        original model are rounded to this type before the comparison.
    """
    configs.refuse_differences(
        configs.weights_identity(weights.cfg, ""),
        configs.weights_identity(written.cfg, ""),
        "The written files describe another model",
        "report this error, because convert.py has a mistake",
    )
    # Skip counters, such as the number of training steps, because T5X does not store all
    # counters. A counter has no axes, so its shape is empty.
    keys = [key for key, tensor in written.arrays.items() if tensor.shape]
    infinite = set()
    for key in keys:
        name = key[0]
        kind = dtype if name.startswith("params/") else np.float32
        expected = np.asarray(weights.arrays[key].read(), kind)
        if not np.array_equal(expected, written.arrays[key].read(), equal_nan=True):
            raise OSError(
                f"{name} has different values after it was written and read again, so "
                f"the disk or the memory may be faulty: convert the model again, to "
                f"another disk or on another machine"
            )
        if not np.isfinite(expected).all():
            infinite.add(name)
    if infinite:
        note(
            f"warning: some values of {listed(infinite)} are infinite or "
            f"NaN. The converted model has the same values, and its outputs may be NaN. "
            f"Use another copy of the model, or train with a lower "
            f"--train.learning_rate."
        )
    return len(keys)


def main(argv):
    """Run the command convert.py with the given command-line arguments.

    For example, main(["t5_small", "runs/t5_small"]) imports the model in the folder
    t5_small as a run of plain T5.

    argv: the arguments as a list of strings.
    """
    args, changes = configs.parse_args(
        __doc__,
        argv,
        src_=dict(help="the model to convert, in any supported format"),
        dst_=dict(help="the new folder for the converted model"),
        to=dict(default="plain", choices=tuple(WRITERS), help="the new format"),
        dtype=dict(
            default="float32",
            choices=("float32", "bfloat16"),
            help="the number type of the converted weights",
        ),
        step=dict(
            default="latest",
            help="the checkpoint to convert: a step number, latest or best",
        ),
        allow_pickle=dict(action="store_true", help="allow reading a pickle file"),
        ema=dict(
            action="store_true",
            help="convert the moving average of the weights (of a run with --train.ema)",
        ),
    )
    if changes or args.config or args.run_dir:
        raise UserError(
            "convert.py reads the model's configuration from SRC: leave out --config, "
            "--run_dir and flags such as --model.d_ff."
        )
    if any(map(configs.is_remote, (args.src, args.dst))):
        raise UserError(
            f"{args.src} and {args.dst} must both be local folders: copy a remote folder "
            f"to this machine first. To copy a model of the Hugging Face hub, use "
            f"`hf download`."
        )
    if args.to == "plain" and args.dtype != "float32":
        raise UserError(
            "--dtype bfloat16 needs --to hf or --to t5x, because a run of plain T5 "
            "stores its weights in float32: add one of these, or leave out --dtype."
        )
    convert(
        args.src,
        Path(os.path.abspath(args.dst)),
        args.to,
        np.dtype(jnp.dtype(args.dtype)),
        partition.resolve_step(args.src, args.step),
        args.allow_pickle,
        args.ema,
    )


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    configs.run_command(main)
