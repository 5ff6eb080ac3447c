"""How much memory there is."""

from __future__ import annotations

from pathlib import Path

from curvlens.memory import cgroup_rooms


def test_limits_of_containers(tmp_path: Path) -> None:
    def group(folder: Path, limit: str, used: int, cached: int, names: tuple[str, str, str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / names[0]).write_text(limit)
        (folder / names[1]).write_text(str(used))
        (folder / "memory.stat").write_text(f"cache 5\n{names[2]} {cached}\n")

    new = ("memory.max", "memory.current", "inactive_file")
    group(tmp_path / "jobs" / "mine", "max\n", 10, 1, new)
    group(tmp_path / "jobs", "1000\n", 300, 50, new)
    assert cgroup_rooms(tmp_path, "0::/jobs/mine\n") == [750]
    assert cgroup_rooms(tmp_path, "0::/not/here\n") == []
    old = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    group(tmp_path / "memory", "500", 100, 0, old)
    group(tmp_path / "memory" / "box", "400", 500, 0, old)
    assert sorted(cgroup_rooms(tmp_path, "5:cpu,memory:/box\n3:pids:/box\n")) == [0, 400]
    assert cgroup_rooms(tmp_path, "") == []
