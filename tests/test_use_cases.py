"""What each use case leaves in results.csv, end to end."""

from pathlib import Path

import pytest
from conftest import Main, rows_of

from duel.catalogue import FRAMEWORKS


def test_inference_has_a_row_for_each_batch_size(main: Main, checkout: Path) -> None:
    asked = ("--benchmark", "mnist", "--use_case", "inference", "--preset", "smoke", "--batch_sizes", "4,1,4")
    said = main(*asked, "--wait")
    assert said.returncode == 0, said.stdout + said.stderr
    rows = rows_of(checkout)
    assert [(row["framework"], row["batch_size"]) for row in rows] == [(f, b) for f in FRAMEWORKS for b in ("4", "1")]
    for row in rows:
        assert row["status"] == "finished", row["cause"]
        assert 5 <= int(row["latency_calls"]) <= 20  # a busy machine has time for fewer
        p50, p95 = float(row["latency_seconds_p50"]), float(row["latency_seconds_p95"])
        assert 0 < p50 <= p95
        assert row["latency_seconds_p99"] == row["loss_first"] == ""
        assert f"{row['latency_calls']} calls; 1000 are needed" in row["missing"]
        assert "no part of this use case" in row["missing"]
        assert float(row["throughput"]) == pytest.approx(int(row["batch_size"]) / float(row["step_seconds_p50"]))
        per_gb = float(row["throughput"]) / (int(row["peak_memory_bytes"]) / 1e9)
        assert float(row["throughput_per_gb"]) == pytest.approx(per_gb)
    pairs = {
        row["batch_size"]: {other["pair"] for other in rows if other["batch_size"] == row["batch_size"]} for row in rows
    }
    assert [len(pair) for pair in pairs.values()] == [1, 1]
    assert pairs["1"] != pairs["4"]
    assert "Same initial weights, same samples in the same order (hashes agree)." in said.stdout
    assert "jax 1" in said.stdout
    assert "pytorch 4" in said.stdout


def test_a_batch_size_that_fails_is_a_row_and_the_others_go_on(main: Main, checkout: Path) -> None:
    """MNIST here is 1,437 training samples."""
    asked = ("--benchmark", "mnist", "--use_case", "5", "--preset", "smoke", "--batch_sizes", "2000,1")
    said = main(*asked, "--framework", "jax", "--wait")
    assert said.returncode == 1
    rows = rows_of(checkout)
    assert [row["status"] for row in rows] == ["failed", "finished"]
    assert {row["cause"] for row in rows} == {
        "",
        "input: batch size 2000 is larger than the 1437 training samples of sklearn-digits",
    }
