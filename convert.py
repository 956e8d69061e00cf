"""Convert T5 weights between Hugging Face, T5X, Mesh TensorFlow and runs of plain T5.

SRC is a model in any of these formats. Its format and all dimensions are detected from its files.
DST is a new folder, which receives a run, a Hugging Face model or a T5X checkpoint. Values never
change, except that --dtype bfloat16 rounds the weights. DST appears only after everything
was read again and compared with SRC.

    python convert.py t5-v1_1-small/ runs/t5_1_1_small     import a model of any format as a run
    python convert.py runs/tiny tiny_hf --to hf            export to Hugging Face
    python convert.py runs/tiny checkpoint_1500 --to t5x   export to T5X

The formats hold the same arrays under different names, and some of the matrices transposed:

- Hugging Face (the library transformers): a directory with config.json and the weights in
  model.safetensors, flax_model.msgpack or pytorch_model.bin. PyTorch stores a matrix as
  [outputs, inputs]. Here a matrix is [inputs, outputs].
- T5X (Google's JAX code for T5): a directory checkpoint_N with a msgpack file and one zarr array
  per parameter, or a directory that the library Orbax wrote. Nothing is transposed.
- Mesh TensorFlow (the original code of T5): a TensorFlow checkpoint model.ckpt-N. Nothing is
  transposed.

In this file, *our name* is the name of an array in a run ("params/embed"), and the *external name*
is its name in one of the other formats. A *layer* is one layer of a stacked array.

Example:
>>> from convert import parameter_names
>>> hugging_face, t5x = parameter_names("encoder/layers/attention/query", 0, True)
>>> hugging_face
'encoder.block.0.layer.0.SelfAttention.q.weight'
>>> t5x
'encoder/layers_0/attention/query/kernel'
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

# ---- names ---------------------------------------------------------------------------------------
# The three tables below are the only place where names of parameters are translated. Each value is
# a pair: a part of the name in Hugging Face, and a part of the name in T5X.

# The sublayers of one layer. Hugging Face numbers the sublayers, T5X does not.
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
# The matrices of a sublayer. Without a gate, "up" is named "wi" in all other formats.
MATRICES = {
    "query": ("q", "query"),
    "key": ("k", "key"),
    "value": ("v", "value"),
    "out": ("o", "out"),
    "gate": ("wi_0", "wi_0"),
    "up": ("wi_1", "wi_1"),
    "down": ("wo", "wo"),
}
# The parameters that exist once in a model or once in a stack. Hugging Face stores the position
# biases of a stack in its first layer.
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

    path: the parameter's path in model.param_table. layer: the number of the layer, which is
    ignored for a parameter that is not stacked. gated: whether the MLP has a gate.
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
    if name == "relative_bias":  # UMT5 has position biases in every layer
        return (
            f"{hf_layer}.{hf_sublayer}.relative_attention_bias.weight",
            f"{t5x_layer}/relpos_bias/rel_embedding",
        )
    hf_matrix, t5x_matrix = MATRICES[name]
    if name == "up" and not gated:
        hf_matrix = t5x_matrix = "wi"
    return (
        f"{hf_layer}.{hf_sublayer}.{hf_matrix}.weight",
        f"{t5x_layer}/{t5x_sublayer}/{t5x_matrix}/kernel",
    )


class Format(NamedTuple):
    """The names and the matrices of one format.

    number: the position of the format's names in the pairs that parameter_names returns.
    transposes: whether the format stores the transposes of all matrices except the embedding.
    """

    number: int
    transposes: bool

    def name(self, path, layer, gated):
        """Return the external name of a parameter. See parameter_names for the arguments."""
        return parameter_names(path, layer, gated)[self.number]


# PyTorch stores the weight of a linear layer as [outputs, inputs] and the position biases as
# [buckets, heads]. We store [inputs, outputs] and [heads, buckets].
HF = Format(0, transposes=True)
# T5X stores every matrix as we do.
T5X = Format(1, transposes=False)
# Mesh TensorFlow stores every matrix as we do. Its names are those of Hugging Face in another
# spelling, and read_mtf changes the spelling.
MTF = Format(0, transposes=False)


# ---- arrays --------------------------------------------------------------------------------------


def is_stacked(name):
    """Tell whether the first axis of our array `name` counts layers."""
    return "layers" in name.split("/")


def layers_of(name, shape):
    """Return the layer numbers of our array `name`, or [None] if the array is not stacked."""
    return range(shape[0]) if is_stacked(name) else [None]


class Entry(NamedTuple):
    """One external array, and the array of ours (or the layer of an array) that it holds.

    A run keeps the layers of a stack in one array [layers, inputs, outputs]. The other
    formats keep one array per layer, so one stacked array has one entry per layer.
    """

    external_name: str
    name: str  # our name
    layer: int | None  # None if our array is not stacked
    shape: tuple  # the shape that we use, without the axis of the layers
    transposed: bool  # whether the external array is the transpose of ours

    def transpose(self, array):
        """Change an array from our shape to the external shape, or back."""
        return array.T if self.transposed else array


def parameter_entries(cfg, form):
    """List the entries of all parameters. cfg: ModelConfig. form: Format."""
    gated = cfg.activation.startswith("gated_")
    entries = []
    for path, param in partition.flatten(model.param_table(cfg)).items():
        shape = param.shape[1:] if is_stacked(path) else param.shape
        transposed = form.transposes and len(shape) == 2 and path != "embed"
        for layer in layers_of(path, param.shape):
            external_name = form.name(path, layer, gated)
            entry = Entry(external_name, f"params/{path}", layer, shape, transposed)
            entries.append(entry)
    return entries


STEP = "state/step"  # T5X's name of the number of training steps


def slot_name(parameter, slot):
    """Return T5X's name of an optimizer slot. parameter: T5X's name of the parameter."""
    return f"state/param_states/{parameter.removeprefix('target/')}/{slot}"


def slot_entries(parameters, factored):
    """List the entries of Adafactor's optimizer slots, with the names of T5X.

    parameters: the entries of the parameters. factored: our names of the parameters whose
    second-moment estimate is factored.

    For a factored matrix, Adafactor does not keep the running average V [rows, columns] of
    the squared gradients, but only the means of V over each axis. Our slot "row" [rows] is
    the mean over the columns, and our slot "column" [columns] is the mean over the rows.
    T5X names the two means by length: v_row has the length of the shorter axis. If a matrix
    has more rows than columns, our "row" is therefore T5X's v_col. If the axes are equally
    long, our "row" is T5X's v_row. For all other parameters, our slot "full" and T5X's slot v
    contain V itself. Source: t5x/adafactor.py.
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


def stacked_shapes(entries):
    """Return {our name: shape of the array that holds all layers}."""
    shapes = {}
    for entry in entries:
        shapes[entry.name] = entry.shape
        if entry.layer is not None:  # the last layer of an array determines its length
            shapes[entry.name] = (entry.layer + 1, *entry.shape)
    return shapes


class Tensor(NamedTuple):
    """An array of another format that is still on the disk. read() returns its values.

    A model of another format is a dict {external name: Tensor}, which is called `tensors`.
    """

    shape: tuple
    read: Callable


class Weights(NamedTuple):
    """A model on disk. Every reader returns Weights, and every writer takes Weights.

    Arrays are read one layer at a time, so a model may be larger than the memory. read(name, layer)
    returns our array `name`, or one layer of the array if it is stacked (else layer is None).
    """

    cfg: Config
    step: int
    shapes: dict  # {our name: shape} of the parameters, and of the optimizer slots if there are any
    read: Callable
    vocabulary: bytes | None  # the content of the run's spiece.model
    recipe: bytes | None = None  # the content of the run's recipe.py


def in_memory(array):
    """Return an array as a Tensor."""
    return Tensor(np.shape(array), lambda: np.asarray(array))


def name_some(names):
    """Return "NAME" or "NAME and 3 more" for use in a message."""
    first, *others = sorted(names)
    return f"{first} and {len(others):,} more" if others else first


# ====== below: readers, writers, the command ======================================================


@contextlib.contextmanager
def explain_errors(path, kind="in the format that its name and folder suggest"):
    """Turn the exceptions of a library that reads `path` into a UserError that names `path`."""
    try:
        yield
    except ImportError as error:
        raise UserError(
            f"Reading {path} needs a missing package ({error}): install it with pip."
        ) from error
    except partition.CheckpointError as error:
        raise UserError(f"{error}: choose another checkpoint with --step.") from error
    except UserError:
        raise
    except Exception as error:  # every library has its own classes of exceptions
        if getattr(error, "filename", None):  # an OSError, which names the file by itself
            raise
        reason = f"{type(error).__name__}: {' '.join(str(error).split()):.200}"
        raise UserError(
            f"{path} is damaged or is not {kind} ({reason}). Download it again."
        ) from error


def model_from_shapes(tensors, form, source):
    """Return the ModelConfig of a model in another format, as far as shapes determine it.

    Raises a UserError if the arrays are not those of a T5 model. source: used in messages.
    """
    gated = form.name("encoder/layers/mlp/gate", 0, True) in tensors

    def shape(path):
        name = form.name(path, 0, gated)
        if name not in tensors or len(tensors[name].shape) != 2:
            raise UserError(
                f"{source} has no matrix {name}: download the complete checkpoint of a T5 "
                f"model."
            )
        transposed = form.transposes and path != "embed"
        return tensors[name].shape[::-1] if transposed else tensors[name].shape

    def count_layers(stack):
        pattern = rf"{stack}[./](?:block\.|layers_)(\d{{1,3}})\D"
        numbers = re.findall(pattern, " ".join(tensors))
        return max(map(int, numbers), default=-1) + 1

    num_layers, num_decoder_layers = count_layers("encoder"), count_layers("decoder")
    tied = form.name("unembed", 0, gated) not in tensors
    if not num_layers or not num_decoder_layers and not tied:
        raise UserError(
            f"{source} has {num_layers} encoder layers, {num_decoder_layers} decoder layers "
            f"and {'no' if tied else 'an'} output layer: plain T5 converts complete "
            f"encoder-decoders, and encoders without an output layer."
        )
    num_heads, relative_buckets = shape("encoder/relative_bias")
    vocab_size, d_model = shape("embed")
    width = shape("encoder/layers/attention/query")[1]
    if width % num_heads:
        raise UserError(
            f"{source} is not a T5 checkpoint: its attention width {width} is not "
            f"divisible by its {num_heads} heads."
        )
    bias_of_layer_1 = form.name("encoder/layers/attention/relative_bias", 1, gated)
    return ModelConfig(
        vocab_size=vocab_size,
        d_model=d_model,
        d_ff=shape("encoder/layers/mlp/up")[1],
        d_kv=width // num_heads,
        num_heads=num_heads,
        num_layers=num_layers,
        num_decoder_layers=num_decoder_layers,
        relative_buckets=relative_buckets,
        layer_biases=bias_of_layer_1 in tensors,
        activation="gated_gelu" if gated else "relu",
        tied=tied,
    )


def adafactor_entries(tensors, optimizer, parameters):
    """List the entries of Adafactor's slots, or return [] if the optimizer was another one.

    optimizer: the names of all arrays that belong to the optimizer.
    """

    def is_used(name):
        # T5X stores an array with a single zero for a slot that a parameter does not use.
        return name in tensors and math.prod(tensors[name].shape) > 1

    names = {slot_name(entry.external_name, "v_row"): entry.name for entry in parameters}
    factored = {names[name] for name in names if is_used(name)}
    slots = slot_entries(parameters, factored)
    missing = optimizer.symmetric_difference(slot.external_name for slot in slots)
    if any(name not in tensors or is_used(name) for name in missing):
        return []  # the other arrays are, for instance, the momentum of another optimizer
    for slot in slots:
        if tensors[slot.external_name].shape != slot.shape:
            return []
    return slots


def to_weights(tensors, form, source, cfg, vocabulary, name="t5"):
    """Return the Weights of a model in another format.

    cfg: the ModelConfig, which determines the arrays and shapes that `tensors` must have.
    Raises a UserError if an array is missing, has another shape or is unknown.
    """
    entries = parameter_entries(cfg, form)
    names = {entry.external_name for entry in entries}
    optimizer = {name for name in tensors if name.startswith("state/")}
    if missing := names - tensors.keys():
        raise UserError(
            f"{source} is incomplete: it has no {name_some(missing)}. Download it again."
        )
    if unknown := tensors.keys() - names - optimizer:
        raise UserError(
            f"{source} has {name_some(unknown)}, which no T5 model has: plain T5 "
            f"converts T5 1.0, T5 1.1, mT5, UMT5, ByT5 and models derived from them."
        )
    for entry in entries:
        found = tensors[entry.external_name].shape
        shape = entry.shape[::-1] if entry.transposed else entry.shape
        if found != shape:
            raise UserError(
                f"{source} is inconsistent: {entry.external_name} has shape {list(found)}, "
                f"but the other arrays require {list(shape)}. Download it again."
            )
    step, counters = 0, {}
    if STEP in optimizer:
        optimizer.remove(STEP)
        step = int(tensors[STEP].read())
    if optimizer:
        slots = adafactor_entries(tensors, optimizer, entries)
        entries += slots
        if slots:
            # T5X counts only steps. A run also counts the updates and the skipped updates.
            counters = {"step": step, "count": step, "skipped": 0}
        else:
            note(
                f"Only the parameters of {source} are converted, because its optimizer is "
                f"not Adafactor without momentum."
            )
    by_name = {(entry.name, entry.layer): entry for entry in entries}

    def read(name, layer):
        if name in counters:
            return np.array(counters[name])
        entry = by_name[name, layer]
        return entry.transpose(tensors[entry.external_name].read())

    is_bytes = vocabulary is not None and vocabulary.startswith(b"bytes")
    data_config = DataConfig("python:", vocab="bytes" if is_bytes else "spiece.model")
    run = Config(name, cfg, data_config, TrainConfig(steps=max(step, 1)))
    try:
        configs.check(run)
    except UserError as error:
        raise UserError(f"{source} cannot be converted: {error}") from error
    shapes = stacked_shapes(entries) | dict.fromkeys(counters, ())
    return Weights(run, step, shapes, read, vocabulary)


# ---- vocabularies --------------------------------------------------------------------------------


def read_vocabulary(folders, cfg, sentinels=data.SENTINELS):
    """Return the vocabulary from the first of `folders` that has one, or None.

    The result is a serialized SentencePiece model, or "bytes:0" for ByT5, which has no file.
    spiece.model takes precedence over tokenizer.json. sentinels: the number of sentinels to add
    if the file has none.
    """
    names = ("spiece.model", "tokenizer.json")
    paths = [folder / name for name in names for folder in folders]
    paths = [path for path in paths if path.is_file()]
    if not paths:
        return b"bytes:0\n" if cfg.vocab_size == 384 else None
    path = paths[0]
    if path.suffix == ".json":
        vocabulary = tokenizer_json_to_sentencepiece(path).SerializeToString()
    else:
        vocabulary = path.read_bytes()
        if vocabulary.startswith((b"bytes", b"ids:")):  # the vocabulary of a run
            return vocabulary
    proto = parse_sentencepiece(vocabulary, path)
    if sentinels != data.SENTINELS and "<extra_id_" not in proto.pieces[-1].piece:
        data.add_sentinels(proto, sentinels)
        vocabulary = proto.SerializeToString()
    if len(proto.pieces) > cfg.vocab_size:
        raise UserError(
            f"{path} has {len(proto.pieces):,} pieces, but the model has only "
            f"{cfg.vocab_size:,} embeddings: bring the vocabulary of this model."
        )
    return vocabulary


def parse_sentencepiece(vocabulary, path="spiece.model"):
    """Return the ModelProto of a serialized SentencePiece model. path: used in messages."""
    proto = sentencepiece_model_pb2.ModelProto()
    with explain_errors(path, "a SentencePiece model"):
        proto.ParseFromString(vocabulary)
        proto.pieces[0]  # raises an IndexError if the model is empty
    return proto


# The characters that the pre-tokenizer WhitespaceSplit treats as spaces.
WHITE_SPACE = (
    "\t\n\v\f\r\x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009"
    "\u200a\u2028\u2029\u202f\u205f\u3000"
)
# The regular expressions by which tokenizer.json files collapse and strip spaces. SentencePiece
# does so by default.
SPACE_PATTERNS = (" {2,}", "[ \u2581]{2,}", "[ \u2581]+$")
SUPPORTED_PARTS = {"Unigram", "Precompiled", "Strip", "Metaspace", "WhitespaceSplit"}


def tokenizer_json_to_sentencepiece(path):
    """Return a SentencePiece ModelProto that gives the same ids as a tokenizer.json.

    The ids differ only if "</s>", "<pad>" or "<unk>" is spelled out in a text, or if a text ends
    with white space other than a space. Raises a UserError if tokenizer.json does anything that a
    SentencePiece unigram model cannot do.
    """
    tokenizer = configs.read_json(path, {"model": {"vocab": list, "type?": str}})

    def parts(key, inside):
        """List the steps of a normalizer or pre-tokenizer, which may be a sequence of steps."""
        part = tokenizer.get(key) or {"type": "Sequence", inside: []}
        return part[inside] if part["type"] == "Sequence" else [part]

    unigram = tokenizer["model"]
    steps = parts("normalizer", "normalizers") + parts("pre_tokenizer", "pretokenizers")
    used = {unigram.get("type", "Unigram")}
    if unigram.get("byte_fallback"):
        used.add("byte_fallback")
    for step in steps:
        if step.get("pattern", {}).get("Regex") not in SPACE_PATTERNS:
            used.add(step["type"])
    if "Metaspace" not in used:
        used.add("no Metaspace")
    if unsupported := used - SUPPORTED_PARTS:
        raise UserError(
            f"{path} has {name_some(unsupported)}, which a SentencePiece unigram model "
            f"does not support: bring the model's spiece.model."
        )
    pieces = [piece.removeprefix("\u2581") for piece, _ in unigram["vocab"]]
    sentinels = sum("<extra_id_" in piece for piece in pieces)
    normal = len(pieces) - sentinels
    expected = [f"<extra_id_{k}>" for k in reversed(range(sentinels))]
    if pieces[normal:] != expected:
        raise UserError(
            f"The sentinels in {path} do not count down to <extra_id_0>, the last piece: "
            f"bring the model's spiece.model."
        )
    proto = sentencepiece_model_pb2.ModelProto()
    piece_type = proto.SentencePiece
    types = {0: piece_type.CONTROL, 1: piece_type.CONTROL}
    types[unigram["unk_id"]] = piece_type.UNKNOWN
    for number, (piece, score) in enumerate(unigram["vocab"][:normal]):
        kind = types.get(number, piece_type.NORMAL)
        proto.pieces.add(piece=piece, score=score, type=kind)
    data.add_sentinels(proto, sentinels)
    trainer = proto.trainer_spec
    trainer.pad_id, trainer.eos_id, trainer.unk_id, trainer.bos_id = 0, 1, 2, -1
    # SentencePiece replaces each key of norm_map by its value before it splits a text.
    norm_map = {}
    if "WhitespaceSplit" in used:
        norm_map |= dict.fromkeys(WHITE_SPACE, " ")
    for step in steps:
        if step["type"] == "Precompiled":
            charsmap = base64.b64decode(step["precompiled_charsmap"])
            spec = sentencepiece_model_pb2.NormalizerSpec(precompiled_charsmap=charsmap)
            normalizer = sentencepiece.SentencePieceNormalizer(normalizer_spec=spec)
            norm_map |= normalizer.decompile()
    # Metaspace puts a space before the text that follows a sentinel, unless prepend_scheme is
    # "first".
    space = "" if "first" in str(tokenizer["pre_tokenizer"]) else " "
    for k in range(sentinels):
        norm_map[f"<extra_id_{k}>"] = f" <extra_id_{k}>{space}"
    if norm_map:
        rules = sentencepiece.SentencePieceNormalizer(norm_map=list(norm_map.items()))
        proto.normalizer_spec.MergeFromString(rules.serialized_normalizer_spec())
    return proto


# ---- reading Hugging Face ------------------------------------------------------------------------

WEIGHT_FILES = ("model.safetensors", "flax_model.msgpack", "pytorch_model.bin")
# The activations that are defined equally in all formats.
ACTIVATIONS = ("gated_gelu", "gated_silu", "relu")
# The dimensions whose names agree in ModelConfig and config.json.
DIMENSIONS = (
    "vocab_size",
    "d_model",
    "d_ff",
    "d_kv",
    "num_heads",
    "num_layers",
    "num_decoder_layers",
)
INTEGER_OR_NULL, NUMBER = (int, type(None)), (int, float)
# The types of the fields of config.json that are used here. All of them are optional.
HF_CONFIG = {
    "model_type?": str,
    "feed_forward_proj?": str,
    "tie_word_embeddings?": bool,
    "scale_decoder_outputs?": bool,
    "dropout_rate?": NUMBER,
    "layer_norm_epsilon?": NUMBER,
    "relative_attention_num_buckets?": INTEGER_OR_NULL,
    "relative_attention_max_distance?": int,
    **{f"{name}?": INTEGER_OR_NULL for name in DIMENSIONS},
}
SPECIAL_TOKENS = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}


def find_hf_weights(folder):
    """Return the name of the weight file in a Hugging Face directory, or None.

    A large model is stored in several files, which NAME.index.json lists.
    """
    for name in WEIGHT_FILES:
        if (folder / name).exists() or (folder / f"{name}.index.json").exists():
            return name
    return None


def read_hf(folder, name, allow_pickle):
    """Return {name: Tensor} of one weight file, or of all files that its index lists."""
    files = [folder / name]
    if not files[0].exists():
        path = folder / f"{name}.index.json"
        index = configs.read_json(path, {"weight_map": {str: str}})
        files = sorted(
            {folder / Path(file).name for file in index["weight_map"].values()}
        )
        if missing := {file.name for file in files if not file.exists()}:
            raise UserError(
                f"{folder} has no {name_some(missing)}, which {path.name} lists: download "
                f"the complete directory."
            )
    if name.endswith(".bin") and not allow_pickle:
        raise UserError(
            f"{files[0]} is a pickle file, which can run any program when it is read: add "
            f"--allow_pickle if you trust its origin."
        )
    readers = {".msgpack": read_flax, ".bin": read_pickle}
    read_file = readers.get(files[0].suffix, read_safetensors)
    tensors = {}
    for file in files:
        tensors |= read_file(file)
    return tensors


def read_safetensors(file):
    """Return {name: Tensor} of a safetensors file. The library checks the file's header."""
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
    """Return {name: Tensor} of a pytorch_model.bin. Needs torch."""
    with explain_errors(file):
        import torch

        # Files from torch before 1.6 are no zip archives and cannot be memory-mapped.
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


def read_flax(file):
    """Return {name: Tensor} of a flax_model.msgpack, with the names and matrices of PyTorch.

    Flax writes "lm_head/kernel" where PyTorch writes "lm_head.weight", and stores each kernel
    as the transpose of PyTorch's matrix. The file is read completely, so reading needs twice
    the file's size in memory for a moment.
    """
    tensors = {}
    for name, array in partition.flatten(restore_msgpack(file)).items():
        module, kind = name.replace("/", ".").rsplit(".", 1)
        tensors[f"{module}.weight"] = in_memory(array.T if kind == "kernel" else array)
    return tensors


def open_hf(folder, allow_pickle=False):
    """Return the Weights of a Hugging Face directory."""

    def read_optional(name):
        path = folder / name
        return configs.read_json(path, dict) if path.exists() else {}

    config = configs.read_json(folder / "config.json", HF_CONFIG)
    generation = read_optional("generation_config.json")
    tokenizer = read_optional("tokenizer_config.json")
    model_type = config.get("model_type", "t5")
    if model_type not in ("t5", "mt5", "umt5"):
        raise UserError(
            f"{folder} has a model of type {model_type}: convert.py reads the types t5, "
            f"mt5 and umt5."
        )
    tensors = read_hf(folder, find_hf_weights(folder), allow_pickle)
    tensors = unify_embeddings(tensors, config, folder)
    cfg = model_from_shapes(tensors, HF, folder)
    cfg = apply_hf_config(cfg, config, generation, folder)
    if "ByT5" in str(tokenizer.get("tokenizer_class")):
        vocabulary = b"bytes:0\n"
    else:
        sentinels = tokenizer.get("extra_ids") or data.SENTINELS
        vocabulary = read_vocabulary([folder], cfg, sentinels)
    return to_weights(tensors, HF, folder, cfg, vocabulary, model_type)


def unify_embeddings(tensors, config, folder):
    """Return Tensors with one embedding, and with an output layer unless the model is tied.

    In a tied model of plain T5, the output layer is the embedding and the logits are scaled
    by d_model^-0.5. In Hugging Face these two properties are independent: the arrays decide
    the first, config.json the second. A model that has only one of the two properties gets
    an output layer of its own, which gives the same logits.
    """
    embed, head = "shared.weight", "lm_head.weight"
    copies = ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"]
    tables = [name for name in (embed, *copies) if name in tensors]
    if not tables:
        raise UserError(
            f"{folder} has no {embed}: download the complete directory of a T5 model."
        )
    embedding = tensors[tables[0]].read()
    for name in tables[1:]:
        if not np.array_equal(tensors[name].read(), embedding):
            raise UserError(
                f"{folder} has different embeddings {tables[0]} and {name}: plain T5 "
                f"converts models that have one embedding."
            )
    head_tensor = tensors.get(head, in_memory(embedding))
    shared = head not in tensors or np.array_equal(head_tensor.read(), embedding)
    tied = config.get("tie_word_embeddings", shared)
    # transformers 5 scales the logits of a tied model, except those of mT5.
    scaled = tied and config.get("model_type") != "mt5"
    scaled = config.get("scale_decoder_outputs", scaled)
    if not any(name.startswith(("decoder", head)) for name in tensors):
        scaled = True  # an encoder alone has no logits
    elif not (head in tensors or tied or "scale_decoder_outputs" in config):
        raise UserError(
            f"{folder} has no {head}, although its config.json says that the model is not "
            f"tied: download it again."
        )
    # The first published files of T5 1.0 have this array, which no code has ever used.
    unused = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    tensors = {k: v for k, v in tensors.items() if k not in (head, *copies, unused)}
    tensors[embed] = in_memory(embedding)
    if not (shared and scaled):
        scale = np.float32(embedding.shape[1] ** -0.5 if scaled else 1)
        tensors[head] = Tensor(head_tensor.shape, lambda: scale * head_tensor.read())
    return tensors


def apply_hf_config(cfg, config, generation, folder):
    """Return the ModelConfig `cfg` with the values that only config.json determines.

    generation: the content of generation_config.json. Raises a UserError if one of the files
    contradicts the weights, or has a value that plain T5 does not support.
    """
    required = {name: getattr(cfg, name) for name in DIMENSIONS}
    required["relative_attention_num_buckets"] = cfg.relative_buckets
    required["layer_norm_epsilon"] = 1e-6
    required |= SPECIAL_TOKENS
    config = {"num_decoder_layers": config.get("num_layers"), **config}
    if (
        not cfg.num_decoder_layers
    ):  # the config.json of an encoder describes a decoder, too
        del config["num_decoder_layers"]
    for name, value in required.items():
        for found in (config.get(name), generation.get(name)):
            if found not in (None, value, [value]):
                raise UserError(
                    f"The configuration in {folder} says {name} {found}, but plain T5 "
                    f"needs {value} to use these weights: download the model again, or "
                    f"run it with transformers."
                )
    activation = config.get("feed_forward_proj", "relu").replace("-", "_")
    gated = cfg.activation.startswith("gated_")
    possible = [name for name in ACTIVATIONS if name.startswith("gated_") == gated]
    if activation not in possible:
        raise UserError(
            f"The config.json in {folder} says feed_forward_proj {activation}, but these "
            f"weights need {' or '.join(possible)}: download the model again, or run it "
            f"with transformers."
        )
    return replace(
        cfg,
        activation=activation,
        dropout=config.get("dropout_rate", 0.1),
        relative_max_distance=config.get("relative_attention_max_distance", 128),
    )


# ---- reading T5X and Mesh TensorFlow -------------------------------------------------------------


def read_t5x(folder):
    """Return {name: Tensor} of a T5X checkpoint, or of its msgpack file `checkpoint` alone.

    The msgpack file holds small arrays itself. For each other array it holds a TensorStore
    specification with the path of a zarr array. Source: t5x/checkpoints.py.
    """
    path = folder / "checkpoint" if folder.is_dir() else folder
    tree = restore_msgpack(path)
    version = tree.get("version", "unknown")
    if version != 3:
        raise UserError(
            f"{path} is a T5X checkpoint of version {version}, but plain T5 reads version "
            f"3: load and save it with a newer T5X."
        )
    leaves = flax.traverse_util.flatten_dict(
        tree["optimizer"], is_leaf=lambda _, value: "driver" in value, sep="/"
    )
    tensors = {}
    for name, leaf in leaves.items():
        if isinstance(leaf, dict):
            # TensorStore before 0.1.14 has "path" beside "kvstore", newer ones inside.
            relative_path = {**leaf, **leaf["kvstore"]}["path"]
            kvstore = {"driver": "file", "path": str(path.parent / relative_path)}
            # A missing file is an error, not an array of zeros.
            tensors[name] = open_zarr(kvstore, fill_missing_data_reads=False)
        else:
            tensors[name] = in_memory(leaf)
    return tensors


def read_orbax(folder):
    """Return {name: Tensor} of a T5X checkpoint that the library Orbax wrote.

    Orbax keeps all zarr arrays in one database, whose format is called OCDBT.
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
    """Return a zarr array as a Tensor. kvstore: TensorStore's specification of the place."""
    explain = explain_errors(kvstore["path"], "a complete array")
    spec = {"driver": "zarr", "kvstore": kvstore, **options}
    array = explain(lambda: tensorstore.open(spec, open=True).result())()
    return Tensor(array.shape, explain(lambda: array.read().result()))


MTF_SLOTS = {"v": "v", "vr": "v_row", "vc": "v_col", "m": "m"}  # their names in T5X


def read_mtf(prefix):
    """Return {name: Tensor} of a Mesh TensorFlow checkpoint. Needs TensorFlow.

    The names are changed to the spelling of Hugging Face, and for slots and the step to that of
    T5X. For instance, "encoder/block_000/layer_000/SelfAttention/q_slot_v" becomes
    "state/param_states/encoder.block.0.layer.0.SelfAttention.q.weight/v". Source:
    t5x/checkpoint_importer.py.
    """
    from tensorflow.train import load_checkpoint

    reader = load_checkpoint(str(prefix))
    tensors = {}
    for variable, shape in reader.get_variable_to_shape_map().items():
        name, _, slot = variable.partition("_slot_")
        name = re.sub(r"/(embedding|kernel|scale)$", "", name)
        # The norms have had several names.
        name = name.replace("rms_norm", "layer_norm").replace("final_", "")
        name = re.sub(r"^(encoder|decoder)/layer_norm", r"\1/final_layer_norm", name)
        name = re.sub(r"(block|layer)_0*(\d+)", r"\1/\2", name)
        name = name.replace("decoder/logits", "lm_head").replace("/", ".") + ".weight"
        if slot:
            name = slot_name(name, MTF_SLOTS.get(slot, slot))
        elif variable == "global_step":
            name = STEP
        read = functools.partial(reader.get_tensor, variable)
        tensors[name] = Tensor(tuple(shape), read)
    return tensors


def open_google(source, tensors, form):
    """Return the Weights of a checkpoint of T5X or Mesh TensorFlow."""
    folders = [source if source.is_dir() else source.parent]
    if source.name.startswith("checkpoint_"):
        folders.append(source.parent)  # the folder of T5X's run
    cfg = model_from_shapes(tensors, form, source)
    cfg = replace(cfg, activation=gin_activation(folders) or cfg.activation)
    return to_weights(tensors, form, source, cfg, read_vocabulary(folders, cfg))


def gin_activation(folders):
    """Return the activation that a Gin file in one of `folders` names, or None."""
    pattern = r"(?:mlp_activations|DenseReluDense\.activation) *= *(.*)"
    for folder in folders:
        for path in (folder / "config.gin", folder / "operative_config.gin"):
            found = re.search(pattern, path.read_text()) if path.exists() else None
            if found is None:
                continue
            # T5X names the activations of both branches of a gated MLP: ('gelu', 'linear').
            words = re.findall(r"\w+", found[1].replace("swish", "silu"))
            name = f"gated_{words[0]}" if "linear" in words else words[0]
            if name not in ACTIVATIONS:
                raise UserError(
                    f"{path} has the line `{found[0]}`: plain T5 converts models with the "
                    f"activations {', '.join(ACTIVATIONS)}."
                )
            return name
    return None


# ---- reading a run, and finding the format -------------------------------------------------------


def open_plain(checkpoint, run_dir):
    """Return the Weights of one checkpoint of a run."""
    manifest = partition.read_manifest(checkpoint)
    arrays, cfg = manifest["arrays"], configs.load_run(run_dir)
    shapes = {name: tuple(array["shape"]) for name, array in arrays.items()}
    required = stacked_shapes(parameter_entries(cfg.model, HF))
    different = {name for name in required if shapes.get(name) != required[name]}
    if different:
        raise UserError(
            f"{checkpoint} belongs to another run than {run_dir}/config.json, which "
            f"requires another shape of {name_some(different)}."
        )

    @functools.lru_cache(1)  # the layers of an array are read one after the other
    def read_array(name):
        everything = [slice(None)] * len(shapes[name])
        return partition.read_slice(checkpoint, arrays[name], everything, None)

    def read(name, layer):
        array = read_array(name)
        return array if layer is None else array[layer]

    files = [run_dir / "spiece.model", run_dir / "recipe.py"]
    contents = [file.read_bytes() if file.exists() else None for file in files]
    return Weights(cfg, manifest["step"], shapes, read, *contents)


def open_any(source, step=None, allow_pickle=False):
    """Return the Weights of a model in any format.

    step: the step of one of several checkpoints, or None for the newest checkpoint. Raises a
    UserError that names `source`, also later when the weights are read.
    """
    with explain_errors(source):
        weights = open_format(Path(source), step, allow_pickle)
    return weights._replace(read=explain_errors(source)(weights.read))


def find_checkpoints(folder):
    """Return {step: path} of the checkpoints in the directory of a run or of T5X."""
    run = partition.Checkpoints(folder)
    checkpoints = {step: run.path(step) for step in run.steps()}
    for path in folder.glob("checkpoint_*"):
        if match := re.fullmatch(r"checkpoint_(\d+)", path.name):
            checkpoints[int(match[1])] = path
    return checkpoints


def open_format(path, step, allow_pickle):
    """Return the Weights at `path`. The names of the files tell the format."""
    checkpoints = find_checkpoints(path)
    if step is not None and step not in checkpoints:
        steps = ", ".join(map(str, sorted(checkpoints))) or "none: leave out --step"
        raise UserError(f"{path} has no step {step:,}. Its steps are {steps}.")
    if step is not None:
        path = checkpoints[step]
    elif checkpoints and not find_hf_weights(path):
        path = checkpoints[max(checkpoints)]
    if (path / "manifest.json").exists():
        return open_plain(path, path.parent.parent)
    if find_hf_weights(path):
        return open_hf(path, allow_pickle)
    if Path(f"{path}.index").exists():
        return open_google(path, read_mtf(path), MTF)
    for folder in (path / "state", path):
        if (folder / "_METADATA").exists():
            return open_google(path, read_orbax(folder), T5X)
    if path.is_file() or (path / "checkpoint").is_file():
        return open_google(path, read_t5x(path), T5X)
    raise UserError(
        f"{path} is not a run directory, a Hugging Face directory with weights, or a "
        f"checkpoint of T5X or Mesh TensorFlow: check the name."
    )


# ---- writing a run -------------------------------------------------------------------------------


def write_plain(folder, weights, dtype):
    """Write Weights as a run directory. A run is always float32, so `dtype` is ignored."""
    arrays = {}
    for name, shape in weights.shapes.items():
        # An array without axes counts steps or updates.
        arrays[name] = {"shape": shape, "dtype": "float32" if shape else "int32"}

    def shards():
        """Yield (our name, [[start, stop] of each axis], array) of every layer."""
        for name, array in arrays.items():
            for layer in layers_of(name, array["shape"]):
                shard = np.asarray(weights.read(name, layer), array["dtype"], order="C")
                bounds = [[0, size] for size in array["shape"]]
                if layer is not None:
                    shard = shard[None]
                    bounds[0] = [layer, layer + 1]
                yield name, bounds, shard

    path = partition.Checkpoints(folder).path(weights.step)
    partition.write_checkpoint(path, arrays, shards(), weights.step)
    configs.save_run(weights.cfg, folder)
    if weights.recipe:
        configs.write_file(folder / "recipe.py", weights.recipe)


# ---- writing Hugging Face ------------------------------------------------------------------------

SHARD_BYTES = 5_000_000_000  # the largest size of one safetensors file


def write_hf(folder, weights, dtype):
    """Write Weights as a Hugging Face directory."""
    write_safetensors(folder, weights, dtype)
    cfg = weights.cfg.model
    family = "t5"
    if cfg.layer_biases:
        family = "umt5"
        if not cfg.tied:
            note(
                "transformers 5 scales the logits of UMT5 by d_model^-0.5, as if the model "
                "were tied: greedy outputs are equal, but beam search and scores differ. "
                "transformers 4.57 is exact."
            )
    elif not cfg.tied and (
        weights.cfg.name.startswith("mt5") or cfg.vocab_size == 250112
    ):
        family = "mt5"
    has_decoder = cfg.num_decoder_layers > 0
    architecture = "ForConditionalGeneration" if has_decoder else "EncoderModel"
    config = {
        "architectures": [family.upper() + architecture],
        "model_type": family,
        "is_encoder_decoder": has_decoder,
        "use_cache": has_decoder,
        "dtype": dtype.name,
        **SPECIAL_TOKENS,
        **{name: getattr(cfg, name) for name in DIMENSIONS},
        "feed_forward_proj": cfg.activation.replace("_", "-"),
        "tie_word_embeddings": cfg.tied,
        "relative_attention_num_buckets": cfg.relative_buckets,
        "relative_attention_max_distance": cfg.relative_max_distance,
        "dropout_rate": cfg.dropout,
        "layer_norm_epsilon": 1e-6,
    }
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", SPECIAL_TOKENS)
    write_tokenizer(folder, weights.vocabulary, cfg)


def write_safetensors(folder, weights, dtype):
    """Write the parameters as one safetensors file, or as several files with an index."""
    files, size, total_size = [[]], 0, 0
    for entry in parameter_entries(weights.cfg.model, HF):
        nbytes = math.prod(entry.shape) * dtype.itemsize
        if files[-1] and size + nbytes > SHARD_BYTES:
            files.append([])
            size = 0
        files[-1].append(entry)
        size += nbytes
        total_size += nbytes
    weight_map = {}
    for number, entries in enumerate(files, 1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors"
        if len(files) == 1:
            name = "model.safetensors"
        arrays = {}
        for entry in entries:
            array = entry.transpose(weights.read(entry.name, entry.layer))
            arrays[entry.external_name] = np.ascontiguousarray(array, dtype)
        safetensors.numpy.save_file(arrays, folder / name, {"format": "pt"})
        weight_map |= dict.fromkeys(arrays, name)
    if len(files) > 1:
        index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
        write_json(folder / "model.safetensors.index.json", index)


def write_json(path, value):
    """Write a value as an indented JSON file."""
    path.write_text(json.dumps(value, indent=2) + "\n")


def write_tokenizer(folder, vocabulary, cfg):
    """Write spiece.model and a tokenizer.json that gives the same ids.

    Prints a note about texts for which the tokenizer of Hugging Face gives other ids.
    """
    if vocabulary is None or vocabulary.startswith(b"ids:"):
        return  # there are no texts
    config = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    if vocabulary.startswith(b"bytes"):
        config["tokenizer_class"] = "ByT5Tokenizer"
        config["extra_ids"] = max(0, cfg.vocab_size - 259)
        note("warning: Hugging Face's ByT5Tokenizer gives other ids to the sentinels.")
    else:
        proto = parse_sentencepiece(vocabulary)
        if proto.trainer_spec.model_type != proto.trainer_spec.UNIGRAM:
            raise UserError(
                "The vocabulary is not a unigram model, and Hugging Face's T5Tokenizer "
                "would split nearly all texts differently. To write the weights alone, "
                "move spiece.model out of the run."
            )
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        (folder / "spiece.model").write_bytes(vocabulary)
        write_json(folder / "tokenizer.json", tokenizer_json(proto))
        note(
            "The tokenizer of transformers gives the same ids, with two exceptions: a "
            "sentinel that has no space before it (plain T5 reads it as text), and </s>, "
            "<pad> or <unk> spelled out in a text."
        )
    write_json(folder / "tokenizer_config.json", config)


TOKEN_FLAGS = {
    "single_word": False,
    "rstrip": False,
    "normalized": False,
    "special": True,
}
# The parts of tokenizer.json that are equal for all vocabularies. Replace removes spaces at the
# end and collapses several spaces, as SentencePiece does. Metaspace replaces spaces by "\u2581".
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
  "model": {"type": "Unigram", "unk_id": 2}
}
"""


def tokenizer_json(proto):
    """Return the content of tokenizer.json, for the library tokenizers.

    proto: the ModelProto of a SentencePiece unigram model. Sentinels absorb the space before them.
    """
    processor = sentencepiece.SentencePieceProcessor(
        model_proto=proto.SerializeToString()
    )
    # Whether SentencePiece puts a space before the text that follows a sentinel.
    after_sentinel = processor.encode("<extra_id_0>,", out_type=str)[1]
    prepend_scheme = "always" if after_sentinel.startswith("\u2581") else "first"
    if "<extra_id_" not in proto.pieces[-1].piece:
        data.add_sentinels(proto, data.SENTINELS)
    vocab, added_tokens = [], []
    for number, piece in enumerate(proto.pieces):
        text = piece.piece.replace("\u2581<extra_id_", "<extra_id_")
        vocab.append([text, piece.score])
        if number < 3 or "<extra_id_" in text:
            absorbs_space = number > 2  # a sentinel includes the space before it
            token = {
                "id": number,
                "content": text,
                "lstrip": absorbs_space,
                **TOKEN_FLAGS,
            }
            added_tokens.append(token)
    content = json.loads(TOKENIZER_JSON)
    content["added_tokens"] = added_tokens
    content["pre_tokenizer"]["prepend_scheme"] = prepend_scheme
    content["decoder"] = content["pre_tokenizer"]
    content["model"]["byte_fallback"] = proto.trainer_spec.byte_fallback
    content["model"]["vocab"] = vocab
    if charsmap := proto.normalizer_spec.precompiled_charsmap:
        charsmap = base64.b64encode(charsmap).decode()
        normalizer = {"type": "Precompiled", "precompiled_charsmap": charsmap}
        content["normalizer"]["normalizers"].insert(0, normalizer)
    return content


MODEL_CARD = """---
library_name: transformers
pipeline_tag: text2text-generation
tags:
- t5
---

# {name}

A T5 model at step {step:,}, written by plain T5. The results of its evaluations:

"""


def write_model_card(folder, weights, run_dir):
    """Write the README.md of a Hugging Face directory, with all evaluations of the run."""
    card = MODEL_CARD.format(name=weights.cfg.name, step=weights.step)
    for line in partition.read_metrics_file(Path(run_dir, "metrics.jsonl")):
        for name, value in line.items():
            if "_eval/" in name and line["step"] <= weights.step:
                card += f"- step {line['step']}: {name} {value:.4g}\n"
    (folder / "README.md").write_text(card)


# ---- writing T5X ---------------------------------------------------------------------------------


def write_t5x(folder, weights, dtype):
    """Write Weights as a T5X checkpoint: a msgpack file of version 3 beside zarr arrays."""
    if weights.cfg.model.layer_biases:
        raise UserError(
            "T5X has one table of position biases per stack, but this UMT5 has one table "
            "per layer: convert the model with --to hf."
        )
    entries = parameter_entries(weights.cfg.model, T5X)
    tree = {STEP: np.array(weights.step, np.int32)}
    rows = {name for name in weights.shapes if name.endswith("/row")}
    factored = {name.replace("slots", "params", 1).removesuffix("/row") for name in rows}
    slots = slot_entries(entries, factored)
    if stacked_shapes(slots).keys() <= weights.shapes.keys():
        # T5X expects four slots per parameter. A slot that is not used is a single zero.
        for entry in entries:
            for slot in ("m", "v", "v_row", "v_col"):
                tree[slot_name(entry.external_name, slot)] = np.zeros(1, np.float32)
        entries += slots
    else:
        note(
            "The converted checkpoint has no Adafactor state. T5X can evaluate it as it is; "
            "to fine-tune from it in T5X, turn on fallback_to_scratch."
        )
    for entry in entries:
        array = weights.read(entry.name, entry.layer)
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
    """Write a zarr array, and return the specification that T5X's msgpack file holds."""
    chunk_rows = max(
        1, (1 << 26) // array[0].nbytes
    )  # chunks of at most 64 MiB, as in T5X
    metadata = {
        "shape": list(array.shape),
        "chunks": [min(len(array), chunk_rows), *array.shape[1:]],
        "compressor": None,  # T5X compresses with gzip, which saves 7 % in ten times the time
    }
    spec = {"driver": "zarr", "dtype": array.dtype.name, "metadata": metadata}
    kvstore = {"driver": "file", "path": str(folder / name)}
    try:
        store = tensorstore.open({**spec, "kvstore": kvstore}, create=True).result()
        store.write(array).result()
    except ValueError as error:  # TensorStore reports a full disk as a ValueError
        raise OSError(str(error)) from error
    return {**spec, "kvstore": {"driver": "file", "path": f"{name}/"}}


# ---- the command ---------------------------------------------------------------------------------

WRITERS = {"plain": write_plain, "hf": write_hf, "t5x": write_t5x}


@contextlib.contextmanager
def atomic_destination(destination):
    """Yield a temporary folder, which is renamed to `destination` if no exception is raised."""
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
    """Read the model `source`, write `destination` in the format `to`, and compare the two.

    dtype: the NumPy type of the written parameters. step: see open_any.
    """
    start = time.perf_counter()
    with atomic_destination(destination) as folder:
        weights = open_any(source, step, allow_pickle)
        params = model.count_params(model.param_table(weights.cfg.model))
        print(
            f"source   {source}: {params:,} parameters, step {weights.step:,}", flush=True
        )
        if weights.vocabulary is None:
            note(
                f"warning: {source} has no vocabulary. The converted model accepts only "
                f"token ids until you copy its spiece.model into {destination}."
            )
        count = sum(len(layers_of(*item)) for item in weights.shapes.items())
        # Every array is read twice: to be written, and to be compared.
        bar = data.progress_bar("converting", "array", 2 * count)
        read_array = weights.read

        def read(name, layer):
            bar.update()
            return read_array(name, layer)

        weights = weights._replace(read=read)
        try:
            WRITERS[to](folder, weights, dtype)
            if to == "hf":
                write_model_card(folder, weights, source)
            elif weights.vocabulary:
                configs.write_file(folder / "spiece.model", weights.vocabulary)
        except (
            OSError,
            safetensors.SafetensorError,
        ) as error:  # for instance a full disk
            raise OSError(errno.EIO, str(error)[:200], str(destination)) from error
        largest, arrays = compare(weights, open_any(folder), dtype)
        bar.close()
        print(
            f"compared {arrays:,} arrays with the source: largest difference {largest:g}"
        )
    print(f"done     {destination}, in {time.perf_counter() - start:.2f} s", flush=True)


def compare(weights, written, dtype):
    """Compare all arrays of `weights`, rounded to `dtype`, with the arrays that were written.

    Returns the largest difference (from rounding) and the number of arrays. Raises an OSError if a
    written array is not equal to the rounded array.
    """
    largest, count = 0.0, 0
    for name in sorted(written.shapes.keys() & weights.shapes.keys()):
        kind = dtype if name.startswith("params/") else np.float32
        for layer in layers_of(name, written.shapes[name]):
            expected = np.asarray(weights.read(name, layer), np.float32)
            found = np.asarray(written.read(name, layer), np.float32)
            rounded = expected.astype(kind).astype(np.float32)
            if not np.array_equal(rounded, found, equal_nan=True):
                raise OSError(
                    f"{name} was written, but different values were read back: the disk or "
                    f"the memory is faulty. Nothing was kept."
                )
            difference = np.abs(expected - found)
            largest = max(largest, float(np.nanmax(difference, initial=0.0)))
            count += 1
    return largest, count


def main(argv):
    """Run the command."""
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
    for path in (args.src, args.dst):
        if configs.is_remote(path):
            raise UserError(
                f"convert.py reads and writes local folders only: copy {path} first."
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
