"""What a GPTModel is built as in a run with a level: by a converted spec, and with the changes that no spec can say."""

import torch

from ..engine.owned_weight import name_weights
from ..flags.config import Fp8Config
from .embedding import add_to_main_grad
from .emulated_head import emulate_head
from .fp8_head import head_in_fp8
from .layer_choice import emulates_head, keep_in_bf16
from .residual import join_residuals
from .spec import accept_local_names, convert, convert_block


def without_fp8(stock):
    """CheckpointWithoutOutput.__init__ without Transformer Engine's contexts, which config.fp8 asks for."""
    return lambda self, fp8=None: stock(self, None)


def built_with(fp8: Fp8Config):
    """What makes of GPTModel.__init__ that of a model at a level."""

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
            add_to_main_grad(self)
            join_residuals(self)
            accept_local_names(self)

        return init

    return make
