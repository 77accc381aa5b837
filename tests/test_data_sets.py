"""Data sets in their published forms, made of real pictures; and what damaged, missing or hostile files get."""

import csv
import gzip
import pickle
from pathlib import Path

import numpy as np
import pytest
import real_pictures

from duel.catalogue import BENCHMARKS
from duel.data import augment, known, text
from duel.data.feed import Feed
from duel.data.known import KNOWN, Place
from duel.data.samples import Arrays, DataError, Equal, enlarged
from duel.recipes import DATASETS, fitted


def load(name: str, data: Path, length: int = 0) -> known.Dataset:
    return known.load(name, Place(data), length)


def test_every_data_set_is_known_and_fits_a_benchmark() -> None:
    assert list(KNOWN) == list(DATASETS)
    assert {name for names in DATASETS.values() for name in names} <= set(BENCHMARKS)


def test_idx_files_are_read_as_they_are(tmp_path: Path) -> None:
    real_pictures.write_idx(tmp_path / "fashion_mnist", 300, 50)
    images, labels = real_pictures.fashion(350)
    found = load("fashion_mnist", tmp_path)
    assert isinstance(found.train, Equal)
    assert isinstance(found.held_out, Equal)
    assert np.array_equal(found.train.pixels[..., 0], images[:300])
    assert np.array_equal(found.held_out.labels, labels[300:])
    assert found.mean[0] == pytest.approx(images[:300].mean())
    assert found.std[0] == pytest.approx(images[:300].std())


def test_debians_package_is_found_without_a_data_folder(tmp_path: Path) -> None:
    real_pictures.fashion(1)
    found = load("fashion_mnist", tmp_path / "none")
    assert (len(found.train.labels), len(found.held_out.labels)) == (60_000, 10_000)
    assert str(real_pictures.FASHION) in found.source


@pytest.mark.parametrize("form", ["bin", "py"])
@pytest.mark.parametrize("packed", [True, False])
def test_cifar_is_read_in_both_forms_packed_or_not(tmp_path: Path, form: str, packed: bool) -> None:
    real_pictures.write_cifar(tmp_path, form, packed)
    images, labels = real_pictures.cifar(240)
    found = load("cifar10", tmp_path)
    assert isinstance(found.train, Equal)
    assert np.array_equal(found.train.pixels, images[:200].transpose(0, 2, 3, 1))
    assert np.array_equal(found.held_out.labels, labels[200:])
    entry = fitted(BENCHMARKS["cifar10"], "full", found)
    assert entry.sizes["full"].model["classes"] == 10


def test_a_pickle_that_would_call_something_is_not_read(tmp_path: Path) -> None:
    folder = real_pictures.write_cifar(tmp_path, "py", packed=False)
    ran = tmp_path / "ran"

    class Hostile:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (ran,)

    (folder / "data_batch_2").write_bytes(pickle.dumps({b"data": Hostile(), b"labels": []}, protocol=2))
    with pytest.raises(DataError, match=r"data_batch_2: it is a pickle that would call "):
        load("cifar10", tmp_path)
    assert not ran.exists()


ENDLESS = b"\x80\x04Nr\xff\xff\xff\x7f."  # a pickle that claims an entry number of two thousand million


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2 - 7])


@pytest.mark.parametrize(
    ("form", "packed", "spoil", "said"),
    [
        ("bin", True, lambda path: cut(path), r"truncated or damaged archive|missing in it"),
        ("bin", False, lambda path: cut(path / "data_batch_3.bin"), r"data_batch_3\.bin: \d+ bytes are no whole"),
        ("py", False, lambda path: cut(path / "test_batch"), r"test_batch: truncated or damaged"),
        ("py", False, lambda path: (path / "test_batch").write_bytes(ENDLESS), r"no memory .* damaged, unless"),
        ("py", False, lambda path: (path / "data_batch_5").unlink(), r"data_batch_5 missing; unpack the archive again"),
    ],
)
def test_damaged_cifar_is_named(tmp_path: Path, form: str, packed: bool, spoil: "object", said: str) -> None:
    assert callable(spoil)
    spoil(real_pictures.write_cifar(tmp_path, form, packed))
    with pytest.raises(DataError, match=said):
        load("cifar10", tmp_path)


def said_of_each_byte(name: str, data: Path, path: Path) -> set[str]:
    """What is said when one byte of ``path``, a compressed file, is another one."""
    whole, said = path.read_bytes(), set()
    for place in range(64, len(whole), max(1, len(whole) // 60)):  # behind the name of what was compressed
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        with pytest.raises(DataError) as caught:
            load(name, data)
        said.add(str(caught.value))
    return said


def test_compressed_files_with_a_damaged_byte_are_named(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    archive = real_pictures.write_cifar(tmp_path, "bin", packed=True)
    said = said_of_each_byte("cifar10", tmp_path, archive)
    assert any("truncated or damaged archive (CRC check failed" in text for text in said)
    write_molecules(tmp_path / "ogbg_molpcba", **{"raw/node-feat": "".join(f"{n},{n * n}\n" for n in range(900))})
    table = tmp_path / "ogbg_molpcba" / "raw" / "node-feat.csv.gz"
    said = said_of_each_byte("ogbg-molpcba", tmp_path, table)
    assert any("node-feat.csv.gz: truncated or damaged (Error -3 while decompressing" in text for text in said)
    write_molecules(tmp_path / "ogbg_molpcba", **{"raw/node-feat": "1" * 200_000})
    limit = csv.field_size_limit(100_000)  # of the whole process: the table of results raises it
    request.addfinalizer(lambda: csv.field_size_limit(limit))
    with pytest.raises(DataError, match=r"node-feat\.csv\.gz: truncated or damaged \(field larger than"):
        load("ogbg-molpcba", tmp_path)


def test_labels_out_of_range_and_empty_classes_are_named(tmp_path: Path) -> None:
    folder = real_pictures.write_cifar(tmp_path, "bin", packed=False)
    whole = (folder / "data_batch_1.bin").read_bytes()
    (folder / "data_batch_1.bin").write_bytes(bytes([17]) + whole[1:])
    with pytest.raises(DataError, match="label 17 of sample 0; labels are 0 to 9"):
        load("cifar10", tmp_path)
    for batch in folder.glob("*.bin"):
        table = np.frombuffer(batch.read_bytes(), np.uint8).reshape(-1, 3073).copy()
        table[:, 0] %= 5
        batch.write_bytes(table.tobytes())
    with pytest.raises(DataError, match="no training sample of class 5, 6, 7, 8, 9"):
        load("cifar10", tmp_path)


def test_cora_is_one_graph_with_a_split(tmp_path: Path) -> None:
    real_pictures.write_cora(tmp_path / "cora")
    found = load("cora", tmp_path)
    assert isinstance(found.train, Arrays)
    assert isinstance(found.held_out, Arrays)
    nodes, senders, receivers, weights = found.train.inputs
    assert nodes.shape == (1, 240, 64)
    assert np.allclose(nodes.sum(2), 1)
    assert (np.diff(receivers) >= 0).all()
    edges = set(zip(senders[0].tolist(), receivers[0].tolist(), strict=True))
    assert edges == {(b, a) for a, b in edges}, "both ways"
    assert all((place, place) in edges for place in range(240)), "with self-loops"
    degree = np.bincount(receivers[0])
    assert np.allclose(weights, 1 / np.sqrt(degree[senders] * degree[receivers]))
    chosen, held = found.train.labels[0] >= 0, found.held_out.labels[0] >= 0
    assert chosen.sum() == 200
    assert not (chosen & held).any()
    inputs = fitted(BENCHMARKS["gcn"], "full", found).sizes["full"].inputs
    assert inputs.edges == len(edges) - 240  # type: ignore[union-attr]  # other kinds of inputs have none


def test_damaged_cora_is_named(tmp_path: Path) -> None:
    real_pictures.write_cora(tmp_path / "cora")
    content = tmp_path / "cora" / "cora.content"
    lines = content.read_text().splitlines()
    content.write_text("\n".join([*lines[:5], lines[5].rpartition("\t")[0], *lines[6:]]))
    with pytest.raises(DataError, match=r"cora\.content, line 6: 65 fields; the first line has 66"):
        load("cora", tmp_path)
    content.write_text("\n")
    with pytest.raises(DataError, match=r"cora\.content: no paper in it"):
        load("cora", tmp_path)
    content.write_bytes(b"\xff a b\n")
    with pytest.raises(DataError, match=r"cora\.content: could not convert"):
        load("cora", tmp_path)
    real_pictures.write_cora(tmp_path / "cora")
    content.write_text(content.read_text() + content.read_text().splitlines()[3] + "\n")
    with pytest.raises(DataError, match=r"cora\.content: 1 papers are listed more than once"):
        load("cora", tmp_path)
    (tmp_path / "cora" / "cora.cites").unlink()
    with pytest.raises(DataError, match=r"cora\.cites is missing"):
        load("cora", tmp_path)


def test_a_tenth_of_a_text_is_held_out_wherever_its_lines_end() -> None:
    for whole in (b"Title\n" + b"x" * 1000, b"x" * 500 + b"\n" + b"x" * 500, b"line\n" * 200):
        train, held_out = text._cut(whole)
        assert train + held_out == whole
        assert len(held_out) == pytest.approx(100, abs=5)
    assert train.endswith(b"\n")


def test_byte_pairs_are_found_with_all_their_files(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "train.txt").write_text("words")
    assert KNOWN["text"].find(Place(tmp_path))
    assert not KNOWN["text_bpe"].find(Place(tmp_path))


def test_a_prepared_folder_that_is_not_whole_is_named(tmp_path: Path) -> None:
    (tmp_path / "prepared" / "imagenet100").mkdir(parents=True)
    with pytest.raises(DataError, match=r"imagenet100: it has no about\.json, so it is not whole"):
        load("imagenet100", tmp_path)


# Three molecules: two atoms with a bond, a triangle, and a chain of three; one label is missing.
MOLECULES = {
    "raw/num-node-list": "2\n3\n3\n",
    "raw/num-edge-list": "1\n3\n2\n",
    "raw/node-feat": "1,2\n3,4\n" + "5,6\n" * 6,
    "raw/edge": "0,1\n0,1\n1,2\n0,2\n0,1\n1,2\n",
    "raw/edge-feat": "7\n8\n9\n10\n11\n12\n",
    "raw/graph-label": "1,0\n0,\n1,1\n",
    "split/scaffold/train": "0\n2\n",
    "split/scaffold/test": "1\n",
}


def write_molecules(folder: Path, **changed: str) -> None:
    for name, content in (MOLECULES | changed).items():
        path = folder / f"{name}.csv.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(content.encode()))


def test_molecules_are_padded_and_their_bonds_go_both_ways(tmp_path: Path) -> None:
    write_molecules(tmp_path / "ogbg_molpcba")
    found = load("ogbg-molpcba", tmp_path)
    assert isinstance(found.train, Arrays)
    nodes, edges, senders, receivers, node_mask, edge_mask = found.train.inputs
    assert nodes.shape == (2, 4, 2)
    assert edges.shape == (2, 6, 1)
    assert node_mask.tolist() == [[1, 1, 0, 0], [1, 1, 1, 0]]
    assert senders[1].tolist() == [1, 0, 2, 1, 3, 3]
    assert receivers[1].tolist() == [0, 1, 1, 2, 3, 3]
    assert edges[1, :, 0].tolist() == [11, 11, 12, 12, 0, 0]
    assert edge_mask[1].tolist() == [1, 1, 1, 1, 0, 0]
    assert isinstance(found.held_out, Arrays)
    assert found.held_out.labels.tolist() == [[0, -1]]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"raw/edge": "0,1\n"}, r"edge\.csv\.gz: 1 rows; the lists of numbers promise 6"),
        ({"raw/edge": "0,9\n0,1\n1,2\n0,2\n0,1\n1,2\n"}, "molecule 0: a bond to atom 9, it has 2"),
        ({"raw/graph-label": "1,0\n0,\n1,7\n"}, "label 7"),
        ({"split/scaffold/train": "0\n5\n"}, "positions must be from 0 to 2"),
    ],
)
def test_damaged_molecules_are_named(tmp_path: Path, changed: dict[str, str], said: str) -> None:
    write_molecules(tmp_path / "ogbg_molpcba", **changed)
    with pytest.raises(DataError, match=said):
        load("ogbg-molpcba", tmp_path)


def test_text_is_read_byte_by_byte_and_its_labels_are_the_next_tokens(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    text = "".join(f"line {number} of a text\n" for number in range(100))
    (tmp_path / "text" / "train.txt").write_text(text)
    found = load("text", tmp_path, 16)
    assert isinstance(found.train, Arrays)
    (ids,) = found.train.inputs
    assert bytes(ids.ravel().astype(np.uint8).tolist()).decode() == text[: ids.size]
    assert np.array_equal(ids.ravel()[1:], found.train.labels.ravel()[:-1])
    assert isinstance(found.held_out, Arrays)
    assert bytes(found.held_out.inputs[0][0].astype(np.uint8).tolist()).decode().startswith("line 9")
    with pytest.raises(DataError, match="tokens; a sequence takes 5001"):
        load("text", tmp_path, 5000)


def test_gpt2s_byte_pairs_need_their_two_files(tmp_path: Path) -> None:
    from tokenizers import ByteLevelBPETokenizer

    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "train.txt").write_text("the same words, the same words again\n" * 60)
    with pytest.raises(DataError, match=r"vocab\.json and merges\.txt missing"):
        load("text_bpe", tmp_path, 8)
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train([str(folder / "train.txt")], vocab_size=280, show_progress=False)
    tokenizer.save_model(str(folder))
    found = load("text_bpe", tmp_path, 8)
    assert isinstance(found.train, Arrays)
    assert found.classes == tokenizer.get_vocab_size()
    first = found.train.inputs[0][0].tolist()
    assert tokenizer.decode(first) == "the same words, the same words again\n"[: len(tokenizer.decode(first))]
    cut(folder / "vocab.json")
    with pytest.raises(DataError, match=r"vocab\.json or merges\.txt is damaged .*; download both again"):
        load("text_bpe", tmp_path, 8)


def test_text_is_evaluated_in_batches_no_larger_than_a_device_trains_on(tmp_path: Path) -> None:
    """Full GPT-2 has 200 MB of logits for each sequence."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "train.txt").write_text("".join(f"line {number} of a text\n" for number in range(1000)))
    for batch_size, ranks, samples in ((8, 1, 8), (8, 4, 2), (1000, 1, 500)):
        feed = Feed(load("text", tmp_path, 2), "none", batch_size, 0, ranks=ranks)
        held = feed.dataset.held_out.labels
        parts = [feed._evaluated(number) for number in range(-(-len(held) // feed.evaluated))]
        assert {len(part.labels) for part in parts[:-1]} == {samples}
        assert np.array_equal(np.concatenate([part.labels for part in parts]), held)
    real_pictures.write_idx(tmp_path / "fashion_mnist", 300, 50)
    pictures = Feed(load("fashion_mnist", tmp_path), "none", 8, 0, 28, 28)
    assert len(pictures._evaluated(0).labels) == 50


def test_grey_pictures_fit_networks_for_coloured_ones(tmp_path: Path) -> None:
    real_pictures.write_idx(tmp_path / "fashion_mnist", 300, 50)
    grey = load("fashion_mnist", tmp_path)
    found = enlarged(grey, 3, 32, 32)
    (one,) = Feed(grey, "none", 8, 0, 28, 28).batch(0).inputs
    (other,) = Feed(found, "none", 8, 0, 32, 32).batch(0).inputs
    assert other.shape == (8, 3, 32, 32)
    assert all(np.array_equal(other[:, channel, 2:-2, 2:-2], one[:, 0]) for channel in range(3))
    assert np.unique(other[:, :, :2]).size == 1, "zeros around them"
    assert enlarged(grey, 1, 32, 32) is grey
    assert fitted(BENCHMARKS["cifar10"], "full", found).sizes["full"].inputs.classes == 10


def test_what_is_missing_is_told_with_how_to_get_it(tmp_path: Path) -> None:
    for name in KNOWN:
        if name in ("digits", "fashion_mnist"):  # of packages that may be here
            continue
        with pytest.raises(DataError, match=f"data set {name}: not found; looked in .*none") as caught:
            load(name, tmp_path / "none", 8)
        assert KNOWN[name].get in str(caught.value)


def test_batches_are_the_same_whatever_made_them(tmp_path: Path) -> None:
    real_pictures.write_idx(tmp_path / "fashion_mnist", 300, 50)
    data = load("fashion_mnist", tmp_path)
    feed = Feed(data, "crop_flip", 32, 0, 28, 28)
    alone = [feed.batch(step) for step in range(12)]
    backwards = [Feed(data, "crop_flip", 32, 0, 28, 28).batch(step) for step in reversed(range(12))]
    assert [fed.digest() for fed in backwards[::-1]] == [fed.digest() for fed in alone]
    halves = [Feed(data, "crop_flip", 32, 0, 28, 28, rank, 2).batch(3) for rank in range(2)]
    assert np.array_equal(np.concatenate([half.inputs[0] for half in halves]), alone[3].inputs[0])
    other = Feed(data, "crop_flip", 32, 1, 28, 28)
    assert other.batch(0).digest() != alone[0].digest()


def test_an_epoch_takes_each_sample_once_in_another_order_each_time() -> None:
    first, second = (augment.order(0, epoch, 1000) for epoch in range(2))
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(1000))
    assert (first != second).mean() > 0.99
    numbers = augment.draws(0, 3, np.arange(20000), 4)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert np.allclose(numbers.mean(0), 0.5, atol=0.01)
    assert np.allclose(np.corrcoef(numbers.T), np.eye(4), atol=0.03)
