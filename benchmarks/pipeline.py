"""How fast pictures are made ready for training, beside the loaders that people use, from the same stored pictures.

    .venv/pytorch/bin/python benchmarks/pipeline.py FOLDER [--rounds 12]

FOLDER has train/<class>/ and val/<class>/ with JPEGs; those in train are read. All make batches of 64 at 224 x 224 with
a random resized crop and a flip, but for spdl, which only resizes, on the same number of threads or processes, one for
each CPU. 'arrays' starts from the decoded bytes that Duel stores, 'jpegs' from the files; only Duel's own reader makes
batches that are the same on every machine. grain and torchvision are in PyTorch's environment, spdl must be installed
there (with FFmpeg's libraries). Rounds alternate; printed are pictures a second of one core, and the ratio of Duel to
each by medians with its range. Exit code 1 if another is faster by more than 5 %.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))

import numpy as np

from duel.data import pictures, prepared
from duel.data.feed import Feed
from duel.data.samples import DataError

BATCH, SIZE, MOST = 64, 224, 1.05
THREADS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
Loader = Callable[[], int]  # makes all batches once; returns how many pictures


def duel(data: prepared.Dataset) -> Loader:
    feed = Feed(data, "resized_crop_flip", BATCH, 0, SIZE, SIZE)
    epochs = iter(range(10**6))

    def run() -> int:
        first = next(epochs) * feed.steps
        return sum(len(fed.labels) for fed in feed.batches(first, first + feed.steps, THREADS))

    return run


def torchvision(read: Callable[[int], Any], count: int) -> Loader:
    """PyTorch's DataLoader with torchvision's transforms (v2) of pictures that ``read`` returns as PIL's."""
    import torch
    from torchvision.transforms import v2

    steps = [v2.RandomResizedCrop(SIZE, antialias=True), v2.RandomHorizontalFlip(), v2.ToImage()]
    steps += [v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])]
    transform = v2.Compose(steps)

    class Pictures(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return count // BATCH * BATCH

        def __getitem__(self, place: int) -> Any:
            return transform(read(place))

    loader = torch.utils.data.DataLoader(
        Pictures(),
        BATCH,
        shuffle=True,
        num_workers=THREADS,
        persistent_workers=True,
        drop_last=True,
        multiprocessing_context="fork",  # Pictures is a local class
    )
    return lambda: sum(len(batch) for batch in loader)


def grain(read: Callable[[int], Any], count: int) -> Loader:
    """grain's own map, shuffle and batch, a picture at a time, with Pillow."""
    import grain as package

    generator = np.random.default_rng(0)

    def one(place: int) -> Any:
        picture = read(place)
        width, height = picture.size
        area = width * height * generator.uniform(0.08, 1)
        side = min(width, height, max(1, round(area**0.5)))
        left, top = (int(generator.integers(most - side + 1)) for most in (width, height))
        cut = np.asarray(picture.resize((SIZE, SIZE), 2, (left, top, left + side, top + side)))
        cut = cut[:, ::-1] if generator.random() < 0.5 else cut
        return ((cut - np.float32(prepared.MEAN)) / np.float32(prepared.STD)).transpose(2, 0, 1).astype(np.float32)

    whole = package.MapDataset.range(count // BATCH * BATCH).shuffle(0).map(one).batch(BATCH)
    options = package.ReadOptions(num_threads=THREADS, prefetch_buffer_size=2 * THREADS)
    return lambda: sum(len(batch) for batch in whole.to_iter_dataset(options))


def spdl(paths: list[str]) -> Loader:
    """spdl's own pipeline, which decodes files with FFmpeg in threads; it resizes whole pictures."""
    import spdl.io
    import spdl.pipeline

    config = spdl.io.get_video_filter_desc(scale_width=SIZE, scale_height=SIZE, pix_fmt="rgb24")

    def load(batch: list[str]) -> int:
        buffer = spdl.io.load_image_batch(batch, width=None, height=None, filter_desc=config)
        array = spdl.io.to_numpy(buffer).astype(np.float32)
        return len(array)

    def run() -> int:
        batches: Iterator[list[str]] = (paths[at : at + BATCH] for at in range(0, len(paths) - BATCH + 1, BATCH))
        pipeline = spdl.pipeline.PipelineBuilder().add_source(batches).pipe(load, concurrency=THREADS).add_sink(4)
        with (built := pipeline.build(num_threads=THREADS)).auto_stop():
            return sum(built)

    return run


def loaders(folder: Path, work: Path) -> dict[str, Loader]:
    from PIL import Image

    try:
        source = pictures.of_folder(folder)
    except DataError as error:
        sys.exit(str(error))
    if source is None:
        sys.exit(f"{folder}: no train/<class>/ in it")
    prepared.prepare(source, work / "set", False, lambda text: None)
    data = prepared.load("set", work / "set")
    paths = [one.where for one in source.splits["train"]()]

    def stored(place: int) -> Any:
        return Image.fromarray(data.train.at(np.array([place]))[0])

    def file(place: int) -> Any:
        return Image.open(paths[place]).convert("RGB")

    found = {"duel, arrays": duel(data), "torchvision's DataLoader, arrays": torchvision(stored, len(paths))}
    found |= {"grain, arrays": grain(stored, len(paths))}
    found |= {"torchvision's DataLoader, jpegs": torchvision(file, len(paths)), "grain, jpegs": grain(file, len(paths))}
    try:
        found["spdl, jpegs"] = spdl(paths)
    except ImportError as error:
        print(f"spdl: NOT MEASURED ({error})")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=12)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        found = loaders(args.folder, Path(work))
        rates: dict[str, list[float]] = {name: [] for name in found}
        for turn in range(args.rounds + 1):  # the first starts workers and fills caches
            for name in list(found) if turn % 2 else list(found)[::-1]:
                start = time.perf_counter()
                count = found[name]()
                if turn:
                    rates[name].append(count / (time.perf_counter() - start) / THREADS)
    own = rates["duel, arrays"]
    late = False
    for name, each in rates.items():
        ratios = [mine / theirs for mine, theirs in zip(own, each, strict=True)]
        ratio = statistics.median(ratios)
        late |= ratio < 1 / MOST
        spread = f"[{min(ratios):.3f}, {max(ratios):.3f}]"
        print(f"{name}: {statistics.median(each):,.0f} a core; Duel / it {ratio:.3f} {spread}")
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main())
