import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.checkpoint.format.checksums import (
    BLOCK_BYTES,
    DIGEST_BYTES,
    SIDECAR_SUFFIX,
    check_file,
    checksum_of_digests,
    digests_of,
    file_digests,
    read_sidecar,
    whole_checksum,
)

CHUNK = 4 << 20
SIZES = [
    0,
    1,
    BLOCK_BYTES - 1,
    BLOCK_BYTES,
    BLOCK_BYTES + 1,
    CHUNK - 1,
    CHUNK,
    CHUNK + 1,
    2 * CHUNK + 7,
]


def content_of(size_bytes):
    return bytes(range(251)) * (size_bytes // 251) + bytes(size_bytes % 251)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "file"


@settings(deadline=None)
@given(st.integers(0, 4 * BLOCK_BYTES))
def test_each_block_has_the_digest_that_xxhash_gives_it(size_bytes):
    data = content_of(size_bytes)
    digests = digests_of(memoryview(data))
    expected = [data[at : at + BLOCK_BYTES] for at in range(0, size_bytes, BLOCK_BYTES)]
    assert len(digests) == DIGEST_BYTES * len(expected)
    for number, block in enumerate(expected):
        found = digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
        assert found[::-1].hex() == xxhash.xxh3_64_hexdigest(block)


@pytest.mark.parametrize("size_bytes", SIZES)
def test_a_file_has_the_digests_of_its_bytes_and_all_of_it_is_told(file, size_bytes):
    data = content_of(size_bytes)
    file.write_bytes(data)
    told = []
    digests = file_digests(file, size_bytes, told.append)
    assert digests == digests_of(memoryview(data))
    assert sum(told) == size_bytes
    assert check_file(file, size_bytes, checksum_of_digests(digests))
    assert check_file(file, size_bytes, whole_checksum(xxhash.xxh3_128_hexdigest(data)))


@pytest.mark.parametrize("at", [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, CHUNK - 1, CHUNK, CHUNK + 4999])
@pytest.mark.parametrize("bit", [1, 128])
def test_one_flipped_bit_is_found(file, at, bit):
    data = bytearray(content_of(CHUNK + 5000))
    checksums = [
        checksum_of_digests(digests_of(memoryview(data))),
        whole_checksum(xxhash.xxh3_128_hexdigest(data)),
    ]
    data[at] ^= bit
    file.write_bytes(data)
    for checksum in checksums:
        assert not check_file(file, len(data), checksum)


def test_two_blocks_that_changed_places_are_found(file):
    data = content_of(2 * BLOCK_BYTES)
    checksum = checksum_of_digests(digests_of(memoryview(data)))
    file.write_bytes(data[BLOCK_BYTES:] + data[:BLOCK_BYTES])
    assert not check_file(file, len(data), checksum)


def test_a_file_that_is_too_short_is_wrong_and_said_to_be(file):
    data = content_of(BLOCK_BYTES + 5)
    checksum = checksum_of_digests(digests_of(memoryview(data)))
    file.write_bytes(data[:-1])
    assert not check_file(file, len(data), checksum)
    with pytest.raises(EOFError):
        file_digests(file, len(data))


def test_a_checksum_of_no_known_form_is_no_success(file):
    file.write_bytes(b"")
    for checksum in ("", "md5:0", "xxh3_128/1:0"):
        with pytest.raises(ValueError, match="unknown kind of checksum"):
            check_file(file, 0, checksum)


def test_the_block_size_is_part_of_the_checksum():
    assert checksum_of_digests(b"").startswith(f"xxh3_128/{BLOCK_BYTES}:")


def test_a_sidecar_counts_only_if_it_is_what_the_checksum_was_taken_of(file):
    digests = digests_of(memoryview(content_of(3 * BLOCK_BYTES)))
    checksum = checksum_of_digests(digests)
    assert read_sidecar(file, checksum) is None
    sidecar = file.with_name(file.name + SIDECAR_SUFFIX)
    sidecar.write_bytes(digests)
    assert read_sidecar(file, checksum) == digests
    sidecar.write_bytes(digests[:-1] + bytes([digests[-1] ^ 1]))
    assert read_sidecar(file, checksum) is None
