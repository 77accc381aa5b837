"""Rows side by side, and what each pair comes to: a ratio where its certificate holds, or why there is none."""

import os
from typing import Any

import pandas as pd

from duel.certificate import VERIFIED
from duel.comparability import COMPARABLE, judged
from duel.job import group
from duel.record import FINISHED, NOT_HERE, TERMINAL, Row
from duel.report.command import paired_command
from duel.report.pairs import Outcome, outcomes
from duel.report.waterfall import waterfalls
from duel.results import Results, Run
from duel.variables import recorded

SHOWN = (
    "status",
    "cause",
    "benchmark",
    "dataset",
    "size",
    "batch_size",
    "product",
    "microbatch",
    "precision",
    "mode",
    "rung",
    "execution",
    "host",
    "device_name",
    "device_id",
    "clock_mhz",
    "device_count",
    "nodes",
    "scaling",
    "throughput",
    "scaling_efficiency",
    "collective_seconds",
    "step_seconds_p50",
    "step_seconds_std",
    "forward_seconds",
    "gradient_seconds",
    "iterations",
    "blocks",
    "left_out_blocks",
    "steady",
    "latency_seconds_mean",
    "latency_seconds_std",
    "latency_seconds_p50",
    "latency_seconds_p95",
    "latency_seconds_p99",
    "latency_calls",
    "compile_seconds",
    "first_step_seconds",
    "cold_start_seconds",
    "warm_start_seconds",
    "peak_memory_bytes",
    "peak_memory_kind",
    "throughput_per_gb",
    "joules_per_item",
    "mean_watts",
    "mfu",
    "bound",
    "learning_rate",
    "loss_first",
    "loss_last",
    "loss_steps",
    "accuracy",
    "parameters",
    "framework_version",
    "python_version",
)
# What tells apart the rows of one run that are not repeats of each other.
POINT = ("product", "batch_size", "device_count")
# What only rows of many devices show.
MANY = ("device_count", "nodes")
# What is shown where it is not the same everywhere, and where any row has it.
IF_APART, IF_ANY = ("host", "device_id"), ("rung", "left_out_blocks", "joules_per_item", "mean_watts")
CURVE_STEPS = 50
SAME_COMPUTATION = ("pair", "weights_sha256", "data_sha256", "parameters", "device_name", "host")
LATENCIES = [name for name in SHOWN if name.startswith("latency_seconds")]
UNITS = {
    "throughput": 1.0,
    "step_seconds_p50": 1e3,
    "step_seconds_std": 1e3,
    "peak_memory_bytes": 2.0**-20,
    "collective_seconds": 1e3,
    "forward_seconds": 1e3,
    "gradient_seconds": 1e3,
} | dict.fromkeys(LATENCIES, 1e3)
NAMES = {
    "step_seconds_p50": "step time, median (ms)",
    "step_seconds_std": "step time, std (ms)",
    "forward_seconds": "forward pass alone (ms)",
    "gradient_seconds": "forward and backward (ms)",
    "compile_seconds": "compile time (s)",
    "first_step_seconds": "first step (s)",
    "peak_memory_bytes": "peak memory (MiB)",
    "peak_memory_kind": "peak memory is",
    "cold_start_seconds": "cold start (s)",
    "warm_start_seconds": "warm start (s)",
    "clock_mhz": "clock (MHz)",
    "mfu": "share of a matrix product's rate",
    "throughput_per_gb": "throughput per GB",
    "joules_per_item": "energy (J per item)",
    "mean_watts": "power (W)",
    "iterations": "timed steps",
    "blocks": "timed blocks (n)",
    "framework_version": "version",
    "python_version": "Python",
    "device_name": "device",
    "device_count": "devices",
    "collective_seconds": "all-reduce alone (ms)",
    "batch_size": "batch size",
    "latency_calls": "latency calls (n)",
    **{name: f"latency, {name.rpartition('_')[2]} (ms)" for name in LATENCIES},
}


def side_by_side(rows: list[Row]) -> str:
    """One column a row, one line a quantity with its unit; an empty value shows its reason. Of repeats the first."""
    rows = [row for row in rows if not row.repeat]
    varied = [name for name in POINT if len({getattr(row, name) for row in rows}) > 1]
    columns = {
        " ".join([str(row.framework or row.run_id), *(str(getattr(row, name)) for name in varied)]): _column(row)
        for row in sorted(rows, key=lambda row: (row.product or "", row.batch_size or 0))
    }
    frame = pd.DataFrame(columns, index=[_name(name, rows) for name in SHOWN])
    hidden = [name for name in IF_APART if len({getattr(row, name) for row in rows}) == 1]
    hidden += [name for name in IF_ANY if not any(getattr(row, name) for row in rows)]
    frame = frame.drop(index=[_name(name, rows) for name in hidden])
    return str(frame[frame.ne("").any(axis=1)].to_string(max_colwidth=60))


def remarks(rows: list[Row]) -> list[str]:
    """What a reader must know before setting these rows against each other."""
    done = [row for row in rows if row.status == FINISHED]
    if len({row.framework for row in done}) < 2:
        return ["Not both sides have finished: there is nothing to compare."]
    points: dict[tuple[Any, ...], list[Row]] = {}
    for row in done:
        points.setdefault(tuple(getattr(row, name) for name in POINT), []).append(row)
    differing = [n for n in SAME_COMPUTATION if any(len({getattr(row, n) for row in p}) > 1 for p in points.values())]
    said = [f"NOT the same computation: {', '.join(differing)} differ."] if differing else []
    if not differing:
        said.append("Same initial weights, same samples in the same order (hashes agree).")
    if len({row.execution == "eager" for row in done}) > 1:
        ways = ", ".join(dict.fromkeys(f"{row.framework} {row.execution}" for row in done))
        said.append(f"Execution differs ({ways}): this shows what a newcomer gets, not which framework is faster.")
    if all(row.parity == VERIFIED for row in done):
        said.append("Proved to compute the same (results/parity).")
    switches = dict.fromkeys(f"{row.framework}: {row.switches}" for row in done if row.switches)
    said += [f"Switches of {words}." for words in switches]
    variables = dict.fromkeys(f"{row.framework}: {_assigned(row)}" for row in done if recorded(row.variables))
    return said + [f"Variables of {words}." for words in variables]


def _assigned(row: Row) -> str:
    return " ".join(f"{name}={value}" for name, value in recorded(row.variables).items())


def verdicts(found: list[Outcome], rows: list[Row]) -> list[str]:
    """For each of ``found`` among ``rows`` the certificate and what it comes to."""
    lines = []
    for outcome in found:
        row = outcome.pairs[0][0]
        what = f"{outcome.benchmark}, {outcome.use_case}, mode {row.mode}"
        lines.append(f"{what}, batch size {row.batch_size}, devices {row.device_count}: {outcome.verdict}")
        if outcome.found is not None:
            lines[-1] += f". {COMPARABLE}"
        for number, sides in enumerate(outcome.pairs if len(outcome.pairs) > 1 else ()):
            throughputs = [f"{side.framework} {_text('throughput', side.throughput, '')}" for side in sides]
            lines.append(f"  pair {number + 1}: {', '.join(throughputs)} {row.throughput_unit}")
        tries = [(r.framework, r.repeat) for r in rows if (r.group, r.point) == (row.group, row.point)]
        if more := len(tries) - len(set(tries)):
            lines.append(f"  not counted: {more} that failed or were disturbed, and were measured again")
        if outcome.break_even_steps is not None:
            lines.append(f"  the slower start is made up for after {outcome.break_even_steps:,.0f} steps")
    return lines + _sharpness([row for outcome in found if outcome.shown for pair in outcome.pairs for row in pair])


def _sharpness(rows: list[Row]) -> list[str]:
    """How sharp the proof of ``rows`` is where no float64 certificate holds."""
    lines = []
    for row in rows:
        if row.parity != VERIFIED:
            why, _, command = str(row.parity).removeprefix("unverified: ").partition("; run ")
            why = why.replace("no certificate", "no float64 certificate")
            sharper = f"; {command} sharpens it" if command else ""
            lines.append(f"  {why}: the proof is as sharp as {row.precision} rounding{sharper}")
    return list(dict.fromkeys(lines))


def _name(name: str, rows: list[Row]) -> str:
    if name == "throughput":
        return f"throughput ({rows[0].throughput_unit})"
    return NAMES.get(name, name.replace("_", " "))


def _column(row: Row) -> list[str]:
    values: dict[str, Any] = row.to_dict()
    hidden = () if row.scaling else MANY
    return ["" if name in hidden else _text(name, values[name], row.missing.get(name, "")) for name in SHOWN]


def _text(name: str, value: Any, reason: str) -> str:
    if value is None:
        return "" if reason in ("", NOT_HERE) else f"- ({reason})"
    if name in UNITS:
        value = value * UNITS[name]
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def curve_remark(runs: list[Run]) -> list[str]:
    """How far the opening losses of two runs are apart, relative to the larger of each two."""
    curves = [[event["loss"] for event in run.events()[0] if event["event"] == "loss"] for run in runs]
    if len(curves) != 2 or not all(curves):
        return []
    apart = [abs(a - b) / max(abs(a), abs(b)) for a, b in zip(*curves, strict=False)][:CURVE_STEPS]
    first, worst = apart[0], max(apart)
    return [f"Losses differ by {first:.1e} relative at step 1, by at most {worst:.1e} in the first {len(apart)} steps."]


def report(runs: list[Run], results: Results, default_target: str | None = None) -> str:
    """What ``compare`` prints, and ``--wait`` ends with: for each group the table, its remarks and the verdict, and
    where everything lies. The command of a verdict names its target unless it is ``default_target``."""
    groups: dict[str, dict[Run, list[Row]]] = {}
    for run in runs:
        groups.setdefault(group(run), {})[run] = [results.with_parity(row) for row in run.rows()]
    lines: list[str] = []
    found: list[Outcome] = []
    for sides in groups.values():
        rows = judged([row for side in sides.values() for row in side], results.evidence)
        lines += ["", *_unfinished(list(sides))]
        if not rows:
            continue
        here = outcomes(rows)
        lines += [side_by_side(rows), "", *remarks(rows), *curve_remark(list(sides)), "", *verdicts(here, rows)]
        if indicative := [pair for outcome in here if outcome.indicative is not None for pair in outcome.pairs]:
            lines.append(f"  for a verdict: {paired_command(list(sides)[-1], indicative, default_target)}")
        found += here
    if told := waterfalls(found):
        lines += ["", *told]
    lines += ["", f"CSV          {os.path.relpath(results.csv)}"]
    for run in runs:
        lines.append(f"run folder   {os.path.relpath(run.folder)}   log: python main.py logs {run.id}")
        lines.append(
            f"             {run.stored_status().get('wandb', 'Weights & Biases: the run did not get that far')}"
        )
    return "\n".join(lines)


def _unfinished(runs: list[Run]) -> list[str]:
    """A line for each run that has not ended, or whose rows are gone."""
    lines = []
    for run in runs:
        state = run.status()["state"]
        if state not in TERMINAL:
            lines.append(f"{run.id} is {state}; 'python main.py logs {run.id} --follow' follows it")
        elif not any(run.rows_folder.glob("*.json")):
            lines.append(f"{run.id} is damaged: {os.path.relpath(run.rows_folder)} holds no rows")
    return lines
