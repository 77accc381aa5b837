"""``make benchmark``: what it writes is a whole benchmark, and what it cannot write it refuses."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Main

from duel.errors import UserError
from duel.launch import skeleton


def make(checkout: Path, name: str) -> "subprocess.CompletedProcess[str]":
    command = ["make", "--no-print-directory", "benchmark", f"NAME={name}", f"PYTHON={sys.executable}"]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)


def test_a_new_benchmark_is_proved_as_it_was_written(main: Main, checkout: Path) -> None:
    made = make(checkout, "a_new_one")
    assert made.returncode == 0, made.stdout + made.stderr
    files = ["jax/models/a_new_one.py", "pytorch/models/a_new_one.py", "duel/benchmarks.py"]
    assert all(file in made.stdout for file in files)
    for check in (["check"], ["format", "--check"]):
        subprocess.run([sys.executable, "-m", "ruff", *check, *files], cwd=checkout, check=True)
    validated = main("validate", "--benchmark", "a_new_one")
    assert validated.returncode == 0, validated.stdout + validated.stderr
    assert validated.stdout.endswith("passed\n")
    again = make(checkout, "a_new_one")
    assert again.returncode == 2
    assert f"the name is taken by {files[2]} and {files[0]} and {files[1]}" in again.stderr


@pytest.mark.parametrize("name", ["", "9x", "class", "Mixer", "a b", "../x", "_x", "x" * 33])
def test_what_cannot_be_a_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"NAME={name}: ")):
        skeleton.write(name, tmp_path)


@pytest.mark.parametrize(
    ("name", "file"),
    [("mnist", "duel/benchmarks.py"), ("gnn", "duel/catalogue.py"), ("all", "duel/catalogue.py")],
)
def test_a_name_that_is_taken_is_refused(tmp_path: Path, name: str, file: str) -> None:
    with pytest.raises(UserError, match=f"NAME={name}: the name is taken by {file}"):
        skeleton.write(name, tmp_path)


def test_a_file_that_exists_is_never_overwritten(tmp_path: Path) -> None:
    there = tmp_path / "pytorch" / "models" / "a_new_one.py"
    there.parent.mkdir(parents=True)
    there.write_text("mine\n")
    with pytest.raises(UserError, match=r"NAME=a_new_one: the name is taken by pytorch/models/a_new_one\.py"):
        skeleton.write("a_new_one", tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [there]
    assert there.read_text() == "mine\n"
