"""Split arrays over devices and processes, and save and load checkpoints.

A mesh is a grid of all devices. Its axis "data" splits the batch, and its axis "model"
splits the weights. RULES says which mesh axis splits each dimension of an array.

    >>> tuple(spec(("embed", "mlp")))               # an MLP matrix in a matmul
    (None, 'model')
    >>> tuple(spec(("embed", "mlp"), fsdp=True))    # in storage, with --mesh.fsdp
    ('data', 'model')
"""

import contextlib
import fcntl
import os
import re
import shutil
import sys
import zlib
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import msgpack
import numpy as np
from jax import NamedSharding, P
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, get_abstract_mesh, get_mesh
from jax.tree_util import keystr

import configs
from configs import Config, UserError

# ---- mesh and sharding rules -----------------------------------------------------------
# With 8 devices and --mesh.model 4, the mesh has 2 x 4 devices. A training step is split
# in three ways:
#
# - Data parallelism splits the batch over "data". An all-reduce sums the gradients.
# - Tensor parallelism splits vocabulary, heads and MLP over "model", as in Megatron
#   (Shoeybi et al. 2019). Attention and MLP each need one all-reduce in the forward pass.
# - Fully sharded data parallelism (--mesh.fsdp, ZeRO-3 of Rajbhandari et al. 2020) also
#   splits the stored weights over "data". Each layer gathers its weights before use.

# The logical axes (names of dimensions) that are split, and the mesh axis that splits
# each, as in Flax and T5X. The compiler chooses the sharding of all other arrays, and
# adds the communication.
RULES = {"batch": "data", "vocab": "model", "heads": "model", "mlp": "model"}


def spec(axes: tuple, fsdp: bool = False) -> P:
    """Return the PartitionSpec of an array from the names of its dimensions."""
    rules = RULES | {"embed": "data"} if fsdp else RULES
    return P(*map(rules.get, axes))


def constrain(x: jax.Array, *axes) -> jax.Array:
    """Tell the compiler to split an array by the names of its dimensions."""
    if get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, spec(axes))


def set_mesh(cfg: Config, devices: list | None = None) -> Mesh:
    """Create the mesh of all devices, and make JAX use it."""
    devices = devices or jax.devices()
    if len(devices) % cfg.mesh.model:  # JAX would not use all devices.
        raise UserError(
            f"--mesh.model must divide the number of devices, {len(devices)}."
        )
    shape = len(devices) // cfg.mesh.model, cfg.mesh.model
    # With Auto axes, the compiler follows the constraints that `constrain` sets.
    types = AxisType.Auto, AxisType.Auto
    mesh = jax.make_mesh(shape, ("data", "model"), types, devices=devices)
    jax.set_mesh(mesh)
    return mesh


def platform() -> str:
    """Return "cpu", "gpu" or "tpu", the platform for which the current mesh compiles."""
    mesh = get_abstract_mesh()
    return jax.default_backend() if mesh.empty else mesh.abstract_device.platform


def flatten(tree: Any) -> dict[str, Any]:
    """Return the leaves of a tree by name: {"a": {"b": 1}} becomes {"a/b": 1}."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def put_batch(batch: Any) -> Any:
    """Split the rows of NumPy arrays over the mesh axis "data".

    Every process passes the complete batch, and keeps the rows of its own devices.
    """
    sharding = NamedSharding(get_mesh(), P("data"))
    return jax.tree.map(
        lambda a: jax.make_array_from_callback(a.shape, sharding, a.__getitem__), batch
    )


# ---- several processes -----------------------------------------------------------------


def is_main_process() -> bool:
    """Return whether this is process 0, which prints, and writes the shared files."""
    return jax.process_index() == 0


def start_jax(options: configs.Options) -> None:
    """Connect to the other processes, compare flags, and turn on the compilation cache.

    Without the --distributed flags, JAX detects clusters such as Cloud TPU and SLURM. If
    one process ends, JAX ends the others after --distributed.timeout seconds.
    """
    d = options.distributed
    try:
        jax.distributed.initialize(
            d.coordinator or None,
            d.processes,
            d.process,
            heartbeat_timeout_seconds=d.timeout,
            shutdown_timeout_seconds=d.timeout,
        )
    except ValueError:  # There is no cluster, so this process runs alone.
        if d.coordinator or d.processes or d.process is not None:
            raise
    if not is_main_process():
        sys.stdout = open(os.devnull, "w")
    cache = jax.config.jax_compilation_cache_dir or "~/.cache/plain_t5/compiled"
    jax.config.update("jax_compilation_cache_dir", os.path.expanduser(cache))
    check_same(replace(options, distributed=None))


def check_same(value: Any) -> None:
    """Raise UserError on all processes if they have different values."""
    digest = np.uint32(zlib.crc32(repr(value).encode()))
    if len(np.unique(multihost_utils.process_allgather(digest))) > 1:
        raise UserError(
            "The processes of this run have different settings or files: start the same "
            "command on all machines, with the same vocabulary, data and checkpoints."
        )


def lock(run_dir: Path):
    """Keep a second command from training in the same local folder (not in a bucket)."""
    if configs.is_remote(run_dir) or not is_main_process():
        return contextlib.nullcontext()
    run_dir.mkdir(parents=True, exist_ok=True)
    file = open(run_dir / ".lock", "w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"Another process is training in {run_dir}.") from None
    return file


# ---- writing a checkpoint --------------------------------------------------------------
# RUN_DIR/checkpoints/step_00001000/
#     shards-00000-of-00002.msgpack    the parts of the arrays that process 0 writes
#     shards-00001-of-00002.msgpack    the parts of the arrays that process 1 writes
#     complete                         the number of shard files, written last
#
# A shard file begins with a checksum, headers, and the position from which data.Batches
# continues. A header has the name, shape and dtype of its array, its bounds [start, stop]
# in each dimension, and offset and checksum of its data, which follow the headers.
#
# A kill must never leave a damaged checkpoint that looks complete.
# Therefore all shard files are on disk before the file `complete` is written. A folder
# without this file is not a checkpoint.


def shard_path(folder: Path, process: int, processes: int) -> Path:
    return folder / f"shards-{process:05}-of-{processes:05}.msgpack"


def write_shards(path: Path, arrays: Any, data_position: Any) -> None:
    """Write the shards that this process has to write, and the position in the data."""
    headers, shards, offset = [], [], 0
    for name, array in sorted(flatten(arrays).items()):
        header = {"name": name, "shape": array.shape, "dtype": array.dtype.name}
        for part in array.addressable_shards:
            if part.replica_id == 0:  # Other devices can hold copies of it.
                bounds = [i.indices(n)[:2] for i, n in zip(part.index, array.shape)]
                headers.append(header | {"bounds": bounds})
                shards.append(part.data)
    jax.copy_to_host_async(shards)
    contents = [np.ascontiguousarray(x).reshape(-1).view(np.uint8).data for x in shards]
    for header, content in zip(headers, contents):
        header.update(offset=offset, crc32=zlib.crc32(content))
        offset += content.nbytes
    head = msgpack.packb({"shards": headers, "data_position": data_position})
    with path.open("wb") as file:
        file.write(msgpack.packb([zlib.crc32(head), head]))
        file.writelines(contents)
        if not configs.is_remote(path):
            file.flush()
            os.fsync(file.fileno())


# ---- reading a checkpoint --------------------------------------------------------------


def damaged_error(path: Path) -> UserError:
    return UserError(
        f"{path} is damaged. To continue from an earlier checkpoint, delete the folder "
        f"{path.parent}."
    )


def read_headers(folder: Path) -> tuple[dict[str, list], Any]:
    """Return {array name: headers of its shards}, and the position in the data."""
    headers, count = {}, (folder / "complete").read_text()
    if not count.isdigit():
        raise damaged_error(folder / "complete")
    count = int(count)
    for process in range(count):
        path = shard_path(folder, process, count)
        with path.open("rb") as file:
            unpacker = msgpack.Unpacker(file)
            try:
                crc32, head = unpacker.unpack()
                if zlib.crc32(head) != crc32:
                    raise ValueError("wrong checksum")
            except (ValueError, TypeError, msgpack.UnpackException):
                raise damaged_error(path) from None
        head = msgpack.unpackb(head)
        for header in head["shards"]:
            location = {"file": path, "offset": unpacker.tell() + header["offset"]}
            headers.setdefault(header["name"], []).append(header | location)
    return headers, head["data_position"]  # All files have the same one.


def read_shard(header: dict) -> np.ndarray:
    """Read the numbers of one shard, and verify their checksum."""
    array = np.empty([stop - start for start, stop in header["bounds"]], header["dtype"])
    with header["file"].open("rb") as file:
        file.seek(header["offset"])
        size = file.readinto(array.reshape(-1).view(np.uint8).data)
    if size != array.nbytes or zlib.crc32(array) != header["crc32"]:
        raise damaged_error(header["file"])
    return array


def read_slice(headers: list[dict], index: tuple, loaded: dict) -> np.ndarray:
    """Assemble one slice of an array from the shards that overlap with it.

    If the slice is 2 to 6, and a shard holds 4 to 8, then out[2:4] is shard[0:2].
    index: a slice of each dimension. loaded: shards that were read before, by number.
    """
    wanted = [i.indices(n)[:2] for i, n in zip(index, headers[0]["shape"])]
    start, stop = np.array(wanted, int).reshape(-1, 2).T  # of each dimension
    out = np.empty(stop - start, headers[0]["dtype"])
    for number, header in enumerate(headers):
        shard_start, shard_stop = np.array(header["bounds"], int).reshape(-1, 2).T
        low, high = np.maximum(start, shard_start), np.minimum(stop, shard_stop)
        if (low < high).all():
            if number not in loaded:
                loaded[number] = read_shard(header)
            from_shard = tuple(map(slice, low - shard_start, high - shard_start))
            out[tuple(map(slice, low - start, high - start))] = loaded[number][from_shard]
    return out


def load_arrays(folder: Path, abstract: Any) -> Any:
    """Load arrays from a checkpoint that any number of devices has written.

    abstract: a tree of ShapeDtypeStructs with shardings, for some arrays or for all.
    Returns the same tree of arrays.
    """
    stored, _ = read_headers(folder)
    wanted = flatten(abstract)
    check_same([header["crc32"] for headers in stored.values() for header in headers])
    found = {name: [h[0]["dtype"], *h[0]["shape"]] for name, h in stored.items()}
    needed = {name: [like.dtype.name, *like.shape] for name, like in wanted.items()}
    # A checkpoint may have more arrays of the optimizer than needed, but not of weights.
    for name in [*needed, *(x for x in found if x.startswith("params/"))]:
        if found.get(name) != needed.get(name):
            raise UserError(
                f"{folder} has {found.get(name, 'nothing')} for the array {name}, but "
                f"this run needs {needed.get(name, 'nothing')}: other settings or other "
                f"code (a fork) wrote it."
            )

    def load(name, like):
        read = partial(read_slice, stored[name], loaded={})
        return jax.make_array_from_callback(like.shape, like.sharding, read)

    arrays = [load(name, like) for name, like in wanted.items()]
    return jax.tree.unflatten(jax.tree.structure(abstract), arrays)


# ---- the checkpoints of a run ----------------------------------------------------------


class Checkpoints:
    """Save and list the checkpoints of one run. Every process calls `save`."""

    def __init__(self, run_dir: Path | str, keep: int = 3):
        self.folder, self.keep = configs.to_path(run_dir) / "checkpoints", keep

    def path(self, step: int) -> Path:
        return self.folder / f"step_{step:08}"

    def all_steps(self) -> list[int]:
        """Return the steps of all checkpoints and of interrupted saves, in order."""
        names = [path.name for path in self.folder.glob("step_*")]
        return sorted(int(x[5:]) for x in names if re.fullmatch(r"step_\d{8,}", x))

    def steps(self) -> list[int]:
        """Return the steps of all complete checkpoints, in ascending order."""
        return [x for x in self.all_steps() if (self.path(x) / "complete").exists()]

    def save(self, arrays: Any, step: int, data_position: Any = None) -> None:
        """Write a tree of arrays, which is complete when all processes have written.

        They wait for each other, so they must call this after the same step.
        """
        folder = self.path(step)
        count = jax.process_count()
        folder.mkdir(parents=True, exist_ok=True)
        path = shard_path(folder, jax.process_index(), count)
        write_shards(path, arrays, data_position)
        multihost_utils.sync_global_devices(f"shards of step {step}")
        if is_main_process():
            for process in range(count):  # fails unless all write to the same folder
                shard_path(folder, process, count).stat()
            configs.write_file(folder / "complete", str(count))
            self.remove_old()

    def remove_old(self) -> None:
        """Remove interrupted saves, and all checkpoints but the `keep` newest."""
        newest = self.steps()[-self.keep :] if self.keep else self.steps()
        for step in {*self.all_steps()} - {*newest}:
            path = self.path(step)
            # Without `complete`, a folder that is half deleted does not count.
            (path / "complete").unlink(missing_ok=True)
            if configs.is_remote(path):
                path.rmtree()
            else:
                shutil.rmtree(path)


def newest_checkpoint(source: Path | str) -> Path | None:
    """Return the folder of a given checkpoint, or of the newest one of a given run."""
    folder = configs.to_path(source)
    if (folder / "complete").exists():
        return folder
    checkpoints = Checkpoints(folder)
    # All processes use the newest checkpoint that process 0 sees.
    newest = max(checkpoints.steps(), default=-1)
    step = int(multihost_utils.broadcast_one_to_all(np.int32(newest)))
    return checkpoints.path(step) if step >= 0 else None


def resolve_step(run_dir: Path | str, name: str) -> int:
    """Return the step that "latest" or a number names."""
    steps = Checkpoints(run_dir).steps()
    chosen = steps[-1:] if name == "latest" else [x for x in steps if str(x) == name]
    if not chosen:
        raise UserError(f"There is no step {name}: {run_dir} has the steps {steps}.")
    return chosen[0]
