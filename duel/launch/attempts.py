"""The next attempt of a run that did not finish, and what its target allows of it."""

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace

from duel.errors import UserError
from duel.job import Job
from duel.launch import directives, nodes, preflight
from duel.launch.schema import Cluster, Target
from duel.launch.views import RunView

AVOIDING = "; avoiding "
# Of a target's lines, those that decide in which nodes it may run, and how long.
WHERE = {"--partition", "--qos"}


@dataclass(frozen=True)
class Decision:
    """What to do about one run: ``job`` is its next attempt, or None if there is none; ``words`` say why."""

    seen: RunView
    job: Job | None
    words: str
    approved: bool = True  # False: only with --apply
    continues: bool = False  # the run itself, with the rows that it has


class Asked:
    """What Slurm says of the nodes and the limits of targets; it is asked once about each partition."""

    def __init__(self) -> None:
        self._members = functools.cache(lambda where: nodes.of_partitions(preflight.partition_names([*where])))
        self._minutes = functools.cache(lambda where: preflight.most_minutes([*where]))

    def members(self, lines: Iterable[str]) -> list[nodes.Node]:
        """Return the nodes in which a job with ``lines`` may run; none if Slurm does not list them."""
        return self._members(_where(lines))

    def most_minutes(self, lines: list[str]) -> float | None:
        """Return the longest time limit that the partitions allow; None if that is not known, or a QOS may lift it."""
        return None if directives.value(lines, "--qos") else self._minutes(_where(lines))


def _where(lines: Iterable[str]) -> tuple[str, ...]:
    return tuple(line for line in lines if WHERE & {*directives.names(line)})


def allowed(decisions: Iterable[Decision], cluster: Cluster, own: bool = False) -> list[Decision]:
    """Return the decisions as their targets allow them, without a job if nothing of one can be started.

    ``own``: a longer time limit is proposed within the target's own only, not up to what its partition allows.
    """
    asked = Asked()
    return [_allowed(decision, cluster, own, asked) for decision in decisions]


def _allowed(decision: Decision, cluster: Cluster, own: bool, asked: Asked) -> Decision:
    decision = _possible(decision, cluster)
    if decision.job is None or cluster.targets[decision.job.target].scheduler == "local":
        return decision
    target = cluster.targets[decision.job.target]
    job = _with_a_node_left(decision.job, target, asked)
    words = decision.words
    if job != decision.job:
        words = words.replace(AVOIDING, "; Slurm would refuse a job that avoids it, so it may run again on ")
    return _within_limit(replace(decision, job=job, words=words), job, target, own, asked)


def _possible(decision: Decision, cluster: Cluster) -> Decision:
    """Return the decision, without a job if this checkout can no longer start it."""
    if decision.job is None:
        return decision
    if decision.job.unknown:
        gone = f"this version of Duel has no {decision.job.unknown}"
    elif decision.job.target not in cluster.targets:
        gone = (
            f"its target {decision.job.target!r} is no longer in cluster.yaml, which has {', '.join(cluster.targets)}"
        )
    elif refused := _refused(decision.job, cluster.targets[decision.job.target]):
        gone = refused
    else:
        forbidden = cluster.targets[decision.job.target].without
        lost = [c for c in decision.job.changes if set(directives.names(c)) & set(forbidden)]
        if not lost:
            return decision
        if decision.approved:  # without a node to avoid, another attempt is still worth it
            words = decision.words.replace(AVOIDING, "; its target forbids --exclude, so it may run again on ")
            return replace(decision, words=words)
        gone = f"its target forbids {', '.join(name for c in lost for name in directives.names(c))}"
    return replace(decision, job=None, words=f"{decision.words}; not started: {gone}")


def _refused(job: Job, target: Target) -> str:
    """Say why the target, as it is now, does not take ``job``; empty if it does."""
    try:
        target.for_job(job)
    except UserError as error:
        return str(error)
    return ""


def _with_a_node_left(job: Job, target: Target, asked: Asked) -> Job:
    """Return ``job``, avoiding no node if Slurm would then refuse it: too few are left, or one is asked for by name."""
    avoided = directives.value(job.changes, "--exclude")
    if not avoided:
        return job
    lines, shut = target.for_job(job).directives, set(nodes.expanded(avoided))
    if named := directives.value(lines, "--nodelist"):
        refused = bool(shut & set(nodes.expanded(named)))
    else:
        members = asked.members(lines)
        left = [node for node in members if node.name not in shut]
        refused = bool(members) and (len(left) < job.nodes or nodes.too_much(lines, left) is not None)
    return replace(job, changes=without(job.changes, "--exclude")) if refused else job


def _within_limit(decision: Decision, job: Job, target: Target, own: bool, asked: Asked) -> Decision:
    """Return the decision with a time limit that is allowed; without a job if that was not enough.

    Slurm would refuse it, and with it all other jobs of the target.
    """
    wanted = directives.minutes(directives.value(job.changes, "--time") or "")
    if wanted is None:
        return decision
    proposed = not decision.approved  # else it is what an attempt before it had
    most = most_minutes(job, target, asked) if own and proposed else asked.most_minutes(target.for_job(job).directives)
    if most is None or wanted <= most:
        return decision
    if proposed and wanted >= 2 * most:  # it is twice what was not enough
        words = f"{decision.words}; not started: that was the longest that target {job.target!r} allows"
        return replace(decision, job=None, words=words)
    limit = f"--time={directives.limit(most)}"
    changes = directives.replace(list(job.changes), [limit])
    return replace(decision, job=replace(job, changes=tuple(changes)), words=f"{decision.words}, at most {limit}")


def most_minutes(job: Job, target: Target, asked: Asked | None = None) -> float | None:
    """Return the target's own time limit, else its partition's; None if that is not known, or a QOS may lift it."""
    lines = target.for_job(job).directives
    own = directives.minutes(directives.value(lines, "--time") or "")
    return own if own is not None or target.scheduler == "local" else (asked or Asked()).most_minutes(lines)


def without(changes: tuple[str, ...], option: str) -> tuple[str, ...]:
    return tuple(change for change in changes if option not in directives.names(change))
