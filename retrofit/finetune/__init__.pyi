from .optimization import parameter_groups as parameter_groups
from .strength_schedule import StrengthSchedule as StrengthSchedule
