"""What --save-params-interval writes beside checkpoints, readable: E4M3 weights in BF16."""

import torch
from megatron.core.utils import unwrap_model

from ..engine.owned import owners


def readable_params(dumped: dict[str, dict[str, torch.Tensor]], chunks) -> dict[str, dict[str, torch.Tensor]]:
    """What --save-params-interval took of `chunks`, {"model_chunk0": {name: tensor}}, with E4M3 weights in BF16."""
    for i, chunk in enumerate(chunks):
        for name, module in owners(unwrap_model(chunk)):
            if module.owned.stored is not None:
                dumped[f"model_chunk{i}"][f"{name}.weight"] = module.owned.dense().cpu()
    return dumped
