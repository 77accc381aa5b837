"""argparse that answers in the user's words.

Hyphens and underscores in names are the same, lists are separated by commas or spaces, an option that is given twice
is either added up (a list) or refused, and what is unknown is answered with what is near.
"""

import argparse
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn

# What people look for and Duel does not have under that name: the option, and what to do instead.
ABSENT: Mapping[str, str] = {
    **dict.fromkeys(("epochs", "steps", "iterations"), "--preset sets how long is measured ('main.py help presets')"),
    **dict.fromkeys(
        ("optimizer", "lr", "learning_rate", "momentum", "weight_decay", "loss"),
        "each benchmark has one published recipe, the same on both sides (docs/models.md)",
    ),
    **dict.fromkeys(("model", "models", "network"), "the model is named by --benchmark"),
    **dict.fromkeys(("batch", "bs"), "batch sizes are given by --batch_sizes"),
    **dict.fromkeys(("dtype", "fp16", "bf16", "amp", "half"), "number formats are chosen by --precision"),
    **dict.fromkeys(("gpus", "num_gpus", "ngpus", "gpu"), "the number of devices per node is given by --devices"),
    **dict.fromkeys(("num_nodes",), "the number of nodes is given by --nodes"),
    **dict.fromkeys(("compile", "channels_last", "jit"), "a switch is part of --mode, as in --mode default+compile"),
    **dict.fromkeys(
        ("partition", "account", "qos", "time", "mem", "gres", "nodelist", "cpus_per_task", "constraint"),
        "sbatch's options stand in cluster.yaml, under 'directives' of the target",
    ),
    **dict.fromkeys(("repeats", "repeat", "runs", "pairs"), "--preset sets how often a row is measured"),
    **dict.fromkeys(("seed",), "the seed is fixed: both sides must draw the same weights and batches"),
    **dict.fromkeys(("dataset", "data_dir", "data"), "the folder of data sets is 'data' of the target in cluster.yaml"),
    **dict.fromkeys(("output", "out", "results"), "records always go to results/"),
    **dict.fromkeys(("wandb", "wandb_project", "project"), "W&B is set by 'wandb' of the target in cluster.yaml"),
}
# Words of argparse that say less than they could.
_REWORDED = (
    (r"^argument (COMMAND|RUN|SHELL|TOPIC): ", r"\1: "),
    (r"^argument ", ""),
    (r"expected at least one argument$", "a value is missing"),
    (r"expected one argument$", "a value is missing"),
    (r"^the following arguments are required: (.*)$", r"\1 is needed"),
    (r"^(--\w+): ignored explicit argument .*$", r"\1 takes no value"),
    (r"^argument (--\w+): not allowed with argument (--\w+)$", r"\1 and \2 exclude each other"),
    (r"^(--\w+): not allowed with argument (--\w+)$", r"\1 and \2 exclude each other"),
)


def near(text: str, valid: Collection[str], synonyms: Mapping[str, str] | None = None) -> str:
    """The one of ``valid`` that ``text`` was probably meant to be; empty where nothing is near."""
    import difflib  # here, because only a mistake needs it

    plain = text.lower().replace("-", "_")
    if synonyms and plain in synonyms:
        return synonyms[plain]
    by_plain = {name.lower().replace("-", "_"): name for name in valid}
    close = difflib.get_close_matches(plain, by_plain, n=1, cutoff=0.6)
    begun = [name for name in by_plain if len(plain) >= 3 and name.startswith(plain)]
    within = [name for name in by_plain if len(plain) >= 4 and (plain in name or (len(name) >= 4 and name in plain))]
    found = [name for name in (*begun, *close, *within) if name]
    return by_plain[found[0]] if found else ""


def one_of(what: str, text: str, valid: Sequence[str], synonyms: Mapping[str, str] | None = None) -> str:
    """The one of ``valid`` that is ``text``, hyphens being underscores. Raises ArgumentTypeError where none is."""
    for name in (text, text.replace("-", "_")):
        if name in valid:
            return name
    guess = near(text, valid, synonyms)
    meant = f"did you mean {guess!r}? " if guess else ""
    raise argparse.ArgumentTypeError(f"unknown {what} {text!r}; {meant}valid: {', '.join(valid)}")


class Once(argparse.Action):
    """Stores a value, and refuses a second one: which of the two would count is anybody's guess."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        given = vars(namespace).setdefault("_given", set())
        if option and self.dest in given:
            raise argparse.ArgumentError(self, "given twice")
        given.add(self.dest)
        setattr(namespace, self.dest, values)


class Several(argparse.Action):
    """A list, separated by commas, spaces or both, that grows where the option is given again.

    ``convert`` makes a tuple of one word.
    """

    def __init__(
        self, option_strings: Sequence[str], dest: str, convert: Callable[[str], tuple[Any, ...]], **kwargs: Any
    ) -> None:
        super().__init__(option_strings, dest, nargs="+", **kwargs)
        self._convert = convert

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        words = [word for value in values for word in re.split(r"[,\s]+", value) if word]
        if not words:
            raise argparse.ArgumentError(self, "a value is missing")
        found = list(getattr(namespace, self.dest) or ())
        try:
            for word in words:
                found += self._convert(word)
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentError(self, str(error)) from None
        setattr(namespace, self.dest, tuple(dict.fromkeys(found)))

    def accepts(self, word: str) -> bool:
        """Whether ``word`` is one of its values."""
        try:
            self._convert(word)
        except argparse.ArgumentTypeError:
            return False
        return True


class Parser(argparse.ArgumentParser):
    """As argparse's; an error is one line that names the user's word, and exit code 2."""

    def __init__(self, prog: str, description: str = "", **kwargs: Any) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False, **kwargs)
        for action in (None, "store"):
            self.register("action", action, Once)

    @property
    def of_options(self) -> str:
        """How an error about an option that is not there begins."""
        return f"{self.prog!r} has no option" if self.prog.split()[1:] not in ([], ["submit"]) else "there is no option"

    def error(self, message: str) -> NoReturn:
        for pattern, text in _REWORDED:
            message = re.sub(pattern, text, message, flags=re.DOTALL)
        self.exit(2, f"{self.prog.split()[0]}: error: {printable(message)}\n")

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """``words`` as options. Ends the process where one is unknown."""
        needed = [action for action in self._actions if action.required and action.option_strings]
        for action in needed:  # asked for below: a word that is unknown says more about the mistake
            action.required = False
        found, unknown = self.parse_known_args(normalised(words))
        if unknown:
            self.error(self._of_unknown(unknown[0]))
        for action in needed:
            if getattr(found, action.dest) is None:
                self.error(f"{action.option_strings[0]} is needed")
        vars(found).pop("_given", None)
        return found

    def _of_unknown(self, word: str) -> str:
        if not word.startswith("-"):
            for action in self._actions:
                if isinstance(action, Several) and action.accepts(word):
                    return f"{word!r} is not expected here; did you mean {action.option_strings[0]} {word}?"
            return f"{word!r} is not expected here; '{self.prog} --help' shows what is"
        name = word.partition("=")[0]
        if instead := ABSENT.get(name.lstrip("-").lower()):
            return f"there is no option {name}: {instead}"
        valid = [option for option in self._option_string_actions if option.startswith("--")]
        guess = near(name.lstrip("-"), [option.removeprefix("--") for option in valid])
        meant = f"; did you mean --{guess}?" if guess else f"; '{self.prog} --help' lists its options"
        return f"{self.of_options} {name}{meant}"

    def options_of(self, words: Sequence[str]) -> list[tuple[str, list[str]]]:
        """(option, words behind it) of ``words``, as they stand; words before the first option have the name ''."""
        found: list[tuple[str, list[str]]] = [("", [])]
        for word in normalised(words):
            if word.startswith("--"):
                name, _, value = word.partition("=")
                found.append((name, [value] if value else []))
            else:
                found[-1][1].append(word)
        return found if found[0][1] else found[1:]

    def takes(self, option: str) -> argparse.Action | None:
        """The action of ``option``; None where there is none."""
        return self._option_string_actions.get(option)


def normalised(words: Sequence[str]) -> list[str]:
    """``words`` with the hyphens of the options' own names as underscores."""
    found = []
    for word in words:
        if re.match(r"--[A-Za-z]", word):
            name, equals, value = word[2:].partition("=")
            word = f"--{name.replace('-', '_')}{equals}{value}"
        found.append(word)
    return found


def printable(text: str) -> str:
    """``text`` without what a terminal would obey, such as escape sequences; line ends stay."""
    return "".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text)


def program() -> str:
    """What this command is called by."""
    return "duel" if os.path.basename(sys.argv[0]) == "duel" else "main.py"
