"""The loss of direct preference optimisation (DPO), from log-probabilities of a policy and of a reference model.

    log p(y) = sum over the answer's tokens of log p(token)        an answer is one document of a packed row
    d        = log p(chosen) - log p(rejected)                     one for the policy, one for the reference
    z        = beta (d_policy - d_reference)
    loss     = -(1 - e) log sigmoid(z) - e log sigmoid(-z)         e: label smoothing
               - w log p(chosen) / its tokens                      w: weight of the SFT term

    d loss / d log p(chosen) = -beta (sigmoid(-z) - e) - w / tokens        for the rejected: +beta (sigmoid(-z) - e)

At the first step policy and reference are equal: z = 0, and the loss of every pair is log 2.

Source: Rafailov et al. (arXiv 2305.18290); smoothing: conservative DPO, by the same authors.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .no_answer import counted


@dataclass(frozen=True)
class Options:
    """beta: 0 or more; smoothing: 0 to 0.5; sft: weight of the SFT term, 0 or more."""

    beta: float = 0.1
    smoothing: float = 0.0
    sft: float = 0.0


@dataclass(frozen=True, eq=False)
class Scores:
    """Log-probabilities (2 p,) FP32 and numbers of tokens (2 p,) of a row's documents, chosen and rejected in turn."""

    logp: torch.Tensor
    tokens: torch.Tensor


def scores(token_losses: torch.Tensor, counts: torch.Tensor, ends: torch.Tensor) -> Scores:
    """Sum the losses of a row of t tokens by document.

    token_losses: (1, t), -log p of each next token.  counts: (1, t), 1 for an answer's token, else 0.
    ends: (2 p + 1,) int32, cu_seqlens.

    It is a product with a matrix of ones and zeros, which adds in a fixed order: the same losses give the same bits.
    """
    token = torch.arange(token_losses.numel(), device=ends.device, dtype=ends.dtype)
    inside = ((token >= ends[:-1, None]) & (token < ends[1:, None])).float()
    counts = counts.reshape(-1).float()
    return Scores(inside @ (-token_losses.reshape(-1).float() * counts), inside @ counts)


def loss_of(policy: Scores, reference: torch.Tensor, how: Options) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """(loss summed over pairs, number of pairs, {name: (2,) sum and count to log}) of a row's p pairs.

    reference: (2 p,), the reference's log-probabilities. A pair with an answer without tokens does not count.

    Logged: the loss; accuracy, the share of pairs with z > 0 (z = 0 counts half); margin, z; both rewards, beta times
    the log-ratio log p - log p_reference; the absolute log-ratio of an answer; kl a token, the mean of -log-ratio,
    which is KL(reference | policy) if the answers are the reference's own. The counts are above 0 (no_answer.py).
    """
    ratio = policy.logp - reference
    chosen, rejected = ratio[0::2], ratio[1::2]
    z = how.beta * (chosen - rejected)
    has = (policy.tokens[0::2] > 0) & (policy.tokens[1::2] > 0)
    weight = has.float()
    each = -(1 - how.smoothing) * F.logsigmoid(z) - how.smoothing * F.logsigmoid(-z)
    if how.sft:
        each = each - how.sft * policy.logp[0::2] / policy.tokens[0::2].clamp(min=1)
    loss, number = (each * weight).sum(), weight.sum()
    with torch.no_grad():
        both = weight.repeat_interleave(2)
        right = (z > 0).float() + 0.5 * (z == 0)
        logged = {
            "dpo loss": (loss.detach(), number),
            "accuracy": ((right * weight).sum(), number),
            "margin": ((z * weight).sum(), number),
            "chosen reward": ((how.beta * chosen * weight).sum(), number),
            "rejected reward": ((how.beta * rejected * weight).sum(), number),
            "abs log-ratio": ((ratio.abs() * both).sum(), both.sum()),
            "kl a token": ((-ratio * both).sum(), (policy.tokens * both).sum()),
        }
    report = {name: torch.stack([total.float(), counted(count)]) for name, (total, count) in logged.items()}
    return loss, number.to(torch.int), report
