"""The messages that tests expect, by their key words. Prose may change; what a message is about, and the names, numbers
and advice that it gives, may not.

    with pytest.raises(DataError, match=message("no annotations", "nowhere")):
    assert message("not written", "new", "No space left on device").search(err)
"""

from __future__ import annotations

import re

# What each message is about -> words that one line of it holds, in any order; `a|b`: one of them.
MESSAGES = {
    # arguments, keys and values
    "expected": ["expected|must be|must divide|must leave"],
    "not possible": ["cannot be|not possible"],
    "unknown key": ["unknown", "nearest|did you mean|has them all"],
    "ambiguous key": ["several keys"],
    "no such config": ["no (such )?config"],
    "needs": ["needs?|expected"],
    "nested": ["nested", "deep"],
    "expected device": ["needs|expected", "tensors"],
    "asked too late": ["after"],
    "missing package": ["needs|not installed"],
    "other version": ["versions?"],
    "not imported": ["cannot be imported"],
    # files, folders and addresses
    "no such path": ["there is none|no such|does not exist"],
    "no such weights": ["no such weight|cannot be (looked at|accessed)"],
    "not on the Hub": ["Hub"],
    "folder": ["is a folder"],
    "already": ["already|exists"],
    "run there": ["go on with|continue with", "choose another"],
    "overwrite with resume": ["resume", "leave out"],
    "would be replaced": ["would be"],
    "nothing written there": ["nothing can be"],
    "not written": ["cannot be written"],
    "not opened": ["cannot be opened"],
    "not looked at": ["cannot be (looked at|accessed)"],
    "not fetched": ["cannot be fetched"],
    "not downloaded": ["cannot be downloaded"],
    "not listened at": ["cannot be listened at"],
    "broken off": ["too early"],
    "private address": ["private network"],
    "other addresses": ["other address"],
    "unknown host": ["does not know|cannot resolve"],
    "leaves the folder": ["leaves"],
    "changed by hand": ["not as"],
    "other file": ["not the file"],
    "other content": ["not the official file"],
    "other size of file": ["official file"],
    "no published hash": ["nobody|not published", "hash"],
    "no checksums": ["without checksums|digest"],
    "more than weights need": ["more", "weights"],
    # images and annotations
    "not an image": ["cannot be read"],
    "no image left": ["no image"],
    "empty": ["is empty"],
    "no full batch": ["not fill", "batch"],
    "no image there": ["no image"],
    "not one image": ["no image", "several"],
    "too large": ["larger than"],
    "other size": ["the image is"],
    "passed over": ["without the ending"],
    "images not found": ["images", "not found"],
    "images inside": ["inside"],
    "no annotations": ["no annotations recognised|no such annotation"],
    "no such set": ["no set"],
    "several image folders": ["images", "may be"],
    "other case": ["upper and lower case"],
    "images not used": ["is not used"],
    "cannot be linked": ["link"],
    "xml size": ["whole pixels|from 0 to"],
    "no labels": ["none", "label file"],
    "data elsewhere": ["not here"],
    "backslashes": ["with / instead"],
    "not UTF-8": ["UTF-8"],
    "other list": ["manifest"],
    "no box": ["not a single box|no box"],
    "numbers images": ["numbers the images|--annotations"],
    "boxes left out": ["left out"],
    "none may be dropped": ["dropped", "none may be"],
    "knows no boxes": ["no boxes"],
    "wrong labels": ["returned", "labels"],
    "wrong result": ["returned"],
    # classes
    "unknown class": ["no class", "did you mean"],
    "unknown classes": ["unknown to the model"],
    "unknown class names": ["no class|not among"],
    "unknown reference": ["not among"],
    "class names differ": ["is called"],
    "class ids differ": ["has id", "knows it as"],
    "other classes": ["not the detector"],
    "other classes than the data's": ["other classes"],
    "and more": ["more"],
    "classes carried over": ["carried over by name|class names .* unknown"],
    "unnamed classes": ["class names", "unknown"],
    # weights and models
    "foreign model": ["not", "this project"],
    "unknown layout": ["neither"],
    "own state dict": ["state dict", "without"],
    "nothing fits": ["none", "fits"],
    "other weights": ["other weights|another model|not (the weights|those)"],
    "detects other classes": ["detects", "not"],
    "other optimiser": ["optimiser state", "not fit"],
    "no agreement": ["not agree"],
    "cannot run": ["cannot run it"],
    "runs as exported": ["runs as it was exported"],
    # running
    "no room in memory": ["not fit into"],
    "non-finite": ["not finite"],
    "first non-finite module": ["first module", "not finite"],
    "overfit": ["trained on"],
    "more would pay": ["would pay:"],
    "more would pay little": ["would pay little"],
    "more would hardly pay": ["hardly pay"],
    "finished": ["finished at iteration"],
    "nothing reached the threshold": ["nothing reached"],
    "backend cannot run": ["cannot run"],
    "too many levels": ["at most", "levels"],
    "cells differ": ["cells"],
    "without CUDA": ["no CUDA"],
    "not built": ["not built"],
    "too many files": ["on their way|in progress", "the most"],
    "all answered": ["answered"],
}
OWN_WORDS = (  # messages that are named by their key words
    "no such method", "did you mean", "not a command", "not an argument", "not valid", "twice", "only",
    "began with", "imported already", "no such file", "not empty", "web page", "outside", "stopped", "damaged",
    "other bytes", "state before", "no such image", "looks like", "no result", "taken as", "several annotations",
    "failed", "no function", "rare classes", "out of memory", "no estimate",
)  # fmt: skip
MESSAGES |= {name: [name] for name in OWN_WORDS}


def message(name: str, *facts: object) -> re.Pattern[str]:
    """Finds a line with the key words of a message and with each of the facts of the case, as words of their own, in
    the singular or the plural."""
    own = [rf"(?<!\w){re.escape(str(fact))}s?(?!\w)" for fact in facts]
    return re.compile("^" + "".join(f"(?=.*(?:{each}))" for each in [*MESSAGES[name], *own]), re.MULTILINE)


def says(text: str, expected: str | re.Pattern[str]) -> bool:
    """Whether a text holds a word, or a line as `message` wants it."""
    return expected in text if isinstance(expected, str) else expected.search(text) is not None
