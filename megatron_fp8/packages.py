"""Packages that a run, a verb or one of Megatron's flags may need: one table of what to install, with its versions.

Bounds are megatron-core's own where its metadata has one, and pyproject.toml's for ours; tests/unit/test_packages.py
compares.  Lines about a package that is missing end in what `needs` says.  flags/optional.py says which flag needs
which, `megatron-fp8 doctor` which are here.
"""

import sys
from importlib.util import find_spec

# {module that is imported: (what pip installs, what for)}
PACKAGES = {
    "cutlass_library": ("nvidia-cutlass==4.2.*", "the headers for megatron-fp8 build"),
    "matplotlib": ("matplotlib", "--figure and the lab's reports"),
    "rich": ("rich", "tables in colour on a terminal"),
    "safetensors": ("safetensors", "megatron-fp8 convert"),
    "pydantic": ("pydantic>=2", "megatron-fp8 convert"),
    "scipy": ("scipy", "the lab's reports, --fp8-sharpness-iterations"),
    "transformers": ("transformers", "--tokenizer-type, all but SentencePiece's, TikTokenizer and NullTokenizer"),
    "sentencepiece": ("sentencepiece", "--tokenizer-type SentencePieceTokenizer, Llama2Tokenizer"),
    "tiktoken": ("tiktoken", "--tokenizer-type TikTokenizer"),
    "pynvml": ("nvidia-ml-py", "--log-straggler, --log-energy"),
    "tensorboard": ("tensorboard", "--tensorboard-dir, which writes nothing without it"),
    "wandb": ("wandb", "--wandb-project"),
    "nvidia_resiliency_ext": ("nvidia-resiliency-ext==0.6.0", "--enable-ft-package, --non-persistent-ckpt-type local"),
    "multistorageclient": ("multi-storage-client~=0.50", "msc:// paths"),
    "boto3": ("boto3", "s3:// paths of data"),
    "einops": ("einops~=0.8", "--use-megatron-fsdp"),
    "emerging_optimizers": ("emerging_optimizers", "--optimizer muon and its kind"),
}


def installed(module: str) -> bool:
    """Whether a package is here; it is not imported."""
    try:
        return module in sys.modules or find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def how_to_install(module: str) -> str:
    """A command for a shell."""
    requirement = PACKAGES[module][0]
    quoted = f"'{requirement}'" if set(requirement) & set("=<>~*[") else requirement
    return f"pip install {quoted}"


def needs(module: str, otherwise: str = "") -> str:
    """For the line of what cannot be done without a package, "--figure a.svg: " before it: the package, the remedy.

    otherwise: another remedy, as "remove the flag". The module may be one that the table does not have.
    """
    remedy = how_to_install(module) if module in PACKAGES else "install it"
    return f"needs the package {module}, which is not installed; {remedy}{otherwise and f', or {otherwise}'}"
