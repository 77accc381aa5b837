"""'main.py data': which data sets are there, and where each was looked for."""

from pathlib import Path

import pytest
import real_pictures
from conftest import Main
from test_data_sets import cut

from duel.data import pictures
from duel.data.samples import DataError


def test_data_says_what_is_there_and_what_is_not(main: Main, checkout: Path) -> None:
    real_pictures.write_cifar(checkout / "data", "py", packed=True)
    cut(real_pictures.write_cifar(checkout / "data" / "mnist", "bin", packed=False) / "test_batch.bin")
    (checkout / "data" / "mnist" / "train-images-idx3-ubyte").write_bytes(b"")
    shown = main("data")
    assert shown.returncode == 0, shown.stderr
    lines = {line.split()[0]: line for line in shown.stdout.splitlines() if line.strip()}
    assert "found" in lines["cifar10"]
    assert "DAMAGED" in lines["mnist"]
    assert "missing" in lines["cora"]
    one = main("data", "cora").stdout
    assert "to get it: download and unpack it from linqs.org" in one
    whole = main("data", "cifar10", "--check")
    assert whole.returncode == 0
    assert "cifar10 is whole: 200 training and 40 held-out pictures" in whole.stdout
    published = real_pictures.write_cifar(checkout / "data", "bin", packed=True)
    other = main("data", "cifar10", "--check")
    assert other.returncode == 2
    assert f"{published}: its checksum is " in other.stderr
    assert "that of the published file c32a1d4ab5d03f1284b67883e8d87530" in other.stderr
    refused = main("data", "cora", "--download")
    assert refused.returncode == 2
    assert "cora cannot be fetched" in refused.stderr


def test_data_says_where_each_set_was_looked_for(main: Main, checkout: Path) -> None:
    shown = " ".join(main("data").stdout.split())
    assert "the data folder, or mnist/ or MNIST/raw/ in it" in shown
    assert f"the data folder is {checkout / 'data'}" in shown


def test_the_digits_are_found_where_the_frameworks_are(main: Main, checkout: Path) -> None:
    # The driver's environment, which this command runs in, has no scikit-learn.
    assert "found: 1,437 training and 360 held-out pictures" in main("data", "digits").stdout
    whole = main("data", "digits", "--check")
    assert whole.returncode == 0, whole.stderr
    assert "digits is whole: 1,437 training" in whole.stdout
    file = checkout / "cluster.yaml"
    file.write_text(file.read_text().replace(".venv/", "nowhere/"))
    assert "missing" in main("data", "digits").stdout
    none = main("data", "digits", "--check")
    assert none.returncode == 2
    assert "looked in the frameworks' environments" in none.stderr
    assert "'make envs'" in none.stderr


def test_a_hugging_face_cache_that_cannot_be_written_is_not_one_without_the_data(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import datasets

    def refused(name: str) -> None:
        raise PermissionError(13, "Permission denied", "/shared/hf/lock")

    monkeypatch.setattr(datasets, "load_dataset", refused)
    with pytest.raises(DataError, match=r"Permission denied.*; the library writes to its cache"):
        pictures.of_hugging_face("somebody/something", download=False)
