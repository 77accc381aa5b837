"""The parity certificates: both sides of each benchmark as jobs, compared as soon as both have ended."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from duel import certificate
from duel.catalogue import FRAMEWORKS, VALIDATE
from duel.errors import UserError
from duel.job import Job
from duel.launch import jobs, pretrained, state, submit
from duel.launch.cluster import Cluster
from duel.record import FINISHED, TERMINAL
from duel.report import parity
from duel.results import Results, Run, write_atomically

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
    """Write one certificate per benchmark and say how it stands. True if both sides compute the same in all of them.

    ``weights`` are to be computed with, as ``pretrained.resolve`` takes them; None for random ones. A benchmark one of
    whose sides did not finish gets no certificate; its error is said, and in what both sides differ of what they had
    computed. Raises UserError as ``submit.launch`` does.
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
    verdicts = []
    say(f"\n{parity.heading()}")

    def until(seen: state.Look) -> bool:
        ended = {status["run_id"]: status for status in seen.statuses if status["state"] in TERMINAL}
        for benchmark, sides in list(waiting.items()):
            if all(run.id in ended for run in sides.values()):
                del waiting[benchmark]
                lost = {f: ended[run.id] for f, run in sides.items() if ended[run.id]["state"] != FINISHED}
                for framework, status in lost.items():
                    said = f"{framework} {status['state']}: {state.describe(status)}"
                    say(f"{benchmark:18}  no certificate: {said}; 'python main.py logs {status['run_id']}'")
                if lost:
                    _say_failures(parity.unfinished(sides), "", say)
                verdicts.append(not lost and _certify(sides, results, say))
        return not waiting

    jobs.follow(results, runs, until)
    results.merge()
    return all(verdicts)


def _certify(sides: dict[str, Run], results: Results, say: Say) -> bool:
    """Compare, write the certificate, say its line and what failed; what was compared is not kept."""
    found = parity.certify(sides)
    file = certificate.path(results.folder, found["benchmark"], found["size"], found["device_kind"])
    file.parent.mkdir(exist_ok=True)
    before = _read(file)
    if before and all(before[key] == found[key] for key in ("passed", "code_sha256", "versions")):
        # Nothing but the weights differs: what was proved for others still is.
        found["weights_sha256"] = sorted({*before["weights_sha256"], *found["weights_sha256"]})
    write_atomically(file, json.dumps(found, indent=1) + "\n")
    for run in sides.values():
        run.parity.unlink()
    say(parity.line(found))
    _say_failures(found["failures"], f" of them: {file}", say)
    return bool(found["passed"])


def _say_failures(failures: list[str], where: str, say: Say) -> None:
    for failure in failures[:MOST_FAILURES]:
        say(f"    {failure}")
    if len(failures) > MOST_FAILURES:
        say(f"    ... all {len(failures)}{where}")


def _read(file: Path) -> dict[str, Any] | None:
    try:
        return certificate.read(file)
    except UserError:  # damaged or of another version: it is replaced
        return None
