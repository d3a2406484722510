"""A converted model computes what transformers' own code computes: logits of tiny random models, in FP32.

A model of transformers with random weights is saved, converted, and loaded into the model that Megatron builds of the
printed flags: stock's, and a level's with its GEMMs in BF16's place, which keep FP32 operands. Then it is converted
back, and transformers loads that.
"""

import copy
import shlex
from unittest import mock

import architecture
import pytest
import torch

from megatron_fp8.checkpoint import convert
from megatron_fp8.flags import rope
from megatron_fp8.run import Run

transformers = pytest.importorskip("transformers", reason="needs transformers, the oracle", exc_type=ImportError)
pytestmark = pytest.mark.filterwarnings("ignore")

BOUND = 2e-5  # FP32 in another order
LENGTH, VOCABULARY = 48, 100  # the window is shorter, and the rotations differ from Llama 3.1's by far
SIZES = {
    **{"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, "rms_norm_eps": 1e-4},
    **{"initializer_range": 0.3, "tie_word_embeddings": False, "pad_token_id": None},
    **{"bos_token_id": None, "eos_token_id": None},
}
# A base of 10^7 makes half of the twelve wavelengths longer than 8,192 / 4: those are scaled.
THETA = 1e7


def llama3(factor: float) -> dict:
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return {"rope_parameters": {**scaling, "original_max_position_embeddings": 8192, "rope_theta": THETA}}


EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 20}
MODELS = {  # {name: (architecture, config)}
    "llama": ("Llama", {}),
    "llama, biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama 3.1": ("Llama", llama3(8.0)),
    "llama 3.2": ("Llama", {**llama3(32.0), "tie_word_embeddings": True}),
    "llama, head_dim": ("Llama", {"head_dim": 8}),
    "mistral": ("Mistral", {"sliding_window": 7, "head_dim": 16}),
    "mistral, window of 1": ("Mistral", {"sliding_window": 1}),
    "mistral, no window": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    "qwen 2.5": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen 3": ("Qwen3", {"head_dim": 20}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "head_dim": 16}),
    "mixtral, three a token": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 7}),
    "qwen 3, experts": ("Qwen3Moe", {**EXPERTS, "norm_topk_prob": True}),
    "qwen 3, experts, shares of all": ("Qwen3Moe", {**EXPERTS, "norm_topk_prob": False}),
}


def oracle(name: str, seed: int):
    """A random model of transformers: every parameter differs from its first value, and BF16 holds it."""
    kind, changes = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**SIZES | changes)
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        is_gain = parameter.ndim == 1 and parameter.data.eq(1).all()
        parameter.data = (0.3 * torch.randn_like(parameter) + is_gain).bfloat16().float()
    model.tie_weights()
    return model


@pytest.fixture(scope="module")
def megatron():
    with architecture.started():
        yield


def built(flags: list[str], level: bool, hands_over: bool = True):
    """The model that Megatron builds of a command, with the factor that the plugin hands over."""
    from megatron.core.models.gpt import GPTModel

    args = architecture.parser().parse_args([*architecture.BASE, *flags])
    init = GPTModel.__init__
    if hands_over and rope.hands_over(args):
        init = Run(args, None).rope_scaled(init)
    with mock.patch.object(GPTModel, "__init__", init):
        return architecture.build([*flags, *([] if level else ["--transformer-impl", "local"])], level=level)


def logits_of(model, folder, tokens: torch.Tensor) -> torch.Tensor:
    """Of a model that Megatron has built, with a checkpoint's weights, loaded by the names that Megatron saves."""
    from megatron.core import dist_checkpointing

    loaded = dist_checkpointing.load({"model": model.sharded_state_dict()}, str(folder / "release"))["model"]
    missing = model.load_state_dict(loaded, strict=False).missing_keys
    assert all("_extra_state" in name for name in missing), missing
    positions = torch.arange(LENGTH).expand(len(tokens), LENGTH)
    hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1).expand(len(tokens), 1, LENGTH, LENGTH)
    with torch.no_grad():
        return model.eval()(tokens, positions, hidden)[..., :VOCABULARY].float()


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, of the largest value."""
    return ((found - expected).abs().max() / expected.abs().max()).item()


def converted(model, folder, capsys) -> list[str]:
    """Writes folder/hf and folder/megatron -> the flags that the command prints."""
    copy.deepcopy(model).bfloat16().save_pretrained(folder / "hf")  # model's own would round its rotations too
    convert.to_megatron(str(folder / "hf"), str(folder / "megatron"))
    words = shlex.split(capsys.readouterr().out.splitlines()[0].split(" with ")[1])[2:]
    return f"--seq-length {LENGTH} --vocab-size {VOCABULARY} --make-vocab-size-divisible-by 128".split() + words


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name, megatron, tmp_path, capsys):
    model = oracle(name, seed := torch.seed() % 10_000)
    flags = converted(model, tmp_path, capsys)
    tokens = torch.randint(VOCABULARY, (2, LENGTH))
    with torch.no_grad():
        expected = model(tokens).logits
    for level in (True,) if "--num-experts" in flags else (False, True):  # stock's own experts: docs/checkpoints.md
        found = logits_of(built(flags, level), tmp_path / "megatron", tokens)
        assert apart(found, expected) < BOUND, (seed, level)

    convert.to_hf(str(tmp_path / "megatron"), str(tmp_path / "again"))
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.float32)
    theirs, again = dict(model.named_parameters()), dict(back.named_parameters())
    assert theirs.keys() == again.keys() and all(torch.equal(theirs[key], again[key]) for key in theirs)
    with torch.no_grad():
        assert apart(back(tokens).logits, expected) < BOUND, seed


@pytest.mark.parametrize(
    ("name", "flag", "other"),
    [
        ("llama 3.1", "--use-rope-scaling", None),
        ("mistral", "--window-size", "7,0"),
        ("mistral", "--window-size", "5,0"),
        ("qwen 2.5", "--rotary-base", "20000"),
        ("qwen 3", "--norm-epsilon", "0.001"),
        ("mixtral", "--moe-router-topk", "3"),
        ("qwen 3, experts, shares of all", "--moe-router-pre-softmax", None),
    ],
)
def test_each_flag_is_needed(name, flag, other, megatron, tmp_path, capsys):
    """What would be told from transformers: one more token in the window, for example."""
    model = oracle(name, torch.seed() % 10_000)
    flags = converted(model, tmp_path, capsys)
    at = flags.index(flag)
    flags[at : at + 1 + (other is not None)] = [] if other is None else [flag, other]
    tokens = torch.randint(VOCABULARY, (2, LENGTH))
    with torch.no_grad():
        expected = model(tokens).logits
    assert apart(logits_of(built(flags, level=True), tmp_path / "megatron", tokens), expected) > 10 * BOUND


def test_stock_megatron_builds_llama_3_2_with_factor_8(megatron, tmp_path, capsys):
    """Its logits are those of transformers with 8; the plugin's those with 32."""
    model = oracle("llama 3.2", seed := torch.seed() % 10_000)
    flags = converted(model, tmp_path, capsys)
    assert "--rope-scaling-factor 32.0" in " ".join(flags)
    tokens = torch.randint(VOCABULARY, (2, LENGTH))
    changed = MODELS["llama 3.2"][1]["rope_parameters"] | {"factor": 8.0}
    with mock.patch.dict(MODELS, {"with 8": ("Llama", {**MODELS["llama 3.2"][1], "rope_parameters": changed})}):
        other = oracle("with 8", seed)
    with torch.no_grad():
        expected, with_8 = model(tokens).logits, other(tokens).logits
    for level in (False, True):
        found = logits_of(built(flags, level, hands_over=False), tmp_path / "megatron", tokens)
        assert apart(found, with_8) < BOUND and apart(found, expected) > 10 * BOUND, (seed, level)
