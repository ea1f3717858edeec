#!/usr/bin/env bash
# Train on several nodes with Slurm. The repository has to be on storage that all nodes share.
#
#     ./run.sh setup                                            once, on a node with network and GPU: makes .venv
#     sbatch slurm.sh                                           two nodes of eight GPUs
#     sbatch --nodes=4 slurm.sh --batch_sequences 32 --sequence_length 4096
#     sbatch slurm.sh --resume latest                           go on after the time limit, with the same settings
#
# Words after slurm.sh are settings of train_gpt.py. A batch needs at least one sequence per GPU.

#SBATCH --job-name=speedrun
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=01:00:00
# Two minutes before the time is over the processes are asked to end: they finish their step and save.
#SBATCH --signal=TERM@120
#SBATCH --output=slurm-%j.txt

set -euo pipefail
cd "$SLURM_SUBMIT_DIR"

# This part runs on the first node only, so the data is fetched once. If nodes have no network, run this line before.
if [[ " $* " != *" --train_files"* ]]; then
    .venv/bin/python data/cached_fineweb10B.py 10
fi

# One torchrun per node; launch.py is torchrun without its tracebacks. They meet at the first node, on a port that
# another job is unlikely to use.
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
port=$((29500 + SLURM_JOB_ID % 1000))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-120}

# 16 sequences of 8,192 tokens, and of two and three times that in later stages, are as many tokens per step as the
# record's 8 of 16,384. Later settings win.
srun --kill-on-bad-exit=1 .venv/bin/python records/launch.py \
    --nnodes="$SLURM_NNODES" --nproc_per_node="${PROCESSES:-gpu}" \
    --rdzv_backend=c10d --rdzv_id="$SLURM_JOB_ID" --rdzv_endpoint="${nodes[0]}:$port" \
    train_gpt.py --batch_sequences 16 --sequence_length 8192 "$@"
