"""The comparability certificate of a pair of rows: what must be the same on both sides, and in order on each.

A ratio is printed of no pair without it. It is made of the two rows alone, so whoever has the CSV can make it again.
"""

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from duel import variables
from duel.catalogue import FRAMEWORK_DEFAULT, FRAMEWORKS
from duel.certificate import DISPROVED
from duel.modes import HANDICAPPED
from duel.record import Row
from duel.states import FINISHED, SKIPPED

if TYPE_CHECKING:  # numpy is loaded where evidence is judged: 'main.py status' does without
    from duel.evidence import Evidence

COMPARABLE, NOT_COMPARABLE = "COMPARABLE", "NOT COMPARABLE"
# What is the same on both sides of a pair.
ALIKE = (
    *("benchmark", "use_case", "size", "precision", "mode", "batch_size", "product", "microbatch", "scaling"),
    *("target", "host", "device_kind", "device_name", "device_id", "device_count", "nodes", "cpus", "mig", "driver"),
    *("preset", "dataset", "parameters", "weights_sha256", "data_sha256", "code_sha256", "git_sha"),
    *("learning_rate", "loss_steps"),
)
ACCURACY = {"fp32": 0.02, "tf32": 0.03, "bf16": 0.05, "fp16": 0.03}  # of the held-out samples
CLOCKS = 0.15  # relative difference of the clocks' medians
FOREIGN_LOAD = 0.05  # mean share of the CPUs' time
LEFT_OUT = 0.3  # share of the blocks
FEWEST_BLOCKS = 2  # that a figure stands on
# A step of a block may take so much less than one that is waited for: a device that is kept busy does not wait for the
# host, which for the shortest steps is most of the time.
WAITED, SHORTEST_WAITED = 10.0, 2e-3  # times, seconds
LONGEST_VALUE = 60  # letters of a variable's value


# The evidence of a row, of each rank. Raises ValueError where it is not there, or not what the row recorded.
EvidenceOf = Callable[[Row], "list[Evidence]"]


def verdict(one: Row, other: Row, evidence_of: EvidenceOf) -> str:
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
        wrong += _variables_apart(*sides) + _apart(*sides)
        wrong += _disproved(evidence_of, *sides)
    return f"{NOT_COMPARABLE}: {'; '.join(wrong)}" if wrong else COMPARABLE


def _faults(row: Row) -> list[tuple[str, str]]:
    """What bars one side, whatever the other is: fields, and why."""
    if row.status != FINISHED:
        return [("status", f"{row.status}: {row.cause}" if row.cause else str(row.status))]
    checks = {
        ("parity", str(row.parity)): str(row.parity).startswith(DISPROVED),
        ("evidence", "not proved this way: a record of an earlier version of Duel"): row.evidence_sha256 is None,
        ("precision", f"{FRAMEWORK_DEFAULT} is never compared"): row.precision == FRAMEWORK_DEFAULT,
        ("steady", "no steady state"): row.steady is False,
        ("rung", "handicapped, XLA's autotuner had to be switched off"): row.rung == HANDICAPPED,
        ("restarts", str(row.restarts)): bool(row.restarts),
    }
    for name in variables.unnamed(row.variables):
        checks["variables", f"{name} has no name: neither the target nor a switch sets it"] = True
    return [fault for fault, bad in checks.items() if bad] + disturbances(row)


def disturbances(row: Row) -> list[tuple[str, str]]:
    """What others did to ``row`` while it was measured, as far as it bars the row: fields, and how much.

    A step that takes far longer when it is waited for may be their doing, too, or that of a clock that is wrong.
    """
    total = (row.blocks or 0) + (row.left_out_blocks or 0)
    waited, timed = row.waited_seconds or 0.0, row.step_seconds_p50 or 0.0
    checks = {
        ("left_out_blocks", f"{row.left_out_blocks} of {total}, {row.left_out}"): (
            (row.left_out_blocks or 0) > LEFT_OUT * total
        ),
        ("foreign_load", f"{row.foreign_load or 0:.0%}"): (row.foreign_load or 0.0) > FOREIGN_LOAD,
        ("waited_seconds", f"a step takes {waited:.2g} s where it is waited for, {timed:.2g} s within blocks"): (
            waited > WAITED * timed and waited > SHORTEST_WAITED
        ),
    }
    return [fault for fault, bad in checks.items() if bad]


def no_figure(row: Row) -> str:
    """Why the row's throughput is not one to make a ratio of, or to show; empty where it is."""
    what = f"{row.framework} in {row.run_id}, row {row.row}"
    if row.throughput is None or not 0 < row.throughput < math.inf:
        return f"{what}: throughput {row.throughput}"
    return f"{what}: {few}" if (few := too_few_blocks(row)) else ""


def too_few_blocks(row: Row) -> str:
    """Of how few blocks the row's step times are told; empty where they are enough."""
    if row.blocks is None or row.blocks >= FEWEST_BLOCKS:
        return ""
    return f"{row.blocks} of {row.blocks + (row.left_out_blocks or 0)} blocks are left"


def _apart(one: Row, other: Row) -> list[str]:
    """Numbers that need not be equal, but near."""
    wrong = []
    most = ACCURACY.get(str(one.precision), 0.0)
    if one.accuracy is not None and other.accuracy is not None and abs(one.accuracy - other.accuracy) > most:
        wrong.append(f"accuracy ({one.accuracy:.3f} | {other.accuracy:.3f})")
    if one.clock_mhz and other.clock_mhz and abs(one.clock_mhz / other.clock_mhz - 1) > CLOCKS:
        wrong.append(f"clock_mhz ({one.clock_mhz:.0f} | {other.clock_mhz:.0f})")
    return wrong


def _disproved(evidence_of: EvidenceOf, one: Row, other: Row) -> list[str]:
    """In what both rows, by their evidence, have not computed the same."""
    from duel.evidence import curves_apart, disagreements, finer

    found: list[str] = []
    sides: list[list[Evidence]] = []
    for row in (one, other):
        if row.evidence_sha256 is None or row.precision == FRAMEWORK_DEFAULT:
            continue  # which bars the row already
        try:
            sides.append(evidence_of(row))
        except (OSError, ValueError) as error:
            found.append(f"evidence ({row.framework}: {error})")
    if len(sides) < 2:
        return found
    first, second = (side[0] for side in sides)
    for row, text in ((one, finer(first, second)), (other, finer(second, first))):
        if text:
            found.append(f"evidence ({row.framework}: {text})")
    found += [f"evidence ({text})" for text in disagreements(*sides)]
    return found + curves_apart(first, second)


def _variables_apart(one: Row, other: Row) -> list[str]:
    """Environment variables that the sides do not share, each with both values."""
    first, second = variables.recorded(one.variables), variables.recorded(other.variables)
    return [
        f"variables ({name}: {_value(first.get(name))} | {_value(second.get(name))})"
        for name in sorted(first.keys() | second.keys())
        if first.get(name) != second.get(name)
    ]


def _value(text: str | None) -> str:
    if text is None:
        return "not set"
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 1]}…"


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


def judged(rows: list[Row], evidence_of: EvidenceOf) -> list[Row]:
    """``rows`` with the verdict of each whose partner is among them, and both sides by the same ceilings.

    Records of before rows had evidence keep what they were given then.
    """
    rows = _by_one_yardstick(rows)
    verdicts = {
        (row.run_id, row.row): verdict(*pair, evidence_of)
        for pair in partners(rows)
        for row in pair
        if any(side.status != SKIPPED for side in pair) and not all(_of_before(side) for side in pair)
    }
    return [
        row.replace(comparable=found)
        if (found := verdicts.get((row.run_id, row.row))) and found != row.comparable
        else row
        for row in rows
    ]


def _by_one_yardstick(rows: list[Row]) -> list[Row]:
    """``rows`` with ``mfu`` and ``bound`` by the ceilings of their machine: the highest that either side of a group
    measured on a device. A framework's own loops may be slow, and then its work would seem the better for it."""
    best: dict[tuple[Any, ...], tuple[float, float]] = {}
    for row in rows:
        if row.matmul_flops_per_second and row.copy_bytes_per_second:
            products, copies = best.get(_device(row), (0.0, 0.0))
            products, copies = max(products, row.matmul_flops_per_second), max(copies, row.copy_bytes_per_second)
            best[_device(row)] = products, copies
    return [_against(row, *best[_device(row)]) if _device(row) in best and not _of_before(row) else row for row in rows]


def _device(row: Row) -> tuple[Any, ...]:
    return row.group, row.host, row.device_id, row.precision


def _against(row: Row, products: float, copies: float) -> Row:
    if not (row.mfu and row.step_flops and row.step_seconds_p50 and row.arithmetic_intensity):
        return row
    computing, moving = row.step_flops / products, row.step_flops / row.arithmetic_intensity / copies
    bound = "compute" if computing >= moving else "memory"
    mfu = computing / row.step_seconds_p50
    return row if (mfu, bound) == (row.mfu, row.bound) else row.replace(mfu=mfu, bound=bound)


def _of_before(row: Row) -> bool:
    return row.evidence_sha256 is None and row.comparable is not None
