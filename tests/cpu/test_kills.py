"""Runs are killed at random moments while they train and save; the latest complete checkpoint loads and resumes.

The slow tests make 104 kills, half of them during asynchronous saves.
"""

import random
import time

import pytest
from launch import forked, parse_step
from megatron_runs import ASYNCHRONOUS, TINY_GPT, run_megatron

FLAGS = "--fp8-level O3 --use-distributed-optimizer --train-iters 2000 --save-interval 2 --log-interval 1"
TRACKER = "latest_checkpointed_iteration.txt"


class Kill(Exception):
    """Makes the reader of a run's lines end the run with SIGKILL, its savers too."""


@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("kills", "how"),
    [
        pytest.param(3, "", marks=pytest.mark.slow),
        pytest.param(52, "", marks=pytest.mark.slow),
        pytest.param(52, ASYNCHRONOUS, marks=pytest.mark.slow),
    ],
)
def test_random_kills(tmp_path, kills, how):
    """Every run resumes from the checkpoint that it finds, and prints an undisturbed run's lines for its iterations."""
    draw = random.Random(kills)  # the time of the kill stays random: it depends on the run's speed
    flags = [*TINY_GPT, *FLAGS.split(), *how.split()]
    command = ["pretrain_gpt_fp8.py", *flags]
    command += ["--save", str(tmp_path), "--load", str(tmp_path)]
    printed: dict[int, tuple[float, float]] = {}
    reached, interrupted = 0, 0
    for kill in range(kills):
        saved = int((tmp_path / TRACKER).read_text() or 0) if (tmp_path / TRACKER).exists() else 0
        lines = _until_killed(command, draw, tmp_path / "log.txt")
        steps = [step for step in map(parse_step, lines) if step]
        interrupted += any(not (folder / "integrity.json").exists() for folder in tmp_path.glob("iter_*"))
        assert steps[0].iteration > saved - 2 and steps[0].iteration >= reached - 1, kill
        reached = steps[0].iteration
        for step in steps[2:]:  # stock logs the mean of a resumed run's first two losses
            seen = step.loss, step.grad_norm
            assert printed.setdefault(step.iteration, seen) == seen, (kill, step.iteration)
    whole = run_megatron(1, [*TINY_GPT, *FLAGS.split(), "--exit-interval", str(max(printed))], timeout=3600)
    compared = [step for step in whole.steps if step.iteration in printed]
    assert len(compared) > max(printed) // 4
    for step in compared:
        assert printed[step.iteration] == (step.loss, step.grad_norm)
    print(f"{kills} kills, {reached} iterations, {interrupted} of them left a save that was not finished")
    assert interrupted or kills < 52


def _until_killed(command, draw, log) -> list[str]:
    """The lines of a run up to a random iteration; it is killed a moment later."""
    lines, count = [], draw.randrange(3, 12)

    def look(line):
        lines.append(line)
        if sum(map(bool, map(parse_step, lines))) == count:
            time.sleep(draw.uniform(0.0, 0.6))  # a save is every other step and most of the time
            raise Kill

    with pytest.raises(Kill):
        forked(1, command, log, timeout=600, env={"CUDA_VISIBLE_DEVICES": ""}, on_line=look)
    return lines
