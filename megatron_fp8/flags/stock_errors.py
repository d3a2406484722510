"""Turns a failed check of stock Megatron into one line for the user: flags, condition, place.

Megatron checks its flags with `assert` and `raise`, often without a message: in validate_args, in the __post_init__ of
its configurations, when it makes groups, builds the model or makes its first step.  Until then everything depends only
on the command.  So such a failure is the user's mistake if

    the statement that failed is an assert or a raise in Megatron's own source;
    no training step has been made.

The line holds the statement's message, or else its condition; the flags whose values the statement reads, or, if it
reads none, those that its callers read; and its place in the source.  Any other failure is a bug and keeps its
traceback.  Two exceptions: the call of a class that Megatron has set to None because its package is missing, and the
import of a missing package.
If Megatron raises one error from another, the first one counts.  If a callback passed Megatron a bad argument, the
mistake may be the callback's: the line then follows the traceback (`through_callback`).

Two checks are torch's: that a launcher has set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and that no other process
has the port.
"""

import argparse
import ast
import functools
import linecache
import os
import re
import sys
import sysconfig
from collections.abc import Iterator
from enum import Enum
from traceback import walk_tb
from types import FrameType
from typing import Any

from ..errors import is_bug
from ..packages import needs

_KINDS = (
    AssertionError, ValueError, RuntimeError, NotImplementedError, TypeError, Exception,
    ImportError, ModuleNotFoundError,
)  # fmt: skip
_OTHER_NAMES = {  # {name in Megatron's configurations and functions: name in the arguments}
    "transformer_pipeline_model_parallel_size": "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
    "num_moe_experts": "num_experts",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
}
_WITHOUT_TE = (
    "install Transformer Engine, or add --fp8-level, or else --transformer-impl local --no-masked-softmax-fusion "
    "--no-persist-layer-norm --no-gradient-accumulation-fusion --no-rope-fusion"
)
_OF_MICRO_BATCHES = "M is --global-batch-size by --micro-batch-size and data-parallel ranks; change one of them"
_REMEDIES = {  # {a part of a message of Megatron's that names no flag: what helps}
    "requires TPxEP > 1": "that is --expert-tensor-parallel-size times --expert-model-parallel-size; raise one, or use "
    "--moe-token-dispatcher-type alltoall",
    "if MoE and tensor parallelism": "Megatron ends the run for it; add --sequence-parallel",
    "DeepEP is not installed": "or use --moe-token-dispatcher-type alltoall",
    "HybridEP is not installed": "or use --moe-token-dispatcher-type alltoall",
    "apply_rope_fusion is not available": _WITHOUT_TE,
    "The number of contiguous micro-batches in a virtual": _OF_MICRO_BATCHES,
    "The remainder of M (the total micro-batches)": _OF_MICRO_BATCHES,
    "persist_layer_norm not supported by torch": _WITHOUT_TE,
}
_OF_NUMBERS = "megatron.core.rerun_state_machine"  # it raises for a bad loss, which is no mistake in the flags
_CALLERS = 6  # callers to search for flags that they read
_MANY = 4  # most missing flags to name
_AROUND = tuple(
    f"megatron_fp8.{name}"
    for name in "plugin cpu flags.usage __main__ checkpoint.saves checkpoint.loads layers.spec".split()
)
_OF_TWO = ("expected iteration-based", "expected sample-based")  # Megatron's messages for --train-iters/--train-samples
_OUR_SCRIPT = "pretrain_gpt_fp8.py"
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
_flags: dict[str, argparse.Action] = {}  # by name in the arguments


def remember_flags(parser: argparse.ArgumentParser) -> None:
    """Remember the parser's flags, so that an error line can name them."""
    for action in parser._actions:
        if action.option_strings:
            _flags.setdefault(action.dest, action)


def is_check(error: BaseException) -> bool:
    """Whether the failed statement is an assert or a raise in Megatron's own source."""
    frames = _first(error)[1]
    return bool(frames) and _is_megatrons(frames[-1][0]) and isinstance(_statement(*frames[-1]), ast.Assert | ast.Raise)


def stock_mistake(error: BaseException) -> str | None:
    """The line for a failed check of Megatron's; None if the error is not the user's mistake."""
    error, frames = _first(error)
    if taken := re.search(r"failed to listen .* port: (\d+),.* EADDRINUSE", str(error)):
        return f"MASTER_PORT {taken[1]}: another process of this machine listens there; give each run a port of its own"
    if type(error) not in _KINDS or not frames or _has_trained(frames):
        return None
    frame, line = frames[-1]
    if unset := re.search(r"env:// rendezvous: environment variable (\w+) expected", str(error)):
        return f"{unset[1]} is not set: no launcher started this; use torchrun --nproc-per-node N SCRIPT FLAGS"
    if not _is_megatrons(frame):
        return None
    statement = _statement(frame, line)
    place = _place(frame, line)
    if isinstance(error, TypeError) and (absent := _missing(frame, statement)):
        return (
            f"Megatron has no {absent} here: Transformer Engine is not installed; {_WITHOUT_TE}; Megatron calls it in "
            f"{place}"
        )
    if isinstance(error, ModuleNotFoundError) and isinstance(statement, ast.Import | ast.ImportFrom):
        module = (error.name or "").partition(".")[0]
        return f"Megatron {needs(module, 'remove the flag that asks for it')}; Megatron imports it in {place}"
    if not isinstance(statement, ast.Assert | ast.Raise):
        return None
    given, missing = _values(frames)
    text = " ".join(str(error).split()) or _condition(frame, statement)
    text = next((f"{text.rstrip('.')}; {remedy}" for part, remedy in _REMEDIES.items() if part in text), text)
    given = [flag for flag in given if not text.startswith(flag)]
    missing = [flag for flag in missing if not text.startswith(flag)]
    tail = f" (without {', '.join(missing)})" if missing else ""
    if not given and (folder := _loaded(frames)):
        given, tail = [f"--load {folder}"], "" if str(error) else ", and the checkpoint does not have it"
        modules = [frame.f_globals.get("__name__", "") for frame, _ in frames]
        if any(module.startswith("megatron.core.optimizer") for module in modules):
            tail += "; add --no-load-optim to load the weights alone"
        text = text.removesuffix("; change it")
    head = f"{', '.join(given)}: " if given else ""
    if len(given) > 1 and text.startswith(_OF_TWO):
        tail = "; remove one"
    return f"{head}{text.rstrip('.')}{tail}; Megatron checks it in {place}"


def through_callback(error: BaseException) -> bool:
    """Whether Megatron called a function of the script or of ours, and that function's call into Megatron failed.

    pretrain_gpt_fp8.py does not count, because it only passes on what the flags say, nor do our wrappers of Megatron's
    functions, which call what they wrap by the name `stock`.
    """
    called_back = False  # an inner frame is Megatron's, a frame outside of it a callback's
    for frame, _ in reversed(_first(error)[1]):
        module, file = frame.f_globals.get("__name__", ""), frame.f_code.co_filename
        if module.startswith("megatron."):
            if called_back:
                return True
        elif module.startswith("megatron_fp8."):
            called_back |= not module.startswith(_AROUND) and "stock" not in frame.f_code.co_freevars
        else:
            called_back |= not file.startswith(("<", *_LIBRARIES)) and os.path.basename(file) != _OUR_SCRIPT
    return False


def _first(error: BaseException) -> tuple[BaseException, list[tuple[FrameType, int]]]:
    """The first error of a chain, and its frames from the outermost. An ImportError does not count as the first.

    A bug of this package that occurs while it handles another error ends the chain: it is reported itself.
    """
    frames = list(walk_tb(error.__traceback__))
    while (cause := error.__cause__ or (None if error.__suppress_context__ else error.__context__)) is not None:
        if isinstance(cause, ImportError) or is_bug(error):
            break
        error, inner = cause, list(walk_tb(cause.__traceback__))
        shared = [i for i, (frame, _) in enumerate(frames) if inner and frame is inner[0][0]]
        frames = frames[: shared[0] if shared else len(frames)] + inner
    return error, frames


def _is_megatrons(frame: FrameType) -> bool:
    module = frame.f_globals.get("__name__", "")
    return module.startswith("megatron.") and module != _OF_NUMBERS


def _place(frame: FrameType, line: int) -> str:
    file = frame.f_code.co_filename
    return f"{file[file.rfind(f'{os.sep}megatron{os.sep}') + 1 :]}:{line}"


def _missing(frame: FrameType, statement: ast.stmt | None) -> str | None:
    """The name of a Transformer Engine class that a statement calls and that is None."""
    for call in ast.walk(statement) if statement is not None else ():
        called = call.func if isinstance(call, ast.Call) else None
        if isinstance(called, ast.Name) and called.id.startswith("TE") and frame.f_globals.get(called.id, 0) is None:
            return called.id
    return None


def _loaded(frames: list[tuple[FrameType, int]]) -> str | None:
    """The folder of the checkpoint that was being loaded; None if none was."""
    for frame, _ in frames:
        place = frame.f_globals.get("__name__"), frame.f_code.co_name
        if place == ("megatron.training.checkpointing", "load_checkpoint"):
            return getattr(frame.f_locals.get("args"), "load", None)
    return None


def _has_trained(frames: list[tuple[FrameType, int]]) -> bool:
    """Whether the error came after the first step of Megatron's training loop."""
    for frame, _ in frames:
        if frame.f_globals.get("__name__") == "megatron.training.training":
            iteration = frame.f_locals.get("iteration")
            if frame.f_code.co_name == "train":
                return iteration is not None and iteration != frame.f_locals.get("start_iteration", iteration)
            if frame.f_code.co_name == "pretrain" and iteration:  # the loop has returned
                return True
    return False


@functools.lru_cache(maxsize=16)
def _tree(filename: str) -> ast.Module:
    return ast.parse("".join(linecache.getlines(filename)))


def _around(frame: FrameType, line: int) -> list[ast.stmt]:
    """The statements that contain a line, from the outermost."""
    try:
        nodes = ast.walk(_tree(frame.f_code.co_filename))
    except SyntaxError:
        return []
    found = [n for n in nodes if isinstance(n, ast.stmt) and n.lineno <= line <= (n.end_lineno or n.lineno)]
    return sorted(found, key=lambda n: (n.lineno, -(n.end_lineno or n.lineno)))


def _statement(frame: FrameType, line: int) -> ast.stmt | None:
    around = _around(frame, line)
    return around[-1] if around else None


def _condition(frame: FrameType, statement: ast.stmt) -> str:
    """The text for a check without a message: an assert's condition, or the `if` around a raise."""
    if isinstance(statement, ast.Assert):
        if absent := _lacking(statement.test):
            return f"{absent} is missing; give it"
        return f"Megatron needs {_shown(statement.test)}; change it"
    around = [n for n in _around(frame, statement.lineno) if isinstance(n, ast.If)]
    return f"Megatron cannot have {_shown(around[-1].test)}; change it" if around else "Megatron cannot do this"


def _lacking(test: ast.expr) -> str | None:
    """The flag that an `assert args.flag is not None` asks for; None if the condition is another."""
    match test:
        case ast.Compare(left=ast.Attribute(attr=name), ops=[ast.IsNot()], comparators=[ast.Constant(value=None)]):
            action = _flags.get(_OTHER_NAMES.get(name, name))
            return action.option_strings[0] if action else None
    return None


def _shown(expression: ast.expr) -> str:
    return " ".join(ast.unparse(expression).replace("args.", "").replace("self.", "").split())


def _values(frames: list[tuple[FrameType, int]]) -> tuple[list[str], list[str]]:
    """(the flags that a failed check reads, as they were given; those that it reads and that were not given)."""
    wanted: set[str] = set()  # names that the callee's statement reads
    for i, (frame, line) in enumerate(frames[: -_CALLERS - 1 : -1]):
        around = _around(frame, line)
        if not around:
            continue
        function = next((n for n in reversed(around) if isinstance(n, ast.FunctionDef)), None)
        options = [_called_with(around[-1], frames[-i][0], wanted)] if i else _checked(around)
        for parts in options:
            read = {name: value for part in parts for name, value in _read(part, frame, function)}
            given = {name: shown for name, value in read.items() if (shown := _as_given(name, value)) is not None}
            typed = [shown for name, shown in given.items() if _is_typed(name)]
            missing = [_flags[name].option_strings[0] for name in read.keys() - given.keys() if not i]
            if typed:  # a missing flag is only a clue beside one that was given
                return typed, sorted(missing)[:_MANY]
        wanted = {getattr(n, "attr", getattr(n, "id", "")) for part in options[0] for n in ast.walk(part)}
    return [], []


def _checked(around: list[ast.stmt]) -> list[list[ast.AST]]:
    """What a failed assert or raise reads: with the condition of the innermost `if` around it, then with the next."""
    statement = around[-1]
    read: list[ast.AST] = [statement.test if isinstance(statement, ast.Assert) else statement]
    conditions = [n.test for n in around[-2::-1] if isinstance(n, ast.If)]
    innermost = len(around) > 1 and isinstance(around[-2], ast.If)
    return [[*conditions[:i], *read] for i in range(innermost, len(conditions) + 1)]


def _called_with(statement: ast.stmt, callee: FrameType, wanted: set[str]) -> list[ast.AST]:
    """The arguments that a call passes under the wanted names; the whole statement if there are none."""
    code = callee.f_code
    parameters = [p for p in code.co_varnames[: code.co_argcount] if p != "self"]
    found: list[ast.AST] = []
    for call in (n for n in ast.walk(statement) if isinstance(n, ast.Call)):
        found += [word.value for word in call.keywords if word.arg in wanted]
        found += [value for name, value in zip(parameters, call.args, strict=False) if name in wanted]
    return found or [statement]


def _read(node: ast.AST, frame: FrameType, function: ast.FunctionDef | None) -> Iterator[tuple[str, Any]]:
    """(name, value) of each flag that a statement reads, directly or through a local variable."""
    for part in ast.walk(node):
        name: Any = None
        value: Any = None
        if isinstance(part, ast.Attribute):
            if _resolve(part.value, frame) is None:  # a variable of a comprehension, or deleted
                continue
            name, value = part.attr, _resolve(part, frame)
        elif isinstance(part, ast.Name):
            # A variable of a flag's name may hold another value: Megatron takes the layers of uneven stages off it.
            if sources := [flag for made in _assigned(part.id, function) for flag in _read(made, frame, None)]:
                yield from sources
                continue
            name, value = part.id, frame.f_locals.get(part.id)
        elif isinstance(part, ast.Call) and ast.unparse(part.func) == "getattr" and len(part.args) > 1:
            key = part.args[1]
            name = key.value if isinstance(key, ast.Constant) else frame.f_locals.get(ast.unparse(key))
            value = getattr(_resolve(part.args[0], frame), str(name), None)
        name = _OTHER_NAMES.get(str(name), str(name))
        name = name if value is None else _typed(name)
        if name in _flags and _is_plain(value):
            yield name, value


def _assigned(name: str, function: ast.FunctionDef | None) -> list[ast.expr]:
    """What a function assigns, adds or subtracts to its variable `name`."""
    found = []
    for node in ast.walk(function) if function is not None else ():
        if isinstance(node, ast.Assign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(ast.unparse(target) == name for target in targets):
                found.append(node.value)
    return found


def _typed(name: str) -> str:
    """The flag from which a flag that was not given takes its value: global_batch_size for eval_global_batch_size."""
    if name in _flags and not _is_typed(name):
        for other in _flags:
            if name.endswith(f"_{other}") and _is_typed(other):
                return other
    return name


def _is_typed(name: str) -> bool:
    words = {word.partition("=")[0] for word in sys.argv}
    return any(option in words for option in _flags[name].option_strings)


def _resolve(node: ast.expr, frame: FrameType) -> Any:
    """The value of a chain of names, or None."""
    if isinstance(node, ast.Name):
        return frame.f_locals.get(node.id)
    return getattr(_resolve(node.value, frame), node.attr, None) if isinstance(node, ast.Attribute) else None


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str | list | tuple | Enum)


def _as_given(name: str, value: Any) -> str | None:
    """ "--num-layers 3", or None if the flag has no value."""
    action = _flags[name]
    flag = action.option_strings[0]
    if action.nargs == 0:
        return flag if value == action.const else None
    if value is None or value == []:
        return None
    values = value if isinstance(value, list | tuple) else [value]
    return " ".join([flag, *(v.name if isinstance(v, Enum) else str(v) for v in values)])
