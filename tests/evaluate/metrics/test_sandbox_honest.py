"""Check that honest programs like HumanEval's get the same verdicts as in one namespace."""

import pytest
from honest_programs import HONEST, Honest

from holdfast.evaluate.metrics.sandbox.sandbox import Sandbox


@pytest.mark.parametrize("honest", HONEST, ids=lambda each: each.name.replace(" ", "-"))
def test_gets_the_verdict_of_one_namespace(sandbox: Sandbox, honest: Honest) -> None:
    stock = "passed"
    try:
        exec(f"{honest.program}\n{honest.tests}", {})
    except Exception as error:
        stock = f"failed: {type(error).__name__}"
    verdict = sandbox.run(honest.program, honest.tests)
    assert verdict.reason.startswith(stock), verdict
    assert verdict.passed == (stock == "passed") == honest.passes


def test_repeats_its_verdict_for_programs_that_draw(sandbox: Sandbox) -> None:
    program = "import random\ndef f(): return random.random(), list({'a', 'b', 'c', 'd'})\n"
    outputs = {sandbox.run(program, "print(f())").output_tail for _ in range(3)}
    assert len(outputs) == 1


def test_says_why_a_test_cannot_be_run(sandbox: Sandbox) -> None:
    verdict = sandbox.run("class A:\n    pass\n", "class B(A):\n    pass\n")
    assert not verdict.passed
    assert verdict.reason == "cannot be tested: a test derives a class from one of the program's"


def test_shows_what_was_printed(sandbox: Sandbox) -> None:
    verdict = sandbox.run(
        "print('from the program', flush=True)\ndef f(): return 1\n",
        "print('from the tests')\nassert f() == 1\n",
    )
    assert verdict.passed
    assert "from the program" in verdict.output_tail
    assert "from the tests" in verdict.output_tail


def test_gives_a_program_a_folder_of_its_own(sandbox: Sandbox) -> None:
    write = "def f(s):\n    with open('a.txt', 'w') as file: file.write(s)\n"
    read = "    with open('a.txt') as file: return file.read()\n"
    assert sandbox.run(write + read, "assert f('x') == 'x'\n").passed
    assert not sandbox.run("def f():\n" + read, "assert f() == 'x'\n").passed
