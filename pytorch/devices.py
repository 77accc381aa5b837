"""The devices PyTorch can compute on, how precisely they multiply, and what they used. Alone it prints JSON."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parent.parent))

from duel.measure import device as shared

# For each policy: fp32_precision of matmul and of convolution. In bf16 every operand is bfloat16.
FP32_PRECISION = {"fp32": "ieee", "tf32": "tf32", "bf16": "ieee", "float64": "ieee"}


def select(kind: str | None) -> shared.Device:
    """The device to compute on; None takes the best available. ValueError naming what is available instead.

    Call it before anything else of PyTorch, as in the twin.
    """
    if kind == "tpu":
        raise ValueError("device kind 'tpu': PyTorch reaches a TPU through torch_xla alone, which Duel does not drive")
    return shared.choose(kind, available())


def available() -> list[shared.Device]:
    """Every kind of device there is, the best first."""
    found = []
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability(0)
        found.append(shared.gpu(torch.cuda.get_device_name(0), torch.cuda.device_count(), f"{major}.{minor}"))
    if torch.backends.mps.is_available():
        host = shared.cpu()  # one chip, one memory
        found.append(shared.Device("mps", host.name, 1, memory_bytes=host.memory_bytes))
    return [*found, shared.cpu()]


def native(device: shared.Device) -> Any:
    """The framework's own object for the first device of ``device.kind``."""
    return torch.device("cuda", 0) if device.kind == "gpu" else torch.device(device.kind)


def set_precision(policy: str) -> None:
    """Make ``policy`` (fp32, tf32, bf16, or float64 for proofs) hold for everything that is computed from now on."""
    # Only the new interface: once it is used, reading the old allow_tf32 raises.
    torch.backends.cuda.matmul.fp32_precision = FP32_PRECISION[policy]
    torch.backends.cudnn.conv.fp32_precision = FP32_PRECISION[policy]
    # torchvision's ViT would take a fused path in evaluation that no training step takes
    torch.backends.mha.set_fastpath_enabled(False)


def peak_memory_bytes() -> tuple[int, str]:
    """Peak memory of this process so far, and what it counts: "allocator_peak" or "host_peak_rss"."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated(), "allocator_peak"
    return shared.host_peak_memory()


def versions() -> dict[str, str]:
    """Versions of the packages that decide what runs."""
    built = {"cuda": torch.version.cuda, "cudnn": str(torch.backends.cudnn.version() or "")}
    return shared.installed("torch", "torchvision", "triton") | {name: text for name, text in built.items() if text}


if __name__ == "__main__":
    print(json.dumps({"versions": versions(), "devices": [dataclasses.asdict(d) for d in available()]}))
