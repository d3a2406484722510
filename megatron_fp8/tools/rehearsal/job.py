"""Have Megatron and the plugin parse a job's command at full size: validate, refuse or adapt its flags. Builds nothing.

This runs in a fork of a warm process, as rank 0 of all of the job's ranks, so that a mistake ends only the fork.
"""

import contextlib
import io
import math
import os
import pickle
import sys
import traceback
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ...errors import NoSuchFile, UserError
from ...flags.command import Flags, Launch, flags_of, words_of
from ...flags.flag import whole_number
from ...flags.level import STOCK
from ...metrics import VARIABLE as METRICS
from ...rebind import Rebound

_OF_DATA = ("--data-path", "--train-data-path", "--valid-data-path", "--test-data-path", "--data-args-path",
            "--per-split-data-args-path", "--per-dataset-sequences-path", "--vocab-file", "--merge-file",
            "--tokenizer-model")  # fmt: skip
_OUR_SCRIPT = "pretrain_gpt_fp8.py"  # it has no flags of its own
_GPT2 = 50257  # tokens
# Flags for Transformer Engine's attention, which needs a GPU. A level has context parallelism of its own too.
_CONTEXT = "--context-parallel-size"
_ATTENTION = ("--cp-comm-type", "--hierarchical-context-parallel-sizes", _CONTEXT)
_WITH_TE = ("--fp8-attention", "--log-max-attention-logit", "--dataloader-inter-document-masking",
            "--reset-attention-mask")  # fmt: skip


@dataclass
class Job:
    """A job at full size.

    Attributes:
        flags: the script's, without those that need Transformer Engine's attention, which are not rehearsed.
        context: its context-parallel size if Transformer Engine or stock does it. `args` then say 1, and their
            data-parallel size is what remains beside it. Else 1.
        args: Megatron's, validated; None if validation failed.
        cells: {name: value} of the level's table; None without a level.
        level: its name; "" if the flags could not be read.
        said: the [fp8] lines of the log.
        error: why the job would not start, a line for each reason; or "".
        missing: which of its data is not here; or "".
        guessed: what was assumed; or "".
        unseen: the flags that were left out.
    """

    flags: Flags
    context: int = 1
    args: Namespace | None = None
    cells: Mapping[str, str] | None = None
    level: str = ""
    said: tuple[str, ...] = ()
    error: str = ""
    missing: str = ""
    guessed: str = ""
    unseen: tuple[str, ...] = ()


def examine(launch: Launch, gpus: int) -> Job:
    """The job of a command on `gpus` GPUs. Missing data or Transformer Engine is tolerated, and so are unknown flags if
    they may be the script's own.

    Raises UserError if the job's sizes are not in its flags.
    """
    given = dict(launch.flags)
    if "--use-checkpoint-args" in given:
        raise UserError("--use-checkpoint-args: the sizes are in a checkpoint; give them as flags instead")
    unknown = os.path.basename(launch.script[-1]) != _OUR_SCRIPT
    job = _in_a_fork(launch, launch.flags, gpus, unknown)
    if job.missing:
        missing, guessed = job.missing, ""
        flags_without = [(flag, values) for flag, values in launch.flags if flag not in _OF_DATA]
        mock = "--mock-data --tokenizer-type NullTokenizer".split()
        if "--vocab-size" not in given:
            mock += ["--vocab-size", str(_GPT2)]
            if given.get("--tokenizer-type", ["GPT2BPETokenizer"]) != ["GPT2BPETokenizer"]:
                guessed = f"a vocabulary of {_GPT2} tokens, GPT-2's, since the job's is not known here (--vocab-size)"
                mock += ["--make-vocab-size-divisible-by", "128"]  # the job's may not fit an FP8 head; this does
        job = _in_a_fork(launch, [*flags_without, *flags_of(mock)], gpus, unknown)
        job.missing, job.guessed = missing, guessed
    of_te = given.get("--fp8-attention") == ["te"]
    left_out = (*_ATTENTION, *_WITH_TE) if of_te else _ATTENTION if job.level in ("", STOCK) else ()
    job.flags = [(flag, values) for flag, values in launch.flags if flag not in left_out]
    job.unseen = tuple(" ".join([flag, *values]) for flag, values in launch.flags if flag in left_out)
    job.context = size_of(given, _CONTEXT) if left_out else 1
    return job


def gpus_of(launch: Launch, given: int | None) -> int:
    """The job's number of GPUs: `given` by --gpus, or by the command, or else that of one replica.

    Raises UserError if --gpus and the command differ.
    """
    if given and launch.gpus not in (None, 1, given):  # 1: no launcher, or it gives no number
        remedy = "remove --gpus, or change the command"
        raise UserError(f"--gpus {given}: the command starts {launch.gpus} processes; {remedy}")
    return given or launch.gpus or _gpus_of_one_replica(launch.flags)


def _gpus_of_one_replica(flags: Flags) -> int:
    given = dict(flags)
    tensor = size_of(given, "--tensor-model-parallel-size")
    experts = size_of(given, "--expert-model-parallel-size")
    of_experts = size_of(given, "--expert-tensor-parallel-size") if "--expert-tensor-parallel-size" in given else tensor
    dense = tensor * size_of(given, "--context-parallel-size")
    return size_of(given, "--pipeline-model-parallel-size") * math.lcm(dense, experts * of_experts)


def size_of(given: Mapping[str, list[str]], flag: str) -> int:
    """The value of a flag that counts ranks; 1 if it is missing or not a number."""
    return whole_number(" ".join(given.get(flag, []))) or 1


def _in_a_fork(launch: Launch, flags: Flags, gpus: int, unknown: bool) -> Job:
    reading, writing = os.pipe()
    sys.stdout.flush()
    process = os.fork()
    if process == 0:
        os.close(reading)
        try:
            with open(writing, "wb") as result:
                pickle.dump(_examine(launch, flags, gpus, unknown), result)
        except (KeyboardInterrupt, BrokenPipeError):  # Ctrl-C, here or in the waiting process; the latter reports it
            pass
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as result:
        text = result.read()
    os.waitpid(process, 0)
    if not text:
        raise RuntimeError("the job's flags could not be examined; what was wrong is above")
    return pickle.loads(text)


@contextlib.contextmanager
def only_looking() -> Iterator[None]:
    """In here a run that begins touches nothing, and finds every package that it asks for.

    The job's folders are the job's, may not be here, and a run may hold them. The job's machines may have Transformer
    Engine, for its attention, and what other flags need.
    """
    from ... import packages
    from ...checkpoint import saves
    from ...flags import checks, config
    from ...monitor import probe

    replaced = Rebound()
    replaced.replace(saves, "claim", lambda save, flag: None)
    replaced.replace(probe, "make", lambda folder: None)
    replaced.replace(checks, "check_files", lambda args: None)
    for module in config, packages:
        replaced.replace(module, "installed", lambda module: True)
    try:
        yield
    finally:
        replaced.put_back()


def _examine(launch: Launch, flags: Flags, gpus: int, unknown: bool) -> Job:
    os.environ |= {**launch.variables, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(gpus)}
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    sys.argv = [launch.script[-1], *words_of(flags)]
    from ...flags import config
    from ...flags.level import CELLS
    from ...flags.own_script import check_own_script
    from ...flags.stock_errors import stock_mistake
    from ...plugin import install
    from .late_checks import check_layers, check_ranks

    install()
    os.environ.pop(METRICS, None)
    import megatron.training.arguments as arguments

    job = Job(flags)
    printed, complaints = io.StringIO(), io.StringIO()
    try:
        with only_looking(), contextlib.redirect_stdout(printed), contextlib.redirect_stderr(complaints):
            args = arguments.parse_args(ignore_unknown_args=unknown)
            fp8 = config.config_from_args(args)  # for its cells, which validation does not adapt
            job.level = STOCK if fp8 is None else fp8.level
            args.tokenizer_type = args.tokenizer_type or "GPT2BPETokenizer"
            if fp8 is not None:
                args.log_max_attention_logit = False  # the level has checked it; stock would demand Transformer Engine
            arguments.validate_args(args)
            if not unknown:
                check_own_script(args)
            if fp8 is None or fp8.attention == "te":
                args.context_parallel_size = 1
            if fp8 is not None and not unknown and args.yaml_cfg is None:  # which may refuse a flag too
                check_layers(arguments.core_transformer_config_from_args(args))
            check_ranks(args)
    except SystemExit as end:
        said = complaints.getvalue().strip().splitlines()
        job.error = said[-1] if said else f"exits while it reads its flags, with exit code {end.code}"
    except Exception as error:
        ours = (str(reason).replace("\n", r"\n") for reason in error.args)
        mistake = "\n".join(ours) if isinstance(error, UserError) else stock_mistake(error)
        if mistake is None:  # not from a check of a flag: it may be our bug
            traceback.print_exc()
        job.error = mistake or " ".join(f"{type(error).__name__}: {error}".split())
        job.missing = job.error if isinstance(error, NoSuchFile) else ""
    else:
        job.args = Namespace(**{name: value for name, value in vars(args).items() if _travels(value)})
        if fp8 is not None:
            job.cells = {cell.name: getattr(fp8, cell.name) for cell in CELLS}
    job.said = tuple(line for line in printed.getvalue().splitlines() if line.startswith("[fp8]"))
    return job


def _travels(value) -> bool:
    try:
        pickle.dumps(value)
    except Exception:
        return False
    return True
