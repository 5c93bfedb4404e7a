"""Repeat-factor sampling: LVIS' definition, epochs of one length, exact in several processes, the doctor's advice."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from messages import message
from PIL import Image

from rtdetr.config import Config, DataConfig, load_config
from rtdetr.data.doctor.examine import examine
from rtdetr.data.formats.sources import open_set
from rtdetr.data.loader import SampleKey, TrainingBatches, build_train_loader
from rtdetr.data.sampling import auto_threshold, repeat_factors, repeated_order, samples_per_epoch

CLASSES = ("often", "seldom", "once")


def long_tailed(root: Path) -> Path:
    """40 images: all but one with "often", 3 with "seldom" (twice in each), 1 with "once", 1 with nothing."""
    document: dict[str, Any] = {
        "images": [{"id": i, "file_name": f"{i}.png", "height": 32, "width": 48} for i in range(40)],
        "categories": [{"id": i, "name": name} for i, name in enumerate(CLASSES, start=1)],
        "annotations": [],
    }
    labels = {i: [1] for i in range(39)} | {4: [1, 2, 2], 5: [2, 2], 6: [1, 2, 2, 3]}
    (root / "train").mkdir(parents=True)
    for i in range(40):
        Image.new("RGB", (48, 32), (6 * i, 50, 90)).save(root / "train" / f"{i}.png")
        for place, label in enumerate(labels.get(i, [])):
            box = {"image_id": i, "category_id": label, "bbox": [4 + 6 * place, 5, 12, 14], "area": 168, "iscrowd": 0}
            document["annotations"].append({"id": len(document["annotations"]) + 1} | box)
    (root / "annotations").mkdir()
    path = root / "annotations" / "instances_train.json"
    path.write_text(json.dumps(document))
    return path


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return long_tailed(tmp_path_factory.mktemp("tailed"))


def config(path: Path, *updates: str) -> Config:
    nano = Path(__file__).resolve().parents[2] / "configs" / "rtdetrv3_nano_shapes.yml"
    data = [f"data.train.images={path.parents[1]}/train", f"data.train.annotations={path}", "data.num_workers=0"]
    chosen = ["data.sampling=repeat_factor", "data.train_batch_size=4", "data.augment.batch_sizes=[64]"]
    return load_config(nano, [*data, *chosen, *updates])


@pytest.mark.parametrize("threshold", [0.001, 0.1, 0.5, 1.0])
def test_the_factors_are_those_of_the_definition(path: Path, threshold: float) -> None:
    """By a loop over the file, which shares nothing with the code."""
    document = json.loads(path.read_text())
    classes_of: dict[int, set[int]] = {image["id"]: set() for image in document["images"]}
    for box in document["annotations"]:
        classes_of[box["image_id"]].add(box["category_id"])
    share = {c: sum(c in each for each in classes_of.values()) / 40 for c in (1, 2, 3)}
    r = {c: max(1.0, math.sqrt(threshold / share[c])) for c in share}
    expected = [max([r[c] for c in classes_of[i]], default=1.0) for i in range(40)]
    found = repeat_factors(open_set(path), DataConfig(sampling=threshold))
    assert found is not None and found.tolist() == pytest.approx(expected, abs=1e-6)
    assert (threshold == 0.001) == (found.max() == 1)


def test_the_threshold_by_itself() -> None:
    assert auto_threshold(1_230_000) == auto_threshold(100_000) == 0.001  # LVIS has 100,170 images
    assert auto_threshold(5000) == 0.02 and auto_threshold(200) == auto_threshold(1) == 0.1


def test_each_image_comes_as_often_as_its_factor_says() -> None:
    factors = np.array([1.0, 1.25, 2.5, 3.0, 1.0, 1.1])
    length = samples_per_epoch(factors, 6)
    total = np.zeros(6)
    for epoch in range(4000):
        samples = repeated_order(np.random.default_rng((7, epoch)), factors)
        assert len(samples) == length == 9
        times = np.bincount(samples[:, 0], minlength=6)
        assert (times <= np.ceil(factors)).all() and (times >= np.floor(factors) - 1).all()
        assert sum(times < np.floor(factors)) <= 1  # the one sample that may be too many
        assert all(
            sorted(samples[samples[:, 0] == i, 1]) == sorted(set(samples[samples[:, 0] == i, 1])) for i in range(6)
        )
        total += times
    # 0.85 samples of 9.85 are left out on average, of any image alike
    assert total / 4000 == pytest.approx(factors * 9 / factors.sum(), rel=0.03)


def test_without_rare_classes_every_image_comes_once() -> None:
    samples = repeated_order(np.random.default_rng(0), np.ones(50))
    assert sorted(samples[:, 0]) == list(range(50)) and not samples[:, 1].any()


def test_the_length_does_not_depend_on_the_order() -> None:
    """Sums of floats do: one ulp below a whole number would cost a sample."""
    rng = np.random.default_rng(5)
    data = DataConfig(sampling=1.0)
    for _ in range(50):
        num = int(rng.integers(2, 60))
        labels = np.minimum(rng.geometric(0.3, num), 5) - 1

        class Set:
            classes = range(5)

            def __len__(self, num: int = num) -> int:
                return num

            def images_and_classes(self, num: int = num, labels: Any = labels) -> Any:
                return np.arange(num), labels

        factors = repeat_factors(Set(), data)  # type: ignore[arg-type]
        assert factors is not None
        lengths = {len(repeated_order(np.random.default_rng(i), factors)) for i in range(40)}
        assert lengths == {samples_per_epoch(factors, num)}


def keys(
    path: Path, epoch: int, start: int = 0, rank: int = 0, processes: int = 1, size: int = 4
) -> list[list[SampleKey]]:
    batches = build_train_loader(config(path, f"data.train_batch_size={size}"), 3, rank, processes).batch_sampler
    assert isinstance(batches, TrainingBatches)
    batches.epoch, batches.start_batch = epoch, start
    return list(batches)


def test_processes_share_an_epoch_and_any_batch_can_be_gone_on_from(path: Path) -> None:
    whole = keys(path, 2)
    shares = [keys(path, 2, rank=rank, processes=2, size=2) for rank in (0, 1)]
    for batch, left, right in zip(whole, *shares, strict=True):
        assert [(k.image, k.before) for k in batch] == [(k.image, k.before) for k in left + right]
    for start in (0, 3, len(whole)):
        assert keys(path, 2, start) == whole[start:]
    assert (
        keys(path, 3) != whole
        and len(keys(path, 3)) == len(whole) == build_train_loader(config(path), 3).num_samples // 4
    )
    counts = Counter(k.image for batch in whole + keys(path, 3) + keys(path, 4) for k in batch)
    assert counts[6] == max(counts.values()) > 3


def test_samples_of_one_image_are_augmented_apart(path: Path) -> None:
    dataset = build_train_loader(config(path, "data.augment.distort_prob=1.0"), 3).dataset
    first, again, second = (dataset[SampleKey(6, 1, 64, "linear", before)] for before in (0, 0, 1))
    assert (first.image == again.image).all() and (first.image != second.image).any()


def test_the_doctor_says_where_it_would_matter(path: Path, tmp_path: Path) -> None:
    said = "\n".join(examine(path).lines())
    assert message("rare classes", "40", "1", "data.sampling=repeat_factor", "2.0").search(said), said
    document = json.loads(path.read_text())
    document["annotations"] = [each for each in document["annotations"] if each["category_id"] == 1]
    even = tmp_path / "even.json"
    even.write_text(json.dumps(document))
    assert "repeat_factor" not in "\n".join(examine(even, str(path.parents[1] / "train")).lines())
