"""Test the words of a line without varying parts, and the most similar lines."""

import pytest

from holdfast.diagnose.memory.recall import Frequencies, Vectors
from holdfast.diagnose.memory.words import is_trouble, mask, search_words, tokens, words_of


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("KeyError: 'labels'", "KeyError: 'input_ids'"),
        (
            "can't open file '/a/b.py': [Errno 2] No such file",
            "can't open file '/c/d.py': [Errno 2] No such file",
        ),
        ("NVRM: Xid (PCI:0000:3b:00): 48, pid=9123", "NVRM: Xid (PCI:0000:9f:00): 48, pid=17"),
        ("node017: link down on mlx5_0", "node233: link down on mlx5_3"),
    ],
)
def test_what_varies_is_left_out(one, other):
    assert mask(one) == mask(other)
    assert words_of(one) == words_of(other)


def test_a_quoted_sentence_is_read_and_a_quoted_name_is_not():
    said = {
        token.text
        for token in tokens("Cuda failure 214 'uncorrectable ECC error encountered' in 'net one'")
    }
    assert {"uncorrectable", "ECC", "encountered"} <= said
    assert "net" not in said


def test_places_are_those_in_the_line():
    text = "été: torch.OutOfMemoryError: 3 'x' CUDA out of memory"
    assert all(text[token.start : token.end] == token.text for token in tokens(text))


def test_words_for_full_text_search_are_few_and_tell_something():
    found = search_words(["the worker failed: DataLoader worker (pid 3) is killed"] * 5000).split()
    assert {"dataloader", "killed"} <= set(found)
    assert "the" not in found
    assert len(found) <= 1500


def test_trouble():
    assert is_trouble("RuntimeError: x")
    assert is_trouble("Connection refused")
    assert not is_trouble("step 100 loss 2.3")


def test_the_nearest_is_the_same_message_and_what_shares_nothing_is_left_out():
    lines = [
        "CUDA error: an illegal memory access",
        "No space left on device",
        "Permission denied: 'x'",
    ]
    vectors = Vectors(lines, Frequencies.of(["a background line of memory"] * 20))
    (index, near), *_ = vectors.nearest("No space left on device: '/tmp/q'", 3)
    assert (index, round(near, 6)) == (1, 1.0)
    assert vectors.nearest("zzz qqq", 3) == []
    assert Vectors([]).nearest("x", 3) == []
