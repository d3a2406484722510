"""Checks of Slurm: whether it warns a job of scripts/slurm before it stops it, and requeues it."""

import re
from collections.abc import Iterator

from .finding import Finding, degraded, good, output_of

_SECONDS = 30  # Slurm's default for KillWait
_GRACE = 60  # seconds that a run needs to end its step and save


def slurm(text: str | None = None) -> Iterator[Finding]:
    """Findings from `scontrol show config`; none without Slurm."""
    text = output_of("scontrol", "show", "config") if text is None else text
    if not text:
        return
    given = dict(re.findall(r"^(\w+) *= *(.*?) *$", text, re.M))  # a value may be empty: PowerPlugin
    yield good("Slurm", given.get("SLURM_VERSION", "of an unknown version"))
    wait = re.match(r"\d+", given.get("KillWait", ""))
    found = f"{wait[0]} s" if wait else "unknown"
    if wait and int(wait[0]) < _SECONDS:
        remedy = "a plain scontrol requeue kills the job so soon that it loses its steps since the last --save-interval"
        yield degraded("KillWait", found, remedy)
    else:
        yield good("KillWait", f"{found} from SIGTERM to SIGKILL in a plain scontrol requeue")
    mode = given.get("PreemptMode", "OFF")
    parameters = f"{given.get('SlurmctldParameters', '')},{given.get('PreemptParameters', '')}"
    if mode.upper() in ("OFF", "(NULL)"):
        yield good("preemption", "off")
    elif "send_user_signal" in parameters:
        yield _warned(mode, _of_qos() if given.get("PreemptType") == "preempt/qos" else _of_partitions())
    else:
        found = f"{mode}, without preempt_send_user_signal"
        remedy = "a preempted job is not warned: use a short --save-interval, or ask for it in SlurmctldParameters"
        yield degraded("preemption", found, remedy)
    if given.get("JobRequeue") == "0":
        yield good("requeue", "off by default; scripts/slurm asks for it (--requeue)")


def _warned(mode: str, graces: dict[str, int] | None) -> Finding:
    """Whether the job's own signal comes in time: with a GraceTime of 0 it comes together with SIGTERM."""
    if graces is None:
        remedy = "ask your administrator: with 0 a preempted job is not warned and needs a short --save-interval"
        return degraded("preemption", f"{mode}, with an unknown GraceTime", remedy)
    short = sorted(name for name, seconds in graces.items() if seconds < _GRACE)
    if short:
        found = f"{mode}, with a GraceTime of {', '.join(f'{graces[name]} s in {name}' for name in short[:4])}"
        remedy = "a preempted job has no time to save: use a short --save-interval, or ask for a GraceTime of minutes"
        return degraded("preemption", found, remedy)
    found = f"{mode}, the job's own signal is sent first"
    return good("preemption", f"{found}, {min(graces.values())} s before the end or more" if graces else found)


def _of_partitions() -> dict[str, int] | None:
    """{partition: seconds of GraceTime} of the partitions whose jobs can be preempted; None: unknown."""
    text = output_of("scontrol", "--oneliner", "show", "partition")
    found = [dict(re.findall(r"(\w+)=(\S+)", line)) for line in (text or "").splitlines() if line]
    highest = max((int(of["PriorityTier"]) for of in found), default=0)  # its jobs are never preempted
    stopped = [of for of in found if of["PreemptMode"] in ("REQUEUE", "CANCEL") and int(of["PriorityTier"]) < highest]
    return {of["PartitionName"]: int(of["GraceTime"]) for of in stopped} if found else None


def _of_qos() -> dict[str, int] | None:
    """{QOS: seconds of GraceTime} of each QOS that another may preempt; for PreemptType preempt/qos."""
    text = output_of("sacctmgr", "-nP", "show", "qos", "format=name,gracetime,preempt")
    found = [line.split("|") for line in (text or "").splitlines() if line]
    stopped = {name for *_, names in found for name in names.split(",")}
    return {name: _seconds(grace) for name, grace, _ in found if name in stopped} if found else None


def _seconds(text: str) -> int:
    """The seconds in Slurm's [days-]hours:minutes:seconds."""
    days, _, clock = text.rpartition("-")
    hours, minutes, seconds = map(int, clock.split(":"))
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
