"""'init --from': a script that works on a site becomes a target, which cluster.yaml takes and scripts come from."""

from pathlib import Path

import pytest
from conftest import ROOT
from test_cluster import job

from duel.errors import UserError
from duel.launch import cluster, script, working_script

HEAD = "default: job\ntargets:\n"
WORKS = """#!/bin/bash
#SBATCH -J train -p gpu
#SBATCH --account=abc --nodes=2
#SBATCH --gres=gpu:a100:4
#SBATCH --ntasks-per-node=4
#SBATCH --output=x.log
set -e
module load "cuda/12.4"  # 'the' newest
cd /scratch/me

export NCCL_DEBUG=INFO
srun --cpu-bind=cores python train.py --lr 1
echo done
"""


def made(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> tuple[cluster.Cluster, list[str]]:
    (tmp_path / "job.sh").write_text(text)
    notes: list[str] = []
    working_script.target(tmp_path / "job.sh", notes.append)
    (tmp_path / "cluster.yaml").write_text(HEAD + capsys.readouterr().out)
    return cluster.load(tmp_path / "cluster.yaml"), notes


def test_a_working_script_becomes_a_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loaded, notes = made(tmp_path, capsys, WORKS)
    target = loaded.targets["job"]
    assert (target.nodes, target.devices_per_node, target.launcher) == (2, [4], "srun --cpu-bind=cores")
    assert target.setup.job == ["module load \"cuda/12.4\"  # 'the' newest", "export NCCL_DEBUG=INFO"]
    assert target.for_job(job(2, 4, target="job")).directives == [
        *("--partition=gpu", "--account=abc", "--nodes=2", "--gres=gpu:a100:4", "--ntasks-per-node=4"),
    ]
    assert "srun --cpu-bind=cores bash" in script.render(job(2, 4, target="job"), target, Path("/opt/duel"))
    assert notes[:2] == [
        "left out: 'cd /scratch/me': jobs begin in the checkout",
        "left out: 1 lines from 'echo done' on, after the program",
    ]
    assert "write [1, 4] if your site gives parts of nodes" in notes[2]


@pytest.mark.parametrize(
    ("program", "launcher"),
    [
        ("python a.py", None),
        ("module load gcc/12 python\nconda activate x\nsource /opt/python/env\nsrun python a.py", "srun"),
        ("exec /sw/bin/python3.11 a.py", None),
        ("mpirun -np 4 torchrun a.py", "mpirun -np {tasks}"),
        (
            "srun -N2 --ntasks-per-node=4 nice -n 4 python a.py",
            "srun -N{nodes} --ntasks-per-node={tasks_per_node} nice -n 4",
        ),
        ("srun --ntasks=8 -n 8 python a.py", "srun --ntasks={tasks} -n {tasks}"),
        ("jsrun -n 4 python a.py", "jsrun -n 4"),
        ("srun --mpi=pmix \\\n    --label \\\n    python a.py \\\n    --lr 1", "srun --mpi=pmix --label"),
        ("srun apptainer exec --nv a.sif python3 a.py", "srun apptainer exec --nv a.sif"),
    ],
)
def test_what_starts_the_program_is_the_launcher(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], program: str, launcher: str | None
) -> None:
    loaded, notes = made(tmp_path, capsys, f"#!/bin/sh\n#SBATCH --gpus=8 -N 2\n{program}\n")
    target = loaded.targets["job"]
    assert target.launcher == launcher
    assert (target.nodes, target.devices_per_node, target.directives) == (
        2,
        [4],
        ["--gpus={devices}", "--nodes={nodes}", "--ntasks-per-node={tasks_per_node}"],
    )
    assert not any("check that it starts" in note for note in notes)


def test_only_the_gpus_of_a_gres_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loaded, _ = made(tmp_path, capsys, "#!/bin/sh\n#SBATCH --gres=gpu:a100:4,lscratch:100\npython a.py\n")
    target = loaded.targets["job"]
    assert target.devices_per_node == [4]
    assert target.directives == [
        "--gres=gpu:a100:{devices_per_node},lscratch:100",
        "--ntasks-per-node={tasks_per_node}",
    ]


@pytest.mark.parametrize(
    ("tasks", "cpus"),
    [
        ("", 8),
        ("--ntasks-per-node=1", 8),
        ("--ntasks=1", 8),
        ("--ntasks-per-node=2", 16),
        ("--ntasks-per-node=4", 32),
        ("--ntasks-per-gpu=1", 32),
    ],
)
def test_the_cpus_of_few_tasks_are_shared_among_those_of_all_devices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tasks: str, cpus: int
) -> None:
    loaded, _ = made(tmp_path, capsys, f"#!/bin/sh\n#SBATCH --gpus-per-node=4 {tasks} -c 32\npython a.py\n")
    lines = loaded.targets["job"].directives
    assert f"--cpus-per-task={cpus}" in lines
    assert [line for line in lines if line.startswith("--ntasks")] in (
        ["--ntasks-per-node={tasks_per_node}"],
        ["--ntasks={tasks}"],
        [tasks],
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no such file"),
        (b"#!/bin/sh\npython a.py\n", "no '#SBATCH' line before its first command"),
        (b"#SBATCH -p a\n\xff", "invalid start byte"),
    ],
)
def test_what_is_no_script_for_slurm_is_refused(tmp_path: Path, content: bytes | None, said: str) -> None:
    if content is not None:
        (tmp_path / "job.sh").write_bytes(content)
    with pytest.raises(UserError, match=said):
        working_script.target(tmp_path / "job.sh", print)


def test_duel_s_own_scripts_become_targets_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = sorted((ROOT / "tests" / "golden").glob("*h100.sh"))
    assert len(paths) == 3
    for path in paths:
        loaded, _ = made(tmp_path, capsys, path.read_text())
        assert "--partition=h100" in loaded.targets["job"].directives
