"""Commands that train, and what must become of each: see training_matrix.py.

Each of Megatron's flags of a GPT by itself, those of the model (architecture_cases.py) and those that change how its
numbers are trained; models in every layout of two ranks; and pairs of flags that a seed has chosen, in a layout too.
`TRAINING` and `LEFT_OUT` together are every flag of Megatron's groups of training, with a reason for what is left out.
"""

import random
from dataclasses import dataclass

from architecture_cases import CASES, EXPERTS, MLA, MOE, MTP, REFUSED, ROPE, SHARED, YARN, case_lines

Case = tuple[int, str]  # ranks, flags
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

REPLACES = {  # of which Megatron takes but one
    "--step-batch-size-schedule": "--global-batch-size",
    "--train-samples": "--train-iters",
}


def command(case: str) -> list[str]:
    """The flags of a case with those of every run."""
    flags = [*BASE, *case.split()]
    for flag, other in REPLACES.items():
        if flag in flags:
            at = flags.index(other)
            del flags[at : at + 2]
    return flags


# The first flag of a line is the one that is tried.
TRAINING = f"""
--use-rotary-position-embeddings
--no-position-embedding
--openai-gelu --no-bias-gelu-fusion
--onnx-safe True
--weight-decay 0.3
--apply-wd-to-qk-layernorm --qk-layernorm
--no-weight-decay-cond-type apply_wd_to_qk_layernorm --qk-layernorm
--clip-grad 0.5
--clip-grad 100
--adam-beta1 0.5
--adam-beta2 0.9
--adam-eps 1e-3
--micro-batch-size 1
--micro-batch-size 4
--global-batch-size 8
--step-batch-size-schedule 0:4,256:8
--rampup-batch-size 2 2 4
--decrease-batch-size-if-needed
--empty-unused-memory-level 2
--check-weight-hash-across-dp-replicas-interval 2
--train-sync-interval 1
--train-iters 3
--train-samples 12
--exit-interval 3
--exit-duration-in-mins 60
--exit-signal-handler
--manual-gc
--manual-gc-interval 2 --manual-gc
--no-manual-gc-eval
--iterations-to-skip 2
--recompute-activations
--no-check-for-nan-in-loss-and-grad
--check-for-large-grads
--check-for-spiky-loss
--rerun-mode disabled
--use-flash-attn
--optimizer-cuda-graph
--dataloader-type single
--dataloader-type cyclic
--use-mcore-models
--seed 7
--data-parallel-random-init
--te-rng-tracker
--use-cpu-initialization
--use-cpu-initialization {MLA}
--use-cpu-initialization {MOE}
--lr 3e-3
--min-lr 5e-4
--lr-decay-style constant
--lr-decay-style cosine
--lr-decay-style inverse-square-root --lr-warmup-iters 1
--lr-decay-style WSD --lr-wsd-decay-iters 2
--lr-wsd-decay-style linear --lr-decay-style WSD --lr-wsd-decay-iters 2
--lr-wsd-decay-style minus_sqrt --lr-decay-style WSD --lr-wsd-decay-iters 2
--lr-wsd-decay-iters 3 --lr-decay-style WSD
--lr-decay-iters 2
--lr-warmup-iters 2
--lr-warmup-fraction 0.5
--lr-warmup-init 1e-4 --lr-warmup-iters 2
--lr-decay-samples 8 --train-samples 16
--lr-warmup-samples 8 --train-samples 16
--lr-wsd-decay-samples 8 --lr-decay-style WSD --train-samples 16
--override-opt_param-scheduler
--use-checkpoint-opt_param-scheduler
--decoupled-lr 5e-3
--decoupled-min-lr 1e-3 --decoupled-lr 5e-3
--start-weight-decay 0.01 --end-weight-decay 0.3 --weight-decay-incr-style linear
--end-weight-decay 0.3 --start-weight-decay 0.01 --weight-decay-incr-style linear
--weight-decay-incr-style cosine --start-weight-decay 0.01 --end-weight-decay 0.3
--accumulate-allreduce-grads-in-fp32
--grad-reduce-in-bf16
--initial-loss-scale 16
--use-distributed-optimizer
--overlap-grad-reduce
--overlap-grad-reduce --use-distributed-optimizer
--overlap-param-gather --overlap-grad-reduce --use-distributed-optimizer
--no-gradient-reduce-div-fusion
--ddp-bucket-size 1000 --overlap-grad-reduce
--ddp-num-buckets 3 --overlap-grad-reduce
--ddp-pad-buckets-for-high-nccl-busbw --use-distributed-optimizer
--ddp-average-in-collective
--ddp-reduce-scatter-with-fp32-accumulation --use-distributed-optimizer
--overlap-param-gather-with-optimizer-step
--keep-fp8-transpose-cache
--ddp-param-name-patterns-for-fp32-local-accumulation *norm* --grad-reduce-in-bf16
--no-align-grad-reduce
--no-align-param-gather
--no-use-layer-wise-param-layout
--use-tp-pp-dp-mapping
--disable-gloo-process-groups
--disable-jit-fuser
--create-all-gather-group --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
--calculate-per-token-loss --global-batch-size 8
--eval-iters 1
--eval-interval 2 --eval-iters 1
--start-eval-at-iter 3 --eval-iters 1 --eval-interval 1
--eval-global-batch-size 8 --eval-iters 1 --eval-interval 2
--eval-micro-batch-size 1 --eval-iters 1 --eval-interval 2
--full-validation --eval-interval 2 --split 90,10,0
--phase-transition-iterations 2 --train-samples 16
--split 90,10,0
--num-workers 1
--eod-mask-loss
--reset-position-ids
--reset-attention-mask
--no-create-attention-mask-in-dataloader
--num-dataset-builder-threads 2
--mid-level-dataset-surplus 0.1
--no-mmap-bin-files
--no-pad-vocab-size
--null-tokenizer-eod-id 5
--log-params-norm
--log-num-zeros-in-grad
--log-throughput
--timing-log-level 2
--enable-experimental
--cuda-graph-impl local
--cuda-graph-impl full_iteration --no-check-for-nan-in-loss-and-grad
--tp-comm-overlap
--delay-wgrad-compute
--first-last-layers-bf16
--fp8-format hybrid
--fp8-recipe delayed
"""

TRAINING_REFUSED = f"""
--loss-scale 8
--optimizer sgd
--optimizer muon
--optimizer lion
--optimizer-cpu-offload
--use-precision-aware-optimizer --use-distributed-optimizer
--exp-avg-dtype bf16
--exp-avg-sq-dtype bf16
--main-params-dtype fp16
--main-grads-dtype bf16
--freeze-all-layers
--rerun-mode report_stats
--use-megatron-fsdp
--use-torch-fsdp2
--num-distributed-optimizer-instances 2 --use-distributed-optimizer
--reuse-grad-buf-for-mxfp8-param-ag
--dataloader-inter-document-masking --attention-backend auto
--perform-rl-step
--moe-use-upcycling {MOE}
--hybrid-override-pattern M*
"""

GROUPS = """
network size, regularization, training, RNG and initialization, learning rate and weight decay, mixed precision,
distributed init, validation, data and dataloader, tokenizer, experimental, rerun engine, sft, moe
"""
LEFT_OUT = {
    "of another model than a GPT, or a name that Megatron keeps to say so": """
        --encoder-num-layers --decoder-num-layers --relative-attention-num-buckets --relative-attention-max-distance
        --bert-no-binary-head --encoder-seq-length --decoder-seq-length --sample-rate --mask-prob --short-seq-prob
        --batch-size --warmup --model-parallel-size --checkpoint-activations --vocab-extra-ids""",
    "read with a flag that a level refuses: other optimizers', FP16's, FSDP's, upcycling's": """
        --sgd-momentum --muon-momentum --muon-no-split-qkv --muon-nesterov --muon-scale-mode --muon-fp32-matmul-prec
        --muon-coefficient-type --muon-num-ns-steps --muon-tp-mode --muon-extra-scale-factor --muon-scalar-optimizer
        --lion-beta1 --lion-beta2 --optimizer-offload-fraction --use-torch-optimizer-for-cpu-offload
        --overlap-cpu-optimizer-d2h-h2d --no-pin-cpu-grads --no-pin-cpu-params --min-loss-scale --loss-scale-window
        --hysteresis --fsdp-manual-registration --data-parallel-sharding-strategy --outer-dp-sharding-strategy
        --fsdp-double-buffer --suggested-communication-unit-size --enable-full-sharding-in-hsdp
        --torch-fsdp2-no-reshard-after-forward --megatron-fsdp-main-params-dtype --megatron-fsdp-main-grads-dtype
        --megatron-fsdp-grad-comm-dtype --megatron-fsdp-enable-fine-grained-param-gather
        --megatron-fsdp-max-pool-double-buffer --fsdp-db-use-persist-buf-on-alloc-fail --moe-upcycling-granularity""",
    "on conversations, which stock without Transformer Engine does not train on (test_sft_runs.py)": """
        --sft --sft-tokenizer-prompt-format""",
    "of the GPU and its network": """
        --gpu-sniff-test-interval --nccl-communicator-config-path --use-sharp --sharp-enabled-group
        --high-priority-stream-groups --use-nccl-ub --disable-symmetric-registration""",
    "how processes find and end each other": """
        --exit-signal --exit-signal-handler-for-dataloader --exit-signal-handler-for-training --distributed-backend
        --distributed-timeout-minutes --local-rank --lazy-mpu-init --distributed-timeout-seconds-after-init
        --flight-recorder-dump-path --flight-recorder-trace-buffer-size --no-flight-recorder-dump-on-timeout
        --flight-recorder-include-stack-trace --no-flight-recorder-include-only-active
        --no-flight-recorder-extra-dump-on-exec --fake-process-group""",
    "a layout: see LAYOUTS": "--num-layers-per-virtual-pipeline-stage --num-virtual-stages-per-pipeline-rank",
    "names or reads files, and what is in them; the same tokens are the same to both": """
        --result-rejected-tracker-filename --dump-param-to-param-group-map --data-path --train-data-path
        --valid-data-path --test-data-path --data-args-path --per-split-data-args-path --per-dataset-sequences-path
        --dataloader-fast-cache-load --dataloader-defer-npy-index-mmap --data-cache-path --mock-data
        --object-storage-cache-path --multiple-validation-sets --validation-set-names --allow-ambiguous-pad-tokens
        --fim-data --fim-rate --fim-spm-rate --fim-split-sample --fim-fragment-rate --fim-no-prefix --fim-prefix-token
        --fim-middle-token --fim-suffix-token --fim-pad-token --fim-eod-token --vocab-file --merge-file
        --tokenizer-type --tokenizer-model --tokenizer-metadata --tokenizer-special-tokens --tiktoken-pattern
        --tiktoken-num-special-tokens --tokenizer-sentencepiece-legacy --trust-remote-code --null-tokenizer-pad-id
        --no-tokenizer-sentencepiece-ignore-extra-whitespaces --tokenizer-hf-no-use-fast
        --tokenizer-hf-no-include-special-tokens --chat-template""",
    "trains nothing, or breaks the run": "--skip-train --error-injection-rate --error-injection-type",
}

# Of what ranks share: each model in each layout that it can have.
TP = "--tensor-model-parallel-size 2"
CP = "--context-parallel-size 2"
LAYOUTS = {
    "TP": (2, TP),
    "TP SP": (2, f"{TP} --sequence-parallel"),
    "PP": (2, "--pipeline-model-parallel-size 2"),
    "VPP": (2, "--pipeline-model-parallel-size 2 --num-layers 4 --num-layers-per-virtual-pipeline-stage 1"),
    "DP": (2, ""),
    "DP zero": (2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
    "CP": (2, f"{CP} --attention-backend auto"),
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
    "mla fused": f"--mla-down-proj-fusion {MLA} --q-lora-rank 48",
    "mla dropout": f"{MLA} --attention-dropout 0.3",
    "moe": MOE,
    "aux": f"{EXPERTS} --moe-aux-loss-coeff 0.5",
    "shared": SHARED,
    "shared gate": f"--moe-shared-expert-gate {SHARED}",
    "moe mla": f"--num-experts 4 {MLA} --swiglu --disable-bias-linear",
}


def in_layout(case: str, layout: str) -> Case:
    ranks, flags = LAYOUTS[layout]
    return ranks, " ".join(filter(None, (case, flags)))


def singles() -> list[Case]:
    """Every flag by itself, with what it needs."""
    return [(1, case) for lines in (CASES, REFUSED, TRAINING, TRAINING_REFUSED) for case in case_lines(lines)]


def laid_out() -> list[Case]:
    """Every model in every layout that it can have."""
    saved = "--distribute-saved-activations --recompute-granularity full --recompute-method uniform"
    return [
        (2, f"{saved} --recompute-num-layers 1 {TP}"),
        *[
            in_layout(model, layout)
            for model in MODELS.values()
            for layout in LAYOUTS
            if layout not in ({"TP"} if "--num-experts" in model else {"EP"})  # Megatron wants SP beside TP for experts
        ],
    ]


def pairs(count: int = 60, seed: int = 35) -> list[Case]:
    """Two flags at a time, of other subjects, in a random layout."""
    choose = random.Random(seed)
    lines = [*case_lines(CASES), *case_lines(TRAINING)]
    layouts = ["", *(name for name in LAYOUTS if name not in ("CP", "EP"))]
    found: dict[str, int] = {}
    while len(found) < count:
        pair, layout = choose.sample(lines, 2), choose.choice(layouts)
        if layout == "TP" and "--num-experts" in " ".join(pair):
            layout = "TP SP"
        ranks, case = in_layout(" ".join(pair), layout) if layout else (1, " ".join(pair))
        found.setdefault(case, ranks)
    return [(ranks, case) for case, ranks in found.items()]


def all_cases() -> list[Case]:
    return list(dict.fromkeys((*singles(), *laid_out(), *pairs())))


@dataclass(frozen=True)
class Reason:
    """Why a case has another verdict than "same".

    Attributes:
        flags: of every such case, in this order; " + " stands between flags with others between them.
        verdict: see training_matrix.py.
        text: the reason; of a refusal a level itself gives it.
        bound: of what differs, by how much at most: the first step's losses and gradient norm, and later losses.
    """

    flags: str
    verdict: str
    text: str
    bound: float = 0.0

    def holds(self, case: Case) -> bool:
        return all(f" {flags} " in f" {case[1]} " for flags in self.flags.split(" + "))


OWN_KERNEL = "torch's attention, which rounds elsewhere; --attention-backend unfused is Megatron's kernel"
OWN_BLOCKS = (
    "a level computes blocks of keys in FP32 and merges them; stock rounds all logits and probabilities to BF16.  With "
    "stock's attention in the place of ours all four losses are stock's, in the four models that were tried"
)
SINK = "Transformer Engine's sinks start as their memory was, zeros here; a level's are drawn, as Megatron's own"
TANH = "a level has torch's GELU or SwiGLU, stock here Transformer Engine's: GELU is exact or its tanh form"
TWO_GEMMS = "stock's one GEMM sums the gradient of the norm's output in FP32; a level adds those of two, in BF16"
NO_SUM = (
    "stock does not sum the gradient of the key that all heads share over the tensor-parallel ranks, whose copies of "
    "the down projection drift apart; a level does.  Without its sum every loss of the four steps is stock's"
)
CUT = (
    "stock cuts the fused projection by columns: each rank's GEMM makes a part of the gradient of the norm's output, "
    "and the ranks add these parts in BF16.  The columns of the key that all heads share lie on the last rank, and "
    "stock gives them the gradient of that rank's heads alone.  A level's ranks have the whole projection, in two "
    "GEMMs, and sum over all heads.  The missing sum makes 0.7e-4 of the first norm's 1.07e-4, the cut the rest.  With "
    "stock's cut, without the sum and with stock's loss (one bit of the first) all four losses are stock's"
)
LAST_BIT = (
    "a level adds up a softmax over the ranks' vocabularies in one pass, stock in two: a few of 13,000 gradients of "
    "logits fall on the other side of a rounding to BF16"
)
OTHER_ORDER = "a level has switched it off: the gradients of the norm before experts are added in another order"
UNREAD_MASK = "Transformer Engine's causal attention reads no mask; a level's reads it, as Megatron's own does"
NEEDS_CUDA = "stock needs a GPU for it; a level has switched it off"
CHECKED_FIRST = "stock asks for companions of it, which it checks after a level has switched it off"
NEEDS_TE = "stock's own FP8 needs Transformer Engine itself; a level's is its own"
FACTOR = "stock ignores the factor and builds the model with 8; a level builds it with the factor"
REASONS = [
    *(Reason(line, "refused", "") for line in case_lines(REFUSED)),
    *(Reason(line, "refused", "") for line in case_lines(TRAINING_REFUSED)),
    Reason(f"--window-size 4,0 + {CP}", "refused", ""),
    Reason(f"--attention-dropout 0.1 + {CP}", "refused", ""),
    Reason(f"--attention-dropout 0.3 + {CP}", "refused", ""),
    Reason(CP, "differs", OWN_BLOCKS, 1e-3),
    Reason("--no-position-embedding", "checked", ""),
    Reason("--micro-batch-size 4 + --overlap-param-gather", "checked", ""),
    Reason("--position-embedding-type mrope", "refused", ""),  # as the next three, of flags/stock_faults.py
    Reason("--no-pad-vocab-size", "refused", ""),
    Reason("--full-validation", "refused", ""),
    Reason("--no-initialization", "refused", ""),
    Reason("--rope-scaling-factor 2.0", "differs", FACTOR, 1e-3),
    Reason("--optimizer-cuda-graph", "alone", NEEDS_CUDA),
    Reason("--cuda-graph-impl full_iteration", "alone", NEEDS_CUDA),
    Reason("--cuda-graph-impl local", "alone", NEEDS_CUDA),
    Reason("--tp-comm-overlap", "alone", CHECKED_FIRST),
    Reason("--overlap-param-gather-with-optimizer-step", "alone", CHECKED_FIRST),
    Reason("--delay-wgrad-compute", "alone", CHECKED_FIRST),
    Reason("--fp8-format hybrid", "alone", NEEDS_TE),
    Reason("--softmax-type learnable", "differs", SINK, 1e-3),
    Reason("--use-te-activation-func", "differs", TANH, 2e-4),
    Reason("--attention-backend flash", "differs", OWN_KERNEL, 2e-4),
    Reason("--reset-attention-mask", "differs", UNREAD_MASK, 1e-3),
    Reason("--moe-shared-expert-overlap", "differs", OTHER_ORDER, 1e-4),
    Reason(f"--mla-down-proj-fusion + {TP}", "differs", CUT, 2e-4),
    Reason("--mla-down-proj-fusion", "differs", TWO_GEMMS, 1e-4),
    Reason("--use-mup + --tensor-model-parallel-size 2", "differs", LAST_BIT, 1e-4),
    Reason(f"--multi-latent-attention + {TP}", "differs", NO_SUM, 2e-4),
]


def reason(case: Case) -> Reason | None:
    """The first that holds; None for a case that must be the same."""
    return next((why for why in REASONS if why.holds(case)), None)
