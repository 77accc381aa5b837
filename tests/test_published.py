"""What is published: pairs that a ratio may be made of, with every sample, and a table made of them alone."""

import dataclasses
import hashlib
import json
import math
import re
from pathlib import Path

import pytest
from conftest import ROOT
from golden import regenerate
from test_comparability import alike, judged
from test_pairs import sides
from test_report import point

from duel import certificate, files, table
from duel.catalogue import BENCHMARKS
from duel.comparability import COMPARABLE
from duel.errors import UserError
from duel.record import Row
from duel.report import appendix, figure_data, markdown, points, prose, published, records
from duel.report.figure_data import label
from duel.report.pairs import outcomes
from duel.report.sessions import over_sessions
from duel.results import Results, Run
from duel.states import FINISHED, RUNNING
from duel.table import read_rows, write_rows

NAMES = {"device_name": "some processor", "device_kind": "cpu", "git_sha": "0" * 40, "git_dirty": False, "pair": "p1"}
NAMES |= {"code_sha256": "c" * 64, "cpus": 2, "target": "local"}
CERTIFICATE = {"format": certificate.FORMAT, "code_sha256": "c" * 64, "weights_sha256": ["a" * 64], "passed": True}
CERTIFICATE |= {"versions": {"jax": {}, "pytorch": {}}, "precisions": ["fp32"], "failures": []}


def rows(ratios: list[float], **change: object) -> list[Row]:
    named = [dataclasses.replace(row, **NAMES) for row in sides(ratios)]
    times = {"started": "2026-11-22T02:00:00Z", "ended": "2026-11-22T02:01:00Z"}
    return judged([dataclasses.replace(row, **times | change) for row in named])


def sessions(means: list[float], **change: object) -> list[list[Row]]:
    """Of one point, three hours apart, each of four pairs."""
    found = []
    for number, mean in enumerate(means):
        names = {"group": f"g{number}", "run_id": f"paired_mnist_1-{number}"}
        names |= {name: f"2026-11-22T{3 * number:02d}:0{minute}:00Z" for name, minute in (("started", 0), ("ended", 1))}
        found.append(rows([mean, 1.01 * mean, mean, 1.01 * mean], **names | change))
    return found


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Results:
    monkeypatch.setattr(table, "evidence", lambda row, results: alike(row))
    found = Results(tmp_path / "results")
    for folder in ("runs", "parity"):
        (found.folder / folder).mkdir(parents=True)
    (found.folder / "parity" / "mnist-full-cpu.json").write_text(json.dumps(CERTIFICATE))
    return found


def ended(run: Run, rows: list[Row]) -> None:
    """Write the rows of a run that has ended into its folder."""
    for row in rows:
        run.write_row(row)
    run.write_status(state=FINISHED)


def publish(results: Results, *measured: list[Row], name: str = "cpu") -> list[str]:
    said: list[str] = []
    write_rows(results.csv, [row for some in measured for row in some])
    published.publish(name, results, said.append)
    return said


def test_the_rows_their_samples_and_certificates_are_kept_and_the_table_is_made_of_them(results: Results) -> None:
    measured = sessions([1.50, 1.52, 1.49])
    run = results.run(str(measured[0][0].run_id))
    run.create(measured[0], script=f"cd -- '/home/a b/duel' || exit 97\ncd {ROOT}\n")
    ended(run, measured[0])
    run.write_status(state=RUNNING)
    said: list[str] = []
    with pytest.raises(UserError, match="nothing to publish"):
        published.publish("cpu", results, said.append)
    assert said == [f"left out: {run.id}: not all of its runs have ended"]
    run.write_status(state=FINISHED)
    environment = {"interpreter": f"{ROOT}/py", "path": "/home/a b/duel/lib"}
    (run.folder / "environment.json").write_text(json.dumps(environment))
    events = [
        {"event": "loss", "row": 0, "loss": 1.0},
        {"event": "calls", "row": 0, "time": 1.0, "seconds": [0.1]},
        {"event": "block", "row": 0, "step_seconds": 0.01},
        {"event": "block", "row": 0, "step_seconds": 0.02, "throttles": ["hot"]},
    ]
    run.metrics.write_text("".join(json.dumps(event) + "\n" for event in events))
    assert publish(results, *measured) == ["results/published/cpu: 24 rows, 24 of them new"]
    folder = results.folder / "published" / "cpu"
    kept = read_rows(folder / "results.csv")
    assert {row.comparable for row in kept} == {COMPARABLE}
    assert [row.throughput for row in kept] == [row.throughput for session in measured for row in session]
    first, second, *_ = (folder / "runs" / run.id / "samples.jsonl").read_text().splitlines()
    blocks = {"step_seconds": [0.01, 0.02], "throttles": [None, ["hot"]]}
    assert json.loads(first) == {"row": 0, "calls": {"seconds": [0.1]}, "blocks": blocks}
    assert json.loads(second) == {"row": 1, "blocks": {}}
    assert (folder / "runs" / run.id / "script.sh").read_text() == "cd -- '.' || exit 97\ncd .\n"
    assert (folder / "runs" / run.id / "environment.json").read_text() == '{"interpreter": "./py", "path": "./lib"}'
    assert json.loads((folder / "parity" / "mnist-full-cpu.json").read_text()) == CERTIFICATE
    text = published.summaries(results)
    assert "some processor (cpu, 2 CPUs)" in text
    assert re.search(r"\| mnist \(full, fp32\) \| train_single \| 64 \| 1\.511 \[1\.4.*\] JAX \|", text)
    text = (folder / "README.md").read_text()
    row = r"\| mnist \(full, fp32\) \| train_single \| 64 \| default \| 151.* \| 100 .* \| 1\.511 \[1\.4.*\], 12 pairs"
    assert re.search(row + r", over 3 sessions \| 1\.4.* to 1\.5.* \| 1\.0.* \| JAX is faster \|", text)


def test_a_pair_that_is_not_comparable_is_published_without_a_ratio_and_with_the_reason(results: Results) -> None:
    measured = rows([1.5] * 4)
    measured[1] = dataclasses.replace(measured[1], weights_sha256="c" * 64)
    (results.folder / "parity" / "mnist-full-cpu.json").unlink()  # nobody has proved anything
    publish(results, judged(measured))
    assert "| not comparable |" in published.summaries(results)
    text = (results.folder / "published" / "cpu" / "README.md").read_text()
    assert r"| - | - | - | NOT COMPARABLE: weights_sha256 (aaaaaaaaaaaa \| cccccccccccc) |" in text


def test_modes_stand_beside_each_other_in_readme_and_one_session_is_called_so(results: Results) -> None:
    tuned = rows([0.9, 1.1, 0.9, 1.1], pair="p2", mode="tuned", group="other", run_id="paired_mnist_1-b")
    publish(results, *sessions([1.50, 1.52, 1.49]), tuned)
    text = published.summaries(results)
    assert "| benchmark | use case | batch | default | tuned |" in text
    assert re.search(r"\| 64 \| 1\.511 \[.*\] JAX \| 0\.995 \[.*\] within this session \|", text)
    page = (results.folder / "published" / "cpu" / "README.md").read_text()
    assert re.search(r"\| tuned \| .* \| no verdict within this session \|", page)


def test_what_is_published_again_is_added_and_nothing_is_taken_out(results: Results) -> None:
    first, *others = sessions([1.5, 1.1, 1.3])
    publish(results, first)
    assert publish(results, first, *others)[-1].endswith("24 rows, 16 of them new")
    folder = results.folder / "published" / "cpu"
    (line,) = points.read(folder / "ratios.csv")
    assert (line.sessions, line.pairs, line.interval) == (3, 12, "over 3 sessions")
    with pytest.raises(UserError, match="all that qualify are already there"):
        publish(results, first, *others)


def test_tables_that_a_killed_publish_left_are_remade_by_the_next(results: Results) -> None:
    first, *others = sessions([1.5, 1.1, 1.3])
    publish(results, first)
    folder = results.folder / "published" / "cpu"
    stale = {name: (folder / name).read_text() for name in ("README.md", points.NAME)}
    publish(results, first, *others)
    whole = {name: (folder / name).read_text() for name in stale}
    for name, text in stale.items():  # as after a kill between the rows and the tables
        (folder / name).write_text(text)
    with pytest.raises(UserError, match="all that qualify are already there"):
        publish(results, first, *others)
    assert {name: (folder / name).read_text() for name in stale} == whole != stale


def test_two_that_publish_at_once_wait_for_each_other(results: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    first, *others = sessions([1.5, 1.1, 1.3])
    write_rows(results.csv, [row for some in (first, *others) for row in some])

    seen = []

    def write(path: Path, rows: list[Row]) -> None:
        with files.locked(results.folder / "published" / ".cpu.lock", wait=False) as held:
            seen.append(held)
        write_rows(path, rows)

    monkeypatch.setattr(published, "write_rows", write)
    published.publish("cpu", results, print)
    assert seen == [None], "another one would read rows that are about to be replaced"
    with files.locked(results.folder / "published" / ".cpu.lock", wait=False) as held:
        assert held is not None


def test_a_point_of_a_run_may_be_published_later_than_another(results: Results) -> None:
    first, later = rows([1.5] * 4), rows([1.2] * 4, point=1, pair="p2", batch_size=128)
    later = [dataclasses.replace(row, row=8 + (row.row or 0)) for row in later]
    run = results.run(str(first[0].run_id))
    run.create([*first, *later])
    run.metrics.write_text(json.dumps({"event": "block", "row": 0, "step_seconds": 0.01}) + "\n")
    changed = [dataclasses.replace(row, git_dirty=True) for row in later]
    ended(run, [*first, *changed])
    publish(results, first, changed)
    ended(run, later)
    assert publish(results, first, later)[-1].endswith("16 rows, 8 of them new")
    samples = results.folder / "published" / "cpu" / "runs" / run.id / "samples.jsonl"
    assert [json.loads(line)["row"] for line in samples.read_text().splitlines()] == list(range(16))


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
    with pytest.raises(UserError, match=r"paired_mnist_1-a, already published there, has other code, "):
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
    words = "measured on another, but the set is of some processor: choose another --name"
    assert said == [f"left out: paired_mnist_1-b: {words}", "results/published/cpu: 16 rows, 8 of them new"]


@pytest.mark.parametrize(
    ("ratios", "change", "words"),
    [
        ([1.5], {"preset": "smoke"}, "preset smoke, in turn: --paired and preset standard or publication are needed"),
        ([1.5] * 4, {"git_dirty": True}, "the code that ran was not committed"),
        ([1.5] * 4, {"script": "edited by hand"}, "its script was edited by hand"),
    ],
)
def test_what_claims_nothing_is_left_out_with_its_reason(
    results: Results, ratios: list[float], change: dict[str, object], words: str
) -> None:
    write_rows(results.csv, rows(ratios, **change))
    said: list[str] = []
    with pytest.raises(UserError, match="nothing to publish"):
        published.publish("cpu", results, said.append)
    assert said == [f"left out: paired_mnist_1-a: {words}"]


def test_bad_names_are_refused(results: Results) -> None:
    for name in ("../cpu", "CPU", "", "a b"):
        with pytest.raises(UserError, match="lower-case letters, digits"):
            published.publish(name, results, print)


def test_the_tables_are_of_the_published_records() -> None:
    """Of the repository itself: nobody has edited them by hand."""
    shown = (ROOT / "README.md").read_text().partition("<!-- results -->\n")[2].partition("<!-- /results -->")[0]
    assert shown == published.summaries(Results(ROOT / "results")), regenerate.REMEDY
    for file in sorted((ROOT / "results" / "published").glob("*/results.csv")):
        found = over_sessions(outcomes(read_rows(file)))
        assert points.read(file.parent / points.NAME) == points.lines(found)
        assert (file.parent / "README.md").read_text() == published.page(file.parent)
        (described,) = json.loads((file.parent / "report" / "croissant.json").read_text())["distribution"]
        assert described["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest(), regenerate.REMEDY
        assert (file.parent / "report" / "index.html").stat().st_size < 1.5e6
        figure = file.parent / "ratios.svg"
        assert figure.exists() == any(line.ratio is not None for line in points.lines(found))
        drawn = figure.read_text() if figure.exists() else ""
        for modes in markdown.leading(points.lines(found))[: markdown.FIRST_POINTS]:
            line = next(iter(modes.values()))
            assert line.ratio is None or f">{label(line)}<" in drawn, regenerate.REMEDY
        for outcome in found:
            assert outcome.row.benchmark in BENCHMARKS
            sides = [row for pair in outcome.pairs for row in pair]
            assert outcome.found is None or {certificate.verdict(row, file.parent) for row in sides} == {"verified"}


def test_an_archived_run_is_published_once_its_folder_is_restored(results: Results) -> None:
    measured = rows([1.5] * 4)
    run = results.run(str(measured[0].run_id))
    (results.folder / "archive").mkdir()
    write_rows(results.folder / "archive" / "a.csv", measured)
    with pytest.raises(UserError, match="nothing to publish"):
        publish(results, measured)
    run.create(measured)
    ended(run, measured)
    assert publish(results, measured)[-1].endswith("8 rows, 8 of them new")


def test_a_set_with_too_few_pairs_for_an_interval_is_named_and_not_drawn(results: Results) -> None:
    publish(results, rows([1.5]))
    text = published.summaries(results)
    assert "has 1 points so far, each measured in too few pairs for a ratio with an interval" in text
    assert "ratios.svg" not in text
    published.draw(results.folder / "published" / "cpu")
    assert not (results.folder / "published" / "cpu" / "ratios.svg").exists()


def test_a_verdict_that_does_not_survive_the_correction_is_no_lead() -> None:
    (line,) = points.lines(over_sessions(outcomes(judged(point(1.5)))))
    starred = dataclasses.replace(line, p_holm=0.2)
    assert (prose._kind(line), prose._kind(starred)) == ("JAX", "undecided")


def test_a_row_on_four_devices_takes_four_device_hours() -> None:
    row = Row(run_id="r", row=0, started="2026-11-22T00:00:00Z", ended="2026-11-22T00:30:00Z", device_count=4)
    assert appendix._hours(row) == pytest.approx(2.0)


def test_the_roof_is_the_higher_one_that_either_side_measured() -> None:
    rows = [row.replace(matmul_flops_per_second=1e12 if row.framework == "jax" else 3e12) for row in point(1.5)]
    (outcome,) = over_sessions(outcomes(judged(rows)))
    found = list(figure_data._roofline(outcome, points.lines([outcome])[0]))
    assert {one["product_flops_per_second"] for one in found} == {3e12}


def test_what_else_the_device_did_is_counted_beside_a_set(results: Results) -> None:
    """Failed measurements and searches cost device-hours, too."""
    failed = [row.replace(status="failed", comparable=None) for row in rows([1.5] * 4, group="f", run_id="failed")]
    trial = [
        row.replace(comparable=None) for row in rows([1.5], group="t", run_id="jax_mnist_1_trials", preset="smoke")
    ]
    waits = [row.replace(started=None, status="queued") for row in rows([1.5], group="w", run_id="waits", pair="w")]
    publish(results, rows([1.5] * 4), failed, trial, waits)
    publish(results, rows([1.5] * 4), trial, rows([1.2] * 4, pair="p2", group="m", run_id="more"))  # failed is gone
    found = records.published(results, "cpu")
    assert len(found.rows) == 16
    text = " ".join(appendix.paragraphs([found]))
    assert "Cost: 0.27 device-hours in 16 rows, all finished; 0.27 hours one after the other." in text
    assert "Outside the set are 0.17 device-hours in 10 rows: 0.13 in 8 that did not finish" in text
    (results.folder / "published" / "cpu" / "outside.csv").write_text("run_id,row\nx,y\n")
    assert records.published(results, "cpu").outside == []


@pytest.mark.parametrize(
    "change", [{"throughput": math.nan}, {"throughput": math.inf}, {"throughput": 0.0}, {"blocks": 1}]
)
def test_what_is_no_figure_is_none_in_a_published_table(results: Results, change: dict[str, float]) -> None:
    bad = rows([1.5] * 4, pair="p2", group="bad", run_id="bad", batch_size=8)
    bad[2] = bad[2].replace(**change)
    publish(results, rows([1.5] * 4), bad)
    folder = results.folder / "published" / "cpu"
    good, line = sorted(points.read(folder / "ratios.csv"), key=lambda line: line.ratio is None)
    assert good.ratio == pytest.approx(1.5)
    assert line.ratio is None
    table = (folder / "README.md").read_text()
    if math.isfinite(change.get("throughput", 1.0)):
        assert line.jax_throughput is None
        assert "jax in bad, row 2" in line.why
    else:  # no row has such a value: it is damaged
        assert line.why == "pair 2 of 4 lacks a row"
    assert line.why in table
    assert not re.search(r"\b(nan|inf|0) images", table)
