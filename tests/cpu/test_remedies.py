"""Ten kinds of lines about a checkpoint that does not load: with each remedy that a line names, the command trains."""

import math
import re
from dataclasses import dataclass

import pytest
from megatron_runs import TINY_GPT, Run, run_megatron
from test_changed_resumes import said
from test_checkpoints import DISTRIBUTED, train

from megatron_fp8.checkpoint.padding import other_padding

nightly = pytest.mark.slow
pytestmark = pytest.mark.timeout(3600)
WEIGHTS = ("--no-load-optim", "--finetune")
SCHEDULE = ("--override-opt_param-scheduler", "--use-checkpoint-opt_param-scheduler")
O3, LEGACY = "--fp8-level O3", "--ckpt-format torch"
TENSOR = "--tensor-model-parallel-size 2"


@dataclass(frozen=True)
class Case:
    """The run that saves and the run that resumes, with ranks; how the line begins, and all remedies that it names."""

    saved: str
    resumed: str
    says: str
    remedies: tuple[str, ...]
    ranks: tuple[int, int] = (1, 1)


CASES = {
    "another rate": Case(O3, f"{O3} --lr 5e-4", "the checkpoint does not fit this run: it has max_lr 0.001", SCHEDULE),
    "another decay": Case(
        O3, f"{O3} --lr-decay-style linear", "the checkpoint does not fit this run: OptimizerParamScheduler", SCHEDULE
    ),
    "a head's own rate": Case(
        O3, f"{O3} --decoupled-lr 5e-4", "the checkpoint does not fit this run: it has max_lr 0.001", SCHEDULE
    ),
    "a compact one": Case(
        f"{O3} --fp8-ckpt-compact", "--fp8-level O2", "the checkpoint was saved with --fp8-ckpt-compact", WEIGHTS[:1]
    ),
    "stock's own form": Case(
        DISTRIBUTED, f"{O3} {DISTRIBUTED}", "the optimizer state of a run without --fp8-level, saved as", WEIGHTS
    ),
    "a level's in stock": Case(
        O3, "", "the optimizer state of a run with --fp8-level does not load", (O3, *WEIGHTS)
    ),
    "stock's older format": Case(LEGACY, O3, "a checkpoint of --ckpt-format torch, of whose optimizer", WEIGHTS),
    "no optimizer": Case(
        f"{O3} --no-save-optim", O3, "the checkpoint does not fit this run: it has no 'optimizer'", WEIGHTS
    ),
    "no random states": Case(
        f"{LEGACY} --no-save-rng", f"{O3} --no-load-optim", r"\S+ has no random states", ("--no-load-rng", "--finetune")
    ),
    "a compact one elsewhere": Case(
        f"{O3} --fp8-ckpt-compact {DISTRIBUTED}",
        f"{O3} {DISTRIBUTED} {TENSOR}",
        "the checkpoint was saved with --fp8-ckpt-compact",
        WEIGHTS[:1],
        (1, 2),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", [pytest.param(CASES[n], id=n, marks=nightly) for n in CASES])
def test_with_the_remedy_it_trains(case, tmp_path):
    train(case.ranks[0], case.saved, tmp_path, save=5, until=5)
    resumed = [*TINY_GPT, *case.resumed.split(), "--load", str(tmp_path), "--exit-interval", "7"]
    line = said(case.ranks[1], resumed)
    assert re.match(rf"megatron_fp8: --load {tmp_path}: {case.says}", line), line
    named = set(re.findall(r"--[\w-]*(?:load|finetune|scheduler)[\w-]*|--fp8-level(?=,)", line.partition("; ")[2]))
    assert named == {remedy.split()[0] for remedy in case.remedies}, line
    for remedy in case.remedies:
        run = run_megatron(case.ranks[1], [*resumed, *remedy.split()])
        assert [step.iteration for step in run.steps][-1] == 7 and all(map(math.isfinite, run.losses)), remedy


def rates(run: Run) -> list[str]:
    return [match[1] for line in run.lines if (match := re.search(r"learning rate: (\S+)", line))]


@nightly
def test_the_checkpoints_schedule_is_all_of_its_own(tmp_path):
    """The linears' rate too, in the engine's groups: the run continues as if no rate had been given."""
    whole = train(1, O3, tmp_path, save=5)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    run = train(1, f"{O3} --lr 5e-4 --min-lr 5e-5 {SCHEDULE[1]}", tmp_path, load=True)
    assert rates(run) == rates(whole)[5:] and run.losses[2:] == whole.losses[7:]
    assert run.grad_norms == whole.grad_norms[5:]


VOCABULARY = "--vocab-size 263"  # 264 with the tokenizer's extra token; 272 with two ranks
PADDED = "--make-vocab-size-divisible-by 8"


def test_a_vocabulary_that_is_padded_further(tmp_path):
    """The first loss is ln(272 / 264) higher, as in stock, and a line says so; with the remedy it is not."""
    both = f"--fp8-level O1 {VOCABULARY} {PADDED}"
    whole = train(1, both, tmp_path, save=2, until=3)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    other = train(2, f"{both} {TENSOR}", tmp_path, load=True, until=3)
    assert other.losses[0] - whole.losses[2] == pytest.approx(math.log(272 / 264), abs=3e-3)
    said = [line for line in other.lines if "the vocabulary is padded" in line]
    assert said == [
        f"[fp8] --load {tmp_path}: the vocabulary is padded to 272 rows, the checkpoint's to 264: the first loss "
        "differs by up to about ln(272/264) = +0.0299, as in stock; --make-vocab-size-divisible-by 4 keeps 264"
    ]
    same = train(2, f"{both} {TENSOR} --make-vocab-size-divisible-by 4", tmp_path, load=True, until=3)
    assert same.losses[0] == pytest.approx(whole.losses[2], abs=1e-3)
    assert not any("the vocabulary is padded" in line for line in same.lines)


def test_what_keeps_a_padding():
    """Megatron pads to a multiple of it times the ranks."""
    from argparse import Namespace

    def padded(vocabulary: int, by: int, ranks: int) -> int:
        return -(-vocabulary // (by * ranks)) * by * ranks

    kept = 0
    for vocabulary in range(250, 270):
        for by in (1, 8, 12, 128):
            for then in (1, 2, 3):
                for now in (1, 2, 4):
                    sizes = [padded(vocabulary, by, ranks) for ranks in (then, now)]
                    saved, args = (
                        Namespace(
                            padded_vocab_size=size,
                            vocab_size=vocabulary,
                            make_vocab_size_divisible_by=by,
                            tensor_model_parallel_size=ranks,
                        )
                        for size, ranks in zip(sizes, (then, now), strict=True)
                    )
                    line = other_padding(saved, args)
                    assert bool(line) == (sizes[0] != sizes[1])
                    if remedy := re.search(r"divisible-by (\d+) keeps (\d+)$", line):
                        assert padded(vocabulary, int(remedy[1]), now) == int(remedy[2]) == sizes[0]
                        kept += 1
                    elif line:
                        assert sizes[0] % now
    assert kept > 50
    assert other_padding(None, Namespace()) == other_padding(Namespace(), Namespace(padded_vocab_size=5)) == ""
