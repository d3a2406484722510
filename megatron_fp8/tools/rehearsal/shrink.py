"""Turn a job's flags into those of its rehearsal: the same layout and schedule, a model that a CPU trains in seconds.

    kept       TP, PP, virtual stages, sequence, context and expert parallelism, the order of the schedule,
               recomputation, every flag of precision, optimizer and checkpoint form, and the data, if it is here
    shrunk     width, heads (with their ratio to the query groups, if possible), sequence, vocabulary of mock data,
               layers a stage, micro-batches a step, data parallelism
    replaced   how long it trains, where it saves, what it logs to

A rank has at least one head, mostly of 16 channels, the smallest that an FP8 GEMM takes.  Layers of one kind behave
alike, so a virtual stage keeps two layers, or one if there are many stages. A stage with more or fewer layers than the
others keeps that difference.  A step keeps enough micro-batches for a steady phase of 1F1B or of the
interleaved schedule.
"""

import math
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass

from ...errors import UserError
from ...flags.command import Flags, flags_of
from ...flags.numeric_checks import GEMM_MULTIPLE, largest_batch
from ...packages import installed
from .room import Room, needs

HEAD = 16  # channels, the shortest sum of an FP8 GEMM
STEPS, SAVED = 4, 3  # the last step, and the step after which it saves and from which it resumes

_SIZES = """--hidden-size --ffn-hidden-size --num-attention-heads --num-query-groups --kv-channels --seq-length
--encoder-seq-length --decoder-seq-length --max-position-embeddings --window-size --moe-ffn-hidden-size
--moe-shared-expert-intermediate-size --q-lora-rank --kv-lora-rank --qk-head-dim --qk-pos-emb-head-dim --v-head-dim
--mup-base-hidden-size --global-batch-size""".split()
LENGTH = """--train-iters --train-samples --lr-decay-iters --lr-decay-samples --lr-wsd-decay-iters
--lr-wsd-decay-samples --lr-warmup-iters --lr-warmup-samples --lr-warmup-fraction --rampup-batch-size
--step-batch-size-schedule --exit-interval --exit-duration-in-mins --eval-iters --eval-interval
--eval-global-batch-size --eval-micro-batch-size --start-eval-at-iter --full-validation --phase-transition-iterations
--log-interval --num-workers --distributed-backend --distributed-timeout-minutes""".split()
FOLDERS = """--save --save-interval --persistent-save-interval --save-retain-interval --data-cache-path""".split()
DATA = """--mock-data --data-path --train-data-path --valid-data-path --test-data-path --data-args-path
--per-split-data-args-path --per-dataset-sequences-path --tokenizer-type --tokenizer-model --vocab-file --merge-file
--vocab-size --vocab-extra-ids --split --multiple-validation-sets --tiktoken-pattern --tiktoken-num-special-tokens
--tokenizer-special-tokens --tokenizer-hf-no-use-fast --tokenizer-hf-no-include-special-tokens""".split()
LEFT_OUT = """--load --ckpt-step --finetune --pretrained-checkpoint --no-load-optim --no-load-rng --no-save-optim
--no-save-rng --load-main-params-from-ckpt --override-opt_param-scheduler --override-opt-param-scheduler
--use-checkpoint-opt_param-scheduler --use-checkpoint-opt-param-scheduler --non-persistent-save-interval
--non-persistent-ckpt-type --non-persistent-global-ckpt-dir --non-persistent-local-ckpt-dir
--non-persistent-local-ckpt-algo --tensorboard-dir --wandb-project --wandb-exp-name --wandb-save-dir --wandb-entity
--one-logger-project --one-logger-run-name --profile --use-pytorch-profiler --profile-step-start --profile-step-end
--profile-ranks --record-memory-history --memory-snapshot-path --adlr-autoresume --adlr-autoresume-interval
--log-straggler --log-energy --run-workload-inspector-server --gpu-sniff-test-interval --nccl-communicator-config-path
--config-logger-dir --logits-save-dir --moe-routing-trace-path --skip-train --save-params-interval
--save-activations-interval --save-dgrads-interval --save-wgrads-interval --save-tokens-per-expert-interval
--dump-param-to-param-group-map --result-rejected-tracker-filename --ckpt-convert-save --ckpt-convert-format
--flight-recorder-dump-path --object-storage-cache-path --fp8-probe-step --fp8-probe-dir --fp8-sharpness-eval
--fp8-sharpness-iterations --use-nccl-ub --use-sharp --sharp-enabled-group --enable-ft-package --calc-ft-timeouts
--ft-num-warmup-iters --fp8-grad-reduce-hierarchy""".split()  # the last: two replicas are no two levels


@dataclass(frozen=True)
class Change:
    """A size in the job and in its rehearsal."""

    what: str
    before: int | str
    after: int | str


@dataclass(frozen=True)
class Rehearsal:
    """What runs instead of the job.

    Attributes:
        flags: of the script; --save or --load FOLDER must be added.
        ranks, data_parallel: the number of ranks, and the data-parallel size.
        changes: the sizes that were shrunk.
        left_out: flags of the job that are not rehearsed.
    """

    flags: Flags
    ranks: int
    data_parallel: int
    changes: list[Change]
    left_out: list[str]


def shrink(
    flags: Flags,
    job: Namespace,
    *,
    most_ranks: int | None,
    free: Room,
    quick_ranks: int,
    mock_data: bool,
    all_layers: bool,
    storage: str,
) -> Rehearsal:
    """The rehearsal of a job.

    Args:
        flags: of the job's command.
        job: Megatron's arguments from these flags, validated for all of its ranks.
        most_ranks: how many ranks the user allows; None: as many as `free` has room for.
        quick_ranks: how many finish in minutes.
        mock_data: whether to train on mock data.
        all_layers: keep every layer.
        storage: of gradients (--fp8-grad-accum), since auto depends on the number of micro-batches.

    Raises UserError if one data-parallel replica has more ranks than that.
    """
    model_ranks = job.tensor_model_parallel_size * job.pipeline_model_parallel_size * job.context_parallel_size
    data = _data_parallel(job, model_ranks, most_ranks, free, quick_ranks)
    sizes = _sizes(job, mock_data)
    layers = {} if all_layers or _names_layers(flags, job) else _fewer_layers(job)
    micro_batches = largest_batch(job) // (job.micro_batch_size * job.data_parallel_size)
    fewer = _fewer_micro_batches(job, micro_batches)
    batch = job.micro_batch_size * data * fewer

    replaced = {*_SIZES, *LENGTH, *FOLDERS, *layers, *LEFT_OUT, *(DATA if mock_data else [])}
    kept = [(flag, values) for flag, values in flags if flag not in replaced]
    kept += [(flag, [str(value)]) for flag, value in (sizes | layers).items()]
    kept += _fixed(job, batch, mock_data, storage, any(flag == "--fp8-grad-accum" for flag, _ in flags))
    given = {flag for flag, _ in flags}
    changes = [
        *(Change(flag, _of(job, flag), value) for flag, value in (sizes | layers).items()),
        Change("micro-batches a step", micro_batches, fewer),
        Change("data parallelism", job.data_parallel_size, data),
    ]
    changes = [change for change in changes if change.before != change.after and change.before is not None]
    return Rehearsal(kept, model_ranks * data, data, changes, [flag for flag in LEFT_OUT if flag in given])


def _data_parallel(job: Namespace, model_ranks: int, asked: int | None, free: Room, quick_ranks: int) -> int:
    """Two replicas, so that they communicate, or what expert parallelism needs; one if two are too many."""
    experts = job.expert_model_parallel_size * (job.expert_tensor_parallel_size or 1)
    sharing = job.tensor_model_parallel_size * job.context_parallel_size
    least = math.lcm(experts, sharing) // sharing
    replica, most = model_ranks * least, asked or free.ranks
    if replica > most:
        given = f"--ranks {asked}" if asked else "rehearse"
        here = "" if asked else f": {needs(replica)} of memory, and {free} here"
        remedy = f"--ranks {replica} starts it" + (" all the same" if replica > free.ranks else "")
        raise UserError(f"{given}: one replica of the layout has {replica} ranks{here}; "
                        f"{_smaller(job, replica, most)}, or take a larger machine; {remedy}")  # fmt: skip
    return 2 if least == 1 and job.data_parallel_size > 1 and 2 * model_ranks <= min(most, quick_ranks) else least


def _smaller(job: Namespace, replica: int, most: int) -> str:
    """The remedy for a replica of too many ranks: fewer stages keep all kinds of them, a first, middle and last one."""
    stages = job.pipeline_model_parallel_size
    fewer = [n for n in range(3, stages) if stages % n == 0 and replica // stages * n <= most]
    if fewer and not job.pipeline_model_parallel_layout:
        return f"give the command --pipeline-model-parallel-size {fewer[-1]} here"
    return "give the command fewer pipeline stages, or a smaller --tensor-model-parallel-size, here"


def _sizes(job: Namespace, mock_data: bool) -> dict[str, int | str]:
    """{flag: value} of a smaller model, for every size that the job gives or has by default."""
    tensor = job.tensor_model_parallel_size
    heads, groups, hidden = job.num_attention_heads, job.num_query_groups, job.hidden_size
    grouped = bool(job.group_query_attention)
    if grouped:
        few = tensor if groups % tensor == 0 else groups
        many = math.lcm(few * min(heads // groups, 2), tensor)
    else:
        few = many = tensor if tensor > 2 else 2 * tensor
    # Use more channels if ranks share a query group's keys, so that a rank's QKV linear has a multiple of 16 rows.
    channels = HEAD * tensor // math.gcd(tensor, many * (2 if job.attention_output_gate else 1) + 2 * few)
    width = _like(hidden, heads * (job.kv_channels or hidden // heads), many * channels, HEAD * tensor)
    unit = math.lcm(16, 2 * tensor) * job.context_parallel_size * job.mlp_chunks_for_training
    length = -(-32 // unit) * unit
    found: dict[str, int | str] = {
        "--hidden-size": width,
        "--ffn-hidden-size": _like(min(job.ffn_hidden_size, 4 * hidden), hidden, width, HEAD * tensor),
        "--num-attention-heads": many,
        "--seq-length": length,
        "--max-position-embeddings": length * max(1, job.max_position_embeddings // job.seq_length),
    }
    if grouped:
        found["--num-query-groups"] = few
    if job.multi_latent_attention:
        found |= dict.fromkeys(("--kv-lora-rank", "--qk-head-dim", "--v-head-dim", "--qk-pos-emb-head-dim"), HEAD)
        if job.q_lora_rank is not None:
            found["--q-lora-rank"] = HEAD
    else:
        found["--kv-channels"] = channels
    for flag in ("--moe-ffn-hidden-size", "--moe-shared-expert-intermediate-size"):
        if (size := _of(job, flag)) and job.num_experts:
            found[flag] = _like(min(size, 4 * hidden), hidden, width, HEAD * tensor)
    if job.window_size is not None:
        found["--window-size"] = ",".join(str(min(side, length // 4)) for side in job.window_size)
    if getattr(job, "mup_base_hidden_size", None):
        found["--mup-base-hidden-size"] = max(1, job.mup_base_hidden_size * width // hidden)
    if mock_data:
        legal = math.lcm(GEMM_MULTIPLE, job.make_vocab_size_divisible_by) * tensor if job.fp8_lm_head else 1
        found["--vocab-size"] = -(-255 // legal) * legal
    return found


def _like(size: int, of: int, small: int, unit: int) -> int:
    """small * size / of, rounded to a multiple of `unit`, at least one unit."""
    return max(1, round(size * small / (of * unit))) * unit


def _names_layers(flags: Flags, job: Namespace) -> bool:
    """Whether a flag of the job names single layers, by number or in a list of all."""
    lists = ("moe_layer_freq", "no_rope_freq", "window_attn_skip_freq", "linear_attention_freq")
    if job.pipeline_model_parallel_layout or any(isinstance(getattr(job, name, None), list) for name in lists):
        return True
    named = ("--fp8-bf16-layers", "--fp8-emulate-layers")
    patterns = ",".join(word for flag, values in flags if flag in named for word in values)
    return any(char.isdigit() for char in patterns.replace("fc1", "").replace("fc2", ""))


def _fewer_layers(job: Namespace) -> dict[str, int]:
    """{flag: value} of a model whose virtual stages have one or two layers; a fuller stage has one more."""
    stages, virtual = job.pipeline_model_parallel_size, job.virtual_pipeline_model_parallel_size or 1
    given = {
        flag: count
        for flag in ("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers")
        if (count := _of(job, flag)) is not None
    }
    extra = bool(job.account_for_embedding_in_pipeline_split) + bool(job.account_for_loss_in_pipeline_split)
    middle = (job.num_layers + extra - sum(given.values())) // (max(stages - len(given), 1) * virtual)
    few = min(middle, 2 if stages * virtual <= 4 else 1)
    found = {flag: _ranked(count // virtual, middle, few) * virtual for flag, count in given.items()}
    layers = sum(found.values()) + few * virtual * (stages - len(given)) - extra
    ends = job.num_layers_at_start_in_bf16 + job.num_layers_at_end_in_bf16 if job.first_last_layers_bf16 else 0
    if layers >= job.num_layers or layers < ends:
        return {}
    found["--num-layers"] = layers
    if job.num_layers_per_virtual_pipeline_stage is not None:
        found["--num-layers-per-virtual-pipeline-stage"] = few
    if job.recompute_num_layers is not None:
        found["--recompute-num-layers"] = min(job.recompute_num_layers, few)
    return found


def _ranked(count: int, middle: int, few: int) -> int:
    """A stage's layers if middle stages have `few`: fewer, as many or more, as `count` is to `middle`."""
    return few if count == middle else few + 1 if count > middle else max(1, few - 1)


def _fewer_micro_batches(job: Namespace, count: int) -> int:
    """One more than the stages; with virtual stages, two groups of the interleaved schedule."""
    stages = job.pipeline_model_parallel_size
    if job.virtual_pipeline_model_parallel_size:
        return min(count, 2 * (job.microbatch_group_size_per_vp_stage or stages))
    return min(count, stages + 1)


def _fixed(job: Namespace, batch: int, mock_data: bool, storage: str, has_storage: bool) -> Iterator:
    """The flags for how long and how a rehearsal trains."""
    given = f"--global-batch-size {batch} --train-iters {STEPS} --lr-decay-iters 1000 --eval-iters 1"
    given += " --eval-interval 1000000 --log-interval 1 --num-workers 0 --distributed-backend gloo"
    given += " --distributed-timeout-minutes 10"
    if job.lr_decay_style == "WSD":
        given += " --lr-wsd-decay-iters 1"
    if job.async_save and not installed("nvidia_resiliency_ext"):  # the job's machines may have it
        given += " --async-strategy mcore"
    if mock_data:
        given += " --mock-data --tokenizer-type NullTokenizer --split 98,1,1"
    if not has_storage:
        given += f" --fp8-grad-accum {storage}"
    return flags_of(given.split())


def _of(job: Namespace, flag: str):
    value = getattr(job, flag[2:].replace("-", "_"), None)
    return ",".join(map(str, value)) if isinstance(value, tuple) else value
