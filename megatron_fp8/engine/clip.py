"""Stock's clip of what a level does not own (embedding, head, norms, router), without a copy of a gradient.

Without Transformer Engine and apex Megatron scales a gradient by `dst.copy_(src * scale)`, dst being src: 4 bytes a
parameter of the largest table, for a moment. Beside a step's graph, whose memory nothing else may use, that is the
largest temporary of an optimizer's step. Here it is scaled in place, all of them in one call. All bits are the same.
"""

from collections.abc import Callable

import torch


def scaled_in_place(stock: Callable) -> Callable:
    """clip_grads.multi_tensor_scale_impl."""

    def local_multi_tensor_scale(chunk_size, noop_flag, tensor_lists, scale):
        src, dst = tensor_lists
        if src is not dst:
            stock(chunk_size, noop_flag, tensor_lists, scale)
        elif src:  # a rank may have no parameter of stock's
            torch._foreach_mul_(src, scale)

    return local_multi_tensor_scale
