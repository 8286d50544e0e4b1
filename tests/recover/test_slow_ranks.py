"""A real run with a rank for which the others wait."""

SLOW = """
import os, pathlib, time
import torch
import torch.distributed as dist
import holdfast

run = holdfast.attach()
dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
over = torch.zeros(1)
step = 0
while not over:
    step += 1
    time.sleep(0.05)
    if rank == 1 and not pathlib.Path("well").exists():
        time.sleep(0.15)
    model(torch.ones(2, 4)).sum().backward()
    over.fill_(pathlib.Path("finish").exists())
    dist.broadcast(over, 0)
    run.step(step)
dist.destroy_process_group()
"""


def test_a_slow_rank_is_named_while_it_is_slow(place):
    job = place.ranks(2, place.job(SLOW))
    with place.start("run", "--name", "r", "--", *job) as run:
        place.wait_for_step("r", 1)

        def reports():
            with place.ledger() as ledger:
                events = [event for event in ledger.events("r") if event.kind == "slow_ranks"]
            return [list(event.data["shares"]) for event in events]

        place.wait_until(lambda: ["1"] in reports())
        (place.folder / "well").touch()
        place.wait_until(lambda: reports()[-1] == [])
        (place.folder / "finish").touch()
        _, err = run.communicate(timeout=240)
    assert run.returncode == 0, err
    assert "Rank 1 is slow: the others wait for it for " in err
    assert "No rank is slow any more." in err
    with place.ledger() as ledger:
        assert ledger.incidents("r") == []
