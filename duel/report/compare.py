"""What ``compare`` prints of a pair: the verdict, rows side by side, the basis, and where everything is stored."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from duel import tries
from duel.catalogue import FRAMEWORKS, USE_CASES
from duel.certificate import VERIFIED
from duel.comparability import COMPARABLE, judged
from duel.modes import DEFAULT
from duel.record import Row
from duel.report import grown, learned, training_table
from duel.report.command import paired_command
from duel.report.pairs import Outcome, outcomes
from duel.report.sessions import over_sessions
from duel.report.tables import as_text, point, tables, varied_of
from duel.report.trials import is_search
from duel.report.trials import table as trials
from duel.report.waterfall import waterfalls
from duel.results import Results, Run
from duel.states import FINISHED, TERMINAL
from duel.table import evidence, with_parity
from duel.terminal import Table
from duel.variables import recorded

CURVE_STEPS = 50
MOST_LOSS = 1e300  # beyond it an integer may not fit a float; the comparison leaves out NaN, too
SAME_COMPUTATION = ("pair", "weights_sha256", "data_sha256", "parameters", "device_name", "host")
LONGEST_REASON = 60  # characters of a reason in a verdict; the notes have all of it


@dataclass(frozen=True)
class Group:
    """The runs of a pair through all attempts, their judged rows, and the outcome of each point."""

    runs: list[Run]
    rows: list[Row]  # without those whose files are damaged
    damaged: list[Row]
    found: list[Outcome]

    @property
    def what(self) -> str:
        """What was measured, without what varies between points."""
        row = self.rows[0]
        parts = [f"{row.benchmark} ({row.size}, {row.precision})", USE_CASES[row.use_case or 0].name]
        varied = varied_of(self.rows)
        if row.product and "product" not in varied:
            parts.append(row.product)
        if row.mode != DEFAULT:
            parts.append(f"mode {row.mode}")
        batch_size = next((row.batch_size for row in self.rows if row.batch_size), None)
        if batch_size and "batch_size" not in varied:
            parts.append(f"batch size {batch_size}")
        if (row.device_count or 1) > 1 and "device_count" not in varied:
            parts.append(f"{row.device_count} devices")
        return ", ".join(parts)

    @property
    def verdict(self) -> str:
        """The verdict in one short sentence."""
        if not self.found:
            sides = ", ".join(dict.fromkeys(str(row.framework) for row in self.rows))
            return f"{self.what}: nothing to compare, only rows of {sides}"
        if len(self.found) == 1:
            return f"{self.what}: {_short(self.found[0])}"
        kinds = Counter(outcome.kind for outcome in self.found)
        first, *others = kinds.items()
        many = f"all {first[1]}" if not others else f"{first[1]} of {len(self.found)}"
        text = ", ".join([f"{first[0]} at {many} points", *(f"{kind} at {count}" for kind, count in others)])
        text = " ".join([text, *dict.fromkeys(outcome.reach for outcome in self.found if outcome.reach)])
        ratios = [float(outcome.ratio.partition(" ")[0]) for outcome in self.found if outcome.shown]
        if ratios:
            text += f"; JAX / PyTorch {' to '.join(dict.fromkeys((f'{min(ratios):.3g}', f'{max(ratios):.3g}')))}"
        return f"{self.what}: {text}"


def combined(groups: Sequence[Group]) -> list[tuple[str, Outcome]]:
    """Return the outcomes over sessions of points that several ``groups`` share, each with its description."""
    found = over_sessions([outcome for group in groups for outcome in group.found])
    several = [outcome for outcome in found if len({one.group for one, _ in outcome.pairs}) > 1 and outcome.shown]
    return [(Group([], [row for pair in outcome.pairs for row in pair], [], []).what, outcome) for outcome in several]


def _short(outcome: Outcome) -> str:
    """Return the verdict in one line; a reason may be cut, figures are not."""
    text = outcome.short
    return text if outcome.shown or len(text) <= LONGEST_REASON else f"{text[: LONGEST_REASON - 1]}…"


def remarks(rows: list[Row]) -> list[str]:
    """Return what a reader must know before comparing these rows."""
    done = [row for row in rows if row.status == FINISHED]
    if len({row.framework for row in done}) < 2:
        return []
    points: dict[Any, list[Row]] = {}
    for row in tries.counted(done):
        points.setdefault((point(row), row.repeat), []).append(row)
    differing = [n for n in SAME_COMPUTATION if any(len({getattr(row, n) for row in p}) > 1 for p in points.values())]
    lines = [f"NOT the same computation: {', '.join(differing)} differ."] if differing else []
    if not differing:
        lines.append("Same initial weights, same samples in the same order (hashes agree).")
    if len({row.execution == "eager" for row in done}) > 1:
        ways = ", ".join(dict.fromkeys(f"{row.framework} {row.execution}" for row in done))
        lines.append(f"Execution differs ({ways}): this shows what a newcomer gets, not which framework is faster.")
    if all(row.parity == VERIFIED for row in done):
        lines.append("Proved to be the same computation (results/parity).")
    tuned = dict.fromkeys(f"{row.framework}: {row.tuning}" for row in done if row.tuning)
    lines += [f"Tuned, {text}." for text in tuned]
    switches = dict.fromkeys(f"{row.framework}: {row.switches}" for row in done if row.switches)
    lines += [f"Switches of {text}." for text in switches]
    variables = dict.fromkeys(f"{row.framework}: {_assigned(row)}" for row in done if recorded(row.variables))
    return lines + [f"Variables of {text}." for text in variables]


def _assigned(row: Row) -> str:
    return " ".join(f"{name}={value}" for name, value in recorded(row.variables).items())


def counted(texts: Sequence[tuple[str, str]], names: str) -> list[str]:
    """Return a line per text with its subject or, if several share it, their count and plural ``names``."""
    about: dict[str, list[str]] = {}
    for what, text in texts:
        if what not in about.setdefault(text, []):
            about[text].append(what)
    lines = []
    for text, each in about.items():
        several = f"{len(each)} {names}" if len(each) > 1 else each[0]
        lines.append(f"{several}: {text}" if several else text)
    return lines


def notes(group: Group) -> list[str]:
    """Return the basis of the verdicts of ``group``, and what a reader must know about its rows."""
    damaged = [f"{row.run_id}, row {row.row}: {row.cause}" for row in group.damaged]
    compared = {point(outcome.row) for outcome in group.found}
    alone = [row for row in group.rows if row.cause and point(row) not in compared]
    causes = [(_at(row, varied_of(group.rows)), f"{row.framework} {row.status}: {row.cause}") for row in alone]
    damaged += counted(causes, "points")
    return standing(group.found, group.rows) + damaged + remarks(group.rows) + curve_remark(group.runs)


def _at(row: Row, varied: Sequence[str]) -> str:
    """Return which of several points ``row`` belongs to."""
    return ", ".join(f"{name.replace('_', ' ')} {getattr(row, name)}" for name in varied)


def standing(found: list[Outcome], rows: list[Row]) -> list[str]:
    """Return the basis of the verdicts of ``found`` among ``rows``, or why there are none; shared notes are counted."""
    texts: list[tuple[str, str]] = []
    varied = varied_of(rows)
    for outcome in found:
        row = outcome.row
        what = _at(row, varied)
        if outcome.shown or varied or _short(outcome) != outcome.short:
            # The table of many points has the intervals and the noise floors.
            intervals = f"95 % intervals {outcome.reach}, from {len(outcome.pairs)} pairs each. {COMPARABLE}"
            texts.append((what, intervals if varied and outcome.found else outcome.basis))
        if len(outcome.pairs) > 1:
            each = (" | ".join(as_text("throughput", side.throughput, "") for side in p) for p in outcome.pairs)
            texts.append((what, f"pairs in {row.throughput_unit}, jax | pytorch: {', '.join(each)}"))
        tries = [(r.framework, r.repeat) for r in rows if (r.group, r.point) == (row.group, row.point)]
        if more := len(tries) - len(set(tries)):
            texts.append((what, f"not counted: {more} failed or disturbed, then measured again"))
        texts += [(what, f"far off: {name}") for name in outcome.far]
        if outcome.break_even_steps is not None:
            texts.append((what, f"the slower start is made up for after {outcome.break_even_steps:,.0f} steps"))
    return [*counted(texts, "points"), *dict.fromkeys(text for text, _ in sharpness(found))]


def commands(group: Group, default_target: str | None) -> list[str]:
    """Return commands to copy that would strengthen the verdicts of ``group``."""
    lines = []
    if indicative := [pair for outcome in group.found if outcome.indicative is not None for pair in outcome.pairs]:
        lines.append(f"for a verdict: {paired_command(group.runs[-1], indicative, default_target)}")
    return lines + [f"for a sharper proof: {command}" for _, command in sharpness(group.found) if command]


def sharpness(found: list[Outcome]) -> list[tuple[str, str]]:
    """Return how sharp the proof of ratios without a valid float64 certificate is, and the command that sharpens it."""
    lines = []
    for row in (row for outcome in found if outcome.shown for pair in outcome.pairs for row in pair):
        if row.parity != VERIFIED:
            why, _, command = str(row.parity).removeprefix("unverified: ").partition("; run ")
            why = why.replace("no certificate", "no float64 certificate")
            lines.append((f"{why}: the proof is as sharp as {row.precision} rounding", command.strip("'")))
    return list(dict.fromkeys(lines))


def curve_remark(runs: list[Run]) -> list[str]:
    """Return how far apart the opening losses of two runs are, relative to the larger loss of each step."""
    if sorted(run.id.partition("_")[0] for run in runs) != sorted(FRAMEWORKS):  # attempts, or both sides in one run
        return []
    curves = [_losses(run) for run in runs]
    if not all(curves):
        return []
    apart = [abs(a - b) / (max(abs(a), abs(b)) or 1.0) for a, b in zip(*curves, strict=False)][:CURVE_STEPS]
    first, worst = apart[0], max(apart)
    return [f"Relative loss difference: {first:.1e} at step 1, at most {worst:.1e} in the first {len(apart)} steps."]


def _losses(run: Run) -> list[float]:
    """Return the opening losses of the first row in metrics.jsonl, up to one that is no number or diverges."""
    events = [event for event in run.events()[0] if event["event"] == "loss"]
    found = [event.get("loss") for event in events if event.get("row") == events[0].get("row")]
    usable: list[float] = []
    for loss in found:
        if not isinstance(loss, int | float) or not abs(loss) < MOST_LOSS:
            break
        usable.append(float(loss))
    return usable


def report(runs: list[Run], results: Results, default_target: str | None = None) -> list[Table | str]:
    """Return what ``compare`` prints, and ``--wait`` at its end: the verdict of each pair, the tables, notes, and where
    everything is stored. The command for a verdict names its target unless it is ``default_target``."""
    every = groups(runs, results)
    searches = [group for group in every if is_search(group.rows)]
    fitted = [group for group in every if grown.is_fit(group.rows)]
    trained = [group for group in every if learned.is_training(group.rows)]
    others = [group for group in every if group not in [*searches, *fitted, *trained]]
    shown = [group for group in others if group.rows]
    together = combined(shown)
    head = [f"{what}: {outcome.short}" for what, outcome in together] + [group.verdict for group in shown]
    parts: list[Table | str] = ["", Table([], [], _unfinished(runs), title=head)]
    for group in searches:
        parts += ["", trials(group.rows)]
    for group in fitted:
        parts += ["", grown.table(group.rows)]
    for group in trained:
        parts += ["", training_table.table(group.rows), *learned.on_the_way(group.rows, results.folder)]
        parts += [f"damaged: {row.run_id}, row {row.row}: {row.cause}" for row in group.damaged]
    for group in shown:
        title = [Table([], [], title=[group.what])] if len(shown) > 1 else []
        parts += ["", *title, *tables(group.rows, group.found)]
    texts = [(what, note) for what, outcome in together for note in (outcome.basis, *outcome.far, *outcome.apart)]
    texts += [(group.what if len(others) > 1 and group.rows else "", note) for group in others for note in notes(group)]
    parts += ["", Table([], [], counted(texts, "pairs"))] if texts else []
    parts += dict.fromkeys(command for group in shown for command in commands(group, default_target))
    if lines := waterfalls(over_sessions([outcome for group in others for outcome in group.found])):
        parts += ["", Table([], [], lines)]
    return [*parts, "", *_places(runs, results)]


def groups(runs: list[Run], results: Results) -> list[Group]:
    """Return the groups of ``runs`` that have rows."""
    by_group: dict[str, list[Run]] = {}
    for run in runs:
        by_group.setdefault(run.group, []).append(run)
    return [group for sides in by_group.values() if (group := _judged(sides, results)).rows or group.damaged]


def _judged(runs: list[Run], results: Results) -> Group:
    rows = [with_parity(row, results) for run in runs for row in run.rows()]
    rows = judged(rows, lambda row: evidence(row, results))
    known = [row for row in rows if row.framework]
    return Group(runs, known, [row for row in rows if not row.framework], outcomes(known))


def _places(runs: list[Run], results: Results) -> list[str]:
    """Return where everything is stored, and the commands that show it."""
    lines = [f"CSV          {os.path.relpath(results.csv)}"]
    uploads = {run: run.stored_status().wandb or "Weights & Biases: the run did not get that far" for run in runs}
    times = Counter(uploads.values())
    for run in runs:
        lines.append(f"run folder   {os.path.relpath(run.folder)}")
        lines.append(f"log          python main.py logs {run.id}")
        if times[uploads[run]] == 1:
            lines.append(f"             {uploads[run]}")
    return lines + [f"{count} runs: {text}" for text, count in times.items() if count > 1]


def _unfinished(runs: list[Run]) -> list[str]:
    """Return a line for each run that has not ended, or whose rows are gone."""
    lines = []
    for run in runs:
        state = run.status().state
        if state not in TERMINAL:
            lines.append(f"{run.id} is {state}; 'python main.py logs {run.id} --follow' follows it")
        elif not any(run.rows_folder.glob("*.json")):
            lines.append(f"{run.id} is damaged: {os.path.relpath(run.rows_folder)} holds no rows")
    return lines
