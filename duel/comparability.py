"""The comparability certificate of a pair of rows: what must be the same on both sides, and in order on each.

A ratio is printed of no pair without it. It is made of the two rows alone, so whoever has the CSV can make it again.
"""

from collections.abc import Iterable
from typing import Any

from duel.catalogue import FRAMEWORK_DEFAULT, FRAMEWORKS
from duel.certificate import VERIFIED
from duel.modes import HANDICAPPED
from duel.record import FINISHED, SKIPPED, Row

COMPARABLE, NOT_COMPARABLE = "COMPARABLE", "NOT COMPARABLE"
# What is the same on both sides of a pair.
ALIKE = (
    *("benchmark", "use_case", "size", "precision", "mode", "batch_size", "product", "microbatch", "scaling"),
    *("target", "host", "device_kind", "device_name", "device_id", "device_count", "nodes", "cpus", "mig", "driver"),
    *("preset", "dataset", "parameters", "weights_sha256", "data_sha256", "code_sha256", "git_sha", "loss_steps"),
)
# The largest difference of the first loss, relative to it: it is taken of the first batch, before any step.
FIRST_LOSS = {"fp32": 1e-3, "tf32": 1e-2, "bf16": 5e-2, "fp16": 2e-2}
CLOCKS = 0.15  # relative difference of the clocks' medians
FOREIGN_LOAD = 0.05  # mean share of the CPUs' time
LEFT_OUT = 0.3  # share of the blocks


def verdict(one: Row, other: Row) -> str:
    """``COMPARABLE``, or ``NOT_COMPARABLE`` with every field that is not as it must be, and its values."""
    sides = sorted((one, other), key=lambda row: list(FRAMEWORKS).index(str(row.framework)))
    barred: dict[tuple[str, str], list[str]] = {}
    for row in sides:
        for fault in _faults(row):
            barred.setdefault(fault, []).append(str(row.framework))
    wrong = [f"{field} ({' and '.join(names)}: {why})" for (field, why), names in barred.items()]
    if all(row.status == FINISHED for row in sides):
        wrong += [
            f"{name} ({' | '.join(_text(getattr(row, name)) for row in sides)})"
            for name in ALIKE
            if len({getattr(row, name) for row in sides}) > 1
        ]
        wrong += _apart(*sides)
    return f"{NOT_COMPARABLE}: {'; '.join(wrong)}" if wrong else COMPARABLE


def _faults(row: Row) -> list[tuple[str, str]]:
    """What bars one side, whatever the other is: fields, and why."""
    if row.status != FINISHED:
        return [("status", f"{row.status}: {row.cause}" if row.cause else str(row.status))]
    checks = {
        ("parity", str(row.parity)): row.parity != VERIFIED,
        ("precision", f"{FRAMEWORK_DEFAULT} is never compared"): row.precision == FRAMEWORK_DEFAULT,
        ("steady", "no steady state"): row.steady is False,
        ("rung", "handicapped, XLA's autotuner had to be switched off"): row.rung == HANDICAPPED,
        ("restarts", str(row.restarts)): bool(row.restarts),
    }
    return [fault for fault, bad in checks.items() if bad] + disturbances(row)


def disturbances(row: Row) -> list[tuple[str, str]]:
    """What others did to ``row`` while it was measured, as far as it bars the row: fields, and how much."""
    total = (row.blocks or 0) + (row.left_out_blocks or 0)
    checks = {
        ("left_out_blocks", f"{row.left_out_blocks} of {total}, {row.left_out}"): (
            (row.left_out_blocks or 0) > LEFT_OUT * total
        ),
        ("foreign_load", f"{row.foreign_load or 0:.0%}"): (row.foreign_load or 0.0) > FOREIGN_LOAD,
    }
    return [fault for fault, bad in checks.items() if bad]


def _apart(one: Row, other: Row) -> list[str]:
    """Numbers that need not be equal, but near."""
    wrong = []
    if one.loss_first is not None and other.loss_first is not None:
        most = FIRST_LOSS.get(str(one.precision), max(FIRST_LOSS.values()))
        if not abs(one.loss_first - other.loss_first) <= most * max(abs(one.loss_first), abs(other.loss_first)):
            wrong.append(f"loss_first ({one.loss_first:.6g} | {other.loss_first:.6g})")
    if one.clock_mhz and other.clock_mhz and abs(one.clock_mhz / other.clock_mhz - 1) > CLOCKS:
        wrong.append(f"clock_mhz ({one.clock_mhz:.0f} | {other.clock_mhz:.0f})")
    return wrong


def _text(value: Any) -> str:
    text = str(value)
    return text[:12] if len(text) == 64 else text  # a hash


def partners(rows: Iterable[Row]) -> list[tuple[Row, Row]]:
    """The pairs among ``rows``: of one group, point and repeat one row of each framework, JAX's first.

    Of several attempts at one of them, of several rungs, and of what was measured again, it is the last that counts.
    """
    sides: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        if row.group is not None and row.point is not None:
            sides.setdefault((row.group, row.point, row.repeat), {})[str(row.framework)] = row
    first, second = FRAMEWORKS
    return [(found[first], found[second]) for found in sides.values() if len(found) == len(FRAMEWORKS)]


def judged(rows: list[Row]) -> list[Row]:
    """``rows`` with what is to be said of each whose partner is among them."""
    verdicts = {
        (row.run_id, row.row): verdict(*pair)
        for pair in partners(rows)
        for row in pair
        if any(side.status != SKIPPED for side in pair)
    }
    return [
        row.replace(comparable=said)
        if (said := verdicts.get((row.run_id, row.row))) and said != row.comparable
        else row
        for row in rows
    ]
