"""Names of other modules, bound to something of ours until they are put back."""

import functools
import inspect
from collections.abc import Callable
from typing import Any


class Rebound(list[Callable[[], Any]]):
    """What undoes each change, in the order of the changes. What is not a name's may be added."""

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """owner.name = value."""
        self.append(functools.partial(setattr, owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def rebind(self, owner: Any, name: str, make: Callable[[Callable], Callable], parameters: str) -> None:
        """owner.name = make(owner.name).

        Raises RuntimeError where the original's parameters do not begin with those that we know.
        """
        original = getattr(owner, name)
        known = parameters.split()
        found = list(inspect.signature(original).parameters)
        if found[: len(known)] != known:
            raise RuntimeError(
                f"megatron_fp8 does not know this {owner.__name__}.{name}({', '.join(found)}): it was written for "
                f"({', '.join(known)}, ...); use megatron-core 0.19.x"
            )
        self.replace(owner, name, make(original))

    def put_back(self) -> None:
        """Undo all, the last first."""
        while self:
            self.pop()()
