"""What is settled costs nothing: thousands of ended runs beside the few that somebody watches."""

import os
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_continued import NOW, continued, interrupted
from test_results import new_run

from duel import certificate, files, index
from duel.launch import display, manage, state
from duel.options import FILTERS
from duel.results import Results, Run
from duel.states import CANCELLED, FAILED, FINISHED, LOST, QUEUED, RUNNING
from duel.status import this_process
from duel.table import merge, read_rows, rows_of, update


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


def test_a_bare_upload_is_of_one_s_own_runs(results: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_run(results)
    bare = Namespace(runs=[], **dict.fromkeys(FILTERS))
    assert [one.id for one in manage.to_upload(bare, results)] == [run.id]
    monkeypatch.setattr(os, "getuid", lambda: run.folder.stat().st_uid + 1)
    assert manage.to_upload(bare, results) == []
    assert [one.id for one in manage.to_upload(Namespace(**vars(bare) | {"runs": [run.id]}), results)] == [run.id]


def test_only_folders_are_runs(results: Results) -> None:
    run = new_run(results)
    folder = results.folder / "runs"
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "file").write_text("")
    (folder / "linked").symlink_to(run.folder)
    assert [one.id for one in results.runs()] in ([run.id, "linked"], ["linked", run.id])


def ended(results: Results, **row: object) -> Run:
    """A settled run with one finished row."""
    time.sleep(1 / 128)  # run ids are in order of time
    run = new_run(results)
    now = "2026-11-25T10:00:00Z"
    values = {"status": FINISHED, "started": now, "ended": now, "group": run.group, "throughput": 2.0} | row
    run.write_row(run.read_row(0).replace(**values))
    run.write_status(state=FINISHED, ended=now)
    return run


def read_by(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The runs whose rows are read from now on."""
    read: list[str] = []
    rows = Run.rows

    def rows_of(run: Run) -> object:
        read.append(run.id)
        return rows(run)

    monkeypatch.setattr(Run, "rows", rows_of)
    return read


def test_an_update_reads_what_is_new_and_leaves_the_other_lines_as_they_are(
    results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = [ended(results) for _ in range(4)]
    time.sleep(1 / 128)
    running = new_run(results)
    running.write_status(state=RUNNING, owner=this_process())
    assert [row.run_id for row in merge(results)] == [run.id for run in (*before, running)]
    lines = results.csv.read_bytes().splitlines()
    read = read_by(monkeypatch)
    new = ended(results, throughput=3.0)
    found = update(results)
    assert set(read) == {running.id, new.id}
    assert found.states == {FINISHED: 5, QUEUED: 1}
    assert {row.run_id for row in found.rows} == {running.id, new.id}
    assert results.csv.read_bytes().splitlines()[: len(lines)] == lines
    assert read_rows(results.csv)[-1].throughput == 3.0
    stamp = results.csv.stat()
    update(results)
    assert results.csv.stat() == stamp, "nothing was new: it is not written again"
    # The table made without an index is the same, byte for byte.
    text = results.csv.read_bytes()
    update(results, check=True)
    assert results.csv.read_bytes() == text
    assert set(read) == {run.id for run in results.runs()}


def test_the_table_of_another_writer_gets_no_index_of_ours(results: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system whose locks are each node's own."""
    for _ in range(3):
        ended(results)
    update(results)
    ended(results)
    opened = files.opened

    def replaced_before(path: Path) -> Any:
        if path == results.csv and path.read_bytes().count(b"\n") == 5:  # what we have just written
            theirs = path.with_name("theirs")
            theirs.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]))
            os.replace(theirs, path)
        return opened(path)

    known = index._file(results).read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(index.files, "opened", replaced_before)
        update(results)
    assert index._file(results).read_bytes() == known
    assert len(merge(results)) == 4


def test_a_run_in_the_middle_that_ends_late_keeps_its_place(results: Results) -> None:
    first = ended(results)
    time.sleep(1 / 128)
    late = new_run(results)
    last = ended(results)
    late.write_status(state=RUNNING, owner=this_process())
    merge(results)
    late.write_row(late.read_row(0).replace(status=FINISHED, cause="a" * 5000, group=late.group))
    late.write_status(state=FINISHED, ended="2026-11-25T10:00:00Z")
    rows = merge(results)
    assert [row.run_id for row in rows] == [first.id, late.id, last.id]
    assert rows[1].cause == "a" * 5000
    assert index.load(results).settled == {first.id, late.id, last.id}


def test_another_attempt_judges_its_group_again(results: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    one, alone = ended(results, group="g"), ended(results)
    (row, _) = merge(results)
    assert row.comparable is None
    read = read_by(monkeypatch)
    other = ended(results, group="g", framework="pytorch")
    rows = {row.run_id: row for row in merge(results)}
    assert read == [other.id]
    assert str(rows[one.id].comparable).startswith("NOT COMPARABLE: ")
    assert rows[one.id].comparable == rows[other.id].comparable
    assert rows[alone.id].comparable is None
    assert {row.run_id for row in rows_of(results, [other.id])} == {one.id, other.id}


def test_a_new_certificate_judges_every_row_again(results: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    run = ended(results)
    assert "no certificate" not in str(merge(results)[0].parity)
    monkeypatch.setattr(certificate, "verdict", lambda row, folder: certificate.VERIFIED)
    assert merge(results)[0].parity != certificate.VERIFIED
    (results.folder / "parity").mkdir()
    (results.folder / "parity" / "mnist-tiny-cpu.json").write_text("{}")
    read = read_by(monkeypatch)
    assert merge(results)[0].parity == certificate.VERIFIED
    assert read == [], f"the folder of {run.id} need not be read for that"


@pytest.mark.parametrize(
    ("damage", "left"),
    [
        (lambda results: (results.folder / ".index.json").write_text("{"), [2.0]),
        (lambda results: (results.folder / ".index.json").unlink(), [2.0]),
        (lambda results: (results.folder / ".index.json").write_text('{"format": 99}'), [2.0]),
        (lambda results: (results.folder / ".index.json").write_bytes(os.urandom(100)), [2.0]),
        (lambda results: results.csv.unlink(), []),
        (lambda results: results.csv.write_text(results.csv.read_text().replace("2.0", "9.0")), [9.0]),
        (lambda results: os.truncate(results.csv, results.csv.stat().st_size - 10), [2.0]),
        (lambda results: os.utime(results.csv), [2.0]),
    ],
)
def test_an_index_that_is_damaged_or_of_another_table_is_made_again(
    results: Results, damage: Callable[[Results], object], left: list[float]
) -> None:
    runs = [ended(results) for _ in range(3)]
    merge(results)
    text = results.csv.read_bytes()
    damage(results)
    assert index.load(results).places == {}
    assert [row.throughput for row in rows_of(results, [runs[0].id])] == left
    update(results)
    assert results.csv.read_bytes() == text
    assert index.load(results).settled == {run.id for run in runs}


def test_rows_are_judged_again_by_other_rules(
    results: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verdict of an older version would stay in the table."""
    assert all((Path(index.__file__).parent / name).exists() for name in index.RULES)
    before = index.proofs(results.folder / "parity")
    assert index.proofs(results.folder / "parity") == before
    for name in index.RULES:
        (tmp_path / name).write_text("other rules")
    monkeypatch.setattr(index, "__file__", str(tmp_path / "index.py"))
    assert index.proofs(results.folder / "parity") != before


def test_a_run_that_continues_is_read_again(results: Results) -> None:
    run = interrupted(results, 3, "time limit")
    assert [row.status for row in merge(results)] == [FINISHED] * 3 + [FAILED] * 5
    assert run.id in index.load(results).settled
    continued(results, run)
    for row in run.left():
        run.write_row(row.replace(status=FINISHED, started=NOW, ended=NOW, throughput=1.0))
    run.write_status(state=FINISHED, ended=NOW)
    assert [row.status for row in merge(results)] == [row.status for row in run.rows()]
    assert run.rows()[-1].status == FINISHED


def test_status_reads_what_is_not_settled_and_the_last_ones(results: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    old = new_run(results)
    old.write_status(state=RUNNING, owner=this_process())
    runs = [ended(results) for _ in range(state.RECENT + 5)]
    update(results)
    seen = state.look(results, recent=True)
    assert [one.id for one in seen.runs] == [old.id, *(run.id for run in runs[5:])]
    assert seen.left_out == {run.id for run in runs[:5]}
    assert display.table(seen).notes[0].startswith("(5 more: ")
    again = state.look(results, None, seen, recent=True)
    assert [one.id for one in again.runs] == [one.id for one in seen.runs]
    everything = state.look(results)
    assert len(everything.runs) == len(runs) + 1
    assert display.table(everything).lines == display.table(seen).lines
