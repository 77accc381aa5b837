"""Job arrays: runs of one shape that one sbatch submits, each an element that ends, or is cancelled, by itself."""

import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from duel import files
from duel.files import stamp, write_atomically
from duel.launch import directives
from duel.launch.reasons import SlurmJob
from duel.results import Run
from duel.status import LaunchRecord

if TYPE_CHECKING:  # 'main.py status' needs neither it nor pydantic
    from duel.launch.schema import Target

_OF_THE_RUN = ("--job-name", "--output")


def batches(runs: "Sequence[Run]", targets: "Sequence[Target]") -> "Iterator[list[tuple[Run, Target]]]":
    """Yield the runs in their order, together where they have one shape and their target has arrays."""
    found: list[tuple[Run, Target]] = []
    before: tuple[list[str], str] | None = None
    for run, target in zip(runs, targets, strict=True):
        shape = _shape(run) if target.array and not {"--job-name", "--array"} & set(target.without) else None
        if found and (shape is None or shape != before or len(found) == target.array):
            yield found
            found = []
        found.append((run, target))
        before = shape
    if found:
        yield found


def _shape(run: Run) -> tuple[list[str], str]:
    """Return what the elements of an array have in common: directives and shell."""
    text = files.read(run.script).decode()
    lines = [line for line in directives.of_script(text) if not set(_OF_THE_RUN) & set(directives.names(line))]
    return lines, text.partition("\n")[0]


def write(runs: Sequence[Run], folder: Path) -> tuple[str, Path]:
    """Write the script of an array of ``runs`` into ``folder``, and in each run's record which element it is.

    Returns the array's name and the script.
    """
    name = f"duel-array-{stamp()}{os.urandom(4).hex()}"  # several may be written at once
    lines, shell = _shape(runs[0])
    given = directives.of_script(files.read(runs[0].script).decode())
    output = [line.replace("%j", "%A_%a") for line in given if "--output" in directives.names(line)]
    root = folder.parent.parent
    text = [
        shell,
        f"#SBATCH --job-name={name}",
        *(f"#SBATCH {line}" for line in [*output, *lines]),
        f"#SBATCH --array=0-{len(runs) - 1}",
        "runs=(",
        *(run.id for run in runs),
        ")",
        "run=${runs[$SLURM_ARRAY_TASK_ID]}",
        "export DUEL_RUN_ID=$run DUEL_SLURM_JOB_ID=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID",
        f"cd -- {shlex.quote(str(root))} || exit 97",
        f'exec {shell.removeprefix("#!")} results/runs/"$run"/script.sh',
    ]
    script = folder / f"{name}.sh"
    write_atomically(script, "\n".join([*text, ""]))
    for element, run in enumerate(runs):
        run.write_launch(array=f"{name}_{element}")
    return name, script


def of_run(run_id: str, launch: LaunchRecord) -> str:
    """Return the name by which Slurm's job of a run is found: its own, or that of its element of an array."""
    return launch.array or run_id


def of_job(job: SlurmJob) -> str:
    """Return the same for one of Slurm's jobs."""
    element = job.id.partition("_")[2]
    return f"{job.name}_{element}" if element else job.name
