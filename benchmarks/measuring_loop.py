"""The overhead of the measuring loop: its step time over that of a bare hand-written loop, in one framework.

    .venv/jax/bin/python benchmarks/measuring_loop.py jax 1
    .venv/pytorch/bin/python benchmarks/measuring_loop.py pytorch 1

    .venv/jax/bin/python benchmarks/measuring_loop.py jax 1 probes

The number is the use case, 1 to 5; 2 and 4 use two processes with half of the cores each. Blocks of both loops
alternate in the order A B B A over the same model, batches and compiled step in one process, whose ratio is exp(20 %
trimmed mean of the pairs' log ratios): a shared machine hits one block of a pair now and then. Which loop is favoured
differs from process to process, however many pairs each takes, by a percent if two share the work; the reason is
unknown. So fresh processes are added until the 95 % interval of their mean is narrow enough. Its upper bound must be at
most 1.01 on a step of at least 5 ms. Exit code 1 if it is not.

With "probes", what happens between blocks counts, too: conditions are read and written, on blocks as long as those
that are measured. Then the bound is 1.02.
"""

import dataclasses
import functools
import importlib
import itertools
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# When to stop depends on how wide the interval is, not on where it lies.
FEWEST, MOST, HALF_WIDTH = 8, 40, 0.004  # processes
# Short blocks and many pairs: a shared machine disturbs for longer than a pair lasts.
BLOCK_SECONDS, PAIRS = 0.05, 200
PROBED_SECONDS, PROBED_PAIRS = 0.2, 100  # as in the presets
TRIMMED = 0.2  # share of the pairs, at either end
BENCHMARK, PRODUCT = "mnist", "clipped_sum"
BATCH_SIZES = {1: 96, 2: 128, 3: 64, 4: 64, 5: 512}  # for steps of somewhat more than 5 ms
BOUND, PROBED_BOUND = 1.01, 1.02

Loop = Callable[[int], float]


def bare_jax(work: Any, use_case: int) -> Loop:
    def run(steps: int) -> float:
        state, batches, program = work._state, work._batches, work._program
        start = time.perf_counter()
        for index in range(steps):
            batch = batches[index % len(batches)]
            if use_case in (1, 2):
                state, result = program(state, *batch)
            else:
                result = program(*state, batch[0]) if use_case == 5 else program(*state, *batch)
        result = result if hasattr(result, "block_until_ready") else next(iter(result.values()))["kernel"]
        result.block_until_ready()
        seconds = time.perf_counter() - start
        work._state = state
        return seconds

    return run


def bare_pytorch(work: Any, use_case: int) -> Loop:
    import torch
    from torch.func import functional_call, grad, vmap
    from torch.nn.functional import cross_entropy

    model, batches = work._model, work._batches

    def train(batch: Any) -> None:
        (images,), labels = batch
        work._optimizer.zero_grad(set_to_none=True)
        cross_entropy(model(images), labels).backward()
        work._optimizer.step()

    def train_many(batch: Any) -> None:
        (images,), labels, count = batch
        work._optimizer.zero_grad(set_to_none=True)
        (2 * cross_entropy(work._trained(images), labels, reduction="sum") / count).backward()
        work._optimizer.step()

    @torch.inference_mode()
    def infer(batch: Any) -> Any:
        return model(batch[0][0])

    def loss(parameters: Any, image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return cross_entropy(functional_call(model, parameters, (image[None],)), label[None])

    each_sample = vmap(grad(loss), (None, 0, 0))
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    @torch.no_grad()
    def clip(batch: Any) -> Any:
        (images,), labels = batch
        gradients = each_sample(parameters, images, labels)
        each_norm = [torch.linalg.vector_norm(gradient.flatten(1), dim=1) for gradient in gradients.values()]
        norms = torch.linalg.vector_norm(torch.stack(each_norm), dim=0)
        factors = (1 / norms).clamp(max=1)
        sums = [torch.tensordot(factors, gradient, 1) for gradient in gradients.values()]
        if use_case == 4:
            vector = torch.cat([array.flatten() for array in sums])
            torch.distributed.all_reduce(vector)
            parts = vector.split([array.numel() for array in sums])
            sums = [part.view_as(array) for part, array in zip(parts, sums, strict=True)]
        return sums

    one: Callable[[Any], Any] = {1: train, 2: train_many, 3: clip, 4: clip, 5: infer}[use_case]

    model.train(use_case != 5)

    def run(steps: int) -> float:
        start = time.perf_counter()
        for index in range(steps):
            result = one(batches[index % len(batches)])
        seconds = time.perf_counter() - start
        del result  # kept until here, as a user of it would
        return seconds

    return run


def measure(framework: str, use_case: int, world: Any, probes: bool) -> None:
    """Measure in one process; the first of those that work together prints the result as JSON."""
    from scipy.stats import trim_mean

    import devices
    import network
    import weights
    from duel.catalogue import BENCHMARKS, USE_CASES, Preset
    from duel.measure import batches, parameters, timing
    from duel.measure.device import Setting
    from duel.measure.sinks import MetricsWriter
    from duel.measure.watch import Watch

    device = devices.select("cpu", world)
    benchmark, case = BENCHMARKS[BENCHMARK], USE_CASES[use_case]
    benchmark = dataclasses.replace(benchmark, optimizer=benchmark.optimizer.at(BATCH_SIZES[use_case]))
    arrays = parameters.initialise(weights.shapes(network.build(benchmark, "full")), 0)
    options = {"product": PRODUCT, "microbatch": BATCH_SIZES[use_case] // world.size} if use_case in (3, 4) else {}
    with tempfile.TemporaryDirectory() as folder:
        pool = batches.pool(benchmark, "full", BATCH_SIZES[use_case], 0, Path(folder))
        kind = getattr(importlib.import_module(case.module), case.work)
        work = kind(Setting(benchmark, "full", "fp32", device, world, **options), pool, arrays)
        work.compile()
        emit = MetricsWriter(Path(folder) / "metrics.jsonl")
        bare = {"jax": bare_jax, "pytorch": bare_pytorch}[framework](work, use_case)
        bare(5)
        block_seconds, pairs = (PROBED_SECONDS, PROBED_PAIRS) if probes else (BLOCK_SECONDS, PAIRS)
        steps = int(work.agree(math.ceil(block_seconds / (bare(50) / 50))))
        watch = Watch(device, world)
        one_block = Preset("", "", 1, 1, iterations=steps, blocks=1)

        def harness() -> float:
            start = time.perf_counter()
            block, handle = next(timing.time_blocks(work, one_block, 0, steps))
            conditions = dataclasses.asdict(watch.block()) if probes else {}
            emit("block", row=0, step=block.steps, loss=work.loss(handle) if use_case in (1, 2) else 0.0, **conditions)
            return time.perf_counter() - start if probes else block.seconds

        loops = {"harness": harness, "bare": lambda: bare(steps)}
        seconds: dict[str, list[float]] = {name: [] for name in loops}
        for name in itertools.islice(itertools.cycle(("harness", "bare", "bare", "harness")), 2 * pairs):
            seconds[name].append(loops[name]())
    if world.size > 1:
        devices.leave()
    if world.rank == 0:
        logs = [math.log(a / b) for a, b in zip(seconds["harness"], seconds["bare"], strict=True)]
        found = {
            "log": float(trim_mean(logs, TRIMMED)),
            "step_ms": 1e3 * statistics.median(seconds["bare"]) / steps,
            "version": devices.versions()[{"jax": "jax", "pytorch": "torch"}[framework]],
            "device": device.name,
        }
        print(json.dumps(found))


def apart(ranks: int) -> dict[str, Any]:
    """Return what ``ranks`` fresh processes, working together, measure."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        meet = {"MEET": f"127.0.0.1:{server.getsockname()[1]}"}
    begin = functools.partial(subprocess.Popen, [sys.executable, *sys.argv], stdout=subprocess.PIPE, text=True)
    processes = [begin(env=os.environ | meet | {"RANK": str(rank)}) for rank in range(ranks)]
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        sys.exit(f"measuring processes exited with {[process.returncode for process in processes]}")
    found: dict[str, Any] = json.loads(outputs[0].splitlines()[-1])
    print(f"{math.exp(found['log']):.4f}", end=" ", file=sys.stderr, flush=True)
    return found


def start(framework: str, use_case: int, probes: bool) -> int:
    sys.path.insert(0, str(ROOT / framework))
    sys.path.append(str(ROOT))
    from duel.measure import ranks
    from duel.measure.device import ALONE, World
    from duel.report.ratios import estimate

    together = 2 if use_case in (2, 4) else 1
    if address := os.environ.get("MEET"):
        rank = int(os.environ["RANK"])
        if together > 1 and (cpus := ranks.shares(together)[rank]):
            os.sched_setaffinity(0, cpus)
        measure(framework, use_case, World(rank, together, rank, address) if together > 1 else ALONE, probes)
        sys.stdout.flush()
        os._exit(0)  # as Duel's own processes do: collectives' threads may crash the interpreter at shutdown
    found = [apart(together) for _ in range(FEWEST)]
    while (ratio := estimate([each["log"] for each in found])).high > ratio.low * (1 + 2 * HALF_WIDTH):
        if ratio.n == MOST:
            break
        found.append(apart(together))
    print(file=sys.stderr)
    step_ms = statistics.median(each["step_ms"] for each in found)
    bound = PROBED_BOUND if probes else BOUND
    result = {
        "framework": framework,
        "use_case": use_case,
        "version": found[0]["version"],
        "device": found[0]["device"],
        "step_ms": round(step_ms, 2),
        "processes": ratio.n,
        "pairs_of_each": PROBED_PAIRS if probes else PAIRS,
        "ratio": round(ratio.ratio, 4),
        "interval": [round(ratio.low, 4), round(ratio.high, 4)],
        "bound": bound,
        "holds": ratio.high <= bound and step_ms >= 5,
    }
    print(json.dumps(result))
    return 0 if result["holds"] else 1


if __name__ == "__main__":
    arguments = sys.argv[1:]
    valid = (("jax", "pytorch"), ("1", "2", "3", "4", "5"), ("probes",))
    if len(arguments) not in (2, 3) or not all(one in choice for one, choice in zip(arguments, valid, strict=False)):
        sys.exit("usage: measuring_loop.py jax|pytorch 1|2|3|4|5 [probes], with that framework's interpreter")
    sys.exit(start(arguments[0], int(arguments[1]), len(arguments) == 3))
