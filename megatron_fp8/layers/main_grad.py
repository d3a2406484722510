"""Parameters of stock's whose gradient our kernels add to main_grad themselves: embeddings' and norms'.

Autograd would make a gradient in the parameter's type, which a hook of data parallelism then adds to the FP32
main_grad: a rounding, and a pass or more over memory. If stock's linears accumulate in their GEMM
(--gradient-accumulation-fusion) we add too, and in the same way: the parameter is marked `grad_added_to_main_grad`, and
autograd gets a gradient that is never read, since the hooks wait for one. The mark holds for a step: in one step a
parameter's gradients come all this way, or all the other.
"""

import torch

_MARK = "fp8_adds_to_main_grad"


def let_add(parameter: torch.nn.Parameter) -> None:
    """From now on the code that makes its gradient adds it."""
    setattr(parameter, _MARK, True)


def adds(parameter: torch.Tensor | None) -> bool:
    """Whether it is to be: data parallelism has given it a main_grad."""
    return getattr(parameter, _MARK, False) and hasattr(parameter, "main_grad")


def added(parameter: torch.Tensor) -> torch.Tensor:
    """Say that its gradient was added; returns what autograd is to be given.

    A table gets a sparse tensor without entries: code that adds it adds zeros. Autograd hands a gradient to the stream
    that data parallelism was built on, so the allocator keeps its memory until the GPU is there: the host is
    micro-batches ahead, and as many dead gradients would lie beside the activations (three of 639 MiB in a rank of
    175B at TP 2).
    """
    parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    if parameter.dim() == 1:
        return torch.empty_like(parameter)
    return torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device, layout=torch.sparse_coo)
