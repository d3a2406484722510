"""Malformed Hugging Face folders give one line or a correct conversion: no traceback, no nonsense, no hanging."""

import json
import math
import os
import random
import shlex
import struct
import subprocess

import pytest
import torch
from hf_models import FAMILY_CHANGES, saved, write_folder
from safetensors.torch import save_file

from megatron_fp8 import cli
from megatron_fp8.checkpoint import convert
from megatron_fp8.checkpoint.hf import folder
from megatron_fp8.checkpoint.hf.config import args_of, config_of, flags_of, model_args
from megatron_fp8.errors import UserError

pytestmark = [pytest.mark.filterwarnings("ignore:torch.distributed is disabled"), pytest.mark.timeout(120)]
SEEDS = 200

# What no key may be, and what those of a kind may not be.
WORDS = ["", "x", "12", "x;touch PROOF", "$(touch PROOF)", "²", "\ud800", "a\nb", "x" * 10**5]
NEVER = [*WORDS, [], [2], {}, {"a": 1}, math.nan, math.inf, -math.inf]
NO_COUNT = [*NEVER, True, False, 0, -1, -5, 0.5, 1.5, -0.0, 24.0, 1e308, 10**30, 10**400, 10**5000, 2**31]
NO_SHARE = [*NEVER, None, True, False, -1, -1e-9, 1, 1.5, 1e308, 10**400]
NO_POSITIVE = [*NEVER, None, True, False, 0, -0.0, -1, -1e-9, 1e308, 10**400, 1e-320]
NO_FLAG = [*NEVER, None, 0, 1, -1, 0.0, 1.5]
NO_ROPE = [*WORDS, True, 0, 5, [], [2], math.nan, {"a": 1}, {"factor": 2.0}, {"type": "yarn"}, {"rope_type": 5},
           {"rope_type": "llama3"}, {"rope_type": "default", "factor": "x"}, {"rope_theta": "x"}]  # fmt: skip
COUNTS = """num_hidden_layers hidden_size num_attention_heads intermediate_size max_position_embeddings vocab_size
n_layer n_embd n_head n_positions""".split()
REQUIRED = {*COUNTS, "model_type", "use_parallel_residual"}
REQUIRED_OF = {  # beside those; what transformers makes of their absence, or of null, depends on its version
    **{"mistral": {"num_key_value_heads"}, "qwen2": {"num_key_value_heads"}},
    "qwen3": {"num_key_value_heads", "head_dim"},
}
EXPERT_COUNTS = "num_local_experts num_experts num_experts_per_tok moe_intermediate_size".split()
SHARES = "attention_dropout hidden_dropout attn_pdrop resid_pdrop embd_pdrop".split()
ONE_VALUE = """use_parallel_residual scale_attn_weights scale_attn_by_inverse_layer_idx add_cross_attention
attention_bias use_sliding_window""".split()
NONSENSE = {
    **{key: [*NO_COUNT, None] for key in COUNTS},
    **{key: NO_COUNT for key in ("num_key_value_heads", "head_dim", "n_inner")},  # null: the default
    "sliding_window": NO_COUNT,  # null: none
    **{key: [*NO_COUNT, None] for key in EXPERT_COUNTS},
    "norm_topk_prob": NO_FLAG,
    "decoder_sparse_step": [*NO_COUNT, None, 2],  # 2: experts in each second layer
    "mlp_only_layers": [*WORDS, [2], {}, {"a": 1}, True, 0, 1.5],
    **{key: NO_SHARE for key in SHARES},
    **{key: [*NO_POSITIVE, 1, 2.0] for key in ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon")},
    **{key: [*NO_POSITIVE, 1, 10000.5] for key in ("rope_theta", "rotary_emb_base")},
    "initializer_range": NO_POSITIVE,
    "rotary_pct": [*NO_POSITIVE, 1.5, 0.4],  # 0.4 of four channels is one
    **{key: NO_FLAG for key in ("tie_word_embeddings", "mlp_bias")},
    **{key: [*NEVER, None, -1, 1.5] for key in ONE_VALUE},  # 0 is false
    **{key: [*NEVER, None, True, 0, "relu"] for key in ("hidden_act", "activation_function")},
    **{key: NO_ROPE for key in ("rope_scaling", "rope_parameters")},
    "model_type": [*NEVER, None, True, 0, "deepseek_v3"],
}
NO_MATTER = {"architectures", "torch_dtype", "bos_token_id", "eos_token_id"}


def config_for(family: str) -> dict:
    return config_of(model_args(saved(**FAMILY_CHANGES[family])))


@pytest.fixture(params=FAMILY_CHANGES)
def family(request) -> str:
    return request.param


def refusal(capsys, *words: str) -> str:
    """The command's error line; the exit code is 2."""
    with pytest.raises(SystemExit) as end:
        cli.main(["convert", *words])
    said = capsys.readouterr()
    assert end.value.code == 2 and said.err.count("\n") == 1 and said.out == "", said.err
    line = said.err.removeprefix("megatron_fp8: ").rstrip("\n")
    assert line.isprintable() and len(line) < 600
    return line


def test_every_key_is_mutated(family):
    assert config_for(family).keys() - NO_MATTER <= NONSENSE.keys()


def test_null_is_absent(family):
    """A config.json in the form that transformers writes."""
    config = config_for(family)
    for key in config.keys() & {"attention_dropout", "attention_bias", "tie_word_embeddings", "initializer_range"}:
        assert vars(args_of({**config, key: None})) == vars(args_of({k: v for k, v in config.items() if k != key}))


def test_seeded_mutations_of_config_json_are_refused(family, tmp_path, capsys, monkeypatch):
    """200 per family: nonsense for a key, or a required key left out; the line names the key."""
    monkeypatch.setattr(convert, "Weights", None)  # no weights are read
    (tmp_path / "hf").mkdir()
    file, config = tmp_path / "hf/config.json", config_for(family)
    roped = {"rope_parameters": None} if family != "gpt2" else {}
    keys = sorted((config.keys() | roped.keys()) - NO_MATTER)
    tried = set()
    for seed in range(SEEDS):
        rng = random.Random(f"{family} {seed}")
        key = rng.choice(keys)
        value = rng.choice([one for one in NONSENSE[key] if one is not None or key in REQUIRED])  # null means absent
        long = isinstance(value, int) and abs(value) > 10**4000  # Python would not write it
        text = json.dumps(config | {key: "LONG" if long else value})
        file.write_text(text.replace('"LONG"', f"1{'0' * 5000}"))
        line = refusal(capsys, "to-megatron", str(tmp_path / "hf"), str(tmp_path / "out"))
        bad_json = long or value == "\ud800"
        assert line.startswith(f"{file}: damaged, or not JSON" if bad_json else f"{file}: "), line
        assert bad_json or key in line or key.startswith("rope_") or key == "rotary_pct", (key, value, line)
        tried.add(key)
    assert tried == set(keys) and not (tmp_path / "out").exists()
    for key in config.keys() & (REQUIRED | REQUIRED_OF.get(family, set())):
        file.write_text(json.dumps({name: config[name] for name in config if name != key}))
        line = refusal(capsys, "to-megatron", str(tmp_path / "hf"), str(tmp_path / "out"))
        assert line.startswith(f"{file}: {key} "), line


@pytest.mark.parametrize("seeds", [50, pytest.param(SEEDS, marks=pytest.mark.slow)])
def test_seeded_damage_of_the_text_is_never_a_traceback(family, seeds, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(convert, "_write_megatron", lambda *given: None)
    write_folder(tmp_path / "hf", model_args(saved(**FAMILY_CHANGES[family])))
    file = tmp_path / "hf/config.json"
    whole, codes = file.read_bytes(), []
    for seed in range(seeds):
        rng = random.Random(f"{family} {seed}")
        text = bytearray(whole)
        for _ in range(rng.choice([1, 1, 3, 20])):
            at = rng.randrange(len(text))
            text[at : at + rng.choice([0, 1, 1, 8])] = rng.choice([b"", b"\0", b"9", b"\xff", b"[", b"-", b'"', b"e9"])
        file.write_bytes(text)
        try:
            codes.append(cli.main(["convert", "to-megatron", str(tmp_path / "hf"), str(tmp_path / "out")]))
        except SystemExit as end:
            codes.append(end.code)
            said = capsys.readouterr().err
            assert said.count("\n") == 1 and said[:-1].isprintable()
    assert set(codes) <= {0, 2} and codes.count(2) > seeds / 2


@pytest.mark.parametrize(
    ("family", "changes", "found"),
    [
        ("llama", {"attention_dropout": 0}, {"attention_dropout": 0.0}),
        ("llama", {"num_key_value_heads": None, "head_dim": None}, {"num_query_groups": 6, "kv_channels": 4}),
        ("llama", {"rope_theta": 10**6, "tie_word_embeddings": True}, {"rotary_base": 10**6}),
        ("llama", {"max_position_embeddings": 10**7, "rms_norm_eps": 1e-12}, {"layernorm_epsilon": 1e-12}),
        ("llama", {"num_labels": "x", "sliding_window": -1}, {}),  # keys that convert ignores
        ("gpt_neox", {"rotary_pct": 1, "hidden_act": "gelu"}, {"rotary_percent": 1.0, "bias_gelu_fusion": False}),
        ("gpt_neox", {"rope_parameters": {"partial_rotary_factor": 1.0}}, {"rotary_percent": 1.0}),
        ("gpt2", {"n_inner": None, "resid_pdrop": 0.5}, {"ffn_hidden_size": 96, "hidden_dropout": 0.5}),
    ],
)
def test_sound_values_are_taken(family, changes, found):
    args = args_of(config_for(family) | changes)
    assert {name: getattr(args, name) for name in found} == found


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("llama", {"num_key_value_heads": 4}, "num_key_value_heads 4 does not divide num_attention_heads 6"),
        ("llama", {"num_attention_heads": 7, "head_dim": None}, "num_attention_heads 7 does not divide hidden_size 24"),
        ("llama", {"head_dim": 3}, "would rotate 3 of a head's 3 channels"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ("gpt_neox", {"num_attention_heads": 5}, "num_attention_heads 5 does not divide hidden_size 24"),
        ("gpt2", {"n_head": 48}, "n_head 48 does not divide n_embd 24"),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(family, changes, said):
    with pytest.raises(UserError, match=said):
        args_of(config_for(family) | changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_layers": "2; touch PROOF"}, 'CKPT: num_layers "2; touch PROOF": it should be a valid integer'),
        ({"hidden_size": -1}, "CKPT: hidden_size -1: it should be greater than or equal to 1"),
        ({"attention_dropout": None}, "CKPT: attention_dropout is missing from its arguments; save it with"),
        ({"rotary_base": math.nan}, "CKPT: rotary_base NaN: it should be a finite number"),
        ({"swiglu": 1}, "CKPT: swiglu 1: it should be a valid boolean"),
    ],
)
def test_a_checkpoints_arguments_are_checked_too(changes, said):
    with pytest.raises(UserError) as refused:
        model_args(saved(**changes), None, "CKPT")
    assert str(refused.value).startswith(said)


# ---- what is printed for a shell


def test_what_is_printed_is_quoted(tmp_path, capsys):
    args = model_args(saved())
    args.normalization = "x;touch PROOF $(touch PROOF) 'y'"
    words = shlex.split(flags_of(args))
    assert words[words.index("--normalization") + 1] == args.normalization
    write_folder(tmp_path / "hf", model_args(saved()))
    out = tmp_path / "a folder;touch PROOF `touch PROOF` 'x'"
    assert cli.main(["convert", "to-megatron", str(tmp_path / "hf"), str(out)]) == 0
    command = capsys.readouterr().out.partition("start Megatron with ")[2]
    shell = subprocess.run(["sh", "-c", f"printf '%s\\n' {command}"], cwd=tmp_path, capture_output=True, text=True)
    given = shell.stdout.splitlines()
    assert given[:4] == ["--load", str(out), "--num-layers", "2"] and "--norm-epsilon" in given
    assert not list(tmp_path.rglob("PROOF"))


def test_a_folder_that_cannot_be_made_is_said(tmp_path, capsys):
    write_folder(tmp_path / "hf", model_args(saved()))
    in_a_file, not_utf_8 = str(tmp_path / "hf/config.json/x"), f"{tmp_path}/x" + os.fsdecode(b"\xff")
    said = f"{in_a_file}: Not a directory; name a new or an empty folder"
    assert refusal(capsys, "to-megatron", str(tmp_path / "hf"), in_a_file) == said
    assert ": not UTF-8 text" in refusal(capsys, "to-megatron", str(tmp_path / "hf"), not_utf_8)


# ---- files that are no files, and files that lie

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def header(content: dict | bytes, data: bytes = bytes(64), length: int | None = None) -> bytes:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def one(shape=(4, 4), dtype="F32", offsets=(0, 64)) -> dict:
    return {"x": {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}}


LIES = {
    "empty": b"",
    "too long a header": header(one(), length=2**40),
    "a header beyond the end": header(one(), length=2**20),
    "no JSON": header(b"{nothing"),
    "not UTF-8": header(b"\xff\xfe" * 8),
    "a list": header(b"[1, 2]"),
    "deep": header(b"[" * 10**5),
    "beyond the end": header(one((8, 8), offsets=(0, 256))),
    "backwards": header(one(offsets=(64, 0))),
    "negative offsets": header(one(offsets=(-64, 0))),
    "a hole": header(one(offsets=(0, 32))),
    "a negative size": header(one((-4, -4))),
    "too large a size": header(one((2**62, 2**62))),
    "a word for a size": header({"x": {"dtype": "F32", "shape": "44", "data_offsets": [0, 64]}}),
    "an unknown type": header(one(dtype="F31")),
    "no type": header({"x": {"shape": [4, 4], "data_offsets": [0, 64]}}),
    "overlapping": header(one() | {"y": one()["x"]}),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_header_that_lies_is_refused(lie, tmp_path, capsys):
    write_folder(tmp_path / "hf", model_args(saved()))
    (tmp_path / "hf/model.safetensors").write_bytes(lie)
    line = refusal(capsys, "to-megatron", str(tmp_path / "hf"), str(tmp_path / "out"))
    assert line.startswith(f"{tmp_path}/hf/model.safetensors: damaged, or not a safetensors file: ")


def with_tensor(name: str, tensor: torch.Tensor):
    def change(hf):
        tensors = folder.Weights(hf)
        save_file({key: tensors.get(key) for key in tensors._files} | {name: tensor}, hf / "model.safetensors")

    return change


def replaced(name: str, make):
    """Move the file aside and let `make` make another thing in its place."""

    def change(hf):
        (hf / name).rename(hf / f"aside-{name}") if (hf / name).exists() else None
        make(hf / name)

    return change


def sparse(path):
    with path.open("wb") as file:
        file.truncate(2**36)


def index(weight_map, *files: str):
    """An index instead of model.safetensors, with empty files beside it."""

    def change(hf):
        (hf / "model.safetensors").unlink()
        (hf / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        for file in files:
            save_file({"x": torch.ones(1)}, hf / file)

    return change


def two_files(hf):
    (hf / "model.safetensors").rename(hf / "model-00001-of-00002.safetensors")
    save_file({Q_PROJ: torch.ones(24, 24)}, hf / "model-00002-of-00002.safetensors")


HOSTILE = {
    "no dimension": (with_tensor(Q_PROJ, torch.tensor(1.0)), f"{Q_PROJ} has shape (), but"),
    "one dimension": (with_tensor(Q_PROJ, torch.ones(576)), f"{Q_PROJ} has shape (576,), but"),
    "no element": (with_tensor(Q_PROJ, torch.ones(0, 24)), f"{Q_PROJ} has shape (0, 24), but"),
    "booleans": (with_tensor(Q_PROJ, torch.ones(24, 24, dtype=torch.bool)), f"{Q_PROJ} is BOOL, which convert"),
    "odd name": (with_tensor("a\nb\x1b[31m", torch.ones(1)), r'"a\nb\u001b[31m" has no place in the Megatron'),
    "a FIFO of weights": (replaced("model.safetensors", os.mkfifo), "model.safetensors: not a regular file"),
    "a FIFO of words": (replaced("config.json", os.mkfifo), "config.json: not a regular file"),
    "a FIFO of an index": (
        lambda hf: ((hf / "model.safetensors").unlink(), os.mkfifo(hf / "model.safetensors.index.json")),
        "index.json: not a regular file",
    ),
    "a folder": (replaced("config.json", os.mkdir), "config.json: not a regular file"),
    "a device": (replaced("config.json", lambda path: path.symlink_to("/dev/zero")), "config.json: not a regular file"),
    "a lost link": (replaced("model.safetensors", lambda path: path.symlink_to("gone")), "No such file or directory"),
    "a link to itself": (replaced("config.json", lambda path: path.symlink_to(path)), "Too many levels of symbolic"),
    "huge": (replaced("config.json", sparse), "config.json: 68,719,476,736 bytes of JSON; at most 67,108,864 are read"),
    "a list": (replaced("config.json", lambda path: path.write_text("[1]")), "config.json: not a JSON object"),
    "deep": (replaced("config.json", lambda path: path.write_text("[" * 10**5)), "recursion limit exceeded"),
    "not UTF-8": (replaced("config.json", lambda path: path.write_bytes(b'{"\xff": 1}')), "config.json: damaged"),
    "no weights": (lambda hf: (hf / "model.safetensors").unlink(), "no model*.safetensors there"),
    "a tensor twice": (two_files, f"model-00002-of-00002.safetensors: {Q_PROJ} is in another file too"),
    "an index that leads out": (index({"x": "../x.safetensors"}), 'weight_map.x "../x.safetensors": '),
    "an absolute index": (index({"x": "/etc/x.safetensors"}), 'weight_map.x "/etc/x.safetensors": '),
    "an index of no file": (index({"x": "passwd"}), 'weight_map.x "passwd": '),
    "an index of numbers": (index({"x": 5}), "weight_map.x 5: it should be a valid string"),
    "an index of nothing": (index(None), "weight_map null: it should be a valid dictionary"),
    "an index of what is gone": (index({"x": "b.safetensors"}), "b.safetensors: No such file or directory"),
    "an index that lies": (index({"y": "a.safetensors"}, "a.safetensors"), "a.safetensors: lacks y, which model.safe"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "said"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_folder_is_refused_in_one_line(change, said, tmp_path, capsys):
    write_folder(tmp_path / "hf", model_args(saved()))
    change(tmp_path / "hf")
    line = refusal(capsys, "to-megatron", str(tmp_path / "hf"), str(tmp_path / "out"))
    assert line.startswith(f"{tmp_path}/hf") and said in line, line
    assert not (tmp_path / "out").exists()


def test_links_to_another_folder_are_read(tmp_path):
    """As in Hugging Face's cache: snapshots/REVISION/model.safetensors links to blobs/HASH."""
    tensors = write_folder(tmp_path / "blobs", model_args(saved()))
    (tmp_path / "hf").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "hf" / name).symlink_to(f"../blobs/{name}")
    weights = folder.Weights(tmp_path / "hf")
    assert all(torch.equal(weights.get(name), tensor) for name, tensor in tensors.items())


def test_a_whole_file_counts_before_what_was_left_of_others(tmp_path):
    """As in transformers; else the last file's tensor would win."""
    tensors = write_folder(tmp_path / "hf", model_args(saved()))
    save_file({Q_PROJ: torch.ones(24, 24)}, tmp_path / "hf/model-00001-of-00009.safetensors")
    assert torch.equal(folder.Weights(tmp_path / "hf").get(Q_PROJ), tensors[Q_PROJ])


# ---- trackers


@pytest.mark.parametrize("written", [b"\xc2\xb2", b"\xff\xfe", b"9" * 5000, b"x", b"../../etc", b"", b"-1", b"7 8"])
def test_a_tracker_without_an_iteration_is_refused(written, tmp_path, capsys):
    (tmp_path / "ckpt").mkdir()
    tracker = tmp_path / "ckpt/latest_checkpointed_iteration.txt"
    tracker.write_bytes(written)
    line = refusal(capsys, "to-hf", str(tmp_path / "ckpt"), str(tmp_path / "out"))
    assert line.startswith(str(tracker)) and "; name " in line
