"""The memory estimate: sizes against known models, bytes against real tensors, balance against FP8-LM's tables."""

import argparse
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from engine_parts import parts_of
from megatron.core.distributed import DistributedDataParallelConfig
from torch._C._distributed_c10d import FakeProcessGroup

from megatron_fp8 import ops
from megatron_fp8.engine import bucket_states
from megatron_fp8.engine.bucket import Bucket
from megatron_fp8.engine.grad_store import grad_store
from megatron_fp8.engine.owned_weight import OwnedWeight
from megatron_fp8.engine.partition import place
from megatron_fp8.errors import UserError
from megatron_fp8.flags.level import CELLS
from megatron_fp8.numerics.blocks import SHARD_UNIT
from megatron_fp8.numerics.formats import E4M3
from megatron_fp8.tools.perf import job_flags, memory
from megatron_fp8.tools.perf.job import BYTES, MODELS, STATES, Job
from megatron_fp8.tools.perf.memory import engine_buckets, engine_bytes, ranks_bytes

BLOCKS = 1 / 128


def cells(level: str, **overrides: str) -> dict[str, str]:
    return {cell.name: cell.at(level) for cell in CELLS} | overrides


def job(**given) -> Job:
    """A small GPT of 2 layers; `given` changes its fields."""
    small = {
        "num_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "vocab_size": 100,
        "position_embedding_type": "rope",
    }
    return Job(**{**small, **given})


def printed(capsys, *argv: str) -> dict[str, list[str]]:
    """{row: its cells} of the printed table."""
    parser = argparse.ArgumentParser()
    memory.add_arguments(parser)
    assert memory.run(parser.parse_args(["--format", "markdown", *argv])) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    rows = [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in lines]
    return {row: values for row, *values in rows}


def whole(rank: memory.Rank) -> int:
    return sum(rank.linears.values()) + sum(rank.others.values())


# Sizes.


@pytest.mark.parametrize(
    "model, count",
    [
        (  # GPT-2 small
            Job(12, 768, 12, 50_257, make_vocab_size_divisible_by=1, max_position_embeddings=1024),
            124_439_808,
        ),
        (  # Llama 2 7B
            Job(
                32,
                4096,
                32,
                32_000,
                ffn_hidden_size=11_008,
                swiglu=True,
                disable_bias_linear=True,
                normalization="RMSNorm",
                position_embedding_type="rope",
                untie_embeddings_and_output_weights=True,
            ),
            6_738_415_616,
        ),
        (  # Llama 3 8B
            Job(
                32,
                4096,
                32,
                128_256,
                ffn_hidden_size=14_336,
                num_query_groups=8,
                swiglu=True,
                disable_bias_linear=True,
                normalization="RMSNorm",
                position_embedding_type="rope",
                untie_embeddings_and_output_weights=True,
            ),
            8_030_261_248,
        ),
    ],
    ids=["GPT-2", "Llama 2 7B", "Llama 3 8B"],
)
def test_published_models_have_their_published_number_of_parameters(model, count):
    assert sum(memory.parameters(model)) == count


@pytest.mark.parametrize(
    "gates, count",
    [
        ("", 108_160),
        ("--attention-output-gate", 116_480),
        ("--quick-geglu", 141_440),
        ("--quick-geglu --attention-output-gate", 149_760),
    ],
)
def test_gates_have_the_weights_that_megatron_gives_them(gates, count):
    """As Megatron's GPTModel of these sizes counts them: fc1 is twice as wide, and qkv has a gate for each query."""
    flags = (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --group-query-attention --num-query-groups 2 "
        "--vocab-size 128 --position-embedding-type rope --untie-embeddings-and-output-weights --bf16"
    )
    args = job_flags.parse(f"{flags} {gates}".split()).args
    assert sum(memory.parameters(job_flags.job(args, 1))) == count


def test_the_backward_pass_begins_with_the_last_linear_of_a_layer():
    hidden = 64
    assert job(num_layers=2).linears() == [size * hidden**2 for size in (4, 4, 1, 3)] * 2
    llama = job(swiglu=True, ffn_hidden_size=96, num_query_groups=2, tensor_model_parallel_size=2)
    assert llama.linears()[:4] == [64 * 48, 96 * 64, 64 * 32, (4 + 4) * 16 * 64 // 2]
    assert job(hidden_size=128, swiglu=True).linears()[0] == 128 * 320  # 8/3 of 128 is 341; rounded down to 64s: 320


@pytest.mark.parametrize("tied", [False, True])
def test_stages_and_tensor_parallel_ranks_share_the_model(tied):
    given = {"num_layers": 8, "vocab_size": 512, "untie_embeddings_and_output_weights": not tied}
    one = job(**given)
    linears, others = memory.parameters(one)
    staged = job(**given, pipeline_model_parallel_size=4)
    copy = 512 * 64 * tied
    assert memory.parameters(staged) == (linears, others + copy)
    assert len(staged.others(1)) < len(staged.others(0)) and staged.others(1) == staged.others(2)
    halves = memory.parameters(job(**given, tensor_model_parallel_size=2))
    uncut = 8 * (4 * 64 + 2 * 64) + 2 * 64  # norms, and the biases of proj and fc2
    assert halves == (linears // 2, (others - uncut) // 2 + uncut)


def test_vocabulary_is_padded_as_megatron_pads_it():
    words = job(vocab_size=50_257, tensor_model_parallel_size=4).others(0)[0]
    assert words * 4 == 50_688 * 64


# Bytes.


@pytest.mark.parametrize("value", ["fp32", "bf16", "fp16", "fp8", "remainder"])
def test_states_cost_what_the_table_says(value):
    n = 128 * 40
    made = bucket_states.tensors(bucket_states.zeros(value, n, "cpu"))
    assert sum(t.nbytes for t in made.values()) == n * BYTES[value]


@pytest.mark.parametrize("value", ["fp32", "bf16", "fp8"])
def test_gradients_cost_what_the_table_says(value):
    store = grad_store(3, SHARD_UNIT, value, "cpu")
    assert sum(t.nbytes for t in store.tensors) == 3 * SHARD_UNIT * BYTES[value]


def test_e4m3_weights_cost_what_the_table_says():
    weight = torch.randn(48, 64)
    assert ops.quantize(weight, E4M3, torch.tensor(1.0)).nbytes == weight.numel() * BYTES["e4m3"]


def test_every_value_of_a_cell_that_costs_memory_has_its_bytes():
    for cell in memory._CELLS:
        if cell.name not in ("gemm", "partition"):
            assert set(cell.available) <= BYTES.keys() | {"auto"}


@pytest.mark.parametrize("how", ["even", "greedy"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_bucket_by_hand(how, ranks):
    """10 units of 2,048 elements: on 3 ranks rows of 4, so 12."""
    sizes = [4 * SHARD_UNIT, 2 * SHARD_UNIT, SHARD_UNIT, 3 * SHARD_UNIT]
    row = {1: 10, 3: 4}[ranks] * SHARD_UNIT
    numel = 10 * SHARD_UNIT
    buckets = engine_buckets(sizes, ranks, how)
    assert [bucket.row for bucket in buckets] == [row]
    assert engine_bytes(buckets, cells("O1")) == {
        "weight": 2 * ranks * row,
        "weight fp8 copy": numel,
        "transpose scratch": 4 * SHARD_UNIT,
        "grad": ranks * row * (1 + BLOCKS),
        "master": 4 * row,
        "exp_avg": 4 * row,
        "exp_avg_sq": 4 * row,
    }
    o2 = engine_bytes(buckets, cells("O2"))
    assert o2["weight"] == 2 * ranks * row and o2["weight fp8 copy"] == numel
    assert [o2[state] for state in STATES] == [2 * row, row * (1 + BLOCKS), row * (2 + BLOCKS)]
    o3 = engine_bytes(buckets, cells("O3", grad_accum="bf16", exp_avg_sq="fp8", master="bf16"))
    assert o3["weight"] == ranks * row and not o3["weight fp8 copy"] and o3["grad"] == 2 * ranks * row
    assert [o3[state] for state in STATES] == [2 * row, row * (1 + BLOCKS), row * (1 + BLOCKS)]
    bf16 = engine_bytes(buckets, cells("O1", gemm="bf16"))
    assert not bf16["weight fp8 copy"] and not bf16["transpose scratch"]


def test_even_has_megatrons_buckets_and_greedy_one():
    """Even's buckets have at least 40 M elements, or 1 M a rank: a bucket ends with the weight that reaches that."""
    model = MODELS["7b"]
    layer = 12 * 4096**2  # 201 M: fc2 is 67 M, a bucket by itself
    eight = engine_buckets(model.linears(), 8, "even")
    assert [len(bucket.sizes) for bucket in eight[:3]] == [1, 1, 2] and len(eight) == 96
    many = engine_buckets(model.linears(), 256, "even")
    assert all(256e6 <= sum(bucket.sizes) < 256e6 + 4 * 4096**2 for bucket in many[:-1])
    assert sum(sum(bucket.sizes) for bucket in many) == 32 * layer
    assert [sorted(b.sizes) for b in engine_buckets(model.linears(), 256, "greedy")] == [sorted(model.linears())]


@pytest.mark.parametrize("ranks", [1, 2, 7, 32])
def test_stock_owns_every_parameter_once_in_18_bytes(ranks):
    given = job(num_layers=3, data_parallel_size=ranks)
    count = sum(memory.parameters(given))
    held = list(ranks_bytes(given, None))
    assert len(held) == ranks
    owned = sum(part[state] for rank in held for part in (rank.linears, rank.others) for state in STATES)
    assert owned == 12 * count
    assert sum(rank.used for rank in held) == 12 * sum(given.linears())
    for rank in held:
        buffers = sum(part[kind] for part in (rank.linears, rank.others) for kind in ("weight", "grad"))
        padding = 2 * 128 * ranks + 64 * (len(given.linears()) + len(given.others(0)))
        assert 6 * count <= buffers <= 6 * (count + padding)


@pytest.mark.parametrize("in_bf16", [True, False])
def test_stocks_gradients_have_the_type_that_megatron_gives_them(in_bf16):
    from megatron.core.distributed.param_and_grad_buffer import group_params_for_buffers

    (key,) = group_params_for_buffers([torch.nn.Parameter(torch.zeros(8, dtype=torch.bfloat16))], not in_bf16)
    given = job(num_layers=3, grad_reduce_in_bf16=in_bf16)
    (held,) = ranks_bytes(given, None)
    for part in held.linears, held.others:
        assert part["grad"] * 2 == part["weight"] * key.grad_dtype.itemsize
    assert given.stock_gradient == key.grad_dtype.itemsize


def test_without_the_distributed_optimizer_stock_has_18_bytes_on_every_rank():
    given = job(num_layers=3, data_parallel_size=4, use_distributed_optimizer=False)
    count = sum(memory.parameters(given))
    held = list(ranks_bytes(given, None))
    assert [whole(rank) for rank in held] == [18 * count] * 4
    assert all(rank.used == 12 * sum(given.linears()) for rank in held)


@pytest.mark.parametrize("how", ["even", "greedy"])
@pytest.mark.parametrize("sharded", [True, False])
def test_a_bucket_has_the_states_that_are_counted(how, sharded):
    """A bucket of the engine on four ranks: a row of it, or the whole."""
    shapes, at_o2 = ((48, 32), (64, 80), (4 * 48, 128)), cells("O2", partition=how, grad_accum="bf16")
    fp8 = SimpleNamespace(**at_o2, forward_format=E4M3, margin=0, keep_transpose_cache=False, emulate=None, seed=1,
                          draws_masters=True)  # fmt: skip
    weights = [OwnedWeight(torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)), fp8) for shape in shapes]
    group = FakeProcessGroup._create_internal(1, 4)
    bucket = Bucket(weights, parts_of(group, fp8, sharded=sharded))
    held = {kind: sum(tensor.nbytes for tensor in tensors) for kind, tensors in bucket.buffers().items()}
    counted = engine_bytes(engine_buckets([rows * columns for rows, columns in shapes], 4, how), at_o2, sharded)
    for kind in ("weight", "grad", *STATES):
        assert held[kind] == counted[kind]


def test_stocks_bucket_rule_is_that_of_its_configuration():
    config = DistributedDataParallelConfig()  # the estimate takes its defaults from it
    assert config.bucket_size is None and config.num_buckets is None and not config.pad_buckets_for_high_nccl_busbw


def test_o3_needs_at_most_8_bytes_a_parameter_where_stock_needs_18(capsys):
    table = printed(capsys, "--model", "7b", "--data-parallel-size", "1")
    o0, o1, o2, o3 = map(float, table["bytes a parameter: linears"])
    assert o0 == 18
    assert o3 == pytest.approx(1 + 1 + 2 + 1 + 2 + 3 * BLOCKS + 4 / (12 * 32), abs=1e-3) and o3 <= 8
    assert o0 > o1 > o2 > o3


# Post-training.


def test_a_reference_and_a_frozen_base_of_7b(capsys):
    """By hand: 6.442 G weights of linears, 0.412 G others; the reference 1 and 2 bytes, the base 1 and 2."""
    alone = printed(capsys, *"--model 7b --data-parallel-size 1 --fp8-level O0 O3".split())
    beside = printed(capsys, *"--model 7b --data-parallel-size 1 --fp8-level O0 O3 --dpo-reference".split())
    linears, others = memory.parameters(MODELS["7b"])
    more = [float(b) - float(a) for a, b in zip(alone["all"], beside["all"], strict=True)]
    assert more == pytest.approx([(2 * linears + 2 * others) / 1e9, (linears + 2 * others) / 1e9], abs=2e-3)
    frozen = printed(capsys, *"--model 7b --fp8-level O0 O1 O3 --frozen-base".split())  # 32 ranks have it whole
    largest = max(MODELS["7b"].linears())
    by_hand = [2 * linears, 3 * linears + largest, linears + largest]
    assert [float(cell) for cell in frozen["all"]] == pytest.approx(
        [(size + 2 * others) / 1e9 for size in by_hand], abs=2e-3
    )
    assert not any(f"linears: {kind}" in frozen for kind in ("grad", *STATES, "reference"))
    tuned = printed(capsys, *"--model 7b --fp8-level O0 O1 O3 --frozen-base --dpo-reference".split())
    assert tuned == frozen  # the base is the reference


def test_ppos_four_models(capsys):
    """docs/post_training.md's table: twice a policy with its reference."""
    text = (Path(__file__).parents[2] / "docs/post_training.md").read_text()
    (command,) = re.findall(r"^megatron-fp8 memory (.*)$", text, re.M)
    half = printed(capsys, *command.split())
    in_fp8 = printed(capsys, *command.replace("bf16", "fp8").split())["all"]

    def twice(*rows: str) -> list[float]:
        return [2 * sum(float(half[row][i] or 0) for row in rows if i < len(half[row])) for i in (0, 1)]

    _, others = memory.parameters(MODELS["7b"])
    linears = {kind: twice(f"linears: {kind}") for kind in ("master", "grad")}
    by_hand = {
        "weights of all four": [w + 8 * others / 1e9 for w in twice("linears: weight", "linears: reference")],
        "of it m and v of their linears": twice("linears: exp_avg", "linears: exp_avg_sq"),
        "masters": [size + 8 * others / 1e9 for size in linears["master"]],
        "all": twice("all"),
    }
    by_hand["m and v of policy and critic"] = [
        size + 16 * others / 1e9 for size in by_hand["of it m and v of their linears"]
    ]
    by_hand["weights of all four"][1] += 2 * max(MODELS["7b"].linears()) / 1e9  # W^T's scratch
    for row, (stock, ours) in by_hand.items():
        found = re.search(rf"^\| {re.escape(row)} \| ([\d.]+) \| ([\d.]+)(?: \(([\d.]+)\))? \| (\d+) %", text, re.M)
        assert [float(found[1]), float(found[2])] == pytest.approx([stock, ours], abs=0.06), row
        assert float(found[4]) == pytest.approx(100 * (1 - ours / stock), abs=0.6), row
        assert found[3] is None or float(found[3]) == pytest.approx(2 * float(in_fp8[1]), abs=0.06)


@pytest.mark.parametrize("flags", ["--sft", "--sft --sft-tokenizer-prompt-format nemotron-nano-v2"])
def test_sft_changes_no_bytes_of_states(capsys, flags):
    level = ("--fp8-level", "O3")
    command = ("--gpus", "32", "--", *JOB.split(), "--attention-dropout", "0", *level)
    assert printed(capsys, *command, *flags.split()) == printed(capsys, *command)


def test_dpo_s_script_has_a_reference_and_its_flags(capsys):
    job = (*JOB.split(), "--fp8-level", "O3")
    command = ("--gpus", "8", "--", "torchrun", "dpo_gpt_fp8.py", *job, "--dpo-beta", "0.2")
    assert printed(capsys, *command) == printed(capsys, "--gpus", "8", "--dpo-reference", "--", *job)
    scored = printed(capsys, *command, "--dpo-reference-scores", "file")
    assert scored == printed(capsys, "--gpus", "8", "--", *job)


# Balance: FP8-LM's Table 8 (arXiv 2310.18313), GB of the emptiest and fullest GPU.

TABLE_8 = {"7b": (49.06, 49.36), "13b": (48.45, 48.85), "175b": (38.64, 40.28)}
PAPERS_BYTES = 2 + 1 + 2  # its states: FP16 master, E4M3 first moment, FP16 second moment


@pytest.mark.parametrize("name", TABLE_8)
@pytest.mark.parametrize("how", ["greedy", "even"])
def test_the_partition_explains_no_more_spread_than_table_8_has(name, how):
    """Whole-GPU figures contain activations and the allocator's slack. So compare the part that a partition may add to
    their spread: the difference of our emptiest and fullest rank, in the linears' states and, over all ranks, in all.

    A layer is 12 h^2: qkv 3, proj 1, fc1 4, fc2 4, divided by TP. By largest-first, in units of h^2 / TP,
        7B,   DP 32:  64 of 4, 32 of 3, 32 of 1:  each rank 4 + 4, then 3, then 1                       = 12
        13B,  DP 16:  80 of 4, 40 of 3, 40 of 1:  each 5 of 4; 3 + 3, half of them 3 more; 1 or 4 of 1  = 30
        175B, DP 4:   48 of 4, 24 of 3, 24 of 1, of a stage:  each 12 of 4, 6 of 3, 6 of 1              = 72
    So whole weights balance perfectly in all three, and the partition does not cause the measured spread. With a
    pipeline the first and the last stage also have the embedding or the head, which no partition can share.
    """
    model, units = MODELS[name], {"7b": 12, "13b": 30, "175b": 72}[name]
    share = units * model.hidden_size**2 // model.tensor_model_parallel_size
    ranks = list(ranks_bytes(model, cells("O3", partition=how)))
    assert len(ranks) == model.pipeline_model_parallel_size * model.data_parallel_size
    used = [rank.used for rank in ranks]
    assert share * model.data_parallel_size == sum(model.linears())
    states_bytes = PAPERS_BYTES + 2 * BLOCKS
    if how == "greedy":
        assert set(used) == {share * states_bytes}
    else:  # the fullest rank of every bucket is within 2,048 elements of the mean
        buckets = len(engine_buckets(model.linears(), model.data_parallel_size, how))
        assert 0 <= max(used) - share * states_bytes < SHARD_UNIT * buckets * states_bytes
    least, most = TABLE_8[name]
    spread = (max(map(whole, ranks)) - min(map(whole, ranks))) / 1e9
    assert spread <= most - least
    words = 51_200 * 12_288 // 8 * (2 + 4 + 12 / 4) / 1e9  # 50,304 words are padded to 128 * 8
    assert spread == pytest.approx(words if name == "175b" else 0, abs=1e-3)
    assert max(map(whole, ranks)) / 1e9 < least  # ours are still without activations
    print(f"{name} {how}: spread {spread:.3f} GB, Table 8 {most - least:.2f}")


def test_7b_at_256_ranks_does_not_inflate(capsys):
    """In the paper 6.4 GB become 17.2: one byte for each element of 256 rows that hold the largest weight."""
    sizes = MODELS["7b"].linears()
    mean = sum(sizes) / 256
    assert 256 * mean / 1e9 == pytest.approx(6.4, abs=0.05)
    assert 256 * max(sizes) / 1e9 == pytest.approx(17.2, abs=0.05)  # the largest weight sets every rank's share
    even, greedy = (engine_buckets(sizes, 256, how) for how in ("even", "greedy"))
    assert sum(bucket.row for bucket in even) == mean  # 1.5 * 4096^2, a multiple of 2,048 in every bucket
    assert greedy[0].row < 1.05 * mean
    table = printed(capsys, *"--model 7b --data-parallel-size 256 --fp8-level O3 --fp8-partition greedy".split())
    least, most = map(float, table["linears: of these states, in use"][0].split(" .. "))
    assert most <= 1.05 * mean * (PAPERS_BYTES + 2 * BLOCKS) / 1e9 + 5e-4 and least > 0


def test_greedy_of_many_ranks_stays_below_twice_the_mean():
    for name, model in MODELS.items():
        sizes = model.linears()
        for ranks in (64, 128, 333, 1000):
            assert place(sizes, ranks, "greedy").row < 2 * (sum(sizes) / ranks + SHARD_UNIT), (name, ranks)


# The command.


def test_the_table_adds_up(capsys):
    flags = "--model 175b --fp8-grad-accum bf16"
    table = printed(capsys, *flags.split())
    assert table["GB on a rank; TP 8, PP 4, DP 4"] == ["O0", "O1", "O2", "O3"]
    for column in range(4):
        cell = {row: [float(part) for part in re.findall(r"[\d.]*\d", values[column])] for row, values in table.items()}
        parts = [found for kind in memory.KINDS if (found := cell.get(f"linears: {kind}"))]
        other = cell["embedding, head, norms, biases"]
        for end in (0, -1):  # the emptiest and the fullest rank
            assert cell["all"][end] == pytest.approx(sum(p[end] for p in parts) + other[end], abs=0.005)
    assert table["linears: weight fp8 copy"] == ["", "5.436", "5.436", ""]
    assert table["linears: grad"][1:] == ["10.872"] * 3


def test_flags_change_a_model_and_a_model_may_be_given_by_flags(capsys):
    by_name = printed(capsys, "--model", "125m", "--tensor-model-parallel-size", "2")
    flags = (
        "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --vocab-size 50304 --disable-bias-linear "
        "--position-embedding-type rope --untie-embeddings-and-output-weights --tensor-model-parallel-size 2"
    )
    assert printed(capsys, *flags.split()) == by_name
    assert by_name != printed(capsys, "--model", "125m")


JOB = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --vocab-size 50304 --disable-bias-linear "
    "--position-embedding-type rope --untie-embeddings-and-output-weights --use-distributed-optimizer --bf16 "
    "--seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 2 --lr 1e-4"
)


def test_a_job_is_given_by_its_flags_or_its_whole_command(capsys):
    by_name = printed(capsys, "--model", "7b")
    assert printed(capsys, "--gpus", "32", "--", *JOB.split()) == by_name
    command = "torchrun --nnodes 4 --nproc-per-node 8 nowhere.py"
    assert printed(capsys, "--", *command.split(), *JOB.split()) == by_name
    assert printed(capsys, "--data-parallel-size", "32", "--", *JOB.split()) == by_name
    assert printed(capsys, "--gpus", "2", "--", *JOB.split()) == printed(
        capsys, "--model", "7b", "--data-parallel-size", "2"
    )


def test_context_parallel_ranks_share_states_as_data_parallel_ones_do(capsys):
    shared = "--context-parallel-size 4 --attention-dropout 0".split()
    table, alone = (printed(capsys, "--gpus", "32", "--", *JOB.split(), *more) for more in (shared, []))
    assert table.pop("GB on a rank; TP 1, PP 1, CP 4, DP 8") == alone.pop("GB on a rank; TP 1, PP 1, DP 32")
    assert table == alone
    in_front = printed(capsys, "--data-parallel-size", "8", "--", *JOB.split(), *shared)
    assert in_front.pop("GB on a rank; TP 1, PP 1, CP 4, DP 8") and in_front == table


@pytest.mark.parametrize("layout", ["--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 4"])
@pytest.mark.parametrize("gpus", ["--gpus 16", ""])
def test_a_layout_before_the_dashes_equals_one_in_the_job(capsys, layout, gpus):
    """The same number of GPUs; data parallelism is what the layout in front leaves of them."""
    of_job = "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2"
    front = printed(capsys, *gpus.split(), *layout.split(), "--", *JOB.split(), *of_job.split())
    assert front == printed(capsys, *gpus.split(), "--", *JOB.split(), *of_job.split(), *layout.split())


def test_a_job_without_the_distributed_optimizer_has_whole_states(capsys):
    without = JOB.replace("--use-distributed-optimizer", "").split()
    table = printed(capsys, "--gpus", "32", "--", *without)
    assert table["GB on a rank; TP 1, PP 1, DP 32, with whole states"] == ["O0", "O1", "O2", "O3"]
    assert table["bytes a parameter: all"][0] == "18.000"
    in_front = printed(capsys, "--model", "7b", "--data-parallel-size", "32")
    assert "GB on a rank; TP 1, PP 1, DP 32" in in_front
    assert "in front of -- that flag is taken as given" in memory.__doc__
    one = printed(capsys, "--gpus", "1", "--", *without)
    rows = [f"linears: {state}" for state in STATES]
    assert one["GB on a rank; TP 1, PP 1, DP 1"] and [one[row] for row in rows] == [table[row] for row in rows]


def test_a_jobs_level_and_cells_are_its_columns(capsys):
    level, partition = ("--fp8-level", "O3"), ("--fp8-partition", "greedy")
    by_name = printed(capsys, "--model", "7b", *level, *partition)
    assert printed(capsys, "--gpus", "32", "--", *JOB.split(), *level, *partition) == by_name
    assert printed(capsys, "--gpus", "32", *partition, "--", *JOB.split(), *level) == by_name
    two = printed(capsys, "--gpus", "32", "--fp8-level", "O0", "O3", "--", *JOB.split(), *level, *partition)
    assert two["all"][1:] == by_name["all"] and len(two["all"]) == 2


@pytest.mark.parametrize(
    "flags, storage",
    [
        ("--gpus 16 -- {JOB} --global-batch-size 64", "bf16"),  # 2 micro-batches of 2 on each of 16 ranks
        ("--gpus 32 -- {JOB} --global-batch-size 64", "fp8"),
        ("--gpus 32 --tensor-model-parallel-size 2 -- {JOB} --global-batch-size 64", "bf16"),
        ("--data-parallel-size 16 -- {JOB} --global-batch-size 64 --fp8-level O2 --fp8-grad-accum auto", "bf16"),
        ("--gpus 16 -- {JOB} --step-batch-size-schedule 0:32,200M:64", "bf16"),
        ("--gpus 16 -- {JOB}", "fp8"),  # a step of one micro-batch, Megatron's default
        ("--gpus 16 --fp8-grad-accum fp32 -- {JOB} --global-batch-size 64", "fp32"),
    ],
)
def test_gradients_storage_follows_the_jobs_micro_batches(capsys, flags, storage):
    """As training and `estimate` resolve --fp8-grad-accum auto."""
    words = [word for part in flags.split() for word in (JOB.split() if part == "{JOB}" else [part])]
    asked = ["--fp8-level", "O3", "--fp8-grad-accum", storage]
    where = words.index("--")
    assert printed(capsys, *words[:where], "--fp8-level", "O3", *words[where:]) == printed(
        capsys, *words[:where], *asked, *words[where:]
    )


def test_a_line_below_the_table_explains_the_gradients_storage(capsys):
    parser = argparse.ArgumentParser()
    memory.add_arguments(parser)

    def last(flags: str) -> str:
        assert memory.run(parser.parse_args(flags.split())) == 0
        return capsys.readouterr().out.splitlines()[-1]

    known = f"--gpus 16 -- {JOB} --global-batch-size"
    assert last(f"{known} 64").startswith("Gradients are stored in BF16: 2 micro-batches a step")
    assert last(f"{known} 32").startswith("Gradients are stored in FP8: 1 micro-batch a step")
    assert last("--model 7b").startswith("Gradients in FP8: 1 micro-batch a step, or ")
    assert last(f"{known} 64 --fp8-level O2 --fp8-grad-accum bf16").startswith("bytes a parameter: all")


OTHER_BYTES = (  # flags that change the bytes of weights, gradients or states
    "--mtp-num-layers 1",
    "--use-precision-aware-optimizer",
    "--optimizer sgd",
    "--use-megatron-fsdp",
    "--use-torch-fsdp2",
    "--optimizer-cpu-offload",
    "--num-distributed-optimizer-instances 2",
    "--first-last-layers-bf16",
)


def test_transformer_engines_fp8_weights_are_said_beside_o0(capsys):
    """With and without --fp8-param-gather: the difference that `estimate` counts in its column, in words."""
    parser = argparse.ArgumentParser()
    memory.add_arguments(parser)

    def lines(flags: str) -> list[str]:
        assert memory.run(parser.parse_args(flags.split())) == 0
        return capsys.readouterr().out.splitlines()

    job = f"--gpus 16 -- {JOB}"
    of_te, gathered = (lines(f"{job} --fp8-format hybrid {more}") for more in ("", "--fp8-param-gather"))
    plain = lines(job)
    assert of_te[: len(plain)] == gathered[: len(plain)] == plain
    assert of_te[len(plain) :] == [
        "", "O0 is stock BF16: Transformer Engine's FP8 holds 2 bytes more for each weight of the linears"
    ]  # fmt: skip
    assert gathered[-1] == "O0: with --fp8-param-gather E4M3 weights and their transposes take BF16's 2 bytes"
    assert lines(f"--fp8-level O3 {job} --fp8-format hybrid --fp8-param-gather") == lines(f"--fp8-level O3 {job}")
    with pytest.raises(UserError, match="--fp8-param-gather: remove it, or use --fp8-level O3"):
        lines(f"{job} --fp8-level O1 --fp8-param-gather")


def test_flags_that_change_only_time_pass(capsys):
    """Flags that change only activations pass too; only `estimate` refuses them."""
    given = "--window-size 128,0 --no-fp8-wgrad --fp8-recipe tensorwise --fp8-grad-reduce fp32"
    level = ("--fp8-level", "O3")
    assert printed(capsys, "--gpus", "32", "--", *JOB.split(), *level, *given.split()) == printed(
        capsys, "--model", "7b", *level
    )


@pytest.mark.parametrize(
    "flags, message",
    [
        (f"--model 7b -- {JOB}", "--model 7b: the flags behind -- give a model too"),
        ("--model 7b --gpus 8", "--gpus 8: needs a job; put its flags behind --, or give --data-parallel-size"),
        (f"--gpus 3 -- {JOB} --tensor-model-parallel-size 2", "--gpus 3: no multiple of --tensor-model-parallel-size"),
        (
            f"-- {JOB} --num-experts 8 --disable-bias-linear --expert-model-parallel-size 3",
            "--expert-model-parallel-size 3: does not divide --num-experts 8; change one",
        ),
        (
            f"--gpus 1 -- {JOB} --num-experts 8 --disable-bias-linear --expert-model-parallel-size 2",
            "--expert-model-parallel-size 2: with expert tensor parallelism 1 it does not divide a stage's 1 GPUs",
        ),
        *((f"-- {JOB} {flag}", f"{flag}: not modelled; remove it") for flag in OTHER_BYTES),
        (f"-- {JOB} --fp16", "--fp16: not modelled; use --bf16 instead"),
        (f"-- {JOB} --fp8-level O3 --fp8-bf16-layers *.linear_fc1", "--fp8-bf16-layers *.linear_fc1: not modelled"),
        (f"-- {JOB} --fp8-level O3 --fp8-emulate E8M3", "--fp8-emulate E8M3: not modelled"),
        ("-- --num-layers 4", "--hidden-size is missing; give it behind --"),
        ("--num-layers 4", "--hidden-size is missing; give it, or --model"),
        ("--model 7b --num-layers 0", "--num-layers 0: use 1 or more"),
        ("--model 7b --tensor-model-parallel-size 3", "does not divide --num-attention-heads 32"),
        ("--model 7b --pipeline-model-parallel-size 5", "does not divide --num-layers 32"),
        ("--model 7b --tensor-model-parallel-size 4 --num-query-groups 6", "--num-query-groups 6: neither multiple"),
        ("--model 7b --num-query-groups 3", "--num-query-groups 3: does not divide --num-attention-heads 32"),
        ("--model 7b --hidden-size 4100", "--num-attention-heads 32: does not divide --hidden-size 4100"),
        ("--model 7b --ffn-hidden-size 100", "a linear of 100 x 4096 elements"),
        ("--model 7b --position-embedding-type learned_absolute", "add --max-position-embeddings"),
        ("--model 7b --fp8-level O0 --fp8-master fp16", "--fp8-master fp16 with --fp8-level O0: no effect"),
    ],
)
def test_mistakes_are_said_in_one_line(capsys, flags, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        printed(capsys, *flags.split())
    assert "\n" not in str(error.value) and str(error.value).startswith("--")


# Experts.

QWEN3_30B = {  # https://huggingface.co/Qwen/Qwen3-30B-A3B: 30.5 billion parameters
    "num_layers": 48, "hidden_size": 2048, "num_attention_heads": 32, "kv_channels": 128, "num_query_groups": 4,
    "swiglu": True, "disable_bias_linear": True, "normalization": "RMSNorm", "vocab_size": 151_936,
    "untie_embeddings_and_output_weights": True, "num_experts": 128, "moe_ffn_hidden_size": 768,
}  # fmt: skip
MIXTRAL = {  # https://huggingface.co/mistralai/Mixtral-8x7B-v0.1: 46.7 billion
    "num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_query_groups": 8, "swiglu": True,
    "disable_bias_linear": True, "normalization": "RMSNorm", "vocab_size": 32_000,
    "untie_embeddings_and_output_weights": True, "num_experts": 8, "moe_ffn_hidden_size": 14_336,
}  # fmt: skip


@pytest.mark.parametrize(("model", "experts", "billions"), [(QWEN3_30B, 28.99, 30.53), (MIXTRAL, 45.10, 46.70)])
def test_published_mixtures_have_their_published_number_of_parameters(model, experts, billions):
    given = job(**model)
    count = memory.expert_parameters(given)
    assert count / 1e9 == pytest.approx(experts, abs=0.01)
    assert (sum(memory.parameters(given)) + count) / 1e9 == pytest.approx(billions, abs=0.01)


MOE = {"num_experts": 4, "moe_ffn_hidden_size": 64, "disable_bias_linear": True, "num_layers": 4, "swiglu": True}
FREQS = [1, 2, (1, 0, 0, 0)]


@pytest.mark.parametrize("freq", FREQS)
@pytest.mark.parametrize("layout", [
    {"data_parallel_size": 4, "expert_model_parallel_size": 2},
    {"tensor_model_parallel_size": 2, "data_parallel_size": 2},
    {"tensor_model_parallel_size": 2, "data_parallel_size": 2, "expert_tensor_parallel_size": 1},
    {"pipeline_model_parallel_size": 2, "data_parallel_size": 2, "expert_model_parallel_size": 2},
])  # fmt: skip
def test_ranks_share_the_experts(freq, layout):
    """Each expert once over the ranks that have other ones, as often as there is expert data parallelism."""
    one, shared = job(**MOE, moe_layer_freq=freq), job(**MOE, moe_layer_freq=freq, **layout)
    assert memory.expert_parameters(shared) * shared.expert_ranks == memory.expert_parameters(one)
    assert shared.expert_data_parallel_size * shared.expert_ranks == 4 // shared.pipeline_model_parallel_size
    assert sum(one.moe) == {1: 4, 2: 2}.get(freq, 1)
    if freq == (1, 0, 0, 0) and shared.pipeline_model_parallel_size == 2:
        assert shared.experts(0) and not shared.experts(1)
        assert len(shared.linears(0)) == 2 + 4 and len(shared.linears(1)) == 8


def test_shared_experts_are_linears_and_a_router_is_not():
    without, shared = job(**MOE), job(**MOE, moe_shared_expert_intermediate_size=32)
    assert sum(shared.linears()) - sum(without.linears()) == 4 * 3 * 32 * 64
    assert sum(without.others(0)) - sum(job(**MOE | {"num_experts": None}).others(0)) == 4 * 4 * 64


@pytest.mark.parametrize(("level", "bytes_each"), [("O0", 18.0), ("O1", 16.0), ("O2", 9.0), ("O3", 7.0)])
@pytest.mark.parametrize("owned", [True, False])
def test_experts_by_level(level, bytes_each, owned):
    """On one rank, gradients in FP8: a 128th a block format more. What is not owned is stock's at each level."""
    given = job(**MOE, fp8_experts=owned)
    held = next(ranks_bytes(given, None if level == "O0" else cells(level, grad_accum="fp8")))
    each = sum(held.experts.values()) / memory.expert_parameters(given)
    assert each == pytest.approx(bytes_each if owned else 18.0, abs=0.04)


def test_a_job_with_experts(capsys):
    """Of a command: a row for each kind, bytes a parameter, and the whole."""
    flags = (
        "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --vocab-size 100 --position-embedding-type rope "
        "--disable-bias-linear --swiglu --num-experts 4 --moe-ffn-hidden-size 64 --moe-layer-freq [0,1,1,1] "
        "--expert-model-parallel-size 2 --use-distributed-optimizer --fp8-level O3 --fp8-experts --micro-batch-size 1 "
        "--global-batch-size 2 --bf16"
    )
    rows = printed(capsys, "--gpus", "2", "--", *flags.split())
    assert float(rows["bytes a parameter: experts"][0]) == pytest.approx(7.02, abs=0.02)
    assert "experts: weight" in rows and "experts: weight fp8 copy" not in rows
