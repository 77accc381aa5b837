"""A job runs the code of its submission, whatever the checkout has become while it waited."""

import dataclasses
import os
import shutil
from pathlib import Path

import pytest
from conftest import ROOT, Site

from duel import tree
from duel.errors import UserError
from duel.job import Job
from duel.launch import cluster, script, submit
from duel.results import Results

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


@pytest.mark.parametrize(
    ("stored", "commit"), [("0a1b", ("0a1b", False)), ("0a1b+changes", ("0a1b", True)), ("", (None, None))]
)
def test_a_copy_has_the_commit_of_its_own_submission(
    monkeypatch: pytest.MonkeyPatch, stored: str, commit: tuple[str | None, bool | None]
) -> None:
    monkeypatch.setattr(tree, "commit", lambda: commit)
    assert tree.described() == stored
    monkeypatch.undo()
    monkeypatch.setattr(tree, "CODE", Path("/opt/duel/results/trees/abc"))
    monkeypatch.setenv(tree.COMMIT, stored)
    assert tree.commit() == commit


def test_the_same_code_committed_later_is_no_longer_dirty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = Results(tmp_path)
    target = cluster.load(ROOT / "cluster.yaml").targets["local"]
    job = Job("jax", "mnist", 1, "standard", "fp32", None, "local")
    scripts = []
    for commit in (("a" * 40, True), ("b" * 40, False)):
        monkeypatch.setattr(tree, "commit", lambda commit=commit: commit)
        (run,) = submit.create(submit.plan([job], target), results)
        scripts.append(run.script.read_text())
    assert f"export DUEL_COMMIT={'a' * 40}+changes\n" in scripts[0]
    assert f"export DUEL_COMMIT={'b' * 40}\n" in scripts[1]
    assert len(list((tmp_path / "trees").iterdir())) == 1, "they share a copy"


def test_code_that_is_edited_while_it_is_copied_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = shutil.copyfile

    def edited(source: Path, target: Path) -> None:
        real(source, target)
        if source.name == "tree.py":
            target.write_text(target.read_text() + "# edited\n")

    monkeypatch.setattr(tree.shutil, "copyfile", edited)
    with pytest.raises(UserError, match="the code was changed while it was being submitted: repeat the command"):
        tree.copy(tmp_path)
    assert list((tmp_path / "trees").iterdir()) == []


def test_the_script_of_a_run_names_the_copy_and_the_one_by_hand_does_not() -> None:
    job = Job("jax", "mnist", 1, "standard", "fp32", None, "cpu")
    target = cluster.load(ROOT / "cluster.yaml").targets["cpu"]
    checkout = Path("/opt/duel")
    kept = script.render(job, target, checkout, checkout / "results" / "trees" / "abc", "0a1b+changes")
    assert "export DUEL_CHECKOUT=/opt/duel\n" in kept
    assert "export DUEL_COMMIT=0a1b+changes\n" in kept
    assert " results/trees/abc/jax/run.py --benchmark mnist" in kept
    plain = script.render(job, target, checkout)
    assert "DUEL_CHECKOUT" not in plain
    assert "DUEL_COMMIT" not in plain
    assert " jax/run.py --benchmark mnist" in plain
    both = script.render(dataclasses.replace(job, framework="paired"), target, checkout, checkout / "results/trees/abc")
    assert "results/trees/abc/jax/run.py" in both
