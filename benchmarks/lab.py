"""The lab's instruments on one GPU, timed: emulated formats, checked against the reference, and sharpness.

    python benchmarks/lab.py --csv lab.csv        about a minute on an H200, compilation included

Times are medians of triton.testing.do_bench; data is random. Emulation must read and write each BF16 operand once, 4
bytes an element; with a scale it also reads once for the largest magnitude, 6 bytes. Sharpness must read the logits
once; its rate shows how far it is from that.
"""

import torch
from ops import Table, equal, randn
from timed_rows import measured

from megatron_fp8 import ops
from megatron_fp8.monitor.logit_sharpness import Sharpness, Statistics, closed_form
from megatron_fp8.numerics import emulation
from megatron_fp8.numerics.emulation import EmulatedFormat

OPERAND = (8192, 16384)
FORMATS = (
    *("E8M3", "E8M3:truncate", "E8M3:stochastic", "E7M7", "E5M2", "E4M3"),
    *("E4M3:nearest:tensor", "E4M3:nearest:row", "E4M3:nearest:block:32"),
)
TOKENS = 8192
VOCABULARIES = (32000, 50304, 128256)
SEED = (12345, 678)


def check(how: EmulatedFormat) -> None:
    """Bitwise equality with the reference, for ordinary, tiny, huge and special values."""
    x = randn(1003, 4096) * torch.randn(1003, 1, device="cuda").mul(12).exp2().bfloat16()
    x[0, :4] = torch.tensor([0.0, -0.0, float("inf"), float("nan")], device="cuda")
    seed = SEED if how.rounding == "stochastic" else None
    assert equal(ops.emulate(x, how, seed), emulation.emulate(x, how, seed)), how


def main() -> None:
    with measured(__doc__, Table) as table:
        source = randn(1 << 29)
        target = torch.empty_like(source)
        table.add("copy", source.shape, lambda: target.copy_(source), numbytes=2 * source.nbytes)
        x = randn(*OPERAND)
        for name in FORMATS:
            how = EmulatedFormat.parse(name)
            check(how)
            seed = SEED if how.rounding == "stochastic" else None
            passes = 6 if how.scaling == "tensor" else 4

            def emulate(how=how, seed=seed):
                ops.emulate(x, how, seed)

            table.add("emulate", OPERAND, emulate, config=name, numbytes=passes * x.numel())
        for vocabulary in VOCABULARIES:
            logits = randn(TOKENS, vocabulary) * 3
            targets = torch.randint(vocabulary, (TOKENS,), device="cuda")
            statistics = Statistics(Sharpness._fields, logits.device)

            def measure(logits=logits, targets=targets, statistics=statistics):
                statistics.add(torch.stack(closed_form(logits, targets)))

            table.add("sharpness", logits.shape, measure, numbytes=logits.nbytes)


if __name__ == "__main__":
    main()
