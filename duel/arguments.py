"""argparse with errors in the user's terms.

Hyphens and underscores in names are interchangeable, lists are separated by commas or spaces, an option given twice is
either extended (a list) or refused, and unknown names get a suggestion.
"""

import argparse
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn

# Options that people look for and Duel does not have under that name, each with what to do instead.
ABSENT: Mapping[str, str] = {
    **dict.fromkeys(("steps", "iterations"), "--preset sets how long to measure ('main.py help presets')"),
    **dict.fromkeys(
        ("optimizer", "lr", "learning_rate", "momentum", "weight_decay", "loss"),
        "each benchmark has one published recipe, the same on both sides (docs/models.md)",
    ),
    **dict.fromkeys(("model", "models", "network"), "choose the model with --benchmark"),
    **dict.fromkeys(("batch", "bs"), "set batch sizes with --batch_sizes"),
    **dict.fromkeys(("dtype", "fp16", "bf16", "amp", "half"), "choose number formats with --precision"),
    **dict.fromkeys(("gpus", "num_gpus", "ngpus", "gpu"), "set the number of devices per node with --devices"),
    **dict.fromkeys(("num_nodes",), "set the number of nodes with --nodes"),
    **dict.fromkeys(("compile", "channels_last", "jit"), "a switch is part of --mode, as in --mode default+compile"),
    **dict.fromkeys(
        ("partition", "account", "qos", "time", "mem", "gres", "nodelist", "cpus_per_task", "constraint"),
        "sbatch options go in cluster.yaml, under the target's 'directives'",
    ),
    **dict.fromkeys(("repeats", "repeat", "runs", "pairs"), "--preset sets how often a row is measured"),
    **dict.fromkeys(("seed",), "measured rows all have the same seed; a training takes several with --seeds"),
    **dict.fromkeys(("data_dir", "data"), "the data folder is the target's 'data' in cluster.yaml"),
    **dict.fromkeys(("output", "out", "results"), "records always go to results/"),
    **dict.fromkeys(("wandb", "wandb_project", "project"), "W&B is configured by the target's 'wandb' in cluster.yaml"),
}
# Messages of argparse that could be clearer, and their replacements.
_REWORDED = (
    (r"^argument (COMMAND|RUN|SHELL|TOPIC): ", r"\1: "),
    (r"^argument ", ""),
    (r"expected at least one argument$", "a value is missing"),
    (r"expected one argument$", "a value is missing"),
    (r"^the following arguments are required: ([^,]*)$", r"\1 is needed"),
    (r"^the following arguments are required: (.*), (.*)$", r"\1 and \2 are needed"),
    (r"^(--\w+): ignored explicit argument .*$", r"\1 takes no value"),
    (r"^argument (--\w+): not allowed with argument (--\w+)$", r"\1 and \2 cannot be combined"),
    (r"^(--\w+): not allowed with argument (--\w+)$", r"\1 and \2 cannot be combined"),
)


def near(text: str, valid: Collection[str], synonyms: Mapping[str, str] | None = None) -> str:
    """Return the one of ``valid`` that ``text`` was probably meant to be, or "" if none is close."""
    import difflib  # here, because it is only needed after a mistake

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
    """Return the one of ``valid`` that ``text`` names, with hyphens or underscores, or raise ArgumentTypeError."""
    for name in (text, text.replace("-", "_")):
        if name in valid:
            return name
    guess = near(text, valid, synonyms)
    meant = f"did you mean {guess!r}? " if guess else ""
    raise argparse.ArgumentTypeError(f"unknown {what} {text!r}; {meant}valid: {', '.join(valid)}")


class Once(argparse.Action):
    """Store a value, and refuse a second one: which of the two would count is anybody's guess."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        given = vars(namespace).setdefault("_given", set())
        if option and self.dest in given:
            raise argparse.ArgumentError(self, "given twice")
        given.add(self.dest)
        setattr(namespace, self.dest, values)


class Several(argparse.Action):
    """Collect a list, separated by commas, spaces or both, and extend it if the option is given again.

    ``convert`` turns one item into a tuple.
    """

    def __init__(
        self, option_strings: Sequence[str], dest: str, convert: Callable[[str], tuple[Any, ...]], **kwargs: Any
    ) -> None:
        super().__init__(option_strings, dest, nargs="+", **kwargs)
        self._convert = convert

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        items = [item for value in values for item in re.split(r"[,\s]+", value) if item]
        if not items:
            raise argparse.ArgumentError(self, "a value is missing")
        found = list(getattr(namespace, self.dest) or ())
        try:
            for item in items:
                found += self._convert(item)
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentError(self, str(error)) from None
        setattr(namespace, self.dest, tuple(dict.fromkeys(found)))

    def accepts(self, text: str) -> bool:
        """Return whether ``text`` is a valid item."""
        try:
            self._convert(text)
        except argparse.ArgumentTypeError:
            return False
        return True


class Parser(argparse.ArgumentParser):
    """argparse's parser, but an error is one line that names what the user typed, with exit code 2."""

    def __init__(self, prog: str, description: str = "", **kwargs: Any) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False, **kwargs)
        for action in (None, "store"):
            self.register("action", action, Once)

    @property
    def of_options(self) -> str:
        """The start of an error about an unknown option."""
        return f"{self.prog!r} has no option" if self.prog.split()[1:] not in ([], ["submit"]) else "unknown option"

    def error(self, message: str) -> NoReturn:
        for pattern, text in _REWORDED:
            message = re.sub(pattern, text, message, flags=re.DOTALL)
        self.exit(2, f"{self.prog.split()[0]}: error: {printable(message)}\n")

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse ``argv`` and return the options. Exits with an error if they are invalid."""
        needed = [action for action in self._actions if action.required and action.option_strings]
        for action in needed:  # checked below: an unknown argument says more about the mistake
            action.required = False
        found, unknown = self.parse_known_args(normalised(argv))
        if unknown:
            self.error(self._unexpected(unknown[0]))
        for action in needed:
            if getattr(found, action.dest) is None:
                self.error(f"{action.option_strings[0]} is needed")
        vars(found).pop("_given", None)
        return found

    def _unexpected(self, argument: str) -> str:
        if not argument.startswith("-"):
            for action in self._actions:
                if isinstance(action, Several) and action.accepts(argument):
                    return f"{argument!r} is not expected here; did you mean {action.option_strings[0]} {argument}?"
            return f"{argument!r} is not expected here; see '{self.prog} --help'"
        name = argument.partition("=")[0]
        if instead := ABSENT.get(name.lstrip("-").lower()):
            return f"unknown option {name}: {instead}"
        valid = [option for option in self._option_string_actions if option.startswith("--")]
        guess = near(name.lstrip("-"), [option.removeprefix("--") for option in valid])
        meant = f"; did you mean --{guess}?" if guess else f"; '{self.prog} --help' lists the options"
        return f"{self.of_options} {name}{meant}"

    def options_of(self, argv: Sequence[str]) -> list[tuple[str, list[str]]]:
        """Return (option, values after it) for ``argv``, unchecked; values before the first option have the name ''."""
        found: list[tuple[str, list[str]]] = [("", [])]
        for argument in normalised(argv):
            if argument.startswith("--"):
                name, _, value = argument.partition("=")
                found.append((name, [value] if value else []))
            else:
                found[-1][1].append(argument)
        return found if found[0][1] else found[1:]

    def takes(self, option: str) -> argparse.Action | None:
        """Return the action of ``option``, or None if there is no such option."""
        return self._option_string_actions.get(option)


def normalised(argv: Sequence[str]) -> list[str]:
    """Return ``argv`` with underscores instead of hyphens in the names of options."""
    found = []
    for argument in argv:
        if re.match(r"--[A-Za-z]", argument):
            name, equals, value = argument[2:].partition("=")
            argument = f"--{name.replace('-', '_')}{equals}{value}"
        found.append(argument)
    return found


def printable(text: str) -> str:
    """Return ``text`` with whatever a terminal would act on escaped, such as control sequences; newlines stay."""
    return "".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text)


def program() -> str:
    """Return the name this command was called by."""
    return "duel" if os.path.basename(sys.argv[0]) == "duel" else "main.py"
