"""Which batch is tried next to find the largest that fits."""

import pytest

from duel.catalogue import FIT, TRAIN
from duel.job import Job
from duel.report import grown
from duel.tries import expected_batch, next_batch


@pytest.mark.parametrize("step", [1, 4])
@pytest.mark.parametrize("most", [4, 7, 64, 100, 1000])
def test_batches_are_doubled_and_then_halved(most: int, step: int) -> None:
    low, high, tried = 0, 0, []
    size: int | None = 32
    while size:
        tried.append(size)
        assert len(tried) <= 14
        low, high = (size, high) if size <= most else (low, size)
        size = next_batch(32, low, high, step)
    assert max(0, most * 8 / 9 - step) <= low <= most
    assert all(size % step == 0 for size in tried)


@pytest.mark.parametrize("most", [70, 1000, 20000])
@pytest.mark.parametrize("bent", [0.9, 1.0, 1.1])
def test_a_plan_saves_most_of_the_tries(most: int, bent: float) -> None:
    """Also if memory does not grow by the line that the plans of small batches are on."""
    low, high, tried = 0, 0, 0
    plans: dict[int, int] = {}
    size: int | None = 32
    while size:
        tried += 1
        assert tried <= 9, "by doubling it is up to fourteen"
        if size <= most:
            low, plans[size] = size, 1000 + 10 * size
        else:
            high = size
        size = next_batch(32, low, high, 1, expected_batch(plans, int(1000 + 10 * most * bent)))
    assert most * 8 / 9 - 1 <= low <= most


def test_two_plans_that_are_too_large_do_not_lead_far_below_both() -> None:
    """As libtpu planned two batches of efficientnet_b0's training for a v6e, in MiB of 32,000."""
    assert 1100 < expected_batch({1632: 36692, 1312: 35442}, 32000) < 1312
    assert expected_batch({1632: 36692, 800: 20000, 400: 10000}, 32000) == 1280
    assert expected_batch({}, 32000) == 0


@pytest.mark.parametrize("step", [1, 6])
def test_no_batch_is_tried_twice_where_the_one_expected_is_next_to_one_that_fits(step: int) -> None:
    """Rounding one down must not come to that which fits."""
    for low in range(step, 3000, step):
        for expected in (low + 1, low + low // 15, low + low // 14, 2 * low):
            following = next_batch(low, low, 0, step, expected)
            assert following is not None
            assert following > low


def test_what_never_fits_and_what_always_does_come_to_an_end() -> None:
    assert next_batch(32, 0, 1) is None
    assert next_batch(32, 0, 4, step=4) is None
    assert next_batch(32, 32 << 14, 0) is None


def test_a_size_that_was_tried_again_after_a_crash_counts_once() -> None:
    """XLA's autotuner crashed at two of them, which says nothing of their memory."""
    job = Job("jax", "mnist", TRAIN, FIT, "fp32", None, "local", batch_sizes=(32,), size="full")
    tries = [(0, 32, "failed", "code"), (0, 32, "finished", None), (1, 64, "failed", "code")]
    tries += [(1, 64, "failed", "out of memory"), (2, 48, "finished", None)]
    (planned,) = job.rows()
    rows = [
        planned.replace(row=n, point=point, batch_size=size, status=status, why=why, cause=why)
        for n, (point, size, status, why) in enumerate(tries)
    ]
    assert grown.table(rows).title == ["mnist (full, fp32), train_single: jax fits 48"]
