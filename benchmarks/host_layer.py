"""The host's time for a layer, forward and backward, without the GPU's: stock BF16, Transformer Engine FP8, our levels.

    python benchmarks/host_layer.py --te-path DIR --systems bf16 te-delayed O1 O3
    python benchmarks/host_layer.py --te-path DIR --nproc 2 --tensor-model-parallel-size 2 --sequence-parallel
    python benchmarks/host_layer.py --shape tiny --systems bf16-local O1              # any machine, checks the script
    python benchmarks/host_layer.py ... --systems O3 --functions 40                   # where Python spends the time

Systems, shapes and flags are those of train_step.py; here they run this script. The host waits for the GPU before the
first layer's forward pass and before the last layer's backward pass. From there to the end of the layers it only
launches, so the clock measures the host alone. The GPU's queue holds a thousand launches, more than four layers need,
so the default is four layers. A figure is the median over the micro-batches of the second half of the steps, on rank 0,
divided by the number of layers. Forward: from the first layer's start to the last one's end. Backward: from the
gradient of the last layer's output to that of the first one's input.

--functions N has Python's profiler run in the same places, and prints the N functions that take most by themselves, C
functions too: calls and microseconds of one layer and micro-batch, after the first ones. The profiler makes every
function slower, the short ones most: its figures are for comparing functions, and no times of a layer stand beside
them.
"""

import cProfile
import json
import os
import pstats
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
UNPROFILED = 16  # micro-batches: kernels are compiled, plans made


class Clock:
    """Milliseconds of the layers' passes, for all micro-batches, as `forward` and `backward`.

    profiles: whether the profiler runs too.
    """

    def __init__(self, profiles: bool) -> None:
        self.forward: list[float] = []
        self.backward: list[float] = []
        self._began = 0.0
        self._profiler = cProfile.Profile() if profiles else None

    def begin(self, *_) -> None:
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._began = time.perf_counter()
        if self._profiler and len(self.backward) >= UNPROFILED:
            self._profiler.enable()

    def end(self, passes: list[float]) -> None:
        if self._profiler:
            self._profiler.disable()
        passes.append(1e3 * (time.perf_counter() - self._began))

    def summary(self, layers: int) -> dict[str, float]:
        """Medians of the second half, for one layer."""
        halves = {"forward": self.forward, "backward": self.backward}
        return {name: statistics.median(ms[len(ms) // 2 :]) / layers for name, ms in halves.items()}

    def functions(self, layers: int, most: int) -> list[str]:
        """The functions that take most by themselves, as rows of a table."""
        assert self._profiler is not None
        passes = layers * (len(self.backward) - UNPROFILED)
        own = [(figures[2], figures[1], where) for where, figures in pstats.Stats(self._profiler).stats.items()]
        rows = []
        for seconds, calls, (path, line, name) in sorted(own, reverse=True)[:most]:
            place = "" if path == "~" else f"{'/'.join(path.split('/')[-3:])}:{line} "
            rows.append(f"| {calls / passes:.2f} | {1e6 * seconds / passes:.1f} | {place}{name} |")
        return rows


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
    layers, functions = int(os.environ["HOST_LAYERS"]), int(os.environ["HOST_FUNCTIONS"])
    clock = Clock(bool(functions))
    watch(clock)
    runpy.run_path(str(ROOT / "pretrain_gpt_fp8.py"), run_name="__main__")
    if os.environ["RANK"] == "0":
        found = clock.functions(layers, functions) if functions else clock.summary(layers)
        print("HOST", json.dumps(found), flush=True)


def run(system: str, args):
    """A system's figures, or the rows of its functions; raises RunFailed with the end of its log if it printed none."""
    te, flags, _ = SYSTEMS[system]
    shaped = [*model_flags(args), *flags.split()]
    if args.shape != "tiny" and not any(word.split("=")[0] == "--num-layers" for word in args.extra):
        shaped.append(f"--num-layers={LAYERS}")
    layers = dimensions(shaped).num_layers
    env = dict(os.environ, CUDA_DEVICE_MAX_CONNECTIONS="1", TE=te, HOST_LAYERS=str(layers))
    env["HOST_FUNCTIONS"] = str(args.functions)
    if te != "none" and args.te_path:
        env["PYTHONPATH"] = f"{args.te_path}:{env.get('PYTHONPATH', '')}"
    command = ["benchmarks/host_layer.py", *shaped, f"--micro-batch-size={args.mbs[system]}"]
    lines = logged_run(system, [*command, f"--train-iters={args.iterations}"], env, args)
    found = re.search(r"HOST ([{\[].*)", "\n".join(lines))
    if not found:
        raise RunFailed("no figures were printed\n" + last_words(lines), 1)
    return json.loads(found[1])


def main() -> None:
    def add(parser) -> None:
        parser.set_defaults(shape="175b-tp8", iterations=12)
        parser.add_argument("--functions", type=int, default=0, metavar="N", help="profile, and print N functions")

    args = arguments(__doc__.split("\n")[0], ["bf16", "te-delayed", "O1", "O3"], add)
    if args.csv:
        sys.exit("--csv: host_layer.py writes no file; keep its output")
    print(f"{args.shape} {' '.join(args.extra)}, {args.nproc} GPUs; " + ", ".join(map(str, stamp().values())))
    if not args.functions:
        print("| host ms a layer | forward | backward | both |\n|---|---|---|---|", flush=True)
    for system in args.systems:
        try:
            found = run(system, args)
        except RunFailed as error:
            print(f"{system}: {error}", flush=True)
            continue
        if args.functions:
            print(f"{system}, a layer and micro-batch\n| calls | own us | function |\n|---|---|---|", *found, sep="\n")
        else:
            both = sum(found.values())
            print(f"| {system} | {found['forward']:.2f} | {found['backward']:.2f} | {both:.2f} |", flush=True)


if __name__ == "__main__":
    be_a_rank() if "TORCHELASTIC_RUN_ID" in os.environ else main()
