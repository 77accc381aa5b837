"""What one side computes, written down for comparison with the other: the body of both ``parity.py``."""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from duel import datasets
from duel.catalogue import BENCHMARKS, DEVICE_KINDS, PRECISIONS
from duel.measure import batches, parameters


def main(devices: Any, training: Any, weights: Any) -> None:
    """Write an .npz of logits, loss, gradients, the losses of some steps and the weights after them.

    Arguments are the modules of one twin. Weights and batch-norm statistics are random throughout, images N(0,1).
    Keys: weights_sha256, data_sha256, logits/eval, logits/train, loss, gradient/<name>, losses, after/<name>.
    """
    parser = argparse.ArgumentParser(description="Write what this framework computes, for comparison with the other.")
    parser.add_argument("--benchmark", choices=BENCHMARKS, required=True)
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--precision", choices=("float64", *PRECISIONS), default="float64")
    parser.add_argument("--device", choices=DEVICE_KINDS, default="cpu")
    parser.add_argument("--batch_size", type=int, help="default: the catalogue's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    benchmark = dataclasses.replace(BENCHMARKS[arguments.benchmark], dataset=datasets.SYNTHETIC)
    if arguments.size not in benchmark.sizes:
        parser.error(f"--size {arguments.size}: {benchmark.name} has {', '.join(benchmark.sizes)}")
    try:
        device = devices.select(arguments.device)
    except ValueError as error:
        parser.error(str(error))
    batch_size = arguments.batch_size or benchmark.sizes[arguments.size].batch_size[device.kind]
    pool = batches.pool(benchmark, arguments.size, batch_size, arguments.seed, Path())
    shapes = weights.shapes(training.build(benchmark, arguments.size))
    arrays = parameters.initialise(shapes, arguments.seed, randomise=True)
    work = training.Training(benchmark, arguments.size, pool, arrays, arguments.precision, device)
    loss, logits, gradients = work.gradients(0)
    results = {
        "weights_sha256": np.array(parameters.sha256(arrays)),
        "data_sha256": np.array(pool.sha256),
        "logits/eval": work.logits(0),
        "logits/train": logits,
        "loss": np.array(loss),
        **{f"gradient/{name}": array for name, array in gradients.items()},
    }
    if arguments.steps:
        work.compile()
        results["losses"] = np.array([work.loss(work.step(index)) for index in range(arguments.steps)])
        results |= {f"after/{name}": array for name, array in work.export().items()}
    np.savez(arguments.output, **results)
