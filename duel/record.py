"""The result record: one row per measured point, its columns with their units.

``results.csv`` has exactly the columns of ``Row``, in this order. A column without a value is empty in the CSV and has
its reason in the column ``missing``; it is never zero. Only columns of a training have none in a measured row.
"""

import dataclasses
import functools
import json
import math
import sys
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from duel.catalogue import FRAMEWORKS, USE_CASES
from duel.files import RUN_ID, Damaged, digest, fitting
from duel.states import FINISHED, STATES

# Two rows are repeats of each other exactly when all of these are equal, and a pair when all but the framework are.
CELL = (
    "benchmark",
    "use_case",
    "framework",
    "target",
    "device_kind",
    "device_count",
    "nodes",
    "scaling",
    "size",
    "precision",
    "mode",
    "batch_size",
    "product",
    "microbatch",
    "weights",
)
TRAINED = ("recipe", "target_accuracy", "seed")  # and these, for a training to accuracy

# The former become parts of paths; of the latter, ratios and their logarithms are computed.
PARTS_OF_PATHS = ("run_id", "benchmark", "size", "device_kind")
RATIOS = ("throughput", "step_seconds_p50", "compile_seconds", "first_step_seconds")

NOT_YET = "not reached"
NOT_HERE = "no part of this use case"


def column(meaning: str, unit: str = "") -> Any:
    """Return a field of ``Row``, empty until known; ``unit`` is empty for text and counts."""
    return field(default=None, metadata={"meaning": meaning, "unit": unit})


@dataclass(frozen=True, slots=True)  # a hundred thousand of them in 0.1 GB instead of 0.5
class Row:
    """One measured point: one fresh process, one line of results.csv."""

    run_id: str | None = column("one execution of one script; the folder results/runs/<run_id>")
    row: int | None = column("number of the row within its run, from 0")
    cell: str | None = column("hash of what is measured; rows with equal cells are repeats")
    pair: str | None = column("the same hash without the framework; rows with equal values may be compared")
    group: str | None = column("shared by both sides of a pair, through all attempts")
    point: int | None = column("index of the planned point within its run: batch size, product, devices")
    attempt: int | None = column("number of this attempt at the job, from 1")
    user: str | None = column("login name that started the run")
    framework: str | None = column("jax or pytorch")
    framework_version: str | None = column("version of the framework in the measured process")
    python_version: str | None = column("version of Python in the measured process")
    benchmark: str | None = column("name in the catalogue")
    use_case: int | None = column("number in the catalogue")
    target: str | None = column("entry of cluster.yaml")
    host: str | None = column("machine that ran the row; of several nodes, all of them, by rank")
    device_name: str | None = column("name that the device reports")
    device_kind: str | None = column("cpu, gpu, tpu or mps, as found by the job")
    device_count: int | None = column("devices that the row computed on")
    nodes: int | None = column("machines that these devices are in")
    scaling: str | None = column("weak: the batch per device stays the same; strong: the total batch")
    device_id: str | None = column("identity of the device: a GPU's UUID, or the numbers of the usable CPUs")
    cpus: int | None = column("CPUs that the process may use")
    mig: bool | None = column("whether the device is a slice of a GPU")
    driver: str | None = column("version of the accelerator's driver")
    mode: str | None = column("named set of switches, with those turned individually")
    switches: str | None = column("every switch that applies to this side, with its value")
    tuning: str | None = column("which search the switches of mode tuned come from, or why there was none")
    proofs: str | None = column("evidence that each switch was in force; 'as passed' where nothing observable shows it")
    variables: str | None = column(
        "environment variables that frameworks or their libraries obey, set by the target or by something unnamed",
        "JSON",
    )
    rung: int | None = column(
        "retries after crashes of XLA's autotuner, each with less autotuning; the last is handicapped"
    )
    execution: str | None = column(
        "how the framework ran the step: jit, eager, compiled (torch.compile) or lazy (recorded, then compiled)"
    )
    precision: str | None = column("precision policy")
    canary: str | None = column(
        "errors of four operations relative to float64, which show the precision that was in force"
    )
    preset: str | None = column("measurement protocol")
    size: str | None = column("size of the benchmark")
    batch_size: int | None = column("samples per step over all devices", "samples")
    product: str | None = column("what is computed from the per-sample gradients")
    microbatch: int | None = column("samples whose gradients are computed at once on a device", "samples")
    repeat: int | None = column("index of this repeat of its cell within the run, from 0")
    repeats: int | None = column("planned repeats of its cell in the run")
    dataset: str | None = column("source of the samples; 'synthetic' is N(0,1) noise")
    seed: int | None = column("seed of weights and data")
    parameters: int | None = column("trainable parameters of the model")
    weights: str | None = column("source of the initial weights: 'seed <n>' or a file")
    weights_sha256: str | None = column("hash of the initial weights")
    data_sha256: str | None = column("hash of all samples, in order")
    packages_sha256: str | None = column(
        "hash of the names and versions of all packages in the framework's environment"
    )
    code_sha256: str | None = column(
        "hash of the code that determines what both sides compute: models, training, layers, sizes"
    )
    proved: str | None = column("what this row's process proved or recorded for the comparison, and what it could not")
    evidence_sha256: str | None = column(
        "hash of what the program computed from known weights, before and after the clock"
    )
    waited_seconds: float | None = column("fastest of three to ten steps whose result was fetched to the host", "s")
    proof_seconds: float | None = column("time that the row's proof took, outside what is timed", "s")
    parity: str | None = column("whether a float64 certificate covers this code; if not, why")
    comparable: str | None = column(
        "COMPARABLE with the other side's row of the same pair and repeat, or the fields that differ"
    )
    status: str | None = column("one of: " + ", ".join(STATES))
    cause: str | None = column("why it did not finish, in words")
    why: str | None = column("kind of that reason, such as 'input', 'code' or 'out of memory'")
    partial: str | None = column("for a row that ended early: how much of the measurement its figures cover")
    steady: bool | None = column("whether blocks showed no trend at the end of the warm-up")
    warmup_steps: int | None = column("steps before the first timed one", "steps")
    iterations: int | None = column("timed steps over all blocks", "steps")
    blocks: int | None = column("timed blocks in the step-time statistics (n); fewer than 2 give none")
    left_out_blocks: int | None = column("timed blocks excluded from these statistics")
    left_out: str | None = column("why they were excluded: throttling, or others on the device")
    outliers: int | None = column("blocks beyond Tukey's fences (1.5 interquartile ranges); never excluded")
    steps_per_block: int | None = column("steps between two synchronisations", "steps")
    step_seconds_mean: float | None = column("mean over blocks of the block's time per step", "s")
    step_seconds_std: float | None = column("standard deviation over blocks (n - 1)", "s")
    step_seconds_p50: float | None = column("median over blocks", "s")
    step_seconds_p95: float | None = column("95th percentile over blocks", "s")
    throughput: float | None = column("batch size / median step time; unit in throughput_unit")
    throughput_unit: str | None = column("unit of throughput")
    forward_seconds: float | None = column(
        "median over blocks of the training loss alone, with nothing kept for a backward pass", "s"
    )
    gradient_seconds: float | None = column("the same for forward and backward pass, without the optimizer", "s")
    latency_calls: int | None = column("calls synchronised one by one (n of the latencies)", "calls")
    latency_seconds_mean: float | None = column("mean over these calls", "s")
    latency_seconds_std: float | None = column("standard deviation over these calls (n - 1)", "s")
    latency_seconds_p50: float | None = column("median over these calls", "s")
    latency_seconds_p95: float | None = column("95th percentile over these calls", "s")
    latency_seconds_p99: float | None = column("99th percentile, from 1,000 calls on", "s")
    scaling_efficiency: float | None = column(
        "throughput / (devices x throughput of one device in the same run)", "share of 1"
    )
    collective_seconds: float | None = column(
        "median of a single all-reduce of as many numbers as the step's, not overlapped", "s"
    )
    compile_seconds: float | None = column("ahead-of-time trace, lower and compile of the step, caches empty", "s")
    trace_seconds: float | None = column("part of compilation, or of the first step: up to the traced program", "s")
    lower_seconds: float | None = column("part of compilation: from there to the compiler's input", "s")
    backend_seconds: float | None = column("part of compilation, or of the first step: the compiler", "s")
    first_step_seconds: float | None = column("the first synchronised step, after compile_seconds if there is one", "s")
    cold_start_seconds: float | None = column("compilation and first step, caches empty", "s")
    warm_start_seconds: float | None = column("the same again in this process, with the caches on disk", "s")
    peak_memory_bytes: int | None = column("peak memory of the measured process; kind in peak_memory_kind", "B")
    peak_memory_kind: str | None = column("what peak_memory_bytes counts")
    planned_bytes: int | None = column("memory that the compiled step plans to use at once", "B")
    reserved_bytes: int | None = column("peak memory that the framework's allocator reserved on the device", "B")
    device_process_bytes: int | None = column("memory that NVML reports for this process", "B")
    host_peak_bytes: int | None = column("peak resident memory of this process on the host", "B")
    throughput_per_gb: float | None = column("throughput / (device_count * peak in GB)", "throughput_unit per GB")
    joules_per_item: float | None = column("energy over the timed blocks / samples", "J")
    mean_watts: float | None = column("energy over the timed blocks / time", "W")
    idle_watts: float | None = column("power in the second before work began", "W")
    energy_source: str | None = column("NVML, amdsmi (the GPU) or RAPL (the CPU packages, with all that runs on them)")
    clock_mhz: float | None = column("device clock, median over blocks", "MHz")
    clock_mhz_lowest: float | None = column("lowest device clock at the end of a block", "MHz")
    temperature_celsius: float | None = column("highest device temperature at the end of a block", "degrees C")
    foreign_load: float | None = column("share of the usable CPUs' time taken by others, mean", "share of 1")
    ecc_errors: int | None = column("uncorrected memory errors since the driver was loaded")
    step_flops: int | None = column("FLOPs of a step by the analytic table, two per multiply-add", "FLOP")
    matmul_flops_per_second: float | None = column(
        "rate of a large matrix product in this precision on this device", "FLOP/s"
    )
    copy_bytes_per_second: float | None = column("bandwidth of adding to a large array in place on this device", "B/s")
    mfu: float | None = column(
        "step_flops / step_seconds_p50 / matmul_flops_per_second; both sides of a pair use the higher ceiling",
        "share of 1",
    )
    arithmetic_intensity: float | None = column("step_flops / fewest bytes that a step can move", "FLOP/B")
    bound: str | None = column("roofline bound: compute or memory")
    learning_rate: float | None = column("learning rate of the optimizer at this batch size")
    loss_first: float | None = column("training loss of the first step")
    loss_last: float | None = column("training loss of step loss_steps; with synthetic data, of the first step's batch")
    loss_steps: int | None = column("opening steps, the same on both sides", "steps")
    accuracy: float | None = column("held-out accuracy after loss_steps steps", "share of 1")
    recipe: str | None = column("how a training to accuracy goes: epochs, rates, augmentation; empty for measured rows")
    epochs: int | None = column("epochs that a training is planned for")
    target_accuracy: float | None = column("held-out top-1 accuracy at which a training ends early", "share of 1")
    trained_epochs: int | None = column("epochs that it took")
    held_out_loss_before: float | None = column("mean loss of all held-out samples with the initial weights")
    top1_before: float | None = column("their top-1 accuracy with the initial weights", "share of 1")
    held_out_loss: float | None = column("mean loss of all held-out samples at the end")
    top1: float | None = column("held-out top-1 accuracy at the end", "share of 1")
    top5: float | None = column("held-out top-5 accuracy at the end", "share of 1")
    training_loss: float | None = column("mean training loss of the last epoch")
    training_seconds: float | None = column("time of all epochs, without their evaluations", "s")
    training_joules: float | None = column("energy of all epochs, without their evaluations", "J")
    waiting_share: float | None = column("share of training_seconds spent waiting for data", "share of 1")
    disturbed_share: float | None = column("share of training_seconds with throttling or other work", "share of 1")
    trained_per_second: float | None = column("samples trained on / training_seconds", "samples/s")
    seconds_to_target: float | None = column("training_seconds until target_accuracy was reached", "s")
    joules_to_target: float | None = column("training_joules until target_accuracy was reached", "J")
    seen_sha256: str | None = column("hash over a training's batches: labels, every 97th number; to a target, by epoch")
    started: str | None = column("start of the row's process", "UTC, ISO 8601")
    ended: str | None = column("end of the row's process", "UTC, ISO 8601")
    git_sha: str | None = column("commit of the code that ran")
    git_dirty: bool | None = column("whether tracked files other than cluster.yaml differed from that commit")
    script: str | None = column("whether the script was as rendered or edited by hand")
    slurm_job_id: str | None = column("Slurm job, if any")
    restarts: int | None = column("how often Slurm had requeued the job")
    missing: dict[str, str] = field(default_factory=dict, metadata={"meaning": "why a column is empty", "unit": "JSON"})

    def replace(self, **changes: Any) -> "Row":
        """Return a copy with ``changes``; a column that gets a value loses its reason in ``missing``."""
        reasons = self.missing | changes.pop("missing", {})
        reasons = {name: why for name, why in reasons.items() if changes.get(name) is None}
        return dataclasses.replace(self, **changes, missing=reasons)

    def with_cell(self) -> "Row":
        """Return a copy with ``cell`` and ``pair``, made from the fields of ``CELL``: each known, or in ``missing``."""
        values = {name: getattr(self, name) for name in (*CELL, *(TRAINED if self.recipe else ()))}
        unknown = [
            name for name, value in values.items() if value is None and name not in self.missing and name in CELL
        ]
        assert not unknown, f"a cell needs {unknown}"
        pair = {name: value for name, value in values.items() if name != "framework"}
        return self.replace(cell=digest(values), pair=digest(pair))

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1) + "\n"

    def to_dict(self) -> dict[str, Any]:
        """Return a mapping of column names to values, in the order of ``COLUMNS``."""
        return {name: getattr(self, name) for name in COLUMNS} | {"missing": dict(self.missing)}

    @classmethod
    def from_dict(cls, values: dict[str, Any], name: str) -> "Row":
        """Return a row of ``values``, without newer columns. Raises Damaged, headed by ``name``, if invalid."""
        row = fitting(values, cls, name)
        if not row.run_id:
            raise Damaged(f"{name} is damaged: it has no run_id")
        row.check(name)
        return row

    def check(self, name: str) -> None:
        """Raise Damaged, headed by ``name``, if a column that other code relies on has an invalid value."""
        for column_name, valid in (("status", STATES), ("framework", FRAMEWORKS), ("use_case", USE_CASES)):
            value = getattr(self, column_name)
            if value is not None and value not in valid:
                raise Damaged(f"{name} is damaged: {column_name} {value!r}; valid: {', '.join(map(str, valid))}")
        if self.row is not None and self.row < 0:
            raise Damaged(f"{name} is damaged: row {self.row}")
        if not _NAMES.issuperset(self.missing):
            raise Damaged(f"{name} is damaged: missing names an unknown column")
        for column_name in PARTS_OF_PATHS:
            value = getattr(self, column_name)
            if value is not None and not RUN_ID.fullmatch(value):
                raise Damaged(f"{name} is damaged: {column_name} {value[:40]!r}")
        for column_name in RATIOS:
            value = getattr(self, column_name)
            if value is not None and not 0 <= value < math.inf:
                raise Damaged(f"{name} is damaged: {column_name} {value}")
        if self.variables is not None:
            _check_variables(self.variables, name)

    def to_csv(self) -> list[str]:
        """Return one string per column. Every empty column has a reason, if only that the row did not reach it."""
        values = self.to_dict()
        # Nobody asks a measured row why it is no training, or a finished one why it did not finish.
        unasked = {*(LEARNED if self.recipe is None else ()), *(UNFINISHED if self.status == FINISHED else ())}
        empty: dict[str, list[str]] = {}
        for name in COLUMNS[:-1]:
            if values[name] is None and name not in unasked:
                empty.setdefault(self.missing.get(name, NOT_YET), []).append(name)
        values["missing"] = json.dumps(empty)
        return ["" if value is None else str(value) for value in values.values()]

    @classmethod
    def from_csv(cls, texts: Sequence[str]) -> "Row":
        """Return the row that ``to_csv`` wrote, from one text per column. Raises Damaged if it is not one."""
        row = object.__new__(cls)  # __init__ of a frozen dataclass takes three times as long as all the rest
        try:
            for put, parse, text in zip(_PUTS[:-1], _PARSERS, texts[:-1], strict=True):
                put(row, parse(text) if text else None)
            _PUTS[-1](row, _reasons(texts[-1] or "{}"))
        except (ValueError, RecursionError) as error:
            raise Damaged(f"{_named(texts)} is damaged: {error}") from error
        if not row.run_id:
            raise Damaged(f"{_named(texts)} is damaged: it has no run_id")
        row.check(f"row {row.row} of {row.run_id[:96]}")
        return row


def _named(texts: Sequence[str]) -> str:
    run_id, number = (texts[place] if place < len(texts) else "?" for place in _NAMING)
    return f"row {number[:20]} of {run_id[:96]}"


def _check_variables(text: str, name: str) -> None:
    """Raise Damaged, headed by ``name``, if ``text`` is not what ``duel.variables.record`` returns."""
    try:
        stored = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{name} is damaged: variables: {error}") from error
    fitting(stored, dict[str, dict[str, str]], f"{name}: variables")


COLUMNS = tuple(f.name for f in dataclasses.fields(Row))
LEARNED = COLUMNS[COLUMNS.index("recipe") : COLUMNS.index("seen_sha256") + 1]  # of trainings to accuracy alone
UNFINISHED = ("cause", "why", "partial")
_NAMES = frozenset(COLUMNS)
_NAMING = COLUMNS.index("run_id"), COLUMNS.index("row")
_TYPES: dict[str, type] = {
    name: next(a for a in typing.get_args(hint) if a is not types.NoneType)
    for name, hint in typing.get_type_hints(Row).items()
    if name != "missing"
}


@functools.lru_cache(maxsize=1 << 12)
def _reasons(text: str) -> dict[str, str]:
    """Return the column ``missing``, shared and so never changed in place. Raises Damaged if it is invalid."""
    found: dict[str, str] = {}
    for key, value in fitting(json.loads(text), dict[str, str | list[str]], "missing").items():
        # Tables of earlier versions have a reason for each column, which took two fifths of the table.
        found |= {key: value} if isinstance(value, str) else dict.fromkeys(value, key)
    return found


# For columns in order; texts, which repeat in a hundred thousand rows, share one object.
_BY_TYPE: dict[type, Callable[[str], Any]] = {str: sys.intern, bool: "True".__eq__, int: int, float: float}
_PARSERS = [_BY_TYPE[kind] for kind in _TYPES.values()]  # ``missing`` has its own
_PUTS = [vars(Row)[name].__set__ for name in COLUMNS]
