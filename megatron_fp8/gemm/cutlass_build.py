"""Builds the CUTLASS GEMMs of csrc/ as a shared library, once, and finds the library in a cache afterwards.

The library has a plain C interface (csrc/abi.h) and contains the CUDA runtime, so it does not depend on the version of
torch or Python. To build it takes nvcc 12.3 or newer and CUTLASS' headers, from the package nvidia-cutlass, but no GPU.
It is kept in $MEGATRON_FP8_CACHE, by default ~/.cache/megatron_fp8. Its name has a hash of sources and flags, and the
versions of nvcc and CUTLASS. Processes that start together build it once. If the cache has a library of these sources,
as on a node that only trains, neither nvcc nor headers are needed. $MEGATRON_FP8_CUTLASS names a library elsewhere.

    megatron-fp8 build [--jobs N]      builds the library if it is missing, and prints its path
"""

import concurrent.futures
import contextlib
import ctypes
import fcntl
import functools
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from ..packages import how_to_install
from .cache import cache_folder

SOURCES = Path(__file__).parent / "csrc"
TARGET = "-gencode=arch=compute_90a,code=sm_90a"  # the only target with wgmma
FLAGS = f"-std=c++17 -O3 -DNDEBUG --expt-relaxed-constexpr {TARGET} -Xcompiler -fPIC,-fvisibility=hidden".split()
LINK = f"-shared -cudart static {TARGET}".split()
STEM = "libmegatron_fp8_cutlass-"
OLDEST_NVCC = (12, 3)
GIB_A_JOB = 3  # peak memory of one nvcc, rounded up


class Unavailable(RuntimeError):
    """There is no library; the text says why, in one line."""


def library(jobs: int | None = None, say: Callable[[str], None] | None = None, build: bool = True) -> Path:
    """The library's path. A missing library is built first, by `jobs` compilers at once (default: all cores).

    say: called with one line before the build and one after. Raises Unavailable if the library cannot be built, or is
    missing and `build` is False.
    """
    if given := os.environ.get("MEGATRON_FP8_CUTLASS"):
        if not os.path.isfile(given):
            raise Unavailable(f"MEGATRON_FP8_CUTLASS={given}: no such file; unset it to build the library")
        return Path(given)
    try:
        cache = cache_folder()
    except OSError as error:
        raise Unavailable(f"{error}; set MEGATRON_FP8_CACHE") from error
    if there := sorted(cache.glob(f"{STEM}{key()}-*.so"), key=os.path.getmtime):
        return there[-1]
    if not build:
        raise Unavailable(f"the CUTLASS GEMMs are not built (none in {cache}); run once: megatron-fp8 build")
    nvcc, nvcc_version = _nvcc()
    include, cutlass_version = _headers()
    built = cache / f"{STEM}{key()}-nvcc{nvcc_version}-cutlass{cutlass_version}.so"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _alone(built.with_suffix(".lock")):
            if not built.is_file():
                began, jobs, count = time.monotonic(), jobs or _jobs(), len(list(SOURCES.glob("*.cu")))
                (say or _say)(f"compiling the CUTLASS GEMMs ({count} files, {jobs} compilers at once); takes minutes")
                _build(built, nvcc, include, jobs)
                made = f"{time.monotonic() - began:.0f} s, nvcc {nvcc_version}, CUTLASS {cutlass_version}"
                (say or _say)(f"built the CUTLASS GEMMs ({made}): {built}")
    except OSError as error:
        reason = f"{cache}: {error.strerror or error}; set MEGATRON_FP8_CACHE to a folder to build in"
        raise Unavailable(reason) from error
    return built


def key() -> str:
    """Hash of sources and flags."""
    digest = hashlib.sha256(repr((FLAGS, LINK)).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(repr((path.name, path.read_bytes())).encode())
    return digest.hexdigest()[:16]


def version(path: Path) -> str:
    """The version in the file name of the library at `path`; or a hash of the file if it has another name."""
    named = re.fullmatch(rf"{STEM}([0-9a-f]{{16}}-nvcc[\d.]+-cutlass[\d.]+)\.so", path.name)
    return named[1] if named else hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _nvcc() -> tuple[str, str]:
    """nvcc's path and version."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    places = [f"{home}/bin/nvcc"] if home else ["nvcc", "/usr/local/cuda/bin/nvcc"]
    found = next(filter(None, map(shutil.which, places)), None)
    if found is None:
        looked = ", ".join(places)
        raise Unavailable(f"no nvcc ({looked}) for the CUTLASS GEMMs; install the CUDA toolkit or set CUDA_HOME")
    printed = subprocess.run([found, "--version"], capture_output=True, text=True).stdout
    match = re.search(r"V((\d+)\.(\d+)\.\d+)", printed)
    if match is None:
        raise Unavailable(f"{found}: --version names no version")
    if (int(match[2]), int(match[3])) < OLDEST_NVCC:
        oldest = ".".join(map(str, OLDEST_NVCC))
        raise Unavailable(f"{found}: version {match[1]}; the CUTLASS GEMMs need {oldest} or newer")
    return found, match[1]


def _headers() -> tuple[Path, str]:
    """The folder of CUTLASS' headers, and their version."""
    spec = importlib.util.find_spec("cutlass_library")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        include = Path(folder) / "source" / "include"
        version = include / "cutlass" / "version.h"
        if version.is_file():
            return include, ".".join(re.findall(r"#define CUTLASS_(?:MAJOR|MINOR|PATCH) (\d+)", version.read_text()))
    raise Unavailable(f"no CUTLASS headers for the CUTLASS GEMMs; {how_to_install('cutlass_library')}")


def _jobs() -> int:
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(len(os.sched_getaffinity(0)), pages // (GIB_A_JOB << 30)))


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Hold the lock file, so that only one process that shares the folder builds at a time."""
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(built: Path, nvcc: str, include: Path, jobs: int) -> None:
    sources = sorted(SOURCES.glob("*.cu"))
    with (
        tempfile.TemporaryDirectory(dir=built.parent) as scratch,
        concurrent.futures.ThreadPoolExecutor(max(1, jobs)) as pool,
    ):
        objects = [f"{scratch}/{source.stem}.o" for source in sources]
        compile_one = functools.partial(_compile, nvcc, include)
        try:
            compiled = {pool.submit(compile_one, *pair) for pair in zip(sources, objects, strict=True)}
            while compiled:
                # Not for ever: a signal that comes just before Python waits for a lock is seen only after the wait.
                done, compiled = concurrent.futures.wait(compiled, timeout=1)
                for one in done:
                    one.result()
        except KeyboardInterrupt:  # otherwise the pool would wait minutes for its compilers
            pool.shutdown(wait=False, cancel_futures=True)
            for compiler in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    compiler.terminate()
            raise
        _run([nvcc, *LINK, *objects, "-o", f"{scratch}/library.so"], "linking")
        os.replace(f"{scratch}/library.so", built)  # atomic


def _compile(nvcc: str, include: Path, source: Path, to: str) -> None:
    _run([nvcc, *FLAGS, "-I", str(include), "-c", str(source), "-o", to], source.name)


def _run(command: list[str], what: str) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        lines = done.stdout.splitlines() or ["it printed nothing"]
        reason = next((line for line in lines if "error" in line or "fatal" in line), lines[-1])
        raise Unavailable(f"nvcc failed ({what}): {reason.strip()[:300]}")


def _say(line: str) -> None:
    print(f"megatron_fp8: {line}", file=sys.stderr, flush=True)


# ---- The library's interface ----------------------------------------------------------------------

ABI = 2  # MFP8_ABI of csrc/abi.h
OK, UNKNOWN, UNFIT, FAILED = range(4)


class Args(ctypes.Structure):
    """mfp8_args."""

    _fields_ = [(name, ctypes.c_void_p) for name in "a b scale_a scale_b c d bias stream".split()] + [
        (name, ctypes.c_int32) for name in "m n k device swizzle raster".split()
    ]


class GroupedArgs(ctypes.Structure):
    """mfp8_grouped_args."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in "a b scale_a scale_b first expert d stream".split()),
        *((name, ctypes.c_int64) for name in "step_b step_d".split()),
        *((name, ctypes.c_int32) for name in "m n k experts accumulate device".split()),
    ]


class Info(ctypes.Structure):
    """mfp8_info."""

    _fields_ = [
        (name, ctypes.c_int32)
        for name in "a b d promote tile_m tile_n cluster_m cluster_n pingpong stages shared_bytes".split()
    ]


def load(path: Path) -> ctypes.CDLL:
    """Load the library at `path`. Raises Unavailable if it is not one of ours, or has another version of abi.h."""
    try:
        loaded = ctypes.CDLL(str(path))
        abi = loaded.mfp8_abi()
    except (OSError, AttributeError) as error:
        raise Unavailable(f"{path}: not a library of these GEMMs ({error})") from error
    if abi != ABI:
        raise Unavailable(f"{path}: built for version {abi} of csrc/abi.h, not {ABI}; build it again")
    loaded.mfp8_gemm.argtypes = [ctypes.c_int, ctypes.POINTER(Args)]
    loaded.mfp8_describe.argtypes = [ctypes.c_int, ctypes.POINTER(Info)]
    loaded.mfp8_grouped_gemm.argtypes = [ctypes.c_int, ctypes.POINTER(GroupedArgs)]
    loaded.mfp8_grouped_describe.argtypes = [ctypes.c_int, ctypes.POINTER(Info), ctypes.POINTER(ctypes.c_int32)]
    return loaded
