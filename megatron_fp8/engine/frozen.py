"""What a script does to an owned weight's parameter: it freezes it, or puts something else in its place.

The engine would train the weight all the same, so a run ends then in one line. To stock the parameter is frozen in any
case, by our own doing; so the parameter itself notes what a script sets, at any place and time:

    weight.requires_grad = False, weight.requires_grad_(False), weight.detach_(), module.requires_grad_(False)
    a LoRA wrapper's freezing of its base                                      all end in one of the first three

It counts when the optimizer is built (build.py, on all ranks together) and, after that, when a step begins and
at each forward pass with gradients (OwnedWeight.expect_gradient). A weight that is thawed before then is trained.

Not seen: a script that asks `if weight.requires_grad` first finds False, and sets nothing. (What it does to the norms
and biases beside our weights is seen, if it does so to a whole layer's.) Nor a script that freezes nothing, and gives
an optimizer of its own the adapters alone.
"""

from typing import NoReturn

import torch

from ..errors import UserError

REMEDY = "FP8 levels train every linear that they convert: leave it as the model had it, or use --fp8-level O0"


class OwnedParameter(torch.nn.Parameter):
    """A parameter that is frozen to autograd and to stock Megatron.

    Attributes:
        frozen: whether a script, too, has frozen it.
    """

    frozen = False

    @property  # type: ignore[override]
    def requires_grad(self) -> bool:
        return torch.Tensor.requires_grad.__get__(self)  # type: ignore[attr-defined]

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.frozen = not value

    def requires_grad_(self, requires_grad: bool = True):
        self.frozen = not requires_grad
        return self

    def detach_(self):
        self.frozen = True
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


def refuse_frozen(level: str, name: str) -> NoReturn:
    raise UserError(f"--fp8-level {level}: the script has frozen {name} since the optimizer was built; {REMEDY}")


def refuse_replaced(level: str, name: str) -> NoReturn:
    raise UserError(f"--fp8-level {level}: {name} was called with another weight than its own; {REMEDY}")


def refuse_unattached(level: str, name: str) -> NoReturn:
    raise UserError(
        f"--fp8-level {level}: {name} is about to train, but no FP8 optimizer has its weight: the script builds its "
        "optimizer without megatron.training.training.get_megatron_optimizer (perhaps by megatron.core.optimizer's, "
        "which the plugin does not reach), or has added the linear since; build it by the former, run a model that is "
        "not trained under torch.no_grad(), or use --fp8-level O0"
    )
