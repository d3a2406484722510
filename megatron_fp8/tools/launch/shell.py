"""Checks names of shell variables, and quotes words that a person may paste into a shell."""

import functools
import re
import shlex
from collections.abc import Iterable

from ...errors import UserError
from ...shipped import shipped

TEMPLATE = "scripts/slurm/train.sbatch"
# Variables that a shell uses itself: it runs some values as commands; others cannot be set, or change how it parses.
_SHELLS = re.compile(
    r"BASH\w*|PROMPT_\w+|PS[0-4]|ENV|IFS|CDPATH|GLOBIGNORE|EXECIGNORE|SHELLOPTS|POSIXLY_CORRECT|E?UID|PPID|GROUPS"
    r"|DIRSTACK|FUNCNAME|PIPESTATUS|S?RANDOM|SECONDS|EPOCH\w+|LINENO|HIST\w+|OPT(IND|ARG|ERR)|COMP_\w+|_",
    re.ASCII,
)
# A user may set these although the job's script does: it sets them for one command, or only if they are empty.
_SHARED = """LC_ALL TRITON_CACHE_DIR TORCHINDUCTOR_CACHE_DIR NCCL_DEBUG NCCL_DEBUG_SUBSYS NCCL_DEBUG_FILE
OMP_NUM_THREADS""".split()


def check_variables(names: Iterable[str], in_job: bool = False) -> None:
    """Raise UserError for a variable name that a shell, or with `in_job` the job's script, uses itself."""
    for name in names:
        if _SHELLS.fullmatch(name):
            raise UserError(f"variable {name}: a shell uses this name itself; remove it from the file")
        if in_job and (name.startswith("SLURM_") or name in _scripts()):
            raise UserError(f"variable {name}: the job's script uses this name itself; remove it from the file")


@functools.cache
def _scripts() -> set[str]:
    text = shipped(TEMPLATE).read_text()
    return set(re.findall(r"(?m)(?:^|[\s;(\"]|\$\{)([A-Za-z_]\w*)[+:]?=", text)) - set(_SHARED)


def quoted(text: str) -> str:
    """Text in double quotes, which read better; by shlex if a shell would expand something in them."""
    return shlex.quote(text) if re.search(r'["$`\\!]', text) else f'"{text}"'
