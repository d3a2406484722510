"""A weight that the engine owns, as its linear sees it.

The linear asks it for the weight as a GEMM reads it (`dense`, `quantized`, `transposed`), to cast its operands with the
linear's scales (`casts`), and to take a gradient (`take_gradient`). The engine decides where the bytes lie, which ranks
have parts of them, and how gradients are stored and summed: a `Bucket` (bucket.py) takes the weight over. To stock
Megatron the parameter is frozen (`requires_grad=False`): its DDP, gradient buffers and optimizer ignore it.

W is quantised once a step; if it is stored in E4M3 (O3), it is read as it is. W^T is made when dgrad needs it, in one
scratch buffer that all weights of an engine share. `--keep-fp8-transpose-cache` keeps each weight's W^T instead: it
costs a byte a weight and saves a pass a micro-batch.
"""

import contextlib
import itertools
import math
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import unwrap_model

from .. import gemm, ops
from ..flags.config import Fp8Config
from ..flags.emulate import linear_name
from ..numerics.scaled import ScaledTensor
from ..numerics.scaling import DelayedScaling, compute_scale, power_of_two_scale
from ..ops import source
from ..ops.source import Castable
from ..ranks import all_reduce_largest, gathered
from .events import Events, Unwatched
from .frozen import own, refuse_changed, refuse_unattached
from .grad_store import GradSink

if TYPE_CHECKING:
    from .dispatch_scales import DispatchScales
    from .set_parts import SetParts
    from .weight_groups import WeightGroups

INPUT, GRAD = 0, 1  # the two operands that a linear casts
UNSEEN: Events = Unwatched()  # for a model without an engine


class Scratch:
    """Memory that lasts until the next call on the same stream: one buffer, as large as the largest request.

    memory: the buffer, or None.
    """

    def __init__(self) -> None:
        self.memory: torch.Tensor | None = None
        self._views: dict[tuple, torch.Tensor] = {}  # of the memory there is

    def like(self, payload: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Room for `shape`, of the payload's one-byte type, on its device."""
        view = self._views.get((payload.dtype, shape))
        if view is None:
            size = math.prod(shape)
            if self.memory is None or self.memory.numel() < size:
                self.memory = torch.empty(size, dtype=torch.uint8, device=payload.device)
                self._views.clear()
            view = self.memory[:size].view(payload.dtype).view(shape)
            self._views[payload.dtype, shape] = view
        return view


class Casts:
    """The scales of a linear's two operands: from their own amax, or delayed.

    Attributes:
        scaling, slots: delayed scaling's state and the places of INPUT and GRAD in it; None for tensorwise.
        dispatch: the scales of other ranks' experts, for an expert's linear (--fp8-dispatch); else None.
    """

    def __init__(self, config: Fp8Config):
        self._config = config
        self.scaling: DelayedScaling | None = None
        self.slots: tuple[int, int] = (0, 0)
        self.dispatch: DispatchScales | None = None

    def quantize(
        self, x: Castable, role: int, *, columns: bool, rows: bool, training: bool, group
    ) -> tuple[ScaledTensor, torch.Tensor]:
        """OwnedWeight.cast, without telling observers."""
        scaling, slot, amax_out = self.scaling, self.slots[role], None
        fmt = self._config.forward_format if role == INPUT else self._config.grad_format
        if scaling is not None and scaling.warm:
            scale, scale_inv, amax = scaling.slot(slot)
            amax_out = amax if training else None
        else:
            x = source.values(x)
            amax = ops.amax(x)
            if group is not None:
                all_reduce_largest(amax, group)
            if scaling is not None and training:
                scaling.record(slot, amax)
            scale = compute_scale(amax, fmt, margin=self._config.margin)
            scale_inv = scale.reciprocal()
        if isinstance(x, torch.Tensor):
            payload, payload_t = source.cast(x, fmt, scale, rows=rows, columns=columns, amax_out=amax_out)
        else:
            payload, payload_t = x.cast(fmt, scale, rows=rows, columns=columns, amax_out=amax_out)
        return ScaledTensor(payload, scale_inv, payload_t), scale

    def follow(self, role: int, x: torch.Tensor) -> None:
        """Keep a delayed scale up to date while its linear is out of FP8: x is what it would have cast."""
        if self.scaling is not None:
            self.scaling.record(self.slots[role], ops.amax(x))


class OwnedWeight:
    """One linear's weight; see the top of the file.

    Set when the model is built:
        param: (N, K) BF16 or E4M3, frozen to stock Megatron (frozen.py).
        path, layer_number: its place in the model.
        expert: if it belongs to an expert, the expert's number among those of all ranks; else None.
        storage: "bf16" or "fp8": the type that the engine will store param in.
        emulate: how a BF16 linear's operands are rounded, or None.
        fp8: whether the GEMMs are in FP8: not with `--fp8-gemm bf16`, `--first-last-layers-bf16`, `--fp8-bf16-layers`,
            nor for a while after a spike (`--fp8-on-spike bf16-fallback`). It changes only between steps.

    Given by the engine (`attach`):
        of: its set: process groups and ranks; None without an engine.
        sink: takes its gradients; None until an engine is attached, and if it is frozen.
        casts: the scales of its linear's operands.
        events, scratch: the engine's.

    Of the step:
        step: the number of the update, from 1.
        pending: forward passes whose gradient has not come yet.
        forwards: those that keep nothing for a backward pass, and those that do.
    """

    def __init__(self, param: torch.nn.Parameter, config: Fp8Config):
        self.param, self.config = own(param), config
        self.path, self.layer_number = "", 0
        self.expert: int | None = None
        self.fp8, self.storage, self.emulate = config.gemm == "fp8", config.weight, config.emulate
        self.of: WeightGroups | None = None
        self._stored: ScaledTensor | None = None
        self._scale_inv: tuple[torch.Tensor, int | None] | None = None
        self.sink: GradSink | None = None
        self.casts = Casts(config)
        self.events, self.scratch = UNSEEN, Scratch()
        self._load: Callable[[torch.Tensor], None] | None = None
        self._on_gradient: Callable[[OwnedWeight], None] | None = None
        self._need: Callable[[], None] | None = None  # waits for the weight, while it is on its way
        self._quantized: ScaledTensor | None = None
        self._transposed: torch.Tensor | None = None
        self._version = -1  # of param, when it was quantised
        self._exported: list[weakref.ref[torch.Tensor]] = []
        self.begin_step(1)

    @property
    def name(self) -> str:
        """Its linear's whole path in the model, layers numbered from 0."""
        return linear_name(self.path, self.layer_number)

    @property
    def key(self) -> str:
        """Its name in checkpoints; the engine's weights have one."""
        assert self.of is not None
        return self.of.key(self)

    @property
    def identity(self) -> tuple[int, ...]:
        """Numbers that no other weight has, for noise; () without an engine."""
        return () if self.of is None else self.of.identity(self, self.config.seed)

    @property
    def rank(self) -> int:
        """The number of this replica of the weight, for noise; 0 without an engine."""
        return 0 if self.of is None else self.of.data.rank()

    @property
    def trained(self) -> bool:
        """Whether it has gradients: not if a script has frozen it (frozen.py)."""
        return not self.param.frozen

    def attach(
        self,
        parts: "SetParts",
        *,
        load: Callable[[torch.Tensor], None] | None = None,
        sink: GradSink | None = None,
        on_gradient: Callable[["OwnedWeight"], None] | None = None,
    ) -> None:
        """The engine takes the weight over, and gives it everything at once.

        Args:
            parts: what it shares with the others of its set.
            load: `load` calls it, if the weight is stored in E4M3.
            sink: takes its gradients; None if it is frozen.
            on_gradient: called with this weight after each gradient.
        """
        self.of, self.events, self.scratch = parts.of, parts.events, parts.scratch
        self.sink, self._load, self._on_gradient = sink, load, on_gradient
        if self in parts.slots:
            self.casts.scaling, self.casts.slots = parts.scaling, parts.slots[self]
            self.casts.dispatch = parts.dispatch

    def stand_beside(self, twin: "OwnedWeight", load: Callable[[torch.Tensor], None]) -> None:
        """Compute as `twin` does, the same weight of another model, with the scales of its casts.

        load: `load` calls it, if the weight is E4M3.
        """
        self.fp8, self.casts, self.scratch = twin.fp8, twin.casts, twin.scratch
        self.of, self._load = twin.of, load

    @property
    def bank(self) -> tuple[str, int] | None:
        """What the same linears of a layer's experts have in common, if they are to be computed together; else None."""
        if self.expert is None or not self.config.draws_grouped:
            return None
        return re.sub(r"\.local_experts\.\d+\.", ".", self.path), self.layer_number

    def belong_to_expert(self, number: int) -> None:
        """The weight belongs to the expert of this number, among those of all ranks."""
        self.expert = number

    def begin_step(self, step: int) -> None:
        """The step begins that makes update number `step`. Raises UserError as `makes_gradient`."""
        self.step, self.pending, self.forwards = step, 0, [0, 0]
        self._check_unchanged()

    def evaluate_at(self, step: int) -> None:
        """Evaluations without training begin: from now on forward passes are as in this step."""
        self.step = step

    def makes_gradient(self) -> bool:
        """Whether the backward pass of a forward pass that begins now would make a gradient of the weight.

        Raises UserError if a script has frozen or thawed the weight since the optimizer was built, or if there is
        no engine to train it.
        """
        frozen = self.param.frozen
        if frozen != (self.sink is None):
            self._check_unchanged()
            if not frozen:
                refuse_unattached(self.config.level, self.name)
        return not frozen

    def await_gradient(self) -> None:
        """A backward pass will bring one more gradient."""
        self.pending += 1

    def count_forward(self, keep: bool) -> int:
        """A forward pass begins. keep: whether it keeps tensors for a backward pass. Returns how many forward passes of
        its kind the step has had before."""
        self.forwards[keep] += 1
        return self.forwards[keep] - 1

    def _check_unchanged(self) -> None:
        if self.events is not UNSEEN and self.trained != (self.sink is not None):
            refuse_changed(self.config.level, self.name, frozen=self.param.frozen)

    def keep_in_bf16(self) -> None:
        """Leave it out of FP8: BF16 GEMMs, BF16 storage, no emulation."""
        self.fp8, self.storage, self.emulate = False, "bf16", None

    def compute_in_fp8(self, on: bool) -> None:
        """From the next step on its GEMMs are in FP8 (`on`) or in BF16."""
        self.fp8 = on

    def move_to(self, memory: torch.Tensor) -> None:
        """From now on the parameter's values lie in `memory`, which has as many elements."""
        self.param.data = memory.view(self.param.shape)

    def changed(self, scale_inv: torch.Tensor | None = None, place: int | None = None) -> None:
        """The parameter has other values now. scale_inv: if it is E4M3, the present one, 0-d FP32; or those of several
        weights (n,), of which its own is at `place`."""
        if scale_inv is not None:
            self._stored, self._scale_inv = None, (scale_inv, place)
        self.invalidate()

    @property
    def stored(self) -> ScaledTensor | None:
        """An E4M3 param with its scale; None until the engine has made it. A view of the scale is made when it is asked
        for: a step by a graph changes thousands of experts' scales, and asks for none."""
        if self._stored is None and self._scale_inv is not None:
            scale_inv, place = self._scale_inv
            self._stored = ScaledTensor(self.param.data, scale_inv if place is None else scale_inv[place])
        return self._stored

    def invalidate(self) -> None:
        """Quantise and transpose again at the next use."""
        self._version = -1
        self._transposed = None

    def load(self, values: torch.Tensor) -> None:
        """Set a weight stored in E4M3 to values (N, K) of any float type; collective over the ranks that share it."""
        assert self._load is not None
        self._load(values)

    @contextlib.contextmanager
    def lent(self, load: Callable[[torch.Tensor], None]) -> Iterator[None]:
        """Inside, an E4M3 weight takes other values by `load`. At the end its own scale and its own `load` come back.

        The caller must have put back its bytes by then.
        """
        scale_inv, before, self._load = self._scale_inv, self._load, load
        try:
            yield
        finally:
            self._stored, self._scale_inv, self._load = None, scale_inv, before
            self.invalidate()

    def await_gather(self, need: Callable[[], None]) -> None:
        """The weight is on its way from other ranks: `need` waits for it, before the next use."""
        self._need = need

    def gathered(self) -> None:
        """The weight is here."""
        self._need = None

    def arrive(self) -> None:
        """Wait until the weight is here; called before every use."""
        if self._need is not None:
            self._need()

    def dense(self) -> torch.Tensor:
        """The weight (N, K) in BF16: the parameter, or of E4M3 a copy, exactly."""
        self.arrive()
        return self.param if self.stored is None else self.stored.dequantize(torch.bfloat16)

    def quantized(self) -> ScaledTensor:
        """The weight in E4M3: as it is stored, or quantised once and kept until the weight changes."""
        self.arrive()
        if self._scale_inv is not None:
            stored = self._stored or self.stored
            assert stored is not None
            return stored
        if self.outdated:
            self.drop_copies()
            self.quantize()
        assert self._quantized is not None
        return self._quantized

    @property
    def outdated(self) -> bool:
        """Whether a BF16 weight that is here is not quantised yet, or has changed since."""
        return self._scale_inv is None and self._version != self.param._version

    def drop_copies(self) -> None:
        """Free the copies in FP8, before their successors are allocated."""
        self._quantized = self._transposed = None

    def quantize(self, out: torch.Tensor | None = None) -> None:
        """Quantise a BF16 weight anew, into `out` (N, K) if that is given; `quantized` gives the result."""
        fmt, weight = self.config.forward_format, self.param.detach()
        # Validation without an optimizer (--skip-train) meets E4M3 weights in BF16: a power of two changes no bit.
        scaled_to = power_of_two_scale if self.storage == "fp8" else compute_scale
        scale = scaled_to(ops.amax(weight), fmt, margin=self.config.margin)
        self._quantized = ScaledTensor(ops.quantize(weight, fmt, scale, out=out), scale.reciprocal())
        self._version = self.param._version

    def transposed(self, w: ScaledTensor) -> ScaledTensor:
        """W^T (K, N). w: the result of `quantized`. Valid until the next call on the same stream."""
        n, k = w.payload.shape
        if self.config.keep_transpose_cache:
            if self._transposed is None:
                self.keep_transposed(ops.transpose(w.payload))
            assert self._transposed is not None
            return ScaledTensor(self._transposed, w.scale_inv)
        return ScaledTensor(ops.transpose(w.payload, out=self.scratch.like(w.payload, (k, n))), w.scale_inv)

    @property
    def has_transposed(self) -> bool:
        """Whether W^T is kept."""
        return self._transposed is not None

    def keep_transposed(self, payload: torch.Tensor) -> None:
        """Keep W^T (K, N) until the weight changes."""
        self._transposed = payload

    def cast(
        self, x: Castable, role: int, *, columns: bool, rows: bool = True, training: bool, group=None
    ) -> tuple[ScaledTensor, torch.Tensor]:
        """Cast x (M, K), an INPUT or a GRAD -> (q in its role's format and the layouts asked for, the scale).

        In training its amax counts and observers see it; if there are any, rows are made too.
        group: the ranks that must use one scale, or None.
        """
        looks = self.events.cast if training else ()
        rows = rows or bool(looks)
        q, scale = self.casts.quantize(x, role, columns=columns, rows=rows, training=training, group=group)
        if looks:
            seen = source.values(x)
            for look in looks:
                look(self, role, seen, q)
        return q, scale

    def take_gradient(self, product: gemm.Product) -> None:
        """Take the gradient dW (N, K) of one backward pass."""
        sink = self.open_sink()
        for look in self.events.gradient:
            look(self, product)
        sink.take(product)
        for look in self.events.gradient_added:
            look(self)
        for look in self.events.launched:
            look()
        self.gradient_taken()

    def open_sink(self) -> GradSink:
        """The sink, of a gradient that is here. Raises UserError if there is no engine."""
        if self.sink is None:
            refuse_unattached(self.config.level, self.name)
        return self.sink

    def gradient_taken(self) -> None:
        """The sink has one more gradient."""
        self.pending -= 1
        if self._on_gradient is not None:
            self._on_gradient(self)

    def export(self) -> torch.Tensor:
        """The weight's tensor for a sharded state dict: the parameter, or if it is E4M3 a BF16 copy on the host."""
        self.arrive()
        if self.stored is None:
            return self.param
        copy = self.stored.dequantize(torch.bfloat16).cpu()
        self._exported = [*(given for given in self._exported if given() is not None), weakref.ref(copy)]
        return copy

    def in_model_state(self) -> list[torch.Tensor]:
        """The weight's tensors in model state dicts that are still there. A module may ask for its own state several
        times, as Megatron's shared experts with a gate do, and keep the first."""
        copies = (given() for given in self._exported)
        return [self.param] if self.stored is None else [copy for copy in copies if copy is not None]

    def cached_tensors(self) -> list[torch.Tensor]:
        """The quantised copy, and its transpose if that is kept."""
        kept = [self._quantized.payload] if self._quantized is not None else []
        return kept + ([self._transposed] if self._transposed is not None else [])


def scales_of(weights: Sequence[OwnedWeight]) -> torch.Tensor:
    """The scale_inv (E,) of weights stored in E4M3: a view if the engine has them side by side; else a copy."""
    places = [weight._scale_inv for weight in weights]
    assert places[0] is not None
    scale_inv, first = places[0]
    if first is not None and all(at and at[0] is scale_inv and at[1] == i for i, at in enumerate(places, first)):
        return scale_inv[first : first + len(places)]
    return torch.stack([weight.quantized().scale_inv for weight in weights])


def owners(root: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """(name, module) of the modules that hold an OwnedWeight, as `owned`."""
    return [(name, m) for name, m in root.named_modules() if isinstance(getattr(m, "owned", None), OwnedWeight)]


def owned_weights(modules: Iterable[torch.nn.Module]) -> list[OwnedWeight]:
    """The weights of every FP8 linear inside the modules, in model order."""
    return [module.owned for root in modules for _, module in owners(root)]


def told_of_all[T](chunks: Sequence[torch.nn.Module], tell: Callable[[OwnedWeight], T]) -> list[T]:
    """The results of `tell` for the weights of all FP8 linears in the whole model, each result once.

    Collective over the ranks that have other parts of the model: its pipeline stages, and other experts' ranks. The
    model knows them. chunks: this rank's, wrapped or not.
    """
    group = unwrap_model(chunks[0]).pg_collection.tp_ep_pp
    told = gathered([tell(weight) for weight in owned_weights(chunks)], group)
    return list(dict.fromkeys(what for part in told for what in part))


def name_weights(chunks: Iterable[torch.nn.Module]) -> None:
    """Give every weight its `path` in the model, without the layer's number, and its `layer_number` from 1.

    Numbers inside a layer stay: they tell one expert from the next. An expert has its number among those of all ranks,
    not the one that this rank's modules have.
    """
    for chunk in chunks:
        layers = {n: m for n, m in chunk.named_modules() if isinstance(m, TransformerLayer)}
        for layer_path, layer in layers.items():
            block = re.sub(r"^(module\.)+", "", layer_path).rpartition(".")[0]
            block = re.sub(r"\.\d+", "", block)  # of multi-token prediction
            for name, module in owners(layer):
                if module.owned.expert is not None:
                    name = re.sub(r"local_experts\.\d+\.", f"local_experts.{module.owned.expert}.", name)
                module.owned.path = f"{block}.{name}"
                module.owned.layer_number = layer.layer_number


def in_forward_order(weights: list[OwnedWeight]) -> list[OwnedWeight]:
    """Named weights of one chunk in the order of the forward pass: attention registers its output projection first.

    Of a bank, the last expert comes first: in the order of the backward pass, in which they lie in memory, they ascend.
    """

    def block(weight: OwnedWeight) -> tuple[str, int]:
        return (weight.bank or (weight.path,))[0].rpartition(".")[0], weight.layer_number

    def place(weight: OwnedWeight) -> tuple[int, bool, int]:
        late = weight.path.endswith(".linear_proj") or (weight.bank is not None and weight.path.endswith("_fc2"))
        return blocks[block(weight)], late, -(weight.expert or 0) if weight.bank else 0

    blocks = {block(weight): i for i, weight in reversed(list(enumerate(weights)))}
    return sorted(weights, key=place)


def whole_banks(weights: list[OwnedWeight]) -> list[list[OwnedWeight]]:
    """The weights in their order, neighbours of one bank together: they lie in one bucket, side by side."""
    return [list(same) for _, same in itertools.groupby(weights, key=lambda weight: weight.bank or id(weight))]
