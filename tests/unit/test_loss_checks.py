"""Deferred checks of losses: Megatron's own state machine gets the same answers in the same order, in the same pass."""

import pytest
import torch
from megatron.core.rerun_state_machine import RerunMode, RerunState, RerunStateMachine

from megatron_fp8.monitor import loss_checks
from megatron_fp8.monitor.loss_checks import LateChecks

MESSAGES = {torch.isnan: "found NaN", torch.isinf: "found Inf"}


@pytest.fixture
def late(monkeypatch):
    """LateChecks as on CUDA, with tensors on the CPU."""

    class Event:
        def record(self):
            pass

        def synchronize(self):
            pass

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(loss_checks, "_on_gpu", lambda result: isinstance(result, torch.Tensor))
    return LateChecks()


def machine(mode):
    made = RerunStateMachine(mode=mode)
    made._reduce_any = lambda value: value if isinstance(value, bool) else tuple(value)
    made._save_state = made._restore_state = lambda: None
    made._sanitize_data_iterators = lambda iterators: []
    made.first_iteration_complete = True
    return made


def one_pass(machine, losses, validate):
    for loss in losses:
        for check, message in MESSAGES.items():
            validate(machine, result=torch.tensor(loss), rejection_func=check, message=message, fatal=True)


def run(mode, losses, late=None):
    """(States in which passes ran, the call that failed first, what it raised), with stock's checks or with late ones.
    """
    stock = RerunStateMachine
    validate, goes_on = stock.validate_result, stock.should_run_forward_backward
    if late is not None:
        validate, goes_on = late.validate_result(validate), late.should_run_forward_backward(goes_on)
    it, states = machine(mode), []
    try:
        while goes_on(it, None):
            states.append(it.state)
            one_pass(it, losses, validate)
    except RuntimeError as error:
        return states, it.failed_validation_call, str(error)
    return states, it.failed_validation_call, it.should_checkpoint_and_exit()


@pytest.mark.parametrize("mode", [RerunMode.DISABLED, RerunMode.VALIDATE_RESULTS])
@pytest.mark.parametrize(
    "losses", [[1.0, 2.0], [1.0, float("nan"), 2.0], [float("inf"), float("nan")], [1.0, -float("inf")]]
)
def test_stock_decides_the_same(mode, losses, late):
    assert run(mode, losses, late) == run(mode, losses)


def test_a_check_at_once_comes_after_those_that_wait(late):
    """As with --overlap-grad-reduce, which checks gradients in the backward pass: they are NaN if the loss is."""
    asked = []
    validate = late.validate_result(lambda *args, **kwargs: asked.append(kwargs["message"]))
    it = machine(RerunMode.VALIDATE_RESULTS)
    it.state = RerunState.INITIAL_RUN
    one_pass(it, [1.0], validate)
    with torch.no_grad():
        validate(it, result=torch.tensor(1.0), rejection_func=torch.isnan, message="found NaN in gradients")
    assert asked == ["found NaN", "found Inf", "found NaN in gradients"]


def test_nothing_is_asked_before_the_pass_ends(late):
    asked = []
    validate = late.validate_result(lambda *args, **kwargs: asked.append(kwargs["message"]))
    goes_on = late.should_run_forward_backward(lambda machine, iterator: False)
    it = machine(RerunMode.VALIDATE_RESULTS)
    it.state = RerunState.INITIAL_RUN
    one_pass(it, [1.0, 2.0], validate)
    assert asked == []
    goes_on(it, None)
    assert asked == ["found NaN", "found Inf"] * 2


def test_other_checks_are_made_at_once(late):
    asked = []
    validate = late.validate_result(lambda *args, **kwargs: asked.append(kwargs["message"]))
    it = machine(RerunMode.VALIDATE_RESULTS)
    it.state = RerunState.INITIAL_RUN
    one = torch.ones(())
    validate(it, result=one, rejection_func=lambda loss: loss > 10, message="spike")
    validate(it, result=1.0, rejection_func=torch.isnan, message="a number")
    with torch.no_grad():
        validate(it, result=one, rejection_func=torch.isnan, message="evaluation")
    it.state = RerunState.RERUNNING_IN_PLACE
    validate(it, result=one, rejection_func=torch.isnan, message="rerun")
    assert asked == ["spike", "a number", "evaluation", "rerun"]


def test_on_the_cpu_it_is_stock():
    asked = []
    validate = LateChecks().validate_result(lambda *args, **kwargs: asked.append(1))
    it = machine(RerunMode.DISABLED)
    it.state = RerunState.INITIAL_RUN
    validate(it, result=torch.ones(()), rejection_func=torch.isnan, message="")
    assert asked == [1]
