"""cluster.yaml: what is wrong in it is said with file, line and column, and what would be valid."""

from pathlib import Path

import pytest
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st

from duel.errors import UserError
from duel.launch import cluster

GOOD = """\
default: local
targets:
  local:
    scheduler: local
    python: {jax: a/python, pytorch: b/python}
"""


def error_of(path: Path, text: str | bytes) -> str:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError) as caught:
        cluster.load(path)
    return str(caught.value)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cluster.yaml"


def test_the_shipped_file_is_valid() -> None:
    loaded = cluster.load(ROOT / "cluster.yaml")
    assert loaded.target(None)[0] == "local"
    assert loaded.targets["h100"].scheduler == "slurm"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "cluster.yaml: empty"),
        ("# only a comment\n", "cluster.yaml: empty"),
        ("- a\n", "cluster.yaml:1:1: "),
        ("just a text\n", "cluster.yaml:1:1: a mapping with 'default' and 'targets' was expected, not str"),
        ("a: [1\n", "cluster.yaml:2:1: "),
        ("a: b: c\n", "cluster.yaml:1:5: "),
        (GOOD + "default: other\n", "cluster.yaml:6:1: found duplicate key"),
        (
            GOOD + "    gpu_typ: h100\n",
            "cluster.yaml:6:5: targets.local.gpu_typ: unknown key; valid: scheduler, python,",
        ),
        (
            GOOD + "    wandb: {projekt: x}\n",
            "cluster.yaml:6:13: targets.local.wandb.projekt: unknown key; valid: project, mode",
        ),
        (GOOD + "    wandb: {mode: loud}\n", "cluster.yaml:6:13: targets.local.wandb.mode: "),
        (GOOD + "    data: 3\n", "cluster.yaml:6:5: targets.local.data: Input should be a valid string, not 3"),
        (
            GOOD + "    directives: --time=1\n",
            "cluster.yaml:6:5: targets.local.directives: Input should be a valid list",
        ),
        (
            GOOD + "    directives: [12:30:00]\n",
            "cluster.yaml:6:18: targets.local.directives.0: '12:30:00' is no option of",
        ),
        (
            GOOD + '    directives: ["--a\\nb"]\n',
            "cluster.yaml:6:18: targets.local.directives.0: '--a\\nb' is not one line",
        ),
        (GOOD + '    setup: ["a\\rb"]\n', "cluster.yaml:6:13: targets.local.setup.0: 'a\\rb' is not one line"),
        (GOOD + '    data: ""\n', "cluster.yaml:6:5: targets.local.data: '' is not one line"),
        (GOOD.replace("local\n", "nowhere\n", 1), "cluster.yaml:1:1: default: unknown target 'nowhere'; valid: local"),
        (GOOD.replace("  local:", "  a b:"), "cluster.yaml:3:3: target 'a b': letters, digits"),
        (
            GOOD.replace("scheduler: local", "scheduler: pbs"),
            "scheduler: Input should be 'local' or 'slurm', not 'pbs'",
        ),
        (GOOD.replace("    scheduler: local\n", ""), "cluster.yaml:3:3: targets.local.scheduler: this key is missing"),
        (GOOD.replace("jax: a/python, ", ""), "cluster.yaml:5:5: targets.local.python.jax: this key is missing"),
        (b"\xff\xfe", "cluster.yaml: not UTF-8 text, at byte 0"),
        ("a: " + "x" * cluster.MAX_BYTES, "bytes; at most 1000000 are valid"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(path: Path, text: str | bytes, said: str) -> None:
    assert said in error_of(path, text)


def test_every_mistake_is_named_at_once(path: Path) -> None:
    text = error_of(path, GOOD + "    one: 1\n    two: 2\n")
    assert "6:5: targets.local.one" in text
    assert "7:5: targets.local.two" in text


def test_a_missing_file_is_named(path: Path) -> None:
    with pytest.raises(UserError, match=r"cluster\.yaml: not found in"):
        cluster.load(path)


def test_an_unreadable_file_is_named(path: Path) -> None:
    path.mkdir()
    with pytest.raises(UserError, match=r"cluster\.yaml: cannot be read: Is a directory"):
        cluster.load(path)


def test_yaml_1_1_surprises_stay_texts(path: Path) -> None:
    path.write_text(GOOD + "    setup: [no, 12:30:00]\n")
    assert cluster.load(path).targets["local"].setup == ["no", "12:30:00"]


def test_no_tag_builds_an_object(path: Path) -> None:
    error_of(path, "default: !!python/object/apply:os.system [exit]\ntargets: {}\n")


@given(text=st.text(max_size=60), where=st.integers(0, len(GOOD)))
def test_any_text_is_a_cluster_or_a_clear_error(
    tmp_path_factory: pytest.TempPathFactory, text: str, where: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "cluster.yaml"
    path.write_bytes((GOOD[:where] + text + GOOD[where:]).encode(errors="surrogatepass"))
    try:
        cluster.load(path)
    except UserError as error:
        assert str(error).startswith("cluster.yaml")
