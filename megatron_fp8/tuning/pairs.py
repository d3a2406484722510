"""The dataset of preference pairs: each sample is a row of packed documents, chosen and rejected in turn.

A line of the file is one pair, or several pairs that share a sample:

    {"chosen": [{"role": ..., "content": ...}, ...], "rejected": [...]}
    {"pairs": [{"chosen": [...], "rejected": [...]}, ...]}

    tokens   | chosen 1 | rejected 1 | chosen 2 | rejected 2 | padding |      padding belongs to the last document

The tokenizer decides which tokens count (in most formats Megatron's SFTTokenizer masks all but the assistant's). A
masked token has the label -100, and so has the last token of each document, because it predicts nothing.
"""

import json
from typing import Any

import numpy as np
import torch
from megatron.training.datasets.sft_dataset import IGNORE_INDEX, SFTDataset

from ..errors import UserError


class Lines:
    """The lines of a file, parsed when they are asked for."""

    def __init__(self, path: str):
        self._path, self._starts, at = path, [], 0
        with open(path, "rb") as file:
            for line in file:
                if line.strip():
                    self._starts.append(at)
                at += len(line)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> list[dict]:
        """The pairs in a line. Raises UserError for a line of another form."""
        with open(self._path, "rb") as file:
            file.seek(self._starts[index])
            line = file.readline()
        try:
            found = json.loads(line)
            pairs = found.get("pairs") or [found]
            if all(pair["chosen"] and pair["rejected"] for pair in pairs):
                return pairs
        except (ValueError, KeyError, TypeError, AttributeError):
            pass
        raise UserError(
            f'--data-path {self._path}: sample {index} is neither {{"chosen": [messages], "rejected": [messages]}} '
            'nor {"pairs": [...]} of these; correct that line'
        )


class PreferenceDataset(SFTDataset):
    """Megatron's SFT dataset, with pairs of conversations."""

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config) -> Any:
        return Lines(dataset_path)

    def __getitem__(self, idx: int) -> dict[str, torch.Tensor]:
        index = int(self.indices[idx % len(self.indices)])
        tokenizer, length = self.config.tokenizer, self.config.sequence_length
        documents = []
        for pair in self.dataset[index]:
            for name in ("chosen", "rejected"):
                documents.append(
                    tokenizer.tokenize_conversation(pair[name], return_target=True, add_generation_prompt=False)
                )
        sizes = [len(tokens) for tokens, _ in documents]
        if sum(sizes) > length:
            raise UserError(
                f"--data-path {self.dataset_path}: sample {index} has {sum(sizes)} tokens, more than --seq-length "
                f"{length}: shorten it, or raise --seq-length"
            )
        tokens = np.full(length, tokenizer.pad, dtype=np.int64)
        labels = np.full(length, IGNORE_INDEX, dtype=np.int64)
        at = 0
        for ids, targets in documents:
            tokens[at : at + len(ids)] = ids
            labels[at : at + len(ids) - 1] = targets[1:]
            at += len(ids)
        ends = np.cumsum([0, *sizes])
        ends[-1] = length
        positions = np.concatenate([np.arange(size) for size in np.diff(ends)])
        # Padded to one length, as in Megatron, so that samples with different numbers of documents can be stacked.
        padded = np.full(length + 1, length, dtype=np.int32)
        padded[: len(ends)] = ends
        return {
            "tokens": torch.from_numpy(tokens),
            "labels": torch.from_numpy(labels),
            "loss_mask": torch.from_numpy((labels != IGNORE_INDEX).astype(np.float32)),
            "position_ids": torch.from_numpy(positions),
            "cu_seqlens": torch.from_numpy(padded),
            "max_seqlen": torch.tensor(int(np.diff(ends).max()), dtype=torch.int32),
        }
