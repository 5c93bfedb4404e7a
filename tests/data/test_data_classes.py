"""Which category of a file is which class of a model: by id, or by name; and sentences where that cannot be told."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from coco_set import SET, open_coco, write_set
from messages import message

from rtdetr.data.classes import NO_ID, Classes, DataError
from rtdetr.data.data_arguments import data_updates, path_of


def test_classes_of_the_model_decide_the_labels(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    larger = Classes(("ant", "circle", "bee", "triangle", "x-shape"), (1, 2, 3, 5, 11))
    with caplog.at_level(logging.WARNING):
        data = open_coco(*write_set(tmp_path), classes=larger)
    assert data.classes == larger and data.targets(0)[1].tolist() == [1, 4]
    assert message("class names differ", "11", "'cross'", "'x-shape'").search(caplog.text)


def test_categories_the_model_does_not_know(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message("unknown classes", "5 ('triangle')", "11 ('cross')", "2 ('circle')")):
        open_coco(*write_set(tmp_path), classes=Classes(("circle",), (2,)))
    with pytest.raises(DataError, match=message("class ids differ", "'circle'", "2", "5")):
        open_coco(*write_set(tmp_path), classes=Classes(("triangle", "circle", "cross"), (2, 5, 11)))


def test_classes_matched_by_name_have_the_ids_of_the_file(tmp_path: Path) -> None:
    model = Classes(("Cross ", "ant", "circle", "CIRCLE", "triangle"), (2, 5, 11, 12, 13))
    data = open_coco(*write_set(tmp_path), classes=model, match="name")
    assert data.classes == Classes(model.names, (11, NO_ID, 2, NO_ID, 5))
    assert data.targets(0)[1].tolist() == [2, 0]  # circle and cross
    own = open_coco(*write_set(tmp_path), classes=data.classes, match="id")
    assert own.targets(0)[1].tolist() == [2, 0]


def test_names_of_pascal_voc_are_those_of_coco(tmp_path: Path) -> None:
    categories = [{"id": i, "name": name} for i, name in zip((2, 5, 11), ("aeroplane", "Sofa", "cat"))]
    model = Classes(("cat", "couch", "airplane"), (17, 63, 5))
    data = open_coco(*write_set(tmp_path, SET | {"categories": categories}), classes=model, match="name")
    assert data.classes.category_ids == (11, 5, 2)


@pytest.mark.parametrize(
    ("here", "model", "unknown"),
    [
        (("circle", "triangle", "cross"), ("circle", "square"), "5 ('triangle'), 11 ('cross'); it was trained for"),
        (("Circle", "triangle", "cross"), ("circle", "CIRCLE", "triangle", "cross"), "2 ('Circle');"),
        (("circle", "Circle", "cross"), ("CIRCLE", "cross"), "2 ('circle'), 5 ('Circle');"),
        (("circle", "circle", "cross"), ("circle", "cross"), "2 ('circle'), 5 ('circle');"),
        (("circle", "cross", "star"), ("circle", "circle", "cross", "star"), "2 ('circle');"),
    ],
)
def test_names_that_do_not_match_are_listed(
    tmp_path: Path, here: tuple[str, ...], model: tuple[str, ...], unknown: str
) -> None:
    categories = [{"id": i, "name": name} for i, name in zip((2, 5, 11), here)]
    with pytest.raises(DataError) as caught:
        classes = Classes(model, tuple(range(len(model))))
        open_coco(*write_set(tmp_path, SET | {"categories": categories}), classes=classes, match="name")
    assert message("unknown class names", "a.json", unknown).search(str(caught.value))


def test_matching_by_name_is_offered_where_all_names_agree(tmp_path: Path) -> None:
    offer = "all names agree: evaluate(match_classes='name') goes by them"
    agree = Classes(("triangle", "Circle", "cross"), (1, 2, 3)), Classes(("triangle", "circle", "cross"), (2, 5, 11))
    for classes, offered in (*((each, True) for each in agree), (Classes(("circle", "dog"), (1, 2)), False)):
        with pytest.raises(DataError) as caught:
            open_coco(*write_set(tmp_path), classes=classes)
        assert (offer in str(caught.value)) == offered


def test_ways_to_match_are_id_and_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="match_classes: expected id or name, got 'Id'"):
        open_coco(*write_set(tmp_path), classes=Classes(("circle",), (2,)), match="Id")


def test_paths_of_the_python_api_may_begin_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write_set(tmp_path)
    assert path_of("resume", "~/last.pth") == tmp_path / "last.pth"
    wanted = ['data.val.images=""', f'data.val.annotations="{tmp_path}/a.json"']
    assert data_updates("~/a.json", ("val",)) == wanted
    assert data_updates(("~/", "~/a.json"), ("val",))[1] == wanted[1]


def test_long_lists_of_classes_are_cut(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    many = [{"id": i, "name": f"name {i}"} for i in range(1203)]
    arguments = write_set(tmp_path, SET | {"categories": many})
    with pytest.raises(DataError, match=message("and more", "4 ('name 4')", "1198", "('a 9008')", "1193")):
        open_coco(*arguments, classes=Classes(tuple(f"a {i}" for i in range(9000, 10203)), tuple(range(9000, 10203))))
    open_coco(*arguments, classes=Classes(tuple(f"a {i}" for i in range(1203)), tuple(range(1203))))
    assert len(caplog.records) == 1 and "by the model 'a 4' and 1198 more" in caplog.text
