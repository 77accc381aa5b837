"""What waits to be sent to a real Slurm: it goes on without a terminal, and nothing is lost or goes in twice."""

import dataclasses
import os
import random
import re
import signal
import sys
import time

import pytest
from conftest import SUBMIT, Site
from test_slurm_refusals import limit, slurm, slurm_of_module  # noqa: F401 (fixtures)

from duel.launch import intent
from duel.launch.sender import LEFT, POLL_SECONDS

MNIST = ("--benchmark", "mnist", "--use_case", "1", "--preset", "smoke")
CPU = ("--partition=cpu", "--time=00:10:00", "--cpus-per-task=1", "--mem=100M")
# A stand-in for run.py: a job that takes its run and reports its end, and measures nothing.
ENDING = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, os.getcwd())
from duel.files import utc
from duel.results import Results
from duel.states import FINISHED
from duel.status import this_process
from duel.table import update

results = Results(Path("results"))
run = results.run(os.environ["DUEL_RUN_ID"])
run.write_status(state="running", started=utc(), owner=this_process(), slurm_job_id=os.environ["DUEL_SLURM_JOB_ID"])
for row in run.rows():
    run.write_row(row.replace(status=FINISHED, started=utc(), ended=utc()))
time.sleep(float(os.environ.get("DUEL_TAKES", "0")))
run.settle(state=FINISHED)
update(results, wait=False)
"""


def ending(site: Site, more: str, *directives: str) -> None:
    """Write a target whose jobs end by themselves."""
    (site.folder / "ending.py").write_text(ENDING)
    python = site.stand_in("ending", f'exec "{sys.executable}" ending.py')
    site.target(*CPU, *directives, python=python, launcher="null", more=more)


def test_a_study_that_two_submit_at_once_is_measured_once(site: Site) -> None:
    site.target(*CPU, "--begin=now+1hour")
    points = "  - {benchmark: mnist, use_case: [1, 3, 5], preset: smoke, target: site}"
    (site.folder / "studies" / "both.yaml").write_text(f"about: for two at once\npoints:\n{points}\n")
    both = [site.popen("main.py", "study", "both", "submit") for _ in range(2)]
    assert [process.wait(120) for process in both] == [0, 0]
    said = [process.communicate()[0] for process in both]
    assert sorted(text.count("started paired_mnist") for text in said) == [0, 3]
    runs = site.results.runs()
    assert site.jobs() == dict.fromkeys((run.id for run in runs), 1)
    assert len(runs) == 3


@pytest.mark.full
def test_66_jobs_under_a_limit_of_20_all_end_with_nobody_there(site: Site) -> None:
    ending(site, "")
    limit(site.slurm, "user", site.slurm.user, "MaxSubmitJobs=20")
    said = site.main("--benchmark", "all", "--use_case", "1,3,5", "--preset", "smoke", DUEL_TAKES="5")
    assert "20 of 66 jobs were submitted; the others wait: Slurm takes no more jobs now" in said
    runs = site.results.runs()
    assert len(runs) == 66
    site.wait(lambda: all(run.stored_status().state == "finished" for run in runs), 600)
    assert site.jobs() == dict.fromkeys((run.id for run in runs), 1)
    assert not intent.names(site.results)
    assert site.results.runs() == runs
    site.wait(lambda: not intent.sender(site.results), 2 * POLL_SECONDS)


@pytest.mark.parametrize("seed", [3, *(pytest.param(seed, marks=pytest.mark.full) for seed in (4, 5))])
def test_a_sender_killed_at_any_instant_loses_nothing_and_the_next_one_sends_nothing_twice(
    site: Site, seed: int
) -> None:
    site.target(*CPU, "--begin=now+1hour", more="    max_jobs: 1\n    sender: none\n")
    chance, kills = random.Random(seed), 0
    for _ in range(3):
        driver = site.popen("-c", SUBMIT, "48")
        said = driver.communicate(timeout=120)[0]
        assert driver.returncode == 0, said
    target = (site.folder / "cluster.yaml").read_text()
    (site.folder / "cluster.yaml").write_text(target.replace("max_jobs: 1\n", "max_jobs: 100\n"))
    sent = 1
    while intent.names(site.results):
        sender = site.popen("-m", "duel.launch.sender")
        wanted = sent + chance.randrange(3)
        while sender.poll() is None and number_sent(site) < wanted:
            time.sleep(0.002)
        time.sleep(chance.uniform(0.0, 0.01))
        kills += sender.poll() is None
        sender.kill()
        sender.communicate()
        sent = number_sent(site)
    print(f"{kills} senders were killed")
    # 48 runs, several of which are sent between two kills: 11 to 17 kills were seen.
    assert kills >= 4, "the kills came too late to show anything"
    runs = site.results.runs()
    assert len(runs) == 48, "the same command goes on"
    assert site.jobs() == dict.fromkeys((run.id for run in runs), 1)
    hidden = [path.name for folder in ("runs", "queue") for path in (site.results.folder / folder).rglob(".*")]
    assert hidden == [intent.lock(site.results).name], "no half-written file is left"


def number_sent(site: Site) -> int:
    return sum(bool(run.launch().slurm_job_id) for run in site.results.runs())


def test_a_small_job_sends_where_the_site_wants_that(site: Site) -> None:
    small = '    sender: ["--partition=cpu", "--time=00:02:00", "--mem=100M", "--signal=B:USR1@30"]\n'
    ending(site, f"    max_jobs: 1\n{small}")
    said = site.main(*MNIST)
    assert re.search(r"job \d+ will submit the waiting jobs", said)
    assert "1 of 2 jobs were submitted; the others wait: its target allows 1 jobs at once" in said
    assert "' USR1\n" in (site.results.queue / "sender.sh").read_text(), "what its own line sends is trapped"
    runs = site.results.runs()
    site.wait(lambda: all(run.stored_status().state == "finished" for run in runs), 4 * POLL_SECONDS)
    jobs = site.jobs()
    (name,) = [name for name in jobs if name.startswith("duel-sender-")]
    assert jobs.pop(name) == 1
    assert jobs == dict.fromkeys((run.id for run in runs), 1)


def test_a_sender_told_to_end_says_whether_something_is_left(site: Site) -> None:
    site.target(*CPU, "--begin=now+1hour", more="    max_jobs: 1\n    sender: none\n")
    site.main(*MNIST)
    sender = site.popen("-m", "duel.launch.sender")
    site.wait(lambda: intent.sender(site.results) == f"process {sender.pid} on {os.uname().nodename}")
    second = site.popen("-m", "duel.launch.sender")
    second.communicate(timeout=60)
    assert second.returncode == 0, "one is enough"
    time.sleep(3)  # into its pause
    sender.send_signal(signal.SIGTERM)
    sender.communicate(timeout=60)
    assert sender.returncode == LEFT
    site.main("cancel", "--state", "queued")
    last = site.popen("-m", "duel.launch.sender")
    last.communicate(timeout=120)
    assert last.returncode == 0
    assert not intent.names(site.results)


def test_a_target_that_is_gone_keeps_its_jobs_waiting_and_says_so(site: Site) -> None:
    site.target(*CPU, "--begin=now+1hour", more="    max_jobs: 1\n    sender: none\n")
    site.main(*MNIST)
    before = (site.folder / "cluster.yaml").read_text()
    (site.folder / "cluster.yaml").write_text(before.replace("site", "other"))
    site.main("resubmit")
    assert "unknown target 'site'; valid in cluster.yaml: other; 'python main.py resubmit' sends it" in site.main(
        "status"
    )
    (site.folder / "cluster.yaml").write_text(before.replace("max_jobs: 1", "max_jobs: 2"))
    site.main("resubmit")
    assert site.jobs() == dict.fromkeys((run.id for run in site.results.runs()), 1)


FOUR = ("--benchmark", "mnist,gcn", "--use_case", "1", "--preset", "smoke")


def test_runs_of_one_shape_are_an_array_whose_elements_end_by_themselves(site: Site) -> None:
    ending(site, "    array: 3\n")
    site.main(*FOUR)
    runs = site.results.runs()
    elements = {run.launch().array.rpartition("_")[2]: run for run in runs if run.launch().array}
    assert sorted(elements) == ["0", "1", "2"]
    (array,) = {run.launch().array.rpartition("_")[0] for run in elements.values()}
    (alone,) = [run for run in runs if run not in elements.values()]  # the fourth is too many
    site.wait(lambda: all(run.stored_status().state == "finished" for run in runs))
    assert site.jobs() == {array: 3, alone.id: 1}
    (number,) = {run.launch().slurm_job_id.partition("_")[0] for run in elements.values()}
    for element, run in elements.items():
        assert run.stored_status().slurm_job_id == run.launch().slurm_job_id == f"{number}_{element}"
    for run in runs:
        said = site.main("verify", run.id)
        assert "DIFFERS" not in said
        assert "scontrol, job" in said
    assert site.main("status").count("finished") == 4


def test_of_an_array_larger_than_a_limit_is_sent_what_fits_and_the_rest_later(site: Site) -> None:
    ending(site, "    array: 100\n")
    limit(site.slurm, "user", site.slurm.user, "MaxSubmitJobs=3")
    assert "3 of 4 jobs were submitted; the others wait: Slurm takes no more jobs" in site.main(*FOUR, DUEL_TAKES="3")
    runs = site.results.runs()
    site.wait(lambda: all(run.stored_status().state == "finished" for run in runs), 4 * POLL_SECONDS)
    arrays = [run.launch().array.rpartition("_")[0] for run in runs]
    (array,) = {name for name in arrays if name}
    alone = [run.id for run, name in zip(runs, arrays, strict=True) if not name]
    assert len(alone) == 2, "an array that was refused leaves no name behind"
    assert site.jobs() == {array: 2, **dict.fromkeys(alone, 1)}


def test_what_waits_is_cancelled_without_slurm(site: Site) -> None:
    site.target(*CPU, "--begin=now+1hour", more="    max_jobs: 1\n    sender: none\n")
    site.main(*MNIST)
    (waits,) = [run for run in site.results.runs() if not run.launch().slurm_job_id]
    site.slurm.stop_controller()
    try:
        said = site.main("cancel", waits.id)
    finally:
        site.start_controller()
    assert f"{waits.id} cancelled: cancelled before it started" in said
    assert waits.stored_status().state == "cancelled"


def test_what_another_user_or_cluster_has_waiting_is_theirs_to_send(site: Site) -> None:
    site.target(*CPU, "--begin=now+1hour", more="    max_jobs: 1\n")
    site.main(*MNIST)
    (sender,) = re.findall(r"process (\d+) on", intent.sender(site.results))
    os.kill(int(sender), signal.SIGTERM)
    site.wait(lambda: not intent.sender(site.results))
    ((name, noted),) = intent.waiting(site.results).items()
    for change, who in (({"user": "alice"}, "user alice"), ({"cluster": "b"}, "a sender on the cluster b")):
        intent.write(site.results, name, dataclasses.replace(noted, **change))
        assert f"its target allows 1 jobs at once (max_jobs); {who} sends it" in site.main("status")
        said = site.main("resubmit")
        assert f"left alone: 2 jobs that {who} sends" in said
        assert "nothing to do" in said
        assert list(site.statuses().values())[-1]["state"] == "queued"
        assert not intent.sender(site.results), "none was started"
    assert sum(site.jobs().values()) == 1


def test_one_element_of_an_array_can_be_cancelled_and_started_again(site: Site) -> None:
    site.target(*CPU, "--begin=now+1hour", more="    array: 10\n")
    site.main(*FOUR)
    runs = site.results.runs()
    chosen = runs[1]
    assert "cancelled" in site.main("cancel", chosen.id)
    states = {run_id: status["state"] for run_id, status in site.statuses().items()}
    assert states == {run.id: "cancelled" if run == chosen else "queued" for run in runs}
    told = {run_id: status.get("slurm", {}).get("kind") for run_id, status in site.statuses().items()}
    assert {run_id: kind for run_id, kind in told.items() if run_id != chosen.id} == {
        run.id: "waiting" for run in runs if run != chosen
    }
    site.main("resubmit", chosen.id)
    again = site.results.runs()[-1]
    assert again.launch().after == chosen.id
    assert again.launch().array == "", "one run needs no array"
    assert site.statuses()[again.id]["state"] == "queued"
    left = site.slurm.run("squeue", "--array", "--noheader", "-o", "%F_%K %j").stdout.split()
    assert f"{runs[0].launch().slurm_job_id}" in left
    assert f"{chosen.launch().slurm_job_id}" not in left


def test_slurm_requeues_one_element_of_an_array_and_leaves_the_others(site: Site) -> None:
    ending(site, "    array: 10\n")
    site.main("--benchmark", "mnist", "--use_case", "1", "--dataset", "digits", "--epochs", "1", DUEL_TAKES="8")
    first, other = site.results.runs()
    assert first.launch().array.rpartition("_")[0] == other.launch().array.rpartition("_")[0] != ""
    site.wait(lambda: all(run.stored_status().state == "running" for run in (first, other)))
    job = str(first.launch().slurm_job_id)
    site.slurm.run("scontrol", "requeue", job)
    site.wait(lambda: "PENDING" in site.slurm.run("squeue", "--array", "--noheader", "-j", job, "-o", "%T").stdout)
    assert site.statuses()[first.id]["state"] == "queued"
    site.wait(lambda: all(run.stored_status().state == "finished" for run in (first, other)), 120)
    lives = ["REQUEUED", "COMPLETED"]
    for run, expected in ((first, lives), (other, lives[1:])):
        asked = ("sacct", "--duplicates", "-X", "-P", "-n", "-j", str(run.launch().slurm_job_id), "-o", "State")
        site.wait(lambda asked=asked, expected=expected: site.slurm.run(*asked).stdout.split() == expected)
    assert site.results.runs() == [first, other], "a requeued element is the same run"


def test_an_array_that_reached_slurm_unseen_is_found_again(site: Site) -> None:
    site.target(*CPU, "--begin=now+1hour", more="    array: 10\n    sender: none\n")
    site.main(*FOUR)
    runs = site.results.runs()
    before = [run.launch().slurm_job_id for run in runs]
    jobs = {run.id: run.launch().job for run in runs}
    for run in runs:  # as if the driver had been killed within sbatch
        run.write_launch(slurm_job_id="")
    intent.new(site.results, intent.Intent(jobs, time.time() - 60, created=True))
    site.main("resubmit")
    assert [run.launch().slurm_job_id for run in runs] == before
    assert all(run.launch().adopted for run in runs)
    assert not intent.names(site.results)
    assert sum(site.jobs().values()) == len(runs)
