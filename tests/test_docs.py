"""The documentation: its links, commands and examples hold, and every key of cluster.yaml is explained."""

import contextlib
import csv
import importlib.metadata
import io
import math
import re
import shlex
import statistics
import subprocess
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks import twins
from conftest import ROOT
from golden import regenerate
from playwright.sync_api import Browser
from pydantic import BaseModel
from ruamel.yaml import YAML
from test_parity import RATE, example

from duel.catalogue import BENCHMARKS, FRAMEWORKS
from duel.cli import main as cli
from duel.job import Job
from duel.launch import cluster, directives, schema, script, study, values
from duel.record import Row
from duel.report.parity import deviations
from duel.results import Results

DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]
SITES = ROOT / "docs" / "another-site.md"
# A fragment of a target in the documentation needs these to be whole; its own come in their place.
TARGET = {"scheduler": "slurm", "python": {"jax": ".venv/jax/bin/python", "pytorch": ".venv/pytorch/bin/python"}}

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def commands(page: Path, word: str) -> list[str]:
    """The command lines of a page that begin with ``word``, from its blocks and from its running text."""
    text = page.read_text()
    blocks = [line.strip() for line in text.splitlines() if line.startswith(("    ", word))]
    inline = re.findall(r"`([^`\n]+)`", text)
    return [line for line in blocks + inline if line.startswith(f"{word} ")]


def test_every_switch_is_in_the_table_of_modes() -> None:
    text = (ROOT / "docs" / "methodology.md").read_text()
    assert regenerate.between(text, "switches", regenerate.switches()) == text, regenerate.REMEDY


def test_the_table_of_what_is_faster_than_the_twins_is_of_its_records() -> None:
    text = (ROOT / "docs" / "models.md").read_text()
    assert regenerate.between(text, "twins", regenerate.twins()) == text, regenerate.REMEDY


def test_each_run_of_twins_stays_until_its_device_has_another_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(twins, "RECORDS", tmp_path / "twins.csv")
    monkeypatch.setattr(importlib.metadata, "version", lambda _package: "0.10.2")

    def kept(device: str, mode: str) -> list[tuple[str, str]]:
        row = Row(framework="jax", batch_size=32, device_name=device)
        point = types.SimpleNamespace(row=row, benchmark=BENCHMARKS["mnist"], tuned=mode)
        found = {"twin, default": ([1.0, 1.1, 1.0], [1.0, 1.0, 1.1]), "flax": "does not run"}
        twins.keep(point, "inference", found)
        with twins.RECORDS.open(newline="") as file:
            lines = list(csv.DictReader(file))
        assert [line["reason"] for line in lines if line["other"] == "flax"] == ["does not run"] * (len(lines) // 2)
        return sorted((line["device"], line["mode"]) for line in lines if line["other"] == "twin, default")

    assert kept("an old CPU", "default") == [("an old CPU", "default")]
    assert kept("an old CPU", "default") == [("an old CPU", "default")] * 2
    assert kept("a new CPU", "tuned") == [("a new CPU", "tuned"), *[("an old CPU", "default")] * 2]
    assert kept("an old CPU", "tuned") == [("a new CPU", "tuned"), ("an old CPU", "tuned")]


def test_from_three_runs_of_twins_on_the_interval_is_over_the_runs() -> None:
    runs = [(1.087, 1.106, 1.126), (0.988, 1.018, 1.049), (1.050, 1.062, 1.074)]
    assert regenerate.over_runs(runs[:2]) == runs[0]
    t = 4.302653  # of two degrees of freedom
    logs = [math.log(ratio) for _, ratio, _ in runs]
    half = t * statistics.stdev(logs) / math.sqrt(3)
    expected = [math.exp(statistics.fmean(logs) + side * half) for side in (-1, 0, 1)]
    assert regenerate.over_runs(runs) == pytest.approx(expected)
    assert expected == pytest.approx([0.958, 1.061, 1.177], abs=1e-3)


def test_a_point_of_twins_beside_which_something_did_not_run_does_not_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regenerate, "ROOT", tmp_path)
    (tmp_path / "benchmarks").mkdir()
    point = "framework,benchmark,work,batch,mode,device,measured,version,other,low,ratio,high,reason\n"
    line = "jax,mnist,inference,32,default,a CPU,2026-12-02,0.10.2,{}\n"
    lines = [line.format('"twin, default",0.9,1.0,1.04,'), line.format("flax,,,,does not run")]
    for most, said in [(1, "On a CPU, 1 of 1 hold the bound."), (2, "On a CPU, 0 of 1 hold the bound.")]:
        (tmp_path / "benchmarks" / "twins.csv").write_text(point + "".join(lines[:most]))
        assert said in regenerate.twins()


def fragments(page: Path) -> list[str]:
    return re.findall(r"^```yaml\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


def explained(page: Path, head: str) -> list[str]:
    """What the first column of the tables with this head names, in backticks."""
    names = []
    for table in re.findall(rf"^\| {head} \|.*\n((?:\|.*\n)+)", page.read_text(), re.MULTILINE):
        for row in table.splitlines()[1:]:
            names += re.findall(r"`([^`]+)`", row.split(" | ")[0])
    return names


def keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every key of the schema, in its place."""
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}"
        for kind in (field.annotation, *typing.get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from keys(kind, "" if kind is schema.Target else f"{prefix}{name}.")


def test_there_are_pages() -> None:
    assert {page.name for page in DOCS} >= {"laptop.md", "gpu-cluster.md", "tpu.md", "another-site.md", "wandb.md"}


@pages
def test_each_link_leads_to_a_file(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if not link.startswith(("https://", "http://", "#")):
            assert (page.parent / link.partition("#")[0]).exists(), link


@pages
def test_each_command_line_is_one_of_main_py_s(page: Path) -> None:
    for line in commands(page, "python main.py"):
        line = line.replace("--benchmark NAME", "--benchmark mnist")
        words = shlex.split(re.sub(r"[\[\]]", "", line), comments=True)[2:]
        said = io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            try:
                cli.parsed(words)
            except SystemExit as end:
                assert end.code == 0, f"{line}: {said.getvalue()}"  # --help


def slugs(page: Path) -> set[str]:
    """What GitHub, and the site, call the headings of a page."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


@pages
def test_each_link_to_a_heading_leads_to_one(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]*#[^)\s]+)\)", page.read_text()):
        file, _, heading = link.partition("#")
        if not file.startswith(("https://", "http://")):
            assert heading in slugs(page.parent / file if file else page), link


def test_there_are_command_lines_to_check() -> None:
    assert all(commands(page, "python main.py") for page in DOCS if page.name not in ("index.md", "api.md"))


@pages
def test_each_target_of_make_is_one_of_the_makefile_s(page: Path) -> None:
    known = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in commands(page, "make"):
        words = [word for word in shlex.split(line, comments=True)[1:] if "=" not in word]
        assert {word for word in words if re.fullmatch("[a-z-]+", word)} <= known, line


def test_every_key_of_cluster_yaml_is_explained_and_no_other() -> None:
    # The set-up lines of a variant have the keys of the target's; other targets' keys are filled in before the schema.
    known = [key for key in keys(schema.Cluster) if not key.startswith(("variants.setup.", "variants.setup_instead."))]
    assert sorted(explained(SITES, "key")) == sorted([*known, "defaults", "like"])
    placeholders = explained(SITES, "placeholder")
    amounts = [f"cpus_per_{each}" for each in values.PER]
    assert sorted(placeholders) == sorted(f"{{{name}}}" for name in (*values.PLACEHOLDERS, *amounts))


STUDIES = ROOT / "docs" / "studies.md"
EXAMPLES = [
    pytest.param(text, id=f"{page.stem} {n}")
    for page in PAGES
    if page != STUDIES
    for n, text in enumerate(fragments(page))
]


@pytest.mark.parametrize("text", EXAMPLES)
def test_each_example_of_cluster_yaml_is_taken_and_makes_scripts(text: str, tmp_path: Path) -> None:
    yaml = YAML()
    given: dict[str, Any] = yaml.load(text)
    whole = given if "targets" in given else {"default": "here", "targets": {"here": TARGET | given}}
    path = tmp_path / "cluster.yaml"
    with open(path, "w") as file:
        yaml.dump(whole, file)
    described = cluster.load(path)
    for name, target in described.targets.items():
        # A site may have a plug-in for containers; every other option is sbatch's own.
        assert all(words.startswith("--container-") for words in directives.warnings(target.directives))
        for framework in FRAMEWORKS:
            if getattr(target.python, framework) is not None:
                job = Job(framework, "resnet50", 1, "standard", "fp32", None, name)
                assert script.render(job, target, Path("/opt/duel"))
        for variant in target.variants:
            changes = (variant.directives, variant.launcher, variant.refuse, variant.setup != schema.Setup())
            assert any(changes)


def test_the_example_of_a_study_can_be_planned(tmp_path: Path) -> None:
    (text,) = fragments(STUDIES)
    (tmp_path / "mine.yaml").write_text(text)
    found = study.load(tmp_path / "mine.yaml", cluster.load(ROOT / "cluster.yaml"), Results(tmp_path / "results"))
    assert {(point.target, point.precision) for point in found.points} == {
        *(("cpu", "fp32"), ("h100", "fp32"), ("h100", "bf16")),
    }


def test_every_key_of_a_study_is_named() -> None:
    keys = list(study.Points.model_fields)
    assert all(f"`{key}`" in STUDIES.read_text() for key in keys)
    assert list(study.Without.model_fields) == keys[:8], "as the page says"


def test_there_are_examples() -> None:
    assert len(EXAMPLES) > 10


def test_the_site_builds_without_a_warning_and_is_searched_from_disk(tmp_path: Path, browser: Browser) -> None:
    command = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "--builder", "html"]
    done = subprocess.run([*command, ROOT / "docs", tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    page = browser.new_page()
    page.goto((tmp_path / "search.html").as_uri() + "?q=prediction+interval")
    page.wait_for_selector("#search-results li a")
    assert "How a number is made" in page.locator("#search-results").inner_text()
    page.goto((tmp_path / "api.html").as_uri())
    assert page.locator("dt[id='duel.report.pairs.Outcome']").count() == 1
    page.close()


def test_the_bounds_of_the_proof_are_those_of_its_table() -> None:
    """By numbers of its own: tests of the proof take the bounds that the code has."""
    found = {deviation.check: deviation.bound for deviation in deviations(example(), example(), RATE)}
    exact = dict.fromkeys(("layers", "loss", "gradients"), 1e-10)
    exact |= dict.fromkeys(("sgd losses", "adamw losses", "sgd after"), 1e-9) | {"adamw after": 1e-6}
    rounded = {"layers": 1e-5, "gradients": 1e-5, "sgd losses": 1e-4, "shifted logits": 1e-2}
    said = {f"float64 {check}": bound for check, bound in exact.items()}
    said |= {f"fp32 {check}": bound for check, bound in rounded.items()}
    assert {check: found.get(check) for check in said} == said
    assert found["bf16 error"] == 2.0
    table = (ROOT / "docs" / "models.md").read_text()
    for check, bound in (("float64 layers", "1e-10"), ("float64 SGD, AdamW", "1e-9"), ("float64 SGD after", "1e-9")):
        assert re.search(rf"^\| {check} \|.*\| {bound} \|$", table, re.M), check
    for check, bound in (("float64 AdamW after", "1e-6"), ("float32 SGD", "1e-4"), ("float32 shifted logits", "1e-2")):
        assert re.search(rf"^\| {check} \|.*\| {bound} \|$", table, re.M), check
