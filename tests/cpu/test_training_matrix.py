"""Some 570 commands train as stock Megatron does, over its Transformer Engine spec, or a level says no."""

import pytest
from training_cases import REASONS, all_cases, reason
from training_matrix import outcomes, report, unexpected


@pytest.mark.slow
@pytest.mark.timeout(10_000)
def test_every_case_becomes_what_is_written_of_it(tmp_path):
    found = outcomes(all_cases(), tmp_path / "results")
    text = report(found)
    print(text)
    assert not unexpected(found), text
    explained = {reason(case) for case, outcome in found.items() if outcome.verdict != "same"}
    assert [why.flags for why in REASONS if why not in explained] == []
