"""Numbers that tell models apart, a sum of squared bits each, modulo 2^64: so it is alike in all layouts.

    head        the LM head, in BF16, without the rows that pad the vocabulary: each tensor-parallel size has others
    others      embeddings, norms, routers and biases, likewise
    linears ... all other weights, bit for bit as the GEMMs read them: they are rounded by the level, with scales of a
                rank's part, so their number has the name of both

Two models are compared by the numbers that both have. Every pass over a parameter takes a reading of it, once a start.
"""

import re

import torch
from megatron.core.utils import unwrap_model

from ..engine.frozen import OwnedParameter
from ..engine.owned_weight import owned_weights
from ..flags.dpo import HEAD

OTHERS = "others"
_OTHERS = re.compile(r"embedding|norm|router|bias$")
_LINEAR = re.compile(r"linear_\w+\.weight\d*$|experts\..*weight\d*$")
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@torch.no_grad()
def fingerprint(chunks: list[torch.nn.Module], vocabulary: int, linears: bool) -> dict[str, int]:
    """{part: its number} of a model's chunks: collective over all ranks, each with its own.

    vocabulary: its size without padding. linears: whether to count these too, for which nothing may be trained yet.
    """
    models = [unwrap_model(chunk) for chunk in chunks]
    groups = models[0].pg_collection
    names = [HEAD, OTHERS, *([_name_of_linears(models, groups)] if linears else [])]
    found = torch.zeros(len(names), dtype=torch.int64, device=next(models[0].parameters()).device)
    for model in models:
        if model.post_process and groups.dp_cp.rank() == 0:
            head = model.output_layer.weight
            head = model.shared_embedding_or_output_weight() if head is None else head
            found[0] += _bits(_real(head, vocabulary, groups.tp).bfloat16())
        for name, param in model.named_parameters():
            if name.startswith("output_layer.") or not _is_counted(name, param, groups):
                continue
            if _OTHERS.search(name) and (model.pre_process or "embedding" not in name):
                rows = _real(param, vocabulary, groups.tp) if "word_embeddings" in name else param
                found[1] += _bits(rows.bfloat16())
            elif linears and _LINEAR.search(name):
                found[2] += _bits(param)
        for weight in owned_weights([model]) if linears else ():
            if weight.fp8 and _is_counted(weight.name, weight.param, groups):
                found[2] += _bits(weight.quantized().scale_inv)
    torch.distributed.all_reduce(found)
    return dict(zip(names, found.tolist(), strict=True))


def differs(one: dict[str, int], other: dict[str, int]) -> bool:
    """Whether the two are of different models, as far as their parts can be compared."""
    return any(one[part] != other[part] for part in one.keys() & other.keys())


def _name_of_linears(models: list[torch.nn.Module], groups) -> str:
    how = {(w.storage, w.fp8, w.config.margin, w.config.draws_masters, w.config.seed) for w in owned_weights(models)}
    everywhere: list[set] = [set() for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather_object(everywhere, how)
    sizes = " ".join(f"{name} {getattr(groups, name).size()}" for name in ("tp", "pp", "ep", "expt_tp"))
    return f"linears {sizes} {sorted(set().union(*everywhere), key=str)}"


def _is_counted(name: str, param: torch.nn.Parameter, groups) -> bool:
    """Whether this rank counts the parameter: of each part of it, one rank does."""
    experts = "experts." in name and "shared_experts." not in name
    split, copies = (groups.expt_tp, groups.expt_dp) if experts else (groups.tp, groups.dp_cp)
    is_part = isinstance(param, OwnedParameter) or getattr(param, "tensor_model_parallel", False)
    return copies.rank() == 0 and (is_part or split.rank() == 0)


def _real(rows: torch.Tensor, vocabulary: int, tensor) -> torch.Tensor:
    """This rank's rows of a table without those that pad the vocabulary."""
    return rows[: max(vocabulary - tensor.rank() * len(rows), 0)]


def _bits(x: torch.Tensor) -> torch.Tensor:
    """The sum of its squared bits: int64, 0-d."""
    flat = x.detach().reshape(-1).view(_INTEGERS[x.element_size()])
    zero = torch.zeros((), dtype=torch.int64, device=x.device)
    return sum((part.long().square().sum() for part in flat.split(1 << 22)), zero)
