"""What each switch of one framework is worth on this machine: how many times as fast a step is with it as without it.

    .venv/jax/bin/python benchmarks/switches.py jax mobilenet_v3_small 1 tiny
    .venv/pytorch/bin/python benchmarks/switches.py pytorch mnist 5 full --batch_size 8

The number is the use case: 1, 3 or 5. Both variants are built in one process and take turns, in the order A B B A, in
blocks of a tenth of a second; the ratio of a process is the median of its pairs. Several fresh processes are run, and
the geometric mean of their ratios is printed with Student's 95 % interval. What ``tuned`` sets rests on this.
"""

import argparse
import importlib
import json
import math
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PROCESSES, PAIRS, BLOCK_SECONDS, WARM_SECONDS = 4, 20, 0.1, 1.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("framework", choices=("jax", "pytorch"))
    parser.add_argument("benchmark")
    parser.add_argument("use_case", type=int, choices=(1, 3, 5))
    parser.add_argument("size", choices=("tiny", "full"))
    parser.add_argument("--batch_size", type=int, help="default: the benchmark's on a CPU")
    parser.add_argument("--product", default="clipped_sum")
    parser.add_argument("--only", help="only this switch")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    sys.path[:0] = [str(ROOT / args.framework), str(ROOT)]
    if args.child:
        switch, value = args.child.split("=")
        print(measured(args, switch, value))
        return 0
    for switch, value in turned(args):
        command = [sys.executable, __file__, *sys.argv[1:], "--child", f"{switch}={value}"]
        ratios = []
        for _ in range(PROCESSES):
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            if done.returncode:
                print(f"{switch}={value} does not run here: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
                break
            ratios.append(float(done.stdout.split()[-1]))
        else:
            print(json.dumps({"switch": f"{switch}={value}"} | told(ratios)), flush=True)
    return 0


def turned(args: argparse.Namespace) -> list[tuple[str, str]]:
    """Return each switch that applies on this machine, with each value but the first."""
    from duel import switches
    from duel.measure.device import choose

    kind = choose(None, importlib.import_module("devices").available()).kind
    here = switches.applicable(args.framework, args.benchmark, args.use_case, kind).values()
    known = [switch for switch in here if switch.searched and args.only in (None, switch.name)]
    if args.framework == "pytorch":  # both sides of a ratio are in one process
        known = [switch for switch in known if switch.name not in ("attention", "cudnn_benchmark")]
    return [(switch.name, value) for switch in known for value in switch.values[1:]]


def measured(args: argparse.Namespace, switch: str, value: str) -> float:
    """Return the time of a step with the switch at its default over that with it at ``value``."""
    from duel.catalogue import BENCHMARKS, USE_CASES
    from duel.measure import batches, parameters
    from duel.measure.device import Setting

    devices, network, weights = (importlib.import_module(name) for name in ("devices", "network", "weights"))
    benchmark, use_case = BENCHMARKS[args.benchmark], USE_CASES[args.use_case]
    device = devices.select(None)
    batch_size = args.batch_size or benchmark.sizes[args.size].batch_size["cpu"]
    per_sample = use_case.module == "per_sample_gradients"
    arrays = parameters.initialise(weights.shapes(network.build(benchmark, args.size, per_sample)), 0)
    pool = batches.pool(benchmark, args.size, batch_size, 0, ROOT / "data")
    from duel.switches import SWITCHES

    (needs,) = (one.needs for one in SWITCHES if (one.framework, one.name) == (args.framework, switch))
    common = {needs: "on"} if needs else {}
    works = []
    for switches in (common, common | {switch: value}):
        setting = Setting(
            *(benchmark, args.size, "fp32", device),
            switches=switches,
            product=args.product if per_sample else "",
            microbatch=batch_size if per_sample else 0,
        )
        work = getattr(importlib.import_module(use_case.module), use_case.work)(setting, pool, arrays)
        work.compile()
        works.append(work)
    steps = max(1, math.ceil(BLOCK_SECONDS / min(warmed(work) for work in works)))
    logs = []
    for pair in range(PAIRS):
        seconds = {place: block(works[place], steps) for place in ((0, 1) if pair % 2 == 0 else (1, 0))}
        logs.append(math.log(seconds[0] / seconds[1]))
    return math.exp(statistics.median(logs))


def warmed(work: Any) -> float:
    """Return the seconds of the fastest step within the first second, after those that compile it."""
    for _ in range(3):
        block(work, 1)
    end, best = time.perf_counter() + WARM_SECONDS, math.inf
    while time.perf_counter() < end:
        best = min(best, block(work, 1))
    return best


def block(work: Any, steps: int) -> float:
    """Return the seconds of ``steps`` steps, the last of which is waited for."""
    start = time.perf_counter()
    for index in range(steps):
        handle = work.step(index)
    work.synchronize(handle)
    return time.perf_counter() - start


def told(ratios: list[float]) -> dict[str, Any]:
    logs = [math.log(ratio) for ratio in ratios]
    half = 3.182 * statistics.stdev(logs) / math.sqrt(len(logs))  # Student's t, three degrees of freedom
    mean = statistics.fmean(logs)
    bounds = [round(math.exp(mean + sign * half), 3) for sign in (-1, 1)]
    return {"times as fast": round(math.exp(mean), 3), "interval": bounds, "processes": len(ratios)}


if __name__ == "__main__":
    sys.exit(main())
