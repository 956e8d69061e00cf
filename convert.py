"""Convert T5 weights between Hugging Face, T5X, Mesh TensorFlow and runs of plain T5.

SRC is a model in any of these formats. The format and all dimensions of SRC are detected.
DST is a new folder for a run, a Hugging Face model or a T5X checkpoint. The weights are
copied exactly, unless --dtype bfloat16 rounds them. DST appears only after everything
that was written has been read again and compared with SRC.

    python convert.py t5-v1_1-small/ runs/t5_1_1_small     import any format as a run
    python convert.py runs/tiny tiny_hf --to hf            export to Hugging Face
    python convert.py runs/tiny checkpoint_1500 --to t5x   export to T5X

All formats hold the same arrays. They differ in the names and in the storage of matrices:

- Hugging Face (the library transformers): a directory with config.json and the weights in
  model.safetensors, flax_model.msgpack or pytorch_model.bin. PyTorch stores a matrix as
  [outputs, inputs], and a run stores the matrix as [inputs, outputs].
- T5X (Google's JAX code for T5): a directory checkpoint_N. It contains a msgpack file and
  one zarr array per parameter, or it was written by the library Orbax. The matrices are
  stored as in a run.
- Mesh TensorFlow (the original code for T5): a TensorFlow checkpoint model.ckpt-N. The
  matrices are stored as in a run.

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
# The three tables below contain all names of parameters. Each value is a pair: the name
# (or a part of the name) in Hugging Face, and the same for T5X.

# SUBLAYERS: attention and MLP of one layer. Hugging Face numbers them, T5X does not.
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
# MATRICES: the arrays of a sublayer. In a model whose MLP has no gate, Hugging Face and
# T5X write "wi" instead of "wi_1". Only UMT5 has a relative_bias in every layer; T5X has
# no UMT5.
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
# UNSTACKED: the parameters that a model or a stack has once. Hugging Face stores the
# relative position biases of a stack in the first layer of the stack.
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

    path: the name of the parameter in model.param_table. layer: the layer number, which
    does not matter for a parameter that is not stacked. gated: whether the MLP has
    a gate.
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


class Format(NamedTuple):
    """How one format names its arrays and stores its matrices.

    number: 0 if the names are those of Hugging Face, 1 if they are those of T5X.
    transposes: whether the format stores the transposes of all matrices except the
    embedding.
    """

    number: int
    transposes: bool

    def name(self, path, layer, gated):
        """Return the external name of a parameter (arguments as in parameter_names)."""
        return parameter_names(path, layer, gated)[self.number]


# PyTorch stores the weight of a linear layer as [outputs, inputs] and the position biases
# as [buckets, heads]. A run stores [inputs, outputs] and [heads, buckets].
HF = Format(0, transposes=True)
# T5X stores every matrix as a run does.
T5X = Format(1, transposes=False)
# Mesh TensorFlow stores every matrix as a run does. Its names are those of Hugging Face
# in another spelling. The function read_mtf changes the spelling.
MTF = Format(0, transposes=False)


# ---- arrays ----------------------------------------------------------------------------


def layers_of(name, shape):
    """Return the layer numbers of our array `name`, or [None] if it is not stacked."""
    return range(shape[0]) if "layers" in name.split("/") else [None]


def layer_shape(name, shape):
    """Return the shape of one layer of our array `name`, which has shape `shape`."""
    return shape[1:] if "layers" in name.split("/") else shape


class Tensor(NamedTuple):
    """An array that is still on the disk. read() returns its values.

    A model in another format is a dict {external name: Tensor}. Arguments with such a
    dict are called `tensors`.
    """

    shape: tuple
    read: Callable


class Entry(NamedTuple):
    """The name of one external array, and the array or layer of a run with equal values.

    A run keeps the layers of a stack in one array [layers, inputs, outputs]. The other
    formats keep one array per layer. An array of a run with L layers therefore has L
    entries.
    """

    external_name: str
    name: str  # our name
    layer: int | None  # None if our array is not stacked
    shape: tuple  # shape of one layer in a run
    transposed: bool  # whether the external array is the transpose of our array

    def transpose(self, array):
        """Convert an array from the shape in a run to the external shape, or back."""
        return array.T if self.transposed else array

    def read(self, tensors):
        """Read the external array, and return it in the shape that it has in a run."""
        return self.transpose(tensors[self.external_name].read())


def parameter_entries(cfg, form):
    """List one Entry per external array that holds parameters.

    cfg: the ModelConfig. form: the Format of the external names.
    """
    gated = cfg.activation.startswith("gated_")
    entries = []
    for path, param in partition.flatten(model.param_table(cfg)).items():
        shape = layer_shape(path, param.shape)
        transposed = form.transposes and len(shape) == 2 and path != "embed"
        for layer in layers_of(path, param.shape):
            external_name = form.name(path, layer, gated)
            entry = Entry(external_name, f"params/{path}", layer, shape, transposed)
            entries.append(entry)
    return entries


STEP = "state/step"  # T5X's name of the step


def slot_name(parameter, slot):
    """Return T5X's name of an optimizer slot, for instance of v_row.

    parameter: the external name of the parameter. slot: m, v, v_row or v_col.
    """
    return f"state/param_states/{parameter.removeprefix('target/')}/{slot}"


def slot_entries(parameters, factored):
    """List one Entry per external array that holds a slot of the optimizer Adafactor.

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

    Each layer is a Tensor of its own, which is read at the moment when it is written. The
    model may therefore be larger than the memory.
    """

    cfg: Config
    step: int
    # {(our name, layer): Tensor} of all parameters, and of the optimizer slots if known
    arrays: dict
    vocabulary: bytes | None  # content of spiece.model
    recipe: bytes | None = None  # content of the run's recipe.py


def in_memory(array):
    """Wrap an array that is already in memory as a Tensor."""
    return Tensor(np.shape(array), lambda: np.asarray(array))


def name_some(names):
    """Return a short text for several names, such as "NAME and 3 more"."""
    first, *others = sorted(names)
    return f"{first} and {len(others):,} more" if others else first


# ====== below: readers, writers, the command ============================================


@contextlib.contextmanager
def explain_errors(path, kind="in the format that its name and folder suggest"):
    """Replace an exception of a library by a UserError that names the file `path`.

    kind: what the file should be. The function is used as a context manager or decorator.
    """
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
    except Exception as error:  # each library has its own exceptions
        if getattr(error, "filename", None):  # an OSError that already names the file
            raise
        reason = f"{type(error).__name__}: {' '.join(str(error).split()):.200}"
        raise UserError(
            f"{path} is missing, damaged or not {kind} ({reason}): download it again."
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
    """Return the ModelConfig of a model in another format, as far as shapes determine it.

    source: the path of the model, for messages. Raises a UserError if the model is not a
    T5 model.
    """
    gated = form.name("encoder/layers/mlp/gate", 0, True) in tensors

    def shape(path):
        rows, columns = tensors[form.name(path, 0, gated)].shape
        if form.transposes and path != "embed":
            return columns, rows
        return rows, columns

    def count_layers(stack):
        pattern = rf"{stack}[./](?:block\.|layers_)(\d{{1,3}})\D"
        numbers = re.findall(pattern, " ".join(tensors))
        return max(map(int, numbers), default=-1) + 1

    num_layers, num_decoder_layers = count_layers("encoder"), count_layers("decoder")
    tied = form.name("unembed", 0, gated) not in tensors
    if not num_layers or not num_decoder_layers and not tied:
        raise UserError(
            f"{source} has {num_layers} encoder layers, {num_decoder_layers} decoder "
            f"layers and {'no' if tied else 'an'} output layer: plain T5 converts "
            f"complete encoder-decoders, and encoders without an output layer."
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


def adafactor_entries(tensors, parameters):
    """List the entries of Adafactor's slots, or return [] for another optimizer.

    parameters: the entries of the parameters. The optimizer is Adafactor without momentum
    if the optimizer arrays are exactly the slots of Adafactor.
    """
    used = {}  # {external name: shape} of the optimizer arrays
    for name, tensor in tensors.items():
        # T5X stores a single zero for a slot that a parameter does not use.
        if name.startswith("state/") and math.prod(tensor.shape) > 1:
            used[name] = tensor.shape
    factored = set()
    for entry in parameters:
        if slot_name(entry.external_name, "v_row") in used:
            factored.add(entry.name)
    slots = slot_entries(parameters, factored)
    return slots if used == {slot.external_name: slot.shape for slot in slots} else []


def to_weights(tensors, form, source, cfg, vocabulary, name="t5"):
    """Return the Weights of a model in another format.

    cfg: the ModelConfig, which determines the arrays that `tensors` must have. name: the
    name of the model. Raises a UserError if an array is missing, unknown or has a wrong
    shape.
    """
    entries = parameter_entries(cfg, form)
    required = {}
    for entry in entries:
        shape = entry.shape[::-1] if entry.transposed else entry.shape
        required[entry.external_name] = shape
    check_shapes(source, required, {name: tensors[name].shape for name in tensors})
    optimizer = {name for name in tensors if name.startswith("state/")}
    if unknown := tensors.keys() - required.keys() - optimizer:
        raise UserError(
            f"{source} has {name_some(unknown)}, which no T5 model has: plain T5 "
            f"converts T5 1.0, T5 1.1, mT5, UMT5, ByT5 and models derived from them."
        )
    arrays = {}
    step = int(tensors[STEP].read()) if STEP in tensors else 0
    slots = adafactor_entries(tensors, entries)
    entries += slots
    if slots:
        # T5X counts only steps. A run also counts updates and skipped updates.
        for counter, value in {"step": step, "count": step, "skipped": 0}.items():
            arrays[counter, None] = in_memory(value)
    elif optimizer - {STEP}:
        note(
            f"Only the parameters of {source} are converted, because its optimizer is "
            f"not Adafactor without momentum."
        )
    for entry in entries:
        read = explain_errors(source)(functools.partial(entry.read, tensors))
        arrays[entry.name, entry.layer] = Tensor(entry.shape, read)
    is_bytes = vocabulary is not None and vocabulary.startswith(b"bytes")
    data_config = DataConfig("python:", vocab="bytes" if is_bytes else "spiece.model")
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
    file, the result is "bytes:0". spiece.model takes precedence over tokenizer.json. cfg:
    ModelConfig. sentinels: how many sentinels to add if the file has none.
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
            f"{cfg.vocab_size:,} embeddings: bring the vocabulary of this model."
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


# WHITE_SPACE: the characters that the pre-tokenizer WhitespaceSplit replaces by a space.
WHITE_SPACE = (
    "\t\n\v\f\r\x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009"
    "\u200a\u2028\u2029\u202f\u205f\u3000"
)
# SPACE_PATTERNS: the regular expressions with which tokenizer.json files merge or strip
# spaces. SentencePiece merges and strips spaces without being told.
SPACE_PATTERNS = (" {2,}", "[ \u2581]{2,}", "[ \u2581]+$")
# SUPPORTED_PARTS: the parts of tokenizer.json that SentencePiece can express.
SUPPORTED_PARTS = {"Unigram", "Precompiled", "Strip", "Metaspace", "WhitespaceSplit"}


def tokenizer_json_to_sentencepiece(path):
    """Return a SentencePiece ModelProto that tokenizes like a tokenizer.json.

    The ids differ only in two cases: a text contains "</s>", "<pad>" or "<unk>", or a
    text ends with white space other than a space. Raises a UserError if tokenizer.json
    does anything that a SentencePiece unigram model cannot do.
    """
    tokenizer = configs.read_json(path, {"model": {"vocab": list, "type?": str}})

    def parts(key, inside):
        """List the steps of a normalizer or pre-tokenizer."""
        part = tokenizer.get(key) or {"type": "Sequence", inside: []}
        return part[inside] if part["type"] == "Sequence" else [part]

    unigram = tokenizer["model"]
    steps = parts("normalizer", "normalizers") + parts("pre_tokenizer", "pretokenizers")
    used = {unigram.get("type", "Unigram")}
    if unigram.get("byte_fallback"):
        used.add("byte_fallback")
    for step in steps:
        pattern = step["pattern"].get("Regex") if step["type"] == "Replace" else None
        if pattern not in SPACE_PATTERNS:
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
    special_ids = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
    proto = sentencepiece_model_pb2.ModelProto(trainer_spec=special_ids)
    types = {0: "CONTROL", 1: "CONTROL", unigram["unk_id"]: "UNKNOWN"}
    for number, (piece, score) in enumerate(unigram["vocab"][:normal]):
        proto.pieces.add(piece=piece, score=score, type=types.get(number, "NORMAL"))
    data.add_sentinels(proto, sentinels)
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
    # Metaspace puts a space before the text that follows a sentinel, except if its
    # prepend_scheme is "first".
    space = "" if "first" in str(tokenizer["pre_tokenizer"]) else " "
    for k in range(sentinels):
        norm_map[f"<extra_id_{k}>"] = f" <extra_id_{k}>{space}"
    if norm_map:
        rules = sentencepiece.SentencePieceNormalizer(norm_map=list(norm_map.items()))
        proto.normalizer_spec.MergeFromString(rules.serialized_normalizer_spec())
    return proto


# ---- reading Hugging Face --------------------------------------------------------------

WEIGHT_FILES = ("model.safetensors", "flax_model.msgpack", "pytorch_model.bin")
# ACTIVATIONS: the activations that mean the same in all formats.
ACTIVATIONS = ("gated_gelu", "gated_silu", "relu")
# DIMENSIONS: the fields that have the same name in ModelConfig and in config.json.
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
# HF_CONFIG: the types of the fields in config.json that are read here. All are optional.
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
    """Return {name: Tensor} of the weights in a Hugging Face directory.

    name: a name in WEIGHT_FILES, for a single file or for the index of several files.
    """
    files, promised = [folder / name], set()
    if not files[0].exists():
        path = folder / f"{name}.index.json"
        index = configs.read_json(path, {"weight_map": {str: str}})
        files = sorted(
            {folder / Path(file).name for file in index["weight_map"].values()}
        )
        promised = set(index["weight_map"])
    if name.endswith(".bin") and not allow_pickle:
        raise UserError(
            f"{files[0]} is a pickle file, which can run any program when it is read: "
            f"add --allow_pickle if you trust its origin."
        )
    readers = {".msgpack": read_flax, ".bin": read_pickle}
    read_file = readers.get(files[0].suffix, read_safetensors)
    tensors = {}
    for file in files:
        tensors |= read_file(file)
    if missing := promised - tensors.keys():
        raise UserError(
            f"{folder} has no {name_some(missing)}, which its index lists: download the "
            f"missing file again."
        )
    return tensors


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
    """Return {name: Tensor} of a pytorch_model.bin. Needs torch."""
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


def read_flax(file):
    """Return {name: Tensor} of a flax_model.msgpack, with names and shapes of PyTorch.

    Flax writes "lm_head/kernel" where PyTorch writes "lm_head.weight". A kernel is the
    transpose of PyTorch's matrix. Flax reads the complete file at once, which needs twice
    the size of the file in memory.
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
    """Return tensors with one embedding, and an output layer unless the model is tied.

    A tied model of plain T5 has two properties: the output layer is the embedding, and
    the logits are scaled by d_model^-0.5. In Hugging Face the two properties are
    independent. The arrays determine the first property, and config.json determines the
    second. If a model has only one of the properties, it gets an output layer of its own
    with the same logits.
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
    # By default transformers scales the logits of a tied model, except for mT5.
    scaled = tied and config.get("model_type") != "mt5"
    scaled = config.get("scale_decoder_outputs", scaled)
    if not any(name.startswith(("decoder", head)) for name in tensors):
        scaled = True  # an encoder alone has no logits
    elif not (head in tensors or tied or "scale_decoder_outputs" in config):
        raise UserError(
            f"{folder} has no {head}, although its config.json says that the model is "
            f"not tied: download it again."
        )
    # The published files of T5 1.0 contain this array, but no code uses it.
    unused = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    tensors = {k: v for k, v in tensors.items() if k not in (head, *copies, unused)}
    tensors[embed] = in_memory(embedding)
    if not (shared and scaled):
        scale = np.float32(embedding.shape[1] ** -0.5 if scaled else 1)
        tensors[head] = Tensor(head_tensor.shape, lambda: scale * head_tensor.read())
    return tensors


def apply_hf_config(cfg, config, generation, folder):
    """Return the ModelConfig `cfg` with the values that only config.json determines.

    generation: the content of generation_config.json. Raises a UserError if a file
    contradicts the weights, or contains a value that plain T5 does not support.
    """
    required = {name: getattr(cfg, name) for name in DIMENSIONS}
    required["relative_attention_num_buckets"] = cfg.relative_buckets
    required["layer_norm_epsilon"] = 1e-6
    required |= SPECIAL_TOKENS
    config = {"num_decoder_layers": config.get("num_layers"), **config}
    # The config.json of an encoder describes a decoder that has no weights.
    if not cfg.num_decoder_layers:
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


# ---- reading T5X and Mesh TensorFlow ---------------------------------------------------


def read_t5x(folder):
    """Return {name: Tensor} of a T5X checkpoint.

    The msgpack file contains the small arrays. For each large array it contains a
    TensorStore specification with the path of a zarr array. Source: t5x/checkpoints.py.
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
            # TensorStore before 0.1.14 wrote the path beside "kvstore" and not inside.
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

    kvstore: where the array is, as a specification of TensorStore.
    """
    explain = explain_errors(kvstore["path"], "a complete array")
    spec = {"driver": "zarr", "kvstore": kvstore, **options}
    array = explain(lambda: tensorstore.open(spec, open=True).result())()
    return Tensor(array.shape, explain(lambda: array.read().result()))


# MTF_SLOTS: the names of Adafactor's slots in Mesh TensorFlow, with their names in T5X.
MTF_SLOTS = {"v": "v", "vr": "v_row", "vc": "v_col", "m": "m"}


def read_mtf(prefix):
    """Return {name: Tensor} of a Mesh TensorFlow checkpoint. Needs TensorFlow.

    Parameters get the spelling of Hugging Face:
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
        folders.append(source.parent)  # the directory of T5X's run
    cfg = model_from_shapes(tensors, form, source)
    cfg = replace(cfg, activation=gin_activation(folders) or cfg.activation)
    return to_weights(tensors, form, source, cfg, read_vocabulary(folders, cfg))


def gin_activation(folders):
    """Return the activation from the first Gin file in `folders`, or None.

    Shapes do not tell gated GELU and gated SiLU apart. The configuration files of T5X do.
    """
    pattern = r"(?:mlp_activations|DenseReluDense\.activation) *= *(.*)"
    names = ("config.gin", "operative_config.gin")
    for path in [folder / name for folder in folders for name in names]:
        found = re.search(pattern, path.read_text()) if path.exists() else None
        if found:
            # T5X names both branches of a gated MLP: ('gelu', 'linear').
            words = re.findall(r"\w+", found[1].replace("swish", "silu"))
            name = f"gated_{words[0]}" if "linear" in words else words[0]
            if name not in ACTIVATIONS:
                raise UserError(
                    f"{path} has the line `{found[0]}`: plain T5 converts models with "
                    f"the activations {', '.join(ACTIVATIONS)}."
                )
            return name
    return None


# ---- reading a run, and finding the format ---------------------------------------------


def open_plain(checkpoint, run_dir):
    """Return the Weights of one checkpoint of a run."""
    manifest = partition.read_manifest(checkpoint)
    stored, cfg = manifest["arrays"], configs.load_run(run_dir)
    shapes = {name: tuple(array["shape"]) for name, array in stored.items()}
    params = partition.flatten({"params": model.param_table(cfg.model)})
    check_shapes(checkpoint, {name: params[name].shape for name in params}, shapes)

    # The layers of an array are read one after the other, so one array is cached.
    @functools.lru_cache(1)
    @explain_errors(checkpoint)
    def read_array(name):
        everything = [slice(None)] * len(shapes[name])
        return partition.read_slice(checkpoint, stored[name], everything, {})

    def read_layer(name, layer):
        array = read_array(name)
        return array if layer is None else array[layer]

    arrays = {}
    for name, shape in shapes.items():
        for layer in layers_of(name, shape):
            read = functools.partial(read_layer, name, layer)
            arrays[name, layer] = Tensor(layer_shape(name, shape), read)
    files = [run_dir / "spiece.model", run_dir / "recipe.py"]
    contents = [file.read_bytes() if file.exists() else None for file in files]
    return Weights(cfg, manifest["step"], arrays, *contents)


def open_any(source, step=None, allow_pickle=False):
    """Return the Weights of a model in any format.

    step: the step of the checkpoint to read, or None for the newest checkpoint. Raises a
    UserError that names `source` if the model cannot be read.
    """
    with explain_errors(source):
        return open_format(Path(source), step, allow_pickle)


def find_checkpoints(folder):
    """Return {step: path} of the checkpoints of a run or of a T5X run."""
    run = partition.Checkpoints(folder)
    checkpoints = {step: run.path(step) for step in run.steps()}
    for path in folder.glob("checkpoint_*"):
        step = path.name.removeprefix("checkpoint_")
        if step.isdecimal():
            checkpoints[int(step)] = path
    return checkpoints


def open_format(path, step, allow_pickle):
    """Return the Weights at `path`. The names of the files determine the format.

    step: see open_any.
    """
    checkpoints = find_checkpoints(path)
    if step is not None and step not in checkpoints:
        raise UserError(
            f"{path} has no step {step:,}: leave out --step, or choose one of "
            f"{sorted(checkpoints)}."
        )
    if step is not None:
        path = checkpoints[step]
    elif checkpoints and not find_hf_weights(path):
        path = checkpoints[max(checkpoints)]
    if (path / "manifest.json").exists():
        return open_plain(path, path.resolve().parent.parent)
    if find_hf_weights(path):
        return open_hf(path, allow_pickle)
    if Path(f"{path}.index").exists():
        return open_google(path, read_mtf(path), MTF)
    for folder in (path / "state", path):
        if (folder / "_METADATA").exists():
            return open_google(path, read_orbax(folder), T5X)
    if (path / "checkpoint").is_file():
        return open_google(path, read_t5x(path), T5X)
    raise UserError(
        f"{path} is not a run directory, a Hugging Face directory with weights, or a "
        f"checkpoint of T5X or Mesh TensorFlow: check the name."
    )


# ---- writing a run ---------------------------------------------------------------------


def write_plain(folder, weights, dtype):
    """Write Weights as a run directory.

    dtype: ignored, because a run is always float32. Each layer is one shard of the
    checkpoint, which can have at most 4 GiB.
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
                shard = shard[None]
            yield name, bounds, shard

    path = partition.Checkpoints(folder).path(weights.step)
    partition.write_checkpoint(path, arrays, shards(), weights.step)
    configs.save_run(weights.cfg, folder)
    if weights.recipe:
        configs.write_file(folder / "recipe.py", weights.recipe)


# ---- writing Hugging Face --------------------------------------------------------------

# The largest size of a safetensors file in bytes. A larger model is written as several.
SHARD_BYTES = 5_000_000_000


def write_hf(folder, weights, dtype):
    """Write Weights as a Hugging Face directory.

    dtype: the NumPy type of the written weights.
    """
    write_safetensors(folder, weights, dtype)
    cfg = weights.cfg.model
    family = "t5"
    if cfg.layer_biases:
        family = "umt5"
        if not cfg.tied:
            note(
                "transformers 5 scales the logits of UMT5 by d_model^-0.5, as if the "
                "model were tied: greedy outputs are equal, but beam search and scores "
                "differ. transformers 4.57 is exact."
            )
    # transformers 5 does not scale the logits of MT5, so a tied model is written as T5.
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
    """Write the parameters as safetensors files.

    A small model is one file. A large model is several files with an index.
    """
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
            array = weights.arrays[entry.name, entry.layer].read()
            array = entry.transpose(array)
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
    """Write the tokenizer of a Hugging Face directory.

    A SentencePiece model is written as spiece.model, and as a tokenizer.json that gives
    the same ids. A note names the texts for which the ids differ.
    """
    if vocabulary is None or vocabulary.startswith(b"ids:"):
        return  # the model is used with token ids only
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


# TOKEN_FLAGS: the fields of tokenizer.json that are equal for all special tokens.
TOKEN_FLAGS = {
    "single_word": False,
    "rstrip": False,
    "normalized": False,
    "special": True,
}
# TOKENIZER_JSON: the parts of tokenizer.json that are equal for all vocabularies. Replace
# strips spaces at the end of a text and merges adjacent spaces, as SentencePiece does.
# Metaspace replaces each space by "\u2581".
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
    """Return the content of a tokenizer.json, which the library tokenizers reads.

    proto: the ModelProto of a SentencePiece unigram model.
    """
    processor = sentencepiece.SentencePieceProcessor(
        model_proto=proto.SerializeToString()
    )
    # SentencePiece may put a space before the text that follows a sentinel. Metaspace
    # does so if its prepend_scheme is "always".
    after_sentinel = processor.encode("<extra_id_0>,", out_type=str)[1]
    prepend_scheme = "always" if after_sentinel.startswith("\u2581") else "first"
    if "<extra_id_" not in proto.pieces[-1].piece:
        data.add_sentinels(proto, data.SENTINELS)
    vocab, added_tokens = [], []
    for number, piece in enumerate(proto.pieces):
        text = piece.piece.replace("\u2581<extra_id_", "<extra_id_")
        vocab.append([text, piece.score])
        if number < 3 or "<extra_id_" in text:
            # A sentinel includes the space before it (lstrip).
            token = {"id": number, "content": text, "lstrip": number > 2, **TOKEN_FLAGS}
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

A T5 model at step {step:,}, written by plain T5. The latest results of its evaluations:

"""


def write_model_card(folder, weights, run_dir):
    """Write README.md, the model card of a Hugging Face directory.

    The card contains the latest results of the evaluations in the metrics.jsonl of
    `run_dir`.
    """
    results = {}
    for line in partition.read_metrics_file(Path(run_dir, "metrics.jsonl")):
        if line["step"] <= weights.step:
            results |= {name: value for name, value in line.items() if "_eval/" in name}
    card = MODEL_CARD.format(name=weights.cfg.name, step=weights.step)
    card += "".join(f"- {name}: {value:.4g}\n" for name, value in results.items())
    (folder / "README.md").write_text(card)


# ---- writing T5X -----------------------------------------------------------------------


def write_t5x(folder, weights, dtype):
    """Write Weights as a T5X checkpoint, a msgpack file of version 3 and zarr arrays.

    dtype: the NumPy type of the written weights. Optimizer slots are always float32.
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
            "The converted checkpoint has no Adafactor state. T5X can evaluate it as it "
            "is; to fine-tune from it in T5X, turn on fallback_to_scratch."
        )
    for entry in entries:
        array = weights.arrays[entry.name, entry.layer].read()
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
        # gzip, which T5X uses, saves 7 % of the size but takes ten times as long.
        "compressor": None,
    }
    spec = {"driver": "zarr", "dtype": array.dtype.name, "metadata": metadata}
    kvstore = {"driver": "file", "path": str(folder / name)}
    try:
        store = tensorstore.open({**spec, "kvstore": kvstore}, create=True).result()
        store.write(array).result()
    except ValueError as error:  # a full disk is a ValueError in TensorStore
        raise OSError(str(error)) from error
    return {**spec, "kvstore": {"driver": "file", "path": f"{name}/"}}


# ---- the command -----------------------------------------------------------------------

WRITERS = {"plain": write_plain, "hf": write_hf, "t5x": write_t5x}


@contextlib.contextmanager
def atomic_destination(destination):
    """Yield a temporary folder, and rename the folder to `destination` at the end.

    If an exception is raised, the temporary folder is removed and `destination` is not
    made.
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
    """Convert the model `source` to the format `to`, and write it as `destination`.

    dtype: the NumPy type of the written parameters. step: see open_any. The written model
    is read again and compared with the source before `destination` appears.
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
        # Every array is read twice: once to write it, once to compare it.
        bar = data.progress_bar("converting", "array", 2 * len(weights.arrays))

        def read(tensor):
            bar.update()
            return tensor.read()

        for key, tensor in weights.arrays.items():
            weights.arrays[key] = Tensor(tensor.shape, functools.partial(read, tensor))
        try:
            WRITERS[to](folder, weights, dtype)
            if to == "hf":
                write_model_card(folder, weights, source)
            elif weights.vocabulary:
                configs.write_file(folder / "spiece.model", weights.vocabulary)
        # For instance, the disk may be full.
        except (OSError, safetensors.SafetensorError) as error:
            raise OSError(errno.EIO, str(error)[:200], str(destination)) from error
        largest, count = compare(weights, open_any(folder), dtype)
        bar.close()
        print(
            f"compared {count:,} arrays with the source: largest difference {largest:g}"
        )
    print(f"done     {destination}, in {time.perf_counter() - start:.2f} s", flush=True)


def compare(weights, written, dtype):
    """Compare two Weights, and return the largest difference and the number of arrays.

    weights: the source. written: what was written. A difference can only come from
    rounding to dtype. Raises an OSError if a written array is not the rounded array of
    the source.
    """
    largest, count = 0.0, 0
    for key, tensor in written.arrays.items():
        # The scalars of a run count steps and updates. T5X counts only steps.
        if key not in weights.arrays or not tensor.shape:
            continue
        expected = np.asarray(weights.arrays[key].read(), np.float32)
        found = np.asarray(tensor.read(), np.float32)
        kind = dtype if key[0].startswith("params/") else np.float32
        rounded = expected.astype(kind).astype(np.float32)
        if not np.array_equal(rounded, found, equal_nan=True):
            raise OSError(
                f"{key[0]} was written, but different values were read back: the disk or "
                f"the memory is faulty. Nothing was kept."
            )
        largest = max(largest, float(np.nanmax(np.abs(expected - found), initial=0.0)))
        count += 1
    return largest, count


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
