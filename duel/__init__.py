"""Duel compares JAX with PyTorch on a Slurm cluster: the framework-neutral part."""

import os
from pathlib import Path

CODE = Path(__file__).resolve().parent.parent  # of this code: the checkout, or the copy that a submission made of it
ROOT = Path(os.environ.get("DUEL_CHECKOUT") or CODE)  # of the checkout, which has records, data and environments
