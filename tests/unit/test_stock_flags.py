"""Stock Megatron's flags under a level: every row of the table, with Megatron's own parser."""

import copy
import importlib.util
import re
import sys
from pathlib import Path

import pytest
from commands import MODEL, O1, error_of
from launch import forked

from megatron_fp8.errors import UserError
from megatron_fp8.flags import graphs
from megatron_fp8.flags import stock as stock_flags
from megatron_fp8.flags.config import adapt_stock_args, config_from_args
from megatron_fp8.flags.stock import ADAPTED, HONOURED, IRRELEVANT, NOTED, REFUSED, TABLE, plain

REPOSITORY = Path(__file__).resolve().parents[2]
ADD_ONS = {  # flags that Megatron has only if another package is installed
    "--kitchen-config-file",
    "--kitchen-recipe-number",
    "--modelopt-enabled",
    "--export-kd-teacher-load",
}
LOOKS_NUMERIC = re.compile("fp8|fp4|mxfp|nvfp|amax|quant|kitchen|precision|wgrad|-dtype|bf16|fp16")
BESIDE = {  # the value of a flag that prevents step graphs
    "--fp8-emulate": ["E8M3"],
    "--num-experts": ["4", "--disable-bias-linear"],
    "--expert-model-parallel-size": [
        *("2", "--num-experts", "4", "--disable-bias-linear", "--moe-token-dispatcher-type", "alltoall"),
    ],
    "--sft": ["--fp8-attention", "te"],
    "--log-straggler": [],
    "--dataloader-inter-document-masking": ["--fp8-attention", "te"],
    "--save-activations-interval": ["3", "--save", "somewhere"],
    "--save-dgrads-interval": ["3", "--save", "somewhere"],
    "--logits-load-dir": ["x"],
    "--logits-save-dir": ["x"],
    "--timing-log-level": ["2"],
    "--log-max-attention-logit": ["--fp8-attention", "te"],
    "--attention-dropout": ["0.1", "--recompute-activations"],
    "--hidden-dropout": ["0.1", "--recompute-granularity", "selective", "--recompute-modules", "mlp"],
    "--moe-input-jitter-eps": [
        *("0.1", "--recompute-granularity", "selective", "--recompute-modules", "moe", "--hidden-dropout", "0"),
    ],
    "--skip-train": [],
    "--fp8-sharpness-eval": ["x"],
}
COMPANIONS = {  # other flags that a flag, or one of its rows, needs to have an effect
    "--ddp-pad-buckets-for-high-nccl-busbw": ["--use-distributed-optimizer"],
    "--num-layers-at-start-in-bf16": ["--first-last-layers-bf16"],
    "--num-layers-at-end-in-bf16": ["--first-last-layers-bf16"],
    "--ckpt-format": ["--save", "somewhere"],
    "--dist-ckpt-optim-fully-reshardable": ["--use-distributed-optimizer", "--save", "somewhere"],
    "--num-experts": ["--disable-bias-linear"],
    "--qk-l2-norm": ["--multi-latent-attention"],
    "--no-bias-gelu-fusion": ["--num-experts", "4"],
    stock_flags.WITH_FP8_WEIGHTS.text: ["--fp8-level", "O3"],
    stock_flags.OWNED.text: ["--fp8-experts", "--num-experts", "4", "--disable-bias-linear"],
    stock_flags.SENT_IN_FP8.text: [
        *("--fp8-dispatch", "both", "--fp8-experts", "--num-experts", "4", "--disable-bias-linear"),
        *("--moe-grouped-gemm", "--moe-token-dispatcher-type", "alltoall", "--expert-model-parallel-size", "2"),
    ],
    stock_flags.WITH_SAVE.text: ["--save", "somewhere"],
    stock_flags.ROPE_SCALED.text: ["--use-rope-scaling"],
    stock_flags.STAGES_BETWEEN.text: ["--pipeline-model-parallel-size", "4"],
    stock_flags.WITH_GRAPH.text: ["--cuda-graph-impl", "full_iteration"],
    stock_flags.GRAPHED.text: ["--cuda-graph-impl", "full_iteration"],
    stock_flags.SWITCHED_OFF.text: ["--fp8-step-graph", "off"],
    **{
        f"any but none, with {flag}": [flag, *BESIDE.get(flag, ["3"])]
        for flags in graphs.INSIDE
        for flag in flags.split()
    },
    stock_flags.RECOMPUTED_REPEATS.text: [
        *("--overlap-grad-reduce", "--mtp-num-layers", "2", "--recompute-granularity", "full"),
    ],
    stock_flags.WITHOUT_MASK.text: ["--no-create-attention-mask-in-dataloader"],
    "--sft": ["--attention-dropout", "0"],
    "--dataloader-inter-document-masking": ["--attention-dropout", "0"],
    "--sft-tokenizer-prompt-format": ["--sft", "--attention-dropout", "0"],
    **{
        f"{values}, with --sft or --dataloader-inter-document-masking": ["--sft", *dropout]
        for values, *dropout in (
            ("other than 0.0",),
            ("unfused or local", "--attention-dropout", "0"),
            ("other than vanilla", "--attention-dropout", "0"),
        )
    },
}


def companions_of(row):
    if "with --context-parallel-size" in row.when.text:
        packs = ["--sft"] if "with --sft" in row.when.text else []
        per_token = ["--calculate-per-token-loss"] if packs and row.flag != "--calculate-per-token-loss" else []
        return ["--context-parallel-size", "2", "--attention-dropout", "0", *packs, *per_token]
    return COMPANIONS.get(row.flag) or COMPANIONS.get(row.when.text.partition(", without --fp8")[0], [])


def samples(row, parser, parse):
    """Parsed command lines to which the row applies; with torch's attention if there are any."""
    if row.flag in ADD_ONS:
        args = parse(*O1)
        setattr(args, row.dest, 3)
        return [args]
    action = parser._option_string_actions[row.flag]
    if action.nargs == 0:
        values = [[row.flag], []]
    else:
        usual = (
            ("4,0",)
            if row.flag == "--window-size"
            else ("3", "0.25", "x", "attn", "moe_act", "msc://x", "2 2 9", "default", "p2p", "a2a")
        )
        values = [[row.flag, *plain(v).split()] for v in action.choices or usual]
    found = []
    for attention in ("torch", "te"):
        for value in values if not found else ():
            base = [*(a for a in O1 if a != row.flag), *companions_of(row)]
            kind = [] if "--fp8-attention" in base else ["--fp8-attention", attention]
            try:
                args = parse(*base, *kind, *value)
            except (ValueError, KeyError):  # not a value of this flag
                continue
            if row.when.test(getattr(args, row.dest), args):
                found.append(args)
    assert found
    return found


@pytest.mark.parametrize(
    "spelling",
    [
        "--cuda-graph-impl full_iteration",
        "--cuda-graph-impl local --cuda-graph-scope full_iteration",
        "--cuda-graph-impl local --cuda-graph-modules attn mlp",
        "--cuda-graph-impl transformer_engine",
        "--enable-cuda-graph",
        "--external-cuda-graph",
        "--fp8-step-graph on",
        "--fp8-step-graph auto",
    ],
)
def test_a_graph_of_whole_steps(spelling, parse, monkeypatch):
    """For any graph that is asked for; Megatron then sets up its random numbers for it."""
    args = parse(*O1, *spelling.split())
    without = copy.copy(args)
    monkeypatch.setattr(graphs, "can_record", lambda: True)
    adapt_stock_args(args, config_from_args(args))
    assert (args.cuda_graph_impl, args.cuda_graph_scope_deprecated, args.cuda_graph_modules) == (graphs.WHOLE, None, [])
    assert args.te_rng_tracker and not args.check_for_nan_in_loss_and_grad
    assert not args.enable_cuda_graph and not args.external_cuda_graph
    monkeypatch.setattr(graphs, "can_record", lambda: False)
    adapt_stock_args(without, config_from_args(without))
    assert (without.cuda_graph_impl, without.cuda_graph_modules) == ("none", [])
    assert not without.te_rng_tracker and without.check_for_nan_in_loss_and_grad
    assert not without.enable_cuda_graph and not without.external_cuda_graph


@pytest.mark.parametrize(
    "asked", ["--fp8-step-graph on", "--enable-cuda-graph", "--external-cuda-graph", "--cuda-graph-impl local"]
)
@pytest.mark.parametrize("beside", ["", "--num-experts 4 --disable-bias-linear"])
def test_the_line_names_what_asks_for_a_graph(asked, beside, parse, monkeypatch):
    args = parse(*O1, *asked.split(), *beside.split())
    monkeypatch.setattr(graphs, "can_record", lambda: True)
    lines = adapt_stock_args(args, config_from_args(args))
    note = "no CUDA graph with --num-experts: " if beside else "full_iteration instead"
    assert sum(line.startswith(f"{asked}: {note}") for line in lines) == 1
    assert not any("--cuda-graph-impl none" in line for line in lines)


ALL_HERE = "--num-experts 4 --disable-bias-linear --fp8-experts --moe-grouped-gemm --moe-token-dispatcher-type alltoall"


@pytest.mark.parametrize(
    ("more", "counted"),
    [
        ("", False),
        ("--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1", False),
        ("--tensor-model-parallel-size 2", True),
        ("--expert-model-parallel-size 2", True),
        ("--moe-token-dispatcher-type allgather", False),
        ("--moe-token-dispatcher-type allgather --expert-model-parallel-size 2", False),
        ("--moe-token-dispatcher-type allgather --tensor-model-parallel-size 2", False),
        ("--moe-token-dispatcher-type allgather --moe-apply-probs-on-input", True),
        ("--moe-token-dispatcher-type flex", True),
        ("--moe-expert-capacity-factor 1", True),
        ("--fp8-gemm bf16", True),
        ("--fp8-recipe tensorwise", True),
        ("--no-fp8-wgrad", True),
        ("--fp8-bf16-layers *.linear_fc2", True),
        ("--first-last-layers-bf16", True),
        ("--moe-input-jitter-eps 0.1", False),
    ],
)
def test_a_graph_with_experts_needs_counts_that_stay_on_the_gpu(more, counted, parse, monkeypatch):
    args = parse(*O1, *ALL_HERE.split(), *more.split(), "--cuda-graph-impl", "full_iteration")
    monkeypatch.setattr(graphs, "can_record", lambda: True)
    lines = adapt_stock_args(args, config_from_args(args))
    assert args.cuda_graph_impl == ("none" if counted else graphs.WHOLE)
    reason = "--expert-model-parallel-size" if "--expert-model" in more else "--num-experts"
    said = sum(f"no CUDA graph with {reason}: the host counts the tokens" in line for line in lines)
    assert said == counted


@pytest.mark.parametrize(
    "beside",
    [
        "--timing-log-level 1",
        "--attention-dropout 0.1 --hidden-dropout 0.1",
        "--attention-dropout 0.1 --recompute-granularity full --recompute-method uniform",
        "--hidden-dropout 0.1 --attention-dropout 0 --recompute-activations",
    ],
)
def test_what_leaves_a_graph_as_it_is(beside, parse, monkeypatch):
    args = parse(*O1, "--fp8-step-graph", "on", *beside.split())
    monkeypatch.setattr(graphs, "can_record", lambda: True)
    assert graphs.graphed(args)


@pytest.mark.parametrize("saves", ["--save", "--ckpt-convert-format torch_dist --ckpt-convert-save"])
def test_what_is_saved_loads_at_any_layout(saves, parse):
    args = parse(*O1, "--use-distributed-optimizer", *saves.split(), "somewhere")
    adapt_stock_args(args, config_from_args(args))
    assert args.dist_ckpt_optim_fully_reshardable


def of(verdict):
    rows = [row for row in TABLE if row.verdict == verdict]
    return pytest.mark.parametrize(
        "row", rows, ids=[f"{r.flag}-{r.when.text}".replace(" ", "_") for r in rows]
    )


def test_table_names_stock_flags(parser):
    for row in TABLE:
        if row.flag not in ADD_ONS:
            assert parser._option_string_actions[row.flag].dest == row.dest
    assert set(IRRELEVANT) <= set(parser._option_string_actions)
    assert not set(IRRELEVANT) & {row.flag for row in TABLE}


def test_every_stock_flag_that_looks_numeric_is_classified(parser):
    (group,) = [g for g in parser._action_groups if g.title == "megatron-fp8"]
    ours = {a.option_strings[0] for a in group._group_actions}
    classified = ours | {row.flag for row in TABLE} | set(IRRELEVANT)
    missing = [
        action.option_strings
        for action in parser._actions
        if LOOKS_NUMERIC.search(" ".join(action.option_strings))
        and not classified & set(action.option_strings)
    ]
    assert missing == []


@of(REFUSED)
def test_refused(row, parser, parse, monkeypatch):
    found = samples(row, parser, parse)
    for args in found:
        message = error_of(config_from_args, args)
        value = getattr(args, row.dest)
        assert message == f"{row.shown(args)}: {row.note}"
        assert row.flag.removeprefix("--no") in message
        if value is not None and not isinstance(value, bool):
            assert f"{row.flag} {plain(value)}: " in message
    if row.missing:
        monkeypatch.setattr(stock_flags, "installed", lambda module: True)
        assert config_from_args(found[0])


@of(HONOURED)
def test_honoured(row, parser, parse, everything_installed):
    companions = companions_of(row)
    without = config_from_args(parse(*O1, *companions))
    shown = set()
    for args in samples(row, parser, parse):
        before = getattr(args, row.dest)
        config = config_from_args(args)
        adapt_stock_args(args, config)
        if row.field:
            shown.add(getattr(config, row.field))
        else:
            assert getattr(args, row.dest) == before
    if row.field:
        assert shown - {getattr(without, row.field)}


@of(ADAPTED)
def test_adapted(row, parser, parse, monkeypatch):
    in_graphs = (stock_flags.GRAPHED, stock_flags.WITH_GRAPH, stock_flags.GRAPHED_IN_PARTS)
    if row.when in in_graphs or row.when.text.startswith("any but none, with "):
        monkeypatch.setattr(graphs, "can_record", lambda: True)
        monkeypatch.setattr("megatron_fp8.flags.config.installed", lambda module: True)
    for args in samples(row, parser, parse):
        config = config_from_args(args)
        shown = row.shown(args)
        lines = adapt_stock_args(args, config)
        assert plain(getattr(args, row.dest)) == plain(row.to)
        assert [line for line in lines if shown in line and line.endswith(f": {row.note}")]
        assert not row.field or getattr(config, row.field)
        again = copy.copy(args)
        adapt_stock_args(again, config)
        assert vars(again) == vars(args)
    if row.missing:
        monkeypatch.setattr(stock_flags, "installed", lambda module: True)
        args = samples(row, parser, parse)[0]
        before = getattr(args, row.dest)
        adapt_stock_args(args, config_from_args(args))
        assert getattr(args, row.dest) == before


@of(NOTED)
def test_noted(row, parser, parse, everything_installed, monkeypatch):
    for args in samples(row, parser, parse):
        before = getattr(args, row.dest)
        config = config_from_args(args)
        with monkeypatch.context() as patch:
            patch.setattr(stock_flags, "installed", lambda module: module != row.missing)
            lines = adapt_stock_args(args, config)
        assert [line for line in lines if row.flag in line and row.note in line]
        assert not row.missing or not any(row.note in line for line in adapt_stock_args(args, config))
        assert getattr(args, row.dest) == before
        assert not row.field or getattr(config, row.field)


@pytest.mark.parametrize(
    ("flags", "switched_off"),
    [
        ("--fp8-level O3", True),
        ("--fp8-level O1 --fp8-weight fp8", True),
        ("--fp8-level O2", False),
        ("--fp8-level O3 --fp8-weight bf16", False),
        ("--fp8-emulate E8M3", False),
    ],
)
def test_fp8_weights_of_te_become_the_levels_own_or_are_refused(flags, switched_off, parse):
    args = parse(*MODEL, *flags.split(), "--fp8-param-gather")
    if switched_off:
        lines = adapt_stock_args(args, config_from_args(args))
        assert not args.fp8_param_gather and any(line.startswith("--fp8-param-gather: switched off") for line in lines)
    else:
        assert error_of(config_from_args, args).startswith("--fp8-param-gather: remove it, or use --fp8-level O3")


def test_missing_kernels_take_one_log_line(parse):
    args = parse(*O1, "--moe-permute-fusion", "--position-embedding-type", "rope")
    lines = adapt_stock_args(args, config_from_args(args))
    (line,) = [line for line in lines if "not installed" in line]
    for name in (
        "gradient-accumulation-fusion",
        "masked-softmax-fusion",
        "--moe-permute-fusion",
    ):
        assert name in line
    assert sum(line.startswith("rope-fusion: the level's own kernel") for line in lines) == 1


@pytest.mark.parametrize(
    ("gpu", "flags", "left_on"),
    [
        (True, "--multi-latent-attention", True),
        (True, "--multi-latent-attention --rope-type yarn", True),
        (True, "--multi-latent-attention --rope-type rope", False),
        (True, "--multi-latent-attention --no-rope-fusion", False),
        (True, "--multi-latent-attention --sft --tokenizer-type SFTTokenizer", False),
        (True, "--multi-latent-attention --dataloader-inter-document-masking", False),
        (False, "--multi-latent-attention", False),
        (True, "", False),
    ],
)
def test_latent_attention_keeps_megatrons_kernels_for_its_rotation(gpu, flags, left_on, parse, monkeypatch):
    monkeypatch.setattr(graphs, "can_record", lambda: gpu)
    args = parse(*O1, *"--position-embedding-type rope --attention-dropout 0".split(), *flags.split())
    lines = adapt_stock_args(args, config_from_args(args))
    assert args.apply_rope_fusion == left_on
    assert any(line.startswith("rope-fusion: ") for line in lines) == (not left_on and "--no-rope" not in flags)


COMMANDS = {  # stock commands, as written for Transformer Engine and apex: (world size, flags)
    "dense": (
        2,
        "--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap --fp8-format hybrid --swiglu "
        "--position-embedding-type rope --normalization RMSNorm --attention-backend flash "
        "--group-query-attention --num-query-groups 2 --disable-bias-linear --use-distributed-optimizer "
        "--overlap-grad-reduce --overlap-param-gather --cross-entropy-loss-fusion "
        "--fp8-amax-history-len 1024 --fp8-amax-compute-algo max --first-last-layers-bf16",
    ),
    "experts": (
        2,
        "--num-experts 4 --moe-grouped-gemm --moe-permute-fusion --moe-router-fusion --fp8-format e4m3 "
        "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall "
        "--overlap-moe-expert-parallel-comm --delay-wgrad-compute --moe-router-padding-for-fp8 "
        "--disable-bias-linear",
    ),
    "llama 3 8B of Megatron's examples": (
        1,
        "--use-mcore-models --group-query-attention --num-query-groups 2 --kv-channels 16 --rotary-base 1000000 "
        "--position-embedding-type rope --rotary-percent 1.0 --attention-dropout 0.0 --hidden-dropout 0.0 --swiglu "
        "--init-method-std 0.0134 --attention-backend fused --apply-layernorm-1p --disable-bias-linear "
        "--untie-embeddings-and-output-weights --decoupled-lr 5.0e-4 --decoupled-min-lr 4.5e-5 --grad-reduce-in-bf16 "
        "--cross-entropy-loss-fusion --calculate-per-token-loss --manual-gc --empty-unused-memory-level 1 "
        "--fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max --fp8-param-gather "
        "--sequence-parallel --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
        "--no-create-attention-mask-in-dataloader --no-mmap-bin-files --ckpt-format torch_dist --fp8-level O3",
    ),
    "pipeline": (
        2,
        "--pipeline-model-parallel-size 2 --defer-embedding-wgrad-compute --fp8-format hybrid "
        "--fp8-recipe tensorwise --untie-embeddings-and-output-weights",
    ),
    "graphs": (
        1,
        "--enable-cuda-graph --te-rng-tracker --cross-entropy-fusion-impl te --use-te-activation-func",
    ),
    "local": (1, "--transformer-impl local --attention-backend local --apply-layernorm-1p"),
    "latent": (1, "--multi-latent-attention --mla-down-proj-fusion --position-embedding-type rope"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_stock_commands_pass_stock_validation(command, parse, monkeypatch):
    from megatron.training.arguments import core_transformer_config_from_args, validate_args

    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    world_size, flags = COMMANDS[command]
    args = parse(*O1, *flags.split())
    args.world_size = world_size
    adapt_stock_args(args, config_from_args(args))
    validate_args(args)
    transformer = core_transformer_config_from_args(args)
    assert transformer.fp8 is None
    assert transformer.transformer_impl == "local"


def test_flags_page_is_fresh(tmp_path):
    forked(1, ["tools/make_flags_doc.py", "--check"], tmp_path / "log", timeout=250)  # else RunFailed


def test_stale_flags_page_is_found(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location(
        "make_flags_doc", REPOSITORY / "tools" / "make_flags_doc.py"
    )
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    monkeypatch.setattr(tool, "PAGE", tmp_path / "flags.md")
    monkeypatch.setattr(sys, "argv", ["make_flags_doc.py", "--check"])
    assert tool.main() == 1
    tool.PAGE.write_text(tool.page() + "edited by hand\n")
    assert tool.main() == 1
    monkeypatch.setattr(sys, "argv", ["make_flags_doc.py"])
    assert tool.main() == 0
    monkeypatch.setattr(sys, "argv", ["make_flags_doc.py", "--check"])
    assert tool.main() == 0


def test_all_refused_flags_are_named_at_once(parse):
    given = "--fp8-recipe blockwise", "--use-precision-aware-optimizer", "--log-max-attention-logit"
    with pytest.raises(UserError) as refused:
        config_from_args(parse(*O1, *" ".join(given).split()))
    assert {line.partition(": ")[0] for line in str(refused.value).splitlines()} == set(given)
