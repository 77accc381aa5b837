"""The parity certificate: the proof that both sides of a benchmark compute the same, and for which rows it holds.

``main.py validate`` writes ``results/parity/<benchmark>-<size>-<device kind>.json`` (``duel.report.parity``). A row is
verified where that proof was made of the same code, weights, versions and size on the same kind of device.
"""

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

from duel.catalogue import BENCHMARKS, FRAMEWORKS
from duel.errors import UserError
from duel.options import SAFETENSORS
from duel.record import Row

ROOT = Path(__file__).resolve().parent.parent
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
PROOF_FILES = ("duel/measure/parity.py", "duel/report/parity.py")


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


def read(file: Path) -> dict[str, Any] | None:
    """The certificate in ``file``; None where there is none. Raises UserError where it cannot be read."""
    try:
        return _read(file, file.stat().st_mtime_ns)
    except FileNotFoundError:
        return None


@functools.lru_cache(maxsize=256)  # a table asks for the same few again and again
def _read(file: Path, modified: int) -> dict[str, Any]:
    try:
        stored = json.loads(file.read_text())
    except ValueError as error:
        raise UserError(f"{file}: damaged, no JSON; 'python main.py validate' makes it anew") from error
    if not isinstance(stored, dict) or stored.get("format") != FORMAT:
        raise UserError(f"{file}: not a certificate of format {FORMAT}; 'python main.py validate' makes it anew")
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
    wanted = {
        "code": ([found["code_sha256"]], row.code_sha256),
        "weights": (found["weights_sha256"], row.weights_sha256),
        f"{framework} version": ([found["versions"][framework].get(FRAMEWORKS[framework])], row.framework_version),
    }
    other = [name for name, (there, here) in wanted.items() if here not in there]
    if other:
        return f"unverified: the certificate is for other {' and '.join(other)}; {run}"
    if row.precision not in found["precisions"]:
        return f"unverified: the certificate covers {', '.join(found['precisions'])}; {run}"
    if not found["passed"]:
        return f"{DISPROVED}both sides do NOT compute the same: {found['failures'][0]}; {run}"
    return VERIFIED
