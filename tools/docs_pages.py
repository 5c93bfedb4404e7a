"""A hook of mkdocs: pages made from the sources. `cli.md` has the help of every command; `llms.txt` lists the pages for
language models, as llmstxt.org describes it, and `llms-full.txt` holds their text."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

GUIDES: list[tuple[str, str, str]] = []  # title, address and text of the pages of one build; measurements left out


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    files.append(File.generated(config, "cli.md", content=command_page()))
    return files


def command_page() -> str:
    """Markdown: what `rtdetr COMMAND --help` prints, for each command."""
    from rtdetr.benchmarks.__main__ import main as benchmark
    from rtdetr.cli import COMMANDS, run

    os.environ["COLUMNS"] = "110"  # of the help
    page = ["# Command line", "", "Made from the commands themselves. `rtdetr COMMAND --help` prints the same.", ""]
    for name, says in COMMANDS.items():
        page += [f"## rtdetr {name}", "", f"{says[0].upper()}{says[1:]}.", "", "```text"]
        page += [help_of(benchmark if name == "benchmark" else partial(run, name)), "```", ""]
    return "\n".join(page)


def help_of(run: Callable[[Sequence[str]], int], *words: str) -> str:
    """The help of a command, and after it that of each command of its own."""
    said = StringIO()
    with redirect_stdout(said), suppress(SystemExit):
        run([*words, "--help"])
    text = said.getvalue().rstrip()
    own = re.search(r"^  \{(\S+)\}$", text, re.MULTILINE)
    return "\n\n\n".join([text, *(help_of(run, *words, each) for each in own[1].split(","))]) if own else text


def on_page_markdown(markdown: str, page: Any, **_: Any) -> None:
    if not page.file.src_uri.startswith("measurements/"):
        GUIDES.append((page.title, page.file.dest_uri, markdown))


def on_post_build(config: Any) -> None:
    head = [f"# {config['site_name']}", "", f"> {config['site_description']}", ""]
    links = [f"- [{title}]({address})" for title, address, _ in GUIDES]
    site = Path(config["site_dir"])
    (site / "llms.txt").write_text("\n".join([*head, "## Docs", "", *links, ""]), encoding="utf-8")
    (site / "llms-full.txt").write_text("\n\n".join(text.strip() for *_, text in GUIDES) + "\n", encoding="utf-8")
    GUIDES.clear()
