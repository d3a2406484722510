"""How a run loads a checkpoint's groups of stock parameters (checkpoint/stock_state.py)."""

from types import SimpleNamespace

import pytest
from megatron.core.dist_checkpointing.core import CheckpointingException

from megatron_fp8.checkpoint import stock_state

SAVED = {"lr": 1e-3, "wd_mult": 1.0, "lr_mult": 1.0, "max_lr": 1e-3, "min_lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8}
OWN = SAVED | {"is_expert_parallel": False, "betas": (0.9, 0.999), "eps": 1e-6}


def taken(monkeypatch, group: dict, override: bool = False) -> dict:
    monkeypatch.setattr(stock_state, "get_args", lambda: SimpleNamespace(override_opt_param_scheduler=override))
    return stock_state._saved_group(group, {"optimizer": {"param_groups": [SAVED | {"wd_mult": 0.0}, SAVED]}})


def test_adams_numbers_are_the_runs(monkeypatch):
    """Adam's settings come from the flags, as for linears; the rest comes from the checkpoint."""
    assert taken(monkeypatch, OWN | {"lr": 5e-5}) == OWN


def test_adams_kernel_is_the_runs(monkeypatch):
    """Rank 0's group may be empty, and then has the kernel of a GPU on a CPU too: a resumed norm was off by an ulp."""
    monkeypatch.setitem(SAVED, "fused", True)
    assert taken(monkeypatch, OWN | {"fused": None})["fused"] is None


def test_a_schedule_is_the_runs_where_it_is_asked_for(monkeypatch):
    other = OWN | {"max_lr": 5e-4}
    assert taken(monkeypatch, other, override=True) == other
    with pytest.raises(CheckpointingException, match=r"max_lr 0\.001, min_lr 0\.0001, this run max_lr 0\.0005"):
        taken(monkeypatch, other)


def test_the_checkpoints_schedule_where_it_is_asked_for(monkeypatch):
    """For linears too: their groups are the engine's."""

    def taken_by(asked: bool, *saved: dict) -> dict:
        args = SimpleNamespace(use_checkpoint_opt_param_scheduler=asked)
        monkeypatch.setattr(stock_state, "get_args", lambda: args)
        group = OWN | {"max_lr": 5e-4, "min_lr": 0.0}
        part = SimpleNamespace(optimizer=SimpleNamespace(param_groups=[group]))
        stock_state.take_schedule(
            [part], {"optimizer": {"param_groups": [SAVED | {"wd_mult": 0.0, "max_lr": 7}, *saved]}}
        )
        return group

    assert taken_by(True, SAVED) == OWN and taken_by(True, SAVED, SAVED) == OWN
    assert taken_by(False, SAVED) == taken_by(True) == OWN | {"max_lr": 5e-4, "min_lr": 0.0}
    assert taken_by(True, SAVED, SAVED | {"max_lr": 5e-4, "min_lr": 0.0})["max_lr"] == 5e-4
    with pytest.raises(CheckpointingException, match="give its --lr, --min-lr and --decoupled-lr"):
        taken_by(True, SAVED, SAVED | {"max_lr": 2e-3})


def test_another_group_is_none(monkeypatch):
    with pytest.raises(CheckpointingException, match="it has no optimizer state for parameters with"):
        taken(monkeypatch, OWN | {"lr_mult": 0.1}, override=True)
