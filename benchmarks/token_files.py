"""Conversations and preferences whose messages are numbers of tokens, and what reads them without a tokenizer.

Megatron's --sft asks for the packages `datasets` and `transformers`. Here the content of a message is its tokens
("17 4 901"), so that a machine needs neither: `install` puts a reader of JSON lines in the place of the one, and lets
NullTokenizer read conversations in the place of the other. Only the assistant's tokens count.

`conversations` and `pairs` draw random tokens in documents as long as those of chats: lengths are log-normal, and a
line holds as many documents as fit a sample (tools/prepare_sft.py packs them).
"""

import functools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import stamp  # noqa: F401  lets the tools be found

# isort: split
import prepare_sft

IGNORED = -100
SYSTEM, PROMPT, ANSWER = 8, 128, 384  # tokens: of every system message, and the medians of the others
SPREAD = 0.8  # of the logarithms of lengths; the mean is 1.4 medians
FULL = 2048  # below this sample length, documents are shorter in proportion


class Numbers:
    """Draws random messages, the same ones for the same seed."""

    def __init__(self, vocabulary: int, length: int, seed: int):
        self._vocabulary, self._share = vocabulary, min(1.0, length / FULL)
        self._random = np.random.default_rng(seed)

    def tokens(self, median: float, most: int) -> int:
        drawn = self._random.lognormal(np.log(median * self._share), SPREAD)
        return int(np.clip(round(drawn), 1, most))

    def message(self, role: str, tokens: int) -> dict[str, str]:
        return {"role": role, "content": " ".join(map(str, self._random.integers(0, self._vocabulary, tokens)))}

    def document(self, prompt: list[dict[str, str]], median: float, length: int) -> list[dict[str, str]]:
        """A conversation of at most `length` tokens that begins with `prompt`."""
        return [*prompt, self.message("assistant", self.tokens(median, length - size(prompt)))]

    def prompt(self, length: int) -> list[dict[str, str]]:
        system = self.message("system", min(SYSTEM, length // 4))
        return [system, self.message("user", self.tokens(PROMPT, length // 2))]


def size(messages: list[dict[str, str]]) -> int:
    """Tokens of a conversation."""
    return sum(len(message["content"].split()) for message in messages)


def size_of_pair(pair: dict) -> int:
    return size(pair["chosen"]) + size(pair["rejected"])


def conversations(vocabulary: int, length: int, seed: int) -> Iterator[list[dict[str, str]]]:
    """Endless conversations of at most `length` tokens."""
    numbers = Numbers(vocabulary, length, seed)
    while True:
        yield numbers.document(numbers.prompt(length), ANSWER, length)


def pairs(vocabulary: int, length: int, seed: int) -> Iterator[dict]:
    """Endless pairs of two answers to one prompt, of at most `length` tokens together."""
    numbers = Numbers(vocabulary, length, seed)
    while True:
        prompt = numbers.prompt(length // 2)
        yield {name: numbers.document(prompt, ANSWER / 2, length // 2) for name in ("chosen", "rejected")}


def packed[T](documents: Iterator[T], count: Callable[[T], int], length: int, lines: int) -> list[list[T]]:
    """So many lines, each of documents that fit `length` tokens together."""
    found, tokens = [], 0
    while tokens < (lines + prepare_sft.OPEN) * length:  # the lines that are still open at the end are not taken
        found.append(next(documents))
        tokens += count(found[-1])
    return prepare_sft.pack(found, count, length)[:lines]


def write(path: Path, lines: list[list], of_pairs: bool) -> int:
    """Write packed lines as a file of --sft, or of dpo_gpt_fp8.py -> its tokens, without padding."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for line in lines:
            whole = {"pairs": line} if of_pairs else {"messages": [message for one in line for message in one]}
            file.write(json.dumps(whole) + "\n")
    return sum(size_of_pair(one) if of_pairs else size(one) for line in lines for one in line)


def tokenize_conversation(messages, return_target: bool, add_generation_prompt: bool):
    """(tokens, targets), arrays of integers; what is not the assistant's is IGNORED in the latter."""
    parts = [(np.array(message["content"].split(), dtype=np.int64), message["role"]) for message in messages]
    targets = [ids if role == "assistant" else np.full_like(ids, IGNORED) for ids, role in parts]
    return np.concatenate([ids for ids, _ in parts]), np.concatenate(targets)


def install(pad: int, end: int) -> None:
    """Let this process read such files. Call it once the plugin is installed, before a training script is imported.

    pad: the token that fills a sample; it is never learnt, so it must not be `end`, which ends a document.
    """
    import megatron.core.tokenizers.utils.build_tokenizer as tokenizers

    datasets = ModuleType("datasets")
    datasets.load_dataset = lambda kind, data_files, split: list(  # type: ignore[attr-defined]
        map(json.loads, Path(data_files).read_text().splitlines())
    )
    sys.modules["datasets"] = datasets
    stock = tokenizers.build_tokenizer

    @functools.wraps(stock)
    def build_tokenizer(*args, **kwargs):
        tokenizer = stock(*args, **kwargs)
        tokenizer.__class__ = type("Numbers", (type(tokenizer),), {"pad": pad, "eod": end})
        tokenizer.tokenize_conversation = tokenize_conversation
        return tokenizer

    tokenizers.build_tokenizer = build_tokenizer
