"""The options that main.py and run.py share: what is measured, checked against the catalogue.

Kept apart from what obeys them, so that a wrong option is answered at once.
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
    MANY,
    PER_SAMPLE,
    PER_SAMPLE_MANY,
    PRECISIONS,
    PRESETS,
    PRODUCTS,
    SCALINGS,
    SESSION_SECONDS,
    TRIAL,
    USE_CASES,
    VALIDATE,
    WEAK,
)
from duel.states import STATES
from duel.switches import SWITCHES

# Options of some use cases alone, called as in ``duel.job.Job``, and of which.
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
MOST = 9_999_999  # of anything that is counted
MOST_SESSIONS = 100
SPACING, MOST_SPACING = 2 * 3600, 14 * 24 * 3600  # seconds from the start of a session to the next
# Names that others have for ours.
FRAMEWORK_SYNONYMS = {"torch": "pytorch", "pt": "pytorch", "flax": "jax", "xla": "jax"}
PRECISION_SYNONYMS = {
    **dict.fromkeys(("float32", "float", "f32", "single", "32"), "fp32"),
    **dict.fromkeys(("float16", "half", "f16", "amp", "16"), "fp16"),
    **dict.fromkeys(("bfloat16", "mixed"), "bf16"),
    **dict.fromkeys(("tensorfloat32", "tensor_float_32"), "tf32"),
}
DEVICE_SYNONYMS = {"cuda": "gpu", "h100": "gpu", "a100": "gpu", "metal": "mps", "xla": "tpu"}


def benchmark_name(text: str) -> str:
    """A benchmark of the catalogue, by its name or an alias. Raises argparse's error with the valid names otherwise."""
    name = one_of("benchmark", text, (*BENCHMARKS, *ALIASES))
    return ALIASES.get(name, name)


def benchmark_names(word: str) -> tuple[str, ...]:
    """One benchmark, or all of them for "all"."""
    return tuple(BENCHMARKS) if word == "all" else (benchmark_name(word),)


def use_case_number(text: str) -> int:
    """A use case by number or name."""
    numbers = {str(case.number): case.number for case in USE_CASES.values()}
    numbers |= {case.name: case.number for case in USE_CASES.values()}
    # What 'validate' starts is understood, since its scripts say it, but not offered.
    if text in numbers:
        return numbers[text]
    return numbers[one_of("use case", text, tuple(name for name in numbers if numbers[name] != VALIDATE))]


def use_case_numbers(word: str) -> tuple[int, ...]:
    """One use case, or all of them for "all"."""
    if word == "all":
        return tuple(number for number in USE_CASES if number != VALIDATE)
    return (use_case_number(word),)


def batch_size(word: str) -> tuple[int]:
    return (count(word, "batch size"),)


def product(word: str) -> tuple[str]:
    """A product of per-sample gradients."""
    return (one_of("product", word, tuple(PRODUCTS)),)


def mode(text: str) -> str:
    """A mode, with the switches that are turned from there; switches may be written with hyphens."""
    for switch in SWITCHES:
        text = text.replace(switch.name.replace("_", "-"), switch.name)
    try:
        return modes.check(text)
    except ValueError as error:
        names = [*modes.MODES, modes.WATERFALL, *(switch.name for switch in SWITCHES)]
        for word in (*re.split("[+=]", text), *re.split("[+=-]", text)):
            guess = "" if word in names else near(word, names)
            if guess:
                raise argparse.ArgumentTypeError(f"{error}; did you mean {text.replace(word, guess)!r}?") from None
        raise argparse.ArgumentTypeError(str(error)) from None


def mode_or_waterfall(text: str) -> str:
    return text if text == modes.WATERFALL else mode(text)


def count(text: str, what: str = "number", most: int = MOST) -> int:
    """A number from 1 on."""
    if not re.fullmatch(r"[0-9]{1,18}", text) or not 1 <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"{what} {text!r}: whole numbers from 1 to {most} are valid")
    return int(text)


def sessions(text: str) -> int:
    return count(text, most=MOST_SESSIONS)


def spacing(text: str) -> int:
    """Seconds between the starts of two sessions, of a number of hours or minutes."""
    found = re.fullmatch(r"([0-9]{1,5})(h|m|min)", text)
    seconds = int(found[1]) * (3600 if found[2] == "h" else 60) if found else 0
    if not SESSION_SECONDS <= seconds <= MOST_SPACING:
        raise argparse.ArgumentTypeError(
            f"time {text!r}: hours or minutes such as 2h or 90m are valid, from {SESSION_SECONDS // 3600}h, "
            f"below which two sessions are one, to {MOST_SPACING // 3600}h"
        )
    return seconds


def check_use_cases(parser: argparse.ArgumentParser, args: argparse.Namespace, asked: tuple[int, ...]) -> None:
    """Refuse options that are for none of the use cases that are ``asked`` for."""
    for name, takes in {**VARIANTS, "nodes": MANY, "devices": MANY}.items():
        if getattr(args, name) != parser.get_default(name) and not set(takes) & set(asked):
            those = " and ".join(f"{number} ({USE_CASES[number].name})" for number in takes)
            parser.error(f"--{name} applies to use cases {those} only")


def target_name(text: str) -> str:
    """A name that is safe in a file name, a directive and a shell word."""
    if not TARGET_NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"target {text!r}: letters, digits, '.', '_' and '-' are valid")
    return text


def folder_name(text: str) -> Path:
    """A folder in one printable line."""
    if not text or not text.isprintable():
        raise argparse.ArgumentTypeError(f"folder {text!r}: one line of printable characters is valid")
    return Path(text)


def weights_source(text: str) -> str:
    """``PRETRAINED``, or a file's name in one printable line."""
    if not text or not text.isprintable():
        raise argparse.ArgumentTypeError(f"weights {text!r}: {PRETRAINED!r} or a file is valid")
    return text


def chosen(what: str, valid: tuple[str, ...], synonyms: Mapping[str, str] | None = None) -> Callable[[str], str]:
    """A converter to one of ``valid``."""
    return lambda text: one_of(what, text, valid, synonyms)


def add_options(parser: Parser, several: bool = False) -> None:
    """The options that say what is measured, the same for main.py and run.py; ``several`` at once for the former."""
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
        "--size", type=chosen("size", SIZES), metavar="NAME", help="of the model: tiny or full (default: the preset's)"
    )
    what.add_argument(
        "--batch_sizes",
        action=Several,
        convert=batch_size,
        default=(),
        metavar="N",
        help="samples per step, one row each; per device under weak scaling (default: what fits the device)",
    )
    what.add_argument(
        "--products",
        action=Several,
        convert=product,
        default=(),
        metavar="NAME",
        help=f"of per-sample gradients: {', '.join(PRODUCTS)} (default: all)",
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
    names = [name for name in PRESETS if name != TRIAL or not several]
    how.add_argument(
        "--preset",
        type=chosen("preset", tuple(names)),
        default="standard",
        metavar="NAME",
        help=f"how long and how often to measure: {', '.join(names)} (default: standard)",
    )
    add_precision(how)
    known = ", ".join([*modes.MODES, *([modes.WATERFALL] if several else [])])
    how.add_argument(
        "--mode",
        type=mode_or_waterfall if several else mode,
        default=modes.DEFAULT,
        metavar="NAME",
        help=f"{known}; switches are turned by + and -, as in default+compile ('main.py help modes')",
    )


def add_precision(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--precision",
        type=chosen("precision", tuple(PRECISIONS), PRECISION_SYNONYMS),
        default="fp32",
        metavar="NAME",
        help=f"of both sides: {', '.join(PRECISIONS)} (default: fp32)",
    )


def add_device(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--device",
        type=chosen("device", DEVICE_KINDS, DEVICE_SYNONYMS),
        metavar="NAME",
        help=f"kind of device: {', '.join(DEVICE_KINDS)} (default: the best that the job finds)",
    )


def _add_where(parser: Parser) -> None:
    where = parser.add_argument_group("where")
    add_device(where)
    where.add_argument("--nodes", type=count, metavar="N", help="for use cases 2 and 4 (default: 1)")
    where.add_argument("--devices", type=count, metavar="N", help="per node, for use cases 2 and 4 (default: all)")
    where.add_argument(
        "--scaling",
        type=chosen("scaling", tuple(SCALINGS)),
        default=WEAK,
        metavar="NAME",
        help="weak: the batch of each device stays the same; strong: the batch of all (default: weak)",
    )


FILTERS = ("benchmark", "framework", "target", "state", "group", "user")


def add_selection(parser: Parser, done: str) -> None:
    """The options that choose runs, the same for every command that takes several. ``done``: what becomes of them."""
    parser.add_argument("runs", metavar="RUN", nargs="*", help=f"run ids, or how they begin; only these are {done}")
    types: dict[str, Callable[[str], str]] = {
        "benchmark": benchmark_name,
        "framework": chosen("framework", (*FRAMEWORKS, "paired"), FRAMEWORK_SYNONYMS),
        "state": chosen("state", STATES),
    }
    for name in FILTERS:
        parser.add_argument(f"--{name}", type=types.get(name, str), metavar="NAME", help=f"only runs of this {name}")


def has_selection(args: argparse.Namespace) -> bool:
    """Whether the options of ``add_selection`` choose anything."""
    return bool(args.runs) or any(getattr(args, name) is not None for name in FILTERS)
