"""Command lines for tests of flags."""

import pytest

FLAGS = """--bf16 --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 96
--max-position-embeddings 96 --micro-batch-size 2 --train-iters 2 --lr 1e-3
--mock-data --tokenizer-type NullTokenizer --vocab-size 256"""
MODEL = FLAGS.split()
O1 = [*MODEL, "--fp8-level", "O1"]


def error_of(call, *args):
    """The one line of the ValueError that call(*args) raises."""
    with pytest.raises(ValueError) as caught:
        call(*args)
    assert "\n" not in str(caught.value)
    return str(caught.value)
