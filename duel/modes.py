"""Modes: named sets of switches.

A mode is written as a name, followed by the switches that differ from it: ``default``, ``tuned``,
``default+channels_last``, ``tuned-compile``, ``default+threads=1``. Both sides of a pair get the same mode; a switch
that one side does not have leaves that side as it is.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from duel.catalogue import FRAMEWORKS, MANY, USE_CASES
from duel.errors import UserError
from duel.switches import AS_PASSED, OFF, ON, SWITCHES, THREADS, Switch, applicable, default_value

HALF = ("bf16", "fp16")

DEFAULT, TUNED, COMPILE, OPACUS = "default", "tuned", "compile", "opacus"
WATERFALL = "waterfall"  # not the mode of a row, but a series of modes: see ``waterfall``
MODES: Mapping[str, str] = MappingProxyType(
    {
        DEFAULT: "what a newcomer gets: JAX compiles a step, PyTorch runs it operation by operation",
        TUNED: "the fastest switches that 'tune' found on the device; without a search, the built-in set for that kind "
        "of device",
        COMPILE: "both compile the step: jax.jit, torch.compile",
        OPACUS: "per-sample gradients in PyTorch by the hooks of Opacus ('make opacus' installs it)",
    }
)
# The switches that ``tuned`` sets without a search, where they apply: (framework, device kind).
_COMPILED = {"compile": ON, "channels_last": ON, "fused_optimizer": ON}
_TUNED: Mapping[tuple[str, str], Mapping[str, str]] = MappingProxyType(
    {
        ("pytorch", "cpu"): _COMPILED,
        ("pytorch", "mps"): _COMPILED,
        ("pytorch", "gpu"): _COMPILED | {"cudnn_benchmark": ON, "cuda_graphs": ON},
        ("jax", "gpu"): {"latency_hiding": ON},
        # XLA's CPU compiler computes a grouped convolution channel by channel: on two AMD cores (busy ones) sums of
        # shifted products were 3.6 to 9.8 times as fast in inference and 3.4 to 4.0 times with gradients, in
        # MobileNetV3-Small and EfficientNet-B0 at both sizes.
        ("jax", "cpu"): {"depthwise": "shifted"},
    }
)
_STEP = re.compile(r"([+-])([a-z_]+)(?:=([a-z0-9_]+))?")

# After a crash of XLA's autotuner on a GPU: what is turned off next, each in a new process. The last one also turns off
# the search among cuDNN's and cuBLAS's kernels: such a row is handicapped, and no ratio is made of it.
RUNGS: tuple[Mapping[str, str], ...] = (
    {"triton_gemm": OFF},
    {"triton_gemm": OFF},  # and another precision of products, see ``rung_precision``
    {"triton_gemm": OFF, "autotune": "2"},
    {"triton_gemm": OFF, "autotune": "0"},
)
OTHER_PRODUCTS, HANDICAPPED = 2, len(RUNGS)


def check(mode: str) -> str:
    """Return ``mode`` unchanged. Raises ValueError, with what would be valid, if it is not a mode."""
    name, steps = _split(mode)
    if name not in MODES:
        raise ValueError(
            f"unknown mode {name!r}; valid: {', '.join(MODES)}, optionally followed by switches, as in default+compile"
        )
    turned = _named(name)
    for text, switch, value in steps:
        default_value(switch)  # raises ValueError for an unknown name
        known = [one for one in SWITCHES if one.name == switch]
        if not any(one.takes(value) for one in known):
            valid = [v for one in known for v in one.values] + ["a number" for one in known if one.counts]
            signs = f"; +{switch} and -{switch} stand for on and off" if {ON, OFF} <= set(valid) else ""
            raise ValueError(f"{text}: expected +{switch}=VALUE with one of {', '.join(dict.fromkeys(valid))}{signs}")
        if turned.setdefault(switch, value) != value:
            raise ValueError(f"mode {mode!r} contradicts itself: {switch} is {turned[switch]} and {value}")
    return mode


def _split(mode: str) -> tuple[str, list[tuple[str, str, str]]]:
    """Return a mode's name, and the text, name and value of each switch it sets."""
    name = re.split(r"[+-]", mode, maxsplit=1)[0]
    steps = [(m[0], m[2], m[3] or (ON if m[1] == "+" else OFF)) for m in _STEP.finditer(mode, len(name))]
    if name + "".join(text for text, _, _ in steps) != mode:
        raise ValueError(f"mode {mode!r}: expected a name, then +switch, -switch or +switch=value")
    return name, steps


def spelled(name: str, values: Mapping[str, str]) -> str:
    """Return the mode ``name`` with each of these switches set."""
    return name + "".join(
        {ON: f"+{one}", OFF: f"-{one}"}.get(value, f"+{one}={value}") for one, value in values.items()
    )


def is_tuned(mode: str) -> bool:
    """Return whether ``mode`` is ``tuned``, with or without switches after it."""
    return _split(mode)[0] == TUNED


def in_place(mode: str, choice: str, framework: str) -> str:
    """Return ``mode`` with ``tuned`` replaced by ``choice``, less what a switch of ``mode`` rules out."""
    if not is_tuned(mode):
        return mode
    name, steps = _split(choice)
    asked = asked_for(mode)[1]
    texts = [text for text, switch, _ in steps if switch not in _left_out(asked)]
    if _is_deterministic_pytorch(framework, asked):
        texts = [text.replace("attention=cudnn", "attention=flash") for text in texts]
    return name + "".join(texts) + mode.removeprefix(TUNED)


def _is_deterministic_pytorch(framework: str, values: Mapping[str, str]) -> bool:
    """Return whether cuDNN's attention is ruled out, which PyTorch counts among what is not deterministic."""
    return framework == "pytorch" and values.get("deterministic") == ON


def _left_out(asked: Mapping[str, str]) -> set[str]:
    """Return the switches that need one which ``asked`` turns off, unless it sets them itself."""
    return {one.name for one in SWITCHES if asked.get(one.needs) == OFF and one.name not in asked}


def _named(name: str) -> dict[str, str]:
    """Return the switch that a mode is named after."""
    return {name: ON} if name in (COMPILE, OPACUS) else {}


def asked_for(mode: str) -> tuple[str, dict[str, str]]:
    """Return the mode's name, and the switches that it sets by name."""
    name, steps = _split(mode)
    return name, _named(name) | {switch: value for _, switch, value in steps}


def refuse(mode: str, benchmark: str, use_case: int) -> None:
    """Raise UserError if ``mode`` sets a switch, or gives it a value, that neither framework has for this use case."""
    what = f"{USE_CASES[use_case].name} of {benchmark}"
    if use_case in MANY and THREADS in asked_for(mode)[1]:
        valid = ", ".join(str(number) for number in USE_CASES if number and number not in MANY)
        raise UserError(
            f"--mode {mode}: {THREADS} limits one process, and {what} has several; valid: use cases {valid}"
        )
    there = [switch for switch in SWITCHES if switch.applies(benchmark, use_case)]
    for name, value in asked_for(mode)[1].items():
        mine = [switch for switch in there if switch.name == name]  # of each framework and kind of device
        if not mine:
            valid = ", ".join(dict.fromkeys(switch.name for switch in there))
            raise UserError(f"--mode {mode}: switch {name} does not apply to {what}; valid: {valid}")
        if not any(switch.takes(value) for switch in mine):
            valid = ", ".join(dict.fromkeys(known for switch in mine for known in switch.values))
            raise UserError(f"--mode {mode}: {value} is not a value of {name} for {what}; valid: {valid}")


def settings(
    mode: str,
    framework: str,
    benchmark: str,
    use_case: int,
    precision: str,
    device_kind: str,
    rung: int = 0,
    cudnn: bool = True,
) -> dict[str, str]:
    """Return every switch that ``framework`` has for this, with its value under ``mode``.

    Raises UserError if the mode sets a switch that this side has, but not here, or if switches cannot be combined.
    ``rung`` is how far down the ladder of ``RUNGS`` crashes have led; ``cudnn``: whether a GPU has it, NVIDIA's do.
    """
    here = applicable(framework, benchmark, use_case, device_kind)
    name, asked = asked_for(mode)
    tuned = dict(_TUNED.get((framework, device_kind), {}))
    half = rung_precision(rung, precision) in HALF
    if device_kind == "gpu":  # 16 bits: cuDNN's kernel, which takes no others, where a side has it; else the plain one
        has = "attention" in here and here["attention"].takes("cudnn")
        tuned["attention"] = "cudnn" if half and cudnn and has else "math"
    values = {switch.name: switch.values[0] for switch in here.values()}
    set_here = here.keys() - _left_out(asked)
    values |= {switch: value for switch, value in tuned.items() if name == TUNED and switch in set_here}
    for switch, value in asked.items():
        if not any(one.name == switch and one.framework == framework for one in SWITCHES):
            continue  # the other side's
        if switch not in here:
            what = f"{USE_CASES[use_case].name} of {benchmark} on a {device_kind}"
            raise UserError(f"--mode {mode}: switch {switch} does not apply to {what}; valid: {', '.join(here)}")
        if not here[switch].takes(value):
            valid = ", ".join(here[switch].values)
            raise UserError(
                f"--mode {mode}: {value} is not a value of {switch} in {framework} on a {device_kind}; valid: {valid}"
            )
        values[switch] = value
    if rung:
        values |= {switch: value for switch, value in RUNGS[rung - 1].items() if switch in here}
    if values.get("attention") == "cudnn" and _is_deterministic_pytorch(framework, values):
        if "attention" in asked:
            raise UserError(f"--mode {mode}: attention=cudnn is not deterministic; valid: attention=flash or math")
        values["attention"] = "flash"
    if device_kind == "gpu":
        _refuse_attention(mode, values.get("attention"), half, cudnn)
    _refuse_combinations(mode, values, here)
    return values


def _refuse_attention(mode: str, kernel: str | None, half: bool, cudnn: bool) -> None:
    """Raise UserError if a GPU's ``kernel`` of attention does not take the precision or is not there."""
    if not half and kernel in ("cudnn", "flash"):
        raise UserError(
            f"--mode {mode}: attention={kernel} needs a 16-bit precision; valid: --precision {' or '.join(HALF)}"
        )
    if not cudnn and kernel == "cudnn":
        raise UserError(f"--mode {mode}: attention=cudnn needs an NVIDIA GPU; valid: attention=math")


def _refuse_combinations(mode: str, values: Mapping[str, str], here: Mapping[str, Switch]) -> None:
    """Raise UserError if switches need or exclude others that are not set so."""
    asked = asked_for(mode)[1]
    for one in here.values():
        if values[one.name] == ON and one.needs and values.get(one.needs) != ON:
            valid = f"{mode}+{one.needs}" if one.name in asked else f"{mode}-{one.name}"
            valid = "both of them, or neither" if one.name in asked and one.needs in asked else valid
            raise UserError(f"--mode {mode}: switch {one.name} needs {one.needs}; valid: {valid}")
        if values[one.name] == ON and one.excludes and values.get(one.excludes) == ON:
            valid = "one of them" if one.excludes in asked else f"{mode}-{one.excludes}"
            raise UserError(f"--mode {mode}: switches {one.name} and {one.excludes} cannot be combined; valid: {valid}")


@dataclass(frozen=True)
class Turn:
    """A switch between ``DEFAULT`` and ``TUNED``: the modes (without it, with it) when it is turned on before all
    others, and when it is turned on after them."""

    switch: str
    first: tuple[str, str]
    last: tuple[str, str]


def waterfall(benchmark: str, use_case: int, precision: str, device_kind: str) -> list[Turn]:
    """Return what leads from ``DEFAULT`` to ``TUNED``, one switch at a time.

    A switch that needs another is turned on right after that one, and turned off with it.
    """
    found: dict[str, set[tuple[str, str]]] = {}
    for framework in FRAMEWORKS:
        here = (framework, benchmark, use_case, precision, device_kind)
        default, tuned = settings(DEFAULT, *here), settings(TUNED, *here)
        for name in (name for name, value in default.items() if tuned[name] != value):
            found.setdefault(name, set()).add((default[name], tuned[name]))
    # No mode turns a switch to other values on the two sides: such a one is left over.
    turned = {name: values.pop() for name, values in found.items() if len(values) == 1}
    if len(turned) == 1:  # before all others and after them are the same
        return [Turn(switch, (DEFAULT, TUNED), (DEFAULT, TUNED)) for switch in turned]
    needs = {one.name: one.needs for one in SWITCHES if one.name in turned and one.needs in turned}

    def mode(name: str, switches: list[str], on: bool) -> str:
        return spelled(name, {switch: turned[switch][on] for switch in switches})

    turns = []
    for switch in turned:
        before = [needs[switch]] if switch in needs else []
        leaves = [switch, *(other for other in needs if needs[other] == switch)]
        first = mode(DEFAULT, before, True), mode(DEFAULT, [*before, switch], True)
        turns.append(Turn(switch, first, (mode(TUNED, leaves, False), TUNED)))
    return turns


def of_waterfall(turns: list[Turn]) -> list[str]:
    """Return the modes that ``turns`` compare, in the order in which they are measured."""
    return list(dict.fromkeys([DEFAULT, *(mode for t in turns for mode in (*t.first, *t.last[:1])), TUNED]))


def rung_precision(rung: int, precision: str) -> str:
    """Return the policy on a rung of the ladder: from ``OTHER_PRODUCTS`` on, one whose products have not crashed."""
    return "fp32" if rung >= OTHER_PRODUCTS and precision != "bf16" else precision


def next_rung(rung: int, precision: str) -> int | None:
    """Return the next rung after ``rung`` that changes anything, or None after the last."""
    following = rung + 1
    if following == OTHER_PRODUCTS and rung_precision(following, precision) == precision:
        following += 1
    return following if following <= HANDICAPPED else None


def said(values: Mapping[str, str]) -> str:
    """Return switches and their values as text, as rows have them."""
    return " ".join(f"{name}={value}" for name, value in sorted(values.items()))


def in_force(values: Mapping[str, str], seen: Mapping[str, tuple[str, str]]) -> dict[str, str]:
    """Return what proves each switch: ``seen`` maps a switch to the value that was found, and what showed it.

    Raises UserError if the value found is not the one that was set. A switch without proof is "as passed".
    """
    proofs = {}
    for name, value in sorted(values.items()):
        found, shown_by = seen.get(name, (value, AS_PASSED))
        if found != value and value != "framework":
            raise UserError(f"switch {name} did not take: {value} was set, {found} was found ({shown_by})")
        proofs[name] = shown_by if found == value else f"{found} ({shown_by})"
    return proofs
