"""Training that goes on from O3's E4M3 weights without their masters: at O3 its weights show small updates."""

import re

import pytest
from launch import ROOT
from megatron_runs import TINY_GPT, run_megatron, script_path

from megatron_fp8.checkpoint import convert

slow = pytest.mark.slow
LLAMA = [*TINY_GPT, *"--vocab-size 256 --group-query-attention --num-query-groups 2 --fp8-level O3".split()]
SMALL_STEPS = "--finetune --train-iters 10 --lr 1e-6 --min-lr 1e-6 --lr-warmup-iters 0 --weight-decay 0".split()


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> str:
    """A checkpoint of O3 without its optimizer."""
    folder = str(tmp_path_factory.mktemp("saved"))
    flags = "--train-iters 4 --lr-decay-iters 10 --save-interval 4 --no-save-optim --save".split()
    run_megatron(1, [*LLAMA, *flags, folder])
    return folder


def shown(folder, *flags, nproc=1, **env) -> tuple[float, float]:
    """Of a run that goes on from the folder: how much of the masters' way its weights show at its end, and the share
    of masters that began on their weight."""
    script, env = str(ROOT / "tests/scripts/way_shown.py"), {"PYTHONPATH": script_path(), **env}
    run = run_megatron(nproc, [*LLAMA, *SMALL_STEPS, "--load", folder, *flags], script=script, env=env)
    found = re.findall(r"^shown: (\S+); undrawn: (\S+)$", "\n".join(run.lines), re.MULTILINE)
    assert len(found) == 10
    return float(found[-1][0]), float(found[-1][1])


@pytest.mark.parametrize(
    ("nproc", "flags"),
    [
        (1, ""),
        pytest.param(2, "--tensor-model-parallel-size 2 --sequence-parallel", marks=slow),
        pytest.param(2, "--use-distributed-optimizer --fp8-partition greedy", marks=slow),
        pytest.param(1, "--fp8-master fp32", marks=slow),
    ],
)
def test_small_updates_show(nproc, flags, saved):
    """400 or so of 82,000 weights move by an ulp each, so the share's deviation is 0.05."""
    share, undrawn = shown(saved, *flags.split(), nproc=nproc)
    assert share == pytest.approx(1, abs=0.25) and undrawn < 0.01


@slow
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_bf16_weights_show_updates_of_their_own_ulp(level, saved):
    """O1 and O2 do not draw: the weights are the file's. It is BF16's ulp that small updates have to reach, as in a run
    from any BF16 file. E4M3's is no second one: the copy that GEMMs read has another scale, so the file's few numbers
    lie anywhere between two of its numbers."""
    small, _ = shown(saved, "--fp8-level", level)
    larger, _ = shown(saved, "--fp8-level", level, "--lr", "1e-5", "--min-lr", "1e-5")
    assert small < 0.4 and 0.8 < larger < 1.5


def test_without_the_draw_they_would_not(saved):
    assert shown(saved, BF16_ONLY="1")[0] < 0.1


@slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("dtype", ["bf16", "e4m3"])
def test_they_show_after_a_way_through_hugging_face(dtype, saved, tmp_path, capsys):
    convert.to_hf(saved, str(tmp_path / "hf"), **({} if dtype == "bf16" else {"dtype": dtype}))
    convert.to_megatron(str(tmp_path / "hf"), str(tmp_path / "back"))
    capsys.readouterr()
    share, undrawn = shown(str(tmp_path / "back"), "--data-parallel-random-init")
    assert share == pytest.approx(1, abs=0.25) and undrawn < 0.01
