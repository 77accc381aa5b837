#!/usr/bin/env bash
# Duel: pytorch, resnet50, use case 1 (training on one device), preset standard, fp32, target local.
# Rendered from templates/job.sh.j2 and cluster.yaml; 'python main.py' overwrites changes made here.
# By hand, any number of times, each a run of its own under results/runs/:
#     bash slurm_scripts/pytorch_resnet50_1.sh
set -eo pipefail
cd -- /opt/duel || exit 97
set -u  # not before the site's own lines: module and conda scripts read unset variables
unset PYTHONSAFEPATH  # run.py imports its neighbours by name
export WANDB_PROJECT=duel
python=.venv/pytorch/bin/python
if ! command -v -- "$python" >/dev/null; then
    echo "$0: no interpreter $python (cluster.yaml: targets.local.python.pytorch); 'make pytorch-env' makes one" >&2
    exit 96
fi
exec "$python" pytorch/run.py --benchmark resnet50 --use_case 1 --preset standard --precision fp32 --target local --data data
