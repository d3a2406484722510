"""Checkpoints at every level: they resume bit for bit, load at other layouts and levels, or are refused."""

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from launch import ROOT, RunFailed
from megatron_runs import ASYNCHRONOUS, TINY_GPT, Run, run_megatron
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

nightly = pytest.mark.slow
pytestmark = pytest.mark.timeout(3600)  # a busy machine takes ten times as long
DISTRIBUTED = "--use-distributed-optimizer"
UNTIED = "--untie-embeddings-and-output-weights"
OVERLAP = f"{DISTRIBUTED} --overlap-grad-reduce --overlap-param-gather"


def train(nproc: int, flags: str, folder: Path | None = None, **named) -> Run:
    """Train the tiny GPT; `save=N` into the folder every N steps, `load=True` from it, `until=N` of 10 iterations.

    tied: tie the embedding to the LM head.
    """
    extra = flags.split()
    if "save" in named:
        extra += ["--save", str(folder), "--save-interval", str(named["save"])]
    if named.get("load"):
        extra += ["--load", str(folder)]
    if "until" in named:
        extra += ["--exit-interval", str(named["until"])]
    model = [flag for flag in TINY_GPT if not (named.get("tied") and flag == UNTIED)]
    return run_megatron(nproc, [*model, *extra], timeout=900)


def tensors(folder: Path, iteration: int) -> dict[str, torch.Tensor]:
    """Every tensor in a checkpoint."""
    reader = dcp.FileSystemReader(folder / f"iter_{iteration:07d}")
    stored = reader.read_metadata().state_dict_metadata.items()
    found = {
        name: torch.empty(data.size, dtype=data.properties.dtype)
        for name, data in stored
        if isinstance(data, TensorStorageMetadata)
    }
    dcp.load(found, storage_reader=reader, no_dist=True)
    return found


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys() and len(a) > 20
    for name in a:
        assert torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8)), name


def goes_on_bit_for_bit(nproc: int, flags: str, steps: int, folder: Path, tied: bool = False) -> None:
    """A run that is resumed in the middle has the losses, norms, weights and states of the run that went on."""
    half = steps // 2
    whole = train(nproc, flags, folder / "whole", save=half, tied=tied)
    shutil.copytree(folder / "whole", folder / "cut")
    shutil.rmtree(folder / "cut" / f"iter_{steps:07d}")
    (folder / "cut/latest_checkpointed_iteration.txt").write_text(str(half))
    rest = train(nproc, flags, folder / "cut", save=half, load=True, tied=tied)
    assert len(rest.steps) == half and rest.grad_norms == whole.grad_norms[half:]
    resumed, expected = rest.losses, whole.losses[half:]
    del resumed[1], expected[1]  # stock logs the mean of a resumed run's first two losses there
    assert resumed == expected
    seen = len(rest.validation_losses)
    assert seen >= len(whole.validation_losses) // 2
    assert rest.validation_losses == whole.validation_losses[len(whole.validation_losses) - seen :]
    same(tensors(folder / "cut", steps), tensors(folder / "whole", steps))


@nightly
@pytest.mark.parametrize(
    ("nproc", "flags", "steps"),
    [
        (2, f"--fp8-level O3 {OVERLAP}", 50),
        (1, "--fp8-level O2 --adam-beta2 0.999", 20),  # v is rounded by a draw
        (2, f"--fp8-level O2 --fp8-ckpt-compact {DISTRIBUTED}", 20),
        (2, f"--fp8-level O1 {OVERLAP}", 20),
        (1, "--fp8-level O1", 20),
        (2, f"--fp8-level O2 {OVERLAP}", 20),
        (2, f"--fp8-level O3 --fp8-ckpt-compact {OVERLAP}", 20),
        (2, f"--fp8-level O3 --adam-beta2 0.999 {DISTRIBUTED}", 20),
        (2, f"--fp8-level O3 {ASYNCHRONOUS} {OVERLAP}", 20),
        (2, "--fp8-level O3", 20),
        (2, f"--fp8-level O3 --context-parallel-size 2 --attention-backend auto {OVERLAP}", 20),
        (1, "--fp8-level O3 --fp8-ckpt-compact", 20),
        (1, "--fp8-level O3 --fp8-master fp16", 20),
        (2, f"--fp8-level O3 --num-layers 4 --first-last-layers-bf16 {OVERLAP}", 20),
        (1, "--fp8-level O2 --fp8-master fp8 --fp8-exp-avg-sq fp8 --fp8-exp-avg bf16", 20),
    ],
)
def test_a_restart_in_the_middle(nproc, flags, steps, tmp_path):
    """Fifty steps at the last level with all overlaps, fewer for the others."""
    goes_on_bit_for_bit(nproc, f"{flags} --train-iters {steps}", steps, tmp_path)


DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"


@nightly
@pytest.mark.parametrize(
    ("nproc", "flags"),
    [
        (1, "--fp8-level O3"),
        (1, ""),
        (2, f"--fp8-level O3 {OVERLAP}"),
        (2, ""),
        (2, f"--fp8-level O3 --tensor-model-parallel-size 2 --sequence-parallel {DISTRIBUTED}"),
        (2, "--tensor-model-parallel-size 2"),
    ],
)
def test_dropout_goes_on_where_it_was(nproc, flags, tmp_path):
    """Bit for bit, with and without a level; without one, stock has no norm for --sequence-parallel here."""
    flags += f" {DROPOUT} --num-workers 1 --eval-interval 2 --eval-iters 1 --split 8,1,1"
    goes_on_bit_for_bit(nproc, flags, 10, tmp_path)


STAGES = f"--pipeline-model-parallel-size 3 --pipeline-model-parallel-layout Et|t|L {DISTRIBUTED} --global-batch-size 4"


@pytest.mark.parametrize("compact", ["", pytest.param("--fp8-ckpt-compact", marks=nightly)])
def test_a_stage_without_a_linear_goes_on(compact, tmp_path):
    """The last stage has only the loss. Rank 0, which writes the common part, has a layer."""
    goes_on_bit_for_bit(3, f"--fp8-level O3 {compact} {STAGES} --train-iters 4", 4, tmp_path)


@pytest.mark.parametrize(
    ("nproc", "layout", "tied"),
    [
        (3, "--ddp-bucket-size 9000", False),
        pytest.param(6, "--pipeline-model-parallel-size 2", True, marks=nightly),  # a tied embedding has its own bucket
    ],
)
def test_stocks_buckets_that_end_in_padding_go_on(nproc, layout, tied, tmp_path):
    """With 3 data-parallel ranks. Norms were saved with the numbers beside them: the loss rose to that of step 1."""
    flags = f"--fp8-level O3 {OVERLAP} {layout} --global-batch-size 6 --train-iters 4"
    goes_on_bit_for_bit(nproc, flags, 4, tmp_path, tied=tied)


def test_a_compact_checkpoint_that_stock_cannot_save_is_refused_before_the_first_step(tmp_path):
    """Five norms of 64 are 320 elements, in four parts of 128. The first save ended in an AssertionError of stock's."""
    flags = f"--fp8-level O2 {DISTRIBUTED} --ddp-bucket-size 64 --overlap-grad-reduce"
    with pytest.raises(RunFailed, match=r"--fp8-ckpt-compact: .* is all padding.* remove --fp8-ckpt-compact") as failed:
        train(4, f"{flags} --fp8-ckpt-compact", tmp_path, save=1, until=1)
    assert "Traceback" not in str(failed.value) and "iteration" not in str(failed.value)
    train(4, flags, tmp_path, save=1, until=1)


@nightly
def test_a_stage_without_a_linear_loads_stocks_checkpoint(tmp_path):
    train(3, f"{STAGES} --dist-ckpt-optim-fully-reshardable", tmp_path, save=2, until=2)
    assert len(train(3, f"--fp8-level O3 {STAGES}", tmp_path, load=True).steps) > 0


@pytest.mark.slow
def test_a_rank_that_would_have_padding_alone_is_saved(tmp_path):
    """33,088 elements are stock's here. Cut in four after padding to 65,536, the last part would have none of them."""
    padded = "--ddp-pad-buckets-for-high-nccl-busbw --use-distributed-optimizer --fp8-level O1 --train-iters 2"
    flags = [*TINY_GPT, *padded.split(), "--lr-decay-iters", "10"]
    run = run_megatron(4, [*flags, "--save", str(tmp_path), "--save-interval", "2"])
    assert len(run.losses) == 2 and (tmp_path / "iter_0000002").is_dir()
    assert sum("--ddp-pad-buckets-for-high-nccl-busbw: switched off" in line for line in run.lines) == 1


def test_noise_of_an_emulated_head_goes_on(tmp_path):
    """It depends on the step, like the linears': a restart or an evaluation does not advance it."""
    noisy = "--fp8-emulate E8M3:stochastic --fp8-emulate-lm-head --eval-interval 1 --eval-iters 1 --split 8,1,1"
    goes_on_bit_for_bit(1, f"{noisy} --global-batch-size 4 --train-iters 4", 4, tmp_path)


LAYOUTS = {
    "dp1": (1, ""),
    "dp2": (2, ""),
    "tp2": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "vp2": (2, "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"),
    "cp2": (2, "--context-parallel-size 2 --attention-backend auto"),
    "tp2 pp2": (4, "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2"),
}


def layout(name: str) -> tuple[int, str]:
    """Ranks and flags; "zero" is the distributed optimizer."""
    ranks, flags = LAYOUTS[name.removesuffix(" zero")]
    return ranks, flags + f" {DISTRIBUTED}" * name.endswith(" zero")


def whole_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors in a checkpoint that are equal at every layout: masters under one name, no FP8 scales."""
    found = tensors(folder, 3).items()
    return {name.replace(".fp32_param.", ".param."): tensor for name, tensor in found}


MOVES = [  # level, the layout that saves, the layout that resumes; the embedding is tied to the LM head
    ("O3", "tp2 zero", "pp2", False),
    ("O3", "pp2 zero", "tp2 zero", True),
    ("O3", "tp2", "dp2 zero", True),
    ("O3", "dp1 zero", "vp2", False),
    ("O3", "vp2 zero", "tp2 zero", True),
    ("O3", "vp2", "pp2 zero", False),
    ("O3", "tp2 pp2 zero", "dp1", False),
    ("O3", "dp2 zero", "tp2 pp2 zero", True),
    ("O3", "dp2 zero", "dp1 zero", False),
    ("O3", "tp2 zero", "dp1 zero", False),
    ("O3", "cp2 zero", "dp1 zero", False),
    ("O3", "dp1 zero", "cp2 zero", True),
    ("O3", "tp2 zero", "cp2", False),
    ("O2", "dp1", "tp2 zero", False),
    ("O2", "tp2 zero", "pp2 zero", False),
    ("O2", "pp2", "dp2 zero", True),
    ("O1", "dp1 zero", "tp2 zero", False),
    ("O1", "tp2 zero", "dp2", True),
    ("O1", "pp2 zero", "vp2 zero", False),
]


@pytest.mark.parametrize(
    ("level", "before", "after", "tied"),
    [pytest.param(*move, marks=[nightly] if i else []) for i, move in enumerate(MOVES)],
)
def test_another_layout(level, before, after, tied, tmp_path):
    """The first step's loss, and every weight, master and moment, equal those on one rank bit for bit."""
    (ranks, flags), (other_ranks, other_flags) = layout(before), layout(after)
    both = f"--fp8-level {level} --num-layers 4 --global-batch-size 4"
    whole = train(ranks, f"{both} {flags}", tmp_path / "first", save=3, until=5, tied=tied)
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    (tmp_path / "second/latest_checkpointed_iteration.txt").write_text("3")
    rest = train(other_ranks, f"{both} {other_flags}", tmp_path / "second", load=True, until=5, tied=tied)
    assert rest.losses[0] == pytest.approx(whole.losses[3], abs=1e-3)
    assert rest.losses[1] == pytest.approx((whole.losses[3] + whole.losses[4]) / 2, abs=2e-3)
    assert rest.grad_norms == pytest.approx(whole.grad_norms[3:5], rel=0.01)
    # without a step it saves what it has loaded
    still = "--train-iters 3 --override-opt_param-scheduler"
    train(other_ranks, f"{both} {other_flags} {still}", tmp_path / "second", save=2, load=True, tied=tied)
    old, new = whole_weights(tmp_path / "first"), whole_weights(tmp_path / "second")
    assert old.keys() == new.keys() and sum(".linear_" in name and name.endswith(".weight") for name in old) == 4 * 4
    assert sum("optimizer.state.param." in name for name in old) > 8 - tied
    for name in old:
        in_blocks = ".exp_avg" in name and ".linear_" in name and name.endswith(".weight") and level != "O1"
        if not (in_blocks and "tp2" in before + after):  # other blocks: rounded once more
            assert torch.equal(old[name].view(torch.uint8), new[name].view(torch.uint8)), name


def test_a_schedule_of_batches_goes_on_with_half_the_micro_batches(tmp_path):
    """Gradients are then twice as large: with the old scales the largest were clipped, to a norm of 0.863."""
    schedule = "--fp8-level O3 --step-batch-size-schedule 0:4,1024:8"  # tokens: from step 5 on
    at = TINY_GPT.index("--global-batch-size")
    flags = [*TINY_GPT[:at], *TINY_GPT[at + 2 :], *schedule.split()]
    whole = run_megatron(1, [*flags, *f"--train-iters 5 --save {tmp_path} --save-interval 3".split()])
    load = f"--load {tmp_path} --ckpt-step 3 --train-iters 5 --use-checkpoint-opt_param-scheduler"
    rest = run_megatron(2, [*flags, *load.split()])
    assert rest.losses[0] == pytest.approx(whole.losses[3], abs=1e-3)
    assert rest.grad_norms == pytest.approx(whole.grad_norms[3:], rel=2e-3)


@nightly
def test_an_earlier_form_goes_on_in_its_layout(tmp_path):
    """Older checkpoints have stock's default form: another data-parallel size can load it, another layout cannot."""
    flags = f"--fp8-level O3 {DISTRIBUTED}"
    script = ["tests/scripts/earlier_checkpoints.py"]
    saving = [*TINY_GPT, *flags.split(), "--save", str(tmp_path), "--save-interval", "5"]
    whole = run_megatron(2, saving, script=script, env={"PYTHONPATH": f"{ROOT}:{ROOT}/tools"}, timeout=900)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    rest = train(2, flags, tmp_path, load=True)
    assert rest.losses[0] == whole.losses[5] and rest.losses[2:] == whole.losses[7:]
    assert train(1, flags, tmp_path, load=True, until=6).losses[0] == pytest.approx(whole.losses[5], abs=1e-3)
    refused = r"saved as dp_reshardable, for its own layout only \(tensor 1, pipeline 1, distributed optimizer True\)"
    for ranks, other in ((2, f"{flags} --tensor-model-parallel-size 2 --sequence-parallel"), (1, "--fp8-level O3")):
        with pytest.raises(RunFailed, match=refused) as failed:
            train(ranks, other, tmp_path, load=True)
        assert "Traceback" not in str(failed.value)
        assert train(ranks, f"{other} --no-load-optim", tmp_path, load=True, until=6).losses
    train(2, flags, tmp_path, load=True, save=6, until=6)
    again = train(1, "--fp8-level O3", tmp_path, load=True, until=7)  # the remedy that it names first
    assert again.losses[0] == pytest.approx(whole.losses[6], abs=1e-3)


@nightly
@pytest.mark.parametrize(
    ("flags", "reshard"), [("--distrib-optim-fully-reshardable-mem-efficient", 1), ("--ckpt-fully-parallel-load", 2)]
)
def test_other_ways_of_the_reshardable_form(flags, reshard, tmp_path):
    both = f"--fp8-level O3 {DISTRIBUTED} {flags}"
    whole = train(2, both, tmp_path, save=5)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    rest = train(reshard, both, tmp_path, load=True)
    assert rest.losses[0] == pytest.approx(whole.losses[5], abs=1e-3 if reshard == 1 else 0)


EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type none"
SPREAD = "--expert-model-parallel-size 2"  # a part of stock's own chain of optimizers for experts alone


@nightly
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", DISTRIBUTED),  # stock's local spec names the norm before experts differently
        (f"{DISTRIBUTED} --dist-ckpt-optim-fully-reshardable", SPREAD),
        (f"{SPREAD} {DISTRIBUTED} --dist-ckpt-optim-fully-reshardable", ""),
        (f"--fp8-level O3 {DISTRIBUTED}", SPREAD),
        ("--fp8-level O3", f"{SPREAD} {DISTRIBUTED}"),
        (f"--fp8-level O3 {SPREAD}", DISTRIBUTED),
    ],
)
def test_experts_on_other_ranks(before, after, tmp_path):
    """Stock without a level, and a level: the states of the embedding, the experts and the router."""
    whole = train(2, f"{EXPERTS} {before}", tmp_path, save=5)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    rest = train(2, f"{EXPERTS} --fp8-level O3 {after}", tmp_path, load=True)
    assert rest.losses[0] == pytest.approx(whole.losses[5], abs=1e-3)
    assert rest.losses[2:] == pytest.approx(whole.losses[7:], abs=2e-3)
    assert rest.grad_norms == pytest.approx(whole.grad_norms[5:], abs=5e-3)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param("--fp8-level O1", "--fp8-level O3", marks=nightly),
        pytest.param("--fp8-level O3", "--fp8-level O1 --fp8-recipe tensorwise", marks=nightly),
        pytest.param("--fp8-level O2", "--fp8-level O3 --fp8-master fp16", marks=nightly),
        pytest.param("--fp8-level O3", "--fp8-level O2 --fp8-partition greedy", marks=nightly),
        pytest.param("--fp8-level O1 --fp8-recipe tensorwise", "--fp8-level O2", marks=nightly),
    ],
)
def test_another_level(before, after, tmp_path):
    first = train(2, f"{before} {DISTRIBUTED}", tmp_path, save=5, until=5)
    whole = train(2, f"{before} {DISTRIBUTED}")
    rest = train(2, f"{after} {DISTRIBUTED}", tmp_path, load=True)
    assert first.losses == whole.losses[:5]
    assert rest.losses[0] == pytest.approx(whole.losses[5], abs=3e-3)
    assert rest.losses[2:] == pytest.approx(whole.losses[7:], abs=1e-2)
    assert rest.grad_norms == pytest.approx(whole.grad_norms[5:], rel=0.02)


@pytest.mark.parametrize(
    ("level", "before", "after"),
    [
        pytest.param("O3", "--fp8-bf16-layers decoder.layers.0.*", "--fp8-bf16-layers *.linear_fc2", marks=nightly),
        pytest.param("O3", "--fp8-bf16-layers *", "", marks=nightly),
        pytest.param("O1", "", "--fp8-bf16-layers *", marks=nightly),
        pytest.param("O2", "--first-last-layers-bf16", "--fp8-bf16-layers *.linear_qkv", marks=nightly),
    ],
)
def test_other_linears_in_bf16(level, before, after, tmp_path):
    """Scales that the checkpoint does not have are computed anew."""
    first = train(1, f"--fp8-level {level} {before}", tmp_path, save=5, until=5)
    whole = train(1, f"--fp8-level {level} {before}")
    rest = train(1, f"--fp8-level {level} {after}", tmp_path, load=True)
    assert first.losses == whole.losses[:5]
    assert rest.losses[0] == pytest.approx(whole.losses[5], abs=3e-3)
    assert rest.losses[2:] == pytest.approx(whole.losses[7:], abs=1e-2)
    assert rest.grad_norms == pytest.approx(whole.grad_norms[5:], rel=0.02)


@nightly
def test_replicas_have_the_same_weights_while_gathers_are_under_way():
    """Stock hashes them during a run, and stops if they differ."""
    check = "--ddp-num-buckets 4 --check-weight-hash-across-dp-replicas-interval 2"
    assert len(train(2, f"--fp8-level O2 {OVERLAP} {check}").losses) == 10


@nightly
def test_a_damaged_non_persistent_checkpoint_is_refused(tmp_path):
    flags = "--fp8-level O3 --non-persistent-ckpt-type global --non-persistent-save-interval 3"
    train(1, flags, tmp_path, save=2, until=3)
    (folder,) = (tmp_path / "non_persistent").glob("iter_0000003")
    file = max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "2"  # older, and ignored
    with pytest.raises(RunFailed, match=r"iter_0000003/.* is damaged: its SHA-256"):
        train(1, flags, tmp_path, load=True)


def test_what_a_killed_save_has_put_aside_is_put_back_before_it_is_looked_for(tmp_path):
    """Also with non-persistent checkpoints in another folder, and with --use-checkpoint-args."""
    flags = "--fp8-level O3 --non-persistent-ckpt-type global --non-persistent-save-interval 2 --global-batch-size 4"
    flags += f" --non-persistent-global-ckpt-dir {tmp_path / 'fast'}"
    train(1, flags, tmp_path / "slow", save=10, until=2)
    folder = tmp_path / "fast/iter_0000002"
    files = list(folder.iterdir())
    (folder / "replaced").mkdir()
    (folder / "unsealed").touch()
    for path in files:
        path.rename(folder / "replaced" / path.name)
    rest = train(1, f"{flags} --use-checkpoint-args", tmp_path / "slow", save=10, load=True, until=3)
    assert [step.iteration for step in rest.steps] == [3]
    assert not (tmp_path / "fast/saving.lock").exists()


@nightly
@pytest.mark.parametrize("level", ["O1", "O3"])
def test_a_run_without_a_level_goes_on_at_one(level, tmp_path):
    """Stock's own masters and moments, saved in stock's form for other layouts."""
    both = f"{DISTRIBUTED} --dist-ckpt-optim-fully-reshardable"
    whole = train(2, both)
    train(2, both, tmp_path, save=5, until=5)
    rest = train(2, f"{both} --fp8-level {level}", tmp_path, load=True)
    assert rest.losses[0] == pytest.approx(whole.losses[5], abs=1e-3)
    assert rest.losses[2:] == pytest.approx(whole.losses[7:], abs=2e-3)
    assert rest.grad_norms == pytest.approx(whole.grad_norms[5:], abs=5e-3)


@nightly
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_stock_and_back(level, tmp_path):
    """Only weights: stock's at a level, on two tensor-parallel ranks, and a level's in stock."""
    stock = train(1, "", tmp_path / "stock", save=10)
    weights = "--finetune --train-iters 4"
    ours = train(2, f"--fp8-level {level} --tensor-model-parallel-size 2 --sequence-parallel {weights}",
                 tmp_path / "stock", load=True)  # fmt: skip
    assert ours.losses[0] == pytest.approx(stock.losses[-1], abs=0.1) and ours.losses[0] < stock.losses[0] - 0.3
    mine = train(2, f"--fp8-level {level} {DISTRIBUTED}", tmp_path / "ours", save=10)
    back = train(1, weights, tmp_path / "ours", load=True)
    assert back.losses[0] == pytest.approx(mine.losses[-1], abs=0.1) and back.losses[0] < mine.losses[0] - 0.3


def test_refusals_are_one_line(tmp_path):
    compact = "--fp8-level O2 --fp8-ckpt-compact"
    train(1, compact, tmp_path, save=2, until=2)
    damaged = tmp_path / "damaged"
    shutil.copytree(tmp_path / "iter_0000002", damaged / "iter_0000002")
    (damaged / "latest_checkpointed_iteration.txt").write_text("2")
    file = max((damaged / "iter_0000002").glob("*.distcp"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    for folder, flags, line in (
        (damaged, compact, f"--load {damaged}: iter_0000002/{file.name} is damaged: its SHA-256"),
        (tmp_path, "--fp8-level O3", f"--load {tmp_path}: the checkpoint was saved with --fp8-ckpt-compact, for"),
        (tmp_path, f"{compact} --num-layers 3", f"--load {tmp_path}: the checkpoint does not fit this run: Global"),
    ):
        with pytest.raises(RunFailed) as failed:
            train(1, flags, folder, load=True)
        said = [text for text in str(failed.value).splitlines() if text.startswith("megatron_fp8: ")]
        assert said and said[0].startswith(f"megatron_fp8: {line}"), str(failed.value)[-2000:]
        assert "Traceback" not in str(failed.value)
