"""The stages that measure: time, memory, and the device's ceilings."""

import dataclasses
import functools
import importlib
import math
import resource
import statistics
import types
from collections.abc import Callable
from typing import Any

from duel import comparability
from duel.errors import kind_of
from duel.job import PASSES
from duel.measure import ceilings, clock, timing
from duel.measure.device import uncounted_memory
from duel.measure.measurement import Columns, Measurement
from duel.measure.proving import unmeasured
from duel.measure.watch import Conditions, left_out

CEILINGS = ("matmul_flops_per_second", "copy_bytes_per_second", "mfu", "bound")
PASS_BLOCKS, PASS_SECONDS = 10, 5.0  # for a part of the step; if it is slow, as many as fit


def train(m: Measurement) -> Columns:
    """Take the opening steps, which are the same on both sides."""
    losses = timing.opening_steps(
        m.training, m.benchmark.curve_steps, lambda step, loss: m.emit("loss", row=m.number, step=step, loss=loss)
    )
    m.recorder.evidence.curve = losses
    m.next_step = len(losses)
    with uncounted_memory():  # of held-out samples, as many at once for a small batch as for a large one
        accuracy = m.work.accuracy(m.pool.held_out) if m.pool.held_out is not None else None
    rate = m.setting.benchmark.optimizer.learning_rate
    return {
        "learning_rate": rate,
        "accuracy": accuracy,
        "loss_first": losses[0],
        "loss_last": losses[-1],
        "loss_steps": len(losses),
    }


def warm_up(m: Measurement) -> Columns:
    m.next_step, m.steps_per_block = timing.warm_up(m.work, m.preset, m.next_step)
    m.next_step, steady, settling = timing.settle(m.work, m.preset, m.next_step, m.steps_per_block)
    m.emit("settling", row=m.number, steps_per_block=m.steps_per_block, seconds=settling)
    untested = {} if settling else {"steady": f"preset {m.preset.name} does not test it"}
    if settling and not steady:
        print(f"warning: no steady state within {m.preset.settling_seconds:.0f} s of blocks", flush=True)
    return {"steady": steady if settling else None, "warmup_steps": m.next_step, "missing": untested}


def time_calls(m: Measurement) -> Columns:
    calls = timing.time_calls(m.work, m.preset, m.next_step)
    m.emit("calls", row=m.number, seconds=calls)
    m.next_step += len(calls)
    return timing.latency(calls)


def time_blocks(m: Measurement) -> Columns:
    return _timed_blocks(m, lambda handle: {})


def time_training(m: Measurement) -> Columns:
    """Time blocks, and check that the optimizer took as many steps as they count."""
    with unmeasured(m):
        before, then, first = m.training.count(), clock.positions(m.training), m.next_step
    columns = _timed_blocks(m, lambda handle: {"loss": m.training.loss(handle)})
    with unmeasured(m):
        clock.counted(m.training, m.next_step - first, before, then)
    by = "moved parameters" if before is None else "the optimizer's count"
    m.proved.append(f"{m.next_step - first} timed steps by {by}")
    return columns


def _timed_blocks(m: Measurement, values_of: Callable[[Any], Columns]) -> Columns:
    batch_size, watch = m.row.batch_size or 0, m.watch
    blocks: list[timing.Block] = []
    conditions: list[Conditions] = []
    watch.begin()
    least = watch.least_seconds if m.preset.thorough else 0.0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for timed, handle in timing.time_blocks(m.work, m.preset, m.next_step, m.steps_per_block, least):
        block = timed
        if m.world.size > 1:  # the batch is done when all are: what has no collective in its step waits for nobody
            seconds = importlib.import_module("devices").slowest(timed.seconds, m.device)
            block = dataclasses.replace(timed, seconds=seconds)
        blocks.append(block)
        conditions.append(watch.block())
        step_seconds = block.seconds / block.steps
        values: Columns = {"steps": block.steps, "step_seconds": step_seconds, "unit": m.row.throughput_unit}
        values |= {"throughput": batch_size / step_seconds} | values_of(handle)
        del handle
        values |= {"done": len(blocks) * block.steps, "needed": m.preset.iterations}
        values |= {name: value for name, value in dataclasses.asdict(conditions[-1]).items() if value}
        m.emit("block", row=m.number, step=block.first_step + block.steps, **values)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    m.page_faults = faults / sum(block.steps for block in blocks)
    m.next_step = blocks[-1].first_step + blocks[-1].steps
    m.row = m.row.replace(**watch.columns(conditions, batch_size * sum(block.steps for block in blocks)))
    without, why = left_out(conditions)
    kept = [block for place, block in enumerate(blocks) if place not in without]
    if why:
        print(f"warning: {len(without)} of {len(blocks)} blocks are left out: {why}", flush=True)
    # If fewer than two are left, later stages still need a time, from all; the number of blocks shows it is no result.
    figures: Columns = timing.summary(kept if len(kept) >= 2 else blocks, batch_size) | {"blocks": len(kept)}
    figures["iterations"] = sum(block.steps for block in blocks)
    unknown = f"; not reported: {watch.untold}" if watch.untold else ""
    figures |= {"left_out": why + unknown if why else None, "missing": {"left_out": f"none is{unknown}"}}
    return figures | {"left_out_blocks": len(without)}


def memory(m: Measurement) -> Columns:
    """Record each kind of memory, and the throughput per GB of its peak."""
    devices = importlib.import_module("devices")
    missing = {
        "planned_bytes": f"{m.work.execution}: no plan is made",
        "reserved_bytes": f"the allocator of a {m.device.kind} device has no pool or does not report it",
    }

    def asked(name: str, ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except Exception as error:  # whatever a driver or allocator answers, what was measured stays
            missing[name] = f"{type(error).__name__}: {error}"
            return None

    columns = {
        "planned_bytes": asked("planned_bytes", m.work.planned_bytes),
        "reserved_bytes": asked("reserved_bytes", devices.reserved_bytes),
    }
    if (found := asked("peak_memory_bytes", devices.peak_memory_bytes)) is None:
        names = ("peak_memory_bytes", "peak_memory_kind", "throughput_per_gb")
        missing |= dict.fromkeys(names, missing["peak_memory_bytes"])
        return columns | dict.fromkeys(names) | {"missing": missing}
    peak, kind = found
    rate = m.row.throughput or m.row.trained_per_second
    columns |= {"peak_memory_bytes": peak, "peak_memory_kind": kind}
    missing |= {} if rate else {"throughput_per_gb": "no throughput"}
    per_gb = rate / ((m.row.device_count or 1) * peak / 1e9) if rate else None
    return columns | {"throughput_per_gb": per_gb, "missing": missing}


def all_reduce(m: Measurement) -> Columns:
    """Time the all-reduce alone, if there are several devices and the step has one."""
    if m.world.size == 1:
        return {}
    if m.row.product not in (None, "clipped_sum"):
        return {"missing": {"collective_seconds": "this product stays where it is made"}}
    m.say("measuring the all-reduce alone")
    return {"collective_seconds": timing.time_collective(m.work)}


def _beside(*names: str) -> Callable[[Callable[[Measurement], Columns]], Callable[[Measurement], Columns]]:
    """Return the stage that leaves ``names`` out if they need more memory than the step that was measured."""

    def of(stage: Callable[[Measurement], Columns]) -> Callable[[Measurement], Columns]:
        @functools.wraps(stage)
        def guarded(m: Measurement) -> Columns:
            try:
                return stage(m)
            except Exception as error:  # frameworks have many classes for no memory; all else is raised again
                if kind_of(repr(error)) != "out of memory":
                    raise
                m.unproved += ["a rate within the measured ceiling (out of memory)"] if "mfu" in names else []
                return {"missing": dict.fromkeys(names, "out of memory, beside what the step needs")}

        return guarded

    return of


@_beside(*PASSES)
def time_passes(m: Measurement) -> Columns:
    """Time each part of a step, keeping blocks by the same rules as the step's own."""
    if not m.preset.thorough or m.world.size > 1:
        return {"missing": dict.fromkeys(PASSES, _unmeasured(m))}
    m.say("measuring forward and backward pass")
    few = dataclasses.replace(m.preset, iterations=0, blocks=PASS_BLOCKS, max_seconds=PASS_SECONDS)
    samples: dict[str, Any] = {}
    columns: Columns = {}
    reasons: dict[str, str] = {}
    for part, dispatch in m.training.passes().items():
        alone = types.SimpleNamespace(step=dispatch, synchronize=m.work.synchronize, agree=m.work.agree)
        timing.time_block(alone, 0, 1)  # what is compiled lazily is compiled here
        seconds: list[float] = []
        conditions: list[Conditions] = []
        m.watch.block()
        for block, handle in timing.time_blocks(alone, few, 0, m.steps_per_block):
            del handle
            seconds.append(block.seconds / block.steps)
            conditions.append(m.watch.block())
        without, why = left_out(conditions)
        samples[part] = {"step_seconds": seconds, "left_out": without}
        kept = [each for place, each in enumerate(seconds) if place not in without]
        enough = len(without) <= comparability.LEFT_OUT * len(seconds)
        columns[f"{part}_seconds"] = statistics.median(kept) if enough else None
        reasons[f"{part}_seconds"] = f"{len(without)} of {len(seconds)} blocks are left out: {why}"
    m.emit("passes", row=m.number, steps=m.steps_per_block, **samples)
    return columns | {"missing": reasons}


def _unmeasured(m: Measurement) -> str:
    return "measured on one device" if m.world.size > 1 else f"preset {m.preset.name} does not measure it"


@_beside(*CEILINGS)
def utilise(m: Measurement) -> Columns:
    """Measure the device's ceilings and how close the step came to them, which it cannot have exceeded."""
    each, module = (m.row.batch_size or 0) // m.world.size, m.use_case.module
    flops = ceilings.step_flops(m.setting, module, each)
    least = ceilings.least_bytes(m.setting, module, each, m.row.parameters or 0)
    m.row = m.row.replace(step_flops=flops * m.world.size, arithmetic_intensity=flops / least)
    loops = {} if m.world.size > 1 else importlib.import_module("ceilings").loops(m.setting)
    if not loops:
        many = "measured on one device"
        reason = many if m.world.size > 1 else "torch_xla records rounds, and runs them as one program"
        m.unproved.append(f"a rate within the measured ceiling ({reason})")
        return {"missing": dict.fromkeys(CEILINGS, reason)}
    found = ceilings.measure(loops, m.setting, m.preset.thorough)
    step_seconds = m.row.step_seconds_p50 or math.nan
    if flops / step_seconds > clock.FEWER_PRODUCTS * found["matmul_flops_per_second"]:
        found = ceilings.measure(loops, m.setting)  # others may have used the device: once more, and for longer
    clock.possible(flops, step_seconds, found["matmul_flops_per_second"])
    m.proved.append("a rate within the measured ceiling")
    columns = found | ceilings.utilisation(found, flops, least, step_seconds)
    return columns | ({"mfu": None, "missing": {"mfu": "the device is a MIG slice"}} if m.watch.sliced else {})


@_beside("warm_start_seconds")
def start_again(m: Measurement) -> Columns:
    """Time another start, from what the caches have kept. What was compiled is dropped."""
    if m.work.execution == "eager" or m.world.size > 1 or not m.preset.thorough:
        why = "nothing to compile" if m.work.execution == "eager" else _unmeasured(m)
        return {"missing": {"warm_start_seconds": why, "cold_start_seconds": why}}
    m.work.forget()
    return {"warm_start_seconds": (m.work.compile() or 0.0) + timing.time_block(m.work, m.next_step, 1)[0]}
