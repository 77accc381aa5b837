"""From the command line to jobs: benchmarks x use cases x frameworks, where the target supports them."""

import argparse
import dataclasses
from typing import Any

from duel import modes
from duel.catalogue import (
    CLAIM_PAIRS,
    DEVICE_KINDS,
    FIT,
    FRAMEWORKS,
    MANY,
    PAIRED,
    PER_SAMPLE,
    PER_SAMPLE_MANY,
    PRESETS,
    PRODUCTS,
    STRONG,
    TRAIN,
    TRAIN_MANY,
    USE_CASES,
)
from duel.errors import UserError
from duel.job import TRAINING, Job
from duel.launch.schema import Cluster, Target
from duel.options import MAX, SPACING, VARIANTS
from duel.recipes import recipe
from duel.results import Results
from duel.states import FINISHED
from duel.table import merge
from duel.terminal import Table, warn


def jobs(args: argparse.Namespace, cluster: Cluster, results: Results) -> list[Job]:
    """Return the jobs that ``args`` request (``duel.options`` and main.py's own options).

    Raises UserError for what the target cannot run.
    """
    name, target = cluster.target(args.target)
    frameworks = [args.framework] if args.framework else [PAIRED] if args.paired else []
    for framework in FRAMEWORKS if not frameworks else ():
        if getattr(target.python, framework) is None:
            warn(f"{framework}: left out, target {name!r} has no interpreter for it")
        else:
            frameworks.append(framework)
    if args.profile and (left := sorted(set(args.use_case) & set(MANY))):
        warn(f"use case {left[0]}: not profiled, --profile traces programs on one device")
    planned = []
    for benchmark in args.benchmark:
        weights = None
        if args.weights is not None:
            from duel.launch import pretrained

            size = args.size or PRESETS[args.preset].size
            weights = pretrained.resolve(args.weights, benchmark, size, name, target, results)
        for use_case in args.use_case:
            try:
                nodes, devices = _devices(args, name, target) if use_case in MANY else (1, 1)
            except UserError as error:
                if len(args.use_case) == 1:
                    raise
                warn(f"{benchmark}, use case {use_case}: left out, {error}")
                continue
            try:
                chosen = _modes(args, name, target, benchmark, use_case)
            except UserError as error:
                if len(args.benchmark) * len(args.use_case) == 1:
                    raise
                warn(f"{benchmark}, use case {use_case}: left out, {error}")
                continue
            options = _options(args, use_case)
            if MAX in args.batch_sizes:
                options |= _sizes(args, _largest(args, benchmark, use_case, name, frameworks, results), nodes * devices)
            usual = recipe(benchmark, args.dataset, None, None).batch_size if args.dataset else None
            _check_batches(options, nodes * devices, usual)
            planned += [
                Job(
                    *(framework, benchmark, use_case, args.preset, args.precision, args.device, name, nodes, devices),
                    weights=weights,
                    size=args.size,
                    trials=args.trials,
                    profile=args.profile and use_case not in MANY,
                    **options | {"mode": mode},
                )
                for mode in chosen
                for framework in frameworks
            ]
    planned = [job for session in range(args.sessions or 1) for job in _of_session(planned, session, args)]
    if not planned:
        raise UserError(f"nothing is left to run on target {name!r}")
    if args.sessions and PRESETS[args.preset].pairs < CLAIM_PAIRS:
        warn(f"--preset {args.preset} claims no ratio, in however many sessions")
    return planned


def _options(args: argparse.Namespace, use_case: int) -> dict[str, Any]:
    """Return those of the options that the jobs of ``use_case`` take."""
    options = {option: getattr(args, option) for option, use_cases in VARIANTS.items() if use_case in use_cases}
    return options | {option: getattr(args, option) for option in TRAINING}


def _sizes(args: argparse.Namespace, most: int, devices: int) -> dict[str, Any]:
    """Return the batch sizes asked for, with ``most`` on each of the ``devices`` for ``MAX``."""
    if args.dataset or args.scaling == STRONG:  # a batch size is that of all devices
        most *= devices
    return {"batch_sizes": tuple(most if size == MAX else size for size in args.batch_sizes)}


def _largest(
    args: argparse.Namespace, benchmark: str, use_case: int, target: str, frameworks: list[str], results: Results
) -> int:
    """Return the largest batch that 'main.py fit' last found to fit a device of ``target``: every product on all sides.

    It tried mode ``default``. Raises UserError if it has not tried one of them.
    """
    alone = {TRAIN_MANY: TRAIN, PER_SAMPLE_MANY: PER_SAMPLE}.get(use_case, use_case)
    size = args.size or PRESETS[args.preset].size
    wanted = (FIT, FINISHED, benchmark, alone, size, args.precision, target)
    names = ("preset", "status", "benchmark", "use_case", "size", "precision", "target")
    fits: dict[tuple[str, str | None], int] = {}
    last: dict[tuple[str, str | None], str] = {}
    for row in sorted(merge(results), key=lambda row: row.started or ""):
        if row.batch_size and tuple(getattr(row, name) for name in names) == wanted:
            if args.device not in (None, row.device_kind):
                continue
            side, run = (str(row.framework), row.product), str(row.run_id)
            fits[side] = max(row.batch_size, fits.get(side, 0) if last.get(side) == run else 0)
            last[side] = run
    products = (args.products or tuple(PRODUCTS)) if alone == PER_SAMPLE else (None,)
    sides = list(FRAMEWORKS) if PAIRED in frameworks else frameworks
    for product in products:
        if missing := [side for side in sides if (side, product) not in fits]:
            command = f"python main.py fit --benchmark {benchmark} --use_case {alone} --size {size}"
            command += f" --precision {args.precision}" + (f" --products {product}" if product else "")
            names_of = f"{' and '.join(missing)}" + (f" ({product})" if product else "")
            raise UserError(f"--batch_sizes max: not known for {names_of}; '{command} --target {target}' finds it")
    return min(fits[side, product] for side in sides for product in products)


def _of_session(planned: list[Job], session: int, args: argparse.Namespace) -> list[Job]:
    """Return ``planned`` as session number ``session``, counted from 0."""
    if not args.sessions:
        return planned
    delay = session * (args.spacing or SPACING)
    return [
        dataclasses.replace(job, session=session + 1, delay=delay, pairs=PRESETS[job.preset].pairs_in(args.sessions))
        for job in planned
    ]


def _modes(args: argparse.Namespace, name: str, target: Target, benchmark: str, use_case: int) -> list[str]:
    """Return the requested mode, or those of its waterfall. Raises UserError if it turns an inapplicable switch."""
    if args.mode != modes.WATERFALL:
        modes.refuse(args.mode, benchmark, use_case)
        return [args.mode]
    if not (kind := args.device or target.device):
        raise UserError(
            f"--mode {modes.WATERFALL}: the switches depend on the device: set --device "
            f"{'|'.join(DEVICE_KINDS)}, or targets.{name}.device in cluster.yaml"
        )
    turns = modes.waterfall(benchmark, use_case, args.precision, kind)
    if not turns:
        what = f"{USE_CASES[use_case].name} of {benchmark} on a {kind}"
        raise UserError(f"--mode {modes.WATERFALL}: {modes.TUNED} changes no switch of {what}")
    return modes.of_waterfall(turns)


def _devices(args: argparse.Namespace, name: str, target: Target) -> tuple[int, int]:
    """Return the nodes, and the devices per node, of a use case on many; by default all of one node, or one of two."""
    nodes, devices = args.nodes or 1, args.devices or target.devices_per_node[-1]
    if args.nodes is None and devices == 1:
        nodes = min(target.nodes, 2)
    if nodes * devices < 2:
        raise UserError(
            f"use cases 2 and 4 need at least 2 devices, but 1 node x 1 device was selected on target {name!r} "
            f"(--nodes, --devices; cluster.yaml: targets.{name}.nodes, targets.{name}.devices_per_node)"
        )
    return nodes, devices


def _check_batches(options: dict[str, Any], devices: int, usual: int | None) -> None:
    """Raise UserError if the batches cannot be divided as requested. ``usual`` is that of a training's recipe."""
    for batch_size in options["batch_sizes"] or ([usual] if usual else []):
        strong = options.get("scaling") == STRONG or usual
        if strong and batch_size % devices:
            whose = "" if options["batch_sizes"] else ", the recipe's,"
            raise UserError(f"--batch_sizes: batch size {batch_size}{whose} does not divide among {devices} devices")
        each = batch_size // devices if strong else batch_size
        if (microbatch := options.get("microbatch")) and each % microbatch:
            raise UserError(f"--microbatch: microbatch {microbatch} does not divide the batch size on a device, {each}")


def table(planned: list[Job]) -> Table:
    """Return a table of what would be started, one line per benchmark, use case and mode."""
    pairs: dict[tuple[str, int, str], list[Job]] = {}
    for job in planned:
        pairs.setdefault((job.benchmark, job.use_case, job.mode), []).append(job)
    lines = []
    for (benchmark, use_case, mode), sides in pairs.items():
        job = sides[0]
        devices = f"{job.nodes} x {job.devices_per_node}" if job.nodes > 1 else str(job.devices_per_node)
        rows = sum(len(side.rows()) for side in sides)
        names = ", ".join(dict.fromkeys(name for side in sides for name in side.frameworks))
        names += " in turn" if job.framework == PAIRED else ""
        lines.append([benchmark, f"{use_case} {USE_CASES[use_case].name}", mode, names, devices, str(rows)])
    head = ["benchmark", "use case", "mode", "frameworks", "devices", "rows"]
    notes = [f"{sum(len(job.rows()) for job in planned)} rows in {len(planned)} scripts"]
    delays = sorted({job.delay for job in planned})
    if len(delays) > 1:
        notes.append(f"{len(delays)} sessions, {delays[1] / 3600:g} h from the start of one to the next")
        notes.append("a session that begins within 1 h of another's end is part of it")
    return Table(head, lines, notes)
