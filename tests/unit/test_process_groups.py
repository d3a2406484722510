"""Process groups: the set of weights, or the model, says which; one file asks Megatron for them."""

import ast
import shutil

from launch import ROOT

PACKAGE = ROOT / "megatron_fp8"
MAY_ASK = {
    "engine/weight_groups.py",  # it describes the sets
    "layers/cross_entropy.py",  # stock's own default, if a script names no group
}


def askers(package) -> set[str]:
    """Files that import Megatron's global state of process groups; those of tools/ aside, which train nothing."""
    found = set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                imported = {f"{node.module}.{alias.name}" for alias in node.names}
                asked = {name for name in imported if "parallel_state.get_" in name or name.endswith(".mpu")}
                if asked - {"megatron.core.parallel_state.get_global_memory_buffer"}:
                    found.add(str(path.relative_to(package)))
    return {file for file in found if not file.startswith("tools/")}


def test_one_file_asks_megatron():
    assert askers(PACKAGE) == MAY_ASK


def test_planted_questions_are_found(tmp_path):
    copy = tmp_path / "package"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for file, line in {
        "engine/level_line.py": "from megatron.core import mpu",
        "layers/norm.py": "from megatron.core.parallel_state import get_tensor_model_parallel_rank",
    }.items():
        (copy / file).write_text((copy / file).read_text() + f"\n{line}\n")
    assert askers(copy) - askers(PACKAGE) == {"engine/level_line.py", "layers/norm.py"}
