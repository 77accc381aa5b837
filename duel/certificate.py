"""The parity certificate: the proof that both sides of a benchmark compute the same, and for which rows it holds.

``main.py validate`` writes ``results/parity/<benchmark>-<size>-<device kind>.json`` (``duel.report.parity``). A row is
verified if that proof was made with the same code, weights, versions and size on the same kind of device.
"""

import ast
import functools
import hashlib
import io
import tokenize
from pathlib import Path
from typing import TypedDict

from duel import CODE, files
from duel.catalogue import BENCHMARKS, FRAMEWORKS
from duel.errors import UserError
from duel.files import Damaged
from duel.options import SAFETENSORS
from duel.record import Row

FORMAT = 1
STEPS = 10  # of the optimizer
# AdamW's learning rate in a proof; SGD's is a tenth of it. Small, and not the recipe's: a network with random norms
# soon magnifies every rounding.
RATE = 1e-4
VERIFIED = "verified"
DISPROVED = "disproved: "  # there is a certificate of this code, but the sides do not compute the same function
# The files that make up a side's function, besides its model.
WORK_FILES = ("training.py", "per_sample_gradients.py", "inference.py")
TWIN_FILES = ("models/_layers.py", "network.py", *WORK_FILES, "weights.py", "devices.py")
SHARED_FILES = ("duel/measure/batches.py", "duel/measure/parameters.py")
# And those that define the proof: an older, less strict one does not count for today's rows.
PROOF_FILES = ("duel/measure/validation.py", "duel/report/parity.py")


class Certificate(TypedDict):
    """The part of a certificate that is read here; ``duel.report.parity.certify`` writes all of it."""

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
    """Raise UserError if a file that makes up either side of ``benchmark`` is missing."""
    for framework in FRAMEWORKS:
        for name in (f"models/{benchmark}.py", *TWIN_FILES):
            if not (CODE / framework / name).is_file():
                sides = " and ".join(f"{side}/" for side in FRAMEWORKS)
                raise UserError(f"{framework}/{name} is missing; benchmark {benchmark} needs {name} in {sides}")


@functools.cache
def code_sha256(benchmark: str, size: str) -> str:
    """Return the hash of all that decides what both sides compute and how that is proved.

    The size is hashed as the catalogue has it.
    """
    check_files(benchmark)
    entry = BENCHMARKS[benchmark]
    digest = hashlib.sha256(repr((entry.loss, entry.sizes[size])).encode())
    for framework in FRAMEWORKS:
        for name in (f"models/{benchmark}.py", *TWIN_FILES):
            digest.update(_statements(CODE / framework / name))
    for name in (*SHARED_FILES, *PROOF_FILES):
        digest.update(_statements(CODE / name))
    return digest.hexdigest()


@functools.cache
def _statements(file: Path) -> bytes:
    """Return the source of ``file`` without comments, docstrings and blank lines.

    To explain the code better must not void what was proved of it.
    """
    source = file.read_text(encoding="utf-8")
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            number, column = token.start
            lines[number - 1] = lines[number - 1][:column]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            text = node.body[0]
            if not lines[text.lineno - 1][: text.col_offset].strip():  # nothing else is on its line
                for number in range(text.lineno, (text.end_lineno or text.lineno) + 1):
                    lines[number - 1] = ""
    return "\n".join(line.rstrip() for line in lines if line.strip()).encode()


def read(file: Path) -> Certificate | None:
    """Return the certificate in ``file``, or None if there is no such file. Raises UserError if it cannot be read."""
    try:
        return _read(file, file.lstat().st_mtime_ns)
    except (FileNotFoundError, NotADirectoryError):
        return None


@functools.lru_cache(maxsize=256)  # a table reads the same few again and again
def _read(file: Path, modified: int) -> Certificate:
    try:
        stored = files.fitting(files.read_object(file), Certificate, file.name)
        if sides := stored["versions"].keys() ^ FRAMEWORKS.keys():
            raise Damaged(f"{file.name} is damaged: missing or unknown versions: {', '.join(sorted(sides))}")
        if stored["format"] != FORMAT:
            raise Damaged(f"{file.name} has format {stored['format']}; this version of Duel reads {FORMAT}")
    except Damaged as error:
        raise UserError(f"{file.parent}: {error}; 'python main.py validate' makes a new one") from error
    return stored


def verdict(row: Row, results: Path) -> str:
    """Return ``VERIFIED``, or "unverified: " or ``DISPROVED`` with the reason and what to run."""
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
