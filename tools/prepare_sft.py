"""Pack conversations: several in a line of the file that Megatron's --sft reads, as many as a sample holds.

    python tools/prepare_sft.py chat.jsonl --output packed.jsonl --seq-length 4096 --tokenizer-model FOLDER

A line of the input is one conversation, {"messages": [{"role": "user", "content": "..."}, ...]}. Megatron makes a
sample of a line, and pads it; it finds conversations in one by their system messages. So each has to begin with one:
--system says which, where there is none.

Each goes into the first of the last 64 open lines that has room. What is longer than a sample is left alone in its
line, and cut by Megatron. Tokens are counted with the chat template of the Hugging Face tokenizer in FOLDER, or
without --tokenizer-model as bytes, and 8 more a message: more than most tokenizers make, so that lines are less full.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

OPEN = 64
Conversation = list[dict[str, str]]


def conversations(path: Path, system: str | None) -> Iterator[Conversation]:
    """The conversations of a file. Raises ValueError for a line that is none, or that needs a system message."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                messages = json.loads(line)["messages"]
                roles = [message["role"] for message in messages if isinstance(message["content"], str)]
            except (ValueError, KeyError, TypeError):
                messages, roles = [], []
            if not roles or len(roles) != len(messages):
                raise ValueError(f'{path}:{number}: no {{"messages": [{{"role": ..., "content": ...}}, ...]}}')
            if "system" in roles[1:]:
                raise ValueError(f"{path}:{number}: a system message after the first, where a conversation would begin")
            if roles[0] != "system":
                if system is None:
                    raise ValueError(f"{path}:{number}: does not begin with a system message; give one, --system TEXT")
                messages = [{"role": "system", "content": system}, *messages]
            yield messages


def pack(found: Iterable[Conversation], count: Callable[[Conversation], int], length: int) -> list[list[Conversation]]:
    """Lines of whole conversations, of at most `length` tokens but for single ones that are longer."""
    lines: list[list[Conversation]] = []
    room: dict[int, int] = {}  # of open lines, the oldest first
    for conversation in found:
        tokens = count(conversation)
        at = next((line for line, left in room.items() if left >= tokens), None)
        if at is None:
            at = len(lines)
            lines.append([])
            room[at] = length
            if len(room) > OPEN:
                del room[next(iter(room))]
        lines[at].append(conversation)
        room[at] -= tokens
    return lines


def counter(folder: str | None) -> Callable[[Conversation], int]:
    """Counts the tokens of a conversation. Raises ValueError where the tokenizer cannot be had."""
    if folder is None:
        return lambda messages: sum(len(message["content"].encode()) + 8 for message in messages)
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ValueError(
            "--tokenizer-model: needs the package transformers; install it, or leave the flag out"
        ) from None
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return lambda messages: len(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Pack conversations for Megatron's --sft.")
    parser.add_argument("inputs", nargs="+", type=Path, help="files of lines of JSON")
    parser.add_argument("--output", required=True, type=Path, help="the file to write")
    parser.add_argument("--seq-length", required=True, type=int, help="tokens of a sample, as the run has it")
    parser.add_argument("--tokenizer-model", help="folder of a Hugging Face tokenizer (default: count bytes)")
    parser.add_argument("--system", help="the system message of conversations without one")
    args = parser.parse_args(argv)
    try:
        count = counter(args.tokenizer_model)
        found = [messages for path in args.inputs for messages in conversations(path, args.system)]
        lines = pack(found, count, args.seq_length)
        args.output.parent.mkdir(parents=True, exist_ok=True)
        with args.output.open("w", encoding="utf-8") as file:
            for line in lines:
                messages = [message for conversation in line for message in conversation]
                file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
    except (ValueError, OSError) as error:
        print(f"prepare_sft: {error}", file=sys.stderr)
        sys.exit(2)
    tokens = sum(min(args.seq_length, sum(map(count, line))) for line in lines)
    filled = 100 * tokens / (max(1, len(lines)) * args.seq_length)
    print(f"{len(found):,} conversations in {len(lines):,} lines of {args.seq_length:,} tokens, {filled:.0f} % filled")
    print(f"Megatron's flags for it: --sft --data-path {args.output} --seq-length {args.seq_length}")


if __name__ == "__main__":
    main()
