"""How fast the driver responds, as a ratio to Python's own start in the same run.

    .venv/driver/bin/python benchmarks/driver.py

Commands alternate; each figure is a median. 'main.py --help' must stay within 6 x 'python -c pass', and
--dry_run within 0.4 s. Exit code 1 if one does not.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROUNDS = 21
COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "main.py --help": ["main.py", "--help"],
    "main.py --dry_run": ["main.py", "--benchmark", "resnet50", "--use_case", "1", "--dry_run"],
}


def main() -> int:
    # If an environment forbids bytecode, every start compiles all its imports except Python's own modules.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(ROUNDS):
        for name, argv in COMMANDS.items():
            start = time.perf_counter()
            subprocess.run([sys.executable, *argv], cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
            seconds[name].append(time.perf_counter() - start)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    ratio = median["main.py --help"] / median["python -c pass"]
    holds = ratio <= 6 and median["main.py --dry_run"] <= 0.4
    rounded = {name: round(value, 4) for name, value in median.items()}
    print(json.dumps({"rounds": ROUNDS, "median_seconds": rounded, "help_ratio": round(ratio, 2), "holds": holds}))
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
