"""Programs planned for TPUs that are not here: compiled for real by libtpu, kept, and told before a job waits."""

import dataclasses
import itertools
import json
import re
from argparse import Namespace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Main, needs, rows_of
from golden import regenerate

from duel import files
from duel.arguments import Parser
from duel.catalogue import (
    BENCHMARKS,
    FIT,
    FRAMEWORKS,
    INFERENCE,
    PAIRED,
    PER_SAMPLE,
    PER_SAMPLE_MANY,
    TRAIN,
    TRAIN_MANY,
    USE_CASES,
)
from duel.chips import CHIPS
from duel.cli import fit as fit_command
from duel.errors import UserError
from duel.job import Job
from duel.launch import cluster, fit, plan, submit
from duel.launch.fit import Cell, Found
from duel.measure import growing
from duel.measure.batches import POOL_BATCHES
from duel.measure.growing import repeated
from duel.record import Row
from duel.results import Results, Run

COMPILED_FOR = ("v5e", "v6e")
PYTHON = ROOT / ".venv" / "jax-tpu" / "bin" / "python"


@pytest.fixture
def python() -> str:
    needs([] if PYTHON.exists() else ["libtpu"], "tpu-env")
    return str(PYTHON)


@pytest.mark.parametrize("chip", COMPILED_FOR)
@pytest.mark.parametrize(
    ("benchmark", "use_case", "devices"),
    [("mnist", TRAIN, 1), ("gcn", INFERENCE, 1), ("mnist", TRAIN_MANY, 4), ("mnist", PER_SAMPLE_MANY, 4)],
)
def test_the_twins_own_programs_compile_for_a_chip_that_is_not_here(
    python: str, chip: str, benchmark: str, use_case: int, devices: int
) -> None:
    product = "clipped_sum" if use_case == PER_SAMPLE_MANY else None
    found = fit.compiled(Cell(chip, benchmark, use_case, "tiny", "bf16", 8 * devices, devices, product), python, 300)
    assert found.outcome == fit.FITS, found.why
    assert found.planned_bytes
    assert 0 < found.planned_bytes < CHIPS[chip].memory_bytes
    assert found.flops
    assert found.versions["libtpu"]


def test_batches_that_wait_for_their_turn_take_memory_too(python: str) -> None:
    """GCN's one graph is nearly all that its inference has on the chip, eight times."""
    found = fit.compiled(Cell("v5e", "gcn", INFERENCE, "full", "fp32", 1), python, 300)
    nodes = 4 * 2708 * 1433
    assert (found.planned_bytes or 0) > 8 * nodes
    pool = repeated(BENCHMARKS["mnist"], "tiny", 4)
    assert [batch.inputs[0].shape for batch in pool.batches] == [(4, 1, 28, 28)] * POOL_BATCHES


def test_a_program_that_does_not_fit_is_told_by_how_much(python: str) -> None:
    found = fit.compiled(Cell("v5e", "gcn", INFERENCE, "full", "bf16", 4096), python, 600)
    assert found.outcome == fit.TOO_LARGE
    assert re.search(r"by [\d.]+G|[\d.]+ GiB more|[\d.]+G\) exceeds available HBM \([\d.]+G", found.why), found.why


def test_a_compilation_that_takes_too_long_ends(python: str) -> None:
    found = fit.compiled(Cell("v5e", "resnet50", TRAIN, "full", "bf16", 32), python, 2)
    assert (found.outcome, found.why) == (fit.TOO_SLOW, "2 s")


def fitting_in(chip: str) -> list[Found]:
    """What docs/fit says fits ``chip`` at size tiny."""
    stored = files.read_object(ROOT / "docs" / "fit" / f"{chip}.json")["found"]
    found = files.fitting(stored, list[Found], chip)
    return [one for one in found if one.outcome == fit.FITS and one.cell.size == "tiny"]


@pytest.mark.parametrize("chip", COMPILED_FOR)
def test_every_cell_compiles_in_some_mode_and_batch(chip: str) -> None:
    cells = {(one.cell.benchmark, one.cell.use_case, one.cell.precision) for one in fitting_in(chip)}
    timed = [number for number, use_case in USE_CASES.items() if use_case.module]
    assert cells == set(itertools.product(BENCHMARKS, timed, ("bf16", "fp32")))


@pytest.mark.full
@pytest.mark.parametrize(
    "recorded", [one for chip in COMPILED_FOR for one in fitting_in(chip)], ids=lambda one: str(one.cell)
)
def test_what_compiled_does_so_again(python: str, recorded: Found) -> None:
    found = fit.compiled(recorded.cell, python, 900)
    assert found.outcome == fit.FITS, found
    assert found.planned_bytes == recorded.planned_bytes  # the same libtpu and code, whatever the machine


def test_the_table_of_cells_is_of_its_records() -> None:
    text = (ROOT / "docs" / "tpu-cells.md").read_text()
    assert text == regenerate.between(text, "cells", regenerate.plans()), regenerate.REMEDY
    assert text == regenerate.between(text, "largest", regenerate.largest()), regenerate.REMEDY
    for file in (ROOT / "docs" / "fit").glob("*.json"):
        found = json.loads(file.read_text())["found"]
        assert {one["cell"]["benchmark"] for one in found} == set(BENCHMARKS), file
        assert {one["cell"]["chip"] for one in found} == {file.stem}


CELL = Cell("v5e", "resnet50", TRAIN, "full", "bf16", 1024)


def stand_in(folder: Path, most: int, each: int = 1000) -> str:
    """An interpreter that 'compiles' batches up to ``most``: the sizes that a search tries do not need libtpu."""
    path = folder / "python"
    path.write_text(
        "#!/usr/bin/env python3\nimport json, sys\nsize = json.loads(sys.argv[2])['batch_size']\n"
        f"fits = size <= {most}\nfound = {{'fits': fits, 'versions': {{'jax': '1'}}, 'why': 'Exceeded hbm by 2.1G',\n"
        f"'seconds': 1, 'planned_bytes': {each} * size, 'flops': 1e9, 'moved_bytes': 1e6}}\nprint(json.dumps(found))\n"
    )
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("most", [100, 128, 200, 1000])
def test_the_largest_batch_is_found_by_what_the_plans_say(tmp_path: Path, most: int) -> None:
    """Also by plans that say nothing of what does not fit, with more tries."""
    cell = Cell("v5e", "mnist", TRAIN, "full", "bf16", 32)
    for each, tries in ((CHIPS["v5e"].memory_bytes // (most + 1), 6), (1000, 11)):
        trying = fit.largest(cell, stand_in(tmp_path, most, each), 10, lambda text: None)
        found = list(islice(trying, tries + 1))
        best = max(one.cell.batch_size for one in found if one.outcome == fit.FITS)
        assert most * 8 / 9 - 1 <= best <= most
        assert len(found) <= tries


def test_what_was_found_is_kept_and_told_before_a_job_waits(tmp_path: Path) -> None:
    code = fit._code(CELL)
    versions = {"libtpu": "0.0.40"}
    too_large = Found(CELL, fit.TOO_LARGE, "Exceeded hbm capacity by 4.2G", code_sha256=code, versions=versions)
    fit.keep(tmp_path, "v5e", too_large)
    fits = Found(Cell("v5e", "mnist", TRAIN, "full", "bf16", 256), fit.FITS, "", 1.0, 10, 1e9, 1e6, fit._code(CELL))
    fit.keep(tmp_path, "v5e", fits)
    fit.keep(tmp_path, "v5e", dataclasses.replace(too_large, outcome=fit.TOO_SLOW, why="30 s"))
    assert [one.cell.benchmark for one in fit.known(tmp_path, "v5e")] == ["resnet50"], "the other is of other code"
    job = Job("jax", "resnet50", TRAIN, "standard", "bf16", None, "tpu", batch_sizes=(1024,))
    (said,) = fit.remarks(job, "v5e", tmp_path)
    assert "batch 1024 does not fit a v5e: Exceeded hbm capacity by 4.2G (compiled ahead by libtpu 0.0.40" in said
    assert fit.remarks(Job("jax", "resnet50", TRAIN, "standard", "bf16", None, "tpu"), "v5e", tmp_path) == []
    many = dataclasses.replace(job, use_case=2, batch_sizes=(), devices_per_node=4)
    over_all = Cell("v5e", "resnet50", 2, "full", "bf16", 512, 4)
    fit.keep(tmp_path, "v5e", Found(over_all, fit.TOO_LARGE, "Exceeded hbm", code_sha256=fit._code(over_all)))
    assert len(fit.remarks(many, "v5e", tmp_path)) == 1, "128 on each chip are 512 in all"
    assert fit.remarks(dataclasses.replace(many, batch_sizes=(64,)), "v5e", tmp_path) == []
    (said,) = fit.remarks(dataclasses.replace(many, batch_sizes=(512,)), "v5e", tmp_path)  # nor does a larger one
    assert len(fit.remarks(dataclasses.replace(many, batch_sizes=(512,), scaling="strong"), "v5e", tmp_path)) == 1
    trains = dataclasses.replace(job, benchmark="vit_b16", dataset="imagenet1k", batch_sizes=())
    over_all = Cell("v5e", "vit_b16", TRAIN, "full", "bf16", 1024)
    fit.keep(tmp_path, "v5e", Found(over_all, fit.TOO_LARGE, "Exceeded hbm", code_sha256=fit._code(over_all)))
    assert len(fit.remarks(trains, "v5e", tmp_path)) == 1, "its recipe's batch is 4096"
    small = Cell("v5e", "bert", TRAIN, "tiny", "bf16", 8)
    crashed = Found(small, fit.FAILED, "the compiler was ended by SIGSEGV", code_sha256=fit._code(small))
    fit.keep(tmp_path, "v5e", crashed)
    bert = Job("jax", "bert", TRAIN, "smoke", "bf16", None, "tpu", size="tiny", batch_sizes=(8,))
    (said,) = fit.remarks(bert, "v5e", tmp_path)
    assert said.endswith("did not compile for a v5e on this machine: the compiler was ended by SIGSEGV")
    other = Cell("v5e", "bert", TRAIN, "tiny", "bf16", 8, mode="default+donation=off")
    fit.keep(tmp_path, "v5e", Found(other, fit.FITS, code_sha256=fit._code(other)))
    (said,) = fit.remarks(bert, "v5e", tmp_path)
    assert said.endswith("ended by SIGSEGV; it does with --mode default+donation=off")
    assert fit.remarks(dataclasses.replace(bert, mode="default+compile"), "v5e", tmp_path) == [said], "not JAX's"
    for mode in (other.mode, "default+attention=cudnn"):
        assert fit.remarks(dataclasses.replace(bert, mode=mode), "v5e", tmp_path) == []
    assert fit.remarks(dataclasses.replace(bert, batch_sizes=(16,)), "v5e", tmp_path) == []
    fit.keep(tmp_path, "v5e", Found(small, fit.TOO_SLOW, "9 s", code_sha256=fit._code(small)))
    assert "on this machine: not within 9 s; it does" in fit.remarks(bert, "v5e", tmp_path)[0]
    fit.file(tmp_path, "v5e").write_text("{")
    with pytest.raises(UserError, match=r"remove it, and 'main\.py fit' makes a new one"):
        fit.known(tmp_path, "v5e")


def test_the_compiler_is_told_of_when_it_is_killed_and_gets_nothing_of_the_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    lines = (
        "#!/bin/sh",
        'echo "$XLA_FLAGS$PYTHONSAFEPATH$HOME" >&2',
        "[ -e killed ] || exit 3",
        "kill -$(cat killed) $$",
    )
    python.write_text("\n".join(lines))
    python.chmod(0o755)
    for name in ("XLA_FLAGS", "PYTHONSAFEPATH", "HOME"):
        monkeypatch.setenv(name, f"my {name}")
    monkeypatch.setattr(fit, "CODE", tmp_path)
    (tmp_path / "jax").mkdir()
    assert fit.compiled(CELL, str(python), 10).why == "my HOME"
    for signal, why in (("9", "SIGKILL: is there enough memory here?"), ("11", "SIGSEGV")):
        (tmp_path / "jax" / "killed").write_text(signal)
        assert fit.compiled(CELL, str(python), 10).why == f"the compiler was ended by {why}"


def test_what_was_compiled_ahead_is_told_of_every_job_with_jax_in_it(tmp_path: Path) -> None:
    target = cluster.load(ROOT / "cluster.yaml").targets["local"].model_copy(update={"chip": "v5e"})
    fit.keep(tmp_path, "v5e", Found(CELL, fit.TOO_LARGE, "by 4.2G", code_sha256=fit._code(CELL)))
    job = Job("paired", "resnet50", TRAIN, "standard", "bf16", None, "local", batch_sizes=(1024,))
    (said,) = submit._known_of(job, target, Results(tmp_path))
    assert "does not fit a v5e" in said
    assert submit._known_of(dataclasses.replace(job, framework="pytorch"), target, Results(tmp_path)) == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--device", "tpu:v9"), "unknown chip 'tpu:v9'; valid: tpu:v4, tpu:v5e, tpu:v5p, tpu:v6e"),
        (("--use_case", "2"), "use case 2: batches are tried on one device; valid: 1, 3, 5"),
        (("--mode", "default+convolution=products"), "omit --largest, --limit and --mode, and give"),
        (
            ("--device", "tpu:v5e", "--mode", "default+attention=cudnn"),
            "switch attention does not apply to train_single of mnist on a tpu; valid: ",
        ),
        (("--device", "tpu:v5e", "--limit", "1h"), "time '1h': give minutes or seconds"),
        (("--device", "tpu:v5e", "--use_case", "0"), "use case 0 is a proof: 'main.py validate' makes it"),
        (("--device", "tpu:v5e", "--precision", "tf32"), "tf32 is not supported on a TPU; valid: fp32, bf16"),
        (
            ("--device", "tpu:v5e", "--use_case", "2", "--batch_sizes", "30"),
            "use case 2 needs a multiple of 4, its chips",
        ),
    ],
)
def test_mistakes_are_answered_in_words(main: Main, options: tuple[str, ...], said: str) -> None:
    ran = main("fit", "--benchmark", "mnist", *options)
    assert ran.returncode == 2
    assert said in ran.stderr


def test_without_libtpu_it_says_what_to_run(checkout: Path, main: Main) -> None:
    (checkout / ".venv").unlink()
    (checkout / ".venv").mkdir()
    ran = main("fit", "--benchmark", "mnist", "--device", "tpu:v5e")
    assert ran.returncode == 2
    assert "no interpreter with libtpu" in ran.stderr
    assert "make tpu-env" in ran.stderr


def test_a_try_is_where_the_plans_of_an_accelerator_expect_the_largest(tmp_path: Path) -> None:
    run = Run(tmp_path / "runs" / "jax_mnist_1-x")
    run.create(Job("jax", "mnist", TRAIN, FIT, "fp32", None, "local", batch_sizes=(32,)).rows())
    plans = {32: 1320, 64: 1640}
    assert growing._expected(run, plans) == 0, "the device is not known"
    for kind, memory, expected in (("gpu", 11_000, 1000), ("cpu", 11_000, 0), ("tpu", None, 0)):
        run.environment.write_text(json.dumps({"device": {"kind": kind, "memory_bytes": memory}}))
        assert growing._expected(run, plans) == expected


def test_the_largest_batch_that_fits_both_sides_can_be_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tried(framework: str, size: int, status: str = "finished", **change: Any) -> Row:
        job = Job(framework, "mnist", TRAIN, FIT, "fp32", None, "local", batch_sizes=(size,), size="full")
        return job.rows()[0].replace(status=status, **change)

    rows = [tried("jax", 512), tried("jax", 640), tried("jax", 700, "failed"), tried("jax", 900, target="other")]
    rows.append(tried("jax", 800, run_id="before", started="2026-11-01T00:00:00Z"))  # before the device had changed
    rows[:2] = [row.replace(run_id="after", started=f"2026-11-02T00:00:0{n}Z") for n, row in enumerate(rows[:2])]
    monkeypatch.setattr(plan, "merge", lambda results: rows)
    args = Namespace(size=None, preset="standard", precision="fp32", products=(), batch_sizes=(0, 8), device=None)

    def most(use_case: int, frameworks: list[str]) -> int:
        return plan._largest(args, "mnist", use_case, "local", frameworks, Results(tmp_path))

    assert most(TRAIN, ["jax"]) == most(TRAIN_MANY, ["jax"]) == 640
    command = "python main.py fit --benchmark mnist --use_case 1 --size full --precision fp32 --target local"
    with pytest.raises(UserError, match=f"--batch_sizes max: not known for pytorch; '{command}' finds it"):
        most(TRAIN, [PAIRED])
    rows.append(tried("pytorch", 300, device_kind="cpu"))
    rows.append(tried("pytorch", 5000, device_kind="gpu"))
    args.device = "cpu"
    rows = [row.replace(device_kind="cpu") if row.framework == "jax" else row for row in rows]
    assert most(TRAIN, [PAIRED]) == 300
    assert most(TRAIN, ["jax"]) == 640
    args.device = None
    rows.append(tried("jax", 64, use_case=PER_SAMPLE, product="clipped_sum"))
    with pytest.raises(UserError, match=r"for jax \(materialised\); .*--products materialised --target local' finds"):
        most(PER_SAMPLE, ["jax"])
    rows.append(tried("jax", 16, use_case=PER_SAMPLE, product="materialised"))
    args.products = ("clipped_sum", "materialised")
    assert most(PER_SAMPLE_MANY, ["jax"]) == 16


LIMITED = """
default: here
targets:
  here:
    scheduler: local
    python: {jax: .venv/jax/bin/python, pytorch: .venv/pytorch/bin/python}
    device: cpu
    setup: {task: [ulimit -v 5500000]}
"""


def test_the_largest_batch_is_found_by_trying(main: Main, checkout: Path) -> None:
    """With the memory of a process limited: batches that do not fit are answers.

    JAX's kernels on a CPU do not say that memory ran out, so its answer is a lower bound.
    """
    (checkout / "cluster.yaml").write_text(LIMITED)
    ran = main("fit", "--benchmark", "cifar10", "--size", "full", "--batch_sizes", "512", timeout=1800)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows = rows_of(checkout)
    for framework in FRAMEWORKS:
        mine = {int(row["batch_size"]): row for row in rows if row["framework"] == framework}
        fits = [size for size, row in mine.items() if row["status"] == "finished"]
        others = [size for size, row in mine.items() if row["status"] == "failed"]
        assert fits, ran.stdout
        assert others, ran.stdout
        assert max(fits) < min(others)
        told = {mine[size]["why"] for size in others} <= {"out of memory", "killed"}
        assert told or framework == "jax"
        assert not told or min(others) <= max(fits) * 9 / 8 + 1
        assert f"{framework} fits {'' if told else 'at least '}{max(fits)}" in ran.stdout


def test_a_product_that_is_asked_for_replaces_the_usual_one() -> None:
    parser = Parser(prog="fit")
    fit_command.options(parser)
    for words, products in (([], ["clipped_sum"]), (["--products", "norms"], ["norms"])):
        args = parser.parse_args(["--device", "tpu:v5e", "--benchmark", "mnist", "--use_case", "3", *words])
        assert [cell.product for cell in fit_command._cells(args)] == products
        assert fit_command._variant(args, 3)["products"] == tuple(products)
