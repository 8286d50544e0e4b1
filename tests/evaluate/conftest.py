"""What the end-to-end tests share: the tiny model and suite, and stock lm-eval's scores of it, made once a session."""

from collections.abc import Iterator

import pytest
from end_to_end_world import CHAT, PLAIN, World, leftovers, make_world


@pytest.fixture(scope="session")
def e2e(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("e2e"))


@pytest.fixture(scope="session")
def light(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Without tasks and models, for engines that need none."""
    return World(tmp_path_factory.mktemp("light"))


@pytest.fixture(scope="session")
def stock(e2e: World) -> list[dict]:
    """Stock lm-eval's results of the whole suite, in one process."""
    [found] = e2e.stock([(PLAIN, False), (CHAT, True)], e2e.model())
    return found


@pytest.fixture
def nothing_is_left(tmp_path: pytest.TempPathFactory) -> Iterator[None]:
    yield
    assert leftovers(tmp_path) == []
