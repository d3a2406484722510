"""Conversations for --sft in tests, which tests/scripts/sft.py reads."""

import json
import random
from pathlib import Path


def write_conversations(path: Path, lines: int = 64, most: int = 4) -> str:
    """Write lines of one to `most` short conversations; return the file's name. The prompt is a letter, the answer its
    successors."""
    rng = random.Random(3)

    def one() -> list[dict]:
        letter = rng.randrange(97, 117)
        asked, told = chr(letter) * rng.randrange(1, 5), "".join(chr(letter + i) for i in range(1, rng.randrange(3, 6)))
        messages = ("system", "say"), ("user", asked), ("assistant", told)
        return [{"role": role, "content": content} for role, content in messages]

    found = ([message for _ in range(rng.randrange(1, most + 1)) for message in one()] for _ in range(lines))
    path.write_text("".join(json.dumps({"messages": line}) + "\n" for line in found))
    return str(path)
