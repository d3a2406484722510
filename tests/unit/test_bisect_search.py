"""The search of a bisect, on known gaps."""

import math
import random
from fnmatch import fnmatchcase

import pytest

from megatron_fp8.engine.names import ranges
from megatron_fp8.tools.lab.trial.bisect_search import in_order, patterns, search

KINDS = ("self_attention.linear_proj", "self_attention.linear_qkv", "mlp.linear_fc1", "mlp.linear_fc2")


def model(layers: int) -> list[str]:
    return [f"decoder.layers.{i}.{kind}" for i in range(layers) for kind in KINDS]


def searched(layers: int, costs: dict[str, float], target: float = 0.9) -> tuple[set[str], int]:
    """The set that is found if each linear has a known share of the gap, and the number of sets asked for."""
    asked, total = set(), sum(costs.values())

    def share(chosen: frozenset[str]) -> float:
        asked.add(chosen)
        return sum(costs.get(name, 0) for name in chosen) / total

    return set(search(model(layers), share, target)), len(asked)


@pytest.mark.parametrize("layers", [1, 2, 3, 7, 32, 100])
def test_one_culprit(layers):
    for name in random.sample(model(layers), 4):
        found, runs = searched(layers, {name: 1.0})
        assert found == {name}
        assert runs <= 2 * (2 + math.ceil(math.log2(layers)))


@pytest.mark.parametrize("layers", [4, 17, 32])
def test_two_culprits_in_different_halves(layers):
    last = layers - 1
    for _ in range(5):
        one = f"decoder.layers.{random.randrange(layers // 2)}.{random.choice(KINDS)}"
        other = f"decoder.layers.{random.randrange(layers // 2, last + 1)}.{random.choice(KINDS)}"
        found, runs = searched(layers, {one: 0.7, other: 0.5})
        assert found == {one, other}
        assert runs <= 8 * (2 + math.ceil(math.log2(layers)))


def test_whole_kinds_and_whole_layers():
    kind = {name: 1.0 for name in model(32) if name.endswith("linear_fc2")}
    assert searched(32, kind)[0] == set(kind)
    layer = {name: random.uniform(0.5, 1) for name in model(32) if name.startswith("decoder.layers.13.")}
    assert searched(32, layer)[0] == set(layer)


def test_linears_with_little_of_the_gap_are_left_out():
    names = model(8)
    costs = {names[3]: 10.0, names[21]: 10.0, **dict.fromkeys(names[24:], 0.1)}
    assert searched(8, costs)[0] == {names[3], names[21]}
    assert len(searched(8, costs, target=0.99)[0]) > 2


@pytest.mark.parametrize("layers", [4, 8, 64])
def test_a_gap_that_is_spread_ends_the_search(layers):
    found, runs = searched(layers, {name: random.uniform(0.9, 1.1) for name in model(layers)}, target=0.95)
    assert len(found) > 0.9 * len(model(layers))
    assert runs <= 6 + 14


def test_subsets_of_a_set_that_is_not_enough_are_not_run():
    asked = []
    culprit = "decoder.layers.2.mlp.linear_fc1"

    def share(chosen):
        assert not any(chosen <= before for before, enough in asked if not enough)
        asked.append((chosen, culprit in chosen))
        return float(culprit in chosen)

    assert search(model(16), share, 0.9) == [culprit]


@pytest.mark.parametrize("layers", [1, 3, 12, 120])
def test_patterns_match_what_was_chosen_and_nothing_else(layers):
    names = [*model(layers), "mtp.layers.0.mlp.linear_fc2", "output_layer"]
    for _ in range(30):
        wanted = {name for name in names if random.random() < random.choice([0.1, 0.5, 0.95])}
        if wanted:
            words = patterns(wanted, names).split(",")
            assert {name for name in names if any(fnmatchcase(name, word) for word in words)} == wanted


def test_patterns_are_short():
    names = model(32)
    assert patterns(names, names) == "*"
    assert patterns([name for name in names if "fc2" in name], names) == "decoder.layers.*.mlp.linear_fc2"
    assert patterns(model(10)[8:], names) == "decoder.layers.[2-9].*"
    ten = [name for name in model(13) if name.endswith("fc1")][8:]
    assert patterns(ten, names) == "decoder.layers.[89].mlp.linear_fc1,decoder.layers.1[0-2].mlp.linear_fc1"
    both = {*model(1), *(name for name in names if "fc2" in name)}
    assert patterns(both, names) == "decoder.layers.*.mlp.linear_fc2,decoder.layers.0.*"


def test_linears_in_order():
    """From pipeline stages with several chunks each: the kinds of a layer stay in order, layer 10 follows 9."""
    names = model(12)
    stages = [name for stage in (0, 1) for name in names if int(name.split(".")[2]) // 3 % 2 == stage]
    assert stages != names and in_order(stages) == names
    assert in_order(["output_layer", *names]) == [*names, "output_layer"] and in_order([]) == []


def test_the_log_says_names_in_few_words():
    some = ["decoder.layers.0.mlp.linear_fc1", "decoder.layers.7.mlp.linear_fc1", "decoder.layers.8.mlp.linear_fc1"]
    assert ranges([*some, "output_layer"]) == "output_layer decoder.layers.0,7-8.mlp.linear_fc1" and ranges([]) == ""
