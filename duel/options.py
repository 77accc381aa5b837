"""The options that main.py and run.py share: what is measured, checked against the catalogue.

Kept apart from what obeys them, so that a wrong option is answered at once.
"""

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from duel import modes
from duel.catalogue import (
    ALIASES,
    BENCHMARKS,
    DEVICE_KINDS,
    MANY,
    PER_SAMPLE,
    PER_SAMPLE_MANY,
    PRECISIONS,
    PRESETS,
    PRODUCTS,
    SCALINGS,
    USE_CASES,
    VALIDATE,
    WEAK,
)
from duel.record import STATUSES

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


def benchmark_name(text: str) -> str:
    """A benchmark of the catalogue, by its name or an alias. Raises argparse's error with the valid names otherwise."""
    return _one_of("benchmark", ALIASES.get(text, text), (*BENCHMARKS, *ALIASES))


def benchmark_names(text: str) -> tuple[str, ...]:
    """Benchmarks, separated by commas; all of them for "all"."""
    if text == "all":
        return tuple(BENCHMARKS)
    valid = (*BENCHMARKS, *ALIASES, "all")
    return tuple(dict.fromkeys(_one_of("benchmark", ALIASES.get(name, name), valid) for name in text.split(",")))


def use_case_number(text: str) -> int:
    """A use case by number or name."""
    names = {str(u.number): u.number for u in USE_CASES.values()} | {u.name: u.number for u in USE_CASES.values()}
    # What 'validate' starts is understood, since its scripts say it, but not offered.
    return names[text] if text in names else names[_one_of("use case", text, tuple(n for n in names if names[n]))]


def use_case_numbers(text: str) -> tuple[int, ...]:
    """Use cases by number or name, separated by commas; all of them for "all"."""
    if text == "all":
        return tuple(number for number in USE_CASES if number != VALIDATE)
    return tuple(dict.fromkeys(use_case_number(name) for name in text.split(",")))


def batch_sizes(text: str) -> tuple[int, ...]:
    """Numbers from 1 on, separated by commas."""
    numbers = text.split(",")
    for number in numbers:
        if not re.fullmatch(r"[1-9]\d{0,6}", number):
            raise argparse.ArgumentTypeError(f"{number!r} is no batch size; valid: numbers from 1 on, such as 1,8,32")
    return tuple(dict.fromkeys(map(int, numbers)))


def products(text: str) -> tuple[str, ...]:
    """Products of per-sample gradients, separated by commas."""
    return tuple(dict.fromkeys(_one_of("product", name, tuple(PRODUCTS)) for name in text.split(",")))


def mode(text: str) -> str:
    """A mode, with the switches that are turned from there."""
    try:
        return modes.check(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def count(text: str) -> int:
    """A number from 1 on."""
    if not re.fullmatch(r"[1-9]\d{0,6}", text):
        raise argparse.ArgumentTypeError(f"{text!r}: a number from 1 on is valid")
    return int(text)


def check_use_cases(parser: argparse.ArgumentParser, args: argparse.Namespace, asked: tuple[int, ...]) -> None:
    """Refuse options that are for none of the use cases that are ``asked`` for."""
    for name, takes in {**VARIANTS, "nodes": MANY, "devices": MANY}.items():
        if getattr(args, name) != parser.get_default(name) and not set(takes) & set(asked):
            those = " and ".join(f"{number} ({USE_CASES[number].name})" for number in takes)
            parser.error(f"--{name} is for use cases {those} alone")


def target_name(text: str) -> str:
    """A name that is safe in a file name, a directive and a shell word."""
    if not TARGET_NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no target's name: letters, digits, '.', '_' and '-' are valid")
    return text


def folder_name(text: str) -> Path:
    """A folder in one printable line."""
    if not text or not text.isprintable():
        raise argparse.ArgumentTypeError(f"{text!r} is no folder's name: one line of printable characters is valid")
    return Path(text)


def weights_source(text: str) -> str:
    """``PRETRAINED``, or a file's name in one printable line."""
    if not text or not text.isprintable():
        raise argparse.ArgumentTypeError(f"{text!r} is no file's name: '{PRETRAINED}' or a file is valid")
    return text


def _one_of(what: str, text: str, valid: tuple[str, ...]) -> str:
    if text not in valid:
        raise argparse.ArgumentTypeError(f"unknown {what} {text!r}; valid: {', '.join(valid)}")
    return text


def add_options(parser: argparse.ArgumentParser, several: bool = False) -> None:
    """The options that say what is measured, the same for main.py and run.py; ``several`` at once for the former."""

    def option(name: str, valid: tuple[str, ...], default: str | None, text: str) -> None:
        words = f"{text} ({', '.join(valid)}; default: {default or 'the best the job finds'})"
        parser.add_argument(
            name, type=lambda given: _one_of(name, given, valid), default=default, metavar="NAME", help=words
        )

    more = "; or several, separated by commas, or all" if several else ""
    parser.add_argument(
        "--benchmark",
        type=benchmark_names if several else benchmark_name,
        metavar="NAME",
        help=f"what to run ({', '.join(BENCHMARKS)}{more})",
    )
    cases = ", ".join(f"{u.number} {u.name}" for u in USE_CASES.values() if u.number != VALIDATE)
    parser.add_argument(
        "--use_case",
        type=use_case_numbers if several else use_case_number,
        metavar="N",
        help=f"how to run it ({cases}{more})",
    )
    option("--preset", tuple(PRESETS), "standard", "how long and how often to measure")
    parser.add_argument(
        "--size",
        choices=("tiny", "full"),
        help="of the model (default: the preset's, " + "; ".join(f"{p.name} {p.size}" for p in PRESETS.values()) + ")",
    )
    option("--precision", tuple(PRECISIONS), "fp32", "precision policy of both sides")
    parser.add_argument(
        "--batch_sizes",
        type=batch_sizes,
        default=(),
        metavar="N,N",
        help="samples per step, each a row of its own; of weak scaling on each device (default: what fits the device; "
        "of inference the preset's, "
        + "; ".join(f"{p.name} {','.join(map(str, p.batch_sizes))}" for p in PRESETS.values())
        + ")",
    )
    parser.add_argument(
        "--products",
        type=products,
        default=(),
        metavar="NAME,NAME",
        help=f"of per-sample gradients ({', '.join(PRODUCTS)}; default: each of them)",
    )
    parser.add_argument(
        "--microbatch",
        type=count,
        metavar="N",
        help="samples whose gradients are made at once, a divisor of the batch size (default: what fits the device)",
    )
    parser.add_argument("--nodes", type=count, metavar="N", help="of use cases with many devices (default: 1)")
    parser.add_argument(
        "--devices", type=count, metavar="N", help="on each node, of these use cases (default: all that it has)"
    )
    words = "; ".join(f"{name}: {text}" for name, text in modes.MODES.items())
    waterfall = f"{modes.WATERFALL}: all from default to tuned, a switch at a time, with --paired; " if several else ""
    parser.add_argument(
        "--mode",
        type=lambda given: given if several and given == modes.WATERFALL else mode(given),
        default=modes.DEFAULT,
        metavar="NAME",
        help=f"{words}; {waterfall}and from there switches, as in default+compile, tuned-channels_last, "
        f"default+threads=1: {', '.join(dict.fromkeys(switch.name for switch in modes.SWITCHES))} "
        f"(default: {modes.DEFAULT})",
    )
    words = "; ".join(f"{name}: {text}" for name, text in SCALINGS.items())
    option("--scaling", tuple(SCALINGS), WEAK, f"what stays the same as devices are added, {words}")
    option("--device", DEVICE_KINDS, None, "kind of device")
    parser.add_argument(
        "--weights",
        type=weights_source,
        metavar="SOURCE",
        help=f"initial weights of both sides: '{PRETRAINED}' (torchvision's own), or a file: a checkpoint in "
        f"torchvision's format or {SAFETENSORS} (default: made from the seed)",
    )


FILTERS = ("benchmark", "framework", "target", "state", "group")


def add_selection(parser: argparse.ArgumentParser, done: str) -> None:
    """The options that choose runs, the same for every command that takes several; ``done`` says what becomes of them.

    Kept under names of their own: the options that start a job are called the same.
    """
    parser.add_argument("runs", metavar="RUN", nargs="*", help=f"only these are {done}: run ids, or how they begin")
    for name in FILTERS:
        choices = STATUSES if name == "state" else None
        parser.add_argument(
            f"--{name}", dest=f"only_{name}", choices=choices, metavar="NAME", help=f"only runs of this {name}"
        )


def has_selection(args: argparse.Namespace) -> bool:
    """Whether the options of ``add_selection`` say anything."""
    return bool(args.runs) or any(getattr(args, f"only_{name}") is not None for name in FILTERS)
