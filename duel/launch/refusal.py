"""What sbatch's words mean where it takes no job: is that forever, for now, or no answer at all?

Each pattern was seen on Slurm 22.05, or stands in its src/common/slurm_errno.c and src/sbatch/. A word that none of
them has decides nothing.
"""

import os
import re
import subprocess

from duel.launch import state

ASK_SECONDS = 60.0

# Slurm was not reached, or does not answer: it said nothing of the job.
_SILENT = re.compile(
    r"timed out|Unable to contact|zero bytes|connection (failure|refused|reset|aborted)|unexpected message"
    r"|transport|standby mode|munge|authentication|shutdown failure",
    re.IGNORECASE,
)
# sbatch does not know where the controller is.
_UNCONFIGURED = re.compile(
    r"configuration source|process configuration file|slurm\.conf|ClusterName needs|DNS SRV|resolve_ctls|fetch.?config",
    re.IGNORECASE,
)
# It has as many jobs as it takes; the second line is what sbatch says after two minutes of trying by itself.
_FULL = re.compile(
    r"\w*Submit\w*Limit|MaxSubmit\w*|MaxJobCount|job count limit"
    r"|temporarily unable to accept|job queue full|Job creation temporarily|Resource temporarily unavailable",
    re.IGNORECASE,
)
# Of which of the site's limits: the word that tells stands before it, but not at every site.
_POLICY = "Job violates accounting/QOS policy"
# The nodes as they are now do not do; others that are drained, down or reserved might.
_NODES = re.compile(
    r"Requested node configuration is not available|Required node not available|Nodes required for job are"
    r"|Requested nodes are busy|configuration not available now|partition not available|not usable now",
    re.IGNORECASE,
)
_FOR_EVER = re.compile(
    r"invalid|unrecognized|unknown|ambiguous|requires an argument|mutually exclusive|not permitted|denied|fatal:"
    r"|not in this partition|more processors|exceed|no partition|needs to be|must |too long|can ?not be satisfied"
    r"|command not found|no such file|^exit code"  # not sbatch's: the target's own command, or its lines before it
    r"|(Assoc|QOS)\w*(Limit|Per(Job|Node|User|Account))\b|accounting/QOS policy",
    re.IGNORECASE,
)


def is_silence(words: str) -> bool:
    """Whether Slurm did not answer; whether it took the job all the same is another question."""
    return bool(_SILENT.search(words)) or is_unconfigured(words)


def is_unconfigured(words: str) -> bool:
    """Whether sbatch did not even know whom to ask: nothing was sent."""
    return bool(_UNCONFIGURED.search(words))


def is_full(words: str) -> bool:
    """Whether Slurm has as many jobs of this user as it takes, so that it takes the same one later."""
    if _FULL.search(words):
        return True
    # Other limits have their word, too: only where there is none is the sentence of all of them to be looked into.
    return _POLICY in words and not re.search(r"\b(Assoc|QOS)[A-Z]\w+", words) and bool(submit_limits(reached=True))


def is_for_ever(words: str) -> bool:
    """Whether the same request will be refused tomorrow."""
    return not is_silence(words) and not is_full(words) and bool(_FOR_EVER.search(words))


def is_of_nodes(words: str) -> bool:
    """Whether the nodes' states of the moment may be why."""
    return bool(_NODES.search(words))


def full(words: str) -> str:
    """Why Slurm takes no more: its own word, with the site's number where that can be asked for."""
    found = re.search(r"\b(Assoc|QOS)[A-Z]\w+", words)
    if found is None:
        return ", ".join(submit_limits(reached=True)) or words
    kinds = {"PerUser": "MaxSubmitJobsPU", "PerAccount": "MaxSubmitJobsPA", "Grp": "GrpSubmitJobs"}
    kind = next((name for part, name in kinds.items() if part in found[0]), "MaxSubmitJobs")
    numbers = [limit for limit in submit_limits(reached=True) if limit.startswith(f"{kind}=")]
    return ", ".join([found[0], *numbers])


def submit_limits(reached: bool) -> list[str]:
    """The limits on how many jobs this user may have, as in ``MaxSubmitJobs=20``; empty where Slurm does not say.

    ``reached``: those alone that have no room left.
    """
    asked = ["scontrol", "show", "assoc_mgr", f"users={state.user()}", "flags=assoc,qos"]
    try:
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=ASK_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    limits, ours = [], True
    for line in answer.stdout.splitlines():
        # A quality of service lists each user's use below a line of that user's number.
        if of_user := re.fullmatch(r"\s*(?:\S+\()?(\d+)\)?\s*", line):
            ours = int(of_user[1]) == os.getuid()
        elif "Limits" in line or "QOS=" in line:
            ours = True
        for name, most, used in re.findall(r"\b(\w*Submit\w*)=(\d+)\((\d+)\)", line):
            if ours and (not reached or int(used) >= int(most)):
                limits.append(f"{name}={most}")
    return list(dict.fromkeys(limits))
