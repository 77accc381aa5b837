"""Duel compares JAX with PyTorch on a Slurm cluster: the framework-neutral part."""
