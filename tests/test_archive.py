"""Settled runs in an archive: their rows stay, their folders can be had again, and what is inconsistent is found."""

import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from test_many_runs import ended, read_by
from test_results import new_run

from duel import index
from duel.errors import UserError
from duel.files import utc, write_atomically
from duel.job import Job
from duel.launch import archive, manage, state, verify
from duel.results import Results, Run
from duel.states import RUNNING
from duel.status import LaunchRecord, Owner, this_process
from duel.table import merge, update


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Results:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    return Results(tmp_path / "results")


def packed(results: Results) -> list[str]:
    """Archive all runs; what was said."""
    said: list[str] = []
    look = state.look(results)
    archive.archive(look.runs, look.runs, results, said.append)
    return said


def test_a_log_that_is_followed_ends_with_a_job_that_only_slurm_saw_end(
    results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(results)
    run.write_status(owner=Owner(slurm_job_name=run.id))

    def look(_: Results, runs: list[Run]) -> None:
        runs[0].settle(state="failed", cause="a set-up line failed", why="code")

    monkeypatch.setattr(manage.state, "look", look)
    monkeypatch.setattr(manage, "SLURM_SECONDS", 0.5)
    manage.print_log(results, run, follow=True)
    assert run.status().state == "failed"


def test_an_archive_keeps_rows_and_files_and_gives_them_back(results: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [ended(results), ended(results)]
    runs[0].log.write_text("a line\n")
    (runs[0].folder / "link").symlink_to(runs[0].log)
    merge(results)
    table = results.csv.read_bytes()
    said = packed(results)
    assert "2 runs" in said[0]
    assert results.runs() == []
    assert list((results.folder / "runs").iterdir()) == []
    read = read_by(monkeypatch)
    for again in (False, True):
        update(results, check=again)
        assert results.csv.read_bytes() == table
    results.csv.unlink()
    update(results)
    assert results.csv.read_bytes() == table, "the archive has its rows, too"
    assert read == []
    with pytest.raises(UserError, match="is archived; to restore it: tar -xzf "):
        manage.find(results, runs[0].id)
    command = said[1].partition(": ")[2].split()
    subprocess.run(command, check=True)
    assert [run.id for run in results.runs()] == [runs[0].id]
    assert runs[0].log.read_text() == "a line\n"
    assert manage.find(results, runs[0].id) == runs[0]
    assert verify.check(results) == []


def test_an_archived_validation_is_found_with_how_to_restore_it(results: Results) -> None:
    job = Job("jax", "mnist", 0, "smoke", "fp32", None, "local")
    run = results.run(job.run_id())
    run.create(job.rows(), owner=this_process(), launch=LaunchRecord(job=job, pair="g"))
    run.write_row(run.read_row(0).replace(status="finished", started=utc(), ended=utc()))
    run.settle(state="finished")
    packed(results)
    assert not run.folder.exists()
    with pytest.raises(UserError, match=rf"{run.id} is archived; to restore it: tar -xzf .*\.tar\.gz"):
        manage.find(results, run.id)
    with pytest.raises(UserError, match="no run 'jax_mnist_0-gone'"):
        manage.find(results, "jax_mnist_0-gone")


def test_only_whole_settled_groups_are_packed(results: Results) -> None:
    done, side = ended(results), ended(results, group="g")
    other = new_run(results)
    other.write_status(state=RUNNING, owner=this_process())
    views = state.look(results).runs
    for seen in views:  # as launch.json would have it
        if seen.id in (side.id, other.id):
            object.__setattr__(seen.launch, "pair", "g")
    said: list[str] = []
    archive.archive(views, views, results, said.append)
    assert said[0].startswith("left out: 2 runs")
    assert {run.id for run in results.runs()} == {side.id, other.id}
    assert done.id in index.load(results).places
    with pytest.raises(UserError, match="nothing to archive"):
        archive.archive(views[1:], views, results, said.append)


def test_an_archive_that_cannot_be_read_back_removes_nothing(results: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    run = ended(results)
    monkeypatch.setattr(tarfile.TarFile, "add", lambda *given: None)
    with pytest.raises(UserError, match="did not hold what was packed; no run was removed"):
        packed(results)
    assert results.runs() == [run]
    assert list((results.folder / "archive").iterdir()) == []


def test_a_check_finds_what_is_inconsistent_and_corrects_the_table(results: Results) -> None:
    changed, gone, damaged, kept = (ended(results) for _ in range(4))
    packed_run = ended(results)
    merge(results)
    assert verify.check(results) == []
    look = state.look(results)
    archive.archive([seen for seen in look.runs if seen.id == packed_run.id], look.runs, results, print)
    changed.write_row(changed.read_row(0).replace(throughput=9.0))
    shutil.rmtree(gone.folder)
    write_atomically(damaged.row_file(0), "{")
    (path,) = (results.folder / "archive").glob("*.tar.gz")
    path.write_bytes(path.read_bytes()[:-20])
    found = verify.check(results)
    assert found[0] == f"{changed.id}, row 0: results.csv had other values of throughput"
    assert f"{damaged.id}, row 0: damaged: " in "\n".join(found)
    assert f"{gone.id}: its folder is gone; only its rows in results.csv are left" in found
    assert found[-1].startswith(f"{path} is damaged: ")
    assert not any(line.startswith(kept.id) for line in found)
    assert {row.run_id: row.throughput for row in merge(results)}[changed.id] == 9.0
