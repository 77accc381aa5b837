"""What to do about runs that did not finish, by the cause of their end.

infrastructure, preemption, never submitted   again, without the node that failed
out of memory, time limit                     the same change for both sides of the pair, once it is approved
an error of the code                          the end of its log; again once the code has changed
cancelled                                     a person's will: again only by name
"""

import dataclasses
import json
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from duel.catalogue import PAIRED
from duel.job import Job
from duel.launch import directives, jobs, queue, state, submit
from duel.launch.cluster import Cluster
from duel.record import CANCELLED, FINISHED, LOST, SKIPPED, TERMINAL
from duel.results import Results, stamp

MOST_ATTEMPTS = 3
TAIL_LINES = 12

Say = Callable[[str], None]


@dataclass(frozen=True)
class Decision:
    """What to do about one run: ``job`` is its next attempt, None where there is none; ``words`` say why."""

    status: dict[str, Any]
    job: Job | None
    words: str
    approved: bool = True  # False: only with --apply


def resubmit(args: Namespace, cluster: Cluster, results: Results, say: Say) -> int:
    """Decide about the runs that ``args`` choose, say so, and start what is to be started. Returns the exit code."""
    settle_interrupted(results, say)
    seen = state.look(results)
    chosen = jobs.select(seen.statuses, args, results)
    _add_tails(chosen, results)
    named = {jobs.find(results, name).id for name in args.runs}
    decisions = [_possible(d, cluster) for d in decide(chosen, seen.statuses, named, args.include)]
    for note in seen.notes:
        say(f"not known: {note}")
    if not decisions:
        say("nothing to do: no run has failed, or each was followed by another attempt")
        return 0
    for decision in decisions:
        say(f"{decision.status['run_id']}: {decision.words}")
    again = [d for d in decisions if d.job and (d.approved or args.apply)]
    if any(d.job and not d.approved for d in decisions) and not args.apply:
        say("'python main.py resubmit --apply' starts what is proposed")
    start([d for d in again if d.job], cluster, results, say)
    return 0


def _possible(decision: Decision, cluster: Cluster) -> Decision:
    """The same decision, or none to start where its target is no longer there."""
    if decision.job is None or decision.job.target in cluster.targets:
        return decision
    gone = f"its target {decision.job.target!r} is no longer in cluster.yaml, which has {', '.join(cluster.targets)}"
    return dataclasses.replace(decision, job=None, words=f"{decision.words}; not started: {gone}")


def settle_interrupted(results: Results, say: Say) -> None:
    """Sort out a submission that was interrupted: what never went in can then be sent again."""
    if results.intent.exists():
        from duel.launch import slurm

        with slurm.only_driver(results, say):
            submit.recover([], results, say)


def decide(
    chosen: list[dict[str, Any]], statuses: list[dict[str, Any]], named: set[str], include: list[str]
) -> list[Decision]:
    """One decision for each of ``chosen`` that did not finish, and for the other sides that a change concerns.

    ``statuses`` are those of all runs, ``named`` the ids that the user named, ``include`` the causes asked for.
    """
    followed = {str(status["after"]): str(status["run_id"]) for status in statuses if status.get("after")}
    newest = {_what(status): status["run_id"] for status in statuses}  # they come oldest first
    decisions: dict[str, Decision] = {}
    for status in chosen:
        run_id = str(status["run_id"])
        if status["state"] not in TERMINAL or status["state"] in (FINISHED, SKIPPED):
            if run_id in named:
                decisions[run_id] = Decision(status, None, f"is {status['state']}")
        elif run_id in followed:
            if run_id in named:
                decisions[run_id] = Decision(status, None, f"was followed by {followed[run_id]}")
        elif run_id not in decisions and (run_id in named or newest[_what(status)] == run_id):
            for decision in _decide(status, statuses, followed, run_id in named, include):
                decisions[str(decision.status["run_id"])] = decision
    return list(decisions.values())


def _what(status: dict[str, Any]) -> str:
    """What a run is a run of. An old failure of something that was started again since concerns nobody."""
    stored = (status.get("job") or {}).items()
    # None is left out: an older run knows nothing of what was added since.
    job = {name: value for name, value in stored if name not in ("attempt", "changes") and value is not None}
    return json.dumps(job, sort_keys=True) if job else f"by hand: {status['run_id'].partition('-')[0]}"


def cause_of(status: dict[str, Any]) -> str:
    """Why a run did not finish, as one of the causes of ``duel.launch.queue``."""
    slurm = status.get("slurm", {})
    words = str(status.get("cause", ""))
    if status.get("why"):
        return str(status["why"])
    if words.startswith(("out of memory", "killed by SIGKILL")):  # by the kernel, as far as anyone can tell
        return queue.OUT_OF_MEMORY
    if words.startswith("ended by SIGUSR2"):
        return queue.PREEMPTED if slurm.get("cause") == queue.PREEMPTED else queue.TIME_LIMIT
    if status["state"] == CANCELLED:  # told to end by a signal; who did that, Slurm knows
        explains = (queue.PREEMPTED, queue.TIME_LIMIT, queue.INFRASTRUCTURE, queue.OUT_OF_MEMORY)
        return str(slurm["cause"]) if slurm.get("cause") in explains else queue.CANCELLED
    if status["state"] == LOST:
        return queue.INFRASTRUCTURE
    return queue.NEVER_RAN if words.startswith(("Slurm refused", "never submitted")) else queue.CODE


def _decide(
    status: dict[str, Any],
    statuses: list[dict[str, Any]],
    followed: dict[str, str],
    named: bool,
    include: list[str],
) -> list[Decision]:
    cause = cause_of(status)
    words = f"{status['state']}, {state.describe(status)}".rstrip(", ")
    if status.get("damaged"):
        return [Decision(status, None, f"{words}; {status['damaged']}: start it anew with main.py --benchmark")]
    if not status.get("job"):
        return [Decision(status, None, f"{words}; it was started by hand: start its script again")]
    job = _job(status)
    if job is None:
        return [Decision(status, None, f"{words}; its launch.json is of another version: start it anew")]
    if job.attempt >= MOST_ATTEMPTS:
        side = "--paired" if job.framework == PAIRED else f"--framework {job.framework}"
        anew = f"python main.py --benchmark {job.benchmark} --use_case {job.use_case} {side}"
        return [
            Decision(status, None, f"{words}; that was attempt {job.attempt} of {MOST_ATTEMPTS}: '{anew}' begins anew")
        ]
    if cause in (queue.OUT_OF_MEMORY, queue.TIME_LIMIT):
        return _propose(status, job, cause, words, statuses, followed)
    if cause == queue.CANCELLED and not named:
        return [Decision(status, None, f"{words}; again only by name: 'resubmit {status['run_id']}'")]
    if cause == queue.CODE:
        changed = status.get("code") != submit.code_digest()
        if not changed and "code" not in include:
            tail = "\n".join(f"    {line}" for line in str(status.get("tail", "")).splitlines()[-TAIL_LINES:])
            words += "; the code is the same, so it would fail again"
            words += "; if something else was mended (an environment, cluster.yaml): '--include code' starts it again"
            return [Decision(status, None, f"{words}\n{tail}".rstrip())]
        words += "; the code has changed since" if changed else "; asked for by --include code"
    changes = job.changes
    if cause == queue.INFRASTRUCTURE and (node := _failed_node(status)):
        before = directives.value(status.get("directives") or changes, "--exclude")
        changes = (*_without(changes, "--exclude"), f"--exclude={','.join(filter(None, (before, node)))}")
        words += f"; without {node}"
    job = dataclasses.replace(job, attempt=job.attempt + 1, changes=changes)
    return [Decision(status, job, f"{words}; attempt {job.attempt} of {MOST_ATTEMPTS}")]


def _propose(
    status: dict[str, Any],
    job: Job,
    cause: str,
    words: str,
    statuses: list[dict[str, Any]],
    followed: dict[str, str],
) -> list[Decision]:
    """The same change for both sides of the pair, or none: sides that differ in it could not be compared."""
    lines = list(status.get("directives") or []) + list(job.changes)
    if cause == queue.TIME_LIMIT:
        given = directives.value(lines, "--time") or status.get("slurm", {}).get("limit") or ""
        minutes = directives.minutes(given)
        change = f"--time={directives.limit(2 * minutes)}" if minutes else ""
        hint = "its target gives no time limit that could be doubled: change cluster.yaml"
    elif _device_ran_out(status):
        change = ""
        hint = "the memory of the device ran out, which no line of Slurm's changes: a smaller batch or size would help"
    else:
        change = _more_memory(lines)
        hint = "its target has no memory line that could be doubled: add one to cluster.yaml"
    if not change:
        return [Decision(status, None, f"{words}; {hint}")]
    sides = [
        other
        for other in statuses
        if other.get("pair") == status.get("pair") and other["run_id"] not in followed and other.get("job")
    ]
    alive = [other["run_id"] for other in sides if other["state"] not in TERMINAL]
    if alive:
        return [Decision(status, None, f"{words}; {change} for both sides, once {', '.join(alive)} has ended")]
    option = directives.names(change)[0]
    decisions = []
    for side in sides:
        old = _job(side)
        if old is None or old.attempt >= MOST_ATTEMPTS:
            return [Decision(status, None, f"{words}; {side['run_id']} has had {MOST_ATTEMPTS} attempts: begin anew")]
        new = dataclasses.replace(old, attempt=old.attempt + 1, changes=(*_without(old.changes, option), change))
        why = words if side is status else f"is the other side of {status['run_id']}"
        said = f"{why}; proposed for both sides: {change}; attempt {new.attempt} of {MOST_ATTEMPTS}"
        decisions.append(Decision(side, new, said, approved=False))
    return decisions


def _job(status: dict[str, Any]) -> Job | None:
    try:
        return Job(**status["job"])
    except (TypeError, KeyError, AssertionError):
        return None


def _without(changes: tuple[str, ...], option: str) -> tuple[str, ...]:
    return tuple(change for change in changes if option not in directives.names(change))


def _failed_node(status: dict[str, Any]) -> str:
    """The node to keep away from; empty where Slurm named none, or several at once."""
    nodes = str(status.get("slurm", {}).get("nodes", ""))
    return nodes if nodes and not set(nodes) & set("[,") else ""


def _device_ran_out(status: dict[str, Any]) -> bool:
    """Whether it was the device's memory and not the host's, from the words that speak of it."""
    words = f"{status.get('cause', '')}\n{status.get('tail', '')}".lower()
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
        stamps = {str(decision.status["pair"]): stamp() for decision in group}
        run_ids = [job.run_id(stamps[str(d.status["pair"])]) for d, job in zip(group, planned, strict=True)]
        launches = [{"pair": d.status["pair"], "after": d.status["run_id"]} for d in group]
        submit.launch(planned, cluster, results, say, run_ids, launches)


def _add_tails(statuses: list[dict[str, Any]], results: Results) -> None:
    """Add the end of its log, ``tail``, and the directives it ran with, to every status that may need it."""
    for status in statuses:
        if status["state"] in TERMINAL - {FINISHED, SKIPPED}:
            run = results.run(status["run_id"])
            status["tail"] = state.log_tail(run, str(status.get("slurm_job_id") or ""))
            if run.script.exists():
                status["directives"] = directives.of_script(run.script.read_text())
