"""A run's job is known by cluster, user, id and name together: none of them alone may settle or end it.

On the real test cluster, where root submits in another user's name.
"""

import os
import pwd

import pytest
from conftest import Site
from test_slurm import CPU, MNIST

OTHER = "nobody"


@pytest.fixture
def waiting(site: Site) -> Site:
    """A site with one run of ours that waits for an hour."""
    if os.geteuid() != 0:
        assert "CI" not in os.environ, "CI runs as root, which may submit in another user's name"
        pytest.skip("NOT TESTED: namesakes; needs root")
    site.target(*CPU, "--begin=now+1hour")
    site.main(*MNIST, "--framework", "jax")
    return site


def namesake(site: Site, name: str) -> str:
    """The id of another user's job of that name, cancelled before it began."""
    pwd.getpwnam(OTHER)
    sent = site.slurm.run(
        "sbatch", f"--uid={OTHER}", "--parsable", f"--job-name={name}", "--begin=now+1hour", "--output=/dev/null",
        "--chdir=/tmp", "--partition=cpu", "--wrap=true",
    )  # fmt: skip
    job_id = sent.stdout.strip()
    site.slurm.run("scancel", job_id)
    return job_id


def test_another_user_s_cancelled_job_of_the_same_name_settles_nothing(waiting: Site) -> None:
    run = waiting.only()
    assert namesake(waiting, run.id) != run.launch().slurm_job_id
    for _ in range(2):
        status = waiting.statuses()[run.id]
        assert (status["state"], status["slurm"]["kind"]) == ("queued", "waiting")
        assert status["slurm_job_id"] == run.launch().slurm_job_id
    waiting.main("cancel", run.id)


def test_a_run_whose_id_was_not_noted_is_found_by_user_and_name(waiting: Site) -> None:
    """As after a driver's death between sbatch and its note."""
    run = waiting.only()
    job_id = run.launch().slurm_job_id
    run.write_launch(slurm_job_id="")
    namesake(waiting, run.id)
    status = waiting.statuses()[run.id]
    assert (status["state"], status["slurm_job_id"]) == ("queued", job_id)
    waiting.main("cancel", run.id)
    assert "CANCELLED" in waiting.slurm.run("squeue", "--states=all", "--noheader", "-j", job_id, "-o", "%T").stdout


def test_cancelling_by_name_ends_nobody_else_s_job(waiting: Site) -> None:
    run = waiting.only()
    other = waiting.slurm.run(
        "sbatch", f"--uid={OTHER}", "--parsable", f"--job-name={run.id}", "--begin=now+1hour", "--output=/dev/null",
        "--chdir=/tmp", "--partition=cpu", "--wrap=true",
    ).stdout.strip()  # fmt: skip
    waiting.main("cancel", run.id)
    assert waiting.slurm.run("squeue", "--noheader", "-j", other, "-o", "%T").stdout.strip() == "PENDING"
    waiting.slurm.run("scancel", other)


def test_a_run_of_another_cluster_is_left_alone(waiting: Site) -> None:
    run = waiting.only()
    here = run.launch().cluster
    assert here == waiting.slurm.run("scontrol", "show", "config").stdout.split("ClusterName")[1].split()[1]
    run.write_launch(cluster="elsewhere")
    status = waiting.statuses()[run.id]
    assert status["state"] == "queued"
    assert status["note"] == f"its job is on the cluster elsewhere; this is {here}"
    assert "is on the cluster elsewhere; cancel it there" in waiting.main("cancel", run.id, expect=2)
    run.write_launch(cluster=here)
    waiting.main("cancel", run.id)
