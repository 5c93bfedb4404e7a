"""Models on the Hugging Face Hub, by the name owner/model."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

from rtdetr.extras import optional
from rtdetr.weights.checkpoint import CheckpointError
from rtdetr.weights.pretrained import CONFIG, WEIGHTS, save_pretrained

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
CARD = """---
library_name: rtdetr
pipeline_tag: object-detection
{licence}tags:
- object-detection
- rt-detr
---

# {name}

RT-DETRv3 for {count} classes: {classes}.

```python
from rtdetr import RTDETRv3

model = RTDETRv3.from_pretrained("{name}")
print(model.predict("picture.jpg"))
```
"""


def from_hub(repo_id: str, revision: str | None = None) -> Path:
    """The folder of a model, downloaded where it is not there yet. Raises CheckpointError or MissingPackage."""
    hub = optional("huggingface_hub", "hub", f"{repo_id}: no such file or folder, and the Hub")
    try:
        return Path(hub.snapshot_download(repo_id, revision=revision, allow_patterns=[CONFIG, WEIGHTS]))
    except _failures(hub) as error:
        raise CheckpointError(
            f"{repo_id}: no such file or folder, and not to be had from the Hub ({_first(error)})"
        ) from error


def to_hub(repo_id: str, content: dict[str, Any], licence: str | None, private: bool, token: str | None) -> str:
    """Uploads a checkpoint's content with a short card; the address of the commit. Raises CheckpointError or
    MissingPackage."""
    if not isinstance(repo_id, str) or not HUB_ID.fullmatch(repo_id):
        raise CheckpointError(f"repo_id: expected owner/model, got {repo_id!r}")
    hub = optional("huggingface_hub", "hub", "push_to_hub()")
    names = content["classes"]["names"]
    listed = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
    shown = f"license: {licence.lower()}\n" if licence else ""
    card = CARD.format(name=repo_id, licence=shown, count=len(names), classes=listed)
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(Path(folder), content, licence)
        (Path(folder) / "README.md").write_text(card, encoding="utf-8")
        try:
            api = hub.HfApi(token=token)
            api.create_repo(repo_id, private=private, exist_ok=True)
            return str(api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message="RT-DETRv3 model"))
        except _failures(hub) as error:
            raise CheckpointError(f"{repo_id}: the Hub did not take it ({_first(error)})") from error


def _failures(hub: Any) -> tuple[type[BaseException], ...]:
    """What huggingface_hub raises: its own errors, and those of the HTTP library that it is built on."""
    base = [each for each in hub.errors.HfHubHTTPError.__mro__ if each.__name__ == "HTTPError"]
    return (OSError, ValueError, *base)


def _first(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
