"""Split each array over the devices, and save and load checkpoints.

- A mesh is a grid of all devices. The mesh has two axes. The axis "data" splits the
  batch, and the axis "model" splits the weights.
- RULES says which mesh axis splits each dimension of an array. Every sharding follows
  from RULES, so one program runs on a laptop and on a TPU pod.
- The mesh axes have JAX's type Explicit, so the sharding is part of an array's type. JAX
  reports a wrong sharding while it traces the program, even on a mesh of one device.
- A checkpoint is a folder of files. The processes divide the arrays, and each process
  writes its part. The checkpoint can be loaded on more or fewer devices.

    python partition.py --verify runs/NAME/checkpoints/step_00001000    report damage

Example:
>>> from partition import STORAGE_RULES, spec
>>> axes = ("embed", "mlp")             # the logical axes of an MLP weight matrix
>>> tuple(spec(axes))                   # the mesh axes that split the matrix in a matmul
(None, 'model')
>>> tuple(spec(axes, STORAGE_RULES))    # the mesh axes that split it in storage (FSDP)
('data', 'model')

Terms:
  logical axis    the name of a dimension of an array, such as "batch", "heads" or "mlp"
  array shard     a rectangular part of an array, on a device or in a file
  bounds          [start, stop] for each dimension of a shard: its place in the array
  manifest        the file manifest.json in a checkpoint, which lists all array shards
  main process    process 0, which writes the manifest and prints progress

`pytest -k lesson_partition` runs the lessons about this file, which are in test_all.py.
"""

import ctypes
import functools
import json
import math
import os
import re
import shutil
import signal
import struct
import sys
import tempfile
import threading
import time
import zlib
from collections import Counter, namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# Import configs before JAX, because the import of JAX is slow. In a command, the import
# of configs turns on UTF-8, and lets Ctrl-C end the process at once.
import configs

import jax
import msgpack
import numpy as np
import safetensors.numpy
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import NamedSharding, P
from jax.experimental.compilation_cache import compilation_cache
from jax.experimental.multihost_utils import broadcast_one_to_all, process_allgather
import jaxlib._jax as runtime
from jax.sharding import AxisType, get_abstract_mesh, get_mesh

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
# With 8 devices and --mesh.model 4, the mesh is a grid of 2 x 4 devices. The mesh axis
# "data" has size 2, and "model" has size 4. A training step is split in three ways:
#
# - Data parallelism splits the batch over "data". Each device computes the gradients for
#   its own rows of the batch. An all-reduce then sums the gradients over the devices.
# - Tensor parallelism splits the vocabulary, the heads and the MLP over "model", as in
#   Megatron (Shoeybi et al. 2019). The first matmul of attention or MLP splits its output
#   features, and the last matmul splits its input features. The forward pass therefore
#   needs only one all-reduce for each attention and one for each MLP.
# - Fully sharded data parallelism (FSDP, --mesh.fsdp) also splits the stored weights over
#   "data". Each layer's weights are all-gathered just before use. This method is called
#   ZeRO-3 by Rajbhandari et al. 2020.
#
# assets/devices.svg shows what each of eight devices holds in these three ways.

# RULES maps the name of each array dimension to the mesh axis that splits this dimension.
# For example, a weight matrix of an MLP has the dimensions ("embed", "mlp") and the shape
# [512, 1024]. RULES splits "mlp" over the mesh axis "model". If this axis has 4 devices,
# each device uses a shard of shape [512, 256].
RULES = {
    "batch": "data",
    "vocab": "model",
    "heads": "model",
    "mlp": "model",
    # The value None means that a dimension is not split: every device holds all of it.
    "embed": None,
    "layers": None,
    "buckets": None,
    "rank": None,  # the rank of the LoRA matrices
    # A dimension without a name has the key None, and is not split.
    None: None,
}

# With --mesh.fsdp, STORAGE_RULES splits the stored weights and the optimizer state. These
# rules also split "embed" over the mesh axis "data". For example, a mesh of 2 x 4 devices
# stores a weight matrix of shape [512, 1024] as 8 shards of shape [256, 256]. Before each
# matmul, an all-gather over "data" joins two shards to one shard of shape [512, 256].
STORAGE_RULES = {**RULES, "embed": "data"}


def spec(axes, rules=RULES):
    """Return the PartitionSpec of an array from the names of its dimensions.

    A PartitionSpec contains, for each dimension, the mesh axis that splits the dimension.
    For example, spec(("embed", "mlp")) returns P(None, "model"). None means that the
    dimension is not split.

    axes: the name of each dimension of the array, such as "embed".
    rules: RULES for computing, or STORAGE_RULES for storing weights with --mesh.fsdp.
    """
    return P(*(rules[axis] for axis in axes))


def set_mesh(cfg, devices=None):
    """Create the mesh of devices for a Config, and make JAX use this mesh.

    A mesh is a grid of all devices. The axis "data" of the mesh splits the batch, and the
    axis "model" splits the weights. With 8 devices and --mesh.model 4, the axis "data"
    has size 2, and the axis "model" has size 4.

    devices: a list of JAX devices. The default is the devices of all processes.
    Raises UserError if a dimension cannot be split evenly over its mesh axis.
    """
    devices = jax.devices() if devices is None else devices
    m = cfg.model
    model_size = cfg.mesh.model
    data_size = len(devices) // model_size
    rows = cfg.train.batch_size // cfg.train.microbatches
    model_parts = f"--mesh.model {model_size}"
    data_parts = f"the number of data-parallel devices ({data_size})"
    # List all sizes that the mesh must split evenly. Each tuple is (name of the divisor,
    # divisor, size, name of the size). The divisor is the size of a mesh axis. For
    # example, --mesh.model 4 can split 8 heads, but cannot split 6 heads.
    splits = [
        (model_parts, model_size, len(devices), "devices"),
        (model_parts, model_size, m.num_heads, "heads (--model.num_heads)"),
        (model_parts, model_size, m.d_ff, "hidden channels (--model.d_ff)"),
        (model_parts, model_size, m.vocab_size, "token ids (--model.vocab_size)"),
        (data_parts, data_size, rows, "rows (--train.batch_size / --train.microbatches)"),
    ]
    if cfg.mesh.fsdp:
        channels = "channels (--model.d_model, which --mesh.fsdp splits)"
        splits.append((data_parts, data_size, m.d_model, channels))
    for parts, divisor, size, what in splits:
        if size % divisor:
            raise UserError(
                f"{size} {what} are not divisible by {parts}: change one of the two "
                f"numbers."
            )
    try:
        mesh = jax.make_mesh(
            (data_size, model_size),
            ("data", "model"),
            devices=devices,
            axis_types=(AxisType.Explicit,) * 2,
        )
    # jax.make_mesh raises NotImplementedError if the TPU chips cannot be arranged as a
    # grid of data_size x model_size devices.
    except NotImplementedError as error:
        raise UserError(
            f"--mesh.model {model_size} does not fit the TPU topology: use a product of "
            f"side lengths of the topology, such as 4 or 16 for 4 x 4 x 4 chips."
        ) from error
    jax.set_mesh(mesh)
    return mesh


def platform():
    """Return "cpu", "gpu" or "tpu", the platform of the devices in the current mesh.

    This platform may differ from the platform of this machine, which
    jax.default_backend() returns. For example, `train.py --plan v5e:2x4` runs on a CPU,
    but compiles the training step for a mesh of TPUs.
    """
    return get_abstract_mesh().abstract_device.platform


# ---- placing a batch -------------------------------------------------------------------


def default_compute_dtype():
    """Return the name of the dtype in which the model computes by default.

    A GPU or TPU computes in "bfloat16". A CPU computes in "float32", because bfloat16 is
    slower on a CPU.
    """
    return "float32" if platform() == "cpu" else "bfloat16"


def local_rows(batch_size, mesh):
    """Return which rows of a batch this process must load, as a sorted integer array.

    For example, two processes share a batch of 8 rows. One process then loads the rows
    [0, 1, 2, 3], and the other process loads the rows [4, 5, 6, 7].
    """
    # JAX chooses the order of the devices in a mesh, so process 0 may not hold the first
    # rows. Ask the sharding which rows each device of this process holds.
    sharding = NamedSharding(mesh, P("data"))
    indices = sharding.addressable_devices_indices_map((batch_size,)).values()
    # Devices along the axis "model" hold the same rows, so np.unique removes duplicates.
    return np.unique([np.arange(batch_size)[index] for index in indices])


def put_batch(batch, batch_size, mesh):
    """Put a batch on the devices, and split its rows over the mesh axis "data".

    Each process passes only the rows of its own devices, which local_rows selects.

    batch: a tree of NumPy arrays [local rows, length].
    batch_size: the number of rows that all processes have together.
    Returns a tree of jax.Arrays [batch_size, length].
    """
    sharding = NamedSharding(mesh, P("data"))

    return jax.tree.map(
        lambda array: jax.make_array_from_process_local_data(
            sharding, array, (batch_size, *array.shape[1:])
        ),
        batch,
    )


# ---- writing a checkpoint --------------------------------------------------------------
# If two processes train a model, each checkpoint is a folder with these files:
#
#   RUN_DIR/checkpoints/step_00001000/
#     pieces-00000-of-00002.msgpack    the array shards that process 0 writes
#     pieces-00001-of-00002.msgpack    the array shards that process 1 writes
#     manifest.json                    the step; the model and the vocabulary to which
#                                      the weights belong; shape and dtype of each array;
#                                      file, offset, bounds and checksum of each shard
#
# In the manifest, an array with one shard looks like this:
#
#   "params/unembed": {"shape": [512, 1024], "dtype": "float32", "pieces": [
#       {"file": "pieces-00000-of-00002.msgpack", "offset": 104,
#        "bounds": [[0, 512], [0, 1024]], "crc32": 3632233996}]}
#
# The word "pieces" means array shards. Other programs read these files, so the word must
# not be changed. For more than MAX_SHARD_BYTES, process 0 also writes the files
# pieces-00000-of-00002-1.msgpack, pieces-00000-of-00002-2.msgpack and so on.
#
# A kill or a power failure must never leave an incomplete folder that looks like a
# checkpoint. Local files are therefore written in this order:
#
#   1. Write the shard files to the folder tmp-step_00001000, and flush them to disk.
#   2. Write the manifest, and flush the manifest and the folder to disk.
#   3. Rename the folder to step_00001000, and flush the parent folder to disk.
#
# A folder with the name step_00001000 is a complete checkpoint. A complete checkpoint is
# valid if the checksums of the manifest and of all shards are correct.
# assets/checkpoint.svg shows the files before, during and after a kill.

# FORMAT is the version of the checkpoint format, which every manifest.json contains. A
# checkpoint with another version cannot be loaded.
FORMAT = 3

# An array shard of more than 128 MiB is split before it is written to a file. Several
# threads can then write different parts of a large shard to different files. The file
# format msgpack limits each value to 4 GiB.
MAX_SHARD_BYTES = 1 << 27


class CheckpointError(Exception):
    """An error in a checkpoint: a file is missing, is damaged or cannot be written."""


def is_main_process():
    """Return whether this process is process 0, which prints and writes shared files."""
    return jax.process_index() == 0


def flatten(tree):
    """Flatten a nested dict. For example, {"a": {"b": 1}} becomes {"a/b": 1}."""
    return flatten_dict(tree, sep="/")


def local_shards(tree, copies={}):
    """Yield the array shards that this process must write to a checkpoint.

    If several devices hold copies of the same shard, only one copy is written. A shard of
    more than MAX_SHARD_BYTES is yielded in parts. Each part has as many rows (entries of
    axis 0) as fit into MAX_SHARD_BYTES, but at least one row.

    tree: a nested dict of jax.Arrays.
    copies: {array name: the number of the copy that is written}. The default is copy 0.
    Yields (array name, bounds, data) for each shard. The bounds are [start, stop] of each
    dimension, and data is a NumPy array. On a CPU, data is a view of the device's memory.
    On other devices, data is a copy. Training never changes the numbers in data.
    """
    # Several devices can hold copies of the same shard. JAX numbers the copies. Write
    # only the copy that `copies` selects. Its device may belong to another process, which
    # then writes the shard.
    owned = [
        (name, array.shape, shard)
        for name, array in sorted(flatten(tree).items())
        for shard in array.addressable_shards
        if shard.replica_id == copies.get(name, 0)
    ]
    # Start to copy these shards from the devices to the host in the background. The loop
    # below then waits for the copy of one shard at a time.
    jax.copy_to_host_async([shard.data for _, _, shard in owned])
    for name, shape, shard in owned:
        bounds = [index.indices(size)[:2] for index, size in zip(shard.index, shape)]
        data = np.ascontiguousarray(shard.data)
        if data.nbytes <= MAX_SHARD_BYTES:
            yield name, bounds, data
            continue
        # This shard is larger than MAX_SHARD_BYTES, so split it into groups of rows.
        rows = max(1, len(data) * MAX_SHARD_BYTES // data.nbytes)
        for start in range(0, len(data), rows):
            part = data[start : start + rows]
            first = bounds[0][0] + start
            yield name, [[first, first + len(part)], *bounds[1:]], part


def write_shards(path, shards):
    """Write array shards to one file, and flush the file to disk.

    The file is a msgpack stream with two values for each shard. The first value is a dict
    with the array name, bounds, dtype and checksum. The second value contains the numbers
    of the shard as bytes.

    path: the path of the new file.
    shards: (array name, bounds, data) of each shard, as local_shards yields them.
    Returns {array name: [dict for the manifest, one for each shard of the array]}.
    """
    entries = {}
    with path.open("wb") as file:
        for name, bounds, data in shards:
            crc = zlib.crc32(data)
            # The header of a shard contains no timestamp. Files with equal shards are
            # therefore equal.
            header = msgpack.packb(
                {
                    "name": name,
                    "bounds": bounds,
                    "dtype": data.dtype.name,
                    "crc32": crc,
                }
            )
            # In msgpack, binary data begins with the byte C6 and a 4-byte length. Write
            # the byte and the length directly, because msgpack.packb would copy the whole
            # array.
            file.write(header + b"\xc6" + struct.pack(">I", data.nbytes))
            entry = {
                "file": path.name,
                "offset": file.tell(),
                "bounds": bounds,
                "crc32": crc,
            }
            entries.setdefault(name, []).append(entry)
            file.write(data.reshape(-1).view(np.uint8).data)
        # Flush a local file to disk. A remote file is stored when it is closed, so a
        # remote file needs no flush.
        if not is_remote(path):
            file.flush()
            os.fsync(file.fileno())
    return entries


def sync_folder(path):
    """Flush a folder to disk, so that the file names in it survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def write_checkpoint(folder, arrays, shards, step, identity, write=write_shards):
    """Write a checkpoint. Every process must call this function.

    Each process writes files with its own array shards. Process 0 then waits for the
    other processes, and writes a list of all shards to manifest.json.

    The processes communicate only by files, because this function runs in the background.
    A collective operation could block the collective operations of the training step.

    folder: the final path of the checkpoint.
    arrays: {array name: {"shape": ..., "dtype": ...}} of all arrays in the checkpoint.
    shards: (array name, bounds, data) of each shard that this process writes.
    identity: the model and the vocabulary of the run, as configs.weights_identity returns
        them.
    write: the function that writes the shards, such as write_shards.
    """
    # Write a local checkpoint to a folder tmp-..., and rename this folder at the end. A
    # remote folder cannot be renamed, so write to the final folder. A remote checkpoint
    # is complete when it contains manifest.json, which is written last.
    temporary = folder if is_remote(folder) else folder.with_name(f"tmp-{folder.name}")
    temporary.mkdir(parents=True, exist_ok=True)
    if is_main_process():
        # An interrupted save of the same step may have left a manifest. Remove this
        # manifest, because it does not describe the new shards.
        (temporary / "manifest.json").unlink(missing_ok=True)
    count = jax.process_count()
    files = [temporary / f"pieces-{i:05}-of-{count:05}.msgpack" for i in range(count)]
    own_file = files[jax.process_index()]
    entries = write(own_file, shards)
    if not is_main_process():
        # List the shards of this process in a JSON file. Process 0 waits for this file,
        # and copies the list to the manifest.
        write_file(own_file.with_suffix(".json"), json.dumps(entries))
        return
    # Wait for the JSON file of each other process, and add the shards that it lists.
    for file in files[1:]:
        index = file.with_suffix(".json")
        for name, more in json.loads(wait_and_read(index)).items():
            entries.setdefault(name, []).extend(more)
        index.unlink()
    # Raise an error if the shard file is gone, because the run directory was moved during
    # the save. Otherwise, write_checked would create a new folder with a manifest, but
    # without shards.
    own_file.stat()
    manifest = {
        "format": FORMAT,
        "step": step,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "identity": identity,
        "arrays": {
            name: {**array, "pieces": entries[name]}
            for name, array in sorted(arrays.items())
        },
    }
    # Write the manifest with a checksum. If the file is damaged later, the checksum is
    # wrong, and read_manifest reports the damage.
    configs.write_checked(temporary / "manifest.json", manifest)
    if not is_remote(folder):
        sync_folder(temporary)
        # Delete an older, damaged checkpoint of the same step, if one exists. Otherwise,
        # the new folder could not get the name of this step.
        remove_checkpoint(folder)
        temporary.rename(folder)
        sync_folder(folder.parent)


def wait_and_read(path, seconds=600):
    """Wait until another process has written a file, and return the text of the file.

    The other process writes the file with configs.write_file, so the file appears only
    when it is complete. The path is a path object, and may be remote.

    Raises CheckpointError if the file does not appear within the given number of seconds.
    """
    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"{path} did not appear within {seconds} s (all processes must use the "
                f"same --run_dir, and process 0 must be able to read the files there)"
            )
        time.sleep(0.05)
    return path.read_text()


def remove_checkpoint(path):
    """Delete whatever is at a path: a checkpoint, another folder or a file."""
    if is_remote(path):
        # Delete the manifest first. The folder then no longer counts as a checkpoint,
        # even if the deletion of the other files is interrupted.
        (path / "manifest.json").unlink(missing_ok=True)
        path.rmtree()
    elif path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# ====== below: reading, processes, a run's checkpoints, costs, the command ==============

# ---- dividing a checkpoint among processes and threads ---------------------------------

# The number of files that a process writes at the same time, and the number of arrays
# that a process reads at the same time.
STREAMS = 8


def choose_copies(arrays):
    """Choose which copy of each array is written to a checkpoint.

    Without FSDP, every process holds copies of all arrays. With this choice, each process
    copies and writes about the same number of bytes. The processes do not communicate,
    because every process computes the same result from the shardings.

    arrays: {array name: jax.Array}.
    Returns {array name: number}. The number is like shard.replica_id, which counts the
    copies of a shard on all devices.
    """
    chosen = {}
    # Distribute the arrays in the order of their sizes, so that each process gets large
    # and small arrays.
    by_size = sorted(arrays.items(), key=lambda item: (-item[1].nbytes, item[0]))
    for number, (name, array) in enumerate(by_size):
        shard = array.addressable_shards[0].data
        # The number of copies of each shard. For an array without elements, use 1.
        copies = array.sharding.num_devices * shard.size // (array.size or 1) or 1
        # The processes take turns in writing an array. The devices of a process also take
        # turns, because several devices can send data to the host at the same time. For
        # example, process 0 holds the copies 0 to 3 of each array, and process 1 holds
        # the copies 4 to 7. Then choose copy 0 of the first array, copy 4 of the second
        # array, copy 1 of the third array, copy 5 of the fourth array and so on.
        devices = max(1, copies // jax.process_count())
        step = number * devices
        chosen[name] = (step + step // copies % devices) % copies
    return chosen


def write_files(path, shards):
    """Write array shards to several files at the same time.

    A small checkpoint is written to a single file. Each MAX_SHARD_BYTES in the checkpoint
    adds another file, up to STREAMS files.

    path: the path of the first file. After a.msgpack come a-1.msgpack and so on.
    shards: a list with (array name, bounds, data) of each shard.
    Returns {array name: [dict for the manifest, one for each shard of the array]}.
    """
    size = sum(data.nbytes for _, _, data in shards)
    count = min(STREAMS, 1 + size // MAX_SHARD_BYTES)

    def write(number):
        file = path.with_stem(f"{path.stem}-{number}") if number else path
        return write_shards(file, shards[number::count])

    entries = {}
    with ThreadPoolExecutor(count) as threads:
        for written in threads.map(write, range(count)):
            for name, more in written.items():
                entries.setdefault(name, []).extend(more)
    return entries


# ---- reading a checkpoint --------------------------------------------------------------


def read_manifest(folder):
    """Return the content of manifest.json, which lists all array shards of a checkpoint.

    Raises CheckpointError if the file is missing or damaged, or if the folder is named
    after another step. Raises UserError if another version of plain T5 has written the
    checkpoint in another format.
    """
    path = folder / "manifest.json"
    try:
        manifest = configs.read_checked(
            path, {"format": int, "step": int, "identity?": dict, "arrays": dict}
        )
    except UserError as error:
        reason = error.__cause__ or "its checksum is wrong"
        raise CheckpointError(f"{path} is missing or damaged ({reason})") from error
    # The checksum of the manifest is right, so the manifest is not damaged. A different
    # format number means that another version of plain T5 has written the checkpoint.
    if manifest["format"] != FORMAT:
        raise UserError(
            f"{path} has format {manifest['format']}, but this version of plain T5 reads "
            f"format {FORMAT}: use the version that wrote the checkpoint."
        )
    step = manifest["step"]
    if folder.name.startswith("step_") and folder.name != f"step_{step:08}":
        raise CheckpointError(
            f"{folder} contains step {step:,}, and its name does not match this step: "
            f"rename this folder to step_{step:08}"
        )
    for name, array in manifest["arrays"].items():
        # The shards of an array never overlap, so their sizes must add up to the size of
        # the array. If the sum is too small, the manifest does not list all shards.
        stored = sum(math.prod(shard_shape(entry)) for entry in array["pieces"])
        if stored != math.prod(array["shape"]):
            raise CheckpointError(f"{path} does not list all shards of the array {name}")
    return manifest


def shard_shape(entry):
    """Return the shape of an array shard, computed from the bounds of the shard.

    For example, the bounds [[0, 512], [256, 512]] give the shape [512, 256].

    entry: the dict in manifest.json that describes the shard.
    """
    return [stop - start for start, stop in entry["bounds"]]


def read_shard(folder, entry, dtype):
    """Read one array shard of a checkpoint, and verify the checksum of the shard.

    Returns the numbers of the shard as a NumPy array.

    entry: the dict in manifest.json that describes the shard.
    dtype: the name of the array's dtype.
    Raises CheckpointError if the shard is missing or damaged.
    """
    shape = shard_shape(entry)
    size = math.prod(shape) * np.dtype(dtype).itemsize
    path = folder / Path(entry["file"]).name
    offset = entry["offset"]
    try:
        if is_remote(path):
            with path.open("rb") as file:
                file.seek(offset)
                data = file.read(size)
        else:
            # Map the local file into memory. The operating system then reads only the
            # bytes of this shard from the disk, and does not copy these bytes.
            data = np.memmap(path, np.uint8, "r")[offset : offset + size]
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error})") from error
    if zlib.crc32(data) != entry["crc32"]:
        raise CheckpointError(f"{path} is damaged or too short after byte {offset}")
    return np.frombuffer(data, dtype).reshape(shape)


def read_slice(folder, array, index, verified):
    """Read a slice of a stored array, such as rows 0 to 255, as a new NumPy array.

    Only the shards that overlap with the slice are read.

    array: the dict in manifest.json that describes the array.
    index: a Python slice for each dimension.
    verified: a dict that caches the shards of this array. Each shard is read only once.
    """
    wanted = [cut.indices(size)[:2] for cut, size in zip(index, array["shape"])]
    out = np.empty([stop - start for start, stop in wanted], array["dtype"])
    for number, entry in enumerate(array["pieces"]):
        # Find the part of this shard that overlaps with the wanted slice. This part,
        # shard[source], is copied to out[target].
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


def check_owner(folder, manifest, identity):
    """Raise UserError if a checkpoint has another model or vocabulary than the run.

    The manifest of the checkpoint describes the model and the vocabulary to which the
    weights belong. This description is compared with the model and vocabulary of the run.

    folder: the folder of the checkpoint.
    manifest: the content of manifest.json in this folder.
    identity: the model and the vocabulary of the run, as configs.weights_identity returns
        them.
    """
    configs.refuse_differences(
        identity,
        manifest.get("identity", {}),
        f"{folder} belongs to another model or vocabulary than the run",
        "use the config.json and the spiece.model of the run that wrote this checkpoint",
    )


def read_checkpoint(folder, template, identity):
    """Load arrays from a checkpoint, and put them on the devices.

    A checkpoint that was saved on 8 devices can also be loaded on 4 devices.

    template: a nested dict of ShapeDtypeStructs with shardings, one for each array to
        load. Other arrays of the checkpoint are ignored.
    identity: the model and the vocabulary of the run (see check_owner).
    Returns (step, nested dict of jax.Arrays like template).
    Raises UserError if the checkpoint belongs to another model or vocabulary, or if an
    array is absent or has another shape or dtype than template.
    """
    manifest = read_manifest(folder)
    check_owner(folder, manifest, identity)

    def read(name, wanted):
        stored = manifest["arrays"].get(name)
        if stored is None:
            raise UserError(
                f"{folder} has no array {name}: use the model and optimizer flags of the "
                f"run that wrote this checkpoint. To load only the weights into a new "
                f"run, use --init_from."
            )
        found = f"{stored['dtype']}{stored['shape']}"  # such as "float32[2, 3]"
        asked = f"{wanted.dtype}{list(wanted.shape)}"
        if found != asked:
            raise UserError(
                f"{folder} stores {name} as {found}, but your configuration asks for "
                f"{asked}: use the configuration of the run that wrote this checkpoint. "
                f"If this run has a recipe file, name the file with --config."
            )
        verified = {}
        # Each device needs one slice of the array. JAX calls the lambda for each slice
        # that a device of this process needs.
        return jax.make_array_from_callback(
            wanted.shape,
            wanted.sharding,
            lambda index: read_slice(folder, stored, index, verified),
        )

    # Read several arrays at the same time, because one thread does not use the full speed
    # of a disk or network. Each thread needs memory for the part of an array that this
    # process needs, and for a remote file also for the shards that contain this part.
    template = flatten(template)
    with ThreadPoolExecutor(STREAMS) as threads:
        values = threads.map(read, template, template.values())
        arrays = dict(zip(template, values))
    return manifest["step"], unflatten_dict(arrays, sep="/")


# ---- layers of sentence-transformers ---------------------------------------------------
# A model of sentence-transformers is a T5 encoder with a few more layers, which turn its
# vectors into one vector for each text. convert.py copies the files of these layers to
# the run directory. The file modules.json lists the layers.

# A pooling computes one vector of a text from the vectors of its tokens. POOLING_MODES
# maps the name of a pooling in sentence-transformers to the value for --pool of infer.py.
# Older models of sentence-transformers use the names that begin with "pooling_mode".
POOLING_MODES = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "first",
    "mean": "mean",
    "cls": "first",
}


def read_vector_head(folder):
    """Read the layers that a sentence-transformers model applies after its T5 encoder.

    The result is a pair (pool, layers). `pool` is "mean" or "first" and says how the
    vectors of all tokens become one vector. `layers` is a list of functions that are
    applied to this vector, one after another. Each function is a dense layer without
    activation function, or a division by the length of the vector.

    folder: the run directory, or the folder of a model in the format of Hugging Face.
    Raises UserError if plain T5 does not support a layer, or if a file is missing or
    damaged.
    """
    path = to_path(folder) / "modules.json"
    pools, layers = [], []
    try:
        for module in json.loads(path.read_text()):
            kind = module["type"].rpartition(".")[2]
            part = path.parent / module["path"]
            if kind in ("Pooling", "Dense"):
                config = json.loads((part / "config.json").read_text())
            if kind == "Pooling" and config.get("include_prompt", True):
                modes = [x for x in config if x.startswith("pooling_mode_") and config[x]]
                (mode,) = modes or [config["pooling_mode"]]
                pools.append(POOLING_MODES[mode])
            elif kind == "Dense" and config["activation_function"].endswith("Identity"):
                file = safetensors.numpy.load_file(part / "model.safetensors")
                (matrix,) = file.values()
                layers.append(np.float32(matrix).dot)
            elif kind == "Normalize":
                layers.append(lambda vector: vector / max(np.linalg.norm(vector), 1e-12))
            elif kind != "Transformer":
                # plain T5 supports no other layers and options. One such option is
                # "include_prompt": false, which leaves out the prompt from the mean.
                raise ValueError(f"unknown options of {kind}")
        (pool,) = pools
    # Catch every exception, because safetensors raises exceptions of its own class.
    except Exception as error:
        raise UserError(
            f"{path} describes layers that plain T5 cannot load ({error!r}). Either "
            f"plain T5 does not support one of these layers, or a file is missing or "
            f"damaged. To use only the encoder, add --pool mean, or remove modules.json."
        ) from error
    return pool, layers


# ---- several processes -----------------------------------------------------------------


def start_jax(cfg):
    """Connect to the other processes of a run, and turn on the compilation cache.

    Call this function before JAX uses a device. The --distributed flags say how to reach
    the other processes. Without these flags, JAX detects clusters such as Cloud TPU and
    SLURM. If there is no cluster, the process runs alone.
    """
    d = cfg.distributed
    if d.process == 0:
        note(f"Waiting until {d.processes} processes have connected to {d.coordinator}.")

    def give_up():
        note(
            f"The processes did not connect within {d.timeout} s: start the same command "
            f"on all machines, or raise --distributed.timeout.",
            always=True,
        )
        os._exit(2)

    # If the processes have not connected after --distributed.timeout seconds, print a
    # clear message and exit. JAX alone would wait 60 s longer, and would then abort with
    # a stack trace.
    timer = threading.Timer(d.timeout, give_up)
    timer.start()
    hide_stack_trace()
    try:
        jax.distributed.initialize(
            d.coordinator or None,
            d.processes,
            d.process,
            initialization_timeout=d.timeout + 60,
            heartbeat_timeout_seconds=d.timeout,
        )
    except ValueError:
        # Without --distributed.coordinator, ValueError means that JAX found no cluster.
        # This process then runs alone.
        if d.coordinator:
            raise
    finally:
        timer.cancel()
    if jax.process_count() > 1:
        configs.single_process = False
        # If another process ends or freezes, JAX may abort this process. The signal
        # handler on_abort then prints a message. It is a C function, because Python would
        # call a Python function too late.
        ctypes.CDLL(None).signal(signal.SIGABRT, on_abort)
        if not is_main_process():
            # Only process 0 prints progress and results.
            configs.prints_progress = False
            sys.stdout = open(os.devnull, "w")
        # Connect all processes with Gloo, JAX's communication library for CPUs. Gloo
        # waits at most 30 s in its first operation, and longer in later operations. Run
        # the first operation now, while no process is far behind the others.
        all_processes_agree(True)
    # Cache compiled programs on disk, unless the user has already chosen a folder.
    if not jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", HOME_CACHE)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


# By default, compiled programs are stored in this folder of the user's home directory.
HOME_CACHE = os.path.expanduser("~/.cache/plain_t5/compiled")


def share_compiled_programs(run_dir):
    """Store the compiled programs of several processes in the folder `compiled` of a run.

    JAX lets only process 0 write compiled programs to the cache. In a home directory that
    the machines do not share, the other processes find no programs. Each restart of the
    run would then wait until they have compiled all programs again. All processes can
    read the run directory, which also survives the loss of a machine.

    A cache that the user has chosen, and the cache of a single process, do not change.
    """
    if jax.process_count() == 1 or jax.config.jax_compilation_cache_dir != HOME_CACHE:
        return
    jax.config.update("jax_compilation_cache_dir", str(run_dir / "compiled"))
    if is_remote(run_dir):
        # For a GPU, XLA also caches measured times of kernels in files beside the
        # programs. XLA writes these files itself, and can write only local files.
        jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    compilation_cache.reset_cache()  # JAX has already opened the old folder.


def report_lost_process(*_):
    """Report that another process of the run has ended, and end this process too."""
    note(
        "Another process of this run has ended or does not respond. The lines above this "
        "message may show the reason. To continue from the last checkpoint, run the same "
        "command again on all machines.",
        always=True,
    )
    os._exit(1)


# Convert report_lost_process to a function that C code can call. The global variable
# keeps Python from deleting the function while C code still needs it.
on_abort = ctypes.CFUNCTYPE(None, ctypes.c_int)(report_lost_process)


def hide_stack_trace():
    """Keep JAX from printing a stack trace if another process ends or freezes.

    JAX then calls report_lost_process instead, which prints a short message. In JAX 0.10,
    this call fails, because JAX cannot convert an argument to a Python object. JAX 0.10
    therefore aborts the process, and the signal handler on_abort prints the message.
    """
    connect = runtime.get_distributed_runtime_client
    # The function get_distributed_runtime_client is not part of JAX's public API. A
    # version of JAX may therefore lack its argument missed_heartbeat_callback.
    if "missed_heartbeat_callback" in connect.__doc__:
        runtime.get_distributed_runtime_client = functools.partial(
            connect, missed_heartbeat_callback=report_lost_process
        )


def all_processes_agree(condition):
    """Return True if the condition is true on all processes, and False otherwise.

    Every process must call this function, and every process gets the same result.
    """
    return bool(process_allgather(condition).all())


def from_main_process(value):
    """Send a value from process 0 to all processes, and return this value.

    Every process must call this function. The value is sent as JSON. The values that the
    other processes pass are ignored.
    """
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    # In a broadcast, all processes must pass an array of the same length. Therefore the
    # first broadcast sends the length of the text, and the second broadcast sends the
    # text.
    size = int(broadcast_one_to_all(len(text)))
    text = broadcast_one_to_all(np.resize(text, size))
    return json.loads(bytes(text))


def run_on_all(work, elsewhere=UserError):
    """Call work() on every process. If one call fails, raise an error on all processes.

    Without an error on all processes, the other processes would wait forever for the
    process that failed. Returns the result of work() on this process.

    elsewhere: the class of the error that the other processes raise.
    """
    result = error = None
    try:
        result = work()
    except (UserError, CheckpointError, OSError) as raised:
        error = raised
    if not all_processes_agree(error is None):
        raise error or elsewhere("another process of this run failed and printed why")
    return result


def check_same(own):
    """Raise UserError on all processes if one process has other values than process 0.

    own: the values of this process, as a dict such as {"--train.seed": 0}.
    """
    expected = from_main_process(own)
    run_on_all(
        lambda: configs.refuse_differences(
            own,
            expected,
            f"Process {jax.process_index()} differs from process 0",
            "start the same command, with the same files, on all machines",
        )
    )


def check_same_command(cfg, args):
    """Raise UserError if the processes of a run were started with different settings.

    The recipe file and the code of plain T5 must also be the same on all processes.

    cfg: the Config of this process.
    args: the other options of the command, from configs.parse_args.
    """
    # Leave out --distributed.process, because each process has its own number. All other
    # settings must be the same.
    own = configs.settings(cfg, {"distributed.process"})
    own |= {f"--{name}": value for name, value in vars(args).items()}
    own["the recipe file"] = list(configs.RECIPE_CODE.values())
    own["the code of plain T5"] = [
        zlib.crc32(path.read_bytes()) for path in configs.OWN_FILES
    ]
    check_same(own)


def run_on_main_first(work):
    """Call work() on process 0, and after that on the other processes.

    This function is for work that writes shared files. The other processes then find the
    files that process 0 has written. Returns the result of work() on this process.
    """
    result = run_on_all(lambda: work() if is_main_process() else None)
    others = run_on_all(lambda: None if is_main_process() else work())
    return result if is_main_process() else others


# ---- the checkpoints of a run ----------------------------------------------------------


def is_complete(path):
    """Return True for a complete checkpoint, and False if its save was interrupted.

    The result is also True if the path is a file instead of a folder. The function
    read_manifest then reports that the file is not a checkpoint.
    """
    # A local folder is renamed to step_... when all its files are written. In a remote
    # folder, manifest.json is written last.
    is_stored = not is_remote(path) or (path / "manifest.json").exists() or path.is_file()
    return path.name.startswith("step_") and is_stored


def read_first_valid(paths, template, identity):
    """Load the first undamaged checkpoint of a list.

    If one process finds damage in a checkpoint, all processes print a message. All
    processes then try the next checkpoint of the list.

    template: a nested dict of ShapeDtypeStructs with shardings.
    identity: the model and the vocabulary of the run (see check_owner).
    Returns (step, nested dict of jax.Arrays like template).
    Raises UserError if no checkpoint is valid.
    """
    for path in paths:
        try:
            return run_on_all(
                lambda: read_checkpoint(path, template, identity), CheckpointError
            )
        except CheckpointError as error:
            problem = error
            note(f"A checkpoint is skipped, because {problem}.", always=True)
    raise UserError(
        f"None of the checkpoints can be used ({problem}): name another checkpoint, or "
        f"restore one from a backup. To start the run from the beginning, move "
        f"{path.parent} to another place."
    )


class Checkpoints:
    """Save, list and load the checkpoints of one run.

    Checkpoints are written one at a time, in the background if `background` is true.

    run_dir: the directory of the run, such as runs/tiny.
    keep: how many of the newest checkpoints to keep.
    background: whether to write in a background thread while training continues.
    identity: the model and the vocabulary of the run, as configs.weights_identity returns
        them. They are written to each checkpoint, and compared when one is loaded.
    report: a function that prints a line about each saved checkpoint.
    """

    def __init__(
        self,
        run_dir,
        keep=3,
        background=True,
        identity=None,
        report=lambda line: None,
    ):
        self.folder = to_path(run_dir) / "checkpoints"
        self.keep = keep
        self.background = background
        self.identity = identity or {}
        self.report = report
        self.executor = ThreadPoolExecutor(1)
        self.unfinished = None  # This becomes the Future of the latest background save.

    def folders(self):
        """Return the folders of all checkpoints and of interrupted saves."""
        # Use only the names of the paths that glob finds. For some remote folders, glob
        # returns paths with wrong parent folders.
        names = [path.name for path in self.folder.glob("*step_*")]
        return [
            self.folder / name for name in names if re.fullmatch(r"(tmp-)?step_\d+", name)
        ]

    def steps(self):
        """Return the step numbers of all complete checkpoints, in ascending order."""
        return sorted(int(p.name[5:]) for p in self.folders() if is_complete(p))

    def path(self, step):
        """Return the path of the checkpoint of a step, such as .../step_00001000."""
        return self.folder / f"step_{step:08}"

    def save(self, tree, step, best=lambda: None):
        """Save arrays as the checkpoint of a training step.

        If the previous save is still running, wait until it is finished.

        tree: a nested dict of jax.Arrays.
        best: a function that returns the step of an older checkpoint that must not be
            removed, or None. It is called after the previous save is finished.
        Returns how many seconds training had to wait.
        """
        began = time.perf_counter()
        self.wait()
        flat = flatten(tree)
        arrays = {
            name: {"shape": a.shape, "dtype": a.dtype.name} for name, a in flat.items()
        }
        # list() copies all shards to the host before training continues, because the next
        # training step reuses the memory of the arrays.
        shards = list(local_shards(tree, choose_copies(flat)))
        if self.background:
            self.unfinished = self.executor.submit(
                self.commit, arrays, shards, step, best(), began
            )
        else:
            # Write the files now. Training continues only when the files are complete.
            self.commit(arrays, shards, step, best(), began)
        return time.perf_counter() - began

    def commit(self, arrays, shards, step, best, began):
        """Write a checkpoint, and then remove all but the newest `keep` checkpoints.

        The checkpoint of the step `best` is never removed. Raises CheckpointError if the
        files cannot be written, for example because the disk is full.

        began: the time at which the save began, from time.perf_counter.
        """
        ready = time.perf_counter()
        try:
            write_checkpoint(
                self.path(step), arrays, shards, step, self.identity, write_files
            )
        except OSError as error:
            raise CheckpointError(
                f"{self.path(step)} could not be written ({error})"
            ) from error
        if is_main_process():
            self.remove_old(step, best)
            done = time.perf_counter()
            # If a background thread writes the files, training waits only until the
            # shards are on the host.
            waited = (ready if self.background else done) - began
            self.report(
                f"saved    {self.path(step)} in {done - began:.2f} s, of which training "
                f"waited {waited:.2f} s"
            )

    def remove_old(self, step, best):
        """Remove old checkpoints, so that only the newest `keep` checkpoints remain.

        Checkpoints of steps after `step` are neither counted nor removed. The checkpoint
        of the step `best` is never removed.
        """
        written = [other for other in self.steps() if other <= step]
        for old in written[: -self.keep]:
            if old != best:
                remove_checkpoint(self.path(old))

    def discard_unfinished(self):
        """Remove the folders of interrupted saves.

        Only process 0 may call this method.
        """
        for path in self.folders():
            if not is_complete(path):
                remove_checkpoint(path)

    def wait(self):
        """Wait until the save in the background ends. Raise an error if the save failed.

        The error is the CheckpointError that the method commit has raised.
        """
        if self.unfinished:
            self.unfinished.result()

    def load(self, template, step=None):
        """Load the newest valid checkpoint, or the checkpoint of a given step.

        If the newest checkpoint is damaged, print a message and try the next older
        checkpoint.

        template: a nested dict of ShapeDtypeStructs with shardings.
        Returns (step, nested dict of jax.Arrays like template). Returns None if there is
        no checkpoint and no step is given.
        Raises UserError if the checkpoint of the given step, or every checkpoint, is
        damaged.
        """
        steps = from_main_process(self.steps())
        if step is not None:
            if step not in steps:
                raise UserError(
                    f"{self.folder} has no checkpoint of step {step}: choose one of the "
                    f"steps {steps}."
                )
            steps = [step]
        if not steps:
            return None
        return read_first_valid(map(self.path, reversed(steps)), template, self.identity)


def is_run(source):
    """Return True for a run directory with checkpoints, and False for a checkpoint.

    Raises UserError for any other path.
    """
    if (to_path(source) / "manifest.json").exists():
        return False
    if not Checkpoints(source).steps():
        raise UserError(
            f"{source} is not a checkpoint and not a run with checkpoints: name another "
            f"path. The weights of another library must first be converted by convert.py."
        )
    return True


def load_newest(source, template, identity):
    """Load a given checkpoint, or the newest valid checkpoint of a given run.

    source: the path of a checkpoint or of a run directory.
    template: a nested dict of ShapeDtypeStructs with shardings.
    identity: the model and the vocabulary of the new run (see check_owner).
    Returns (step, nested dict of jax.Arrays like template).
    """
    if is_run(source):
        return Checkpoints(source, identity=identity).load(template)
    return read_first_valid([to_path(source)], template, identity)


def read_metrics_file(path):
    """Return the lines of metrics.jsonl as a list of dicts, without damaged lines."""
    lines = []
    if not path.exists():
        return lines
    for text in path.read_bytes().splitlines():
        try:
            line = json.loads(text)
            configs.check_json(line, {"step": int, str: (int, float)})
        except (ValueError, RecursionError):
            continue  # A killed run can leave an incomplete line, which is skipped.
        lines.append(line)
    return lines


def best_step(path, metric, steps):
    """Find the step with the best value of a metric in metrics.jsonl.

    Returns (step, value), or None if no step has a value. For a loss or perplexity, the
    lowest value is the best. For all other metrics, the highest value is the best.

    path: the path of metrics.jsonl.
    metric: a key in the lines of the file, such as "training_eval/span_corruption/loss".
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
    """Convert the text of --step to a step number, or to None for the latest step.

    name: "latest", "best" or a step number such as "1000". The best step has the best
        value of the metric that --train.keep_best names.
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
            f"{run_dir} has no best step: use --step latest or a step number. Only runs "
            f"with --train.keep_best have a best step."
        )
    return best[0]


# ---- the cost of a sharding: chips and memory ------------------------------------------


# A Chip contains four numbers from the data sheet of a GPU or TPU. `teraflops` is the
# speed of a bfloat16 matmul, in 10^12 operations per second. `memory` is in GB. `links`
# is the speed at which the chip sends data to all its neighbors together, in GB/s.
# `clock` is the clock rate of a TPU in GHz, and 0 for a GPU.
Chip = namedtuple("Chip", "teraflops memory links clock")

# CHIPS maps the name of an accelerator, as in jax.Device.device_kind, to a Chip. JAX
# counts a TPU v3 chip as two devices, so the row "TPU v3" describes half a chip.
CHIPS = {}
for row in """
H200         989.5  141  450  0
H100         989.5   80  450  0
A100           312   80  300  0
TPU v3        61.5   16   41  0.94
TPU v4         275   32  150  1.05
TPU v5 lite    197   16  100  1.503
TPU v5         459   95  300  1.75
TPU v6 lite    918   32  224  1.75
""".strip().splitlines():
    name, *numbers = re.split(" {2,}", row)
    CHIPS[name] = Chip(*map(json.loads, numbers))

# The next three constants contain options of the XLA compiler that make programs for TPUs
# faster. The function lower_step in train.py chooses the options that help on each TPU.

# FSDP must all-gather the weights of each layer before use. With the following six
# options, a TPU continues to compute during an all-gather. By default, the compiler
# gathers the weights by all-reduces, and the TPU waits until each all-reduce is finished.
ASYNC_GATHER_OPTIONS = dict.fromkeys(
    "xla_enable_async_all_gather "
    "xla_tpu_prefer_async_allgather_to_allreduce "
    "xla_tpu_enable_async_collective_fusion "
    "xla_tpu_overlap_compute_collective_tc "
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather "
    "xla_tpu_enable_async_collective_fusion_multiple_steps".split(),
    True,
)

# The devices sum their gradients by all-reduces. With these options, the all-reduce of a
# gradient of more than 1 MB starts as soon as the gradient is computed. By default, all
# gradients are summed together at the end of the step. A TPU v4 has too little on-chip
# memory for these options.
ASYNC_REDUCE_OPTIONS = {
    "xla_enable_async_all_reduce": True,
    "xla_jf_crs_combiner_threshold_in_bytes": 1_000_000,
    "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": True,
}

# With this option, each fused operation may use 24 MiB of on-chip memory (VMEM) instead
# of 16 MiB. A TPU v4 has too little VMEM for this option, and on a TPU v6e the option
# makes programs slower.
FUSION_MEMORY_OPTIONS = {"xla_tpu_scoped_vmem_limit_kib": 24 * 1024}


def check_memory(parts, levers):
    """Raise UserError if arrays need more memory than all devices together have.

    The error message names flags that reduce the memory.

    parts: a dict from names to bytes, for arrays that are in memory at the same time.
    levers: the text with these flags, such as "--train.batch_size".
    """
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        # All CPU devices of a process share the memory of one machine. Count this memory
        # once for each process, and not once for each device.
        available = configs.machine_memory() * jax.process_count()
    else:
        stats = device.memory_stats() or {"bytes_limit": math.inf}
        available = stats["bytes_limit"] * jax.device_count()
    configs.require_memory(parts, available, f"{levers}, or use more devices")


def bytes_on_device(tree):
    """Return how many bytes one device needs for its shards of all arrays in a tree.

    For example, if an array of 32 float32 numbers is split over 2 devices, each device
    needs 64 bytes.

    tree: a tree of arrays or ShapeDtypeStructs with shardings.
    """
    return sum(
        math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize
        for a in jax.tree.leaves(tree)
    )


# ---- the cost of a sharding: communication and TPU cycles ------------------------------
# A compiled program can be printed as HLO text, XLA's intermediate language, with one
# instruction per line. The functions below search this text for collective operations
# (all-reduce, ...) and for the time estimates of the TPU compiler. Shortened example:
#
#   %body (p: f32[4,8]) -> f32[4,8] {
#     %all-reduce.7 = f32[4,8]{1,0} all-reduce(%p), replica_groups={{0,1},{2,3}}
#   }
#   ENTRY %main (p: f32[4,8]) -> f32[4,8] {
#     %while.1 = f32[4,8]{1,0} while(%p), condition=%cond, body=%body
#   }
#
# The result of the all-reduce has the type f32[4,8]{1,0}. This is the dtype float32, the
# shape [4, 8] on one device, and the order of the dimensions in memory.

# This pattern finds each instruction in an HLO text that sends data to other devices. The
# comments in the pattern show examples of these instructions. The ending "-start" in the
# name of an operation means that the device can compute during the operation.
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
    """Yield (line, times) for each instruction in the HLO text of a program.

    HLO is the intermediate language of the XLA compiler. The number `times` says how
    often the program executes the instruction. The instructions of a loop appear once in
    the text, but the program executes them many times.
    """
    # Find the functions of the program, as {name: lines}. The first line of a function
    # looks like "%body (p: f32[4,8]) -> f32[4,8] {".
    computations = dict(
        re.findall(r"^(?:ENTRY )?%(\S+) \(.*?\{\n(.*?)^\}", text, re.M | re.S)
    )
    # Begin with the last function in the HLO text, which is the entry point of the
    # program.
    unvisited = [(list(computations)[-1], 1)]
    while unvisited:
        name, times = unvisited.pop()
        for line in computations[name].splitlines():
            # Find the loops and the function calls. The following lines are examples:
            #   %w = f32[8]{0} while(%p), condition=%cond, body=%body
            #   %c = f32[8]{0} call(%p), to_apply=%function
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
                # Find the number of iterations of the loop. If a loop has 3 iterations,
                # its line contains known_trip_count":{"n":"3"}, or its condition contains
                # constant(3).
                counts = re.findall(
                    r'known_trip_count":\{"n":"(\d+)"', line
                ) or re.findall(r"constant\((\d+)\)", computations[condition])
            unvisited.append((function, times * max(map(int, counts))))


def hlo_bytes(text):
    """Return the total size in bytes of all arrays whose types appear in an HLO text.

    For example, "(f32[2,3], pred[4])" has 24 + 4 = 28 bytes.
    """
    # The number in the name of a dtype is its size in bits: f32 has 32 bits. The name of
    # the dtype pred (bool) contains no number, and the dtype has 8 bits.
    return sum(
        int(bits or 8) // 8 * math.prod(integers(shape))
        for bits, shape in re.findall(r"\b[a-z]+(\d*)\w*\[([\d,]*)\]", text)
    )


def integers(text):
    """Return all integers in a text as a list. For example, "4,8" becomes [4, 8]."""
    return list(map(int, re.findall(r"\d+", text)))


def find_collectives(instructions):
    """Find all operations in which devices exchange data (collective operations).

    Yields (kind, bytes, line, times) for each operation. The kind is a name such as
    "all-reduce". If the device computes during the operation, the kind is "all-reduce,
    overlapped". If a TPU fuses several operations into one, the kind is "collectives,
    overlapped".

    bytes is the size of the result. For an overlapped operation, the size of the operand
    is added. This gives an upper bound for the bytes that a ring sends.

    instructions: (line, times) of each instruction, as hlo_instructions yields them.
    """
    for line, times in instructions:
        found = COLLECTIVE.search(line)
        if found:
            kind, start, fused_kind, fused_start = found.groups()
            kind = kind or fused_kind or "collectives"
            if start or fused_start:
                kind += ", overlapped"
            # Keep only the types of the instruction's results, which come before the
            # operands in the line. The operands begin with "(%". A fusion also returns
            # counters of the type s32[2], which are not counted.
            types = re.split(r"\(%| s32\[2\]", line)[0]
            yield kind, hlo_bytes(types), line, times


def ring_bytes(kind, result_bytes, devices):
    """Estimate how many bytes each device sends in a collective operation on a ring.

    If each of 4 devices gets a result of 100 bytes, each device sends 100 bytes in an
    all-gather, 200 in an all-reduce and 400 in a reduce-scatter. The input of a
    reduce-scatter is 4 times as large as its result. An all-reduce is a reduce-scatter
    and then an all-gather.

    The exact number is smaller by the factor 1 - 1 / devices, because no device sends its
    own share.
    """
    return {"all-reduce": 2, "reduce-scatter": devices}.get(kind, 1) * result_bytes


def first_device_group(line, count):
    """Return the numbers of a group of devices that exchange data, such as [0, 2, 4, 6].

    Each collective operation divides the devices into groups of equal size. Only devices
    of the same group exchange data. This function returns the first group.

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
        # The line names some mesh axes in braces, such as {'axis_0'}. The devices of a
        # group differ only in their positions on these axes. In the first group, the
        # position on each other axis is 0.
        devices = devices[
            tuple(slice(None) if name in mesh[2] else 0 for name, _ in axes)
        ]
    return devices.ravel()


def count_collectives(lowered):
    """Compile a program, and count the bytes that its devices send to each other.

    Returns a list of (kind, mesh axis, count, bytes) and the compiled program. The tuple
    ("all-reduce", "data", 5, 8e6) means that each device sends 8 MB in 5 all-reduces over
    the axis "data". If an operation uses both axes of the mesh, its axis is "both".

    lowered: a jax.stages.Lowered for the current mesh.
    """
    mesh = get_mesh()
    # Save the HLO text directly after XLA's partitioner has added the collective
    # operations. Later, the compiler for CPUs replaces bfloat16 by float32, which would
    # double the counted bytes.
    with tempfile.TemporaryDirectory() as folder:
        options = {"xla_dump_to": folder, "xla_dump_hlo_pass_re": "spmd-partitioning"}
        if platform() == "cpu":
            # Compile without optimization to save time, because the compiled program is
            # never run.
            options["xla_backend_optimization_level"] = "0"
        program = lowered.compile(options)
        if mesh.size == 1:
            return [], program
        (path,) = Path(folder).glob("*spmd-partitioning.before*.txt")
        text = path.read_text()
    counts, sent = Counter(), Counter()
    for kind, size, line, times in find_collectives(hlo_instructions(text)):
        group = first_device_group(line, mesh.size)
        # The devices of the mesh are numbered row by row. In a mesh of 2 x 4 devices, for
        # example, device 6 has the position (1, 2).
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
    """Return which part of the training step an HLO instruction belongs to.

    The result is a name such as "attention", "mlp, gradient" or "optimizer". The name is
    found in the instruction's op_name, which lists the JAX functions that were called.
    Instructions without an op_name are copies that the compiler has added.

    Examples of op_name and the result:
      jit(train_step)/jvp()/closed_call/attention/shard_map/add           "attention"
      jit(train_step)/transpose(jvp())/closed_call/mlp/dot_general        "mlp, gradient"
      jit(train_step)/jvp()/while/body/closed_call/add         "residual connections"
      jit(train_step)/reduce_sum                                          "optimizer"
    """
    path = re.search(r'op_name="([^"]+)"', line)
    if not path:
        return "copies"
    if "jvp" not in path[1]:
        return "optimizer"
    labels = "attention|mlp|norm|embedding|logits and loss"
    if name := re.search(f"[/(]({labels})[/)]", path[1]):
        part = name[1]
    elif path[1].endswith(("slice", "squeeze")):
        # A loop over the layers copies the weights and activations of each layer out of
        # the stacked arrays and into them.
        part = "slices of layers"
    elif path[1].endswith(("/add", "/add_any")):
        part = "residual connections"
    else:
        part = "the rest"
    if "rematted" in path[1]:
        part += ", again"
    if "transpose(" in path[1]:
        part += ", gradient"
    return part


# The floating-point operations per clock cycle of the attention kernel in model.py. This
# number comes from the machine code for TPU v5e, where a training step of T5 1.1 small
# needs 9.6 million cycles for 459 billion operations.
KERNEL_FLOPS_PER_CYCLE = 48_000


def estimated_cycles(text):
    """Return the TPU compiler's estimate of how many clock cycles a training step takes.

    Returns three Counters. The first Counter maps each part of the step, such as
    "attention", to its clock cycles. The second one maps each kind of communication, such
    as "all-reduce", to the number of these operations. The third one maps each kind of
    communication to the number of bytes that each device sends.

    text: the HLO text of a program that was compiled for a TPU. Most instructions contain
    an estimate, such as backend_config={"window_config":{"estimated_cycles":"2439", ...}}
    """
    cycles, counts, sent = Counter(), Counter(), Counter()
    instructions = list(hlo_instructions(text))
    for line, times in instructions:
        estimate = re.search(r'"estimated_cycles":"(\d+)"', line)
        if estimate:
            cycles[part_of_step(line)] += times * int(estimate[1])
        # The compiler does not estimate the attention kernel, which is a custom call.
        kernel = re.search(r'"tpu_custom_call".*"flops":"(\d+)"', line)
        if kernel:
            cycles[part_of_step(line)] += times * int(kernel[1]) // KERNEL_FLOPS_PER_CYCLE
    devices = get_mesh().shape["data"]
    for kind, size, _, times in find_collectives(instructions):
        counts[kind] += times
        sent[kind] += times * ring_bytes(kind, size, devices)
    return cycles, counts, sent


# ---- the command -----------------------------------------------------------------------


def verify(folder):
    """Check every array shard of a checkpoint, and return a list of error messages.

    If the list is empty, the checkpoint is valid.
    """
    shards = [
        (name, array["dtype"], entry)
        for name, array in read_manifest(folder)["arrays"].items()
        for entry in array["pieces"]
    ]

    def check(shard):
        name, dtype, entry = shard
        try:
            read_shard(folder, entry, dtype)
        except CheckpointError as error:
            return f"{name}: {error}"

    # Read several shards at the same time, because one thread does not use the full speed
    # of a disk or network. Each thread needs memory for one shard of a remote file, so
    # use only 8 threads. The method map returns the results in the order of the shards.
    with ThreadPoolExecutor(8) as threads:
        return [problem for problem in threads.map(check, shards) if problem]


def main(argv):
    """Check the checkpoint that --verify names, and print a line for each damaged part.

    Returns the exit status, which is 0 for a valid and 1 for a damaged checkpoint.
    """
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
