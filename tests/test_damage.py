"""Damage to one run's folder, or to a file that all share: every command goes on, and says in a line what is damaged.

A results folder is shared. Whatever one user's disk, editor or malice leaves there must neither stop nor hang a
command of the others.
"""

import contextlib
import io
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import pytest
from conftest import ROOT, clean_environment
from damage_files import JSON_KINDS, OTHERS
from damage_site import ESCAPES, Kind, Site
from damage_values import TYPED
from test_compare import job as make_job

from duel.cli import commands
from duel.cli import main as cli
from duel.job import Job
from duel.launch import script, submit
from duel.launch.schema import Cluster
from duel.measure.supervisor import _Work
from duel.results import Results, Run
from duel.states import FINISHED, LOST
from duel.table import read_rows

SECONDS = 10.0  # that a command may take
KINDS = [*JSON_KINDS, *TYPED, *OTHERS]
MEMORY = 4 << 30  # that it may allocate


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site.build(tmp_path_factory.mktemp("damage"))


class TookTooLongError(Exception):
    """A command hangs."""


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Within a time, and a size of memory."""

    def late(number: int, frame: FrameType | None) -> None:
        raise TookTooLongError(f"not done within {SECONDS} s")

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = signal.signal(signal.SIGALRM, late)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, hard))
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGALRM, before)


@dataclass
class Said:
    code: int
    text: str
    faults: list[str] = field(default_factory=list)


def call(words: list[str]) -> Said:
    """What a command prints, on both streams; what it must not do is in ``faults``."""
    stream = io.TextIOWrapper(io.BytesIO(), write_through=True)
    faults, code = [], -1
    with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream), limited():
        try:
            code = cli.main(words)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException as error:
            faults.append(f"raised {type(error).__name__}: {error}")
    text = stream.buffer.getvalue().decode(errors="replace")
    if not faults and code not in (0, 1, 2):
        faults.append(f"exit code {code}")
    if "Traceback" in text:
        faults.append("printed a traceback")
    if words[0] != "logs" and (control := [char for char in text if not char.isprintable() and char != "\n"]):
        faults.append(f"printed {control[:4]}")
    return Said(code, text, [f"{' '.join(words)}: {fault[:300]}" for fault in faults])


def commands_of(site: Site, kind: Kind) -> dict[str, list[str]]:
    run = site.victim.id
    found: dict[str, list[str]] = {
        "status": ["status"],
        "status --json": ["status", "--json"],
        "compare": ["compare"],
        "compare RUN": ["compare", run],
        "compare OTHER": ["compare", site.healthy[0].id],
        "logs": ["logs", run],
        "resubmit": ["resubmit"],
        "resubmit RUN": ["resubmit", run, "--apply", "--include", "code"],
        "sync": ["sync"],
        "collect": ["collect"],
        "status again": ["status"],
        "cancel queued": ["cancel", "--state", "queued"],
        "cancel RUN": ["cancel", run],
        "publish": ["publish", "--name", "x"],
    }
    if kind.of_cluster:
        found["submit"] = ["--benchmark", "mnist", "--use_case", "1", "--dry_run"]
        found["validate"] = ["validate", "--benchmark", "mnist", "--target", "nowhere"]
        found["doctor"] = ["doctor"]
    return found


@pytest.fixture
def damaged(
    request: pytest.FixtureRequest, prepared: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Site]:
    """A copy of the prepared checkout, in which commands run as in their own."""
    site = Site(tmp_path / "duel")
    shutil.copytree(prepared.root, site.root)
    monkeypatch.chdir(site.root)
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("squeue", "sacct"):  # a Slurm that knows nothing
        (programs / name).write_text("#!/bin/sh\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")

    def launch(jobs: list[Job], cluster: Cluster, results: Results, say: object, after: Any = None) -> list[Run]:
        submit.plan(jobs, cluster.target(jobs[0].target)[1], after)
        return []

    with (
        mock.patch.object(commands, "ROOT", site.root),
        mock.patch.object(cli, "ROOT", site.root),
        mock.patch.object(script, "ROOT", site.root),
        mock.patch.object(submit, "launch", launch),
    ):
        yield site


def repair(site: Site, prepared: Site) -> None:
    shutil.rmtree(site.victim.folder)
    shutil.copytree(prepared.victim.folder, site.victim.folder)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_damage_stops_no_command_and_hides_no_other_run(kind: Kind, damaged: Site, prepared: Site) -> None:
    site = damaged
    kind.apply(site)
    said = {name: call(words) for name, words in commands_of(site, kind).items()}
    faults = [fault for one in said.values() for fault in one.faults]
    assert not faults, "\n".join(faults)
    for run in site.healthy:
        for name in ("status", "status --json", "compare OTHER", "status again"):
            assert run.id in said[name].text, f"{name}: {said[name].text}"
    for name in kind.says:
        text = said[name].text
        if name == "collect" and not kind.hidden:
            text = "\n".join(str(row.cause) for row in read_rows(site.results.csv))
        assert kind.shown in text, f"{name}: {text}"
    if not kind.hidden:
        assert said["collect"].code == 0, said["collect"].text
        rows = read_rows(site.results.csv)
        for run in site.healthy:
            mine = [row for row in rows if row.run_id == run.id]
            assert mine
            assert {row.status for row in mine} == {FINISHED}, run.id
    # A job that ends beside it merges, too.
    work = _Work(make_job("jax", "gcn", preset="smoke"), site.healthy[0], site.results)
    with limited(), contextlib.redirect_stderr(io.StringIO()):
        assert {row.status for row in work.close(FINISHED, "", None, 0)} == {FINISHED}
    repair(site, prepared)
    if not kind.hidden:
        assert call(["collect"]).code == 0
        mine = [row for row in read_rows(site.results.csv) if row.run_id == site.victim.id]
        assert mine
        assert LOST not in {row.status for row in mine}, [row.cause for row in mine]
        assert not any("damaged" in str(row.cause) for row in mine)


def outside(site: Site, *words: str, prefix: tuple[str, ...] = ()) -> str:
    """What a command in a process of its own prints; it must end, and without a traceback."""
    if not (site.root / "duel").exists():
        shutil.copytree(ROOT / "duel", site.root / "duel", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "main.py", site.root)
    done = subprocess.run(
        [*prefix, sys.executable, "main.py", *words],
        cwd=site.root,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode in (0, 1, 2), said
    assert "Traceback" not in said
    return said


NAMES = ("status.json is a pipe", "rows/000.json is endless", "launch.json is deep", "rows/000.json is huge")
BY_NAME = {kind.name: kind for kind in KINDS}


@pytest.mark.parametrize("kind", [BY_NAME[name] for name in NAMES], ids=lambda kind: kind.name)
def test_the_same_in_a_process_of_its_own(kind: Kind, damaged: Site) -> None:
    kind.apply(damaged)
    for words in (("status",), ("compare", damaged.healthy[0].id), ("collect",)):
        said = outside(damaged, *words)
        assert words == ("collect",) or damaged.healthy[0].id in said
    assert "damaged" in outside(damaged, "status") or "rows" in kind.name
    assert len(read_rows(damaged.results.csv)) == 4


def test_a_file_that_may_not_be_read(damaged: Site) -> None:
    prefix: tuple[str, ...] = ()
    if os.geteuid() == 0:  # who may read everything: without that right
        assert shutil.which("setpriv"), "setpriv (util-linux) is needed to give up root's rights"
        prefix = ("setpriv", "--bounding-set=-dac_override,-dac_read_search")
    status, row = damaged.victim.status_file, damaged.victim.row_file(0)
    status.chmod(0)
    said = outside(damaged, "status", prefix=prefix)
    assert "damaged: status.json cannot be read: Permission denied" in said
    assert all(run.id in said for run in damaged.healthy)
    row.chmod(0)
    outside(damaged, "collect", prefix=prefix)
    causes = [row.cause for row in read_rows(damaged.results.csv) if row.run_id == damaged.victim.id]
    assert causes == ["damaged: 000.json cannot be read: Permission denied"]
    for folder in (damaged.victim.rows_folder, damaged.victim.folder):
        folder.chmod(0)
        for words in (("status",), ("collect",), ("compare",), ("sync",), ("resubmit",)):
            said = outside(damaged, *words, prefix=prefix)
            assert words != ("status",) or damaged.healthy[0].id in said


def test_a_terminal_gets_no_control_characters_of_a_log(damaged: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    damaged.victim.log.write_text(f"step 1{ESCAPES}\n")
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stdout", terminal)
    assert cli.main(["logs", damaged.victim.id]) == 0
    said = terminal.getvalue()
    assert said.startswith("step 1\\x1b]0;title")
    assert all(char.isprintable() or char == "\n" for char in said)
