"""Facts about the machine, also inside a container."""

from __future__ import annotations

import json
from types import SimpleNamespace

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


def written(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{text}\n")


def version_2(group, limit, used, cached=0):
    names = {"memory.max": limit, "memory.current": used, "memory.stat": f"anon 7\ninactive_file {cached}"}
    return {f"{group}/{name}": value for name, value in names.items()}


def version_1(group, limit, used, cached=0):
    names = ("limit_in_bytes", limit), ("usage_in_bytes", used), ("stat", f"cache 7\ntotal_inactive_file {cached}")
    return {f"memory/{group}/memory.{name}": value for name, value in names}


@pytest.mark.parametrize(
    ("files", "own", "expected"),
    [
        (version_2(".", 2000, 500), "0::/", (2000, 1500)),
        (version_2(".", 2000, 1900, cached=1000), "0::/", (2000, 1100)),
        (version_2(".", "max", 500), "0::/", None),
        (version_2("a/b", 2000, 500), "0::/a/b", (2000, 1500)),
        (version_2("a", 4000, 3900) | version_2("a/b", 2000, 500), "0::/a/b", (2000, 100)),
        (version_2("other", 2000, 500), "0::/a", None),
        (version_1(".", 2000, 500), "", (2000, 1500)),
        (version_1("a/b", 2000, 1900, cached=1000), "7:cpu:/x\n4:memory:/a/b\n0::/", (2000, 1100)),
        ({"memory.max": 2000, "memory.current": 500}, "", (2000, 1500)),
        ({}, "", None),
    ],
)
def test_a_containers_memory_is_read_from_both_versions_of_cgroups(tmp_path, files, own, expected):
    written(tmp_path, {**files, "own": own})
    assert hardware.memory_limit(tmp_path, tmp_path / "own") == expected


def test_small_container_on_a_large_host_counts_as_small(monkeypatch):
    monkeypatch.setattr(hardware, "memory_limit", lambda: (10**9, 6 * 10**8))
    assert psutil.virtual_memory().total > 10**9
    assert hardware.memory() == hardware.Memory(10**9, 6 * 10**8)


def test_a_limit_above_the_hosts_memory_is_none(monkeypatch):
    monkeypatch.setattr(hardware, "memory_limit", lambda: (2**63 - 4096, 2**62))
    assert hardware.memory().total == psutil.virtual_memory().total


def test_a_gpu_that_another_process_has_to_itself_is_described_without_its_free_memory(monkeypatch):
    def refuse():
        raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable")

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.mem_get_info", refuse)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: SimpleNamespace(total_memory=80))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "H100")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    assert hardware.gpu() == hardware.Gpu("H100", (9, 0), 80, 0)


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
    written(tmp_path, {**files, "own": own})
    assert hardware.cpu_quota(tmp_path, tmp_path / "own") == processors


@pytest.mark.parametrize(("quota", "usable"), [(None, 4), (0.5, 1), (1.0, 1), (1.5, 2), (64.0, 4)])
def test_half_a_processor_is_one_and_more_than_there_are_is_all(monkeypatch, quota, usable):
    monkeypatch.setattr(hardware, "cpu_quota", lambda: quota)
    monkeypatch.setattr(hardware.os, "sched_getaffinity", lambda pid: {0, 2, 4, 6}, raising=False)
    assert hardware.usable_processors() == hardware.cpu().usable_cores == usable
