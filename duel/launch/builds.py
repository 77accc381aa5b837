"""Whether an interpreter's installation is a build for a kind of device: read from its files, no framework imported."""

import functools
import json
import shutil
import subprocess
from typing import Any

from duel import ROOT
from duel.catalogue import FRAMEWORKS, REACHED_THROUGH
from duel.errors import UserError

ASK_SECONDS = 60.0
# What the interpreter itself prints: its system, the packages it has, what brings devices to JAX, and for which devices
# PyTorch was built (torch/version.py, which is read and not run).
_PROBE = r"""
import importlib.metadata as metadata, json, re, sys
packages, plugins, torch = {}, [], {}
for found in metadata.distributions():
    name = found.metadata["Name"] or ""
    packages.setdefault(re.sub("[-_.]+", "-", name).lower(), found.version)
    plugins += [entry.name for entry in found.entry_points if entry.group == "jax_plugins"]
    if name.lower() == "torch":
        try:
            text = open(found.locate_file("torch/version.py")).read()
        except OSError:
            text = ""
        torch = dict(re.findall(r"^(cuda|hip|xpu)\b[^=\n]*= *'?([^'\n]*)", text, re.M))
print(json.dumps({"duel": 1, "platform": sys.platform, "packages": packages, "plugins": plugins, "torch": torch}))
"""


def check_device(python: str, framework: str, kind: str | None, where: str) -> None:
    """Raises UserError where ``python`` has the framework, but no build of it for devices of ``kind``.

    ``where`` is the interpreter's key in cluster.yaml. Nothing is said where that cannot be told from here: the
    interpreter may be on the nodes alone, and a name without a path, or one in a container, may mean another one there.
    """
    if kind in (None, "cpu") or "/" not in python or shutil.which(ROOT / python) is None:
        return
    found = _installed(python)
    if FRAMEWORKS[framework] not in found.get("packages", {}):
        return
    if missing := _missing(framework, str(kind), found):
        raise UserError(f"{where}: {python!r} {missing}; {_remedy(framework, str(kind))}")


@functools.cache  # for each job it is asked again
def _installed(python: str) -> dict[str, Any]:
    """What the probe prints in ``python``; empty where it does not run or says something else."""
    try:
        asked = subprocess.run(
            [python, "-c", _PROBE],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=ASK_SECONDS,
            check=False,
        )
        found = json.loads(asked.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return {}
    return found if isinstance(found, dict) and "duel" in found else {}


def _missing(framework: str, kind: str, found: dict[str, Any]) -> str:
    """What keeps the installation ``found`` from computing on ``kind``, in words; empty where nothing does.

    Empty, too, where its files do not tell: an unusual build may have what its names do not show.
    """
    packages, plugins, torch = found["packages"], found["plugins"], found["torch"]
    if kind == "mps" and found["platform"] != "darwin":
        return f"runs on {found['platform']}, and {framework} computes on mps on macOS only"
    if (framework, kind) == ("pytorch", "gpu"):
        of_cpu = set(torch.values()) == {"None"} if torch else packages["torch"].endswith("+cpu")
        return f"is a CPU build of PyTorch (torch {packages['torch']})" if of_cpu else ""
    through = REACHED_THROUGH.get((framework, kind), ())
    if not through or any(name.replace("_", "-") in packages for name in through):
        return ""
    # JAX takes whatever announces itself as a plug-in; jaxlib once was a build of its own for each device.
    brought = " ".join([*plugins, packages.get("jaxlib", "")]) if framework == "jax" else ""
    if any(word in brought for word in ("cuda", "rocm", "tpu", "metal", "mps")):
        return ""
    return f"has no {' or '.join(through[:2])}, and {framework} computes on a {kind} with it only"


def _remedy(framework: str, kind: str) -> str:
    """How to get a build for ``kind``."""
    if kind == "mps":
        return "take another --device, or change 'device' of the target in cluster.yaml"
    builds = {
        ("jax", "gpu"): "'make jax-env JAX=cuda13' makes one (cuda12 for NVIDIA drivers before 580), or ",
        ("jax", "tpu"): "'make jax-env JAX=tpu' makes one, or ",
        ("pytorch", "gpu"): "'make pytorch-env PYTORCH=cuda13' makes one (cuda12 for drivers before 580), or ",
    }
    others = " or ".join(f"--framework {name}" for name in FRAMEWORKS if name != framework)
    return f"{builds.get((framework, kind), '')}name an interpreter that has it, or null, or take {others}"
