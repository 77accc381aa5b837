"""The loops that measure the device's ceilings."""

from collections.abc import Callable

import torch

import devices
from duel.measure import ceilings
from duel.measure.device import Setting
from network import COMPUTE


def loops(setting: Setting) -> dict[str, Callable[[int], None]]:
    """Return "copy" and "matmul" of ``duel.measure.ceilings``, under the policy in force; empty with torch_xla."""
    kind, device = setting.device.kind, devices.native(setting.device)
    if kind == "tpu":  # torch_xla would record the rounds and run them as one program
        return {}
    source = torch.ones(ceilings.copied(kind), device=device)
    width = ceilings.WIDTHS[kind]
    matrix = torch.randn(width, width, device=device).to(COMPUTE.get(setting.precision, torch.float32))

    def wait() -> None:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    def copy(rounds: int) -> None:
        for _ in range(rounds):
            source.add_(1)
        wait()

    def matmul(rounds: int) -> None:
        for _ in range(rounds):
            matrix @ matrix
        wait()

    return {"copy": copy, "matmul": matmul}
