"""The host's time for a layer, forward and backward, without the GPU's: stock BF16, Transformer Engine FP8, our levels.

    python benchmarks/host_layer.py --te-path DIR --systems bf16 te-delayed O1 O3
    python benchmarks/host_layer.py --te-path DIR --nproc 2 --tensor-model-parallel-size 2 --sequence-parallel
    python benchmarks/host_layer.py --shape tiny --systems bf16-local O1              # any machine, checks the script

Systems, shapes and flags are those of train_step.py; here they run this script. The host waits for the GPU before the
first layer's forward pass and before the last layer's backward pass. From there to the end of the layers it only
launches, so the clock measures the host alone. The GPU's queue holds a thousand launches, more than four layers need,
so the default is four layers. A figure is the median over the micro-batches of the second half of the steps, on rank 0,
divided by the number of layers. Forward: from the first layer's start to the last one's end. Backward: from the
gradient of the last layer's output to that of the first one's input.
"""

import json
import os
import re
import runpy
import statistics
import sys
import time

from kernels import dimensions
from stamp import ROOT
from train_step import SYSTEMS, arguments, logged_run, model_flags, stamp

# isort: split
from launch import RunFailed

from megatron_fp8.processes import last_words

LAYERS = 4


class Clock:
    """Milliseconds of the layers' passes, for all micro-batches, as `forward` and `backward`."""

    def __init__(self) -> None:
        self.forward: list[float] = []
        self.backward: list[float] = []
        self._began = 0.0

    def begin(self, *_) -> None:
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._began = time.perf_counter()

    def end(self, passes: list[float]) -> None:
        passes.append(1e3 * (time.perf_counter() - self._began))

    def summary(self, layers: int) -> dict[str, float]:
        """Medians of the second half, for one layer."""
        halves = {"forward": self.forward, "backward": self.backward}
        return {name: statistics.median(ms[len(ms) // 2 :]) / layers for name, ms in halves.items()}


def watch(clock: Clock) -> None:
    """Make the clock time Megatron's layers."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    stock = TransformerLayer.forward

    def forward(self, *args, **kwargs):
        if self.layer_number == 1:
            x = args[0] if args else kwargs["hidden_states"]
            x.register_hook(lambda _: clock.end(clock.backward))
            clock.begin()
        made = stock(self, *args, **kwargs)
        if self.layer_number == self.config.num_layers:
            clock.end(clock.forward)
            (made[0] if isinstance(made, tuple) else made).register_hook(clock.begin)
        return made

    TransformerLayer.forward = forward


def be_a_rank() -> None:
    """Train with the given flags, and print the clock's figures."""
    from profile_gpt import check_te, prepare_te

    sys.path.insert(0, str(ROOT))
    prepare_te(os.environ["TE"])
    from megatron_fp8.plugin import install

    install()
    check_te(os.environ["TE"])
    clock = Clock()
    watch(clock)
    runpy.run_path(str(ROOT / "pretrain_gpt_fp8.py"), run_name="__main__")
    if os.environ["RANK"] == "0":
        print("HOST", json.dumps(clock.summary(int(os.environ["HOST_LAYERS"]))), flush=True)


def run(system: str, args) -> dict[str, float]:
    """A system's figures; raises RunFailed with the end of its log if it printed none."""
    te, flags, _ = SYSTEMS[system]
    shaped = [*model_flags(args), *flags.split()]
    if args.shape != "tiny" and not any(word.split("=")[0] == "--num-layers" for word in args.extra):
        shaped.append(f"--num-layers={LAYERS}")
    layers = dimensions(shaped).num_layers
    env = dict(os.environ, CUDA_DEVICE_MAX_CONNECTIONS="1", TE=te, HOST_LAYERS=str(layers))
    if te != "none" and args.te_path:
        env["PYTHONPATH"] = f"{args.te_path}:{env.get('PYTHONPATH', '')}"
    command = ["benchmarks/host_layer.py", *shaped, f"--micro-batch-size={args.mbs[system]}"]
    lines = logged_run(system, [*command, f"--train-iters={args.iterations}"], env, args)
    found = re.search(r"HOST (\{.*\})", "\n".join(lines))
    if not found:
        raise RunFailed("no figures were printed\n" + last_words(lines), 1)
    return json.loads(found[1])


def main() -> None:
    def add(parser) -> None:
        parser.set_defaults(shape="175b-tp8", iterations=12)

    args = arguments(__doc__.split("\n")[0], ["bf16", "te-delayed", "O1", "O3"], add)
    if args.csv:
        sys.exit("--csv: host_layer.py writes no file; keep its output")
    print(f"{args.shape} {' '.join(args.extra)}, {args.nproc} GPUs; " + ", ".join(map(str, stamp().values())))
    print("| host ms a layer | forward | backward | both |\n|---|---|---|---|", flush=True)
    for system in args.systems:
        try:
            ms = run(system, args)
        except RunFailed as error:
            print(f"{system}: {error}", flush=True)
            continue
        print(f"| {system} | {ms['forward']:.2f} | {ms['backward']:.2f} | {sum(ms.values()):.2f} |", flush=True)


if __name__ == "__main__":
    be_a_rank() if "TORCHELASTIC_RUN_ID" in os.environ else main()
