"""Reference cases of aoq."""

from itm_utils.models import aoq

compare_case = aoq.compare_case
