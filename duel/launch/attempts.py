"""The next attempt of a run that did not finish, and what its target allows of it."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from duel.job import Job
from duel.launch import directives, nodes, preflight
from duel.launch.schema import Cluster, Target
from duel.launch.views import RunView

AVOIDING = "; avoiding "
Longest = Callable[[Job, Target], float | None]


@dataclass(frozen=True)
class Decision:
    """What to do about one run: ``job`` is its next attempt, or None if there is none; ``words`` say why."""

    seen: RunView
    job: Job | None
    words: str
    approved: bool = True  # False: only with --apply
    continues: bool = False  # the run itself, with the rows that it has


def allowed(decision: Decision, cluster: Cluster, longest: Longest) -> Decision:
    """Return the decision as its target allows it, without a job if nothing of it can be started.

    ``longest`` says how many minutes a job may ask for: what its partition allows, or less.
    """
    decision = _possible(decision, cluster)
    if decision.job is None or cluster.targets[decision.job.target].scheduler == "local":
        return decision
    target = cluster.targets[decision.job.target]
    job = _with_a_node_left(decision.job, target)
    words = decision.words
    if job != decision.job:
        words = words.replace(AVOIDING, "; there is no other node, so it may run again on ")
    return _within_limit(replace(decision, job=job, words=words), job, lambda: longest(job, target))


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


def _with_a_node_left(job: Job, target: Target) -> Job:
    """Return ``job``, avoiding no node if its partition then has too few: Slurm would refuse it."""
    avoided, lines = directives.value(job.changes, "--exclude"), target.for_job(job).directives
    if not avoided:
        return job
    if named := directives.value(lines, "--nodelist"):
        there = nodes.expanded(named)
    else:
        there = [node.name for node in nodes.of_partitions(preflight.partition_names(lines))]
    if not there or len(set(there) - set(nodes.expanded(avoided))) >= job.nodes:
        return job
    return replace(job, changes=without(job.changes, "--exclude"))


def _within_limit(decision: Decision, job: Job, longest: Callable[[], float | None]) -> Decision:
    """Return the decision with a time limit of ``longest`` minutes at most; without a job if that was not enough.

    Slurm would refuse it, and with it all other jobs of the target.
    """
    asked = directives.minutes(directives.value(job.changes, "--time") or "")
    most = longest() if asked is not None else None  # Slurm is asked
    if asked is None or most is None or asked <= most:
        return decision
    if asked >= 2 * most:  # it is twice what was not enough
        words = f"{decision.words}; not started: that was the longest that target {job.target!r} allows"
        return replace(decision, job=None, words=words)
    limit = f"--time={directives.limit(most)}"
    changes = directives.replace(list(job.changes), [limit])
    return replace(decision, job=replace(job, changes=tuple(changes)), words=f"{decision.words}, at most {limit}")


def of_partition(job: Job, target: Target) -> float | None:
    """Return the longest time limit that the partition allows; None if that is not known."""
    return preflight.most_minutes(target.for_job(job).directives)


def most_minutes(job: Job, target: Target) -> float | None:
    """Return the target's own time limit, else its partition's; None if it has neither."""
    lines = target.for_job(job).directives
    own = directives.minutes(directives.value(lines, "--time") or "")
    return own if own is not None or target.scheduler == "local" else preflight.most_minutes(lines)


def without(changes: tuple[str, ...], option: str) -> tuple[str, ...]:
    return tuple(change for change in changes if option not in directives.names(change))
