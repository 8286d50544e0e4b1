import contextlib
import mmap
import os
import signal
import threading
from itertools import product

import pytest
from waiting import open_descriptors

from holdfast.checkpoint.format.rank_layout import PAGE_BYTES
from holdfast.checkpoint.ipc import memory_reservation
from holdfast.checkpoint.ipc.shared_buffer import Arena, ArenaError, State

WAYS = {
    State.FREE: [],
    State.COPYING: [],
    State.SEALED: [State.SEALED],
    State.WRITING: [State.SEALED, State.WRITING],
    State.COMMITTED: [State.SEALED, State.WRITING, State.COMMITTED],
}
"""The states on the way to each state, after `begin`."""
ALLOWED = {
    (State.COPYING, State.SEALED),
    (State.SEALED, State.WRITING),
    (State.WRITING, State.COMMITTED),
    (State.WRITING, State.SEALED),
    (State.COPYING, State.FREE),
    (State.SEALED, State.FREE),
    (State.WRITING, State.FREE),
    (State.COMMITTED, State.FREE),
}


@pytest.fixture
def make():
    """Yield a function that makes arenas; close them afterwards."""
    with contextlib.ExitStack() as closing:

        def made(image_bytes=100, notes_bytes=0):
            arena = Arena.make(image_bytes, notes_bytes)
            closing.callback(arena.close)
            return arena

        yield made


def brought_to(arena, state):
    generation = arena.begin(7) if state is not State.FREE else arena.generation
    for each in WAYS[state]:
        arena.move(each, generation)
    assert arena.state is state
    return generation


def in_a_child(work):
    """Run `work` in a forked process; return True if it came to its end."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def test_a_new_one_is_free_and_of_no_step(make):
    arena = make()
    assert (arena.state, arena.generation, arena.step) == (State.FREE, 0, -1)


@pytest.mark.parametrize(
    ("now", "to"), [pair for pair in product(State, State) if pair[1] is not State.COPYING]
)
def test_only_the_moves_that_are_drawn_are_allowed(make, now, to):
    arena = make()
    generation = brought_to(arena, now)
    if (now, to) in ALLOWED or (
        now is to is State.FREE
    ):  # a free arena may be freed: the result is the same
        with contextlib.suppress(ArenaError) if now is to else contextlib.nullcontext():
            arena.move(to, generation)
        assert arena.state is to
    else:
        with pytest.raises(
            ArenaError, match=f"The arena is {now.name}, and cannot become {to.name}"
        ):
            arena.move(to, generation)
        assert arena.state is now
    assert arena.generation == generation


@pytest.mark.parametrize("now", State)
def test_what_is_not_durable_yet_is_never_copied_over(make, now):
    arena = make()
    generation = brought_to(arena, now)
    if now in (State.FREE, State.COMMITTED):
        assert arena.begin(8) == generation + 1
        assert (arena.state, arena.step) == (State.COPYING, 8)
    else:
        with pytest.raises(ArenaError, match="cannot become COPYING"):
            arena.begin(8)
        assert (arena.state, arena.generation, arena.step) == (now, generation, 7)


def test_each_use_has_its_generation_and_step(make):
    arena = make()
    for use, step in enumerate((5, 2**40, 0), start=1):
        assert arena.begin(step) == use
        assert (arena.generation, arena.step) == (use, step)
        for state in (State.SEALED, State.WRITING, State.COMMITTED):
            arena.move(state, use)


@pytest.mark.parametrize("state", [State.SEALED, State.WRITING, State.COMMITTED, State.FREE])
def test_a_report_on_an_earlier_or_later_use_changes_nothing(make, state):
    arena = make()
    brought_to(arena, State.COMMITTED)
    arena.begin(8)
    for other in (0, 1, 3):
        with pytest.raises(ArenaError, match=f"in its use 2; {other} is over"):
            arena.move(state, other)
    assert (arena.state, arena.generation, arena.step) == (State.COPYING, 2, 8)


@pytest.mark.parametrize(
    "image_bytes", [0, 1, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 1, 3 * PAGE_BYTES]
)
def test_there_is_room_for_the_image_and_the_notes_and_they_do_not_meet(make, image_bytes):
    arena = make(image_bytes, 24)
    assert arena.capacity_bytes == len(arena.image) >= max(image_bytes, 1)
    assert arena.capacity_bytes - image_bytes <= PAGE_BYTES
    assert len(arena.notes) >= 24
    generation = brought_to(arena, State.SEALED)
    arena.image[:] = b"i" * len(arena.image)
    arena.notes[:] = b"n" * len(arena.notes)
    assert bytes(arena.image) == b"i" * len(arena.image)
    assert bytes(arena.notes) == b"n" * len(arena.notes)
    assert (arena.state, arena.generation, arena.step) == (State.SEALED, generation, 7)


def test_the_image_begins_at_a_page_and_is_zero_at_first(make):
    import numpy as np

    arena = make(2 * PAGE_BYTES)
    assert np.frombuffer(arena.image, np.uint8).ctypes.data % mmap.PAGESIZE == 0
    assert not any(arena.image)


def test_another_process_sees_and_moves_the_same(make):
    arena = make(100, 8)
    generation = arena.begin(3)
    arena.image[:5] = b"bytes"
    arena.notes[:3] = b"dig"
    arena.move(State.SEALED, generation)

    def write():
        theirs = Arena(os.dup(arena.fd))
        assert (theirs.state, theirs.step, theirs.generation) == (State.SEALED, 3, generation)
        assert (bytes(theirs.image[:5]), bytes(theirs.notes[:3])) == (b"bytes", b"dig")
        assert theirs.capacity_bytes == arena.capacity_bytes
        theirs.move(State.WRITING, generation)
        theirs.move(State.COMMITTED, generation)

    assert in_a_child(write)
    assert arena.state is State.COMMITTED


def test_of_all_who_enter_a_state_at_once_one_gets_in(make):
    """Four processes try to take the arena for writing, again and again."""
    arena = make()
    rounds, workers = 4, 4
    for _ in range(rounds):
        generation = brought_to(arena, State.SEALED)
        gate, open_gate = os.pipe()

        def take(gate=gate, open_gate=open_gate, generation=generation):
            os.close(open_gate)
            os.read(gate, 1)
            arena.move(State.WRITING, generation)

        children = []
        for _ in range(workers):
            child = os.fork()
            if child == 0:
                try:
                    take()
                except BaseException:
                    os._exit(1)
                os._exit(0)
            children.append(child)
        os.close(gate)
        os.close(open_gate)
        outcomes = [os.waitpid(child, 0)[1] == 0 for child in children]
        assert outcomes.count(True) == 1
        arena.move(State.FREE, generation)


def holding(arena):
    """Start a process that holds the arena's lock, and wait until it does."""
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        with arena._alone():
            os.write(tell, b"x")
            signal.pause()
        os._exit(0)
    os.close(tell)
    assert os.read(told, 1) == b"x"
    os.close(told)
    return child


def test_the_lock_of_a_process_that_is_killed_is_let_go(make):
    arena = make()
    generation = arena.begin(1)
    child = holding(arena)
    moved = threading.Event()

    def move():
        arena.move(State.SEALED, generation)
        moved.set()

    waiting = threading.Thread(target=move)
    waiting.start()
    try:
        assert not moved.wait(0.05)
        assert arena.state is State.COPYING
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert moved.wait(120)
    waiting.join()
    assert arena.state is State.SEALED


def test_a_thread_waits_for_another_one_too(make):
    """The copying thread and the thread of the writing process's messages move the same arenas."""
    arena = make()
    generation = arena.begin(1)
    with arena._alone():
        thread = threading.Thread(target=arena.move, args=(State.SEALED, generation))
        thread.start()
        thread.join(0.1)
        assert arena.state is State.COPYING
    thread.join(10)
    assert arena.state is State.SEALED


def test_a_move_that_waited_while_its_use_ended_changes_nothing(make, monkeypatch):
    """The check of the use must happen under the lock, not before."""
    arena = make()
    generation = brought_to(arena, State.COMMITTED)
    real, failed = Arena._alone, []

    @contextlib.contextmanager
    def after_another(self):
        monkeypatch.setattr(Arena, "_alone", real)
        assert in_a_child(lambda: arena.begin(8))
        with real(self):
            yield

    monkeypatch.setattr(Arena, "_alone", after_another)
    try:
        arena.move(State.FREE, generation)
    except ArenaError as error:
        failed.append(str(error))
    assert (arena.state, arena.generation, arena.step) == (State.COPYING, 2, 8)
    assert failed


def test_whoever_maps_it_while_it_is_begun_sees_its_capacity(make):
    """The writing process receives an arena just before the first copy into it begins."""
    arena = make()

    child = os.fork()
    if child == 0:
        try:
            while True:
                arena.move(State.FREE, arena.begin(7))
        finally:
            os._exit(1)
    try:
        for _ in range(5000):
            seen = Arena(os.dup(arena.fd))
            assert seen.capacity_bytes == arena.capacity_bytes
            seen.close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_what_is_no_arena_is_refused(tmp_path):
    with (tmp_path / "file").open("w+b") as file:
        file.truncate(2 * PAGE_BYTES)
        with pytest.raises(ArenaError, match="not an arena"):
            Arena(file.fileno())


def test_more_than_there_is_leaves_no_descriptor_behind():
    before = open_descriptors()
    with pytest.raises(
        ArenaError, match=r"needs 36,028,797,018,968,064 bytes of memory, and [0-9,]+ are free"
    ):
        Arena.make(1 << 55)
    assert open_descriptors() <= before


def test_what_is_to_be_left_is_not_taken(monkeypatch):
    monkeypatch.setattr(memory_reservation, "available_memory_bytes", lambda: 1 << 20)
    Arena.make(1 << 19, leave_bytes=1 << 18).close()
    with pytest.raises(ArenaError, match="are free on this"):
        Arena.make(1 << 19, leave_bytes=1 << 20)


def test_one_that_is_emptied_gives_its_memory_back_though_a_forked_child_has_it_mapped(make):
    arena = make(1 << 20, 24)
    generation = brought_to(arena, State.COMMITTED)
    arena.image[:] = b"i" * len(arena.image)
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    try:
        assert os.fstat(arena.fd).st_blocks * 512 > 1 << 20
        arena.empty()
        assert os.fstat(arena.fd).st_blocks * 512 <= PAGE_BYTES
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    # Every reader then finds that the arena is empty.
    assert arena.progress(generation).state is State.FREE
    assert not any(arena.image)
    arena.empty()


def test_closing_with_a_view_left_unmaps_once_the_view_is_gone():
    arena = Arena.make(100)
    view = arena.image
    view[:3] = b"abc"
    arena.close()
    assert bytes(view[:3]) == b"abc"
