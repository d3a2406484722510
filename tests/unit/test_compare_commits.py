"""tools/compare_commits.py sees one bit, on made-up data; its runs are too long for a test."""

import copy
import io
import subprocess
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from compare_commits import CASES, _copy, compare, difference, held, read_checkpoint, read_log

LOG = (
    "[fp8] iteration 2: exact loss 5.25\n"
    " [2026-11-21 12:25:02] iteration        2/       6 | consumed samples:           16 | elapsed time per iteration"
    " (ms): {} | lm loss: {} | grad norm: 0.798 | number of skipped iterations:   0 | number of nan iterations:   0 |"
    "[fp8] iteration 2: overflows\n[fp8] iteration 2: overflows\nelsewhere\n"
)


def test_a_log_is_read_without_its_times():
    steps, ours = read_log(LOG.format("70.4", "5.016171E+00"))
    assert list(steps) == ["step 2"] and "lm loss: 5.016171E+00 | grad norm: 0.798" in steps["step 2"]
    assert ours == {"[fp8] iteration 2: exact loss 5.25": "1 times", "[fp8] iteration 2: overflows": "2 times"}
    assert read_log(LOG.format("9.1", "5.016171E+00")) == (steps, ours)
    other = read_log(LOG.format("70.4", "5.016172E+00"))[0]
    assert difference(steps, other) == "step 2: lm loss: 5.016171E+00 -> lm loss: 5.016172E+00"


NAN, ZERO = torch.tensor([float("nan"), 1.0]), torch.zeros(2, 2, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (NAN, NAN.clone(), ""),
        (torch.arange(6).view(2, 3).T, torch.arange(6).view(2, 3).T.contiguous(), ""),
        (ZERO, -ZERO, "key: 4 of 8 bytes differ"),
        (torch.tensor(1.0), torch.tensor(1.0).nextafter(torch.tensor(2.0)), "key: 1 of 4 bytes differ"),
        (ZERO, ZERO.half(), "key: torch.bfloat16 (2, 2) -> torch.float16 (2, 2)"),
        (ZERO, ZERO.view(4), "key: torch.bfloat16 (2, 2) -> torch.bfloat16 (4,)"),
        (b"pickle", b"pickles", "key: 6 bytes -> 7 bytes"),
        (b"pickle", ZERO, "key: 6 bytes -> Tensor"),
    ],
)
def test_a_difference_is_named(one, other, words):
    assert difference({"key": one}, {"key": other}) == words


def test_what_one_side_lacks_is_a_difference():
    assert difference({"a": "1"}, {"a": "1", "b": "2"}) == "b: only after"
    assert difference({"a": "1", "b": "2"}, {"a": "1"}) == "b: only before"


def test_a_case_is_equal_if_all_its_parts_are_and_there_is_something():
    found = {"steps": {"step 1": "lm loss: 5"}, "ours": {}, "saved": {"weight": ZERO}, "files": {}}
    line, equal = compare("O1", found, copy.deepcopy(found))
    assert equal and line.split() == ["O1", "1", "0", "1", "0", "equal"]
    for part, change in ("steps", "lm loss: 6"), ("ours", "said"), ("saved", -ZERO), ("files", b"probe"):
        other = copy.deepcopy(found)
        other[part][next(iter(other[part]), "new")] = change
        line, equal = compare("O1", found, other)
        assert not equal and line.count("!") == 1
    for part in "steps", "saved":
        assert compare("O1", {**found, part: {}}, {**found, part: {}})[1] is False


def test_a_checkpoint_is_read_whole_and_its_objects_are_not_unpickled(tmp_path):
    tensors = {"weight": torch.randn(4, 3, dtype=torch.bfloat16), "moment": torch.arange(3, dtype=torch.uint8)}
    with warnings.catch_warnings(action="ignore"):
        dcp.save({**tensors, "state": {"lr": 0.5}}, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    found = read_checkpoint(tmp_path)
    assert difference({name: found[name] for name in tensors}, tensors) == ""
    assert set(found) == {*tensors, "state.lr"} and "BINFLOAT 0.5" in found["state.lr"]


def test_what_a_pickle_holds_is_compared_in_any_order():
    def stored(value):
        torch.save(value, file := io.BytesIO())
        return held(file.getvalue())

    assert stored({"a": 1, "b": 2.5}) == stored({"b": 2.5, "a": 1}) != stored({"a": 1, "b": 2.25})


def test_a_folder_is_copied_as_it_is_without_what_git_ignores(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    for name, text in (".gitignore", "runs\n"), ("tracked.py", "1"), ("deleted.py", "2"):
        (here / name).write_text(text)
    for command in ("init -q", "add ."):
        subprocess.run(["git", *command.split()], cwd=here, check=True)
    for name, text in ("tracked.py", "changed"), ("new.py", "3"), ("runs", "4"):
        (here / name).write_text(text)
    (here / "deleted.py").unlink()
    _copy(str(here), there)
    assert {path.name: path.read_text() for path in there.iterdir()} == {
        ".gitignore": "runs\n",
        "tracked.py": "changed",
        "new.py": "3",
    }


def test_cases_have_names_of_their_own_and_resume_an_earlier_one():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    for case in CASES:
        assert not case.resumes or case.resumes in names[: names.index(case.name)]
