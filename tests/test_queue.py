"""Slurm is asked once, and its answers are read, on the recorded output of a real Slurm and on any other text."""

import dataclasses
import os
import re
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded_queue import NOW, SAID_BY_SQUEUE, recorded
from test_driver import wait_for

from duel.files import process_started
from duel.launch import queue
from duel.launch.queue import Answer, ask
from duel.launch.reasons import ALIVE, BLOCKED, ENDED, PREEMPTED, WAITING, SlurmJob, judge, when

texts = st.text(st.characters(codec="utf-8"))

StandIn = Callable[..., None]


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Puts a stand-in for ``squeue`` or ``sacct`` on the path, and counts its calls; nothing else is on the path."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))

    def make(tool: str, text: str = "", code: int = 0, script: str = "") -> None:
        (tmp_path / f"{tool}.txt").write_text(text, newline="")
        says = f"/bin/cat '{tmp_path}/{tool}.txt' {'>&2' if code else ''}; exit {code}"
        path = tmp_path / "bin" / tool
        lines = ["#!/bin/sh", f"printf '%s\\n' \"$@\" > '{tmp_path}/{tool}.arguments'"]
        lines += [f"echo >> '{tmp_path}/{tool}.calls'", script or says]
        path.write_text("\n".join(lines) + "\n")
        path.chmod(0o755)

    return make


@pytest.fixture
def calls(tmp_path: Path) -> Callable[[], tuple[int, int]]:
    def count() -> tuple[int, int]:
        files = [tmp_path / f"{tool}.calls" for tool in ("squeue", "sacct")]
        squeue, sacct = (len(file.read_text().splitlines()) if file.exists() else 0 for file in files)
        return squeue, sacct

    return count


def never(jobs: list[SlurmJob]) -> bool:
    return False


def always(jobs: list[SlurmJob]) -> bool:
    return True


def by_name(answer: Answer) -> dict[str, SlurmJob]:
    assert len({job.name for job in answer.jobs}) == len(answer.jobs)
    return {job.name: job for job in answer.jobs}


# -- recorded output --


def test_what_squeue_printed_is_put_into_words(stand_in: StandIn, calls: Callable[[], tuple[int, int]]) -> None:
    stand_in("squeue", recorded("squeue"))
    stand_in("sacct")
    answer = ask(["root"], NOW, always)
    jobs = by_name(answer)
    assert {name: dataclasses.astuple(judge(job)) for name, job in jobs.items()} == SAID_BY_SQUEUE
    assert jobs["code-3"] == SlurmJob(
        id="2",
        name="code-3",
        user="root",
        state="FAILED",
        raw="FAILED",
        reason="NonZeroExitCode",
        nodes="cpu-1",
        start="2026-11-21T00:09:45",
        limit="2:00:00",
        exit_code="3:0",
        restarts=0,
    )
    assert {name: job.restarts for name, job in jobs.items() if job.restarts} == {
        "requeued": 1,
        "requeued-held": 1,
        "special": 1,
        "node-failed-requeued": 1,
        "preempted-requeued": 1,
    }
    assert {name: when(job.start, NOW) for name, job in jobs.items() if judge(job).kind == WAITING} == {
        "begins-later": "expected to start 01:09 (in 50 min)",
        "first-in-line": "expected to start 02:09 (in 1 h 50 min)",
        "second-in-line": "expected to start 04:09 (in 3 h 49 min)",
        "preempted-requeued": "expected to start 02:11 (in 1 h 52 min)",
        "node-is-down": "",
        "nodes-are-down": "",
        "node-failed-requeued": "",
    }
    assert (answer.notes, answer.controller, answer.accounting) == ([], True, None)
    assert calls() == (1, 0)


def test_what_sacct_printed_means_the_same(stand_in: StandIn, calls: Callable[[], tuple[int, int]]) -> None:
    stand_in("squeue", recorded("squeue-down"), code=1)
    stand_in("sacct", recorded("sacct"))
    answer = ask(["root"], NOW, never)
    jobs = by_name(answer)
    said = {name: dataclasses.astuple(judge(job))[:2] for name, job in jobs.items()}
    expected = {name: said[:2] for name, said in SAID_BY_SQUEUE.items()}
    # Never eligible and still pending: only squeue knows them. It also says why a job of many nodes waits.
    for name in ("held", "depends", "depends-in-vain"):
        del expected[name]
    expected["other | people's, 100% `names`"] = expected.pop('other | people\'s, 100% "names"')
    expected["special"] = (BLOCKED, "")
    assert said == expected
    assert judge(jobs["cancelled"]).words == "cancelled by user 0"
    assert {name for name, job in jobs.items() if job.restarts} == {
        "requeued",
        "requeued-held",
        "special",
        "node-failed-requeued",
        "preempted-requeued",
    }
    assert jobs["code-137"].exit_code == "9:0"  # sacct's own doing
    assert jobs["no-log-folder"].exit_code == "0:53"
    assert (jobs["first-in-line"].nodes, jobs["first-in-line"].start) == ("", "")
    assert answer.notes == [
        "the queue is unavailable: slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
    ]
    assert (answer.controller, answer.accounting) == (False, True)
    assert calls() == (1, 1)


def test_the_record_of_a_refused_submission_is_no_job(stand_in: StandIn) -> None:
    assert "BadConstraints\x1frefused" in recorded("squeue")
    assert "None\x1frefused" in recorded("sacct")  # here without a reason
    for squeue, sacct in [("squeue", "sacct"), ("squeue-preempted", "sacct"), ("squeue", "sacct-preempted")]:
        stand_in("squeue", recorded(squeue))
        stand_in("sacct", recorded(sacct))
        assert not {"refused", "refused-too"} & {job.name for job in ask(["root"], NOW, never).jobs}


def test_a_requeued_job_is_alive_although_the_accounting_has_its_earlier_end(stand_in: StandIn) -> None:
    stand_in("squeue", recorded("squeue-preempted"))
    stand_in("sacct", recorded("sacct-preempted"))
    job = by_name(ask(["root"], NOW, never))["preempted-requeued"]
    assert (job.state, judge(job).kind, job.restarts) == ("PENDING", WAITING, 1)
    stand_in("squeue", recorded("squeue-stopped"), code=1)
    answer = ask(["root"], NOW, never)
    assert dataclasses.astuple(judge(by_name(answer)["preempted-requeued"])) == (
        ENDED,
        PREEMPTED,
        "preempted by a job of higher priority",
    )
    assert not answer.controller  # so the caller knows that this may not be the last word
    assert answer.notes == ["the queue is unavailable: slurm_load_jobs error: Socket timed out on send/recv operation"]


def test_the_latest_of_several_records_counts_whatever_their_order(stand_in: StandIn) -> None:
    stand_in("squeue")
    stand_in("sacct", "".join(reversed(recorded("sacct").splitlines(keepends=True))))
    jobs = by_name(ask(["root"], NOW, never))
    assert (jobs["requeued"].state, jobs["requeued"].restarts) == ("RUNNING", 1)
    assert (jobs["preempted-requeued"].state, jobs["preempted-requeued"].restarts) == ("PENDING", 1)


def test_a_job_on_its_way_back_into_the_queue_is_alive_or_blocked(stand_in: StandIn) -> None:
    stand_in("squeue", recorded("squeue-completing"))
    kinds = {job.name: (job.state, judge(job).kind) for job in ask(["root"], NOW, always).jobs}
    assert kinds == {
        "requeued": ("COMPLETING", ALIVE),
        "special": ("COMPLETING", ALIVE),
        "requeued-held": ("PENDING", BLOCKED),
    }


@pytest.mark.parametrize(
    ("recording", "words"),
    [
        ("sacct-down", "sacct: error: Problem talking to the database: Connection refused"),
        ("sacct-off", "Slurm accounting storage is disabled"),
    ],
)
def test_accounting_that_does_not_answer_is_a_note(recording: str, words: str, stand_in: StandIn) -> None:
    stand_in("squeue", recorded("squeue"))
    stand_in("sacct", recorded(recording), code=1)
    answer = ask(["root"], NOW, never)
    assert set(by_name(answer)) == set(SAID_BY_SQUEUE)
    assert answer.notes == [f"the accounting is unavailable: {words}"]
    assert (answer.controller, answer.accounting) == (True, False)


# -- how the tools are called --


def test_known_sees_what_squeue_said_and_decides_about_sacct(
    stand_in: StandIn, calls: Callable[[], tuple[int, int]]
) -> None:
    stand_in("squeue", recorded("squeue"))
    stand_in("sacct", recorded("sacct"))
    seen: list[set[str]] = []

    def known(jobs: list[SlurmJob]) -> bool:
        seen.append({job.name for job in jobs})
        return "completed" in seen[-1]

    assert ask(["root"], NOW, known).accounting is None
    assert seen == [set(SAID_BY_SQUEUE)]
    assert calls() == (1, 0)


def test_the_arguments(stand_in: StandIn, tmp_path: Path) -> None:
    stand_in("squeue")
    stand_in("sacct")
    since = time.time() - 7200
    ask(["root", "daemon", "root"], since, never)
    squeue = (tmp_path / "squeue.arguments").read_text().splitlines()
    sacct = (tmp_path / "sacct.arguments").read_text().splitlines()
    assert squeue[:-1] == ["--states=all", "--array", "--noheader", "--user=daemon,root", "-O"]
    assert set(sacct) >= {"-X", "-P", "-D", "-n", "--user=daemon,root", "--delimiter=\x1f"}
    begin, end = (
        datetime.fromisoformat(argument.partition("=")[2]).timestamp()
        for option in ("--starttime=", "--endtime=")
        for argument in sacct
        if argument.startswith(option)
    )
    assert since - 3701 <= begin <= since - 3600
    assert end >= time.time() + 3600


def test_the_users_own_formats_and_filters_stay_out(
    stand_in: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shaping = ("SQUEUE_FORMAT", "SQUEUE_STATES", "SQUEUE_USERS", "SQUEUE_SORT", "SACCT_FORMAT", "SACCT_FEDERATION")
    for name in (*shaping, "SLURM_TIME_FORMAT", "SLURM_CLUSTERS", "SLURM_CONF"):
        monkeypatch.setenv(name, "mine")
    for tool in ("squeue", "sacct"):
        stand_in(tool, script=f'/usr/bin/env > "{tmp_path}/{tool}.environment"')
    ask(["root"], NOW, never)
    for tool in ("squeue", "sacct"):
        found = re.findall(r"^(?:SLURM|SQUEUE|SACCT)_.*", (tmp_path / f"{tool}.environment").read_text(), re.MULTILINE)
        assert sorted(found) == ["SLURM_BITSTR_LEN=0", "SLURM_CONF=mine"]


def test_tools_that_are_not_here_are_notes(stand_in: StandIn) -> None:
    answer = ask(["root"], NOW, never)
    assert answer == Answer(
        [],
        [
            "the queue is unavailable: squeue: No such file or directory",
            "the accounting is unavailable: sacct: No such file or directory",
        ],
        controller=False,
        accounting=False,
    )


def test_a_tool_that_fails_without_a_word(stand_in: StandIn) -> None:
    stand_in("squeue", code=3)
    assert ask(["root"], NOW, always).notes == ["the queue is unavailable: squeue failed with exit code 3"]


def test_a_tool_that_hangs_is_ended_with_all_that_it_started(
    stand_in: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "TIMEOUT_SECONDS", 1.0)
    # As at sites whose squeue is a script: the child would keep the pipe open after the script's death.
    stand_in("squeue", script=f'/bin/sleep 300 &\necho $! > "{tmp_path}/child"\nwait')
    begin = time.monotonic()
    answer = ask(["root"], NOW, always)
    assert time.monotonic() - begin < 30
    assert answer.notes == ["the queue is unavailable: squeue has not answered for 1 s"]
    assert not answer.controller
    child = int((tmp_path / "child").read_text())
    wait_for(lambda: process_started(child) is None)


def test_a_user_whom_the_machine_does_not_know_costs_the_others_nothing(
    stand_in: StandIn, calls: Callable[[], tuple[int, int]], tmp_path: Path
) -> None:
    stand_in("squeue", recorded("squeue"))
    answer = ask(["root", "no such user", "with\0zero"], NOW, always)
    assert set(by_name(answer)) == set(SAID_BY_SQUEUE)
    assert answer.notes == [
        "cannot look up jobs of 'no such user': no such user on this machine",
        "cannot look up jobs of 'with\\x00zero': no such user on this machine",
    ]
    assert "--user=root" in (tmp_path / "squeue.arguments").read_text().splitlines()
    assert ask([str(os.getuid())], NOW, always).controller  # a uid, where there is no name
    assert calls() == (2, 0)
    alone = ask(["no such user"], NOW, never)
    assert (alone.jobs, alone.controller, alone.accounting) == ([], False, None)
    assert calls() == (2, 0)


@given(said=texts, recorded_text=texts)
def test_any_text_gives_an_answer(said: str, recorded_text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(queue, "output", lambda command, *_: said if command[0] == "squeue" else recorded_text)
        answer = ask(["root"], NOW, never)
    assert (answer.controller, answer.accounting) == (True, True)
    for job in answer.jobs:
        assert judge(job).words


fields = st.lists(
    st.text(st.characters(codec="utf-8", exclude_characters=queue.SEPARATOR + "\n\r")), min_size=9, max_size=9
)


@given(number=st.integers(0), most=fields, tool=st.sampled_from([queue._from_squeue, queue._from_sacct]))
def test_any_record_gives_a_job_and_a_verdict(
    number: int, most: list[str], tool: Callable[[str], dict[str, SlurmJob]]
) -> None:
    (job,) = tool(queue.SEPARATOR.join([str(number), *most])).values()
    assert (job.id, job.name) == (str(number), most[-1].strip())
    assert judge(job).words


def test_a_slurm_that_does_not_tell_its_name_is_asked_once_for_all_runs(
    stand_in: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "_known_name", [])
    monkeypatch.setattr(queue, "_silent_since", [])
    monkeypatch.setattr(queue, "CONFIGURATIONS", ())
    monkeypatch.delenv("SLURM_CONF", raising=False)
    stand_in("scontrol", "controller is down", code=1)
    assert not any(queue.elsewhere(name) for name in ("a", "b", "c"))
    assert len((tmp_path / "scontrol.calls").read_text().splitlines()) == 1
    queue._silent_since[0] -= queue.SILENT_SECONDS
    stand_in("scontrol", "ClusterName = there")
    assert [queue.elsewhere(name) for name in ("here", "there")] == [True, False]
