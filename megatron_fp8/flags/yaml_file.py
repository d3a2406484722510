"""A YAML file, read by libyaml where PyYAML has it, within bounds: all of the project's YAML comes through here.

A file may be another user's. So its size is bounded before it is parsed; its depth, since PyYAML and libyaml descend by
recursion and end the process; and the number of its values with aliases written out, since `<<: [*a, *a]`, in a few
lines that refer to one another, becomes more than fits into memory. All of it is counted on libyaml's stream of events,
before anything is built of them.
"""

import functools
from collections.abc import Hashable
from pathlib import Path
from typing import Any

from ..errors import UserError, is_bug

LARGEST = 2**20  # bytes; the largest of this repository's has 3,000
DEEPEST = 50
MOST_VALUES = 100_000


def load_yaml(path: str | Path, place: str = "", remedy: str = "give a YAML file", loader: type | None = None) -> Any:
    """What a file holds, constructed by `loader` (`safe_loader()`, or a class of it).

    Raises UserError of one line, which begins with `place` (default: the path).
    """
    place = place or str(path)
    try:
        with open(path, "rb") as file:
            content = file.read(LARGEST + 1)  # a pipe has no size
            size = max(Path(path).stat().st_size, len(content))
    except OSError as error:
        raise UserError(f"{place}: {error.strerror}; {remedy}") from None
    if len(content) > LARGEST:
        said = f"{size:,} bytes" if size > len(content) else f"more than {LARGEST:,} bytes"
        raise UserError(f"{place}: {said}; a YAML file may have {LARGEST:,}: split it, or {remedy}")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{place}: not text in UTF-8, from byte {error.start} on; {remedy}") from None
    loader = loader or safe_loader()
    try:
        _check_bounds(text, loader)
        return _construct(text, loader)
    except UserError as error:
        raise UserError(f"{place}: {error}") from None
    except Exception as error:  # a YAMLError; or of a tag on what is none, as !!timestamp x
        if is_bug(error):
            raise
        said = " ".join(str(error).split())[:300] or type(error).__name__
        raise UserError(f"{place}: not YAML: {said}") from None


def _construct(text: str, loader: type) -> Any:
    import yaml

    return yaml.load(text, loader)


def _check_bounds(text: str, loader: type) -> None:
    """UserError for what would take too much memory, or too deep a recursion, to build."""
    import yaml

    sizes: dict[str, int] = {}  # of what has been read to its end, by its anchor
    open_: list[tuple[str | None, int]] = [(None, 0)]  # (anchor, values so far) of the document and what encloses this
    for event in yaml.parse(text, loader):
        if isinstance(event, yaml.events.CollectionStartEvent):
            open_.append((event.anchor, 1))
            sizes.pop(event.anchor, None)
            if len(open_) > DEEPEST:
                raise UserError(f"its values are nested more than {DEEPEST} deep; it needs no more than a few")
            continue
        if isinstance(event, yaml.events.AliasEvent):
            anchor, size = None, sizes.get(event.anchor, 0)
            if not size and event.anchor in (name for name, _ in open_):
                raise UserError(f"*{event.anchor} stands inside of &{event.anchor}; write out what is meant")
        elif isinstance(event, yaml.events.ScalarEvent):
            anchor, size = event.anchor, 1
        elif isinstance(event, yaml.events.CollectionEndEvent):
            anchor, size = open_.pop()
        else:
            continue
        if anchor is not None:
            sizes[anchor] = size
        enclosing, before = open_[-1]
        open_[-1] = enclosing, before + size
        if before + size > MOST_VALUES:
            raise UserError(f"more than {MOST_VALUES:,} values, with its aliases written out; leave some out")


@functools.cache
def safe_loader() -> type:
    """PyYAML's safe loader, libyaml's if PyYAML was built with it, as its wheels are; refuses a key given twice."""
    import yaml

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
        """The stock one lets the last of two equal keys win: a flag or an arm would be lost without a word."""

        def __init__(self, stream: Any) -> None:
            super().__init__(stream)
            self.seen: set[int] = set()

        def flatten_mapping(self, node):
            """The first that happens to a mapping: once, since a merge (<<) of it puts other keys among its own."""
            if id(node) not in self.seen:
                self.seen.add(id(node))
                found = set()
                for key, _ in node.value:
                    value = self.construct_object(key, deep=True) if key.tag != "tag:yaml.org,2002:merge" else "<<"
                    if isinstance(value, Hashable):
                        if value in found:
                            raise UserError(f"{value}: is given twice; give it once")
                        found.add(value)
            super().flatten_mapping(node)

    return Loader
