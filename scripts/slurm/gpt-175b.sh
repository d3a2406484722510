#!/bin/bash
# Writes a Slurm job that trains GPT-175B in FP8-LM's layout, 128 GPUs, at O3 (--level O0: stock's BF16). For data set
# DATA_PATH and TOKENIZER, or DATA=mock-data. More files of flags may follow, then any flag of `megatron-fp8 launch`:
#
#     scripts/slurm/gpt-175b.sh --submit --cluster infiniband --sbatch="--partition=gpu --account=me"
#     scripts/slurm/gpt-175b.sh --submit --container image.sqsh --mounts /data:/data        (pyxis and enroot)
#     scripts/slurm/gpt-175b.sh recipe/step-graph --flags="--micro-batch-size 1" --submit
# The last is for longer sequences or fewer GPUs. With a micro-batch of 1 the GPU waits for its host, unless each step is
# a CUDA graph.
exec megatron-fp8 launch --nodes 16 --level O3 --name gpt-175b \
    model/gpt-175b layout/gpt-175b-128gpus recipe/pretrain recipe/gpt-175b "recipe/${DATA:-data}" "$@"
