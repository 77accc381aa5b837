#!/usr/bin/env python3
"""Duel: how does JAX compare with PyTorch on your hardware, and why?

python main.py --benchmark resnet50 --use_case 1      render both scripts, start both
python main.py status                                 what they are doing
"""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from duel.catalogue import FRAMEWORKS
from duel.errors import UserError
from duel.options import add_options, target_name

if TYPE_CHECKING:
    from duel.results import Results

# Everything heavier is imported by the command that needs it, so that --help answers at once.
ROOT = Path(__file__).resolve().parent


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="main.py",
        description="Start a benchmark in JAX and in PyTorch, one job each, and look after the jobs.",
        epilog="Options without a command start jobs. 'main.py COMMAND --help' explains a command.",
        allow_abbrev=False,
    )
    add_options(parser)
    parser.add_argument("--framework", choices=tuple(FRAMEWORKS), help="only this side (default: both)")
    parser.add_argument(
        "--target", type=target_name, metavar="NAME", help="entry of cluster.yaml (default: its 'default')"
    )
    parser.add_argument("--dry_run", action="store_true", help="write and print the scripts, start nothing")
    parser.add_argument("--wait", action="store_true", help="show progress, and at the end both sides in one table")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    status = commands.add_parser("status", help="every run and what it is doing")
    status.add_argument("--json", action="store_true", help="for programs")
    logs = commands.add_parser("logs", help="what a run has printed")
    logs.add_argument("run", metavar="RUN", help="run id, or how it begins")
    logs.add_argument("--follow", action="store_true", help="go on until the run ends")
    cancel = commands.add_parser("cancel", help="end runs")
    cancel.add_argument("runs", metavar="RUN", nargs="+", help="run id, or how it begins")
    commands.add_parser("collect", help="bring results/results.csv up to date")
    commands.add_parser("doctor", help="is everything here that is needed, and how to mend what is not")
    return parser


def main(arguments: list[str] | None = None) -> int:
    parser = command_line()
    args = parser.parse_args(arguments)
    from duel.results import Results

    results = Results(ROOT / "results")
    try:
        match args.command:
            case None:
                if args.benchmark is None or args.use_case is None:
                    parser.error("--benchmark and --use_case are needed, or a command; see --help")
                return submit(args, results)
            case "status":
                return status(args, results)
            case "logs":
                return logs(args, results)
            case "cancel":
                return cancel(args, results)
            case "collect":
                return collect(results)
            case _:
                return doctor(results)
    except UserError as error:
        print(f"main.py: error: {error}", file=sys.stderr)
    except BrokenPipeError:  # 'main.py status | head'
        sys.stderr.close()
    except OSError as error:
        print(f"main.py: error: {error.filename or 'results'}: {error.strerror or error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("\nmain.py: stopped watching; the runs go on ('python main.py cancel RUN' ends one)", file=sys.stderr)
        return 130
    return 2


def submit(args: argparse.Namespace, results: "Results") -> int:
    """Render one script per framework and start them on the target."""
    from duel.job import Job
    from duel.launch import cluster, script

    name, target = cluster.load(ROOT / "cluster.yaml").target(args.target)
    frameworks = [args.framework] if args.framework else list(FRAMEWORKS)
    jobs = [
        Job(framework, args.benchmark, args.use_case, args.preset, args.precision, args.device, name)
        for framework in frameworks
    ]
    texts = [script.render(job, target) for job in jobs]
    if args.dry_run:
        for path, text in zip(script.write(jobs, texts), texts, strict=True):
            print(f"# {path.relative_to(ROOT)}\n{text}")
        return 0
    from duel.launch import submit

    submit.check(jobs, target)
    script.write(jobs, texts)
    runs = submit.start(jobs, texts, target, results)
    for run in runs:
        print(f"started {run.id} on {name}")
    if not args.wait:
        print("'python main.py status' shows them, 'python main.py logs RUN --follow' follows one")
        return 0
    from duel.launch import jobs as watching
    from duel.report import compare

    finished = watching.wait(runs, lambda words: print(words, flush=True))
    results.merge()
    print(compare.report(runs, results))
    return 0 if finished else 1


def status(args: argparse.Namespace, results: "Results") -> int:
    from duel.launch import jobs

    statuses = [run.status() for run in results.runs()]
    print(json.dumps(statuses, indent=1) if args.json else jobs.table(statuses))
    return 0


def logs(args: argparse.Namespace, results: "Results") -> int:
    from duel.launch import jobs

    jobs.print_log(jobs.find(results, args.run), args.follow)
    return 0


def cancel(args: argparse.Namespace, results: "Results") -> int:
    from duel.launch import jobs

    for run in [jobs.find(results, name) for name in args.runs]:
        print(jobs.cancel(run))
    results.merge()
    return 0


def collect(results: "Results") -> int:
    rows = results.merge()
    counts = {state: sum(row.status == state for row in rows) for state in dict.fromkeys(row.status for row in rows)}
    said = ", ".join(f"{count} {state}" for state, count in counts.items()) or "no rows yet"
    print(f"{results.csv.relative_to(ROOT)}: {len(rows)} rows ({said})")
    return 0


def doctor(results: "Results") -> int:
    from duel.launch import cluster, doctor

    return doctor.run(cluster.load(ROOT / "cluster.yaml"), results)


if __name__ == "__main__":
    sys.exit(main())
