#!/usr/bin/env bash
# sha256 of the other lines: 8073376bef495d3421bd8827eb61e6555ff1ede6bedc83f2e4f1c40cb5ba5479
# Duel: jax and pytorch in turn, resnet50, use case 1 (training on one device), preset standard, fp32, target h100.
# Rendered from templates/slurm.sh.j2 and cluster.yaml; 'python main.py' overwrites changes made here.
# By hand, any number of times, each a run of its own under results/runs/:
#     sbatch slurm_scripts/paired_resnet50_1.sh
#SBATCH --job-name=paired_resnet50_1
#SBATCH --output=/opt/duel/results/logs/%j_0_log.out
#SBATCH --no-requeue
#SBATCH --signal=B:USR2@120
#SBATCH --partition=h100
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --gpus-per-node=h100:1
#SBATCH --time=00:30:00
set -eo pipefail
export DUEL_SCRIPT="$(cat -- "$0")"  # kept with the run, and told apart from a script that was changed by hand
cd -- /opt/duel || exit 97
if [[ -z ${SLURM_JOB_ID-} ]]; then
    echo "$0 is for Slurm: sbatch slurm_scripts/paired_resnet50_1.sh" >&2
    exit 98
fi
# The driver hands the run's id over as the job's name; by hand run.py makes one.
if [[ ${SLURM_JOB_NAME-} == paired_resnet50_1-* ]]; then export DUEL_RUN_ID=$SLURM_JOB_NAME; fi
# The job is this script, as Slurm copied it, and not a shell in which somebody has called it.
if [[ ${0##*/} == slurm_script ]]; then export DUEL_SLURM_JOB_ID=$SLURM_JOB_ID; fi
module load gcc
export WANDB_PROJECT=duel
export WANDB_MODE=offline
unset PYTHONSAFEPATH  # run.py imports its neighbours by name
srun --ntasks-per-node=1 --ntasks=1 bash -eo pipefail -c 'mkdir -p /tmp/duel
'
task='cd -- /opt/duel || exit 97
export TMPDIR="/tmp/duel"
command -v -- "$1" >/dev/null || { echo "$0: no interpreter $1 (cluster.yaml: targets.h100.python.jax); make jax-env makes one" >&2; exit 96; }
exec "$@"
'
[[ -z ${SLURM_CPUS_PER_TASK-} ]] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK  # srun does not inherit it

# The warning before a time limit reaches this shell alone (--signal=B:USR2): it is passed on. bash runs a trap only
# between commands, so the launcher runs beside it, and an interrupted wait is taken up again.
launched= again=
trap 'again=1; [[ -z $launched ]] || kill -USR2 "$launched" || :' USR2
trap 'again=1; [[ -z $launched ]] || kill -TERM "$launched" || :' TERM
srun --cpu-bind=cores bash -eo pipefail -c "$task" paired_resnet50_1.sh .venv/jax/bin/python jax/run.py --benchmark resnet50 --use_case 1 --preset standard --precision fp32 --target h100 --device gpu --data=data --paired=pytorch=.venv/pytorch/bin/python &
launched=$!
while
    again=
    wait "$launched" && code=0 || code=$?
    [[ -n $again ]]
do :; done
exit "$code"
