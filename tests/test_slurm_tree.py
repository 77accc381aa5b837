"""A job runs the code of its submission, whatever the checkout has become while it waited."""

import dataclasses
import json
import os
from pathlib import Path

import pytest
from conftest import ROOT, Site

from duel import tree
from duel.errors import UserError
from duel.job import Job
from duel.launch import cluster, script

CPU = ("--partition=cpu", "--time=00:10:00", "--cpus-per-task=1", "--mem=2G")


def test_a_waiting_job_runs_the_code_of_its_submission(site: Site) -> None:
    site.target(*CPU, "--hold")
    site.main("--benchmark", "mnist", "--use_case", "1", "--preset", "smoke", "--framework", "jax")
    run = site.only()
    (copy,) = (site.folder / "results" / "trees").iterdir()
    assert run.launch().code == copy.name
    for name in ("duel/measure/timed.py", "jax/training.py"):
        (site.folder / name).write_text("this is not Python\n")
    site.slurm.run("scontrol", "release", run.launch().slurm_job_id)
    site.wait_for_state(run, "finished", "failed")
    assert run.stored_status().state == "finished", run.log.read_text()
    assert run.rows()[0].status == "finished"
    said = site.main("verify", run.id)
    assert [line.split()[0] for line in said.splitlines()[1:]] == ["script", "script", "code", "evidence"]
    assert said.count(" ok ") == 4
    assert "DIFFERS" not in said
    run.script.write_text(run.script.read_text() + "# more\n")
    (copy / "jax" / "training.py").write_text("\n")
    (evidence,) = run.evidence_files(0)
    evidence.write_bytes(evidence.read_bytes() + b"0")
    said = site.main("verify", run.id, expect=1)
    assert said.count("DIFFERS") == 4


def test_submissions_of_the_same_code_share_a_copy_that_has_all_of_it(tmp_path: Path) -> None:
    place = tree.copy(tmp_path)
    assert place == tmp_path / "trees" / tree.digest()
    assert tree.digest(place) == tree.digest()
    stored = json.loads((place / tree.RECORD).read_text())
    assert (stored["git_sha"], stored["git_dirty"]) == tree.commit()
    before = (place / "jax" / "run.py").stat().st_mtime_ns
    assert tree.copy(tmp_path) == place
    assert (place / "jax" / "run.py").stat().st_mtime_ns == before
    assert [path.name for path in (tmp_path / "trees").iterdir()] == [place.name], "no litter"


def test_a_copy_that_has_no_room_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(tree.shutil, "copyfile", full)
    with pytest.raises(UserError, match="the code of this submission cannot be kept: No space left on device"):
        tree.copy(tmp_path)
    assert list((tmp_path / "trees").iterdir()) == []


def test_the_script_of_a_run_names_the_copy_and_the_one_by_hand_does_not() -> None:
    job = Job("jax", "mnist", 1, "standard", "fp32", None, "cpu")
    target = cluster.load(ROOT / "cluster.yaml").targets["cpu"]
    checkout = Path("/opt/duel")
    kept = script.render(job, target, checkout, checkout / "results" / "trees" / "abc")
    assert "export DUEL_CHECKOUT=/opt/duel\n" in kept
    assert " results/trees/abc/jax/run.py --benchmark mnist" in kept
    plain = script.render(job, target, checkout)
    assert "DUEL_CHECKOUT" not in plain
    assert " jax/run.py --benchmark mnist" in plain
    both = script.render(dataclasses.replace(job, framework="paired"), target, checkout, checkout / "results/trees/abc")
    assert "results/trees/abc/jax/run.py" in both
