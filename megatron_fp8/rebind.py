"""Hooks: names of other packages that hold something of ours until they are put back.

    Hook       one row of the table (hooks.py): which name, what is put there, when, and why
    Rebound    what undoes the changes that were made, the last first

A hook changes a name of a module or of a class, and a Rebound keeps its undo. Or it changes an attribute of one object,
as the model's head: then it lives as long as the object, and `on` returns the undo to the caller.
"""

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

PACKAGE = __package__
NOTHING = type("nothing", (), {})()  # in the place of a name that is not there
_VALUE, _OPTIONAL = "holds ", "None or "  # begin the signature of what is no function, and of what may be none
_ANY = "..."


@dataclass(frozen=True)
class When:
    """When a hook is there: `text` for people, `test(run)` for the program; a hook on objects is put by its caller."""

    text: str
    test: Callable[[Any], bool] = lambda run: True


@dataclass(frozen=True)
class Hook:
    """One name of another package, and what of ours stands there.

    Attributes:
        owner: the module or class that has the name, dotted. Of a hook on objects, their class.
        name: the attribute; of a dictionary, the key.
        maker: what makes ours of the original: dotted, inside this package. If it begins with "run.", an attribute of
            the Run, or of what a script gives in its place. Of a hook on objects, the module that calls `on`.
        signature: how the parameters of the original begin; "..." if a script may give any function, and "None or "
            before it if there may be none. If the original is no function, "holds " and its type: "holds bool"; "holds
            nothing" if the name is not there.
        when: when it is there; of a hook on objects, the event that puts it there.
        why: one sentence.
        of_object: whether it changes objects.
        everywhere: whether it changes each module that has imported the original by now, too.
    """

    owner: str
    name: str
    maker: str
    signature: str
    when: When
    why: str
    of_object: bool = False
    everywhere: bool = False

    def put(self, rebound: "Rebound", run: Any = None) -> None:
        """Put ours in place, and its undo in `rebound`; RuntimeError if the original is not the one that we know."""
        owner = find(self.owner)
        original = _get(owner, self.name)
        self.check(original)
        ours = self._make(run)(original)
        for holder in _holders(self.name, original) if self.everywhere else [owner]:
            rebound.replace(holder, self.name, ours)

    def on(self, target: Any, value: Any) -> Callable[[], None]:
        """target.name = value, of one object -> its undo; RuntimeError as `put`."""
        self.check(_get(target, self.name))
        undo = Rebound()
        undo.replace(target, self.name, value)
        return undo.put_back

    def check(self, original: Any) -> None:
        """Raise RuntimeError unless the original is what the row says."""
        _, optional, expected = self.signature.rpartition(_OPTIONAL)
        if optional and original is None:
            return
        if expected.startswith(_VALUE):
            found, known = type(original).__name__, expected.removeprefix(_VALUE)
            if found != known:
                raise RuntimeError(self._unknown(found, known))
            return
        parameters = expected.removesuffix(_ANY)
        if not callable(original):
            raise RuntimeError(self._unknown(type(original).__name__, f"({', '.join([*parameters.split(), _ANY])})"))
        names = [name.lstrip("_") for name in inspect.signature(original).parameters]
        # An object's own method, or what stands for it, has no self.
        known_names = [name for name in parameters.split() if name != "self" or not self.of_object or name in names]
        if names[: len(known_names)] != known_names:
            raise RuntimeError(self._unknown(f"({', '.join(names)})", f"({', '.join(known_names)}, ...)"))

    def _unknown(self, found: str, known: str) -> str:
        return (
            f"megatron_fp8 does not know this {self.owner}.{self.name}: {found}; it was written for {known}; "
            "use megatron-core 0.19.x"
        )

    def _make(self, run: Any) -> Callable[[Any], Any]:
        if self.maker.startswith("run."):
            return functools.reduce(getattr, self.maker.split(".")[1:], run)
        return find(f"{PACKAGE}.{self.maker}")


class Rebound(list[Callable[[], Any]]):
    """What undoes each change, in the order of the changes. An undo of something else than a name may be added."""

    def put(self, rows: Iterable[Hook], run: Any = None) -> None:
        """Put the rows that `run` asks for; if one cannot be, undo everything and raise what it raises."""
        asked = [row for row in rows if row.when.test(run)]  # before one is there, which others look for
        try:
            for row in asked:
                row.put(self, run)
        except BaseException:
            self.put_back()
            raise

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """owner.name = value; owner[name] of a dictionary."""
        if isinstance(owner, dict):
            there = name in owner
            undo = functools.partial(owner.__setitem__ if there else owner.pop, name, owner.get(name))
            owner[name] = value
        else:
            own: Any = vars(owner)
            held = own if name in own else own.get("_modules", {})  # a torch module holds its children there
            if name in held:
                undo = functools.partial(setattr, owner, name, held[name])
            else:  # its class has it, or a base class, or nothing
                undo = functools.partial(delattr, owner, name)
            setattr(owner, name, value)
        self.append(undo)

    def put_back(self) -> None:
        """Undo all changes, the last first."""
        while self:
            self.pop()()


def find(path: str) -> Any:
    """A module, or what it holds, by its dotted path; imported if need be."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError as error:
            if error.name is None or not path.startswith(error.name):
                raise
            continue
        return functools.reduce(getattr, parts[count:], found)
    raise ModuleNotFoundError(path)


def _holders(name: str, original: Any) -> list[Any]:
    """The modules that have imported it, its own among them."""
    return [module for module in list(sys.modules.values()) if getattr(module, "__dict__", {}).get(name) is original]


def _get(owner: Any, name: str) -> Any:
    return owner.get(name, NOTHING) if isinstance(owner, dict) else getattr(owner, name, NOTHING)
