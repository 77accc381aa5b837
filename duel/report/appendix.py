"""What artifact reviewers ask for: hardware, time, variation, licences, checksums; and Croissant metadata."""

import dataclasses
import hashlib
import json
import os
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from duel.files import Damaged, read_record
from duel.record import COLUMNS, Row
from duel.report.records import Records, seconds
from duel.states import FINISHED
from duel.terminal import warn

LICENCES = "Duel and these records: MIT. JAX, Flax, Optax: Apache-2.0. PyTorch, torchvision: BSD-3-Clause."
CROISSANT = "http://mlcommons.org/croissant/1.0"


def paragraphs(sets: Sequence[Records]) -> list[str]:
    """Return the paragraphs of the section on artifacts, for the page and report.md."""
    texts = []
    for records in sets:
        rows = [row for row in records.rows if row.framework]
        texts += _hardware(records, rows)
        hours = [_hours(row) for row in rows]
        failed = [hour for hour, row in zip(hours, rows, strict=True) if row.status != FINISHED]
        cost = f"{sum(hours):.2f} device-hours in {len(rows)} rows"
        cost += f", of which {sum(failed):.2f} in {len(failed)} that did not finish" if failed else ", all finished"
        wall = sum(map(seconds, rows)) / 3600
        texts.append(f"Cost: {cost}; {wall:.2f} hours one after the other.{_outside(records)}")
        texts.append("Set-up: 7 GB of disk, and downloads of as much.")
        spreads = [line.spread for line in records.lines if line.spread is not None]
        if spreads:
            texts.append(f"Variation: sessions of one point vary by at most {max(spreads):.1%} (standard deviation).")
        digest = hashlib.sha256((records.folder / "results.csv").read_bytes()).hexdigest()
        texts.append(f"Checksum: results.csv of {records.name} has SHA-256 {digest}.")
    return [*texts, f"Licences: {LICENCES}"]


def croissant(records: Records, folder: Path) -> str:
    """Return metadata of the rows in MLCommons' Croissant vocabulary, as JSON-LD for a file in ``folder``."""
    data = (records.folder / "results.csv").read_bytes()
    hints = typing.get_type_hints(Row)
    meanings = {field.name: field.metadata.get("meaning", "") for field in dataclasses.fields(Row)}
    fields = [
        {
            "@type": "cr:Field",
            "@id": f"rows/{name}",
            "name": name,
            "description": meanings[name],
            "dataType": _type(hints[name]),
            "source": {"fileObject": {"@id": "results.csv"}, "extract": {"column": name}},
        }
        for name in COLUMNS
    ]
    days = sorted(str(row.started)[:10] for row in records.rows if row.started)
    described: dict[str, Any] = {
        "@context": _context(),
        "@type": "sc:Dataset",
        "conformsTo": CROISSANT,
        "name": f"duel-{records.name}",
        "description": "Paired measurements of JAX and PyTorch, one row per process.",
        "license": "https://spdx.org/licenses/MIT.html",
        "version": "1.0.0",
        "distribution": [
            {
                "@type": "cr:FileObject",
                "@id": "results.csv",
                "name": "results.csv",
                "contentUrl": os.path.relpath(records.folder / "results.csv", folder),
                "encodingFormat": "text/csv",
                "sha256": hashlib.sha256(data).hexdigest(),
            }
        ],
        "recordSet": [{"@type": "cr:RecordSet", "@id": "rows", "name": "rows", "field": fields}],
    }
    if days:
        described["datePublished"] = days[-1]
    return json.dumps(described, indent=1) + "\n"


def _context() -> dict[str, Any]:
    """Return the prefixes and terms that the vocabulary requires in every file."""
    terms = "conformsTo citeAs column data dataBiases dataCollection examples extract field fileProperty fileObject"
    terms += " fileSet format includes isLiveDataset jsonPath key md5 parentField path personalSensitiveInformation"
    terms += " recordSet references regex repeated replace separator source subField transform"
    context: dict[str, Any] = {"@language": "en", "@vocab": "https://schema.org/", "sc": "https://schema.org/"}
    context |= {"cr": "http://mlcommons.org/croissant/", "rai": "http://mlcommons.org/croissant/RAI/"}
    context |= {name: f"cr:{name}" for name in terms.split()} | {"dct": "http://purl.org/dc/terms/"}
    context |= {"conformsTo": "dct:conformsTo", "data": {"@id": "cr:data", "@type": "@json"}}
    return context | {"dataType": {"@id": "cr:dataType", "@type": "@vocab"}}


def _type(hint: Any) -> str:
    kinds = [kind for kind in typing.get_args(hint) if kind is not types.NoneType] or [hint]
    return {int: "sc:Integer", float: "sc:Float", bool: "sc:Boolean"}.get(kinds[0], "sc:Text")


@dataclass(frozen=True)
class _Cpu:
    model: str = "unknown"


@dataclass(frozen=True)
class _Device:
    memory_bytes: float | None = None


@dataclass(frozen=True)
class _Environment:
    """What is read of a run's environment.json."""

    cpu: _Cpu | None = None
    device: _Device | None = None
    usable_cpus: list[int] | None = None
    platform: str | None = None


def _hardware(records: Records, rows: Sequence[Row]) -> list[str]:
    """Return a sentence on each device, and on the machine of its first run that kept its environment."""
    runs: dict[str, list[str]] = {}
    for row in (row for row in rows if row.device_name):  # the others ended before they found one
        mine = runs.setdefault(str(row.device_name), [])
        if row.run_id and row.run_id not in mine[-1:]:
            mine.append(row.run_id)
    texts = []
    for device, mine in runs.items():
        machine = _environment(records, mine)
        memory = machine.device.memory_bytes if machine.device else None
        hardware = [device, f"{(machine.cpu or _Cpu()).model} CPU"]
        hardware += [f"{len(machine.usable_cpus)} CPUs used"] if machine.usable_cpus else []
        hardware += [f"{memory / 2**30:.0f} GiB of memory"] if memory else []
        where = "; ".join(filter(None, (", ".join(dict.fromkeys(hardware)), machine.platform)))
        texts.append(f"Hardware of {records.name}: {where}.")
    return texts


def _environment(records: Records, runs: Sequence[str]) -> _Environment:
    """Return the environment of the first of ``runs`` that kept one; those that are damaged are reported."""
    for run_id in dict.fromkeys(runs):
        try:
            return read_record(records.folder / "runs" / run_id / "environment.json", _Environment)
        except FileNotFoundError:
            continue
        except Damaged as error:
            warn(f"{run_id}: {error}")
    return _Environment()


def _outside(records: Records) -> str:
    """Return what the device did beside the rows of a published set, as ``published`` notes it; empty if nothing."""
    hours = [hours for _, hours in records.outside]
    failed = [hours for status, hours in records.outside if status != FINISHED]
    if not hours:
        return ""
    return (
        f" Outside the set are {sum(hours):.2f} device-hours in {len(hours)} rows: {sum(failed):.2f} in {len(failed)} "
        f"that did not finish, the others from searches, trainings, or sides and pairs that are not in the set."
    )


def _hours(row: Row) -> float:
    """Return the device-hours that ``row`` took."""
    return seconds(row) * (row.device_count or 1) / 3600
