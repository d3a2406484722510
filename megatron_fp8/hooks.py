"""Every hook into Megatron-LM and torch, as a table: docs/hooks.md is made from it.

    PROCESS     while the plugin is installed         RUN      while a run's flags ask for them
    UNTIL_READ  until a run's flags are read          BUILT    from the run's optimizer on
    LOADING     while a checkpoint's arguments are read, and in RUN
    TRAINER     beside RUN, after megatron_fp8.enable()
    on_objects  on single objects, for as long as they live; each row stands beside the code that puts it there

A row says what is hooked, what of ours stands there, how Megatron's own must begin, when, and why (rebind.py). Rows of
one name wrap each other: the last is the outermost. parsed_runs.py and run.py put them, and put them back. Without a
level, and at O0, only those of PROCESS are there, and what a flag or an environment variable asks for: the run is bit
for bit stock Megatron's.

A new hook is one row. It needs none if Megatron has an official way.
"""

import os
from collections.abc import Iterator

from . import cpu
from .flags import dpo, graphs, log
from .flags.level import LEVEL, is_stock
from .flags.rope import hands_over
from .flags.stock import installed
from .metrics import VARIABLE as METRICS
from .rebind import Hook, When

REPORT = "MEGATRON_FP8_REPORT"
APEX = "fused_weight_gradient_mlp_cuda"  # gemm/fused_wgrad.py has its stand-in
ARGUMENTS = "megatron.training.arguments"
CHECKPOINTING = "megatron.training.checkpointing"
CLIP = "megatron.core.optimizer.clip_grads"
DIST_CHECKPOINTING = "megatron.core.dist_checkpointing"
GPT_MODEL = "megatron.core.models.gpt.gpt_model.GPTModel"
LATENT_ROTATION = "megatron.core.fusions.fused_mla_yarn_rope_apply"
LANGUAGE_MODULE = "megatron.core.models.common.language_module.language_module"
PARALLEL_LAYERS = "megatron.core.tensor_parallel.layers"
RERUN = "megatron.core.rerun_state_machine.RerunStateMachine"
TRAINING = "megatron.training.training"

_EVALUATION = "prefix forward_step_func data_iterator model iteration"
_OF_LOG = "loss_dict total_loss_dict learning_rate iteration loss_scale report_memory_flag skipped_iter grad_norm"


def _checkpoints(run) -> bool:
    return bool(run.args.load or run.args.save or run.args.pretrained_checkpoint)


def _clips_with_copies(run) -> bool:
    from megatron.core.optimizer import clip_grads
    from megatron.core.utils import local_multi_tensor_scale

    return run.fp8 is not None and clip_grads.multi_tensor_scale_impl is local_multi_tensor_scale


ALWAYS = When("always")
LEVEL_UNREAD = When(
    f"until parse_args is called, with {LEVEL.name} on the command line, and not O0", lambda run: run.expects_level
)
A_LEVEL = When("with a level", lambda run: run.fp8 is not None)
A_LEVEL_ON_CUDA = When(
    "with a level, on CUDA, without apex's module",
    lambda run: run.fp8 is not None and not run.on_cpu and not is_stock(LEVEL.given(run.args)) and not installed(APEX),
)
LEVEL_WITHOUT_SCALE = When("with a level, without Transformer Engine and apex", _clips_with_copies)
LATENT_ON_CUDA = When(
    "with a level and --multi-latent-attention, on CUDA",
    lambda run: run.fp8 is not None and not run.on_cpu and run.args.multi_latent_attention,
)
LEVEL_OR_REPORT = When(f"with a level, or {REPORT}", lambda run: run.fp8 is not None or REPORT in os.environ)
CHECKPOINTS = When("with --load, --save or --pretrained-checkpoint", _checkpoints)
LEVEL_CHECKPOINTS = When(f"with a level, {CHECKPOINTS.text}", lambda run: run.fp8 is not None and _checkpoints(run))
LEVEL_UNSAVED = When("with a level, without --save", lambda run: run.fp8 is not None and not run.args.save)
STOCK_CHECKPOINTS = When(f"without a level, {CHECKPOINTS.text}", lambda run: run.fp8 is None and _checkpoints(run))
READS_CHECKPOINTS = When(f"{LEVEL_CHECKPOINTS.text}; or --use-checkpoint-args", LEVEL_CHECKPOINTS.test)
WATCHED_STEP = When(
    f"with --fp8-probe-step, {log.EXACT.name}, --fp8-log-update-norm, {log.ROUTING.name} or --fp8-sharpness-interval",
    lambda run: bool(run.around_step()),
)
COUNTED_ROUTING = When(f"with {log.ROUTING.name}", lambda run: bool(log.routing_interval(run.args)))
LEVEL_OR_SHARPNESS = When(
    "with a level, or --fp8-sharpness-eval",
    lambda run: run.fp8 is not None or (run.sharpness is not None and run.sharpness.file is not None),
)
ROPE_FACTOR = When(
    "with a level, --use-rope-scaling and another --rope-scaling-factor than 8",
    lambda run: run.fp8 is not None and hands_over(run.args),
)
TO_METRICS = When(f"with {METRICS}", lambda run: bool(os.environ.get(METRICS)))
LAYERS_DIFFER = When("with a level, once a script has made layers different", lambda run: run.layers_differ)
STEP_GRAPH = When(f"with a level and --cuda-graph-impl {graphs.WHOLE}", lambda run: run.step_graph is not None)
ENABLED = When("after megatron_fp8.enable()", lambda run: not run.parsed)

PROCESS = (
    Hook(
        *(ARGUMENTS, "parse_args", "run.parse_args", "extra_args_provider ignore_unknown_args", ALWAYS),
        "Adds our flags, replaces --args-file, does --use-checkpoint-args if there is a level, and changes stock flags "
        "before stock validates them, which `extra_args_provider` cannot.",
    ),
)
UNTIL_READ = (
    Hook(
        *(GPT_MODEL, "__init__", "parsed_runs.not_read", "self", LEVEL_UNREAD),
        "Ends a script that never calls parse_args, in one line: nothing of it would be in FP8.",
    ),
)
LOADING = (
    Hook(
        *(CHECKPOINTING, "read_metadata", "checkpoint.loads.name_finished", "tracker_filename", READS_CHECKPOINTS),
        "Finds a finished checkpoint even if the tracker names another, or none.",
    ),
    Hook(
        *(CHECKPOINTING, "_load_base_checkpoint", "run.loading", "load_dir args rank0", READS_CHECKPOINTS),
        "Loads a whole checkpoint, or refuses it in one line.",
    ),
    Hook(
        "torch.distributed.checkpoint.FileSystemReader",
        *("read_metadata", "checkpoint.pickles.data_only_metadata", "self args kwargs", READS_CHECKPOINTS),
        "Reads a checkpoint's description as data, and runs nothing that it holds.",
    ),
    Hook(
        "torch.distributed.checkpoint.DefaultLoadPlanner",
        *("load_bytes", "checkpoint.pickles.data_only_objects", "self read_item value", READS_CHECKPOINTS),
        "Reads a checkpoint's objects as data, and runs nothing that they hold.",
    ),
)
RUN = (
    # The weight gradients of stock's linears. These are put before stock's flags are adapted, which looks for apex.
    Hook(
        *("sys.modules", APEX, "gemm.fused_wgrad.stand_in", "None or holds nothing", A_LEVEL_ON_CUDA),
        "Stands in for apex's module, so that stock needs no --no-gradient-accumulation-fusion.",
    ),
    Hook(
        *(PARALLEL_LAYERS, APEX, "gemm.fused_wgrad.stand_in", "holds nothing", A_LEVEL_ON_CUDA),
        "Adds the LM head's weight gradient to main_grad in its GEMM; stock's import of apex has failed by now.",
    ),
    Hook(
        *(PARALLEL_LAYERS, "_grad_accum_fusion_available", "gemm.fused_wgrad.available", "holds bool", A_LEVEL_ON_CUDA),
        "Tells stock's linears that the module is there.",
    ),
    # The model.
    Hook(
        *(PARALLEL_LAYERS, "F", "layers.embedding.functional", "holds module", A_LEVEL),
        "Lets the token embedding add its gradient to main_grad, where the linears do.",
    ),
    Hook(
        *(GPT_MODEL, "__init__", "run.rope_scaled", "self config transformer_layer_spec", ROPE_FACTOR),
        "Hands --rope-scaling-factor to the model: stock parses it, fills GPTModelConfig without it, and builds 8.",
    ),
    Hook(
        *(GPT_MODEL, "__init__", "run.model_built", "self config transformer_layer_spec", A_LEVEL),
        "Exchanges the layer spec, and what no spec can say: GPTModelConfig.builder is official, but scripts with a "
        "model_provider never look at it.",
    ),
    Hook(
        *(LANGUAGE_MODULE, "fused_vocab_parallel_cross_entropy", "layers.cross_entropy.fused"),
        *("vocab_parallel_logits target tp_group", A_LEVEL),
        "Our loss keeps the logits in place of FP32 probabilities (--cross-entropy-loss-fusion).",
    ),
    Hook(
        *("megatron.core.tensor_parallel", "vocab_parallel_cross_entropy", "layers.cross_entropy.unfused"),
        *("vocab_parallel_logits target label_smoothing tp_group", A_LEVEL),
        "The same loss without that flag.",
    ),
    Hook(
        "megatron.core.tensor_parallel.random.CheckpointWithoutOutput",
        *("__init__", "layers.model.without_fp8", "self fp8", A_LEVEL),
        "Says that stock's FP8 is off: stock takes silence for FP8, and fails if Transformer Engine is missing "
        "(--recompute-modules layernorm).",
    ),
    *(
        Hook(
            *(LATENT_ROTATION, kernel, "layers.latent.of_one_size", "holds Autotuner", LATENT_ON_CUDA),
            "Rotates latent attention's q and k in tiles that divide the heads: others write past them. And a resumed "
            "run sums a key's gradient in the same order.",
        )
        for kernel in ("rotary_fwd_q_kernel", "rotary_bwd_q_kernel", "rotary_fwd_kv_kernel", "rotary_bwd_kv_kernel")
    ),
    # A step.
    Hook(
        *(RERUN, "validate_result", "run.checks.validate_result", "self result rejection_func message", A_LEVEL),
        "Looks at the losses of a step's micro-batches when all is launched, so that the host does not wait.",
    ),
    Hook(
        *(RERUN, "should_run_forward_backward", "run.checks.should_run_forward_backward", "self data_iterator"),
        A_LEVEL,
        "Makes the checks that wait, before stock decides whether to run the step again.",
    ),
    Hook(
        *(RERUN, "_reduce_any", "run.checks.reduce_any", "self value", A_LEVEL),
        "Spares a single rank the reduction on the GPU.",
    ),
    Hook(
        *(TRAINING, "get_megatron_optimizer", "run.optimizer_built", "config model_chunks config_overrides"),
        LEVEL_OR_REPORT,
        f"Appends our part to the optimizer chain, and sees the buffers for {REPORT}.",
    ),
    Hook(
        *(CLIP, "multi_tensor_scale_impl", "engine.clip.scaled_in_place"),
        *("chunk_size noop_flag tensor_lists scale", LEVEL_WITHOUT_SCALE),
        "Clips stock's gradients in place: stock makes a copy of each, as large as a table.",
    ),
    Hook(
        *(TRAINING, "logical_and_across_model_parallel_group", "run.same.logical_and", "input group", A_LEVEL),
        "Answers without the GPU whether the step was taken: all ranks know.",
    ),
    Hook(
        *(TRAINING, "reduce_max_stat_across_model_parallel_group", "run.same.largest", "stat group", A_LEVEL),
        "Answers without the GPU what the gradient norm is: all ranks know.",
    ),
    Hook(
        *(TRAINING, "calc_params_l2_norm", "engine.params_norm.readable", "model force_create_fp32_copy", A_LEVEL),
        "Reads E4M3 weights as numbers, and those that are still on their way from other ranks.",
    ),
    Hook(
        *(TRAINING, "disable_forward_pre_hook", "run.waits.disable", "model_chunks optimizer param_sync", A_LEVEL),
        "Leaves alone the hooks that no step has put there yet.",
    ),
    Hook(
        *(TRAINING, "enable_forward_pre_hook", "run.waits.enable", "model_chunks", A_LEVEL),
        "Puts back only the hooks that were taken off.",
    ),
    Hook(
        *(TRAINING, "train_step", "run.step", "forward_step_func data_iterator model optimizer", WATCHED_STEP),
        "Begins and ends what is measured of a step, with the model chunks at hand.",
    ),
    Hook(
        *("megatron.core.transformer.moe.router.TopKRouter", "routing", "run.routing.counted"),
        *("self logits", COUNTED_ROUTING),
        "Counts the tokens of each expert, and how sure the router is, which its logits alone tell.",
    ),
    Hook(
        *(TRAINING, "evaluate_and_print_results", "run.evaluation", _EVALUATION, LEVEL_OR_SHARPNESS),
        "With --skip-train no optimizer is built: checks and counts what it would have; measures sharpness.",
    ),
    # Numbers for programs, at every level: they see what the others have made.
    Hook(
        *(TRAINING, "training_log", "run.logged.training_log", f"{_OF_LOG} params_norm num_zeros_in_grad", TO_METRICS),
        f"Writes what Megatron logs of an iteration to {METRICS}.",
    ),
    Hook(
        *(TRAINING, "evaluate", "run.logged.evaluate", "forward_step_func data_iterator model", TO_METRICS),
        f"Sees the losses of an evaluation for {METRICS}.",
    ),
    Hook(
        *(TRAINING, "evaluate_and_print_results", "run.logged.evaluate_and_print_results", _EVALUATION, TO_METRICS),
        f"Writes the losses of an evaluation to {METRICS}.",
    ),
    # Checkpoints.
    Hook(
        *(CHECKPOINTING, "check_checkpoint_args", "checkpoint.loads.compare_what_is_there"),
        *("checkpoint_args skip_args", CHECKPOINTS),
        "Compares the arguments that the checkpoint has: a converted one comes from no run.",
    ),
    Hook(
        *(DIST_CHECKPOINTING, "save", "checkpoint.saves.unseal_saves", "sharded_state_dict checkpoint_dir"),
        STOCK_CHECKPOINTS,
        "Takes the seal away from a level's checkpoint that is saved over.",
    ),
    Hook(
        *(CHECKPOINTING, "_load_base_checkpoint", "checkpoint.loads.refuse_levels", "load_dir args rank0"),
        STOCK_CHECKPOINTS,
        "Refuses a level's optimizer state in one line.",
    ),
    Hook(
        *("multiprocessing.process.BaseProcess", "start", "processes.end_children_with_parent", "self"),
        LEVEL_CHECKPOINTS,
        "Ends a rank's children when it is killed: the manager of Megatron's save results, and writers.",
    ),
    Hook(
        *(CHECKPOINTING, "_build_sharded_state_dict_metadata", "run.contents", "args", LEVEL_CHECKPOINTS),
        "Says in each checkpoint what of ours it holds.",
    ),
    Hook(
        *(DIST_CHECKPOINTING, "save", "checkpoint.saves.seal_saves", "sharded_state_dict checkpoint_dir"),
        LEVEL_CHECKPOINTS,
        "Seals checkpoints with the hash of every file.",
    ),
    Hook(
        *(TRAINING, "save_checkpoint", "run.saving", "iteration model optimizer", LEVEL_CHECKPOINTS),
        "Saves no weight that is not finite.",
    ),
    Hook(
        *(TRAINING, "save_checkpoint", "checkpoint.saves.lose_nothing", "iteration model optimizer"),
        LEVEL_CHECKPOINTS,
        "Keeps the older checkpoint if a save fails, and says why in one line.",
    ),
    Hook(
        *(TRAINING, "save_checkpoint", "checkpoint.saves.saves_nowhere", "iteration model optimizer", LEVEL_UNSAVED),
        "Says in one line that Megatron wants to save a step that it rejects.",
    ),
    Hook(
        *(TRAINING, "maybe_finalize_async_save", "checkpoint.saves.lose_nothing", "blocking terminate"),
        LEVEL_CHECKPOINTS,
        "The same of asynchronous saves.",
    ),
    Hook(
        *(CHECKPOINTING, "checkpoint_exists", "checkpoint.loads.find_without_tracker", "checkpoints_path"),
        LEVEL_CHECKPOINTS,
        "Finds a checkpoint without the tracker, or --pretrained-checkpoint would begin anew.",
    ),
    Hook(
        *(CHECKPOINTING, "cleanup_old_non_persistent_checkpoint", "checkpoint.saves.keep_newest_whole"),
        *("save_dir leave_ckpt_num do_async", LEVEL_CHECKPOINTS),
        "Keeps the newest non-persistent checkpoint that is whole.",
    ),
    Hook(
        *(DIST_CHECKPOINTING, "load", "checkpoint.loads.by_either_name", "sharded_state_dict checkpoint_dir"),
        LEVEL_CHECKPOINTS,
        "Loads the norm before experts by either of stock's two names, and says what is left out.",
    ),
    Hook(
        *(TRAINING, "load_checkpoint", "checkpoint.loads.load_in_one_line", "ddp_model optimizer opt_param_scheduler"),
        LEVEL_CHECKPOINTS,
        "Makes one line of what says that the checkpoint does not fit.",
    ),
    *LOADING,
)
BUILT = (
    Hook(
        *(CHECKPOINTING, "_build_sharded_state_dict_metadata", "checkpoint.state.says_layers_differ", "args"),
        LAYERS_DIFFER,
        "Has each layer saved under its own number.",
    ),
    Hook(
        *(TRAINING, "save_grads", "run.dumping", "save_dir state_dict iteration grad_label", A_LEVEL),
        "Writes E4M3 weights as BF16 (--save-params-interval).",
    ),
    *(
        Hook(
            *(f"megatron.training.{logger}", "LINEAR_TYPES", "checkpoint.weight_dumps.only_types", "holds tuple"),
            A_LEVEL,
            "Leaves the mock objects out that stand for missing types: stock's isinstance fails on them.",
        )
        for logger in ("activation_logging", "dgrad_logging")
    ),
    Hook(
        "megatron.core.full_cuda_graph.FullCudaGraphWrapper",
        *("__call__", "run.step_graph.around", "self args kwargs", STEP_GRAPH),
        "Records and replays a level's step.",
    ),
)

TRAINER = (
    Hook(
        *("megatron.core.optimizer", "get_megatron_optimizer", "run.optimizer_built"),
        *("config model_chunks config_overrides", ENABLED),
        "Appends our part to the optimizer chain of a trainer, which may have imported the function already.",
        everywhere=True,
    ),
    Hook(
        *("megatron.core.distributed", "finalize_model_grads", "run.gradients_finished", "model num_tokens", ENABLED),
        "A trainer may call it itself; our gradients are summed then, too.",
        everywhere=True,
    ),
)
# Those that a script of ours puts by itself (plugin.put): its object is the "run" of the maker.
SCORING = Hook(
    *(TRAINING, "train", "run.in_place_of", "forward_step_func model"),
    When(f"in {dpo.SCRIPT} with {dpo.SCORE}"),
    "Scores the data in place of training.",
)
REFERENCE = Hook(
    *(TRAINING, "get_forward_backward_func", "run.schedules", "pp_size vp_size schedule_pg_collection"),
    When(f"in {dpo.SCRIPT}"),
    "The reference runs over the micro-batches of a step before the policy does.",
)


def on_objects() -> tuple[Hook, ...]:
    """The rows on single objects, each of which stands beside the code that puts it there; imports that code."""
    from .engine import build, chain, reducer
    from .layers import embedding, emulated_head, fp8_head, residual
    from .monitor import sharpness_probe

    modules = build, reducer, chain, embedding, fp8_head, emulated_head, residual, sharpness_probe
    return tuple(hook for module in modules for hook in module.HOOKS)


def of_modules() -> Iterator[Hook]:
    """The rows on modules and classes, each once."""
    yield from (*PROCESS, cpu.COMPILE_HELPERS, *cpu.HOOKS, *UNTIL_READ, *RUN, *BUILT, *TRAINER, SCORING, REFERENCE)
