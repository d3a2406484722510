"""563 commands train as in stock Megatron with its Transformer Engine spec, or a level refuses them."""

import pytest
from training_cases import REASONS, all_cases
from training_matrix import outcomes, report, unexpected


@pytest.mark.slow
@pytest.mark.timeout(10_000)
def test_every_case_becomes_what_is_written_of_it(tmp_path):
    found = outcomes(all_cases(), tmp_path / "results")
    text = report(found)
    print(text)
    assert not unexpected(found), text
    for why in REASONS:
        assert any(why.holds(case) and outcome.verdict == why.verdict for case, outcome in found.items()), why
