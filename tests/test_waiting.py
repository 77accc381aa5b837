"""Submissions that wait: whose they are, what a sender does with them, and what it says if it does not come up."""

import contextlib
import dataclasses
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from duel.cli import main
from duel.errors import UserError
from duel.files import locked
from duel.job import Job
from duel.launch import intent, manage, queue, sbatch, sender, slurm, state, submit
from duel.launch.intent import Intent
from duel.launch.schema import Cluster, Target
from duel.results import Results, Run
from duel.status import Owner

SITE = Target.model_validate(
    {"scheduler": "slurm", "python": {"jax": "python", "pytorch": "python"}, "pass_variables": ["SBATCH_ACCOUNT"]}
)
DESCRIBED = Cluster(default="site", targets={"site": SITE})


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Results:
    monkeypatch.setattr(queue, "_known_name", ["here"])
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "bash").symlink_to("/bin/bash")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))  # and no Slurm
    return Results(tmp_path / "results")


def waiting(results: Results, **change: Any) -> tuple[str, Run]:
    job = Job("jax", "mnist", 1, "smoke", "fp32", None, "site")
    run = results.run(job.run_id())
    run.create(job.rows(), owner=Owner(slurm_job_name=run.id), target="site")
    noted = Intent({run.id: job}, time.time(), created=True, waits="Slurm is full", user=queue.user(), cluster="here")
    return intent.new(results, dataclasses.replace(noted, **change)), run


class KilledError(Exception):
    """Stands in for a kill."""


def test_a_turn_that_is_killed_while_it_sends_is_looked_up_by_a_sender_that_lives(
    results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, run = waiting(results)
    sent: list[str] = []

    def send(runs: list[Run], *_: object) -> None:
        sent.extend(run.id for run in runs)
        raise KilledError

    monkeypatch.setattr(sbatch, "find", lambda *_: ({}, queue.Answer([], [], True, None)))
    monkeypatch.setattr(sbatch, "send", send)
    with pytest.raises(KilledError):  # of 'resubmit'
        sender.turn(DESCRIBED, results, print, set())
    found = {run.id: queue.SlurmJob("41", run.id, queue.user(), "PENDING", "PENDING", "", "", "", "")}
    monkeypatch.setattr(sbatch, "find", lambda *_: (found, queue.Answer([], [], True, None)))
    monkeypatch.setattr(sbatch, "send", lambda runs, *_: sent.extend(x.id for x in runs if not intent.decided(x)))
    assert not sender.turn(DESCRIBED, results, print, {name})
    assert sent == [run.id], "once"
    assert run.launch().slurm_job_id == "41"


@pytest.mark.parametrize(
    ("change", "who"), [({"user": "alice"}, "user alice"), ({"cluster": "there"}, "a sender on the cluster there")]
)
def test_what_is_anothers_to_send_is_left_alone_and_said(
    results: Results, monkeypatch: pytest.MonkeyPatch, change: dict[str, str], who: str
) -> None:
    name, _ = waiting(results, **change)
    unfinished, _ = waiting(results, **change, created=False)

    def nothing(*_: object) -> None:
        raise AssertionError

    for module, function in ((sbatch, "send"), (sbatch, "find"), (sender, "ensure")):
        monkeypatch.setattr(module, function, nothing)
    assert not sender.turn(DESCRIBED, results, print, set())
    sender.resume(DESCRIBED, results, print)
    said: list[str] = []
    slurm.recover([], results, said.append)
    assert said == [f"left alone: 1 jobs that {who} sends"] * 2
    assert sorted(intent.names(results)) == sorted([name, unfinished])
    assert intent.mine(results) == {}
    monkeypatch.setattr(state.shutil, "which", lambda _: "squeue")
    monkeypatch.setattr(queue, "ask", lambda *_: queue.Answer([], [], True, True))
    (seen, _) = state.look(results).runs
    assert seen.state == "queued"
    assert seen.note == f"Slurm is full; {who} sends it"


def test_a_submission_knows_who_sends_it_where_and_with_which_variables(
    results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SBATCH_ACCOUNT", "mine")
    passed: list[Any] = []
    monkeypatch.setattr(sbatch, "send", lambda *given: passed.append(given[-1]))
    (launch,) = submit.plan([Job("jax", "mnist", 1, "smoke", "fp32", None, "site")], SITE)
    noted = slurm._intent([launch])
    assert (noted.user, noted.cluster, noted.passed) == (queue.user(), "here", {"SBATCH_ACCOUNT": "mine"})
    monkeypatch.setenv("SBATCH_ACCOUNT", "of the sender")
    slurm.send(intent.new(results, noted), noted, [SITE], results, print)
    assert passed == [{"SBATCH_ACCOUNT": "mine"}]


def test_users_and_clusters_have_their_own_senders(
    results: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting(results)
    mine = intent.lock(results)
    with locked(mine, wait=True) as held:
        assert held is not None
        held.write("process 12 on login1")
        held.flush()
        assert intent.sender(results) == "process 12 on login1"
        monkeypatch.setattr(queue, "_known_name", [])
        monkeypatch.setattr(queue, "_silent_since", [])
        conf = tmp_path / "slurm.conf"
        monkeypatch.setenv("SLURM_CONF", str(conf))
        for name, found in (("Here", "process 12 on login1"), ("there", "")):
            conf.write_text(f"# ours\nClusterName={name} SlurmctldHost=gone(127.0.0.1)\n")
            assert intent.sender(results) == found, "Slurm is only silent"


def test_a_sender_outlasts_whoever_only_looks_for_one(results: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting(results)
    monkeypatch.setattr(sender, "_work", lambda *_: 7)
    with locked(intent.lock(results), wait=True):
        monkeypatch.setattr(sender, "LOCK_SECONDS", 0.2)
        assert sender.work(results, print) == 0
    looks = [True, False]
    real = sender.locked
    monkeypatch.setattr(sender, "locked", lambda path, wait: real(path, wait) if not looks.pop() else taken(path))

    def taken(path: Path) -> Any:
        return contextlib.nullcontext()

    assert sender.work(results, print) == 7


def test_a_sender_that_does_not_come_up_is_not_announced(results: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting(results)
    monkeypatch.setattr(sender.sys, "executable", "/bin/false")
    with pytest.raises(UserError, match=r"has ended \(.*sender.txt\): 'python main.py resubmit' sends them"):
        sender.ensure(SITE, results)


@pytest.mark.parametrize(("waits", "said"), [("Slurm is full", "stopped; runs"), ("", "stopped submitting; ")])
def test_ctrl_c_says_what_it_stopped(
    results: Results, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], waits: str, said: str
) -> None:
    waiting(results, waits=waits)

    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "_results", lambda: results)
    monkeypatch.setattr(main, "parsed", lambda argv: (main.Command("status", "", interrupted), None))
    assert main.main(["status"]) == 130
    assert said in capsys.readouterr().err


def test_an_earlier_job_of_a_continued_run_neither_hides_nor_replaces_its_new_one(
    results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, run = waiting(results)
    run.write_launch(earlier="17,41")
    old, new = (
        queue.SlurmJob(number, run.id, queue.user(), state, state, "", "", "", "")
        for number, state in (("41", "TIMEOUT"), ("52", "PENDING"))
    )
    for jobs, expected in (([new, old], ["52"]), ([old, new], ["52"]), ([old], [])):
        monkeypatch.setattr(queue, "ask", lambda *_, jobs=jobs: queue.Answer(jobs, [], True, False))
        found, _ = sbatch.find([run], 0.0)
        assert [job.id for job in found.values()] == expected


def test_a_job_of_unknown_id_is_cancelled_among_its_user_s_jobs_only(
    results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a stand-in for scancel, which would cancel for root what others named alike."""
    calls: list[list[str]] = []

    def asked(command: list[str], **_: object) -> SimpleNamespace:
        calls.append(command)
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(manage, "subprocess", SimpleNamespace(run=asked, TimeoutExpired=subprocess.TimeoutExpired))
    _, run = waiting(results)
    (seen,) = state.look(results).runs
    manage._scancel([seen])
    assert calls == [["scancel", f"--name={run.id}", f"--user={queue.user()}"]]


@pytest.mark.parametrize(
    ("shown", "elements"),
    [
        ("12_[0-3]", "12_0 12_1 12_2 12_3"),
        ("12_[0-4:2,7,9-10%5]", "12_0 12_2 12_4 12_7 12_9 12_10"),
        ("12_[3]", "12_3"),
        ("12_7", "12_7"),
        ("12", "12"),
        ("12_[0-3,...]", "12_[0-3,...]"),
        ("12_[-3]", "12_[-3]"),
    ],
)
def test_elements_that_never_started_are_found_in_the_one_record_that_sacct_has_of_them(
    shown: str, elements: str
) -> None:
    assert queue._elements(shown) == elements.split()
    line = queue.SEPARATOR.join(
        [shown, "CANCELLED by 1000", "ada", "", "", "", "0:0", "2026-11-28T10:00:00", "", "array"]
    )
    assert [*queue._from_sacct(line)] == elements.split()
