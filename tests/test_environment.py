"""Which variables of the calling shell reach sbatch and the jobs: those of a list, and nothing else."""

import os
import subprocess

import pytest

from duel.job import Job
from duel.launch import environment, preflight
from duel.launch.schema import Target


def target(**keys: object) -> Target:
    return Target.model_validate({"scheduler": "slurm", "python": {"jax": "python", "pytorch": "python"}} | keys)


PASSED = [
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "LANG", "LC_ALL", "TZ", "TMPDIR", "SLURM_CONF", "KRB5CCNAME"),
    *("MODULEPATH", "LOADEDMODULES", "LMOD_CMD", "__LMOD_REF_COUNT_PATH", "_ModuleTable001_", "BASH_ENV"),
    *("BASH_FUNC_module%%", "BASH_FUNC_ml%%", "BASH_FUNC__module_raw%%", "LD_LIBRARY_PATH", "CPATH", "MANPATH"),
    *("SCRATCH", "I_MPI_ROOT", "XDG_CACHE_HOME", "PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX", "http_proxy", "no_proxy"),
    *("HTTPS_PROXY", "SSL_CERT_FILE", "WANDB_MODE", "WANDB_PROJECT", "WANDB_ENTITY", "WANDB_BASE_URL", "NETRC"),
    *("WANDB__DISABLE_META", "DUEL_SILENCE_SECONDS"),
]
KEPT_BACK = [
    *("MY_PAT", "OPENAI_APIKEY", "PGPASS", "PGPASSWORD", "WANDB_API_KEY", "GITHUB_TOKEN", "HF_TOKEN", "AWS_PROFILE"),
    *("AWS_ACCESS_KEY_ID", "FOO", "SBATCH_ACCOUNT", "SBATCH_EXPORT", "SLURM_JOB_ID", "SLURM_CLUSTERS", "CONDA_TOKEN"),
    *("SSH_AUTH_SOCK", "APPTAINER_DOCKER_PASSWORD", "BASH_FUNC_which%%", "LD_PRELOAD", "XLA_FLAGS", "CC"),
    *("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"),
]


@pytest.mark.parametrize("name", PASSED)
def test_what_jobs_need_is_passed(name: str) -> None:
    assert environment.passes(name, target())


@pytest.mark.parametrize("name", KEPT_BACK)
def test_all_else_is_kept_back_unless_the_target_names_it(name: str) -> None:
    assert not environment.passes(name, target())
    if "%" not in name:
        assert environment.passes(name, target(pass_variables=[name]))


def test_sbatch_s_environment_is_that_list_and_ours_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_PAT", "secret")
    monkeypatch.setenv("LET_THROUGH", "yes")
    before = dict(os.environ)
    with environment.environment(target(pass_variables=["LET_THROUGH"])) as left_out:
        assert "MY_PAT" in left_out
        assert set(os.environ) == set(before) - set(left_out)
        assert os.environ["LET_THROUGH"] == "yes"
    assert dict(os.environ) == before


def test_what_waits_gets_the_variables_of_its_submission(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SBATCH_ACCOUNT", "of the sender")
    monkeypatch.delenv("SBATCH_QOS", raising=False)
    monkeypatch.setenv("SBATCH_RESERVATION", "of the sender")
    before = dict(os.environ)
    chosen = target(pass_variables=["SBATCH_ACCOUNT", "SBATCH_QOS", "SBATCH_RESERVATION"])
    with environment.environment(chosen, {"SBATCH_ACCOUNT": "mine", "SBATCH_QOS": "high", "LD_PRELOAD": "x"}):
        found = {name: value for name, value in os.environ.items() if name.startswith(("SBATCH_", "LD_PRE"))}
    assert found == {"SBATCH_ACCOUNT": "mine", "SBATCH_QOS": "high"}
    assert dict(os.environ) == before


def remarks(left_out: list[str], lines: list[str] | None = None, **keys: object) -> list[str]:
    return environment.remarks(left_out, target(**keys), "site", lines or [])


def test_a_plain_shell_leaves_nothing_to_say() -> None:
    usual = ["_", "SHLVL", "LS_COLORS", "SSH_CONNECTION", "SSH_TTY", "XDG_SESSION_ID", "DISPLAY", "MAIL", "HISTSIZE"]
    assert remarks(usual) == []
    assert remarks(["SLURM_JOB_ID", "SBATCH_TIMELIMIT", "XLA_FLAGS", "CUDA_VISIBLE_DEVICES"]) == []


def test_others_are_counted_with_how_to_see_and_to_pass_them() -> None:
    (said,) = remarks(["MY_PAT", "FOO", "SHLVL"])
    assert said == (
        "2 variables of this shell not passed to the jobs: 'python main.py doctor --target site' lists them, "
        "'pass_variables' in cluster.yaml passes them"
    )
    assert remarks(["FOO"])[0].startswith("1 variable of this shell")


def test_what_decides_where_a_job_runs_is_named_unless_a_line_gives_it() -> None:
    (said,) = remarks(["SBATCH_ACCOUNT"])
    assert said.startswith("SBATCH_ACCOUNT is not passed on, and the target has no --account: ")
    assert remarks(["SBATCH_ACCOUNT"], ["-A mine"]) == []
    assert remarks(["WANDB_API_KEY"])[0].startswith("WANDB_API_KEY is not passed to jobs")


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("cp -r $DATASET /tmp", True),
        ('cp -r "${DATASET}/x" /tmp', True),
        ("cp -r ${DATASET:-/data} /tmp", True),
        ("cp -r $DATASETS /tmp", False),
        ("export DATASET=/data && ls $DATASET", False),
        ("--export=ALL,DATASET", True),
        ("--export=ALL,DATASET=/data", False),
    ],
)
def test_what_the_set_up_lines_use_is_named(line: str, named: bool) -> None:
    keys: dict[str, object] = {"directives": [line]} if line.startswith("--") else {"setup": {"job": [line]}}
    said = remarks(["DATASET"], **keys)
    assert any(
        "the target's lines use DATASET," in words and "'pass_variables: [DATASET]'" in words for words in said
    ) == (named)


def test_lines_of_one_side_are_looked_at_too() -> None:
    variants = [{"when": {"framework": "pytorch"}, "setup": {"job": ["export X=$MY_DATA"]}}]
    job = Job("paired", "mnist", 1, "standard", "fp32", None, "here")
    assert environment._used(["MY_DATA"], target(variants=variants).for_job(job)) == ["MY_DATA"]


def test_lines_for_the_login_node_may_be_comments_alone() -> None:
    command = preflight.command(target(submit="echo", setup={"submit": ["# module load slurm"]}), ["sent"])
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "sent\n"
