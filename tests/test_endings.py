"""Ends that come at a bad moment: a killed driver, many runs at once, a signal after the last row, a moved folder."""

import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import clean_environment
from test_results import JOB, new_run

from duel import index
from duel.errors import kind_of
from duel.measure import supervisor
from duel.results import LITTER_SECONDS, Results
from duel.states import FINISHED
from duel.table import merge, read_rows, update

DEAD = 2**22 - 1  # the number of no process


def test_what_a_killed_driver_left_is_removed_a_day_later(results: Results) -> None:
    run = new_run(results)
    folder = results.folder / "runs"
    kept = [folder / f".young.{DEAD}", folder / f".alive.{os.getpid()}", folder / ".other", folder / ".x.1y"]
    old = [folder / f".{run.id}.{DEAD}"]
    for path in (*kept, *old):
        (path / "rows").mkdir(parents=True)
    link = folder / f".link.{DEAD}"
    link.symlink_to(run.folder)
    before = time.time() - 2 * LITTER_SECONDS
    for path in (*kept[1:], *old):
        os.utime(path, (before, before))
    os.utime(link, (before, before), follow_symlinks=False)
    merge(results)
    assert [path for path in old if path.exists()] == []
    assert all(path.is_dir() for path in (*kept, link, run.folder))


def test_whoever_merges_looks_again_where_another_run_ended_meanwhile(
    results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the last of many that end together would be missing until somebody collects."""
    late = []
    within, go_on = threading.Event(), threading.Event()
    write = index.rewrite

    def slow(*given: Any) -> Any:
        written = write(*given)
        if not late:
            late.append(None)
            within.set()
            assert go_on.wait(60)
        return written

    monkeypatch.setattr(index, "rewrite", slow)
    new_run(results)
    first = threading.Thread(target=update, args=(results, False))
    first.start()
    assert within.wait(60)
    last = new_run(results)
    last.write_row(last.read_row(0).replace(status=FINISHED))
    last.settle(state=FINISHED)
    assert update(results, wait=False).rows == []
    go_on.set()
    first.join(60)
    assert {row.run_id: row.status for row in read_rows(results.csv)}[last.id] == FINISHED
    assert not (results.folder / ".results.again").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_a_run_that_is_told_to_end_after_its_last_row_is_finished(
    number: signal.Signals, results: Results, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(work: supervisor._Work, *rest: object) -> None:
        for row in work._run.rows():
            work._run.write_row(row.replace(status=FINISHED))
        raise supervisor._Stopped(number.name)

    assert supervised(results, monkeypatch, measured) == 0
    (run,) = results.runs()
    assert (run.stored_status().state, run.stored_status().cause) == (FINISHED, "")


@pytest.mark.parametrize(
    ("error", "ended_by"),
    [
        (None, "FileNotFoundError: [Errno 2] No such file or directory: "),
        (RuntimeError("CUDA error: an illegal access"), "RuntimeError: CUDA error: an illegal access"),
    ],
)
def test_a_run_whose_folder_was_moved_ends_with_one_line(
    error: Exception | None,
    ended_by: str,
    results: Results,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def moved(work: supervisor._Work, *rest: object) -> None:
        shutil.move(results.folder, results.folder.with_name("elsewhere"))
        if error:
            raise error
        work._run.write_status(phase="measuring")

    assert supervised(results, monkeypatch, moved) == 1
    said = capsys.readouterr()
    assert f"is gone: it was moved or removed during the run, which ended by {ended_by}" in said.out.splitlines()[-1]
    assert "Traceback" not in said.out + said.err


def supervised(results: Results, monkeypatch: pytest.MonkeyPatch, measure: Any) -> int:
    """The exit code of a run whose rows ``measure`` measures."""
    monkeypatch.setattr(supervisor, "Results", lambda folder: results)
    monkeypatch.setattr(supervisor._Work, "measure", measure)
    monkeypatch.setattr(os, "environ", clean_environment())
    handlers = {number: signal.getsignal(number) for number in supervisor.STOPS}
    try:
        return supervisor._supervise(JOB, Path("data"), False, {})
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), "out of memory"),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 bytes"), "out of memory"),
        (MemoryError(), "out of memory"),
        (RuntimeError("std::bad_alloc"), "out of memory"),
        (ValueError("Unable to allocate 3.00 GiB for an array with shape (9,)"), "out of memory"),
        (RuntimeError("RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem"), "code"),
        (KeyError("memory"), "code"),
    ],
)
def test_running_out_of_memory_is_told_by_the_text_and_the_class(error: Exception, kind: str) -> None:
    assert kind_of(repr(error)) == kind
