"""``--weights``: turn what the user gives into the one safetensors file that both sides read.

PyTorch's interpreter converts it once, before anything is submitted (``pytorch/weights.py``).
"""

import hashlib
import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path

from duel import ROOT, certificate
from duel.catalogue import BENCHMARKS
from duel.errors import UserError
from duel.launch.schema import Target
from duel.options import PRETRAINED, SAFETENSORS
from duel.results import Results

BAD_INPUT = 2  # the exit code of pytorch/weights.py whose output is a message for the user


def resolve(given: str, benchmark: str, size: str, name: str, target: Target, results: Results) -> str:
    """Return the file below results/weights that holds the weights ``given``, as a path relative to the checkout.

    ``name`` is what cluster.yaml calls ``target``. Raises UserError for weights that do not exist, cannot be read or
    do not fit.
    """
    certificate.check_files(benchmark)
    if given == PRETRAINED:
        _check_published(benchmark, size)
    elif not Path(given).is_file():
        valid = f"'{PRETRAINED}', a checkpoint in torchvision's format (.pth) or a {SAFETENSORS} file"
        raise UserError(f"--weights {given}: no such file; valid: {valid}")
    source = given if given == PRETRAINED else str(Path(given).absolute())
    folder = results.folder / "weights"
    folder.mkdir(parents=True, exist_ok=True)
    python = target.python.pytorch
    if python is None or shutil.which(ROOT / python if "/" in python else python) is None:
        if not given.endswith(SAFETENSORS):
            options = shlex.join(["--benchmark", benchmark, "--size", size, "--source", given, "--folder", "."])
            raise UserError(
                f"--weights {given}: converting it needs PyTorch, but target {name!r} has no interpreter for PyTorch "
                f"on this machine; 'python pytorch/weights.py {options}' converts it where there is one: "
                f"then give the {SAFETENSORS} file here"
            )
        return str(_copy(Path(given), benchmark, folder).relative_to(ROOT))
    command = [python, "pytorch/weights.py", "--benchmark", benchmark, "--size", size, f"--source={source}"]
    done = subprocess.run(
        [*command, f"--folder={folder}"],
        cwd=ROOT,
        env={variable: value for variable, value in os.environ.items() if variable != "PYTHONSAFEPATH"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == BAD_INPUT and done.stdout:
        raise UserError(f"--weights: {done.stdout.strip()}")
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        where = f"cluster.yaml: targets.{name}.python.pytorch"
        raise UserError(f"--weights {given}: {python} ({where}) could not convert it: {last}")
    return str(Path(done.stdout.strip().splitlines()[-1]).relative_to(ROOT))


def _check_published(benchmark: str, size: str) -> None:
    published = [b.name for b in BENCHMARKS.values() if b.torchvision is not None]
    if benchmark not in published:
        raise UserError(
            f"--weights {PRETRAINED}: torchvision has none for {benchmark}; valid: {', '.join(published)}, or a file"
        )
    if size != "full":
        raise UserError(f"--weights {PRETRAINED}: torchvision's are for size full, but the preset uses size {size}")


def _copy(source: Path, benchmark: str, folder: Path) -> Path:
    """Copy a safetensors file to ``folder`` under its hash. No framework checks here that it fits: each job does."""
    content = source.read_bytes()
    try:
        length = int.from_bytes(content[:8], "little")
        tensors = json.loads(content[8 : 8 + length])
        tensors.pop("__metadata__", None)
        whole = 8 + length + max(tensor["data_offsets"][1] for tensor in tensors.values()) == len(content)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        whole = False
    if not whole:
        raise UserError(f"--weights {source}: damaged, or no safetensors file")
    copy = folder / f"{benchmark}-{hashlib.sha256(content).hexdigest()[:12]}{SAFETENSORS}"
    temporary = copy.with_name(f".{copy.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, copy)
    finally:
        temporary.unlink(missing_ok=True)
    return copy
