"""Make a Hugging Face folder in BF16 of a GGUF file: its weights, config.json and tokenizer.

    pip install transformers accelerate gguf
    python tools/gguf_to_hf.py MODEL.gguf OUT
    megatron-fp8 convert to-megatron OUT CKPT

transformers reads the file. It multiplies quantized blocks out, and undoes the order in which llama.cpp keeps the rows
of Q and K. A weight of four bits stays one of sixteen values in its block: only its format is BF16, and rounding to
that moves it by 2^-9 of itself at most.
"""

import argparse
from pathlib import Path


def make(file: Path, out: Path) -> str:
    """Write the folder -> a line that says what it holds.

    Raises ValueError for a missing file or package, and for an OUT that holds something.
    """
    if not file.is_file():
        raise ValueError(f"{file}: no such file; name a GGUF file")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out}: exists already; name a new or an empty folder")
    try:
        import accelerate  # noqa: F401  transformers asks for both when it reads the file
        import gguf  # noqa: F401
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise ValueError(f"needs the package {error.name}: pip install transformers accelerate gguf") from None
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    # It says that the weights are a GGUF file's, which they are no longer.
    model.config.__dict__.pop("quantization_config", None)
    model.hf_quantizer, model.is_quantized = None, False
    model.to(torch.bfloat16).save_pretrained(out)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(out)
    numbers = sum(parameter.numel() for parameter in model.parameters())
    return f"{out}: {type(model).__name__}, {numbers:,} parameters in BF16"


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a Hugging Face folder in BF16 of a GGUF file.")
    parser.add_argument("file", type=Path, metavar="MODEL.gguf")
    parser.add_argument("out", type=Path, metavar="OUT", help="a new or an empty folder")
    args = parser.parse_args()
    try:
        print(make(args.file, args.out))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
