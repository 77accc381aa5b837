"""Plain text as sequences of tokens: its bytes, or GPT-2's byte pairs where that tokenizer's files are there."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from duel.data.samples import Arrays, DataError, Dataset

BYTES = 256
HELD_OUT = 0.1  # of a text that comes without a file to hold out
TRAIN, HELD = "train.txt", "held_out.txt"
TOKENIZER = ("vocab.json", "merges.txt")  # as GPT-2's are published

Tokens = npt.NDArray[np.int32]


def load(folder: Path, name: str, length: int, pairs: bool) -> Dataset | None:
    """Return the text in ``folder`` in sequences of ``length`` tokens, or None without one; ``pairs``: GPT-2's.

    Each token's label is the next one. Without ``held_out.txt``, the last tenth of ``train.txt`` is held out.
    """
    path = folder / TRAIN
    if not path.is_file():
        return None
    held = folder / HELD
    texts = [path.read_bytes(), held.read_bytes()] if held.is_file() else _cut(path.read_bytes())
    if pairs:
        train, held_out = (_pairs(folder, text) for text in texts)
        vocabulary = _size(folder)
    else:
        train, held_out = (np.frombuffer(text, np.uint8).astype(np.int32) for text in texts)
        vocabulary = BYTES
    source = f"{path}: {len(train):,} tokens, {vocabulary:,} kinds of them"
    parts = [_sequences(f"{folder}: {what}", tokens, length) for what, tokens in ((TRAIN, train), (HELD, held_out))]
    return Dataset(name, source, parts[0], parts[1], vocabulary)


def _cut(text: bytes) -> list[bytes]:
    end = int(len(text) * (1 - HELD_OUT))
    start = text.rfind(b"\n", end - end // 20, end) + 1 or end  # at a line, if one begins near
    return [text[:start], text[start:]]


def _sequences(where: str, tokens: Tokens, length: int) -> Arrays:
    count = (len(tokens) - 1) // length
    if count < 1:
        raise DataError(f"{where}: {len(tokens)} tokens; a sequence takes {length + 1}")
    inputs = tokens[: count * length].reshape(count, length)
    return Arrays((inputs,), tokens[1 : count * length + 1].reshape(count, length))


def _tokenizer(folder: Path) -> Any:
    missing = [name for name in TOKENIZER if not (folder / name).is_file()]
    if missing:
        raise DataError(f"{folder}: {' and '.join(missing)} missing; GPT-2's tokenizer is published as these two files")
    try:
        from tokenizers import ByteLevelBPETokenizer
    except ImportError:
        raise DataError("GPT-2's byte pairs need the package tokenizers; --dataset text needs none") from None
    try:
        return ByteLevelBPETokenizer(*(str(folder / name) for name in TOKENIZER))
    except Exception as error:  # the library has no class of its own for a damaged file
        raise DataError(
            f"{folder}: {' or '.join(TOKENIZER)} is damaged or cannot be read ({error}); download both again"
        ) from None


def _pairs(folder: Path, text: bytes) -> Tokens:
    tokenizer = _tokenizer(folder)
    lines = text.decode("utf-8", errors="replace").splitlines(keepends=True)
    encoded = tokenizer.encode_batch(lines)
    return np.fromiter((token for line in encoded for token in line.ids), np.int32)


def _size(folder: Path) -> int:
    return int(_tokenizer(folder).get_vocab_size())
