"""Share end-to-end fixtures: the tiny model and suite, and stock lm-eval's scores, once a session."""

from collections.abc import Callable, Iterator

import pytest
from end_to_end_world import CHAT, PLAIN, World, leftovers, make_world, stock_lm_eval


@pytest.fixture(scope="session")
def e2e(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("e2e"))


@pytest.fixture(scope="session")
def light(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Make a world without tasks and models, for engines that need none."""
    return World(tmp_path_factory.mktemp("light"))


@pytest.fixture(scope="session", name="stock_lm_eval")
def one_stock_lm_eval(e2e: World) -> Iterator[Callable[..., list[list[dict]]]]:
    with stock_lm_eval(e2e) as ask:
        yield ask


@pytest.fixture(scope="session")
def stock(e2e: World, stock_lm_eval: Callable[..., list[list[dict]]]) -> list[dict]:
    """Return stock lm-eval's results of the whole suite, from one process."""
    [found] = stock_lm_eval([(PLAIN, False), (CHAT, True)], e2e.model())
    return found


@pytest.fixture
def nothing_is_left(tmp_path: pytest.TempPathFactory) -> Iterator[None]:
    yield
    assert leftovers(tmp_path) == []
