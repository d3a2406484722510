"""examples/core_loop.py with adapters on a frozen base, whose wrapper takes a norm's output as Megatron Bridge's does.

At the end it prints whether each adapter beside a linear that holds its norm has read the norm's output, to the bit.
"""

import sys

import torch
import torch.nn.functional as F
from launch import ROOT

sys.path.insert(0, str(ROOT))


class Adapter(torch.nn.Module):
    def __init__(self, to_wrap: torch.nn.Module):
        super().__init__()
        self.to_wrap, (n, k) = to_wrap, to_wrap.weight.shape
        self.a = torch.nn.Parameter(torch.randn(4, k).bfloat16() * k**-0.5)
        self.b = torch.nn.Parameter(torch.zeros(n, 4).bfloat16())
        self.read: torch.Tensor | None = None

    def base_linear_forward(self, x):
        y, bias = self.to_wrap(x)
        return (*y, bias) if isinstance(y, tuple) else (y, x, bias)

    def forward(self, x):
        y, self.read, bias = self.base_linear_forward(x)
        if hasattr(self.to_wrap, "layer_norm_weight"):
            base = self.to_wrap
            normed = F.layer_norm(x, x.shape[-1:], base.layer_norm_weight, base.layer_norm_bias)
            reads.append(torch.equal(self.read, normed))
        return y + F.linear(F.linear(self.read, self.a), self.b), bias


def adapted(model: torch.nn.Module) -> torch.nn.Module:
    model.requires_grad_(False)
    for layer in model.decoder.layers:
        for parent in layer.self_attention, layer.mlp:
            for name, linear in list(parent.named_children()):
                if name.startswith("linear_"):
                    setattr(parent, name, Adapter(linear))
    return model


reads: list[bool] = []
source = (ROOT / "examples/core_loop.py").read_text()
for old, new in {"model.cuda()": "adapted(model).cuda()"}.items():
    assert old in source, old
    source = source.replace(old, new)
exec(compile(source, "core_loop.py", "exec"), {"__name__": "__main__", "adapted": adapted})
print(f"adapters that read a norm's output: {sum(reads)} of {len(reads)}", flush=True)
