"""--fp8-activations in whole models on the CPU: what waits for the backward pass, in bytes; the forward pass to the
last bit; and how far the gradients are from FP32's."""

import architecture
import pytest
import torch

FLAG = ["--fp8-activations"]
WIDTH, LENGTH, BATCH = 128, 128, 2
GPT = f"--hidden-size {WIDTH} --ffn-hidden-size {4 * WIDTH} --seq-length {LENGTH} --max-position-embeddings {LENGTH}"
LLAMA = (
    f"{GPT} --ffn-hidden-size {7 * WIDTH // 2} --num-attention-heads 8 --group-query-attention --num-query-groups 2 "
    "--swiglu --normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights"
)


@pytest.fixture(scope="module", autouse=True)
def groups():
    with architecture.started():
        yield


def build(flags: str, *, given: bool, dtype=torch.bfloat16) -> torch.nn.Module:
    model = architecture.build(["--fp8-gemm", "fp8", *flags.split(), *(FLAG if given else [])], level=True).to(dtype)
    architecture.fill(model)
    return model


def waiting(flags: str, given: bool) -> dict[tuple, int]:
    """{(type, shape): bytes} of what one of a model's layers keeps in memory for its backward pass; memory that several
    functions keep counts once, parameters not at all."""
    found = []
    for layers in (1, 2):
        model, kept = build(f"{flags} --num-layers {layers}", given=given), {}
        architecture.attach(model)
        own = {p.untyped_storage().data_ptr() for p in model.parameters()}

        def pack(x, kept=kept):
            kept[x.untyped_storage().data_ptr()] = x  # held, so that nothing else can come to lie there
            return x

        tokens = torch.randint(0, 100, (BATCH, LENGTH))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            loss = model(tokens, torch.arange(LENGTH).expand(BATCH, -1), None, labels=tokens)
        counts: dict[tuple, int] = {}
        for pointer, x in kept.items():
            if pointer not in own and x.numel() >= LENGTH:
                key = str(x.dtype).removeprefix("torch."), tuple(x.shape)
                counts[key] = counts.get(key, 0) + x.untyped_storage().nbytes()
        found.append(counts)
        del loss
    one, two = found
    return {key: n - one.get(key, 0) for key, n in two.items() if n != one.get(key, 0)}


PLAIN = " --disable-bias-linear"
BEFORE = {  # in bytes a token, over the width: q(norm) 2, q(o), norms' inputs, q k v and o, h, q(act)
    GPT + PLAIN: 2 + 1 + 4 + 8 + 8 + 4,
    LLAMA + PLAIN: 2 + 1 + 4 + 5 + 14 + 3.5,
}
AFTER = {  # normalised inputs, q k v and o, h
    GPT + PLAIN: 2 + 8 + 4,
    LLAMA + PLAIN: 2 + 5 + 7,
}


@pytest.mark.parametrize("flags", BEFORE, ids=["gpt", "llama"])
def test_what_a_layer_keeps(flags):
    for given, expected in ((False, BEFORE[flags]), (True, AFTER[flags])):
        counts = waiting(flags, given)
        matrices = {key: n for key, n in counts.items() if key[0] in ("bfloat16", "float8_e4m3fn")}
        assert sum(matrices.values()) == expected * WIDTH * LENGTH * BATCH, counts
        # Statistics of rows, the attention's logarithms of sums, the blocks' exponents.
        assert sum(counts.values()) - sum(matrices.values()) <= 0.6 * WIDTH * LENGTH * BATCH


SWIGLU = "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope"
LATENT = (
    "--multi-latent-attention --kv-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 16 --v-head-dim 16 "
    "--qk-layernorm --position-embedding-type rope"
)
CASES = [
    *("", SWIGLU, "--apply-layernorm-1p --squared-relu --no-bias-gelu-fusion", "--no-bias-gelu-fusion"),
    *("--hidden-dropout 0.3", LATENT),
    *(f"--mtp-num-layers 1 {SWIGLU}", "--num-experts 2 --moe-layer-freq [0,1] --disable-bias-linear"),
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "--recompute-granularity selective --recompute-modules layernorm core_attn",
    "--recompute-granularity selective --recompute-modules mlp",
    *("--mlp-chunks-for-training 2", "--fp8-bf16-layers *.layers.0.*", "--attention-backend unfused"),
]


@pytest.mark.parametrize("case", CASES)
def test_the_forward_pass_is_the_same_and_gradients_err_as_much(case):
    """A changed last bit of a gradient changes how the next cast, to E5M2, rounds: so what is compared is how far both
    are from the gradients of FP32's GEMMs."""
    plain, given = (architecture.run(build(case, given=given, dtype=torch.float32)) for given in (False, True))
    exact = architecture.build(case.split(), level=True)
    architecture.fill(exact)
    exact = architecture.run(exact)
    assert given.keys() == plain.keys() == exact.keys() and torch.equal(given["loss"], plain["loss"])
    assert any(not torch.equal(given[name], value) for name, value in plain.items())
    old, new = (
        sum((run[name] - value).norm() / value.norm() for name, value in exact.items()) for run in (plain, given)
    )
    assert 0 < new < 1.1 * old


def test_a_layer_that_is_recomputed_keeps_nothing_more():
    flags = f"{GPT} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    assert waiting(flags, True) == waiting(flags, False)
