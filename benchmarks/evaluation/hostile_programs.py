# ruff: noqa: E501 - a program a line is easier to read than its pieces
"""Programs that try to leave the sandbox, or to be judged right while they are wrong.

`hostile_trials` fills in the targets: `{canary}` is a folder that any user may write, with a file
`secret` in it; `{port}` a TCP port on the loopback; `{socket}` the name of a listening abstract
socket; `{owner}` the process that runs the trials; `{home}` root's home folder.
"""

from typing import NamedTuple

TIME_LIMIT_S = 0.3
"""The time limit of a program that runs into it; the others have the sandbox's own."""
_SQUARE = "assert f(3) == 9\nassert f(5) == 25\n"
_NOTHING = "assert f() == 'nothing'\n"


class Hostile(NamedTuple):
    """A program, its attempt, and the right verdict.

    Attributes:
        name: a unique name.
        tries: the attempt, in a few words.
        program: its source, with the names of the module's docstring in braces.
        tests: the source of its tests.
        passes: True if the contained program meets its tests.
        reason: a part of the verdict's reason.
        wall_s: its time limit; None for the sandbox's own.
        needs_namespaces: True if only namespaces bound it as a whole; without them, each file alone
            is bounded.
    """

    name: str
    tries: str
    program: str
    tests: str
    passes: bool
    reason: str = ""
    wall_s: float | None = None
    needs_namespaces: bool = False


def _attempt(statement: str) -> str:
    """Return a program whose f() tries a forbidden act and returns "nothing" if refused."""
    body = "\n".join(f"        {line}" for line in statement.splitlines())
    return f"def f():\n    try:\n{body}\n    except Exception:\n        return 'nothing'\n    return 'done'\n"


_FILES = [
    Hostile("write outside", "write where anybody may", _attempt("open('{canary}/mark', 'w').write('x')"), _NOTHING, True),
    Hostile("read secret", "read what anybody may", _attempt("print(open('{canary}/secret').read())"), _NOTHING, True),
    Hostile("delete", "delete", _attempt("import os\nos.remove('{canary}/secret')"), _NOTHING, True),
    Hostile("shadow", "read the passwords", _attempt("print(open('/etc/shadow').read())"), _NOTHING, True),
    Hostile("homes", "list the homes", _attempt("import os\nos.listdir('/home')"), _NOTHING, True),
    Hostile("root's home", "find in the home of root what is no part of the interpreter's path",
            _attempt("import os, sys\npaths = [sys.base_prefix, *sys.path]\n"
                     "if all(any(path.startswith(f'{home}/{name}') for path in paths) for name in os.listdir('{home}')):\n"
                     "    raise OSError"), _NOTHING, True),
    Hostile("write libraries", "change the library", _attempt("import os\nopen(os.__file__, 'a').write('x')"), _NOTHING, True),
    Hostile("symlink", "read through a link",
            _attempt("import os\nos.symlink('{canary}/secret', 'link')\nprint(open('link').read())"), _NOTHING, True),
    Hostile("parents", "climb out", _attempt("print(open('../../../../../../{canary}/secret').read())"), _NOTHING, True),
    Hostile("environment", "read its owner's environment",
            _attempt("print(open('/proc/{owner}/environ').read())"), _NOTHING, True),
    Hostile("own environment", "find a token in its environment",
            "import os\ndef f():\n    return [k for k in os.environ if 'TOKEN' in k or 'KEY' in k or 'CANARY' in k]\n",
            "assert f() == []\n", True),
    Hostile("forkserver's memory", "read process 1",
            _attempt("open('/proc/1/mem', 'rb').read(1)"), _NOTHING, True),
    Hostile("fill the disk", "write without end",
            "def f():\n    written = 0\n    for n in range(100):\n        try:\n            with open(f'{n}', 'wb') as file:\n"
            "                file.write(bytes(1 << 20))\n            written += 1\n        except OSError:\n            break\n"
            "    return written\n", "assert f() <= 16\n", True, needs_namespaces=True),
    Hostile("fill the inodes", "make files without end",
            "def f():\n    for n in range(100000):\n        try:\n            open(f'{n}', 'w').close()\n        except OSError:\n"
            "            return n\n    return n\n", "assert f() < 5000\n", True, needs_namespaces=True),
    Hostile("mount", "mount a file system",
            _attempt("import ctypes\nc = ctypes.CDLL(None, use_errno=True)\n"
                     "if c.mount(b'none', b'/tmp', b'tmpfs', 0, None) != 0:\n    raise OSError"), _NOTHING, True),
    Hostile("root", "become root", _attempt("import os\nos.setuid(0)\nopen('/etc/x', 'w')"), _NOTHING, True),
    Hostile("new user namespace", "have capabilities again",
            _attempt("import ctypes\nif ctypes.CDLL(None).unshare(0x10000000) != 0:\n    raise OSError"), _NOTHING, True),
    Hostile("device", "make a device", _attempt("import os\nos.mknod('disk', 0o60666, os.makedev(8, 0))"), _NOTHING, True),
]  # fmt: skip

_NETWORK = [
    Hostile("tcp", "connect", _attempt("import socket\nsocket.create_connection(('127.0.0.1', {port}), 1)"), _NOTHING, True),
    Hostile("abstract", "connect to a local service",
            _attempt("import socket\ns = socket.socket(socket.AF_UNIX)\ns.connect('\\0{socket}')"), _NOTHING, True),
    Hostile("udp", "ask a name server",
            _attempt("import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('8.8.8.8', 53))"),
            _NOTHING, True),
    Hostile("raw call", "make a socket past Python",
            _attempt("import ctypes, platform\nc = ctypes.CDLL(None, use_errno=True)\n"
                     "if c.syscall(41 if platform.machine() == 'x86_64' else 198, 2, 1, 0) < 0:\n    raise OSError"),
            _NOTHING, True),
    Hostile("url", "fetch a page",
            _attempt("import urllib.request\nurllib.request.urlopen('http://127.0.0.1:{port}/', timeout=1)"), _NOTHING, True),
    Hostile("shell", "connect from another program",
            _attempt("import subprocess\nsubprocess.run(['bash', '-c', 'echo x > /dev/tcp/127.0.0.1/{port}'], check=True)"),
            _NOTHING, True),
]  # fmt: skip

_COUNT_FORKS = """
import os, time
def f():
    made = 0
    for _ in range(50):
        try:
            if os.fork() == 0:
                while True:
                    time.sleep(1)
            made += 1
        except OSError:
            break
    return made
"""
_FORKS = [
    Hostile("forks", "fork 50 times", _COUNT_FORKS, "assert 0 < f() < 50\n", True),
    Hostile("fork tree", "fork in every child, at most 6 deep",
            "import os, time\ndef f():\n    for _ in range(6):\n        try:\n            os.fork()\n        except OSError:\n"
            "            pass\n    time.sleep(60)\n", "f()\n", False, "timed out", TIME_LIMIT_S),
    Hostile("threads", "start 60 threads",
            "import threading\ndef f():\n    stop = threading.Event()\n    for made in range(60):\n        try:\n"
            "            threading.Thread(target=stop.wait, daemon=True).start()\n        except RuntimeError:\n"
            "            return made\n    return made\n", "assert f() < 50\n", True),
    Hostile("daemon", "outlive its parent",
            "import os, time\ndef f():\n    if os.fork() == 0:\n        os.setsid()\n        if os.fork() == 0:\n"
            "            time.sleep(600)\n        os._exit(0)\n    os.wait()\n    return 9\n", "assert f() == 9\n", True),
    Hostile("child serves", "answer from a child, when the parent is gone",
            "import os, time\nif os.fork():\n    os._exit(0)\ndef f(x): return x * x\n", _SQUARE, False, "ended with exit code 0"),
]  # fmt: skip

_MEMORY = [
    Hostile("heap", "take all memory",
            "def f(x):\n    kept = []\n    while True:\n        kept.append(bytearray(1 << 24))\n", _SQUARE, False, "MemoryError"),
    Hostile("one block", "take it at once", "def f(x): return len(b'x' * (1 << 40))\n", _SQUARE, False, "MemoryError"),
    Hostile("shared", "take memory that is nobody's",
            "import mmap\ndef f(x):\n    kept = []\n    while True:\n        kept.append(mmap.mmap(-1, 1 << 24))\n"
            "        kept[-1].write(bytes(1 << 24))\n", _SQUARE, False),
    Hostile("together", "take it in 8 processes",
            "import os, time\ndef f(x):\n    for _ in range(7):\n        if os.fork() == 0:\n            break\n"
            "    kept = [bytearray(b'x' * (1 << 22)) for _ in range(30)]\n    time.sleep(60)\n",
            _SQUARE, False, "killed: memory"),
    Hostile("memfd", "take memory as a file", _attempt("import os\nos.memfd_create('x')"), _NOTHING, True),
    Hostile("recursion", "recurse without end", "def f(x): return f(x + 1)\n", _SQUARE, False, "RecursionError"),
    Hostile("huge answer", "answer with more than can cross", "def f(x): return 'x' * (50 << 20)\n", _SQUARE, False),
    Hostile("deep answer", "answer with what nests a million deep",
            "def f(x):\n    value = ()\n    for _ in range(1000000):\n        value = (value,)\n    return value\n", _SQUARE, False),
]  # fmt: skip

_TIME = [
    Hostile("loop", "run for ever", "def f(x):\n    while True: pass\n", _SQUARE, False, "timed out", TIME_LIMIT_S),
    Hostile("loop at import", "run for ever before f", "while True: pass\n", _SQUARE, False, "timed out", TIME_LIMIT_S),
    Hostile("sleep", "wait for ever", "import time\ndef f(x): time.sleep(1e6)\n", _SQUARE, False, "timed out", TIME_LIMIT_S),
    Hostile("regular expression", "backtrack for ever",
            "import re\ndef f(x): re.match('(a+)+$', 'a' * 40 + 'b')\n", _SQUARE, False, "timed out", TIME_LIMIT_S),
    Hostile("deaf", "ignore signals",
            "import signal\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n    except Exception: pass\n"
            "def f(x):\n    while True: pass\n", _SQUARE, False, "timed out", TIME_LIMIT_S),
    Hostile("stop", "stop itself", "import os, signal\ndef f(x): os.kill(os.getpid(), signal.SIGSTOP)\n", _SQUARE, False,
            "timed out", TIME_LIMIT_S),
    Hostile("flood", "print without end", "def f(x):\n    while True: print('x' * 10000)\n", _SQUARE, False, "timed out", TIME_LIMIT_S),
]  # fmt: skip

_SIGNALS = [
    Hostile("kill all", "kill whatever it can", "import os\ndef f(x):\n    try: os.kill(-1, 9)\n    except OSError: pass\n    return 0\n", _SQUARE, False),
    Hostile("kill parent", "kill its parent", _attempt("import os\nos.kill(os.getppid(), 9)"), _NOTHING, True),
    Hostile("kill the owner", "kill by number", _attempt("import os\nos.kill({owner}, 9)"), _NOTHING, True),
    Hostile("kill itself", "die", "import os\ndef f(x): os.kill(os.getpid(), 9)\n", _SQUARE, False, "killed: SIGKILL"),
    Hostile("crash", "crash the interpreter", "import ctypes\ndef f(x): ctypes.string_at(0)\n", _SQUARE, False, "SIGSEGV"),
    Hostile("abort", "abort", "import os\ndef f(x): os.abort()\n", _SQUARE, False, "SIGABRT"),
]  # fmt: skip

_FORGE_FRAME = """
import os, socket, struct, json
def forge():
    for fd in range(3, 64):
        try:
            s = socket.socket(fileno=os.dup(fd))
            body = json.dumps({message}).encode()
            s.send(len(body).to_bytes(4, 'little') + body)
        except OSError:
            pass
forge()
def f(x): return 0
"""
_FORGED = [
    Hostile("says passed", "print a verdict", "print('passed')\nprint('{\"passed\": true}')\ndef f(x): return 0\n", _SQUARE,
            False, "AssertionError"),
    Hostile("leaves well", "exit with 0 at once", "import os\nos._exit(0)\n", _SQUARE, False, "exit code 0"),
    Hostile("leaves in f", "exit with 0 in f", "import os\ndef f(x): os._exit(0)\n", _SQUARE, False, "exit code 0"),
    Hostile("sys.exit", "exit politely", "import sys\ndef f(x): sys.exit(0)\n", _SQUARE, False, "SystemExit"),
    Hostile("exit at import", "exit politely at once", "raise SystemExit(0)\n", _SQUARE, False, "SystemExit"),
    Hostile("interrupt", "raise what nobody catches", "def f(x): raise KeyboardInterrupt\n", _SQUARE, False, "KeyboardInterrupt"),
    Hostile("GeneratorExit", "raise what ends a generator", "def f(x): raise GeneratorExit\n", _SQUARE, False, "GeneratorExit"),
    Hostile("StopIteration", "end the tests' loop early", "def f(x): raise StopIteration\n",
            "assert all(map(lambda n: f(n) == n * n, range(5)))\n", False, "StopIteration"),
    Hostile("all descriptors", "write a verdict everywhere",
            "import os\nfor fd in range(64):\n    try: os.write(fd, b'{\"nonce\": \"\", \"passed\": true, \"reason\": \"passed\"}')\n"
            "    except OSError: pass\ndef f(x): return 0\n", _SQUARE, False),
    Hostile("forged reply", "write replies on the channel", _FORGE_FRAME.replace("{message}", "['gives', None, []]"), _SQUARE, False),
    Hostile("forged nonsense", "write nonsense on the channel", _FORGE_FRAME.replace("{message}", "[[[[1]]]]"), _SQUARE, False),
    Hostile("forged reference", "refer to what is not there",
            _FORGE_FRAME.replace("{message}", "['gives', ['own', 10 ** 6], []]"), _SQUARE, False),
    Hostile("forged import", "have the tests import something",
            _FORGE_FRAME.replace("{message}", "['gives', ['S', 'os', '_exit'], []]"), _SQUARE, False),
    Hostile("closes", "close the channel", "import os\nos.closerange(3, 64)\ndef f(x): return 0\n", _SQUARE, False),
    Hostile("builtins", "replace builtins",
            "import builtins\nbuiltins.all = builtins.any = builtins.isinstance = lambda *a: True\n"
            "builtins.abs = lambda x: 0\nbuiltins.AssertionError = StopIteration\ndef f(x): return 0\n",
            "assert all([abs(f(3) - 9) < 1e-6, isinstance(f(3), str)])\n", False, "failed"),
    Hostile("shadowed builtins", "define builtins", "def abs(x): return 0\ndef all(x): return True\ndef f(x): return 0\n",
            "assert all([abs(f(3) - 9) < 1e-6])\n", False, "AssertionError"),
    Hostile("shadowed module", "define math", "class math:\n    def isclose(*a, **k): return True\ndef f(x): return 0\n",
            "assert math.isclose(f(3), 9)\n", False, "AssertionError"),
    Hostile("patched module", "patch math", "import math\nmath.isclose = lambda *a, **k: True\ndef f(x): return 0\n",
            "assert math.isclose(f(3), 9)\n", False, "AssertionError"),
    Hostile("the tests' module", "replace the tests",
            "import sys, types\nsys.modules['tests'] = types.ModuleType('tests')\ncheck = lambda f: None\ndef f(x): return 0\n",
            "def check(candidate):\n    assert candidate(3) == 9\ncheck(f)\n", False, "AssertionError"),
    Hostile("patched holdfast", "patch the sandbox in its own process",
            "import sys\nfor name, module in list(sys.modules.items()):\n    if 'holdfast' in name:\n"
            "        for each in list(vars(module)):\n            if each not in ('__name__', '__dict__'):\n"
            "                try: setattr(module, each, lambda *a, **k: True)\n                except Exception: pass\n"
            "def f(x): return 0\n", _SQUARE, False),
]  # fmt: skip


def _evil(methods: str, *, base: str = "", f: str = "return Evil()") -> str:
    body = "\n".join(f"    def {method}" for method in methods.splitlines())
    return f"class Evil({base}):\n{body}\ndef f(x): {f}\n"


_EQUALITY = [
    Hostile("eq", "be equal to everything", _evil("__eq__(self, other): return True"), _SQUARE, False, "cannot be tested"),
    Hostile("eq swallowed", "be equal where the tests catch everything", _evil("__eq__(self, other): return True"),
            "try:\n    assert f(3) == 9\nexcept:\n    pass\n", False, "cannot be tested"),
    Hostile("not ne", "be unequal to nothing", _evil("__ne__(self, other): return False"),
            "assert not f(3) != 9\n", False, "cannot be tested"),
    Hostile("int", "be a number that is equal", _evil("__eq__(self, other): return True", base="int"), _SQUARE, False,
            "AssertionError"),
    Hostile("str", "be a string that is equal", _evil("__eq__(self, other): return True", base="str"),
            "assert f(3) == 'nine'\n", False, "AssertionError"),
    Hostile("float", "be a float that is equal",
            _evil("__eq__(self, other): return True\n__sub__(self, other): return 0.0", base="float"),
            "assert abs(f(3) - 9.0) < 1e-6\n", False, "AssertionError"),
    Hostile("list", "be a list that is equal", _evil("__eq__(self, other): return True", base="list"),
            "assert f(3) == [9]\n", False, "cannot be tested"),
    Hostile("difference", "differ by nothing", _evil("__sub__(self, other): return 0\n__abs__(self): return 0"),
            "assert abs(f(3) - 9) < 1e-6\n", False, "cannot be tested"),
    Hostile("order", "be between", _evil("__lt__(self, o): return True\n__gt__(self, o): return True"),
            "assert 8 < f(3) < 10\n", False, "cannot be tested"),
    Hostile("contains", "hold everything", _evil("__contains__(self, other): return True"),
            "assert 9 in f(3)\n", False, "cannot be tested"),
    Hostile("member", "be a member", _evil("__eq__(self, other): return True\n__hash__(self): return hash(9)"),
            "assert f(3) in [9]\n", False, "cannot be tested"),
    Hostile("hashed member", "be in a set", _evil("__eq__(self, other): return True\n__hash__(self): return hash(9)"),
            "assert f(3) in {9}\n", False),
    Hostile("inside", "be equal inside a list", _evil("__eq__(self, other): return True", f="return [Evil()]"),
            "assert f(3) == [9]\n", False, "cannot be tested"),
    Hostile("class", "claim to be an int",
            "class Evil:\n    __class__ = int\n    def __eq__(self, other): return True\ndef f(x): return Evil()\n", _SQUARE, False,
            "cannot be tested"),
    Hostile("metaclass", "be a class that is equal",
            "class Meta(type):\n    def __eq__(self, other): return True\n    def __hash__(self): return 1\n"
            "class Evil(metaclass=Meta): pass\ndef f(x): return Evil\n", _SQUARE, False),
]  # fmt: skip

_PRYING = [
    Hostile("memory", "find the expected value in its own memory",
            "import gc\ndef f():\n    wanted = ''.join(['EXPECTED', '_VALUE'])\n    for o in gc.get_objects():\n"
            "        if type(o) in (dict, list, tuple) and len(o) < 1000 and wanted in str(o):\n            return 'done'\n"
            "    try: maps = open('/proc/self/maps').readlines()\n    except OSError: maps = []\n    for line in maps:\n        low, high = (int(x, 16) for x in line.split()[0].split('-'))\n"
            "        if 'rw-p' in line and high - low < 1 << 24:\n            with open('/proc/self/mem', 'rb') as m:\n"
            "                m.seek(low)\n                if m.read(high - low).count(wanted.encode()) > 3:\n"
            "                    return 'done'\n    return 'nothing'\n",
            "x = 'EXPECTED' '_VALUE'\ny = [f'{x} {n}' for n in range(9)]\n" + _NOTHING, True),
    Hostile("globals", "read the tests' names through a function",
            _attempt("import builtins\nreturn hidden.__globals__").replace("def f()", "def f(hidden)"),
            "expected = 9\ndef help(n): return n\nassert f(help) == 'nothing'\n", True),
    Hostile("frame", "read the tests' names through a generator",
            _attempt("return hidden.gi_frame").replace("def f()", "def f(hidden)"),
            "def count():\n    yield 1\nassert f(count()) == 'nothing'\n", True),
    Hostile("override", "change the method that checks it",
            "def f(oracle):\n    try: oracle.right = lambda *a: True\n    except AttributeError: pass\n    return 0\n",
            "class Oracle:\n    def right(self, answer): return answer == 9\n"
            "oracle = Oracle()\nassert oracle.right(f(oracle))\n", False, "AssertionError"),
    Hostile("exec", "run code in the tests' process",
            "def f(run):\n    run('import builtins; builtins.all = lambda x: True')\n    return 0\n",
            "assert all([f(exec) == 9])\n", False, "AssertionError"),
    Hostile("setattr", "patch the tests' process", "def f(put):\n    import builtins\n    put(builtins, 'all', lambda x: True)\n"
            "    return 0\n", "assert all([f(setattr) == 9])\n", False, "AssertionError"),
]  # fmt: skip

HOSTILE = (*_FILES, *_NETWORK, *_FORKS, *_MEMORY, *_TIME, *_SIGNALS, *_FORGED, *_EQUALITY, *_PRYING)
