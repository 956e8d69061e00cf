"""Options of the TPU compiler, with which communication costs less time."""

from jax.sharding import get_abstract_mesh


def compiler_options() -> dict:
    """Return the options for the TPUs of the current mesh.

    With them, a TPU computes while it gathers the weights of FSDP, and sums each gradient
    as soon as it is known. By default it waits for the communication.
    """
    kind = get_abstract_mesh().abstract_device.device_kind  # such as "TPU v5 lite"
    options = dict.fromkeys(
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
    if kind not in ("TPU v3", "TPU v4"):  # They have too little on-chip memory.
        options["xla_enable_async_all_reduce"] = True
        options["xla_tpu_enable_async_collective_fusion_fuse_all_reduce"] = True
        options["xla_jf_crs_combiner_threshold_in_bytes"] = 1_000_000
    if kind.startswith("TPU v5"):
        options["xla_tpu_scoped_vmem_limit_kib"] = 24 * 1024
    return options
