"""How fast jobs are rendered, submitted and listed, on a private Slurm on this machine ('make slurm' installs it).

    .venv/driver/bin/python benchmarks/launching.py

Rendering must reach 1,000 scripts/s. Sending 40 jobs without a pause, after the preview, is compared with a bare sbatch
loop over the same scripts, as job arrays and script by script; the two alternate, and neither median of the ratios may
exceed 1.5. 'status' over 2,000 runs, 40 of them waiting in Slurm, must take less than 1 s and ask squeue and sacct at
most twice; scontrol, once, for the cluster's name is not counted. Exit code 1 if one of these does not hold.

With Slurm on the same machine sbatch takes 6 ms, in which creating eight files for each job counts. Script by script
the ratio was 1.19 in memory (TMPDIR=/dev/shm), 1.29 on a disk that was quiet, 1.41 to 1.49 within two minutes after
another run, and 1.58, which does not hold, right after 10,000 folders of runs had been deleted: ext4 steps over what it
deleted lately, so that a new file took up to 1 ms instead of 0.02. Job arrays took 0.50 to 1.06 of the loop
(2026-11-29, two cores).
"""

import dataclasses
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))
sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from slurm_cluster import SlurmCluster

from duel import ROOT
from duel.job import Job
from duel.launch import cluster, script, slurm, submit
from duel.launch.schema import Target
from duel.results import Results, Run
from duel.states import FINISHED

TARGET = """\
default: site
targets:
  site:
    scheduler: slurm
    pause: 0
    python: {jax: python3, pytorch: python3}
    directives: [--partition=cpu, --time=00:10:00, --begin=now+1hour, --mem=100M]
  arrays: {like: site, array: 100}
"""
TARGETS, MOST_RATIO = ("site", "arrays"), 1.5
SCRIPTS, ROUNDS, RUNS, WAITING = 2000, 7, 2000, 40


def planned(number: int, target: str = "site") -> list[Job]:
    kinds = [
        Job(framework, benchmark, 1, preset, precision, device, target)
        for benchmark in ("mnist", "resnet50")
        for preset in ("smoke", "standard")
        for precision in ("fp32", "bf16", "tf32")
        for device in ("cpu", "gpu")
        for framework in ("jax", "pytorch")
    ]
    return kinds[:number]


def in_folder(jobs: list[Job], target: Target, folder: Path) -> list[submit.Launch]:
    """Return the launches of ``jobs``, as from a checkout in ``folder``."""
    launches = submit.plan(jobs, target)
    return [dataclasses.replace(launch, text=script.render(launch.job, target, folder)) for launch in launches]


def submitting(name: str, target: Target, folder: Path) -> list[float]:
    """Return the ratios of our seconds to those of bare sbatch, one per round."""
    ratios = []
    jobs = planned(40, name)
    results = Results(folder / name)
    for number in range(ROUNDS + 1):
        launches = in_folder(jobs, target, folder)  # under new run ids
        start = time.perf_counter()
        runs = slurm.Slurm().start(launches, results, print)
        ours = time.perf_counter() - start
        start = time.perf_counter()
        for run in runs:
            subprocess.run(["sbatch", str(run.script)], check=True, stdout=subprocess.DEVNULL)
        bare = time.perf_counter() - start
        subprocess.run(["scancel", f"--user={os.getuid()}"], check=True)
        if number:  # the first one warms up
            ratios.append(ours / bare)
    return ratios


def looking(target: Target, folder: Path) -> tuple[float, int]:
    """Return the median seconds of 'main.py status' over many runs, and how often it called Slurm."""
    checkout = folder / "checkout"
    shutil.copytree(ROOT / "duel", checkout / "duel", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "main.py", checkout)
    results = Results(checkout / "results")
    jobs = planned(WAITING)
    model = slurm.Slurm().start(in_folder(jobs, target, folder), results, print)[0]
    for number in range(RUNS - WAITING):
        copy = Run(model.folder.with_name(f"{model.id.rpartition('-')[0]}-{number:04x}x"))
        shutil.copytree(model.folder, copy.folder)
        copy.write_status(state=FINISHED)
    calls = folder / "calls"
    stand_ins = folder / "bin"
    stand_ins.mkdir()
    for tool in ("squeue", "sacct"):  # they count the call, then run the real tool
        (stand_ins / tool).write_text(f'#!/bin/sh\necho {tool} >> "{calls}"\nexec {shutil.which(tool)} "$@"\n')
        (stand_ins / tool).chmod(0o755)
    environment = os.environ | {"PATH": f"{stand_ins}:{os.environ['PATH']}"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # with it, each command would compile its modules anew
    seconds = []
    for _ in range(ROUNDS):
        calls.unlink(missing_ok=True)
        start = time.perf_counter()
        subprocess.run([sys.executable, "main.py", "status"], cwd=checkout, env=environment, check=True, stdout=-3)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds), len(calls.read_text().splitlines())


def main() -> int:
    with tempfile.TemporaryDirectory() as name, SlurmCluster() as slurm:
        os.environ |= slurm.environment
        folder = Path(name)
        (folder / "cluster.yaml").write_text(TARGET)
        targets = cluster.load(folder / "cluster.yaml").targets
        target = targets["site"]
        job = planned(1)[0]
        start = time.perf_counter()
        for _ in range(SCRIPTS):
            script.render(job, target, folder)
        rate = SCRIPTS / (time.perf_counter() - start)
        ratios = {name: submitting(name, targets[name], folder) for name in TARGETS}
        seconds, calls = looking(target, folder)
    medians = {name: statistics.median(each) for name, each in ratios.items()}
    holds = rate >= 1000 and max(medians.values()) <= MOST_RATIO and seconds < 1 and calls <= 2
    figures = {
        "scripts_per_second": round(rate),
        "submit_ratio": {name: round(ratio, 2) for name, ratio in medians.items()},
        "submit_ratios": {name: [round(one, 2) for one in sorted(each)] for name, each in ratios.items()},
        "status_seconds": round(seconds, 3),
        "status_runs": RUNS,
        "status_slurm_calls": calls,
        "holds": holds,
    }
    print(json.dumps(figures))
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
