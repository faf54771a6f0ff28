"""An extension of griffe: the comment behind a field of a class documents the field."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from griffe import Attribute, Docstring, Extension, ObjectNode


class FieldComments(Extension):
    """Give a field without a docstring the text of its comment."""

    def on_attribute_instance(
        self, *, node: ast.AST | ObjectNode, attr: Attribute, **_: Any
    ) -> None:
        """Read the comment on the field's last line."""
        path, last = attr.filepath, attr.endlineno
        if attr.docstring is None and attr.parent and attr.parent.is_class and last:
            assert isinstance(path, Path)
            comment = attr.lines_collection[path][last - 1].partition("  # ")[2]
            if comment:
                attr.docstring = Docstring(comment[0].upper() + comment[1:] + ".", parent=attr)
