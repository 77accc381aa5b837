"""The devices JAX can compute on, how precisely they multiply, and what they used. As a script, it prints JSON."""

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

sys.path.append(str(Path(__file__).resolve().parent.parent))

from duel.measure import device as shared

# For each policy: jax_default_matmul_precision, which convolutions follow, too. Under bf16 and fp16, operands have 16
# bits. None is JAX's default: TF32 for both on a GPU, bfloat16 on a TPU.
MATMUL_PRECISION = {
    "framework_default": None,
    "fp32": "highest",
    "tf32": "tensorfloat32",
    "bf16": "default",
    "fp16": "default",
    "float64": "highest",
}
MEETING_SECONDS = 300  # importing a framework from a cold file system takes minutes; dead processes are noticed anyway


def select(kind: str | None, world: shared.World = shared.ALONE) -> shared.Device:
    """Return the device to compute on, the best available for None. ValueError names what is available instead.

    Call it before anything else in JAX: it can still keep JAX from taking hold of an unwanted accelerator, and it
    joins the processes of ``world``.
    """
    if kind == "cpu":
        jax.config.update("jax_platforms", "cpu")
    if world.size > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.config.update("jax_enable_preemption_service", False)  # it would catch SIGTERM, and go on
        jax.distributed.initialize(
            *(world.address, world.size, world.rank),
            local_device_ids=None if kind == "cpu" else _local_device(world.local_rank),
            cluster_detection_method="deactivate",  # what the launcher reports may describe the node, not the job
            initialization_timeout=MEETING_SECONDS,
        )
    try:  # before single backends are asked for, which say no more than that there is none
        jax.local_devices()
    except RuntimeError as error:
        raise ValueError(f"JAX cannot use its accelerator: {error}") from error
    return shared.choose(kind, available())


def _local_device(local_rank: int) -> int:
    """Return the index of this process's GPU among those it sees: launchers show all of the node's or only that one."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return local_rank % len(visible.split(",")) if visible else local_rank


def slowest(seconds: float, device: shared.Device) -> float:
    """Return the largest of all processes' ``seconds``, as float32. All ranks."""
    return float(np.max(multihost_utils.process_allgather(np.float32(seconds))))


def leave() -> None:
    """Leave the world, once all of its processes are done."""
    jax.distributed.shutdown()


def available() -> list[shared.Device]:
    """Return every kind of device there is, the best first."""
    found = []
    for kind in ("tpu", "gpu", "mps"):
        try:
            devices = jax.local_devices(backend=kind)
        except RuntimeError:  # no such platform
            continue
        name, count = devices[0].device_kind, len(devices)
        if kind == "gpu":
            found.append(shared.gpu(name, count, getattr(devices[0], "compute_capability", None)))
        else:
            memory = (devices[0].memory_stats() or {}).get("bytes_limit")
            found.append(shared.Device(kind, name, count, memory_bytes=memory))
    return [*found, shared.cpu()]


def native(device: shared.Device) -> Any:
    """Return the framework's own object for this process's device of ``device.kind``."""
    return jax.local_devices(backend=device.kind)[0]


def _of_ranks() -> list[Any]:
    """Return the device of each process, in their order.

    ``jax.make_mesh`` would refuse those of several nodes, whose GPUs XLA counts as one slice each.
    """
    return sorted(jax.devices(), key=lambda device: device.process_index)


def set_precision(policy: str) -> None:
    """Set ``policy`` (of the catalogue, or float64 for proofs) for everything traced from now on."""
    jax.config.update("jax_default_matmul_precision", MATMUL_PRECISION[policy])
    jax.config.update("jax_enable_x64", policy == "float64")


def peak_memory_bytes() -> tuple[int, str]:
    """Return this process's peak bytes so far, and what they count: "allocator_peak" or "host_peak_rss"."""
    statistics = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in statistics:
        return statistics["peak_bytes_in_use"], "allocator_peak"
    return shared.host_peak_memory()


def reserved_bytes() -> int | None:
    """Return the peak bytes that the allocator took from the device; None if unknown."""
    statistics = jax.local_devices()[0].memory_stats() or {}
    return statistics.get("peak_pool_bytes") or statistics.get("peak_bytes_reserved")


def versions() -> dict[str, str]:
    """Return the versions of the packages that decide what runs."""
    plugins = [f"jax-{name}-plugin" for name in ("cuda12", "cuda13", "rocm7", "rocm60")]
    cudnn = [f"nvidia-cudnn-cu{major}" for major in (12, 13)]
    return shared.installed("jax", "jaxlib", "flax", "optax", *plugins, *cudnn, "libtpu")


if __name__ == "__main__":
    print(json.dumps({"versions": versions(), "devices": [dataclasses.asdict(d) for d in available()]}))
