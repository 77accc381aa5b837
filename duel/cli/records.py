"""The options of the commands that read and publish records."""

from duel.arguments import Parser, Several
from duel.options import add_selection, chosen, target_name
from duel.recipes import DATASETS


def status(parser: Parser) -> None:
    add_selection(parser, "shown")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--all", action="store_true", help="include old runs")
    how.add_argument("--json", action="store_true", help="print JSON of all runs, for programs")
    how.add_argument("--watch", action="store_true", help="redraw every second until all runs have ended")


def run(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="run id or a prefix of one")


def logs(parser: Parser) -> None:
    run(parser)
    parser.add_argument("--follow", action="store_true", help="keep printing until the run ends")


def explain(parser: Parser) -> None:
    add_selection(parser, "explained")
    parser.add_argument(
        "--reproduce", action="store_true", help="also write the largest share as a script per framework, and run both"
    )


def collect(parser: Parser) -> None:
    parser.add_argument("--check", action="store_true", help="read every run again and say what is inconsistent")


def publish(parser: Parser) -> None:
    parser.add_argument("--name", required=True, metavar="NAME", help="folder name, such as the device's")


def report(parser: Parser) -> None:
    parser.add_argument(
        "--name",
        action=Several,
        convert=lambda text: (text,),
        default=(),
        metavar="SET",
        help="published sets (default: the rows in results.csv)",
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--against", metavar="SET", help="report what changed since another set: its name, folder or commit"
    )
    how.add_argument("--live", action="store_true", help="rewrite it every 30 seconds until all runs have ended")


def reproduce(parser: Parser) -> None:
    bundle(parser)
    parser.add_argument(
        "--point",
        action=Several,
        convert=lambda text: (text,),
        default=(),
        metavar="ID",
        help="only these points (default: all)",
    )
    parser.add_argument(
        "--target", type=target_name, metavar="NAME", help="entry of cluster.yaml (default: as published)"
    )
    parser.add_argument("--dry_run", action="store_true", help="list points, commands and hours, start nothing")


def bundle(parser: Parser) -> None:
    parser.add_argument("set", metavar="SET", help="name of a published set")


def data(parser: Parser) -> None:
    parser.add_argument(
        "dataset", metavar="NAME", nargs="?", type=chosen("data set", tuple(DATASETS)), help=", ".join(DATASETS)
    )
    parser.add_argument("--target", type=target_name, metavar="NAME", help="target whose data folder is used")
    parser.add_argument("--download", action="store_true", help="fetch its files from the publisher or Hugging Face")
    parser.add_argument("--prepare", action="store_true", help="decode its pictures once into memory-mapped files")
    parser.add_argument("--skip_damaged", action="store_true", help="with --prepare: list and skip damaged pictures")
    parser.add_argument("--check", action="store_true", help="read all of it, and compare with its checksums")


def workspace(parser: Parser) -> None:
    parser.add_argument("--entity", required=True, metavar="NAME", help="Weights & Biases user or team")
    parser.add_argument("--project", default="duel", metavar="NAME", help="its project (default: duel)")
