"""Check what devices an interpreter's framework is built for, from its files alone: no framework is imported."""

import functools
import json
import shutil
import subprocess
from typing import Any

from duel import ROOT
from duel.catalogue import FRAMEWORKS, REACHED_THROUGH
from duel.errors import UserError

ASK_SECONDS = 60.0
# Runs in the interpreter itself. It prints the platform, the installed packages, JAX's plug-ins, and what PyTorch was
# built for (from torch/version.py, which is read, not executed).
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
    """Raise UserError if ``python`` has the framework, but not built for devices of ``kind``.

    ``where`` is the interpreter's key in cluster.yaml. Whatever cannot be checked from here passes: the interpreter may
    exist on the nodes only, and a name without a path, or one in a container, may mean another one there.
    """
    if kind in (None, "cpu") or "/" not in python or shutil.which(ROOT / python) is None:
        return
    found = _installed(python)
    if FRAMEWORKS[framework] not in found.get("packages", {}):
        return
    if missing := _missing(framework, str(kind), found):
        raise UserError(f"{where}: {python!r} {missing}; {_remedy(framework, str(kind))}")


@functools.cache  # called again for each job
def _installed(python: str) -> dict[str, Any]:
    """Return what the probe prints in ``python``; empty if it does not run or prints something else."""
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
    """Return why the installation ``found`` cannot compute on ``kind``; empty if it can.

    Also empty if its files are inconclusive: an unusual build may support more than its names show.
    """
    packages, plugins, torch = found["packages"], found["plugins"], found["torch"]
    if kind == "mps" and found["platform"] != "darwin":
        return f"runs on {found['platform']}, but {framework} supports mps on macOS only"
    if (framework, kind) == ("pytorch", "gpu"):
        cpu_only = set(torch.values()) == {"None"} if torch else packages["torch"].endswith("+cpu")
        return f"is a CPU build of PyTorch (torch {packages['torch']})" if cpu_only else ""
    through = REACHED_THROUGH.get((framework, kind), ())
    if not through or any(name.replace("_", "-") in packages for name in through):
        return ""
    # JAX accepts any registered plug-in; jaxlib used to come as a separate build for each device.
    provided = " ".join([*plugins, packages.get("jaxlib", "")]) if framework == "jax" else ""
    names = {"gpu": ("cuda", "rocm"), "tpu": ("tpu",), "mps": ("metal", "mps")}
    if any(name in provided for name in names.get(kind, ())):
        return ""
    return f"has no {' or '.join(through[:2])}, which {framework} needs to compute on a {kind}"


def _remedy(framework: str, kind: str) -> str:
    """Say how to get a build for ``kind``."""
    if kind == "mps":
        return "choose another --device, or change 'device' of the target in cluster.yaml"
    builds = {
        ("jax", "gpu"): "'make jax-env JAX=cuda13' makes one (cuda12 for NVIDIA drivers before 580), or ",
        ("jax", "tpu"): "'make jax-env JAX=tpu' makes one, or ",
        ("pytorch", "gpu"): "'make pytorch-env PYTORCH=cuda13' makes one (cuda12 for drivers before 580), or ",
    }
    return f"{builds.get((framework, kind), '')}name an interpreter that has it, or null to leave {framework} out"
