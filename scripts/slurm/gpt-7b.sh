#!/bin/bash
# Writes a Slurm job that trains GPT-7B in FP8-LM's layout, 32 GPUs, at O3 (--level O0: stock's BF16). For data set
# DATA_PATH and TOKENIZER, or DATA=mock-data. More files of flags may follow, then any flag of `megatron-fp8 launch`:
#
#     scripts/slurm/gpt-7b.sh --submit --cluster infiniband --sbatch="--partition=gpu --account=me"
#     scripts/slurm/gpt-7b.sh --submit --container image.sqsh --mounts /data:/data        (pyxis and enroot)
exec megatron-fp8 launch --nodes 4 --level O3 --name gpt-7b \
    model/gpt-7b layout/gpt-7b-32gpus recipe/pretrain recipe/gpt-7b "recipe/${DATA:-data}" "$@"
