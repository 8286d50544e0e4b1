"""`make site`: links into the repository, the page of the schemas, resources of other servers, commands."""

import importlib
import importlib.util
import json
import re
from pathlib import Path

import click
import pytest

from holdfast import testing
from holdfast.cli.main import COMMANDS, cli

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("site_hooks", ROOT / ".ci/site_hooks.py")
site_hooks = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(site_hooks)
SCHEMAS = {
    str(path.relative_to(ROOT)): json.loads(path.read_text())
    for path in ROOT.glob("src/holdfast/**/*.schema.json")
}


@pytest.mark.parametrize(
    ("source", "link", "expected"),
    [
        ("docs/running.md", "records.md#json", "records.md#json"),
        ("docs/running.md", "../examples/ddp.py", "repository/examples/ddp.py"),
        ("docs/checkpoints/how-to.md", "../../README.md", "../README.md"),
        ("README.md", "docs/running.md#slurm", "running.md#slurm"),
        ("README.md", "CHANGELOG.md", "repository/CHANGELOG.md"),
        ("benchmarks/README.md", "../docs/trace.md", "../../trace.md"),
        ("docs/running.md", "https://example.org/x.md", "https://example.org/x.md"),
        ("docs/running.md", "no-such-page.md", "no-such-page.md"),
        ("docs/running.md", "#slurm", "#slurm"),
    ],
)
def test_a_link_leads_to_the_place_in_the_site(source, link, expected):
    for mark in ("", "!"):
        text = f"one {mark}[word]({link}), two\n"
        shown = site_hooks.with_site_links(text, source)
        assert shown == f"one {mark}[word]({expected}), two\n"


def test_a_block_of_code_stays_as_it_is():
    text = "```python\nx = [a](README.md)\n```\n[a](README.md)\n````md\n```\n[b](README.md)\n````\n"
    shown = site_hooks.with_site_links(text, "README.md")
    assert shown == text.replace("[a](README.md)\n````", "[a](README.md)\n````")
    assert list(site_hooks.linked_files(text, "README.md")) == ["README.md"]


def test_a_place_in_the_site_leads_back_to_the_file():
    for path in ("README.md", "docs/running.md", "docs/design/README.md", "benchmarks/README.md"):
        assert site_hooks.source_of(site_hooks.site_uri(path)) == path


@pytest.mark.parametrize(
    "text",
    [
        '<script src="https://cdn.example.org/x.js"></script>',
        "<link href='//fonts.example.org/a.css' rel=stylesheet>",
        '<img alt="a" src=http://example.org/a.png>',
        "@font-face { src: url(https://fonts.example.org/a.woff2) }",
        '@import "https://example.org/a.css";',
    ],
)
def test_what_comes_from_another_server_is_found(text):
    (address,) = site_hooks.loaded_from_elsewhere(text)
    assert "example.org" in address


def test_a_link_and_an_own_file_are_no_resource_of_another_server():
    text = '<a href="https://example.org">x</a><img src="../a.png"><link href="a.css">url("a.woff")'
    assert site_hooks.loaded_from_elsewhere(text) == []


def test_every_object_of_a_schema_has_a_section_and_every_key_a_row():
    page = site_hooks.schemas_page(SCHEMAS)
    assert len(SCHEMAS) > 10
    anchors = set(re.findall(r"\{ #(\S+) \}", page))
    assert set(re.findall(r"\]\(#([^)]+)\)", page)) <= anchors
    for path, schema in SCHEMAS.items():
        name = Path(path).name.removesuffix(".schema.json")
        for key, part in schema["$defs"].items():
            section = page.partition(f"### {key} {{ #{name}-{key.replace('.', '-')} }}\n")[2]
            section = section.partition("\n### ")[0]
            for field in part.get("properties", {}):
                assert f"| `{field}` | " in section, (path, key, field)


def test_the_words_for_types():
    schema = {
        "required": ["a", "b"],
        "properties": {
            "a": {"type": "array", "items": {"$ref": "#/$defs/part"}, "description": "one | two"},
            "b": {"anyOf": [{"const": 1}, {"type": ["string", "null"]}]},
            "c": {"type": "object", "properties": {"d": {"enum": ["x", "y"]}}},
        },
    }
    assert list(site_hooks._rows(schema, "s")) == [
        "| `a` | array of [part](#s-part) | one \\| two |",
        "| `b` | `1` or string or null |  |",
        "| `c` | object, optional |  |",
        '| `c.d` | `"x"`, `"y"`, optional |  |',
    ]


def test_every_command_has_an_anchor_of_its_own_name():
    anchors = site_hooks.command_anchors()
    assert len(anchors) == len(set(anchors))
    assert {f"holdfast-{name}" for name in COMMANDS} <= set(anchors)
    assert "holdfast-rules-good-add" in anchors


def names_below(group):
    """Yield the name by which each command is called, and the name that the reference shows."""
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        yield name, command.name
        if isinstance(command, click.Group):
            yield from names_below(command)


def test_the_reference_shows_the_names_by_which_commands_are_called():
    names = list(names_below(cli))
    assert len(names) > 2 * len(COMMANDS)
    assert [called for called, shown in names if called != shown] == []


def test_a_public_name_without_a_section_is_found():
    page = '<h2 id="holdfast.Checkpointer"><h2 id="holdfast.recover.attach.attach">'
    assert site_hooks.absent_names("holdfast", page) == ["__version__"]
    assert "Checkpointer" in site_hooks.absent_names("holdfast.checkpoint", page)


def test_the_build_warns_of_what_is_missing_and_of_other_servers(tmp_path, caplog):
    class Config:
        site_dir = str(tmp_path)

    for package, where in site_hooks.PACKAGES.items():
        names = importlib.import_module(package).__all__
        (tmp_path / where).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / where).write_text("".join(f'<h2 id="{package}.{name}">' for name in names))
    anchors = site_hooks.command_anchors()
    page = tmp_path / site_hooks.COMMANDS_PAGE
    page.write_text("".join(f'<h2 id="{anchor}">' for anchor in anchors))
    site_hooks.on_post_build(Config)
    assert caplog.messages == []
    page.write_text(page.read_text().replace(f'"{anchors[-1]}"', '""'))
    (tmp_path / "a.css").write_text("url(//example.org/a.woff)")
    (tmp_path / site_hooks.PACKAGES["holdfast.testing"]).write_text(
        'id="holdfast.testing.schedule"'
    )
    absent = [name for name in testing.__all__ if name != "schedule"]
    site_hooks.on_post_build(Config)
    assert caplog.messages == [
        "a.css loads //example.org/a.woff.",
        f"{site_hooks.COMMANDS_PAGE} has no section {anchors[-1]}.",
        *(
            f"reference/python/testing.html has no section holdfast.testing.{name}."
            for name in absent
        ),
    ]
