"""Where every array lives: the mesh, the layout rules, checkpoints, several processes.

- The devices form a mesh with two axes, "data" and "model".
- What an axis of an array means (batch, heads, ...) decides by RULES which mesh axis splits it;
  nothing else decides layouts. A pod and a laptop run the same program.
- The mesh is of jax's Explicit kind: the layout is part of an array's type, and a wrong one fails
  when the program is traced, on one device as on a thousand.
- A checkpoint is a folder of pieces, of which each process writes those it holds, and a manifest,
  written last. It can be read on any other mesh.

    python partition.py --verify RUN_DIR/checkpoints/step_00001000    name what is damaged
"""

import collections
import json
import math
import os
import re
import shutil
import struct
import sys
import tempfile
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import flax.traverse_util
import jax
import msgpack
import numpy as np
from jax import NamedSharding, P
from jax.experimental import multihost_utils

import configs
from configs import (
    UserError,
    is_remote,
    note,
    parse_args,
    run_command,
    to_path,
    write_file,
)

# What an axis means -> the mesh axis it is split over while the model computes (Megatron's layout:
# the wide axis of every pair of matrices, so that attention and MLP each end in one all-reduce).
RULES = {
    "batch": "data",
    "vocab": "model",
    "heads": "model",
    "mlp": "model",
    # are whole on every device
    "embed": None,
    "layers": None,
    "buckets": None,
    None: None,
}
# Fully sharded (ZeRO-3): at rest, weights and optimizer are split over the data axis as well.
STORAGE_RULES = {**RULES, "embed": "data"}


def spec(axes, rules=RULES):
    """("embed", "mlp") -> PartitionSpec(None, "model")."""
    return P(*(rules[axis] for axis in axes))


def set_mesh(cfg, devices=None):
    """Config -> the mesh ("data", "model") over all devices, made the current one."""
    devices = jax.devices() if devices is None else devices
    m, parts = cfg.model, cfg.mesh.model
    data = len(devices) // parts
    rows = cfg.train.batch_size // cfg.train.microbatches
    for number, divisor, sentence in (
        (
            len(devices),
            parts,
            f"{len(devices)} devices cannot be shared by --mesh.model {parts}",
        ),
        (
            m.num_heads,
            parts,
            f"--mesh.model {parts} does not divide the {m.num_heads} heads",
        ),
        (m.d_ff, parts, f"--mesh.model {parts} does not divide d_ff {m.d_ff}"),
        (
            m.vocab_size,
            parts,
            f"--mesh.model {parts} does not divide vocab_size {m.vocab_size}",
        ),
        (
            rows,
            data,
            f"{rows} rows (--train.batch_size over --train.microbatches) cannot be dealt "
            f"evenly to {data} data-parallel devices",
        ),
        (
            m.d_model * cfg.mesh.fsdp,
            data,
            f"--mesh.fsdp cannot split d_model {m.d_model} evenly over {data} devices",
        ),
    ):
        if number % divisor:
            raise UserError(f"{sentence}: change one of the two.")
    try:
        mesh = jax.make_mesh(
            (data, parts),
            ("data", "model"),
            devices=devices,
            axis_types=(jax.sharding.AxisType.Explicit,) * 2,
        )
    except NotImplementedError as error:
        raise UserError(
            f"--mesh.model {parts} is no product of TPU sides: change it."
        ) from error
    jax.set_mesh(mesh)
    return mesh


def platform():
    """What the program is compiled for, by the devices of the current mesh: cpu, gpu or tpu."""
    return jax.sharding.get_abstract_mesh().abstract_device.platform


def default_compute_dtype():
    """Return bfloat16 on GPUs and TPUs, and float32 on CPUs, where bfloat16 is slow."""
    return jax.numpy.float32 if platform() == "cpu" else jax.numpy.bfloat16


def local_rows(batch_size, mesh):
    """Which rows of a global batch this process's devices hold: asked of the layout."""
    indices = (
        NamedSharding(mesh, P("data"))
        .addressable_devices_indices_map((batch_size,))
        .values()
    )
    return np.unique([row for (span,) in indices for row in range(batch_size)[span]])


def put_batch(batch, batch_size, mesh):
    """This process's rows of a batch (arrays [rows, length]) -> global arrays split over "data"."""
    sharding = NamedSharding(mesh, P("data"))
    return jax.tree.map(
        lambda a: jax.make_array_from_process_local_data(
            sharding, a, (batch_size, *a.shape[1:])
        ),
        batch,
    )


# ---- several processes ---------------------------------------------------------------------------


def start_jax(cfg):
    """Before the first device is touched: join other processes, keep compiled programs."""
    d = cfg.distributed
    if d.process == 0:
        note(f"waiting for {d.processes} processes to meet at {d.coordinator}")

    def give_up():
        note(
            f"The processes did not meet within {d.timeout} s: start the same command on all "
            f"machines, or raise --distributed.timeout.",
            always=True,
        )
        os._exit(2)

    alone = threading.Timer(d.timeout, give_up)  # JAX itself would abort
    alone.start()
    try:
        jax.distributed.initialize(
            d.coordinator or None,
            d.processes,
            d.process,
            initialization_timeout=d.timeout + 60,
            heartbeat_timeout_seconds=d.timeout,
        )
    # nothing was named, and no cluster (Cloud TPU, SLURM, ...) was found
    except ValueError:
        if d.coordinator:
            raise
    finally:
        alone.cancel()
    if jax.process_count() > 1:
        configs.single_process = False
        if not is_main_process():
            configs.prints_progress = False  # the first process says it for all
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        # Gloo must have met within 30 s; from here on it waits as long as it takes
        all_processes_agree(True)
    if not jax.config.jax_compilation_cache_dir:
        jax.config.update(
            "jax_compilation_cache_dir", os.path.expanduser("~/.cache/plain_t5/compiled")
        )
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def is_main_process():
    """Whether this is the process that writes files and speaks."""
    return jax.process_index() == 0


def all_processes_agree(good):
    """Whether `good` is true on every process: the same answer on all of them."""
    return bool(multihost_utils.process_allgather(np.array(bool(good))).all())


def from_main_process(value):
    """A value for JSON as the first process knows it, on all of them."""
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.array(len(text))))
    text = multihost_utils.broadcast_one_to_all(np.resize(text, size))
    return json.loads(bytes(text))


def run_on_all(work, elsewhere=UserError):
    """work() on every process -> its result. Where it raises on one, all of them raise: those on
    which all went well an exception of the kind `elsewhere`."""
    result = error = None
    try:
        result = work()
    except (UserError, CheckpointError, OSError) as raised:
        error = raised
    if not all_processes_agree(not error):
        raise error or elsewhere("another process of this run could not do its part")
    return result


def run_on_main_first(work):
    """work() on the first process, which may write files, then on the others, which find them."""
    result = run_on_all(lambda: work() if is_main_process() else None)
    others = run_on_all(lambda: None if is_main_process() else work())
    return result if is_main_process() else others


# ---- checkpoints ---------------------------------------------------------------------------------
# run_dir/checkpoints/step_00001000/pieces-00000-of-00001.msgpack   the pieces that process 0 holds
#                                   manifest.json   step, shapes, dtypes, place and crc32 of pieces
#
# A piece file is a valid msgpack stream: a header, the bytes of a piece, a header, ... It is
# written straight from the arrays' memory. The manifest is written last and the folder gets its
# name after that: what has the name is whole.

FORMAT = 2
MAX_SHARD_BYTES = 1 << 30  # msgpack's limit for one value is 4 GiB

SHARD_FORM = [{"file": str, "offset": int, "bounds": [[int]], "crc32": int}]
ARRAY_FORM = {str: {"shape": [int], "dtype": str, "pieces": SHARD_FORM}}


class CheckpointError(Exception):
    """A checkpoint that cannot be read or written; says which file and why."""


def flatten(tree):
    """Nested dict of arrays -> {"params/encoder/...": array}."""
    return flax.traverse_util.flatten_dict(tree, sep="/")


def local_shards(tree):
    """(name, [[start, stop] of each axis], NumPy array) for all that this process must write. Of
    copies on several devices one is written. The arrays are views of the live memory on a CPU and
    copies elsewhere; either way they keep their values while training goes on."""
    arrays = flatten(tree)
    for array in arrays.values():
        array.copy_to_host_async()
    for name, array in sorted(arrays.items()):
        for shard in array.addressable_shards:
            if shard.replica_id:
                continue
            bounds = [
                list(cut.indices(size)[:2]) for cut, size in zip(shard.index, array.shape)
            ]
            data = np.ascontiguousarray(shard.data)
            if data.nbytes <= MAX_SHARD_BYTES:
                yield name, bounds, data
                continue
            rows = max(1, len(data) * MAX_SHARD_BYTES // data.nbytes)
            for start in range(0, len(data), rows):
                part = data[start : start + rows]
                first = bounds[0][0] + start
                yield name, [[first, first + len(part)], *bounds[1:]], part


def write_shards(path, pieces):
    """Stream pieces into a file -> {name: [place of each piece]}."""
    places = {}
    with path.open("wb") as file:
        for name, bounds, data in pieces:
            crc = zlib.crc32(data)
            header = {
                "name": name,
                "bounds": bounds,
                "dtype": data.dtype.name,
                "crc32": crc,
            }
            # bin 32
            file.write(msgpack.packb(header) + b"\xc6" + struct.pack(">I", data.nbytes))
            places.setdefault(name, []).append(
                {"file": path.name, "offset": file.tell(), "bounds": bounds, "crc32": crc}
            )
            file.write(data.reshape(-1).view(np.uint8).data)
        if not is_remote(path):
            file.flush()
            os.fsync(file.fileno())
    return places


def sync_folder(path):
    """Make the names in a folder survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def write_checkpoint(folder, arrays, pieces, step):
    """Write the checkpoint folder: pieces first, the manifest after them, its name last. Every
    process writes its own pieces, and beside them where they lie; the first, which sees when the
    last has done so, writes the manifest. That takes no communication, which could get in the way
    of the training that goes on meanwhile. Where folders cannot be renamed, at a remote place, the
    manifest alone says that a checkpoint is whole."""
    temporary = folder if is_remote(folder) else folder.with_name(f"tmp-{folder.name}")
    temporary.mkdir(parents=True, exist_ok=True)
    # a damaged checkpoint of this step is none from here on
    if is_remote(folder) and is_main_process():
        (folder / "manifest.json").unlink(missing_ok=True)
    count = jax.process_count()
    files = [temporary / f"pieces-{i:05}-of-{count:05}.msgpack" for i in range(count)]
    own = files[jax.process_index()]
    places = write_shards(own, pieces)
    if not is_main_process():
        return write_file(own.with_suffix(".json"), json.dumps(places))
    for path in (path.with_suffix(".json") for path in files[1:]):
        for name, more in json.loads(wait_for(path)).items():
            places[name] = places.get(name, []) + more
        path.unlink()
    arrays = {
        name: {
            "shape": list(arrays[name]["shape"]),
            "dtype": arrays[name]["dtype"],
            "pieces": places[name],
        }
        for name in sorted(arrays)
    }
    configs.write_checked(
        temporary / "manifest.json",
        {
            "format": FORMAT,
            "step": step,
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "arrays": arrays,
        },
    )
    if not is_remote(folder):
        sync_folder(temporary)
        remove_checkpoint(folder)  # a damaged one of this step, which was passed over
        temporary.rename(folder)
        sync_folder(folder.parent)


def wait_for(path, seconds=600):
    """The text of a file that another process writes."""
    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"{path} has not come in {seconds} s: every process must write "
                f"to the same --run_dir, and the first must see it"
            )
        time.sleep(0.05)
    return path.read_text()


def remove_checkpoint(path):
    """Remove a checkpoint, or what lies in its place; what is left of it after a kill is none."""
    if is_remote(path):
        (path / "manifest.json").unlink(missing_ok=True)
        path.rmtree()
    elif path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# ====== below: reading checkpoints, those of a run, what a layout costs, the command ==============


def read_manifest(folder):
    """A checkpoint's manifest, verified; a folder's name says of which step it must be."""
    path, form = (
        folder / "manifest.json",
        {"format": int, "step": int, "arrays": ARRAY_FORM},
    )
    try:
        manifest = configs.read_json(path, {"format": int})
        if manifest["format"] < 2:  # its checksum covers less
            configs.check_json(manifest, form)
            covered = [manifest["arrays"], manifest.get("reader")]
            if manifest.get("crc32") != configs.checksum(covered):
                raise ValueError("its checksum differs")
        elif manifest["format"] <= FORMAT:
            manifest = configs.read_checked(path, form)
        named = re.fullmatch(r"step_(\d+)", folder.name)
        if manifest["format"] <= FORMAT and named and int(named[1]) != manifest["step"]:
            raise ValueError(f"it is of step {manifest['step']}")
    except (UserError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged ({error})") from error
    if manifest["format"] > FORMAT:
        raise UserError(
            f"{folder} has format {manifest['format']} and this version of plain T5 "
            f"reads {FORMAT}: use a newer one."
        )
    return manifest


def read_shard(folder, place, dtype):
    """One piece as an array over its file, its checksum verified."""
    shape = [stop - start for start, stop in place["bounds"]]
    path, size = folder / Path(place["file"]).name, math.prod(shape) * dtype.itemsize
    try:
        if is_remote(path):
            with path.open("rb") as file:
                file.seek(place["offset"])
                data = file.read(size)
        else:
            data = (
                np.memmap(path, np.uint8, "r", place["offset"], (size,)) if size else b""
            )
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is missing or too short ({error})") from error
    if zlib.crc32(data) != place["crc32"]:
        raise CheckpointError(f"{path} is damaged at byte {place['offset']}")
    return np.frombuffer(data, dtype).reshape(shape)


def read_slice(folder, array, index, verified):
    """A part of a stored array, which may be a view of its file. array: what the manifest says
    about it; index: a slice for each axis; verified: a dict that keeps the pieces that were read
    and found whole, or None to keep none."""

    def within(part, bounds):
        return tuple(slice(a - b, c - b) for (a, c), (b, _) in zip(part, bounds))

    dtype, verified = np.dtype(array["dtype"]), {} if verified is None else verified
    cuts = [cut.indices(size)[:2] for cut, size in zip(index, array["shape"])]
    out = np.empty([stop - start for start, stop in cuts], dtype)
    for number, place in enumerate(array["pieces"]):
        inside = [(max(a, b), min(c, d)) for (a, c), (b, d) in zip(cuts, place["bounds"])]
        if any(a >= b for a, b in inside):
            continue
        if number not in verified:
            verified[number] = read_shard(folder, place, dtype)
        piece = verified[number][within(inside, place["bounds"])]
        if piece.shape == out.shape:
            return piece
        out[within(inside, cuts)] = piece
    return out


def read_checkpoint(folder, template):
    """Read the arrays of `template` (ShapeDtypeStructs), in its layouts -> (step, tree like it)."""
    manifest = read_manifest(folder)
    stored = manifest["arrays"]

    def read(name, wanted):
        if name not in stored:
            raise UserError(
                f"{folder} has no array {name}: it is of another model or optimizer, "
                f"or holds weights alone, from which --init_from begins a run."
            )
        shape, dtype = tuple(stored[name]["shape"]), np.dtype(stored[name]["dtype"])
        if shape != wanted.shape or dtype != wanted.dtype:
            raise UserError(
                f"{folder}: {name} is {dtype}{list(shape)}, the configuration asks for "
                f"{wanted.dtype}{list(wanted.shape)}."
            )
        verified = {}

        def part(index):  # the slice of the array that one device holds
            found = read_slice(folder, stored[name], index, verified)
            # jax may keep the memory
            return found if found.base is None else np.array(found)

        return jax.make_array_from_callback(shape, wanted.sharding, part)

    arrays = {name: read(name, wanted) for name, wanted in flatten(template).items()}
    return manifest["step"], flax.traverse_util.unflatten_dict(arrays, sep="/")


def read_metrics_file(path):
    """metrics.jsonl -> its lines that are whole: flat dicts with a step."""
    form, found = {"step": int, str: (int, float)}, []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            value = json.loads(line)
            configs.check_json(value, form)
            found.append(value)
        except (ValueError, RecursionError):
            continue  # torn by a kill, or damaged
    return found


def best_step(path, metric, steps):
    """Of these steps in a metrics.jsonl (step, value) with the best, or lowest loss, or None."""
    found = {
        line["step"]: line[metric] for line in read_metrics_file(path) if metric in line
    }
    sign = -1 if metric.endswith(("loss", "perplexity")) else 1
    known = [
        (step, found[step]) for step in steps if not math.isnan(found.get(step, math.nan))
    ]
    return max(known, key=lambda pair: sign * pair[1], default=None)


def resolve_step(run_dir, name):
    """--step: a number; latest, which is None; best, by the run's train.keep_best."""
    if re.fullmatch(r"\d{1,12}", name):
        return int(name)
    if name == "latest":
        return None
    if name != "best":
        raise UserError(f"--step takes a step, latest or best, not {name!r}.")
    metric = configs.load_run(run_dir).train.keep_best
    found = metric and best_step(
        to_path(run_dir) / "metrics.jsonl", metric, Checkpoints(run_dir).steps()
    )
    if not found:
        raise UserError(
            f"{run_dir} has no best step: it was not trained with --train.keep_best."
        )
    return found[0]


class Checkpoints:
    """The checkpoints of a run. At most one is being written, in the background if so wished."""

    def __init__(self, run_dir, keep=3, background=True):
        self.folder = to_path(run_dir) / "checkpoints"
        self.keep, self.background = keep, background
        self.writer, self.writing = ThreadPoolExecutor(1), None

    def steps(self):
        """Steps of the whole checkpoints, rising."""
        return sorted(
            int(path.name[5:])
            for path in self.folders()
            if path.name.startswith("step_")
            and path.is_dir()
            and (not is_remote(path) or (path / "manifest.json").exists())
        )

    def folders(self):
        """The paths of checkpoints, and of what killed saves have left."""
        found = self.folder.iterdir() if self.folder.exists() else ()
        return [
            path for path in found if re.fullmatch(r"(tmp-)?step_\d{1,12}", path.name)
        ]

    def path(self, step):
        return self.folder / f"step_{step:08}"

    def save(self, tree, step, best=None):
        """Start to write a nested dict of arrays; waits for the checkpoint before it. best: the
        step of a checkpoint that stays however old it is."""
        self.wait()
        arrays = {
            name: {"shape": a.shape, "dtype": a.dtype.name}
            for name, a in flatten(tree).items()
        }
        pieces = local_shards(tree)
        if self.background:
            self.writing = self.writer.submit(
                self.commit, arrays, list(pieces), step, best
            )
        else:
            self.commit(arrays, pieces, step, best)

    def commit(self, arrays, pieces, step, best=None):
        try:
            write_checkpoint(self.path(step), arrays, pieces, step)
        except OSError as error:  # a full disk, for instance
            raise CheckpointError(
                f"{self.path(step)} could not be written ({error})"
            ) from error
        for old in (
            [s for s in self.steps() if s <= step][: -self.keep]
            if is_main_process()
            else ()
        ):
            if old != best:
                remove_checkpoint(self.path(old))

    def discard_unfinished(self):
        """Remove what a save that was killed has left; only for the one process that writes."""
        whole = self.steps()
        for path in self.folders():
            if path.name.startswith("tmp-") or int(path.name[5:]) not in whole:
                remove_checkpoint(path)

    def wait(self):
        """Return when nothing is being written; an error in the background is raised here."""
        writing, self.writing = self.writing, None
        if writing:
            writing.result()

    def load(self, template, step=None):
        """The newest whole checkpoint -> (step, tree like `template`), or None if there is none. A
        damaged one is named and the one before it is taken; a UserError where all are damaged.
        template: nested dict of ShapeDtypeStructs with their layouts; what else a checkpoint holds
        is left alone. step: that checkpoint and no other."""
        steps = from_main_process(self.steps())
        if step not in (None, *steps):
            raise UserError(
                f"{self.folder} has no step {step:,}; it has "
                f"{', '.join(map(str, steps)) or 'none'}."
            )
        for path in map(self.path, reversed(steps) if step is None else [step]):
            try:
                return run_on_all(
                    lambda: read_checkpoint(path, template), CheckpointError
                )
            except CheckpointError as error:
                if step is not None:
                    raise UserError(f"{error}: name another --step.") from error
                note(f"{error}; trying the checkpoint before it", always=True)
        if steps:
            raise UserError(
                f"None of the checkpoints in {self.folder} is whole: restore one from "
                f"a copy, or move the folder away to begin anew."
            )
        return None


def find_checkpoint(source):
    """A run's directory or a checkpoint -> whether it is a run; refuses what is neither."""
    if (to_path(source) / "manifest.json").exists():
        return False
    if not Checkpoints(source).steps():
        raise UserError(
            f"{source} is neither a run with checkpoints nor a checkpoint: name one, "
            f"or convert other weights first."
        )
    return True


def load_newest(source, template):
    """The newest checkpoint of a run's directory, or one checkpoint -> as Checkpoints.load."""
    if find_checkpoint(source):
        return Checkpoints(source).load(template)
    try:
        return run_on_all(
            lambda: read_checkpoint(to_path(source), template), CheckpointError
        )
    except CheckpointError as error:
        raise UserError(f"{error}: name another checkpoint.") from error


# ---- what a layout costs -------------------------------------------------------------------------


class Chip(NamedTuple):
    """A device by its data sheet, dense bfloat16; links: to its neighbours, in one direction."""

    teraflops: float
    memory: float  # GB
    links: float  # GB/s
    clock: float = 0.0  # GHz, of a TPU


CHIPS = {  # names as in jax's device_kind; a device of v3 is half a chip
    "H200": Chip(989.5, 141, 450),
    "H100": Chip(989.5, 80, 450),
    "A100": Chip(312, 80, 300),
    "V100": Chip(125, 32, 150),
    "TPU v3": Chip(61.5, 16, 41, 0.94),
    "TPU v4": Chip(275, 32, 150, 1.05),
    "TPU v5 lite": Chip(197, 16, 100, 1.503),
    "TPU v5": Chip(459, 95, 300, 1.75),
    "TPU v6 lite": Chip(918, 32, 224, 1.75),
}


# What lets a TPU send beside arithmetic. With all of GATHERS it gathers split weights so, else by
# all-reduces before it; with SUMS each large gradient by itself, not all at the end. FUSIONS lets
# each use 24 MiB of fast memory, not 16; v6e is slower so. A v4 has too little for both of these.
ASYNC_GATHER_OPTIONS = dict.fromkeys(
    (
        "xla_enable_async_all_gather",
        "xla_tpu_prefer_async_allgather_to_allreduce",
        "xla_tpu_enable_async_collective_fusion",
        "xla_tpu_overlap_compute_collective_tc",
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather",
        "xla_tpu_enable_async_collective_fusion_multiple_steps",
    ),
    True,
)
ASYNC_REDUCE_OPTIONS = {
    "xla_enable_async_all_reduce": True,
    "xla_jf_crs_combiner_threshold_in_bytes": 1_000_000,
    "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": True,
}
FUSION_MEMORY_OPTIONS = {"xla_tpu_scoped_vmem_limit_kib": 24 * 1024}


def check_memory(parts, levers):
    """Refuse what all devices together cannot hold. parts: {what: bytes}."""
    device = jax.local_devices()[0]
    if device.platform == "cpu":  # CPU devices share what the machine has
        there = configs.machine_memory() * jax.process_count()
    else:
        there = (device.memory_stats() or {}).get(
            "bytes_limit", math.inf
        ) * jax.device_count()
    configs.require_memory(parts, there, f"{levers}, or take more devices")


def bytes_on_device(tree):
    """Arrays or ShapeDtypeStructs with layouts -> bytes that one device holds of them."""
    return sum(
        math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize
        for a in jax.tree.leaves(tree)
    )


COLLECTIVES = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"


def count_collectives(lowered):
    """Compile a program -> ([(kind of collective, mesh axis, count, bytes that each device sends,
    on a ring)], the compiled program). Read from what XLA's partitioner leaves, where dtypes are
    still the program's own: later XLA's CPU backend turns bfloat16 into float32."""
    mesh, counts, moved = (
        jax.sharding.get_mesh(),
        collections.Counter(),
        collections.Counter(),
    )
    nobody_runs_it = mesh.devices.flat[0].platform == "cpu"
    with tempfile.TemporaryDirectory() as folder:
        program = lowered.compile(
            {
                "xla_dump_to": folder,
                "xla_dump_hlo_pass_re": "spmd-partitioning",
                **({"xla_backend_optimization_level": "0"} if nobody_runs_it else {}),
            }
        )
        if mesh.size == 1:
            return [], program
        (path,) = Path(folder).glob("*spmd-partitioning.before*.txt")
        text = path.read_text()
    for line, times in hlo_instructions(text):
        if one := re.search(rf" = (.*?) ({COLLECTIVES})\(", line):
            group = first_device_group(line, mesh.size)
            if len(group) == 1:
                continue
            part = 1 - 1 / len(group)  # a ring sends all but one's own
            sent = {
                "all-reduce": 2 * part,
                "reduce-scatter": len(group) - 1,
                "collective-permute": 1,
            }.get(one[2], part)
            whole = len(group) == mesh.size and min(mesh.shape.values()) > 1
            near = abs(group[1] - group[0]) < mesh.shape["model"]
            key = one[2], "both" if whole else "model" if near else "data"
            counts[key] += times
            moved[key] += times * sent * hlo_bytes(one[1])
    return [(*key, counts[key], moved[key]) for key in sorted(counts)], program


def hlo_bytes(shapes):
    """HLO's "(f32[2,3]{1,0}, pred[4])" -> bytes."""
    return sum(
        int(bits or 8) // 8 * math.prod(integers(sizes))
        for bits, sizes in re.findall(r"\b[a-z]+(\d*)\w*\[([\d,]*)\]", shapes)
    )


def integers(text):
    return list(map(int, re.findall(r"\d+", text)))


def first_device_group(line, count):
    """The devices, of so many, of the first group that a collective of HLO goes on among."""
    if listed := re.search(
        r"(?:replica_groups|source_target_pairs)=\{\{([\d,]+)\}", line
    ):
        return integers(listed[1])
    devices = np.arange(count)
    if order := re.search(r"(?:<=|device_ids=\()\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        devices = devices.reshape(integers(order[1]))
        devices = devices.transpose(integers(order[2])) if order[2] else devices
    if rows := re.search(r"replica_groups=\[(\d+,\d+)\]", line):  # [2,4]<=[4,2]T(1,0)
        return devices.reshape(integers(rows[1]))[0]
    if axes := re.search(r"replica_groups=mesh\[(.*?)\].*?\{(.*?)\}", line):
        # mesh['axis_0'=2,'axis_1'=4], device_ids=([4,2]T(1,0)) {'axis_1'}
        sizes = re.findall(r"('\w+')=(\d+)", axes[1])
        inside = tuple(slice(None) if name in axes[2] else 0 for name, _ in sizes)
        return devices.reshape([int(size) for _, size in sizes])[inside].ravel()
    return devices.ravel()  # all of them


def hlo_instructions(text):
    """HLO -> (line, how often it runs) of each instruction: a loop's body stands there once and
    runs as often as the constant in its condition says."""
    bodies = dict(re.findall(r"^(?:ENTRY )?%(\S+) \(.*?\{\n(.*?)^\}", text, re.M | re.S))

    def visit(name, times):
        for line in bodies[name].splitlines():
            if loop := re.search(
                r"\bwhile\(.*condition=%(\S+?), body=%(\S+?)[,\s]", line + " "
            ):
                known = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
                turns = (
                    [known[1]]
                    if known
                    else re.findall(r"constant\((\d+)\)", bodies[loop[1]])
                )
                yield from visit(loop[2], times * max(map(int, turns)))
            elif call := re.search(r"\bcall\(.*to_apply=%(\S+?)[,\s]", line + " "):
                yield from visit(call[1], times)
            else:
                yield line, times

    return visit([*bodies][-1], 1)  # the last one is the program itself


def estimated_cycles(text):
    """Compiled for a TPU: its HLO -> {part of the step: cycles}, by the compiler's own estimate,
    {collective: times}, {collective: bytes sent by each device}; "overlapped": beside others."""
    parts, counts, sent = (collections.Counter() for _ in range(3))
    ring = {"all-reduce": 2, "reduce-scatter": jax.sharding.get_mesh().shape["data"]}
    for line, times in hlo_instructions(text):
        if price := re.search(r'"estimated_cycles":"(\d+)"', line):
            path = (re.search(r'op_name="([^"]*)"', line) or [""] * 2)[1]
            part = next(
                (
                    name
                    for name in ("attention", "mlp", "logits and loss")
                    if f"/{name}/" in path or f"({name})" in path
                ),
                "the rest",
            )
            kind = "" if "jvp" in path else "optimizer" if path else "copies"
            parts[
                kind
                or part
                + ", again" * ("rematted" in path)
                + (", gradient" * ("transpose(" in path))
            ] += int(price[1]) * times
        if one := re.search(
            rf" ({COLLECTIVES})(-start)?\(|calls=%all-(reduce-scatter)|"
            r"%async-collective(-start)\S* = ",
            line,
        ):
            call = (one[1] or one[3] or "collectives") + ", overlapped" * bool(
                one[2] or one[4]
            )
            # below: of a fusion, what it takes and returns, not its counters
            counts[call] += times
            sent[call] += (
                times * hlo_bytes(re.split(r"\(%| s32\[2\]", line)[0]) * ring.get(call, 1)
            )
    return parts, counts, sent


# ---- the command ---------------------------------------------------------------------------------


def verify(folder):
    """Read every piece of a checkpoint -> a list of sentences, one for each that is damaged."""
    problems = []
    for name, array in read_manifest(folder)["arrays"].items():
        for place in array["pieces"]:
            try:
                read_shard(folder, place, np.dtype(array["dtype"]))
            except CheckpointError as error:
                problems.append(f"{name}: {error}")
    return problems


def main(argv):
    args, _ = parse_args(__doc__, argv, verify=dict(metavar="CHECKPOINT", required=True))
    if not to_path(args.verify).is_dir():
        raise UserError(
            f"There is no folder {args.verify}: --verify names a checkpoint, such as "
            f"runs/tiny/checkpoints/step_00001500."
        )
    try:
        problems = verify(to_path(args.verify))
    except CheckpointError as error:
        problems = [str(error)]
    print("\n".join(problems) or f"{args.verify} is whole.")
    return int(bool(problems))


if __name__ == "__main__":
    run_command(main)
