"""Submitting to a real Slurm: nothing is lost and nothing goes in twice, whatever is silent, gone or killed meanwhile.

Interpreters are stand-ins of a line or two where only the job's way through Slurm matters.
"""

import random
import shutil
import signal
import time
from pathlib import Path

import pytest
from conftest import SUBMIT, Site, rows_of
from slurm_cluster import SlurmCluster

from duel.launch import intent

MNIST = ("--benchmark", "mnist", "--use_case", "1", "--preset", "smoke")
CPU = ("--partition=cpu", "--time=00:10:00", "--cpus-per-task=1", "--mem=2G")


def test_a_controller_that_hangs_while_jobs_are_sent_makes_neither_two_of_them_nor_none(site: Site) -> None:
    site.target(*CPU, "--begin=now+1hour")
    site.slurm.pause_controller()
    driver = site.popen("-c", SUBMIT, "2")
    assert driver.stdout is not None
    said = ""
    while "may have been submitted" not in said:  # sbatch has given up, and the controller has its message
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
    assert "not known: the queue is unavailable" in said
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
    assert site.main("status").count(" is sending it") == 2
    again = site.popen("-c", SUBMIT, "2")
    said = again.communicate(timeout=120)[0]
    assert again.returncode == 0, said
    assert "continuing the submission of 2 jobs" in said
    assert site.jobs() == dict.fromkeys((run.id for run in site.results.runs()), 1)


def test_what_a_killed_driver_left_is_sent_by_the_next_command(site: Site) -> None:
    site.target(*CPU, "--begin=now+1hour")
    site.slurm.stop_controller()
    driver = site.popen("-c", SUBMIT, "2")
    assert driver.stdout is not None
    driver.stdout.readline()
    driver.kill()
    driver.communicate()
    site.start_controller()
    assert "attempt 2" not in site.main("resubmit")
    assert site.jobs() == dict.fromkeys((run.id for run in site.results.runs()), 1)
    assert len(site.results.runs()) == 2


def test_an_accounting_that_is_down_is_said_and_its_answer_not_made_up(site: Site) -> None:
    site.target(*CPU, python=site.stand_in("failing", "exit 3"))
    site.slurm.stop_accounting()
    site.main(*MNIST, "--framework", "jax")
    run = site.only()
    job_id = run.launch().slurm_job_id
    site.wait(lambda: job_id not in site.slurm.run("squeue", "-a", "-t", "all", "-h", "-o", "%i").stdout.split())
    said = site.main("status")
    assert " lost " in said
    assert "the accounting is unavailable" in said
    assert "why it ended is not known until the accounting answers" in site.main("resubmit")
    assert site.only().id == run.id
    site.slurm.start_accounting()
    site.wait(lambda: site.statuses()[run.id]["state"] == "failed")
    assert "the code is the same, so it would fail again" in site.main("resubmit")


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
    assert site.statuses()[second.id]["cause"]


@pytest.mark.parametrize("rounds", [10, pytest.param(50, marks=pytest.mark.full)])
def test_a_driver_killed_at_any_instant_leaves_no_unknown_job_and_its_rerun_no_second_one(
    site: Site, rounds: int
) -> None:
    site.target(*CPU, "--begin=now+1hour")

    def submit_ten(kill: random.Random | None = None) -> None:
        driver = site.popen("-c", SUBMIT, "10")
        if kill is None:
            said = driver.communicate(timeout=120)[0]
            assert driver.returncode == 0, said
            return
        # By what is done and not by the clock: how fast a machine submits changes from one round to the next.
        sent = kill.randrange(8)
        while driver.poll() is None and not (intent.names(site.results) and number_sent() >= sent):
            time.sleep(0.002)
        time.sleep(kill.uniform(0.0, 0.01))
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
    for seed in range(rounds):
        submit_ten(random.Random(seed))
        if intent.names(site.results):
            interrupted += 1
            check(whole=False)
            submit_ten()
        check(whole=True)
        clear()
    print(f"{interrupted} of {rounds} drivers were killed while they submitted")
    assert interrupted >= rounds // 2, "the kills came too late to show anything"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--gpus-per-node=a100:1", "Requested node configuration is not available"),
        ("--partition=mars", "invalid partition specified: mars"),
        ("--constraint=warp", "Invalid feature specification"),
        ("--mem=9000G", "Requested node configuration is not available"),
        ("--time=soon", "Invalid --time specification"),
        ("--time=5-00", "would wait forever: partition cpu allows 02:00:00"),
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


# As if Slurm had taken the script when it was asked about it.
UNASKED = """
from pathlib import Path
from duel.errors import UserError
from duel.job import Job
from duel.launch import cluster, slurm, submit
from duel.results import Results

slurm.Slurm.preview = lambda *_: None
jobs = [Job(name, "mnist", 1, "smoke", "fp32", None, "site") for name in ("pytorch", "jax")]
try:
    submit.launch(jobs, cluster.load(Path("cluster.yaml")), Results(Path("results")), print)
except UserError as error:
    print("error:", error)
"""


def test_a_refusal_after_all_fails_the_run_with_sbatch_s_words_and_the_others_go_on(site: Site) -> None:
    only = "    variants: [{when: {framework: pytorch}, directives: [--partition=mars]}]\n"
    site.target(*CPU, "--begin=now+1hour", more=f"    max_jobs: 1\n    sender: none\n{only}")
    said = site.popen("-c", UNASKED).communicate(timeout=120)[0]
    waits, starts, refused = said.splitlines()[-3:]
    assert "the others wait: its target allows 1 jobs at once (max_jobs)" in waits
    assert "'python main.py resubmit' sends them" in starts
    assert refused.startswith("error: Slurm refused pytorch_mnist_1_smoke-")
    assert "invalid partition specified: mars" in refused.lower()
    causes = {status["state"]: status.get("cause") for status in site.statuses().values()}
    assert causes.keys() == {"failed", "queued"}
    assert "Slurm refused it" in str(causes["failed"])
    site.target(*CPU, "--begin=now+1hour")
    assert site.main("resubmit").count("attempt 2 of 3") == 1
    assert not intent.names(site.results)
    assert sum(site.jobs().values()) == 2


def test_no_more_jobs_are_sent_than_the_target_takes_at_once(site: Site) -> None:
    site.target(*CPU, "--begin=now+1hour", more="    max_jobs: 1\n    sender: none\n")
    assert "1 of 2 jobs were submitted; the others wait: its target allows 1 jobs at once" in site.main(*MNIST)
    assert "(max_jobs); 'python main.py resubmit' sends it" in site.main("status")
    site.main("resubmit")
    assert len(site.jobs()) == 1
    site.main("cancel", "--framework", "jax")
    site.main("resubmit")
    jobs = site.jobs()  # without the cancelled one where Slurm has forgotten it: it never could start
    assert [jobs[run.id] for run in site.results.runs() if run.id.startswith("pytorch")] == [1]
    assert not intent.names(site.results)


def test_a_target_s_hours_are_kept(site: Site) -> None:
    now = time.localtime()
    closed = f"{(now.tm_hour + 2) % 24:02d}:00-{(now.tm_hour + 3) % 24:02d}:00"
    site.target(*CPU, "--begin=now+1hour", more=f"    hours: {closed}\n    sender: none\n")
    assert f"0 of 2 jobs were submitted; the others wait: its target's hours begin at {closed[:5]}" in site.main(*MNIST)
    opened = f"{(now.tm_hour - 1) % 24:02d}:00-{(now.tm_hour + 2) % 24:02d}:00"
    site.target(*CPU, "--begin=now+1hour", more=f"    hours: {opened}\n    sender: none\n")
    site.main("resubmit")
    assert site.jobs() == dict.fromkeys((run.id for run in site.results.runs()), 1)


LOSING = """
if [[ " $* " != *" --test-only "* ]] && {lost} 2>/dev/null; then
    echo "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation" >&2
    exit 1
fi
exec sbatch "$@"
"""


def losing_sbatch(site: Site, lost: str) -> str:
    """A line of cluster.yaml: a stand-in for sbatch whose message gets lost on its way, if a command succeeds.

    A real controller that is paused has its message, and takes the job later.
    """
    flag = site.folder / "losing"
    flag.touch()
    site.stand_in("sbatch", LOSING.format(lost=lost.format(flag=flag)))
    return f"    submit: {site.folder}/stand-in-sbatch\n"


def test_a_message_that_got_lost_is_sent_again(site: Site) -> None:
    site.target(*CPU, more=losing_sbatch(site, "rm {flag}"))  # of calls that overlap only one removes it
    said = site.main(*MNIST)
    assert said.count("It may have been submitted anyway: looking for it") == 1
    assert said.count("not sent, ") == 1
    assert site.jobs() == dict.fromkeys((run.id for run in site.results.runs()), 1)
    assert len(site.results.runs()) == 2


IMPATIENT = """
import sys
from duel.cli.main import main
from duel.launch import sbatch
sbatch.PATIENCE_SECONDS = 0.0
sys.exit(main(sys.argv[1:]))
"""


def test_messages_that_get_lost_for_long_leave_runs_that_the_same_command_sends(site: Site) -> None:
    site.target(*CPU, more=losing_sbatch(site, "test -e {flag}") + "    sender: none\n")
    driver = site.popen("-c", IMPATIENT, *MNIST)
    said = driver.communicate(timeout=120)[0]
    assert driver.returncode == 0, said
    assert "0 of 2 jobs were submitted; the others wait: Slurm does not answer: " in said
    assert {status["state"] for status in site.statuses().values()} == {"queued"}
    assert not site.jobs()
    (site.folder / "losing").unlink()
    runs = site.results.runs()
    assert "continuing the submission of 2 jobs" in site.main(*MNIST)
    assert site.results.runs() == runs
    assert site.jobs() == dict.fromkeys((run.id for run in runs), 1)
