"""What is wrong with a network, or what a conversion changed: measured, drawn and put on one page."""

from retrofit.diagnose.measure import Diagnosis, Layer, Options, Unlabelled, diagnose
from retrofit.diagnose.report import check_folder, write_report
from retrofit.diagnose.summary import sentences

__all__ = ["Diagnosis", "Layer", "Options", "Unlabelled", "check_folder", "diagnose", "sentences", "write_report"]
