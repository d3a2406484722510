"""Stock Megatron's flags under an FP8 level: one table with a row for every flag that affects numerics.

A level takes over the weights of qkv, proj, fc1 and fc2; the rest stays stock Megatron's. A stock flag is one of:

    honoured   means what it means in stock: a field of Fp8Config shows it, or stock's own code acts on it
    noted      honoured; a log line says what the level does not cover (experts, MLA, ...)
    adapted    changed before Megatron validates its arguments, with a log line. Only if the result is the same:
               optimizations of Transformer Engine's layers, which the level replaces, and fused kernels that
               are not installed. So a command written for Transformer Engine and apex runs unchanged
    refused    a UserError with the remedy: the flag has another numeric meaning, gives the weights another
               owner, or saves memory that the run may need
    (no row)   does not affect precision, the linears, gradients, weights or the optimizer

The flags are those of megatron-core 0.19. A test walks the table with Megatron's own parser. It fails if a newer
version has a flag whose name looks numeric and that is in neither `TABLE` nor `IRRELEVANT`.
"""

import importlib
from argparse import Namespace
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass
from enum import Enum
from typing import Any

from . import graphs
from .level import CELLS, LEVEL, LOWEST

HONOURED, NOTED, ADAPTED, REFUSED = "honoured", "noted", "adapted", "refused"


@dataclass(frozen=True)
class When:
    """The condition of a row: `text` for people, `test(value, args)` for the program."""

    text: str
    test: Callable[[Any, Namespace], bool]


@dataclass(frozen=True)
class Row:
    """What becomes of one stock flag under a level.

    Attributes:
        flag: as on the command line.
        when: the values that the row applies to.
        verdict: HONOURED, NOTED, ADAPTED or REFUSED.
        note: the meaning under a level; for REFUSED the remedy.
        to: for ADAPTED, the new value of the argument (for an enum, the name of its member).
        field: the field of Fp8Config that shows the flag; "" if stock's own code acts on it.
        missing: the row applies only if this module cannot be imported; "": always.
    """

    flag: str
    when: When
    verdict: str
    note: str
    to: Any = None
    field: str = ""
    missing: str = ""

    @property
    def dest(self) -> str:
        """Name of the flag's value in the parsed arguments."""
        name = self.flag.removeprefix("--").removeprefix("no-").replace("-", "_")
        return _DEST.get(self.flag, name)

    def holds(self, args: Namespace) -> bool:
        """Whether the row applies to these arguments on this machine."""
        applies = self.when.test(getattr(args, self.dest, None), args)
        return applies and not (self.missing and installed(self.missing))

    def adapt(self, args: Namespace) -> None:
        """Give the argument the value `to`."""
        old = getattr(args, self.dest)
        setattr(args, self.dest, type(old)[self.to] if isinstance(old, Enum) else copy(self.to))

    def shown(self, args: Namespace) -> str:
        """The flag and its value in `args`: "--fp8-recipe mxfp8", "--fp16", "--bf16 not given".

        "rope-fusion" if --no-rope-fusion was not given.
        """
        value = getattr(args, self.dest, None)
        if self.flag == "--cuda-graph-impl":
            return graphs.spelling(args)
        if self.when is NOT_GIVEN and not self.flag.startswith("--no-"):
            return f"{self.flag} not given"
        if self.flag.startswith("--no-") and (self.when is NOT_GIVEN or (value and not self.dest.startswith("no_"))):
            return self.flag.removeprefix("--no-")
        return self.flag if isinstance(value, bool) else f"{self.flag} {plain(value)}"


_DEST = {  # flags whose name in the parsed arguments is irregular
    "--fp8-format": "fp8",
    "--fp4-format": "fp4",
    "--no-persist-layer-norm": "no_persist_layer_norm",
    "--no-rope-fusion": "apply_rope_fusion",
    "--cuda-graph-scope": "cuda_graph_scope_deprecated",
    "--use-nccl-ub": "nccl_ub",
}


def installed(module: str) -> bool:
    """Whether `module` can be imported here."""
    try:
        importlib.import_module(module)
    except (ImportError, OSError):  # OSError: a shared library that it needs is missing
        return False
    return True


def plain(value: Any) -> str:
    """A parsed value as text of a command line."""
    if isinstance(value, list | tuple):
        return " ".join(map(plain, value))
    return value.name if isinstance(value, Enum) else str(value)


def rows(args: Namespace, *verdicts: str) -> Iterator[Row]:
    """The rows of TABLE with one of these verdicts that apply to `args`."""
    return (row for row in TABLE if row.verdict in verdicts and row.holds(args))


GIVEN = When("given", lambda value, args: bool(value))
NOT_GIVEN = When("not given", lambda value, args: not value)
LEFT_ON = When("not given", lambda value, args: bool(value))  # for a --no-... flag
OFF = When("given", lambda value, args: not value)  # for a --no-... flag
ANY = When("any value", lambda value, args: True)


def one_of(*values: str) -> When:
    return When(" or ".join(values), lambda value, args: value is not None and plain(value) in values)


def other_than(default: str) -> When:
    return When(f"other than {default}", lambda value, args: value is not None and plain(value) != default)


def in_te(when: When) -> When:
    """`when`, in a run with Transformer Engine's attention."""
    return When(
        f"{when.text}, with --fp8-attention te",
        lambda value, args: args.fp8_attention == "te" and when.test(value, args),
    )


def in_torch(when: When) -> When:
    """`when`, in a run with torch's attention, the default."""
    return When(
        f"{when.text}, without --fp8-attention te",
        lambda value, args: args.fp8_attention != "te" and when.test(value, args),
    )


def _packs(args: Namespace) -> bool:
    return getattr(args, "sft", False) or getattr(args, "dataloader_inter_document_masking", False)


def packed(when: When) -> When:
    """`when`, in a run whose documents are packed, with torch's attention."""
    return When(
        f"{when.text}, with --sft or --dataloader-inter-document-masking, without --fp8-attention te",
        lambda value, args: args.fp8_attention != "te" and _packs(args) and when.test(value, args),
    )


OTHER_THAN_TP = When(
    "other than --tensor-model-parallel-size",
    lambda value, args: value not in (None, getattr(args, "tensor_model_parallel_size", None)),
)


ALL_TO_ALL = When("a2a or a2a+p2p", lambda value, args: bool({"a2a", "a2a+p2p"} & set(value or ())))
NOT_ONLY_PEERS = When(
    "all_gather, a2a or a2a+p2p", lambda value, args: bool({"all_gather", "a2a", "a2a+p2p"} & set(value or ()))
)
PEER_TO_PEER = When("p2p", lambda value, args: "p2p" in (value or ()))
NO_WAY = When(
    "other than p2p, all_gather, a2a, a2a+p2p",
    lambda value, args: not {"p2p", "all_gather", "a2a", "a2a+p2p"} >= set(value or ()),
)


def beside_context(when: When) -> When:
    """`when`, with context parallelism in torch's attention."""
    return in_torch(
        When(
            f"{when.text}, with --context-parallel-size",
            lambda value, args: args.context_parallel_size > 1 and when.test(value, args),
        )
    )


def beside_documents(when: When, packs: bool = True) -> When:
    """`when`, with context parallelism in torch's attention and packed documents; packs=False: and without them."""
    return beside_context(
        When(
            f"{when.text}, {'with' if packs else 'without'} --sft",
            lambda value, args: getattr(args, "sft", False) == packs and when.test(value, args),
        )
    )


WEIGHT = next(cell for cell in CELLS if cell.name == "weight")


def _weights(args: Namespace) -> str:
    """The value of the cell weight: the flag's, else the level's."""
    return getattr(args, WEIGHT.dest, None) or WEIGHT.at(LEVEL.given(args) or LOWEST)


WITH_FP8_WEIGHTS = When(
    "given, at O3 or with --fp8-weight fp8", lambda value, args: bool(value) and _weights(args) == "fp8"
)
WITH_BF16_WEIGHTS = When(
    "given, at O1, O2 or with --fp8-weight bf16", lambda value, args: bool(value) and _weights(args) != "fp8"
)
FUSED_KERNELS, UNFUSED_KERNELS = one_of("flash", "fused"), one_of("unfused", "local")
KEEPS_OPTIMIZER = When(
    "torch, torch_dcp or fsdp_dtensor, with --save, or --load of the optimizer",
    lambda value, args: plain(value) in ("torch", "torch_dcp", "fsdp_dtensor")
    and bool(args.save or (args.load and not args.finetune and not args.no_load_optim)),
)
CUT_AS_BUFFERS = When(
    "not given, with --use-distributed-optimizer and --save or --ckpt-convert-save, "
    "without --fp8-ckpt-compact and local checkpoints",
    lambda value, args: not value
    and bool(args.use_distributed_optimizer and (args.save or args.ckpt_convert_save))
    and not args.fp8_ckpt_compact
    and args.non_persistent_ckpt_type != "local",
)
LATENT = When(
    "given, with --multi-latent-attention", lambda value, args: bool(value) and args.multi_latent_attention
)
UNFUSABLE = When(
    "not given, with biases and --squared-relu, or --quick-geglu, or --num-experts without --swiglu or --quick-geglu",
    lambda value, args: bool(value)
    and args.add_bias_linear
    and not args.swiglu
    and (args.squared_relu or bool(args.num_experts) != args.quick_geglu),
)
STAGES_BETWEEN = When(
    "given, with more than 2 pipeline stages or virtual ones",
    lambda value, args: bool(value)
    and (
        args.pipeline_model_parallel_size > 2
        or bool(args.num_layers_per_virtual_pipeline_stage or args.num_virtual_stages_per_pipeline_rank)
        or bool(args.pipeline_model_parallel_layout)
    ),
)
WITHOUT_MASK = When(
    "given, with --no-create-attention-mask-in-dataloader",
    lambda value, args: bool(value) and not args.create_attention_mask_in_dataloader,
)
RECOMPUTED_REPEATS = When(
    "given, with --overlap-grad-reduce, several layers and linears that are recomputed",
    lambda value, args: bool(value)
    and args.overlap_grad_reduce
    and (args.mtp_num_layers or 0) > 1
    and bool(
        args.recompute_granularity == "full"
        or (args.recompute_granularity == "selective" and set(args.recompute_modules or ()) - {"core_attn"})
    ),
)
NO_READER = When(
    "not given, without --reset-attention-mask", lambda value, args: bool(value) and not args.reset_attention_mask
)
SHARDED = When(
    "given, with --use-distributed-optimizer", lambda value, args: bool(value) and args.use_distributed_optimizer
)
MASKED_BY_RANK = When(
    "given, without --calculate-per-token-loss", lambda value, args: bool(value) and not args.calculate_per_token_loss
)
GRAPHED_IN_PARTS = When(
    "local or transformer_engine, or --fp8-step-graph on or auto",
    lambda value, args: plain(value) != graphs.WHOLE and graphs.graphed(args),
)
SWITCHED_OFF = When("given, with --fp8-step-graph off", lambda value, args: plain(value) != "none" and _off(args))
UNGRAPHED = When("given, without a graph of whole steps", lambda value, args: bool(value) and not graphs.graphed(args))
WITH_GRAPH = When("given, with a graph of whole steps", lambda value, args: bool(value) and graphs.graphed(args))
GRAPHED = When("not given, with a graph of whole steps", lambda value, args: not value and graphs.graphed(args))
PROMPTS = When(
    "default or identity, with --sft",
    lambda value, args: getattr(args, "sft", False) and value in ("default", "identity"),
)


def _off(args: Namespace) -> bool:
    return graphs.STEP_GRAPH.given(args) == "off"


def _with(flag: str) -> str:
    return flag if flag.startswith("without") else f"with {flag}"


def _hindered(flag: str) -> When:
    """A graph is asked for, and `flag` (or a missing GPU) prevents it."""
    return When(
        f"any but none, {_with(flag)}",
        lambda value, args: graphs.asked(args) and graphs.hindrance(args) == flag,
    )


def _by_torch(value: Any, args: Namespace) -> bool:
    """Whether stock's rotation would be torch's without Transformer Engine. Latent attention's has kernels for yarn."""
    latent = args.multi_latent_attention and args.rope_type in (None, "yarn")
    return bool(value) and not (latent and graphs.can_record() and not _packs(args))


UNFUSED_ROTATION = When(
    "not given, except for --multi-latent-attention with yarn, on a GPU, without packed documents", _by_torch
)
OWNED = When("given, with --fp8-experts", lambda value, args: bool(value) and bool(args.fp8_experts))
UNOWNED = When("given, without --fp8-experts", lambda value, args: bool(value) and not args.fp8_experts)
NO_FILES = When("msc://...", lambda value, args: str(value or "").startswith("msc://"))
ROPE_SCALED = When("other than 8.0, with --use-rope-scaling", lambda value, args: value != 8 and args.use_rope_scaling)
ROPE_UNSCALED = When(
    "other than 8.0, without --use-rope-scaling", lambda value, args: value != 8 and not args.use_rope_scaling
)
WITH_SAVE = When("given", lambda value, args: bool(value) and bool(args.save))
WITHOUT_SAVE = When("given, without --save", lambda value, args: bool(value) and not args.save)
WITHOUT_WORKER = When(
    "given, without --use-persistent-ckpt-worker",
    lambda value, args: bool(value) and not args.use_persistent_ckpt_worker,
)
SENT_IN_FP8 = When("given, with --fp8-dispatch", lambda value, args: bool(value) and bool(args.fp8_dispatch))
WITH_MOE_ACT = When("with moe_act", lambda value, args: "moe_act" in (value or ()))

# Reasons and remedies that several rows share. Adapted flags with one reason share a log line.
ABSENT = "switched off: needs apex or Transformer Engine, not installed here (same result)"
OWN_ROTATION = "the level's own kernel rotates in FP32; rotation by stock is unfused without Transformer Engine"
TE_LAYERS = "switched off: speeds up Transformer Engine's layers, which the level replaces (same result)"
SINGLY = "switched off: without --fp8-experts a level runs routed experts in BF16, one after the other (same result)"
NOT_ALONE = "use moe instead: a level recomputes whole experts, and not their activation function alone"
OWN_OVERLAP = "without Transformer Engine's buffers: the level's linears always overlap gathers and sums with GEMMs"
DEFERRED = "switched off: stock's code for it treats each column-parallel linear as an LM head (same result)"
ONE_STREAM = "switched off: the level's linears share memory, on one stream (same but for the order of a sum)"
OWN_GROUPS = "the level casts and multiplies the rows of a rank's experts together (docs/experts.md)"
OWN_PERMUTATION = "switched off: the level's kernel gathers the rows and casts them (same but for the order of a sum)"
TORCH_GELU = "switched off: the level uses torch's (same result, except that GELU is exact instead of its tanh form)"
NO_GRAPHS = "switched off: a level graphs whole steps (same result)"
WHOLE_STEPS = "full_iteration instead: a level graphs whole steps (same result)"
UNGRAPHED_NOTE = "switched off, with --cuda-graph-impl (same result)"
LATE_CHECK = "only for Megatron's validation: a level checks the losses when a step is launched, with a graph too"
GRAPHED_NOISE = "added: a CUDA graph needs it to draw random numbers (Megatron's own, without Transformer Engine)"
TWO_OPTIMIZERS = "switched off: stock's and the level's optimizer step one after the other (same result)"
UNPADDED = (
    "switched off: without Transformer Engine Megatron cannot save if a rank's part of stock's own parameters is all "
    "padding (same result)"
)
NO_PADDING = "switched off: the level adds rows of zeros itself, if its GEMMs need them (same result)"
OWN_GATHER = "switched off: the level itself keeps the linears' weights in FP8 and gathers them in FP8"
OWN_KERNEL = "no effect: torch's attention chooses its own kernel (--fp8-attention te: Transformer Engine's)"
MASKED = "torch's attention then reads a mask, in slower kernels than the causal one"
PACKED = "torch's variable-length attention: the documents in a row do not attend to each other"
UNMASKED = (
    "prompts are learnt like answers; with default, if the tokenizer pads with its end token, labels equal to it are "
    "masked: the end of a turn is never learnt"
)
UNFUSED = "attention runs in Megatron's unfused kernel: memory grows with the square of --seq-length"
STOCKS_OWN = "for stock's own parameters: embeddings, norms, biases, LM head, experts"
FP32_SUMS = f"{STOCKS_OWN}; for the linears see --fp8-grad-accum fp32"
READ_NOWHERE = "no effect: megatron-core 0.19 reads it nowhere"
SKIPPED = "a step whose gradient norm is not finite is skipped, the run goes on; the loss is checked as in stock"
BF16_WEIGHTS = "remove it, or use --fp8-level O3: at this one the linears' weights are BF16"
STATES = "remove it: the level decides the optimizer's formats (see --fp8-exp-avg, --fp8-master)"
NO_FP4 = "remove it: a level trains in FP8 (FP4: --fp8-level O0 and Transformer Engine)"
NO_FSDP = "remove it: it would own the weights that the level owns; use --use-distributed-optimizer"
NO_GTP = "remove it: it would shard the weights that the level owns; use --use-distributed-optimizer"
ADAM_ONLY = "use --optimizer adam: a level updates its weights with Adam"
RECOMPUTE = "remove it: it belongs to Transformer Engine's layers; to save memory use --recompute-granularity"
ANY_LAYOUT = (
    "added: checkpoints load at any layout; a rank that saves needs 12 bytes of host memory for each of stock's own "
    "parameters (embeddings, LM head, norms, experts) (--fp8-ckpt-compact: stock's default, for one layout)"
)
GROUPED = "remove it: it belongs to Transformer Engine's grouped linears; a level runs experts one by one"
GPT_ONLY = "remove it, or use --fp8-level O0: a level supports only a GPT's layers"
PER_MODULE = "remove it: a level has one precision for its linears (see --first-last-layers-bf16, --fp8-gemm)"
FILES = "give a path in a file system: a level's checkpoints need one"
ONE_FORMAT = "use torch_dist: no other format can store the level's optimizer state"
TWO_RECIPES = "use --fp8-recipe delayed or tensorwise: the level's GEMMs take one scale per tensor"
MODELOPT = "remove it, or use --fp8-level O0: ModelOpt brings its own layers"
WITHOUT_CONTEXT = "remove it, or --context-parallel-size, or add --fp8-attention te"
UNFUSED_CONTEXT = "use auto: Megatron's unfused attention does not support --context-parallel-size"
BLOCKS_DRAW = "with --context-parallel-size every block of keys would drop the same elements (or --fp8-attention te)"
UNREAD = "switched off: no attention reads the data loader's mask, a byte for each pair of tokens (same result)"
KEYS_GATHERED = "all_gather instead: keys and values are gathered, beside a rank's own block (same result)"
ONE_GROUP = "no effect: keys and values travel in one group of ranks (same result)"
FETCHED_ABOVE = 1 << 29  # bytes
KEYS_FETCHED = (
    "keys and values are fetched from rank after rank if those of a layer and a whole sequence take more than "
    f"{FETCHED_ABOVE >> 20} MiB; else they are gathered, which costs less (same result)"
)
PACKS_FETCHED = "p2p instead: of packed documents keys and values are fetched from rank after rank (same result)"
DOCUMENTS_CUT = "remove it, or --context-parallel-size: with --sft stock's code for it expects each document in chunks"
ANSWERS_CUT = (
    "add it: with --sft and --context-parallel-size the mean is of each rank's mean, and a rank may have few answer "
    "tokens of a sequence, another many"
)
MEAN_OF_MEANS = (
    "gradients are of the mean of context-parallel ranks' means, as in stock: a token counts more on a rank with more "
    "masked ones; add --calculate-per-token-loss"
)
TE_ATTENTION = "add --fp8-attention te (Transformer Engine's), which supports it"
TE = "transformer_engine.pytorch"
FUSED_WGRAD = "fused_weight_gradient_mlp_cuda"


def _honour(flags: str, note: str, when: When = ANY, field: str = "") -> list[Row]:
    return [Row(flag, when, HONOURED, note, field=field) for flag in flags.split()]


def _note(flags: str, note: str, when: When = GIVEN, **more: str) -> list[Row]:
    return [Row(flag, when, NOTED, note, **more) for flag in flags.split()]


def _adapt(flags: str, to: Any, note: str, when: When = GIVEN, **more: str) -> list[Row]:
    return [Row(flag, when, ADAPTED, note, to=to, **more) for flag in flags.split()]


def _refuse(flags: str, remedy: str, when: When = GIVEN, missing: str = "") -> list[Row]:
    return [Row(flag, when, REFUSED, remedy, missing=missing) for flag in flags.split()]


TABLE: list[Row] = [
    *_refuse("--yaml-cfg", "give flags instead: the file replaces the command line, --fp8-level included"),
    # --- FP8 and its recipe
    *_honour(
        "--fp8-format",
        "E4M3 forward with E5M2 activation gradients (hybrid, the default) or E4M3 for both",
        one_of("hybrid", "e4m3"),
        field="grad_format",
    ),
    *_honour(
        "--fp8-recipe",
        "scales from the amax history (delayed, the default) or from the tensor itself",
        one_of("delayed", "tensorwise"),
        field="recipe",
    ),
    *_refuse("--fp8-recipe", TWO_RECIPES, one_of("mxfp8", "blockwise", "custom")),
    *_refuse("--fp8-quantizer-factory", TWO_RECIPES),
    *_honour("--fp8-margin", "scales are divided by 2**margin", field="margin"),
    *_refuse("--fp8-interval", "remove it: scales are updated every step", other_than("1")),
    *_honour("--fp8-amax-history-len", "steps of amax history (delayed)", field="amax_history_len"),
    *_honour("--fp8-amax-compute-algo", "which amax of the history (delayed)", field="amax_compute_algo"),
    *_honour("--no-fp8-wgrad", "the weight-gradient GEMM runs in BF16", field="wgrad"),
    *_honour(
        "--first-last-layers-bf16",
        "the first and last layers' GEMMs run in BF16; with the delayed recipe too",
        field="bf16_layers_start",
    ),
    *_honour("--num-layers-at-start-in-bf16", "how many first layers", field="bf16_layers_start"),
    *_honour("--num-layers-at-end-in-bf16", "how many last layers", field="bf16_layers_end"),
    *_honour(
        "--keep-fp8-transpose-cache",
        "keeps each weight's transposed FP8 copy: costs a byte a weight, saves a pass over it in each micro-batch",
        field="keep_transpose_cache",
    ),
    *_adapt("--fp8-param-gather", False, OWN_GATHER, WITH_FP8_WEIGHTS),
    *_refuse("--fp8-param-gather", BF16_WEIGHTS, WITH_BF16_WEIGHTS),
    *_refuse("--fp8-output-proj", "remove it: it is Transformer Engine's, for MXFP8 (see --fp8-lm-head)"),
    *_refuse("--reuse-grad-buf-for-mxfp8-param-ag", TWO_RECIPES),
    *_adapt("--moe-router-padding-for-quantization --moe-router-padding-for-fp8", False, NO_PADDING),
    *_refuse("--fp4-format --fp4-param-gather --fp4-quantizer-factory", NO_FP4),
    *_refuse("--te-precision-config-file --kitchen-config-file", PER_MODULE),
    *_refuse("--kitchen-recipe-number", PER_MODULE, other_than("None")),
    *_refuse("--use-kitchen-attention", "remove it: attention is torch's, or with --fp8-attention te TE's"),
    *_refuse("--modelopt-enabled --export-kd-teacher-load", MODELOPT),
    # --- the precision around the FP8 linears
    *_refuse("--fp16", "use --bf16 instead: a level trains in FP8 and BF16"),
    *_refuse("--bf16", "add it: a level trains in FP8 and BF16", NOT_GIVEN),
    *_refuse("--fp16-lm-cross-entropy", "remove it: it needs --fp16"),
    *_refuse("--loss-scale", "remove it: BF16 needs no loss scale, and FP8 tensors have their own"),
    *_refuse("--fp32-residual-connection", "remove it: the level's norms and linears read BF16"),
    *_honour("--disable-bf16-reduced-precision-matmul", "for the BF16 GEMMs; FP8 GEMMs sum in FP32"),
    *_honour("--attention-softmax-in-fp32", "for Megatron's unfused attention; the other kernels always do"),
    *_honour("--apply-query-key-layer-scaling", "as in stock"),
    *_honour("--moe-router-dtype", "the router is stock's"),
    *_honour("--deterministic-mode", "as in stock; attention then uses torch's flash kernel: cuDNN's dQ varies"),
    *_refuse("--batch-invariant-mode", "remove it: an FP8 scale depends on the whole batch"),
    # --- layers
    *_adapt(
        "--transformer-impl",
        "local",
        "local instead: the level brings its own layers, with no need of Transformer Engine",
        one_of("transformer_engine"),
    ),
    *_refuse("--transformer-impl", "use local or transformer_engine", one_of("inference_optimized")),
    *_honour("--spec", "the level replaces its linears, norms and attention by their place in a layer"),
    *_refuse("--hybrid-layer-pattern --hybrid-override-pattern --is-hybrid-model", GPT_ONLY),
    *_refuse("--experimental-attention-variant", GPT_ONLY),
    *_refuse("--heterogeneous-layers-config-path --heterogeneous-layers-config-encoded-json", GPT_ONLY),
    *_refuse("--perform-rl-step", "use --fp8-level O0: generation supports only stock's weights"),
    *_refuse("--position-embedding-type", "use rope: it needs Transformer Engine", one_of("relative")),
    *_note("--multi-latent-attention", "the down projections stay in BF16, whole on every tensor-parallel rank"),
    *_refuse("--qk-l2-norm", "remove it: --multi-latent-attention does not support it (see --qk-layernorm)", LATENT),
    *_refuse("--cache-mla-latents", "remove it: it is for inference, and Megatron does not train with it"),
    *_note("--num-experts", "routed experts stay in BF16 (see --fp8-experts), shared ones do not", UNOWNED),
    *_refuse("--no-bias-gelu-fusion", "add --no-bias-gelu-fusion: Megatron cannot fuse this activation", UNFUSABLE),
    *_refuse("--init-method-xavier-uniform", "remove it: megatron-core 0.19 cannot build a model with it"),
    *_note("--openai-gelu --apply-residual-connection-post-layernorm", READ_NOWHERE),
    *_honour("--rope-scaling-factor", "handed to the model, which megatron-core 0.19 does not", ROPE_SCALED),
    *_note("--rope-scaling-factor", "no effect without --use-rope-scaling", ROPE_UNSCALED),
    *_refuse("--moe-latent-size", "install Transformer Engine: it uses its layers", missing=TE),
    *_refuse("--moe-mlp-glu-interleave-size --moe-shared-expert-glu-interleave-size", GROUPED),
    *_refuse("--use-grouped-gemm-for-shared-expert --moe-paged-stash", GROUPED),
    *_refuse("--moe-single-grouped-weight --moe-single-grouped-bias", GROUPED),
    *_refuse("--recompute-modules", NOT_ALONE, WITH_MOE_ACT),
    *_honour("--mlp-chunks-for-training", "each chunk must hold a multiple of 16 tokens"),
    *_refuse("--moe-use-upcycling", "convert the checkpoint with --fp8-level O0 first"),
    *_refuse("--init-model-with-meta-device", "remove it: the level needs the initial weights"),
    *_refuse("--fine-grained-activation-offloading --cpu-offloading-num-layers", RECOMPUTE),
    # --- attention
    *_adapt("--attention-backend", "auto", UNFUSED, in_torch(UNFUSED_KERNELS), field="unfused_attention"),
    *_refuse("--attention-backend", "remove it, or --fp8-attention te", in_te(one_of("local"))),
    *_adapt("--attention-backend", "auto", OWN_KERNEL, in_torch(FUSED_KERNELS)),
    *_adapt("--flash-attention-version", None, OWN_KERNEL, in_torch(GIVEN)),
    *_honour("--attention-backend", "as in stock", in_te(one_of("flash", "fused", "unfused"))),
    *_honour("--flash-attention-version", "as in stock", in_te(GIVEN)),
    *_refuse("--reset-attention-mask", "use at most 2 stages: middle ones get no mask", in_torch(STAGES_BETWEEN)),
    *_refuse("--reset-attention-mask", "remove --no-create-attention-mask-in-dataloader", in_torch(WITHOUT_MASK)),
    *_note("--reset-attention-mask", MASKED, in_torch(GIVEN), field="reads_mask"),
    *_note("--reset-attention-mask", "no effect, as in stock: Transformer Engine's attention is causal", in_te(GIVEN)),
    *_note("--window-size", MASKED, in_torch(GIVEN)),
    *_note("--softmax-type", UNFUSED, in_torch(other_than("vanilla"))),
    *_refuse("--attention-backend", UNFUSED_CONTEXT, beside_context(UNFUSED_KERNELS)),
    *_refuse("--softmax-type", WITHOUT_CONTEXT, beside_context(other_than("vanilla"))),
    *_refuse("--window-size --reset-attention-mask", WITHOUT_CONTEXT, beside_context(GIVEN)),
    *_refuse("--attention-dropout", f"use 0: {BLOCKS_DRAW}", beside_context(GIVEN)),
    *_adapt("--no-create-attention-mask-in-dataloader", False, UNREAD, in_torch(NO_READER)),
    *_adapt("--cp-comm-type", ["all_gather"], KEYS_GATHERED, beside_documents(ALL_TO_ALL, packs=False)),
    *_note("--cp-comm-type", KEYS_FETCHED, beside_documents(PEER_TO_PEER, packs=False)),
    *_adapt("--cp-comm-type", ["p2p"], PACKS_FETCHED, beside_documents(NOT_ONLY_PEERS)),
    *_refuse("--cp-comm-type", "use p2p or all_gather", beside_context(NO_WAY)),
    *_adapt("--hierarchical-context-parallel-sizes", None, ONE_GROUP, beside_context(GIVEN)),
    *_refuse("--dataloader-inter-document-masking", WITHOUT_CONTEXT, beside_context(GIVEN)),
    *_refuse("--multi-latent-attention --mtp-num-layers", DOCUMENTS_CUT, beside_documents(GIVEN)),
    *_refuse("--calculate-per-token-loss", ANSWERS_CUT, beside_documents(NOT_GIVEN)),
    *_note("--eod-mask-loss", MEAN_OF_MEANS, beside_context(MASKED_BY_RANK)),
    *_note("--sft --dataloader-inter-document-masking", PACKED, in_torch(GIVEN)),
    *_note("--sft-tokenizer-prompt-format", UNMASKED, PROMPTS),
    *_refuse("--attention-dropout", "add --attention-dropout 0, or --fp8-attention te", packed(other_than("0.0"))),
    *_refuse("--attention-backend", "remove it, or --fp8-attention te", packed(UNFUSED_KERNELS)),
    *_refuse("--softmax-type", "remove it, or --fp8-attention te", packed(other_than("vanilla"))),
    *_refuse("--log-max-attention-logit", TE_ATTENTION, in_torch(GIVEN)),
    *_refuse("--qk-clip", "remove it: it changes weights that the level owns"),
    *_refuse("--hybrid-context-parallel", "remove it: FP8 GEMMs need a fixed number of tokens"),
    # --- weights, gradients, optimizer
    *_refuse("--optimizer", ADAM_ONLY, other_than("adam")),
    *_refuse("--use-precision-aware-optimizer", STATES),
    *_refuse("--main-params-dtype --exp-avg-dtype --exp-avg-sq-dtype", STATES, other_than("fp32")),
    *_refuse("--main-grads-dtype", "use --grad-reduce-in-bf16 for stock's parameters", other_than("fp32")),
    *_refuse("--optimizer-cpu-offload", "remove it: the level's optimizer state stays on the GPU"),
    *_honour("--accumulate-allreduce-grads-in-fp32", f"{STOCKS_OWN}; for the linears see --fp8-grad-accum"),
    *_honour("--grad-reduce-in-bf16", f"{STOCKS_OWN}; for the linears see --fp8-grad-reduce"),
    *_honour("--ddp-reduce-scatter-with-fp32-accumulation", f"{STOCKS_OWN}; the linears always sum in FP32"),
    *_note("--ddp-param-name-patterns-for-fp32-local-accumulation", FP32_SUMS),
    *_honour("--ddp-average-in-collective", f"{STOCKS_OWN}; the linears take the mean after their FP32 sum"),
    *_honour("--ddp-num-buckets --ddp-bucket-size", "for the linears' buckets and for stock's own"),
    *_honour("--use-nccl-ub", STOCKS_OWN),
    *_honour(
        "--distributed-timeout-minutes", "for the groups of --fp8-grad-reduce-hierarchy too", field="timeout_minutes"
    ),
    *_honour("--no-check-for-nan-in-loss-and-grad", SKIPPED),
    *_note("--check-for-large-grads", f"{STOCKS_OWN}; for the linears see --fp8-on-spike"),
    *_honour("--overlap-grad-reduce", "the linears' buckets and stock's own are reduced during the backward pass"),
    *_honour("--overlap-param-gather", f"{STOCKS_OWN}; the linears' weights are gathered during the forward pass"),
    *_honour("--check-weight-hash-across-dp-replicas-interval", "for the linears too, once all parts have arrived"),
    *_honour("--log-params-norm", "the linears' FP32 masters count, or else the weights gathered for the next step"),
    *_honour("--verify-integrity", "all ranks hash and verify every checkpoint of a level, without it too"),
    *_adapt("--dist-ckpt-optim-fully-reshardable", True, ANY_LAYOUT, CUT_AS_BUFFERS),
    *_honour("--distrib-optim-fully-reshardable-mem-efficient", f"{STOCKS_OWN}: gathered on one rank, slower"),
    *_honour("--use-distributed-optimizer", "shards the linears' master weights and moments too"),
    *_note("--rampup-batch-size", "no effect: megatron-core 0.19 reads it nowhere (see --step-batch-size-schedule)"),
    *_honour("--use-mup", "the linears' learning rates and weight decay are stock's"),
    *_note("--dump-param-to-param-group-map", f"{STOCKS_OWN}; the linears are not in the file"),
    *_refuse("--num-distributed-optimizer-instances", "remove it: a level has one instance", other_than("1")),
    *_refuse("--rerun-mode", "use another mode: megatron-core 0.19 cannot start with it", one_of("report_stats")),
    *_refuse(
        "--mtp-use-repeated-layer",
        "remove --overlap-grad-reduce: with recomputation a gradient of the layer comes after the sum has begun",
        RECOMPUTED_REPEATS,
    ),
    *_refuse("--mtp-detach-heads", "remove it: the level clips all its linears by one gradient norm"),
    *_refuse("--use-megatron-fsdp --use-torch-fsdp2", NO_FSDP),
    *_refuse("--tensor-parallel-num-weight-shards", NO_GTP, OTHER_THAN_TP),
    *_refuse("--expert-tensor-parallel-num-weight-shards", NO_GTP),
    *_refuse("--freeze-all-layers", "use --fp8-level O0: nothing is trained"),
    *_refuse("--save-params-interval --save-dgrads-interval --save-activations-interval", "add --save", WITHOUT_SAVE),
    *_honour("--save-params-interval", "E4M3 weights are written as BF16", WITH_SAVE),
    *_honour("--save-dgrads-interval --save-activations-interval", "for the level's linears too", WITH_SAVE),
    *_refuse("--save-tokens-per-expert-interval", "remove it: it reads only Transformer Engine's grouped linears"),
    *_refuse("--save-wgrads-interval", "remove it: the linears' gradients are not in stock's buffers"),
    *_refuse("--save --load --pretrained-checkpoint", FILES, NO_FILES),
    *_note("--tensorboard-dir", "nothing is written: pip install tensorboard", missing="tensorboard"),
    *_note("--async-save", "no effect without --use-persistent-ckpt-worker: training waits for saves", WITHOUT_WORKER),
    *_refuse("--ckpt-format", ONE_FORMAT, KEEPS_OPTIMIZER),
    *_refuse("--ckpt-convert-format", ONE_FORMAT, one_of("torch")),
    *_refuse("--load-main-params-from-ckpt", "load the optimizer instead, or start from the weights"),
    # --- same result without them, only slower
    *_adapt("--no-gradient-accumulation-fusion", False, ABSENT, LEFT_ON, missing=FUSED_WGRAD),
    *_adapt("--defer-embedding-wgrad-compute", False, DEFERRED),
    *_adapt("--no-masked-softmax-fusion", False, ABSENT, LEFT_ON, missing="scaled_masked_softmax_cuda"),
    *_adapt("--no-persist-layer-norm", True, ABSENT, NOT_GIVEN, missing="apex.contrib.layer_norm.layer_norm"),
    *_adapt("--no-rope-fusion", False, OWN_ROTATION, UNFUSED_ROTATION, missing=TE),
    *_honour("--no-rope-fusion", "stock's unfused code rotates, which rounds to BF16", OFF, field="fuses_rotary"),
    *_adapt("--moe-permute-fusion --moe-router-fusion", False, ABSENT, missing=TE),
    *_adapt("--ddp-pad-buckets-for-high-nccl-busbw", False, UNPADDED, SHARDED, missing=TE),
    *_adapt("--moe-permute-fusion", False, OWN_PERMUTATION, SENT_IN_FP8),
    *_adapt("--te-rng-tracker", False, ABSENT, UNGRAPHED, missing=TE),
    *_adapt("--te-rng-tracker", True, GRAPHED_NOISE, GRAPHED),
    *_adapt("--cross-entropy-fusion-impl", "native", "native instead: stock's own", one_of("te")),
    *_note("--wgrad-deferral-limit", "no effect: --defer-embedding-wgrad-compute is switched off"),
    *_adapt("--moe-shared-expert-overlap", False, ONE_STREAM),
    *_adapt("--tp-comm-overlap", False, OWN_OVERLAP),
    *_adapt("--delay-wgrad-compute --overlap-moe-expert-parallel-comm", False, TE_LAYERS),
    *_adapt("--ep-overlap-early-attn-memory-release", False, TE_LAYERS),
    *_adapt("--overlap-dispatch-backward-with-experts-wgrad", False, TE_LAYERS),
    *_adapt("--moe-grouped-gemm", False, SINGLY, UNOWNED, field="draws_grouped"),
    *_adapt("--moe-grouped-gemm", False, OWN_GROUPS, OWNED, field="draws_grouped"),
    *_adapt("--use-grouped-gemm-for-dense-mlp --use-transformer-engine-op-fuser", False, TE_LAYERS),
    *_adapt("--fused-residual-rmsnorm", False, TE_LAYERS),
    *_adapt("--mla-down-proj-fusion", False, TE_LAYERS, field="draws_fused"),
    *_adapt("--use-te-activation-func", False, TORCH_GELU),
    *_adapt("--symmetric-ar-type", None, TE_LAYERS),
    *_adapt("--overlap-param-gather-with-optimizer-step", False, TWO_OPTIMIZERS),
    *_adapt("--optimizer-cuda-graph", False, NO_GRAPHS),
    *_adapt("--cuda-graph-impl", graphs.WHOLE, WHOLE_STEPS, GRAPHED_IN_PARTS),
    *_adapt("--enable-cuda-graph --external-cuda-graph", False, WHOLE_STEPS, WITH_GRAPH),
    *_adapt("--cuda-graph-scope", None, WHOLE_STEPS, WITH_GRAPH),
    *_adapt("--cuda-graph-modules", [], WHOLE_STEPS, WITH_GRAPH),
    *_adapt("--no-check-for-nan-in-loss-and-grad", False, LATE_CHECK, WITH_GRAPH),
    *_adapt("--cuda-graph-impl", "none", "switched off by --fp8-step-graph off", SWITCHED_OFF),
    *[
        row
        for flags, why in {"without a GPU": "nothing records one", **graphs.INSIDE}.items()
        for flag in ([flags] if flags == "without a GPU" else flags.split())
        for row in _adapt(
            "--cuda-graph-impl", "none", f"no CUDA graph {_with(flag)}: {why} (same result)", _hindered(flag)
        )
    ],
    *_adapt("--enable-cuda-graph --external-cuda-graph", False, UNGRAPHED_NOTE, UNGRAPHED),
    *_adapt("--cuda-graph-scope --inference-cuda-graph-scope", None, UNGRAPHED_NOTE, UNGRAPHED),
    *_adapt("--cuda-graph-modules", [], UNGRAPHED_NOTE, UNGRAPHED),
]

# Flags whose names look numeric but that do not concern a level, with the reason.
_FSDP = "read with --use-megatron-fsdp, refused"
_MAMBA = "of Mamba layers, refused"
IRRELEVANT = {
    "--fp4-recipe": "read with --fp4-format, refused",
    "--kitchen-attention-backend": "read with --use-kitchen-attention, refused",
    "--no-tp-comm-bulk-wgrad": "read with --tp-comm-overlap, switched off",
    "--megatron-fsdp-main-params-dtype": _FSDP,
    "--megatron-fsdp-main-grads-dtype": _FSDP,
    "--megatron-fsdp-grad-comm-dtype": _FSDP,
    "--mamba-training-ssm-states-dtype": _MAMBA,
    "--mamba-inference-conv-states-dtype": _MAMBA,
    "--mamba-inference-ssm-states-dtype": _MAMBA,
    "--inference-moe-disable-fused-quant-kernels": "inference only",
    "--moe-router-quantile-balancing-ema": "a quantile of router scores, not a precision",
    "--logits-save-dtype": "a file format for saved logits",
    "--no-stream-ckpt-dequant": "how Transformer Engine's FP8 parameters load; a level has none",
}
