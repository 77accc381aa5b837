"""Checkpoints: whole or passed over, of this training or refused, the newest two."""

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from duel.errors import UserError
from duel.measure.checkpoint import Checkpoints, Course, Epoch

IDENTITY = {"benchmark": "mnist", "devices": "1", "code": "abc"}


def arrays(step: int) -> dict[str, Any]:
    return {"model/weight": np.full((30, 40), step, np.float32), "optimizer/0/step": np.array(step)}


def saved(folder: Path, *steps: int) -> Checkpoints:
    found = Checkpoints(folder, IDENTITY)
    for step in steps:
        epochs = [Epoch(0, 0, None, 2.3, 0.1, 0.5, 0.0, 0.0, 0.1)]
        found.save(Course(step, "seen", epochs, 1.5, 2, 3.0, 0.25, None), arrays(step))
    return found


def test_what_is_written_is_what_is_read_and_two_are_kept(tmp_path: Path) -> None:
    kept = saved(tmp_path / "c", 10, 20, 30)
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["step-000000020.npz", "step-000000030.npz"]
    newest = kept.newest()
    assert newest is not None
    course, found = newest
    assert course == Course(30, "seen", [Epoch(0, 0, None, 2.3, 0.1, 0.5, 0.0, 0.0, 0.1)], 1.5, 2, 3.0, 0.25, None)
    assert found.keys() == arrays(30).keys()
    assert all(np.array_equal(found[name], array) for name, array in arrays(30).items())
    assert Checkpoints(tmp_path / "none", IDENTITY).newest() is None


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.99])
def test_one_cut_in_the_middle_is_passed_over_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], share: float
) -> None:
    kept = saved(tmp_path, 10, 20)
    path = tmp_path / "step-000000020.npz"
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    newest = kept.newest()
    assert newest is not None
    assert newest[0].step == 10
    assert "step-000000020.npz is damaged" in capsys.readouterr().out


def test_a_changed_byte_is_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = saved(tmp_path, 10, 20)
    path = tmp_path / "step-000000020.npz"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    newest = kept.newest()
    assert newest is not None
    assert newest[0].step == 10
    assert "damaged" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"benchmark": "cifar10"}, r"benchmark \(mnist, here cifar10\)"),
        ({"devices": "2"}, r"devices \(1, here 2\)"),
        ({"code": "def"}, r"code \(abc, here def\)"),
        ({"recipe": "other"}, r"recipe \(none, here other\)"),
    ],
)
def test_one_of_another_training_is_refused(tmp_path: Path, changed: dict[str, str], said: str) -> None:
    saved(tmp_path, 10)
    with pytest.raises(UserError, match=f"a checkpoint of another training: {said}; remove it to start over"):
        Checkpoints(tmp_path, IDENTITY | changed).newest()


def test_a_kill_while_writing_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = saved(tmp_path, 10)
    monkeypatch.setattr(np, "savez", lambda file, **arrays: (file.write(b"PK"), exec("raise KeyboardInterrupt")))
    with pytest.raises(KeyboardInterrupt):
        kept.save(Course(20), arrays(20))
    newest = kept.newest()
    assert newest is not None
    assert newest[0].step == 10


def test_any_changed_bit_of_its_directory_is_damage(tmp_path: Path) -> None:
    kept = saved(tmp_path, 10)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    for place in range(len(whole) - 400, len(whole)):
        for bit in range(8):
            changed = bytearray(whole)
            changed[place] ^= 1 << bit
            path.write_bytes(changed)
            found = kept.newest()  # whole all the same, as where a time was changed, or passed over
            if found is not None:
                course, restored = found
                assert course.step == 10
                assert restored.keys() == arrays(10).keys(), place
                assert all(np.array_equal(restored[name], array) for name, array in arrays(10).items()), place


def test_what_killed_processes_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".step-000000005.npz.7.abcd").write_bytes(b"PK")
    saved(tmp_path, 10)
    assert names(tmp_path) == ["step-000000010.npz"]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_new_ones_take_the_place_of_those_that_were_passed_over(tmp_path: Path) -> None:
    kept = saved(tmp_path, 30, 40)
    for path in tmp_path.iterdir():
        path.write_bytes(b"PK")
    for step in (10, 20, 35):
        kept.save(Course(step), arrays(step))
        newest = kept.newest()
        assert newest is not None
        assert newest[0].step == step
    assert names(tmp_path) == ["step-000000020.npz", "step-000000035.npz"]


def test_it_is_said_if_none_is_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = saved(tmp_path, 10, 20)
    for path in tmp_path.iterdir():
        path.write_bytes(b"PK")
    assert kept.newest() is None
    assert "is whole: the training starts over" in capsys.readouterr().out


def test_one_that_cannot_be_read_is_not_taken_for_a_damaged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = saved(tmp_path, 10, 20)

    def stale(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(np, "load", stale)
    with pytest.raises(UserError, match=r"step-000000020\.npz: this checkpoint cannot be read \(Stale file handle\)"):
        kept.newest()


def test_a_full_disk_is_said_and_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = saved(tmp_path, 10)

    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(UserError, match=r"step-000000020\.npz: .* cannot be written \(No space left on device\)"):
        kept.save(Course(20), arrays(20))
    assert names(tmp_path) == ["step-000000010.npz"]


def test_no_memory_for_a_checkpoint_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is passed over as damaged is removed later."""
    kept = saved(tmp_path, 10, 20)

    def full(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(np, "load", full)
    with pytest.raises(UserError, match="there is no memory for it"):
        kept.newest()
    assert len(names(tmp_path)) == 2
