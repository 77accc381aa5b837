"""The options that main.py and run.py share: what to measure, checked against the catalogue.

They are kept apart from the code that acts on them, so that a wrong option is reported at once.
"""

import argparse
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from duel import modes
from duel.arguments import Parser, Several, near, one_of
from duel.catalogue import (
    ALIASES,
    BENCHMARKS,
    DEVICE_KINDS,
    FRAMEWORKS,
    HIDDEN,
    MANY,
    PER_SAMPLE,
    PER_SAMPLE_MANY,
    PRECISIONS,
    PRESETS,
    PRODUCTS,
    SCALINGS,
    SESSION_SECONDS,
    USE_CASES,
    VALIDATE,
    WEAK,
)
from duel.states import STATES
from duel.switches import SWITCHES

# Options that only some use cases take, named as in ``duel.job.Job``, and the numbers of those use cases.
VARIANTS: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {
        "batch_sizes": tuple(number for number in USE_CASES if number != VALIDATE),
        "products": (PER_SAMPLE, PER_SAMPLE_MANY),
        "microbatch": (PER_SAMPLE, PER_SAMPLE_MANY),
        "scaling": MANY,
        "mode": tuple(number for number in USE_CASES if number != VALIDATE),
    }
)
PRETRAINED, SAFETENSORS = "pretrained", ".safetensors"
TARGET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}")


SIZES = ("tiny", "full")
MOST = 9_999_999  # largest count that an option accepts
MOST_SESSIONS = 100
MAX = 0  # in place of a batch size: the largest that fits
# Seconds from the start of one session to that of the next. The least leaves half an hour for its pairs: what begins
# within SESSION_SECONDS of another's end joins that session.
SPACING, LEAST_SPACING, MOST_SPACING = 2 * 3600, 3 * SESSION_SECONDS // 2, 14 * 24 * 3600
# What other tools call the same things.
FRAMEWORK_SYNONYMS = {"torch": "pytorch", "pt": "pytorch", "flax": "jax", "xla": "jax"}
PRECISION_SYNONYMS = {
    **dict.fromkeys(("float32", "float", "f32", "single", "32"), "fp32"),
    **dict.fromkeys(("float16", "half", "f16", "amp", "16"), "fp16"),
    **dict.fromkeys(("bfloat16", "mixed"), "bf16"),
    **dict.fromkeys(("tensorfloat32", "tensor_float_32"), "tf32"),
}
DEVICE_SYNONYMS = {"cuda": "gpu", "h100": "gpu", "a100": "gpu", "metal": "mps", "xla": "tpu"}


def benchmark_name(text: str) -> str:
    """Return the catalogue's name for a name or an alias. Raises argparse's error, with the valid names, for others."""
    name = one_of("benchmark", text, (*BENCHMARKS, *ALIASES))
    return ALIASES.get(name, name)


def benchmark_names(text: str) -> tuple[str, ...]:
    """Return one benchmark, or all of them for "all"."""
    return tuple(BENCHMARKS) if text == "all" else (benchmark_name(text),)


def use_case_number(text: str) -> int:
    """Return the number of the use case with this number or name."""
    numbers = {str(case.number): case.number for case in USE_CASES.values()}
    numbers |= {case.name: case.number for case in USE_CASES.values()}
    # The use case of 'validate' is accepted, because its scripts name it, but not offered.
    if text in numbers:
        return numbers[text]
    return numbers[one_of("use case", text, tuple(name for name in numbers if numbers[name] != VALIDATE))]


def use_case_numbers(text: str) -> tuple[int, ...]:
    """Return one use case, or for "all" every one except the validation."""
    if text == "all":
        return tuple(number for number in USE_CASES if number != VALIDATE)
    return (use_case_number(text),)


def batch_size(text: str) -> tuple[int]:
    return (count(text, "batch size"),)


def batch_size_or_max(text: str) -> tuple[int]:
    return (MAX,) if text == "max" else batch_size(text)


def product(text: str) -> tuple[str]:
    """Return the product of per-sample gradients with this name."""
    return (one_of("product", text, tuple(PRODUCTS)),)


def mode(text: str) -> str:
    """Return a mode with its switches; their names may be written with hyphens."""
    for switch in SWITCHES:
        text = text.replace(switch.name.replace("_", "-"), switch.name)
    try:
        return modes.check(text)
    except ValueError as error:
        names = [*modes.MODES, modes.WATERFALL, *(switch.name for switch in SWITCHES)]
        for part in (*re.split("[+=]", text), *re.split("[+=-]", text)):
            guess = "" if part in names else near(part, names)
            if guess:
                raise argparse.ArgumentTypeError(f"{error}; did you mean {text.replace(part, guess)!r}?") from None
        raise argparse.ArgumentTypeError(str(error)) from None


def mode_or_waterfall(text: str) -> str:
    return text if text == modes.WATERFALL else mode(text)


def count(text: str, what: str = "", most: int = MOST) -> int:
    """Return a whole number from 1 to ``most``; ``what`` it counts is named in the error."""
    if not re.fullmatch(r"[0-9]{1,18}", text) or not 1 <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"{what} {text!r} is not a whole number from 1 to {most}".lstrip())
    return int(text)


def sessions(text: str) -> int:
    return count(text, most=MOST_SESSIONS)


def spacing(text: str) -> int:
    """Return the seconds between the starts of two sessions, given in hours or minutes."""
    found = re.fullmatch(r"([0-9]{1,5})(h|m|min)", text)
    seconds = int(found[1]) * (3600 if found[2] == "h" else 60) if found else 0
    if not LEAST_SPACING <= seconds <= MOST_SPACING:
        raise argparse.ArgumentTypeError(
            f"time {text!r}: give hours or minutes, such as 2h or 90m, from {LEAST_SPACING // 60}m "
            f"(a session that begins within 1h of another's end is part of it) to {MOST_SPACING // 3600}h"
        )
    return seconds


def hours(text: str) -> float:
    """Return hours, given as in 40h."""
    found = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)h?", text)
    if not found or not float(found[1]):
        raise argparse.ArgumentTypeError(f"time {text!r}: give hours above 0, such as 40h or 0.5h")
    return float(found[1])


def check_use_cases(parser: argparse.ArgumentParser, args: argparse.Namespace, asked: tuple[int, ...]) -> None:
    """Refuse options that apply to none of the use cases ``asked`` for."""
    for name, takes in {**VARIANTS, "nodes": MANY, "devices": MANY}.items():
        if getattr(args, name) != parser.get_default(name) and not set(takes) & set(asked):
            those = " and ".join(f"{number} ({USE_CASES[number].name})" for number in takes)
            parser.error(f"--{name} applies to use cases {those} only")


def target_name(text: str) -> str:
    """Return a name that is safe in a file name, a directive and a shell word."""
    if not TARGET_NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"target {text!r}: letters, digits, '.', '_' and '-' are valid")
    return text


def folder_name(text: str) -> Path:
    """Return a folder whose name is one printable line."""
    if not text or not text.isprintable():
        raise argparse.ArgumentTypeError(f"folder {text!r} is not one line of printable characters")
    return Path(text)


def weights_source(text: str) -> str:
    """Return ``PRETRAINED``, or a file name that is one printable line."""
    if not text or not text.isprintable():
        raise argparse.ArgumentTypeError(f"weights {text!r}: must be {PRETRAINED!r} or a file")
    return text


def chosen(what: str, valid: tuple[str, ...], synonyms: Mapping[str, str] | None = None) -> Callable[[str], str]:
    """Return a converter that accepts one of ``valid``."""
    return lambda text: one_of(what, text, valid, synonyms)


def add_options(parser: Parser, several: bool = False) -> None:
    """Add the options that say what to measure, the same for main.py and run.py; ``several`` values for the former."""
    add_what(parser, several)
    _add_how(parser, several)
    _add_where(parser)


def add_what(parser: Parser, several: bool) -> None:
    what = parser.add_argument_group("what")
    if several:
        what.add_argument(
            "--benchmark",
            action=Several,
            convert=benchmark_names,
            metavar="NAME",
            help="one or several benchmarks, or all ('main.py help benchmarks' lists them)",
        )
        what.add_argument(
            "--use_case",
            action=Several,
            convert=use_case_numbers,
            metavar="N",
            help="one or several use cases by number or name, or all ('main.py help use_cases')",
        )
    else:
        what.add_argument("--benchmark", type=benchmark_name, metavar="NAME", help=", ".join(BENCHMARKS))
        cases = ", ".join(f"{case.number} {case.name}" for case in USE_CASES.values() if case.number != VALIDATE)
        what.add_argument("--use_case", type=use_case_number, metavar="N", help=cases)
    what.add_argument(
        "--size", type=chosen("size", SIZES), metavar="NAME", help="model size: tiny or full (default: the preset's)"
    )
    what.add_argument(
        "--batch_sizes",
        action=Several,
        convert=batch_size_or_max if several else batch_size,
        default=(),
        metavar="N",
        help="comma-separated batch sizes, one row each: per device under weak scaling, in total with --dataset "
        "(default: the recipe's or the catalogue's); max: the largest that 'main.py fit' found to fit",
    )
    what.add_argument(
        "--products",
        action=Several,
        convert=product,
        default=(),
        metavar="NAME",
        help=f"what to compute from per-sample gradients: {', '.join(PRODUCTS)} (default: all)",
    )
    what.add_argument(
        "--microbatch",
        type=count,
        metavar="N",
        help="samples whose gradients are computed at once, a divisor of the batch size (default: what fits)",
    )
    what.add_argument(
        "--weights",
        type=weights_source,
        metavar="SOURCE",
        help=f"initial weights: {PRETRAINED} (torchvision's), or a checkpoint file (default: drawn from the seed)",
    )


def _add_how(parser: Parser, several: bool) -> None:
    how = parser.add_argument_group("how")
    names = [name for name in PRESETS if name not in HIDDEN or not several]
    how.add_argument(
        "--preset",
        type=chosen("preset", tuple(names)),
        default="standard",
        metavar="NAME",
        help=f"how long and how often to measure: {', '.join(names)} (default: standard)",
    )
    add_precision(how)
    add_mode(how, several)


def add_mode(parser: argparse._ActionsContainer, several: bool = False) -> None:
    known = ", ".join([*modes.MODES, *([modes.WATERFALL] if several else [])])
    parser.add_argument(
        "--mode",
        type=mode_or_waterfall if several else mode,
        default=modes.DEFAULT,
        metavar="NAME",
        help=f"{known}; + and - turn switches on and off, as in default+compile ('main.py help modes')",
    )


def add_precision(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--precision",
        type=chosen("precision", tuple(PRECISIONS), PRECISION_SYNONYMS),
        default="fp32",
        metavar="NAME",
        help=f"precision of both sides: {', '.join(PRECISIONS)} (default: fp32)",
    )


def add_device(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--device",
        type=chosen("device", DEVICE_KINDS, DEVICE_SYNONYMS),
        metavar="NAME",
        help=f"kind of device: {', '.join(DEVICE_KINDS)} (default: the best the job finds)",
    )


def _add_where(parser: Parser) -> None:
    where = parser.add_argument_group("where")
    add_device(where)
    where.add_argument(
        "--nodes",
        type=count,
        metavar="N",
        help="number of nodes, for use cases 2 and 4 (default: 1, or 2 of one device each where the target has them)",
    )
    where.add_argument(
        "--devices", type=count, metavar="N", help="devices per node, for use cases 2 and 4 (default: all)"
    )
    where.add_argument(
        "--scaling",
        type=chosen("scaling", tuple(SCALINGS)),
        default=WEAK,
        metavar="NAME",
        help="weak: fixed batch per device; strong: fixed total batch (default: weak)",
    )


FILTERS = ("benchmark", "framework", "target", "state", "group", "user")


def add_selection(parser: Parser, done: str) -> None:
    """Add the options that select runs, the same for all commands that take several; ``done``: what becomes of them."""
    parser.add_argument("runs", metavar="RUN", nargs="*", help=f"run ids or prefixes of them; only these are {done}")
    types: dict[str, Callable[[str], str]] = {
        "benchmark": benchmark_name,
        "framework": chosen("framework", (*FRAMEWORKS, "paired"), FRAMEWORK_SYNONYMS),
        "state": chosen("state", STATES),
    }
    for name in FILTERS:
        parser.add_argument(f"--{name}", type=types.get(name, str), metavar="NAME", help=f"only runs with this {name}")


def has_selection(args: argparse.Namespace) -> bool:
    """Whether any option of ``add_selection`` is given."""
    return bool(args.runs) or any(getattr(args, name) is not None for name in FILTERS)
