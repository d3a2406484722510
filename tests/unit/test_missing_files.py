"""`megatron-fp8 launch` notes files that a job's tasks may not find."""

from pathlib import Path

import pytest

from megatron_fp8.tools.launch.missing_files import unseen
from megatron_fp8.tools.launch.script import Settings

JOB = {
    "name": "small", "nodes": 2, "tasks_per_node": 8, "gpus_per_node": 8, "time": "1:00:00", "steps": 9,
    "folder": Path("/shared/job"), "save": Path("/shared/job/checkpoints"), "first": [], "words": [], "variables": {},
    "script": Path("/code/pretrain_gpt_fp8.py"), "python": "python", "container": "", "mounts": "", "sbatch": "",
    "max_restarts": 3,
}  # fmt: skip


def said(given: dict[str, list[str]], **changes) -> list[str]:
    return unseen(Settings(**{**JOB, **changes}), given)


def test_an_index_in_a_nodes_own_folder(tmp_path):
    given = {"--data-cache-path": ["/tmp/index"], "--data-path": ["/tmp/text"], "--tensorboard-dir": ["/tmp/board"]}
    line = "--data-cache-path /tmp/index: on most clusters each node has its own; use a folder that all share"
    assert said(given) == [line]
    assert said(given, nodes=1) == said({"--data-cache-path": ["/tmpfs/index"]}) == said({}) == []


@pytest.mark.parametrize(
    ("place", "mounts"),
    [
        ("/shared/job/index", ""),
        ("/code/text", ""),
        ("text", ""),
        ("/data/text", "/lustre/data:/data"),
        ("/data/text", "/x:/y,/data"),
        ("/data/text", "/x:/y,/lustre:/data:ro"),
    ],
)
def test_a_container_sees_its_mounts(place, mounts):
    assert said({"--data-path": ["0.5", place]}, container="image", mounts=mounts) == []


def test_a_container_does_not_see_the_rest():
    given = {"--data-path": ["0.3", "/data/a", "0.7", "/datasets/b"], "--tokenizer-model": ["name/of-a-model"]}
    lines = said(given, container="image", mounts="/data:/data")
    advice = "no mount of the container has it; unless the image does, add --mounts /datasets:/datasets"
    assert lines == [f"--data-path /datasets/b: {advice}"]
    assert said(given) == []


def test_an_image_that_is_no_file_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for image in (f"{tmp_path}/typo.sqsh", "./typo.sqsh", "typo.sqsh", str(tmp_path)):
        line = f"--container {image}: no such file here; unless the nodes have it, give another"
        assert said({}, container=image) == [line]
    (tmp_path / "there.sqsh").touch()
    for image in ("there.sqsh", f"{tmp_path}/there.sqsh", "nvcr.io#nvidia/pytorch:25.01-py3", "docker://debian", ""):
        assert said({}, container=image) == []
