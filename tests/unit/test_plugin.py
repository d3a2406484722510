"""install(), enable() and uninstall(): once, reversible, and loud about a Megatron it does not know."""

import pytest
from launch import RunFailed, forked
from megatron_runs import ANEW

from megatron_fp8.flags.checks import check_device, check_megatron_version

HOOKS = """
import megatron_fp8.cpu as cpu
cpu.install()
import megatron.core.package_info, megatron.training.arguments as arguments, megatron.core.datasets.utils as utils
originals = arguments.parse_args, utils.compile_helpers
from megatron_fp8 import parsed_runs, plugin, run as of_run
{body}
"""


@pytest.fixture
def run(tmp_path):
    """run(body): in a process of its own; hooks are global. before: what it does first."""

    def run(body: str, before: str = "import sys") -> None:
        (tmp_path / "hooks.py").write_text(before + HOOKS.format(body=body))
        forked(1, [str(tmp_path / "hooks.py")], tmp_path / "log", timeout=250, env={"CUDA_VISIBLE_DEVICES": ""})

    return run


@pytest.fixture
def said_by(run):
    """said_by(body): what it says as it fails."""

    def said_by(body: str) -> str:
        with pytest.raises(RunFailed) as failure:
            run(body)
        return str(failure.value)

    return said_by


def test_importing_patches_nothing_installing_twice_hooks_once_and_uninstalling_puts_everything_back(run):
    run(
        "assert (arguments.parse_args, utils.compile_helpers) == originals\n"
        "plugin.install(); first = arguments.parse_args; plugin.install()\n"
        "assert arguments.parse_args is first and first is not originals[0]\n"
        "plugin.uninstall()\n"
        "assert (arguments.parse_args, utils.compile_helpers) == originals\n"
        "assert __import__('torch').cuda.is_available() is False\n"
        "plugin.uninstall(); plugin.install(); assert arguments.parse_args is not originals[0]\n",
        before=ANEW,
    )


def test_a_later_run_says_again_that_data_have_no_answer(run):
    run(
        "import contextlib, io, torch\n"
        "from megatron_fp8.tuning import no_answer\n"
        "def said():\n"
        "    with contextlib.redirect_stdout(io.StringIO()) as out:\n"
        "        for mask in ([0.0, 1.0], [0.0, 0.0], [0.0, 0.0]): no_answer.tell(torch.tensor(mask))\n"
        "    return out.getvalue().count(no_answer.LINE)\n"
        "plugin.install(); assert (said(), said()) == (1, 0)\n"
        "plugin.uninstall(); assert said() == 1\n"
    )


def test_what_a_run_rebinds_goes_with_the_run_and_what_the_process_does_stays(run):
    from commands import MODEL

    run(
        "from megatron.core.models.gpt.gpt_model import GPTModel\n"
        "init = GPTModel.__init__\n"
        "plugin.install(); ours = arguments.parse_args\n"
        "def read(*flags):\n"
        f"    sys.argv = ['train.py', *{MODEL}, '--eval-interval', '9', *flags]\n"
        "    arguments.parse_args()\n"
        "    return GPTModel.__init__ is not init\n"
        "assert [read(), read('--fp8-level', 'O1'), read('--fp8-level', 'O2'), read()] == [False, True, True, False]\n"
        "assert arguments.parse_args is ours and read('--fp8-level', 'O1')\n"
        "plugin.uninstall()\n"
        "assert arguments.parse_args is originals[0] and GPTModel.__init__ is init\n"
    )


def test_what_a_level_switches_off_a_checkpoint_does_not_switch_on(run):
    """--use-checkpoint-args, of a checkpoint with the grouped GEMMs of Transformer Engine's layers."""
    from commands import MODEL

    run(
        "import argparse\n"
        "import megatron.training.checkpointing as checkpointing\n"
        "saved = argparse.Namespace(num_experts=2, moe_grouped_gemm=True, moe_router_topk=1, swiglu=True)\n"
        "state = {'args': saved, 'iteration': 3, 'checkpoint_version': 3.0}\n"
        "read = lambda load_dir, args, rank0=False, checkpointing_context=None: (state, '', False, None)\n"
        "checkpointing._load_base_checkpoint = read\n"
        "arguments.set_global_variables = lambda args: None\n"
        "plugin.install()\n"
        f"sys.argv = ['train.py', *{MODEL}, '--eval-interval', '9', '--load', '/no/such/folder',"
        "    '--use-checkpoint-args', '--disable-bias-linear', '--train-iters=9', '--lr=1', '--fp8-level', 'O1']\n"
        "args = arguments.parse_and_validate_args()\n"
        "assert (args.num_experts, args.swiglu, args.moe_grouped_gemm) == (2, True, False)\n"
        "assert checkpointing._load_base_checkpoint is not read\n"
        "plugin.uninstall()\n"
        "assert checkpointing._load_base_checkpoint is read\n"
    )


def test_the_losses_are_ours_under_a_level_and_stocks_without(run):
    from commands import MODEL

    run(
        "from megatron.core import tensor_parallel\n"
        "from megatron.core.models.common.language_module import language_module\n"
        "owners = tensor_parallel, language_module\n"
        "names = 'vocab_parallel_cross_entropy', 'fused_vocab_parallel_cross_entropy'\n"
        "stock = [*map(getattr, owners, names)]\n"
        "def read(*flags):\n"
        f"    sys.argv = ['train.py', *{MODEL}, '--eval-interval', '9', *flags]\n"
        "    arguments.parse_args()\n"
        "    return [getattr(*place) is was for *place, was in zip(owners, names, stock)]\n"
        "plugin.install()\n"
        "assert read('--fp8-level', 'O0') == read() == [True, True]\n"
        "assert read('--fp8-level', 'O1') == [False, False]\n"
        "assert read() == [True, True] and read('--fp8-level', 'O3') == [False, False]\n"
        "plugin.uninstall()\n"
        "assert [getattr(*place) is was for *place, was in zip(owners, names, stock)] == [True, True]\n"
    )


def test_a_level_on_cuda_stands_in_for_apexs_weight_gradients_and_nothing_else_does(run):
    from commands import MODEL

    run(
        "import torch, types\n"
        "import megatron.core.tensor_parallel.layers as layers\n"
        "name = 'fused_weight_gradient_mlp_cuda'\n"
        "plugin.install(); of_run.check_device = lambda capability: None\n"
        "def read(*flags):\n"
        f"    sys.argv = ['train.py', *{MODEL}, '--eval-interval', '9', *flags]\n"
        "    args = arguments.parse_args()\n"
        "    there = name in sys.modules, hasattr(layers, name), layers._grad_accum_fusion_available\n"
        "    assert there in ((True,) * 3, (False,) * 3)\n"
        "    return there[0], args.gradient_accumulation_fusion\n"
        "on_cpu = [read(), read('--fp8-level', 'O1')]\n"
        "assert on_cpu == [(False, True), (False, False)], on_cpu\n"
        "plugin.cpu.needed = lambda: False\n"
        "assert read('--fp8-level', 'O1') == read('--fp8-level', 'O3') == (True, True)\n"
        "x, weight = torch.randn(5, 2, 4), torch.nn.Parameter(torch.randn(3, 4))\n"
        "weight.main_grad, weight.grad_added_to_main_grad = torch.ones(3, 4), False\n"
        "group = types.SimpleNamespace(size=lambda: 1)\n"
        "apply = layers.LinearWithGradAccumulationAndAsyncCommunication.apply\n"
        "y = apply(x, weight, None, True, False, False, None, None, group, 1)\n"
        "backward = torch.autograd.Variable._execution_engine.run_backward  # as Megatron's schedules do\n"
        "backward((y,), (torch.ones_like(y),), False, False, (), allow_unreachable=True, accumulate_grad=True)\n"
        "expected = 1 + x.sum((0, 1)).expand(3, 4)\n"
        "assert torch.allclose(weight.main_grad, expected) and weight.grad_added_to_main_grad\n"
        "assert read('--fp8-level', 'O1', '--no-gradient-accumulation-fusion') == (True, False)\n"
        "assert read() == read('--fp8-level', 'O0') == (False, True)\n"
        "assert read('--fp8-emulate', 'E8M3') == (False, False)\n"
        "assert read('--fp8-level', 'O1')[0]\n"
        "plugin.uninstall()\n"
        "assert name not in sys.modules and not hasattr(layers, name) and not layers._grad_accum_fusion_available\n"
    )


def test_the_backend_of_a_run_goes_with_the_run(run):
    from commands import MODEL

    run(
        "from megatron_fp8.gemm import cublaslt, cutlass, cutlass_build, plans\n"
        "from megatron_fp8.gemm.interface import serving\n"
        "plugin.install(); of_run.check_device = lambda capability: None; lines = []; of_run.say = lines.extend\n"
        "def read(*flags):\n"
        f"    sys.argv = ['train.py', *{MODEL}, '--eval-interval', '9', '--fp8-level', 'O1', *flags]\n"
        "    arguments.parse_args()\n"
        "    return serving('cuda').name\n"
        "assert read('--fp8-gemm-backend', 'torch') == 'cublaslt' and 'no CUDA device: --fp8-gemm-b' in str(lines)\n"
        "plugin.cpu.needed = lambda: False\n"
        "assert [read('--fp8-gemm-backend', name) for name in ('auto', 'torch')] == ['cublaslt', 'torch']\n"
        "assert read() == 'cublaslt' and plans.on_plan is None\n"
        "assert read('--fp8-log-gemm', '--fp8-gemm-search') == 'cublaslt' and plans.on_plan\n"
        "cublaslt.bound = lambda: False\n"
        "try:\n"
        "    read('--fp8-gemm-backend', 'cublaslt')\n"
        "except ValueError as error:\n"
        "    assert str(error).startswith('--fp8-gemm-backend cublaslt: ') and '\\n' not in str(error)\n"
        "else:\n"
        "    raise AssertionError\n"
        "cublaslt.bound = lambda: True\n"
        "def library(build): raise cutlass_build.Unavailable('no nvcc for the CUTLASS GEMMs; install it')\n"
        "cutlass.cutlass_build.library = library; plans.torch.cuda.is_available = lambda: False\n"
        "try:\n"
        "    read('--fp8-gemm-backend', 'cutlass')\n"
        "except ValueError as error:\n"
        "    said = '--fp8-gemm-backend cutlass: no nvcc for the CUTLASS GEMMs; install it; or remove it'\n"
        "    assert type(error).__name__ == 'UserError' and str(error) == said, error\n"
        "else:\n"
        "    raise AssertionError\n"
        "cutlass.CUTLASS.prepare = lambda build=True: None\n"
        "assert read('--fp8-gemm-backend', 'cutlass') == 'cutlass' and plans.maker_of == serving('cuda').maker_of\n"
        "assert read() == 'cublaslt' and plans.maker_of == serving('cuda').maker_of\n"
        "assert read('--fp8-gemm-backend', 'torch') == 'torch' and plans.on_plan is None\n"
        "plugin.uninstall(); assert serving('cuda').name == 'cublaslt'\n"
    )


def test_cutlass_joins_a_run_where_it_is_built(run):
    from commands import MODEL

    run(
        "import dataclasses\n"
        "from megatron_fp8.engine.gemm_choice import RunGemms\n"
        "from megatron_fp8.gemm import cublaslt, cutlass, cutlass_check, plans\n"
        "from megatron_fp8.gemm.interface import serving\n"
        "plugin.install(); of_run.check_device = lambda capability: None; lines = []; of_run.say = lines.extend\n"
        "plugin.cpu.needed = lambda: False; cublaslt.bound = lambda: True\n"
        "cutlass.CUTLASS.prepare = lambda build=True: None\n"
        "cutlass.CUTLASS.version = '01-nvcc13-cutlass4'; what = 'CUTLASS for large ones of the backward pass'\n"
        "def settled(reason, *flags):\n"
        "    cutlass_check.why_not = lambda: reason\n"
        f"    sys.argv = ['train.py', *{MODEL}, '--eval-interval', '9', '--fp8-level', 'O1', *flags]\n"
        "    config = parsed_runs.config_from_args(arguments.parse_args()); lines.clear()\n"
        "    config = dataclasses.replace(config, draws_grouped='--moe-grouped-gemm' in flags)  # the level adapts it\n"
        "    gemms = RunGemms(config, 'cuda', lines.extend, plugin._installed.run.hooked); gemms.settle()\n"
        "    said = list(lines); gemms.settle()  # as an evaluation after the other does\n"
        "    assert reason or lines == said; lines[:] = said; return serving('cuda').name\n"
        "assert settled('') == 'auto' and plans.maker_of == serving('cuda').maker_of\n"
        "assert lines == [f'FP8 GEMMs: {what}, cuBLASLt for the rest (01-nvcc13-cutlass4)']\n"
        "assert settled('it is not built') == 'cublaslt' and plans.maker_of == serving('cuda').maker_of\n"
        "assert lines == [f'FP8 GEMMs: without {what}: it is not built']\n"
        "experts = '--num-experts 2 --fp8-experts --moe-grouped-gemm --disable-bias-linear'.split()\n"
        "assert settled('', *experts) == 'auto'\n"
        "assert lines == [f'FP8 GEMMs: {what} and for experts together, cuBLASLt for the rest (01-nvcc13-cutlass4)']\n"
        "assert settled('', '--fp8-gemm-backend', 'cublaslt') == 'cublaslt' and not lines\n"
        "assert settled('', '--fp8-gemm', 'bf16') == 'cublaslt' and not lines\n"
        "assert settled('', '--fp8-gemm-backend', 'cutlass') == 'cutlass' and not lines\n"
        "try:\n"
        "    settled('it is wrong', '--fp8-gemm-backend', 'cutlass')\n"
        "except ValueError as error:\n"
        "    assert str(error) == '--fp8-gemm-backend cutlass: it is wrong; or remove it'\n"
        "else:\n"
        "    raise AssertionError\n"
        "assert settled('') == 'auto'; plugin.uninstall(); assert serving('cuda').name == 'cublaslt'\n"
    )


def test_enabled_every_module_that_has_the_optimizer_gets_ours_and_is_put_back(run):
    run(
        "import types\n"
        "import megatron_fp8, megatron.core.optimizer as optimizer, megatron.training.training as training\n"
        "from megatron.core.models.gpt.gpt_model import GPTModel\n"
        "trainer = types.ModuleType('trainer'); sys.modules['trainer'] = trainer\n"
        "trainer.get_megatron_optimizer = optimizer.get_megatron_optimizer\n"
        "trainer.other = optimizer.get_megatron_optimizer\n"
        "holders = optimizer, trainer, training\n"
        "stock = optimizer.get_megatron_optimizer, GPTModel.__init__, training.train_step\n"
        "for level in 'O1', 'O3':\n"
        "    megatron_fp8.enable(level)\n"
        "    assert all(holder.get_megatron_optimizer is not stock[0] for holder in holders)\n"
        "    assert optimizer.get_megatron_optimizer is trainer.get_megatron_optimizer\n"
        "    assert trainer.other is stock[0] and GPTModel.__init__ is not stock[1]\n"
        "    assert arguments.parse_args is originals[0] and training.train_step is stock[2]\n"
        "    plugin.uninstall()\n"
        "    assert all(holder.get_megatron_optimizer is stock[0] for holder in holders)\n"
        "    assert GPTModel.__init__ is stock[1]\n"
    )


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("'O0'", "level O0 is stock Megatron; leave the call out"),
        ("'O4'", "--fp8-level"),
        ("'O3', exp_avg='fp7'", "--fp8-exp-avg"),
        ("'O3', exp_avgs='fp8'", "exp_avgs='fp8': no flag that works without Megatron's training loop"),
        ("'O3', log_interval=5", "log_interval=5: no flag that works without Megatron's training loop"),
        ("'O3', grad_reduce_hierarchy='node'", "grad_reduce_hierarchy='node': no flag"),
        ("'O3', recipe='mxfp8'", "--fp8-recipe mxfp8"),
    ],
)
def test_what_cannot_be_enabled_is_one_line_and_nothing_is_hooked(run, call, said):
    run(
        "from megatron.core.models.gpt.gpt_model import GPTModel\n"
        "from megatron_fp8.errors import UserError\n"
        "init = GPTModel.__init__\n"
        "try:\n"
        f"    plugin.enable({call})\n"
        "except (UserError, SystemExit) as error:\n"
        f"    assert {said!r} in str(error) and '\\n' not in str(error).strip(), error\n"
        "else:\n"
        "    raise AssertionError\n"
        "assert GPTModel.__init__ is init\n"
        "plugin.enable('O1'); assert GPTModel.__init__ is not init\n"
        "plugin.uninstall(); assert GPTModel.__init__ is init\n"
    )


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("fp8='hybrid'", "TransformerConfig.fp8 hybrid: stock's FP8, "),
        ("fp8=None, fp8_recipe='mxfp8'", "TransformerConfig.fp8_recipe: as --fp8-recipe mxfp8: "),
        (
            "num_moe_experts=2, moe_grouped_gemm=True, recompute_modules=['moe_act']",
            "TransformerConfig.recompute_modules: as --recompute-modules moe_act: use moe instead: ",
        ),
        ("fp4='e2m1'", "TransformerConfig.fp4: as --fp4-format e2m1: "),
    ],
)
def test_a_trainers_model_that_no_level_builds_is_refused(run, wrong, said):
    run(
        "import types\n"
        "from megatron.core.models.gpt.gpt_model import GPTModel\n"
        "from megatron_fp8.errors import UserError\n"
        "plugin.enable('O2')\n"
        "try:\n"
        f"    GPTModel(types.SimpleNamespace({wrong}), None, 64, 64)\n"
        "except UserError as error:\n"
        f"    assert str(error).startswith({said!r}) and '\\n' not in str(error), error\n"
        "else:\n"
        "    raise AssertionError\n"
    )


@pytest.mark.parametrize("first", ["plugin.install()", "plugin.enable('O1')"])
def test_the_plugin_is_there_once(said_by, first):
    said = said_by(f"{first}\nplugin.enable('O3')")
    assert "UserError: megatron_fp8.enable: the plugin is there already" in said


def test_another_signature_is_refused(said_by):
    said = said_by("arguments.parse_args = lambda provider: None\nplugin.install()")
    assert "RuntimeError: megatron_fp8 does not know this megatron.training.arguments.parse_args" in said


def test_another_version_is_refused(said_by):
    said = said_by("megatron.core.package_info.__version__ = '0.17.1'\nplugin.install()")
    assert "UserError: megatron-core 0.17.1" in said


@pytest.mark.parametrize("version", ["0.19.0", "0.19.2", "0.19.3rc1"])
def test_known_versions_pass(version):
    check_megatron_version(version)


def test_a_gpu_is_judged_by_its_capability():
    check_device((9, 0))
    check_device((8, 9))
    with pytest.raises(ValueError, match=r"compute capability 8\.0"):
        check_device((8, 0))


@pytest.mark.parametrize(
    ("words", "asks"),
    [
        ("--lr 1", False),
        ("--fp8-level O0", False),
        ("--fp8-level=O0 --lr 1", False),
        ("--fp8-level O3 --fp8-level O0", False),
        ("--fp8-level=O0 --fp8-level O3", True),
        ("--fp8-level=O1", True),
        ("--fp8-level", True),
        ("--fp8-level O0 --fp8-emulate e4m3", True),
    ],
)
def test_a_script_that_does_not_parse_is_refused_if_a_level_is_asked_for(words, asks):
    """At O0 nothing is to be in FP8, so nothing is amiss."""
    from megatron_fp8.parsed_runs import _asks_for_level

    assert _asks_for_level(["train.py", *words.split()]) is asks
