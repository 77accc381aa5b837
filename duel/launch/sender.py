"""Send to Slurm what waits, without an open terminal: a detached process, or a small job where a site ends such ones.

``python -m duel.launch.sender`` works until nothing waits. Only one does at a time, however many are started.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TextIO

from duel import ROOT
from duel.errors import UserError
from duel.files import digest, locked
from duel.launch import cluster, directives, intent, preflight, queue, reasons, slurm
from duel.launch.environment import environment
from duel.launch.schema import Cluster, Target
from duel.launch.state import RESUBMIT
from duel.results import Results, Run
from duel.terminal import say as print_line

POLL_SECONDS = 30.0  # between two looks whether Slurm takes more
START_SECONDS = 10.0
LOCK_SECONDS = 1.0
LEFT = 75  # exit code of a sender that was told to end while something waits
NAME = f"duel-sender-{digest({'root': str(ROOT)})[:6]}"  # another checkout has its own

Say = Callable[[str], None]

JOB = """\
{shebang}
{directives}
# Sends the jobs that wait in results/queue; warned that its time is over, it submits itself again if some are left.
cd -- {root} || exit 97
unset PYTHONSAFEPATH  # the sender is found in the checkout
warned=
trap 'warned=1; kill -TERM "$sender"' {warning}
trap 'kill -TERM "$sender"' TERM
{python} -m duel.launch.sender &
sender=$!
while kill -0 "$sender" 2>/dev/null; do wait "$sender" && code=0 || code=$?; done
[[ -z $warned || $code != {left} ]] || {submit}
"""


def turn(described: Cluster, results: Results, say: Say, known: set[str]) -> bool:
    """Send what Slurm takes now of all that waits and is ours, oldest first; returns whether something is left.

    A submission that somebody else was sending is first compared with what Slurm has. ``known`` are those of which this
    process knows what was sent. Raises UserError if Slurm does not answer.
    """
    closed: set[str] = set()  # targets of which something has to wait
    with slurm.only_driver(results, say):
        for name, noted in intent.mine(results).items():
            target = next(iter(noted.runs.values())).target
            if not noted.created or target in closed:
                continue
            if name not in known or not noted.waits:
                slurm.adopt(noted, results)
            known.add(name)
            try:
                targets = [described.target(job.target)[1].for_job(job) for job in noted.runs.values()]
            except UserError as error:  # the target is gone, or takes no such job any more
                slurm.wait(name, noted, str(error), results)
            else:
                slurm.wait(name, noted, "", results)  # whoever comes after us, should we die, looks for what we sent
                slurm.send(name, noted, targets, results, say)
            if intent.read(results, name) is not None:
                closed.add(target)
    return bool(closed)


def follow_up(target: Target, runs: Sequence[Run], results: Results, say: Say) -> None:
    """Say what of a submission waits and why, and see to it that it is sent."""
    left = [run.id for run in runs if not intent.decided(run)]
    if left:
        waits = next((noted.waits for noted in intent.waiting(results).values() if left[0] in noted.runs), "")
        say(f"{len(runs) - len(left)} of {len(runs)} jobs were submitted; the others wait: {waits}")
        say(ensure(target, results))


def resume(described: Cluster, results: Results, say: Say) -> None:
    """See to it that what earlier commands left is sent."""
    names = [next(iter(noted.runs.values())).target for noted in intent.mine(results).values() if noted.created]
    targets = [described.targets[name] for name in names if name in described.targets]
    if targets and not intent.sender(results):
        # One sender sends what waits for all targets, so any that allows one will do.
        target = next((target for target in targets if target.sender != "none"), targets[0])
        try:
            say(ensure(target, results))
        except UserError as error:  # no reason for a command to fail that does something else
            say(str(error))


def before(target: Target, jobs: int, results: Results) -> None:
    """Submit the small job that sends, if that is the target's way, before ``jobs`` others leave no room for it."""
    if not isinstance(target.sender, str) and jobs > 1:
        ensure(target, results)


def ensure(target: Target, results: Results) -> str:
    """Start a sender, in the way that ``target`` allows, unless there is one; returns who sends.

    Raises UserError if it does not start, or Slurm does not take the job that would send.
    """
    who = intent.sender(results)
    if not who and target.sender == "none":
        return f"{RESUBMIT} sends them: the target starts no sender (cluster.yaml: sender)"
    if not who and target.sender == "process":
        who = _detach(results)
    elif not who:
        who = _submitted() or _submit(target, results)
    return f"{who} will submit the waiting jobs; 'python main.py status' shows them"


def _detach(results: Results) -> str:
    """Start a sender that outlives this process and its terminal; returns it."""
    results.queue.mkdir(parents=True, exist_ok=True)
    with open(results.queue / "sender.txt", "ab") as log:
        sender = subprocess.Popen(
            [sys.executable, "-m", "duel.launch.sender"],
            cwd=ROOT,
            env={name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    deadline = time.monotonic() + START_SECONDS
    while not intent.sender(results) and sender.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    if not (who := intent.sender(results)) and sender.poll() is not None and intent.mine(results):
        log_file = os.path.relpath(results.queue / "sender.txt")
        raise UserError(f"the process that would send the others has ended ({log_file}): {RESUBMIT} sends them")
    return who or f"process {sender.pid} on {os.uname().nodename}"


def _submitted() -> str:
    """Return the job that sends, if one waits or runs."""
    answer = queue.ask([queue.user()], time.time(), lambda jobs: True)
    found = [job.id for job in answer.jobs if job.name == NAME and reasons.judge(job).kind != reasons.ENDED]
    return f"job {found[0]}" if found else ""


def _submit(target: Target, results: Results) -> str:
    """Submit the job that sends; returns it. Raises UserError if Slurm does not take it."""
    results.queue.mkdir(parents=True, exist_ok=True)
    script = results.queue / "sender.sh"
    command = preflight.command(target, [str(script)])
    own = [f"--job-name={NAME}", f"--output={results.queue / 'sender.txt'}", "--open-mode=append"]
    own = directives.without([*own, "--signal=B:USR2@60"], [*target.sender], target.without)
    script.write_text(
        JOB.format(
            shebang=target.shebang,
            directives="\n".join(f"#SBATCH {line}" for line in [*own, *target.sender]),
            root=shlex.quote(str(ROOT)),
            python=shlex.quote(sys.executable),
            left=LEFT,
            warning=directives.warning_signal([*own, *target.sender]),
            submit=shlex.join(command),
        )
    )
    with environment(target):
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"the job that would send the others was not taken: {' '.join(done.stderr.split())}")
    return f"job {''.join(re.findall('[0-9]+', done.stdout)[:1])}"


def work(results: Results, say: Say) -> int:
    """Send all that waits, taking turns with other drivers; returns the exit code."""
    until = time.monotonic() + LOCK_SECONDS  # whoever looks for a sender holds the lock for a moment
    while True:
        with locked(intent.lock(results), wait=False) as lock:
            if lock is not None:
                return _work(lock, results, say)
        if time.monotonic() > until:
            return 0  # there is another
        time.sleep(0.05)


def _work(lock: TextIO, results: Results, say: Say) -> int:
    told: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        told.append(number)

    signal.signal(signal.SIGTERM, stop)
    lock.truncate(0)
    job = os.environ.get("SLURM_JOB_ID")
    lock.write(f"job {job}" if job else f"process {os.getpid()} on {os.uname().nodename}")
    lock.flush()
    said, known = "", set[str]()
    while intent.names(results):
        try:
            if not turn(cluster.load(ROOT / "cluster.yaml"), results, say, known):
                return 0
        except UserError as error:  # it may be mended, or Slurm be back, by the next turn
            known.clear()
            if str(error) != said:
                said = str(error)
                say(said)
        until = time.monotonic() + POLL_SECONDS
        while not told and time.monotonic() < until:
            time.sleep(0.5)
        if told:
            return LEFT
    return 0


if __name__ == "__main__":
    sys.exit(work(Results(ROOT / "results"), print_line))
