"""A minimal reproduction of a share: the operation alone, as one script for each framework, without Duel."""

import math
import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from duel import ROOT, kinds, modes, variables
from duel.catalogue import FRAMEWORKS
from duel.errors import UserError
from duel.files import write_atomically
from duel.profile import Layer
from duel.report.shares import SIDES, TELLING, Explained, Share
from duel.switches import ON

BLOCK_SECONDS, SECONDS = 0.05, 2.0
LONGEST = 600.0  # seconds for a script
# The kinds of layers that do a kind of work.
REPEATED = {
    kinds.DEPTHWISE: ("convolution",),
    kinds.CONVOLUTION: ("convolution",),
    kinds.NORMS: ("batch norm", "layer norm"),
    kinds.PRODUCT: ("linear",),
    kinds.MOVES: ("sum over edges",),
}
DEVICES = ("cpu", "gpu")
# Switches with which a kind of work is written in another way than in the scripts.
REWRITTEN = {
    kinds.DEPTHWISE: ("depthwise=shifted",),
    kinds.CONVOLUTION: ("convolution=products", "convolution=gradients"),
    kinds.MOVES: ("aggregation=sparse",),
}
# Switches that choose other kernels, or how many threads run them, which the scripts leave as they are.
UNREPEATED = ("autotune=", "cudnn_benchmark=", "max_autotune=", "threads=", "triton_gemm=")
PRECISIONS = {
    "jax": {"fp32": '"highest"', "tf32": '"tensorfloat32"', "bf16": '"default"', "fp16": '"default"'},
    "pytorch": {"fp32": "highest", "tf32": "high", "bf16": "highest", "fp16": "highest"},
}
DTYPES = {"bf16": "bfloat16", "fp16": "float16"}  # of convolutions and products: other work keeps 32 bits in part
CODE = {"jax": "jax.hlo.txt", "pytorch": "pytorch.inductor.txt"}


@dataclass(frozen=True)
class Reproduction:
    """The part of a step that is repeated: of one kind, in one module, forward or backward."""

    share: Share
    kind: str
    module: str
    backward: bool
    layer: Layer
    larger: str = ""  # shares that are larger and cannot be repeated alone

    @property
    def title(self) -> str:
        text = f"{self.kind} of {self.module}, {'forward and backward' if self.backward else 'forward'}"
        return text[0].upper() + text[1:]


def largest(one: Explained) -> Reproduction:
    """Return the largest part of the difference that can be repeated alone. Raises UserError if none can.

    Of a difference that tells, only what the slower side takes longer for.
    """
    layers, tells = one.pairs[0][1][1].layers, abs(one.log) > math.log(TELLING)
    larger: list[str] = []
    for share in one.divided(lambda part: f"{part.kind}|{part.module}"):
        if tells and share.log * one.log < 0:
            continue
        kind, module = share.name.split("|")
        layer = layers.get(module)
        if layer is not None and layer.kind in REPEATED.get(kind, ()):
            return Reproduction(share, kind, module, _trains(one), layer, ", ".join(larger))
        larger.append(f"{kind} of {module}" if module else kind)
    raise UserError(
        f"{one.outcome.benchmark}, {one.outcome.use_case}: nothing of the difference can be repeated alone; "
        f"valid: {', '.join(REPEATED)} of a layer, in training or inference"
    )


def _trains(one: Explained) -> bool:
    return any(part.stage == "backward" for part in one.pairs[0][0][1].parts)


def write(one: Explained, found: Reproduction, folder: Path) -> dict[str, Path]:
    """Write both scripts into ``folder`` and return them by framework.

    Raises UserError if they would not do what was measured.
    """
    rows = dict(zip(FRAMEWORKS, (row for row, _ in one.pairs[0]), strict=True))
    precision = str(rows["jax"].precision)
    if precision not in PRECISIONS["jax"]:
        raise UserError(f"{found.title}: in {precision} it is not repeated; valid: {', '.join(PRECISIONS['jax'])}")
    if precision in DTYPES and found.kind not in (kinds.DEPTHWISE, kinds.CONVOLUTION, kinds.PRODUCT):
        raise UserError(f"{found.title}: in {precision} it is not repeated; valid: convolutions and matrix products")
    for framework, row in rows.items():
        if row.device_kind not in DEVICES:
            raise UserError(f"{found.title}: on a {row.device_kind} it is not repeated; valid: {', '.join(DEVICES)}")
        if other := [text for text in REWRITTEN.get(found.kind, ()) if text in str(row.switches).split()]:
            raise UserError(
                f"{found.title}: {framework} measured it with {other[0]}, which is not repeated; valid: rows in a mode "
                f"without that switch"
            )
        here = (framework, str(row.benchmark), row.use_case or 0, str(row.precision), str(row.device_kind))
        usual = modes.said(modes.settings(modes.DEFAULT, *here)).split()
        turned = [text for text in str(row.switches).split() if text not in usual and text.startswith(UNREPEATED)]
        if turned:
            raise UserError(f"{found.title}: {framework} measured it with {turned[0]}, which is not repeated")
    environment = Environment(
        loader=FileSystemLoader(ROOT / "templates"), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["pair"] = lambda side: (side, side)
    folder.mkdir(parents=True, exist_ok=True)
    scripts = {}
    for framework, row in rows.items():
        script = folder / f"in_{framework}.py"  # which must not hide the framework itself
        text = environment.get_template(f"reproduce_{framework}.py.j2").render(
            title=found.title,
            file=script.name,
            precision=PRECISIONS[framework][precision],
            dtype=DTYPES.get(precision, "float32"),
            device_kind=row.device_kind,
            layer=found.layer,
            backward=found.backward,
            compiled=f"compile={ON}" in str(row.switches),
            channels_last=f"channels_last={ON}" in str(row.switches),
            block_seconds=BLOCK_SECONDS,
            seconds=SECONDS,
        )
        write_atomically(script, text)
        scripts[framework] = script
    return scripts


def run(scripts: Mapping[str, Path], pythons: Mapping[str, str]) -> dict[str, float]:
    """Run the scripts one after the other; return the seconds of a call on each side, and leave each one's code.

    Where a compiler's code cannot be had, the file says why.
    """
    found = {framework: float(_output(pythons[framework], script).split()[-1]) for framework, script in scripts.items()}
    for framework, script in scripts.items():
        try:
            code = _output(pythons[framework], script, "--code")
        except UserError as error:
            code = f"{error}\n"
        write_atomically(script.parent / CODE[framework], code)
    return found


def _output(python: str, script: Path, *options: str) -> str:
    environment = dict(os.environ)
    variables.take_out(environment)  # as in a job, which the shell's variables do not reach
    command = [python, str(script), *options]
    try:
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LONGEST, cwd=ROOT)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"{python} {script}: {error}") from error
    if ran.returncode:
        last = (ran.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(f"{python} {script} {' '.join(options)} failed: {last}")
    return ran.stdout


def verdict(found: Reproduction, seconds: Mapping[str, float]) -> str:
    """Return whether the difference shows alone: the same side is slower, on a log scale by at least half as much."""
    alone = seconds["jax"] / seconds["pytorch"]
    for name, there in zip(SIDES, found.share.seconds, strict=True):
        if not there:
            what = f"in the model {name} has no separate work of this kind to compare with"
            return f"{found.title}: isolated, JAX takes {alone:.3g} times PyTorch's time; {what}"
    there = found.share.seconds[0] / found.share.seconds[1]
    shows = math.log(alone) * math.log(there) > 0 and abs(math.log(alone)) > abs(math.log(there)) / 2
    both = f"isolated, JAX takes {alone:.3g} times PyTorch's time, in the model {there:.3g} times"
    return f"{found.title}: {both}: {'reproduced' if shows else 'not reproduced'}"


def folder(found: Reproduction, row: int) -> str:
    """Return the name of the folder for both scripts; ``row`` is the number of the point's first row in its run."""
    return re.sub(r"\W+", "_", f"{row:03d}_{found.kind}_{found.module}").strip("_")
