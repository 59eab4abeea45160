"""What is wrong with a network, or what a conversion changed: measured, drawn and put on one page."""

from retrofit.diagnose.diagnosis import Diagnosis, DiagnosisOptions, Layer, Unlabelled, diagnose, labelled_batches
from retrofit.diagnose.report_folder import check_folder, write_report
from retrofit.diagnose.summary import sentences

__all__ = [
    "Diagnosis",
    "DiagnosisOptions",
    "Layer",
    "Unlabelled",
    "check_folder",
    "diagnose",
    "labelled_batches",
    "sentences",
    "write_report",
]
