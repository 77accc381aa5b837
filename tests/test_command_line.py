"""The command line: what is understood, what a mistake is answered by, and that nothing is dropped without a word."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Main, clean_environment
from golden import regenerate

from duel.arguments import Parser
from duel.cli import main as cli
from duel.cli import topics


def test_every_mistake_is_answered_as_written_down() -> None:
    found = regenerate.mistakes()
    assert found == (regenerate.GOLDEN / "mistakes.txt").read_text(), regenerate.REMEDY
    lines = found.splitlines()
    assert sum(line.startswith("$") for line in lines) >= 60
    answers = [line for line in lines if line[:3] in ("2: ", "0: ", "1: ")]
    assert all(answer.startswith("2: ") for answer in answers)
    assert "Traceback" not in found
    assert "\x1b" not in found


def test_the_command_line_is_pinned() -> None:
    assert regenerate.command_line() == (regenerate.GOLDEN / "help.txt").read_text(), regenerate.REMEDY


def test_the_first_page_fits_a_screen_and_names_every_option_and_command() -> None:
    for name in ("python main.py", "duel"):
        page = topics.front(name, {command.name: command.text for command in cli.COMMANDS})
        assert max(map(len, page.splitlines())) <= topics.WIDTH
        assert len(page.splitlines()) <= 36
    options = {option for option in cli.SUBMIT.parser()._option_string_actions if option.startswith("--")}
    assert set(re.findall(r"--\w+", page)) == options | {"--watch"}


def test_the_examples_of_the_first_page_are_understood() -> None:
    page = topics.front("main.py", {"status": ""})
    examples = [line.split()[1:] for line in page.splitlines() if line.startswith("  main.py")]
    assert len(examples) == 3
    for words in examples:
        cli.parsed(words)


@pytest.mark.parametrize(
    ("words", "same"),
    [
        ("--benchmark mnist --use-case 1 --dry-run", "--benchmark mnist --use_case 1 --dry_run"),
        ("--benchmark vit-b16 --use_case train-single", "--benchmark vit_b16 --use_case train_single"),
        ("--benchmark mnist gcn --use_case 1 5", "--benchmark mnist,gcn --use_case 1,5"),
        ("--benchmark mnist --benchmark gcn --use_case=1", "--benchmark mnist,gcn --use_case 1"),
        (
            "--benchmark mnist --use_case 5 --batch_sizes 1, 8,32 '64 128'",
            "--benchmark=mnist --use_case=5 --batch_sizes=1,8,32,64,128",
        ),
        (
            "--benchmark mnist --use_case 1 --mode tuned-channels-last+compile",
            "--benchmark mnist --use_case 1 --mode tuned-channels_last+compile",
        ),
        ("submit --benchmark mnist --use_case 1", "--benchmark mnist --use_case 1"),
        ("--benchmark nlp mnist nlp --use_case all", "--benchmark gpt2 mnist --use_case 1 2 3 4 5"),
        ("status --benchmark nlp", "status --benchmark gpt2"),
        ("validate --benchmark gnn mnist", "validate --benchmark graphnet,mnist"),
    ],
)
def test_what_is_written_in_two_ways_means_the_same(words: str, same: str) -> None:
    assert cli.parsed(shlex.split(words)) == cli.parsed(shlex.split(same))


def test_a_target_called_like_a_command_and_values_are_not_taken_for_commands() -> None:
    words = ["--benchmark", "mnist", "--use_case", "1", "--target", "status", "--weights", "collect"]
    command, args = cli.parsed(words)
    assert command is cli.SUBMIT
    assert (args.target, args.weights) == ("status", "collect")


# Every command refuses every option of the others: none is dropped.
@pytest.mark.parametrize("command", cli.COMMANDS, ids=lambda command: command.name)
def test_an_option_before_a_command_is_never_dropped(command: cli.Command, capsys: pytest.CaptureFixture[str]) -> None:
    submit, taken = cli.SUBMIT.parser(), command.parser()
    for option, action in submit._option_string_actions.items():
        if not option.startswith("--") or option == "--help":
            continue
        if (option, command.name) == ("--use_case", "validate"):
            continue  # the name of a use case, too
        value = [] if action.nargs == 0 else [{"--benchmark": "mnist", "--framework": "jax"}.get(option, "1")]
        with pytest.raises(SystemExit) as end:
            cli.parsed([option, *value, command.name])
        assert end.value.code == 2
        answer = capsys.readouterr().err
        assert "options come after the command" in answer if taken.takes(option) else f"not take {option}" in answer


def test_what_a_command_does_not_know_changes_nothing(main: Main, checkout: Path) -> None:
    for words in (["--dry_run", "collect"], ["--benchmark", "gcn", "--framework", "pytorch", "resubmit"]):
        done = main(*words)
        assert done.returncode == 2, done.stdout
        assert done.stdout == ""
    assert not (checkout / "results" / "results.csv").exists()


def run(checkout: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """In the Python that the environments are made of, which has nothing that Duel needs."""
    python = Path(sys.base_prefix) / "bin" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
    return subprocess.run(
        [str(python), "-I", *words], cwd=checkout, env=clean_environment(), capture_output=True, text=True, check=False
    )


def test_outside_its_environment_main_py_goes_on_inside_it(checkout: Path) -> None:
    done = run(checkout, "main.py", "collect")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "results/results.csv: 0 rows (no rows yet)\n"


def test_a_python_that_does_not_look_beside_the_script_finds_it_all_the_same(checkout: Path) -> None:
    command = [sys.executable, "-P", "main.py", "help", "modes"]
    ran = subprocess.run(command, cwd=checkout, capture_output=True, text=True, env=clean_environment(), check=False)
    assert ran.returncode == 0, ran.stderr


def test_without_an_environment_its_remedy_is_named(checkout: Path) -> None:
    (checkout / ".venv").unlink()
    done = run(checkout, "main.py", "status")
    assert done.returncode == 1
    assert "lacks" in done.stderr
    assert done.stderr.endswith("; 'make driver-env' installs it\n")


def test_the_command_duel_is_main_py_by_another_name(checkout: Path, tmp_path: Path) -> None:
    made = subprocess.run(
        ["make", "-o", "driver-env", "duel", f"PREFIX={tmp_path / 'prefix'}"],
        cwd=checkout,
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    command = tmp_path / "prefix" / "bin" / "duel"
    for words, said in ((["help"], "usage: duel [OPTIONS]"), (["statsu"], "duel: error: unknown command 'statsu'")):
        done = subprocess.run(
            [str(command), *words], cwd="/", env=clean_environment(), capture_output=True, text=True, check=False
        )
        assert said in done.stdout + done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_completes_what_there_is(main: Main, tmp_path: Path, shell: str) -> None:
    script = main("completion", shell).stdout
    for word in ("resubmit", "--batch_sizes", "resnet50", "--follow"):
        assert word in script
    if shell == "bash":
        (tmp_path / "duel.bash").write_text(script)
        ask = (
            f"source {shlex.quote(str(tmp_path / 'duel.bash'))}; COMP_WORDS=(duel res); COMP_CWORD=1; "
            "_shtab_duel; printf '%s\\n' ${COMPREPLY[@]}"
        )
        done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=False)
        assert done.stdout.split() == ["resubmit"], done.stderr


def test_an_error_cannot_write_to_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        Parser("main.py").error("\x1b[2J and \x07")
    assert capsys.readouterr().err == "main.py: error: \\x1b[2J and \\x07\n"
