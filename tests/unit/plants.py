"""Bugs planted in the package: functions that fail as if they were in one of its files."""

from types import ModuleType

from megatron_fp8 import errors

BUGS = {  # exception: a statement that raises it
    ValueError: "first, second = [1]",
    KeyError: "{}['gone']",
    AssertionError: "assert not True",
    AttributeError: "None.gone",
}


def function(file: str, statement: str, **names):
    """A function that takes any arguments and executes a statement as if in this file; names: its module's names."""
    namespace = dict(names)
    exec(compile(f"def planted(*_, **__):\n    {statement}\n", file, "exec"), namespace)
    return namespace["planted"]


def bug(module: ModuleType, kind: type[Exception]):
    """A function of one of our modules that fails."""
    return function(module.__file__, BUGS[kind], __name__=module.__name__)


MISTAKE = function(errors.__file__, "raise UserError('--flag 3: is wrong; use 4')", UserError=errors.UserError)
