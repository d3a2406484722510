"""The DPO loss and its gradients compared with the closed form in float64, and the dataset of pairs."""

import math
import sys
from argparse import Namespace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_fp8.errors import UserError
from megatron_fp8.flags import dpo
from megatron_fp8.tuning import conversations, score_file
from megatron_fp8.tuning.fingerprint import differs
from megatron_fp8.tuning.pairs import PreferenceDataset
from megatron_fp8.tuning.preferences import Options, Scores, loss_of, scores
from megatron_fp8.tuning.score_file import ScoreFile, key_of


def random_scores(pairs: int = 6):
    """(the policy's log-probabilities, the reference's, numbers of tokens), float64, for answers of 3 to 30 tokens."""
    tokens = torch.randint(3, 30, (2 * pairs,)).double()
    policy, reference = (-tokens * torch.rand(2 * pairs, dtype=torch.float64) * 3 for _ in range(2))
    return policy.requires_grad_(), reference, tokens


@pytest.mark.parametrize(
    "how", [Options(0.1), Options(0.5, 0.2), Options(0.3, 0.1, 0.7), Options(0.0), Options(1, 0.5)], ids=str
)
def test_loss_and_gradient_are_the_closed_form(how):
    policy, reference, tokens = random_scores()
    loss, number, _ = loss_of(Scores(policy, tokens), reference, how)
    expected, gradient = 0.0, torch.zeros_like(policy)
    for i in range(0, len(policy), 2):
        a, b = policy[i].item() - reference[i].item(), policy[i + 1].item() - reference[i + 1].item()
        z = how.beta * (a - b)
        right = 1 / (1 + math.exp(-z))
        softplus = [max(x, 0) + math.log1p(math.exp(-abs(x))) for x in (-z, z)]  # -log sigmoid of z, and of -z
        expected += (1 - how.smoothing) * softplus[0] + how.smoothing * softplus[1]
        expected -= how.sft * policy[i].item() / tokens[i].item()
        slope = how.beta * ((1 - right) - how.smoothing)
        gradient[i], gradient[i + 1] = -slope - how.sft / tokens[i].item(), slope
    loss.backward()
    assert loss.item() == pytest.approx(expected, rel=1e-5) and number == 6
    assert torch.allclose(policy.grad, gradient, rtol=1e-4, atol=1e-7)
    if how.beta == 0:
        assert not policy.grad.any()


def test_a_swapped_pair_has_the_gradient_of_the_other_sign():
    _, reference, tokens = random_scores(1)
    at_start = Scores(reference.clone().requires_grad_(), tokens)
    loss, _, _ = loss_of(at_start, reference, Options(0.4))
    loss.backward()
    assert at_start.logp.grad.tolist() == pytest.approx([-0.2, 0.2])
    assert loss.item() == pytest.approx(math.log(2))
    swapped = Scores(reference.flip(0).clone().requires_grad_(), tokens.flip(0))
    loss_of(swapped, reference.flip(0), Options(0.4))[0].backward()
    assert torch.equal(swapped.logp.grad.flip(0), -at_start.logp.grad)
    smoothed = Scores(reference.clone().requires_grad_(), tokens)
    loss_of(smoothed, reference, Options(0.4, smoothing=0.5))[0].backward()
    assert not smoothed.logp.grad.any()


def test_what_is_logged():
    policy, reference, tokens = random_scores()
    _, _, report = loss_of(Scores(policy, tokens), reference, Options(0.2))
    ratio = (policy - reference).detach()
    z = 0.2 * (ratio[0::2] - ratio[1::2])
    mean = {name: (total / count).item() for name, (total, count) in report.items()}
    assert mean["accuracy"] == pytest.approx((z > 0).double().mean().item())
    assert mean["margin"] == pytest.approx(z.mean().item(), rel=1e-4)
    assert mean["chosen reward"] == pytest.approx(0.2 * ratio[0::2].mean().item(), rel=1e-4)
    assert mean["rejected reward"] == pytest.approx(0.2 * ratio[1::2].mean().item(), rel=1e-4)
    assert mean["abs log-ratio"] == pytest.approx(ratio.abs().mean().item(), rel=1e-4)
    assert mean["kl a token"] == pytest.approx((-ratio.sum() / tokens.sum()).item(), rel=1e-3, abs=1e-6)


def test_a_pair_without_an_answer_counts_nothing():
    """Alone it gives loss 0 and no NaN; it does not change the loss of other pairs, nor a bit of what is logged."""
    policy, reference, tokens = random_scores()
    others = loss_of(Scores(policy[2:], tokens[2:]), reference[2:], Options(0.3, sft=0.5))
    none = torch.zeros(2, dtype=torch.float64)
    for which in (0, 1):
        empty = tokens.clone()
        empty[which] = 0
        loss, number, report = loss_of(Scores(policy, empty), reference, Options(0.3, sft=0.5))
        assert torch.allclose(loss, others[0]) and number == 5
        assert all(torch.allclose(report[name], others[2][name]) for name in report)
    alone = Scores(none.clone().requires_grad_(), none)
    loss, number, report = loss_of(alone, none, Options(0.3, sft=0.5))
    loss.backward()
    assert loss == 0 and number == 0 and not alone.logp.grad.any()
    for name, values in report.items():
        assert values[0] / values[1] == 0 and torch.equal(values + others[2][name], others[2][name])


def test_scores_are_sums_by_document():
    ends = torch.tensor([0, 5, 6, 14, 20], dtype=torch.int32)
    losses, counts = torch.rand(1, 20), (torch.rand(1, 20) > 0.4).float()
    losses.requires_grad_()
    found = scores(losses, counts, ends)
    for i, (a, b) in enumerate(zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)):
        assert found.logp[i].item() == pytest.approx(-(losses * counts)[0, a:b].sum().item(), abs=1e-5)
        assert found.tokens[i] == counts[0, a:b].sum()
    found.logp[2].backward()
    expected = torch.zeros(1, 20)
    expected[0, 6:14] = -counts[0, 6:14]
    assert torch.equal(losses.grad, expected)


# --- the data set


def tokenize(conversation, return_target, add_generation_prompt):
    tokens = [ord(c) for message in conversation for c in message["content"]]
    targets = [ord(c) if m["role"] == "assistant" else -100 for m in conversation for c in m["content"]]
    return np.array(tokens), np.array(targets)


def said(answer: str) -> list[dict]:
    return [{"role": "user", "content": "ab"}, {"role": "assistant", "content": answer}]


@pytest.fixture
def dataset(monkeypatch):
    """For a model of 128 tokens, which has all letters."""
    monkeypatch.setattr(conversations, "get_args", lambda: SimpleNamespace(padded_vocab_size=128))
    lines = [
        {"chosen": said("xyz"), "rejected": said("w")},
        {"pairs": [{"chosen": said("x"), "rejected": said("yy")}, {"chosen": said("v" * 9), "rejected": said("u")}]},
        {"chosen": said("x" * 40), "rejected": said("y")},
    ]
    tokenizer = SimpleNamespace(tokenize_conversation=tokenize, pad=0, eod=0)
    config = SimpleNamespace(tokenizer=tokenizer, sequence_length=32)
    found = PreferenceDataset.__new__(PreferenceDataset)
    found.config, found.indices, found.dataset, found.dataset_path = config, np.arange(3), lines, "pairs.jsonl"
    return found


def test_a_pair_is_two_documents_and_the_padding_is_the_second_s(dataset):
    sample = dataset[0]
    assert bytes(sample["tokens"][:8].tolist()) == b"abxyzabw" and not sample["tokens"][8:].any()
    assert sample["cu_seqlens"][:4].tolist() == [0, 5, 32, 32] and len(sample["cu_seqlens"]) == 33
    assert sample["position_ids"].tolist() == [*range(5), *range(27)] and sample["max_seqlen"] == 27
    counted = [i for i, one in enumerate(sample["loss_mask"].tolist()) if one]
    assert counted == [1, 2, 3, 6]  # tokens that predict an answer's token; never a document's last
    assert bytes(sample["labels"][counted].tolist()) == b"xyzw"
    assert set(sample["labels"].tolist()) == {-100, *b"xyzw"}


def test_a_token_that_the_model_does_not_have_is_refused(dataset, monkeypatch):
    largest = ord("z")
    monkeypatch.setattr(conversations, "get_args", lambda: SimpleNamespace(padded_vocab_size=largest))
    with pytest.raises(UserError, match=f"--data-path pairs.jsonl: sample 0 has token {largest}, and the model has"):
        dataset[0]


def test_several_pairs_share_a_sample(dataset):
    sample = dataset[1]
    assert sample["cu_seqlens"][:6].tolist() == [0, 3, 7, 18, 32, 32]
    assert sample["loss_mask"].sum() == 1 + 2 + 9 + 1


def test_a_pair_with_one_answer_is_masked(dataset):
    whole = dataset[1]
    dataset.dataset[1]["pairs"][0]["rejected"] = [{"role": "user", "content": "abyy"}]
    sample = dataset[1]
    assert torch.equal(sample["tokens"], whole["tokens"]) and torch.equal(sample["cu_seqlens"], whole["cu_seqlens"])
    assert sample["loss_mask"][:7].sum() == 0 and torch.equal(sample["loss_mask"][7:], whole["loss_mask"][7:])


def test_a_pair_that_is_too_long_or_none_is_said(dataset):
    with pytest.raises(UserError, match="sample 2 has 45 tokens, more than --seq-length 32"):
        dataset[2]
    for line in ({}, {"chosen": [], "rejected": []}, {"chosen": said("x")}, {"pairs": [1]}, [], "text"):
        dataset.dataset[1] = line
        with pytest.raises(UserError, match=r"--data-path pairs\.jsonl: sample 1 is neither "):
            dataset[1]


def test_a_line_may_have_the_keys_of_others(dataset):
    """The package `datasets` gives each line all keys of the file."""
    dataset.dataset[0] |= {"pairs": None}
    dataset.dataset[1] |= {"chosen": None, "rejected": None}
    assert dataset[0]["cu_seqlens"][:4].tolist() == [0, 5, 32, 32] and dataset[1]["loss_mask"].sum() == 13


def test_the_reader_s_own_errors_are_one_line(monkeypatch):
    def load_dataset(kind, data_files, split):
        raise RuntimeError("cannot") from ValueError("JSON parse error: line 3\nand more")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(UserError, match=r"--data-path x\.jsonl: .*: JSON parse error: line 3$"):
        PreferenceDataset.build_low_level_dataset("x.jsonl", None)


# --- a file of scores


def random_samples(number: int = 20):
    """({key: its documents' scores}, their documents)."""
    documents = [[tuple(np.random.randint(0, 9, (2, 5))) for _ in range(2 * i)] for i in range(1, number)]
    return {key_of(ones): np.random.randn(len(ones)).astype(np.float32) for ones in documents}, documents


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("{}\n")
    return str(path)


def test_scores_come_back(tmp_path, data):
    found, documents = random_samples()
    score_file.write(str(tmp_path / "scores"), found, [data])
    read = ScoreFile(str(tmp_path / "scores"), [data])
    assert len(found) == len(documents) and [*tmp_path.glob("*.part")] == []
    for ones in documents:
        assert np.array_equal(read[key_of(ones)], found[key_of(ones)])


@pytest.mark.parametrize("older", [None, 5], ids=["", "the LM head's number alone"])
def test_older_files_and_checkpoints_are_read(older, tmp_path, data):
    """What they say of the reference is compared, and nothing else."""
    found, _ = random_samples()
    score_file.write(str(tmp_path / "scores"), found, [data], older)
    read = ScoreFile(str(tmp_path / "scores"), [data])
    args = Namespace()
    assert not [*dpo.changed(Namespace(dpo_reference_model=older), args)]
    assert read.model == args.dpo_reference == ({} if older is None else {"head": 5})
    read.check_model({"head": 5, "others": 7})
    if older is not None:
        with pytest.raises(UserError, match="another model than this run begins with"):
            read.check_model({"head": 6, "others": 7})


def test_models_are_compared_by_what_is_known_of_both():
    assert not differs({"head": 1, "others": 2}, {"head": 1, "linears O3": 3})
    assert not differs({}, {"head": 1})
    assert differs({"head": 1, "others": 2}, {"head": 1, "others": 3})


def test_a_key_is_of_all_tokens_and_of_where_they_end():
    a, b = np.arange(6), np.arange(6) + 1
    keys = [
        key_of(ones)
        for ones in ([(a, b)], [(b, a)], [(a, b), (b, a)], [(a[:3], b[:3]), (a[3:], b[3:])], [(a, a)], [(a, b)] * 2)
    ]
    assert len(set(keys)) == len(keys) and key_of([(a.astype(np.int32), b)]) == keys[0]


def test_a_file_that_does_not_fit_is_refused(tmp_path, data):
    found, documents = random_samples()
    path = tmp_path / "scores"

    def refused(words: str) -> None:
        with pytest.raises(UserError, match=words):
            ScoreFile(str(path), [data])[key_of(documents[0])]

    refused("no such file; --dpo-score-reference writes it")
    score_file.write(str(path), found, [data])
    whole = path.read_bytes()
    for at in (0, len(whole) // 2):
        path.write_bytes(whole[:at])
        refused("not a file of --dpo-score-reference, or damaged")
    score_file.write(str(path), {key: logp for key, logp in found.items() if key != key_of(documents[0])}, [data])
    refused("other tokens than when it was scored")
    score_file.write(str(path), {**found, key_of(documents[0]): np.float32([np.nan, 0])}, [data])
    refused("not finite")
    score_file.write(str(path), found, [data])
    with open(data, "a") as file:
        file.write("{}\n")
    refused(f"has no scores of --data-path {data} as it is now")
    with pytest.raises(UserError, match="the file exists"):
        score_file.check_new(str(path))
    with pytest.raises(UserError, match="no folder"):
        score_file.check_new(str(tmp_path / "none/scores"))
