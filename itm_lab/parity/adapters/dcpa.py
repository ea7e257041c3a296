"""Reference cases of dcpa."""

from itm_utils.models import dcpa

NAMES = dcpa.DCPA.PUBLIC_NAMES
load = dcpa.DCPA.from_public
compare_case = dcpa.compare_case
