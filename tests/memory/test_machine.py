"""The memory of a container is its limit, less what is held; files that are held count as available."""

import psutil
import pytest

from dllm_engine.memory.machine import MachineMemory, machine_memory

MIB = 1 << 20
STAT = f"anon 5\nactive_file {2 * MIB}\ninactive_file {MIB}\n"
LIMITED = {"memory.max": f"{100 * MIB}\n", "memory.current": f"{60 * MIB}\n", "memory.stat": STAT}
LIMITED_V1 = {"memory.limit_in_bytes": f"{100 * MIB}", "memory.usage_in_bytes": f"{60 * MIB}", "memory.stat": STAT}
UNLIMITED = {"memory.max": "max\n", "memory.current": f"{60 * MIB}\n"}


@pytest.mark.parametrize(
    ("groups", "own", "is_limited"),
    [
        ({"": LIMITED}, "0::/", True),
        ({"": UNLIMITED, "user/app": LIMITED}, "0::/user/app", True),
        ({"": UNLIMITED, "user": LIMITED, "user/app": UNLIMITED}, "0::/user/app", True),
        ({"": LIMITED}, "0::/../of/the/host", True),
        ({"memory": LIMITED_V1}, "7:memory:/docker/123\n3:cpu:/", True),
        ({"": UNLIMITED, "other": LIMITED}, "0::/", False),
        ({"": {"memory.max": str(1 << 62)}}, "0::/", False),
        ({}, "", False),
    ],
)
def test_the_limit_of_a_group_and_of_those_around_it(tmp_path, groups, own, is_limited):
    for name, files in groups.items():
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            (tmp_path / name / file).write_text(text)
    (tmp_path / "own").write_text(own)
    found = machine_memory(tmp_path, tmp_path / "own")
    if is_limited:
        assert found == MachineMemory(100 * MIB, 43 * MIB)
    else:
        assert found.total == psutil.virtual_memory().total
        assert 0 < found.available <= found.total
