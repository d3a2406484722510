"""The linears that flags choose by patterns: --fp8-bf16-layers, --fp8-emulate-layers."""

from ..engine.names import ranges
from ..engine.owned_weight import owned_weights, told_of_all
from ..errors import UserError
from ..flags.config import BF16_FLAG, Fp8Config
from ..flags.emulate import LM_HEAD, linear_name, matches
from ..metrics import LINEARS, record


def emulates_head(config: Fp8Config) -> bool:
    """Whether the LM head is emulated."""
    return config.emulate is not None and config.emulate.lm_head and not matches(config.bf16_layers, LM_HEAD)


def keep_in_bf16(model, config: Fp8Config, num_layers: int) -> None:
    """Leave some linears in BF16, GEMMs and storage, without emulation: those of the first and last layers
    (`--first-last-layers-bf16` and its two counts), and those whose names match `--fp8-bf16-layers`."""
    kept = [w for w in owned_weights([model]) if matches(config.bf16_layers, w.name)]
    for layer in model.decoder.layers:  # multi-token-prediction layers are neither first nor last
        if not config.bf16_layers_start < layer.layer_number <= num_layers - config.bf16_layers_end:
            kept += owned_weights([layer])
    for weight in kept:
        weight.keep_in_bf16()


def check_chosen(config: Fp8Config, chunks) -> list[str]:
    """A log line that names the linears that --fp8-bf16-layers keeps in BF16; collective as `told_of_all`.

    Args:
        chunks: this rank's model chunks, their weights named.

    Raises UserError of one line for a pattern of --fp8-bf16-layers, or all of --fp8-emulate-layers, that match none.
    """
    if not config.bf16_layers and config.emulate is None:
        return []
    linears = told_of_all(chunks, lambda weight: (weight.path, weight.layer_number))
    if config.emulate is not None and config.emulate.lm_head:
        linears.append((LM_HEAD, 0))
    names = [linear_name(*linear) for linear in linears]
    for pattern in config.bf16_layers:
        if not any(matches((pattern,), name) for name in names):
            raise UserError(f"{BF16_FLAG} {pattern}: matches none of the model's linears, {ranges(names)}; change it")
    if config.emulate is not None and not any(config.emulate.covers(*linear) for linear in linears):
        patterns = ",".join(config.emulate.layers)
        raise UserError(
            f"--fp8-emulate-layers {patterns}: matches none of the model's linears, {ranges(names)}; change it"
        )
    kept = [name for name in names if matches(config.bf16_layers, name)]
    record({LINEARS: kept})
    return [f"{BF16_FLAG}: {len(kept)} of {len(names)} linears stay in BF16: {ranges(kept)}"] if kept else []
