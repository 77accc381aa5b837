"""The data sets that Duel knows by name: what they fit, where they are looked for, and how to get them."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np

from duel.data import cifar, digits, graphs, idx, prepared, text
from duel.data.samples import DataError, Dataset, Equal, of_pictures

PREPARED = "DUEL_PREPARED"  # a folder for prepared pictures, if not <data>/prepared
SYSTEM = Path("/usr/share/datasets")  # where Debian's packages of data sets install them


@dataclass(frozen=True)
class Place:
    """Where data sets are looked for: the target's data folder, and folders of packages beside this interpreter's."""

    data: Path
    packages: tuple[Path, ...] = ()

    @property
    def prepared(self) -> Path:
        return Path(os.environ.get(PREPARED) or self.data / "prepared")


@dataclass(frozen=True)
class File:
    """A file of a data set on the network: its address, its name below the data folder, its published checksum."""

    url: str
    name: str
    md5: str


@dataclass(frozen=True)
class Known:
    """A data set by name.

    ``looked`` says where it is looked for, ``get`` how to get it. ``find`` returns what is there in a sentence, or ""
    (it reads little and may raise DataError), ``load`` the samples for sequences of so many tokens, if it is a text.
    ``hub`` is its name on Hugging Face's hub, if it is to be prepared.
    """

    title: str
    looked: str
    get: str
    find: Callable[[Place], str]
    load: Callable[[Place, int], Dataset | None]
    files: tuple[File, ...] = ()
    hub: str = ""


def load(name: str, place: Place, length: int = 0) -> Dataset:
    """Return the data set ``name``; ``length`` is that of a text's sequences. Raises DataError."""
    known = KNOWN[name]
    found = known.load(place, length)
    if found is None:
        looked = f"looked in {known.looked}; the data folder is {place.data}"
        raise DataError(f"data set {name}: not found; {looked}; {known.get}")
    return found


def _idx_places(place: Place, names: tuple[str, ...], package: str) -> list[Path]:
    return [*(place.data / name for name in names), *([SYSTEM / package] if package else [])]


def _of_idx(
    name: str, title: str, names: tuple[str, ...], package: str, looked: str, get: str, files: tuple[File, ...]
) -> Known:
    def find(place: Place) -> str:
        paths = idx.find(_idx_places(place, names, package))
        if paths is None:
            return ""
        train, held_out = idx.inspect(paths)
        return f"{train:,} training and {held_out:,} held-out pictures in {paths[0].parent}"

    def loaded(place: Place, length: int) -> Dataset | None:
        paths = idx.find(_idx_places(place, names, package))
        if paths is None:
            return None
        source = find(place)
        train, train_labels, held, held_labels = (idx.read(path) for path in paths)
        parts = [
            Equal(pixels[..., np.newaxis], labels.astype(np.int32))
            for pixels, labels in ((train, train_labels), (held, held_labels))
        ]
        return of_pictures(name, source, parts[0], parts[1], 10)

    return Known(title, looked, get, find, loaded, files)


def _digits_found(place: Place) -> str:
    path = digits.file(place.packages)
    return "1,437 training and 360 held-out pictures of the package scikit-learn" if path else ""


def _digits(place: Place, length: int) -> Dataset | None:
    if digits.file(place.packages) is None:
        return None
    train, train_labels, held, held_labels = digits.read(place.packages)
    parts = [Equal(p[..., np.newaxis], y.astype(np.int32)) for p, y in ((train, train_labels), (held, held_labels))]
    return of_pictures("digits", _digits_found(place), parts[0], parts[1], 10)


def _of_cifar(classes: int, files: tuple[File, ...]) -> Known:
    name = f"cifar{classes}"

    def places(place: Place) -> list[Path]:
        return [place.data, place.data / name, place.data / f"cifar-{classes}"]

    def find(place: Place) -> str:
        found = cifar.find(classes, places(place))
        return f"{found[0]}" if found else ""

    def loaded(place: Place, length: int) -> Dataset | None:
        found = cifar.find(classes, places(place))
        if found is None:
            return None
        train, held_out = cifar.read(*found, classes)
        source = f"{len(train.labels):,} training and {len(held_out.labels):,} held-out pictures in {found[0]}"
        return of_pictures(name, source, train, held_out, classes)

    forms = ", ".join(path for form in cifar.FORMS[classes] for path in (form.archive, f"{form.folder}/"))
    looked = f"the data folder, or {name}/ or cifar-{classes}/ in it ({forms})"
    get = f"'python main.py data {name} --download' fetches it from www.cs.toronto.edu (160 MB)"
    return Known(f"CIFAR-{classes}", looked, get, find, loaded, files)


def _of_folders(name: str, title: str, hub: str, size: str) -> Known:
    def find(place: Place) -> str:
        folder = place.prepared / name
        if not folder.is_dir():
            return ""
        found = prepared.about(folder)
        return f"prepared in {folder}: {found.samples['train']:,} training and {found.samples['held_out']:,} held-out"

    def loaded(place: Place, length: int) -> Dataset | None:
        folder = place.prepared / name
        return prepared.load(name, folder) if folder.is_dir() else None

    get = (
        f"'python main.py data {name} --prepare' decodes it once from {name}/train/<class>/ and {name}/val/<class>/ "
        f"in the data folder, or from Hugging Face's {hub} if its cache has that ({size}; its licence must be accepted "
        "there)"
    )
    return Known(title, f"prepared/{name}/ in the data folder", get, find, loaded, hub=hub)


def _of_text(name: str, title: str, pairs: bool, get: str) -> Known:
    def find(place: Place) -> str:
        path = place.data / "text" / text.TRAIN
        whole = all((place.data / "text" / each).is_file() for each in files)
        return f"{path}, {path.stat().st_size:,} bytes" if whole else ""

    def loaded(place: Place, length: int) -> Dataset | None:
        return text.load(place.data / "text", name, length, pairs)

    files = (text.TRAIN, *(text.TOKENIZER if pairs else ()))
    looked = f"text/ in the data folder ({', '.join(files)})"
    return Known(title, looked, get, find, loaded)


def _of_molecules(name: str) -> Known:
    folder = name.replace("-", "_")

    def find(place: Place) -> str:
        return str(place.data / folder) if (place.data / folder / "raw").is_dir() else ""

    return Known(
        *(f"OGB's {name}, molecules", f"{folder}/ in the data folder (raw/ and split/)"),
        "download and unpack it from ogb.stanford.edu (its CSV form)",
        *(find, lambda place, length: graphs.molecules(place.data / folder, name)),
    )


_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist"
_FASHION = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
_TORONTO = "https://www.cs.toronto.edu/~kriz"
# The checksums are those that torchvision 0.29 checks.
_MNIST_MD5 = (
    *("f68b3c2dcbeaaa9fbdd348bbdeb94873", "d53e105ee54ea40749a09fcbcd1e9432"),
    *("9fb629c4189551a2d022fa330f9573f3", "ec29112dd5afa0611ce80d1b7f02629c"),
)
_FASHION_MD5 = (
    *("8d4fb7e6c68d591d4c3dfef9ec88bf0d", "25c81989df183df01b3e8a0aad5dffbe"),
    *("bef4ecab320f06d8554ea6380940ec79", "bb300cfdad3c16e7a12a480ee83cd310"),
)


def _idx_files(url: str, folder: str, sums: tuple[str, ...]) -> tuple[File, ...]:
    return tuple(
        File(f"{url}/{name}.gz", f"{folder}/{name}.gz", md5) for name, md5 in zip(idx.FILES, sums, strict=True)
    )


KNOWN: Mapping[str, Known] = MappingProxyType(
    {
        "mnist": _of_idx(
            *("mnist", "MNIST, handwritten digits", (".", "mnist", "MNIST/raw"), ""),
            "the data folder, or mnist/ or MNIST/raw/ in it",
            "'python main.py data mnist --download' fetches it from PyTorch's mirror (12 MB)",
            _idx_files(_MNIST, "mnist", _MNIST_MD5),
        ),
        "fashion_mnist": _of_idx(
            *("fashion_mnist", "Fashion-MNIST, articles of clothing", ("fashion_mnist", "FashionMNIST/raw")),
            "fashion-mnist",
            f"fashion_mnist/ or FashionMNIST/raw/ in the data folder, or {SYSTEM / 'fashion-mnist'}/",
            "Debian's package dataset-fashion-mnist has it, and 'python main.py data fashion_mnist --download' fetches "
            "it (31 MB)",
            _idx_files(_FASHION, "fashion_mnist", _FASHION_MD5),
        ),
        "digits": Known(
            *("scikit-learn's digits", "the frameworks' environments (the package scikit-learn)"),
            "'make envs' makes environments with it; those that only compute nodes see are not read from here",
            *(_digits_found, _digits),
        ),
        "cifar10": _of_cifar(
            10,
            (
                File(
                    *(f"{_TORONTO}/cifar-10-binary.tar.gz", "cifar-10-binary.tar.gz"),
                    "c32a1d4ab5d03f1284b67883e8d87530",
                ),
            ),
        ),
        "cifar100": _of_cifar(
            100,
            (
                File(
                    *(f"{_TORONTO}/cifar-100-binary.tar.gz", "cifar-100-binary.tar.gz"),
                    "03b5dce01913d631647c71ecec9e9cb8",
                ),
            ),
        ),
        "imagenet100": _of_folders("imagenet100", "100 classes of ImageNet", "clane9/imagenet-100", "17 GB"),
        "imagenet1k": _of_folders("imagenet1k", "ImageNet (ILSVRC 2012)", "ILSVRC/imagenet-1k", "150 GB"),
        "text": _of_text("text", "your own text, byte by byte", False, f"put it into text/{text.TRAIN}"),
        "text_bpe": _of_text(
            *("text_bpe", "your own text in GPT-2's byte pairs", True),
            f"put it into text/{text.TRAIN}, with GPT-2's {' and '.join(text.TOKENIZER)} beside it",
        ),
        "cora": Known(
            *("Cora, a citation graph", "cora/ in the data folder (cora.content and cora.cites)"),
            "download and unpack it from linqs.org (cora.tgz)",
            lambda place: str(place.data / "cora") if (place.data / "cora" / "cora.content").is_file() else "",
            lambda place, length: graphs.cora(place.data / "cora", "cora"),
        ),
        "ogbg-molpcba": _of_molecules("ogbg-molpcba"),
        "ogbg-molhiv": _of_molecules("ogbg-molhiv"),
    }
)
