"""What is wrong with a network, or what a conversion changed: measured, drawn and put on one page."""

from retrofit.diagnose.diagnosis import Diagnosis, DiagnosisOptions, diagnose, labelled_batches
from retrofit.diagnose.report_folder import check_folder, sentences, write_report

__all__ = ["Diagnosis", "DiagnosisOptions", "check_folder", "diagnose", "labelled_batches", "sentences", "write_report"]
