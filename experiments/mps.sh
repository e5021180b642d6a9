#!/bin/bash
# Run a command with CUDA's multi-process service, so that several processes use one GPU at the same time.
# Where the service does not start, the command runs without it: processes then take turns.
#
#     bash experiments/mps.sh python -m experiments.noisy_cifar100.run ...
export CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d) CUDA_MPS_LOG_DIRECTORY=$(mktemp -d)
stop() { echo quit | timeout 20 nvidia-cuda-mps-control; } >/dev/null 2>&1
if nvidia-cuda-mps-control -d && timeout 60 python3 -c 'import torch; torch.ones(1, device="cuda").sum().item()'; then
    echo "The multi-process service is on."
    trap stop EXIT
else
    echo "The multi-process service is off."
    stop
    unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
fi
"$@"
