"""Compile a benchmark's own step for a TPU that is not here, and print what XLA plans for it, as JSON.

    JAX_PLATFORMS=cpu python jax/_ahead.py '{"chip": "v5e", "devices": 1, "benchmark": "mnist", ...}'

libtpu has the compiler of every chip. The twins' classes are used as they are, but for where their arrays are put:
there are only shapes, on the devices of a described topology.
"""

import dataclasses
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any, cast

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # it would look for its metadata server, for minutes
sys.path.append(str(Path(__file__).resolve().parent.parent))

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import NamedSharding, SingleDeviceSharding

import devices
import network
import weights
from duel.catalogue import BENCHMARKS, USE_CASES
from duel.chips import CHIPS
from duel.measure import parameters
from duel.measure.device import Device, Setting, World
from duel.measure.growing import repeated
from duel.measure.preparing import fitting

SCRATCH = "memory space vmem"  # of one kernel: a smaller batch need not help
NO_ROOM = ("ran out of memory", "resource_exhausted", "exceeded hbm capacity", "exceeds available memory")


def shapes_of(self: Any, tree: Any, spec: Any = network.ALL) -> Any:
    """Return the shapes of ``tree`` where ``Network._put`` would put its arrays."""

    def shape(array: Any) -> jax.ShapeDtypeStruct:
        kind = array.dtype if np.issubdtype(array.dtype, np.integer) else self._dtype
        there = SingleDeviceSharding(self._device) if self._mesh is None else NamedSharding(self._mesh, spec)
        return jax.ShapeDtypeStruct(array.shape, kind, sharding=there)

    return jax.tree.map(shape, tree)


def planned(asked: dict[str, Any]) -> dict[str, Any]:
    """Compile what is ``asked``; return seconds, bytes and FLOP, or why it does not fit."""
    chip = CHIPS[asked["chip"]]
    described: Any = topologies.get_topology_desc(
        platform="tpu", topology_name=chip.topology, chip_config_name=chip.config
    )
    there = described.devices[: asked["devices"]]
    use_case, benchmark = USE_CASES[asked["use_case"]], BENCHMARKS[asked["benchmark"]]
    device = Device("tpu", there[0].device_kind, len(there), memory_bytes=chip.memory_bytes)
    world = World(0, len(there))
    # Where the twins look for the devices of this process, they find those of the topology.
    ours, twin = cast("tuple[Any, Any]", (devices, network.Network))
    ours.native = lambda wanted: there[0]
    ours._of_ranks = lambda: there
    twin._put = shapes_of
    per_sample = use_case.module == "per_sample_gradients"
    shapes = weights.shapes(network.build(benchmark, asked["size"], per_sample))
    arrays = {name: np.broadcast_to(np.float32(1), shape) for name, shape in shapes.items()}
    optimizer = benchmark.optimizer.at(asked["batch_size"])
    each = asked["batch_size"] // len(there)
    setting = Setting(
        dataclasses.replace(benchmark, optimizer=optimizer),
        *(asked["size"], asked["precision"], device, world),
        switches=asked["switches"],
        product=asked.get("product") or "",
        microbatch=fitting(each, _trainable(shapes), chip.memory_bytes) if per_sample else 0,
    )
    kind = getattr(importlib.import_module(use_case.module), use_case.work)
    work = kind(setting, repeated(benchmark, asked["size"], asked["batch_size"]), arrays)
    found: dict[str, Any] = {"versions": devices.versions(), "parameters": _trainable(shapes)}
    try:
        seconds = work.compile()
    except Exception as error:  # XLA has one class for all; others are raised again
        text = str(error)
        if SCRATCH in text.lower() or not any(words in text.lower() for words in NO_ROOM):
            raise
        return found | {"fits": False, "why": _in_one_line(text)}
    cost = work._program.cost_analysis() or {}
    cost = cost[0] if isinstance(cost, list) else cost
    if per_sample and setting.microbatch != each:  # a loop, whose body XLA counts once
        cost = {}
    return found | {
        "fits": True,
        "seconds": seconds,
        "planned_bytes": work.planned_bytes() + _waiting_bytes(work) // len(there),
        "flops": cost.get("flops"),
        "moved_bytes": cost.get("bytes accessed"),
    }


def _waiting_bytes(work: Any) -> int:
    """Return the bytes of the batches that wait on the devices for their turn: the program knows only its own."""
    return sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(work._batches[1:]))


def _trainable(shapes: dict[str, tuple[int, ...]]) -> int:
    return sum(int(np.prod(shape)) for shape in parameters.trainable(shapes).values())


def _in_one_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if "exceeded" in line.lower()), lines[0])[:300]


if __name__ == "__main__":
    print(json.dumps(planned(json.loads(sys.argv[1]))))
