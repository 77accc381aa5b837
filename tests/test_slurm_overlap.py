"""Calls of sbatch that overlap, where a target has no pause between them: what fails in one touches no other."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import SUBMIT, Site, heeding_ctrl_c

from duel.launch import sbatch

CPU = ("--partition=cpu", "--time=00:10:00", "--mem=2G", "--begin=now+1hour")
# The first call fails at once, where it is told to; all others take some seconds. Each notes when it begins and ends.
SLOW = """
case " $* " in *" --test-only "*) exec sbatch "$@";; esac
date +"%s.%N begins" >> {folder}/calls
if {fails} && mkdir {folder}/first 2>/dev/null; then
    echo "sbatch: error: Batch job submission failed: Access/permission denied" >&2
    exit 1
fi
sleep {seconds}
sbatch "$@"
code=$?
date +"%s.%N ends" >> {folder}/calls
exit $code
"""


def slow_sbatch(site: Site, fails: str = "false", pause: str = "0", seconds: int = 1) -> None:
    site.stand_in("sbatch", SLOW.format(folder=site.folder, fails=fails, seconds=seconds))
    site.target(*CPU, more=f"    submit: {site.folder}/stand-in-sbatch\n    sender: none\n")
    file = site.folder / "cluster.yaml"
    file.write_text(file.read_text().replace("pause: 0\n", f"pause: {pause}\n"))


def most_at_once(site: Site) -> int:
    most = now = 0
    for line in sorted((site.folder / "calls").read_text().splitlines()):
        now += 1 if line.endswith("begins") else -1
        most = max(most, now)
    return most


@pytest.mark.parametrize(("pause", "number", "most"), [("0", 10, sbatch.AT_ONCE), ("0.01", 3, 1)])
def test_calls_overlap_only_without_a_pause_and_send_each_job_once(
    site: Site, pause: str, number: int, most: int
) -> None:
    slow_sbatch(site, pause=pause)
    said = site.popen("-c", SUBMIT, str(number)).communicate(timeout=120)[0]
    assert said.count("started ") == number, said
    assert most_at_once(site) == most
    assert site.jobs() == dict.fromkeys((run.id for run in site.results.runs()), 1)


def test_a_call_that_is_refused_takes_no_other_s_script_away(site: Site) -> None:
    slow_sbatch(site, fails="true")
    site.popen("-c", SUBMIT, "6").communicate(timeout=120)
    states = [status["state"] for status in site.statuses().values()]
    assert sorted(states) == ["failed", *5 * ["queued"]]
    assert sorted(site.jobs().values()) == 5 * [1]
    left = [path for path in (site.results.folder / "logs").glob(".*") if not path.is_symlink()]
    assert left == [], "what submitit leaves of a submission that failed"


def interrupted(site: Site, number: int, ready: Callable[[], Any]) -> str:
    """What a driver says that sends ``number`` jobs, and ends by a terminal's Ctrl-C, once ``ready``, at once."""
    with heeding_ctrl_c(), open(site.folder / "said.txt", "w") as said:
        driver = subprocess.Popen(
            [sys.executable, "-c", SUBMIT, str(number)],
            cwd=site.folder,
            env=site.environment,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    site.wait(ready)
    pressed = time.monotonic()
    os.killpg(driver.pid, signal.SIGINT)
    driver.wait(timeout=60)
    assert time.monotonic() - pressed < 3, "it went on instead of ending"
    return (site.folder / "said.txt").read_text()


@pytest.mark.parametrize(("pause", "number"), [("0", 10), ("0", 2), ("0.01", 2)])
def test_ctrl_c_ends_a_driver_at_once_and_the_next_command_sends_each_job_once(
    site: Site, pause: str, number: int
) -> None:
    slow_sbatch(site, pause=pause, seconds=8)  # which timeout keeps from Ctrl-C: it outlives the driver, with its lock
    calls = site.folder / "calls"
    expected = min(number, sbatch.AT_ONCE if pause == "0" else 1)
    said = interrupted(site, number, lambda: calls.exists() and len(calls.read_text().splitlines()) == expected)
    assert "KeyboardInterrupt" in said
    again = site.popen("-c", SUBMIT, str(number)).communicate(timeout=120)[0]
    assert f"continuing the submission of {number} jobs" in again
    assert len(site.jobs()) == number
    assert site.jobs() == dict.fromkeys((run.id for run in site.results.runs()), 1)


@pytest.mark.parametrize("pause", ["0", "0.01"])
def test_after_ctrl_c_nothing_more_is_sent(site: Site, pause: str) -> None:
    slow_sbatch(site, pause=pause)
    site.slurm.stop_controller()
    said = interrupted(site, 2, lambda: "retrying in" in (site.folder / "said.txt").read_text())
    assert "KeyboardInterrupt" in said
    site.start_controller()
    time.sleep(6)  # longer than it would have waited
    assert not site.jobs()


def overlapping(batches: Iterator[Any], one: Any) -> None:
    sbatch._overlapping(one, batches, sbatch.AT_ONCE, threading.Event())


def test_a_submission_that_is_unclear_counts_more_than_others_that_must_wait() -> None:
    """Nobody looks for the jobs of a submission that only waits: it would be sent a second time."""

    def one(batch: str, target: None) -> None:
        if batch == "unclear":
            time.sleep(0.3)
            raise sbatch.UnclearError(batch)
        raise sbatch.FullError(batch)

    with pytest.raises(sbatch.UnclearError):
        overlapping(iter([("unclear", None), ("full", None), ("full", None)]), one)
    with pytest.raises(sbatch.FullError):
        overlapping(iter([("full", None)]), one)

    def broken(batch: str, target: None) -> None:
        if batch == "broken":
            time.sleep(0.3)
            raise OSError("no space left")
        one(batch, target)

    with pytest.raises(OSError, match="no space left"):
        overlapping(iter([("broken", None), ("full", None)]), broken)


def test_a_target_that_takes_no_more_hides_nothing_that_is_under_way() -> None:
    ended = []

    def one(batch: str, target: None) -> None:
        time.sleep(0.3)
        ended.append(batch)
        if batch == "unclear":
            raise sbatch.UnclearError(batch)

    def batches(first: str) -> Iterator[tuple[str, None]]:
        yield first, None
        raise sbatch.NotNowError("no more")

    with pytest.raises(sbatch.NotNowError):
        overlapping(batches("sent"), one)
    with pytest.raises(sbatch.UnclearError):
        overlapping(batches("unclear"), one)
    assert ended == ["sent", "unclear"]


def test_after_a_failure_nothing_more_is_begun() -> None:
    begun: list[int] = []

    def one(batch: int, target: Path) -> None:
        begun.append(batch)
        raise sbatch.NotNowError(str(batch))

    with pytest.raises(sbatch.NotNowError):
        overlapping(iter([(number, Path()) for number in range(50)]), one)
    assert len(begun) <= sbatch.AT_ONCE
