"""configs/lab/evidence_l0.yaml: its arms differ in what they are compared for, and in nothing else."""

from launch import ROOT

from megatron_fp8.flags.config import config_from_args
from megatron_fp8.tools.lab.sweep.plan_file import read_plan

PLAN = read_plan(ROOT / "configs/lab/evidence_l0.yaml")


def arguments(parse, arm: str):
    """Megatron's arguments of an arm's first run."""
    run = next(run for run in PLAN.runs() if run.arm == arm)
    args = parse(*run.command[1:])
    args.world_size = PLAN.processes
    return args


def test_transformer_engine_scales_as_the_levels_do(parse):
    """The same formats, recipe, history and margin; it is stock's, without a level."""
    te = arguments(parse, "TE FP8")
    assert config_from_args(te) is None and te.transformer_impl == "transformer_engine"
    formats = {"hybrid": ("e4m3", "e5m2")}[te.fp8]
    for arm in ("O1", "O3"):
        level = config_from_args(arguments(parse, arm))
        assert (level.recipe, level.margin) == (te.fp8_recipe, te.fp8_margin)
        assert level.amax_history_len == te.fp8_amax_history_len
        assert level.amax_compute_algo == te.fp8_amax_compute_algo
        assert (level.forward_format.name.lower(), level.grad_format.name.lower()) == formats


def test_gradients_are_sent_in_fp8_at_the_levels_alone(parse):
    """A rank has one micro-batch a step: two, and the levels would store them in BF16."""
    for arm in PLAN.arms:
        if arm != "TE FP8":
            config = config_from_args(arguments(parse, arm))
            bf16 = arm.startswith("BF16")
            assert (config.grad_accum, config.grad_reduce) == (("fp32", "fp32") if bf16 else ("fp8", "block"))
            assert config.gemm == ("bf16" if bf16 else "fp8")


def test_the_arms_of_the_first_store_stay_first():
    """New arms come last, so that runs of the committed store keep their order."""
    assert list(PLAN.arms)[:4] == ["BF16", "BF16 by halves", "O1", "O3"]
    assert [run.seed for run in PLAN.runs() if run.arm == "TE FP8"] == list(PLAN.seeds)
