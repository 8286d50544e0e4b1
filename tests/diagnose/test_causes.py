"""Test the graph of causes: each kind is used, each edge has an end, and costs are ordered."""

from importlib import resources

import pytest
import yaml

from holdfast.diagnose.rules.causes import kinds
from holdfast.diagnose.rules.packaged import packaged_rules
from holdfast.diagnose.rules.rules import ENDING, ROUTINE

GIVEN = yaml.safe_load(
    (resources.files("holdfast.diagnose.rules") / "causes.yaml").read_text("utf-8")
)
KINDS = kinds()


def test_every_rule_has_a_kind_that_exists():
    assert {rule.kind for rule in packaged_rules().rules} <= {*KINDS, ROUTINE, ENDING}


def test_every_kind_is_used_by_a_rule():
    assert set(KINDS) - {rule.kind for rule in packaged_rules().rules} == set()


def test_every_edge_leads_from_a_kind_to_a_kind():
    assert set(GIVEN["brings"]) == set(KINDS)
    for kind in KINDS.values():
        assert set(kind.brings) <= set(KINDS), kind.name
        assert {where for where, _ in kind.brings.values()} <= {"same", "other", "any"}, kind.name


def test_no_key_stands_there_twice():
    """Test for duplicate keys, of which YAML silently keeps the last."""

    class Strict(yaml.SafeLoader):
        pass

    def mapping(loader, node):
        keys = [key.value for key, _ in node.value if key.value != "<<"]
        twice = [key for key in keys if keys.count(key) > 1]
        assert not twice, twice
        loader.flatten_mapping(node)
        return dict(loader.construct_pairs(node))

    Strict.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    text = (resources.files("holdfast.diagnose.rules") / "causes.yaml").read_text("utf-8")
    yaml.load(text, Loader=Strict)


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_costs_are_costs(kind):
    assert kind.alone > 0
    assert kind.left >= 0
    assert kind.ends > 0
    assert all(cost > 0 for _, cost in kind.brings.values())


HARDWARE = ["gpu_memory", "gpu_link", "gpu_lost", "node", "host_memory"]
CONSEQUENCES = ["collective_timeout", "peer_lost", "store_lost", "exit", "teardown"]


@pytest.mark.parametrize("cause", HARDWARE)
@pytest.mark.parametrize("effect", CONSEQUENCES)
def test_broken_hardware_begins_a_failure_more_readily_than_what_follows_from_it(cause, effect):
    assert KINDS[cause].alone < KINDS[effect].alone


@pytest.mark.parametrize(
    "cause", [name for name in KINDS if name not in ("teardown", "suspect", "exit")]
)
def test_whatever_begins_a_failure_can_bring_about_the_teardown(cause):
    assert "teardown" in KINDS[cause].brings


@pytest.mark.parametrize("effect", CONSEQUENCES)
def test_a_consequence_does_not_break_hardware(effect):
    assert not set(KINDS[effect].brings) & set(HARDWARE)


@pytest.mark.parametrize(
    "cause", ["exception", "death", "crash", "device_memory", "worker_lost", "service", "disk"]
)
def test_what_ends_one_rank_is_felt_by_the_others(cause):
    for effect in ("peer_lost", "collective_timeout"):
        assert KINDS[cause].brings[effect][0] in ("other", "any")
