"""What Megatron and the plugin make of a job's command, at its full size: validated, refused, adapted; not built.

In a fork of a warm process, as rank 0 of all of the job's ranks, so that a mistake costs nobody else anything.
"""

import contextlib
import io
import os
import pickle
import sys
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass

from .command import Launch, words_of

_DATA_ERRORS = ("--data-path", "--train-data-path", "--valid-data-path", "--test-data-path", "--data-args-path",
                "--per-split-data-args-path", "--vocab-file", "--merge-file", "--tokenizer-model")  # fmt: skip


@dataclass
class Job:
    """A job at full size.

    Attributes:
        args: Megatron's, validated; None where that failed.
        cells: of the level's table, {name: value}; None without a level.
        level: its name; "" where the flags could not even be read.
        said: the [fp8] lines of the log.
        error: why it would not start; "".
        missing: what of its data is not here; "".
    """

    args: Namespace | None = None
    cells: Mapping[str, str] | None = None
    level: str = ""
    said: tuple[str, ...] = ()
    error: str = ""
    missing: str = ""


def examine(launch: Launch, gpus: int) -> Job:
    """The job of a command on so many GPUs; data that is not here is passed over."""
    job = _in_a_fork(launch.script, words_of(launch.flags), gpus)
    if job.error.startswith(_DATA_ERRORS):
        missing = job.error
        flags = [(flag, values) for flag, values in launch.flags if flag not in _DATA_ERRORS]
        mock = "--mock-data --tokenizer-type NullTokenizer --vocab-size 50303".split()
        job = _in_a_fork(launch.script, [*words_of(flags), *mock], gpus)
        job.missing = missing
    return job


def _in_a_fork(script: list[str], words: list[str], gpus: int) -> Job:
    reading, writing = os.pipe()
    sys.stdout.flush()
    process = os.fork()
    if process == 0:
        os.close(reading)
        with contextlib.suppress(BaseException), open(writing, "wb") as result:
            pickle.dump(_examine(script, words, gpus), result)
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as result:
        text = result.read()
    os.waitpid(process, 0)
    return pickle.loads(text)


def _examine(script: list[str], words: list[str], gpus: int) -> Job:
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(gpus)}
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    sys.argv = [script[-1], *words]
    from ..config import config_from_args
    from ..level import CELLS
    from ..plugin import install
    from ..stock_errors import stock_mistake

    install()
    import megatron.training.arguments as arguments

    job = Job()
    printed, complaints = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(complaints):
            args = arguments.parse_args(ignore_unknown_args=True)
            fp8 = config_from_args(args)  # its cells, which adaption leaves alone
            job.level = "O0" if fp8 is None else fp8.level
            args.tokenizer_type = args.tokenizer_type or "GPT2BPETokenizer"
            arguments.validate_args(args)
    except SystemExit as end:
        said = complaints.getvalue().strip().splitlines()
        job.error = said[-1] if said else f"ends while it reads its flags, with exit code {end.code}"
    except Exception as error:
        job.error = stock_mistake(error) or " ".join(str(error).split()) or type(error).__name__
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
