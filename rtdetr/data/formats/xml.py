"""Parses XML into a small tree with line numbers. Reads no other files and expands no entities."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.parsers import expat

from rtdetr.data.classes import DataError
from rtdetr.data.formats.sniff import kind_of_bytes

MAX_DEPTH = 20


@dataclass(slots=True)
class Node:
    tag: str
    line: int
    text: str = ""  # text directly in the element
    children: list[Node] = field(default_factory=list)
    attributes: dict[str, str] = field(default_factory=dict)

    def all(self, tag: str) -> list[Node]:
        return [each for each in self.children if each.tag == tag]


def parse_xml(content: bytes, path: Path) -> Node:
    """The root element. Raises DataError with file and line for invalid XML, declared entities and deep nesting."""
    parser = expat.ParserCreate()
    parser.buffer_text = True
    above = [Node("", 0)]  # the element that is being read, after those around it

    def start(tag: str, attributes: dict[str, str]) -> None:
        node = Node(tag, parser.CurrentLineNumber, attributes=attributes)
        if len(above) > MAX_DEPTH:
            raise DataError(f"{path}: line {node.line}: nested more than {MAX_DEPTH} deep, which no annotation is")
        above[-1].children.append(node)
        above.append(node)

    def text(characters: str) -> None:
        above[-1].text += characters

    def entity(name: str, *_: Any) -> None:
        line = parser.CurrentLineNumber
        raise DataError(f"{path}: line {line}: declares the entity {name!r}, which no annotation needs; refused")

    parser.StartElementHandler, parser.EndElementHandler = start, lambda _: above.pop()
    parser.CharacterDataHandler, parser.EntityDeclHandler = text, entity
    try:
        parser.Parse(content, True)
    except expat.ExpatError as error:
        raise DataError(
            f"{path}: line {error.lineno}: not valid XML ({expat.ErrorString(error.code)}, column {error.offset + 1})"
            f"{'' if content.lstrip().startswith(b'<') else kind_of_bytes(content)}"
        ) from error
    except DataError:  # of the functions above
        raise
    except (LookupError, ValueError) as error:  # an encoding that Python does not know or cannot pass to expat
        raise DataError(f"{path}: line 1: not valid XML ({error}); save it as UTF-8") from error
    return above[0].children[0]
