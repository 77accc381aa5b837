"""docs/hardware.md claims what the tests do, and no more."""

import re

from conftest import ROOT

TABLE = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \| (.+?) \|$", (ROOT / "docs" / "hardware.md").read_text(), re.M)
# By word of the table: the tests that show it.
SHOWN_BY = {
    "lowered": ("test_cuda.py", 'lowering_platforms=("cuda",)'),
    "dispatched": ("test_cuda.py", "FakeTensorMode"),
    "compiled": ("test_fit.py", "test_the_twins_own_programs_compile_for_a_chip_that_is_not_here"),
    "resolved": ("test_requirements.py", "test_a_resolver_finds_every_wheel_for_arm"),
}
STATES = {"run", "not tried", *SHOWN_BY}


def test_every_state_is_one_that_a_test_shows() -> None:
    rows = TABLE[1:]
    assert len(rows) == 8
    for _, jax, pytorch, _ in rows:
        assert {jax, pytorch} <= STATES
    used = {word for _, jax, pytorch, _ in rows for word in (jax, pytorch)}
    assert set(SHOWN_BY) <= used
    for file, text in SHOWN_BY.values():
        assert text in (ROOT / "tests" / file).read_text()


def test_run_is_said_only_of_devices_with_records() -> None:
    kinds = {path.stem.rpartition("-")[2] for path in (ROOT / "results" / "published").glob("*/parity/*.json")}
    run = [name for name, *states, _ in TABLE[1:] if "run" in states]
    assert run == ["x86-64 CPUs"]
    assert kinds == {"cpu"}


def test_stand_ins_are_called_so() -> None:
    for name, *_, state in TABLE[1:]:
        if any(word in name for word in ("AMD", "NVIDIA GPUs")):
            assert "stand-in" in state
