"""Refuses stock flags whose optional package is not installed, in one line before the run starts, at any level.

Without the package Megatron ends in a traceback, sometimes after the first step, or logs zeros.  If Megatron itself
only warns (--tensorboard-dir), nothing is refused here; packages.py lists those packages too.
"""

from argparse import Namespace
from collections.abc import Callable
from typing import Any, NamedTuple

from .. import packages
from ..errors import UserError
from .flag import value_of

_SENTENCES = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
_WITHOUT_PACKAGE = ("NullTokenizer", "NullMultimodalTokenizer", "TikTokenizer", *_SENTENCES)
_S3 = "s3://"


class Need(NamedTuple):
    """A flag needs `module` if test(value) holds for its value."""

    flag: str
    module: str
    test: Callable[[Any], bool] = bool


def _of_s3(value: Any) -> bool:
    return any(str(word).startswith(_S3) for word in (value if isinstance(value, list) else [value]))


NEEDS = (
    Need("--tokenizer-type", "transformers", lambda kind: kind is not None and kind not in _WITHOUT_PACKAGE),
    Need("--tokenizer-type", "sentencepiece", lambda kind: kind in _SENTENCES),
    Need("--tokenizer-type", "tiktoken", lambda kind: kind == "TikTokenizer"),
    Need("--log-straggler", "pynvml"),
    Need("--log-energy", "pynvml"),
    Need("--wandb-project", "wandb"),
    Need("--enable-ft-package", "nvidia_resiliency_ext"),
    Need("--non-persistent-ckpt-type", "nvidia_resiliency_ext", lambda kind: kind == "local"),
    *(Need(f"--{kind}data-path", "boto3", _of_s3) for kind in ("", "train-", "valid-", "test-")),
    Need("--use-megatron-fsdp", "einops"),
    Need("--optimizer", "emerging_optimizers", lambda name: name not in (None, "adam", "sgd")),
)


def check_packages(args: Namespace) -> None:
    """Raise UserError for the first flag whose package is not installed here."""
    for need in NEEDS:
        value = value_of(args, need.flag)
        if need.test(value) and not packages.installed(need.module):
            words = [] if value is True else value if isinstance(value, list) else [value]
            given = " ".join([need.flag, *map(str, words)])
            otherwise = "remove the flag" if need.test is bool else "change it"
            raise UserError(f"{given}: {packages.needs(need.module, otherwise)}")
