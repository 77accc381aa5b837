"""Build sbatch calls, and ask sbatch what it would do with a script before anything is submitted."""

import netrc
import os
import re
import shlex
import subprocess
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from duel.errors import UserError
from duel.job import Job
from duel.launch import directives, nodes, queue, refusal
from duel.launch.environment import environment, remarks
from duel.launch.schema import Cluster, Target
from duel.terminal import Table

if TYPE_CHECKING:
    from duel.launch.submit import Launch

TEST_SECONDS = 90  # sbatch itself spends 60 s looking for a missing slurm.conf
# The controller is shared by everyone: to find the line that it refuses, query it at most this often, with pauses.
MOST_ASKED, ASKED_PAUSE_SECONDS = 20, 0.2
# wandb 0.31 looks for a key of its newer server first, then of the well-known one.
WANDB_HOSTS = ["api.forge.coreweave.com", "api.wandb.ai"]


def command(target: Target, arguments: list[str], before: Collection[str] = ()) -> list[str]:
    """Return the target's submit command with ``arguments``, in a shell that first runs its set-up lines, if any."""
    argv = [*before, *shlex.split(target.submit), *arguments]
    if not target.setup.submit:
        return argv
    # The output of these lines must not be mistaken for sbatch's answer.
    lines = "\n".join(["set -e", "{ :", *target.setup.submit, "} >&2", 'exec "$@"'])
    return ["bash", "-c", lines, "bash", *argv]


def wandb_key() -> str:
    """Return where Weights & Biases would find a key; empty if nowhere. wandb is not asked: it may query its server."""
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        if os.environ.get(name):
            return name
    path = _netrc()
    try:
        known = netrc.netrc(path)
    except (OSError, netrc.NetrcParseError):
        return ""
    base = os.environ.get("WANDB_BASE_URL")
    hosts = [urlsplit(base).netloc] if base else WANDB_HOSTS
    return str(path) if any(known.authenticators(host) for host in hosts) else ""


def open_key_file() -> str:
    """Return a warning, with its fix, about a key file that others can read; empty if there is no such problem."""
    path = _netrc()
    try:
        mode = path.stat().st_mode
    except OSError:
        return ""
    return f"others can read {path}, which holds keys: chmod 600 {shlex.quote(str(path))}" if mode & 0o077 else ""


def _netrc() -> Path:
    return Path(os.environ.get("NETRC", "~/.netrc")).expanduser()


@dataclass(frozen=True)
class Forecast:
    """What a script requests and when Slurm would start it, as text."""

    asks: str
    start: str
    warnings: list[str]
    silence: str = ""  # sbatch's message if Slurm did not answer


def plan(launches: "list[Launch]", cluster: Cluster) -> Table:
    """Return a table of what would be submitted, with warnings. Slurm is asked only once about identical requests.

    Raises UserError as ``forecast`` does.
    """
    known: dict[tuple[str, ...], Forecast] = {}
    lines = []
    silence = ""
    for launch in launches:
        lines_asked = [line for line in directives.of_script(launch.text) if not line.startswith("--job-name=")]
        asked = (*lines_asked, repr(launch.target.setup), repr(launch.target.sides))  # which have warnings of their own
        if asked not in known:
            known[asked] = forecast(launch.job, launch.text, cluster, silence)
            silence = known[asked].silence
        lines.append((f"{launch.job.stem}.sh", known[asked].asks, known[asked].start))
    texts = [text for asked in known.values() for text in asked.warnings]
    warnings = dict.fromkeys(f"warning: {text}" for text in texts)
    return Table(["script", "requests", "would start"], lines, list(warnings))


def forecast(job: Job, text: str, cluster: Cluster, silence: str = "") -> Forecast:
    """Ask ``sbatch --test-only`` about the script ``text`` of ``job``, and check it against the partition's limits.

    A non-empty ``silence`` means that Slurm has just failed to answer: it is not asked again. Raises UserError, with
    sbatch's message and the responsible line of cluster.yaml, for what Slurm would refuse forever, or accept and never
    start, and if sbatch does not know its controller.
    """
    target = cluster.targets[job.target].for_job(job)
    lines = directives.of_script(text)
    notes = directives.warnings(lines, continues=bool(job.dataset))
    with environment(target) as left_out:
        notes += [*remarks(left_out, target, job.target, lines), *filter(None, [open_key_file()])]
        message, code = (silence, 1) if silence else _test(text, target)
        if code and refusal.is_unconfigured(message):
            raise UserError(
                f"Slurm did not answer: {message}; run main.py where sbatch knows its cluster (a login node, with its "
                f"SLURM_CONF if it has one), or use a target with 'scheduler: local' (cluster.yaml: targets)"
            )
        if code and refusal.is_silence(message):
            notes.append(f"Slurm did not answer: {message}; the jobs are sent anyway, once it does")
            return Forecast(_asks(lines), "unknown: Slurm did not answer", notes, silence=message)
        partitions = _of(lines, _partitions())
        names = [partition["PartitionName"] for partition in partitions]
        if code:
            start = "unknown"
            notes.append(_refused(job, text, message, target, cluster, names))
        else:
            start = _start(message)
            if not start.startswith("at once") and (shut := nodes.reserved(names, maintenance=True)):
                notes.append(shut)
    notes += _limits(job, lines, partitions, cluster)
    return Forecast(_asks(lines), start, notes)


def _of(lines: list[str], partitions: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return those of ``partitions`` that a script with ``lines`` may run in."""
    name = directives.value(lines, "--partition")
    wanted = (name or "").split(",")
    return [p for p in partitions if p["PartitionName"] in wanted or (not name and p["Default"] == "YES")]


def _refused(job: Job, text: str, message: str, target: Target, cluster: Cluster, partitions: list[str]) -> str:
    """Return a warning about a refusal that passes with time. Raises UserError for one that does not.

    ``partitions`` are the names of those that the script may run in.
    """
    problem = f"Slurm refuses {job.stem}.sh: {message}"
    if refusal.is_full(message):
        return (
            f"Slurm takes no more jobs now ({refusal.full(message)}): those that it does not take stay queued, "
            f"and are sent once it does ('python main.py status' shows them)"
        )
    if refusal.is_of_nodes(message):
        members = nodes.of_partitions(partitions)
        shut = nodes.closed(members)
        over = nodes.too_much(directives.of_script(text), members) if shut else None
        if over:
            raise UserError(f"{problem}; {over[1]}{_line_of(job, text, over[0], cluster)}")
        if shut or not members:
            reservations = nodes.reserved(partitions, maintenance=False) if members else ""
            why = "; ".join(filter(None, [shut, reservations])) or "its nodes cannot be listed"
            return f"Slurm has no nodes for this now ({message}): {why}; the jobs are sent anyway, and wait"
    if refusal.is_of_nodes(message) or refusal.is_for_ever(message):
        raise UserError(f"{problem}{_culprits(job, text, message, target, cluster)}")
    return f"Slurm says: {message}; the jobs are sent anyway, and sbatch decides"


def _limits(job: Job, lines: list[str], mine: list[dict[str, str]], cluster: Cluster) -> list[str]:
    """Return warnings from the limits of the partitions ``mine``. Raises UserError if the job would wait forever."""
    notes = []
    if mine and all(partition["State"] != "UP" for partition in mine):
        notes.append(f"partition {mine[0]['PartitionName']} is {mine[0]['State']}: the job waits until that changes")
    blocks = [over for partition in mine if (over := _over_limit(lines, partition))]
    if mine and len(blocks) == len(mine):
        option, why = blocks[0]
        line = next(line for line in reversed(lines) if option in directives.names(line))
        where = cluster.where(job, line) or "added by Duel"
        problem = f"{job.stem}.sh would wait forever: {why}; {where}: {line}"
        if directives.value(lines, "--qos") is None:
            raise UserError(problem)
        notes.append(f"{problem} (unless the QOS lifts that limit)")
    return notes


def _test(text: str, target: Target) -> tuple[str, int]:
    """Return the message of ``sbatch --test-only`` about a script, and its exit code."""
    try:
        asked = subprocess.run(
            command(target, ["--test-only"]),
            input=text,
            capture_output=True,
            text=True,
            timeout=TEST_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        heard = (error.stderr or b"").decode(errors="replace")  # bytes, even in text mode
        return _message(f"{heard}\nsbatch --test-only timed out after {TEST_SECONDS} s"), 1
    except OSError as error:
        raise UserError(f"{target.submit!r} does not run: {error.strerror} (cluster.yaml: submit)") from error
    return _message(asked.stderr) or f"exit code {asked.returncode}", asked.returncode


def _message(text: str) -> str:
    """Return what sbatch printed, on one line and without its prefixes."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("Try ")]
    messages = [re.sub(r"^(sbatch: )?(error: |allocation failure: )?", "", line) for line in lines]
    return "; ".join(dict.fromkeys(messages))


def _start(message: str) -> str:
    """Return the predicted start in plain words."""
    form = re.search(r"to start at (\S+).* on nodes (\S+)", message)
    if form is None:
        return message
    when = queue.when(form[1], time.time())
    return f"{'at once' if when in ('', 'is due') else when.removeprefix('expected to start ')}, on {form[2]}"


def _culprits(job: Job, text: str, message: str, target: Target, cluster: Cluster) -> str:
    """Return the lines without which Slurm's answer changes, each with its place in cluster.yaml."""
    lines = directives.of_script(text)
    # The site's lines first, and Duel's own only if none of those is to blame: each costs the controller a query.
    of_site = [line for line in lines if cluster.where(job, line)]
    found: list[str] = []
    asked = 0
    for group in (of_site, [line for line in lines if line not in of_site]):
        if found:
            break
        for line in group:
            if asked == MOST_ASKED:
                return "".join(found) + f"\n  (only the first {MOST_ASKED} lines were tried)"
            if asked:
                time.sleep(ASKED_PAUSE_SECONDS)
            asked += 1
            if _test(text.replace(f"#SBATCH {line}\n", "", 1), target)[0] != message:
                found.append(f"\n  {cluster.where(job, line) or 'added by Duel'}: {line}")
    return "".join(found)


def _line_of(job: Job, text: str, option: str, cluster: Cluster) -> str:
    """Return the last line of the script that gives ``option``, with its place in cluster.yaml; empty if none does."""
    for line in reversed(directives.of_script(text)):
        if option in directives.names(line):
            return f"\n  {cluster.where(job, line) or 'added by Duel'}: {line}"
    return ""


def _partitions() -> list[dict[str, str]]:
    """Return every partition's limits; none if Slurm does not list them."""
    try:
        asked = subprocess.run(
            ["scontrol", "show", "partition", "--oneliner"],
            capture_output=True,
            text=True,
            timeout=TEST_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    fields = [dict(re.findall(r"(\w+)=(\S*)", line)) for line in asked.stdout.splitlines()]
    return [{"State": "UP", "Default": "NO"} | line for line in fields if "PartitionName" in line]


def _over_limit(lines: list[str], partition: dict[str, str]) -> tuple[str, str] | None:
    """Return the option by which ``lines`` request more than the partition allows, and why; None if none does."""
    name = partition["PartitionName"]
    asked, most = directives.value(lines, "--time"), partition.get("MaxTime", "")
    limit, wanted = directives.minutes(most), directives.minutes(asked or "")
    if limit is not None and wanted is not None and wanted > limit:
        return "--time", f"partition {name} allows {most}"
    nodes, most = directives.value(lines, "--nodes"), partition.get("MaxNodes", "")
    first = re.match(r"\d+", nodes or "")
    if first and most.isdecimal() and int(first[0]) > int(most):
        return "--nodes", f"partition {name} allows {most} nodes per job"
    return None


def partition_names(lines: list[str]) -> list[str]:
    """Return the partitions that a script with ``lines`` may run in; none if Slurm does not list them."""
    return [partition["PartitionName"] for partition in _of(lines, _partitions())]


def most_minutes(lines: list[str]) -> float | None:
    """Return the longest time limit that the partitions of a script with ``lines`` allow; None if that is not known."""
    limits = [directives.minutes(partition.get("MaxTime", "")) for partition in _of(lines, _partitions())]
    known = [limit for limit in limits if limit is not None]
    return max(known) if known and len(known) == len(limits) else None


def _asks(lines: list[str]) -> str:
    shown = ("--partition", "--nodes", "--gpus-per-node", "--gpus", "--gres", "--constraint", "--time")
    values = [(name, directives.value(lines, name)) for name in shown]
    return " ".join(f"{name}={value}" for name, value in values if value) or "the site's defaults"
