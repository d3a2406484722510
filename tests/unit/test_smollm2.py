"""benchmarks/smollm2.py: its data, the model it carries, what it makes of runs; and all of it on a tiny model."""

import ast
import csv
import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hf_models import write_llama
from launch import ROOT
from megatron_runs import start_forked
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(ROOT / "benchmarks"))
import carried_model
import function_pairs
import smollm2

BODY = '''        """Says nothing."""
        if a < b and not c:
            return f(a, b, *rest) + 1
        é = 9 == [a - 3, True]
        return [x for x in é if x >= 10]'''


def test_each_mistake_changes_one_place():
    found = set(function_pairs.mutations(BODY))
    lines = BODY.splitlines()
    others = {
        1: ["        if a > b and not c:", "        if a < b or not c:"],
        2: ["            return f(b, a, *rest) + 1", "            return f(a, b, *rest) - 1",
            "            return f(a, b, *rest) + 0", "            return f(a, b, *rest) + 2"],
        3: ["        é = 9 != [a - 3, True]", "        é = 8 == [a - 3, True]", "        é = 9 == [a + 3, True]",
            "        é = 9 == [a - 2, True]", "        é = 9 == [a - 4, True]", "        é = 9 == [a - 3, False]"],
        4: ["        return [x for x in é if x <= 10]"],
    }  # fmt: skip
    assert found == {"\n".join([*lines[:i], line, *lines[i + 1 :]]) for i, choice in others.items() for line in choice}


def test_functions_of_files(tmp_path):
    """Signature and docstring are the prompt; a body of one line, and one beside its `def`, are left out."""
    (tmp_path / "pkg" / "test").mkdir(parents=True)
    text = 'class C:\n    def f(self,\n          a):\n        """What f does."""\n        b = a\n        return b\n'
    text += "    def g(self): return 1\n    def h(self):\n        return 2\n"
    (tmp_path / "pkg" / "__init__.py").write_text(text)
    (tmp_path / "pkg" / "test" / "x.py").write_text(text)
    (tmp_path / "broken.py").write_text("def f(:\n")
    (found,) = function_pairs.functions(tmp_path)
    assert (found.module, found.body) == ("pkg", "        b = a\n        return b")
    assert found.prompt == '    def f(self,\n          a):\n        """What f does."""'


@pytest.mark.slow  # reads the whole library; the one above reads files that it writes
def test_the_standard_librarys_functions(tmp_path):
    """Each parses with its body, and with each mistake; a quarter or so is held out, by whole files."""
    found = list(function_pairs.functions())
    assert len(found) > 5000
    share = np.mean([one.held_out for one in found])
    assert 0.15 < share < 0.35
    where = {one.module: one.held_out for one in found}
    assert all(where[one.module] == one.held_out for one in found)
    some = found[:: len(found) // 150]
    for one in some:
        for wrong in function_pairs.mutations(one.body)[:3]:
            assert wrong != one.body
            assert ast.dump(ast.parse("async def f():\n" + wrong)) != ast.dump(ast.parse("async def f():\n" + one.body))
    made = function_pairs.documents(iter(some), smollm2.encoder("bytes"), lambda m, p: (m + p, "!"), 3000)
    pairs = [(c, r) for c, r in zip(made.chosen, made.rejected, strict=True) if len(r)]
    assert len(pairs) > 50 and all(len(c) == len(r) and (c != r).any() and c[-1] == r[-1] for c, r in pairs)
    made.save(tmp_path / "x.npz")
    again = function_pairs.Documents.load(tmp_path / "x.npz")
    for name in ("prompts", "chosen", "rejected"):
        for ids, same in zip(getattr(made, name), getattr(again, name), strict=True):
            assert ids.tolist() == same.tolist()
    assert made.held_out.tolist() == again.held_out.tolist()


def test_lines_have_an_order_of_the_seed():
    parts = [[np.array([i, i + 1]) for i in range(0, 80, 2)] for _ in range(2)]
    wrong = [np.array([7, 7]) if i % 3 else np.array([], dtype=int) for i in range(40)]
    found = function_pairs.Documents(*parts, wrong, np.arange(40) % 4 == 0)
    sft, dpo = (smollm2.lines_of(found, stage, False, 1, 20) for stage in ("sft", "dpo"))
    assert sft == smollm2.lines_of(found, "sft", False, 1, 20) != smollm2.lines_of(found, "sft", False, 2, 20)
    assert sum(map(len, sft)) == 30 and sum(map(len, dpo)) == sum(bool(i % 3 and i % 4) for i in range(40))
    for line in dpo:
        for pair in line:
            assert pair["chosen"][0] == pair["rejected"][0] and pair["rejected"][1]["content"] == "7 7"


def quantized(kind: str, values: np.ndarray) -> np.ndarray:
    """(rows, bytes of a row) of (rows, 32 n) FP32 numbers, in llama.cpp's blocks."""
    blocks = values.reshape(len(values), -1, 32)
    if kind == "Q8_0":
        d = (np.abs(blocks).max(-1, keepdims=True) / 127).astype(np.float16)
        q = np.round(blocks / d.astype(np.float32)).astype(np.int8)
        return np.concatenate([d.view(np.uint8), q.view(np.uint8)], -1).reshape(len(values), -1)
    low = blocks.min(-1, keepdims=True)
    d, m = ((blocks.max(-1, keepdims=True) - low) / 15).astype(np.float16), low.astype(np.float16)
    q = np.clip(np.round((blocks - m.astype(np.float32)) / d.astype(np.float32)), 0, 15).astype(np.uint8)
    halves = q[..., :16] | q[..., 16:] << 4
    return np.concatenate([d.view(np.uint8), m.view(np.uint8), halves], -1).reshape(len(values), -1)


@pytest.mark.parametrize(("kind", "steps"), [("Q4_1", 15), ("Q8_0", 254)])
def test_blocks_hold_their_numbers(kind, steps):
    """Within half a step of a block, and half an ulp of its scales; each in its own place."""
    values = np.random.default_rng().normal(size=(6, 96)).astype(np.float32)
    found = carried_model.unpacked(kind, quantized(kind, values))
    blocks = values.reshape(6, 3, 32)
    spread = 2 * np.abs(blocks).max(-1) if kind == "Q8_0" else np.ptp(blocks, axis=-1)
    bound = spread / steps * 0.51 + np.abs(blocks).max(-1) * 2**-9
    assert (np.abs(found.reshape(blocks.shape) - blocks).max(-1) <= bound).all()


def test_a_model_comes_back_from_its_parts(tmp_path):
    tensors = write_llama(tmp_path / "hf")
    out = tmp_path / "out"
    out.mkdir()
    carried_model.pack_model(tmp_path / "hf", None, out, 3)
    parts = sorted(out.iterdir())
    (parts[0] / "config.json").write_bytes((tmp_path / "hf/config.json").read_bytes())
    with pytest.raises(ValueError, match=r"model\.npz\.part0, model\.npz\.part2; name the folders of all parts"):
        carried_model.unpack_model([parts[0], parts[2]], tmp_path / "less")
    carried_model.unpack_model(parts[::-1], tmp_path / "back")
    found = load_file(tmp_path / "back/model.safetensors")
    assert found.keys() == tensors.keys() and all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_a_ggufs_blocks_are_those_of_the_folder(tmp_path):
    """Of a file that the package gguf writes. Q and K have llama.cpp's order of rows; one other number is noticed."""
    gguf = pytest.importorskip("gguf", reason="needs gguf, which reads the file")
    write_llama(tmp_path / "hf")
    config = json.loads((tmp_path / "hf/config.json").read_text())
    tensors = load_file(tmp_path / "hf/model.safetensors")
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    kinds = gguf.GGMLQuantizationType
    for name, tensor in tensors.items():
        values, theirs = tensor.float().numpy(), carried_model.in_gguf(name)
        if "norm" in name:
            writer.add_tensor(theirs, values)
            continue
        kind = "Q8_0" if "embed" in name else "Q4_1"
        raw = quantized(kind, values)
        tensors[name] = torch.from_numpy(carried_model.unpacked(kind, raw)).bfloat16()
        for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if part in name:
                raw = raw.reshape(config[heads], 2, -1, raw.shape[1]).swapaxes(1, 2).reshape(raw.shape)
        writer.add_tensor(theirs, np.ascontiguousarray(raw), raw_dtype=kinds[kind])
    for what in ("header_to_file", "kv_data_to_file", "tensors_to_file"):
        getattr(writer, f"write_{what}")()
    writer.close()
    save_file(tensors, tmp_path / "hf/model.safetensors")
    (tmp_path / "out").mkdir()
    carried_model.pack_model(tmp_path / "hf", tmp_path / "x.gguf", tmp_path / "out", 1)
    tensors["model.layers.1.self_attn.k_proj.weight"][3, 5] += 1
    save_file(tensors, tmp_path / "hf/model.safetensors")
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.k_proj\.weight has other numbers"):
        carried_model.pack_model(tmp_path / "hf", tmp_path / "x.gguf", tmp_path / "out", 1)


def test_units_share_the_gpus(tmp_path, monkeypatch):
    """Four units run at once, two on each of two GPUs; so do the next four."""
    monkeypatch.setattr(smollm2, "converted", lambda inputs, work: (tmp_path, []))
    monkeypatch.setattr(smollm2, "one_of", lambda *found: None)
    monkeypatch.setattr(function_pairs.Documents, "load", lambda path: None)
    words = f"run --inputs in --work {tmp_path} --csv {tmp_path}/x.csv --jobs 4 --gpus 2"
    runs = smollm2.Runs(smollm2.arguments(words.split()))
    together, places = threading.Barrier(4, timeout=60), []

    def stages(runs, arm, seed, env):
        places.append(env["CUDA_VISIBLE_DEVICES"])
        together.wait()
        if together.wait() == 0:
            assert sorted(places[-4:]) == ["0", "0", "1", "1"]
        together.wait()
        return True

    monkeypatch.setattr(smollm2.Runs, "_stages", stages)
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(runs.unit, ["O3"] * 8, range(8)))
    assert len(places) == 8


def test_a_unit_goes_on_from_the_weights_that_an_earlier_call_has_kept(tmp_path, monkeypatch):
    """SFT is not made again for DPO. What no stage needs any more is deleted."""
    monkeypatch.setattr(smollm2, "converted", lambda inputs, work: (tmp_path / "base", []))
    monkeypatch.setattr(smollm2, "one_of", lambda *found: None)
    monkeypatch.setattr(function_pairs.Documents, "load", lambda path: None)
    monkeypatch.setattr(smollm2.Runs, "_row", lambda runs, *of: dict.fromkeys(smollm2.SAME, "") | {"stage": of[2]})
    made = []

    def run(runs, arm, seed, stage, folder, begin, more, env, *, keep):
        made.append(stage)
        if "--save" in more:
            Path(more[1]).mkdir(parents=True)
            (Path(more[1]) / "latest_checkpointed_iteration.txt").write_text("1")
        runs.rows.append(runs._row(arm, seed, stage))
        return True

    monkeypatch.setattr(smollm2.Runs, "_run", run)
    rows = []
    for until, stages in (("sft judged", ["sft", "sft judged"]), ("judged", ["dpo", "judged"])):
        words = ["run", "--inputs", "in", "--work", f"{tmp_path}/w", "--csv", f"{tmp_path}/x.csv", "--until", until]
        runs = smollm2.Runs(smollm2.arguments(words))
        runs.rows = rows
        assert runs.unit("O1", 1)
        assert made == stages
        made.clear()
    assert [path for path in (tmp_path / "w").rglob("*") if path.is_file()] == []


def test_wilsons_interval():
    """Published values: 95 % of 0 among 10 is 0 to 0.278, of 5 among 10 0.237 to 0.763 (Newcombe's form)."""
    assert smollm2.wilson(0, 10) == pytest.approx((0, 0.2775), abs=1e-3)
    assert smollm2.wilson(5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-3)


def test_figures_and_report():
    log = "\n".join([
        'SHARE {"step": 8, "share": 0.5, "shown": 0.1}', 'HELDOUT {"accuracy": [1.0, 2.0]}',
        'HELDOUT {"accuracy": [30.0, 40.0], "margin": [8.0, 40.0], "kl a token": [4.0, 400.0]}',
        'SHARE {"step": 16, "share": 0.25, "shown": 0.75}', " [x] iteration 1/ 2 | dpo loss: 6.93E-01 | lr: 1 |",
        " [x] iteration 2/ 2 | dpo loss: 5.0E-01 | lr: 1 |",
    ])  # fmt: skip
    found = smollm2.figures(log)
    assert {key: value for key, value in found.items() if value} == {
        "accuracy": "0.750000", "margin": "0.200000", "kl": "0.010000", "counted": "40", "share": "0.2500",
        "shown": "0.7500", "first_loss": "0.693000", "last_loss": "0.500000",
    }  # fmt: skip
    rows = [found | {"arm": "O3", "seed": str(seed), "stage": "dpo", "accuracy": accuracy}
            for seed, accuracy in enumerate(("0.75", "0.85"))]  # fmt: skip
    sft = {"heldout_loss": "1.5", "share": "", "shown": "", "counted": "9"}
    rows.append({"arm": "O3", "seed": "0", "stage": "sft"} | sft)
    (line,) = smollm2.report(rows)[2:]
    assert line.startswith("| O3 | 2 | 1.5000 | - | 0.800 (") and "of 80) | 0.750 0.850 | 0.2000 ± 0.0000 |" in line
    assert line.endswith("| 0.750 ± 0.000 | - | - | - | - |")
    rows.append(rows[2] | {"stage": "sft judged", "heldout_loss": "1.25"})
    rows.append(rows[0] | {"stage": "judged", "accuracy": "0.9", "margin": "0.3", "log_ratio": "2", "counted": "40"})
    (line,) = smollm2.report(rows)[2:]
    assert " | 0.800 (" in line and "| 0.900 (" in line and line.endswith(" of 40) | 0.3000 | 2.0000 | 1.2500 |")


@pytest.mark.slow
def test_a_tiny_model_from_folder_to_table(tmp_path, monkeypatch, capsys):
    """SFT and DPO at O1 and O3, also with masters as loaded or in FP16, judged in BF16. A second call finds all
    finished, one after a lost row makes that."""
    write_llama(tmp_path / "hf")
    monkeypatch.chdir(tmp_path)
    start_forked(monkeypatch)

    def call(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["smollm2.py", *words])
        ended = None
        try:
            smollm2.main()
        except SystemExit as error:
            ended = error.code
        said = capsys.readouterr().out
        assert not ended, (ended, said)
        return said

    source = Path(json.__file__).parent.parent / "email"
    said = call(*f"build --hf hf --out in --parts 2 --most 250 --tokenizer bytes --source {source}".split())
    assert "held out" in said
    arms = ["--arms", "O1", "O1, masters as loaded", "O3", "O3, FP16 master"]
    words = "run --inputs in/0 in/1 --work w --csv x.csv --seeds 5 --steps 17 --seq 512 --batch 2 --micro-batch 1"
    words += " --sft-lr 1e-4 --dpo-lr 1e-6 --minutes 12"
    run = *words.split(), *arms
    call(*run)
    with (tmp_path / "x.csv").open(newline="") as file:
        rows = {(row["arm"], row["stage"]): row for row in csv.DictReader(file)}
    assert len(rows) == 16 and {row["steps"] for row in rows.values()} == {"17"}
    for arm in arms[1:]:
        sft, dpo = rows[arm, "sft"], rows[arm, "dpo"]
        assert float(sft["last_loss"]) < float(sft["first_loss"]) and 0 < float(sft["heldout_loss"]) < 6
        assert float(dpo["first_loss"]) == pytest.approx(np.log(2), abs=1e-6) and int(dpo["counted"]) > 10
    assert float(rows["O3", "dpo"]["share"]) == pytest.approx(1, abs=0.02)
    assert float(rows["O3, FP16 master", "dpo"]["share"]) < 0.6
    # drawn masters show in the mean (0.75 to 1.08: nine figures of five models, whose weights are new each time);
    # those that begin on a BF16 number are far from the next one, and few reach it (0.05)
    for arm in ("O1", "O3"):
        assert float(rows[arm, "dpo"]["shown"]) == pytest.approx(1, abs=0.4)
    loaded = rows[arms[2], "dpo"]
    assert float(loaded["shown"]) < 0.3 and rows["O1", "sft"]["first_loss"] == rows[arms[2], "sft"]["first_loss"]
    for arm in arms[1:]:  # SFT's weights, without the rounding of their GEMMs
        own, judged = (float(rows[arm, stage]["heldout_loss"]) for stage in ("sft", "sft judged"))
        assert own != judged == pytest.approx(own, rel=0.03)
    for arm in arms[1:]:  # judged against SFT's weights, so not against its own: a log-ratio, on the same pairs
        dpo, judged = rows[arm, "dpo"], rows[arm, "judged"]
        assert judged["counted"] == dpo["counted"] and float(judged["log_ratio"]) > 0 and not judged["first_loss"]
    # in 17 steps such BF16 weights hardly move: most of the log-ratio is FP8's noise, which the judge does not have
    assert float(rows[arms[2], "judged"]["log_ratio"]) < 0.7 * float(loaded["log_ratio"])
    whole = (tmp_path / "x.csv").read_text().splitlines(keepends=True)
    again = call(*run)
    assert "s)" not in again and "| O3 | 1 |" in again and (tmp_path / "x.csv").read_text() == "".join(whole)
    (tmp_path / "x.csv").write_text("".join(whole[:-1]))
    said = call(*run)
    assert "sft: heldout_loss" in said and "judged: accuracy" in said and "O1, seed" not in said
    assert len((tmp_path / "x.csv").read_text().splitlines()) == 17
    scales = ["O3, margin 2", "O3, tensorwise", "O3, BF16 GEMMs"]
    call(*words.split(), *"--until sft --arms".split(), *scales)
    rows = smollm2.read(tmp_path / "x.csv")[16:]
    assert [(row["arm"], row["stage"]) for row in rows] == [(arm, "sft") for arm in scales]
    assert len({row["first_loss"] for row in rows}) == 3  # a step's first micro-batch has no history, and a margin
