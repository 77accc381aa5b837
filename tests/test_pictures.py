"""Encoded pictures, decoded once: real photographs in ImageNet's and Hugging Face's forms, and damaged ones."""

import errno
import json
import multiprocessing
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import real_pictures
from conftest import FRAMEWORKS_PYTHON, ROOT, Main
from PIL import Image

from duel.data import augment, known, pictures, prepared
from duel.data.known import PREPARED, Place
from duel.data.samples import DataError
from duel.recipes import AUGMENTATIONS


def source(root: Path) -> pictures.Source:
    found = pictures.of_folder(root)
    assert found is not None
    return found


def silent(text: str) -> None: ...


def test_prepared_pictures_are_those_of_the_files(tmp_path: Path) -> None:
    real_pictures.write_folders(tmp_path / "imagenet100")
    about = prepared.prepare(source(tmp_path / "imagenet100"), tmp_path / "prepared" / "imagenet100", False, silent)
    assert about.samples == {"train": 12, "held_out": 12}
    assert about.classes == real_pictures.PHOTOGRAPHS
    found = known.load("imagenet100", Place(tmp_path))
    assert found.classes == 2
    for label, name in enumerate(about.classes):
        for number in range(6):
            with Image.open(tmp_path / "imagenet100" / "train" / name / f"{number}.JPEG") as image:
                wanted = np.asarray(image.convert("RGB"))
            (stored,) = found.train.at(np.array([6 * label + number]))
            assert np.array_equal(stored, wanted)
    assert found.train.labels.tolist() == [0] * 6 + [1] * 6
    prepared.check(tmp_path / "prepared" / "imagenet100")


def test_hugging_faces_form_gives_the_same(tmp_path: Path) -> None:
    import datasets

    real_pictures.write_folders(tmp_path / "files")
    splits = {}
    for split, name in (("train", "train"), ("val", "validation")):
        paths = sorted((tmp_path / "files" / split).glob("*/*.JPEG"))
        labels = datasets.ClassLabel(names=list(real_pictures.PHOTOGRAPHS))
        features = datasets.Features({"image": datasets.Image(), "label": labels})
        rows = {"image": [str(path) for path in paths], "label": [path.parent.name for path in paths]}
        splits[name] = datasets.Dataset.from_dict(rows, features=features)
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "saved"))
    found = pictures.of_hugging_face(str(tmp_path / "saved"), download=False)
    assert found is not None
    assert found.classes == real_pictures.PHOTOGRAPHS
    by_folder = source(tmp_path / "files")
    for split in pictures.SPLITS:
        ours = [(one.label, one.read()) for one in found.splits[split]()]
        assert ours == [(one.label, one.read()) for one in by_folder.splits[split]()]
    assert pictures.of_hugging_face("nobody/nothing-of-this-name", download=False) is None


def test_grey_cmyk_and_turned_pictures_become_upright_rgb() -> None:
    china = real_pictures.photographs()[0].crop((100, 50, 300, 190))
    plain = pictures.decoded(real_pictures.jpeg(china), 512)
    assert plain.shape == (140, 200, 3)
    grey = pictures.decoded(real_pictures.jpeg(china.convert("L")), 512)
    assert np.array_equal(grey[..., 0], grey[..., 2])
    assert np.abs(grey.astype(int) - np.asarray(china.convert("L"))[..., None]).mean() < 3
    cmyk = pictures.decoded(real_pictures.jpeg(china.convert("CMYK")), 512)
    assert np.abs(cmyk.astype(int) - np.asarray(china)).mean() < 6
    turned = china.transpose(Image.Transpose.ROTATE_90)
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: show it rotated by 90 degrees to the right
    upright = pictures.decoded(real_pictures.jpeg(turned, exif=exif), 512)
    assert upright.shape == plain.shape
    assert np.abs(upright.astype(int) - np.asarray(china)).mean() < 6
    small = pictures.decoded(real_pictures.jpeg(china), 100)
    assert small.shape == (70, 100, 3)


def spoilt(root: Path) -> Path:
    real_pictures.write_folders(root)
    path = root / "train" / "china" / "3.JPEG"
    path.write_bytes(path.read_bytes()[:700])
    return path


def test_a_damaged_picture_is_named_and_ends_it_or_is_skipped(tmp_path: Path) -> None:
    path, folder = spoilt(tmp_path / "files"), tmp_path / "prepared" / "imagenet100"
    with pytest.raises(DataError, match=rf"{path}: a damaged picture .*; --skip_damaged leaves such out"):
        prepared.prepare(source(tmp_path / "files"), folder, False, silent)
    assert list(folder.parent.iterdir()) == [folder.parent / ".imagenet100.lock"], "nothing half made is left"
    said: list[str] = []
    about = prepared.prepare(source(tmp_path / "files"), folder, True, said.append)
    assert about.samples["train"] == 11
    assert len(about.skipped) == 1
    assert str(path) in said[0]
    assert "without 1 damaged pictures" in prepared.load("imagenet100", folder).source


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), struct.error("unpack requires 2 bytes")])
def test_whatever_fails_for_one_picture_is_that_pictures(tmp_path: Path, error: Exception) -> None:
    real_pictures.write_folders(tmp_path / "files")
    whole, folder = source(tmp_path / "files"), tmp_path / "prepared" / "imagenet100"

    def failing() -> bytes:
        raise error

    def listed() -> Iterator[pictures.Encoded]:
        first, *others = whole.splits["train"]()
        return iter([pictures.Encoded(first.where, first.label, failing), *others])

    broken = pictures.Source(whole.source, whole.classes, {**whole.splits, "train": listed})
    with pytest.raises(DataError, match=rf"0\.JPEG: a damaged picture \({type(error).__name__}: "):
        prepared.prepare(broken, folder, False, silent)
    assert prepared.prepare(broken, folder, True, silent).samples["train"] == 11


def test_a_class_of_which_every_picture_was_skipped_is_named(tmp_path: Path) -> None:
    real_pictures.write_folders(tmp_path / "files")
    for path in (tmp_path / "files" / "train" / "flower").iterdir():
        path.write_bytes(path.read_bytes()[:700])
    with pytest.raises(DataError, match="no picture to train on of class flower; 6 were skipped"):
        prepared.prepare(source(tmp_path / "files"), tmp_path / "imagenet100", True, silent)


@pytest.mark.parametrize("label", [-1, 2, None])
def test_labels_of_hugging_faces_pictures_must_be_classes(label: int | None) -> None:
    rows = pictures._rows("some, test", [{"image": {}, "label": 1}, {"image": {}, "label": label}], "image", "label", 2)
    with pytest.raises(DataError, match=f"Hugging Face, some, test, row 1: label {label}; labels are 0 to 1"):
        list(rows())


def test_what_a_killed_preparation_left_is_removed_by_the_next(tmp_path: Path) -> None:
    real_pictures.write_folders(tmp_path / "files")
    left, others = tmp_path / ".imagenet100.4194303", tmp_path / ".imagenet1k.4194303"
    for folder in (left, others):
        folder.mkdir()
        (folder / "train-00000.bin").write_bytes(b"half")
    prepared.prepare(source(tmp_path / "files"), tmp_path / "imagenet100", False, silent)
    assert not left.exists()
    assert others.exists()


def test_labels_of_prepared_pictures_are_copied_once(tmp_path: Path) -> None:
    real_pictures.write_folders(tmp_path / "files")
    prepared.prepare(source(tmp_path / "files"), tmp_path / "imagenet100", False, silent)
    train = prepared.load("imagenet100", tmp_path / "imagenet100").train
    assert train.labels is train.labels


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda root: [path.unlink() for path in (root / "val" / "china").iterdir()], "an empty class: no picture"),
        (lambda root: (root / "val" / "flower").rename(root / "val" / "other"), "class folders differ from those"),
        (lambda root: (root / "val").rename(root / "other"), "no folder val or validation or test beside train"),
    ],
)
def test_a_folder_of_another_form_is_refused(tmp_path: Path, spoil: Any, said: str) -> None:
    real_pictures.write_folders(tmp_path)
    spoil(tmp_path)
    with pytest.raises(DataError, match=said):
        pictures.of_folder(tmp_path)


@pytest.mark.parametrize("name", ["train-00000.bin", "held_out.npy"])
def test_prepared_files_that_changed_are_noticed(tmp_path: Path, name: str) -> None:
    real_pictures.write_folders(tmp_path / "files")
    folder = tmp_path / "prepared" / "imagenet100"
    prepared.prepare(source(tmp_path / "files"), folder, False, silent)
    content = bytearray((folder / name).read_bytes())
    content[-1] ^= 1
    (folder / name).write_bytes(content)
    with pytest.raises(DataError, match=f"{name}: missing or changed since it was prepared"):
        prepared.check(folder)
    (folder / name).write_bytes(content[:-5])
    with pytest.raises(DataError, match=rf"{name}: \d+ bytes, \d+ were written"):
        prepared.load("imagenet100", folder)
    (folder / prepared.ABOUT).write_text(json.dumps({"format": 99}))
    with pytest.raises(DataError, match="prepared by another version of Duel"):
        prepared.load("imagenet100", folder)


def test_shards_end_at_their_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "SHARD_BYTES", 200_000)
    real_pictures.write_folders(tmp_path / "files")
    folder = tmp_path / "prepared" / "imagenet100"
    prepared.prepare(source(tmp_path / "files"), folder, False, silent)
    shards = sorted(folder.glob("train-*.bin"))
    assert len(shards) > 3
    found = prepared.load("imagenet100", folder)
    for place, one in enumerate(source(tmp_path / "files").splits["train"]()):
        (stored,) = found.train.at(np.array([place]))
        assert np.array_equal(stored, pictures.decoded(one.read(), prepared.LONGEST))


def _prepare(root: Path, folder: Path, start: Any) -> None:
    start.wait()
    prepared.prepare(source(root), folder, False, silent)


def test_two_jobs_that_prepare_the_same_do_not_collide(tmp_path: Path) -> None:
    real_pictures.write_folders(tmp_path / "files")
    folder = tmp_path / "prepared" / "imagenet100"
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(3)
    jobs = [context.Process(target=_prepare, args=(tmp_path / "files", folder, start)) for _ in range(3)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(60)
    assert [job.exitcode for job in jobs] == [0, 0, 0]
    prepared.check(folder)
    assert sorted(path.name for path in folder.parent.iterdir()) == [".imagenet100.lock", "imagenet100"]


def test_a_full_disk_leaves_nothing_and_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_pictures.write_folders(tmp_path / "files")
    full = tmp_path / "full"

    def save(*given: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(prepared.np, "save", save)  # after the first shard
    with pytest.raises(DataError, match=r"the disk is full; nothing is kept \(DUEL_PREPARED names another"):
        prepared.prepare(source(tmp_path / "files"), full / "imagenet100", False, silent)
    assert [path.name for path in full.iterdir()] == [".imagenet100.lock"]


def test_a_folder_that_cannot_be_written_is_said_and_another_can_be_named(
    main: Main, checkout: Path, tmp_path: Path
) -> None:
    real_pictures.write_folders(checkout / "data" / "imagenet100")
    (checkout / "data" / "prepared").write_text("not a folder")
    refused = main("data", "imagenet100", "--prepare")
    assert refused.returncode == 2
    assert "DUEL_PREPARED names another folder" in refused.stderr
    done = main("data", "imagenet100", "--prepare", **{PREPARED: str(tmp_path / "elsewhere")})
    assert done.returncode == 0, done.stderr
    assert "12 train, 12 held_out, 2 classes" in done.stdout


HASHES = """
import sys
sys.path.append(sys.argv[1])
from pathlib import Path
import numpy
from duel.data import known
from duel.data.feed import Feed
data = known.load("imagenet100", known.Place(Path(sys.argv[2])))
for how in sys.argv[3].split(","):
    feed = Feed(data, how, 4, 0, 64, 48)
    for step, fed in enumerate(feed.batches(0, 6, 3)):
        print(how, step, fed.digest().hex())
        assert fed.digest() == feed.batch(step).digest(), "whoever made it"
    assert [fed.digest() for fed in feed.batches(2, 6, 1)] == [feed.batch(step).digest() for step in range(2, 6)]
held = list(feed.held_out(1))
print(*(fed.digest().hex() for fed in held), numpy.__version__)
assert sum(len(fed.labels) for fed in held) == 12
"""


def test_both_frameworks_see_the_same_bits(tmp_path: Path) -> None:
    real_pictures.write_folders(tmp_path / "files")
    prepared.prepare(source(tmp_path / "files"), tmp_path / "prepared" / "imagenet100", False, silent)
    seen = [
        subprocess.run(
            [python, "-c", HASHES, str(ROOT), str(tmp_path), ",".join(AUGMENTATIONS)],
            check=True,
            capture_output=True,
            text=True,
            cwd=tmp_path,
        ).stdout
        for python in FRAMEWORKS_PYTHON
    ]
    assert seen[0] == seen[1]
    assert len(set(seen[0].splitlines())) == 6 * len(AUGMENTATIONS) + 1


@pytest.mark.parametrize("how", AUGMENTATIONS)
def test_augmentation_does_what_it_says(how: str) -> None:
    generator = np.random.default_rng(0)
    images = generator.integers(1, 256, (500, 32, 32, 3), dtype=np.uint8)
    numbers = augment.draws(0, 0, np.arange(500), augment.NUMBERS)
    found = augment.trained(images, how, 32, 32, numbers)
    assert found.shape == images.shape
    upright = numbers.copy()
    upright[:, 0] = 1
    turned = (numbers[:, 0] < 0.5) & (how != "none")
    left = augment.trained(images, how, 32, 32, upright)
    assert np.array_equal(found, np.where(turned[:, None, None, None], left[:, :, ::-1], left))
    same = [np.array_equal(a, b) for a, b in zip(found, images, strict=True)]
    mirrored = [np.array_equal(a[:, ::-1], b) for a, b in zip(found, images, strict=True)]
    if how == "none":
        assert all(same)
    elif how == "flip":
        assert all(a or b for a, b in zip(same, mirrored, strict=True))
        assert 200 < sum(mirrored) < 300
    elif how == "crop_flip":
        assert sum(same) + sum(mirrored) < 30, "one place of 81 is the middle"
        assert (found == 0).any(), "the padding"
    else:
        assert sum(same) + sum(mirrored) < 10
    middle = augment.evaluated(images, 32, 32)
    assert np.array_equal(middle, images)


def test_what_is_evaluated_is_the_middle() -> None:
    image = np.zeros((100, 200, 3), np.uint8)
    image[:, 50:150] = 200
    (found,) = augment.evaluated([image], 64, 64)
    assert found.shape == (64, 64, 3)
    assert (found == 200).all(), "87.5 of the 100 pixels in the middle are bright"


def test_a_random_part_is_spread_over_sizes_and_places() -> None:
    numbers = augment.draws(0, 0, np.arange(4000), augment.NUMBERS)[:, 2:]
    parts = np.array([augment._part((300, 400, 3), row) for row in numbers])
    top, left, height, width = parts.T
    assert ((top >= 0) & (left >= 0) & (top + height <= 300) & (left + width <= 400)).all()
    share = height * width / 120_000
    assert share.min() == pytest.approx(0.08, abs=0.01)
    assert share.max() > 0.9
    ratio = width / height
    assert 0.74 < ratio.min() < 0.8
    assert 1.25 < ratio.max() < 1.35


def test_the_same_numbers_in_every_run() -> None:
    """A change of these would make old trainings impossible to repeat."""
    found = augment.draws(1, 2, np.array([3, 4]), 2)
    assert found.tolist() == RECORDED
    assert augment.order(0, 0, 12).tolist() == ORDER


RECORDED = [[0.6409117247416257, 0.9475112032881936], [0.3258709694045312, 0.8263755590809577]]
ORDER = [0, 7, 9, 8, 4, 1, 11, 2, 6, 10, 3, 5]
