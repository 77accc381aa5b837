"""What 'main.py help' and 'main.py help TOPIC' print."""

import textwrap
from collections.abc import Callable, Mapping

from duel import modes
from duel.catalogue import ALIASES, BENCHMARKS, HIDDEN, PRECISIONS, PRESETS, PRODUCTS, SCALINGS, USE_CASES, VALIDATE
from duel.switches import SWITCHES

WIDTH = 80
RARE = ("sync", "bundle", "workspace", "completion")  # commands that the first page only names

# One screen. Option names are both here and in duel.options; a test keeps them in step.
FRONT = """\
usage: {program} [OPTIONS]           start jobs, one in JAX, one in PyTorch
       {program} COMMAND [OPTIONS]   manage them

  {program} --benchmark resnet50 --use_case 1
  {program} --benchmark mnist --use_case 1 --paired --wait
  {program} status --watch

options that start jobs ('{program} submit --help' explains them)
  what    --benchmark  --use_case  --size  --batch_sizes  --products  --weights
  how     --preset  --precision  --mode  --microbatch  --profile
  where   --target  --device  --nodes  --devices  --scaling
  train   --dataset  --epochs  --target_accuracy  --seeds  --max_hours
  start   --framework  --paired  --sessions  --spacing  --dry_run  --wait

commands ('{program} COMMAND --help' explains one)
{commands}
  also: {rare}
topics (help TOPIC): {topics}
"""


def _table(lines: Mapping[str, str]) -> str:
    """Return names and their meanings, wrapped to ``WIDTH``."""
    indent = max(map(len, lines)) + 4
    found = []
    for name, meaning in lines.items():
        first, *others = textwrap.wrap(meaning, WIDTH - indent) or [""]
        found.append(f"  {name:{indent - 2}}{first}".rstrip())
        found += [" " * indent + line for line in others]
    return "\n".join(found)


def benchmarks() -> str:
    aliases = {name: f" (also: {alias})" for alias, name in ALIASES.items()}
    lines = {name: f"{known.title}{aliases.get(name, '')}" for name, known in BENCHMARKS.items()}
    return f"--benchmark NAME [NAME ...], or all\n\n{_table(lines)}\n\ndocs/models.md has the details of each."


def use_cases() -> str:
    cases = [case for case in USE_CASES.values() if case.number != VALIDATE]
    lines = {f"{case.number} {case.name}": case.meaning for case in cases}
    return (
        f"--use_case N [N ...], by number or name, or all\n\n{_table(lines)}\n\n"
        f"Products of per-sample gradients (--products):\n\n{_table(PRODUCTS)}\n\n"
        f"On many devices (--nodes, --devices), what stays fixed (--scaling):\n\n{_table(SCALINGS)}\n\n"
        "docs/use-cases.md has the details."
    )


def presets() -> str:
    lines = {}
    for preset in (one for one in PRESETS.values() if one.name not in HIDDEN):
        sizes = ", ".join(map(str, preset.batch_sizes))
        lines[preset.name] = f"{preset.meaning}; model: {preset.size}; inference batch sizes: {sizes}"
    return f"--preset NAME: how long and how often to measure\n\n{_table(lines)}"


def precisions() -> str:
    lines = {name: f"{policy.meaning}; on {', '.join(policy.device_kinds)}" for name, policy in PRECISIONS.items()}
    return (
        f"--precision NAME: the same policy on both sides\n\n{_table(lines)}\n\n"
        "docs/methodology.md says how each is checked."
    )


def mode() -> str:
    lines = dict(modes.MODES) | {modes.WATERFALL: "every switch from default to tuned, one at a time; needs --paired"}
    switches: dict[str, str] = {}
    for switch in SWITCHES:
        others = f"{switches[switch.name]}; " if switch.name in switches else ""
        if switch.meaning not in others:
            switches[switch.name] = f"{others}{switch.meaning} ({switch.framework})"
        elif switch.framework not in others.rpartition("(")[2]:  # both sides have it
            switches[switch.name] = f"{others.removesuffix('); ')} and {switch.framework})"
    return (
        f"--mode NAME, with switches turned on and off by + and -, or set by =\n\n{_table(lines)}\n\nSwitches, as in "
        f"default+compile, tuned-channels_last, default+threads=1:\n\n{_table(switches)}\n\n"
        "docs/methodology.md says where each exists and how it is proved to be in force."
    )


TOPICS: Mapping[str, Callable[[], str]] = {
    "benchmarks": benchmarks,
    "use_cases": use_cases,
    "presets": presets,
    "precisions": precisions,
    "modes": mode,
}


def front(program: str, commands: Mapping[str, str]) -> str:
    """Return the first page. ``commands`` maps the name of each command to what it does."""
    shown = {name: text for name, text in commands.items() if name not in RARE}
    return FRONT.format(program=program, commands=_table(shown), rare=", ".join(RARE), topics=", ".join(TOPICS))
