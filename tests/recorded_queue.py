"""What the tools of a real Slurm 22.05.8 printed, and what its jobs' verdicts are.

``recorded/`` holds the output in full or, where the name says of what, the lines of some jobs.
"""

from datetime import datetime
from pathlib import Path

from duel.launch import reasons
from duel.launch.reasons import ALIVE, BLOCKED, ENDED, WAITING

RECORDED = Path(__file__).parent / "recorded"
NOW = datetime.fromisoformat("2026-11-21T00:20:00").timestamp()  # when it was recorded

NODE_IS_DOWN = "ReqNodeNotAvail, UnavailableNodes:h100-2"
NODES_ARE_DOWN = "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions"
SAID_BY_SQUEUE = {
    "completed": (ENDED, reasons.COMPLETED, "completed"),
    "code-1": (ENDED, reasons.CODE, "its script failed with exit code 1"),
    "code-3": (ENDED, reasons.CODE, "its script failed with exit code 3"),
    "code-137": (ENDED, reasons.CODE, "its script failed with exit code 137"),
    "code-200": (ENDED, reasons.CODE, "its script failed with exit code 200"),
    "signal-9": (ENDED, reasons.CODE, "its script was killed by signal 9"),
    "no-log-folder": (
        ENDED,
        reasons.NEVER_RAN,
        "never ran: Slurm could not open its log file; does its folder exist?",
    ),
    "timed-out": (ENDED, reasons.TIME_LIMIT, "reached its time limit"),
    "cancelled": (ENDED, reasons.CANCELLED, "cancelled"),
    "cancelled-while-held": (ENDED, reasons.CANCELLED, "cancelled"),
    "runs": (ENDED, reasons.CANCELLED, "cancelled"),
    "node-failed": (ENDED, reasons.INFRASTRUCTURE, "node h100-2 failed"),
    "over-deadline": (ENDED, reasons.NEVER_RAN, "could not start before its deadline"),
    "on-tpu": (ALIVE, "", "runs"),
    "urgent": (ALIVE, "", "runs"),
    "requeued": (ALIVE, "", "runs"),
    "suspended": (ALIVE, "", "is suspended"),
    "first-in-line": (WAITING, "", "waits for free resources"),
    "preempted-requeued": (WAITING, "", "waits for free resources"),
    "second-in-line": (WAITING, "", "waits behind jobs of higher priority"),
    "begins-later": (WAITING, "", "waits for its begin time, or for the pause after a requeue to end (BeginTime)"),
    "node-is-down": (
        WAITING,
        "",
        f"waits for nodes that are down, drained or reserved, maybe forever: see 'sinfo -R' ({NODE_IS_DOWN})",
    ),
    "nodes-are-down": (
        WAITING,
        "",
        f"waits for nodes that are taken, reserved, drained or down: see 'sinfo -R' ({NODES_ARE_DOWN})",
    ),
    "held": (BLOCKED, "", "blocked: it is held: release it with 'scontrol release 9' (JobHeldUser)"),
    "requeued-held": (
        BLOCKED,
        "",
        "blocked: it is held: fix the cause, then release it with 'scontrol release 28' (job requeued in held state)",
    ),
    "special": (
        BLOCKED,
        "",
        "blocked: it is held after its requeue, as a special case: release it with 'scontrol release 29'",
    ),
    "too-long": (
        BLOCKED,
        "",
        "blocked: its time limit exceeds the partition's: lower it or choose another partition (PartitionTimeLimit)",
    ),
    "too-many-nodes": (
        BLOCKED,
        "",
        f"blocked: {reasons._PENDING['PartitionNodeLimit'][1]} (PartitionNodeLimit)",
    ),
    "partition-down": (
        BLOCKED,
        "",
        "blocked: the partition is down: choose another one or ask the site (PartitionDown)",
    ),
    "depends-in-vain": (
        BLOCKED,
        "",
        "blocked: the job it depends on has failed: cancel it and submit it again (DependencyNeverSatisfied)",
    ),
    # Other people's jobs of the same user may be called anything.
    'other | people\'s, 100% "names"': (ENDED, reasons.COMPLETED, "completed"),
    "two": (ENDED, reasons.COMPLETED, "completed"),
    "größe": (ENDED, reasons.COMPLETED, "completed"),
}
SAID_BY_SQUEUE["node-failed-requeued"] = SAID_BY_SQUEUE["node-is-down"]
SAID_BY_SQUEUE["depends"] = SAID_BY_SQUEUE["depends-in-vain"]


def recorded(name: str) -> str:
    with open(RECORDED / f"{name}.txt", newline="") as file:
        return file.read()
