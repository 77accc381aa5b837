"""Who may import whom. The import contracts of pyproject.toml hold inside duel/; here is what they cannot see."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from conftest import ROOT

# What belongs to one framework alone; the folders of the two are reached by no one.
JAX = {"jax", "jaxlib", "flax", "optax", "orbax", "chex", "haiku", "equinox"}
PYTORCH = {"torch", "torchvision", "torchaudio", "pytorch", "functorch", "triton", "opacus"}
SHARED_BY_TWINS = {
    *("duel.catalogue", "duel.datasets", "duel.errors", "duel.measure"),
    *("duel.chips", "duel.kinds", "duel.profile", "duel.switches", "duel.trace"),
}


def imported(path: Path) -> set[str]:
    """Dotted names of everything that a file imports, at its top or inside a function."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            assert node.module is not None
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "__import__"):
            argument = node.args[0]
            if isinstance(argument, ast.Constant):
                names.add(str(argument.value))
    return names


def packages(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imported(path)}


def files(folder: str) -> list[Path]:
    found = sorted((ROOT / folder).rglob("*.py"))
    assert found
    return found


@pytest.mark.parametrize("path", files("jax"), ids=lambda path: str(path.relative_to(ROOT)))
def test_the_jax_side_imports_nothing_of_pytorch(path: Path) -> None:
    assert not packages(path) & PYTORCH


@pytest.mark.parametrize("path", files("pytorch"), ids=lambda path: str(path.relative_to(ROOT)))
def test_the_pytorch_side_imports_nothing_of_jax(path: Path) -> None:
    assert not packages(path) & JAX
    assert "pytorch" not in packages(path), "siblings are imported by their bare names"


@pytest.mark.parametrize("path", [*files("jax"), *files("pytorch")], ids=lambda path: str(path.relative_to(ROOT)))
def test_the_twins_use_no_more_of_duel_than_what_runs_in_a_job(path: Path) -> None:
    of_duel = {name for name in imported(path) if name.partition(".")[0] == "duel"}
    assert {name for name in of_duel if not any(f"{name}.".startswith(f"{ok}.") for ok in SHARED_BY_TWINS)} == set()


@pytest.mark.parametrize(
    "path", [ROOT / "main.py", *files("duel"), *files("tests")], ids=lambda p: str(p.relative_to(ROOT))
)
def test_the_driver_and_its_tests_import_no_framework(path: Path) -> None:
    assert not packages(path) & (JAX | PYTORCH)


def test_help_and_status_load_nothing_slow(checkout: Path) -> None:
    for command in ("--help", "status"):
        code = (
            "import contextlib, io, runpy, sys\n"
            f"sys.argv = ['main.py', {command!r}]\n"
            "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
            "    runpy.run_path('main.py', run_name='__main__')\n"
            "print(' '.join(sorted({name.partition('.')[0] for name in sys.modules})))"
        )
        asked = subprocess.run([sys.executable, "-c", code], cwd=checkout, check=True, capture_output=True, text=True)
        loaded = set(asked.stdout.split())
        assert "duel" in loaded
        slow = {"jax", "torch", "numpy", "pandas", "pydantic", "ruamel", "jinja2", "submitit", "wandb"}
        assert not loaded & slow, command


def test_no_file_turns_a_framework_folder_or_the_tests_into_a_package() -> None:
    for folder in ("jax", "pytorch", "tests"):
        assert not (ROOT / folder / "__init__.py").exists()
        assert folder == "tests" or (ROOT / folder / "models" / "__init__.py").exists()
    assert not (ROOT / "__init__.py").exists()
    assert not (ROOT / "conftest.py").exists(), "it would put the folder jax/ on the path of every test"


def test_the_import_contracts_cover_every_module_of_duel() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    forbidden = {
        (source, target)
        for contract in contracts
        for source in contract["source_modules"]
        for target in contract["forbidden_modules"]
    }
    rooms = {"duel.cli", "duel.launch", "duel.measure", "duel.report"}
    for room in ("duel.launch", "duel.report"):
        assert (room, "duel.measure") in forbidden
        assert ("duel.measure", room) in forbidden
    for room in rooms - {"duel.cli"}:
        assert (room, "duel.cli") in forbidden
    for framework in ("jax", "flax", "optax", "torch", "torchvision"):
        assert ("duel", framework) in forbidden
    shared = {f"duel.{path.stem}" for path in (ROOT / "duel").glob("[!_]*.py")}
    assert {(module, room) for module in shared for room in rooms} <= forbidden
