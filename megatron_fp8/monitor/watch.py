"""`--fp8-on-spike`: watch loss and gradient norm at every step, and act on a spike if asked to.

    log             log it
    skip            also do not apply the step: like a step with a NaN, it changes no bit of the state
    bf16-fallback   also run the linears whose FP8 casts clipped in BF16, from the next step until the run is calm

The loss is that of the log: the sum over all tokens that count, of all micro-batches and ranks, divided by their
number. But it must be known before the step is made.  The tokens that count are those of the loss_mask that the model
gets, as from Megatron's scripts. If a script passes none, all positions count, even if it masks some later.  A forward
hook of the model adds up both numbers on the device.  When the gradient norm is there, one all-reduce of three numbers
over all ranks gives loss and norm, and they reach the host in the copy that the norm needs anyway.  So every rank
judges the same bits by the same arithmetic (spikes.py), and all take the same decision without further communication.

A cast clipped if the amax of the step's tensor is more than twice what its delayed scale can hold. (With scales from
the step before, some tensors are slightly beyond it on most steps.)  This is checked only on a spike: one all-reduce
over the ranks that share the tensors, then the names from all pipeline stages.  If none clipped (tensorwise scales
never do), all linears fall back; whether FP8 was the cause shows afterwards.  The step itself is made, clipped to
--clip-grad as always.  While a linear is in BF16 its delayed scales follow the tensors, so that it returns with fresh
ones. An E4M3 weight is multiplied as the BF16 number with the same value.

A linear returns after `window` steps without a spike.  Each time that it clips and falls back again, its stay doubles,
up to eight times the first. As many calm steps in FP8 as its last stay took undo one doubling.  Otherwise false alarms
would add up over a long run.  A spike while a linear is in BF16 was not caused by it, and only delays its return until
`window` steps have been calm.  All ranks keep the table of all linears, so a checkpoint's table fits every layout.

A loss that climbs slowly takes the line with it and is no spike. `judge` reports it when the line is up by a tenth.

Not seen: the loss with --overlap-moe-expert-parallel-comm, which bypasses the model's forward.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import unwrap_model

from ..engine.events import Observer
from ..engine.optimizer import EngineOptimizer
from ..errors import UserError
from ..flags.config import Fp8Config
from ..flags.watch import FALLBACK, NO_FP8, SKIP, WatchPlan
from ..ranks import gathered
from .collect import Monitor
from .spikes import DOUBLED, Series
from .writers import Tally, current_iteration, say, together, write_scalars

LOSS, NORM = "loss", "gradient norm"
MOST_SKIPS = 8  # in a row
_MOST_DOUBLINGS = 3
_LOSS_RISE = 1.1  # factor; docs/monitoring.md says what it finds
_CLIPPED = 2.0  # times what the scale can hold; below this, amaxes vary from step to step
_SHARE_FLOOR = 1e-3  # per cent


def watch_spikes(config: Fp8Config, engine: EngineOptimizer, monitor: Monitor | None) -> None:
    """Give the engine a watch, if the run asks for one. monitor: the Monitor that counts casts, or None."""
    if config.watch is None:
        return
    engine.watch = Watch(config.watch, engine)
    for chunk in engine.model_chunks:
        engine.watch.attach(chunk)
    engine.events.subscribe(engine.watch)
    if monitor is not None:
        monitor.on_tallies = engine.watch.observe_casts


class Fallback:
    """Which linears are out of FP8, and for how long.

    Args:
        calm: steps without a spike after which a linear returns for the first time.

    Attributes:
        stays: {name: [times it fell back because it clipped, less the undone ones; calm steps that it still waits for,
            0 if it is in FP8; calm steps in FP8 since]}.
    """

    def __init__(self, calm: int):
        self.calm = calm
        self.stays: dict[str, list[int]] = {}

    def waits(self, name: str) -> int:
        """The calm steps that a linear's present or last stay takes."""
        return self.calm * 2 ** max(self.stays[name][0] - 1, 0)

    def out(self) -> list[str]:
        """The linears that are in BF16 now."""
        return [name for name, (_, left, _) in self.stays.items() if left]

    def spike(self, fall: Iterable[str], clipped: bool = True) -> None:
        """Linears in `fall` fall back, because they clipped or as a precaution. Those already in BF16 wait for at least
        `calm` more steps."""
        for name in self.out():  # wait `calm` steps, not a whole stay: they did not cause this spike
            self.stays[name][1] = max(self.stays[name][1], self.calm)
        for name in fall:
            falls = self.stays.get(name, [0])[0] + clipped
            self.stays[name] = [min(falls, 1 + _MOST_DOUBLINGS), 0, 0]
            self.stays[name][1] = self.waits(name)

    def step(self) -> list[str]:
        """A calm step. Returns the linears that return to FP8."""
        waiting = self.out()
        for name, stay in list(self.stays.items()):
            falls, left, calm = stay
            if left:
                stay[1] -= 1
            elif calm + 1 < self.waits(name):
                stay[2] += 1
            elif falls > 1:
                stay[:] = falls - 1, 0, 0
            else:
                del self.stays[name]
        return [name for name in waiting if not self.stays[name][1]]

    def load(self, stays: dict[str, list[int]]) -> None:
        """Restore `stays`. Older states lack the third number or have more doublings."""
        self.stays = {}
        for name, (falls, left, *calm) in stays.items():
            self.stays[name] = [min(falls, 1 + _MOST_DOUBLINGS), 0, *(calm or [0])]
            self.stays[name][1] = min(left, self.waits(name))


class Watch(Observer):
    """From `begin_step` to `judge` the model's chunks add up the loss; `see` agrees on it. See the top of the file.

    Raises UserError of one line where linears are to leave FP8 and no stage has one in it.

    Attributes:
        counts: of the run so far, for TensorBoard and W&B.
    """

    def __init__(self, plan: WatchPlan, engine: EngineOptimizer):
        self.action, self._sigma, self._window = plan.action, plan.sigma, plan.window
        self._sets = engine.sets
        self._series = {name: Series(self._sigma, self._window) for name in (LOSS, NORM)}
        self._loss = torch.zeros(2, dtype=torch.float64, device=engine.device)  # sum, tokens
        self.loss: float | None = None
        self.norm = math.nan
        self._skips = 0  # in a row
        self.counts = {"fp8_spikes": 0, "fp8_rises": 0, "fp8_skipped_spikes": 0, "fp8_linears_in_bf16": 0}
        self._fallback = Fallback(self._window)
        weights = [weight for owned in engine.sets for weight in owned.linears if weight.fp8]
        self._weights = {weight.name: weight for weight in weights}
        self._names = self._of_all_stages(sorted(self._weights)) if self.action == FALLBACK else []
        if self.action == FALLBACK and not self._names:
            raise UserError(NO_FP8)

    def attach(self, chunk: torch.nn.Module) -> None:
        """Hook a model chunk, as Megatron wraps it, if it computes the loss."""
        model = unwrap_model(chunk)
        if model.post_process:
            model.register_forward_hook(self._add_loss, with_kwargs=True)

    @torch.no_grad()
    def _add_loss(self, model, args: tuple, kwargs: dict[str, Any], losses: Any) -> None:
        """After a forward pass with labels: add its tokens' losses (b, s). Without a mask all tokens count."""
        if model.training and kwargs.get("labels") is not None:
            mask = kwargs.get("loss_mask")
            losses = losses.double()
            weight = torch.ones_like(losses) if mask is None else mask.double()
            self._loss += torch.stack([(losses * weight).sum(), weight.sum()])

    @property
    def any_in_bf16(self) -> bool:
        """Whether some linear of any rank is in BF16 now."""
        return bool(self._fallback.out())

    def begin_step(self) -> None:
        """Begin a step."""
        self._loss.zero_()

    def see(self, total: torch.Tensor) -> list[float]:
        """Agree on loss and gradient norm over all ranks. total: (n,) FP32, first the norm's square, then other values
        to bring to the host. Returns this rank's own `total`.

        Tensor-parallel ranks have the same sum and number of tokens, so both count equally often.
        """
        total = total.double()
        agreed = torch.cat([self._loss, total[:1]])
        dist.all_reduce(agreed)
        *own, losses, tokens, squares = torch.cat([total, agreed]).tolist()  # the one wait
        self.loss = losses / tokens if tokens else None
        self.norm = math.sqrt(squares / dist.get_world_size())
        return own

    def judge(self) -> bool:
        """Judge the step's loss and norm, log and act. Returns whether the step may be applied."""
        iteration = current_iteration()
        found = {LOSS: self.loss, NORM: self.norm}
        spikes = {
            name: spike
            for name, value in found.items()
            if value is not None and (spike := self._series[name].spike(value))
        }
        if self.loss is not None and LOSS not in spikes:
            self._say_rise(LOSS, iteration, _LOSS_RISE)
        if not spikes:
            self._skips = 0
            if back := self._fallback.step():
                self._choose_gemms()
                self._say(iteration, f"back to FP8: {self._listed(back)}")
            return True
        self.counts["fp8_spikes"] += 1
        what = "; ".join(f"{name} {spike}" for name, spike in spikes.items())
        applied = True
        if self.action == SKIP:
            applied = self._skips >= MOST_SKIPS and math.isfinite(self.norm)
            self._skips = 0 if applied else self._skips + 1
            self.counts["fp8_skipped_spikes"] += not applied
            what += f"; the step is made, after {MOST_SKIPS} skipped in a row" if applied else "; the step is skipped"
        elif self.action == FALLBACK:
            what += self._fall_back()
        self._say(iteration, what)
        return applied

    def observe(self, name: str, iteration: int, value: float, floor: float = 0.0, rises: bool = True) -> None:
        """Watch a value that is logged now and then: log it if it spikes or, with `rises`, if it has been rising.

        Call it on every rank.  floor: a change below it, in the value's units, is ignored.
        """
        series = self._series.setdefault(name, Series(self._sigma, self._window))
        series.floor = floor
        if spike := series.spike(value):
            self.counts["fp8_spikes"] += 1
            self._say(iteration, f"{name} {spike}")
        elif rises:
            self._say_rise(name, iteration, DOUBLED)

    def _say_rise(self, name: str, iteration: int, times: float) -> None:
        if line := self._series[name].rise(times):
            self.counts["fp8_rises"] += 1
            self._say(iteration, f"{name} rise {line.last:.4g}, from {line.first:.4g} along its last {line.length}")

    def observe_on_last(self, name: str, iteration: int, value: float | None) -> None:
        """`observe` a value that only the last rank knows; None if it has none. Call it on every rank.

        It watches spikes only, because sharpness rises several-fold when a healthy model begins to learn.
        """
        sent = self._loss.new_tensor([value is not None, value or 0.0])
        dist.broadcast(sent, dist.get_world_size() - 1)
        known, value = sent.tolist()
        if known:
            self.observe(name, iteration, value, rises=False)

    def observe_casts(self, tallies: dict[str, Tally], iteration: int) -> None:
        """Observe the shares of clipped and of lost elements over all linears (monitor/collect.py)."""
        for name, value in together(list(tallies.values())).statistics().items():
            if name.endswith(("overflows%", "underflows%")):
                self.observe(name, iteration, value, floor=_SHARE_FLOOR)

    def _fall_back(self) -> str:
        """Take the linears that clipped out of FP8. Returns the text for the log."""
        out = set(self._fallback.out())
        guilty = set(self._of_all_stages(self._clipped())) - out
        fall = [name for name in self._names if name not in out and (name in guilty or not guilty)]
        self._fallback.spike(fall, clipped=bool(guilty))
        self._choose_gemms()
        if not fall:
            return "; all linears are in BF16"
        why = "" if guilty else "; no cast clipped"
        waits: dict[int, list[str]] = {}
        for name in fall:
            waits.setdefault(self._fallback.waits(name), []).append(name)
        to_bf16 = (f"; to BF16 for {calm} calm steps: {self._listed(names)}" for calm, names in waits.items())
        return why + "".join(to_bf16)

    @torch.no_grad()
    def _clipped(self) -> list[str]:
        """This stage's linears in FP8 one of whose two casts clipped in this step, the same on all ranks that share
        them."""
        clipped = {}
        for owned in self._sets:
            if owned.scaling is not None and owned.scaling.warm:
                clipped[owned.scaling] = owned.scaling.clipped(_CLIPPED, owned.of.sharing).tolist()
        found = []
        for name, weight in self._weights.items():
            scaling = weight.casts.scaling
            if weight.fp8 and scaling in clipped and any(clipped[scaling][slot] for slot in weight.casts.slots):
                found.append(name)
        return found

    def _of_all_stages(self, names: list[str]) -> list[str]:
        found = []
        for owned in self._sets:
            members = {weight.name for weight in owned.linears}
            for stage in gathered([name for name in names if name in members], owned.of.stages):
                found += stage
        return found

    def _choose_gemms(self) -> None:
        out = self._fallback.out()
        self.counts["fp8_linears_in_bf16"] = len(out)
        for name, weight in self._weights.items():
            weight.compute_in_fp8(name not in out)

    def _listed(self, names: list[str]) -> str:
        return f"all {len(names)} linears" if len(names) == len(self._names) else ", ".join(names)

    def _say(self, iteration: int, what: str) -> None:
        """Log a line on rank 0, and write the counts on the rank that has a writer."""
        if dist.get_rank() == 0:
            say(iteration, what)
        write_scalars(dict(self.counts), iteration)

    def state_dict(self) -> dict:
        """All that lasts from one step to the next, as plain numbers that are the same on all ranks."""
        return {
            "series": {name: torch.tensor(s.state(), dtype=torch.float64) for name, s in self._series.items()},
            "skips": self._skips,
            "counts": dict(self.counts),
            "stays": {name: list(stay) for name, stay in self._fallback.stays.items()},
        }

    def load_state_dict(self, state: dict) -> None:
        """Restore the state, in any layout. Linears stay in BF16 only if this run could have taken them out."""
        for name, values in state["series"].items():
            self._series.setdefault(name, Series(self._sigma, self._window)).load(values.tolist())
        self._skips, self.counts = state["skips"], dict(state["counts"])
        self._fallback.load({name: stay for name, stay in state["stays"].items() if name in self._names})
        self._choose_gemms()
