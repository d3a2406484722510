"""Every hook into Megatron-LM, in one file.

    install()      once a process, before the script runs; idempotent; nothing is patched by an import
    uninstall()    puts every original back

What is hooked, and why not something more official:

    megatron.training.arguments.parse_args      our flags and, before stock validates them, the stock flags that a
                                                level changes.  `extra_args_provider` cannot do the second.  Before
                                                that, --args-file is replaced in sys.argv by what the files say.  With
                                                a level, --use-checkpoint-args is done here: what it sets is read too.
    GPTModel.__init__, until parse_args is called
                                                ends a script that does not call it, in one line: nothing would be FP8.
    GPTModel.__init__                           exchanges the layer spec, and what stands for the norms in the layers
                                                that come out (layers/model.py).  GPTModelConfig.builder is official,
                                                but scripts with a model_provider never look at it; both end here.
    language_module.fused_vocab_parallel_cross_entropy and tensor_parallel.vocab_parallel_cross_entropy
                                                are ours (layers/cross_entropy.py): with --cross-entropy-loss-fusion
                                                and without, the same loss.  Transformer Engine's stays its own.
    RerunStateMachine.validate_result, should_run_forward_backward and _reduce_any
                                                look at the losses of a step's micro-batches when all is launched
                                                (monitor/loss_checks.py).
    training.training.logical_and_across_model_parallel_group and reduce_max_stat_across_model_parallel_group
                                                answer without the GPU what all ranks know (engine/step_end.py).
    training.training.calc_params_l2_norm       reads E4M3 weights, and has those that are on their way
                                                (engine/params_norm.py).
    training.training.disable_forward_pre_hook  leave hooks alone that no step has put there yet (engine/chain.py).
    and enable_forward_pre_hook
    CheckpointWithoutOutput.__init__            says that stock's FP8 is off: it takes silence for FP8, and fails where
                                                Transformer Engine is missing (--recompute-modules layernorm).
    training.training.get_megatron_optimizer    appends our part to the optimizer chain (and sees the buffers for
                                                MEGATRON_FP8_REPORT, at every level).
    FullCudaGraphWrapper.__call__               records and replays a level's step (engine/step_graph.py).
    training.training.train_step and            the beginning and end of what --fp8-sharpness-interval and
    evaluate_and_print_results                  --fp8-sharpness-eval measure, with the model chunks at hand; likewise
                                                --fp8-probe-step, --fp8-log-exact and --fp8-log-update-norm.  With
                                                --skip-train, where no optimizer is built, what it would have checked
                                                and counted.
    training.training.training_log, evaluate and evaluate_and_print_results
                                                what they are given and return goes to MEGATRON_FP8_METRICS, at every
                                                level (monitor/training_log.py).
    training.training.save_grads,               --save-params-interval: E4M3 as BF16 (checkpoint/weight_dumps.py).
    activation_logging.LINEAR_TYPES,            of what is written beside checkpoints: without Transformer Engine some
    dgrad_logging.LINEAR_TYPES                  types are mock objects, on which stock's isinstance fails.
    config.finalize_model_grads_func            (official) reduces our gradients; set in engine/build.py, which also
                                                turns off ddp_config.check_for_nan_in_grad (a bad step is skipped).
    DistributedDataParallel.start_grad_sync     of each model chunk: our buckets go out when a pipeline schedule calls
                                                for it; set in engine/reducer.py, which also reads the bucket
                                                groups' is_last_microbatch.  Neither has an official way.
    training.checkpointing._build_sharded_state_dict_metadata
                                                says in each checkpoint what of ours it holds, and that its layers
                                                differ where a script has frozen some (checkpoint/state.py).
    dist_checkpointing.save; training.training.save_checkpoint and maybe_finalize_async_save
                                                seal checkpoints (checkpoint/seal.py), and lose none (saves.py); and
                                                save no weight that is not finite (engine/chain.py).
    training.checkpointing._load_base_checkpoint, read_metadata (which reads the tracker), checkpoint_exists and
    cleanup_old_non_persistent_checkpoint; training.training.load_checkpoint; dist_checkpointing.load
                                                find a whole checkpoint, or refuse in one line (checkpoint/loads.py).
    training.checkpointing.check_checkpoint_args
                                                compares what the checkpoint has: a converted one is of no run
                                                (checkpoint/loads.py).  Without a level too.
    FileSystemReader.read_metadata and DefaultLoadPlanner.load_bytes, both torch's
                                                read data, and nothing that runs (checkpoint/pickles.py).
    tensor_parallel.layers.fused_weight_gradient_mlp_cuda and _grad_accum_fusion_available, and the module itself
                                                where apex's is not installed, on CUDA: the LM head's weight gradient is
                                                added to main_grad in its GEMM (gemm/fused_wgrad.py).
    tensor_parallel.layers.F                    torch.nn.functional, whose embedding adds its gradient to main_grad
                                                where the linears do (layers/embedding.py).
    on single objects, where they are built     DistributedOptimizer._set_main_param_and_optimizer_states, to load what
                                                torch's Adam cannot (engine/chain.py), the LM head's forward with
                                                --fp8-emulate-lm-head (layers/emulated_head.py) or its product, with
                                                --fp8-lm-head (layers/fp8_head.py) and where it adds to main_grad
                                                (layers/embedding.py), and a model's
                                                compute_language_model_loss on the steps whose sharpness is measured
                                                (monitor/sharpness_probe.py); with --fp8-log-update-norm, officially,
                                                step hooks on the optimizers of stock's parts (monitor/update_norm.py).
    datasets.utils.compile_helpers, cpu.py      lets the PyPI wheel, and a machine without a GPU, train at all.
    multiprocessing.process.BaseProcess.start   a rank's children end when it is killed: the manager of Megatron's save
                                                results, and writers (processes.py).
    filesystem_async.get_write_results_queue    in tests and rehearsals only: see tools/rehearsal/ranks.py.

All but the first and the last two are installed only when a run asks for a level, or for what they give: without one,
and at O0, a run is bit for bit stock Megatron's.  (If it saves over a level's checkpoint it takes the seal away, and if
it would load a level's optimizer state it is told that it cannot.)
"""

import functools
import multiprocessing.process
import os
import sys
from collections.abc import Callable

import torch

from . import cpu
from .engine.gemm_choice import RunGemms
from .engine.step_end import SameEverywhere
from .errors import UserError
from .flags import args_file, graphs, log
from .flags.checks import (
    check_data_files,
    check_device,
    check_megatron_version,
    check_model,
    check_script,
    check_stage,
    set_max_connections,
)
from .flags.config import Fp8Config, adapt_stock_args, add_fp8_arguments, asks_for_level, check_yaml, config_from_args
from .flags.level import LEVEL, is_stock
from .flags.optional import check_packages
from .flags.probe import ProbePlan, probe_from_args
from .flags.sharpness import SharpnessPlan, sharpness_from_args
from .flags.stock import installed
from .flags.stock_faults import check_faults
from .flags.usage import escape_bad_help, one_line_usage_errors
from .metrics import begin
from .processes import end_children_with_parent
from .rebind import Rebound

_of_process = Rebound()  # by install(): what reads the flags of every run
_TO_LOAD = "load_dir args rank0"  # parameters of _load_base_checkpoint
_until_read = Rebound()  # until the arguments, which ask for a level, are read
_of_run = Rebound()  # for what the flags of one run ask for; put back when the next run's are read


def install(begins: bool = True) -> None:
    """Add `--fp8-level` to whatever Megatron script this process is about to run.

    begins: a run begins with its flags; else they are read and checked, and left as they are asked for.

    Raises UserError outside the supported range of megatron-core versions, RuntimeError when a function we
    rebind does not have the signature we know.
    """
    if _of_process:
        assert begins, "flags are to be read without a run in the process of one"
        return
    if cpu.needed():
        cpu.install()
    import megatron.core.package_info
    import megatron.training.arguments as arguments

    check_megatron_version(megatron.core.package_info.__version__)
    cpu.skip_dataset_compile()
    make = functools.partial(_parse_args, begins=begins)
    _of_process.rebind(arguments, "parse_args", make, "extra_args_provider ignore_unknown_args")
    if begins and any(word.partition("=")[0] == LEVEL.name for word in sys.argv):
        from megatron.core.models.gpt.gpt_model import GPTModel

        _until_read.rebind(GPTModel, "__init__", _not_read, "self")


def uninstall() -> None:
    """Undo install(), in reverse order.  Models already built keep what they have."""
    _of_run.put_back()
    _until_read.put_back()
    _of_process.put_back()
    cpu.uninstall()


def _log(lines: list[str]) -> None:
    """Print each line once, on rank 0 (Megatron parses its arguments more than once)."""
    if os.environ.get("RANK", "0") == "0":
        for line in lines:
            _print_once(f"[fp8] {line}")


@functools.cache
def _print_once(line: str) -> None:
    print(line, flush=True)


def _not_read(stock: Callable):
    def init(self, *args, **kwargs):
        raise UserError(
            f"{LEVEL.name}: the script builds a GPTModel and has not called megatron.training.arguments.parse_args, as "
            "Megatron Bridge does: nothing would be in FP8; use a script that calls it, or remove "
            f"{LEVEL.name}"
        )

    return functools.wraps(stock)(init)


def _parse_args(stock: Callable, begins: bool) -> Callable:
    def parse_args(extra_args_provider=None, ignore_unknown_args=False):
        def provider(parser):
            if extra_args_provider is not None:
                parser = extra_args_provider(parser)
            parser = add_fp8_arguments(parser)
            escape_bad_help(parser)
            one_line_usage_errors(parser)
            args_file.check(parser, ignore_unknown_args)
            return parser

        args_file.apply()  # where the script was not started by us
        check_yaml(sys.argv[1:])
        args = stock(provider, ignore_unknown_args)
        _log(args_file.lines())
        _until_read.put_back()
        _of_run.put_back()  # of an earlier run in this process
        if begins and asks_for_level(args):
            _read_checkpoint_args(args)
        config = config_from_args(args)
        if begins:
            check_packages(args)
            check_data_files(args)
        _log(cpu.adapt_args(args))
        if config is not None:
            check_script(config.level)
            check_faults(args)
        probe = probe_from_args(args, config is not None and (config.gemm == "fp8" or config.emulate is not None))
        sharpness = sharpness_from_args(args)
        if begins:
            _start(args, config, probe, sharpness)
        return args

    return parse_args


def _read_checkpoint_args(args) -> None:
    """--use-checkpoint-args, before we read the flags: Megatron sets some by a checkpoint when its parser is done.

    Then it is not asked for any more, since Megatron would undo what a level adapts.  Where it cannot be, Megatron says
    so itself.
    """
    if not args.use_checkpoint_args or not (args.load or args.pretrained_checkpoint):
        return
    if args.non_persistent_ckpt_type == "local":
        return
    import megatron.training.checkpointing as checkpointing

    _claim_folders(args)  # a checkpoint may have to be put back before it can be read
    reading = Rebound()
    _hook_loading(reading, None)
    try:
        for folder in "pretrained_checkpoint", "load":
            checkpointing.load_args_from_checkpoint(args, load_arg=folder)
    finally:
        reading.put_back()
    args.use_checkpoint_args = False


def _claim_folders(args) -> None:
    if args.save and not args.skip_train:
        from .checkpoint import saves

        for flag, folder in saves.folders_of(args).items():
            saves.claim(folder, flag)


def _start(args, config: Fp8Config | None, probe: ProbePlan | None, sharpness: SharpnessPlan | None) -> None:
    """Adapt stock's flags to a run's, and hook into Megatron what they ask for."""
    gemms = checks = None
    if config is not None:
        from .monitor.loss_checks import LateChecks

        checks = LateChecks(args.check_for_nan_in_loss_and_grad)
        if not cpu.needed() and not is_stock(LEVEL.given(args)):
            _hook_weight_gradients()  # first: it is what adapt_stock_args looks for
        _log(adapt_stock_args(args, config))
        _log(set_max_connections(args))
        if not cpu.needed():
            check_device(torch.cuda.get_device_capability(int(os.environ.get("LOCAL_RANK", 0))))
        gemms = RunGemms(config, "cpu" if cpu.needed() else "cuda", _log, _of_run)
        _hook_model(config, gemms, checks)
        gemms.choose()
    if config is not None or "MEGATRON_FP8_REPORT" in os.environ:
        _hook_optimizer(config, gemms, checks)
    if args.load or args.save or args.pretrained_checkpoint:
        _hook_checkpoints(config)
        if config is not None:
            _claim_folders(args)
    _hook_probe(probe, bool(log.EXACT.given(args)), log.logs_update_norm(args))
    if sharpness is not None:
        _hook_sharpness(sharpness)
    if begin():
        _hook_metrics()


def _hook_model(fp8: Fp8Config, gemms: RunGemms, checks) -> None:
    """checks: the run's LateChecks."""
    import megatron.core.models.common.language_module.language_module as language_module
    import megatron.core.tensor_parallel as tensor_parallel
    import megatron.core.tensor_parallel.layers as tensor_parallel_layers
    import megatron.training.training as training
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.rerun_state_machine import RerunStateMachine
    from megatron.core.tensor_parallel.random import CheckpointWithoutOutput

    from .layers import cross_entropy
    from .layers.embedding import Functional
    from .layers.model import built_with

    _of_run.replace(tensor_parallel_layers, "F", Functional())
    _of_run.rebind(GPTModel, "__init__", built_with(fp8), "self config transformer_layer_spec")
    parameters = "vocab_parallel_logits target tp_group"
    _of_run.rebind(language_module, "fused_vocab_parallel_cross_entropy", cross_entropy.fused, parameters)
    parameters = "vocab_parallel_logits target label_smoothing tp_group"
    _of_run.rebind(tensor_parallel, "vocab_parallel_cross_entropy", cross_entropy.unfused, parameters)
    _of_run.rebind(CheckpointWithoutOutput, "__init__", _without_fp8, "self fp8")
    _of_run.rebind(RerunStateMachine, "validate_result", checks.validate_result, "self result rejection_func message")
    loop = "should_run_forward_backward"
    _of_run.rebind(RerunStateMachine, loop, checks.should_run_forward_backward, "self data_iterator")
    _of_run.rebind(RerunStateMachine, "_reduce_any", checks.reduce_any, "self value")
    parameters = "prefix forward_step_func data_iterator model iteration"
    _of_run.rebind(training, "evaluate_and_print_results", _evaluate_without_optimizer(fp8, gemms), parameters)


def _without_fp8(stock: Callable):
    """Of CheckpointWithoutOutput.__init__: one without Transformer Engine's contexts, which config.fp8 asks for."""
    return lambda self, fp8=None: stock(self, None)


def _hook_weight_gradients() -> None:
    import megatron.core.tensor_parallel.layers as layers

    from .gemm import fused_wgrad

    if installed(fused_wgrad.NAME):
        return
    sys.modules[fused_wgrad.NAME] = fused_wgrad.MODULE
    _of_run.append(functools.partial(sys.modules.pop, fused_wgrad.NAME, None))
    setattr(layers, fused_wgrad.NAME, fused_wgrad.MODULE)  # the import that failed left no name
    _of_run.append(functools.partial(delattr, layers, fused_wgrad.NAME))
    _of_run.replace(layers, "_grad_accum_fusion_available", True)


def _hook_optimizer(fp8: Fp8Config | None, gemms: RunGemms | None, checks) -> None:
    import megatron.training.training as training

    from .engine import params_norm
    from .engine.chain import WaitsForWeights

    parameters, same = "config model_chunks config_overrides", SameEverywhere()
    _of_run.rebind(training, "get_megatron_optimizer", _get_megatron_optimizer(fp8, same, gemms, checks), parameters)
    if fp8 is not None:
        _of_run.rebind(training, "logical_and_across_model_parallel_group", same.logical_and, "input group")
        _of_run.rebind(training, "reduce_max_stat_across_model_parallel_group", same.largest, "stat group")
        _of_run.rebind(training, "calc_params_l2_norm", params_norm.readable, "model force_create_fp32_copy")
        waits = WaitsForWeights()
        _of_run.rebind(training, "disable_forward_pre_hook", waits.disable, "model_chunks optimizer param_sync")
        _of_run.rebind(training, "enable_forward_pre_hook", waits.enable, "model_chunks")


def _hook_train_step(around: Callable) -> None:
    """around(model, optimizer, step) runs step(), stock's whole training step, and returns its result."""
    import megatron.training.training as training

    def make(stock):
        @functools.wraps(stock)
        def train_step(forward_step_func, data_iterator, model, optimizer, *args, **kwargs):
            step = functools.partial(stock, forward_step_func, data_iterator, model, optimizer, *args, **kwargs)
            return around(model, optimizer, step)

        return train_step

    _of_run.rebind(training, "train_step", make, "forward_step_func data_iterator model optimizer")


def _hook_probe(plan: ProbePlan | None, exact: bool, update_norm: bool) -> None:
    if plan is not None:
        from .monitor.probe import make, probe_step

        make(plan.folder)
        _hook_train_step(lambda model, optimizer, step: probe_step(plan, optimizer.engine, step))
    if exact:
        from .monitor.exact_log import log_exact

        _hook_train_step(lambda model, optimizer, step: log_exact(step()))
    if update_norm:
        from .monitor.update_norm import UpdateNorm

        _hook_train_step(UpdateNorm().around)


def _hook_sharpness(plan: SharpnessPlan) -> None:
    import megatron.training.training as training

    if plan.interval:
        from .monitor.sharpness import watch_step

        def around(model, optimizer, step):
            watch = getattr(getattr(optimizer, "engine", None), "watch", None)  # stock's has no engine
            return watch_step(plan, model, watch, step)

        _hook_train_step(around)
    if plan.file is not None:
        parameters = "prefix forward_step_func data_iterator model"
        _of_run.rebind(training, "evaluate_and_print_results", _evaluate(plan), parameters)


def _hook_metrics() -> None:
    import megatron.training.training as training

    from .monitor.training_log import Logged

    logged = Logged()
    parameters = "loss_dict total_loss_dict learning_rate iteration loss_scale report_memory_flag skipped_iter "
    parameters += "grad_norm params_norm num_zeros_in_grad"
    _of_run.rebind(training, "training_log", logged.training_log, parameters)
    _of_run.rebind(training, "evaluate", logged.evaluate, "forward_step_func data_iterator model")
    parameters = "prefix forward_step_func data_iterator model iteration"
    _of_run.rebind(training, "evaluate_and_print_results", logged.evaluate_and_print_results, parameters)


def _hook_dumps(model_chunks) -> None:
    import megatron.training.activation_logging as activation_logging
    import megatron.training.dgrad_logging as dgrad_logging
    import megatron.training.training as training

    from .checkpoint.weight_dumps import readable_of

    _of_run.rebind(training, "save_grads", readable_of(model_chunks), "save_dir state_dict iteration grad_label")
    for logger in activation_logging, dgrad_logging:
        _of_run.replace(logger, "LINEAR_TYPES", tuple(kind for kind in logger.LINEAR_TYPES if isinstance(kind, type)))


def _hook_layers() -> None:
    """Of a model whose layers a script has made different."""
    import megatron.training.checkpointing as checkpointing

    from .checkpoint.state import says_layers_differ

    _of_run.rebind(checkpointing, "_build_sharded_state_dict_metadata", says_layers_differ, "args")


def _hook_graph(args, engine, checks) -> None:
    from .monitor.host_wait import HostWait

    asked = graphs.STEP_GRAPH.given(args)
    if args.cuda_graph_impl != graphs.WHOLE:
        if asked is None and graphs.can_record() and not graphs.inside(args):
            HostWait(engine.events, lambda share: _log(graphs.advice(share, args)))
        return
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper

    from .engine.step_graph import StepGraph

    args.check_for_nan_in_loss_and_grad = checks.asked  # validated: a level checks losses beside a graph
    wanted = (lambda: True) if asked != "auto" else HostWait(engine.events, lambda share: None).wanted
    step_graph = StepGraph(engine, checks, graphs.reads_ahead(args), _log, wanted)
    _of_run.rebind(FullCudaGraphWrapper, "__call__", step_graph.around, "self args kwargs")
    _of_run.append(step_graph.forget)


def _hook_checkpoints(fp8: Fp8Config | None) -> None:
    import megatron.core.dist_checkpointing as dist_checkpointing
    import megatron.training.checkpointing as checkpointing
    import megatron.training.training as training

    from .checkpoint import loads, saves, state

    sharded, compared = "sharded_state_dict checkpoint_dir", "checkpoint_args skip_args"
    _of_run.rebind(checkpointing, "check_checkpoint_args", loads.compare_what_is_there, compared)
    if fp8 is None:
        _of_run.rebind(dist_checkpointing, "save", saves.unseal_saves, sharded)
        _of_run.rebind(checkpointing, "_load_base_checkpoint", loads.refuse_levels, _TO_LOAD)
        return
    _of_run.rebind(multiprocessing.process.BaseProcess, "start", end_children_with_parent, "self")
    _of_run.rebind(checkpointing, "_build_sharded_state_dict_metadata", state.says_contents(fp8), "args")
    _of_run.rebind(dist_checkpointing, "save", saves.seal_saves, sharded)
    _of_run.rebind(training, "save_checkpoint", _refuse_damage, "iteration model optimizer")
    _of_run.rebind(training, "save_checkpoint", saves.lose_nothing, "iteration model optimizer")
    _of_run.rebind(training, "maybe_finalize_async_save", saves.lose_nothing, "blocking terminate")
    _of_run.rebind(checkpointing, "checkpoint_exists", loads.find_without_tracker, "checkpoints_path")
    cleanup = "cleanup_old_non_persistent_checkpoint"
    _of_run.rebind(checkpointing, cleanup, saves.keep_newest_whole, "save_dir leave_ckpt_num do_async")
    _of_run.rebind(dist_checkpointing, "load", loads.by_either_name, sharded)
    _of_run.rebind(training, "load_checkpoint", loads.load_in_one_line, "ddp_model optimizer opt_param_scheduler")
    _hook_loading(_of_run, fp8)


def _refuse_damage(stock: Callable):
    from .engine.chain import Fp8ChainedOptimizer

    @functools.wraps(stock)
    def save_checkpoint(iteration, model, optimizer, *args, **kwargs):
        if isinstance(optimizer, Fp8ChainedOptimizer):  # None, or a framework's, where nothing is trained in FP8
            optimizer.refuse_damage()
        return stock(iteration, model, optimizer, *args, **kwargs)

    return save_checkpoint


def _hook_loading(hooked: Rebound, fp8: Fp8Config | None) -> None:
    """fp8: None where the arguments alone are read, before the run's are known."""
    import megatron.training.checkpointing as checkpointing
    from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader

    from .checkpoint import loads, pickles

    hooked.rebind(checkpointing, "read_metadata", loads.name_finished, "tracker_filename")
    hooked.rebind(checkpointing, "_load_base_checkpoint", loads.load_whole(fp8), _TO_LOAD)
    hooked.rebind(FileSystemReader, "read_metadata", pickles.data_only_metadata, "self args kwargs")
    hooked.rebind(DefaultLoadPlanner, "load_bytes", pickles.data_only_objects, "self read_item value")


def _get_megatron_optimizer(fp8: Fp8Config | None, same: SameEverywhere, gemms: RunGemms | None, checks):
    from megatron.training.global_vars import get_args

    from .checkpoint.archive import Archive
    from .checkpoint.saves import check_saving
    from .engine.as_found import check_linears, layers_differ
    from .engine.build import build_optimizer
    from .engine.gain_lines import memory, speed
    from .engine.level_line import level_line
    from .engine.names import ranges
    from .engine.owned_weight import owned_weights
    from .engine.report import measure, summary, write_at_exit
    from .layers.emulated_head import count_updates
    from .layers.layer_choice import check_chosen
    from .monitor.collect import attach
    from .monitor.watch import watch_spikes

    def make(stock):
        def get_megatron_optimizer(config, model_chunks, config_overrides=None, *args, **kwargs):
            if fp8 is not None:
                check_model(fp8.level, model_chunks)
                if frozen := check_linears(fp8, model_chunks):
                    _log([f"frozen by the script, without gradients and states: {ranges(frozen)}"])
                if layers_differ(model_chunks):
                    _hook_layers()
            chain = stock(config, model_chunks, config_overrides, *args, **kwargs)
            if fp8 is not None:
                assert gemms is not None  # a run with a level has both
                check_stage(get_args().save, model_chunks)
                searches = gemms.settle()
                _log(speed(get_args(), owned_weights(model_chunks)))
                archive, bucket_size = Archive(fp8.grad_format), get_args().ddp_bucket_size
                chain = build_optimizer(fp8, chain, config, model_chunks, config_overrides, archive, bucket_size)
                engine, same.here = chain.engine, True
                count_updates(model_chunks, lambda: engine.update)
                _log(check_chosen(fp8, model_chunks))
                _log(memory(get_args(), engine.sets))
                chain.max_skipped = fp8.max_skipped
                chain.before_first_line = functools.partial(_log, [level_line(fp8, model_chunks, gemms.name())])
                chain.after_first_step = lambda: _log([*summary(measure(model_chunks, chain)), *searches()])
                watch_spikes(fp8, engine, attach(fp8, engine))
                check_saving()
                _hook_dumps(model_chunks)
                _hook_graph(get_args(), engine, checks)
            write_at_exit(model_chunks, chain)
            return chain

        return get_megatron_optimizer

    return make


def _evaluate(plan: SharpnessPlan):
    from .monitor.sharpness import watch_evaluation

    def make(stock):
        @functools.wraps(stock)
        def evaluate(prefix, forward_step_func, data_iterator, model, *args, **kwargs):
            run = functools.partial(stock, prefix, forward_step_func, data_iterator, model, *args, **kwargs)
            return watch_evaluation(plan, prefix, model, run)

        return evaluate

    return make


def _evaluate_without_optimizer(fp8: Fp8Config, gemms: RunGemms):
    """With --skip-train no optimizer is built, which would check the patterns and count the steps."""
    from megatron.training.global_vars import get_args

    from .engine.owned_weight import owned_weights
    from .layers.emulated_head import count_updates
    from .layers.layer_choice import check_chosen

    def make(stock):
        @functools.wraps(stock)
        def evaluate(prefix, forward_step_func, data_iterator, model, iteration, *args, **kwargs):
            if get_args().skip_train:  # on all ranks alike, also where one has no FP8 linear
                _log(check_chosen(fp8, model))
                gemms.settle()
                for weight in owned_weights(model):
                    weight.evaluate_at(max(1, iteration))
                count_updates(model, lambda: max(1, iteration))
            return stock(prefix, forward_step_func, data_iterator, model, iteration, *args, **kwargs)

        return evaluate

    return make
