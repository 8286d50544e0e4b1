from holdfast.core.memory import available_memory_bytes


def test_a_group_that_allows_less_than_the_node_has_counts(tmp_path):
    of_node = available_memory_bytes(tmp_path)
    assert of_node > 1 << 20
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("3000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 70\nactive_file 7\n")
    assert available_memory_bytes(tmp_path) == 2077
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory_bytes(tmp_path) > 1 << 20


def test_a_group_of_version_1_and_one_that_is_over_its_limit(tmp_path):
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("4096")
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text("8192")
    (tmp_path / "memory" / "memory.stat").write_text("total_inactive_file 96\n")
    assert available_memory_bytes(tmp_path) == 0
