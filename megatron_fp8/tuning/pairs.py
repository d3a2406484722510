"""The dataset of preference pairs: each sample is a row of packed documents, chosen and rejected in turn.

A line of the file is one pair, or several pairs that share a sample:

    {"chosen": [{"role": ..., "content": ...}, ...], "rejected": [...]}
    {"pairs": [{"chosen": [...], "rejected": [...]}, ...]}

    tokens   | chosen 1 | rejected 1 | chosen 2 | rejected 2 | padding |      padding belongs to the last document

The tokenizer decides which tokens count (in most formats Megatron's SFTTokenizer masks all but the assistant's). A
masked token has the label -100, and so has the last token of each document, because it predicts nothing. If one answer
of a pair has no token that counts, the pair is not learnt: the other's are masked too.
"""

from typing import Any

import numpy as np
import torch
from megatron.training.datasets.sft_dataset import IGNORE_INDEX, SFTDataset

from ..errors import UserError
from .conversations import are_messages, check_tokens, read_lines
from .score_file import key_of


def pairs_of(line: Any, index: int, path: str) -> list[dict]:
    """The pairs in a line. Raises UserError for a line of another form."""
    try:
        pairs = line.get("pairs") or [line]
        if all(are_messages(pair[name]) for pair in pairs for name in ("chosen", "rejected")):
            return pairs
    except (KeyError, TypeError, AttributeError):
        pass
    raise UserError(
        f'--data-path {path}: sample {index} is neither {{"chosen": [messages], "rejected": [messages]}} '
        'nor {"pairs": [...]} of these, a message being {"role": "...", "content": "..."}; correct that line'
    )


class PreferenceDataset(SFTDataset):
    """Megatron's SFT dataset, with pairs of conversations."""

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config) -> Any:
        return read_lines(dataset_path, config)

    def __getitem__(self, idx: int) -> dict[str, torch.Tensor]:
        return self.sample(int(self.indices[idx % len(self.indices)]))

    def sample(self, index: int) -> dict[str, torch.Tensor]:
        """The sample of a line of the file: Megatron's tensors, and `sample`, what a file of scores knows it by."""
        tokenizer, length = self.config.tokenizer, self.config.sequence_length
        documents, learnt = [], []
        for pair in pairs_of(self.dataset[index], index, self.dataset_path):
            both = [
                tokenizer.tokenize_conversation(pair[name], return_target=True, add_generation_prompt=False)
                for name in ("chosen", "rejected")
            ]
            documents += both
            learnt += [all((targets[1:] != IGNORE_INDEX).any() for _, targets in both)] * 2
        sizes = [len(tokens) for tokens, _ in documents]
        if sum(sizes) > length:
            raise UserError(
                f"--data-path {self.dataset_path}: sample {index} has {sum(sizes)} tokens, more than --seq-length "
                f"{length}: shorten it, or raise --seq-length"
            )
        tokens = np.full(length, tokenizer.pad, dtype=np.int64)
        labels = np.full(length, IGNORE_INDEX, dtype=np.int64)
        at = 0
        for (ids, targets), counts in zip(documents, learnt, strict=True):
            tokens[at : at + len(ids)] = ids
            if counts:
                labels[at : at + len(ids) - 1] = targets[1:]
            at += len(ids)
        ends = np.cumsum([0, *sizes])
        ends[-1] = length
        positions = np.concatenate([np.arange(size) for size in np.diff(ends)])
        # Padded to one length, as in Megatron, so that samples with different numbers of documents can be stacked.
        padded = np.full(length + 1, length, dtype=np.int32)
        padded[: len(ends)] = ends
        check_tokens(torch.from_numpy(tokens), self.dataset_path, index)
        return {
            "tokens": torch.from_numpy(tokens),
            "labels": torch.from_numpy(labels),
            "loss_mask": torch.from_numpy((labels != IGNORE_INDEX).astype(np.float32)),
            "position_ids": torch.from_numpy(positions),
            "cu_seqlens": torch.from_numpy(padded),
            "max_seqlen": torch.tensor(int(np.diff(ends).max()), dtype=torch.int32),
            "sample": torch.tensor(key_of(documents), dtype=torch.int64),
        }
