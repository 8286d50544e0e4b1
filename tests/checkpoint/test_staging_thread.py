import sys

import pytest

from holdfast.checkpoint.save.staging_thread import ShortTurns


@pytest.fixture(autouse=True)
def _put_back():
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


def test_turns_are_short_until_the_last_is_through():
    sys.setswitchinterval(0.005)
    turns = ShortTurns()
    with turns:
        with turns:
            assert sys.getswitchinterval() == pytest.approx(0.0002)
        assert sys.getswitchinterval() == pytest.approx(0.0002)
    assert sys.getswitchinterval() == pytest.approx(0.005)


def test_they_are_short_no_more_after_an_error():
    sys.setswitchinterval(0.005)
    with pytest.raises(KeyError), ShortTurns():
        raise KeyError
    assert sys.getswitchinterval() == pytest.approx(0.005)


@pytest.mark.parametrize("microseconds", [3, 70, 99, 100, 700, 1013, 5000, 123_457])
def test_what_was_set_before_is_put_back_exactly(microseconds):
    sys.setswitchinterval(microseconds * 1e-6 + 0.5e-6)
    before_s = sys.getswitchinterval()
    turns = ShortTurns()
    for _ in range(10):
        with turns:
            assert sys.getswitchinterval() <= before_s
    assert sys.getswitchinterval() == before_s


def test_what_the_training_sets_meanwhile_stays():
    sys.setswitchinterval(0.005)
    with ShortTurns():
        sys.setswitchinterval(0.05)
    assert sys.getswitchinterval() == pytest.approx(0.05)
