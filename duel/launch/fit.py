"""Plan programs for TPUs that are not here: does it compile, what memory does it take, which batch is the largest?

JAX's interpreter with libtpu compiles the twins' own programs (``jax/_ahead.py``). What was found is kept in
results/fit/<chip>.json, with the versions and the code that it is of; the preflight of a TPU job reads it.
"""

import dataclasses
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from duel import CODE, ROOT, certificate, files, tries, variables
from duel.catalogue import BENCHMARKS, STRONG, USE_CASES
from duel.chips import CHIPS, bound
from duel.errors import UserError
from duel.files import Damaged, write_atomically
from duel.job import Job
from duel.modes import DEFAULT, settings
from duel.terminal import Table

LIMIT_SECONDS = 900.0  # that a compilation may take
FITS, TOO_LARGE, TOO_SLOW, FAILED = "fits", "does not fit", "not compiled within the limit", "does not compile"
ANSWERS = (FITS, TOO_LARGE)

Say = Callable[[str], None]


@dataclass(frozen=True)
class Cell:
    """What is compiled: one step of one side, JAX's."""

    chip: str
    benchmark: str
    use_case: int
    size: str
    precision: str
    batch_size: int
    devices: int = 1
    product: str | None = None
    mode: str = DEFAULT

    @property
    def name(self) -> str:
        parts = [self.benchmark, self.size, USE_CASES[self.use_case].name, self.precision, f"batch {self.batch_size}"]
        parts += [self.product] if self.product else []
        parts += [f"{self.devices} chips"] if self.devices > 1 else []
        return ", ".join([*parts, *([f"mode {self.mode}"] if self.mode != DEFAULT else [])])


@dataclass(frozen=True)
class Found:
    """What compiling a cell came to; ``why`` says more of what is no success. Bytes are of one chip."""

    cell: Cell
    outcome: str
    why: str = ""
    seconds: float | None = None
    planned_bytes: int | None = None
    flops: float | None = None
    moved_bytes: float | None = None
    code_sha256: str = ""
    versions: dict[str, str] = field(default_factory=dict)


def file(results: Path, chip: str) -> Path:
    return results / "fit" / f"{chip}.json"


def known(results: Path, chip: str) -> list[Found]:
    """Return what is kept of ``chip``, of this code. Raises UserError if the file is damaged."""
    try:
        stored = files.read_object(file(results, chip))
        found = files.fitting(stored["found"], list[Found], f"fit/{chip}.json")
        return [one for one in found if one.cell.benchmark in BENCHMARKS and one.code_sha256 == _code(one.cell)]
    except FileNotFoundError:
        return []
    except (Damaged, KeyError) as error:
        raise UserError(f"{file(results, chip)}: {error}; remove it, and 'main.py fit' makes a new one") from None


def _code(cell: Cell) -> str:
    return certificate.code_sha256(cell.benchmark, cell.size)


def keep(results: Path, chip: str, found: Found) -> None:
    """Add ``found`` to what is kept of its cell, unless that is an answer and this is none."""
    there = known(results, chip)
    if found.outcome not in ANSWERS and any(one.cell == found.cell and one.outcome in ANSWERS for one in there):
        return
    others = [one for one in there if one.cell != found.cell]
    ordered = sorted([*others, found], key=lambda one: str(dataclasses.astuple(one.cell)))
    path = file(results, chip)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps({"found": [dataclasses.asdict(one) for one in ordered]}, indent=1) + "\n")


def interpreter(python: str | None) -> str:
    """Return JAX's interpreter with libtpu: ``python``, if it is given. Raises UserError without one."""
    names = [python] if python else [".venv/jax-tpu/bin/python", ".venv/jax/bin/python"]
    for name in names:
        path = ROOT / name
        if (
            path.exists()
            and subprocess.run([path, "-c", "import libtpu"], capture_output=True, check=False).returncode == 0
        ):
            return str(path)
    raise UserError(
        f"no interpreter with libtpu, which has the TPU's compiler ({', '.join(names)}): run 'make tpu-env'"
    )


def compiled(cell: Cell, python: str, limit: float) -> Found:
    """Compile one cell in a process of its own."""
    asked = {name: value for name, value in dataclasses.asdict(cell).items() if value is not None}
    asked["switches"] = settings(cell.mode, "jax", cell.benchmark, cell.use_case, cell.precision, "tpu")
    environment = dict(os.environ)
    variables.take_out(environment)  # as in a job, which the shell's variables do not reach
    environment.pop("PYTHONSAFEPATH", None)
    # Nothing opens a chip here, so it does not matter whether another process has libtpu loaded, which would refuse.
    environment |= {"JAX_PLATFORMS": "cpu", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    command = [python, str(CODE / "jax" / "_ahead.py"), json.dumps(asked)]
    try:
        ran = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=limit, check=False, cwd=CODE / "jax"
        )
    except subprocess.TimeoutExpired:
        return Found(cell, TOO_SLOW, f"{limit:.0f} s", code_sha256=_code(cell))
    try:
        told = json.loads(ran.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        last = next((line for line in reversed(ran.stderr.splitlines()) if line.strip()), f"exit code {ran.returncode}")
        if ran.returncode < 0:  # its last line is no reason, but some warning
            last = f"the compiler was ended by {signal.Signals(-ran.returncode).name}"
            last += ": is there enough memory here?" if ran.returncode == -signal.SIGKILL else ""
        return Found(cell, FAILED, last.strip()[:300], code_sha256=_code(cell))
    common: dict[str, Any] = {"code_sha256": _code(cell), "versions": told["versions"]}
    if not told["fits"]:
        return Found(cell, TOO_LARGE, told["why"], **common)
    names = ("seconds", "planned_bytes", "flops", "moved_bytes")
    found = Found(cell, FITS, **{name: told[name] for name in names}, **common)
    most = CHIPS[cell.chip].memory_bytes
    if (found.planned_bytes or 0) > most:
        over = ((found.planned_bytes or 0) - most) / 2**30
        return replace(found, outcome=TOO_LARGE, why=f"{over:.2g} GiB more than libtpu leaves a program")
    return found


def _switches(cell: Cell, mode: str) -> dict[str, str] | None:
    """Return what ``mode`` sets JAX's switches to; None if it sets one that a TPU does not have."""
    try:
        return settings(mode, "jax", cell.benchmark, cell.use_case, cell.precision, "tpu")
    except UserError:
        return None


def largest(cell: Cell, python: str, limit: float, say: Say) -> Iterator[Found]:
    """Yield what compiling one batch after the other comes to, up to the largest that fits (``tries.next_batch``)."""
    low, high = 0, 0
    plans: dict[int, int] = {}
    size: int | None = cell.batch_size
    while size:
        found = compiled(replace(cell, batch_size=size), python, limit)
        yield found
        say(f"batch {size}: {found.outcome}{f', {found.why}' if found.why else ''}")
        if found.planned_bytes:
            plans[size] = found.planned_bytes
        if found.outcome == FITS:
            low = size
        elif found.outcome == TOO_LARGE:
            high = size
        else:
            return
        expected = tries.expected_batch(plans, CHIPS[cell.chip].memory_bytes)
        size = tries.next_batch(cell.batch_size, low, high, cell.devices, expected)


def table(found: list[Found]) -> Table:
    """Return a line for each cell, with how much of the chip's memory it takes and which roof it would meet."""
    lines = []
    for one in found:
        chip = CHIPS[one.cell.chip]
        memory, roof, took = "", "", ""
        if one.outcome == FITS:
            memory = f"{(one.planned_bytes or 0) / 2**30:.3g} of {chip.memory_gib:.4g} GiB"
            known = one.flops and one.moved_bytes and one.cell.precision == "bf16"  # which the chip's peak is of
            roof = bound(chip, one.flops or 0, one.moved_bytes or 0) if known else ""
            took = f"{one.seconds:.0f} s"
        flops = f"{one.flops:.3g}" if one.flops else ""
        moved = f"{one.moved_bytes:.3g}" if one.moved_bytes else ""
        lines.append([one.cell.chip, one.cell.name, one.outcome, memory, flops, moved, roof, took])
    notes = [f"{one.cell.name}: {one.why}" for one in found if one.why]
    notes += sorted({_said(one.versions) for one in found} - {""})
    head = ["chip", "step", "", "memory", "FLOP", "bytes", "bound", "compiled in"]
    return Table(head, lines, notes)


def _said(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def remarks(job: Job, chip: str, results: Path) -> list[str]:
    """Return what is known of a TPU job before it waits: a batch that cannot fit, and by how much, or a failure."""
    try:
        found = known(results, chip)
    except UserError as error:
        return [str(error)]
    return [
        f"{one.cell.name} does not fit a {chip}: {one.why} (compiled ahead by {_said(one.versions)}; "
        "'main.py fit' says what fits)"
        for one in found
        if one.outcome == TOO_LARGE and any(batch >= one.cell.batch_size for batch in _batches(job, one.cell))
    ] + [
        f"{one.cell.name} did not compile for a {chip} on this machine: "
        f"{'not within ' if one.outcome == TOO_SLOW else ''}{one.why}{_instead(one.cell, found)}"
        for one in found
        if one.outcome in (FAILED, TOO_SLOW) and one.cell.batch_size in _batches(job, one.cell)
    ]


def _instead(cell: Cell, found: list[Found]) -> str:
    """Name the modes in which ``cell`` does compile, if any is known."""
    works = [one.cell.mode for one in found if one.outcome == FITS and replace(one.cell, mode=cell.mode) == cell]
    return f"; it does with --mode {' or '.join(works)}" if works else ""


def _batches(job: Job, cell: Cell) -> list[int]:
    """Return the batch sizes, of all chips, of the job's steps that are as ``cell`` but for the batch size."""
    size = str(job.rows()[0].size)
    usual = job.recipe.batch_size if job.dataset else BENCHMARKS[job.benchmark].sizes[size].batch_size["tpu"]
    over = 1 if job.dataset or job.scaling == STRONG else job.ranks  # a cell's batch is that of all chips
    points = [
        (batch * over, product)
        for point in job.points
        for batch in point.batch_sizes or (usual,)
        for product in point.products or (None,)
    ]
    alike = (cell.benchmark, cell.use_case, cell.size, cell.precision, cell.devices, _switches(cell, cell.mode)) == (
        *(job.benchmark, job.use_case, size, job.precision, job.ranks, _switches(cell, job.mode)),
    )
    return [batch for batch, product in points if alike and product == cell.product]
