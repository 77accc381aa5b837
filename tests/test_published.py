"""What is published: pairs that a ratio may be made of, with every sample, and a table made of them alone."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
from conftest import ROOT
from test_comparability import alike, judged, sides

from duel import certificate, table
from duel.catalogue import BENCHMARKS
from duel.comparability import COMPARABLE
from duel.errors import UserError
from duel.record import Row
from duel.report import published
from duel.report.pairs import outcomes
from duel.results import Results
from duel.table import read_rows, write_rows

README = f"# Some page\n\n{published.BEGIN}\nold\n{published.END}\n\nmore\n"
NAMES = {"device_name": "some processor", "device_kind": "cpu", "git_sha": "0" * 40, "git_dirty": False, "pair": "p1"}
NAMES |= {"code_sha256": "c" * 64}
CERTIFICATE = {"format": certificate.FORMAT, "code_sha256": "c" * 64, "weights_sha256": ["a" * 64], "passed": True}
CERTIFICATE |= {"versions": {"jax": {}, "pytorch": {}}, "precisions": ["fp32"], "failures": []}


def rows(ratios: list[float], **change: object) -> list[Row]:
    named = [dataclasses.replace(row, **NAMES) for row in sides(ratios)]
    return judged([dataclasses.replace(row, started="2026-11-22T02:00:00Z", **change) for row in named])


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Results:
    monkeypatch.setattr(table, "evidence", lambda row, results: alike(row))
    found = Results(tmp_path / "results")
    for folder in ("runs", "parity"):
        (found.folder / folder).mkdir(parents=True)
    (found.folder / "parity" / "mnist-full-cpu.json").write_text(json.dumps(CERTIFICATE))
    (tmp_path / "README.md").write_text(README)
    return found


def publish(results: Results, *measured: list[Row], name: str = "cpu") -> list[str]:
    said: list[str] = []
    write_rows(results.csv, [row for some in measured for row in some])
    published.publish(name, results, results.folder.parent / "README.md", said.append)
    return said


def test_the_rows_their_samples_and_certificates_are_kept_and_the_table_is_made_of_them(results: Results) -> None:
    measured = rows([1.50, 1.52, 1.49, 1.51])
    run = results.run(str(measured[0].run_id))
    run.create(measured)
    events = [
        {"event": "loss", "row": 0, "loss": 1.0},
        {"event": "calls", "row": 0, "time": 1.0, "seconds": [0.1]},
        {"event": "block", "row": 0, "step_seconds": 0.01},
        {"event": "block", "row": 0, "step_seconds": 0.02, "throttles": ["hot"]},
    ]
    run.metrics.write_text("".join(json.dumps(event) + "\n" for event in events))
    said = publish(results, measured)
    folder = results.folder / "published" / "cpu"
    assert said == ["results/published/cpu: 8 rows, 8 of them new"]
    kept = read_rows(folder / "results.csv")
    assert {row.comparable for row in kept} == {COMPARABLE}
    assert [row.throughput for row in kept] == [row.throughput for row in measured]
    first, second, *_ = (folder / "samples" / "paired_mnist_1-a.jsonl").read_text().splitlines()
    blocks = {"step_seconds": [0.01, 0.02], "throttles": [None, ["hot"]]}
    assert json.loads(first) == {"row": 0, "calls": {"seconds": [0.1]}, "blocks": blocks}
    assert json.loads(second) == {"row": 1, "blocks": {}}
    assert json.loads((folder / "parity" / "mnist-full-cpu.json").read_text()) == CERTIFICATE
    text = (results.folder.parent / "README.md").read_text()
    assert text.startswith("# Some page\n")
    assert text.endswith("\n\nmore\n")
    assert "old" not in text
    assert "some processor (cpu, " in text
    assert re.search(r"\| mnist \(full, fp32\) \| train_single \| 64 \| 1\.505 \[1\.4.*\] JAX \|", text)
    text = (folder / "README.md").read_text()
    assert re.search(
        r"\| mnist \(full, fp32\) \| train_single \| 64 \| default \| 150\.5 .* \| 100 .* \| 1\.505 \[1\.4.*4 pairs \|",
        text,
    )
    assert "| JAX is faster |" in text


def test_a_pair_that_is_not_comparable_is_published_without_a_ratio_and_with_the_reason(results: Results) -> None:
    measured = rows([1.5] * 4)
    measured[1] = dataclasses.replace(measured[1], weights_sha256="c" * 64)
    (results.folder / "parity" / "mnist-full-cpu.json").unlink()  # nobody has proved anything
    publish(results, judged(measured))
    assert "| not comparable |" in (results.folder.parent / "README.md").read_text()
    text = (results.folder / "published" / "cpu" / "README.md").read_text()
    assert "| - | - | NOT COMPARABLE: weights_sha256 (" in text


def test_modes_stand_beside_each_other_in_readme(results: Results) -> None:
    tuned = rows([0.9, 1.1, 0.9, 1.1], pair="p2", mode="tuned", group="other", run_id="paired_mnist_1-b")
    publish(results, rows([1.50, 1.52, 1.49, 1.51]), tuned)
    text = (results.folder.parent / "README.md").read_text()
    assert "| benchmark | use case | batch | default | tuned |" in text
    assert re.search(r"\| 64 \| 1\.505 \[.*\] JAX \| 0\.995 \[.*\] no difference shown \|", text)


def test_what_was_measured_again_takes_the_place_of_what_was_there(results: Results) -> None:
    publish(results, rows([1.5] * 4))
    other = rows([1.2] * 4, pair="p2", use_case=5, group="other", run_id="paired_mnist_5-a")
    again = rows([1.1, 1.12, 1.1, 1.11], group="again", run_id="paired_mnist_1-b")
    assert publish(results, other, again)[-1].endswith("16 rows, 16 of them new")
    kept = read_rows(results.folder / "published" / "cpu" / "results.csv")
    assert {row.run_id for row in kept} == {"paired_mnist_1-b", "paired_mnist_5-a"}


def test_what_others_disturbed_is_published_beside_what_was_measured_instead(results: Results) -> None:
    measured = rows([1.5] * 4)
    instead = dataclasses.replace(measured[0], row=8)
    measured[0] = dataclasses.replace(measured[0], foreign_load=0.3, comparable=None)
    assert publish(results, [*measured, instead])[-1].endswith("9 rows, 9 of them new")
    kept = read_rows(results.folder / "published" / "cpu" / "results.csv")
    assert [row.comparable for row in kept] == [None, *[COMPARABLE] * 8]
    (found,) = outcomes(kept)
    assert found.found is not None


def test_a_ratio_stands_on_the_certificate_beside_it(results: Results) -> None:
    """Code and proof may have changed since it was measured."""
    publish(results, rows([1.5] * 4))
    file = results.folder / "parity" / "mnist-full-cpu.json"
    file.write_text(json.dumps(CERTIFICATE | {"code_sha256": "d" * 64}))
    newer = rows([1.2] * 4, pair="p2", use_case=5, group="other", run_id="paired_mnist_5-a", code_sha256="d" * 64)
    with pytest.raises(UserError, match=r"paired_mnist_1-a, which is published there, is of other code, "):
        publish(results, newer)
    (published_file,) = (results.folder / "published" / "cpu" / "parity").iterdir()
    assert json.loads(published_file.read_text()) == CERTIFICATE
    with pytest.raises(UserError, match="nothing to publish"):
        publish(results, rows([1.5] * 4), name="other")


def test_a_folder_is_of_one_device(results: Results) -> None:
    publish(results, rows([1.5] * 4))
    other = rows([1.2] * 4, pair="p2", group="other", run_id="paired_mnist_1-b", device_name="another")
    more = rows([1.3] * 4, pair="p3", group="more", run_id="paired_mnist_1-c")
    said = publish(results, other, more)
    words = "measured on another, the folder is of some processor: another --name is valid"
    assert said == [f"left out: paired_mnist_1-b: {words}", "results/published/cpu: 16 rows, 8 of them new"]


@pytest.mark.parametrize(
    ("ratios", "change", "words"),
    [
        ([1.5], {"preset": "smoke"}, "1 pairs of preset smoke: --paired with standard, publication is valid"),
        ([1.5] * 4, {"git_dirty": True}, "the code that ran was no commit"),
    ],
)
def test_what_claims_nothing_is_left_out_with_its_reason(
    results: Results, ratios: list[float], change: dict[str, object], words: str
) -> None:
    write_rows(results.csv, rows(ratios, **change))
    said: list[str] = []
    with pytest.raises(UserError, match="nothing to publish"):
        published.publish("cpu", results, results.folder.parent / "README.md", said.append)
    assert said == [f"left out: paired_mnist_1-a: {words}"]


def test_bad_names_and_pages_without_marks_are_refused(results: Results) -> None:
    for name in ("../cpu", "CPU", "", "a b"):
        with pytest.raises(UserError, match="small letters, digits"):
            published.publish(name, results, results.folder.parent / "README.md", print)
    (results.folder.parent / "README.md").write_text("no marks")
    with pytest.raises(UserError, match="the marks <!-- results -->"):
        publish(results, rows([1.5] * 4))


def test_the_tables_are_of_the_published_records() -> None:
    """Of the repository itself: nobody has edited them by hand."""
    text = (ROOT / "README.md").read_text()
    results = Results(ROOT / "results")
    assert text.partition(published.BEGIN + "\n")[2].partition(published.END)[0] == published.summaries(results)
    for file in sorted((ROOT / "results" / "published").glob("*/results.csv")):
        assert (file.parent / "README.md").read_text() == f"# {file.parent.name}\n\n{published.table(read_rows(file))}"
        for outcome in outcomes(read_rows(file)):
            assert outcome.pairs[0][0].benchmark in BENCHMARKS
            sides = [row for pair in outcome.pairs for row in pair]
            assert outcome.found is None or {certificate.verdict(row, file.parent) for row in sides} == {"verified"}
