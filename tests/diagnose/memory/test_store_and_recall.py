"""Test the memory in the ledger: search, judgements and learning; good runs; a user's own rules."""

import http.server
import json
import threading
from dataclasses import replace

import pytest

from holdfast.core.errors import BadUse, NotFound
from holdfast.core.ledger import Incident, Ledger, Run
from holdfast.core.ledger.records import Memory
from holdfast.core.paths import ledger_url
from holdfast.diagnose import LogLine, diagnose
from holdfast.diagnose.logs.filters import Filters
from holdfast.diagnose.memory import Known, judge, remember
from holdfast.diagnose.memory.embeddings import Embedder, EmbeddingsFailed, cosine, packed, unpacked
from holdfast.diagnose.memory.good import add_good_run, learn_filters
from holdfast.diagnose.memory.own_rules import faults_of, own_topics, read_topic
from holdfast.diagnose.memory.store import adopt_incidents, kept_of, lines_of, memory_of

STRANGE = "the frobnicator of shard 12 could not be entangled: vortex unavailable"


@pytest.fixture
def ledger(tmp_path):
    with Ledger.open(ledger_url(tmp_path)) as opened:
        yield opened


def memory(**changes):
    plain = Memory(remembered_at_s=1.0, reason="Unknown", category="Unknown", confidence=0.2)
    return replace(plain, **changes)


def add_incident(ledger, text="KeyError: 'x'", reason="KeyError"):
    ledger.add_run(
        Run(
            run_id="r",
            state="failed",
            command=["x"],
            options={},
            cwd="/",
            host="h",
            pid=1,
            started_at_s=1.0,
        )
    )
    line = {"file": "rank-0.log", "line": 3, "text": text}
    diagnosis = {
        "reason": reason, "category": "Script", "root_line": line, "root_lines": [line],
        "evidence": [{**line, "role": "root"}], "scope": {"rank": 0}, "action": "user_must_fix", "confidence": 0.8,
        "decided_by": ["python-key-error"], "fingerprint": "f" * 16,
    }  # fmt: skip
    return ledger.add_incident(
        Incident(
            run_id="r", attempt=1, kind="exit", rank=0, step=1, fault_at_s=2.0, detected_at_s=3.0, diagnosis=diagnosis,
            action="stop", explanation="No restart mends it.",
        )
    )  # fmt: skip


def test_full_text_search_finds_the_best_fit_first(ledger):
    ids = [
        ledger.add_memory(memory(words=words))
        for words in ("alpha beta", "beta", "gamma", "alpha alpha")
    ]
    assert ledger.search_memories(["beta"], 5)[:2] == [ids[1], ids[0]]
    assert set(ledger.search_memories(["alpha", "gamma"], 5)) == {ids[0], ids[2], ids[3]}
    assert ledger.search_memories(['") OR 1=1 --', ""], 5) == []
    ledger.set_memory(ids[2], words="delta")
    assert ledger.search_memories(["gamma"], 5) == []
    assert ledger.search_memories(["delta"], 5) == [ids[2]]


def test_without_fts5_words_are_found_all_the_same(ledger):
    ids = [ledger.add_memory(memory(words=words)) for words in ("alpha beta", "beta", "alphabet")]
    ledger.__dict__["_full_text"] = ""  # as with an SQLite without full-text search
    assert ledger.search_memories(["alpha", "beta"], 5) == [ids[0], ids[1]]


def test_a_runs_incident_is_remembered_once_and_outlives_its_run(ledger):
    incident_id = add_incident(ledger)
    assert adopt_incidents(ledger) == 1
    assert adopt_incidents(ledger) == 0
    known = memory_of(ledger, str(incident_id))
    assert (known.roots, known.done) == (["KeyError: 'x'"], "stop: No restart mends it.")
    ledger.remove_run("r")
    assert ledger.memories() == [known]


def test_a_diagnosis_without_a_run_is_remembered_and_found_again(ledger, tmp_path):
    log = tmp_path / "job.log"
    log.write_text(f"step 1 loss 2\n{STRANGE}\n")
    first = remember(ledger, diagnose(log), f"2: {STRANGE}\n")
    assert first.similar == ()
    judge(ledger, "m1", reason="NetworkError", action="wait_and_retry")
    log.write_text(f"step 1 loss 2\n{STRANGE.replace('12', '99')}\n")
    again = remember(ledger, diagnose(log), f"2: {STRANGE}\n")
    assert again.reason == "NetworkError"
    assert again.action == "wait_and_retry"
    assert [one["id"] for one in again.similar] == ["m1"]
    assert again.similar[0]["confirmed"]
    assert again.similar[0]["similarity"] > 0.99


def test_a_verdict_teaches_and_what_it_taught_can_be_withdrawn(ledger, tmp_path):
    log = tmp_path / "job.log"
    log.write_text(f"step 1 loss 2\n{STRANGE}\n")
    remember(ledger, diagnose(log), f"2: {STRANGE}\n")
    judged = judge(ledger, "m1", reason="NetworkError", by="ann")
    assert judged.learned
    assert (judged.memory.verdict, judged.memory.judged_by) == ("corrected", "ann")
    known = Known.load(ledger_url(tmp_path), tmp_path)
    found = diagnose(log, known=known)
    assert found.reason == "NetworkError"
    assert found.decided_by[0].startswith("learned-networkerror-")
    for one in ledger.learned_rules():
        ledger.withdraw_learned_rule(one.rule_id, at_s=2.0, by="bob")
    assert Known.load(ledger_url(tmp_path)).topics == ()
    judge(ledger, "m1", reason="NetworkError")
    assert not {one.rule.id for one in judged.learned} & {
        one.rule_id for one in ledger.learned_rules()
    }
    with pytest.raises(NotFound, match="no learned rule"):
        ledger.withdraw_learned_rule("learned-nothing", at_s=3.0, by="bob")


@pytest.mark.parametrize(
    ("key", "fields", "says"),
    [
        ("m1", {}, "left Unknown"),
        ("m1", {"reason": "Oops"}, "is not a reason"),
        ("m1", {"reason": "OSError", "action": "pray"}, "is not an action"),
        ("m9", {"reason": "OSError"}, "no incident m9"),
        ("x", {"reason": "OSError"}, "is not an incident"),
    ],
)
def test_a_verdict_that_cannot_be_is_refused(ledger, key, fields, says):
    ledger.add_memory(memory(roots=["x"]))
    with pytest.raises(BadUse, match=says):
        judge(ledger, key, **fields)


def test_a_good_run_teaches_filters_and_takes_back_a_rule_that_calls_it_a_failure(ledger, tmp_path):
    log, good = tmp_path / "job.log", tmp_path / "good.log"
    log.write_text(f"step 1 loss 2\n{STRANGE}\n")
    remember(ledger, diagnose(log), f"2: {STRANGE}\n")
    taught = judge(ledger, "m1", reason="NetworkError").learned
    assert taught
    lines = [f"opened shard {n} of blend corpus-{n} in {n}.2 s" for n in range(20)]
    steps = [f"step {n} loss 2" for n in range(1, 9)]
    said = [STRANGE.replace("12", "3"), *lines, *steps, "Training completed successfully."]
    good.write_text("\n".join(said) + "\n")
    done = add_good_run(ledger, [str(good)])
    assert set(done.withdrawn) == {one.rule.id for one in taught}
    learned = Known.load(ledger_url(tmp_path)).filters
    assert Filters(learned).routine("opened shard 7 of blend corpus-9 in 0.2 s")
    assert add_good_run(ledger, [str(good)]).good_id == done.good_id, (
        "the same lines are recorded once"
    )
    (tmp_path / "empty.log").write_text("")
    with pytest.raises(BadUse, match="no text"):
        add_good_run(ledger, [str(tmp_path / "empty.log")])


def test_a_failed_run_is_not_taken_for_a_good_one(ledger, tmp_path):
    failed = tmp_path / "failed.log"
    failed.write_text("step 1 loss 2\n" * 6 + "Traceback (most recent call last):\nKeyError: 'a'\n")
    with pytest.raises(BadUse, match=r"did not end well: KeyError: .*'a' \(.*failed.log, line 8\)"):
        add_good_run(ledger, [str(failed)])
    assert ledger.good_runs() == []
    assert ledger.learned_rules() == []


def test_no_filter_drops_a_line_that_states_a_root():
    run = [("the broker of shard 3 lost its lease", 9), ("read shard 4 of the corpus well", 9)]
    found = learn_filters([run], ["the broker of shard 77 lost its lease"])
    assert [one.match for one in found] == [("read shard 4 of the corpus well",)]


OWN = """
order: 50
hot: [flux]
defaults: {kind: service, action: restart, restart_helps: true, confidence: 0.9, source: ours}
rules:
  - {id: flux-gone, pattern: 'flux broker gone', reason: NetworkError, mitigation: Start it., match: ["flux broker gone"], no_match: ["flux broker well"]}
"""  # noqa: E501


def test_a_users_own_rules_are_asked_and_their_examples_tried(tmp_path):
    folder = tmp_path / "rules"
    assert own_topics(tmp_path) == ()
    folder.mkdir()
    (folder / "mine.yaml").write_text(OWN)
    known = Known.load(ledger_url(tmp_path), tmp_path)
    log = tmp_path / "job.log"
    log.write_text("flux broker gone\n")
    assert diagnose(log, known=known).decided_by[0] == "flux-gone"
    assert list(faults_of(read_topic(folder / "mine.yaml"))) == []
    (folder / "mine.yaml").write_text(
        OWN.replace('match: ["flux broker gone"]', 'match: ["KeyError: 1", "nothing"]')
    )
    faults = list(faults_of(read_topic(folder / "mine.yaml")))
    assert "takes" in faults[0]
    assert "does not match" in faults[1]
    (folder / "mine.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(BadUse, match="cannot be read"):
        own_topics(tmp_path)


def test_the_lines_of_a_compressed_log_are_read_back(tmp_path):
    log = tmp_path / "job.log"
    log.write_text(
        "step 1 loss 2\nTraceback (most recent call last):\n  File \"t.py\", line 1, in f\nKeyError: 'a'\n"
    )
    kept = kept_of([str(log)])
    assert [one.line for one in kept][-3:] == [2, 3, 4]
    shown = "".join(f"{one}\n" for one in kept)
    assert [one.text.strip() for one in lines_of(f"== {log}\n{shown}")] == [
        one.text.strip() for one in kept
    ]


class _Server(http.server.BaseHTTPRequestHandler):
    answer: object = None
    seen: list = []  # noqa: RUF012

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).seen.append((self.path, self.headers.get("Authorization"), asked))
        body = type(self).answer
        if body is None:
            rows = [
                {"index": i, "embedding": [float(len(t)), 1.0]}
                for i, t in enumerate(asked["input"])
            ]
            body = json.dumps({"data": rows[::-1]}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def endpoint():
    _Server.answer, _Server.seen = None, []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


def test_embeddings_come_over_http_without_secrets_or_values(endpoint):
    embedder = Embedder(url=endpoint, model="m", key="k")
    vectors = embedder.embed(["KeyError: 'secret' at /home/ann/x token=hf_abcdefghijklmnop", "y"])
    assert [round(cosine(one, one), 6) for one in vectors] == [1.0, 1.0]
    path, key, asked = _Server.seen[0]
    assert (path, key, asked["model"]) == ("/v1/embeddings", "Bearer k", "m")
    assert not any(word in asked["input"][0] for word in ("secret", "ann", "hf_abc"))
    assert unpacked(packed([0.5, 0.25])) == [0.5, 0.25]


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"[]",
        b'{"data": 3}',
        b'{"data": [{"index": 0, "embedding": ["x"]}]}',
        b'{"data": [{"index": 0, "embedding": [0, 0]}]}',
        b'{"data": []}',
        b"[" * 9999,
    ],
)
def test_an_answer_that_is_no_vectors_is_an_error_and_words_are_compared(
    endpoint, answer, monkeypatch, tmp_path
):
    _Server.answer = answer
    with pytest.raises(EmbeddingsFailed, match="compared by words"):
        Embedder(url=endpoint, model="m").embed(["x"])


def test_an_endpoint_that_fails_costs_nothing_but_a_note(endpoint, monkeypatch, tmp_path, ledger):
    monkeypatch.setenv("HOLDFAST_EMBEDDINGS_URL", endpoint)
    monkeypatch.setenv("HOLDFAST_EMBEDDINGS_MODEL", "m")
    log = tmp_path / "job.log"
    log.write_text("KeyError: 'a'\n")
    remember(ledger, diagnose(log), "1: KeyError: 'a'\n")
    assert ledger.memories()[0].embedding
    found = diagnose(log, known=Known.of_ledger(ledger))
    assert found.similar[0]["similarity"] == 1.0
    _Server.answer = b"no"
    found = diagnose(log, known=Known.of_ledger(ledger))
    assert found.similar[0]["id"] == "m1"
    assert "embeddings endpoint" in found.notes[-1]


@pytest.mark.parametrize(
    "given",
    [
        {"URL": "ftp://x", "MODEL": "m"},
        {"URL": "http://u:p@h", "MODEL": "m"},
        {"URL": "http://h", "MODEL": ""},
    ],
)
def test_an_endpoint_that_cannot_be_is_refused(given):
    with pytest.raises(BadUse, match="HOLDFAST_EMBEDDINGS"):
        Embedder.from_environment(
            {f"HOLDFAST_EMBEDDINGS_{name}": value for name, value in given.items()}
        )


# Suggestions of a model

LEASE = "lease 0x11 on fabric segment gone; quorum of the segment is void"


def suggestion(**changes):
    plain = {
        "id": "model-1", "pattern": r"lease 0x[0-9a-f]+ on fabric segment gone", "kind": "fabric",
        "reason": "NetworkError", "action": "wait_and_retry", "restart_helps": True, "mitigation": "Ask who runs it.",
        "confidence": 0.5, "source": "proposed by the model stub", "match": [LEASE],
        "no_match": ["lease 0x11 on fabric segment renewed"],
    }  # fmt: skip
    return {**plain, **changes}


def remembered(ledger, tmp_path, rule):
    """Remember an unknown incident with a model's suggestion; return its key and its log."""
    log = tmp_path / "job.log"
    log.write_text(f"step 1 loss 2.0\n{LEASE}\n")
    kept = "1: step 1 loss 2.0\n2: " + LEASE + "\n"
    found = replace(
        diagnose(log), reason="NetworkError", category="Infrastructure", root_text=LEASE
    )
    line = LogLine(file=str(log), line=2, text=LEASE)
    found = replace(found, root_line=line, root_lines=(line,))
    said = remember(ledger, found, kept, suggested=rule)
    (one,) = ledger.memories()
    assert f"incidents confirm m{one.memory_id}" in said.notes[-1]
    return f"m{one.memory_id}", log


def test_a_suggested_rule_is_in_force_only_once_a_person_confirms_its_incident(ledger, tmp_path):
    key, log = remembered(ledger, tmp_path, suggestion())
    again = tmp_path / "again.log"
    again.write_text(log.read_text().replace("0x11", "0x7f"))
    assert diagnose(again, known=Known.of_ledger(ledger)).reason == "Unknown"
    learned = judge(ledger, key).learned
    assert "model-1" in [one.rule.id for one in learned]
    found = diagnose(again, known=Known.of_ledger(ledger).without_memory())
    assert (found.reason, found.action) == ("NetworkError", "wait_and_retry")
    assert [one.author for one in ledger.learned_rules("rule") if one.rule_id == "model-1"] == [
        "model"
    ]
    assert ledger.learned_rules("suggestion") == []


def test_a_suggestion_for_another_reason_than_the_person_says_stays_one(ledger, tmp_path):
    key, _ = remembered(ledger, tmp_path, suggestion(reason="S3StorageError"))
    assert "model-1" not in [one.rule.id for one in judge(ledger, key).learned]
    assert [one.rule_id for one in ledger.learned_rules("suggestion")] == ["model-1"]


def test_a_suggested_rule_that_a_good_run_printed_is_refused(ledger, tmp_path):
    key, log = remembered(ledger, tmp_path, suggestion())
    add_good_run(ledger, [str(log)])
    assert judge(ledger, key).learned == ()
