"""The converter without training: layouts compared with the models' computation, E4M3 weights, refusals, damage."""

import inspect
import json
import re
from argparse import Namespace

import pytest
import torch
import torch.nn.functional as F
from hf_models import EXPERTS, FAMILY_CHANGES, GPT2, MISTRAL, NEOX, QWEN2, QWEN3, saved, write_folder
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from megatron_fp8 import cli
from megatron_fp8.checkpoint import adapters, convert
from megatron_fp8.checkpoint.hf.config import args_of, config_of, flags_of, model_args
from megatron_fp8.checkpoint.hf.families import FAMILIES, parameters, to_e4m3

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.fixture(params=FAMILY_CHANGES)
def args(request) -> Namespace:
    return model_args(saved(**FAMILY_CHANGES[request.param]))


def parameter(args: Namespace, name: str):
    (found,) = [p for p in parameters(args) if p.name == name]
    return found


# ---- layouts


@pytest.mark.parametrize(("heads", "groups", "dim"), [(6, 3, 4), (4, 4, 2), (5, 1, 3), (8, 2, 1)])
@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_qkv_rows_are_those_that_attention_reads(heads, groups, dim, kind):
    changes = {"num_attention_heads": heads, "num_query_groups": groups, "kv_channels": dim, "add_bias_linear": True}
    args = model_args(saved(**changes))
    qkv = parameter(args, f"decoder.layers.self_attention.linear_qkv.{kind}")
    fused = torch.randn(qkv.shape)
    q, k, v = qkv.split(fused, args)
    assert len(q) == heads * dim and len(k) == len(v) == groups * dim
    per_group = heads // groups
    for row in range(len(fused)):  # Megatron views a token's outputs as (groups, per_group + 2, dim)
        group, rest = divmod(row, (per_group + 2) * dim)
        slot, channel = divmod(rest, dim)
        if slot < per_group:  # Hugging Face's query head h attends to key h // per_group
            expected = q[(group * per_group + slot) * dim + channel]
        else:
            expected = (k if slot == per_group else v)[group * dim + channel]
        assert torch.equal(fused[row], expected)
    assert torch.equal(qkv.merge([q, k, v], args), fused)


def test_gate_comes_before_up():
    args = model_args(saved())
    fc1 = parameter(args, "decoder.layers.mlp.linear_fc1.weight")
    fused, x = torch.randn(fc1.shape), torch.randn(3, args.hidden_size)
    gate, up = fc1.split(fused, args)
    first, second = F.linear(x, fused).chunk(2, -1)  # --swiglu is silu(first) * second
    torch.testing.assert_close(F.silu(F.linear(x, gate)) * F.linear(x, up), F.silu(first) * second)
    assert [name.split(".")[-2] for name in fc1.names] == ["gate_proj", "up_proj"]
    assert torch.equal(fc1.merge([gate, up], args), fused)


def test_gpt2_multiplies_from_the_right():
    args = model_args(saved(**GPT2))
    x = torch.randn(3, args.hidden_size)
    qkv = parameter(args, "decoder.layers.self_attention.linear_qkv.weight")
    fused = torch.randn(qkv.shape)
    (weight,) = qkv.split(fused, args)
    per_head = F.linear(x, fused).view(3, args.num_attention_heads, 3, args.kv_channels)
    torch.testing.assert_close((x @ weight).view(3, 3, args.num_attention_heads, -1), per_head.transpose(1, 2))
    fc1 = parameter(args, "decoder.layers.mlp.linear_fc1.weight")
    tensor = torch.randn(fc1.shape)
    torch.testing.assert_close(x @ fc1.split(tensor, args)[0], F.linear(x, tensor))


def test_merge_undoes_split(args):
    for p in parameters(args):
        tensor = torch.randn(p.shape)
        if p.has_vocabulary:
            tensor[args.vocab_size :] = 0
        assert torch.equal(p.merge(p.split(tensor, args), args), tensor), p.name


def test_llama_has_the_names_of_its_model():
    names = [name.format(0) for p in parameters(model_args(saved())) for name in p.names]
    layer = [f"self_attn.{part}_proj" for part in "qkvo"] + [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
    layer += ["input_layernorm", "post_attention_layernorm"]
    assert set(names) == {
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
        *(f"model.layers.0.{module}.weight" for module in layer),
    }
    tied = model_args(saved(untie_embeddings_and_output_weights=False))
    assert "lm_head.weight" not in [name for p in parameters(tied) for name in p.names]


def test_differences_from_a_llama_are_those_of_each_model():
    def names(changes):
        args = model_args(saved(**changes))
        return {name.format(0): shape for p in parameters(args)
                for name, shape in zip(p.names, p.part_shapes(args), strict=True)}  # fmt: skip

    llama, attention = names({}), "model.layers.0.self_attn"
    biases = {f"{attention}.q_proj.bias": (24,), f"{attention}.k_proj.bias": (12,), f"{attention}.v_proj.bias": (12,)}
    assert names({"add_qkv_bias": True}) == llama | biases
    assert names({"window_size": (8, 0)}) == llama
    norms = {f"{attention}.q_norm.weight": (4,), f"{attention}.k_norm.weight": (4,)}
    assert names({"qk_layernorm": True}) == llama | norms


def test_a_window_counts_the_token_itself():
    config = config_of(model_args(saved(window_size=(0, 0))))
    assert config["model_type"] == "mistral" and config["sliding_window"] == 1
    assert args_of(config | {"sliding_window": 4096}).window_size == (4095, 0)
    assert args_of(config | {"sliding_window": None}).window_size is None
    del config["sliding_window"]
    assert args_of(config).window_size == (4095, 0)  # transformers' default


def test_padding_goes_and_comes_back():
    args = model_args(saved())
    words = parameter(args, "embedding.word_embeddings.weight")
    tensor = torch.randn(words.shape)
    (real,) = words.split(tensor, args)
    assert torch.equal(real, tensor[:101])
    padded = words.merge([real], args)
    assert padded.shape == (128, 24) and torch.equal(padded[:101], real) and not padded[101:].any()
    assert model_args(saved(), vocab_size=100).vocab_size == 100
    assert model_args(saved(tokenizer_type="GPT2BPETokenizer", vocab_size=7)).vocab_size == 128  # 7 is ignored


# ---- E4M3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("magnitude", [1e-6, 0.02, 1.0, 448.0, 3e4])
def test_e4m3_errs_within_its_bound(dtype, magnitude):
    weight = (torch.randn(37, 53) * magnitude * torch.logspace(-6, 0, 53)).clamp(-6e4, 6e4).to(dtype)
    weight[0, :3] = torch.tensor([0.0, -0.0, torch.finfo(dtype).smallest_normal])
    scaled = to_e4m3(weight)
    scale = scaled.scale_inv.item()
    assert scaled.payload.dtype == torch.float8_e4m3fn and torch.frexp(scaled.scale_inv).mantissa == 0.5
    largest = weight.abs().max().item()
    assert 224 < largest / scale <= 448
    exact = weight.double()
    error = (scaled.payload.double() * scale - exact).abs()
    assert (error <= (exact.abs() * 2.0**-4).clamp(min=scale * 2.0**-10)).all()
    assert (error > exact.abs() * 2.0**-5).any()  # so the error is E4M3's


@pytest.mark.parametrize("exponent", [-60, -9, 0, 5])
def test_a_weight_that_is_e4m3_keeps_every_bit(exponent):
    codes = torch.randint(0, 256, (41, 29), dtype=torch.uint8)
    payload = codes.masked_fill(codes & 0x7F == 0x7F, 0).view(torch.float8_e4m3fn)
    for top in (448, 100, 2):  # scales that leave room above the largest element, as in training
        values = payload.double().clamp(-top, top)
        values = values.to(torch.float8_e4m3fn).double() * 2.0**exponent
        scaled = to_e4m3(values.bfloat16())
        assert torch.equal(scaled.payload.double() * scaled.scale_inv.double(), values)
        assert torch.equal(scaled.dequantize(torch.bfloat16).double(), values)


def test_e4m3_of_zeros_and_of_no_numbers():
    zeros = to_e4m3(torch.zeros(3, 4))
    assert not zeros.payload.double().any() and zeros.scale_inv == 1
    for bad in (torch.nan, torch.inf, -torch.inf):
        with pytest.raises(ValueError, match="use --dtype bf16"):
            to_e4m3(torch.tensor([[1.0, bad]]))


# ---- config.json


def test_arguments_survive_config_json(args):
    config = json.loads(json.dumps(config_of(args)))
    back = args_of(config)
    assert vars(back) == vars(args)
    assert config_of(back) == config
    assert FAMILIES[config["model_type"]].architecture in config["architectures"]


LLAMA3 = config_of(model_args(saved(use_rope_scaling=True)))["rope_scaling"]


def test_the_scaled_rope_is_the_one_that_megatron_builds():
    """Megatron passes these numbers to no model by itself, so all models have the defaults."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.training import argument_utils

    defaults = inspect.signature(RotaryEmbedding._apply_scaling).parameters
    assert {"rope_type": "llama3", **{name: defaults[name].default for name in list(LLAMA3)[1:]}} == LLAMA3
    assert "rope_scaling_factor" not in inspect.getsource(argument_utils)


def test_llama_3_rope_in_both_spellings():
    # The flag alone built a model with 8, of stock Megatron; only the plugin writes `rope_factor_built`.
    args = model_args(saved(use_rope_scaling=True, rope_scaling_factor=32.0))
    assert config_of(args)["rope_scaling"]["factor"] == 8.0 and args_of(config_of(args)).use_rope_scaling
    args = model_args(saved(use_rope_scaling=True, rope_scaling_factor=32.0, rope_factor_built=32.0))
    config = config_of(args)
    assert config["rope_scaling"]["factor"] == 32.0 and args_of(config).rope_factor_built == 32.0
    scaling, theta = config.pop("rope_scaling"), config.pop("rope_theta")
    newer = args_of(config | {"rope_parameters": {**scaling, "rope_theta": theta}})
    assert (newer.rotary_base, newer.use_rope_scaling) == (500000, True)
    plain = args_of(config | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}})
    assert (plain.rotary_base, plain.use_rope_scaling) == (1000000, False)


def test_flags_describe_the_model():
    flags = flags_of(model_args(saved()))
    for words in "--num-query-groups 3", "--norm-epsilon 1e-05", "--swiglu", "--disable-bias-linear":
        assert f" {words} " in f" {flags} "
    assert "rope-scaling" not in flags and "gelu" not in flags
    flags = flags_of(model_args(saved(use_rope_scaling=True, rope_scaling_factor=32.0)))
    assert "--use-rope-scaling" in flags and "--rope-scaling-factor" not in flags  # it had no effect
    flags = flags_of(model_args(saved(use_rope_scaling=True, rope_factor_built=32.0)))
    assert "--use-rope-scaling --rope-scaling-factor 32.0" in flags
    assert "--window-size 11,0" in flags_of(model_args(saved(**MISTRAL)))
    assert "--disable-bias-linear --add-qkv-bias" in flags_of(model_args(saved(**QWEN2)))
    assert "--qk-layernorm" in flags_of(model_args(saved(**QWEN3)))
    assert "--no-bias-gelu-fusion" in flags_of(model_args(saved(**GPT2 | {"bias_gelu_fusion": False})))


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        (EXPERTS | {"moe_shared_expert_intermediate_size": 16}, "--moe-shared-expert-intermediate-size 16"),
        (EXPERTS | {"moe_layer_freq": [0, 1]}, r"--moe-layer-freq .*0, 1.*: no Hugging Face model"),
        (EXPERTS | {"moe_layer_freq": 2}, "--moe-layer-freq 2: no Hugging Face model"),
        (EXPERTS | {"moe_router_pre_softmax": True}, "--moe-router-pre-softmax: .* mixtral .*--num-experts"),
        (EXPERTS | {"moe_router_score_function": "sigmoid"}, "--moe-router-score-function: .* mixtral "),
        (EXPERTS | {"moe_router_enable_expert_bias": True}, "--moe-router-enable-expert-bias True"),
        ({"qk_layernorm": True, "add_qkv_bias": True}, "--add-qkv-bias: .* qwen3 .*--qk-layernorm"),
        ({"qk_layernorm": True, "window_size": (8, 0)}, "--window-size: .* qwen3 "),
        ({"qk_layernorm": True, "add_bias_linear": True}, "--disable-bias-linear: .* qwen3 "),
        ({"add_qkv_bias": True, "window_size": (8, 0)}, "--window-size: .* qwen2 .*--add-qkv-bias"),
        ({"add_bias_linear": True, "window_size": (8, 0)}, "--disable-bias-linear: .* mistral .*--window-size"),
        ({"window_size": (8, 2)}, "window_size.1 2"),
        ({"window_size": (-1, 0)}, "window_size.0 -1"),
        ({"window_size": (8, 0), "window_attn_skip_freq": 2}, "--window-attn-skip-freq 2"),
        ({"layernorm_zero_centered_gamma": True}, "--apply-layernorm-1p"),
        ({"softmax_type": "learnable"}, "--softmax-type learnable"),
        (NEOX | {"window_size": (128, 0)}, "--window-size"),
        (NEOX | {"qk_layernorm": True}, "--qk-layernorm"),
        ({"swiglu": False}, "--swiglu"),
        ({"position_embedding_type": "yarn"}, "--position-embedding-type"),
        ({"rotary_percent": 0.25}, "--rotary-percent"),
        (NEOX | {"add_bias_linear": False}, "--disable-bias-linear"),
        (NEOX | {"group_query_attention": True}, "--group-query-attention"),
        (NEOX | {"kv_channels": 8}, "--kv-channels"),
        (NEOX | {"swiglu": True}, "--swiglu"),
        (GPT2 | {"squared_relu": True}, "--squared-relu"),
        ({"vocab_size": 129}, "--vocab-size 129"),
        ({"kv_channels": None}, "kv_channels"),
    ],
)
def test_a_model_without_a_family_is_refused_by_its_flag(changes, flag):
    with pytest.raises(ValueError, match=flag) as refusal:
        model_args(saved(**changes))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("llama", {"model_type": "deepseek_v2"}, 'model_type "deepseek_v2"'),
        ("qwen3_moe", {"mlp_only_layers": [1]}, "mlp_only_layers"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step 2"),
        ("mistral", {"sliding_window": 0}, "sliding_window 0"),
        ("mistral", {"hidden_act": "gelu"}, 'hidden_act "gelu"'),
        ("mistral", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, 'rope scaling "yarn"'),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window true"),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, 'layer_types.1 "sliding_attention"'),
        ("qwen2", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, 'rope scaling "yarn"'),
        ("qwen3", {"attention_bias": True}, "attention_bias true"),
        ("qwen3", {"head_dim": None}, "head_dim is missing"),
        ("llama", {"hidden_act": "relu"}, 'hidden_act "relu"'),
        ("llama", {"attention_bias": True}, "mlp_bias False"),
        ("llama", {"rope_theta": 10000.5}, "rope_theta 10000.5"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope scaling"),
        ("llama", {"rope_parameters": LLAMA3 | {"low_freq_factor": 2.0}}, "low_freq_factor 2.0 of the rope scaling"),
        ("llama", {"rope_scaling": LLAMA3 | {"high_freq_factor": 8.0}}, "high_freq_factor 8.0 of the rope scaling"),
        ("llama", {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 4096}}, "embeddings 4096 of the rope"),
        ("llama", {"rope_scaling": {"rope_type": "llama3"}}, "factor of the rope scaling is missing"),
        ("gpt_neox", {"rope_scaling": LLAMA3}, "rope scaling"),
        ("gpt_neox", {"use_parallel_residual": True}, "use_parallel_residual true"),
        ("gpt_neox", {"hidden_act": "relu"}, 'hidden_act "relu"'),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    ],
)
def test_a_model_that_megatron_has_not_is_refused_by_its_key(family, changes, named):
    config = config_of(model_args(saved(**FAMILY_CHANGES[family])))
    with pytest.raises(ValueError, match=named):
        args_of(config | changes)
    del config["vocab_size"]
    with pytest.raises(ValueError, match="vocab_size is missing"):
        args_of(config)


# ---- folders


def test_there_and_back_is_identical(args, tmp_path):
    tensors = write_folder(tmp_path / "hf", args)
    convert.to_megatron(str(tmp_path / "hf"), str(tmp_path / "megatron"))
    convert.to_hf(str(tmp_path / "megatron"), str(tmp_path / "again"))
    assert (tmp_path / "again/model.safetensors").read_bytes() == (tmp_path / "hf/model.safetensors").read_bytes()
    assert json.loads((tmp_path / "again/config.json").read_text()) == config_of(args)

    limit = 3000
    convert.to_hf(str(tmp_path / "megatron/release"), str(tmp_path / "shards"), max_shard_bytes=limit)
    index = json.loads((tmp_path / "shards/model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "shards").glob("*.safetensors"))
    assert len(files) > 3 and files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    found = {}
    for file in files:
        shard = load_file(file)
        assert len(shard) == 1 or sum(t.nbytes for t in shard.values()) <= limit
        assert all(index["weight_map"][name] == file.name for name in shard)
        found |= shard
    assert found.keys() == tensors.keys() == index["weight_map"].keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())


@pytest.mark.parametrize("family", [name for name in FAMILY_CHANGES if name not in ("gpt2", "mixtral", "qwen3_moe")])
def test_e4m3_folder_there_and_back(family, tmp_path):
    args = model_args(saved(**FAMILY_CHANGES[family]))
    tensors = write_folder(tmp_path / "hf", args)
    convert.to_megatron(str(tmp_path / "hf"), str(tmp_path / "megatron"))
    convert.to_hf(str(tmp_path / "megatron"), str(tmp_path / "e4m3"), dtype="e4m3")
    stored = load_file(tmp_path / "e4m3/model.safetensors")
    coded = {name for name, tensor in stored.items() if tensor.dtype == torch.float8_e4m3fn}
    linears = {n for n in tensors if n.endswith("weight") and tensors[n].ndim == 2 and ".layers." in n}
    assert coded == linears and stored.keys() == tensors.keys() | {f"{name}_scale" for name in coded}
    for name, tensor in tensors.items():
        if name not in coded:
            assert torch.equal(stored[name], tensor)
            continue
        scale = stored[f"{name}_scale"]
        assert scale.shape == (1,) and scale.dtype == torch.float32
        error = (stored[name].double() * scale.double() - tensor.double()).abs()
        assert (error <= (tensor.double().abs() * 2.0**-4).clamp(min=scale.item() * 2.0**-10)).all()
    if family != "gpt_neox":  # loaders fuse these again
        layer = "model.layers.1.self_attn"
        assert len({stored[f"{layer}.{part}_proj.weight_scale"].item() for part in "qkv"}) == 1
    quantization = json.loads((tmp_path / "e4m3/config.json").read_text())["quantization_config"]
    assert quantization["quant_method"] == "compressed-tensors" and "lm_head" in quantization["ignore"]
    # a weight is not rounded a second time, although a smaller scale may be enough then
    convert.to_megatron(str(tmp_path / "e4m3"), str(tmp_path / "rounded"))
    convert.to_hf(str(tmp_path / "rounded"), str(tmp_path / "again"), dtype="e4m3")
    again = load_file(tmp_path / "again/model.safetensors")
    for name in coded:
        value = stored[name].double() * stored[f"{name}_scale"].double()
        assert torch.equal(again[name].double() * again[f"{name}_scale"].double(), value)


def with_adapters(tmp_path, monkeypatch, args, size, leave_out=(), kinds=adapters.KINDS) -> dict[str, torch.Tensor]:
    """Write the checkpoint tmp_path/lora: a random model of E4M3 values, as O3's are, with adapters whose B has entries
    of `size`; kinds: their names. Returns {linear's weight: (layers, n, k) its change, float64}."""
    write_folder(tmp_path / "hf", args)
    write, changes = convert._write_megatron, {}

    def add(out, state, args):
        for p in (p for p in parameters(args) if p.is_linear_weight):
            state[p.name] = torch.stack([to_e4m3(w).dequantize(torch.bfloat16) for w in state[p.name]])
            (n, k), layers, module = p.shape, args.num_layers, p.name.removesuffix("weight")
            halves = args.swiglu and module.endswith("linear_fc1.")
            a = torch.randn(layers, 3, k).bfloat16()
            b = (size * torch.randn(layers, *((2, n // 2) if halves else (n,)), 3)).bfloat16()
            changes[p.name] = b.double().reshape(layers, n, 3) @ a.double()
            state |= {module + kind: part for kind, part in zip(kinds, (a, b), strict=True)}
        for name in leave_out:
            del state[name]
        write(out, state, args)

    with monkeypatch.context() as patch:
        patch.setattr(convert, "_write_megatron", add)
        convert.to_megatron(str(tmp_path / "hf"), str(tmp_path / "lora"))
    return changes


@pytest.mark.parametrize("dtype", ["bf16", "e4m3"])
@pytest.mark.parametrize("family", [name for name in FAMILY_CHANGES if name not in ("gpt2", "mixtral", "qwen3_moe")])
def test_adapters_are_merged_and_rounded_once(family, dtype, tmp_path, monkeypatch, capsys):
    """Every written weight is within half a step of W + B A; nothing else changes."""
    args = model_args(saved(**FAMILY_CHANGES[family]))
    changes = with_adapters(tmp_path, monkeypatch, args, 0.1)
    assert cli.main(["convert", "to-hf", str(tmp_path / "lora"), str(tmp_path / "out"), "--vocab-size",
                     str(args.vocab_size), "--merge-adapters", "--dtype", dtype]) == 0  # fmt: skip
    (share,) = re.findall(r"--merge-adapters: 4 kinds of linears; (\S+) % of the change", capsys.readouterr().out)
    assert 97 < float(share) < 103
    before, found = load_file(tmp_path / "hf/model.safetensors"), load_file(tmp_path / "out/model.safetensors")
    merged = 0
    for p in parameters(args):
        for layer in range(args.num_layers if p.is_stacked else 1):
            names = [name.format(layer) for name in p.names]
            if p.name not in changes:
                assert all(torch.equal(found[name], before[name]) for name in names)
                continue
            base = to_e4m3(p.merge([before[name] for name in names], args)).dequantize().double()
            wanted = p.split(base + changes[p.name][layer], args)
            for name, exact in zip(names, wanted, strict=True):
                scale = found[f"{name}_scale"].double() if dtype == "e4m3" else torch.zeros(())
                value = found[name].double() * (scale if dtype == "e4m3" else 1)
                step = exact.abs() * (2.0**-4 if dtype == "e4m3" else 2.0**-8)
                assert ((value - exact).abs() <= step.clamp(min=scale.item() * 2.0**-10) * 1.001 + 1e-6).all()
                merged += 1
    assert merged == sum(len(p.names) * args.num_layers for p in parameters(args) if p.is_linear_weight)


def test_a_change_that_rounding_loses_is_said(tmp_path, monkeypatch, capsys):
    """A base on E4M3's grid, and changes of 0.2 % of its weights: BF16 has most of them, E4M3 little."""
    args = model_args(saved())
    with_adapters(tmp_path, monkeypatch, args, 1e-3)
    shares = []
    for dtype in ("bf16", "e4m3"):
        convert.to_hf(str(tmp_path / "lora"), str(tmp_path / dtype), dtype, 90, merge_adapters=True)
        shares += re.findall(r"(\S+) % of the change", capsys.readouterr().out)
    assert float(shares[1]) < 25 and 60 < float(shares[0]) < 95


def test_adapters_that_do_not_fit_are_refused(tmp_path, monkeypatch, capsys):
    args, name = model_args(saved()), "decoder.layers.mlp.linear_fc2."
    write_folder(tmp_path / "hf", args)
    convert.to_megatron(str(tmp_path / "hf"), str(tmp_path / "plain"))
    with pytest.raises(ValueError, match=r"^--merge-adapters: .*plain.* has no adapters named .*; remove the flag$"):
        convert.to_hf(str(tmp_path / "plain"), str(tmp_path / "out"), merge_adapters=True)
    (tmp_path / "half").mkdir()
    with_adapters(tmp_path / "half", monkeypatch, args, 0.1, [f"{name}lora_a"])
    with pytest.raises(ValueError, match=rf"adapters of shapes None and \(.*\) do not fit {name}weight$"):
        convert.to_hf(str(tmp_path / "half/lora"), str(tmp_path / "out"), merge_adapters=True)
    with pytest.raises(ValueError, match=r"linear_fc1\.lora_a is an adapter's: add --merge-adapters"):
        convert.to_hf(str(tmp_path / "half/lora"), str(tmp_path / "out"))
    (tmp_path / "old").mkdir()
    with_adapters(tmp_path / "old", monkeypatch, args, 0.1, kinds=adapters.EARLIER)
    with pytest.raises(ValueError, match=r"linear_fc1\.a is of an older examples/lora\.py; .*: train it again$"):
        convert.to_hf(str(tmp_path / "old/lora"), str(tmp_path / "out"), merge_adapters=True)
    assert not (tmp_path / "out").exists()


def test_other_precisions_and_names_are_read(tmp_path):
    args = model_args(saved(**GPT2))
    tensors = write_folder(tmp_path / "hf", args)
    other = {  # gpt2's published form: float32, names without "transformer.", a mask among the weights
        **{name.removeprefix("transformer."): tensor.float() + 1e-6 for name, tensor in tensors.items()},
        "h.0.attn.bias": torch.ones(1, 1, 32, 32),
    }
    save_file(other, tmp_path / "hf/model.safetensors")
    convert.to_megatron(str(tmp_path / "hf"), str(tmp_path / "megatron"))
    convert.to_hf(str(tmp_path / "megatron"), str(tmp_path / "again"))
    found = load_file(tmp_path / "again/model.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, other[name.removeprefix("transformer.")].bfloat16())


def test_a_scale_for_each_row_is_read(tmp_path):
    args = model_args(saved())
    name = "model.layers.1.mlp.down_proj.weight"

    def by_rows(tensors):
        scale = torch.rand(len(tensors[name]), 1) + 0.1
        payload = (tensors[name] / scale).to(torch.float8_e4m3fn)
        unused = {f"{name.removesuffix('weight')}input_scale": torch.ones(1)}
        return tensors | {name: payload, f"{name}_scale_inv": scale, **unused}

    tensors = write_folder(tmp_path / "hf", args, by_rows)
    convert.to_megatron(str(tmp_path / "hf"), str(tmp_path / "megatron"))
    convert.to_hf(str(tmp_path / "megatron"), str(tmp_path / "again"))
    found = load_file(tmp_path / "again/model.safetensors")[name]
    assert torch.equal(found, (tensors[name].float() * tensors[f"{name}_scale_inv"]).bfloat16())


def without(name):
    return lambda tensors: {k: v for k, v in tensors.items() if k != name}


NAME = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without(NAME), f"no tensor {NAME}"),
        (lambda t: t | {"model.layers.2.norm.weight": t[NAME].clone()}, "layers.2.norm.weight has no place"),
        (lambda t: t | {NAME: t[NAME][1:]}, "but the sizes in config.json make it"),
        (lambda t: t | {NAME: t[NAME].t().contiguous()}, "but the sizes in config.json make it"),
        (lambda t: t | {"lm_head.weight": t["lm_head.weight"][:-1]}, "but the sizes in config.json make it"),
        (lambda t: t | {NAME: t[NAME].to(torch.float8_e4m3fn)}, "needs weight_scale"),
        (lambda t: t | {NAME: t[NAME].to(torch.int8), f"{NAME}_scale": torch.ones(1)}, "is I8, which convert cannot"),
        (lambda t: t | {NAME: t[NAME].to(torch.float8_e4m3fn), f"{NAME}_scale_inv": torch.ones(2, 2)}, "one float"),
    ],
    ids=["missing", "surplus", "cut", "transposed", "vocabulary", "unscaled", "integers", "blocks"],
)
def test_a_folder_that_does_not_fit_is_refused(change, said, tmp_path):
    write_folder(tmp_path / "hf", model_args(saved()), change)
    with pytest.raises(ValueError, match=said) as refusal:
        convert.to_megatron(str(tmp_path / "hf"), str(tmp_path / "out"))
    assert "\n" not in str(refusal.value) and not (tmp_path / "out").exists()


def test_truncated_files_are_refused(tmp_path):
    write_folder(tmp_path / "hf", model_args(saved()))
    convert.to_megatron(str(tmp_path / "hf"), str(tmp_path / "megatron"))
    release = tmp_path / "megatron/release"
    cases = [(tmp_path / "hf/model.safetensors", convert.to_megatron, tmp_path / "hf")]
    cases += [(release / name, convert.to_hf, tmp_path / "megatron") for name in (".metadata", "__0_0.distcp")]
    for path, direction, source in cases:
        whole = path.read_bytes()
        for share in (0.0, 0.1, 0.5, 0.9, 0.999):
            path.write_bytes(whole[: int(share * len(whole))])
            for sealed in (True, False):
                seal = release / "integrity.json"
                if not sealed:
                    seal.rename(release / "aside")
                with pytest.raises(ValueError, match=r"damaged|is missing") as refusal:
                    direction(str(source), str(tmp_path / "out" / f"{path.name}{share}"))
                assert "\n" not in str(refusal.value)
                if not sealed:
                    (release / "aside").rename(seal)
        path.write_bytes(whole)
    (release / "metadata.json").unlink()
    for line in (r"^\S+: release/metadata.json is missing, or cannot be read; name another", "no complete checkpoint"):
        with pytest.raises(ValueError, match=line):
            convert.to_hf(str(tmp_path / "megatron"), str(tmp_path / "out2"))
        (release / "integrity.json").unlink(missing_ok=True)  # without a seal it is an unfinished save


# ---- the command


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("transmute", "transmute"),
        ("convert to-hf nowhere out --dtype fp4", "fp4"),
        ("convert to-hf nowhere out", "nowhere: no complete checkpoint"),
        ("convert to-hf nowhere out --max-shard-size nan", "--max-shard-size nan: not a number; give one"),
        ("convert to-hf nowhere out --max-shard-size inf", "--max-shard-size inf: use a number above 0"),
        ("convert to-hf nowhere out --vocab-size 0", "--vocab-size 0: use 1 or more"),
        ("convert to-hf nowhere --dtype= out", "--dtype '': an empty value"),
        ("convert to-megatron nowhere out", "nowhere/config.json: No such file or directory; name"),
    ],
)
def test_a_mistake_is_one_line(words, said, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(words.split())
    captured = capsys.readouterr()
    assert end.value.code == 2 and captured.err.count("\n") == 1 and said in captured.err
    assert captured.err.startswith("megatron_fp8: ")


def test_command_converts_and_spares_what_is_there(tmp_path, capsys):
    write_folder(tmp_path / "hf", model_args(saved()))
    words = ["convert", "to-megatron", str(tmp_path / "hf"), str(tmp_path / "out")]
    assert cli.main(words) == 0
    assert f"--load {tmp_path / 'out'} --num-layers 2 --hidden-size 24 " in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(words)
    assert "exists already" in capsys.readouterr().err
    assert cli.main(["convert", "to-hf", str(tmp_path / "out"), str(tmp_path / "new"), "--vocab-size", "90"]) == 0
    with safe_open(tmp_path / "new/model.safetensors", framework="pt") as file:
        assert file.get_slice("lm_head.weight").get_shape() == [90, 24]


def test_experts_are_not_written_in_e4m3(tmp_path):
    write_folder(tmp_path / "hf", model_args(saved(**FAMILY_CHANGES["mixtral"])))
    convert.to_megatron(str(tmp_path / "hf"), str(tmp_path / "megatron"))
    with pytest.raises(ValueError, match="--dtype e4m3: experts are not written in E4M3; use bf16"):
        convert.to_hf(str(tmp_path / "megatron"), str(tmp_path / "out"), "e4m3")
