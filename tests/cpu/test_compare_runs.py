"""`megatron-fp8 compare` on Megatron's real output: a run and the same run resumed, by log and by metrics."""

import argparse

import pytest
from megatron_runs import SIX_STEPS, TINY_GPT, run_megatron

from megatron_fp8.metrics import VARIABLE
from megatron_fp8.tools.perf import compare


@pytest.mark.slow
def test_a_bit_exact_resume_is_equal(tmp_path, capsys):
    flags = [*TINY_GPT, *SIX_STEPS, "--fp8-level", "O3", "--save-interval", "3", "--save", str(tmp_path / "saved")]
    flags += "--split 8,1,1 --eval-iters 1 --eval-interval 2".split()
    for name, more in (("whole", ""), ("resumed", f"--load {tmp_path / 'saved'} --ckpt-step 3")):
        env = {VARIABLE: str(tmp_path / f"{name}.jsonl")}
        run = run_megatron(1, [*flags, *more.split()], env=env)
        (tmp_path / f"{name}.log").write_text("\n".join(run.lines))

    def said(*argv: str) -> tuple[int, str]:
        parser = argparse.ArgumentParser()
        compare.add_arguments(parser)
        files = [str(tmp_path / word) if "." in word else word for word in argv]
        return compare.run(parser.parse_args(files)), capsys.readouterr().out

    left_out = "loss at step 5 not compared: either it or whole.{}'s is a mean with earlier steps in it"
    code, text = said("whole.log", "resumed.log", "--assert-equal", "--steps", "4:")
    assert code == 0 and f"resumed.log: {left_out.format('log')}" in text and text.endswith("\nequal\n"), text
    assert "whole.log, resumed.log: trained on a CPU" in text
    code, text = said("whole.jsonl", "resumed.jsonl", "--assert-equal", "--steps", "4:")
    assert code == 0 and "not compared" not in text and "whole.jsonl, resumed.jsonl: trained on a CPU" in text
    code, text = said("whole.jsonl", "resumed.log", "--assert-equal", "--steps", "4:")
    assert code == 0 and f"resumed.log: {left_out.format('jsonl')}" in text
    code, text = said("whole.jsonl", "whole.log", "--assert-equal")
    assert code == 0 and "loss at step 2 not compared" in text
