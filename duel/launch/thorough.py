"""The thorough check of a target: small jobs of everything it can do, each on its own, and a table of what works.

Precisions with their canaries, every switch with its proof, memory, NVML and energy, two devices, the profiler, and a
pair of four benchmarks. A job that fails ends nothing but itself. What was found is kept per target in
results/doctor/<target>.json, with a bundle of all evidence beside it, and a submission heeds it.
"""

import contextlib
import dataclasses
import json
import re
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from duel import ROOT, files, modes, profile
from duel.catalogue import (
    BENCHMARKS,
    FRAMEWORK_DEFAULT,
    FRAMEWORKS,
    MANY,
    PAIRED,
    PER_SAMPLE,
    PRECISIONS,
    TRAIN,
    TRAIN_MANY,
    USE_CASES,
)
from duel.comparability import judged
from duel.errors import UserError
from duel.files import Damaged, utc, write_atomically
from duel.job import Job
from duel.launch import manage, preflight, submit
from duel.launch.schema import Cluster, Target
from duel.modes import DEFAULT
from duel.record import Row
from duel.results import Results, Run
from duel.states import CANCELLED, FINISHED, LOST, SKIPPED
from duel.switches import AS_PASSED, SWITCHES
from duel.table import evidence
from duel.tries import counted

# Opacus, which no environment must have; switches of all kinds of devices where a target does not say which it has.
NOT_THERE = re.compile("the library is not installed|switch [a-z_0-9]+ does not apply to|is not a value of")
WORKS, LIMITED, BROKEN, ABSENT = "works", "works with a limit", "BROKEN", "not there"
# A row that ended so shows nothing.
UNTRIED = ("told to end", "warned", "time limit", "preempted", "infrastructure", "cancelled", "never ran")
TIME = "--time=00:05:00"
PAIRS = ("mnist", "resnet50", "bert", "gcn")
SHOWN_WITH = ("resnet50", "bert", "mobilenet_v3_small", "gcn", "mnist")  # a switch is tried with the first it suits
# What a probe that may be denied measures, by what it is called in the table.
PROBES = {
    "NVML: clock": "clock_mhz",
    "NVML: memory": "device_process_bytes",
    "energy": "joules_per_item",
    "memory": "peak_memory_bytes",
    "memory errors": "ecc_errors",
}

Say = Callable[[str], None]


@dataclass(frozen=True)
class Trial:
    """One thing to try, as a job: ``what`` it shows of which side."""

    what: str
    job: Job


@dataclass(frozen=True)
class Finding:
    """What became of a trial: ``outcome``, why in words, and the run that shows it."""

    what: str
    framework: str
    outcome: str
    why: str = ""
    run_id: str = ""


@dataclass(frozen=True)
class Report:
    """Everything that was found of a target, and of which environment and driver."""

    target: str
    checked: str
    driver: str
    versions: dict[str, str]
    findings: list[Finding] = field(default_factory=list)


def trials(name: str, target: Target) -> list[Trial]:
    """Return what to try on a target; only the frameworks that have an interpreter there."""
    sides = [framework for framework in FRAMEWORKS if getattr(target.python, framework) is not None]
    kind = target.device
    found = []

    def job(framework: str, benchmark: str, use_case: int, precision: str = "fp32", **more: object) -> Job:
        made = Job(framework, benchmark, use_case, "smoke", precision, None, name, size="tiny")
        return dataclasses.replace(made, changes=(TIME,), **more)  # type: ignore[arg-type]  # mypy takes one type for all fields

    for framework in sides:
        for policy in PRECISIONS.values():
            if policy.name != FRAMEWORK_DEFAULT and (kind is None or kind in policy.device_kinds):
                found.append(Trial(f"precision {policy.name}", job(framework, "cifar10_resnet18", TRAIN, policy.name)))
        for what, mode, benchmark, use_case in _switches(framework, kind):
            precision = "bf16" if what.startswith("switch attention") else "fp32"  # several kernels take 16 bits only
            products = ("clipped_sum",) if use_case == PER_SAMPLE else ()
            found.append(Trial(what, job(framework, benchmark, use_case, precision, mode=mode, products=products)))
        if target.nodes * target.devices_per_node[-1] > 1:
            nodes = 1 if target.devices_per_node[-1] > 1 else 2
            two = job(framework, "mnist", TRAIN_MANY, nodes=nodes, devices_per_node=2 // nodes)
            found.append(Trial("two devices", two))
        found.append(Trial("profiler", job(framework, "mnist", TRAIN, profile=True)))
    if len(sides) == len(FRAMEWORKS):
        found += [Trial(f"pair of {benchmark}", job(PAIRED, benchmark, TRAIN)) for benchmark in PAIRS]
    return found


def _switches(framework: str, kind: str | None) -> list[tuple[str, str, str, int]]:
    """Return each value of each switch that differs from the default: its name, mode, benchmark and use case."""
    found = []
    for switch in SWITCHES:
        if switch.framework != framework or (kind is not None and kind not in switch.device_kinds) or switch.counts:
            continue
        use_case = PER_SAMPLE if switch.modules == ("per_sample_gradients",) else TRAIN
        if USE_CASES[use_case].module not in switch.modules:
            continue
        suited = [name for name in SHOWN_WITH if switch.suits(BENCHMARKS[name])]
        if not suited and len(switch.tried) == 1:  # there is another of this name, with more values
            continue
        benchmark = suited[0]
        for value in switch.values[1:]:
            needs = f"+{switch.needs}" if switch.needs else ""
            turned = f"+{switch.name}" if value == "on" else f"-{switch.name}" if value == "off" else ""
            turned = turned or f"+{switch.name}={value}"
            found.append((f"switch {switch.name} {value}", f"{DEFAULT}{needs}{turned}", benchmark, use_case))
    return list(dict.fromkeys(found))


def check(cluster: Cluster, name: str | None, results: Results, say: Say) -> int:
    """Try everything on a target, print what works and keep it. Returns 1 if something is broken.

    A check whose terminal was closed is taken up where it is: its jobs go on without one.
    """
    name, target = cluster.target(name)
    path = file(results, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    begun = path.with_suffix(".runs")
    planned = {trial.job: trial for trial in trials(name, target)}
    runs, refused = _begun(begun, results), dict[Job, str]()
    if runs:
        say(f"following the check that was begun before; to begin another, remove {begun}")
    else:
        say(f"{len(planned)} small jobs on {name}; each is on its own, whatever happens to the others")
        runs, refused = _started(list(planned), cluster, target, results, say)
        write_atomically(begun, "\n".join(run.id for run in runs) + "\n")
    manage.wait(runs, results)
    started = {run.launch().job: run for run in runs}
    found: list[Finding] = []
    for job, trial in planned.items():
        if job in started:
            found += _judged(trial, started[job], results)
        else:
            why = refused.get(job, "not started by this check")
            found += [Finding(trial.what, framework, ABSENT, why) for framework in job.frameworks]
    rows = [row for run in runs for row in run.rows()]
    began = min((row.started for row in rows if row.started), default=utc())  # a check may be taken up much later
    report = Report(name, began, *_environment(rows), found)
    write_atomically(path, json.dumps(dataclasses.asdict(report), indent=1) + "\n")
    bundle = _bundle(path, runs)
    begun.unlink()
    for line in _lines(report):
        say(line)
    say(f"kept in {path.relative_to(results.folder.parent)}; all evidence to send in: {bundle.name} beside it")
    return 1 if any(one.outcome == BROKEN for one in found) else 0


def _begun(path: Path, results: Results) -> list[Run]:
    """Return the runs of a check that was not followed to its end; none if some of them are gone."""
    runs = [results.run(line) for line in path.read_text().split()] if path.exists() else []
    return runs if all(run.folder.exists() for run in runs) else []


def _started(
    jobs: list[Job], cluster: Cluster, target: Target, results: Results, say: Say
) -> tuple[list[Run], dict[Job, str]]:
    """Start each of ``jobs`` that the target takes; return their runs, and why it refuses the others."""
    try:
        return submit.launch(jobs, cluster, results, say), {}
    except submit.RefusedError as error:  # by Slurm, when the others were on their way
        return error.runs, {}
    except UserError:
        refused = {job: f"refused: {why}" for job in jobs if (why := _refusal(job, cluster, target))}
        if len(refused) in (0, len(jobs)):
            raise
    runs, _ = _started([job for job in jobs if job not in refused], cluster, target, results, say)
    return runs, refused


def _refusal(job: Job, cluster: Cluster, target: Target) -> str:
    """Return why the target, or Slurm, would refuse a job; empty if neither does."""
    try:
        launches = submit.plan([job], target)
        submit.check(launches)
        if target.scheduler == "slurm":
            preflight.plan(launches, cluster)
    except UserError as error:
        return str(error)
    return ""


def _judged(trial: Trial, run: Run, results: Results) -> list[Finding]:
    """Return what became of a trial's rows, and of the probes around the first that finished."""
    found = []
    for row in counted(judged(run.rows(), lambda one: evidence(one, results))):
        framework = str(row.framework)
        if row.status == SKIPPED or NOT_THERE.search(str(row.cause)):
            found.append(Finding(trial.what, framework, ABSENT, str(row.cause), run.id))
        elif row.status in (CANCELLED, LOST) or row.why in UNTRIED:
            found.append(Finding(trial.what, framework, ABSENT, f"not tried: {row.cause or row.status}", run.id))
        elif row.status != FINISHED:
            found.append(Finding(trial.what, framework, BROKEN, row.cause or str(row.status), run.id))
        else:
            found.append(Finding(trial.what, framework, *_limit(trial, row, run), run.id))
            found += _probed(row, run) if trial.what == "precision fp32" else []
    return found


def _limit(trial: Trial, row: Row, run: Run) -> tuple[str, str]:
    if row.rung:
        return LIMITED, f"XLA's autotuner crashed: it works on rung {row.rung}"
    if trial.job.profile:
        made = profile.read(run.folder, row.row or 0)
        if made is None or made.why:
            return LIMITED, f"no profile: {made.why if made else 'none was written'}"
    if trial.job.framework == PAIRED and not str(row.comparable).startswith("COMPARABLE"):
        return LIMITED, str(row.comparable or "not compared")
    turned = trial.what.removeprefix("switch ").split()[0]  # one that did not take has failed its row
    if trial.what.startswith("switch ") and json.loads(row.proofs or "{}").get(turned) == AS_PASSED:
        return WORKS, "as passed: nothing observable shows that it was in force"
    return WORKS, f"{row.device_name}, {row.framework} {row.framework_version}"


def _probed(row: Row, run: Run) -> list[Finding]:
    """Return what the conditions around a row could be read from; a probe that was denied took nothing down."""
    found = []
    for what, column in PROBES.items():
        value, why = getattr(row, column), row.missing.get(column, "")
        short = re.search(r"a window of [\d.]+ s", why) is not None  # smoke is too short for energy, which is there
        outcome = WORKS if value is not None or short else LIMITED
        found.append(Finding(what, str(row.framework), outcome, "" if outcome == WORKS else why, run.id))
    return found


def _environment(rows: list[Row]) -> tuple[str, dict[str, str]]:
    """Return the driver, and the version of each framework, that rows reported."""
    driver = next((row.driver for row in rows if row.driver), "")
    return driver, {str(row.framework): row.framework_version for row in rows if row.framework_version}


def _bundle(path: Path, runs: list[Run]) -> Path:
    """Pack the folders of all runs, without Weights & Biases' own files."""
    bundle = path.with_suffix(".tar.gz")
    with tarfile.open(bundle, "w:gz") as archive:
        archive.add(path, path.name)
        for run in runs:
            archive.add(run.folder, f"runs/{run.id}", filter=lambda one: None if "/wandb" in one.name else one)
    return bundle


def _lines(report: Report) -> list[str]:
    lines = [f"{report.target}: driver {report.driver or 'none'}, {report.versions}"]
    for one in report.findings:
        log = f" ('python main.py logs {one.run_id}')" if one.outcome == BROKEN else ""
        lines.append(f"{one.outcome:18}  {one.framework:8} {one.what}{f': {one.why}' if one.why else ''}{log}")
    return lines


def file(results: Results, target: str) -> Path:
    return results.folder / "doctor" / f"{target}.json"


def known(results: Results, target: str) -> Report | None:
    """Return what is kept of a target, None if nothing is. Raises UserError if it is damaged."""
    path = file(results, target)
    try:
        return files.fitting(files.read_object(path), Report, path.name)
    except FileNotFoundError:
        return None
    except Damaged as error:
        raise UserError(f"{path}: {error}; 'main.py doctor --target {target} --thorough' makes a new one") from None


def remarks(job: Job, target: Target, results: Results) -> list[str]:
    """Return what the last thorough check of its target says against ``job``, and whether that check is out of date."""
    try:
        report = known(results, job.target)
    except UserError as error:
        return [str(error)]
    if report is None:
        return []
    turned = _turned(job, job.device or target.device)
    wanted = {f"precision {job.precision}", *(f"switch {name} {value}" for name, value in turned)}
    wanted |= {"profiler"} if job.profile else set()
    wanted |= {"two devices"} if job.use_case in MANY else set()
    wanted |= {f"pair of {job.benchmark}"} if job.framework == PAIRED else set()
    found = [
        f"{one.what} is broken on {job.target} for {one.framework}: {one.why} (doctor --thorough, {report.checked})"
        for one in report.findings
        if one.outcome == BROKEN and one.framework in job.frameworks and one.what in wanted
    ]
    if changed := [name for name in job.frameworks if _installed(getattr(target.python, name)) > report.checked]:
        sides = " and ".join(changed)
        found.append(f"the thorough check of {job.target} is older than the environment of {sides}: check it again")
    return found


def _turned(job: Job, kind: str | None) -> set[tuple[str, str]]:
    """Return the switches that ``job`` turns: those that are named and, on a known ``kind`` of device, the built-in
    ones of mode tuned.
    """
    found = set(modes.asked_for(job.mode)[1].items())
    if kind is not None and modes.is_tuned(job.mode):
        for framework in job.frameworks:
            here = (framework, job.benchmark, job.use_case, job.precision, kind)
            with contextlib.suppress(UserError):  # the job says it itself
                found |= modes.settings(job.mode, *here).items() - modes.settings(DEFAULT, *here).items()
    return found


def _installed(python: str | None) -> str:
    """Return when something was last installed where ``python`` is, as a time stamp; empty if this is not visible."""
    folders = (ROOT / python).parent.parent.glob("lib/python*/site-packages") if python else ()
    return max((utc(folder.stat().st_mtime) for folder in folders), default="")


def outdated(row: Row, results: Results) -> str:
    """Return that the thorough check of a row's target is of another driver; empty if not, or without one."""
    try:
        report = known(results, str(row.target))
    except UserError as error:
        return str(error)
    if report is None or not row.driver or row.driver == report.driver:
        return ""
    return f"the thorough check is of driver {report.driver or 'none'}, now it is {row.driver}: check it again"
