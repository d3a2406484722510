"""The --fp8-emulate flags: their meaning, and their error lines."""

from argparse import Namespace

import pytest

from megatron_fp8.flags.emulate import LM_HEAD, OPERANDS, EmulationPlan, emulation_from_args
from megatron_fp8.numerics.emulation import EmulatedFormat

FC1 = "decoder.layers.mlp.linear_fc1"
QKV = "decoder.layers.self_attention.linear_qkv"


def plan_of(emulate: str | None, layers: str | None = None, **others) -> EmulationPlan | None:
    """The plan for --fp8-emulate, --fp8-emulate-layers and the other flags."""
    others = {f"fp8_emulate_{name}": value for name, value in others.items()}
    return emulation_from_args(Namespace(fp8_emulate=emulate, fp8_emulate_layers=layers, **others))


def texts(plan: EmulationPlan, path: str = FC1, layer: int = 1, step: int = 1) -> list[str | None]:
    found = [plan.for_operand(path, layer, operand, step) for operand in ("weight", "activation", "gradient")]
    return [None if how is None else str(how) for how in found]


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("E8M3", ["E8M3:nearest:none"] * 3),
        ("e4m3:truncate:row", ["E4M3:truncate:row"] * 3),
        (
            "weight=E8M3,activation=E8M3:truncate,gradient=E5M2:nearest:tensor",
            ["E8M3:nearest:none", "E8M3:truncate:none", "E5M2:nearest:tensor"],
        ),
        ("gradient=E2M1:stochastic:block:32", [None, None, "E2M1:stochastic:block:32"]),
        ("gradient=E5M2,E4M3", ["E4M3:nearest:none"] * 2 + ["E5M2:nearest:none"]),
    ],
)
def test_operands(flag, expected):
    assert texts(plan_of(flag)) == expected


def test_without_flags_there_is_no_plan():
    assert plan_of(None) is None


def test_a_plan_is_a_value():
    plan = plan_of("E8M3", "*.linear_fc1", lm_head=True, from_step=3, until_step=9)
    how = EmulatedFormat.parse("E8M3")
    again = plan_of("weight=E8M3,E8M3:nearest:none", "*.linear_fc1", lm_head=True, from_step=3, until_step=9)
    assert plan == EmulationPlan(how, how, how, ("*.linear_fc1",), True, 3, 9) and hash(plan) == hash(again)


def test_layers_are_numbered_from_zero_over_the_whole_model():
    plan = plan_of("E8M3", "decoder.layers.[0-3].*")
    covered = [layer for layer in range(1, 45) if plan.covers(FC1, layer)]
    assert covered == [1, 2, 3, 4]
    assert texts(plan, FC1, 4) == texts(plan, QKV, 4) == ["E8M3:nearest:none"] * 3
    assert texts(plan, FC1, 5) == [None] * 3


def test_several_patterns():
    plan = plan_of("E8M3", "decoder.layers.1[0-2].mlp.*,*.linear_qkv")
    assert plan.covers(QKV, 1) and not plan.covers(FC1, 1)
    assert [layer for layer in range(1, 30) if plan.covers(FC1, layer)] == [11, 12, 13]
    assert not plan_of("E8M3", "decoder.layers.mlp.*").covers(FC1, 1)


def test_the_lm_head_is_included_only_on_request():
    assert texts(plan_of("E8M3"), LM_HEAD, 0) == [None] * 3
    assert texts(plan_of("E8M3", lm_head=True), LM_HEAD, 0) == ["E8M3:nearest:none"] * 3
    only = plan_of("E8M3", layers="none", lm_head=True)
    assert only.covers(LM_HEAD, 0) and not only.covers(FC1, 1)


def test_steps():
    plan = plan_of("E8M3", from_step=5, until_step=8)
    assert [step for step in range(1, 20) if plan.for_operand(FC1, 1, "weight", step)] == [5, 6, 7]
    assert all(plan_of("E8M3").for_operand(FC1, 1, operand, 1) for operand in OPERANDS)
    before, after = plan_of("E8M3", until_step=5), plan_of("E8M3", from_step=5)
    for step in range(1, 10):  # exactly one of the two covers each step
        given = [plan.for_operand(FC1, 1, "weight", step) is not None for plan in (before, after)]
        assert sum(given) == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"emulate": "weights=E8M3"}, r"^--fp8-emulate weights=E8M3: no operand 'weights'; use weight, activation"),
        ({"emulate": "=E8M3"}, "no operand ''"),
        ({"emulate": "a=weight=E8M3"}, "no operand 'a=weight'"),
        ({"emulate": "E9M3"}, r"^--fp8-emulate E9M3: 'E9M3' is not a format: use ExMy"),
        ({"emulate": ""}, r"FORMAT\[:ROUNDING\]\[:SCALING\]: use"),
        ({"emulate": "E8M3,"}, "use, say, E8M3"),
        ({"emulate": "E8M3:down"}, "ROUNDING nearest, truncate, stochastic"),
        ({"emulate": "E4M3:block"}, "block:N"),
        ({"emulate": "weight=E8M3,weight=E8M4"}, "weight is given twice; give it once"),
        ({"emulate": "E8M3,E8M4"}, "a format for all is given twice"),
        ({"emulate": "E8M3:nearest:row"}, "needs no scale; remove :row"),
        ({"emulate": "E8M3", "from_step": 7, "until_step": 7}, r"until-step 7: .*step 7; use 8 or more"),
        ({"emulate": "E8M3", "until_step": 1}, "use 2 or more"),
        ({"emulate": "E8M3", "layers": ""}, "layers '': an empty pattern"),
        ({"emulate": "E8M3", "layers": "a,,b"}, "an empty pattern"),
        ({"layers": "*"}, r"^--fp8-emulate-layers \*: nothing is emulated; add --fp8-emulate"),
        ({"lm_head": True}, r"^--fp8-emulate-lm-head: nothing is emulated"),
        ({"from_step": 3}, r"^--fp8-emulate-from-step 3: nothing is emulated"),
        ({"until_step": 3}, r"^--fp8-emulate-until-step 3: nothing is emulated"),
    ],
)
def test_mistakes_are_refused_in_one_line(flags, message):
    with pytest.raises(ValueError, match=message) as error:
        plan_of(**({"emulate": None} | flags))
    assert "\n" not in str(error.value)
