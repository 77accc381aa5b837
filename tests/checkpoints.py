"""Checkpoints as torchvision and torch.save make them, and how a test asks what is in one."""

import hashlib
import subprocess
from pathlib import Path

import numpy as np
from conftest import ROOT, clean_environment, interpreter

# Random throughout: what a fresh model holds (zeros, ones) would not show a mix-up.
MAKE = """
import argparse, sys
import numpy, torch
from torchvision.models import mobilenet_v3_small
from torchvision.models.vision_transformer import VisionTransformer

folder = sys.argv[1]

def state(model):
    torch.manual_seed(0)
    tensors = model.state_dict()
    for tensor in tensors.values():
        if tensor.is_floating_point():
            tensor.copy_(torch.rand(tensor.shape))
    numpy.savez(f"{folder}/{type(model).__name__}.npz", **{n: t.numpy() for n, t in tensors.items() if t.ndim})
    return tensors

mobilenet = state(mobilenet_v3_small(weights=None))
torch.save(mobilenet, f"{folder}/mobilenet.pth")
del mobilenet["features.0.0.weight"], mobilenet["classifier.3.bias"]
mobilenet |= {"head.bias": torch.zeros(2), "classifier.0.bias": torch.zeros(7)}
torch.save(mobilenet, f"{folder}/misfit.pth")

vit = state(VisionTransformer(32, 8, 2, 2, 32, 64, num_classes=10))
old = {name.replace("mlp.0", "mlp.linear_1").replace("mlp.3", "mlp.linear_2"): vit[name] for name in vit}
assert len(old.keys() - vit.keys()) == 8
torch.save(old, f"{folder}/plain.pth")
torch.save({"state_dict": vit, "epoch": 3}, f"{folder}/state_dict.pth")
torch.save({"model": vit, "optimizer": {"state": {}}, "args": argparse.Namespace(lr=0.1)}, f"{folder}/references.pth")
torch.save(vit, f"{folder}/legacy.pt", _use_new_zipfile_serialization=False)
torch.save([1, 2], f"{folder}/list.pth")
torch.save({"epoch": 3, "best": vit["class_token"]}, f"{folder}/mixed.pth")
torch.save(VisionTransformer(32, 8, 2, 2, 32, 64), f"{folder}/module.pth")
"""
LOAD = """
import sys
sys.path.append(".")
import network, numpy, weights
from pathlib import Path
from duel.catalogue import BENCHMARKS
from duel.measure import parameters
benchmark, size, file, output = sys.argv[1:]
model = network.build(BENCHMARKS[benchmark], size)
weights.load(model, parameters.read(Path(file)))
numpy.savez(output, **weights.export(model))
"""
READ = "from safetensors.numpy import load_file; import numpy; numpy.savez(sys.argv[2], **load_file(sys.argv[1]))"
FROM_SEED = """
import sys
sys.path.append(".")
import network, weights
from pathlib import Path
from duel.catalogue import BENCHMARKS
from duel.measure import parameters
name = sys.argv[2] if len(sys.argv) > 2 else "mnist"
shapes = weights.shapes(network.build(BENCHMARKS[name], "tiny"))
parameters.write(Path(sys.argv[1]), parameters.initialise(shapes, 1))
print(*(parameters.sha256(parameters.initialise(shapes, seed)) for seed in (0, 1)))
"""
MNIST = ("--benchmark", "mnist", "--use_case", "1", "--preset", "smoke")
MOBILENET = ("--benchmark", "mobilenet_v3_small", "--use_case", "1", "--dry_run")
TINY_VIT = ("--benchmark", "vit_b16", "--use_case", "1", "--dry_run", "--preset", "smoke")


def python(framework: str, code: str, *arguments: object, root: Path = ROOT) -> str:
    """What ``code`` prints in the framework's environment, beside the modules of its side."""
    beside = f"import sys; sys.path[0] = {framework!r}\n{code}"
    done = subprocess.run(
        [interpreter(framework), "-W", "error", "-c", beside, *map(str, arguments)],
        cwd=root,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def arrays(file: Path) -> dict[str, np.ndarray]:
    with np.load(file) as stored:
        return dict(stored)


def converted(checkout: Path, benchmark: str, source: Path) -> Path:
    """Where main.py has put it: it is the only one, and the script of each side names it."""
    name = f"results/weights/{benchmark}-{hashlib.sha256(source.read_bytes()).hexdigest()[:12]}.safetensors"
    assert [path.name for path in (checkout / "results" / "weights").iterdir()] == [Path(name).name]
    scripts = list((checkout / "slurm_scripts").glob("*.sh"))
    assert len(scripts) == 2
    for script in scripts:
        assert f" --weights={name} " in script.read_text()
    return checkout / name


def same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> bool:
    return found.keys() == wanted.keys() and all(np.array_equal(found[name], wanted[name]) for name in wanted)


def refused(done: "subprocess.CompletedProcess[str]", *said: str) -> None:
    assert done.returncode == 2, done.stdout + done.stderr
    for words in said:
        assert words in done.stderr
    assert "Traceback" not in done.stderr + done.stdout


def nothing_begun(checkout: Path) -> bool:
    left = [*checkout.glob("results/runs/*"), *checkout.glob("slurm_scripts/*.sh"), *checkout.glob("results/weights/*")]
    return left == []
