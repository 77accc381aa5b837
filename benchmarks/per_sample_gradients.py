"""Per-sample gradients of the twins against what is commonly used, on the two CNNs of that literature.

    .venv/jax/bin/python benchmarks/per_sample_gradients.py jax
    make opacus && .venv/pytorch/bin/python benchmarks/per_sample_gradients.py pytorch

JAX: each product against plain ``jit(vmap(grad))`` and the same reduction. PyTorch: the faster of its own modes against
the fastest of Opacus's ways to the product (hooks, functorch, expanded weights, ghost clipping). All are warmed
up; blocks alternate in the order A B B A in one process. The ratio is exp(mean log ratio of the pairs) with its 95 % t
interval within this process, from as many pairs as make that narrow enough; its upper bound must be at most 1.05. Exit
code 1 if not.
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
BENCHMARKS = ("mnist", "cifar10")
BATCH_SIZE = 32
# As many pairs as this half width needs: when to stop depends on how wide the interval is, not on where it lies.
BLOCK_SECONDS, FEWEST_PAIRS, MOST_PAIRS, HALF_WIDTH = 0.3, 60, 1000, 0.02
BOUND = 1.05

Loop = Callable[[int], float]


def stepping(work: Any) -> Loop:
    """Return a loop that times steps of a twin."""

    def run(steps: int) -> float:
        start = time.perf_counter()
        for index in range(steps):
            handle = work.step(index)
        work.synchronize(handle)
        return time.perf_counter() - start

    return run


def jax_baselines(work: Any, product: str) -> dict[str, Loop]:
    """Return ``jit(vmap(grad))`` as one would write it, with the twin's own loss."""
    import jax
    import jax.numpy as jnp

    parameters, statistics_, batches = *work._state, work._batches

    def loss(parameters: Any, inputs: Any, label: Any) -> Any:
        logits, _ = work._forward(parameters, statistics_, tuple(x[None] for x in inputs), train=True)
        return work._loss(logits, label[None])

    def plain(parameters: Any, inputs: Any, labels: Any) -> Any:
        gradients = jax.vmap(jax.grad(loss), (None, 0, 0))(parameters, inputs, labels)
        if product == "materialised":
            return gradients
        rows = [leaf.reshape(len(labels), -1) for leaf in jax.tree.leaves(gradients)]
        norms = jnp.sqrt(sum((row * row).sum(1) for row in rows))
        if product == "norms":
            return norms
        factors = jnp.minimum(1, 1 / norms)
        return jax.tree.map(lambda leaf: jnp.einsum("n,n...->...", factors, leaf), gradients)

    jitted = jax.jit(plain)

    def run(steps: int) -> float:
        start = time.perf_counter()
        for index in range(steps):
            result = jitted(parameters, *batches[index % len(batches)])
        jax.block_until_ready(result)
        return time.perf_counter() - start

    return {"jit(vmap(grad))": run}


def _plain(module: Any, product: str) -> Callable[[Any], None]:
    """Return Opacus's ordinary way: per-sample gradients, their norms, the sum of the clipped ones."""
    import torch
    from torch.nn.functional import cross_entropy

    def one(batch: Any) -> None:
        (images,), labels = batch
        module.zero_grad(set_to_none=True)
        for parameter in module.parameters():
            parameter.grad_sample = None
        cross_entropy(module(images), labels, reduction="sum").backward()
        if product == "materialised":
            return
        samples = [parameter.grad_sample for parameter in module.parameters()]
        norms = torch.stack([each.reshape(len(each), -1).norm(2, dim=-1) for each in samples], dim=1).norm(2, dim=1)
        if product == "clipped_sum":
            factors = (1 / (norms + 1e-6)).clamp(max=1)
            for each in samples:
                torch.einsum("i,i...", factors, each)

    return one


def _ghost(module: Any, product: str) -> Callable[[Any], None]:
    """Return ghost clipping: norms alone; the clipped sum by a second backward pass of the reweighted loss."""
    from torch.nn.functional import cross_entropy

    def one(batch: Any) -> None:
        (images,), labels = batch
        module.zero_grad(set_to_none=True)
        losses = cross_entropy(module(images), labels, reduction="none")
        losses.sum().backward(retain_graph=product == "clipped_sum")
        factors = module.get_clipping_coef()
        if product == "clipped_sum":
            module.zero_grad(set_to_none=True)
            module.disable_hooks()
            (factors * losses).sum().backward()
            module.enable_hooks()

    return one


def opacus_baselines(work: Any, product: str) -> dict[str, Loop]:
    """Return Opacus's ways to the product."""
    import copy

    from opacus import GradSampleModule
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.grad_sample.gsm_exp_weights import GradSampleModuleExpandedWeights

    ways: dict[str, Callable[[Any], None]] = {}
    for name, build in {
        "hooks": lambda model: _plain(GradSampleModule(model, loss_reduction="sum"), product),
        "functorch": lambda model: _plain(GradSampleModule(model, loss_reduction="sum", force_functorch=True), product),
        "expanded weights": lambda model: _plain(GradSampleModuleExpandedWeights(model, loss_reduction="sum"), product),
        "ghost": lambda model: _ghost(GradSampleModuleFastGradientClipping(model, loss_reduction="sum"), product),
    }.items():
        if name == "ghost" and product == "materialised":
            continue  # ghost clipping avoids exactly that
        ways[name] = build(copy.deepcopy(work._model).train())

    def loop(way: Callable[[Any], None]) -> Loop:
        def run(steps: int) -> float:
            start = time.perf_counter()
            for index in range(steps):
                way(work._batches[index % len(work._batches)])
            return time.perf_counter() - start

        return run

    return {f"opacus {name}": loop(way) for name, way in ways.items()}


def main(framework: str) -> int:
    sys.path.insert(0, str(ROOT / framework))
    sys.path.append(str(ROOT))
    from scipy import stats

    import devices
    import network
    import per_sample_gradients
    import weights
    from duel.catalogue import BENCHMARKS as CATALOGUE
    from duel.catalogue import PRODUCTS
    from duel.measure import batches, parameters
    from duel.measure.device import Setting

    device = devices.select("cpu")
    holds = True
    for name, product in itertools.product(BENCHMARKS, PRODUCTS):
        benchmark = CATALOGUE[name]
        arrays = parameters.initialise(weights.shapes(network.build(benchmark, "full", True)), 0)
        with tempfile.TemporaryDirectory() as folder:
            pool = batches.pool(benchmark, "full", BATCH_SIZE, 0, Path(folder))
        ours: dict[str, Loop] = {}
        ways = {"default": {}, "compile": {"compile": "on"}}
        for mode in ways if framework == "pytorch" else ("default",):
            options = {"switches": ways[mode], "product": product, "microbatch": BATCH_SIZE}
            work = per_sample_gradients.PerSampleGradients(
                Setting(benchmark, "full", "fp32", device, **options), pool, arrays
            )
            work.compile()
            ours[mode] = stepping(work)
        others = (jax_baselines if framework == "jax" else opacus_baselines)(work, product)
        seconds = {way: _step_seconds(loop) for way, loop in (ours | others).items()}
        mine, best = min(ours, key=seconds.__getitem__), min(others, key=seconds.__getitem__)
        steps = max(1, math.ceil(BLOCK_SECONDS / max(seconds[mine], seconds[best])))
        order = itertools.cycle(((0, ours[mine]), (1, others[best]), (1, others[best]), (0, ours[mine])))
        taken: tuple[list[float], list[float]] = ([], [])
        half = math.inf
        while half > HALF_WIDTH and len(taken[0]) < MOST_PAIRS:
            for side, loop in itertools.islice(order, 2 * FEWEST_PAIRS):
                taken[side].append(loop(steps))
            logs = [math.log(a / b) for a, b in zip(*taken, strict=True)]
            half = float(stats.t.ppf(0.975, len(logs) - 1)) * statistics.stdev(logs) / math.sqrt(len(logs))
        mean = statistics.fmean(logs)
        holds &= math.exp(mean + half) <= BOUND
        result = {
            "framework": framework,
            "benchmark": name,
            "product": product,
            "ours": mine,
            "other": best,
            "pairs": len(logs),
            "step_ms": {way: round(1e3 * each, 2) for way, each in seconds.items()},
            "ratio": round(math.exp(mean), 3),
            "interval": [round(math.exp(mean - half), 3), round(math.exp(mean + half), 3)],
            "bound": BOUND,
        }
        print(json.dumps(result), flush=True)
    return 0 if holds else 1


def _step_seconds(loop: Loop) -> float:
    """Return the median seconds of a step in five short blocks, after a warm-up."""
    loop(3)
    steps = max(1, math.ceil(BLOCK_SECONDS / (loop(3) / 3)))
    return statistics.median(loop(steps) / steps for _ in range(5))


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in ("jax", "pytorch"):
        sys.exit("usage: per_sample_gradients.py jax|pytorch, with that framework's interpreter")
    sys.exit(main(sys.argv[1]))
