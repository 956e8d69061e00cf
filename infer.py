"""How a trained model answers.

    python infer.py --run_dir runs/tiny "Return the <extra_id_0> of the list."
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import configs
import data
import model
import partition
from configs import UserError


@functools.partial(jax.jit, static_argnames=("cfg", "length"))
def generate(params, inputs, input_segments, cfg, length):
    """Greedy decoding: inputs, input_segments [B, S] -> ids [B, length], 0 after EOS."""
    encoded = model.encode(params, cfg, inputs, input_segments)
    cache = model.init_cache(params, cfg, encoded, length)

    def unfinished(state):
        at, _, done, _, _ = state
        return (at < length) & ~jnp.all(done)

    def step(state):
        at, ids, done, out, cache = state
        logits, cache = model.decode_step(params, cfg, ids, at, cache, input_segments)
        ids = jnp.where(done, data.PAD, jnp.argmax(logits, axis=-1).astype(jnp.int32))
        out = lax.dynamic_update_slice_in_dim(out, ids[:, None], at, axis=1)
        return at + 1, ids, done | (ids == data.EOS), out, cache

    B, rows = inputs.shape[0], P("data")
    start = jnp.zeros(B, jnp.int32, out_sharding=rows)
    out = jnp.zeros((B, length), jnp.int32, out_sharding=rows)
    return lax.while_loop(unfinished, step, (0, start, start > 0, out, cache))[3]


def split_spans(ids, tokenizer):
    """Ids of span-corruption targets -> {sentinel number: ids of its span}."""
    spans, number = {}, None
    for i in map(int, ids):
        if i == data.EOS:
            break
        if tokenizer.size - tokenizer.sentinels <= i < tokenizer.size:
            number = tokenizer.size - 1 - i
            spans[number] = []
        elif number is not None:
            spans[number].append(i if i < tokenizer.size else data.UNK)  # a row without a piece
    return spans


def fill_blanks(inputs, spans, tokenizer):
    """Ids of inputs with sentinels -> text, [what spans say] or ____ in a sentinel's place."""
    text, words = "", []
    for i in [*map(int, inputs), data.EOS]:
        number = tokenizer.size - 1 - i
        if i > data.EOS and number >= tokenizer.sentinels:
            words.append(i)
            continue
        text += tokenizer.pieces(words)
        words = []
        if i > data.EOS:
            filled = tokenizer.pieces(spans.get(number, []))
            space = " " * filled.startswith(" ")  # stays outside the brackets
            text += f"{space}[{filled.removeprefix(space)}]" if number in spans else " ____ "
    return " ".join(text.split())


def load_params(cfg, run_dir):
    """The newest parameters of a run, float32 -> (step, params)."""
    mesh = jax.sharding.get_mesh()

    def template(p, layout):
        sharding = jax.sharding.NamedSharding(mesh, layout)
        return jax.ShapeDtypeStruct(p.shape, jnp.float32, sharding=sharding)

    wanted = {"params": jax.tree.map(template, model.param_table(cfg.model),
                                     model.param_specs(cfg.model), is_leaf=model.is_param)}
    found = partition.Checkpoints(run_dir).load(wanted)
    if not found:
        raise UserError(f"{run_dir} has no whole checkpoint yet: train.py writes them.")
    return found[0], found[1]["params"]


def main(argv):
    args, changes = configs.parse_args(
        __doc__, argv, text_=dict(help="text with <extra_id_0> blanks"))
    if not args.run_dir:
        raise UserError("--run_dir names the run whose model answers, for instance runs/tiny.")
    cfg = configs.resolve(args, changes)
    partition.start_jax()
    partition.set_mesh(cfg, jax.devices()[:1])
    tokenizer = data.load_tokenizer(f"{args.run_dir}/spiece.model")
    _, params = load_params(cfg, args.run_dir)
    ids, most = tokenizer.encode(args.text), cfg.data.inputs_length - 1
    if len(ids) > most:
        configs.note(f"cut from {len(ids)} tokens to the {most} that --data.inputs_length leaves")
    ids = ids[:most] + [data.EOS]
    inputs = np.zeros((1, cfg.data.inputs_length), np.int32)
    inputs[0, : len(ids)] = ids
    length = cfg.decode.max_len or cfg.data.targets_length
    out = np.asarray(generate(params, inputs, inputs > 0, cfg.model, length))[0]
    print(tokenizer.decode(out))
    if spans := split_spans(out, tokenizer):
        print(fill_blanks(ids, spans, tokenizer))


if __name__ == "__main__":
    configs.run_command(main)
