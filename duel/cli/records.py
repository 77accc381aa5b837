"""The options of the commands that read and publish records."""

from duel.arguments import Parser
from duel.options import target_name


def publish(parser: Parser) -> None:
    parser.add_argument("--name", required=True, metavar="NAME", help="folder name, such as the device's")


def report(parser: Parser) -> None:
    parser.add_argument(
        "--name", nargs="+", default=[], metavar="SET", help="published sets (default: the rows in results.csv)"
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--against", metavar="SET", help="report what changed since another set: its name, folder or commit"
    )
    how.add_argument("--live", action="store_true", help="rewrite it every 30 seconds until all runs have ended")


def reproduce(parser: Parser) -> None:
    bundle(parser)
    parser.add_argument("--point", nargs="+", default=[], metavar="ID", help="only these points (default: all)")
    parser.add_argument(
        "--target", type=target_name, metavar="NAME", help="entry of cluster.yaml (default: as published)"
    )
    parser.add_argument("--dry_run", action="store_true", help="list points, commands and hours, start nothing")


def bundle(parser: Parser) -> None:
    parser.add_argument("set", metavar="SET", help="name of a published set")


def workspace(parser: Parser) -> None:
    parser.add_argument("--entity", required=True, metavar="NAME", help="Weights & Biases user or team")
    parser.add_argument("--project", default="duel", metavar="NAME", help="its project (default: duel)")
