"""Chooses the checkpoint that a run resumes from, verifies it, and refuses a bad one in one line.

    choose by --ckpt-step, or by Megatron's tracker; if the tracker names no finished one, the newest sealed one
    -> verify its seal (seal.py), before Megatron reads anything -> read -> does it fit this run?

Only unfinished saves (saves.py) are skipped.  A sealed checkpoint with a damaged or missing file is refused, even if an
older one is intact: its owner should know.  The line names the newest intact one.
"""

import contextlib
import functools
import os
import re
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.training.checkpointing import CheckpointType
from megatron.training.global_vars import get_args
from torch.distributed.checkpoint import CheckpointException, FileSystemReader

from ..errors import UserError, is_bug
from ..flags import dpo, rope
from ..flags.config import Fp8Config
from ..ranks import all_reduce_largest
from .earlier import MissingShared
from .failing import from_one_rank
from .padding import other_padding
from .refusals import is_misfit, naming_its_flag, one_line, readable
from .seal import MARK, SEAL, Broken, how_to_put_back, is_finished, is_sealed, on_rank_0, require_finished, verify
from .state import check_fits, contents_of, is_ours
from .stock_state import describe
from .tracker import TRACKER, folder_name, is_tracker, read_tracker, what_it_says


def named(load: Path) -> tuple[int, bool]:
    """(iteration, release) to resume from: the tracker's, else the newest sealed one's; (-1, False) if there is none.

    Raises OSError if the folder is not readable.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        os.scandir(load).close()  # for Path.glob an unreadable folder is empty
    written = read_tracker(load)
    if written == "release":
        return 0, True
    if is_tracker(written):
        folder = load / folder_name(int(written))
        if folder.is_dir() and not (folder / MARK).exists():
            return int(written), False
    return next(iter(sealed_iterations(load)), -1), False


def choose(load: Path, args: Namespace) -> Path | None:
    """The verified checkpoint that Megatron is about to read; None if it starts from scratch. Collective.

    Raises UserError for a damaged one.  Without a process group (--use-checkpoint-args) every process looks for itself
    and hashes no large file, because only the arguments are read.
    """
    iteration, release = (args.ckpt_step, False) if args.ckpt_step else on_rank_0(lambda: named(load))
    folder = load / ("release" if release else folder_name(iteration))
    places = [load]
    if args.non_persistent_ckpt_type == "global":
        other = Path(args.non_persistent_global_ckpt_dir or load / "non_persistent")
        places.append(other)
        newest = on_rank_0(lambda: named(other)[0] if (other / TRACKER).is_file() else -1)
        if newest >= max(iteration, 0):
            if args.ckpt_step:
                newer = f"with --non-persistent-ckpt-type global Megatron resumes from {other / folder_name(newest)}"
                raise UserError(f"--ckpt-step {iteration}: {newer}, which is newer; move that away")
            iteration, folder = newest, other / folder_name(newest)
    if iteration < 0:
        if mistaken := on_rank_0(lambda: _mistaken(*places)):
            raise UserError(f"--load {load}: {mistaken}")
        if on_rank_0(lambda: os.path.lexists(load / TRACKER)):
            says = f"{TRACKER} {what_it_says(on_rank_0(lambda: read_tracker(load)))}, but there is no checkpoint"
            raise UserError(f"--load {load}: {says}; give another folder")
        return None
    if not args.ckpt_step and not is_named(folder):
        _say_going_back_to(folder)
    _require_whole(load, folder)
    return folder


def _mistaken(load: Path, *others: Path) -> str:
    """The mistake in a --load folder without a checkpoint, with a remedy; "" if the run may start from scratch.

    others: other folders that may have checkpoints.
    """
    if load.is_file():
        return "it is a file; give the folder that --save wrote"
    if is_finished(load) or (load / MARK).exists():
        own = load.resolve()
        step = f" and --ckpt-step {int(own.name[5:])}" if re.fullmatch(r"iter_[0-9]{7,18}", own.name) else ""
        return f"this is the folder of one checkpoint; give the folder above it, {own.parent}{step}"
    folders = [folder for place in (load, *others) for folder in sorted(place.glob("iter_*"), reverse=True)]
    return next(filter(None, map(how_to_put_back, folders)), "")


@contextlib.contextmanager
def without_tracker(load: Path, args: Namespace) -> Iterator[None]:
    """Resume from the newest sealed checkpoint if there is no tracker: Megatron would start anew. Collective."""
    given = args.ckpt_step
    if not given:
        with readable(load):
            step = on_rank_0(lambda: -1 if (load / TRACKER).is_file() else named(load)[0])
        if step > 0:
            args.ckpt_step = step
            _say_going_back_to(load / folder_name(step))
    try:
        yield
    finally:
        args.ckpt_step = given


# --- wrappers of Megatron's functions (hooks.py)


def name_finished(stock: Callable) -> Callable:
    """Replaces checkpointing.read_metadata, which ends the process if the tracker contains no number."""

    def read_metadata(tracker_filename):
        folder = Path(tracker_filename).parent
        with readable(folder):
            return on_rank_0(lambda: named(folder))

    return read_metadata


def load_whole(fp8: Fp8Config | None) -> Callable:
    """Wraps checkpointing._load_base_checkpoint. Megatron calls it twice: with `rank0` for what every rank reads first,
    then for the rest.

    fp8: None if only the arguments are read (--use-checkpoint-args); whether the rest fits is then not checked.
    """

    def make(stock: Callable) -> Callable:
        def load_base_checkpoint(load_dir, args, rank0=False, *rest, **kwargs):
            given = load_dir, args, rank0, *rest
            if load_dir is None:
                return stock(*given, **kwargs)
            with naming_its_flag(load_dir, args), without_tracker(Path(load_dir), args):
                with readable(load_dir):
                    folder = choose(Path(load_dir), args) if rank0 else None
                if folder is None:
                    if rank0 and args.exit_on_missing_checkpoint:
                        said = "there is no checkpoint; give the folder that --save wrote"
                        raise UserError(f"--load {load_dir}: {said}, or remove --exit-on-missing-checkpoint")
                    if not (args.save and os.path.realpath(args.save) == os.path.realpath(load_dir)):
                        _say_at_random(str(load_dir))
                    return stock(*given, **kwargs)
                remedy = functools.partial(_remedy_alone, Path(load_dir), folder)
                with one_line(load_dir, f"{folder.name} cannot be read", lambda error: not is_bug(error), remedy):
                    loaded = stock(*given, **kwargs)
                if is_ours(loaded[0]) and not on_rank_0(lambda: is_sealed(folder)):
                    missing = f"{folder.name}/{SEAL} is missing, so damage cannot be detected"
                    raise UserError(f"--load {load_dir}: {missing}; {_remedy(Path(load_dir), folder)}")
                if fp8 is not None:
                    if loaded[3] is CheckpointType.LEGACY and not (args.finetune or args.no_load_optim):
                        says = "a checkpoint of --ckpt-format torch; a level cannot read its optimizer state"
                        raise UserError(f"--load {load_dir}: {says}; add --no-load-optim or --finetune")
                    check_fits(loaded[0], args, fp8)
                    if padding := other_padding(loaded[0].get("args"), args):
                        _say(f"{load_dir}: {padding}")
            describe(contents_of(loaded[0]))
            return loaded

        return load_base_checkpoint

    return make


def refuse_levels(stock: Callable) -> Callable:
    """Wraps checkpointing._load_base_checkpoint in a run without a level: refuses a level's optimizer state."""

    def load_base_checkpoint(load_dir, args, rank0=False, *rest, **kwargs):
        loaded = stock(load_dir, args, rank0, *rest, **kwargs)
        if rank0 and is_ours(loaded[0]):
            with naming_its_flag(load_dir, args):
                _require_whole(Path(load_dir), Path(loaded[1]))
                check_fits(loaded[0], args, None)
        return loaded

    return load_base_checkpoint


def load_in_one_line(stock: Callable) -> Callable:
    """Wraps training.load_checkpoint: an error that says that the checkpoint does not fit becomes one line."""

    def load_checkpoint(*given, **kwargs):
        args = get_args()
        with from_one_rank():
            folder = _loaded_from(args)
            with naming_its_flag(folder, args), one_line(folder, "the checkpoint does not fit this run", is_misfit):
                return stock(*given, **kwargs)

    return load_checkpoint


def compare_what_is_there(stock: Callable) -> Callable:
    """Wraps checkpointing.check_checkpoint_args: compares only arguments that the checkpoint has.

    A converted checkpoint comes from no run and has no tokenizer, for example. The factor of Llama 3's rope is compared
    too.
    """

    def check_checkpoint_args(checkpoint_args, skip_args=None):
        rope.check_loaded(checkpoint_args, get_args())
        for line in dpo.changed(checkpoint_args, get_args()):
            _say(f"{get_args().load}: {line}")
        return stock(checkpoint_args, (skip_args or set()) | (vars(get_args()).keys() - vars(checkpoint_args).keys()))

    return check_checkpoint_args


# The norm before experts: its name in Transformer Engine's spec and at a level, and its name in the local spec.
_NORM, _NORM_IN_LOCAL_SPEC = ".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_"


def by_either_name(stock: Callable) -> Callable:
    """Wraps dist_checkpointing.load: finds the norm before experts under either name, and what earlier versions saved
    otherwise (earlier.py).

    Stock's local spec saves that norm under the name of the norm before a dense MLP.
    """

    def load(sharded_state_dict, checkpoint_dir, *rest, **kwargs):
        stored = on_rank_0(lambda: _stored(checkpoint_dir))
        asked = set()
        for entry in nested_values(sharded_state_dict):
            if get_args().num_experts and isinstance(entry, ShardedTensor) and entry.key not in stored:
                local = entry.key.replace(_NORM, _NORM_IN_LOCAL_SPEC)
                entry.key = local if local in stored else entry.key
            asked.add(getattr(entry, "key", None))
        _say_what_is_left_out(checkpoint_dir, stored, asked)
        missing = MissingShared(sharded_state_dict, stored)
        if missing.found:
            _say(f"{checkpoint_dir}: shared experts were not a level's linears yet: their FP8 scales begin anew")
        loaded = stock(sharded_state_dict, checkpoint_dir, *rest, **kwargs)
        missing.put_into(loaded)
        return loaded

    return load


def _say_what_is_left_out(folder: str, stored: list[str], asked: set) -> None:
    """Log the checkpoint's model tensors that no rank reads, such as a head that is now tied. Stock ignores them
    silently. Collective.

    stored: all tensors' names, the same on all ranks; asked: the names that this rank is about to read.
    """
    of_model = [name for name in stored if "/" not in name and not name.startswith("optimizer.")]
    if not of_model:
        return
    wanted = torch.tensor([float(name in asked) for name in of_model], device="cuda")
    all_reduce_largest(wanted, None)
    if left := [name for name, found in zip(of_model, wanted.tolist(), strict=True) if not found]:
        more = f" and {len(left) - 3} more" if len(left) > 3 else ""
        _say(f"{folder}: not loaded, this run's model has none: {', '.join(left[:3])}{more}")


def _stored(folder: str) -> list[str]:
    """The names of a checkpoint's tensors; none if they cannot be read (every rank then fails when it loads)."""
    with contextlib.suppress(Exception, CheckpointException):
        return list(FileSystemReader(folder).read_metadata().state_dict_metadata)
    return []


def find_without_tracker(stock: Callable) -> Callable:
    """Wraps checkpointing.checkpoint_exists, which looks only for the tracker: without one, the run would start anew
    from --pretrained-checkpoint.

    Returns True for a mistaken or unreadable folder too: loading it then reports the mistake.
    """

    def checkpoint_exists(checkpoints_path):
        if checkpoints_path is None:
            return False
        path = Path(checkpoints_path)
        try:
            return stock(checkpoints_path) or named(path)[0] > 0 or bool(_mistaken(path))
        except OSError:
            return True

    return checkpoint_exists


def _loaded_from(args: Namespace) -> str:
    """The folder that Megatron loads: --load, or --pretrained-checkpoint if --load has no checkpoint."""
    if args.pretrained_checkpoint is None or args.load is None:
        return args.load or args.pretrained_checkpoint
    with readable(args.load):
        return args.load if named(Path(args.load))[0] >= 0 else args.pretrained_checkpoint


@functools.cache  # Megatron looks for the checkpoint twice or more
def _say_going_back_to(folder: Path) -> None:
    _say(f"{folder.parent}: the last save was interrupted; going back to {folder.name}")


@functools.cache
def _say_at_random(load: str) -> None:
    """Of a run that saves elsewhere: one that resumes itself finds nothing in its first start."""
    _say(
        f"{load}: there is no checkpoint, so the weights begin at random; if they should not, give the folder that "
        "--save wrote (with --exit-on-missing-checkpoint such a run ends here)"
    )


def forget_said() -> None:
    """Say it again in the next run."""
    _say_going_back_to.cache_clear()
    _say_at_random.cache_clear()


def _say(line: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"[fp8] --load {line}", flush=True)


def _require_whole(load: Path, folder: Path) -> None:
    """Raise UserError unless a checkpoint is finished and matches its seal. Collective."""
    try:
        on_rank_0(lambda: require_finished(folder))
        verify(folder, everything=False)
    except Broken as broken:
        raise UserError(f"--load {load}: {folder.name}{broken}; {_remedy(load, folder)}") from None


def _remedy(load: Path, folder: Path) -> str:
    """Remedy for a bad checkpoint: another one to resume from, if there is one. Collective."""
    for other in on_rank_0(lambda: _others(load, folder)):
        with contextlib.suppress(Broken):
            verify(other, everything=False)
            return _go_on_from(load, folder, other, "intact" if dist.is_initialized() else "sealed")
    return on_rank_0(lambda: _mistaken(load)) or "no other checkpoint there is intact: restore it from a copy"


def _remedy_alone(load: Path, folder: Path) -> str:
    """The same for one rank alone: the other ranks may not have failed, so nothing is hashed."""
    other = next(iter(_others(load, folder)), None)
    return "restore it from a copy" if other is None else _go_on_from(load, folder, other, "sealed")


def _others(load: Path, folder: Path) -> list[Path]:
    """The other sealed checkpoints, the newest first, then stock Megatron's, which have no seal."""
    sealed = [load / folder_name(iteration) for iteration in sealed_iterations(load)]
    found = (path for path in load.glob("iter_*") if re.fullmatch(r"iter_[0-9]{7,18}", path.name))
    stocks = sorted((path for path in found if path not in sealed and is_finished(path)), reverse=True)
    return [path for path in [*sealed, *stocks] if path != folder]


def _go_on_from(load: Path, folder: Path, other: Path, how: str) -> str:
    said = f"{other.name} is {how}" if is_sealed(other) else f"{other.name} is there too, without a seal"
    flag = "remove --non-persistent-ckpt-type" if folder.parent != load else f"add --ckpt-step {int(other.name[5:])}"
    return f"{said}: {flag}"


def is_named(folder: Path) -> bool:
    """Whether the tracker names this checkpoint."""
    written = read_tracker(folder.parent)
    return folder.name == (folder_name(int(written)) if written.isdecimal() and is_tracker(written) else written)


def sealed_iterations(load: Path) -> list[int]:
    """The iterations of sealed checkpoints, the newest first."""
    folders = (path.parent for path in load.glob(f"iter_*/{SEAL}") if not (path.parent / MARK).exists())
    numbers = {int(f.name[5:]): f.name for f in folders if re.fullmatch(r"iter_[0-9]{7,18}", f.name)}
    return sorted((i for i, name in numbers.items() if name == folder_name(i)), reverse=True)
