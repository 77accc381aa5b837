"""What to do about runs that did not finish, by the cause of their end.

infrastructure, preemption, never submitted   again, without the node that failed
out of memory, time limit                     the same change for both sides of the pair, once it is approved
an error of the code                          the end of its log; again once the code has changed
cancelled                                     a person's will: again only by name
"""

import dataclasses
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass

from duel import files
from duel.catalogue import PAIRED
from duel.files import Damaged
from duel.job import Job
from duel.launch import directives, display, manage, reasons, state, submit
from duel.launch.schema import Cluster
from duel.launch.views import RunView
from duel.results import Results
from duel.states import CANCELLED, FINISHED, LOST, SKIPPED

MOST_ATTEMPTS = 3
TAIL_LINES = 12

Say = Callable[[str], None]


@dataclass(frozen=True)
class Decision:
    """What to do about one run: ``job`` is its next attempt, None where there is none; ``words`` say why."""

    seen: RunView
    job: Job | None
    words: str
    approved: bool = True  # False: only with --apply


def resubmit(args: Namespace, cluster: Cluster, results: Results, say: Say) -> int:
    """Decide about the runs that ``args`` choose, say so, and start what is to be started. Returns the exit code.

    What waits because Slurm took no more is sent first.
    """
    settle_interrupted(cluster, results, say)
    look = state.look(results)
    chosen = manage.select(look.runs, args, results)
    named = {manage.find(results, name).id for name in args.runs}
    decisions = [_possible(d, cluster) for d in decide(chosen, look.runs, named, args.include)]
    for note in look.notes:
        say(f"not known: {note}")
    if not decisions:
        say("nothing to do: no run has failed, or each was followed by another attempt")
        return 0
    for decision in decisions:
        say(f"{decision.seen.id}: {decision.words}")
    again = [d for d in decisions if d.job and (d.approved or args.apply)]
    if any(d.job and not d.approved for d in decisions) and not args.apply:
        say("'python main.py resubmit --apply' starts what is proposed")
    start([d for d in again if d.job], cluster, results, say)
    return 0


def _possible(decision: Decision, cluster: Cluster) -> Decision:
    """The same decision, or none to start where its target is no longer there."""
    if decision.job is None:
        return decision
    if decision.job.unknown:
        gone = f"this version of Duel has no {decision.job.unknown}"
    elif decision.job.target not in cluster.targets:
        gone = (
            f"its target {decision.job.target!r} is no longer in cluster.yaml, which has {', '.join(cluster.targets)}"
        )
    else:
        return decision
    return dataclasses.replace(decision, job=None, words=f"{decision.words}; not started: {gone}")


def settle_interrupted(cluster: Cluster, results: Results, say: Say) -> None:
    """Sort out a submission that did not come to its end: what never went in can then be sent again."""
    if results.intent.exists():
        from duel.launch import slurm

        slurm.send_waiting(cluster, results, say)
        with slurm.only_driver(results, say):
            slurm.recover([], results, say)


def decide(chosen: list[RunView], runs: list[RunView], named: set[str], include: str | None) -> list[Decision]:
    """One decision for each of ``chosen`` that did not finish, and for the other sides that a change concerns.

    ``runs`` are all there are, ``named`` the ids that the user named, ``include`` a cause that is to be retried, too.
    """
    followed = {seen.launch.after: seen.id for seen in runs if seen.launch.after}
    newest = {_what(seen): seen.id for seen in runs}  # they come oldest first
    decisions: dict[str, Decision] = {}
    for seen in chosen:
        if not seen.ended or seen.state in (FINISHED, SKIPPED):
            if seen.id in named:
                decisions[seen.id] = Decision(seen, None, f"is {seen.state}")
        elif seen.id in followed:
            if seen.id in named:
                decisions[seen.id] = Decision(seen, None, f"was followed by {followed[seen.id]}")
        elif seen.id not in decisions and (seen.id in named or newest[_what(seen)] == seen.id):
            for decision in _decide(seen, runs, followed, seen.id in named, include):
                decisions[decision.seen.id] = decision
    return list(decisions.values())


def _what(seen: RunView) -> str:
    """What a run is a run of. An old failure of something that was started again since concerns nobody."""
    if seen.job is None:
        return f"by hand: {seen.id.partition('-')[0]}"
    return repr(dataclasses.replace(seen.job, attempt=1, changes=(), delay=0))


def cause_of(seen: RunView) -> str:
    """Why a run did not finish, as one of the causes of ``duel.launch.queue``."""
    why, slurm = seen.status.why, seen.slurm.cause if seen.slurm else None
    if why == "killed":  # by the kernel, as far as anyone can tell
        return reasons.OUT_OF_MEMORY
    if why == "warned":
        return reasons.PREEMPTED if slurm == reasons.PREEMPTED else reasons.TIME_LIMIT
    if why == "told to end" or (why is None and seen.state == CANCELLED):  # who did that, Slurm knows
        explains = (reasons.PREEMPTED, reasons.TIME_LIMIT, reasons.INFRASTRUCTURE, reasons.OUT_OF_MEMORY)
        return slurm if slurm in explains else reasons.CANCELLED
    if why in (None, "input", "disproved"):
        return reasons.INFRASTRUCTURE if seen.state == LOST else reasons.CODE
    return why


def _decide(
    seen: RunView, runs: list[RunView], followed: dict[str, str], named: bool, include: str | None
) -> list[Decision]:
    cause = cause_of(seen)
    words = f"{seen.state}, {display.describe(seen)}".rstrip(", ")
    if seen.damaged:
        return [Decision(seen, None, f"{words}; {seen.damaged}: start it again with main.py --benchmark")]
    job = seen.job
    if job is None:
        return [Decision(seen, None, f"{words}; it was started by hand: start its script again")]
    if job.attempt >= MOST_ATTEMPTS:
        side = "--paired" if job.framework == PAIRED else f"--framework {job.framework}"
        again = f"python main.py --benchmark {job.benchmark} --use_case {job.use_case} {side}"
        words += f"; that was attempt {job.attempt} of {MOST_ATTEMPTS}: '{again}' starts from the beginning"
        return [Decision(seen, None, words)]
    if cause in (reasons.OUT_OF_MEMORY, reasons.TIME_LIMIT):
        return _propose(seen, job, cause, words, runs, followed)
    if cause == reasons.CANCELLED and not named:
        return [Decision(seen, None, f"{words}; again only by name: 'resubmit {seen.id}'")]
    if cause == reasons.CODE:
        changed = seen.launch.code != submit.code_digest()
        if not changed and include != "code":
            return [Decision(seen, None, f"{words}{_unchanged(seen)}")]
        words += "; the code has changed since" if changed else "; asked for by --include code"
    changes = job.changes
    if cause == reasons.INFRASTRUCTURE and (node := _failed_node(seen)):
        before = directives.value(_directives(seen) or list(changes), "--exclude")
        changes = (*_without(changes, "--exclude"), f"--exclude={','.join(filter(None, (before, node)))}")
        words += f"; without {node}"
    job = dataclasses.replace(job, attempt=job.attempt + 1, changes=changes, delay=0)
    return [Decision(seen, job, f"{words}; attempt {job.attempt} of {MOST_ATTEMPTS}")]


def _unchanged(seen: RunView) -> str:
    """Why a run whose code failed, and is the same, is not started again, with the end of its log."""
    tail = "\n".join(f"    {line}" for line in _tail(seen).splitlines()[-TAIL_LINES:])
    words = "; the code is the same, so it would fail again"
    words += "; if something else was repaired (an environment, cluster.yaml): '--include code' starts it again"
    return f"{words}\n{tail}".rstrip()


def _propose(
    seen: RunView, job: Job, cause: str, words: str, runs: list[RunView], followed: dict[str, str]
) -> list[Decision]:
    """The same change for both sides of the pair, or none: sides that differ in it could not be compared."""
    change, hint = _change(seen, job, cause)
    if not change:
        return [Decision(seen, None, f"{words}; {hint}")]
    sides = [other for other in runs if other.group == seen.group and other.id not in followed and other.job]
    alive = [other.id for other in sides if not other.ended]
    if alive:
        return [Decision(seen, None, f"{words}; {change} for both sides, once {', '.join(alive)} has ended")]
    option = directives.names(change)[0]
    decisions = []
    for side in sides:
        old = side.job
        if old is None or old.attempt >= MOST_ATTEMPTS:
            words += f"; {side.id} has had {MOST_ATTEMPTS} attempts: start from the beginning"
            return [Decision(seen, None, words)]
        changes = (*_without(old.changes, option), change)
        new = dataclasses.replace(old, attempt=old.attempt + 1, changes=changes, delay=0)
        why = words if side is seen else f"is the other side of {seen.id}"
        text = f"{why}; proposed for both sides: {change}; attempt {new.attempt} of {MOST_ATTEMPTS}"
        decisions.append(Decision(side, new, text, approved=False))
    return decisions


def _change(seen: RunView, job: Job, cause: str) -> tuple[str, str]:
    """The directive that may let a run finish; else the empty text, and why there is none."""
    lines = _directives(seen) + list(job.changes)
    if cause == reasons.TIME_LIMIT:
        given = directives.value(lines, "--time") or (seen.slurm.limit if seen.slurm else "")
        minutes = directives.minutes(given)
        change = f"--time={directives.limit(2 * minutes)}" if minutes else ""
        return change, "its target gives no time limit that could be doubled: change cluster.yaml"
    if _device_ran_out(seen):
        hint = "the memory of the device ran out, which no line of Slurm's changes: a smaller batch or size would help"
        return "", hint
    return _more_memory(lines), "its target has no memory line that could be doubled: add one to cluster.yaml"


def _tail(seen: RunView) -> str:
    return state.log_tail(seen.run, seen.slurm_job_id)


def _directives(seen: RunView) -> list[str]:
    """Those that it ran with."""
    try:
        return directives.of_script(files.read(seen.run.script).decode(errors="replace"))
    except (FileNotFoundError, Damaged):
        return []


def _without(changes: tuple[str, ...], option: str) -> tuple[str, ...]:
    return tuple(change for change in changes if option not in directives.names(change))


def _failed_node(seen: RunView) -> str:
    """The node to keep away from; empty where Slurm named none, or several at once."""
    nodes = seen.slurm.nodes if seen.slurm else ""
    return nodes if nodes and not set(nodes) & set("[,") else ""


def _device_ran_out(seen: RunView) -> bool:
    """Whether it was the device's memory and not the host's, from the words that speak of it."""
    words = f"{seen.status.cause}\n{_tail(seen)}".lower()
    of_device = ("cuda out of memory", "resource_exhausted", "cudaerrormemoryallocation", "outofmemoryerror", "hbm")
    return any(word in words for word in of_device)


def _more_memory(lines: list[str]) -> str:
    """The memory line of ``lines``, doubled; empty where there is none, or one that asks for all."""
    for option in ("--mem", "--mem-per-cpu", "--mem-per-gpu"):
        text = directives.value(lines, option) or ""
        number = text.rstrip("KMGTkmgt")
        if number.isdecimal() and int(number):
            return f"{option}={2 * int(number)}{text[len(number) :]}"
    return ""


def start(decisions: list[Decision], cluster: Cluster, results: Results, say: Say) -> None:
    """Start the next attempts. Raises UserError where a target is gone, or Slurm would refuse one of them."""
    by_target: dict[str, list[Decision]] = {}
    for decision in decisions:
        assert decision.job is not None
        by_target.setdefault(decision.job.target, []).append(decision)
    for group in by_target.values():
        planned = [decision.job for decision in group if decision.job]
        after = [(decision.seen.id, decision.seen.group) for decision in group]
        submit.launch(planned, cluster, results, say, after)
