"""The command ``fit``: its options, and what it does with them."""

import argparse
import re
from typing import TYPE_CHECKING, Any

from duel import ROOT, modes
from duel.arguments import Parser, Several
from duel.catalogue import (
    BENCHMARKS,
    FIT,
    FRAMEWORKS,
    INFERENCE,
    MANY,
    PER_SAMPLE,
    PER_SAMPLE_MANY,
    PRECISIONS,
    TRAIN,
    VALIDATE,
)
from duel.chips import CHIPS
from duel.errors import UserError
from duel.job import Job
from duel.options import (
    SIZES,
    add_mode,
    add_precision,
    batch_size,
    benchmark_names,
    chosen,
    product,
    target_name,
    use_case_numbers,
)
from duel.terminal import say, show

if TYPE_CHECKING:
    from duel.launch.fit import Cell
    from duel.results import Results

KIND = "tpu:"


def options(parser: Parser) -> None:
    parser.add_argument(
        "--device",
        type=_chip,
        metavar="tpu:CHIP",
        help=f"compile locally for: {', '.join(CHIPS)} (default: try batches on the target)",
    )
    parser.add_argument(
        "--benchmark", action=Several, convert=benchmark_names, required=True, metavar="NAME", help="names, or all"
    )
    parser.add_argument(
        "--use_case", action=Several, convert=use_case_numbers, metavar="N", help="numbers or names (default: 1)"
    )
    parser.add_argument(
        "--size",
        type=chosen("size", SIZES),
        default="full",
        metavar="NAME",
        help="model size: tiny or full (default: full)",
    )
    parser.add_argument(
        "--batch_sizes",
        action=Several,
        convert=batch_size,
        default=(),
        metavar="N",
        help="with --device, samples over all chips (default: the benchmark's for a TPU); else the size to begin with",
    )
    parser.add_argument(
        "--products",
        action=Several,
        convert=product,
        default=(),
        metavar="NAME",
        help="what to compute from per-sample gradients (default: clipped_sum)",
    )
    add_precision(parser)
    add_mode(parser)
    parser.add_argument("--largest", action="store_true", help="also find the largest batch that fits")
    parser.add_argument("--limit", type=_minutes, metavar="TIME", help="most time for one compilation (default: 15m)")
    parser.add_argument(
        "--target", type=target_name, metavar="NAME", help="the target whose JAX has libtpu, or where batches are tried"
    )


def _chip(text: str) -> str:
    name = text.removeprefix(KIND)
    if name not in CHIPS:
        valid = ", ".join(f"{KIND}{chip}" for chip in CHIPS)
        raise argparse.ArgumentTypeError(f"unknown chip {text!r}; valid: {valid}; for a device that is here, --target")
    return name


def _minutes(text: str) -> float:
    found = re.fullmatch(r"([0-9]{1,4})(s|m)", text)
    if not found or not int(found[1]):
        raise argparse.ArgumentTypeError(f"time {text!r}: give minutes or seconds, such as 15m or 90s")
    return float(found[1]) * (60 if found[2] == "m" else 1)


def run(args: argparse.Namespace, results: "Results") -> int:
    """Compile the cells that ``args`` name, keep and show what that came to; 1 if one neither fits nor is too large."""
    from duel.launch import cluster, fit

    if VALIDATE in (args.use_case or ()):
        raise UserError(f"use case {VALIDATE} is a proof: 'main.py validate' makes it; valid: 1 to {INFERENCE}")
    if args.device is None:
        return _tried(args, results)
    cells = _cells(args)
    target = cluster.load(ROOT / "cluster.yaml").target(args.target)[1] if args.target else None
    python = fit.interpreter(target.python.jax if target else None)
    fit.known(results.folder, args.device)  # a damaged file is told before anything is compiled
    limit, found = args.limit or fit.LIMIT_SECONDS, []
    for cell in cells:
        say(f"compiling {cell.name} for {cell.chip}")
        tried = fit.largest(cell, python, limit, say) if args.largest else [fit.compiled(cell, python, limit)]
        for one in tried:
            found.append(one)
            fit.keep(results.folder, args.device, one)
    show(fit.table(found))
    return 0 if all(one.outcome in fit.ANSWERS for one in found) else 1


def _tried(args: argparse.Namespace, results: "Results") -> int:
    """Find the largest batch on the target, by trying: both sides, in processes of their own."""
    from duel.cli.commands import print_comparison
    from duel.launch import cluster, manage, submit

    for_chips = args.largest or args.limit is not None or args.mode != modes.DEFAULT
    if for_chips or len(args.batch_sizes) > 1 or len(args.products) > 1:
        raise UserError(
            "without --device, batches are tried on the target, from a single size: omit --largest, --limit and "
            "--mode, and give --batch_sizes and --products at most one value each"
        )
    described = cluster.load(ROOT / "cluster.yaml")
    name, target = described.target(args.target)
    jobs = [
        Job(framework, benchmark, use_case, FIT, args.precision, None, name, size=args.size, **_variant(args, use_case))
        for benchmark in args.benchmark
        for use_case in args.use_case or (TRAIN,)
        for framework in FRAMEWORKS
        if getattr(target.python, framework) is not None
    ]
    if wrong := [job.use_case for job in jobs if job.use_case in MANY]:
        raise UserError(f"use case {wrong[0]}: batches are tried on one device; valid: 1, 3, 5")
    runs = submit.launch(jobs, described, results, say)
    finished = manage.wait(runs, results)
    print_comparison(runs, results)
    return 0 if finished else 1


def _variant(args: argparse.Namespace, use_case: int) -> dict[str, Any]:
    sizes = {"batch_sizes": args.batch_sizes[:1]} if args.batch_sizes else {}
    sizes |= {"batch_sizes": (1,)} if use_case == INFERENCE and not args.batch_sizes else {}
    return sizes | ({"products": _products(args)[:1]} if use_case == PER_SAMPLE else {})


def _products(args: argparse.Namespace) -> tuple[str, ...]:
    return args.products or ("clipped_sum",)


def _cells(args: argparse.Namespace) -> "list[Cell]":
    from duel.launch.fit import Cell

    if "tpu" not in PRECISIONS[args.precision].device_kinds:
        valid = ", ".join(policy.name for policy in PRECISIONS.values() if "tpu" in policy.device_kinds)
        raise UserError(f"--precision {args.precision} is not supported on a TPU; valid: {valid}")
    cells = []
    for name in args.benchmark:
        for use_case in args.use_case or (TRAIN,):
            modes.settings(args.mode, "jax", name, use_case, args.precision, "tpu")  # raises UserError
            per_sample = use_case in (PER_SAMPLE, PER_SAMPLE_MANY)
            devices = 4 if use_case in MANY else 1
            usual = BENCHMARKS[name].sizes[args.size].batch_size["tpu"] * devices
            for size in args.batch_sizes or (usual,):
                if size % devices:
                    raise UserError(
                        f"--batch_sizes {size}: use case {use_case} needs a multiple of {devices}, its chips"
                    )
                cells += [
                    Cell(args.device, name, use_case, args.size, args.precision, size, devices, each, args.mode)
                    for each in (_products(args) if per_sample else (None,))
                ]
    return cells
