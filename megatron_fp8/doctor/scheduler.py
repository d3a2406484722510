"""Slurm, where it is: whether a job of scripts/slurm is warned before it is stopped, and comes back."""

import re
from collections.abc import Iterator

from .finding import Finding, degraded, good, output_of

_SECONDS = 30  # Slurm's default for KillWait


def slurm(text: str | None = None) -> Iterator[Finding]:
    """What `scontrol show config` says; nothing where there is no Slurm."""
    text = output_of("scontrol", "show", "config") if text is None else text
    if not text:
        return
    given = dict(re.findall(r"^(\w+)\s*=\s*(.*?)\s*$", text, re.M))
    yield good("Slurm", given.get("SLURM_VERSION", "of an unknown version"))
    wait = re.match(r"\d+", given.get("KillWait", ""))
    found = f"{wait[0]} s" if wait else "unknown"
    if wait and int(wait[0]) < _SECONDS:
        remedy = "a plain scontrol requeue kills that soon: it goes back to the last save (--save-interval)"
        yield degraded("KillWait", found, remedy)
    else:
        yield good("KillWait", f"{found} from SIGTERM to SIGKILL, at a plain scontrol requeue")
    mode = given.get("PreemptMode", "OFF")
    parameters = f"{given.get('SlurmctldParameters', '')},{given.get('PreemptParameters', '')}"
    if mode.upper() in ("OFF", "(NULL)"):
        yield good("preemption", "off")
    elif "send_user_signal" in parameters:
        yield good("preemption", f"{mode}, and the job's own signal is sent first")
    else:
        found = f"{mode}, without preempt_send_user_signal"
        remedy = "a preempted job is not warned: a short --save-interval, or ask for it in SlurmctldParameters"
        yield degraded("preemption", found, remedy)
    if given.get("JobRequeue") == "0":
        yield good("requeue", "off by default; scripts/slurm asks for it (--requeue)")
