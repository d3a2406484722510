"""Checks of losses that wait for the end of the pass (monitor/loss_checks.py): the host asks for nothing before."""

import pytest
import torch
from megatron.core.rerun_state_machine import RerunMode, RerunState, RerunStateMachine

from megatron_fp8.monitor.loss_checks import LateChecks

pytestmark = [pytest.mark.gpu, pytest.mark.smoke]


@pytest.mark.parametrize("bad", [None, float("nan"), float("inf")])
def test_the_host_does_not_wait_and_finds_what_is_bad(bad):
    late = LateChecks()
    validate = late.validate_result(RerunStateMachine.validate_result)
    goes_on = late.should_run_forward_backward(RerunStateMachine.should_run_forward_backward)
    machine = RerunStateMachine(mode=RerunMode.DISABLED)
    machine.state = RerunState.INITIAL_RUN
    values = torch.rand(8, device="cuda")
    if bad is not None:
        values[5] = bad
    torch.cuda.synchronize()
    torch.cuda._sleep(20_000_000)  # what is launched has not begun when all is checked
    torch.cuda.set_sync_debug_mode("error")
    try:
        for value in values:
            for check in (torch.isnan, torch.isinf):
                validate(machine, result=value * 1, rejection_func=check, message=f"by {check.__name__}", fatal=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    if bad is None:
        assert goes_on(machine, None) is False
    else:
        with pytest.raises(RuntimeError, match="by isnan" if bad != bad else "by isinf"):
            goes_on(machine, None)
