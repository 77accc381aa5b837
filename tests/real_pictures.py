"""Real pictures in the published forms of data sets: Debian's Fashion-MNIST, and the photographs that ship with
scikit-learn. CIFAR-10, ImageNet and Cora themselves cannot be had without a download.
"""

import io
import pickle
import struct
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from conftest import ROOT, needs
from PIL import Image

from duel.data import idx
from duel.data.known import SYSTEM

FASHION = SYSTEM / "fashion-mnist"
SITE = next((ROOT / ".venv" / "jax" / "lib").glob("python*/site-packages"), Path("none"))
PHOTOGRAPHS = ("china", "flower")


def fashion(count: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """The first ``count`` training pictures (n, 28, 28) and their labels."""
    needs([] if FASHION.is_dir() else ["dataset-fashion-mnist"], "page-tools")
    images, labels = (idx.read(FASHION / f"{name}.gz") for name in idx.FILES[:2])
    return images[:count], labels[:count]


def photographs() -> list[Image.Image]:
    """scikit-learn's two photographs, 640 x 427, from JAX's environment, which has that package."""
    found = []
    for name in PHOTOGRAPHS:
        with Image.open(SITE / "sklearn" / "datasets" / "images" / f"{name}.jpg") as image:
            found.append(image.convert("RGB"))
    return found


def write_idx(folder: Path, train: int, held_out: int) -> None:
    """The first pictures of Fashion-MNIST as four IDX files."""
    folder.mkdir(parents=True, exist_ok=True)
    images, labels = fashion(train + held_out)
    for place, part in ((0, slice(train)), (2, slice(train, None))):
        shape = images[part].shape
        (folder / idx.FILES[place]).write_bytes(struct.pack(">4I", 0x803, *shape) + images[part].tobytes())
        (folder / idx.FILES[place + 1]).write_bytes(struct.pack(">2I", 0x801, shape[0]) + labels[part].tobytes())


def cifar(count: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Clothing in CIFAR's shape: (n, 3, 32, 32), the channels unlike each other."""
    images, labels = fashion(count)
    padded = np.pad(images, ((0, 0), (2, 2), (2, 2)))
    return np.stack([padded, 255 - padded, padded // 2], axis=1), labels


def write_cifar(folder: Path, form: str, packed: bool, each: int = 40) -> Path:
    """CIFAR-10's six files in ``form`` "bin" or "py", in its archive or as a folder; returns that."""
    images, labels = cifar(6 * each)
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    inner = f"cifar-10-batches-{form}"
    files = {}
    for number, name in enumerate(names):
        part = slice(number * each, (number + 1) * each)
        pixels, of = images[part].reshape(each, -1), labels[part]
        if form == "bin":
            files[f"{name}.bin"] = np.concatenate([of[:, None], pixels], axis=1).tobytes()
        else:
            stored: dict[bytes, Any] = {b"batch_label": name.encode(), b"labels": [int(one) for one in of]}
            stored |= {b"data": pixels, b"filenames": [b"x.png"] * each}
            files[name] = pickle.dumps(stored, protocol=2)
    folder.mkdir(parents=True, exist_ok=True)
    if not packed:
        (folder / inner).mkdir()
        for name, content in files.items():
            (folder / inner / name).write_bytes(content)
        return folder / inner
    path = folder / f"cifar-10-{'binary' if form == 'bin' else 'python'}.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"{inner}/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def write_cifar100(folder: Path, form: str, each: int = 200) -> None:
    """CIFAR-100's two files in ``form`` "bin" or "py", as a folder: label n has the superclass n // 5."""
    images, _ = cifar(2 * each)
    fine = np.arange(2 * each) % 100
    (folder / f"cifar-100-{'binary' if form == 'bin' else 'python'}").mkdir(parents=True)
    for number, name in enumerate(("train", "test")):
        part = slice(number * each, (number + 1) * each)
        pixels, labels = images[part].reshape(each, -1), fine[part].astype(np.uint8)
        if form == "bin":
            both = np.stack([labels // 5, labels], axis=1)
            (folder / "cifar-100-binary" / f"{name}.bin").write_bytes(np.concatenate([both, pixels], axis=1).tobytes())
        else:
            stored = {b"data": pixels, b"coarse_labels": [int(n) // 5 for n in labels], b"fine_labels": labels.tolist()}
            (folder / "cifar-100-python" / name).write_bytes(pickle.dumps(stored, protocol=2))


def jpeg(image: Image.Image, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, "JPEG", quality=92, **options)
    return out.getvalue()


def write_folders(root: Path, each: int = 6) -> None:
    """ImageNet's form: parts of two photographs as JPEGs of several sizes, a class each."""
    generator = np.random.default_rng(0)
    for split in ("train", "val"):
        for name, photograph in zip(PHOTOGRAPHS, photographs(), strict=True):
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(each):
                width, height = (int(generator.integers(100, 300)) for _ in range(2))
                left, top = (int(generator.integers(most - 300)) for most in (640, 427 + 100))
                part = photograph.crop((left, min(top, 427 - height), left + width, min(top, 427 - height) + height))
                (folder / f"{number}.JPEG").write_bytes(jpeg(part))


def write_cora(folder: Path, count: int = 240) -> None:
    """Cora's form: digits as papers, their dark pixels as words, the three digits most alike as citations."""
    folder.mkdir(parents=True, exist_ok=True)
    table = np.loadtxt(SITE / "sklearn" / "datasets" / "data" / "digits.csv.gz", np.uint8, delimiter=",")
    words, labels = table[:count, :-1] > 7, table[:count, -1]
    alike = words.astype(int) @ words.T.astype(int)
    np.fill_diagonal(alike, -1)
    nearest = np.argsort(-alike, axis=1, kind="stable")[:, :3]
    lines = [f"p{n}\t" + "\t".join(map(str, words[n].astype(int))) + f"\tdigit_{labels[n]}" for n in range(count)]
    (folder / "cora.content").write_text("\n".join(lines) + "\n")
    cites = [f"p{other}\tp{n}" for n in range(count) for other in nearest[n]]
    (folder / "cora.cites").write_text("\n".join(cites) + "\n")
