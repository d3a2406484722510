"""`megatron-fp8 doctor`: each finding from a machine's real output; the verdicts, the exit code, JSON."""

import json
import re
import resource
import tomllib
from pathlib import Path

import pytest
from launch import ROOT

from megatron_fp8.cli import main
from megatron_fp8.tools.doctor import machine, scheduler, software
from megatron_fp8.tools.doctor import main as doctor
from megatron_fp8.tools.doctor.finding import BLOCKING, DEGRADED, GOOD, blocking, degraded, good, output_of

TOPOLOGY = """\
\tGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV18\t{}\tSYS\t0-47\t0
GPU1\tNV18\t X \tNV18\tSYS\t0-47\t0
GPU2\t{}\tNV18\t X \tPIX\t48-95\t1
NIC0\tSYS\tSYS\tPIX\t X

Legend:
  X    = Self
"""
MOUNTS = """\
/dev/sda1 / ext4 rw 0 0
server:/home /home nfs4 rw 0 0
tmpfs /home/me/fast\\040disk tmpfs rw 0 0
lustre@tcp:/x /scratch lustre rw 0 0
"""


def verdicts(findings):
    return [finding.verdict for finding in findings]


def test_here_nothing_blocks_and_a_linear_is_right(monkeypatch, capsys):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)  # inside a job doctor would report hidden GPUs
    assert main(["doctor", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    lines = {line["what"]: line for line in said["lines"]}
    assert said["host"] and said["verdict"] in (GOOD, DEGRADED)
    assert lines["torch"]["verdict"] == lines["megatron-core"]["verdict"] == lines["a linear"]["verdict"] == GOOD
    assert any(what.startswith("GEMM ") and line["verdict"] == GOOD for what, line in lines.items())
    assert not any("could not be checked" in line["found"] for line in said["lines"])
    assert all(line["remedy"] for line in said["lines"] if line["verdict"] != GOOD)


def test_what_blocks_is_an_exit_code(monkeypatch, capsys):
    def breaks():
        raise OSError("no such thing")

    looks = [lambda: [good("one", "fine")], breaks, lambda: [blocking("two", "wrong", "mend it")]]
    monkeypatch.setattr(doctor, "_LOOKS", looks)
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "good      one                 fine",
        "degraded  breaks              could not be checked: OSError: no such thing; please report it",
        "blocking  two                 wrong; mend it",
        "blocking: 1 good, 1 degraded, 1 blocking",
    ]
    monkeypatch.setattr(doctor, "_LOOKS", looks[:2])
    assert main(["doctor", "--bad"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_a_wrong_product_blocks(monkeypatch):
    class Wrong:
        name, devices, fuses = "wrong", ("cpu",), frozenset()

        def product(self, a, b, epilogue, fast_accum):
            y = a.payload.float() @ b.payload.float().T
            y[3, 5] += y.abs().max() * 0.01
            return y

    assert software.product_is_off(Wrong(), "cpu") == pytest.approx(0.01, rel=1e-3)
    monkeypatch.setattr(software, "product_is_off", lambda *_: 0.01)
    assert BLOCKING in verdicts(software.gemms())
    monkeypatch.setattr(software, "linear_errors", lambda device: {"forward": 0.03, "wgrad": 0.2})
    assert verdicts(software.linear()) == [BLOCKING]


def test_versions(monkeypatch):
    found = {"torch": "2.10.0+cu126", "megatron-core": "0.18.1"}
    monkeypatch.setattr(software.metadata, "version", found.__getitem__)
    assert verdicts(software.versions()) == [DEGRADED, BLOCKING]
    for torch in ("2.11.1+cu130", "2.11.0a0+5228986c39.nv26.3", "2.15.0"):
        found |= {"torch": torch, "megatron-core": "0.19.9"}
        assert verdicts(software.versions()) == [GOOD, GOOD]
    found |= {"torch": "2.16.0", "megatron-core": "0.20.0"}
    assert verdicts(software.versions()) == [DEGRADED, BLOCKING]


def test_versions_are_those_that_are_installed():
    """pyproject.toml's range is the doctor's, and takes a container's torch, a pre-release by its name."""
    from packaging.requirements import Requirement

    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    ranges = {Requirement(line).name: Requirement(line).specifier for line in asked}
    for package, (first, last) in software._ACCEPTED.items():
        major, minor = map(int, last.split("."))
        for version in (f"{first}.0", f"{last}.3"):
            assert ranges[package].contains(version)
        assert not ranges[package].contains(f"{major}.{minor + 1}.0")
    assert ranges["torch"].contains("2.11.0a0+5228986c39.nv26.3")


@pytest.mark.parametrize(("name", "verdict"), [("_SplitAlongDim", GOOD), ("SplitAlongDim", DEGRADED)])
def test_transformer_engines_stale_import(monkeypatch, tmp_path, name, verdict):
    import sys

    folder = tmp_path / "transformer_engine/pytorch"
    folder.mkdir(parents=True)
    for path, text in ((folder.parent, ""), (folder, "")):
        (path / "__init__.py").write_text(text)
    (folder / "attention.py").write_text(f"{name} = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(software.metadata, "version", lambda package: "2.20.2")
    for module in ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.attention"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    (finding,) = software.transformer_engine()
    assert finding.verdict == verdict and ("stale" in finding.found) == (verdict == DEGRADED)
    for module in [module for module in sys.modules if module.startswith("transformer_engine")]:
        del sys.modules[module]  # monkeypatch would put it back


@pytest.mark.parametrize(
    ("of_node", "in_a_job", "verdict"),
    [(2, True, BLOCKING), (2, False, DEGRADED), (0, True, DEGRADED)],  # a node's shell, a node without GPUs
)
def test_a_job_that_sees_none_of_its_nodes_gpus_has_not_asked_for_them(
    monkeypatch, tmp_path, of_node, in_a_job, verdict
):
    for number in range(of_node):
        (tmp_path / f"0000:0{number}:00.0").mkdir()
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    if in_a_job:
        monkeypatch.setenv("SLURM_JOB_ID", "7")
    (finding,) = machine.gpus(tmp_path)
    assert finding.verdict == verdict
    assert ("--gpus-per-node 2 --exclusive" in finding.remedy) == (verdict == BLOCKING)


def test_the_documented_command_for_all_nodes_asks_for_the_gpus():
    root = Path(__file__).resolve().parents[2]
    texts = [doctor.__doc__, *((root / "docs" / name).read_text() for name in ("tutorial.md", "launch.md"))]
    for text in texts:
        (command,) = re.findall(r"srun -N .* megatron-fp8 doctor", text)
        assert "--gpus-per-node 8 --exclusive" in command


def test_power():
    lines = "0, 700.00, 700.00, 1980, 345, Not Active\n1, 500.00, 700.00, 1980, 1980, Not Active\n"
    lines += "2, 700.00, 700.00, 1980, 900, Active\n3, [N/A], [N/A], 1980, 345, Not Active\n"
    findings = list(machine.power(lines))
    assert verdicts(findings) == [GOOD, DEGRADED, DEGRADED, GOOD]
    assert findings[1].found == "power limit 500.00 W of 700.00, SM clock 1980 of 1980 MHz"
    assert list(machine.power("")) == []


def test_links():
    (finding,) = machine.links(TOPOLOGY.format("NV18", "NV18"))
    assert (finding.verdict, finding.found) == (GOOD, "between all 3 GPUs (NV18)")
    (finding,) = machine.links(TOPOLOGY.format("PHB", "PHB"))
    assert (finding.verdict, finding.found) == (DEGRADED, "1 of 3 pairs have none: 0-2 PHB")
    assert list(machine.links("")) == []


def test_infiniband(tmp_path, monkeypatch):
    assert list(machine.infiniband(tmp_path)) == []
    for number, state in enumerate(("4: ACTIVE", "4: ACTIVE", "1: DOWN")):
        port = tmp_path / f"mlx5_{number}/ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    (finding,) = machine.infiniband(tmp_path)
    assert (finding.verdict, finding.found) == (DEGRADED, "2 of 3 ports are up (400 Gb/sec (4X NDR))")
    monkeypatch.setattr(machine.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    assert verdicts(machine.infiniband(tmp_path / "none")) == [DEGRADED]


def test_what_carries_a_sum():
    line = "host:1:1 [0] NCCL INFO Channel 0{}/0 : 0[0] -> 1[1] via {}\n"
    finding = machine.transport("NCCL 2.28.9", line.format(0, "P2P/CUMEM") + line.format(1, "P2P/CUMEM"), True)
    assert (finding.verdict, finding.found) == (GOOD, "two GPUs of this node by P2P")
    assert machine.transport("NCCL", line.format(0, "SHM/direct/direct"), True).verdict == DEGRADED
    assert machine.transport("NCCL", line.format(0, "NET/Socket/0"), True).found.endswith("NET/Socket")
    assert machine.transport("NCCL", "ncclSystemError: Error", False).verdict == BLOCKING


def test_shared_memory_and_limits(tmp_path, monkeypatch):
    usage = machine.shutil.disk_usage("/")
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: usage._replace(total=2**26, free=2**26))
    assert verdicts(machine.shared_memory()) == [DEGRADED]
    monkeypatch.undo()
    assert verdicts(machine.shared_memory(str(tmp_path / "none"))) == [DEGRADED]
    unlimited = {resource.RLIMIT_MEMLOCK: (-1, -1), resource.RLIMIT_NOFILE: (1024, 4096)}
    monkeypatch.setattr(machine.resource, "getrlimit", unlimited.get)
    assert verdicts(machine.limits()) == [GOOD, DEGRADED]


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/tmp/x", "ext4"), ("/home/me/.triton", "nfs4"), ("/home/me/fast disk/x", "tmpfs"), ("/scratch/y", "lustre"),
     ("/homes", "ext4")],
)  # fmt: skip
def test_a_paths_file_system(path, kind):
    assert machine.file_system(Path(path), MOUNTS) == kind


def test_tritons_cache(tmp_path):
    shared = f"/dev/sda1 / ext4 rw 0 0\nserver:/x {tmp_path} nfs rw 0 0\n"
    (finding,) = machine.triton_cache(shared, str(tmp_path / "deep/cache"))
    assert finding.verdict == DEGRADED and "is on nfs" in finding.found
    assert verdicts(machine.triton_cache("/dev/sda1 / ext4 rw 0 0", str(tmp_path))) == [GOOD]


def test_slurm():
    config = "KillWait                = {} sec\nPowerPlugin             = \nPreemptMode             = {}\n"
    config += "SlurmctldParameters     = {}\n"
    config += "JobRequeue              = 1\nSLURM_VERSION           = 22.05.8\n"
    assert list(scheduler.slurm("")) == []
    findings = list(scheduler.slurm(config.format(30, "OFF", "(null)")))
    assert verdicts(findings) == [GOOD] * 3 and findings[0].found == "22.05.8"
    assert verdicts(scheduler.slurm(config.format(5, "REQUEUE", "(null)"))) == [GOOD, DEGRADED, DEGRADED]


# As `scontrol --oneliner show partition` of Slurm 22.05 says it; the one of the highest tier preempts the others.
PARTITION = (
    "PartitionName={} AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=NO QoS=N/A "
    "DefaultTime=NONE DisableRootJobs=NO ExclusiveUser=NO GraceTime={} Hidden=NO MaxNodes=UNLIMITED Nodes=n[1-4] "
    "PriorityJobFactor=1 PriorityTier={} RootOnly=NO OverTimeLimit=NONE PreemptMode={} State=UP JobDefaults=(null)\n"
)
HIGH = PARTITION.format("high", 0, 10, "REQUEUE")


@pytest.mark.parametrize(
    ("kind", "said", "verdict", "found"),
    [
        ("partition_prio", HIGH + PARTITION.format("low", 600, 1, "REQUEUE"), GOOD, "first, 600 s before the end"),
        ("partition_prio", HIGH + PARTITION.format("low", 0, 1, "REQUEUE"), DEGRADED, "a GraceTime of 0 s in low"),
        ("partition_prio", HIGH + PARTITION.format("low", 59, 1, "CANCEL"), DEGRADED, "a GraceTime of 59 s in low"),
        ("partition_prio", HIGH + PARTITION.format("safe", 0, 1, "OFF"), GOOD, "the job's own signal is sent first"),
        ("partition_prio", None, DEGRADED, "an unknown GraceTime"),
        ("qos", "high|00:00:00|low,idle\nlow|00:10:00|\nidle|1-00:01:00|\n", GOOD, "600 s before"),
        ("qos", "high|00:00:00|low,idle\nlow|00:10:00|\nidle|00:00:30|\n", DEGRADED, "30 s in idle"),
        ("qos", None, DEGRADED, "an unknown GraceTime"),
    ],
)
def test_a_preempted_job_is_warned_if_it_has_time(monkeypatch, kind, said, verdict, found):
    ask = {"partition_prio": "scontrol", "qos": "sacctmgr"}[kind]
    monkeypatch.setattr(scheduler, "output_of", lambda *command: said if command[0] == ask else "nonsense")
    config = f"PreemptMode = REQUEUE\nPreemptType = preempt/{kind}\nSlurmctldParameters = preempt_send_user_signal\n"
    (finding,) = (finding for finding in scheduler.slurm(config) if finding.what == "preemption")
    assert finding.verdict == verdict and finding.found.startswith("REQUEUE, ") and found in finding.found


def test_a_command_that_is_not_there_says_nothing():
    assert output_of("no-such-command") is None and output_of("false") is None
    assert output_of("sleep", "60", timeout=0.1) is None and output_of("echo", "yes") == "yes\n"


def test_bad_leaves_good_lines_out_of_json_too(monkeypatch, capsys):
    found = [good("this", "fine"), degraded("that", "slow", "mend it")]
    monkeypatch.setattr(doctor, "_LOOKS", (lambda: found,))
    for flags, shown in ((["--json"], ["this", "that"]), (["--json", "--bad"], ["that"])):
        assert main(["doctor", *flags]) == 0
        said = json.loads(capsys.readouterr().out)
        assert [line["what"] for line in said["lines"]] == shown and said["verdict"] == DEGRADED


def test_a_machine_without_torch_says_so_once(monkeypatch, capsys):
    def look(module):
        def absent():
            raise ModuleNotFoundError(f"No module named '{module}'", name=module)
            yield

        return absent

    monkeypatch.setattr(doctor, "_LOOKS", tuple(map(look, ("torch", "torch", "psutil"))))
    main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and "needs the package psutil, which is not installed; install it" in lines[0]


def test_optional_packages_are_one_line(monkeypatch):
    monkeypatch.setattr(software, "installed", lambda module: module in ("rich", "scipy"))
    (found,) = software.optional_packages()
    assert found.found.startswith("installed: rich, scipy; ")
