import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cluster_tasks import (
    OWNER_THAT_LINGERS,
    agent_command,
    agent_note,
    await_true,
    is_in_a_file,
    is_on_a_command_line,
    none_lives,
    started,
    states,
)

from holdfast.cluster import places
from holdfast.core.errors import BadUse

RUNNING = ("running", None)
SECRET = {"SECRET": "open-sesame"}


def test_each_place_has_its_number_the_secret_and_a_log_and_all_of_it_ends(tmp_path):
    notes, folder = tmp_path, tmp_path / "f"
    here = places("local", nodes=2)
    assert here.address_host() == "127.0.0.1"
    placement = here.start(agent_command(notes), environment=SECRET, folder=folder)
    try:
        pids = []
        for index in range(2):
            noted, secret = agent_note(notes, index)
            assert secret == "open-sesame"
            pids += noted
        assert states(placement) == [RUNNING, RUNNING]
        assert [place.index for place in placement.poll()] == [0, 1]
        assert not is_on_a_command_line("open-sesame")
        assert not is_in_a_file("open-sesame", folder)
        await_true(lambda: (folder / "place-1.log").read_text() == "agent 1 is here\n")
    finally:
        placement.stop()
    assert none_lives(pids)
    assert [state for state, _ in states(placement)] == ["ended", "ended"]
    placement.stop()


def test_a_killed_one_is_reported_and_started_again_while_the_other_goes_on(tmp_path):
    placement = places("local", nodes=2).start(
        agent_command(tmp_path), environment=SECRET, folder=tmp_path / "f"
    )
    try:
        (victim, child), _ = agent_note(tmp_path, 0)
        others, _ = agent_note(tmp_path, 1)
        assert not placement.restart(0), "it runs"
        os.kill(victim, signal.SIGKILL)
        await_true(lambda: states(placement) == [("ended", -signal.SIGKILL), RUNNING])
        assert none_lives([child]), "what it had started went on"
        assert placement.restart(0)
        again, _ = agent_note(tmp_path, 0)
        assert states(placement) == [RUNNING, RUNNING]
        assert victim not in again
        assert not none_lives(others[:1])
        await_true(lambda: (tmp_path / "f" / "place-0.log").read_text() == "agent 0 is here\n" * 2)
    finally:
        placement.stop()
    assert none_lives(again + others)


def test_one_that_ends_by_itself_is_reported_with_its_exit_code(tmp_path):
    (tmp_path / "end-0").write_text("7")
    placement = places("local", nodes=1).start(
        agent_command(tmp_path), environment=SECRET, folder=tmp_path / "f"
    )
    await_true(lambda: states(placement) == [("ended", 7)])
    placement.stop()


def test_nothing_outlives_an_owner_that_is_killed(tmp_path):
    script = (
        f"import sys, time; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from pathlib import Path\nfrom cluster_tasks import agent_command\nfrom holdfast.cluster import places\n"
        f"place = Path({str(tmp_path)!r})\n"
        "kept = places('local', nodes=2).start(agent_command(place), environment={'SECRET': 's'}, folder=place / 'f')\n"
        "time.sleep(600)"
    )
    with started([sys.executable, "-c", script], stderr=subprocess.DEVNULL) as owner:
        pids = agent_note(tmp_path, 0)[0] + agent_note(tmp_path, 1)[0]
        assert not none_lives(pids)
        owner.kill()
        owner.wait(timeout=90)
    await_true(lambda: none_lives(pids))


@pytest.mark.parametrize("dies", [True, False])
def test_with_a_linger_what_is_placed_outlives_a_killed_owner_but_no_stop(tmp_path, dies):
    argv = [sys.executable, "-c", OWNER_THAT_LINGERS, str(tmp_path), "local"]
    with started(argv, stdin=subprocess.PIPE) as owner:
        await_true((tmp_path / "pid").exists)
        await_true(lambda: (tmp_path / "pid").read_text() != "")
        pid = int((tmp_path / "pid").read_text())
        if dies:
            owner.kill()
        else:
            owner.stdin.close()
        owner.wait(timeout=90)
    await_true(lambda: none_lives([pid]))
    assert (tmp_path / "ended").exists() == dies


def test_choosing_places(monkeypatch, tmp_path):
    with pytest.raises(BadUse, match="Choose one of local, slurm, ray"):
        places("pbs", nodes=1)
    with pytest.raises(BadUse, match="0 nodes"):
        places("local", nodes=0)
    with pytest.raises(BadUse, match="-1 GPUs"):
        places("local", nodes=1, gpus_per_node=-1)
    with pytest.raises(BadUse, match="choose slurm"):
        places("local", nodes=1, sbatch_options=["--partition=x"])
    with pytest.raises(BadUse, match="no command"):
        places("local", nodes=1).start([], environment={}, folder=tmp_path)
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(BadUse, match="There is no sbatch on this machine"):
        places("slurm", nodes=1)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(BadUse, match=r"pip install 'holdfast\[ray\]'"):
        places("ray", nodes=1)
