"""Where a run's numbers go while it runs: to metrics.jsonl first, to Weights & Biases second.

metrics.jsonl is the source of truth: the measuring process appends each line in one write. Weights & Biases runs in the
supervisor, which reads those lines; it cannot slow a step down, and loses nothing if the measuring process crashes.
"""

import http.client
import json
import math
import os
import ssl
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

from duel import files, profile
from duel.catalogue import PAIRED
from duel.comparability import COMPARABLE, no_figure, partners
from duel.record import Row

PROBE_SECONDS = 5
INIT_SECONDS = 20
FINISH_SECONDS = 20
LATER = "'python main.py sync' uploads it later"
FILTERS = ("benchmark", "use_case", "size", "precision", "mode", "preset", "product", "batch_size", "target")
SLURM = {
    "job": "SLURM_JOB_ID",
    "step": "SLURM_STEP_ID",
    "nodes": "SLURM_JOB_NODELIST",
    "restarts": "SLURM_RESTART_COUNT",
    "cluster": "SLURM_CLUSTER_NAME",
}


class MetricsWriter:
    """Appends events to metrics.jsonl."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":  # a full disk, or a kill, has torn the last line
            os.write(self._file, b"\n")

    def __call__(self, event: str, **fields: Any) -> None:
        line = json.dumps({"event": event, "time": time.time(), **fields}) + "\n"
        written = os.write(self._file, line.encode())
        if written != len(line):
            raise OSError(f"metrics.jsonl: wrote {written} of {len(line)} bytes; the disk is full")


class MetricsReader:
    """Reads the events that were appended since it was made, or since the last call."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, path.stat().st_size if path.exists() else 0

    def __call__(self) -> list[dict[str, Any]]:
        try:
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                whole = file.read().rpartition(b"\n")[0]
        except FileNotFoundError:
            return []
        self._offset += len(whole) + 1 if whole else 0
        return files.events(whole.decode(errors="replace"))[0]


class WandbSink:
    """One Weights & Biases run per Duel run: online if there is a key and its server answers, else offline.

    ``note`` says in one line what it does and, after ``finish``, how that went. Nothing here fails the run or holds it
    up for long: whatever wandb raises ends up in ``note``, and what it has not uploaded stays in ``folder``.
    """

    def __init__(self, folder: Path, rows: list[Row], environment: dict[str, Any], group: str) -> None:
        self._run: Any = None
        self._folder = folder
        self._last = 0.0
        # Its telemetry is sent in offline mode too, and delays the process's exit if the server does not answer.
        os.environ["WANDB_ERROR_REPORTING"] = "false"
        try:
            import wandb
        except ImportError:
            self.note = "Weights & Biases: not installed in this interpreter; metrics.jsonl has everything"
            return
        except Exception as error:  # it is there and cannot be imported: W&B comes second
            self._lose(error)
            return
        self._wandb, self._names, self._curves = wandb, _names(rows), dict[str, list[tuple[int, float]]]()
        row, frameworks = rows[0], list(dict.fromkeys(str(row.framework) for row in rows))
        slurm = {name: os.environ[variable] for name, variable in SLURM.items() if variable in os.environ}
        # What runs are filtered by, one value each, and all rows in full.
        config: dict[str, Any] = {name: getattr(row, name) for name in FILTERS}
        config |= {"rows": [_known(row) for row in rows], "environment": environment}
        config |= {"run_folder": str(folder), "attempt": row.attempt} | ({"slurm": slurm} if slurm else {})

        def begin(mode: Any) -> Any:
            return wandb.init(
                project=os.environ.get("WANDB_PROJECT", "duel"),
                id=row.run_id,
                resume="allow",  # a run that was interrupted continues
                name=row.run_id,
                group=group,
                job_type=PAIRED if len(frameworks) > 1 else frameworks[0],
                tags=[*frameworks, str(row.benchmark), f"use_case_{row.use_case}", str(row.target)],
                config=config,
                dir=folder,
                settings=_settings(wandb),
                mode=mode,
            )

        try:
            # Before anything else: otherwise wandb asks its server, without a timeout, who owns the key.
            wandb.setup(wandb.Settings(silent=True))
            mode, why = _mode(wandb)
            try:
                self._run = begin(mode=mode)
            except Exception as error:  # wandb may raise anything, transport errors included
                if mode != "online":
                    raise
                # Without this the run's id stays taken within this process.
                wandb.teardown()
                mode, why = "offline", f"it failed online: {_text(error)}; {LATER}"
                self._run = begin(mode=mode)
            self._run.define_metric("step")
            self._run.define_metric("*", step_metric="step")
        except Exception as error:  # W&B comes second: the run continues, and the note says what was lost
            self._lose(error)
            return
        if mode == "offline":
            python, files = (os.path.relpath(path) for path in (sys.executable, folder / "wandb"))
            self.note = f"Weights & Biases: offline ({why}); to watch: {python} -m wandb leet {files}"
        else:
            self.note = f"Weights & Biases: {self._run.url or mode}"

    def log(self, events: list[dict[str, Any]]) -> None:
        """Stream events; wandb takes them without waiting for its server."""
        if self._run is None:
            return
        logged = [values for event in events if (values := self._values(event))]
        try:
            for values in logged:
                self._run.log(values)
        except Exception as error:  # W&B comes second; metrics.jsonl has these events
            self._lose(error)

    def _values(self, event: dict[str, Any]) -> dict[str, Any]:
        """Return what W&B gets of an event, under the name of its framework; at most one block per second."""
        if event["event"] in ("block", "learning") and event["time"] - self._last >= 1.0:
            self._last = event["time"]
        elif event["event"] not in ("loss", "epoch"):
            return {}
        prefix = self._names.get(event["row"] or 0, f"row{event['row']}/")
        if "loss" in event and prefix.count("/") == 1:
            self._curves.setdefault(prefix.strip("/"), []).append((event["step"], event["loss"]))
        shown = ("loss", "throughput", "step_seconds", "held_out_loss", "top1", "top5", "seconds", "joules")
        known = {name: event[name] for name in shown if event.get(name) is not None}
        known |= {"epoch": event["number"]} if event["event"] == "epoch" else {}
        return {"step": event["step"]} | {f"{prefix}{name}": value for name, value in known.items()}

    def finish(self, rows: list[Row], exit_code: int) -> None:
        if self._run is None:
            return
        names = self._names | _names(rows)
        summary = {f"{names[row.row or 0]}{name}": value for row in rows for name, value in _known(row).items()}
        summary |= _of_pairs(rows)
        found = next((row for row in rows if row.device_kind), rows[0])
        try:
            self._run.summary.update(summary)
            self._log_profiles(rows, names)
            # Known only now: the job finds its accelerator itself.
            self._run.config.update({"device_kind": found.device_kind, "device_name": found.device_name})
            self._run.tags += tuple({row.device_kind for row in rows if row.device_kind})
            if len(self._curves) > 1:
                self._run.log({"pair/loss curves": self._figure()})
            self._run.finish(exit_code=exit_code)
        except TimeoutError:
            self.note += f"; not all of it uploaded within {FINISH_SECONDS} s of the end: {LATER}"
        except Exception as error:  # W&B comes second; the row files are written
            self._lose(error)

    def _log_profiles(self, rows: list[Row], names: dict[int, str]) -> None:
        """Log where the time of each row's step goes, if it was profiled, as tables by kind of work and module."""
        for row in rows:
            found = profile.read(self._folder, row.row or 0)
            if found is None or found.why:
                continue
            parts = [[part.kind, part.module, part.stage, part.seconds] for part in found.parts]
            table = self._wandb.Table(columns=["kind", "module", "stage", "seconds of a step"], data=parts)
            self._run.log({f"{names[row.row or 0]}profile": table})
            more: list[tuple[str, str, float]] = [("memory", name, count) for name, count in found.memory.items()]
            more += [("compilation", one.name, sum(one.seconds.values())) for one in found.programs]
            more += [("longest kernel", one.name, one.seconds) for one in found.longest]
            more += [("of no known kind", name, seconds) for name, seconds in found.unknown.items()]
            details = self._wandb.Table(
                columns=["what", "name", "bytes or seconds"], data=[list(each) for each in more]
            )
            self._run.log({f"{names[row.row or 0]}profile details": details})

    def _figure(self) -> Any:
        """Return one chart with the losses of both sides."""
        steps, losses = ([[p[i] for p in curve] for curve in self._curves.values()] for i in (0, 1))
        return self._wandb.plot.line_series(steps, losses, keys=list(self._curves), title="training loss", xname="step")

    def _lose(self, error: Exception) -> None:
        self._run = None
        self.note = f"Weights & Biases: gave up ({_text(error)}); metrics.jsonl has everything"


def _settings(wandb: Any) -> Any:
    return wandb.Settings(
        init_timeout=INIT_SECONDS,
        finish_timeout=FINISH_SECONDS,
        finish_timeout_raises=True,
        console="off",
        silent=True,
    )


def _mode(wandb: Any) -> tuple[Any, str]:
    """Return the mode for wandb.init, and why. Decided before it: a wandb run cannot go offline later."""
    if asked := os.environ.get("WANDB_MODE"):
        return asked, "as asked"
    try:
        if not wandb.login(prompt=False, verify=False):
            return "offline", "no key"
    except wandb.errors.AuthenticationError as error:  # a malformed key
        return "offline", str(error)
    server = wandb.setup().settings.base_url
    if not _answers(server):
        return "offline", f"{server} does not answer; {LATER}"
    return "online", ""


def _answers(server: str) -> bool:
    """Return whether ``server`` speaks HTTP, asked as wandb would: through the proxies of the environment."""
    answered = threading.Event()

    def ask() -> None:
        try:
            urllib.request.urlopen(f"{server}/graphql", timeout=PROBE_SECONDS).close()
        except urllib.error.HTTPError:
            pass  # an answer
        except urllib.error.URLError as error:
            # A certificate is an answer too; wandb has its own list of trusted authorities.
            if not isinstance(error.reason, ssl.SSLError):
                return
        except (OSError, http.client.HTTPException, ValueError):
            return
        answered.set()

    # In a thread: urllib's timeout bounds neither name resolution nor a server that sends a byte now and then.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(PROBE_SECONDS)
    return answered.is_set()


def _text(error: Exception) -> str:
    text = str(error).partition("\nConsider increasing")[0]  # wandb's advice on its settings is not for our users
    return f"{type(error).__name__} {' '.join(text.split())[:200]}".rstrip()


def _known(row: Row) -> dict[str, Any]:
    return {name: value for name, value in row.to_dict().items() if value is not None and name != "missing"}


def _names(rows: list[Row]) -> dict[int, str]:
    """Return the prefix of a row's figures by its number: ``jax/``, or ``jax/2/`` for a framework's second row."""
    names: dict[int, str] = {}
    counts: Counter[str] = Counter()
    for row in rows:
        counts[str(row.framework)] += 1
        count = counts[str(row.framework)]
        names[row.row or 0] = f"{row.framework}/" if count == 1 else f"{row.framework}/{count}/"
    return names


def _of_pairs(rows: list[Row]) -> dict[str, Any]:
    """Return each point's ratio of comparable pairs, and whether all are comparable; nothing for one side alone."""
    points: dict[int, list[tuple[Row, Row]]] = {}
    for pair in partners(rows):
        points.setdefault(pair[0].point or 0, []).append(pair)
    summary: dict[str, Any] = {}
    for point, pairs in points.items():
        prefix = "pair/" if len(points) == 1 else f"pair/{point}/"
        summary[f"{prefix}comparable"] = "; ".join(dict.fromkeys(str(one.comparable) for one, _ in pairs))
        if all(row.comparable == COMPARABLE and not no_figure(row) for pair in pairs for row in pair):
            logs = [math.log((one.throughput or math.nan) / (other.throughput or math.nan)) for one, other in pairs]
            ratio = math.exp(math.fsum(logs) / len(logs))
            summary[f"{prefix}ratio"] = ratio
            summary[f"{prefix}verdict"] = f"no verdict in one session: JAX / PyTorch {ratio:.3g}, of {len(logs)} pairs"
    return summary
