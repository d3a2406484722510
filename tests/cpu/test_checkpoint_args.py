"""--use-checkpoint-args: a level reads the checkpoint's arguments instead of the typed ones."""

from argparse import Namespace

import pytest
from launch import RunFailed
from megatron_runs import TINY_GPT, run_megatron

from megatron_fp8.errors import UserError
from megatron_fp8.flags.checkpoint_args import take_over
from megatron_fp8.tools.perf.job_flags import parse

O3, READ = "--fp8-level O3", "--use-checkpoint-args"
OF_MODEL = {  # flag: how many values it has
    **dict.fromkeys(("--swiglu", "--disable-bias-linear", "--untie-embeddings-and-output-weights"), 0),
    **dict.fromkeys(("--num-layers", "--hidden-size", "--num-attention-heads", "--ffn-hidden-size"), 1),
    **dict.fromkeys(("--seq-length", "--max-position-embeddings", "--normalization", "--position-embedding-type"), 1),
}


def without_model() -> list[str]:
    """TINY_GPT's flags without those that a checkpoint gives."""
    words, kept = iter(TINY_GPT), []
    for word in words:
        if word in OF_MODEL:
            for _ in range(OF_MODEL[word]):
                next(words)
        else:
            kept.append(word)
    return kept


def save(ranks: int, folder, flags: str, base: list[str] = TINY_GPT, steps: int = 3):
    saving = f"--train-iters {steps} --lr-decay-iters 10 --save {folder} --save-interval 2"
    return run_megatron(ranks, [*base, *flags.split(), *saving.split()])


def resume(ranks: int, folder, flags: str):
    going_on = f"--train-iters 3 --lr-decay-iters 10 --load {folder} --ckpt-step 2 {READ}"
    return run_megatron(ranks, [*without_model(), *flags.split(), *going_on.split()])


def test_model_and_layout_come_from_a_checkpoint(tmp_path):
    """With two tensor-parallel ranks a step has two micro-batches instead of one, so gradients are stored in BF16."""
    batch = f"{O3} --global-batch-size 4"
    whole = save(2, tmp_path, f"{batch} --tensor-model-parallel-size 2")
    rest = resume(2, tmp_path, f"{batch} --use-mp-args-from-checkpoint-args")
    assert [line for line in rest.lines if "gradients are stored in BF16: 2 micro-batches a step" in line]
    assert (rest.losses, rest.grad_norms) == (whole.losses[2:], whole.grad_norms[2:])


@pytest.mark.slow
def test_what_changes_the_function_alone_comes_from_a_checkpoint_too(tmp_path):
    """No tensor's shape tells of a window or an epsilon: without them the losses would be others."""
    function = "--window-size 12,0 --norm-epsilon 0.01 --attention-backend auto"
    whole = save(1, tmp_path, f"{O3} {function}")
    rest = resume(1, tmp_path, f"{O3} --attention-backend auto")
    said = [line for line in rest.lines if "which Megatron does not take from a checkpoint" in line]
    assert said == [f"[fp8] --use-checkpoint-args: {flag}, which Megatron does not take from a checkpoint"
                    for flag in ("--window-size 12,0", "--norm-epsilon 0.01")]  # fmt: skip
    assert (rest.losses, rest.grad_norms) == (whole.losses[2:], whole.grad_norms[2:])
    other = save(1, tmp_path / "other", O3)
    assert other.losses[0] != whole.losses[0]


def test_a_value_that_is_missing_or_the_same_changes_nothing():
    args = Namespace(window_size=None, layernorm_epsilon=1e-5, use_rope_scaling=False, rope_scaling_factor=8.0)
    before = dict(vars(args))
    assert not [*take_over(args, Namespace(layernorm_epsilon=1e-5, no_rope_freq=2, window_size=None))]
    assert vars(args) == before
    saved = Namespace(use_rope_scaling=True, rope_scaling_factor=32.0)
    assert len([*take_over(args, saved)]) == 1 and args.use_rope_scaling and args.rope_scaling_factor == 8
    assert len([*take_over(args, Namespace(**vars(saved), rope_factor_built=32.0))]) == 1
    assert args.rope_scaling_factor == 32


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--swiglu --disable-bias-linear --ffn-hidden-size 72", "--ffn-hidden-size 72: not a multiple of 16 "),
        ("--squared-relu --no-bias-gelu-fusion", "bias-gelu-fusion: add --no-bias-gelu-fusion: Megatron cannot "),
    ],
)
def test_what_a_level_cannot_train_is_refused_in_one_line(tmp_path, flags, line):
    plain = [word for word in TINY_GPT if word not in ("--swiglu", "--disable-bias-linear")]
    save(1, tmp_path, flags, plain, steps=2)
    with pytest.raises(RunFailed) as failed:
        resume(1, tmp_path, f"{O3} --finetune")
    said = [text for text in str(failed.value).splitlines() if text.startswith("megatron_fp8: ")]
    assert said and said[0].startswith(f"megatron_fp8: {line}"), str(failed.value)[-2000:]


def test_estimates_do_not_read_checkpoints():
    with pytest.raises(UserError, match=r"^--use-checkpoint-args: the sizes are in a checkpoint; give them as"):
        parse([*without_model(), READ, "--load", "/no/such/folder"])
