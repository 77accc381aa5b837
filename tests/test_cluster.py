"""cluster.yaml: what is wrong in it is said with file, line and column, and what would be valid."""

import re
import string
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st

from duel.catalogue import FRAMEWORKS
from duel.errors import UserError
from duel.job import Job
from duel.launch import cluster, directives, document, schema, script
from duel.launch.schema import Target
from duel.launch.values import PLACEHOLDERS

GOOD = """\
default: local
targets:
  local:
    scheduler: local
    python: {jax: a/python, pytorch: b/python}
"""
VARIANT = GOOD + "    variants:\n      - when: "


def job(nodes: int = 1, devices_per_node: int = 1, framework: str = "jax", target: str = "here", **more: Any) -> Job:
    return Job(framework, "mnist", 1, "standard", "fp32", None, target, nodes, devices_per_node, **more)


def error_of(path: Path, text: str | bytes) -> str:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError) as caught:
        cluster.load(path)
    return str(caught.value)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cluster.yaml"


def test_every_target_of_the_shipped_file_has_its_scripts_and_nothing_to_remark() -> None:
    loaded = cluster.load(ROOT / "cluster.yaml")
    assert loaded.target(None)[0] == "local"
    assert list(loaded.targets) == ["local", "h100", "h100-nodes", "cpu", "tpu"]
    for name, target in loaded.targets.items():
        for framework in FRAMEWORKS:
            if getattr(target.python, framework) is not None:
                assert script.render(job(target=name, framework=framework), target, Path("/opt/duel"))
        assert directives.warnings(target.directives) == []
    assert loaded.targets["tpu"].python.pytorch is None


def test_the_shipped_file_explains_every_key_and_placeholder() -> None:
    text = (ROOT / "cluster.yaml").read_text()
    models = (schema.Setup, schema.When, schema.Variant, schema.Pythons, schema.Wandb)
    for key in (*Target.model_fields, *(key for model in models for key in model.model_fields), "like", "defaults"):
        assert re.search(rf"\b{key}\b", text), key
    assert "\n#   submit: " in text, "not only that of setup"
    for name in PLACEHOLDERS:
        assert f"{{{name}}}" in text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "cluster.yaml: empty"),
        ("# only a comment\n", "cluster.yaml: empty"),
        ("- a\n", "cluster.yaml:1:1: expected a mapping with 'default' and 'targets', not list"),
        ("=", "cluster.yaml:1:1: expected a mapping"),
        ("just a text\n", "cluster.yaml:1:1: expected a mapping with 'default' and 'targets', not str"),
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
        (GOOD + '    data: ""\n', "cluster.yaml:6:5: targets.local.data: '' is not one line"),
        (GOOD.replace("local\n", "nowhere\n", 1), "cluster.yaml:1:1: default: unknown target 'nowhere'; valid: local"),
        ("default: x\ntargets: {}\n", "cluster.yaml:1:1: default: unknown target 'x'; valid: none, since 'targets'"),
        (GOOD.replace("  local:", "  a b:"), "cluster.yaml:3:3: target 'a b': letters, digits"),
        ("default: x\ntargets:\n  1: 2\n", "cluster.yaml:3:3: targets.1: Input should be a mapping, not 2"),
        (
            GOOD.replace("scheduler: local", "scheduler: pbs"),
            "scheduler: Input should be 'local' or 'slurm', not 'pbs'",
        ),
        (GOOD.replace("    scheduler: local\n", ""), "cluster.yaml:3:3: targets.local.scheduler: this key is missing"),
        (GOOD.replace("jax: a/python, ", ""), "cluster.yaml:5:5: targets.local.python.jax: this key is missing"),
        (GOOD.replace("a/python", '"a\\nb"'), "cluster.yaml:5:14: targets.local.python.jax: 'a\\nb' is not one line"),
        (b"\xff\xfe", "cluster.yaml: not UTF-8 text, at byte 0"),
        ("a: " + "x" * document.MAX_BYTES, "bytes; at most 1000000 are allowed"),
        ("[" * 700, "cluster.yaml: nested too deeply"),
        ("default: " + "{a: " * 400 + "}" * 400, "cluster.yaml: nested too deeply"),
        ("default: " + "9" * 5000, "cluster.yaml: Exceeds the limit"),
        (
            "a0: &a0 [x]\n" + "".join(f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 10)}]\n" for n in range(9)),
            "or over 100000 entries with aliases expanded",
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_place(path: Path, text: str | bytes, said: str) -> None:
    assert said in error_of(path, text)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("directives: 30", "6:5: targets.local.directives: Input should be a valid list, not 30"),
        ("directives:  # --time=1", "6:5: targets.local.directives: Input should be a valid list, not None"),
        ("directives: time=1", "6:5: targets.local.directives.0: 'time=1' is not an sbatch option"),
        ("directives: [12:30:00]", "6:18: targets.local.directives.0: '12:30:00' is not an sbatch option; write it as"),
        ("directives: ['#SBATCH -p gpu']", "6:18: targets.local.directives.0: '#SBATCH -p gpu' is not an sbatch"),
        ("directives: [-]", "6:18: targets.local.directives.0: '-' is not an sbatch option"),
        ("directives: [--]", "6:18: targets.local.directives.0: '--' is not an sbatch option"),
        ('directives: ["--a\\nb"]', "6:18: targets.local.directives.0: '--a\\nb' is not one line"),
        ('directives: ["--a\\u0085b"]', "6:18: targets.local.directives.0: '--a\\x85b' is not one line"),
        ('directives: ["--a\\u2028b"]', "6:18: targets.local.directives.0: '--a\\u2028b' is not one line"),
        (
            "directives: ['--gres=gpu:{gpus}']",
            "6:18: targets.local.directives.0: unknown placeholder {gpus}; valid: {nodes}, {devices_per_node}, {dev",
        ),
        ("setup: [a]", "6:5: targets.local.setup: Input should be a mapping, not ['a']"),
        ("setup: {jobs: [a]}", "6:13: targets.local.setup.jobs: unknown key; valid: submit, job, node, task"),
        ("setup: {job: 5}", "6:13: targets.local.setup.job: Input should be a valid list, not 5"),
        ('setup: {job: ["a\\rb"]}', "6:19: targets.local.setup.job.0: 'a\\rb' is not one line"),
        ("setup: {task: [' ']}", "6:20: targets.local.setup.task.0: ' ' is not one line"),
        ("setup: {job: 'ulimit -u {cpus_per_node}'}", "'ulimit -u {cpus_per_node}' needs 'per_device: {cpus: NUMBER}'"),
        (
            "per_device: {tasks: 8}",
            "6:18: targets.local.per_device.tasks: 'tasks': {tasks_per_node} is of the job; use an",
        ),
        ("variants: [{when: {}, directives: --qos=x}]", "only a slurm target takes variants.directives; this one has"),
        ("variants: [{when: {}, launcher: null}]", "only a slurm target takes variants.launcher; this one has"),
        ("launcher: 'srun \"'", "6:5: targets.local.launcher: 'srun \"': No closing quotation"),
        ("launcher: srun \\", "6:5: targets.local.launcher: 'srun \\\\': No escaped character"),
        ("launcher: 'srun # mine'", "6:5: targets.local.launcher: 'srun # mine' has a comment, which would hide"),
        ("launcher: ''", "6:5: targets.local.launcher: '' is not one line"),
        ("node_launcher: null", "6:5: targets.local.node_launcher: Input should be a valid string, not None"),
        ("submit: [sbatch]", "6:5: targets.local.submit: Input should be a valid string"),
        ("shebang: /bin/bash", "6:5: targets.local.shebang: '/bin/bash' does not begin with '#!'"),
        ('shebang: "#!a\\nb"', "6:5: targets.local.shebang: '#!a\\nb' is not one line"),
        ("device: fpga", "6:5: targets.local.device: Input should be 'cpu', 'gpu', 'tpu' or 'mps', not 'fpga'"),
        ("nodes: 0", "6:5: targets.local.nodes: 0 is not a positive number"),
        ("nodes: '2'", "6:5: targets.local.nodes: Input should be a valid integer, not '2'"),
        ("nodes: true", "6:5: targets.local.nodes: Input should be a valid integer, not True"),
        ("max_jobs: -1", "6:5: targets.local.max_jobs: -1 is not a positive number"),
        ("devices_per_node: x", "6:5: targets.local.devices_per_node.0: Input should be a valid integer, not 'x'"),
        ("devices_per_node: []", "6:5: targets.local.devices_per_node: at least one number is needed"),
        ("devices_per_node: [4, 0]", "6:5: targets.local.devices_per_node: 0 is not a positive number"),
        ("internet: 'no'", "6:5: targets.local.internet: Input should be a valid boolean, not 'no'"),
        ("without: [mem]", "6:15: targets.local.without.0: 'mem' is not the long name of an sbatch option"),
        ("per_device: {Cpus: 8}", "6:18: targets.local.per_device.Cpus: 'Cpus': use lower-case letters"),
        ("per_device: {cpus: 0}", "6:18: targets.local.per_device.cpus: 0 is not a positive number"),
        ("like: other", "6:5: targets.local.like: no such target 'other'; valid: none"),
        ("like: local", "6:5: targets.local.like: no such target 'local'; valid: none"),
        ("directives: [--gres={gpu}]", "6:25: expected ',' or ']', but got '{'; quote a value that has a ',' or a"),
        ("directives: |\n      #PBS -l walltime=1", "directives: '#PBS -l walltime=1' is for another scheduler"),
        ("directives: |\n      #SBATCH -n1\n      #SBATCH hetjob", "'#SBATCH hetjob': heterogeneous jobs are not"),
        ("submit: sbatch -n1 ':' -n2", "heterogeneous jobs are not supported"),
        ("launcher: srun --het-group=0,1", "heterogeneous jobs are not supported"),
        ("directives: |\n      ##SBATCH --time=1", "'##SBATCH --time=1': Slurm only reads lines that begin with"),
        ("directives: |\n      #SBATCH--time=1", "'#SBATCH--time=1': Slurm only reads lines that begin with"),
        ("pass_variables: [A=1]", "6:22: targets.local.pass_variables.0: 'A=1' is not the name of a variable"),
        ("pause: -1", "6:5: targets.local.pause: Input should be greater than or equal to 0, not -1"),
        ("pause: .nan", "6:5: targets.local.pause: Input should be less than or equal to 3600, not nan"),
        ("pause: .inf", "6:5: targets.local.pause: Input should be less than or equal to 3600, not inf"),
        ("variants: {}", "6:5: targets.local.variants: Input should be a valid list"),
        ("variants: [{}]", "6:16: targets.local.variants.0.when: this key is missing"),
        ("variants: [{when: 4}]", "6:17: targets.local.variants.0.when: Input should be a mapping, not 4"),
        (
            "variants: [{when: {}, python: x}]",
            "6:27: targets.local.variants.0.python: unknown key; valid: when, directives, launcher, setup",
        ),
        (
            "variants: [{when: {size: 4}}]",
            "6:24: targets.local.variants.0.when.size: unknown key; valid: framework, nodes, devices",
        ),
        ("variants: [{when: {framework: tf}}]", "framework: Input should be 'jax' or 'pytorch', not 'tf'"),
        ("variants: [{when: {nodes: 0}}]", "0.when.nodes: 0 is not a range; valid: a number such as 1, '2-4', or '5+'"),
        ("variants: [{when: {nodes: 4-2}}]", "6:24: targets.local.variants.0.when.nodes: '4-2' ends before it begins"),
        ("variants: [{when: {devices: 1.5}}]", "devices: 1.5 is not a range"),
        ("variants: [{when: {devices: true}}]", "devices: True is not a range"),
        ("variants: [{when: {devices: [1, 2]}}]", "devices: [1, 2] is not a range"),
        (
            "variants: [{when: {}, directives: [x]}]",
            "6:40: targets.local.variants.0.directives.0: 'x' is not an sbatch option",
        ),
        (
            "variants: [{when: {}, setup: {later: [x]}}]",
            "6:35: targets.local.variants.0.setup.later: unknown key; valid: submit, job, node, task",
        ),
    ],
)
def test_every_key_says_what_it_takes(path: Path, line: str, said: str) -> None:
    assert said in error_of(path, f"{GOOD}    {line}\n")


def test_every_mistake_is_named_at_once_and_a_long_one_is_cut(path: Path) -> None:
    text = error_of(path, GOOD + f"    one: 1\n    nodes: {'x' * 10_000}\n")
    assert "6:5: targets.local.one" in text
    assert "7:5: targets.local.nodes" in text
    assert len(text) < 600


def test_a_missing_file_is_named(path: Path) -> None:
    with pytest.raises(UserError, match=r"cluster\.yaml: not found in"):
        cluster.load(path)


def test_an_unreadable_file_is_named(path: Path) -> None:
    path.mkdir()
    with pytest.raises(UserError, match=r"cluster\.yaml is not a regular file"):
        cluster.load(path)


def test_yaml_1_1_surprises_stay_texts(path: Path) -> None:
    path.write_text(GOOD + "    setup: {job: [no, 12:30:00]}\n")
    assert cluster.load(path).targets["local"].setup.job == ["no", "12:30:00"]


def test_lines_may_be_pasted_as_they_stand_in_a_script(path: Path) -> None:
    path.write_text(
        GOOD.replace("scheduler: local", "scheduler: slurm")
        + "    directives: |\n"
        + "      #SBATCH --partition=gpu   # the large one\n"
        + "      #SBATCH\t-A 'a: b' \n"
        + "\n"
        + "      # ask for the last one\n"
        + "      --time=10\n"
        + "    setup:\n"
        + "      job: |\n"
        + '        export A="x: y"  # both\n'
        + "\n"
        + "        if true; then\n"
        + "        \tmodule load {name}\n"
        + "        fi\n"
        + "      task: ulimit -c 0\n"
        + "    variants: [{when: {}, directives: --qos=x}]\n"
    )
    loaded = cluster.load(path)
    made = loaded.targets["local"].for_job(job(target="local"))
    assert made.directives == ["--partition=gpu   # the large one", "-A 'a: b'", "--time=10", "--qos=x"]
    assert made.setup.job == ['export A="x: y"  # both', "", "if true; then", "\tmodule load jax_mnist_1", "fi"]
    assert made.setup.task == ["ulimit -c 0"]
    assert loaded.where(job(target="local"), "--time=10") == "cluster.yaml:11"


def test_targets_may_share_what_they_have_in_common(path: Path) -> None:
    path.write_text(GOOD.replace("local:\n", "local: &first\n") + "  other:\n    <<: *first\n    scheduler: slurm\n")
    loaded = cluster.load(path)
    assert loaded.targets["other"] == loaded.targets["local"].model_copy(
        update={"scheduler": "slurm", "devices_per_node": [1]}  # two are this machine's alone
    )


def test_no_tag_builds_an_object(path: Path) -> None:
    built = path.parent / "built"
    error_of(path, f"default: !!python/object/apply:os.mkdir ['{built}']\ntargets: {{}}\n")
    assert not built.exists()


@pytest.mark.parametrize(
    ("given", "inside", "outside"),
    [("1", [1], [2]), ("2-4", [2, 4], [1, 5]), ("5+", [5, 10**6], [4]), ("3-3", [3], [2, 4])],
)
@pytest.mark.parametrize("key", ["nodes", "devices"])
def test_a_range_holds_from_its_first_number_to_its_last(
    path: Path, key: str, given: str, inside: list[int], outside: list[int]
) -> None:
    path.write_text(f"{VARIANT}{{{key}: {given}}}\n")
    when = cluster.load(path).targets["local"].variants[0].when
    values: dict[str, int | str] = {"framework": "jax", "nodes": 1, "devices": 1}
    assert [when.holds(values | {key: number}) for number in inside] == [True] * len(inside)
    assert [when.holds(values | {key: number}) for number in outside] == [False] * len(outside)


def test_a_directive_of_a_script_is_found_again_in_the_file(path: Path) -> None:
    path.write_text(
        GOOD.replace("scheduler: local", "scheduler: slurm")
        + "    nodes: 4\n"
        + "    directives:\n"
        + "      - --partition=gpu\n"
        + "      - --nodes={nodes}\n"
        + "      - --time=10\n"
        + "    variants:\n"
        + "      - when: {nodes: 2+}\n"
        + "        directives: [--time=20]\n"
        + "      - when: {nodes: 4}\n"
        + "        directives:\n"
        + "          - --qos=all\n"
        + "          - --time=20\n"
    )
    loaded = cluster.load(path)

    def where(line: str, nodes: int) -> str:
        return loaded.where(job(nodes, target="local"), line)

    assert where("--partition=gpu", 1) == "cluster.yaml:8"
    assert where("--nodes=3", 3) == "cluster.yaml:9"
    assert where("--time=10", 1) == "cluster.yaml:10"
    assert where("--time=20", 2) == "cluster.yaml:13"
    assert where("--time=20", 4) == "cluster.yaml:17"
    assert where("--qos=all", 4) == "cluster.yaml:16"
    assert where("--qos=all", 2) == ""
    assert where("--no-requeue", 1) == "", "Duel's own"


def test_an_unknown_target_is_named_with_the_valid_ones(path: Path) -> None:
    path.write_text(GOOD)
    with pytest.raises(UserError, match=r"unknown target 'mars'; valid in cluster\.yaml: local"):
        cluster.load(path).target("mars")


@given(text=st.text(max_size=60), where=st.integers(0, len(GOOD)))
def test_any_text_is_a_cluster_or_a_clear_error(
    tmp_path_factory: pytest.TempPathFactory, text: str, where: int
) -> None:
    read(tmp_path_factory, GOOD[:where] + text + GOOD[where:])


@given(text=st.text("\t\n !&*|>%@`#-?:,[]{}'\"\\<~=" + string.ascii_lowercase[:3] + "019.", max_size=40))
def test_any_yaml_is_a_cluster_or_a_clear_error(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    for before in ("", "default: x\ntargets: ", GOOD + "    nodes: ", GOOD + "    directives: [", VARIANT):
        read(tmp_path_factory, before + text)


def read(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "cluster.yaml"
    path.write_bytes(text.encode(errors="surrogatepass"))
    try:
        cluster.load(path)
    except UserError as error:
        assert str(error).startswith("cluster.yaml")
