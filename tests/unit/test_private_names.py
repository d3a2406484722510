"""The private names of torch and Triton that the package uses, in one list: what each serves, and what its loss breaks.

A name with an underscore may go in any release. So the list is compared with the sources, and every name is looked up
in the installed torch: a version that lacks one fails here, by name, before it fails in a run.
"""

import ast
import importlib

import pytest
import torch
from launch import ROOT

PACKAGE = ROOT / "megatron_fp8"
TORCH = {  # name: what needs it
    "torch._C": "the folder of the names below",
    "torch._C._autograd": "the folder of the name below",
    "torch._C._autograd._get_current_graph_task_keep_graph": "cross-entropy: whether its gradient may overwrite logits",
    "torch._C._cuda_getCurrentRawStream": "GEMMs and kernels: the current stream's pointer, by one call",
    "torch._C._cuda_getDevice": "GEMMs and kernels: the current device, by one call",
    "torch._C._cuda_setRNGState": "cpu.py: Megatron prefers this name and looks whether it is there",
    "torch._C._get_sdp_priority_order": "attention: the fastest of SDPA's kernels comes first, and is put back",
    "torch._C._set_sdp_priority_order": "attention: as above",
    "torch._C._storage_Use_Count": "cross-entropy: whether anything else holds the logits",
    "torch._dynamo": "cpu.py: imported before the stand-ins for torch.cuda",
    "torch._foreach_mul_": "the clip of stock's gradients: one launch for all, in place",
    "torch._foreach_norm": "gradient norm, update norm: one launch for all tensors",
    "torch._foreach_sub_": "--fp8-log-update-norm",
    "torch._fused_sdp_choice": "context parallelism: which of SDPA's kernels takes these shapes",
    "torch._scaled_mm": "--fp8-gemm-backend torch, and the fallback without cuBLASLt",
    "torch.distributed.distributed_c10d._get_default_store": "a failed save: one rank's line reaches the others",
    "torch.nn.modules.module._has_any_global_hook": "a linear: whether hooks may see or change its input",
    "torch.ops.aten._flash_attention_backward": "context parallelism with packed documents",
    "torch.ops.aten._flash_attention_forward": "context parallelism with packed documents",
    "torch.ops.aten._scaled_dot_product_cudnn_attention": "context parallelism: attention with its log-sum-exp",
    "torch.ops.aten._scaled_dot_product_cudnn_attention_backward": "context parallelism",
    "torch.ops.aten._scaled_dot_product_flash_attention": "context parallelism",
    "torch.ops.aten._scaled_dot_product_flash_attention_backward": "context parallelism",
    "torch.ops.mkldnn._is_mkldnn_bf16_supported": "cpu.py: whether torch's BF16 products are slow on this processor",
    "torch.utils._device": "cpu.py: `with torch.device(...)`",
    "torch.utils._device._device_constructors": "cpu.py: as above; what torch keeps must be its own functions",
    "torch.utils.data.dataloader._BaseDataLoaderIter": "cpu.py: a data loader draws nothing from dropout's generator",
}
LOOKED_FOR = {"torch._C._cuda_setRNGState"}  # which torch has it or not: cpu.py asks


def private(module: ast.Module) -> set[str]:
    """Full names below torch with a part that starts with one underscore, as a file's code writes them."""
    means: dict[str, str] = {}  # a name of the file: torch's
    found: set[str] = set()

    def chain(node: ast.AST) -> str | None:
        if isinstance(node, ast.Name):
            return means.get(node.id)
        if isinstance(node, ast.Attribute) and (above := chain(node.value)):
            return f"{above}.{node.attr}"
        return None

    def note(name: str) -> None:
        parts = name.split(".")
        hidden = [i for i, part in enumerate(parts) if part.startswith("_") and not part.startswith("__")]
        found.update(".".join(parts[: i + 1]) for i in hidden)

    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    means[alias.asname or "torch"] = alias.name if alias.asname else "torch"
                    note(alias.name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                means[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                note(f"{node.module}.{alias.name}")
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and (name := chain(node.value)):
            means[node.targets[0].id] = name
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute) and (name := chain(node)):
            note(name)
        elif isinstance(node, ast.Tuple) and len(node.elts) == 2 and isinstance(node.elts[1], ast.Dict):
            owner = chain(node.elts[0])  # cpu.py's (owner, {name: stand-in})
            keys = [key.value for key in node.elts[1].keys if isinstance(key, ast.Constant)]
            for key in keys if owner else ():
                note(f"{owner}.{key}")
    return found


def look_up(name: str) -> object:
    owner, *rest = name.split(".")
    thing: object = importlib.import_module(owner)
    for part in rest:
        owner += f".{part}"
        try:
            thing = getattr(thing, part)
        except AttributeError:
            thing = importlib.import_module(owner)
    return thing


def test_the_list_is_what_the_sources_use():
    used = {name for path in PACKAGE.rglob("*.py") for name in private(ast.parse(path.read_text()))}
    assert used == set(TORCH)


def test_a_planted_name_is_found():
    planted = "import torch.nn.functional as F\nfrom torch import distributed as d\nx = d._hidden\nF._a.b(torch)\n"
    assert private(ast.parse(planted)) == {"torch.distributed._hidden", "torch.nn.functional._a"}
    assert private(ast.parse("import torch\nput((torch._C, {'_new': 1, 'old': 2}))")) == {"torch._C", "torch._C._new"}


@pytest.mark.parametrize("name", sorted(set(TORCH) - LOOKED_FOR))
def test_torch_has_it(name):
    assert look_up(name) is not None


def test_a_name_that_is_gone_is_an_error():
    with pytest.raises((AttributeError, ImportError)):
        look_up("torch._C._no_such_name")


def test_tensors_and_modules_have_theirs():
    """Of objects: a saved tensor's holders (cross-entropy), its version (rotary angles), a module's hooks (linear)."""
    x = torch.ones(2, requires_grad=True)
    saved = (x * x).grad_fn._saved_self
    assert saved._use_count() >= 1 and isinstance(saved._version, int)
    assert torch._C._storage_Use_Count(saved.untyped_storage()._cdata) >= 1
    module = torch.nn.Linear(2, 2)
    for name in ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks", "_parameters"):
        assert len(getattr(module, name)) == (2 if name == "_parameters" else 0)
    q = torch.randn(1, 1, 4, 8, requires_grad=True)
    fused = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).grad_fn
    assert hasattr(type(fused), "_saved_output")


def test_a_kernels_binder_is_where_it_was():
    """ops/triton/launch.py launches by Triton's own binder; with another Triton it launches as Triton does, slower."""
    triton = pytest.importorskip("triton")
    from triton.runtime import jit

    assert "device_caches" in jit.JITFunction.__init__.__code__.co_names, triton.__version__
