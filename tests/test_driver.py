"""The real commands with the real frameworks, in a private copy of the checkout whose path has a space."""

import json
import os
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from conftest import Main, clean_environment, heeding_ctrl_c, rows_of, without_copy
from test_paired import LOAD

from duel.catalogue import BENCHMARKS, VALIDATE
from duel.evidence import FEW_STEPS
from duel.files import locked, process_started
from duel.job import Job
from duel.launch import local
from duel.measure.supervisor import _may_share
from duel.record import COLUMNS, LEARNED
from duel.results import Results, Run
from duel.status import LaunchRecord, this_process

MNIST = ("--benchmark", "mnist", "--use_case", "1", "--preset", "smoke")


def wait_for(condition: Any, seconds: float = 240.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
    return found


def seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def test_the_main_job_from_the_command_to_the_report(main: Main, checkout: Path) -> None:
    done = main("--benchmark", "mnist", "--use_case", "1", "--wait")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(checkout)
    assert {row["framework"]: row["status"] for row in rows} == {"jax": "finished", "pytorch": "finished"}
    jax, pytorch = sorted(rows, key=lambda row: row["framework"])

    check_both_sides(checkout, jax, pytorch)
    for row in rows:
        check_numbers(checkout, row)
    check_compilation(jax, pytorch)
    check_report(done.stdout, jax)
    for row, other in ((jax, "torch"), (pytorch, "jax")):
        check_environment(checkout, row, other)
    check_curves(checkout, rows)

    # Another shell sees all of it.
    assert done.stdout.endswith(main("compare").stdout)
    assert done.stdout.endswith(main("compare", jax["run_id"]).stdout)
    statuses = json.loads(main("status", "--json").stdout)
    assert {status["state"] for status in statuses} == {"finished"}
    assert "measuring" in main("logs", rows[0]["run_id"]).stdout

    check_wandb(checkout, rows)


def run_of(checkout: Path, row: dict[str, str]) -> Run:
    return Run(checkout / "results" / "runs" / row["run_id"])


def check_both_sides(checkout: Path, jax: dict[str, str], pytorch: dict[str, str]) -> None:
    """Both compute the same, strictly one after the other."""
    same = ("pair", "weights_sha256", "data_sha256", "batch_size", "device_name", "dataset", "parameters")
    for name in (*same, "learning_rate"):
        assert jax[name] == pytorch[name] != ""
    assert jax["cell"] != pytorch["cell"]
    statuses = [run_of(checkout, row).status() for row in (jax, pytorch)]
    first, second = sorted(statuses, key=lambda status: status.started)
    assert seconds(first.ended) <= seconds(second.started)


def check_numbers(checkout: Path, row: dict[str, str]) -> None:
    """Every empty column has its reason, and no number is a stand-in for one."""
    missing = {name: why for why, names in json.loads(row["missing"]).items() for name in names}
    assert {name for name in COLUMNS if row[name] == ""} - {"cause", "why", "partial", *LEARNED} == set(missing)
    for name in ("throughput", "step_seconds_p50", "peak_memory_bytes", "loss_first", "learning_rate", "accuracy"):
        assert float(row[name]) > 0
    assert float(row["learning_rate"]) == BENCHMARKS["mnist"].optimizer.at(int(row["batch_size"])).learning_rate
    # It learns real digits, and the protocol's floors hold.
    assert row["dataset"] == "sklearn-digits"
    assert float(row["accuracy"]) > 0.95
    assert int(row["iterations"]) >= 25
    blocks = [event for event in run_of(checkout, row).events()[0] if event["event"] == "block"]
    began = blocks[0]["time"] - blocks[0]["steps"] * blocks[0]["step_seconds"]
    spent = blocks[-1]["time"] - began  # of all of them: a busy machine's are long, and left out of the row's figures
    assert len(blocks) >= 25 or spent > 17, "25 blocks, or what some 20 s give on a busy machine"
    assert len(blocks) == int(row["blocks"]) + int(row["left_out_blocks"])
    assert json.loads(row["proofs"])["threads"].startswith("affinity")
    assert row["canary"].startswith("matmul=")
    assert float(row["mfu"]) > 0
    for name in ("forward_seconds", "gradient_seconds"):  # a busy machine has none
        assert float(row[name]) > 0 if row[name] else "blocks are left out" in missing[name]


def check_compilation(jax: dict[str, str], pytorch: dict[str, str]) -> None:
    (why,) = (why for why, names in json.loads(pytorch["missing"]).items() if "compile_seconds" in names)
    assert why.startswith("eager")
    assert float(jax["cold_start_seconds"]) > float(jax["warm_start_seconds"]) > 0
    stages = [float(jax[f"{stage}_seconds"]) for stage in ("trace", "lower", "backend")]
    assert min(stages) > 0
    assert sum(stages) == pytest.approx(float(jax["compile_seconds"]))


def check_report(printed: str, jax: dict[str, str]) -> None:
    """What a person reads: a ratio, and how to make it a verdict; a busy machine bars the pair."""
    for words in ("throughput (images/s)", "peak memory (MiB)", "wandb leet", "results/results.csv", "measuring"):
        assert words in printed
    said = "mnist (full, fp32), train_single, batch size 64: "
    if jax["comparable"] == "COMPARABLE":
        assert f"{said}indicative: JAX / PyTorch " in printed
        assert "for a verdict: python main.py --benchmark mnist --use_case 1 --paired\n" in printed
        assert "no float64 certificate: the proof is as sharp as fp32 rounding" in printed
    else:
        assert f"{said}NOT COMPARABLE: " in printed
        assert jax["comparable"] in printed
        barred = jax["comparable"].removeprefix("NOT COMPARABLE: ").split("; ")
        assert all(why.startswith(LOAD) for why in barred)


def check_environment(checkout: Path, row: dict[str, str], other: str) -> None:
    """One environment, one framework; the record says so."""
    run = run_of(checkout, row)
    record = json.loads(run.environment.read_text())
    assert record["cpu"]["model"]
    assert len(record["cpu"]["flags"].split()) > 10
    own = record[row["framework"]]
    assert other not in record
    assert other not in own["modules"]
    assert record["usable_cpus"] == sorted(os.sched_getaffinity(0))
    assert own["packages"]["numpy"]
    by_hand = checkout / "slurm_scripts" / f"{row['framework']}_mnist_1.sh"
    assert without_copy(run.script.read_text()) == without_copy(by_hand.read_text())


def check_curves(checkout: Path, rows: list[dict[str, str]]) -> None:
    """Both learn alike: fp32 losses of the first steps.

    Later ones magnify every rounding. In PyTorch on one CPU, of 60 curves from weights moved by one rounding all had
    the first ten losses to 1.1e-7, and 18 were off by more than 1e-3 within 50 steps.
    """
    curves = [
        [event["loss"] for event in run_of(checkout, row).events()[0] if event["event"] == "loss"] for row in rows
    ]
    assert len(curves[0]) == len(curves[1]) == 400
    assert curves[0][:FEW_STEPS] == pytest.approx(curves[1][:FEW_STEPS], rel=1e-5)


def check_wandb(checkout: Path, rows: list[dict[str, str]]) -> None:
    """W&B's own reader finds what was streamed: every opening loss, the group of the pair, the final numbers."""
    for row in rows:
        run = Run(checkout / "results" / "runs" / row["run_id"])
        (folder,) = run.folder.glob("wandb/offline-run-*")
        leet = [sys.executable, "-m", "wandb", "leet", "inspect", "--json"]
        text = subprocess.run([*leet, str(folder)], check=True, capture_output=True, text=True, timeout=60).stdout
        records = [json.loads(line) for line in text.splitlines()]
        streamed = [record["history"]["item"] for record in records if record["type"] == "history"]
        losses = [event["loss"] for event in run.events()[0] if event["event"] == "loss"]
        side = row["framework"]
        assert [item[f"{side}/loss"] for item in streamed[: len(losses)]] == losses
        assert any(f"{side}/throughput" in item for item in streamed)
        (started,) = [record["run"] for record in records if record["type"] == "run"][:1]
        assert started["run_group"] == row["run_id"].partition("_")[2]
        assert (started["job_type"], started["run_id"]) == (row["framework"], row["run_id"])
        text = subprocess.run([*leet, "--summary", str(folder)], check=True, capture_output=True, text=True).stdout
        found = json.loads(text)
        assert {row["framework"], row["benchmark"], "cpu"} <= set(found["tags"])
        summary = found["summary"]
        assert summary[f"{side}/throughput"] == float(row["throughput"])
        assert summary[f"{side}/weights_sha256"] == row["weights_sha256"]


def test_a_script_by_hand_makes_a_run_of_its_own_each_time(main: Main, checkout: Path) -> None:
    assert main(*MNIST, "--framework", "pytorch", "--dry_run").returncode == 0
    script = checkout / "slurm_scripts" / "pytorch_mnist_1_smoke.sh"
    for _ in range(2):  # from another folder
        done = subprocess.run(
            ["bash", str(script)], cwd="/", env=clean_environment(), capture_output=True, text=True, timeout=900
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert main("collect").returncode == 0
    rows = rows_of(checkout)
    assert len({row["run_id"] for row in rows}) == 2
    assert {row["status"] for row in rows} == {"finished"}
    assert len({row["cell"] for row in rows}) == 1
    assert all(row["run_id"] in main("status").stdout for row in rows)


def test_two_scripts_at_once_measure_one_after_the_other(main: Main, checkout: Path) -> None:
    main(*MNIST, "--framework", "pytorch", "--dry_run")
    script = str(checkout / "slurm_scripts" / "pytorch_mnist_1_smoke.sh")
    both = [subprocess.Popen(["bash", script], stdout=subprocess.DEVNULL, env=clean_environment()) for _ in range(2)]
    assert [process.wait(240) for process in both] == [0, 0]
    first, second = sorted((run.status() for run in Results(checkout / "results").runs()), key=lambda s: s.started)
    assert seconds(str(first.ended)) <= seconds(str(second.started))


def test_cancel_ends_the_running_and_the_waiting_run(main: Main, checkout: Path) -> None:
    started = main("--benchmark", "mnist", "--use_case", "1", "--device", "cpu")
    assert started.returncode == 0, started.stderr
    results = Results(checkout / "results")
    runs = {run.id.partition("_")[0]: run for run in results.runs()}
    wait_for(lambda: runs["jax"].status().phase in ("measuring", "warming up"))
    assert runs["pytorch"].status().state == "queued"
    cancelled = main("cancel", runs["pytorch"].id, runs["jax"].id)
    assert cancelled.returncode == 0, cancelled.stderr
    assert {row["status"] for row in rows_of(checkout)} == {"cancelled"}
    jax = next(row for row in rows_of(checkout) if row["framework"] == "jax")
    assert float(jax["loss_first"]) > 0, "what was known is kept"
    assert runs["jax"].status().exit_code == 128 + signal.SIGTERM
    assert "already" in main("cancel", runs["jax"].id).stdout


def test_a_killed_measuring_process_is_a_failed_row_and_the_other_side_goes_on(main: Main, checkout: Path) -> None:
    assert main(*MNIST).returncode == 0
    results = Results(checkout / "results")
    jax = next(run for run in results.runs() if run.id.startswith("jax"))
    wait_for(lambda: jax.status().phase.startswith(("compiling", "training")))
    supervisor = jax.status().owner.pid
    (child,) = [int(pid) for pid in Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()][-1:]
    os.kill(child, signal.SIGKILL)
    wait_for(lambda: all(run.status().state in ("failed", "finished") for run in results.runs()))
    main("collect")
    by_framework = {row["framework"]: row for row in rows_of(checkout)}
    assert by_framework["jax"]["status"] == "failed"
    assert "SIGKILL" in by_framework["jax"]["cause"]
    assert by_framework["pytorch"]["status"] == "finished"


def test_a_killed_supervisor_takes_its_process_along_and_the_status_is_true(main: Main, checkout: Path) -> None:
    assert main(*MNIST, "--framework", "jax").returncode == 0
    (run,) = Results(checkout / "results").runs()
    wait_for(lambda: run.status().phase.startswith(("compiling", "training")))
    supervisor = run.status().owner.pid
    children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    measuring = [pid for pid in children if "run_folder" in _command_of(pid)]
    assert measuring
    os.kill(supervisor, signal.SIGKILL)
    wait_for(lambda: run.stored_status().state == "failed")
    assert "killed by signal 9" in run.status().cause
    wait_for(lambda: not any(process_started(int(pid)) for pid in measuring), 20)
    main("collect")
    assert rows_of(checkout)[0]["status"] == "failed"


def _command_of(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except FileNotFoundError:
        return ""


def test_the_local_jobs_survive_the_driver(main: Main, checkout: Path) -> None:
    """The driver returns at once; its process group gone, the jobs go on."""
    process = subprocess.Popen(
        [sys.executable, "main.py", *MNIST, "--framework", "pytorch"],
        cwd=checkout,
        env=clean_environment(),
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert process.wait(60) == 0
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    (run,) = Results(checkout / "results").runs()
    assert wait_for(lambda: run.status().state == "finished" and run.status()).exit_code == 0


def test_no_file_of_the_driver_ends_in_a_traceback_on_ctrl_c(checkout: Path) -> None:
    with heeding_ctrl_c():
        process = subprocess.Popen(
            [sys.executable, "main.py", *MNIST, "--framework", "pytorch", "--wait"],
            cwd=checkout,
            env=clean_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("started")
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "runs already started continue" in said
    assert "Traceback" not in said
    (run,) = Results(checkout / "results").runs()
    wait_for(lambda: run.status().state == "finished")


def test_small_proofs_run_side_by_side_and_nothing_else_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    results = Results(tmp_path / "results")

    def exit_codes(use_case: int, preset: str) -> list[object]:
        """Of two scripts, each of which waits a second for the other to begin."""
        met = tmp_path / f"{use_case} {preset}"
        met.mkdir()
        until_both = "for _ in {1..10}; do sleep 0.1; [ $(ls | wc -l) = 2 ] && exit; done; exit 7"
        script = f'cd "{met}"; touch $DUEL_RUN_ID; {until_both}'
        runs = []
        for framework in ("jax", "pytorch"):
            job = Job(framework, "mnist", use_case, preset, "fp32", None, "local")
            run = results.run(job.run_id())
            run.create(job.rows(), script=script, launch=LaunchRecord(job=job), owner=this_process())
            runs.append(run)
        local.work(runs, results)
        return [run.status().exit_code for run in runs]

    assert exit_codes(VALIDATE, "smoke") == [0, 0]
    assert exit_codes(VALIDATE, "standard") == [7, 0]
    assert exit_codes(1, "smoke") == [7, 0]


def test_only_small_proofs_share_the_device_and_only_where_jax_has_no_accelerator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def may_share(use_case: int, preset: str) -> bool:
        return _may_share(Job("jax", "mnist", use_case, preset, "fp32", None, "local"))

    assert may_share(VALIDATE, "smoke")
    assert not may_share(VALIDATE, "standard")
    assert not may_share(1, "smoke")
    (tmp_path / "jax_plugins").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not may_share(VALIDATE, "smoke")


def test_a_shared_lock_is_shared_with_those_that_share_it(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with locked(lock, wait=False, shared=True) as first, locked(lock, wait=False, shared=True) as second:
        assert first
        assert second
        with locked(lock, wait=False) as alone:
            assert alone is None
    with locked(lock, wait=False) as alone, locked(lock, wait=False, shared=True) as first:
        assert alone
        assert first is None
