"""What ``explain`` prints of profiled pairs: where the time goes on both sides, and the largest shares in sentences."""

import math
import os
import re
import statistics
from collections.abc import Mapping, Sequence
from datetime import datetime

from duel import kinds, profile
from duel.catalogue import MANY, SESSION_SECONDS
from duel.errors import UserError
from duel.files import locked
from duel.modes import DEFAULT
from duel.record import CELL
from duel.report import compare, reproduction
from duel.report.itself import surroundings
from duel.report.sessions import over_sessions
from duel.report.shares import SIDES, TELLING, Explained, Share, place, profiled, remedy
from duel.results import Results, Run
from duel.terminal import Table, say

MOST_NAMED = 3  # shares that have a sentence, and compilations that are listed
SMALL = 0.01  # of a step: parts that take less on both sides are added up, as are modules after the first so many
MOST_MODULES = 12
UNCHANGED = "No switch is known to change it; 'explain --reproduce' may write it as two scripts to report."


def _explained(runs: list[Run], results: Results) -> list[Explained]:
    """Return the points of ``runs`` that were profiled. Raises UserError if there are none."""
    outcomes = over_sessions([outcome for group in compare.groups(runs, results) for outcome in group.found])
    found = [one for outcome in outcomes if (one := profiled(outcome, results.folder))]
    if not found and (asked := [run.id for run in runs if (job := run.launch().job) is not None and job.profile]):
        raise UserError(f"{asked[0]} was to be profiled, but ended before: 'python main.py logs {asked[0]}' says why")
    if not found:
        raise UserError(
            "none of these runs was profiled; --profile does it, as in "
            "'python main.py --benchmark mnist --use_case 1 --paired --profile --wait'"
        )
    return found


def report(runs: list[Run], results: Results) -> list[Table | str]:
    """Return the explanation of each point of ``runs``. Raises UserError if nothing there was profiled."""
    found = _explained(runs, results)
    parts: list[Table | str] = []
    for one in found:
        parts += ["", *one.missing, *(explanation(one) if one.pairs else [])]
    if lines := switched([one for one in found if one.pairs and not one.why]):
        parts += ["", Table([], [], lines, title=["what modes change"])]
    return [*parts, "", *_traces(runs)]


def switched(found: Sequence[Explained]) -> list[str]:
    """Return which kinds of work each mode changes, against the mode that it begins with, or default."""
    points: dict[tuple[object, ...], dict[str, Explained]] = {}
    for one in found:
        point = [getattr(one.outcome.row, name) for name in CELL if name not in ("framework", "mode")]
        where = (*point, one.outcome.row.cpus, *surroundings(one.outcome.pairs[0]))
        points.setdefault(where, {})[str(one.outcome.row.mode)] = one
    lines = []
    for modes in points.values():
        for mode, after in modes.items():
            base = re.split("[+-]", mode)[0]
            before = modes.get(DEFAULT if base == mode else base)
            if before is not None and before is not after:
                lines += [text for side in (0, 1) if (text := _change(before, after, side))]
    return lines


def _change(before: Explained, after: Explained, side: int) -> str:
    """Return what differs between the steps of one side in two modes; empty if its switches are the same."""
    rows = [one.pairs[0][side][0] for one in (before, after)]
    if rows[0].switches == rows[1].switches:
        return ""
    divided = [one.divided(lambda part: part.kind) for one in (before, after)]
    seconds = [{share.name: share.seconds[side] for share in shares} for shares in divided]
    changes = {kind: seconds[1].get(kind, 0.0) - seconds[0].get(kind, 0.0) for kind in {**seconds[0], **seconds[1]}}
    largest = sorted(changes, key=lambda kind: -abs(changes[kind]))[:MOST_NAMED]
    said = ", ".join(f"{kind} {'+' if changes[kind] > 0 else '-'}{_seconds(abs(changes[kind]))}" for kind in largest)
    steps = " to ".join(_seconds(one.steps[side]) for one in (before, after))
    what = f"{_what(after)}, {SIDES[side]}, {rows[0].mode} to {rows[1].mode}"
    return f"{what}: step {steps}; {said}{_apart(before, after, side)}"


def _what(one: Explained) -> str:
    row = one.outcome.row
    devices = f", {row.device_count} device{'s' * (row.device_count != 1)}" if row.use_case in MANY else ""
    return f"{one.outcome.benchmark}, {one.outcome.use_case}, batch size {row.batch_size}{devices}"


def _apart(before: Explained, after: Explained, side: int) -> str:
    """Say how far apart one side of two modes was measured, if in separate sessions: the machine may have changed."""
    try:
        times = [
            [datetime.fromisoformat(row.started) for pair in one.pairs if (row := pair[side][0]).started]
            for one in (before, after)
        ]
        seconds = (max(map(min, times)) - min(map(max, times))).total_seconds() if all(times) else 0.0
    except (ValueError, TypeError):  # damaged, which records.seconds reports; TypeError: one of them has a time zone
        return ""
    return f"; {seconds / 3600:.1f} hours apart, which may be part of it" if seconds > SESSION_SECONDS else ""


def reproduce(runs: list[Run], results: Results, here: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Write the largest share of each point as two scripts, and run them if ``here`` has its target's interpreters.

    Return what they show, or why a point cannot be repeated alone. Raises UserError if none can.
    """
    lines, why = [], []
    for one in _explained(runs, results):
        if not one.pairs or one.why:
            continue
        try:
            lines += _repeated(one, results, here)
        except UserError as error:
            why.append(str(error))
    if not lines:
        raise UserError("; ".join(why) or "none of these pairs can be explained; 'python main.py explain' says why")
    return lines + [f"not repeated: {text}" for text in why]


def _repeated(one: Explained, results: Results, here: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Repeat the largest share of one point. Raises UserError if it cannot be repeated or a script fails."""
    found = reproduction.largest(one)
    row, _ = one.pairs[0][0]  # not every session need have been profiled
    name = reproduction.folder(found, row.row or 0)
    folder = profile.path(results.run(str(row.run_id)).folder, row.row or 0).parent / name
    scripts = reproduction.write(one, found, folder)
    written = [f"larger, and not of one layer: {found.larger}"] if found.larger else []
    written += [f"reproduction {os.path.relpath(script)}" for script in scripts.values()]
    pythons = here.get(str(row.target))
    if not pythons:
        return [*written, f"target {row.target} is not this machine: run both on one of its nodes"]
    if row.host != os.uname().nodename:
        return [*written, f"it was measured on {row.host}, which is not this machine: run both there"]
    with locked(results.device_lock, wait=False) as held:
        busy = held is None
    if busy:
        say("waiting for another run on this machine to end")
    with locked(results.device_lock, wait=True):  # as a run holds it, which this would disturb
        return [*written, reproduction.verdict(found, reproduction.run(scripts, pythons))]


def explanation(one: Explained) -> list[Table | str]:
    """Return what is printed of a point with profiles."""
    row = one.outcome.row
    head = f"{_what(one)}, mode {row.mode}"
    jax, pytorch = one.steps
    said = f"a step takes {_seconds(jax)} in JAX, {_seconds(pytorch)} in PyTorch: JAX / PyTorch {math.exp(one.log):.3f}"
    if one.why:
        return [Table([], [], [f"not explained: {one.why}"], title=[head])]
    by_kind = one.divided(lambda part: part.kind)
    by_module = one.divided(place)
    parts: list[Table | str] = [
        _table(one, by_kind, "kind of work", [head, said]),
        "",
        _table(one, by_module, "module", [], MOST_MODULES),
        "",
    ]
    parts += [_roofs(one, by_kind), "", memory(one), ""]
    if any(found.programs for _, found in one.pairs[0]):
        parts += [compilation(one), ""]
    numbered = [f"{number}. {text}" for number, text in enumerate(sentences(one), 1)]
    return [*parts, Table([], [], [*numbered, *basis(one)])]


def sentences(one: Explained) -> list[str]:
    """Return the largest shares of the difference, a sentence each."""
    each = one.divided(lambda part: f"{part.kind}|{place(part)}|{part.stage}")
    return [_sentence(one, share, each) for share in one.divided(lambda part: part.kind)[:MOST_NAMED]]


def _sentence(one: Explained, share: Share, each: Sequence[Share]) -> str:
    """Return a share in one sentence: what it costs, where most of it is, and what may change it."""
    text = f"{share.name.capitalize()}: {_both(share)}{_of_difference(share, one.log)}"
    places = [part for part in each if part.name.startswith(f"{share.name}|") and part.log * share.log > 0]
    if places and share.name != kinds.IDLE:
        _, module, stage = places[0].name.split("|")
        much = "most of it" if 2 * places[0].log / share.log > 1 else "the largest part"
        text += f"; {much} in {module}{f', {stage}' if stage else ''} ({_both(places[0])}{_times(places[0])})"
    slow = one.pairs[0][share.slower][0]
    mode = remedy(share.name, slow)
    may = f"In {slow.framework}, --mode {mode} may change it." if mode else UNCHANGED
    return f"{text}. {may}"


def _times(share: Share) -> str:
    """Return how many times slower a share's slower side is; empty if the other has no such work."""
    low, high = sorted(share.seconds)
    return f", {high / low:.2g} times slower in {SIDES[share.slower]}" if low else ""


def _of_difference(share: Share, whole: float) -> str:
    return f", {share.log / whole:.0%} of the difference" if abs(whole) > math.log(TELLING) else ""


def _both(share: Share) -> str:
    return f"{_seconds(share.seconds[0])} in JAX, {_seconds(share.seconds[1])} in PyTorch"


def basis(one: Explained) -> list[str]:
    """Return how far the explanation can be trusted."""
    lines = [f"{one.share:.1%} of the difference is of known kinds; {len(one.pairs)} of {len(one.outcome.pairs)} pairs"]
    for side, name in enumerate(SIDES):
        found = [pair[side][1] for pair in one.pairs]
        known = statistics.fmean(each.explained for each in found)
        slow = statistics.fmean(each.traced_seconds / each.step_seconds for each in found)
        lines.append(
            f"{name}: {known:.1%} of the time is of known kinds; the profiled process took {one.profiled[side]:.2f} "
            f"times the row's step, and {slow:.2f} times that while it was traced; {found[0].proof}"
        )
        unknown = {operation: seconds for each in found for operation, seconds in each.unknown.items()}
        if unknown:
            longest = sorted(unknown, key=lambda operation: -unknown[operation])[:5]
            told = (f"{operation} {_seconds(unknown[operation])}" for operation in longest)
            lines.append(f"{name}: of no known kind: {', '.join(told)}")
        lines += dict.fromkeys(f"{name}: {note}" for each in found for note in each.notes)
    return lines


def _roofs(one: Explained, shares: Sequence[Share]) -> Table:
    """Return which ceiling bounds each kind of work, and how much of it is reached."""
    lines = [[share.name, *one.roofs(share.name)] for share in shares]
    title = ["binding ceiling, matrix products (compute) or copies (memory), and the share of it reached"]
    return Table(["kind of work", *SIDES], [line for line in lines if any(line[1:])], right=(1, 2), title=title)


def memory(one: Explained) -> Table:
    """Return what memory is for on both sides."""
    both = [found.memory for _, found in one.pairs[0]]
    lines = [[name, *(_mebibytes(side.get(name)) for side in both)] for name in profile.MEMORY]
    title = ["memory; gradients and activations are among the temporaries"]
    return Table(["MiB", *SIDES], [line for line in lines if any(line[1:])], right=(1, 2), title=title)


def _mebibytes(count: int | None) -> str:
    return "" if count is None else f"{count / 2**20:.3g}"


def compilation(one: Explained) -> Table:
    """Return how long what took longest to compile took on each side, by phase, and each of it."""
    sides = [found.programs for _, found in one.pairs[0]]
    phases = dict.fromkeys(phase for side in sides for program in side for phase in program.seconds)
    lines = [
        [phase, *(_seconds(sum(program.seconds.get(phase, 0.0) for program in side)) for side in sides)]
        for phase in phases
    ]
    notes = [
        f"{name}: {', '.join(f'{each.name} {_seconds(sum(each.seconds.values()))}' for each in side)}"
        for name, side in zip(SIDES, sides, strict=True)
        if side
    ]
    title = [f"compiling the {profile.COSTLIEST} costliest programs per side; XLA does not break out autotuning"]
    return Table(["phase", *SIDES], lines, notes, right=(1, 2), title=title)


def _table(one: Explained, shares: Sequence[Share], head: str, title: Sequence[str], most: int | None = None) -> Table:
    """Return the ``shares`` of a ratio, at most so many of the large ones and all others together."""
    large = [s for s in shares if any(part >= SMALL * step for part, step in zip(s.seconds, one.steps, strict=True))]
    lines = [_line(share, one.log) for share in large[:most]]
    others = [share for share in shares if share not in large[:most]]
    if others:
        rest = Share(
            f"{len(others)} others",
            (sum(s.seconds[0] for s in others), sum(s.seconds[1] for s in others)),
            [sum(logs) for logs in zip(*(s.logs for s in others), strict=True)],
            one.sessions,
        )
        lines.append(_line(rest, one.log))
    columns = [head, *SIDES, "x JAX / PyTorch", "of the difference"]
    return Table(columns, lines, right=(1, 2, 3, 4), title=title)


def _line(share: Share, whole: float) -> list[str]:
    factor = share.factor
    said = f"{math.exp(share.log):.3f}" + (f" [{factor.low:.3f}, {factor.high:.3f}]" if factor else "")
    part = _of_difference(share, whole).strip(", ").partition(" ")[0]
    return [share.name, *(_seconds(each) for each in share.seconds), said, part]


def _seconds(seconds: float) -> str:
    if not seconds:
        return "-"
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def _traces(runs: Sequence[Run]) -> list[str]:
    """Return where the traces are and what shows them."""
    folders = [profile.path(run.folder, 0).parent for run in runs]
    places = [f"traces       {os.path.relpath(folder)}" for folder in folders if folder.is_dir()]
    return [*places, "ui.perfetto.dev opens *.json.gz of either side; TensorBoard's profile plugin reads JAX's folders"]
