"""Pack settled runs into one file, for results folders that would hold a hundred thousand small ones.

An archive is ``results/archive/<stamp>.tar.gz``, the folders of its runs, and ``<stamp>.csv``, their rows, which also
stay in results.csv. ``tar -xzf`` into results/runs restores the folders.
"""

import gzip
import hashlib
import os
import shutil
import tarfile
from collections.abc import Callable, Collection
from pathlib import Path

from duel import files, index
from duel.errors import UserError
from duel.files import replacing
from duel.launch.views import RunView
from duel.results import Results, Run
from duel.table import rows_of, update, write_rows

CHUNK_BYTES = 1 << 20

Say = Callable[[str], None]


def archive(chosen: Collection[RunView], every: Collection[RunView], results: Results, say: Say) -> None:
    """Pack the runs ``chosen`` among ``every``, if all runs of their group are settled, and remove their folders.

    A kill at any moment leaves each run in its folder, in the archive, or in both. Raises UserError if there is none to
    pack, or if the archive cannot be read back.
    """
    unsettled = {seen.group for seen in every if not seen.is_settled}
    update(results)
    with index.locked(results, wait=True):  # no run is reopened meanwhile
        settled = index.load(results).settled
        there = [seen for seen in chosen if seen.run.folder.is_dir()]  # another 'archive' may have been faster
        packed = [seen.run for seen in there if seen.group not in unsettled and seen.id in settled]
        if left := len(chosen) - len(packed):
            say(f"left out: {left} runs of groups in which a run may still report something")
        if not packed:
            raise UserError("nothing to archive: no group of runs is settled; 'python main.py status' shows them")
        path = _keep(packed, results)
        _remove(packed)
    update(results)  # for runs that ended meanwhile
    shown = os.path.relpath(path)
    say(f"{shown}: {len(packed)} runs, {path.stat().st_size / 1e6:.1f} MB; their rows stay in results.csv")
    say(f"to restore a run: tar -xzf {shown} -C {os.path.relpath(results.folder / 'runs')} {packed[0].id}")


def _keep(runs: Collection[Run], results: Results) -> Path:
    """Write the archive of ``runs``; returns its path. Raises UserError if it does not hold what their folders do."""
    folder = results.folder / "archive"
    folder.mkdir(exist_ok=True)
    name, ids = files.stamp(), {run.id for run in runs}
    path = folder / f"{name}.tar.gz"
    sums = _pack(runs, path)
    if read(path) != sums:
        path.unlink()
        raise UserError(f"{path} did not hold what was packed; no run was removed")
    write_rows(folder / f"{name}.csv", [row for row in rows_of(results, ids) if row.run_id in ids])
    return path


def _pack(runs: Collection[Run], path: Path) -> dict[str, str]:
    """Write ``path``; returns the SHA-256 of each file in it."""
    sums = {}
    with replacing(path) as file, tarfile.open(fileobj=file, mode="w:gz") as packed:
        for run in runs:
            packed.add(run.folder, run.id)
            for place in run.folder.rglob("*"):
                if place.is_file() and not place.is_symlink():
                    name = f"{run.id}/{place.relative_to(run.folder)}"
                    sums[name] = hashlib.sha256(place.read_bytes()).hexdigest()
    return sums


def read(path: Path) -> dict[str, str]:
    """Return the SHA-256 of each file in an archive. Raises UserError if it is damaged."""
    sums = {}
    try:
        with gzip.open(path) as file, tarfile.open(fileobj=file, mode="r:") as packed:
            for member in packed:
                content = packed.extractfile(member) if member.isreg() else None
                if content is not None:
                    sums[member.name] = hashlib.sha256(content.read()).hexdigest()
            while file.read(CHUNK_BYTES):  # to the end, where gzip keeps its checksum
                pass
    except (OSError, EOFError, tarfile.TarError) as error:
        raise UserError(f"{path} is damaged: {error}") from error
    return sums


def _remove(runs: Collection[Run]) -> None:
    for run in runs:
        gone = run.folder.with_name(f".{run.id}.{os.getpid()}")  # what a kill leaves counts as litter
        os.rename(run.folder, gone)
        shutil.rmtree(gone)
