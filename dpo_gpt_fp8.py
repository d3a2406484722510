"""Tune a GPT by preferences (DPO) with Megatron-LM: Megatron's own flags and training loop, and one flag for FP8.

    torchrun --nproc-per-node 8 dpo_gpt_fp8.py <Megatron's flags> --fp8-level O3 --attention-dropout 0 \\
        --data-path pairs.jsonl --pretrained-checkpoint SFT --save RUN --load RUN --lr 5e-7 --dpo-beta 0.1

The reference is a copy of the policy at the start. It stays on the device beside the policy: at a level its linears
take a byte a weight (megatron_fp8/tuning/reference.py). Each step and each evaluation first runs a forward pass of the
reference over its micro-batches, with Megatron's own schedule, so it needs no code for tensor, sequence, pipeline or
data parallelism. It keeps two numbers for each pair. tuning/preferences.py has the loss, tuning/pairs.py the data.

With --dpo-score-reference FILE the run does not train: the policy as it begins scores the data. With
--dpo-reference-scores FILE a run reads these numbers, and has no second model and no second pass
(tuning/score_file.py). If adapters train on a frozen base, the reference is the policy with its adapters off.
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

import megatron.training.training as training
import numpy as np
import torch
from megatron.core import mpu
from megatron.core.enums import ModelType
from megatron.core.num_microbatches_calculator import get_num_microbatches, update_num_microbatches
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import get_args, get_tokenizer, pretrain, print_rank_0, set_startup_timestamps
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split
from torch.utils.data import default_collate

from megatron_fp8 import hooks, plugin
from megatron_fp8.errors import UserError
from megatron_fp8.flags.dpo import READ, SCORE, add_arguments
from megatron_fp8.flags.own_script import ONLY_STOCKS
from megatron_fp8.flags.stock import plain
from megatron_fp8.flags.usage import one_line_errors, refuse_flags
from megatron_fp8.tuning.fingerprint import differs, fingerprint
from megatron_fp8.tuning.pairs import PreferenceDataset
from megatron_fp8.tuning.preferences import Options, loss_of, scores
from megatron_fp8.tuning.reference import adapters_off, has_adapters, make_reference
from megatron_fp8.tuning.score_file import ScoreFile, check_new, write

SIZES = "seq_length", "micro_batch_size", "decoder_seq_length"  # of a schedule's arguments


class Reference:
    """Says what the reference model gives the answers of the micro-batches to come, before the policy sees them.

    said: (2 p,) FP32 log-probabilities of each micro-batch to come, on the last pipeline stage.
    """

    def __init__(self) -> None:
        self.said: deque[torch.Tensor] = deque()

    def _say(self, stock, policy, batches: list, sizes: dict) -> list[torch.Tensor]:
        """`said` of micro-batches, a list for each chunk of the model; None for it if this rank reads no data."""
        raise NotImplementedError

    def schedules(self, stock):
        """get_forward_backward_func, whose schedules are as `before` makes them."""

        @functools.wraps(stock)
        def get_forward_backward_func(*args, **kwargs):
            return self.before(stock(*args, **kwargs))

        return get_forward_backward_func

    def before(self, stock):
        """Wraps a schedule: the reference has its say first."""

        @functools.wraps(stock)
        def run(*, model, data_iterator, **kwargs):
            several = isinstance(data_iterator, list)
            sources = data_iterator if several else [data_iterator]
            batches = [None if s is None else [next(s) for _ in range(kwargs["num_microbatches"])] for s in sources]
            sizes = {key: kwargs[key] for key in (*SIZES, "num_microbatches")}
            self.said = deque(self._say(stock, model, batches, sizes))
            return stock(model=model, data_iterator=iterators(batches), **kwargs)

        return run


def remember(model: dict[str, int], given: str) -> None:
    """Keep the reference's `fingerprint` in Megatron's arguments, which checkpoints have.

    given: the flag that gave the reference. Raises UserError if the run goes on from one that had another reference.
    """
    args = get_args()
    before = getattr(args, "dpo_reference", {})
    if differs(model, before):
        raise UserError(f"{given}: another reference than the run in --load {args.load} has; give the one that it "
                        "began with, or begin a new run")  # fmt: skip
    args.dpo_reference = before | model


class ModelOfItsOwn(Reference):
    """The reference is built at the first pass, beside the policy; or is the policy with its adapters off.

    config: Megatron's model configuration, the reference's own copy.
    """

    def __init__(self, config):
        super().__init__()
        self._config = config
        self._chunks: list[torch.nn.Module] | None = None

    def _say(self, stock, policy, batches, sizes):
        if has_adapters(policy):
            with adapters_off(policy) as chunks:
                return log_probabilities(stock, chunks, batches, sizes)
        return log_probabilities(stock, self._built(policy), batches, sizes)

    def _built(self, policy) -> list[torch.nn.Module]:
        if self._chunks is None:
            builder = self._config.get_builder_cls()(self._config)
            groups = ProcessGroupCollection.use_mpu_process_groups()
            self._chunks = builder.build_distributed_models(pg_collection=groups, wrap_with_ddp=False)
            make_reference(self._chunks, policy)
            if get_args().iteration > 0:  # the run is resumed: the policy has changed
                self._load()
            given = f"--pretrained-checkpoint {get_args().pretrained_checkpoint}"
            remember(fingerprint(self._chunks, get_tokenizer().vocab_size, linears=True), given)
            print_rank_0("[fp8] the reference is on the device")
        return self._chunks

    def _load(self) -> None:
        args = get_args()
        if args.pretrained_checkpoint is None:
            raise UserError("--load: a resumed DPO run needs the weights that it started from; give "
                            "--pretrained-checkpoint, or their scores by --dpo-reference-scores")  # fmt: skip
        kept = {name: getattr(args, name) for name in ("load", "finetune", "no_load_optim", "no_load_rng", "iteration",
                "consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")}  # fmt: skip
        args.load, args.finetune, args.no_load_optim, args.no_load_rng = None, True, True, True
        try:
            training.load_checkpoint(self._chunks, None, None)
        finally:
            for name, value in kept.items():
                setattr(args, name, value)
            update_num_microbatches(args.consumed_train_samples, consistency_check=False)


class FromFile(Reference):
    """The scores are in a file, which every rank that reads data has read."""

    def __init__(self, scores: ScoreFile):
        super().__init__()
        self._scores, self._compared = scores, False

    def _say(self, stock, policy, batches, sizes):
        last = mpu.is_pipeline_last_stage(ignore_virtual=True)
        if not self._compared:
            remember(self._scores.model, f"{READ} {get_args().dpo_reference_scores}")
            if get_args().iteration == 0:  # in a resumed run the policy has changed
                self._scores.check_model(fingerprint(policy, get_tokenizer().vocab_size, linears=False))
        self._compared = True
        if not last:
            return []
        found = None
        if batches[-1] is not None:
            found = [np.concatenate([self._scores[key] for key in batch["sample"].tolist()]) for batch in batches[-1]]
        return [torch.from_numpy(logp).cuda() for logp in from_reading_rank(found)]


def from_reading_rank(value):
    """A value of the tensor-parallel rank that reads the data, on all of its group."""
    box = [value]
    group = mpu.get_tensor_model_parallel_group()
    torch.distributed.broadcast_object_list(box, mpu.get_tensor_model_parallel_src_rank(), group)
    return box[0]


def iterators(batches: list):
    """Micro-batches of each chunk of a model as a schedule takes them: a list only of several."""
    found = [None if read is None else iter(read) for read in batches]
    return found if len(found) > 1 else found[0]


@torch.no_grad()
def log_probabilities(stock, chunks, batches: list, sizes: dict) -> list[torch.Tensor]:
    """(2 p,) FP32 of each micro-batch's documents, on the last pipeline stage; else nothing. stock: a schedule."""
    found = []

    def score(data_iterator, model):
        batch, output = forward(data_iterator, model)

        def keep(token_losses):
            found.append(scores(token_losses, batch["loss_mask"], batch["cu_seqlens"][0]).logp)
            return found[-1].sum(), {}

        return output, keep

    stock(forward_step_func=score, data_iterator=iterators(batches), model=chunks, forward_only=True, **sizes)
    return found


class Scoring:
    """--dpo-score-reference: instead of training, the policy as it begins scores every sample of the data files."""

    def __init__(self, file: str):
        self._file, self._parts = file, {}

    def datasets(self, num_samples: list[int], vp_stage: int | None = None):
        """The datasets of a training run; this rank's parts are remembered, by the file that each has whole."""
        built = datasets_provider(num_samples, vp_stage)
        for one in built:
            self._parts |= {part.dataset_path: part for part in getattr(one, "datasets", [one]) if part is not None}
        return built

    datasets.is_distributed = True

    def in_place_of(self, stock):
        """Megatron's `train`."""
        return self.run

    def run(self, forward_step_func, model, *_args, **_kwargs) -> tuple[int, int]:
        """Score, write the file; (0 steps, 0 operations)."""
        args = get_args()
        if args.iteration > 0:
            raise UserError(f"{SCORE}: --load has a run that has trained; give the weights that a run starts from by "
                            "--pretrained-checkpoint alone")  # fmt: skip
        args.do_valid = args.do_test = False
        if training.should_disable_forward_pre_hook(args):
            training.disable_forward_pre_hook(model, param_sync=False)
        lines = [(part, line) for _, part in sorted(self._parts.items()) for line in range(len(part.dataset))]
        count, stock = from_reading_rank(len(lines)), training.get_forward_backward_func()
        rank, ranks = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
        many = get_num_microbatches()
        each = many * args.micro_batch_size
        sizes = {"seq_length": args.seq_length, "micro_batch_size": args.micro_batch_size, "decoder_seq_length": None,
                 "num_microbatches": many}  # fmt: skip
        for chunk in model:
            chunk.eval()
        found: dict[int, np.ndarray] = {}
        for first in range(rank * each, count + rank * each, ranks * each):  # all ranks as often; the last ones again
            batches = None
            if lines:
                samples = [part.sample(line) for part, line in (lines[i % count] for i in range(first, first + each))]
                groups = (samples[i : i + args.micro_batch_size] for i in range(0, each, args.micro_batch_size))
                batches = [default_collate(group) for group in groups]
            said = log_probabilities(stock, model, [batches] * len(model), sizes)
            if batches is not None and said:
                found |= by_sample(batches, said)
        last = mpu.is_pipeline_last_stage(ignore_virtual=True)
        numbers = fingerprint(model, get_tokenizer().vocab_size, linears=False)
        if last and mpu.get_tensor_model_parallel_rank() == 0:
            gathered = [None] * ranks
            torch.distributed.all_gather_object(gathered, found, mpu.get_data_parallel_group())
            if rank == 0:
                write(self._file, {key: logp for part in gathered for key, logp in part.items()}, data_files(args),
                      numbers)  # fmt: skip
                print(f"[fp8] {SCORE} {self._file}: {count} samples scored", flush=True)
        return 0, 0


def by_sample(batches: list[dict], said: list[torch.Tensor]) -> dict[int, np.ndarray]:
    """{key of a sample: log-probabilities (2 p,) FP32 of its documents} of micro-batches."""
    found = {}
    for batch, logp in zip(batches, said, strict=True):
        ends = batch["cu_seqlens"]  # a row's unused places hold the length
        numbers = (ends < ends[:, -1:]).sum(1).tolist()
        found |= dict(zip(batch["sample"].tolist(), map(np.array, logp.cpu().split(numbers)), strict=True))
    return found


def data_files(args) -> list[str]:
    """The files of --data-path and its kin."""
    whole, by_split = get_blend_and_blend_per_split(args)
    return sorted({file for blend in (whole, *(by_split or [])) if blend for file in blend[0]})


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


def check(args) -> None:
    """Raise UserError for flags that the loss and the reference do not support."""
    if args.context_parallel_size > 1:
        raise UserError(f"--context-parallel-size {args.context_parallel_size}: DPO sums an answer's log-probabilities "
                        "on one rank; use --tensor-model-parallel-size with --sequence-parallel")  # fmt: skip
    gpt.check_packs(args)
    for flag, value, most, wanted in (
        ("--dpo-beta", args.dpo_beta, math.inf, "a number of 0 or more"),
        ("--dpo-label-smoothing", args.dpo_label_smoothing, 0.5, "a number of 0 to 0.5"),
        ("--dpo-sft-weight", args.dpo_sft_weight, math.inf, "a number of 0 or more"),
    ):
        if not (0 <= value <= most and math.isfinite(value)):
            raise UserError(f"{flag} {value}: use {wanted}")
    if getattr(args, "fp8_on_spike", None) == "bf16-fallback":
        raise UserError("--fp8-on-spike bf16-fallback: the reference stays in FP8; use skip or log")
    if args.hidden_dropout or args.attention_dropout:
        raise UserError("--hidden-dropout, --attention-dropout: the reference has none; use 0 for both")
    check_other_losses(args)
    if args.dpo_score_reference is not None:
        if args.dpo_reference_scores is not None:
            raise UserError(f"{SCORE} with {READ}: score first, then train with the file; remove one of the two")
        if args.skip_train:
            raise UserError(f"{SCORE} with --skip-train: it scores the weights as training begins; remove the latter")
        check_new(args.dpo_score_reference)
    if not data_files(args):
        raise UserError("--data-path is missing: give a file of preference pairs; there are no mock ones")


def check_other_losses(args) -> None:
    """Raise UserError for losses of Megatron's that would not mean beside DPO's what they mean elsewhere."""
    if args.mtp_num_layers and args.mtp_loss_scaling_factor:
        raise UserError(f"--mtp-num-layers {args.mtp_num_layers}: its loss would teach the rejected answers as well as "
                        "the chosen ones; add --mtp-loss-scaling-factor 0")  # fmt: skip
    # Megatron expects a step's gradients to be divided by its tokens. DPO divides by pairs, hundreds of times fewer.
    losses = {"--moe-z-loss-coeff": args.moe_z_loss_coeff}
    if args.moe_router_load_balancing_type not in ("none", ["none"]):
        losses["--moe-aux-loss-coeff"] = args.moe_aux_loss_coeff
    given = " ".join(f"{flag} {plain(value)}" for flag, value in losses.items() if np.any(value))
    if args.num_experts and args.calculate_per_token_loss and given:
        raise UserError(f"--calculate-per-token-loss with {given}: Megatron multiplies the routers' losses by tokens, "
                        "and DPO divides by pairs; remove the former")  # fmt: skip


def main() -> None:
    """Parse the command line, build policy and data, and train."""
    set_startup_timestamps(program_start=gpt.STARTED, main_entry=gpt.STARTED)
    args = parse_and_validate_args(add_arguments, args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    refuse_flags(args, ONLY_STOCKS, "remove it: DPO has its own loss")
    check(args)
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    provider = datasets_provider
    if args.dpo_score_reference is not None:
        scoring = Scoring(args.dpo_score_reference)
        plugin.put(hooks.SCORING, scoring)
        provider, reference = scoring.datasets, Reference()
    else:
        reference = ModelOfItsOwn(copy.deepcopy(config.model))
        if args.dpo_reference_scores is not None:
            reference = FromFile(ScoreFile(args.dpo_reference_scores, data_files(args)))
        plugin.put(hooks.REFERENCE, reference)
    pretrain(
        config,
        provider,
        ModelType.encoder_or_decoder,
        functools.partial(forward_step, reference),
        get_embedding_ranks=gpt.get_embedding_ranks,
    )


if __name__ == "__main__":
    with one_line_errors():
        main()
