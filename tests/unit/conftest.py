"""Fixtures: Megatron's own argument parser, for tests of flags with and without a GPU, and a group of one process."""

import argparse

import pytest
import torch.distributed as dist
from gemm_libraries import cutlass, lib, served, served_cutlass, timed  # noqa: F401 (fixtures)
from slurm_jobs import job, settings  # noqa: F401 (fixtures)

from megatron_fp8 import cpu
from megatron_fp8.flags import config
from megatron_fp8.flags import stock as stock_flags
from megatron_fp8.flags.config import add_fp8_arguments
from megatron_fp8.flags.usage import one_line_usage_errors


@pytest.fixture(scope="module")
def group():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def parser():
    """Megatron's parser with our flags. It raises ValueError instead of exiting."""
    if cpu.needed():
        cpu.install()
    from megatron.training.arguments import add_megatron_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_fp8_arguments(add_megatron_arguments(parser))
    one_line_usage_errors(parser)
    yield parser
    cpu.uninstall()


@pytest.fixture
def parse(parser, monkeypatch):
    def parse(*argv):
        args = parser.parse_args(list(argv))
        args.rank, args.world_size = 0, 1
        return args

    monkeypatch.setattr(stock_flags, "installed", lambda module: False)
    return parse


@pytest.fixture
def everything_installed(parse, monkeypatch):
    for module in (stock_flags, config):
        monkeypatch.setattr(module, "installed", lambda module: True)
