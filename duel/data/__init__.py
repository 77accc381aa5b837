"""Data sets that both frameworks train on: read, prepared and augmented in numpy, so that both see the same samples."""
