"""The proof of what is timed holds for every benchmark, use case, mode and precision: it bars no pair by mistake.

The evidence of both sides is recorded and compared; nothing is timed. tests/test_mistakes.py has the mistakes that it
finds.
"""

import socket
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT, clean_environment, interpreter

from duel.catalogue import BENCHMARKS, FRAMEWORKS, INFERENCE, MANY, PER_SAMPLE, TRAIN
from duel.evidence import Evidence, curves_apart, disagreements, finer
from duel.modes import DEFAULT, TUNED
from duel.results import Results

# Rows through all their stages but those that time, one process for each rank; nothing else of them is asked for.
PROVE = """
import os, pathlib, sys
framework, benchmark, mode, precision, folder, plan, rank, ranks, meet = sys.argv[1:]
sys.path[:0] = [framework, "."]
import devices
from duel.catalogue import INFERENCE
from duel.job import Job
from duel.measure import preparing, proving, row, timed
from duel.measure.device import World
from duel.measure.measurement import Measurement
from duel.results import Results
from duel.table import merge
from duel.status import this_process
from duel.table import merge

timing = (timed.warm_up, timed.time_calls, timed.time_blocks, timed.time_training, timed.memory, timed.time_passes)
left_out = (*timing, timed.all_reduce, timed.utilise, timed.start_again)
world = World(int(rank), int(ranks), int(rank), meet)
for use_case in map(int, plan.split(",")):
    sizes = {"batch_sizes": (8,)} if use_case == INFERENCE else {}
    many = {"devices_per_node": world.size, "products": ("clipped_sum",)} if world.size > 1 else {}
    job = Job(framework, benchmark, use_case, "smoke", precision, "cpu", "here", mode=mode, **sizes, **many)
    run = Results(pathlib.Path(folder)).run(f"{framework}_{use_case}_{rank}")
    run.create(job.rows(), owner=this_process(), target="here")
    for planned in run.rows()[world.size - 1 :]:  # of several devices, those of one alone come first
        m = Measurement(run, planned, pathlib.Path("data"), "cpu", lambda event, **fields: None, world)
        for name, stage in row.STAGES[m.use_case.module]:
            columns = {} if stage in left_out else stage(m)
            m.row = m.row.replace(**columns)
        run.write_row(m.row)
if world.size > 1:
    devices.leave()
    os._exit(0)
"""


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where Inductor keeps its kernels: under weak scaling those of two devices are those of one."""
    return tmp_path_factory.mktemp("compiled")


def proofs(
    folder: Path, compiled: Path, benchmark: str, mode: str, precision: str, plan: str, ranks: int
) -> dict[str, list[str]]:
    """By use case and product what the evidence of both sides differs in."""
    environment = clean_environment() | {"OMP_WAIT_POLICY": "passive", "TORCHINDUCTOR_CACHE_DIR": str(compiled)}
    for framework in FRAMEWORKS:
        with socket.create_server(("127.0.0.1", 0)) as server:
            meet = f"127.0.0.1:{server.getsockname()[1]}"
        command = [interpreter(framework), "-c", PROVE, framework, benchmark, mode, precision, str(folder), plan]
        processes = [
            subprocess.Popen(
                [*command, str(rank), str(ranks), meet],
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(ranks)
        ]
        texts = [process.communicate()[0] for process in processes]
        assert [process.returncode for process in processes] == [0] * ranks, "\n".join(texts)
    found, results = {}, Results(folder)
    for use_case in plan.split(","):
        runs = [[results.run(f"{framework}_{use_case}_{rank}") for rank in range(ranks)] for framework in FRAMEWORKS]
        for rows in zip(*(of_ranks[0].rows()[ranks - 1 :] for of_ranks in runs), strict=True):
            assert rows[0].product == rows[1].product
            sides = [
                [
                    Evidence.from_bytes(run.evidence_file(rows[0].row or 0, rank).read_bytes())
                    for rank, run in enumerate(of_ranks)
                ]
                for of_ranks in runs
            ]
            first = [side[0] for side in sides]
            wrong = [*disagreements(*sides), *curves_apart(*first)]
            found[f"{use_case} {rows[0].product or ''}"] = [
                *wrong,
                *filter(None, (finer(*first), finer(*reversed(first)))),
            ]
    return found


@pytest.mark.full
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("mode", [DEFAULT, TUNED])
@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_on_one_device_the_proof_of_every_benchmark_holds(
    tmp_path: Path, compiled: Path, benchmark: str, mode: str, precision: str
) -> None:
    # Per-sample gradients last: they switch kernels of attention off for the whole process.
    plan = ",".join(map(str, (TRAIN, INFERENCE, PER_SAMPLE)))
    found = proofs(tmp_path, compiled, benchmark, mode, precision, plan, 1)
    assert len(found) == 5
    assert {what: wrong for what, wrong in found.items() if wrong} == {}


@pytest.mark.full
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("mode", [DEFAULT, TUNED])
@pytest.mark.parametrize("benchmark", BENCHMARKS)
@pytest.mark.parametrize("use_case", MANY)
def test_on_two_devices_the_proof_of_every_benchmark_holds(
    tmp_path: Path, compiled: Path, use_case: int, benchmark: str, mode: str, precision: str
) -> None:
    found = proofs(tmp_path, compiled, benchmark, mode, precision, str(use_case), 2)
    assert list(found.values()) == [[]], found
