"""What a report says in sentences, made of the verdicts."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from duel.catalogue import USE_CASES
from duel.modes import MODES
from duel.report import appendix
from duel.report.figure_data import label, work
from duel.report.pairs import EQUAL, FASTER, UNDECIDED
from duel.report.points import Line, against_itself
from duel.report.study import Study

METHOD = """
Each point is measured in pairs: a process of JAX and one of PyTorch, one after the other on the same device, in the
order A B B A. A pair counts only if both processes proved that they computed the same, from the same weights, samples
and precision. The ratio is the geometric mean over sessions, which lie an hour or more apart, with Student's t
interval; what another session may show is its prediction interval. One framework is called faster if the interval
excludes 1 and the ratio is beyond the noise floor.
"""
LIMITS = """
A ratio holds for the devices, versions and modes that stand beside it. Mode default is what a newcomer gets: PyTorch
operation by operation, JAX compiled. Mode tuned is the fastest that a search with the same budget for both sides has
found. Loading and augmenting data is not measured.
"""


def summary(studies: Sequence[Study]) -> list[str]:
    """Paragraphs: who is faster how often, by how much at most, and how far that can be trusted."""
    lines = [line for study in studies for line in study.lines]
    found = []
    for device in dict.fromkeys(line.device_name for line in lines):
        mine = [line for line in lines if line.device_name == device and line.mode in MODES]
        for mode in sorted({line.mode for line in mine}):
            found.append(_of_mode(device, mode, [line for line in mine if line.mode == mode]))
    damaged = [text for study in studies for text in study.damaged]
    return [*found, *_trust(lines), *([f"{len(damaged)} rows cannot be used; {damaged[0]}"] if damaged else [])]


def _of_mode(device: str, mode: str, lines: list[Line]) -> str:
    over = [line for line in lines if line.another_low is not None and line.ratio is not None]
    within = [line for line in lines if line.ratio is not None and line.another_low is None]
    if not over:
        rest = f"{len(within)} were measured in fewer than three sessions" if within else "none has a ratio"
        return f"{device}, mode {mode}: no verdict at any of {len(lines)} points; {rest}."
    kinds = Counter(_kind(line) for line in over)
    words = [f"{name} is faster at {kinds[name]}" for name in ("JAX", "PyTorch") if kinds[name]]
    words += [f"they are {EQUAL} at {kinds[EQUAL]}"] if kinds[EQUAL] else []
    words += [f"it is {UNDECIDED} at {kinds[UNDECIDED]}"] if kinds[UNDECIDED] else []
    text = f"{device}, mode {mode}: of {len(over)} points measured over sessions, {', '.join(words)}."
    for name, best in (("JAX", max), ("PyTorch", min)):
        ahead = [line for line in over if _kind(line) == name]
        if ahead:
            line = best(ahead, key=lambda line: line.ratio or 1.0)
            factor = max(line.ratio or 1.0, 1 / (line.ratio or 1.0))
            text += f" {name} leads most in {work(line)} with {label(line)}: {factor:.3g} times as fast."
    left = len(lines) - len(over)
    return text + (f" At {left} more there is no verdict." if left else "")


def _kind(line: Line) -> str:
    if line.verdict.endswith(FASTER):
        return line.verdict.removesuffix(f" {FASTER}")
    return EQUAL if line.verdict == EQUAL else UNDECIDED


def _trust(lines: Sequence[Line]) -> list[str]:
    texts = []
    for framework, name in (("jax", "JAX"), ("pytorch", "PyTorch")):
        differs, known = against_itself(lines, framework)
        if known:
            texts.append(f"{name} differs from itself at {differs} of {known} points")
    return [f"By the same procedure {', '.join(texts)}; chance alone would make it 5 %."] if texts else []


def sections(studies: Sequence[Study]) -> list[dict[str, Any]]:
    """What follows the points: method, limits."""
    use_cases = ", ".join(
        f"{use_case.name} ({use_case.meaning})"
        for number, use_case in USE_CASES.items()
        if any(line.use_case == use_case.name for study in studies for line in study.lines)
    )
    method = [METHOD, f"Use cases: {use_cases}."]
    return [
        {"id": "method", "title": "Method", "paragraphs": method},
        {"id": "limits", "title": "Limits", "paragraphs": [LIMITS]},
        {"id": "artifact", "title": "Artifact", "paragraphs": appendix.paragraphs(studies)},
    ]
