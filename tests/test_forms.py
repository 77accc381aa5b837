"""Each published form of data trains on both sides, from the same weights and the same samples."""

import hashlib
import http.server
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import real_pictures
from checkpoints import FROM_SEED, python
from conftest import Main, rows_of
from test_data_sets import MOLECULES, load, write_molecules

from duel.comparability import COMPARABLE
from duel.data.known import File
from duel.data.samples import Equal
from duel.errors import UserError
from duel.launch import datasets


def text(main: Main, data: Path) -> None:
    (data / "text").mkdir(parents=True)
    lines = (f"line {number} of a text that is long enough to train on\n" for number in range(400))
    (data / "text" / "train.txt").write_text("".join(lines))


def molecules(main: Main, data: Path) -> None:
    labels = {"raw/graph-label": "1\n0\n1\n"}
    write_molecules(data / "ogbg_molhiv", **MOLECULES | labels)


def folders(main: Main, data: Path) -> None:
    real_pictures.write_folders(data / "imagenet100")
    made = main("data", "imagenet100", "--prepare")
    assert made.returncode == 0, made.stderr


@pytest.mark.parametrize(
    ("benchmark", "dataset", "make"),
    [("gpt2", "text", text), ("graphnet", "ogbg-molhiv", molecules), ("resnet50", "imagenet100", folders)],
)
def test_a_form_trains_on_both_sides(
    main: Main, checkout: Path, benchmark: str, dataset: str, make: Callable[[Main, Path], None]
) -> None:
    make(main, checkout / "data")
    what = ("--benchmark", benchmark, "--size", "tiny", "--use_case", "1", "--batch_sizes", "2")
    ran = main(*what, "--dataset", dataset, "--epochs", "1", "--paired", "--wait", timeout=1800)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    jax, pytorch = rows_of(checkout)
    assert jax["comparable"] == pytorch["comparable"] == COMPARABLE, jax["comparable"]
    assert jax["seen_sha256"] == pytorch["seen_sha256"] != ""
    assert jax["top1"]
    assert pytorch["top1"]


def test_both_sides_are_fine_tuned_from_the_same_file_with_the_same_new_head(
    main: Main, checkout: Path, tmp_path: Path
) -> None:
    """CIFAR-10's ten classes in the file, CIFAR-100's hundred in the data."""
    real_pictures.write_cifar100(checkout / "data", "bin")
    python("pytorch", FROM_SEED, tmp_path / "ten.safetensors", "cifar10")
    what = ("--benchmark", "cifar10", "--size", "tiny", "--use_case", "1", "--batch_sizes", "50", "--epochs", "1")
    ran = main(*what, "--dataset", "cifar100", "--weights", str(tmp_path / "ten.safetensors"), "--paired", "--wait")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    jax, pytorch = rows_of(checkout)
    assert jax["comparable"] == pytorch["comparable"] == COMPARABLE, jax["comparable"]
    assert jax["weights_sha256"] == pytorch["weights_sha256"]
    assert jax["weights"].startswith("results/weights/cifar10-")


@pytest.mark.parametrize("form", ["bin", "py"])
def test_of_cifar_100_the_class_counts_and_not_the_superclass(tmp_path: Path, form: str) -> None:
    real_pictures.write_cifar100(tmp_path, form)
    found = load("cifar100", tmp_path)
    assert found.classes == 100
    assert isinstance(found.train, Equal)
    assert np.array_equal(found.train.labels, np.arange(200) % 100)


CONTENT = b"what was published"


@pytest.fixture
def published() -> Iterator[str]:
    """The address of a server that has a file, whole and cut off."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(CONTENT)))
            self.end_headers()
            self.wfile.write(CONTENT if self.path == "/whole" else CONTENT[:5])

        def log_message(self, *given: object) -> None:
            """Say nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_download_is_whole_and_right_or_leaves_what_was_there(tmp_path: Path, published: str) -> None:
    path = tmp_path / "some" / "file"
    right = File(f"{published}/whole", "some/file", hashlib.md5(CONTENT, usedforsecurity=False).hexdigest())
    datasets._fetch(right, path)
    assert path.read_bytes() == CONTENT
    path.write_bytes(b"before")
    with pytest.raises(UserError, match=r"its checksum is .*, published is 0123; try again"):
        datasets._fetch(replace(right, md5="0123"), path)
    with pytest.raises(UserError):
        datasets._fetch(replace(right, url=f"{published}/cut"), path)
    with pytest.raises(UserError, match="check the internet connection"):
        datasets._fetch(replace(right, url="http://127.0.0.1:1/"), path)
    assert path.read_bytes() == b"before"
    assert [file.name for file in path.parent.iterdir()] == ["file"]
