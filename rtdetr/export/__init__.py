"""Exports a model to a file that runs elsewhere, and certifies that both agree."""

from rtdetr.export.build import Exported, ExportFailed, check_file, export_model
from rtdetr.export.certificate import Certificate
from rtdetr.export.targets import FORMATS

__all__ = ["FORMATS", "Certificate", "ExportFailed", "Exported", "check_file", "export_model"]
