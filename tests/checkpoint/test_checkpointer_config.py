import inspect
from dataclasses import FrozenInstanceError, fields

import pytest

from holdfast.checkpoint import Checkpointer, CheckpointerConfig, Retention
from holdfast.core.errors import BadUse

OPTIONS = {
    "every": 1,
    "keep": 3,
    "on_failure": "retry",
    "attest": True,
    "when_busy": "wait",
    "timeout_s": 600.0,
    "max_write_mib_s": None,
    "max_memory_gib": None,
    "max_device_memory_gib": None,
    "sigterm_grace_s": None,
    "keep_in_memory_s": 600.0,
    "peer_memory": False,
    "push_to": None,
    "keep_pushed": None,
    "read_only": False,
    "replicas": "spread",
    "process_group": None,
    "run": None,
    "fresh": False,
}


def test_the_options_and_their_defaults_stay():
    assert {field.name: field.default for field in fields(CheckpointerConfig)} == OPTIONS


def test_the_signature_of_checkpointer_is_the_fields():
    (itself, folder, *options) = inspect.signature(Checkpointer.__init__).parameters.values()
    assert (itself.name, folder.name) == ("self", "dir")
    assert folder.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert {option.kind for option in options} == {inspect.Parameter.KEYWORD_ONLY}
    assert [option.name for option in options] == [
        field.name for field in fields(CheckpointerConfig)
    ]
    assert {option.name: option.default for option in options} == OPTIONS
    types = {option.name: option.annotation for option in options}
    assert types == {field.name: field.type for field in fields(CheckpointerConfig)}


def test_every_option_reaches_the_config(tmp_path):
    given = {
        "every": 7,
        "keep": 2,
        "on_failure": "warn",
        "attest": False,
        "when_busy": "skip",
        "timeout_s": 60.0,
        "max_write_mib_s": 1.5,
        "max_memory_gib": 2.5,
        "max_device_memory_gib": 0,
        "sigterm_grace_s": 9.0,
        "keep_in_memory_s": 5.0,
        "peer_memory": True,
        "push_to": f"file://{tmp_path}/storage",
        "keep_pushed": 4,
        "replicas": "rank0",
        "run": "a run",
        "fresh": True,
    }
    (tmp_path / "storage").mkdir()
    with Checkpointer(tmp_path / "folder", **given) as ckpt:
        assert ckpt._config == CheckpointerConfig(**given)
    with Checkpointer(tmp_path / "folder", read_only=True) as ckpt:
        assert ckpt._config == CheckpointerConfig(read_only=True)


def test_the_config_is_frozen_and_counts_in_bytes():
    config = CheckpointerConfig(
        keep=2, max_write_mib_s=1.5, max_memory_gib=2, max_device_memory_gib=0
    )
    with pytest.raises(FrozenInstanceError):
        config.keep = 3
    assert config.retention == Retention(last=2)
    assert CheckpointerConfig(keep=None).retention == Retention()
    assert config.max_write_bytes_s == 1.5 * 2**20
    assert (config.max_memory_bytes, config.max_device_bytes) == (2 * 2**30, 0)
    assert CheckpointerConfig(keep_in_memory_s=None).keep_s == 0.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every is 0"),
        ({"keep": 0}, "keep is 0"),
        ({"on_failure": "ignore"}, "on_failure is 'ignore'"),
        ({"replicas": "all"}, "replicas is 'all'"),
        ({"when_busy": "drop"}, "when_busy is 'drop'"),
        ({"timeout_s": 0}, "timeout_s is 0"),
        ({"max_write_mib_s": 0}, "max_write_mib_s is 0"),
        ({"max_memory_gib": -1}, "max_memory_gib is -1"),
        ({"max_device_memory_gib": -1}, "max_device_memory_gib is -1"),
        ({"sigterm_grace_s": 0}, "sigterm_grace_s is 0"),
        ({"keep_in_memory_s": 0}, "keep_in_memory_s is 0"),
        ({"peer_memory": True, "keep_in_memory_s": None}, "peer_memory needs keep_in_memory_s"),
        ({"keep_pushed": 0}, "keep_pushed is 0"),
        ({"read_only": True, "push_to": "s3://bucket/run"}, "read_only and push_to exclude"),
        ({"run": ""}, "run is ''"),
        ({"read_only": True, "fresh": True}, "read_only and fresh exclude"),
    ],
)
def test_a_value_that_is_not_allowed_is_named(options, message):
    with pytest.raises(BadUse, match=message):
        CheckpointerConfig(**options)
