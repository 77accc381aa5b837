"""The thorough check of a target: everything is tried, what is broken is named, and a submission heeds it."""

import dataclasses
import json
import tarfile
import time
from pathlib import Path

import pytest
from conftest import ROOT, Main

from duel.catalogue import FRAMEWORKS, PAIRED
from duel.errors import UserError
from duel.files import utc
from duel.job import Job
from duel.launch import cluster, thorough
from duel.launch.schema import Target
from duel.launch.thorough import BROKEN, LIMITED, WORKS, Finding, Report
from duel.modes import settings
from duel.record import Row
from duel.results import Results
from duel.states import FINISHED

H100 = cluster.load(ROOT / "cluster.yaml").targets["h100"].model_copy(update={"devices_per_node": [1, 4]})


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
    assert all("fused_optimizer" in line and "KeyError" in line and "main.py logs" in line for line in broken)
    report = thorough.known(Results(checkout / "results"), "local")
    assert report is not None
    works = {(one.framework, one.what) for one in report.findings if one.outcome == WORKS}
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


def kept(results: Results, *findings: Finding, checked: str = "2099-01-01T00:00:00Z") -> None:
    path = thorough.file(results, "local")
    path.parent.mkdir(parents=True, exist_ok=True)
    report = Report("local", checked, "580.1", {"jax": "0.10.2"}, list(findings))
    path.write_text(json.dumps(dataclasses.asdict(report)))


LOCAL: Target = cluster.load(ROOT / "cluster.yaml").targets["local"]
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
    )
    said = thorough.remarks(JOB, LOCAL, results)
    assert len(said) == 2
    assert "precision bf16 is broken on local for jax: no such unit" in said[0]
    assert "switch donation off is broken" in said[1]


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
