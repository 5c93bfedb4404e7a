"""Batches: reproducible whatever the number of workers, shared out among processes, and in the right units."""

from __future__ import annotations

import dataclasses
import gc
import json
import multiprocessing
import os
import re
import resource
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from image_cases import BAD
from messages import message
from PIL import Image

from rtdetr.boxes import cxcywh_to_xyxy
from rtdetr.config import AugmentConfig, Config, DataConfig, SplitConfig
from rtdetr.data.classes import DataError
from rtdetr.data.loader import (
    DetectionLoader,
    LoadedImage,
    SampleKey,
    TrainingBatches,
    build_train_loader,
    build_val_loader,
    epoch_order,
)
from rtdetr.data.preprocess import preprocess
from rtdetr.data.shapes import CATEGORIES, make_shapes
from rtdetr.types import Batch, as_floats


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shapes(tmp_path_factory.mktemp("data") / "shapes", num_train=22, num_val=7, size=96)


def config(root: Path, **changes: Any) -> Config:
    splits = {
        name: SplitConfig(images=str(root / name), annotations=str(root / "annotations" / f"instances_{name}.json"))
        for name in ("train", "val")
    }
    augment = AugmentConfig(batch_sizes=(64, 96, 128))
    values: dict[str, Any] = {"train_batch_size": 4, "num_workers": 0, "image_size": (64, 96)}
    return Config(data=DataConfig(**(splits | values | {"augment": augment} | changes)))


def epoch(loader: DetectionLoader, number: int, start_batch: int = 0) -> list[Batch]:
    loader.set_epoch(number, start_batch)
    return list(loader)


def assert_same(a: Batch, b: Batch) -> None:
    assert a.infos == b.infos and a.targets.counts == b.targets.counts
    assert torch.equal(a.images, b.images)
    assert all(torch.equal(x, y) for x, y in zip(a.targets[:4], b.targets[:4]))


def images(batches: list[Batch]) -> list[int]:
    return [info.image_id for batch in batches for info in batch.infos]


def test_workers_do_not_matter(shapes: Path) -> None:
    alone = build_train_loader(config(shapes), seed=3)
    helped = build_train_loader(config(shapes, num_workers=2), seed=3)
    for number in (0, 1):  # the second epoch meets workers that have lived through the first
        expected, got = epoch(alone, number), epoch(helped, number)
        assert len(expected) == len(got) == len(alone) == 5
        for a, b in zip(expected, got):
            assert_same(a, b)


def test_pasting_turning_and_the_ramp_are_settings(shapes: Path) -> None:
    """Without the other steps an image changes by what a setting does, and by nothing at probability 0."""

    def first(**settings: float) -> LoadedImage:
        still = {f"{step}_prob": 0.0 for step in ("distort", "expand", "crop", "flip")}
        augment = AugmentConfig(batch_sizes=(96,), **still | settings)  # type: ignore[arg-type]
        samples = build_train_loader(config(shapes, augment=augment), seed=3).dataset
        return samples[SampleKey(0, 2, 96, "linear")]

    plain, turned, pasted = first(), first(turn_prob=1.0, turn_after=2), first(paste_prob=1.0)
    assert torch.equal(first(turn_prob=1.0, turn_after=3).image, plain.image)
    zoomed = first(expand_prob=1.0, zoom_ramp=2).image
    assert torch.equal(zoomed, first(expand_prob=1.0).image) and not torch.equal(zoomed, plain.image)
    assert torch.equal(first(expand_prob=1.0, zoom_ramp=10**5).image, plain.image)
    turns = [torch.rot90(plain.image, k, (1, 2)) for k in range(4)]
    assert [torch.equal(turned.image, each) for each in turns].index(True) > 0
    assert len(pasted.boxes) == len(pasted.labels) > len(plain.boxes)
    assert torch.equal(pasted.boxes[: len(plain.boxes)], plain.boxes) and not torch.equal(pasted.image, plain.image)
    again = first(paste_prob=1.0)
    assert torch.equal(pasted.image, again.image) and torch.equal(pasted.boxes, again.boxes)


def test_epochs_replay_from_any_batch(shapes: Path) -> None:
    whole = epoch(build_train_loader(config(shapes), seed=3), 4)
    later = build_train_loader(config(shapes), seed=3)
    epoch(later, 0)
    rest = epoch(later, 4, start_batch=3)
    assert len(rest) == 2
    for a, b in zip(whole[3:], rest):
        assert_same(a, b)


def test_seeds_and_epochs_differ(shapes: Path) -> None:
    loader, other = build_train_loader(config(shapes), seed=3), build_train_loader(config(shapes), seed=4)
    runs = [epoch(loader, 0), epoch(loader, 1), epoch(other, 0)]
    orders = [tuple(images(run)) for run in runs]
    assert len(set(orders)) == 3
    assert len({tuple(tuple(b.images.shape) for b in run) for run in runs}) == 3


def test_each_epoch_and_seed_augments_an_image_anew(shapes: Path) -> None:
    def samples(seed: int, number: int) -> list[torch.Tensor]:
        dataset = build_train_loader(config(shapes), seed).dataset
        return [dataset[SampleKey(i, number, 64, "linear")].image for i in range(12)]

    base = samples(3, 0)
    assert all(torch.equal(a, b) for a, b in zip(base, samples(3, 0)))
    for seed, number in ((3, 1), (4, 0)):  # an image may by chance stay as it is, but not most of them
        assert sum(torch.equal(a, b) for a, b in zip(base, samples(seed, number))) < 4


def test_backends_make_the_same_boxes_and_nearly_the_same_pixels(shapes: Path) -> None:
    cfg = config(shapes)
    fused, plain = build_train_loader(cfg, 3), build_train_loader(dataclasses.replace(cfg, kernels="plain"), 3)
    differ = False
    for a, b in zip(epoch(fused, 0) + epoch(fused, 1), epoch(plain, 0) + epoch(plain, 1), strict=True):
        assert a.infos == b.infos and a.targets.counts == b.targets.counts
        assert all(torch.equal(x, y) for x, y in zip(a.targets[:4], b.targets[:4]))
        difference = (a.images.int() - b.images.int()).abs().float()
        assert difference.mean() < 1.2
        differ = differ or bool(difference.any())
    assert differ  # else one of them is not what it says


def test_a_stream_counts_the_time_that_its_user_waits(shapes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = [100.0]
    monkeypatch.setattr("rtdetr.data.loader.time", SimpleNamespace(perf_counter=lambda: seconds[0]))
    loader = build_train_loader(config(shapes, num_workers=0), seed=3)
    read = loader.source.pixels

    def slowly(index: int) -> Any:
        seconds[0] += 0.5
        return read(index)

    monkeypatch.setattr(loader.source, "pixels", slowly)
    batches = loader.stream(0)
    for number in (1, 2):
        seconds[0] += 7.0  # the user's own time does not count
        batch = next(batches)
        assert loader.seconds_waited == 0.5 * number * len(batch.images)


def test_loading_leaves_the_global_generators_alone(shapes: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    epoch(build_train_loader(config(shapes), seed=3), 0)
    assert torch.equal(torch.rand(3), expected)


def test_batches_are_what_they_say(shapes: Path) -> None:
    sizes = set()
    loader = build_train_loader(config(shapes), seed=0)
    for batch in (each for number in range(4) for each in epoch(loader, number)):
        count, channels, height, width = batch.images.shape
        sizes.add(height)
        assert (count, channels) == (4, 3) and height == width and batch.images.dtype == torch.uint8
        images = as_floats(batch.images)
        assert images.dtype == torch.float32 and images.min() >= 0 and 0.5 < images.max() <= 1
        targets = batch.targets
        assert targets.mask.sum(dim=1).tolist() == list(targets.counts)
        corners = cxcywh_to_xyxy(targets.boxes) * height
        torch.testing.assert_close(corners, targets.boxes_pixel, atol=1e-3, rtol=0)
        assert (targets.boxes_pixel >= 0).all() and (targets.boxes_pixel <= height).all()
        assert targets.labels.max() < len(CATEGORIES)
    assert sizes == {64, 96, 128}
    assert loader.classes.category_ids == tuple(CATEGORIES) and loader.classes.names == tuple(CATEGORIES.values())


def test_processes_share_one_global_batch(shapes: Path) -> None:
    single = epoch(build_train_loader(config(shapes), seed=1), 2)
    shards = [epoch(build_train_loader(config(shapes, train_batch_size=2), 1, rank, 2), 2) for rank in (0, 1)]
    assert len(shards[0]) == len(shards[1]) == len(single)
    for whole, left, right in zip(single, *shards):
        assert whole.infos == left.infos + right.infos


def test_each_process_draws_its_own_size() -> None:
    shards = [list(TrainingBatches(400, 4, (64, 96, 128), ("linear", "cubic"), 0, rank, 2)) for rank in (0, 1)]
    drawn = [[(keys[0].size, keys[0].interpolation) for keys in shard] for shard in shards]
    assert drawn[0] != drawn[1] and len(set(drawn[0])) == 6
    assert all(len({(k.size, k.interpolation) for k in keys}) == 1 for shard in shards for keys in shard)
    seen = [key.image for shard in shards for keys in shard for key in keys]
    assert sorted(seen) == list(range(400))


def test_validation_sees_each_image_once_as_preprocessed(shapes: Path) -> None:
    classes = build_train_loader(config(shapes), seed=0).classes
    for num_workers in (0, 1):
        shards = [list(build_val_loader(config(shapes, num_workers=num_workers), classes, r, 2)) for r in (0, 1)]
        assert sorted(images(shards[0]) + images(shards[1])) == [10 + 3 * i for i in range(7)]
    for batch in shards[0]:
        for image, info, boxes, count in zip(
            batch.images, batch.infos, batch.targets.boxes_pixel, batch.targets.counts
        ):
            with Image.open(shapes / "val" / info.file_name) as stored:
                assert torch.equal(image, preprocess(stored, (64, 96)))
            document = json.loads((shapes / "annotations" / "instances_val.json").read_text())
            own = [a["bbox"] for a in document["annotations"] if a["image_id"] == info.image_id]
            expected = torch.tensor(own, dtype=torch.float32).reshape(-1, 4)
            expected[:, 2:] += expected[:, :2]
            expected[:, 1::2] *= 64 / 96  # images are 96 x 96, the input is 64 high and 96 wide
            torch.testing.assert_close(boxes[:count], expected)
    with pytest.raises(TypeError, match="only a training loader has epochs"):
        build_val_loader(config(shapes), classes).set_epoch(1)


def test_images_without_boxes_make_batches(shapes: Path, tmp_path: Path) -> None:
    path = shapes / "annotations" / "instances_train.json"
    document = json.loads(path.read_text()) | {"annotations": []}
    (tmp_path / "none.json").write_text(json.dumps(document))
    split = SplitConfig(images=str(shapes / "train"), annotations=str(tmp_path / "none.json"))
    for batch in epoch(build_train_loader(config(shapes, train=split), seed=0), 0):
        assert batch.targets.counts == (0, 0, 0, 0) and batch.targets.boxes.shape == (4, 1, 4)
        assert not batch.targets.mask.any() and batch.images.shape[0] == 4
    with pytest.raises(DataError, match=message("no image left")):
        build_train_loader(config(shapes, train=split, drop_images_without_boxes=True), seed=0)


@pytest.mark.parametrize(
    ("num_workers", "name"), [(0, "page.jpg"), (0, "header.png"), (1, "bomb.png"), (1, "chunk.png")]
)
def test_a_broken_image_is_named_and_replaced_by_the_next_one(tmp_path: Path, num_workers: int, name: str) -> None:
    folder = make_shapes(tmp_path / "shapes", num_train=4, num_val=1, size=96)
    (folder / "train" / "000002.jpg").write_bytes(BAD[name][0])
    loader = build_train_loader(config(folder, num_workers=num_workers), seed=0)
    for number in range(4):
        order = epoch_order(0, number, 4).tolist()
        (batch,) = epoch(loader, number)
        (sentence,) = batch.unreadable
        assert sentence.startswith(f"{folder}") and message("not an image", "000002.jpg").search(sentence)
        assert "\n" not in sentence
        names = [info.file_name for info in batch.infos]
        place = next(at for at, index in enumerate(order) if loader.source.info(index).file_name == "000002.jpg")
        assert names[place] == loader.source.info(order[(place + 1) % 4]).file_name and "000002.jpg" not in names


def test_images_that_are_all_broken_are_one_sentence(tmp_path: Path) -> None:
    folder = make_shapes(tmp_path / "shapes", num_train=4, num_val=1, size=96)
    for each in (folder / "train").iterdir():
        each.write_bytes(b"")
    for num_workers in (0, 1):
        with pytest.raises(DataError) as caught:
            epoch(build_train_loader(config(folder, num_workers=num_workers), seed=0), 0)
        assert str(caught.value).startswith(f"{folder}") and "\n" not in str(caught.value)
        assert str(caught.value).endswith("; nor can the 3 images tried instead; `rtdetr doctor` lists them all")


def test_a_broken_image_ends_an_evaluation(tmp_path: Path) -> None:
    folder = make_shapes(tmp_path / "shapes", num_train=4, num_val=2, size=96)
    broken = sorted((folder / "val").iterdir())[0]
    broken.write_bytes(b"")
    classes = build_train_loader(config(folder), seed=0).classes
    with pytest.raises(DataError, match=rf"{broken.name}: cannot be read as an image"):
        list(build_val_loader(config(folder), classes))


def test_the_largest_image_is_a_setting(shapes: Path) -> None:
    small = config(shapes, max_megapixels=0.009)
    classes = build_train_loader(config(shapes), seed=0).classes
    for loader in (build_train_loader(small, seed=0), build_val_loader(small, classes)):
        with pytest.raises(DataError, match=r"larger than data.max_megapixels=0.009 \(96 x 96 pixels\)"):
            next(iter(loader))


def test_workers_leave_ctrl_c_to_the_main_process(shapes: Path) -> None:
    loader = build_train_loader(config(shapes, num_workers=1), seed=3)
    loader.set_epoch(0)
    batches = iter(loader)
    got = [next(batches)]
    for worker in multiprocessing.active_children():
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGINT)
    got += list(batches)
    for a, b in zip(got, epoch(build_train_loader(config(shapes), seed=3), 0), strict=True):
        assert_same(a, b)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"train": SplitConfig()}, message("empty", "data.train.annotations", "data=")),
        ({"train_batch_size": 23}, message("no full batch", "22 images", "23")),
    ],
)
def test_settings_that_cannot_work(shapes: Path, changes: dict[str, Any], sentence: re.Pattern[str]) -> None:
    with pytest.raises(DataError, match=sentence):
        build_train_loader(config(shapes, **changes), seed=0)


def test_an_epoch_has_no_batch_after_its_last(shapes: Path) -> None:
    with pytest.raises(ValueError, match=r"start_batch must be in 0..5, got 6"):
        build_train_loader(config(shapes), seed=0).set_epoch(0, start_batch=6)


def test_config_is_not_needed_to_be_square(shapes: Path) -> None:
    cfg = config(shapes)
    classes = build_train_loader(cfg, seed=0).classes
    assert next(iter(build_val_loader(cfg, classes))).images.shape == (4, 3, 64, 96)


def copied_by_collecting() -> float:
    """MiB of memory whose pages a garbage collection was the first to write to since they were shared."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    gc.collect()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize() / 2**20


def test_garbage_collectors_do_not_copy_the_memory_that_workers_share(
    shapes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would copy some 90 MB of Python objects, at a time that nobody knows."""
    loader = build_train_loader(config(shapes, num_workers=1), seed=3)
    read = loader.source.pixels

    def collecting(index: int) -> Any:
        copied = copied_by_collecting()
        assert copied < 20, copied
        return read(index)

    monkeypatch.setattr(loader.source, "pixels", collecting)
    batches = loader.stream(0)
    next(batches)
    assert copied_by_collecting() < 20
    loader.close()
