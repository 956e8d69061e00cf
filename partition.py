"""Where every array lives: the mesh, the layout rules, checkpoints.

    python partition.py --verify RUN_DIR/checkpoints/step_00001000    name what is damaged

The devices form a mesh with two axes, "data" and "model". What an axis of an array means (batch,
heads, mlp, ...) decides by RULES which mesh axis it is split over; nothing else decides layouts.
The mesh is of jax's Explicit kind: the layout is part of an array's type, wrong ones fail when the
program is traced, on one device as well as on a thousand.
"""

import json
import math
import os
import shutil
import struct
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import flax.traverse_util
import jax
import msgpack
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from configs import UserError, note, parse_args, run_command, write_file

# What an axis means -> the mesh axis it is split over while the model computes (Megatron's layout:
# the wide axis of every pair of matrices, so that attention and MLP each end in one all-reduce).
RULES = {
    "batch": "data",
    "vocab": "model",
    "heads": "model",
    "mlp": "model",
    "embed": None,
    "layers": None,
    "buckets": None,
}
# Fully sharded (ZeRO-3): at rest, weights and optimizer are split over the data axis as well, and
# each layer's weights are gathered when it is their turn.
RULES_AT_REST = {**RULES, "embed": "data"}


# Peak TFLOP/s of one device in bfloat16 (dense), by its data sheet; names as in jax's device_kind.
CHIPS = {
    "H200": 989.5, "H100": 989.5, "A100": 312.0, "V100": 125.0,
    "TPU v3": 61.5, "TPU v4": 275.0, "TPU v5 lite": 197.0, "TPU v5": 459.0, "TPU v6 lite": 918.0,
}


def spec(axes, rules=RULES):
    """("embed", "mlp") -> PartitionSpec(None, "model")."""
    return P(*(rules[axis] for axis in axes))


def start_jax():
    """Before the first device is touched: keep compiled programs between runs."""
    if not jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir",
                          os.path.expanduser("~/.cache/plain_t5/compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def set_mesh(cfg, devices=None):
    """Config -> the mesh ("data", "model") over all devices, made the current one."""
    devices = jax.devices() if devices is None else devices
    data, rest = divmod(len(devices), cfg.mesh.model)
    micro = cfg.train.batch_size // cfg.train.microbatches
    for good, sentence in (
        (rest == 0, f"{len(devices)} devices cannot be shared by --mesh.model {cfg.mesh.model}"),
        (cfg.model.num_heads % cfg.mesh.model == 0,
         f"--mesh.model {cfg.mesh.model} does not divide the model's {cfg.model.num_heads} heads"),
        (cfg.model.d_ff % cfg.mesh.model == 0,
         f"--mesh.model {cfg.mesh.model} does not divide d_ff {cfg.model.d_ff}"),
        (cfg.model.vocab_size % cfg.mesh.model == 0,
         f"--mesh.model {cfg.mesh.model} does not divide the {cfg.model.vocab_size} embeddings"),
        (micro % max(data, 1) == 0,
         f"{micro} rows (--train.batch_size over --train.microbatches) cannot be dealt evenly to "
         f"{data} data-parallel devices"),
        (not cfg.mesh.fsdp or cfg.model.d_model % max(data, 1) == 0,
         f"--mesh.fsdp cannot split d_model {cfg.model.d_model} evenly over {data} devices"),
    ):
        if not good:
            raise UserError(f"{sentence}: change one of the two.")
    mesh = jax.make_mesh((data, cfg.mesh.model), ("data", "model"), (AxisType.Explicit,) * 2,
                         devices=devices)
    jax.set_mesh(mesh)
    return mesh


def local_rows(batch_size, mesh):
    """Which rows of a global batch this process's devices hold: asked of the layout."""
    indices = NamedSharding(mesh, P("data")).addressable_devices_indices_map((batch_size,)).values()
    return np.unique([row for (span,) in indices for row in range(batch_size)[span]])


def put_batch(batch, batch_size, mesh):
    """This process's rows of a batch (arrays [rows, length]) -> global arrays split over "data"."""
    def put(a):
        return jax.make_array_from_process_local_data(sharding, a, (batch_size, *a.shape[1:]))

    sharding = NamedSharding(mesh, P("data"))
    return jax.tree.map(put, batch)


# ---- checkpoints ---------------------------------------------------------------------------------
# run_dir/checkpoints/step_00001000/pieces-00000-of-00001.msgpack   the pieces that process 0 holds
#                                   manifest.json   step, shapes, dtypes, place and crc32 of pieces
#
# A piece file is a valid msgpack stream: a header, the bytes of a piece, a header, ... It is
# written straight from the arrays' memory. The manifest is written last and the folder gets its
# name after that: what has the name is whole.

FORMAT = 1
PIECE_BYTES = 1 << 30  # msgpack's limit for one value is 4 GiB


class CheckpointError(Exception):
    """A checkpoint that cannot be read or written; says which file and why."""


def flatten(tree):
    """Nested dict of arrays -> {"params/encoder/...": array}."""
    return flax.traverse_util.flatten_dict(tree, sep="/")


def own_pieces(tree):
    """(name, [[start, stop] of each axis], NumPy array) for all that this process must write.

    Of copies on several devices one is written. The arrays are views of the live memory on a CPU
    and copies elsewhere; either way they keep their values while training goes on.
    """
    arrays = flatten(tree)
    for array in arrays.values():
        array.copy_to_host_async()
    for name, array in sorted(arrays.items()):
        for shard in array.addressable_shards:
            if shard.replica_id:
                continue
            bounds = [list(cut.indices(size)[:2]) for cut, size in zip(shard.index, array.shape)]
            data = np.ascontiguousarray(shard.data)
            if data.nbytes <= PIECE_BYTES:
                yield name, bounds, data
                continue
            rows = max(1, len(data) * PIECE_BYTES // data.nbytes)
            for start in range(0, len(data), rows):
                part = data[start : start + rows]
                first = bounds[0][0] + start
                yield name, [[first, first + len(part)], *bounds[1:]], part


def write_pieces(path, pieces):
    """Stream pieces into a file -> {name: [place of each piece]}."""
    places = {}
    with open(path, "wb", buffering=1 << 20) as file:
        for name, bounds, data in pieces:
            crc = zlib.crc32(data)
            header = {"name": name, "bounds": bounds, "dtype": data.dtype.name, "crc32": crc}
            file.write(msgpack.packb(header) + b"\xc6" + struct.pack(">I", data.nbytes))  # bin 32
            places.setdefault(name, []).append(
                {"file": path.name, "offset": file.tell(), "bounds": bounds, "crc32": crc})
            file.write(data.reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())
    return places


def sync_folder(path):
    """Make the names in a folder survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def crc32_of(value):
    """Checksum of a JSON value."""
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())


def write_checkpoint(folder, arrays, pieces, step, reader=None):
    """Write the checkpoint folder: pieces first, the manifest after them, its name last.

    reader: where the readers of a streamed run stand, a value for JSON.
    """
    temporary = folder.with_name(f"tmp-{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    places = write_pieces(temporary / "pieces-00000-of-00001.msgpack", pieces)
    arrays = {name: {**arrays[name], "pieces": places[name]} for name in sorted(arrays)}
    manifest = {"format": FORMAT, "step": step, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                "crc32": crc32_of([arrays, reader]), "reader": reader, "arrays": arrays}
    write_file(temporary / "manifest.json", json.dumps(manifest, indent=1))
    sync_folder(temporary)
    shutil.rmtree(folder, ignore_errors=True)  # a damaged one of this step, which was passed over
    temporary.rename(folder)
    sync_folder(folder.parent)


class Checkpoints:
    """The checkpoints of a run. At most one is being written, in the background if so wished."""

    def __init__(self, run_dir, keep=3, background=True):
        self.folder, self.keep, self.background = Path(run_dir, "checkpoints"), keep, background
        self.writer, self.writing = ThreadPoolExecutor(1), None

    def steps(self):
        """Steps of the whole checkpoints, rising."""
        return sorted(int(path.name[5:]) for path in self.folder.glob("step_[0-9]*"))

    def path(self, step):
        return self.folder / f"step_{step:08}"

    def save(self, tree, step, reader=None):
        """Start to write a nested dict of arrays; waits for the checkpoint before it."""
        self.wait()
        arrays = {name: {"shape": a.shape, "dtype": a.dtype.name}
                  for name, a in flatten(tree).items()}
        pieces = own_pieces(tree)
        if self.background:
            self.writing = self.writer.submit(self.commit, arrays, list(pieces), step, reader)
        else:
            self.commit(arrays, pieces, step, reader)

    def commit(self, arrays, pieces, step, reader):
        try:
            write_checkpoint(self.path(step), arrays, pieces, step, reader)
        except OSError as error:  # a full disk, for instance
            raise CheckpointError(f"{self.path(step)} could not be written ({error})") from error
        for old in [s for s in self.steps() if s <= step][: -self.keep]:
            shutil.rmtree(self.path(old))

    def discard_unfinished(self):
        """Remove what a save that was killed has left; only for the one process that writes."""
        for path in self.folder.glob("tmp-step_*"):
            shutil.rmtree(path)

    def wait(self):
        """Return when nothing is being written; an error in the background is raised here."""
        writing, self.writing = self.writing, None
        if writing:
            writing.result()

    def load(self, template, step=None):
        """The newest whole checkpoint -> (step, tree like `template`), or None if there is none.

        template: nested dict of ShapeDtypeStructs with their layouts; what else a checkpoint holds
        is left alone. A damaged one is named and the one before it is taken; raises a UserError
        where all are damaged. step: that checkpoint and no other.
        """
        if step is not None:
            if step not in self.steps():
                raise UserError(f"{self.folder} has no step {step:,}; it has "
                                f"{', '.join(map(str, self.steps())) or 'none'}.")
            try:
                return step, read_checkpoint(self.path(step), template)
            except CheckpointError as error:
                raise UserError(f"{error}: name another --step.") from error
        for step in reversed(self.steps()):
            try:
                return step, read_checkpoint(self.path(step), template)
            except CheckpointError as error:
                note(f"{error}; trying the checkpoint before it")
        if self.steps():
            raise UserError(f"None of the checkpoints in {self.folder} is whole: restore one from "
                            f"a copy, or move the folder away to begin anew.")
        return None


def find_checkpoint(source):
    """A run's directory or a checkpoint -> whether it is a run; refuses what is neither."""
    if (Path(source) / "manifest.json").exists():
        return False
    if not Checkpoints(source).steps():
        raise UserError(f"{source} is neither a run with checkpoints nor a checkpoint: name one, "
                        f"or convert other weights first.")
    return True


def load_from(source, template):
    """A run's directory, its newest checkpoint, or one checkpoint -> (step, tree like `template`).
    """
    if find_checkpoint(source):
        return Checkpoints(source).load(template)
    try:
        return read_manifest(Path(source))["step"], read_checkpoint(Path(source), template)
    except CheckpointError as error:
        raise UserError(f"{error}: name another checkpoint.") from error


def read_manifest(folder):
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / 'manifest.json'} cannot be read ({error})") from error
    if manifest.get("format", 0) > FORMAT:
        raise UserError(f"{folder} has format {manifest['format']} and this version of plain T5 "
                        f"reads {FORMAT}: use a newer one.")
    if manifest.get("crc32") != crc32_of([manifest.get("arrays"), manifest.get("reader")]):
        raise CheckpointError(f"{folder / 'manifest.json'} is damaged")
    return manifest


def read_piece(folder, place, shape, dtype):
    """One piece as an array over its file, its checksum verified."""
    path, size = folder / place["file"], math.prod(shape) * dtype.itemsize
    try:
        data = np.memmap(path, np.uint8, "r", place["offset"], (size,)) if size else b""
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is missing or too short ({error})") from error
    if zlib.crc32(data) != place["crc32"]:
        raise CheckpointError(f"{path} is damaged at byte {place['offset']}")
    return np.frombuffer(data, dtype).reshape(shape)


def read_part(folder, array, index, verified):
    """A part of a stored array, which may be a view of its file.

    array: what the manifest says about it; index: a slice for each axis; verified: a dict that
    keeps the pieces that were read and found whole, or None to keep none.
    """
    dtype = np.dtype(array["dtype"])
    cuts = [cut.indices(size)[:2] for cut, size in zip(index, array["shape"])]
    out = None
    for number, place in enumerate(array["pieces"]):
        inside = [(max(a, b), min(c, d)) for (a, c), (b, d) in zip(cuts, place["bounds"])]
        if any(a >= b for a, b in inside):
            continue
        whole = None if verified is None else verified.get(number)
        if whole is None:
            size = [stop - start for start, stop in place["bounds"]]
            whole = read_piece(folder, place, size, dtype)
            if verified is not None:
                verified[number] = whole
        piece = whole[tuple(
            slice(a - b, c - b) for (a, c), (b, _) in zip(inside, place["bounds"]))]
        if piece.shape == tuple(c - a for a, c in cuts):
            return piece
        out = np.empty([c - a for a, c in cuts], dtype) if out is None else out
        out[tuple(slice(a - b, c - b) for (a, c), (b, _) in zip(inside, cuts))] = piece
    return np.empty([c - a for a, c in cuts], dtype) if out is None else out  # of size 0


def read_checkpoint(folder, template):
    """Read the arrays of `template` (nested dict of ShapeDtypeStructs), in its layouts."""
    stored = read_manifest(folder)["arrays"]

    def read(name, wanted):
        if name not in stored:
            raise UserError(f"{folder} has no array {name}: it is of another model or optimizer.")
        shape, dtype = tuple(stored[name]["shape"]), np.dtype(stored[name]["dtype"])
        if shape != wanted.shape or dtype != wanted.dtype:
            raise UserError(f"{folder}: {name} is {dtype}{list(shape)}, the configuration asks for "
                            f"{wanted.dtype}{list(wanted.shape)}.")
        verified = {}

        def part(index):  # the slice of the array that one device holds
            found = read_part(folder, stored[name], index, verified)
            return found if found.base is None else np.array(found)  # jax may keep the memory

        return jax.make_array_from_callback(shape, wanted.sharding, part)

    arrays = {name: read(name, wanted) for name, wanted in flatten(template).items()}
    return flax.traverse_util.unflatten_dict(arrays, sep="/")


def verify(folder):
    """Read every piece of a checkpoint -> a list of sentences, one for each that is damaged."""
    problems = []
    for name, array in read_manifest(folder)["arrays"].items():
        for place in array["pieces"]:
            size = [stop - start for start, stop in place["bounds"]]
            try:
                read_piece(folder, place, size, np.dtype(array["dtype"]))
            except CheckpointError as error:
                problems.append(f"{name}: {error}")
    return problems


def main(argv):
    args, _ = parse_args(__doc__, argv, verify=dict(metavar="CHECKPOINT", required=True))
    if not os.path.isdir(args.verify):
        raise UserError(f"There is no folder {args.verify}: --verify names a checkpoint, such as "
                        f"runs/tiny/checkpoints/step_00001500.")
    try:
        problems = verify(Path(args.verify))
    except CheckpointError as error:
        problems = [str(error)]
    print("\n".join(problems) or f"{args.verify} is whole.")
    return int(bool(problems))


if __name__ == "__main__":
    run_command(main)
