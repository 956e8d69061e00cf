"""Convert weights: Hugging Face, T5X <-> plain T5, and Mesh TensorFlow -> plain T5.

    python convert.py t5-v1_1-small/ runs/t5_small         a Hugging Face folder -> a run
    python convert.py checkpoint_1000000/ runs/t5_small    T5X, its own format or Orbax
    python convert.py model.ckpt-1000000 runs/t5_small     Mesh TensorFlow
    python convert.py runs/tiny tiny_hf --to hf            a run -> a Hugging Face folder
    python convert.py runs/tiny checkpoint_1500 --to t5x   a run -> T5X

The formats differ in names and layout, and Hugging Face in the scale of lm_head. T5X has
an array [inputs, outputs] for each matrix of each layer, PyTorch has [outputs, inputs],
and plain T5 stacks all layers: [layers, inputs, outputs]. The arrays of other formats
first get the names and axes of T5X, and `to_plain` stacks them. An array that is missing,
unknown or of another shape stops the conversion. What config.json leaves out has the
default of transformers; what Gin files leave out is assumed, and printed. A vocabulary is
copied, not translated. extras/ reads and writes the files of T5X and Mesh TensorFlow.

Memory holds the arrays up to three times: 11 billion parameters need 140 GB.

    >>> t5x, hugging_face = foreign_names("encoder/layers/attention/query", layer=0)
    >>> t5x
    'encoder/layers_0/attention/query/kernel'
    >>> hugging_face
    'encoder.block.0.layer.0.SelfAttention.q.weight'
"""

import json
import os
import re
import shutil
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
import sentencepiece
import tyro
from sentencepiece import sentencepiece_model_pb2

import configs
import data
import model
import partition
from configs import Config, DataConfig, ModelConfig, TrainConfig, UserError

# ---- names -----------------------------------------------------------------------------
# The keys are names in plain T5. The values are the names in T5X and in Hugging Face.

# Arrays that exist once. All layers of a stack share one table of position biases, which
# Hugging Face stores in block 0.
UNSTACKED_NAMES = {
    "embed": ("token_embedder/embedding", "shared"),
    "unembed": ("decoder/logits_dense/kernel", "lm_head"),
    "encoder/norm": ("encoder/encoder_norm/scale", "encoder.final_layer_norm"),
    "decoder/norm": ("decoder/decoder_norm/scale", "decoder.final_layer_norm"),
    "encoder/relative_bias": (
        "encoder/relpos_bias/rel_embedding",
        "encoder.block.0.layer.0.SelfAttention.relative_attention_bias",
    ),
    "decoder/relative_bias": (
        "decoder/relpos_bias/rel_embedding",
        "decoder.block.0.layer.0.SelfAttention.relative_attention_bias",
    ),
}
# The number and the name of each part of a layer in Hugging Face.
SUBLAYERS = {
    "encoder/layers/attention": (0, "SelfAttention"),
    "encoder/layers/mlp": (1, "DenseReluDense"),
    "decoder/layers/self_attention": (0, "SelfAttention"),
    "decoder/layers/cross_attention": (1, "EncDecAttention"),
    "decoder/layers/mlp": (2, "DenseReluDense"),
}
IN_SUBLAYER = {
    "norm": ("pre_{part}_layer_norm/scale", "layer_norm"),
    # Only UMT5 has one in every layer.
    "relative_bias": ("relpos_bias/rel_embedding", "{module}.relative_attention_bias"),
    "query": ("{module}/query/kernel", "{module}.q"),
    "key": ("{module}/key/kernel", "{module}.k"),
    "value": ("{module}/value/kernel", "{module}.v"),
    "out": ("{module}/out/kernel", "{module}.o"),
    "gate": ("{module}/wi_0/kernel", "{module}.wi_0"),
    "up": ("{module}/wi_1/kernel", "{module}.wi_1"),
    "up without gate": ("{module}/wi/kernel", "{module}.wi"),
    "down": ("{module}/wo/kernel", "{module}.wo"),
}


def foreign_names(path: str, layer, gated: bool = True) -> tuple[str, str]:
    """Return the names in T5X and in Hugging Face of one layer of a parameter."""
    if path in UNSTACKED_NAMES:
        t5x, hf = UNSTACKED_NAMES[path]
        return t5x, f"{hf}.weight"
    sublayer, _, name = path.rpartition("/")
    if sublayer not in SUBLAYERS or name not in IN_SUBLAYER:
        raise UserError(f"No other format has a name for the parameter {path}.")
    stack, _, part = sublayer.split("/")
    t5x_module = part.replace("cross_attention", "encoder_decoder_attention")
    number, hf_module = SUBLAYERS[sublayer]
    t5x, hf = IN_SUBLAYER["up without gate" if name == "up" and not gated else name]
    t5x, hf = t5x.format(part=part, module=t5x_module), hf.format(module=hf_module)
    hf_layer = f"{stack}.block.{layer}.layer.{number}"
    return f"{stack}/layers_{layer}/{t5x}", f"{hf_layer}.{hf}.weight"


def all_foreign_names(model_cfg: ModelConfig) -> Iterator[tuple]:
    """Yield (path, layer, T5X name, Hugging Face name) of each array.

    The layer of an array that exists once is `...`: as an index, it selects everything.
    """
    for path, param in partition.flatten(model.param_table(model_cfg)).items():
        for layer in range(param.shape[0]) if "/layers/" in path else [Ellipsis]:
            yield path, layer, *foreign_names(path, layer, model_cfg.gated)


# ---- from T5X to plain T5 --------------------------------------------------------------


class LoadedModel(NamedTuple):
    """A model that was read from any format, with plain T5's names of arrays."""

    cfg: Config
    arrays: dict[str, np.ndarray]  # "step", "params/...", and perhaps "opt_state/..."
    tokenizer: data.Tokenizer | None


def model_config(arrays: dict, source: Path) -> ModelConfig:
    """Return the ModelConfig that follows from the shapes of arrays with T5X's names."""
    gated = "encoder/layers_0/mlp/wi_0/kernel" in arrays

    def shape(path):
        name, hf = foreign_names(path, 0, gated)
        if name not in arrays or arrays[name].ndim != 2:
            raise UserError(
                f"{source} is not a complete T5: it lacks the matrix {name} ({hf})."
            )
        return arrays[name].shape

    def depth(stack):
        start = f"{stack}/layers_"
        return len({name.split("/")[1] for name in arrays if name.startswith(start)})

    bias = "encoder/layers/attention/relative_bias"
    per_layer_bias = foreign_names(bias, 0)[0] in arrays
    num_heads, buckets = shape(bias if per_layer_bias else "encoder/relative_bias")
    vocab_size, d_model = shape("embed")
    return ModelConfig(
        vocab_size=vocab_size,
        d_model=d_model,
        d_ff=shape("encoder/layers/mlp/up")[1],
        d_kv=shape("encoder/layers/attention/query")[1] // num_heads,
        num_heads=num_heads,
        num_layers=depth("encoder"),
        num_decoder_layers=depth("decoder"),
        activation="gated_gelu" if gated else "relu",
        tied=UNSTACKED_NAMES["unembed"][0] not in arrays,
        relative_buckets=buckets,
        per_layer_bias=per_layer_bias,
    )


def to_plain(arrays: dict, model_cfg: ModelConfig, source: Path) -> dict[str, np.ndarray]:
    """Check and use up arrays with T5X's names. Returns {"params/embed": array, ...}."""
    table = partition.flatten({"params": model.param_table(model_cfg)})
    plain = {path: np.empty(param.shape, np.float32) for path, param in table.items()}
    for path, layer, name, hf in all_foreign_names(model_cfg):
        array = arrays.pop(name, None)
        part = plain[f"params/{path}"][layer]
        if array is None:
            raise UserError(f"{source} lacks {name} (in Hugging Face {hf}).")
        if array.shape != part.shape or not jnp.issubdtype(array.dtype, jnp.floating):
            raise UserError(
                f"{source}: {name} (in Hugging Face {hf}) must be floats of shape "
                f"{part.shape}, but it is {array.dtype} of shape {array.shape}."
            )
        part[...] = array
    if arrays:
        raise UserError(
            f"{source} has arrays that no T5 has ({', '.join(sorted(arrays)):.200}), or "
            f"its configuration contradicts them."
        )
    return plain


# ---- reading Hugging Face --------------------------------------------------------------


def with_t5x_names(arrays: dict) -> dict:
    """Replace the names of Hugging Face by T5X's names. Unknown names stay."""
    depth = len(arrays)  # an upper bound of the layers: unused names do no harm
    # Block 0 of every T5 has a bias, but block 1 only in UMT5.
    bias = foreign_names("encoder/layers/attention/relative_bias", 1)[1]
    model_cfg = ModelConfig(
        num_layers=depth,
        num_decoder_layers=depth,
        activation="gated_gelu" if any(".wi_0." in name for name in arrays) else "relu",
        per_layer_bias=bias in arrays,
    )
    t5x_names = {hf: t5x for _, _, t5x, hf in all_foreign_names(model_cfg)}
    return {t5x_names.get(name, name): value for name, value in arrays.items()}


def read_hf_file(file: Path) -> dict[str, np.ndarray]:
    """Read one file of weights, with the names and axes of PyTorch."""
    if file.suffix == ".safetensors":
        return safetensors.numpy.load_file(file)
    import torch  # weights_only refuses a pickle that would run code

    if zipfile.is_zipfile(file) and (name := zipfile.ZipFile(file).testzip()):
        raise UserError(
            f"{file} is damaged: copy it again. The checksum of {name} differs."
        )
    tensors = torch.load(file, "cpu", weights_only=True)
    return {
        name: (tensor.float() if tensor.is_floating_point() else tensor).numpy()
        for name, tensor in tensors.items()
    }


def read_hf_weights(folder: Path) -> dict[str, np.ndarray]:
    """Read the files of weights in a folder, with the names and axes of PyTorch."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).exists():
            return read_hf_file(folder / name)
        index = folder / f"{name}.index.json"
        if index.exists():
            files = read_json(index)["weight_map"]
            arrays = {}
            for file in sorted(set(files.values())):
                arrays |= read_hf_file(folder / file)
            if len(arrays) != len(files):  # Without its lm_head, a model would look tied.
                raise UserError(f"{folder} does not have the arrays of {index.name}.")
            return arrays
    raise UserError(f"{folder} has no model.safetensors or pytorch_model.bin.")


def read_json(path: Path) -> dict:
    """Read a JSON file without its fields that are null. A missing file is empty."""
    content = json.loads(path.read_text()) if path.exists() else {}
    return {name: value for name, value in content.items() if value is not None}


# feed_forward_proj in config.json. "gelu" is missing, because it is the exact GELU.
HF_ACTIVATIONS = {
    "relu": "relu",
    "gelu_new": "gelu",
    "silu": "silu",
    "gated-relu": "gated_relu",
    "gated-gelu": "gated_gelu",
    "gated-gelu_new": "gated_gelu",
    "gated-silu": "gated_silu",
}
SPECIAL_IDS = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}


def hf_config(model_cfg: ModelConfig) -> dict[str, Any]:
    """Return the fields of config.json that describe the network."""
    projection = next(
        name for name, a in HF_ACTIVATIONS.items() if a == model_cfg.activation
    )
    gated, _, activation = projection.rpartition("-")
    same = "vocab_size d_model d_ff d_kv num_heads num_layers num_decoder_layers".split()
    return {
        **{name: getattr(model_cfg, name) for name in same},
        "relative_attention_num_buckets": model_cfg.relative_buckets,
        "relative_attention_max_distance": model_cfg.relative_max_distance,
        "dropout_rate": model_cfg.dropout,
        "feed_forward_proj": projection,
        "is_gated_act": bool(gated),
        "dense_act_fn": "gelu_new" if activation == "gelu" else activation,
        "layer_norm_epsilon": 1e-6,
    }


def keep_one_embedding(arrays: dict, folder: Path) -> None:
    """Remove the copies of the embedding."""
    copies = "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"
    embed = arrays.get("shared.weight", arrays.get(copies[0]))
    for name in copies:
        copy = arrays.pop(name, embed)
        if embed is None or not np.array_equal(copy, embed, equal_nan=True):
            raise UserError(
                f"{folder} has no shared.weight, or an {name} that differs from it. It "
                f"has {', '.join(sorted(arrays)):.200}."
            )
    arrays["shared.weight"] = embed


def set_output_layer(arrays: dict, config: dict, folder: Path) -> None:
    """Remove lm_head.weight if the model is tied, and else give it plain T5's scale.

    lm_head.weight        logits scaled    plain T5
    missing, or equal     yes              tied: it scales the logits, too
    missing, or equal     no               unembed = the embedding
    another               yes              unembed = lm_head.weight * d_model^-0.5
    another               no               unembed = lm_head.weight

    transformers multiplies the logits by d_model^-0.5 if scale_decoder_outputs, or, where
    that is not stated, tie_word_embeddings (by default true), but never in mT5.
    """
    embed, head = arrays["shared.weight"], arrays.pop("lm_head.weight", None)
    is_mt5 = config.get("model_type") == "mt5"
    tie_flag = config.get("tie_word_embeddings", True)
    scaled = config.get("scale_decoder_outputs", tie_flag) and not is_mt5
    if head is None:
        if not tie_flag and "scale_decoder_outputs" not in config:
            raise UserError(f"{folder} has no lm_head.weight, although it is not tied.")
        head = embed
    is_equal = np.array_equal(head, embed, equal_nan=True)
    stated = {"tie_word_embeddings", "scale_decoder_outputs"} & config.keys()
    if not is_equal and not stated and not is_mt5:
        raise UserError(
            f"{folder} has an lm_head.weight, but config.json does not state whether the "
            f'logits are scaled: for T5 1.1, add "tie_word_embeddings": false.'
        )
    if not (is_equal and scaled):
        factor = head.shape[1] ** -0.5 if scaled else 1
        arrays["lm_head.weight"] = head * np.float32(factor)


def read_hf(folder: Path) -> tuple[dict[str, np.ndarray], ModelConfig]:
    """Read a Hugging Face folder. Returns (arrays with T5X's names, ModelConfig)."""
    for name in ("modules.json", "sentence_bert_config.json", "adapter_config.json"):
        if (folder / name).exists():
            raise UserError(
                f"{folder}/{name} changes the outputs of the model, and is not read: it "
                f"is of sentence-transformers or LoRA. Convert a copy without it."
            )
    config = read_json(folder / "config.json")
    family = config.get("model_type", "t5")
    if family not in ("t5", "mt5", "umt5"):
        raise UserError(f"{folder} has model_type {family}, and is not a T5.")
    # The defaults of the classes T5Config, and MT5Config and UMT5Config.
    default = "relu" if family == "t5" else "gated-gelu"
    activation = config.setdefault("feed_forward_proj", default)
    if activation not in HF_ACTIVATIONS:
        raise UserError(f"{folder}: plain T5 has no feed_forward_proj {activation}.")

    arrays = read_hf_weights(folder)
    keep_one_embedding(arrays, folder)
    # T5 1.0 was published with a table that its cross-attention does not use.
    unused = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    arrays.pop(unused, None)
    if "lm_head.weight" in arrays or any(x.startswith("decoder.block.") for x in arrays):
        set_output_layer(arrays, config, folder)
    for name in arrays.keys() - {"shared.weight"}:
        arrays[name] = arrays[name].T  # from [outputs, inputs]
    arrays = with_t5x_names(arrays)
    model_cfg = replace(
        model_config(arrays, folder),
        activation=HF_ACTIVATIONS[activation],
        dropout=config.get("dropout_rate", 0.1),
        relative_max_distance=config.get("relative_attention_max_distance", 128),
    )
    if model_cfg.num_decoder_layers:
        layers = config.get("num_layers", model_cfg.num_decoder_layers)
        config.setdefault("num_decoder_layers", layers)
    else:  # T5EncoderModel keeps the number of the whole model.
        config.pop("num_decoder_layers", None)
    generation = read_json(folder / "generation_config.json")
    config |= {k: v for k, v in generation.items() if k in SPECIAL_IDS}
    expected = hf_config(model_cfg) | SPECIAL_IDS | {"feed_forward_proj": activation}
    for field, value in expected.items():
        found = config.get(field, value)
        if found not in (value, [value]):  # The id of EOS may be a list.
            raise UserError(
                f"{folder} has {field} {found}, but the weights or plain T5 have {value}."
            )
    return arrays, model_cfg


# ---- vocabularies ----------------------------------------------------------------------


def find_vocabulary(folders: list[Path], vocab_size: int) -> tuple[str, int]:
    """Return --data.vocab and --data.extra_ids for the vocabulary in these folders."""
    config = read_json(folders[0] / "tokenizer_config.json")
    added = set(read_json(folders[0] / "added_tokens.json"))
    added |= {x["content"] for x in config.get("added_tokens_decoder", {}).values()}
    tokens = read_json(folders[0] / "tokenizer.json").get("added_tokens", [])
    added |= {x["content"] for x in tokens}
    # SentencePiece models do not have the tokens that a user has added.
    own = {x for x in added if not re.fullmatch(r"▁?<(pad|/s|unk|extra_id_\d+)>", x)}
    models = ["spiece.model", "sentencepiece.model"] if not own else []
    files = [f / name for name in (*models, "tokenizer.json") for f in folders]
    file = next(filter(Path.exists, files), None)
    if not file and own:
        raise UserError(
            f"{folders[0]} adds {', '.join(sorted(own)):.200} to its vocabulary. Add a "
            f"tokenizer.json: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)."
        )
    is_byt5 = "ByT5" in str(config.get("tokenizer_class")) or vocab_size == 384
    if not file and is_byt5:
        # transformers counts sentinels that ByT5 was not trained with.
        extra_ids = 0 if "tokenizer_class" in config else config.get("extra_ids", 0)
        return "bytes", extra_ids
    extra_ids = config.get("extra_ids", 100)
    # T5 adds sentinels to the pieces of its file. mT5's file contains them already.
    if file and file.suffix == ".model":
        pieces = sentencepiece.SentencePieceProcessor(str(file)).get_piece_size()
        extra_ids = extra_ids if pieces + extra_ids <= vocab_size else 0
    return str(file or ""), extra_ids


def write_hf_vocabulary(tokenizer: data.Tokenizer, folder: Path, vocab_size: int) -> None:
    """Write the file of the vocabulary, and how transformers has to read it."""
    config = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    if tokenizer.file_name == "tokenizer.json":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        if tokenizer.processor.encode("").ids != [data.EOS]:
            print(
                "This tokenizer.json adds no </s>: in transformers, append it to inputs."
            )
    elif tokenizer.file_name == "spiece.model":
        proto = sentencepiece_model_pb2.ModelProto.FromString(tokenizer.serialized)
        trained = proto.trainer_spec
        symbols = [x.piece for x in proto.pieces if x.type == x.USER_DEFINED]
        if (
            trained.model_type != 1
            or trained.byte_fallback
            or trained.treat_whitespace_as_suffix
            or not proto.normalizer_spec.add_dummy_prefix
            or any("<extra_id_" not in piece for piece in symbols)
        ):
            raise UserError(
                "The vocabulary is not a unigram model, falls back to bytes, has symbols "
                "of its own, or no space before a text: transformers gives other ids. "
                "Without spiece.model in the run, the weights alone are converted."
            )
        if not proto.normalizer_spec.remove_extra_whitespaces:
            print("This vocabulary keeps repeated spaces, and transformers removes them.")
        if any(piece.startswith("<extra_id_") for piece in symbols):
            print("In texts with sentinels, transformers gives other ids (no ▁ before).")
        config["tokenizer_class"] = "T5Tokenizer"
        config["extra_ids"] = tokenizer.size - len(proto.pieces)
    else:
        config["tokenizer_class"] = "ByT5Tokenizer"
        config["extra_ids"] = vocab_size - 259
        print("In texts with sentinels, ByT5Tokenizer gives these other ids.")
    tokenizer.save(folder)
    write_json(folder / "tokenizer_config.json", config)


# ---- reading and writing models --------------------------------------------------------


def is_run(source: Path) -> bool:
    has_settings = "settings" in read_json(source / "config.json")
    return has_settings or (source / "complete").exists()


def read_run(source: Path, step: str) -> LoadedModel:
    """Read all arrays of a checkpoint."""
    cfg, _ = configs.load_run(source)
    run_dir = configs.run_dir_of(source)
    if source == run_dir:
        source = partition.Checkpoints(run_dir).path(
            partition.resolve_step(run_dir, step)
        )
    arrays = {
        name: partition.read_slice(headers, [slice(None)] * len(headers[0]["shape"]), {})
        for name, headers in partition.read_headers(source)[0].items()
    }
    files = [run_dir / name for name in ("spiece.model", "tokenizer.json")]
    has_vocabulary = cfg.data.vocab == "bytes" or any(file.exists() for file in files)
    tokenizer = data.load_tokenizer(cfg, run_dir) if has_vocabulary else None
    return LoadedModel(cfg, arrays, tokenizer)


def read_model(source: Path, step: str = "latest") -> LoadedModel:
    """Read a model in any format."""
    if is_run(source):
        return read_run(source, step)
    folders, steps, state = [source], 0, {}
    if (source / "config.json").exists():
        arrays, model_cfg = read_hf(source)
    else:
        from extras import mesh_tensorflow, t5x_checkpoints

        if Path(f"{source}.index").exists():
            arrays, slots, steps = mesh_tensorflow.read(source)
            arrays = with_t5x_names(arrays)
            slots = partition.flatten(with_t5x_names(slots))
        else:
            arrays, slots, steps = t5x_checkpoints.read(source)
        folders.append(source.parent)  # The Gin file and the vocabulary may be there.
        model_cfg = t5x_checkpoints.with_gin(model_config(arrays, source), folders)
        names = all_foreign_names(model_cfg)
        state = t5x_checkpoints.adafactor_state(slots, names, model_cfg, steps)
    arrays = {"step": np.int32(steps), **to_plain(arrays, model_cfg, source), **state}
    vocab, extra_ids = find_vocabulary(folders, model_cfg.vocab_size)
    data_cfg = DataConfig(vocab=vocab, extra_ids=extra_ids)
    cfg = Config(model_cfg, data_cfg, TrainConfig(steps=max(steps, 1)))
    tokenizer = data.load_tokenizer(cfg) if vocab else None
    name = Path(data_cfg.vocab).name  # The run keeps a copy of the file.
    cfg = replace(cfg, data=replace(data_cfg, vocab=name))
    return LoadedModel(cfg, arrays, tokenizer)


def write_run(run: LoadedModel, folder: Path) -> None:
    metadata = {}
    if run.tokenizer:
        run.tokenizer.save(folder)
        metadata["vocabulary"] = run.tokenizer.sha256
    arrays = jax.tree.map(jnp.asarray, run.arrays)
    partition.Checkpoints(folder).save(arrays, int(arrays["step"]))
    configs.save_run(run.cfg, folder, **metadata)


def write_hf(run: LoadedModel, folder: Path, dtype: np.dtype) -> None:
    """Write a folder for the library transformers.

    Its versions 4 and 5 agree on the logits, because tie_word_embeddings is stated, and
    lm_head.weight is there only if the model is not tied.
    """
    model_cfg = run.cfg.model
    arrays = {}
    for path, layer, _, name in all_foreign_names(model_cfg):
        array = run.arrays[f"params/{path}"][layer]
        arrays[name] = np.ascontiguousarray(array if path == "embed" else array.T, dtype)
    file = folder / "model.safetensors"
    safetensors.numpy.save_file(arrays, file, {"format": "pt"})
    family = "umt5" if model_cfg.per_layer_bias else "t5"
    has_decoder = model_cfg.num_decoder_layers > 0
    kind = "ForConditionalGeneration" if has_decoder else "EncoderModel"
    config = {
        "architectures": [family.upper() + kind],
        "model_type": family,
        "is_encoder_decoder": has_decoder,
        "dtype": dtype.name,
        "tie_word_embeddings": model_cfg.tied,
        **hf_config(model_cfg),
        **SPECIAL_IDS,
    }
    write_json(folder / "config.json", config)
    # Some versions of safetensors hide their file from other users.
    file.chmod((folder / "config.json").stat().st_mode)
    write_json(folder / "generation_config.json", SPECIAL_IDS)
    if run.tokenizer:
        write_hf_vocabulary(run.tokenizer, folder, model_cfg.vocab_size)
        if family == "umt5" and run.tokenizer.file_name == "spiece.model":
            print("Read its vocabulary with T5Tokenizer: AutoTokenizer fails for UMT5.")


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def check_written(run: LoadedModel, written: LoadedModel, dtype: np.dtype) -> None:
    """Stop if written arrays differ, or if another network is read."""
    wanted = configs.with_network_of(written.cfg, run.cfg)
    configs.refuse_differences(wanted, written.cfg, ["data"], "The written model")
    for name, array in written.arrays.items():
        expected = np.asarray(run.arrays[name])
        if name.startswith("params/"):
            expected = expected.astype(dtype).astype(np.float32)
        # Hugging Face does not store the step.
        if name != "step" and not np.array_equal(array, expected, equal_nan=True):
            raise OSError(f"{name} differs after it was written and read again")


# ---- the command -----------------------------------------------------------------------


def convert(
    src: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SRC")],
    dst: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DST")],
    to: Literal["plain", "hf", "t5x"] = "plain",
    dtype: Literal["float32", "bfloat16"] = "float32",
    step: str = "latest",
) -> None:
    """Convert a model, read the result, and compare all arrays.

    Args:
        src: The model, in any format.
        dst: The new folder, which appears when it is complete.
        to: The format of dst; plain is a run of plain T5.
        dtype: The type of the weights in dst.
        step: The checkpoint of a run: latest or a number.
    """
    source, destination = configs.to_path(src), Path(dst).resolve()
    np_dtype = jnp.dtype(dtype)
    if to == "plain" and is_run(source):
        raise UserError(f"{src} is a run already: add --to hf or --to t5x.")
    if step != "latest" and not (source / "checkpoints").exists():
        raise UserError(f"--step chooses a checkpoint of a run, and {src} is none.")
    if to == "plain" and dtype != "float32":
        raise UserError(f"--dtype {dtype} needs --to hf or --to t5x.")
    if configs.is_remote(dst) or destination.exists() and any(destination.iterdir()):
        raise UserError(f"{dst} is remote or not empty: choose a new local folder.")
    temporary = destination.with_name(f".{destination.name}.tmp{os.getpid()}")
    temporary.mkdir(parents=True)
    try:
        run = read_model(source, step)
        if to == "plain":
            write_run(run, temporary)
        elif to == "hf":
            write_hf(run, temporary, np_dtype)
        else:
            from extras import t5x_checkpoints

            names = all_foreign_names(run.cfg.model)
            t5x_checkpoints.write(run, names, temporary, np_dtype)
        check_written(run, read_model(temporary), np_dtype)
        temporary.rename(destination)
    except Exception as error:  # Not every library names the file.
        error.add_note(f"{src} was not converted.")
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    params = model.count_params(model.param_table(run.cfg.model))
    at = int(run.arrays["step"])
    print(f"converted step {at:,} of {src}, with {params:,} parameters, to {dst}")
    if not run.tokenizer:
        print(f"{src} has no vocabulary: copy its spiece.model into {dst}.")


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    tyro.cli(convert, description=__doc__, use_underscores=True)
