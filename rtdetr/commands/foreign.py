"""Words of other detectors, and what they are called here: commands and options. Keys: rtdetr/config_keys.py."""

from __future__ import annotations

COMMANDS = {
    "detect": "predict",
    "demo": "predict",
    "infer": "predict",
    "inference": "predict",
    "track": "predict --track",
    "val": "eval",
    "validate": "eval",
    "test": "eval",
    "fit": "train",
    "finetune": "train -t WEIGHTS",
    "resume": "train -r RUN/last.pth",
    "check": "doctor",
    "bench": "benchmark",
    "deploy": "export",
}
OPTIONS = {
    "--conf": "--threshold",
    "--conf-thres": "--threshold",
    "--confidence": "--threshold",
    "--iou": "nothing: there is no NMS",
    "--epochs": "-u train.epochs=N",
    "--batch": "-u data.train_batch_size=N in a training, --batch-size where a command detects",
    "--lr": "-u optimizer.lr=X",
    "--workers": "-u data.num_workers=N",
    "--imgsz": "-u data.image_size=[H,W], and data.augment.batch_sizes=[N] in a training",
    "--img-size": "-u data.image_size=[H,W], and data.augment.batch_sizes=[N] in a training",
    "--num-classes": "nothing: classes come from the annotations",
    "--save-txt": "--format yolo",
    "--save-crop": "--crops",
    "--vid-stride": "--every N",
    "--source": "SOURCE, without an option before it",
    "--model": "-w FILE, or -c CONFIG in a training",
    "--checkpoint": "-w FILE",
    "--pretrained": "-t WEIGHTS",
    "--amp": "-u train.precision=auto, which is the default",
    "--project": "--output-dir",
    "--gpus": "torchrun --nproc_per_node=N tools/train.py ...",
}
