"""--weights: what a checkpoint holds is what both sides start from, and what is none is refused in words."""

import hashlib
import http.server
import json
import os
import pickle
import shutil
import subprocess
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from checkpoints import (
    FROM_SEED,
    LOAD,
    MAKE,
    MNIST,
    MOBILENET,
    READ,
    TINY_VIT,
    arrays,
    converted,
    nothing_begun,
    python,
    refused,
    same,
)
from conftest import ROOT, Main, clean_environment, interpreter, rows_of

from duel.catalogue import BENCHMARKS, DEVICE_KINDS, FRAMEWORKS, PRECISIONS, PRESETS
from duel.errors import UserError
from duel.job import Job
from duel.launch import cluster, submit


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of checkpoints as torchvision and torch.save make them, and of what they hold, as npz."""
    folder = tmp_path_factory.mktemp("check points")
    python("pytorch", MAKE, folder)
    return folder


def test_both_sides_hold_exactly_what_torchvision_saved(main: Main, checkout: Path, made: Path, tmp_path: Path) -> None:
    done = main(*MOBILENET, "--weights", str(made / "mobilenet.pth"))
    assert done.returncode == 0, done.stderr
    file = converted(checkout, "mobilenet_v3_small", made / "mobilenet.pth")
    wanted = arrays(made / "MobileNetV3.npz")
    assert sum(array.size for name, array in wanted.items() if ".running_" not in name) == 2_542_856
    for framework in FRAMEWORKS:
        python(framework, LOAD, "mobilenet_v3_small", "full", file, tmp_path / f"{framework}.npz", root=checkout)
        assert same(arrays(tmp_path / f"{framework}.npz"), wanted)


@pytest.mark.parametrize("name", ["plain.pth", "state_dict.pth", "references.pth", "legacy.pt"])
def test_each_way_to_save_a_checkpoint_gives_the_same_weights(
    main: Main, checkout: Path, made: Path, tmp_path: Path, name: str
) -> None:
    done = main(*TINY_VIT, "--weights", str(made / name))
    assert done.returncode == 0, done.stderr
    file = converted(checkout, "vit_b16", made / name)
    wanted = arrays(made / "VisionTransformer.npz")
    python("jax", READ, file, tmp_path / "read.npz")
    assert same(arrays(tmp_path / "read.npz"), wanted)
    for framework in FRAMEWORKS if name == "plain.pth" else ():
        python(framework, LOAD, "vit_b16", "tiny", file, tmp_path / f"{framework}.npz", root=checkout)
        assert same(arrays(tmp_path / f"{framework}.npz"), wanted)


def test_safetensors_of_half_precision_are_taken_as_float32(
    main: Main, checkout: Path, made: Path, tmp_path: Path
) -> None:
    code = """
import torch
from safetensors.torch import save_file
tensors = torch.load(sys.argv[1], weights_only=True)
save_file({name: t.bfloat16() if t.is_floating_point() else t for name, t in tensors.items()}, sys.argv[2])
"""
    file = tmp_path / "half.safetensors"
    python("pytorch", code, made / "mobilenet.pth", file)
    assert main(*MOBILENET, "--weights", str(file)).returncode == 0
    output = converted(checkout, "mobilenet_v3_small", file)
    python("jax", LOAD, "mobilenet_v3_small", "full", output, tmp_path / "jax.npz", root=checkout)
    wanted, found = arrays(made / "MobileNetV3.npz"), arrays(tmp_path / "jax.npz")
    assert found.keys() == wanted.keys()
    for name, array in found.items():
        assert array.dtype == np.float32
        assert np.abs(array - wanted[name]).max() <= 2**-8  # of U(0, 1), and bfloat16 keeps 8 bits
        assert np.all(array.view(np.uint32) & 0xFFFF == 0)


def test_every_tensor_that_does_not_fit_is_listed_at_once(main: Main, checkout: Path, made: Path) -> None:
    done = main(*MOBILENET, "--weights", str(made / "misfit.pth"))
    refused(done, "misfit.pth, for mobilenet_v3_small in size full: the weights do not fit the model:")
    assert sorted(line.strip() for line in done.stderr.splitlines()[1:]) == [
        "extra: head.bias (2,)",
        "missing: classifier.3.bias (1000,)",
        "missing: features.0.0.weight (16, 3, 3, 3)",
        "wrong shape: classifier.0.bias (7,), the model has (1024,)",
    ]
    assert nothing_begun(checkout)


class Code:
    """Unpickled, it makes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.file),)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "truncated.pth",
            "truncated, damaged or of another kind; valid is what torch.save(model.state_dict(), FILE) writes",
        ),
        ("shortened.pth", "truncated, damaged or of another kind; valid"),
        ("text.pth", "is no checkpoint of PyTorch; valid"),
        ("empty.pth", "is no checkpoint of PyTorch; valid"),
        ("code.pth", "mkdir), which is not executed; valid"),
        ("newer code.pth", "truncated, damaged or of another kind; valid"),
        ("module.pth", "holds code (torchvision.models.vision_transformer.VisionTransformer), which is not executed"),
        ("list.pth", "holds no dict of tensors, but list; valid"),
        ("mixed.pth", "holds no dict of tensors: 'epoch' is int; valid"),
        ("text.safetensors", "is damaged, or no safetensors file"),
        ("absent.pth", "no such file; valid: 'pretrained', a checkpoint in torchvision's format"),
    ],
)
def test_what_is_no_checkpoint_is_said_in_one_line_and_not_executed(
    main: Main, checkout: Path, made: Path, tmp_path: Path, name: str, said: str
) -> None:
    whole = (made / "mobilenet.pth").read_bytes()
    executed = tmp_path / "executed"
    contents = {
        "truncated.pth": whole[: len(whole) // 2],
        "shortened.pth": whole[:-10],
        "text.pth": b"# hello\nThese are no weights.\n",
        "empty.pth": b"",
        "code.pth": pickle.dumps(Code(executed), protocol=2),  # as in a checkpoint
        "newer code.pth": pickle.dumps(Code(executed)),
        "text.safetensors": b"These are no weights either.\n",
    }
    file = tmp_path / name
    if name in contents:
        file.write_bytes(contents[name])
    elif (made / name).exists():
        shutil.copy(made / name, file)
    done = main(*MOBILENET, "--weights", str(file))
    refused(done, said)
    assert len(done.stderr.splitlines()) == 1
    assert nothing_begun(checkout)
    if name.endswith("code.pth"):
        assert not executed.exists()
        pickle.loads(file.read_bytes())
        assert executed.exists(), "the test's own file would not have shown it"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            MNIST,
            "torchvision has none for mnist; valid: resnet50, vit_b16, mobilenet_v3_small, efficientnet_b0, or a file",
        ),
        (TINY_VIT, "torchvision's are for size full, but the preset uses size tiny"),
    ],
)
def test_pretrained_says_where_there_is_nothing_to_take(
    main: Main, checkout: Path, arguments: tuple[str, ...], said: str
) -> None:
    refused(main(*arguments, "--weights", "pretrained"), f"--weights pretrained: {said}")
    assert nothing_begun(checkout)


def test_a_failed_download_names_the_url_the_file_and_the_way_out(main: Main, checkout: Path, tmp_path: Path) -> None:
    nowhere = {"https_proxy": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9", "no_proxy": "", "NO_PROXY": ""}
    done = main(*MOBILENET, "--weights", "pretrained", TORCH_HOME=str(tmp_path), **nowhere)
    name = "mobilenet_v3_small-047dcff4.pth"
    refused(done, f"https://download.pytorch.org/models/{name} could not be downloaded", "--weights FILE")
    assert str(tmp_path / "hub" / "checkpoints" / name) in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert nothing_begun(checkout)


def test_pretrained_is_downloaded_once_and_checked(made: Path, tmp_path: Path) -> None:
    """From a server here, under a name with its hash as torchvision's have it."""
    digest = hashlib.sha256((made / "mobilenet.pth").read_bytes()).hexdigest()
    name = f"mobilenet_v3_small-{digest[:8]}.pth"
    shutil.copy(made / "mobilenet.pth", tmp_path / name)
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    code = """
import os, sys, types
sys.path.append(".")
folder, url = sys.argv[1:]
os.environ |= {"TORCH_HOME": folder, "no_proxy": "*"}
import torchvision, weights
asked = []
def get_model_weights(name):
    asked.append(name)
    return types.SimpleNamespace(IMAGENET1K_V1=types.SimpleNamespace(url=url))
torchvision.models.get_model_weights = get_model_weights
sys.argv = ["", "--benchmark", "mobilenet_v3_small", "--source", "pretrained", "--folder", folder]
code = weights._main()
print(code, *asked)
"""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/{name}"
        first = python("pytorch", code, tmp_path, url).splitlines()
        server.shutdown()
    output = tmp_path / f"mobilenet_v3_small-{digest[:12]}.safetensors"
    assert first == [str(output), "0 mobilenet_v3_small"]
    assert output.exists()
    assert python("pytorch", code, tmp_path, url).splitlines() == first  # the server is gone
    stored = tmp_path / "hub" / "checkpoints" / name
    stored.write_bytes(stored.read_bytes()[:-10])
    damaged = python("pytorch", code, tmp_path, url).splitlines()
    assert damaged == [
        f"{stored} is damaged: its hash is not the one in its name; delete it",
        "2 mobilenet_v3_small",
    ]


def test_both_rows_of_a_run_start_from_the_file(main: Main, checkout: Path, tmp_path: Path) -> None:
    file = tmp_path / "other seed.safetensors"
    of_seed, of_file = python("pytorch", FROM_SEED, file).split()
    assert of_seed != of_file
    done = main(*MNIST, "--weights", str(file), "--wait")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(checkout)
    assert {row["framework"]: row["weights_sha256"] for row in rows} == dict.fromkeys(FRAMEWORKS, of_file)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()[:12]
    assert {row["weights"] for row in rows} == {f"results/weights/mnist-{digest}.safetensors"}
    assert {row["run_id"].partition("-")[0] for row in rows} == {
        f"{name}_mnist_1_smoke_{digest}" for name in FRAMEWORKS
    }
    assert len({row["pair"] for row in rows}) == 1


def test_a_job_whose_file_is_not_what_it_was_fails_its_row_in_words(checkout: Path, made: Path) -> None:
    def run(framework: str, weights: str) -> "subprocess.CompletedProcess[str]":
        command = [interpreter(framework), f"{framework}/run.py", *MNIST, f"--weights={weights}"]
        return subprocess.run(
            command, cwd=checkout, env=clean_environment(), capture_output=True, text=True, timeout=900, check=False
        )

    pickled = run("jax", str(made / "mobilenet.pth"))
    refused(pickled, "run.py reads .safetensors files; 'main.py --weights' takes the others")
    assert nothing_begun(checkout)
    python("pytorch", FROM_SEED, checkout / "whole.safetensors")
    content = (checkout / "whole.safetensors").read_bytes()
    (checkout / "damaged.safetensors").write_bytes(content[:-10])
    code = "import numpy as np; from safetensors.numpy import save_file\n"
    python("jax", code + "save_file({'a.b': np.ones(2)}, sys.argv[1])", checkout / "double.safetensors")
    code += "save_file({'a.b': np.ones(2, np.float32)}, sys.argv[1])"
    python("jax", code, checkout / "misfit.safetensors")
    causes = {}
    # What reads the file is the same code on both sides: half of them on each.
    for name, framework in {"damaged": "jax", "double": "pytorch", "misfit": "pytorch", "gone": "jax"}.items():
        done = run(framework, f"{name}.safetensors")
        assert done.returncode == 2, done.stdout + done.stderr
        assert "Traceback" not in done.stdout + done.stderr
        causes[name] = rows_of(checkout)[-1]["cause"]
        assert causes[name].startswith(f"input: --weights {name}.safetensors: ")
        assert len(causes[name].splitlines()) == 1
    assert "damaged.safetensors is damaged, or no safetensors file" in causes["damaged"]
    assert "holds F64; F32 (float32) is valid" in causes["double"]
    assert "No such file" in causes["gone"]
    assert "the weights do not fit the model: missing: " in causes["misfit"]
    (log,) = [path.read_text() for path in checkout.glob("results/runs/*/log.txt") if "do not fit" in path.read_text()]
    listed = [line for line in log.splitlines() if line.startswith(("  missing: ", "  extra: "))]
    assert listed[-1] == "  extra: a.b (2,)"
    assert causes["misfit"].endswith(f"; and {len(listed) - 1} more, all in log.txt")


def test_without_an_interpreter_for_pytorch_only_safetensors_are_taken(
    main: Main, checkout: Path, made: Path, tmp_path: Path
) -> None:
    path = checkout / "cluster.yaml"
    text = path.read_text()
    file = tmp_path / "whole.safetensors"
    python("pytorch", FROM_SEED, file)
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(file.read_bytes()[:-10])
    for interpreter_of_pytorch in ("null", ".venv/none/bin/python"):
        path.write_text(text.replace("pytorch: .venv/pytorch/bin/python", f"pytorch: {interpreter_of_pytorch}", 1))
        done = main(*MNIST, "--dry_run", "--framework", "jax", "--weights", str(made / "mobilenet.pth"))
        refused(done, "target 'local' has no interpreter for PyTorch on this machine; 'python pytorch/weights.py ")
        for bad in (damaged, ROOT / "LICENSE"):
            shutil.copy(bad, tmp_path / "bad.safetensors")
            done = main(*MNIST, "--dry_run", "--framework", "jax", "--weights", str(tmp_path / "bad.safetensors"))
            refused(done, "bad.safetensors: damaged, or no safetensors file")
        assert nothing_begun(checkout)
    assert main(*MNIST, "--dry_run", "--framework", "jax", "--weights", str(file)).returncode == 0
    (copy,) = (checkout / "results" / "weights").iterdir()
    assert copy.read_bytes() == file.read_bytes()
    assert copy.name in (checkout / "slurm_scripts" / f"jax_mnist_1_smoke_{copy.stem[6:]}.sh").read_text()


def test_an_interpreter_that_cannot_convert_is_named(main: Main, checkout: Path, made: Path) -> None:
    path = checkout / "cluster.yaml"
    path.write_text(path.read_text().replace("pytorch: .venv/pytorch/bin/python", "pytorch: .venv/jax/bin/python", 1))
    done = main(*MOBILENET, "--weights", str(made / "mobilenet.pth"))
    refused(done, "cluster.yaml: targets.local.python.pytorch) could not convert it: ModuleNotFoundError: No module")


def test_a_file_that_is_gone_since_is_named_before_anything_starts() -> None:
    job = Job("jax", "mnist", 1, "smoke", "fp32", None, "local", weights="results/weights/mnist-0.safetensors")
    _, target = cluster.load(ROOT / "cluster.yaml").target("local")
    with pytest.raises(UserError, match=r"mnist-0\.safetensors, the initial weights, is gone"):
        submit.check([submit.Launch(job, target, "", job.run_id(), "")])


def test_weights_are_part_of_a_jobs_name_options_and_rows() -> None:
    plain = Job("jax", "mnist", 1, "smoke", "fp32", None, "local")
    assert "--weights" not in " ".join(plain.options)
    assert plain.rows()[0].weights == "seed 0"
    stored = json.loads(json.dumps({**plain.__dict__, "weights": "/some where/my model.v2-final-and-best.safetensors"}))
    job = Job(**{**stored, "changes": ()})
    assert job.stem == "jax_mnist_1_smoke_my_model_v2_final_an"
    assert job.options[-1] == f"--weights={job.weights}"
    assert job.rows()[0].weights == job.weights


def test_the_longest_name_of_a_job_is_a_valid_run_id() -> None:
    longest = [max(names, key=len) for names in (FRAMEWORKS, BENCHMARKS, PRESETS, PRECISIONS, DEVICE_KINDS)]
    framework, benchmark, preset, precision, device = longest
    Job(framework, benchmark, 1, preset, precision, device, "local", weights="w" * 40 + ".safetensors").run_id()
