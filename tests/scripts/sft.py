"""Train with --sft on conversations of the file that --data-path names, in which a message is bytes.

In place of the packages `datasets` and `transformers`, which Megatron asks for, stands what it uses of them: a reader
of JSON lines, and a tokenizer of bytes that masks what is not the assistant's. PAD: its pad token, 254; "end": its end.
SHIFT: added to every byte: another tokenizer.

LOOK=1: before the first step, the losses of a document alone and of the same beside another are printed.
SCRIPT: another than pretrain_gpt_fp8.py. At each step it prints the hashes of the reference's bytes, if there is one,
and of the policy's; once, how many bytes the reference's linears hold, and all its other parameters; and each rank's
log-probabilities of each micro-batch. BEND: a parameter of whose first number a bit is flipped when a reference is
loaded.
"""

import functools
import hashlib
import itertools
import json
import os
import runpy
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from launch import ROOT

sys.path.insert(0, str(ROOT))
from megatron_fp8.plugin import install

install()
import megatron.core.tokenizers.utils.build_tokenizer as tokenizers
import megatron.training.training as training
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_fp8.engine.owned_weight import owned_weights
from megatron_fp8.tuning import preferences, reference

END, PAD, IGNORED = 253, 254, -100
SHIFT = int(os.environ.get("SHIFT", "0"))
datasets = ModuleType("datasets")
datasets.load_dataset = lambda kind, data_files, split: list(map(json.loads, Path(data_files).read_text().splitlines()))
sys.modules["datasets"] = datasets


def tokenize_conversation(conversation, return_target, add_generation_prompt):
    tokens, targets = [], []
    for message in conversation:
        ids = [(b + SHIFT) % 250 for b in message["content"].encode()] + [END]
        tokens += ids
        targets += ids if message["role"] == "assistant" else [IGNORED] * len(ids)
    return np.array(tokens), np.array(targets)


def build(stock):
    @functools.wraps(stock)
    def build_tokenizer(*args, **kwargs):
        tokenizer = stock(*args, **kwargs)

        class Bytes(type(tokenizer)):
            eod, pad = END, END if os.environ.get("PAD") == "end" else PAD

        tokenizer.__class__ = Bytes
        tokenizer.tokenize_conversation = tokenize_conversation
        return tokenizer

    return build_tokenizer


def losses(chunk, tokens: torch.Tensor, ends: list[int]) -> torch.Tensor:
    """Of the tokens of one row, each predicting the next, with documents that end there."""
    cu = torch.tensor(ends, dtype=torch.int32, device=tokens.device)
    longest = max(b - a for a, b in itertools.pairwise(ends))
    positions = torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(ends)]).to(tokens.device)
    packed = PackedSeqParams("thd", cu, cu, max_seqlen_q=longest, max_seqlen_kv=longest)
    labels = tokens.roll(-1, 1)
    with torch.no_grad():
        return chunk(tokens, positions[None], None, labels=labels, packed_seq_params=packed)[0].float()


def look(stock):
    @functools.wraps(stock)
    def step(forward, data, model, *args, **kwargs):
        if os.environ.get("LOOK") and not seen:
            seen.append(1)
            chunk = model[0].eval()
            row = torch.randint(0, 250, (1, 64), generator=torch.Generator().manual_seed(1)).cuda()
            other = row.clone()
            other[:, 16:] = (other[:, 16:] + 7) % 250
            both, beside_another = (losses(chunk, tokens, [0, 16, 64]) for tokens in (row, other))
            first, second = losses(chunk, row[:, :16], [0, 16]), losses(chunk, row[:, 16:], [0, 48])
            leak, of_first = both[:15] - beside_another[:15], both[:15] - first[:15]
            of_second, mixed = both[16:63] - second[:47], both[16:63] - losses(chunk, row, [0, 64])[16:63]
            apart = " ".join(f"{d.abs().max().item():.6f}" for d in (leak, of_first, of_second))
            print(f"apart: {apart}; one document: {mixed.abs().max().item():.6f}", flush=True)
            model[0].train()
        result = stock(forward, data, model, *args, **kwargs)
        for chunks in references or [[]] * ("SCRIPT" in os.environ):
            rank = torch.distributed.get_rank()
            print(f"reference {digest(chunks)} policy {digest(model)} rank {rank}", flush=True)
        return result

    return step


def digest(chunks) -> str:
    """Of all bytes of a model's parameters."""
    found = hashlib.sha256()
    for chunk in chunks:
        for parameter in chunk.parameters():
            found.update(parameter.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def remembered(make):
    def make_reference(chunks, policy):
        references.append(chunks)
        make(chunks, policy)
        ours = {id(weight.param) for weight in owned_weights(chunks)}
        held = [0, 0]
        for parameter in (parameter for chunk in chunks for parameter in chunk.parameters()):
            held[id(parameter) not in ours] += parameter.untyped_storage().nbytes()
        print("reference's bytes:", *held, flush=True)

    return make_reference


def said(stock):
    @functools.wraps(stock)
    def scores(*args):
        found = stock(*args)
        found_hash = hashlib.sha256(found.logp.detach().cpu().numpy().tobytes()).hexdigest()[:16]
        print(f"log-probabilities {found_hash} rank {torch.distributed.get_rank()}", flush=True)
        return found

    return scores


def bent(stock):
    @functools.wraps(stock)
    def load_checkpoint(ddp_model, optimizer, *args, **kwargs):
        result = stock(ddp_model, optimizer, *args, **kwargs)
        if optimizer is None and "BEND" in os.environ:
            (found,) = (p for name, p in ddp_model[0].named_parameters() if name.endswith(os.environ["BEND"]))
            found.detach().reshape(-1).view(torch.uint8)[1] ^= 1
        return result

    return load_checkpoint


references: list = []
training.load_checkpoint = bent(training.load_checkpoint)
preferences.scores = said(preferences.scores)
reference.make_reference = remembered(reference.make_reference)
seen: list[int] = []
tokenizers.build_tokenizer = build(tokenizers.build_tokenizer)
training.train_step = look(training.train_step)
runpy.run_path(str(ROOT / os.environ.get("SCRIPT", "pretrain_gpt_fp8.py")), run_name="__main__")
