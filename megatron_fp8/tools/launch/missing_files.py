"""Warns of files that a job's tasks may not find: outside a container's mounts, in a node's own /tmp, a missing image.

A job would fail only after it has waited for its nodes. These are notes and no errors: an image may contain the file, a
cluster may share its /tmp, and its nodes may have files that this machine lacks.
"""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from .script import Settings

_CACHE = "--data-cache-path"  # rank 0 writes the samples' index there, and all ranks read it
_FILES = (
    _CACHE, "--data-path", "--train-data-path", "--valid-data-path", "--test-data-path", "--data-args-path",
    "--per-split-data-args-path", "--per-dataset-sequences-path", "--tokenizer-model", "--vocab-file", "--merge-file",
    "--load", "--pretrained-checkpoint", "--tensorboard-dir", "--nccl-communicator-config-path",
)  # fmt: skip
_OF_A_NODE = "/tmp", "/var/tmp", "/dev/shm", "/run"


def unseen(job: Settings, given: Mapping[str, list[str]]) -> list[str]:
    """One line for each path, of the job or in the flags `given`, that some of its tasks may not see."""
    mounts = [mount.split(":") for mount in job.mounts.split(",") if mount]
    inside = [Path((mount + mount)[1]) for mount in mounts]  # FROM alone is its own TO
    inside += Path.cwd(), job.script.parent, job.folder, job.save
    lines = []
    if re.match(r"[/.]|.*\.sqsh$", job.container) and not Path(job.container).is_file():  # else a registry's
        lines.append(f"--container {job.container}: no such file here; unless the nodes have it, give another")
    for flag in _FILES:
        for value in given.get(flag, []):
            if not value.startswith("/"):  # relative to this folder, which is mounted; or a blend's weight
                continue
            place = Path(value)
            if job.container and not any(place.is_relative_to(mounted) for mounted in inside):
                add = f"--mounts {shlex.quote(f'{place.parent}:{place.parent}')}"
                lines.append(f"{flag} {value}: no mount of the container has it; unless the image does, add {add}")
            elif flag == _CACHE and job.nodes > 1 and any(place.is_relative_to(local) for local in _OF_A_NODE):
                lines.append(f"{flag} {value}: on most clusters each node has its own; use a folder that all share")
    return lines
