#!/usr/bin/env python3
"""Duel: how does JAX compare with PyTorch on your hardware, and why?

python main.py --benchmark resnet50 --use_case 1      render both scripts, start both
python main.py status                                 what they are doing
python main.py compare                                what came of them
"""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from duel.catalogue import FRAMEWORKS, VALIDATE
from duel.errors import UserError
from duel.modes import WATERFALL
from duel.options import (
    add_options,
    add_selection,
    benchmark_names,
    check_use_cases,
    has_selection,
    target_name,
    weights_source,
)

if TYPE_CHECKING:
    from duel.launch.state import Look
    from duel.results import Results, Run

# Everything heavier is imported by the command that needs it, so that --help answers at once.
ROOT = Path(__file__).resolve().parent


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="main.py",
        description="Start a benchmark in JAX and in PyTorch, one job each, and look after the jobs.",
        epilog="Options without a command start jobs. 'main.py COMMAND --help' explains a command.",
        allow_abbrev=False,
    )
    add_options(parser, several=True)
    parser.add_argument("--framework", choices=tuple(FRAMEWORKS), help="only this side (default: both)")
    parser.add_argument(
        "--paired", action="store_true", help="one script that measures both in turn, A B B A, on the same devices"
    )
    parser.add_argument(
        "--target", type=target_name, metavar="NAME", help="entry of cluster.yaml (default: its 'default')"
    )
    parser.add_argument("--dry_run", action="store_true", help="write and print the scripts, start nothing")
    parser.add_argument("--wait", action="store_true", help="show progress, and at the end both sides in one table")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    def command(name: str, text: str, selection: str = "") -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False)
        if selection:
            add_selection(added, selection)
        return added

    status = command("status", "every run and what it is doing", "shown")
    status.add_argument("--json", action="store_true", help="for programs")
    status.add_argument("--watch", action="store_true", help="anew each second, until all have ended")
    command(
        "compare",
        "both sides of the latest runs, or of RUN, in one table with the ratio",
        "compared, with the other side of each",
    )
    logs = command("logs", "what a run has printed")
    logs.add_argument("run", metavar="RUN", help="run id, or how it begins")
    logs.add_argument("--follow", action="store_true", help="go on until the run ends")
    command("cancel", "end runs", "ended")
    resubmit = command("resubmit", "start again what did not finish, as far as its cause allows", "looked at")
    resubmit.add_argument("--apply", action="store_true", help="start what is proposed, too (more time, more memory)")
    resubmit.add_argument("--include", choices=("code",), action="append", default=[], help="code that has not changed")
    command("sync", "upload to Weights & Biases what jobs kept offline", "uploaded")
    command("collect", "bring results/results.csv up to date")
    validate = command("validate", "prove that both sides of a benchmark compute the same")
    validate.add_argument(
        "--benchmark", type=benchmark_names, required=True, dest="validated", metavar="NAME", help="its name, or all"
    )
    validate.add_argument("--size", choices=("tiny", "full"), default="tiny", help="of the model (default: tiny)")
    validate.add_argument(
        "--weights",
        type=weights_source,
        dest="validate_weights",
        metavar="SOURCE",
        help="computed with (default: random)",
    )
    validate.add_argument(
        "--target", type=target_name, dest="validate_target", metavar="NAME", help="entry of cluster.yaml"
    )
    publish = command("publish", "copy paired results to results/published/NAME, and make README's table of them")
    publish.add_argument("--name", required=True, metavar="NAME", help="of the folder, such as the device's")
    command("init", "write a first cluster.yaml from what Slurm says here")
    doctor = command("doctor", "is everything here that is needed, and how to mend what is not")
    doctor.add_argument(
        "--target", type=target_name, dest="doctor_target", metavar="NAME", help="prove it by a short job"
    )
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
                check_use_cases(parser, args, args.use_case)
                if args.paired and args.framework:
                    parser.error("--paired measures both frameworks; --framework is for the form of two scripts")
                if args.mode == WATERFALL and not args.paired:
                    parser.error(f"--mode {WATERFALL} is told by ratios, which --paired measures")
                if VALIDATE in args.use_case:
                    parser.error("a validation is compared, too: 'main.py validate --benchmark NAME' does both")
                return submit(args, results)
            case "status":
                return status(args, results)
            case "compare":
                return compare(args, results)
            case "logs":
                return logs(args, results)
            case "cancel":
                return cancel(args, results)
            case "resubmit":
                return resubmit(args, results)
            case "sync":
                return sync(args, results)
            case "collect":
                return collect(results)
            case "validate":
                return validate(args, results)
            case "publish":
                return publish(args, results)
            case "init":
                return init()
            case _:
                return doctor(args, results)
    except UserError as error:
        print(f"main.py: error: {error}", file=sys.stderr)
    except BrokenPipeError:  # 'main.py status | head'
        sys.stderr.close()
    except OSError as error:
        print(f"main.py: error: {error.filename or 'results'}: {error.strerror or error}", file=sys.stderr)
    except KeyboardInterrupt:
        said = "stopped; runs that were started go on ('python main.py cancel RUN' ends one)"
        if results.intent.exists():
            said = "stopped submitting; the same command goes on where this one stopped"
        print(f"\nmain.py: {said}", file=sys.stderr)
        return 130
    return 2


def say(words: str) -> None:
    print(words, flush=True)


def submit(args: argparse.Namespace, results: "Results") -> int:
    """Render one script for each benchmark, use case and framework, and start them on the target."""
    from duel.launch import cluster, directives, plan, script

    described = cluster.load(ROOT / "cluster.yaml")
    jobs = plan.jobs(args, described, results)
    if len(args.benchmark) * len(args.use_case) > 1 or len({job.mode for job in jobs}) > 1:
        say(plan.table(jobs))
    target = described.targets[jobs[0].target]
    if args.dry_run:
        texts = [script.render(job, target) for job in jobs]
        for path, text in zip(script.write(jobs, texts, say), texts, strict=True):
            print(f"# {path.relative_to(ROOT)}\n{text}")
            for warning in directives.warnings(directives.of_script(text)):
                print(f"warning: {warning}", file=sys.stderr)
        return 0
    from duel.launch import submit

    runs = submit.launch(jobs, described, results, say)
    if not args.wait:
        say("'python main.py status' shows them, 'python main.py compare' sets both sides against each other")
        return 0
    from duel.launch import jobs as watching

    finished = watching.wait(runs, results, say)
    results.merge()
    print_comparison(runs, results)
    return 0 if finished else 1


def compare(args: argparse.Namespace, results: "Results") -> int:
    from duel.launch import jobs

    print_comparison(jobs.to_compare(args, results), results)
    return 0


def print_comparison(runs: "list[Run]", results: "Results") -> None:
    """What ``--wait`` ends with, and all that ``compare`` does."""
    from duel.launch import cluster
    from duel.report import compare

    try:
        default = cluster.load(ROOT / "cluster.yaml").default
    except UserError:  # records are read without it; a command then names its target
        default = None
    print(compare.report(runs, results, default))


def status(args: argparse.Namespace, results: "Results") -> int:
    from duel.launch import jobs, state

    def shown(seen: "Look") -> state.Look:
        seen = state.with_verdicts(seen, results)
        chosen = jobs.select(seen.statuses, args, results)
        return seen.only(chosen) if len(chosen) < len(seen.statuses) else seen

    if args.json:
        seen = shown(state.look(results))
        print(json.dumps(seen.statuses, indent=1))
        for note in seen.notes:
            print(f"not known: {note}", file=sys.stderr)
    elif args.watch:
        jobs.watch(results, lambda seen: show(shown(seen)))
    else:
        print(state.table(shown(state.look(results))))
    return 0


def show(seen: "Look") -> "Look":
    """The table on a cleared screen, with its age."""
    from duel.launch import state

    clear = "\x1b[H\x1b[2J" if sys.stdout.isatty() else ""
    print(f"{clear}{state.table(seen)}\n{state.age(seen)}", flush=True)
    return seen


def logs(args: argparse.Namespace, results: "Results") -> int:
    from duel.launch import jobs

    jobs.print_log(jobs.find(results, args.run), args.follow)
    return 0


def cancel(args: argparse.Namespace, results: "Results") -> int:
    from duel.launch import jobs, state

    if not has_selection(args):
        raise UserError("cancel: name runs, or choose them, such as with --state queued; see 'main.py cancel --help'")
    chosen = jobs.select(state.look(results).statuses, args, results)
    ended = jobs.cancel(results, [results.run(status["run_id"]) for status in chosen], say)
    results.merge()
    return 0 if ended else 1


def resubmit(args: argparse.Namespace, results: "Results") -> int:
    from duel.launch import cluster, resubmit

    return resubmit.resubmit(args, cluster.load(ROOT / "cluster.yaml"), results, say)


def sync(args: argparse.Namespace, results: "Results") -> int:
    from duel.launch import jobs, state, sync

    chosen = jobs.select(state.look(results).statuses, args, results)
    if not chosen:
        say("nothing to upload: no runs yet")
    return 0 if sync.sync([results.run(status["run_id"]) for status in chosen], say) else 1


def collect(results: "Results") -> int:
    from duel.launch import state

    for note in state.look(results).notes:  # what ended without a word is settled first
        print(f"not known: {note}", file=sys.stderr)
    rows = results.merge()
    counts = {state: sum(row.status == state for row in rows) for state in dict.fromkeys(row.status for row in rows)}
    said = ", ".join(f"{count} {state}" for state, count in counts.items()) or "no rows yet"
    print(f"{results.csv.relative_to(ROOT)}: {len(rows)} rows ({said})")
    return 0


def validate(args: argparse.Namespace, results: "Results") -> int:
    from duel.launch import cluster, validate

    described = cluster.load(ROOT / "cluster.yaml")
    chosen = (args.validated, args.size, args.validate_weights, args.validate_target)
    return 0 if validate.validate(*chosen, described, results, say) else 1


def publish(args: argparse.Namespace, results: "Results") -> int:
    from duel.report import published

    published.publish(args.name, results, ROOT / "README.md", say)
    return 0


def init() -> int:
    from duel.launch import init

    return init.init(ROOT / "cluster.yaml", say)


def doctor(args: argparse.Namespace, results: "Results") -> int:
    from duel.launch import cluster, doctor

    described = cluster.load(ROOT / "cluster.yaml")
    if args.doctor_target is None:
        return doctor.run(described, results)
    return doctor.prove(described, args.doctor_target, results, say)


if __name__ == "__main__":
    sys.exit(main())
