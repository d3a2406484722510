"""flags/yaml_file.py bounds the memory, time and stack that a hostile file can use, with either loader."""

import os
import re

import pytest
import yaml
from commands import error_of
from launch import ROOT

from megatron_fp8.flags import args_file, yaml_file
from megatron_fp8.flags.yaml_file import DEEPEST, LARGEST, MOST_VALUES, load_yaml
from megatron_fp8.tools.lab.sweep.plan_file import read_plan
from megatron_fp8.tools.perf import hardware

LAUGHS = "\n".join(["a0: &a0 [x]", *(f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 10)}]" for n in range(9))])
MERGES = LAUGHS.replace("[x]", "{x: 1}").replace("[*", "{<<: [*").replace("]", "]}")


@pytest.fixture(params=["libyaml", "Python"], autouse=True)
def loader(request, monkeypatch):
    if request.param == "Python":
        monkeypatch.delattr(yaml, "CSafeLoader")
    elif not yaml.__with_libyaml__:
        pytest.skip("needs PyYAML with libyaml")
    for made in (yaml_file.safe_loader, args_file._loader):
        made.cache_clear()
    yield request.param
    for made in (yaml_file.safe_loader, args_file._loader):
        made.cache_clear()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a: 1\n" * 220_000, f"1,100,000 bytes; a YAML file may have {LARGEST:,}: split it, or give a YAML file"),
        ("a: " + "[" * 100_000, f"values are nested more than {DEEPEST} deep; a few levels are enough"),
        ("a: " + "{a: " * 100_000, f"values are nested more than {DEEPEST} deep; a few levels are enough"),
        ("- " * 100_000, f"values are nested more than {DEEPEST} deep; a few levels are enough"),
        (LAUGHS, f"more than {MOST_VALUES:,} values, with its aliases written out; leave some out"),
        (MERGES, f"more than {MOST_VALUES:,} values, with its aliases written out; leave some out"),
        ("a: &a [*a]", "*a stands inside &a; write its value out"),
        ("a: &a {b: [*a]}", "*a stands inside &a; write its value out"),
        ("a: *b", "not YAML: "),
        ("a: [", "not YAML: "),
        ("a: b: c", "not YAML: "),
        ("a: \x00", "not YAML: "),
        ("a: !!python/name:os.system {}", "not YAML: could not determine a constructor"),
        ("a: !!timestamp x", "not YAML: "),
        ("a: " + "1" * 5000, "not YAML: Exceeds the limit (4300 digits)"),
        ("{[a]: 1}", "not YAML: "),
        ("a: 1\n--- \nb: 2", "not YAML: "),
        ("a: 1\nb: 2\na: 3", "a: is given twice; give it once"),
        ("a: {1: x, 0x1: y}", "1: is given twice; give it once"),
        ("a: &a {}\n<<: *a\n<<: *a", "<<: is given twice; give it once"),
    ],
)
def test_what_is_refused(tmp_path, text, line):
    path = tmp_path / "x.yaml"
    path.write_text(text)
    assert error_of(load_yaml, path).startswith(f"{path}: {line}")


def test_a_file_that_is_none(tmp_path):
    assert error_of(load_yaml, tmp_path / "x") == f"{tmp_path}/x: No such file or directory; give a YAML file"
    assert error_of(load_yaml, tmp_path, "--flag x") == "--flag x: Is a directory; give a YAML file"
    assert error_of(load_yaml, "/dev/zero").startswith(f"/dev/zero: more than {LARGEST:,} bytes; a YAML file may have")
    (tmp_path / "x").write_bytes(b"a: \xff")
    assert error_of(load_yaml, tmp_path / "x") == f"{tmp_path}/x: not UTF-8 text, from byte 3 on; give a YAML file"


def test_what_is_taken(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("\ufeffa: &a {x: 1}\ndeep:\n  b: &b {<<: *a, x: 2}\nc: {<<: *b, y: ²}\nd: [*a, *a]\n")
    found = load_yaml(path)
    assert found["c"] == {"x": 2, "y": "²"} and found["d"] == [{"x": 1}] * 2 and found["deep"]["b"] == {"x": 2}


def test_a_pipe(tmp_path):
    reads, writes = os.pipe()
    os.write(writes, b"a: 1")
    os.close(writes)
    try:
        assert load_yaml(f"/dev/fd/{reads}") == {"a": 1}
    finally:
        os.close(reads)


def test_a_bug_of_ours_stays_one(tmp_path, monkeypatch):
    (tmp_path / "x.yaml").write_text("a: 1")
    monkeypatch.setattr(yaml_file, "MOST_VALUES", None)
    with pytest.raises(TypeError):
        load_yaml(tmp_path / "x.yaml")


@pytest.mark.parametrize("read", [read_plan, lambda path: args_file.read([path]), hardware.load])
def test_all_that_read_yaml_are_bounded(tmp_path, read):
    path = tmp_path / "x.yaml"
    path.write_text("a: 1\n" * 220_000)
    assert "1,100,000 bytes; a YAML file may have" in error_of(read, str(path))


def test_nothing_else_reads_yaml(loader):
    if loader == "Python":
        pytest.skip("once is enough")
    files = (path for top in ("megatron_fp8", "tools", "benchmarks") for path in (ROOT / top).rglob("*.py"))
    reading = [str(path.relative_to(ROOT)) for path in files if re.search(r"\byaml\.\w*load", path.read_text())]
    assert reading == ["megatron_fp8/flags/yaml_file.py"]


def test_as_many_values_as_are_taken(tmp_path, loader):
    """In linear time: each key is looked up in a set."""
    if loader == "Python":
        pytest.skip("takes seven seconds")
    path = tmp_path / "x.yaml"
    flags = MOST_VALUES // 2 - 5
    path.write_text("MODEL_ARGS:\n" + "".join(f"  --f{n}: {n}\n" for n in range(flags)))
    assert len(args_file.read([str(path)]).flags) == flags
