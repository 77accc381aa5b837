"""What Slurm refuses forever, what it refuses for now, and when it does not answer: each on a real Slurm.

This one's limits of accounts and qualities of service hold.
"""

import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Site, start_slurm
from slurm_cluster import SlurmCluster

from duel.launch import intent, nodes, refusal
from duel.launch.sender import POLL_SECONDS

MNIST = ("--benchmark", "mnist", "--use_case", "1", "--preset", "smoke")
FOUR = ("--benchmark", "mnist,gcn", "--use_case", "1", "--preset", "smoke")
CPU = ("--partition=cpu", "--time=00:10:00", "--cpus-per-task=1", "--mem=2G", "--begin=now+1hour")
GPU = ("--partition=h100", "--gpus-per-node=h100:1", "--time=00:10:00")


@pytest.fixture(scope="module")
def slurm_of_module() -> Iterator[SlurmCluster]:
    with start_slurm(accounting=True, limits=True) as cluster:
        yield cluster


@pytest.fixture
def slurm(slurm_of_module: SlurmCluster) -> Iterator[SlurmCluster]:
    slurm_of_module.wait_idle()
    yield slurm_of_module
    limit(slurm_of_module, "user", slurm_of_module.user, "MaxSubmitJobs=-1")
    limit(slurm_of_module, "account", "duel", "GrpSubmitJobs=-1")
    limit(slurm_of_module, "qos", "normal", "MaxSubmitJobsPerUser=-1", "MaxWall=-1", "flags-=DenyOnLimit")
    slurm_of_module.wait_idle()


def limit(slurm: SlurmCluster, kind: str, name: str, *limits: str) -> None:
    """Set limits, and return when the controller knows them."""
    slurm.run("sacctmgr", "-i", "modify", kind, name, "set", *limits, check=False)


def rest(driver: "subprocess.Popen[str]") -> str:
    """What it prints until its end; 'communicate' would forget what was read ahead of the last line."""
    with driver:
        assert driver.stdout is not None
        return driver.stdout.read()


def drain(site: Site, *names: str) -> None:
    site.slurm.run("scontrol", "update", f"nodename={','.join(names)}", "state=drain", "reason=disk is failing")


# -- nodes that are out of service --


def test_jobs_for_drained_nodes_are_sent_with_a_word_on_the_nodes_and_wait(site: Site) -> None:
    site.target(*GPU)
    drain(site, "h100-1", "h100-2")
    said = site.main(*MNIST)
    (warning,) = [line for line in said.splitlines() if line.startswith("warning: Slurm has no nodes for this now ")]
    assert (
        "(Requested node configuration is not available): h100-1, h100-2 idle+drain (disk is failing, since" in warning
    )
    assert warning.endswith("; the jobs are sent anyway, and wait")
    assert "refuses" not in said
    statuses = site.statuses().values()
    assert {status["state"] for status in statuses} == {"queued"}
    assert {status["slurm"]["kind"] for status in statuses} == {"waiting"}
    assert site.jobs() == dict.fromkeys((run.id for run in site.results.runs()), 1)


def test_a_job_for_two_nodes_of_which_one_is_drained_is_sent(site: Site) -> None:
    site.target("--partition=h100", "--nodes=2", "--time=00:10:00")
    drain(site, "h100-2")
    said = site.main(*MNIST, "--framework", "jax")
    assert "is not available): h100-2 idle+drain (disk is failing, since" in said
    assert "h100-1" not in said
    assert len(site.jobs()) == 1


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("--gpus-per-node=a100:1", "no node has 1 gpu of type a100"),
        ("--gpus-per-node=h100:5", "no node has 5 gpu of type h100"),
        ("--gres=gpu:h100:5", "no node has 5 gpu of type h100"),
        ("--mem=9000G", "no node has 9000G of memory"),
        ("--cpus-per-task=9", "no node has 9 CPUs"),
        ("--nodes=3", "there are only 2 nodes"),
    ],
)
def test_what_no_node_ever_has_is_refused_while_nodes_are_drained_too(site: Site, line: str, why: str) -> None:
    site.target("--partition=h100", "--time=5", line)
    drain(site, "h100-1", "h100-2")
    said = site.main(*MNIST, expect=2)
    assert f"Slurm refuses jax_mnist_1_smoke.sh: Requested node configuration is not available; {why}\n" in said
    assert f"cluster.yaml:11: {line}" in said
    assert not site.results.runs()
    assert not site.jobs()


def test_a_maintenance_is_said_with_its_end_and_the_jobs_are_sent(site: Site) -> None:
    site.target(*GPU)
    create = ("reservationname=upgrade", "starttime=now", "duration=60", "users=root", "flags=maint,ignore_jobs")
    site.slurm.run("scontrol", "create", "reservation", *create, "nodes=h100-[1-2]")
    try:
        said = site.main(*MNIST, "--framework", "jax")
    finally:
        site.slurm.run("scontrol", "delete", "reservationname=upgrade")
    assert "warning: h100-1, h100-2 reserved for maintenance (upgrade) from 20" in said
    assert " until 20" in said
    assert len(site.jobs()) == 1


# -- Slurm does not answer --


def test_a_controller_that_is_gone_has_refused_nothing(site: Site) -> None:
    site.target(*CPU)
    site.slurm.stop_controller()
    driver = site.popen("main.py", *MNIST)
    assert driver.stdout is not None
    said = ""
    while "; retrying in 5 s" not in said:
        line = driver.stdout.readline()
        assert line, said
        said += line
    driver.send_signal(signal.SIGINT)
    said += rest(driver)
    assert driver.returncode == 130
    assert said.count("Slurm did not answer: Unable to contact slurm controller") == 1  # two scripts, one question
    assert "refuses" not in said
    assert "stopped submitting; 'python main.py resubmit' sends the rest" in said
    site.start_controller()
    assert "continuing the submission of 2 jobs" in site.main(*MNIST)
    assert site.jobs() == dict.fromkeys((run.id for run in site.results.runs()), 1)


def test_a_controller_that_hangs_has_refused_nothing(site: Site) -> None:
    site.target(*CPU)
    site.slurm.pause_controller()
    driver = site.popen("main.py", *MNIST, "--framework", "jax")
    assert driver.stdout is not None
    said = ""
    while "unknown: Slurm did not answer" not in said:
        line = driver.stdout.readline()
        assert line, said
        said += line
    site.slurm.resume_controller()
    said += rest(driver)
    assert driver.returncode == 0, said
    assert "Slurm did not answer: Socket timed out on send/recv operation" in said
    assert "refuses" not in said
    assert site.jobs() == {site.only().id: 1}


def test_a_machine_without_a_slurm_conf_is_told_so_before_anything_is_written(site: Site, tmp_path: Path) -> None:
    site.target(*CPU)
    (tmp_path / "slurm.conf").touch()
    said = site.main(*MNIST, expect=2, SLURM_CONF=str(tmp_path / "slurm.conf"))
    assert "Slurm did not answer: " in said
    assert "Unable to process configuration file; run main.py where sbatch knows its cluster" in said
    assert "refuses" not in said
    assert not site.results.runs()
    assert not intent.names(site.results)


# -- limits that pass with time --


def test_what_a_submit_limit_leaves_over_is_sent_as_there_is_room_without_a_terminal(site: Site) -> None:
    site.target(*CPU)
    limit(site.slurm, "user", site.slurm.user, "MaxSubmitJobs=2")
    said = site.main(*FOUR)
    full = "Slurm takes no more jobs now (AssocMaxSubmitJobLimit, MaxSubmitJobs=2)"
    assert f"2 of 4 jobs were submitted; the others wait: {full}" in said
    who = re.search(r"process \d+ on \S+", said)
    assert who is not None
    assert f"{who[0]} will submit the waiting jobs" in said
    runs = site.results.runs()
    assert {status["state"] for status in site.statuses().values()} == {"queued"}
    assert site.main("status").count(f"{full}; {who[0]} sends it") == 2
    # The same command begins nothing new, and another one does not push these aside.
    again = site.main(*FOUR)
    assert f"warning: {full}" in again
    assert "continuing the submission of 4 jobs\n" in again
    said = site.main(*MNIST, "--precision", "bf16")
    assert "0 of 2 jobs were submitted; the others wait: earlier submissions are sent first" in said
    assert who[0] in said, "one sender is enough"
    assert site.results.runs()[:4] == runs
    limit(site.slurm, "user", site.slurm.user, "MaxSubmitJobs=-1")
    site.wait(lambda: not intent.names(site.results), 3 * POLL_SECONDS)
    assert site.jobs() == dict.fromkeys((run.id for run in site.results.runs()), 1)
    assert len(site.results.runs()) == 6
    assert [job.attempt for run in site.results.runs() if (job := run.launch().job)] == [1] * 6
    site.wait(lambda: not intent.sender(site.results), 2 * POLL_SECONDS)


@pytest.mark.parametrize(
    ("kind", "name", "option", "word"),
    [
        ("account", "duel", "GrpSubmitJobs", "AssocGrpSubmitJobsLimit, GrpSubmitJobs=1"),
        ("qos", "normal", "MaxSubmitJobsPerUser", "QOSMaxSubmitJobPerUserLimit, MaxSubmitJobsPU=1"),
    ],
)
def test_resubmit_sends_what_waits_as_the_runs_that_they_are(
    site: Site, kind: str, name: str, option: str, word: str
) -> None:
    site.target(*CPU, more="    sender: none\n")
    limit(site.slurm, kind, name, f"{option}=1")
    said = site.main(*MNIST)
    assert f"1 of 2 jobs were submitted; the others wait: Slurm takes no more jobs now ({word})" in said
    assert "'python main.py resubmit' sends them: the target starts no sender" in said
    assert "'python main.py resubmit' sends them: " in site.main("resubmit"), "there is no room yet"
    assert len(intent.names(site.results)) == 1
    limit(site.slurm, kind, name, f"{option}=-1")
    said = site.main("resubmit")
    assert not intent.names(site.results)
    assert "attempt 2" not in said
    assert site.jobs() == dict.fromkeys((run.id for run in site.results.runs()), 1)
    assert len(site.results.runs()) == 2


def test_what_waits_can_be_cancelled_and_the_same_command_then_begins_anew(site: Site) -> None:
    site.target(*CPU, more="    sender: none\n")
    limit(site.slurm, "user", site.slurm.user, "MaxSubmitJobs=1")
    site.main(*MNIST)
    site.main("cancel", "--state", "queued")
    assert {status["state"] for status in site.statuses().values()} == {"cancelled"}
    assert "retried only by name" in site.main("resubmit")
    limit(site.slurm, "user", site.slurm.user, "MaxSubmitJobs=-1")
    before = site.results.runs()
    site.main(*MNIST)
    new = [run for run in site.results.runs() if run not in before]
    assert len(new) == 2
    assert all(site.jobs()[run.id] == 1 for run in new)


def test_a_limit_on_one_job_is_refused_with_its_line(site: Site) -> None:
    site.target("--partition=cpu", "--time=5")
    limit(site.slurm, "qos", "normal", "flags=DenyOnLimit", "MaxWall=2")
    said = site.main(*MNIST, expect=2)
    assert "Slurm refuses jax_mnist_1_smoke.sh: QOSMaxWallDurationPerJobLimit" in said
    assert "cluster.yaml:10: --time=5" in said
    assert not site.results.runs()


@pytest.mark.parametrize("line", ["--account=mars", "--qos=mars"])
def test_an_unknown_account_or_qos_is_refused_with_its_line(site: Site, line: str) -> None:
    site.target("--partition=cpu", "--time=5", line)
    said = site.main(*MNIST, expect=2)
    assert "Slurm refuses jax_mnist_1_smoke.sh: Invalid " in said
    assert f"cluster.yaml:11: {line}" in said
    assert not site.results.runs()


def test_a_refusal_without_a_word_is_looked_up_among_the_limits(
    slurm: SlurmCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", slurm.environment["SLURM_CONF"])
    limit(slurm, "user", slurm.user, "MaxSubmitJobs=1")
    slurm.run("sbatch", "--begin=now+1hour", "--wrap=true")
    words = "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"
    assert refusal.is_full(words)
    assert refusal.full(words) == "MaxSubmitJobs=1"
    limit(slurm, "user", slurm.user, "MaxSubmitJobs=2")
    assert not refusal.is_full(words)
    assert refusal.is_for_ever(words)
    assert refusal.submit_limits(reached=False) == ["MaxSubmitJobs=2"]


# -- words and forms that were recorded, since they cannot be had here in seconds --

CONFIG = "DNS SRV lookup failed; failed to fetch config; fatal: Could not establish a configuration source"
# After two minutes, in which sbatch itself tries again: MaxJobCount.
TOO_MANY = "Slurm temporarily unable to accept job, sleeping and retrying; Resource temporarily unavailable"


@pytest.mark.parametrize(
    ("words", "silent", "full", "for_ever", "of_nodes"),
    [
        (CONFIG, True, False, False, False),
        ("Unable to contact slurm controller (connect failure)", True, False, False, False),
        ("Zero Bytes were transmitted or received", True, False, False, False),
        ("Protocol authentication error", True, False, False, False),
        ("Slurm backup controller in standby mode", True, False, False, False),
        (TOO_MANY, False, True, False, False),
        ("AssocMaxSubmitJobLimit; Job violates accounting/QOS policy (job submit limit, …)", False, True, False, False),
        ("QOSMaxCpuPerJobLimit; Job violates accounting/QOS policy (job submit …)", False, False, True, False),
        ("fatal: --mem, --mem-per-cpu, and --mem-per-gpu are mutually exclusive.", False, False, True, False),
        ("Requested time limit is invalid (missing or exceeds some limit)", False, False, True, False),
        ("User's group not permitted to use this partition", False, False, True, False),
        ("bash: line 2: module: command not found", False, False, True, False),
        ("exit code 1", False, False, True, False),
        ("Required node not available (down, drained or reserved)", False, False, False, True),
        ("Requested reservation not usable now", False, False, False, True),
        ("the site's own plug-in is out of sorts", False, False, False, False),
    ],
)
def test_what_sbatch_s_words_mean(words: str, silent: bool, full: bool, for_ever: bool, of_nodes: bool) -> None:
    assert refusal.is_silence(words) == silent
    assert refusal.is_full(words) == full
    assert refusal.is_for_ever(words) == for_ever
    assert refusal.is_of_nodes(words) == of_nodes


@pytest.mark.parametrize(
    ("gres", "name", "kind", "count"),
    [
        ("gpu:h100:4(S:0-1)", "gpu", "h100", 4),
        ("gpu:h100:4(S:0-1),tpu:2", "tpu", "", 2),
        ("gpu:a100_1g.10gb:7,gpu:a100:2", "gpu", "a100_1g.10gb", 7),
        ("gpu:a100_1g.10gb:7,gpu:a100:2", "gpu", "", 9),
        ("gpu:3090:4", "gpu", "", 4),
        ("gpu:2080ti:8(S:0-1)", "gpu", "2080ti", 8),
        ("gpu:4", "gpu", "h100", 0),
        ("gpu", "gpu", "", 1),
        ("", "gpu", "", 0),
    ],
)
def test_devices_of_a_node(gres: str, name: str, kind: str, count: int) -> None:
    node = nodes.Node("n1", ("gpu",), "IDLE", "", 8, 16000, gres)
    assert node.devices(name, kind) == count


@pytest.mark.parametrize(
    ("state", "closed"),
    [
        ("IDLE", False),
        ("MIXED+PLANNED", False),
        ("IDLE+CLOUD+POWERED_DOWN", False),
        ("IDLE+DRAIN", True),
        ("DOWN*+DRAIN", True),
        ("IDLE*", True),
        ("MAINT", True),
        ("UNKNOWN+NOT_RESPONDING", True),
    ],
)
def test_which_nodes_take_no_jobs(state: str, closed: bool) -> None:
    assert nodes.Node("n1", ("gpu",), state, "", 8, 16000, "").closed == closed
