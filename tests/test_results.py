"""Records: columns, the derived CSV under many writers, and what is true after a kill."""

import dataclasses
import errno
import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT
from golden import regenerate
from hypothesis import given
from hypothesis import strategies as st
from test_comparability import judged
from test_pairs import sides

from duel import table
from duel.errors import UserError
from duel.files import locked, process_started, write_atomically
from duel.job import Job
from duel.record import CELL, LEARNED, NOT_YET, Row
from duel.report import points
from duel.report.pairs import outcomes
from duel.results import Results, Run
from duel.states import STATES, TERMINAL
from duel.status import Owner, this_process
from duel.table import merge, read_rows

JOB = Job("jax", "mnist", 1, "smoke", "fp32", "cpu", "local")
GONE = Owner(this_process().host, 2**22 - 1, "0")


def new_run(results: Results, owner: Owner | None = None) -> Run:
    run = results.run(JOB.run_id())
    run.create(JOB.rows(), owner=owner or this_process())
    return run


def test_the_columns_are_pinned() -> None:
    """The table in results/README.md is the pin; a new column is a line there."""
    text = (ROOT / "results" / "README.md").read_text()
    assert text.endswith("|---|---|---|\n" + regenerate.columns()), regenerate.REMEDY
    assert regenerate.ratio_columns() in text, regenerate.REMEDY
    assert all(field.metadata["meaning"] for field in dataclasses.fields(Row))


def test_the_cell_is_what_makes_rows_repeats_of_each_other() -> None:
    values = {name: f"a {name}" for name in CELL}
    row = Row(**values).with_cell()
    assert row.cell == Row(**values, repeat=3, seed=1, host="x").with_cell().cell
    for name in CELL:
        other = Row(**(values | {name: "other"})).with_cell()
        assert other.cell != row.cell
        assert (other.pair == row.pair) == (name == "framework")


def test_runs_come_oldest_first_within_one_second_too(results: Results) -> None:
    """A second attempt may fail, and be followed by a third, in the second in which it began."""
    made = []
    for _ in range(20):
        made.append(new_run(results).id)
        time.sleep(1 / 128)
    assert [run.id for run in results.runs()] == made
    assert [row.run_id for row in merge(results)] == made


texts = st.text(st.characters(exclude_categories=("Cs",)), min_size=1)


@given(
    cause=st.none() | texts,
    device_name=st.none() | texts,
    loss_last=st.none() | st.floats(allow_nan=False),
    iterations=st.none() | st.integers(),
    git_dirty=st.none() | st.booleans(),
    missing=st.dictionaries(st.sampled_from(["accuracy", "driver"]), texts),
)
def test_a_row_survives_the_csv(
    tmp_path_factory: pytest.TempPathFactory, missing: dict[str, str], **values: object
) -> None:
    folder = Results(tmp_path_factory.mktemp("results"))
    run = new_run(folder)
    row = run.read_row(0).replace(missing=missing, status="failed", **values)
    run.write_row(row)
    run.write_status(state="failed")
    merge(folder)
    (read,) = read_rows(folder.csv)
    assert {n: v for n, v in read.to_dict().items() if n != "missing"} == {
        n: v for n, v in row.to_dict().items() if n != "missing"
    }
    empty = {name for name, value in row.to_dict().items() if value is None}
    asked = empty - set(LEARNED)
    assert set(read.missing) == asked, "every empty column has its reason"
    planned = JOB.rows()[0].missing | missing
    assert all(read.missing[name] == planned.get(name, NOT_YET) for name in asked)


def test_reasons_in_a_table_of_an_earlier_version_are_read() -> None:
    missing = {"accuracy": "synthetic data", "driver": "none", "mig": "none"}
    row = JOB.rows()[0].replace(run_id="jax_mnist_1-261124-100000-00aaaa", missing=missing)
    texts = row.to_csv()
    reasons = Row.from_csv(texts).missing
    assert {name: reasons[name] for name in row.missing} == row.missing
    assert Row.from_csv([*texts[:-1], json.dumps(reasons)]) == Row.from_csv(texts)


def test_a_run_that_was_never_taken_up_is_lost_and_so_are_its_rows(results: Results) -> None:
    run = new_run(results, owner=GONE)
    assert run.status().state == "lost"
    (row,) = merge(results)
    assert (row.status, row.cause) == ("lost", "the process that held it died before the run started")


def test_a_running_process_that_died_leaves_a_lost_run_that_may_speak_again(results: Results) -> None:
    run = new_run(results)
    run.write_status(state="running", owner=GONE)
    assert merge(results)[0].status == "lost"
    run.write_row(run.read_row(0).replace(status="finished", loss_last=0.5))
    run.write_status(state="finished")
    assert merge(results)[0].status == "finished"


def test_the_heartbeat_tells_of_a_run_on_another_machine(results: Results) -> None:
    run = new_run(results, owner=Owner("elsewhere", 1, "1"))
    status = json.loads((run.folder / "status.json").read_text()) | {"updated": time.time() - 3600}
    write_atomically(run.folder / "status.json", json.dumps(status))
    assert run.status().state == "queued", "it reports nothing before it begins"
    write_atomically(run.folder / "status.json", json.dumps(status | {"state": "running"}))
    assert run.status().state == "lost"


def test_a_pid_that_was_used_again_is_not_taken_for_the_run(results: Results) -> None:
    run = new_run(results, owner=dataclasses.replace(this_process(), started="0"))
    assert run.status().state == "lost"
    assert process_started(os.getpid()) != "0"


def test_a_finished_run_with_an_unfinished_row_is_not_believed(results: Results) -> None:
    run = new_run(results)
    run.write_status(state="finished")
    assert merge(results)[0].status == "failed"


def test_what_is_not_a_run_id_never_becomes_a_path(results: Results) -> None:
    for bad in ("", "../x", ".hidden", "-x", "a/b", "a b", "x" * 97, "a\n"):
        with pytest.raises(ValueError, match="run id"):
            results.run(bad)


def test_a_foreign_csv_is_refused_not_overwritten(results: Results) -> None:
    new_run(results)
    results.csv.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="not a table of rows; delete it"):
        merge(results)
    assert results.csv.read_text() == "a,b\n1,2\n"


def test_only_the_table_that_can_be_made_again_is_to_be_deleted(results: Results) -> None:
    new_run(results)
    merge(results)
    for folder, advice in (("published/cpu", "restore it from git"), ("archive", "unpack a.tar.gz")):
        path = results.folder / folder / ("a.csv" if folder == "archive" else "results.csv")
        path.parent.mkdir(parents=True)
        path.write_text("<<<<<<< HEAD\n")
        with pytest.raises(UserError, match=advice) as said:
            table.archived(results) if folder == "archive" else table.read_rows(path)
        assert "collect" not in str(said.value)


def test_a_damaged_file_is_a_lost_row_and_hides_no_other_run(results: Results) -> None:
    good, torn_row, torn_status = (new_run(results) for _ in range(3))
    good.settle(state="cancelled")
    torn_row.settle(state="finished")
    (torn_row.folder / "rows" / "000.json").write_text('{"run_id": ')
    (torn_status.folder / "status.json").write_text("{")
    assert {row.run_id: row.status for row in merge(results)} == {
        good.id: "cancelled",
        torn_row.id: "lost",
        torn_status.id: "lost",
    }


def test_settled_runs_are_not_read_again(results: Results) -> None:
    run = new_run(results)
    run.settle(state="cancelled", cause="test")
    first = merge(results)
    (run.folder / "rows" / "000.json").unlink()
    assert (
        merge(results)
        == read_rows(results.csv)
        == [row.replace(missing=read_rows(results.csv)[0].missing) for row in first]
    )


ONE_RUN = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from duel.job import Job
from duel.results import Results
from duel.status import Owner, this_process
from duel.table import update
results = Results(Path(sys.argv[2]))
job = Job("jax", "mnist", 1, "smoke", "fp32", "cpu", "local")
run = results.run(job.run_id("n" + sys.argv[3]))
run.create(job.rows(), owner=this_process())
run.write_row(run.read_row(0).replace(status="finished", iterations=int(sys.argv[3])))
run.write_status(state="finished")
sys.stdin.readline()  # all end in the same instant
update(results, wait=False)
"""


def test_64_runs_that_finish_at_once_lose_no_row(results: Results) -> None:
    processes = [
        subprocess.Popen([sys.executable, "-c", ONE_RUN, str(ROOT), str(results.folder), str(n)], stdin=subprocess.PIPE)
        for n in range(64)
    ]
    deadline = time.monotonic() + 120
    while len(list(results.folder.glob("runs/*/status.json"))) < 64:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for process in processes:
        process.communicate(b"\n")
        assert process.returncode == 0
    read_rows(results.csv)  # whole, whoever came last
    rows = merge(results)
    assert sorted(row.iterations for row in rows if row.iterations is not None) == list(range(64))
    assert {row.status for row in rows} == {"finished"}
    assert read_rows(results.csv) == [Row.from_csv(row.to_csv()) for row in rows]


WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from duel.job import Job
from duel.measure.sinks import MetricsWriter
from duel.results import Results
from duel.status import Owner, this_process
from duel.table import merge
results = Results(Path(sys.argv[2]))
job = Job("jax", "mnist", 1, "smoke", "fp32", "cpu", "local")
run = results.run(job.run_id("x"))
run.create(job.rows() * 300, owner=this_process())
emit = MetricsWriter(run.metrics)
for number in range(300):
    run.write_row(run.read_row(number).replace(status="finished", iterations=number))
    emit("block", row=number)
    merge(results)
    print(number, flush=True)  # acknowledged: from here on it may not be lost
"""


def test_sigkill_at_random_instants_loses_no_written_row(results: Results) -> None:
    chance = random.Random(7)
    for trial in range(12):
        folder = Results(results.folder / str(trial))
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(ROOT), str(folder.folder)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(chance.uniform(0, 0.3))
        process.send_signal(signal.SIGKILL)
        acknowledged = [0, *(int(line) for line in process.stdout.read().splitlines() if line.strip())][-1]
        process.wait()
        process.stdout.close()
        (run,) = folder.runs()
        assert run.status().state == "lost"
        rows = read_rows(folder.csv)  # whole as it stands, before anybody mends it
        assert len(rows) == 300
        merged = {row.row: row for row in merge(folder)}
        assert all(merged[number].iterations == number for number in range(acknowledged + 1))
        assert all(row.status == "finished" for number, row in merged.items() if number <= acknowledged)
        events, torn = run.events()
        assert [event["row"] for event in events] == list(range(len(events)))
        assert len(events) >= acknowledged + 1
        assert torn == 0


def test_a_carriage_return_in_a_text_does_not_end_the_line(results: Results) -> None:
    run = new_run(results)
    run.settle(state="failed", cause='one\rtwo\nthree, "four"')
    merge(results)
    assert [row.cause for row in read_rows(results.csv)] == ['one\rtwo\nthree, "four"']


def test_a_torn_last_line_of_metrics_is_counted_not_fatal(results: Results) -> None:
    run = new_run(results)
    run.metrics.write_text('{"event": "block"}\n{"event": "blo')
    assert run.events() == ([{"event": "block"}], 1)


def test_a_failed_write_leaves_the_old_text_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomically(path, "old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_only_one_process_holds_a_lock(tmp_path: Path) -> None:
    with locked(tmp_path / "lock", wait=False) as first, locked(tmp_path / "lock", wait=False) as second:
        assert first is not None
        assert second is None
    with locked(tmp_path / "lock", wait=False) as again:
        assert again


def test_the_words_of_a_status() -> None:
    assert set(STATES) == {"queued", "running", "finished", "failed", "cancelled", "lost", "skipped"}
    assert set(STATES) - TERMINAL == {"queued", "running"}


def test_a_carriage_return_in_a_text_does_not_end_its_line(tmp_path: Path) -> None:
    """As a value of a variable has that was set by a line of a file from Windows."""
    (line,) = points.lines(outcomes(judged(sides([1.5] * 4))))
    points.write(tmp_path / points.NAME, [dataclasses.replace(line, why="XLA_FLAGS: --x\r | not set")])
    assert [one.why for one in points.read(tmp_path / points.NAME)] == ["XLA_FLAGS: --x  | not set"]


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
def test_a_file_system_without_locks_is_named_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    said = r"is on a file system without locks .*: mount it with them \(Lustre: -o flock\)"
    with pytest.raises(UserError, match=said), locked(tmp_path / "lock", wait=False):
        pass
