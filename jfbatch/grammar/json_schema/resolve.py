"""Where a schema's references lead: drafts, base URIs, anchors and JSON pointers.

Every subschema met is one interned `SchemaNode`, so that a set of nodes names a conjunction of
schemas and recursion shows itself as a set seen before. Nothing is ever fetched.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from jfbatch.errors import UnsupportedSchema

DRAFTS = {
    "http://json-schema.org/draft-03/schema": 4,
    "http://json-schema.org/draft-04/schema": 4,
    "http://json-schema.org/draft-06/schema": 6,
    "http://json-schema.org/draft-07/schema": 7,
    "https://json-schema.org/draft/2019-09/schema": 2019,
    "https://json-schema.org/draft/2020-12/schema": 2020,
}
LATEST = 2020
_DATA_KEYWORDS = frozenset({"enum", "const", "default", "examples", "example"})
_MISSING = object()


class SchemaNode:
    """One subschema: its value, the base URI in force and the JSON pointer where it was first met."""

    __slots__ = ("base", "draft", "path", "schema")

    def __init__(self, schema: Any, base: str, path: str, draft: int) -> None:
        self.schema = schema
        self.base = base
        self.path = path
        self.draft = draft

    def __repr__(self) -> str:
        return f"SchemaNode(#{self.path})"

    def fail(self, keyword: str, reason: str) -> UnsupportedSchema:
        """The error to raise about a keyword of this node."""
        return UnsupportedSchema(self.path, keyword, reason)


def escape_pointer(token: str) -> str:
    """One reference token of a JSON pointer, escaped."""
    return token.replace("~", "~0").replace("/", "~1")


def draft_of(schema: Any, default: int, warnings: list[str]) -> int:
    """The draft that `$schema` names: 4, 6, 7, 2019 or 2020; unknown ones count as the default."""
    named = schema.get("$schema") if isinstance(schema, dict) else None
    if not isinstance(named, str):
        return default
    draft = DRAFTS.get(
        named.strip().rstrip("#").replace("https://json-schema.org/draft-", "http://json-schema.org/draft-")
    )
    if draft is None:
        warnings.append(f"#: $schema: {named!r} is not a known draft; read as {default}")
        return default
    return draft


class Resolver:
    """Makes and finds the nodes of one schema document."""

    def __init__(self, schema: Any, warnings: list[str]) -> None:
        if not isinstance(schema, (dict, bool)):
            raise UnsupportedSchema("", "schema", "a schema is an object, true or false")
        self.document = schema
        # Every keyword counts where no draft is named, whichever draft it comes from.
        self.explicit_draft = isinstance(schema, dict) and isinstance(schema.get("$schema"), str)
        self.draft = draft_of(schema, LATEST, warnings)
        self.warnings = warnings
        self._nodes: dict[tuple[int, str], SchemaNode] = {}
        self._synthetic: dict[str, SchemaNode] = {}
        self._targets: dict[tuple[str, str, str], SchemaNode] = {}
        self._resources: dict[str, tuple[Any, str, int]] | None = None
        self._anchors: dict[tuple[str, str], tuple[Any, str]] = {}
        self.always = SchemaNode(True, "", "", self.draft)
        self.never = SchemaNode(False, "", "", self.draft)
        self.root = self.node(schema, "", "", self.draft)

    def node(self, schema: Any, base: str, path: str, draft: int) -> SchemaNode:
        """The interned node for a subschema found at `path` while `base` was in force."""
        if schema is True:
            return self.always
        if schema is False:
            return self.never
        if not isinstance(schema, dict):
            raise UnsupportedSchema(path, "schema", "a subschema is an object, true or false")
        key = (id(schema), base)
        found = self._nodes.get(key)
        if found is None:
            own_base, own_draft = self._enter(schema, base, draft)
            found = SchemaNode(schema, own_base, path, own_draft)
            self._nodes[key] = found
        return found

    def synthetic(self, schema: dict[str, Any]) -> SchemaNode:
        """A node for a schema that the document does not contain. The same value gives the same node."""
        key = repr(schema)
        found = self._synthetic.get(key)
        if found is None:
            found = SchemaNode(schema, self.root.base, "", LATEST)
            self._synthetic[key] = found
        return found

    def child(self, node: SchemaNode, schema: Any, keyword: str, token: str | None = None) -> SchemaNode:
        """The node of a subschema under a keyword of `node` (and a name or index below it)."""
        if schema is True:
            return self.always
        if schema is False:
            return self.never
        path = f"{node.path}/{keyword}" if token is None else f"{node.path}/{keyword}/{escape_pointer(token)}"
        return self.node(schema, node.base, path, node.draft)

    def reference(self, node: SchemaNode, keyword: str) -> SchemaNode:
        """The node that a `$ref` (or `$dynamicRef`, `$recursiveRef`) of `node` leads to."""
        target = node.schema[keyword]
        if not isinstance(target, str):
            raise node.fail(keyword, "must be a string")
        key = (node.base, target, keyword)
        found = self._targets.get(key)
        if found is None:
            found = self._resolve(node, keyword, target)
            if keyword != "$ref":
                found = self._outermost(node, keyword, target, found)
            self._targets[key] = found
        return found

    def mentions(self, *names: str) -> bool:
        """Whether any object of the document has one of these keys."""
        pending: list[Any] = [self.document]
        while pending:
            value = pending.pop()
            if isinstance(value, dict):
                if any(name in value for name in names):
                    return True
                pending.extend(value.values())
            elif isinstance(value, list):
                pending.extend(value)
        return False

    def _outermost(self, node: SchemaNode, keyword: str, target: str, found: SchemaNode) -> SchemaNode:
        """Where a dynamic reference leads: the outermost resource with the anchor, if that is the root."""
        if keyword == "$recursiveRef":
            marked = isinstance(found.schema, dict) and found.schema.get("$recursiveAnchor") is True
            root_marked = isinstance(self.document, dict) and self.document.get("$recursiveAnchor") is True
            return self.root if marked and root_marked else found
        name = unquote(urldefrag(target)[1])
        if not isinstance(found.schema, dict) or found.schema.get("$dynamicAnchor") != name:
            return found
        self._index()
        holders = [
            (base, schema, path)
            for (base, anchor), (schema, path) in self._anchors.items()
            if anchor == name and schema.get("$dynamicAnchor") == name
        ]
        for base, schema, path in holders:
            if base == self.root.base:
                return self.node(schema, base, path, self.draft)
        if len(holders) > 1:
            raise node.fail(
                keyword, f"{target!r} depends on the path taken; several resources have this anchor"
            )
        return found

    def _enter(self, schema: dict[str, Any], base: str, draft: int) -> tuple[str, int]:
        """The base URI and draft inside a schema object, which its own $id and $schema may change."""
        identifier = schema.get("$id")
        if identifier is None and (draft == 4 or not self.explicit_draft):
            identifier = schema.get("id")
        if not isinstance(identifier, str) or identifier.startswith("#") or not identifier:
            return base, draft
        if "$ref" in schema and draft <= 7:
            return base, draft
        if "$schema" in schema:
            draft = draft_of(schema, draft, self.warnings)
        return _join(base, urldefrag(identifier)[0]), draft

    def _resolve(self, node: SchemaNode, keyword: str, target: str) -> SchemaNode:
        address, fragment = urldefrag(_join(node.base, target) if not target.startswith("#") else target)
        if target.startswith("#"):
            address = node.base
        fragment = unquote(fragment)
        resource = self._resource(address)
        if resource is None:
            raise node.fail(
                keyword, f"{target!r} is outside this schema; remote references are never fetched"
            )
        value, base, draft = resource
        if fragment and not fragment.startswith("/"):
            self._index()
            anchored = self._anchors.get((base, fragment))
            if anchored is None:
                raise node.fail(keyword, f"{target!r} names no anchor of this schema")
            return self.node(anchored[0], base, anchored[1], draft)
        found = self._walk(value, base, draft, fragment)
        if found is None and address != self.root.base:
            # A misplaced $id is common; what its author meant is the document.
            found = self._walk(self.document, self.root.base, self.draft, fragment)
        if found is None:
            raise node.fail(keyword, f"{target!r} leads nowhere")
        return found

    def _resource(self, address: str) -> tuple[Any, str, int] | None:
        if address == self.root.base or not address:
            return self.document, self.root.base, self.draft
        return self._index().get(address)

    def _walk(self, value: Any, base: str, draft: int, pointer: str) -> SchemaNode | None:
        """Follow a decoded JSON pointer, taking on the base URIs passed on the way."""
        for token in pointer.split("/")[1:]:
            token = token.replace("~1", "/").replace("~0", "~")
            if isinstance(value, dict):
                value = value.get(token, _MISSING)
            elif isinstance(value, list) and token.isascii() and token.isdigit() and int(token) < len(value):
                value = value[int(token)]
            else:
                return None
            if value is _MISSING:
                return None
            if isinstance(value, dict):
                inside = value
                base, draft = self._enter(inside, base, draft)
        if not isinstance(value, (dict, bool)):
            return None
        return self.node(value, base, pointer, draft)

    def _index(self) -> dict[str, tuple[Any, str, int]]:
        """Every embedded resource by URI; fills the table of anchors too. Made when first needed."""
        if self._resources is None:
            self._resources = {}
            for schema, path, base, draft in self._subschemas():
                if base not in self._resources:
                    self._resources[base] = (schema, base, draft)
                for name in _anchor_names(schema, draft):
                    self._anchors.setdefault((base, name), (schema, path))
        return self._resources

    def _subschemas(self) -> Iterator[tuple[dict[str, Any], str, str, int]]:
        pending: list[tuple[Any, str, str, int]] = [(self.document, "", "", self.draft)]
        while pending:
            value, path, base, draft = pending.pop()
            if isinstance(value, dict):
                base, draft = self._enter(value, base, draft)
                yield value, path, base, draft
                items = [
                    (child, f"{path}/{escape_pointer(key)}", base, draft)
                    for key, child in value.items()
                    if key not in _DATA_KEYWORDS and isinstance(child, (dict, list))
                ]
                pending.extend(reversed(items))
            elif isinstance(value, list):
                pending.extend((child, f"{path}/{index}", base, draft) for index, child in enumerate(value))


def _join(base: str, reference: str) -> str:
    if reference.startswith("urn:") or not base:
        return reference
    if base.startswith("urn:") and reference.startswith("#"):
        return base + reference
    return urljoin(base, reference)


def _anchor_names(schema: dict[str, Any], draft: int) -> Iterator[str]:
    for keyword in ("$anchor", "$dynamicAnchor"):
        name = schema.get(keyword)
        if isinstance(name, str):
            yield name
    for keyword in ("$id", "id"):
        name = schema.get(keyword)
        if isinstance(name, str) and name.startswith("#") and len(name) > 1:
            yield unquote(name[1:])
    if draft == 2019 and schema.get("$recursiveAnchor") is True:
        yield ""
