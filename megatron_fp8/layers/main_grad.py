"""Stock's parameters whose gradients our kernels add to main_grad directly: those of embeddings and norms.

Autograd would make a gradient in the parameter's type, and a hook of data parallelism would add it to the FP32
main_grad: one more rounding, and a pass or more over memory. If stock's linears accumulate in their GEMM
(--gradient-accumulation-fusion), we add directly too, and in the same way: the parameter is marked
`grad_added_to_main_grad`, and autograd gets a gradient that is never read, because the hooks wait for one. The mark
holds for a step: in one step all gradients of a parameter come this way, or all the other.
"""

import torch

_MARK = "fp8_adds_to_main_grad"


def let_add(parameter: torch.nn.Parameter) -> None:
    """Mark the parameter: from now on the code that makes its gradient adds it to main_grad."""
    setattr(parameter, _MARK, True)


def adds(parameter: torch.Tensor | None) -> bool:
    """Whether its gradient must be added: it is marked, and data parallelism has given it a main_grad."""
    return getattr(parameter, _MARK, False) and hasattr(parameter, "main_grad")


def added(parameter: torch.Tensor) -> torch.Tensor:
    """Note that its gradient was added; returns a placeholder for autograd.

    A table's is a sparse tensor without entries: code that adds it adds zeros. Autograd passes a gradient to the stream
    that data parallelism was built on, so the allocator keeps its memory until the GPU comes there. The host is
    micro-batches ahead, so as many dead gradients would lie beside the activations (three of 639 MiB in a rank of 175B
    at TP 2).
    """
    parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    if parameter.dim() == 1:
        return torch.empty_like(parameter)
    return torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device, layout=torch.sparse_coo)
