"""What Slurm says of jobs: asked for once, read without trust, put into words.

Sources: the manual pages squeue(1) and sacct(1) and Slurm's lists of job states and reasons
(https://slurm.schedmd.com/job_state_codes.html, https://slurm.schedmd.com/job_reason_codes.html), 22.05 to 25.11.
A word that none of them has is shown as it is and decides nothing.
"""

import contextlib
import math
import os
import pwd
import re
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from datetime import datetime

# A stopped controller keeps squeue waiting for one or more MessageTimeouts (10 s unless the site set another).
TIMEOUT_SECONDS = 60.0
# sacct looks at a little more than what is asked: two machines' clocks differ, and one hour of a year comes twice.
MARGIN_SECONDS = 3700.0
# A control character, because reasons are sentences and names are anyone's text, which is last.
SEPARATOR = "\x1f"
_FIELDS = 10
_SQUEUE = ("JobArrayID", "State", "UserName", "NodeList", "StartTime", "TimeLimit", "exit_code", "RestartCnt", "Reason")
SQUEUE = "".join(f"{name}:0{SEPARATOR}," for name in _SQUEUE) + "Name:0"  # 0: as wide as it is
SACCT = "JobID,State,User,NodeList,Start,Timelimit,ExitCode,Submit,Reason,JobName"
# All that sacct(1) knows. Unless states are named, it leaves out jobs that were never eligible: cancelled while held.
SACCT_STATES = "BF,CA,CD,DL,F,NF,OOM,PD,PR,R,RQ,RS,RV,S,TO"

WAITING, BLOCKED, ALIVE, ENDED, UNKNOWN = "waiting", "blocked", "alive", "ended", "unknown"
COMPLETED, CODE, OUT_OF_MEMORY, TIME_LIMIT = "completed", "code", "out of memory", "time limit"
INFRASTRUCTURE, PREEMPTED, CANCELLED, NEVER_RAN = "infrastructure", "preempted", "cancelled", "never ran"


@dataclass(frozen=True)
class SlurmJob:
    """One job as Slurm knows it. A text that Slurm does not know is empty."""

    id: str
    name: str
    user: str
    state: str  # the base word, in upper case
    raw: str  # the state as printed: 'CANCELLED by 1000'
    reason: str  # Slurm's word, or a sentence of its own
    nodes: str
    start: str  # ISO 8601 in local time: predicted for a pending job, actual for others
    limit: str  # as printed
    exit_code: str = ""  # '<code>:<signal>'; sacct takes 128 from larger codes: 137 is '9:0'
    restarts: int = 0  # how often it went back into the queue


@dataclass(frozen=True)
class Answer:
    """What Slurm said."""

    jobs: list[SlurmJob]
    notes: list[str]  # what could not be asked, and the tool's own message
    controller: bool  # squeue answered; if not, a job that the accounting calls ended may be back in the queue
    accounting: bool | None  # sacct answered; None: there was no need to ask it


@dataclass(frozen=True)
class Verdict:
    """What a job's state means."""

    kind: str  # WAITING, BLOCKED, ALIVE, ENDED or UNKNOWN
    cause: str  # of an ENDED job: COMPLETED, CODE, ...
    words: str


def ask(users: Collection[str], since: float, known: Callable[[list[SlurmJob]], bool]) -> Answer:
    """All jobs of ``users``: one squeue and, unless ``known`` says that its jobs settle everything, one sacct.

    ``since`` (s since 1970) is when the oldest job of interest was submitted. Records of submissions that sbatch
    refused are left out: they bear the job's name, but there is no job.
    """
    # One name that the machine does not know would cost the accounting of all the others.
    strangers = sorted(user for user in users if not _is_known(user))
    notes = [f"no jobs can be asked for of {user!r}: no user of this machine" for user in strangers]
    who = ",".join(sorted(set(users) - set(strangers)))
    if not who:
        return Answer([], notes, controller=False, accounting=None)
    queued = _output(["squeue", "--states=all", "--noheader", f"--user={who}", "-O", SQUEUE], "the queue", notes)
    jobs = _from_squeue(queued or "")
    recorded = None
    asked = not known(list(jobs.values()))
    if asked:
        begin, end = _local(max(0.0, since - MARGIN_SECONDS)), _local(time.time() + MARGIN_SECONDS)
        options = ["-X", "-P", "-D", "-n", f"--delimiter={SEPARATOR}", f"--state={SACCT_STATES}", "-o", SACCT]
        span = [f"--user={who}", f"--starttime={begin}", f"--endtime={end}"]
        recorded = _output(["sacct", *options, *span], "the accounting", notes)
        jobs = _from_sacct(recorded or "") | jobs  # the queue's word is the newer one
    return Answer(list(jobs.values()), notes, queued is not None, recorded is not None if asked else None)


def _is_known(user: str) -> bool:
    try:
        return user.isdecimal() or bool(pwd.getpwnam(user))
    except (KeyError, ValueError):
        return False


def _local(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(seconds))


def _output(command: list[str], what: str, notes: list[str]) -> str | None:
    """What ``command`` prints; None, and a note why, where it fails."""
    # The user's own formats, filters and clusters are for the user's own eyes.
    unwanted = ("SQUEUE_", "SACCT_", "SLURM_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(unwanted) or name == "SLURM_CONF"}
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
                    os.killpg(process.pid, signal.SIGKILL)  # all of it: at some sites squeue is a script
                raise
    except subprocess.TimeoutExpired:
        notes.append(f"{what} cannot be asked: {command[0]} has not answered for {TIMEOUT_SECONDS:.0f} s")
    except OSError as problem:
        notes.append(f"{what} cannot be asked: {command[0]}: {problem.strerror}")
    else:
        if process.returncode == 0:
            return out
        last = error.strip().split("\n")[-1].strip()
        notes.append(f"{what} cannot be asked: {last or f'{command[0]} ended with exit code {process.returncode}'}")
    return None


def _from_squeue(text: str) -> dict[str, SlurmJob]:
    jobs = {}
    for *most, code, restarts, reason, name in _records(text):
        job = _job(most, _exit_code(code), reason, name)
        if not _refused(job):
            jobs[job.id] = replace(job, restarts=_number(restarts) or 0)
    return jobs


def _from_sacct(text: str) -> dict[str, SlurmJob]:
    """A requeued job has one record per life, each with its own time of submission: the last one counts."""
    jobs: dict[str, SlurmJob] = {}
    for *most, code, _, reason, name in sorted(_records(text), key=lambda parts: parts[7]):
        job = _job(most, code, reason, name)
        before = jobs.get(job.id)
        if not _refused(job):
            jobs[job.id] = replace(job, restarts=before.restarts + 1 if before else 0)
    return jobs


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
    """'<code>:<signal>', as sacct has it, from the status of wait(2), as squeue has it."""
    number = _number(status)
    if number is None:
        return ""
    return f"0:{number & 0x7F}" if number & 0x7F else f"{number >> 8 & 0xFF}:0"


def _refused(job: SlurmJob) -> bool:
    """The record that a refused submission leaves; only squeue says why."""
    return job.state == "FAILED" and not job.nodes and (job.reason == "BadConstraints" or job.exit_code == "1:0")


_ALIVE = {
    "RUNNING": "runs",
    "CONFIGURING": "its nodes are being made ready",
    "POWER_UP_NODE": "its nodes are being switched on",
    "COMPLETING": "is ending",
    "SUSPENDED": "is suspended",
    "STOPPED": "is stopped and keeps its nodes",
    "RESIZING": "changes its size",
    "SIGNALING": "is being sent a signal",
    "STAGE_OUT": "copies its data out",
    "UPDATE_DB": "is being written to the accounting",
    "REQUEUED": "goes back into the queue",
    "REQUEUE_FED": "goes back into the queue",
    "EXPEDITING": "goes back into the queue, first in line",
}
_HELD = {
    "REQUEUE_HOLD": "it is held after its requeue",
    "SPECIAL_EXIT": "it is held after its requeue, as a special case",
    "RESV_DEL_HOLD": "it is held because its reservation was deleted",
}
_ENDED = {
    "COMPLETED": (COMPLETED, "completed"),
    "OUT_OF_MEMORY": (OUT_OF_MEMORY, "used more memory than it asked for"),
    "TIMEOUT": (TIME_LIMIT, "reached its time limit"),
    "NODE_FAIL": (INFRASTRUCTURE, "failed"),
    "BOOT_FAIL": (INFRASTRUCTURE, "did not boot"),
    "LAUNCH_FAILED": (INFRASTRUCTURE, "could not launch it"),
    "RECONFIG_FAIL": (INFRASTRUCTURE, "could not be configured for it"),
    "PREEMPTED": (PREEMPTED, "preempted by a job of higher priority"),
    "CANCELLED": (CANCELLED, "cancelled"),
    "DEADLINE": (NEVER_RAN, "could not start before its deadline"),
    "REVOKED": (NEVER_RAN, "runs on another cluster of the federation"),
}

# Reasons of a pending job: what they mean and, where somebody has to do something, what.
_PENDING = {
    "": (WAITING, "has not been looked at yet"),
    "Resources": (WAITING, "waits for free resources"),
    "Priority": (WAITING, "waits behind jobs of higher priority"),
    "BeginTime": (WAITING, "waits for its begin time, or for the pause after a requeue to end"),
    "Dependency": (WAITING, "waits for another job"),
    "Prolog": (WAITING, "its nodes are being made ready"),
    "Licenses": (WAITING, "waits for a licence"),
    "Reservation": (WAITING, "waits for its reservation"),
    "ReqNodeNotAvail": (WAITING, "waits for nodes that are down, drained or reserved, maybe for ever: see 'sinfo -R'"),
    "NodeDown": (WAITING, "waits for a node that is down, maybe for ever: see 'sinfo -R'"),
    "FrontEndDown": (WAITING, "waits for a front end that is down"),
    "Constraints": (WAITING, "waits for nodes that have all it asks for"),
    "Cleaning": (WAITING, "is being cleaned up before it runs again"),
    "SchedDefer": (WAITING, "waits for the scheduler"),
    "JobArrayTaskLimit": (WAITING, "waits for other tasks of its array"),
    "JobLaunchFailure": (WAITING, "could not be launched and waits to be tried again"),
    "BurstBufferResources": (WAITING, "waits for room in the burst buffer"),
    "BurstBufferStageIn": (WAITING, "its data are being copied in"),
    "PowerNotAvail": (WAITING, "waits for electric power"),
    "PowerReserved": (WAITING, "waits for electric power"),
    "FedJobLock": (WAITING, "waits for the other clusters of the federation"),
    "QOSUsageThreshold": (WAITING, "waits until its account has used less of its share"),
    "DeadLine": (WAITING, "cannot start before its deadline and will be ended then"),
    "PartitionTimeLimit": (BLOCKED, "its time limit is over the partition's: lower it or choose another partition"),
    "PartitionNodeLimit": (
        BLOCKED,
        "the partition does not give so many nodes, or they are down: ask for others or choose another partition",
    ),
    "PartitionDown": (BLOCKED, "the partition is down: choose another one or ask the site"),
    "PartitionInactive": (BLOCKED, "the partition is inactive: choose another one or ask the site"),
    "PartitionConfig": (BLOCKED, "the partition's limits forbid it: ask for less or choose another partition"),
    "BadConstraints": (BLOCKED, "no node has what it asks for: change its resources"),
    "MaxMemPerLimit": (BLOCKED, "it asks for more memory than is allowed for a CPU or a node: ask for less"),
    "DependencyNeverSatisfied": (BLOCKED, "the job it depends on has failed: cancel it and submit it again"),
    "JobHeldUser": (BLOCKED, "it is held: 'scontrol release {id}' lets it go"),
    "JobHeldAdmin": (BLOCKED, "an administrator holds it: ask the site"),
    "JobHoldMaxRequeue": (BLOCKED, "it is held after too many requeues: 'scontrol release {id}' lets it go"),
    "AccountNotAllowed": (BLOCKED, "its account may not use the partition: change one of them"),
    "QOSNotAllowed": (BLOCKED, "its account or partition does not allow its quality of service: change one of them"),
    "InvalidAccount": (BLOCKED, "its account is not valid: change it"),
    "InvalidQOS": (BLOCKED, "its quality of service is not valid: change it"),
    "ReservationDeleted": (BLOCKED, "its reservation was deleted: choose another one or none"),
    "ReservationInvalid": (BLOCKED, "its reservation is not valid: choose another one or none"),
    "BurstBufferOperation": (BLOCKED, "the burst buffer failed: 'scontrol show job {id}' says more"),
    "SystemFailure": (BLOCKED, "Slurm failed: ask the site"),
}
# The many limits of accounts and qualities of service, and sentences in place of a word. The first that fits counts.
_PENDING_LIKE = (
    (r"\bheld\b|special exit", BLOCKED, "it is held: 'scontrol release {id}' lets it go, once the cause is mended"),
    (r"not permitted to use", BLOCKED, "change its account, quality of service or partition"),
    (r"Nodes required for job", WAITING, "waits for nodes that are taken, reserved, drained or down: see 'sinfo -R'"),
    (r"(Assoc|QOS)Max\w*WallDurationPerJob", BLOCKED, "one job may not have so much time: lower its time limit"),
    (r"(Assoc|QOS)Max\w+MinutesPerJob", BLOCKED, "one job may not have so much for so long: ask for less of either"),
    (r"(Assoc|QOS)Max\w+Per(Job|Node)", BLOCKED, "one job may not have so much: ask for less"),
    (r"QOSMin", BLOCKED, "its quality of service demands larger jobs: ask for more or change it"),
    (r"(Assoc|QOS)Grp(\w*(?<!Run)Minutes|Wall)", WAITING, "its group's budget is used up: waits until it is renewed"),
    (
        r"Assoc|QOS|Max\w+PerAccount|AccountingPolicy",
        WAITING,
        "waits until others of its user or group have ended; for ever, if this job alone is over the limit",
    ),
    ("", WAITING, "waits"),
)
_PLAIN = ("Resources", "Priority")  # words that say no more than the sentence


def judge(job: SlurmJob) -> Verdict:
    """What the job's state and reason mean."""
    if job.state == "PENDING":
        return _pending(job)
    if job.state in _ALIVE:
        return Verdict(ALIVE, "", _ALIVE[job.state])
    if job.state in _HELD:
        return Verdict(BLOCKED, "", f"blocked: {_HELD[job.state]}: 'scontrol release {job.id}' lets it go")
    if job.state == "FAILED":
        return _failed(job)
    if job.state in _ENDED:
        cause, words = _ENDED[job.state]
        if cause == INFRASTRUCTURE:
            words = f"{f'node {job.nodes}' if job.nodes else 'a node'} {words}"
        by = re.search(r"\bby (\S+)", job.raw)
        return Verdict(ENDED, cause, f"{words} by user {by[1]}" if by else words)
    return Verdict(UNKNOWN, "", f"unknown state {job.raw!r}")


def _pending(job: SlurmJob) -> Verdict:
    # squeue shows a sentence of Slurm's, or of its plug-ins, in place of the word where there is one, and some releases
    # have '_' for its blanks: 'ReqNodeNotAvail, UnavailableNodes:h100-1'.
    reason = job.reason.replace("_", " ")
    word = re.split(r"[^A-Za-z]", reason, maxsplit=1)[0]
    if word in _PENDING and (word or not reason):
        kind, words = _PENDING[word]
    else:
        kind, words = next((kind, words) for like, kind, words in _PENDING_LIKE if re.search(like, reason))
    if "maintenance" in reason:
        words = "waits for a maintenance to end: a lower time limit may let it run before"
    words = words.replace("{id}", job.id)
    blocked = "blocked: " if kind == BLOCKED else ""
    return Verdict(kind, "", blocked + words + (f" ({reason})" if reason and reason not in _PLAIN else ""))


def _failed(job: SlurmJob) -> Verdict:
    # Not by its reason: squeue's is JobLaunchFailure for whatever ended by a signal, sacct's is why it once waited.
    code, _, number = job.exit_code.partition(":")
    if not job.nodes:
        return Verdict(ENDED, NEVER_RAN, "failed before it got a node")
    if number == "53":  # slurmd's error 4021, 'could not connect IO', read as if it were a signal
        return Verdict(ENDED, NEVER_RAN, "never ran: Slurm could not open its log file; is its folder there?")
    if number not in ("", "0"):
        return Verdict(ENDED, CODE, f"its script was ended by signal {number}")
    return Verdict(ENDED, CODE, f"its script ended with exit code {code}" if code else "failed")


_MEMORY = re.compile(
    r"out[-_ ]of[-_ ]memory|OutOfMemory|\boom[-_ ]kill|exceeded (\w+ )?memory limit|RESOURCE_EXHAUSTED"
    r"|MemoryError\b|can('|no)t allocate memory|not enough memory|std::bad_alloc",
    re.IGNORECASE,
)


def looks_out_of_memory(log_tail: str) -> bool:
    """Whether a log speaks of too little memory, in the words of Slurm, the kernel, CUDA, XLA, PyTorch or Python."""
    return _MEMORY.search(log_tail) is not None


def when(start: str, now: float) -> str:
    """A predicted start in plain words; empty if it is not known. ``now`` is in s since 1970."""
    try:
        at = datetime.fromisoformat(start)
        seconds = at.timestamp() - now
    except (ValueError, OverflowError):
        return ""
    if seconds <= 0:
        return "is due"
    minutes = math.ceil(seconds / 60)
    hours, days = minutes // 60, minutes // (24 * 60)
    ahead = (
        f"{minutes} min" if hours < 1 else f"{hours} h {minutes % 60} min" if days < 1 else f"{days} d {hours % 24} h"
    )
    today = at.date() == datetime.fromtimestamp(now, at.tzinfo).date()
    return f"expected to start {at.strftime('%H:%M' if today else '%Y-%m-%d %H:%M')} (in {ahead})"
