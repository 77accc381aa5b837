"""Weights & Biases where its server refuses, hangs, fails or cuts off, and what `main.py sync` brings there later."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT, clean_environment
from wandb_server import Server, on_disk

from duel.errors import UserError
from duel.launch import sync as syncing
from duel.measure.sinks import WandbSink
from duel.record import Row
from duel.results import Run
from duel.states import FINISHED, RUNNING
from duel.status import this_process

KEY = "0123456789abcdef0123456789abcdef01234567"  # made up, of the right shape
BOUND_SECONDS = 75.0  # generous: wandb gets 5 s to reach the server, 20 s to begin and 20 s to end
SLURM = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "node[01-02]", "SLURM_CLUSTER_NAME": "loopback"}


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        yield server
        server.shutdown()


# What the supervising process does with W&B: it begins, streams the losses it is told on stdin, and ends.
JOB = """
import json, sys, time
from pathlib import Path
from duel.measure.sinks import WandbSink
from duel.results import Run

run = Run(Path(sys.argv[1]))
sink = WandbSink(run.folder, run.rows(), {"host": "here"}, "the-pair")
print(json.dumps(sink.note), flush=True)
for line in sys.stdin:
    for step in range(*json.loads(line)):
        sink.log([{"event": "loss", "row": 0, "step": step, "loss": step / 2, "time": time.time()}])
    print(json.dumps("logged"), flush=True)
sink.finish([row.replace(device_kind="cpu", throughput=3.5) for row in run.rows()], 0)
print(json.dumps(sink.note), flush=True)
"""


class Job:
    """A run whose supervising process streams to the W&B server at ``url``."""

    def __init__(self, folder: Path, url: str, **environment: str) -> None:
        self.run = Run(folder / "runs" / "jax_mnist_1-250101-000000-abcd")
        row = Row(framework="jax", benchmark="mnist", use_case=1, target="local", attempt=1)
        self.run.create([row], owner=this_process())
        self.run.write_status(state=RUNNING)
        self.begun = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-c", JOB, str(self.run.folder)],
            cwd=ROOT,
            env=clean_environment() | credentials(folder, url) | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.output = ""
        self.note = self._answer()

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        with self.process:  # closes its pipes
            pass

    def _answer(self) -> str:
        """The next thing that the job has to say; wandb may print between."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line
            if line.startswith('"'):
                return str(json.loads(line))
        raise AssertionError(self.output)

    def log(self, first: int, end: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"[{first}, {end}]\n")
        self.process.stdin.flush()
        assert self._answer() == "logged"

    def finish(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.note = self._answer()
        assert self.process.stdout is not None
        self.output += self.process.stdout.read()
        assert self.process.wait() == 0, self.output
        self.seconds = time.monotonic() - self.begun
        self.run.write_status(state=FINISHED)
        self.keeps_the_secret()

    def keeps_the_secret(self) -> None:
        assert KEY not in self.output
        files = [path for path in self.run.folder.rglob("*") if path.is_file()]
        assert [path for path in files if KEY.encode() in path.read_bytes()] == []


def credentials(folder: Path, url: str) -> dict[str, str]:
    """The environment of somebody with a key; ``folder`` is home, so that no key of the real user is found."""
    return {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": url, "HOME": str(folder), "NETRC": str(folder / ".netrc")}


def closed_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


Sync = Callable[..., tuple[bool, str]]


@pytest.fixture
def sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sync:
    """Calls ``sync`` for one run and a server; returns whether all went well and what it said."""
    for name in set(os.environ) - set(clean_environment()):
        monkeypatch.delenv(name)
    # As on many login nodes, for the sake of the jobs; an upload is asked for all the same.
    monkeypatch.setenv("WANDB_MODE", "offline")

    def call(run: Run, url: str, **environment: str) -> tuple[bool, str]:
        for name, value in (credentials(tmp_path, url) | environment).items():
            monkeypatch.setenv(name, value)
        said: list[str] = []
        well = syncing.sync([run], said.append)
        (line,) = said
        assert KEY not in line
        return well, line.removeprefix(f"{run.id}: ")

    return call


def test_a_run_is_streamed_while_it_goes_on_and_says_where_it_ran(server: Server, sync: Sync, tmp_path: Path) -> None:
    with Job(tmp_path, server.url, **SLURM) as job:
        assert job.note == f"Weights & Biases: {server.url}/someone/duel/runs/{job.run.id}"
        job.log(0, 30)
        job.finish()
        assert server.losses(job.run.id) == [step / 2 for step in range(30)]
        run = server.runs[job.run.id]
        assert (run["exit_code"], run["summary"]["jax/throughput"]) == (0, 3.5)
        config = {name: item["value"] for name, item in run["config"].items()}
        assert config["slurm"] == {"job": "4711", "nodes": "node[01-02]", "cluster": "loopback"}
        assert (config["attempt"], config["run_folder"]) == (1, str(job.run.folder))
        assert (config["benchmark"], config["use_case"], config["target"]) == ("mnist", 1, "local"), "to filter by"
        requests = len(server.requests)
        assert sync(job.run, server.url) == (True, "nothing to upload, it is online")
        assert len(server.requests) == requests


# How the server is when a job begins, how it is from then on, the job's WANDB_MODE, and what the job says in the end.
TROUBLE = {
    "refuses": ("refuses", "", "", "does not answer"),
    "hangs": ("hangs", "", "", "does not answer"),
    "dribbles": ("dribbles", "", "", "does not answer"),
    "fails": ("fails", "", "", "it failed online: CommError"),
    "forbids": ("forbids", "", "", "it failed online: CommError"),
    "refuses, online asked for": ("refuses", "", "online", "it failed online: CommError"),
    "hangs, online asked for": ("hangs", "", "online", "it failed online: CommError"),
    "cuts off later": ("answers", "cuts off", "", "not all of it uploaded"),
    "hangs later": ("answers", "hangs", "", "not all of it uploaded"),
    "refuses, offline asked for": ("answers", "", "offline", "as asked"),
}


@pytest.fixture(scope="module")
def troubled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    """A job for each trouble, all at once: they mostly wait."""

    def play(trouble: str) -> Job:
        at_first, later, mode, _ = TROUBLE[trouble]
        with Server() as server:
            server.turn(at_first)
            url = closed_port() if at_first == "refuses" else server.url
            with Job(tmp_path_factory.mktemp("job"), url, **({"WANDB_MODE": mode} if mode else {})) as job:
                job.log(0, 20)
                server.turn(later or at_first)
                job.log(20, 40)
                job.finish()
            if mode == "offline":
                assert server.requests == [], "offline is off the network"
            server.shutdown()
        return job

    with ThreadPoolExecutor(len(TROUBLE)) as pool:
        return dict(zip(TROUBLE, pool.map(play, TROUBLE), strict=True))


@pytest.mark.parametrize("trouble", TROUBLE)
def test_a_troubled_server_costs_bounded_time_and_no_data(
    trouble: str, troubled: dict[str, Job], server: Server, sync: Sync
) -> None:
    job = troubled[trouble]
    assert job.seconds < BOUND_SECONDS
    assert TROUBLE[trouble][-1] in job.note
    assert "Traceback" not in job.output
    losses = [step / 2 for step in range(40)]
    assert [logged["jax/loss"] for logged in on_disk(job.run.folder)] == losses
    # Once the server is well again.
    assert sync(job.run, server.url) == (True, "uploaded")
    assert server.losses(job.run.id) == losses
    assert (server.runs[job.run.id]["exit_code"], server.runs[job.run.id]["summary"]["jax/throughput"]) == (0, 3.5)
    requests = len(server.requests)
    assert sync(job.run, server.url) == (True, "already uploaded")
    assert len(server.requests) == requests
    job.keeps_the_secret()


def grown(file: Path, size: int) -> int:
    """The file's size once wandb has written another 32 KiB behind ``size``: it does so in a process of its own."""
    deadline = time.monotonic() + 60
    while (now := file.stat().st_size) < size // 32768 * 32768 + 32768:
        assert time.monotonic() < deadline, now
        time.sleep(0.1)
    return now


def test_a_run_that_goes_on_is_uploaded_again_and_nothing_twice(server: Server, sync: Sync, tmp_path: Path) -> None:
    with Job(tmp_path, server.url, WANDB_MODE="offline") as job:
        assert sync(job.run, server.url) == (True, "nothing to upload yet")
        job.log(0, 500)  # more than the 32 KiB after which wandb writes
        (file,) = job.run.folder.glob("wandb/offline-run-*/*.wandb")
        size = grown(file, 0)
        so_far = "uploaded what is written so far; it is still running, so sync again later"
        assert sync(job.run, server.url) == (True, so_far)
        first = server.losses(job.run.id)
        assert first == [step / 2 for step in range(len(first))]
        assert 100 < len(first) <= 500
        assert not file.with_name(f"{file.name}.synced").exists(), "'wandb clean' would delete it"
        job.log(500, 1000)
        grown(file, size)
        assert sync(job.run, server.url) == (True, so_far)
        assert len(first) < len(server.losses(job.run.id)) <= 1000
        job.finish()
        assert sync(job.run, server.url) == (True, "uploaded")
        assert server.losses(job.run.id) == [step / 2 for step in range(1000)]
        assert server.runs[job.run.id]["exit_code"] == 0
        assert sync(job.run, server.url) == (True, "already uploaded")


def test_a_killed_run_is_uploaded_as_far_as_it_got(server: Server, sync: Sync, tmp_path: Path) -> None:
    with Job(tmp_path, server.url, WANDB_MODE="offline") as job:
        job.log(0, 500)
        (file,) = job.run.folder.glob("wandb/offline-run-*/*.wandb")
        grown(file, 0)  # what wandb was given a moment ago may not have reached its own process yet
        job.process.kill()
        job.process.wait()
        job.run.write_status(state=FINISHED)
        until = time.monotonic() + 30
        while sync(job.run, server.url) != (
            True,
            "already uploaded",
        ):  # wandb's own process outlives it and still writes
            assert time.monotonic() < until
        losses = server.losses(job.run.id)
        assert losses == [step / 2 for step in range(len(losses))]
        assert len(losses) > 100
        assert server.runs[job.run.id]["exit_code"] == 1


def test_a_run_outlives_a_crash_of_wandb(server: Server, tmp_path: Path) -> None:
    with Job(tmp_path, server.url) as job:
        job.log(0, 20)
        for children in Path(f"/proc/{job.process.pid}/task").glob("*/children"):
            for pid in children.read_text().split():
                os.kill(int(pid), signal.SIGKILL)
        job.log(20, 40)
        job.finish()
        assert job.seconds < BOUND_SECONDS
        assert "gave up" in job.note
        assert "metrics.jsonl has everything" in job.note


def test_sync_says_what_is_wrong_and_marks_nothing_as_uploaded(
    server: Server, sync: Sync, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Job(tmp_path, server.url, WANDB_MODE="offline") as job:
        job.log(0, 20)
        job.finish()
        for name in syncing.REQUEST_SECONDS:
            monkeypatch.setitem(syncing.REQUEST_SECONDS, name, 1)
        monkeypatch.setattr(syncing, "RETRIES", 1)
        with pytest.raises(UserError, match=r"connection refused; it needs a key .* and a server that answers"):
            sync(job.run, closed_port())
        for behaviour in ("hangs", "fails"):
            server.turn(behaviour)
            with pytest.raises(UserError, match=r"giving up after|Timed out"):
                sync(job.run, server.url)
        server.turn("forbids")
        well, said = sync(job.run, server.url)
        assert not well
        assert said.startswith("not uploaded: ")
        for behaviour in ("cuts off", "forbids"):  # after the run has begun
            server.turn(behaviour, "/file_stream")
            well, said = sync(job.run, server.url)
            assert not well
            assert "Fatal error while uploading data" in said
        server.turn("answers")
        assert sync(job.run, server.url) == (True, "uploaded")
        assert server.losses(job.run.id) == [step / 2 for step in range(20)]


def test_sync_without_a_key_or_without_data(server: Server, sync: Sync, tmp_path: Path) -> None:
    with Job(tmp_path, server.url, WANDB_API_KEY="") as job:
        assert "offline (no key)" in job.note
        job.finish()
        with pytest.raises(UserError, match="No API key configured"):
            sync(job.run, server.url, WANDB_API_KEY="")
        assert server.requests == []
        assert sync(job.run, server.url) == (True, "uploaded")
        empty = Run(tmp_path / "runs" / "jax_mnist_1-250101-000000-ffff")
        empty.create([])
        assert sync(empty, server.url) == (True, "nothing to upload")


def test_a_wandb_that_knows_other_settings_fails_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(**settings: object) -> None:
        raise TypeError("unexpected keyword: finish_timeout_raises")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(Settings=refusing, setup=print, init=print))
    row = Row(run_id="jax_mnist_1-x", framework="jax", benchmark="mnist", use_case=1, target="local")
    sink = WandbSink(tmp_path, [row], {}, "group")
    assert "gave up" in sink.note
    assert "finish_timeout_raises" in sink.note
