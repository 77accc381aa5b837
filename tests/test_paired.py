"""One script that measures both frameworks in turn, and what it catches: planted faults are small edits of a copy."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import Main, clean_environment, interpreter, rows_of

from duel.catalogue import BENCHMARKS, PAIRED, PRESETS
from duel.comparability import COMPARABLE, NOT_COMPARABLE
from duel.job import Job
from duel.record import Row
from duel.results import Results, Run
from duel.states import FAILED, FINISHED
from duel.table import merge

# What a busy machine may add to a verdict; on a quiet one nothing of it is there.
LOAD = ("left_out_blocks (", "not reported: ", "foreign_load (", "steady (", "waited_seconds (")


def job(**more: Any) -> Job:
    return Job(PAIRED, "mnist", 1, more.pop("preset", "standard"), "fp32", None, "local", **more)


@pytest.mark.parametrize("name", ["standard", "publication"])
def test_the_order_is_a_b_b_a(name: str) -> None:
    rows = job(preset=name).rows()
    one, other = ["jax", "pytorch"], ["pytorch", "jax"]
    assert [row.framework for row in rows] == (one + other) * (PRESETS[name].pairs // 2)
    assert [row.repeat for row in rows] == sorted([*range(PRESETS[name].pairs)] * 2)
    assert {row.point for row in rows} == {0}


def test_each_point_has_its_number_and_both_sides_of_a_repeat_follow_each_other() -> None:
    rows = Job(PAIRED, "mnist", 5, "standard", "fp32", None, "local", batch_sizes=(1, 8)).rows()
    assert [(row.framework, row.batch_size, row.point) for row in rows[:8]] == [
        *(("jax", 1, 0), ("pytorch", 1, 0), ("jax", 8, 1), ("pytorch", 8, 1)),
        *(("pytorch", 1, 0), ("jax", 1, 0), ("pytorch", 8, 1), ("jax", 8, 1)),
    ]
    many = Job(PAIRED, "mnist", 2, "smoke", "fp32", None, "local", devices_per_node=2).rows()
    assert [(row.framework, row.device_count, row.point) for row in many] == [
        *(("jax", 1, 0), ("jax", 2, 1), ("pytorch", 1, 0), ("pytorch", 2, 1)),
    ]


def measure(checkout: Path, *arguments: str, **environment: str) -> list[Row]:
    """The rows of a paired run of a small benchmark, by the command of its script."""
    other = f"pytorch={interpreter('pytorch')}"
    command = [interpreter("jax"), "jax/run.py", "--benchmark", "gcn", "--use_case", "1", "--preset", "smoke"]
    subprocess.run(
        [*command, "--device", "cpu", "--paired", other, *arguments],
        cwd=checkout,
        env=clean_environment() | {"WANDB_MODE": "disabled"} | environment,
        capture_output=True,
        timeout=900,
        check=False,
    )
    return merge(Results(checkout / "results"))


def faults(row: Row) -> list[str]:
    """What bars the row's pair, but for what the machine's load adds."""
    if row.comparable == COMPARABLE:
        return []
    assert str(row.comparable).startswith(f"{NOT_COMPARABLE}: ")
    said = str(row.comparable).removeprefix(f"{NOT_COMPARABLE}: ").split("; ")
    return [one for one in said if not one.startswith(LOAD) and not re.match(r"\d+ other processes", one)]


def plant(checkout: Path, file: str, line: str, broken: str) -> None:
    path = checkout / file
    assert path.read_text().count(line) == 1
    path.write_text(path.read_text().replace(line, broken))


# Where compilers keep what they have made: JAX, Triton, Inductor, CUDA, MIOpen, ROCm, by their documentation.
CACHES = (
    *("JAX_COMPILATION_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH"),
    *("MIOPEN_USER_DB_PATH", "MIOPEN_CUSTOM_CACHE_DIR", "AMD_COMGR_CACHE_DIR"),
)


@pytest.fixture
def every_core() -> Iterator[None]:
    """All cores of the machine, where a test's worker has some of them."""
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    yield
    os.sched_setaffinity(0, own)


@pytest.mark.usefixtures("every_core")
def test_both_sides_run_in_one_script_and_the_user_s_caches_stay_as_they_are(checkout: Path, tmp_path: Path) -> None:
    caches = {name: str(tmp_path / "mine" / name) for name in CACHES}
    rows = measure(checkout, "--mode", "default+threads=1+deterministic+keep_memory", WANDB_MODE="offline", **caches)
    assert [(row.framework, row.status, row.cause) for row in rows] == [
        *(("jax", FINISHED, None), ("pytorch", FINISHED, None)),
    ]
    assert faults(rows[0]) == faults(rows[1]) == []
    assert all(str(row.parity).startswith("unverified: no certificate; run ") for row in rows)
    for row in rows:
        proofs = json.loads(str(row.proofs))
        counted = {"pytorch": ", 1 threads"}.get(str(row.framework), "")
        assert (proofs["threads"], row.cpus) == (f"affinity, 1 CPUs{counted}", 1)
        assert re.match(r"a large block lies in the heap, \d+% of the heap in huge pages, ", proofs["keep_memory"])
        assert proofs["deterministic"] == "a repeat gave the same bits"
        assert "deterministic=on" in str(row.switches)
    assert len({row.run_id for row in rows}) == len({row.group for row in rows}) == 1
    assert rows[0].packages_sha256 != rows[1].packages_sha256
    assert not (tmp_path / "mine").exists()
    # One process and one environment each: the record has both.
    (run,) = Results(checkout / "results").runs()
    assert run.stored_status().part == "row 2 of 2, pytorch"
    (offline,) = run.folder.glob("wandb/offline-run-*")
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", "--summary", str(offline)]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    summary = found["summary"]
    assert summary["jax/comparable"] == summary["pytorch/comparable"] == rows[0].comparable
    assert summary["pair/comparable"] == rows[0].comparable
    assert {"jax", "pytorch", "gcn"} <= set(found["tags"])
    record = json.loads(run.environment.read_text())
    assert "torch" not in record["jax"]["modules"]
    assert "jax" not in record["pytorch"]["modules"]
    assert record["jax"]["packages"]["jax"] == rows[0].framework_version
    assert record["pytorch"]["packages"]["torch"] == rows[1].framework_version


@pytest.mark.parametrize(
    ("file", "line", "broken", "arguments", "words"),
    [
        pytest.param(
            "pytorch/weights.py",
            "        tensor.copy_(torch.from_numpy(arrays[name]))\n",
            "        tensor.copy_(torch.from_numpy(arrays[name] * 1.001))\n",
            (),
            "weights_sha256 (",
            id="weights",
        ),
        pytest.param(
            "jax/network.py",
            "[self._put_batch(batch) for batch in pool.batches]\n",
            "[self._put_batch(batch) for batch in pool.batches[::-1]]\n",
            (),
            "data_sha256 (",
            id="order of batches",
        ),
        pytest.param(
            "pytorch/network.py",
            "        self._setting, self._world = setting, setting.world\n",
            "        import dataclasses; setting = dataclasses.replace(setting, precision='bf16')\n"
            "        self._setting, self._world = setting, setting.world\n",
            (),
            "status (pytorch: failed: input: precision fp32 is not in force: matmul is ",
            id="precision",
        ),
        pytest.param(
            "pytorch/training.py",
            'self._setting.on("fused_optimizer"))\n',
            "False)\n",
            ("--mode", "default+fused_optimizer"),
            "status (pytorch: failed: input: switch fused_optimizer did not take: on was set, off was found",
            id="switch",
        ),
        pytest.param(
            "pytorch/training.py",
            "        return float(self._over_all(handle))\n",
            "        return float(self._over_all(handle)) + __import__('random').random() * 1e-9\n",
            ("--mode", "default+deterministic"),
            "status (pytorch: failed: input: switch deterministic did not take: on was set, off was found (a repeat",
            id="bits of a repeat",
        ),
    ],
)
def test_a_planted_fault_is_caught_and_named(
    checkout: Path, file: str, line: str, broken: str, arguments: tuple[str, ...], words: str
) -> None:
    plant(checkout, file, line, broken)
    rows = measure(checkout, *arguments)
    assert len(rows) == 2
    assert any(fault.startswith(words) for fault in faults(rows[0])), rows[0].comparable
    assert rows[0].comparable == rows[1].comparable


@pytest.mark.usefixtures("every_core")
def test_threads_that_were_not_limited_are_named(checkout: Path) -> None:
    plant(checkout, "duel/measure/supervisor.py", "        os.sched_setaffinity(", "        print(")
    rows = measure(checkout, "--mode", "default+threads=1")
    words = "status (jax and pytorch: failed: input: --mode default+threads=1: there are "
    assert any(fault.startswith(words) for fault in faults(rows[0])), rows[0].comparable
    assert rows[0].comparable == rows[1].comparable


def test_a_variable_of_the_shell_does_not_reach_the_measured_processes(checkout: Path) -> None:
    """XLA ends a process whose XLA_FLAGS have a flag that it does not know."""
    rows = measure(checkout, XLA_FLAGS="--xla_no_such_flag", TORCH_LOGS="no_such_log", OMP_NUM_THREADS="1")
    assert [(row.status, row.variables) for row in rows] == [(FINISHED, "{}")] * 2
    assert faults(rows[0]) == []


def test_a_variable_that_nobody_names_bars_the_pair(checkout: Path, tmp_path: Path) -> None:
    flags = "--xla_disable_hlo_passes=fusion"
    (tmp_path / "sitecustomize.py").write_text(
        f"import os, sys\nif sys.prefix.endswith('jax'): os.environ['XLA_FLAGS'] = {flags!r}\n"
    )
    rows = measure(checkout, PYTHONPATH=str(tmp_path))
    assert [json.loads(str(row.variables)) for row in rows] == [{"unnamed": {"XLA_FLAGS": flags}}, {}]
    assert faults(rows[0]) == [
        "variables (jax: XLA_FLAGS has no name: neither the target nor a switch sets it)",
        f"variables (XLA_FLAGS: {flags} | not set)",
    ]


def test_a_row_that_hangs_is_ended_and_the_other_side_goes_on(checkout: Path) -> None:
    plant(
        checkout,
        "jax/training.py",
        "        self._state, loss = self._program(",
        "        __import__('time').sleep(1000)\n        self._state, loss = self._program(",
    )
    rows = measure(checkout, DUEL_SILENCE_SECONDS="20")
    assert [row.status for row in rows] == [FAILED, FINISHED]
    assert str(rows[0].cause).startswith("hung: no output for 2")
    assert str(rows[0].cause).endswith("in phase 'first step'")


def test_paired_needs_both_interpreters_and_takes_no_single_framework(main: Main, checkout: Path) -> None:
    said = main("--benchmark", "gcn", "--use_case", "1", "--paired", "--framework", "jax")
    assert (said.returncode, "--paired measures both frameworks" in said.stderr) == (2, True)
    text = (checkout / "cluster.yaml").read_text()
    text = text.replace("pytorch: .venv/pytorch/bin/python", "pytorch: null")
    (checkout / "cluster.yaml").write_text(text)
    said = main("--benchmark", "gcn", "--use_case", "1", "--paired", "--dry_run")
    assert said.returncode == 2
    assert "has no interpreter for pytorch" in said.stderr
    assert "valid: --framework jax" in said.stderr


def test_run_py_refuses_another_side_that_is_none(checkout: Path) -> None:
    for other in ("pytorch", "torch=python", "pytorch=/nowhere/python"):
        command = [interpreter("jax"), "jax/run.py", "--benchmark", "gcn", "--use_case", "1", "--paired", other]
        said = subprocess.run(
            command, cwd=checkout, env=clean_environment(), capture_output=True, text=True, check=False
        )
        assert said.returncode == 2
        assert "expected a framework's name, '=' and its interpreter" in said.stderr


@pytest.mark.full
@pytest.mark.parametrize("benchmark", ["mnist", "gpt2", "graphnet"])
def test_tuned_takes_on_every_kind_of_work(main: Main, checkout: Path, benchmark: str) -> None:
    asked = ("--use_case", "1,3,5", "--mode", "tuned", "--products", "clipped_sum", "--batch_sizes", "8")
    said = main("--benchmark", benchmark, *asked, "--preset", "smoke", "--device", "cpu", "--wait", timeout=1800)
    assert said.returncode == 0, said.stdout + said.stderr
    rows = [row for row in rows_of(checkout) if row["framework"] == "pytorch"]
    assert [(row["status"], row["execution"]) for row in rows] == [("finished", "compiled")] * 3
    for row in rows:
        assert json.loads(row["proofs"])["compile"].startswith("Dynamo: ")
        assert float(row["backend_seconds"]) > 0


@pytest.mark.full
def test_mnist_at_full_size_ends_with_a_ratio(main: Main, checkout: Path) -> None:
    """On a quiet machine: a busy one is told, and no ratio made."""
    said = main("--benchmark", "mnist", "--use_case", "1", "--paired", "--wait", timeout=900)
    assert said.returncode == 0, said.stdout + said.stderr
    rows = [SimpleNamespace(**row) for row in rows_of(checkout)]
    assert [row.framework for row in rows] == ["jax", "pytorch", "pytorch", "jax"] * 2
    assert {row.comparable for row in rows} == {"COMPARABLE"}
    for words in ("JAX / PyTorch ", "95 % interval", "4 pairs, noise floor ", ". COMPARABLE", "no float64 certificate"):
        assert words in said.stdout
    assert " pairs COMPARABLE" in Run(checkout / "results" / "runs" / rows[0].run_id).launcher_log.read_text()
    assert all(float(row.mfu) > 0 and row.proofs for row in rows)
    assert BENCHMARKS["mnist"].name == rows[0].benchmark
    assert not os.path.exists(checkout / "results" / "parity")
