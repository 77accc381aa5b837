"""The commands that turn an indicative ratio into a verdict, and that measure a point again."""

import dataclasses
import shlex

from duel.catalogue import CLAIM_PAIRS, INFERENCE, PAIRED, PRESETS, WEAK
from duel.files import Damaged
from duel.job import Job
from duel.options import SAFETENSORS
from duel.record import Row
from duel.report.pairs import Outcome
from duel.results import Run


def paired_command(run: Run, pairs: list[tuple[Row, Row]], default_target: str | None) -> str:
    """Return the command that measures the ``pairs`` of ``run`` in turn, with a preset that claims a ratio."""
    try:
        job = run.launch().job or job_of([row for row, _ in pairs])
    except Damaged:
        job = job_of([row for row, _ in pairs])
    claiming = PRESETS["standard"]
    before = PRESETS.get(job.preset, claiming)
    after = before if before.pairs >= CLAIM_PAIRS else claiming
    size = job.size or before.size
    batch_sizes = job.batch_sizes
    if job.use_case == INFERENCE and not batch_sizes and before.batch_sizes != after.batch_sizes:
        batch_sizes = before.batch_sizes
    job = dataclasses.replace(
        job,
        framework=PAIRED,
        preset=after.name,
        size=None if size == after.size else size,
        batch_sizes=batch_sizes,
        pairs=None,
        profile=False,
        session=1,
        delay=0,
    )
    return spelled(job, default_target)


def again(outcome: Outcome, default_target: str | None) -> str:
    """Return the command that repeats the point of ``outcome`` in as many sessions of at least as many pairs.

    If so many sessions share the preset's pairs, each may have fewer; the command is then that of a single session.
    """
    job = job_of([row for pair in outcome.pairs for row in pair])
    command, sessions = spelled(job, default_target), len(outcome.sessions)
    preset = PRESETS.get(job.preset)  # None: another version's
    if sessions == 1 or preset is None or preset.pairs_in(sessions) < max(map(len, outcome.sessions)):
        return command
    return f"{command} --sessions {sessions}"


def spelled(job: Job, default_target: str | None) -> str:
    """Return the command of ``job``, without options at their defaults and without ``default_target``."""
    defaults = {("--preset", "standard"), ("--precision", "fp32"), ("--nodes", "1"), ("--scaling", WEAK)}
    defaults.add(("--target", str(default_target)))
    options = job.options
    weights = [options.pop()] if job.weights else []  # the one option with its value in the same argument
    arguments = ["python", "main.py"]
    for name, value in zip(options[::2], options[1::2], strict=True):
        if (name, value) not in defaults:
            arguments += [name, value]
    return shlex.join([*arguments[:6], "--paired", *arguments[6:], *weights])  # after benchmark and use case


def job_of(rows: list[Row]) -> Job:
    """Return the job that measured ``rows``, with everything explicit that it had found by itself."""
    row = max(rows, key=lambda row: row.device_count or 1)  # a job on many devices measures a single one first
    devices, nodes = row.device_count or 1, row.nodes or 1
    each = devices if row.scaling == WEAK else 1  # batch sizes are given per device
    alike = [other.batch_size for other in rows if other.device_count == row.device_count]
    batch_sizes = {size // each for size in alike if size}  # unknown if it failed before
    products = dict.fromkeys(other.product for other in rows if other.product)
    return Job(
        framework=PAIRED,
        benchmark=str(row.benchmark),
        use_case=row.use_case or 0,
        preset=str(row.preset),
        precision=str(row.precision),
        device=row.device_kind,
        target=str(row.target),
        nodes=nodes,
        devices_per_node=devices // nodes,
        weights=row.weights if str(row.weights).endswith(SAFETENSORS) else None,
        batch_sizes=tuple(sorted(batch_sizes)),
        products=tuple(products),
        microbatch=row.microbatch,
        scaling=row.scaling or WEAK,
        mode=str(row.mode),
        size=row.size,
    )
