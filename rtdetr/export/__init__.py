"""A file that runs elsewhere, and the proof that it agrees with the model it came from."""

from rtdetr.export.build import Exported, ExportFailed, check_file, export_model
from rtdetr.export.certificate import Certificate
from rtdetr.export.targets import FORMATS

__all__ = ["FORMATS", "Certificate", "ExportFailed", "Exported", "check_file", "export_model"]
