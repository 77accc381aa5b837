"""A results folder with runs of which one is to be damaged, and what damages it; for tests/test_damage.py."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conftest import ROOT
from test_compare import STAMPS, make_pair
from test_compare import job as make_job

from duel.catalogue import FRAMEWORKS
from duel.results import Results
from duel.status import Owner

HUGE = 2 << 30  # bytes of a sparse file
DEEP = 100_000


class Site:
    """A checkout with a healthy pair of runs, and a second pair of which one run is to be damaged."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.results = Results(root / "results")
        self.healthy = [
            self.results.run(make_job(name, "gcn", preset="smoke").run_id(STAMPS[0])) for name in FRAMEWORKS
        ]
        self.victim = self.results.run(make_job("jax", preset="smoke").run_id(STAMPS[1]))

    @classmethod
    def build(cls, root: Path) -> "Site":
        (root / "results" / "runs").mkdir(parents=True)
        for name in ("cluster.yaml", "README.md"):
            shutil.copy(ROOT / name, root)
        shutil.copytree(ROOT / "templates", root / "templates")
        site = cls(root)
        make_pair(site.results, STAMPS[0], benchmark="gcn", preset="smoke")
        make_pair(site.results, STAMPS[1], preset="smoke")
        victim = site.victim
        victim.write_status(owner=Owner("elsewhere", 7, "7"))  # and not this process: the run will be cancelled
        victim.script.write_text("#!/bin/bash\n#SBATCH --mem=1G\n")
        victim.log.write_text("step 1\n")
        victim.metrics.write_text('{"event": "loss", "step": 0, "loss": 2.5}\n')
        victim.environment.write_text("{}\n")
        (site.results.folder / "parity").mkdir()
        return site

    def edit(self, name: str, **changes: Any) -> None:
        """Set keys of a JSON file of the victim."""
        path = self.victim.folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))


Damage = Callable[[Site], object]


@dataclass(frozen=True)
class Kind:
    name: str
    apply: Damage
    says: tuple[str, ...] = ()  # commands that must name the damage
    of_cluster: bool = False
    hidden: bool = False  # results.csv itself: what is shown of the healthy runs is in their own folders
    shown: str = "damaged"


STATUS, LAUNCH, ROW = "status.json", "launch.json", "rows/000.json"


def file_at(name: str) -> Callable[[Site], Path]:
    """The file of this name in the victim's folder; with '/' at first, in the checkout."""
    return lambda site: site.root / name[1:] if name.startswith("/") else site.victim.folder / name


def replaced(name: str, writer: Callable[[Path], object]) -> Damage:
    def apply(site: Site) -> None:
        path = file_at(name)(site)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        path.parent.mkdir(exist_ok=True)
        writer(path)

    return apply


def sparse(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(HUGE)


def text(content: str | bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content if isinstance(content, bytes) else content.encode())


def truncated(name: str) -> Damage:
    def apply(site: Site) -> None:
        path = file_at(name)(site)
        path.write_bytes(path.read_bytes()[:40])

    return apply


def edited(name: str, **changes: Any) -> Damage:
    return lambda site: site.edit(name, **changes)


def raw(name: str, key: str, literal: str) -> Damage:
    """Set ``key`` to what Python's json would not write."""

    def apply(site: Site) -> None:
        site.edit(name, **{key: "@@"})
        path = site.victim.folder / name
        path.write_text(path.read_text().replace('"@@"', literal))

    return apply


WRONG_FILES: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: None,
    "empty": text(""),
    "not JSON": text("not JSON\n"),
    "not UTF-8": text(b"\xff\xfe\x00{"),
    "a list": text("[]"),
    "a number": text("7"),
    "null": text("null"),
    "a string": text('"finished"'),
    "deep": text("[" * DEEP + "]" * DEEP),
    "a deep object": text('{"a":' * DEEP + "1" + "}" * DEEP),
    "a number of 10,000 digits": text('{"run_id": ' + "9" * 10_000 + "}"),
    "huge": sparse,
    "a pipe": os.mkfifo,
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "a link to itself": lambda path: path.symlink_to(path),
    "a link to nowhere": lambda path: path.symlink_to("/nonexistent/file"),
    "a folder": lambda path: path.mkdir(),
}
GONE = ("missing", "a link to nowhere")
# Without launch.json a run was started by hand; of a row that is gone nothing is left to be damaged.
SILENT: dict[str, tuple[str, ...]] = {STATUS: (), LAUNCH: GONE, ROW: GONE}
ESCAPES = "\x1b]0;title\x07\x1b[2Jred\x9b31m"
