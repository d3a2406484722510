"""A user's mistake is one line, a bug keeps its traceback: at the command line, in loading, in conversion."""

import json
import traceback
from argparse import Namespace

import pytest
import torch.distributed.checkpoint as dcp
from hf_models import saved
from plants import BUGS, MISTAKE, bug, function
from safetensors.torch import save_file
from small_checkpoints import load, one_rank, save  # noqa: F401
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner

from megatron_fp8.checkpoint.hf.config import config_of, model_args
from megatron_fp8.errors import UserError, is_bug
from megatron_fp8.flags import level
from megatron_fp8.flags.stock_errors import stock_mistake
from megatron_fp8.flags.usage import one_line_errors


def raised(call, *arguments):
    with pytest.raises(BaseException) as caught:  # CheckpointException is not an Exception
        call(*arguments)
    return caught.value


@pytest.mark.parametrize("kind", BUGS)
def test_at_the_command_line(kind, capsys):
    def main(call):
        with one_line_errors():
            call()

    assert type(raised(main, bug(level, kind))) is kind
    assert raised(main, MISTAKE).code == 2
    assert capsys.readouterr().err == "megatron_fp8: --flag 3: is wrong; use 4\n"


def test_a_bug_of_ours_while_megatrons_refusal_is_handled(tmp_path):
    """Megatron's error does not replace it."""
    file = tmp_path / "arguments.py"
    file.write_text("def planted(*_, **__):\n    assert False, 'too few layers'\n")
    check = function(str(file), "assert False, 'too few layers'", __name__="megatron.training.arguments")
    assert "too few layers" in stock_mistake(raised(check))
    ours = bug(level, KeyError)

    def handle():
        try:
            check()
        except AssertionError:
            ours()

    assert stock_mistake(raised(handle)) is None


# --- loading


@pytest.fixture
def load_checkpoint(one_rank, monkeypatch):  # noqa: F811
    """load_checkpoint(stock): our wrapper of Megatron's function, which `stock` replaces."""
    from megatron_fp8.checkpoint import loads

    monkeypatch.setattr(loads, "get_args", lambda: Namespace(load="there", pretrained_checkpoint=None))
    return lambda stock: loads.load_in_one_line(stock)()


def wrapped(error: BaseException) -> CheckpointException:
    """An exception as torch's DCP wraps it for a rank."""
    return CheckpointException("read", {0: (error, traceback.extract_tb(error.__traceback__))})


def raises(error: BaseException):
    def stock():
        raise error

    return stock


@pytest.mark.parametrize("kind", BUGS)
def test_a_bug_in_loading_keeps_its_traceback(kind, load_checkpoint):
    from megatron_fp8.engine import optimizer

    planted = bug(optimizer, kind)
    error = raised(load_checkpoint, planted)
    assert type(error) is kind and traceback.extract_tb(error.__traceback__)[-1].filename == optimizer.__file__
    inside = wrapped(raised(planted))
    assert raised(load_checkpoint, raises(inside)) is inside
    assert raised(load_checkpoint, raises(wrapped(inside))).failures[0][0] is inside


def test_what_does_not_fit_is_one_line(load_checkpoint):
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from megatron.training import checkpointing

    head = "--load there: the checkpoint does not fit this run: "
    names, of_saved = {"__name__": checkpointing.__name__}, "use the flags of the saved model"
    look_up = {}
    exec(
        compile("def load_checkpoint(state_dict={}):\n state_dict['optimizer']", checkpointing.__file__, "exec"),
        look_up,
    )
    for stock, said in (
        (raises(CheckpointingException("Global shape mismatch")), f"Global shape mismatch; {of_saved}"),
        (raises(wrapped(ValueError("Size mismatch"))), f"Size mismatch; {of_saved}"),
        (
            raises(wrapped(KeyError("head.weight"))),
            f"the checkpoint or this run's model lacks 'head.weight'; {of_saved}",
        ),
        (raises(wrapped(raised(MISTAKE))), "--flag 3: is wrong; use 4"),
        (look_up["load_checkpoint"], "it has no 'optimizer'; add --no-load-optim or --finetune"),
    ):
        assert str(raised(load_checkpoint, stock)) == head + said
    other = function(checkpointing.__file__, BUGS[KeyError], **names)  # a failed operation in Megatron's source
    assert type(raised(load_checkpoint, other)) is KeyError
    assert str(raised(load_checkpoint, MISTAKE)) == "--flag 3: is wrong; use 4"


def test_checks_of_megatrons_are_told_from_operations(load_checkpoint, tmp_path):
    head = "--load there: the checkpoint does not fit this run: "
    for statement, said in (
        ("assert found == 1, 'num_layers 3 is not 4'", "num_layers 3 is not 4"),
        (
            "raise KeyError('m.lora_a from model not in state dict: [1]')", "it has no m.lora_a; use the flags of the "
            "saved model, or --dist-ckpt-strictness log_unexpected, which begins adapters anew",
        ),
        (
            "raise KeyError('optimizer.x from model not in state dict: [1]')",
            "it has no optimizer.x; use the flags of the saved model, or add --no-load-optim or --finetune",
        ),
        ("{}['gone']", None),
        ("raise TypeError('no list')", None),
    ):
        file = tmp_path / f"of{len(list(tmp_path.iterdir()))}.py"
        file.write_text(f"def planted(*_, **__):\n    {statement}\n")
        stock = function(str(file), statement, __name__="megatron.core.optimizer", found=2)
        error = raised(load_checkpoint, stock)
        assert str(error) == head + said if said else not isinstance(error, UserError), statement


@pytest.mark.parametrize("kind", BUGS)
def test_a_bug_in_reading_keeps_its_traceback(kind, load, tmp_path, monkeypatch):  # noqa: F811
    """Also where damaged bytes may raise any exception."""
    from megatron_fp8.checkpoint import loads, pickles

    save(tmp_path, 5)
    with monkeypatch.context() as patch:
        patch.setattr(loads, "named", bug(loads, kind))
        assert type(raised(load, tmp_path)) is kind
        patch.setattr(loads, "named", MISTAKE)
        assert str(raised(load, tmp_path)) == "--flag 3: is wrong; use 4"
    with monkeypatch.context() as patch:
        patch.setattr(DefaultLoadPlanner, "load_bytes", bug(pickles, kind))
        error = raised(load, tmp_path)
        assert is_bug(error) and not isinstance(error, UserError)
    assert load(tmp_path) == 5


# --- conversion

CONFIG = json.dumps(config_of(model_args(saved())))


@pytest.mark.parametrize("kind", BUGS)
def test_a_bug_in_conversion_keeps_its_traceback(kind, tmp_path, monkeypatch):
    from megatron_fp8.checkpoint import convert

    (tmp_path / "config.json").write_text(CONFIG)
    for planted, expected in ((bug(convert, kind), kind), (MISTAKE, UserError)):
        monkeypatch.setattr(convert, "Weights", planted)
        error = raised(convert.to_megatron, str(tmp_path), str(tmp_path / "out"))
        assert type(error) is expected and "damaged" not in str(error)


@pytest.mark.parametrize("kind", BUGS)
def test_a_bug_while_a_checkpoint_is_converted_keeps_its_traceback(kind, one_rank, tmp_path, monkeypatch):  # noqa: F811
    from megatron_fp8.checkpoint import convert, pickles

    checkpoint = save(tmp_path, 5)
    monkeypatch.setattr(pickles, "data_only_objects", lambda stock: bug(pickles, kind))
    error = raised(convert.to_hf, str(checkpoint), str(tmp_path / "out"))
    assert is_bug(error) and not isinstance(error, UserError)


@pytest.mark.parametrize(
    ("text", "said"),
    [("", "damaged"), ('{"model_type":', "damaged"), ("\x00\xff", "damaged"), ("[]", "not a JSON object")],
)
def test_what_is_wrong_with_a_folder_is_one_line(text, said, tmp_path):
    from megatron_fp8.checkpoint import convert

    path = tmp_path / "config.json"
    path.write_text(text, encoding="latin-1")
    save_file({}, tmp_path / "model.safetensors")
    error = raised(convert.to_megatron, str(tmp_path), str(tmp_path / "out"))
    assert type(error) is UserError and said in str(error) and "\n" not in str(error)
    path.write_text(CONFIG)
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    error = raised(convert.to_megatron, str(tmp_path), str(tmp_path / "out"))
    assert type(error) is UserError and "damaged" in str(error)


def test_a_checkpoint_without_arguments_is_one_line(one_rank, tmp_path, monkeypatch):  # noqa: F811
    import megatron.core.dist_checkpointing.serialization as serialization

    from megatron_fp8.checkpoint import convert

    checkpoint = save(tmp_path, 5)
    monkeypatch.setattr(serialization, "load_common_state_dict", lambda folder: {"iteration": 5})
    error = raised(convert.to_hf, str(checkpoint), str(tmp_path / "out"))
    assert type(error) is UserError and "contains no run's arguments" in str(error)
    assert isinstance(raised(dcp.FileSystemReader(tmp_path / "nowhere").read_metadata), OSError)
