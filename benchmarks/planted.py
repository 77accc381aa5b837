"""Whether a profile finds slow work that was planted into one side: its kind, where it is, and what it costs.

    .venv/driver/bin/python benchmarks/planted.py [NAME ...]

Each plant is put into a copy of the checkout, which is measured and profiled in turn with an unchanged copy. Medians
over the rounds: the planted kind of work, in the modules it was put into, must take up the difference between both
steps to within 20 %, and no other kind more than 20 % of it. Exit code 1 if one does not.
"""

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
ROUNDS, WITHIN = 3, 0.2


class Plant(NamedTuple):
    """What is replaced in which file, and the kind of work that it adds to a benchmark's training.

    ``modules``: a pattern of the modules that it is added to; empty for the model itself, outside its layers.
    """

    framework: str
    benchmark: str
    kind: str
    modules: str
    file: str
    old: str
    new: str


# Each makes the step some times as long, so that what it adds stands out from how steps vary: on shared machines by up
# to a half from one process to the next. What XLA would see through, such as the same work twice or two transposes that
# cancel, is not slow: JAX gets other values each time, PyTorch is eager. Copies and sums take no memory of their own,
# and all processes keep what they free: else the convolutions beside them took less time, presumably because they found
# memory mapped that they map otherwise. The transposes reverse all four dimensions, a slow copy of few bytes: many
# quick ones, which swap two, were idle for a tenth of their time between each other.
PLANTS = {
    "needless transposes": Plant(
        *("pytorch", "cifar10", "copy and layout", "", "pytorch/models/cifar10.py"),
        "            x = functional.relu(conv(x))\n",
        "            spares = vars(self).setdefault('_spares', {})\n"
        "            some = x.detach()[:32].permute(3, 2, 1, 0)\n"
        "            spare = spares.setdefault(some.shape, torch.empty(some.shape))\n"
        "            for _ in range(64):\n"
        "                spare.copy_(some)\n"
        "            x = functional.relu(conv(x))\n",
    ),
    "convolutions nine times": Plant(
        *("pytorch", "cifar10", "convolution", r"convs\.\d", "pytorch/models/cifar10.py"),
        "            x = functional.relu(conv(x))\n",
        "            [conv(x) for _ in range(8)]\n            x = functional.relu(conv(x))\n",
    ),
    "sums in each norm": Plant(
        *(
            "jax",
            "cifar10_resnet18",
            "normalisation and reduction",
            r"(.*\.)?(bn\d|downsample\.1)",
            "jax/models/_layers.py",
        ),
        "            self._follow(self.running_mean, mean)\n",
        "            still, shift = jax.lax.stop_gradient((wide, mean))\n"
        "            curved = lambda x: functools.reduce(lambda y, _: jnp.tanh(y), range(6), x)\n"
        "            sums = [curved(still - (1 + 0.001 * n) * shift).mean((0, 1, 2)) for n in range(32)]\n"
        "            mean = mean + 1e-6 * sum(sums)\n"
        "            self._follow(self.running_mean, mean)\n",
    ),
    "a sleep between steps": Plant(
        *("pytorch", "cifar10", "idle", "", "pytorch/training.py"),
        "        self._optimizer.step()\n        if self._xla:",
        "        self._optimizer.step()\n        __import__('time').sleep(0.3)\n        if self._xla:",
    ),
    "a call of the host": Plant(
        *("jax", "mnist", "host", "", "jax/models/mnist.py"),
        "        x = _max_pool(nnx.relu(self.conv2(x)))",
        "        corner = jax.lax.stop_gradient(x[:1, :1, :1, :1])\n"
        "        slow = lambda corner: (__import__('time').sleep(0.1), corner)[1]\n"
        "        x = x + jax.lax.stop_gradient(jax.pure_callback(slow, corner, corner))\n"
        "        x = _max_pool(nnx.relu(self.conv2(x)))",
    ),
}


def copied(folder: Path, plant: Plant | None) -> Path:
    """Copy the tracked files to ``folder``, with the plant if there is one."""
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in files.split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    (folder / ".venv").symlink_to(ROOT / ".venv")
    if plant:
        text = (folder / plant.file).read_text()
        times = text.count(plant.old)
        assert times == 1, f"{plant.file} has changed: {plant.old!r} is {times} times in it"
        (folder / plant.file).write_text(text.replace(plant.old, plant.new))
    return folder


def profiled(folder: Path, plant: Plant) -> dict[str, Any]:
    """Measure and profile the benchmark's training in ``folder``; return ms of its step, whole and by kind.

    ``there``: of the planted kind in the modules of the plant.
    """
    command = ["main.py", "--benchmark", plant.benchmark, "--use_case", "1", "--framework", plant.framework]
    command += ["--preset", "smoke", "--size", "full", "--mode", "default+keep_memory", "--profile", "--wait"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    subprocess.run([sys.executable, *command], cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    run = max((folder / "results/runs").iterdir(), key=lambda run: run.stat().st_mtime)
    row = json.loads((run / "rows/000.json").read_text())
    profile = json.loads((run / "profiles/000.json").read_text())
    if profile.get("why"):
        raise SystemExit(f"{run}: {profile['why']}")
    whole = 1e3 * row["step_seconds_p50"]
    kinds: dict[str, float] = {}
    for part in profile["parts"]:
        share = part["seconds"] / profile["traced_seconds"]
        kinds[part["kind"]] = kinds.get(part["kind"], 0.0) + share * whole
        if part["kind"] == plant.kind and re.fullmatch(plant.modules, part["module"]):
            kinds["there"] = kinds.get("there", 0.0) + share * whole
    return {"step": whole} | kinds


def main(names: list[str]) -> int:
    good = True
    for name in names or PLANTS:
        plant = PLANTS[name]
        # A run may still be merging its rows when the command that waited for it has ended.
        with tempfile.TemporaryDirectory(prefix="duel-planted-", ignore_cleanup_errors=True) as folder:
            plain, planted = copied(Path(folder) / "plain", None), copied(Path(folder) / "planted", plant)
            rounds = [(profiled(plain, plant), profiled(planted, plant)) for _ in range(ROUNDS)]
        kinds = sorted({kind for pair in rounds for side in pair for kind in side})
        more = {
            kind: statistics.median(after.get(kind, 0.0) - before.get(kind, 0.0) for before, after in rounds)
            for kind in kinds
        }
        cost, there = more.pop("step"), more.pop("there", 0.0)
        others = {kind: value for kind, value in more.items() if kind != plant.kind}
        found, most = more.get(plant.kind, 0.0) / cost, max(others, key=lambda kind: abs(others[kind]))
        holds = abs(there / cost - 1) <= WITHIN and abs(others[most]) <= WITHIN * cost
        good &= holds
        print(
            f"{name}, {plant.framework} {plant.benchmark}: the step takes {cost:.3g} ms more, {plant.kind} {found:.0%} "
            f"of that, {there / cost:.0%} in its modules; next {most} {others[most] / cost:.0%}:",
            "holds" if holds else "DOES NOT HOLD",
            flush=True,
        )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
