"""`rtdetr doctor`"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from rtdetr.commands.arguments import Parser, integer
from rtdetr.wording import counted

ABOUT = """List everything that is wrong with a data set, and what training does about it: kept, clipped, dropped or
refused. Reads the annotations and every image, changes nothing, and opens nothing outside the image folder.

    rtdetr doctor configs/my_config.yml
    rtdetr doctor annotations/instances_train.json --images train

Exit codes: 0 sound, 1 defects that training would survive, 2 unusable.
"""


def run(arguments: Sequence[str] | None = None) -> int:
    parser = Parser("doctor", ABOUT)
    parser.add_argument("source", metavar="SOURCE", help="a config, an annotation file, or the folder of a set")
    parser.add_argument("--images", type=Path, metavar="DIR", help="the image folder; default: found near the file")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all defects as a JSON list")
    text = "write a clean copy as COCO JSON: a file if OUT ends in .json, else a folder. Images are not copied"
    parser.add_argument("--fix", type=Path, metavar="OUT", help=text)
    parser.add_argument("--fast", action="store_true", help="open no image, as training does at its start")
    text = "largest image, in millions of pixels; default: data.max_megapixels of the config, 179"
    parser.add_argument("--max-megapixels", type=integer(1, 10_000), metavar="N", help=text)
    parser.add_argument("--overwrite", action="store_true", help="replace an existing FILE of --json")
    args = parser.parse_args(arguments)

    from rtdetr.commands.progress import progress
    from rtdetr.config_file import shipped_configs
    from rtdetr.data.defects import Defect
    from rtdetr.data.doctor.examine import examine
    from rtdetr.data.doctor.fix import clean_document, clean_files
    from rtdetr.outputs import OutputError, check_outputs, write_text

    source = shipped_configs().get(args.source, Path(args.source))
    if args.fix and os.path.lexists(args.fix):
        raise OutputError(f"{args.fix}: exists already; --fix needs a path that does not exist")
    check_outputs([each for each in (args.json, args.fix) if each], [source], args.overwrite)
    limit = args.max_megapixels
    one = args.fix is not None and args.fix.suffix.lower() == ".json"
    report = examine(source, str(args.images or ""), args.fast, lambda number: progress(number).update, limit, one)
    read = [part.source.path for part in report.sets]
    read += [file for part in report.sets if part.data is not None for file in part.data.files()]
    check_outputs([each for each in (args.json,) if each], read, args.overwrite)
    missing = args.images and not args.images.is_dir()
    if missing and all(each.kind != "folder_missing" for each in report.defects()):
        defect = Defect(str(args.images), None, "folder_missing", "no such image folder", "refused")
        report = report._replace(others=[*report.others, defect])
    *lines, verdict = report.lines()
    for line in lines:
        print(line)
    if args.json:
        write_text(args.json, json.dumps([each.plain() for each in report.defects()], indent=1))
    if args.fix:
        files = clean_files(report.sets, args.fix)
        documents = {file: clean_document(part) for file, part in files.items()}
        for file, document in documents.items():
            write_text(file, json.dumps(document))
            images = files[file].data
            where = f", in {images.folder}" if images else ""
            boxes = counted(len(document["annotations"]), "box")
            print(f"{file}: {counted(len(document['images']), 'image')}{where}, {boxes}")
    print(verdict)
    return report.code()
