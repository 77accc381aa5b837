"""The largest share of a difference, repeated alone: the scripts, where they are refused, and what is said of both."""

import contextlib
import dataclasses
import os
import re
from pathlib import Path

import pytest
from conftest import interpreter
from test_explain import explained

from duel import kinds
from duel.errors import UserError
from duel.files import locked
from duel.profile import Layer, Part
from duel.report import explain, reproduction
from duel.report.shares import Explained, Share
from duel.results import Results

LAYERS = [
    (kinds.DEPTHWISE, Layer("convolution", [2, 8, 6, 6], 8, [3, 3], [1, 1], [1, 1], groups=8)),
    (kinds.CONVOLUTION, Layer("convolution", [2, 3, 6, 6], 8, [3, 3], [2, 2], [0, 0])),
    (kinds.NORMS, Layer("batch norm", [2, 8, 6, 6], epsilon=1e-5)),
    (kinds.NORMS, Layer("layer norm", [2, 4, 8], epsilon=1e-6)),
    (kinds.PRODUCT, Layer("linear", [2, 4, 8], 6)),
    (kinds.MOVES, Layer("sum over edges", [40, 8], 10)),
]
QUICK = (kinds.CONVOLUTION, kinds.MOVES)  # of them 'make test' repeats


@pytest.mark.parametrize(
    ("kind", "layer"),
    [pytest.param(*one, id=one[1].kind, marks=[] if one[0] in QUICK else [pytest.mark.full]) for one in LAYERS],
)
def test_a_layer_is_repeated_alone_in_both_frameworks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, layer: Layer
) -> None:
    """The scripts run as they are, with the interpreters of both sides."""
    monkeypatch.setattr(reproduction, "SECONDS", 0.1)
    one = explained("default", ("", ""), {kind: 1.0}, {kind: 2.0})
    for _, found in one.pairs[0]:
        found.parts[0].module, found.parts[0].stage = "features.1", "backward"
    one.pairs[0][1][1].layers = {"features.1": layer}
    found = reproduction.largest(one)
    scripts = reproduction.write(one, found, tmp_path)
    seconds = reproduction.run(scripts, {name: interpreter(name) for name in scripts})
    assert all(value > 0 for value in seconds.values())
    assert all(len(script.read_text().splitlines()) <= 80 for script in scripts.values())
    hlo = (tmp_path / reproduction.CODE["jax"]).read_text()
    opcodes = re.findall(r" (convolution|dot|scatter|gather)\(", hlo)
    product = {"convolution": "convolution", "linear": "dot"}.get(layer.kind)
    passes = [product] * 3 if product else ["gather", "scatter"] if layer.kind == "sum over edges" else []
    assert sorted(opcodes) == passes, "not forward and backward: for a product, the gradients of both arguments"
    assert "def call(" in (tmp_path / reproduction.CODE["pytorch"]).read_text()


def of_a_layer(kind: str, layer: Layer, switches: tuple[str, str] = ("", ""), **row: object) -> Explained:
    """A point whose difference is of one kind of work in one layer."""
    one = explained("default", switches, {kind: 1.0}, {kind: 2.0})
    pair = [(side[0].replace(**row), side[1]) for side in one.pairs[0]]
    for _, found in pair:
        found.parts[0].module = "features.1"
    pair[1][1].layers = {"features.1": layer}
    return dataclasses.replace(one, pairs=[(pair[0], pair[1])])


@pytest.mark.parametrize(
    ("place", "switches", "row", "words"),
    [
        (0, ("depthwise=shifted donation=on", ""), {}, "jax measured it with depthwise=shifted"),
        (1, ("convolution=gradients", ""), {}, "jax measured it with convolution=gradients"),
        (1, ("", "compile=on threads=4"), {}, "pytorch measured it with threads=4, which is not repeated"),
        (5, ("", "aggregation=sparse"), {}, "pytorch measured it with aggregation=sparse"),
        (1, ("", ""), {"device_kind": "tpu"}, "on a tpu it is not repeated; valid: cpu, gpu"),
    ],
)
def test_what_was_measured_in_another_way_than_the_scripts_would_do_it_is_not_repeated(
    tmp_path: Path, place: int, switches: tuple[str, str], row: dict[str, str], words: str
) -> None:
    kind, layer = LAYERS[place]
    one = of_a_layer(kind, layer, switches, **row)
    with pytest.raises(UserError, match=f"of features.1, forward: {words}"):
        reproduction.write(one, reproduction.largest(one), tmp_path)


def test_how_other_work_was_written_does_not_matter_and_the_device_is_the_rows(tmp_path: Path) -> None:
    one = of_a_layer(*LAYERS[4], ("depthwise=shifted convolution=products", "aggregation=sparse"), device_kind="gpu")
    scripts = reproduction.write(one, reproduction.largest(one), tmp_path)
    assert 'device = torch.device("cuda")' in scripts["pytorch"].read_text()
    assert 'device = jax.devices("gpu")[0]' in scripts["jax"].read_text()
    one = of_a_layer(*LAYERS[4], device_kind="cpu")
    scripts = reproduction.write(one, reproduction.largest(one), tmp_path)
    assert 'device = torch.device("cpu")' in scripts["pytorch"].read_text()
    assert 'jax.config.update("jax_platforms", "cpu")' in scripts["jax"].read_text()


def test_a_larger_share_that_is_of_no_layer_is_named() -> None:
    one = of_a_layer(*LAYERS[1])
    for seconds, (_, found) in zip((10.0, 30.0), one.pairs[0], strict=True):
        found.parts.insert(0, Part(kinds.OPTIMIZER, "", "", seconds))
    found = reproduction.largest(one)
    assert (found.kind, found.larger) == (kinds.CONVOLUTION, kinds.OPTIMIZER)


def test_what_the_faster_side_takes_longer_for_is_not_repeated() -> None:
    one = of_a_layer(*LAYERS[1])  # twice as long in PyTorch, as the whole step is
    (_, jax), (_, pytorch) = one.pairs[0]
    jax.parts.insert(0, Part(kinds.PRODUCT, "features.2", "", 30.0))
    pytorch.parts += [Part(kinds.PRODUCT, "features.2", "", 1.0), Part(kinds.IDLE, "", "", 4.0)]
    pytorch.layers["features.2"] = LAYERS[4][1]
    assert reproduction.largest(one).kind == kinds.CONVOLUTION
    equal = [(row.replace(step_seconds_p50=2.0), found) for row, found in one.pairs[0]]
    one = dataclasses.replace(one, pairs=[(equal[0], equal[1])])
    assert reproduction.largest(one).kind == kinds.PRODUCT


def test_in_sixteen_bits_products_are_repeated_and_what_keeps_more_is_not(tmp_path: Path) -> None:
    one = of_a_layer(*LAYERS[4], precision="bf16")
    scripts = reproduction.write(one, reproduction.largest(one), tmp_path)
    assert "dtype=jnp.bfloat16)" in scripts["jax"].read_text()
    assert ".to(device, torch.bfloat16)" in scripts["pytorch"].read_text()
    one = of_a_layer(*LAYERS[2], precision="bf16")
    with pytest.raises(UserError, match="in bf16 it is not repeated; valid: convolutions and matrix products"):
        reproduction.write(one, reproduction.largest(one), tmp_path)


def test_what_cannot_be_repeated_is_said() -> None:
    one = explained("default", ("", ""), {kinds.IDLE: 1.0}, {kinds.IDLE: 2.0})
    with pytest.raises(UserError, match="nothing of the difference can be repeated alone"):
        reproduction.largest(one)


def test_a_point_that_cannot_be_repeated_does_not_keep_others_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle = explained("default", ("", ""), {kinds.IDLE: 1.0}, {kinds.IDLE: 2.0})
    convolution = explained("default", ("", ""), {kinds.CONVOLUTION: 1.0}, {kinds.CONVOLUTION: 2.0})
    for _, found in convolution.pairs[0]:
        found.parts[0].module = "conv1"
    convolution.pairs[0][1][1].layers = {"conv1": LAYERS[1][1]}
    monkeypatch.setattr(explain, "_explained", lambda runs, results: [idle, convolution])
    *written, elsewhere, not_repeated = explain.reproduce([], Results(tmp_path), {})
    assert all(Path(line.removeprefix("reproduction ")).is_file() for line in written)
    assert [Path(line).name for line in written] == ["in_jax.py", "in_pytorch.py"]
    assert "is not this machine" in elsewhere
    assert not_repeated.startswith("not repeated: mnist (tiny, fp32), train_single: nothing of the difference")
    monkeypatch.setattr(explain, "_explained", lambda runs, results: [idle])
    with pytest.raises(UserError, match="can be repeated alone"):
        explain.reproduce([], Results(tmp_path), {})


def test_points_of_one_run_have_a_reproduction_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two batch sizes of one run, with the largest share in the same layer."""
    both = [of_a_layer(*LAYERS[1], run_id="run", row=number) for number in (0, 2)]
    monkeypatch.setattr(explain, "_explained", lambda runs, results: both)
    lines = explain.reproduce([], Results(tmp_path), {})
    written = {line for line in lines if line.startswith("reproduction ")}
    assert len(written) == 4
    assert {path.parent.name for path in tmp_path.rglob("in_jax.py")} == {
        *("000_convolution_features_1", "002_convolution_features_1")
    }


def test_a_layer_is_not_timed_beside_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the lock that a run on this machine holds, says so, and holds it while the scripts run."""
    results, said, others = Results(tmp_path), [], []
    here = of_a_layer(*LAYERS[1], target="local", host=os.uname().nodename)
    with contextlib.ExitStack() as run:
        run.enter_context(locked(results.device_lock, wait=True))

        def waiting(text: str) -> None:
            said.append(text)
            run.close()  # it ends

        def timed(scripts: object, pythons: object) -> dict[str, float]:
            with locked(results.device_lock, wait=False) as held:
                others.append(held)
            return {"jax": 1.0, "pytorch": 2.0}

        monkeypatch.setattr(explain, "say", waiting)
        monkeypatch.setattr(reproduction, "run", timed)
        monkeypatch.setattr(explain, "_explained", lambda runs, results: [here])
        lines = explain.reproduce([], results, {"local": {"jax": "python", "pytorch": "python"}})
    assert lines[-1].endswith(": reproduced")
    assert said == ["waiting for another run on this machine to end"]
    assert others == [None]


@pytest.mark.parametrize(
    ("alone", "word"),
    [
        ({"jax": 4.0, "pytorch": 1.0}, ": reproduced"),
        ({"jax": 2.1, "pytorch": 1.0}, ": reproduced"),
        ({"jax": 1.9, "pytorch": 1.0}, ": not reproduced"),
        ({"jax": 1.0, "pytorch": 4.0}, ": not reproduced"),
    ],
)
def test_a_difference_shows_alone_if_it_is_about_as_large_there(alone: dict[str, float], word: str) -> None:
    share = Share(kinds.CONVOLUTION, (4.0, 1.0), [-1.0])
    found = reproduction.Reproduction(share, kinds.CONVOLUTION, "conv1", True, Layer("convolution", [1, 1, 8, 8]))
    assert word in reproduction.verdict(found, alone)


def test_a_side_without_separate_work_is_named_and_its_script_finds_out_itself_how_long_a_call_takes(
    tmp_path: Path,
) -> None:
    one = of_a_layer(*LAYERS[1], step_seconds_p50=1.0)
    one.pairs[0][1][1].parts[0].kind = kinds.IDLE
    found = reproduction.largest(one)
    assert found.share.seconds == (1.0, 0.0)
    said = reproduction.verdict(found, {"jax": 3.0, "pytorch": 1.0})
    assert "isolated, JAX takes 3 times PyTorch's time; in the model PyTorch has no separate work of this kind" in said
    assert "nan" not in said
    for script in reproduction.write(one, found, tmp_path).values():
        assert "range(calls)" in script.read_text(), "as many calls as a share of zero seconds had room for"
