"""How sbatch is called, and what it would do with a script, asked before anything is submitted."""

import contextlib
import netrc
import os
import re
import shlex
import subprocess
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from duel.errors import UserError
from duel.job import Job
from duel.launch import directives, queue
from duel.launch.cluster import Cluster, Target

TEST_SECONDS = 60
# WANDB_API_KEY, GITHUB_TOKEN and their like: sites may store a job's environment where others can read it.
SECRET_WORDS = frozenset(("KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIALS"))
# wandb 0.31 looks for a key of its newer server first, and then of the one that everybody knows.
WANDB_HOSTS = ["api.forge.coreweave.com", "api.wandb.ai"]
# Not a refusal: Slurm could not be asked.
_NO_ANSWER = re.compile(r"timed out|Unable to contact|zero bytes|connection (failure|refused|reset)", re.IGNORECASE)


def command(target: Target, arguments: list[str], before: Collection[str] = ()) -> list[str]:
    """The target's submit command with ``arguments``, in a shell that has run the target's lines for it, if any."""
    words = [*before, *shlex.split(target.submit), *arguments]
    if not target.setup.submit:
        return words
    # What these lines print must not be taken for sbatch's answer.
    lines = "\n".join(["set -e", "{", *target.setup.submit, "} >&2", 'exec "$@"'])
    return ["bash", "-c", lines, "bash", *words]


@contextlib.contextmanager
def environment(target: Target) -> Iterator[list[str]]:
    """Keep out of sbatch's environment what would overrule the script, and secrets that others could read there.

    Yields the names of what was kept out.
    """
    kept = dict(os.environ)
    left_out = [name for name in kept if _unwanted(name) and name not in target.pass_variables]
    for name in left_out:
        del os.environ[name]
    try:
        yield left_out
    finally:
        os.environ.update(kept)


def _unwanted(name: str) -> bool:
    overrules = name.startswith(("SBATCH_", "SLURM_")) and name != "SLURM_CONF"
    secret = not SECRET_WORDS.isdisjoint(name.upper().split("_")) or name.startswith(("HF_", "AWS_"))
    return overrules or secret


def remarks(left_out: list[str], lines: list[str]) -> list[str]:
    """What a user would miss of the variables that sbatch does not get. ``lines`` are the script's directives."""
    said = []
    for name in left_out:
        option = "--" + name.removeprefix("SBATCH_").lower().replace("_", "-")
        if name in ("SBATCH_ACCOUNT", "SBATCH_PARTITION", "SBATCH_QOS", "SBATCH_RESERVATION"):
            if directives.value(lines, option) is None:
                said.append(
                    f"{name} is not passed on, and the target has no {option}: add that line, "
                    f"or 'pass_variables: [{name}]'"
                )
        elif name == "WANDB_API_KEY":
            said.append("WANDB_API_KEY is not passed to jobs, others could read it there: 'wandb login' stores the key")
    return said


def wandb_key() -> str:
    """Where Weights & Biases would find a key; empty for nowhere. wandb itself is not asked: it may ask its server."""
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
    """What is wrong with a file of keys that others can read, and how to mend it; empty if nothing is."""
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
    """What a script asks for and when Slurm would start it, in words."""

    asks: str
    start: str
    warnings: list[str]


def plan(jobs: list[Job], texts: list[str], cluster: Cluster) -> tuple[str, list[str]]:
    """A table of what would be submitted, and warnings. Slurm is asked once about scripts that ask for the same.

    Raises UserError as ``forecast`` does.
    """
    known: dict[tuple[str, ...], Forecast] = {}
    lines = []
    for job, text in zip(jobs, texts, strict=True):
        asked = tuple(line for line in directives.of_script(text) if not line.startswith("--job-name="))
        if asked not in known:
            known[asked] = forecast(job, text, cluster)
        lines.append((f"{job.stem}.sh", known[asked].asks, known[asked].start))
    width, asks = max(len(line[0]) for line in lines), max(len(line[1]) for line in lines)
    head = ("script", "asks for", "would start")
    table = "\n".join(f"{a:{width}}  {b:{asks}}  {c}".rstrip() for a, b, c in [head, *lines])
    return table, list(dict.fromkeys(warning for known_one in known.values() for warning in known_one.warnings))


def forecast(job: Job, text: str, cluster: Cluster) -> Forecast:
    """Ask ``sbatch --test-only`` about the script ``text`` of ``job``, and set its limits against the partition's.

    Raises UserError, with sbatch's own words and the line of cluster.yaml behind them, for what Slurm would refuse, or
    take and never start.
    """
    target = cluster.targets[job.target].for_job(job)
    lines = directives.of_script(text)
    said = directives.warnings(lines)
    with environment(target) as left_out:
        said += [*remarks(left_out, lines), *filter(None, [open_key_file()])]
        words, code = _test(text, target)
        if code == 0:
            start = _start(words)
        elif _NO_ANSWER.search(words):
            start = f"cannot be told: {words}"
        else:
            raise UserError(f"Slurm refuses {job.stem}.sh: {words}{_culprits(job, text, words, target, cluster)}")
        partitions = _partitions()
    name = directives.value(lines, "--partition")
    mine = [
        p for p in partitions if p["PartitionName"] in (name or "").split(",") or (not name and p["Default"] == "YES")
    ]
    if mine and all(partition["State"] != "UP" for partition in mine):
        said.append(f"partition {mine[0]['PartitionName']} is {mine[0]['State']}: the job waits until that changes")
    blocks = [over for partition in mine if (over := _over_limit(lines, partition))]
    if mine and len(blocks) == len(mine):
        option, why = blocks[0]
        line = next(line for line in reversed(lines) if option in directives.names(line))
        where = cluster.where(job, line) or "added by Duel"
        problem = f"{job.stem}.sh would wait for ever: {why}; {where}: {line}"
        if directives.value(lines, "--qos") is None:
            raise UserError(problem)
        said.append(f"{problem} (unless the QOS lifts that)")
    return Forecast(_asks(lines), start, said)


def _test(text: str, target: Target) -> tuple[str, int]:
    """What ``sbatch --test-only`` says of a script, and its exit code."""
    try:
        asked = subprocess.run(
            command(target, ["--test-only"]),
            input=text,
            capture_output=True,
            text=True,
            timeout=TEST_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"sbatch --test-only timed out after {TEST_SECONDS} s", 1
    except OSError as error:
        raise UserError(f"{target.submit!r} does not run: {error.strerror} (cluster.yaml: submit)") from error
    lines = [line.strip() for line in asked.stderr.splitlines() if line.strip() and not line.startswith("Try ")]
    said = [re.sub(r"^(sbatch: )?(error: |allocation failure: )?", "", line) for line in lines]
    return "; ".join(dict.fromkeys(said)) or f"exit code {asked.returncode}", asked.returncode


def _start(words: str) -> str:
    """The predicted start in plain words."""
    form = re.search(r"to start at (\S+).* on nodes (\S+)", words)
    if form is None:
        return words
    when = queue.when(form[1], time.time())
    return f"{'at once' if when in ('', 'is due') else when.removeprefix('expected to start ')}, on {form[2]}"


def _culprits(job: Job, text: str, words: str, target: Target, cluster: Cluster) -> str:
    """The lines without which Slurm's answer is another one, each with its place in cluster.yaml."""
    found = []
    for line in directives.of_script(text):
        other = text.replace(f"#SBATCH {line}\n", "", 1)
        if _test(other, target)[0] != words:
            found.append(f"\n  {cluster.where(job, line) or 'added by Duel'}: {line}")
    return "".join(found)


def _partitions() -> list[dict[str, str]]:
    """Every partition's limits; none where Slurm does not say."""
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
    """The option by which ``lines`` ask for more than the partition ever gives, and why; None if none does."""
    name = partition["PartitionName"]
    asked, most = directives.value(lines, "--time"), partition.get("MaxTime", "")
    limit, wanted = directives.minutes(most), directives.minutes(asked or "")
    if limit is not None and wanted is not None and wanted > limit:
        return "--time", f"partition {name} allows {most}"
    nodes, most = directives.value(lines, "--nodes"), partition.get("MaxNodes", "")
    first = re.match(r"\d+", nodes or "")
    if first and most.isdecimal() and int(first[0]) > int(most):
        return "--nodes", f"partition {name} allows {most} nodes a job"
    return None


def _asks(lines: list[str]) -> str:
    shown = ("--partition", "--nodes", "--gpus-per-node", "--gpus", "--gres", "--constraint", "--time")
    values = [(name, directives.value(lines, name)) for name in shown]
    return " ".join(f"{name}={value}" for name, value in values if value) or "the site's defaults"
