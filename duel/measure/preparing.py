"""The first stages of a row: its device, network, weights and data, and the first step."""

import dataclasses
import importlib
import itertools
import json
import math
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from duel import certificate, modes, tuned
from duel.catalogue import PRECISIONS, WEAK
from duel.errors import UserError
from duel.files import Damaged, read_object, write_atomically
from duel.measure import batches, canary, clock, gpus, parameters, probes, timing
from duel.measure.device import Device, Setting, World, keep_memory, keeping, keeps_memory, uncounted_memory
from duel.measure.measurement import Columns, Measurement, Skip
from duel.measure.watch import Watch
from duel.options import SAFETENSORS
from duel.record import Row
from duel.switches import ALL, KEEP_MEMORY, THREADS

# Kinds of devices that several processes can divide among themselves. A TPU host's chips belong to one process unless
# its environment splits them, which could not be tested; MPS has one device.
TOGETHER = ("cpu", "gpu")
APART = f"processes with one device each are supported on {' and '.join(TOGETHER)} only;"
AMPERE = 8.0  # the first compute capability with TF32 and bfloat16


def find_device(m: Measurement) -> Columns:
    """Find the device, and what was not known about the row before."""
    if m.device_kind is not None and not _together(m.device_kind, m.world):  # before each process opens it
        m.row = _of_kind(m, m.device_kind)
        raise Skip(f"{APART} this is a {m.device_kind}")
    try:
        m.device = importlib.import_module("devices").select(m.device_kind, m.world)
    except ValueError as error:
        raise UserError(str(error)) from error
    device, row, world = m.device, m.row, m.world
    m.row = _of_kind(m, device.kind).replace(device_name=device.name)
    if why := _lacks(device, str(row.precision)):
        raise Skip(why)
    if not _together(device.kind, world):
        raise Skip(f"{APART} this is a {device.kind}")
    m.watch = Watch(device, world)
    if m.watch.warning and not world.rank:
        print(f"warning: {m.watch.warning}: blocks timed while they run are left out", flush=True)
    return {
        "driver": device.driver,
        "cpus": len(probes.usable_cpus()),
        "packages_sha256": probes.packages_sha256(),
        "device_id": m.watch.device_id,
        "missing": {
            "driver": "not reported by NVML" if device.kind == "gpu" else f"a {device.kind} device has no driver",
            "device_id": m.watch.missing.get("device_id", "not reported"),
        },
    }


def _of_kind(m: Measurement, kind: str) -> Row:
    """Return the row with what the kind of its device decides. Raises UserError for a batch that does not divide."""
    row, world = m.row, m.world
    # The proof is as sharp with a CPU's batch size, whatever the device is.
    batch_size = row.batch_size or m.benchmark.sizes[str(row.size)].batch_size["cpu" if _is_proof(m) else kind]
    if row.scaling == WEAK:
        batch_size *= world.size
    if batch_size % world.size:
        raise UserError(f"batch size {batch_size} does not divide among {world.size} devices")
    return row.replace(device_kind=kind, device_count=world.size, batch_size=batch_size)


def _together(kind: str, world: World) -> bool:
    """Whether the processes of ``world`` can divide devices of ``kind`` among themselves."""
    return world.size == 1 or kind in TOGETHER


def _is_proof(m: Measurement) -> bool:
    return not m.use_case.module


def _lacks(device: Device, policy: str) -> str:
    """Return why ``device`` does not support the precision ``policy``; empty if it does."""
    kinds = PRECISIONS[policy].device_kinds
    if device.kind not in kinds:
        return f"{policy} is supported on {', '.join(kinds)} only; this is a {device.kind}"
    capability = device.compute_capability or ""  # of an AMD GPU it is a name, such as gfx942
    if policy in ("tf32", "bf16") and re.fullmatch(r"\d+\.\d+", capability) and float(capability) < AMPERE:
        return f"{policy} needs compute capability {AMPERE} or higher; this is a {device.name} ({capability})"
    return ""


def build(m: Measurement) -> Columns:
    """Build the network, without its weights, and record what the row measures."""
    network, weights = importlib.import_module("network"), importlib.import_module("weights")
    per_sample = m.use_case.module == "per_sample_gradients"
    m.shapes = weights.shapes(network.build(m.benchmark, str(m.row.size), per_sample))
    trainable = sum(map(math.prod, parameters.trainable(m.shapes).values()))
    found: Columns = {
        "code_sha256": certificate.code_sha256(m.benchmark.name, str(m.row.size)),
        "parameters": trainable,
    }
    if per_sample:
        samples = (m.row.batch_size or 0) // m.world.size
        own = fitting(samples, trainable, m.device.memory_bytes)
        microbatch = m.row.microbatch or own
        m.microbatches = (m.row.microbatch, None) if microbatch == own else (m.row.microbatch,)
        if samples % microbatch:
            raise UserError(f"microbatch {microbatch} does not divide the batch size on a device, {samples}")
        found["microbatch"] = microbatch
    m.row = m.row.replace(**found).with_cell()
    return {}


def fitting(batch_size: int, parameters: int, memory_bytes: int | None) -> int:
    """Return the microbatch: the largest divisor of ``batch_size`` whose float32 gradients fit an eighth of the memory.

    It depends on the device and the model, not on what a framework happens to need, so both sides take the same one.
    """
    most = (memory_bytes or 2**33) // 8 // (4 * parameters)
    return max(n for n in range(1, batch_size + 1) if batch_size % n == 0 and n <= max(most, 1))


def initial_weights(m: Measurement) -> parameters.Arrays:
    """Return the weights in the file that the row names or, without one, made from its seed."""
    source = m.row.weights or ""
    if not source.endswith(SAFETENSORS):
        return parameters.initialise(m.shapes, m.row.seed or 0)
    try:
        arrays = parameters.read(Path(source))
        if m.row.recipe:
            arrays = _with_new_head(m, arrays)
        parameters.check(m.shapes, arrays)
    except (ValueError, OSError) as error:
        raise UserError(f"--weights {source}: {error}") from error
    return arrays


def _with_new_head(m: Measurement, arrays: parameters.Arrays) -> parameters.Arrays:
    """Return ``arrays`` with the layer of other classes drawn from the seed; if more has another shape, as they are."""
    other = [name for name, shape in m.shapes.items() if name in arrays and arrays[name].shape != shape]
    classes = all(arrays[name].shape[1:] == m.shapes[name][1:] for name in other)  # only their number differs
    if not classes or len({name.rpartition(".")[0] for name in other}) > 1:
        return arrays  # a checkpoint of another model, which is refused
    if other:
        print(f"drawn from the seed, because the data set has other classes: {', '.join(other)}", flush=True)
    drawn = parameters.initialise({name: m.shapes[name] for name in other}, m.row.seed or 0)
    return arrays | drawn


def _check_threads(mode: str, switches: Mapping[str, str], world: World) -> None:
    """Raise UserError unless this process has the CPUs that the switch ``threads`` leaves it."""
    asked = switches.get(THREADS, ALL)
    if asked == ALL:
        return
    if world.size > 1:
        raise UserError(
            f"--mode {mode}: {THREADS} limits one process, this row has {world.size}; valid: {THREADS}={ALL}"
        )
    if not hasattr(os, "sched_setaffinity"):
        raise UserError(f"--mode {mode}: only Linux can limit a process to some CPUs; valid here: {THREADS}={ALL}")
    if (there := len(probes.usable_cpus())) != int(asked):
        raise UserError(f"--mode {mode}: there are {there} CPUs here; valid: {THREADS}=1 to {THREADS}={there}")


def _keep_memory(mode: str) -> None:
    """Have this process keep the memory that it frees. Raises UserError if its malloc cannot be told to.

    By now the framework's threads have pools of their own, so the process starts anew, as it was started, and tells
    malloc before anything else. It can, as no other process has met it: use cases on many devices lack the switch.
    """
    if keeps_memory():
        return
    keep_memory()
    if not keeps_memory():
        raise UserError(f"--mode {mode}: only glibc's malloc can be told to keep memory; valid here: {KEEP_MEMORY}=off")
    sys.stdout.flush()
    lines = os.fsdecode(Path("/proc/self/environ").read_bytes()).split("\0")
    given = keeping(dict(line.split("=", 1) for line in lines if "=" in line))
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:], f"--{KEEP_MEMORY}"], given)


def load(m: Measurement, made: batches.Pool | None = None) -> Columns:
    """Put weights and data, or the batches already ``made``, on the device; from here on, ``work`` exists."""
    use_case, rung, mode = m.use_case, m.row.rung or 0, str(m.row.mode)
    if modes.is_tuned(mode) and m.row.recipe and m.row.switches:  # it goes on as it began, whatever was found since
        mode = modes.spelled(modes.DEFAULT, dict(text.split("=", 1) for text in m.row.switches.split()))
    elif modes.is_tuned(mode):
        choice, tuning = tuned.found_for(m.row, m.run.folder.parents[1], m.microbatches)
        mode = modes.in_place(mode, choice or modes.TUNED, str(m.row.framework))
        m.row = m.row.replace(tuning=tuning)
    row = m.row
    switches = modes.settings(
        *(mode, str(row.framework), m.benchmark.name, use_case.number, str(row.precision), m.device.kind, rung),
        cudnn=not gpus.by_amd(m.device.name),
    )
    _check_threads(str(row.mode), switches, m.world)
    policy = modes.rung_precision(rung, str(row.precision))
    m.row = row.replace(switches=modes.said(switches), precision=policy)
    recipe = m.recipe if row.recipe else None
    optimizer = recipe.optimizer if recipe else m.benchmark.optimizer
    benchmark = dataclasses.replace(m.benchmark, optimizer=optimizer.at(row.batch_size or 0))
    m.setting = Setting(
        *(benchmark, str(row.size), policy, m.device, m.world, switches, row.product or "", row.microbatch or 0),
        recipe,
    )
    if m.setting.on(KEEP_MEMORY):  # before anything large is allocated
        _keep_memory(str(row.mode))
    m.initial = initial_weights(m)
    try:
        m.pool = made or batches.pool(m.benchmark, str(row.size), row.batch_size or 0, row.seed or 0, m.data)
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error
    m.work = m.maker(m.setting, m.pool, m.initial)
    if m.world.size > 1:  # no process holds all samples
        held = {"weights_sha256": parameters.sha256(m.initial), "data_sha256": m.pool.sha256}
    else:
        samples = itertools.chain(m.work.held(), [m.pool.held_out] if m.pool.held_out is not None else [])
        held = {"weights_sha256": parameters.sha256(m.work.export()), "data_sha256": batches.sha256(samples)}
    return {"execution": m.work.execution, "dataset": m.pool.dataset, **held}


def check_precision(m: Measurement) -> Columns:
    """Run the canary and, once the precision is known to be in force, record the run's environment."""
    with uncounted_memory():
        errors = canary.errors(importlib.import_module("canary").products(m.work))
    m.row = m.row.replace(canary=canary.said(errors))
    if wrong := canary.contradiction(errors, m.setting.precision):
        if m.world.rank == 0:
            m.run.write_row(m.row)  # with its canary
        raise UserError(f"precision {m.setting.precision} is not in force: {wrong}")
    if m.world.rank == 0:
        _record_environment(m)
    return {}


def _record_environment(m: Measurement) -> None:
    """Write this side's part of the run's environment.json, and the machine's, unless an earlier row did."""
    try:
        stored = read_object(m.run.environment)
    except (FileNotFoundError, Damaged):  # the first row, or cut off: this side is recorded anew
        stored = {}
    side = str(m.row.framework)
    if side in stored:
        return
    found = probes.environment() | {"device": dataclasses.asdict(m.device)}
    mine = {name: found.pop(name) for name in ("python", "interpreter", "packages", "variables")}
    mine["versions"] = importlib.import_module("devices").versions()
    mine["modules"] = sorted({name.partition(".")[0] for name in sys.modules})
    write_atomically(m.run.environment, json.dumps(found | stored | {side: mine}, indent=1) + "\n")


def compile_step(m: Measurement) -> Columns:
    seconds = m.work.compile()
    later = "nothing to compile" if m.work.execution == "eager" else "compiled within the first steps"
    missing = {} if seconds is not None else {"compile_seconds": f"{m.work.execution}: {later}"}
    return {"compile_seconds": seconds, "missing": missing}


def first_step(m: Measurement) -> Columns:
    """Time the first step, and so the cost of a start."""
    seconds, _ = timing.time_block(m.work, 0, 1)
    m.next_step = 1
    clock.samples(m.work, m.row.batch_size or 0)
    m.proved.append(f"{m.row.batch_size} samples a step")
    found: Columns = dict.fromkeys(("trace_seconds", "lower_seconds", "backend_seconds")) | m.work.compile_times()
    why = "nothing to compile" if m.work.execution == "eager" else f"{m.work.execution}: not reported separately"
    found["missing"] = {name: why for name, stage in found.items() if stage is None}
    if m.work.execution != "eager":
        found["cold_start_seconds"] = (m.row.compile_seconds or 0.0) + seconds
    return found | {"first_step_seconds": seconds}
