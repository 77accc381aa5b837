"""What is settled costs nothing: thousands of ended runs beside the few that somebody watches."""

from pathlib import Path

import pytest
from test_results import new_run

from duel.launch import state
from duel.results import Results, Run
from duel.states import CANCELLED, FINISHED, LOST, QUEUED, RUNNING
from duel.status import this_process


@pytest.fixture
def results(tmp_path: Path) -> Results:
    return Results(tmp_path / "results")


def test_a_watch_reads_nothing_that_is_settled(results: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    runs = [new_run(results) for _ in range(5)]
    for run, end in zip(runs, (FINISHED, CANCELLED, FINISHED), strict=False):
        run.write_status(state=end, ended="2026-11-25T10:00:00Z")
    runs[3].write_status(state=LOST)  # may report again
    runs[4].write_status(state=RUNNING, owner=this_process())
    read: list[str] = []
    stored, launched = Run.stored_status, Run.launch

    def status_of(run: Run) -> object:
        read.append(run.id)
        return stored(run)

    def launch_of(run: Run) -> object:
        read.append(run.id)
        return launched(run)

    monkeypatch.setattr(Run, "stored_status", status_of)
    monkeypatch.setattr(Run, "launch", launch_of)
    first = state.look(results)
    assert set(read) == {run.id for run in runs}
    for ask in (False, True):
        read.clear()
        second = state.look(results, before=first, ask=ask)
        assert set(read) == {runs[3].id, runs[4].id}
        assert [(s.id, s.state) for s in second.runs] == [(s.id, s.state) for s in first.runs]
    runs[4].write_status(state=FINISHED, ended="2026-11-25T10:00:01Z")
    late = new_run(results)
    states = {seen.id: seen.state for seen in state.look(results, before=first).runs}
    ends = [states[run.id] for run in (*runs, late)]
    assert ends == [FINISHED, CANCELLED, FINISHED, LOST, FINISHED, QUEUED]


def test_only_folders_are_runs(results: Results) -> None:
    run = new_run(results)
    folder = results.folder / "runs"
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "file").write_text("")
    (folder / "linked").symlink_to(run.folder)
    assert [one.id for one in results.runs()] in ([run.id, "linked"], ["linked", run.id])
