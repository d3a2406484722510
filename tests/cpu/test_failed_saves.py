"""A save that fails on one rank gives one line, from that rank; the others end without a line."""

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from launch import RunFailed, forked, parse_step, torchrun
from megatron_runs import ASYNCHRONOUS, TINY_GPT

pytestmark = pytest.mark.timeout(3600)
FLAGS = "--fp8-level O3 --use-distributed-optimizer --train-iters 1000 --save-interval 3"


def make_it_a_file(folder: Path) -> None:
    """Put a file in the checkpoint's place."""
    away = next(path for path in (folder.with_name(f"away{i}") for i in itertools.count()) if not path.exists())
    folder.rename(away)
    try:
        folder.touch(exist_ok=False)
    except FileExistsError:  # meanwhile the run has started a save
        make_it_a_file(folder)


def make_the_tracker_a_folder(folder: Path) -> None:
    tracker = folder / "latest_checkpointed_iteration.txt"
    tracker.unlink(missing_ok=True)
    try:
        tracker.mkdir()
    except FileExistsError:
        make_the_tracker_a_folder(folder)


def fails(spoil: Callable[[Path], None], folder: Path, flags: str = "", run=forked) -> list[str]:
    """The output of two ranks that save after `spoil(folder)` was called during the run; the run fails."""
    lines: list[str] = []

    def look(line: str) -> None:
        lines.append(line)
        if (step := parse_step(line)) and step.iteration == 2:
            spoil(folder)

    command = ["pretrain_gpt_fp8.py", *TINY_GPT, *FLAGS.split(), *flags.split(), "--save", str(folder)]
    with pytest.raises(RunFailed) as failed:
        run(2, command, folder.parent / "log.txt", timeout=900, env={"CUDA_VISIBLE_DEVICES": ""}, on_line=look)
    assert run is torchrun or failed.value.code == 2
    return lines


@pytest.mark.parametrize(
    ("spoil", "flags"),
    [
        (make_it_a_file, ""),
        pytest.param(make_the_tracker_a_folder, "", marks=pytest.mark.slow),
        pytest.param(make_it_a_file, ASYNCHRONOUS, marks=pytest.mark.slow),
        pytest.param(make_the_tracker_a_folder, f"{ASYNCHRONOUS} --save-retain-interval 6", marks=pytest.mark.slow),
    ],
)
def test_one_line_from_one_rank(tmp_path, spoil, flags):
    lines = fails(spoil, tmp_path / "save", flags)
    said = [line for line in lines if "megatron_fp8: " in line]
    assert len(said) == 1 and "could not be written (" in said[0], "\n".join(lines[-60:])
    assert not any("Traceback" in line for line in lines), "\n".join(lines[-60:])


@pytest.mark.slow
def test_one_line_under_torchrun(tmp_path):
    """torchrun prints the line once more, as the root cause."""
    lines = fails(make_it_a_file, tmp_path / "save", run=torchrun)
    said = [line for line in lines if line.startswith("megatron_fp8: ")]
    assert len(said) == 1 and "could not be written (" in said[0], "\n".join(lines[-60:])
    assert not any("[rank1]" in line or "Connection closed" in line for line in lines), "\n".join(lines[-60:])


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_file_that_one_rank_cannot_read(tmp_path, rank):
    """With --ckpt-format torch each rank reads its own file and waits for the others; Megatron exits with code 0."""
    both = ["pretrain_gpt_fp8.py", *TINY_GPT, "--tensor-model-parallel-size", "2", "--ckpt-format", "torch"]
    saved = tmp_path / "saved"
    stock = [*both, "--save", str(saved), "--save-interval", "2", "--exit-interval", "2"]
    env = {"CUDA_VISIBLE_DEVICES": ""}
    forked(2, stock, tmp_path / "log.txt", timeout=900, env=env)
    file = saved / f"iter_0000002/mp_rank_0{rank}/model_optim_rng.pt"
    whole = file.read_bytes()
    loading = [*both, "--fp8-level", "O3", "--finetune", "--load", str(saved), "--train-iters", "3"]
    for damaged in (whole[: len(whole) // 2], b"", None):
        file.unlink() if damaged is None else file.write_bytes(damaged)
        with pytest.raises(RunFailed) as failed:
            forked(2, loading, tmp_path / "log.txt", timeout=900, env=env)
        lines = (tmp_path / "log.txt").read_text().splitlines()
        said = [line for line in lines if "megatron_fp8: " in line]
        assert len(said) == 1 and str(file) in said[0] and failed.value.code == 2, "\n".join(lines[-40:])
        assert not any("Traceback" in line for line in lines), "\n".join(lines[-40:])
    shutil.rmtree(saved)
