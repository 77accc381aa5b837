"""The measuring process: one fresh process, one framework, one row.

It knows the framework only by the modules beside ``run.py`` (devices, weights, network, training, inference, canary,
ceilings), which are the same in both.
"""

import ctypes
import dataclasses
import importlib
import itertools
import json
import math
import re
import signal
import statistics
import sys
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from duel import certificate, comparability, modes
from duel.catalogue import (
    BENCHMARKS,
    INFERENCE,
    PER_SAMPLE,
    PRECISIONS,
    PRESETS,
    TRAIN,
    USE_CASES,
    VALIDATE,
    WEAK,
    Preset,
    UseCase,
)
from duel.errors import UserError
from duel.job import PASSES
from duel.measure import batches, canary, ceilings, parameters, parity, probes, timing
from duel.measure.device import ALONE, Device, Setting, World
from duel.measure.sinks import MetricsWriter
from duel.measure.watch import Conditions, Watch, left_out
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
AMPERE = 8.0  # the first compute capability with TF32 and bfloat16
PASS_BLOCKS, PASS_SECONDS = 10, 5.0  # of a part of the step; where it is slow, as many as fit
REPEATED = 10  # steps that must give the same bits again, where they are asked to be deterministic


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


Phase = Callable[[str], None]


def _measured(run: Run, row: Row, data: Path, device_kind: str | None, emit: Emit, world: World) -> Row:
    benchmark, preset = BENCHMARKS[str(row.benchmark)], PRESETS[str(row.preset)]
    number, seed, use_case = row.row or 0, row.seed or 0, USE_CASES[row.use_case or 0]
    size = str(row.size)

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
        device: Device = devices.select(device_kind, world)
    except ValueError as error:
        raise UserError(str(error)) from error
    proof, per_sample = use_case.number == VALIDATE, use_case.module == "per_sample_gradients"
    # What was not said beforehand is known here: how much fits.
    batch_size = row.batch_size or benchmark.sizes[size].batch_size["cpu" if proof else device.kind]
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
        cpus=len(probes.usable_cpus()),
        packages_sha256=probes.packages_sha256(),
        missing={} if device.driver else {"driver": _driverless(device)},
    )
    precision = PRECISIONS[str(row.precision)]
    if why := _lacks(device, precision.name):
        return row.with_cell().replace(status=SKIPPED, cause=why)
    if world.size > 1 and device.kind not in TOGETHER:
        said = f"processes of one device each, together, exist for {' and '.join(TOGETHER)}; this is a {device.kind}"
        return row.with_cell().replace(status=SKIPPED, cause=said)
    watch = Watch(device, world)
    row = row.replace(device_id=watch.device_id, missing={"device_id": watch.missing.get("device_id", "not told")})
    if watch.warning and not world.rank:
        print(f"warning: {watch.warning}: blocks with them there are left out", flush=True)

    network, weights = importlib.import_module("network"), importlib.import_module("weights")
    row = row.replace(code_sha256=certificate.code_sha256(benchmark.name, size))
    shapes = weights.shapes(network.build(benchmark, size, per_sample))
    trainable = sum(map(math.prod, parameters.trainable(shapes).values()))
    row = row.replace(parameters=trainable)
    options: dict[str, Any] = {}
    if per_sample:
        samples = batch_size // world.size
        microbatch = row.microbatch or fitting(samples, trainable, device.memory_bytes)
        if samples % microbatch:
            raise UserError(f"microbatch {microbatch} does not divide the batch size on a device, {samples}")
        row = row.replace(microbatch=microbatch)
        options = {"product": row.product, "microbatch": microbatch}
    row = row.with_cell()
    if proof:
        given = _initial_weights(row, shapes) if str(row.weights).endswith(SAFETENSORS) else None
        proved = (USE_CASES[TRAIN], USE_CASES[PER_SAMPLE])
        training, per_sample_gradients = (getattr(importlib.import_module(u.module), u.work) for u in proved)
        found: dict[str, Any] = parity.prove(
            *(benchmark, size, device, seed), training, per_sample_gradients, shapes, given, phase
        )
        found["versions"] = np.array(json.dumps(devices.versions()))
        np.savez(run.parity, **found)
        return row.replace(status=FINISHED)
    asked = (str(row.mode), str(row.framework), benchmark.name, use_case.number, precision.name, device.kind)
    switches = modes.settings(*asked, row.rung or 0)
    row = row.replace(switches=modes.said(switches))
    policy = modes.rung_precision(row.rung or 0, precision.name)
    row = row.replace(precision=policy)
    setting = Setting(benchmark, size, policy, device, world, switches, **options)

    phase("making weights and data")
    arrays = _initial_weights(row, shapes)
    try:
        pool = batches.pool(benchmark, size, batch_size, seed, data)
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error
    work = getattr(importlib.import_module(use_case.module), use_case.work)(setting, pool, arrays)
    row = row.replace(execution=work.execution, dataset=pool.dataset, **_held(work, pool, arrays, world))
    errors = canary.errors(importlib.import_module("canary").products(work))
    row = row.replace(canary=canary.said(errors))
    if wrong := canary.contradiction(errors, policy):
        if world.rank == 0:
            run.write_row(row)  # with its canary
        raise UserError(f"precision {policy} is not in force: {wrong}")
    if number == 0 and world.rank == 0:
        record = probes.environment() | {"device": dataclasses.asdict(device), "framework": devices.versions()}
        record["modules"] = sorted({name.partition(".")[0] for name in sys.modules})
        write_atomically(run.environment, json.dumps(record, indent=1) + "\n")

    phase("compiling")
    compile_seconds = work.compile()
    later = "nothing to compile" if work.execution == "eager" else "compiled within the first steps"
    missing = {} if compile_seconds is not None else {"compile_seconds": f"{work.execution}: {later}"}
    row = row.replace(compile_seconds=compile_seconds, missing=missing)

    trains = use_case.module == "training"
    if not trains:
        phase("first call")
        first_step_seconds, since = timing.first_step(work)
        steps = 1
    else:
        phase(f"training the {benchmark.curve_steps} opening steps")
        first_step_seconds, since, losses = timing.opening_steps(
            work, benchmark.curve_steps, lambda step, loss: emit("loss", row=number, step=step, loss=loss)
        )
        accuracy = work.accuracy(pool.held_out) if pool.held_out is not None else None
        steps = len(losses)
        row = row.replace(accuracy=accuracy, loss_first=losses[0], loss_last=losses[-1], loss_steps=steps)
    row = row.replace(first_step_seconds=first_step_seconds, **_compile_times(work))
    if work.execution != "eager":
        row = row.replace(cold_start_seconds=(compile_seconds or 0.0) + first_step_seconds)
    proofs = {}
    if setting.on("deterministic"):
        phase("repeating the first steps")
        bits = [_bits(work, arrays, trains) for _ in range(2)]
        same = "the same" if bits[0] == bits[1] else "other"
        proofs["deterministic"] = ("on" if bits[0] == bits[1] else "off", f"a repeat gave {same} bits")

    row, blocks = _timed(row, work, watch, preset, use_case, (steps, since), emit, phase)
    row = _with_memory(row, work, devices)
    if world.size > 1:
        reduces = row.product in (None, "clipped_sum")
        if reduces:
            phase("measuring the all-reduce alone")
        row = row.replace(
            collective_seconds=timing.time_collective(work) if reduces else None,
            missing={"collective_seconds": "this product stays where it is made"},
        )
    proofs |= {"threads": (_threads(switches), f"affinity, {len(probes.usable_cpus())} CPUs")} | work.observed()
    row = row.replace(proofs=json.dumps(modes.in_force(switches, proofs)))
    if trains and preset.thorough and world.size == 1:
        phase("measuring forward and backward pass")
        row = _passes(row, work, watch, preset, blocks[-1].steps, emit)
    elif trains:
        row = row.replace(missing=dict.fromkeys(PASSES, _unmeasured(world, preset)))
    if preset.thorough:
        phase("measuring ceilings and a warm start")
    row = _utilised(row, setting, watch, use_case, preset)
    row = _started_again(row, work, world, preset, blocks[-1].first_step + blocks[-1].steps)
    # Said now, and for good: a certificate that is made anew later is for other code.
    return row.replace(status=FINISHED, parity=certificate.verdict(row, run.folder.parent.parent))


def _lacks(device: Device, policy: str) -> str:
    """Why there is no such precision on ``device``; empty where there is."""
    kinds = PRECISIONS[policy].device_kinds
    if device.kind not in kinds:
        return f"{policy} exists on {', '.join(kinds)} only; this is a {device.kind}"
    capability = float(device.compute_capability or AMPERE)
    if capability < AMPERE and policy in ("tf32", "bf16"):
        return f"{policy} exists from compute capability {AMPERE} on; this is a {device.name} ({capability})"
    return ""


def _driverless(device: Device) -> str:
    return "NVML does not say" if device.kind == "gpu" else f"a {device.kind} device has none to ask"


def _held(work: Any, pool: batches.Pool, arrays: parameters.Arrays, world: World) -> dict[str, str]:
    """Hashes of weights and samples: where one process holds all of them, of what it really holds."""
    if world.size > 1:
        return {"weights_sha256": parameters.sha256(arrays), "data_sha256": pool.sha256}
    held = itertools.chain(work.held(), [pool.held_out] if pool.held_out is not None else [])
    return {"weights_sha256": parameters.sha256(work.export()), "data_sha256": batches.sha256(held)}


def _compile_times(work: Any) -> dict[str, Any]:
    known: dict[str, Any] = dict.fromkeys(("trace_seconds", "lower_seconds", "backend_seconds"))
    known |= work.compile_times()
    why = "nothing to compile" if work.execution == "eager" else f"{work.execution}: not told apart"
    return known | {"missing": {name: why for name, seconds in known.items() if seconds is None}}


def _bits(work: Any, arrays: parameters.Arrays, trains: bool) -> str:
    """Hash of what ``REPEATED`` steps from the initial weights give."""
    if not trains:
        return parameters.sha256(work.named(work.step(0)))
    work.load(arrays)
    losses = np.array([work.loss(work.step(index)) for index in range(REPEATED)])
    return parameters.sha256(work.export() | {"losses": losses})


def _timed(
    row: Row,
    work: Any,
    watch: Watch,
    preset: Preset,
    use_case: UseCase,
    opened: tuple[int, float],
    emit: Emit,
    phase: Phase,
) -> tuple[Row, list[timing.Block]]:
    """The row with what was timed, and its blocks. ``opened``: steps taken before, and when the first of them ended."""
    number, batch_size = row.row or 0, row.batch_size or 0
    phase("warming up")
    next_step, steps_per_block = timing.warm_up(work, preset, *opened)
    next_step, steady, settling = timing.settle(work, preset, next_step, steps_per_block)
    emit("settling", row=number, steps_per_block=steps_per_block, seconds=settling)
    untested = {} if settling else {"steady": f"preset {preset.name} does not test it"}
    row = row.replace(steady=steady if settling else None, warmup_steps=next_step, missing=untested)
    if settling and not steady:
        print(f"warning: no steady state within {preset.settling_seconds:.0f} s of blocks", flush=True)
    if use_case.number == INFERENCE:
        phase("measuring latency")
        calls = timing.time_calls(work, preset, next_step)
        emit("calls", row=number, seconds=calls)
        row, next_step = row.replace(**timing.latency(calls)), next_step + len(calls)

    phase("measuring")
    blocks: list[timing.Block] = []
    conditions: list[Conditions] = []
    watch.begin()
    for block, handle in timing.time_blocks(work, preset, next_step, steps_per_block):
        blocks.append(block)
        conditions.append(watch.block())
        step_seconds = block.seconds / block.steps
        values: dict[str, Any] = {
            "steps": block.steps,
            "step_seconds": step_seconds,
            "throughput": batch_size / step_seconds,
            "unit": row.throughput_unit,
        }
        if use_case.module == "training":
            values["loss"] = work.loss(handle)
        del handle
        progress = {"done": len(blocks) * block.steps, "needed": preset.iterations}
        values |= {name: value for name, value in dataclasses.asdict(conditions[-1]).items() if value}
        emit("block", row=number, step=block.first_step + block.steps, **progress, **values)
    items = batch_size * sum(block.steps for block in blocks)
    row = row.replace(**watch.columns(conditions, items))
    without, why = left_out(conditions)
    kept = [block for place, block in enumerate(blocks) if place not in without]
    if why:
        print(f"warning: {len(without)} of {len(blocks)} blocks are left out: {why}", flush=True)
    figures = timing.summary(kept if len(kept) >= 2 else blocks, batch_size)
    figures["iterations"] = sum(block.steps for block in blocks)
    untold = f"; not told: {watch.untold}" if watch.untold else ""
    told = {"left_out": why + untold if why else None, "missing": {"left_out": f"none is{untold}"}}
    return row.replace(left_out_blocks=len(without), **told, **figures), blocks


def _with_memory(row: Row, work: Any, devices: Any) -> Row:
    """``row`` with each kind of memory in a column of its own, and what its throughput is worth beside the peak."""
    peak, kind = devices.peak_memory_bytes()
    return row.replace(
        peak_memory_bytes=peak,
        peak_memory_kind=kind,
        planned_bytes=work.planned_bytes(),
        reserved_bytes=devices.reserved_bytes(),
        throughput_per_gb=(row.throughput or 0.0) / ((row.device_count or 1) * peak / 1e9),
        missing={
            "planned_bytes": f"{work.execution}: no plan is made",
            "reserved_bytes": f"the allocator of a {row.device_kind} device has no pool, or does not say",
        },
    )


def _started_again(row: Row, work: Any, world: World, preset: Preset, next_step: int) -> Row:
    """``row`` with the time of another start, by what the caches have kept. What was compiled is dropped."""
    if work.execution == "eager" or world.size > 1 or not preset.thorough:
        why = "nothing to compile" if work.execution == "eager" else _unmeasured(world, preset)
        return row.replace(missing={"warm_start_seconds": why, "cold_start_seconds": why})
    work.forget()
    return row.replace(warm_start_seconds=(work.compile() or 0.0) + timing.time_block(work, next_step, 1)[0])


def _passes(row: Row, work: Any, watch: Watch, preset: Preset, steps: int, emit: Emit) -> Row:
    """``row`` with the time of each part of its step, under the rules that the step's own blocks are kept by."""
    few = dataclasses.replace(preset, iterations=0, blocks=PASS_BLOCKS, max_seconds=PASS_SECONDS)
    samples: dict[str, Any] = {}
    for part, dispatch in work.passes().items():
        alone = types.SimpleNamespace(step=dispatch, synchronize=work.synchronize, agree=work.agree)
        timing.time_block(alone, 0, 1)  # what is compiled lazily is compiled here
        seconds: list[float] = []
        conditions: list[Conditions] = []
        watch.block()
        for block, handle in timing.time_blocks(alone, few, 0, steps):
            del handle
            seconds.append(block.seconds / steps)
            conditions.append(watch.block())
        without, why = left_out(conditions)
        samples[part] = {"step_seconds": seconds, "left_out": without}
        kept = [each for place, each in enumerate(seconds) if place not in without]
        enough = len(without) <= comparability.LEFT_OUT * len(seconds)
        name, found = f"{part}_seconds", statistics.median(kept) if enough else None
        row = row.replace(
            **{name: found}, missing={name: f"{len(without)} of {len(seconds)} blocks are left out: {why}"}
        )
    emit("passes", row=row.row, steps=steps, **samples)
    return row


def _utilised(row: Row, setting: Setting, watch: Watch, use_case: UseCase, preset: Preset) -> Row:
    """``row`` with the device's ceilings and how near to them it came."""
    names = ("matmul_flops_per_second", "copy_bytes_per_second", "mfu", "bound")
    each = (row.batch_size or 0) // setting.world.size
    flops = ceilings.step_flops(setting, use_case.module, each)
    least = ceilings.least_bytes(setting, use_case.module, each, row.parameters or 0)
    row = row.replace(step_flops=flops * setting.world.size, arithmetic_intensity=flops / least)
    if not preset.thorough or setting.world.size > 1:
        return row.replace(missing=dict.fromkeys(names, _unmeasured(setting.world, preset)))
    loops = importlib.import_module("ceilings").loops(setting)
    if not loops:
        return row.replace(missing=dict.fromkeys(names, "torch_xla records rounds, and runs them as one program"))
    found = ceilings.measure(loops, setting)
    row = row.replace(**found, **ceilings.utilisation(found, flops, least, row.step_seconds_p50 or 0.0))
    if watch.sliced:
        return row.replace(mfu=None, missing={"mfu": "the device is a MIG slice"})
    return row


def _unmeasured(world: World, preset: Preset) -> str:
    return "measured on one device" if world.size > 1 else f"preset {preset.name} does not measure it"


def _threads(switches: dict[str, str]) -> str:
    """What the switch ``threads`` would have to be for the CPUs that there are."""
    asked = switches.get("threads", "all")
    return asked if asked == "all" else str(len(probes.usable_cpus()))
