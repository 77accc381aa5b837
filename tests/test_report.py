"""The report: planted records appear in the right figure with the right words, in files that others' programs read."""

import csv
import dataclasses
import hashlib
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from conftest import needs
from playwright.sync_api import Browser, Page
from test_comparability import judged
from test_sessions import session

from duel.errors import UserError
from duel.record import Row
from duel.report import document, latex, markdown, page, points, records
from duel.report.pairs import outcomes
from duel.report.records import Records
from duel.report.sessions import over_sessions
from duel.results import Results
from duel.table import write_rows

HOSTILE = 'a</script><b>&_%\\$#{}~^"é\N{SNOWMAN}'
FULL: dict[str, Any] = {"device_kind": "cpu", "device_name": "planted", "cpus": 2, "target": "local", "nodes": 1}
FULL |= {"device_count": 1, "git_sha": "0" * 40, "git_dirty": False, "weights": "seed 0", "code_sha256": "c" * 64}
MEASURED = {"step_flops": 10**9, "arithmetic_intensity": 20.0, "matmul_flops_per_second": 1e12}
MEASURED |= {"copy_bytes_per_second": 1e10, "peak_memory_bytes": 2**28, "peak_memory_kind": "resident peak"}
MEASURED |= {"forward_seconds": 0.002, "gradient_seconds": 0.008, "step_seconds_p50": 0.01, "joules_per_item": 0.5}


def point(ratio: float, sessions: int = 3, pairs: int = 2, **change: Any) -> list[Row]:
    """Sessions of so many ``pairs``, JAX ``ratio`` times as fast but for a thousandth."""
    rows = []
    for number in range(sessions):
        near = ratio * (1 + 0.001 * (number - 1))
        measured = session([near] * pairs, 2.0 * number, **FULL | MEASURED | change)
        rows += [dataclasses.replace(row, mode=change.get("mode", "default")) for row in measured]
    return rows


def planted() -> list[list[Row]]:
    many = [point(1.2, use_case=5, batch_size=size, pair=f"i{size}", **LATENCY) for size in (1, 8, 32, 128)]
    two = point(0.9, use_case=2, device_count=2, scaling="weak", scaling_efficiency=0.8, pair="two")
    off = point(1.3, pairs=4, pair="off", mode="tuned")
    off[2] = dataclasses.replace(off[2], throughput=10.0)
    broken = point(1.0, 4, benchmark="gcn", pair="nan")
    broken[0] = dataclasses.replace(broken[0], throughput=math.nan)
    return [
        point(1.5),
        point(1.0, benchmark="cifar10", pair="equal"),
        point(0.5, benchmark="resnet50", pair="slow"),
        point(1.1, 1, benchmark="bert", pair="one session"),
        off,
        two,
        broken,
        *many,
    ]


LATENCY = {"latency_seconds_p50": 0.001, "latency_seconds_p95": 0.002, "latency_seconds_p99": 0.003}


@pytest.fixture
def results(tmp_path: Path) -> Results:
    found = Results(tmp_path / "results")
    (found.folder / "runs").mkdir(parents=True)
    return found


def publish(results: Results, *rows: list[Row], name: str = "planted") -> Records:
    folder = results.folder / "published" / name
    folder.mkdir(parents=True)
    write_rows(folder / "results.csv", judged([row for some in rows for row in some]))
    return records.published(results, name)


def written(results: Results, *sets: Records) -> Path:
    folder = results.folder / "report"
    document.write(sets, folder, print)
    return folder


def lines(folder: Path, name: str) -> list[dict[str, str]]:
    with (folder / "figures" / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_planted_records_are_in_the_right_figure_with_the_right_words(results: Results) -> None:
    folder = written(results, publish(results, *planted()))
    said = {(line["point"], line["mode"]): line["verdict"] for line in lines(folder, "ratios")}
    assert said["mnist, batch 64", "default"] == "JAX is faster"
    assert said["cifar10, batch 64", "default"] == "equal within 5 %"
    assert said["resnet50, batch 64", "default"] == "PyTorch is faster"
    assert said["mnist, batch 64", "tuned"].startswith("undecided: one process far off")
    assert ("bert, batch 64", "default") not in said  # two pairs of one session are not enough for an interval
    assert ("gcn, batch 64", "default") in said  # by the sessions whose figures are numbers
    assert {line["batch_size"] for line in lines(folder, "throughput") if line["use_case"] == "inference"} == {
        *("1", "8", "32", "128")
    }
    assert {(line["percentile"], line["milliseconds"]) for line in lines(folder, "latency")} == {
        *(("p50", "1.0"), ("p95", "2.0"), ("p99", "3.0"))
    }
    assert {line["efficiency"] for line in lines(folder, "scaling")} == {"0.8"}
    parts = {line["part"]: float(line["milliseconds"]) for line in lines(folder, "parts")}
    assert parts == pytest.approx({"forward": 2.0, "backward": 6.0, "optimizer": 2.0})
    assert {line["joules_per_item"] for line in lines(folder, "energy")} == {"0.5"}
    assert {line["mebibytes"] for line in lines(folder, "memory")} == {"256.0"}
    assert {float(line["flops_per_second"]) for line in lines(folder, "roofline")} == {1e11}
    assert {line["session"] for line in lines(folder, "ratios")} == {"1", "2", "3"}
    assert float(lines(folder, "itself")[0]["ratio"]) == pytest.approx(1.0)
    assert not (folder / "figures" / "devices.csv").exists()
    text = (folder / "index.html").read_text()
    assert "JAX is faster at" in text
    advice = (folder / "report.md").read_text()
    assert "On planted, for training on one device in mode tuned, neither leads throughout" in advice
    assert "python main.py --benchmark mnist --use_case 1 --paired --mode waterfall" in text  # what has no data


def test_each_figure_is_drawn_and_its_script_draws_it_again(results: Results, tmp_path: Path) -> None:
    folder = written(results, publish(results, *planted()))
    drawn = {path.stem for path in (folder / "figures").glob("*.svg")}
    assert drawn == {path.stem for path in (folder / "figures").glob("*.csv")}
    assert drawn == {
        *("ratios", "itself", "throughput", "latency", "scaling", "start", "parts", "memory", "energy", "roofline")
    }
    before = (folder / "figures" / "ratios.svg").read_bytes()
    assert before.count(b"JAX / PyTorch") >= 1
    assert (folder / "figures" / "ratios.pdf").read_bytes().startswith(b"%PDF")
    (folder / "figures" / "ratios.svg").unlink()
    script = [sys.executable, "figures.py", "ratios"]
    subprocess.run(script, cwd=folder / "figures", check=True, env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)})
    assert (folder / "figures" / "ratios.svg").read_bytes() == before


def test_several_devices_are_one_heat_map_and_nothing_is_averaged_over_them(results: Results) -> None:
    one = publish(results, point(1.5, device_name="one"), name="one")
    other = publish(results, point(0.5, device_name="other"), name="other")
    folder = written(results, one, other)
    assert {(line["device_name"], round(float(line["ratio"]), 2)) for line in lines(folder, "devices")} == {
        *(("one", 1.5), ("other", 0.5))
    }
    assert {line["point"] for line in lines(folder, "devices")} == {"mnist, batch 64"}
    drawn = (folder / "figures" / "ratios.svg").read_text()
    assert "one, training on one device" in drawn, "a panel is of one device"
    assert "other, training on one device" in drawn
    text = (folder / "index.html").read_text()
    assert "one, mode default: of 1 points measured over sessions, JAX is faster at 1." in text
    assert "other, mode default: of 1 points measured over sessions, PyTorch is faster at 1." in text


def opened(browser: Browser, path: Path, width: int, **options: Any) -> tuple[Page, list[str]]:
    """The page once its charts are drawn, and what went wrong or was asked of a network."""
    shown = browser.new_page(viewport={"width": width, "height": 900}, **options)
    wrong: list[str] = []
    shown.on("console", lambda message: wrong.append(message.text))
    shown.on("pageerror", lambda error: wrong.append(str(error)))
    shown.on("request", lambda request: wrong.append(request.url) if request.url != path.as_uri() else None)
    shown.goto(path.as_uri())
    shown.wait_for_function("document.body.dataset.drawn", timeout=60_000)
    return shown, wrong


def test_sessions_of_one_pair_have_no_noise_floor_to_draw(results: Results, browser: Browser) -> None:
    folder = written(results, publish(results, point(1.5, pairs=1)))
    assert {line["floor"] for line in lines(folder, "ratios")} == {""}
    assert opened(browser, folder / "index.html", 1600)[1] == []


@pytest.mark.parametrize(("width", "scheme"), [(1600, "light"), (1600, "dark"), (360, "light"), (360, "dark")])
def test_the_page_opens_from_disk_and_draws_its_charts(
    results: Results, browser: Browser, width: int, scheme: str
) -> None:
    folder = written(results, publish(results, *planted(), point(1.4, benchmark="gpt2", device_name=HOSTILE, pair="h")))
    path = folder / "index.html"
    assert path.stat().st_size < 1_500_000
    shown, wrong = opened(browser, path, width, color_scheme=scheme)
    assert wrong == []
    panels = shown.locator(".panel")
    assert panels.count() == shown.locator(".panel svg").count() > 10
    assert shown.evaluate("document.documentElement.scrollWidth") == width
    right = "texts => texts.map(text => [text.getBoundingClientRect().right, text.textContent])"
    ends = shown.locator(".panel svg text").evaluate_all(right)
    assert [text for end, text in ends if end > width] == [], "cut off"
    symbols = shown.locator(".role-legend-symbol path").evaluate_all("all => all.map(one => one.getAttribute('fill'))")
    assert "currentColor" in symbols
    assert "black" not in symbols
    # A rule for each interval, a point for each point, a tick for each session.
    first = shown.locator("#ratios-0")
    rows = [line for line in lines(folder, "ratios") if line["use_case"] == "training on one device"]
    rows = [line for line in rows if line["device_name"] == "planted"]  # the other device has another panel
    points = {(line["point"], line["mode"]) for line in rows}
    assert first.locator(".mark-symbol.role-mark path").count() == len(points)
    assert first.locator(".mark-rect.role-mark path").count() >= len(rows)  # a tick each, and the noise floors
    assert first.get_attribute("role") == "graphics-document"
    assert "training on one device" in str(first.get_attribute("aria-label"))
    ink = shown.evaluate("getComputedStyle(document.querySelector('#ratios-0 .role-axis-label text')).fill")
    assert ink == ("rgb(27, 27, 27)" if scheme == "light" else "rgb(230, 230, 230)")
    # From a point in a figure to its runs.
    first.locator(".mark-symbol.role-mark path").first.click()
    shown.wait_for_function("location.hash")
    target = shown.evaluate("location.hash")
    assert shown.locator(target).get_attribute("open") is not None
    assert "python main.py --benchmark" in shown.locator(f"{target} pre").inner_text()
    # By keyboard: the next point from there opens by Enter.
    shown.locator(f"{target} summary").focus()
    for _ in range(3):  # a table that is wider than the screen is a stop, too
        shown.keyboard.press("Tab")
        if shown.evaluate("document.activeElement.tagName") == "SUMMARY":
            break
    shown.keyboard.press("Enter")
    assert shown.locator("#points details[open]").count() == 2
    if width == 1600:
        assert shown.pdf().startswith(b"%PDF")
        shown.emulate_media(media="print", color_scheme=scheme)  # type: ignore[arg-type]  # one of its words
        body = "getComputedStyle(document.body)"
        assert shown.evaluate(f"{body}.backgroundColor") == "rgb(255, 255, 255)"
        assert shown.evaluate(f"{body}.color") == "rgb(0, 0, 0)"
        assert not shown.locator("nav").is_visible()
    shown.close()


def test_the_page_is_also_a_deck_of_slides(results: Results, browser: Browser) -> None:
    folder = written(results, publish(results, *planted()))
    shown, wrong = opened(browser, folder / "index.html", 1600)
    shown.locator("#deck").click()
    assert not shown.locator("#points").is_visible()
    heights = shown.locator(".panel").evaluate_all("panels => panels.map(panel => panel.offsetHeight)")
    assert min(heights) >= 900
    sheets = shown.pdf(prefer_css_page_size=True).count(b"/Type /Page\n")
    assert sheets >= len(heights)
    shown.locator("#deck").click()
    assert shown.locator("#points").is_visible()
    assert wrong == []
    shown.close()


def test_a_hostile_name_is_shown_as_it_is(results: Results, browser: Browser) -> None:
    folder = written(results, publish(results, point(1.5, device_name=HOSTILE)))
    shown, wrong = opened(browser, folder / "index.html", 800)
    assert wrong == []
    assert HOSTILE in shown.locator("h1").inner_text()
    shown.close()


def test_the_table_in_latex_escapes_what_tex_would_read() -> None:
    assert latex.escaped("a_b%c\\d{e}") == r"a\_b\%c\textbackslash{}d\{e\}"
    text = latex.escaped(HOSTILE)
    assert not re.search(r"(?<!\\)[_%$#&]", text)
    assert text.encode("latin-1")


def test_latex_compiles_the_table(results: Results, tmp_path: Path) -> None:
    needs([] if shutil.which("pdflatex") else ["pdflatex"], "page-tools")
    folder = written(results, publish(results, *planted(), point(1.4, benchmark="gpt2", device_name=HOSTILE, pair="h")))
    packages = r"\usepackage[T1]{fontenc}\usepackage[latin1]{inputenc}\usepackage{textcomp,booktabs,longtable,siunitx}"
    text = rf"\documentclass{{article}}{packages}\begin{{document}}\input{{ratios.tex}}\end{{document}}"
    (folder / "tables" / "main.tex").write_text(text)
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "main.tex"]
    done = subprocess.run(command, cwd=folder / "tables", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    assert "Output written on main.pdf" in done.stdout
    headings = re.findall(r"\\emph\{(.*)\}\} ", (folder / "tables" / "ratios.tex").read_text())
    assert len(headings) == len(set(headings)) > 1


def test_what_cannot_be_reported_is_refused_and_said(results: Results, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nothing is published as 'none'; valid: none yet"):
        records.published(results, "none")
    with pytest.raises(UserError, match="no records yet"):
        records.measured(results)
    one_sided = publish(results, [row for row in point(1.5) if row.framework == "jax"])
    with pytest.raises(UserError, match="nothing to report: there are only rows of jax"):
        document.write([one_sided], tmp_path / "report", print)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write the report to"):
        document.write([publish(results, point(1.5), name="good")], tmp_path / "file" / "report", print)


def test_sessions_of_other_versions_are_kept_apart_and_said(results: Results) -> None:
    newer = [dataclasses.replace(row, framework_version="9.9") for row in point(0.5)]
    folder = written(results, publish(results, point(1.5), newer))
    assert {round(float(line["ratio"]), 1) for line in lines(folder, "ratios")} == {1.5, 0.5}
    assert "other framework_version of jax" in (folder / "index.html").read_text()
    assert {line["point"] for line in lines(folder, "ratios")} == {
        *("mnist, batch 64, 1 of 2 kept apart", "mnist, batch 64, 2 of 2 kept apart")
    }


def test_calls_that_were_measured_with_two_versions_are_two_lines(results: Results) -> None:
    newer = [dataclasses.replace(row, framework_version="9.9") for row in point(1.5, use_case=5, **LATENCY)]
    folder = written(results, publish(results, point(1.5, use_case=5, **LATENCY), newer))
    assert len({line["id"] for line in lines(folder, "latency")}) == 2
    assert (folder / "figures" / "latency.svg").exists()


def test_means_are_never_over_devices_or_versions() -> None:
    names = ("mnist", "cifar10", "gcn", "bert", "gpt2")
    rows = [row for name in names for row in point(2.0, benchmark=name, pair=name)]
    slow = [dataclasses.replace(row, device_name="slow") for n in names for row in point(0.5, benchmark=n, pair=n)]
    old = [dataclasses.replace(row, framework_version="0.1") for n in names for row in point(0.5, benchmark=n, pair=n)]
    for others in (slow, old):
        found = points.lines(over_sessions(outcomes(judged([*rows, *others]))))
        text = markdown.table(found)
        assert text.count("default: 2.000 [") == 1
        assert text.count("default: 0.500 [") == 1


@pytest.mark.full
def test_a_hundred_thousand_rows_are_a_small_page(results: Results) -> None:
    rows = point(1.5)
    many = []
    for number in range(100_000 // len(rows)):
        names = {"benchmark": "mnist", "batch_size": number + 1, "pair": f"p{number}"}
        many += [dataclasses.replace(row, **names, group=f"{row.group}-{number}") for row in rows]
    folder = results.folder / "published" / "many"
    folder.mkdir(parents=True)
    (folder / "ratios.csv").write_text("of an older version, or damaged")  # the rows alone count
    write_rows(folder / "results.csv", judged(many))
    report = written(results, records.published(results, "many"))
    assert (report / "index.html").stat().st_size < 3_000_000
    text = (report / "index.html").read_text()
    assert f"The first {page.MOST_POINTS} of {len(many) // len(rows)} are here" in text
    assert "each panel has its first 60 points" in text
    assert len(pd.read_csv(report / "ratios.csv")) == len(many) // len(rows)


def test_croissant_finds_the_rows_that_it_describes(results: Results) -> None:
    folder = written(results, publish(results, point(1.5)))
    described = json.loads((folder / "croissant.json").read_text())
    (file,) = described["distribution"]
    rows = folder / file["contentUrl"]
    assert rows.samefile(results.folder / "published" / "planted" / "results.csv")
    assert hashlib.sha256(rows.read_bytes()).hexdigest() == file["sha256"]
    columns = {field["source"]["extract"]["column"] for field in described["recordSet"][0]["field"]}
    assert columns == set(pd.read_csv(rows).columns)
