"""Test the end of a pod: exit codes that a Job can act on, and a line of at most 4 KiB."""

import pytest

from holdfast.cluster.kubernetes_pod import PodUnavailable, end_of_pod, ends_pod
from holdfast.core.errors import BadUse, HoldfastError, LedgerError


@pytest.fixture
def message(tmp_path, monkeypatch):
    """Return the file for the termination message, in a pod."""
    path = tmp_path / "termination-log"
    path.touch()
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("HOLDFAST_TERMINATION_LOG", str(path))
    return path


@pytest.mark.parametrize(
    ("code", "sentence", "line"),
    [
        (0, "The job completed.", "holdfast class=completed code=0: The job completed."),
        (1, "It\nfailed.", "holdfast class=failed code=1: It failed."),
        (3, "Spent.", "holdfast class=budget-spent code=3: Spent."),
        (4, "Stopped by `holdfast runs stop`.", None),
        (4, "Stopped by SIGTERM.", "holdfast class=again code=143: Stopped by SIGTERM."),
    ],
)
def test_the_code_and_the_message_name_the_class(message, code, sentence, line):
    line = line or "holdfast class=stopped code=4: Stopped by `holdfast runs stop`."
    assert f"code={end_of_pod(code, sentence)}:" in line
    assert message.read_text() == line


def test_a_long_message_is_cut_and_none_is_written_where_nobody_reads(message):
    end_of_pod(1, "ä" * 5000)
    assert message.stat().st_size == 4096
    message.unlink()
    assert end_of_pod(1, "x") == 1
    assert not message.exists()


def test_outside_a_pod_nothing_changes(tmp_path):
    assert end_of_pod(4, "Stopped by SIGTERM.", {"HOLDFAST_TERMINATION_LOG": "/x"}) == 4
    in_slurm = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "SLURM_JOB_ID": "7"}
    assert end_of_pod(4, "Stopped by SIGTERM.", in_slurm) == 4
    with pytest.raises(LedgerError, match="locked"):
        _failing(LedgerError("locked"))()


def _failing(error):
    @ends_pod
    def command():
        raise error

    return command


@pytest.mark.parametrize("error", [LedgerError("locked"), HoldfastError("gone"), OSError(5, "I/O")])
def test_what_may_pass_starts_the_pod_again(message, error):
    with pytest.raises(PodUnavailable) as raised:
        _failing(error)()
    assert raised.value.exit_code == 75
    assert message.read_text().startswith("holdfast class=unavailable code=75: ")


def test_wrong_use_stays_wrong_use(message):
    with pytest.raises(BadUse) as raised:
        _failing(BadUse("no such file"))()
    assert raised.value.exit_code == 2
    assert message.read_text() == "holdfast class=misuse code=2: no such file"
