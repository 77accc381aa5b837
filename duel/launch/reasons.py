"""What a job's state and reason mean, in words.

Sources: Slurm's lists of job states and reasons (https://slurm.schedmd.com/job_state_codes.html,
https://slurm.schedmd.com/job_reason_codes.html), 22.05 to 25.11. A word that neither has is shown as it is and decides
nothing.
"""

import math
import re
from dataclasses import dataclass
from datetime import datetime

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
class Verdict:
    """What a job's state means."""

    kind: str  # WAITING, BLOCKED, ALIVE, ENDED or UNKNOWN
    cause: str  # of an ENDED job: COMPLETED, CODE, ...
    words: str


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
    "ReqNodeNotAvail": (WAITING, "waits for nodes that are down, drained or reserved, maybe forever: see 'sinfo -R'"),
    "NodeDown": (WAITING, "waits for a node that is down, maybe forever: see 'sinfo -R'"),
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
        "waits until others of its user or group have ended; forever, if this job alone is over the limit",
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
