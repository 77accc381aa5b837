"""What the measuring loop itself costs: its step time over that of a bare hand-written loop, in one framework.

    .venv/jax/bin/python benchmarks/measuring_loop.py jax
    .venv/pytorch/bin/python benchmarks/measuring_loop.py pytorch

Blocks of both loops alternate in the order A B B A over the same model, batches and compiled step in one process. The
ratio is exp(mean log ratio of the pairs) with its 95 % t interval; the upper bound must be at most 1.01 on a step of at
least 5 ms. Exit code 1 if it is not.
"""

import itertools
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAIRS = 2000  # short blocks and many pairs: a shared machine disturbs for longer than a pair lasts
BLOCK_SECONDS = 0.05
BATCH_SIZE = 64
BOUND = 1.01


def bare_jax(training: Any) -> Callable[[int], float]:
    def run(steps: int) -> float:
        state, batches, train = training._state, training._batches, training._program
        start = time.perf_counter()
        for index in range(steps):
            state, loss = train(state, *batches[index % len(batches)])
        loss.block_until_ready()
        seconds = time.perf_counter() - start
        training._state = state
        return seconds

    return run


def bare_pytorch(training: Any) -> Callable[[int], float]:
    from torch.nn.functional import cross_entropy

    model, optimizer, batches = training._model, training._optimizer, training._batches

    def run(steps: int) -> float:
        start = time.perf_counter()
        for index in range(steps):
            (images,), labels = batches[index % len(batches)]
            optimizer.zero_grad(set_to_none=True)
            cross_entropy(model(images), labels).backward()
            optimizer.step()
        return time.perf_counter() - start

    return run


def main(framework: str) -> int:
    sys.path.insert(0, str(ROOT / framework))
    sys.path.append(str(ROOT))
    from scipy import stats

    import devices
    import network
    import training as twin
    import weights
    from duel.catalogue import BENCHMARKS, Preset
    from duel.measure import batches, parameters, timing
    from duel.measure.sinks import MetricsWriter

    device = devices.select("cpu")
    benchmark = BENCHMARKS["mnist"]
    arrays = parameters.initialise(weights.shapes(network.build(benchmark, "full")), 0)
    with tempfile.TemporaryDirectory() as folder:
        pool = batches.pool(benchmark, "full", BATCH_SIZE, 0, Path(folder))
        training = twin.Training(benchmark, "full", pool, arrays, "fp32", device)
        training.compile()
        emit = MetricsWriter(Path(folder) / "metrics.jsonl")
        bare = {"jax": bare_jax, "pytorch": bare_pytorch}[framework](training)
        steps = math.ceil(BLOCK_SECONDS / (bare(50) / 50))
        one_block = Preset("", "", "full", 0, 0.0, steps, 1, 0.0, 1.0, 1)

        def harness() -> float:
            ((block, loss),) = timing.time_blocks(training, one_block, 0, steps)
            emit("block", row=0, step=block.steps, loss=training.loss(loss))
            return block.seconds

        loops = {"harness": harness, "bare": lambda: bare(steps)}
        order = itertools.cycle(("harness", "bare", "bare", "harness"))
        seconds: dict[str, list[float]] = {name: [] for name in loops}
        for name in itertools.islice(order, 2 * PAIRS):
            seconds[name].append(loops[name]())
    logs = [math.log(a / b) for a, b in zip(seconds["harness"], seconds["bare"], strict=True)]
    mean = statistics.fmean(logs)
    half = float(stats.t.ppf(0.975, PAIRS - 1)) * statistics.stdev(logs) / math.sqrt(PAIRS)
    step_ms = 1e3 * statistics.median(seconds["bare"]) / steps
    upper = math.exp(mean + half)
    result = {
        "framework": framework,
        "version": devices.versions()[{"jax": "jax", "pytorch": "torch"}[framework]],
        "device": device.name,
        "step_ms": round(step_ms, 2),
        "pairs": PAIRS,
        "steps_per_block": steps,
        "ratio": round(math.exp(mean), 4),
        "interval": [round(math.exp(mean - half), 4), round(upper, 4)],
        "bound": BOUND,
        "holds": upper <= BOUND and step_ms >= 5,
    }
    print(json.dumps(result))
    return 0 if result["holds"] else 1


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in ("jax", "pytorch"):
        sys.exit("usage: measuring_loop.py jax|pytorch, with that framework's interpreter")
    sys.exit(main(sys.argv[1]))
