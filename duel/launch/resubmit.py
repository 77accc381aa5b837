"""What to do about runs that did not finish, by cause. A run that has measured some of its rows continues.

infrastructure, preemption, never submitted   retry, avoiding the node that failed
out of memory, time limit                     propose the same change for both sides of the pair; retry once approved
code error                                    show the end of its log; retry once the code has changed
cancelled                                     somebody's decision: retry only by name
"""

import dataclasses
from argparse import Namespace
from collections.abc import Callable

from duel import files, tree
from duel.catalogue import FIT, VALIDATE
from duel.files import Damaged
from duel.job import Job
from duel.launch import directives, display, intent, manage, reasons, state, submit
from duel.launch.attempts import AVOIDING, Decision, allowed, without
from duel.launch.schema import Cluster
from duel.launch.views import RunView
from duel.results import Results, Run
from duel.states import CANCELLED, FINISHED, LOST, SKIPPED
from duel.tries import counted, interrupted, planned_as

MOST_ATTEMPTS = 3
TAIL_LINES = 12
# After these a run continues where it was interrupted, if it had finished a row.
CONTINUED = (reasons.TIME_LIMIT, reasons.PREEMPTED, reasons.INFRASTRUCTURE, reasons.NEVER_RAN)

Say = Callable[[str], None]


def resubmit(args: Namespace, cluster: Cluster, results: Results, say: Say) -> int:
    """Decide about the runs that ``args`` choose, report it, and start their next attempts. Returns the exit code.

    Jobs that wait because Slurm took no more are sent first.
    """
    settle_interrupted(cluster, results, say)
    look = state.look(results)
    chosen = manage.select(look.runs, args, results)
    named = {manage.find(results, name).id for name in args.runs}
    decisions = allowed(decide(chosen, look.runs, named, args.include), cluster)
    for note in look.notes:
        say(f"not known: {note}")
    if not decisions:
        say("nothing to do: no run has failed, or each was followed by another attempt")
        return 0
    for decision in decisions:
        say(f"{decision.seen.id}: {decision.words}")
    again = [d for d in decisions if d.job and (d.approved or args.apply)]
    if any(d.job and not d.approved for d in decisions) and not args.apply:
        say("'python main.py resubmit --apply' starts the proposed attempts")
    start(apart([d for d in again if d.job]), cluster, results, say)
    return 0


def apart(decisions: list[Decision]) -> list[Decision]:
    """Return the decisions, those about sessions of one point as far apart as they were planned."""
    first: dict[Job, int] = {}
    found = []
    for one in decisions:
        assert one.job is not None
        assert one.seen.job is not None
        point, delay = dataclasses.replace(one.job.identity, session=1), one.seen.job.delay
        first[point] = min(delay, first.get(point, delay))
        found.append((one, one.job, point, delay))
    return [
        dataclasses.replace(one, job=dataclasses.replace(job, delay=delay - first[point]))
        for one, job, point, delay in found
    ]


def settle_interrupted(cluster: Cluster, results: Results, say: Say) -> None:
    """Settle a submission that was not completed, so that what was never submitted can be sent again."""
    if intent.names(results):
        from duel.launch import sender, slurm

        left = sender.turn(cluster, results, say, set())
        with slurm.only_driver(results, say):
            slurm.recover([], results, say)
        if left:
            sender.resume(cluster, results, say)


def decide(chosen: list[RunView], runs: list[RunView], named: set[str], include: str | None) -> list[Decision]:
    """Return a decision for each of ``chosen`` that did not finish, and for the other sides affected by a change.

    ``runs`` are all runs, ``named`` the ids that the user named, ``include`` a cause to retry as well.
    """
    followed = {seen.launch.after: seen.id for seen in runs if seen.launch.after} | _begun_again(runs)
    newest = {_what(seen): seen.id for seen in runs}  # the runs are sorted, oldest first
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


def _begun_again(runs: list[RunView]) -> dict[str, str]:
    """Return the run that followed in the same job, by the one before: Slurm began the job again."""
    last: dict[tuple[str, str], str] = {}
    found = {}
    for seen in runs:
        same = (seen.slurm_job_id, seen.id.partition("-")[0])
        if seen.job is None and seen.slurm_job_id and same in last:
            found[last[same]] = seen.id
        last[same] = seen.id
    return found


def _what(seen: RunView) -> str:
    """Return what a run measures. An old failure no longer matters once the same has been started again."""
    if seen.job is None:
        return f"by hand: {seen.id.partition('-')[0]}"
    return repr(seen.job.identity)


def cause_of(seen: RunView) -> str:
    """Return why a run did not finish, as one of the causes in ``duel.launch.queue``."""
    why, slurm = seen.status.why, seen.slurm.cause if seen.slurm else None
    if why == "killed":  # most likely by the kernel
        return reasons.OUT_OF_MEMORY
    if why == "warned":
        return reasons.PREEMPTED if slurm == reasons.PREEMPTED else reasons.TIME_LIMIT
    if why == "told to end" or (why is None and seen.state == CANCELLED):  # Slurm knows who did that
        explains = (reasons.PREEMPTED, reasons.TIME_LIMIT, reasons.INFRASTRUCTURE, reasons.OUT_OF_MEMORY)
        return slurm if slurm in explains else reasons.CANCELLED
    if why in (None, "input", "disproved", "diverged"):
        return reasons.INFRASTRUCTURE if seen.state == LOST else reasons.CODE
    return why


def _decide(
    seen: RunView, runs: list[RunView], followed: dict[str, str], named: bool, include: str | None
) -> list[Decision]:
    cause = cause_of(seen)
    text = f"{seen.state}, {display.describe(seen)}".rstrip(", ")
    if kept := _kept_elsewhere(seen):
        return [Decision(seen, None, f"{text}; {kept}")]
    if seen.state == LOST and seen.note and not named:
        return [Decision(seen, None, f"{text}; {seen.note}; until then retried only by name: 'resubmit {seen.id}'")]
    if seen.damaged:
        return [Decision(seen, None, f"{text}; {seen.damaged}: start it again with main.py --benchmark")]
    job = seen.job
    if job is None:
        return [Decision(seen, None, f"{text}; it was started by hand: start its script again")]
    by_name = named and (cause == reasons.CANCELLED or job.dataset)  # a training goes on after any end
    if (cause in CONTINUED or by_name) and _has_got_further(seen, job):
        return [_continued(seen, job, cause, text)]
    if job.dataset and seen.launch.code != tree.digest() and seen.has_checkpoint:
        text += "; its checkpoints are of other code, so it would start over"
    if job.attempt >= MOST_ATTEMPTS:
        text += f"; that was attempt {job.attempt} of {MOST_ATTEMPTS}: '{job.command}' starts over"
        return [Decision(seen, None, text)]
    if cause in (reasons.OUT_OF_MEMORY, reasons.TIME_LIMIT):
        return _propose(seen, job, cause, text, runs, followed)
    if cause == reasons.CANCELLED and not named:
        return [Decision(seen, None, f"{text}; retried only by name: 'resubmit {seen.id}'")]
    if cause == reasons.CODE:
        changed = seen.launch.code != tree.digest()
        if not changed and include != "code":
            return [Decision(seen, None, f"{text}{_unchanged(seen)}")]
        text += "; the code has changed since" if changed else "; retried because of --include code"
    changes, avoiding = _avoiding(seen, job, cause)
    job = dataclasses.replace(job, attempt=job.attempt + 1, changes=changes, delay=0)
    return [Decision(seen, job, f"{text}{avoiding}; attempt {job.attempt} of {MOST_ATTEMPTS}")]


def _kept_elsewhere(seen: RunView) -> str:
    """Say why a run may go on without being started again; empty if it does not. A training's second job would write
    the same checkpoints.
    """
    owner = seen.status.owner
    if seen.state == LOST and not seen.in_slurm and owner.host and not owner.is_here:
        return f"only {owner.host}, where it ran, knows whether it has ended: resubmit it there"
    if seen.slurm is None or not seen.has_job:
        return ""
    if seen.slurm.kind == reasons.ALIVE:
        return "its job has not ended yet: ask again once it has"
    goes_on = "which goes on from the last checkpoint" if seen.trains else "in a new run"
    return f"Slurm begins its job again, {goes_on}"


def _avoiding(seen: RunView, job: Job, cause: str) -> tuple[tuple[str, ...], str]:
    """Return the changes to a job whose node failed, and a note on them."""
    if cause != reasons.INFRASTRUCTURE or not (node := _failed_node(seen)):
        return job.changes, ""
    before = directives.value(directives_of(seen.run) or list(job.changes), "--exclude")
    changes = (*without(job.changes, "--exclude"), f"--exclude={','.join(filter(None, (before, node)))}")
    return changes, f"{AVOIDING}{node}"


def _has_got_further(seen: RunView, job: Job) -> bool:
    """Return whether the run has rows to keep, measured with the code that is here, and others left.

    Its last attempt must have finished one, unless it was never sent.
    """
    if job.trials or job.use_case == VALIDATE or job.preset == FIT or seen.launch.code != tree.digest():
        return False
    rows = counted(seen.run.rows())
    if not {planned_as(row) for row in job.rows()} <= {planned_as(row) for row in rows}:  # one is damaged, or gone
        return False
    if job.dataset:
        return any(map(interrupted, rows)) and seen.has_checkpoint
    done = [row for row in rows if row.status == FINISHED]
    further = seen.status.why == reasons.NEVER_RAN or any(row.attempt == job.attempt for row in done)
    return bool(done) and further and any(map(interrupted, rows))


def _continued(seen: RunView, job: Job, cause: str, text: str) -> Decision:
    rows = counted(seen.run.rows())
    done = sum(row.status == FINISHED for row in rows)
    changes, avoiding = _avoiding(seen, job, cause)
    job = dataclasses.replace(job, attempt=job.attempt + 1, changes=changes, delay=0)
    return Decision(seen, job, f"{text}{avoiding}; continues, {done} of {len(rows)} rows are measured", continues=True)


def _unchanged(seen: RunView) -> str:
    """Return why a run that failed with the same code is not retried, with the end of its log."""
    tail = "\n".join(f"    {line}" for line in _tail(seen).splitlines()[-TAIL_LINES:])
    text = "; the code is the same, so it would fail again"
    text += "; if something else was fixed (an environment, cluster.yaml), '--include code' retries it"
    return f"{text}\n{tail}".rstrip()


def _propose(
    seen: RunView, job: Job, cause: str, text: str, runs: list[RunView], followed: dict[str, str]
) -> list[Decision]:
    """Propose the same change for both sides of the pair, or none: sides that differ could not be compared."""
    change, hint = _change(seen, job, cause)
    if not change:
        return [Decision(seen, None, f"{text}; {hint}")]
    sides = [other for other in runs if other.group == seen.group and other.id not in followed and other.job]
    alive = [other.id for other in sides if not other.ended]
    if alive:
        return [Decision(seen, None, f"{text}; {change} for both sides, once {', '.join(alive)} has ended")]
    option = directives.names(change)[0]
    decisions = []
    for side in sides:
        old = side.job
        if old is None or old.attempt >= MOST_ATTEMPTS:
            text += f"; {side.id} has had {MOST_ATTEMPTS} attempts: start over"
            return [Decision(seen, None, text)]
        changes = (*without(old.changes, option), change)
        new = dataclasses.replace(old, attempt=old.attempt + 1, changes=changes, delay=0)
        why = text if side is seen else f"is the other side of {seen.id}"
        proposal = f"{why}; proposed for both sides: {change}; attempt {new.attempt} of {MOST_ATTEMPTS}"
        decisions.append(Decision(side, new, proposal, approved=False))
    return decisions


def _change(seen: RunView, job: Job, cause: str) -> tuple[str, str]:
    """Return the directive that may let a run finish, or an empty text and why there is none."""
    lines = directives_of(seen.run) + list(job.changes)
    if cause == reasons.TIME_LIMIT:
        given = directives.value(lines, "--time") or (seen.slurm.limit if seen.slurm else "")
        minutes = directives.minutes(given)
        change = f"--time={directives.limit(2 * minutes)}" if minutes else ""
        return change, "its target has no time limit to double: change cluster.yaml"
    if _device_ran_out(seen):
        return "", "the device ran out of memory, which no Slurm option changes: a smaller batch or size would help"
    if not seen.in_slurm:
        return "", "this machine's memory ran out: a smaller batch or size would help"
    return directives.more_memory(lines), "its target has no memory option to double: add one to cluster.yaml"


def _tail(seen: RunView) -> str:
    return state.log_tail(seen.run, seen.slurm_job_id)


def directives_of(run: Run) -> list[str]:
    """Return the directives that a run was started with."""
    try:
        return directives.of_script(files.read(run.script).decode(errors="replace"))
    except (FileNotFoundError, Damaged):
        return []


def _failed_node(seen: RunView) -> str:
    """Return the node to avoid; empty if Slurm named none, or several at once."""
    nodes = seen.slurm.nodes if seen.slurm else ""
    return nodes if nodes and not set(nodes) & set("[,") else ""


def _device_ran_out(seen: RunView) -> bool:
    """Return whether the device's memory ran out and not the host's, judging by the run's cause and log."""
    text = f"{seen.status.cause}\n{_tail(seen)}".lower()
    of_device = ("cuda out of memory", "resource_exhausted", "cudaerrormemoryallocation", "outofmemoryerror", "hbm")
    return any(phrase in text for phrase in of_device)


def start(decisions: list[Decision], cluster: Cluster, results: Results, say: Say) -> None:
    """Start the next attempts. Raises UserError if a target is gone or Slurm would refuse one of them."""
    by_target: dict[str, list[Decision]] = {}
    for decision in decisions:
        assert decision.job is not None
        by_target.setdefault(decision.job.target, []).append(decision)
    for group in by_target.values():
        planned = [decision.job for decision in group if decision.job]
        after = [submit.Before(one.seen.id, one.seen.group, one.continues) for one in group]
        submit.launch(planned, cluster, results, say, after)
