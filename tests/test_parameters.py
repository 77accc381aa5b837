"""Initial weights: made once, the same whatever the order, and following one rule."""

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from duel.measure.parameters import check, initialise, sha256
from duel.measure.preparing import _with_new_head

SHAPES = {
    "conv1.weight": (64, 3, 7, 7),
    "bn1.weight": (64,),
    "bn1.bias": (64,),
    "bn1.running_mean": (64,),
    "bn1.running_var": (64,),
    "fc.weight": (1000, 256),
    "fc.bias": (1000,),
}


def test_a_plain_start_is_that_of_the_papers() -> None:
    arrays = initialise(SHAPES, seed=0)
    assert {name: array.shape for name, array in arrays.items()} == SHAPES
    assert {array.dtype for array in arrays.values()} == {np.dtype(np.float32)}
    for name, value in {
        "bn1.weight": 1,
        "bn1.bias": 0,
        "bn1.running_mean": 0,
        "bn1.running_var": 1,
        "fc.bias": 0,
    }.items():
        assert np.all(arrays[name] == value), name
    for name, expected in {"conv1.weight": np.sqrt(2 / (64 * 49)), "fc.weight": np.sqrt(1 / 256)}.items():
        error = 5 / np.sqrt(2 * arrays[name].size)  # five standard errors of a standard deviation
        assert arrays[name].std() == pytest.approx(expected, rel=error)
        assert abs(arrays[name].mean()) < 5 * expected / np.sqrt(arrays[name].size)


def test_randomised_nothing_is_left_at_a_constant() -> None:
    arrays = initialise(SHAPES, seed=0, randomise=True)
    for name, array in arrays.items():
        assert len(np.unique(array)) > array.size / 2, name
        assert not np.any(array == 0), name
    assert arrays["bn1.running_var"].min() > 0
    plain = initialise(SHAPES, seed=0)
    assert np.array_equal(arrays["conv1.weight"], plain["conv1.weight"])


@given(st.permutations(list(SHAPES)), st.integers(0, 2**32), st.booleans())
def test_neither_order_nor_selection_changes_a_value(names: list[str], seed: int, randomise: bool) -> None:
    whole = initialise(SHAPES, seed, randomise)
    part = initialise({name: SHAPES[name] for name in names[:4]}, seed, randomise)
    assert list(part) == names[:4]
    for name, array in part.items():
        assert np.array_equal(array, whole[name])
    assert sha256({name: whole[name] for name in names}) == sha256(whole)


def test_seeds_and_names_give_different_values() -> None:
    shapes = {"a.weight": (8, 8), "b.weight": (8, 8)}
    arrays = initialise(shapes, 0)
    assert not np.array_equal(arrays["a.weight"], arrays["b.weight"])
    assert not np.array_equal(arrays["a.weight"], initialise(shapes, 1)["a.weight"])


@pytest.mark.parametrize(("name", "shape"), [("a.scale", (3,)), ("a.weight", (2, 2, 2)), ("a.bias", (2, 2))])
def test_what_the_rule_does_not_cover_is_refused_by_name(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{name} {shape}: no rule")):
        initialise({name: shape}, 0)


def test_every_misfit_is_listed_at_once() -> None:
    arrays = initialise(SHAPES, 0)
    check(SHAPES, arrays)
    wrong = arrays | {"more.bias": np.zeros(2), "fc.bias": np.zeros(7)}
    del wrong["conv1.weight"]
    with pytest.raises(ValueError, match="do not fit") as error:
        check(SHAPES, wrong)
    assert str(error.value).splitlines()[1:] == [
        "  missing: conv1.weight (64, 3, 7, 7)",
        "  extra: more.bias (2,)",
        "  wrong shape: fc.bias (7,), the model has (1000,)",
    ]


@pytest.mark.parametrize(
    ("name", "shape", "drawn"),
    [("fc.weight", (100, 512), True), ("fc.weight", (1000, 256), False), ("conv1.weight", (64, 1, 7, 7), False)],
)
def test_only_a_layer_of_other_classes_is_drawn_anew(name: str, shape: tuple[int, ...], drawn: bool) -> None:
    shapes = {"conv1.weight": (64, 3, 7, 7), "fc.weight": (1000, 512)}
    given = {each: np.zeros(shape if each == name else whole, np.float32) for each, whole in shapes.items()}
    m: Any = SimpleNamespace(shapes=shapes, row=SimpleNamespace(seed=0))
    found = _with_new_head(m, given)
    assert (found[name].shape == shapes[name]) is drawn


def test_the_hash_sees_names_values_shapes_and_types() -> None:
    base = {"a": np.arange(4, dtype=np.float32)}
    others = [
        {"b": base["a"]},
        {"a": base["a"] + 1},
        {"a": base["a"].reshape(2, 2)},
        {"a": base["a"].astype(np.float64)},
    ]
    assert sha256(base) == sha256({"a": base["a"].copy()})
    assert len({sha256(arrays) for arrays in (base, *others)}) == 5
