#!/usr/bin/env python3
"""Duel: how does JAX compare with PyTorch on your hardware, and why?

python main.py --benchmark resnet50 --use_case 1      render both scripts, start both
python main.py status                                 what they are doing
python main.py compare                                what came of them

Only the entry point: the command line is duel/cli/. Any python3 can start it; it switches to the driver's environment.
"""

import gc
import importlib.util
import io
import os
import sys

ROOT = os.path.dirname(os.path.realpath(__file__))
DRIVER = os.path.join(ROOT, ".venv", "driver")
NEEDED = ("jinja2", "msgspec", "pandas", "pydantic", "rich", "ruamel", "scipy", "submitit")


def enter_driver() -> None:
    """Continue in the driver's interpreter if this one lacks what is needed; exit with an error if there is none."""
    if sys.version_info >= (3, 11) and all(map(_installed, NEEDED)):
        return
    python = os.path.join(DRIVER, "bin", "python")
    if os.access(python, os.X_OK) and os.path.realpath(sys.prefix) != os.path.realpath(DRIVER):
        os.execv(python, [python, *sys.argv])
    lacks = [name for name in NEEDED if not _installed(name)] or ["Python 3.11 or later"]
    sys.exit(f"main.py: error: {sys.executable} lacks {', '.join(lacks)}; 'make driver-env' installs it")


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


if __name__ == "__main__":
    enter_driver()
    if ROOT not in sys.path:  # PYTHONSAFEPATH or 'python -P'
        sys.path.insert(0, ROOT)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # None if the parent process closed it
            stream.reconfigure(errors="replace")  # a terminal without Unicode shows '?' instead of a traceback
    # What is known of ten thousand runs is as many objects, which the collector would go through again and again.
    gc.set_threshold(100_000)
    from duel.cli.main import main

    sys.exit(main())
