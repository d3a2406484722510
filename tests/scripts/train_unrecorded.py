"""pretrain_gpt_fp8.py, whose last rank asks for a number of the GPU when a step is recorded: in the middle of its
backward pass, or on a tape, which runs collectives as it is written, at its end."""

import os
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]


def records(sink) -> bool:
    """Whether the step of this sink is being recorded."""
    return sink is not None and sink.recorded is not None and sink.recorded.replayed


def ask_in_the_middle() -> None:
    from megatron_fp8.engine.owned_weight import OwnedWeight

    stock = OwnedWeight.take_gradient

    def take_gradient(self, product) -> None:
        if records(self.sink):
            self.param.float().sum().item()
        stock(self, product)

    OwnedWeight.take_gradient = take_gradient


def ask_at_the_end() -> None:
    from megatron_fp8.engine.optimizer import EngineOptimizer

    stock = EngineOptimizer.finalize_grads

    def finalize_grads(self, num_tokens) -> None:
        stock(self, num_tokens)
        if records(self.buckets[0].weights[0].sink):
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nAnd more.")

    EngineOptimizer.finalize_grads = finalize_grads


if __name__ == "__main__":
    on_tape = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    if on_tape:
        import tape

        tape.install()
    if os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1):
        ask_at_the_end() if on_tape else ask_in_the_middle()
    runpy.run_path(str(ROOT / "pretrain_gpt_fp8.py"), run_name="__main__")
