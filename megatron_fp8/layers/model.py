"""Builds a GPTModel for a run with a level: from a converted spec, with the changes that no spec can describe."""

import functools
import inspect

import torch

from ..engine.owned_weight import name_weights
from ..flags.config import Fp8Config
from ..flags.rope import STOCK_FACTOR
from .dispatch import dispatch_in_fp8
from .embedding import add_to_main_grad
from .emulated_head import emulate_head
from .fp8_head import head_in_fp8
from .layer_choice import emulates_head, keep_in_bf16
from .loss_chunks import in_chunks
from .residual import join_residuals
from .spec import accept_local_names, convert, convert_block
from .uncounted import count_on_device


def without_fp8(stock):
    """CheckpointWithoutOutput.__init__ without Transformer Engine's contexts, for which config.fp8 asks."""
    return lambda self, fp8=None: stock(self, None)


def rotated_by(factor: float):
    """Wraps GPTModel.__init__: `factor` is Llama 3's rope factor, unless the caller gives one of its own."""

    def make(stock):
        signature = inspect.signature(stock)

        @functools.wraps(stock)
        def init(*given, **named):
            call = signature.bind(*given, **named)
            call.apply_defaults()
            if call.arguments["rope_scaling"] and call.arguments["rope_scaling_factor"] == STOCK_FACTOR:
                call.arguments["rope_scaling_factor"] = factor
            stock(*call.args, **call.kwargs)

        return init

    return make


def built_with(fp8: Fp8Config):
    """Wraps GPTModel.__init__: the model is built for a level."""

    def make(stock):
        def init(self, config, transformer_layer_spec, *args, mtp_block_spec=None, vp_stage=None, **kwargs):
            stock(
                self,
                config,
                convert_block(transformer_layer_spec, config, fp8, vp_stage),
                *args,
                mtp_block_spec=convert(mtp_block_spec, config, fp8),
                vp_stage=vp_stage,
                **kwargs,
            )
            name_weights([self])  # which patterns ask for, without an optimizer (--skip-train) too
            keep_in_bf16(self, fp8, config.num_layers)
            if emulates_head(fp8) and self.post_process:
                emulate_head(self.output_layer, fp8.emulate, fp8.seed, torch.distributed.get_rank())
            if fp8.lm_head and self.post_process:
                head_in_fp8(self.output_layer, fp8.grad_format)
            if fp8.loss_chunks > 1 and self.post_process:
                in_chunks(self, fp8.loss_chunks)
            count_on_device(self)
            dispatch_in_fp8(self, fp8)
            add_to_main_grad(self)
            join_residuals(self)
            accept_local_names(self)

        return init

    return make
