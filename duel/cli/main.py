"""The command line of main.py and 'duel': finds the command, checks its options and runs it.

Options without a command start jobs.
"""

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from duel import ROOT
from duel.arguments import Parser, Several, near, program
from duel.catalogue import BENCHMARKS, FRAMEWORKS, MANY, TRIAL, VALIDATE, WEAK
from duel.cli import commands, fit, records, topics
from duel.errors import UserError
from duel.job import TRAINING
from duel.modes import DEFAULT, WATERFALL
from duel.options import (
    FRAMEWORK_SYNONYMS,
    SIZES,
    add_device,
    add_options,
    add_precision,
    add_selection,
    add_what,
    benchmark_names,
    check_use_cases,
    chosen,
    count,
    hours,
    sessions,
    spacing,
    target_name,
    weights_source,
)
from duel.terminal import warn
from duel.training_options import add_training, check_training

if TYPE_CHECKING:
    from duel.results import Results

TRIALS = 8
SHELLS = ("bash", "zsh", "tcsh")


def _submit_options(parser: Parser) -> None:
    add_options(parser, several=True)
    parser.add_argument(
        "--target", type=target_name, metavar="NAME", help="entry of cluster.yaml (default: its 'default')"
    )
    start = parser.add_argument_group("start")
    start.add_argument(
        "--framework",
        type=chosen("framework", tuple(FRAMEWORKS), FRAMEWORK_SYNONYMS),
        metavar="NAME",
        help=f"only this side: {' or '.join(FRAMEWORKS)} (default: both)",
    )
    start.add_argument("--paired", action="store_true", help="one script that measures both in turn, for a verdict")
    start.add_argument(
        "--sessions",
        type=sessions,
        metavar="N",
        help="with --paired: measure in N sessions; three or more share the preset's pairs (default: 1)",
    )
    start.add_argument(
        "--spacing", type=spacing, metavar="TIME", help="time from one session's start to the next (default: 2h)"
    )
    add_training(parser)
    start.add_argument("--profile", action="store_true", help="trace each row's program, too, for 'explain'")
    start.add_argument("--dry_run", action="store_true", help="write and print the scripts, start nothing")
    start.add_argument("--wait", action="store_true", help="show progress, then the comparison")
    parser.set_defaults(trials=None)


def _check_submit(parser: Parser, args: argparse.Namespace) -> None:
    """Exit with an error if the options do not go together."""
    if not args.benchmark or not args.use_case:
        missing = " and ".join(f"--{name}" for name in ("benchmark", "use_case") if not getattr(args, name))
        verb = "are" if " and " in missing else "is"
        parser.error(f"{missing} {verb} needed to start jobs; '{program()} --help' shows the commands")
    check_use_cases(parser, args, args.use_case)
    check_training(parser, args, args.benchmark, args.use_case)
    if args.dataset and (args.sessions or args.profile or args.mode == WATERFALL):
        parser.error("--dataset trains to accuracy; --sessions, --profile and a waterfall are for measured rows")
    if args.paired and args.framework:
        parser.error("--paired measures both frameworks; leave out --framework, or --paired")
    if args.mode == WATERFALL and not args.paired:
        parser.error(f"--mode {WATERFALL} needs --paired")
    if args.sessions and not args.paired:
        parser.error("--sessions needs --paired: a session is a series of pairs measured in turn")
    if args.spacing and not args.sessions:
        parser.error("--spacing needs --sessions")
    if VALIDATE in args.use_case:
        parser.error("a validation also needs a comparison: 'main.py validate --benchmark NAME' does both")
    if args.profile and all(number in MANY for number in args.use_case):
        parser.error("--profile traces programs on one device; valid use cases: 1, 3, 5")
    if args.dry_run and args.wait:
        parser.error("--wait and --dry_run exclude each other: nothing is started")


def _tune_options(parser: Parser) -> None:
    add_what(parser, several=True)
    add_precision(parser)
    add_device(parser)
    parser.add_argument(
        "--target", type=target_name, metavar="NAME", help="entry of cluster.yaml (default: its 'default')"
    )
    parser.add_argument(
        "--trials", type=count, default=TRIALS, metavar="N", help=f"most trials per side and point (default: {TRIALS})"
    )
    parser.add_argument("--dry_run", action="store_true", help="write and print the scripts, start nothing")
    parser.add_argument("--wait", action="store_true", help="show progress, then what was found")
    parser.set_defaults(preset=TRIAL, paired=True, framework=None, mode=DEFAULT, sessions=None, spacing=None)
    parser.set_defaults(profile=False, nodes=None, devices=None, scaling=WEAK, **dict.fromkeys(TRAINING))


def _check_tune(parser: Parser, args: argparse.Namespace) -> None:
    """Exit with an error if the options do not go together."""
    for name in ("benchmark", "use_case"):
        if not getattr(args, name):
            parser.error(f"--{name} is needed")
    if VALIDATE in args.use_case:
        parser.error("a proof has no switches to search; valid: 1, 3, 5")
    args.use_case = tuple(number for number in args.use_case if number not in MANY)
    if not args.use_case:
        parser.error("tune searches on one device, and use cases 2 and 4 use what it finds there; valid: 1, 3, 5")
    check_use_cases(parser, args, args.use_case)


def _choosing(done: str) -> Callable[[Parser], None]:
    return lambda parser: add_selection(parser, done)


def _resubmit_options(parser: Parser) -> None:
    add_selection(parser, "considered")
    parser.add_argument("--apply", action="store_true", help="also start what is only proposed (more time or memory)")
    parser.add_argument(
        "--include", type=chosen("cause", ("code",)), metavar="code", help="also retry code errors with unchanged code"
    )


def _validate_options(parser: Parser) -> None:
    parser.add_argument(
        "--benchmark", action=Several, convert=benchmark_names, required=True, metavar="NAME", help="names, or all"
    )
    parser.add_argument(
        "--size", type=chosen("size", SIZES), default="tiny", metavar="NAME", help="model size (default: tiny)"
    )
    parser.add_argument("--weights", type=weights_source, metavar="SOURCE", help="weights to use (default: random)")
    parser.add_argument(
        "--target", type=target_name, metavar="NAME", help="entry of cluster.yaml (default: its 'default')"
    )


def _init_options(parser: Parser) -> None:
    parser.add_argument(
        "--from",
        dest="script",
        type=Path,
        metavar="FILE",
        help="print a target made from a job script that works here",
    )


def _doctor_options(parser: Parser) -> None:
    parser.add_argument("--target", type=target_name, metavar="NAME", help="check it with a short job")
    parser.add_argument("--thorough", action="store_true", help="try all the target can do, and keep the results")


def _study_options(parser: Parser) -> None:
    actions = ("plan", "submit", "status", "resume", "report")
    parser.add_argument("study", metavar="NAME", help="a file in studies/, without .yaml")
    parser.add_argument("action", metavar="ACTION", type=chosen("action", actions), help=", ".join(actions))
    parser.add_argument("--budget", type=hours, metavar="TIME", help="most device-hours to start, as in 40h")


def _completion_options(parser: Parser) -> None:
    parser.add_argument("shell", metavar="SHELL", type=chosen("shell", SHELLS), help=", ".join(SHELLS))


def completion(args: argparse.Namespace, results: "Results") -> int:
    """Print a script that makes a shell complete the options of 'duel'."""
    import shtab

    root = Parser(prog="duel", description="Compares JAX with PyTorch.")
    _submit_options(root)
    commands = root.add_subparsers(dest="command")
    for command in COMMANDS:
        command.options(commands.add_parser(command.name, help=command.text))
    for parser in (root, *commands.choices.values()):
        for action in parser._actions:
            action.choices = action.choices or VALUES.get(action.dest)
    print(shtab.complete(root, shell=args.shell))
    return 0


# What a shell offers for an option; what is typed is still checked by the option's converter.
VALUES = {"benchmark": [*BENCHMARKS, "all"], "framework": list(FRAMEWORKS), "size": list(SIZES), "shell": list(SHELLS)}


def _help_options(parser: Parser) -> None:
    parser.add_argument("topic", metavar="TOPIC", nargs="?", help=f"{', '.join(topics.TOPICS)}, or a command")


def help_(args: argparse.Namespace, results: "Results") -> int:
    topic = (args.topic or "").replace("-", "_")
    if not topic:
        print(front_page(), end="")
    elif topic in topics.TOPICS:
        print(topics.TOPICS[topic]())
    elif topic in BY_NAME:
        BY_NAME[topic].parser().print_help()
    else:
        valid = [*topics.TOPICS, *BY_NAME]
        guess = near(topic, valid)
        meant = f"did you mean {guess!r}? " if guess else ""
        raise UserError(f"no help on {args.topic!r}; {meant}valid: {', '.join(valid)}")
    return 0


@dataclass(frozen=True)
class Command:
    """A command: its name, one line on what it does, its function, and a function that adds its options to a parser."""

    name: str
    text: str
    run: Callable[[argparse.Namespace, Any], int]  # with the results folder
    options: Callable[[Parser], None] = lambda parser: None

    def parser(self) -> Parser:
        parser = Parser(prog=f"{program()} {self.name}", description=f"{self.text[0].upper()}{self.text[1:]}.")
        self.options(parser)
        return parser


COMMANDS = (
    Command("status", "show every run and what it is doing", commands.status, records.status),
    Command("compare", "compare both sides of runs, with the ratio", commands.compare, _choosing("compared")),
    Command("explain", "say why one side of profiled runs is faster", commands.explain, records.explain),
    Command("logs", "print a run's output", commands.logs, records.logs),
    Command("verify", "check that a run was what was rendered", commands.verify, records.run),
    Command("cancel", "cancel queued or running runs", commands.cancel, _choosing("cancelled")),
    Command("resubmit", "resubmit unfinished runs, depending on why they failed", commands.resubmit, _resubmit_options),
    Command("study", "plan, start and continue the points of a study", commands.study, _study_options),
    Command("validate", "prove that both sides compute the same function", commands.validate, _validate_options),
    Command("fit", "find what compiles for a TPU, or which batch fits", fit.run, fit.options),
    Command("data", "show, fetch and prepare data sets", commands.data, records.data),
    Command("sync", "upload offline runs to Weights & Biases", commands.sync, _choosing("uploaded")),
    Command("collect", "update results/results.csv", commands.collect, records.collect),
    Command("archive", "pack settled runs into results/archive", commands.archive, _choosing("packed")),
    Command("tune", "find the fastest switches of each side, for --mode tuned", commands.submit, _tune_options),
    Command("publish", "copy paired results to results/published/NAME", commands.publish, records.publish),
    Command("report", "write a page, figures and tables", commands.report, records.report),
    Command("reproduce", "measure a published set again", commands.reproduce, records.reproduce),
    Command("bundle", "pack a published set for an archive with a DOI", commands.bundle, records.bundle),
    Command("workspace", "create a Weights & Biases workspace", commands.workspace, records.workspace),
    Command("init", "write a first cluster.yaml from what Slurm reports here", commands.init, _init_options),
    Command("doctor", "check the set-up and suggest fixes", commands.doctor, _doctor_options),
    Command("completion", "print a script for shell completion", completion, _completion_options),
)
SUBMIT = Command("submit", "start jobs (the same as options without a command)", commands.submit, _submit_options)
HELP = Command("help", "explain a topic or a command", help_, _help_options)
BY_NAME = {command.name: command for command in (SUBMIT, *COMMANDS, HELP)}


def front_page() -> str:
    name = "duel" if program() == "duel" else "python main.py"
    return topics.front(name, {command.name: command.text for command in COMMANDS})


def parsed(argv: Sequence[str]) -> tuple[Command, argparse.Namespace]:
    """Return the command that ``argv`` names, and its options. Exits with an error if they are invalid."""
    command = SUBMIT
    if argv and argv[0] in BY_NAME:
        command, argv = BY_NAME[argv[0]], argv[1:]
    elif argv and argv[0] in ("-h", "--help"):
        return HELP, argparse.Namespace(topic="")
    parser = command.parser()
    if command is SUBMIT and argv:
        _refuse_misplaced(parser, argv)
    args = parser.parse(argv)
    if command is SUBMIT:
        _check_submit(parser, args)
    elif command.options is _tune_options:
        _check_tune(parser, args)
    return command, args


def _refuse_misplaced(parser: Parser, argv: Sequence[str]) -> None:
    """Exit with an error if ``argv`` has a command after options, or begins with an unknown one."""
    if not argv[0].startswith("-"):
        guess = near(argv[0], list(BY_NAME))
        meant = f"; did you mean {guess!r}?" if guess else f"; valid: {', '.join(BY_NAME)}"
        if argv[0] in BENCHMARKS:
            meant = f"; did you mean --benchmark {argv[0]}?"
        parser.error(f"unknown command {argv[0]!r}{meant}")
    for option, values in parser.options_of(argv):
        action = parser.takes(option)
        allowed = 1 if action and action.nargs is None else 0
        for place, value in enumerate(values):
            wanted = action.accepts(value) if isinstance(action, Several) else place < allowed
            if value in BY_NAME and not wanted:
                _refuse(parser, argv, value)


def _refuse(parser: Parser, argv: Sequence[str], name: str) -> None:
    """Exit with an error: in ``argv`` the command ``name`` comes after options."""
    taken = BY_NAME[name].parser()
    place = list(argv).index(name)
    for option, _ in parser.options_of(argv[:place]):
        if taken.takes(option) is None:
            parser.error(
                f"{name!r} does not take {option}, which is for starting jobs; "
                f"'{program()} {name} --help' shows what it takes"
            )
    moved = shlex.join([*argv[:place], *argv[place + 1 :]])
    parser.error(f"options come after the command: '{program()} {name} {moved}'")


def _results() -> "Results":
    from duel.results import Results

    return Results(ROOT / "results")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    command, args = parsed(sys.argv[1:] if argv is None else argv)
    results = None if command is HELP else _results()  # help answers at once
    try:
        return command.run(args, results)
    except UserError as error:
        warn(f"{program()}: error: {error}")
    except BrokenPipeError:  # 'main.py status | head'
        sys.stderr.close()
    except OSError as error:
        warn(f"{program()}: error: {error.filename or 'results'}: {error.strerror or error}")
    except KeyboardInterrupt:
        message = "stopped; runs already started continue ('python main.py cancel RUN' cancels one)"
        from duel.launch import intent

        if begun := [noted.created for noted in intent.waiting(results).values() if not noted.waits] if results else []:
            rest = "'python main.py resubmit' sends the rest ('... cancel RUN' drops one)"
            message = f"stopped submitting; {rest if begun[-1] else 'nothing was sent yet: repeat the command'}"
        warn(f"\n{program()}: {message}")
        return 130
    return 2
