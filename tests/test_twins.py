"""jax/ and pytorch/ are twins: the same files, and in them the same public functions with the same parameters.

Compared are public top-level functions and classes, and public methods with ``__init__``. Left out is what only one
framework needs: names that begin with '_', constants, and in models/ everything but ``build``, because one side may
take a network, or a layer, from its library where the other writes it out.
"""

import ast
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT

from duel.catalogue import BENCHMARKS, FRAMEWORKS

Function = ast.FunctionDef | ast.AsyncFunctionDef


def twin_files(framework: str) -> list[str]:
    """Paths below the framework's folder, of what git has or would take."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", framework]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    paths = {Path(name) for name in listed.split("\0") if name and (ROOT / name).exists()}
    return sorted(str(path.relative_to(framework)) for path in paths)


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
    assert public(text.replace("int", "Array").replace("_own", "_other")) == public(text)
