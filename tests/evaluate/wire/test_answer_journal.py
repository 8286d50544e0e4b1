"""Check that committed records are found after any damage to process or file."""

import os
import random
import signal
import subprocess
import sys
import textwrap

import pytest

from holdfast.evaluate.wire.answer_journal import Journal, JournalError


def key(number):
    return number.to_bytes(16, "little")


def test_a_body_is_found_under_its_key_and_under_no_other(tmp_path):
    journal = Journal(tmp_path, "weights A")
    journal.commit([(key(1), b"one"), (key(2), b"")])
    assert journal.get(key(1)) == b"one"
    assert journal.get(key(2)) == b""
    assert journal.get(key(3)) is None
    assert key(1) in journal
    assert key(3) not in journal
    assert len(journal) == 2
    journal.close()


def test_what_was_committed_is_there_for_the_next_process(tmp_path):
    first = Journal(tmp_path, "weights A")
    first.commit([(key(1), b"one")])
    second = Journal(tmp_path, "weights A")
    second.commit([(key(2), b"two")])
    first.commit([(key(3), b"three")])  # both write: each a segment of its own
    first.close()
    second.close()
    third = Journal(tmp_path, "weights A")
    assert [third.get(key(number)) for number in (1, 2, 3)] == [b"one", b"two", b"three"]
    third.close()


def test_another_identity_finds_nothing(tmp_path):
    first = Journal(tmp_path, "weights A")
    first.commit([(key(1), b"one")])
    first.close()
    other = Journal(tmp_path, "weights B")
    assert other.get(key(1)) is None
    other.close()


def test_a_segment_put_into_another_journals_folder_is_not_read(tmp_path):
    first, other = Journal(tmp_path, "weights A"), Journal(tmp_path, "weights B")
    first.commit([(key(1), b"one")])
    [segment] = first.folder.iterdir()
    (other.folder / segment.name).write_bytes(segment.read_bytes())
    again = Journal(tmp_path, "weights B")
    assert again.get(key(1)) is None
    for journal in (first, other, again):
        journal.close()


def test_the_first_body_of_a_key_stays(tmp_path):
    journal = Journal(tmp_path, "weights A")
    journal.commit([(key(1), b"first")])
    journal.commit([(key(1), b"second")])
    assert journal.get(key(1)) == b"first"
    journal.close()


def test_a_torn_last_record_is_left_out_at_every_length(tmp_path):
    journal = Journal(tmp_path, "weights A")
    journal.commit([(key(1), b"whole")])
    [segment] = journal.folder.iterdir()
    whole = segment.stat().st_size
    journal.commit([(key(2), b"torn" * 10)])
    journal.close()
    content = segment.read_bytes()
    for size in range(whole, len(content)):
        segment.write_bytes(content[:size])
        again = Journal(tmp_path, "weights A")
        assert again.get(key(1)) == b"whole"
        assert again.get(key(2)) is None
        again.close()


def test_a_flipped_bit_loses_at_most_what_it_hit_and_never_answers_wrongly(tmp_path):
    journal = Journal(tmp_path, "weights A")
    bodies = {key(number): bytes([number]) * (number + 5) for number in range(20)}
    journal.commit(bodies.items())
    journal.close()
    [segment] = journal.folder.iterdir()
    content = segment.read_bytes()
    chance = random.Random(0)
    for _ in range(300):
        bit = chance.randrange(len(content) * 8)
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        segment.write_bytes(bytes(flipped))
        again = Journal(tmp_path, "weights A")
        found = {one: again.get(one) for one in bodies if one in again}
        again.close()
        assert all(found[one] == bodies[one] for one in found)
    assert len(found) >= 0


def test_a_flip_in_a_body_keeps_the_records_after_it(tmp_path):
    journal = Journal(tmp_path, "weights A")
    journal.commit([(key(1), b"x" * 100), (key(2), b"two")])
    journal.close()
    [segment] = journal.folder.iterdir()
    content = bytearray(segment.read_bytes())
    content[content.index(b"x" * 50)] ^= 1
    segment.write_bytes(bytes(content))
    again = Journal(tmp_path, "weights A")
    assert again.get(key(1)) is None
    assert again.get(key(2)) == b"two"
    again.close()


def test_a_record_changed_under_a_reader_is_refused(tmp_path):
    journal = Journal(tmp_path, "weights A")
    journal.commit([(key(1), b"x" * 100)])
    reader = Journal(tmp_path, "weights A")
    [segment] = journal.folder.iterdir()
    content = bytearray(segment.read_bytes())
    content[-1] ^= 1
    segment.write_bytes(bytes(content))
    with pytest.raises(JournalError, match="changed after it was written"):
        reader.get(key(1))
    reader.close()
    journal.close()


@pytest.mark.parametrize("small_disk", ["64k"], indirect=True)
def test_a_full_disk_is_said_and_what_was_committed_stays(small_disk):
    journal = Journal(small_disk, "weights A")
    journal.commit([(key(1), b"kept")])
    with pytest.raises(JournalError, match="No space left on device"):
        journal.commit([(key(2), b"y" * 200_000)])
    assert journal.get(key(1)) == b"kept"
    assert key(2) not in journal
    for segment in journal.folder.iterdir():  # the disk gets space again
        if segment.stat().st_size > 30_000:
            os.truncate(segment, 200)
    journal.commit([(key(3), b"later")])
    journal.close()
    again = Journal(small_disk, "weights A")
    assert again.get(key(1)) == b"kept"
    assert again.get(key(3)) == b"later"
    again.close()


WRITER = """
import sys
from pathlib import Path
from holdfast.evaluate.wire.answer_journal import Journal

journal = Journal(Path(sys.argv[1]), "weights A")
for number in range(int(sys.argv[2]), 1_000_000):
    journal.commit([((number * 10 + i).to_bytes(16, "little"), b"body %d" % (number * 10 + i) * 20) for i in range(10)])
    print(number, flush=True)
"""


def test_what_was_said_to_be_committed_survives_kill_9(tmp_path):
    chance = random.Random(1)
    committed = -1
    for _ in range(5):
        writer = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(WRITER), str(tmp_path), str(committed + 1)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(chance.randrange(1, 15)):
            committed = int(writer.stdout.readline())
        writer.send_signal(signal.SIGKILL)
        rest = writer.stdout.read().split()
        committed = int(rest[-1]) if rest else committed
        writer.wait()
        writer.stdout.close()
    journal = Journal(tmp_path, "weights A")
    for number in range((committed + 1) * 10):
        assert journal.get(key(number)) == b"body %d" % number * 20
    journal.close()
