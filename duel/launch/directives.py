"""sbatch's options as lines of text: what they are called, which ones replace which, and what looks wrong in them.

A line is the site's own and passes as it stands; here it is only read.
"""

import difflib
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable

# sbatch's manual page, Slurm 22.05 to 25.05, long names with their letter.
_LETTERS = {
    "-a": "--array",
    "-A": "--account",
    "-b": "--begin",
    "-B": "--extra-node-info",
    "-c": "--cpus-per-task",
    "-C": "--constraint",
    "-d": "--dependency",
    "-D": "--chdir",
    "-e": "--error",
    "-F": "--nodefile",
    "-G": "--gpus",
    "-H": "--hold",
    "-i": "--input",
    "-J": "--job-name",
    "-k": "--no-kill",
    "-L": "--licenses",
    "-m": "--distribution",
    "-M": "--clusters",
    "-n": "--ntasks",
    "-N": "--nodes",
    "-o": "--output",
    "-O": "--overcommit",
    "-p": "--partition",
    "-q": "--qos",
    "-Q": "--quiet",
    "-s": "--oversubscribe",
    "-S": "--core-spec",
    "-t": "--time",
    "-v": "--verbose",
    "-w": "--nodelist",
    "-W": "--wait",
    "-x": "--exclude",
}
_OTHERS = """
    acctg-freq batch bb bbf cluster-constraint comment consolidate-segments container container-id contiguous
    cores-per-socket cpu-freq cpus-per-gpu deadline delay-boot exclusive export export-file external-launcher extra
    get-user-env gid gpu-bind gpu-freq gpus-per-node gpus-per-socket gpus-per-task gres gres-flags hint ignore-pbs
    kill-on-invalid-dep mail-type mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus network nice
    no-requeue ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket open-mode oom-kill-step parsable power
    prefer priority profile propagate reboot requeue reservation resv-ports resv segment signal sockets-per-node
    spread-job spread-segments stepmgr switches test-only thread-spec threads-per-core time-min tmp tres-bind
    tres-per-task uid use-min-nodes wait-all-nodes wckey wrap x11
"""
_LONG = frozenset(_LETTERS.values()) | {f"--{name}" for name in _OTHERS.split()}
# One asks for what another forbids, so the site's own word replaces ours.
_SAME = {"--requeue": "--no-requeue"}


def of_script(text: str) -> list[str]:
    """The directives that Slurm reads in a script: '#SBATCH' lines up to the first command."""
    lines = []
    for line in text.splitlines():
        if line.startswith("#SBATCH "):
            lines.append(line.removeprefix("#SBATCH "))
        elif line.strip() and not line.startswith("#"):
            break
    return lines


def names(line: str) -> list[str]:
    """The long names of the options in a line: ``["--partition", "--account"]`` for ``-p gpu --account=x``."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # an unbalanced quote: sbatch says so itself
        words = line.split()
    found = []
    for word in words:
        if word.startswith("--"):
            name = word.partition("=")[0]
        elif word.startswith("-") and len(word) > 1:
            name = _LETTERS.get(word[:2], word[:2])
        else:
            continue
        found.append(name)
    return found


def value(lines: Iterable[str], name: str) -> str | None:
    """The value that the last of ``lines`` gives the option with the long name ``name``; None where none does."""
    letters = [letter for letter, long in _LETTERS.items() if long == name]
    found = None
    for line in lines:
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            continue
        for position, word in enumerate(words):
            after = words[position + 1] if position + 1 < len(words) else ""
            if word == name or word in letters:
                found = after
            elif word.startswith(f"{name}="):
                found = word.partition("=")[2]
            elif word[:2] in letters and not word.startswith("--"):
                found = word[2:].removeprefix("=")
    return found


def replace(lines: list[str], changes: Iterable[str]) -> list[str]:
    """``lines`` with each of ``changes`` in the place of the line that gives the same option, or behind them all.

    A line that gives other options too stays, and the change comes behind it: of two, sbatch takes the later one.
    """
    for change in changes:
        given = set(names(change))
        kept = [line for line in lines if not given.issuperset(names(line))]
        first = next((number for number, line in enumerate(lines) if line not in kept), len(kept))
        position = len(kept) if any(given.intersection(names(line)) for line in kept) else first
        lines = [*kept[:position], change, *kept[position:]]
    return lines


def without(own: list[str], site: list[str], forbidden: Iterable[str]) -> list[str]:
    """What Duel itself adds, less what the site's lines decide already and less what is ``forbidden``."""
    decided = {_SAME.get(name, name) for line in site for name in names(line)} | set(forbidden)
    return [line for line in own if not decided & set(names(line))]


def warnings(lines: list[str]) -> list[str]:
    """What a reader should know of a site's lines before they are passed on as they stand."""
    said = []
    given = [name for line in lines for name in names(line)]
    known = None
    for name in dict.fromkeys(given):
        if name in _LONG:
            continue
        known = _known_here() if known is None else known
        if name not in known:
            near = difflib.get_close_matches(name, _LONG | known, n=1)
            hint = f" (near: {near[0]})" if near else ""
            said.append(f"{name} is no option of sbatch that Duel knows{hint}; it is passed on as it is")
    for name in ("--gpus-per-task", "--gpu-bind"):
        if name in given:
            said.append(f"{name}: each process then sees fewer devices, which breaks jax.distributed; passed on")
    if "--clusters" in given:
        said.append("--clusters: Duel asks this cluster alone what became of its jobs; elsewhere they show as lost")
    kinds = {bool(re.search(r"[A-Za-z]", re.sub(r"^gpu:|\{\w+\}", "", text))) for text in _gpus(lines)}
    if len(kinds) == 2:
        said.append("some lines name the type of GPU and some do not: Slurm may refuse that, or give others")
    if "--requeue" in given:
        said.append("--requeue: a requeued measurement begins again in a new run, and the first one ends as it was")
    if "--array" in given:
        said.append("--array: each of its tasks is the whole job again; only the first one has the run's id")
    if "--export" in given and (value(lines, "--export") or "").upper().startswith("NONE"):
        said.append("--export=NONE: srun then starts without the script's variables; '--export=ALL' for srun mends it")
    return said


def _gpus(lines: list[str]) -> list[str]:
    """What ``lines`` ask for as GPUs: ``h100:4``, ``gpu:4``, ``4``."""
    asked = [value(lines, name) for name in ("--gpus", "--gpus-per-node", "--gpus-per-task", "--gpus-per-socket")]
    gres = value(lines, "--gres") or ""
    return [text for text in (*asked, gres if gres.startswith("gpu") else "") if text]


def _known_here() -> frozenset[str]:
    """The options that this site's sbatch itself lists, plug-ins' included; empty without an sbatch."""
    if shutil.which("sbatch") is None:
        return frozenset()
    try:
        asked = subprocess.run(["sbatch", "--help"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return frozenset()
    return frozenset(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", asked.stdout))


def minutes(text: str) -> float | None:
    """A time limit in minutes, from the forms of sbatch's ``--time``; None for no limit (0 too) or what is not one."""
    form = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text.strip())
    if form is None:
        return None
    days, *parts = (None if part is None else int(part) for part in form.groups())
    first, second, third = parts
    if days is not None or third is not None:  # D-H[:M[:S]] or H:M:S
        limit = (days or 0) * 1440 + (first or 0) * 60 + (second or 0) + (third or 0) / 60
    else:  # M[:S]
        limit = (first or 0) + (second or 0) / 60
    return limit or None


def limit(minutes: float) -> str:
    """A time limit as sbatch takes it, ``D-HH:MM:SS`` or ``HH:MM:SS``."""
    seconds = round(minutes * 60)
    days, rest = divmod(seconds, 86400)
    clock = f"{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{days}-{clock}" if days else clock
