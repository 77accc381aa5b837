"""Slurm's queue and accounting: queried once, parsed defensively. ``duel.launch.reasons`` interprets the answers.

Sources: the manual pages squeue(1) and sacct(1), 22.05 to 25.11.
"""

import contextlib
import os
import pwd
import re
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

# Re-exported: whoever queries also needs the interpretation.
from duel.launch.reasons import ALIVE as ALIVE
from duel.launch.reasons import BLOCKED as BLOCKED
from duel.launch.reasons import CANCELLED as CANCELLED
from duel.launch.reasons import CODE as CODE
from duel.launch.reasons import COMPLETED as COMPLETED
from duel.launch.reasons import ENDED as ENDED
from duel.launch.reasons import INFRASTRUCTURE as INFRASTRUCTURE
from duel.launch.reasons import NEVER_RAN as NEVER_RAN
from duel.launch.reasons import OUT_OF_MEMORY as OUT_OF_MEMORY
from duel.launch.reasons import PREEMPTED as PREEMPTED
from duel.launch.reasons import TIME_LIMIT as TIME_LIMIT
from duel.launch.reasons import WAITING as WAITING
from duel.launch.reasons import SlurmJob as SlurmJob
from duel.launch.reasons import judge as judge
from duel.launch.reasons import looks_out_of_memory as looks_out_of_memory
from duel.launch.reasons import when as when

# A stopped controller keeps squeue waiting for one or more MessageTimeouts (10 s unless the site sets another).
TIMEOUT_SECONDS = 60.0
# sacct is asked about a slightly longer span: clocks differ between machines, and one hour a year occurs twice.
MARGIN_SECONDS = 3700.0
# A control character, because reasons are sentences and names, which come last, are arbitrary text.
SEPARATOR = "\x1f"
CONFIGURATIONS = ("/etc/slurm/slurm.conf", "/run/slurm/conf/slurm.conf")
_FIELDS = 10
_SQUEUE = ("JobArrayID", "State", "UserName", "NodeList", "StartTime", "TimeLimit", "exit_code", "RestartCnt", "Reason")
SQUEUE = "".join(f"{name}:0{SEPARATOR}," for name in _SQUEUE) + "Name:0"  # 0: untruncated
SACCT = "JobID,State,User,NodeList,Start,Timelimit,ExitCode,Submit,Reason,JobName"
# All that sacct(1) lists. Unless states are named, it omits jobs that were never eligible: cancelled while held.
SACCT_STATES = "BF,CA,CD,DL,F,NF,OOM,PD,PR,R,RQ,RS,RV,S,TO"


@dataclass(frozen=True)
class Answer:
    """Slurm's answer."""

    jobs: list[SlurmJob]
    notes: list[str]  # what could not be queried, with the tool's message
    controller: bool  # squeue answered; if not, a job that the accounting calls ended may be back in the queue
    accounting: bool | None  # sacct answered; None: it was not needed

    @property
    def keeps_no_accounts(self) -> bool:
        """Whether this site has no accounting, by sacct's word or because there is no sacct."""
        nothing = ("accounting storage is disabled", "sacct: No such file")
        return any(text in note for note in self.notes for text in nothing)


def ask(users: Collection[str], since: float, known: Callable[[list[SlurmJob]], bool]) -> Answer:
    """Return all jobs of ``users``, from one squeue and, unless ``known`` says that its jobs suffice, one sacct.

    ``since`` (s since 1970) is when the oldest job of interest was submitted. Records of submissions that sbatch
    refused are left out: they carry the job's name, but there is no job.
    """
    # A single user name that this machine does not know would make sacct fail for all the others.
    unknown = sorted(user for user in users if not _is_known(user))
    notes = [f"cannot look up jobs of {user!r}: no such user on this machine" for user in unknown]
    who = ",".join(sorted(set(users) - set(unknown)))
    if not who:
        return Answer([], notes, controller=False, accounting=None)
    queued = output(
        ["squeue", "--states=all", "--array", "--noheader", f"--user={who}", "-O", SQUEUE], "the queue", notes
    )
    jobs = _from_squeue(queued or "")
    recorded = None
    asked = not known(list(jobs.values()))
    if asked:
        begin, end = _local(max(0.0, since - MARGIN_SECONDS)), _local(time.time() + MARGIN_SECONDS)
        options = ["-X", "-P", "-D", "-n", f"--delimiter={SEPARATOR}", f"--state={SACCT_STATES}", "-o", SACCT]
        span = [f"--user={who}", f"--starttime={begin}", f"--endtime={end}"]
        recorded = output(["sacct", *options, *span], "the accounting", notes)
        jobs = _from_sacct(recorded or "") | jobs  # the queue is more recent
    return Answer(list(jobs.values()), notes, queued is not None, recorded is not None if asked else None)


_known_name: list[str] = []
_silent_since: list[float] = []  # when Slurm was last asked for its name in vain: asking may take seconds, for each run
SILENT_SECONDS = 30.0


def cluster_name() -> str:
    """Return Slurm's name of the cluster that answers here or, if none does, that is configured here; else empty."""
    silent = _silent_since[-1:]  # calls of sbatch that overlap come here at once
    if not _known_name and not (silent and time.monotonic() - silent[0] < SILENT_SECONDS):
        if found := _named(output(["scontrol", "show", "config"], "the cluster's name", []) or ""):
            _known_name[:] = found
        _silent_since[:] = [] if found else [time.monotonic()]
    return "".join(_known_name) or _configured_name()


def _configured_name() -> str:
    for path in filter(None, (os.environ.get("SLURM_CONF"), *CONFIGURATIONS)):
        with contextlib.suppress(OSError):  # not there, or for administrators only: the next one may be
            return "".join(_named(Path(path).read_text(errors="replace")))
    return ""


def _named(configuration: str) -> list[str]:
    return re.findall(r"^\s*ClusterName\s*=\s*(\S+)", configuration, re.MULTILINE | re.IGNORECASE)[:1]


def elsewhere(cluster: str) -> bool:
    """Return whether a job that ``cluster`` took (empty: not recorded) is on a cluster other than this one."""
    return bool(cluster) and cluster_name().lower() not in ("", cluster.lower())


def user() -> str:
    """Return the name under which Slurm knows us: by uid, as Slurm does, and not by variables such as USER."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container without a passwd entry
        return str(os.getuid())


def _is_known(user: str) -> bool:
    try:
        return user.isdecimal() or bool(pwd.getpwnam(user))
    except (KeyError, ValueError):
        return False


def _local(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(seconds))


def output(command: list[str], what: str, notes: list[str]) -> str | None:
    """Return what ``command`` prints; if it fails, return None and append the reason to ``notes``."""
    # The user's formats, filters and clusters are meant for the user's own calls.
    unwanted = ("SQUEUE_", "SACCT_", "SLURM_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(unwanted) or name == "SLURM_CONF"}
    kept["SLURM_BITSTR_LEN"] = "0"  # name all elements of an array
    pipe = subprocess.PIPE
    try:
        with subprocess.Popen(
            command,
            env=kept,
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        ) as process:
            try:
                out, error = process.communicate(timeout=TIMEOUT_SECONDS)
            except BaseException:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # the whole group: at some sites squeue is a script
                raise
    except subprocess.TimeoutExpired:
        notes.append(f"{what} is unavailable: {command[0]} has not answered for {TIMEOUT_SECONDS:.0f} s")
    except OSError as problem:
        notes.append(f"{what} is unavailable: {command[0]}: {problem.strerror}")
    else:
        if process.returncode == 0:
            return out
        last = error.strip().split("\n")[-1].strip()
        notes.append(f"{what} is unavailable: {last or f'{command[0]} failed with exit code {process.returncode}'}")
    return None


def _from_squeue(text: str) -> dict[str, SlurmJob]:
    jobs = {}
    for *most, code, restarts, reason, name in _records(text):
        job = _job(most, _exit_code(code), reason, name)
        if not _refused(job):
            jobs[job.id] = replace(job, restarts=_number(restarts) or 0)
    return jobs


def _from_sacct(text: str) -> dict[str, SlurmJob]:
    """Parse sacct's records. A requeued job has one per life, each with its own submit time: the last one counts."""
    jobs: dict[str, SlurmJob] = {}
    for *most, code, _, reason, name in sorted(_records(text), key=lambda parts: parts[7]):
        job = _job(most, code, reason, name)
        for job_id in [] if _refused(job) else _elements(job.id):
            before = jobs.get(job_id)
            jobs[job_id] = replace(job, id=job_id, restarts=before.restarts + 1 if before else 0)
    return jobs


def _elements(job_id: str) -> list[str]:
    """Return the ids in one record: elements of an array that never started share one, as 12_[0-3,7]."""
    span = r"([0-9]{1,7})(?:-([0-9]{1,7})(?::([1-9][0-9]{0,6}))?)?"
    found = re.fullmatch(rf"([0-9]+)_\[((?:{span},)*{span})(?:%[0-9]+)?\]", job_id)
    if found is None:
        return [job_id]
    spans = re.findall(span, found[2])
    return [
        f"{found[1]}_{element}"
        for first, last, step in spans
        for element in range(int(first), int(last or first) + 1, int(step or 1))
    ]


def _records(text: str) -> Iterator[list[str]]:
    for line in text.split("\n"):
        parts = [part.strip() for part in line.split(SEPARATOR, _FIELDS - 1)]
        if len(parts) == _FIELDS and parts[0][:1].isdecimal():  # not the rest of a name with a line break
            yield parts


def _job(most: list[str], exit_code: str, reason: str, name: str) -> SlurmJob:
    job_id, raw, user, nodes, start, limit = most
    nothing = ("N/A", "None", "Unknown", "None assigned", "(null)")
    nodes, start, reason = ("" if text in nothing else text for text in (nodes, start, reason))
    state = raw.split(" ")[0].upper()
    return SlurmJob(job_id, name, user, state, raw, reason, nodes, start, limit, exit_code)


def _number(text: str) -> int | None:
    return int(text) if re.fullmatch(r"[0-9]{1,10}", text) else None


def _exit_code(status: str) -> str:
    """Convert a status of wait(2), as squeue has it, to sacct's '<code>:<signal>'."""
    number = _number(status)
    if number is None:
        return ""
    return f"0:{number & 0x7F}" if number & 0x7F else f"{number >> 8 & 0xFF}:0"


def _refused(job: SlurmJob) -> bool:
    """Return whether this is the record that a refused submission leaves; only squeue says why."""
    return job.state == "FAILED" and not job.nodes and (job.reason == "BadConstraints" or job.exit_code == "1:0")
