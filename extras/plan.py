"""Estimate memory, time and communication of a training step on devices far away.

    python -m extras.plan --config small_c4 --topology v5e:2x4
    python -m extras.plan --config xxl_c4 --mesh.model 8 --devices 512

The step is compiled but not run. With --topology, the TPU compiler (pip install libtpu)
counts clock cycles, and says what communication overlaps with arithmetic. It knows
v4:2x2x1, v5p:4x4x4, v6e:2x4 and others, and takes minutes. With --devices, XLA splits the
step over N simulated devices.
"""

import math
import os
import re
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Iterator, NamedTuple

import jax

import configs
import model
import partition
import train


class Chip(NamedTuple):
    """Numbers of a data sheet."""

    teraflops: float  # of bfloat16 matmuls
    memory: float  # GB
    links: float  # GB/s that it sends to all its neighbors together
    clock: float = math.nan  # GHz


CHIPS = {
    "H200": Chip(989.5, 141, 450),
    "H100": Chip(989.5, 80, 450),
    "A100": Chip(312, 80, 300),
    "TPU v4": Chip(275, 32, 150, 1.05),
    "TPU v5 lite": Chip(197, 16, 100, 1.503),
    "TPU v5": Chip(459, 95, 300, 1.75),
    "TPU v6 lite": Chip(918, 32, 224, 1.75),
}

# ---- reading a compiled program --------------------------------------------------------
# XLA prints a program as HLO, with an instruction in each line:
#
#   %body (p: f32[4,8]) -> f32[4,8] {
#     %all-reduce.7 = f32[4,8]{1,0} all-reduce(%p), replica_groups={{0,1},{2,3}}
#   }
#   ENTRY %main (p: f32[4,8]) -> f32[4,8] {
#     %while.1 = f32[4,8]{1,0} while(%p), condition=%cond, body=%body
#   }


def instructions(text: str) -> Iterator[tuple[str, int]]:
    """Yield each instruction that a program runs, and how often it runs."""
    bodies = dict(re.findall(r"^(?:ENTRY )?%(\S+) \(.*?\{\n(.*?)^\}", text, re.M | re.S))

    def visit(name, times):
        for line in bodies[name].splitlines():
            loop = re.search(r" while\(.*condition=%([^,\s]+), body=%([^,\s]+)", line)
            call = re.search(r" call\(.*to_apply=%([^,\s]+)", line)
            if loop:
                turns = re.findall(r'known_trip_count":\{"n":"(\d+)"', line)
                turns = turns or re.findall(r"constant\((\d+)\)", bodies[loop[1]])
                yield from visit(loop[2], times * max(map(int, turns), default=1))
            elif call:
                yield from visit(call[1], times)
            else:
                yield line, times

    return visit([*bodies][-1], 1)  # The last function is the entry point.


def array_bytes(types: str) -> int:
    """Return the size of arrays: "(f32[2,3], pred[4])" has 24 + 4 bytes."""
    return sum(
        int(bits or 8) // 8 * math.prod(map(int, re.findall(r"\d+", shape)))
        for bits, shape in re.findall(r"\b[a-z]+(\d*)\w*\[([\d,]*)\]", types)
    )


def group_size(line: str, devices: int) -> int:
    """Return how many devices exchange data. XLA writes groups in one of three forms."""
    if listed := re.search(r"(?:replica_groups|source_target_pairs)=\{\{([\d,]+)", line):
        return len(listed[1].split(","))  # {{0,2},{1,3}}
    if table := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(table[1])  # [2,4]<=[8]: 2 groups of 4
    if mesh := re.search(r"replica_groups=mesh\[(.*?)\].*?\{(.*?)\}", line):
        axes = re.findall(r"('\w+')=(\d+)", mesh[1])  # mesh['a'=4,'b'=2] {'a'}
        return math.prod(int(size) for axis, size in axes if axis in mesh[2])
    return devices


# A TPU computes during a collective operation whose name ends with "-start". It fuses
# some of several kinds into one, and writes a reduce-scatter as a call.
COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?\("
    r"|calls=%all-(reduce-scatter)|%async-collective(-start)\S* ="
)


def communication(text: str, devices: int) -> dict[str, list]:
    """Return {kind: [number of operations, bytes that a device sends in a ring]}."""
    found = {}
    for line, times in instructions(text):
        operation = COLLECTIVE.search(line)
        size = group_size(line, devices)
        if not operation or size == 1:
            continue
        kind = operation[1] or operation[3] or "collectives"
        # Of an overlapped operation, the operand is counted, too: an upper bound.
        result = array_bytes(re.split(r"\(%| s32\[2\]", line)[0])
        share = (size - 1) / size
        factor = {
            "all-reduce": 2 * share,  # a reduce-scatter and an all-gather
            "reduce-scatter": size - 1,  # the operand is `size` times as large
            "collective-permute": 1,
        }.get(kind, share)
        if operation[2] or operation[4]:
            kind += ", overlapped"
        count, sent = found.get(kind, (0, 0))
        found[kind] = [count + times, sent + times * factor * result]
    return found


# The TPU compiler does not price Pallas kernels. In the machine code for v5e, the
# attention kernel needs 9.6 million cycles for 459 billion operations. The two cores of a
# v4 or v5p share its work (not equally, if the number of blocks is odd).
KERNEL_FLOPS_PER_CYCLE = 48_000  # of a core


def phase_of(line: str) -> str:
    """Return the phase of the training step to which an instruction belongs."""
    name = re.search(r'op_name="([^"]+)"', line)
    if not name:
        return "copies"  # that the compiler adds
    if "jvp" not in name[1]:
        return "optimizer"
    if "rematted" in name[1]:
        return "recomputation"
    return "backward" if "transpose(" in name[1] else "forward"


def estimated_cycles(text: str, cores: int = 1) -> Counter:
    """Return the TPU compiler's estimate of the clock cycles of each phase."""
    cycles = Counter()
    for line, times in instructions(text):
        if price := re.search(r'"estimated_cycles":"(\d+)"', line):
            cycles[phase_of(line)] += times * int(price[1])
        if kernel := re.search(r'"tpu_custom_call".*"flops":"(\d+)"', line):
            per_cycle = cores * KERNEL_FLOPS_PER_CYCLE
            cycles[phase_of(line)] += times * int(kernel[1]) // per_cycle
    return cycles


# ---- the command -----------------------------------------------------------------------


@dataclass(frozen=True)
class Options(configs.Options):
    # TPU chips, such as v5e:2x4.
    topology: str = ""
    # Number of devices of any kind, instead of a topology.
    devices: int = 8


def topology_devices(name: str) -> list:
    """Return the devices of a TPU topology, for which programs can be compiled."""
    from jax.experimental import topologies

    # Neither look for a TPU, nor take the lock of one.
    os.environ |= {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    more = {"chip_config_name": "megacore"} if name.startswith("v4") else {}
    return topologies.get_topology_desc(name, "tpu", **more).devices


def compile_step(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, str]:
    """Compile the step. Return the program and its HLO."""
    if partition.platform() == "tpu":
        program = lowered.compile()
        return program, program.as_text()
    # Take the HLO right after XLA split the program, because XLA for CPUs later replaces
    # bfloat16 by float32.
    with tempfile.TemporaryDirectory() as folder:
        options = {"xla_dump_to": folder, "xla_dump_hlo_pass_re": "spmd-partitioning"}
        program = lowered.compile(options | {"xla_backend_optimization_level": "0"})
        split = [*Path(folder).glob("*after_spmd-partitioning*.txt")]
        return program, split[0].read_text() if split else program.as_text()


def report(name: str, value: float, unit: str) -> None:
    print(f"{name:30}{value:10.4g} {unit}")


def main():
    options = configs.parse(Options)
    cfg = options.cfg
    if cfg.model.dtype == "auto":
        cfg = replace(cfg, model=replace(cfg.model, dtype="bfloat16"))
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)  # It would write no HLO.
    if options.topology:
        devices = topology_devices(options.topology)
    else:
        jax.config.update("jax_num_cpu_devices", options.devices)
        devices = jax.devices()
    mesh = partition.set_mesh(cfg, devices)
    abstract, lowered = train.lower_step(cfg, mesh)
    program, text = compile_step(lowered)
    memory = program.memory_analysis()

    state = sum(
        math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize
        for a in jax.tree.leaves(abstract)
    )
    report("weights and optimizer", state / 1e9, "GB in the memory of each device")
    if options.topology:
        kind = devices[0].device_kind
        peak = memory.peak_memory_in_bytes / 1e9
        report("peak of the memory", peak, f"of {CHIPS[kind].memory} GB on a {kind}")
        cycles = estimated_cycles(text, devices[0].num_cores)
        for phase, number in cycles.most_common():
            report(phase, number / 1e6, "million clock cycles")
        arithmetic = {kind: cycles.total() / CHIPS[kind].clock / 1e9}
    else:
        temporary = memory.temp_size_in_bytes / 1e9
        report("temporary arrays", temporary, "GB on a CPU, which computes in float32")
        flops = model.train_flops(cfg) * cfg.train.batch_size / mesh.size
        arithmetic = {kind: flops / chip.teraflops / 1e12 for kind, chip in CHIPS.items()}

    sent = exposed = 0
    for kind, (count, size) in sorted(communication(text, mesh.size).items()):
        report(kind, size / 1e9, f"GB sent by each device, in {count:,} operations")
        sent += size
        # Only the TPU compiler knows what does not overlap with arithmetic.
        exposed += size if options.topology and "overlapped" not in kind else 0
    for kind, seconds in arithmetic.items():
        links = CHIPS[kind].links * 1e9
        step = max(seconds + exposed / links, sent / links)
        report(f"step on {kind}", 1e3 * step, f"ms, {1e3 * seconds:.4g} of arithmetic")


if __name__ == "__main__":
    main()
