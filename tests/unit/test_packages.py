"""Optional packages: versions agree with pyproject.toml and Megatron; a flag without its package is one error line."""

import ast
import importlib.metadata
import importlib.util
import re
import sys
import tomllib

import pytest
from commands import MODEL, error_of
from launch import ROOT

from megatron_fp8 import packages
from megatron_fp8.flags.optional import NEEDS, check_packages
from megatron_fp8.flags.stock_errors import stock_mistake
from megatron_fp8.packages import PACKAGES, how_to_install, installed
from megatron_fp8.tools.lab.report import plots
from megatron_fp8.tools.perf.output import check_figure


def named(requirement: str) -> tuple[str, str]:
    """(name, bounds) of a requirement such as "nvidia-cutlass==4.2.*", in a canonical form."""
    name, bounds = re.fullmatch(r"([\w.-]+)(?:\[.*\])?\s*([^;]*).*", requirement).groups()
    return re.sub(r"[-_.]+", "-", name).lower(), ",".join(sorted(bounds.strip(" ()").split(",")))


def test_versions_are_pyprojects_and_megatrons():
    ours = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = dict(map(named, importlib.metadata.requires("megatron-core")))
    wanted |= dict(map(named, [one for extra in ours.values() for one in extra]))
    compared = 0
    for requirement in PACKAGES.values():
        name, bounds = named(requirement)
        if name in wanted:
            compared += 1
            assert bounds == wanted[name], requirement
    assert compared >= 10 and how_to_install("cutlass_library") == "pip install 'nvidia-cutlass==4.2.*'"


def test_installed_packages_are_found():
    assert installed("json") and not installed("no_such_package") and not installed("no_such.package")


@pytest.mark.parametrize(
    ("flags", "module", "line"),
    [
        ("--tokenizer-type HuggingFaceTokenizer", "transformers", "transformers, or change it"),
        ("--tokenizer-type GPT2BPETokenizer", "transformers", "transformers, or change it"),
        ("--tokenizer-type Llama2Tokenizer", "sentencepiece", "sentencepiece, or change it"),
        ("--tokenizer-type TikTokenizer", "tiktoken", "tiktoken, or change it"),
        ("--log-straggler", "pynvml", "nvidia-ml-py, or remove the flag"),
        ("--log-energy", "pynvml", "nvidia-ml-py, or remove the flag"),
        ("--wandb-project it", "wandb", "wandb, or remove the flag"),
        ("--enable-ft-package", "nvidia_resiliency_ext", "'nvidia-resiliency-ext==0.6.0', or remove the flag"),
        ("--non-persistent-ckpt-type local", "nvidia_resiliency_ext", "'nvidia-resiliency-ext==0.6.0', or change it"),
        ("--data-path s3://there/data", "boto3", "boto3, or change it"),
        ("--use-megatron-fsdp", "einops", "'einops~=0.8', or remove the flag"),
        ("--optimizer muon", "emerging_optimizers", "emerging_optimizers, or change it"),
    ],
)
def test_a_flag_whose_package_is_missing_is_one_line(flags, module, line, parse, monkeypatch):
    args = parse(*MODEL, *flags.split())
    monkeypatch.setattr(packages, "installed", lambda module: False)
    missing = f"{flags}: needs the package {module}, which is not installed"
    assert error_of(check_packages, args) == f"{missing}; pip install {line}"
    monkeypatch.setattr(packages, "installed", lambda module: True)
    check_packages(args)


@pytest.mark.parametrize(
    ("module", "hidden", "line"),
    [
        ("checkpoint.hf.schema", "pydantic", "megatron-fp8 convert {}; pip install 'pydantic>=2'"),
        ("checkpoint.hf.folder", "safetensors", "megatron-fp8 convert {}; pip install safetensors"),
        ("tools.lab.report.statistics", "scipy", "megatron-fp8 lab report {}; pip install scipy"),
        ("tools.lab.report.curves", "scipy.signal", "megatron-fp8 lab report {}; pip install scipy"),
    ],
)
def test_a_verb_whose_package_is_missing_is_one_line(module, hidden, line, monkeypatch):
    monkeypatch.setitem(sys.modules, hidden, None)
    path = ROOT / "megatron_fp8" / f"{module.replace('.', '/')}.py"
    spec = importlib.util.spec_from_file_location(f"megatron_fp8.{module}_again", path)
    said = error_of(spec.loader.exec_module, importlib.util.module_from_spec(spec))
    package = hidden.partition(".")[0]
    assert said == line.format(f"needs the package {package}, which is not installed")


def test_figures_and_reports_need_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    missing = "needs the package matplotlib, which is not installed; pip install matplotlib"
    assert error_of(check_figure, "a.svg") == f"--figure a.svg: {missing}, or leave it out"
    assert error_of(plots.picture, "a", "", 1, 1, print) == f"megatron-fp8 lab report {missing}"


def test_a_plain_run_needs_no_package(parse, monkeypatch):
    monkeypatch.setattr(packages, "installed", lambda module: False)
    check_packages(parse(*MODEL))


def test_every_need_is_a_flag_of_the_parser_and_a_package_of_the_table(parser):
    known = {flag for action in parser._actions for flag in action.option_strings}
    assert {need.flag for need in NEEDS} <= known and {need.module for need in NEEDS} <= set(PACKAGES)


def test_every_package_that_megatron_itself_imports_is_known_or_no_flags():
    """This fails if a newer Megatron imports a package that the table does not have, such as a tokenizer's."""
    folder = importlib.metadata.distribution("megatron-core").locate_file("megatron/core/tokenizers/text/libraries")
    tried = {
        name.partition(".")[0]
        for path in folder.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Try)
        for one in node.body
        if isinstance(one, ast.Import | ast.ImportFrom) and not getattr(one, "level", 0)
        for name in ([alias.name for alias in one.names] if isinstance(one, ast.Import) else [one.module])
    }
    assert tried - {"megatron", "wget"} <= set(PACKAGES)


def test_any_other_import_of_megatrons_that_fails_is_one_line_too(tmp_path):
    source = tmp_path / "megatron/training/some.py"
    source.parent.mkdir(parents=True)
    source.write_text("def start():\n    import no_such_package.inside\n")
    scope = {"__name__": "megatron.training.some"}
    exec(compile(source.read_text(), str(source), "exec"), scope)
    try:
        scope["start"]()
    except ModuleNotFoundError as error:
        said = stock_mistake(error)
    assert said.startswith("Megatron needs the package no_such_package, which is not installed; install it, or remove ")
    assert said.endswith("Megatron imports it in megatron/training/some.py:2")
