"""Tokenise text into a Megatron dataset (.bin and .idx), with a training and a held-out part.

    python tools/prepare_data.py                                    the Python standard library's own source
    python tools/prepare_data.py book.txt notes/ posts.jsonl --output data/mine
    python tools/prepare_data.py posts.jsonl --tokenizer gpt2 --vocab-file vocab.json --merge-file merges.txt

A document is a file (.py, .txt) or a line of a .jsonl file, and ends with an end-of-document token. A hash of its
content decides its part: copies fall into the same part, on every machine and in every order.
"""

import argparse
import hashlib
import json
import os
import shutil
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from gpt2_bpe import Gpt2Bpe

SUFFIXES = (".py", ".txt", ".jsonl")
# Folders that are not the standard library, or contain another kind of text.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests"}
PARTS = ("train", "heldout")


def samples(prefix: str, length: int) -> int:
    """How many samples the dataset at this prefix has, of `length` tokens and the next one each."""
    return (os.stat(f"{prefix}.bin").st_size // 2 - 1) // length  # a token is two bytes


class Bytes:
    """A tokenizer whose tokens are the bytes of UTF-8; 256 ends a document."""

    vocab_size = 257
    eod = 256

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8)


def files(inputs: list[str]) -> Iterator[Path]:
    """The files to read, in a fixed order. Raises ValueError for one that is missing or of another kind."""
    if not inputs:
        root = Path(sysconfig.get_path("stdlib"))
        for path in sorted(root.rglob("*.py")):
            if not SKIPPED_FOLDERS.intersection(path.relative_to(root).parts):
                yield path
    for name in inputs:
        path = Path(name)
        if path.is_dir():
            yield from (p for p in sorted(path.rglob("*")) if p.suffix in SUFFIXES and p.is_file())
        elif not path.is_file():
            raise ValueError(f"{name}: no such file or folder")
        elif path.suffix not in SUFFIXES:
            raise ValueError(f"{name}: not a {', '.join(SUFFIXES)} file")
        else:
            yield path


def documents(path: Path, json_key: str) -> Iterator[str]:
    """The texts in a file. Raises ValueError for a JSONL line without a text under `json_key`."""
    if path.suffix != ".jsonl":
        yield path.read_text(encoding="utf-8", errors="replace")
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            try:
                text = json.loads(line)[json_key]
            except (ValueError, KeyError, TypeError):
                text = None
            if not isinstance(text, str):
                raise ValueError(f"{path}:{number}: no JSON object with a text under --json-key {json_key}")
            yield text


def is_held_out(text: str, fraction: float) -> bool:
    """True for about `fraction` of all texts, by a hash of the text."""
    digest = hashlib.blake2b(text.encode("utf-8", errors="replace"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


def prepare(
    inputs: list[str],
    output: str,
    tokenizer: Bytes | Gpt2Bpe,
    json_key: str = "text",
    held_out: float = 0.05,
) -> dict[str, tuple[int, int]]:
    """Write `output`_train.bin, .idx and `output`_heldout.bin, .idx.

    Returns {"train": (documents, tokens), "heldout": (documents, tokens)}. held_out: the fraction of documents in the
    held-out part; 0: no such part.

    Raises:
        ValueError: an input cannot be used, or a part would have no document.
        OSError: a file cannot be read or written.
    """
    with warnings.catch_warnings(action="ignore"):  # Megatron warns of each missing optional package
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    paths = list(files(inputs))
    os.makedirs(os.path.dirname(output) or ".", exist_ok=True)
    names = PARTS if held_out else PARTS[:1]
    dtype = DType.optimal_dtype(tokenizer.vocab_size)
    builders = {name: IndexedDatasetBuilder(f"{output}_{name}.bin.part", dtype=dtype) for name in names}
    counts = dict.fromkeys(names, (0, 0))
    for path in paths:
        for text in documents(path, json_key):
            if text:
                name = PARTS[is_held_out(text, held_out)]
                tokens = np.append(tokenizer.encode(text), tokenizer.eod)
                builders[name].add_document(tokens, [len(tokens)])
                counts[name] = (counts[name][0] + 1, counts[name][1] + len(tokens))
    for name in names:
        if not counts[name][0]:
            total = sum(n for n, _ in counts.values())
            raise ValueError(
                f"none of {total} documents falls into the {name} part: give more documents (.jsonl has one "
                "per line), or --held-out 0 for no held-out part"
            )
    for name, builder in builders.items():
        builder.finalize(f"{output}_{name}.idx")
        os.replace(f"{output}_{name}.bin.part", f"{output}_{name}.bin")
        # Megatron caches its sample order here under a key that depends on the path but not on the content.
        shutil.rmtree(f"{output}_{name}/cache", ignore_errors=True)
    return counts


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Tokenise text into a Megatron dataset.")
    parser.add_argument("inputs", nargs="*", help="files or folders (default: Python's standard library)")
    parser.add_argument("--output", default="runs/data/stdlib", help="prefix of the files (%(default)s)")
    parser.add_argument("--tokenizer", choices=("bytes", "gpt2"), default="bytes")
    parser.add_argument("--vocab-file", help="GPT-2's vocab.json")
    parser.add_argument("--merge-file", help="GPT-2's merges.txt")
    parser.add_argument("--json-key", default="text", help="the key of the text in a JSONL line (%(default)s)")
    parser.add_argument("--held-out", type=float, default=0.05, help="held-out fraction of documents (%(default)s)")
    args = parser.parse_args(argv)
    try:
        if not 0 <= args.held_out < 1:
            raise ValueError(f"--held-out {args.held_out}: use a fraction from 0 to below 1")
        if args.tokenizer == "gpt2" and not (args.vocab_file and args.merge_file):
            raise ValueError("--tokenizer gpt2 needs --vocab-file and --merge-file")
        tokenizer = Gpt2Bpe(args.vocab_file, args.merge_file) if args.tokenizer == "gpt2" else Bytes()
        counts = prepare(args.inputs, args.output, tokenizer, args.json_key, args.held_out)
    except (ValueError, OSError) as error:
        print(f"prepare_data: {error}", file=sys.stderr)
        sys.exit(2)
    for name, (num_documents, num_tokens) in counts.items():
        files_written = f"{args.output}_{name}.bin, .idx"
        print(f"{name:8}{num_documents:>9,} documents{num_tokens:>15,} tokens  {files_written}")
    flag = {"train": "--train-data-path", "heldout": "--valid-data-path"}
    eod = "" if tokenizer.eod == tokenizer.vocab_size - 1 else f" --null-tokenizer-eod-id {tokenizer.eod}"
    print("Megatron's flags for it:", *(f"{flag[name]} {args.output}_{name}" for name in counts))
    print(f"  --tokenizer-type NullTokenizer --vocab-size {tokenizer.vocab_size}{eod}")


if __name__ == "__main__":
    main()
