"""Test learning from confirmed incidents: rules as general as all other knowledge allows."""

from holdfast.diagnose import diagnose
from holdfast.diagnose.explain.compress import Kept
from holdfast.diagnose.memory import Case, Known, learn
from holdfast.diagnose.memory.candidates import candidates
from holdfast.diagnose.memory.gate import Gate
from holdfast.diagnose.memory.topics import Layered, Learned, learned_topics, shielded
from holdfast.diagnose.rules.packaged import packaged_rules, packaged_topics
from holdfast.diagnose.rules.rules import RuleSet, Topic


def without(*reasons):
    """Return the packaged rules without the rules for some reasons."""
    topics = [
        Topic(
            name=t.name,
            order=t.order,
            hot=t.hot,
            rules=tuple(r for r in t.rules if r.reason not in reasons),
        )
        if any(rule.reason in reasons for rule in t.rules)
        else t
        for t in packaged_topics()
    ]
    return RuleSet(topic for topic in topics if topic.rules)


def case(reason, *roots, key="1", lines=None):
    kept = tuple(
        Kept(file="job.log", line=at, text=text) for at, text in enumerate(lines or roots, 1)
    )
    return Case(key=key, reason=reason, roots=roots, lines=kept)


def said(rules, line):
    found = rules.find(line, "library_exception")
    return None if found is None else found[0].reason


NO_INDEX = without("IndexError", "ImportError")
NO_LOADER = without("DataloaderKilled")
NO_S3 = without("S3StorageError")


def test_an_exception_is_learned_by_its_class_and_pythons_classes_below_it():
    learned = learn([case("IndexError", "IndexError: list index out of range")], NO_INDEX)
    rules = Layered(NO_INDEX, learned)
    assert (
        said(rules, "IndexError: Dimension out of range (expected [-2, 1], but got 2)")
        == "IndexError"
    )
    assert said(rules, "zoo.BatchIndexError: 4") == "IndexError"
    learned = learn(
        [case("ImportError", "ModuleNotFoundError: No module named 'flash_attn'")], NO_INDEX
    )
    assert (
        said(Layered(NO_INDEX, learned), "ImportError: cannot import name 'AdamW' from 'x'")
        == "ImportError"
    )


def test_a_bare_class_of_another_reason_is_learned_by_its_message():
    root = "RuntimeError: DataLoader worker (pid 7) exited unexpectedly with exit code 9."
    learned = learn([case("DataloaderKilled", root)], NO_LOADER)
    rules = Layered(NO_LOADER, learned)
    killed = "RuntimeError: DataLoader worker (pid 950) is killed by signal: Killed."
    assert said(rules, killed) == "DataloaderKilled"
    assert said(rules, "RuntimeError: mat1 and mat2 shapes cannot be multiplied") == "RuntimeError"
    assert {one.rule.kind for one in learned} == {"worker_lost"}
    assert all(one.sources == ("1",) for one in learned)


def test_an_exception_of_a_package_is_learned_by_the_package():
    learned = learn(
        [case("S3StorageError", "botocore.exceptions.NoCredentialsError: Unable to locate")], NO_S3
    )
    assert (
        said(Layered(NO_S3, learned), "botocore.errorfactory.NoSuchKey: An error occurred")
        == "S3StorageError"
    )


UNKNOWN_MODEL = """Traceback (most recent call last):
  File "/venv/lib/python3.11/site-packages/transformers/auto.py", line 8, in f
    raise KeyError(key)
KeyError: 'llama9'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/job/train.py", line 3, in <module>
    load()
ValueError: The checkpoint you are trying to load has model type `llama9` but Transformers does not recognize it.
"""


def test_a_class_by_itself_is_learned_and_stands_back_where_words_say_more():
    lines = UNKNOWN_MODEL.splitlines()
    model = case("ModelLoadingError", lines[-1], key="1", lines=lines)
    bare = [
        case("KeyError", f"KeyError: '{name}'", key=name)
        for name in ("labels", "scheduler", "RANK")
    ]
    base = without("KeyError", "ModelLoadingError")
    rules = Layered(base, learn([model, *bare], base))
    assert said(rules, "KeyError: 'optimizer'") == "KeyError"
    assert model.replay(rules).reason == "ModelLoadingError"


PEER_LOST = (
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
    "RuntimeError: the pipeline was told to end",
)


def test_a_class_that_would_spoil_an_incident_counts_only_where_nothing_else_is_seen():
    base = without("RuntimeError")
    judged = case("NCCLRemoteError", PEER_LOST[0], key="1", lines=PEER_LOST)
    shapes = case(
        "RuntimeError", "RuntimeError: mat1 and mat2 shapes cannot be multiplied", key="2"
    )
    assert judged.replay(base).reason == "NCCLRemoteError"
    rules = Layered(base, learn([judged, shapes], base))
    assert judged.replay(rules).reason == "NCCLRemoteError"
    assert (
        said(rules, "RuntimeError: Trying to backward through the graph a second time")
        == "RuntimeError"
    )


def test_nothing_is_learned_where_the_rules_say_so_already():
    assert learn([case("KeyError", "KeyError: 'labels'")], packaged_rules()) == []


def test_several_incidents_give_what_they_have_in_common():
    roots = [
        "the quorum lease of shard 3 was lost",
        "quorum lease expired at 4711",
        "no quorum lease: cannot go on",
    ]
    cases = [case("NetworkError", root, key=str(at)) for at, root in enumerate(roots)]
    learned = learn(cases, packaged_rules())
    widest = max(learned, key=lambda one: len(one.sources))
    assert widest.sources == ("0", "1", "2")
    assert "quorum" in widest.rule.pattern
    assert widest.rule.confidence == 0.8, "the rule of succession: 4 of 5"


def test_no_candidate_may_spoil_another_incident():
    root = "the flux broker failed: lease gone"
    mine = case("NetworkError", root, key="1")
    other = case("OSError", "the flux broker failed: disk gone", key="2")
    learned = learn([mine, other], packaged_rules())
    rules = Layered(packaged_rules(), learned)
    assert (said(rules, root), said(rules, other.roots[0])) == ("NetworkError", "OSError")


def test_no_rule_knows_a_line_of_a_good_run():
    root = "the flux broker lost its lease"
    good = ["the flux broker lost nothing so far"]
    learned = learn([case("NetworkError", root)], packaged_rules(), good)
    rules = Layered(packaged_rules(), learned)
    assert said(rules, root) == "NetworkError"
    assert said(rules, good[0]) != "NetworkError"


def test_a_withdrawn_rule_is_not_learned_again():
    cases = [case("IndexError", "IndexError: list index out of range")]
    first = learn(cases, NO_INDEX)
    again = learn(cases, NO_INDEX, withdrawn=[one.rule.id for one in first])
    assert not {one.rule.id for one in first} & {one.rule.id for one in again}


def test_a_correction_wins_over_the_packaged_rule_that_was_wrong():
    root = "PermissionError: [Errno 13] Permission denied: '/mnt/lustre/quota/exceeded'"
    assert said(packaged_rules(), root) == "PermissionError"
    learned = learn([case("OSError", root)], packaged_rules())
    rules = Layered(packaged_rules(), learned)
    if learned:  # the rule may use only words that no packaged example has
        assert said(rules, root) == "OSError"
    assert (
        said(rules, "PermissionError: [Errno 13] Permission denied: 'blend.json'")
        == "PermissionError"
    )


def test_every_candidate_matches_its_line_has_a_hot_word_of_it_and_is_re2():
    for topic in packaged_topics():
        for rule in topic.rules[:1]:
            root = rule.match[0]
            for one in candidates(root, rule.reason):
                assert any(word in root.lower() for word in one.hot), (one, root)


def test_what_merely_sounds_bad_is_passed_by():
    learned = learn([case("DataloaderKilled", "ERROR: DataLoader worker died")], NO_LOADER)
    assert learned
    assert all(shielded(one.rule, "errors: 0") for one in learned)
    assert (
        said(Layered(NO_LOADER, learned), "[INFO] DataLoader worker died and was restarted")
        != "DataloaderKilled"
    )


def test_a_learned_rule_survives_the_way_through_the_ledger():
    one = learn([case("IndexError", "IndexError: x")], NO_INDEX)[0]
    assert Learned.from_json(one.to_json(), one.sources) == one


def test_layered_rules_answer_as_a_rule_set_of_both_does():
    learned = learn([case("IndexError", "IndexError: x")], NO_INDEX)
    whole, layered = (
        RuleSet((*NO_INDEX.topics, *learned_topics(learned))),
        Layered(NO_INDEX, learned),
    )
    for rule in packaged_rules().rules:
        line = rule.match[0]
        assert (whole.find(line) or (None,))[0] == (layered.find(line) or (None,))[0]
        assert bool(whole.hot.search(line.encode())) == bool(layered.hot.search(line.encode()))


def test_the_gate_says_why():
    gate = Gate(packaged_rules(), [], ["Loaded shard 3 of the corpus"])
    made = learn([case("IndexError", "IndexError: x")], NO_INDEX)[0]
    assert "knows" in gate.refusal(made) or not gate.refusal(made)
    assert gate.foreign(made) >= 0


def test_memory_decides_where_rules_leave_the_case_open(tmp_path):
    log = tmp_path / "job.log"
    log.write_text(
        "step 1 loss 2.0\nthe frobnicator of shard 12 could not be entangled: vortex unavailable\n"
    )
    assert diagnose(log).reason == "Unknown"
    past = case(
        "NetworkError",
        "the frobnicator of shard 7 could not be entangled: vortex unavailable",
        key="m4",
    )
    known = Known.of([], [past])
    found = diagnose(log, known=known)
    assert (found.reason, found.decided_by[0]) == ("NetworkError", "memory:m4")
    assert found.confidence <= 0.6
    assert found.similar[0]["id"] == "m4"
    assert "frobnicator" in found.similar[0]["shared"]
    log.write_text("step 1 loss 2.0\nKeyError: 'frobnicator'\n")
    assert diagnose(log, known=known).reason == "KeyError", "a rule's word counts more"
