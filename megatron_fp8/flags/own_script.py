"""Flags that Megatron's own script supports, pretrain_gpt.py, and pretrain_gpt_fp8.py does not."""

from argparse import Namespace

from .usage import refuse_flags

ONLY_STOCKS = {  # {name in args: flag}
    "fim_data": "--fim-data",
    "logits_load_dir": "--logits-load-dir",
    "hybrid_context_parallel": "--hybrid-context-parallel",
    "dataloader_inter_document_masking": "--dataloader-inter-document-masking",
    "inprocess_restart": "--inprocess-restart",
}


def check_own_script(args: Namespace) -> None:
    """Raise UserError for the first of these flags in a run of pretrain_gpt_fp8.py."""
    refuse_flags(args, ONLY_STOCKS, "run Megatron's own script, `-m megatron_fp8 pretrain_gpt.py`")
