"""Complete the site that MkDocs makes of docs/ (`make site`).

- The README is the first page. A file outside of docs/ to which a page links is copied into the
  site, and the link leads to the copy.
- `reference/schemas.md` is written from the JSON schemas of the package.
- A page that loads something from another server, and a command or a public name that the reference
  lacks, are warnings, which `--strict` makes errors.
"""

import importlib
import json
import logging
import posixpath
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli.main import cli

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
DOCS = "docs/"
FIRST_PAGE = "README.md"
COPIES = "repository/"
"""The folder of the site for files outside of docs/."""
SCHEMAS_PAGE = "reference/schemas.md"
COMMANDS_PAGE = "reference/commands.html"
PACKAGES = {
    "holdfast": "reference/python/holdfast.html",
    "holdfast.checkpoint": "reference/python/checkpoint.html",
    "holdfast.diagnose": "reference/python/diagnose.html",
    "holdfast.evaluate": "reference/python/evaluate.html",
    "holdfast.trace": "reference/python/trace.html",
    "holdfast.testing": "reference/python/testing.html",
}
"""The page of each package that users import from."""
log = logging.getLogger("mkdocs.holdfast")

_LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")
_LOADED = re.compile(
    r"""<(?:script|link|img|iframe|source|video)\b[^>]*?\s(?:src|href)=["']?((?:https?:)?//[^"'\s>]+)"""
    r"""|url\(["']?((?:https?:)?//[^"')]+)|@import\s+["']((?:https?:)?//[^"']+)"""
)


def site_uri(path: str) -> str:
    """Return the place in the site of a file of the repository."""
    if path.startswith(DOCS):
        return path.removeprefix(DOCS)
    return path if path == FIRST_PAGE else COPIES + path


def source_of(uri: str) -> str:
    """Return the file of the repository that has a place in the site: the inverse of `site_uri`."""
    if uri == FIRST_PAGE:
        return uri
    return uri.removeprefix(COPIES) if uri.startswith(COPIES) else DOCS + uri


def linked_files(text: str, source: str) -> Iterator[str]:
    """Yield the files of the repository to which a page links; `source` is the page's own file."""
    for line, is_code in _lines(text):
        if not is_code:
            for _, link, _ in _LINK.findall(line):
                target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
                if (ROOT / target).is_file():
                    yield target


def with_site_links(text: str, source: str) -> str:
    """Return a page whose links lead to the places that the files have in the site."""
    own = posixpath.dirname(site_uri(source))

    def to_site(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), found[2]))
        if not (ROOT / target).is_file():
            return found[0]
        return found[1] + posixpath.relpath(site_uri(target), own or ".") + found[3]

    return "".join(line if is_code else _LINK.sub(to_site, line) for line, is_code in _lines(text))


def _lines(text: str) -> Iterator[tuple[str, bool]]:
    """Yield the lines of a page, each with True if the line belongs to a fenced block."""
    fence = ""
    for line in text.splitlines(keepends=True):
        mark = re.match(r"\s*(`{3,})", line)
        if mark and (not fence or mark[1] == fence):
            fence = "" if fence else mark[1]
            yield line, True
        else:
            yield line, bool(fence)


def schemas_page(schemas: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page of the JSON schemas; `schemas` has each schema by its path."""
    parts = [
        "# JSON schemas\n",
        "The objects that `--json` prints ([JSON](../records.md#json)). Each heading is an object.\n",
    ]
    for path, schema in sorted(schemas.items()):
        name = posixpath.basename(path).removesuffix(".schema.json")
        file = posixpath.relpath(site_uri(path), posixpath.dirname(SCHEMAS_PAGE))
        parts += [
            f"## {name}\n",
            f"{schema['title']}. [The schema]({file}). {schema['description']}\n",
        ]
        for key, part in schema["$defs"].items():
            anchor = _anchor(name, key)
            parts.append(f"### {key} {{ #{anchor} }}\n")
            if "description" in part:
                parts.append(f"{_cell(part['description'])}\n")
            rows = list(_rows(part, name))
            if rows:
                parts.append("\n".join(["| key | type | |", "|---|---|---|", *rows]) + "\n")
            else:
                parts.append(f"{_type_of(part, name)}\n")
    return "\n".join(parts)


def _rows(schema: Mapping[str, Any], name: str, prefix: str = "") -> Iterator[str]:
    """Yield a row of the table for each property, and for the properties of an inner object."""
    for key, part in schema.get("properties", {}).items():
        inner = part.get("items", part)
        optional = "" if key in schema.get("required", ()) else ", optional"
        yield (
            f"| `{prefix}{key}` | {_type_of(part, name)}{optional} "
            f"| {_cell(part.get('description', ''))} |"
        )
        if isinstance(inner, dict):
            yield from _rows(inner, name, f"{prefix}{key}.")


def _type_of(schema: Mapping[str, Any], name: str) -> str:
    """Return the type that a part of a schema allows, in words; `name` is the schema's."""
    if "$ref" in schema:
        key = schema["$ref"].rpartition("/")[2]
        return f"[{key}](#{_anchor(name, key)})"
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(one)}`" for one in schema["enum"])
    for choice in ("anyOf", "oneOf"):
        if choice in schema:
            return " or ".join(_type_of(one, name) for one in schema[choice])
    types = schema.get("type", "any")
    text = " or ".join([types] if isinstance(types, str) else types)
    if isinstance(schema.get("items"), dict):
        text = text.replace("array", f"array of {_type_of(schema['items'], name)}")
    if isinstance(schema.get("additionalProperties"), dict):
        text = f"{text} of {_type_of(schema['additionalProperties'], name)}"
    return text


def _anchor(name: str, key: str) -> str:
    return f"{name}-{key}".replace(".", "-")


def _cell(text: str) -> str:
    """Return a text as one cell of a table."""
    return text.replace("|", "\\|").replace("\n", " ")


def loaded_from_elsewhere(text: str) -> list[str]:
    """Return the addresses of other servers from which a page or a style sheet loads something."""
    return [next(filter(None, found)) for found in _LOADED.findall(text)]


def command_anchors() -> list[str]:
    """Return the anchor of each command and subcommand in the reference of commands."""

    def below(command: click.Command, path: str) -> Iterator[str]:
        yield path.replace(" ", "-")
        if isinstance(command, click.Group):
            context = click.Context(command)
            for name in command.list_commands(context):
                subcommand = command.get_command(context, name)
                assert subcommand is not None
                if not subcommand.hidden:
                    yield from below(subcommand, f"{path} {name}")

    return list(below(cli, "holdfast"))


def absent_names(package: str, page: str) -> list[str]:
    """Return the public names of a package without a section in its page."""
    names = importlib.import_module(package).__all__
    # A name may be documented in the module that it comes from.
    return [name for name in names if not re.search(rf'id="{package}\b[\w.]*\.{name}"', page)]


def on_files(files: "Files", config: "MkDocsConfig") -> "Files":
    """Add the README, the page of the schemas, and the files to which pages link."""
    from mkdocs.structure.files import File

    schemas = {
        str(path.relative_to(ROOT)): json.loads(path.read_text())
        for path in ROOT.glob("src/holdfast/**/*.schema.json")
    }
    files.append(File.generated(config, SCHEMAS_PAGE, content=schemas_page(schemas)))
    todo = [FIRST_PAGE, *schemas]
    for file in files.documentation_pages():
        if file.src_uri != SCHEMAS_PAGE:
            source = source_of(file.src_uri)
            todo += linked_files((ROOT / source).read_text(), source)
    while todo:
        source = todo.pop()
        if files.get_file_from_path(site_uri(source)) is None:
            files.append(File.generated(config, site_uri(source), abs_src_path=str(ROOT / source)))
            if source.endswith(".md"):
                todo += linked_files((ROOT / source).read_text(), source)
    return files


def on_page_markdown(markdown: str, page: "Page", **_: object) -> str:
    """Lead a page's links to the places of the files in the site."""
    uri = page.file.src_uri
    return markdown if uri == SCHEMAS_PAGE else with_site_links(markdown, source_of(uri))


def on_post_build(config: "MkDocsConfig") -> None:
    """Warn of what pages load from other servers, and of commands that the reference lacks."""
    site = Path(config.site_dir)
    for path in sorted([*site.rglob("*.html"), *site.rglob("*.css")]):
        for address in loaded_from_elsewhere(path.read_text()):
            log.warning("%s loads %s.", path.relative_to(site), address)
    commands = (site / COMMANDS_PAGE).read_text()
    for anchor in command_anchors():
        if f'id="{anchor}"' not in commands:
            log.warning("%s has no section %s.", COMMANDS_PAGE, anchor)
    for package, page in PACKAGES.items():
        for name in absent_names(package, (site / page).read_text()):
            log.warning("%s has no section %s.%s.", page, package, name)
