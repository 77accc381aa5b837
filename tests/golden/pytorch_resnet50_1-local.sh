#!/usr/bin/env bash
# sha256 of the other lines: f76381a19713fc004125b0e9afe80ae9516835a87178347db983cdb6bba11b75
# Duel: pytorch, resnet50, use case 1 (training on one device), preset standard, fp32, target local.
# Rendered from templates/job.sh.j2 and cluster.yaml; 'python main.py' overwrites changes made here.
# By hand, any number of times, each a run of its own under results/runs/:
#     bash slurm_scripts/pytorch_resnet50_1.sh
set -eo pipefail
export DUEL_SCRIPT="$(cat -- "$0")"  # kept with the run, and told apart from a script that was changed by hand
cd -- /opt/duel || exit 97
export OMP_NUM_THREADS=2
export WANDB_PROJECT=duel
unset PYTHONSAFEPATH  # run.py imports its neighbours by name
ulimit -c 0
python=.venv/pytorch/bin/python
if ! command -v -- "$python" >/dev/null; then
    echo "$0: no interpreter $python (cluster.yaml: targets.local.python.pytorch); make pytorch-env makes one" >&2
    exit 96
fi
exec "$python" pytorch/run.py --benchmark resnet50 --use_case 1 --preset standard --precision fp32 --target local --data=data
