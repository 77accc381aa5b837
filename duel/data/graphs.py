"""Graphs as they are published: Cora in LINQS' text form, molecules in OGB's CSV form."""

import csv
import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from duel.data.samples import Arrays, DataError, Dataset, check_labels

TRAINED_A_CLASS, HELD_OUT = 20, 1000  # nodes, as in Yang et al. 2016 (arXiv:1603.08861)
SPLIT_SEED = 0
KEPT = 0.99  # share of the molecules that must fit the padded size
OGB_FILES = ("num-node-list", "num-edge-list", "node-feat", "edge", "edge-feat", "graph-label")

Ints = npt.NDArray[np.int64]


def cora(folder: Path, name: str) -> Dataset | None:
    """Return the citation graph in ``folder``/<name>.content and .cites, or None without such files.

    One line of .content is a paper, its words (0 or 1) and its class; one of .cites is the cited and the citing paper.
    Features are the words, each row divided by its sum (Kipf and Welling 2016). LINQS publish no split: the first 20
    papers of each class, in a fixed random order, are trained on and 1,000 others held out (half of the rest if there
    are fewer), which is the size of the usual split but not the same papers.
    """
    content, cites = (folder / f"{name}.{kind}" for kind in ("content", "cites"))
    if not content.is_file():
        return None
    if not cites.is_file():
        raise DataError(f"{folder}: {content.name} is there, {cites.name} is missing")
    lines = [line.split() for line in content.read_text(errors="replace").splitlines() if line.strip()]
    if not lines:
        raise DataError(f"{content}: no paper in it; download and unpack it again")
    width = len(lines[0])
    for number, line in enumerate(lines, 1):
        if len(line) != width or width < 3:
            raise DataError(f"{content}, line {number}: {len(line)} fields; the first line has {width}")
    ids = {line[0]: place for place, line in enumerate(lines)}
    if len(ids) < len(lines):
        raise DataError(f"{content}: {len(lines) - len(ids)} papers are listed more than once; download it again")
    classes = sorted({line[-1] for line in lines})
    try:
        words = np.array([line[1:-1] for line in lines], np.float32)
    except ValueError as error:
        raise DataError(f"{content}: {error}") from None
    labels = np.array([classes.index(line[-1]) for line in lines], np.int32)
    senders, receivers, unknown = _citations(cites, ids)
    weights = _symmetric(senders, receivers, len(ids))
    sums = words.sum(1, keepdims=True)
    nodes = np.divide(words, sums, out=np.zeros_like(words), where=sums > 0)
    inputs = tuple(array[None] for array in (nodes, senders.astype(np.int32), receivers.astype(np.int32), weights))
    train, held_out = _split(labels, len(classes))
    source = f"{content}: {len(ids):,} papers, {len(senders) - len(ids):,} links both ways"
    source += f", without {unknown} citations of papers that it does not have" if unknown else ""
    return Dataset(name, source, Arrays(inputs, train[None]), Arrays(inputs, held_out[None]), len(classes))


def _citations(path: Path, ids: dict[str, int]) -> tuple[Ints, Ints, int]:
    """Return senders and receivers of each link, both ways and with self-loops, and how many named unknown papers."""
    pairs = set()
    unknown = 0
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
        fields = line.split()
        if not fields:
            continue
        if len(fields) != 2:
            raise DataError(f"{path}, line {number}: {len(fields)} fields; a citation has two")
        one, other = (ids.get(field) for field in fields)
        if one is None or other is None:
            unknown += 1
        elif one != other:
            pairs |= {(one, other), (other, one)}
    pairs |= {(place, place) for place in ids.values()}
    found = np.array(sorted(pairs, key=lambda pair: (pair[1], pair[0])), np.int64)  # by receiver
    return found[:, 0], found[:, 1], unknown


def _symmetric(senders: Ints, receivers: Ints, nodes: int) -> npt.NDArray[np.float32]:
    """Return the edges' weights of Kipf and Welling 2016, equation 2."""
    degree = np.bincount(receivers, minlength=nodes)
    return np.asarray(1 / np.sqrt(degree[senders] * degree[receivers]), np.float32)


def _split(labels: npt.NDArray[np.int32], classes: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Return the labels for training and those held out, -1 for all other nodes."""
    # RandomState: its stream is frozen (NEP 19)
    order = np.random.RandomState(SPLIT_SEED).permutation(len(labels))
    chosen = np.concatenate([order[labels[order] == each][:TRAINED_A_CLASS] for each in range(classes)])
    rest = order[~np.isin(order, chosen)]
    held = rest[: HELD_OUT if len(rest) > 2 * HELD_OUT else len(rest) // 2]
    if not len(held):
        raise DataError(f"{len(labels)} nodes: none is left to hold out beside {TRAINED_A_CLASS} a class")
    found = np.full((2, len(labels)), -1, np.int32)
    found[0, chosen], found[1, held] = labels[chosen], labels[held]
    return found[0], found[1]


def molecules(folder: Path, name: str) -> Dataset | None:
    """Return OGB's data set in ``folder``/raw and ``folder``/split, or None without such folders.

    Each bond is listed once and becomes two edges. All are padded to one size, which 99 % of them fit; larger ones are
    left out and counted. Labels that are missing are -1.
    """
    raw = folder / "raw"
    if not raw.is_dir():
        return None
    tables = {each: _table(raw / f"{each}.csv.gz") for each in OGB_FILES}
    nodes, bonds = (tables[each][:, 0].astype(np.int64) for each in ("num-node-list", "num-edge-list"))
    labels = np.nan_to_num(tables["graph-label"], nan=-1).astype(np.int32)
    for each, rows in (("node-feat", nodes.sum()), ("edge", bonds.sum()), ("edge-feat", bonds.sum())):
        if len(tables[each]) != rows:
            raise DataError(f"{raw / each}.csv.gz: {len(tables[each])} rows; the lists of numbers promise {rows}")
    if len(labels) != len(nodes) or len(bonds) != len(nodes):
        raise DataError(f"{raw}: {len(nodes)} graphs by num-node-list, {len(labels)} by graph-label")
    check_labels(f"{raw}/graph-label.csv.gz", np.where(labels < 0, 0, labels).ravel(), 2)
    room = int(np.quantile(nodes, KEPT, method="higher")) + 1, 2 * int(np.quantile(bonds, KEPT, method="higher"))
    parts = {split: _positions(folder, names, len(nodes)) for split, names in _SPLITS.items()}
    fits = (nodes < room[0]) & (2 * bonds <= room[1])
    made = {split: _padded(tables, nodes, bonds, labels, chosen[fits[chosen]], room) for split, chosen in parts.items()}
    left_out = sum(int((~fits[chosen]).sum()) for chosen in parts.values())
    source = f"{folder}: {len(nodes):,} molecules, padded to {room[0]} atoms and {room[1]} edges"
    source += f", without {left_out} larger ones" if left_out else ""
    return Dataset(name, source, made["train"], made["held_out"], 0)


_SPLITS = {"train": ("train",), "held_out": ("test", "valid")}


def _positions(folder: Path, names: tuple[str, ...], count: int) -> Ints:
    found = sorted(path for name in names for path in folder.glob(f"split/*/{name}.csv.gz"))
    if not found:
        raise DataError(f"{folder}: no split/*/{names[0]}.csv.gz, which says which molecules are in which split")
    positions = _table(found[0])[:, 0].astype(np.int64)
    if len(positions) == 0 or positions.min() < 0 or positions.max() >= count:
        raise DataError(f"{found[0]}: positions must be from 0 to {count - 1}")
    return positions


def _table(path: Path) -> npt.NDArray[np.float64]:
    """Return the numbers of a .csv.gz without a header; an empty field is NaN."""
    if not path.is_file():
        raise DataError(f"{path} is missing")

    def rows() -> Iterator[list[float]]:
        with gzip.open(path, "rt", newline="") as file:
            for line in csv.reader(file):
                yield [float(field) if field else float("nan") for field in line]

    try:
        found = list(rows())
        return np.array(found, np.float64).reshape(len(found), -1)
    except (csv.Error, zlib.error, ValueError, EOFError, OSError) as error:
        raise DataError(f"{path}: truncated or damaged ({error}); download it again") from None


def _padded(
    tables: dict[str, npt.NDArray[np.float64]],
    nodes: Ints,
    bonds: Ints,
    labels: npt.NDArray[np.int32],
    chosen: Ints,
    room: tuple[int, int],
) -> Arrays:
    """Return the ``chosen`` molecules in one size, as ``duel.measure.batches`` pads them."""
    of_nodes, of_edges = tables["node-feat"], tables["edge-feat"]
    node_starts, bond_starts = np.cumsum(nodes) - nodes, np.cumsum(bonds) - bonds
    count = len(chosen)
    node_in = np.zeros((count, room[0], of_nodes.shape[1]), np.float32)
    edge_in = np.zeros((count, room[1], of_edges.shape[1]), np.float32)
    ends = np.full((2, count, room[1]), room[0] - 1, np.int32)
    node_mask, edge_mask = np.zeros((count, room[0]), np.float32), np.zeros((count, room[1]), np.float32)
    for place, number in enumerate(chosen.tolist()):
        atoms, links = int(nodes[number]), int(bonds[number])
        bond = slice(int(bond_starts[number]), int(bond_starts[number]) + links)
        once = tables["edge"][bond].astype(np.int64).T
        if once.size and (once.min() < 0 or once.max() >= atoms):
            raise DataError(f"molecule {number}: a bond to atom {once.max()}, it has {atoms}")
        both = np.concatenate([once, once[::-1]], axis=1)
        by_receiver = np.argsort(both[1], kind="stable")
        ends[:, place, : 2 * links] = both[:, by_receiver]
        edge_in[place, : 2 * links] = np.concatenate([of_edges[bond]] * 2)[by_receiver]
        start = int(node_starts[number])
        node_in[place, :atoms] = of_nodes[start : start + atoms]
        node_mask[place, :atoms], edge_mask[place, : 2 * links] = 1, 1
    return Arrays((node_in, edge_in, ends[0], ends[1], node_mask, edge_mask), labels[chosen])
