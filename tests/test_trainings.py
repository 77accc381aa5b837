"""Trainings to accuracy as people start them: both sides, killed and resumed, compared and reported."""

import json
import os
import random
import re
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import real_pictures
from conftest import Main, rows_of
from test_driver import wait_for
from tokenizers import ByteLevelBPETokenizer
from wandb_server import on_disk

from duel import recipes, training_options
from duel.comparability import COMPARABLE
from duel.errors import UserError
from duel.launch import plan
from duel.results import Results, Run
from duel.states import FINISHED, TERMINAL

DIGITS = ("--benchmark", "mnist", "--use_case", "1", "--dataset", "digits")


def test_a_recipe_s_batch_is_divided_before_anything_is_sent() -> None:
    usual = recipes.recipe("mnist", "digits", None, None).batch_size
    plan._check_batches({"batch_sizes": ()}, 2, usual)
    with pytest.raises(UserError, match=f"batch size {usual}, the recipe's, does not divide among 3 devices"):
        plan._check_batches({"batch_sizes": ()}, 3, usual)


def test_both_sides_train_on_the_same_batches_and_are_compared(main: Main, checkout: Path) -> None:
    ran = main(*DIGITS, "--paired", "--epochs", "2", "--seeds", "2", "--wait")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "mnist (full, fp32) on digits: JAX" in ran.stdout
    assert "no verdict, 2 of 5 seeds (--seeds 5)" in ran.stdout
    rows = rows_of(checkout)
    assert len(rows) == 4
    for seed in ("0", "1"):
        jax, pytorch = (next(r for r in rows if (r["framework"], r["seed"]) == (f, seed)) for f in ("jax", "pytorch"))
        assert jax["comparable"] == pytorch["comparable"] == COMPARABLE
        assert jax["seen_sha256"] == pytorch["seen_sha256"]
        assert float(jax["held_out_loss_before"]) == pytest.approx(float(pytorch["held_out_loss_before"]), rel=1e-5)
        assert abs(float(jax["top1"]) - float(pytorch["top1"])) < 0.03
        assert 0 <= float(jax["waiting_share"]) < 1
        empty = {name: why for why, names in json.loads(jax["missing"]).items() for name in names}
        assert jax["training_joules"] or "no energy counter" in empty["training_joules"]
    assert rows[0]["seen_sha256"] != rows[2]["seen_sha256"], "another seed, another order"
    (run,) = Results(checkout / "results").runs()
    for row in run.rows():
        epochs = json.loads(run.curve_file(row).read_text())
        assert [epoch["number"] for epoch in epochs] == [0, 1, 2]
        assert epochs[-1]["top1"] == row.top1
        # W&B has the same curve under the name of its framework.
        name = f"{row.framework}/" if row.seed == 0 else f"{row.framework}/2/"
        logged = [one for one in on_disk(run.folder) if f"{name}top1" in one]
        assert [one["step"] for one in logged] == [epoch["step"] for epoch in epochs]
        assert [one[f"{name}epoch"] for one in logged] == [epoch["number"] for epoch in epochs]
        assert [one[f"{name}top1"] for one in logged] == [epoch["top1"] for epoch in epochs]
        assert [one[f"{name}held_out_loss"] for one in logged] == [epoch["held_out_loss"] for epoch in epochs]
    reported = main("report")
    assert reported.returncode == 0, reported.stderr
    page = (checkout / "results" / "report" / "index.html").read_text()
    assert "on digits" in page
    assert "learning-0" in page
    lines = (checkout / "results" / "report" / "figures" / "learning.csv").read_text().splitlines()
    assert len(lines) == 1 + 4 * 3


def test_both_sides_train_on_two_devices(main: Main, checkout: Path) -> None:
    """Each rank takes half of every batch, so both see what one device would."""
    options = ("--benchmark", "mnist", "--use_case", "2", "--dataset", "digits", "--devices", "2", "--paired")
    ran = main(*options, "--epochs", "2", "--wait")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    jax, pytorch = rows_of(checkout)
    assert jax["comparable"] == pytorch["comparable"] == COMPARABLE
    assert jax["seen_sha256"] == pytorch["seen_sha256"]
    assert (jax["device_count"], jax["scaling_efficiency"]) == ("2", "")
    assert jax["evidence_sha256"]
    assert abs(float(jax["top1"]) - float(pytorch["top1"])) < 0.03


def test_each_side_s_environment_reads_byte_pairs(main: Main, checkout: Path) -> None:
    folder = checkout / "data" / "text"
    folder.mkdir(parents=True)
    (folder / "train.txt").write_text("the same words, the same words again\n" * 600)
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train([str(folder / "train.txt")], vocab_size=280, show_progress=False)
    tokenizer.save_model(str(folder))
    options = ("--benchmark", "gpt2", "--size", "tiny", "--use_case", "1", "--dataset", "text_bpe", "--paired")
    ran = main(*options, "--batch_sizes", "8", "--epochs", "1", "--wait")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    jax, pytorch = rows_of(checkout)
    assert jax["comparable"] == pytorch["comparable"] == COMPARABLE
    assert jax["seen_sha256"] == pytorch["seen_sha256"]


def test_a_target_that_the_initial_weights_meet_is_met_after_an_epoch(main: Main, checkout: Path) -> None:
    ran = main(*DIGITS, "--framework", "pytorch", "--epochs", "3", "--target_accuracy", "0.5%", "--wait")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (row,) = rows_of(checkout)
    assert float(row["top1_before"]) >= 0.005
    assert row["trained_epochs"] == "1"


def test_a_training_ends_at_its_target(main: Main, checkout: Path) -> None:
    ran = main(*DIGITS, "--framework", "jax", "--epochs", "40", "--target_accuracy", "70%", "--wait")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (row,) = rows_of(checkout)
    assert float(row["top1"]) >= 0.7
    assert int(row["trained_epochs"]) < 40
    assert row["seconds_to_target"] == row["training_seconds"]


def test_a_training_that_diverges_ends_in_words_and_keeps_its_checkpoint(main: Main, checkout: Path) -> None:
    file = checkout / "duel" / "recipes.py"
    changed = file.read_text().replace("return peak * 0.5", "return (1e30 if step > 20 else 1) * peak * 0.5")
    assert changed != file.read_text()
    file.write_text(changed)
    ran = main(*DIGITS, "--framework", "pytorch", "--epochs", "3", "--wait")
    assert ran.returncode == 1
    assert "Traceback" not in ran.stdout + ran.stderr
    (row,) = rows_of(checkout)
    assert re.match(r"the training loss became (nan|inf) by step 2\d; the last checkpoint", row["cause"])
    (run,) = Results(checkout / "results").runs()
    assert [path.name for path in (run.folder / "checkpoints").glob("*/*")] == ["step-000000014.npz"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ("--dataset", "cifar10"),
            "mnist cannot train on it; valid for it: mnist, fashion_mnist, digits",
        ),
        (("--epochs", "3"), "--epochs needs --dataset; valid: mnist, fashion_mnist, digits"),
        (("--dataset", "digits", "--target_accuracy", "91"), "accuracy '91': give a share such as 0.91, or 91%"),
        (("--dataset", "digits", "--batch_sizes", "8,16"), "with --dataset a single one"),
        (("--dataset", "digit"), "unknown data set 'digit'; did you mean 'digits'?"),
        (("--dataset", "digits", "--sessions", "3", "--paired"), "are for measured rows"),
    ],
)
def test_options_that_do_not_go_together_are_refused(main: Main, options: tuple[str, ...], said: str) -> None:
    ran = main("--benchmark", "mnist", "--use_case", "1", *options)
    assert ran.returncode == 2
    assert said in ran.stderr


@pytest.mark.parametrize("text", ["93.1%", "1.1%", "99.99%", "0.931", "0.01%"])
def test_a_target_is_understood_by_the_job_as_it_was_by_the_command(text: str) -> None:
    value = training_options._share(text)
    assert training_options._share(str(value)) == value


def test_data_that_is_not_there_is_an_input_error(main: Main, checkout: Path) -> None:
    ran = main("--benchmark", "gcn", "--use_case", "1", "--dataset", "cora", "--framework", "jax", "--wait")
    assert ran.returncode == 1
    (row,) = rows_of(checkout)
    assert row["cause"].startswith("input: data set cora: not found; looked in cora/ in the data folder")


def killed_until_done(main: Main, checkout: Path, framework: str, kills: int, epochs: int) -> dict[str, Any]:
    """Train, killing supervisor and process at random instants; return the last checkpoint's arrays."""
    chance = random.Random(kills)
    environment = {"DUEL_CHECKPOINT_SECONDS": "0.05"}
    options = (*DIGITS, "--framework", framework, "--epochs", str(epochs))
    assert main(*options, **environment).returncode == 0
    done = 0
    results = Results(checkout / "results")
    (run,) = results.runs()
    while done < kills:
        wait_for(lambda: bool(list((run.folder / "checkpoints").glob("*/*"))) or run.status().state in TERMINAL)
        time.sleep(chance.uniform(0, 0.6))
        status = run.stored_status()
        if status.state in TERMINAL:
            break
        os.kill(status.owner.pid, signal.SIGKILL)
        done += 1
        wait_for(lambda: run.status().state in TERMINAL)
        again = main("resubmit", run.id, **environment)
        assert "continues" in again.stdout, again.stdout + again.stderr
        begun = time.time()
        wait_for(lambda begun=begun: run.stored_status().updated > begun and "training" in run.stored_status().phase)  # type: ignore[misc]  # mypy infers no type for it
    wait_for(lambda: run.status().state in TERMINAL)
    assert run.status().state == FINISHED
    assert done == kills, "the training ended before"
    return last_arrays(run)


def last_arrays(run: Run) -> dict[str, Any]:
    newest = max((run.folder / "checkpoints").glob("*/*.npz"))
    with np.load(newest) as archive:
        found = dict(archive)
    course = json.loads(found.pop("course").tobytes())["course"]
    return found | {"step": course["step"], "seen": course["seen"], "top1": [e["top1"] for e in course["epochs"]]}


def resumed_bit_for_bit(main: Main, checkout: Path, tmp_path: Path, framework: str, kills: int) -> None:
    epochs = 20 * kills
    killed = killed_until_done(main, checkout, framework, kills, epochs)
    (checkout / "results").rename(tmp_path / "killed")
    whole = main(*DIGITS, "--framework", framework, "--epochs", str(epochs), "--wait")
    assert whole.returncode == 0, whole.stdout + whole.stderr
    (run,) = Results(checkout / "results").runs()
    alone = last_arrays(run)
    assert killed.keys() == alone.keys()
    for name, value in alone.items():
        assert np.array_equal(value, killed[name]), name


@pytest.mark.parametrize("framework", ["jax", "pytorch"])
def test_a_training_that_is_killed_resumes_to_the_same_bits(
    main: Main, checkout: Path, tmp_path: Path, framework: str
) -> None:
    resumed_bit_for_bit(main, checkout, tmp_path, framework, kills=1)


@pytest.mark.full
@pytest.mark.parametrize("framework", ["jax", "pytorch"])
def test_thirty_kills_change_no_bit(main: Main, checkout: Path, tmp_path: Path, framework: str) -> None:
    resumed_bit_for_bit(main, checkout, tmp_path, framework, kills=15)


def test_pictures_and_graphs_train_too(main: Main, checkout: Path) -> None:
    real_pictures.write_cifar(checkout / "data", "bin", packed=True)
    real_pictures.write_cora(checkout / "data" / "cora")
    for benchmark, dataset, epochs in (("cifar10", "cifar10", "1"), ("gcn", "cora", "30")):
        what = ("--benchmark", benchmark, "--size", "tiny", "--use_case", "1", "--batch_sizes", "20")
        what = what if benchmark != "gcn" else what[:-2]
        ran = main(*what, "--dataset", dataset, "--epochs", epochs, "--paired", "--wait")
        assert ran.returncode == 0, ran.stdout + ran.stderr
    rows = rows_of(checkout)
    assert {row["comparable"] for row in rows} == {COMPARABLE}
    assert all(float(row["top1"]) > float(row["top1_before"]) for row in rows if row["benchmark"] == "gcn")
