"""Megatron's dataset of conversations (--sft), whose mistakes in a file are one line that names it.

A line of the file is {"messages": [{"role": ..., "content": ...}, ...]}. Samples are stock's, bit for bit.
"""

from typing import Any

import torch
from megatron.training.datasets.sft_dataset import SFTDataset
from megatron.training.global_vars import get_args

from ..errors import UserError


def read_lines(path: str, config: Any) -> Any:
    """The lines of a file of JSON, by number. Raises UserError if there are none, or they cannot be read."""
    try:
        lines = SFTDataset.build_low_level_dataset(path, config).dataset
    except ImportError:
        raise
    except Exception as error:  # the package `datasets` raises errors of its own, of Arrow, and of the system
        reason = str(error.__cause__ or error).partition("\n")[0]
        raise UserError(f"--data-path {path}: cannot be read as lines of JSON: {reason}") from error
    if not len(lines):
        raise UserError(f"--data-path {path}: the file is empty; give one with a sample in each line")
    return lines


def are_messages(found: Any) -> bool:
    """Whether a value read from a file is a list of messages that each have a role, and a content or calls of tools."""

    def is_message(value: Any) -> bool:
        said = isinstance(value, dict) and isinstance(value.get("role"), str)
        return said and (value.get("content") is not None or bool(value.get("tool_calls")))

    return isinstance(found, list) and bool(found) and all(map(is_message, found))


def check_tokens(tokens: torch.Tensor, path: str, index: int) -> None:
    """Raise UserError for a token that the embedding does not have: on a GPU it would be an error without a name."""
    largest, size = int(tokens.max()), get_args().padded_vocab_size
    if largest >= size:
        raise UserError(
            f"--data-path {path}: sample {index} has token {largest}, and the model has {size}: raise --vocab-size, or "
            "give the tokenizer of the model's checkpoint"
        )


class ConversationDataset(SFTDataset):
    """Megatron's SFT dataset."""

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: Any) -> Any:
        return _Conversations(dataset_path, config)

    def __getitem__(self, idx: int) -> dict[str, Any]:
        sample = super().__getitem__(idx)
        check_tokens(sample["tokens"], self.dataset_path, int(self.indices[idx % len(self.indices)]))
        return sample


class _Conversations:
    """The messages of each line of a file."""

    def __init__(self, path: str, config: Any):
        self._path, self._lines = path, read_lines(path, config)

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> list[dict[str, str]]:
        line = self._lines[index]
        messages: Any = line.get("messages") if isinstance(line, dict) else None
        if not are_messages(messages):
            raise UserError(
                f'--data-path {self._path}: sample {index} is not {{"messages": [{{"role": "...", "content": "..."}}, '
                "...]}; correct that line"
            )
        return messages
