"""Checkpoint entries that a run with other settings must not load: scales, mu, forms."""

import re
import shutil

import pytest
from launch import RunFailed
from megatron_runs import TINY_GPT, run_megatron
from test_checkpoints import UNTIED, tensors, train

nightly = pytest.mark.slow
AGAIN = "--override-opt_param-scheduler"
STILL = f"--train-iters 2 --lr-decay-iters 10 {AGAIN}"  # saves what it has loaded
SAVED_BY = "--fp8-level O3 --micro-batch-size 8"  # on one rank


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of step 2."""
    folder = tmp_path_factory.mktemp("saved")
    train(1, SAVED_BY, folder, save=2, until=2)
    return folder


def said(nproc: int, flags: list[str]) -> str:
    """The error line of a run."""
    with pytest.raises(RunFailed) as failed:
        run_megatron(nproc, flags)
    assert "Traceback" not in str(failed.value)
    return next(line for line in str(failed.value).splitlines() if line.startswith("megatron_fp8: "))


@pytest.mark.parametrize(
    ("nproc", "flags"),
    [
        pytest.param(4, "--micro-batch-size 2", id="as many micro-batches", marks=nightly),
        pytest.param(1, "--calculate-per-token-loss", id="no share", marks=nightly),
        pytest.param(1, "--seq-length 32", id="shorter", marks=nightly),
        pytest.param(1, "--fp8-format e4m3", id="another range"),
    ],
)
def test_gradients_of_another_size_are_scaled_anew(nproc, flags, saved):
    """As the tensorwise recipe always does. With the saved scales they were clipped: a norm of 0.72 instead of 0.75."""
    first = {}
    for recipe in ("delayed", "tensorwise"):
        run = train(nproc, f"{SAVED_BY} {flags} --fp8-recipe {recipe}", saved, load=True, until=3)
        first[recipe] = (run.losses, run.grad_norms)
    assert len(first["delayed"][0]) == 1 and first["delayed"] == first["tensorwise"]


@nightly
def test_scales_that_were_only_saved_again_are_not_used(saved, tmp_path):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    many = f"{SAVED_BY} --micro-batch-size 2"
    train(4, f"{many} {STILL}", tmp_path, save=4, load=True)
    runs = [
        train(4, f"{many} {AGAIN} --fp8-recipe {recipe}", tmp_path, load=True, until=3)
        for recipe in ("delayed", "tensorwise")
    ]
    assert runs[0].grad_norms == runs[1].grad_norms


def test_mu_is_the_checkpoints_where_it_moves_alone(tmp_path):
    shared = "--fp8-level O1 --fp8-grad-reduce shared --fp8-grad-scaling"
    train(1, f"{shared} post", tmp_path, save=2, until=2)
    train(2, f"{shared} pre {STILL}", tmp_path, save=4, load=True)
    mu = [tensor for name, tensor in tensors(tmp_path, 2).items() if ".fp8_grad_mu." in name]
    assert mu and all(tensor == 0.5 for tensor in mu)


def test_another_learning_rate_goes_on_where_it_is_asked_for(saved):
    flags = [
        *TINY_GPT,
        *SAVED_BY.split(),
        "--load",
        str(saved),
        "--lr",
        "5e-4",
        "--train-iters",
        "4",
        "--lr-decay-style",
    ]
    flags += ["constant", "--lr-warmup-iters", "0"]
    assert "max_lr 0.001, min_lr 0.0001, this run max_lr 0.0005" in said(1, flags)
    run = run_megatron(1, [*flags, AGAIN])
    assert sum("learning rate: 5.000000E-04" in line for line in run.lines) == 2


def test_what_a_model_lacks_of_a_checkpoint_is_named(saved):
    flags = [*TINY_GPT, *SAVED_BY.split(), "--load", str(saved), "--exit-interval", "3"]
    left = "not loaded, this run's model has none: output_layer.weight"
    assert not any(left in line for line in run_megatron(1, flags).lines)
    tied = [flag for flag in flags if flag != UNTIED]
    assert sum(left in line for line in run_megatron(2, [*tied, "--pipeline-model-parallel-size", "2"]).lines) == 1


def test_a_compact_checkpoint_is_loaded_without_the_flag_and_leaves_its_form(tmp_path):
    train(1, "--fp8-level O2 --fp8-ckpt-compact", tmp_path, save=2, until=2)
    before = train(1, "--fp8-level O2 --fp8-ckpt-compact", tmp_path, load=True, until=3)
    after = train(1, "--fp8-level O2", tmp_path, load=True, until=3)
    assert (after.losses, after.grad_norms) == (before.losses, before.grad_norms)
    train(1, f"--fp8-level O2 {STILL}", tmp_path, save=4, load=True)
    elsewhere = train(2, f"--fp8-level O2 --tensor-model-parallel-size 2 {AGAIN}", tmp_path, load=True, until=3)
    assert elsewhere.losses == pytest.approx(before.losses, abs=1e-3)


def test_a_checkpoint_of_stocks_older_format_gives_its_weights(tmp_path):
    stock = [
        *TINY_GPT,
        "--save",
        str(tmp_path),
        "--save-interval",
        "2",
        "--exit-interval",
        "2",
        "--ckpt-format",
        "torch",
    ]
    run_megatron(1, stock)
    ours = [*TINY_GPT, "--fp8-level", "O3", "--load", str(tmp_path), "--train-iters", "3"]
    assert re.search(
        r"--load .*: a checkpoint of --ckpt-format torch.* add --no-load-optim or --finetune", said(1, ours)
    )
    assert len(run_megatron(1, [*ours, "--no-load-optim"]).losses) == 1


def test_tied_embeddings_that_megatron_cannot_save_are_refused(tmp_path):
    flags = f"--mtp-num-layers 1 --pipeline-model-parallel-size 2 --fp8-level O1 --save {tmp_path} --save-interval 5"
    tied = [flag for flag in TINY_GPT if flag != UNTIED]
    assert f"--save {tmp_path}: with several pipeline stages Megatron cannot save" in said(2, [*tied, *flags.split()])


def test_a_step_by_name_is_not_passed_over_for_a_newer_one(tmp_path):
    flags = "--fp8-level O1 --non-persistent-ckpt-type global --non-persistent-save-interval 3"
    train(1, flags, tmp_path, save=2, until=3)
    back = [*TINY_GPT, *flags.split(), "--load", str(tmp_path), "--ckpt-step", "2"]
    assert f"--ckpt-step 2: with --non-persistent-ckpt-type global Megatron resumes from {tmp_path}" in said(1, back)
