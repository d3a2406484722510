"""tools/prepare_data.py: text becomes a Megatron dataset, every token in place; clear errors for bad input."""

import json

import numpy as np
import prepare_data
import pytest
from gpt2_bpe import Gpt2Bpe, _byte_characters
from megatron.core.datasets.indexed_dataset import IndexedDataset

TEXTS = [f"document {i}: " + "word " * (i % 7) + "é\n" for i in range(60)]


def read(prefix) -> list[np.ndarray]:
    """The documents of a dataset."""
    data = IndexedDataset(str(prefix))
    return [data[i].copy() for i in range(len(data))]  # the arrays lie in a file mapping that `data` owns


def as_text(tokens: np.ndarray) -> str:
    assert tokens[-1] == 256 and (tokens[:-1] < 256).all()
    return bytes(tokens[:-1].astype(np.uint8)).decode()


@pytest.fixture
def jsonl(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"body": text}) + "\n" for text in TEXTS))
    return path


def test_bytes_round_trip_and_split(tmp_path, jsonl):
    counts = prepare_data.prepare(
        [str(jsonl)], str(tmp_path / "out/data"), prepare_data.Bytes(), json_key="body", held_out=0.3
    )
    parts = {name: [as_text(d) for d in read(tmp_path / f"out/data_{name}")] for name in ("train", "heldout")}
    assert sorted(parts["train"] + parts["heldout"]) == sorted(TEXTS)
    assert parts["train"] == [t for t in TEXTS if not prepare_data.is_held_out(t, 0.3)]  # in order
    for name, texts in parts.items():
        assert counts[name] == (len(texts), sum(len(t.encode()) + 1 for t in texts))
    assert 8 <= len(parts["heldout"]) <= 28  # binomial(60, 0.3), 3 sigma


def test_the_split_depends_on_the_content_alone(tmp_path):
    held_out = [i for i in range(2000) if prepare_data.is_held_out(f"text {i}", 0.1)]
    assert 150 < len(held_out) < 250
    assert set(held_out) <= {i for i in range(2000) if prepare_data.is_held_out(f"text {i}", 0.2)}
    assert not any(prepare_data.is_held_out(f"text {i}", 0) for i in range(100))


def test_files_and_folders(tmp_path):
    contents = {"b.py": "x = 1\n", "sub/a.txt": "text", "sub/picture.png": "no", "empty.txt": ""}
    for name, text in contents.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(text)
    (tmp_path / "in/latin.txt").write_bytes(b"caf\xe9")
    counts = prepare_data.prepare(
        [str(tmp_path / "in")], str(tmp_path / "data"), prepare_data.Bytes(), held_out=0
    )
    assert list(counts) == ["train"]
    assert [as_text(d) for d in read(tmp_path / "data_train")] == ["x = 1\n", "caf�", "text"]


def test_default_is_the_standard_library():
    paths = list(prepare_data.files([]))
    assert len(paths) > 200
    assert {"argparse.py", "decoder.py"} <= {path.name for path in paths}
    assert not any("site-packages" in path.parts for path in paths)


def test_a_new_data_set_forgets_the_old_sample_order(tmp_path, jsonl):
    stale = tmp_path / "data_train/cache/order.npy"
    stale.parent.mkdir(parents=True)
    stale.touch()
    prepare_data.prepare([str(jsonl)], str(tmp_path / "data"), prepare_data.Bytes(), "body", held_out=0)
    assert not stale.exists()


def test_a_failed_run_leaves_the_old_data_set(tmp_path, jsonl):
    prepare_data.prepare([str(jsonl)], str(tmp_path / "data"), prepare_data.Bytes(), "body", held_out=0)
    jsonl.write_text('{"body": "new"}\n{"title": "no body"}\n')
    with pytest.raises(ValueError, match=r"texts.jsonl:2: .* --json-key body"):
        prepare_data.prepare([str(jsonl)], str(tmp_path / "data"), prepare_data.Bytes(), "body", held_out=0)
    assert [as_text(d) for d in read(tmp_path / "data_train")] == TEXTS


@pytest.fixture
def bpe(tmp_path):
    """A vocabulary with all bytes, four merges, one odd id, and an end-of-text token that is not last."""
    characters = _byte_characters()
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "w")]
    tokens = [*characters, "<|endoftext|>", *("".join(merge) for merge in merges)]
    (tmp_path / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    lines = ["#version: 0.2", *(" ".join(merge) for merge in merges)]
    (tmp_path / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return Gpt2Bpe(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))


def test_bpe_merges_in_the_order_of_the_list(bpe):
    assert bpe.eod == 256 and bpe.vocab_size == 261
    assert bpe.encode("hello world") == [259, ord("o"), 260, *b"orld"]
    assert bpe.encode("shell hel") == [ord("s"), 259, ord(" "), 257, ord("l")]
    assert bpe.encode("\x00é") == [0, *"é".encode()]
    assert bpe.encode("") == []


def test_bpe_cuts_words_as_gpt2_does(bpe):
    cases = {
        "Hello world's  x\n\n  y": ["Hello", " world", "'s", " ", " x", "\n\n ", " y"],
        "x2 3.14!?": ["x", "2", " 3", ".", "14", "!?"],
        "naïve Ⅷ½ 日本_1": ["naïve", " Ⅷ½", " 日本", "_", "1"],
        "tab\t\tend  ": ["tab", "\t", "\t", "end", "  "],
        "\x1c\u2003a": ["\x1c", "\u2003", "a"],
        "we'll I'VE": ["we", "'ll", " I", "'", "VE"],
    }
    for text, words in cases.items():
        assert bpe._pattern.findall(text) == words
        assert "".join(words) == text


def test_bpe_loses_nothing_and_names_bad_files(bpe, tmp_path):
    vocab, merges = tmp_path / "vocab.json", tmp_path / "merges.txt"
    characters = {c: b for b, c in enumerate(_byte_characters())}
    tokens = {i: token for token, i in json.loads(vocab.read_text()).items()}
    text = "".join(map(chr, range(0x600))) + "😀 hello well\n"
    decoded = "".join(tokens[i] for i in bpe.encode(text))
    assert bytes(characters[c] for c in decoded).decode() == text

    with pytest.raises(ValueError, match=r"--merge-file .*vocab.json"):
        Gpt2Bpe(str(vocab), str(vocab))
    with pytest.raises(ValueError, match=r"--vocab-file .*merges.txt"):
        Gpt2Bpe(str(merges), str(merges))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["missing.txt"], "missing.txt: no such file or folder"),
        (["--held-out", "1"], "--held-out 1.0: use a fraction"),
        (["--tokenizer", "gpt2"], "--tokenizer gpt2 needs --vocab-file and --merge-file"),
        (["--tokenizer", "gpt2", "--vocab-file", "no.json", "--merge-file", "no.txt"], "no.json"),
        (["one.txt"], "none of 1 documents falls into the heldout part"),
        (["picture.png"], "picture.png: not a .py, .txt, .jsonl file"),
    ],
)
def test_mistakes_are_one_line(arguments, expected, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.txt").write_text("one document")
    (tmp_path / "picture.png").touch()
    with pytest.raises(SystemExit) as stop:
        prepare_data.main([*arguments, "--output", "out/data"])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("prepare_data: ") and expected in error and error.count("\n") == 1


def test_it_says_what_it_wrote_and_megatrons_flags(tmp_path, jsonl, capsys):
    prepare_data.main(f"{jsonl} --json-key body --held-out 0.3 --output {tmp_path}/d".split())
    text = capsys.readouterr().out
    assert f"--train-data-path {tmp_path}/d_train --valid-data-path {tmp_path}/d_heldout" in text
    assert "--tokenizer-type NullTokenizer --vocab-size 257\n" in text
