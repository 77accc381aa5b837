"""Whether what ran is what was rendered: a run's script in Slurm, its code, and the evidence of its rows."""

from duel import files, index, tree
from duel.errors import UserError
from duel.files import Damaged
from duel.job import EDITED, script_state
from duel.launch import archive, queue
from duel.record import COLUMNS
from duel.results import Results, Run
from duel.states import TERMINAL
from duel.table import REMAKE, archived, evidence, merge, read_rows, update
from duel.terminal import Table

OK, DIFFERS, UNKNOWN = "ok", "DIFFERS", "not known"
Check = tuple[str, str, str]  # what, one of the above, and on what this rests


def verify(run: Run, results: Results) -> tuple[Table, bool]:
    """Return the checks of ``run`` as a table, and whether none differs. Raises UserError if its record is damaged."""
    try:
        launch = run.launch()
    except Damaged as error:
        raise UserError(f"{run.id}: {error}") from error
    found = [*_script(run, launch.slurm_job_id or run.stored_status().slurm_job_id), _code(launch.code, results)]
    found += [_evidence(run, results)]
    return Table(["what", "verdict", "by"], [list(check) for check in found], []), all(
        v != DIFFERS for _, v, _ in found
    )


def check(results: Results) -> list[str]:
    """Read every run and archive again, correct results.csv, and return what was inconsistent."""
    update(results)
    rows = read_rows(results.csv, strict=False, remedy=REMAKE)
    before = {(row.run_id, row.row): row.to_csv() for row in rows}
    there, settled = set(results.names()), index.load(results).settled
    moving = {row.group for row in rows if row.run_id in there and row.run_id not in settled}  # may end meanwhile
    found = []
    for row in merge(results, check=True):
        what = f"{row.run_id}, row {row.row}"
        if str(row.cause).startswith("damaged"):
            found.append(f"{what}: {row.cause}")
        if "evidence (" in str(row.comparable):
            found.append(f"{what}: {row.comparable}")
        now, old = row.to_csv(), before.get((row.run_id, row.row))
        if row.status in TERMINAL and old is None:
            found.append(f"{what}: was not in results.csv")
        elif row.status in TERMINAL and old is not None and old != now and row.group not in moving:
            names = [name for name, one, other in zip(COLUMNS, now, old, strict=True) if one != other]
            found.append(f"{what}: results.csv had other values of {', '.join(names)}")
    here, packed = {run.id for run in results.runs()}, archived(results)
    gone = dict.fromkeys(str(name) for name, _ in before if name not in here and name not in packed)
    found += [f"{run_id}: its folder is gone; only its rows in results.csv are left" for run_id in gone]
    for path in dict.fromkeys(packed.values()):
        try:
            archive.read(path)
        except UserError as error:
            found.append(str(error))
    return found


def _script(run: Run, job_id: str) -> list[Check]:
    """Compare script.sh with its own seal, and with what Slurm kept of the job."""
    try:
        text = files.read(run.script).decode(errors="replace")
    except (FileNotFoundError, Damaged) as error:
        return [("script", UNKNOWN, f"the run has no script.sh: {error}")]
    sealed = script_state(text) != EDITED
    if name := run.launch().array.rpartition("_")[0]:  # Slurm has the script of the array, which starts this one
        try:
            text = files.read(run.folder.parent.parent / "logs" / f"{name}.sh").decode(errors="replace")
        except (FileNotFoundError, Damaged) as error:
            return [("script in Slurm", UNKNOWN, f"the script of its job array is gone: {error}")]
    found = [("script", OK if sealed else DIFFERS, "its seal" if sealed else "its seal: it was edited by hand")]
    if not job_id:
        return [*found, ("script in Slurm", UNKNOWN, "the run was in no Slurm job")]
    if queue.elsewhere(cluster := run.launch().cluster):
        return [*found, ("script in Slurm", UNKNOWN, f"its job is on the cluster {cluster}")]
    notes: list[str] = []
    for command in (["scontrol", "write", "batch_script", job_id, "-"], ["sacct", "-j", job_id, "--batch-script"]):
        stored = queue.output(command, f"the script of job {job_id}", notes) or ""
        begin = stored.find("#!")
        if begin >= 0:
            same = stored[begin:].strip() == text.strip()
            return [*found, ("script in Slurm", OK if same else DIFFERS, f"{command[0]}, job {job_id}")]
    why = "; ".join(notes) or "Slurm keeps no scripts of ended jobs here (AccountingStoreFlags=job_script)"
    return [*found, ("script in Slurm", UNKNOWN, why)]


def _code(digest: str, results: Results) -> Check:
    place = results.folder / "trees" / digest
    if not digest or not place.is_dir():
        return "code", UNKNOWN, "the copy of the submission is not in results/trees"
    same = tree.digest(place) == digest
    return "code", OK if same else DIFFERS, f"results/trees/{digest}" + ("" if same else ": it was changed since")


def _evidence(run: Run, results: Results) -> Check:
    rows = [row for row in run.rows() if row.evidence_sha256]
    wrong = []
    for row in rows:
        try:
            evidence(row, results)
        except (OSError, ValueError) as error:
            wrong.append(f"row {row.row}: {error}")
    if not rows:
        return "evidence", UNKNOWN, "no row recorded any"
    return "evidence", DIFFERS if wrong else OK, "; ".join(wrong) or f"hashes of {len(rows)} rows"
