"""sbatch's options as lines of text: their names, which ones replace which, and what looks wrong in them.

The lines are the site's and are passed on unchanged; here they are only read.
"""

import difflib
import functools
import itertools
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Iterator

# From sbatch's manual page, Slurm 22.05 to 25.05: letters with their long names.
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
# The first requests what the second forbids, so the site's choice replaces ours.
_SAME = {"--requeue": "--no-requeue"}

HETEROGENEOUS = "heterogeneous jobs are not supported: all nodes of a comparison must be of one kind"
_HET = re.compile(r"#SBATCH\s+(het|pack)job\b")
_OTHER_SCHEDULERS = re.compile(r"#(PBS|BSUB|COBALT|OAR|\$)\s+-")
_NOT_READ = re.compile(r"#[#\s]*SBATCH[\s=:]*(-|$)", re.IGNORECASE)


def pasted(text: Iterable[str]) -> list[str]:
    """Return the directives in lines of a script. Raises ValueError for what looks like one and has no effect."""
    lines = []
    for line in map(str.strip, text):
        if _OTHER_SCHEDULERS.match(line):
            raise ValueError(f"{line!r} is for another scheduler: write what sbatch takes, or delete it")
        if is_heterogeneous(line):
            raise ValueError(f"{line!r}: {HETEROGENEOUS}")
        if re.match(r"#SBATCH\s+-", line):
            lines.append(line.removeprefix("#SBATCH").strip())
        elif _NOT_READ.match(line):
            raise ValueError(f"{line!r}: Slurm only reads lines that begin with '#SBATCH -': correct or delete it")
        elif not line.startswith("#"):
            lines.append(line)
    return lines


def is_heterogeneous(line: str) -> bool:
    """Return whether ``line`` of a script separates the parts of a heterogeneous job."""
    return _HET.match(line) is not None


def of_script(text: str) -> list[str]:
    """Return the directives that Slurm reads in a script: the '#SBATCH' lines up to the first command."""
    lines = []
    for line in text.splitlines():
        if line.startswith("#SBATCH "):
            lines.append(line.removeprefix("#SBATCH "))
        elif line.strip() and not line.startswith("#"):
            break
    return lines


@functools.cache  # of a target's lines, for each of its scripts several times
def options(line: str) -> tuple[tuple[str, str], ...]:
    """Return the options in a line by their long names, with their values: for ``-p gpu --exclusive``
    ``(("--partition", "gpu"), ("--exclusive", ""))``.
    """
    try:
        arguments = shlex.split(line, comments=True)
    except ValueError:  # an unbalanced quote: sbatch reports it itself
        arguments = line.split()
    found: list[tuple[str, str]] = []
    for argument, after in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        separate = "" if after.startswith("-") else after
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
            found.append((_whole(name), value if equals else separate))
        elif argument.startswith("-") and len(argument) > 1:
            name, value = _LETTERS.get(argument[:2], argument[:2]), argument[2:].removeprefix("=")
            found.append((name, value or separate))
    return tuple(found)


def names(line: str) -> list[str]:
    """Return the long names of the options in a line."""
    return [name for name, _ in options(line)]


def _whole(name: str) -> str:
    """Return the long name that ``name`` abbreviates for sbatch: the only one that begins with it."""
    begun = [long for long in _LONG if long.startswith(name)]
    return begun[0] if len(begun) == 1 else name


def value(lines: Iterable[str], name: str) -> str | None:
    """Return the value that the last of ``lines`` gives the option with the long name ``name``; None if none does."""
    given = [value for line in lines for long, value in options(line) if long == name]
    return given[-1] if given else None


def warning_signal(lines: Iterable[str]) -> str:
    """Return the signal that ``--signal`` in ``lines`` asks Slurm to send before the time limit, as bash names it."""
    form = re.fullmatch(r"(?:[RB]*:)?(?:SIG)?([A-Z0-9]+)(?:@\d+)?", (value(lines, "--signal") or "").upper())
    return form[1] if form else "USR2"


def replace(lines: list[str], changes: Iterable[str]) -> list[str]:
    """Return ``lines`` with each of ``changes`` in place of the line that gives the same option, or at the end.

    A line that also gives other options stays, and the change comes after it: sbatch takes the later of the two.
    """
    for change in changes:
        given = set(names(change))
        kept = [line for line in lines if not given.issuperset(names(line))]
        first = next((number for number, line in enumerate(lines) if line not in kept), len(kept))
        position = len(kept) if any(given.intersection(names(line)) for line in kept) else first
        lines = [*kept[:position], change, *kept[position:]]
    return lines


def without(own: list[str], site: list[str], forbidden: Iterable[str]) -> list[str]:
    """Return Duel's ``own`` lines without options that the site's lines already decide or that are ``forbidden``."""
    decided = {_SAME.get(name, name) for line in site for name in names(line)} | set(forbidden)
    return [line for line in own if not decided & set(names(line))]


def warnings(lines: list[str], continues: bool = False) -> list[str]:
    """Return warnings about lines that are passed on unchanged. A job that ``continues`` goes on when requeued."""
    notes = []
    given = [name for line in lines for name in names(line)]
    known = None
    for name in dict.fromkeys(given):
        if name in _LONG:
            continue
        known = _known_here() if known is None else known
        if name not in known:
            near = difflib.get_close_matches(name[2:], [long[2:] for long in _LONG | known], n=1, cutoff=0.75)
            hint = f" (did you mean --{near[0]}?)" if near else ""
            notes.append(f"{name} is not an sbatch option that Duel knows{hint}; it is passed on unchanged")
    for name in ("--gpus-per-task", "--gpu-bind"):
        if name in given and value(lines, name) != "none":
            notes.append(f"{name}: each process sees fewer devices, which breaks jax.distributed; passed on anyway")
    notes += [note for line in lines for note in _altered(line)]
    if "--clusters" in given:
        notes.append("--clusters: Duel asks only this cluster about its jobs; those on other clusters show as lost")
    kinds = {bool(re.search(r"[A-Za-z]", re.sub(r"^gpu:|\{\w+\}", "", text))) for text in _gpus(lines)}
    if len(kinds) == 2:
        notes.append("some lines name the GPU type and some do not: Slurm may refuse that, or give other GPUs")
    if "--requeue" in given and not continues:
        notes.append("--requeue: a requeued measurement begins again in a new run, and the first one stays as it was")
    if "--array" in given:
        notes.append("--array: each of its tasks repeats the whole job; only the first one has the run's id")
    export = value(lines, "--export") or "ALL"
    if "ALL" not in export.upper().split(","):
        notes.append(f"--export={export}: srun starts without the script's variables; '--export=ALL' for srun fixes it")
    if "--signal" in given and warning_signal(lines) in ("TERM", "15"):
        notes.append("--signal: a run cannot tell TERM from a cancellation, which is not resubmitted: use USR1 or USR2")
    return notes


def _altered(line: str) -> Iterator[str]:
    """Yield what Slurm does not take from a directive as a shell would."""
    try:
        cut, whole = shlex.split(line, comments=True), shlex.split(line)
    except ValueError:  # sbatch reports the unbalanced quote
        return
    if cut and whole[: len(cut)] != cut:
        yield f"{line}: Slurm ignores everything from '#' on: quote the value"
    for variable in re.findall(r"\$\{?[A-Za-z_]\w*\}?", " ".join(cut)):
        yield f"{line}: Slurm does not expand {variable} in a directive; its own patterns are %u, %x and %j"


def _gpus(lines: list[str]) -> list[str]:
    """Return the GPUs that ``lines`` request: ``h100:4``, ``gpu:4``, ``4``."""
    asked = [value(lines, name) for name in ("--gpus", "--gpus-per-node", "--gpus-per-task", "--gpus-per-socket")]
    gres = value(lines, "--gres") or ""
    return [text for text in (*asked, gres if gres.startswith("gpu") else "") if text]


def _known_here() -> frozenset[str]:
    """Return the options that this site's sbatch lists, including its plug-ins'; empty without an sbatch."""
    if shutil.which("sbatch") is None:
        return frozenset()
    try:
        asked = subprocess.run(["sbatch", "--help"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return frozenset()
    return frozenset(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", asked.stdout))


def minutes(text: str) -> float | None:
    """Return a time limit in minutes, from any form of sbatch's ``--time``; None if unlimited (0 too) or invalid."""
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
    """Format a time limit as sbatch takes it, ``D-HH:MM:SS`` or ``HH:MM:SS``."""
    seconds = round(minutes * 60)
    days, rest = divmod(seconds, 86400)
    clock = f"{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{days}-{clock}" if days else clock


def more_memory(lines: list[str]) -> str:
    """Return the memory option of ``lines`` with its value doubled; empty if there is none, or it requests all."""
    for option in ("--mem", "--mem-per-cpu", "--mem-per-gpu"):
        text = value(lines, option) or ""
        form = re.fullmatch(r"(\d+)([KMGT]?B?)", text, re.IGNORECASE)
        if form and int(form[1]):
            return f"{option}={2 * int(form[1])}{form[2]}"
    return ""
