"""A hook of mkdocs: files of the repository that pages link to come along as text; no link leads out of the site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\]\(\.\./([^)#]+)")


def on_files(files: Any, config: Any) -> Any:
    """Adds source/PATH.txt for each link to ../PATH; without it the link stays broken, which ends the build."""
    from mkdocs.structure.files import File

    for page in list(files.documentation_pages()):
        for path in LINK.findall(page.content_string):
            name = f"source/{path}.txt"
            if (ROOT / path).is_file() and files.get_file_from_path(name) is None:
                files.append(File.generated(config, name, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page with these links, and without what only tests read. `../page.md` of a folder within docs stays."""

    def to_source(link: re.Match[str]) -> str:
        return f"](source/{link[1]}.txt" if (ROOT / link[1]).is_file() else link[0]

    return LINK.sub(to_source, re.sub(r"<!--\s*(not run|setup).*?-->\n", "", markdown, flags=re.DOTALL))
