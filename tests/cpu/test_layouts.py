"""Every layout trains as one process does: tensor, pipeline, virtual, data, sequence and expert parallelism together.

All runs of a model begin with the weights of one checkpoint, since Megatron draws them differently on each pipeline
stage, and read the same samples. Two comparisons of three losses and gradient norms:

    FP8 off   the engine with BF16 GEMMs and FP32 gradients, against stock in the same layout: what is left is the order
              of sums. As close to one process as stock's own layout is.
    a level   against one process of the same level; a flag of the sums over tensor parallelism (SUMS) is the layout's
              alone, for one process sends nothing. Pipelines alone change nothing but the order in which the gradient
              norm is summed; data parallelism changes how micro-batches share FP8 gradients, tensor parallelism which
              elements share a weight's scale (O1, O2) and where partial sums are rounded to BF16. So the first step is
              the same, or nearly; what follows drifts as any two runs of FP8 do.
"""

import dataclasses
import functools
import itertools
from dataclasses import dataclass

import pytest
from megatron_runs import KEPT_ORDER, Run, run_megatron

nightly = pytest.mark.slow
STEPS = 3
FP8_OFF = "--fp8-level O1 --fp8-gemm bf16 --fp8-grad-accum fp32 --fp8-grad-reduce fp32 --fp8-masters-as-loaded"
COMMON = f"""{KEPT_ORDER}
--seq-length 64 --max-position-embeddings 64 --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 1
--train-iters {STEPS} --lr-decay-iters 10 --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 2
--weight-decay 0.01 --clip-grad 1.0 --adam-beta2 0.95 --bf16 --mock-data --tokenizer-type NullTokenizer --vocab-size 255
--num-workers 0 --make-vocab-size-divisible-by 16
--split 1,0,0 --eval-iters 0 --eval-interval 1000 --log-interval 1 --position-embedding-type rope
--transformer-impl local --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-persist-layer-norm
--attention-backend unfused"""
OWNED = " --fp8-experts"
STOCKS_ROTATION = "--no-rope-fusion"  # which stock needs here, and whoever is compared with it; levels have their own


@dataclass(frozen=True)
class Model:
    """A tiny GPT."""

    layers: int = 4
    heads: int = 4
    tied: bool = False
    biases: bool = False
    experts: int = 0

    @property
    def flags(self) -> str:
        width = 16 * self.heads
        flags = f"--num-layers {self.layers} --hidden-size {width} --num-attention-heads {self.heads}"
        flags += f" --ffn-hidden-size {2 * width}"
        flags += "" if self.tied else " --untie-embeddings-and-output-weights"
        flags += "" if self.biases else " --swiglu --disable-bias-linear --normalization RMSNorm"
        if self.experts:
            flags += f" --num-experts {self.experts} --moe-router-topk 2 --moe-router-load-balancing-type none"
        return flags


@dataclass(frozen=True)
class Layout:
    """How many ranks, and what each has. etp: of experts, 0 for Megatron's own default. more: further flags."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 0
    virtual: bool = False
    sequence: bool = False
    more: str = ""

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def micro_batches(self) -> int:
        """A multiple of the stages, which the interleaved schedule asks for."""
        return 3 if self.pp == 3 else 4

    def flags(self, layers: int) -> str:
        flags = f"--tensor-model-parallel-size {self.tp} --pipeline-model-parallel-size {self.pp} {self.more}"
        flags += f" --expert-model-parallel-size {self.ep}" if self.ep > 1 else ""
        flags += f" --expert-tensor-parallel-size {self.etp}" if self.etp else ""
        flags += f" --num-layers-per-virtual-pipeline-stage {layers // self.pp // 2}" if self.virtual else ""
        return flags + (" --sequence-parallel" if self.sequence else "")


@pytest.fixture(scope="session")
def initial(tmp_path_factory):
    """initial(model): the flags that begin with its checkpoint."""

    @functools.cache
    def initial(model: Model) -> str:
        folder = tmp_path_factory.mktemp("initial")
        once = f"--save {folder} --save-interval 1 --train-iters 1 --lr-warmup-iters 0 --global-batch-size 4"
        run_megatron(1, f"{COMMON} {model.flags} {once} {STOCKS_ROTATION}".split())
        return f"--load {folder} --finetune"

    return initial


@pytest.fixture(scope="session")
def train(initial):
    """train(model, layout, level, batch=None): a run of three steps; of the same command once."""

    @functools.cache
    def train(model: Model, layout: Layout, level: str, batch: int) -> Run:
        flags = f"{COMMON} {model.flags} {initial(model)} {layout.flags(model.layers)} {level}"
        flags += f" --global-batch-size {batch} {STOCKS_ROTATION if level in ('', FP8_OFF, FP8_OFF + OWNED) else ''}"
        run = run_megatron(layout.ranks, flags.split(), timeout=900)
        assert len(run.losses) == STEPS and not any(step.skipped for step in run.steps)
        return run

    return train


def compare(what: str, run: Run, other: Run, first: tuple[float, float], all_: tuple[float, float]) -> None:
    """Bounds: of the difference of the losses, and of the gradient norms' share; of the first step, and of all."""
    losses = [abs(a - b) for a, b in zip(run.losses, other.losses, strict=True)]
    norms = [abs(a / b - 1) for a, b in zip(run.grad_norms, other.grad_norms, strict=True)]
    print(f"{what}: loss {losses[0]:.6f} .. {max(losses):.6f}, gradient norm {norms[0]:.4f} .. {max(norms):.4f}")
    assert losses[0] <= first[0] and norms[0] <= first[1]
    assert max(losses) <= all_[0] and max(norms) <= all_[1]


def check(train, model: Model, layout: Layout, level: str, sums: str = "", both: bool = True) -> None:
    """both: with FP8 off too."""
    batch, one, flags = layout.micro_batches * layout.dp, Layout(), f"--fp8-level {level}"
    first = (2e-6, 2e-3)  # Megatron prints six digits of a loss, three of a norm
    if layout.dp > 1:
        first = (2e-6, 1e-2)
    split = max(layout.tp, layout.etp) > 1
    if split:  # at O1 a weight's E4M3 copy has a scale on each rank; 0.00102 was the most
        first = (2e-3, 1e-2)
    if OWNED in level and layout.ep > 1:  # an expert's call has more ranks' tokens, so their first scale is another
        first = max(first[0], 1e-4), first[1]
    print(model, layout)
    run, alone = train(model, layout, f"{flags} {sums}".strip(), batch), train(model, one, flags, batch)
    compare(f"{level} {sums}", run, alone, first, (1e-2, 0.1))
    if not both:
        return
    off = train(model, layout, f"{FP8_OFF}{OWNED if OWNED in level else ''}", batch)
    # Stock's local layers, without Transformer Engine or apex, refuse sequence parallelism, and experts need it. More
    # than 16 ranks take minutes a run, and are compared with one process alone. So is a layout with a flag of the sums,
    # which these runs have not: the grid has it without.
    if not (model.experts and layout.tp > 1) and layout.ranks <= 16 and not sums:
        stock = train(model, dataclasses.replace(layout, sequence=False), "", batch)
        compare("FP8 off, stock's layout", off, stock, (2e-6, 2e-3), (1e-3, 0.02))
    first = (5e-4, 2e-3) if split else (2e-6, 2e-3)
    compare("FP8 off, one stock process", off, train(model, one, "", batch), first, (1e-3, 0.02))


SHARDED = "--use-distributed-optimizer"
SUMS = "--fp8-tp-reduce-scatter fp8"
ALL_TO_ALL = "--moe-token-dispatcher-type alltoall"  # else each rank gathers all tokens
# What crashed: on the second tensor-parallel rank of a stage without biases, stock's parameters are all duplicates.
# And all traffic of tensor parallelism in FP8, under 1F1B.
DUPLICATES = Model(3), Layout(tp=2, pp=3, sequence=True, more=SHARDED), "O3", SUMS
QUICK = [
    pytest.param(*DUPLICATES, id="duplicates", marks=nightly),
    pytest.param(
        Model(4, tied=True, biases=True), Layout(pp=2, virtual=True, more=SHARDED), "O1", "", id="interleaved"
    ),
    # A stage of the embedding alone, one of the loss alone; the latter has test_checkpoints.py for every change.
    pytest.param(
        *(Model(4), Layout(pp=4, more="--pipeline-model-parallel-layout E|tt|tt|L"), "O2", ""),
        id="no-layer",
        marks=nightly,
    ),
    pytest.param(
        Model(2, experts=4), Layout(dp=2, ep=2, more=f"{SHARDED} {ALL_TO_ALL}"), "O3", "", id="experts", marks=nightly
    ),
    pytest.param(Model(2, experts=4), Layout(dp=2, ep=2), "O1", "", id="experts-whole", marks=nightly),
    pytest.param(Model(4, experts=4), Layout(2, 2, 2, ep=2, sequence=True), "O2", "", id="experts-all", marks=nightly),
    *(
        pytest.param(Model(2, experts=4), layout, f"{level}{OWNED}", "", id=f"experts-owned-{i}", marks=nightly)
        for i, (layout, level) in enumerate(
            (
                (Layout(dp=2, ep=2, more=f"{SHARDED} {ALL_TO_ALL}"), "O3"),
                (Layout(dp=2), "O1"),
                (Layout(pp=2, dp=2, ep=2, more=f"{SHARDED} --overlap-grad-reduce --overlap-param-gather"), "O2"),
                (Layout(2, 1, 2, ep=2, etp=1, sequence=True, more=SHARDED), "O3"),
                (Layout(2, 2, 1, ep=1, etp=1, sequence=True), "O1"),
            )
        )
    ),
    # Expert tensor parallelism at its default, TP's: ranks gather unequal numbers of tokens.
    pytest.param(
        *(Model(2, experts=4), Layout(2, dp=2, ep=2, sequence=True, more=ALL_TO_ALL), "O1", ""),
        id="experts-split",
        marks=nightly,
    ),
]


@pytest.mark.parametrize(("model", "layout", "level", "sums"), QUICK)
def test_a_layout_trains_as_one_process(train, model, layout, level, sums):
    check(train, model, layout, level, sums)


def test_stages_with_a_rank_of_duplicates(train):
    check(train, *DUPLICATES, both=False)


def grid():
    """Every combination of TP, PP, virtual stages and DP, but of 24 and 32 ranks the last alone; the rest in turns, so
    that any two meet somewhere."""
    sizes = itertools.product((1, 2, 4), (1, 2, 3, 4), (1, 2), (False, True))
    number = 0
    for tp, pp, dp, virtual in sizes:
        if (virtual and pp == 1) or tp * pp * dp == 1:
            continue
        number += 1
        if tp * pp * dp > 16 and (tp, pp, virtual) != (4, 4, True):
            continue
        level = f"O{1 + number % 3}"
        layers = pp * 2 if virtual or pp < 3 else pp
        more = []
        if number % 4:
            more.append(SHARDED)
        uneven = not virtual and pp > 1 and number % 2
        if uneven:
            layers = 4 if pp < 4 else 6
            more.append("--decoder-first-pipeline-num-layers 1")
            more.append(f"--decoder-last-pipeline-num-layers {3 if pp == 2 else 1}")
        if number % 4 and dp == 2 and number % 3:
            more.append("--overlap-grad-reduce --overlap-param-gather")
        model = Model(layers, tied=bool(number // 2 % 2), biases=bool(number // 3 % 2))
        layout = Layout(tp, pp, dp, virtual=virtual, sequence=tp > 1 and bool(number % 5 % 2), more=" ".join(more))
        name = f"{level}-tp{tp}-pp{pp}-dp{dp}" + "-virtual" * virtual + "-sp" * layout.sequence
        name += "-uneven" * bool(uneven) + "-tied" * model.tied + "-biases" * model.biases
        yield pytest.param(model, layout, level, id=name, marks=nightly)


@pytest.mark.parametrize(("model", "layout", "level"), [*grid()])
def test_the_grid(train, model, layout, level):
    check(train, model, layout, level)


RECOMPUTED = {
    "": "",
    "selective": "--recompute-granularity selective --recompute-modules core_attn mlp",
    "full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
}


def expert_grid():
    """Every combination of TP, PP, EP and ETP for owned experts, on the fewest ranks that have it or, in turns, twice
    as many; dispatchers and levels in turns."""
    sizes = itertools.product((1, 2), (1, 2), (1, 2), (1, 2))
    for number, (tp, pp, ep, etp) in enumerate(sizes):
        if tp * pp * ep * etp == 1:
            continue
        dp = max(1, ep * etp // tp) * (2 if number % 5 == 3 else 1)
        more = [SHARDED] * bool(number % 3) + [ALL_TO_ALL] * (number % 2)
        level = f"O{3 - number % 3}"
        layout = Layout(tp, pp, dp, ep, etp, sequence=tp > 1, more=" ".join(more))
        name = f"{level}-tp{tp}-pp{pp}-ep{ep}-etp{etp}-dp{dp}" + "-all-to-all" * (number % 2)
        yield pytest.param(layout, level, id=name, marks=nightly)


@pytest.mark.parametrize(("layout", "level"), [*expert_grid()])
def test_owned_experts(train, layout, level):
    check(train, Model(2, experts=4), layout, level + OWNED)


def tensor_parallel_grid():
    """Every combination of TP, sequence parallelism, PP and recomputation; sums in BF16 and in FP8 in turns, the
    schedule interleaved now and then."""
    sizes = itertools.product(((1, False), (2, False), (2, True), (4, False), (4, True)), (1, 2), RECOMPUTED)
    for number, ((tp, sequence), pp, again) in enumerate(sizes):
        if tp * pp == 1 and not again:
            continue
        sums = SUMS if tp > 1 and number % 2 else ""
        layout = Layout(tp, pp, virtual=pp == 2 and number % 4 == 0, sequence=sequence, more=RECOMPUTED[again])
        name = f"tp{tp}" + "-sp" * sequence + f"-pp{pp}" + "-virtual" * layout.virtual + f"-{again}" * bool(again)
        name += "-fp8-sums" * bool(sums)
        yield pytest.param(Model(4, tied=bool(number % 3)), layout, sums, id=name, marks=nightly)


@pytest.mark.parametrize(("model", "layout", "sums"), [*tensor_parallel_grid()])
def test_tensor_parallelism(train, model, layout, sums):
    check(train, model, layout, "O3", sums)


RESUMED = {  # the paper's own, and the least in which a rank's own parameters are all duplicates
    "175b": (Model(4, heads=8), Layout(tp=8, pp=4, sequence=True, more=SHARDED)),
    "duplicates": (Model(3), Layout(tp=2, pp=3, more=SHARDED)),
}


@nightly
@pytest.mark.parametrize(
    ("layout", "level"), [("175b", "O3"), ("duplicates", "O1"), ("duplicates", "O2"), ("duplicates", "O3")]
)
def test_a_layout_is_saved_and_resumed(initial, layout, level, tmp_path):
    """The losses and gradient norms of one process, and a resume that goes on as it was."""
    model, layout = RESUMED[layout]
    flags = f"{COMMON} {model.flags} --global-batch-size 5 --train-iters 4 --fp8-level {level}"

    def steps(ranks: int, more: str) -> Run:
        return run_megatron(ranks, f"{flags} {more}".split(), timeout=900)

    one = steps(1, initial(model))
    paper = f"{layout.flags(model.layers)} --save {tmp_path} --save-interval 3"
    whole = steps(layout.ranks, f"{paper} {initial(model)}")
    compare(level, whole, one, (1e-3, 0.01), (1e-2, 0.1))
    again = steps(layout.ranks, f"{layout.flags(model.layers)} --load {tmp_path} --ckpt-step 3")
    assert (again.losses, again.grad_norms) == (whole.losses[3:], whole.grad_norms[3:])
