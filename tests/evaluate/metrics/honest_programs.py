# ruff: noqa: E501 - a program a line is easier to read than its pieces
"""List harmless programs, right and wrong, with tests of all shapes in benchmarks."""

from typing import NamedTuple


class Honest(NamedTuple):
    name: str
    program: str
    tests: str
    passes: bool = True


_POINT = """
class Point:
    count = 0
    def __init__(self, x, y=0):
        self.x, self.y = x, y
        Point.count += 1
    def __eq__(self, other): return isinstance(other, Point) and (self.x, self.y) == (other.x, other.y)
    def __add__(self, other): return Point(self.x + other.x, self.y + other.y)
    def __lt__(self, other): return self.x < other.x
    def __repr__(self): return f'Point({self.x}, {self.y})'
    def __len__(self): return 2
    def __iter__(self): return iter((self.x, self.y))
    def move(self, by): self.x += by; return self
    @classmethod
    def origin(cls): return cls(0, 0)
    @staticmethod
    def unit(): return 1
    @property
    def norm(self): return abs(self.x) + abs(self.y)
"""

HONEST = [
    Honest("assertion", "def add(a, b): return a + b\n",
           "assert add(2, 3) == 5\nassert add('a', 'b') == 'ab'\n"),
    Honest("wrong", "def add(a, b): return a * b\n", "assert add(2, 3) == 5\n", False),
    Honest("check",
           "def truncate(x):\n    \"\"\" >>> truncate(3.5)\n    0.5\n    \"\"\"\n"
           "    return x % 1.0\n",
           "METADATA = {'author': 'x'}\n\ndef check(candidate):\n    assert candidate(3.5) == 0.5\n"
           "    assert abs(candidate(1.33) - 0.33) < 1e-6\ncheck(truncate)\n"),
    Honest("wrong in check", "def f(x): return -x\n",
           "def check(candidate):\n    assert candidate(1) == 1\ncheck(f)\n", False),
    Honest("no such name", "def g(x): return x\n", "assert f(1) == 1\n", False),
    Honest("does not compile", "def f(x:\n", "assert f(1) == 1\n", False),
    Honest("raises at import", "raise ValueError('no')\n", "assert True\n", False),
    Honest("in place", "def double(a):\n    for i in range(len(a)): a[i] *= 2\n",
           "a = [1, 2]\nassert double(a) is None\nassert a == [2, 4]\n"),
    Honest("in place nested", "def grow(d): d['a'].append(3); d['b'] = {1}; d['c']['d'].add(2)\n",
           "inner = [1]\nd = {'a': inner, 'c': {'d': set()}}\ngrow(d)\nassert inner == [1, 3]\n"
           "assert d == {'a': [1, 3], 'b': {1}, 'c': {'d': {2}}}\nassert d['a'] is inner\n"),
    Honest("in place before an error", "def f(a):\n    a.append(1)\n    raise KeyError('k')\n",
           "a = []\ntry:\n    f(a)\nexcept KeyError as e:\n    assert e.args == ('k',)\nelse:\n"
           "    assert False\nassert a == [1]\n"),
    Honest("identity", "def f(a): a.sort(); return a\n",
           "a = [3, 1]\nassert f(a) is a and a == [1, 3]\n"),
    Honest("copy", "def f(a): return sorted(a)\n",
           "a = [3, 1]\nb = f(a)\nassert b is not a and a == [3, 1] and b == [1, 3]\n"),
    Honest("aliases", "def f(a, b): a.append(1); return len(b)\n", "a = []\nassert f(a, a) == 1\n"),
    Honest("cycle", "def f(a): a.append(a); return a\n",
           "a = [1]\nb = f(a)\nassert b is a and a[1] is a\n"),
    Honest("matrix", "def t(m): return [list(r) for r in zip(*m)]\n",
           "assert t([[1, 2], [3, 4]]) == [[1, 3], [2, 4]]\n"),
    Honest("callable", "def apply(f, n):\n    for _ in range(n): x = f(n)\n    return x\n",
           "assert apply(lambda x: x + 1, 3) == 4\n"),
    Honest("key function", "def best(items, key): return max(items, key=key)\n",
           "assert best(['a', 'bbb'], key=len) == 'bbb'\nassert best([1, -3], abs) == -3\n"),
    Honest("callable that raises",
           "def safe(f):\n    try: return f()\n    except ZeroDivisionError: return 'caught'\n",
           "assert safe(lambda: 1 // 0) == 'caught'\n"),
    Honest("callable with state", "def twice(f): f(); f()\n",
           "seen = []\ndef note(): seen.append(1)\ntwice(note)\nassert seen == [1, 1]\n"),
    Honest("closure", "def adder(n):\n    def add(x): return x + n\n    return add\n",
           "assert adder(3)(4) == 7\nassert callable(adder(1))\n"),
    Honest("decorator",
           "def twice(f):\n    def inner(*a, **k): return f(*a, **k) * 2\n    return inner\n",
           "@twice\ndef g(x, y=1): return x + y\nassert g(1, y=2) == 6\n"),
    Honest("compose",
           "def compose(*fs):\n    def run(x):\n        for f in fs: x = f(x)\n        return x\n"
           "    return run\n", "assert compose(str, len, lambda n: n + 1)(100) == 4\n"),
    Honest("expected error",
           "def f(x):\n    if x < 0: raise ValueError('negative: %d' % x)\n    return x ** 0.5\n",
           "try:\n    f(-1)\n    assert False\nexcept ValueError as error:\n"
           "    assert 'negative: -1' in str(error)\nassert f(4) == 2.0\n"),
    Honest("wrong error", "def f(x): raise TypeError\n",
           "try:\n    f(-1)\nexcept ValueError:\n    pass\n", False),
    Honest("own error",
           "class Broke(Exception):\n"
           "    def __init__(self, left): super().__init__(left); self.left = left\n"
           "def pay(n): raise Broke(n)\n",
           "try:\n    pay(3)\nexcept Broke as error:\n"
           "    assert error.left == 3 and isinstance(error, Exception)\nelse:\n"
           "    assert False\n"),
    Honest("library error", "import json\ndef f(x): return json.loads(x)\n",
           "import json\ntry:\n    f('{')\nexcept json.JSONDecodeError:\n    pass\nelse:\n"
           "    assert 0\n"),
    Honest("floats", "import math\ndef area(r): return math.pi * r * r\n",
           "import math\nassert math.isclose(area(2), 12.566370614359172)\n"
           "assert abs(area(1) - 3.14159) < 1e-4\n"),
    Honest("special floats", "def f(): return [float('inf'), -0.0, float('nan'), 0.1 + 0.2]\n",
           "import math\na = f()\n"
           "assert a[0] == math.inf and math.copysign(1, a[1]) == -1 and math.isnan(a[2]) and a[3] == 0.1 + 0.2\n"),
    Honest("borrowed import", "import math\ndef f(x): return x\n", "assert math.sqrt(f(4)) == 2\n"),
    Honest("missing import", "def f(x): return x\n", "assert math.sqrt(f(4)) == 2\n", False),
    Honest("plain types", "def f(x): return x\n",
           "for x in (1, True, None, 1.5, 'a\\ud800', b'\\xff', (1, (2,)), {1, 2}, frozenset({3}), "
           "{'a': [1], 2: None}, 2 + 3j, range(3), 10 ** 5000, ...):\n"
           "    assert f(x) == x and type(f(x)) is type(x)\n"),
    Honest("library types",
           "from collections import *\nfrom decimal import Decimal\n"
           "from fractions import Fraction\nimport datetime\n"
           "def f(s): return Counter(s), OrderedDict(a=1), deque([1, 2], 3), Decimal('1.10'), "
           "Fraction(1, 3), datetime.date(2020, 1, 2), defaultdict(list, a=[1])\n",
           "from collections import Counter, OrderedDict\nfrom fractions import Fraction\na = "
           "f('aab')\nassert a[0] == Counter('aab') and a[0].most_common(1) == [('a', 2)]\n"
           "assert a[1] == OrderedDict(a=1) and list(a[2]) == [1, 2] and str(a[3]) == '1.10' and a[4] == Fraction(1, 3) and a[5].year == 2020 and a[6]['x'] == []\n"),
    Honest("named tuple",
           "from collections import namedtuple\nP = namedtuple('P', 'x y')\n"
           "def f(): return P(1, 2)\n",
           "assert f() == (1, 2) and f().y == 2 and f()._fields == ('x', 'y')\n"),
    Honest("enumeration",
           "import enum\nclass C(enum.Enum):\n    RED = 1\n    BLUE = 2\ndef f(): return C.RED\n",
           "assert f() is C.RED and f() == C.RED and f() != C.BLUE and f().value == 1 and f().name == 'RED'\n"),
    Honest("data class",
           "from dataclasses import dataclass\n@dataclass\nclass D:\n    a: int\n"
           "    b: str = 'x'\n",
           "assert D(1) == D(1, 'x') and D(2).a == 2 and repr(D(1)) == \"D(a=1, b='x')\"\n"),
    Honest("class", _POINT,
           "p = Point(1, 2)\n"
           "assert p.x == 1 and p.move(2).x == 3 and isinstance(p, Point) and not isinstance(3, Point)\n"
           "assert Point(1, 2) == Point(1, 2) and Point(1) != Point(2) and Point(1) + Point(2) == "
           "Point(3) and Point(1) < Point(2)\n"
           "assert repr(p) == 'Point(3, 2)' and len(p) == 2 and list(p) == [3, 2] and p.norm == 5\n"
           "assert Point.origin().x == 0 and Point.unit() == 1 and Point.count > 3\np.x = "
           "10\nassert p.x == 10 and hasattr(p, 'y') and not hasattr(p, 'z')\n"
           "assert type(p).__name__ == 'Point' and sorted([Point(2), Point(1)])[0].x == 1\n"),
    Honest("wrong class", _POINT, "assert Point(1, 2) == Point(2, 1)\n", False),
    Honest("linked list",
           "class Node:\n    def __init__(self, v, next=None): self.v, self.next = v, next\n"
           "def build(a):\n    head = None\n    for v in reversed(a): head = Node(v, head)\n"
           "    return head\n",
           "node, seen = build([1, 2, 3]), []\nwhile node:\n    seen.append(node.v)\n"
           "    node = node.next\nassert seen == [1, 2, 3] and build([]) is None\n"),
    Honest("the tests' class",
           "def total(node):\n    n = 0\n    while node is not None:\n        n += node.v\n"
           "        node.seen = True\n        node = node.next\n    return n\n",
           "class Node:\n    def __init__(self, v, next=None): self.v, self.next = v, next\n"
           "n = Node(1, Node(2))\nassert total(n) == 3 and n.seen and n.next.seen\n"),
    Honest("stack",
           "class Stack(list):\n    def push(self, x): self.append(x)\n"
           "    def peek(self): return self[-1]\n",
           "s = Stack()\ns.push(1)\ns.push(2)\n"
           "assert s.peek() == 2 and len(s) == 2 and s[0] == 1 and s.pop() == 2\n"),
    Honest("context manager",
           "class Manager:\n    def __enter__(self): return 5\n"
           "    def __exit__(self, *a): return True\n",
           "with Manager() as m:\n    assert m == 5\n    raise ValueError\n"),
    Honest("generator", "def count(n):\n    for i in range(n): yield i\n",
           "assert list(count(3)) == [0, 1, 2]\ng = count(1)\nassert next(g) == 0\ntry:\n"
           "    next(g)\nexcept StopIteration:\n    pass\nelse:\n    assert False\n"),
    Honest("endless generator",
           "import itertools\ndef f():\n    for i in itertools.count(): yield i * i\n",
           "import itertools\nassert list(itertools.islice(f(), 4)) == [0, 1, 4, 9]\n"),
    Honest("takes a generator", "def f(g): return sum(g)\n",
           "assert f(x * x for x in range(4)) == 14 and f(map(int, '12')) == 3\n"),
    Honest("iterators", "def f(a): return zip(a, a)\ndef g(a): return map(str, a)\n",
           "assert dict(f([1, 2])) == {1: 1, 2: 2} and list(g([1])) == ['1']\n"),
    Honest("randomized", "def f(a): return sorted(a)\n",
           "import random\nrandom.seed(1)\nfor _ in range(30):\n"
           "    a = [random.randint(0, 99) for _ in range(20)]\n    assert f(a) == sorted(a)\n"),
    Honest("helpers",
           "def f(n): return [i for i in range(2, n) if all(i % j for j in range(2, i))]\n",
           "def is_prime(n): return all(n % i for i in range(2, n))\ndef check(candidate):\n"
           "    for p in candidate(30): assert is_prime(p)\n    assert len(candidate(30)) == 10\n"
           "check(f)\n"),
    Honest("the program's helper",
           "def encode(s): return s[::-1]\ndef decode(s): return encode(s)\n",
           "def check(candidate):\n    for s in ('abc', ''):\n"
           "        assert candidate(encode(s)) == s\ncheck(decode)\n"),
    Honest("constant", "LIMIT = 3\nITEMS = [1, 2]\ndef f(): return LIMIT\n",
           "assert f() == LIMIT and ITEMS == [1, 2]\n"),
    Honest("builtin's name", "def sum(a, b): return a + b + 1\n", "assert sum(1, 2) == 4\n"),
    Honest("keyword arguments", "def f(*a, k=1, **kw): return a, k, kw\n",
           "assert f(1, 2, k=3, z=4) == ((1, 2), 3, {'z': 4})\n"),
    Honest("types as values",
           "def f(items, kind): return [x for x in items if isinstance(x, kind)]\n"
           "def g(x): return type(x)\n", "assert f([1, 'a', 2.0], int) == [1] and g('') is str\n"),
    Honest("recursion", "def fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)\n",
           "assert [fib(n) for n in range(10)] == [0, 1, 1, 2, 3, 5, 8, 13, 21, 34]\n"),
    Honest("typing",
           "from typing import *\n"
           "def f(a: List[int]) -> Optional[int]: return max(a) if a else None\n",
           "assert f([1, 3]) == 3 and f([]) is None\n"),
    Honest("unittest", "def f(x): return x\n",
           "import unittest\nclass T(unittest.TestCase):\n"
           "    def test(self): self.assertEqual(f(1), 1); self.assertRaises(TypeError, f)\n"
           "assert unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(T)).wasSuccessful()\n"),
    Honest("asynchronous",
           "import asyncio\nasync def g(x): return x + 1\ndef f(x): return asyncio.run(g(x))\n",
           "assert f(1) == 2\n"),
    Honest("threads",
           "from concurrent.futures import ThreadPoolExecutor\ndef f(a):\n"
           "    with ThreadPoolExecutor(4) as e: return list(e.map(abs, a))\n",
           "assert f([-1, 2]) == [1, 2]\n"),
    Honest("subprocess",
           "import subprocess\n"
           "def f(): return subprocess.run(['echo', 'x'], capture_output=True, text=True).stdout\n",
           "assert f() == 'x\\n'\n"),
]  # fmt: skip
