#!/bin/bash
# Writes a Slurm job that trains GPT-13B in FP8-LM's layout, 32 GPUs, at O3 (--level O0: stock's BF16). For data set
# DATA_PATH and TOKENIZER, or DATA=mock-data. More files of flags may follow, then any flag of `megatron-fp8 launch`:
#
#     scripts/slurm/gpt-13b.sh --submit --cluster infiniband --sbatch="--partition=gpu --account=me"
#     scripts/slurm/gpt-13b.sh --submit --container image.sqsh --mounts /data:/data        (pyxis and enroot)
exec megatron-fp8 launch --nodes 4 --level O3 --name gpt-13b \
    model/gpt-13b layout/gpt-13b-32gpus recipe/pretrain recipe/gpt-13b "recipe/${DATA:-data}" "$@"
