"""jax/ and pytorch/ are twins: the same files, and in them the same public functions with the same parameters.

Compared are public top-level functions and classes, and public methods with ``__init__``. Left out is what only one
framework needs: names that begin with '_', constants, and in models/ everything but ``build``, because one side may
take a network, or a layer, from its library where the other writes it out.

What ``duel/measure`` uses of them is declared in ``duel/measure/twin.py``, and both sides are held to that, too.
"""

import ast
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT

from duel import certificate
from duel.catalogue import BENCHMARKS, FRAMEWORKS, USE_CASES

Function = ast.FunctionDef | ast.AsyncFunctionDef
CONTRACT = (ROOT / "duel" / "measure" / "twin.py").read_text()
WORK = {use_case.module: (use_case.work,) for use_case in USE_CASES.values() if use_case.module}
WORK["trainer"] = ("Training", "Trainer")  # which inherits from the former
MODULES = {"devices", "weights", "network", "canary", "ceilings", "profiling"}


def twin_files(framework: str) -> list[str]:
    """Paths below the framework's folder, of what git has or would take, without what only one side needs."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", framework]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    paths = {Path(name) for name in listed.split("\0") if name and (ROOT / name).exists()}
    names = (str(path.relative_to(framework)) for path in paths)
    return sorted(name for name in names if not name.startswith("_"))


def parameters(function: Function) -> str:
    """Names, kinds and defaults of the parameters, without their types: an array is not called alike on both sides."""
    arguments = function.args
    for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]:
        if argument is not None:
            argument.annotation = None
    return f"({ast.unparse(arguments)})"


def public(text: str, only: str | None = None) -> dict[str, str]:
    """Each public function, class and method with its parameters."""
    found: dict[str, str] = {}
    for node in ast.parse(text).body:
        if not isinstance(node, Function | ast.ClassDef) or node.name.startswith("_"):
            continue
        if only is not None and node.name != only:
            continue
        if isinstance(node, Function):
            found[node.name] = parameters(node)
            continue
        found[node.name] = "class"
        for method in node.body:
            if isinstance(method, Function) and (method.name == "__init__" or not method.name.startswith("_")):
                found[f"{node.name}.{method.name}"] = parameters(method)
    return found


def declared(text: str, *classes: str) -> dict[str, str]:
    """The public methods of ``classes`` together, and ``__init__``, which protocols call ``__call__``."""
    found: dict[str, str] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef) and node.name in classes:
            found |= functions(node.body)
    return found


def functions(body: list[ast.stmt]) -> dict[str, str]:
    """Each public function with its parameters, of which defaults are only counted; ``self`` is left out."""
    found: dict[str, str] = {}
    for node in body:
        if isinstance(node, Function) and (node.name in ("__init__", "__call__") or not node.name.startswith("_")):
            node.args.args = [argument for argument in node.args.args if argument.arg != "self"]
            node.args.defaults = [ast.Constant(...) for _ in node.args.defaults]
            found[node.name.replace("__call__", "__init__")] = parameters(node)
    return found


def test_both_folders_hold_the_same_files() -> None:
    assert twin_files("jax") == twin_files("pytorch")


@pytest.mark.parametrize("name", [name for name in twin_files("jax") if name.endswith(".py")])
def test_both_sides_offer_the_same(name: str) -> None:
    only = "build" if Path(name).parent.name == "models" else None
    jax, pytorch = (public((ROOT / framework / name).read_text(), only) for framework in ("jax", "pytorch"))
    assert jax == pytorch
    if only and not Path(name).stem.startswith("_"):
        assert set(jax) == {only}


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("module", WORK)
def test_each_kind_of_work_is_what_the_contract_declares(framework: str, module: str) -> None:
    contract = declared(CONTRACT, "Timed", "Work", "Maker", *WORK[module])
    found = declared((ROOT / framework / "network.py").read_text(), "Network")
    for kind in WORK[module]:
        found |= declared(
            (ROOT / framework / f"{kind.lower() if len(WORK[module]) > 1 else module}.py").read_text(), kind
        )
    assert found == contract
    assert len(contract) > 15


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("module", sorted(MODULES))
def test_each_module_is_what_the_contract_declares(framework: str, module: str) -> None:
    contract = declared(CONTRACT, f"{module.capitalize()}Module")
    assert contract
    assert functions(ast.parse((ROOT / framework / f"{module}.py").read_text()).body) == contract


def test_the_contract_is_of_all_modules() -> None:
    names = {Path(name).stem for name in twin_files("jax") if name.endswith(".py") and "/" not in name}
    assert names == {"run", *WORK, *MODULES}


# On either side: a missing method, a parameter too many, misspelt attributes; and what mypy says.
PLANTED = {
    "training.py": ("    def loss(self", "    def losses(self", "note:     loss"),
    "devices.py": ("def leave()", "def leave(now: bool)", "def leave(now: bool) -> None"),
    "network.py": ("self._setting.switches", "self._seting.switches", 'has no attribute "_seting"'),
    "canary.py": ("work.placed(", "work.put(", 'has no attribute "put"'),
}
# The framework's own, which mypy knows only where it has found the installed package and not the folder.
MISSPELT = {"jax": ("jnp.concatenate", "jnp.joined"), "pytorch": ("functional.conv2d", "functional.joined")}


@pytest.mark.full
def test_mypy_holds_both_sides_to_the_contract(tmp_path: Path) -> None:
    for folder in ("duel", *FRAMEWORKS):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "tests").mkdir()
    for name in ("Makefile", "pyproject.toml", "main.py", "tests/twin_contract.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / ".venv").symlink_to(ROOT / ".venv")

    assert [text for text in types(tmp_path) if "error:" in text] == []
    for framework in FRAMEWORKS:
        for name, (right, wrong, _) in PLANTED.items():
            plant(tmp_path / framework / name, right, wrong)
        plant(tmp_path / framework / "canary.py", *MISSPELT[framework])
    for found in types(tmp_path)[1:]:
        for expected in [expected for _, _, expected in PLANTED.values()]:
            assert expected in found
        assert 'has no attribute "joined"' in found


def types(folder: Path) -> list[str]:
    """What mypy says of duel/, of jax/ and of pytorch/."""
    ran = subprocess.run(["make", "types"], cwd=folder, capture_output=True, text=True)
    assert (ran.returncode == 0) == ("error:" not in ran.stdout), ran
    *found, _ = re.split(r"^(?:Found|Success).*\n", ran.stdout, flags=re.MULTILINE)
    assert len(found) == 3, ran
    return found


def plant(file: Path, right: str, wrong: str) -> None:
    text = file.read_text()
    assert right in text
    file.write_text(text.replace(right, wrong))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_each_benchmark_has_a_model_and_each_model_a_benchmark(framework: str) -> None:
    assert sorted(path.stem for path in (ROOT / framework / "models").glob("[!_]*.py")) == sorted(BENCHMARKS)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_build_takes_what_the_catalogue_gives(name: str) -> None:
    taken = public((ROOT / "jax" / "models" / f"{name}.py").read_text(), "build")["build"]
    for size in BENCHMARKS[name].sizes.values():
        assert taken == f"({', '.join(size.model)})"


def test_a_twin_that_drifted_is_noticed() -> None:
    text = "class A:\n    def step(self, index: int) -> float: ...\n    def _own(self): ...\n"
    text += "def f(x, *, y=1): ...\ndef _g(z): ..."
    assert public(text) == {"A": "class", "A.step": "(self, index)", "f": "(x, *, y=1)"}
    for drifted in (text.replace("index", "i"), text.replace("y=1", "y=2"), text.replace("def f", "def h")):
        assert public(drifted) != public(text)
    assert declared(text, "A") == {"step": "(index)"} != declared(text.replace("index", "i"), "A")
    assert functions(ast.parse(text).body) == {"f": "(x, *, y=1)"}
    assert public(text.replace("int", "Array").replace("_own", "_other")) == public(text)


def test_a_change_of_what_both_sides_compute_voids_their_certificate() -> None:
    computing = {*WORK, "network", "weights", "devices"} - {"trainer"}
    assert set(certificate.TWIN_FILES) == {f"{name}.py" for name in computing} | {"models/_layers.py"}


def test_all_that_a_certificate_rests_on_is_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    monkeypatch.setattr(certificate, "_statements", lambda file: (read.append(str(file.relative_to(ROOT))), b"")[1])
    certificate.code_sha256.__wrapped__("mnist", "tiny")
    shared = ["measure/batches", "measure/parameters", "measure/validation", "report/parity"]
    sides = [f"{side}/{name}" for side in FRAMEWORKS for name in (*certificate.TWIN_FILES, "models/mnist.py")]
    assert sorted(read) == sorted([*sides, *(f"duel/{name}.py" for name in shared)])
