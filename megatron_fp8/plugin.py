"""The plugin's place in Megatron-LM, from install() or enable() to uninstall().

    install()      once a process, before the script runs: Megatron's parser gets our flags; idempotent
    enable()       for a trainer that does not parse Megatron's flags: a level from now on
    put()          a script of ours asks for a hook of its own
    uninstall()    puts every original back, and forgets what a run has left

Nothing is changed by an import. hooks.py is the table of all that is hooked, with the reasons; run.py composes a run;
parsed_runs.py leads Megatron's parser to it, trainer.py a trainer.
"""

from typing import Any

from . import cpu
from .errors import UserError
from .flags import args_file
from .flags.checks import check_megatron_version
from .parsed_runs import ParsedRuns
from .rebind import Hook
from .run import Run, forget_said
from .trainer import trainers_run

_installed: ParsedRuns | Run | None = None


def install(begins: bool = True) -> None:
    """Add `--fp8-level` to whatever Megatron script this process is about to run.

    begins: of ParsedRuns.

    Raises UserError outside the supported range of megatron-core versions, RuntimeError if a function that we hook
    does not have the signature that we know.
    """
    global _installed
    if _installed is not None:
        assert begins, "flags are to be read without a run in the process of one"
        return
    _prepare()
    cpu.skip_dataset_compile()
    _installed = ParsedRuns(begins)


def enable(level: str = "O3", **flags: Any) -> None:
    """Train what is built from now on at a level, in a process without Megatron's parser (trainer.py).

    Args:
        level: "O1", "O2" or "O3".
        flags: others of ours, named without "--fp8-": enable("O3", exp_avg_sq="fp8", recipe="tensorwise").

    Raises UserError for what a level does not do, or the flags do not allow, and if the plugin is there already; and
    what `install` raises.
    """
    global _installed
    if _installed is not None:
        raise UserError("megatron_fp8.enable: the plugin is there already: call uninstall() first, or leave this out")
    _prepare()
    _installed = trainers_run(level, flags)


def put(hook: Hook, script: Any) -> None:
    """Put a row of hooks.py that the running script asks for, until uninstall(). No run's row may have its name.

    script: has the attribute that the row's maker names, in the place of the Run.
    """
    assert isinstance(_installed, ParsedRuns)
    hook.put(_installed.hooked, script)


def uninstall() -> None:
    """Undo install() or enable(), in reverse order.  Models already built keep what they have."""
    global _installed
    if _installed is not None:
        _installed.end()
        _installed = None
        args_file.forget()
        forget_said()
        from .engine import weight_groups  # which imports Megatron: not before the script has its own in front
        from .tuning import no_answer

        weight_groups.forget()
        no_answer.forget()
    cpu.uninstall()


def _prepare() -> None:
    if cpu.needed():
        cpu.install()
    import megatron.core.package_info

    check_megatron_version(megatron.core.package_info.__version__)
