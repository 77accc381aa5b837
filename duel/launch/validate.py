"""Parity certificates: run both sides of each benchmark as jobs, and compare them once both have ended."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

from duel import certificate, terminal
from duel.catalogue import FRAMEWORKS, VALIDATE
from duel.errors import UserError
from duel.files import write_atomically
from duel.job import Job
from duel.launch import display, manage, pretrained, submit
from duel.launch.schema import Cluster
from duel.launch.views import RunView, Snapshot
from duel.report import parity
from duel.results import Results, Run
from duel.states import FINISHED
from duel.table import update

PRESETS = {"tiny": "smoke", "full": "standard"}
MOST_FAILURES = 10

Say = Callable[[str], None]


def validate(
    benchmarks: Iterable[str],
    size: str,
    weights: str | None,
    target: str | None,
    cluster: Cluster,
    results: Results,
    say: Say,
) -> bool:
    """Write one certificate per benchmark and report it. Return True if both sides compute the same in all of them.

    ``weights`` is as for ``pretrained.resolve``; None for random ones. A benchmark with an unfinished side gets
    no certificate, but a report of its error and of how the sides differ in what both had computed. Raises UserError
    as ``submit.launch`` does.
    """
    name, described = cluster.target(target)
    planned = []
    for benchmark in benchmarks:
        file = pretrained.resolve(weights, benchmark, size, name, described, results) if weights else None
        for framework in FRAMEWORKS:
            planned.append(Job(framework, benchmark, VALIDATE, PRESETS[size], "fp32", None, name, weights=file))
    runs = submit.launch(planned, cluster, results, say)
    waiting: dict[str, dict[str, Run]] = {}
    for job, run in zip(planned, runs, strict=True):
        waiting.setdefault(job.benchmark, {})[job.framework] = run
    verdicts: list[bool] = []

    with display.live(phases=False) as show:

        def until(seen: Snapshot) -> bool:
            open_ones = {run.id for sides in waiting.values() for run in sides.values()}
            show(seen.only([one for one in seen.runs if one.id in open_ones]))
            ended = {one.id: one for one in seen.runs if one.ended}
            for benchmark, sides in list(waiting.items()):
                if all(run.id in ended for run in sides.values()):
                    del waiting[benchmark]
                    if not verdicts and not _narrow():
                        say(f"\n{parity.heading()}")
                    verdicts.append(_verdict(benchmark, sides, ended, results, say))
            return not waiting

        manage.follow(results, runs, until)
    update(results)
    return all(verdicts)


def _verdict(benchmark: str, sides: dict[str, Run], ended: dict[str, RunView], results: Results, say: Say) -> bool:
    """Report the result of the ``sides`` of a benchmark, which have ``ended``. Return True if both compute the same."""
    lost = {framework: ended[run.id] for framework, run in sides.items() if ended[run.id].state != FINISHED}
    if not lost:
        return _certify(sides, results, say)
    for framework, one in lost.items():
        end = f"{framework} {one.state}: {display.describe(one)}"
        say(f"{benchmark:18}  no certificate: {end}; 'python main.py logs {one.id}'")
    _say_failures(parity.unfinished(sides), "", say)
    return False


def _certify(sides: dict[str, Run], results: Results, say: Say) -> bool:
    """Compare the sides, write the certificate, report it and its failures; the compared arrays are deleted."""
    found = parity.certify(sides)
    file = certificate.path(results.folder, found["benchmark"], found["size"], found["device_kind"])
    file.parent.mkdir(exist_ok=True)
    before = _read(file)
    if before and all(before[key] == found[key] for key in ("passed", "code_sha256", "versions")):
        # Nothing but the weights differs: what was proved for other weights still holds.
        found["weights_sha256"] = sorted({*before["weights_sha256"], *found["weights_sha256"]})
    write_atomically(file, json.dumps(found, indent=1) + "\n")
    for run in sides.values():
        run.parity.unlink()
    # Through ``say``: the live table would overwrite the output of another console.
    say(parity.paragraph(found, terminal.console().width) if _narrow() else parity.line(found))
    _say_failures(found["failures"], f" of them: {file}", say)
    return bool(found["passed"])


def _narrow() -> bool:
    """Return whether the terminal is narrower than the table."""
    return terminal.is_terminal() and terminal.console().width < len(parity.heading())


def _say_failures(failures: list[str], where: str, say: Say) -> None:
    for failure in failures[:MOST_FAILURES]:
        say(f"    {failure}")
    if len(failures) > MOST_FAILURES:
        say(f"    ... all {len(failures)}{where}")


def _read(file: Path) -> certificate.Certificate | None:
    try:
        return certificate.read(file)
    except UserError:  # damaged or from another version: it is replaced
        return None
