"""Decide where every array lives: on the devices of a mesh, and in the files on disk.

The functions here take a Config, NumPy batches and nested dicts of arrays. They return a
mesh, sharded JAX arrays, and checkpoints that can be restored on any other mesh.

- All devices form a mesh with two axes. The axis "data" splits the batch, and the axis
  "model" splits the model.
- RULES maps each logical axis of an array (batch, heads, mlp, ...) to a mesh axis. Every
  sharding follows from RULES, so one program runs on a laptop and on a TPU pod.
- The mesh axes have JAX's type Explicit, so the sharding is part of an array's type. JAX
  reports a wrong sharding while it traces the program, even on a mesh of one device.
- A checkpoint is a folder with the shards of all arrays and a manifest that lists the
  shards. Each process writes the shards that its own devices hold.

    python partition.py --verify runs/NAME/checkpoints/step_00001000    report damage

Example:
>>> from partition import STORAGE_RULES, spec
>>> axes = ("embed", "mlp")             # the logical axes of an MLP weight matrix
>>> tuple(spec(axes))                   # the mesh axes that split it during compute
(None, 'model')
>>> tuple(spec(axes, STORAGE_RULES))    # the mesh axes that split it in storage (FSDP)
('data', 'model')

Terms:
  logical axis    what a dimension of an array means, such as "batch", "heads" or "mlp"
  array shard     a rectangular part of an array, held by a device or stored in a file
  bounds          [start, stop] for each dimension: the position of a shard in its array
  manifest        the file manifest.json in a checkpoint, which lists all array shards
  main process    process 0, which writes the manifest and prints progress
"""

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
from collections import Counter, namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import msgpack
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import NamedSharding, P
from jax.experimental.multihost_utils import broadcast_one_to_all, process_allgather
from jax.sharding import AxisType, get_abstract_mesh, get_mesh

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

# ---- mesh and sharding rules -----------------------------------------------------------

# RULES names the mesh axis that splits each logical axis of an array during compute.
#
# "batch" on "data" is data parallelism. Each device computes the gradient for its own
# rows of the batch, and an all-reduce sums the gradients over the devices.
#
# "vocab", "heads" and "mlp" on "model" are Megatron sharding (Shoeybi et al. 2019), also
# called tensor parallelism. The first matmul of attention or MLP splits its output
# features, and the last matmul splits its input features. Attention and MLP therefore
# need only one all-reduce each.
#
# Example: an MLP weight matrix has the logical axes ("embed", "mlp") and the shape
# [512, 1024]. With 4 devices along "model", each device multiplies by a shard of shape
# [512, 256].
RULES = {
    "batch": "data",
    "vocab": "model",
    "heads": "model",
    "mlp": "model",
    # An axis with the value None is not split. Every device holds the complete axis.
    # The key None stands for a dimension without a logical axis.
    "embed": None,
    "layers": None,
    "buckets": None,
    None: None,
}

# STORAGE_RULES shards the stored weights and the optimizer state if --mesh.fsdp is true.
# This is ZeRO-3 (Rajbhandari et al. 2020), which PyTorch calls fully sharded data
# parallelism (FSDP). The weights are split over "data" too. Each layer's weights are
# all-gathered just before use.
#
# Example: with 2 devices along "data" and 4 along "model", each device stores a shard of
# the matrix above with shape [256, 256]. An all-gather over "data" produces the shard of
# shape [512, 256] that the matmul uses.
STORAGE_RULES = {**RULES, "embed": "data"}


def spec(axes, rules=RULES):
    """Return the PartitionSpec of an array.

    axes: the logical axis (a key of the rules) of each dimension.
    rules: RULES for compute or STORAGE_RULES for stored weights under FSDP.
    """
    return P(*(rules[axis] for axis in axes))


def set_mesh(cfg, devices=None):
    """Create the mesh of devices for a Config, and make JAX use this mesh.

    The mesh has the shape (data, model). The size of "model" is --mesh.model, and the
    size of "data" is the number of devices divided by --mesh.model.

    devices: a list of JAX devices; by default the devices of all processes.
    Raises UserError if a size cannot be split evenly.
    """
    devices = jax.devices() if devices is None else devices
    m = cfg.model
    model_size = cfg.mesh.model
    data_size = len(devices) // model_size
    rows = cfg.train.batch_size // cfg.train.microbatches
    model_parts = f"--mesh.model {model_size}"
    data_parts = f"The number of data-parallel devices, {data_size},"
    # Each tuple contains a name for the parts, the number of parts, the number that is
    # split, and a name for this number.
    splits = [
        (model_parts, model_size, len(devices), "devices"),
        (model_parts, model_size, m.num_heads, "heads (--model.num_heads)"),
        (model_parts, model_size, m.d_ff, "hidden channels (--model.d_ff)"),
        (model_parts, model_size, m.vocab_size, "token ids (--model.vocab_size)"),
        (data_parts, data_size, rows, "rows (--train.batch_size / --train.microbatches)"),
    ]
    if cfg.mesh.fsdp:
        channels = "channels (--model.d_model), as --mesh.fsdp requires"
        splits.append((data_parts, data_size, m.d_model, channels))
    for parts, divisor, size, what in splits:
        if size % divisor:
            raise UserError(
                f"{parts} does not divide the {size} {what}: change one of the two."
            )
    try:
        mesh = jax.make_mesh(
            (data_size, model_size),
            ("data", "model"),
            devices=devices,
            axis_types=(AxisType.Explicit,) * 2,
        )
    # JAX cannot arrange the chips of some TPU topologies in a mesh of this shape.
    except NotImplementedError as error:
        raise UserError(
            f"--mesh.model {model_size} does not fit the TPU topology: use a product of "
            f"its side lengths."
        ) from error
    jax.set_mesh(mesh)
    return mesh


def platform():
    """Return "cpu", "gpu" or "tpu": the platform of the devices of the current mesh.

    Code that depends on the platform asks the mesh and not jax.default_backend(), because
    `train.py --plan` compiles on a CPU for a mesh of TPUs.
    """
    return get_abstract_mesh().abstract_device.platform


# ---- placing a batch -------------------------------------------------------------------


def default_compute_dtype():
    """Return bfloat16 on GPUs and TPUs, and float32 on CPUs, where bfloat16 is slow."""
    return "float32" if platform() == "cpu" else "bfloat16"


def local_rows(batch_size, mesh):
    """Return the numbers of the rows of a global batch that this process must load.

    The rows follow from the sharding of the batch. The process index does not determine
    the rows, because a mesh may order the devices differently.

    Returns a sorted integer array.
    """
    sharding = NamedSharding(mesh, P("data"))
    indices = sharding.addressable_devices_indices_map((batch_size,)).values()
    # Devices along the axis "model" hold the same rows, so np.unique removes duplicates.
    return np.unique([np.arange(batch_size)[index] for index in indices])


def put_batch(batch, batch_size, mesh):
    """Make global arrays, split over "data", from the rows that each process has.

    batch: a tree of NumPy arrays [local rows, length]. The function local_rows says which
        rows these arrays must hold.
    batch_size: the number of rows in the global batch.
    """
    sharding = NamedSharding(mesh, P("data"))

    return jax.tree.map(
        lambda array: jax.make_array_from_process_local_data(
            sharding, array, (batch_size, *array.shape[1:])
        ),
        batch,
    )


# ---- writing a checkpoint --------------------------------------------------------------
# A checkpoint that two processes have written is a folder with these files:
#
#   RUN_DIR/checkpoints/step_00001000/
#     pieces-00000-of-00002.msgpack    the array shards that process 0 holds
#     pieces-00001-of-00002.msgpack    the array shards that process 1 holds
#     manifest.json                    the step; shape and dtype of each array; file,
#                                      offset, bounds and CRC-32 checksum of each shard
#
# The manifest's entry for an array with one shard looks like this:
#
#   "params/unembed": {"shape": [512, 1024], "dtype": "float32", "pieces": [
#       {"file": "pieces-00000-of-00002.msgpack", "offset": 104,
#        "bounds": [[0, 512], [0, 1024]], "crc32": 3632233996}]}
#
# The word "pieces" in file names and in the manifest means array shards. Other programs
# rely on these names, so the names cannot change.
#
# A kill or a power failure must never leave an incomplete folder that looks like a
# checkpoint. Local files are therefore written in this order:
#
#   1. Write the shard files to the folder tmp-step_00001000, and flush them to disk.
#   2. Write the manifest, and flush the manifest and the folder to disk.
#   3. Rename the folder to step_00001000, and flush the parent folder to disk.
#
# A folder with its final name is a complete checkpoint. A complete checkpoint is valid if
# the checksums of the manifest and of all shards are correct.

# The version of the file format. The manifest states it.
FORMAT = 2

# Larger shards are split. One value in msgpack may hold at most 4 GiB.
MAX_SHARD_BYTES = 1 << 30


class CheckpointError(Exception):
    """A checkpoint cannot be read or written. The message names the file and reason."""


def is_main_process():
    """Return whether this process is process 0, which prints and writes shared files."""
    return jax.process_index() == 0


def flatten(tree):
    """Return a flat dict {"params/encoder/...": leaf} for a nested dict."""
    return flatten_dict(tree, sep="/")


def local_shards(tree):
    """Yield the array shards that this process must write to a checkpoint.

    If several devices hold a copy of a shard, only the first copy is written. A shard of
    more than MAX_SHARD_BYTES is split into groups of rows.

    tree: a nested dict of jax.Arrays.
    Yields (array name, bounds, data), where data is a NumPy array. On a CPU, data is a
    view of the device's memory; elsewhere data is a copy. Training never changes these
    values.
    """
    # Start all copies from the devices before the loop below waits for the first copy.
    jax.copy_to_host_async(tree)
    for name, array in sorted(flatten(tree).items()):
        for shard in array.addressable_shards:
            if shard.replica_id != 0:
                continue
            bounds = [
                index.indices(size)[:2] for index, size in zip(shard.index, array.shape)
            ]
            data = np.ascontiguousarray(shard.data)
            if data.nbytes <= MAX_SHARD_BYTES:
                yield name, bounds, data
                continue
            # Split the shard along its first dimension.
            rows = max(1, len(data) * MAX_SHARD_BYTES // data.nbytes)
            for start in range(0, len(data), rows):
                part = data[start : start + rows]
                first = bounds[0][0] + start
                yield name, [[first, first + len(part)], *bounds[1:]], part


def write_shards(path, shards):
    """Write array shards to one file and flush the file to disk.

    The file is a valid msgpack stream that alternates between a header and the bytes of a
    shard. Equal shards give equal bytes.

    path: the path of the new file.
    shards: (array name, bounds, data) of each shard, as from local_shards.
    Returns {array name: [manifest entry of each shard]}.
    """
    entries = {}
    with path.open("wb") as file:
        for name, bounds, data in shards:
            crc = zlib.crc32(data)
            header = msgpack.packb(
                {
                    "name": name,
                    "bounds": bounds,
                    "dtype": data.dtype.name,
                    "crc32": crc,
                }
            )
            # In msgpack, binary data follows the byte C6 and a 4-byte length ("bin 32").
            # Writing this prefix by hand avoids a copy of the array into a buffer.
            file.write(header + b"\xc6" + struct.pack(">I", data.nbytes))
            entry = {
                "file": path.name,
                "offset": file.tell(),
                "bounds": bounds,
                "crc32": crc,
            }
            entries.setdefault(name, []).append(entry)
            file.write(data.reshape(-1).view(np.uint8).data)
        # A remote file is stored when it is closed.
        if not is_remote(path):
            file.flush()
            os.fsync(file.fileno())
    return entries


def sync_folder(path):
    """Flush a folder to disk, so that the file names in it survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def write_checkpoint(folder, arrays, shards, step):
    """Write this process's shards of a checkpoint and, in the main process, the manifest.

    Each process writes one file of shards. Each process except the main process also
    writes an index, a JSON file with the manifest entries of its shards. The main process
    waits for these indexes, merges them into the manifest, and renames the folder.

    The processes communicate only by files, because this function runs in the background.
    A collective operation could block the collective operations of the training step.

    folder: the final path of the checkpoint.
    arrays: {array name: {"shape": ..., "dtype": ...}} of all arrays in the checkpoint.
    shards: (array name, bounds, data) of each shard that this process writes.
    """
    # A remote folder cannot be renamed. Its checkpoint is complete with the manifest.
    temporary = folder if is_remote(folder) else folder.with_name(f"tmp-{folder.name}")
    temporary.mkdir(parents=True, exist_ok=True)
    if is_main_process():
        # A damaged checkpoint of this step may exist at a remote path. It is invalid
        # without its manifest.
        (temporary / "manifest.json").unlink(missing_ok=True)
    count = jax.process_count()
    files = [temporary / f"pieces-{i:05}-of-{count:05}.msgpack" for i in range(count)]
    own_file = files[jax.process_index()]
    entries = write_shards(own_file, shards)
    if not is_main_process():
        write_file(own_file.with_suffix(".json"), json.dumps(entries))
        return
    # Add the shards of the other processes.
    for file in files[1:]:
        index = file.with_suffix(".json")
        for name, more in json.loads(wait_and_read(index)).items():
            entries.setdefault(name, []).extend(more)
        index.unlink()
    manifest = {
        "format": FORMAT,
        "step": step,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "arrays": {
            name: {**array, "pieces": entries[name]}
            for name, array in sorted(arrays.items())
        },
    }
    # write_checked writes a JSON file with a checksum of its content.
    configs.write_checked(temporary / "manifest.json", manifest)
    if not is_remote(folder):
        sync_folder(temporary)
        # A damaged checkpoint of this step may exist. Remove it to free its name.
        remove_checkpoint(folder)
        temporary.rename(folder)
        sync_folder(folder.parent)


def wait_and_read(path, seconds=600):
    """Wait until another process has written a file, and return the text of the file.

    Raises CheckpointError if the file does not appear within the given number of seconds.
    """
    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"{path} did not appear within {seconds} s; every process must write to "
                f"the same --run_dir, and process 0 must be able to read it"
            )
        time.sleep(0.05)
    return path.read_text()


def remove_checkpoint(path):
    """Remove a checkpoint, or any other file or folder at its path."""
    if is_remote(path):
        # Remove the manifest first. If a kill then interrupts the removal, the remaining
        # files are not a checkpoint.
        (path / "manifest.json").unlink(missing_ok=True)
        path.rmtree()
    elif path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# ====== below: reading, processes, a run's checkpoints, costs, the command ==============

# ---- reading a checkpoint --------------------------------------------------------------


def read_manifest(folder):
    """Return the manifest of a checkpoint as a dict, after its checksum is verified.

    Raises CheckpointError if the manifest is missing or damaged. Raises UserError if the
    manifest has another format.
    """
    path = folder / "manifest.json"
    try:
        manifest = configs.read_checked(
            path, {"format": int, "step": int, "arrays": dict}
        )
    except UserError as error:
        raise CheckpointError(f"{path} is missing or damaged ({error})") from error
    if manifest["format"] != FORMAT:
        raise UserError(
            f"{path} has format {manifest['format']}, but this version of plain T5 reads "
            f"format {FORMAT}: use the version that wrote the checkpoint."
        )
    return manifest


def read_shard(folder, entry, dtype):
    """Return one array shard of a checkpoint, after its checksum is verified.

    entry: the manifest's entry of the shard.
    dtype: the name of the array's dtype.
    Raises CheckpointError if the shard is missing or damaged.
    """
    shape = [stop - start for start, stop in entry["bounds"]]
    size = math.prod(shape) * np.dtype(dtype).itemsize
    path = folder / Path(entry["file"]).name
    offset = entry["offset"]
    try:
        if is_remote(path):
            with path.open("rb") as file:
                file.seek(offset)
                data = file.read(size)
        else:
            # Map the file into memory, so that the shard takes no memory of its own.
            data = np.memmap(path, np.uint8, "r")[offset : offset + size]
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error})") from error
    if zlib.crc32(data) != entry["crc32"]:
        raise CheckpointError(f"{path} is damaged or too short after byte {offset}")
    return np.frombuffer(data, dtype).reshape(shape)


def read_slice(folder, array, index, verified):
    """Return a slice of a stored array, assembled from the shards that overlap with it.

    array: the manifest's entry of the array.
    index: a Python slice for each dimension.
    verified: a dict that caches the shards of this array that are read and verified.
    Returns a new NumPy array.
    """
    wanted = [cut.indices(size)[:2] for cut, size in zip(index, array["shape"])]
    out = np.empty([stop - start for start, stop in wanted], array["dtype"])
    for number, entry in enumerate(array["pieces"]):
        # The overlap of the slice and the shard, as slices of the shard and of `out`.
        source, target = [], []
        for (start, stop), (first, last) in zip(wanted, entry["bounds"]):
            low, high = max(start, first), min(stop, last)
            source.append(slice(low - first, high - first))
            target.append(slice(low - start, high - start))
        if any(part.start >= part.stop for part in source):
            continue
        if number not in verified:
            verified[number] = read_shard(folder, entry, array["dtype"])
        out[tuple(target)] = verified[number][tuple(source)]
    return out


def read_checkpoint(folder, template):
    """Read arrays from a checkpoint, each with the sharding that the template asks for.

    The sharding may differ from the sharding of the stored arrays. Each process reads
    only the shards that its own devices need.

    template: a nested dict of ShapeDtypeStructs with shardings. Other stored arrays are
    ignored.
    Returns (step, nested dict of jax.Arrays like template).
    Raises UserError if an array is absent or has another shape or dtype than template.
    """
    manifest = read_manifest(folder)

    def read(name, wanted):
        stored = manifest["arrays"].get(name)
        if stored is None:
            raise UserError(
                f"{folder} has no array {name}: use the model and the optimizer of the "
                f"checkpoint. To start a new run from weights alone, use --init_from."
            )
        found = f"{stored['dtype']}{stored['shape']}"  # such as "float32[2, 3]"
        asked = f"{wanted.dtype}{list(wanted.shape)}"
        if found != asked:
            raise UserError(
                f"{folder} stores {name} as {found}, but the configuration asks for "
                f"{asked}: use the configuration of the checkpoint."
            )
        verified = {}
        return jax.make_array_from_callback(
            wanted.shape,
            wanted.sharding,
            lambda index: read_slice(folder, stored, index, verified),
        )

    arrays = {name: read(name, wanted) for name, wanted in flatten(template).items()}
    return manifest["step"], unflatten_dict(arrays, sep="/")


# ---- several processes -----------------------------------------------------------------


def start_jax(cfg):
    """Connect to the other processes of a run, and turn on the compilation cache.

    Call this function before the first use of a device. The processes are those that the
    --distributed flags name, or those of a cluster that JAX detects (Cloud TPU, SLURM,
    ...). Without either, the process runs alone.
    """
    d = cfg.distributed
    if d.process == 0:
        note(f"waiting for {d.processes} processes to connect to {d.coordinator}")

    def give_up():
        note(
            f"The processes did not connect within {d.timeout} s: start the same command "
            f"on all machines, or raise --distributed.timeout.",
            always=True,
        )
        os._exit(2)

    # After its own timeout, JAX would abort the process with a stack trace. This timer
    # fires earlier and prints a message instead.
    timer = threading.Timer(d.timeout, give_up)
    timer.start()
    try:
        jax.distributed.initialize(
            d.coordinator or None,
            d.processes,
            d.process,
            initialization_timeout=d.timeout + 60,
            heartbeat_timeout_seconds=d.timeout,
        )
    except ValueError:
        # Without a coordinator, the error means that JAX found no cluster.
        if d.coordinator:
            raise
    finally:
        timer.cancel()
    if jax.process_count() > 1:
        configs.single_process = False
        if not is_main_process():
            # Only the main process prints progress and results.
            configs.prints_progress = False
            sys.stdout = open(os.devnull, "w")
        # Gloo, the CPU communication library, must connect within 30 s of the first
        # start. A first collective operation connects it now. Later operations may wait
        # longer.
        all_processes_agree(True)
    # Keep a cache that the user has configured.
    if not jax.config.jax_compilation_cache_dir:
        cache = os.path.expanduser("~/.cache/plain_t5/compiled")
        jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def all_processes_agree(condition):
    """Return, on every process, whether the condition is true on all processes."""
    return bool(process_allgather(condition).all())


def from_main_process(value):
    """Return the main process's value on every process. The value must fit into JSON."""
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    # A broadcast needs equal shapes on all processes, so broadcast the size first.
    size = int(broadcast_one_to_all(len(text)))
    text = broadcast_one_to_all(np.resize(text, size))
    return json.loads(bytes(text))


def run_on_all(work, elsewhere=UserError):
    """Call work() on every process, and raise on every process if one call fails.

    The process that failed raises its own error. The other processes raise `elsewhere`,
    so that they do not wait forever for a process that has ended.

    Returns the result of this process's call.
    """
    result = error = None
    try:
        result = work()
    except (UserError, CheckpointError, OSError) as raised:
        error = raised
    if not all_processes_agree(error is None):
        raise error or elsewhere("another process of this run failed and printed why")
    return result


def run_on_main_first(work):
    """Call work() on the main process, and after that on the other processes.

    Use this function for work that creates shared files. The main process writes the
    files, and the other processes find them complete.

    Returns the result of this process's call.
    """
    result = run_on_all(lambda: work() if is_main_process() else None)
    others = run_on_all(lambda: None if is_main_process() else work())
    return result if is_main_process() else others


# ---- the checkpoints of a run ----------------------------------------------------------


def is_complete(path):
    """Return whether a path is a complete checkpoint, which may still be damaged."""
    # A local folder gets its final name when the checkpoint is complete.
    is_stored = not is_remote(path) or (path / "manifest.json").exists()
    return path.name.startswith("step_") and is_stored


def read_first_valid(paths, template):
    """Read the first valid checkpoint of a list, and report the damaged ones before it.

    All processes read the same checkpoint. If one process finds damage, all try the next
    path.

    template: a nested dict of ShapeDtypeStructs with shardings.
    Returns (step, nested dict of jax.Arrays like template).
    Raises UserError if no checkpoint is valid.
    """
    for path in paths:
        try:
            return run_on_all(lambda: read_checkpoint(path, template), CheckpointError)
        except CheckpointError as error:
            problem = error
            note(f"{problem}; this checkpoint cannot be used", always=True)
    raise UserError(
        f"None of the checkpoints can be used ({problem}): choose another one, restore "
        f"one from a backup, or move {path.parent} away to start again."
    )


class Checkpoints:
    """The checkpoints of one run. At most one checkpoint is being written at any time.

    run_dir: the directory of the run.
    keep: how many of the newest checkpoints to keep.
    background: whether to write in a background thread while training continues.
    """

    def __init__(self, run_dir, keep=3, background=True):
        self.folder = to_path(run_dir) / "checkpoints"
        self.keep = keep
        self.background = background
        self.executor = ThreadPoolExecutor(1)
        self.unfinished = None  # the Future of a checkpoint that is being written

    def folders(self):
        """Return the paths of all checkpoints and of all remains of interrupted saves."""
        # The prefix of the paths that glob returns is wrong for some remote folders.
        names = [path.name for path in self.folder.glob("*step_*")]
        return [
            self.folder / name for name in names if re.fullmatch(r"(tmp-)?step_\d+", name)
        ]

    def steps(self):
        """Return the steps of the complete checkpoints, in ascending order."""
        return sorted(int(p.name[5:]) for p in self.folders() if is_complete(p))

    def path(self, step):
        """Return the path of the checkpoint of a step."""
        return self.folder / f"step_{step:08}"

    def save(self, tree, step, best=None):
        """Start to write a checkpoint, as soon as the previous checkpoint is written.

        tree: a nested dict of jax.Arrays.
        best: the step of a checkpoint that is kept no matter how old it is.
        """
        self.wait()
        arrays = {
            name: {"shape": a.shape, "dtype": a.dtype.name}
            for name, a in flatten(tree).items()
        }
        shards = local_shards(tree)
        if self.background:
            # list() copies all shards to the host now, because training will reuse the
            # memory of the arrays.
            self.unfinished = self.executor.submit(
                self.commit, arrays, list(shards), step, best
            )
        else:
            # local_shards copies one shard at a time, while the file is written.
            self.commit(arrays, shards, step, best)

    def commit(self, arrays, shards, step, best):
        """Write a checkpoint, and then remove the checkpoints that are no longer kept.

        Raises CheckpointError if the files cannot be written, for example to a full disk.
        """
        try:
            write_checkpoint(self.path(step), arrays, shards, step)
        except OSError as error:
            raise CheckpointError(
                f"{self.path(step)} could not be written ({error})"
            ) from error
        if is_main_process():
            written = [other for other in self.steps() if other <= step]
            for old in written[: -self.keep]:
                if old != best:
                    remove_checkpoint(self.path(old))

    def discard_unfinished(self):
        """Remove the remains of interrupted saves. Only the main process may do this."""
        for path in self.folders():
            if not is_complete(path):
                remove_checkpoint(path)

    def wait(self):
        """Wait until no checkpoint is being written. Raise the error of a failed save."""
        if self.unfinished:
            self.unfinished.result()

    def load(self, template, step=None):
        """Load the newest valid checkpoint, or the checkpoint of a given step.

        A damaged checkpoint is reported, and the checkpoint before it is tried.

        template: a nested dict of ShapeDtypeStructs with shardings.
        Returns (step, nested dict of jax.Arrays like template), or None without any
        checkpoint.
        Raises UserError if the checkpoint of the given step, or every checkpoint, is
        damaged.
        """
        steps = from_main_process(self.steps())
        if step is not None:
            if step not in steps:
                raise UserError(
                    f"{self.folder} has no step {step}: choose one of the steps {steps}."
                )
            steps = [step]
        if not steps:
            return None
        return read_first_valid(map(self.path, reversed(steps)), template)


def find_checkpoint(source):
    """Return whether a path is a run with checkpoints. Otherwise it must be a checkpoint.

    Raises UserError if the path is neither.
    """
    if (to_path(source) / "manifest.json").exists():
        return False
    if not Checkpoints(source).steps():
        raise UserError(
            f"{source} is neither a run with checkpoints nor a checkpoint: name one of "
            f"these, or convert other weights with convert.py first."
        )
    return True


def load_newest(source, template):
    """Load a checkpoint, or the newest valid checkpoint of a run.

    source: the path of a checkpoint or of a run directory.
    Returns (step, nested dict of jax.Arrays like template), as Checkpoints.load does.
    """
    if find_checkpoint(source):
        return Checkpoints(source).load(template)
    return read_first_valid([to_path(source)], template)


def read_metrics_file(path):
    """Return the lines of a metrics.jsonl as a list of dicts, without damaged lines."""
    lines = []
    if not path.exists():
        return lines
    for text in path.read_bytes().splitlines():
        try:
            line = json.loads(text)
            configs.check_json(line, {"step": int, str: (int, float)})
        except (ValueError, RecursionError):
            continue  # A kill during a write can leave an incomplete line.
        lines.append(line)
    return lines


def best_step(path, metric, steps):
    """Return (step, value) of the step with the best value of a metric, or None.

    The lowest value is the best one for a loss and for perplexity, else the highest
    value.

    path: the path of a metrics.jsonl.
    metric: a key of its lines, such as "training_eval/span_corruption/loss".
    steps: the steps to choose from. Steps without a value are ignored.
    """
    values = {
        line["step"]: line[metric]
        for line in read_metrics_file(path)
        if line["step"] in steps and not math.isnan(line.get(metric, math.nan))
    }
    best = min if metric.endswith(("loss", "perplexity")) else max
    return best(values.items(), key=lambda item: item[1], default=None)


def resolve_step(run_dir, name):
    """Return the step that the value of --step names, or None for the latest step.

    name: a step number, "latest", or "best" by the metric in the run's --train.keep_best.
    """
    if name.isdecimal():
        return int(name)
    if name == "latest":
        return None
    if name != "best":
        raise UserError(f"--step must be a step number, latest or best, not {name!r}.")
    metric = configs.load_run(run_dir).train.keep_best
    steps = Checkpoints(run_dir).steps()
    best = best_step(to_path(run_dir) / "metrics.jsonl", metric, steps)
    if not best:
        raise UserError(
            f"{run_dir} has no best step, because it was not trained with "
            f"--train.keep_best: use --step latest or a step number."
        )
    return best[0]


# ---- the cost of a sharding: chips and memory ------------------------------------------


# Chip contains properties of an accelerator from its data sheet. teraflops is the speed
# of bfloat16 matmuls in 10^12 operations per second. memory is in GB. links is the
# bandwidth from a device to all its neighbors in GB/s. clock is in GHz for TPUs and 0 for
# GPUs.
Chip = namedtuple("Chip", "teraflops memory links clock")

# The names are parts of jax.Device.device_kind. JAX counts a TPU v3 chip as two devices.
CHIPS = {}
for row in """
H200         989.5  141  450  0
H100         989.5   80  450  0
A100           312   80  300  0
V100           125   32  150  0
TPU v3        61.5   16   41  0.94
TPU v4         275   32  150  1.05
TPU v5 lite    197   16  100  1.503
TPU v5         459   95  300  1.75
TPU v6 lite    918   32  224  1.75
""".strip().splitlines():
    name, *numbers = re.split(" {2,}", row)
    CHIPS[name] = Chip(*map(json.loads, numbers))

# The options below make the TPU compiler overlap communication with computation.
# train.lower_step chooses the options that help on each kind of TPU.

# Without these options, the compiler gathers the weights of FSDP with blocking
# all-reduces. With all of the options, it uses asynchronous all-gathers.
ASYNC_GATHER_OPTIONS = dict.fromkeys(
    "xla_enable_async_all_gather "
    "xla_tpu_prefer_async_allgather_to_allreduce "
    "xla_tpu_enable_async_collective_fusion "
    "xla_tpu_overlap_compute_collective_tc "
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather "
    "xla_tpu_enable_async_collective_fusion_multiple_steps".split(),
    True,
)

# Without these options, the compiler combines the all-reduces of all gradients at the end
# of the step. With the options, it reduces each gradient of more than 1 MB as soon as it
# is computed.
ASYNC_REDUCE_OPTIONS = {
    "xla_enable_async_all_reduce": True,
    "xla_jf_crs_combiner_threshold_in_bytes": 1_000_000,
    "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": True,
}

# Each fusion may use 24 MiB of the fast on-chip memory (VMEM) instead of 16 MiB. This
# makes a TPU v6e slower. A TPU v4 has too little VMEM for this option and for
# ASYNC_REDUCE_OPTIONS.
FUSION_MEMORY_OPTIONS = {"xla_tpu_scoped_vmem_limit_kib": 24 * 1024}


def check_memory(parts, levers):
    """Raise UserError if all devices together have too little memory.

    parts: {description: bytes} of what the devices must hold at once.
    levers: the flags that reduce the memory, for the message.
    """
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        # All CPU devices of a process share the memory of the machine.
        available = configs.machine_memory() * jax.process_count()
    else:
        stats = device.memory_stats() or {"bytes_limit": math.inf}
        available = stats["bytes_limit"] * jax.device_count()
    configs.require_memory(parts, available, f"{levers}, or use more devices")


def bytes_on_device(tree):
    """Return the bytes that one device holds of all arrays in a tree.

    tree: a tree of arrays or ShapeDtypeStructs with shardings.
    """
    return sum(
        math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize
        for a in jax.tree.leaves(tree)
    )


# ---- the cost of a sharding: communication and TPU cycles ------------------------------
# A compiled program can be printed as HLO text, XLA's intermediate language, with one
# instruction per line. The functions below search this text for collective operations
# (all-reduce, ...) and for the time estimates of the TPU compiler. A shortened example of
# HLO:
#
#   %body (p: f32[4,8]) -> f32[4,8] {
#     %all-reduce.7 = f32[4,8]{1,0} all-reduce(%p), replica_groups={{0,1},{2,3}}
#   }
#   ENTRY %main (p: f32[4,8]) -> f32[4,8] {
#     %while.1 = f32[4,8]{1,0} while(%p), condition=%cond, body=%body
#   }
#
# The type f32[4,8]{1,0} of a result is its dtype, its shape on one device, and its memory
# order.

# Each alternative matches the example in its comment. "-start" marks an asynchronous
# operation.
COLLECTIVE = re.compile(
    r"""
    # %a = f32[8]{0} all-reduce(%p), replica_groups=...
    [ ](all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?\(
    # %b = f32[2]{0} fusion(%p), calls=%all-reduce-scatter.3
    | calls=%all-(reduce-scatter)
    # %async-collective-start.1 = (f32[2], f32[8], s32[2]) fusion(%p)
    | %async-collective(-start)\S*[ ]=
    """,
    re.VERBOSE,
)


def hlo_instructions(text):
    """Yield (line, times) for each instruction of an HLO program.

    times: how often the program executes the instruction. The body of a loop is one
    computation in the text, but the program executes it many times.
    """
    # {name: lines} of each computation, which begins "%body (p: f32[4,8]) -> f32[4,8] {".
    computations = dict(
        re.findall(r"^(?:ENTRY )?%(\S+) \(.*?\{\n(.*?)^\}", text, re.M | re.S)
    )
    # The last computation is the program itself.
    unvisited = [(list(computations)[-1], 1)]
    while unvisited:
        name, times = unvisited.pop()
        for line in computations[name].splitlines():
            # A loop:  %w = f32[8]{0} while(%p), condition=%cond, body=%body
            # A call:  %c = f32[8]{0} call(%p), to_apply=%function
            inner = re.search(
                r"\b(?:while\(.*condition=%([^,\s]+), body|call\(.*to_apply)=%([^,\s]+)",
                line,
            )
            if not inner:
                yield line, times
                continue
            condition, function = inner.groups()
            counts = [1]
            if condition:
                # Some loops state their number of iterations: known_trip_count":{"n":"3"}
                # The others compare a counter in their condition with: constant(3)
                counts = re.findall(
                    r'known_trip_count":\{"n":"(\d+)"', line
                ) or re.findall(r"constant\((\d+)\)", computations[condition])
            unvisited.append((function, times * max(map(int, counts))))


def hlo_bytes(text):
    """Return the total bytes of all HLO types in a text, e.g. "(f32[2,3]{1,0}, pred[4])".

    Example: f32[2,3] has 6 elements of 32 bits, which is 24 bytes.
    """
    # The dtype pred (bool) has no number in its name and takes 8 bits.
    return sum(
        int(bits or 8) // 8 * math.prod(integers(shape))
        for bits, shape in re.findall(r"\b[a-z]+(\d*)\w*\[([\d,]*)\]", text)
    )


def integers(text):
    """Return the list of all integers in a text."""
    return list(map(int, re.findall(r"\d+", text)))


def find_collectives(instructions):
    """Yield (kind, bytes, line, times) for each collective operation.

    kind: "all-reduce", ..., or "collectives" for a TPU's fusion of several operations.
    The kind of an asynchronous operation, during which computation continues, ends with
    ", overlapped".
    bytes: the size of the result. For an asynchronous operation, the operand is included,
    which gives an upper bound for the bytes that a ring sends.
    instructions: (line, times) of each instruction, as from hlo_instructions.
    """
    for line, times in instructions:
        found = COLLECTIVE.search(line)
        if found:
            kind, start, fused_kind, fused_start = found.groups()
            kind = kind or fused_kind or "collectives"
            if start or fused_start:
                kind += ", overlapped"
            # The result types stand before the operands, which begin with "(%". An
            # asynchronous fusion returns its operand, its result and then counters, which
            # begin with s32[2].
            types = re.split(r"\(%| s32\[2\]", line)[0]
            yield kind, hlo_bytes(types), line, times


def ring_bytes(kind, result_bytes, devices):
    """Return about how many bytes each device sends for a collective operation on a ring.

    An all-gather passes all shards of the result around the ring. A reduce-scatter passes
    its operand, which is larger than its result by the number of devices. An all-reduce
    is a reduce-scatter and then an all-gather. The exact number is smaller by the factor
    1 - 1 / devices, because no device sends its own share.
    """
    return {"all-reduce": 2, "reduce-scatter": devices}.get(kind, 1) * result_bytes


def first_device_group(line, count):
    """Return the numbers of the devices in the first group of a collective operation.

    A collective operation communicates within groups of devices, which all have equal
    sizes.

    XLA writes the groups in one of four forms. In these examples, the first group is 0,
    2, 4, 6 of 8 devices.

    replica_groups={{0,2,4,6},{1,3,5,7}}
        A list of all groups. A collective-permute has source_target_pairs instead.
    replica_groups=[2,4]<=[4,2]T(1,0)
        The rows of np.arange(8).reshape(4, 2).transpose(1, 0).reshape(2, 4).
    replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0'}
        The devices along axis_0 of np.arange(8).reshape(4, 2).
    replica_groups=mesh['axis_0'=2,'axis_1'=4], device_ids=([4,2]T(1,0)) {'axis_1'}
        The devices along axis_1 of a mesh whose devices are transposed first.

    line: an HLO instruction.
    count: the number of devices. Without a known form, all devices are one group.
    """
    listed = re.search(r"(?:replica_groups|source_target_pairs)=\{\{([\d,]+)\}", line)
    if listed:
        return integers(listed[1])
    devices = np.arange(count)
    order = re.search(r"(?:<=|device_ids=\()\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
    if order:
        devices = devices.reshape(integers(order[1]))
        if order[2]:
            devices = devices.transpose(integers(order[2]))
    groups = re.search(r"replica_groups=\[(\d+),\d+\]", line)
    if groups:
        devices = devices.reshape(int(groups[1]), -1)[0]
    mesh = re.search(r"replica_groups=mesh\[(.*?)\].*?\{(.*?)\}", line)
    if mesh:
        axes = re.findall(r"('\w+')=(\d+)", mesh[1])
        devices = devices.reshape([int(size) for _, size in axes])
        # Take all devices along the named axes and the first device along the other axes.
        devices = devices[
            tuple(slice(None) if name in mesh[2] else 0 for name, _ in axes)
        ]
    return devices.ravel()


def count_collectives(lowered):
    """Compile a program, and count its collective operations and the bytes they send.

    The operations are counted in the HLO text after XLA's partitioner has inserted them.
    In the final HLO of a CPU, bfloat16 is replaced by float32, so the bytes would be
    wrong.

    lowered: a jax.stages.Lowered, for the current mesh.
    Returns ([(kind, mesh axis, count, bytes that each device sends)], compiled program).
    """
    mesh = get_mesh()
    with tempfile.TemporaryDirectory() as folder:
        options = {"xla_dump_to": folder, "xla_dump_hlo_pass_re": "spmd-partitioning"}
        if platform() == "cpu":
            # The program is only counted and never run, so optimization would waste time.
            options["xla_backend_optimization_level"] = "0"
        program = lowered.compile(options)
        if mesh.size == 1:
            return [], program
        (path,) = Path(folder).glob("*spmd-partitioning.before*.txt")
        text = path.read_text()
    counts, sent = Counter(), Counter()
    for kind, size, line, times in find_collectives(hlo_instructions(text)):
        group = first_device_group(line, mesh.size)
        # Devices are numbered row by row: rows lie along "data" and columns along
        # "model".
        positions = np.divmod(group, mesh.shape["model"])
        axes = [axis for axis, x in zip(mesh.axis_names, positions) if np.ptp(x) > 0]
        if not axes:
            continue  # A group of one device sends nothing.
        size = ring_bytes(kind, size, len(group))
        if kind != "collective-permute":
            size *= 1 - 1 / len(group)
        key = kind, "both" if len(axes) == 2 else axes[0]
        counts[key] += times
        sent[key] += times * size
    return [(*key, counts[key], sent[key]) for key in sorted(counts)], program


def part_of_step(line):
    """Return the part of the training step to which an HLO instruction belongs.

    The part follows from the instruction's op_name, the path of JAX functions that led to
    it:
      jit(train_step)/jvp()/closed_call/attention/shard_map/add           "attention"
      jit(train_step)/transpose(jvp())/closed_call/mlp/dot_general        "mlp, gradient"
      jit(train_step)/reduce_sum                                          "optimizer"
    Copies that the compiler adds have no op_name.
    """
    path = re.search(r'op_name="([^"]+)"', line)
    if not path:
        return "copies"
    if "jvp" not in path[1]:
        return "optimizer"
    name = re.search(r"[/(](attention|mlp|logits and loss)[/)]", path[1])
    part = name[1] if name else "the rest"
    if "rematted" in path[1]:
        part += ", again"
    if "transpose(" in path[1]:
        part += ", gradient"
    return part


def estimated_cycles(text):
    """Return the TPU compiler's own estimate of the cycles of a training step.

    text: the HLO text of a program that was compiled for a TPU. Most instructions contain
    an estimate, such as backend_config={"window_config":{"estimated_cycles":"2439", ...}}
    Returns three Counters:
      {part of the step: clock cycles of each device} {kind of collective operation:
      count} {kind of collective operation: bytes that each device sends}
    The kinds of asynchronous operations end with ", overlapped".
    """
    cycles, counts, sent = Counter(), Counter(), Counter()
    instructions = list(hlo_instructions(text))
    for line, times in instructions:
        estimate = re.search(r'"estimated_cycles":"(\d+)"', line)
        if estimate:
            cycles[part_of_step(line)] += times * int(estimate[1])
    devices = get_mesh().shape["data"]
    for kind, size, _, times in find_collectives(instructions):
        counts[kind] += times
        sent[kind] += times * ring_bytes(kind, size, devices)
    return cycles, counts, sent


# ---- the command -----------------------------------------------------------------------


def verify(folder):
    """Read every array shard of a checkpoint, and return a list of error messages."""
    problems = []
    for name, array in read_manifest(folder)["arrays"].items():
        for entry in array["pieces"]:
            try:
                read_shard(folder, entry, array["dtype"])
            except CheckpointError as error:
                problems.append(f"{name}: {error}")
    return problems


def main(argv):
    """Return the exit status: 0 if the checkpoint is valid, 1 if it is damaged."""
    args, _ = parse_args(
        __doc__,
        argv,
        verify=dict(
            metavar="CHECKPOINT", required=True, help="the folder of a checkpoint"
        ),
    )
    try:
        problems = verify(to_path(args.verify))
    except CheckpointError as error:
        problems = [str(error)]
    print("\n".join(problems) or f"{args.verify} is valid.")
    return 1 if problems else 0


if __name__ == "__main__":
    run_command(main)
