"""What a script does to an owned weight's parameter: it freezes it, or puts something else in its place.

A weight that is frozen when the optimizer is built has no gradient: no product for it, no sink, no moments, no master,
no place in a bucket. Its forward pass and dgrad are in FP8 as for any other weight. If weights are stored in E4M3, it
is one payload of a byte a weight, and a scale (frozen_set.py); else its parameter stays as it is. So adapters train on
an FP8 base (LoRA). They are stock's parameters. So are norms, biases and embeddings, frozen or not.

To stock the parameter is frozen in any case, because we freeze it. So the parameter itself notes what a script sets, at
any place and time:

    weight.requires_grad = False, weight.requires_grad_(False), weight.detach_(), module.requires_grad_(False)
    a LoRA wrapper's freezing of its base                                      all end in one of the first three

The note is read when the optimizer is built (build.py, on all ranks together). If a script freezes or thaws a weight
after that, the run is refused: when a step begins, and at each forward pass with gradients
(OwnedWeight.makes_gradient).

Two things are not seen. A script that asks `if weight.requires_grad` first finds False, and sets nothing. But its
treatment of the norms and biases beside our weights is seen: if it trains nothing else of a layer, and has said nothing
about the layer's linears, the run is refused. And a script may freeze nothing, and give only the adapters to its own
optimizer.
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
    """Make a linear's parameter one that the engine owns; it stays the same object."""
    show_to_stock(param, False)
    param.__class__ = OwnedParameter
    assert isinstance(param, OwnedParameter)
    return param


def show_to_stock(param: torch.nn.Parameter, trained: bool) -> None:
    """Set requires_grad for autograd and stock; the note of what a script has set stays."""
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
