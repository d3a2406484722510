"""Pack conversations for Megatron's --sft: each line of the output has as many as fit into a sample.

    python tools/prepare_sft.py chat.jsonl --output packed.jsonl --seq-length 4096 --tokenizer-model FOLDER

A line of the input is one conversation, {"messages": [{"role": "user", "content": "..."}, ...]}. Megatron makes one
padded sample from a line, and finds the conversations in it by their system messages. So each conversation must begin
with a system message; --system gives one to those that have none.

A conversation goes into the first of the last 64 open lines that has room. One that is longer than a sample gets its
own line, and Megatron truncates it. Tokens are counted with the chat template of the Hugging Face tokenizer in FOLDER;
without --tokenizer-model, as bytes plus 8 per message, more than most tokenizers make, so lines are less full.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

OPEN = 64
Conversation = list[dict[str, str]]


def conversations(path: Path, system: str | None) -> Iterator[Conversation]:
    """The conversations in a file. Raises ValueError for a line of another form, or one that needs a system message."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                messages = json.loads(line)["messages"]
                roles = [message["role"] for message in messages if isinstance(message["content"], str)]
            except (ValueError, KeyError, TypeError):
                messages, roles = [], []
            if not roles or len(roles) != len(messages):
                raise ValueError(f'{path}:{number}: not {{"messages": [{{"role": ..., "content": ...}}, ...]}}')
            if "system" in roles[1:]:
                raise ValueError(f"{path}:{number}: a second system message, which would begin another conversation")
            if roles[0] != "system":
                if system is None:
                    raise ValueError(f"{path}:{number}: does not begin with a system message; add --system TEXT")
                messages = [{"role": "system", "content": system}, *messages]
            yield messages


def pack[T](found: Iterable[T], count: Callable[[T], int], length: int) -> list[list[T]]:
    """Lines of whole conversations, each of at most `length` tokens unless a single conversation is longer."""
    lines: list[list[T]] = []
    room: dict[int, int] = {}  # {open line: tokens left}, the oldest first
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
    """A function that counts a conversation's tokens. Raises ValueError if transformers is not installed."""
    if folder is None:
        return lambda messages: sum(len(message["content"].encode()) + 8 for message in messages)
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ValueError(
            "--tokenizer-model: needs the package transformers; install it, or remove the flag"
        ) from None
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return lambda messages: len(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Pack conversations for Megatron's --sft.")
    parser.add_argument("inputs", nargs="+", type=Path, help="JSONL files")
    parser.add_argument("--output", required=True, type=Path, help="the file to write")
    parser.add_argument("--seq-length", required=True, type=int, help="tokens of a sample: the run's --seq-length")
    parser.add_argument("--tokenizer-model", help="folder of a Hugging Face tokenizer (default: count bytes)")
    parser.add_argument("--system", help="the system message for conversations without one")
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
