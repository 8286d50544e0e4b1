"""Check what commands print with `--json` against the published schemas."""

import functools
import json
from importlib import resources

import jsonschema

ELSEWHERE = {
    "holdfast.diagnosis": ("holdfast.diagnose.explain", "diagnosis.schema.json"),
    "holdfast.profile": ("holdfast.profile.report", "profile.schema.json"),
}
"""The schemas that lie in the room of their answer."""


@functools.cache
def published():
    """Return the schema of each answer by its name."""
    schemas = {
        name: json.loads(resources.files(room).joinpath(file).read_text("utf-8"))
        for name, (room, file) in ELSEWHERE.items()
    }
    for file in resources.files("holdfast.cli").joinpath("schemas").iterdir():
        document = json.loads(file.read_text("utf-8"))
        jsonschema.Draft202012Validator.check_schema(document)
        for name in document["properties"]["schema"]["enum"]:
            assert name not in schemas, f"{name} is published twice"
            schemas[name] = {**document, "$defs": closed(document["$defs"])}
    return schemas


def closed(schema):
    """Return a schema whose objects may have no keys but those that it names."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: closed(part) for name, part in schema.items()}
    if schema.get("type") == "object" and isinstance(schema.get("properties"), dict):
        found.setdefault("additionalProperties", False)
    return found


@functools.cache
def _validator(name):
    assert name in published(), f"{name} has no published schema"
    return jsonschema.Draft202012Validator(published()[name])


def check(answer):
    """Fail if an answer does not follow its published schema, or has keys that are not in it."""
    plain = json.loads(json.dumps(answer, default=str))
    _validator(plain["schema"]).validate(plain)
    return plain
