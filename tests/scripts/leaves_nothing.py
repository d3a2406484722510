"""Train as pretrain_gpt_fp8.py does, uninstall the plugin, and print what is not as it was before: "left NAME\\n".

Names of Megatron, torch and Python that the table of hooks has, and what modules and classes of the package hold. First
comes "hooked N": how many names of the table were ours when training began; "there N": values that were compared. With
FORGET_NOTHING in the environment uninstall() does not what it should.
"""

import functools
import importlib
import os
import pkgutil
import runpy
import sys
import types
from typing import Any

import torch
from launch import ROOT

sys.path.insert(0, str(ROOT))
import megatron_fp8
from megatron_fp8 import cpu, hooks, plugin
from megatron_fp8.rebind import NOTHING, find

PACKAGE = megatron_fp8.__name__
# What a process may know for good: of the machine, of files that do not change, and locks that end with the process.
FACTS = {
    "megatron_fp8.checkpoint.saves._locks": "of the folders that this process saves in, until it ends",
    "megatron_fp8.flags.stock_errors._flags": "Megatron's own flags, for lines about its errors",
    "megatron_fp8.flags.stock_errors._tree": "source files, parsed",
    "megatron_fp8.flags.args_file._loader": "a class of PyYAML's",
    "megatron_fp8.flags.yaml_file.safe_loader": "a class of PyYAML's",
    "megatron_fp8.gemm.cublaslt_library": "which library this machine has",
    "megatron_fp8.gemm.interface.plain": "an epilogue without parts for each type of result",
    "megatron_fp8.gemm.plain": "the same function",
    "megatron_fp8.layers.parcel._scalar": "a ticket's one element for each type and device",
    "megatron_fp8.ops.triton": "compiled kernels",
}


def state(value: Any, depth: int = 4) -> Any:
    """What two looks at a value are compared by: what it holds, and who it is."""
    own = getattr(type(value), "__module__", "").startswith(PACKAGE)
    if hasattr(value, "cache_info"):
        return value.cache_info().currsize
    if isinstance(value, int | float | str | bytes | torch.dtype | None):
        return value
    if isinstance(value, types.ModuleType) or depth == 0:
        return id(value)
    if isinstance(value, dict):
        return id(value), [(state(k, 0), state(v, depth - 1)) for k, v in value.items()]
    if isinstance(value, list | tuple | set | frozenset):
        return id(value), [state(entry, depth - 1) for entry in value]
    if isinstance(value, type) and value.__module__.startswith(PACKAGE):
        return id(value), [(k, state(v, depth - 1)) for k, v in vars(value).items() if not k.startswith("__")]
    if own and hasattr(value, "__dict__"):
        return id(value), [(k, state(v, depth - 1)) for k, v in vars(value).items()]
    return id(value)


def package() -> dict[str, Any]:
    """{name: value} of all that modules of the package hold."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name.startswith(PACKAGE) and ".tools" not in name:
            found |= {f"{name}.{key}": value for key, value in vars(module).items() if not key.startswith("__")}
    return found


def names() -> dict[str, Any]:
    """{name: value} of the table's."""
    found = {}
    for hook in hooks.of_modules():
        owner = find(hook.owner)
        held: Any = owner if isinstance(owner, dict) else vars(owner)
        found[f"{hook.owner}.{hook.name}"] = held.get(hook.name, NOTHING)
    return found


cpu.uninstall()  # which the warm process has installed
for module in pkgutil.walk_packages(megatron_fp8.__path__, f"{PACKAGE}."):
    if ".tools" not in module.name and not module.name.endswith("__main__"):
        importlib.import_module(module.name)
before_names, before = names(), package()
before_state = {name: state(value) for name, value in before.items()}

flags_read = plugin.Run.flags_read


@functools.wraps(flags_read)
def counted(run):
    flags_read(run)
    ours = sum(value is not before_names[name] for name, value in names().items())
    print(f"hooked {ours}\n", end="", flush=True)


plugin.Run.flags_read = counted
runpy.run_path(str(ROOT / "pretrain_gpt_fp8.py"), run_name="__main__")
plugin.Run.flags_read = flags_read
if "FORGET_NOTHING" in os.environ:
    plugin.ParsedRuns.end = plugin.forget_said = lambda *_: None
plugin.uninstall()

after = package()
left = [name for name, value in names().items() if value is not before_names[name]]
for name in before_state.keys() | after.keys():
    if not any(name.startswith(fact) for fact in FACTS) and before_state.get(name) != state(after.get(name)):
        left.append(name)
print(f"there {len(before)}\n" + "".join(f"left {name}\n" for name in sorted(left)), end="", flush=True)
