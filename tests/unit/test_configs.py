"""Every shipped combination of a model, a layout and a recipe passes Megatron's parser and checks, at full size.

tests/cpu/test_config_rehearsals.py rehearses them nightly.
"""

import re
from dataclasses import fields

import pytest
from launch import ROOT

from megatron_fp8.flags.args_file import read
from megatron_fp8.flags.command import take_apart
from megatron_fp8.tools.perf.job import MODELS, Job
from megatron_fp8.tools.rehearsal.job import examine

CONFIGS = ROOT / "configs"
# {layout: (model, number of GPUs)}, by its name
LAYOUTS = {
    path.stem: (found[1], int(found[2]))
    for path in sorted((CONFIGS / "layout").glob("*.yaml"))
    if (found := re.fullmatch(r"(.+)-(\d+)gpus", path.stem))
}


def files(layout: str, data: str = "mock-data") -> list[str]:
    """The files of a layout, by name."""
    model, _ = LAYOUTS[layout]
    return [f"model/{model}", f"layout/{layout}", "recipe/pretrain", f"recipe/{model}", f"recipe/{data}"]


def command(layout: str, *more: str) -> list[str]:
    script = str(ROOT / "pretrain_gpt_fp8.py")
    return ["torchrun", "--nproc-per-node", str(LAYOUTS[layout][1]), script, "--args-file", *files(layout), *more]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_megatron_takes_it(layout, parser):
    model, gpus = LAYOUTS[layout]
    launch_words = command(layout)
    launch = take_apart(launch_words)
    job = examine(launch, gpus)
    assert (job.error, job.missing, job.level) == ("", "", "O3")
    assert launch.gpus == gpus and launch.variables["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert {flag for flag, _ in launch.flags} <= set(parser._option_string_actions)
    steps, tokens = job.args.train_samples // job.args.global_batch_size, job.args.train_samples * job.args.seq_length
    assert tokens / 1e9 == pytest.approx(40 if model == "gpt-175b" else 100, rel=0.001)
    assert job.args.lr_warmup_samples / job.args.global_batch_size == 1000 < steps
    assert job.args.min_lr == pytest.approx(job.args.lr / 10)
    if job.args.num_experts:
        owned = examine(take_apart([*launch_words, "recipe/fp8-experts"]), gpus)
        assert (owned.error, owned.level, owned.args.fp8_experts) == ("", "O3", True)
    without = "--fp8-level O0 --transformer-impl local --no-gradient-accumulation-fusion --no-persist-layer-norm"
    stock = examine(take_apart(command(layout, *without.split())), gpus)
    assert (stock.error, stock.level) == ("", "O0")


@pytest.mark.parametrize("name", MODELS)
def test_the_papers_models_are_those_of_the_memory_table(name):
    layout = next(layout for layout in LAYOUTS if layout.startswith(f"gpt-{name}-"))
    gpus = LAYOUTS[layout][1]
    args = examine(take_apart(command(layout)), gpus).args
    ours = {field.name: getattr(args, field.name, False if field.default is False else None) for field in fields(Job)}
    # Megatron fills in the rest; the table's vocabulary is padded already.
    ours |= dict.fromkeys(("ffn_hidden_size", "num_query_groups", "kv_channels", "max_position_embeddings"))
    ours |= {"vocab_size": -(-args.vocab_size // 128) * 128, "normalization": args.normalization}
    ours |= {"disable_bias_linear": not args.add_bias_linear, "expert_tensor_parallel_size": None, "fp8_experts": False}
    if name == "125m":
        ours["data_parallel_size"] = 1
    assert Job(**ours) == MODELS[name]


def test_every_shipped_file_is_in_a_combination_and_says_where_its_values_come_from():
    used = {file for layout in LAYOUTS for data in ("mock-data", "data") for file in files(layout, data)}
    others = {"lab", "hardware"}  # plans, and files for the cost model
    found = (p.relative_to(CONFIGS) for p in CONFIGS.rglob("*.yaml"))
    shipped = {str(path.with_suffix("")) for path in found if path.parts[0] not in others}
    added = {"recipe/step-graph", "recipe/fp8-experts"}  # to any, and to any with experts
    assert shipped == used | added and len(LAYOUTS) >= 6
    for name in shipped:
        path = CONFIGS / f"{name}.yaml"
        assert path.read_text().startswith("# "), name
        read([str(path)])


@pytest.mark.parametrize("path", sorted((CONFIGS / "cluster").glob("*.env")), ids=lambda path: path.stem)
def test_a_clusters_file_is_variables(path):
    lines = path.read_text().splitlines()
    assert all(re.fullmatch(r"#.*|[A-Z_]+=\S+", line) for line in lines) and any("=" in line for line in lines)
