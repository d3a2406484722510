"""Command lines as a person mistypes them, or a script makes them of empty variables: mutations, and how they end.

    python tests/mutated.py [FIRST] [COUNT]      run mutations FIRST to FIRST + COUNT, print each that is a traceback

Every verb and the training parser with Megatron's validation. What would start a process, train, compile or wait is
stubbed: the parsers, the checks, and everything that reads a value are the real ones.
"""

import contextlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from launch import ROOT

from megatron_fp8 import cli

MODEL = """--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64
--micro-batch-size 2 --global-batch-size 16 --vocab-size 256 --tokenizer-type NullTokenizer --bf16
--use-distributed-optimizer --position-embedding-type rope --train-iters 5 --lr 1e-3 --eval-interval 100 --mock-data"""
LEVEL = "--fp8-level O3 --fp8-exp-avg fp8 --fp8-amax-history-len 16 --fp8-log-interval 10"
TRAINING = f"{MODEL} {LEVEL} --fp8-probe-step 1,2 --fp8-probe-dir probes --tensor-model-parallel-size 1"
JOB = f"-- {MODEL} {LEVEL}"
RUN = "-- pretrain_gpt_fp8.py --lr 1e-3 --fp8-level O3 --num-layers 2"
SPLIT = "--data-parallel-size 8 --tensor-model-parallel-size 2"
VERBS = [
    f"estimate --gpus 8 --hardware h200 --cap-gb 80 --tokens 1e9 {JOB}",
    f"estimate --systems bf16 O3 --format json {JOB}",
    f"estimate --gpus 2 --format csv -- torchrun --nproc-per-node 2 pretrain_gpt_fp8.py {MODEL}",
    f"plan --gpus 8 --system O3 --hardware h100-80gb-sxm --top 3 {JOB}",
    "memory --model 7b --data-parallel-size 16 --fp8-level O1 O3 --fp8-master fp16 --fp8-partition greedy",
    f"memory --num-layers 4 --hidden-size 64 --num-attention-heads 4 --vocab-size 256 --swiglu {SPLIT} "
    "--position-embedding-type rope",
    f"memory --gpus 4 {JOB} --tensor-model-parallel-size 2",
    f"rehearse --gpus 4 --timeout 60 --ranks 2 -- pretrain_gpt_fp8.py {MODEL} {LEVEL}",
    f"rehearse --full --rank 1 --gpus 2 --folder kept -- pretrain_gpt_fp8.py {MODEL} {LEVEL}",
    "table 5 --hardware h100-80gb-sxm --format markdown",
    "table 7 --format csv",
    "table 5 --run --models 7b --systems bf16 O3 --gpus 1 --micro-batch-size 2 --iterations 17 --timeout 3 "
    "--results r.csv",
    "compare A=a.jsonl B=b.jsonl --steps 1:4 --tolerance 0.5 --format text",
    "compare a.jsonl --import-result b.jsonl --assert-equal --export-result c.jsonl",
    "lab sweep plan.yaml --store sweep.sqlite --jobs 2 --slurm print --sbatch=--gpus=1",
    "lab report sweep.sqlite --out report",
    f"lab bisect --folder bisect --steps 4 --seed 3 --share 0.9 --floor=--lr=2 --processes 1 {RUN}",
    f"lab probe --step 2 --json probe.json --sort error --timeout 3 --processes 1 {RUN}",
    f"lab probe --invariants --steps 4 {RUN}",
    f"lab sharpness --iterations 3 --json sharp.json {RUN} --load there",
    "convert to-hf nowhere out --dtype bf16 --vocab-size 256 --max-shard-size 5",
    "convert to-megatron nowhere out",
    "build --jobs 2",
    f"build --gpus 4 --timeout 60 -- pretrain_gpt_fp8.py {MODEL} {LEVEL}",
    "doctor --json --bad",
    "args model/gpt-7b recipe/pretrain -- --lr 3",
    "launch model/gpt-125m layout/gpt-125m-8gpus recipe/pretrain recipe/gpt-125m recipe/mock-data --nodes 1 --level O3 "
    "--flags=--lr=1 --time 1:00 --name job --max-restarts 3 --gpus-per-node 8",
]  # fmt: skip
NASTY = [
    "", "--", "-", "x", "-1", "0", "00", "1.5", "1e400", "-1e400", "nan", "inf", "1_000", "0x10", "²", "\u0661",
    "9" * 20, "-" + "9" * 20, "9223372036854775808", "-9223372036854775809", "9" * 5000, "1e308", "1e-400", "é",
    "\ud800", "\0", "a\nb", "a b", "[1,2]", "([1]*2)", "{", "}", "%s", "%", "$(x)", "a" * 5000, "true", "None", "..",
    "/", "/dev/null", "*", "=", "a=b", "1:2", "1,,2", ",", "O9", "fp8", "--lr", "--num-layers", "-h9",
]  # fmt: skip
CLASSIC = ["--", "", "-1", "0", "nan", "inf", "9" * 20, "9" * 5000, "9223372036854775808", "1e308"]
PLAIN = "1 2 3 7 8 16 100 1000000 1e-3 0.5 bf16 O1 te auto text a.jsonl plan.yaml kept".split()


def value(chance: random.Random) -> str:
    """Half of the time what has broken parsers before, a quarter of it what may well be meant."""
    return chance.choice(chance.choice((CLASSIC, CLASSIC, NASTY, PLAIN)))


def mutated(chance: random.Random, words: list[str], flags: list[str]) -> list[str]:
    """One to three mistakes in a command line; flags: those that its parser knows."""
    words = list(words)
    for _ in range(chance.choice((1, 1, 1, 1, 1, 2, 3))):
        places = [i for i, word in enumerate(words) if word.startswith("--") and len(word) > 2]
        values = [i for i, word in enumerate(words) if i and not word.startswith("--")]
        kind = chance.choice("value value value equals equals equals drop double swap cut list add add gone".split())
        if kind == "value" and values:
            words[chance.choice(values)] = value(chance)
        elif kind == "equals" and places:
            i = chance.choice(places)
            has_value = i + 1 < len(words) and not words[i + 1].startswith("--")
            words[i : i + 1 + has_value] = [f"{words[i].partition('=')[0]}={value(chance)}"]
        elif kind == "drop" and places:
            i = chance.choice(places)
            del words[i : i + chance.choice((1, 2))]
        elif kind == "double" and places:
            i = chance.choice(places)
            words[i:i] = [words[i], value(chance)]
        elif kind == "swap" and len(values) > 1:
            i, j = chance.sample(values, 2)
            words[i], words[j] = words[j], words[i]
        elif kind == "cut" and places:
            i = chance.choice(places)
            words[i] = words[i][: chance.randrange(3, len(words[i]) + 1)]
        elif kind == "list" and values:
            i = chance.choice(values)
            words[i:i] = [value(chance), value(chance)]
        elif kind == "add":
            flag, word = chance.choice(flags), value(chance)
            place = chance.randrange(1, len(words) + 1)
            words[place:place] = chance.choice(([flag], [flag, word], [f"{flag}={word}"]))
        elif kind == "gone" and len(words) > 1:
            del words[chance.randrange(1, len(words))]
    return words


@contextlib.contextmanager
def no_work(folder: Path) -> Iterator[None]:
    """In a folder with a few files; nothing that takes long, or leaves the folder, is done."""
    from megatron_fp8.gemm import cutlass_build
    from megatron_fp8.tools.doctor import main as doctor
    from megatron_fp8.tools.doctor.finding import good
    from megatron_fp8.tools.perf import table_run
    from megatron_fp8.tools.rehearsal import main as rehearsal

    def start(name, *_):
        from megatron_fp8.tools.rehearsal import page

        return page.read(name, 1, 0.0, ["it failed"], [])

    def library(*_, **__):
        raise cutlass_build.Unavailable("no compiler")

    def process(self, args, *_, **__):
        raise FileNotFoundError(2, "no processes here", args if isinstance(args, str) else args[0])

    kept = [
        (rehearsal, "_start", start), (cutlass_build, "library", library), (subprocess.Popen, "__init__", process),
        (doctor, "_LOOKS", (lambda: [good("this", "fine")],)), (table_run, "_gpu_count", lambda: 0),
        (table_run, "ROOT", folder), (table_run, "RESULTS", folder / "none.csv"),
    ]  # fmt: skip
    before = [(thing, name, getattr(thing, name)) for thing, name, _ in kept]
    cwd, environment, argv = os.getcwd(), dict(os.environ), list(sys.argv)
    shutil.copy(ROOT / "pretrain_gpt_fp8.py", folder)
    arms = "arms: {O0: '', O3: --fp8-level O3}"
    (folder / "plan.yaml").write_text(f"command: pretrain_gpt_fp8.py --lr 1e-3\nsteps: 4\nseeds: [1, 2]\n{arms}\n")
    for name in ("a", "b"):
        lines = [{"step": step, "loss": 5.0 - step, "grad_norm": 1.0, "step_ms": 9.0} for step in range(1, 6)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    try:
        for thing, name, stub in kept:
            setattr(thing, name, stub)
        os.chdir(folder)
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HOME": str(folder)}
        yield
    finally:
        for thing, name, stock in before:
            setattr(thing, name, stock)
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = argv


def train(words: list[str]) -> None:
    """What a training run does before it builds anything: our flags and Megatron's, checked and validated."""
    from megatron_fp8 import plugin
    from megatron_fp8.flags.usage import one_line_errors

    environment = dict(os.environ)
    try:
        with one_line_errors():
            plugin.install(begins=False)
            import megatron.training.arguments as arguments

            sys.argv = ["pretrain_gpt_fp8.py", *words]
            args = arguments.parse_args()
            args.tokenizer_type = args.tokenizer_type or "GPT2BPETokenizer"
            from megatron_fp8.flags.config import adapt_stock_args, config_from_args

            if (config := config_from_args(args)) is not None:
                adapt_stock_args(args, config)
            arguments.validate_args(args)
            arguments.core_transformer_config_from_args(args)
    finally:
        plugin.uninstall()
        os.environ.clear()
        os.environ.update(environment)


def flags_of(verb: list[str]) -> list[str]:
    """The flags of a verb's parser, by its --help."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        cli.main([*verb, "--help"])
    return sorted({word.rstrip(",") for word in printed.getvalue().split() if word.startswith("--") and len(word) > 2})


def commands(first: int, count: int) -> Iterator[list[str]]:
    """Mutations first to first + count: of a verb's line, or every third of a training run's ("train ...")."""
    from megatron_fp8 import cpu

    known: dict[str, list[str]] = {}
    cpu.install()
    from megatron_fp8.plugin import install, uninstall

    install(begins=False)
    import megatron.training.arguments as arguments

    parser = arguments.argparse.ArgumentParser(allow_abbrev=False)
    of_training = sorted(arguments.add_megatron_arguments(parser)._option_string_actions)
    uninstall()
    from megatron_fp8.flags.config import ALL

    ours = [flag.name for flag in ALL]
    of_training = [flag for flag in of_training if flag.startswith("--")]
    for number in range(first, first + count):
        chance = random.Random(number)
        if number % 3 == 0:
            yield ["train", *mutated(chance, TRAINING.split(), [*of_training, *ours * 5])]
            continue
        words = VERBS[number * 7 % len(VERBS)].split()
        verb = words[: 2 if words[0] in ("lab", "convert") else 1]
        if " ".join(verb) not in known:
            known[" ".join(verb)] = [*flags_of(verb), *chance.sample(ours, 5), "--num-layers", "--lr"]
        yield [*verb, *mutated(chance, ["verb", *words[len(verb) :]], known[" ".join(verb)])[1:]]


def outcome(words: list[str]) -> tuple[str, str]:
    """(What a command line ends in: "done", "refused" or "traceback"; what it printed on stderr)."""
    out, err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8"), io.StringIO()  # as strict as a terminal's
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = train(words[1:]) if words[0] == "train" else cli.main(words)
    except SystemExit as end:
        code = end.code
    except BaseException:
        return "traceback", traceback.format_exc()
    said = err.getvalue()
    if "Traceback" in said or (code == 2 and not said.splitlines()[-1].startswith("megatron_fp8: ")):
        return "traceback", said
    return ("refused" if code == 2 else "done"), said


def tried(first: int, count: int) -> tuple[Counter, list[tuple[list[str], str]]]:
    """How many of some mutations end how, and those that are a traceback, with it."""
    counts: Counter = Counter()
    failed = []
    with tempfile.TemporaryDirectory() as name:
        lines = list(commands(first, count))
        with no_work(Path(name)):
            for words in lines:
                how, said = outcome(words)
                counts[words[0], how] += 1
                if how == "traceback":
                    failed.append((words, said))
    return counts, failed


def _main() -> None:
    first, count = (int(word) for word in (*sys.argv[1:], "0", "60")[:2])
    signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(TimeoutError("it hangs")))
    counts: Counter = Counter()
    kinds: dict[str, list] = {}
    with tempfile.TemporaryDirectory() as name:
        lines = list(commands(first, count))
        with no_work(Path(name)):
            for number, words in enumerate(lines, first):
                signal.alarm(40)
                how, said = outcome(words)
                signal.alarm(0)
                counts[how] += 1
                if how == "traceback":
                    place = [line.strip() for line in said.splitlines() if line.strip().startswith("File")]
                    key = f"{said.strip().splitlines()[-1][:150]} @ {place[-1][-90:] if place else ''}"
                    kinds.setdefault(key, []).append((number, words, said))
    for key, of in sorted(kinds.items(), key=lambda item: -len(item[1])):
        print(f"{len(of)} x {key}\n    {of[0][0]}: {' '.join(of[0][1])[:300]!r}")
        if os.environ.get("FULL"):
            print(of[0][2][-1500:])
    print(counts)


if __name__ == "__main__":
    _main()
