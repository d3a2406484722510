"""GPT-2's byte-level byte-pair encoding, from its two files and without any package.

A text is first split into words: contractions, runs of letters, of digits or of other characters, each with at most one
space before it, and runs of white space. Within a word each byte is a token at first. Then the pair of neighbours that
comes first in the list of merges becomes one token, and so on until no pair is in the list.

The vocabulary file is JSON, {token: id}; the merges file has a version line, then one pair per line. Both write a byte
as one printable character. Source: Radford et al., 2019, "Language Models are Unsupervised Multitask Learners",
section 2.2, and the two published files.
"""

import json
import re
import sys
import unicodedata
from functools import lru_cache
from itertools import groupby, pairwise
from pathlib import Path

END_OF_TEXT = "<|endoftext|>"
# Unicode's White_Space, the \s of GPT-2's pattern. Python's \s also matches U+001C..U+001F.
_SPACE = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"


def _characters(category: str) -> str:
    """The inside of a regular expression's [...] for all characters whose Unicode category starts with `category`."""
    codes = (c for c in range(sys.maxunicode + 1) if unicodedata.category(chr(c))[0] == category)
    ranges = []
    for _, group in groupby(enumerate(codes), lambda item: item[1] - item[0]):
        run = [code for _, code in group]
        ranges.append(f"\\U{run[0]:08x}-\\U{run[-1]:08x}")
    return "".join(ranges)


def _word_pattern() -> re.Pattern[str]:
    letter, number = _characters("L"), _characters("N")
    return re.compile(
        rf"'s|'t|'re|'ve|'m|'ll|'d| ?[{letter}]+| ?[{number}]+| ?[^{_SPACE}{letter}{number}]+"
        rf"|[{_SPACE}]+(?![^{_SPACE}])|[{_SPACE}]+"
    )


def _byte_characters() -> list[str]:
    """The printable character for each byte: the byte's own, or else the next one from U+0100 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    stand_in = iter(range(256, 512))
    return [chr(b if b in printable else next(stand_in)) for b in range(256)]


class Gpt2Bpe:
    """Encodes text as token ids.

    Args:
        vocab_file: JSON, {token: id}, which contains "<|endoftext|>".
        merges_file: text, one merge "left right" per line, the most frequent first.

    Raises:
        ValueError: a file has the wrong form.
        OSError: a file cannot be read.
    """

    def __init__(self, vocab_file: str, merges_file: str):
        try:
            self._ids: dict[str, int] = json.loads(Path(vocab_file).read_text(encoding="utf-8"))
            self.eod = self._ids[END_OF_TEXT]
        except (ValueError, TypeError, KeyError):
            raise ValueError(
                f"--vocab-file {vocab_file}: not a GPT-2 vocabulary (JSON, token to id, with {END_OF_TEXT})"
            ) from None
        lines = Path(merges_file).read_text(encoding="utf-8").splitlines()
        merges = [tuple(line.split()) for line in lines if line.strip() and not line.startswith("#version")]
        if not merges or any(len(merge) != 2 for merge in merges):
            raise ValueError(f"--merge-file {merges_file}: not a GPT-2 merges file (one pair a line)")
        self.vocab_size = max(self._ids.values()) + 1
        self._rank = {merge: rank for rank, merge in enumerate(merges)}
        self._pattern = _word_pattern()
        self._characters = _byte_characters()
        self._encode_word = lru_cache(maxsize=1 << 18)(self._merge)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without an end-of-text token."""
        return [token for word in self._pattern.findall(text) for token in self._encode_word(word)]

    def _merge(self, word: str) -> list[int]:
        parts = [self._characters[b] for b in word.encode("utf-8", errors="replace")]
        last = len(self._rank)
        while len(parts) > 1:
            pairs = list(pairwise(parts))
            best = min(pairs, key=lambda pair: self._rank.get(pair, last))
            if best not in self._rank:
                break
            merged, i = [], 0
            while i < len(parts):
                joined = tuple(parts[i : i + 2]) == best
                merged.append("".join(best) if joined else parts[i])
                i += 2 if joined else 1
            parts = merged
        return [self._ids[part] for part in parts]
