"""The command line of main.py and of 'duel': which command is meant, and what it does with its options.

Options without a command start jobs.
"""

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from duel import ROOT
from duel.arguments import Parser, Several, near, program
from duel.catalogue import BENCHMARKS, FRAMEWORKS, MANY, TRIAL, VALIDATE, WEAK
from duel.cli import commands, records, topics
from duel.errors import UserError
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
    sessions,
    spacing,
    target_name,
    weights_source,
)
from duel.terminal import warn

if TYPE_CHECKING:
    from duel.results import Results

TRIALS = 8
SHELLS = ("bash", "zsh", "tcsh")


def _submit_options(parser: Parser) -> None:
    add_options(parser, several=True)
    parser.add_argument("--target", type=target_name, metavar="NAME", help="entry of cluster.yaml (default: its own)")
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
        help="with --paired: spread the preset's pairs over N sessions (default: 1)",
    )
    start.add_argument(
        "--spacing", type=spacing, metavar="TIME", help="from the start of a session to the next (default: 2h)"
    )
    start.add_argument("--dry_run", action="store_true", help="write and print the scripts, start nothing")
    start.add_argument("--wait", action="store_true", help="show progress, and at the end the comparison")
    parser.set_defaults(trials=None)


def _check_submit(parser: Parser, args: argparse.Namespace) -> None:
    """Ends the process where the options do not fit each other."""
    if not args.benchmark or not args.use_case:
        missing = " and ".join(f"--{name}" for name in ("benchmark", "use_case") if not getattr(args, name))
        verb = "are" if " and " in missing else "is"
        parser.error(f"{missing} {verb} needed to start jobs; '{program()} --help' shows the commands")
    check_use_cases(parser, args, args.use_case)
    if args.paired and args.framework:
        parser.error("--paired measures both frameworks; leave out --framework, or --paired")
    if args.mode == WATERFALL and not args.paired:
        parser.error(f"--mode {WATERFALL} needs --paired")
    if args.sessions and not args.paired:
        parser.error("--sessions needs --paired: a session is pairs that are measured in turn")
    if args.spacing and not args.sessions:
        parser.error("--spacing needs --sessions")
    if VALIDATE in args.use_case:
        parser.error("a validation is also compared: 'main.py validate --benchmark NAME' does both")
    if args.dry_run and args.wait:
        parser.error("--wait and --dry_run exclude each other: nothing is started")


def _tune_options(parser: Parser) -> None:
    add_what(parser, several=True)
    add_precision(parser)
    add_device(parser)
    parser.add_argument("--target", type=target_name, metavar="NAME", help="entry of cluster.yaml (default: its own)")
    parser.add_argument(
        "--trials", type=count, default=TRIALS, metavar="N", help=f"of each side at each point (default: {TRIALS})"
    )
    parser.add_argument("--dry_run", action="store_true", help="write and print the scripts, start nothing")
    parser.add_argument("--wait", action="store_true", help="show progress, and at the end what was found")
    parser.set_defaults(preset=TRIAL, paired=True, framework=None, mode=DEFAULT, sessions=None, spacing=None)
    parser.set_defaults(nodes=None, devices=None, scaling=WEAK)


def _check_tune(parser: Parser, args: argparse.Namespace) -> None:
    """Ends the process where the options do not fit each other."""
    for name in ("benchmark", "use_case"):
        if not getattr(args, name):
            parser.error(f"--{name} is needed")
    args.use_case = tuple(number for number in args.use_case if number not in MANY)
    if not args.use_case:
        parser.error("what is found on one device holds for many, too: use cases 1, 3 and 5 are valid")
    check_use_cases(parser, args, args.use_case)


def _choosing(done: str) -> Callable[[Parser], None]:
    return lambda parser: add_selection(parser, done)


def _status_options(parser: Parser) -> None:
    add_selection(parser, "shown")
    parser.add_argument("--all", action="store_true", help="old runs, too")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="for programs")
    how.add_argument("--watch", action="store_true", help="redraw it each second, until all have ended")


def _logs_options(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="run id, or how it begins")
    parser.add_argument("--follow", action="store_true", help="go on until the run ends")


def _resubmit_options(parser: Parser) -> None:
    add_selection(parser, "looked at")
    parser.add_argument("--apply", action="store_true", help="also start what is only proposed (more time or memory)")
    parser.add_argument(
        "--include", type=chosen("cause", ("code",)), metavar="code", help="also retry code errors with unchanged code"
    )


def _validate_options(parser: Parser) -> None:
    parser.add_argument(
        "--benchmark", action=Several, convert=benchmark_names, required=True, metavar="NAME", help="names, or all"
    )
    parser.add_argument(
        "--size", type=chosen("size", SIZES), default="tiny", metavar="NAME", help="of the model (default: tiny)"
    )
    parser.add_argument("--weights", type=weights_source, metavar="SOURCE", help="to compute with (default: random)")
    parser.add_argument("--target", type=target_name, metavar="NAME", help="entry of cluster.yaml")


def _doctor_options(parser: Parser) -> None:
    parser.add_argument("--target", type=target_name, metavar="NAME", help="check it by a short job")


def _completion_options(parser: Parser) -> None:
    parser.add_argument("shell", metavar="SHELL", type=chosen("shell", SHELLS), help=", ".join(SHELLS))


def completion(args: argparse.Namespace, results: "Results") -> int:
    """Print what makes a shell complete the options of 'duel'."""
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


# What a shell offers for an option; its own words are checked by their converters.
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
    """A command, what it does in a line, its function, and what adds its options to a parser."""

    name: str
    text: str
    run: Callable[[argparse.Namespace, Any], int]  # with the results folder
    options: Callable[[Parser], None] = lambda parser: None

    def parser(self) -> Parser:
        parser = Parser(prog=f"{program()} {self.name}", description=f"{self.text[0].upper()}{self.text[1:]}.")
        self.options(parser)
        return parser


COMMANDS = (
    Command("status", "show every run and what it is doing", commands.status, _status_options),
    Command("compare", "compare both sides of runs, with the ratio", commands.compare, _choosing("compared")),
    Command("logs", "print what a run has printed", commands.logs, _logs_options),
    Command("cancel", "end runs", commands.cancel, _choosing("ended")),
    Command("resubmit", "resubmit unfinished runs, depending on why they failed", commands.resubmit, _resubmit_options),
    Command("validate", "prove that both sides of a benchmark compute the same", commands.validate, _validate_options),
    Command("sync", "upload to Weights & Biases what jobs kept offline", commands.sync, _choosing("uploaded")),
    Command("collect", "bring results/results.csv up to date", commands.collect),
    Command("tune", "find the fastest switches of each side, for --mode tuned", commands.submit, _tune_options),
    Command("publish", "copy paired results to results/published/NAME", commands.publish, records.publish),
    Command("report", "write a page, figures and tables to show", commands.report, records.report),
    Command("reproduce", "measure a published set again", commands.reproduce, records.reproduce),
    Command("bundle", "pack a published set for an archive with a DOI", commands.bundle, records.bundle),
    Command("workspace", "make a Weights & Biases workspace", commands.workspace, records.workspace),
    Command("init", "write a first cluster.yaml from what Slurm reports here", commands.init),
    Command("doctor", "check the set-up and suggest fixes", commands.doctor, _doctor_options),
    Command("completion", "print a script for shell completion", completion, _completion_options),
)
SUBMIT = Command("submit", "start jobs (the same as options without a command)", commands.submit, _submit_options)
HELP = Command("help", "explain a topic or a command", help_, _help_options)
BY_NAME = {command.name: command for command in (SUBMIT, *COMMANDS, HELP)}


def front_page() -> str:
    name = "duel" if program() == "duel" else "python main.py"
    return topics.front(name, {command.name: command.text for command in COMMANDS})


def parsed(words: Sequence[str]) -> tuple[Command, argparse.Namespace]:
    """The command that ``words`` mean, and its options. Ends the process where they are a mistake."""
    command = SUBMIT
    if words and words[0] in BY_NAME:
        command, words = BY_NAME[words[0]], words[1:]
    elif words and words[0] in ("-h", "--help"):
        return HELP, argparse.Namespace(topic="")
    parser = command.parser()
    if command is SUBMIT and words:
        _refuse_misplaced(parser, words)
    args = parser.parse(words)
    if command is SUBMIT:
        _check_submit(parser, args)
    elif command.options is _tune_options:
        _check_tune(parser, args)
    return command, args


def _refuse_misplaced(parser: Parser, words: Sequence[str]) -> None:
    """Ends the process where ``words`` hold a command behind options, or begin with what is no command."""
    if not words[0].startswith("-"):
        guess = near(words[0], list(BY_NAME))
        meant = f"; did you mean {guess!r}?" if guess else f"; valid: {', '.join(BY_NAME)}"
        if words[0] in BENCHMARKS:
            meant = f"; did you mean --benchmark {words[0]}?"
        parser.error(f"there is no command {words[0]!r}{meant}")
    for option, values in parser.options_of(words):
        action = parser.takes(option)
        allowed = 1 if action and action.nargs is None else 0
        for place, value in enumerate(values):
            wanted = action.accepts(value) if isinstance(action, Several) else place < allowed
            if value in BY_NAME and not wanted:
                _refuse(parser, words, value)


def _refuse(parser: Parser, words: Sequence[str], name: str) -> None:
    """Ends the process: the command ``name`` stands behind options in ``words``."""
    taken = BY_NAME[name].parser()
    place = list(words).index(name)
    for option, _ in parser.options_of(words[:place]):
        if taken.takes(option) is None:
            parser.error(
                f"{name!r} does not take {option}, which is for starting jobs; "
                f"'{program()} {name} --help' shows what it takes"
            )
    moved = shlex.join([*words[:place], *words[place + 1 :]])
    parser.error(f"options come after the command: '{program()} {name} {moved}'")


def _results() -> "Results":
    from duel.results import Results

    return Results(ROOT / "results")


def main(words: Sequence[str] | None = None) -> int:
    """The exit code."""
    command, args = parsed(sys.argv[1:] if words is None else words)
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
        reached = "stopped; runs that were started go on ('python main.py cancel RUN' ends one)"
        if results and results.intent.exists():
            reached = "stopped submitting; the same command goes on where this one stopped"
        warn(f"\n{program()}: {reached}")
        return 130
    return 2
