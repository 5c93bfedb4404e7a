# make demo   sets up .venv, trains a small detector on generated images, evaluates it, draws detections
# make demo-photos   the same on photographs of blood cells that the repository has (examples/blood_cells), with a report
# make test   formatter, linter, type checker, tests
# make test-all that, tests that take minutes, every mutant, the documentation and, with a GPU, its tests
# make docs   the documentation as a site in site/, every link checked
# make figures the images of the documentation, from the run of make demo; the screenshots need Chromium
# make browser the example in the browser, tested with onnxruntime-web, which npm fetches, and Chromium
# make wheels a wheel for CPUs and one for GPUs, in dist/, each tried away from the clone
#
# An active environment (venv or conda) that has torch is used as it is; else .venv is made with PYTHON.

PYTHON ?= python3
DEMO ?= runs/demo
DEMO_UPDATE ?=  # config values: make demo DEMO=runs/seed1 DEMO_UPDATE=train.seed=1
PHOTOS ?= runs/demo-photos
CELLS := examples/blood_cells
# The small preset, and without a GPU, where it takes seconds a step, the nano model.
PHOTOS_CONFIG = $(shell $(PY) -c "import torch; print('rtdetrv3_r18vd_small' if torch.cuda.is_available() else \
	'rtdetrv3_nano_shapes -u train.epochs=30 train.eval_every=5')")

ACTIVE := $(or $(VIRTUAL_ENV),$(CONDA_PREFIX))
FIND_TORCH := import importlib.util as u, sys; sys.exit(u.find_spec('torch') is None)
HAS_TORCH := $(if $(ACTIVE),$(shell "$(ACTIVE)/bin/python" -c "$(FIND_TORCH)" 2>/dev/null && echo yes))
BIN := $(if $(HAS_TORCH),$(ACTIVE),.venv)/bin
PY := $(BIN)/python
READY := $(BIN)/.rtdetr-ready
READY_DEV := $(BIN)/.rtdetr-ready-dev

.PHONY: demo demo-photos test test-all browser docs figures lint mutants setup wheels clean

setup: $(READY)

.venv/bin/python:
	$(PYTHON) -m venv .venv

$(READY): pyproject.toml setup.py $(wildcard rtdetr/ops/csrc/* rtdetr/ops/csrc/*/*) | $(PY)
	$(PY) -c "import torch, torchvision" 2>/dev/null || $(PY) -m pip install torch torchvision
	$(PY) -m pip install "setuptools>=77" wheel ninja
	$(PY) -m pip install --no-build-isolation -e .
	touch $@

$(READY_DEV): $(READY)
	$(PY) -m pip install "rtdetr[dev]"  # of the clone, installed above: nothing is compiled again
	touch $@

demo: $(READY)
	$(PY) -m rtdetr.data.shapes datasets/shapes
	$(PY) tools/train.py -c configs/rtdetrv3_nano_shapes.yml --output-dir $(DEMO) --overwrite $(if $(DEMO_UPDATE),-u $(DEMO_UPDATE))
	$(PY) tools/eval.py -w $(DEMO)/best.pth
	$(PY) tools/demo.py -w $(DEMO)/best.pth datasets/shapes/val/*0.* --output-dir $(DEMO)/detections --overwrite
	$(PY) -m rtdetr.inference.recall_check $(DEMO)/detections/results.json datasets/shapes/annotations/instances_val.json
	@echo "Checkpoint, metrics.csv and curves.png: $(DEMO)   images with boxes: $(DEMO)/detections"

demo-photos: $(READY)
	$(PY) tools/train.py $(CELLS) -c $(PHOTOS_CONFIG) --output-dir $(PHOTOS) --overwrite
	$(PY) tools/eval.py -w $(PHOTOS)/best.pth --report $(PHOTOS)/report --overwrite
	$(PY) tools/demo.py -w $(PHOTOS)/best.pth $(CELLS)/val/*0.jpg --output-dir $(PHOTOS)/detections --overwrite
	$(PY) -m rtdetr.inference.recall_check $(PHOTOS)/detections/results.json $(CELLS)/annotations/instances_val.json
	@echo "Checkpoint, metrics.csv, curves.png and report/report.html: $(PHOTOS)   images with boxes: $(PHOTOS)/detections"

lint: $(READY_DEV)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: lint
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -m "not gpu and not heavy" -n 2 --dist loadfile --no-loadscope-reorder

test-all: test mutants docs
	$(PY) -m pytest -q -m "gpu or heavy"

browser: $(READY_DEV)
	npm install --silent --no-save --no-package-lock --ignore-scripts --prefix build/browser onnxruntime-web@1
	RTDETR_ORT_WEB=$(CURDIR)/build/browser/node_modules/onnxruntime-web $(PY) -m pytest -q -rs tests/export/test_export_examples.py -k browser

docs: $(READY_DEV)
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

figures: $(READY_DEV)
	$(PY) tools/figures.py $(DEMO)

mutants: $(READY_DEV)
	$(PY) tests/mutants.py

wheels: $(READY)
	$(PY) tools/wheels.py

clean:
	rm -rf build site *.egg-info rtdetr/ops/*.so rtdetr/ops/_build.json $(READY) $(READY_DEV)
