"""The throwaway Slurm itself: what the other tests take for granted when they use it."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster
from test_driver import wait_for


def submit(cluster: SlurmCluster, command: str, *options: str) -> str:
    return cluster.run("sbatch", "--parsable", *options, f"--wrap={command}").stdout.strip()


def state(cluster: SlurmCluster, job: str) -> str:
    return cluster.run("squeue", "--states=all", "--noheader", "--format=%T", f"--jobs={job}").stdout.strip()


def account(cluster: SlurmCluster, job: str) -> str:
    return cluster.run("sacct", "-XnPD", "--format=State", f"--jobs={job}").stdout.strip()


def test_steps_see_the_devices_of_their_job(slurm: SlurmCluster) -> None:
    out = slurm.folder / "devices"
    command = "srun --cpu-bind=none sh -c 'echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES'"
    job = submit(slurm, command, "--partition=h100", "--nodes=2", "--gpus-per-node=h100:2", f"--output={out}")
    wait_for(lambda: state(slurm, job) == "COMPLETED")
    assert {"h100-1 0,1", "h100-2 0,1"} <= set(out.read_text().splitlines())
    wait_for(lambda: account(slurm, job) == "COMPLETED")
    assert slurm.run("sacctmgr", "-nP", "show", "user", "format=defaultaccount").stdout == "duel\n"


@pytest.mark.parametrize("noticed", [True, False])
def test_a_killed_node_takes_its_jobs_along(slurm: SlurmCluster, noticed: bool) -> None:
    pids = slurm.folder / "pids"
    command = f"srun --cpu-bind=none sh -c 'echo $$ $PPID >{pids}.new; mv {pids}.new {pids}; sleep 100'"
    pids.unlink(missing_ok=True)
    job = submit(slurm, command, "--partition=h100", "--nodelist=h100-1", "--no-requeue")
    wait_for(pids.exists)
    slurm.kill_node("h100-1", noticed=noticed)
    assert all(ended(int(pid)) for pid in pids.read_text().split())
    wait_for(lambda: state(slurm, job) == "NODE_FAIL")
    wait_for(lambda: account(slurm, job) == "NODE_FAIL")
    slurm.start_node("h100-1")
    assert submit(slurm, "true", "--partition=h100", "--nodelist=h100-1")


def ended(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


def command_lines() -> Iterator[str]:
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it ended meanwhile
            yield file.read_text(errors="replace")


def test_jobs_of_partition_low_are_preempted(slurm: SlurmCluster) -> None:
    for requeue, end in {"--no-requeue": "PREEMPTED", "--requeue": "PENDING"}.items():
        low = submit(slurm, "sleep 100", "--partition=low", "--nodes=2", "--exclusive", requeue)
        wait_for(lambda job=low: state(slurm, job) == "RUNNING")
        submit(slurm, "true", "--partition=urgent")
        wait_for(lambda job=low, end=end: state(slurm, job) == end)
        wait_for(lambda job=low: account(slurm, job).startswith("PREEMPTED"))
        slurm.run("scancel", low)


def test_a_job_outlives_its_controller(slurm: SlurmCluster) -> None:
    job = submit(slurm, "sleep 100")
    wait_for(lambda: state(slurm, job) == "RUNNING")
    slurm.stop_controller()
    refused = slurm.run("sbatch", "--wrap=true", check=False)
    assert refused.returncode == 1
    assert "Unable to contact slurm controller" in refused.stderr
    slurm.start_controller()
    assert state(slurm, job) == "RUNNING"


def test_a_paused_controller_does_later_what_its_client_took_for_failed(slurm: SlurmCluster) -> None:
    slurm.pause_controller()
    ambiguous = slurm.run("sbatch", "--job-name=ambiguous", "--wrap=true", check=False)
    slurm.resume_controller()
    assert ambiguous.returncode == 1
    assert "Socket timed out on send/recv operation" in ambiguous.stderr
    wait_for(lambda: slurm.run("squeue", "--states=all", "--noheader", "--name=ambiguous").stdout != "")


def test_sacct_fails_without_slurmdbd_and_forgets_nothing(slurm: SlurmCluster) -> None:
    slurm.stop_accounting()
    job = submit(slurm, "true")
    assert slurm.run("sacct", check=False).returncode == 1
    slurm.start_accounting()
    wait_for(lambda: account(slurm, job) == "COMPLETED")


def test_without_accounting(slurm_without_accounting: SlurmCluster) -> None:
    job = submit(slurm_without_accounting, "true")
    wait_for(lambda: state(slurm_without_accounting, job) == "COMPLETED")
    assert "disabled" in slurm_without_accounting.run("sacct", check=False).stderr


def test_two_clusters_know_nothing_of_each_other_and_leave_nothing(slurm: SlurmCluster) -> None:
    job = submit(slurm, "sleep 100")
    with SlurmCluster(accounting=False) as other:
        assert submit(other, "sleep 100") == "1"
        assert other.run("squeue", "--noheader", "--format=%i").stdout.split() == ["1"]
    wait_for(lambda: state(slurm, job) == "RUNNING")
    assert not other.folder.exists()
    assert not any(str(other.folder) in line for line in command_lines())


@pytest.mark.usefixtures("slurm_without_accounting")
def test_a_failed_start_says_why_and_leaves_nothing() -> None:
    cluster = SlurmCluster(accounting=False, message_timeout=-1)
    with pytest.raises(RuntimeError, match="MessageTimeout"), cluster:
        pass
    assert not cluster.folder.exists()
    assert not any(str(cluster.folder) in line for line in command_lines())
