"""Pre-train a GPT with Megatron-LM: Megatron's own flags and training loop, and one flag for FP8.

    torchrun --nproc-per-node 8 pretrain_gpt_fp8.py <Megatron's flags> --fp8-level O1

Without --fp8-level, or with O0, the run is bit for bit that of Megatron's own pretrain_gpt.py. For features that only
that script has (fill in the middle, distillation), run `-m megatron_fp8 pretrain_gpt.py`. With --sft this script trains
on conversations too; a level needs no Transformer Engine for it.
"""

import time

STARTED = time.time()  # before the heavy imports: Megatron reports the start-up time

from megatron_fp8.errors import UserError
from megatron_fp8.flags import args_file
from megatron_fp8.flags.level import LEVEL, is_stock
from megatron_fp8.flags.own_script import check_own_script
from megatron_fp8.flags.usage import hide_missing_package_warnings, one_line_errors

with one_line_errors():
    args_file.apply()  # before torch is imported: it sets variables
    from megatron_fp8.plugin import install

    hide_missing_package_warnings()
    install()  # before Megatron is imported

import json
from functools import cache, partial

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks, mtp_on_this_rank
from megatron.core.utils import (
    StragglerDetector,
    flatten_batch_for_packed_sequences,
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import get_args, get_timers, pretrain, print_rank_0, set_startup_timestamps
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

from megatron_fp8.layers.packed import share_row
from megatron_fp8.tuning import no_answer
from megatron_fp8.tuning.conversations import ConversationDataset

BATCH_KEYS = ("attention_mask", "labels", "loss_mask", "position_ids", "tokens")
PACK_KEYS = ("cu_seqlens", "max_seqlen")  # with --sft: the ends of a sample's documents, and the longest one's length
SPIKE = 10  # --check-for-spiky-loss reports a loss this many times the largest one so far
PAD_IS_END = (
    "[fp8] --sft: the tokenizer pads with its end token ({}), and labels equal to the pad are masked: the end of a "
    "turn is never learnt; give the tokenizer a pad token of its own"
)
straggler_timer = StragglerDetector()


@cache
def predicts_more_tokens(vp_stage: int | None) -> bool:
    """Whether this pipeline stage has a multi-token-prediction layer, which reads the tokens again."""
    config = core_transformer_config_from_args(get_args())
    return mtp_on_this_rank(
        config.pipeline_model_parallel_layout, config.mtp_num_layers, ignore_virtual=False, vp_stage=vp_stage
    )


def reads_data(vp_stage: int | None) -> bool:
    """Whether this pipeline stage needs tokens or labels."""
    return is_first_or_last_pipeline_stage(vp_stage) or predicts_more_tokens(vp_stage)


def get_batch(data_iterator, vp_stage: int | None) -> dict[str, torch.Tensor | None]:
    """The next micro-batch: {key of BATCH_KEYS: (batch, sequence) tensor, or None if this stage does not use it}.

    The first tensor-parallel rank reads it and broadcasts it; context parallelism splits it along the sequence.
    With --sft every stage gets all samples in one row, (1, batch * sequence), or its part of it, and PACK_KEYS.
    """
    args = get_args()
    if not args.sft and not reads_data(vp_stage):
        return dict.fromkeys(BATCH_KEYS)
    if args.sft and args.tensor_model_parallel_size == args.pipeline_model_parallel_size == 1:
        return on_this_context_rank(packed_batch(next_sample(data_iterator)))
    batch: dict[str, torch.Tensor | None] = {}
    tp_rank = mpu.get_tensor_model_parallel_rank()
    if tp_rank == 0:
        sample = next_sample(data_iterator)
        for key in (*BATCH_KEYS, *PACK_KEYS):
            value = sample.get(key)
            batch[key] = None if value is None else value.cuda(non_blocking=True)
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=args.sft,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=1,  # else it sends the ends that documents have with padding, which these rows do not need
        tp_rank=tp_rank,
        # An evaluation alone has no gradients. Stock's script expects training's size there too, and fails.
        micro_batch_size=args.micro_batch_size if torch.is_grad_enabled() else args.eval_micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=predicts_more_tokens(vp_stage),
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    return on_this_context_rank(flatten_batch_for_packed_sequences(batch) if args.sft else batch)


def on_this_context_rank(batch: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    """This rank's two chunks of each sequence; of a row of documents, wherever they end."""
    group = mpu.get_context_parallel_group()
    return get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=group, use_per_sequence_balancing=True)


def next_sample(data_iterator) -> dict[str, torch.Tensor]:
    """The next micro-batch, on the host. With --sft the stage that computes its loss says if it has no answer."""
    sample = next(data_iterator)
    if get_args().sft and mpu.is_pipeline_last_stage(ignore_virtual=True):
        no_answer.tell(sample["loss_mask"])
    return sample


def packed_batch(sample: dict[str, torch.Tensor]) -> dict[str, torch.Tensor | None]:
    """`get_batch` with --sft for one rank that has the whole model. The row is made, and its longest document found,
    on the host, so that it need not wait for the micro-batch before."""
    row = flatten_batch_for_packed_sequences({key: sample.get(key) for key in (*BATCH_KEYS, *PACK_KEYS)})
    longest = row.pop("max_seqlen")
    there = {key: None if value is None else value.cuda(non_blocking=True) for key, value in row.items()}
    return there | {"max_seqlen": longest}


def packs(batch: dict[str, torch.Tensor | None]) -> dict[str, PackedSeqParams]:
    """With --sft, the argument that tells the layers where a micro-batch's documents end. Waits for the data if
    `max_seqlen` is on the device."""
    ends, longest = (batch.get(key) for key in PACK_KEYS)
    if ends is None or longest is None:
        return {}
    most = int(longest.max())
    params = PackedSeqParams("thd", ends[0], ends[0], max_seqlen_q=most, max_seqlen_kv=most)
    if get_args().context_parallel_size > 1:
        share_row(params, mpu.get_context_parallel_group())
    return {"packed_seq_params": params}


def loss_func(loss_mask: torch.Tensor, token_losses: torch.Tensor):
    """(sum of the losses of unmasked tokens, their number, {name: both} for the log).

    Megatron divides by the number only after summing over micro-batches and ranks: a mean over all tokens. For the log
    the number is above 0 (no_answer.py).  In an evaluation with --sft both are those of the whole row.
    """
    args = get_args()
    loss_mask = loss_mask.view(-1).float()
    loss = torch.sum(token_losses.view(-1).float() * loss_mask)
    num_tokens = loss_mask.sum().detach().to(torch.int)
    report = {"lm loss": torch.stack([loss.detach(), no_answer.counted(num_tokens)])}
    if args.sft and args.context_parallel_size > 1 and not torch.is_grad_enabled():
        # Stock's evaluation of --sft takes a mean of each rank's, and a rank's part of a row may have no answer.
        torch.distributed.all_reduce(report["lm loss"], group=mpu.get_context_parallel_group())

    validate = partial(get_rerun_state_machine().validate_result, result=loss, tolerance=0.0)
    if args.check_for_nan_in_loss_and_grad:
        for name, is_bad in (("NaN", torch.isnan), ("Inf", torch.isinf)):
            message = f"found {name} in local forward loss calculation"
            validate(rejection_func=is_bad, message=message, fatal=True)
    if args.check_for_spiky_loss:
        is_spike = partial(get_rerun_state_machine().is_unexpectedly_large, threshold=SPIKE, context="loss")
        validate(rejection_func=is_spike, message="Spiky loss", fatal=False)
    return loss, num_tokens, report


def forward_step(data_iterator, model, return_schedule_plan: bool = False):
    """Run one micro-batch forward. Returns the output (on the last stage one loss per token) and its loss function."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    with straggler_timer(bdata=True):
        batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    timers("batch-generator").stop()
    inputs = (batch["tokens"], batch["position_ids"], batch["attention_mask"])
    targets = {"labels": batch["labels"], "loss_mask": batch["loss_mask"]}
    with straggler_timer:
        # --overlap-moe-expert-parallel-comm asks for the plan
        forward = model.build_schedule_plan if return_schedule_plan else model
        output = forward(*inputs, **targets, **packs(batch))
    return output, partial(loss_func, batch["loss_mask"])


def datasets_provider(num_samples: list[int], vp_stage: int | None = None, packed: type = ConversationDataset):
    """Training, validation and test datasets with at least these numbers of samples. packed: their class with --sft."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    sequences_per_dataset = None
    if args.per_dataset_sequences_path is not None:
        with open(args.per_dataset_sequences_path) as file:
            sequences_per_dataset = json.load(file)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        object_storage_cache_path=args.object_storage_cache_path,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        fast_cache_load=args.dataloader_fast_cache_load,
        sequences_per_dataset=sequences_per_dataset,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        context_parallel_size=1 if args.sft else args.context_parallel_size,  # else each document is padded
        data_parallel_size=args.data_parallel_size,
        sequence_parallel_size=args.tensor_model_parallel_size * args.sequence_parallel,
    )
    if config.mock and not (args.mock_data or args.sft):  # Megatron's dataset would end in a traceback
        raise UserError("--data-path is missing: give the training data, or add --mock-data")
    dataset = MockGPTDataset if args.mock_data else GPTDataset
    if args.sft:
        dataset = packed
        if config.tokenizer.pad == config.tokenizer.eod:
            print_rank_0(PAD_IS_END.format(config.tokenizer.pad))
    is_built_here = mpu.get_tensor_model_parallel_rank() == 0 and (args.sft or reads_data(vp_stage))
    return BlendedMegatronDatasetBuilder(dataset, num_samples, lambda: is_built_here, config).build()


datasets_provider.is_distributed = True  # every rank calls it, and builds only what it reads


def get_embedding_ranks(pp_ranks: list[int]) -> list[int]:
    """The pipeline ranks with the token embedding: the first, the last if tied, those of multi-token prediction."""
    if len(pp_ranks) == 1:
        return pp_ranks
    args = get_args()
    last = [] if args.untie_embeddings_and_output_weights else [pp_ranks[-1]]
    mtp_ranks = get_mtp_ranks(pp_ranks, core_transformer_config_from_args(args))
    return sorted({pp_ranks[0], *last, *mtp_ranks})


def check_packs(args) -> None:
    """With --sft, raise UserError for an unsupported layout, and switch off the dataset's mask, which is never read."""
    if args.context_parallel_size > 1 and (args.fp8_attention == "te" or is_stock(LEVEL.given(args))):
        raise UserError("--sft with --context-parallel-size: run Megatron's own script, with --fp8-attention te")
    if args.pipeline_model_parallel_size > 1 and args.micro_batch_size > 1:
        raise UserError(
            "--sft with --pipeline-model-parallel-size: a stage sends one row of --seq-length tokens; use "
            "--micro-batch-size 1"
        )
    args.create_attention_mask_in_dataloader = False


def main() -> None:
    """Parse the command line, build the model and train."""
    set_startup_timestamps(program_start=STARTED, main_entry=time.time())
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    check_own_script(args)
    if args.sft:
        check_packs(args)
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(
        config,
        datasets_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        get_embedding_ranks=get_embedding_ranks,
    )


if __name__ == "__main__":
    with one_line_errors():
        main()
