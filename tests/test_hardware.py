"""Facts about the machine, also inside a container."""

from __future__ import annotations

import json

import psutil
import pytest

from minillm import hardware


def test_cpu_has_cores_and_a_name():
    chip = hardware.cpu()
    assert chip.name
    assert chip.usable_cores >= 1
    assert set(chip.simd) <= set(hardware.SIMD)


def test_description_is_plain_json():
    assert json.loads(json.dumps(hardware.describe()))["memory_bytes"] == hardware.memory().total


def test_gpu_architecture_is_spelt_as_compilers_spell_it():
    assert hardware.Gpu("H100", (9, 0), 1, 1).architecture == "sm_90"


@pytest.mark.parametrize(
    ("limit", "used"),
    [("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")],
)
def test_container_limit_is_read_from_both_versions_of_cgroups(tmp_path, limit, used):
    for name, value in ((limit, 2 * 10**9), (used, 5 * 10**8)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{value}\n")
    assert hardware._cgroup_memory(tmp_path) == (2 * 10**9, 5 * 10**8)


def test_container_without_limit_has_the_memory_of_its_host(tmp_path):
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert hardware._cgroup_memory(tmp_path) == (None, 0)


def test_small_container_on_a_large_host_counts_as_small(monkeypatch):
    monkeypatch.setattr(hardware, "_cgroup_memory", lambda: (10**9, 4 * 10**8))
    assert psutil.virtual_memory().total > 10**9
    assert hardware.memory() == hardware.Memory(10**9, 6 * 10**8)


@pytest.mark.parametrize(
    ("files", "own", "processors"),
    [
        ({"cpu.max": "50000 100000"}, "0::/", 0.5),
        ({"cpu.max": "max 100000"}, "0::/", None),
        ({"cpu.max": "max 100000", "a/cpu.max": "150000 100000", "a/b/cpu.max": "300000 100000"}, "0::/a/b", 1.5),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, "1:cpu:/", None),
        ({"cpu/a/cpu.cfs_quota_us": "50000", "cpu/a/cpu.cfs_period_us": "100000"}, "3:memory:/\n1:cpu:/a\n0::/", 0.5),
        ({"cpu,cpuacct/cpu.cfs_quota_us": "200000", "cpu,cpuacct/cpu.cfs_period_us": "100000"}, "", 2.0),
        ({}, "", None),
    ],
)
def test_a_containers_share_of_time_is_read_from_both_versions_of_cgroups(tmp_path, files, own, processors):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    groups = tmp_path / "own"
    groups.write_text(f"{own}\n")
    assert hardware.cpu_quota(tmp_path, groups) == processors


@pytest.mark.parametrize(("quota", "usable"), [(None, 4), (0.5, 1), (1.0, 1), (1.5, 2), (64.0, 4)])
def test_half_a_processor_is_one_and_more_than_there_are_is_all(monkeypatch, quota, usable):
    monkeypatch.setattr(hardware, "cpu_quota", lambda: quota)
    monkeypatch.setattr(hardware.os, "sched_getaffinity", lambda pid: {0, 2, 4, 6}, raising=False)
    assert hardware.usable_processors() == hardware.cpu().usable_cores == usable
