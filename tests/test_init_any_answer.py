"""``init`` where Slurm's tools may say anything: the file can be used, or there is none and it is said why."""

import shlex
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_init import jobs_of

from duel.errors import UserError
from duel.launch import cluster, init

# Words that matter somewhere, and any others; lines of the right form, and any text.
WORDS = """p gpu-a100 up down infinite 1-00:00:00 0:00 2 64 0 (null) gpu:a100:4(S:0-1) gpu:2 tpu:4 tpu-v4 chem normal
    long,gold YES ALL UNLIMITED 'a {nodes} {name} null true ~ 1.5 0x1F -x #c & * !t @ a: :a a#b " ' \\ [a] %j ä"""
KEYS = (
    "AllowAccounts DenyQos Hidden MaxCPUsPerNode DefMemPerCPU DefMemPerNode SelectType SelectTypeParameters ClusterName"
)
words = st.sampled_from(WORDS.split()) | st.text(st.characters(exclude_characters="|\n"), max_size=12)
valid = st.from_regex(init.WORD, fullmatch=True)
names = valid | valid | st.sampled_from(["p", "q"]) | words
numbers = st.integers(1, 10**6).map(str) | st.sampled_from(["1", "64", "512000", "99999999999"])
states = st.sampled_from(["up", "up", "up", "down"])
given_gres = st.sampled_from(["(null)", "gpu:a100:4", "gpu:3", "tpu:4", "gpu:a100:2,gpu:v100:1"]) | words


def lines(separator: str, *columns: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    right = st.lists(st.tuples(*columns).map(separator.join), min_size=1, max_size=5)
    return right.map("\n".join) | right.map("\n".join) | st.text(max_size=40)


settings = lines("=", st.sampled_from(KEYS.split()), words | numbers)
memory = st.sampled_from(["SelectTypeParameters = CR_CORE_MEMORY\n", ""])
answers = st.fixed_dictionaries(
    {
        "sinfo": lines("|", names, states, words, numbers, numbers, numbers, numbers | words, given_gres, words),
        "partition": lines(
            " ", names.map("PartitionName={}".format), settings.map(lambda text: text.replace("\n", " "))
        ),
        "config": st.tuples(memory, settings).map("".join),
        "sacctmgr": lines("|", st.just("duel"), names, names, st.sampled_from(["", "", "p"]), words, words, numbers),
    },
)


@given(answers, st.sets(st.sampled_from(["partition", "config", "sacctmgr"])))
def test_whatever_the_tools_say_the_file_can_be_used(
    tmp_path_factory: pytest.TempPathFactory, answers: dict[str, str], silent: set[str]
) -> None:
    def ask(*command: str) -> str:
        what = command[-1] if command[0] == "scontrol" else command[0]
        if what in silent:
            raise UserError(f"{what} does not answer")
        return answers[what]

    path = tmp_path_factory.mktemp("any") / "cluster.yaml"
    with patch.object(init, "_ask", ask):
        try:
            init.init(path, lambda line: None)
        except UserError as error:
            assert "Slurm shows no usable partition" in str(error)
            assert not path.exists()
            return
    for name, target in cluster.load(path).targets.items():
        for job in jobs_of(name, target):
            for line in target.for_job(job).directives:
                assert shlex.split(line, comments=True) == [line]
                assert not set("{}#\"'\\$`") & set(line)
