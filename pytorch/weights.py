"""Load and export the weights of a PyTorch model, under torchvision's names and in its layouts.

They are the ``state_dict`` itself, without ``num_batches_tracked``: it counts steps and changes nothing at a fixed
momentum.

``python pytorch/weights.py --benchmark B --source FILE --folder DIR`` turns a checkpoint into the safetensors file that
both sides read; ``main.py --weights`` calls it.
"""

import argparse
import contextlib
import hashlib
import http.client
import re
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch
from torch import nn

if __name__ == "__main__":  # last on the path, as in run.py
    sys.path.append(str(Path(__file__).resolve().parent.parent))

from duel.catalogue import BENCHMARKS
from duel.measure import parameters

_VALID = "valid is what torch.save(model.state_dict(), FILE) writes, also under the key 'state_dict' or 'model'"
# torchvision's published ViT predates the newer of these layer names.
_OLD_NAMES = {".mlp.linear_1.": ".mlp.0.", ".mlp.linear_2.": ".mlp.3."}


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every parameter and running statistic."""
    return {name: tuple(tensor.shape) for name, tensor in _tensors(model).items()}


def trainable(model: nn.Module) -> tuple[str, ...]:
    """Return the names of what the optimizer changes: all but the running statistics."""
    return tuple(name for name, _ in model.named_parameters())


def load(model: nn.Module, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Set every parameter and running statistic; ValueError lists everything missing, extra or of another shape."""
    parameters.check(shapes(model), arrays)
    for name, tensor in _tensors(model).items():
        tensor.copy_(torch.from_numpy(arrays[name]))


def export(model: nn.Module) -> dict[str, npt.NDArray[Any]]:
    """Return copies of every parameter and running statistic."""
    return {name: tensor.cpu().numpy().copy() for name, tensor in _tensors(model).items()}


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the model's own tensors, detached: writing into them changes the model."""
    return {name: tensor for name, tensor in model.state_dict().items() if not name.endswith("num_batches_tracked")}


def _convert(benchmark: str, size: str, source: str, folder: Path) -> Path:
    """Write the weights of ``source`` to a safetensors file in ``folder``, and return its path.

    The file is named after the hash of ``source``, which is "pretrained", a checkpoint or a safetensors file. Raises
    ValueError, listing every misfit at once, if the source cannot be read or does not fit the benchmark in this size.
    """
    import network  # which imports this module

    file = _published(benchmark) if source == "pretrained" else Path(source)
    found = _with_names_of_now(_read(file))
    unfit = [f"{name} ({tensor.dtype})" for name, tensor in found.items() if not tensor.is_floating_point()]
    if unfit:
        raise ValueError(f"{file}: weights are floating-point numbers, and not so {', '.join(unfit)}")
    arrays = {name: tensor.float().numpy() for name, tensor in found.items()}
    try:
        parameters.check(shapes(network.build(BENCHMARKS[benchmark], size)), arrays)
    except ValueError as error:
        raise ValueError(f"{file}, for {benchmark} in size {size}: {error}") from error
    output = folder / f"{benchmark}-{_sha256(file)[:12]}.safetensors"
    parameters.write(output, arrays)
    return output


def _published(benchmark: str) -> Path:
    """Return torchvision's checkpoint, downloaded if missing: the first version, which most published figures use."""
    import torchvision

    url = torchvision.models.get_model_weights(BENCHMARKS[benchmark].torchvision).IMAGENET1K_V1.url
    file = Path(torch.hub.get_dir()) / "checkpoints" / url.rpartition("/")[2]
    if not file.exists():
        socket.setdefaulttimeout(60)  # otherwise a network that drops everything would hang this forever
        try:
            with contextlib.redirect_stdout(sys.stderr):  # stdout is for the result
                torch.hub.load_state_dict_from_url(url, weights_only=True, check_hash=True, progress=False)
        except (OSError, RuntimeError, http.client.HTTPException) as error:
            raise ValueError(
                f"{url} could not be downloaded ({error}); fetch it where that works, and put it at {file}, "
                "or take it by --weights FILE"
            ) from error
    if not _sha256(file).startswith(file.stem.rpartition("-")[2]):
        raise ValueError(f"{file} is damaged: its hash is not the one in its name; delete it")
    return file


def _sha256(file: Path) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _read(file: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint or a safetensors file, by name. No code in either is executed."""
    file.open("rb").close()  # raises OSError if it cannot be opened: below, that would be taken for damage
    if file.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return load_file(file)
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged, or no safetensors file: {error}") from error
    try:
        # torchvision's reference scripts store their arguments next to the model, in a plain Namespace.
        with torch.serialization.safe_globals([argparse.Namespace]):
            found = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # reading an arbitrary file as a pickle may raise anything
        raise ValueError(f"{file} {_fault(file, error)}; {_VALID}") from error
    for key in ("state_dict", "model"):
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    if not isinstance(found, Mapping):
        raise ValueError(f"{file} holds no dict of tensors, but {type(found).__name__}; {_VALID}")
    others = [f"{name!r} is {type(value).__name__}" for name, value in found.items() if not torch.is_tensor(value)]
    if others or not found:
        raise ValueError(f"{file} holds no dict of tensors: {', '.join(others[:3]) or 'it is empty'}; {_VALID}")
    return {str(name): tensor for name, tensor in found.items()}


def _fault(file: Path, error: Exception) -> str:
    """Return what is wrong with a file that torch.load rejected."""
    if code := re.search(r"GLOBAL (\S+)", str(error)):
        return f"holds code ({code[1]}), which is not executed"
    with open(file, "rb") as opened:
        begins = opened.read(2)
    if not (begins == b"PK" or begins[:1] == b"\x80"):  # neither an archive nor an older checkpoint's pickle
        return "is no checkpoint of PyTorch"
    words = str(error).partition("\n")[0] or type(error).__name__  # it may be the machine, not the file
    return f"could not be read ({words}): truncated, damaged or of another kind"


def _with_names_of_now(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {}
    for name, tensor in tensors.items():
        if not name.endswith("num_batches_tracked"):
            for old, new in _OLD_NAMES.items():
                name = name.replace(old, new)
            found[name] = tensor
    return found


def _main() -> int:
    parser = argparse.ArgumentParser(description="Make a safetensors file of a checkpoint.")
    parser.add_argument("--benchmark", choices=tuple(BENCHMARKS), required=True)
    parser.add_argument("--size", choices=("full", "tiny"), default="full")
    parser.add_argument("--source", required=True, help="a checkpoint, a .safetensors file, or 'pretrained'")
    parser.add_argument("--folder", type=Path, required=True, help="where the new file goes; its path is printed")
    args = parser.parse_args()
    try:
        print(_convert(args.benchmark, args.size, args.source, args.folder))
    except (ValueError, OSError) as error:
        print(error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(_main())
