"""The tidy tables behind a report's figures of where the time goes, and its sentences on why; from profiled pairs."""

import statistics
from collections.abc import Iterator

from duel import kinds
from duel.catalogue import FRAMEWORKS
from duel.report import explain, shares
from duel.report.figure_data import Record, label, point, work
from duel.report.points import Line
from duel.report.records import Records
from duel.report.shares import WHOLE, Explained, place
from duel.terminal import Table

MODULES = 12  # that are drawn of a point: those that differ most
TIMELINES = 6  # points whose steps are drawn

Found = list[tuple[Explained, Line]]


def profiled(records: Records) -> Found:
    """Return the points that were profiled."""
    there = {folder.parent.name for folder in (records.folder / "runs").glob("*/profiles")}
    return [
        (one, line)
        for outcome, line in records.found
        if any(row.run_id in there for pair in outcome.pairs for row in pair)
        and (one := shares.profiled(outcome, records.folder))
    ]


def tables(found: Found) -> dict[str, list[Record]]:
    """Return the table of each figure by name; it may be empty."""
    named = [(one, point(line)) for one, line in found if one.pairs and not one.why]
    return {
        "kinds": [base | record for one, base in named for record in _kinds(one)],
        "modules": [base | record for one, base in named for record in _modules(one)],
        "roofs": [base | record for one, base in named for record in _roofs(one)],
        "timeline": [base | record for one, base in named[:TIMELINES] for record in _timeline(one)],
    }


def sentences(found: Found, records: Records) -> list[str]:
    """Return the largest shares of each profiled point, which of its rows have no profile, how much of all is of known
    kinds, and which points of the ``records`` were not profiled.
    """
    texts = []
    for one, line in found:
        said = list(one.missing)
        if one.pairs and one.why:
            said.append(f"Not explained: {one.why}.")
        elif one.pairs:
            tables = {"Memory in MiB": explain.memory(one), "Compiling": explain.compilation(one)}
            both = [f"{what}, JAX | PyTorch: {_cells(table)}" for what, table in tables.items() if table.lines]
            said = [*explain.sentences(one), *(f"{text}." for text in (*explain.basis(one), *both)), *said]
        texts.append(f"{line.device_name}, {_named(line)}: {' '.join(said)}")
    texts += [f"{text}." for text in explain.switched([one for one, _ in found if one.pairs and not one.why])]
    known = [line for _, line in found]
    if found and (others := [_named(line) for _, line in records.found if line not in known]):
        texts.append(f"Not profiled: {'; '.join(others)}.")
    shares = [one.share for one, _ in found if one.pairs and not one.why]
    if not shares:
        return texts
    median, least = f"{statistics.median(shares):.0%}", f"{min(shares):.0%}"
    whole = f"{len(shares)} of {len(records.found)} points are explained: {median} of the difference is of known kinds"
    return [f"{whole} (median; the least is {least}).", *texts]


def _named(line: Line) -> str:
    return f"{work(line)}, {label(line)}, {line.mode}"


def _cells(table: Table) -> str:
    """Return a table with a column for each side as text."""
    return ", ".join(f"{name} {jax or '-'} | {pytorch or '-'}" for name, jax, pytorch in table.lines)


def _kinds(one: Explained) -> Iterator[Record]:
    order = {kind: place for place, kind in enumerate((*kinds.ORDER, kinds.IDLE))}
    for share in sorted(one.divided(lambda part: part.kind), key=lambda share: order[share.name]):
        for framework, seconds in zip(FRAMEWORKS, share.seconds, strict=True):
            yield {"framework": framework, "kind": share.name, "milliseconds": 1e3 * seconds}


def _modules(one: Explained) -> Iterator[Record]:
    for share in one.divided(place)[:MODULES]:
        for framework, seconds in zip(FRAMEWORKS, share.seconds, strict=True):
            if seconds:
                yield {"framework": framework, "module": share.name, "milliseconds": 1e3 * seconds}


def _roofs(one: Explained) -> Iterator[Record]:
    """Yield the FLOP/s of each kind of work that has FLOP, and the ceilings of the machine."""
    rate, bandwidth = one.ceilings
    for kind in kinds.ORDER:
        for framework, (seconds, flops, moved) in zip(FRAMEWORKS, one.work(kind), strict=True):
            if seconds and flops and moved and rate and bandwidth:
                found = {"framework": framework, "kind": kind, "flops_per_second": flops / seconds}
                found |= {"flops_per_byte": flops / moved, "product_flops_per_second": rate}
                yield found | {"copy_bytes_per_second": bandwidth}


def _timeline(one: Explained) -> Iterator[Record]:
    """Yield the longest kernels of a step, those that run at the same time in different lanes."""
    for _, found in one.pairs[0]:
        ends: list[float] = []
        for bar in found.timeline:
            lane = next((place for place, end in enumerate(ends) if end <= bar.begin), len(ends))
            ends[lane : lane + 1] = [bar.end]
            times = {"begin": bar.begin / 1e3, "end": bar.end / 1e3}
            yield (
                {"framework": found.framework, "lane": f"{found.framework} {lane}", "kind": bar.kind}
                | times
                | {"module": bar.module or WHOLE}
            )
