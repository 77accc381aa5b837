"""The devices PyTorch can compute on, how precisely they multiply, and what they used. As a script, it prints JSON."""

import dataclasses
import datetime
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parent.parent))

from duel.catalogue import FRAMEWORK_DEFAULT
from duel.measure import device as shared

# The same on a TPU, as in the twin. By default, XLA multiplies float32 in bfloat16.
XLA_PRECISION = {"fp32": "highest", "tf32": "high", "bf16": "default", "fp16": "default", "float64": "highest"}
# For the meeting, as in the twin, and here for each collective, too: one process may wait long for another's data. Dead
# processes are noticed anyway.
MEETING_SECONDS = 1800


def select(kind: str | None, world: shared.World = shared.ALONE) -> shared.Device:
    """Return the device to compute on, the best available for None. ValueError names what is available instead.

    Call it before anything else in PyTorch, as in the twin. It joins the processes of ``world``.
    """
    if kind == "tpu" and not shared.installed("torch_xla"):
        raise ValueError(
            "device kind 'tpu': PyTorch reaches a TPU through torch_xla, which this interpreter lacks; "
            f"valid: an interpreter with torch_xla, or here: {', '.join(device.kind for device in available())}"
        )
    # Listing an accelerator takes hold of it, and its memory would then be reported for work done on the CPU.
    device = shared.choose(kind, [shared.cpu()] if kind == "cpu" else available())
    if device.kind == "gpu":
        if world.size > 1:
            shown = {"CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"} & set(os.environ)  # each may see its own alone
            if world.local_rank >= device.count and not shown:
                raise ValueError(f"process {world.local_rank} of this node has no GPU: there are {device.count}")
            torch.cuda.set_device(world.local_rank % device.count)
        torch.cuda.synchronize()  # makes its context, as the twin's listing does: idle power is read with it
    if world.size > 1:
        torch.distributed.init_process_group(
            "nccl" if device.kind == "gpu" else "gloo",
            init_method=f"tcp://{world.address}",
            rank=world.rank,
            world_size=world.size,
            timeout=datetime.timedelta(seconds=MEETING_SECONDS),
        )
    return device


def slowest(seconds: float, device: shared.Device) -> float:
    """Return the largest of all processes' ``seconds``, as float32. All ranks."""
    shared_seconds = torch.tensor(seconds, device=native(device))
    torch.distributed.all_reduce(shared_seconds, torch.distributed.ReduceOp.MAX)
    return float(shared_seconds)


def leave() -> None:
    """Leave the world, once all of its processes are done."""
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def available() -> list[shared.Device]:
    """Return every kind of device there is, the best first."""
    found = []
    if shared.installed("torch_xla"):
        importlib.import_module("torch_xla")
        if xla := _xla():
            name = xla.core.xla_model.xla_device_kind()
            memory = _xla_memory().get("bytes_limit")
            found.append(shared.Device("tpu", name, xla.device_count(), memory_bytes=memory))
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability(0)
        found.append(shared.gpu(torch.cuda.get_device_name(0), torch.cuda.device_count(), f"{major}.{minor}"))
    if torch.backends.mps.is_available():
        host = shared.cpu()  # one chip, one memory
        found.append(shared.Device("mps", host.name, 1, memory_bytes=host.memory_bytes))
    return [*found, shared.cpu()]


def native(device: shared.Device) -> Any:
    """Return the framework's own object for this process's device of ``device.kind``."""
    if device.kind == "tpu":
        return _xla().device()
    return torch.device("cuda", torch.cuda.current_device()) if device.kind == "gpu" else torch.device(device.kind)


def set_precision(policy: str) -> None:
    """Set ``policy`` (of the catalogue, or float64 for proofs) for everything computed from now on."""
    if policy != FRAMEWORK_DEFAULT:
        # Not by the newer fp32_precision of each operation: the older settings, which stay as they are then, raise when
        # they are read and differ from it. Inductor reads them.
        torch.set_float32_matmul_precision("high" if policy == "tf32" else "highest")
        torch.backends.cudnn.allow_tf32 = policy == "tf32"
        if _xla():  # convolutions follow too
            importlib.import_module("torch_xla.backends").set_mat_mul_precision(XLA_PRECISION[policy])
    # torchvision's ViT would take a fused path in evaluation that no training step takes
    torch.backends.mha.set_fastpath_enabled(False)


def peak_memory_bytes() -> tuple[int, str]:
    """Return this process's peak bytes so far, and what they count: "allocator_peak" or "host_peak_rss"."""
    if peak := _xla_memory().get("peak_bytes_used"):
        return peak, "allocator_peak"
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated(), "allocator_peak"
    return shared.host_peak_memory()


def reserved_bytes() -> int | None:
    """Return the peak bytes that the allocator took from the device; None if unknown."""
    return torch.cuda.max_memory_reserved() if torch.cuda.is_initialized() else None


def versions() -> dict[str, str]:
    """Return the versions of the packages that decide what runs."""
    built = {"cuda": torch.version.cuda, "hip": torch.version.hip}
    built["cudnn"] = str(torch.backends.cudnn.version() or "")
    found = shared.installed("torch", "torchvision", "triton", "torch_xla", "libtpu")
    return found | {name: text for name, text in built.items() if text}


def _xla() -> Any:
    """Return torch_xla if this process reaches a TPU through it, else None. Only ``available`` loads it."""
    xla = sys.modules.get("torch_xla")
    return xla if xla is not None and xla.runtime.device_type() == "TPU" else None


def _xla_memory() -> dict[str, int]:
    """Return the TPU's bytes_used, bytes_limit and peak_bytes_used; empty without a TPU or without statistics."""
    try:
        return _xla().core.xla_model.get_memory_info() if _xla() else {}
    except RuntimeError:  # no statistics on this platform
        return {}


if __name__ == "__main__":
    print(json.dumps({"versions": versions(), "devices": [dataclasses.asdict(d) for d in available()]}))
