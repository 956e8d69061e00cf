"""Convert T5 weights between Hugging Face, T5X, Mesh TensorFlow and runs of plain T5.

SRC is a model in any of these formats. The format and all dimensions of SRC are detected.
DST is a new folder for a run, a Hugging Face model or a T5X checkpoint. The weights are
copied exactly, unless --dtype bfloat16 rounds the weights. convert.py reads the written
model again and compares the model with SRC. DST appears only after this check.

    python convert.py t5-v1_1-small/ runs/t5_1_1_small     import any format as a run
    python convert.py runs/tiny tiny_hf --to hf            export to Hugging Face
    python convert.py runs/tiny checkpoint_1500 --to t5x   export to T5X

All formats hold the same arrays. The formats use different names for the arrays, and
they store matrices differently:

- Hugging Face (the library transformers): a directory with config.json and the weights in
  model.safetensors, flax_model.msgpack or pytorch_model.bin. PyTorch stores a matrix as
  [outputs, inputs], and a run stores the matrix as [inputs, outputs].
- T5X (Google's JAX code for T5): a directory checkpoint_N with a msgpack file and one
  zarr array per parameter. T5X can also write this directory with the library Orbax. T5X
  stores a matrix as a run does.
- Mesh TensorFlow (the original code for T5): a TensorFlow checkpoint model.ckpt-N. Mesh
  TensorFlow stores a matrix as a run does.

Terms in this file: *our name* is the name of an array in a run, such as "params/embed".
The *external name* is the name of the array in one of the other formats.

Example:
>>> from convert import parameter_names
>>> hugging_face, t5x = parameter_names("encoder/layers/attention/query", 0, True)
>>> hugging_face
'encoder.block.0.layer.0.SelfAttention.q.weight'
>>> t5x
'target/encoder/layers_0/attention/query/kernel'
"""

import base64
import contextlib
import errno
import functools
import json
import math
import os
import re
import shutil
import time
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Callable, NamedTuple

import flax
import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
import sentencepiece
import tensorstore
from sentencepiece import sentencepiece_model_pb2

import configs
import data
import model
import partition
from configs import Config, DataConfig, ModelConfig, TrainConfig, UserError, note

# ---- names -----------------------------------------------------------------------------
# The three tables below contain the names of all parameters. Each key is our name or a
# part of our name. Each value is a pair of external names or of parts of external names.
# The first element of the pair is used by Hugging Face, and the second is used by T5X.

# SUBLAYERS: the names of the attention and MLP sublayers of a layer. Hugging Face numbers
# the sublayers, and T5X does not.
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
# MATRICES: the names of the matrices of a sublayer. If the MLP has no gate, Hugging Face
# and T5X write "wi" instead of "wi_1". Only UMT5 has a relative_bias in every layer, and
# T5X does not support UMT5.
MATRICES = {
    "query": ("q", "query"),
    "key": ("k", "key"),
    "value": ("v", "value"),
    "out": ("o", "out"),
    "gate": ("wi_0", "wi_0"),
    "up": ("wi_1", "wi_1"),
    "down": ("wo", "wo"),
    "relative_bias": ("relative_attention_bias", "relative_attention_bias"),
}
# UNSTACKED: the names of the parameters that do not belong to a layer. Hugging Face
# stores the relative position biases of a stack in the first layer of the stack.
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
    """Return the names of a parameter in Hugging Face (PyTorch) and in T5X.

    path: the name of the parameter in model.param_table. layer: the layer number. The
    layer number is ignored if the parameter does not belong to a layer. gated: whether
    the MLP has a gate.
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


# A name has two spellings. HF and T5X are the positions of the spellings in the result of
# parameter_names.
HF, T5X = 0, 1


# ---- arrays ----------------------------------------------------------------------------


def split_layers(name, shape):
    """Return the layer numbers of an array in a run, and the shape of one layer.

    name: our name of the array. shape: the shape of the array. If the array is not
    stacked, the layer numbers are [None], and the shape is returned unchanged.
    """
    if "layers" in name.split("/"):
        return range(shape[0]), shape[1:]
    return [None], shape


class Tensor(NamedTuple):
    """An array that is still on the disk. read() returns the values of the array.

    A model in another format is a dict {external name: Tensor}. Arguments with such a
    dict are called `tensors`.
    """

    shape: tuple
    read: Callable

    def transpose(self):
        """Return the transpose of a Tensor that is a matrix."""
        return Tensor(self.shape[::-1], lambda: self.read().T)


class Entry(NamedTuple):
    """The link between an external array and an array of a run, or a layer of the array.

    A run keeps the layers of a stack in one array [layers, inputs, outputs]. The other
    formats keep one array per layer. An array of a run with L layers therefore has L
    entries.
    """

    external_name: str
    name: str  # our name
    layer: int | None  # the layer number, or None if our array is not stacked
    shape: tuple  # the shape of the layer in a run
    transposed: bool  # whether the external array is the transpose of the layer


def parameter_entries(cfg, form):
    """Return a list with one Entry per external array that holds parameters.

    cfg: the ModelConfig. form: HF or T5X, the spelling of the external names.

    PyTorch stores the weight of a linear layer as [outputs, inputs], and the position
    biases as [buckets, heads]. A run stores [inputs, outputs] and [heads, buckets]. Every
    matrix of Hugging Face is therefore transposed, except the embedding.
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


# STEP: the name of the array in which T5X stores the step.
STEP = "state/step"


def slot_name(parameter, slot):
    """Return T5X's name of an array that belongs to the state of the optimizer.

    parameter: the external name of the parameter. slot: m, v, v_row or v_col.
    """
    return f"state/param_states/{parameter.removeprefix('target/')}/{slot}"


def slot_entries(parameters, factored):
    """Return a list with one Entry per external array that holds a slot of Adafactor.

    parameters: the entries of the parameters. factored: our names of the parameters for
    which Adafactor stores only row and column means.

    Adafactor (Shazeer and Stern, 2018) estimates the mean square V of each gradient. For
    a large matrix, Adafactor does not store V [rows, columns], but only the mean of each
    row and the mean of each column. The slot "row" of a run has shape [rows], and the
    slot "column" has shape [columns]. T5X names the two slots by length: v_row is the
    shorter slot. If a matrix has more rows than columns, "row" is therefore v_col in T5X,
    and "column" is v_row. If both slots have equal lengths, "row" is v_row. For all other
    parameters the slot "full" of a run is the slot v of T5X, which contains V. Source:
    t5x/adafactor.py.
    """
    entries = []
    for parameter in parameters:
        slots = {"full": ("v", parameter.shape)}
        if parameter.name in factored:
            rows, columns = parameter.shape
            slots = {"row": ("v_row", (rows,)), "column": ("v_col", (columns,))}
            if rows > columns:
                slots = {"row": ("v_col", (rows,)), "column": ("v_row", (columns,))}
        for slot, (t5x_slot, shape) in slots.items():
            external_name = slot_name(parameter.external_name, t5x_slot)
            name = parameter.name.replace("params/", "slots/", 1) + "/" + slot
            entries.append(Entry(external_name, name, parameter.layer, shape, False))
    return entries


class Weights(NamedTuple):
    """A model on disk. Every reader returns Weights, and every writer takes Weights.

    Each layer is a Tensor, which is read at the moment when the layer is written. The
    model may therefore be larger than the memory.
    """

    cfg: Config
    step: int
    # The keys are (our name, layer number). The values are Tensors. The dict contains all
    # parameters, and the slots of the optimizer if the slots can be converted.
    arrays: dict
    # the content of spiece.model, or None if the model has no vocabulary
    vocabulary: bytes | None
    # the content of recipe.py, or None if the model is not a run with a recipe file
    recipe: bytes | None = None


def in_memory(array):
    """Wrap an array that is already in memory as a Tensor."""
    return Tensor(np.shape(array), lambda: np.asarray(array))


# ====== below: readers, writers, the command ============================================


@contextlib.contextmanager
def explain_errors(path, kind="in the format that its name and folder suggest"):
    """Replace an exception of a library by a UserError that names the file `path`.

    kind: what the file should be. Use this function as a context manager or a decorator.
    """
    try:
        yield
    except ImportError as error:
        raise UserError(
            f"Reading {path} needs a missing package ({error}): install it with pip."
        ) from error
    except UserError:
        raise
    except Exception as error:  # The libraries have no common class of exceptions.
        reason = f"{type(error).__name__}: {' '.join(str(error).split()):.200}"
        raise UserError(
            f"{path} is missing, damaged or not {kind} ({reason}): download it again, or "
            f"choose another checkpoint with --step."
        ) from error


def check_shapes(source, required, found):
    """Raise a UserError if an array is missing or has a wrong shape.

    required, found: {name: shape}. source: the path of the model, for the message.
    """
    for name, shape in required.items():
        if found.get(name) != shape:
            raise UserError(
                f"{source} is damaged: {name} must have shape {shape}, but it has "
                f"{found.get(name, 'none')}. Use another copy of the model."
            )


def model_from_shapes(tensors, form, source):
    """Return a ModelConfig with all values that the shapes of the arrays determine.

    tensors: a model in another format. form: HF or T5X, the spelling of the names in
    `tensors`. source: the path of the model, for messages. Raises a UserError if a stack
    of layers is missing.
    """
    gated = parameter_names("encoder/layers/mlp/gate", 0, True)[form] in tensors

    def shape(path):
        """Return the shape that the parameter `path` has in a run."""
        rows, columns = tensors[parameter_names(path, 0, gated)[form]].shape
        if form == HF and path != "embed":
            return columns, rows
        return rows, columns

    def count_layers(stack):
        """Return the largest layer number in the names of one stack, plus 1."""
        pattern = rf"{stack}[./](?:block\.|layers_)(\d{{1,3}})\D"
        numbers = re.findall(pattern, " ".join(tensors))
        return max(map(int, numbers), default=-1) + 1

    num_layers, num_decoder_layers = count_layers("encoder"), count_layers("decoder")
    tied = UNSTACKED["unembed"][form] not in tensors
    if not num_layers or not num_decoder_layers and not tied:
        raise UserError(
            f"{source} has {num_layers} encoder layers, {num_decoder_layers} decoder "
            f"layers and {'no' if tied else 'an'} output layer: plain T5 converts "
            f"complete encoder-decoders, and encoders without an output layer."
        )
    num_heads, relative_buckets = shape("encoder/relative_bias")
    vocab_size, d_model = shape("embed")
    bias_of_layer_1 = parameter_names("encoder/layers/attention/relative_bias", 1, gated)
    return ModelConfig(
        vocab_size=vocab_size,
        d_model=d_model,
        d_ff=shape("encoder/layers/mlp/up")[1],
        d_kv=shape("encoder/layers/attention/query")[1] // num_heads,
        num_heads=num_heads,
        num_layers=num_layers,
        num_decoder_layers=num_decoder_layers,
        relative_buckets=relative_buckets,
        layer_biases=bias_of_layer_1[form] in tensors,
        activation="gated_gelu" if gated else "relu",
        tied=tied,
    )


def to_weights(tensors, form, source, cfg, vocabulary, name="t5"):
    """Return the Weights of a model in another format.

    cfg: the ModelConfig, which determines the arrays that `tensors` must have. form,
    source: see model_from_shapes. name: the name of the model. Raises a UserError if an
    array is missing or unknown, or has a wrong shape.
    """
    entries = parameter_entries(cfg, form)
    required = {}
    for entry in entries:
        shape = entry.shape[::-1] if entry.transposed else entry.shape
        required[entry.external_name] = shape
    optimizer, others = {}, {}
    for external_name, tensor in tensors.items():
        is_optimizer = external_name.startswith("state/")
        # T5X stores a single zero for a slot that a parameter does not use.
        if is_optimizer and math.prod(tensor.shape) > 1:
            optimizer[external_name] = tensor.shape
        elif not is_optimizer:
            others[external_name] = tensor.shape
    check_shapes(source, required, others)
    if unknown := others.keys() - required.keys():
        raise UserError(
            f"{source} has {', '.join(sorted(unknown)):.200}, which no T5 model has: "
            f"plain T5 converts T5 1.0, T5 1.1, mT5, UMT5, ByT5 and models derived from "
            f"them."
        )
    step = int(tensors[STEP].read()) if STEP in tensors else 0
    factored = set()
    for entry in entries:
        if slot_name(entry.external_name, "v_row") in optimizer:
            factored.add(entry.name)
    slots = slot_entries(entries, factored)
    arrays = {}
    # The optimizer is Adafactor without momentum if its arrays are exactly these slots.
    if optimizer == {slot.external_name: slot.shape for slot in slots}:
        entries += slots
        # T5X counts only steps. A run also counts updates and skipped updates.
        for counter, value in {"step": step, "count": step, "skipped": 0}.items():
            arrays[counter, None] = in_memory(value)
    elif optimizer:
        note(
            f"Only the parameters of {source} are converted, because its optimizer is "
            f"not Adafactor without momentum."
        )
    for entry in entries:
        tensor = tensors[entry.external_name]
        if entry.transposed:
            tensor = tensor.transpose()
        read = explain_errors(source)(tensor.read)
        arrays[entry.name, entry.layer] = Tensor(entry.shape, read)
    data_config = DataConfig("python:", vocab="spiece.model")
    run = Config(name, cfg, data_config, TrainConfig(steps=max(step, 1)))
    try:
        configs.check(run)
    except UserError as error:
        raise UserError(f"{source} cannot be converted: {error}") from error
    return Weights(run, step, arrays, vocabulary)


# ---- vocabularies ----------------------------------------------------------------------


def read_vocabulary(folders, cfg, sentinels=data.SENTINELS):
    """Return the vocabulary from the first of `folders` that has one, or None.

    The result is a serialized SentencePiece model. For ByT5, which has no vocabulary
    file, the result is "bytes:0". A spiece.model takes precedence over a tokenizer.json.
    cfg: the ModelConfig. sentinels: how many sentinels to add if the file has none.
    """
    names = ("spiece.model", "tokenizer.json")
    paths = [folder / name for name in names for folder in folders]
    path = next(filter(Path.is_file, paths), None)
    if path is None:
        return b"bytes:0\n" if cfg.vocab_size == 384 else None
    vocabulary = path.read_bytes()
    if vocabulary.startswith((b"bytes", b"ids:")):  # the vocabulary of a run
        return vocabulary
    if path.suffix == ".json":
        vocabulary = tokenizer_json_to_sentencepiece(path).SerializeToString()
    proto = parse_sentencepiece(vocabulary, path)
    if sentinels != data.SENTINELS and "<extra_id_" not in proto.pieces[-1].piece:
        data.add_sentinels(proto, sentinels)
        vocabulary = proto.SerializeToString()
    if len(proto.pieces) > cfg.vocab_size:
        raise UserError(
            f"{path} has {len(proto.pieces):,} pieces, but the model has only "
            f"{cfg.vocab_size:,} embeddings: use the vocabulary of this model."
        )
    return vocabulary


def parse_sentencepiece(vocabulary, path="spiece.model"):
    """Return the ModelProto of a serialized SentencePiece model.

    path: the path of the model, for messages.
    """
    proto = sentencepiece_model_pb2.ModelProto()
    with explain_errors(path, "a SentencePiece model"):
        proto.ParseFromString(vocabulary)
        proto.pieces[0]  # raises an IndexError if the model is empty
    return proto


# WHITE_SPACE: the characters at which the pre-tokenizer WhitespaceSplit splits a text.
# The converted SentencePiece model replaces each of these characters by a space.
WHITE_SPACE = (
    "\t\n\v\f\r\x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009"
    "\u200a\u2028\u2029\u202f\u205f\u3000"
)
# SUPPORTED_PARTS: the parts of a tokenizer.json that a SentencePiece model can express.
# Each value is the type of a part, with its pattern if the part has one. The parts
# "Replace" merge or strip spaces, which SentencePiece always does.
SUPPORTED_PARTS = {
    "Unigram",
    "Precompiled",
    "Strip",
    "Metaspace",
    "WhitespaceSplit",
    "Replace{'Regex': ' {2,}'}",
    "Replace{'Regex': '[ \u2581]{2,}'}",
    "Replace{'Regex': '[ \u2581]+$'}",
}


def tokenizer_json_to_sentencepiece(path):
    """Return a SentencePiece ModelProto that tokenizes like a tokenizer.json.

    The ids differ only for two kinds of texts. The first kind contains "</s>", "<pad>" or
    "<unk>". The second kind ends with a white-space character that is not a space. Raises
    a UserError if a SentencePiece unigram model cannot do what tokenizer.json does.
    """
    tokenizer = configs.read_json(path, {"model": {"vocab": list, "type?": str}})
    unigram = tokenizer["model"]
    parts = [{"type": unigram.get("type", "Unigram")}]
    for key, inside in ("normalizer", "normalizers"), ("pre_tokenizer", "pretokenizers"):
        part = tokenizer.get(key) or {inside: []}
        parts += part.get(inside, [part])
    used = {part["type"] + str(part.get("pattern", "")) for part in parts}
    if unigram.get("byte_fallback"):
        used.add("byte_fallback")
    if "Metaspace" not in used:
        used.add("no Metaspace")
    if unsupported := used - SUPPORTED_PARTS:
        raise UserError(
            f"{path} has {', '.join(sorted(unsupported)):.200}, which a SentencePiece "
            f"unigram model does not support: add the spiece.model of this model."
        )
    vocab = unigram["vocab"]
    normal = [entry for entry in vocab if "<extra_id_" not in entry[0]]
    sentinels = len(vocab) - len(normal)
    proto = sentencepiece_model_pb2.ModelProto()
    types = {0: "CONTROL", 1: "CONTROL", unigram["unk_id"]: "UNKNOWN"}
    for number, (piece, score) in enumerate(normal):
        proto.pieces.add(piece=piece, score=score, type=types.get(number, "NORMAL"))
    data.add_sentinels(proto, sentinels)
    for piece, (expected, _) in zip(proto.pieces, vocab):
        # Some files write a sentinel without the space before the sentinel.
        if piece.piece.removeprefix("\u2581") != expected.removeprefix("\u2581"):
            raise UserError(
                f"The sentinels in {path} do not count down to <extra_id_0>, the last "
                f"piece: add the spiece.model of this model."
            )
    # SentencePiece replaces each key of norm_map by its value before it splits a text.
    norm_map = {}
    if "WhitespaceSplit" in used:
        norm_map |= dict.fromkeys(WHITE_SPACE, " ")
    for part in parts:
        if part["type"] == "Precompiled":
            charsmap = base64.b64decode(part["precompiled_charsmap"])
            spec = sentencepiece_model_pb2.NormalizerSpec(precompiled_charsmap=charsmap)
            normalizer = sentencepiece.SentencePieceNormalizer(normalizer_spec=spec)
            norm_map |= normalizer.decompile()
    # Metaspace puts a space before the text that follows a sentinel, unless its
    # prepend_scheme is "first".
    space = "" if "first" in str(tokenizer["pre_tokenizer"]) else " "
    for k in range(sentinels):
        norm_map[f"<extra_id_{k}>"] = f" <extra_id_{k}>{space}"
    if norm_map:
        rules = sentencepiece.SentencePieceNormalizer(norm_map=list(norm_map.items()))
        proto.normalizer_spec.MergeFromString(rules.serialized_normalizer_spec())
    return proto


# ---- reading Hugging Face --------------------------------------------------------------


def read_safetensors(file):
    """Return {name: Tensor} of a safetensors file."""
    tensors = {}
    with explain_errors(file, "a complete safetensors file"):
        opened = safetensors.safe_open(file, "numpy")
        for name in opened.keys():
            tensor = opened.get_slice(name)
            if tensor.get_dtype() not in ("F64", "F32", "F16", "BF16"):
                raise UserError(
                    f"{file} is quantized: {name} has type {tensor.get_dtype()}. Convert "
                    f"the original model, whose weights are floating point numbers."
                )
            read = functools.partial(opened.get_tensor, name)
            tensors[name] = Tensor(tuple(tensor.get_shape()), read)
    return tensors


def read_pickle(file):
    """Return {name: Tensor} of a pytorch_model.bin. This function needs torch."""
    with explain_errors(file):
        import torch

        # Files of torch before 1.6 are not zip archives and cannot be memory-mapped.
        mmap = zipfile.is_zipfile(file)
        arrays = torch.load(file, "cpu", weights_only=True, mmap=mmap)
    tensors = {}
    for name, array in arrays.items():
        tensors[name] = Tensor(
            tuple(array.shape), lambda array=array: array.float().numpy()
        )
    return tensors


def restore_msgpack(file):
    """Return the nested dict in a msgpack file that Flax wrote."""
    with explain_errors(file, "a complete msgpack file"):
        return flax.serialization.msgpack_restore(file.read_bytes())


def pytorch_name(name):
    """Return the name in PyTorch of an array that has the name `name` in Flax or PyTorch.

    Flax writes "lm_head/kernel" where PyTorch writes "lm_head.weight".
    """
    return name.replace("/", ".").rsplit(".", 1)[0] + ".weight"


def read_flax(file):
    """Return {name: Tensor} of a flax_model.msgpack, with names and shapes of PyTorch.

    A kernel is the transpose of PyTorch's matrix. Flax reads the complete file at once,
    which needs twice the size of the file in memory.
    """
    tensors = {}
    for name, array in partition.flatten(restore_msgpack(file)).items():
        if name.endswith("kernel"):
            array = array.T
        tensors[pytorch_name(name)] = in_memory(array)
    return tensors


# HF_READERS maps the name of a weight file to the function that reads such a file.
HF_READERS = {
    "model.safetensors": read_safetensors,
    "flax_model.msgpack": read_flax,
    "pytorch_model.bin": read_pickle,
}


def find_hf_weights(folder):
    """Return the name of the weight file in a Hugging Face directory, or None.

    A large model is stored in several files, which NAME.index.json lists.
    """
    for name in HF_READERS:
        if (folder / name).exists() or (folder / f"{name}.index.json").exists():
            return name
    return None


def read_hf(folder):
    """Return {name: Tensor} of the weights in a Hugging Face directory.

    Raises a UserError if the index lists an array that no file contains.
    """
    name = find_hf_weights(folder)
    weight_map = {}
    files = {name}
    if not (folder / name).exists():
        form = {"weight_map": {str: str}}
        weight_map = configs.read_json(folder / f"{name}.index.json", form)["weight_map"]
        files = {Path(file).name for file in weight_map.values()}
    tensors = {}
    for file in sorted(files):
        tensors |= HF_READERS[name](folder / file)
    # Without this check, a model that lacks its output layer could pass for a tied model.
    if missing := set(map(pytorch_name, weight_map)) - tensors.keys():
        raise UserError(
            f"{folder} has no {', '.join(sorted(missing)):.200}, which its index lists: "
            f"download the missing file again."
        )
    return tensors


# HF_FIELDS maps each field of config.json to the field of ModelConfig with equal values.
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
# HF_TYPES: the types of the fields whose values convert.py takes from config.json. Most
# other fields are compared with the weights.
HF_TYPES = {
    "model_type?": str,
    "feed_forward_proj?": str,
    "tie_word_embeddings?": bool,
    "scale_decoder_outputs?": bool,
    "dropout_rate?": (int, float),
    "relative_attention_max_distance?": int,
}
# SPECIAL_TOKENS: the fields of config.json that state the special token ids of T5.
SPECIAL_TOKENS = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}


def hf_config(cfg):
    """Return the fields of a config.json that the ModelConfig `cfg` determines."""
    fields = {name: getattr(cfg, own_name) for name, own_name in HF_FIELDS.items()}
    fields["feed_forward_proj"] = cfg.activation.replace("_", "-")
    fields["layer_norm_epsilon"] = 1e-6
    return fields | SPECIAL_TOKENS


def open_hf(folder):
    """Return the Weights of a Hugging Face directory.

    Raises a UserError if the directory is damaged or contains an unsupported model.
    """

    def read_optional(name):
        """Return the dict in a JSON file, or an empty dict if there is no such file."""
        path = folder / name
        return configs.read_json(path, dict) if path.exists() else {}

    config = configs.read_json(folder / "config.json", HF_TYPES)
    generation = read_optional("generation_config.json")
    tokenizer = read_optional("tokenizer_config.json")
    model_type = config.get("model_type", "t5")
    if model_type not in ("t5", "mt5", "umt5"):
        raise UserError(
            f"{folder} has a model of type {model_type}: convert.py reads the types t5, "
            f"mt5 and umt5."
        )
    tensors = unify_embeddings(read_hf(folder), config, folder)
    cfg = model_from_shapes(tensors, HF, folder)
    cfg = apply_hf_config(cfg, config, generation, folder)
    if "ByT5" in str(tokenizer.get("tokenizer_class")):
        vocabulary = b"bytes:0\n"
    else:
        sentinels = tokenizer.get("extra_ids") or data.SENTINELS
        vocabulary = read_vocabulary([folder], cfg, sentinels)
    return to_weights(tensors, HF, folder, cfg, vocabulary, model_type)


def unify_embeddings(tensors, config, folder):
    """Return tensors with one embedding, and an output layer unless the model is tied.

    A tied model of plain T5 has two properties: the output layer is the embedding, and
    the logits are scaled by d_model^-0.5. In Hugging Face the two properties are
    independent. The arrays determine the first property, and config.json determines the
    second. If a model has only one of the properties, the converted model gets a separate
    output layer, which gives the same logits.
    """
    embed, head = "shared.weight", "lm_head.weight"
    copies = ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"]
    tables = [tensors[name] for name in (embed, *copies) if name in tensors]
    if not tables:
        raise UserError(
            f"{folder} has no {embed}: download the complete directory of a T5 model."
        )
    embedding = tables[0]

    def equals_embedding(tensor):
        """Return whether a Tensor has the values of the embedding."""
        return np.array_equal(tensor.read(), embedding.read(), equal_nan=True)

    if not all(map(equals_embedding, tables)):
        raise UserError(
            f"{folder} has several embeddings that differ: plain T5 converts models that "
            f"have one embedding."
        )
    head_tensor = tensors.get(head, embedding)
    shared = equals_embedding(head_tensor)
    tied = config.get("tie_word_embeddings", shared)
    # By default transformers scales the logits of a tied model, except for mT5.
    scaled = tied and config.get("model_type") != "mt5"
    scaled = config.get("scale_decoder_outputs", scaled)
    if not any(name.startswith(("decoder", head)) for name in tensors):
        scaled = True  # An encoder without a decoder has no logits.
    elif not (head in tensors or tied or "scale_decoder_outputs" in config):
        raise UserError(
            f"{folder} has no {head}, although its config.json says that the model is "
            f"not tied: download the model again."
        )
    # The published files of T5 1.0 contain this array, but no code uses it.
    unused = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    tensors = {k: v for k, v in tensors.items() if k not in (head, *copies, unused)}
    tensors[embed] = embedding
    if not (shared and scaled):
        scale = np.float32(embedding.shape[1] ** -0.5 if scaled else 1)
        tensors[head] = Tensor(head_tensor.shape, lambda: scale * head_tensor.read())
    return tensors


def apply_hf_config(cfg, config, generation, folder):
    """Return the ModelConfig `cfg` with the values that only config.json determines.

    config, generation: the contents of config.json and generation_config.json. Raises a
    UserError if one of the files contradicts the weights, or contains a value that plain
    T5 does not support.
    """
    config = {
        "num_decoder_layers": config.get("num_layers"),
        "feed_forward_proj": "relu",
        "dropout_rate": 0.1,
        "relative_attention_max_distance": 128,
        **config,
    }
    # The config.json of an encoder describes a decoder that has no weights.
    if not cfg.num_decoder_layers:
        del config["num_decoder_layers"]
    # The shapes of the weights do not distinguish gated GELU from gated SiLU.
    silu = cfg.activation == "gated_gelu" and config["feed_forward_proj"] == "gated-silu"
    cfg = replace(
        cfg,
        activation="gated_silu" if silu else cfg.activation,
        dropout=config["dropout_rate"],
        relative_max_distance=config["relative_attention_max_distance"],
    )
    for name, value in hf_config(cfg).items():
        for found in (config.get(name), generation.get(name)):
            if found not in (None, value, [value]):
                raise UserError(
                    f"The configuration in {folder} says {name} {found}, but plain T5 "
                    f"needs {value} to use these weights: download the model again, or "
                    f"run it with transformers."
                )
    return cfg


# ---- reading T5X and Mesh TensorFlow ---------------------------------------------------


def read_t5x(folder):
    """Return {name: Tensor} of a T5X checkpoint.

    The msgpack file contains the small arrays. For each large array, the msgpack file
    contains a TensorStore specification with the path of a zarr array. Source:
    t5x/checkpoints.py.
    """
    path = folder / "checkpoint"
    tree = restore_msgpack(path)
    version = tree["version"]
    if version != 3:
        raise UserError(
            f"{path} is a T5X checkpoint of version {version}, but plain T5 reads "
            f"version 3: load and save it with a newer T5X."
        )
    leaves = flax.traverse_util.flatten_dict(
        tree["optimizer"], is_leaf=lambda _, value: "driver" in value, sep="/"
    )
    tensors = {}
    for name, leaf in leaves.items():
        if isinstance(leaf, dict):
            # TensorStore writes the path inside "kvstore". Versions before 0.1.14 wrote
            # the path beside "kvstore".
            relative_path = {**leaf, **leaf["kvstore"]}["path"]
            kvstore = {"driver": "file", "path": str(folder / relative_path)}
            # Without this option a missing file would be read as zeros.
            tensors[name] = open_zarr(kvstore, fill_missing_data_reads=False)
        else:
            tensors[name] = in_memory(leaf)
    return tensors


def read_orbax(folder):
    """Return {name: Tensor} of a T5X checkpoint that the library Orbax wrote.

    Orbax stores the zarr arrays in OCDBT, a key-value database of TensorStore.
    """
    form = {"tree_metadata": {str: {"key_metadata": [{"key": str}]}}}
    metadata = configs.read_json(folder / "_METADATA", form)
    database = {"driver": "ocdbt", "base": f"file://{folder.resolve()}/"}
    tensors = {}
    for entry in metadata["tree_metadata"].values():
        keys = [part["key"] for part in entry["key_metadata"]]
        tensors["/".join(keys)] = open_zarr({**database, "path": ".".join(keys) + "/"})
    return tensors


def open_zarr(kvstore, **options):
    """Return a zarr array as a Tensor.

    kvstore: the location of the array, as a specification of TensorStore.
    """
    explain = explain_errors(kvstore["path"], "a complete array")
    spec = {"driver": "zarr", "kvstore": kvstore, **options}
    array = explain(lambda: tensorstore.open(spec, open=True).result())()
    return Tensor(array.shape, explain(lambda: array.read().result()))


# MTF_SLOTS maps the name of a slot of Adafactor in Mesh TensorFlow to the name in T5X.
MTF_SLOTS = {"v": "v", "vr": "v_row", "vc": "v_col", "m": "m"}


def read_mtf(prefix):
    """Return {name: Tensor} of a Mesh TensorFlow checkpoint.

    This function needs TensorFlow. Parameters get the names and shapes of Hugging Face:
    "encoder/block_000/layer_000/SelfAttention/q" becomes
    "encoder.block.0.layer.0.SelfAttention.q.weight". Optimizer slots and the step get the
    names of T5X. Source: t5x/checkpoint_importer.py.
    """
    from tensorflow.train import load_checkpoint

    reader = load_checkpoint(str(prefix))
    tensors = {}
    for variable, shape in reader.get_variable_to_shape_map().items():
        name, _, slot = variable.partition("_slot_")
        name = re.sub(r"/(embedding|kernel|scale)$", "", name)
        # Versions of Mesh TensorFlow differ in the names of the norms.
        name = name.replace("rms_norm", "layer_norm").replace("final_", "")
        name = re.sub(r"^(encoder|decoder)/layer_norm", r"\1/final_layer_norm", name)
        name = re.sub(r"(block|layer)_0*(\d+)", r"\1/\2", name)
        name = name.replace("decoder/logits", "lm_head").replace("/", ".") + ".weight"
        tensor = Tensor(tuple(shape), functools.partial(reader.get_tensor, variable))
        if slot:
            name = slot_name(name, MTF_SLOTS.get(slot, slot))
        elif variable == "global_step":
            name = STEP
        elif len(shape) == 2 and name != "shared.weight":
            # Mesh TensorFlow stores every matrix as a run does.
            tensor = tensor.transpose()
        tensors[name] = tensor
    return tensors


def open_google(source, tensors, form):
    """Return the Weights of a checkpoint of T5X or Mesh TensorFlow.

    source: the directory or prefix of the checkpoint. form: HF or T5X, the spelling of
    the names in `tensors`.
    """
    folders = [source]
    if source.name.startswith("checkpoint_") or not source.is_dir():
        folders.append(source.parent)
    cfg = model_from_shapes(tensors, form, source)
    cfg = replace(cfg, activation=gin_activation(folders) or cfg.activation)
    return to_weights(tensors, form, source, cfg, read_vocabulary(folders, cfg))


def gin_activation(folders):
    """Return the activation from the first Gin file in `folders`, or None.

    Gin files are the configuration files of T5X and Mesh TensorFlow. A Gin file states
    the activation, for instance gated GELU or gated SiLU. The shapes of the weights are
    equal for both.
    """
    names = ("config.gin", "operative_config.gin")
    paths = [folder / name for folder in folders for name in names]
    text = "".join(path.read_text() for path in paths if path.exists())
    pattern = r"(?:mlp_activations|DenseReluDense\.activation) *= *(.*)"
    found = re.search(pattern, text)
    if not found:
        return None
    # T5X names both branches of a gated MLP: ('gelu', 'linear').
    words = re.findall(r"\w+", found[1].replace("swish", "silu"))
    name = f"gated_{words[0]}" if "linear" in words else words[0]
    if name not in ("gated_gelu", "gated_silu", "relu"):
        raise UserError(
            f"A Gin file in {folders[0]} has the line `{found[0]}`: plain T5 converts "
            f"models with the activations gated GELU, gated SiLU and ReLU."
        )
    return name


# ---- reading a run, and finding the format ---------------------------------------------


def open_plain(checkpoint, run_dir):
    """Return the Weights of one checkpoint of a run.

    checkpoint: the folder of the checkpoint. run_dir: the directory of the run, which
    contains the configuration and the vocabulary.
    """
    manifest = partition.read_manifest(checkpoint)
    stored, cfg = manifest["arrays"], configs.load_run(run_dir)
    shapes = {name: tuple(array["shape"]) for name, array in stored.items()}
    params = partition.flatten({"params": model.param_table(cfg.model)})
    check_shapes(checkpoint, {name: params[name].shape for name in params}, shapes)
    # The verified shards of each array. The shards are memory-mapped, so that a cached
    # shard takes no memory.
    verified = {name: {} for name in stored}

    @explain_errors(checkpoint)
    def read_layer(name, layer):
        """Return one layer of an array, or the complete array if the layer is None."""
        index = [slice(None)] * len(shapes[name])
        if layer is not None:
            index[0] = slice(layer, layer + 1)
        array = partition.read_slice(checkpoint, stored[name], index, verified[name])
        return array if layer is None else array[0]

    arrays = {}
    for name, array_shape in shapes.items():
        layers, shape = split_layers(name, array_shape)
        for layer in layers:
            read = functools.partial(read_layer, name, layer)
            arrays[name, layer] = Tensor(shape, read)
    files = [run_dir / "spiece.model", run_dir / "recipe.py"]
    contents = [file.read_bytes() if file.exists() else None for file in files]
    return Weights(cfg, manifest["step"], arrays, *contents)


def find_checkpoints(folder):
    """Return a dict {step: path} of the checkpoints of a run or of a T5X run."""
    run = partition.Checkpoints(folder)
    checkpoints = {step: run.path(step) for step in run.steps()}
    for path in folder.glob("checkpoint_*"):
        step = path.name.removeprefix("checkpoint_")
        if step.isdecimal():
            checkpoints[int(step)] = path
    return checkpoints


def open_any(source, step=None):
    """Return the Weights of a model. The names of the files determine the format.

    source: the path of the model. step: the step of the checkpoint to read, or None for
    the newest checkpoint. Raises a UserError that names `source` if the model cannot be
    read.
    """
    path = Path(source)
    with explain_errors(source):
        checkpoints = find_checkpoints(path)
        if step is None and not find_hf_weights(path):
            step = max(checkpoints, default=None)
        if step is not None and step not in checkpoints:
            raise UserError(
                f"{source} has no step {step:,}: leave out --step, or choose one of "
                f"{sorted(checkpoints)}."
            )
        path = checkpoints.get(step, path)
        if (path / "manifest.json").exists():
            return open_plain(path, path.resolve().parent.parent)
        if find_hf_weights(path):
            return open_hf(path)
        if Path(f"{path}.index").exists():
            return open_google(path, read_mtf(path), HF)
        for folder in (path / "state", path):
            if (folder / "_METADATA").exists():
                return open_google(path, read_orbax(folder), T5X)
        if (path / "checkpoint").is_file():
            return open_google(path, read_t5x(path), T5X)
    raise UserError(
        f"{source} is not a run directory, a Hugging Face directory with weights, or a "
        f"checkpoint of T5X or Mesh TensorFlow: check the name."
    )


# ---- writing a run ---------------------------------------------------------------------


def write_plain(folder, weights, dtype):
    """Write Weights as a run directory.

    dtype: ignored, because a run always stores float32. Each layer becomes one shard of
    the checkpoint. A shard can have at most 4 GiB.
    """
    arrays = {}
    for (name, layer), tensor in weights.arrays.items():
        # The last layer of a stacked array determines the number of layers.
        shape = tensor.shape if layer is None else (layer + 1, *tensor.shape)
        # A scalar counts steps or updates. All other arrays are weights.
        arrays[name] = {"shape": shape, "dtype": "float32" if shape else "int32"}

    def shards():
        """Yield (our name, [[start, stop] of each axis], values) of every layer."""
        for (name, layer), tensor in weights.arrays.items():
            shard = np.asarray(tensor.read(), arrays[name]["dtype"], order="C")
            bounds = [[0, size] for size in shard.shape]
            if layer is not None:
                bounds.insert(0, [layer, layer + 1])
            yield name, bounds, shard

    path = partition.Checkpoints(folder).path(weights.step)
    partition.write_checkpoint(path, arrays, shards(), weights.step)
    configs.save_run(weights.cfg, folder)
    if weights.recipe:
        configs.write_file(folder / "recipe.py", weights.recipe)


# ---- writing Hugging Face --------------------------------------------------------------

# The largest size of a safetensors file in bytes. A larger model is written as several
# files.
SHARD_BYTES = 5_000_000_000


def write_hf(folder, weights, dtype):
    """Write Weights as a Hugging Face directory.

    dtype: the NumPy type of the written weights.
    """
    write_safetensors(folder, weights, dtype)
    cfg = weights.cfg.model
    is_mt5 = weights.cfg.name.startswith("mt5") or cfg.vocab_size == 250112
    family = "t5"
    if cfg.layer_biases:
        family = "umt5"
    # transformers 5 does not scale the logits of MT5, so a tied model is written as T5.
    elif is_mt5 and not cfg.tied:
        family = "mt5"
    if family == "umt5" and not cfg.tied:
        note(
            "transformers 5 scales the logits of UMT5 by d_model^-0.5, as if the model "
            "were tied. Greedy outputs are equal, but beam search and scores differ. "
            "transformers 4.57 is exact."
        )
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
    }
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", SPECIAL_TOKENS)
    write_tokenizer(folder, weights.vocabulary, cfg)


def write_safetensors(folder, weights, dtype):
    """Write the parameters as safetensors files.

    A small model is one file. A large model is several files with an index. dtype: the
    NumPy type of the written parameters.
    """
    # With this initial size, the first parameter starts the first file.
    files, total_size, file_size = [], 0, math.inf
    for entry in parameter_entries(weights.cfg.model, HF):
        size = math.prod(entry.shape) * dtype.itemsize
        if file_size + size > SHARD_BYTES:
            files.append([])
            file_size = 0
        files[-1].append(entry)
        file_size += size
        total_size += size
    weight_map = {}
    for number, entries in enumerate(files, 1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors"
        if len(files) == 1:
            name = "model.safetensors"
        arrays = {}
        for entry in entries:
            tensor = weights.arrays[entry.name, entry.layer]
            if entry.transposed:
                tensor = tensor.transpose()
            arrays[entry.external_name] = np.ascontiguousarray(tensor.read(), dtype)
        safetensors.numpy.save_file(arrays, folder / name, {"format": "pt"})
        weight_map |= dict.fromkeys(arrays, name)
    if len(files) > 1:
        index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
        write_json(folder / "model.safetensors.index.json", index)


def write_json(path, value):
    """Write a value as an indented JSON file."""
    path.write_text(json.dumps(value, indent=2) + "\n")


def write_tokenizer(folder, vocabulary, cfg):
    """Write the tokenizer of a Hugging Face directory.

    A SentencePiece model is written as spiece.model, and as a tokenizer.json that gives
    the same ids. A note names the texts for which the ids differ.
    """
    if vocabulary is None or vocabulary.startswith(b"ids:"):
        return  # Such a model is used with token ids only.
    config = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    if vocabulary.startswith(b"bytes"):
        config["tokenizer_class"] = "ByT5Tokenizer"
        config["extra_ids"] = max(0, cfg.vocab_size - 259)
        note("warning: Hugging Face's ByT5Tokenizer gives different ids to sentinels.")
    else:
        trainer_spec = parse_sentencepiece(vocabulary).trainer_spec
        if trainer_spec.model_type != trainer_spec.UNIGRAM:
            raise UserError(
                "The vocabulary is not a unigram model, and Hugging Face's T5Tokenizer "
                "would split nearly all texts differently. To write the weights alone, "
                "move spiece.model out of the run."
            )
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        (folder / "spiece.model").write_bytes(vocabulary)
        write_json(folder / "tokenizer.json", tokenizer_json(vocabulary))
        note(
            "The tokenizer of transformers gives the same ids, with two exceptions: a "
            "sentinel that has no space before it (plain T5 reads it as text), and </s>, "
            "<pad> or <unk> spelled out in a text."
        )
    write_json(folder / "tokenizer_config.json", config)


# TOKENIZER_JSON: the parts of tokenizer.json that are equal for all vocabularies. The two
# steps "Replace" strip spaces at the end of a text and merge adjacent spaces, as
# SentencePiece does. The step "Metaspace" replaces each space by "\u2581".
TOKENIZER_JSON = r"""
{
  "version": "1.0",
  "truncation": null,
  "padding": null,
  "normalizer": {
    "type": "Sequence",
    "normalizers": [
      {"type": "Replace", "pattern": {"Regex": "[ \u2581]+$"}, "content": ""},
      {"type": "Replace", "pattern": {"Regex": "[ \u2581]{2,}"}, "content": " "}
    ]
  },
  "pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581", "split": true},
  "post_processor": {
    "type": "TemplateProcessing",
    "pair": [],
    "single": [
      {"Sequence": {"id": "A", "type_id": 0}},
      {"SpecialToken": {"id": "</s>", "type_id": 0}}
    ],
    "special_tokens": {"</s>": {"id": "</s>", "ids": [1], "tokens": ["</s>"]}}
  },
  "model": {"type": "Unigram", "unk_id": 2, "vocab": []},
  "added_tokens": []
}
"""
# TOKEN_FLAGS: the fields of tokenizer.json that are equal for all special tokens.
TOKEN_FLAGS = {
    "single_word": False,
    "rstrip": False,
    "normalized": False,
    "special": True,
}


def tokenizer_json(vocabulary):
    """Return the content of a tokenizer.json, which the library tokenizers reads.

    vocabulary: a serialized SentencePiece unigram model.
    """
    processor = data.parse_vocabulary(vocabulary).processor
    # If a vocabulary has no sentinels, data.parse_vocabulary has added 100 sentinels.
    proto = parse_sentencepiece(processor.serialized_model_proto())
    content = json.loads(TOKENIZER_JSON)
    for number, piece in enumerate(proto.pieces):
        text = piece.piece.replace("\u2581<extra_id_", "<extra_id_")
        content["model"]["vocab"].append([text, piece.score])
        if number < 3 or "<extra_id_" in text:
            # With lstrip, the token of a sentinel includes the space before the sentinel.
            token = {"id": number, "content": text, "lstrip": number > 2, **TOKEN_FLAGS}
            content["added_tokens"].append(token)
    content["model"]["byte_fallback"] = proto.trainer_spec.byte_fallback
    # SentencePiece may put a space before the text that follows a sentinel. Metaspace
    # does so if its prepend_scheme is "always".
    after_sentinel = processor.encode("<extra_id_0>,", out_type=str)[1]
    prepend_scheme = "always" if after_sentinel.startswith("\u2581") else "first"
    content["pre_tokenizer"]["prepend_scheme"] = prepend_scheme
    content["decoder"] = content["pre_tokenizer"]
    if charsmap := proto.normalizer_spec.precompiled_charsmap:
        charsmap = base64.b64encode(charsmap).decode()
        normalizer = {"type": "Precompiled", "precompiled_charsmap": charsmap}
        content["normalizer"]["normalizers"].insert(0, normalizer)
    return content


# ---- writing T5X -----------------------------------------------------------------------


def write_t5x(folder, weights, dtype):
    """Write Weights as a T5X checkpoint.

    The checkpoint consists of one msgpack file of version 3 and of zarr arrays. dtype:
    the NumPy type of the written weights. Optimizer slots are always float32.
    """
    if weights.cfg.model.layer_biases:
        raise UserError(
            "T5X has one table of position biases per stack, but this UMT5 has one table "
            "per layer: convert the model with --to hf."
        )
    entries = parameter_entries(weights.cfg.model, T5X)
    tree = {STEP: np.array(weights.step, np.int32)}
    factored = set()
    for name, _ in weights.arrays:
        if name.endswith("/row"):
            factored.add(name.replace("slots", "params", 1).removesuffix("/row"))
    slots = slot_entries(entries, factored)
    if all((slot.name, slot.layer) in weights.arrays for slot in slots):
        # T5X expects four slots per parameter. An unused slot is a single zero.
        for entry in entries:
            for slot in ("m", "v", "v_row", "v_col"):
                tree[slot_name(entry.external_name, slot)] = np.zeros(1, np.float32)
        entries += slots
    else:
        note(
            "The converted checkpoint has no Adafactor state. T5X can evaluate this "
            "checkpoint. To fine-tune the model in T5X, turn on fallback_to_scratch."
        )
    for entry in entries:
        array = weights.arrays[entry.name, entry.layer].read()
        # T5X stores the row and column means in the msgpack file.
        if entry.external_name.endswith(("v_row", "v_col")):
            tree[entry.external_name] = np.array(array)
        else:
            kind = dtype if entry.name.startswith("params/") else np.float32
            file = entry.external_name.replace("/", ".")
            tree[entry.external_name] = write_zarr(folder, file, np.asarray(array, kind))
    tree = flax.traverse_util.unflatten_dict(tree, sep="/")
    content = flax.serialization.msgpack_serialize({"version": 3, "optimizer": tree})
    configs.write_file(folder / "checkpoint", content)


def write_zarr(folder, name, array):
    """Write a zarr array, and return the specification for the msgpack file of T5X."""
    # As in T5X, a chunk has at most 64 MiB.
    chunk_rows = max(1, (1 << 26) // array[0].nbytes)
    metadata = {
        "shape": list(array.shape),
        "chunks": [min(len(array), chunk_rows), *array.shape[1:]],
        # T5X compresses the chunks with gzip. Compression would save 7 % of the size, but
        # writing would take ten times as long.
        "compressor": None,
    }
    spec = {"driver": "zarr", "dtype": array.dtype.name, "metadata": metadata}
    kvstore = {"driver": "file", "path": str(folder / name)}
    store = tensorstore.open({**spec, "kvstore": kvstore}, create=True).result()
    store.write(array).result()
    return {**spec, "kvstore": {"driver": "file", "path": f"{name}/"}}


# ---- the command -----------------------------------------------------------------------

# WRITERS maps each value of --to to the function that writes this format.
WRITERS = {"plain": write_plain, "hf": write_hf, "t5x": write_t5x}


@contextlib.contextmanager
def atomic_destination(destination):
    """Yield a temporary folder, and rename the folder to `destination` at the end.

    If an exception is raised, the temporary folder is removed, and `destination` is not
    created.
    """
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise UserError(
            f"{destination} already exists: name another DST, or move it away."
        )
    temporary = destination.with_name(f".{destination.name}.tmp{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        os.rename(temporary, destination)
        partition.sync_folder(destination.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def convert(source, destination, to, dtype, step=None, allow_pickle=False):
    """Convert a model to another format, and compare the result with the source.

    source: the path of the model. destination: the path of the new folder, which appears
    only after the comparison. to: a key of WRITERS. dtype: the NumPy type of the written
    parameters. step: the step of the checkpoint to read, or None for the newest
    checkpoint. allow_pickle: whether to read a pickle file.
    """
    start = time.perf_counter()
    if find_hf_weights(Path(source)) == "pytorch_model.bin" and not allow_pickle:
        raise UserError(
            f"{source} has a pickle file, pytorch_model.bin, which can run any program "
            f"when it is read: add --allow_pickle if you trust its origin."
        )
    with atomic_destination(destination) as folder:
        weights = open_any(source, step)
        params = model.count_params(model.param_table(weights.cfg.model))
        print(f"source   {source}: {params:,} parameters, step {weights.step:,}")
        print(f"writing  {destination}", flush=True)
        if weights.vocabulary is None:
            note(
                f"warning: {source} has no vocabulary. The converted model accepts only "
                f"token ids until you copy its spiece.model into {destination}."
            )
        try:
            WRITERS[to](folder, weights, dtype)
            if to != "hf" and weights.vocabulary:
                configs.write_file(folder / "spiece.model", weights.vocabulary)
        # A full disk is reported as an OSError, as a ValueError (by TensorStore) or as a
        # SafetensorError.
        except (OSError, ValueError, safetensors.SafetensorError) as error:
            raise OSError(errno.EIO, str(error)[:200], str(destination)) from error
        count = compare(weights, open_any(folder), dtype)
        print(f"compared {count:,} arrays with the source: all are equal in {dtype}")
    print(f"done     {destination}, in {time.perf_counter() - start:.2f} s", flush=True)


def compare(weights, written, dtype):
    """Compare two Weights, and return the number of compared arrays.

    weights: the source. written: the model that was written. dtype: the NumPy type of the
    written parameters. Raises an OSError if a written array differs from the array of the
    source after the rounding to dtype.
    """
    count = 0
    for (name, layer), tensor in written.arrays.items():
        # Scalars are not compared. A run counts steps and updates, and T5X counts steps.
        if not tensor.shape:
            continue
        kind = dtype if name.startswith("params/") else np.float32
        expected = np.asarray(weights.arrays[name, layer].read(), kind)
        if not np.array_equal(expected, tensor.read(), equal_nan=True):
            raise OSError(
                f"{name} was written, but different values were read back: the disk or "
                f"the memory is faulty. Nothing was kept."
            )
        count += 1
    return count


def main(argv):
    """Run the command. argv: the arguments of the command line."""
    args, changes = configs.parse_args(
        __doc__,
        argv,
        src_=dict(help="the model to convert"),
        dst_=dict(help="the folder to create"),
        to=dict(default="plain", choices=tuple(WRITERS), help="the format of DST"),
        dtype=dict(
            default="float32",
            choices=("float32", "bfloat16"),
            help="the type of the written weights",
        ),
        step=dict(
            default="latest",
            help="the checkpoint to convert: a step, latest or best",
        ),
        allow_pickle=dict(action="store_true", help="read pytorch_model.bin"),
    )
    if changes or args.config or args.run_dir:
        raise UserError(
            "convert.py reads the model's configuration from SRC: leave out --config, "
            "--run_dir and --SECTION.FIELD."
        )
    if configs.is_remote(args.src) or configs.is_remote(args.dst):
        raise UserError(
            f"convert.py cannot convert {args.src} to {args.dst}, because it reads and "
            f"writes local folders only: copy the remote folder first."
        )
    if args.to == "plain" and args.dtype != "float32":
        raise UserError(
            "A run keeps its weights in float32: leave out --dtype, or add --to hf."
        )
    convert(
        args.src,
        Path(os.path.abspath(args.dst)),
        args.to,
        np.dtype(jnp.dtype(args.dtype)),
        partition.resolve_step(args.src, args.step),
        args.allow_pickle,
    )


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    configs.run_command(main)
