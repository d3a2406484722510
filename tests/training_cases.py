"""Commands that train.  See training_matrix.py."""

import random

from architecture_cases import CASES, EXPERTS, MLA, MOE, MTP, REFUSED, ROPE, SHARED, YARN, case_lines

# Four steps of a GPT of two layers.  Clipping is off: the norm's sum runs in another order than stock's, and its last
# bit would reach the weights.
BASE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 4 --train-iters 4 --lr 1e-3 --min-lr 1e-4 "
    "--clip-grad 0 --bf16 --mock-data --tokenizer-type NullTokenizer --vocab-size 100 "
    "--make-vocab-size-divisible-by 4 --num-workers 0 --split 1,0,0 --eval-iters 0 --eval-interval 1000 "
    "--log-interval 1 --attention-dropout 0 --hidden-dropout 0 --no-gradient-accumulation-fusion "
    "--no-masked-softmax-fusion --no-persist-layer-norm --no-rope-fusion --attention-backend unfused "
    "--attention-softmax-in-fp32 --distributed-backend gloo"
).split()

TRAINING = f"""
--weight-decay 0.3
--apply-wd-to-qk-layernorm --qk-layernorm
--clip-grad 0.5
--clip-grad 100
--adam-beta1 0.5
--adam-beta2 0.9
--adam-eps 1e-3
--no-weight-decay-cond-type apply_wd_to_qk_layernorm --qk-layernorm
--lr-decay-style constant
--lr-decay-style cosine
--lr-decay-style inverse-square-root --lr-warmup-iters 1
--lr-decay-style WSD --lr-wsd-decay-iters 2
--lr-wsd-decay-style linear --lr-decay-style WSD --lr-wsd-decay-iters 2
--lr-wsd-decay-style minus_sqrt --lr-decay-style WSD --lr-wsd-decay-iters 2
--lr-decay-iters 2
--lr-warmup-iters 2
--lr-warmup-fraction 0.5
--lr-warmup-init 1e-4 --lr-warmup-iters 2
--min-lr 5e-4
--decoupled-lr 5e-3
--decoupled-min-lr 1e-3 --decoupled-lr 5e-3
--start-weight-decay 0.01 --end-weight-decay 0.3 --weight-decay-incr-style linear
--weight-decay-incr-style cosine --start-weight-decay 0.01 --end-weight-decay 0.3
--micro-batch-size 1
--micro-batch-size 4
--global-batch-size 8
--step-batch-size-schedule 0:4,8:8
--rampup-batch-size 2 2 4
--decrease-batch-size-if-needed
--iterations-to-skip 2
--seed 7
--data-parallel-random-init
--te-rng-tracker
--use-cpu-initialization
--use-cpu-initialization {MLA}
--use-cpu-initialization {MOE}
--accumulate-allreduce-grads-in-fp32
--grad-reduce-in-bf16
--loss-scale 8
--recompute-activations
--check-for-large-grads
--check-for-spiky-loss
--no-check-for-nan-in-loss-and-grad
--rerun-mode disabled
--manual-gc
--empty-unused-memory-level 2
--train-sync-interval 1
--exit-interval 3
--optimizer sgd
--optimizer muon
--optimizer lion
--optimizer-cpu-offload
--optimizer-cuda-graph
--use-precision-aware-optimizer --use-distributed-optimizer
--exp-avg-dtype bf16
--main-params-dtype fp16
--main-grads-dtype bf16
--freeze-all-layers
--calculate-per-token-loss --global-batch-size 8
--eod-mask-loss
--reset-position-ids
--reset-attention-mask
--no-create-attention-mask-in-dataloader
--dataloader-type single
--dataloader-type cyclic
--no-pad-vocab-size
--log-params-norm
--log-num-zeros-in-grad
--log-throughput
--timing-log-level 2
--disable-jit-fuser
--use-distributed-optimizer
--use-distributed-optimizer --overlap-grad-reduce
--overlap-param-gather --overlap-grad-reduce --use-distributed-optimizer
--overlap-grad-reduce
--no-gradient-reduce-div-fusion
--ddp-bucket-size 1000 --overlap-grad-reduce
--ddp-num-buckets 3 --overlap-grad-reduce
--ddp-pad-buckets-for-high-nccl-busbw --use-distributed-optimizer
--no-align-grad-reduce
--no-align-param-gather
--use-megatron-fsdp
--use-torch-fsdp2
--use-rotary-position-embeddings
--openai-gelu --no-bias-gelu-fusion
--onnx-safe True
--use-flash-attn
--enable-experimental
--sft
--perform-rl-step
--moe-use-upcycling {MOE}
--cuda-graph-impl local
--cuda-graph-impl full_iteration
--tp-comm-overlap
--delay-wgrad-compute
--distribute-saved-activations
--first-last-layers-bf16
--fp8-format hybrid
--fp8-recipe delayed
"""

# Of what ranks share: each model in each layout that it can have.
TP = "--tensor-model-parallel-size 2"
LAYOUTS = {
    "TP": (2, TP),
    "TP SP": (2, f"{TP} --sequence-parallel"),
    "PP": (2, "--pipeline-model-parallel-size 2"),
    "VPP": (2, "--pipeline-model-parallel-size 2 --num-layers 4 --num-layers-per-virtual-pipeline-stage 1"),
    "DP": (2, ""),
    "DP zero": (2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
    "CP": (2, "--context-parallel-size 2"),
    "EP": (2, "--expert-model-parallel-size 2"),
}
MODELS = {
    "gpt": "",
    "llama": f"--normalization RMSNorm --swiglu --disable-bias-linear {ROPE} --untie-embeddings-and-output-weights",
    "gqa": f"--group-query-attention --num-query-groups 2 --qk-layernorm {ROPE}",
    "dropout": "--hidden-dropout 0.1 --attention-dropout 0.1",
    "gate": "--attention-output-gate",
    "l2": f"--qk-l2-norm {ROPE}",
    "window": "--window-size 4,0",
    "yarn": YARN,
    "mup": "--use-mup --mup-base-hidden-size 32",
    "per token": "--calculate-per-token-loss",
    "recompute": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "selective": "--recompute-granularity selective",
    "fused loss": "--cross-entropy-loss-fusion",
    "mtp": MTP,
    "mla": MLA,
    "mla lora": f"{MLA} --q-lora-rank 48 --qk-layernorm",
    "mla dropout": f"{MLA} --attention-dropout 0.3",
    "moe": MOE,
    "aux": f"{EXPERTS} --moe-aux-loss-coeff 0.5",
    "shared": SHARED,
    "shared gate": f"--moe-shared-expert-gate {SHARED}",
    "moe mla": f"--num-experts 4 {MLA} --swiglu --disable-bias-linear",
}


def in_layout(case: str, layout: str) -> tuple[int, str]:
    ranks, flags = LAYOUTS[layout]
    return ranks, " ".join(filter(None, (case, flags)))


def singles() -> list[tuple[int, str]]:
    """Every flag by itself, with what it needs."""
    return [(1, case) for case in (*case_lines(CASES), *case_lines(REFUSED), *case_lines(TRAINING))]


def laid_out() -> list[tuple[int, str]]:
    return [
        in_layout(model, layout)
        for model in MODELS.values()
        for layout in LAYOUTS
        if layout != "EP" or "--num-experts" in model
    ]


def pairs(count: int = 60, seed: int = 35) -> list[tuple[int, str]]:
    """Two flags at a time, of other subjects, in a random layout."""
    choose = random.Random(seed)
    lines = [*case_lines(CASES), *case_lines(TRAINING)]
    layouts = ["", *(name for name in LAYOUTS if name not in ("CP", "EP"))]
    found: dict[str, int] = {}
    while len(found) < count:
        pair, layout = choose.sample(lines, 2), choose.choice(layouts)
        ranks, case = in_layout(" ".join(pair), layout) if layout else (1, " ".join(pair))
        found.setdefault(case, ranks)
    return [(ranks, case) for case, ranks in found.items()]


def all_cases() -> list[tuple[int, str]]:
    return list(dict.fromkeys((*singles(), *laid_out(), *pairs())))
