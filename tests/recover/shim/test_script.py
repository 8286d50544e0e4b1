"""A script in a process of Holdfast behaves as in a separate interpreter."""

import subprocess
import sys

import pytest

from holdfast.recover.shim.script import Script

RUN = """
import sys
from holdfast.recover.shim.script import Script
Script.of_command(sys.argv[1:]).run()
"""

SCRIPTS = {
    "facts": """
        "Its words."
        import sys
        print(sys.argv, __name__, __file__, __package__, __doc__, __spec__ is None, sys.path[0])
        print(sys.modules["__main__"].__dict__ is globals(), len([1]), input.__module__)
        """,
    "neighbour": "import beside; print(beside.WORD)",
    "an error": """
        def divide(number):
            return number / 0

        try:
            {}["left out"]
        except KeyError:
            divide(1)
        """,
    "a syntax error": "print('never')\nfor",
    "a code": "import sys; sys.exit(3)",
    "words": "import sys; sys.exit('it ends here')",
    "a signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "Ctrl-C": "raise KeyboardInterrupt",
    "spawned": """
        import multiprocessing

        def double(number):
            return 2 * number

        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(double, [21]))
        """,
    "the end": """
        import atexit, threading, time
        atexit.register(lambda: print("last", WORD))
        threading.Thread(target=lambda: (time.sleep(0.1), print("thread", WORD))).start()
        WORD = "word"
        """,
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "beside.py").write_text("WORD = 'found'")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "part.py").write_text(
        "import sys; print(sys.argv, __name__, __package__, __spec__.name, sys.path[0])"
    )
    return tmp_path


def plainly(folder, *words):
    return ended(folder, sys.executable, *words)


def in_a_process_of_ours(folder, *words):
    return ended(folder, sys.executable, "-P", "-c", RUN, sys.executable, *words)


def ended(folder, *command):
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=240, check=False
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("text", SCRIPTS.values(), ids=SCRIPTS)
def test_a_script_runs_as_in_an_interpreter_of_its_own(folder, text):
    lines = text.strip("\n").splitlines()
    indent = len(lines[0]) - len(lines[0].lstrip())
    (folder / "job.py").write_text("\n".join(line[indent:] for line in lines))
    words = ("job.py", "--steps", "3")
    assert in_a_process_of_ours(folder, *words) == plainly(folder, *words)


@pytest.mark.parametrize(
    "words",
    [("-u", "-m", "package.part", "one"), ("-m", "beside"), ("-m", "missing"), ("package",)],
    ids=" ".join,
)
def test_modules_and_folders_run_too(folder, words):
    (folder / "package" / "__main__.py").write_text("import sys; print(sys.argv, __name__)")
    code, out, err = in_a_process_of_ours(folder, *words)
    expected_code, expected_out, expected_err = plainly(folder, *words)
    assert (code, out) == (expected_code, expected_out)
    assert err.splitlines()[-1:] == [
        line.replace(f"{sys.executable}: ", "ImportError: ")
        for line in expected_err.splitlines()[-1:]
    ]


@pytest.mark.parametrize(
    "command",
    [
        ["bash", "train.sh"],
        ["/usr/bin/env", "train.py"],
        [sys.executable, "-c", "print(1)"],
        [sys.executable, "-O", "train.py"],
        [sys.executable, "-u"],
        ["gone/python", "train.py"],
    ],
    ids=" ".join,
)
def test_other_commands_are_not_scripts_of_this_interpreter(command):
    assert Script.of_command(command) is None


@pytest.mark.parametrize(
    ("name", "hides"),
    [
        ("queue.py", True),
        ("json/__init__.py", True),
        ("logging/run.log", False),
        ("beside.py", False),
    ],
)
def test_a_name_of_the_standard_library_beside_the_script_needs_a_new_interpreter(
    tmp_path, name, hides
):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    command = [sys.executable, str(tmp_path / "train.py")]
    assert (Script.of_command(command) is None) is hides


def test_a_script_passes_through_json():
    script = Script.of_command([sys.executable, "-u", "train.py", "--steps", "3"])
    assert script == Script(target="train.py", is_module=False, arguments=("--steps", "3"))
    assert Script.from_json(script.to_json()) == script


STORE = """
import os
from holdfast.recover.shim.script import give_store_prefix
{before}
give_store_prefix("holdfast/2")
import torch.distributed as dist

launchers = dist.TCPStore("localhost", 0, is_master=True)
launchers.set("default_pg/0//cpu//rank_0", "an address of a dead rank")
os.environ |= {{
    "MASTER_ADDR": "localhost", "MASTER_PORT": str(launchers.port), "RANK": "0", "WORLD_SIZE": "1",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}}
dist.init_process_group("gloo")
dist.barrier()
dist.distributed_c10d._get_default_store().set("key", "value")
print(launchers.check(["holdfast/2/default_pg/0//key"]) or launchers.check(["holdfast/2/default_pg/key"]))
dist.destroy_process_group()
"""


@pytest.mark.parametrize("before", ["", "import torch.distributed"], ids=["later", "before"])
def test_the_process_group_has_keys_of_its_own_whenever_torch_is_imported(tmp_path, before):
    code, out, err = ended(tmp_path, sys.executable, "-c", STORE.format(before=before))
    assert (code, out.strip()) == (0, "True"), err
