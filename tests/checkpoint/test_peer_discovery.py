"""Test which node holds which node's snapshot."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as some

from holdfast.checkpoint.distributed.collectives import Ranks
from holdfast.checkpoint.distributed.place import Place, own_place
from holdfast.checkpoint.memory import peer_discovery
from holdfast.checkpoint.memory.peer_discovery import meet, partners
from holdfast.checkpoint.memory.peer_restore import moves, newest_whole
from holdfast.checkpoint.memory.server import SnapshotInfo


def nodes(count, ranks=1, domains=()):
    labels = [*domains, *[""] * count]
    return [Place(f"node-{node}", labels[node]) for node in range(count) for _ in range(ranks)]


def test_by_default_it_is_the_same_rank_half_the_nodes_further():
    assert partners(nodes(2)) == [1, 0]
    assert partners(nodes(4, ranks=2)) == [4, 5, 6, 7, 0, 1, 2, 3]
    assert partners(nodes(3)) == [1, 2, 0]


def test_one_node_has_none():
    assert partners(nodes(1, ranks=3)) == [None] * 3


def test_racks_hold_for_one_another():
    assert partners(nodes(4, domains="AABB")) == [2, 3, 0, 1]
    assert partners(nodes(4, domains="ABBA")) == [1, 0, 3, 2]


def test_a_node_with_fewer_ranks_holds_for_several():
    assert partners([Place("a"), Place("a"), Place("a"), Place("b")]) == [3, 3, 3, 0]


@given(
    some.lists(some.sampled_from(["", "A", "B", "C"]), min_size=2, max_size=12), some.integers(1, 3)
)
def test_pairs_are_of_two_nodes_and_of_two_domains_wherever_that_can_be(labels, ranks):
    places = nodes(len(labels), ranks=ranks, domains=labels)
    found = partners(places)
    assert Counter(found) == dict.fromkeys(range(len(places)), 1)  # each holds for one other
    pairs = [(places[mine], places[holder]) for mine, holder in enumerate(found)]
    assert all(mine.node != holder.node for mine, holder in pairs)
    held_by = {(mine.node, holder.node) for mine, holder in pairs}
    assert len(held_by) == len(labels)
    largest = max((count for label, count in Counter(labels).items() if label), default=1)
    alike = sum(mine.domain != "" and mine.domain == holder.domain for mine, holder in pairs)
    assert alike == ranks * max(0, 2 * largest - len(labels))


def test_a_node_is_what_its_environment_calls_it_or_one_running_kernel(monkeypatch):
    monkeypatch.delenv("HOLDFAST_NODE", raising=False)
    monkeypatch.delenv("HOLDFAST_FAILURE_DOMAIN", raising=False)
    unnamed = own_place()
    assert unnamed == own_place()
    assert (bool(unnamed.node), unnamed.domain) == (True, "")
    monkeypatch.setenv("HOLDFAST_NODE", "n7")
    monkeypatch.setenv("HOLDFAST_FAILURE_DOMAIN", "rack 3")
    assert own_place() == Place("n7", "rack 3")


def told(rank, step, *, world_size=3, save=""):
    return SnapshotInfo(rank, world_size, step, save or f"save-{step}", 10, 10)


def test_the_newest_save_of_which_no_part_is_missing_is_taken():
    has = [
        [told(0, 5), told(1, 5)],
        [told(1, 6), told(2, 5)],
        [told(0, 6), told(2, 6, world_size=4)],
    ]
    assert newest_whole(has, 3) == (5, "save-5")
    assert newest_whole([*has, [told(2, 6)]], 3) == (6, "save-6")
    assert newest_whole([*has, [told(2, 6, save="another")]], 3) == (5, "save-5")
    assert newest_whole([[]], 1) is None


def test_who_lacks_its_part_gets_it_and_those_that_have_it_take_turns():
    on_node = [told(0, 5), told(1, 5), told(2, 5, world_size=3)]
    found = moves([[], [], on_node], (5, "save-5"))
    assert [(move.source, move.target) for move in found] == [(2, 0), (2, 1)]
    pair = [told(rank, 5, world_size=4) for rank in range(4)]
    found = moves([[], [], pair, pair], (5, "save-5"))
    assert [(move.source, move.target, move.info.rank) for move in found] == [(2, 0, 0), (3, 1, 1)]
    assert moves([on_node] * 3, (5, "save-5")) == []


def test_it_listens_where_gloo_does(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none,lo")
    with peer_discovery._listen() as listener:
        assert listener.getsockname()[0] in ("127.0.0.1", "::1")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr("socket.gethostname", lambda: "no-such-host.invalid")
    with peer_discovery._listen() as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def test_what_stands_in_the_way_of_a_peer_is_said_and_ends_nothing(monkeypatch, caplog):
    assert meet(Ranks()) is None
    assert "all ranks are on one node" in caplog.messages[-1]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none")
    assert meet(Ranks()) is None
    assert (
        "A rank has no address to listen on (no such interface). Name an interface"
        in caplog.messages[-1]
    )


def test_a_peer_in_the_same_failure_domain_is_told_of(caplog):
    for domains, count in (("AAB", 1), ("AABB", 0)):
        places = nodes(len(domains), domains=domains)
        caplog.clear()
        peer_discovery._warn_of_poor_pairs(
            [peer_discovery._Offer(place, "", 0, b"") for place in places], partners(places)
        )
        assert len(caplog.messages) == bool(count)
        assert all(
            f"{count} of {len(domains)} ranks have their peer in" in message
            for message in caplog.messages
        )
