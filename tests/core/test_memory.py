"""Test the memory that a process may still take, in recorded and in real control groups."""

import sys
from pathlib import Path

import pytest

from holdfast.core.memory import available_memory_bytes

GIB = 1 << 30
MIB = 1 << 20
UNLIMITED_V1 = 2**63 - 4096

V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "35 31 0:32 / /sys/fs/cgroup/memory rw,nosuid,relatime shared:17 - cgroup cgroup rw,memory\n"
OTHERS = (
    "22 27 0:21 / /proc rw,relatime - proc proc rw\n"
    "36 31 0:33 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:18 - cgroup cgroup rw,cpu,cpuacct\n"
)


class Tree:
    """A recorded tree of control groups."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "proc/self").mkdir(parents=True)
        self.mounted(OTHERS)

    def mounted(self, text):
        with (self.root / "proc/self/mountinfo").open("a") as file:
            file.write(text)

    def process_is_in(self, text):
        (self.root / "proc/self/cgroup").write_text(text)

    def v2(self, folder, *, limit="max", used=0, high="max", cache=0):
        self._write(
            folder,
            {
                "memory.max": limit,
                "memory.high": high,
                "memory.current": used,
                "memory.stat": f"anon 1\ninactive_file {cache}\nactive_file 0",
            },
        )

    def v1(self, folder, *, limit=UNLIMITED_V1, used=0, cache=0, hierarchical=UNLIMITED_V1):
        stat = f"cache 1\nactive_file 1\nhierarchical_memory_limit {hierarchical}\ntotal_active_file {cache}"
        self._write(
            folder,
            {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": used, "memory.stat": stat},
        )

    def _write(self, folder, files):
        group = self.root / folder.lstrip("/")
        group.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (group / name).write_text(f"{content}\n")

    @property
    def left_bytes(self):
        return available_memory_bytes(self.root)


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path)


def test_without_a_limit_the_node_counts(tree):
    of_node = tree.left_bytes  # the tree lacks even /proc/self/cgroup
    assert of_node > MIB
    tree.mounted(V2 + V1)
    tree.process_is_in("4:memory:/a\n0::/a\n")
    tree.v2("/sys/fs/cgroup/a")
    tree.v1("/sys/fs/cgroup/memory/a", used=GIB)
    assert tree.left_bytes > MIB


def test_the_cache_of_files_is_given_up_and_a_group_over_its_limit_has_nothing_left(tree):
    tree.mounted(V2)
    tree.process_is_in("0::/a\n")
    tree.v2("/sys/fs/cgroup/a", limit=5000, used=3000, cache=77)
    assert tree.left_bytes == 2077
    tree.v2("/sys/fs/cgroup/a", limit=5000, used=9000)
    assert tree.left_bytes == 0


def test_memory_high_is_a_limit_too(tree):
    tree.mounted(V2)
    tree.process_is_in("0::/a\n")
    tree.v2("/sys/fs/cgroup/a", limit=5000, high=4000, used=3000)
    assert tree.left_bytes == 1000
    tree.v2("/sys/fs/cgroup/a", high=4500, used=3000)
    assert tree.left_bytes == 1500


SLURM = ("slurm", "uid_0", "job_1", "step_0", "task_0")


@pytest.mark.parametrize("limited", range(len(SLURM)))
def test_any_group_of_a_slurm_job_of_version_1(tree, limited):
    tree.mounted(V1)
    tree.process_is_in(
        "5:memory:/slurm/uid_0/job_1/step_0/task_0\n4:cpu,cpuacct:/slurm/uid_0\n0::/\n"
    )
    for depth in range(len(SLURM)):
        limit = 5 * MIB if depth == limited else UNLIMITED_V1
        tree.v1(
            "/".join(("/sys/fs/cgroup/memory", *SLURM[: depth + 1])),
            limit=limit,
            used=2 * MIB,
            cache=MIB,
        )
    assert tree.left_bytes == 4 * MIB


def test_the_tightest_group_counts_by_what_it_has_left_not_by_its_limit(tree):
    tree.mounted(V2)
    job = "/system.slice/slurmstepd.scope/job_1"
    tree.process_is_in(f"0::{job}/step_0/user/task_0\n")
    group = f"/sys/fs/cgroup{job}"
    tree.v2(group, limit=64 * MIB, used=63 * MIB)  # siblings have taken the memory
    tree.v2(f"{group}/step_0", limit=32 * MIB, used=10 * MIB)
    tree.v2(f"{group}/step_0/user", used=10 * MIB)
    (tree.root / f"{group[1:]}/step_0/user/task_0").mkdir()  # without the memory controller
    assert tree.left_bytes == MIB


def test_a_pod_as_the_node_sees_it(tree):
    tree.mounted(V2)
    pod = "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1.slice"
    tree.process_is_in(f"0::{pod}/cri-containerd-ab.scope\n")
    tree.v2("/sys/fs/cgroup/kubepods.slice", limit=64 * MIB, used=40 * MIB)
    tree.v2("/sys/fs/cgroup/kubepods.slice/kubepods-burstable.slice", used=30 * MIB)
    tree.v2(f"/sys/fs/cgroup{pod}", limit=16 * MIB, used=10 * MIB)
    tree.v2(f"/sys/fs/cgroup{pod}/cri-containerd-ab.scope", limit=8 * MIB, used=MIB)
    assert tree.left_bytes == 6 * MIB


def test_a_container_sees_its_own_group_as_the_root(tree):
    tree.mounted(V2)
    tree.process_is_in("0::/\n")
    tree.v2("/sys/fs/cgroup", limit=8 * MIB, used=MIB)
    assert tree.left_bytes == 7 * MIB


def test_a_group_that_a_container_has_made_in_its_own(tree):
    tree.mounted(V2)
    tree.process_is_in("0::/jobs/one\n")
    tree.v2("/sys/fs/cgroup", limit=8 * MIB, used=2 * MIB)
    tree.v2("/sys/fs/cgroup/jobs", limit=7 * MIB, used=2 * MIB)
    tree.v2("/sys/fs/cgroup/jobs/one")
    assert tree.left_bytes == 5 * MIB


CONTAINER = "/kubepods/burstable/pod1/ab"


def test_a_container_of_version_1_mounts_its_group_alone(tree):
    """The group's path is the node's, and only a statistic states the pod's limit."""
    tree.mounted(
        f"35 31 0:32 {CONTAINER} /sys/fs/cgroup/memory ro,relatime - cgroup cgroup rw,memory\n"
    )
    tree.process_is_in(f"5:memory:{CONTAINER}\n")
    tree.v1("/sys/fs/cgroup/memory", limit=8 * MIB, used=MIB, hierarchical=8 * MIB)
    assert tree.left_bytes == 7 * MIB
    tree.v1("/sys/fs/cgroup/memory", used=MIB, hierarchical=3 * MIB)
    assert tree.left_bytes == 2 * MIB
    tree.process_is_in(f"5:memory:{CONTAINER}/one\n")
    tree.v1("/sys/fs/cgroup/memory/one", limit=2 * MIB, used=MIB)
    assert tree.left_bytes == MIB


def test_of_a_mount_of_another_group_nothing_counts(tree):
    for mounted in (f"{CONTAINER}/below", "/kubepods/burstable/pod2"):
        tree.mounted(f"35 31 0:32 {mounted} /mnt{mounted} rw,relatime - cgroup cgroup rw,memory\n")
        tree.v1(f"/mnt{mounted}", limit=4096, used=0, hierarchical=4096)
    tree.process_is_in(f"5:memory:{CONTAINER}\n")
    assert tree.left_bytes > MIB


def test_a_mount_of_the_whole_tree_in_a_namespace_counts_by_its_top_alone(tree):
    tree.mounted("30 23 0:26 /../.. /host/cgroup rw,relatime - cgroup2 cgroup2 rw\n" + V2)
    tree.process_is_in("0::/one\n")
    tree.v2("/host/cgroup", limit=8 * MIB, used=MIB)
    tree.v2("/host/cgroup/one", limit=4096)  # some other group of this name
    tree.v2("/sys/fs/cgroup/one", limit=9 * MIB, used=MIB)
    assert tree.left_bytes == 7 * MIB


def test_a_process_outside_of_the_root_of_its_namespace_is_not_limited_by_that(tree):
    tree.mounted(V2)
    tree.process_is_in("0::/../other\n")
    tree.v2("/sys/fs/cgroup", limit=4096)
    tree.v2("/sys/fs/other", limit=4096)
    assert tree.left_bytes > MIB


def test_both_versions_at_once(tree):
    """In a hybrid system, either version may control the memory."""
    tree.mounted(
        V1 + "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime shared:9 - cgroup2 cgroup2 rw\n"
    )
    tree.process_is_in("9:name=systemd:/user.slice\n4:memory:/a/b\n0::/user.slice\n")
    (tree.root / "sys/fs/cgroup/unified/user.slice").mkdir(parents=True)
    tree.v1("/sys/fs/cgroup/memory/a", limit=8 * MIB, used=MIB)
    assert tree.left_bytes == 7 * MIB
    tree.v2("/sys/fs/cgroup/unified/user.slice", limit=3 * MIB, used=MIB)
    assert tree.left_bytes == 2 * MIB


def test_names_that_the_table_of_mounts_escapes(tree):
    """Systemd writes a hyphen as `\\x2d`; the table of mounts writes a backslash in octal."""
    own = "/system.slice/my\\x2djob: 1.scope"
    mounted = own.replace("\\", "\\134").replace(" ", "\\040")
    tree.mounted(f"35 31 0:32 {mounted} /my\\040groups rw - cgroup2 cgroup2 rw\n")
    tree.process_is_in(f"0::{own}/in\n")
    tree.v2("/my groups", limit=8 * MIB, used=MIB)
    assert tree.left_bytes == 7 * MIB


def test_a_mount_that_hides_another_counts(tree):
    tree.mounted(V2 + V2.replace("0:26 / ", "0:26 /a "))
    tree.process_is_in("0::/a/b\n")
    tree.v2("/sys/fs/cgroup/b", limit=8 * MIB, used=MIB)
    tree.v2("/sys/fs/cgroup/a", limit=4096)
    assert tree.left_bytes == 7 * MIB


def test_a_process_that_is_moved_and_limits_that_change(tree):
    tree.mounted(V2)
    for name, limit in {"a": 8, "b": 4}.items():
        tree.v2(f"/sys/fs/cgroup/{name}", limit=limit * MIB, used=MIB)
    tree.process_is_in("0::/a\n")
    assert tree.left_bytes == 7 * MIB
    tree.process_is_in("0::/b\n")
    assert tree.left_bytes == 3 * MIB
    tree.v2("/sys/fs/cgroup/b", limit=2 * MIB, used=MIB)
    assert tree.left_bytes == MIB


def test_a_group_that_was_removed_and_one_that_tells_only_its_limit(tree):
    tree.mounted(V2)
    tree.process_is_in("0::/a/b (deleted)\n")
    tree._write("/sys/fs/cgroup/a", {"memory.max": 8 * MIB, "memory.current": MIB})
    assert tree.left_bytes == 7 * MIB


LEFT = "from holdfast.core.memory import available_memory_bytes as left; print(left())"


def test_a_process_in_really_nested_groups(limited_group):
    """The limit is set two groups above the process."""
    limited = limited_group(256 * MIB)
    found = limited.run([sys.executable, "-c", LEFT])
    assert found.returncode == 0, found.stderr
    assert 128 * MIB < int(found.stdout) <= 256 * MIB
