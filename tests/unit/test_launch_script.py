"""`megatron-fp8 launch`: the script that it writes, and its error lines."""

import argparse
import os
import re
import shlex
import subprocess

import pytest
from commands import error_of
from launch import ROOT, RunFailed, forked
from slurm_jobs import checkpoint

from megatron_fp8.cli import main
from megatron_fp8.tools.launch import main as launch_main
from megatron_fp8.tools.launch.script import seconds, steps_of


@pytest.fixture
def launch(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch_main, "_check", lambda *_: True)
    flags = "--train-iters: 20, --save-interval: 5, --load: there, --finetune: true, --swiglu: true, --fp8-level: O1"
    (tmp_path / "one.yaml").write_text(f"ENV_VARS: {{NEW: 1, TOP: $WHERE}}\nMODEL_ARGS: {{{flags}}}")
    monkeypatch.setenv("WHERE", "here")

    def launch(*words):
        code = 0
        try:
            code = main(["launch", "one.yaml", "--nodes", "2", *words])
        except SystemExit as end:
            code = end.code
        said = capsys.readouterr()
        return code, said.out + said.err

    return launch


def test_launch_writes_a_script(launch, tmp_path):
    (tmp_path / "site.env").write_text("# a comment\nNCCL_X=a\nexport NCCL_Y='b c' # why\n")
    code, said = launch("--level", "O3", "--flags=--lr 3", "--cluster", "site.env", "--sbatch=--account='a b' -p gpu")
    assert code == 0 and said.splitlines()[-1] == f"submit it: sbatch {tmp_path}/runs/one/one.sbatch"
    text = (tmp_path / "runs/one/one.sbatch").read_text()
    head = text[: text.index("\n#\n")].splitlines()
    assert head[0] == "#!/bin/bash" and all(line.startswith("#SBATCH ") for line in head[1:])
    for option in ("--nodes=2", "--ntasks-per-node=8", "--gpus-per-node=8", "--signal=B:USR1@600", "--requeue",
                   "--open-mode=append", "--exclusive", "--mem=0", "--wait-all-nodes=1", "--account='a b' -p gpu",
                   f'--output="{tmp_path}/runs/one/log-%j.txt"'):  # fmt: skip
        assert f"#SBATCH {option}" in head, option
    assert "ITERATIONS=20\n" in text and "FIRST=(--load there --finetune)\n" in text
    flags = ("--train-iters 20", "--save-interval 5", "--swiglu", "--lr 3", "--fp8-level O3")
    assert "\nset -- \\\n    " + " \\\n    ".join(flags) + "\n" in text
    for line in ("NEW=${NEW-1}", "TOP=${TOP-here}", "NCCL_X=${NCCL_X-a}", "NCCL_Y=${NCCL_Y-'b c'}"):
        assert f"\nexport {line}\n" in text
    assert text.endswith((ROOT / "scripts/slurm/train.sbatch").read_text().partition("# <<< settings")[2])


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--nodes 0", "--nodes 0: use 1 or more"),
        ("--lr 1", "--lr 1; put a training run's flags into --flags=\"...\" (--help lists every flag)"),
        ("two.yaml", "unrecognized arguments: two.yaml; put it beside the others, before or behind all flags"),
        ("--gpus-per-node 0", "--gpus-per-node 0: add --tasks-per-node N"),
        ("--gpus-per-node 0 --tasks-per-node 0", "--tasks-per-node 0: use 1 or more"),
        ("--time 1x", "--time 1x: use minutes, HH:MM:SS or D-HH:MM:SS"),
        ("--cluster nowhere", "--cluster nowhere: no such file, and none of that name is shipped; give its path"),
        ("--cluster infinibad", "did you mean infiniband?"),
        ("--cluster wrong.env", "wrong.env:1: two words: write NAME=VALUE"),
        ("--cluster bytes.env", "--cluster bytes.env: not a text file; write lines NAME=VALUE"),
        ("--cluster shell.env", "shell.env:2: A=/x:$A: $ and ~ are not expanded; write it out, or set it in the shell"),
        ("--script nothing.py", "--script nothing.py: no such script; give its path"),
        ("--flags=--exit-signal=SIGTERM", "--exit-signal: the job's script sets it"),
        ("--flags='", "--flags ': No closing quotation; close the quote"),
        ("--flags=other.yaml", "--flags 'other.yaml': flags begin with a dash"),
        ("--cluster=", "--cluster '': an empty value"),
        ("--name a/b", "--name a/b: use letters"),
        ("--name ..", "--name ..: use letters, digits, '.', '_' and '-'; '.' and '..' are folders"),
        ("--gpus-per-node -1", "--gpus-per-node -1: use 0 or more"),
        ("--tasks-per-node 4", "--tasks-per-node 4: each GPU of a node gets one task; remove it, or add"),
        ("--steps 9" + 20 * "9", f"--steps {21 * '9'}: too large; use at most 1000000000"),
        ("--max-restarts 9" + 20 * "9", f"--max-restarts {21 * '9'}: too large; use at most 1000000000"),
        ("--flags=--train-iters=" + 5000 * "9", "...: a number of more than 1,000 digits; write a shorter one"),
        ("--flags=--train-iters=²", "--train-iters ²: use a whole number"),
        ("--flags=--train-iters=٣", "--train-iters ٣: use a whole number"),
        ("--time " + 5000 * "9", "...: a number of more than 1,000 digits; write a shorter one"),
        ("--time ١٢", "--time ١٢: use minutes, HH:MM:SS or D-HH:MM:SS"),
        ("--folder a\udcff", "a\\udcff: not UTF-8 text, or contains a zero byte; write it in UTF-8"),
        ("--cluster nul.env", "nul.env:1: contains U+0000, which a command line cannot hold; remove it"),
        ("--cluster accent.env", "accent.env:1: Aé=1: write NAME=VALUE"),
        ("--cluster shells.env", "variable PROMPT_COMMAND: a shell uses this name itself; remove it from the file"),
        ("--cluster scripts.env", "variable SAVE: the job's script uses this name itself; remove it from the file"),
        ("--cluster slurm.env", "variable SLURM_NTASKS: the job's script uses this name itself; remove it from the"),
        ("--steps 10", "--steps 10: the flags say 20; remove it, or change --train-iters or --train-samples"),
        ("--mounts A:B", "--mounts A:B: no container; add --container, or remove it"),
        ("--flags=--train-iters=0", "--train-iters 0: use 1 or more"),
        ("--folder one.yaml", "one.yaml: File exists; use another"),
        ("--folder one.yaml/x", "one.yaml/x: Not a directory; use another"),
        ('--folder a"b', "Slurm allows no quote, backslash or line break in a path; use"),
        ("--container image --folder at-12:30", "at-12:30: a --container mount cannot contain ',' or ':'; use"),
        ("--container image --flags=--save=a,b", "/a,b: a --container mount cannot contain ',' or ':'; use"),
        ("--partition gpu", '--partition gpu: an option of sbatch; write --sbatch="--partition=gpu"'),
        ("-A me", '-A me: an option of sbatch; write --sbatch="--account=me"'),
        ("--qos=high", '--qos high: an option of sbatch; write --sbatch="--qos=high"'),
        ("--gres gpu:8", 'write --sbatch="--gres=gpu:8"'),
        ("--constraint h100&ib", 'write --sbatch="--constraint=h100&ib"'),
        ("--exclusive", '--exclusive: an option of sbatch; write --sbatch="--exclusive"'),
        ("--submit", "--submit: no sbatch here; on a node that has it: sbatch "),
        ("--sbatch=--time=10", "--time=10: the job's script needs the value that launch writes; use launch's"),
        ("--sbatch=-N4", "--sbatch -N4: the job's script needs the value that launch writes; use launch's own"),
        ("--sbatch=--gpus-per-task=1", "--gpus-per-task=1: the job's tasks need all GPUs of a node, and its ranks in"),
        ("--sbatch=--gpu-bind=single:1", "--gpu-bind=single:1: the job's tasks need all GPUs of a node, and its"),
        ("--sbatch=-m --sbatch=cyclic", "--sbatch -m: the job's tasks need all GPUs of a node, and its ranks in order"),
        ("--sbatch=-G16", "--sbatch -G16: the job's script needs the value that launch writes; use launch's own"),
        ("--sbatch=--signal=B:USR1@60", "B:USR1@60: the job's script needs the value that launch writes; remove it"),
        ("--cluster remark.env", "remark.env:1: HCA=mlx5   which adapters: a variable has one value; quote it, or"),
        ("--flags=--save=had --flags=--load=had --flags=--ckpt-step=3", "/had has step 5 too, and a job resumes from"),
    ],
)
def test_a_mistake_is_one_line(launch, tmp_path, monkeypatch, words, line):
    (tmp_path / "bytes.env").write_bytes(b"\xff\xfe")
    (tmp_path / "nul.env").write_bytes(b"A=a\0b")
    (tmp_path / "accent.env").write_text("Aé=1\n")
    (tmp_path / "shells.env").write_text("PROMPT_COMMAND='touch PROOF'\n")
    (tmp_path / "scripts.env").write_text("SAVE=/elsewhere\n")
    (tmp_path / "slurm.env").write_text("SLURM_NTASKS=3\n")
    (tmp_path / "wrong.env").write_text("two words\n")
    (tmp_path / "shell.env").write_text("B=1\nA=/x:$A\n")
    (tmp_path / "remark.env").write_text("HCA=mlx5   which adapters\n")
    checkpoint(tmp_path / "had/iter_0000005")
    monkeypatch.setenv("PATH", "/nowhere")
    code, said = launch(*words.split())
    assert code == 2 and line in said.splitlines()[-1] and said.splitlines()[-1].startswith("megatron_fp8: ")


@pytest.mark.parametrize("script", sorted((ROOT / "scripts/slurm").glob("*.sh")), ids=lambda path: path.stem)
def test_files_and_flags_may_follow_a_shipped_script(script, tmp_path, monkeypatch):
    """What it gives to `megatron-fp8 launch`, parsed as launch does."""
    program = tmp_path / "megatron-fp8"
    program.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    more = ["recipe/step-graph", "--flags=--micro-batch-size 1", "--nodes", "2", "--level", "O2", "--submit"]
    done = subprocess.run(["bash", str(script), *more], capture_output=True, text=True, check=True)
    verb, *words = done.stdout.splitlines()
    parser = argparse.ArgumentParser(exit_on_error=False)
    launch_main.add_arguments(parser)
    args = parser.parse_args(words)
    model, layout, *recipes = args.files
    assert (verb, model, args.name) == ("launch", f"model/{script.stem}", script.stem)
    assert layout.startswith(f"layout/{script.stem}-") and recipes[-2:] == ["recipe/data", "recipe/step-graph"]
    assert (args.nodes, args.level, args.submit, args.flags) == (2, "O2", True, ["--micro-batch-size 1"])


def test_a_folder_with_a_blank_and_a_percent_sign(launch, tmp_path, monkeypatch):
    """The printed commands can be pasted, and Slurm expands only %j in the log's name."""
    path = f"{tmp_path}/a %j b/one.sbatch"
    assert launch("--folder", "a %j b")[1].splitlines()[-1] == f"submit it: sbatch '{path}'"
    assert f'#SBATCH --output="{tmp_path}/a %%j b/log-%j.txt"\n' in (tmp_path / "a %j b/one.sbatch").read_text()
    monkeypatch.setenv("PATH", "/nowhere")
    assert launch("--folder", "a %j b", "--submit")[1].endswith(f"on a node that has it: sbatch '{path}'\n")
    monkeypatch.setattr(launch_main, "_submit", lambda *_: "12")
    line = launch("--folder", "a %j b", "--submit")[1].splitlines()[-1]
    log, stop = f"'{tmp_path}/a %j b/log-12.txt'", f"'{tmp_path}/a %j b/exit'"
    assert line == f"job 12; what it waits for: squeue -j 12; its log: {log}; to end it for good: touch {stop}"


def test_options_given_twice_both_count(launch, tmp_path):
    (tmp_path / "a.env").write_text("A=1\n")
    words = "--flags=--lr=3 --flags=--seed=7 --sbatch=--partition=gpu --sbatch=--qos=high --mounts=/a:/a --mounts=/b:/b"
    assert launch(*words.split(), "--container", "x", "--cluster", "a.env", "--cluster", "infiniband")[0] == 0
    text = (tmp_path / "runs/one/one.sbatch").read_text()
    for line in ("#SBATCH --partition=gpu --qos=high", "MOUNTS=/a:/a,/b:/b", "    --lr 3 \\", "    --seed 7",
                 "export A=${A-1}", "export NCCL_DEBUG=${NCCL_DEBUG-WARN}"):  # fmt: skip
        assert f"\n{line}\n" in text, line


@pytest.mark.parametrize("name", ["infiniband", "ethernet"])
def test_every_line_of_a_shipped_cluster_may_be_taken(launch, tmp_path, name):
    text = (ROOT / f"configs/cluster/{name}.env").read_text()
    assert re.subn(r"(?m)^# (?=[A-Z_]+=)", "", text)[1] > 2
    (tmp_path / "mine.env").write_text(re.sub(r"(?m)^# (?=[A-Z_]+=)", "", text))
    assert launch("--cluster", "mine.env")[0] == 0
    script = (tmp_path / "runs/one/one.sbatch").read_text()
    assert all(" " not in value for value in re.findall(r"(?m)^export (?:NCCL|GLOO)_\w+=(.*)", script))


def test_flags_of_a_first_start_in_a_folder_that_has_a_checkpoint(launch, tmp_path):
    assert "note: --load there" not in launch("--flags=--save=had")[1]
    checkpoint(tmp_path / "had/iter_0000005")
    note = "note: --load there --finetune: only for a first start, so not used; this job resumes from step 5 "
    note += f"in {tmp_path}/had"
    assert note in launch("--flags=--save=had")[1].splitlines()
    (tmp_path / "had/iter_0000005/unsealed").touch()
    assert "note: --load there" not in launch("--flags=--save=had")[1]


def test_what_is_to_be_pasted_of_an_option_of_sbatchs_runs_nothing(launch, tmp_path):
    assert launch("--comment", "two words")[1].endswith("write --sbatch=\"--comment='two words'\"\n")
    for value in ("a $(touch PROOF)", "`touch PROOF`", "';touch PROOF '", '";touch PROOF "', "!!"):
        remedy = launch("--comment", value)[1].rstrip("\n").partition("; write ")[2]
        (word,) = shlex.split(remedy)
        assert shlex.split(word.removeprefix("--sbatch=")) == [f"--comment={value}"]
        assert shlex.split(subprocess.run(["bash", "-c", f"printf %s {remedy}"], capture_output=True, text=True).stdout)
    assert not (tmp_path / "PROOF").exists()


def test_launchs_own_short_forms_stay(launch):
    """They stay unambiguous although launch knows some of sbatch's options."""
    assert "--nodes 0: use 1 or more" in launch("--node=0")[1]


@pytest.mark.parametrize("flags", ["--save", "--save=", "--save ''", "--save a b"])
def test_one_folder_of_saves(launch, flags):
    code, said = launch(f"--flags={flags}")
    assert code == 2 and "--save" in said and "use one folder, or remove it" in said


@pytest.mark.parametrize("tracker", ["²".encode(), b"\xff\xfe", b"9" * 5000, b"\0005"])
def test_a_tracker_that_is_none(launch, tmp_path, tracker):
    checkpoint(tmp_path / "had/iter_0000005")
    (tmp_path / "had/latest_checkpointed_iteration.txt").write_bytes(tracker)
    code, said = launch("--flags=--save=had")
    assert code == 0 and "this job resumes from step 5 in" in said


def test_a_link_in_the_scripts_place_is_not_followed(launch, tmp_path):
    (tmp_path / "victim").write_text("whole")
    (tmp_path / "runs/one").mkdir(parents=True)
    (tmp_path / "runs/one/one.sbatch").symlink_to(tmp_path / "victim")
    assert launch()[0] == 0 and (tmp_path / "victim").read_text() == "whole"
    path = tmp_path / "runs/one/one.sbatch"
    assert not path.is_symlink() and os.access(path, os.X_OK) and [path] == list(path.parent.iterdir())


def test_what_is_to_be_pasted_of_a_path_runs_nothing(launch):
    line = "note: --data-path /x;touch PROOF #/a: no mount of the container has it; unless the image does, add --mounts"
    said = launch("--container", "image", "--flags=--data-path '/x;touch PROOF #/a'")[1].splitlines()
    assert f"{line} '/x;touch PROOF #:/x;touch PROOF #'" in said


def test_a_job_is_given_the_variables_of_the_shell_alone(launch, tmp_path, monkeypatch):
    """When launch imports torch for the check, torch sets one: a folder in /tmp with a predictable name."""
    monkeypatch.setattr(launch_main, "_check", lambda *_: os.environ.setdefault("OF_THE_CHECK", "1"))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/sbatch").write_text(f"#!/bin/bash\nenv >{tmp_path}/given; echo 12\n")
    (tmp_path / "bin/sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    assert launch("--submit")[0] == 0
    assert "OF_THE_CHECK" not in (tmp_path / "given").read_text() and os.environ.pop("OF_THE_CHECK")


def test_submit(launch, tmp_path, monkeypatch):
    sbatch = tmp_path / "bin/sbatch"
    sbatch.parent.mkdir()
    monkeypatch.setenv("PATH", f"{sbatch.parent}:{os.environ['PATH']}")
    for text, code, line in (
        ('[[ $1 == --parsable ]] && echo "12;cluster"', 0, "job 12; what it waits for: squeue -j 12; its log: "),
        ("echo 'no such partition' >&2; exit 1", 2, "megatron_fp8: --submit: sbatch: no such partition; see "),
    ):
        sbatch.write_text(f"#!/bin/bash\n{text}\n")
        sbatch.chmod(0o755)
        found, said = launch("--submit")
        assert found == code and said.splitlines()[-1].startswith(line)


def test_a_job_that_is_submitted_in_a_job_inherits_nothing_of_it(launch, tmp_path, monkeypatch):
    sbatch = tmp_path / "bin/sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text(f"#!/bin/bash\nenv >{tmp_path}/given; echo 12\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sbatch.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_CONF", "there")
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "1")
    for inside, left in ((False, {"SLURM_CONF=there", "SLURM_CPUS_PER_TASK=1"}), (True, {"SLURM_CONF=there"})):
        if inside:
            monkeypatch.setenv("SLURM_JOB_ID", "11")
        assert launch("--submit")[0] == 0
        assert {line for line in (tmp_path / "given").read_text().splitlines() if line.startswith("SLURM_")} == left


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--lr-warm-samples 1", "on 16 ranks: unrecognized arguments: --lr-warm-samples 1, did you mean --lr-warmup-"),
        pytest.param("--global-batch-size 7", "on 16 ranks: ", marks=pytest.mark.slow),
    ],
)
def test_flags_that_megatron_would_refuse_are_refused_here(tmp_path, flags, line):
    files = ["model/gpt-125m", "layout/gpt-125m-8gpus", "recipe/pretrain", "recipe/gpt-125m", "recipe/mock-data"]
    words = ["launch", *files, "--nodes", "2", f"--flags={flags}"]
    script = tmp_path / "there.py"
    script.write_text(f"import os, megatron_fp8.cli as cli\nos.chdir({str(tmp_path)!r})\ncli.main({words})\n")
    with pytest.raises(RunFailed) as failed:
        forked(1, [str(script)], tmp_path / "log", timeout=600)
    said = [text for text in str(failed.value).splitlines() if text.startswith("megatron_fp8: ")]
    assert failed.value.code == 2 and said[-1].startswith(f"megatron_fp8: {line}"), str(failed.value)
    assert not (tmp_path / "runs").exists()


def test_time_and_steps():
    times = {"90": 5400, "30:10": 1810, "2:00:00": 7200, "1-12": 129600, "1-12:30": 131400, "1-00:00:09": 86409}
    assert {time: seconds(time) for time in times} == times
    assert steps_of({"--train-iters": ["7"]}) == steps_of({"--train-iters": ["7"]}, 7) == steps_of({}, 7) == 7
    assert steps_of({"--train-samples": ["100"], "--global-batch-size": ["32"]}) == 3
    few = error_of(steps_of, {"--train-samples": ["31"], "--global-batch-size": ["32"]})
    assert few == "--train-samples 31: fewer than --global-batch-size 32; use 32 or more"
    assert error_of(steps_of, {}).startswith("--train-iters: missing; give it, or --train-samples")
    assert error_of(steps_of, {"--train-iters": ["x"]}) == "--train-iters x: use a whole number of at most 18 digits"
    assert re.match(r"--time 0:30: use a minute", error_of(seconds, "0:30"))
