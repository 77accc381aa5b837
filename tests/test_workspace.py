"""The workspace of Weights & Biases, as far as it goes without an account."""

from pathlib import Path
from typing import Any

import pytest
from test_comparability import judged
from test_pairs import sides

from duel.catalogue import FRAMEWORKS
from duel.comparability import COMPARABLE
from duel.errors import UserError
from duel.launch import workspace
from duel.measure import sinks
from duel.record import COLUMNS


@pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20")  # the library's own
def test_a_workspace_has_both_frameworks_in_each_panel() -> None:
    """As far as it goes without an account: what would be sent. Its names are those that the sink streams."""
    sent = workspace.build("somebody", "duel")._to_model().model_dump_json()
    for column in (*workspace.CURVES, *workspace.ENDS):
        assert all(f"{framework}/{column}" in sent for framework in FRAMEWORKS)
    assert "pair/ratio" in sent
    assert set(workspace.ENDS) <= set(COLUMNS)


def test_a_workspace_needs_a_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with pytest.raises(UserError, match="no Weights & Biases key here"):
        workspace.save("somebody", "duel")


def test_the_summary_of_a_run_has_its_ratio_and_says_that_a_session_makes_no_verdict() -> None:
    found = sinks._of_pairs(judged(sides([1.5] * 4)))
    assert found["pair/comparable"] == COMPARABLE
    assert found["pair/ratio"] == pytest.approx(1.5)
    assert found["pair/verdict"] == "no verdict in one session: JAX / PyTorch 1.5, of 4 pairs"


@pytest.mark.parametrize("fault", [{"weights_sha256": "c" * 64}, {"throughput": 0.0}, {"blocks": 1}])
def test_the_summary_has_no_ratio_of_the_pairs_that_are_left(fault: dict[str, Any]) -> None:
    rows = sides([1.5] * 4)
    rows[3] = rows[3].replace(**fault)
    found = sinks._of_pairs(judged(rows))
    assert "pair/comparable" in found
    assert not {"pair/ratio", "pair/verdict"} & set(found)
