"""The stages that prove what a row measures, outside the timed part: its program, its clock, its switches."""

import contextlib
import importlib
import json
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from duel import certificate, modes
from duel.catalogue import PER_SAMPLE, TRAIN, USE_CASES
from duel.evidence import ROUNDING
from duel.measure import clock, evidence, parameters, probes, timing, validation
from duel.measure.device import in_huge_pages, keeps_memory, uncounted_memory
from duel.measure.measurement import Columns, Measurement
from duel.measure.preparing import initial_weights
from duel.options import SAFETENSORS
from duel.switches import KEEP_MEMORY, OFF, ON

OPENING_SECONDS = 5.0  # that the opening steps may take when repeated
REPEATED = 10  # steps that must give the same bits again, if the row is to be deterministic


def prove(m: Measurement) -> Columns:
    """Write everything a validation compares (``duel.measure.validation``), or what was there when a part raised."""
    given = initial_weights(m) if str(m.row.weights).endswith(SAFETENSORS) else None
    training, per_sample = (
        getattr(importlib.import_module(use_case.module), use_case.work)
        for use_case in (USE_CASES[TRAIN], USE_CASES[PER_SAMPLE])
    )
    size, seed = str(m.row.size), m.row.seed or 0
    proof = validation.Proof(m.benchmark, size, m.device, seed, training, per_sample, m.shapes, given, m.say)
    try:
        proof.compute()
    finally:
        versions = np.array(json.dumps(importlib.import_module("devices").versions()))
        arrays: dict[str, Any] = {**proof.found, "versions": versions}
        unfinished = m.run.parity.with_name("unfinished.npz")
        np.savez(unfinished, **arrays)
        unfinished.replace(m.run.parity)
    return {}


@contextlib.contextmanager
def unmeasured(m: Measurement) -> Iterator[None]:
    """Exclude the block inside from what is measured: its time is the proof's, its memory does not count."""
    start = time.perf_counter()
    with uncounted_memory():
        yield
    m.proof_seconds += time.perf_counter() - start


def prove_before(m: Measurement) -> Columns:
    """Record the evidence before the clock, then restore the initial weights."""
    elements, samples = _result_elements(m), (m.row.batch_size or 0) // m.world.size
    run = evidence.RUNS[m.use_case.module]
    m.recorder = evidence.Recorder(
        *(m.work, run, m.shapes, len(m.pool.batches), elements, samples, m.setting.precision, m.row.seed or 0),
        # Models with attention have GELU; most others have kinks. In half precision roundings are coarser than what
        # kinks and norms do to them, and AdamW's second step magnifies them (vit_b16: a bias at 1.00 of its bound).
        smooth=m.benchmark.attention and m.setting.precision in ("fp32", "float64"),
    )
    with unmeasured(m):
        m.recorder.before()
        m.work.load(m.initial)
    return {}


def prove_opening(m: Measurement) -> Columns:
    """Record how far rounding moves the opening losses, then restore the initial weights."""
    step_seconds = m.work.agree(m.recorder.step_seconds)
    if m.setting.precision in ROUNDING and step_seconds * m.benchmark.curve_steps > OPENING_SECONDS:
        m.unproved.append(f"the opening losses after the first (steps take {step_seconds:.1g} s)")
    elif m.setting.precision in ROUNDING:
        with unmeasured(m):
            m.work.load(evidence.moved(m.initial, ROUNDING[m.setting.precision], m.row.seed or 0))
            losses = timing.opening_steps(m.training, m.benchmark.curve_steps, lambda step, loss: None)
            m.recorder.evidence.moved_curve = losses
            m.work.load(m.initial)
    return {}


def _result_elements(m: Measurement) -> int:
    """Return how many numbers one step's result has, if that grows with the samples; else 1."""
    match m.use_case.module, m.row.product:
        case "per_sample_gradients", "materialised":
            return (m.row.batch_size or 0) * (m.row.parameters or 0)
        case "inference", _:
            return (m.row.batch_size or 0) * evidence.outputs(m.benchmark.sizes[str(m.row.size)].inputs)
    return 1


def prove_after(m: Measurement) -> Columns:
    """Prove the clock, and record the evidence after it. What was measured may go no further than what is proved."""
    with unmeasured(m):
        waited_seconds, m.next_step = clock.waited(m.work, m.next_step)
        m.recorder.after(m.next_step)
    found = m.recorder.evidence.to_bytes()
    path = m.run.evidence_file(m.number, m.world.rank)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(found)
    m.proved.append("that blocks end when their steps do")
    m.proved.append(m.recorder.evidence.summary())
    return {"waited_seconds": waited_seconds, "proof_seconds": m.proof_seconds}


def repeat(m: Measurement) -> Columns:
    """Record whether the first steps give the same bits again, if the row asks to be deterministic."""
    if m.setting.on("deterministic"):
        m.say("repeating the first steps")
        bits = [_bits(m) for _ in range(2)]
        same = "the same" if bits[0] == bits[1] else "other"
        m.proofs["deterministic"] = ("on" if bits[0] == bits[1] else "off", f"a repeat gave {same} bits")
    return {}


def _bits(m: Measurement) -> str:
    """Return a hash of what ``REPEATED`` steps from the initial weights give."""
    if m.use_case.module != "training":
        return parameters.sha256(m.producing.named(m.work.step(0)))
    m.work.load(m.initial)
    m.next_step = REPEATED
    losses = np.array([m.training.loss(m.work.step(index)) for index in range(REPEATED)])
    return parameters.sha256(m.work.export() | {"losses": losses})


def check_switches(m: Measurement) -> Columns:
    """Record what shows that each switch was in force."""
    switches = dict(m.setting.switches)
    asked, cpus = switches.get("threads", "all"), len(probes.usable_cpus())
    m.proofs |= {"threads": (asked if asked == "all" else str(cpus), f"affinity, {cpus} CPUs")} | m.work.observed()
    kept = keeps_memory()  # also without the switch, if the target's set-up arranges for it
    shown_by = f"a large block lies in {'the heap' if kept else 'a mapping of its own'}"
    shown_by += f", {in_huge_pages():.0%} of the heap in huge pages" if kept else ""
    shown_by += f", {m.page_faults:.0f} page faults a step" if m.page_faults is not None else ""
    m.proofs[KEEP_MEMORY] = (ON if kept and m.setting.on(KEEP_MEMORY) else OFF, shown_by)
    return {"proofs": json.dumps(modes.in_force(switches, m.proofs))}


def certify(m: Measurement) -> Columns:
    """Record what was and was not proved, and whether a float64 certificate holds: a later one is for other code."""
    gaps = [f"not proved: {gap}" for gap in m.unproved]
    return {"proved": "; ".join(m.proved + gaps), "parity": certificate.verdict(m.row, m.run.folder.parent.parent)}
