"""What a measuring process can report about its surroundings."""

import getpass
import hashlib
import importlib.metadata
import os
import platform
import re
import sys
from pathlib import Path
from typing import Any

from duel import variables

# In addition to those of duel/variables.py: where the job runs, and where its interpreter finds libraries and modules.
PLACE = (
    *("SLURM_JOB*", "SLURM_STEP*", "SLURM_NODE*", "SLURM_CPUS*", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS*"),
    *("SLURM_RESTART_COUNT", "LD_LIBRARY_PATH", "PYTHONPATH"),
)

CPUS = Path("/proc/cpuinfo")
GENERATION = {"family": "family", "number": "model", "implementer": "implementer", "part": "part"}


def seconds(variable: str, default: float) -> float:
    """Return a limit that the target's set-up may set by ``variable``. Exit if it is invalid, as for a wrong option."""
    text = os.environ.get(variable) or str(default)
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if found > 0:
        return found
    print(f"error: {variable}={text}: expected a number of seconds above 0", file=sys.stderr)
    sys.exit(2)


def user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container without a passwd entry
        return str(os.getuid())


def usable_cpus() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def cpu() -> dict[str, str]:
    """Return the model of the first CPU and what it can do (its flags), if Linux reports them."""
    try:
        lines = CPUS.read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return {}
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    names = {"model name": "model", "cpu family": "family", "model": "number", "microcode": "microcode"}
    names |= {"flags": "flags", "Features": "flags"}  # the latter is ARM's name
    names |= {"CPU implementer": "implementer", "CPU part": "part"}
    return {ours: fields[name] for name, ours in names.items() if name in fields}


def cpu_name() -> str:
    """Return the model's name, with what tells its generation if the name does not, as in many virtual machines.

    CPUs with AVX-512 and without are all called "AMD EPYC" there.
    """
    found = cpu()
    name = found.get("model") or platform.processor() or platform.machine()
    if "model" in found and re.search(r"\d", name.partition("@")[0]):  # "Xeon(R) CPU @ 2.20GHz" has no number either
        return name
    known = [f"{what} {found[key]}" for key, what in GENERATION.items() if key in found]
    return f"{name} ({', '.join(known)})" if known else name


def packages() -> dict[str, str]:
    """Return the name and version of every package in this environment."""
    found = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def packages_sha256() -> str:
    """Return a hash that is equal exactly when the packages are, as a lock file of them would be."""
    return hashlib.sha256("\n".join(f"{name}=={version}" for name, version in packages().items()).encode()).hexdigest()


def environment() -> dict[str, Any]:
    """Return the environment record: packages, interpreter, machine, CPUs and the variables that matter."""
    names = [
        *variables.obeyed(os.environ),
        *(n for n in os.environ if variables.matches(n, (*variables.ALLOCATED, *PLACE))),
    ]
    return {
        "host": os.uname().nodename,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "interpreter": sys.executable,
        "usable_cpus": usable_cpus(),
        "load_average": list(os.getloadavg()),
        "cpu": cpu(),
        "packages": packages(),
        "variables": {name: os.environ[name] for name in sorted(names) if not variables.is_secret(name)},
    }
