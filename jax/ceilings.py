"""The loops that measure the device's ceilings."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from duel.measure import ceilings
from duel.measure.device import Setting
from models import _layers
from network import COMPUTE


def loops(setting: Setting) -> dict[str, Callable[[int], None]]:
    """Return "copy" and "matmul" of ``duel.measure.ceilings``, under the policy in force."""
    kind = setting.device.kind
    device = jax.local_devices(backend=kind)[0]
    source = jax.device_put(jnp.ones(ceilings.copied(kind), jnp.float32), device)
    width = ceilings.WIDTHS[kind]
    matrix = jax.random.normal(jax.device_put(jax.random.key(0), device), (width, width), jnp.float32)
    matrix = matrix.astype(COMPUTE.get(setting.precision) or jnp.float32)
    copied = jax.jit(lambda x: x + 1, donate_argnums=0)  # in place: a new array each time would cost page faults
    multiplied = jax.jit(lambda a: _layers.linear(a, a))

    def copy(rounds: int) -> None:
        nonlocal source
        for _ in range(rounds):
            source = copied(source)
        source.block_until_ready()

    def matmul(rounds: int) -> None:
        for _ in range(rounds):
            result = multiplied(matrix)
        result.block_until_ready()

    return {"copy": copy, "matmul": matmul}
