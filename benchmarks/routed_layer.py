"""Time the routed part of a layer of experts, forward and backward: together, one by one, in BF16; one Hopper GPU.

    megatron-fp8 build                           the CUTLASS library, for "together"
    python benchmarks/routed_layer.py --csv routed.csv
    python benchmarks/routed_layer.py --counts equal skewed --csv FILE      what imbalance costs: 4 : 1
    python benchmarks/routed_layer.py --counts skewed --tokens 4096 --only Qwen3

From tokens to the sums of their experts' results, and back to the tokens' gradients and the weights': gated experts of
Qwen3-30B-A3B (128, top 8, hidden 2048, ffn 768) and like DeepSeek-V2-Lite (64, top 6, 2048, 1408), weights in E4M3,
gradients in BF16, delayed scales.

    fused        layers/grouped_experts.py, as --fp8-experts --moe-grouped-gemm, with our CUTLASS kernels
    cut apart    the same, but results are cut, and then added up by stock's atomics
    together     besides with stock's activation function, which writes BF16, and casts that read it
    by Triton    together with Triton's, as without CUTLASS' library
    one by one   two linears an expert, as --fp8-experts alone
    BF16         torch's linears, one expert after the other, as stock's SequentialMLP
    grouped BF16 torch._grouped_mm with torch's own gradients

The router is not in it, nor the sort of its choices, which all have alike: of each row, sorted by expert, the token is
given. The first four gather the tokens' rows by the cast, and the others beforehand. "parts" times what `together` and
`fused` consist of. Each runs alone twice, in turns (gemm/timing.py). First the results of the FP8 systems are compared:
relative difference of the output and of the gradients of the tokens, the weights and the probabilities. With equal and
skewed counts a line says what a skewed layer takes longer.
"""

import argparse
import contextlib
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.nn.functional as F
from grouped_gemm import COUNTS, MODELS, counts_of
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl, weighted_swiglu_back
from stamp import commit
from train_step import append

from megatron_fp8 import ops
from megatron_fp8.engine.bank import Bank
from megatron_fp8.engine.events import Events
from megatron_fp8.engine.grad_store import DenseStore, GradSink
from megatron_fp8.engine.owned_weight import OwnedWeight, Scratch
from megatron_fp8.gemm import grouped
from megatron_fp8.gemm.cutlass import CUTLASS
from megatron_fp8.gemm.cutlass_build import Unavailable
from megatron_fp8.gemm.interface import use
from megatron_fp8.gemm.timing import in_turns, under_load
from megatron_fp8.layers import grouped_experts
from megatron_fp8.layers.linear import product
from megatron_fp8.layers.local_dispatch import Gathered
from megatron_fp8.layers.parcel import Parcel, plan
from megatron_fp8.numerics import E4M3, E5M2
from megatron_fp8.numerics.scaling import DelayedScaling
from megatron_fp8.ops.groups import groups_of

TOP = {"Qwen3-30B-A3B": 8, "DeepSeek-V2-Lite": 6}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BF16 = torch.bfloat16


class Layer:
    """The weights of a layer's experts, and tokens for them."""

    def __init__(self, experts: int, hidden: int, ffn: int, counts: torch.Tensor, tokens: int):
        self.host, self.counts, rows = counts.tolist(), counts.to(DEVICE), int(counts.sum())
        self.token = routed(counts, tokens).to(DEVICE)
        self.x, self.dy = (torch.randn(tokens, hidden, device=DEVICE).to(BF16) for _ in range(2))
        self.probs = torch.rand(rows, device=DEVICE, requires_grad=True)
        self.config = SimpleNamespace(
            forward_format=E4M3, grad_format=E5M2, margin=0, gemm="fp8", weight="fp8", emulate=None, wgrad=True,
            tp_gather="bf16", tp_reduce_scatter="bf16", activations=False, keep_transpose_cache=False, level="O3",
            seed=1,
        )  # fmt: skip
        self.scaling = DelayedScaling([E4M3, E5M2] * (2 * experts), 1, "most_recent", 0, DEVICE)
        self.events, self.scratch, self.stores = Events(), Scratch(), []
        self.fc1, self.fc2 = self._weights(experts, 2 * ffn, hidden, 0), self._weights(experts, hidden, ffn, 1)
        self.banks = Bank(self.fc1), Bank(self.fc2)
        self.like = SimpleNamespace(
            activation_func=F.silu,
            config=SimpleNamespace(
                use_te_activation_func=False, bias_activation_fusion=True, activation_func_fp8_input_store=False,
                gated_linear_unit=True, activation_func=F.silu, activation_func_clamp_value=None, glu_linear_offset=0.0,
            ),
        )  # fmt: skip
        self.exact = [[w.dense().detach().clone().requires_grad_() for w in same] for same in (self.fc1, self.fc2)]
        self.one_by_one()  # the first step's amaxes
        self.scaling.update()

    def _weights(self, experts: int, n: int, k: int, which: int) -> list[OwnedWeight]:
        values = torch.randn(experts, n, k, device=DEVICE) / k**0.5
        scale = torch.tensor(64.0, device=DEVICE)
        codes = ops.quantize(values, E4M3, scale)
        store, weights = DenseStore(1, values.numel(), "bf16", DEVICE), []
        for e in range(experts):
            weight = OwnedWeight(torch.nn.Parameter(codes[e], requires_grad=False), self.config)
            weight.param.requires_grad = True
            weight.changed(scale.reciprocal())
            weight.sink = GradSink(store, e * n * k, torch.Size((n, k)), (1,))
            weight.events, weight.scratch = self.events, self.scratch
            weight.casts.scaling, weight.casts.slots = self.scaling, tuple(4 * e + 2 * which + i for i in range(2))
            weights.append(weight)
        self.stores.append(store)
        return weights

    def _begin(self) -> torch.Tensor:
        for weight in (*self.fc1, *self.fc2):
            weight.sink.begin_step(1)
        self.probs.grad = None
        return self.x.detach().requires_grad_()

    def _switched(self, weighs: bool, adds_up: bool) -> contextlib.ExitStack:
        """What a GPU does, or not, even if there is none."""
        both = contextlib.ExitStack()
        both.enter_context(mock.patch.object(grouped_experts, "_weighs", lambda *_: weighs))
        both.enter_context(mock.patch.object(grouped_experts, "adds_up", lambda _: adds_up))
        return both

    def _back(self, x: torch.Tensor, y: torch.Tensor) -> tuple:
        y.backward(self.dy)
        return y, x.grad

    def _added(self, rows: torch.Tensor) -> torch.Tensor:
        """The tokens' sums, as stock's unpermute adds them up."""
        width = rows.shape[1]
        return rows.new_zeros(self.x.shape).scatter_add_(0, self.token.unsqueeze(1).expand(-1, width), rows)

    def _experts(self, x: torch.Tensor) -> torch.Tensor:
        rows = Gathered.apply(x, self.token)
        return grouped_experts.experts_together(self.like, *self.banks, rows, self.counts, self.probs, True)

    def fused(self) -> tuple:
        x = self._begin()
        with self._switched(True, True):
            return self._back(x, self._experts(x))

    def cut_apart(self, weighs: bool = True) -> tuple:
        x = self._begin()
        with self._switched(weighs, False):
            return self._back(x, self._added(self._experts(x)))

    def together(self) -> tuple:
        return self.cut_apart(False)

    def by_triton(self) -> tuple:
        with mock.patch.object(grouped, "_kernel", lambda *types, **how: None):
            return self.together()

    def one_by_one(self) -> tuple:
        x = self._begin()
        results = []
        rows = x.index_select(0, self.token).split(self.host)
        each = zip(self.fc1, self.fc2, rows, self.probs.split(self.host), strict=True)
        for fc1, fc2, mine, probs in each:
            count = mine.shape[0]
            missing = max(-count % 16, 16 if count == 0 else 0)
            mine, probs = F.pad(mine, (0, 0, 0, missing)), F.pad(probs, (0, missing))
            h = weighted_bias_swiglu_impl(_linear(mine, fc1), None, probs.unsqueeze(-1), False)
            results.append(_linear(h, fc2)[:count])
        return self._back(x, self._added(torch.cat(results)))

    def bf16(self) -> tuple:
        x = self.x.detach().requires_grad_()
        results, rows = [], x.index_select(0, self.token)
        for fc1, fc2, mine, probs in zip(*self.exact, rows.split(self.host), self.probs.split(self.host), strict=True):
            h = weighted_bias_swiglu_impl(F.linear(mine, fc1), None, probs.unsqueeze(-1), False)
            results.append(F.linear(h, fc2))
        return self._back(x, self._added(torch.cat(results)))

    def grouped_bf16(self) -> tuple:
        if not hasattr(self, "_stacked"):
            self._stacked = [torch.stack([w.detach() for w in same]).requires_grad_() for same in self.exact]
            self._ends = self.counts.cumsum(0).int()
        (fc1, fc2), x = self._stacked, self.x.detach().requires_grad_()
        h = torch._grouped_mm(x.index_select(0, self.token), fc1.mT, offs=self._ends)
        h = weighted_bias_swiglu_impl(h, None, self.probs.unsqueeze(-1), False)
        return self._back(x, self._added(torch._grouped_mm(h, fc2.mT, offs=self._ends)))

    def parts(self) -> dict:
        """{part of `together` or `fused`: call}."""
        given = self.token.numel()
        of = groups_of(self.counts, given, DEVICE).reading(self.token, self.x.shape[0])
        plain = groups_of(self.counts, given, DEVICE)
        fc1, fc2 = self.banks
        both = {"rows": True, "columns": True, "training": True}
        x, dy = fc1.cast(self.x, 0, of, **both), fc2.cast(self.dy, 1, of, **both)
        h = _rows(x, fc1.quantized(), True)
        gated = h[:, : h.shape[1] // 2].contiguous()  # as the activation function leaves it
        act = fc2.cast(gated, 0, of, **both)
        dh = fc1.cast(h, 1, of, **both)
        probs, dprobs = torch.rand(of.rows, 1, device=DEVICE), torch.empty(given, device=DEVICE)
        act_grad, scale = torch.randn_like(gated), torch.ones(self.counts.numel(), device=DEVICE)
        how = {"rows": True, "columns": True, "amax_out": torch.zeros_like(scale)}
        back = act_grad, h, self.probs.detach(), plain, E5M2, scale
        y = torch.randn(of.rows, self.x.shape[1], device=DEVICE).to(BF16)
        cut = y.index_select(0, of.place)
        into = [[w.sink.room() for w in same] for same in (self.fc1, self.fc2)]
        turned = [bank.transposed(bank.quantized()) for bank in self.banks]
        return {
            "tables": lambda: groups_of(self.counts, given, DEVICE),
            "tables fused": lambda: groups_of(self.counts, given, DEVICE).reading(self.token, self.x.shape[0]),
            "cast x": lambda: fc1.cast(self.x, 0, of, **both),
            "cast act": lambda: fc2.cast(gated, 0, of, **both),
            "cast dy": lambda: fc2.cast(self.dy, 1, of, **both),
            "cast dh": lambda: fc1.cast(h, 1, of, **both),
            "activation": lambda: weighted_bias_swiglu_impl(h, None, probs, False),
            "activation back": lambda: weighted_swiglu_back(act_grad, h, probs),
            "act fused": lambda: ops.weighted_quantize(h, self.probs.detach(), plain, E4M3, scale, **how),
            "back fused": lambda: ops.weighted_backward_quantize(*back, dprobs=dprobs, **how),
            "cut": lambda: y.index_select(0, of.place),
            "unpermute": lambda: self._added(cut),
            "unpermute back": lambda: self.dy[self.token],
            "permute back": lambda: self.x.new_zeros(self.x.shape).index_add_(0, self.token, cut),
            "cut fused": lambda: ops.combine(y, of.table),
            "transpose fc1": lambda: fc1.transposed(fc1.quantized()),
            "transpose fc2": lambda: fc2.transposed(fc2.quantized()),
            "fc1": lambda: _rows(x, fc1.quantized(), True),
            "fc2": lambda: _rows(act, fc2.quantized(), True),
            "fc1 dgrad": lambda: _rows(dh, turned[0]),
            "fc2 dgrad": lambda: _rows(dy, turned[1]),
            "fc1 wgrad": lambda: grouped.sums(dh, x, into[0]),
            "fc2 wgrad": lambda: grouped.sums(dy, act, into[1]),
        }


def routed(counts: torch.Tensor, tokens: int) -> torch.Tensor:
    """(R,) int64: for each row, sorted by expert, its token, drawn at random. All tokens have the same number of rows,
    and no expert twice if none has more rows than there are tokens. An expert's tokens ascend."""
    expert = torch.repeat_interleave(torch.arange(counts.numel()), counts.cpu())
    token = torch.randperm(tokens)[torch.arange(expert.numel()) % tokens]
    return token[(expert * tokens + token).argsort()]


def _rows(a: grouped.GroupedTensor, weights: grouped.GroupedWeights, fast_accum: bool = False) -> torch.Tensor:
    out = torch.empty(a.groups.rows, weights.payload.shape[1], dtype=BF16, device=DEVICE)
    return grouped.rows(a, weights, out, fast_accum=fast_accum)


def _linear(x: torch.Tensor, weight: OwnedWeight) -> torch.Tensor:
    return product(x, torch.zeros(0, requires_grad=True), Parcel(plan(weight, None, False, False, True)))


def off(mine: torch.Tensor, other: torch.Tensor) -> float:
    return float((mine.float() - other.float()).norm() / other.float().norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only models whose names begin with this")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--counts", nargs="+", default=["random", "skewed"], choices=COUNTS)
    for name in ("experts", "hidden", "ffn"):
        parser.add_argument(f"--{name}", type=int, help="instead of the models'")
    parser.add_argument("--check", action="store_true", help="compare results, and stop")
    parser.add_argument("--csv")
    args = parser.parse_args()
    torch.manual_seed(1)
    served = "none"
    if DEVICE.type == "cuda":
        try:
            use("auto")
            served = CUTLASS.version
        except Unavailable as reason:
            print(f"together is by Triton: {reason}")
    gpu = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "none"
    where = {"gpu": gpu, "torch": torch.__version__, "cutlass library": served, "commit": commit()}
    print(", ".join(f"{key} {value}" for key, value in where.items()))
    if args.csv and Path(args.csv).exists():
        parser.error(f"--csv {args.csv}: the file exists; name a new one")
    for model, sizes in MODELS.items():
        asked = args.experts, args.hidden, args.ffn
        experts, hidden, ffn = (mine or theirs for mine, theirs in zip(asked, sizes, strict=True))
        fused: dict[str, float] = {}
        for kind in args.counts if model.startswith(args.only) else ():
            counts = counts_of(kind, experts, args.tokens * TOP[model] // experts, 1)
            layer = Layer(experts, hidden, ffn, counts, args.tokens)
            y, dx = layer.one_by_one()
            dws = [store.dense().clone() for store in layer.stores]
            dprobs = layer.probs.grad
            for name, call in (("together", layer.together), ("cut apart", layer.cut_apart), ("fused", layer.fused)):
                y_too, dx_too = call()
                dws_too = [store.dense() for store in layer.stores]
                pairs = (y_too, y), (dx_too, dx), *zip(dws_too, dws, strict=True), (layer.probs.grad, dprobs)
                offs = ", ".join(f"{off(a, b):.1e}" for a, b in pairs)
                print(f"{model}, {kind}: {name} against one by one: {offs}", flush=True)
            del y, dx, dws, dprobs, y_too, dx_too, dws_too, pairs
            if args.check:
                continue
            systems = {"fused": layer.fused, "cut apart": layer.cut_apart, "together": layer.together}
            systems |= {"by Triton": layer.by_triton, "one by one": layer.one_by_one, "BF16": layer.bf16}
            systems |= {"grouped BF16": layer.grouped_bf16}
            for title, calls in ("systems", systems), ("parts", layer.parts()):
                for call in calls.values():
                    call()
                bursts = in_turns(calls, 4)
                ms = under_load(calls, bursts)
                rows = []
                for name in calls:
                    row = {"model": model, "tokens": args.tokens, "counts": kind, "what": title, "name": name}
                    rows.append(row | {"ms": round(ms[name], 4), "burst ms": round(bursts[name], 4)} | where)
                    print(f"  {title:8} {name:14} {ms[name]:8.3f} ms, burst {bursts[name]:8.3f}", flush=True)
                fused[kind] = ms.get("fused", fused.get(kind, 0.0))
                if args.csv:
                    append(args.csv, list(rows[0]), rows)  # at once: the next may never end
            del layer, systems, calls
            torch.cuda.empty_cache()
        if {"equal", "skewed"} <= fused.keys():
            print(f"{model}: skewed counts take {fused['skewed'] / fused['equal'] - 1:+.1%}", flush=True)


if __name__ == "__main__":
    main()
