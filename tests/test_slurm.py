"""The driver against a real Slurm: what is sent is the file, and what happened is told as it was.

Where a test needs a framework it uses the real one; where only the job's way through Slurm matters, its interpreter is
a stand-in of a line or two, which says so in its name.
"""

import json
import re
import subprocess
from datetime import datetime

import pytest
from conftest import Site, clean_environment, rows_of, without_copy

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
    shown = set()
    for row in rows.values():
        record = site.slurm.run("sacct", "-X", "-n", "-P", "-j", row["slurm_job_id"], "-o", "JobName,AllocTRES,State")
        name, devices, state = record.stdout.strip().split("|")
        assert (name, state) == (row["run_id"], "COMPLETED")
        assert "gres/gpu=1" in devices
        assert (row["script"], row["restarts"], row["target"]) == ("rendered", "0", "site")
        environment = json.loads(Run(site.results.folder / "runs" / row["run_id"]).environment.read_text())
        variables = environment[row["framework"]]["variables"]
        shown.add(variables["CUDA_VISIBLE_DEVICES"])
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
    assert "0" in shown, "the first of two that were sent at once"


def test_the_submitted_bytes_are_the_file_s_and_the_job_waits_in_words(site: Site) -> None:
    site.target(*CPU, "--begin=now+1hour")
    site.main(*MNIST)
    for run in site.results.runs():
        job_id = run.launch().slurm_job_id
        sent = site.slurm.run("scontrol", "write", "batch_script", job_id, "-").stdout
        script = site.folder / "slurm_scripts" / f"{run.id.partition('-')[0]}.sh"
        assert sent.rstrip("\n") == run.script.read_text().rstrip("\n")
        assert without_copy(run.script.read_text()) == without_copy(script.read_text())
        status = site.statuses()[run.id]
        assert (status["state"], status["slurm"]["kind"]) == ("queued", "waiting")
        assert "begin" in status["slurm"]["words"]
    site.main("cancel", "--state", "queued")
    assert {status["state"] for status in site.statuses().values()} == {"cancelled"}
    assert "no run matches --state queued; available: state: cancelled" in site.main(
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


def test_the_first_session_runs_at_once_and_the_others_at_their_time_or_when_they_are_asked_for(site: Site) -> None:
    site.target(*CPU)
    site.main(*MNIST, "--paired", "--sessions", "3", "--spacing", "2h")
    first, *others = site.results.runs()
    site.wait_for_state(first, "finished")
    seen = site.statuses()
    assert [seen[run.id]["state"] for run in others] == ["queued", "queued"]
    for number, run in enumerate(others, 1):
        assert f"#SBATCH --begin=now+{7200 * number}\n" in run.script.read_text()
        assert "waits for its begin time" in seen[run.id]["slurm"]["words"]
        started = site.slurm.run("squeue", "-h", "-j", str(run.launch().slurm_job_id), "-o", "%V %S").stdout.split()
        submitted, begins = (datetime.fromisoformat(text) for text in started)
        assert 7200 * number - 5 <= (begins - submitted).total_seconds() <= 7200 * number + 60
    site.main("cancel", "--state", "queued")
    site.main("resubmit", others[0].id)
    (again,) = (run for run in site.results.runs() if run.launch().after)
    site.wait_for_state(again, "finished")
    assert "--begin" not in again.script.read_text()
    finished = ["1"] * 4  # in the table a moment after the run's own end
    site.wait(lambda: [row["repeats"] for row in rows_of(site.folder) if row["status"] == "finished"] == finished)


def test_lines_for_the_login_node_run_where_sbatch_does_and_reach_it(site: Site) -> None:
    more = '    setup: {submit: ["echo job 4711 from the set-up", "export SBATCH_TIMELIMIT=7"]}\n'
    site.target(*CPU, "--begin=now+1hour", more=more)
    site.main(*MNIST, "--framework", "jax")
    job_id = site.only().launch().slurm_job_id
    assert job_id != "4711"
    assert "TimeLimit=00:07:00" in site.slurm.run("scontrol", "show", "job", job_id).stdout


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
    assert "was written by another version of Duel (format 99; this one reads 1)" in said
    assert jax.id in said
    noted = site.results.queue / "1.json"
    noted.write_text('{"format": 99, "runs": {}, "since": 0}')
    assert "by another version of Duel (format 99" in site.main(*MNIST, expect=2)
    noted.write_text("{")
    assert "1.json is damaged" in site.main(*MNIST)


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
