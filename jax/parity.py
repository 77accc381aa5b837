"""Write what JAX computes, for comparison: ``python jax/parity.py --benchmark resnet50 --output FILE.npz``."""

import sys
from pathlib import Path

import devices
import training
import weights

sys.path.append(str(Path(__file__).resolve().parent.parent))

from duel.measure import parity

if __name__ == "__main__":
    parity.main(devices, training, weights)
