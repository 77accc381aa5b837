"""A report of what is still measured, or damaged, or opened where nothing can be drawn: the rest of it is there."""

import argparse
import json
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from playwright.sync_api import Browser
from test_comparability import alike, judged
from test_learned import row
from test_report import lines, point, publish, results, written

from duel import table
from duel.cli import commands
from duel.errors import UserError
from duel.launch import state
from duel.report import records, training_table
from duel.results import Results, Run
from duel.table import write_rows

__all__ = ["results"]  # the fixture


def test_a_live_report_is_written_again_until_all_runs_have_ended(
    results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "evidence", lambda row, results: alike(row))
    write_rows(results.csv, judged(point(1.5)))
    page, slept = results.folder / "report" / "index.html", list[float]()
    ends = iter([False, False, True])

    def after(seconds: float) -> None:
        slept.append(seconds)
        assert 'http-equiv="refresh" content="30"' in page.read_text()

    monkeypatch.setattr(state, "look", lambda results: SimpleNamespace(runs=[SimpleNamespace(ended=next(ends))]))
    monkeypatch.setattr(commands.time, "sleep", after)
    assert commands.report(argparse.Namespace(name=[], against=None, live=True), results) == 0
    assert slept == [30, 30]
    assert 'http-equiv="refresh"' not in page.read_text()


def live(results: Results, monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], object]) -> int:
    """Follow a run that ends once ``meanwhile`` has been called."""
    ends = iter([False, True])
    monkeypatch.setattr(state, "look", lambda results: SimpleNamespace(runs=[SimpleNamespace(ended=next(ends))]))
    monkeypatch.setattr(commands.time, "sleep", lambda seconds: meanwhile())
    return commands.report(argparse.Namespace(name=[], against=None, live=True), results)


def test_a_live_report_has_trainings_as_soon_as_they_have_a_curve(
    results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = row("jax", 0, 0.5, mode="default", device_name="planted")
    write_rows(results.csv, [one])
    page = results.folder / "report" / "index.html"
    with pytest.raises(UserError, match="nothing to report"):
        live(results, monkeypatch, lambda: None)
    assert not page.exists()
    file = Run(results.folder / "runs" / str(one.run_id)).curve_file(one)
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps([{"number": 0, "step": 0, "held_out_loss": 2.3, "top1": 0.1, "seconds": 0.0}]))
    monkeypatch.setattr(records, "merge", lambda results: [one])
    seen: list[bool] = []
    assert live(results, monkeypatch, lambda: seen.append(page.exists())) == 0
    assert seen == [True]


def test_a_live_report_has_the_losses_as_they_come(results: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "evidence", lambda row, results: alike(row))
    rows = judged(point(1.5))
    write_rows(results.csv, rows)
    monkeypatch.setattr(records, "merge", lambda results: rows)
    metrics = results.folder / "runs" / str(rows[0].run_id) / "metrics.jsonl"
    metrics.parent.mkdir(parents=True)
    blocks = [json.dumps({"event": "block", "row": 0, "step": step, "loss": 0.5}) + "\n" for step in (10, 20)]
    metrics.write_text(blocks[0])
    assert live(results, monkeypatch, lambda: metrics.write_text("".join(blocks))) == 0
    steps = {line["step"] for line in lines(results.folder / "report", "training") if line["framework"] == "jax"}
    assert steps == {"10", "20"}


@pytest.mark.parametrize("scripts", [True, False])
def test_where_no_figure_can_be_drawn_the_page_leads_to_the_files(
    results: Results, browser: Browser, scripts: bool
) -> None:
    folder = written(results, publish(results, point(1.5)))
    shown = browser.new_page(java_script_enabled=scripts)
    shown.add_init_script("delete window.DecompressionStream")
    shown.goto((folder / "index.html").as_uri())
    shown.locator("#undrawn" if scripts else "noscript p").wait_for(state="visible", timeout=10_000)
    assert shown.locator("a[href='figures/ratios.svg']").is_visible()
    shown.close()


def test_the_page_says_nothing_of_that_where_figures_are_drawn(results: Results, browser: Browser) -> None:
    folder = written(results, publish(results, point(1.5)))
    shown = browser.new_page()
    shown.goto((folder / "index.html").as_uri())
    shown.wait_for_function("document.body.dataset.drawn", timeout=60_000)
    assert not shown.locator("#undrawn").is_visible()
    shown.close()


def test_a_time_that_is_none_is_reported_and_takes_no_time(
    results: Results, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = point(1.5)
    rows[0] = rows[0].replace(started="yesterday")
    rows[1] = rows[1].replace(ended="2026-11-22T00:00:19")  # without a time zone
    folder = written(results, publish(results, rows))
    said = capsys.readouterr().err
    assert f"{rows[0].run_id}, row 0: damaged: it started 'yesterday' and ended" in said
    assert f"{rows[1].run_id}, row 1: damaged: " in said
    assert "12 rows" in (folder / "report.md").read_text()


@pytest.mark.parametrize("text", ["{", "[1]", '{"row": "first"}', '{"row": 0, "blocks": {"step": 3}}'])
def test_samples_that_are_damaged_are_named_and_others_are_drawn(
    results: Results, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    rows = point(1.5)
    found = publish(results, rows)
    samples = found.folder / "runs" / str(rows[0].run_id) / "samples.jsonl"
    samples.parent.mkdir(parents=True)
    whole = {"row": 1, "calls": {"seconds": [0.1]}, "blocks": {"step": [10, None, 20], "loss": [0.5, 0.5, None]}}
    samples.write_text(f"{text}\n{json.dumps(whole)}\n")
    folder = written(results, found)
    assert f"{rows[0].run_id}/samples.jsonl, line 1: " in capsys.readouterr().err
    (line,) = lines(folder, "training")
    assert (line["framework"], line["step"], line["loss"]) == ("pytorch", "10", "0.5")


@pytest.mark.parametrize("text", ["{", "[]", '{"cpu": "EPYC"}', '{"usable_cpus": 2}'])
def test_an_environment_that_is_damaged_is_named_and_the_next_one_counts(
    results: Results, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    rows = point(1.5)
    found = publish(results, rows)
    whole = json.dumps({"cpu": {"model": "EPYC"}, "usable_cpus": [0, 1], "platform": "Linux"})
    for run_id, stored in zip(dict.fromkeys(str(one.run_id) for one in rows), (text, whole), strict=False):
        file = found.folder / "runs" / run_id / "environment.json"
        file.parent.mkdir(parents=True)
        file.write_text(stored)
    folder = written(results, found)
    assert f"{rows[0].run_id}: environment.json is damaged" in capsys.readouterr().err
    assert "planted, EPYC CPU, 2 CPUs used; Linux." in (folder / "report.md").read_text()


def test_a_training_that_does_not_say_its_epochs_is_named() -> None:
    damaged = row("jax", 0, 0.9, trained_epochs=None)
    shown = training_table.table([damaged, row("pytorch", 0, 0.9)])
    assert "damaged: jax, row 0 does not say how many epochs it trained" in shown.notes
    assert ["epochs", "", "2"] in [list(line) for line in shown.lines]
