"""A run, from its flags to its end: the only place that composes it, in the order in which Megatron comes to each step.

    flags_read        stock's flags are adapted, GEMM backends chosen, the rows of hooks.RUN put
    model_built       GPTModel.__init__ makes a level's layers
    optimizer_built   get_megatron_optimizer: checks, the engine, who observes it, the rows of hooks.BUILT
    step              train_step, with what is measured around it
    evaluation        evaluate_and_print_results, likewise
    saving, contents, dumping, loading      checkpoints
    end               all is put back, and what modules keep of the run is forgotten

A Run asks for two things: Megatron's arguments and an Fp8Config, None of a run without a level. It does not parse:
parsed_runs.py does, and trainer.py for those that have no command line.
"""

import dataclasses
import functools
import os
import weakref
from argparse import Namespace
from collections.abc import Callable, Iterable
from typing import Any

import torch

from . import cpu, hooks
from .engine.gemm_choice import RunGemms
from .engine.step_end import SameEverywhere
from .flags import graphs, log
from .flags.checks import (
    check_device,
    check_model,
    check_own_config,
    check_stage,
    set_graph_register,
    set_max_connections,
)
from .flags.config import Fp8Config, adapt_stock_args
from .flags.probe import ProbePlan
from .flags.sharpness import SharpnessPlan
from .metrics import begin
from .rebind import Hook, Rebound

type AroundStep = Callable[[Any, Any, Callable[[], Any]], Any]  # (model, optimizer, step) -> step's result


class Run:
    """One run of a process.

    Args:
        args: Megatron's arguments, parsed and not validated yet.
        fp8: None without a level.
        probe, sharpness: what is measured; None: nothing.
        parsed: whether Megatron has parsed and validates `args`, and its training loop follows; else they are defaults,
            and a trainer of its own follows (trainer.py).

    Attributes:
        hooked: undoes the hooks.
        on_cpu: whether this machine has no GPU.
        checks: the losses' checks, which wait for the end of a step.
        same: what all ranks know of a step's end.
        chunks: of the model, once its optimizer is built.
        layers_differ: whether a script has made its layers different.
        step_graph: records a step; None without --cuda-graph-impl.
    """

    def __init__(
        self,
        args: Namespace,
        fp8: Fp8Config | None,
        probe: ProbePlan | None = None,
        sharpness: SharpnessPlan | None = None,
        parsed: bool = True,
    ):
        self.args, self.fp8, self.probe, self.sharpness, self.parsed = args, fp8, probe, sharpness, parsed
        self.on_cpu = cpu.needed()
        self.hooked = Rebound()
        self.same = SameEverywhere()
        self.gemms: RunGemms | None = None
        self.chunks: list = []
        self._engines: weakref.WeakSet = weakref.WeakSet()
        self.layers_differ = False
        self.step_graph: Any = None

    @property
    def validated(self) -> Namespace:
        """Megatron's arguments, once it has validated them; the run's own if its training loop is not there."""
        from megatron.training import global_vars

        return (self.parsed and global_vars._GLOBAL_ARGS) or self.args

    @functools.cached_property
    def checks(self):
        from .monitor.loss_checks import LateChecks

        return LateChecks(self.args.check_for_nan_in_loss_and_grad)

    @functools.cached_property
    def waits(self):
        from .engine.chain import WaitsForWeights

        return WaitsForWeights()

    @functools.cached_property
    def logged(self):
        from .monitor.training_log import Logged

        return Logged()

    @functools.cached_property
    def routing(self):
        from .monitor.routing import Routing

        return Routing(log.routing_interval(self.args))

    # --- its steps

    def flags_read(self) -> None:
        """Adapt stock's flags, and hook into Megatron what the run asks for.

        Raises UserError for what this machine, or a folder, does not allow.
        """
        args, fp8 = self.args, self.fp8
        # First: adapt_stock_args looks for apex's module, and turns off what `checks` asks for.
        self.hooked.put(hooks.RUN, self)
        if fp8 is not None:
            say(adapt_stock_args(args, fp8))
            say(set_max_connections(args))
            say(set_graph_register(args))
            self._gemms_chosen(fp8)
            claim_folders(args)
        if self.probe is not None:
            from .monitor.probe import make

            make(self.probe.folder)
        begin()

    def enabled(self, rows: Iterable[Hook]) -> None:
        """flags_read, for a trainer: its model and optimizer are still to be built."""
        assert self.fp8 is not None
        from torch.nn.modules.module import register_module_module_registration_hook

        from .layers.linear import ask_for_its_norm

        self.hooked.put(rows, self)
        self.hooked.append(register_module_module_registration_hook(ask_for_its_norm).remove)
        self._gemms_chosen(self.fp8)

    def _gemms_chosen(self, fp8: Fp8Config) -> None:
        if not self.on_cpu:
            check_device(torch.cuda.get_device_capability(int(os.environ.get("LOCAL_RANK", 0))))
        self.gemms = RunGemms(fp8, "cpu" if self.on_cpu else "cuda", say, self.hooked)
        self.gemms.choose()

    def rope_scaled(self, stock: Callable) -> Callable:
        """GPTModel.__init__, with --rope-scaling-factor unless its caller gives a factor of its own."""
        from .flags.rope import STOCK_FACTOR
        from .layers.model import rotated_by

        factor = self.args.rope_factor_built = self.args.rope_scaling_factor  # saved with the model
        line = f"--rope-scaling-factor {factor}: handed to the model; without a level Megatron"
        say([f"{line} ignores it and builds {STOCK_FACTOR}"])
        return rotated_by(factor)(stock)

    def model_built(self, stock: Callable) -> Callable:
        """GPTModel.__init__."""
        from .layers.model import built_with

        fp8 = self.fp8
        assert fp8 is not None
        if self.parsed:
            return built_with(fp8)(stock)

        @functools.wraps(stock)
        def init(model, config, *rest, **kwargs):
            check_own_config(self.args, config)
            own = dataclasses.replace(fp8, draws_grouped=config.moe_grouped_gemm)
            built_with(own)(stock)(model, config, *rest, **kwargs)

        return init

    def optimizer_built(self, stock: Callable) -> Callable:
        """get_megatron_optimizer: at a level with our part in the chain."""
        from .engine.report import write_at_exit

        @functools.wraps(stock)
        def get_megatron_optimizer(config, model_chunks, config_overrides=None, *rest, **kwargs):
            make = functools.partial(stock, config, model_chunks, config_overrides, *rest, **kwargs)
            chain = make() if self.fp8 is None else self._engine_built(config, model_chunks, config_overrides, make)
            write_at_exit(model_chunks, chain)
            return chain

        return get_megatron_optimizer

    def gradients_finished(self, stock: Callable) -> Callable:
        """finalize_model_grads, called by a trainer: the gradients of the model's FP8 linears are summed too."""

        @functools.wraps(stock)
        @torch.no_grad()
        def finalize_model_grads(model, num_tokens=None, *args, **kwargs):
            stock(model, num_tokens, *args, **kwargs)  # leaves the global number of tokens in num_tokens
            for engine in self._engines:
                if engine.model_chunks[0] is model[0]:
                    engine.finalize_grads(num_tokens)

        return finalize_model_grads

    def _engine_built(self, config, chunks, overrides, make: Callable[[], Any]):
        """The chain of stock's parts, which `make` builds, and ours."""
        from .checkpoint.archive import Archive
        from .checkpoint.saves import check_saving
        from .engine.as_found import check_linears, cut_off, layers_differ
        from .engine.build import build_optimizer
        from .engine.gain_lines import memory, speed
        from .engine.level_line import level_line
        from .engine.names import ranges
        from .engine.owned_weight import owned_weights
        from .engine.report import measure, summary
        from .layers.dispatch import check_dispatch
        from .layers.emulated_head import count_updates
        from .layers.layer_choice import check_chosen
        from .monitor.collect import attach
        from .monitor.watch import watch_spikes

        args, fp8, gemms = self.validated, self.fp8, self.gemms
        assert fp8 is not None and gemms is not None
        # As the script has made the model.
        check_model(fp8.level, chunks)
        if frozen := check_linears(fp8, chunks):
            say([f"frozen by the script, without gradients and states: {ranges(frozen)}"])
        say(cut_off(chunks))
        self.chunks, self.layers_differ = chunks, layers_differ(chunks)
        check_dispatch(fp8, chunks)
        # The chain.
        chain = make()
        check_stage(args.save, chunks)
        searches = gemms.settle()
        if self.parsed:
            say(speed(args, owned_weights(chunks)))
        archive = Archive(fp8.grad_format)
        # Another trainer says it to its DDP; the parser's default would overrule that.
        asked = args.ddp_bucket_size if self.parsed else chunks[0].ddp_config.bucket_size
        chain = build_optimizer(fp8, chain, config, chunks, overrides, archive, asked)
        engine, self.same.here = chain.engine, True
        self._engines.add(engine)
        count_updates(chunks, lambda: engine.update)
        # What is said of it, and who observes it.
        say(check_chosen(fp8, chunks))
        if self.parsed:
            say(memory(args, engine.sets))
        chain.max_skipped = fp8.max_skipped
        chain.before_first_line = functools.partial(say, [level_line(fp8, chunks, gemms.name())])
        chain.after_first_step = lambda: say([*summary(measure(chunks, chain)), *searches()])
        watch_spikes(fp8, engine, attach(fp8, engine))
        if self.parsed:
            check_saving()
            self._graph_chosen(engine)
            self.hooked.put(hooks.BUILT, self)
        return chain

    def _graph_chosen(self, engine) -> None:
        """Whether the run's steps become CUDA graphs, or a line says that they would gain by it."""
        from .monitor.host_wait import HostWait

        args = self.validated
        asked = graphs.STEP_GRAPH.given(args)
        if args.cuda_graph_impl != graphs.WHOLE:
            if asked is None and graphs.can_record() and not graphs.inside(args):
                HostWait(engine.events, lambda share: say(graphs.advice(share, args)))
            return
        from .engine.step_graph import StepGraph

        args.check_for_nan_in_loss_and_grad = self.checks.asked  # validated: a level checks losses beside a graph
        wanted = (lambda: True) if asked != "auto" else HostWait(engine.events, lambda share: None).wanted
        self.step_graph = StepGraph(engine, self.checks, graphs.reads_ahead(args), say, wanted)
        self.hooked.append(self.step_graph.forget)

    def around_step(self) -> list[AroundStep]:
        """What is measured of training steps, the innermost first."""
        found: list[AroundStep] = []
        if (probe := self.probe) is not None:
            from .monitor.probe import probe_step

            found.append(lambda model, optimizer, step: probe_step(probe, optimizer.engine, step))
        if log.EXACT.given(self.args):
            from .monitor.exact_log import log_exact

            found.append(lambda model, optimizer, step: log_exact(step()))
        if log.logs_update_norm(self.args):
            from .monitor.update_norm import UpdateNorm

            found.append(UpdateNorm().around)
        if log.routing_interval(self.args):
            found.append(lambda model, optimizer, step: self.routing.around(step))
        if (sharpness := self.sharpness) is not None and sharpness.interval:
            from .monitor.sharpness import watch_step

            def around(model, optimizer, step):
                watch = getattr(getattr(optimizer, "engine", None), "watch", None)  # stock's has no engine
                return watch_step(sharpness, model, watch, step)

            found.append(around)
        return found

    def step(self, stock: Callable) -> Callable:
        """train_step."""
        measures = self.around_step()

        @functools.wraps(stock)
        def train_step(forward_step_func, data_iterator, model, optimizer, *args, **kwargs):
            step = functools.partial(stock, forward_step_func, data_iterator, model, optimizer, *args, **kwargs)
            for around in measures:
                step = functools.partial(around, model, optimizer, step)
            return step()

        return train_step

    def evaluation(self, stock: Callable) -> Callable:
        """evaluate_and_print_results."""
        sharpness = self.sharpness

        @functools.wraps(stock)
        def evaluate(prefix, forward_step_func, data_iterator, model, iteration, *args, **kwargs):
            run = functools.partial(stock, prefix, forward_step_func, data_iterator, model, iteration, *args, **kwargs)
            if self.fp8 is not None and self.validated.skip_train:
                run = functools.partial(self._without_optimizer, model, iteration, run)
            if sharpness is None or sharpness.file is None:
                return run()
            from .monitor.sharpness import watch_evaluation

            return watch_evaluation(sharpness, prefix, model, run)

        return evaluate

    def _without_optimizer(self, model, iteration: int, run: Callable[[], Any]) -> Any:
        """With --skip-train no optimizer is built, which would check the patterns and count the steps."""
        from .engine.owned_weight import owned_weights
        from .layers.emulated_head import count_updates
        from .layers.layer_choice import check_chosen

        assert self.fp8 is not None and self.gemms is not None
        say(check_chosen(self.fp8, model))  # on all ranks alike, also if one has no FP8 linear
        self.gemms.settle()
        for weight in owned_weights(model):
            weight.evaluate_at(max(1, iteration))
        count_updates(model, lambda: max(1, iteration))
        return run()

    def saving(self, stock: Callable) -> Callable:
        """save_checkpoint: no weight that is not finite."""
        from .engine.chain import Fp8ChainedOptimizer

        @functools.wraps(stock)
        def save_checkpoint(iteration, model, optimizer, *args, **kwargs):
            if isinstance(optimizer, Fp8ChainedOptimizer):  # None, or a framework's, if nothing is trained in FP8
                optimizer.refuse_damage()
            return stock(iteration, model, optimizer, *args, **kwargs)

        return save_checkpoint

    def contents(self, stock: Callable) -> Callable:
        """A checkpoint's metadata."""
        from .checkpoint.state import says_contents

        assert self.fp8 is not None
        return says_contents(self.fp8)(stock)

    def dumping(self, stock: Callable) -> Callable:
        """save_grads."""
        from .checkpoint.weight_dumps import readable_of

        return readable_of(self.chunks)(stock)

    def loading(self, stock: Callable) -> Callable:
        """_load_base_checkpoint; without a level, of a run whose flags are still to be read."""
        from .checkpoint import loads

        self.hooked.append(loads.forget_said)
        return loads.load_whole(self.fp8)(stock)

    def end(self) -> None:
        """Put everything back.  Models already built keep what they have."""
        self.hooked.put_back()
        if self.fp8 is not None:
            _forget()


def _forget() -> None:
    """Let modules forget what they keep of a run: nothing of it reaches the next."""
    from .comm import wire
    from .gemm import plans, search
    from .layers import attention, self_attention

    wire.sent_bytes.clear()
    search.forget()
    plans.renew()
    self_attention.forget_tables()
    attention.forget_bands()


def claim_folders(args: Namespace) -> None:
    """Let no other run save to the folders of this one."""
    if args.save and not args.skip_train:
        from .checkpoint import saves

        for flag, folder in saves.folders_of(args).items():
            saves.claim(folder, flag)


def say(lines: list[str]) -> None:
    """Print each line once, on rank 0 (Megatron parses its arguments more than once)."""
    if os.environ.get("RANK", "0") == "0":
        for line in lines:
            _print_once(f"[fp8] {line}")


@functools.cache
def _print_once(line: str) -> None:
    print(line, flush=True)


def forget_said() -> None:
    """Print what was printed once more, if a run says it."""
    _print_once.cache_clear()
