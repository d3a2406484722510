#!/bin/bash
# GPT-175B in FP8-LM's layout, 128 GPUs, at O3 (--level O0: stock's BF16). Its data: DATA_PATH and TOKENIZER, or
# DATA=mock-data. It writes the job's script; all that `megatron-fp8 launch` takes may follow:
#
#     scripts/slurm/gpt-175b.sh --submit --cluster infiniband --sbatch="--partition=gpu --account=me"
#     scripts/slurm/gpt-175b.sh --submit --container image.sqsh --mounts /data:/data        (pyxis and enroot)
# With --micro-batch-size 1, which leaves room for longer sequences or fewer GPUs, a step waits for its host: add
# recipe/step-graph then (a CUDA graph of each step).
exec megatron-fp8 launch model/gpt-175b layout/gpt-175b-128gpus recipe/pretrain recipe/gpt-175b "recipe/${DATA:-data}" \
    --nodes 16 --level O3 --name gpt-175b "$@"
