#!/bin/bash
# Writes a Slurm job that trains GPT-175B in FP8-LM's layout, 128 GPUs, at O3 (--level O0: stock's BF16). For data set
# DATA_PATH and TOKENIZER, or DATA=mock-data. Any flag of `megatron-fp8 launch` may follow:
#
#     scripts/slurm/gpt-175b.sh --submit --cluster infiniband --sbatch="--partition=gpu --account=me"
#     scripts/slurm/gpt-175b.sh --submit --container image.sqsh --mounts /data:/data        (pyxis and enroot)
# With --micro-batch-size 1, which saves memory for longer sequences or fewer GPUs, the GPU waits for its host: then add
# recipe/step-graph (each step is a CUDA graph).
exec megatron-fp8 launch model/gpt-175b layout/gpt-175b-128gpus recipe/pretrain recipe/gpt-175b "recipe/${DATA:-data}" \
    --nodes 16 --level O3 --name gpt-175b "$@"
