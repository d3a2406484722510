"""Tune a GPT by preferences (DPO) with Megatron-LM: Megatron's own flags and training loop, and one flag for FP8.

    torchrun --nproc-per-node 8 dpo_gpt_fp8.py <Megatron's flags> --fp8-level O3 --attention-dropout 0 \\
        --data-path pairs.jsonl --pretrained-checkpoint SFT --save RUN --load RUN --lr 5e-7 --dpo-beta 0.1

The reference is a copy of the policy at the start. It stays on the device beside the policy: at a level its linears
take a byte a weight (megatron_fp8/tuning/reference.py). Each step and each evaluation first runs a forward pass of the
reference over its micro-batches, with Megatron's own schedule, so it needs no code for tensor, sequence, pipeline or
data parallelism. It keeps two numbers for each pair. tuning/preferences.py has the loss, tuning/pairs.py the data.
"""

import sys

if "--sft" not in sys.argv[1:]:
    sys.argv.append("--sft")  # packed conversations and their tokenizer

import pretrain_gpt_fp8 as gpt  # installs the plugin, before Megatron is imported

# isort: split

import copy
import functools
import math
from collections import deque

import megatron.training.checkpointing as checkpointing
import megatron.training.training as training
import torch
from megatron.core.enums import ModelType
from megatron.core.num_microbatches_calculator import update_num_microbatches
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import get_args, pretrain, print_rank_0, set_startup_timestamps
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args

from megatron_fp8.errors import UserError
from megatron_fp8.flags.usage import one_line_errors, refuse_flags
from megatron_fp8.tuning.pairs import PreferenceDataset
from megatron_fp8.tuning.preferences import Options, loss_of, scores
from megatron_fp8.tuning.reference import make_reference


class Reference:
    """The reference model, built at the first pass, and its log-probabilities of the micro-batches to come.

    config: Megatron's model configuration, the reference's own copy.
    """

    def __init__(self, config):
        self._config = config
        self._chunks: list[torch.nn.Module] | None = None
        self.said: deque[torch.Tensor] = deque()

    def _built(self, policy) -> list[torch.nn.Module]:
        if self._chunks is None:
            builder = self._config.get_builder_cls()(self._config)
            groups = ProcessGroupCollection.use_mpu_process_groups()
            self._chunks = builder.build_distributed_models(pg_collection=groups, wrap_with_ddp=False)
            make_reference(self._chunks, policy)
            if get_args().iteration > 0:  # the run is resumed: the policy has changed
                self._load()
            print_rank_0("[fp8] the reference is on the device")
        return self._chunks

    def _load(self) -> None:
        args = get_args()
        if args.pretrained_checkpoint is None:
            raise UserError("--load: a resumed DPO run needs the weights that it started from; give "
                            "--pretrained-checkpoint")  # fmt: skip
        kept = {name: getattr(args, name) for name in ("load", "finetune", "no_load_optim", "no_load_rng", "iteration",
                "consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")}  # fmt: skip
        args.load, args.finetune, args.no_load_optim, args.no_load_rng = args.pretrained_checkpoint, True, True, True
        try:
            checkpointing.load_checkpoint(self._chunks, None, None)
        finally:
            for name, value in kept.items():
                setattr(args, name, value)
            update_num_microbatches(args.consumed_train_samples, consistency_check=False)

    def before(self, stock):
        """Wraps a schedule: the reference scores the micro-batches first."""

        @functools.wraps(stock)
        def run(*, model, data_iterator, **kwargs):
            several = isinstance(data_iterator, list)
            sources = data_iterator if several else [data_iterator]
            batches = [None if s is None else [next(s) for _ in range(kwargs["num_microbatches"])] for s in sources]

            def again():
                found = [None if read is None else iter(read) for read in batches]
                return found if several else found[0]

            self.said.clear()
            sizes = {key: kwargs[key] for key in ("seq_length", "micro_batch_size", "decoder_seq_length")}
            sizes["num_microbatches"] = kwargs["num_microbatches"]
            with torch.no_grad():
                own = {"forward_step_func": self._score, "model": self._built(model), "forward_only": True}
                stock(data_iterator=again(), **own, **sizes)
            return stock(model=model, data_iterator=again(), **kwargs)

        return run

    def _score(self, data_iterator, model):
        batch, output = forward(data_iterator, model)

        def keep(token_losses):
            found = scores(token_losses, batch["loss_mask"], batch["cu_seqlens"][0]).logp
            self.said.append(found)
            return found.sum(), {}

        return output, keep


def forward(data_iterator, model):
    """(the next micro-batch, the model's output). On the last stage the output is (1, t), -log p of each token."""
    batch = gpt.get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    inputs = (batch["tokens"], batch["position_ids"], batch["attention_mask"])
    output = model(*inputs, labels=batch["labels"], loss_mask=batch["loss_mask"], **gpt.packs(batch))
    return batch, output


def options() -> Options:
    args = get_args()
    return Options(args.dpo_beta, args.dpo_label_smoothing, args.dpo_sft_weight)


def forward_step(reference: Reference, data_iterator, model):
    """Run one micro-batch of the policy forward. Returns the output and its loss function."""
    batch, output = forward(data_iterator, model)

    def loss_func(token_losses):
        policy = scores(token_losses, batch["loss_mask"], batch["cu_seqlens"][0])
        return loss_of(policy, reference.said.popleft(), options())

    return output, loss_func


def datasets_provider(num_samples: list[int], vp_stage: int | None = None):
    return gpt.datasets_provider(num_samples, vp_stage, PreferenceDataset)


datasets_provider.is_distributed = True


def add_arguments(parser):
    group = parser.add_argument_group("dpo")
    group.add_argument("--dpo-beta", type=float, default=0.1, help="A larger beta keeps the policy near the reference.")
    group.add_argument("--dpo-label-smoothing", type=float, default=0.0, help="Assumed share of swapped pairs.")
    group.add_argument("--dpo-sft-weight", type=float, default=0.0, help="Weight of -log p(chosen) per token.")
    return parser


def check(args) -> None:
    """Raise UserError for flags that the loss and the reference do not support."""
    gpt.check_packs(args)
    for flag, value, most, wanted in (
        ("--dpo-beta", args.dpo_beta, math.inf, "a number of 0 or more"),
        ("--dpo-label-smoothing", args.dpo_label_smoothing, 0.5, "a number of 0 to 0.5"),
        ("--dpo-sft-weight", args.dpo_sft_weight, math.inf, "a number of 0 or more"),
    ):
        if not 0 <= value <= most:
            raise UserError(f"{flag} {value}: use {wanted}")
    if getattr(args, "fp8_on_spike", None) == "bf16-fallback":
        raise UserError("--fp8-on-spike bf16-fallback: the reference stays in FP8; use skip or log")
    if args.hidden_dropout or args.attention_dropout:
        raise UserError("--hidden-dropout, --attention-dropout: the reference has none; use 0 for both")


def main() -> None:
    """Parse the command line, build policy and data, and train."""
    set_startup_timestamps(program_start=gpt.STARTED, main_entry=gpt.STARTED)
    args = parse_and_validate_args(add_arguments, args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    refuse_flags(args, gpt.OTHER_SCRIPT, "remove it: DPO has its own loss")
    check(args)
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    reference = Reference(copy.deepcopy(config.model))
    schedule = training.get_forward_backward_func
    training.get_forward_backward_func = lambda *a, **k: reference.before(schedule(*a, **k))
    pretrain(
        config,
        datasets_provider,
        ModelType.encoder_or_decoder,
        functools.partial(forward_step, reference),
        get_embedding_ranks=gpt.get_embedding_ranks,
    )


if __name__ == "__main__":
    with one_line_errors():
        main()
