"""``make benchmark NAME=...``: write a model file for each side and an entry in the catalogue, all runnable as is.

They come from ``templates/model_<framework>.py`` and ``ENTRY``. This needs neither a framework nor an environment.
"""

import ast
import keyword
import re
import sys
from pathlib import Path

from duel.catalogue import ALIASES, BENCHMARKS, FRAMEWORKS
from duel.errors import UserError
from duel.terminal import warn

ROOT = Path(__file__).resolve().parent.parent.parent
ENTRIES = "duel/benchmarks.py"
ENTRY = """\
            Benchmark(
                name="NAME",
                title="NAME: what the network is, and the shapes of its data",
                source="who published it and where, and what is different here",
                sizes={
                    "full": Size(
                        model={"width": 64, "classes": 1000},
                        inputs=Images(3, 224, 224, classes=1000),
                        batch_size=_batch(8, 128, 32),
                        flops=43_480_064,
                    ),
                    "tiny": Size(
                        model={"width": 8, "classes": 10},
                        inputs=Images(3, 32, 32, classes=10),
                        batch_size=_everywhere(8),
                        flops=110_752,
                    ),
                },
                optimizer=SGD(learning_rate=0.01, batch_size=256, source="whose recipe, and where: its rate"),
            ),
"""


def write(name: str, root: Path = ROOT) -> list[str]:
    """Write the skeletons of benchmark ``name``; returns the files that were created or changed.

    Raises UserError, before anything is written, for a name that is invalid or taken.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,31}", name) or keyword.iskeyword(name):
        raise UserError(
            f"NAME={name}: not a valid name; valid: a Python identifier of at most 32 lower-case letters, digits and "
            "'_', as in 'make benchmark NAME=mlp_mixer'"
        )
    taken = [ENTRIES] if name in BENCHMARKS else []
    taken += ["duel/catalogue.py"] if name in (*ALIASES, "all") else []
    models = {framework: f"{framework}/models/{name}.py" for framework in FRAMEWORKS}
    taken += [path for path in models.values() if (root / path).exists()]
    if taken:
        raise UserError(f"NAME={name}: the name is taken by {' and '.join(taken)}")
    entries = root / ENTRIES
    text = _with_entry(entries.read_text(), ENTRY.replace("NAME", name))
    for framework, path in models.items():
        (root / path).write_text((root / "templates" / f"model_{framework}.py").read_text())
    entries.write_text(text)
    return [*models.values(), ENTRIES]


def _with_entry(entries: str, entry: str) -> str:
    """Return the source ``entries`` with ``entry`` inserted after the last benchmark."""
    ends = [
        node.end_lineno or 0
        for node in ast.walk(ast.parse(entries))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Benchmark"
    ]
    lines = entries.splitlines(keepends=True)
    lines.insert(max(ends), entry)
    return "".join(lines)


def main(name: str) -> int:
    try:
        files = write(name)
    except UserError as error:
        warn(f"make benchmark: {error}")
        return 2
    print(f"wrote {files[0]} and {files[1]}, and an entry at the end of BENCHMARKS in {files[2]}")
    print(f"They run as is: 'python main.py validate --benchmark {name}'")
    print("Replace the network and the entry with yours; docs/add-a-benchmark.md has the rules.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
