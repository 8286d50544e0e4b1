"""Provide a tiny model, a suite with every kind of task, the command, and stock lm-eval's scores."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "harness"))  # the tasks of its tests

import bench_world  # noqa: E402
from click.testing import CliRunner  # noqa: E402

from holdfast.cli.main import cli  # noqa: E402
from holdfast.evaluate.types.suite import TaskEntry  # noqa: E402
from holdfast.testing.harness import synthetic_entry  # noqa: E402

HOLDFAST = [sys.executable, "-m", "holdfast.cli.main"]
PARTS = (
    "results",
    "groups",
    "group_subtasks",
    "versions",
    "n-shot",
    "higher_is_better",
    "n-samples",
)
"""The parts of lm-eval's results that describe tasks and scores."""
PLAIN = ("t_group", "t_mutual", "t_score", "t_rolling", "t_votes", "t_own", "t_code")
CHAT = ("t_inputs", "t_long")
MEASURED = ("perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte", "brier_score")
"""The metrics of the suite that are made of log-probabilities as they are; all others count."""
REQUESTS = 86
"""The distinct requests of the whole suite."""
TIMEOUT_S = 240

CODE_TASK = """\
task: t_code
dataset_path: json
dataset_kwargs:
  data_files:
    test: {folder}/code.jsonl
test_split: test
output_type: generate_until
unsafe_code: true
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{test}}}}"
repeats: 2
generation_kwargs:
  until: ["\\n"]
  max_gen_toks: 4
metric_list:
  - metric: !function code_e2e.pass_at_k
    aggregation: mean
    higher_is_better: true
    k: [1, 2]
filter_list:
  - name: code
    filter:
      - function: custom
        filter_fn: !function code_e2e.build
"""

CODE_UTILS = """\
import evaluate as hf_evaluate

compute_ = hf_evaluate.load("code_eval")


def pass_at_k(references, predictions, k=None):
    return compute_.compute(references=references, predictions=predictions, k=k)[0]


def build(resps, docs):
    return [[doc["program"] + "  # " + repr(resp) for resp in answers] for answers, doc in zip(resps, docs)]
"""

# Stock lm-eval's own command, once per input line. Its `code_eval` cannot be fetched offline, so a
# module that runs the program replaces it.
STOCK = """
import json, sys
import evaluate
import torch

class CodeEval:
    def compute(self, *, references, predictions, k):
        passed = []
        for test, programs in zip(references, predictions):
            for program in programs:
                try:
                    exec(program + "\\n" + test, {})
                    passed.append(True)
                except BaseException:
                    passed.append(False)
        assert passed in ([True] * len(passed), [False] * len(passed))  # as one document's are; then it is 1 or 0
        return {f"pass@{n}": float(passed[0]) for n in k if n <= len(passed)}, {}

evaluate.load = lambda path, *a, **k: CodeEval()
from lm_eval import evaluator
from lm_eval.tasks import TaskManager
from lm_eval.utils import handle_non_serializable

evaluator.add_env_info = lambda results: None  # it asks pip for all that is installed, a second each time
torch.set_num_threads(1)
manager = TaskManager(include_path=sys.argv[1], include_defaults=False)
for line in sys.stdin:
    asked = json.loads(line)
    found = []
    for model in asked["models"]:
        found.append([])
        for names, chat in asked["parts"]:
            results = evaluator.simple_evaluate(
                model="hf", model_args=dict(zip(("pretrained", "peft"), model.split("+"))),
                tasks=names, batch_size=1, device="cpu",
                apply_chat_template=chat, task_manager=manager, confirm_run_unsafe_code=True, log_samples=False,
            )
            found[-1].append(json.loads(json.dumps(results, default=handle_non_serializable)))
    print("STOCK " + json.dumps(found), flush=True)
"""


@dataclass(frozen=True)
class World:
    """Name the paths of a test; `home` is the folder of evaluations."""

    folder: Path

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def tasks(self) -> Path:
        return self.folder / "tasks"

    def model(self, number: int = 0) -> Path:
        path = self.folder / "models" / f"checkpoint-{number}"
        if not path.exists():
            bench_world.make_model(path, seed=number)
        return path

    def suite(self, plain=PLAIN, chat=CHAT, *, name: str = "mini", confirmed: bool = True) -> Path:
        lines = [f'name = "{name}"', f'include_paths = ["{self.tasks}"]']
        lines += ["confirm_unsafe_code = true"] if confirmed else []
        lines += [f'[[tasks]]\nname = "{task}"' for task in plain]
        lines += [f'[[tasks]]\nname = "{task}"\nchat_template = true' for task in chat]
        path = self.folder / f"{name}.toml"
        path.write_text("\n".join(lines) + "\n")
        return path

    def environment(self, home: Path | None = None, **more: str) -> dict[str, str]:
        return {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": "1",
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "HF_DATASETS_CACHE": str(self.folder / "datasets"),
            "HOLDFAST_HOME": str(home or self.home),
            "PYTHONPATH": os.pathsep.join(
                [str(HERE), str(HERE / "harness"), os.environ.get("PYTHONPATH", "")]
            ),
            **more,
        }

    def start(self, *words: object, home: Path | None = None, **more: str) -> subprocess.Popen[str]:
        """Start `holdfast eval WORDS…` in a session of its own, as in a terminal."""
        return subprocess.Popen(
            [*HOLDFAST, "eval", *map(str, words)],
            env=self.environment(home, **more),
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(
        self, *words: object, code: int = 0, home: Path | None = None, **more: str
    ) -> tuple[str, str]:
        """Run `holdfast eval WORDS…` to exit code `code`; return standard output and error."""
        process = self.start(*words, home=home, **more)
        try:
            out, err = process.communicate(timeout=TIMEOUT_S)
        finally:
            end(process)
        assert process.returncode == code, f"{process.returncode}\n{out}\n{err}"
        assert "Traceback" not in out + err
        return out, err

    def look(self, *words: object, home: Path) -> str:
        """Run a `holdfast eval` command that starts no process, in this one; return its output."""
        arguments = ["eval", *map(str, words)]
        env = {"HOLDFAST_HOME": str(home)}
        return (
            CliRunner(env=env)
            .invoke(cli, arguments, standalone_mode=False, catch_exceptions=False)
            .stdout
        )

    def json(self, *words: object, **more) -> dict:
        """Run a command with --json; return the decoded output."""
        return json.loads(self.run(*words, "--json", **more)[0])


@contextmanager
def stock_lm_eval(world: World) -> Iterator[Callable[..., list[list[dict]]]]:
    """Run stock lm-eval in a process of its own.

    The yielded function takes (task names, chat template) pairs and models, and returns lm-eval's
    results object of each pair for each model. BASE+ADAPTER is a model with a PEFT adapter.
    """
    log = world.folder / "stock.log"
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [sys.executable, "-c", STOCK, str(world.tasks)],
            env=world.environment(DISABLE_MULTIPROC="1"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):

        def ask(parts: Sequence[tuple[Sequence[str], bool]], *models: Path) -> list[list[dict]]:
            print(
                json.dumps({"parts": parts, "models": list(map(str, models))}),
                file=process.stdin,
                flush=True,
            )
            said = next((line for line in process.stdout if line.startswith("STOCK ")), None)
            assert said is not None, log.read_text()
            return json.loads(said.removeprefix("STOCK "))

        yield ask
        process.kill()  # its own end takes seconds


def make_world(folder: Path) -> World:
    """Make the tasks and the first model."""
    world = World(folder)
    bench_world.make_tasks(world.tasks, documents=5)
    rows = [
        {
            "prompt": f"def f(): # {number}",
            "program": f"def f(): return {number % 2}",
            "test": "assert f() == 1",
        }
        for number in range(4)
    ]
    (world.tasks / "code.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (world.tasks / "code_e2e.py").write_text(CODE_UTILS)
    (world.tasks / "t_code.yaml").write_text(CODE_TASK.format(folder=world.tasks))
    world.model()
    return world


def task_entry(task: str, *, samples: int = 10, tokens: int = 4) -> TaskEntry:
    """Make a task that needs no model."""
    return synthetic_entry(task, prompt_tokens=[8] * samples, new_tokens=[tokens] * samples)


def entry(task: str, *, samples: int = 10, tokens: int = 4, **more: object) -> str:
    """Format such a task for a suite's file; `more` are options of `SyntheticHarness`."""
    made = task_entry(task, samples=samples, tokens=tokens)
    options = ", ".join(
        f"{key} = {json.dumps(value)}" for key, value in {**made.options, **more}.items()
    )
    return f'[[tasks]]\nname = "{task}"\nharness = "{made.harness}"\noptions = {{ {options} }}\n'


def end(process: subprocess.Popen[str]) -> None:
    """End a command that a test started, unless it has ended."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def wait_until(holds: Callable[[], bool], process: "subprocess.Popen[str] | None" = None) -> None:
    """Wait until `holds()`, during the life of a command if given."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while not holds():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def answers(evaluation: Path) -> int:
    """Count the requests so far in the timeline of an evaluation's folder."""
    timeline = evaluation / "timeline.jsonl"
    return timeline.read_text().count('"request"') if timeline.exists() else 0


def check_equal(evaluation: dict, stock: list[dict]) -> None:
    """Check that an evaluation has the scores of stock lm-eval, bit for bit."""
    _check_done(evaluation)
    for part, task, ours, theirs in _side_by_side(evaluation, stock):
        # As text: NaN is NaN, and 0.0 is not -0.0.
        assert json.dumps(ours, sort_keys=True) == json.dumps(theirs, sort_keys=True), (part, task)


def check_close(evaluation: dict, stock: list[dict]) -> None:
    """Check that counts equal stock lm-eval's, and measured values agree to 1e-6."""
    _check_done(evaluation)
    for part, task, ours, theirs in _side_by_side(evaluation, stock):
        if part not in ("results", "groups"):
            assert ours == theirs, (part, task)
            continue
        assert ours.keys() == theirs.keys(), (part, task)
        for metric, value in theirs.items():
            is_measured = metric.partition(",")[0].removesuffix("_stderr") in MEASURED
            if is_measured and isinstance(value, float):
                # A perplexity is the exponential of the measured value.
                both = [
                    math.log(one) if "perplexity" in metric else one
                    for one in (ours[metric], value)
                ]
                assert math.isclose(*both, rel_tol=1e-6, abs_tol=1e-6), (
                    task,
                    metric,
                    ours[metric],
                    value,
                )
            else:
                assert ours[metric] == value, (task, metric)


def _check_done(evaluation: dict) -> None:
    assert evaluation["state"] == "done", evaluation["errors"]
    assert evaluation["errors"] == {}


def _side_by_side(evaluation: dict, stock: list[dict]) -> Iterator[tuple[str, str, Any, Any]]:
    """Yield (part, task, ours, theirs) for all results."""
    for results in stock:
        for part in PARTS:
            for task, theirs in (results.get(part) or {}).items():
                yield part, task, evaluation["results"][part][task], theirs
    assert set(evaluation["results"]["results"]) == {
        task for results in stock for task in results["results"]
    }


def leftovers(folder: Path) -> list[str]:
    """Return command lines of live Holdfast processes that name this folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (
                    (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
            except OSError:
                continue
            if f"{folder}/" in line and "holdfast." in line:
                found.append(line)
    return found
