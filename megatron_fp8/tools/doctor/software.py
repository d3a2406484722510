"""Checks of software: versions, Transformer Engine's import, FP8 GEMM backends, and a linear's arithmetic."""

import importlib
import warnings
from collections.abc import Iterator
from importlib import metadata

from ...packages import PACKAGES, installed
from .finding import Finding, blocking, degraded, good

_ACCEPTED = {"torch": ("2.11", "2.15"), "megatron-core": ("0.19", "0.19")}  # pyproject.toml's, first and last series
_ON_GPUS = "2.11"  # torch's series whose kernels and speed were seen on GPUs; the others ran the CPU's tests
_SPLIT = ("transformer_engine.pytorch.attention", "_SplitAlongDim")  # where megatron-core 0.19 looks for it
_MOST_OFF = 2e-3  # of the largest value: a tensor core sums with about 14 bits
_OF_FP8 = 0.07  # relative error of a product of normal numbers: E4M3 by E4M3 0.037, by E5M2 0.059


def versions() -> Iterator[Finding]:
    """torch and megatron-core are of the series that the plugin accepts."""
    for package, otherwise in (("torch", degraded), ("megatron-core", blocking)):
        first, last = _ACCEPTED[package]
        wanted = first if first == last else f"{first} to {last}"
        try:
            found = metadata.version(package)
        except metadata.PackageNotFoundError:
            yield blocking(package, "not installed", f"pip install '{package}=={first}.*'")
            continue
        series = found.split("+")[0].split(".")[:2]
        if not _numbers(first) <= _numbers(".".join(series)) <= _numbers(last):
            remedy = f"pip install '{package}=={first}.*': others are not tested"
            yield otherwise(package, f"{found}, not {wanted}", remedy)
        elif package == "torch" and ".".join(series) != _ON_GPUS:
            yield good(package, f"{found}; on GPUs, {_ON_GPUS} is what was tested")
        else:
            yield good(package, found)


def _numbers(version: str) -> tuple[int, ...]:
    """"2.11" as (2, 11); a series that is not numbers as (), which is below all."""
    parts = version.split(".")
    return tuple(map(int, parts)) if all(part.isdigit() for part in parts) else ()


def transformer_engine() -> Iterator[Finding]:
    """Whether Transformer Engine, which is optional, works and has the names that megatron-core imports."""
    what = "Transformer Engine"
    try:
        version = metadata.version("transformer-engine")
    except metadata.PackageNotFoundError:
        yield good(what, "not installed, not needed")
        return
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:
        said = " ".join(str(error).split())[:100]
        yield degraded(what, f"{version} cannot be imported: {said}", "uninstall it: Megatron fails to import it too")
        return
    module, name = _SPLIT
    try:
        stale = not hasattr(importlib.import_module(module), name)
    except ImportError:
        stale = True
    if stale:
        found = f"{version}, megatron-core's import of {name} is stale: stock's attention splits QKV without its kernel"
        yield degraded(what, found, "no effect on our levels; a fair baseline needs it: benchmarks/README.md")
    else:
        yield good(what, version)


def optional_packages() -> Iterator[Finding]:
    """The optional packages that are installed."""
    here = ", ".join(name for name in PACKAGES if installed(name)) or "none"
    yield good("optional packages", f"installed: {here}; a flag or verb that needs another says how to install it")


def gemms() -> Iterator[Finding]:
    """Each FP8 GEMM backend of this machine: one product compared with float64."""
    import torch

    from ...gemm import cublaslt, cutlass_check
    from ...gemm.cutlass import CUTLASS
    from ...gemm.cutlass_build import Unavailable
    from ...gemm.interface import prepared, serving

    device = "cuda" if torch.cuda.is_available() else "cpu"
    serves = serving(device).name
    for name in ("cublaslt", "torch", "cutlass") if device == "cuda" else ("reference",):
        what = f"GEMM {name}"
        remedy = {
            "cublaslt": "torch is used instead, without fused epilogues: reinstall torch's CUDA packages",
            "cutlass": "leave it out: --fp8-gemm-backend cublaslt",
        }.get(name, "no FP8 GEMM works: reinstall torch for this GPU's CUDA")
        try:
            if name == "cublaslt" and not cublaslt.bound():
                raise RuntimeError(cublaslt.why_not())
            if name == "cutlass":
                CUTLASS.prepare(build=False)
                if reason := cutlass_check.fault():  # a run checks this before it uses the kernels
                    raise RuntimeError(reason)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                backend = prepared(name)
            off = product_is_off(backend, device)
        except Unavailable as reason:
            yield good(what, f"not built, optional ({' '.join(str(reason).split())[:120]})")
            continue
        except Exception as error:
            found = f"does not work: {' '.join(str(error).split())[:120] or type(error).__name__}"
            yield (blocking if name in ("torch", "reference") else degraded)(what, found, remedy)
            continue
        part = {serves: ", in use", "cutlass": ", in use for large GEMMs of the backward pass"}.get(name, "")
        said = f"differs from float64 by {off:.1e} of the largest value{part}"
        yield good(what, said) if off <= _MOST_OFF else blocking(what, said, "do not train with it; please report it")


def product_is_off(backend, device: str) -> float:
    """The largest error of a backend's FP8 product against float64, relative to the largest value."""
    import torch

    from ...gemm.interface import Epilogue, through
    from ...numerics.formats import E4M3, encode
    from ...numerics.scaled import ScaledTensor

    a, b = (encode(_operands(*shape), E4M3) for shape in ((256, 512), (384, 512)))
    one = torch.ones((), device=device)
    x, w = ScaledTensor(a.to(device), one), ScaledTensor(b.to(device), one)
    found = through(backend, x, w, Epilogue(dtype=torch.float32), False).cpu()
    exact = a.double() @ b.double().T
    return float((found - exact).abs().max() / exact.abs().max())


def linear() -> Iterator[Finding]:
    """A linear's forward, dgrad and wgrad, cast and multiplied as in a run, compared with float64."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        errors = linear_errors(device)
    except Exception as error:
        found = f"fails: {' '.join(str(error).split())[:120] or type(error).__name__}"
        yield blocking("a linear", found, "run pytest tests/gpu -m smoke" if device == "cuda" else "reinstall torch")
        return
    shown = ", ".join(f"{name} {error:.3f}" for name, error in errors.items())
    said = f"on {device}, relative error {shown}"
    if max(errors.values()) <= _OF_FP8:
        yield good("a linear", said)
    else:
        yield blocking("a linear", f"{said}: more than FP8 rounding explains", "do not train here; please report it")


def linear_errors(device: str) -> dict[str, float]:
    """{GEMM: relative error in the Frobenius norm} of a linear in FP8."""
    import torch

    from ...gemm.interface import gemm
    from ...numerics.formats import E4M3, E5M2
    from ...numerics.scaled import ScaledTensor
    from ...ops import amax, quantize

    def cast(x, fmt):
        scale = fmt.max / amax(x)
        rows, columns = quantize(x, fmt, scale, transpose=True)
        return ScaledTensor(rows, scale.reciprocal(), columns)

    x, w, dy = (_operands(*shape).to(device, torch.bfloat16) for shape in ((256, 512), (384, 512), (256, 384)))
    qx, qw, qdy = cast(x, E4M3), cast(w, E4M3), cast(dy, E5M2)
    errors = {}
    for name, found, a, b in (
        ("forward", gemm(qx, qw), x, w),
        ("dgrad", gemm(qdy, qw.T), dy, w.T),
        ("wgrad", gemm(qdy.T, qx.T), dy.T, x.T),
    ):
        exact = a.double() @ b.double().T
        errors[name] = float((found.double() - exact).norm() / exact.norm())
    return errors


def _operands(rows: int, columns: int):
    import torch

    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows + columns))
