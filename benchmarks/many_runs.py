"""What 10,000 settled runs cost the commands that look at one new one.

    .venv/driver/bin/python benchmarks/many_runs.py

Each command follows a new run, and is the median of some. 'status' and 'collect' must take less than 0.5 s and 100 MB.
Beside them: the start of Python, and a 'collect' that reads all runs, as without the index. Exit code 1 if one is
slower or larger. A new run has evidence files like those of a training of 60 tensors, which 'collect' reads.

'collect' copies what is settled into a new table, 226 MB here, so nearly half of its time is the system's. On two
cores it took 0.39 to 0.42 s in five runs, also at once after one that had deleted its 10,000 folders; on two slower
ones 0.464 and 0.481 s, and 0.530 s after such a run, which does not hold; on two others 0.565, which does not hold
either, and 0.455 s. 'status' took 0.14 to 0.20 s (all on 2026-11-30).
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parent.parent))

from duel import ROOT
from duel.evidence import BUCKETS, Evidence, sha256
from duel.files import stamp, utc
from duel.record import Row
from duel.results import Results, Run
from duel.states import FINISHED
from duel.table import read_rows

RUNS, ROWS, ROUNDS = 10_000, 8, 7
BOUNDS = {"seconds": 0.5, "megabytes": 100}


def recorded() -> bytes:
    """Return what a training of 60 tensors leaves as evidence."""
    tensors = {f"{kind}/{n}": np.arange(1.0, 2.0 + BUCKETS) for kind in ("moments", "change") for n in range(60)}
    passes = {name: tensors for when in ("before", "after") for name in (when, f"{when}, moved 1")}
    return Evidence("fp32", passes, dict.fromkeys(tensors, (64, 64, 3, 3))).to_bytes()


def settled(results: Results, models: list[Row], evidence: bytes = b"") -> None:
    """Make one run that has ended, with the rows ``models``, and ``evidence`` for each if there is any."""
    name = stamp()
    run = results.run(f"paired_mnist_1-{name}")
    run.create(models)
    if evidence:
        run.evidence_file(0, 0).parent.mkdir()
        models = [model.replace(evidence_sha256=sha256([evidence])) for model in models]
    for number, model in enumerate(models):
        if evidence:
            run.evidence_file(number, 0).write_bytes(evidence)
        # Not atomically, which would take minutes for all of them: nobody reads them yet.
        row = model.replace(run_id=run.id, row=number, group=f"mnist_1-{name}", status=FINISHED)
        run.row_file(number).write_text(row.to_json())
    Run(run.folder).write_status(state=FINISHED, ended=utc())


def measured(command: list[str], folder: Path) -> tuple[float, float]:
    """Return the seconds that a command takes, and its peak memory in MB."""
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, *command], cwd=folder, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    if status:
        raise RuntimeError(f"{command} failed")
    return seconds, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6


def main() -> int:
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # with it, each command would compile its modules anew
    models = read_rows(next(iter(sorted((ROOT / "results" / "published").glob("*/results.csv")))))[:ROWS]
    evidence = recorded()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(ROOT / "duel", folder / "duel", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "main.py", folder)
        results = Results(folder / "results")
        for _ in range(RUNS):
            settled(results, models)
        whole = measured(["main.py", "collect"], folder)
        found: dict[str, list[tuple[float, float]]] = {}
        for _ in range(ROUNDS):
            found.setdefault("python -c pass", []).append(measured(["-c", "pass"], folder))
            for command in ("status", "collect"):
                settled(results, models, evidence)
                os.sync()  # jobs end minutes apart, so what was written before is on the disk
                found.setdefault(command, []).append(measured(["main.py", command], folder))
    figures = {
        name: {
            "seconds": round(statistics.median(seconds for seconds, _ in each), 3),
            "megabytes": round(max(megabytes for _, megabytes in each)),
        }
        for name, each in found.items()
    }
    holds = all(figures[name][kind] < most for name in ("status", "collect") for kind, most in BOUNDS.items())
    first = {"seconds": round(whole[0], 1), "megabytes": round(whole[1])}
    print(json.dumps({"runs": RUNS, "rows": RUNS * ROWS, "first collect": first} | figures | {"holds": holds}))
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
