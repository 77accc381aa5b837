"""The devices JAX can compute on, how precisely they multiply, and what they used. Alone it prints JSON."""

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import jax

sys.path.append(str(Path(__file__).resolve().parent.parent))

from duel.measure import device as shared

# For each policy: jax_default_matmul_precision, which convolutions follow too. In bf16 and fp16 operands have 16 bits.
# None is what JAX comes with: on a GPU TF32 for both, on a TPU bfloat16.
MATMUL_PRECISION = {
    "framework_default": None,
    "fp32": "highest",
    "tf32": "tensorfloat32",
    "bf16": "default",
    "fp16": "default",
    "float64": "highest",
}
MEETING_SECONDS = 300  # a cold file system takes minutes to import a framework; a death is seen without this


def select(kind: str | None, world: shared.World = shared.ALONE) -> shared.Device:
    """The device to compute on; None takes the best available. ValueError naming what is available instead.

    Call it before anything else of JAX: it may still keep JAX from taking hold of an accelerator that is not wanted,
    and lets the processes of ``world`` find each other.
    """
    if kind == "cpu":
        jax.config.update("jax_platforms", "cpu")
    if world.size > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            *(world.address, world.size, world.rank),
            local_device_ids=None if kind == "cpu" else _local_device(world.local_rank),
            cluster_detection_method="deactivate",  # what the launcher says may be of the node, and not of the job
            initialization_timeout=MEETING_SECONDS,
        )
    return shared.choose(kind, available())


def _local_device(local_rank: int) -> int:
    """Which of the GPUs that this process sees is its own: launchers show it all of the node's, or that one alone."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return local_rank % len(visible.split(",")) if visible else local_rank


def leave() -> None:
    """Part from the other processes of a world, once all of them are done."""
    jax.distributed.shutdown()


def available() -> list[shared.Device]:
    """Every kind of device there is, the best first."""
    found = []
    for kind in ("tpu", "gpu"):
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
    """The framework's own object for the first device of ``device.kind``."""
    return jax.local_devices(backend=device.kind)[0]


def set_precision(policy: str) -> None:
    """Make ``policy`` (of the catalogue, or float64 for proofs) hold for everything that is traced from now on."""
    jax.config.update("jax_default_matmul_precision", MATMUL_PRECISION[policy])
    jax.config.update("jax_enable_x64", policy == "float64")


def peak_memory_bytes() -> tuple[int, str]:
    """Peak memory of this process so far, and what it counts: "allocator_peak" or "host_peak_rss"."""
    statistics = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in statistics:
        return statistics["peak_bytes_in_use"], "allocator_peak"
    return shared.host_peak_memory()


def reserved_bytes() -> int | None:
    """Peak of what the allocator has taken from the device; None where it does not say."""
    statistics = jax.local_devices()[0].memory_stats() or {}
    return statistics.get("peak_pool_bytes") or statistics.get("peak_bytes_reserved")


def versions() -> dict[str, str]:
    """Versions of the packages that decide what runs."""
    cuda = [f"jax-cuda{major}-plugin" for major in (12, 13)] + [f"nvidia-cudnn-cu{major}" for major in (12, 13)]
    return shared.installed("jax", "jaxlib", "flax", "optax", *cuda, "libtpu")


if __name__ == "__main__":
    print(json.dumps({"versions": versions(), "devices": [dataclasses.asdict(d) for d in available()]}))
