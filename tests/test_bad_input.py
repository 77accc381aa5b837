"""Mistakes: each is named with its place and what would be valid, exit code 2, nothing half-started, no traceback."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT, Main, clean_environment, interpreter, rows_of
from test_compare import STAMPS, job, make

from duel.files import Damaged
from duel.report import parity
from duel.results import Results, Run

MNIST = ("--benchmark", "mnist", "--use_case", "1", "--preset", "smoke")


def test_dry_run_prints_exactly_what_it_writes_and_needs_no_framework(main: Main, checkout: Path) -> None:
    (checkout / ".venv").unlink()
    done = main("--benchmark", "resnet50", "--use_case", "1", "--dry_run", PATH="/usr/bin:/bin")
    assert done.returncode == 0, done.stderr
    written = sorted(path.name for path in (checkout / "slurm_scripts").glob("*.sh"))
    assert written == ["jax_resnet50_1.sh", "pytorch_resnet50_1.sh"]
    for name in written:
        assert (checkout / "slurm_scripts" / name).read_text() in done.stdout
    assert not (checkout / "results" / "runs").exists()


def refused(done: "subprocess.CompletedProcess[str]", said: str) -> None:
    assert done.returncode == 2, done.stdout + done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr + done.stdout


def test_a_missing_interpreter_is_named_before_anything_starts(main: Main, checkout: Path) -> None:
    path = checkout / "cluster.yaml"
    path.write_text(path.read_text().replace("jax: .venv/jax/bin/python", "jax: .venv/none/bin/python", 1))
    refused(
        main(*MNIST), "cluster.yaml: targets.local.python.jax: no interpreter '.venv/none/bin/python'; 'make jax-env'"
    )
    assert not (checkout / "results" / "runs").exists()
    # The script says the same by hand.
    main(*MNIST, "--dry_run")
    script = checkout / "slurm_scripts" / "jax_mnist_1_smoke.sh"
    by_hand = subprocess.run(["bash", str(script)], capture_output=True, text=True, check=False)
    assert by_hand.returncode == 96
    assert "no interpreter .venv/none/bin/python (cluster.yaml: targets.local.python.jax)" in by_hand.stderr


def test_an_interpreter_without_its_framework_is_named(main: Main, checkout: Path) -> None:
    path = checkout / "cluster.yaml"
    path.write_text(path.read_text().replace("jax: .venv/jax/bin/python", "jax: .venv/pytorch/bin/python", 1))
    refused(main(*MNIST), "targets.local.python.jax: '.venv/pytorch/bin/python' has no jax")
    by_hand = subprocess.run(
        [".venv/pytorch/bin/python", "jax/run.py", "--benchmark", "mnist", "--use_case", "1"],
        cwd=checkout,
        capture_output=True,
        text=True,
        check=False,
    )
    refused(by_hand, "has no jax")


def test_a_malformed_cluster_file_is_named(main: Main, checkout: Path) -> None:
    with open(checkout / "cluster.yaml", "a") as file:
        file.write("tragets: {}\n")
    refused(main(*MNIST), "tragets: unknown key; valid: default, targets")


def test_a_results_folder_that_cannot_be_written_is_named(main: Main, checkout: Path) -> None:
    shutil.rmtree(checkout / "results")
    (checkout / "results").write_text("a file in its place")
    refused(main(*MNIST), "results")


def test_a_full_disk_is_named_and_nothing_is_half_started(main: Main, checkout: Path) -> None:
    (checkout / "results").mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=8k,nr_inodes=64", "none", str(checkout / "results")]
    if os.geteuid() != 0 or subprocess.run(mount, check=False).returncode:
        assert "CI" not in os.environ, "CI runs as root and can mount"
        pytest.skip("NOT TESTED: a full disk; needs the right to mount a small file system")
    try:
        (checkout / "results" / "ballast").write_bytes(b"x" * 4096)
        refused(main(*MNIST), "No space left on device")
        assert not list((checkout / "results").glob("runs/*"))
    finally:
        subprocess.run(["umount", str(checkout / "results")], check=True)


def test_a_benchmark_that_one_side_has_no_file_for_is_named(main: Main, checkout: Path) -> None:
    (checkout / "jax" / "models" / "mnist.py").unlink()
    message = "jax/models/mnist.py is missing; benchmark mnist needs models/mnist.py in jax/ and pytorch/"
    refused(main(*MNIST), message)
    refused(main("validate", "--benchmark", "mnist"), message)
    (checkout / "mnist.pth").write_bytes(b"")
    refused(main(*MNIST, "--weights", "mnist.pth"), message)
    assert not (checkout / "results" / "runs").exists()
    command = [interpreter("pytorch"), "pytorch/run.py", *MNIST]
    by_hand = subprocess.run(
        command, cwd=checkout, env=clean_environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert by_hand.returncode == 2
    assert f"error: {message}\n" in by_hand.stdout + by_hand.stderr
    assert "Traceback" not in by_hand.stdout + by_hand.stderr
    (row,) = rows_of(checkout)
    assert row["cause"] == f"input: {message}"


def test_broken_idx_files_are_named_before_anything_starts(main: Main, checkout: Path) -> None:
    (checkout / "data").mkdir()
    (checkout / "data" / "train-images-idx3-ubyte").write_bytes(b"\x00\x00\x08\x03")
    refused(main(*MNIST), "train-images-idx3-ubyte")
    assert not (checkout / "results" / "runs").exists()


def test_a_device_that_is_not_there_is_refused_and_by_hand_fails_its_row_with_what_is(
    main: Main, checkout: Path
) -> None:
    asked = (*MNIST, "--framework", "pytorch", "--device", "mps")
    refused(main(*asked), "pytorch supports mps on macOS only; choose another --device")
    assert not (checkout / "results" / "runs").exists()
    command = [interpreter("pytorch"), "pytorch/run.py", *MNIST, "--device", "mps"]
    done = subprocess.run(command, cwd=checkout, env=clean_environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    (row,) = rows_of(checkout)
    assert row["status"] == "failed"
    assert row["cause"].startswith("input: ")
    assert "cpu" in row["cause"]
    assert "Traceback" not in main("logs", row["run_id"]).stdout


@pytest.mark.parametrize("variable", ["DUEL_SILENCE_SECONDS", "DUEL_GATHER_SECONDS"])
@pytest.mark.parametrize("text", ["half an hour", "0", "nan"])
def test_a_limit_that_is_no_number_of_seconds_is_refused(variable: str, text: str) -> None:
    command = [interpreter("jax"), "jax/run.py", "--benchmark", "mnist", "--use_case", "1"]
    environment = clean_environment() | {variable: text}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr == f"error: {variable}={text}: expected a number of seconds above 0\n"


def test_a_precision_that_the_device_lacks_is_a_skipped_row(main: Main, checkout: Path) -> None:
    done = main(*MNIST, "--precision", "tf32", "--framework", "jax", "--wait")
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = rows_of(checkout)
    assert (row["status"], row["cause"]) == ("skipped", "tf32 is supported on gpu only; this is a cpu")


def test_a_terminal_without_unicode_gets_question_marks_and_no_traceback(main: Main, checkout: Path) -> None:
    run = make(Results(checkout / "results"), job("jax"), STAMPS[0])
    run.write_row(run.read_row(0).replace(status="failed", cause="a folder named é"))
    run.write_status(state="failed", cause="a folder named é")
    said = main("status", "--all", PYTHONIOENCODING="ascii")
    assert said.returncode == 0, said.stderr
    assert "a folder named ?" in said.stdout


def test_what_a_validation_wrote_is_damaged_where_it_is_no_such_file(tmp_path: Path) -> None:
    run = Run(tmp_path / "jax_mnist_0-1")
    run.folder.mkdir()
    for content in (b"", b"PK\x03\x04half of it", b"\x93NUMPY\x01\x00v\x00"):
        run.parity.write_bytes(content)
        with pytest.raises(Damaged, match=r"parity\.npz is damaged"):
            parity.unfinished({"jax": run})
    run.parity.unlink()
    os.mkfifo(run.parity)
    with pytest.raises(Damaged, match="is not a regular file"):
        parity.unfinished({"jax": run})
