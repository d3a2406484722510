"""Flags become an Fp8Config, with Megatron's own parser; checks of shapes, machine and data; one line for a mistake."""

import argparse
import copy
import dataclasses
import json
import random
import re

import pytest
from commands import MODEL, O1, error_of

from megatron_fp8.flags import config as config_module
from megatron_fp8.flags import graphs
from megatron_fp8.flags.checks import (
    check_data_files,
    check_device,
    check_files,
    check_megatron_version,
    check_own_config,
)
from megatron_fp8.flags.config import ALL, Fp8Config, adapt_stock_args, check_yaml, config_from_args
from megatron_fp8.flags.level import CELLS
from megatron_fp8.numerics.auto_scaling import ScalingRule
from megatron_fp8.numerics.formats import E4M3, E5M2


def test_without_a_level_nothing_happens(parse):
    for argv in (
        MODEL,
        [*MODEL, "--fp8-level", "O0"],
        [*MODEL, "--fp8-format", "hybrid", "--fp8-recipe", "mxfp8"],
    ):
        args = parse(*argv)
        before = copy.deepcopy(vars(args))
        assert config_from_args(args) is None
        assert vars(args) == before


def test_o1(parse):
    args = parse(*O1)
    before = copy.deepcopy(vars(args))
    config = config_from_args(args)
    assert vars(args) == before
    assert dataclasses.asdict(config) == {
        "level": "O1",
        **{c.name: c.at("O1") for c in CELLS},
        "grad_accum": "fp8",
        "forward_format": dataclasses.asdict(E4M3),
        "grad_format": dataclasses.asdict(E5M2),
        "recipe": "delayed",
        "margin": 0,
        "amax_history_len": 1,
        "amax_compute_algo": "most_recent",
        "wgrad": True,
        "bf16_layers_start": 0,
        "bf16_layers_end": 0,
        "bf16_layers": (),
        "lm_head": False,
        "loss_chunks": 1,
        "experts": False,
        "dispatch": "off",
        "activations": False,
        "keep_transpose_cache": False,
        "grad_reduce_hierarchy": "off",
        "timeout_minutes": 10,
        "grad_scaling": dataclasses.asdict(ScalingRule()),
        "emulate": None,
        "ckpt_compact": False,
        "log_interval": 0,
        "log_grad_snr": False,
        "watch": None,
        "max_skipped": 20,
        "seed": 1234,
        "attention": "torch",
        "unfused_attention": False,
        "reads_mask": False,
        "gemm_backend": "auto",
        "gemm_search": False,
        "log_gemm": False,
        "fuses_rotary": True,
        "draws_masters": True,
        "draws_grouped": False,
        "draws_fused": False,
    }
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.level = "O3"


def test_cells_are_fields_of_the_config():
    assert {c.name for c in CELLS} <= {f.name for f in dataclasses.fields(Fp8Config)}


def test_cells_can_be_overridden(parse):
    config = config_from_args(parse(*O1, "--fp8-gemm", "bf16", "--fp8-grad-reduce", "fp32"))
    assert (config.gemm, config.grad_reduce) == ("bf16", "fp32")


def test_backends_of_the_gemms(parse):
    from megatron_fp8.flags.gemm import BACKENDS
    from megatron_fp8.gemm.interface import _backends

    assert BACKENDS[0] == "auto" and {*BACKENDS} == {n for n, b in _backends.items() if "cuda" in b.devices}
    config = config_from_args(parse(*O1, "--fp8-gemm-search", "--fp8-log-gemm", "--fp8-gemm-backend", "cublaslt"))
    assert (config.gemm_backend, config.gemm_search, config.log_gemm) == ("cublaslt", True, True)
    args = parse(*O1, "--fp8-gemm-search", "--fp8-gemm-backend", "torch")
    expected = "--fp8-gemm-search with --fp8-gemm-backend torch: it searches cuBLASLt and CUTLASS; remove one"
    assert error_of(config_from_args, args) == expected


def test_attention_of_transformer_engine(parse, monkeypatch):
    args = parse(*O1, "--fp8-attention", "te")
    monkeypatch.setattr(config_module, "installed", lambda module: False)
    assert error_of(config_from_args, args).startswith(
        "--fp8-attention te: Transformer Engine is not installed"
    )
    monkeypatch.setattr(config_module, "installed", lambda module: True)
    assert config_from_args(args).attention == "te"


# Every flag of ours but the level, with a value; None: a switch.
OURS = {
    **{c.flag: c.available[0] for c in CELLS},
    "--fp8-grad-reduce-hierarchy": "node",
    "--fp8-grad-scaling": "auto",
    "--fp8-grad-scaling-threshold": "0.001",
    "--fp8-grad-scaling-window": "50",
    "--fp8-grad-scaling-backoff": "0.25",
    "--fp8-grad-scaling-init": "0.7",
    "--fp8-grad-scaling-interval": "10",
    "--fp8-emulate": "E8M3",
    **{"--fp8-emulate-layers": "*", "--fp8-emulate-lm-head": None},
    **{"--fp8-emulate-from-step": "2", "--fp8-emulate-until-step": "9"},
    "--fp8-bf16-layers": "*.linear_fc2",
    "--fp8-lm-head": None,
    "--fp8-loss-chunks": "3",
    **{"--fp8-experts": None, "--fp8-dispatch": "both"},
    "--fp8-activations": None,
    **{"--fp8-ckpt-compact": None, "--fp8-masters-as-loaded": None},
    "--fp8-attention": "torch",
    **{"--fp8-gemm-backend": "torch", "--fp8-gemm-search": None, "--fp8-log-gemm": None},
    "--fp8-log-interval": "0",
    "--fp8-log-grad-snr": None,
    **{"--fp8-on-spike": "skip", "--fp8-spike-sigma": "6.5", "--fp8-spike-window": "64"},
    **{"--fp8-max-skipped-steps": "5", "--fp8-step-graph": "on"},
}
LOOK_ON = [flag.name for flag in ALL if not flag.needs_level]  # test_sharpness_flags.py, test_probe.py


@pytest.mark.parametrize("level", [[], ["--fp8-level", "O0"]], ids=["no_level", "O0"])
@pytest.mark.parametrize("flag", OURS)
def test_our_flags_need_a_level(flag, level, parse):
    if flag.startswith("--fp8-emulate") and not level:
        return  # a run that emulates needs no level, see below
    given = [flag] if OURS[flag] is None else [flag, OURS[flag]]
    message = error_of(config_from_args, parse(*MODEL, *level, *given))
    assert message.startswith(f"{' '.join(given)} with ")
    assert "add --fp8-level O1, or remove it" in message


def test_emulation(parse):
    """Without a level it changes nothing else of a BF16 run; at a level it changes only the GEMMs."""
    alone = config_from_args(parse(*MODEL, "--fp8-emulate", "E8M3"))
    assert (alone.level, alone.gemm, alone.grad_accum, alone.grad_reduce) == ("O1", "bf16", "fp32", "fp32")
    assert (alone.exp_avg, alone.master, alone.weight) == ("fp32", "fp32", "bf16")
    at_o3 = config_from_args(parse(*MODEL, "--fp8-level", "O3", "--fp8-emulate", "gradient=E5M2:truncate"))
    assert (at_o3.gemm, at_o3.grad_reduce, at_o3.weight) == ("bf16", "block", "fp8")
    assert str(at_o3.emulate.gradient) == "E5M2:truncate:none" and at_o3.emulate.weight is None
    for flags, line in (
        ("--fp8-emulate E8M3 --fp8-level O1 --fp8-gemm fp8", "--fp8-gemm fp8 with --fp8-emulate: "),
        ("--fp8-emulate-lm-head", "--fp8-emulate-lm-head: nothing is emulated; add --fp8-emulate"),
        ("--fp8-emulate E9M1", "--fp8-emulate E9M1: "),
    ):
        assert error_of(config_from_args, parse(*MODEL, *flags.split())).startswith(line)


def test_the_log_says_what_is_emulated_and_no_more(parse):
    """Without a level gradients are not stored in FP8."""
    args = parse(*MODEL, *"--fp8-emulate E8M3:truncate,gradient=E5M2 --fp8-emulate-from-step 3".split())
    lines = adapt_stock_args(args, config_from_args(args))
    kinds = "weight E8M3:truncate:none, activation E8M3:truncate:none, gradient E5M2:nearest:none"
    assert f"--fp8-emulate: {kinds}; linears *; steps 3 on" in lines
    assert not any("gradients are stored" in line for line in lines)
    args = parse(*O1, *"--fp8-emulate weight=E8M3 --fp8-emulate-lm-head --fp8-emulate-until-step 9".split())
    lines = adapt_stock_args(args, config_from_args(args))
    assert "--fp8-emulate: weight E8M3:nearest:none; linears *; LM head; steps 1 to 8" in lines
    assert any("gradients are stored in FP8" in line for line in lines)


SHARED = [*O1, "--fp8-grad-reduce", "shared"]


def test_auto_scaling_as_given(parse):
    assert config_from_args(parse(*SHARED)).grad_scaling == ScalingRule()
    flags = [word for flag, value in OURS.items() if flag.startswith("--fp8-grad-scaling") for word in (flag, value)]
    assert config_from_args(parse(*SHARED, *flags)).grad_scaling == ScalingRule("auto", 0.001, 50, 0.25, 0.7, 10)
    for mode in ("pre", "post"):
        assert config_from_args(parse(*SHARED, "--fp8-grad-scaling", mode)).grad_scaling == ScalingRule(mode)


@pytest.mark.parametrize(
    ("flags", "world", "storage", "line"),
    [
        ("--global-batch-size 2", 1, "fp8", "in FP8: 1 micro-batch a step ("),  # one micro-batch has 2 samples
        ("--global-batch-size 18", 1, "bf16", "in BF16: 9 micro-batches a step; FP8 would have an unbiased error"),
        ("--global-batch-size 8", 4, "fp8", "in FP8: 1 micro-batch a step ("),
        ("--global-batch-size 2 --mlp-chunks-for-training 2", 1, "bf16", "in BF16: 2 gradients of a weight a step"),
        ("--global-batch-size 2 --mtp-num-layers 3 --mtp-use-repeated-layer", 1, "bf16", "3 gradients of a weight"),
        ("--global-batch-size 64 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", 4, "bf16", "32 mi"),
        ("--global-batch-size 64 --fp8-grad-accum auto", 2, "bf16", "16 micro-batches"),
        ("--global-batch-size 64 --fp8-grad-accum fp8", 2, "fp8", "--fp8-grad-accum fp8: 16 micro-batches a step"),
        ("--global-batch-size 64 --fp8-grad-accum bf16", 2, "bf16", None),
        ("--global-batch-size 16 --fp8-grad-accum fp32", 1, "fp32", None),
        ("", 8, "fp8", "in FP8: 1 micro-batch a step ("),  # Megatron's default
        ("--step-batch-size-schedule 0:2,1K:16,9K:8", 2, "bf16", "in BF16: 4 micro-batches a step"),  # at most
    ],
)
def test_many_micro_batches_are_stored_in_bf16_and_the_log_says_so(flags, world, storage, line, parse):
    args = parse(*O1, *flags.split())
    args.world_size = world
    config = config_from_args(args)
    assert config.grad_accum == storage
    lines = [text for text in adapt_stock_args(args, config) if " a step" in text]
    assert len(lines) == (line is not None) and all(line in text for text in lines)


@pytest.mark.parametrize("value", ["off", "node", "1", "8"])
def test_hierarchy_as_given(value, parse):
    flags = ["--use-distributed-optimizer", "--fp8-grad-reduce-hierarchy", value]
    assert config_from_args(parse(*O1, *flags)).grad_reduce_hierarchy == value


def test_statistics_as_given(parse):
    config = config_from_args(parse(*O1, "--fp8-log-interval", "7", "--fp8-log-grad-snr", "--seed", "99"))
    assert (config.log_interval, config.log_grad_snr, config.seed) == (7, True, 99)
    assert config_from_args(parse(*O1, "--tensorboard-dir", "runs")).log_interval == 100
    assert config_from_args(parse(*O1, "--tensorboard-dir", "runs", "--fp8-log-interval", "0")).log_interval == 0
    with pytest.raises(ValueError, match=r"^--fp8-log-grad-snr: nothing is logged; add --fp8-log-interval N"):
        config_from_args(parse(*O1, "--fp8-log-grad-snr"))


HIERARCHY = "--fp8-grad-reduce-hierarchy"


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--fp8-grad-accum fp4", "--fp8-grad-accum fp4: no such value; use auto, fp8, bf16 or fp32"),
        ("--fp8-grad-reduce ring", "--fp8-grad-reduce ring: no such value; use block, shared or fp32"),
        *(
            (f"{flag} {OURS[flag]}", f"{flag} {OURS[flag]}: no effect; add --fp8-grad-reduce shared, or remove it")
            for flag in OURS
            if flag.startswith("--fp8-grad-scaling")
        ),
        *(
            (
                f"--fp8-grad-reduce shared --fp8-grad-scaling {mode} {flag} {OURS[flag]}",
                f"{flag} {OURS[flag]} with --fp8-grad-scaling {mode}: no effect; use auto, or remove it",
            )
            for mode in ("pre", "post")
            for flag in OURS
            if flag.startswith("--fp8-grad-scaling-")
        ),
        (
            "--fp8-grad-reduce shared --fp8-grad-scaling middle",
            "--fp8-grad-scaling middle: no such value; use auto, pre or post",
        ),
        *(
            (f"--fp8-grad-reduce shared {flag} {value}", f"{flag} {value}: {remedy}")
            for flag, value, remedy in [
                ("--fp8-grad-scaling-window", "0", "use 1 or more"),
                ("--fp8-grad-scaling-backoff", "-0.5", "mu must shrink; use a number above 0 and below 1"),
                ("--fp8-grad-scaling-backoff", "1.0", "mu must shrink; use a number above 0 and below 1"),
                ("--fp8-grad-scaling-interval", "-1", "use 1 or more"),
            ]
        ),
        *(
            (f"--fp8-grad-reduce shared {flag} {value}", f"{flag} {value}: use a number above 0, at most {most}")
            for flag, value, most in [
                ("--fp8-grad-scaling-threshold", "0.0", 1),
                ("--fp8-grad-scaling-threshold", "1.5", 1),
                ("--fp8-grad-scaling-init", "0.0", 65536),
                ("--fp8-grad-scaling-init", "inf", 65536),
            ]
        ),
        ("--fp8-margin 200", "--fp8-margin 200: small values vanish; use 0 to 8"),
        ("--fp8-margin -1", "--fp8-margin -1: large values clip; use 0 to 8"),
        ("--window-size 4", "--window-size 4: use two numbers of at least -1 (-1: no limit), such as 128,0"),
        ("--window-size=-2,0", "--window-size -2,0: use two numbers of at least -1 (-1: no limit), such as 128,0"),
        (
            "--window-size 4,0 --window-attn-skip-freq [1,0]",
            "--window-attn-skip-freq '[1, 0]': 2 entries for --num-layers 4; give one for each layer",
        ),
        ("--num-experts 2 --moe-router-topk 3", "--moe-router-topk 3 with --num-experts 2: use fewer"),
        ("--log-interval 0", "--log-interval 0: use 1 or more"),
        ("--make-vocab-size-divisible-by 0", "--make-vocab-size-divisible-by 0: use 1 or more"),
        (
            "--group-query-attention --num-query-groups 3 --fp8-gemm bf16",
            "--num-query-groups 3: use a divisor of --num-attention-heads 4",
        ),
        ("--tensor-model-parallel-size 0", "--tensor-model-parallel-size 0: use 1 or more"),
        ("--moe-router-topk 0", "--moe-router-topk 0: use 1 or more"),
        ("--q-lora-rank 0", "--q-lora-rank 0: use 1 or more"),
        ("--lr nan", "--lr nan: not a number; give one, or remove it"),
        ("--adam-beta2 1.0", "--adam-beta2 1.0: use a number from 0 to below 1"),
        ("--adam-eps 0", "--adam-eps 0.0: a weight without gradients would become NaN; use one above 0"),
        *(
            (
                f"--use-distributed-optimizer {HIERARCHY} {value}",
                f"{HIERARCHY} {value}: use off, node, or the number of data-parallel ranks in a node",
            )
            for value in ("nodes", "0", "-2", "2.5")
        ),
        *(
            (
                f"--use-distributed-optimizer --fp8-grad-reduce {wire} {HIERARCHY} 2",
                f"{HIERARCHY} 2 with --fp8-grad-reduce {wire}: only block reduces in two levels; remove one",
            )
            for wire in ("fp32", "shared")
        ),
        (
            f"{HIERARCHY} node",
            f"{HIERARCHY} node: needs --use-distributed-optimizer; add it, or remove the hierarchy",
        ),
        ("--fp8-log-interval -1", "--fp8-log-interval -1: use 0 (never) or more"),
    ],
)
def test_mistakes_about_gradients(flags, message, parse):
    assert error_of(lambda: config_from_args(parse(*O1, *flags.split()))) == message


@pytest.mark.parametrize("level", [[], ["--fp8-level", "O0"]], ids=["no_level", "O0"])
@pytest.mark.parametrize("fmt", ["hybrid", "e4m3"])
def test_stocks_silent_bf16_is_refused(fmt, level, parse):
    argv = [*MODEL, *level, "--transformer-impl", "local", "--fp8-format", fmt]
    message = error_of(config_from_args, parse(*argv))
    assert message.startswith(f"--fp8-format {fmt} with --transformer-impl local")
    assert "--fp8-level O1" in message
    assert config_from_args(parse(*argv[: len(MODEL)], "--fp8-level", "O1", "--fp8-format", fmt))


@pytest.mark.parametrize(
    "flags, start",
    [
        ("--fp8-level O9", "--fp8-level O9: no such value; use O0, O1, O2 or O3"),
        ("--fp8-level=", "--fp8-level '': no such value; use O0, O1, O2 or O3"),
        ("--fp8-level= --fp8-emulate E8M3", "--fp8-level '': no such value; use O0, O1, O2 or O3"),
        ("--fp8-level O3 --fp8-tp-reduce-scatter int8", "--fp8-tp-reduce-scatter int8: no such value"),
        (
            "--fp8-level O3 --fp8-tp-reduce-scatter forward --fp8-gemm bf16",
            "--fp8-tp-reduce-scatter forward: this run's GEMMs are BF16",
        ),
        ("--fp8-level O3 --adam-beta1 0.95 --adam-beta2 0.9", "--adam-beta1 0.95 with --adam-beta2 0.9: E4M3 weights"),
        ("--fp8-level O2 --fp8-partition greedy --overlap-grad-reduce", "--overlap-grad-reduce with --fp8-partition"),
        ("--fp8-level O1 --fp8-attention flash", "--fp8-attention flash: no such value; use torch or te"),
        ("--fp8-level O1 --fp8-amax-history-len 0", "--fp8-amax-history-len 0: use 1 or more"),
        (
            "--fp8-level O1 --first-last-layers-bf16 --num-layers-at-start-in-bf16 4",
            "--num-layers-at-start-in-bf16 4 with --num-layers-at-end-in-bf16 1: ",
        ),
        (
            "--fp8-level O1 --first-last-layers-bf16 --num-layers-at-end-in-bf16 -1",
            "--num-layers-at-start-in-bf16 1 with --num-layers-at-end-in-bf16 -1: ",
        ),
    ],
)
def test_mistakes(flags, start, parse):
    assert error_of(lambda: config_from_args(parse(*MODEL, *flags.split()))).startswith(start)


def test_activations_in_fp8(parse):
    flag = "--fp8-activations"
    assert not config_from_args(parse(*O1)).activations and config_from_args(parse(*O1, flag)).activations
    for flags, start in (
        ("--fp8-gemm bf16", f"{flag}: this run's GEMMs are BF16"),
        ("--fp8-emulate E8M3", f"{flag}: this run's GEMMs are BF16"),
        ("--no-fp8-wgrad", f"{flag} with --no-fp8-wgrad: "),
    ):
        assert error_of(config_from_args, parse(*O1, flag, *flags.split())).startswith(start)


@pytest.mark.parametrize(
    "flags, stays",
    [
        ("", ""),
        ("--tensor-model-parallel-size 2", ""),
        ("--tensor-model-parallel-size 2 --sequence-parallel", "norms, because their output is gathered in BF16"),
        ("--tensor-model-parallel-size 2 --sequence-parallel --fp8-tp-gather fp8", ""),
        ("--num-experts 2 --disable-bias-linear", "experts"),
        ("--recompute-granularity full --recompute-method uniform", "saves little"),
    ],
)
def test_the_log_says_which_activations_stay_in_bf16(flags, stays, parse):
    args = parse(*O1, "--fp8-activations", *flags.split())
    lines = [line for line in adapt_stock_args(args, config_from_args(args)) if line.startswith("--fp8-activations: ")]
    assert len(lines) == bool(stays) and all(stays in line for line in lines)


def test_first_and_last_layers(parse):
    counts = ["--num-layers-at-start-in-bf16", "3", "--num-layers-at-end-in-bf16", "0"]
    config = config_from_args(parse(*O1, "--first-last-layers-bf16", *counts))
    assert (config.bf16_layers_start, config.bf16_layers_end) == (3, 0)
    config = config_from_args(parse(*O1, *counts))  # as in stock: without the switch the counts have no effect
    assert (config.bf16_layers_start, config.bf16_layers_end) == (0, 0)


def test_yaml_replaces_our_flags():
    assert config_from_args(argparse.Namespace(yaml_cfg="run.yaml")) is None
    check_yaml(["--yaml-cfg", "run.yaml", "--fp8-format", "hybrid"])
    for words in (["--yaml-cfg", "run.yaml", "--fp8-level", "O1"], ["--fp8-level=O1", "--yaml-cfg=run.yaml"]):
        assert error_of(check_yaml, words).startswith("--yaml-cfg: its file replaces all flags, --fp8-level included")


def test_our_arguments_reach_no_stock_config():
    """Megatron fills its configs with every argument of the same name."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import MLATransformerConfig

    ours = {flag[2:].replace("-", "_") for flag in ("--fp8-level", *OURS, *LOOK_ON)}
    for stock in (MLATransformerConfig, OptimizerConfig, DistributedDataParallelConfig):
        assert not ours & {f.name for f in dataclasses.fields(stock)}


def test_help_lists_our_group(parser):
    (group,) = [g for g in parser._action_groups if g.title == "megatron-fp8"]
    flags = [a.option_strings[0] for a in group._group_actions]
    assert [flag for flag in flags if flag not in LOOK_ON] == ["--fp8-level", *OURS]
    assert set(LOOK_ON) < set(flags)
    assert all(a.default is None for a in group._group_actions)


# --- geometry


@pytest.mark.parametrize(
    "flags, start",
    [
        ("--hidden-size 100", "--hidden-size 100: not a multiple of 16"),
        ("--ffn-hidden-size 100", "--ffn-hidden-size 100: not a multiple of 16"),
        (
            "--ffn-hidden-size 144 --tensor-model-parallel-size 2",
            "--ffn-hidden-size 144: not a multiple of 32",
        ),
        ("--kv-channels 10", "--num-attention-heads 4: a linear of 40 is not a multiple of 16"),
        (
            "--kv-channels 4 --group-query-attention --num-query-groups 1",
            "--num-query-groups 1: a linear of 24 is not a multiple of 16",
        ),
        (
            "--fp8-lm-head --vocab-size 250 --make-vocab-size-divisible-by 2 --tensor-model-parallel-size 2",
            "--make-vocab-size-divisible-by 2 with --fp8-lm-head: a head of 126 rows on each tensor-parallel rank is "
            "not a multiple of 16; use 16, or remove --fp8-lm-head",
        ),
        ("--seq-length 7", "--seq-length 7 with --micro-batch-size 2: 14 tokens"),
        ("--mlp-chunks-for-training 5", "--seq-length 96 with --micro-batch-size 2: 192 tokens in 5 part(s)"),
    ],
)
def test_shapes_that_an_fp8_gemm_cannot_take(flags, start, parse):
    args = parse(*O1, *flags.split())
    assert error_of(config_from_args, args).startswith(start)
    args.fp8_gemm, args.fp8_lm_head = "bf16", None
    assert config_from_args(args).gemm == "bf16"


def test_tokens_matter_to_the_fp8_weight_gradient_alone(parse):
    assert config_from_args(parse(*O1, "--seq-length", "7", "--no-fp8-wgrad")).wgrad is False


def test_context_parallelism_divides_the_tokens(parse, everything_installed):
    flags = ["--fp8-attention", "te", "--context-parallel-size"]
    assert config_from_args(parse(*O1, *flags, "4"))
    assert "192 tokens in 8 part(s)" in error_of(config_from_args, parse(*O1, *flags, "8"))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--tensor-model-parallel-size 4", "--tensor-model-parallel-size 4"),
        ("--tensor-model-parallel-size 2 --context-parallel-size 2 --attention-dropout 0",
         "--tensor-model-parallel-size 2 times --context-parallel-size 2"),
        ("--tensor-model-parallel-size 1", ""),
    ],
)  # fmt: skip
def test_sequence_parallelism_divides_a_ranks_tokens(flags, said, parse):
    """Megatron's own check is in the first forward pass, in a traceback."""
    args = parse(*O1, "--fp8-gemm", "bf16", "--seq-length", "90", "--sequence-parallel", *flags.split())
    if not said:
        assert config_from_args(args)
        return
    assert error_of(config_from_args, args) == f"--seq-length 90 with --sequence-parallel: use a multiple of {said}"
    args.seq_length = 92
    assert config_from_args(args)


CONTEXT = "--context-parallel-size 2 --attention-dropout 0".split()


@pytest.mark.parametrize(
    ("flags", "said", "silent"),
    [
        ("--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 1 2", "--cp-comm-type a2a+p2p: all_gather", ""),
        ("--hierarchical-context-parallel-sizes 1 2", "--hierarchical-context-parallel-sizes 1 2: no effect: keys and "
         "values travel in one group", "all_gather instead"),
        ("--eod-mask-loss", "--eod-mask-loss: gradients are of the mean of context-parallel ranks' means", ""),
        ("--eod-mask-loss --calculate-per-token-loss", "", "--eod-mask-loss"),
    ],
)  # fmt: skip
def test_what_context_parallelism_does_with_a_flag_is_said(flags, said, silent, parse):
    args = parse(*O1, *CONTEXT, *flags.split())
    lines = adapt_stock_args(args, config_from_args(args))
    assert not said or any(line.startswith(said) for line in lines), lines
    assert not silent or not any(silent in line for line in lines), lines


@pytest.mark.parametrize("way", ["p2p", "all_gather", "a2a", ["p2p", "all_gather"], None])
def test_a_trainers_configuration_names_one_way_for_all_layers(way, parse):
    """It is a word; the flag is a list."""
    config = argparse.Namespace(context_parallel_size=2, attention_dropout=0.0, cp_comm_type=way)
    check_own_config(parse(*O1), config)
    config.cp_comm_type = "ring"
    assert error_of(check_own_config, parse(*O1), config) == (
        "TransformerConfig.cp_comm_type: as --cp-comm-type ring: use p2p or all_gather"
    )


def test_linears_that_stay_in_bf16_may_have_any_shape(parse):
    experts = ["--num-experts", "2", "--ffn-hidden-size", "100", "--disable-bias-linear"]
    assert config_from_args(parse(*O1, *experts))
    assert "--ffn-hidden-size 100" in error_of(
        config_from_args, parse(*O1, *experts, "--moe-layer-freq", "2")
    )


def test_shapes_of_latent_attention(parse):
    latent = [*O1, "--multi-latent-attention", "--kv-channels", "10"]  # latent attention does not read it
    assert config_from_args(parse(*latent))
    for flag in ("--kv-lora-rank", "--q-lora-rank"):
        assert error_of(config_from_args, parse(*latent, flag, "40")).startswith(f"{flag} 40: not a multiple of 16")
        assert config_from_args(parse(*latent, flag, "40", "--fp8-gemm", "bf16"))
    for flag, linear in (("--qk-head-dim", 4 * (126 + 64)), ("--qk-pos-emb-head-dim", 4 * (128 + 62))):
        value = "126" if flag == "--qk-head-dim" else "62"
        assert f"a linear of {linear} is not" in error_of(config_from_args, parse(*latent, flag, value))
    wide = parse(*latent, "--v-head-dim", "126")
    assert "--num-attention-heads 4: a linear of 1016" in error_of(config_from_args, wide)


def test_shapes_from_a_checkpoint_are_not_known_yet(parse):
    args = parse(*O1)
    args.hidden_size = args.num_attention_heads = args.num_layers = None
    assert config_from_args(args)


def test_geometry_is_every_dimension_of_every_gemm(parse):
    rng, args = random.Random(0), parse(*O1)
    for _ in range(3000):
        tp, heads = rng.choice([1, 2, 4]), rng.choice([4, 8])
        args.tensor_model_parallel_size, args.num_attention_heads = tp, heads
        args.hidden_size = 8 * heads * rng.randint(1, 4)
        args.kv_channels = rng.choice([None, 4, 8, 12, 16])
        args.group_query_attention, args.num_query_groups = rng.random() < 0.5, rng.choice([1, 2, 4])
        args.swiglu, args.attention_output_gate = rng.random() < 0.5, rng.random() < 0.3
        args.ffn_hidden_size = rng.choice([None, 8 * rng.randint(1, 30)])
        args.seq_length, args.micro_batch_size = rng.choice([20, 32, 64]), rng.randint(1, 4)

        width = heads * (args.kv_channels or args.hidden_size // heads)
        groups = args.num_query_groups if args.group_query_attention else heads
        qkv = width * (2 if args.attention_output_gate else 1) + 2 * groups * width // heads
        swiglu_default = int((4 * args.hidden_size * 2 / 3) / 64) * 64
        ffn = args.ffn_hidden_size or (swiglu_default if args.swiglu else 4 * args.hidden_size)
        sharded = (qkv, width, ffn)
        tokens = args.seq_length * args.micro_batch_size
        fits = args.hidden_size % 16 == 0 and tokens % 16 == 0 and all(s % (16 * tp) == 0 for s in sharded)
        if fits:
            assert config_from_args(args)
        else:
            error_of(config_from_args, args)


# --- machine, version, data


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0), (12, 0)])
def test_gpus_with_fp8(capability):
    check_device(capability)


@pytest.mark.parametrize("capability", [(7, 0), (8, 0), (8, 6)])
def test_gpus_without_fp8(capability):
    message = error_of(check_device, capability)
    assert "{}.{}".format(*capability) in message
    assert "--fp8-level O0" in message


@pytest.mark.parametrize("version", ["0.19.0", "0.19.2", "0.19.10", "0.19.0rc1"])
def test_known_megatron(version):
    check_megatron_version(version)


@pytest.mark.parametrize("version", ["0.18.9", "0.20.0", "0.1.9", "1.19.0", "0.190.0"])
def test_unknown_megatron(version):
    message = error_of(check_megatron_version, version)
    assert message.startswith(f"megatron-core {version}: ")
    assert "megatron-core==0.19.*" in message


@pytest.fixture
def data(tmp_path, parse):
    """A parser without mock data. In its flags @ is a folder with the dataset "there"."""
    for suffix in (".bin", ".idx"):
        (tmp_path / f"there{suffix}").touch()
    (tmp_path / "half.bin").touch()
    (tmp_path / "blend").write_text("0.5 @/there\n0.5 @/gone\n".replace("@", str(tmp_path)))
    splits = {"train": [f"{tmp_path}/there"], "valid": f"1 {tmp_path}/there", "test": [f"{tmp_path}/gone"]}
    (tmp_path / "splits.json").write_text(json.dumps(splits))

    def run(flags):
        model = [a for a in MODEL if a != "--mock-data"]
        return parse(*model, *flags.replace("@", str(tmp_path)).split())

    return run


@pytest.mark.parametrize(
    "flags",
    [
        "--data-path @/there",
        "--data-path 0.3 @/there 7 @/there",
        "--data-path @/there @/there",
        "--train-data-path @/there --valid-data-path 1 @/there",
        "--data-path s3://bucket/gone",
        "--data-args-path msc://profile/gone",
        "--mock-data --data-path @/gone",
        "--sft --data-path @/there.bin",
        "--tokenizer-type HuggingFaceTokenizer --tokenizer-model owner/name",
        "",
    ],
)
def test_data_that_is_there(flags, data):
    check_data_files(data(flags))


@pytest.mark.parametrize(
    "flags, flag, value",
    [
        ("--data-path @/gone", "--data-path", "gone"),
        ("--data-path @/half", "--data-path", "half"),
        ("--data-path @/there.bin", "--data-path", "there.bin"),
        ("--data-path 0.3 @/there 7 @/gone", "--data-path", "gone"),
        ("--data-path @/there @/there @/gone", "--data-path", "gone"),
        ("--valid-data-path @/gone", "--valid-data-path", "gone"),
        ("--data-args-path @/gone", "--data-args-path", "gone"),
        ("--data-args-path @/blend", "--data-args-path", "gone"),
        ("--per-split-data-args-path @/splits.json", "--per-split-data-args-path", "gone"),
        ("--data-path @/there --per-dataset-sequences-path @/gone", "--per-dataset-sequences-path", "gone"),
        ("--sft --data-path @/gone.jsonl", "--data-path", "gone.jsonl"),
        ("--mock-data --vocab-file @/vocab.json", "--vocab-file", "vocab.json"),
        ("--mock-data --tokenizer-type TikTokenizer --tokenizer-model gone", "--tokenizer-model", "gone"),
        (
            "--mock-data --tokenizer-type HuggingFaceTokenizer --tokenizer-model ./gone",
            "--tokenizer-model",
            "./gone",
        ),
    ],
)
def test_data_that_is_missing(flags, flag, value, data):
    args = data(flags)
    message = error_of(check_data_files, args)
    assert re.match(rf"{flag} (\S*/)?{re.escape(value)}: no (such )?file", message)
    assert ("tools/prepare_data.py" in message) == ("such file" not in message)
    args.rank = 1
    check_data_files(args)


def test_other_files_that_are_missing(data, tmp_path):
    line = error_of(check_files, data("--mock-data --nccl-communicator-config-path @/gone"))
    assert re.fullmatch(r"--nccl-communicator-config-path \S*/gone: no such file; give its path", line)
    (tmp_path / "nccl.yaml").touch()
    for flags in ("--mock-data", f"--mock-data --nccl-communicator-config-path {tmp_path}/nccl.yaml"):
        check_files(data(flags))


def test_a_blend_in_one_word_is_told_from_a_file_that_is_missing(data):
    args = data("")
    args.mock_data, args.data_path = False, ["0.3 /data/a 0.7 /data/b"]
    message = error_of(check_data_files, args)
    assert message.startswith("--data-path '0.3 /data/a 0.7 /data/b': a blend in one word; ")
    assert message.endswith("write [0.3 /data/a 0.7 /data/b] in a file of --args-file")


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("", "no --num-experts: there are no experts; remove it"),
        ("--num-experts 2 --no-bias-gelu-fusion", "experts with biases; add --disable-bias-linear"),
        (
            "--num-experts 2 --disable-bias-linear --fp8-grad-reduce shared",
            "--fp8-grad-reduce shared has no scale for an expert without a token; use block",
        ),
        (
            "--num-experts 2 --disable-bias-linear --fp8-ckpt-compact",
            "--fp8-ckpt-compact does not know experts' ranks; remove one",
        ),
    ],
)
def test_what_owned_experts_refuse(flags, why, parse):
    assert error_of(config_from_args, parse(*O1, "--fp8-experts", *flags.split())) == f"--fp8-experts: {why}"
    assert config_from_args(parse(*O1, *"--fp8-experts --num-experts 2 --disable-bias-linear".split())).experts


def test_a_graph_of_experts_one_by_one_is_refused(parse, monkeypatch):
    """But not if there will be no graph anyway: a line says so."""
    here = "--fp8-experts --num-experts 2 --disable-bias-linear --moe-token-dispatcher-type alltoall"
    args = parse(*O1, *here.split(), "--fp8-step-graph", "on")
    logged = parse(*O1, *here.split(), "--fp8-step-graph", "on", "--log-straggler")
    assert config_from_args(args).experts
    monkeypatch.setattr(graphs, "can_record", lambda: True)
    message = "--fp8-experts: --fp8-step-graph on needs experts that run together; add --moe-grouped-gemm"
    assert error_of(config_from_args, args) == message
    assert config_from_args(logged).experts


SENDS = "--num-experts 2 --disable-bias-linear --moe-token-dispatcher-type alltoall --expert-model-parallel-size 2"
OWNED = f"{SENDS} --fp8-experts --moe-grouped-gemm"
ONE_RANK = "no row leaves its rank at --expert-model-parallel-size 1; raise that, or remove this flag"


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (f"{SENDS} --moe-grouped-gemm", "experts read BF16; add --fp8-experts"),
        (f"{SENDS} --fp8-experts", "experts that run one by one take BF16 rows; add --moe-grouped-gemm"),
        *(
            (f"{OWNED} {kind}", f"{kind} sends BF16; use alltoall")
            for kind in ("--moe-token-dispatcher-type allgather", "--moe-token-dispatcher-type flex")
        ),
        (f"{OWNED} --expert-model-parallel-size 1", ONE_RANK),
        (f"{OWNED} --fp8-gemm bf16", "this run's GEMMs are BF16 (--fp8-gemm bf16, --fp8-emulate); remove one"),
        (
            f"{OWNED} --fp8-recipe tensorwise",
            "--fp8-recipe tensorwise has no scale before rows arrive; use delayed",
        ),
        (f"{OWNED} --no-fp8-wgrad", "--no-fp8-wgrad reads BF16 rows; remove one"),
        (
            f"{OWNED} --moe-router-topk 1 --moe-apply-probs-on-input",
            "--moe-apply-probs-on-input multiplies rows after they arrive; remove one",
        ),
        (
            f"{OWNED} --fp8-on-spike bf16-fallback",
            "--fp8-on-spike bf16-fallback takes single experts out of FP8; use skip",
        ),
    ],
)
@pytest.mark.parametrize("way", ["forward", "both"])
def test_what_dispatch_in_fp8_refuses(way, flags, why, parse):
    message = error_of(config_from_args, parse(*O1, *flags.split(), "--fp8-dispatch", way))
    assert message == f"--fp8-dispatch {way}: {why}"


def test_dispatch_in_fp8(parse):
    """Also if rows are only gathered over the parts of an expert."""
    split = f"{OWNED} --expert-model-parallel-size 1 --expert-tensor-parallel-size 2 --tensor-model-parallel-size 2"
    for flags in OWNED, f"{OWNED} --fp8-on-spike skip", split:
        assert config_from_args(parse(*O1, *flags.split(), "--fp8-dispatch", "both")).dispatch == "both"
        assert config_from_args(parse(*O1, *flags.split())).dispatch == "off"


@pytest.mark.parametrize("owned", ["", "--fp8-experts", "--fp8-experts --moe-grouped-gemm"])
def test_the_experts_activation_function_is_not_recomputed_alone(owned, parse):
    """moe_act is refused by name, whoever computes the experts; moe, shared_experts and the rest are not."""
    experts = [*O1, *f"{owned} --num-experts 2 --disable-bias-linear --recompute-granularity selective".split()]
    for modules in ("moe_act", "core_attn moe_act"):
        message = error_of(config_from_args, parse(*experts, "--recompute-modules", *modules.split()))
        assert message.startswith(f"--recompute-modules {modules}: use moe instead: ")
    assert config_from_args(parse(*experts, *"--recompute-modules core_attn moe shared_experts".split()))


def test_widths_of_owned_experts_are_those_of_a_rank(parse):
    """Expert tensor parallelism, by default tensor parallelism, divides them."""
    experts = [*O1, *"--fp8-experts --num-experts 2 --disable-bias-linear --moe-ffn-hidden-size 48".split()]
    split = "--expert-tensor-parallel-size", "2"
    assert config_from_args(parse(*experts)).experts
    for flags in split, ("--tensor-model-parallel-size", "2"):
        assert "--moe-ffn-hidden-size 48: not a multiple of 32" in error_of(config_from_args, parse(*experts, *flags))
    one = *("--tensor-model-parallel-size", "2"), *("--expert-tensor-parallel-size", "1")
    assert config_from_args(parse(*experts, *one)).experts
