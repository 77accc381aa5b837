"""Duel compares JAX with PyTorch on a Slurm cluster: the framework-neutral part."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent  # of the checkout
