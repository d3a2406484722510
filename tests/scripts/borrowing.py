"""Train, and before the third step lend the model other weights: BORROW says which, or "none".

other    a model's of another seed, in BF16      own    its own, as state_dict() gives them
codes    E4M3 codes, which are refused

Prints the loss of a batch before, meanwhile and after, and whether all bytes of the engine are the same.
"""

import functools
import os
import runpy
import sys

import torch
from launch import ROOT

sys.path.insert(0, str(ROOT))
from megatron_fp8.plugin import install

install()
import megatron.training.training as training
from megatron.core import mpu

from megatron_fp8.engine import bucket_states
from megatron_fp8.errors import UserError

HOW = os.environ["BORROW"]
steps: list[int] = []


def loss_of(chunk) -> float:
    """Of a batch that is the same on all ranks, the model training: what casts tell scales must be forgotten."""
    tokens = torch.randint(0, 255, (2, 65), generator=torch.Generator().manual_seed(5)).to(torch.cuda.current_device())
    positions = torch.arange(64, device=tokens.device).expand(2, 64)
    with torch.no_grad():
        return chunk(tokens[:, :-1], positions, None, labels=tokens[:, 1:]).float().mean().item()


def held(engine) -> list[torch.Tensor]:
    """A copy of all that a step reads or writes: weights, scales, amaxes, masters, moments, histories."""
    found = []
    for owned in engine.sets:
        for bucket in owned.buckets:
            found.append(bucket.weight.view(torch.uint8))
            for name in ("master", "exp_avg", "exp_avg_sq"):
                found += bucket_states.tensors(getattr(bucket, name)).values()
        for weight in owned.linears:
            if weight.stored is not None:
                found += [weight.stored.payload, weight.stored.scale_inv]
        for slots in (owned.scaling, owned.weight_scaling):
            found += [slots.scale, slots.amax] if slots is not None else []
        found += [owned.parts.dispatch.amax] if owned.parts.dispatch is not None else []
    return [t.contiguous().view(-1).view(torch.uint8).clone() for t in found]


def others(chunk) -> dict:
    state = chunk.state_dict()
    if HOW == "own":
        return state
    if HOW == "codes":
        key = next(key for key in state if key.endswith("linear_proj.weight"))
        return {**state, key: state[key].to(torch.float8_e4m3fn)}
    noise = torch.Generator().manual_seed(9)
    shuffled = dict(state)
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.dim() == 2:
            shuffled[key] = (torch.randn(value.shape, generator=noise) * 0.05).to(value)
    return shuffled


def train_step(stock):
    @functools.wraps(stock)
    def step(forward, data, model, optimizer, *args, **kwargs):
        steps.append(1)
        if len(steps) == 3 and HOW != "none":
            chunk, engine = model[0], optimizer.engine
            engine.prepare_model_params_for_param_sync()
            first = loss_of(chunk)
            before = held(engine)
            state, meanwhile = others(chunk), None
            stock_bytes = [p.clone() for p in chunk.parameters()]
            try:
                with engine.borrowed(chunk, state):
                    meanwhile = loss_of(chunk)
                    moved = sum(not torch.equal(a, b) for a, b in zip(before, held(engine), strict=True))
            except UserError as error:
                print(f"refused: {error}", flush=True)
                moved = 0
            same = all(torch.equal(a, b) for a, b in zip(before, held(engine), strict=True))
            same &= all(
                torch.equal(a.view(torch.uint8), b.detach().view(torch.uint8))
                for a, b in zip(stock_bytes, chunk.parameters(), strict=True)
            )
            after = loss_of(chunk)
            for owned in engine.sets:  # what these passes have told them
                for part in owned.scaling, owned.parts.dispatch:
                    if part is not None:
                        part.amax.zero_()
            if mpu.get_tensor_model_parallel_rank() == mpu.get_data_parallel_rank() == 0:
                print(f"losses: {first} {meanwhile} {after}; same bytes: {same}; moved: {moved}", flush=True)
        return stock(forward, data, model, optimizer, *args, **kwargs)

    return step


training.train_step = train_step(training.train_step)
runpy.run_path(str(ROOT / "pretrain_gpt_fp8.py"), run_name="__main__")
