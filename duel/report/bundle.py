"""An archive for a repository that assigns DOIs: records, report, code, citation, licence and checksums."""

import hashlib
import io
import os
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

from duel import ROOT
from duel.errors import UserError
from duel.report import document
from duel.report.records import Records

EXTRA_FILES = ("CITATION.cff", "LICENSE")


def write(records: Records, folder: Path, say: Callable[[str], None]) -> Path:
    """Rewrite the report of ``records``, write ``folder``/duel-<name>.zip and return its path.

    Raises UserError if a commit used for some rows is not in this clone, or a file cannot be written.
    """
    document.write([records], records.folder / "report", say)
    commits = sorted({str(row.git_sha) for row in records.rows if row.git_sha})
    members = {
        f"{records.name}/{path.relative_to(records.folder)}": path.read_bytes() for path in _files(records.folder)
    }
    members |= {name: (ROOT / name).read_bytes() for name in EXTRA_FILES}
    for commit in commits:
        members[f"code-{commit[:12]}.tar"] = _code(commit)
    sums = "".join(f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in sorted(members.items()))
    members["SHA256SUMS"] = sums.encode()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in sorted(members.items()):
            archive.writestr(f"duel-{records.name}/{name}", data)
    path = folder / f"duel-{records.name}.zip"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(packed.getvalue())
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
    digest = hashlib.sha256(packed.getvalue()).hexdigest()
    say(f"{os.path.relpath(path)}: {len(members)} files, {len(packed.getvalue()) / 1e6:.1f} MB, SHA-256 {digest}")
    return path


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _code(commit: str) -> bytes:
    """Return the code at ``commit`` as a tar archive."""
    command = ["git", "archive", "--end-of-options", commit]  # a received set may hold anything
    found = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    if found.returncode:
        raise UserError(f"commit {commit[:12]}, used for some rows, is not in this clone; try 'git fetch --unshallow'")
    return found.stdout
