"""`rtdetr weights`"""

from __future__ import annotations

from collections.abc import Sequence

from rtdetr.commands.arguments import Parser

ABOUT = """List the weights that can be used by name. Every command takes a name in place of a file of weights:

    rtdetr predict rtdetr_r50vd_coco_o365 images
    rtdetr train DATA -t rtdetr_r18vd_o365

Weights are downloaded once, into RTDETR_WEIGHTS or ~/.cache/rtdetr/weights. owner/model is a model of the Hugging
Face Hub.
"""


def run(arguments: Sequence[str] | None = None) -> int:
    Parser("weights", ABOUT).parse_args(arguments)

    from rtdetr.weights.catalogue import OFFICIAL, RELEASES, checkpoint_of, size_of

    row = "{:26s} {:>7s} {:>8s} {:>9s} {:11s} {:4s} {}"
    print(row.format("name", "classes", "COCO AP*", "MB", "licence", "here", "source"))
    for name, (file, ap, classes, _) in {**OFFICIAL, **RELEASES}.items():
        size = size_of(name)
        figures = str(len(classes)), f"{ap:.1f}" if ap else "-", f"{size / 1e6:.1f}" if size else "?"
        print(row.format(name, *figures, file.licence, "yes" if checkpoint_of(name).is_file() else "no", file.url))
    print("* as its authors report; nothing of it was measured here")
    return 0
