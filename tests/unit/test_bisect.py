"""`lab bisect` over a script that only logs numbers, with a gap that its flags leave."""

import math
import re
import shlex
import sys

import pytest
from lab_runs import LOGS

from megatron_fp8 import processes
from megatron_fp8.tools.lab.trial import bisect
from megatron_fp8.tools.lab.trial.bisect import gap, gemm_flags

# Each linear of the model that is not in BF16 adds its cost to the loss. --begun: a file that gets a line for each run.
TRAINING = (
    LOGS
    + """
import argparse, sys
from fnmatch import fnmatchcase

parser = argparse.ArgumentParser()
parser.add_argument("--fp8-bf16-layers", default="")
parser.add_argument("--fp8-emulate", default="E8M1")
parser.add_argument("--micro-batch-size", type=int)
for flag in ("--spread", "--lr"):
    parser.add_argument(flag, type=float, default=0.0)
parser.add_argument("--nan-at", type=int, default=99)
parser.add_argument("--die-after", type=int, default=99)
parser.add_argument("--chaos-from", type=int, default=99)
parser.add_argument("--norm-every", type=int, default=1)
parser.add_argument("--begun")
parser.add_argument("--culprit", default="decoder.layers.2.self_attention.linear_qkv")
args, _ = parser.parse_known_args()
kinds = "self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2"
names = [f"decoder.layers.{i}.{kind}" for i in range(4) for kind in kinds]
patterns = args.fp8_bf16_layers.split(",")
fp8 = [name for name in names if not any(fnmatchcase(name, pattern) for pattern in patterns)]
with open(args.begun, "a+") as file:
    file.write(f"{args.fp8_bf16_layers}|{args.fp8_emulate}\\n")
    file.seek(0)
    if len(file.readlines()) > args.die_after:
        sys.exit("the cause")
if args.fp8_bf16_layers:
    log(linears_in_bf16=[name for name in names if name not in fp8])
cost = sum(args.lr if name == args.culprit else args.spread for name in fp8) * ("gradient" not in args.fp8_emulate)
for step in range(11, 100):
    if step == args.nan_at and cost > 0.1:
        sys.exit("RuntimeError: Unexpected result nan (message='found NaN in local')")
    rounding = (1e-1 if step >= args.chaos_from else 1e-4) * (args.micro_batch_size == 1)
    loss = 4 * (1 + cost) * (1 + rounding) if step % 2 else 4
    log(step, loss=loss, loss_scale=1.0, **({} if step % args.norm_every else {"grad_norm": loss / 4}))
    print("step", step, flush=True)
"""
)


@pytest.fixture
def bisected(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(processes, "LAUNCHER", (sys.executable,))
    script, begun = tmp_path / "train.py", tmp_path / "begun"
    script.write_text(TRAINING)

    def run(flags: str = "", training: str = "--lr 0.2 --spread 0.001", folder: str = "found") -> tuple[str, list[str]]:
        """The output, and the --begun line of each run of the script."""
        begun.write_text("")
        command = f"--micro-batch-size 2 --global-batch-size 4 --fp8-emulate E8M1 --begun {begun} {training}"
        argv = ["--folder", str(tmp_path / folder), "--steps", "6", *shlex.split(flags), "--", str(script)]
        parser = bisect.ArgumentParser()
        bisect.add_arguments(parser)
        bisect.run(parser.parse_args([*argv, *command.split()]))
        return capsys.readouterr().out, begun.read_text().splitlines()

    return run


CULPRIT = "decoder.layers.2.self_attention.linear_qkv"


def test_the_culprit_and_the_table(bisected):
    out, begun = bisected()
    assert re.search(rf"^--fp8-bf16-layers {CULPRIT}$", out, re.MULTILINE)
    assert "1 of 16 linears in BF16 remove 93% of the gap of loss:" in out
    whole = math.sqrt(0.5) * 0.215  # every other step
    assert re.search(rf"^the command +{whole:.3g} +{whole:.3g}$", out, re.MULTILINE)
    assert re.search(r"^the twin with --micro-batch-size 1 --global-batch-size 4 +7.07e-05", out, re.MULTILINE)
    operand = "activation=E8M1:nearest:none,gradient=E8M1:nearest:none"
    assert re.search(rf"^--fp8-emulate {operand} +0 +0 +100%$", out, re.MULTILINE)
    assert "So does --fp8-emulate" in out
    assert re.search(rf"^{CULPRIT} \(1\) +0.0106 ", out, re.MULTILINE)
    assert begun[0].startswith("*|") and len(begun) == len(set(begun)) + 1 <= 15  # the floor's patterns are the twin's


def test_a_finished_run_is_not_repeated(bisected):
    """Each bisect dies in its fourth run, and the next one continues."""
    training = "--lr 0.2 --die-after 3"
    for _ in range(10):
        try:
            out, begun = bisected(training=training)
            break
        except ValueError as error:
            assert re.search(r"runs/0\d\d failed with exit code 1, at step 0: the cause", str(error))
    assert 0 < len(begun) <= 3 and not any(line.startswith("*|") for line in begun) and CULPRIT in out
    again, begun = bisected(training=training)
    assert not begun and again.splitlines()[-1] == out.splitlines()[-1]
    other, begun = bisected("--share 0.5 --measure grad_norm", training=training)
    assert not begun and "gap of grad_norm" in other
    with pytest.raises(ValueError, match=r"^--folder .*: holds runs of another command, or of another checkpoint"):
        bisected(training="--lr 0.3")


def test_a_checkpoint_that_came_later_is_another_run(bisected, tmp_path):
    training = f"--lr 0.2 --load {tmp_path}/saved"
    tracker = tmp_path / "saved/latest_checkpointed_iteration.txt"
    tracker.parent.mkdir()
    tracker.write_text("10")
    bisected(training=training)
    assert not bisected(training=training)[1]
    tracker.write_text("20\n")
    with pytest.raises(ValueError, match=r"^--folder .*: holds runs of another command, or of another checkpoint in"):
        bisected(training=training)


def test_flags_that_write_or_exit_are_left_out(bisected, tmp_path):
    bisected(training="--lr 0 --tensorboard-dir logs --fp8-log-grad-snr --exit-interval 2 --exit-duration-in-mins 1")
    (command,) = re.findall(r'"command": \[.*?\]', (tmp_path / "found/bisect.json").read_text())
    assert "--lr" in command and not any(flag in command for flag in ("logs", "--exit", "snr"))


def test_nothing_above_the_floor(bisected):
    out, begun = bisected(training="--lr 0.0001")
    assert "a search in it would find noise" in out and "add --attention-dropout 0 --hidden-dropout 0" in out
    assert len(begun) == 3
    out, begun = bisected(training="--lr 0 --attention-dropout 0 --hidden-dropout 0", folder="exact")
    assert "a search in it would find noise" in out and "dropout 0." not in out


def test_fewer_steps_are_better_where_rounding_grows(bisected):
    """From step 15 on, a fifth of the way, rounding does more than the culprit."""
    out, begun = bisected(training="--lr 0.1 --chaos-from 15")
    assert "less than 5 times the noise floor" in out and len(begun) == 3
    assert out.endswith("Over 4 steps it is 10 times it: take --steps 4, another --folder.\n")
    assert CULPRIT in bisected("--steps 4", training="--lr 0.1 --chaos-from 15", folder="short")[0]


def test_clear_steps_are_steps_even_if_a_measure_is_logged_less_often(bisected):
    """Norms are logged at steps 15, 20, ... Rounding does little before 35, so up to 30, the runs' twentieth step."""
    sparse = "--lr 0.1 --chaos-from 35 --norm-every 5"
    out, _ = bisected("--measure grad_norm --steps 40", training=sparse)
    assert out.endswith("Over 20 steps it is 10 times it: take --steps 20, another --folder.\n")
    out, _ = bisected("--measure grad_norm --steps 16", training=sparse.replace("35", "20"), folder="few")
    assert "a search in it would find noise" in out and "take --steps" not in out  # one or two points are too few


def test_a_gap_that_is_spread(bisected):
    out, begun = bisected(training="--lr 0.02 --spread 0.02", flags="--share 0.95")
    assert "16 of 16 linears in BF16 remove 100% of the gap" in out and "spread over the model" in out
    assert len(begun) <= 6 + 12


def test_a_run_that_ends_for_a_nan_has_a_gap(bisected):
    out, _ = bisected(training="--lr 0.2 --nan-at 14")
    assert f"--fp8-bf16-layers {CULPRIT}\n" in out
    whole = math.sqrt((2 * 0.2**2 + 3) / 6)
    assert re.search(rf"^the command +{whole:.3g} ", out, re.MULTILINE)


def test_what_the_command_keeps_in_bf16_stays(bisected):
    out, _ = bisected(training="--lr 0.2 --fp8-bf16-layers *.linear_fc1,decoder.layers.0.*")
    assert "1 of 9 linears" in out
    assert f"--fp8-bf16-layers '*.linear_fc1,decoder.layers.0.*,{CULPRIT}'\n" in out
    with pytest.raises(ValueError, match=r"--fp8-bf16-layers \*: all linears of the command are in BF16"):
        bisected(training="--fp8-bf16-layers *", folder="all")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--steps 0", "--steps 0: use 1 or more"),
        ("--processes 0", "--processes 0: use more than 0"),
        ("--share 1.5", "--share 1.5: use a share above 0 and at most 1"),
        ("--measure sharpness", "--measure sharpness: not logged; use one of loss, loss_scale, grad_norm"),
        (f"--folder {__file__}", f"--folder {__file__}: File exists; name another folder"),
    ],
)
def test_mistakes_are_one_line(flags, message, bisected):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}[^\n]*$"):
        bisected(flags)


@pytest.mark.parametrize("text", ["{", "[1]", "\xff"])
def test_a_folder_of_another_bisect_is_refused(text, tmp_path, bisected):
    (tmp_path / "other").mkdir()
    (tmp_path / "other/bisect.json").write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=r"bisect\.json was not written by `lab bisect`; take another folder$"):
        bisected(folder="other")


def test_a_command_without_fp8_is_refused(tmp_path):
    parser = bisect.ArgumentParser()
    bisect.add_arguments(parser)
    for flags in ([], ["--fp8-level", "O0"]):
        with pytest.raises(ValueError, match="no GEMM in FP8"):
            bisect.run(parser.parse_args(["--folder", str(tmp_path / "new"), "--", __file__, *flags]))
    assert not (tmp_path / "new").exists()


def test_gap():
    twin = {1: 4.0, 2: 2.0, 3: 1.0, 4: math.nan, 5: 0.0}
    assert gap(twin, twin) == 0
    assert gap({**twin, 1: 4.4, 2: 1.8}, twin) == pytest.approx(math.sqrt(0.02 / 3))
    assert gap({**twin, 2: math.inf}, twin) == gap({**twin, 2: math.nan}, twin) == math.sqrt(1 / 3)
    assert gap({**twin, 2: 1e9}, twin) == math.sqrt(1 / 3)
    assert gap({1: 4.0}, twin) == math.sqrt(2 / 3)
    assert math.isnan(gap({}, {})) and math.isnan(gap(twin, {4: math.nan}))


def test_gemms_that_flags_reach():
    level = ["train.py", "--fp8-level", "O2"]
    assert gemm_flags(level) == [["--no-fp8-wgrad"]]
    assert gemm_flags([*level, "--no-fp8-wgrad"]) == gemm_flags([*level, "--fp8-gemm", "bf16"]) == []
    assert gemm_flags([*level, "--fp8-emulate", "weight=E8M3"]) == []
    one, exact = "E4M3:nearest:none", "E5M2:truncate:tensor"
    assert gemm_flags([*level, "--fp8-emulate", "E4M3,gradient=E5M2:truncate:tensor"]) == [
        ["--fp8-emulate", f"activation={one},gradient={exact}"],
        ["--fp8-emulate", f"weight={one},gradient={exact}"],
        ["--fp8-emulate", f"weight={one},activation={one}"],
    ]
