"""A training on a real Slurm outlives its jobs: the time limit, preemption and a node's death, in one run."""

import json
import re
import time

import pytest
from conftest import Site

from duel.results import Run
from duel.states import FINISHED, RUNNING

TRAINING = ("--benchmark", "mnist", "--use_case", "1", "--dataset", "digits", "--framework", "jax")
CPU = ("--partition=cpu", "--time=00:10:00", "--cpus-per-task=1", "--mem=2G")
EPOCHS = 60


def begun(site: Site, run: Run, beyond: int = 0) -> int:
    """Wait until the training has trained beyond an epoch; return its last epoch."""

    def last() -> int:
        curve = run.folder / "curves" / "jax-0.json"
        return json.loads(curve.read_text())[-1]["number"] if curve.exists() else 0

    site.wait(lambda: last() > beyond and run.stored_status().state == RUNNING, 300)
    return last()


def ended_in_one_run(site: Site, run: Run, lives: int) -> None:
    """The training has ended as one run, its curve is whole, and no life began at its start."""
    site.wait(lambda: run.stored_status().state == FINISHED, 400)
    (only,) = site.results.runs()
    assert only.id == run.id
    epochs = json.loads((run.folder / "curves" / "jax-0.json").read_text())
    assert [epoch["number"] for epoch in epochs] == list(range(EPOCHS + 1))
    last = run.rows()[-1]
    assert (last.status, last.trained_epochs) == (FINISHED, EPOCHS)
    log = run.log.read_text()
    steps = [int(step) for step in re.findall(r"going on after step (\d+)", log)]
    assert len(steps) == lives - 1
    assert all(steps)


@pytest.fixture
def training(site: Site) -> Run:
    site.target(*CPU)
    site.main(*TRAINING, "--epochs", str(EPOCHS), "--max_hours", "2h")
    return site.only()


def test_it_goes_on_after_the_time_limit_by_itself(site: Site, training: Run) -> None:
    begun(site, training)
    job = training.launch().slurm_job_id
    site.slurm.run("scancel", "--batch", "--signal=USR2", job)  # as Slurm does before the limit
    site.wait(lambda: "Slurm begins the job again" in slurm_log(site), 60)
    ended_in_one_run(site, training, lives=2)
    assert site.jobs()[training.id] == 1, "the same job, begun again"
    assert re.search(r"told to end: checkpoint after step [1-9]", training.log.read_text()), (
        "not at an epoch's end alone"
    )
    assert "Slurm begins the job again" in slurm_log(site), "the second life's log has the first's"


def test_on_two_devices_no_rank_ends_before_the_checkpoint(site: Site) -> None:
    counts = ("--ntasks-per-node={tasks_per_node}", "--cpus-per-task=1", "--mem=4G")
    site.target("--partition=cpu", "--time=00:10:00", *counts, more="    devices_per_node: [1, 2]\n")
    two = [option.replace("1", "2") for option in TRAINING]
    site.main(*two, "--devices", "2", "--epochs", str(EPOCHS), "--max_hours", "2h")
    run = site.only()
    begun(site, run)
    site.slurm.run("scancel", "--batch", "--signal=USR2", run.launch().slurm_job_id)
    ended_in_one_run(site, run, lives=2)
    assert re.search(r"told to end: checkpoint after step [1-9]", run.log.read_text())


def slurm_log(site: Site) -> str:
    return "".join(path.read_text() for path in (site.folder / "results" / "logs").glob("*_0_log.out"))


def test_it_goes_on_after_a_preemption(site: Site) -> None:
    site.target("--partition=low", "--time=00:10:00", "--nodelist=cpu-1", "--exclusive")
    site.main(*TRAINING, "--epochs", str(EPOCHS))
    run = site.only()
    begun(site, run)
    urgent = ("--partition=urgent", "--nodelist=cpu-1", "--exclusive", "--time=5", "--output=/dev/null")
    site.slurm.run("sbatch", *urgent, "--wrap=sleep 3")
    ended_in_one_run(site, run, lives=2)


def test_it_goes_on_after_its_nodes_death(site: Site, training: Run) -> None:
    begun(site, training)
    node = site.slurm.run("squeue", "--noheader", "--format=%N").stdout.split()[0]
    site.slurm.kill_node(node)
    try:
        ended_in_one_run(site, training, lives=2)
    finally:
        site.slurm.start_node(node)


def test_it_stops_when_its_hours_are_over_and_resubmit_goes_on(site: Site) -> None:
    site.target(*CPU)
    site.main(*TRAINING, "--epochs", str(EPOCHS), "--max_hours", "0.001h")
    run = site.only()
    begun(site, run)
    time.sleep(4)  # 0.001 h are 3.6 s
    site.slurm.run("scancel", "--batch", "--signal=USR2", run.launch().slurm_job_id)
    site.wait(lambda: "its 0.001 hours are over" in slurm_log(site), 60)
    site.wait_for_state(run, "failed")
    site.wait(lambda: "continues" in site.main("resubmit"))  # Slurm may still be ending its job
    ended_in_one_run(site, run, lives=2)
