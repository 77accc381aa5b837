"""What sbatch's message means if it takes no job: refused forever, refused for now, or no answer at all?

Each pattern was seen on Slurm 22.05, or is in its src/common/slurm_errno.c or src/sbatch/. A message that matches none
decides nothing.
"""

import os
import re
import subprocess

from duel.launch import queue

ASK_SECONDS = 60.0

# Slurm was not reached, or does not answer: nothing is known about the job.
_SILENT = re.compile(
    r"timed out|Unable to contact|zero bytes|connection (failure|refused|reset|aborted)|unexpected message"
    r"|transport|standby mode|munge|authentication|shutdown failure",
    re.IGNORECASE,
)
# sbatch does not know its controller.
_UNCONFIGURED = re.compile(
    r"configuration source|process configuration file|slurm\.conf|ClusterName needs|DNS SRV|resolve_ctls|fetch.?config",
    re.IGNORECASE,
)
# It has as many jobs as it takes; the second line is what sbatch prints after two minutes of retrying by itself.
_FULL = re.compile(
    r"\w*Submit\w*Limit|MaxSubmit\w*|MaxJobCount|job count limit"
    r"|temporarily unable to accept|job queue full|Job creation temporarily|Resource temporarily unavailable",
    re.IGNORECASE,
)
# For any of the site's limits: a keyword before it tells which one, but not at every site.
_POLICY = "Job violates accounting/QOS policy"
# The nodes now in service do not suffice; others that are drained, down or reserved might.
_NODES = re.compile(
    r"Requested node configuration is not available|Required node not available|Nodes required for job are"
    r"|Requested nodes are busy|configuration not available now|partition not available|not usable now",
    re.IGNORECASE,
)
_FOR_EVER = re.compile(
    r"invalid|unrecognized|unknown|ambiguous|requires an argument|mutually exclusive|not permitted|denied|fatal:"
    r"|not in this partition|more processors|exceed|no partition|needs to be|must |too long|can ?not be satisfied"
    r"|command not found|no such file|^exit code"  # not sbatch's, but from the target's own command or set-up lines
    r"|(Assoc|QOS)\w*(Limit|Per(Job|Node|User|Account))\b|accounting/QOS policy",
    re.IGNORECASE,
)


def is_silence(message: str) -> bool:
    """Return whether Slurm did not answer; it may have taken the job anyway."""
    return bool(_SILENT.search(message)) or is_unconfigured(message)


def is_unconfigured(message: str) -> bool:
    """Return whether sbatch did not even know its controller: nothing was sent."""
    return bool(_UNCONFIGURED.search(message))


def is_full(message: str) -> bool:
    """Return whether Slurm has as many of this user's jobs as it takes, so that it will take the same one later."""
    if _FULL.search(message):
        return True
    # Other limits name their keyword, too: only without one do the limits themselves have to be looked up.
    return _POLICY in message and not re.search(r"\b(Assoc|QOS)[A-Z]\w+", message) and bool(submit_limits(reached=True))


def is_for_ever(message: str) -> bool:
    """Return whether the same request will still be refused tomorrow."""
    return not is_silence(message) and not is_full(message) and bool(_FOR_EVER.search(message))


def is_of_nodes(message: str) -> bool:
    """Return whether the nodes' current states may be the reason."""
    return bool(_NODES.search(message))


def full(message: str) -> str:
    """Return why Slurm takes no more: its keyword, with the site's number if that can be queried."""
    found = re.search(r"\b(Assoc|QOS)[A-Z]\w+", message)
    if found is None:
        return ", ".join(submit_limits(reached=True)) or message
    kinds = {"PerUser": "MaxSubmitJobsPU", "PerAccount": "MaxSubmitJobsPA", "Grp": "GrpSubmitJobs"}
    kind = next((name for part, name in kinds.items() if part in found[0]), "MaxSubmitJobs")
    numbers = [limit for limit in submit_limits(reached=True) if limit.startswith(f"{kind}=")]
    return ", ".join([found[0], *numbers])


def submit_limits(reached: bool) -> list[str]:
    """Return the limits on this user's number of jobs, as in ``MaxSubmitJobs=20``; empty if Slurm does not list them.

    ``reached``: only those that have been reached.
    """
    asked = ["scontrol", "show", "assoc_mgr", f"users={queue.user()}", "flags=assoc,qos"]
    try:
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=ASK_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    limits, ours = [], True
    for line in answer.stdout.splitlines():
        # A quality of service lists each user's usage below a line with that user's id.
        if of_user := re.fullmatch(r"\s*(?:\S+\()?(\d+)\)?\s*", line):
            ours = int(of_user[1]) == os.getuid()
        elif "Limits" in line or "QOS=" in line:
            ours = True
        for name, most, used in re.findall(r"\b(\w*Submit\w*)=(\d+)\((\d+)\)", line):
            if ours and (not reached or int(used) >= int(most)):
                limits.append(f"{name}={most}")
    return list(dict.fromkeys(limits))
