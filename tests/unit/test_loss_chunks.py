"""layers/loss_chunks.py beside the whole loss, with a head and a loss of torch's own; the refusals of its flag."""

import pytest
import torch
import torch.nn.functional as F
from commands import O1, error_of

from megatron_fp8.flags.config import config_from_args
from megatron_fp8.layers.loss_chunks import in_chunks

WIDTH, ROWS_OF_VOCABULARY = 24, 37


class Head(torch.nn.Linear):
    """Takes what Megatron's head takes. `gathers` ranks' rows, as under sequence parallelism: here, a rank's twice."""

    def __init__(self, ranks: int):
        super().__init__(WIDTH, ROWS_OF_VOCABULARY, bias=False, dtype=torch.float64)
        self.ranks, self.seen = ranks, []

    def forward(self, hidden, weight=None, runtime_gather_output=None):
        self.seen.append(len(hidden))
        return F.linear(torch.cat([hidden * (rank + 1) for rank in range(self.ranks)]), self.weight), None


class Model(torch.nn.Module):
    """Megatron's GPTModel after its last norm."""

    def __init__(self, ranks: int = 1):
        super().__init__()
        self.output_layer = Head(ranks)

    @staticmethod
    def compute_language_model_loss(labels, logits):
        return F.cross_entropy(logits.permute(1, 2, 0), labels, reduction="none")

    def forward(self, hidden, labels=None, *, output_processor=None):
        whole = {"hidden_states": hidden, "labels": labels, "output_layer": self.output_layer, "output_weight": None}
        whole |= {"compute_language_model_loss": self.compute_language_model_loss, "runtime_gather_output": None}
        if output_processor is not None:
            return output_processor(**whole, scale_logits=lambda logits: logits * 3, loss_mask=None)
        logits = self.output_layer(hidden)[0] * 3
        return logits if labels is None else self.compute_language_model_loss(labels, logits)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("rows", "chunks", "seen"),
    [(64, 4, [16] * 4), (64, 3, [32, 32]), (80, 2, [48, 32]), (16, 8, [16]), (7, 2, [7]), (40, 3, [16, 16, 8])],
)
def test_losses_and_gradients_are_the_wholes(rows, chunks, seen, ranks):
    """In FP64; each token's loss has a factor of its own, as a loss mask gives it."""
    generator = torch.Generator().manual_seed(rows * chunks)
    hidden = torch.randn(rows, 2, WIDTH, generator=generator, dtype=torch.float64)
    labels = torch.randint(ROWS_OF_VOCABULARY, (2, ranks * rows), generator=generator)
    factors = torch.rand(2, ranks * rows, generator=generator, dtype=torch.float64)
    model = Model(ranks)
    found = []
    for parts in (1, chunks):
        if parts > 1:
            in_chunks(model, parts)
        model.zero_grad()
        model.output_layer.seen.clear()
        x = hidden.clone().requires_grad_()
        loss = model(x, labels)
        assert loss.shape == labels.shape
        (loss * factors).sum().backward()
        found.append((loss.detach(), x.grad, model.output_layer.weight.grad.clone()))
    for ours, whole in zip(*reversed(found), strict=True):
        torch.testing.assert_close(ours, whole, rtol=1e-12, atol=1e-12)
    assert model.output_layer.seen == [*seen, *reversed(seen)]  # forward, and again from the last part


def test_no_gradient_no_second_pass_and_no_labels_no_parts(capsys):
    model, hidden = Model(), torch.randn(32, 2, WIDTH, dtype=torch.float64)
    in_chunks(model, 2)
    with torch.no_grad():
        model(hidden, torch.zeros(2, 32, dtype=torch.int64))
    assert model.output_layer.seen == [16, 16]
    assert model(hidden).shape == (32, 2, ROWS_OF_VOCABULARY)  # a script that wants logits gets them
    mine = model(hidden, torch.zeros(2, 32, dtype=torch.int64), output_processor=lambda **_: "mine")
    assert mine == "mine" and model.output_layer.seen == [16, 16, 32]
    assert capsys.readouterr().out == "[fp8] --fp8-loss-chunks 2: no effect, training asks the model for logits\n"


def test_parts_hold_few_logits_at_a_time():
    """What autograd keeps between the passes is the hidden states, not the logits."""
    model = Model()
    in_chunks(model, 4)
    kept: list[int] = []

    def pack(tensor):
        kept.append(tensor.numel())
        return tensor

    hidden = torch.randn(64, 1, WIDTH, dtype=torch.float64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(hidden, torch.zeros(1, 64, dtype=torch.int64))
    assert max(kept, default=0) < 16 * ROWS_OF_VOCABULARY


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--fp8-sharpness-interval 3", "--fp8-loss-chunks 4: --fp8-sharpness-interval 3 reads all logits; remove one"),
        ("--mtp-num-layers 1", "--fp8-loss-chunks 4: --mtp-num-layers 1 has losses of its own, whose logits would"),
        ("--defer-embedding-wgrad-compute", "4: --defer-embedding-wgrad-compute keeps the input of each forward pass"),
        ("--fp8-sharpness-eval out.json", "--fp8-sharpness-eval out.json reads all logits"),
        ("--config-logger-dir logs", "--config-logger-dir logs logs all logits"),
        ("--overlap-moe-expert-parallel-comm", "--overlap-moe-expert-parallel-comm"),
        ("--fp8-emulate E8M3 --fp8-emulate-lm-head", "--fp8-emulate-lm-head would round other numbers"),
    ],
)
def test_what_needs_whole_logits_is_refused(flags, told, parse):
    args = parse(*O1, "--fp8-loss-chunks", "4", *flags.split())
    assert told in error_of(config_from_args, args)


def test_the_flag(parse):
    assert config_from_args(parse(*O1)).loss_chunks == 1
    assert config_from_args(parse(*O1, "--fp8-loss-chunks", "8")).loss_chunks == 8
