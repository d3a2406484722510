"""A command for each of stock Megatron's flags that shape the model: what architecture.py compares.

Which flags those are is a rule, `architecture_flags`, so that a flag of a newer version cannot be forgotten: every
flag that Megatron's configuration of a model takes over, by the name of a field or in the functions that fill it.  Each
of them begins a line of CASES, or of REFUSED, or is, with the reason why there is nothing to compare, in EXCLUDED.
"""

import argparse
import ast
import dataclasses
import inspect
import textwrap

ROPE = "--position-embedding-type rope"
YARN = "--position-embedding-type yarn --rotary-scaling-factor 4.0 --yarn-original-max-position-embeddings 16"
MUP = "--use-mup --mup-base-hidden-size 32"
MTP = f"--mtp-num-layers 1 {ROPE}"
EXPERTS = "--num-experts 4 --swiglu --disable-bias-linear"
MOE = f"{EXPERTS} --moe-router-load-balancing-type none"
AUX = f"{EXPERTS} --moe-aux-loss-coeff 0.5"
SHARED = f"--moe-shared-expert-intermediate-size 64 {MOE}"
CAPACITY = f"--moe-expert-capacity-factor 0.5 --moe-token-dispatcher-type alltoall {MOE}"
SIZES = {"kv-lora-rank": 32, "qk-head-dim": 16, "qk-pos-emb-head-dim": 8, "v-head-dim": 16}
MLA = " ".join(["--multi-latent-attention", ROPE, *(f"--{size} {value}" for size, value in SIZES.items())])
MLA_YARN = f"--rope-type yarn --rotary-scaling-factor 4.0 {MLA}"

# The first flag of a line is the one that is tried: what it changes in stock's model is told by leaving it out.
CASES = f"""
--num-layers 3
--hidden-size 96
--num-attention-heads 2
--ffn-hidden-size 192
--kv-channels 32
--group-query-attention --num-query-groups 2
--num-query-groups 2 --group-query-attention
--normalization RMSNorm
--norm-epsilon 1.0
--norm-epsilon 1.0 --normalization RMSNorm
--apply-layernorm-1p
--apply-layernorm-1p --normalization RMSNorm
--apply-residual-connection-post-layernorm
--disable-bias-linear
--add-qkv-bias --disable-bias-linear
--swiglu
--squared-relu --no-bias-gelu-fusion
--quick-geglu --no-bias-gelu-fusion
--quick-geglu --disable-bias-linear
--glu-linear-offset 0.5 --quick-geglu --disable-bias-linear
--activation-func-clamp-value 0.1 --quick-geglu --disable-bias-linear
--qk-layernorm
--qk-layernorm --normalization RMSNorm --apply-layernorm-1p
--qk-l2-norm
--qk-l2-norm {MTP}
--qk-l2-norm {MOE}
--attention-output-gate
--hidden-dropout 0.3
--attention-dropout 0.3
--softmax-type off-by-one
--softmax-type learnable
--window-size 4,0
--window-size 4,2
--window-size=-1,0
--window-attn-skip-freq 2 --window-size 4,0
--window-attn-skip-freq [0,1] --window-size 4,0
--apply-query-key-layer-scaling
--attention-softmax-in-fp32
--position-embedding-type none
--position-embedding-type rope
--position-embedding-type yarn
--position-embedding-type mrope --mrope-section 2 3 3
--mrope-section 2 3 3 --position-embedding-type mrope
--rotary-base 500 {ROPE}
--rotary-percent 0.5 {ROPE}
--rotary-interleaved {ROPE}
--rotary-seq-len-interpolation-factor 2 {ROPE}
--use-rope-scaling {ROPE}
--rope-scaling-factor 2.0 --use-rope-scaling {ROPE}
--no-rope-freq 2 {ROPE}
--rotary-scaling-factor 3.0 {YARN.replace("--rotary-scaling-factor 4.0", "")}
--yarn-original-max-position-embeddings 16 --rotary-scaling-factor 4.0 --position-embedding-type yarn
--yarn-beta-fast 1.0 {YARN}
--yarn-beta-slow 0.2 {YARN}
--yarn-correction-range-round-to-int {YARN} --rotary-base 100
--no-yarn-correction-range-round-to-int {YARN} --rotary-base 100
--mscale 2.0 {YARN}
--mscale-all-dim 2.0 {YARN}
--max-position-embeddings 64
--make-vocab-size-divisible-by 64
--vocab-size 120
--padded-vocab-size 128
--untie-embeddings-and-output-weights
--init-method-std 0.5
--embedding-init-method-std 0.5
--no-initialization
--use-mup --mup-base-hidden-size 32
--mup-width-mult 3.0 --use-mup
--mup-base-hidden-size 32 --use-mup
--mup-embedding-mult 3.0 {MUP}
--mup-output-mult 3.0 {MUP}
--mup-base-head-dim 4 {MUP}
--mup-attn-scale-power 0.5 {MUP}
--calculate-per-token-loss
--cross-entropy-loss-fusion
--no-bias-gelu-fusion
--no-bias-swiglu-fusion --swiglu
--no-bias-dropout-fusion
--no-masked-softmax-fusion
--use-te-activation-func --disable-bias-linear
--use-te-activation-func --swiglu --no-bias-swiglu-fusion
--fused-residual-rmsnorm --normalization RMSNorm
--use-fused-weighted-squared-relu --squared-relu --disable-bias-linear --num-experts 4
--use-grouped-gemm-for-dense-mlp
--recompute-granularity selective
--recompute-granularity full --recompute-method uniform --recompute-num-layers 1
--recompute-modules layernorm --recompute-granularity selective
--mlp-chunks-for-training 2
--test-mode
--deterministic-mode
--disable-bf16-reduced-precision-matmul
--attention-backend unfused
--attention-backend flash
--flash-attention-version 3
--no-clone-scatter-output-in-embedding
--mtp-num-layers 1 {ROPE}
--mtp-num-layers 2 {ROPE}
--mtp-loss-scaling-factor 0.9 {MTP}
--mtp-use-repeated-layer --mtp-num-layers 2 {ROPE}
--num-experts 4 --swiglu --disable-bias-linear
--num-experts 4 --no-bias-gelu-fusion
--moe-layer-freq 2 {MOE}
--moe-layer-freq [0,1] {MOE}
--moe-ffn-hidden-size 64 {MOE}
--moe-shared-expert-intermediate-size 64 {MOE}
--moe-shared-expert-gate {SHARED}
--moe-shared-expert-overlap {SHARED} --moe-token-dispatcher-type alltoall
--moe-router-topk 1 --moe-router-pre-softmax {MOE}
--moe-enable-routing-replay {MOE}
--moe-router-num-groups 4 --moe-router-group-topk 2 {MOE}
--moe-router-group-topk 1 --moe-router-num-groups 2 --moe-router-pre-softmax {MOE}
--moe-router-pre-softmax {MOE}
--moe-router-topk-scaling-factor 2.0 --moe-router-pre-softmax {MOE}
--moe-router-score-function sigmoid {MOE}
--moe-router-score-function sqrtsoftplus {MOE}
--moe-router-dtype fp64 {MOE}
--moe-router-enable-expert-bias --moe-router-score-function sigmoid {MOE}
--moe-router-bias-update-rate 0.5 --moe-router-enable-expert-bias --moe-router-score-function sigmoid {MOE}
--moe-router-load-balancing-type seq_aux_loss {AUX}
--moe-router-load-balancing-type global_aux_loss {AUX}
--moe-router-load-balancing-type quantile_balancing {EXPERTS}
--moe-router-load-balancing-type sinkhorn {EXPERTS} --moe-router-topk 1 --moe-router-pre-softmax
--moe-router-quantile-balancing-ema 0.5 --moe-router-load-balancing-type quantile_balancing {EXPERTS}
--moe-aux-loss-coeff 0.5 {EXPERTS}
--moe-router-force-load-balancing {MOE}
--moe-router-force-biased 0.5 {MOE}
--moe-z-loss-coeff 0.5 {MOE}
--moe-input-jitter-eps 0.1 {MOE}
--moe-token-dispatcher-type alltoall {MOE}
--moe-expert-capacity-factor 0.5 --moe-token-dispatcher-type alltoall {MOE}
--moe-pad-expert-input-to-capacity {CAPACITY}
--moe-token-drop-policy position {CAPACITY}
--moe-layer-recompute {MOE}
--moe-apply-probs-on-input --moe-router-topk 1 --moe-router-pre-softmax {MOE}
--moe-grouped-gemm {MOE}
--moe-per-layer-logging {AUX}
--multi-latent-attention {MLA.removeprefix("--multi-latent-attention")}
--q-lora-rank 48 {MLA}
--q-lora-rank 48 --qk-layernorm {MLA}
--kv-lora-rank 48 {MLA.replace("--kv-lora-rank 32", "")}
--qk-head-dim 32 {MLA.replace("--qk-head-dim 16", "")}
--qk-pos-emb-head-dim 16 {MLA.replace("--qk-pos-emb-head-dim 8", "")}
--v-head-dim 32 {MLA.replace("--v-head-dim 16", "")}
--qk-layernorm {MLA}
--qk-layernorm {MLA} --normalization RMSNorm --apply-layernorm-1p
--rope-type rope {MLA} --rotary-scaling-factor 4.0
--rotary-scaling-factor 3.0 --rope-type yarn {MLA}
--mscale 2.0 {MLA_YARN}
--mscale-all-dim 2.0 {MLA_YARN}
--mla-down-proj-fusion --q-lora-rank 48 {MLA}
--attention-dropout 0.3 {MLA}
--softmax-type learnable {MLA}
--window-size 4,0 {MLA}
--num-experts 4 {MLA} --swiglu --disable-bias-linear
--mtp-num-layers 1 {MLA}
--recompute-modules mla_up_proj --recompute-granularity selective {MLA}
--mtp-hybrid-override-pattern M
--symmetric-ar-type two_shot
"""

REFUSED = f"""
--qk-clip
--qk-clip-alpha 0.4 --qk-clip
--qk-clip-threshold 50 --qk-clip
--position-embedding-type relative
--init-method-xavier-uniform
--fp16-lm-cross-entropy
--fp32-residual-connection
--mtp-detach-heads {MTP}
--moe-latent-size 32 {MOE}
--moe-mlp-glu-interleave-size 16 {MOE}
--moe-shared-expert-glu-interleave-size 16 {SHARED}
--use-grouped-gemm-for-shared-expert {SHARED}
--moe-single-grouped-weight {MOE}
--moe-single-grouped-bias {MOE}
--moe-paged-stash {MOE}
--qk-l2-norm {MLA}
--cache-mla-latents {MLA}
--experimental-attention-variant gated_delta_net
--heterogeneous-layers-config-path nowhere.json
--hybrid-layer-pattern M*M*
--is-hybrid-model
--yaml-cfg nowhere.yaml
--transformer-impl inference_optimized
--batch-invariant-mode
--fine-grained-activation-offloading
--cpu-offloading-num-layers 1
--init-model-with-meta-device
--fp16
--fp8-param-gather
--fp8-quantizer-factory somewhere
--fp8-interval 2
--fp8-output-proj
--fp4-format e2m1
--fp4-param-gather
--fp4-quantizer-factory somewhere
--use-kitchen-attention
--te-precision-config-file nowhere.yaml
--hybrid-context-parallel
--tensor-parallel-num-weight-shards 2
--log-max-attention-logit
"""

NO_EFFECT = {  # flags whose every case changes nothing in stock's own model, and why that is right
    "--rope-scaling-factor": "Megatron 0.19 hands it to no model; the plugin does (test_hf_logits.py)",
    "--mup-width-mult": "Megatron works it out of --mup-base-hidden-size",
    "--yarn-correction-range-round-to-int": "the default",
    "--no-masked-softmax-fusion": "all cases have it",
}

EXCLUDED = {
    "how ranks share the work, not what the model is; tests of layouts train with them": """
        --tensor-model-parallel-size --pipeline-model-parallel-size --sequence-parallel --context-parallel-size
        --hierarchical-context-parallel-sizes --max-seqlen-per-dp-cp-rank --expert-model-parallel-size
        --expert-tensor-parallel-size --pipeline-model-parallel-comm-backend --use-ring-exchange-p2p
        --overlap-p2p-communication-warmup-flush --microbatch-group-size-per-virtual-pipeline-stage --mtp-standalone
        --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split --no-overlap-p2p-communication
        --decoder-first-pipeline-num-layers --decoder-last-pipeline-num-layers --pipeline-model-parallel-layout
        --cp-comm-type --high-priority-a2a-comm-stream --distribute-saved-activations
        --expert-tensor-parallel-num-weight-shards""",
    "overlaps communication of Transformer Engine's layers; switched off by a level (test_stock_flags.py)": """
        --tp-comm-overlap --no-tp-comm-bulk-wgrad --no-tp-comm-bulk-dgrad --no-tp-comm-overlap-ag
        --no-tp-comm-overlap-rs --tp-comm-overlap-rs-dgrad --no-tp-comm-split-ag --no-tp-comm-split-rs
        --tp-comm-bootstrap-backend --tp-comm-overlap-cfg --overlap-moe-expert-parallel-comm --delay-wgrad-compute
        --overlap-dispatch-backward-with-experts-wgrad --ep-overlap-early-attn-memory-release""",
    "a fused kernel that this machine has not; the same result (test_stock_flags.py)": """
        --no-rope-fusion --no-gradient-accumulation-fusion --no-persist-layer-norm --moe-permute-fusion
        --moe-router-fusion --use-transformer-engine-op-fuser --cross-entropy-fusion-impl
        --defer-embedding-wgrad-compute --wgrad-deferral-limit""",
    "CUDA graphs; of whole steps, or switched off by a level (test_step_graph.py, test_stock_flags.py)": """
        --enable-cuda-graph --external-cuda-graph --cuda-graph-impl --cuda-graph-modules --cuda-graph-warmup-steps
        --inference-cuda-graph-scope""",
    "of FP8 GEMMs, a level's own or refused (test_stock_flags.py, test_config.py)": """
        --bf16 --fp8-format --fp8-recipe --fp8-margin --fp8-amax-history-len --fp8-amax-compute-algo --no-fp8-wgrad
        --moe-router-padding-for-quantization --moe-router-padding-for-fp8 --first-last-layers-bf16
        --num-layers-at-start-in-bf16 --num-layers-at-end-in-bf16
        --fp4-recipe --kitchen-attention-backend""",
    "inference only": """
        --flash-decode --nccl-all-reduce-for-prefill --inference-fuse-tp-communication
        --inference-disable-triton-nvls-kernels --inference-grouped-gemm-backend
        --inference-moe-disable-fused-quant-kernels --inference-moe-token-dispatcher-type --inference-rng-tracker
        --mlp-chunks-for-prefill --moe-pad-experts-for-cuda-graph-inference""",
    "read with a flag that a level refuses: Mamba's, DSA's, linear attention's, offloading's, paged stash's": """
        --mamba-state-dim --mamba-head-dim --mamba-num-groups --mamba-num-heads --disable-mamba-mem-eff-path
        --mamba-training-ssm-states-dtype --linear-attention-freq --linear-conv-kernel-dim --linear-key-head-dim
        --linear-value-head-dim --linear-num-key-heads --linear-num-value-heads --dsa-indexer-n-heads
        --dsa-indexer-head-dim --dsa-indexer-topk --dsa-indexer-topk-freq --dsa-indexer-skip-topk-offset
        --dsa-indexer-loss-coeff --dsa-indexer-use-sparse-loss --dsa-kernel-backend --dsa-indexer-rope-interleaved
        --no-dsa-indexer-rotate-activation --no-dsa-indexer-scoring-relu --dsa-indexer-k-norm-epsilon
        --dsa-indexer-k-norm-fp32 --offload-modules --min-offloaded-tensor-size --delay-offload-until-cuda-graph
        --delta-offload-bytes-across-pp-ranks --activation-offload-fraction
        --fine-grained-offloading-max-inflight-offloads --cpu-offloading-retain-pinned-cpu-buffers
        --moe-paged-stash-page-size --moe-paged-stash-buffer-size-factor-cuda
        --moe-paged-stash-buffer-size-factor-cpu""",
    "how DeepEP and its like send tokens: packages and networks that this machine has not": """
        --moe-enable-deepep --moe-flex-dispatcher-backend --moe-permute-fusion-into-hybridep
        --moe-hybridep-pad-uneven-dispatch-inputs --moe-flex-dispatcher-num-sms --moe-deepep-num-sms
        --moe-hybridep-num-sms --moe-hybridep-num-blocks-permute --moe-hybridep-num-blocks-unpermute
        --moe-hybridep-num-sms-preprocessing --moe-ncclep-static-shape --moe-ncclep-zero-copy
        --moe-expert-rank-capacity-factor""",
    "how much is recomputed, not what; tried by tests/cpu/test_recompute_runs.py": """
        --recompute-method --recompute-num-layers""",
    "of the run, not of the model": """
        --seed --seq-length --use-cpu-initialization --config-logger-dir
        --no-barrier-with-level-1-timing""",
    "names the user's own layers (test_plugin.py)": "--spec",
}


def case_lines(cases: str = CASES + REFUSED) -> list[str]:
    return [line for line in cases.splitlines() if line]


def architecture_flags(parser: argparse.ArgumentParser) -> set[str]:
    """The first spelling of every flag of Megatron's parser whose value its configuration of a GPT takes over."""
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig
    from megatron.training import argument_utils
    from megatron.training.models.gpt import GPTModelConfig

    configurations = TransformerConfig, MLATransformerConfig, GPTModelConfig
    taken = {field.name for kind in configurations for field in dataclasses.fields(kind)}
    for filling in ("core_transformer_config_from_args", "gpt_config_from_args", "_apply_yarn_config_from_args"):
        source = textwrap.dedent(inspect.getsource(getattr(argument_utils, filling)))
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "args":
                taken.add(node.attr)
    return {action.option_strings[0] for action in parser._actions if action.dest in taken}
