"""How fast the image models are beside public ones, as ratios of times in one run on the processor.

    .venv/pytorch/bin/python benchmarks/twins.py pytorch
    .venv/jax/bin/python benchmarks/twins.py jax --others DIR

At full size, in float32, with the catalogue's batch sizes and optimizers: an evaluation forward pass, and a training
step. The PyTorch side against torchvision's own constructors in a plain eager loop. The JAX side against public
implementations, none of whose code is here; DIR holds their checkouts:

- bonsai: github.com/jax-ml/bonsai at 36284254 (ResNet-50, ViT-B/16 and EfficientNet-B0; NNX)
- flax: github.com/google/flax at 18f8f311, examples/imagenet (ResNet-50; linen)
- vision_transformer: github.com/google-research/vision_transformer at c6de1e53 (ViT-B/16; linen)
- efficientnet-jax: github.com/rwightman/efficientnet-jax at 06d7ed6c (EfficientNet-B0 and MobileNetV3-Small; linen)

They run without dropout and stochastic depth, which the twins have not, and else as their authors wrote them: bonsai
and flax take the one-pass variance in batch norm, and both vision transformers the tanh approximation of GELU, where
the twins compute what PyTorch does.

Both sides are compiled ahead and warmed up; blocks alternate in the order A B B A. The ratio is exp(mean log ratio of
the pairs) with its 95 % t interval; above 1 the twin is slower, and the upper bound must be at most 1.05. One that
cannot run with the installed packages is named with the reason. Exit code 1 if a bound is exceeded, or one did not run.
"""

import argparse
import functools
import itertools
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from public_models import PUBLIC, Public

ROOT = Path(__file__).resolve().parent.parent
MODELS = ("resnet50", "vit_b16", "mobilenet_v3_small", "efficientnet_b0")
MODES = ("evaluation", "training")
BLOCK_SECONDS = 0.1
BOUND = 1.05

Loop = Callable[[int], float]  # seconds of so many steps


class Loops(NamedTuple):
    """One comparison: the twin's loop and the other's."""

    other: str
    mode: str
    twin: Loop
    public: Loop


def jax_loops(benchmark: Any, training: Any, twin: Any, modes: list[str], folder: Path) -> Iterator[Loops | str]:
    """A comparison for each public implementation and mode, or a sentence saying why there is none."""
    import jax
    import optax

    batches = training._batches
    # The twin's two loops as the harness runs them, apart from the clock.
    training.compile()
    parameters, statistics, _ = training._state
    evaluate = training._evaluate.trace(parameters, statistics, batches[0][0]).lower().compile()

    def twin_evaluation(steps: int) -> float:
        parameters, statistics, _ = training._state
        start = time.perf_counter()
        for index in range(steps):
            logits = evaluate(parameters, statistics, batches[index % len(batches)][0])
        logits.block_until_ready()
        return time.perf_counter() - start

    def twin_training(steps: int) -> float:
        return _stepping(training, steps)

    optimizer = twin._optimizer(benchmark.optimizer)
    twins = {"evaluation": twin_evaluation, "training": twin_training}
    publics = {"evaluation": _public_evaluation, "training": _public_training}
    for name, build in PUBLIC[benchmark.name].items():
        try:
            public = build(folder)
            for mode in modes:
                apply = functools.partial(public.apply, train=mode == "training")
                jax.eval_shape(apply, public.parameters, public.rest, batches[0][0][0])
        except Exception as error:  # what another's code raises when it is built or traced is why it cannot run
            yield f"{name} does not run here: {type(error).__name__}: {error}"
            continue
        loops = {mode: publics[mode](public, batches, optimizer, jax, optax) for mode in modes}
        ours, theirs = (sum(leaf.size for leaf in jax.tree.leaves(t)) for t in (parameters, public.parameters))
        assert ours == theirs, f"{name} is another network: {theirs} parameters, the twin has {ours}"
        for mode, loop in loops.items():
            yield Loops(name, mode, twins[mode], loop)


def _public_evaluation(public: Public, batches: Any, optimizer: Any, jax: Any, optax: Any) -> Loop:
    images = [inputs[0] for inputs, _ in batches]
    jitted = jax.jit(lambda parameters, rest, images: public.apply(parameters, rest, images, False)[0])
    forward = jitted.lower(public.parameters, public.rest, images[0]).compile()

    def run(steps: int) -> float:
        start = time.perf_counter()
        for index in range(steps):
            logits = forward(public.parameters, public.rest, images[index % len(images)])
        logits.block_until_ready()
        return time.perf_counter() - start

    return run


def _public_training(public: Public, batches: Any, optimizer: Any, jax: Any, optax: Any) -> Loop:
    def update(state: Any, images: Any, labels: Any) -> Any:
        parameters, rest, moments = state

        def mean_loss(parameters: Any) -> Any:
            logits, changed = public.apply(parameters, rest, images, True)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), changed

        (loss, changed), gradients = jax.value_and_grad(mean_loss, has_aux=True)(parameters)
        updates, moments = optimizer.update(gradients, moments, parameters)
        return (optax.apply_updates(parameters, updates), changed, moments), loss

    # copies: the first step gives its state away, which evaluation needs too
    state = jax.tree.map(jax.numpy.copy, (public.parameters, public.rest, optimizer.init(public.parameters)))
    (images,), labels = batches[0]
    step = jax.jit(update, donate_argnums=0).lower(state, images, labels).compile()

    def run(steps: int) -> float:
        nonlocal state
        start = time.perf_counter()
        for index in range(steps):
            (images,), labels = batches[index % len(batches)]
            state, loss = step(state, images, labels)
        loss.block_until_ready()
        return time.perf_counter() - start

    return run


def pytorch_loops(benchmark: Any, training: Any, twin: Any, modes: list[str]) -> Iterator[Loops | str]:
    """The comparison with torchvision for each mode."""
    import torch
    import torchvision
    from torch.nn.functional import cross_entropy

    without = {"mobilenet_v3_small": {"dropout": 0.0}, "efficientnet_b0": {"dropout": 0.0, "stochastic_depth_prob": 0}}
    constructor = getattr(torchvision.models, benchmark.torchvision)
    model = constructor(weights=None, **without.get(benchmark.name, {}))
    optimizer = twin._optimizer(benchmark.optimizer, model, fused=False)
    batches = training._batches

    def twin_evaluation(steps: int) -> float:
        start = time.perf_counter()
        for index in range(steps):
            training._evaluate(batches[index % len(batches)][0])
        return time.perf_counter() - start

    def twin_training(steps: int) -> float:
        return _stepping(training, steps)

    def public_evaluation(steps: int) -> float:
        model.eval()
        start = time.perf_counter()
        with torch.no_grad():
            for index in range(steps):
                (images,), _ = batches[index % len(batches)]
                model(images)
        return time.perf_counter() - start

    def public_training(steps: int) -> float:
        model.train()
        start = time.perf_counter()
        for index in range(steps):
            (images,), labels = batches[index % len(batches)]
            optimizer.zero_grad(set_to_none=True)
            cross_entropy(model(images), labels).backward()
            optimizer.step()
        return time.perf_counter() - start

    loops = {"evaluation": (twin_evaluation, public_evaluation), "training": (twin_training, public_training)}
    yield from (Loops("torchvision", mode, *loops[mode]) for mode in modes)


def _stepping(training: Any, steps: int) -> float:
    start = time.perf_counter()
    for index in range(steps):
        handle = training.step(index)
    training.synchronize(handle)
    return time.perf_counter() - start


def compare(loops: Loops, seconds: float) -> tuple[str, bool]:
    """The line that says how the two compare, and whether the bound holds."""
    from scipy import stats

    steps = math.ceil(BLOCK_SECONDS / min(loop(2) / 2 for loop in (loops.twin, loops.public)))
    for loop in (loops.twin, loops.public):
        loop(2 * steps)  # the warm-up
    times: dict[str, list[float]] = {"twin": [], "public": []}
    start = time.perf_counter()
    for first, second in itertools.cycle((("twin", "public"), ("public", "twin"))):
        for name in (first, second):
            times[name].append(getattr(loops, name)(steps) / steps)
        pairs = len(times["twin"])
        if pairs >= 6 and pairs % 2 == 0 and time.perf_counter() - start >= seconds:
            break
    logs = [math.log(a / b) for a, b in zip(times["twin"], times["public"], strict=True)]
    mean = statistics.fmean(logs)
    half = float(stats.t.ppf(0.975, pairs - 1)) * statistics.stdev(logs) / math.sqrt(pairs)
    low, ratio, high = (math.exp(mean + part) for part in (-half, 0, half))
    twin, public = (1e3 * statistics.median(times[name]) for name in ("twin", "public"))
    line = (
        f"{loops.mode:10} {loops.other:18} {twin:8.1f} ms, theirs {public:8.1f} ms; "
        f"ratio {ratio:.3f} [{low:.3f}, {high:.3f}], {pairs} pairs: {'ok' if high <= BOUND else 'SLOW'}"
    )
    return line, high <= BOUND


def main(framework: str, models: list[str], modes: list[str], others: Path | None, seconds: float) -> int:
    sys.path.insert(0, str(ROOT / framework))
    sys.path.append(str(ROOT))
    import devices
    import network
    import training as twin
    import weights
    from duel.catalogue import BENCHMARKS
    from duel.measure import batches, parameters
    from duel.measure.device import Setting

    device = devices.select("cpu")
    versions = ", ".join(f"{name} {version}" for name, version in devices.versions().items())
    print(f"{device.name}; {versions}", flush=True)
    verdicts: list[bool] = []
    for name in models:
        benchmark = BENCHMARKS[name]
        samples = benchmark.sizes["full"].batch_size["cpu"]
        benchmark = replace(benchmark, optimizer=benchmark.optimizer.at(samples))
        arrays = parameters.initialise(weights.shapes(network.build(benchmark, "full")), 0)
        with tempfile.TemporaryDirectory() as folder:
            pool = batches.pool(benchmark, "full", samples, 0, Path(folder))
        training = twin.Training(Setting(benchmark, "full", "fp32", device), pool, arrays)
        found = (
            jax_loops(benchmark, training, twin, modes, others)
            if others
            else pytorch_loops(benchmark, training, twin, modes)
        )
        for loops in found:
            line, holds = (loops, None) if isinstance(loops, str) else compare(loops, seconds)
            print(f"{name:18} batch {samples}, {line}", flush=True)
            verdicts.append(holds is True)  # what could not be compared holds nothing
    return 0 if verdicts and all(verdicts) else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="The image models beside public ones, in one framework.")
    parser.add_argument("framework", choices=("jax", "pytorch"), help="run it with this framework's interpreter")
    parser.add_argument("--others", type=Path, metavar="DIR", help="jax: the folder with the checkouts")
    parser.add_argument("--model", choices=MODELS, help="this one alone")
    parser.add_argument("--mode", choices=MODES, help="this one alone")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each comparison; default: 60")
    arguments = parser.parse_args()
    if (arguments.framework == "jax") != bool(arguments.others):
        parser.error("--others belongs to jax, which needs it")
    chosen = [arguments.model] if arguments.model else list(MODELS)
    wanted = [arguments.mode] if arguments.mode else list(MODES)
    sys.exit(main(arguments.framework, chosen, wanted, arguments.others, arguments.seconds))
