"""How fast the twins are against public models and against their own other modes, as ratios within one run.

    PYTHONPATH=DIR .venv/pytorch/bin/python benchmarks/twins.py pytorch
    .venv/jax/bin/python benchmarks/twins.py jax --others DIR --benchmark resnet50

At full size, in float32, with the catalogue's batch sizes for a CPU and its optimizers: a training step, and inference
at the next smaller batch size that Duel measures.
The twin in ``tuned`` (what results/tuned has for the device, else the set for its kind) takes turns with

- itself in ``default``, and in each mode that differs in one switch: none of our own modes may be faster;
- public models (peers_pytorch.py and peers_jax.py say where they are from), each in the modes ``default`` and
  ``tuned`` in PyTorch, compiled in JAX. Those in PyTorch run in the twin's own loop, whose overhead measuring_loop.py
  shows; those in JAX in a separate one.

All in one process, which keeps the memory that it frees, in huge pages (the switch keep_memory): otherwise what runs
later would find pages mapped that what runs earlier must map, and a search, with a process for each mode, would come to
other results.

Each alternates with the twin in blocks, back and forth, one after the other. The ratio is exp(mean log ratio of the
rounds) with its 95 % t interval; above 1 the twin is slower, and the upper bound must be at most 1.05. Those that an
interval does not decide go on for up to ten times as long: with so many looks, an interval that just meets the bound
covers less than 95 %. What cannot run with the installed packages is listed with the reason. Exit code 1 if a bound is
exceeded, or something did not run. With ``--keep`` the lines join those of the same point, mode, version and code in
twins.csv, so that no run is chosen over another, and replace those of that point and device in another mode, version
or code. Another device's lines stay. docs/models.md shows what is nearest the bound at each point and device, from
three runs on by an interval over the runs.
"""

import argparse
import csv
import functools
import gc
import importlib
import importlib.metadata
import math
import operator
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
RECORDS = Path(__file__).with_suffix(".csv")
WORKS = {"inference": 5, "training": 1}
BLOCK_SECONDS = 0.1
FEWEST = 6  # rounds
LONGER = 10  # times the seconds, for what is not decided
BOUND = 1.05
KEPT = "+keep_memory"
POINT = ("framework", "benchmark", "work", "device")
SAME = ("batch", "mode", "version", "code_sha256")  # of the runs that the records keep of a point

Loop = Callable[[int], float]  # seconds for a number of steps
Build = Callable[[], Loop]
Times = tuple[list[float], list[float]]  # seconds of a step in each block: the twin's and the other's


class Point:
    """A benchmark and a kind of work on this device, with its batches and everything the twin's loop needs."""

    def __init__(self, framework: str, name: str, work: str) -> None:
        from duel.catalogue import BENCHMARKS, INFERENCE, PRESETS, USE_CASES
        from duel.measure import batches, search
        from duel.record import Row

        self.devices, self.network, self.weights = map(importlib.import_module, ("devices", "network", "weights"))
        self.use_case = USE_CASES[WORKS[work]]
        benchmark = BENCHMARKS[name]
        samples = benchmark.sizes["full"].batch_size["cpu"]
        if self.use_case.number == INFERENCE:  # the next smaller one that Duel measures, and results/tuned has
            samples = max(size for size in PRESETS["standard"].batch_sizes if size <= samples)
        self.benchmark = replace(benchmark, optimizer=benchmark.optimizer.at(samples))
        with tempfile.TemporaryDirectory() as folder:
            self.pool = batches.pool(benchmark, "full", samples, 0, Path(folder))
        self.device = self.devices.select("cpu")
        self.row = Row(
            framework=framework,
            benchmark=name,
            use_case=self.use_case.number,
            size="full",
            precision="fp32",
            device_kind="cpu",
            device_name=self.device.name,
            batch_size=samples,
            device_count=1,
        )
        self.neighbours = search.neighbours

    @property
    def tuned(self) -> str:
        """The mode that ``tuned`` stands for."""
        from duel import tuned

        found = (tuned.found_for(self.row, ROOT / "results")[0] or "tuned").replace(KEPT, "")
        # PyTorch's attention is set for the whole process, in which others are timed, too.
        return "tuned" if self.row.framework == "pytorch" and "attention" in found else found

    def switches(self, mode: str) -> dict[str, str]:
        """Return every switch with its value under ``mode``."""
        from duel import modes

        framework = str(self.row.framework)
        return modes.settings(mode, framework, self.benchmark.name, self.use_case.number, "fp32", "cpu")

    def loop(self, mode: str, model: Any = None) -> Loop:
        """Return the twin's loop over the twin, or over ``model``, which has the same inputs and outputs."""
        from duel.measure import parameters
        from duel.measure.device import Setting

        setting = Setting(self.benchmark, "full", "fp32", self.device, switches=self.switches(mode))
        kind = getattr(importlib.import_module(self.use_case.module), self.use_case.work)
        if model is None:
            arrays = parameters.initialise(self.weights.shapes(self.network.build(self.benchmark, "full")), 0)
            work = kind(setting, self.pool, arrays)
        else:
            with mock.patch.object(self.network, "build", return_value=model):
                work = kind(setting, self.pool, self.weights.export(model))
        work.compile()

        def run(steps: int) -> float:
            start = time.perf_counter()
            for index in range(steps):
                handle = work.step(index)
            work.synchronize(handle)
            return time.perf_counter() - start

        for _ in range(3):  # compiled by its first steps
            run(1)
        return run

    def check_size(self, found: int) -> None:
        """Raise ValueError if a network of ``found`` parameters is not that of the twin."""
        from duel.measure import parameters

        shapes = self.weights.shapes(self.network.build(self.benchmark, "full"))
        expected = sum(map(math.prod, parameters.trainable(shapes).values()))
        if found != expected:
            raise ValueError(f"a different network: {found} parameters, the twin has {expected}")


def others(point: Point, folder: Path, public_alone: bool) -> Iterator[tuple[str, Build]]:
    """Yield the names of all that the twin is compared with, each with what builds its loop."""
    from duel.modes import DEFAULT

    modes = [] if public_alone else list(dict.fromkeys((DEFAULT, *point.neighbours(point.tuned, point.row))))
    modes = [mode for mode in modes if KEPT not in mode]
    if point.row.framework == "pytorch":  # see Point.tuned
        modes = [mode for mode in modes if "attention" not in mode]
    for mode in modes:
        yield f"twin, {mode}", functools.partial(point.loop, mode)
    yield from _public_in_pytorch(point) if point.row.framework == "pytorch" else _public_in_jax(point, folder)


def _public_in_pytorch(point: Point) -> Iterator[tuple[str, Build]]:
    from peers_pytorch import PEERS

    common = re.sub(r"\+aggregation=\w+", "", point.tuned)  # how the twin's own modules add over edges
    modes: dict[frozenset[tuple[str, str]], str] = {}
    for mode in ("default", common, "tuned"):
        modes.setdefault(frozenset(point.switches(mode).items()), mode)
    for name, build in PEERS.get(point.benchmark.name, {}).items():
        for mode in modes.values():
            yield f"{name}, {mode}", functools.partial(_pytorch_loop, point, mode, build)


def _pytorch_loop(point: Point, mode: str, build: Callable[[dict[str, Any]], Any]) -> Loop:
    model = build(dict(point.benchmark.sizes["full"].model))
    point.check_size(sum(parameter.numel() for parameter in model.parameters()))
    return point.loop(mode, model)


def _public_in_jax(point: Point, folder: Path) -> Iterator[tuple[str, Build]]:
    from peers_jax import PEERS

    for name, build in PEERS.get(point.benchmark.name, {}).items():
        yield name, functools.partial(_jax_loop, point, functools.partial(build, folder))


def _jax_loop(point: Point, build: Callable[[], Any]) -> Loop:
    """Return a loop over a public model, compiled like the twin: training with its loss and optimizer, or inference."""
    import jax
    import peers_jax

    def put(array: Any) -> jax.Array:
        return jax.numpy.asarray(array.transpose(0, 2, 3, 1) if array.ndim == 4 else array)  # images: channels last

    public = build()
    point.check_size(sum(leaf.size for leaf in jax.tree.leaves(public.parameters)))
    batches = [(tuple(map(put, batch.inputs)), put(batch.labels)) for batch in point.pool.batches]
    step = getattr(peers_jax, point.use_case.module)(point.benchmark, public, batches)

    def run(steps: int) -> float:
        start = time.perf_counter()
        for index in range(steps):
            result = step(*batches[index % len(batches)])
        result.block_until_ready()
        return time.perf_counter() - start

    return run


def beside(twin: Loop, build: Build, seconds: float) -> Times | str:
    """Return the seconds of a step of the twin and of what ``build`` builds, or a sentence saying why it does not run.

    They take turns, back and forth, in blocks of ``BLOCK_SECONDS`` or one step, for ``seconds`` each, then until the
    interval shows on which side of the bound they are, or for ``LONGER`` times as long. What is built lives no longer
    than this call: JAX's programs for training gpt2 need more than 23 GiB when all are there at once.
    """
    gc.collect()  # of the one before, whose parts refer to each other
    try:
        loops = twin, build()
        steps = [max(1, math.ceil(BLOCK_SECONDS / (loop(2) / 2))) for loop in loops]
    except Exception as error:  # theirs or of our loop over it: it is reported, and the exit code is 1
        return f"does not run: {type(error).__name__}: {error}"
    times: Times = ([], [])
    while True:
        for side in (0, 1, 1, 0):
            times[side].append(loops[side](steps[side]) / steps[side])
        spent = sum(times[0]) * steps[0]
        if len(times[0]) < FEWEST or spent < seconds:
            continue
        low, _, high = interval(times)
        if high <= BOUND or low > BOUND or spent >= LONGER * seconds:
            return times


def interval(times: Times) -> tuple[float, float, float]:
    """Return the ratio of the rounds, between the ends of its 95 % interval within this process."""
    from scipy import stats

    logs = [math.log(twin / other) for twin, other in zip(*times, strict=True)]
    mean = statistics.fmean(logs)
    half = float(stats.t.ppf(0.975, len(logs) - 1)) * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean - half), math.exp(mean), math.exp(mean + half)


def told(times: Times) -> tuple[str, bool]:
    """Return how the two compare, and whether the bound holds."""
    low, ratio, high = interval(times)
    twin, other = (f"{1e3 * statistics.median(one):.2f}" for one in times)
    text = f"{other} ms, twin {twin}; ratio {ratio:.3f} [{low:.3f}, {high:.3f}], {len(times[0])} rounds"
    verdict = "ok" if high <= BOUND else "SLOW" if low > 1 else "not shown"
    return f"{text}: {verdict}", high <= BOUND


def keep(point: Point, work: str, found: dict[str, Times | str]) -> None:
    """Add this run's lines to the records; take out this device's of ``point`` in another mode or with other code."""
    from duel import certificate, files
    from duel.catalogue import FRAMEWORKS

    framework, name = str(point.row.framework), point.benchmark.name
    common = {
        "framework": framework,
        "benchmark": name,
        "work": work,
        "batch": str(point.row.batch_size),
        "mode": point.tuned,
        "milliseconds": "",
        "device": str(point.row.device_name),
        "measured": files.utc(),
        "version": importlib.metadata.version(FRAMEWORKS[framework]),
        "code_sha256": certificate.code_sha256(name, "full"),
    }
    lines = []
    for other, times in found.items():
        line = common | {"other": other} | dict.fromkeys(("low", "ratio", "high", "rounds", "reason"), "")
        if isinstance(times, str):
            line["reason"] = times
        else:
            line |= zip(("low", "ratio", "high"), (f"{end:.4f}" for end in interval(times)), strict=True)
            line |= {"milliseconds": f"{1e3 * statistics.median(times[0]):.3f}", "rounds": str(len(times[0]))}
        lines.append(line)
    key, same = operator.itemgetter(*POINT), operator.itemgetter(*SAME)
    with RECORDS.open("a+", newline="") as file:
        file.seek(0)
        lines += [line for line in csv.DictReader(file) if key(line) != key(common) or same(line) == same(common)]
        file.truncate(0)
        writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(lines, key=lambda line: (*key(line), line["measured"])))


def main(args: argparse.Namespace, names: list[str], works: list[str]) -> int:
    from duel.measure import device

    device.keep_memory()
    if not device.keeps_memory():
        print("memory is not kept: malloc here is not glibc's", flush=True)
    held = True
    for name in names:
        for work in works:
            if args.framework == "pytorch":  # after eight programs of one function it would compile no more
                importlib.import_module("torch").compiler.reset()
            point = Point(args.framework, name, work)
            print(f"{name}, {work}, batch {point.row.batch_size}: twin in {point.tuned}", flush=True)
            twin = point.loop(point.tuned)
            found: dict[str, Times | str] = {}
            for label, build in others(point, args.others, args.public_alone):
                times = found[label] = beside(twin, build, args.seconds)
                text, holds = (times, False) if isinstance(times, str) else told(times)
                print(f"    {label:55} {text}", flush=True)
                held = held and holds
            print(f"    {device.in_huge_pages():.0%} of the heap in huge pages", flush=True)
            if args.keep:
                keep(point, work, found)
    return 0 if held else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Compare the twins with public models and other modes.")
    parser.add_argument("framework", choices=("jax", "pytorch"), help="run it with this framework's interpreter")
    parser.add_argument(
        "--others", type=Path, default=Path(), metavar="DIR", help="jax: the folder with public models' checkouts"
    )
    parser.add_argument("--public_alone", action="store_true", help="skip the twin's other modes")
    parser.add_argument("--keep", action="store_true", help=f"keep what is found in {RECORDS.name}")
    parser.add_argument("--benchmark", nargs="+", help="only these")
    parser.add_argument("--work", choices=WORKS, help="only this one")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each participant; default: 10")
    arguments = parser.parse_args()
    sys.path[:0] = [str(ROOT / arguments.framework), str(ROOT)]
    from duel.catalogue import BENCHMARKS

    if arguments.keep and arguments.public_alone:
        parser.error("--keep needs all comparisons of a point; valid: without --public_alone")
    from duel.measure.device import keeping

    if "GLIBC_TUNABLES" not in os.environ:  # which is read when a process starts
        os.execve(sys.executable, sys.orig_argv, keeping(os.environ))
    wanted = [arguments.work] if arguments.work else list(WORKS)
    sys.exit(main(arguments, arguments.benchmark or list(BENCHMARKS), wanted))
