"""tools/prepare_sft.py packs each conversation once and whole; only a long conversation's line exceeds a sample."""

import json
import random

import prepare_sft
import pytest


def conversation(number: int, size: int) -> list[dict]:
    asked = {"role": "user", "content": f"question {number} é"}
    return [{"role": "system", "content": "be brief"}, asked, {"role": "assistant", "content": "a" * size}]


def write(path, found) -> str:
    path.write_text("".join(json.dumps({"messages": one}) + "\n" for one in found))
    return str(path)


def split(line: str) -> list[list[dict]]:
    """The conversations in a line, found as in Megatron: each begins with a system message."""
    found = []
    for message in json.loads(line)["messages"]:
        if message["role"] == "system":
            found.append([])
        found[-1].append(message)
    return found


def test_all_are_there_once_and_fit(tmp_path, capsys):
    sizes = random.Random().choices(range(1, 150), k=300)
    given = [conversation(i, size) for i, size in enumerate(sizes)] + [conversation(300, 900)]
    source = write(tmp_path / "chat.jsonl", given)
    prepare_sft.main([source, "--output", str(tmp_path / "out/packed.jsonl"), "--seq-length", "400"])
    count = prepare_sft.counter(None)
    lines = [split(line) for line in (tmp_path / "out/packed.jsonl").read_text().splitlines()]
    assert sorted(map(str, given)) == sorted(str(one) for line in lines for one in line)
    assert all(sum(map(count, line)) <= 400 or len(line) == 1 for line in lines)
    tokens = sum(map(count, given[:-1]))
    assert len(lines) - 1 < 1.15 * tokens / 400 + 1  # well packed: first fit leaves little room
    said = capsys.readouterr().out
    assert f"301 conversations in {len(lines)} lines" in said and "--sft --data-path" in said


def test_a_system_message_is_added_where_there_is_none(tmp_path):
    source = write(tmp_path / "chat.jsonl", [conversation(1, 5)[1:], conversation(2, 5)])
    prepare_sft.main([source, "--output", str(tmp_path / "o"), "--seq-length", "400", "--system", "hi"])
    (line,) = (tmp_path / "o").read_text().splitlines()
    assert [one[0]["content"] for one in split(line)] == ["hi", "be brief"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{}", ":1: not {"),
        ("no json", ":1: not {"),
        ('{"messages": []}', ":1: not {"),
        ('{"messages": [{"role": "user", "content": 3}]}', ":1: not {"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "--system TEXT"),
        (json.dumps({"messages": conversation(1, 1) * 2}), "a second system message"),
    ],
)
def test_what_cannot_be_used_is_one_line(line, words, tmp_path, capsys):
    source = tmp_path / "chat.jsonl"
    source.write_text(line + "\n")
    with pytest.raises(SystemExit) as ended:
        prepare_sft.main([str(source), "--output", str(tmp_path / "o"), "--seq-length", "400"])
    printed = capsys.readouterr().err
    assert ended.value.code == 2 and words in printed and printed.count("\n") == 1


def test_tokens_are_a_tokenizers_where_there_is_one(monkeypatch):
    class Transformers:
        class AutoTokenizer:
            @staticmethod
            def from_pretrained(folder):
                return Transformers.AutoTokenizer()

            def apply_chat_template(self, messages, tokenize, return_dict):
                return [0] * (7 * len(messages))

    monkeypatch.setitem(__import__("sys").modules, "transformers", Transformers)
    assert prepare_sft.counter("folder")(conversation(1, 5)) == 21
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ValueError, match="needs the package transformers"):
        prepare_sft.counter("folder")
