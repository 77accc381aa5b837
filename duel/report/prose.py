"""The sentences of a report, made from the verdicts."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from duel.catalogue import FRAMEWORKS, USE_CASES
from duel.modes import DEFAULT, MODES, TUNED
from duel.report import appendix, ratios, training_table
from duel.report.figure_data import label, work
from duel.report.itself import level, overlap
from duel.report.pairs import EQUAL, FASTER, UNDECIDED, Outcome
from duel.report.points import Line, by_mode, told_of_itself
from duel.report.records import Records

TITLES = {
    "ratios": "Ratios",
    "devices": "Devices",
    "itself": "Each framework against itself",
    "throughput": "Throughput",
    "latency": "Latency",
    "scaling": "Several devices",
    "start": "Start-up",
    "parts": "Parts of a training step",
    "memory": "Memory",
    "energy": "Energy",
    "roofline": "Roofline",
    "switches": "Switches",
    "training": "Training loss",
    "learning": "Training to accuracy",
    "kinds": "Kinds of work",
    "modules": "Modules of the model",
    "roofs": "Roofline of kinds of work",
    "timeline": "A step in time",
}
GAIN = 1.1  # of 'tuned' over 'default', above which it is worth a sentence
NO_PROFILE = "No point was profiled (--profile)."
NO_ADVICE = "None follows from what was measured over three sessions."
METHOD = """
Each point is measured in pairs: a process of JAX and one of PyTorch, one after the other on the same device, in the
order A B B A. A pair counts only if both processes proved that they computed the same, from the same weights, samples
and precision. The ratio is the geometric mean over sessions, which lie an hour or more apart or ran on different hosts,
with Student's t interval; what another session may show is its prediction interval. One framework is called faster if
the interval excludes 1 and the ratio is beyond the noise floor. What a framework gains from one mode to another is a
recommendation only if the sessions of the two overlap in time; where they were hours apart, the section on why says so.
"""
REFERENCES = """
Student 1908 and Welch 1947 (intervals and changes); Holm 1979 (many points); Kendall 1938 and Mann 1945 (steady
state); Barrett et al. 2017, doi:10.1145/3133876 (warm-up); Williams et al. 2009, doi:10.1145/1498765.1498785
(roofline); Yang et al. 2024, arXiv:2312.02741 (energy of GPUs). docs/models.md has the benchmarks' sources.
"""
LIMITS = """
A ratio holds for the devices, versions and modes given with it. Mode default is what a newcomer gets: PyTorch
operation by operation, JAX compiled. Mode tuned is the fastest that a search with the same budget for both sides
found; a point that was not searched on its device has a built-in set, and says so. Points exclude loading and
augmenting data; trainings to accuracy include it.
"""


def summary(sets: Sequence[Records]) -> list[str]:
    """Return paragraphs on which side is faster how often, by how much at most, and how far to trust that."""
    lines = [line for records in sets for line in records.lines]
    found = []
    for device in dict.fromkeys(line.device_name for line in lines):
        mine = [line for line in lines if line.device_name == device and line.mode in MODES]
        for mode in sorted({line.mode for line in mine}):
            found.append(_of_mode(device, mode, [line for line in mine if line.mode == mode]))
    damaged = [text for records in sets for text in records.damaged]
    found += [f"{text}." for records in sets for text in training_table.verdicts(records.rows, records.folder)]
    return [*found, *_trust(lines), *([f"{len(damaged)} rows cannot be used; {damaged[0]}"] if damaged else [])]


def _of_mode(device: str, mode: str, lines: list[Line]) -> str:
    over = [line for line in lines if line.another_low is not None and line.ratio is not None]
    within = [line for line in lines if line.ratio is not None and line.another_low is None]
    if not over:
        rest = f"{len(within)} were measured in fewer than three sessions" if within else "none has a ratio"
        return f"{device}, mode {mode}: no verdict at any of {len(lines)} points; {rest}."
    kinds = Counter(_kind(line) for line in over)
    parts = [f"{name} is faster at {kinds[name]}" for name in ("JAX", "PyTorch") if kinds[name]]
    parts += [f"{kinds[one]} {'is' if kinds[one] == 1 else 'are'} {one}" for one in (EQUAL, UNDECIDED) if kinds[one]]
    listed = " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))
    text = f"{device}, mode {mode}: of {len(over)} points measured over sessions, {listed}."
    for name, best in (("JAX", max), ("PyTorch", min)):
        ahead = [line for line in over if _kind(line) == name and not line.is_baseline]
        if ahead:
            line = best(ahead, key=lambda line: line.ratio or 1.0)
            factor = max(line.ratio or 1.0, 1 / (line.ratio or 1.0))
            text += f" {name}'s largest lead is in {work(line)} with {label(line)}: {factor:.3g} times as fast."
    left = len(lines) - len(over)
    return text + (f" {left} more have no verdict." if left else "")


def recommendations(found: Sequence[tuple[Outcome, Line]]) -> list[str]:
    """Return recommendations, each with the figure that it follows from."""
    texts = []
    outcomes = {id(line): outcome for outcome, line in found}
    for device in dict.fromkeys(line.device_name for _, line in found):
        mine = [line for _, line in found if line.device_name == device and line.another_low is not None]
        mode = TUNED if any(line.mode == TUNED for line in mine) else DEFAULT
        for name in dict.fromkeys(line.use_case for line in mine):
            here = [line for line in mine if line.use_case == name and line.mode == mode and not line.is_baseline]
            texts += _choice(device, here)
        texts += [text for framework in FRAMEWORKS if (text := _tuning(device, framework, mine, outcomes))]
        ahead = [line for line in mine if line.mode == mode and _kind(line) in ("JAX", "PyTorch")]
        short = [line.break_even_steps for line in ahead if line.break_even_steps]
        if short:
            steps = f"{statistics.median(short):,.0f} steps (median; figure {TITLES['start']})"
            text = f"at {len(short)} points the faster framework starts more slowly and is ahead only after {steps}"
            texts.append(f"{device}, {mode}: {text}. Take the other for shorter runs.")
    return texts


def _choice(device: str, lines: Sequence[Line]) -> list[str]:
    """Return which framework to take for one use case, if one is faster at most points."""
    if not lines:
        return []
    kinds = Counter(_kind(line) for line in lines)
    name, count = max(((name, kinds[name]) for name in ("JAX", "PyTorch")), key=lambda one: one[1])
    where = f"On {device}, for {work(lines[0])} in mode {lines[0].mode}"
    if count > 2 * len(lines) / 3:
        return [f"{where}, take {name}: it is faster at {count} of {len(lines)} points (figure {TITLES['ratios']})."]
    return [f"{where}, neither leads throughout: choose by benchmark (figure {TITLES['ratios']})."]


def _tuning(device: str, framework: str, lines: Sequence[Line], outcomes: Mapping[int, Outcome]) -> str:
    """Return what 'tuned' gains a framework; empty if that is little. ``outcomes`` has that of each line by its id."""
    place, gains = list(FRAMEWORKS).index(framework), []
    for modes in by_mode(lines).values():
        if DEFAULT in modes and TUNED in modes:
            both = (outcomes[id(modes[mode])].sessions for mode in (DEFAULT, TUNED))
            default, tuned = ([[pair[place] for pair in session] for session in each] for each in both)
            if overlap(default, tuned):
                gains.append(ratios.change([level(one) for one in default], [level(one) for one in tuned]))
    pays = [gain.ratio for gain in gains if gain.low > GAIN]
    if not pays:
        return ""
    name = {"jax": "JAX", "pytorch": "PyTorch"}[framework]
    return (
        f"{name} on {device}: tune its switches; at {len(pays)} of {len(gains)} points mode tuned is more than "
        f"{GAIN - 1:.0%} faster than default (whole 95 % interval over sessions), at most {max(pays):.3g} times as "
        f"fast (figure {TITLES['throughput']})."
    )


def _kind(line: Line) -> str:
    """Return who is faster; undecided also if that does not survive Holm's correction."""
    if line.marked.endswith(FASTER):
        return line.verdict.removesuffix(f" {FASTER}")
    return EQUAL if line.verdict == EQUAL else UNDECIDED


def _trust(lines: Sequence[Line]) -> list[str]:
    text = told_of_itself(lines)
    return [f"By the same procedure {text}; chance alone would give 5 %."] if text else []


def sections(sets: Sequence[Records], why: list[str]) -> list[dict[str, Any]]:
    """Return the sections after the points, from method to artifact; ``why`` has what the profiles say."""
    use_cases = ", ".join(
        f"{use_case.name} ({use_case.meaning})"
        for number, use_case in USE_CASES.items()
        if any(line.use_case == use_case.name for records in sets for line in records.lines)
    )
    advice = recommendations([one for records in sets for one in records.found])
    method = [METHOD, *([f"Use cases: {use_cases}."] if use_cases else [])]
    return [
        {"id": "method", "title": "Method", "paragraphs": method},
        {"id": "why", "title": "Why", "paragraphs": why or [NO_PROFILE]},
        {"id": "recommendations", "title": "Recommendations", "paragraphs": advice or [NO_ADVICE]},
        {"id": "limits", "title": "Limits", "paragraphs": [LIMITS]},
        {"id": "references", "title": "References", "paragraphs": [REFERENCES]},
        {"id": "artifact", "title": "Artifact", "paragraphs": appendix.paragraphs(sets)},
    ]
