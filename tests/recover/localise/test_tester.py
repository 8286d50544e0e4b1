"""Real checks and real group tests on this host, each in processes that may hang."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from holdfast.core.processes import module_command
from holdfast.core.sockets import free_ports
from holdfast.recover.localise import solo
from holdfast.recover.localise import tester as tester_module
from holdfast.recover.localise.group import GroupOrder
from holdfast.recover.localise.tester import NodeTester
from holdfast.recover.localise.worker import PRODUCT

LONG_S = 300.0


def with_testers(count, scenario):
    async def run():
        testers = [NodeTester() for _ in range(count)]
        try:
            return await scenario(*testers)
        finally:
            for tester in testers:
                await tester.ended()

    return asyncio.run(run())


def orders(count, port=None):
    port = port or free_ports(1)[0]
    return [
        GroupOrder(rank=rank, world_size=count, address="127.0.0.1", port=port)
        for rank in range(count)
    ]


@pytest.mark.parametrize("name", solo.CHECKS)
def test_checks_of_a_healthy_node_pass_and_leave_no_file(name, tmp_path):
    result = solo.checked(name, solo.CHECKS[name], tmp_path)
    assert (result.name, result.outcome) == (name, "passed"), result.evidence
    assert list(tmp_path.iterdir()) == []
    assert not list(Path("/dev/shm").glob(f"holdfast-check-{os.getpid()}"))
    assert solo.CheckResult.from_json(result.to_json()) == result


def test_a_product_is_compared_with_integers_bit_for_bit(monkeypatch):
    assert solo.checked("p", solo.matrix_product, Path()).outcome == "passed"
    torch = pytest.importorskip("torch")
    right = torch.matmul

    def wrong(one, other):
        product = right(one, other)
        product[3, 5] += 1
        return product

    monkeypatch.setattr(torch, "matmul", wrong)
    result = solo.checked("p", solo.matrix_product, Path())
    assert result.outcome == "failed"
    assert "1 of 246016 elements are wrong on cpu" in result.evidence


def test_what_cannot_be_looked_at_is_no_failure(tmp_path, monkeypatch):
    result = solo.checked("disk", solo.disk, tmp_path / "gone")
    assert result.outcome == "not looked at"
    monkeypatch.setitem(sys.modules, "torch", None)
    result = solo.checked("product", solo.matrix_product, tmp_path)
    assert (result.outcome, result.evidence) == ("not looked at", "torch is not installed here")


def test_a_disk_that_gives_back_other_bytes_has_failed(tmp_path, monkeypatch):
    whole = Path.open

    @contextlib.contextmanager
    def flipped(path, mode):
        if mode == "rb":
            with whole(path, "r+b") as file:
                file.write(b"\x00\x01\x02")
        with whole(path, mode) as file:
            yield file

    monkeypatch.setattr(Path, "open", flipped)
    result = solo.checked("disk", solo.disk, tmp_path)
    assert result.outcome == "failed"
    assert "other bytes" in result.evidence


def test_memory_that_holds_other_bytes_has_failed():
    class Stuck(bytearray):
        def __getitem__(self, index):
            return b"\x00" + super().__getitem__(index)[1:]

    with pytest.raises(solo.Broken, match="other bytes than were written, at MiB 0"):
        solo._write_and_read(Stuck(2 * solo.MIB), 2 * solo.MIB, "memory")


def test_a_check_that_hangs_or_dies_fails_and_is_killed():
    async def scenario(tester):
        hung = await tester.check("memory", limit_s=0.0)
        died = await tester.check("no such check", limit_s=LONG_S)
        return hung, died

    hung, died = with_testers(1, scenario)
    assert (hung.outcome, hung.evidence) == ("failed", "no answer within 0 s")
    assert hung.is_slow
    assert not died.is_slow
    assert (died.outcome, died.evidence) == (
        "failed",
        "the check ended with code 1 and no result",
    )
    assert not [one for one in psutil.Process().children() if "solo" in " ".join(one.cmdline())]


def test_a_check_that_is_slow_once_is_repeated(monkeypatch):
    async def scenario(tester):
        limits_s = iter((0.0, LONG_S))
        checked = tester._checked
        monkeypatch.setattr(
            tester, "_checked", lambda name, _, module: checked(name, next(limits_s), module)
        )
        return await tester.check("memory", limit_s=1.0)

    result = with_testers(1, scenario)
    assert (result.outcome, result.is_slow) == ("passed", False), result.evidence


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ("CUDA out of memory. Tried to allocate 2 GiB", "not looked at"),
        ("CUDA error: CUDA-capable device(s) is/are busy or unavailable", "not looked at"),
        ("CUDA error: no kernel image is available for execution on the device", "not looked at"),
        ("CUDA error: uncorrectable ECC error encountered", "failed"),
    ],
)
def test_an_occupied_gpu_is_not_a_broken_one(tmp_path, text, outcome):
    def refuse(_):
        raise RuntimeError(text)

    assert solo.checked("matrix product", refuse, tmp_path).outcome == outcome


def worker_says(order, folder, *, printed_at):
    """Run a worker's order while a library prints to standard output; torch cannot be imported.

    Return the worker's output.
    """
    (folder / "sitecustomize.py").write_text(
        "import os, sys\nsys.modules['torch'] = None\n"
        f"if any('worker' in one for one in sys.orig_argv):\n    {printed_at}\n"
    )
    words, environment = module_command("holdfast.recover.localise.worker")
    paths = [str(folder), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    done = subprocess.run(
        [*words, str(os.getpid())],
        check=True,
        input=json.dumps(order).encode() + b"\n",
        capture_output=True,
        env=environment,
        timeout=LONG_S,
    )
    return done.stdout


def test_what_a_library_prints_in_a_test_is_no_answer(tmp_path):
    order = {"what": PRODUCT, "limit_s": LONG_S}
    chatty = "print('hello', flush=True); os.register_at_fork(after_in_child=lambda: os.write(1, b'NCCL version 2\\n'))"
    said = worker_says(order, tmp_path, printed_at=chatty).splitlines()
    *_, ready, answer = said
    assert (len(said), ready) == (3, b"ready")
    assert json.loads(answer)["evidence"] == "torch is not installed here"


def test_an_answer_that_is_not_json_says_nothing_of_the_node(monkeypatch):
    garbled = (
        "print('hello'); print('ready', flush=True); input(); "
        "print('NCCL version 2', flush=True); input()"
    )

    async def start(*_):
        return await asyncio.create_subprocess_exec(
            sys.executable, "-c", garbled, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    monkeypatch.setattr(tester_module, "_start", start)

    async def scenario(tester):
        return await tester.group(orders(1)[0]), await tester.product(limit_s=LONG_S)

    group, product = with_testers(1, scenario)
    assert (group.passed, product.outcome) == (None, "not looked at")


@pytest.mark.slow
def test_tests_of_nodes_pass_and_fail_for_real(startup, monkeypatch):
    """Three nodes; then one that hangs, one that is killed, and an address that does not answer."""
    paths = [str(startup()), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    monkeypatch.setattr(tester_module, "START_S", LONG_S)

    async def scenario(first, second, third):
        testers = (first, second, third)

        async def together(members, *, limit_s=LONG_S):
            asked = zip(members, orders(len(members)), strict=True)
            return await asyncio.gather(
                *(one.group(order, limit_s=limit_s) for one, order in asked)
            )

        checks = await first.solo(limit_s=LONG_S)
        assert {one.name: one.outcome for one in checks} == dict.fromkeys(
            ("matrix product", "memory", "disk", "shared memory"), "passed"
        ), checks
        results = await together(testers)
        assert [one.passed for one in results] == [True] * 3, results
        assert all(one.mb_per_s > 0 for one in results)
        # The worker of the second node is stopped: neither it nor its partner passes.
        os.kill(second._worker.pid, signal.SIGSTOP)
        results = await together((first, second), limit_s=1.0)
        assert [one.passed for one in results] == [False, False]
        assert results[0].reason
        # Both nodes serve the next test all the same.
        results = await together((first, second))
        assert [one.passed for one in results] == [True, True], results
        third._worker.kill()
        results = await together((third, first), limit_s=1.0)
        assert results[0].passed is False
        assert results[0].reason == "the test process gave no answer"
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))  # it does not listen
            _, lone = orders(2, silent.getsockname()[1])
            assert (await first.group(lone, limit_s=1.0)).passed is False

    with_testers(3, scenario)
