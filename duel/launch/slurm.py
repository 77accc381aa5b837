"""Handing scripts to Slurm through submitit. Imported only for Slurm targets: submitit's executor needs ``srun``."""

import os
import subprocess
from pathlib import Path

import submitit

from duel.errors import UserError
from duel.record import FAILED
from duel.results import Results, Run


class ScriptExecutor(submitit.SlurmExecutor):
    """submitit's Slurm executor, but Slurm gets the rendered script itself, under the run's id as job name.

    Both overridden methods are abstract in submitit's base class: its contract for plug-ins, unchanged from 1.0 to 1.5.
    """

    def __init__(self, folder: Path, run: Run) -> None:
        super().__init__(folder=folder)
        self._run = run

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return self._run.script.read_text()

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        return ["sbatch", f"--job-name={self._run.id}", str(submission_file_path)]


class Script:
    """What submitit keeps as the receipt of a submission: which script was sent."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self) -> int:
        return subprocess.run(["bash", str(self.path)], check=False).returncode


def _keep_out(name: str) -> bool:
    """Whether a variable must not reach sbatch: it would overrule the script, or others could read a secret."""
    overrules = name.startswith(("SBATCH_", "SLURM_")) and name != "SLURM_CONF"
    return overrules or name == "WANDB_API_KEY" or name.startswith(("HF_", "AWS_")) or name.endswith("_TOKEN")


def start(runs: list[Run], results: Results) -> None:
    """Submit each run's script; a run that sbatch refuses is failed, the others go on.

    Raises UserError with sbatch's own words where it refused any.
    """
    logs = results.folder / "logs"
    logs.mkdir(parents=True, exist_ok=True, mode=0o700)
    for name in filter(_keep_out, list(os.environ)):
        del os.environ[name]
    refused = []
    for run in runs:
        # Before the submission: the job may start, and own its status, at once.
        run.write_status(owner={"slurm_job_name": run.id})
        try:
            ScriptExecutor(logs, run).submit(Script(run.script))
        except submitit.core.utils.FailedJobError as error:
            refused.append(f"Slurm refused {run.id}: {str(error).strip().splitlines()[-1]}")
            run.settle(state=FAILED, cause=refused[-1])
    if refused:
        raise UserError("\n".join(refused))
