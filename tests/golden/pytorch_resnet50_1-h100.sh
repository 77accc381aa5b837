#!/usr/bin/env bash
# Duel: pytorch, resnet50, use case 1 (training on one device), preset standard, fp32, target h100.
# Rendered from templates/slurm.sh.j2 and cluster.yaml; 'python main.py' overwrites changes made here.
# By hand, any number of times, each a run of its own under results/runs/:
#     sbatch slurm_scripts/pytorch_resnet50_1.sh
#SBATCH --job-name=pytorch_resnet50_1
#SBATCH --output=/opt/duel/results/logs/%j_0_log.out
#SBATCH --no-requeue
#SBATCH --partition=h100
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=8
#SBATCH --gpus-per-node=h100:1
#SBATCH --time=00:30:00
set -eo pipefail
cd -- /opt/duel || exit 97
set -u  # not before the site's own lines: module and conda scripts read unset variables
unset PYTHONSAFEPATH  # run.py imports its neighbours by name
export WANDB_PROJECT=duel
python=.venv/pytorch/bin/python
if ! command -v -- "$python" >/dev/null; then
    echo "$0: no interpreter $python (cluster.yaml: targets.h100.python.pytorch); 'make pytorch-env' makes one" >&2
    exit 96
fi
# The driver hands the run's id over as the job's name; by hand run.py makes one.
if [[ ${SLURM_JOB_NAME-} == pytorch_resnet50_1-* ]]; then export DUEL_RUN_ID=$SLURM_JOB_NAME; fi
exec srun "$python" pytorch/run.py --benchmark resnet50 --use_case 1 --preset standard --precision fp32 --target h100 --data data
