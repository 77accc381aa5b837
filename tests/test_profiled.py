"""The process that profiles a row: what it leaves if it fails, and which programs are not the row's."""

from pathlib import Path

import pytest
from conftest import Main
from wandb_server import on_disk

from duel import kinds, profile
from duel.catalogue import BENCHMARKS, FRAMEWORKS
from duel.job import Job
from duel.measure import profiled
from duel.measure.device import ALONE
from duel.profile import Profile
from duel.results import Results
from duel.table import merge


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


def test_a_trace_that_is_too_large_or_not_alone_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tmp_path / name for name in ("one", "other")]
    for file in files:
        file.write_bytes(b"x" * (3 << 20))
    assert profile.bounded(files[:1]) == files[0]
    for several in ([], files):
        with pytest.raises(ValueError, match=f"the tracer left {len(several)} traces in place of one"):
            profile.bounded(several)
    monkeypatch.setattr(profile, "MOST_BYTES", 2 << 20)
    with pytest.raises(ValueError, match="the trace has 3 MiB, of which at most 2 are read; it is kept as it is"):
        profile.bounded(files[:1])


COMPILED = ("--benchmark", "mnist", "--use_case", "1", "--framework", "pytorch", "--mode", "default+compile")


def test_the_loops_of_a_compiled_model_are_known(main: Main, checkout: Path) -> None:
    """By what Inductor tells of its graphs: kinds, modules, stages; and how long these took to compile."""
    ran = main(*COMPILED, "--preset", "smoke", "--profile", "--wait")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (run,) = Results(checkout / "results").runs()
    found = profile.read(run.folder, 0)
    assert found is not None
    assert found.why == ""
    assert found.explained > 0.95
    convolutions = {(part.module, part.stage) for part in found.parts if part.kind == kinds.CONVOLUTION}
    assert convolutions >= {(f"conv{n}", stage) for n in (1, 2) for stage in ("forward", "backward")}
    assert any(name.startswith("graph_") for name in (one.name for one in found.longest))
    assert {"trace", "lower", "compile"} <= {phase for program in found.programs for phase in program.seconds}
    assert {profile.GRADIENTS, profile.ACTIVATIONS, profile.TEMPORARIES, profile.OPTIMIZER} <= set(found.memory)
    assert found.memory[profile.GRADIENTS] == found.memory[profile.PARAMETERS]


def test_profiled_rows_are_explained_and_their_largest_share_is_repeated_alone(main: Main, checkout: Path) -> None:
    """On this machine, whatever the difference consists of."""
    options = ("--benchmark", "mnist", "--use_case", "1", "--preset", "smoke", "--paired", "--profile", "--wait")
    assert main(*options).returncode == 0
    results = Results(checkout / "results")
    (run,) = results.runs()
    products: dict[tuple[str, str, str], float] = {}
    for number, framework in enumerate(("jax", "pytorch")):
        found = profile.read(run.folder, number)
        assert found is not None
        assert (found.framework, found.why, found.proof) == (framework, "", "the same bits from known weights")
        assert sum(part.seconds for part in found.parts) == pytest.approx(found.traced_seconds, rel=1e-6)
        assert found.explained > 0.95
        assert {"conv1", "conv2", "fc1", "fc2"} <= {part.module for part in found.parts}
        assert found.seconds(kind=kinds.CONVOLUTION) > 0
        assert found.seconds(kind=kinds.OPTIMIZER) > 0
        assert found.memory[profile.PARAMETERS] == 4 * 3014
        assert 0.9 * 4 * 3014 < found.memory[profile.GRADIENTS] < 1.1 * 4 * 3014
        assert 0 < found.memory[profile.ACTIVATIONS] < found.memory[profile.TEMPORARIES]
        assert any(profile.path(run.folder, number).with_suffix("").rglob("*.json.gz"))
        convolutions = [part for part in found.parts if part.kind == kinds.CONVOLUTION]
        for part in convolutions:
            where = framework, part.module, part.stage
            products[where] = products.get(where, 0.0) + part.flops
        assert all(part.bytes > 0 for part in convolutions if part.flops)
    first = [products[framework, "conv1", "forward"] for framework in ("jax", "pytorch")]
    assert first[0] == pytest.approx(first[1]) != 0, "steps or calls are counted differently"
    # The gradient of the kernel and, but for the first layer, of the images: as many FLOP each as forward.
    for module, times in (("conv1", 1), ("conv2", 2)):
        forward, backward = (products["pytorch", module, stage] for stage in ("forward", "backward"))
        assert backward == pytest.approx(times * forward) != 0
    for row in run.rows():  # a busy machine is no defect
        quiet = row.replace(foreign_load=0.0, blocks=5, left_out_blocks=0, left_out=None, waited_seconds=0.0)
        found = profile.read(run.folder, row.row or 0)
        assert found is not None
        run.write_row(quiet.replace(step_seconds_p50=found.step_seconds))
    merge(results, check=True)
    said = main("explain")
    assert said.returncode == 0, said.stderr
    assert "of the difference is of known kinds" in said.stdout
    assert main("report").returncode == 0
    page = checkout / "results" / "report"
    assert {"kinds", "modules", "roofs", "timeline"} <= {path.stem for path in (page / "figures").glob("*.svg")}
    text = (page / "report.md").read_text()
    assert "1 of 1 points are explained: " in text
    assert "Memory in MiB, JAX | PyTorch: parameters 0.0115 | 0.0115" in text
    assert "Compiling, JAX | PyTorch: trace " in text
    logged = {name.partition(".")[0] for one in on_disk(run.folder) for name in one}
    assert {f"{name}/profile{what}" for name in ("jax", "pytorch") for what in ("", " details")} <= logged
    assert (page / "figures" / "profile_figures.py").exists()
    again = main("explain", "--reproduce")
    assert again.returncode == 0, again.stderr
    scripts = sorted(run.folder.rglob("profiles/*/*.py"))
    assert [script.name for script in scripts] == ["in_jax.py", "in_pytorch.py"]
    assert all(len(script.read_text().splitlines()) <= 80 for script in scripts)
    assert "isolated, JAX takes" in again.stdout


@pytest.mark.full
@pytest.mark.parametrize("mode", ["default", "tuned"])
@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_nearly_all_of_a_step_is_of_a_known_kind(main: Main, checkout: Path, benchmark: str, mode: str) -> None:
    options = ("--benchmark", benchmark, "--use_case", "1", "--preset", "smoke", "--size", "tiny", "--mode", mode)
    ran = main(*options, "--paired", "--profile", "--wait")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (run,) = Results(checkout / "results").runs()
    for number, framework in enumerate(FRAMEWORKS):
        found = profile.read(run.folder, number)
        assert found is not None
        assert (found.framework, found.why) == (framework, "")
        assert sum(part.seconds for part in found.parts) == pytest.approx(found.traced_seconds, rel=0.02)
        shares = {part.kind: found.seconds(kind=part.kind) / found.traced_seconds for part in found.parts}
        print(f"{benchmark}, {mode}, {framework}: {found.explained:.2%} explained;", shares)
        assert found.explained >= 0.95


def test_rows_without_a_profile_are_not_explained(main: Main) -> None:
    said = main("explain")
    assert said.returncode == 2
    assert "no runs yet" in said.stderr
