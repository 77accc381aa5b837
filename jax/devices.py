"""The devices JAX can compute on, how precisely they multiply, and what they used. Alone it prints JSON."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import jax

sys.path.append(str(Path(__file__).resolve().parent.parent))

from duel.measure import device as shared

# For each policy: jax_default_matmul_precision, which convolutions follow too. In bf16 and fp16 operands have 16 bits.
MATMUL_PRECISION = {
    "fp32": "highest",
    "tf32": "tensorfloat32",
    "bf16": "default",
    "fp16": "default",
    "float64": "highest",
}


def select(kind: str | None) -> shared.Device:
    """The device to compute on; None takes the best available. ValueError naming what is available instead.

    Call it before anything else of JAX: it may still keep JAX from taking hold of an accelerator that is not wanted.
    """
    if kind == "cpu":
        jax.config.update("jax_platforms", "cpu")
    return shared.choose(kind, available())


def available() -> list[shared.Device]:
    """Every kind of device there is, the best first."""
    found = []
    for kind in ("tpu", "gpu"):
        try:
            devices = jax.devices(kind)
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
    return jax.devices(device.kind)[0]


def set_precision(policy: str) -> None:
    """Make ``policy`` (of the catalogue, or float64 for proofs) hold for everything that is traced from now on."""
    jax.config.update("jax_default_matmul_precision", MATMUL_PRECISION[policy])
    jax.config.update("jax_enable_x64", policy == "float64")


def peak_memory_bytes() -> tuple[int, str]:
    """Peak memory of this process so far, and what it counts: "allocator_peak" or "host_peak_rss"."""
    statistics = jax.devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in statistics:
        return statistics["peak_bytes_in_use"], "allocator_peak"
    return shared.host_peak_memory()


def versions() -> dict[str, str]:
    """Versions of the packages that decide what runs."""
    cuda = [f"jax-cuda{major}-plugin" for major in (12, 13)] + [f"nvidia-cudnn-cu{major}" for major in (12, 13)]
    return shared.installed("jax", "jaxlib", "flax", "optax", *cuda, "libtpu")


if __name__ == "__main__":
    print(json.dumps({"versions": versions(), "devices": [dataclasses.asdict(d) for d in available()]}))
