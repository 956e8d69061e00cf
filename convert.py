"""How weights come and go: Hugging Face, T5X, Mesh TensorFlow.

- Every format is a table of names: ours is one array for the layers of a stack, theirs an array for
  each layer, perhaps transposed.
- A reader gives Weights: dimensions, and a function that reads one layer of one parameter.
- A writer takes Weights; a model passes layer by layer, so it may be larger than memory. What was
  written is read again and compared before it gets its name.

    python convert.py t5-v1_1-small/ runs/t5_1_1_small     any of these -> a run directory
    python convert.py runs/tiny tiny_hf --to hf            a run, or any of these -> Hugging Face
    python convert.py runs/tiny checkpoint_1500 --to t5x                          -> T5X

What SRC is, and all dimensions, are found in SRC.
"""

import base64
import contextlib
import errno
import functools
import itertools
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
import msgpack
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


class Tensors(NamedTuple):
    """The arrays of another library's file: {its name: shape}, and read(its name) -> array."""

    shapes: dict
    read: Callable


class Weights(NamedTuple):
    """A model on disk: what every reader returns and every writer takes. shapes: {name in our
    checkpoints: shape}, of parameters and, where there are any, slots. read(name, layer): a float
    array, one layer of a stacked one; of the others the layer is None."""

    cfg: Config
    step: int
    shapes: dict
    read: Callable
    vocabulary: bytes | None  # what a run keeps as spiece.model
    recipe: bytes | None = None  # what it keeps as recipe.py


# ---- names ---------------------------------------------------------------------------------------
# The one table. Mesh TensorFlow's and flax_model.msgpack's names are Hugging Face's respelled.

BLOCKS = {  # ours: (Hugging Face's, T5X's)
    "encoder/layers/attention": ("layer.0.SelfAttention", "attention"),
    "encoder/layers/mlp": ("layer.1.DenseReluDense", "mlp"),
    "decoder/layers/self_attention": ("layer.0.SelfAttention", "self_attention"),
    "decoder/layers/cross_attention": (
        "layer.1.EncDecAttention",
        "encoder_decoder_attention",
    ),
    "decoder/layers/mlp": ("layer.2.DenseReluDense", "mlp"),
}
MATRICES = {
    "query": ("q", "query"),
    "key": ("k", "key"),
    "value": ("v", "value"),
    "out": ("o", "out"),
    "gate": ("wi_0", "wi_0"),
    "up": ("wi_1", "wi_1"),
    "down": ("wo", "wo"),
}
OTHERS = {
    "embed": ("shared.weight", "token_embedder/embedding"),
    "unembed": ("lm_head.weight", "decoder/logits_dense/kernel"),
    **{
        f"{stack}/norm": (
            f"{stack}.final_layer_norm.weight",
            f"{stack}/{stack}_norm/scale",
        )
        for stack in ("encoder", "decoder")
    },
    **{
        f"{stack}/relative_bias": (
            f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
            f"{stack}/relpos_bias/rel_embedding",
        )
        for stack in ("encoder", "decoder")
    },
}


def parameter_names(path, layer, gated):
    """Our path of a parameter -> (Hugging Face's name, T5X's name)."""
    if path in OTHERS:
        return OTHERS[path]
    block, name = path.rsplit("/", 1)
    stack, ours = block.split("/layers/")
    hf, t5x = BLOCKS[block]
    if name == "norm":
        return (
            f"{stack}.block.{layer}.{hf.rsplit('.', 1)[0]}.layer_norm.weight",
            f"{stack}/layers_{layer}/pre_{ours}_layer_norm/scale",
        )
    if name == "relative_bias":  # UMT5, which T5X's network is not
        return (
            f"{stack}.block.{layer}.{hf}.relative_attention_bias.weight",
            f"{stack}/layers_{layer}/relpos_bias/rel_embedding",
        )
    hf_matrix, t5x_matrix = ("wi", "wi") if name == "up" and not gated else MATRICES[name]
    return (
        f"{stack}.block.{layer}.{hf}.{hf_matrix}.weight",
        f"{stack}/layers_{layer}/{t5x}/{t5x_matrix}/kernel",
    )


def flax_name(path, layer, gated):
    """encoder/block/0/layer/0/SelfAttention/q/kernel"""
    table = path == "embed" or path.endswith("relative_bias")
    last = "embedding" if table else "weight" if path.endswith("norm") else "kernel"
    return (
        parameter_names(path, layer, gated)[0].removesuffix("weight").replace(".", "/")
        + last
    )


def mtf_name(path, layer, gated):
    """encoder/block_000/layer_000/SelfAttention/q"""
    name = (
        parameter_names(path, layer, gated)[0].removesuffix(".weight").replace(".", "/")
    )
    name = re.sub(r"(block|layer)/(\d+)", lambda m: f"{m[1]}_{int(m[2]):03}", name)
    name = {"shared": "shared/embedding", "lm_head": "decoder/logits/kernel"}.get(
        name, name
    )
    return name + ("/scale" if "norm" in name else "/kernel" if "Dense" in name else "")


MTF_SLOTS = {"v": "_slot_v", "v_row": "_slot_vr", "v_col": "_slot_vc", "m": "_slot_m"}


class Format(NamedTuple):
    """A library's names of parameters, of an optimizer's slots, of the step; what it transposes."""

    name: Callable
    turned: Callable = lambda path: False  # whether its matrix is ours transposed
    slot: Callable | None = None
    step: str | None = None


HF = Format(lambda *path: parameter_names(*path)[0], lambda path: path != "embed")
FLAX = Format(flax_name, lambda path: path.endswith("relative_bias"))
T5X = Format(
    lambda *path: f"target/{parameter_names(*path)[1]}",
    step="state/step",
    slot=lambda name, slot: f"{name.replace('target', 'state/param_states', 1)}/{slot}",
)
MTF = Format(mtf_name, step="global_step", slot=lambda name, slot: name + MTF_SLOTS[slot])


def layers_of(name, shape):
    """The layers of an array of ours; [None] if it is not stacked."""
    return range(shape[0]) if "layers" in name.split("/") else [None]


def layer_shape(name, shape):
    """The shape of one layer."""
    return shape[1:] if "layers" in name.split("/") else shape


def parameter_places(cfg, form):
    """ModelConfig, Format -> {our name: (shape, [its name of each layer], whether turned)}."""
    gated = cfg.activation.startswith("gated_")
    return {
        f"params/{path}": (
            p.shape,
            [form.name(path, layer, gated) for layer in layers_of(path, p.shape)],
            len(layer_shape(path, p.shape)) == 2 and form.turned(path),
        )
        for path, p in partition.flatten(model.param_table(cfg)).items()
    }


def slot_places(params, form, factored):
    """The same for the slots of the parameters; factored(our path, its first name) -> bool.
    T5X's v_row is the mean over a matrix's longer axis, and over the second if both are equal; our
    row is the mean over the second always."""
    slots = {}
    for ours, (shape, theirs, _) in params.items():
        path, one = ours.removeprefix("params/"), layer_shape(ours, shape)
        names = {"full": ("v", one)}
        if len(one) == 2 and factored(path, theirs[0]):
            row, column = ("v_row", "v_col") if one[1] >= one[0] else ("v_col", "v_row")
            names = {"row": (row, one[:1]), "column": (column, one[1:])}
        for slot, (name, size) in names.items():
            slots[f"slots/{path}/{slot}"] = (
                shape[: len(shape) - len(one)] + size,
                [form.slot(n, name) for n in theirs],
                False,
            )
    return slots


def name_some(names):
    """Names -> "NAME" or "NAME and 3 more"."""
    first, *others = sorted(names)
    return first + (f" and {len(others):,} more" if others else "")


# ====== below: readers, writers, the command ======================================================


@contextlib.contextmanager
def explain_errors(path, kind="what its name says, or damaged"):
    """What a library stumbles over in somebody's file becomes a sentence that names the file."""
    try:
        yield
    except ImportError as error:
        raise UserError(
            f"Reading {path} needs a package ({error}): pip install it."
        ) from error
    except partition.CheckpointError as error:
        raise UserError(f"{error}: name another --step.") from error
    except Exception as error:  # there are as many kinds as libraries
        # which name it
        if isinstance(error, UserError) or getattr(error, "filename", None):
            raise
        said = f"{type(error).__name__}: {' '.join(str(error).split()):.200}"
        raise UserError(f"{path} is not {kind} ({said}): fetch it again.") from error


def model_from_shapes(tensors, form, source):
    """Tensors -> ModelConfig, as far as shapes tell; raises a UserError where they are not T5's."""

    def shape(path):
        name = form.name(path, 0, gated)
        if len(tensors.shapes.get(name, ())) != 2:
            raise UserError(
                f"{source} has no matrix {name}: it is incomplete, or not a T5 model."
            )
        return tensors.shapes[name][:: -1 if form.turned(path) else 1]

    def depth(stack):
        paths = [
            f"{block}/{name}"
            for block in BLOCKS
            if block.startswith(stack)
            for name in ("norm", *MATRICES)
        ]
        return next(
            i
            for i in itertools.count()
            if not any(form.name(path, i, True) in tensors.shapes for path in paths)
        )

    depths = {stack: depth(stack) for stack in ("encoder", "decoder")}
    if not depths["encoder"]:
        raise UserError(
            f"{source} has no encoder layers: it is not a T5 model"
            + (", but a decoder alone." if depths["decoder"] else ".")
        )
    if not depths["decoder"] and form.name("unembed", 0, True) in tensors.shapes:
        raise UserError(
            f"{source} has an output layer and no decoder layers: fetch it again."
        )
    gated = form.name("encoder/layers/mlp/gate", 0, True) in tensors.shapes
    heads, buckets = shape("encoder/relative_bias")
    vocab_size, d_model = shape("embed")
    width = shape("encoder/layers/attention/query")[1]
    if width % heads:
        raise UserError(
            f"{source}: {heads} heads cannot share width {width}: it is no T5."
        )
    return ModelConfig(
        vocab_size=vocab_size,
        d_model=d_model,
        d_ff=shape("encoder/layers/mlp/up")[1],
        d_kv=width // heads,
        num_heads=heads,
        num_layers=depths["encoder"],
        num_decoder_layers=depths["decoder"],
        relative_buckets=buckets,
        layer_biases=form.name("encoder/layers/attention/relative_bias", 1, True)
        in tensors.shapes,
        activation="gated_gelu" if gated else "relu",
        tied=form.name("unembed", 0, gated) not in tensors.shapes,
    )


def each_tensor(places):
    """What parameters() returns -> (their name, our name, layer, their shape, turned) of each."""
    for ours, (shape, theirs, turned) in places.items():
        for layer, name in zip(layers_of(ours, shape), theirs):
            yield (
                name,
                ours,
                layer,
                layer_shape(ours, shape)[:: -1 if turned else 1],
                turned,
            )


def to_weights(tensors, form, source, cfg, vocabulary, name="t5", ignored=()):
    """Tensors and the ModelConfig they should have -> Weights; refuses what does not fit."""
    found = parameter_places(cfg, form)
    wanted = {name: shape for name, _, _, shape, _ in each_tensor(found)}
    if missing := wanted.keys() - tensors.shapes.keys():
        raise UserError(
            f"{source} has no {name_some(missing)}: it is incomplete; fetch it again."
        )
    if wrong := [name for name in wanted if tensors.shapes[name] != wanted[name]]:
        raise UserError(
            f"{source}: {wrong[0]} has shape {list(tensors.shapes[wrong[0]])}, and the "
            f"others ask for {list(wanted[wrong[0]])}: fetch it again."
        )
    rest = set(tensors.shapes) - set(wanted) - {form.step, *ignored}
    of_optimizer = {
        name for name in rest if name.startswith("state/") or "_slot_" in name
    }
    if unknown := rest - of_optimizer:
        raise UserError(
            f"{source} has {name_some(unknown)}, which no T5 model has: plain T5 "
            f"converts T5 1.0, T5 1.1, mT5, UMT5, ByT5 and what descends from them."
        )
    if of_optimizer:

        def size(name, slot):
            return math.prod(tensors.shapes.get(form.slot(name, slot), (1,)))

        slots = slot_places(found, form, lambda path, name: size(name, "v_row") > 1)
        if all(
            tensors.shapes.get(name) == shape
            for name, _, _, shape, _ in each_tensor(slots)
        ) and all(size(name, "m") == 1 for name in wanted):
            found |= slots
        else:
            note(
                f"{source}: its optimizer is not Adafactor without momentum; the parameters alone "
                f"are converted."
            )
    step = int(tensors.read(form.step)) if form.step in tensors.shapes else 0

    def read(name, layer):
        _, theirs, turned = found[name]
        array = tensors.read(theirs[layer or 0])
        return array.T if turned else array

    bytes_of = vocabulary is not None and vocabulary.startswith(b"bytes")
    texts = DataConfig(source="python:", vocab="bytes" if bytes_of else "spiece.model")
    run = Config(name, cfg, texts, TrainConfig(steps=max(step, 1)))
    try:
        configs.check(run)
    except UserError as error:
        raise UserError(f"{source}: {error}") from error
    shapes = {name: shape for name, (shape, _, _) in found.items()}
    return Weights(run, step, shapes, read, vocabulary)


def read_vocabulary(folders, cfg, sentinels=data.SENTINELS):
    """spiece.model or tokenizer.json in one of the folders -> the bytes of a SentencePiece model;
    what stands for ByT5's; or None. sentinels: how many there are where the file has none."""
    path = next(
        (
            folder / name
            for name in ("spiece.model", "tokenizer.json")
            for folder in folders
            if (folder / name).is_file()
        ),
        None,
    )
    if not path:
        return b"bytes:0\n" if cfg.vocab_size == 384 else None
    if path.suffix == ".json":
        vocabulary = pieces_from_json(path).SerializeToString()
    else:
        vocabulary = path.read_bytes()
        if vocabulary[:4] in (b"byte", b"ids:"):  # a run's, without pieces
            return vocabulary
    proto = parse_sentencepiece(vocabulary, path)
    if sentinels != data.SENTINELS and "<extra_id_" not in proto.pieces[-1].piece:
        data.add_sentinels(proto, sentinels)
        vocabulary = proto.SerializeToString()
    if len(proto.pieces) > cfg.vocab_size:
        raise UserError(
            f"{path} has {len(proto.pieces):,} pieces and the model "
            f"{cfg.vocab_size:,} embeddings: it is of another model."
        )
    return vocabulary


def pieces_from_json(path):
    """The tokenizer.json of a Unigram model -> the ModelProto that gives the same ids, but where
    </s>, <pad> or <unk> are spelled in the text, or it ends with white space other than a space.
    Whatever a ModelProto cannot say is refused by name."""
    about = configs.read_json(path, {"model": {"vocab": list, "type?": str}})

    def parts(key, inside):
        part = about.get(key) or {"type": "Sequence", inside: []}
        return part[inside] if part["type"] == "Sequence" else [part]

    vocab = about["model"]
    normalizers = parts("normalizer", "normalizers")
    splits = [part["type"] for part in parts("pre_tokenizer", "pretokenizers")]
    spaces = [{"Regex": pattern} for pattern in (" {2,}", "[ \u2581]{2,}", "[ \u2581]+$")]
    strange = {
        vocab.get("type", "Unigram"),
        *splits,
        *(part["type"] for part in normalizers if part.get("pattern") not in spaces),
    }
    strange -= {"Unigram", "Precompiled", "Strip", "Metaspace", "WhitespaceSplit"}
    strange |= {"byte_fallback"} if vocab.get("byte_fallback") else set()
    strange |= {"no Metaspace"} - {f"no {split}" for split in splits}
    if strange:
        raise UserError(
            f"{path} has {name_some(strange)}, which a SentencePiece unigram model "
            f"cannot say: bring the model's spiece.model."
        )
    pieces = [piece.removeprefix("\u2581") for piece, _ in vocab["vocab"]]
    sentinels = sum("<extra_id_" in piece for piece in pieces)
    if pieces[len(pieces) - sentinels :] != [
        f"<extra_id_{k}>" for k in reversed(range(sentinels))
    ]:
        raise UserError(
            f"{path}: its sentinels do not count down to <extra_id_0>, the last piece."
        )
    proto = sentencepiece_model_pb2.ModelProto()
    # CONTROL, UNKNOWN; NORMAL is 1
    kinds = {**dict.fromkeys(range(2), 3), vocab["unk_id"]: 2}
    for number, (piece, score) in enumerate(vocab["vocab"][: len(pieces) - sentinels]):
        proto.pieces.add(piece=piece, score=score, type=kinds.get(number, 1))
    data.add_sentinels(proto, sentinels)
    trainer = proto.trainer_spec
    trainer.pad_id, trainer.eos_id, trainer.unk_id, trainer.bos_id = 0, 1, 2, -1
    rules = {}  # {text: what SentencePiece's normalization makes of it}
    if "WhitespaceSplit" in splits:
        rules |= dict.fromkeys(
            "\t\n\v\f\r\x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000", " "
        )
        rules |= {chr(i): " " for i in range(0x2000, 0x200B)}
    for part in normalizers:
        if part["type"] == "Precompiled":
            spec = sentencepiece_model_pb2.NormalizerSpec(
                precompiled_charsmap=base64.b64decode(part["precompiled_charsmap"])
            )
            rules |= sentencepiece.SentencePieceNormalizer(
                normalizer_spec=spec
            ).decompile()
    # what follows begins a word
    behind = " " * ("first" not in str(about["pre_tokenizer"]))
    rules |= {f"<extra_id_{k}>": f" <extra_id_{k}>{behind}" for k in range(sentinels)}
    if rules:
        compiled = sentencepiece.SentencePieceNormalizer(norm_map=list(rules.items()))
        proto.normalizer_spec.MergeFromString(compiled.serialized_normalizer_spec())
    return proto


def parse_sentencepiece(vocabulary, path="spiece.model"):
    """Bytes of a SentencePiece model -> its ModelProto."""
    proto = sentencepiece_model_pb2.ModelProto()
    with explain_errors(path, "a SentencePiece model"):
        proto.ParseFromString(vocabulary)
        proto.pieces[0]
    return proto


# ---- Hugging Face, read --------------------------------------------------------------------------

WEIGHT_FILES = ("model.safetensors", "flax_model.msgpack", "pytorch_model.bin")
PORTABLE_ACTIVATIONS = (
    "gated_gelu",
    "gated_silu",
    "relu",
)  # activations that mean the same elsewhere


def hf_file(folder):
    """Which of these lies there, whole or in shards; or None."""
    return next(
        (
            name
            for name in WEIGHT_FILES
            for end in ("", ".index.json")
            if (folder / f"{name}{end}").exists()
        ),
        None,
    )


def shards(folder, name):
    """[the file], or the files that NAME.index.json lists; and the tensors that it promises."""
    if (folder / name).exists():
        return [folder / name], set()
    index = configs.read_json(folder / f"{name}.index.json", {"weight_map": {str: str}})
    promised = index["weight_map"]
    files = sorted({folder / Path(file).name for file in promised.values()})
    if missing := {file.name for file in files if not file.exists()}:
        raise UserError(
            f"{folder} has no {name_some(missing)}, which its index lists: fetch it."
        )
    return files, set(promised)


def read_safetensors(file):
    """-> Tensors. The library validates what the header says of the bytes."""
    with explain_errors(file, "a whole safetensors file"):
        opened, shapes = safetensors.safe_open(file, "numpy"), {}
        for name in opened.keys():
            part = opened.get_slice(name)
            if part.get_dtype() not in ("F64", "F32", "F16", "BF16"):
                raise UserError(
                    f"{file}: {name} holds {part.get_dtype()}, not floating point: "
                    f"convert the model that was not quantized."
                )
            shapes[name] = tuple(part.get_shape())
    return Tensors(shapes, opened.get_tensor)


def read_pickle(file):
    """pytorch_model.bin, of any version of torch -> Tensors."""
    with explain_errors(file):
        import torch

        tensors = torch.load(
            file, "cpu", weights_only=True, mmap=zipfile.is_zipfile(file)
        )
    return Tensors(
        {name: tuple(tensor.shape) for name, tensor in tensors.items()},
        lambda name: tensors[name].float().numpy(),
    )


DIMENSIONS = (
    "vocab_size",
    "d_model",
    "d_ff",
    "d_kv",
    "num_heads",
    "num_layers",
    "num_decoder_layers",
)
WHOLE, NUMBER = (int, type(None)), (int, float)
HF_CONFIG = {  # what config.json may say of what is asked here
    "model_type?": str,
    "feed_forward_proj?": str,
    "tie_word_embeddings?": bool,
    "scale_decoder_outputs?": bool,
    "dropout_rate?": NUMBER,
    "layer_norm_epsilon?": NUMBER,
    "relative_attention_num_buckets?": WHOLE,
    "relative_attention_max_distance?": int,
    **{f"{name}?": WHOLE for name in DIMENSIONS},
}
SPECIAL = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}


def open_hf(folder, allow_pickle=False):
    """Hugging Face directory -> Weights."""
    config = configs.read_json(folder / "config.json", HF_CONFIG)
    if (kind := config.get("model_type", "t5")) not in ("t5", "mt5", "umt5"):
        raise UserError(
            f"{folder} holds a model of type {kind}: convert.py knows t5, mt5, umt5."
        )
    generation, tokenizer = (
        configs.read_json(folder / name, dict) if (folder / name).exists() else {}
        for name in ("generation_config.json", "tokenizer_config.json")
    )
    for about, (token, wanted) in itertools.product(
        (config, generation), SPECIAL.items()
    ):
        if (said := about.get(token)) not in (None, wanted, [wanted]):
            raise UserError(
                f"{folder} says {token} {said}, and plain T5's is {wanted}, so its "
                f"answers would be others: serve it with transformers."
            )
    name = hf_file(folder)
    files, promised = shards(folder, name)
    if name.endswith(".bin") and not allow_pickle:
        raise UserError(
            f"{files[0]} is a pickle, which can run any program: add --allow_pickle if "
            f"you trust where it comes from."
        )
    form = FLAX if name.endswith(".msgpack") else HF
    read = {".bin": read_pickle, ".msgpack": read_msgpack}.get(
        Path(name).suffix, read_safetensors
    )
    parts = {name: part for part in map(read, files) for name in part.shapes}
    tensors = Tensors(
        {name: part.shapes[name] for name, part in parts.items()},
        lambda name: parts[name].read(name),
    )
    if lost := promised - set(tensors.shapes):
        raise UserError(
            f"{folder} has no {name_some(lost)}, which its index lists: fetch it again."
        )
    tensors, ignored = settle_embeddings(tensors, form, config, folder)
    cfg = settle_config(model_from_shapes(tensors, form, folder), config, folder)
    byt5 = "ByT5" in str(tokenizer.get("tokenizer_class"))
    vocabulary = (
        b"bytes:0\n"
        if byt5
        else read_vocabulary([folder], cfg, tokenizer.get("extra_ids") or data.SENTINELS)
    )
    return to_weights(tensors, form, folder, cfg, vocabulary, kind, ignored)


def settle_embeddings(tensors, form, config, folder):
    """-> (Tensors with one embedding, and an output layer unless it is tied; names to ignore).
    Whether the two are one is decided by the tensors; config.json says whether the logits are
    scaled by d_model^-0.5. Ours are if and only if the two are one, so an output layer is made
    where Hugging Face's model is otherwise."""
    embed, head = form.name("embed", 0, True), form.name("unembed", 0, True)
    copies = {
        embed.replace("shared", stack + embed[6] + "embed_tokens")
        for stack in ("encoder", "decoder")
    }
    tables = [name for name in (embed, *sorted(copies)) if name in tensors.shapes]
    if not tables:
        raise UserError(f"{folder} has no {embed}: it is incomplete, or not a T5 model.")
    table = tables[0]
    for name in tables[1:]:
        if not np.array_equal(tensors.read(name), tensors.read(table)):
            raise UserError(
                f"{folder}: {table} and {name} differ: plain T5 has one embedding."
            )

    def as_head():
        array = tensors.read(table)
        return array if form.turned("unembed") else array.T

    tied = head not in tensors.shapes or np.array_equal(tensors.read(head), as_head())
    alone = not any(name == head or name.startswith("decoder") for name in tensors.shapes)
    flag = alone or config.get("tie_word_embeddings", tied)
    if head not in tensors.shapes and not flag and "scale_decoder_outputs" not in config:
        raise UserError(
            f"{folder} has no {head}, and by its config.json the output layer is not "
            f"the embedding: fetch it again."
        )
    scaled = alone or config.get(
        "scale_decoder_outputs", flag and config.get("model_type") != "mt5"
    )
    shapes = tensors.shapes | {embed: tensors.shapes[table]}
    made = {embed: lambda: tensors.read(table)}  # what is not read as it stands
    if tied and scaled:
        shapes.pop(head, None)
    elif tied:
        shapes[head], made[head] = as_head().shape, as_head
    elif scaled:
        made[head] = lambda: tensors.read(head) * np.float32(shapes[embed][1] ** -0.5)

    def read(name):
        return made[name]() if name in made else tensors.read(name)

    # the last is in T5 1.0's first files and was never used
    unused = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    return Tensors(shapes, read), {*copies, unused}


def settle_config(cfg, config, folder):
    """ModelConfig of the tensors, and config.json -> ModelConfig; refuses what contradicts it."""
    said = {
        "num_decoder_layers": config.get("num_layers"),
        **config,
        "relative_buckets": config.get("relative_attention_num_buckets"),
        "activation": config.get("feed_forward_proj", "relu").replace("-", "_"),
    }
    for name in (
        "relative_buckets",
        *DIMENSIONS[: None if cfg.num_decoder_layers else -1],
    ):
        if said.get(name) not in (None, getattr(cfg, name)):
            raise UserError(
                f"{folder}: config.json says {name} {said[name]}, the weights have "
                f"{getattr(cfg, name)}: fetch both again."
            )
    if said["activation"] not in PORTABLE_ACTIVATIONS:
        raise UserError(
            f"{folder}: activation {said['activation']} is none of {', '.join(PORTABLE_ACTIVATIONS)}."
        )
    if said["activation"].startswith("gated_") != cfg.activation.startswith("gated_"):
        raise UserError(
            f"{folder}: config.json says feed_forward_proj {said['activation']}, and "
            f"the weights have {cfg.activation}'s matrices: fetch both again."
        )
    if said.get("layer_norm_epsilon", 1e-6) != 1e-6:
        raise UserError(
            f"{folder}: layer_norm_epsilon {said['layer_norm_epsilon']} is not 1e-6."
        )
    return replace(
        cfg,
        activation=said["activation"],
        dropout=said.get("dropout_rate", 0.1),
        relative_max_distance=said.get("relative_attention_max_distance", 128),
    )


def read_msgpack(path):
    """A msgpack file of Flax -> Tensors. Of arrays only places and shapes are kept; a map that
    stands for one array, and a leaf that is no array, are read as what they are."""
    places, shapes = {}, {}

    def part(start, stop):
        with open(path, "rb") as file:
            file.seek(start)
            return file.read(stop - start)

    def read(name):
        return flax.serialization.msgpack_restore(part(*places[name]))

    def walk(unpacker, prefix):
        start, keys = unpacker.tell(), set()
        for _ in range(unpacker.read_map_header()):
            key, at = unpacker.unpack(), unpacker.tell()
            keys.add(key)
            first = part(at, at + 1)[0]
            if first >> 4 == 8 or first in (0xDE, 0xDF):  # a map
                walk(unpacker, f"{prefix}{key}/")
            else:
                shapes[f"{prefix}{key}"] = np.shape(unpacker.unpack())
                places[f"{prefix}{key}"] = at, unpacker.tell()
        if keys & {"metadata", "__msgpack_chunked_array__"}:
            for name in [name for name in places if name.startswith(prefix)]:
                del places[name], shapes[name]
            name = prefix.removesuffix("/")
            places[name] = start, unpacker.tell()
            array = read(name)
            shapes[name] = (
                tuple(array["metadata"]["shape"]) if "metadata" in keys else array.shape
            )

    with explain_errors(path, "a whole msgpack file"), open(path, "rb") as file:
        walk(
            msgpack.Unpacker(
                file,
                max_buffer_size=0,
                strict_map_key=False,
                ext_hook=(
                    lambda _, data: np.broadcast_to(0, msgpack.unpackb(data, raw=True)[0])
                ),
            ),
            "",
        )
    return Tensors(shapes, read)


# ---- T5X and Mesh TensorFlow, read ---------------------------------------------------------------


def read_t5x(folder):
    """T5X's own checkpoint: the msgpack file `checkpoint`, and zarr arrays that it points to."""
    path = folder / "checkpoint" if folder.is_dir() else folder
    tensors = read_msgpack(path)
    version = tensors.read("version") if "version" in tensors.shapes else "unknown"
    if version != 3:
        raise UserError(
            f"{path} is a T5X checkpoint of version {version}, and plain T5 reads "
            f"version 3: restore and save it with a newer T5X."
        )

    def read(name):
        value = tensors.read(f"optimizer/{name}")
        if not isinstance(value, dict):
            return np.asarray(value)
        # before TensorStore 0.1.14 without kvstore
        place = value.get("kvstore", value)["path"]
        return stored(
            value["driver"],
            {"driver": "file", "path": str(path.parent / place)},
            fill_missing_data_reads=False,
        )

    return Tensors(
        {
            name.removeprefix("optimizer/"): shape
            for name, shape in tensors.shapes.items()
            if "/" in name
        },
        read,
    )


def read_orbax(folder):
    """T5X's checkpoint as Orbax writes it today."""
    about = configs.read_json(
        folder / "_METADATA", {"tree_metadata": {str: {"key_metadata": [{"key": str}]}}}
    )
    names = [
        "/".join(part["key"] for part in entry["key_metadata"])
        for entry in about["tree_metadata"].values()
    ]
    driver = "zarr3" if about.get("use_zarr3") else "zarr"

    def place(name):
        name = name.replace("/", ".")
        if about.get("use_ocdbt"):
            return {
                "driver": "ocdbt",
                "base": f"file://{folder.resolve()}/",
                "path": f"{name}/",
            }
        return {"driver": "file", "path": str(folder / name)}

    return Tensors(
        {name: stored(driver, place(name), read=False) for name in names},
        lambda name: stored(driver, place(name)),
    )


def stored(driver, place, read=True, **options):
    """A zarr array of TensorStore's -> NumPy array, or its shape."""
    spec = {"driver": driver, "kvstore": place, **options}
    with explain_errors(place["path"], "a whole array"):
        store = tensorstore.open(spec, open=True).result()
        return store.read().result() if read else store.shape


def read_mtf(prefix):
    """Mesh TensorFlow's checkpoint -> Tensors; its norms have had several names."""
    from tensorflow.train import load_checkpoint

    def plain(name):
        name = re.sub(
            r"^(encoder|decoder)/(rms|layer)_norm", r"\1/final_layer_norm", name
        )
        return re.sub(r"(layer_\d+)/rms_norm", r"\1/layer_norm", name)

    reader = load_checkpoint(str(prefix))
    shapes = reader.get_variable_to_shape_map()
    theirs = {plain(name): name for name in shapes}
    return Tensors(
        {name: tuple(shapes[old]) for name, old in theirs.items()},
        lambda name: np.asarray(reader.get_tensor(theirs[name])),
    )


def open_google(source, tensors, form):
    """A checkpoint of T5X or Mesh TensorFlow -> Weights."""
    folders = [source if source.is_dir() else source.parent]
    folders += [source.parent] if source.name.startswith("checkpoint_") else []  # its run
    cfg = model_from_shapes(tensors, form, source)
    cfg = replace(cfg, activation=gin_activation(folders) or cfg.activation)
    return to_weights(tensors, form, source, cfg, read_vocabulary(folders, cfg))


def gin_activation(folders):
    """What a Gin file beside the checkpoint says of the activation, or None."""
    for path in (
        folder / name
        for folder in folders
        for name in ("config.gin", "operative_config.gin")
    ):
        text = path.read_text() if path.exists() else ""
        if found := re.search(
            r"(mlp_activations|DenseReluDense\.activation) *= *(.*)", text
        ):
            words = re.findall(r"\w+", found[2].replace("swish", "silu"))
            name = "gated_" * ("linear" in words) + words[0]
            if name not in PORTABLE_ACTIVATIONS:
                raise UserError(
                    f"{path} says {found[0]}, an activation that plain T5 has not."
                )
            return name
    return None


# ---- a run, read ---------------------------------------------------------------------------------


def open_plain(checkpoint, run_dir):
    """One of a run's checkpoints -> Weights."""
    manifest = partition.read_manifest(checkpoint)
    arrays, cfg = manifest["arrays"], configs.load_run(run_dir)
    shapes = {name: tuple(array["shape"]) for name, array in arrays.items()}
    for name, (shape, _, _) in parameter_places(cfg.model, HF).items():
        if shapes.get(name) != shape:
            raise UserError(
                f"{checkpoint}: {name} has shape {shapes.get(name)}, and config.json "
                f"asks for {shape}: they are of two runs."
            )

    @functools.lru_cache(1)
    def verified(name):
        """The pieces of the array that is being read, perhaps layer by layer."""
        return {}

    def read(name, layer):
        index = [slice(None)] * len(shapes[name])
        if layer is not None:
            index[0] = slice(layer, layer + 1)
        part = partition.read_slice(checkpoint, arrays[name], index, verified(name))
        return part if layer is None else part[0]

    vocabulary, recipe = (
        path.read_bytes() if path.exists() else None
        for path in (run_dir / "spiece.model", run_dir / "recipe.py")
    )
    return Weights(cfg, manifest["step"], shapes, read, vocabulary, recipe)


def open_any(source, step=None, allow_pickle=False):
    """Path of anything -> Weights."""
    with explain_errors(source):
        weights = reader_of(source, step, allow_pickle)
    return weights._replace(read=explain_errors(source)(weights.read))


def reader_of(source, step, allow_pickle):
    """What SRC is, is seen by the files that lie there."""
    # T5X, Mesh TF
    path, theirs = Path(source), r"checkpoint_(\d+)|model\.ckpt-(\d+)\.index"
    runs = partition.Checkpoints(path)
    steps = {step: runs.path(step) for step in runs.steps()} or {
        int(number[1] or number[2]): found.with_suffix("")
        for found in path.glob("*")
        if (number := re.fullmatch(theirs, found.name))
    }
    if step is not None and step not in steps:
        there = (
            ", ".join(map(str, sorted(steps))) or "one set of weights: leave out --step"
        )
        raise UserError(f"{source} has no step {step:,}; it has {there}.")
    chosen = steps.get(max(steps, default=None) if step is None else step)
    if os.path.exists(f"{source}.index"):
        return open_google(path, read_mtf(path), MTF)
    if path.is_file():
        return open_google(path, read_t5x(path), T5X)
    if (path / "manifest.json").exists():
        return open_plain(path, path / ".." / "..")
    if partition.Checkpoints(path).steps():
        return open_plain(chosen, path)
    if hf_file(path):
        return open_hf(path, allow_pickle)
    for folder in (path / "state", path):
        if (folder / "_METADATA").exists():
            return open_google(path, read_orbax(folder), T5X)
    if chosen:
        return reader_of(chosen, None, allow_pickle)
    if (path / "checkpoint").is_file():
        return open_google(path, read_t5x(path), T5X)
    raise UserError(
        f"{source} is no run directory, no Hugging Face directory with weights, and no "
        f"checkpoint of T5X or Mesh TensorFlow: name one."
    )


# ---- written: a run ------------------------------------------------------------------------------


def write_plain(folder, weights, dtype):
    """Weights -> a run directory."""
    tables = {name: shape for name, shape in weights.shapes.items() if shape}
    scalars = {
        name: int(weights.read(name, None)) for name in weights.shapes.keys() - tables
    }
    # T5X counts updates by the step
    if any(name.startswith("slots/") for name in tables):
        scalars = {"step": weights.step, "count": weights.step, "skipped": 0, **scalars}
    arrays = {
        name: {"shape": shape, "dtype": "float32"} for name, shape in tables.items()
    }
    arrays |= {name: {"shape": (), "dtype": "int32"} for name in scalars}

    def pieces():
        for name, value in scalars.items():
            yield name, [], np.array(value, np.int32)
        for name, shape in tables.items():
            for layer in layers_of(name, shape):
                array = np.asarray(weights.read(name, layer), np.float32)
                array = array if layer is None else array[None]
                rows = max(1, len(array) * partition.MAX_SHARD_BYTES // array.nbytes)
                for start in range(0, len(array), rows):
                    part = np.ascontiguousarray(array[start : start + rows])
                    first = start + (layer or 0)
                    yield (
                        name,
                        [[first, first + len(part)], *([0, n] for n in shape[1:])],
                        part,
                    )

    path = partition.Checkpoints(folder).path(weights.step)
    partition.write_checkpoint(path, arrays, pieces(), weights.step)
    configs.save_run(weights.cfg, folder)
    if weights.recipe:
        configs.write_file(folder / "recipe.py", weights.recipe)


# ---- written: Hugging Face -----------------------------------------------------------------------

SHARD_BYTES = 5_000_000_000


def write_hf(folder, weights, dtype):
    """Weights -> a directory that transformers reads."""
    cfg = weights.cfg.model
    files, size = [[]], 0
    for tensor in each_tensor(parameter_places(cfg, HF)):
        nbytes = math.prod(tensor[3]) * dtype.itemsize
        if files[-1] and size + nbytes > SHARD_BYTES:
            files, size = [*files, []], 0
        files[-1].append(tensor)
        size += nbytes
    places, total = {}, 0
    for number, tensors in enumerate(files, 1):
        file = (
            "model.safetensors"
            if len(files) == 1
            else f"model-{number:05}-of-{len(files):05}.safetensors"
        )
        arrays = {}
        for name, ours, layer, _, turned in tensors:
            array = weights.read(ours, layer)
            arrays[name] = np.ascontiguousarray(array.T if turned else array, dtype)
        safetensors.numpy.save_file(arrays, folder / file, {"format": "pt"})
        places |= dict.fromkeys(arrays, file)
        total += sum(array.nbytes for array in arrays.values())
    if len(files) > 1:
        write_json(
            folder / "model.safetensors.index.json",
            {"metadata": {"total_size": total}, "weight_map": places},
        )
    # transformers 5 does not scale a tied MT5's logits, and scales all of UMT5's
    mt5 = weights.cfg.name.startswith("mt5") or cfg.vocab_size == 250112
    if cfg.layer_biases and not cfg.tied:
        note(
            "transformers 5 scales a UMT5's logits by d_model^-0.5, as if they were tied: greedy "
            "answers are equal, beams and scores are not. transformers 4.57 is exact."
        )
    family = "umt5" if cfg.layer_biases else "mt5" if mt5 and not cfg.tied else "t5"
    whole = cfg.num_decoder_layers > 0
    kind = "ForConditionalGeneration" if whole else "EncoderModel"
    write_json(
        folder / "config.json",
        {
            "architectures": [family.upper() + kind],
            "model_type": family,
            "is_encoder_decoder": whole,
            "use_cache": whole,
            "dtype": dtype.name,
            **SPECIAL,
            **{name: getattr(cfg, name) for name in DIMENSIONS},
            "feed_forward_proj": cfg.activation.replace("_", "-"),
            "tie_word_embeddings": cfg.tied,
            "relative_attention_num_buckets": cfg.relative_buckets,
            "relative_attention_max_distance": cfg.relative_max_distance,
            "dropout_rate": cfg.dropout,
            "layer_norm_epsilon": 1e-6,
        },
    )
    write_json(folder / "generation_config.json", SPECIAL)
    write_tokenizer(folder, weights.vocabulary, cfg)


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2) + "\n")


def write_tokenizer(folder, vocabulary, cfg):
    """spiece.model, and tokenizer.json with the same ids; says where Hugging Face's differ."""
    about = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    if vocabulary is None or vocabulary.startswith(b"ids:"):  # nothing that is text
        return
    if vocabulary.startswith(b"bytes"):
        note(
            "warning: Hugging Face's ByT5Tokenizer gives <extra_id_0> and its like other ids."
        )
        about |= {
            "tokenizer_class": "ByT5Tokenizer",
            "extra_ids": max(0, cfg.vocab_size - 259),
        }
    else:
        proto = parse_sentencepiece(vocabulary)
        if proto.trainer_spec.model_type != proto.trainer_spec.UNIGRAM:
            raise UserError(
                "The vocabulary is no unigram model, and Hugging Face's T5Tokenizer "
                "would read nearly all text otherwise: move spiece.model out of the "
                "run to write the weights alone."
            )
        (folder / "spiece.model").write_bytes(vocabulary)
        about["tokenizer_class"] = "PreTrainedTokenizerFast"
        write_json(folder / "tokenizer.json", tokenizer_json(proto))
        note(
            "transformers gives the same ids but where a sentinel has no space before it, which "
            "is text here, and where </s>, <pad> or <unk> are spelled in the text."
        )
    write_json(folder / "tokenizer_config.json", about)


def tokenizer_json(proto):
    """ModelProto -> what the library tokenizers reads. Sentinels take the space before them."""
    begins = (
        sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
        .encode("<extra_id_0>,", out_type=str)[1]
        .startswith("\u2581")
    )
    if "<extra_id_" not in proto.pieces[-1].piece:
        data.add_sentinels(proto, data.SENTINELS)
    pieces = [
        piece.piece.replace("\u2581<extra_id_", "<extra_id_") for piece in proto.pieces
    ]
    special = [
        (number, piece)
        for number, piece in enumerate(pieces)
        if number < 3 or "<extra_id_" in piece
    ]
    charsmap = base64.b64encode(proto.normalizer_spec.precompiled_charsmap).decode()
    metaspace = {
        "type": "Metaspace",
        "replacement": "\u2581",
        "split": True,
        "prepend_scheme": "always" if begins else "first",
    }  # behind a sentinel

    def replaced(pattern, content):
        return {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}

    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": number,
                "content": piece,
                "single_word": False,
                "lstrip": number > 2,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for number, piece in special
        ],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                *[{"type": "Precompiled", "precompiled_charsmap": charsmap}]
                * bool(charsmap),
                replaced("[ \u2581]+$", ""),
                replaced("[ \u2581]{2,}", " "),
            ],
        },
        "pre_tokenizer": metaspace,
        "decoder": metaspace,
        "post_processor": {
            "type": "TemplateProcessing",
            "pair": [],
            "single": [
                {"Sequence": {"id": "A", "type_id": 0}},
                {"SpecialToken": {"id": "</s>", "type_id": 0}},
            ],
            "special_tokens": {"</s>": {"id": "</s>", "ids": [1], "tokens": ["</s>"]}},
        },
        "model": {
            "type": "Unigram",
            "unk_id": 2,
            "byte_fallback": proto.trainer_spec.byte_fallback,
            "vocab": [[piece, one.score] for piece, one in zip(pieces, proto.pieces)],
        },
    }


def model_card(weights, run_dir):
    """README.md of a Hugging Face directory: what the model is, and its last evaluations."""
    found = {
        name: value
        for line in partition.read_metrics_file(Path(run_dir, "metrics.jsonl"))
        for name, value in line.items()
        if "_eval/" in name and line["step"] <= weights.step
    }
    number = model.count_params(model.param_table(weights.cfg.model))
    rows = "".join(f"| {name} | {value:.4g} |\n" for name, value in found.items())
    return (
        f"""---
library_name: transformers
pipeline_tag: text2text-generation
tags:
- t5
---

# {weights.cfg.name}

A T5 encoder-decoder with {number:,} parameters, at step {weights.step:,}, written by plain T5.
transformers reads it where torch, sentencepiece and protobuf are installed.
"""
        + f"\n| last evaluation | |\n|---|---|\n{rows}" * bool(rows)
    )


# ---- written: T5X --------------------------------------------------------------------------------


def write_t5x(folder, weights, dtype):
    """Weights -> a checkpoint directory of T5X: version 3, a msgpack file beside zarr arrays."""
    if weights.cfg.model.layer_biases:
        raise UserError(
            "T5X's network has one table of position biases for a stack, and this "
            "UMT5 has one in each layer: convert it --to hf."
        )
    places = parameter_places(weights.cfg.model, T5X)
    tree = {T5X.step: np.array(weights.step, np.int32)}
    slots = slot_places(
        places, T5X, lambda path, name: f"slots/{path}/row" in weights.shapes
    )
    if set(slots) <= set(weights.shapes):
        tree |= {
            T5X.slot(name, slot): np.zeros(1, np.float32)  # it has all four of each
            for name, *_ in each_tensor(places)
            for slot in MTF_SLOTS
        }
        places |= slots
    else:
        note(
            "There are no slots of Adafactor: T5X evaluates the checkpoint, and fine-tunes from "
            "it with fallback_to_scratch."
        )
    for name, ours, layer, _, _ in each_tensor(places):
        array = weights.read(ours, layer)
        if name.endswith(("v_row", "v_col")):
            tree[name] = np.array(array)
        else:
            kind = dtype if ours.startswith("params/") else np.float32
            tree[name] = write_store(
                folder, name.replace("/", "."), np.asarray(array, kind)
            )
    tree = flax.traverse_util.unflatten_dict(tree, sep="/")
    configs.write_file(
        folder / "checkpoint",
        flax.serialization.msgpack_serialize({"version": 3, "optimizer": tree}),
    )


def write_store(folder, name, array):
    """Write a zarr array -> what T5X's index says about it."""
    # chunks of 64 MiB
    rows = min(len(array), max(1, len(array) * (1 << 26) // array.nbytes))
    spec = {
        "driver": "zarr",
        "dtype": array.dtype.name,
        "metadata": {
            "shape": list(array.shape),
            "chunks": [rows, *array.shape[1:]],
            "compressor": None,
        },
    }  # T5X's own gzip saves 7 % and takes ten times as long
    place = {"driver": "file", "path": str(folder / name)}
    try:
        tensorstore.open({**spec, "kvstore": place}, create=True).result().write(
            array
        ).result()
    except ValueError as error:  # TensorStore's name of what the disk refuses
        raise OSError(str(error)) from error
    return {**spec, "kvstore": {**place, "path": f"{name}/"}}


# ---- the command ---------------------------------------------------------------------------------

WRITERS = {"plain": write_plain, "hf": write_hf, "t5x": write_t5x}


@contextlib.contextmanager
def atomic_destination(destination):
    """A folder to write into, which becomes `destination` if nothing goes wrong."""
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise UserError(
            f"{destination} is there already: name another DST, or move it away."
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
    """Read, write, compare, and give the result its name."""
    began = time.perf_counter()
    with atomic_destination(destination) as folder:
        weights = open_any(source, step, allow_pickle)
        number = model.count_params(model.param_table(weights.cfg.model))
        print(
            f"source   {source}: {number:,} parameters, step {weights.step:,}", flush=True
        )
        if weights.vocabulary is None:
            note(
                f"warning: {source} has no vocabulary: what is written takes ids alone until a "
                f"spiece.model is put there."
            )
        bar = data.progress_bar(
            "converting",
            "array",
            2
            * sum(len(layers_of(name, shape)) for name, shape in weights.shapes.items()),
        )

        def read(name, layer, read=weights.read):
            bar.update()
            return read(name, layer)

        weights = weights._replace(read=read)
        try:
            WRITERS[to](folder, weights, dtype)
            if to == "hf":
                (folder / "README.md").write_text(model_card(weights, source))
            elif weights.vocabulary:
                configs.write_file(folder / "spiece.model", weights.vocabulary)
        except (OSError, safetensors.SafetensorError) as error:  # such as a full disk
            raise OSError(errno.EIO, str(error)[:200], str(destination)) from error
        largest, arrays = compare(weights, open_any(folder), dtype)
        bar.close()
        print(
            f"compared {arrays:,} arrays with the source: largest difference {largest:g}"
        )
    print(f"done     {destination}, in {time.perf_counter() - began:.2f} s", flush=True)


def compare(weights, written, dtype):
    """Read both, array by array -> (largest difference, arrays); raises where one is damaged."""
    largest, count = 0.0, 0
    for name in sorted(written.shapes.keys() & weights.shapes.keys()):
        kind = dtype if name.startswith("params/") else np.float32
        for layer in layers_of(name, written.shapes[name]):
            a, b = (
                np.asarray(one.read(name, layer), np.float32)
                for one in (weights, written)
            )
            if not np.array_equal(a.astype(kind).astype(np.float32), b, equal_nan=True):
                raise OSError(
                    f"{name} is not what was read a moment ago: the disk or the memory "
                    f"is damaged, nothing was kept"
                )
            largest = max(largest, float(np.nanmax(np.abs(a - b), initial=0.0)))
            count += 1
    return largest, count


def main(argv):
    args, changes = configs.parse_args(
        __doc__,
        argv,
        src_=dict(help="what to convert"),
        dst_=dict(help="a new folder"),
        to=dict(default="plain", choices=tuple(WRITERS)),
        dtype=dict(
            default="float32", choices=("float32", "bfloat16"), help="of the weights"
        ),
        step=dict(
            default="latest",
            help="which of several checkpoints: a number, latest or best",
        ),
        allow_pickle=dict(action="store_true", help="read pytorch_model.bin"),
    )
    if changes or args.config or args.run_dir:
        raise UserError(
            "What a model is, convert.py finds in SRC: leave out --config, --run_dir "
            "and --SECTION.FIELD."
        )
    for path in (args.src, args.dst):
        if configs.is_remote(path):
            raise UserError(f"convert.py reads and writes local folders: copy {path}.")
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
