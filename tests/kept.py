"""What a layer of a tiny model keeps for its backward pass, for tests of the cost model's activations."""

import architecture
import torch

WIDTH, LENGTH, TOKENS = 128, 128, 512


def kept(flags: str) -> float:
    """Bytes a token that a layer of the model of `flags` (WIDTH, LENGTH) keeps for its backward pass.

    Without those of a norm that is no linear's: on a CPU torch keeps copies in FP32, on a GPU its input.
    """
    found = []
    for layers in (1, 2):
        model = architecture.build(f"{flags} --num-layers {layers}".split(), level=True).to(torch.bfloat16)
        architecture.fill(model)
        architecture.attach(model)
        own, seen = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

        def pack(x, seen=seen):
            seen[x.untyped_storage().data_ptr()] = x
            return x

        tokens = torch.randint(0, 100, (TOKENS // LENGTH, LENGTH))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            loss = model(tokens, torch.arange(LENGTH).expand(TOKENS // LENGTH, -1), None, labels=tokens)
        whole = torch.Size([LENGTH, TOKENS // LENGTH, WIDTH])
        found.append(sum(x.untyped_storage().nbytes() for at, x in seen.items()
                         if at not in own and (x.dtype, x.shape) != (torch.float32, whole)))  # fmt: skip
        del loss
    return (found[1] - found[0]) / TOKENS
