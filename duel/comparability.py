"""The comparability certificate of a pair of rows: what must be the same on both sides, and in order on each.

No ratio of a pair is printed without it. It is made from the two rows alone, so anyone with the CSV can reproduce it.
"""

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from duel import variables
from duel.catalogue import FRAMEWORK_DEFAULT, FRAMEWORKS
from duel.certificate import DISPROVED
from duel.modes import HANDICAPPED
from duel.record import NOT_YET, Row
from duel.states import FINISHED, SKIPPED

if TYPE_CHECKING:  # numpy is loaded only where evidence is judged: 'main.py status' does not need it
    from duel.evidence import Evidence

COMPARABLE, NOT_COMPARABLE = "COMPARABLE", "NOT COMPARABLE"
# What must be the same on both sides of a pair.
ALIKE = (
    *("benchmark", "use_case", "size", "precision", "mode", "batch_size", "product", "microbatch", "scaling"),
    *("target", "host", "device_kind", "device_name", "device_id", "device_count", "nodes", "cpus", "mig", "driver"),
    *("preset", "dataset", "parameters", "weights_sha256", "data_sha256", "code_sha256", "git_sha"),
    *("learning_rate", "loss_steps", "recipe", "target_accuracy", "seed", "seen_sha256"),
)
# Of these a training to accuracy may have others on each side, as after an interruption between the two: they bar only
# the comparison of its times and energy.
MACHINE = ("host", "device_id", "cpus")
ACCURACY = {"fp32": 0.02, "tf32": 0.03, "bf16": 0.05, "fp16": 0.03}  # of the held-out samples
# Relative difference of the held-out loss with the initial weights, which only rounding may cause.
EVALUATED = {"fp32": 1e-4, "tf32": 1e-2, "bf16": 3e-2, "fp16": 1e-2}
CLOCKS = 0.15  # relative difference of the clocks' medians
FOREIGN_LOAD = 0.05  # mean share of the CPUs' time
LEFT_OUT = 0.3  # share of the blocks
FEWEST_BLOCKS = 2  # for a figure
# A step that is waited for may take this many times as long as one within a block: a device that is kept busy does not
# wait for the host, which for the shortest steps is most of the time.
WAITED, SHORTEST_WAITED = 10.0, 2e-3  # times, seconds
LONGEST_VALUE = 60  # characters of a variable's value


# Returns the evidence of a row, of each rank. Raises ValueError if it is missing, or not what the row recorded.
EvidenceOf = Callable[[Row], "list[Evidence]"]


def verdict(one: Row, other: Row, evidence_of: EvidenceOf) -> str:
    """Return ``COMPARABLE``, or ``NOT_COMPARABLE`` with every field that bars the pair, and its values."""
    sides = sorted((one, other), key=lambda row: list(FRAMEWORKS).index(str(row.framework)))
    barred: dict[tuple[str, str], list[str]] = {}
    for row in sides:
        for fault in _faults(row):
            barred.setdefault(fault, []).append(str(row.framework))
    wrong = [f"{field} ({' and '.join(names)}: {why})" for (field, why), names in barred.items()]
    if all(row.status == FINISHED for row in sides):
        wrong += [
            f"{name} ({_both(name, *sides)})"
            for name in ALIKE
            if _differ(name, *sides) and not (name in MACHINE and one.recipe)
        ]
        wrong += _variables_apart(*sides) + _apart(*sides)
        wrong += _disproved(evidence_of, *sides)
    return f"{NOT_COMPARABLE}: {'; '.join(wrong)}" if wrong else COMPARABLE


def _differ(name: str, one: Row, other: Row) -> bool:
    """Return whether a column differs; of batches up to a target, in the epochs that both trained."""
    if name == "seen_sha256" and (epochs := _seen(one, other)):
        return any(a != b for a, b in epochs)
    return bool(getattr(one, name) != getattr(other, name))


def _seen(one: Row, other: Row) -> list[tuple[str, str]]:
    """Return the hashes of both sides by epoch, of those that both trained; empty if there is one for all epochs."""
    by_epoch = one.target_accuracy and one.seen_sha256 and other.seen_sha256
    return [*zip(str(one.seen_sha256).split(), str(other.seen_sha256).split(), strict=False)] if by_epoch else []


def _both(name: str, one: Row, other: Row) -> str:
    """Return both sides' values of a column that differs."""
    if name == "seen_sha256" and (epochs := _seen(one, other)):
        number = next(place for place, (a, b) in enumerate(epochs) if a != b)
        return f"epoch {number + 1}: {' | '.join(epochs[number])}"
    return " | ".join(_text(getattr(row, name)) for row in (one, other))


def machines_apart(one: Row, other: Row) -> bool:
    """Return whether the sides of a pair ran on other machines or devices."""
    return any(getattr(one, name) != getattr(other, name) for name in MACHINE)


def _faults(row: Row) -> list[tuple[str, str]]:
    """Return what bars one side, whatever the other is: each field, and why."""
    if row.status != FINISHED:
        return [("status", f"{row.status}: {row.cause}" if row.cause else str(row.status))]
    checks = {
        ("parity", str(row.parity)): str(row.parity).startswith(DISPROVED),
        ("evidence", _unsealed(row)): row.evidence_sha256 is None,
        ("precision", f"{FRAMEWORK_DEFAULT} is never compared"): row.precision == FRAMEWORK_DEFAULT,
        ("steady", "no steady state"): row.steady is False,
        ("rung", "handicapped, XLA's autotuner had to be switched off"): row.rung == HANDICAPPED,
        ("restarts", str(row.restarts)): bool(row.restarts) and not row.recipe,
    }
    for name in variables.unnamed(row.variables):
        checks["variables", f"{name} has no name: neither the target nor a switch sets it"] = True
    return [fault for fault, bad in checks.items() if bad] + disturbances(row)


def _unsealed(row: Row) -> str:
    """Return why ``row`` has no evidence, if it has none."""
    reason = row.missing.get("evidence_sha256", NOT_YET)
    return "not proved this way: a record of an earlier version of Duel" if reason == NOT_YET else reason


def disturbances(row: Row) -> list[tuple[str, str]]:
    """Return the disturbances by others during the measurement that bar ``row``: each field, and how much.

    A step that takes far longer when it is waited for may be their doing, too, or that of a wrong clock. Accuracies do
    not depend on others.
    """
    if row.recipe:
        return []
    total = (row.blocks or 0) + (row.left_out_blocks or 0)
    waited, timed = row.waited_seconds or 0.0, row.step_seconds_p50 or 0.0
    checks = {
        ("left_out_blocks", f"{row.left_out_blocks} of {total}, {row.left_out}"): (
            (row.left_out_blocks or 0) > LEFT_OUT * total
        ),
        ("foreign_load", f"{row.foreign_load or 0:.0%}"): (row.foreign_load or 0.0) > FOREIGN_LOAD,
        ("waited_seconds", f"a step takes {waited:.2g} s when waited for, {timed:.2g} s within blocks"): (
            0 < WAITED * timed < waited and waited > SHORTEST_WAITED
        ),
    }
    return [fault for fault, bad in checks.items() if bad]


def no_figure(row: Row) -> str:
    """Return why the row's throughput cannot be shown or used in a ratio, or "" if it can."""
    what = f"{row.framework} in {row.run_id}, row {row.row}"
    if row.throughput is None or not 0 < row.throughput < math.inf:
        return f"{what}: throughput {row.throughput}"
    return f"{what}: {few}" if (few := too_few_blocks(row)) else ""


def too_few_blocks(row: Row) -> str:
    """Return how few blocks the row's step times rest on, or "" if they are enough."""
    if row.blocks is None or row.blocks >= FEWEST_BLOCKS:
        return ""
    return f"{row.blocks} of {row.blocks + (row.left_out_blocks or 0)} blocks are left"


def _apart(one: Row, other: Row) -> list[str]:
    """Return the numbers that need not be equal but are too far apart."""
    wrong = []
    most = ACCURACY.get(str(one.precision), 0.0)
    if one.accuracy is not None and other.accuracy is not None and abs(one.accuracy - other.accuracy) > most:
        wrong.append(f"accuracy ({one.accuracy:.3f} | {other.accuracy:.3f})")
    before, there = one.held_out_loss_before, other.held_out_loss_before
    if before and there and abs(before / there - 1) > EVALUATED.get(str(one.precision), 0.0):
        wrong.append(f"held_out_loss_before ({before:.6g} | {there:.6g})")
    if one.clock_mhz and other.clock_mhz and abs(one.clock_mhz / other.clock_mhz - 1) > CLOCKS:
        wrong.append(f"clock_mhz ({one.clock_mhz:.0f} | {other.clock_mhz:.0f})")
    return wrong


def _disproved(evidence_of: EvidenceOf, one: Row, other: Row) -> list[str]:
    """Return where both rows, by their evidence, did not compute the same."""
    from duel.evidence import curves_apart, disagreements, finer

    found: list[str] = []
    sides: list[list[Evidence]] = []
    for row in (one, other):
        if row.evidence_sha256 is None or row.precision == FRAMEWORK_DEFAULT:
            continue  # this already bars the row
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
    """Return the environment variables that differ between the sides, each with both values."""
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
    """Return the pairs among ``rows``: one row of each framework for the same group, point and repeat, JAX's first.

    Of several attempts, rungs or repeated measurements of the same row, the last one counts.
    """
    sides: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        if row.group is not None and row.point is not None:
            sides.setdefault((row.group, row.point, row.repeat), {})[str(row.framework)] = row
    first, second = FRAMEWORKS
    return [(found[first], found[second]) for found in sides.values() if len(found) == len(FRAMEWORKS)]


def judged(rows: list[Row], evidence_of: EvidenceOf) -> list[Row]:
    """Return ``rows`` with a verdict for each whose partner is among them, and both sides against the same ceilings.

    Records from before rows had evidence keep the verdict they were given then.
    """
    rows = _by_one_yardstick(rows)
    verdicts = {
        (row.run_id, row.row): verdict(*pair, evidence_of)
        for pair in partners(rows)
        for row in pair
        if any(side.status != SKIPPED for side in pair) and not all(_before_evidence(side) for side in pair)
    }
    return [
        row.replace(comparable=found)
        if (found := verdicts.get((row.run_id, row.row))) and found != row.comparable
        else row
        for row in rows
    ]


def _by_one_yardstick(rows: list[Row]) -> list[Row]:
    """Return ``rows`` with ``mfu`` and ``bound`` against their machine's ceilings: the highest that either side of a
    group measured on a device. If a framework's own loops are slow, its work would otherwise seem the better for it."""
    best: dict[tuple[Any, ...], tuple[float, float]] = {}
    for row in rows:
        if row.matmul_flops_per_second and row.copy_bytes_per_second:
            products, copies = best.get(_device(row), (0.0, 0.0))
            products, copies = max(products, row.matmul_flops_per_second), max(copies, row.copy_bytes_per_second)
            best[_device(row)] = products, copies
    return [
        _against(row, *best[_device(row)]) if _device(row) in best and not _before_evidence(row) else row
        for row in rows
    ]


def _device(row: Row) -> tuple[Any, ...]:
    return row.group, row.host, row.device_id, row.precision


def _against(row: Row, products: float, copies: float) -> Row:
    if not (row.mfu and row.step_flops and row.step_seconds_p50 and row.arithmetic_intensity):
        return row
    computing, moving = row.step_flops / products, row.step_flops / row.arithmetic_intensity / copies
    bound = "compute" if computing >= moving else "memory"
    mfu = computing / row.step_seconds_p50
    return row if (mfu, bound) == (row.mfu, row.bound) else row.replace(mfu=mfu, bound=bound)


def _before_evidence(row: Row) -> bool:
    return row.evidence_sha256 is None and row.comparable is not None
