"""What a job's state and reason mean, as text.

Sources: Slurm's lists of job states and reasons (https://slurm.schedmd.com/job_state_codes.html,
https://slurm.schedmd.com/job_reason_codes.html), 22.05 to 25.11. A word in neither list is shown unchanged and decides
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
    """One job as Slurm knows it. Fields that Slurm does not know are empty."""

    id: str
    name: str
    user: str
    state: str  # the base word, in upper case
    raw: str  # the state as printed: 'CANCELLED by 1000'
    reason: str  # Slurm's keyword, or a sentence
    nodes: str
    start: str  # ISO 8601 in local time: predicted for a pending job, actual for others
    limit: str  # as printed
    exit_code: str = ""  # '<code>:<signal>'; sacct takes 128 from larger codes: 137 is '9:0'
    restarts: int = 0  # how often it was requeued


@dataclass(frozen=True)
class Verdict:
    """What a job's state means."""

    kind: str  # WAITING, BLOCKED, ALIVE, ENDED or UNKNOWN
    cause: str  # of an ENDED job: COMPLETED, CODE, ...
    words: str


_ALIVE = {
    "RUNNING": "runs",
    "CONFIGURING": "waits for its nodes to get ready",
    "POWER_UP_NODE": "waits for its nodes to power up",
    "COMPLETING": "is ending",
    "SUSPENDED": "is suspended",
    "STOPPED": "is stopped and keeps its nodes",
    "RESIZING": "is being resized",
    "SIGNALING": "is being sent a signal",
    "STAGE_OUT": "is staging its data out",
    "UPDATE_DB": "is being recorded in the accounting",
    "REQUEUED": "is being requeued",
    "REQUEUE_FED": "is being requeued",
    "EXPEDITING": "is being requeued, first in line",
}
_HELD = {
    "REQUEUE_HOLD": "it is held after its requeue",
    "SPECIAL_EXIT": "it is held after its requeue, as a special case",
    "RESV_DEL_HOLD": "it is held because its reservation was deleted",
}
_ENDED = {
    "COMPLETED": (COMPLETED, "completed"),
    "OUT_OF_MEMORY": (OUT_OF_MEMORY, "used more memory than it requested"),
    "TIMEOUT": (TIME_LIMIT, "reached its time limit"),
    "NODE_FAIL": (INFRASTRUCTURE, "failed"),
    "BOOT_FAIL": (INFRASTRUCTURE, "did not boot"),
    "LAUNCH_FAILED": (INFRASTRUCTURE, "could not launch it"),
    "RECONFIG_FAIL": (INFRASTRUCTURE, "could not be configured for it"),
    "PREEMPTED": (PREEMPTED, "preempted by a job of higher priority"),
    "CANCELLED": (CANCELLED, "cancelled"),
    "DEADLINE": (NEVER_RAN, "could not start before its deadline"),
}

# Reasons of a pending job: what they mean and, if somebody has to act, what to do.
_PENDING = {
    "": (WAITING, "has not been considered by the scheduler yet"),
    "Resources": (WAITING, "waits for free resources"),
    "Priority": (WAITING, "waits behind jobs of higher priority"),
    "BeginTime": (WAITING, "waits for its begin time, or for the pause after a requeue to end"),
    "Dependency": (WAITING, "waits for another job"),
    "Prolog": (WAITING, "waits for its nodes to get ready"),
    "Licenses": (WAITING, "waits for a licence"),
    "Reservation": (WAITING, "waits for its reservation"),
    "ReqNodeNotAvail": (WAITING, "waits for nodes that are down, drained or reserved, maybe forever: see 'sinfo -R'"),
    "NodeDown": (WAITING, "waits for a node that is down, maybe forever: see 'sinfo -R'"),
    "FrontEndDown": (WAITING, "waits for a front end that is down"),
    "Constraints": (WAITING, "waits for nodes that have all it requests"),
    "Cleaning": (WAITING, "is being cleaned up before it runs again"),
    "SchedDefer": (WAITING, "waits for the scheduler"),
    "JobArrayTaskLimit": (WAITING, "waits for other tasks of its array"),
    "JobLaunchFailure": (WAITING, "could not be launched and waits for a retry"),
    "BurstBufferResources": (WAITING, "waits for space in the burst buffer"),
    "BurstBufferStageIn": (WAITING, "waits for its data to be staged in"),
    "PowerNotAvail": (WAITING, "waits for electric power"),
    "PowerReserved": (WAITING, "waits for electric power"),
    "FedJobLock": (WAITING, "waits for the other clusters of the federation"),
    "QOSUsageThreshold": (WAITING, "waits until its account has used less of its share"),
    "DeadLine": (WAITING, "cannot start before its deadline and will be terminated then"),
    "PartitionTimeLimit": (BLOCKED, "its time limit exceeds the partition's: lower it or choose another partition"),
    "PartitionNodeLimit": (
        BLOCKED,
        "the partition does not allow this many nodes, or they are down: request others or choose another partition",
    ),
    "PartitionDown": (BLOCKED, "the partition is down: choose another one or ask the site"),
    "PartitionInactive": (BLOCKED, "the partition is inactive: choose another one or ask the site"),
    "PartitionConfig": (BLOCKED, "the partition's limits forbid it: request less or choose another partition"),
    "BadConstraints": (BLOCKED, "no node has what it requests: change its resources"),
    "MaxMemPerLimit": (BLOCKED, "it requests more memory than is allowed per CPU or node: request less"),
    "DependencyNeverSatisfied": (BLOCKED, "the job it depends on has failed: cancel it and submit it again"),
    "JobHeldUser": (BLOCKED, "it is held: release it with 'scontrol release {id}'"),
    "JobHeldAdmin": (BLOCKED, "an administrator holds it: ask the site"),
    "JobHoldMaxRequeue": (BLOCKED, "it is held after too many requeues: release it with 'scontrol release {id}'"),
    "AccountNotAllowed": (BLOCKED, "its account may not use the partition: change one of them"),
    "QOSNotAllowed": (BLOCKED, "its account or partition does not allow its quality of service: change one of them"),
    "InvalidAccount": (BLOCKED, "its account is not valid: change it"),
    "InvalidQOS": (BLOCKED, "its quality of service is not valid: change it"),
    "ReservationDeleted": (BLOCKED, "its reservation was deleted: choose another one or none"),
    "ReservationInvalid": (BLOCKED, "its reservation is not valid: choose another one or none"),
    "BurstBufferOperation": (BLOCKED, "the burst buffer failed: 'scontrol show job {id}' says more"),
    "SystemFailure": (BLOCKED, "Slurm failed: ask the site"),
}
# The many limits of accounts and qualities of service, and sentences instead of keywords. The first match counts.
_PENDING_LIKE = (
    (r"\bheld\b|special exit", BLOCKED, "it is held: fix the cause, then release it with 'scontrol release {id}'"),
    (r"not permitted to use", BLOCKED, "change its account, quality of service or partition"),
    (r"Nodes required for job", WAITING, "waits for nodes that are taken, reserved, drained or down: see 'sinfo -R'"),
    (r"(Assoc|QOS)Max\w*WallDurationPerJob", BLOCKED, "a job may not run for that long: lower its time limit"),
    (r"(Assoc|QOS)Max\w+MinutesPerJob", BLOCKED, "a job may not use that much for that long: request less of either"),
    (r"(Assoc|QOS)Max\w+Per(Job|Node)", BLOCKED, "a job may not use that much: request less"),
    (r"QOSMin", BLOCKED, "its quality of service demands larger jobs: request more or change it"),
    (r"(Assoc|QOS)Grp(\w*(?<!Run)Minutes|Wall)", WAITING, "its group's budget is used up: waits until it is renewed"),
    (
        r"Assoc|QOS|Max\w+PerAccount|AccountingPolicy",
        WAITING,
        "waits until others of its user or group have ended; forever, if this job alone is over the limit",
    ),
    ("", WAITING, "waits"),
)
_PLAIN = ("Resources", "Priority")  # keywords that add nothing to the sentence


def judge(job: SlurmJob) -> Verdict:
    """Return what the job's state and reason mean."""
    if job.state == "PENDING":
        return _pending(job)
    if job.state in _ALIVE:
        return Verdict(ALIVE, "", _ALIVE[job.state])
    if job.state == "REVOKED":  # here, because a sibling cluster started it
        return Verdict(UNKNOWN, "", "runs on another cluster of the federation")
    if job.state in _HELD:
        return Verdict(BLOCKED, "", f"blocked: {_HELD[job.state]}: release it with 'scontrol release {job.id}'")
    if job.state == "FAILED":
        return _failed(job)
    if job.state in _ENDED:
        cause, text = _ENDED[job.state]
        if cause == INFRASTRUCTURE:
            text = f"{f'node {job.nodes}' if job.nodes else 'a node'} {text}"
        by = re.search(r"\bby (\S+)", job.raw)
        return Verdict(ENDED, cause, f"{text} by user {by[1]}" if by else text)
    return Verdict(UNKNOWN, "", f"unknown state {job.raw!r}")


def _pending(job: SlurmJob) -> Verdict:
    # If Slurm or a plug-in has a sentence, squeue shows it instead of the keyword, and some releases put '_' for its
    # spaces: 'ReqNodeNotAvail, UnavailableNodes:h100-1'.
    reason = job.reason.replace("_", " ")
    keyword = re.split(r"[^A-Za-z]", reason, maxsplit=1)[0]
    if keyword in _PENDING and (keyword or not reason):
        kind, text = _PENDING[keyword]
    else:
        kind, text = next((kind, text) for like, kind, text in _PENDING_LIKE if re.search(like, reason))
    if "maintenance" in reason:
        text = "waits for maintenance to end: a shorter time limit may let it run before"
    text = text.replace("{id}", job.id)
    blocked = "blocked: " if kind == BLOCKED else ""
    return Verdict(kind, "", blocked + text + (f" ({reason})" if reason and reason not in _PLAIN else ""))


def _failed(job: SlurmJob) -> Verdict:
    # Its reason does not help: squeue's is JobLaunchFailure for anything killed by a signal, sacct's is why it waited.
    code, _, number = job.exit_code.partition(":")
    if not job.nodes:
        return Verdict(ENDED, NEVER_RAN, "failed before it got a node")
    if number == "53":  # slurmd's error 4021, 'could not connect IO', read as if it were a signal
        return Verdict(ENDED, NEVER_RAN, "never ran: Slurm could not open its log file; does its folder exist?")
    if number not in ("", "0"):
        return Verdict(ENDED, CODE, f"its script was killed by signal {number}")
    return Verdict(ENDED, CODE, f"its script failed with exit code {code}" if code else "failed")


_MEMORY = re.compile(
    r"out[-_ ]of[-_ ]memory|OutOfMemory|\boom[-_ ]kill|exceeded (\w+ )?memory limit|RESOURCE_EXHAUSTED"
    r"|MemoryError\b|can('|no)t allocate memory|not enough memory|std::bad_alloc",
    re.IGNORECASE,
)


def looks_out_of_memory(log_tail: str) -> bool:
    """Return whether a log reports too little memory, as Slurm, the kernel, CUDA, XLA, PyTorch or Python put it."""
    return _MEMORY.search(log_tail) is not None


def when(start: str, now: float) -> str:
    """Return a predicted start in plain words; empty if it is unknown. ``now`` is in s since 1970."""
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
