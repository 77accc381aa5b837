"""The thorough check of a target: everything is tried, what is broken is named, and a submission heeds it."""

import dataclasses
import json
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Main

from duel.catalogue import FRAMEWORKS, PAIRED
from duel.errors import UserError
from duel.files import utc
from duel.job import Job
from duel.launch import cluster, doctor, manage, submit, thorough
from duel.launch.schema import Cluster, Target
from duel.launch.thorough import ABSENT, BROKEN, LIMITED, WORKS, Finding, Report, Say, Trial
from duel.modes import settings
from duel.record import Row
from duel.results import Results, Run
from duel.states import FAILED, FINISHED
from duel.status import LaunchRecord, this_process

CLUSTER = cluster.load(ROOT / "cluster.yaml")
H100 = CLUSTER.targets["h100"].model_copy(update={"devices_per_node": [1, 4]})


@pytest.mark.parametrize("kind", ["cpu", "gpu", "tpu", "mps"])
def test_every_trial_is_a_job_that_can_be_planned(kind: str) -> None:
    target = H100.model_copy(update={"device": kind})
    found = thorough.trials("h100", target)
    names = {(trial.what, framework) for trial in found for framework in trial.job.frameworks}
    assert ("profiler", "jax") in names
    assert ("two devices", "pytorch") in names
    assert (("precision tf32", "jax") in names) is (kind == "gpu")
    assert sum(trial.job.framework == PAIRED for trial in found) == 4
    for trial in found:
        assert trial.job.rows()
        for framework in trial.job.frameworks:
            job = trial.job
            try:
                settings(job.mode, framework, job.benchmark, job.use_case, job.precision, kind)
            except UserError as error:
                pytest.fail(f"{trial}: {error}")


def test_a_gpus_switches_are_all_tried() -> None:
    tried = {trial.what for trial in thorough.trials("h100", H100)}
    wanted = ("cuda_graphs on", "max_autotune on", "attention cudnn", "command_buffers off", "autotune 0", "opacus on")
    assert {f"switch {name}" for name in wanted} <= tried


def test_a_target_of_one_side_is_tried_on_that_side() -> None:
    target = H100.model_copy(update={"python": H100.python.model_copy(update={"pytorch": None})})
    assert {framework for trial in thorough.trials("h100", target) for framework in trial.job.frameworks} == {"jax"}


@pytest.mark.full
def test_this_machine_is_checked_and_a_planted_fault_is_named(main: Main, checkout: Path) -> None:
    """A switch that raises: everything else goes on, and the table says where to look."""
    file = checkout / "pytorch" / "training.py"
    text = file.read_text()
    planted = text.replace('"fused": fused or None}', '"fused": fused or None} | ({}[fused] if fused else {})')
    assert planted != text
    file.write_text(planted)
    ran = main("doctor", "--target", "local", "--thorough", timeout=1800)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    broken = [line for line in ran.stdout.splitlines() if line.startswith(BROKEN)]
    assert broken
    words = ("fused_optimizer", "KeyError", "main.py logs")
    assert [line for line in broken if not all(word in line for word in words)] == []
    report = thorough.known(Results(checkout / "results"), "local")
    assert report is not None
    works = {(one.framework, one.what) for one in report.findings if one.outcome == WORKS}
    assert {(framework, "pair of mnist") for framework in FRAMEWORKS} <= works
    assert {(framework, "precision bf16") for framework in FRAMEWORKS} <= works
    assert {(framework, "two devices") for framework in FRAMEWORKS} <= works
    assert ("pytorch", "switch compile on") in works
    assert any(one.what == "energy" and one.outcome == LIMITED for one in report.findings)
    with tarfile.open(checkout / "results" / "doctor" / "local.tar.gz") as archive:
        names = archive.getnames()
    assert "local.json" in names
    assert any(name.endswith("log.txt") for name in names)
    again = main("--benchmark", "mnist", "--use_case", "1", "--mode", "default+fused_optimizer", "--dry_run")
    assert "is broken" not in again.stdout, "a rendered script is no submission"


class Jobs:
    """Stands in for what starts jobs and waits for them: each row of each ends as ``rows`` has it, by what it tries."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rows: dict[str, list[dict[str, Any]]]) -> None:
        self.rows, self.started, self.refused = rows, 0, ""
        monkeypatch.setattr(submit, "launch", self.launch)
        monkeypatch.setattr(manage, "wait", lambda runs, results: True)

    def launch(self, jobs: list[Job], described: Cluster, results: Results, say: Say) -> list[Run]:
        if any(self.refused and self.refused in job.mode for job in jobs):
            raise UserError(f"no {self.refused} here")
        runs = []
        for job in jobs:
            self.started += 1
            run = results.run(f"{job.framework}_{self.started}")
            planned = job.rows()
            run.create(
                planned, owner=this_process(), target="local", script="", launch=LaunchRecord(job=job, pair=run.id)
            )
            ends = next((self.rows[key] for key in self.rows if key in f"{job.mode} {job.precision}"), [{}])
            for number, end in enumerate(ends * len(planned) if len(ends) == 1 else ends):
                row = planned[min(number, len(planned) - 1)]
                row = row.replace(run_id=run.id, row=number, **{"status": FINISHED, "device_kind": "cpu"} | end)
                run.write_row(row)
            runs.append(run)
        return runs


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four trials instead of all."""
    job = Job("jax", "bert", 1, "smoke", "fp32", None, "local", size="tiny")
    other = dataclasses.replace(job, framework="pytorch", benchmark="mnist", use_case=3)
    tried = [
        Trial("precision bf16", dataclasses.replace(job, precision="bf16")),
        Trial("switch donation off", dataclasses.replace(job, mode="default-donation")),
        Trial("switch opacus on", dataclasses.replace(other, mode="default+opacus")),
    ]
    monkeypatch.setattr(thorough, "trials", lambda name, target: tried)


@pytest.mark.usefixtures("few")
def test_each_trial_is_judged_by_its_last_try(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crashed = {"status": FAILED, "cause": "CUDA_ERROR_ILLEGAL_ADDRESS"}
    absent = {"status": FAILED, "cause": "--mode opacus: the library is not installed here; 'make opacus' does it"}
    ended = {"status": FAILED, "cause": "Slurm: its node failed", "why": "infrastructure"}
    began = "2026-11-01T00:00:00Z"
    Jobs(monkeypatch, {"bf16": [crashed, {"rung": 1, "started": began}], "opacus": [absent], "donation": [ended]})
    results = Results(tmp_path / "results")
    assert thorough.check(CLUSTER, "local", results, lambda text: None) == 0
    report = thorough.known(results, "local")
    assert report is not None
    found = {one.what: (one.outcome, one.why) for one in report.findings}
    assert found["precision bf16"] == (LIMITED, "XLA's autotuner crashed: it works on rung 1")
    assert found["switch opacus on"][0] == ABSENT
    assert found["switch donation off"] == (ABSENT, "not tried: Slurm: its node failed")
    assert report.checked == began, "what was installed since is newer, however late the check was taken up"


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("mode", ["default+cuda_graphs", "default+attention=cudnn"])
def test_a_switch_of_another_kind_of_device_is_not_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """The target 'local' does not say which kind it has, so those of all kinds are tried."""
    with pytest.raises(UserError) as said:
        settings(mode, "pytorch", "bert", 1, "fp32", "cpu")
    Jobs(monkeypatch, {"donation": [{"status": FAILED, "cause": f"input: {said.value}", "why": "input"}]})
    results = Results(tmp_path / "results")
    assert thorough.check(CLUSTER, "local", results, lambda text: None) == 0
    report = thorough.known(results, "local")
    assert report is not None
    assert {one.what for one in report.findings if one.outcome == ABSENT} == {"switch donation off"}


@pytest.mark.usefixtures("few")
def test_a_refused_trial_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = Jobs(monkeypatch, {})
    jobs.refused = "donation"
    monkeypatch.setattr(thorough, "_refusal", lambda job, *_: "no donation here" if "donation" in job.mode else "")
    results = Results(tmp_path / "results")
    assert thorough.check(CLUSTER, "local", results, lambda text: None) == 0
    report = thorough.known(results, "local")
    assert report is not None
    assert [one.why for one in report.findings if one.outcome == ABSENT] == ["refused: no donation here"]
    assert jobs.started == 2


@pytest.mark.usefixtures("few")
def test_a_check_goes_on_where_its_terminal_was_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs, results, said = Jobs(monkeypatch, {}), Results(tmp_path / "results"), list[str]()

    def closed(runs: list[Run], results: Results) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(manage, "wait", closed)
    with pytest.raises(KeyboardInterrupt):
        thorough.check(CLUSTER, "local", results, said.append)
    assert thorough.known(results, "local") is None
    monkeypatch.setattr(manage, "wait", lambda runs, results: True)
    assert thorough.check(CLUSTER, "local", results, said.append) == 0
    assert jobs.started == 3
    assert "following the check that was begun before" in "\n".join(said)
    assert thorough.check(CLUSTER, "local", results, said.append) == 0
    assert jobs.started == 6, "the first one was followed to its end"


@pytest.mark.usefixtures("few")
def test_what_a_check_taken_up_had_not_started_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Jobs(monkeypatch, {})
    results = Results(tmp_path / "results")
    (first, *_) = thorough.trials("local", LOCAL)
    (run,) = submit.launch([first.job], CLUSTER, results, print)
    begun = thorough.file(results, "local").with_suffix(".runs")
    begun.parent.mkdir(parents=True)
    begun.write_text(f"{run.id}\n")
    assert thorough.check(CLUSTER, "local", results, lambda text: None) == 0
    report = thorough.known(results, "local")
    assert report is not None
    assert [one.why for one in report.findings if one.outcome == ABSENT] == ["not started by this check"] * 2


def test_the_short_check_also_goes_by_the_last_try(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Jobs(monkeypatch, {"fp32": [{"status": FAILED, "cause": "CUDA_ERROR_ILLEGAL_ADDRESS"}, {}]})
    said: list[str] = []
    assert doctor.prove(CLUSTER, "local", Results(tmp_path / "results"), said.append) == 0
    assert not any("ILLEGAL_ADDRESS" in text for text in said)


def kept(results: Results, *findings: Finding, checked: str = "2099-01-01T00:00:00Z") -> None:
    path = thorough.file(results, "local")
    path.parent.mkdir(parents=True, exist_ok=True)
    report = Report("local", checked, "580.1", {"jax": "0.10.2"}, list(findings))
    path.write_text(json.dumps(dataclasses.asdict(report)))


LOCAL: Target = CLUSTER.targets["local"]
JOB = Job("jax", "mnist", 1, "standard", "bf16", None, "local", mode="default-donation")


def test_what_is_broken_is_told_before_it_is_used(tmp_path: Path) -> None:
    results = Results(tmp_path)
    assert thorough.remarks(JOB, LOCAL, results) == []
    kept(
        results,
        Finding("precision bf16", "jax", BROKEN, "no such unit"),
        Finding("precision bf16", "pytorch", BROKEN, "not this side"),
        Finding("switch donation off", "jax", BROKEN, "crashes"),
        Finding("precision fp16", "jax", BROKEN, "not asked for"),
        Finding("switch donation on", "jax", BROKEN, "another value"),
        Finding("profiler", "jax", BROKEN, "no rights"),
        Finding("two devices", "jax", BROKEN, "no NCCL"),
        Finding("pair of mnist", "jax", BROKEN, "not the same"),
    )
    said = thorough.remarks(JOB, LOCAL, results)
    assert len(said) == 2
    assert submit._known_of(JOB, LOCAL, results) == said, "a submission says it"
    more = dataclasses.replace(JOB, framework=PAIRED, use_case=2, profile=True)
    assert {text.partition(" is broken")[0] for text in thorough.remarks(more, LOCAL, results)} > {
        *("profiler", "two devices", "pair of mnist")
    }
    assert "precision bf16 is broken on local for jax: no such unit" in said[0]
    assert "switch donation off is broken" in said[1]


def test_a_broken_switch_that_tuned_would_set_is_told(tmp_path: Path) -> None:
    results, gpu = Results(tmp_path), LOCAL.model_copy(update={"device": "gpu"})
    here = ("pytorch", "mnist", 1, "fp32", "gpu")
    changed = settings("tuned", *here).items() - settings("default", *here).items()
    assert changed
    name, value = sorted(changed)[0]
    kept(results, Finding(f"switch {name} {value}", "pytorch", BROKEN, "crashes"))
    job = Job("pytorch", "mnist", 1, "standard", "fp32", None, "local", mode="tuned")
    (said,) = thorough.remarks(job, gpu, results)
    assert said.startswith(f"switch {name} {value} is broken on local for pytorch: crashes")
    assert thorough.remarks(dataclasses.replace(job, mode="default"), gpu, results) == []


def test_a_check_older_than_the_environment_or_the_driver_is_told(tmp_path: Path) -> None:
    results = Results(tmp_path)
    kept(results, checked=utc(time.time() - 10 * 365 * 24 * 3600))
    (said,) = thorough.remarks(JOB, LOCAL, results)
    assert "is older than the environment of jax" in said
    row = Row(run_id="r", target="local", driver="590.2", framework="jax", status=FINISHED)
    assert "is of driver 580.1, now it is 590.2" in thorough.outdated(row, results)
    assert thorough.outdated(row.replace(driver="580.1"), results) == ""


def test_a_damaged_report_is_told(tmp_path: Path) -> None:
    results = Results(tmp_path)
    kept(results)
    thorough.file(results, "local").write_text("{")
    (said,) = thorough.remarks(JOB, LOCAL, results)
    assert "makes a new one" in said
    assert "makes a new one" in thorough.outdated(Row(run_id="r", target="local", driver="590.2"), results)
