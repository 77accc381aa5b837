"""The table of TPU chips, against libtpu's own."""

import json
import subprocess

from conftest import ROOT, clean_environment, needs

from duel.chips import CHIPS, bound

PYTHON = ROOT / ".venv" / "jax-tpu" / "bin" / "python"
FILL = """
import json, re, sys
import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
for name, config in json.loads(sys.argv[1]):
    there = topologies.get_topology_desc(platform="tpu", topology_name=name, chip_config_name=config).devices
    much = jax.ShapeDtypeStruct((2**40,), "int8", sharding=SingleDeviceSharding(there[0]))
    try:
        jax.jit(lambda x: x + 1).lower(much).compile()
    except jax.errors.JaxRuntimeError as error:
        print(json.dumps([len(there), float(re.search(r"exceeds available HBM \\(([0-9.]+)G\\)", str(error))[1])]))
"""


def test_each_chip_has_the_memory_that_libtpu_leaves_a_program_and_is_one_device() -> None:
    needs([] if PYTHON.exists() else ["libtpu"], "tpu-env")
    asked = json.dumps([(chip.topology, chip.config) for chip in CHIPS.values()])
    environment = clean_environment() | {"JAX_PLATFORMS": "cpu", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    ran = subprocess.run([PYTHON, "-c", FILL, asked], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert list(map(json.loads, ran.stdout.splitlines())) == [[4, chip.memory_gib] for chip in CHIPS.values()]


def test_the_roof_is_the_one_that_takes_longer() -> None:
    chip = CHIPS["v5e"]
    assert bound(chip, chip.flops_per_second, chip.bytes_per_second / 2) == "compute"
    assert bound(chip, chip.flops_per_second / 2, chip.bytes_per_second) == "memory"
