"""Measure PyTorch in this interpreter: ``python pytorch/run.py --benchmark resnet50 --use_case 1``."""

import sys
from pathlib import Path

# Last on the path: an installed package always wins over a folder of the same name in the repository.
sys.path.append(str(Path(__file__).resolve().parent.parent))

from duel.measure.supervisor import main

if __name__ == "__main__":
    sys.exit(main("pytorch"))
