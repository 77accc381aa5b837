#!/usr/bin/env bash
# sha256 of the other lines: 46c8fd2745607b215e689bc11aa1ee895bd2eb59d69ea0aedba1cc418a2babc7
# Duel: jax, resnet50, use case 1 (training on one device), preset standard, fp32, target h100.
# Rendered from templates/slurm.sh.j2 and cluster.yaml; 'python main.py' overwrites changes made here.
# To start it by hand, any number of times (each start is a separate run under results/runs/):
#     sbatch slurm_scripts/jax_resnet50_1.sh
#SBATCH --job-name=jax_resnet50_1
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
export DUEL_SCRIPT="$(cat -- "$0")"  # kept with the run; it shows whether the script was edited by hand
cd -- /opt/duel || exit 97
if [[ -z ${SLURM_JOB_ID-} ]]; then
    echo "$0 is for Slurm: sbatch slurm_scripts/jax_resnet50_1.sh" >&2
    exit 98
fi
# The driver passes the run's id as the job's name; for a script started by hand, run.py creates one.
if [[ ${SLURM_JOB_NAME-} == jax_resnet50_1-* ]]; then export DUEL_RUN_ID=$SLURM_JOB_NAME; fi
# True only if Slurm itself runs this script, not if someone calls it from a shell inside another job.
if [[ ${0##*/} == slurm_script ]]; then export DUEL_SLURM_JOB_ID=$SLURM_JOB_ID; fi
# Variables that frameworks, compilers and math libraries obey come from cluster.yaml, not from the calling shell.
for variable in $(compgen -e); do
    case $variable in
        CUDA_VISIBLE_DEVICES | CUDA_DEVICE_ORDER | CUDA_MPS_* | NVIDIA_VISIBLE_DEVICES | \
            HIP_VISIBLE_DEVICES | ROCR_VISIBLE_DEVICES | TORCHELASTIC_* | TPU_ACCELERATOR_TYPE | \
            TPU_CHIPS_PER_* | TPU_HOST_BOUNDS | TPU_HOSTNAME_OVERRIDE | TPU_NAME | TPU_PROCESS_* | \
            TPU_RUNTIME_METRICS_PORTS | TPU_SKIP_MDS_QUERY | TPU_TOPOLOGY* | TPU_TYPE | TPU_VISIBLE_* | \
            TPU_WORKER_*) ;;
        TF_CLI_* | TF_VAR_* | TF_LOG*) ;;
        JAX_* | JAXLIB_* | FLAX_* | MOSAIC_*) unset -v "$variable" ;;
        XLA_* | TF_* | TSL_* | TENSORFLOW_* | PJRT_* | LIBTPU_* | TPU_* | XRT_*) unset -v "$variable" ;;
        TORCH* | PYTORCH_* | ATEN_* | C10_* | FBGEMM_* | KINETO_* | OPACUS_* | LRU_CACHE_CAPACITY | \
            INDUCTOR_* | AOT_* | AOTI_* | AOTINDUCTOR_* | HALIDE_* | HELION_* | QUACK_* | CUTLASS_* | \
            CUTEDSL_* | ENABLE_*TMA* | ENABLE_TEMPLATE_* | TENSORIFY_* | PARTITIONER_* | UNSAFE_SKIP_*) unset -v "$variable" ;;
        TRITON_* | AMDGCN_* | NVPTX_* | PTXAS_* | DISABLE_*_OPT | LLVM_* | MLIR_* | USE_IR_LOC) unset -v "$variable" ;;
        CC | CXX | CUDACXX) unset -v "$variable" ;;
        CUDA_* | CUBLAS* | CUDNN_* | CUTENSOR* | NVIDIA_TF32_OVERRIDE) unset -v "$variable" ;;
        HIP_* | HIPBLAS* | HSA_* | ROCM_* | ROCBLAS_* | MIOPEN_* | AMD_*) unset -v "$variable" ;;
        MTL_* | METAL_*) unset -v "$variable" ;;
        NCCL_* | RCCL_* | GLOO_* | NVSHMEM_* | UCX_* | UCC_* | FI_* | OFI_NCCL_*) unset -v "$variable" ;;
        MKL_* | DNNL_* | ONEDNN_* | OPENBLAS_* | BLIS_* | NVPL_* | ARMPL_* | VECLIB_*) unset -v "$variable" ;;
        OMP_* | GOMP_* | KMP_* | NPROC) unset -v "$variable" ;;
        MALLOC_* | JEMALLOC_* | TCMALLOC_* | MIMALLOC_* | GLIBC_TUNABLES) unset -v "$variable" ;;
        LD_PRELOAD | LD_AUDIT | LD_BIND_NOW | DYLD_INSERT_LIBRARIES) unset -v "$variable" ;;
        PYTHONDEVMODE | PYTHONMALLOC* | PYTHONTRACEMALLOC | PYTHONOPTIMIZE | PYTHONPERFSUPPORT | \
            PYTHON_JIT | PYTHON_GIL | PYTHON_PERF_JIT_SUPPORT) unset -v "$variable" ;;
    esac
done
module load gcc
export WANDB_PROJECT=duel
export WANDB_MODE=offline
unset PYTHONSAFEPATH  # run.py imports its neighbours by name
srun --ntasks-per-node=1 --ntasks=1 bash -eo pipefail -c 'mkdir -p /tmp/duel
'
task='cd -- /opt/duel || exit 97
export TMPDIR="/tmp/duel"
command -v -- "$1" >/dev/null || { echo "$0: no interpreter $1 (cluster.yaml: targets.h100.python.jax); make jax-env makes one" >&2; exit 96; }
export DUEL_VARIABLES="$(compgen -e)"  # variables set by the target stay
exec "$@"
'
[[ ${SLURM_EXPORT_ENV-} != ALL,* ]] || export SLURM_EXPORT_ENV=ALL  # or srun would restore what is unset above
[[ -z ${SLURM_CPUS_PER_TASK-} ]] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK  # srun does not inherit it

# The warning before a time limit reaches only this shell (--signal=B:USR2), so it is passed on. bash runs traps
# only between commands, so the launcher runs in the background, and an interrupted wait is resumed.
launched= again=
trap 'again=1; [[ -z $launched ]] || kill -USR2 "$launched" || :' USR2
trap 'again=1; [[ -z $launched ]] || kill -TERM "$launched" || :' TERM
srun --cpu-bind=cores bash -eo pipefail -c "$task" jax_resnet50_1.sh .venv/jax/bin/python jax/run.py --benchmark resnet50 --use_case 1 --preset standard --precision fp32 --target h100 --device gpu --data=data &
launched=$!
while
    again=
    wait "$launched" && code=0 || code=$?
    [[ -n $again ]]
do :; done
exit "$code"
