"""Models on the Hugging Face Hub, by the name owner/model."""

from __future__ import annotations

import functools
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from rtdetr.config import ConfigError
from rtdetr.extras import optional
from rtdetr.weights.checkpoint import CheckpointError
from rtdetr.weights.huggingface import save_huggingface
from rtdetr.weights.pretrained import CONFIG, OWN_FOLDER, PICKLED, PROCESSOR, WEIGHTS, holds_own, save_pretrained
from rtdetr.wording import counted, first_line

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
CARD = """---
library_name: {library}
pipeline_tag: object-detection
{licence}tags:
- object-detection
- rt-detr
---

# {name}

RT-DETRv3 for {count}: {classes}.

```python
{code}
```

| | |
|---|---|
{facts}
"""
CODE = {
    "rtdetr": """from rtdetr import RTDETRv3

model = RTDETRv3.from_pretrained("{name}")
print(model.predict("image.jpg"))""",
    "transformers": """from transformers import pipeline

detector = pipeline("object-detection", model="{name}")
print(detector("image.jpg"))""",
}
Format = Literal["rtdetr", "transformers", "both"]


def from_hub(repo_id: str, revision: str | None = None) -> Path:
    """The folder of a model, downloaded if necessary. Raises CheckpointError or MissingPackage."""
    hub = optional("huggingface_hub", "hub", f"{repo_id}: no such file or folder, and the Hub")
    try:

        def download(*wanted: str) -> Path:
            return Path(hub.snapshot_download(repo_id, revision=revision, allow_patterns=[*wanted]))

        if holds_own(download(CONFIG)):
            return download(CONFIG, f"{OWN_FOLDER}/{CONFIG}", f"{OWN_FOLDER}/{WEIGHTS}")
        folder = download(CONFIG, WEIGHTS, PROCESSOR)
        if not (folder / WEIGHTS).is_file():  # old transformers models have only the pickled weights
            folder = download(CONFIG, PICKLED, PROCESSOR)
        return folder
    except _failures(hub) as error:
        raise CheckpointError(
            f"{repo_id}: no such file or folder, and not to be had from the Hub ({first_line(error)})"
        ) from error


def saver(format: Format) -> Callable[[Path, dict[str, Any], str | None], None]:
    """The function that writes a checkpoint's content into a folder. Raises ConfigError for an unknown format."""
    if format not in get_args(Format):
        raise ConfigError(f"format: expected rtdetr, transformers or both, got {format!r}")
    if format == "rtdetr":
        return save_pretrained
    return functools.partial(save_huggingface, own_folder=format == "both")


def to_hub(
    repo_id: str,
    content: dict[str, Any],
    licence: str | None,
    private: bool,
    token: str | None,
    format: Format = "rtdetr",
    figures: Mapping[str, float] | None = None,
) -> str:
    """Uploads a checkpoint's content with a card; returns the URL of the commit. Raises CheckpointError or
    MissingPackage.

    format: as in `save_pretrained`. figures: of an evaluation, for the card.
    """
    if not isinstance(repo_id, str) or not HUB_ID.fullmatch(repo_id):
        raise CheckpointError(f"repo_id: expected owner/model, got {repo_id!r}")
    hub = optional("huggingface_hub", "hub", "push_to_hub()")
    save = saver(format)
    card = _card(repo_id, content, licence, format, figures or {})
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder), content, licence)
        (Path(folder) / "README.md").write_text(card, encoding="utf-8")
        try:
            api = hub.HfApi(token=token)
            api.create_repo(repo_id, private=private, exist_ok=True)
            return str(api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message="RT-DETRv3 model"))
        except _failures(hub) as error:
            raise CheckpointError(f"{repo_id}: the Hub did not take it ({first_line(error)})") from error


def _card(name: str, content: dict[str, Any], licence: str | None, format: Format, figures: Mapping[str, float]) -> str:
    names, config, source = content["classes"]["names"], content["config"], content["source"] or {}
    listed = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
    train, batch, size = config["train"], config["data"]["train_batch_size"], content["preprocess"]["size"]
    facts = {
        "config": config["name"],
        "input": f"{size[0]} x {size[1]}, resized {content['preprocess']['interpolation']}",
        "recipe": f"{train['epochs']} epochs, {batch} images a batch, lr {config['optimizer']['lr']}",
        **_start(content.get("began") or {}),
        **{f"weights: {key}": value for key, value in source.items()},
        **{key: f"{value:.4f}" for key, value in figures.items()},
    }
    libraries = ["transformers", "rtdetr"] if format == "both" else [format]
    return CARD.format(
        library=libraries[0],
        licence=f"license: {licence.lower()}\n" if licence else "",
        name=name,
        count=counted(len(names), "class"),
        classes=listed,
        code="\n```\n\n```python\n".join(CODE[each].format(name=name) for each in libraries),
        facts="\n".join(f"| {key} | {value} |" for key, value in facts.items()),
    )


def _start(began: Mapping[str, Any]) -> dict[str, str]:
    """Data and initial weights of the run that trained a model, as far as its checkpoint contains them."""
    facts = {"data": counted(began["images"], "image")} if "images" in began else {}
    if began.get("weights"):
        facts |= {"started from": f"{began['weights']}, licence: {began.get('licence') or 'unknown'}"}
    return facts


def _failures(hub: Any) -> tuple[type[BaseException], ...]:
    """Exceptions of huggingface_hub: its own, and those of the HTTP library that it is built on."""
    base = [each for each in hub.errors.HfHubHTTPError.__mro__ if each.__name__ == "HTTPError"]
    return (OSError, ValueError, *base)
