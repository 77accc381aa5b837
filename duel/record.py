"""The result record: one row per measured point, its columns with their units.

``results.csv`` has exactly the columns of ``Row``, in this order. A column without a value is empty in the CSV and has
its reason in the column ``missing``; it is never zero.
"""

import dataclasses
import hashlib
import json
import math
import types
import typing
from dataclasses import dataclass, field
from typing import Any

from duel.catalogue import FRAMEWORKS, USE_CASES
from duel.files import RUN_ID, Damaged, fitting
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

# These become parts of paths; and of these ratios and their logarithms are made.
PARTS_OF_PATHS = ("run_id", "benchmark", "size", "device_kind")
RATIOS = ("throughput", "step_seconds_p50", "compile_seconds", "first_step_seconds")

NOT_YET = "not reached"
NOT_HERE = "no part of this use case"


def column(meaning: str, unit: str = "") -> Any:
    """A field of ``Row``: empty until known; ``unit`` is empty for text and counts."""
    return field(default=None, metadata={"meaning": meaning, "unit": unit})


@dataclass(frozen=True)
class Row:
    """One measured point: one fresh process, one line of results.csv."""

    run_id: str | None = column("one execution of one script; the folder results/runs/<run_id>")
    row: int | None = column("number of the row within its run, from 0")
    cell: str | None = column("hash of what is measured; equal cells are repeats of each other")
    pair: str | None = column("the same hash without the framework; equal pairs may be set side by side")
    group: str | None = column("what both sides of a pair have in common, through all attempts")
    point: int | None = column("number of the planned point within its run: batch size, product, devices")
    attempt: int | None = column("which attempt at this job this is, from 1")
    user: str | None = column("login name that started the run")
    framework: str | None = column("jax or pytorch")
    framework_version: str | None = column("version of the framework in the measured process")
    python_version: str | None = column("version of Python in the measured process")
    benchmark: str | None = column("name in the catalogue")
    use_case: int | None = column("number in the catalogue")
    target: str | None = column("entry of cluster.yaml")
    host: str | None = column("machine that ran the row")
    device_name: str | None = column("as the device calls itself")
    device_kind: str | None = column("cpu, gpu, tpu or mps; found by the job, never typed")
    device_count: int | None = column("devices the row computed on")
    nodes: int | None = column("machines that these devices are on")
    scaling: str | None = column("what stays the same as devices are added: weak, each one's batch; strong, all of it")
    device_id: str | None = column("which device it is: UUID of a GPU, numbers of the CPUs that may be used")
    cpus: int | None = column("CPUs that the process may use")
    mig: bool | None = column("whether the device is a slice of a GPU")
    driver: str | None = column("version of the accelerator's driver")
    mode: str | None = column("named set of switches, and those that are turned by name")
    switches: str | None = column("every switch that this side has for this, and its value")
    tuning: str | None = column("how the switches of mode tuned were found, or why nobody searched for them")
    proofs: str | None = column("what shows that each of them was in force; 'as passed' where nothing does")
    variables: str | None = column(
        "environment variables of the process that frameworks or their libraries obey: the target's, and unnamed ones",
        "JSON",
    )
    rung: int | None = column(
        "attempts that XLA's autotuner has crashed before, each with less of it switched on; the last is handicapped"
    )
    execution: str | None = column(
        "how the framework ran the step: jit, eager, compiled (torch.compile), or lazy (recorded, then compiled)"
    )
    precision: str | None = column("precision policy")
    canary: str | None = column("how far four products are from float64, relative to it: what the policy really was")
    preset: str | None = column("measurement protocol")
    size: str | None = column("size of the benchmark")
    batch_size: int | None = column("samples per step over all devices", "samples")
    product: str | None = column("what is made of the per-sample gradients")
    microbatch: int | None = column("samples whose gradients are made at once on a device", "samples")
    repeat: int | None = column("which repeat of its cell within the run, from 0")
    repeats: int | None = column("how many repeats of its cell the run has planned")
    dataset: str | None = column("where the samples came from; 'synthetic' is N(0,1) noise")
    seed: int | None = column("of weights and data")
    parameters: int | None = column("trainable parameters of the model")
    weights: str | None = column("where the initial weights came from: 'seed <n>' or the file")
    weights_sha256: str | None = column("of the initial weights")
    data_sha256: str | None = column("of all samples, in order")
    packages_sha256: str | None = column("of the names and versions of all packages in the framework's environment")
    code_sha256: str | None = column("of what decides what both sides compute: models, training, layers, sizes")
    proved: str | None = column(
        "what of this row its own process has proved or recorded for the comparison, and what it could not"
    )
    evidence_sha256: str | None = column("of what its program computed from known weights, before and after the clock")
    waited_seconds: float | None = column(
        "fastest of three to ten steps, the result of each waited for on the host", "s"
    )
    proof_seconds: float | None = column("time that the proof of this row took, outside what is timed", "s")
    parity: str | None = column("whether a float64 certificate holds for this code; if not, why")
    comparable: str | None = column(
        "COMPARABLE with the other side's row of the same pair and repeat, or in what it is not"
    )
    status: str | None = column("one of: " + ", ".join(STATES))
    cause: str | None = column("why it is not finished, in words")
    why: str | None = column("the kind of that reason, such as 'input', 'code' or 'out of memory'")
    partial: str | None = column("of a row that ended early: on how much of the measurement its figures stand")
    steady: bool | None = column("whether blocks showed no trend when the warm-up ended")
    warmup_steps: int | None = column("steps before the first timed one", "steps")
    iterations: int | None = column("timed steps, of all blocks", "steps")
    blocks: int | None = column(
        "blocks that the step times are told of: the n of their statistics; below 2 they are none"
    )
    left_out_blocks: int | None = column("timed blocks that are left out of them")
    left_out: str | None = column("why: throttled, or others on the device")
    outliers: int | None = column("blocks beyond Tukey's fences, 1.5 interquartile ranges; none is left out for that")
    steps_per_block: int | None = column("steps between two synchronisations", "steps")
    step_seconds_mean: float | None = column("mean over blocks of the block's time per step", "s")
    step_seconds_std: float | None = column("standard deviation over blocks (n - 1)", "s")
    step_seconds_p50: float | None = column("median over blocks", "s")
    step_seconds_p95: float | None = column("95th percentile over blocks", "s")
    throughput: float | None = column("batch size / median step time; unit in throughput_unit")
    throughput_unit: str | None = column("unit of throughput")
    forward_seconds: float | None = column(
        "median over blocks of the loss alone, in training and with nothing kept for a backward pass", "s"
    )
    gradient_seconds: float | None = column("the same of forward and backward pass, without the optimizer", "s")
    latency_calls: int | None = column("calls that were synchronised one by one: the n of the latencies", "calls")
    latency_seconds_mean: float | None = column("mean over these calls", "s")
    latency_seconds_std: float | None = column("standard deviation over these calls (n - 1)", "s")
    latency_seconds_p50: float | None = column("median over these calls", "s")
    latency_seconds_p95: float | None = column("95th percentile over these calls", "s")
    latency_seconds_p99: float | None = column("99th percentile, from 1,000 calls on", "s")
    scaling_efficiency: float | None = column(
        "throughput / (devices x throughput on one of them, a row of the same run)", "share of 1"
    )
    collective_seconds: float | None = column(
        "median of one all-reduce of as many numbers as the step's, alone and not overlapped", "s"
    )
    compile_seconds: float | None = column("ahead-of-time trace, lower and compile of the step, caches empty", "s")
    trace_seconds: float | None = column("of it, or of the first step: to the framework's own program", "s")
    lower_seconds: float | None = column("of it: from there to the compiler's input", "s")
    backend_seconds: float | None = column("of it, or of the first step: the compiler", "s")
    first_step_seconds: float | None = column("the first synchronised step, after compile_seconds if there is one", "s")
    cold_start_seconds: float | None = column("compilation and first step, caches empty", "s")
    warm_start_seconds: float | None = column("the same again in this process, with what the caches have kept", "s")
    peak_memory_bytes: int | None = column("peak memory of the measured process; kind in peak_memory_kind", "B")
    peak_memory_kind: str | None = column("what peak_memory_bytes counts")
    planned_bytes: int | None = column("what the compiled step plans to have at once", "B")
    reserved_bytes: int | None = column("peak of what the framework's allocator has taken from the device", "B")
    device_process_bytes: int | None = column("what NVML counts for this process", "B")
    host_peak_bytes: int | None = column("peak resident memory of this process on the host", "B")
    throughput_per_gb: float | None = column("throughput / (device_count * peak in GB)", "throughput_unit per GB")
    joules_per_item: float | None = column("energy over the timed blocks / samples", "J")
    mean_watts: float | None = column("the same / time", "W")
    idle_watts: float | None = column("within the second before anything began", "W")
    energy_source: str | None = column("NVML (the GPU) or RAPL (the CPU packages, with all that runs on them)")
    clock_mhz: float | None = column("of the device, median over blocks", "MHz")
    clock_mhz_lowest: float | None = column("of the device, the lowest at the end of a block", "MHz")
    temperature_celsius: float | None = column("of the device, the highest at the end of a block", "degrees C")
    foreign_load: float | None = column("time that others took of the usable CPUs, mean over blocks", "share of 1")
    ecc_errors: int | None = column("uncorrected ones since the driver was loaded")
    step_flops: int | None = column("FLOP of a step by the analytic table, two for each multiply-add", "FLOP")
    matmul_flops_per_second: float | None = column("of a large matrix product in this precision, here", "FLOP/s")
    copy_bytes_per_second: float | None = column("of a large array that is added to in place, here", "B/s")
    mfu: float | None = column(
        "step_flops / step_seconds_p50 / matmul_flops_per_second; of a pair the higher one of both sides", "share of 1"
    )
    arithmetic_intensity: float | None = column("step_flops / the fewest bytes that a step can move", "FLOP/B")
    bound: str | None = column("which of both ceilings is nearer at that intensity: compute or memory")
    learning_rate: float | None = column("of the optimizer, at this batch size")
    loss_first: float | None = column("training loss of step 1")
    loss_last: float | None = column("training loss of step loss_steps; with synthetic data, of the batch of step 1")
    loss_steps: int | None = column("the opening steps that both sides take alike", "steps")
    accuracy: float | None = column("held-out accuracy after loss_steps steps", "share of 1")
    started: str | None = column("start of the row's process", "UTC, ISO 8601")
    ended: str | None = column("end of the row's process", "UTC, ISO 8601")
    git_sha: str | None = column("commit of the code that ran")
    git_dirty: bool | None = column("whether tracked files, cluster.yaml aside, differed from that commit")
    script: str | None = column("whether the script was as rendered, or edited by hand")
    slurm_job_id: str | None = column("the Slurm job, if there was one")
    restarts: int | None = column("how often Slurm had put the job back into its queue before")
    missing: dict[str, str] = field(default_factory=dict, metadata={"meaning": "why a column is empty", "unit": "JSON"})

    def replace(self, **changes: Any) -> "Row":
        """A copy with ``changes``; a column that gets a value loses its reason in ``missing``."""
        reasons = self.missing | changes.pop("missing", {})
        reasons = {name: why for name, why in reasons.items() if changes.get(name) is None}
        return dataclasses.replace(self, **changes, missing=reasons)

    def with_cell(self) -> "Row":
        """A copy with ``cell`` and ``pair`` from the fields of ``CELL``, all known, or ``missing`` for a reason."""
        values = {name: getattr(self, name) for name in CELL}
        unknown = [name for name, value in values.items() if value is None and name not in self.missing]
        assert not unknown, f"a cell needs {unknown}"
        pair = {name: value for name, value in values.items() if name != "framework"}
        return self.replace(cell=digest(values), pair=digest(pair))

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1) + "\n"

    def to_dict(self) -> dict[str, Any]:
        """Column name to value, in the order of ``COLUMNS``."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any], name: str) -> "Row":
        """Raises Damaged, which begins with ``name``, where ``values`` are no row's. Newer columns are left out."""
        row = fitting(values, cls, name)
        if not row.run_id:
            raise Damaged(f"{name} is damaged: it has no run_id")
        row.check(name)
        return row

    def check(self, name: str) -> None:
        """Raises Damaged, which begins with ``name``, where a column that others are chosen by has no valid value."""
        for column_name, valid in (("status", STATES), ("framework", FRAMEWORKS), ("use_case", USE_CASES)):
            value = getattr(self, column_name)
            if value is not None and value not in valid:
                raise Damaged(f"{name} is damaged: {column_name} {value!r}; valid: {', '.join(map(str, valid))}")
        if self.row is not None and self.row < 0:
            raise Damaged(f"{name} is damaged: row {self.row}")
        if not set(self.missing) <= set(COLUMNS):
            raise Damaged(f"{name} is damaged: missing names what is no column")
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
        """One text per column. Every empty column has a reason, if only that the row did not reach it."""
        values = self.to_dict()
        reasons = {name: self.missing.get(name, NOT_YET) for name in COLUMNS[:-1] if values[name] is None}
        if self.status == FINISHED:
            for name in ("cause", "why", "partial"):  # a finished row needs none
                reasons.pop(name, None)
        values["missing"] = json.dumps(reasons)
        return ["" if value is None else str(value) for value in values.values()]

    @classmethod
    def from_csv(cls, texts: dict[str, str]) -> "Row":
        """The row that ``to_csv`` wrote; ``texts`` maps column names to texts. Raises Damaged where it is none."""
        name = f"row {str(texts.get('row'))[:20]} of {str(texts.get('run_id'))[:96]}"
        try:
            values: dict[str, Any] = {name: _parse(name, texts[name]) for name in COLUMNS[:-1] if texts.get(name)}
            values["missing"] = json.loads(texts.get("missing") or "{}")
        except (ValueError, RecursionError) as error:
            raise Damaged(f"{name} is damaged: {error}") from error
        return cls.from_dict(values, name)


def _check_variables(text: str, name: str) -> None:
    """Raises Damaged, which begins with ``name``, where ``text`` is not what ``duel.variables.record`` gives."""
    try:
        stored = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{name} is damaged: variables: {error}") from error
    fitting(stored, dict[str, dict[str, str]], f"{name}: variables")


COLUMNS = tuple(f.name for f in dataclasses.fields(Row))
_TYPES: dict[str, type] = {
    name: next(a for a in typing.get_args(hint) if a is not types.NoneType)
    for name, hint in typing.get_type_hints(Row).items()
    if name != "missing"
}


def _parse(name: str, text: str) -> Any:
    return text == "True" if _TYPES[name] is bool else _TYPES[name](text)


def digest(values: dict[str, Any]) -> str:
    """12 hex digits that are equal exactly when ``values`` are."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]
