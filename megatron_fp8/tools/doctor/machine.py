"""Checks of a node: GPUs, power, NVLink, InfiniBand, NCCL's transport, shared memory, limits, NUMA, Triton's cache."""

import os
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from .finding import Finding, blocking, degraded, good, output_of

_SHARED = {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "glusterfs", "afs", "wekafs", "9p"}
_LEAST_SHM = 2**30
_FP8 = (8, 9)
# Two processes all-reduce a tensor; NCCL logs the transport.
_SUM = """
import os, sys, torch, torch.distributed as dist
rank = int(sys.argv[1])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", init_method=sys.argv[2], rank=rank, world_size=2)
x = torch.full((1 << 20,), rank + 1.0, device="cuda")
dist.all_reduce(x)
assert x.min().item() == x.max().item() == 3.0
dist.destroy_process_group()
"""


def gpus(driver: Path = Path("/proc/driver/nvidia/gpus")) -> Iterator[Finding]:
    """GPUs with FP8 tensor cores. If Slurm constrains devices, a job that did not ask for GPUs sees none."""
    import torch

    if not torch.cuda.is_available():
        there = len(list(driver.glob("*")))
        if there and "SLURM_JOB_ID" in os.environ:
            remedy = f"ask Slurm for them, --gpus-per-node {there} --exclusive; if you have, see nvidia-smi"
            yield blocking("GPU", f"this job sees none of the node's {there}", remedy)
        else:
            found = "none: a run trains on the CPU, for trials"
            yield degraded("GPU", found, "nothing on a laptop or login node; else see nvidia-smi")
        return
    for index in range(torch.cuda.device_count()):
        of = torch.cuda.get_device_properties(index)
        free, total = (round(size / 1e9, 1) for size in torch.cuda.mem_get_info(index))
        found = f"{of.name}, compute capability {of.major}.{of.minor}, {free} of {total} GB free"
        if (of.major, of.minor) < _FP8:
            yield blocking(f"GPU {index}", found, "no FP8 tensor cores, which start at 8.9: --fp8-level O0")
        elif free < total * 0.9:
            yield degraded(f"GPU {index}", found, "another process holds the rest: nvidia-smi")
        else:
            yield good(f"GPU {index}", found)


def power(text: str | None = None) -> Iterator[Finding]:
    """Power limits below the board's default, and clocks slowed by hardware. text: nvidia-smi's CSV."""
    fields = "index,power.limit,power.default_limit,clocks.max.sm,clocks.sm,clocks_event_reasons.hw_slowdown"
    text = output_of("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits") if text is None else text
    for line in (text or "").splitlines():
        index, limit, default, most, now, slowed = (part.strip() for part in line.split(","))
        found = f"power limit {limit} W of {default}, SM clock {now} of {most} MHz"
        what = f"power {index}"
        if slowed == "Active":
            yield degraded(what, f"{found}, slowed by hardware", "cooling or power: nvidia-smi -q -d PERFORMANCE")
        elif _number(limit) < _number(default) * 0.99:
            yield degraded(what, found, "GEMMs are slower: nvidia-smi -pl, or your administrator")
        else:
            yield good(what, found)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:  # [N/A]
        return 0.0


def links(text: str | None = None) -> Iterator[Finding]:
    """NVLink between all GPUs. text: of `nvidia-smi topo -m`."""
    text = output_of("nvidia-smi", "topo", "-m") if text is None else text
    plain = re.sub(r"\x1b\[[\d;]*m", "", text or "")
    rows = [line.split() for line in plain.splitlines() if re.match(r"\s*GPU\d+\s", line)]
    rows = [row for row in rows if len(row) > 1 and not row[1].startswith("GPU")]  # without the header
    if len(rows) < 2:
        return
    pairs = [(i, j, rows[i][1 + j]) for i in range(len(rows)) for j in range(len(rows)) if i != j]
    without = [f"{i}-{j} {kind}" for i, j, kind in pairs if not kind.startswith("NV") and i < j]
    if without:
        found = f"{len(without)} of {len(pairs) // 2} pairs have none: {', '.join(without[:4])}"
        yield degraded("NVLink", found, "tensor parallelism goes over PCIe: keep --tensor-model-parallel-size small")
    else:
        yield good("NVLink", f"between all {len(rows)} GPUs ({pairs[0][2]})")


def infiniband(root: Path = Path("/sys/class/infiniband")) -> Iterator[Finding]:
    """InfiniBand ports that are up; no finding if there is neither a port nor a GPU."""
    ports = sorted(root.glob("*/ports/*"))
    up = [port for port in ports if "ACTIVE" in _text(port / "state")]
    if up:
        rates = ", ".join(sorted({_text(port / "rate") for port in up}))
        found = f"{len(up)} of {len(ports)} ports are up ({rates})"
        if len(up) == len(ports):
            yield good("InfiniBand", found)
        else:
            yield degraded("InfiniBand", found, "see ibstat; leave out unused ports with NCCL_IB_HCA")
    elif ports:
        yield degraded("InfiniBand", "no port is up", "between nodes NCCL falls back to TCP: see ibstat")
    elif shutil.which("nvidia-smi"):
        yield degraded("InfiniBand", "none", "between nodes NCCL uses TCP, several times slower: stay in one node")


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def nccl() -> Iterator[Finding]:
    """The transport of an all-reduce over two GPUs."""
    import torch

    if not torch.cuda.is_available() or torch.cuda.device_count() < 2:
        return
    what = f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    environment = {**os.environ, "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,P2P,SHM,NET"}
    environment.pop("NCCL_DEBUG_FILE", None)
    ranks = [
        subprocess.Popen([sys.executable, "-c", _SUM, str(rank), address], env=environment, stdout=subprocess.PIPE,
                         stderr=subprocess.STDOUT, text=True)
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = "".join(rank.communicate(timeout=120)[0] for rank in ranks)
    except subprocess.TimeoutExpired:
        yield blocking(what, "an all-reduce of two GPUs hangs", "NCCL_DEBUG=INFO shows where; try NCCL_P2P_DISABLE=1")
        return
    finally:
        for rank in ranks:
            rank.kill()
    yield transport(what, said, all(rank.returncode == 0 for rank in ranks))


def transport(what: str, said: str, passed: bool) -> Finding:
    """The finding from NCCL's log of an all-reduce."""
    if not passed:
        lines = [line for line in said.splitlines() if "Error" in line or "WARN" in line]
        cause = lines[-1][:120] if lines else "without a message"
        return blocking(what, f"an all-reduce of two GPUs fails: {cause}", "NCCL_DEBUG=INFO shows more")
    by = sorted(set(re.findall(r"via (P2P|SHM|NET/\w+)", said)))
    found = f"two GPUs of this node by {', '.join(by) or 'an unnamed transport'}"
    if by and by != ["P2P"]:
        return degraded(what, found, "no direct access between GPUs: see NCCL_P2P_LEVEL, ACS, the container")
    return good(what, found)


def shared_memory(path: str = "/dev/shm") -> Iterator[Finding]:
    """Shared memory for NCCL and for data loaders' workers."""
    try:
        size = shutil.disk_usage(path)
    except OSError:
        yield degraded(path, "does not exist", "data loaders' workers need it: --num-workers 0")
        return
    found = f"{size.free / 1e9:.1f} of {size.total / 1e9:.1f} GB free"
    if size.free < _LEAST_SHM:
        yield degraded(path, found, "in a container: docker run --ipc=host, or --shm-size=16g")
    else:
        yield good(path, found)


def limits() -> Iterator[Finding]:
    """Limits of locked memory, which InfiniBand needs, and of open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        yield good("memlock", "unlimited")
    elif Path("/sys/class/infiniband").exists():
        found = f"{soft / 2**20:.0f} MiB"
        yield degraded("memlock", found, "InfiniBand locks buffers: ulimit -l unlimited, in Slurm's slurmd too")
    else:
        yield good("memlock", f"{soft / 2**20:.0f} MiB, enough without InfiniBand")
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < 4096:
        yield degraded("open files", str(files), "many ranks and checkpoint files need more: ulimit -n 65536")


def numa() -> Iterator[Finding]:
    """NUMA nodes, and numactl to bind processes to them."""
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1
    cores = len(os.sched_getaffinity(0))
    if nodes == 1 or shutil.which("numactl"):
        yield good("NUMA", f"{nodes} {'nodes' if nodes > 1 else 'node'}, {cores} processors for this process")
    else:
        found = f"{nodes} nodes, {cores} processors for this process, and no numactl"
        yield degraded("NUMA", found, "install numactl: with it scripts/slurm binds each task near its GPU")


def triton_cache(mounts: str | None = None, folder: str | None = None) -> Iterator[Finding]:
    """Triton's cache: on this node's own disk, and writable."""
    given = folder or os.environ.get("TRITON_CACHE_DIR") or os.path.expanduser("~/.triton/cache")
    path = Path(given).absolute()
    kind = file_system(path, _text(Path("/proc/mounts")) if mounts is None else mounts)
    there = next(parent for parent in (path, *path.parents) if parent.exists())
    if not os.access(there, os.W_OK):
        yield blocking("Triton's cache", f"{path} cannot be written", "set TRITON_CACHE_DIR to a folder of this node")
    elif kind in _SHARED or kind.startswith("fuse."):
        found = f"{path} is on {kind}"
        remedy = "all ranks compile there at once: set TRITON_CACHE_DIR to a folder on the node that only you can enter"
        yield degraded("Triton's cache", found, remedy)
    else:
        yield good("Triton's cache", f"{path} ({kind or 'unknown file system'})")


def file_system(path: Path, mounts: str) -> str:
    """The type of the file system of a path. mounts: the text of /proc/mounts."""
    best, kind = -1, ""
    for line in mounts.splitlines():
        _, place, found, *_ = line.split()
        place = re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), place)
        if (path == Path(place) or Path(place) in path.parents) and len(place) >= best:
            best, kind = len(place), found
    return kind
