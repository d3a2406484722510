"""`lab probe` without a run: comparisons of curves, what is changed in a command, the tables, mistakes."""

import math
from pathlib import Path

import pytest
from commands import error_of

from megatron_fp8.cli import main
from megatron_fp8.errors import UserError
from megatron_fp8.tools.lab.trial import invariants, probe
from megatron_fp8.tools.lab.trial.invariants import CHECKS, Finding, Skipped, Trials, differences
from megatron_fp8.tools.lab.trial.run import Refused

SCRIPT = "pretrain_gpt_fp8.py"


class Made(Trials):
    """Trials whose runs are made up: `answer(command, steps)` is a run's curves; `commands` are those asked for."""

    def __init__(self, command, answer, processes=1, first=1, steps=4):
        super().__init__(command.split(), processes, None, first, steps, Path("folder"))
        self.answer, self.commands = answer, []

    def run(self, command=None, steps=None, again=False):
        words = list(self.command if command is None else command)
        self.commands.append((" ".join(words), steps))
        return self.answer(words, steps)


EXACT = "--fp8-level O1 --fp8-gemm bf16 --fp8-grad-accum fp32 --fp8-grad-reduce fp32"
NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0"


def curve(losses, norms=None, first=1):
    norms = norms or [1.0] * len(losses)
    return {
        "loss": dict(enumerate(losses, first)),
        "grad_norm": dict(enumerate(norms, first)),
    }


def linear(error, kind):
    gemms = {gemm: {"error": error, "gain": 0.92} for gemm in ("fprop", "dgrad", "wgrad")}
    operand = {"format": kind, "underflow": 0.0125, "saturation": 0.0, "kurtosis": None, "amax": 3.5}
    return {**gemms, **{name: operand for name in ("activation", "weight", "gradient")}}


class TestDifferences:
    def test_the_largest_and_its_step(self):
        found = differences(curve([3.0, 2.0, 1.0]), curve([3.0, 2.5, 1.25], [1.0, 1.0, 0.9]))
        assert {f.name: (pytest.approx(f.difference), f.step) for f in found} == {
            "grad_norm": (pytest.approx(0.1), 3),
            "loss": (pytest.approx(0.5), 2),
        }
        assert str(found[1]) == "largest difference 0.5 (loss, step 2)"

    def test_the_last_bit_counts(self):
        (norm, loss) = differences(curve([3.0]), curve([math.nextafter(3.0, 4)]))
        assert norm.passed and not loss.passed

    def test_a_run_that_ends_early_differs(self):
        assert not any(f.passed for f in differences(curve([3.0, 2.0]), curve([3.0])))
        assert not any(f.passed for f in differences(curve([3.0]), {}))

    def test_what_is_not_finite(self):
        nan, inf = math.nan, math.inf
        assert all(f.passed for f in differences(curve([nan, inf]), curve([nan, inf])))
        for one, other in ((nan, 1.0), (inf, nan), (inf, -inf), (inf, 1.0)):
            assert differences(curve([one]), curve([other]))[1].difference == inf


class TestChanges:
    def test_recomputation(self):
        trials = Made(f"{SCRIPT} --lr 1", lambda *_: curve([1.0]))
        assert CHECKS["recompute"](trials).passed
        full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
        assert trials.commands[1][0] == f"{SCRIPT} --lr 1 {full}"
        trials = Made(f"{SCRIPT} {full} --lr 1", lambda *_: curve([1.0]))
        CHECKS["recompute"](trials)
        assert trials.commands[1][0] == f"{SCRIPT} --lr 1"

    @pytest.mark.parametrize(("flags", "other"), [("O3", "bf16"), ("O2", "fp8"), ("O2 --fp8-tp-gather fp8", "bf16")])
    def test_gather(self, flags, other):
        command = f"{SCRIPT} --fp8-level {flags} --tensor-model-parallel-size 2 --sequence-parallel"
        trials = Made(command, lambda *_: curve([1.0]))
        assert CHECKS["tp gather"](trials).passed
        assert trials.commands[1][0] == f"{command} --fp8-tp-gather {other}"

    @pytest.mark.parametrize(("moved", "passes"), [(1.0009, True), (1.001, False), (math.nan, False)])
    def test_what_is_gathered_in_bf16_is_rounded_twice(self, moved, passes):
        command = f"{SCRIPT} --fp8-level O3 --tensor-model-parallel-size 2 --sequence-parallel"
        trials = Made(command, lambda words, _: curve([2.0, 4.0 * (moved if "--fp8-tp-gather" in words else 1.0)]))
        assert CHECKS["tp gather"](trials).passed == passes

    def test_save_and_reload(self):
        def answer(words, steps):
            losses = [5.0, 4.0, 3.0, 2.0, 1.0]
            if "--save" in words:
                assert steps == 2
                return curve(losses[:2], first=11)
            return curve(losses[2:], first=13) if steps == 3 else curve(losses, first=11)

        command = f"{SCRIPT} --load here --finetune --ckpt-step 10 --lr 1"
        trials = Made(command, answer, first=11, steps=5)
        assert CHECKS["save and reload"](trials).passed
        (saving, _), (loading, _), (plain, _) = trials.commands
        assert plain == command and loading == f"{SCRIPT} --lr 1 --load folder/checkpoint"
        assert saving == f"{command} --save folder/checkpoint --save-interval 12 --exit-interval 12"

    @staticmethod
    def micro_batches(ours, twin, plain=1.0, flags=f"--micro-batch-size 4 {NO_DROPOUT}", processes=2):
        """The finding where another size adds `ours` to the loss and the norm, and `twin` to the twin's, in step 2."""

        def answer(words, _):
            split = words[-4:-1:2] == ["--micro-batch-size", "--global-batch-size"]
            change = (twin if "bf16" in words else ours) if split else 0.0
            return curve([1.0, plain + change], [1.0, 2 * (plain + change)])

        trials = Made(f"{SCRIPT} --fp8-level O2 --fp8-margin=1 --fp8-attention te {flags}", answer, processes)
        return CHECKS["micro-batches"](trials), [command for command, _ in trials.commands]

    def test_micro_batches_are_judged_by_the_bf16_twin(self):
        finding, commands = self.micro_batches(0.0312, 2.0**-11)
        assert finding.passed and finding.limit == pytest.approx(64 * 2.0 ** (finding.name == "grad_norm") / 2048)
        rest = f"--fp8-attention te --micro-batch-size 4 {NO_DROPOUT}"
        other = "--micro-batch-size 2 --global-batch-size 8"
        ours, twin = f"{SCRIPT} --fp8-level O2 --fp8-margin=1 {rest}", f"{SCRIPT} {rest} {EXACT}"
        assert commands == [ours, f"{ours} {other}", twin, f"{twin} {other}"]
        assert not self.micro_batches(0.0313, 2.0**-11)[0].passed

    def test_a_twin_that_is_equal_leaves_room_for_rounding(self):
        assert self.micro_batches(3e-5, 0.0)[0].passed
        assert not self.micro_batches(3e-4, 0.0)[0].passed

    @pytest.mark.parametrize("twin", [0.06, 1e3])
    def test_a_bug_that_the_twin_has_too_fails(self, twin):
        finding, _ = self.micro_batches(0.06, twin)
        assert not finding.passed and finding.limit == pytest.approx(0.05 * (1 + (finding.name == "grad_norm")))
        assert self.micro_batches(0.04, twin)[0].passed

    @pytest.mark.parametrize("change", [math.nan, math.inf])
    def test_a_twin_that_is_not_finite_is_no_judge(self, change):
        with pytest.raises(Skipped, match="the BF16 twin is not finite, or ends early"):
            self.micro_batches(0.5, change)
        finding, _ = self.micro_batches(change, 1e-5)
        assert not finding.passed and finding.limit < 1

    @pytest.mark.parametrize("both", [True, False])
    @pytest.mark.parametrize("end", [[], [math.nan]])
    def test_a_twin_that_ends_early_is_no_judge(self, end, both):
        def answer(words, _):
            ends = "bf16" in words and (both or "--global-batch-size" in words)
            return curve([1.0, *(end if ends else [1.0])])

        with pytest.raises(Skipped, match="the BF16 twin"):
            CHECKS["micro-batches"](Made(f"{SCRIPT} --fp8-level O2 --micro-batch-size 4 {NO_DROPOUT}", answer))

    def test_no_masks(self):
        finding, commands = self.micro_batches(1e-3, 1e-4, flags="--micro-batch-size 4 --hidden-dropout 0.2")
        assert finding.passed and all(f" {NO_DROPOUT}" in command for command in commands)

    def test_micro_batches_of_one_are_made_larger(self):
        flags = f"--micro-batch-size 1 --global-batch-size 8 {NO_DROPOUT}"
        _, commands = self.micro_batches(0.0, 0.0, flags=flags)
        assert commands[1].endswith(" --micro-batch-size 2 --global-batch-size 8")

    def test_overlap(self):
        trials = Made(f"{SCRIPT} --use-distributed-optimizer", lambda *_: curve([1.0]), processes=2)
        assert CHECKS["overlap"](trials).passed
        assert trials.commands[1][0].endswith("--overlap-grad-reduce --overlap-param-gather")
        trials = Made(f"{SCRIPT} --overlap-grad-reduce --lr 1", lambda *_: curve([1.0]), processes=2)
        CHECKS["overlap"](trials)
        assert trials.commands[1][0] == f"{SCRIPT} --lr 1"
        with pytest.raises(Skipped, match="BF16 twin"):  # of more ranks the sums' order depends on the buckets
            CHECKS["overlap"](Made(SCRIPT, lambda *_: curve([1.0]), processes=4))

    @pytest.mark.parametrize(
        ("check", "flags", "reason"),
        [
            ("tp gather", "--fp8-level O3", "no tensor and sequence parallelism"),
            ("tp gather", "--tensor-model-parallel-size 2 --sequence-parallel", "no FP8 GEMMs"),
            ("overlap", "--tensor-model-parallel-size 2", "no data parallelism"),
            ("micro-batches", "--micro-batch-size 1 --global-batch-size 6", "no other --micro-batch-size fits"),
            ("micro-batches", "--micro-batch-size 2 --fp8-level O0", "its own BF16 twin"),
        ],
    )
    def test_skipped(self, check, flags, reason):
        with pytest.raises(Skipped, match=reason):
            CHECKS[check](Made(f"{SCRIPT} {flags}", lambda *_: curve([1.0]), processes=2))


class TestReport:
    def made(self, answer, flags=""):
        return Made(f"{SCRIPT} {flags}", answer, steps=1)

    def test_a_line_a_check_and_the_exit_code(self, capsys):
        def answer(words, _):
            if "--recompute-granularity" in words:
                return curve([1.5])
            if "--save" in words:
                raise Refused("--save there: not a folder; give one", "--fp16: use --bf16")
            if "--global-batch-size" in words:
                raise UserError("the run in F failed with exit code 1, at step 0: Segmentation fault")
            return curve([1.0])

        assert invariants.report(self.made(answer, "--fp8-level O1 --micro-batch-size 2")) == 1
        assert capsys.readouterr().out.splitlines() == [
            "repeat           PASS     largest difference 0 (grad norm, step 1)",
            "recompute        FAIL     largest difference 0.5 (loss, step 1)",
            "tp gather        skipped  no tensor and sequence parallelism",
            "save and reload  skipped  --save there: not a folder; give one; --fp16: use --bf16",
            "overlap          skipped  no data parallelism",
            "micro-batches    FAIL     the run in F failed with exit code 1, at step 0: Segmentation fault",
        ]

    def test_a_run_that_does_not_repeat_itself_can_show_little(self, capsys):
        losses = iter(range(100))
        assert invariants.report(self.made(lambda *_: curve([float(next(losses))]))) == 1
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith("repeat           FAIL") and all("skipped" in line for line in lines[1:])
        assert "--deterministic-mode" in lines[1]

    def test_all_well(self, capsys):
        assert invariants.report(Made(SCRIPT, lambda *_: curve([1.0, 0.5, 0.2, 0.1]))) == 0

    @pytest.mark.parametrize("made", [0, 1, 3])
    def test_a_run_of_fewer_steps_than_asked(self, made, capsys):
        trials = Made(SCRIPT, lambda *_: curve([1.0] * made, [2.0] * made))
        said = error_of(invariants.report, trials)
        assert said.startswith(f"the command ends after {made} of 4 steps; raise --train-iters or lower --steps")
        assert capsys.readouterr().out == ""

    @pytest.mark.parametrize(
        ("losses", "norms", "what"),
        [
            ([math.nan] * 4, [math.nan] * 4, "loss"),
            ([1.0] * 4, [math.inf, math.nan] * 2, "grad norm"),
            ([math.nan] * 4, [1.0] * 4, "loss"),
        ],
    )
    def test_a_run_that_is_never_finite(self, losses, norms, what):
        said = error_of(invariants.report, Made(SCRIPT, lambda *_: curve(losses, norms)))
        assert said == f"the command's {what} is finite in no step; take an earlier --load, or a lower --lr"

    def test_a_step_that_is_not_finite_in_both_is_equal(self):
        assert invariants.report(Made(SCRIPT, lambda *_: curve([1.0, math.nan, 0.5, 0.2], [math.inf, 1, 1, 1]))) == 0

    def test_the_worst_is_what_is_farthest_from_its_limit(self):
        findings = [Finding(0.5, "a", 1, 1.0), Finding(0.1, "b", 1, 0.01), Finding(0.0, "c", 1)]
        assert invariants._worst(findings).name == "b"


class TestTrials:
    def test_every_run_has_a_folder_and_the_steps(self, monkeypatch, tmp_path):
        made = []

        def curves(command, processes, folder, timeout, steps):
            made.append((folder.name, steps))
            if "fails" in command:
                raise ValueError("the cause")
            return {"loss": {1: 2.0}, **curve([1.0])}

        monkeypatch.setattr(invariants, "curves", curves)
        trials = Trials([SCRIPT], 1, None, 1, 4, tmp_path)
        assert trials.run() == curve([1.0])
        trials.run(again=True)
        with pytest.raises(ValueError, match="the cause"):
            trials.run([SCRIPT, "fails"])
        trials.run([SCRIPT, "--lr", "1"], steps=2)
        trials.run([SCRIPT, "--lr", "1"])
        assert made == [("run0", 4), ("run1", 4), ("run2", 4), ("run3", 2)]


class TestVerb:
    @pytest.mark.parametrize(
        ("flags", "why"),
        [
            ("--fp8-bf16-layers *", "--fp8-bf16-layers *"),
            ("--first-last-layers-bf16", "--first-last-layers-bf16"),
            ("--fp8-bf16-layers=a* --fp8-emulate-layers b", "--fp8-bf16-layers a* with --fp8-emulate-layers b"),
        ],
    )
    def test_no_linear_to_look_at(self, flags, why, monkeypatch, tmp_path):
        def curves(command, processes, folder, timeout, steps):
            results = Path(command[-1])
            results.mkdir()
            (results / "step-3.json").write_text('{"step": 3, "linears": {}}')

        monkeypatch.setattr(probe, "curves", curves)
        said = error_of(probe.probe, [SCRIPT, *flags.split()], 1, tmp_path, None, 3, 3)
        assert said == f"{why}: leaves no linear in FP8, nothing to probe; let it match fewer linears"

    def test_the_table_is_printed_before_it_is_written(self, monkeypatch, tmp_path, capsys):
        made, found = [], {"step": 3, "linears": {"a": linear(0.1, "E4M3")}}
        monkeypatch.setattr(probe, "probe", lambda *_: made.append(1) or found)
        folder = tmp_path / "out"
        command = ["--json", str(folder / "found.json"), "--", __file__, "--fp8-level", "O1"]
        said = error_of(probe.run, _parse(command))
        assert said == f"--json {folder}/found.json: no such folder; make it, or name another file" and not made
        with pytest.raises(OSError, match="No space left"):  # what only writing it shows
            probe.run(_parse(["--json", "/dev/full", *command[2:]]))
        assert capsys.readouterr().out.startswith("step 3\n")

    def test_a_command_without_fp8_is_not_run(self, monkeypatch):
        monkeypatch.setattr(probe, "probe", lambda *_: {"step": 1, "linears": {"a": linear(0.1, "E4M3")}})
        for flags in ([], ["--fp8-level", "O0"], ["--fp8-level=O0"]):
            assert "has no GEMM in FP8, nothing to probe; add" in error_of(probe.run, _parse(["--", __file__, *flags]))
        for flags in (["--fp8-level=O1"], ["--fp8-emulate", "E8M3"], ["--args-file", "which-may-have-it.yaml"]):
            assert probe.run(_parse(["--", __file__, *flags])) == 0

    def test_the_tables(self):
        linears = {"a": linear(0.03, "E4M3"), "b": linear(None, "E5M2"), "c": linear(0.04, "E8M3")}
        found = {"step": 7, "linears": linears}
        lines = probe.table(found, by_error=False).splitlines()
        assert lines[0] == "step 7" and [line[0] for line in lines[3:6]] == ["a", "b", "c"]
        assert lines[3].split() == ["a", *["3.000", "0.9200"] * 3] and lines[4].split()[1] == "-"
        assert lines[8].split() == ["a", "activation", "E4M3", "1.2500", "0.0000", "-", "3.5", "-", "-"]
        lines = probe.table(found, by_error=True).splitlines()
        assert [line[0] for line in lines[3:6]] == ["b", "c", "a"]

    @pytest.mark.parametrize(
        ("flags", "said"),
        [
            ("--step 0", "--step 0: the command's first is 1"),
            ("--steps 3", "--steps 3: only with --invariants"),
            ("--invariants --steps 1", "--steps 1: a checkpoint is saved in the middle"),
            ("--invariants --step 3", "--step 3 with --invariants: no effect"),
            ("--invariants --sort error", "--sort error with --invariants: no effect"),
        ],
    )
    def test_mistakes(self, flags, said, capsys, tmp_path):
        script = tmp_path / "script.py"
        script.touch()
        with pytest.raises(SystemExit) as ended:
            main(["lab", "probe", *flags.split(), "--", str(script)])
        assert ended.value.code == 2 and said in capsys.readouterr().err

    def test_without_a_command(self):
        assert "no training command" in error_of(_parse, [])


def _parse(argv):
    import argparse

    parser = argparse.ArgumentParser()
    probe.add_arguments(parser)
    return parser.parse_args(argv)
