"""The table of optional packages, with their versions, that a run, a subcommand or a flag of Megatron's may need.

Version bounds come from megatron-core's metadata, or from pyproject.toml for our own needs; tests/unit/test_packages.py
compares them. Error lines about a missing package end with the text of `needs`. flags/optional.py says which flag needs
which package; `megatron-fp8 doctor` lists the installed ones.
"""

import sys
from importlib.util import find_spec

# {module: requirement for pip}, and who needs it
PACKAGES = {
    "cutlass_library": "nvidia-cutlass==4.2.*",  # megatron-fp8 build
    "matplotlib": "matplotlib",  # --figure and the lab's reports
    "rich": "rich",  # tables in colour on a terminal
    "safetensors": "safetensors",  # megatron-fp8 convert
    "pydantic": "pydantic>=2",  # megatron-fp8 convert
    "scipy": "scipy",  # the lab's reports, --fp8-sharpness-iterations
    "transformers": "transformers",  # --tokenizer-type, except SentencePiece's, TikTokenizer and NullTokenizer
    "sentencepiece": "sentencepiece",  # --tokenizer-type SentencePieceTokenizer, Llama2Tokenizer
    "tiktoken": "tiktoken",  # --tokenizer-type TikTokenizer
    "pynvml": "nvidia-ml-py",  # --log-straggler, --log-energy
    "tensorboard": "tensorboard",  # --tensorboard-dir, which writes nothing without it
    "wandb": "wandb",  # --wandb-project
    "nvidia_resiliency_ext": "nvidia-resiliency-ext==0.6.0",  # --enable-ft-package, --non-persistent-ckpt-type local
    "multistorageclient": "multi-storage-client~=0.50",  # msc:// paths
    "boto3": "boto3",  # s3:// paths of data
    "einops": "einops~=0.8",  # --use-megatron-fsdp
    "emerging_optimizers": "emerging_optimizers",  # --optimizer muon and similar ones
}


def installed(module: str) -> bool:
    """Whether a package is installed. Does not import it."""
    try:
        return module in sys.modules or find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def how_to_install(module: str) -> str:
    """The shell command that installs the package."""
    requirement = PACKAGES[module]
    quoted = f"'{requirement}'" if set(requirement) & set("=<>~*[") else requirement
    return f"pip install {quoted}"


def needs(module: str, otherwise: str = "") -> str:
    """The end of an error line about a missing package, to follow "--figure a.svg: ": the package and the remedy.

    otherwise: another remedy, such as "remove the flag". The module need not be in the table.
    """
    remedy = how_to_install(module) if module in PACKAGES else "install it"
    return f"needs the package {module}, which is not installed; {remedy}{otherwise and f', or {otherwise}'}"
