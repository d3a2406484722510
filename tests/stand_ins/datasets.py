"""In place of the package, what Megatron's SFT dataset uses of it: a reader of JSON lines."""

import json
from pathlib import Path


def load_dataset(kind: str, data_files: str, split: str) -> list[dict]:
    assert (kind, split) == ("json", "all")
    return [json.loads(line) for line in Path(data_files).read_text().splitlines()]
