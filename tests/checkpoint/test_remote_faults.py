"""Test object storage that fails, stalls and cuts, and pushes that are killed."""

import random
import subprocess
import sys
from pathlib import Path

import pytest
from storage_world import (
    PART_BYTES,
    QUICK,
    SMALL,
    by_chance,
    contents,
    make_checkpoint,
    new_bucket,
    proxy,
)
from waiting import until

from holdfast.checkpoint.format.manifest import MANIFEST_NAME
from holdfast.checkpoint.storage.object_store import Patience
from holdfast.checkpoint.storage.remote import Remote
from holdfast.core.errors import StorageFailed

STALLS = Patience(
    request_timeout_s=0.4, tries=10, attempts=5, first_pause_s=0.001, longest_pause_s=0.005
)


def test_storage_of_which_30_percent_of_the_requests_fail_only_slows_things(
    s3, tmp_path, monkeypatch
):
    with proxy(s3, by_chance(0.3, seed=0)) as between:
        monkeypatch.setenv("AWS_ENDPOINT_URL", between.url)
        remote = Remote(f"s3://{new_bucket(s3)}/runs", patience=QUICK, part_bytes=PART_BYTES)
        for step in (20, 30):
            remote.push(make_checkpoint(tmp_path / "local", step, seed=step))
        assert [each.step for each in remote.scan()] == [30, 20]
        for step in (20, 30):
            found = remote.fetch(step, tmp_path / "back")
            assert contents(found) == contents(tmp_path / "local" / found.name)
        remote.delete(20)
        assert [each.step for each in remote.scan()] == [30]
        assert between.failed > 0.2 * len(between.requests) > 10


@pytest.mark.parametrize("kind", ["lost", "gone"])
def test_an_upload_that_ended_without_an_answer_is_made_again(s3, tmp_path, monkeypatch, kind):
    """On a second request, storage may have forgotten the upload."""
    ended = set()

    def fault(_number, method, path, query):
        first = method == "POST" and "uploadId" in query and path not in ended
        ended.update([path] if first else [])
        return kind if first else None

    with proxy(s3, fault) as between:
        monkeypatch.setenv("AWS_ENDPOINT_URL", between.url)
        remote = Remote(f"s3://{new_bucket(s3)}/runs", patience=QUICK, part_bytes=PART_BYTES)
        assert remote.push(make_checkpoint(tmp_path, 20)).state == "written"
        assert between.failed == 2


def test_a_request_that_stalls_is_given_up_and_made_again(s3, tmp_path, monkeypatch):
    stalled = {3, 9, 20}
    with proxy(s3, lambda number, *_: "stall" if number in stalled else None) as between:
        monkeypatch.setenv("AWS_ENDPOINT_URL", between.url)
        remote = Remote(f"s3://{new_bucket(s3)}/runs", patience=STALLS, part_bytes=PART_BYTES)
        local = make_checkpoint(tmp_path, 20)
        remote.push(local)
        stalled |= {len(between.requests) + 2, len(between.requests) + 5}
        assert contents(remote.fetch(20, tmp_path / "back")) == contents(local)
        assert between.failed == 5


def test_storage_that_only_stalls_is_given_up(s3, monkeypatch):
    patience = Patience(
        request_timeout_s=1.0, tries=2, attempts=3, first_pause_s=0.001, longest_pause_s=0.002
    )
    pauses = []
    with proxy(s3, lambda *_: "stall") as between:
        monkeypatch.setenv("AWS_ENDPOINT_URL", between.url)
        with pytest.raises(StorageFailed, match="failed 3 times"):
            Remote("s3://bucket/runs", patience=patience, sleep=pauses.append).scan()
        until(lambda: len(between.requests) >= 6)  # one that was given up may arrive later
        assert len(between.requests) == 6
    assert len(pauses) == 2


def test_no_request_is_repeated_when_its_time_is_over(s3, monkeypatch):
    patience = Patience(
        request_timeout_s=0.05, tries=1000, retry_timeout_s=0.2, attempts=1, first_pause_s=0.001
    )
    with proxy(s3, lambda *_: "stall") as between:
        monkeypatch.setenv("AWS_ENDPOINT_URL", between.url)
        with pytest.raises(StorageFailed):
            Remote("s3://bucket/runs", patience=patience).scan()
        assert len(between.requests) < 8


@pytest.fixture(scope="module")
def pusher():
    program = [sys.executable, Path(__file__).with_name("killed_pusher.py")]
    with subprocess.Popen(
        program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.stdin.close()


def push_elsewhere(pusher, endpoint, url, local, victim):
    """Push in another process; return its exit status, as `os.waitpid` does."""
    pusher.stdin.write(f"{endpoint} {url} {local}\n")
    pusher.stdin.flush()
    victim.set_result(int(pusher.stdout.readline()))
    return int(pusher.stdout.readline())


@pytest.mark.parametrize("seed", range(6))
def test_a_push_that_is_killed_leaves_no_half_checkpoint_and_the_next_one_goes_on(
    s3, tmp_path, monkeypatch, pusher, seed
):
    """SIGKILL at a seeded request, which arrives or not; an earlier step stays unchanged."""
    generator = random.Random(seed)
    # A push makes about 20 requests; the last of them commit.
    kill_at, kind = generator.randint(2, 24), generator.choice(["kill", "kill-lost"])
    with proxy(s3) as between:
        monkeypatch.setenv("AWS_ENDPOINT_URL", between.url)
        url = f"s3://{new_bucket(s3)}/runs"
        remote = Remote(url, patience=QUICK, part_bytes=PART_BYTES)
        remote.push(make_checkpoint(tmp_path, 10, sizes=SMALL))
        begin = len(between.requests)
        between.fault = lambda number, *_: kind if number == begin + kill_at else None
        local = make_checkpoint(tmp_path, 20, seed=seed)
        status = push_elsewhere(pusher, between.url, url, local, between.victim)
        committed = any(
            MANIFEST_NAME in path and method == "PUT"
            for method, path, _ in between.requests[begin:]
        )
        assert status == (9 if len(between.requests) >= begin + kill_at else 0)
        between.fault = lambda *_: None
        found = [(each.step, each.state) for each in remote.scan()]
        assert found in ([(10, "written")], [(20, "written"), (10, "written")])
        assert committed or len(found) == 1
        remote.push(local)
        assert [(each.step, each.state) for each in remote.scan()] == [
            (20, "written"),
            (10, "written"),
        ]
        assert contents(remote.fetch(20, tmp_path / "back")) == contents(local)
