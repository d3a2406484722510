"""Collects reproducible English and C text from Debian's packages, as one .jsonl file each, with a manifest.

    python tools/collect_text.py runs/text                          fetches the packages (apt-get download, 260 MB)
    python tools/collect_text.py runs/text --packages FOLDER        uses the .deb files in FOLDER

    OUTPUT/english.jsonl    manuals and a dictionary: HTML and plain text; one document a line, {"text": ...}
    OUTPUT/c.jsonl          C from the Linux kernel's source
    OUTPUT/manifest.json    each package's version, SHA-256 and its copyright file's SHA-256; each part's number of
                            documents, bytes and SHA-256

A document is left out if it is short, if most of its lines are in earlier documents (manuals repeat themselves), or if
it equals an earlier one.  Documents are sorted by a hash, so the first part of a file is a random sample of it, and the
order depends only on the packages.  The packages contain their licences; this repository contains none of the text.
`python tools/prepare_data.py OUTPUT/english.jsonl --tokenizer gpt2 ...` makes a Megatron dataset from a part.
"""

import argparse
import gzip
import hashlib
import html
import io
import json
import lzma
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

ENGLISH = """dict-gcide bible-kjv-text debian-reference-en debian-policy developers-reference git-doc glibc-doc
    linux-doc-6.1 maxima-doc perl-doc postgresql-doc-15 python3.11-doc sqlite3-doc""".split()
C = ["linux-source-6.1"]
SHORTEST = 500  # characters; a shorter page is an index or a redirect
MOST_REPEATED = 0.5  # largest share of a document's lines that earlier documents have
TEXTS = re.compile(r"\.(html?|txt|pod|md|rst|dict\.dz)(\.gz)?$")
# Other languages, and lists that are not prose.
SKIPPED = re.compile(r"genindex|searchindex|/_sources/|\.(de|es|fr|it|ja|pt|pt-br|ru|zh-cn|zh-tw|id|pl|sv|cs|nl)\.")
CODE = re.compile(r"^[^/]+/(kernel|mm|fs|net|lib|block|crypto|ipc|init|security|sound/core|drivers/base)/.*\.[ch]$")


class _Prose(HTMLParser):
    """The text of a page without its scripts, styles and navigation."""

    LEFT_OUT = ("script", "style", "nav", "head", "svg")
    BREAKS = ("p", "div", "li", "tr", "pre", "br", "dt", "dd", "h1", "h2", "h3", "h4", "table", "section")

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.inside = 0

    def handle_starttag(self, tag, attrs):
        self.inside += tag in self.LEFT_OUT
        if tag in self.BREAKS:
            self.parts.append("\n")

    def handle_endtag(self, tag):
        self.inside -= tag in self.LEFT_OUT and self.inside > 0

    def handle_data(self, data):
        if not self.inside:
            self.parts.append(data)


def prose(page: str) -> str:
    """An HTML page's text, with several blank lines made one."""
    parser = _Prose()
    parser.feed(page)
    parser.close()
    return re.sub(r"\s*\n\s*\n\s*", "\n\n", html.unescape("".join(parser.parts))).strip()


def members(package: Path) -> Iterator[tuple[str, bytes]]:
    """(name, content) of a .deb's regular files, in the package's order."""
    stream = subprocess.run(["dpkg-deb", "--fsys-tarfile", package], stdout=subprocess.PIPE, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(stream)) as files:
        for member in files:
            if member.isfile():
                content = files.extractfile(member)
                assert content is not None  # a plain file has content
                yield member.name.removeprefix("./"), content.read()


def english(package: Path) -> Iterator[str]:
    """The documents in a manual or dictionary."""
    for name, content in members(package):
        if TEXTS.search(name) and not SKIPPED.search(name) and "/copyright" not in name:
            if name.endswith((".gz", ".dz")):
                content = gzip.decompress(content)
            text = content.decode("utf-8", errors="replace")
            if ".htm" in name:
                yield prose(text)
            elif ".dict" in name:  # an entry begins at a line's start, its text is indented
                yield from re.split(r"\n(?=\S)", text)
            else:
                yield text


def code(package: Path) -> Iterator[str]:
    """The C files in the chosen folders of the kernel."""
    for name, content in members(package):
        if name.endswith(".tar.xz"):
            with tarfile.open(fileobj=io.BytesIO(lzma.decompress(content))) as files:
                for member in files:
                    if member.isfile() and CODE.search(member.name):
                        found = files.extractfile(member)
                        assert found is not None  # a plain file has content
                        yield found.read().decode("utf-8", errors="replace")


def together(entries: Iterator[str], size: int = 4000) -> Iterator[str]:
    """Join short entries (a dictionary's) into documents of at least `size` characters."""
    held: list[str] = []
    for entry in entries:
        held.append(entry)
        if sum(map(len, held)) >= size:
            yield "\n".join(held)
            held = []
    if held:
        yield "\n".join(held)


def digest(text: str | bytes) -> bytes:
    """A text's 16-byte hash."""
    return hashlib.blake2b(text.encode() if isinstance(text, str) else text, digest_size=16).digest()


def distinct(documents: Iterator[str]) -> list[str]:
    """The documents that are long enough and mostly new, sorted by their hashes."""
    lines, whole, kept = set(), set(), []
    for text in documents:
        found = {digest(line) for line in map(str.strip, text.splitlines()) if len(line) > 30}
        repeated = len(found & lines) > MOST_REPEATED * len(found)
        if len(text) >= SHORTEST and found and not repeated and digest(text) not in whole:
            whole.add(digest(text))
            kept.append(text)
        lines |= found
    return sorted(kept, key=digest)


def fetch(names: list[str], folder: Path) -> None:
    """Download the newest .deb files of the packages that are missing in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = [name for name in names if not list(folder.glob(f"{name}_*.deb"))]
    if missing:
        subprocess.run(["apt-get", "download", "-qq", *missing], cwd=folder, check=True)


def collect(packages: Path, output: Path) -> dict:
    """Write the parts and the manifest. Returns the manifest."""
    manifest: dict = {"packages": {}, "parts": {}}
    output.mkdir(parents=True, exist_ok=True)
    for part, names, read in ("english", ENGLISH, english), ("c", C, code):
        documents: list[str] = []
        for name in names:
            package = max(packages.glob(f"{name}_*.deb"))
            found = read(package)
            documents += together(found) if name.startswith("dict-") else found
            rights = [content for member, content in members(package) if member.endswith("/copyright")]
            manifest["packages"][package.name] = {
                "sha256": hashlib.sha256(package.read_bytes()).hexdigest(),
                "copyright_sha256": [hashlib.sha256(content).hexdigest() for content in rights],
            }
            print(f"{package.name}: read", flush=True)
        kept = distinct(iter(documents))
        lines = "".join(json.dumps({"text": text}) + "\n" for text in kept)
        (output / f"{part}.jsonl").write_text(lines)
        size = sum(len(text.encode("utf-8", errors="replace")) for text in kept)
        sha = hashlib.sha256(lines.encode()).hexdigest()
        manifest["parts"][part] = {"documents": len(kept), "bytes": size, "sha256": sha}
        print(f"{part}: {len(kept):,} documents, {size:,} bytes", flush=True)
    (output / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return manifest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path, help="folder for english.jsonl, c.jsonl and manifest.json")
    parser.add_argument("--packages", type=Path, help="folder with the .deb files; missing ones are fetched into it")
    args = parser.parse_args()
    packages = args.packages or args.output / "packages"
    try:
        fetch([*ENGLISH, *C], packages)
        collect(packages, args.output)
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"collect_text: {error}")


if __name__ == "__main__":
    main()
