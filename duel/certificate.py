"""The parity certificate: the proof that both sides of a benchmark compute the same, and for which rows it holds.

``main.py validate`` writes ``results/parity/<benchmark>-<size>-<device kind>.json`` (``duel.report.parity``). A row is
verified where that proof was made of the same code, weights, versions and size on the same kind of device.
"""

import functools
import hashlib
from pathlib import Path
from typing import TypedDict

from duel import ROOT, files
from duel.catalogue import BENCHMARKS, FRAMEWORKS
from duel.errors import UserError
from duel.files import Damaged
from duel.options import SAFETENSORS
from duel.record import Row

FORMAT = 1
STEPS = 10  # of the optimizer
# AdamW's learning rate in a proof; SGD takes a tenth. Small, and not the recipe's: a network with random norms soon
# magnifies every rounding.
RATE = 1e-4
VERIFIED = "verified"
DISPROVED = "disproved: "  # a certificate of this code, and both sides do not compute the same
# What makes up a side's function, beside its model.
WORK_FILES = ("training.py", "per_sample_gradients.py", "inference.py")
TWIN_FILES = ("models/_layers.py", "network.py", *WORK_FILES, "weights.py", "devices.py")
SHARED_FILES = ("duel/measure/batches.py", "duel/measure/parameters.py")
# And what the proof is: one that asked less is none for rows of today.
PROOF_FILES = ("duel/measure/validation.py", "duel/report/parity.py")


class Certificate(TypedDict):
    """What is read of a certificate; ``duel.report.parity.certify`` makes it whole."""

    format: int
    code_sha256: str
    weights_sha256: list[str]
    versions: dict[str, dict[str, str]]  # of packages, by framework
    precisions: list[str]
    passed: bool
    failures: list[str]


def path(results: Path, benchmark: str, size: str, device_kind: str) -> Path:
    return results / "parity" / f"{benchmark}-{size}-{device_kind}.json"


def check_files(benchmark: str) -> None:
    """Raise UserError where a file that makes up either side of ``benchmark`` is missing."""
    for framework in FRAMEWORKS:
        for name in (f"models/{benchmark}.py", *TWIN_FILES):
            if not (ROOT / framework / name).is_file():
                sides = " and ".join(f"{side}/" for side in FRAMEWORKS)
                raise UserError(f"{framework}/{name} is missing; benchmark {benchmark} needs {name} in {sides}")


@functools.cache
def code_sha256(benchmark: str, size: str) -> str:
    """Of all that decides what both sides compute, and of how that is proved; of the size, as the catalogue has it."""
    check_files(benchmark)
    entry = BENCHMARKS[benchmark]
    digest = hashlib.sha256(repr((entry.loss, entry.sizes[size])).encode())
    for framework in FRAMEWORKS:
        for name in (f"models/{benchmark}.py", *TWIN_FILES):
            digest.update((ROOT / framework / name).read_bytes())
    for name in (*SHARED_FILES, *PROOF_FILES):
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def read(file: Path) -> Certificate | None:
    """The certificate in ``file``; None where there is none. Raises UserError where it cannot be read."""
    try:
        return _read(file, file.lstat().st_mtime_ns)
    except (FileNotFoundError, NotADirectoryError):
        return None


@functools.lru_cache(maxsize=256)  # a table asks for the same few again and again
def _read(file: Path, modified: int) -> Certificate:
    try:
        stored = files.fitting(files.read_object(file), Certificate, file.name)
        if sides := stored["versions"].keys() ^ FRAMEWORKS.keys():
            raise Damaged(f"{file.name} is damaged: versions of {', '.join(sorted(sides))}")
        if stored["format"] != FORMAT:
            raise Damaged(f"{file.name} is of format {stored['format']}; this version of Duel reads {FORMAT}")
    except Damaged as error:
        raise UserError(f"{file.parent}: {error}; 'python main.py validate' makes a new one") from error
    return stored


def verdict(row: Row, results: Path) -> str:
    """``VERIFIED``, or "unverified: " or ``DISPROVED`` with the reason and what to run."""
    if None in (row.benchmark, row.size, row.device_kind, row.weights_sha256, row.code_sha256):
        return "unverified: the row did not get far enough to know what it computes"
    benchmark, size, framework = str(row.benchmark), str(row.size), str(row.framework)
    try:
        found = read(path(results, benchmark, size, str(row.device_kind)))
    except UserError as error:
        return f"unverified: {error}"
    weights = f" --weights {row.weights}" if str(row.weights).endswith(SAFETENSORS) else ""
    run = f"run 'python main.py validate --benchmark {benchmark} --size {size} --target {row.target}{weights}'"
    if found is None:
        return f"unverified: no certificate; {run}"
    wanted: dict[str, tuple[list[str | None], str | None]] = {
        "code": ([found["code_sha256"]], row.code_sha256),
        "weights": ([*found["weights_sha256"]], row.weights_sha256),
        f"{framework} version": ([found["versions"][framework].get(FRAMEWORKS[framework])], row.framework_version),
    }
    other = [name for name, (there, here) in wanted.items() if here not in there]
    if other:
        return f"unverified: the certificate is for other {' and '.join(other)}; {run}"
    if row.precision not in found["precisions"]:
        return f"unverified: the certificate covers {', '.join(found['precisions'])}; {run}"
    if not found["passed"]:
        why = next(iter(found["failures"]), "no reason is recorded")
        return f"{DISPROVED}both sides do NOT compute the same: {why}; {run}"
    return VERIFIED
