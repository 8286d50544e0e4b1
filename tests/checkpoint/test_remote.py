"""Test checkpoints in object storage, through a real S3 server and a folder."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import xxhash
from obstore.store import S3Store
from storage_world import (
    BRIEF,
    PART_BYTES,
    QUICK,
    SIZES,
    SMALL,
    contents,
    make_checkpoint,
    new_bucket,
    proxy,
    seal,
)

from holdfast.checkpoint import scan as scan_local
from holdfast.checkpoint.format.manifest import MANIFEST_NAME
from holdfast.checkpoint.storage import fetch as remote_fetch
from holdfast.checkpoint.storage import object_store
from holdfast.checkpoint.storage import push as remote_push
from holdfast.checkpoint.storage.catalog import remote_name
from holdfast.checkpoint.storage.remote import Remote
from holdfast.core.clock import SystemClock
from holdfast.core.errors import BadUse, CheckpointError, DamagedCheckpoint, NotFound, StorageFailed
from holdfast.testing import FakeClock


@pytest.fixture
def bucket(request, monkeypatch):
    """Yield a bucket behind a recording proxy, on moto if the test uses `storage_clock`."""
    server = request.getfixturevalue("moto" if "storage_clock" in request.fixturenames else "s3")
    with proxy(server) as between:
        monkeypatch.setenv("AWS_ENDPOINT_URL", between.url)
        name = new_bucket(server)
        store = S3Store(
            name, prefix="runs/one", endpoint=server, client_options={"allow_http": True}
        )
        yield SimpleNamespace(url=f"s3://{name}/runs/one", proxy=between, store=store)


@pytest.fixture(params=["s3", "file"])
def url(request, tmp_path):
    if request.param == "s3":
        return request.getfixturevalue("bucket").url
    (tmp_path / "archive").mkdir()
    return f"file://{tmp_path}/archive"


def at(url, **options):
    return Remote(url, **{"patience": QUICK, "part_bytes": PART_BYTES, **options})


def change(bucket, path, data):
    """Write or delete an object, as another client would."""
    if data is None:
        bucket.store.delete(path)
    else:
        bucket.store.put(path, data)


def reseal(path, **changed):
    """Change a manifest and its digest, as a forger would."""
    manifest = json.loads((path / MANIFEST_NAME).read_bytes()) | changed
    del manifest["digest"]
    canonical = json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()
    content = json.dumps(manifest | {"digest": xxhash.xxh3_128_hexdigest(canonical)}).encode()
    (path / MANIFEST_NAME).write_bytes(content)
    return content


def steps(remote):
    return [(each.step, each.state) for each in remote.scan()]


def test_what_is_pushed_is_listed_and_comes_back_bit_for_bit(url, tmp_path):
    remote = at(url)
    assert remote.scan() == []
    for step, sizes in ((20, SIZES), (100, SMALL), (30, SMALL)):
        local = make_checkpoint(tmp_path / "local", step, seed=step, sizes=sizes)
        pushed = remote.push(local)
        assert (pushed.step, pushed.state, pushed.size_bytes) == (
            step,
            "written",
            sum(sizes.values()),
        )
        assert pushed.url.startswith(f"{url}/step-0000000")
        assert pushed.created_at_s == 1e9 + step
    assert steps(remote) == [(100, "written"), (30, "written"), (20, "written")]
    for step in (100, 20):
        found = at(url).fetch(step, tmp_path / "back")
        assert contents(found) == contents(tmp_path / "local" / found.name)
    assert [(info.step, info.state) for info in scan_local(tmp_path / "back")] == [
        (100, "written"),
        (20, "written"),
    ]


def test_of_steps_that_are_not_asked_for_nothing_is_read(bucket, tmp_path):
    for step in (20, 30):
        at(bucket.url).push(make_checkpoint(tmp_path, step, sizes=SMALL))
    before = len(bucket.proxy.requests)
    assert [each.step for each in at(bucket.url).scan(above=20)] == [30]
    assert not any("step-0000000020" in path for _, path, _ in bucket.proxy.requests[before:])


def test_a_part_of_a_file_is_read(url, tmp_path):
    remote = at(url)
    local = make_checkpoint(tmp_path, 20)
    remote.push(local)
    whole = (local / "__0_0.distcp").read_bytes()
    assert bytes(remote.read_range(20, "__0_0.distcp", 1000, 70_000)) == whole[1000:71_000]
    assert bytes(remote.read_range(20, "__0_0.distcp", len(whole) - 1, 1)) == whole[-1:]
    assert (
        bytes(remote.read_range(20, ".metadata", 3, 5)) == (local / ".metadata").read_bytes()[3:8]
    )
    assert bytes(remote.read_range(20, "empty", 0, 0)) == b""
    with pytest.raises(
        BadUse, match=rf"has {len(whole)} bytes: 2 at {len(whole) - 1} are not in the file"
    ):
        remote.read_range(20, "__0_0.distcp", len(whole) - 1, 2)
    with pytest.raises(BadUse, match=r"has no file 'no'. It has: .metadata, __0_0"):
        remote.read_range(20, "no", 0, 1)
    with pytest.raises(NotFound, match="has no checkpoint of step 21"):
        remote.read_range(21, "__0_0.distcp", 0, 1)
    # Deleted meanwhile, with another object in its place.
    other = make_checkpoint(tmp_path / "other", 20, seed=5)
    at(url).delete(20)
    at(url).push(other)
    assert (
        bytes(remote.read_range(20, "__0_0.distcp", 0, 9))
        == (other / "__0_0.distcp").read_bytes()[:9]
    )


def test_the_manifest_goes_last_and_nothing_is_sent_twice(bucket, tmp_path):
    local = make_checkpoint(tmp_path, 20)
    at(bucket.url).push(local)
    sent = bucket.proxy.of("PUT")
    assert sent[-1].endswith(f"/{MANIFEST_NAME}")
    assert sum(path.endswith(MANIFEST_NAME) for path in sent) == 1
    # Large files are sent in parts, each other file in one request, and their digests too.
    assert [sum(path.endswith(name) for path in sent) for name in SIZES] == [1, 3, 2, 1, 1]
    assert sum(path.endswith(".xxh3") for path in sent) == 2
    at(bucket.url).push(local)
    assert bucket.proxy.of("PUT") == sent


def test_a_push_goes_on_where_a_dead_one_stopped(bucket, tmp_path):
    local = make_checkpoint(tmp_path, 20)
    name = at(bucket.url).push(local).name
    for path in (MANIFEST_NAME, "__1_0.distcp.xxh3"):
        change(bucket, f"{name}/{path}", None)
    change(bucket, f"{name}/.metadata", b"cut off")
    assert at(bucket.url).scan() == []
    before = len(bucket.proxy.of("PUT"))
    at(bucket.url).push(local)
    again = [path.rpartition(f"{name}/")[2] for path in bucket.proxy.of("PUT")[before:]]
    assert sorted(again) == [".metadata", *["__1_0.distcp"] * 2, "__1_0.distcp.xxh3", MANIFEST_NAME]
    assert again[-1] == MANIFEST_NAME
    assert contents(at(bucket.url).fetch(20, tmp_path / "back")) == contents(local)


def test_what_could_be_tidied_up_at_any_moment_is_sent_again(bucket, tmp_path):
    local = make_checkpoint(tmp_path, 20)
    name = at(bucket.url).push(local).name
    change(bucket, f"{name}/{MANIFEST_NAME}", None)
    before = len(bucket.proxy.of("PUT"))
    clock = FakeClock(SystemClock().now_s() + 13 * 3600)
    at(bucket.url, clock=clock).push(local)
    assert len(bucket.proxy.of("PUT")) - before == 3 + 2 + 3 + 2 + 1


def test_a_checkpoint_that_lost_a_file_is_damaged_and_mended_by_a_push(bucket, tmp_path):
    local = make_checkpoint(tmp_path, 20)
    name = at(bucket.url).push(local).name
    change(bucket, f"{name}/empty", None)
    [found] = at(bucket.url).scan()
    assert (found.state, found.reason) == ("damaged", "empty is missing")
    change(bucket, f"{name}/empty", b"1")
    assert at(bucket.url).scan()[0].reason == "empty has 1 bytes instead of 0"
    with pytest.raises(
        DamagedCheckpoint, match=r"is damaged: empty has 1 bytes.* Take an earlier step"
    ):
        at(bucket.url).fetch(20, tmp_path / "back")
    at(bucket.url).push(local)
    assert steps(at(bucket.url)) == [(20, "written")]


def test_a_step_saved_again_replaces_the_former(url, tmp_path, storage_clock):
    first, second = (
        make_checkpoint(tmp_path / str(seed), 20, seed=seed, sizes=SMALL) for seed in (2, 1)
    )
    remote = at(url, sleep=storage_clock.advance)
    remote.push(first)
    for local in (second, first, second):  # and back again
        remote.push(local)
        assert steps(remote) == [(20, "written")] * 2
        assert contents(remote.fetch(20, tmp_path / "back")) == contents(local)


def test_what_was_replaced_goes_a_day_later_if_what_replaced_it_is_whole(
    bucket, tmp_path, storage_clock
):
    first, second = (
        make_checkpoint(tmp_path / str(seed), 20, seed=seed, sizes=SMALL) for seed in (2, 1)
    )
    remote = at(bucket.url, sleep=storage_clock.advance)
    remote.push(first)
    storage_clock.advance(5)
    name = remote.push(second).name
    storage_clock.advance(24 * 3600 - 5)
    remote.push(make_checkpoint(tmp_path, 30, sizes=SMALL))
    assert steps(remote) == [(30, "written"), (20, "written"), (20, "written")]
    storage_clock.advance(24 * 3600 + 5)
    change(bucket, f"{name}/.metadata", None)
    remote.push(make_checkpoint(tmp_path, 40, sizes=SMALL))
    assert steps(remote) == [(40, "written"), (30, "written"), (20, "damaged"), (20, "written")]
    assert contents(remote.fetch(20, tmp_path / "back")) == contents(first)
    change(bucket, f"{name}/.metadata", (second / ".metadata").read_bytes())
    remote.push(make_checkpoint(tmp_path, 50, sizes=SMALL))
    assert steps(remote) == [(50, "written"), (40, "written"), (30, "written"), (20, "written")]
    assert contents(remote.fetch(20, tmp_path / "back")) == contents(second)


def test_pushes_at_once_leave_whole_checkpoints(bucket, tmp_path):
    saves = [
        make_checkpoint(tmp_path / name, 20, seed=seed, sizes=SMALL)
        for seed, name in zip((0, 0, 1), "abc", strict=True)
    ]
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda save: at(bucket.url, sleep=lambda _: None).push(save), saves))
    assert steps(at(bucket.url)) == [(20, "written")] * 2
    assert contents(at(bucket.url).fetch(20, tmp_path / "back")) in [
        contents(save) for save in saves
    ]


def test_only_what_was_abandoned_for_a_day_is_tidied_up(bucket, tmp_path, storage_clock):
    half = remote_name(10, b"of a dead push")
    change(bucket, f"{half}/__0_0.distcp", b"half")
    change(bucket, "notes/step.txt", b"not ours")
    remote = at(bucket.url)
    remote.push(make_checkpoint(tmp_path, 20, sizes=SMALL))
    assert half in remote._objects.folders()
    assert steps(remote) == [(20, "written")]
    storage_clock.advance(24 * 3600 + 60)
    remote.push(make_checkpoint(tmp_path, 30, sizes=SMALL))
    assert "notes" in remote._objects.folders()
    assert half not in remote._objects.folders()
    assert steps(remote) == [(30, "written"), (20, "written")]


def test_a_push_whose_tidying_fails_is_a_push(bucket, tmp_path, caplog, monkeypatch):
    def fail(*_, **__):
        raise StorageFailed("no.")

    monkeypatch.setattr(remote_push, "tidy", fail)
    assert at(bucket.url).push(make_checkpoint(tmp_path, 20, sizes=SMALL)).state == "written"
    assert "Step 20 is pushed, but superfluous objects there were not deleted: no." in caplog.text


def test_a_deleted_step_is_no_checkpoint_from_the_first_request_on(bucket, tmp_path):
    remote = at(bucket.url, patience=BRIEF)
    remote.push(make_checkpoint(tmp_path, 20, sizes=SMALL))
    remote.push(make_checkpoint(tmp_path, 30, sizes=SMALL))
    deletions = 0

    def fault(_number, method, *_):
        nonlocal deletions
        deletions += method in ("POST", "DELETE")
        return "reset" if deletions > 1 else None

    bucket.proxy.fault = fault
    with pytest.raises(StorageFailed, match=r"Deleting .* failed 3 times"):
        remote.delete(30)
    bucket.proxy.fault = lambda *_: None
    assert steps(remote) == [(20, "written")]
    remote.delete(20)
    assert steps(remote) == []
    with pytest.raises(NotFound, match="has no checkpoint of step 20"):
        remote.delete(20)


def test_deleting_in_a_folder_leaves_nothing(tmp_path):
    (tmp_path / "archive").mkdir()
    remote = at(f"file://{tmp_path}/archive")
    local = make_checkpoint(tmp_path, 20)
    remote.push(local)
    remote.delete(20)
    assert list((tmp_path / "archive").iterdir()) == []


def test_what_is_damaged_here_does_not_arrive_there(url, tmp_path):
    local = make_checkpoint(tmp_path, 20, sizes=SMALL)
    data = bytearray((local / "__0_0.distcp").read_bytes())
    data[-1] ^= 1
    (local / "__0_0.distcp").write_bytes(data)
    with pytest.raises(
        DamagedCheckpoint, match=r"was not pushed: __0_0.distcp does not match its checksum"
    ):
        at(url).push(local)
    assert at(url).scan() == []
    name = remote_name(20, (local / MANIFEST_NAME).read_bytes())
    assert "__0_0.distcp" not in at(url)._objects.list(name)
    (local / "__0_0.distcp").write_bytes(data[:-1])
    with pytest.raises(
        DamagedCheckpoint, match=rf"has {len(data) - 1} bytes instead of {len(data)}"
    ):
        at(url).push(local)
    (local / MANIFEST_NAME).unlink()
    with pytest.raises(BadUse, match=r"has no manifest"):
        at(url).push(local)
    with pytest.raises(BadUse, match="is not a checkpoint"):
        at(url).push(tmp_path)


def test_a_byte_that_changed_there_is_found_by_a_fetch(bucket, tmp_path):
    local = make_checkpoint(tmp_path / "local", 20)
    name = at(bucket.url).push(local).name
    data = bytearray((local / "__0_0.distcp").read_bytes())
    data[150_000] ^= 4
    change(bucket, f"{name}/__0_0.distcp", bytes(data))
    assert steps(at(bucket.url)) == [(20, "written")]
    former = contents(make_checkpoint(tmp_path / "back", 20, seed=9))
    with pytest.raises(
        DamagedCheckpoint, match=r"is damaged: __0_0.distcp does not match its checksum"
    ):
        at(bucket.url).fetch(20, tmp_path / "back")
    with pytest.raises(
        DamagedCheckpoint, match=r"is damaged: __0_0.distcp does not match its checksum"
    ):
        at(bucket.url).read_range(20, "__0_0.distcp", 140_000, 10)  # in the same block
    sidecar = "__1_0.distcp.xxh3"
    change(bucket, f"{name}/{sidecar}", bytes((local / sidecar).stat().st_size))
    with pytest.raises(
        DamagedCheckpoint, match=r"is damaged: __1_0.distcp.xxh3 does not match its checksum"
    ):
        at(bucket.url).read_range(20, "__1_0.distcp", 0, 1)
    change(bucket, f"{name}/.metadata", bytes(700))
    with pytest.raises(
        DamagedCheckpoint, match=r"is damaged: .metadata does not match its checksum"
    ):
        at(bucket.url).read_range(20, ".metadata", 0, 1)
    [there] = (tmp_path / "back").iterdir()
    assert contents(there) == former


def test_a_checkpoint_of_the_first_version_is_pushed_and_fetched_whole(bucket, tmp_path):
    local = make_checkpoint(tmp_path, 20, sizes=SMALL)
    (local / "__0_0.distcp.xxh3").unlink()
    reseal(
        local,
        version=1,
        files=[
            {
                "path": name,
                "size_bytes": size_bytes,
                "xxh3_128": xxhash.xxh3_128_hexdigest((local / name).read_bytes()),
            }
            for name, size_bytes in SMALL.items()
        ],
    )
    remote = at(bucket.url)
    remote.push(local)
    assert contents(remote.fetch(20, tmp_path / "back")) == contents(local)
    with pytest.raises(
        CheckpointError, match=r"its files can be verified only whole. Fetch it instead"
    ):
        remote.read_range(20, ".metadata", 0, 1)
    remote.delete(20)
    (local / ".metadata").write_bytes(bytes(700))
    with pytest.raises(DamagedCheckpoint, match=r".metadata does not match its checksum"):
        remote.push(local)


def test_a_byte_that_changed_on_the_way_is_fetched_again(bucket, tmp_path, monkeypatch):
    local = make_checkpoint(tmp_path, 20)
    remote = at(bucket.url)
    remote.push(local)
    real, calls = object_store.Objects.read_range, []

    def wrong_once(self, path, offset, length):
        data = bytearray(real(self, path, offset, length))
        if path.endswith("__0_0.distcp"):
            calls.append(offset)
            data[0] ^= len(calls) == 1
        return memoryview(data)

    monkeypatch.setattr(object_store.Objects, "read_range", wrong_once)
    monkeypatch.setattr(remote_fetch, "PART_BYTES", PART_BYTES)
    assert contents(remote.fetch(20, tmp_path / "back")) == contents(local)
    assert len(calls) == 6


@pytest.mark.parametrize("path", ["../escaped", "/escaped", "a/../../escaped"])
def test_a_manifest_that_leads_out_of_its_folder_is_refused(bucket, tmp_path, path):
    local = make_checkpoint(tmp_path / "local", 20, sizes=SMALL)
    files = json.loads((local / MANIFEST_NAME).read_bytes())["files"]
    files[1]["path"] = path
    content = reseal(local, files=files)
    name = remote_name(20, content)
    change(bucket, f"{name}/{MANIFEST_NAME}", content)
    [found] = at(bucket.url).scan()
    assert found.state == "damaged"
    assert "outside of the checkpoint" in found.reason
    with pytest.raises(DamagedCheckpoint, match="outside of the checkpoint"):
        at(bucket.url).fetch(20, tmp_path / "back")
    with pytest.raises(DamagedCheckpoint, match="outside of the checkpoint"):
        at(bucket.url).push(local)
    assert not list(tmp_path.rglob("escaped"))


def test_a_manifest_that_was_exchanged_is_no_manifest(bucket, tmp_path):
    name = at(bucket.url).push(make_checkpoint(tmp_path / "a", 20, sizes=SMALL)).name
    other = make_checkpoint(tmp_path / "b", 20, seed=3)
    change(bucket, f"{name}/{MANIFEST_NAME}", (other / MANIFEST_NAME).read_bytes())
    [found] = at(bucket.url).scan()
    assert found.reason == "holdfast.json differs from the pushed one"


def test_a_full_disk_is_said_before_anything_is_fetched(url, tmp_path, monkeypatch):
    remote = at(url)
    remote.push(make_checkpoint(tmp_path, 20, sizes=SMALL))
    monkeypatch.setattr(remote_fetch.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(
        CheckpointError,
        match=rf"Step 20 has {sum(SMALL.values()):,} bytes, and .* has 1,000 free. ",
    ):
        remote.fetch(20, tmp_path / "back")
    assert list((tmp_path / "back").iterdir()) == []


def test_a_fetch_that_fails_to_write_leaves_nothing(url, tmp_path, monkeypatch):
    remote = at(url)
    remote.push(make_checkpoint(tmp_path, 20, sizes=SMALL))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(remote_fetch.os, "pwrite", full)
    with pytest.raises(
        CheckpointError, match=r"could not be written to .* \(No space left on device\). Free space"
    ):
        remote.fetch(20, tmp_path / "back")
    monkeypatch.undo()
    assert list((tmp_path / "back").iterdir()) == []


def test_no_more_is_sent_in_a_second_than_allowed(tmp_path, monkeypatch):
    monkeypatch.setattr(remote_push, "FILES_AT_ONCE", 1)
    (tmp_path / "archive").mkdir()
    clock = FakeClock()
    remote = at(f"file://{tmp_path}/archive", max_write_mib_s=2, clock=clock, sleep=clock.advance)
    remote.push(make_checkpoint(tmp_path, 20, sizes={"small": 4 << 20, "large": 9 << 20}))
    assert clock.monotonic_s() == 4.5, "the 9 MiB before the last 4 are through"
    with pytest.raises(BadUse, match="max_write_mib_s is 0"):
        at(f"file://{tmp_path}/archive", max_write_mib_s=0)


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        (
            "badkey",
            StorageFailed,
            r"refused the request \(InvalidAccessKeyId\). Check the credentials",
        ),
        ("denied", StorageFailed, r"refused the request \(AccessDenied\). Check the credentials"),
        (
            "no-such-bucket",
            NotFound,
            r"There is no bucket no-such-bucket .*Create it, or correct the URL",
        ),
        (
            "slow",
            StorageFailed,
            r"failed 3 times: .*503 Service Unavailable. Check that the storage can be reached",
        ),
    ],
)
def test_storage_that_refuses_is_one_sentence(moto, monkeypatch, tmp_path, name, error, said):
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto)
    remote = at(f"s3://{name}/runs", patience=BRIEF)
    local = make_checkpoint(tmp_path, 20, sizes=SMALL)
    for call in (
        remote.scan,
        lambda: remote.push(local),
        lambda: remote.fetch(20, tmp_path),
        lambda: remote.delete(20),
    ):
        with pytest.raises(error, match=said) as raised:
            call()
        assert "\n" not in str(raised.value)


def test_storage_that_is_not_there_is_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(
        StorageFailed,
        match=r"Listing in s3://bucket/x at http://127.0.0.1:1 failed 5 times: .*reached",
    ):
        at("s3://bucket/x").scan()
    with pytest.raises(NotFound, match=r"There is no folder /no/where on .* Make it or mount it"):
        at("file:///no/where")
    for url in ("ftp://host/x", "/tmp/x", "https://host/x"):
        with pytest.raises(
            BadUse, match=r"cannot be kept at .* begins with one of s3://, gs://, az://, file://"
        ):
            at(url)
    with pytest.raises(BadUse, match=r"is not a valid address for checkpoints: .*Correct it"):
        at("s3://")


def test_without_credentials_it_says_so():
    from obstore.exceptions import GenericError

    error = GenericError(
        "Generic S3 error: Error performing PUT http://169.254.169.254/latest/api/token in 1ms - no"
    )
    said = object_store._refusal("s3://bucket/x", error)
    assert "There are no credentials for s3://bucket/x in the environment" in str(said)


def test_without_obstore_it_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(BadUse, match=r"pip install 'holdfast\[remote\]'"):
        at("s3://bucket/x")


def test_it_needs_no_torch():
    program = (
        "import sys, holdfast.checkpoint.storage.remote;"
        " sys.exit(any(m in sys.modules for m in ('torch', 'obstore')))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_stock_pytorch_reads_what_was_pushed(s3, bucket, tmp_path):
    import fsspec
    import torch
    from torch.distributed.checkpoint import load, save
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    weights = torch.arange(1000, dtype=torch.float32)
    local = tmp_path / "step-0000000020"
    save({"model": {"weights": weights}}, checkpoint_id=local, no_dist=True)
    seal(local, 20)
    pushed = at(bucket.url).push(local)
    fsspec.config.conf["s3"] = {"endpoint_url": s3, "key": "key", "secret": "secret"}
    state = {"model": {"weights": torch.zeros(1000)}}
    try:
        load(state, storage_reader=FsspecReader(pushed.url), no_dist=True)
    finally:
        del fsspec.config.conf["s3"]
    assert torch.equal(state["model"]["weights"], weights)
