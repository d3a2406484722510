"""Flags with which Megatron would crash give one line: the flag, its value, and a remedy that works.

tests/cpu/test_stock_fault_runs.py tests that stock Megatron crashes there, and that the remedies train.
"""

import sys

import pytest
from commands import MODEL, error_of

from megatron_fp8.flags.stock_faults import check_faults

SCHEDULE = "--step-batch-size-schedule"
VIRTUAL = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
EVALUATES = ["--eval-interval", "5"]
GROUPED = "--num-experts 4 --moe-router-topk 2 --moe-router-num-groups"


@pytest.fixture(autouse=True)
def script(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/there/pretrain_gpt.py"])


@pytest.mark.parametrize(
    ("flags", "line", "remedy"),
    [
        ("", "--eval-interval: missing; ", "--eval-interval 1000"),
        ("--full-validation", "--full-validation: ", "--full-validation --multiple-validation-sets"),
        ("--skip-train --full-validation", "--full-validation: ", "--multiple-validation-sets"),
        ("--no-pad-vocab-size", "--no-pad-vocab-size: ", "--no-pad-vocab-size --padded-vocab-size 256"),
        ("--phase-transition-iterations 2", "--phase-transition-iterations 2: Megatron counts ", "--train-samples 9"),
        ("--phase-transition-iterations 2,x", "--phase-transition-iterations 2,x: use whole numbers ", ""),
        ("--phase-transition-iterations=-2 --train-samples 9", "--phase-transition-iterations -2: use whole ", ""),
        ("--position-embedding-type mrope", "--position-embedding-type mrope: ", "--position-embedding-type rope"),
        (
            f"{VIRTUAL} --step-batch-size-schedule 0:8",
            "--eval-global-batch-size 2: 1 micro-batch, and virtual stages take them in groups of 2; change it",
            f"{VIRTUAL} --step-batch-size-schedule 0:8 --eval-global-batch-size 4",
        ),
        (
            "--train-samples 7 --global-batch-size 8",
            "--train-samples 7: fewer than --global-batch-size 8, so there is no step; use 8 or more",
            "--train-samples 8 --global-batch-size 8",
        ),
        ("--use-sharp", "--use-sharp: megatron-core 0.19 cannot start with it: ", ""),
        ("--no-initialization", "--no-initialization: ", "--no-initialization --load there"),
        ("--no-initialization", "--no-initialization: ", "--no-initialization --pretrained-checkpoint there"),
        (
            "--tensor-model-parallel-size 2 --eval-micro-batch-size 4",
            "--eval-micro-batch-size 4: with --tensor-model-parallel-size 2 ",
            "--tensor-model-parallel-size 2 --micro-batch-size 4 --eval-micro-batch-size 4",
        ),
        ("--num-experts 4 --moe-layer-freq 0", "--moe-layer-freq 0: ", "--moe-layer-freq 1"),
        ("--num-experts 4 --moe-input-jitter-eps 0", "--moe-input-jitter-eps 0: ", "--moe-input-jitter-eps 0.1"),
        (f"{GROUPED} 4 --moe-router-group-topk 1", "--moe-router-topk 2: a token's ", f"{GROUPED} 2"),
        (f"{GROUPED} 2 --moe-router-group-topk 1 --moe-router-topk 3", "--moe-router-topk 3: a token's ", ""),
        (f"{GROUPED} 4 --moe-router-group-topk 3", "--moe-router-group-topk 3: more than --moe-router-topk 2,", ""),
    ],
)
def test_each_is_one_line(flags, line, remedy, parse):
    evaluates = [] if "eval-interval" in line else EVALUATES
    said = error_of(check_faults, parse(*MODEL, *evaluates, *flags.split()))
    assert said.startswith(line), said
    named = [word for word in remedy.split() if word.startswith("--") and word not in f"{VIRTUAL} {SCHEDULE}".split()]
    assert all(word in said for word in named)
    check_faults(parse(*MODEL, *EVALUATES, *remedy.split()))


@pytest.mark.parametrize("flags", ["--phase-transition-iterations 2,4 --train-samples 96", "--full-validation "
                         "--multiple-validation-sets", "--skip-train", "--eval-micro-batch-size 4",
                         f"{GROUPED} 2 --moe-router-group-topk 1", f"{GROUPED} 4 --moe-router-group-topk 2",
                         "--num-experts 4 --moe-input-jitter-eps 0.01 --moe-layer-freq 2",
                         "--tensor-model-parallel-size 2 --eval-micro-batch-size 4 --eval-iters 0"])  # fmt: skip
def test_what_megatron_can_do_is_taken(flags, parse):
    check_faults(parse(*MODEL, *EVALUATES, *flags.split()))


def test_our_script_evaluates_with_another_micro_batch_size(parse, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt_fp8.py"])
    check_faults(parse(*MODEL, *EVALUATES, *"--tensor-model-parallel-size 2 --eval-micro-batch-size 4".split()))


def test_a_script_of_ones_own_may_have_three_axes(parse, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["pretrain_vlm.py"])
    check_faults(parse(*MODEL, *EVALUATES, "--position-embedding-type", "mrope"))
