"""A study: a named list of points in ``studies/<name>.yaml``."""

import argparse
import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from duel import options
from duel.catalogue import (
    CLAIM_PAIRS,
    FRAMEWORKS,
    HIDDEN,
    MANY,
    PRECISIONS,
    PRESETS,
    SCALINGS,
    VALIDATE,
    WEAK,
)
from duel.errors import UserError
from duel.job import TRAINING, Job
from duel.launch import plan
from duel.launch.document import Document, Location
from duel.launch.estimate import joined
from duel.launch.schema import Cluster
from duel.modes import DEFAULT
from duel.results import Results

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def _convert(convert: Callable[[str], Any]) -> Callable[[Any], Any]:
    """Return a validator that takes one value as the command line does."""

    def checked(given: Any) -> Any:
        if isinstance(given, bool) or not isinstance(given, str | int):
            raise ValueError(f"{given!r} is not a single value")
        try:
            return convert(str(given))
        except argparse.ArgumentTypeError as error:
            raise ValueError(str(error)) from None

    return checked


def _each(convert: Callable[[str], Any]) -> BeforeValidator:
    """Return a validator of one value or a list of them; a value that means several counts as these."""
    one = _convert(convert)

    def checked(given: Any) -> Any:
        found = [one(value) for value in (given if isinstance(given, list) else [given])]
        if not found:
            raise ValueError("at least one value is needed")
        return tuple(
            dict.fromkeys(each for value in found for each in (value if isinstance(value, tuple) else (value,)))
        )

    return BeforeValidator(checked)


_PRESETS = tuple(name for name in PRESETS if name not in HIDDEN)


class Points(BaseModel):
    """Points by their options, named as on the command line; each may have several values, and all are combined."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    benchmark: Annotated[tuple[str, ...], _each(options.benchmark_names)]
    use_case: Annotated[tuple[int, ...], _each(options.use_case_numbers)]
    target: Annotated[tuple[str | None, ...], _each(options.target_name)] = (None,)
    size: Annotated[tuple[str | None, ...], _each(options.chosen("size", options.SIZES))] = (None,)
    precision: Annotated[tuple[str, ...], _each(options.chosen("precision", tuple(PRECISIONS)))] = ("fp32",)
    mode: Annotated[tuple[str, ...], _each(options.mode_or_waterfall)] = (DEFAULT,)
    batch_sizes: Annotated[tuple[int, ...], _each(options.batch_size_or_max)] = ()
    products: Annotated[tuple[str, ...], _each(options.product)] = ()
    scaling: Annotated[tuple[str, ...], _each(options.chosen("scaling", tuple(SCALINGS)))] = (WEAK,)
    devices: Annotated[tuple[int | None, ...], _each(options.count)] = (None,)
    nodes: Annotated[tuple[int | None, ...], _each(options.count)] = (None,)
    preset: Annotated[str, BeforeValidator(_convert(options.chosen("preset", _PRESETS)))] = "standard"
    framework: Annotated[str | None, BeforeValidator(_convert(options.chosen("framework", tuple(FRAMEWORKS))))] = None
    paired: bool = True
    sessions: Annotated[int | None, BeforeValidator(_convert(options.sessions))] = None
    spacing: Annotated[int | None, BeforeValidator(_convert(options.spacing))] = None
    profile: bool = False


class Without(BaseModel):
    """Points to leave out: those that have one of the values of every key given."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    benchmark: Annotated[tuple[str, ...], _each(options.benchmark_names)] = ()
    use_case: Annotated[tuple[int, ...], _each(options.use_case_numbers)] = ()
    target: Annotated[tuple[str, ...], _each(options.target_name)] = ()
    size: Annotated[tuple[str, ...], _each(options.chosen("size", options.SIZES))] = ()
    precision: Annotated[tuple[str, ...], _each(options.chosen("precision", tuple(PRECISIONS)))] = ()
    mode: Annotated[tuple[str, ...], _each(options.mode_or_waterfall)] = ()
    batch_sizes: Annotated[tuple[int, ...], _each(options.batch_size)] = ()
    products: Annotated[tuple[str, ...], _each(options.product)] = ()

    def covers(self, point: Job) -> bool:
        """Return whether ``point`` is to be left out."""
        size = point.size or PRESETS[point.preset].size
        values = {"size": (size,), "batch_sizes": point.batch_sizes, "products": point.products}
        for name in type(self).model_fields:
            wanted = getattr(self, name)
            if wanted and not set(values.get(name, (getattr(point, name),))) & set(wanted):
                return False
        return True


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    about: str
    points: list[Points]
    without: list[Without] = []


@dataclass(frozen=True)
class Study:
    """A study as planned: its points, each a job of nothing else."""

    name: str
    about: str
    points: list[Job]


def path(folder: Path, name: str) -> Path:
    """Return the file of the study ``name``. Raises UserError for a name that cannot be one, or is not there."""
    known = sorted(file.stem for file in folder.glob("*.yaml"))
    if not NAME.fullmatch(name) or name not in known:
        raise UserError(f"unknown study {name!r}; valid: {', '.join(known) or 'none'} (files in {folder.name}/)")
    return folder / f"{name}.yaml"


def load(file: Path, cluster: Cluster, results: Results) -> Study:
    """Read a study and plan its points. Raises UserError, with line and column for errors in the file."""
    document = Document(file, "'about' and 'points'", "studies are files in studies/")
    try:
        stored = _File.model_validate(document.plain)
    except ValidationError as error:
        raise document.errors(error, _valid_keys) from error
    found: list[Job] = []
    for number, group in enumerate(stored.points):
        try:
            found += [point for job in _jobs(group, cluster, results) for point in job.points]
        except UserError as error:
            raise document.error(("points", number), f"points.{number}: {error}") from error
    for number, without in enumerate(stored.without):
        left = [point for point in found if not without.covers(point)]
        if len(left) == len(found):
            raise document.error(("without", number), f"without.{number}: no point has these values")
        found = left
    if not found:
        raise document.error(("points",), "points: nothing is left to measure")
    return Study(file.stem, stored.about, list({point.identity: point for point in found}.values()))


def _jobs(group: Points, cluster: Cluster, results: Results) -> list[Job]:
    """Return the jobs of one entry of ``points``. Raises UserError for what cannot be combined or run."""
    if VALIDATE in group.use_case:
        raise UserError("use case 0 is a proof: 'main.py validate' makes it")
    if group.spacing and not group.sessions:
        raise UserError("spacing needs sessions")
    if group.sessions and not group.paired:
        raise UserError("sessions need 'paired: true'")
    if group.sessions and PRESETS[group.preset].pairs < CLAIM_PAIRS:
        claiming = " or ".join(name for name in _PRESETS if PRESETS[name].pairs >= CLAIM_PAIRS)
        raise UserError(f"sessions of preset {group.preset} would never be one ratio: they need preset {claiming}")
    if group.paired and group.framework:
        raise UserError("'framework' measures one side: it needs 'paired: false'")
    many = [case for case in group.use_case if case in MANY]
    if not many and (group.devices != (None,) or group.nodes != (None,)):
        raise UserError(f"devices and nodes are for use cases {' and '.join(map(str, MANY))}")
    for name, takes in options.VARIANTS.items():
        field = type(group).model_fields.get(name)
        if field and getattr(group, name) != field.default and not set(takes) & set(group.use_case):
            raise UserError(f"{name} is for use cases {' and '.join(map(str, takes))}")
    kept = ("benchmark", "use_case", "preset", "framework", "paired", "sessions", "spacing", "batch_sizes", "products")
    common = {name: getattr(group, name) for name in (*kept, "profile")}
    crossed = ("target", "size", "precision", "mode", "scaling", "devices", "nodes")
    found = []
    for values in itertools.product(*(getattr(group, name) for name in crossed)):
        absent = dict.fromkeys(("device", "weights", "microbatch", "trials", *TRAINING))
        args = argparse.Namespace(**common, **dict(zip(crossed, values, strict=True)), **absent)
        found += plan.jobs(args, cluster, results)
    for job in found:
        target = cluster.target(job.target)[1].for_job(job)  # which refuses what the target cannot run
        for framework in job.frameworks:
            if getattr(target.python, framework) is None:
                how = "give 'framework' and 'paired: false'"
                raise UserError(f"target {job.target!r} has no interpreter for {framework}: {how}")
    return found


def grouped(points: Iterable[Job]) -> list[Job]:
    """Return jobs of ``points`` that differ in nothing but batch size, product and when they may begin."""
    found: dict[Job, list[Job]] = {}
    for point in points:
        found.setdefault(dataclasses.replace(point.identity, batch_sizes=(), products=()), []).append(point)
    return [job for some in found.values() for job in _whole(some)]


def _whole(points: list[Job]) -> list[Job]:
    """Return the fewest jobs of ``points``: one if they are all combinations of their sizes and products."""
    whole = joined(points)
    return [whole] if len(whole.points) == len(points) else points


def _valid_keys(location: Location) -> list[str]:
    models: dict[str, type[BaseModel]] = {"points": Points, "without": Without}
    return list((models[str(location[0])] if location else _File).model_fields)
