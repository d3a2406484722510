"""Training that goes on from weights without their masters, in E4M3 or in BF16: its weights show small updates."""

import re

import pytest
import torch
import torch.distributed.checkpoint as dcp
from launch import ROOT
from megatron_runs import TINY_GPT, run_megatron, script_path

from megatron_fp8.checkpoint import convert

slow = pytest.mark.slow
LLAMA = [*TINY_GPT, *"--vocab-size 256 --group-query-attention --num-query-groups 2 --fp8-level O3".split()]
AS_LOADED = "--fp8-masters-as-loaded"
SMALL_STEPS = "--finetune --train-iters 10 --lr 1e-6 --min-lr 1e-6 --lr-warmup-iters 0 --weight-decay 0".split()
SMALL_STEPS += ["--micro-batch-size", "4"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> str:
    """A checkpoint of O3 without its optimizer."""
    return save_weights(tmp_path_factory, "O3")


@pytest.fixture(scope="module")
def in_bf16(tmp_path_factory) -> str:
    """One of O1."""
    return save_weights(tmp_path_factory, "O1")


def save_weights(tmp_path_factory, level) -> str:
    folder = str(tmp_path_factory.mktemp("saved"))
    flags = "--train-iters 4 --lr-decay-iters 10 --save-interval 4 --no-save-optim --save".split()
    run_megatron(1, [*LLAMA, "--fp8-level", level, *flags, folder])
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


@pytest.mark.parametrize(
    ("level", "nproc", "flags"),
    [
        ("O1", 1, ""),
        ("O2", 2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
        pytest.param("O2", 2, "--tensor-model-parallel-size 2 --sequence-parallel", marks=slow),
        pytest.param("O1", 2, "--use-distributed-optimizer --fp8-partition greedy", marks=slow),
        pytest.param("O3", 1, "--fp8-bf16-layers *", marks=slow),
    ],
)
def test_bf16_weights_show_small_updates(level, nproc, flags, in_bf16):
    """They are quantised for GEMMs once a step; one BF16 number in sixteen is the last before another E4M3 number."""
    share, _ = shown(in_bf16, "--fp8-level", level, *flags.split(), nproc=nproc)
    assert share == pytest.approx(1, abs=0.25)


@pytest.mark.parametrize("level", ["O1", pytest.param("O2", marks=slow)])
def test_bf16_weights_lag_behind_masters_as_loaded(level, in_bf16):
    assert shown(in_bf16, "--fp8-level", level, AS_LOADED)[0] < 0.4


@slow
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_bf16_weights_keep_what_came_in_e4m3(level, saved):
    """O1 and O2 draw half an ulp of BF16, not of E4M3, so that no weight changes. The copy that GEMMs read has another
    scale: the file's few numbers lie anywhere between two of its numbers, and the share with them."""
    assert 0.4 < shown(saved, "--fp8-level", level)[0] < 1.6


@pytest.mark.parametrize("level", ["O1", pytest.param("O2", marks=slow)])
def test_the_first_loss_is_the_one_of_masters_as_loaded(level, in_bf16):
    """To the last digit; with them FP8 switched off is stock until the second update."""
    begin = [*LLAMA, *"--finetune --lr-warmup-iters 0 --train-iters 3 --fp8-log-exact --load".split(), in_bf16]
    off = f"--fp8-gemm bf16 --fp8-grad-accum fp32 --fp8-grad-reduce fp32 --fp8-level {level}".split()
    arms = ["--fp8-level", "O0"], off, [*off, AS_LOADED]
    stock, drawn, loaded = (exact(run_megatron(1, [*begin, *flags])) for flags in arms)
    assert len(stock) == 3 and loaded[0] == drawn[0] == stock[0]
    assert loaded[1] == stock[1] != drawn[1] and float(drawn[1]) == pytest.approx(float(stock[1]), abs=1e-3)


def exact(run) -> list[str]:
    return re.findall(r"exact lm loss ([^\s;]+)", "\n".join(run.lines))


@slow
def test_layouts_draw_the_same_masters(in_bf16, tmp_path):
    """Read from checkpoints of a step without a learning rate. A resumed run has them from there, and draws none."""
    still = "--lr 0 --min-lr 0 --lr-warmup-iters 0"

    def masters(name, nproc=1, flags=""):
        begin = f"{still} --finetune --load {in_bf16} --train-iters 1 --save {tmp_path / name} --save-interval 1"
        run = run_megatron(nproc, [*LLAMA, *begin.split(), "--fp8-level", "O1", *flags.split()])
        said = [line for line in run.lines if "each master is drawn" in line]
        assert len(said) == (AS_LOADED not in flags)
        return read(tmp_path / name / "iter_0000001")

    def read(folder):
        found = dcp.FileSystemReader(folder)
        sizes = found.read_metadata().state_dict_metadata
        names = [n for n in sizes if re.fullmatch(r"optimizer\.state\.param\..*layers.*linear_\w+\.weight", n)]
        state = {name: torch.empty(sizes[name].size) for name in names}
        dcp.load(state, storage_reader=found)
        return state

    loaded, alone = masters("loaded", flags=AS_LOADED), masters("alone")
    assert len(alone) > 3 and all(torch.equal(values, values.bfloat16().float()) for values in loaded.values())
    for name, values in alone.items():
        assert torch.equal(values.bfloat16().float(), loaded[name])
        assert (values == loaded[name]).float().mean() < 0.01
    for i, flags in enumerate(("--use-distributed-optimizer", "--pipeline-model-parallel-size 2 --fp8-level O2",
                               "--use-distributed-optimizer --fp8-partition greedy")):  # fmt: skip
        other = masters(f"{i}", 2, flags)
        assert other.keys() == alone.keys() and all(torch.equal(other[name], alone[name]) for name in alone), flags
    resume = f"{still} --load {tmp_path / 'alone'} --train-iters 2 --override-opt_param-scheduler --fp8-level O2"
    run = run_megatron(1, [*LLAMA, *resume.split(), "--save", str(tmp_path / "alone"), "--save-interval", "1"])
    assert not any("each master is drawn" in line for line in run.lines)
    again = read(tmp_path / "alone/iter_0000002")
    assert all(torch.equal(again[name], alone[name]) for name in alone)


def test_without_the_draw_they_would_not(saved):
    assert shown(saved, BF16_ONLY="1")[0] < 0.1


@slow
def test_o3_begins_on_the_files_numbers_too(saved):
    share, undrawn = shown(saved, AS_LOADED)
    assert share < 0.1 and undrawn == 1


@slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("dtype", ["bf16", "e4m3"])
def test_they_show_after_a_way_through_hugging_face(dtype, saved, tmp_path, capsys):
    convert.to_hf(saved, str(tmp_path / "hf"), **({} if dtype == "bf16" else {"dtype": dtype}))
    convert.to_megatron(str(tmp_path / "hf"), str(tmp_path / "back"))
    capsys.readouterr()
    share, undrawn = shown(str(tmp_path / "back"), "--data-parallel-random-init")
    assert share == pytest.approx(1, abs=0.25) and undrawn < 0.01
