"""Points of several versions, sets, devices and batch sizes: none is taken for another, in tables, figures or words."""

import re
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
from conftest import Main
from test_comparability import judged
from test_report import LATENCY, lines, point, publish, results, written
from test_waterfall import CPU, switches

from duel.record import Row
from duel.report import figures, latex, markdown, page, points, prose
from duel.report.pairs import outcomes
from duel.report.points import Line
from duel.report.sessions import over_sessions
from duel.report.waterfall import FIRST
from duel.results import Results

__all__ = ["results"]  # the fixture


def made(*rows: list[Row]) -> list[Line]:
    return points.lines(over_sessions(outcomes(judged([row for some in rows for row in some]))))


def newer(rows: list[Row], **change: Any) -> list[Row]:
    """The same measured a day later with other code, or what is to change."""
    other = {"code_sha256": "d" * 64} | change
    return [
        row.replace(**other, started=str(row.started).replace("-22T", "-23T"), ended=row.ended, group=f"{row.group} b")
        for row in rows
    ]


@pytest.mark.parametrize("change", [{}, {"framework_version": "9.9", "code_sha256": "c" * 64}])
def test_modes_of_different_code_or_versions_never_share_a_line(change: dict[str, str]) -> None:
    default, tuned = point(2.0), newer(point(3.0, mode="tuned", pair="t"), **change)
    text = markdown.summary(made(default, tuned), "folder")
    (line,) = [line for line in text.splitlines() if line.startswith("| mnist")]
    assert "3.0" in line
    assert "2.0" not in line, "the later one counts, alone"


def test_a_line_with_a_ratio_counts_rather_than_a_later_one_without() -> None:
    text = markdown.summary(made(point(2.0), newer(point(3.0, 1, 1))), "folder")
    assert "| 2.000 [" in text
    assert "1 of 1 points" in text
    text = markdown.summary(made(point(2.0), newer(point(3.0))), "folder")
    assert "| 3.000 [" in text


def test_tuned_is_recommended_by_what_was_tested(results: Results) -> None:
    """Tuned is a quarter faster at each point; at the second, sessions vary by as much."""
    tuned = [point(1.25, mode="tuned", pair=f"{name} t", benchmark=name) for name in ("mnist", "bert")]
    for number, row in enumerate(tuned[1]):
        tuned[1][number] = row.replace(throughput=(row.throughput or 0.0) * (1.0, 1.3, 0.8)[number // 4])
    default = [point(1.0, pair=name, benchmark=name) for name in ("mnist", "bert")]
    found = publish(results, *default, *tuned).found
    (text,) = [text for text in prose.recommendations(found) if "tune its switches" in text]
    assert "JAX on planted" in text
    assert "at 1 of 2 points mode tuned is more than 10% faster" in text
    assert "at most 1.25 times as fast (figure Throughput)" in text
    old = publish(results, *default, *(newer(some) for some in tuned), name="other code").found
    assert not [text for text in prose.recommendations(old) if "tune its switches" in text]


def test_two_sets_of_one_device_stay_apart_in_every_figure(results: Results) -> None:
    sizes = (1, 8)
    one, other = (
        publish(results, *(point(ratio, use_case=5, batch_size=n, pair=f"i{n}", **LATENCY) for n in sizes), name=name)
        for name, ratio in (("one", 1.5), ("other", 0.5))
    )
    folder = written(results, one, other)
    ratios = lines(folder, "ratios")
    assert {(line["point"], round(float(line["ratio"]), 1)) for line in ratios} == {
        (f"mnist, batch {size}, set {name}", ratio) for size in sizes for name, ratio in (("one", 1.5), ("other", 0.5))
    }
    assert len({line["id"] for line in ratios}) == 4
    text = (folder / "index.html").read_text()
    assert all(f'id="{line["id"]}"' in text for line in ratios), "each leads to its point"
    drawn = figures.throughput(pd.read_csv(folder / "figures" / "throughput.csv"))
    titles = [panel.title for panel in drawn]
    assert titles == [f"mnist (full, fp32) set {name}, inference" for name in ("one", "other")]
    alone = written(results, one)
    assert {line["point"] for line in lines(alone, "ratios")} == {f"mnist, batch {size}" for size in sizes}


def test_batch_sizes_on_as_many_devices_are_never_added_up() -> None:
    what = {"device_name": "planted", "benchmark": "mnist", "size": "full", "precision": "fp32", "product": ""}
    what |= {"which": "", "besides": "", "use_case": "training on many devices", "mode": "default"}
    what |= {"scaling": "weak", "unit": "1/s"}
    data = [
        what
        | {"point": f"{n} {size}", "batch_size": n * size, "devices": n, "place": str(n)}
        | {"framework": "jax", "throughput": 1.0}
        for n in (2, 4)
        for size in (8, 16)
    ]
    drawn = figures.scaling(pd.DataFrame([record | {"efficiency": 1.0, "id": record["point"]} for record in data]))
    assert [str(panel.title).split(", ")[4] for panel in drawn] == ["batch 8", "batch 16"]
    for panel in drawn:
        assert panel.to_dict()["layer"][0]["encoding"]["y"]["stack"] is None


def test_a_verdict_that_holds_for_its_point_alone_is_drawn_as_undecided(results: Results) -> None:
    folder = written(results, publish(results, point(1.5)))
    data = pd.read_csv(folder / "figures" / "ratios.csv")

    def kinds(verdict: str) -> set[str]:
        spec = figures.ratios(data.assign(verdict=verdict))[0].to_dict()
        return {record["kind"] for records in spec["datasets"].values() for record in records if "kind" in record}

    assert kinds("PyTorch is faster") == {"PyTorch is faster"}
    assert kinds("PyTorch is faster*") == {"undecided"}
    assert kinds("undecided: one process far off") == {"undecided"}


def test_what_marks_mean_stands_below_each_table(results: Results) -> None:
    shown = made(point(1.5), point(1.2, 1, 1, benchmark="bert", pair="b"))
    starred = [line if line.p_holm is None else line.__class__(**vars(line) | {"p_holm": 0.2}) for line in shown]
    meaning = "significant alone, but not after correction for the whole set (Holm)"
    for text in (markdown.table(starred), markdown.summary(starred, "folder"), latex.table(starred)):
        assert meaning in text
        assert "indicative: too few sessions for an interval" in text
    assert meaning not in markdown.table(shown)
    assert points.legend(made(point(1.5))) == ""


def test_a_mean_is_over_points_that_have_a_ratio_in_every_mode() -> None:
    """At batch 8 only default was measured: it would move default's mean alone."""
    names = ("mnist", "cifar10", "gcn", "bert", "gpt2")
    both = [point(2.0, benchmark=n, pair=f"{n} {m}", mode=m) for n in names for m in ("default", "tuned")]
    more = [point(8.0, benchmark=name, pair=f"{name} 8", batch_size=8) for name in names]
    text = markdown.table(made(*both, *more))
    assert text.count(": 2.000 [2.000, 2.000]") == 2


def test_what_a_received_set_holds_stays_text_in_its_cell() -> None:
    (line,) = made(point(1.5, device_name="<img src=x>\n| a | b |", target="a|b"))
    shown = markdown.table([line])
    assert "<img" not in shown
    assert r"&lt;img src=x> \| a \| b \|" in shown
    bad = line.__class__(**vars(line) | {"ratio": None, "why": "weights_sha256 (a | d)\nand more"})
    (row,) = [text for text in markdown.table([bad]).splitlines() if text.startswith("| mnist")]
    assert row.endswith(r"| weights_sha256 (a \| d) and more |")


def test_the_baseline_of_a_scaling_says_that_it_is_of_one_device() -> None:
    two = point(0.9, use_case=2, device_count=2, scaling="weak", pair="two")
    text = markdown.table(made(two, point(1.0, use_case=2, device_count=1, scaling="weak", pair="one")))
    assert "| train_multi, 2 devices, weak |" in text
    assert "| train_multi, 1 device |" in text


def test_hardware_is_named_for_each_device(results: Results) -> None:
    other = point(1.2, device_name="another", pair="o")
    text = " ".join(prose.appendix.paragraphs([publish(results, point(1.5), other)]))
    assert "Hardware of planted: planted, unknown CPU" in text
    assert "Hardware of planted: another, unknown CPU" in text


def test_the_page_says_of_a_point_what_the_tables_say(results: Results) -> None:
    found = publish(results, point(1.5, 1, 4), point(1.5, benchmark="bert", pair="b"))
    text = (written(results, found) / "index.html").read_text()
    assert "no verdict within this session: JAX / PyTorch 1.49" in text
    assert "JAX is faster: JAX / PyTorch 1.5" in text
    assert text.count("JAX is faster: JAX / PyTorch") == 1, "that of three sessions"
    outcome, line = found.found[1]
    starred = line.__class__(**vars(line) | {"p_holm": 0.2})
    assert page._point(outcome, starred)["verdict"].startswith("JAX is faster*: JAX / PyTorch 1.5")
    assert points.NOT_ALONE_MEANS in page.html([replace(found, found=[(outcome, starred)])], {}, [])


def test_a_point_shows_how_many_trials_its_switches_come_from(results: Results) -> None:
    found = publish(results, point(1.5, mode="tuned", tuning="the best of 5 by tune_mnist_1"))
    assert "jax tuned: the best of 5 by tune_mnist_1" in (written(results, found) / "index.html").read_text()


def test_the_floor_of_single_pairs_is_that_of_a_framework_against_itself(results: Results) -> None:
    same = {"switches": "none", "execution": "compiled"}
    found = publish(results, point(1.5, 3, 1, **same), point(1.503, 3, 1, mode="tuned", pair="t", **same))
    floors = {line["mode"]: line["floor"] for line in lines(written(results, found), "ratios")}
    assert floors["default"] == ""
    assert float(floors["tuned"]) > 1.0


def test_a_scaling_is_drawn_with_its_baseline(results: Results) -> None:
    many = {"use_case": 2, "scaling": "weak"}
    two = point(0.9, device_count=2, scaling_efficiency=0.8, pair="two", **many)
    folder = written(results, publish(results, two, point(1.0, device_count=1, pair="one", **many), point(1.0)))
    drawn = {(line["devices"], line["efficiency"]) for line in lines(folder, "scaling")}
    assert drawn == {("1", "1.0"), ("2", "0.8")}


def test_devices_stand_beside_each_other_in_one_table(results: Results) -> None:
    one = publish(results, point(1.5, device_name="one"), name="one")
    other = publish(results, point(0.5, device_name="other", target="there"), name="other")
    (row,) = (written(results, one, other) / "tables" / "devices.md").read_text().splitlines()[2:]
    assert re.fullmatch(r"\| mnist .* \| default \| 1\.500 \[.*\] JAX \| 0\.500 \[.*\] PyTorch \|", row)
    assert not (written(results, one) / "tables" / "devices.md").exists()


def test_a_device_of_two_targets_stands_once_beside_the_other(results: Results) -> None:
    long = point(1.6, device_name="one", target="long", pair="long")
    one = publish(results, point(1.5, device_name="one", pair="one"), long, name="one")
    other = publish(results, point(0.5, device_name="other", target="there"), name="other")
    (row,) = (written(results, one, other) / "tables" / "devices.md").read_text().splitlines()[2:]
    assert re.fullmatch(r"\| mnist .* \| default \| 1\.[56]00 \[.*\] JAX \| 0\.500 \[.*\] PyTorch \|", row)
    assert "target" not in row


def test_what_else_was_measured_changes_the_words_of_a_point_and_not_its_anchor(results: Results) -> None:
    """A published anchor is what 'reproduce --point' is given."""
    here = [point(1.5, mode=mode, pair=mode) for mode in ("default", "tuned")]
    alone = lines(written(results, publish(results, *here, name="alone")), "ratios")
    there = point(1.6, target="long", pair="long")
    both = lines(written(results, publish(results, *here, there, name="both")), "ratios")
    assert {line["id"] for line in alone} < {line["id"] for line in both}
    assert {line["point"] for line in alone} == {"mnist, batch 64"}
    assert {(line["mode"], line["point"]) for line in both} == {
        ("default", "mnist, batch 64, target local"),
        ("tuned", "mnist, batch 64, target local"),
        ("default", "mnist, batch 64, target long"),
    }


def test_a_number_of_devices_on_one_node_and_on_two_has_one_baseline(results: Results) -> None:
    many = {"use_case": 2, "scaling": "weak"}
    several = [
        point(0.9, device_count=2, nodes=nodes, scaling_efficiency=0.8, pair=f"on {nodes}", **many) for nodes in (1, 2)
    ]
    baseline = point(1.0, device_count=1, batch_size=32, pair="one", **many)
    folder = written(results, publish(results, *several, baseline))
    drawn = pd.DataFrame(lines(folder, "scaling"))
    assert sorted(set(drawn.place)) == ["1", "2, nodes 1", "2, nodes 2"]
    drawn = drawn.astype({"devices": int, "batch_size": int, "throughput": float, "efficiency": float})
    assert len(figures.scaling(drawn)) == 1


def test_the_text_of_a_report_has_its_headings(results: Results) -> None:
    text = (written(results, publish(results, point(1.5))) / "report.md").read_text()
    heads = [line.removeprefix("## ") for line in text.splitlines() if line.startswith("## ")]
    assert heads == ["Summary", "Method", "Why", "Recommendations", "Limits", "References", "Artifact"]


def test_a_waterfall_is_drawn(results: Results) -> None:
    rows = []
    for mode in CPU:
        compiled = mode == "default+compile" or (mode.startswith("tuned") and mode != "tuned-compile")
        change = {"benchmark": "resnet50", "mode": mode, "pair": mode}
        rows.append(
            [
                row.replace(switches=switches(mode, str(row.framework)))
                for row in point(2.0 if compiled else 1.0, **change)
            ]
        )
    folder = written(results, publish(results, *rows))
    assert (folder / "figures" / "switches.svg").exists()
    factors = {line["switch"]: float(line["factor"]) for line in lines(folder, "switches") if line["order"] == FIRST}
    assert factors["compile"] == pytest.approx(2.0, rel=0.01)


@pytest.mark.parametrize("name", [name for name, how in page.HOW.items() if how.startswith("python main.py --bench")])
def test_the_command_for_a_figure_without_data_is_accepted(main: Main, name: str) -> None:
    ran = main(*page.HOW[name].split()[2:], "--dry_run")
    assert ran.returncode == 0, ran.stderr
