"""`python -m rtdetr.ops [--json]`: reports which libraries are built, for which GPUs, and each device's backend."""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch

from rtdetr.ops import compiled, resolve_backend, why_not_compiled


def report() -> dict[str, Any]:
    """Data of the report: `libraries` (what setup.py did, why one is unusable), `devices` (the backend under auto)."""
    libraries = {
        kind: {"built": False, **compiled.INFO.get(kind, {}), "usable": why is None, "why_not": why}
        for kind, why in compiled.WHY_NOT.items()
    }
    devices = {}
    for name in ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]:
        value = torch.empty(0, device=name)
        devices[name] = {
            "name": torch.cuda.get_device_name(name) if value.is_cuda else "CPU",
            "backend": resolve_backend("auto", value),
            "why_not": why_not_compiled(value),
        }
    return {
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "folder": str(compiled.FOLDER),
        "debug": compiled.INFO.get("debug", False),
        "libraries": libraries,
        "devices": devices,
    }


def lines(facts: dict[str, Any]) -> list[str]:
    """The report as text, one line per library and device."""
    text = [f"torch {facts['torch']}, CUDA {facts['torch_cuda'] or 'none'}; libraries in {facts['folder']}"]
    for kind, library in facts["libraries"].items():
        built = f"built against torch {library['torch']}" if library["built"] else "not built"
        if "archs" in library:
            built += f" with CUDA {library['cuda']} for {' '.join(library['archs'])}"
        text.append(f"{kind} kernels: {built}{', debug' if facts['debug'] else ''}")
        if library["why_not"]:
            text.append(f"  {library['why_not']}")
    for name, device in facts["devices"].items():
        why = f": {device['why_not']}" if device["why_not"] else ""
        text.append(f"{name} ({device['name']}) uses the backend {device['backend']}{why}")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m rtdetr.ops", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the facts as JSON")
    facts = report()
    print(json.dumps(facts, indent=1) if parser.parse_args().json else "\n".join(lines(facts)))


if __name__ == "__main__":
    main()
