"""--args-file: YAML values become words unchanged; which source wins; one line for a mistake; apply() in a process."""

import argparse
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from commands import error_of
from launch import ROOT

from megatron_fp8.cli import main
from megatron_fp8.flags import args_file
from megatron_fp8.flags.args_file import Expanded, expand, find, read
from megatron_fp8.flags.command import take_apart
from megatron_fp8.flags.usage import one_line_usage_errors

# In the form of Megatron-LM's functional tests: its keys, anchors, lists and ways to write a number.
FILE = """
ENV_VARS:
  CUBLAS_WORKSPACE_CONFIG: :4096:8
  NVTE_FUSED_ATTN: 0
TEST_TYPE: regular
MODE: pretraining
BASE_MODEL_ARGS: &shared
  --seed: 010
  --bf16: true
MODEL_ARGS:
  <<: *shared
  # a comment
  --num-layers: 12
  --sequence-parallel: true # and one here
  --swiglu: false
  --load: null
  --init-method-std:
  --lr: 1.0e-5
  --weight-decay: 1e-2
  --lr-warmup-fraction: .01
  --split: 949,50,1
  --attention-backend: off
  --rampup-batch-size: "[16 16 1_000]"
  --recompute-modules: [core_attn layernorm]
  --moe-router-topk-limits: [1, 2]
  --data-path:
    - 0.5
    - a path
  --moe-layer-freq: ([0]*1+[1]*11)
  --hybrid-pattern: M-M*
  --wandb-exp-name: one name
  --decoder-first: -3
  --layout: -x|y
METRICS:
  - "lm loss"
MODEL_ARGS_2:
  --num-layers: 3
"""
WORDS = [
    *"--seed 010 --bf16 --num-layers 12 --sequence-parallel --lr 1.0e-5 --weight-decay 1e-2".split(),
    *"--lr-warmup-fraction .01 --split 949,50,1 --attention-backend off --rampup-batch-size 16 16 1_000".split(),
    *"--recompute-modules core_attn layernorm --moe-router-topk-limits 1 2 --data-path 0.5".split(),
    *("a path", "--moe-layer-freq", "([0]*1+[1]*11)", "--hybrid-pattern", "M-M*", "--wandb-exp-name", "one name"),
    *("--decoder-first", "-3", "--layout=-x|y"),
]


@pytest.fixture
def write(tmp_path):
    def write(text, name="args.yaml"):
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def model(*lines):
    return "\n".join(["MODEL_ARGS:", *(f"  {line}" for line in lines)])


def test_values_are_words_as_they_are_written(write):
    path = write(FILE)
    found = expand(["--args-file", path], {})
    assert found.words == WORDS
    assert found.variables == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_FUSED_ATTN": "0"}
    passed_over = {line.split(": ")[1] for line in found.lines if ": ignored, " in line}
    assert passed_over == {"TEST_TYPE", "MODE", "BASE_MODEL_ARGS", "METRICS", "MODEL_ARGS_2"}


def test_the_command_line_wins_and_a_later_file_over_an_earlier(write):
    one = write(model("--lr: 1", "--swiglu: true", "--bf16: true", "--num-layers: 2"), "one.yaml")
    two = write(model("--lr: 2", "--swiglu: false", "--seed: 3"), "two.yaml")
    typed = ["--tp-comm", "x", "--args-file", one, two, "--num-layers=5", "--seed", "9", f"--args-file={one}"]
    assert expand(typed[:-1], {}).words == "--bf16 --lr 2 --tp-comm x --num-layers=5 --seed 9".split()
    assert expand(typed, {}).words == "--lr 1 --swiglu --bf16 --tp-comm x --num-layers=5 --seed 9".split()
    assert expand(["--a", "b"], {}) == Expanded(["--a", "b"])
    assert expand(typed[:-1], {}).origins == {"--bf16": one, "--lr": two}


def test_a_variable_of_several_words(write):
    path = write(model('--data-path: "[$BLEND]"', "--one: $BLEND"))
    words = expand(["--args-file", path], {"BLEND": "0.3 a 0.7 b"}).words
    assert words == ["--data-path", *"0.3 a 0.7 b".split(), "--one", "0.3 a 0.7 b"]


def test_variables_are_filled_in_where_a_flag_is_used(write):
    path = write("ENV_VARS:\n  OUT: /here\n  DEEP: ${TOP}/x\n" + model("--save: ${OUT}/$NAME", "--load: $NONE"))
    flags = ["--args-file", path, "--load", "there"]
    found = expand(flags, {"NAME": "n", "TOP": "t"})
    assert found.words == ["--save", "/here/n", "--load", "there"]
    assert found.variables == {"OUT": "/here", "DEEP": "t/x"}
    found = expand(flags, {"NAME": "n", "OUT": "mine", "DEEP": "", "TOP": ""})
    assert found.words[1] == "mine/n" and found.variables == {}
    assert "DEEP, OUT: the environment's value is used, not the files'" in found.lines
    line = error_of(expand, flags[:2], {"NAME": "n", "TOP": "t"})
    assert line.endswith("--load $NONE: the variable NONE is not set; set it, or give --load on the command line")
    odd = write(model("--save: ${OUT:-here}/a"))
    assert "${OUT:-here}: only ${NAME} is filled in; write that" in error_of(expand, ["--args-file", odd], {"OUT": "o"})
    folder = str(Path(odd).parent)
    assert error_of(expand, ["--args-file", folder], {}) == f"--args-file {folder}: a folder; name the files in it"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("MODELARGS:\n  --lr: 1", ": MODELARGS: no such key, did you mean MODEL_ARGS?; use ENV_VARS and MODEL_ARGS"),
        (model("num-layers: 2"), ": MODEL_ARGS: num-layers: not the name of a flag; write --a-flag: VALUE"),
        ("ENV_VARS:\n  A-B: 1", ": ENV_VARS: A-B: not the name of a variable; write A_NAME: VALUE"),
        ("ENV_VARS:\n  A: [1, 2]", ": A: a list; a variable takes one value"),
        (model("--lr: 1", "--lr: 2"), ": --lr: is given twice; give it once"),
        (model("--args-file: b.yaml"), ": --args-file: a file cannot name other files; name them on the command line"),
        (model("--lr: {a: b}"), ": --lr: a mapping; give a word, a list, true, false or null"),
        (model("--lr: [[a], b]"), ": --lr: a list may hold words only; write [a b] or [a, b]"),
        (model("--lr: \"[a 'b]\""), ": --lr [a 'b]: No closing quotation; close the quote"),
        ("MODEL_ARGS: 3", ": MODEL_ARGS: is not a mapping; below it write a line for each flag"),
        ("just words", ": is not a mapping; write MODEL_ARGS:, and below it --A-FLAG: VALUE"),
        (model('--lr: "a\\0b"'), ": --lr: contains U+0000, which a command line cannot hold; remove it"),
        (model('--lr: "\\x15touch PROOF"'), ": --lr: contains U+0015, which a command line cannot hold"),
        (model('"--l\\er": 1'), ": MODEL_ARGS: contains U+001B, which a command line cannot hold"),
        ("ENV_VARS: {Aé: 1}", ": ENV_VARS: Aé: not the name of a variable; write A_NAME: VALUE"),
        ("a: [", ": not YAML: "),
        ("MODEL_ARGS: !!python/name:os.system {}", ": not YAML: could not determine a constructor"),
    ],
)
def test_a_mistake_is_one_line(write, text, line):
    path = write(text)
    assert error_of(read, [path]).startswith(path + line)


def test_half_of_a_surrogate_pair(write):
    """libyaml refuses it; PyYAML's own loader does not."""
    assert error_of(read, [write(model('--lr: [a, "\\ud800"]'))]).endswith(
        ("contains U+D800, which a command line cannot hold; remove it", '<unicode string>", line 2, column 16')
    )
    assert error_of(args_file.check_characters, "here", "\udcff").startswith("here: contains U+DCFF, which a")


def test_a_file_that_is_not_there(tmp_path):
    assert error_of(expand, ["--args-file", "--lr", "1"], {}) == "--args-file: no file given; give one or more"
    line = "no such file, and none of that name is shipped"
    assert error_of(find, "nowhere.yaml") == f"--args-file nowhere.yaml: {line}; give its path"
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    assert ": not UTF-8 text, from byte 0 on; " in error_of(read, [str(tmp_path / "binary")])


@pytest.fixture
def applied(monkeypatch):
    """apply() on a command line; returns sys.argv."""
    monkeypatch.setattr(args_file, "_read", Expanded([]))

    def apply(*words):
        monkeypatch.setattr(sys, "argv", ["train.py", *words])
        args_file.apply()
        return sys.argv[1:]

    return apply


def parser():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--num-layers", type=int)
    parser.add_argument("--lr", "--rate", type=float)
    one_line_usage_errors(parser)
    return parser


def test_a_process_applies_its_files(write, applied, monkeypatch):
    monkeypatch.setenv("SHELLS", "shell")
    path = write("ENV_VARS: {SHELLS: file, NEW: 1, LD_PRELOAD: x.so}\n" + model("--num-layers: 4"))
    assert applied("--lr", "1", "--args-file", path) == ["--num-layers", "4", "--lr", "1"]
    assert os.environ["SHELLS"] == "shell" and os.environ["NEW"] == "1"
    assert args_file.lines()[0] == f"--args-file {path}: 1 flags, 2 variables"
    assert args_file.lines()[-1] == "LD_PRELOAD: set too late for this process; set it in the shell instead"
    assert applied("--lr", "1") == ["--lr", "1"]


def test_a_mistake_that_the_parser_finds_names_the_file(write, applied):
    path = write(model("--num-layer: 4"))
    applied("--args-file", path)
    said = "no such flag, did you mean --num-layers?; --help lists every flag"
    assert error_of(args_file.check, parser(), False) == f"{path}: --num-layer: {said}"
    args_file.check(parser(), True)  # unknown flags are another parser's
    for words, start in (([], f"{path}: --lr/--rate fast: use a number"), (["--rate", "x"], "--lr/--rate x: use")):
        applied(*words, "--args-file", write(model("--rate: fast")))
        checked = parser()
        args_file.check(checked, False)
        assert error_of(checked.parse_args, sys.argv[1:]).startswith(start)
    applied("--num-layer", "4")
    said = "unrecognized arguments: --num-layer 4, did you mean --num-layers? (--help lists every flag)"
    assert error_of(parser().parse_args, sys.argv[1:]) == said


def test_args_prints_a_command_line_for_a_shell(write, capsys, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.delenv("NVTE_FUSED_ATTN", raising=False)
    path = write(FILE)
    assert main(["args", path, "--", "--seed", "7"]) == 0
    assert shlex.split(capsys.readouterr().out) == [*WORDS[2:], "--seed", "7"]
    assert main(["args", "--variables", path]) == 0
    assert capsys.readouterr().out == "export CUBLAS_WORKSPACE_CONFIG=:4096:8\nexport NVTE_FUSED_ATTN=0\n"
    for words, said in (
        ([path, "--variables"], "--variables: put it before the files"),
        ([], "the following arguments are required: FILE (--help lists every flag)"),
    ):
        with pytest.raises(SystemExit):
            main(["args", *words])
        assert capsys.readouterr().err == f"megatron_fp8: {said}\n"


HOSTILE = ["$(touch PROOF)", "`touch PROOF`", "';touch PROOF;'", '";touch PROOF;"', "x\ny", "-e", "a[$(:)]", "☃"]


def test_what_args_prints_is_data_to_a_shell(write, capfdbinary, tmp_path, monkeypatch):
    values = {f"V{number}": value for number, value in enumerate(HOSTILE)}
    flags = {f"--v{number}": value for number, value in enumerate(HOSTILE)}
    path = write(json.dumps({"ENV_VARS": values, "MODEL_ARGS": flags}))
    words = [word for flag, value in flags.items() for word in ([flag, value] if value != "-e" else [f"{flag}=-e"])]
    script = 'eval "set -- $(cat line)"; printf "%s\\0" "$@"'
    assert main(["args", path, "--", "--odd", "a b"]) == 0
    printed = capfdbinary.readouterr().out
    (tmp_path / "line").write_bytes(printed)
    monkeypatch.chdir(tmp_path)
    done = subprocess.run(["bash", "-c", script], capture_output=True)
    assert done.stdout.split(b"\0")[:-1] == [os.fsencode(word) for word in [*words, "--odd", "a b"]]
    assert main(["args", "--variables", path]) == 0
    (tmp_path / "line").write_bytes(capfdbinary.readouterr().out)
    done = subprocess.run(["bash", "-c", 'eval "$(cat line)"; env -0'], capture_output=True, text=True)
    assert set(f"{name}={value}" for name, value in values.items()) <= set(done.stdout.split("\0"))
    assert not (tmp_path / "PROOF").exists()


@pytest.mark.parametrize("name", ["PROMPT_COMMAND", "PS1", "BASH_ENV", "UID", "IFS", "SHELLOPTS", "_"])
def test_a_variable_that_a_shell_uses_itself(write, capsys, name):
    """A shell runs the value of some variables as a command at its next prompt."""
    path = write(f"ENV_VARS: {{{name}: touch PROOF}}\nMODEL_ARGS: {{--lr: 1}}")
    line = f"variable {name}: a shell uses this name itself; remove it from the file"
    with pytest.raises(SystemExit):
        os.environ.pop(name, None)
        main(["args", "--variables", path])
    assert capsys.readouterr() == ("", f"megatron_fp8: {line}\n")


def test_a_character_that_the_shells_character_set_has_not(write):
    path = write(model("--lr: ☃"))
    command = [sys.executable, "-X", "utf8=0", "-m", "megatron_fp8.cli", "args", path]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    line = "megatron_fp8: '\\u2603': this shell's character set ("
    assert done.returncode == 2 and done.stderr.startswith(line) and done.stderr.endswith("set LC_ALL=C.UTF-8\n")


def test_rehearse_reads_files_too(write):
    path = write("ENV_VARS: {ONE: 1, TWO: 2}\n" + model("--num-layers: 4"))
    command = f"TWO=3 torchrun --nnodes 2 --nproc-per-node 8 {ROOT}/pretrain_gpt_fp8.py --args-file {path} --bf16"
    launch = take_apart(command.split())
    assert launch.flags == [("--num-layers", ["4"]), ("--bf16", [])] and launch.gpus == 16
    assert launch.variables == {"ONE": "1", "TWO": "3"}


def test_variables_are_set_before_torch_is_imported(write):
    """By both entry points, before a script's own imports read them."""
    path = write("ENV_VARS: {SEEN_BY_TORCH: 1}\nMODEL_ARGS: {--no-such-flag: 1}")
    probe = (
        "import os, sys, runpy\n"
        "class Watch:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'torch':\n"
        "            sys.exit(f'torch sees {os.environ.get(\"SEEN_BY_TORCH\")}')\n"
        "sys.meta_path.insert(0, Watch())\n"
        "runpy.run_{kind}({name!r}, run_name='__main__')\n"
    )
    ours = "pretrain_gpt_fp8.py"
    for kind, name, script in (("path", ours, []), ("module", "megatron_fp8", [ours])):
        code = probe.replace("{kind}", kind).replace("{name!r}", repr(name))
        command = [sys.executable, "-c", code, *script, "--args-file", path]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
        assert done.stderr.strip().endswith("torch sees 1"), done.stderr
