"""If Megatron ends with exit code 0 while it reads a checkpoint, a level prints one line that says why."""

import sys
from types import SimpleNamespace

import pytest
import torch
from megatron.core.optimizer import optimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from megatron.training import checkpointing
from small_checkpoints import STOCKS, TRACKER, load, one_rank, save, unsealed
from test_seal import line_of

from megatron_fp8.checkpoint import loads
from megatron_fp8.checkpoint.refusals import is_misfit, one_line
from megatron_fp8.checkpoint.seal import SEAL

__all__ = ["load", "one_rank"]


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b"", lambda data: b"x" * 100])
def test_a_file_of_the_older_format(load, tmp_path, damage):
    path = tmp_path / "iter_0000002/mp_rank_00/model_optim_rng.pt"
    path.parent.mkdir(parents=True)
    torch.save({"iteration": 2, "args": None}, path)
    (tmp_path / TRACKER).write_text("2")
    path.write_bytes(damage(path.read_bytes()))
    line = line_of(lambda: load(tmp_path))
    assert line.startswith(f"--load {tmp_path}: {path} cannot be read: "), line
    assert line.endswith("; restore it from a copy"), line
    older = tmp_path / "iter_0000001/mp_rank_00/model_optim_rng.pt"
    older.parent.mkdir(parents=True)
    torch.save({"iteration": 1, "args": None}, older)
    assert line_of(lambda: load(tmp_path)).endswith("; iter_0000001 is there too, without a seal: add --ckpt-step 1")
    assert load(tmp_path, ckpt_step=1) == 1


def megatron(body: str):
    """A function that ends the process as Megatron's do."""
    names = {"sys": sys}
    exec(f"def load_checkpoint(checkpoint_name='a/b.pt'):\n {body}", names)
    return names["load_checkpoint"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            "try: {}['total_iters']\n except KeyError: sys.exit()",
            "does not contain its iteration; add --finetune",
        ),
        (
            "try: raise KeyError\n except KeyError: sys.exit(0)",
            "has no random states that this run can load; add --no-load-rng or --finetune",
        ),
        ("sys.exit()", "cannot be read: Megatron ended while it read it"),
        ("try: 1 / 0\n except Exception: sys.exit()", "cannot be read: division by zero"),
    ],
)
def test_why_it_ended(body, said):
    def act():
        with one_line("there", "it does not fit", lambda error: False):
            megatron(body)()

    assert line_of(act).startswith(f"--load there: a/b.pt {said}")


def test_masters_that_were_not_saved():
    """Stock's optimizer without --use-distributed-optimizer, in whose state are no masters of this run's parameters."""
    optimizer = SimpleNamespace(
        optimizer=torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))]), grad_scaler=None,
        _filter_and_reorder_param_groups=lambda now, saved: saved, fp32_from_float16_groups=[],
        config=SimpleNamespace(fp16=False),
    )  # fmt: skip
    state = {"optimizer": optimizer.optimizer.state_dict()}

    def act():
        with one_line("there", "it does not fit", is_misfit):
            Float16OptimizerWithFloat16Params.load_state_dict(optimizer, state)

    assert line_of(act) == (
        "--load there: it does not fit: it has no 'fp32_from_fp16'; add --no-load-optim or --finetune"
    )
    with pytest.raises(KeyError), one_line("there", "it does not fit", is_misfit):
        {}["fp32_from_fp16"]


@pytest.mark.parametrize(
    ("function", "looks_up", "has"),
    [
        ("load_state_dict", "{}['param_groups']", {"param_groups": []}),
        ("load_state_dict", "{}['decay']", {}),
        ("load_state_dict", "{}[3]", {}),
        ("load_state_dict", "raise_key_error()", {}),
        ("load_checkpoint", "{}['optimizer']", {"optimizer": {}}),
        ("load_checkpoint", "state_dict['model']", {}),
    ],
)
def test_what_is_looked_up_elsewhere_is_no_missing_part(function, looks_up, has):
    """In Megatron's own functions: a dict of the optimizer, or a name that is no part of a checkpoint."""
    file = optimizer.__file__ if function == "load_state_dict" else checkpointing.__file__
    names = {"raise_key_error": lambda: {}.pop("param_groups")}
    exec(compile(f"def {function}(state_dict):\n {looks_up}", file, "exec"), names)
    with pytest.raises(KeyError), one_line("there", "it does not fit", is_misfit):
        names[function](has)


@pytest.mark.parametrize("code", [1, 2, "a word"])
def test_an_end_that_says_so_itself(code):
    with pytest.raises(SystemExit) as ended, one_line("there", "it does not fit", lambda error: False):
        sys.exit(code)
    assert ended.value.code == code


def test_exit_on_missing_checkpoint(load, tmp_path):
    line = line_of(lambda: load(tmp_path, exit_on_missing_checkpoint=True))
    assert line == (
        f"--load {tmp_path}: there is no checkpoint; give the folder that --save wrote, or remove "
        "--exit-on-missing-checkpoint"
    )
    assert load(tmp_path) is None  # the second remedy
    save(tmp_path, 5)
    assert load(tmp_path, exit_on_missing_checkpoint=True) == 5


def test_a_run_that_found_no_checkpoint_says_that_its_weights_are_random(load, tmp_path, capsys):
    """Stock only warns of a misspelt --load. The first start of a run that loads what it saves says nothing."""
    loads.forget_said()
    (tmp_path / "link").symlink_to(tmp_path)
    for saves in (tmp_path, tmp_path / "link"):
        assert load(tmp_path, save=str(saves)) is None and "[fp8]" not in capsys.readouterr().out
    for saves in (str(tmp_path / "other"), None):
        loads.forget_said()
        assert load(tmp_path, save=saves) is load(tmp_path, save=saves) is None
        said = [line for line in capsys.readouterr().out.splitlines() if "[fp8]" in line]
        assert len(said) == 1 and said[0].startswith(f"[fp8] --load {tmp_path}: there is no checkpoint, so the weights")
    save(tmp_path, 5)
    loads.forget_said()
    assert load(tmp_path, save=None) == 5 and "[fp8]" not in capsys.readouterr().out


@pytest.mark.parametrize("others", ["sealed", "stock's", "none"])
def test_seal_and_metadata_both_gone(load, tmp_path, others):
    """torch's own message would be "metadata is None"."""
    if others != "none":
        save(tmp_path, 5, *([] if others == "sealed" else [unsealed]), content_metadata=STOCKS)
        save(tmp_path, 3, unsealed, content_metadata=STOCKS)
    checkpoint = save(tmp_path, 10)
    for name in (SEAL, ".metadata"):
        (checkpoint / name).unlink()
    rest = {
        "sealed": "iter_0000005 is intact: add --ckpt-step 5",
        "stock's": "iter_0000005 is there too, without a seal: add --ckpt-step 5",
        "none": "no other checkpoint there is intact: restore it from a copy",
    }[others]
    missing = "iter_0000010/.metadata is missing, or cannot be read"
    assert line_of(lambda: load(tmp_path)) == f"--load {tmp_path}: {missing}; {rest}"
    if others != "none":
        assert load(tmp_path, ckpt_step=5) == 5
