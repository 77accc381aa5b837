#!/usr/bin/env bash
# sha256 of the other lines: 47cf9d8f954d897cf896f822e46d14d5d8e943795d0a1ee09fb058414dc0a40a
# Duel: jax and pytorch in turn, bert, use case 5 (latency and throughput at several batch sizes), preset standard, fp32, target local.
# Rendered from templates/job.sh.j2 and cluster.yaml; 'python main.py' overwrites changes made here.
# To start it by hand, any number of times (each start is a separate run under results/runs/):
#     bash slurm_scripts/paired_bert_5_tiny_pairs_1_profile_session_4.sh
set -eo pipefail
export DUEL_SCRIPT="$(cat -- "$0")"  # kept with the run; it shows whether the script was edited by hand
cd -- . || exit 97
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
export WANDB_PROJECT=duel
unset PYTHONSAFEPATH  # run.py imports its neighbours by name
python=.venv/jax/bin/python
if ! command -v -- "$python" >/dev/null; then
    echo "$0: no interpreter $python (cluster.yaml: targets.local.python.jax); make jax-env makes one" >&2
    exit 96
fi
export DUEL_VARIABLES="$(compgen -e)"  # variables set by the target stay
exec "$python" jax/run.py --benchmark bert --use_case 5 --preset standard --precision fp32 --target local --size tiny --pairs 1 --profile --data=data --paired=pytorch=.venv/pytorch/bin/python
