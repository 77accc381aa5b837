"""How jobs end in a real Slurm, whatever ends them, and what 'resubmit' makes of it.

Interpreters are stand-ins of a line or two where only the job's way through Slurm matters.
"""

import csv
import sys
import time
from collections import Counter
from datetime import datetime, timedelta

import pytest
from conftest import SUBMIT, Site, rows_of

from duel.files import write_atomically

MNIST = ("--benchmark", "mnist", "--use_case", "1", "--preset", "smoke")
CPU = ("--partition=cpu", "--time=00:10:00", "--cpus-per-task=1", "--mem=2G")


def test_scancel_ends_a_run_as_cancelled_and_only_its_name_starts_it_again(site: Site) -> None:
    site.target(*CPU)
    site.main("--benchmark", "mnist", "--use_case", "1", "--framework", "jax")
    run = site.only()
    site.wait_for_state(run, "running")
    site.slurm.run("scancel", run.launch().slurm_job_id)
    site.wait_for_state(run, "cancelled")
    status = site.statuses()[run.id]
    assert status["cause"] == "ended by SIGTERM"
    site.wait(lambda: "ended by SIGTERM: cancelled" in site.main("status"))  # Slurm may still be ending it
    assert "retried only by name" in site.main("resubmit")
    assert len(site.results.runs()) == 1
    assert "attempt 2 of 3" in site.main("resubmit", run.id)
    again = site.results.runs()[-1]
    assert again.id != run.id
    assert f"was followed by {again.id}" in site.main("resubmit", run.id)
    site.main("cancel", again.id)


def test_a_run_that_met_its_limit_continues_at_its_next_row(site: Site) -> None:
    site.target(*CPU)
    site.main("--benchmark", "mnist", "--use_case", "5", "--preset", "smoke", "--paired")
    run = site.only()
    site.wait(lambda: run.rows()[1].status == "finished" and run.rows()[2].status == "running", 300)
    first, job_id = run.rows()[:2], run.launch().slurm_job_id
    site.slurm.run("scancel", "--batch", "--signal=USR2", job_id)  # as Slurm does before the limit
    site.wait_for_state(run, "failed")
    site.main("collect")  # which takes its four rows for all that will be
    said = site.main("resubmit")
    assert "continues, 2 of 4 rows are measured" in said
    site.wait_for_state(run, "finished")
    (only,) = site.results.runs()
    rows = only.rows()
    assert rows[:2] == first
    assert (rows[2].status, rows[2].attempt) == ("failed", 1)
    assert [(row.framework, row.batch_size, row.status, row.attempt) for row in rows[3:]] == [
        (rows[3].framework, 8, "finished", 2),
        (rows[2].framework, 8, "finished", 2),
    ]
    launch = only.launch()
    assert launch.earlier == job_id != launch.slurm_job_id
    assert {row.slurm_job_id for row in rows[3:]} == {launch.slurm_job_id}
    assert site.statuses()[run.id]["state"] == "finished"
    merged = [row.status for row in rows]  # by the job, a moment after the run's end
    site.wait(lambda: [row["status"] for row in rows_of(site.folder)] == merged)
    site.wait(lambda: site.jobs()[run.id] == 2)  # the accounting is late; and nothing was sent twice


STUDY = """
about: two rows in one job
points:
  - {benchmark: mnist, use_case: 5, preset: smoke, batch_sizes: [1, 8], paired: false, framework: jax}
"""


def test_a_study_whose_job_meets_its_time_limit_goes_on_at_the_next_row(site: Site) -> None:
    site.target(*CPU)
    (site.folder / "studies").mkdir(exist_ok=True)
    (site.folder / "studies" / "two.yaml").write_text(STUDY)
    site.main("study", "two", "submit")
    run = site.only()
    site.wait(lambda: run.rows()[0].status == "finished" and run.rows()[1].status == "running", 300)
    site.slurm.run("scancel", "--batch", "--signal=USR2", run.launch().slurm_job_id)  # as Slurm does before the limit
    site.wait_for_state(run, "failed")
    said = site.main("study", "two", "status")
    assert "1 done, 1 missing" in said
    assert "the time limit, or a preemption, was near" in said
    assert "0 scripts" in site.main("study", "two", "submit"), "it was started, and only 'resume' starts it again"
    assert "continues, 1 of 2 rows are measured" in site.main("study", "two", "resume")
    site.wait(lambda: run.stored_status().state == "finished", 300)
    assert site.only() == run
    assert [(row.batch_size, row.status) for row in run.rows()] == [(1, "finished"), (8, "failed"), (8, "finished")]
    assert "2 points, 2 done" in site.main("study", "two", "status")
    assert "0 scripts" in site.main("study", "two", "plan")


@pytest.mark.parametrize("own", [(), pytest.param(("--signal=B:USR1@60",), marks=pytest.mark.full)])
def test_the_warning_before_the_time_limit_reaches_the_run_and_a_longer_one_is_proposed_to_both(
    site: Site, own: tuple[str, ...]
) -> None:
    site.target(*CPU, *own)
    # A row of it takes a minute: Slurm looks each half minute, and a run that has finished one is continued instead.
    site.main("--benchmark", "resnet50", "--use_case", "1", "--preset", "publication", "--framework", "jax")
    run = site.only()
    site.wait(lambda: sum(event["event"] == "block" for event in run.events()[0]) >= 2, 300)
    # The job is warned 60 s before its end: within seconds, and only now, when there is something to save.
    ends = datetime.now() + timedelta(seconds=65)
    site.slurm.run("scontrol", "update", f"jobid={run.launch().slurm_job_id}", f"EndTime={ends:%Y-%m-%dT%H:%M:%S}")
    site.wait_for_state(run, "failed")
    rows = run.rows()
    assert rows[0].status == "finished" or rows[0].partial
    stopped = next(row for row in rows if row.status != "finished")
    assert str(stopped.cause).startswith("ended by SIGUSR2")
    begun = [row for row in rows if row.partial]
    for row in begun:
        assert row.status == "failed"
        assert row.throughput
        assert row.throughput > 0
    # Slurm takes a moment longer to end the job.
    said = site.wait(lambda: "has not ended yet" not in (text := site.main("resubmit")) and text)
    assert "proposed for both sides: --time=00:20:00; attempt 2 of 3" in said
    assert len(site.results.runs()) == 1
    site.main("resubmit", "--apply")
    again = site.results.runs()[-1]
    assert "#SBATCH --time=00:20:00\n" in again.script.read_text()
    assert again.rows()[0].attempt == 2
    site.main("cancel", again.id)


def test_a_job_that_slurm_ends_at_its_limit_is_settled_with_slurm_s_word(site: Site) -> None:
    site.target(*CPU, python=site.stand_in("deaf", "trap '' TERM USR2", "sleep 600 & wait; sleep 600"))
    site.main(*MNIST, "--framework", "jax")
    run = site.only()
    job_id = run.launch().slurm_job_id
    site.wait(lambda: site.statuses()[run.id].get("slurm", {}).get("state") == "RUNNING")
    assert "the run has not reported yet" in site.main("status")
    site.slurm.run("scontrol", "update", f"jobid={job_id}", "TimeLimit=0")
    site.wait(lambda: site.statuses()[run.id]["state"] == "failed")
    status = site.statuses()[run.id]
    assert (status["why"], status["slurm"]["state"]) == ("time limit", "TIMEOUT")
    assert "proposed for both sides: --time=00:20:00" in site.main("resubmit")


def test_a_job_that_ends_without_a_word_is_never_called_finished(site: Site) -> None:
    site.target(*CPU, python=site.stand_in("silent", "echo the last words", "exit 0"))
    site.main(*MNIST, "--framework", "jax")
    run = site.only()
    site.wait(lambda: site.statuses()[run.id]["state"] != "queued")
    status = site.statuses()[run.id]
    assert status["state"] == "failed"
    assert status["cause"].startswith("Slurm: incomplete") or status["cause"].startswith("incomplete")
    assert "the last words" in status["cause"]
    assert "the last words" in site.main("logs", run.id)
    said = site.main("resubmit")
    assert "the code is the same" in said
    assert "    the last words" in said
    assert "attempt 2 of 3" in site.main("resubmit", "--include", "code")
    with open(site.folder / "duel" / "errors.py", "a") as file:
        file.write("# changed\n")
    second = site.results.runs()[-1]
    site.wait(lambda: site.statuses()[second.id]["state"] == "failed")
    assert "the code has changed since; attempt 3 of 3" in site.main("resubmit")
    third = site.results.runs()[-1]
    site.wait(lambda: site.statuses()[third.id]["state"] == "failed")
    assert "that was attempt 3 of 3" in site.main("resubmit", "--include", "code")
    assert len(site.results.runs()) == 3


def test_out_of_memory_is_proposed_more_memory_on_both_sides(site: Site) -> None:
    """Without cgroups Slurm cannot end a job for its memory here: the stand-in prints what slurmd was seen to print."""
    words = "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of the step tasks have been OOM Killed."
    # The second: srun now and then loses what a task writes in the instant in which it is killed.
    site.target(*CPU, python=site.stand_in("hungry", f"echo '{words}' >&2", "sleep 1", "kill -9 $$"))
    site.main(*MNIST)
    runs = site.results.runs()
    site.wait(lambda: {s["state"] for s in site.statuses().values()} == {"failed"})
    assert {status["why"] for status in site.statuses().values()} == {"out of memory"}
    said = site.main("resubmit", "--framework", "jax")
    assert said.count("proposed for both sides: --mem=4G") == 2
    site.main("resubmit", "--framework", "jax", "--apply")
    again = [run for run in site.results.runs() if run not in runs]
    assert len(again) == 2
    assert all("#SBATCH --mem=4G\n" in run.script.read_text() for run in again)
    assert {run.launch().pair for run in again} == {run.launch().pair for run in runs}


def test_a_run_on_a_node_that_died_goes_to_another(site: Site) -> None:
    site.target(*CPU, "--nodes=1")
    site.main("--benchmark", "mnist", "--use_case", "1", "--framework", "jax")
    run = site.only()
    site.wait_for_state(run, "running")
    node = site.statuses()[run.id]["slurm"]["nodes"]
    site.slurm.kill_node(node)
    site.wait(lambda: site.statuses()[run.id]["state"] == "failed")
    status = site.statuses()[run.id]
    assert (status["why"], status["cause"]) == ("infrastructure", f"Slurm: node {node} failed")
    assert f"avoiding {node}; attempt 2 of 3" in site.main("resubmit")
    again = site.results.runs()[-1]
    assert f"#SBATCH --exclude={node}\n" in again.script.read_text()
    site.wait_for_state(again, "running")
    assert site.statuses()[again.id]["slurm"]["nodes"] not in ("", node)
    assert (again.launch().after, again.rows()[0].attempt) == (run.id, 2)
    site.main("cancel", again.id)


def test_a_preempted_run_is_told_so_and_started_again(site: Site) -> None:
    site.target("--partition=low", "--time=00:10:00", "--nodelist=cpu-1", "--exclusive")
    site.main("--benchmark", "mnist", "--use_case", "1", "--framework", "jax")
    run = site.only()
    site.wait_for_state(run, "running")
    urgent = ("--partition=urgent", "--nodelist=cpu-1", "--exclusive", "--time=5", "--output=/dev/null")
    site.slurm.run("sbatch", *urgent, "--wrap=sleep 600")
    site.wait_for_state(run, "cancelled")
    site.wait(lambda: site.statuses()[run.id].get("slurm", {}).get("kind") == "ended")
    assert "ended by SIGTERM: preempted" in site.main("status")
    assert "preempted by a job of higher priority; attempt 2 of 3" in site.main("resubmit")
    assert site.results.runs()[-1].launch().after == run.id


FINISHING = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, os.getcwd())
from duel.states import FINISHED
from duel.results import Results
from duel.status import this_process
from duel.files import utc
from duel.table import update

results = Results(Path("results"))
run = results.run(os.environ["DUEL_RUN_ID"])
run.write_status(state="running", started=utc(), owner=this_process(), slurm_job_id=os.environ["SLURM_JOB_ID"])
row = run.read_row(0).replace(status="running", started=utc())
run.write_row(row)
while time.time() < float(Path("end-at").read_text()):
    time.sleep(0.5)
run.write_row(row.replace(status=FINISHED, ended=utc()))
run.settle(state=FINISHED)
update(results, wait=False)
"""


@pytest.mark.full
def test_a_hundred_runs_that_end_in_the_same_seconds_are_a_hundred_rows(site: Site) -> None:
    """Each job is a real one and writes its run as a job does; only what it measures is left out."""
    (site.folder / "finishing.py").write_text(FINISHING)
    python = site.stand_in("finishing", f'exec "{sys.executable}" finishing.py')
    site.target("--partition=cpu", "--time=00:10:00", "--mem=100M", python=python, launcher="null")
    (site.folder / "end-at").write_text(str(time.time() + 3600))
    for _ in range(9):
        driver = site.popen("-c", SUBMIT, "12")
        said = driver.communicate(timeout=120)[0]
        assert driver.returncode == 0, said
    runs = site.results.runs()
    assert len(runs) == 108
    site.wait(lambda: sum(run.stored_status().state == "running" for run in runs) >= 100, 240)
    # In one go: a job that reads a file half written would die of it.
    write_atomically(site.folder / "end-at", str(time.time() + 1))
    torn, deadline = 0, time.monotonic() + 120
    while unfinished := [run.id for run in runs if run.stored_status().state != "finished"]:
        assert time.monotonic() < deadline, unfinished
        if site.results.csv.exists():
            with open(site.results.csv, newline="") as file:
                lines = list(csv.reader(file))
            torn += len({len(line) for line in lines}) != 1  # a reader sees it whole, always
        time.sleep(0.1)
    assert torn == 0
    assert f"{len(runs)} rows ({len(runs)} finished)" in site.main("collect")
    assert Counter(row["run_id"] for row in rows_of(site.folder)) == dict.fromkeys((run.id for run in runs), 1)
