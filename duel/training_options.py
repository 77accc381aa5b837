"""The options of a training to accuracy, which main.py and run.py share."""

import argparse
import re

from duel.arguments import Parser
from duel.catalogue import MANY, TRAIN, TRAIN_MANY
from duel.job import TRAINING
from duel.options import chosen, count, hours
from duel.recipes import DATASETS

MOST_EPOCHS, MOST_SEEDS = 10_000, 100


def add_training(parser: Parser) -> None:
    """Add the options."""
    train = parser.add_argument_group("training to accuracy (use cases 1 and 2)")
    train.add_argument(
        "--dataset",
        type=chosen("data set", tuple(DATASETS)),
        metavar="NAME",
        help=f"train on it, instead of measuring: {', '.join(DATASETS)} ('main.py data' shows what is there)",
    )
    train.add_argument("--epochs", type=_epochs, metavar="N", help="whole epochs (default: the recipe's)")
    train.add_argument(
        "--target_accuracy",
        type=_share,
        metavar="SHARE",
        help="end once held-out top-1 accuracy reaches it, as in 0.91 (default: train all epochs)",
    )
    train.add_argument("--seeds", type=_seeds, metavar="N", help="trainings, each with its own seed (default: 1)")
    train.add_argument(
        "--max_hours",
        type=hours,
        metavar="TIME",
        help="in Slurm, requeue the job before each time limit, up to this many hours in all, as in 40h "
        "(default: stop)",
    )


def check_training(
    parser: Parser, args: argparse.Namespace, benchmarks: tuple[str, ...], cases: tuple[int, ...]
) -> None:
    """Exit with an error if the options of a training do not go together, or with what is trained."""
    if args.dataset is None:
        for name in TRAINING:
            if getattr(args, name) is not None:
                fitting = [name for name, takes in DATASETS.items() if set(takes) & set(benchmarks)]
                parser.error(f"--{name} needs --dataset; valid: {', '.join(fitting) or 'none'}")
        return
    takes = DATASETS[args.dataset]
    if wrong := [name for name in benchmarks if name not in takes]:
        fitting = [name for name, takes in DATASETS.items() if wrong[0] in takes]
        parser.error(
            f"--dataset {args.dataset}: {wrong[0]} cannot train on it; valid for it: {', '.join(fitting) or 'none'}"
        )
    if wrong_cases := [case for case in cases if case not in (TRAIN, TRAIN_MANY)]:
        parser.error(f"--dataset: use case {wrong_cases[0]} does not train; valid: {TRAIN} and {TRAIN_MANY}")
    if len(args.batch_sizes) > 1:
        parser.error("--batch_sizes: with --dataset a single one, the samples of a step over all devices")
    if args.dataset == "cora" and (args.batch_sizes or set(cases) & set(MANY)):
        parser.error("--dataset cora is one graph: a step takes all of it, on one device")


def _epochs(text: str) -> int:
    return count(text, "number of epochs", MOST_EPOCHS)


def _seeds(text: str) -> int:
    return count(text, "number of seeds", MOST_SEEDS)


def _share(text: str) -> float:
    """Return an accuracy: 0.91, or 91%."""
    found = re.fullmatch(r"(0?\.[0-9]{1,6})|([0-9]{1,2}(?:\.[0-9]{1,4})?)%", text)
    value = float(found[1]) if found and found[1] else float(found[2]) / 100 if found else 0.0
    value = round(value, 6)  # as the job's own options take it
    if not 1e-4 <= value < 1:
        raise argparse.ArgumentTypeError(f"accuracy {text!r}: give a share such as 0.91, or 91%")
    return value
