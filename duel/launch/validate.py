"""The parity certificates: both sides of each benchmark as jobs, compared as soon as both have ended."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from duel import certificate
from duel.catalogue import FRAMEWORK_DEFAULT, FRAMEWORKS, VALIDATE
from duel.certificate import VERIFIED
from duel.errors import UserError
from duel.job import Job
from duel.launch import jobs, pretrained, state, submit
from duel.launch.cluster import Cluster
from duel.options import SAFETENSORS
from duel.record import CANCELLED, FINISHED, TERMINAL
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
    whose sides did not finish gets no certificate, and its error is said. Raises UserError as ``submit.launch`` does.
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
                verdicts.append(not lost and _certify(sides, results, say))
        return not waiting

    jobs.follow(results, runs, until)
    results.merge()
    return all(verdicts)


def prove_missing(runs: list[Run], cluster: Cluster, results: Results, say: Say) -> None:
    """Validate what the finished rows of ``runs`` have measured and no certificate holds for.

    Of a run that somebody cancelled no report is waited for.
    """
    wanted = {
        (
            str(row.benchmark),
            str(row.size),
            str(row.weights) if str(row.weights).endswith(SAFETENSORS) else None,
            row.target,
        )
        for run in runs
        if run.status()["state"] != CANCELLED
        for row in map(results.with_parity, run.rows())
        if row.status == FINISHED and row.parity != VERIFIED and row.precision != FRAMEWORK_DEFAULT  # never compared
    }
    for benchmark, size, weights, target in sorted(wanted, key=str):
        say(
            f"\nno certificate holds for {benchmark} in size {size}: without one nothing is compared, so it is made now"
        )
        validate([benchmark], size, weights, target, cluster, results, say)


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
    for failure in found["failures"][:MOST_FAILURES]:
        say(f"    {failure}")
    if len(found["failures"]) > MOST_FAILURES:
        say(f"    ... all {len(found['failures'])} of them: {file}")
    return bool(found["passed"])


def _read(file: Path) -> dict[str, Any] | None:
    try:
        return certificate.read(file)
    except UserError:  # damaged or of another version: it is replaced
        return None
