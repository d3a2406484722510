"""Plans of configs/lab: their arms differ in what they are compared for, and in nothing else."""

from launch import ROOT

from megatron_fp8.flags.config import config_from_args
from megatron_fp8.tools.lab.sweep.plan_file import read_plan

PLAN, TABLE6, SCALING = (read_plan(ROOT / f"configs/lab/{n}.yaml") for n in ("evidence_l0", "table6", "grad_scaling"))


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


def test_every_arm_of_l0_is_recorded_as_graphs(parse):
    """Levels as whole steps, by the plugin; Transformer Engine's layers by Megatron itself. None makes a mask."""
    assert list(PLAN.faster) == list(PLAN.arms)
    for run in PLAN.runs()[: len(PLAN.arms)]:
        args = parse(*run.command[1:], *PLAN.faster[run.arm])
        assert not args.create_attention_mask_in_dataloader
        te = run.arm == "TE FP8"
        assert (args.cuda_graph_impl == "transformer_engine") == args.te_rng_tracker == te
        assert (getattr(args, "fp8_step_graph", None) == "on") == (not te)


def test_the_arms_of_the_first_store_stay_first():
    """New arms come last, so that runs of the committed store keep their order."""
    assert list(PLAN.arms)[:4] == ["BF16", "BF16 by halves", "O1", "O3"]
    assert [run.seed for run in PLAN.runs() if run.arm == "TE FP8"] == list(PLAN.seeds)


def test_table_6s_arms_are_the_papers(parse):
    """FP8-LM's Table 6: GEMMs, master, moments; ours beside them stores as many bytes as #2a."""
    cells = {}
    for run in TABLE6.runs():
        config = config_from_args(parse(*run.command[1:]))
        cells[run.arm] = (config.gemm, config.master, config.exp_avg, config.exp_avg_sq)
        assert config.grad_accum == ("fp32" if run.arm == "#1" else "fp8")
        assert config.weight == ("bf16" if run.arm == "#1" else "fp8")
    assert cells == {
        "#1": ("bf16", "fp32", "fp32", "fp32"),
        "#2a": ("fp8", "fp16", "fp8", "fp16"),
        "#2b": ("fp8", "bf16", "fp8", "fp16"),
        "#3": ("fp8", "fp8", "fp8", "fp16"),
        "#4": ("fp8", "fp16", "fp8", "fp8"),
        "O3": ("fp8", "remainder", "fp8", "fp16"),
    }


def test_gradients_are_scaled_as_an_arm_is_named(parse):
    for run in SCALING.runs():
        args = parse(*run.command[1:])
        args.world_size = SCALING.processes
        config = config_from_args(args)
        assert (config.grad_accum, config.weight, config.master) == ("fp8", "fp8", "remainder")
        assert config.grad_reduce == {"FP32": "fp32", "block": "block"}.get(run.arm, "shared")
        assert run.arm in ("FP32", "block") or config.grad_scaling.mode == run.arm


def test_every_arm_is_made_faster_alike():
    for plan in (TABLE6, SCALING):
        assert list(plan.faster) == list(plan.arms) and len(set(plan.faster.values())) == 1
