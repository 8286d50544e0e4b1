"""Test the ledger in a real PostgreSQL: records, full-text search, several processes at once."""

import subprocess
import sys
from dataclasses import replace

import pytest
from ledger_records import check_that_records_come_back

from holdfast.core.errors import LedgerError
from holdfast.core.ledger import Ledger
from holdfast.core.ledger.records import GoodRun, LearnedRule, Memory
from holdfast.testing.postgresql import PrivatePostgreSQL, postgresql_binaries

pytest.importorskip("psycopg")
if postgresql_binaries() is None:
    pytest.skip("no PostgreSQL server is installed", allow_module_level=True)


@pytest.fixture(scope="module")
def running():
    with PrivatePostgreSQL() as running:
        yield running


@pytest.fixture
def server(running):
    """Return the folder of a server's socket."""
    return running.folder


@pytest.fixture
def url(running):
    """Return the URL of a new database for each test."""
    return running.new_database()


@pytest.fixture
def ledger(url):
    with Ledger.open(url) as opened:
        yield opened


def test_records_come_back_as_they_went_in(url, ledger):
    check_that_records_come_back(url, ledger)


def test_words_are_searched_by_the_database(ledger):
    plain = Memory(remembered_at_s=1.0, reason="Unknown", category="Unknown", confidence=0.2)
    said = ("watchdog timeout allreduce", "watchdog", "quorum lost", "timeout timeout allreduce")
    ids = [ledger.add_memory(replace(plain, words=words)) for words in said]
    assert ledger._full_text == "tsvector"
    assert set(ledger.search_memories(["timeout", "allreduce"], 5)) == {ids[0], ids[3]}
    assert ledger.search_memories(["quorum"], 5) == [ids[2]]
    assert ledger.search_memories(["') | x & '", ""], 5) == []
    ledger.set_memory(ids[2], words="other")
    assert ledger.search_memories(["quorum"], 5) == []
    assert ledger.memory(ids[1]).words == "watchdog"


def test_what_was_learned_is_kept_and_withdrawn(ledger):
    rule = LearnedRule(
        rule_id="learned-x",
        kind="rule",
        body={"pattern": "x"},
        author="learned",
        sources=["3"],
        made_at_s=1.0,
    )
    ledger.add_learned_rule(rule)
    assert ledger.learned_rules("rule") == [rule]
    ledger.withdraw_learned_rule("learned-x", at_s=2.0, by="me")
    assert ledger.learned_rules() == []
    run = GoodRun(name="n", fingerprint="f", added_at_s=1.0, lines=[["step", 3]])
    assert ledger.add_good_run(run) == ledger.add_good_run(run)


def test_processes_that_open_a_new_ledger_at_once_all_get_it(url):
    script = f"from holdfast.core.ledger import Ledger; Ledger.open({url!r}).close()"
    processes = [
        subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE) for _ in range(4)
    ]
    failed = [
        error for process in processes if (error := process.communicate()[1]) and process.returncode
    ]
    assert not failed, failed[0].decode()


def test_a_server_that_is_gone_is_one_clear_sentence(server):
    with pytest.raises(LedgerError, match="cannot be opened"):
        Ledger.open(f"postgresql+psycopg://holdfast@/none?host={server}")
    with pytest.raises(LedgerError, match="cannot be opened"):
        Ledger.open("postgresql+psycopg://holdfast:secret@127.0.0.1:1/none")
