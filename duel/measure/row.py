"""The measuring process: one fresh process, one framework, one row.

It knows the framework only by the modules beside ``run.py`` (devices, weights, network, training, inference), which are
the same in both.
"""

import ctypes
import dataclasses
import importlib
import json
import math
import re
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from duel import certificate
from duel.catalogue import BENCHMARKS, INFERENCE, PER_SAMPLE, PRECISIONS, PRESETS, TRAIN, USE_CASES, VALIDATE, WEAK
from duel.errors import UserError
from duel.measure import batches, parameters, parity, probes, timing
from duel.measure.device import ALONE, World
from duel.measure.sinks import MetricsWriter
from duel.options import SAFETENSORS
from duel.record import FAILED, FINISHED, SKIPPED, Row
from duel.results import Run, utc, write_atomically


def _die_with_parent() -> None:
    """A killed supervisor must not leave a process behind that goes on using the device (Linux only)."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


Emit = Callable[..., None]
# Kinds of devices that several processes share out among them. A TPU host's chips belong to one process unless its
# environment cuts them up, which nobody here could try; MPS has one device.
TOGETHER = ("cpu", "gpu")


def measure(run: Run, number: int, data: Path, device_kind: str | None, version: str, world: World = ALONE) -> int:
    """Measure row ``number`` as one of ``world``; rank 0 writes its file at its true end."""
    _die_with_parent()
    row = run.read_row(number).replace(framework_version=version, python_version=sys.version.split()[0])
    emit: Emit = MetricsWriter(run.metrics) if world.rank == 0 else lambda event, **fields: None
    try:
        row = _measured(run, row, data, device_kind, emit, world)
        if world.size > 1:
            importlib.import_module("devices").leave()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        row = run.read_row(number).replace(status=FAILED, cause=f"input: {_headline(error)}")
    except Exception as error:  # whatever the framework raises is a row, and its traceback is in the log
        traceback.print_exc()
        row = run.read_row(number).replace(status=FAILED, cause=describe(error))
    if world.rank == 0:
        run.write_row(row.replace(ended=utc()))
    elif row.cause:
        print(row.cause, flush=True)  # the last line, which rank 0 quotes
    return 0 if row.status in (FINISHED, SKIPPED) else 1


def _headline(error: Exception) -> str:
    """Its text in one line; a long list is in the log."""
    first, *others = [line.strip() for line in str(error).splitlines()]
    more = f"; and {len(others) - 1} more, all in log.txt" if len(others) > 1 else ""
    return " ".join([first, *others[:1]]) + more


def describe(error: Exception) -> str:
    """One line of it, headed 'out of memory' where it is that."""
    text = f"{type(error).__name__}: {str(error).strip() or 'no message'}".splitlines()[0]
    text = re.sub(r"([^:]{3,80}: )\1+", r"\1", text)[:300]  # XLA heads an error once for each thunk that passes it on
    exhausted = ("out of memory", "resource_exhausted", "can't allocate memory", "cannot allocate memory")
    return f"out of memory: {text}" if any(words in str(error).lower() for words in exhausted) else text


def _initial_weights(row: Row, shapes: dict[str, tuple[int, ...]]) -> parameters.Arrays:
    """Those of the file that ``row`` names; without one, made from its seed."""
    source = row.weights or ""
    if not source.endswith(SAFETENSORS):
        return parameters.initialise(shapes, row.seed or 0)
    try:
        arrays = parameters.read(Path(source))
        parameters.check(shapes, arrays)
    except (ValueError, OSError) as error:
        raise UserError(f"--weights {source}: {error}") from error
    return arrays


def fitting(batch_size: int, parameters: int, memory_bytes: int | None) -> int:
    """The microbatch: the largest divisor of ``batch_size`` whose float32 gradients fill an eighth of the memory.

    Of what the device and the model are, and not of what a framework happens to need: so both sides take the same one.
    """
    most = (memory_bytes or 2**33) // 8 // (4 * parameters)
    return max(n for n in range(1, batch_size + 1) if batch_size % n == 0 and n <= max(most, 1))


def _measured(run: Run, row: Row, data: Path, device_kind: str | None, emit: Emit, world: World) -> Row:
    benchmark, preset = BENCHMARKS[str(row.benchmark)], PRESETS[str(row.preset)]
    number, seed, use_case = row.row or 0, row.seed or 0, USE_CASES[row.use_case or 0]
    trains, latency = use_case.module == "training", use_case.number == INFERENCE

    def phase(name: str) -> None:
        """Say what comes next, and keep what is known so far: a kill must not take it along."""
        if world.rank:
            return
        print(name, flush=True)
        emit("phase", row=number, phase=name)
        run.write_row(row)

    phase("finding the device")
    devices = importlib.import_module("devices")
    try:
        device = devices.select(device_kind, world)
    except ValueError as error:
        raise UserError(str(error)) from error
    proof, per_sample = use_case.number == VALIDATE, use_case.module == "per_sample_gradients"
    # What was not said beforehand is known here: how much fits.
    batch_size = row.batch_size or benchmark.sizes[str(row.size)].batch_size["cpu" if proof else device.kind]
    if row.scaling == WEAK:
        batch_size *= world.size
    if batch_size % world.size:
        raise UserError(f"batch size {batch_size} does not divide among {world.size} devices")
    row = row.replace(
        device_kind=device.kind,
        device_name=device.name,
        device_count=world.size,
        driver=device.driver,
        batch_size=batch_size,
        missing={} if device.driver else {"driver": f"a {device.kind} device has none to ask"},
    )
    precision = PRECISIONS[str(row.precision)]
    if device.kind not in precision.device_kinds:
        kinds = ", ".join(precision.device_kinds)
        said = f"{precision.name} exists on {kinds} only; this is a {device.kind}"
        return row.with_cell().replace(status=SKIPPED, cause=said)
    if world.size > 1 and device.kind not in TOGETHER:
        said = f"processes of one device each, together, exist for {' and '.join(TOGETHER)}; this is a {device.kind}"
        return row.with_cell().replace(status=SKIPPED, cause=said)

    network, weights = importlib.import_module("network"), importlib.import_module("weights")
    row = row.replace(code_sha256=certificate.code_sha256(benchmark.name, str(row.size)))
    shapes = weights.shapes(network.build(benchmark, str(row.size), per_sample))
    trainable = sum(math.prod(shape) for name, shape in shapes.items() if ".running_" not in name)
    row = row.replace(parameters=trainable)
    options: dict[str, Any] = {}
    if per_sample:
        samples = batch_size // world.size
        microbatch = row.microbatch or fitting(samples, trainable, device.memory_bytes)
        if samples % microbatch:
            raise UserError(f"microbatch {microbatch} does not divide the batch size on a device, {samples}")
        row = row.replace(microbatch=microbatch)
        options = {"product": row.product, "microbatch": microbatch, "mode": row.mode}
    row = row.with_cell()
    if proof:
        given = _initial_weights(row, shapes) if str(row.weights).endswith(SAFETENSORS) else None
        proved = (USE_CASES[TRAIN], USE_CASES[PER_SAMPLE])
        training, per_sample_gradients = (getattr(importlib.import_module(u.module), u.work) for u in proved)
        found: dict[str, Any] = parity.prove(
            *(benchmark, str(row.size), device, seed), training, per_sample_gradients, shapes, given, phase
        )
        found["versions"] = np.array(json.dumps(devices.versions()))
        np.savez(run.parity, **found)
        return row.replace(status=FINISHED)
    phase("making weights and data")
    arrays = _initial_weights(row, shapes)
    try:
        pool = batches.pool(benchmark, str(row.size), batch_size, seed, data)
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error
    work = getattr(importlib.import_module(use_case.module), use_case.work)(
        benchmark, str(row.size), pool, arrays, precision.name, device, world, **options
    )
    row = row.replace(
        execution=work.execution,
        dataset=pool.dataset,
        weights_sha256=parameters.sha256(arrays),
        data_sha256=pool.sha256,
    )
    if number == 0 and world.rank == 0:
        record = probes.environment() | {"device": dataclasses.asdict(device), "framework": devices.versions()}
        record["modules"] = sorted({name.partition(".")[0] for name in sys.modules})
        write_atomically(run.environment, json.dumps(record, indent=1) + "\n")

    phase("compiling")
    compile_seconds = work.compile()
    why = {"eager": "nothing to compile"} | dict.fromkeys(("lazy", "compiled"), "compiled within the first steps")
    missing = {} if compile_seconds is not None else {"compile_seconds": f"{work.execution}: {why[work.execution]}"}
    row = row.replace(compile_seconds=compile_seconds, missing=missing)

    if not trains:
        phase("first call")
        first_step_seconds, since = timing.first_step(work)
        row, steps = row.replace(first_step_seconds=first_step_seconds), 1
    else:
        phase(f"training the {benchmark.curve_steps} opening steps")
        first_step_seconds, since, losses = timing.opening_steps(
            work, benchmark.curve_steps, lambda step, loss: emit("loss", row=number, step=step, loss=loss)
        )
        accuracy = work.accuracy(pool.held_out) if pool.held_out is not None else None
        row, steps = row.replace(first_step_seconds=first_step_seconds, accuracy=accuracy), len(losses)
        row = row.replace(loss_first=losses[0], loss_last=losses[-1], loss_steps=steps)
    phase("warming up")
    next_step, steps_per_block = timing.warm_up(work, preset, steps, since)
    if latency:
        phase("measuring latency")
        calls = timing.time_calls(work, preset, next_step)
        row, next_step = row.replace(**timing.latency(calls)), next_step + len(calls)

    phase("measuring")
    blocks = []
    for block, handle in timing.time_blocks(work, preset, next_step, steps_per_block):
        blocks.append(block)
        step_seconds = block.seconds / block.steps
        values = {
            "steps": block.steps,
            "step_seconds": step_seconds,
            "throughput": batch_size / step_seconds,
            "unit": benchmark.unit,
        }
        if trains:
            values["loss"] = work.loss(handle)
        del handle
        progress = {"done": len(blocks) * block.steps, "needed": preset.iterations}
        emit("block", row=number, step=block.first_step + block.steps, **progress, **values)
    peak, kind = devices.peak_memory_bytes()
    figures = timing.summary(blocks, batch_size)
    row = row.replace(peak_memory_bytes=peak, peak_memory_kind=kind, **figures)
    row = row.replace(throughput_per_gb=figures["throughput"] / (peak / 1e9))
    if world.size > 1:
        reduces = row.product in (None, "clipped_sum")
        if reduces:
            phase("measuring the all-reduce alone")
        row = row.replace(
            collective_seconds=timing.time_collective(work) if reduces else None,
            missing={"collective_seconds": "this product stays where it is made"},
        )
    # Said now, and for good: a certificate that is made anew later is for other code.
    return row.replace(status=FINISHED, parity=certificate.verdict(row, run.folder.parent.parent))
