"""Evaluate a PEFT adapter like stock lm-eval, and a second time without an engine."""

import json
import shutil

import pytest
from end_to_end_world import answers

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_is_left")]
TASKS = ("t_score", "t_generate")


@pytest.fixture(scope="module")
def adapter(e2e, tmp_path_factory):
    """Make an adapter, as a training job saves it, that names its base."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(3)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(e2e.model()), config)
    for name, parameter in adapted.named_parameters():
        if "lora" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    folder = tmp_path_factory.mktemp("adapter")
    adapted.save_pretrained(folder)
    return folder


adapter_fixture_warns = pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing:FutureWarning"
)  # peft 0.21 reads it of transformers 5.23


def engine_logs(home, evaluation):
    return sorted(path.name for path in (home / "evaluations" / evaluation / "logs").glob("node-*"))


@adapter_fixture_warns
def test_an_adapter_has_the_scores_of_stock_and_is_known_the_second_time(
    e2e, stock_lm_eval, adapter, tmp_path
):
    base, home = e2e.model(), tmp_path / "home"
    [[adapted], [plain]] = stock_lm_eval([(TASKS, False)], f"{base}+{adapter}", base)
    assert adapted["results"] != plain["results"]
    names = ["--tasks", ",".join(TASKS), "--include_path", e2e.tasks, "--device", "cpu"]
    lm_eval = ["--model_args", f"pretrained={base},peft={adapter}", *names]
    theirs = ["run", "--model", "hf", *lm_eval, "--threads", 1, "--mode", "exact"]
    first = e2e.json(*theirs, "--id", "first", home=home)
    assert json.dumps(first["results"]["results"], sort_keys=True) == json.dumps(
        adapted["results"], sort_keys=True
    )
    adapter_bytes = sum(
        (adapter / f"adapter_{name}").stat().st_size
        for name in ("config.json", "model.safetensors")
    )
    base_bytes = sum(path.stat().st_size for path in base.iterdir())
    assert first["remote_bytes"] == base_bytes + adapter_bytes
    assert engine_logs(home, "first") == ["node-0-0.log"]

    own = ["run", "--suite", ",".join(TASKS), "--include-path", e2e.tasks, "--model", adapter]
    own += ["--device", "cpu", "--threads", 1, "--id", "again"]
    out, _ = e2e.run(*own, home=home)
    assert "Nothing had to be run: all answers were known." in out
    assert engine_logs(home, "again") == []
    assert answers(home / "evaluations" / "again") == 0
    again = json.loads((home / "evaluations" / "again" / "results.json").read_text())
    assert again["results"]["results"] == first["results"]["results"]
    assert (again["digest"], again["remote_bytes"]) == (first["digest"], 0)

    moved = tmp_path / "moved"
    shutil.copytree(adapter, moved)
    other = e2e.json(*own[:-1], "moved", "--model", moved, home=home)
    assert engine_logs(home, "moved") == ["node-0-0.log"], "other files are read again"
    assert (other["requests"], other["digest"]) == (0, first["digest"])
