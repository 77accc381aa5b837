#!/usr/bin/env bash
# sha256 of the other lines: 85403c9a0b18aece0cd6f6ba368e07ec8f5582d5b3f8e96c1bbde14d2b27e3f3
# Duel: jax and pytorch in turn, resnet50, use case 1 (training on one device), preset standard, fp32, target local.
# Rendered from templates/job.sh.j2 and cluster.yaml; 'python main.py' overwrites changes made here.
# By hand, any number of times, each a run of its own under results/runs/:
#     bash slurm_scripts/paired_resnet50_1.sh
set -eo pipefail
export DUEL_SCRIPT="$(cat -- "$0")"  # kept with the run, and told apart from a script that was changed by hand
cd -- /opt/duel || exit 97
export OMP_NUM_THREADS=2
export WANDB_PROJECT=duel
unset PYTHONSAFEPATH  # run.py imports its neighbours by name
ulimit -c 0
python=.venv/jax/bin/python
if ! command -v -- "$python" >/dev/null; then
    echo "$0: no interpreter $python (cluster.yaml: targets.local.python.jax); make jax-env makes one" >&2
    exit 96
fi
exec "$python" jax/run.py --benchmark resnet50 --use_case 1 --preset standard --precision fp32 --target local --data=data --paired=pytorch=.venv/pytorch/bin/python
