"""Data: strict reading of MNIST's files, the fallback to scikit-learn's digits, and the pool of batches."""

import gzip
import json
import struct
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, interpreter
from hypothesis import given
from hypothesis import strategies as st

from duel import datasets
from duel.catalogue import BENCHMARKS
from duel.data.idx import FILES
from duel.measure import batches

TRAIN, HELD_OUT = 40, 12
IMAGES, LABELS, HELD_OUT_IMAGES, HELD_OUT_LABELS = FILES


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">{1 + array.ndim}I", 0x0800 + array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def contents() -> dict[str, bytes]:
    generator = np.random.default_rng(0)
    files = {}
    for count, (images, labels) in ((TRAIN, FILES[:2]), (HELD_OUT, FILES[2:])):
        files[images] = idx(generator.integers(256, size=(count, 28, 28)))
        files[labels] = idx(generator.integers(10, size=count))
    return files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in contents().items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


def compress(path: Path) -> None:
    path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()


@pytest.mark.parametrize("place", datasets.MNIST_FOLDERS)
@pytest.mark.parametrize("packed", [(), FILES, FILES[:1]], ids=["plain", "gz", "mixed"])
def test_mnist_files_are_read_where_they_may_lie(tmp_path: Path, place: str, packed: tuple[str, ...]) -> None:
    (tmp_path / place).mkdir(parents=True, exist_ok=True)
    files = contents()
    for name, content in files.items():
        (tmp_path / place / name).write_bytes(content)
        if name in packed:
            compress(tmp_path / place / name)
    assert datasets.check("mnist", tmp_path).startswith(
        f"mnist-idx: {TRAIN} training and {HELD_OUT} held-out images in"
    )
    data = datasets.load("mnist", tmp_path)
    assert data.name == "mnist-idx"
    assert data.train_images.shape == (TRAIN, 1, 28, 28)
    assert data.held_out_images.shape == (HELD_OUT, 1, 28, 28)
    assert data.train_images.dtype == data.held_out_images.dtype == np.float32
    assert data.train_labels.dtype == data.held_out_labels.dtype == np.int32
    assert data.train_labels.tolist() == list(files[LABELS][8:])
    assert data.held_out_labels.tolist() == list(files[HELD_OUT_LABELS][8:])
    pixels = {name: np.frombuffer(files[name][16:], np.uint8).astype(np.float64) for name in (IMAGES, HELD_OUT_IMAGES)}
    mean, std = pixels[IMAGES].mean(), pixels[IMAGES].std()
    for name, images in ((IMAGES, data.train_images), (HELD_OUT_IMAGES, data.held_out_images)):
        np.testing.assert_allclose(images.ravel(), (pixels[name] - mean) / std, rtol=1e-6, atol=1e-6)


def rewrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


# What was done to a file, the change, and what the message must say.
DAMAGES = [
    ("magic", LABELS, lambda b: struct.pack(">I", 2050) + b[4:], "magic number 2050; expected 2049"),
    ("short", IMAGES, lambda b: b[:-1], f"{16 + TRAIN * 784 - 1} bytes; its header promises {16 + TRAIN * 784}"),
    ("long", IMAGES, lambda b: b + b"x", f"{16 + TRAIN * 784 + 1} bytes; its header promises {16 + TRAIN * 784}"),
    ("header", IMAGES, lambda b: b[:9], "ends after 9 bytes, within its header of 16"),
    ("empty", HELD_OUT_LABELS, lambda b: b"", "ends after 0 bytes, within its header of 8"),
    ("shape", IMAGES, lambda b: b[:8] + struct.pack(">II", 32, 32) + b[16:], "images of 32x32; MNIST's are 28x28"),
    ("none", HELD_OUT_LABELS, lambda b: struct.pack(">II", 2049, 0), "0 samples; at least 1 is needed"),
    ("counts", LABELS, lambda b: idx(np.zeros(TRAIN - 1)), f"{TRAIN - 1} labels for the {TRAIN} images"),
]


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
@pytest.mark.parametrize(("name", "change", "message"), [d[1:] for d in DAMAGES], ids=[d[0] for d in DAMAGES])
def test_a_damaged_file_is_refused_by_both(
    folder: Path, name: str, change: Callable[[bytes], bytes], message: str, packed: bool
) -> None:
    rewrite(folder / name, change)
    if packed:
        compress(folder / name)
    said = []
    for look in (datasets.load, datasets.check):
        with pytest.raises(ValueError, match=message) as error:
            look("mnist", folder)
        assert name in str(error.value)
        said.append(str(error.value))
    assert said[0] == said[1]


def test_a_label_out_of_range_is_refused(folder: Path) -> None:
    rewrite(folder / HELD_OUT_LABELS, lambda b: b[:11] + bytes([10]) + b[12:])
    with pytest.raises(ValueError, match=f"{HELD_OUT_LABELS}: label 10 of sample 3; labels are 0 to 9"):
        datasets.load("mnist", folder)


@pytest.mark.parametrize("keep", [5, 200, -9, -1])
def test_a_truncated_gzip_file_is_refused(folder: Path, keep: int) -> None:
    compress(folder / IMAGES)
    rewrite(folder / f"{IMAGES}.gz", lambda b: b[:keep])
    for look in (datasets.load, datasets.check):
        with pytest.raises(ValueError, match=f"{IMAGES}.gz: "):
            look("mnist", folder)


@given(st.integers(0), st.integers(1, 255))
def test_a_flipped_byte_of_a_gzip_file_never_changes_a_sample(position: int, flip: int) -> None:
    packed = bytearray(gzip.compress(contents()[LABELS], mtime=0))
    packed[position % len(packed)] ^= flip
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, content in contents().items():
            (folder / file).write_bytes(content)
        expected = datasets.load("mnist", folder)
        (folder / LABELS).unlink()
        (folder / f"{LABELS}.gz").write_bytes(packed)
        try:
            data = datasets.load("mnist", folder)
        except ValueError as error:
            assert f"{LABELS}.gz: " in str(error)
        else:  # a byte of the header that says nothing of the content, such as the time
            assert np.array_equal(data.train_labels, expected.train_labels)


@pytest.mark.parametrize("missing", [FILES[:1], FILES[1:]])
def test_some_but_not_all_files_are_an_error_that_names_the_missing(folder: Path, missing: tuple[str, ...]) -> None:
    for name in missing:
        (folder / name).unlink()
    for look in (datasets.load, datasets.check):
        with pytest.raises(ValueError, match="missing") as error:
            look("mnist", folder)
        absent = str(error.value).partition("but ")[2].partition(" missing")[0]
        assert absent.split(", ") == list(missing)


def test_images_that_are_all_alike_are_refused(folder: Path) -> None:
    (folder / IMAGES).write_bytes(idx(np.full((TRAIN, 28, 28), 7)))
    with pytest.raises(ValueError, match="every training pixel is 7"):
        datasets.load("mnist", folder)


def test_an_unknown_data_set_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    for look in (datasets.load, datasets.check):
        with pytest.raises(ValueError, match="unknown data set 'cifar'; valid: mnist"):
            look("cifar", tmp_path)


def test_without_files_check_announces_the_digits(tmp_path: Path) -> None:
    assert datasets.check("mnist", tmp_path / "none").startswith("sklearn-digits: no MNIST files under")
    assert datasets.check("synthetic", tmp_path).startswith("synthetic: ")


def test_without_scikit_learn_both_remedies_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"put the four IDX files .* or install scikit-learn"):
        datasets.load("mnist", tmp_path)


DIGITS = """
import json, pathlib, sys
import numpy as np
from duel import datasets
from duel.catalogue import BENCHMARKS, Images
from duel.measure import batches, parameters

nowhere = pathlib.Path("no such folder")
data = datasets.load("mnist", nowhere)
imported = "sklearn" in sys.modules
from sklearn.datasets import load_digits
train, held_out = data.train_images[:, 0], data.held_out_images[:, 0]
low = float(min(train.min(), held_out.min()))
every = np.concatenate([train, held_out])
grids = every[:, 2:26, 2:26].reshape(-1, 8, 3, 8, 3)
coarse = grids[:, :, 0, :, 0]
steps = np.unique(every)
levels = np.searchsorted(steps, coarse)
order = sorted(level.tobytes() for level in levels.astype(np.uint8))
original = sorted(image.tobytes() for image in load_digits().images.astype(np.uint8))
pool = batches.pool(BENCHMARKS["mnist"], "full", 64, 0, nowhere)
large = batches.pool(BENCHMARKS["mnist"], "full", 256, 0, nowhere)
print(json.dumps({
    "name": data.name,
    "shapes": [data.train_images.shape, data.held_out_images.shape],
    "border": bool((every[:, :2] == low).all() and (every[:, 26:] == low).all()
                   and (every[:, :, :2] == low).all() and (every[:, :, 26:] == low).all()),
    "repeated": bool((grids == coarse[:, :, None, :, None]).all()),
    "levels": len(steps),
    "same digits": order == original,
    "mean": float(train.mean(dtype=np.float64)), "std": float(train.std(dtype=np.float64)),
    "labels": np.bincount(np.concatenate([data.train_labels, data.held_out_labels])).tolist(),
    "batches": [len(pool.batches), len(large.batches)],
    "imported": imported,
    "sha256": parameters.sha256({k: v for k, v in vars(data).items() if k != "name"}),
}))
"""


@pytest.mark.parametrize("framework", ["jax", "pytorch"])
def test_the_digits_are_the_same_bit_for_bit_in_every_interpreter(framework: str) -> None:
    program = f"import sys; sys.path.append({str(ROOT)!r})\n{DIGITS}"
    done = subprocess.run([interpreter(framework), "-c", program], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["name"] == "sklearn-digits"
    assert found["shapes"] == [[1437, 1, 28, 28], [360, 1, 28, 28]]
    assert found["border"]
    assert found["repeated"]
    assert found["levels"] == 17
    assert found["same digits"]
    assert not found["imported"]
    assert found["mean"] == pytest.approx(0, abs=1e-6)
    assert found["std"] == pytest.approx(1, abs=1e-6)
    assert sum(found["labels"]) == 1797
    assert found["batches"] == [22, 10]  # 1437 // 64; 5 of 256 are too few, so a second shuffle follows
    assert found["sha256"] == "3d5095ff6726a919dd5d14747820372066972345be63152ee670ff4359dc7d1e"


def test_a_pool_of_real_data_is_a_shuffle_without_the_remainder(folder: Path) -> None:
    pool = batches.pool(BENCHMARKS["mnist"], "full", 3, 0, folder)
    data = datasets.load("mnist", folder)
    assert (pool.synthetic, pool.dataset) == (False, "mnist-idx")
    assert len(pool.batches) == TRAIN // 3
    seen = [image.tobytes() for batch in pool.batches for image in batch.inputs[0]]
    assert len(set(seen)) == len(seen) == TRAIN // 3 * 3
    label_of = {image.tobytes(): label for image, label in zip(data.train_images, data.train_labels, strict=True)}
    labels = [label for batch in pool.batches for label in batch.labels]
    assert labels == [label_of[image] for image in seen]
    assert pool.held_out is not None
    assert np.array_equal(pool.held_out.inputs[0], data.held_out_images)
    assert pool.sha256 != batches.pool(BENCHMARKS["mnist"], "full", 3, 1, folder).sha256


def test_a_data_set_of_few_batches_is_shuffled_again(folder: Path) -> None:
    pool = batches.pool(BENCHMARKS["mnist"], "full", 16, 0, folder)
    assert len(pool.batches) == batches.POOL_BATCHES
    assert len({batch.labels.tobytes() for batch in pool.batches}) == len(pool.batches)


@pytest.mark.parametrize(("size", "message"), [(TRAIN + 1, f"{TRAIN + 1} is larger than the {TRAIN}"), (0, "size 0")])
def test_a_batch_size_that_cannot_be_is_refused(folder: Path, size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        batches.pool(BENCHMARKS["mnist"], "full", size, 0, folder)
