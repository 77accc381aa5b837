"""The command line of ``run.py``, the same in both frameworks."""

import argparse
import importlib.metadata
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from duel import CODE, ROOT, variables
from duel.arguments import Parser
from duel.catalogue import FRAMEWORKS, MANY, TRIAL
from duel.measure.attempt import Commands
from duel.options import SAFETENSORS, add_options, check_use_cases, count, folder_name, target_name
from duel.switches import KEEP_MEMORY
from duel.training_options import add_training, check_training


def parsed(framework: str, arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options of ``<framework>/run.py``, and two more: ``version``, the framework's here (empty where each
    side is started in its own way), and ``commands``, which start each side. Exits with an error if one is invalid.
    """
    parser = _parser(framework)
    args = parser.parse(arguments)
    sides = [text.partition("=")[0] for text in args.paired]
    args.version = "" if framework in sides else _version(parser, framework)
    if args.run_folder is None:
        _check(parser, args)
        args.commands = _commands(parser, framework, args)
    return args


def _commands(parser: Parser, framework: str, args: argparse.Namespace) -> Commands:
    # -u: what a crash leaves in an unwritten buffer is what one needs to read.
    commands = {framework: [sys.executable, "-u", str(Path(sys.argv[0]).resolve())]}
    for text in args.paired:
        side, _, python = text.partition("=")
        start = os.environ.get(variables.starter(side), "")  # with it, the interpreter may be in a container
        if side not in FRAMEWORKS or not (start or shutil.which(python)):
            parser.error(f"--paired {text}: expected a framework's name, '=' and its interpreter")
        shell = ["bash", "-eo", "pipefail", "-c", start, side] if start else []
        commands[side] = [*shell, python, "-u", str(CODE / side / "run.py")]
    return commands


def _version(parser: Parser, framework: str) -> str:
    try:
        return importlib.metadata.version(FRAMEWORKS[framework])
    except importlib.metadata.PackageNotFoundError:
        parser.error(f"{sys.executable} has no {FRAMEWORKS[framework]}; 'make {framework}-env' creates one that does")


def _parser(framework: str) -> Parser:
    parser = Parser(prog=f"{framework}/run.py", description=f"Measure {framework} in this interpreter.")
    add_options(parser)
    parser.add_argument("--target", type=target_name, default="local", metavar="NAME", help="recorded in the rows")
    parser.add_argument("--data", type=folder_name, default=ROOT / "data", metavar="DIR", help="folder of data sets")
    parser.add_argument("--run_folder", type=Path, help=argparse.SUPPRESS)
    paired = "measure that framework, too, in turn"
    parser.add_argument("--paired", action="append", default=[], metavar="FRAMEWORK=PYTHON", help=paired)
    parser.add_argument("--pairs", type=count, metavar="N", help="pairs per point with --paired; default: the preset's")
    parser.add_argument("--trials", type=count, metavar="N", help="trials per side, to find the fastest switches")
    parser.add_argument("--profile", action="store_true", help="trace each row's program, too")
    add_training(parser)
    parser.add_argument("--spawn", action="store_true", help="start the processes for all devices on this machine")
    # For a measuring process, from its supervisor:
    for name in ("--row", "--rank", "--ranks", "--local_rank"):
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)
    for name in ("--untraced", f"--{KEEP_MEMORY}"):
        parser.add_argument(name, action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--meet", default="", help=argparse.SUPPRESS)
    parser.add_argument("--cpus", default="", help=argparse.SUPPRESS)
    return parser


def _check(parser: Parser, args: argparse.Namespace) -> None:
    """Exit with an error unless the options describe a job of this interpreter."""
    if args.benchmark is None or args.use_case is None:
        parser.error("--benchmark and --use_case are required")
    check_use_cases(parser, args, (args.use_case,))
    check_training(parser, args, (args.benchmark,), (args.use_case,))
    if bool(args.trials) != (args.preset == TRIAL) or (args.trials and not args.paired):
        parser.error(f"a search needs --trials, --paired and --preset {TRIAL} together")
    if args.use_case in MANY and (args.nodes or 1) * (args.devices or 1) < 2:
        parser.error(f"use case {args.use_case} needs several devices: set --devices or --nodes")
    if args.weights is not None and not args.weights.endswith(SAFETENSORS):
        parser.error(f"--weights: run.py reads {SAFETENSORS} files; 'main.py --weights' takes the others, too")
