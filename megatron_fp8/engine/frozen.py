"""What a script does to an owned weight's parameter: it freezes it, or puts something else in its place.

A weight that is frozen when the optimizer is built has no gradient: no product for it, no sink, no moments, no master,
no place in a bucket. Its forward pass and dgrad are in FP8 as any other's. Where weights are stored in E4M3 it is one
payload, a byte a weight, and a scale (frozen_set.py); else its parameter stays as it is. So adapters train on an FP8
base (LoRA): they are stock's parameters, and so are norms, biases and embeddings, frozen or not.

To stock the parameter is frozen in any case, by our own doing; so the parameter itself notes what a script sets,
at any place and time:

    weight.requires_grad = False, weight.requires_grad_(False), weight.detach_(), module.requires_grad_(False)
    a LoRA wrapper's freezing of its base                                      all end in one of the first three

It counts when the optimizer is built (build.py, on all ranks together). What is frozen or thawed after that is refused:
when a step begins, and at each forward pass with gradients (OwnedWeight.makes_gradient).

Not seen: a script that asks `if weight.requires_grad` first finds False, and sets nothing. What it does to the norms
and biases beside our weights is seen: a layer of which nothing else is trained, and of whose linears the script has
said nothing, is refused. Nor is a script seen that freezes nothing, and gives an optimizer of its own the adapters.
"""

from typing import NoReturn

import torch

from ..errors import UserError

REMEDY = "a level owns the weights of the linears that it converts: leave them in their place, or use --fp8-level O0"


class OwnedParameter(torch.nn.Parameter):
    """A parameter that is frozen to autograd and to stock Megatron.

    Attributes:
        frozen: whether a script, too, has frozen it.
        told: whether a script has said either.
    """

    frozen = told = False

    @property  # type: ignore[override]
    def requires_grad(self) -> bool:
        return torch.Tensor.requires_grad.__get__(self)  # type: ignore[attr-defined]

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.frozen, self.told = not value, True

    def requires_grad_(self, requires_grad: bool = True):
        self.requires_grad = requires_grad
        return self

    def detach_(self):
        self.requires_grad = False
        return self


def own(param: torch.nn.Parameter) -> OwnedParameter:
    """Make a linear's parameter one that the engine owns: the same object."""
    show_to_stock(param, False)
    param.__class__ = OwnedParameter
    assert isinstance(param, OwnedParameter)
    return param


def show_to_stock(param: torch.nn.Parameter, trained: bool) -> None:
    """Set requires_grad as autograd and stock find it; what a script has set stays noted."""
    torch.Tensor.requires_grad.__set__(param, trained)  # type: ignore[attr-defined]


def refuse_changed(level: str, name: str, frozen: bool) -> NoReturn:
    done, when = ("frozen", "freeze") if frozen else ("thawed", "thaw")
    raise UserError(
        f"--fp8-level {level}: the script has {done} {name} since the optimizer was built; {when} it before that, in "
        "the function that builds the model for example, or use --fp8-level O0"
    )


def refuse_replaced(level: str, name: str) -> NoReturn:
    raise UserError(f"--fp8-level {level}: {name} was called with another weight than its own; {REMEDY}")


def refuse_unattached(level: str, name: str) -> NoReturn:
    raise UserError(
        f"--fp8-level {level}: {name} is about to train, but no FP8 optimizer has its weight: the script builds its "
        "optimizer without megatron.training.training.get_megatron_optimizer (perhaps by megatron.core.optimizer's, "
        "which the plugin does not reach), or has added the linear since; build it by the former, run a model that is "
        "not trained under torch.no_grad(), or use --fp8-level O0"
    )
