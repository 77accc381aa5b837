"""The driver against a real Slurm: nothing is lost, nothing goes in twice, and what happened is told as it was.

Where a test needs a framework it uses the real one; where only the job's way through Slurm matters, its interpreter is
a stand-in of a line or two, which says so in its name.
"""

import csv
import json
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from conftest import Site, clean_environment, rows_of
from slurm_cluster import SlurmCluster

from duel.files import write_atomically
from duel.results import Run

MNIST = ("--benchmark", "mnist", "--use_case", "1", "--preset", "smoke")
SECRET = "0123456789abcdef0123456789abcdef01234567"
CPU = ("--partition=cpu", "--time=00:10:00", "--cpus-per-task=1", "--mem=2G")


def test_both_frameworks_run_on_nodes_with_devices_from_one_command(site: Site) -> None:
    lines = ("--partition=h100", "--gpus-per-node=h100:{devices_per_node}", "--time=00:10:00", "--mem=4G")
    site.target(*lines, more="    pass_variables: [LET_THROUGH]\n")
    secret = dict.fromkeys(("WANDB_API_KEY", "HF_TOKEN", "MY_PAT", "OPENAI_APIKEY", "PGPASS", "INNOCENT"), SECRET)
    others = {"SBATCH_PARTITION": "down", "SLURM_NTASKS": "7", "LET_THROUGH": "passed on", "LC_TIME": "C.UTF-8"}
    said = site.main(*MNIST, "--wait", **secret, **others)
    assert "at once, on h100-" in said
    counted = re.search(
        r"(\d+) variables of this shell not passed to the jobs: 'python main.py doctor --target site'", said
    )
    assert counted
    assert int(counted[1]) >= 5  # whoever tests may have more
    assert "WANDB_API_KEY is not passed to jobs" in said
    watched = site.main("status", "--watch")
    assert watched.count(" finished ") == 2
    rows = {row["framework"]: row for row in rows_of(site.folder)}
    assert {name: row["status"] for name, row in rows.items()} == {"jax": "finished", "pytorch": "finished"}
    assert rows["jax"]["pair"] == rows["pytorch"]["pair"]
    for row in rows.values():
        record = site.slurm.run("sacct", "-X", "-n", "-P", "-j", row["slurm_job_id"], "-o", "JobName,AllocTRES,State")
        name, devices, state = record.stdout.strip().split("|")
        assert (name, state) == (row["run_id"], "COMPLETED")
        assert "gres/gpu=1" in devices
        assert (row["script"], row["restarts"], row["target"]) == ("rendered", "0", "site")
        environment = json.loads(Run(site.results.folder / "runs" / row["run_id"]).environment.read_text())
        assert environment["variables"]["CUDA_VISIBLE_DEVICES"] == "0" or row["framework"] == "pytorch"
        # The key is in nothing that others could read, and nothing of ours overruled the script.
        for what in ("--env-vars", "--batch-script"):
            stored = site.slurm.run("sacct", "-j", row["slurm_job_id"], what).stdout
            assert row["run_id"].partition("-")[0] in stored
            assert SECRET not in stored
            if what == "--env-vars":
                assert {"LET_THROUGH=passed on", "LC_TIME=C.UTF-8"} <= set(stored.splitlines())
                assert not [name for name in secret if name in stored]
    for path in [*site.results.folder.rglob("*"), *(site.folder / "slurm_scripts").iterdir()]:
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path


def test_the_submitted_bytes_are_the_file_s_and_the_job_waits_in_words(site: Site) -> None:
    site.target(*CPU, "--begin=now+1hour")
    site.main(*MNIST)
    for run in site.results.runs():
        job_id = run.launch().slurm_job_id
        sent = site.slurm.run("scontrol", "write", "batch_script", job_id, "-").stdout
        script = site.folder / "slurm_scripts" / f"{run.id.partition('-')[0]}.sh"
        assert sent.rstrip("\n") == script.read_text().rstrip("\n") == run.script.read_text().rstrip("\n")
        status = site.statuses()[run.id]
        assert (status["state"], status["slurm"]["kind"]) == ("queued", "waiting")
        assert "begin" in status["slurm"]["words"]
    site.main("cancel", "--state", "queued")
    assert {status["state"] for status in site.statuses().values()} == {"cancelled"}
    assert "no run fits --state queued; there are state: cancelled" in site.main(
        "cancel", "--state", "queued", expect=2
    )
    assert "name the runs to cancel" in site.main("cancel", expect=2)


def test_variables_reach_a_measurement_from_the_target_s_lines_alone(site: Site) -> None:
    """XLA ends a process whose XLA_FLAGS have a flag that it does not know."""
    more = "    wandb: {mode: disabled}\n    setup: {job: [export TRITON_DEBUG=0], task: [export NCCL_DEBUG=WARN]}\n"
    site.target(*CPU, "--export=ALL,NCCL_ALGO=Ring", more=more)
    said = site.main(*MNIST, "--wait", XLA_FLAGS="--xla_no_such_flag", TRITON_DEBUG="1")
    (note,) = [line for line in said.splitlines() if line.startswith("not passed to the jobs: ")]
    assert "NCCL_ALGO" in note
    assert "XLA_FLAGS" in note
    assert "TRITON_DEBUG" not in note
    rows = rows_of(site.folder)
    assert [row["status"] for row in rows] == ["finished", "finished"]
    for row in rows:
        assert json.loads(row["variables"]) == {"target": {"NCCL_DEBUG": "WARN", "TRITON_DEBUG": "0"}}


def test_a_script_by_hand_twice_is_two_runs_and_a_changed_one_is_told_apart(site: Site) -> None:
    site.target(*CPU)
    site.main(*MNIST, "--dry_run", "--framework", "jax")
    script = site.folder / "slurm_scripts" / "jax_mnist_1_smoke.sh"
    site.slurm.run("sbatch", "--begin=now+1hour", str(script))
    assert "jax_mnist_1_smoke (by hand)" in site.main("status")
    site.slurm.run("scancel", "--name=jax_mnist_1_smoke")
    subprocess.run(["sbatch", str(script)], cwd="/", env=site.environment, check=True)
    script.write_text(script.read_text().replace("set -eo pipefail", "set -eo pipefail\necho changed"))
    subprocess.run(["sbatch", str(script)], cwd="/", env=site.environment, check=True)
    site.wait(lambda: len(site.results.runs()) == 2)
    for run in site.results.runs():
        site.wait_for_state(run, "finished")
    assert {status["state"] for status in site.statuses().values()} == {"finished"}
    assert "2 rows (2 finished)" in site.main("collect")
    assert sorted(row["script"] for row in rows_of(site.folder)) == ["edited by hand", "rendered"]
    by_bash = subprocess.run(["bash", str(script)], env=clean_environment(), capture_output=True, text=True)
    assert by_bash.returncode == 98
    assert by_bash.stderr.strip().endswith("is for Slurm: sbatch slurm_scripts/jax_mnist_1_smoke.sh")


def test_cancelling_a_run_inside_someone_s_allocation_leaves_the_allocation(site: Site) -> None:
    site.target(*CPU)
    site.main("--benchmark", "mnist", "--use_case", "1", "--framework", "jax", "--dry_run")
    script = site.folder / "slurm_scripts" / "jax_mnist_1.sh"
    inside = subprocess.Popen(
        ["salloc", "--partition=cpu", "--ntasks=1", "--mem=2G", "bash", "-c", f"bash {script}; echo still here"],
        env=site.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    site.wait(site.results.runs)
    run = site.only()
    site.wait_for_state(run, "running")
    assert "cancelled" in site.main("cancel", run.id)
    said = inside.communicate(timeout=60)[0]
    assert "still here" in said
    assert inside.returncode == 0
    site.main("collect")
    (row,) = rows_of(site.folder)
    assert row["slurm_job_id"] in said  # a fact of the row all the same


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
    assert "again only by name" in site.main("resubmit")
    assert len(site.results.runs()) == 1
    assert "attempt 2 of 3" in site.main("resubmit", run.id)
    again = site.results.runs()[-1]
    assert again.id != run.id
    assert f"was followed by {again.id}" in site.main("resubmit", run.id)
    site.main("cancel", again.id)


def test_the_warning_before_the_time_limit_reaches_the_run_and_a_longer_one_is_proposed_to_both(site: Site) -> None:
    site.target(*CPU)
    site.main("--benchmark", "mnist", "--use_case", "1", "--preset", "publication", "--framework", "jax")
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
    said = site.main("resubmit")
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
    assert f"without {node}; attempt 2 of 3" in site.main("resubmit")
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


SUBMIT = """
import sys
from pathlib import Path
from duel.job import Job
from duel.launch import cluster, slurm, submit
from duel.results import Results

number = int(sys.argv[1])
name, target = cluster.load(Path("cluster.yaml")).target(None)
kinds = [(f, b, p, r) for b in ("mnist", "resnet50") for p in ("smoke", "standard") for r in ("fp32", "bf16", "tf32")
         for f in ("jax", "pytorch")]
launches = submit.plan([Job(f, b, 1, p, r, None, name) for f, b, p, r in kinds[:number]], target)
for run in slurm.Slurm().start(launches, Results(Path("results")), lambda words: print(words, flush=True)):
    print("started", run.id, run.launch().slurm_job_id, flush=True)
"""


def test_a_controller_that_hangs_while_jobs_are_sent_makes_neither_two_of_them_nor_none(site: Site) -> None:
    site.target(*CPU, "--begin=now+1hour")
    site.slurm.pause_controller()
    driver = site.popen("-c", SUBMIT, "2")
    assert driver.stdout is not None
    said = ""
    while "may have gone in" not in said:  # sbatch has given up, and the controller has its message
        line = driver.stdout.readline()
        assert line, said
        said += line
    site.slurm.resume_controller()
    said += driver.communicate(timeout=120)[0]
    assert driver.returncode == 0, said
    assert "timed out" in said
    runs = [run.id for run in site.results.runs()]
    assert len(runs) == 2
    assert site.jobs() == dict.fromkeys(runs, 1)
    assert any(run.launch().adopted for run in site.results.runs())


def test_a_controller_that_hangs_or_is_gone_makes_no_run_lost(site: Site) -> None:
    site.target(*CPU, "--begin=now+1hour")
    site.main(*MNIST, "--framework", "jax")
    site.slurm.pause_controller()
    said = site.main("status")
    assert "not known: the queue cannot be asked" in said
    assert " queued " in said
    site.slurm.resume_controller()
    site.slurm.stop_controller()
    assert " queued " in site.main("status")
    said = site.main("cancel", site.only().id, expect=2)
    assert "scancel" in said
    site.slurm.start_controller()
    assert site.statuses()[site.only().id]["slurm"]["kind"] in ("waiting", "blocked")


def test_nothing_is_sent_while_there_is_no_controller_and_the_same_command_sends_it_later(site: Site) -> None:
    site.target(*CPU, "--begin=now+1hour")
    site.slurm.stop_controller()
    driver = site.popen("-c", SUBMIT, "2")
    assert driver.stdout is not None
    assert "not sent" in driver.stdout.readline()
    driver.send_signal(signal.SIGINT)
    driver.communicate(timeout=60)
    assert driver.returncode == -signal.SIGINT
    assert site.main("status").count("Slurm does not answer") == 2
    site.start_controller()
    assert site.main("status").count("the same command goes on with it") == 2
    again = site.popen("-c", SUBMIT, "2")
    said = again.communicate(timeout=120)[0]
    assert again.returncode == 0, said
    assert "going on with the submission of 2 jobs" in said
    assert site.jobs() == dict.fromkeys((run.id for run in site.results.runs()), 1)


def test_an_interrupted_submission_that_is_not_taken_up_leaves_runs_that_can_be_resubmitted(site: Site) -> None:
    site.target(*CPU, "--begin=now+1hour")
    site.slurm.stop_controller()
    driver = site.popen("-c", SUBMIT, "2")
    assert driver.stdout is not None
    driver.stdout.readline()
    driver.kill()
    driver.communicate()
    site.start_controller()
    said = site.main("resubmit")
    assert "2 jobs of an interrupted submission were never sent" in said
    assert said.count("attempt 2 of 3") == 2
    assert len(site.jobs()) == 2


def test_both_frameworks_in_turn_are_one_allocation(site: Site) -> None:
    site.target(*CPU)
    said = site.main("--benchmark", "gcn", "--use_case", "1", "--preset", "smoke", "--paired", "--wait")
    rows = rows_of(site.folder)
    assert [(row["framework"], row["status"]) for row in rows] == [("jax", "finished"), ("pytorch", "finished")]
    assert len({(row["run_id"], row["slurm_job_id"], row["host"], row["device_id"]) for row in rows}) == 1
    assert [name.partition("_")[0] for name in site.jobs()] == ["paired"]  # nothing else is needed
    assert "gcn (tiny, fp32), train_single, batch size 1: " in said
    job_said = site.main("logs", rows[0]["run_id"])
    assert f"1 of 1 pairs {rows[0]['comparable']}\n" in job_said
    assert said.endswith(site.main("compare"))


def test_an_accounting_that_is_down_is_said_and_its_answer_not_made_up(site: Site) -> None:
    site.target(*CPU, python=site.stand_in("failing", "exit 3"))
    site.slurm.stop_accounting()
    site.main(*MNIST, "--framework", "jax")
    run = site.only()
    job_id = run.launch().slurm_job_id
    site.wait(lambda: job_id not in site.slurm.run("squeue", "-a", "-t", "all", "-h", "-o", "%i").stdout.split())
    said = site.main("status")
    assert " lost " in said
    assert "the accounting cannot be asked" in said
    site.slurm.start_accounting()
    assert "attempt 2 of 3" in site.main("resubmit")


def test_a_site_without_accounting_sees_its_runs_through(
    checkout: Path, slurm_without_accounting: SlurmCluster
) -> None:
    site = Site(checkout.rename(checkout.with_name("duel")), slurm_without_accounting)
    site.target(*CPU)
    site.main(*MNIST, "--framework", "jax", "--wait")
    assert [row["status"] for row in rows_of(site.folder)] == ["finished"]
    time.sleep(6)  # Slurm has forgotten the job: the run's own folder has not
    assert "finished" in site.main("status")
    site.target(*CPU, python=site.stand_in("failing", "exit 3"))
    site.main(*MNIST, "--framework", "pytorch")
    second = site.results.runs()[-1]
    site.wait(lambda: site.statuses()[second.id]["state"] in ("failed", "lost"))
    assert site.statuses()[second.id]["state"] != "finished"


def test_a_driver_killed_at_any_instant_leaves_no_unknown_job_and_its_rerun_no_second_one(site: Site) -> None:
    site.target(*CPU, "--begin=now+1hour")

    def submit_ten(kill: random.Random | None = None) -> None:
        driver = site.popen("-c", SUBMIT, "10")
        if kill is None:
            said = driver.communicate(timeout=120)[0]
            assert driver.returncode == 0, said
            return
        # By what is done and not by the clock: how fast a machine submits changes from one round to the next.
        sent = kill.randrange(10)
        while driver.poll() is None and not (site.results.intent.exists() and number_sent() >= sent):
            time.sleep(0.002)
        time.sleep(kill.uniform(0.0, 0.05))
        driver.kill()
        driver.communicate()

    def number_sent() -> int:
        return sum(bool(run.launch().slurm_job_id) for run in site.results.runs())

    def check(whole: bool) -> None:
        names = {run.id for run in site.results.runs()}
        jobs = site.jobs()
        assert set(jobs) <= names, "a job that no folder knows"
        assert set(jobs.values()) <= {1}, "a job went in twice"
        if whole:
            assert set(jobs) == names
            assert len(names) == 10

    def clear() -> None:
        site.slurm.wait_idle()
        site.forget_jobs()
        shutil.rmtree(site.results.folder / "runs")

    interrupted = 0
    for seed in range(10):
        submit_ten(random.Random(seed))
        if site.results.intent.exists():
            interrupted += 1
            check(whole=False)
            submit_ten()
        check(whole=True)
        clear()
    assert interrupted >= 5, "the kills came too late to show anything"


FINISHING = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, os.getcwd())
from duel.record import FINISHED
from duel.results import Results
from duel.status import this_process
from duel.files import utc
from duel.table import merge

results = Results(Path("results"))
run = results.run(os.environ["DUEL_RUN_ID"])
run.write_status(state="running", started=utc(), owner=this_process(), slurm_job_id=os.environ["SLURM_JOB_ID"])
row = run.read_row(0).replace(status="running", started=utc())
run.write_row(row)
while time.time() < float(Path("end-at").read_text()):
    time.sleep(0.5)
run.write_row(row.replace(status=FINISHED, ended=utc()))
run.settle(state=FINISHED)
merge(results, wait=False)
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


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--gpus-per-node=a100:1", "Requested node configuration is not available"),
        ("--partition=mars", "invalid partition specified: mars"),
        ("--constraint=warp", "Invalid feature specification"),
        ("--mem=9000G", "Requested node configuration is not available"),
        ("--time=soon", "Invalid --time specification"),
        ("--time=5-00", "would wait for ever: partition cpu allows 02:00:00"),
        ("--gpu-per-node=1", "unrecognized option '--gpu-per-node=1'"),
        ("--reservation=mine", "Requested reservation is invalid"),
    ],
)
def test_what_slurm_would_refuse_is_said_with_its_line_and_nothing_is_started(site: Site, line: str, said: str) -> None:
    site.target("--partition=cpu", "--time=5", line)
    answer = site.main(*MNIST, expect=2)
    assert said in answer
    assert f"cluster.yaml:11: {line}" in answer
    assert not site.results.runs()
    assert not (site.folder / "slurm_scripts" / "jax_mnist_1_smoke.sh").exists()


def test_a_refusal_after_all_fails_the_run_with_sbatch_s_words(site: Site) -> None:
    site.target("--partition=mars")
    driver = site.popen("-c", SUBMIT, "2")
    said = driver.communicate(timeout=120)[0]
    assert "invalid partition specified: mars" in said.lower()
    statuses = site.statuses()
    assert {status["state"] for status in statuses.values()} == {"failed"}
    assert all("Slurm refused it" in status["cause"] for status in statuses.values())
    assert not site.results.intent.exists()
    site.target(*CPU, "--begin=now+1hour")
    assert site.main("resubmit").count("attempt 2 of 3") == 2


def test_lines_for_the_login_node_run_where_sbatch_does_and_reach_it(site: Site) -> None:
    more = '    setup: {submit: ["echo job 4711 from the set-up", "export SBATCH_TIMELIMIT=7"]}\n'
    site.target(*CPU, "--begin=now+1hour", more=more)
    site.main(*MNIST, "--framework", "jax")
    job_id = site.only().launch().slurm_job_id
    assert job_id != "4711"
    assert "TimeLimit=00:07:00" in site.slurm.run("scontrol", "show", "job", job_id).stdout


def test_no_more_jobs_are_sent_than_the_target_takes_at_once(site: Site) -> None:
    site.target(*CPU, "--begin=now+1hour", more="    max_jobs: 1\n")
    driver = site.popen("-c", SUBMIT, "2")
    assert driver.stdout is not None
    assert "1 jobs are there, and the target takes 1" in driver.stdout.readline()
    assert len(site.jobs()) == 1
    driver.kill()
    driver.communicate()
    site.main("cancel", "--framework", "jax")
    again = site.popen("-c", SUBMIT, "2")
    said = again.communicate(timeout=120)[0]
    assert again.returncode == 0, said
    jobs = site.jobs()  # without the cancelled one where Slurm has forgotten it: it never could start
    assert [jobs[run.id] for run in site.results.runs() if run.id.startswith("pytorch")] == [1]


def test_a_target_that_vanished_does_not_hide_its_runs(site: Site) -> None:
    site.target(*CPU, "--begin=now+1hour")
    site.main(*MNIST, "--framework", "jax")
    path = site.folder / "cluster.yaml"
    path.write_text(path.read_text().replace("site", "other"))
    assert " queued " in site.main("status")
    assert "cancelled" in site.main("cancel", "--target", "site")
    said = site.main("resubmit", site.only().id)
    assert "not started: its target 'site' is no longer in cluster.yaml, which has other" in said
    assert len(site.results.runs()) == 1


def test_damaged_and_newer_records_are_said_and_hide_nothing(site: Site) -> None:
    site.target(*CPU, "--begin=now+1hour")
    site.main(*MNIST)
    jax, pytorch = site.results.runs()
    (jax.folder / "launch.json").write_text('{"half')
    (pytorch.folder / "status.json").write_text('{"format": 99, "state": "dancing"}')
    said = site.main("status")
    assert "is of another version of Duel (format 99; this one reads 1)" in said
    assert jax.id in said
    site.results.intent.write_text('{"format": 99, "runs": {}, "since": 0}')
    assert "of another version of Duel (format 99" in site.main(*MNIST, expect=2)
    site.results.intent.write_text("{")
    assert ".submitting.json is damaged" in site.main(*MNIST)


def test_a_short_job_proves_a_target(site: Site) -> None:
    site.target(*CPU)
    said = site.main("doctor", "--target", "site", MY_PAT=SECRET, SCRATCH="/scratch/me")
    (variables,) = [
        line for line in said.splitlines() if line.startswith("ok    variables on site: passed to the jobs")
    ]
    passed, kept_back = variables.split("; kept back: ")
    assert {"PATH", "SCRATCH", "SLURM_CONF"} <= set(passed.replace(",", "").split())
    assert "MY_PAT" in kept_back.split(", ")
    assert SECRET not in said
    assert said.count("ok    jax on site") == 2
    assert said.count("ok    pytorch on site") == 2
    site.target(*CPU, python="{jax: .venv/none/bin/python, pytorch: null}")
    said = site.main("doctor", "--target", "site", expect=1)
    assert "FAIL  jax on site" in said
    assert "no interpreter .venv/none/bin/python" in said


def test_a_build_for_another_device_is_refused_before_anything_is_sent(site: Site) -> None:
    site.target("--partition=h100", "--gpus-per-node=h100:1", "--time=5", more="    device: gpu\n")
    for command in (MNIST, ("doctor", "--target", "site")):
        said = site.main(*command, expect=2)
        assert "cluster.yaml: targets.site.python.jax: '.venv/jax/bin/python' has no jax-cuda13-plugin" in said
        assert "'make jax-env JAX=cuda13' makes one" in said
    assert not site.results.runs()
    assert not site.jobs()


@pytest.mark.full
def test_mnist_at_full_size_ends_with_a_ratio_of_one_allocation(site: Site) -> None:
    """On a quiet machine: a busy one is told, and no ratio made."""
    site.target("--partition=cpu", "--time=00:20:00", "--cpus-per-task=2", "--mem=4G")
    process = site.popen("main.py", "--benchmark", "mnist", "--use_case", "1", "--paired", "--wait")
    said = process.communicate(timeout=1200)[0]
    assert process.returncode == 0, said
    rows = rows_of(site.folder)
    assert [row["framework"] for row in rows] == ["jax", "pytorch", "pytorch", "jax"] * 2
    assert len({(row["run_id"], row["slurm_job_id"], row["host"], row["device_id"]) for row in rows}) == 1
    assert {(row["comparable"], row["cpus"]) for row in rows} == {("COMPARABLE", "2")}
    for words in ("JAX / PyTorch ", "95 % interval", "4 pairs, noise floor ", ". COMPARABLE"):
        assert words in said
