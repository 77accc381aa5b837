"""The process that profiles a row: what it leaves if it fails, and which programs are not the row's."""

from pathlib import Path

import pytest

from duel import profile
from duel.job import Job
from duel.measure import profiled
from duel.measure.device import ALONE
from duel.profile import Profile
from duel.results import Results


@pytest.mark.parametrize("traced", [True, False])
def test_what_fails_under_a_tool_leaves_the_profile_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, traced: bool
) -> None:
    run = Results(tmp_path).run("jax_mnist_1-x")
    run.create(Job("jax", "mnist", 1, "smoke", "fp32", None, "local").rows())
    good = Profile(run.id, 0, "jax", steps=3)
    profile.write(run.folder, good)

    def fails(m: object, found: Profile) -> None:
        raise ValueError("the tool may not")

    monkeypatch.setattr(profiled, "die_with_parent", lambda: None)
    monkeypatch.setattr(profiled, "_run", fails)
    assert profiled.measure(run, 0, tmp_path, None, traced) == 1
    found = profile.read(run.folder, 0)
    assert found is not None
    assert (found.steps, found.why) == ((0, "ValueError: the tool may not") if traced else (3, ""))


def test_a_program_with_other_switches_is_not_the_rows(tmp_path: Path) -> None:
    """As of a tuned row, if a search ends before it is profiled."""
    run = Results(tmp_path).run("pytorch_mnist_1-x")
    run.create(Job("pytorch", "mnist", 1, "smoke", "fp32", None, "local").rows())
    run.write_row(run.read_row(0).replace(mode="tuned", switches="compile=off"))
    m = profiled.Profiling(run, run.read_row(0), tmp_path, None, lambda event, **fields: None, ALONE)
    with pytest.raises(FileNotFoundError):  # so far it is, and its evidence is read
        profiled._proof(m)
    m.row = m.row.replace(switches="compile=on")
    with pytest.raises(ValueError, match="not the row's program: it had the switches compile=off, this one compile=on"):
        profiled._proof(m)
