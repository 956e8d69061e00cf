"""How weights come and go: Hugging Face, T5X, Mesh TensorFlow.

    python convert.py google-t5/ runs/t5_1_1_small       any of these -> a run directory
    python convert.py runs/tiny tiny_hf --to hf          a run, or any of these -> Hugging Face
    python convert.py runs/tiny checkpoint_1500 --to t5x                        -> T5X

What SRC is, and all dimensions, are found in SRC. A model passes layer by layer, so one far larger
than memory can be converted. What was written is read again and compared before it gets its name:
DST is there whole, or not at all.
"""

import contextlib
import functools
import itertools
import json
import os
import re
import shutil
import struct
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Callable, NamedTuple

import flax
import jax
import jax.numpy as jnp
import msgpack
import numpy as np
import tensorstore
from sentencepiece import sentencepiece_model_pb2

import configs
import model
import partition
from configs import Config, DataConfig, ModelConfig, TrainConfig, UserError, note

try:
    from safetensors import SafetensorError, safe_open
except ImportError:  # an extra
    safe_open, SafetensorError = None, ()


class Weights(NamedTuple):
    """A model that lies somewhere: what every reader returns and every writer takes.

    shapes: {name in our checkpoints: shape}, parameters and, where there are any, slots.
    read(name, layer): a float array, one layer of a stacked one; layer is None for the others.
    """

    cfg: Config
    step: int
    shapes: dict
    read: Callable
    vocabulary: bytes | None
    folder: Path  # where it lies


class Tensors(NamedTuple):
    """The same in the words of another library: {its name: shape}, and read(its name)."""

    shapes: dict
    read: Callable


# ---- names ---------------------------------------------------------------------------------------
# The one table. Hugging Face's names are Mesh TensorFlow's in other spelling.

BLOCKS = {  # ours: (Hugging Face's and Mesh TensorFlow's, T5X's)
    "encoder/layers/attention": ("layer.0.SelfAttention", "attention"),
    "encoder/layers/mlp": ("layer.1.DenseReluDense", "mlp"),
    "decoder/layers/self_attention": ("layer.0.SelfAttention", "self_attention"),
    "decoder/layers/cross_attention": ("layer.1.EncDecAttention", "encoder_decoder_attention"),
    "decoder/layers/mlp": ("layer.2.DenseReluDense", "mlp"),
}
MATRICES = {
    "query": ("q", "query"), "key": ("k", "key"), "value": ("v", "value"), "out": ("o", "out"),
    "gate": ("wi_0", "wi_0"), "up": ("wi_1", "wi_1"), "down": ("wo", "wo"),
}
OTHERS = {
    "embed": ("shared.weight", "token_embedder/embedding"),
    "unembed": ("lm_head.weight", "decoder/logits_dense/kernel"),
    **{f"{stack}/norm": (f"{stack}.final_layer_norm.weight", f"{stack}/{stack}_norm/scale")
       for stack in ("encoder", "decoder")},
    **{f"{stack}/relative_bias": (
        f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
        f"{stack}/relpos_bias/rel_embedding") for stack in ("encoder", "decoder")},
}


def names(path, layer, gated):
    """Our path of a parameter -> (Hugging Face's name, T5X's name)."""
    if path in OTHERS:
        return OTHERS[path]
    block, name = path.rsplit("/", 1)
    stack, (hf, t5x) = block.split("/")[0], BLOCKS[block]
    if name == "norm":
        place, block = hf.rsplit(".", 1)[0], block.rsplit("/", 1)[1]
        return (f"{stack}.block.{layer}.{place}.layer_norm.weight",
                f"{stack}/layers_{layer}/pre_{block}_layer_norm/scale")
    hf_matrix, t5x_matrix = ("wi", "wi") if name == "up" and not gated else MATRICES[name]
    return (f"{stack}.block.{layer}.{hf}.{hf_matrix}.weight",
            f"{stack}/layers_{layer}/{t5x}/{t5x_matrix}/kernel")


def hf_name(path, layer, gated):
    return names(path, layer, gated)[0]


def t5x_name(path, layer, gated):
    return "target/" + names(path, layer, gated)[1]


def flax_name(path, layer, gated):
    """In flax_model.msgpack: shared/embedding, encoder/block/0/layer/0/SelfAttention/q/kernel."""
    table = path == "embed" or path.endswith("relative_bias")
    last = "embedding" if table else "weight" if path.endswith("norm") else "kernel"
    return hf_name(path, layer, gated).removesuffix("weight").replace(".", "/") + last


def mtf_name(path, layer, gated):
    """shared/embedding, encoder/block_000/layer_000/SelfAttention/q."""
    name = hf_name(path, layer, gated).removesuffix(".weight").replace(".", "/")
    name = re.sub(r"(block|layer)/(\d+)", lambda m: f"{m[1]}_{int(m[2]):03}", name)
    name = {"shared": "shared/embedding", "lm_head": "decoder/logits/kernel"}.get(name, name)
    return name + ("/scale" if "norm" in name else "/kernel" if "Dense" in name else "")


def t5x_slot(name, slot):
    return f"state/param_states/{name.removeprefix('target/')}/{slot}"


def mtf_slot(name, slot):
    return f"{name}_slot_{ {'v': 'v', 'v_row': 'vr', 'v_col': 'vc'}[slot]}"


class Format(NamedTuple):
    """How a library calls a parameter, whether its matrix is ours transposed, its slots, step."""

    title: str
    name: Callable
    transposed: Callable = lambda path: False
    slot: Callable | None = None
    step: str = ""


HF = Format("Hugging Face", hf_name, lambda path: path != "embed")
FLAX = Format("Hugging Face", flax_name, lambda path: path.endswith("relative_bias"))
T5X = Format("T5X", t5x_name, slot=t5x_slot, step="state/step")
MTF = Format("Mesh TensorFlow", mtf_name, slot=mtf_slot, step="global_step")


def slots_of(shape, factored):
    """Shape of one layer's parameter -> {our slot: (T5X's slot, shape)} of Adafactor.

    T5X's v_row is the mean over the longer of a matrix's axes, over the second where they are
    equal; our row is the mean over the second always.
    """
    if not factored:
        return {"full": ("v", shape)}
    row, column = ("v_row", "v_col") if shape[1] >= shape[0] else ("v_col", "v_row")
    return {"row": (row, shape[:1]), "column": (column, shape[1:])}


def layers_of(name, shape):
    """The layers of an array of ours, [None] if it is not stacked."""
    return range(shape[0]) if "layers" in name.split("/") else [None]


def mapping(cfg, form, factored):
    """ModelConfig, Format -> {our name: (shape, [its name of each layer], whether transposed)}.

    factored(path, name of its first layer): whether its slots are; None where it has none.
    """
    found = {}
    for path, p in partition.flatten(model.param_table(cfg)).items():
        layers = layers_of(path, p.shape)
        theirs = [form.name(path, i, cfg.activation.startswith("gated_")) for i in layers]
        turned = len(p.shape) - (layers != [None]) == 2 and form.transposed(path)
        found[f"params/{path}"] = p.shape, theirs, turned
        if (how := factored(path, theirs[0])) is None:
            continue
        stack = p.shape[: layers != [None]]
        for slot, (name, shape) in slots_of(p.shape[len(stack) :], how).items():
            found[f"slots/{path}/{slot}"] = (*stack, *shape), [form.slot(n, name) for n in theirs], False
    return found


def plural(names):
    """A list of names -> "NAME" or "NAME and 3 more"."""
    names = sorted(names)
    return names[0] + (f" and {len(names) - 1:,} more" if len(names) > 1 else "")


# ---- what the weights say ------------------------------------------------------------------------


def derive(tensors, form, folder):
    """Tensors -> ModelConfig, as far as shapes tell; raises a UserError where they cannot be T5."""
    shapes = tensors.shapes

    def shape(path):
        name = form.name(path, 0, gated)
        if name not in shapes:
            raise UserError(f"{folder} has no {name}: it is incomplete, or not a T5 model.")
        if len(shapes[name]) != 2:
            raise UserError(f"{folder}: {name} has shape {list(shapes[name])}, not two axes: it is "
                            f"not a T5 model.")
        return shapes[name][::-1] if form.transposed(path) else shapes[name]

    def depth(stack):
        paths = [f"{block}/{name}" for block in BLOCKS if block.startswith(stack)
                 for name in ("norm", *MATRICES)]
        return next(i for i in itertools.count()
                    if not any(form.name(path, i, True) in shapes for path in paths))

    layers, decoder_layers = depth("encoder"), depth("decoder")
    for number, missing, other in ((layers, "encoder", "decoder"), (decoder_layers, "decoder", "encoder")):
        if not number:
            raise UserError(f"{folder} has no {missing} layers" + (
                f", only {article(other)}: plain T5 converts encoder-decoders."
                if layers or decoder_layers else ": it is not a T5 model."))
    gated = form.name("encoder/layers/mlp/gate", 0, True) in shapes
    heads, buckets = shape("encoder/relative_bias")
    vocab_size, d_model = shape("embed")
    width = shape("encoder/layers/attention/query")[1]
    if width % heads:
        raise UserError(f"{folder}: the attention's width {width} is no multiple of its {heads} "
                        f"heads: it is not a T5 model.")
    return ModelConfig(
        vocab_size=vocab_size, d_model=d_model, d_ff=shape("encoder/layers/mlp/up")[1],
        d_kv=width // heads, num_heads=heads, num_layers=layers,
        num_decoder_layers=decoder_layers, relative_buckets=buckets,
        activation="gated_gelu" if gated else "relu",
        tied=form.name("unembed", 0, gated) not in shapes)


def article(stack):
    return f"an {stack}" if stack[0] in "aeiou" else f"a {stack}"


def has_slots(tensors, form):
    """Function for `mapping`: whether a parameter's slots are factored in these tensors."""
    def factored(path, name):
        if not form.slot:
            return None
        row = tensors.shapes.get(form.slot(name, "v_row"), (1,))
        if row != (1,):
            return True
        return False if form.slot(name, "v") in tensors.shapes else None
    return factored


def weights_of(tensors, form, folder, cfg, vocabulary, ignored=()):
    """Tensors of a library and the ModelConfig they have -> Weights; refuses what does not fit."""
    found = mapping(cfg, form, has_slots(tensors, form))
    wanted = {}  # its name: (our name, shape of one layer in its orientation)
    for ours, (shape, theirs, turned) in found.items():
        one = tuple(shape[layers_of(ours, shape) != [None] :])
        wanted |= {name: one[::-1] if turned else one for name in theirs}
    params = {name for ours, (_, theirs, _) in found.items() if ours.startswith("params/")
              for name in theirs}
    if missing := params - set(tensors.shapes):
        raise UserError(f"{folder} has no {plural(missing)}: it is incomplete; fetch it again.")
    wrong = [name for name, shape in wanted.items() if tensors.shapes.get(name, shape) != shape]
    if wrong_params := sorted(params.intersection(wrong)):
        name = wrong_params[0]
        raise UserError(f"{folder}: {name} has shape {list(tensors.shapes[name])}, and the others "
                        f"ask for {list(wanted[name])}: it is damaged, or not a T5 model.")
    slots = bool(form.slot) and len(found) > len(partition.flatten(model.param_table(cfg)))
    others = {name for name in set(tensors.shapes) - set(wanted) - {form.step, *ignored}
              if not name.startswith("state/") and "_slot_" not in name}
    if others:
        raise UserError(f"{folder} has {plural(others)}, which no T5 model has: plain T5 converts "
                        f"T5 1.0, T5 1.1, mT5, ByT5 and their descendants.")
    momentum = [name for name, shape in tensors.shapes.items()
                if name.endswith(("/m", "_slot_m")) and shape != (1,)]
    if slots and (momentum or wrong or set(wanted) - set(tensors.shapes)
                  or not all(f"slots/{path}/full" in found or f"slots/{path}/row" in found
                             for path in partition.flatten(model.param_table(cfg)))):
        slots = False
        note(f"{folder}: the optimizer's slots are not those of Adafactor without momentum: "
             f"parameters only.")
    step = int(tensors.read(form.step)) if form.step in tensors.shapes else 0

    def read(name, layer):
        _, theirs, turned = found[name]
        array = tensors.read(theirs[layer or 0])
        return array.T if turned else array

    shapes = {name: shape for name, (shape, _, _) in found.items()
              if slots or name.startswith("params/")}
    return Weights(config_of(cfg, step, vocabulary), step, shapes, read, vocabulary, folder)


def config_of(cfg, step, vocabulary, family=None):
    """ModelConfig -> Config of a run that stands at this step."""
    family = family or {250112: "mt5", 384: "byt5"}.get(cfg.vocab_size, "t5")
    data = DataConfig(source="python:", vocab="bytes" if family == "byt5" else "spiece.model")
    return Config(family, cfg, data, TrainConfig(steps=max(step, 1)))


# ---- Hugging Face, read --------------------------------------------------------------------------


def shard_files(folder, name):
    """model.safetensors, or the shards that model.safetensors.index.json lists -> {tensor: file}.

    A file that is not sharded comes as {None: file}. None if there is neither.
    """
    if (folder / name).exists():
        return {None: folder / name}
    index = folder / f"{name}.index.json"
    if not index.exists():
        return None
    places = {tensor: folder / file for tensor, file in read_json(index)["weight_map"].items()}
    if missing := {path.name for path in places.values() if not path.exists()}:
        raise UserError(f"{index} names {plural(missing)}, which is not there: fetch it again.")
    return places


def read_json(path):
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}): fetch it again.") from error


def read_safetensors(folder, places):
    """-> Tensors. A file is opened for each tensor: pages that were read would stay in memory."""
    if not safe_open:
        raise UserError("Reading safetensors needs its library: pip install '.[hf]'.")
    shapes, where = {}, {}
    for file in sorted(set(places.values())):
        try:
            with safe_open(file, "numpy") as opened:
                for name in opened.keys():
                    part = opened.get_slice(name)
                    if part.get_dtype() not in ("F64", "F32", "F16", "BF16"):
                        raise UserError(f"{file}: {name} holds {part.get_dtype()}, not floating "
                                        f"point: convert a model that is not quantized.")
                    shapes[name], where[name] = tuple(part.get_shape()), file
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file} is incomplete or damaged ({error}): fetch it again.") from error
    if lost := set(places) - {None} - set(shapes):
        raise UserError(f"{folder}: the index promises {plural(lost)}, which no shard has: fetch "
                        f"it again.")

    def read(name):
        with safe_open(where[name], "numpy") as opened:
            return opened.get_tensor(name)

    return Tensors(shapes, read)


def read_pickle(folder, places, allow_pickle):
    if not allow_pickle:
        raise UserError(f"{folder} has its weights in a pickle, which can run any program: if you "
                        f"trust where it comes from, add --allow_pickle.")
    try:
        import torch
    except ImportError as error:
        raise UserError("Reading pytorch_model.bin needs torch: pip install torch.") from error
    tensors = {}
    for file in sorted(set(places.values())):
        try:
            tensors |= torch.load(file, "cpu", weights_only=True, mmap=True)
        except Exception as error:  # torch raises what it likes
            raise UserError(f"{file} cannot be read ({str(error).splitlines()[0]}): fetch it "
                            f"again.") from error
    if lost := set(places) - {None} - set(tensors):
        raise UserError(f"{folder}: the index promises {plural(lost)}, which no shard has: fetch "
                        f"it again.")
    return Tensors({name: tuple(tensor.shape) for name, tensor in tensors.items()},
                   lambda name: tensors[name].float().numpy())


def open_hf(folder, allow_pickle=False):
    """Hugging Face directory -> Weights."""
    config = read_json(folder / "config.json")
    kind = config.get("model_type", "t5")
    if kind not in ("t5", "mt5"):
        raise UserError(f"{folder} holds a model of type {kind}: plain T5 converts t5 and mt5.")
    form = HF
    if places := shard_files(folder, "model.safetensors"):
        tensors = read_safetensors(folder, places)
    elif (folder / "flax_model.msgpack").exists():
        form, tensors = FLAX, read_msgpack(folder / "flax_model.msgpack")
    else:
        tensors = read_pickle(folder, shard_files(folder, "pytorch_model.bin"), allow_pickle)
    tensors, ignored = settle_embeddings(tensors, form, config, folder)
    cfg = derive(tensors, form, folder)
    cfg = settle_config(cfg, config, folder)
    weights = weights_of(tensors, form, folder, cfg, hf_vocabulary(folder, cfg), ignored)
    return weights._replace(cfg=config_of(cfg, 0, weights.vocabulary, None if kind == "t5" else kind))


def settle_embeddings(tensors, form, config, folder):
    """Find the embedding, and the output layer where it is another -> (Tensors, names to ignore).

    Whether the two are one is decided by the tensors; config.json says only whether the decoder's
    output is scaled by d_model^-0.5. Ours is scaled if and only if the two are one, so a matrix is
    written out where Hugging Face's is otherwise.
    """
    shapes = dict(tensors.shapes)
    embed, head = form.name("embed", 0, True), form.name("unembed", 0, True)
    last = embed.rsplit(embed[6], 1)[1]  # weight or embedding
    copies = [f"{stack}{embed[6]}embed_tokens{embed[6]}{last}" for stack in ("encoder", "decoder")]
    present = [name for name in (embed, *copies) if name in shapes]
    if not present:
        raise UserError(f"{folder} has no {embed}: it is incomplete, or not a T5 model.")
    table = present[0]
    for name in present[1:]:
        if not equal(tensors, table, name):
            raise UserError(f"{folder}: {table} and {name} differ: plain T5 has one embedding for "
                            f"encoder and decoder.")
    if table != embed:
        shapes[embed] = shapes.pop(table)
    own = head in shapes and not (form is HF and equal(tensors, table, head))
    if not own:
        shapes.pop(head, None)
    flag = config.get("tie_word_embeddings", not own)
    scaled = config.get("scale_decoder_outputs", flag and config.get("model_type") != "mt5")
    if not own and head not in tensors.shapes and not scaled and "scale_decoder_outputs" not in config \
            and config.get("tie_word_embeddings") is False:
        raise UserError(f"{folder} has no {head}, and its config.json says that it is not the "
                        f"embedding: it is incomplete; fetch it again.")
    factor = 1.0
    if own and scaled:
        factor = shapes[embed][1] ** -0.5
    if not own and not scaled:
        shapes[head] = shapes[embed] if form is HF else shapes[embed][::-1]

    def read(name):
        if name == embed:
            return tensors.read(table)
        if name == head and not own:
            return tensors.read(table) if form is HF else tensors.read(table).T
        if name == head and factor != 1:
            return np.float32(factor) * tensors.read(head)
        return tensors.read(name)

    # what T5 1.0's first files hold, which no code ever read
    unused = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    return Tensors(shapes, read), {*copies, unused}


def equal(tensors, one, other):
    return tensors.shapes[one] == tensors.shapes[other] and np.array_equal(
        tensors.read(one), tensors.read(other))


def settle_config(cfg, config, folder):
    """ModelConfig of the weights and config.json -> ModelConfig; refuses what contradicts it."""
    said = {"num_decoder_layers": config.get("num_layers"), **config,
            "relative_buckets": config.get("relative_attention_num_buckets")}
    for name in ("vocab_size", "d_model", "d_ff", "d_kv", "num_heads", "num_layers",
                 "num_decoder_layers", "relative_buckets"):
        if said.get(name) not in (None, getattr(cfg, name)):
            raise UserError(f"{folder}: config.json says {name} {said[name]}, and the weights have "
                            f"{getattr(cfg, name)}: fetch both again.")
    if config.get("layer_norm_epsilon", 1e-6) != 1e-6:
        raise UserError(f"{folder}: layer_norm_epsilon is {config['layer_norm_epsilon']}; plain T5 "
                        f"knows 1e-6 only.")
    activation = config.get("feed_forward_proj", "relu").replace("-", "_")
    gated = cfg.activation.startswith("gated_")
    if activation not in configs.CHOICES["model.activation"] or (
            activation.startswith("gated_") != gated):
        raise UserError(f"{folder}: config.json says feed_forward_proj {activation}, which plain "
                        f"T5 does not know or its weights do not have.")
    return replace(cfg, activation=activation, dropout=config.get("dropout_rate", 0.1),
                   relative_max_distance=config.get("relative_attention_max_distance", 128))


def hf_vocabulary(folder, cfg):
    """spiece.model, or ByT5's bytes -> the bytes of a run's spiece.model, or None."""
    tokenizer = folder / "tokenizer_config.json"
    if tokenizer.exists() and "ByT5" in str(read_json(tokenizer).get("tokenizer_class")):
        return b"bytes:0\n"
    return find_vocabulary(folder, cfg)


def find_vocabulary(folder, cfg):
    """A spiece.model in the folder or above it -> its bytes; ByT5's; or None with a warning."""
    for place in (folder, folder.parent, folder.parent.parent):
        if (place / "spiece.model").is_file():
            return check_vocabulary((place / "spiece.model").read_bytes(), cfg, place)
    if cfg.vocab_size == 384:
        return b"bytes:0\n"
    note(f"{folder} has no vocabulary: what is written answers ids alone until a spiece.model is "
         f"put beside it.")
    return None


def pieces_of(vocabulary):
    """Bytes of a SentencePiece model -> its ModelProto."""
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(vocabulary)
    return proto


def check_vocabulary(vocabulary, cfg, folder):
    if vocabulary.startswith(b"bytes"):
        return vocabulary
    try:
        number = len(pieces_of(vocabulary).pieces)
    except Exception as error:  # protobuf's DecodeError, whose place differs between versions
        raise UserError(f"{folder / 'spiece.model'} is not a SentencePiece model: fetch it again."
                        ) from error
    if number > cfg.vocab_size:
        raise UserError(f"{folder / 'spiece.model'} has {number:,} pieces and the model only "
                        f"{cfg.vocab_size:,} embeddings: it is of another model.")
    return vocabulary


# ---- msgpack, T5X, Mesh TensorFlow, read ---------------------------------------------------------


def read_msgpack(path):
    """Flax's msgpack file -> Tensors, read one by one; leaves that are no arrays are values."""
    places = {}
    file = open(path, "rb")
    unpacker = msgpack.Unpacker(file, max_buffer_size=0, strict_map_key=False)

    def span(start, stop):
        file_bytes = os.pread(file.fileno(), stop - start, start)
        while len(file_bytes) < stop - start:  # Linux reads 2 GiB at a time
            file_bytes += os.pread(file.fileno(), stop - start - len(file_bytes),
                                   start + len(file_bytes))
        return file_bytes

    def walk(prefix):
        start, keys = unpacker.tell(), set()
        for _ in range(unpacker.read_map_header()):
            key, at = unpacker.unpack(), unpacker.tell()
            keys.add(key)
            name = f"{prefix}/{key}" if prefix else str(key)
            first = span(at, at + 1)[0]
            if first >> 4 == 8 or first in (0xDE, 0xDF):  # a map
                walk(name)
            else:
                unpacker.skip()
                places[name] = at, unpacker.tell()
        if keys & {"driver", "__msgpack_chunked_array__"}:  # a map that stands for one array
            for name in [name for name in places if name.startswith(f"{prefix}/")]:
                del places[name]
            places[prefix] = start, unpacker.tell()

    try:
        walk("")
    except (ValueError, msgpack.exceptions.UnpackException, IndexError) as error:
        raise UserError(f"{path} is incomplete or damaged ({error}): fetch it again.") from error

    def read(name):
        return flax.serialization.msgpack_restore(span(*places[name]))

    def shape(name):
        start, stop = places[name]
        head = span(start, min(stop, start + 200))
        if head[0] not in range(0xC7, 0xCA) and head[0] not in range(0xD4, 0xD9):
            value = read(name)
            return tuple(value["metadata"]["shape"]) if isinstance(value, dict) else np.shape(value)
        skip = {0xC7: 3, 0xC8: 4, 0xC9: 6}.get(head[0], 2)  # type, length and code
        inner = msgpack.Unpacker()
        inner.feed(head[skip:])
        inner.read_array_header()
        return tuple(inner.unpack())

    return Tensors({name: shape(name) for name in places}, read)


def open_legacy_t5x(folder):
    """T5X's own checkpoint, version 3: `checkpoint`, a msgpack file, beside zarr arrays."""
    path = folder / "checkpoint" if folder.is_dir() else folder
    tensors = read_msgpack(path)
    if "version" not in tensors.shapes or tensors.read("version") != 3:
        version = tensors.read("version") if "version" in tensors.shapes else "1"
        raise UserError(f"{path} is a T5X checkpoint of version {version}: plain T5 reads version "
                        f"3; load and save it again with T5X of 2022 or later.")

    def read(name):
        value = tensors.read(f"optimizer/{name}")
        if not isinstance(value, dict):
            return np.asarray(value)
        place = value.get("kvstore", value)["path"]  # where TensorStore before 0.1.14 has it
        return read_store({"driver": value["driver"], "fill_missing_data_reads": False,
                           "kvstore": {"driver": "file", "path": str(path.parent / place)}})

    prefix = "optimizer/"
    return Tensors({name.removeprefix(prefix): shape for name, shape in tensors.shapes.items()
                    if name.startswith(prefix)}, read)


def open_orbax_t5x(folder):
    """T5X's checkpoint as Orbax writes it: the folder that has _METADATA."""
    metadata = read_json(folder / "_METADATA")
    driver = "zarr3" if metadata.get("use_zarr3") else "zarr"
    keys = {"/".join(part["key"] for part in entry["key_metadata"]):
            ".".join(part["key"] for part in entry["key_metadata"])
            for entry in metadata["tree_metadata"].values()}

    def spec(name):
        place = {"driver": "file", "path": str(folder / keys[name])}
        if metadata.get("use_ocdbt"):
            place = {"driver": "ocdbt", "base": f"file://{folder.resolve()}/", "path": keys[name] + "/"}
        return {"driver": driver, "kvstore": place}

    shapes = {name: open_store(spec(name)).shape for name in keys}
    return Tensors(shapes, lambda name: read_store(spec(name)))


def open_store(spec):
    try:
        return tensorstore.open(spec, open=True).result()
    except (ValueError, OSError, KeyError) as error:
        raise UserError(f"{spec['kvstore']['path']} cannot be read ({str(error)[:200]}): the "
                        f"checkpoint is incomplete; fetch it again.") from error


def read_store(spec):
    """A TensorStore spec -> NumPy array."""
    try:
        return open_store(spec).read().result()
    except (ValueError, OSError) as error:
        raise UserError(f"{spec['kvstore']['path']} is incomplete or damaged ({str(error)[:200]}): "
                        f"fetch the checkpoint again.") from error


def open_mtf(prefix):
    """Prefix of a Mesh TensorFlow checkpoint -> Tensors."""
    try:
        import tensorflow
    except ImportError as error:
        raise UserError("Reading Mesh TensorFlow's checkpoints needs TensorFlow: pip install "
                        "tensorflow-cpu.") from error
    try:
        reader = tensorflow.train.load_checkpoint(str(prefix))
        known = {}  # ours and theirs: norms have had several names
        for name in reader.get_variable_to_shape_map():
            plain = re.sub(r"^(encoder|decoder)/(rms_norm|layer_norm)/", r"\1/final_layer_norm/", name)
            known[re.sub(r"(layer_\d+)/rms_norm", r"\1/layer_norm", plain)] = name
        shapes = {plain: tuple(reader.get_variable_to_shape_map()[name])
                  for plain, name in known.items()}
    except Exception as error:  # TensorFlow's own kinds
        raise UserError(f"{prefix} cannot be read ({str(error)[:200]}): fetch it again.") from error

    def read(name):
        try:
            return np.asarray(reader.get_tensor(known[name]))
        except Exception as error:
            raise UserError(f"{prefix} has no data for {known[name]} ({str(error)[:200]}): fetch "
                            f"it again.") from error

    return Tensors(shapes, read)


def open_t5x_or_mtf(tensors, form, folder):
    cfg = derive(tensors, form, folder)
    place = Path(folder) if Path(folder).is_dir() else Path(folder).parent
    cfg = replace(cfg, activation=activation_of(place, cfg.activation))
    return weights_of(tensors, form, folder, cfg, find_vocabulary(place, cfg))


def activation_of(folder, derived):
    """The activation that a Gin file beside the checkpoint names, else what T5 has."""
    for path in (folder / "config.gin", folder / "operative_config.gin",
                 folder.parent / "config.gin"):
        found = path.exists() and re.search(
            r"(?:mlp_activations|DenseReluDense\.activation) *= *[\[(]?(.*?)[\])]?$",
            path.read_text(), re.MULTILINE)
        if found:
            words = re.findall(r"\w+", found[1])
            name = "gated_" * ("linear" in words) + words[0].replace("swish", "silu")
            if name not in configs.CHOICES["model.activation"]:
                raise UserError(f"{path} says that the activation is {found[1]}, which plain T5 "
                                f"does not have.")
            return name
    return derived


# ---- a run, read ---------------------------------------------------------------------------------


def open_plain(folder, step=None):
    """A run directory or one of its checkpoints -> Weights."""
    try:
        if partition.find_checkpoint(folder):
            checkpoints = partition.Checkpoints(folder)
            step = checkpoints.steps()[-1] if step is None else step
            run_dir, checkpoint = folder, checkpoints.path(step)
            if step not in checkpoints.steps():
                raise UserError(f"{folder} has no step {step:,}; it has "
                                f"{', '.join(map(str, checkpoints.steps()))}.")
        else:
            run_dir, checkpoint = folder.resolve().parents[1], folder
        manifest = partition.read_manifest(checkpoint)
    except partition.CheckpointError as error:
        raise UserError(f"{error}: name another checkpoint.") from error
    stored = {name: tuple(a["shape"]) for name, a in manifest["arrays"].items()}
    sharding = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])

    @functools.lru_cache(1)
    def whole(name):
        """One array, through the code that every other script reads it by."""
        wanted = jax.ShapeDtypeStruct(stored[name], manifest["arrays"][name]["dtype"],
                                      sharding=sharding)
        try:
            tree = partition.read_checkpoint(
                checkpoint, flax.traverse_util.unflatten_dict({name: wanted}, sep="/"))
        except partition.CheckpointError as error:
            raise UserError(f"{error}: name another checkpoint.") from error
        return np.asarray(partition.flatten(tree)[name])

    def read(name, layer):
        return whole(name) if layer is None else whole(name)[layer]

    cfg = configs.load_run(run_dir)
    shapes = {name: shape for name, shape in stored.items() if "/" in name}
    file = run_dir / "spiece.model"
    vocabulary = file.read_bytes() if file.exists() else None
    weights = Weights(cfg, manifest["step"], shapes, read, vocabulary, run_dir)
    table = partition.flatten(model.param_table(cfg.model))
    for path, p in table.items():
        if shapes.get(f"params/{path}") != p.shape:
            raise UserError(f"{checkpoint}: params/{path} is {shapes.get(f'params/{path}')}, and "
                            f"config.json asks for {p.shape}: they are of two runs.")
    return weights


# ---- what SRC is ---------------------------------------------------------------------------------


def open_any(source, step=None, allow_pickle=False):
    """A path -> Weights; finds out by the files that lie there what it is."""
    path = Path(source)
    if os.path.exists(f"{source}.index"):
        return open_t5x_or_mtf(open_mtf(path), MTF, path)
    if not path.exists():
        raise UserError(f"There is nothing at {source}: SRC names a folder, or the prefix of a "
                        f"Mesh TensorFlow checkpoint.")
    if path.is_file():
        return open_t5x_or_mtf(open_legacy_t5x(path), T5X, path)
    if (path / "manifest.json").exists() or partition.Checkpoints(path).steps():
        return open_plain(path, step)
    weights = ("model.safetensors", "flax_model.msgpack", "pytorch_model.bin")
    if any((path / f"{name}{end}").exists() for name in weights for end in ("", ".index.json")):
        return open_hf(path, allow_pickle)
    found = {int(re.search(r"\d+$", one.name)[0]): one for one in path.glob("checkpoint_*")
             if re.fullmatch(r"checkpoint_\d+", one.name)}
    found |= {int(re.search(r"-(\d+)\.index$", one.name)[1]): one.with_suffix("")
              for one in path.glob("model.ckpt-*.index")}
    if found:  # T5X's or Mesh TensorFlow's run
        step = max(found) if step is None else step
        if step not in found:
            raise UserError(f"{source} has no step {step:,}; it has "
                            f"{', '.join(map(str, sorted(found)))}.")
        return open_any(found[step])
    for place in (path / "state", path):
        if (place / "_METADATA").exists():
            return open_t5x_or_mtf(open_orbax_t5x(place), T5X, path)
    if (path / "checkpoint").is_file():
        return open_t5x_or_mtf(open_legacy_t5x(path), T5X, path)
    raise UserError(f"{source} is none of these: a run directory, a Hugging Face directory with "
                    f"weights, a T5X checkpoint, a Mesh TensorFlow checkpoint.")


# ---- written: a run ------------------------------------------------------------------------------


def write_plain(folder, weights, dtype):
    """Weights -> a run directory."""
    arrays = {name: {"shape": shape, "dtype": "float32"} for name, shape in weights.shapes.items()}
    scalars = {}
    if slots := [name for name in arrays if name.startswith("slots/")]:
        count = int(weights.read("slots/count", None)) if "slots/count" in slots else weights.step
        scalars = {"step": weights.step, "count": count, "skipped": 0}
        arrays |= {name: {"shape": (), "dtype": "int32"} for name in scalars}

    def pieces():
        for name in sorted(arrays):
            if name in scalars:
                yield name, [], np.array(scalars[name], np.int32)
                continue
            shape = arrays[name]["shape"]
            for layer in layers_of(name, shape):
                array = weights.read(name, layer)
                bounds = [[0, size] for size in shape]
                if layer is not None:
                    array, bounds[0] = array[None], [layer, layer + 1]
                rows = max(1, len(array) * partition.PIECE_BYTES // (4 * array.size))
                for start in range(0, len(array), rows):
                    part = np.ascontiguousarray(array[start : start + rows], np.float32)
                    first = bounds[0][0] + start
                    yield name, [[first, first + len(part)], *bounds[1:]], part

    path = partition.Checkpoints(folder).path(weights.step)
    partition.write_checkpoint(path, arrays, pieces(), weights.step)
    configs.save_run(weights.cfg, folder)
    if weights.vocabulary:
        configs.write_file(folder / "spiece.model", weights.vocabulary)


# ---- written: Hugging Face -----------------------------------------------------------------------

SHARD_BYTES = 5_000_000_000


def write_hf(folder, weights, dtype):
    """Weights -> a directory that transformers reads."""
    cfg = weights.cfg.model
    found = mapping(cfg, HF, lambda path, name: None)
    parts = [(name, ours, layer, shape[layer is not None :], turned)
             for ours, (shape, theirs, turned) in found.items()
             for layer, name in zip(layers_of(ours, shape), theirs)]
    shards, size = [[]], 0
    for part in parts:
        nbytes = np.prod(part[3], dtype=int) * dtype.itemsize
        if shards[-1] and size + nbytes > SHARD_BYTES:
            shards, size = [*shards, []], 0
        shards[-1].append(part)
        size += nbytes
    places, total = {}, 0
    for number, shard in enumerate(shards, 1):
        file = "model.safetensors"
        if len(shards) > 1:
            file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        total += write_safetensors(folder / file, shard, weights, dtype)
        places |= {part[0]: file for part in shard}
    if len(shards) > 1:
        write_json(folder / "model.safetensors.index.json",
                   {"metadata": {"total_size": total}, "weight_map": places})
    family = "mt5" if weights.cfg.name.startswith("mt5") and not cfg.tied else "t5"
    ids = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    write_json(folder / "config.json", {
        "architectures": [f"{family.upper()}ForConditionalGeneration"], "model_type": family,
        "is_encoder_decoder": True, "vocab_size": cfg.vocab_size, "d_model": cfg.d_model,
        "d_ff": cfg.d_ff, "d_kv": cfg.d_kv, "num_heads": cfg.num_heads,
        "num_layers": cfg.num_layers, "num_decoder_layers": cfg.num_decoder_layers,
        "feed_forward_proj": cfg.activation.replace("_", "-"), "tie_word_embeddings": cfg.tied,
        "relative_attention_num_buckets": cfg.relative_buckets,
        "relative_attention_max_distance": cfg.relative_max_distance,
        "dropout_rate": cfg.dropout, "layer_norm_epsilon": 1e-6, "use_cache": True,
        "dtype": dtype.name, **ids})
    write_json(folder / "generation_config.json", ids)
    write_tokenizer(folder, weights.vocabulary, cfg)
    (folder / "README.md").write_text(model_card(weights))


def write_safetensors(path, parts, weights, dtype):
    """Stream tensors into a file -> bytes of the data. The library's writer wants all in memory."""
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, _, _, shape, turned in parts:
        end = at + int(np.prod(shape)) * dtype.itemsize
        header[name] = {"dtype": {4: "F32", 2: "BF16"}[dtype.itemsize],
                        "shape": shape[::-1] if turned else shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, ours, layer, _, turned in parts:
            array = weights.read(ours, layer)
            array = np.ascontiguousarray(array.T if turned else array, dtype)
            file.write(array.reshape(-1).view(np.uint8).data)
    return at


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2) + "\n")


def write_tokenizer(folder, vocabulary, cfg):
    """spiece.model and tokenizer_config.json; says where Hugging Face would read text otherwise."""
    tokens = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    if vocabulary is None:
        note("this run has no vocabulary: the directory has no tokenizer.")
        return
    if vocabulary.startswith(b"bytes"):
        note("ByT5's tokenizer at Hugging Face numbers <extra_id_0> ... otherwise: give such inputs "
             "as ids.")
        write_json(folder / "tokenizer_config.json", {
            "tokenizer_class": "ByT5Tokenizer", "extra_ids": max(0, cfg.vocab_size - 259), **tokens})
        return
    proto = pieces_of(vocabulary)
    if proto.trainer_spec.model_type != proto.trainer_spec.UNIGRAM:
        raise UserError("This run's vocabulary is not a unigram model, and Hugging Face's T5Tokenizer "
                        "would read most text otherwise: move spiece.model out of the run to write "
                        "the weights alone.")
    if proto.trainer_spec.byte_fallback:
        note("warning: Hugging Face's T5Tokenizer has no byte fallback: rare characters are <unk> "
             "there.")
    if proto.normalizer_spec.name == "identity" or not proto.normalizer_spec.precompiled_charsmap:
        note("warning: this vocabulary does not normalise text, and Hugging Face's T5Tokenizer does "
             "with spaces: ids can differ.")
    built_in = proto.pieces[-1].piece.endswith("<extra_id_0>")
    (folder / "spiece.model").write_bytes(vocabulary)
    write_json(folder / "tokenizer_config.json", {
        "tokenizer_class": "T5Tokenizer", "extra_ids": 0 if built_in else 100, "legacy": True, **tokens})


def model_card(weights):
    """README.md of a Hugging Face directory."""
    cfg, metrics = weights.cfg, last_metrics(weights.folder)
    rows = "\n".join(f"| {name} | {value:.4g} |" for name, value in metrics.items())
    table = f"\n## Last evaluation\n\n| metric | value |\n|---|---|\n{rows}\n" if rows else ""
    settings = "\n".join(f"- {section}.{knob.name}: {value}"
                         for section, knob, value in configs.fields(cfg)
                         if section in ("model", "data", "train") and value != knob.default)
    return f"""---
library_name: transformers
pipeline_tag: text2text-generation
tags:
- t5
- plain-t5
---

# {cfg.name}

An encoder-decoder of the T5 family, {model.count_params(model.param_table(cfg.model)):,} parameters,
at step {weights.step:,}. Converted from a run of plain T5.

## Settings that are not the defaults

{settings}
{table}"""


def last_metrics(run_dir):
    """A run's last evaluation of each task -> {name: value}."""
    path, found = Path(run_dir, "metrics.jsonl"), {}
    for line in path.read_text().splitlines() if path.exists() else ():
        found |= {name: value for name, value in json.loads(line).items()
                  if name.startswith(("training_eval/", "inference_eval/"))}
    return found


# ---- written: T5X --------------------------------------------------------------------------------


def write_t5x(folder, weights, dtype):
    """Weights -> a checkpoint directory of T5X, version 3: a msgpack file beside zarr arrays."""
    factored = {name.split("/", 1)[1].rsplit("/", 1)[0]: name.endswith("/row")
                for name in weights.shapes if name.endswith(("/row", "/full"))}
    found = mapping(weights.cfg.model, T5X, lambda path, name: factored.get(path))
    tree = {T5X.step: np.int32(weights.step).reshape(())}
    if not factored:
        note("this has no slots of Adafactor: T5X can evaluate it, and fine-tunes from it with "
             "fallback_to_scratch.")
    for ours, (shape, theirs, _) in found.items():
        for layer, name in zip(layers_of(ours, shape), theirs):
            array = weights.read(ours, layer)
            if name.endswith(("v_row", "v_col")):
                tree[name] = np.array(array)
            else:
                kind = dtype if ours.startswith("params/") else np.dtype(np.float32)
                tree[name] = write_store(folder, name.replace("/", "."), array.astype(kind))
    for path in factored:  # T5X has all four slots of every parameter
        for name in found[f"params/{path}"][1]:
            for slot in ("m", "v", "v_row", "v_col"):
                tree.setdefault(t5x_slot(name, slot), np.zeros(1, np.float32))
    tree = flax.traverse_util.unflatten_dict(tree, sep="/")
    content = flax.serialization.msgpack_serialize({"version": 3, "optimizer": tree})
    configs.write_file(folder / "checkpoint", content)
    if weights.vocabulary:
        configs.write_file(folder / "spiece.model", weights.vocabulary)


def write_store(folder, name, array):
    """Write one zarr array -> what T5X's index says about it."""
    rows = max(1, len(array) * (1 << 26) // max(1, array.nbytes))  # chunks of 64 MiB
    metadata = {"shape": array.shape, "chunks": [min(rows, len(array)), *array.shape[1:]],
                "compressor": {"id": "gzip", "level": 1}}
    spec = {"driver": "zarr", "dtype": array.dtype.name, "metadata": metadata}
    store = tensorstore.open({**spec, "kvstore": {"driver": "file", "path": str(folder / name)}},
                             create=True).result()
    store.write(array).result()
    return {**spec, "kvstore": {"driver": "file", "path": f"{name}/"}}


# ---- compared ------------------------------------------------------------------------------------


def compare(weights, written, dtype):
    """Read both again, array by array -> the largest difference; raises where one is not as it
    should be."""
    largest, arrays = 0.0, 0
    for name, shape in written.shapes.items():
        for layer in layers_of(name, shape):
            ours = np.asarray(weights.read(name, layer), np.float32)
            kind = dtype if name.startswith("params/") else np.float32
            theirs = written.read(name, layer)
            arrays += 1
            if np.array_equal(ours, theirs):
                continue
            if not np.array_equal(ours.astype(kind).astype(np.float32), theirs, equal_nan=True):
                raise OSError(f"{name} was not written as it was read: the disk or the source is "
                              f"damaged; nothing was kept")
            largest = max(largest, float(np.nanmax(np.abs(ours - theirs))))
    return largest, arrays


def compare_logits(folder, weights):
    """Hugging Face directory and the Weights it should equal -> the largest difference of logits
    and the largest logit, or None where transformers is not installed."""
    try:
        import torch
        import transformers
    except ImportError:
        return None
    cfg = replace(weights.cfg.model, dtype="float32", dropout=0.0)
    partition.set_mesh(Config(""), jax.devices()[:1])
    params = {}
    for name, shape in weights.shapes.items():
        if name.startswith("params/"):
            layers = [weights.read(name, i) for i in layers_of(name, shape)]
            params[name[7:]] = np.float32(np.stack(layers) if "/layers/" in name else layers[0])
    params = flax.traverse_util.unflatten_dict(params, sep="/")
    layouts = jax.tree.map(lambda s: jax.NamedSharding(jax.sharding.get_mesh(), s),
                           model.param_specs(cfg))
    params = jax.device_put(params, layouts)
    rng = np.random.default_rng(0)
    inputs, targets = (rng.integers(2, cfg.vocab_size, (2, n), np.int32) for n in (48, 16))
    targets[:, 0] = 0
    batch = SimpleNamespace(inputs=inputs, input_segments=np.ones_like(inputs),
                            decoder_inputs=targets, target_segments=np.ones_like(targets))
    ours = np.asarray(jax.jit(lambda p: model.forward(p, batch, cfg))(params))
    network = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        theirs = network(input_ids=torch.tensor(inputs).long(),
                         decoder_input_ids=torch.tensor(targets).long()).logits.numpy()
    return float(np.abs(ours - theirs).max()), float(np.abs(theirs).max())


# ---- the command ---------------------------------------------------------------------------------

WRITERS = {"plain": write_plain, "hf": write_hf, "t5x": write_t5x}
LOGITS_BYTES = 1 << 29  # both models are whole in memory to compare logits


@contextlib.contextmanager
def written_whole(destination):
    """A folder to write into, which becomes `destination` if nothing goes wrong."""
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise UserError(f"{destination} is there already and not empty: name another DST.")
    temporary = destination.with_name(f".{destination.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        os.rename(temporary, destination)
        partition.sync_folder(destination.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def convert(source, destination, to, dtype, step, allow_pickle):
    began = time.perf_counter()
    with written_whole(destination) as folder:
        weights = open_any(source, step, allow_pickle)
        print(f"source   {source}: {model.describe(weights.cfg)}; step {weights.step:,}", flush=True)
        WRITERS[to](folder, weights, dtype)
        print(f"written  in {time.perf_counter() - began:.2f} s", flush=True)
        largest, arrays = compare(weights, open_any(folder), dtype)
        print(f"compared {arrays:,} arrays with the source: largest difference {largest:g}", flush=True)
        reference = folder if to == "hf" else weights.folder
        size = 4 * model.count_params(model.param_table(weights.cfg.model))
        if (reference / "generation_config.json").exists() or (reference / "pytorch_model.bin").exists():
            report_logits(reference, weights, size)
    print(f"done     {destination}, {time.perf_counter() - began:.2f} s")


def report_logits(reference, weights, size):
    if size > LOGITS_BYTES:
        print("logits   not compared: both models would be whole in memory")
    elif found := compare_logits(reference, weights):
        print(f"logits   as transformers': largest difference {found[0]:g} of {found[1]:.3g}")
        if not found[0] <= 1e-3 * max(found[1], 1):
            note("warning: transformers answers otherwise with the Hugging Face directory.")
    else:
        print("logits   not compared: transformers is not installed")


def main(argv):
    args, changes = configs.parse_args(
        __doc__, argv, src_=dict(help="what to convert"), dst_=dict(help="a new folder"),
        to=dict(default="plain", choices=tuple(WRITERS)),
        dtype=dict(default="float32", choices=("float32", "bfloat16")),
        step=dict(default="latest", help="of several checkpoints"),
        allow_pickle=dict(action="store_true", help="read pytorch_model.bin"))
    if changes or args.config or args.run_dir:
        raise UserError("convert takes SRC, DST, --to, --dtype, --step and --allow_pickle alone: "
                        "what a model is, it finds in SRC.")
    if not re.fullmatch(r"latest|\d+", args.step):
        raise UserError(f"--step takes a step or latest, not {args.step!r}.")
    if args.to == "plain" and args.dtype != "float32":
        raise UserError("A run keeps its weights in float32: leave out --dtype, or write --to hf.")
    step = None if args.step == "latest" else int(args.step)
    convert(args.src, Path(args.dst), args.to, np.dtype(jnp.dtype(args.dtype)), step,
            args.allow_pickle)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    configs.run_command(main)
