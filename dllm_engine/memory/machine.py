"""The main memory that processes here may take: the machine's, or a container's if that is less."""

from dataclasses import dataclass
from pathlib import Path

import psutil

_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class MachineMemory:
    """In bytes."""

    total: int
    available: int
    """Not held now, or held only to save reading a file again."""


def machine_memory(cgroups: Path = _CGROUPS, own_cgroup: Path = Path("/proc/self/cgroup")) -> MachineMemory:
    """``cgroups`` is where the system shows its control groups, and ``own_cgroup`` says which is this process's."""
    machine = psutil.virtual_memory()
    total, available = int(machine.total), int(machine.available)
    for folder in _limiting_folders(cgroups, own_cgroup):
        limit, held = _number(folder, "memory.max", "memory.limit_in_bytes"), 0
        if limit is None or limit >= total:
            continue
        held = _number(folder, "memory.current", "memory.usage_in_bytes") or 0
        total, available = limit, min(available, limit - held + _file_cache(folder))
    return MachineMemory(total, max(available, 0))


def _limiting_folders(cgroups: Path, own_cgroup: Path) -> list[Path]:
    """Folders of this process's group and those around it: each may have a limit. Version 1 has a tree for memory."""
    folders = []
    lines = own_cgroup.read_text(encoding="utf-8").splitlines() if own_cgroup.is_file() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            root = cgroups / controllers
            own = root / path.strip("/")
            # In a container, the path may be the host's, and what is shown is the container's own.
            folders += [folder for folder in (own, *own.parents) if folder == root or root in folder.parents]
    return [folder for folder in dict.fromkeys(folders) if folder.is_dir()]


def _number(folder: Path, *files: str) -> int | None:
    """What the first of these files that is there says; None where it says no number."""
    for file in files:
        if (folder / file).is_file():
            text = (folder / file).read_text(encoding="utf-8").strip()
            return int(text) if text.isdecimal() else None
    return None


def _file_cache(folder: Path) -> int:
    """Bytes of files that the group holds and would give back."""
    file = folder / "memory.stat"
    if not file.is_file():
        return 0
    counts = dict(line.split() for line in file.read_text(encoding="utf-8").splitlines())
    return int(counts.get("active_file", 0)) + int(counts.get("inactive_file", 0))
