"""Write what PyTorch computes, for comparison: ``python pytorch/parity.py --benchmark resnet50 --output FILE.npz``."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))

import devices
import training
import weights
from duel.measure import parity

if __name__ == "__main__":
    parity.main(devices, training, weights)
